"""What macOS and network drives leave beside files is passed over and counted by everything that reads a tar."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError
from tests.support.sets.tars import write_tar

SIDE_FILES = [
    "t/._a.txt", "t/.DS_Store", ".DS_Store", "._t", "t/@eaDir/a.txt/SYNOPHOTO_THUMB_M.jpg", "@eaDir/x.txt",
    "__MACOSX/t/._a.txt", "t/__MACOSX/b.txt", "t/.AppleDouble/a.txt", "t/u/.hidden.txt", "t/README",
]  # fmt: skip
SAMPLES = {f"t/{name}": f"text of {name}".encode() for name in "abcdefgh"}
MIXED = [f"{key}.txt" for key in SAMPLES]
for _place, _name in enumerate(SIDE_FILES):  # before, between and after samples
    MIXED.insert(2 * _place, _name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, of which the second holds side files alone beside one sample."""
    (tmp_path / "set").mkdir()
    write_tar(tmp_path / "set" / "0.tar", [(name, SAMPLES.get(name.removesuffix(".txt"), b"x")) for name in MIXED])
    write_tar(tmp_path / "set" / "1.tar", [("t/._z.txt", b"x"), ("z.txt", b"of z"), ("t/._z2.txt", b"x")])
    return tmp_path / "set"


def run(*arguments: object) -> tuple[str, str]:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def texts_of(dataset: StreamingDataset) -> dict[str, str]:
    return {one["__key__"]: one["txt"] for one in dataset}


EXPECTED = {key: body.decode() for key, body in SAMPLES.items()} | {"z": "of z"}
NUM_SIDE = len(SIDE_FILES) + 2


def test_the_index_passes_over_side_files_and_counts_them(folder: Path) -> None:
    report: dict[str, Any] = json.loads(run("index", folder, "--json")[0])
    assert (report["num_samples"], report["num_passed_over"]) == (len(EXPECTED), NUM_SIDE)
    assert len(report["first_passed_over"]) == 3
    assert texts_of(StreamingDataset(f"{folder}/")) == EXPECTED
    assert StreamingDataset(f"{folder}/")[2]["__key__"] == "t/c"
    assert json.loads(run("index", folder, "--json")[0])["num_passed_over"] == 0  # nothing was read
    said = f"skipped: {NUM_SIDE} files of no sample, first "
    assert said in run("index", folder, "--force")[1]
    assert "t/._a.txt (a dot-file, which has no key)" in run("index", folder, "--force")[1]
    for command in (("verify", folder), ("verify", folder, "--decode")):
        shown, told = run(*command)
        assert said in told
        assert "all as the index says" in shown
    assert json.loads(run("verify", folder, "--json")[0])["num_passed_over"] == NUM_SIDE
    with DataLoader(StreamingDataset(f"{folder}/"), batch_size=3, num_workers=0) as loader:
        rows = [key for batch in loader for key in batch["__key__"]]
    assert sorted(rows) == sorted(EXPECTED)


def test_sets_without_an_index_pass_over_side_files_and_say_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert texts_of(StreamingDataset(f"{folder}/")) == EXPECTED
    told = [one.getMessage() for one in caplog.records]
    assert any(f"{len(SIDE_FILES)} files belong to no sample and are passed over" in one for one in told)
    assert any("2 files belong to no sample and are passed over" in one for one in told)


def test_compressed_sets_pass_over_side_files_and_say_so_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in [*folder.glob("*.tar")]:
        file.with_suffix(".tar.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    with (
        caplog.at_level(logging.WARNING),
        DataLoader(StreamingDataset(f"{folder}/", shuffle=False), batch_size=1, num_threads=0, epoch_size=36) as loader,
    ):
        rows = {key for batch in loader for key in batch["__key__"]}
    assert rows == {*EXPECTED}
    assert sum("files belong to no sample and are passed over" in one.getMessage() for one in caplog.records) == 1


def test_convert_passes_over_side_files_of_tars_folders_and_lists_them(folder: Path, tmp_path: Path) -> None:
    report: dict[str, Any] = json.loads(run("convert", folder, tmp_path / "tars", "--json")[0])
    assert report["num_samples"] == len(EXPECTED)
    assert {one["path"] for one in report["skipped"]} == {
        *(f"0.tar:{name}" for name in SIDE_FILES), "1.tar:t/._z.txt", "1.tar:t/._z2.txt"
    }  # fmt: skip
    assert texts_of(StreamingDataset(f"{tmp_path}/tars/")) == EXPECTED
    files = tmp_path / "files"
    for name in MIXED:
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_bytes(SAMPLES.get(name.removesuffix(".txt"), b"x"))
    found: dict[str, Any] = json.loads(run("convert", files, tmp_path / "out", "--from", "files", "--json")[0])
    assert found["num_samples"] == len(SAMPLES)
    assert {one["path"] for one in found["skipped"]} == {*SIDE_FILES}


def test_the_writer_makes_no_sample_that_readers_pass_over(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar") as writer:
        for key in ("t/@eaDir/a", "__MACOSX/a", "t/.AppleDouble/a", "t/.a"):
            with pytest.raises(ConfigError, match=f"sample key '{key}': "):
                writer.write({"__key__": key, "txt": "x"})
        writer.write({"__key__": "my@eaDir/a", "txt": "x"})
    assert texts_of(StreamingDataset(f"{tmp_path}/")) == {"my@eaDir/a": "x"}
