"""Spans: runs of records with a checksum of their own, and reading parts of chunks that are checked by them."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.errors import ChecksumError, ConfigError, IndexMismatchError, MemoryLimitError
from streaming.order.plan import memory as budget
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.plan import Plan
from streaming.run.engine.units import BatchSlices
from streaming.shards.catalog.random_access import span_borders
from streaming.shards.index.cutter import ChunkCutter, ChunkRule
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.spans import SpanCutter, separate
from streaming.storage import Checked
from streaming.types import SPAN_BYTES
from tests.support.sets.data_sets import mesh_of

RULE = ChunkRule(target_bytes=300_000, min_bytes=120_000, min_samples=20)
sizes_of_records = st.lists(st.sampled_from([512, 1536, 30_000, SPAN_BYTES - 512, SPAN_BYTES, 200_000]), max_size=60)


def spans_by_the_rule(sizes: list[int]) -> list[int]:
    """One past the last record of each closed span, from the sentence in docs/format.md."""
    chunks, ends, num_bytes = ChunkCutter(RULE), [], 0
    for number, size in enumerate(sizes):
        num_bytes += size
        if chunks.add(size) or num_bytes >= SPAN_BYTES:
            ends.append(number + 1)
            num_bytes = 0
    return ends


@given(sizes_of_records, st.lists(st.integers(0, 60), max_size=5))
def test_spans_follow_the_rule_however_records_come(sizes: list[int], stops: list[int]) -> None:
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    bounds = [0, *sorted(stop for stop in stops if stop < len(sizes)), len(sizes)]
    chunks, spans = ChunkCutter(RULE), SpanCutter()
    found: list[int] = []
    for low, high in pairwise(bounds):
        piece = starts[low : high + 1]
        found += [low + cut for cut in spans.extend(piece, chunks.extend(piece).tolist())]
    assert found == spans_by_the_rule(sizes)


@given(sizes_of_records)
def test_one_by_one_as_all_at_once(sizes: list[int]) -> None:
    chunks, spans = ChunkCutter(RULE), SpanCutter()
    found = [n + 1 for n, size in enumerate(sizes) if spans.add(size, chunk_closes=chunks.add(size))]
    assert found == spans_by_the_rule(sizes)


@settings(deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=5000), st.booleans()), max_size=20))
def test_checksums_of_spans_out_of_running_ones(parts: list[tuple[bytes, bool]]) -> None:
    running, crc = [], 0
    for data, first in parts:
        crc = crc32c.crc32c(data, 0 if first else crc)
        running.append(crc)
    firsts = np.array([first or not number for number, (_, first) in enumerate(parts)], np.bool_)
    found = separate(np.array(running, np.uint32), np.array([len(data) for data, _ in parts], np.int64), firsts)
    assert found.dtype == np.uint32
    assert found.tolist() == [crc32c.crc32c(data) for data, _ in parts]


def test_checksums_of_long_spans() -> None:
    data = np.random.default_rng(0).bytes((5 << 20) + 7)
    cut = (1 << 20) + 3
    running = np.array([crc32c.crc32c(data[:cut]), crc32c.crc32c(data)], np.uint32)
    found = separate(running, np.array([cut, len(data) - cut]), np.array([True, False]))
    assert found.tolist() == [crc32c.crc32c(data[:cut]), crc32c.crc32c(data[cut:])]


# Reading


def payload(number: int) -> bytes:
    return bytes([number % 251]) * (9_000 + 700 * (number % 7) + 90_000 * (number % 10 == 9))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """600 samples of 10 to 100 KB in chunks of about 256 of them and spans of 1 to 7."""
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar") as writer:
        for number in range(600):
            writer.write({"__key__": f"{number:05d}", "bin": payload(number)})
    return tmp_path / "000000.tar"


def open_at(shard: Path, **options: object) -> StreamingDataset:
    return StreamingDataset(f"{shard.parent}/", shuffle=False, **options)  # type: ignore[arg-type]


def samples_of(shard: Path) -> SampleTable:
    path = shard.parent / "_shardstream" / "samples" / "000000.tar.parquet"
    return SampleTable.from_parquet(path.read_bytes(), str(path))


def damage(shard: Path, sample: int) -> None:
    """One bit of the payload of a sample."""
    data = bytearray(shard.read_bytes())
    data[int(samples_of(shard).record_starts[sample]) + 512 + 77] ^= 16
    shard.write_bytes(data)


def test_the_index_has_the_checksum_of_every_span(shard: Path) -> None:
    table, data = samples_of(shard), shard.read_bytes()
    sizes = np.diff(table.record_starts)
    ends, num_bytes = [], 0
    for number, size in enumerate(sizes.tolist()):
        num_bytes += size
        if num_bytes >= 65536 or number + 1 in {*table.chunks.first_sample.tolist(), 600}:
            ends.append(number + 1)
            num_bytes = 0
    assert table.chunks.num_chunks > 1
    assert table.span_starts.tolist() == [0, *ends]
    borders = table.record_starts[table.span_starts].tolist()
    assert table.span_crc32c.tolist() == [crc32c.crc32c(data[low:high]) for low, high in pairwise(borders)]


@settings(deadline=None)
@given(st.data())
def test_a_slice_is_the_fewest_spans_of_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dataset, table = _shared(tmp_path_factory)
    chunk = data.draw(st.integers(0, dataset.source.table.num_chunks - 1))
    count = int(dataset.source.table.num_samples[chunk])
    first = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(first + 1, count))
    wanted, begin = dataset.source.slice(chunk, first, stop), int(dataset.source.table.first_sample[chunk])
    low = max(start for start in table.span_starts.tolist() if start <= begin + first)
    high = min(start for start in table.span_starts.tolist() if start >= begin + stop)
    assert (wanted.byte_start, wanted.byte_end) == tuple(table.record_starts[[low, high]].tolist())
    assert (wanted.lead, wanted.num_samples) == (begin + first - low, high - low)
    assert wanted.sums[-1][0] == wanted.num_bytes
    with memoryview(bytearray(wanted.num_bytes)) as out:
        keys = dataset.source.fetch_unit(wanted, out).apart(out).keys[wanted.lead : wanted.lead + stop - first]
    assert list(keys) == [f"{number:05d}" for number in range(begin + first, begin + stop)]


_SHARED: list[tuple[StreamingDataset, SampleTable]] = []


def _shared(factory: pytest.TempPathFactory) -> tuple[StreamingDataset, SampleTable]:
    if not _SHARED:
        path = factory.mktemp("spans")
        with ShardWriter(f"{path}/{{:06d}}.tar") as writer:
            for number in range(600):
                writer.write({"__key__": f"{number:05d}", "bin": payload(number)})
        _SHARED.append((open_at(path / "000000.tar"), samples_of(path / "000000.tar")))
    return _SHARED[0]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_get_their_samples_out_of_wider_slices(shard: Path, world_size: int) -> None:
    dataset, found = open_at(shard), {}
    for rank in range(world_size):
        mesh = mesh_of(world_size, rank)
        with DataLoader(dataset, global_batch_size=50, last_batch="partial", device_mesh=mesh) as loader:
            for batch in loader:
                found |= dict(zip(batch["__key__"], map(bytes, batch["bin"]), strict=True))
    assert found == {f"{number:05d}": payload(number) for number in range(600)}


def test_small_records_are_read_in_whole_chunks_by_every_rank(tmp_path: Path) -> None:
    """A rank's share of a batch lies in one span: each rank reads all bytes in any case, so in few requests."""
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar") as writer:
        for number in range(2000):
            writer.write({"__key__": f"{number:05d}", "bin": bytes(500)})
    dataset = StreamingDataset(str(tmp_path), shuffle=False)
    keys, requests = [], 0
    for rank in range(8):
        with DataLoader(dataset, global_batch_size=16, device_mesh=mesh_of(8, rank)) as loader:
            keys += [(number, rank, batch["__key__"]) for number, batch in enumerate(loader)]
            requests += loader.metrics()["fetched_chunks"]
    assert [key for _, _, some in sorted(keys) for key in some] == [f"{number:05d}" for number in range(2000)]
    assert requests == 8 * dataset.source.table.num_chunks < 125


