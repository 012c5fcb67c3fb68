"""``fields=`` reads only what it needs of large samples: the same batches, fewer bytes, every byte checked."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import streaming.shards.catalog.source as source_module
from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import ChecksumError, IndexMismatchError, MemoryLimitError
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.fetch.checksums import Sum
from streaming.shards.fetch.pieces import pieces_of
from streaming.shards.index.cutter import ChunkRule
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import data_gets, loaders, mesh_of
from tests.support.sets.index_files import write_parquet

pytestmark = pytest.mark.usefixtures("one_fork_server", "no_maps")

NUM = 60
FIELDS: list[tuple[str, ...]] = [
    ("txt",),
    ("mp4",),
    ("txt", "wav"),
    ("wav",),
    ("cls", "mp4"),
    ("txt", "cls", "wav", "mp4"),
]
OPTIONS: dict[str, Any] = {"global_batch_size": 12, "last_batch": "partial"}


def make(number: int) -> dict[str, Any]:
    """A caption, a class, a video of 150 or 400 KB (sometimes a small one, or none), and here and there sound."""
    sample: dict[str, Any] = {"__key__": f"{number:05d}", "txt": f"caption {number}", "cls": number}
    if number % 9 != 5:
        sample["mp4"] = bytes([number]) * (1_000 if number % 7 == 3 else 150_000 + 250_000 * (number % 2))
    if number % 3 == 1:
        sample["wav"] = bytes([255 - number]) * (200_000 if number % 2 else 30_000)
    return sample


def write(url: str, storage_options: Mapping[str, Any] | None = None) -> str:
    with ShardWriter(f"{url}/{{:06d}}.tar", max_samples=35, index=False, storage_options=storage_options) as writer:
        for number in range(NUM):
            writer.write(make(number))
    storage = Storage(storage_options)
    rule = ChunkRule(target_bytes=2_000_000, min_bytes=1_500_000, min_samples=8)
    index_shards(storage, expand_urls(f"{url}/", storage), rule=rule)
    return f"{url}/"


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """60 samples in 2 shards and chunks of about 2 MB."""
    return write(str(tmp_path_factory.mktemp("videos")))


@pytest.fixture
def whole_reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing is ever worth a request more."""

    def switch() -> None:
        monkeypatch.setattr(source_module, "LOCAL_GAP_BYTES", 1 << 40)

    return switch


def rows_of(batch: Mapping[str, Any], fields: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Key and fields of each row, after a look at every byte."""
    rows = []
    for place, key in enumerate(batch["__key__"]):
        expected = make(int(key))
        found = {name: batch[name][place] for name in fields if name in batch}
        for name in fields:
            assert _plain(found.get(name)) == expected.get(name), (key, name)
        rows.append((key, *((name, name in batch) for name in fields)))
    return rows


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, torch.Tensor) else value


def play(dataset: StreamingDataset, world_size: int, **options: Any) -> list[list[list[tuple[Any, ...]]]]:
    fields = dataset.fields or ()
    return [
        [rows_of(batch, fields) for batch in loader]
        for loader in loaders(dataset, world_size, **{**OPTIONS, **options})
    ]


def read_bytes(dataset: StreamingDataset) -> list[tuple[str, int, int]]:
    """Wraps the data set's storage; URL, first byte and number of bytes of each read of a shard so far."""
    reads: list[tuple[str, int, int]] = []
    read_into = dataset.source.storage.read_into

    def counted(url: str, start: int, out: memoryview, **how: bool) -> None:
        reads.append((url, start, len(out)))
        read_into(url, start, out, **how)

    dataset.source.storage.read_into = counted  # type: ignore[method-assign]
    return reads


# The rule


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=12),
    st.integers(1, 60),
)
def test_pieces_hold_what_is_needed_and_no_wide_hole(steps: list[tuple[int, int]], gap_bytes: int) -> None:
    at, sums = 100, []
    for hole, size in steps:
        sums.append(Sum(ranges=((at + hole, at + hole + size),), crc32c=0, first=0, stop=1))
        at += hole + size
    end = at + 30
    pieces = pieces_of(sums, 100, end, gap_bytes)
    needed = {byte for one in sums for start, stop in one.ranges for byte in range(start, stop)}
    holes = end - 100 - len(needed)
    if pieces is None:
        joined = pieces_of(sums, 100, end, 1)
        assert holes < gap_bytes or joined is not None
        return
    read = [byte for start, stop in pieces.ranges for byte in range(start, stop)]
    assert needed <= set(read)
    assert len(read) == len(set(read)) == pieces.num_bytes <= end - 100 - gap_bytes
    for (_, stop), (start, _) in zip(pieces.ranges, pieces.ranges[1:], strict=False):
        assert start - stop >= gap_bytes
    memory = memoryview(bytes(byte % 251 for byte in read))
    for one in sums:
        assert pieces.parts(memory, one.ranges)[0] == bytes(byte % 251 for byte in range(*one.ranges[0]))
        assert pieces.located(np.array([one.ranges[0][0]])).tolist() == [read.index(one.ranges[0][0])]


