"""The batch ring in page-locked memory: locked once a slot, unlocked before the memory goes, for the prefetcher alone.

The device is simulated: a locker that keeps account of what is locked. That CUDA takes such memory is shown by the last
test and by test_cuda.py, where there is a device.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, DevicePrefetcher, StreamingDataset
from streaming.run.device.copiers import Copied, CpuCopier, CudaCopier, CudaPageLocker
from streaming.run.engine.delivery import Haste
from streaming.run.engine.groups import BatchGroups
from streaming.run.engine.workers.pool import WorkerPool
from streaming.run.engine.workers.ring import BatchRing, Memory
from tests.support.processes.page_lock_account import PAGE, Account


def batch(ring: BatchRing, num_bytes: int) -> Memory:
    slot = ring.take()
    if slot.span_bytes < num_bytes:
        slot.grow(num_bytes)
    slot.touched(num_bytes)
    return ring.wrap(slot, num_bytes)


def test_a_slot_is_locked_once_and_again_only_for_more() -> None:
    ring, account = BatchRing(2, 64 * PAGE), Account()
    ring.locker = account
    for _ in range(10):
        memory = batch(ring, 3 * PAGE + 5)
        assert account.holds(torch.from_numpy(memory))
        del memory
    assert account.num_locks == 1
    large = batch(ring, 60 * PAGE)
    assert account.holds(torch.from_numpy(large))
    assert (account.num_locks, len(account.locked)) == (2, 1)
    grown = batch(ring, 500 * PAGE)
    assert account.holds(torch.from_numpy(grown))
    del large, grown
    ring.close()
    assert not account.locked


def test_pages_that_are_given_back_are_unlocked_first() -> None:
    ring, account = BatchRing(2, 64 * PAGE, limit_bytes=8 * PAGE), Account()
    ring.locker = account
    memory = batch(ring, 40 * PAGE)
    assert account.locked
    del memory  # more than the limit: its pages go
    assert not account.locked
    assert ring.resident_bytes == 0
    ring.close()


def test_without_a_locker_slots_are_unlocked_as_they_are_used() -> None:
    ring, account = BatchRing(2, 64 * PAGE), Account()
    ring.locker = account
    del account  # the ring keeps it
    locker: Any = ring.locker
    memory = batch(ring, PAGE)
    del memory
    assert locker.locked
    ring.locker = None
    memory = batch(ring, PAGE)
    assert not locker.locked
    del memory
    ring.close()


def test_where_locking_fails_it_is_said_once_and_batches_come_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    ring = BatchRing(2, 64 * PAGE)
    ring.locker = Account(refuse=True)
    with caplog.at_level(logging.WARNING, "streaming"):
        for _ in range(3):
            assert len(batch(ring, PAGE)) == PAGE
    assert len(caplog.records) == 1
    ring.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    with ShardWriter(f"{tmp_path}/train/{{:04d}}.tar") as writer:
        for number in range(200):
            writer.write({"__key__": f"{number:05d}", "npy": np.full(3000, number, np.int32)})
    return f"{tmp_path}/train/"


class Watching(CpuCopier):
    """Notes whether the tensors that it is to copy are page-locked."""

    def __init__(self) -> None:
        self.account = self.page_locker = Account()
        self.seen: list[bool] = []

    def issue(self, batch: Any) -> Copied:
        self.seen.append(self.account.holds(batch["npy"]))
        return super().issue(batch)


@pytest.mark.usefixtures("one_fork_server")
def test_under_the_prefetcher_worker_batches_are_locked_and_else_none(url: str) -> None:
    copier = Watching()
    with DataLoader(StreamingDataset(url, shuffle=False), 10, num_workers=2, num_threads=0) as loader:
        assert not any(copier.account.holds(batch["npy"]) for batch in loader)
        prefetcher = DevicePrefetcher(loader, "cpu", depth=2, copier=copier)
        for number, batch in enumerate(prefetcher):
            assert batch["npy"][:, 0].tolist() == list(range(10 * number, 10 * number + 10))
        assert copier.seen == [True] * 20
        assert 1 <= copier.account.num_locks < 20, "once a slot, not once a batch"
        del batch
        locks = copier.account.num_locks
        for batch in loader:
            assert not copier.account.holds(batch["npy"])
        del batch
        assert copier.account.num_locks == locks
    assert not copier.account.locked


@pytest.mark.parametrize("num_threads", [0, 2])
def test_under_the_prefetcher_batches_of_threads_are_allocated_page_locked_and_else_none(
    url: str, num_threads: int
) -> None:
    copier = Watching()
    with DataLoader(StreamingDataset(url, shuffle=False), 10, num_threads=num_threads) as loader:
        for number, batch in enumerate(DevicePrefetcher(loader, "cpu", depth=2, copier=copier)):
            assert batch["npy"][:, 0].tolist() == list(range(10 * number, 10 * number + 10))
        assert copier.seen == [True] * 20
        given = len(copier.account.given)
        assert not any(copier.account.holds(batch["npy"]) for batch in loader)
        assert len(copier.account.given) == given
    assert not copier.account.locked


@pytest.mark.parametrize("num_threads", [0, 2])
def test_arrays_of_one_size_which_the_consumer_cuts_in_groups_are_page_locked_too(url: str, num_threads: int) -> None:
    copier, opened = Watching(), []
    dataset = StreamingDataset(url, shuffle=False, decode={"npy": "array:int32"})
    with DataLoader(dataset, 10, num_threads=num_threads) as loader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Haste, "asks", lambda haste: setattr(haste, "is_great", True))
        group_of = BatchGroups.open
        patch.setattr(BatchGroups, "open", lambda *given: opened.append(group_of(*given)) or opened[-1])
        for number, batch in enumerate(DevicePrefetcher(loader, "cpu", depth=2, copier=copier)):
            assert batch["npy"][:, -1].tolist() == list(range(10 * number, 10 * number + 10))
        assert copier.seen == [True] * 20
        assert sum(group.last - group.first for group in opened if group is not None) > 10
        assert not any(copier.account.holds(batch["npy"]) for batch in loader)


class FakeCudart:
    """Takes calls as ``torch.cuda.cudart()`` does."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def device(self, device: torch.device) -> Any:
        self.calls.append(("device", device))
        return torch.no_grad()  # any context

    def cudart(self) -> FakeCudart:
        return self

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.calls.append(("register", pointer, size, flags))
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append(("unregister", pointer))
        return 0


