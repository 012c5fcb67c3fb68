"""Scanning and indexing shards in a store, and loading the index."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
from contextlib import nullcontext

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools.running.processes import ProcessExecutor
from streaming.errors import (
    ConfigError,
    DuplicateKeyError,
    IndexFormatError,
    IndexMismatchError,
    IndexMissingError,
    TarError,
)
from streaming.shards.catalog.build import check_sizes, index_shards, load_index, shard_name
from streaming.shards.catalog.scan import scan_shard
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.cutter import ChunkRule
from streaming.shards.index.layout import chunks_path, samples_path
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.tar import parse_chunk
from streaming.storage import Storage
from tests.support.sets.data_sets import cut_records
from tests.support.sets.tars import tar_bytes

SMALL = ChunkRule(target_bytes=20_000, min_bytes=5000, min_samples=4)


def files(num_samples: int, size: int = 700, first: int = 0) -> list[tuple[str, bytes]]:
    return [
        (f"{i:05d}.{field}", os.urandom(size + i))
        for i in range(first, first + num_samples)
        for field in ("jpg", "cls")
    ]


class CountingStorage(Storage):
    """Counts what is read of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.shard_reads: list[str] = []

    def read_into(self, url: str, start: int, out: memoryview, *, summed: bool = False) -> None:
        self.shard_reads.append(url)
        super().read_into(url, start, out, summed=summed)


@pytest.fixture
def shards(tmp_path) -> list[str]:
    urls = []
    for part in range(3):
        path = tmp_path / f"{part:03d}.tar"
        path.write_bytes(tar_bytes(files(10 + part, first=part * 100)))
        urls.append(str(path))
    return urls


@pytest.mark.thorough
@given(
    sizes=st.lists(st.integers(0, 3000), max_size=30),
    read_bytes=st.sampled_from([512, 1000, 4096, 1 << 20]),
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT]),
)
@settings(deadline=None)
def test_a_scan_agrees_with_parsing_the_whole(tmp_path_factory, sizes: list[int], read_bytes: int, form: int) -> None:
    long = "n" * 120 if form == tarfile.PAX_FORMAT else ""
    archive = tar_bytes(
        [(f"{long}{i}.{'jpg' if size % 3 else 'txt'}", os.urandom(size)) for i, size in enumerate(sizes)], form
    )
    path = str(tmp_path_factory.mktemp("scan") / "a.tar")
    with open(path, "wb") as file:
        file.write(archive)
    table = scan_shard(Storage(), path, "a.tar", read_bytes=read_bytes, rule=SMALL)
    layout = parse_chunk(archive)
    assert list(table.keys) == layout.keys
    if layout.keys:
        assert table.record_starts.tolist() == layout.record_starts.tolist()
    assert tuple(table.fields) == layout.fields
    for column, field in enumerate(layout.fields):
        assert np.array_equal(table.fields[field][0], layout.starts[:, column])
        assert np.array_equal(table.fields[field][1], layout.sizes[:, column])
    chunks = table.chunks
    assert chunks.shards[0].size_bytes == len(archive)
    bounds = cut_records(layout.record_starts, SMALL) if layout.keys else np.zeros(1, np.int64)
    assert chunks.first_sample.tolist() == bounds[:-1].tolist()
    for row in range(chunks.num_chunks):
        part = archive[chunks.byte_start[row] : chunks.byte_end[row]]
        assert crc32c(part) == chunks.crc32c[row]
        assert parse_chunk(part).keys == layout.keys[bounds[row] : bounds[row + 1]]


