"""``shard_tools repair``: what it saves of damaged tars, what it says of the rest."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from streaming import StreamingDataset
from streaming.errors import TarError
from streaming.shards.tar.fast import parse_chunk
from streaming.storage import Storage
from tests.support.sets.tars import tar_bytes

KEYS = tuple(f"{number:03d}" for number in range(12))


def tar(*keys: str, links: tuple[tuple[str, str], ...] = (), form: int = tarfile.USTAR_FORMAT) -> bytes:
    files = [(f"{key}.{name}", data) for key in keys for name, data in (("txt", key.encode() * 300), ("cls", b"1"))]
    return tar_bytes(files, form, links=links)


WHOLE = tar(*KEYS)
RECORD = int(parse_chunk(WHOLE).record_starts[1])


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def repaired(folder: Path, data: bytes, *options: str) -> tuple[dict[str, object], list[str]]:
    """The report on one shard of these bytes, and the keys of what was written."""
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "a.tar").write_bytes(data)
    shutil.rmtree(folder / "out", ignore_errors=True)  # of another shard: it is not replaced
    result = run("repair", folder / "in", "--to", folder / "out", "--json", *options)
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["ok"] else 1)
    (shard,) = report["shards"]
    if not report["ok"]:
        return shard, []
    dataset = StreamingDataset(folder / "out")
    samples = [dataset[number] for number in range(len(dataset))]
    assert all(sample["txt"] == str(sample["__key__"]).removesuffix("-link") * 300 for sample in samples)
    assert run("verify", folder / "out").exit_code == 0
    return shard, [str(sample["__key__"]) for sample in samples]


@pytest.mark.parametrize(
    ("data", "mended"),
    [
        (WHOLE, []),
        (WHOLE[: RECORD * 12], ["no end-of-archive mark"]),
        (tar(*KEYS[:5]) + tar(*KEYS[5:]), ["joined by cat"]),
        (tar(*KEYS, form=tarfile.PAX_FORMAT)[: -10 * 512], []),
    ],
    ids=["whole", "no-mark", "joined", "short-padding"],
)
def test_what_costs_no_sample_is_mended(tmp_path: Path, data: bytes, mended: list[str]) -> None:
    shard, keys = repaired(tmp_path, data)
    assert keys == list(KEYS)
    assert shard["lost"] == []
    assert len(shard["mended"]) == len(mended)  # type: ignore[arg-type]
    assert all(text in str(shard["mended"]) for text in mended)


def test_the_reader_names_the_cure(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(WHOLE[: RECORD * 12])
    with pytest.raises(TarError, match=r"end-of-archive mark.*`shard_tools repair URL --to TARGET`"):
        StreamingDataset(tmp_path)
    linked = tar(*KEYS[:2], links=(("000-link.txt", "000.txt"), ("000-link.cls", "000.cls")))
    shard, keys = repaired(tmp_path, linked)
    assert (shard["num_links"], keys) == (2, ["000", "001", "000-link"])


def test_a_cut_member_costs_its_sample_alone(tmp_path: Path) -> None:
    cut = WHOLE[: RECORD * 7 + 700]
    shard, keys = repaired(tmp_path, cut)
    assert keys == []  # not without being asked
    assert "not written; --drop-damaged writes the 7 others" in run(
        "repair", tmp_path / "in", "--to", tmp_path / "out"
    ).stdout.replace("\n", " ")
    shard, keys = repaired(tmp_path, cut, "--drop-damaged")
    assert keys == list(KEYS[:7])
    assert shard["lost_keys"] == ["007"]
    assert shard["exact"] is False


def test_a_damaged_header_costs_its_sample_alone(tmp_path: Path) -> None:
    data = bytearray(WHOLE)
    data[RECORD * 3 + 5] ^= 0xFF  # in the name of the first member of the fourth sample: its size still holds
    data[RECORD * 8 + 126] ^= 0xFF  # in the size
    shard, keys = repaired(tmp_path, bytes(data), "--drop-damaged")
    assert keys == [key for key in KEYS if key not in {"003", "008"}]
    assert shard["lost_keys"] == ["003", "008"]


def test_a_tar_in_a_member_is_not_taken_for_members(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in (("a.txt", b"a" * 900), ("b.tar", tar(*KEYS)), ("c.txt", b"c" * 900)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    data = bytearray(out.getvalue())
    data[1536] ^= 0xFF  # the name of the tar's header
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(data)
    assert run("repair", tmp_path / "in", "--to", tmp_path / "out", "--drop-damaged").exit_code == 0
    dataset = StreamingDataset(tmp_path / "out")
    assert [dataset[number]["__key__"] for number in range(len(dataset))] == ["a", "c"]


def test_an_index_tells_damaged_bytes_and_all_that_is_lost(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(WHOLE)
    assert run("index", tmp_path / "in").exit_code == 0
    shard, keys = repaired(tmp_path, WHOLE[: RECORD * 12])
    assert keys == list(KEYS)
    shard, keys = repaired(tmp_path, WHOLE[: RECORD * 6])  # at a border: only the index knows
    assert (keys, shard["target"]) == ([], None)
    shard, keys = repaired(tmp_path, WHOLE[: RECORD * 6], "--drop-damaged")
    assert keys == list(KEYS[:6])
    assert (shard["exact"], shard["lost_keys"]) == (True, list(KEYS[6:]))
    damaged = bytearray(WHOLE)
    damaged[600] ^= 1  # in the bytes of a member, where no header tells
    shard, keys = repaired(tmp_path, bytes(damaged))
    assert (shard["target"], shard["lost_keys"]) == (None, list(KEYS))  # one checksum covers them all


def test_folders_are_kept(tmp_path: Path) -> None:
    """Shards of two folders that have one name were written over each other."""
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "0.tar").write_bytes(tar(name))
    assert run("repair", tmp_path / "in", "--to", tmp_path / "out").exit_code == 0
    dataset = StreamingDataset(tmp_path / "out")
    assert sorted(dataset[number]["__key__"] for number in range(len(dataset))) == ["a", "b"]
    told = run("repair", tmp_path / "in", "--to", tmp_path / "in")  # where they lie themselves
    assert "same place" in told.stderr
    assert (tmp_path / "in" / "a" / "0.tar").read_bytes() == tar("a")


def test_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"")
    assert "gunzip" in run("repair", tmp_path / "a.tar.gz", "--to", tmp_path / "out").stderr
    (tmp_path / "a.tar").write_bytes(WHOLE)
    assert "same place" in run("repair", tmp_path / "a.tar", "--to", tmp_path).stderr
    assert Storage().exists(str(tmp_path / "a.tar"))