def test_the_cuda_locker_registers_the_very_range_and_says_when_it_cannot() -> None:
    cuda, device = FakeCudart(), torch.device("cuda", 1)
    locker, memory = CudaPageLocker(device, cuda), np.zeros(2 * PAGE, np.uint8)
    assert locker.lock(memory)
    locker.unlock(memory)
    pointer = memory.ctypes.data
    assert cuda.calls == [
        ("device", device), ("register", pointer, 2 * PAGE, 1), ("device", device), ("unregister", pointer),
    ]  # fmt: skip
    cuda.code = 2
    assert not locker.lock(memory)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copies_straight_from_the_ring(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "start_if_up", lambda *_: True)  # else threads may build the first batches

    class Noting(CudaCopier):
        pinned: list[bool] = []  # noqa: RUF012  of this test alone

        def issue(self, batch: Any) -> Copied:
            self.pinned.append(batch["npy"].is_pinned())
            return super().issue(batch)

    copier = Noting(torch.device("cuda", torch.cuda.current_device()))
    with DataLoader(StreamingDataset(url, shuffle=False), 10, num_workers=2) as loader:
        for number, batch in enumerate(DevicePrefetcher(loader, "cuda", depth=2, copier=copier)):
            torch.cuda._sleep(5_000_000)  # the device is behind the host
            assert batch["npy"][:, 0].tolist() == list(range(10 * number, 10 * number + 10))
    assert copier.pinned == [True] * 20
