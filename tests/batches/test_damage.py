"""Damage costs the samples of the damaged spans: all others are delivered, the same on every world size."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from streaming.storage.requests.retry import MOST_WRONG
from tests.support.sets.data_sets import WORLD_SIZES, loaders, mesh_of

pytestmark = pytest.mark.usefixtures("one_fork_server")

NUM = 120
SHUFFLES: list[bool | ShuffleConfig] = [False, True, ShuffleConfig(lanes=3, window=20)]
OPTIONS: dict[str, Any] = {"global_batch_size": 16, "last_batch": "partial"}


def payload(number: int) -> bytes:
    return bytes([number]) * (9_000 + 5_000 * (number % 7))


def check(batch: Any) -> list[int]:
    """The numbers of a batch, whose bytes are all looked at."""
    numbers = [int(key) for key in batch["__key__"]]
    assert [bytes(data) for data in batch["bin"]] == [payload(number) for number in numbers]
    assert batch["cls"].tolist() == numbers
    return numbers


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 samples of 10 to 40 KB in 2 shards, in chunks of 10 to 20 and spans of 2 to 5."""
    directory = tmp_path_factory.mktemp("whole")
    with ShardWriter(f"{directory}/{{:06d}}.tar", max_samples=70, index=False) as writer:
        for number in range(NUM):
            writer.write({"__key__": f"{number:05d}", "bin": payload(number), "cls": number})
    storage = Storage()
    rule = ChunkRule(min_bytes=300_000, min_samples=10)
    index_shards(storage, expand_urls(f"{directory}/", storage), rule=rule)
    return directory


def table_of(directory: Path, shard: int = 0) -> SampleTable:
    path = directory / "_shardstream" / "samples" / f"{shard:06d}.tar.parquet"
    return SampleTable.from_parquet(path.read_bytes(), str(path))


def in_span_of(table: SampleTable, sample: int) -> set[int]:
    span = int(np.searchsorted(table.span_starts, sample, side="right")) - 1
    return set(range(*table.span_starts[span : span + 2].tolist()))


@pytest.fixture(params=["payload", "header"])
def damaged(request: pytest.FixtureRequest, whole: Path, tmp_path: Path) -> tuple[Path, set[int]]:
    """A copy of the set in which two spans of one chunk are damaged, and the samples in them."""
    directory = tmp_path / "set"
    shutil.copytree(whole, directory)
    table = table_of(directory)
    path = directory / "000000.tar"
    data, lost = bytearray(path.read_bytes()), set[int]()
    (first,) = np.flatnonzero(table.chunks.first_sample >= 15)[:1].tolist()
    first = int(table.chunks.first_sample[first])
    for sample in (first, int(table.span_starts[np.searchsorted(table.span_starts, first) + 2]) + 1):
        start = int(table.record_starts[sample])
        data[slice(start, start + 512) if request.param == "header" else slice(start + 600, start + 601)] = (
            b"\xff" * 512 if request.param == "header" else b"\xff"
        )
        lost |= in_span_of(table, sample)
    path.write_bytes(data)
    assert len({int(table.chunk[number]) for number in lost}) == 1
    assert 4 <= len(lost) < int(table.chunks.num_samples[table.chunk[first]]) - 2
    return directory, lost