def test_trailing_folders_are_inside_the_last_chunk(tmp_path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind in (("d", b"5"), ("d/a.x", b"0"), ("e", b"5")):
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
    (tmp_path / "a.tar").write_bytes(out.getvalue())
    chunks = scan_shard(Storage(), str(tmp_path / "a.tar"), "a.tar").chunks
    assert (chunks.byte_start.tolist(), chunks.byte_end.tolist()) == ([0], [1536])
    assert chunks.crc32c[0] == crc32c(out.getvalue()[:1536])


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [False, True])
def test_index_then_load(tmp_path, shards: list[str], processes: bool) -> None:
    storage = Storage()
    told: dict[str, int] = {}
    with ProcessExecutor(2) if processes else nullcontext() as executor:
        table = index_shards(
            storage, shards, parallel=2, executor=executor, rule=SMALL,
            progress=lambda url, num_bytes: told.update({url: told.get(url, 0) + num_bytes}),
        )  # fmt: skip
    table.validate()
    assert table.total_samples == 33
    assert told == {url: os.path.getsize(url) for url in shards}
    assert load_index(storage, shards) == table
    backwards = load_index(storage, shards[::-1])
    assert [shard.name for shard in backwards.shards] == ["002.tar", "001.tar", "000.tar"]
    sample_file = tmp_path / samples_path("001.tar")
    assert SampleTable.from_parquet(sample_file.read_bytes(), "s").chunks == table.select(["001.tar"])
    check_sizes(storage, shards, table)


@pytest.mark.thorough
def test_the_same_shards_give_the_same_files(tmp_path, shards: list[str]) -> None:
    outcomes = []
    for order, parallel in ((shards, 1), (shards[::-1], 3)):
        index_shards(Storage(), order, parallel=parallel, force=True)
        outcomes.append({path.name: path.read_bytes() for path in (tmp_path / "_shardstream").rglob("*.parquet")})
    assert len(outcomes[0]) == 4
    assert outcomes[0] == outcomes[1]


def test_indexing_goes_on_where_it_stopped(tmp_path, shards: list[str]) -> None:
    index_shards(Storage(), shards[:1])
    storage = CountingStorage()
    table = index_shards(storage, shards)
    assert set(storage.shard_reads) == set(shards[1:])
    os.remove(tmp_path / chunks_path())  # killed before the last write
    storage = CountingStorage()
    assert index_shards(storage, shards) == table
    assert storage.shard_reads == []
    with open(shards[1], "wb") as file:  # a replaced shard
        file.write(tar_bytes(files(4)))
    renewed = index_shards(storage, shards)
    assert storage.shard_reads == [shards[1]]
    assert [shard.num_samples for shard in renewed.shards] == [10, 4, 12]
    index_shards(storage, shards, force=True)
    assert set(storage.shard_reads) == set(shards)


def test_other_shards_stay_in_the_index(shards: list[str]) -> None:
    storage = Storage()
    index_shards(storage, shards[1:])
    assert len(index_shards(storage, shards[:1]).shards) == 1
    assert len(load_index(storage, shards).shards) == 3


def test_a_damaged_index_file_is_named_and_rebuilt(tmp_path, shards: list[str]) -> None:
    storage = Storage()
    table = index_shards(storage, shards)
    (tmp_path / chunks_path()).write_bytes(b"PAR1 nothing PAR1")
    (tmp_path / samples_path("000.tar")).write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(IndexFormatError, match=r"chunks\.parquet.*shard_tools index"):
        load_index(storage, shards)
    assert index_shards(storage, shards) == table
    assert load_index(storage, shards) == table


def test_footers_stand_in_for_the_chunk_table(tmp_path, shards: list[str]) -> None:
    storage = Storage()
    table = index_shards(storage, shards)
    os.remove(tmp_path / chunks_path())
    assert load_index(storage, shards) == table
    os.remove(tmp_path / samples_path("002.tar"))
    with pytest.raises(IndexMissingError, match=r"002\.tar.*shard_tools index"):
        load_index(storage, shards)


def test_no_index_names_the_command(shards: list[str]) -> None:
    with pytest.raises(IndexMissingError, match=r"000\.tar: not in the index.*run `shard_tools index /"):
        load_index(Storage(), shards)


