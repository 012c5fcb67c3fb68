"""Converting by an executor that pickles its calls gives the same bytes for every layout; what is counted first."""

from __future__ import annotations

import gzip
import pickle
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from shard_tools.make.convert import SourceOptions, convert, elsewhere, open_source, tars
from shard_tools.make.convert.base import counts
from shard_tools.make.convert.base.records import Countable, Source
from shard_tools.make.convert.sources import LAYOUTS
from streaming.errors import ConfigError
from streaming.storage import Storage
from tests.support.clusters.executors import Sending
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sources.conversions import contents
from tests.support.sources.every_source import DATA, EVERY

pytestmark = pytest.mark.thorough


@pytest.fixture
def small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_MIN_RANGE", 5)
    monkeypatch.setattr(counts, "_STEP_BYTES", 700)
    monkeypatch.setattr(tars, "_PIECE_BYTES", 3000)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("name", EVERY)
def test_the_same_bytes_of_every_layout(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    sources, options = EVERY[name](tmp_path / "in")
    here = convert(sources, str(tmp_path / "here"), options=options)
    with Sending() as executor:
        there = convert(sources, str(tmp_path / "there"), options=options, executor=executor)
    assert here.num_shards > 2
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert replace(there, seconds=0, target="") == replace(here, seconds=0, target="")


def test_there_is_a_source_of_every_layout() -> None:
    assert {name.partition(",")[0] for name in EVERY} >= {*LAYOUTS}


def told(source: Source, start: int) -> list[tuple[str, dict[str, bytes], str]]:
    return [(record.key, dict(record.fields), record.where) for record in source.records(start)]


@pytest.mark.thorough
@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("name", [
    "jsonl", "text", "csv", "tars", "tars, numbered", "tfrecord", "tfrecord, shuffled", "json", "nanogpt", "npy",
])  # fmt: skip
def test_counted_records_are_the_same_from_any_position(tmp_path: Path, name: str) -> None:
    sources, chosen = EVERY[name](tmp_path)
    for unit in ("line", "blank-line", "file") if name == "text" else ("line",):
        options = SourceOptions(
            key_field=chosen.key_field,
            shuffle_seed=chosen.shuffle_seed,
            unit=unit,
            unlike_columns=True,
            document_token=chosen.document_token,
        )
        source = open_source(sources, Storage(), kind=chosen.kind, options=options)
        assert isinstance(source, Countable)
        expected = told(source, 0)
        assert source.num_records is None
        with Sending() as executor:
            source.count(executor)
        assert source.num_records == len(expected)
        for start in range(len(expected) + 2):
            assert told(source, start) == expected[start:], (unit, start)


@pytest.mark.usefixtures("small_steps")
def test_reading_begins_near_a_counted_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, _ = EVERY["tars"](tmp_path)
    source = open_source(sources, Storage())
    assert isinstance(source, Countable)
    with Sending() as executor:
        source.count(executor)
    read: list[int] = []
    whole = Storage.read
    monkeypatch.setattr(
        Storage, "read", lambda self, url, start=0, stop=None: read.append(start) or whole(self, url, start, stop)
    )
    next(source.records(30))
    assert len(read) < 10
    assert read[0] > 3000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.zst", "a.txt.gz", "a.tar.gz", "a.tfrecord"])
def test_compressed_sources_are_refused_by_name(tmp_path: Path, name: str) -> None:
    packed = gzip.compress(b'{"a": 1}\n')
    if name == "a.csv.zst":
        packed = pa.Codec("zstd").compress(b"a,b\n1,2\n", asbytes=True)
    if name == "a.tfrecord":
        packed = gzip.compress(gzip.decompress(next((DATA / "tfrecord/gzip").iterdir()).read_bytes()))
    (tmp_path / name).write_bytes(packed)
    if name == "a.tar.gz":
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("a.txt"))
    with Sending() as executor, pytest.raises(ConfigError, match=rf"{name} is compressed .*; unpack it, or .*local"):
        convert(str(tmp_path / name), str(tmp_path / "out"), executor=executor)
    assert not (tmp_path / "out/_shardstream").exists() or not [*(tmp_path / "out").glob("*.tar")]


def test_a_built_set_whose_cache_is_not_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "in").mkdir()
    sources, options = EVERY["hf, built"](tmp_path / "in")
    source = options.open(sources, str(tmp_path / "out"), Storage())
    assert isinstance(source, Countable)
    with Sending() as executor:
        source.count(executor)
    there = pickle.loads(pickle.dumps(source))
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"--engine: .* not there on the machine of a task .*HF_DATASETS_CACHE"):
        next(there.records(3))


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("name", ["hf", "jsonl", "tfrecord", "zip"])
def test_sources_in_a_store(tmp_path: Path, mini_s3: MiniS3Server, s3_bucket: str, name: str) -> None:
    (tmp_path / "in").mkdir()
    sources, options = EVERY[name](tmp_path / "in")
    options, storage = replace(options, shuffle_seed=None), Storage(mini_s3.storage_options)
    for path in (tmp_path / "in").rglob("*"):
        if path.is_file():
            storage.put(f"{s3_bucket}/{path.relative_to(tmp_path)}", path.read_bytes())
    source = f"{s3_bucket}/{Path(sources[0]).relative_to(tmp_path)}"
    with Sending() as executor:
        for place in ("here", "there"):
            convert(
                source if name == "zip" else f"{source}/", str(tmp_path / place), options=options,
                storage_options=mini_s3.storage_options, executor=None if place == "here" else executor,
            )  # fmt: skip
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