def open_at(directory: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(f"{directory}/", **options)


def runs(dataset: StreamingDataset, world_size: int, **options: Any) -> list[list[list[int]]]:
    """Numbers by rank, batch and row."""
    return [[check(batch) for batch in loader] for loader in loaders(dataset, world_size, **{**OPTIONS, **options})]


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_only_the_samples_of_damaged_spans_are_substituted(
    whole: Path, damaged: tuple[Path, set[int]], shuffle: bool | ShuffleConfig, request: pytest.FixtureRequest
) -> None:
    """On one rank and on sizes that take turns with the kinds of damage; ``--matrix``: on all."""
    directory, lost = damaged
    turn = (request.node.callspec.params["damaged"] == "header") + SHUFFLES.index(shuffle)
    sizes = WORLD_SIZES if request.config.getoption("--matrix") else (1, *((3, 6), (2, 8), (4,))[turn % 3])
    intact = open_at(whole, shuffle=shuffle)
    dataset = open_at(directory, shuffle=shuffle, max_bad_samples=len(lost))
    stand_ins: dict[int, set[int]] = {}
    for world_size in sizes:
        for ours, theirs in zip(runs(dataset, world_size), runs(intact, world_size), strict=True):
            for got, expected in zip(ours, theirs, strict=True):
                assert len(got) == len(expected)
                for number, real in zip(got, expected, strict=True):
                    if real in lost:
                        stand_ins.setdefault(real, set()).add(number)
                    else:
                        assert number == real
    assert stand_ins.keys() == lost
    assert all(len(found) == 1 for found in stand_ins.values())  # the same on every world size
    assert lost.isdisjoint(set().union(*stand_ins.values()))
    assert runs(dataset, 3, num_workers=2) == runs(dataset, 3)


def test_bad_samples_are_listed_by_key_and_place(damaged: tuple[Path, set[int]]) -> None:
    directory, lost = damaged
    table = table_of(directory)
    with DataLoader(open_at(directory, max_bad_samples=len(lost)), device_mesh=mesh_of(1, 0), **OPTIONS) as loader:
        for _ in range(2):  # the second epoch finds the chunks in memory
            for batch in loader:
                check(batch)
            bad = loader.metrics()["bad"]
            assert {int(one["key"]) for one in bad} == lost
            assert len(bad) == len(lost)
            assert {one["stage"] for one in bad} == {"fetch"}
            for one in bad:
                low, high = table.record_starts[int(one["key"]) : int(one["key"]) + 2].tolist()
                assert (one["byte_start"], one["byte_end"]) == (low, high)


@pytest.mark.parametrize(("world_size", "shuffle"), [(1, False), (1, True), (2, True)])
def test_what_damage_costs(damaged: tuple[Path, set[int]], world_size: int, shuffle: bool) -> None:
    """A damaged chunk is asked for as often as one that fails; stand-ins are in memory already."""
    directory, lost = damaged
    dataset = open_at(directory, max_bad_samples=len(lost), shuffle=shuffle)
    asked = Counter[tuple[str, int]]()
    read_into = dataset.source.storage.read_into

    def counted(url: str, start: int, out: memoryview, **how: bool) -> None:
        asked[url, start] += 1
        read_into(url, start, out, **how)

    dataset.source.storage.read_into = counted  # type: ignore[method-assign]
    extra = []
    for loader in loaders(dataset, world_size, **OPTIONS):
        asked.clear()
        for batch in loader:
            check(batch)
        extra.append(asked.total() - len(asked))
    assert MOST_WRONG in extra
    assert set(extra) <= {0, MOST_WRONG}
    if world_size == 1:
        assert loader.metrics()["fetched_chunks"] == dataset.source.table.num_chunks


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_cache_keeps_nothing_damaged(damaged: tuple[Path, set[int]], tmp_path: Path, shuffle: bool) -> None:
    directory, lost = damaged
    dataset = open_at(directory, max_bad_samples=len(lost), shuffle=shuffle)
    cached = open_at(directory, max_bad_samples=len(lost), shuffle=shuffle, cache_dir=tmp_path / "cache")
    for world_size in (1, 3):
        for _ in range(2):
            assert runs(cached, world_size) == runs(dataset, world_size)


@pytest.mark.thorough
def test_a_chunk_that_is_all_damaged_is_left_out(whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "set"
    shutil.copytree(whole, directory)
    table = table_of(directory)
    low, high = int(table.chunks.byte_start[1]), int(table.chunks.byte_end[1])
    path = directory / "000000.tar"
    data = bytearray(path.read_bytes())
    data[low:high] = bytes(high - low)
    path.write_bytes(data)
    first = int(table.chunks.first_sample[1])
    lost = set(range(first, first + int(table.chunks.num_samples[1])))
    for shuffle in SHUFFLES:
        dataset = open_at(directory, shuffle=shuffle, max_bad_samples=len(lost))
        reference: list[Counter[int]] | None = None
        for world_size in (1, 2, 8):
            ranks = runs(dataset, world_size)
            merged = [Counter(n for rows in rows_of for n in rows) for rows_of in zip(*ranks, strict=True)]
            assert sum(merged, Counter()).keys() == set(range(NUM)) - lost
            reference = reference or merged
            assert merged == reference


def test_random_access_to_what_stands_beside_damage(damaged: tuple[Path, set[int]]) -> None:
    directory, lost = damaged
    dataset = open_at(directory)
    for number in range(min(lost) - 3, max(lost) + 3):
        if number not in lost:
            assert dataset[number]["bin"] == payload(number)
        else:
            with pytest.raises(ValueError, match="CRC32C"):
                dataset[number]
