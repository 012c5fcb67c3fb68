"""What only a CUDA device can show: page-locked memory, and batches that stay right while their memory is reused.

``make gpu`` runs these, the other tests marked ``gpu`` and the figures. They are collected, and skipped, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, DevicePrefetcher, StreamingDataset
from streaming.run.device.copiers import Copied, CudaCopier, CudaPageLocker
from streaming.run.engine.workers.pool import WorkerPool
from streaming.run.engine.workers.ring import Memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("one_fork_server"),
]

NUM_SAMPLES, LENGTH, BATCH_SIZE = 320, 40_000, 16
PRIME = 1_000_003
BEHIND = 5_000_000
"""Clock cycles, some milliseconds: how far each step puts the device behind the host."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each sample is told by its number: element i of sample n is (n * PRIME + i) mod 2**31."""
    folder = tmp_path_factory.mktemp("cuda")
    with ShardWriter(f"{folder}/{{:04d}}.tar", max_samples=80) as writer:
        for number in range(NUM_SAMPLES):
            row = ((number * PRIME + np.arange(LENGTH)) % 2**31).astype(np.int32)
            writer.write({"__key__": f"{number:05d}", "npy": row, "cls": number})
    return f"{folder}/"


@pytest.fixture
def workers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders wait for their worker processes: else threads may build the first batches."""
    monkeypatch.setattr(WorkerPool, "start_if_up", lambda *_: True)


def is_right(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether every element is what its number says, on the device: bool []. The host does not wait."""
    wanted = (batch["cls"][:, None] * PRIME + torch.arange(LENGTH, device=batch["cls"].device)) % 2**31
    return (batch["npy"] == wanted).all()


class Noting(CudaCopier):
    """Notes how the batches that it copies lie in memory, and every range that is locked and unlocked."""

    class Locker(CudaPageLocker):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.locked: dict[int, int] = {}
            self.num_locks = 0

        def lock(self, memory: Memory) -> bool:
            assert memory.ctypes.data not in self.locked
            self.locked[memory.ctypes.data] = memory.nbytes
            self.num_locks += 1
            return super().lock(memory)

        def unlock(self, memory: Memory) -> None:
            assert self.locked.pop(memory.ctypes.data) == memory.nbytes
            assert torch.from_numpy(memory).is_pinned()
            super().unlock(memory)
            assert not torch.from_numpy(memory).is_pinned()

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(device)
        self.page_locker = self.locker = Noting.Locker(device)
        self.were_pinned: list[bool] = []

    def issue(self, batch: Any) -> Copied:
        self.were_pinned.append(batch["npy"].is_pinned())
        return super().issue(batch)


def in_current_stream() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


@pytest.mark.usefixtures("workers_at_once")
@pytest.mark.parametrize("stream", [in_current_stream, torch.cuda.Stream], ids=["default-stream", "own-stream"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 4])
def test_every_batch_is_right_while_slots_and_device_memory_are_reused(
    url: str, num_workers: int, depth: int, stream: Callable[[], Any]
) -> None:
    copier, right, numbers = Noting(), [], []
    with (
        DataLoader(StreamingDataset(url), BATCH_SIZE, num_workers=num_workers, memory_limit="128MiB") as loader,
        torch.cuda.stream(stream()),
    ):
        expected = [batch["cls"].tolist() for batch in loader]
        loader.set_epoch(0)
        prefetcher = DevicePrefetcher(loader, "cuda", depth=depth, copier=copier)
        for batch in prefetcher:
            torch.cuda._sleep(BEHIND)
            right.append(is_right(batch))
            numbers.append(batch["cls"])
            del batch
        torch.cuda.current_stream().synchronize()
        assert torch.stack(right).tolist() == [True] * (NUM_SAMPLES // BATCH_SIZE)
        assert torch.stack(numbers).tolist() == expected
        if num_workers:
            assert copier.were_pinned == [True] * len(right)
            assert 1 <= copier.locker.num_locks < len(right), "once a slot, not once a batch"
        else:
            assert copier.locker.num_locks == 0
    assert not copier.locker.locked, "closed loaders leave nothing locked"


@pytest.mark.usefixtures("workers_at_once")
def test_batches_that_are_kept_stay_as_they_are(url: str) -> None:
    with DataLoader(StreamingDataset(url), BATCH_SIZE, num_workers=2) as loader:
        kept = []
        for batch in DevicePrefetcher(loader, "cuda"):
            torch.cuda._sleep(BEHIND)
            kept.append(batch)
        assert torch.stack([is_right(batch) for batch in kept]).all()


@pytest.mark.usefixtures("workers_at_once")
@pytest.mark.parametrize("taken", [1, 7])
def test_a_loop_left_in_the_middle_of_copies_leaves_nothing_locked_and_the_next_is_right(url: str, taken: int) -> None:
    copier = Noting()
    with DataLoader(StreamingDataset(url), BATCH_SIZE, num_workers=2) as loader:
        prefetcher = DevicePrefetcher(loader, "cuda", depth=3, copier=copier)
        stream: Iterator[Any] = iter(prefetcher)
        for _ in range(taken):
            torch.cuda._sleep(20 * BEHIND)
            next(stream)
        prefetcher.close()
        assert not copier.locker.locked
        assert torch.stack([is_right(batch) for batch in prefetcher]).all()
        assert copier.locker.locked
    assert not copier.locker.locked


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pin_memory_gives_page_locked_batches_to_any_loop(url: str, num_workers: int) -> None:
    with DataLoader(StreamingDataset(url), BATCH_SIZE, num_workers=num_workers, pin_memory=True) as loader:
        right, moved = [], []
        for batch in loader:
            assert batch["npy"].is_pinned()
            assert batch["cls"].is_pinned()
            torch.cuda._sleep(BEHIND)
            moved.append({name: batch[name].to("cuda", non_blocking=True) for name in ("npy", "cls")})
            right.append(is_right(moved[-1]))
            del batch  # torch's allocator knows of the copy
        assert torch.stack(right).tolist() == [True] * (NUM_SAMPLES // BATCH_SIZE)


@pytest.mark.usefixtures("workers_at_once")
def test_a_checkpoint_taken_over_device_batches_goes_on_at_the_next_one(url: str) -> None:
    def numbers(batches: Any, count: int) -> list[list[int]]:
        return [batch["cls"].tolist() for batch, _ in zip(batches, range(count), strict=False)]

    with DataLoader(StreamingDataset(url), BATCH_SIZE, num_workers=2) as loader:
        whole = [batch["cls"].tolist() for batch in loader]
    with DataLoader(StreamingDataset(url), BATCH_SIZE, num_workers=2) as loader:
        prefetcher = DevicePrefetcher(loader, "cuda", depth=3)
        stream = iter(prefetcher)
        begun = [next(stream)["cls"].tolist() for _ in range(5)]
        state = prefetcher.state_dict()
    with DataLoader(StreamingDataset(url), BATCH_SIZE) as loader:
        prefetcher = DevicePrefetcher(loader, "cuda")
        prefetcher.load_state_dict(state)
        assert begun + numbers(prefetcher, 99) == whole
