"""``export``: what other programs read of a set is what is in it; what they cannot read is refused by name."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import datasets as hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.change.export.job import ExportOptions
from shard_tools.change.export.run import FORMATS, export
from shard_tools.change.sets.copy import copy
from shard_tools.cli import cli
from shard_tools.make.convert import TargetNotEmptyError
from streaming.errors import ConfigError, DataError
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name

pytestmark = pytest.mark.thorough

COUNT = {"train": 25, "val": 7}


def sample(split: str, number: int) -> dict[str, Any]:
    out = io.BytesIO()
    Image.new("RGB", (16 + number, 8), (number, 0, 0)).save(out, "JPEG")
    there = {"jpg": out.getvalue(), "cls": number % 3, "json": {"text": f"ä {number}"}, "bin": bytes(200_000 + number)}
    return {"__key__": f"{split}/{number:03d}", **there}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 samples in 4 shards, in folders of two splits; one has no class."""
    folder = tmp_path_factory.mktemp("set")
    for split, count in COUNT.items():
        with ShardWriter(f"{folder}/{split}/{{:03d}}.tar", max_samples=9, columns={"n": int_of}) as writer:
            for number in range(count):
                writer.write(sample(split, number))
    return folder


def int_of(sample: Any) -> int:
    return int(sample["__key__"][-3:])


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    copy(str(sound), str(tmp_path / "data"))
    return tmp_path / "data"


def tar_members(folder: Path) -> dict[str, list[tuple[str, str, int, int, int, bytes]]]:
    """By shard: key, field, offset of the member and of its data, size, content."""
    found = {}
    for path in sorted(folder.rglob("*.tar")):
        with tarfile.open(path) as tar:
            rows = []
            for member in tar:
                key, _, name = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                rows.append((key, name, member.offset, member.offset_data, member.size, content.read()))
        found[str(path.relative_to(folder))] = rows
    return found