@pytest.mark.parametrize("tables", ["spans", "none"])
def test_what_does_not_fit_is_refused_at_the_start_by_every_rank(tmp_path: Path, tables: str) -> None:
    """Large samples among small ones: the mean of their chunk says nothing of the batch that they make."""
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", max_bytes=8_000_000) as writer:
        for number in range(1600):
            writer.write({"__key__": f"{number:05d}", "bin": bytes(300_000 if 800 <= number < 816 else 2_000)})
    if tables == "none":
        (tmp_path / "_shardstream" / "samples" / "000001.tar.parquet").unlink()

    def first(rank: int, limit: str) -> int:
        dataset = StreamingDataset(str(tmp_path), shuffle=False)
        with DataLoader(dataset, global_batch_size=64, device_mesh=mesh_of(4, rank), memory_limit=limit) as loader:
            return sum(len(batch["__key__"]) for batch in loader)

    cures = set()
    for rank in range(4):
        with pytest.raises(MemoryLimitError, match="the 16 of one rank in a batch take") as refused:
            first(rank, "2MiB")
        cures.update(re.findall(r'memory_limit="(\w+)"', str(refused.value)))
    (cure,) = cures
    assert [first(rank, cure) for rank in range(4)] == [400] * 4


@settings(deadline=None)
@given(st.data())
def test_no_batch_takes_more_than_the_bound_that_is_checked(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dataset, table = _shared(tmp_path_factory)
    first = data.draw(st.integers(0, 500))
    view = dataset[first : data.draw(st.integers(first + 30, 600))]
    room = budget.whole_pages(view.source.table.byte_end - view.source.table.byte_start)
    plan = Plan(
        view.source.table.num_samples, OrderSettings(seed=0, lanes=1, window=0, shuffle=False),
        global_batch_size=data.draw(st.integers(4, 80)), dp_world_size=data.draw(st.integers(2, 4)),
        epoch_size=data.draw(st.none() | st.integers(80, 300)), last_batch="partial",
    )  # fmt: skip
    spans = partial(span_borders, view.source.table, room, lambda _: table)
    loose, exact = (budget.slices_bytes(plan, room, spans, budget.Budget(limit)) for limit in (1 << 40, 0))
    assert exact <= loose
    largest = 0
    for rank in range(plan.dp_world_size):
        units, batches = BatchSlices(plan, rank, view.source), Counter[int]()
        units._step = 3  # batches at once, of which the last may be fewer
        splits = units.block(0, plan.num_batches).rows.row_splits
        for need in units.needs():
            batches[need.first_batch] += int(budget.whole_pages(units.wanted(need.unit).num_bytes))
        assert sorted(batches) == np.flatnonzero(np.diff(splits)).tolist(), "each batch with rows is fetched"
        largest = max(largest, *batches.values())
    assert largest <= exact


def test_random_access_is_checked(shard: Path) -> None:
    damage(shard, 333)
    table, dataset = samples_of(shard), open_at(shard)
    span = int(np.searchsorted(table.span_starts, 333, side="right")) - 1
    low, high = table.record_starts[table.span_starts[[span, span + 1]]].tolist()
    with pytest.raises(ChecksumError, match=rf"000000\.tar, bytes {low}-{high}: CRC32C"):
        dataset[333]
    beside = int(table.span_starts[span + 1])
    assert dataset[beside]["bin"] == payload(beside)


def test_bytes_that_come_wrong_once_are_read_again(shard: Path) -> None:
    dataset = open_at(shard)
    read_into, seen = dataset.source.storage.read_into, []

    def unreliable(url: str, start: int, out: memoryview, **how: bool) -> None:
        read_into(url, start, out, **how)
        seen.append(start)
        if len(seen) == 1:
            out[600] ^= 255

    dataset.source.storage.read_into = unreliable  # type: ignore[method-assign]
    assert dataset[100]["bin"] == payload(100)
    assert len(seen) == 2


def test_a_shard_of_another_size_is_told_apart(shard: Path) -> None:
    damage(shard, 333)
    dataset = open_at(shard)
    with shard.open("ab") as out:
        out.write(bytes(512))
    with pytest.raises(IndexMismatchError, match="the shard was replaced or"):
        dataset[333]


def test_a_slice_that_was_cached_unchecked_is_checked_and_fetched_anew(shard: Path, tmp_path: Path) -> None:
    whole = shard.read_bytes()
    dataset = open_at(shard, cache_dir=tmp_path / "cache")
    wanted = dataset.source.slice(0, 20, 21)
    damage(shard, 20)
    bad = shard.read_bytes()[wanted.byte_start : wanted.byte_end]
    shard.write_bytes(whole)

    def fill(out: memoryview) -> Checked:
        out[:] = bad
        return Checked.comparing(len(out), ())

    assert dataset.source.cache is not None
    with memoryview(bytearray(wanted.num_bytes)) as out:
        dataset.source.cache.read_into(wanted.url, wanted.version, wanted.byte_start, out, fill, crc32c=None)
    assert dataset[20]["bin"] == payload(20)


def test_the_name_of_the_column_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another"):
        ShardWriter(f"{tmp_path}/{{:06d}}.tar", columns={"span_crc32c": len})