# The same batches


SHUFFLES: list[bool | ShuffleConfig] = [False, True, ShuffleConfig(lanes=3, window=20)]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("fields", FIELDS)
def test_batches_are_those_of_whole_reads(
    videos: str,
    whole_reads: Any,
    fields: tuple[str, ...],
    shuffle: bool | ShuffleConfig,
    request: pytest.FixtureRequest,
) -> None:
    """Sizes of the world take turns, so that each choice of fields and each order meets all; ``--matrix``: all."""
    dataset = StreamingDataset(videos, fields=fields, shuffle=shuffle, max_bad_samples=0)
    reads = read_bytes(dataset)
    worlds = ((1, 3), (2,), (8,))[(FIELDS.index(fields) + SHUFFLES.index(shuffle)) % 3]
    if request.config.getoption("--matrix"):
        worlds = (1, 2, 3, 8)
    found = [play(dataset, world_size) for world_size in worlds]
    num_bytes = sum(size for *_, size in reads)
    whole_reads()
    reads.clear()
    assert [play(dataset, world_size) for world_size in worlds] == found
    if len(fields) < 4:
        assert num_bytes < sum(size for *_, size in reads)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_worker_processes_see_the_same(videos: str, num_workers: int) -> None:
    def shouted(data: Any) -> str:
        return bytes(data).decode().upper()

    dataset = StreamingDataset(videos, fields=("txt",), decode={"txt": shouted}, max_bad_samples=0)
    for loader in loaders(dataset, 2, num_workers=num_workers, **OPTIONS):
        for batch in loader:
            assert batch["txt"] == [f"CAPTION {int(key)}" for key in batch["__key__"]]


@pytest.mark.parametrize("fields", FIELDS)
def test_random_access(videos: str, fields: tuple[str, ...]) -> None:
    dataset = StreamingDataset(videos, fields=fields)
    for number in range(NUM):
        expected = {name: value for name, value in make(number).items() if name in fields}
        assert {name: value for name, value in dataset[number].items() if not name.startswith("__")} == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_with_a_node_cache(videos: str, tmp_path: Path, shuffle: bool) -> None:
    cached = {"cache_dir": tmp_path / "cache", "shuffle": shuffle, "max_bad_samples": 0}
    for fields in (("txt",), ("wav",), ("txt", "wav", "mp4")):
        dataset = StreamingDataset(videos, fields=fields, **cached)
        reads = read_bytes(dataset)
        first = play(dataset, 2)
        assert reads
        reads.clear()
        assert play(dataset, 2) == first
        assert not reads


# Fewer bytes