def test_an_index_elsewhere_and_shards_of_two_folders(tmp_path) -> None:
    urls = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "0.tar"
        path.write_bytes(tar_bytes(files(3, first=10 * len(urls))))
        urls.append(str(path))
    storage = Storage()
    beside = index_shards(storage, urls)
    assert (tmp_path / "a" / chunks_path()).exists()
    assert (tmp_path / "b" / chunks_path()).exists()
    assert load_index(storage, urls) == beside
    above = index_shards(storage, urls, str(tmp_path))
    assert [shard.name for shard in above.shards] == ["a/0.tar", "b/0.tar"]
    assert load_index(storage, urls, str(tmp_path)) == above
    elsewhere = str(tmp_path / "index")
    with pytest.raises(ConfigError, match="the same name"):
        index_shards(storage, urls, elsewhere)
    index_shards(storage, urls[:1], elsewhere)
    assert load_index(storage, urls[:1], elsewhere).shards[0].name == "0.tar"
    assert shard_name("s3://b/x/y/0.tar", "s3://b/x/") == "y/0.tar"


def test_replaced_shards_show_by_size(shards: list[str]) -> None:
    storage = Storage()
    table = index_shards(storage, shards)
    with open(shards[1], "ab") as file:
        file.write(bytes(512))
    with pytest.raises(IndexMismatchError, match=r"001\.tar has \d+ bytes, but the index says \d+"):
        check_sizes(storage, shards, table)


def test_a_key_that_comes_back_names_both_places(tmp_path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes([("a.x", b"1"), ("b.x", b"2"), ("a.y", b"3")]))
    with pytest.raises(DuplicateKeyError, match=r"a\.tar: key 'a' appears twice, at bytes 0 and 2048.*sort"):
        scan_shard(Storage(), str(path), "a.tar")


def test_one_damaged_shard_does_not_stop_the_others(tmp_path, shards: list[str]) -> None:
    with open(shards[0], "r+b") as file:
        file.truncate(3000)
    with pytest.raises(TarError, match=r"000\.tar, byte"):
        index_shards(Storage(), shards)
    assert not (tmp_path / chunks_path()).exists()
    assert (tmp_path / samples_path("002.tar")).exists()
    assert load_index(Storage(), shards[1:]).total_samples == 23


def test_a_cut_at_a_member_border_is_noticed(tmp_path, shards: list[str]) -> None:
    border = int(scan_shard(Storage(), shards[0], "a").record_starts[5])
    with open(shards[0], "r+b") as file:
        file.truncate(border)
    with pytest.raises(TarError, match=rf"byte {border}.*end-of-archive"):
        scan_shard(Storage(), shards[0], "a")


def test_compressed_shards_are_refused_with_a_cure(tmp_path, shards: list[str]) -> None:
    packed = tmp_path / "x.tar.gz"
    with open(shards[0], "rb") as file:
        packed.write_bytes(gzip.compress(file.read()))
    with pytest.raises(ConfigError, match="decompress"):
        index_shards(Storage(), [str(packed)])
    packed.rename(tmp_path / "x.tar")
    with pytest.raises(ConfigError, match="decompress"):
        index_shards(Storage(), [str(tmp_path / "x.tar")])


def test_an_empty_shard_and_an_empty_file(tmp_path) -> None:
    (tmp_path / "a.tar").write_bytes(bytes(1024))
    (tmp_path / "b.tar").write_bytes(b"")
    table = index_shards(Storage(), [str(tmp_path / "a.tar")])
    assert (table.num_chunks, table.shards[0].num_samples) == (0, 0)
    assert load_index(Storage(), [str(tmp_path / "a.tar")]) == table
    with pytest.raises(TarError, match="end-of-archive"):
        scan_shard(Storage(), str(tmp_path / "b.tar"), "b.tar")


def test_tables_survive_pickling(shards: list[str]) -> None:
    table = index_shards(Storage(), shards)
    again = pickle.loads(pickle.dumps(table))
    assert isinstance(again, ChunkTable)
    assert again == table
