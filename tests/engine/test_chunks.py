"""The arena's contents: how much is on its way into it at once."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming import DataLoader, ShuffleConfig
from streaming.common.counters import Metrics
from streaming.errors import ChecksumError, StorageError
from streaming.run.engine.memory import mapped
from streaming.run.engine.memory.arena import PAGE_BYTES, Arena, Extents, MergedRanges
from streaming.run.engine.memory.chunk_store import ChunkStore, Unit
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.storage import Checked
from tests.support.sets.data_sets import write_set

MIB = 1 << 20


def wanted(number: int, num_bytes: int) -> FetchRange:
    return FetchRange(
        url="s3://b/0.tar", byte_start=number * num_bytes, byte_end=(number + 1) * num_bytes, first_sample=number,
        num_samples=1, crc32c=None, shard_bytes=1 << 40,
    )  # fmt: skip


class Store:
    """A store that answers when it is told to, one request at a time, always with an error."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.answers = threading.Semaphore(0)
        self.num_asked = 0
        self._lock = threading.Lock()

    def fetch(self, wanted: FetchRange, _: memoryview) -> Fetched:
        with self._lock:
            self.num_asked += 1
        self.asked.release()
        self.answers.acquire()
        raise StorageError(f"nothing at {wanted.byte_start}")

    def until_asked(self, number: int) -> None:
        """Until so many more have asked; nobody else does."""
        for _ in range(number):
            assert self.asked.acquire(timeout=60)
        assert not self.asked.acquire(timeout=0.2)


def test_all_that_is_given_back_is_one_range_again() -> None:
    for order in permutations(range(4)):
        extents = Extents(40)
        starts = [extents.take(10) for _ in range(4)]
        assert extents.take(1) is None
        for number, one in enumerate(order, 1):
            extents.give(starts[one] or 0, 10)
            free = extents.free_ranges()
            assert sum(stop - start for start, stop in free) == 10 * number == 40 - extents.used
            assert all(before < after for (_, before), (after, _) in pairwise(free)), "neighbors are merged"
        assert free == [(0, 40)]


@given(st.integers(0, 2**32))
def test_ranges_are_the_numbers_in_them(seed: int) -> None:
    dice, ranges, numbers = random.Random(seed), MergedRanges(), set[int]()
    for _ in range(40):
        start, stop = sorted(dice.sample(range(30), 2))
        if dice.random() < 0.5 or numbers & set(range(start, stop)):
            ranges.cut(start, stop)
            numbers -= set(range(start, stop))
        else:
            ranges.add(start, stop)
            numbers |= set(range(start, stop))
        assert [number for low, high in ranges.all for number in range(low, high)] == sorted(numbers)
        assert all(before < after for (_, before), (after, _) in pairwise(ranges.all)), "neighbors are merged"
        assert ranges.total == len(numbers)


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [True, False])
def test_an_arena_keeps_pages_for_what_comes_next_within_its_budget(*, shared: bool) -> None:
    dice, held = random.Random(0), list[tuple[int, int]]()
    arena, drops = Arena(8 * MIB, shared=shared), list[int]()
    drop = arena._drop

    def counted(memory: Any, start: int, num_bytes: int) -> None:
        assert not any(start < at + size and at < start + num_bytes for at, size in held), "in use"
        drops.append(num_bytes)
        drop(memory, start, num_bytes)

    arena._drop, taken = counted, 0
    for _ in range(600):
        size = MIB + dice.randrange(-8, 9) * PAGE_BYTES
        while (start := arena.allocate(size)) is None:
            arena.free(*held.pop(dice.randrange(3)))
        arena.memory[start : start + size] = b"x" * size
        held.append((start, size))
        taken += size
        if shared:
            assert os.fstat(arena.fd).st_blocks * 512 <= 8 * MIB
    assert 0 < sum(drops) < 0.6 * taken, "most come to pages that were in use before"
    arena.close()


def test_pages_of_an_arena_in_pieces_keep_to_its_budget() -> None:
    """What lies beyond the budget, since no piece below it is large enough, counts against what is free below."""
    arena = Arena(8 * MIB)

    def take(mib: int) -> int:
        start = arena.allocate(mib * MIB)
        assert start is not None
        arena.memory[start : start + mib * MIB] = b"x" * (mib * MIB)
        assert os.fstat(arena.fd).st_blocks * 512 <= 8 * MIB
        return start

    starts = [take(2) for _ in range(4)]
    for start in starts[::2]:
        arena.free(start, 2 * MIB)
    assert take(4) == 8 * MIB, "beyond the budget"
    arena.free(starts[1], 2 * MIB)
    assert take(2) == 0
    assert os.fstat(arena.fd).st_blocks * 512 == 8 * MIB, "what is beyond it is given back, and no more"
    used = arena.used_bytes
    arena.shrink(0, 2 * MIB, 2 * MIB - PAGE_BYTES)
    arena.shrink(0, 2 * MIB - PAGE_BYTES, 2 * MIB - 2 * PAGE_BYTES + 1)  # no whole page
    assert arena.used_bytes == used - PAGE_BYTES
    arena.close()