@pytest.mark.thorough
def test_bytes_at_the_server(mini_s3: MiniS3Server) -> None:
    bucket = mini_s3.create_bucket("fields")
    url = f"{bucket}/train"
    with ShardWriter(f"{url}/{{:06d}}.tar", max_samples=8, storage_options=mini_s3.storage_options) as writer:
        for number in range(16):
            writer.write({"__key__": f"{number:05d}", "mp4": bytes(2_000_000), "txt": f"caption {number}" * 10})
    options: dict[str, Any] = {"storage_options": mini_s3.storage_options, "max_bad_samples": 0}
    totals = []
    for fields in (None, ("txt",)):
        dataset = StreamingDataset(f"{url}/", fields=fields, **options)
        mini_s3.clear_log()
        with DataLoader(dataset, batch_size=4, device_mesh=mesh_of(1, 0)) as loader:
            captions = sorted(text for batch in loader for text in batch["txt"])
        assert captions == sorted(f"caption {number}" * 10 for number in range(16))
        gets = data_gets(mini_s3.log(), f"{url}/")
        totals.append((len(gets), sum(int(str(get["bytes"])) for get in gets)))
    assert totals[0][1] > 32_000_000
    assert totals[1][0] <= 16 + dataset.source.table.num_chunks  # each caption with the headers around it
    assert totals[1][1] < 16 * 4096
    mini_s3.clear_log()
    assert dataset[5]["txt"] == "caption 5" * 10
    assert sum(int(str(get["bytes"])) for get in data_gets(mini_s3.log(), f"{url}/")) < 4096


def test_small_samples_are_read_whole_and_without_a_look_at_the_sample_tables(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar") as writer:
        for number in range(500):
            writer.write({"__key__": f"{number:05d}", "bin": bytes(20_000), "cls": number})
    dataset = StreamingDataset(f"{tmp_path}/", fields=("cls",))
    shutil.rmtree(tmp_path / "_shardstream" / "samples")
    with DataLoader(dataset, batch_size=50, device_mesh=mesh_of(1, 0)) as loader:
        assert sorted(int(label) for batch in loader for label in batch["cls"]) == list(range(500))
        assert loader.metrics()["fetched_bytes"] == int(
            (dataset.source.table.byte_end - dataset.source.table.byte_start).sum()
        )


def test_an_older_index_reads_whole_chunks(videos: str, tmp_path: Path) -> None:
    shutil.copytree(videos, tmp_path / "set")
    for path in (tmp_path / "set" / "_shardstream" / "samples").iterdir():
        table = pq.read_table(path)
        sums = [name for name in table.column_names if "crc32c" in name[:13] and name != "span_crc32c"]
        write_parquet(path, table.drop_columns(sums))
    dataset = StreamingDataset(f"{tmp_path}/set/", fields=("txt",), max_bad_samples=0)
    reads = read_bytes(dataset)
    play(dataset, 1)
    assert sum(size for *_, size in reads) == int(dataset.source.chunk_bytes.sum())


# Every byte checked


@pytest.fixture
def copy(videos: str, tmp_path: Path) -> Path:
    shutil.copytree(videos, tmp_path / "set")
    return tmp_path / "set"


def damage(directory: Path, sample: int, field: str | None) -> SampleTable:
    """One bit of a field of a sample of the first shard, or its first header."""
    path = directory / "_shardstream" / "samples" / "000000.tar.parquet"
    table = SampleTable.from_parquet(path.read_bytes(), str(path))
    place = int(table.record_starts[sample]) if field is None else int(table.fields[field][0][sample])
    data = bytearray((directory / "000000.tar").read_bytes())
    data[place] ^= 1
    (directory / "000000.tar").write_bytes(data)
    return table


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("field", "fields", "is_bad"),
    [
        ("mp4", ("mp4",), True),
        ("mp4", ("txt",), False),
        ("txt", ("txt",), True),
        ("txt", ("mp4",), False),
        (None, ("cls",), True),
        (None, ("mp4",), False),
    ],
)
def test_damage_counts_where_it_is_delivered(
    copy: Path, whole_reads: Any, field: str | None, fields: tuple[str, ...], is_bad: bool, shuffle: bool
) -> None:
    """Sample 13 has a span of its own, and a large video: neither its other bytes nor other samples suffer."""
    table = damage(copy, 13, field)
    assert table.fields["mp4"][1][13] == 400_000
    dataset = StreamingDataset(f"{copy}/", fields=fields, shuffle=shuffle, max_bad_samples=1)
    found = []
    for _ in range(2):
        for world_size in (1, 2, 3):
            keys, bad = set(), set()
            for loader in loaders(dataset, world_size, **OPTIONS):
                for batch in loader:
                    keys |= {key for key, *_ in rows_of(batch, fields)}
                bad |= {one["key"] for one in loader.metrics()["bad"]}
            found.append((keys, bad))
        whole_reads()  # how it is read makes no difference
    expected = {f"{number:05d}" for number in range(NUM)}
    for keys, bad in found:
        assert bad == ({"00013"} if is_bad else set())
        assert keys == expected - bad
    if is_bad:
        with pytest.raises(ChecksumError, match=r"000000\.tar, bytes"):
            dataset[13]
    else:
        assert {name: dataset[13][name] for name in fields} == {name: make(13)[name] for name in fields}


