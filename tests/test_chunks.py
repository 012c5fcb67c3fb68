"""The arena's contents: how much is on its way into it at once."""

from __future__ import annotations

import os
import threading

import pytest

from streaming.engine.memory.arena import Arena
from streaming.engine.memory.chunk_store import ChunkStore
from streaming.errors import StorageError
from streaming.fetch.layout import UnitLayout
from streaming.fetch.read import FetchRange
from streaming.metrics import Metrics

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

    def fetch(self, wanted: FetchRange, _: memoryview) -> UnitLayout:
        with self._lock:
            self.num_asked += 1
        self.asked.release()
        self.answers.acquire()
        raise StorageError(f"nothing at {wanted.byte_start}")

    def wait(self, number: int) -> None:
        """Until so many more have asked; nobody else does."""
        for _ in range(number):
            assert self.asked.acquire(timeout=60)
        assert not self.asked.acquire(timeout=0.2)


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
    arena.close()


@pytest.mark.parametrize(("mib", "at_once"), [(2, 64), (4, 32), (16, 8), (40, 8)])
def test_bytes_on_their_way_at_once(mib: int, at_once: int) -> None:
    """128 MiB, but no less than 8 chunks: then the first of them come first. One that has come makes room."""
    store, changed = Store(), threading.Condition()
    arena = Arena(4096 * MIB)
    chunks = ChunkStore(fetch=store.fetch, arena=arena, num_threads=80, metrics=Metrics(), changed=changed)
    with changed:
        units = [chunks.admit(wanted(number, mib * MIB)) for number in range(80)]
    store.wait(at_once)
    for _ in range(3):
        store.answers.release()
    store.wait(3)
    for _ in range(80):
        store.answers.release()
    with changed:
        assert changed.wait_for(lambda: all(unit is not None and unit.ready for unit in units), 60)
    assert store.num_asked == 80
    assert [str(unit.failure) for unit in units if unit] == [f"nothing at {i * mib * MIB}" for i in range(80)]
    chunks.close()