@pytest.mark.parametrize(("mib", "at_once"), [(2, 64), (4, 32), (16, 8), (40, 8)])
def test_bytes_on_their_way_at_once(mib: int, at_once: int) -> None:
    """128 MiB, but no less than 8 chunks: then the first of them come first. One that has come makes room."""
    store, changed = Store(), threading.Condition()
    arena = Arena(4096 * MIB)
    chunks = ChunkStore(
        fetch=store.fetch, arena=arena, num_threads=80, metrics=Metrics(), changed=changed, maps=mapped.NoMaps()
    )
    with changed:
        units = [chunks.admit(wanted(number, mib * MIB)) for number in range(80)]
    store.until_asked(at_once)
    for _ in range(3):
        store.answers.release()
    store.until_asked(3)
    for _ in range(80):
        store.answers.release()
    with changed:
        assert changed.wait_for(lambda: all(unit is not None and unit.ready for unit in units), 60)
    assert store.num_asked == 80
    assert [str(unit.failure) for unit in units if unit] == [f"nothing at {i * mib * MIB}" for i in range(80)]
    chunks.close()


@pytest.mark.thorough
def test_what_the_first_batch_waits_for_has_the_network_to_itself() -> None:
    """Also before what an earlier run has left; the others come when there is a first batch."""
    store, changed, asked = Store(), threading.Condition(), list[int]()

    def fetch(wanted: FetchRange, out: memoryview) -> Fetched:
        asked.append(wanted.byte_start // (2 * MIB))
        return store.fetch(wanted, out)

    chunks = ChunkStore(
        fetch=fetch, arena=Arena(1024 * MIB), num_threads=80, metrics=Metrics(), changed=changed, maps=mapped.NoMaps()
    )
    with changed:
        chunks.begin()
        earlier = [chunks.admit(wanted(number, 2 * MIB)) for number in range(10)]
    store.until_asked(2)
    with changed:
        chunks.begin()
        units = [chunks.admit(wanted(number, 2 * MIB), is_awaited=number < 20) for number in range(8, 80)]
    store.until_asked(12)
    for _ in range(12):
        store.answers.release()
    store.until_asked(0)
    assert sorted(asked) == [0, 1, *range(8, 20)]
    store.answers.release()
    store.until_asked(1)
    with changed:
        chunks.go_on()
    store.until_asked(64 - 2)
    for _ in range(80):
        store.answers.release()
    with changed:
        assert changed.wait_for(lambda: all(unit is not None and unit.ready for unit in earlier + units), 60)
    assert len(asked) == len({*asked}) == 80
    chunks.close()


def test_units_in_use_stay_and_rows_go_with_their_unit() -> None:
    """Of two units that there is room for; those that nobody needs are kept, and give way to others."""
    damage = ChecksumError("damaged")

    def fetch(wanted: FetchRange, _: memoryview) -> Fetched:
        if wanted.first_sample == 3:
            raise damage
        where = np.zeros((1, 1), np.int64)
        layout = UnitLayout(
            keys=[str(wanted.first_sample)], fields=("x",), starts=where, sizes=where + 1,
            num_bytes=wanted.num_bytes // (2 if wanted.first_sample == 1 else 1),
            damage={0: damage} if wanted.first_sample == 0 else {},
        )  # fmt: skip
        return Fetched(checked=None if layout.damage else Checked.comparing(layout.num_bytes, ()), found=layout)

    changed = threading.Condition()
    chunks = ChunkStore(
        fetch=fetch, arena=Arena(2 * MIB), num_threads=1, metrics=Metrics(), changed=changed, maps=mapped.NoMaps()
    )
    chunks.retain = True

    def get(number: int) -> Unit | None:
        with changed:
            unit = chunks.admit(wanted(number, MIB))
            assert changed.wait_for(lambda: unit is None or unit.ready, 60)
            return unit

    def release(unit: Unit | None) -> None:
        assert unit is not None
        with changed:
            chunks.release(unit)

    chunks.limit_bytes = MIB
    first = get(0)
    assert get(1) is None, "the arena is larger than the limit"
    chunks.limit_bytes = 2 * MIB
    second = get(1)
    assert first is not None
    assert second is not None
    assert get(2) is None, "both are in use"
    assert chunks.arena.used_bytes == MIB + MIB // 2, "what was not read is given back"
    release(first)
    with changed:
        assert chunks.hold(wanted(0, MIB)) == [first]
        for other in ({"source": 1}, {"fields": ("x",)}, {"kept": "half"}, {"url": "s3://b/1.tar"}):
            assert not chunks.holds(replace(wanted(0, MIB), **other))
            assert chunks.hold(replace(wanted(0, MIB), **other)) == [], "read in another way, it may lack samples"
    assert get(2) is None, "somebody reads it"
    release(first)
    assert get(0) is first, "kept"
    assert get(2) is None, "in use again"
    assert get(0) is first
    release(first)
    assert get(2) is None, "in use by one of two"
    assert chunks.rows.damage(np.array([first.first_row])) == {0: damage}
    release(first)
    third = get(2)
    assert third is not None
    assert third.start == first.start
    assert chunks.rows.damage(np.arange(2)) == {}, "its rows went with it"
    assert {second.first_row, third.first_row} == {0, 1}
    assert chunks.rows.select(np.array([third.first_row]), None)[0] == ["2"]
    release(third)
    release(second)  # which takes half
    with changed:
        assert chunks.keep_first([wanted(2, MIB), wanted(1, MIB)]) == 2
    release(get(4))
    assert [chunks.holds(wanted(number, MIB)) for number in (1, 2, 4)] == [False, True, True], "the last gave way"
    release(get(5))
    assert [chunks.holds(wanted(number, MIB)) for number in (2, 4, 5)] == [False, True, True], "the oldest gave way"
    lost, again = get(3), None
    assert lost is not None
    assert lost.damage is damage
    release(lost)
    again = get(3)
    assert again is not lost, "what is damaged is fetched again"
    check(chunks)
    chunks.close()


def check(store: ChunkStore) -> None:
    units = list(store._units)
    used = [-(-(unit.skew_bytes + unit.num_bytes) // PAGE_BYTES) * PAGE_BYTES for unit in units]
    assert store.arena.used_bytes == sum(used) <= store.limit_bytes
    for key, unit in store._cold.items():
        assert store._units.get(unit.wanted) is unit
        assert unit.wanted.key == key
        assert unit.ready
        assert not unit.users
    assert all(unit.users or not unit.ready or unit.wanted.key in store._cold for unit in units)


@pytest.fixture
def checked_stores(monkeypatch: pytest.MonkeyPatch) -> set[ChunkStore]:
    """Stores that were used, each checked after every step."""
    found = set[ChunkStore]()

    def checked(step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(store: ChunkStore, *given: Any, **how: Any) -> Any:
            result = step(store, *given, **how)
            if not store._closed:
                check(store)
            found.add(store)
            return result

        return stepped

    for name in ("admit", "hold", "release"):
        monkeypatch.setattr(ChunkStore, name, checked(getattr(ChunkStore, name)))
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"fields": ["cls", "txt"]}, {"on_error": "substitute"}, {"on_error": "substitute", "transform": dict}],
    ids=["mapped", "fields", "substitutes", "threads"],
)
def test_what_is_held_is_accounted_for_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked_stores: set[ChunkStore], options: dict[str, Any]
) -> None:
    """The arena holds the units and nothing else; a unit is needed, on its way, or kept, and gives way if kept."""
    samples = write_set(tmp_path)
    if "transform" not in options:
        monkeypatch.setattr(mapped, "LEAST_BYTES", 1)  # pieces begin where they do in a page of their file
    if "on_error" in options:
        tar = min(tmp_path.glob("*.tar"))
        with tar.open("r+b") as file:
            file.seek(tar.stat().st_size // 2)
            file.write(b"?" * 30_000)

    dataset = samples.open(shuffle=ShuffleConfig(lanes=2, window=20), max_bad_samples=99, **options)
    with DataLoader(dataset, batch_size=10, memory_limit="1MiB", num_threads=2) as loader:
        for batches in (None, 3, None, 1, None):
            for number, _ in enumerate(loader, 1):
                if number == batches:
                    break
            if batches is None:
                (store,) = checked_stores
                with store.changed:
                    assert store.changed.wait_for(lambda: not store.pending(), 60)  # noqa: B023
                    check(store)
                assert sum(unit.users for unit in store._units) == 0, "nothing is held for an epoch that ended"