def test_bytes_that_come_wrong_once_are_read_again(videos: str) -> None:
    dataset = StreamingDataset(videos, fields=("txt",), shuffle=False, max_bad_samples=0)
    read_into, seen = dataset.source.storage.read_into, set[int]()

    def unreliable(url: str, start: int, out: memoryview, **how: bool) -> None:
        read_into(url, start, out, **how)
        if start not in seen:
            out[:] = bytes(len(out))
        seen.add(start)

    dataset.source.storage.read_into = unreliable  # type: ignore[method-assign]
    play(dataset, 1)


# Memory


def test_chunks_take_the_room_that_their_pieces_need(videos: str) -> None:
    whole = StreamingDataset(videos, shuffle=ShuffleConfig(lanes=4))
    dataset = StreamingDataset(videos, fields=("txt",), shuffle=ShuffleConfig(lanes=4), max_bad_samples=0)
    with (
        pytest.raises(MemoryLimitError),
        DataLoader(whole, batch_size=12, memory_limit="8MB", device_mesh=mesh_of(1, 0)) as loader,
    ):
        next(iter(loader))
    with DataLoader(dataset, memory_limit="8MB", device_mesh=mesh_of(1, 0), **OPTIONS) as loader:
        for _ in range(2):
            assert sum(len(rows_of(batch, ("txt",))) for batch in loader) == NUM
        assert loader.metrics()["arena_peak_bytes"] <= 6_000_000
    assert int(dataset.source.unit_bytes(np.arange(dataset.source.table.num_chunks)).sum()) < 1_000_000


def test_captions_beside_large_members_need_room_for_captions_alone(tmp_path: Path) -> None:
    """A chunk of 4 MB does not fit the limit; what is read of it does. Without the sample table nothing is overrun."""
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar") as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:05d}", "txt": f"caption {number}", "mp4": bytes(4_000_000)})
    dataset, other = (StreamingDataset(str(tmp_path), fields=("txt",), decode=None) for _ in range(2))
    for num_workers in (0, 1):
        with DataLoader(
            dataset, batch_size=4, memory_limit="1MiB", num_workers=num_workers, device_mesh=mesh_of(1, 0)
        ) as loader:
            for _ in range(2):
                rows = [
                    pair for batch in loader for pair in zip(batch["__key__"], map(bytes, batch["txt"]), strict=True)
                ]
                assert sorted(rows) == [(f"{number:05d}", f"caption {number}".encode()) for number in range(12)]
            assert loader.metrics()["arena_peak_bytes"] <= 786_432
    (size,) = dataset.source.unit_bytes(np.array([0])).tolist()
    shutil.rmtree(tmp_path / "_shardstream" / "samples")
    with (
        memoryview(bytearray(size)) as out,
        pytest.raises(IndexMismatchError, match="sample table existed when the epoch began"),
    ):
        other.source.fetch_unit(other.source.chunk(0), out)