def test_energon_finds_each_sample(data: Path) -> None:
    report = export([f"{data}/"], f"{data}/", to="energon")
    members = tar_members(data)
    assert (report.num_samples, report.num_bytes, report.reads_tars) == (sum(COUNT.values()), 0, True)
    info = json.loads((data / ".nv-meta/.info.json").read_text())
    assert info == yaml.safe_load((data / ".nv-meta/.info.yaml").read_text())
    assert info["shard_counts"] == {name: len({row[0] for row in rows}) for name, rows in members.items()}
    splits = yaml.safe_load((data / ".nv-meta/split.yaml").read_text())
    assert splits == {
        "split_parts": {"train": [*members][:3], "val": [*members][3:], "test": []}, "exclude": [],
    }  # fmt: skip
    assert yaml.safe_load((data / ".nv-meta/dataset.yaml").read_text())["__class__"] == "CrudeWebdataset"
    parts, samples = [], []
    for number, (name, rows) in enumerate(members.items()):
        firsts = [row[2] for i, row in enumerate(rows) if i == 0 or rows[i - 1][0] != row[0]]
        ends = [*firsts[1:], (rows[-1][3] + rows[-1][4] + 511) // 512 * 512]
        assert np.fromfile(data / f"{name}.idx", "<u8").tolist() == [firsts[0], *ends]
        keys = list(dict.fromkeys(row[0] for row in rows))
        samples += [(number, key, i, firsts[i], ends[i] - firsts[i]) for i, key in enumerate(keys)]
        parts += [(number, keys.index(key), field, start, size) for key, field, _, start, size, _ in rows]
    with sqlite3.connect(data / ".nv-meta/index.sqlite") as database:
        assert sorted(database.execute("SELECT * FROM samples")) == samples
        assert sorted(database.execute("SELECT * FROM sample_parts")) == sorted(parts)


def test_dali_finds_each_field_also_elsewhere(sound: Path, tmp_path: Path) -> None:
    export([f"{sound}/"], str(tmp_path / "index"), to="dali")
    for name, rows in tar_members(sound).items():
        version, *lines = (tmp_path / "index" / f"{name[:-4]}.idx").read_text().splitlines()
        assert version == f"v1.2 {len(lines)}"
        words = " ".join(lines).split(" ")
        found = [tuple(words[i : i + 4]) for i in range(0, len(words), 4)]
        assert found == [(field, str(start), str(size), f"{key}.{field}") for key, field, _, start, size, _ in rows]


def test_wids_names_shards_beside_it_and_far_away(data: Path, tmp_path: Path) -> None:
    export([f"{data}/"], f"{data}/", to="wids")
    export([f"{data}/train/"], str(tmp_path / "lists"), to="wids")
    beside = json.loads((data / "wids-val.json").read_text())
    assert [(one["url"], one["nsamples"]) for one in beside["shardlist"]] == [("val/000.tar", COUNT["val"])]
    away = json.loads((tmp_path / "lists/wids.json").read_text())
    assert away["wids_version"] == 1
    assert [one["url"] for one in away["shardlist"]] == [f"{data}/train/{number:03d}.tar" for number in range(3)]
    assert [one["filesize"] for one in away["shardlist"]] == [
        Path(one["url"]).stat().st_size for one in away["shardlist"]
    ]


@pytest.mark.parametrize("to", ["card", "hf"])
def test_datasets_reads_the_same_samples(to: str, data: Path, tmp_path: Path) -> None:
    target = data if to == "card" else tmp_path / "out"
    export([f"{data}/"], str(target), to=to)
    found = hub.load_dataset(str(target), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in found.items()} == {"train": COUNT["train"], "validation": COUNT["val"]}
    for name, split in (("train", "train"), ("validation", "val")):
        rows = found[name].cast_column("jpg", hub.Image(decode=False))
        assert isinstance(found[name].features["jpg"], hub.Image)
        for number, row in enumerate(rows):
            wanted = sample(split, number)
            assert (row["__key__"], row["jpg"]["bytes"]) == (wanted["__key__"], wanted["jpg"])
            told = row["json"] if isinstance(row["json"], dict) else json.loads(row["json"])
            assert (told, row["bin"]) == (wanted["json"], wanted["bin"])
            assert int(row["cls"]) == wanted["cls"]


def test_card_warns_of_samples_that_datasets_will_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ShardWriter(f"{tmp_path}/{{:03d}}.tar") as writer:
        writer.write({"__key__": "a", "txt": "one", "cls": 1})
        writer.write({"__key__": "b", "txt": "two"})
    export([f"{tmp_path}/"], str(tmp_path), to="card")
    assert "1 of 2 samples have the field 'cls'" in caplog.text


def test_parquet_keeps_what_is_asked_for(sound: Path, tmp_path: Path) -> None:
    options = ExportOptions(where="n >= 5", fields=("cls", "json", "bin"))
    report = export([f"{sound}/train/"], str(tmp_path / "out"), to="parquet", options=options)
    assert report.files == ("000.parquet", "001.parquet", "002.parquet")
    assert report.num_samples == COUNT["train"] - 5
    table = pa.concat_tables([pq.read_table(tmp_path / "out" / name) for name in report.files])
    assert table.schema.names == ["__key__", "bin", "cls", "json", "n"]
    for number, row in enumerate(table.to_pylist(), 5):
        wanted = sample("train", number)
        assert (row["__key__"], row["bin"], row["cls"], row["n"]) == (
            wanted["__key__"], wanted["bin"], wanted["cls"], number,
        )  # fmt: skip
        assert json.loads(row["json"]) == wanted["json"]


def test_goes_on_where_it_was_and_refuses_others(sound: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = export([f"{sound}/"], str(target), to="hf")
    content = {name: (target / name).read_bytes() for name in first.files}
    (target / first.files[1]).unlink()
    again = export([f"{sound}/"], str(target), to="hf")
    assert (again.num_written, again.files) == (1, first.files)
    assert {name: (target / name).read_bytes() for name in first.files} == content
    (target / first.files[0]).write_bytes(content[first.files[0]][:-10])
    for options in (ExportOptions(), ExportOptions(fields=("cls",))):
        with pytest.raises(ConfigError, match="made from other samples or options"):
            export([f"{sound}/"], str(target), to="hf", options=options)
    export([f"{sound}/"], str(target), to="hf", options=ExportOptions(overwrite=True))
    assert {name: (target / name).read_bytes() for name in first.files} == content


@pytest.mark.parametrize("to", ["energon", "dali", "wids", "card"])
def test_metadata_is_written_once_and_others_are_kept(to: str, data: Path) -> None:
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    first = export([f"{data}/"], str(data), to=to)
    assert first.num_written == len(first.files)
    assert export([f"{data}/"], str(data), to=to).num_written == 0
    assert {path: path.read_bytes() for path in before} == before
    (data / first.files[-1]).write_text("mine")
    with pytest.raises(TargetNotEmptyError, match="other content"):
        export([f"{data}/"], str(data), to=to)
    assert (data / first.files[-1]).read_text() == "mine"
    assert export([f"{data}/"], str(data), to=to, options=ExportOptions(overwrite=True)).num_written == 1


@pytest.mark.parametrize("to", [name for name, chosen in FORMATS.items() if not chosen.takes])
@pytest.mark.parametrize("options", [{"where": "n > 3"}, {"view": "some"}, {"fields": ("cls",)}, {"columns": ("n",)}])
def test_tars_are_read_whole(to: str, options: dict[str, Any], data: Path) -> None:
    with pytest.raises(ConfigError, match="writes about the tars as they are"):
        export([f"{data}/"], str(data), to=to, options=ExportOptions(**options))


@pytest.mark.parametrize("to", ["energon", "card"])
def test_shards_elsewhere(to: str, sound: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard_tools copy"):
        export([f"{sound}/"], str(tmp_path), to=to)
    assert not list(tmp_path.iterdir())


def test_splits_by_pattern(data: Path) -> None:
    options = ExportOptions(splits=(("val", "train/000.tar"), ("train", "*")))
    export([f"{data}/"], str(data), to="energon", options=options)
    parts = yaml.safe_load((data / ".nv-meta/split.yaml").read_text())["split_parts"]
    assert parts == {"train": ["train/001.tar", "train/002.tar", "val/000.tar"], "val": ["train/000.tar"], "test": []}
    for splits, message in (
        ((("train", "train/*"),), "val/000.tar fits no pattern"),
        ((("train", "*"), ("val", "valid/*")), "no shard is left for 'valid/*'"),
        ((("held-out", "*"),), "Energon knows train, val, test"),
    ):
        with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
            export([f"{data}/"], str(data), to="energon", options=ExportOptions(splits=splits, overwrite=True))


@pytest.mark.parametrize(
    ("to", "keys", "message"),
    [("energon", ("a", "a"), "a key that an earlier sample has"), ("dali", ("a b", "c"), "has a space in a name")],
)
def test_what_the_program_cannot_read(to: str, keys: tuple[str, str], message: str, tmp_path: Path) -> None:
    for number, key in enumerate(keys):
        with ShardWriter(f"{tmp_path}/{number}/{{:03d}}.tar") as writer:
            writer.write({"__key__": key, "txt": "one"})
    with pytest.raises(ConfigError, match=message):
        export([f"{tmp_path}/"], str(tmp_path), to=to)
    assert not (tmp_path / ".nv-meta/.info.json").exists()


@pytest.mark.parametrize(("field", "value", "what"), [("txt", b"\xff\xfe", "UTF-8"), ("cls", b"cat", "a whole number")])
def test_a_field_that_is_not_what_its_name_says(field: str, value: bytes, what: str, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/set/{{:03d}}.tar") as writer:
        writer.write({"__key__": "a", field: value, "bin": b"x"})
    with pytest.raises(DataError, match=f"sample 'a', field '{field}': expected {what}"):
        export([f"{tmp_path}/set/"], str(tmp_path / "out"), to="parquet")
    assert not list(tmp_path.glob("out/*.parquet"))
    export([f"{tmp_path}/set/"], str(tmp_path / "out"), to="parquet", options=ExportOptions(fields=("bin",)))


def test_damage_is_told_and_no_file_stands_for_it(data: Path, tmp_path: Path) -> None:
    path = data / "train/001.tar"
    content = bytearray(path.read_bytes())
    content[300_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train/001\.tar"):
        export([f"{data}/"], str(tmp_path / "out"), to="parquet")
    assert not (tmp_path / "out/train/001.parquet").exists()


def test_in_a_bucket_by_the_command(sound: Path, mini_s3: MiniS3Server, s3_bucket: str) -> None:
    url, options = f"{s3_bucket}/{fresh_name()}", mini_s3.storage_options
    copy(str(sound), url, target_options=options)
    storage = Storage(options)
    given = [f"--storage-option={name}={value}" for name, value in options.items()]
    for to in FORMATS.keys() - {"lerobot"}:  # which takes sets of episodes: test_export_lerobot.py
        target = url if to != "hf" else f"{url}-hf"
        done = CliRunner().invoke(cli, ["export", f"{url}/", target, "--to", to, "--json", "--overwrite", *given])
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        assert all(storage.exists(f"{target}/{name}") for name in report["files"])
    assert CliRunner().invoke(cli, ["export", f"{url}/", "--to", "dali"]).exit_code == 2
