"""Forked children: they read what their parent has read, and use nothing that is its alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, DevicePrefetcher, StreamingDataset
from streaming.common import forks
from streaming.errors import ForkedError
from streaming.run.engine.workers.ring import BatchRing
from streaming.run.replicas.broadcast import Sharing, _left_behind
from streaming.run.replicas.options import Broadcast
from streaming.storage import Storage
from streaming.storage.adapters import obstore_client
from streaming.testing.children import Child, in_child
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import SampleSet, make_sample, write_set

SIZES = (20, 12)


@pytest.fixture(scope="module")
def on_s3(mini_s3: MiniS3Server) -> SampleSet:
    url = mini_s3.create_bucket(fresh_name())
    return write_set(f"{url}/set", SIZES, storage_options=mini_s3.storage_options)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("forks"), SIZES)


def keys(batches: Any) -> list[list[str]]:
    return [list(batch["__key__"]) for batch in batches]


# --- object stores ---


@pytest.mark.thorough
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_a_child_reads_after_its_parent_has_read(mini_s3: MiniS3Server, on_s3: SampleSet, client: str) -> None:
    """Its grandchild, too; both beside the parent, which goes on."""
    storage = Storage({**mini_s3.storage_options, "client": client})
    names = [info.url for info in storage.list(on_s3.url)]
    first = bytes(storage.read(names[0]))
    other = Storage({**mini_s3.storage_options, "client": client})  # made here, used in the child alone

    def reads() -> bool:
        return bytes(storage.read(names[0])) == first == bytes(other.read(names[0]))

    assert in_child(lambda: (reads(), in_child(reads), [info.url for info in storage.list(on_s3.url)] == names)) == (
        True,
        True,
        True,
    )
    assert bytes(storage.read(names[0])) == first


@pytest.mark.thorough
def test_errors_of_a_child_are_ours(mini_s3: MiniS3Server, on_s3: SampleSet) -> None:
    storage = Storage(mini_s3.storage_options)
    assert not storage.exists(f"{on_s3.url}nothing")
    assert in_child(lambda: storage.exists(f"{on_s3.url}nothing")) is False


def test_where_the_library_cannot_be_loaded_again_the_cure_is_named(
    mini_s3: MiniS3Server, on_s3: SampleSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(mini_s3.storage_options)
    storage.exists(f"{on_s3.url}x")

    def no_memory_files(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(obstore_client.os, "memfd_create", no_memory_files)

    def says() -> str:
        with pytest.raises(OSError, match="forked") as caught:
            storage.exists(f"{on_s3.url}x")
        return str(caught.value)

    said = in_child(says)
    for word in ("set_start_method('forkserver')", "multiprocessing_context='forkserver'", "client='fsspec'"):
        assert word in said


@pytest.mark.thorough
def test_torch_loaders_fork_around_a_streaming_dataset(on_s3: SampleSet) -> None:
    dataset = on_s3.open(shuffle=False)
    here = [dataset[i]["cls"] for i in range(8)]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(dataset, range(8)), batch_size=None, num_workers=2, multiprocessing_context="fork",
        timeout=120,
    )  # fmt: skip
    assert [sample["cls"] for sample in loader] == here


def test_locks_that_another_thread_held_at_the_fork(on_s3: SampleSet) -> None:
    dataset = on_s3.open(shuffle=False)
    loader = DataLoader(dataset, batch_size=4)
    here = keys(loader)
    loader.set_epoch(0)
    loop: Any = loader._loop
    held = [
        dataset.source.storage._store._lock, dataset.source.storage._active._lock, dataset.source.storage.metrics._lock,
        dataset.source._recent._lock, loop.metrics._lock, loop._account.bad._lock,
    ]  # fmt: skip
    for lock in held:
        lock.acquire()
    try:
        child = Child(lambda: (dataset[3]["cls"], keys(loader), loader.metrics()["bad"]))
    finally:
        for lock in held:
            lock.release()
    with child:
        assert child.result() == (dataset[3]["cls"], here, [])
    loader.close()


# --- writers ---


def test_hooks_go_with_what_they_are_of() -> None:
    """Of two things alike each has its own; of one that is gone nothing is kept, nor called."""

    class Thing:
        pass

    called: list[str] = []
    kept, gone = Thing(), Thing()
    gc.collect()  # what earlier tests left
    before = len(forks._in_child)
    forks.in_children(gone, lambda _: called.append("gone"))
    forks.in_children(kept, lambda _: called.append("kept"))
    assert len(forks._in_child) == before + 2
    del gone
    assert len(forks._in_child) == before + 1
    forks._run({number: hook for number, hook in forks._in_child.items() if hook() is kept})
    assert called == ["kept"]


@pytest.mark.parametrize("place", ["s3", "disk"])
def test_a_writer_belongs_to_the_process_that_opened_it(mini_s3: MiniS3Server, tmp_path: Path, place: str) -> None:
    url = mini_s3.create_bucket(fresh_name()) if place == "s3" else str(tmp_path)
    options = mini_s3.storage_options if place == "s3" else None
    writer = ShardWriter(f"{url}/{{:06d}}.tar", storage_options=options)
    writer.write(make_sample(0))

    def child() -> str:
        with pytest.raises(ForkedError, match=f"belongs to process {os.getppid()}") as caught:
            writer.write(make_sample(1))
        with pytest.raises(ForkedError):
            writer.close()
        with pytest.raises(ZeroDivisionError), writer:
            raise ZeroDivisionError
        with ShardWriter(f"{url}/{{:06d}}.tar", storage_options=options, start_shard=5) as own:
            own.write(make_sample(5))
        return str(caught.value)

    assert "start_shard" in in_child(child)
    writer.write(make_sample(2))
    writer.close()
    dataset = StreamingDataset(f"{url}/", storage_options=options, shuffle=False)
    assert [dataset[i]["cls"] for i in range(len(dataset))] == [0, 2, 5]


@pytest.mark.parametrize("place", ["s3", "s3 by fsspec", "disk"])
def test_an_open_file_belongs_to_the_process_that_opened_it(mini_s3: MiniS3Server, tmp_path: Path, place: str) -> None:
    url = str(tmp_path) if place == "disk" else mini_s3.create_bucket(fresh_name())
    storage = Storage({**mini_s3.storage_options, "client": "fsspec" if "fsspec" in place else "obstore"})
    out = storage.open_write(f"{url}/file")
    out.write(b"here")

    def child() -> None:
        with pytest.raises(ForkedError, match="open writer"):
            out.write(b"there")
        with pytest.raises(ForkedError, match="open writer"):
            out.close()
        out.abort()

    in_child(child)
    out.close()
    assert bytes(storage.read(f"{url}/file")) == b"here"


# --- iterators and batches ---


LOADERS: dict[str, Callable[[SampleSet], Any]] = {
    "threads": lambda found: DataLoader(found.open(), batch_size=4),
    "the caller's thread": lambda found: DataLoader(found.open(), batch_size=4, num_threads=0),
    "processes": lambda found: DataLoader(found.open(transform=dict), batch_size=4, num_workers=2),
    "prefetcher": lambda found: DevicePrefetcher(DataLoader(found.open(), batch_size=4), "cpu"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.usefixtures("one_fork_server")
def test_an_iterator_belongs_to_the_process_that_began_it(on_disk: SampleSet, name: str) -> None:
    """A child is told so at once, may let go of it and begin one of its own; the parent's goes on as if nothing was."""
    loader = LOADERS[name](on_disk)
    expected = keys(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    begun = [next(batches), next(batches)]

    def child() -> list[list[str]]:
        nonlocal batches
        with pytest.raises(ForkedError, match=f"belongs to process {os.getppid()}"):
            next(batches)
        del batches
        gc.collect()
        loader.close()
        loader.set_epoch(1)
        loader.set_epoch(0)
        return keys(loader)

    assert in_child(child) == expected
    assert keys([*begun, *batches]) == expected
    loader.close()


def leased(ring: BatchRing, value: int) -> torch.Tensor:
    with ring.lease() as lease:
        return lease.allocate((64, 64), torch.int32).fill_(value)


def test_batches_that_a_child_holds_never_change_and_are_its_own() -> None:
    """Neither by what the parent builds meanwhile, nor in the parent by what the child writes or lets go of."""
    ring = BatchRing(2, 1 << 16, limit_bytes=0)  # no limit to how eagerly it gives pages back
    held = {"kept": leased(ring, 1), "let go": leased(ring, 2)}

    def child() -> tuple[list[list[int]], int]:
        seen = [held["kept"].unique().tolist(), held.pop("let go").unique().tolist()]
        held["kept"].fill_(7)
        seen.append(held["kept"].unique().tolist())
        ring.close()
        return seen, ring.num_free

    with Child(child, waits=True) as forked:
        del held["let go"]
        for value in range(100, 110):
            leased(ring, value)
        assert ring.num_free == 1
        forked.go()
        assert forked.result() == ([[1], [2], [7]], 0)
    assert held["kept"].unique().tolist() == [1]
    held.clear()
    assert (ring.num_taken, ring.num_free) == (0, 1), "slots from before the fork are not used again"
    ring.close()


class CountedLocks:
    """Stands for CUDA's page locks."""

    def __init__(self) -> None:
        self.num_locked = 0
        self.num_unlocked = 0

    def lock(self, memory: npt.NDArray[np.uint8]) -> bool:
        self.num_locked += len(memory) > 0
        return True

    def unlock(self, memory: npt.NDArray[np.uint8]) -> None:
        self.num_unlocked += len(memory) > 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("slots are locked where they lie")


def test_a_child_leaves_the_page_locks_to_its_parent() -> None:
    """CUDA works in no forked child: no batch that goes, no new one and no end of the ring calls it there."""
    ring, locks = BatchRing(2, 1 << 16), CountedLocks()
    ring.locker = locks
    held = [leased(ring, 1)]
    leased(ring, 2)

    def child() -> tuple[int, int, int]:
        held.clear()
        leased(ring, 3)  # in memory of its own: the free slot is its parent's
        num_free = ring.num_free
        ring.close()
        return locks.num_locked, locks.num_unlocked, num_free

    assert (locks.num_locked, ring.num_free) == (2, 1)
    with Child(child) as forked:
        assert forked.result() == (2, 0, 0)
    again = leased(ring, 4)
    assert again.eq(4).all()
    del again
    held.clear()
    ring.close()
    assert (locks.num_locked, locks.num_unlocked) == (2, 2)


# --- ordinary data sets ---


@pytest.mark.thorough
@pytest.mark.usefixtures("one_fork_server")
def test_a_split_of_a_streaming_dataset_is_read_by_workers(on_s3: SampleSet) -> None:
    """Neither by default nor when it is asked to fork does the loader hang after this process has read from S3."""
    dataset = on_s3.open(shuffle=False)
    split, _ = torch.utils.data.random_split(dataset, [8, 24])
    expected = sorted(dataset[i]["cls"] for i in split.indices)
    for method in (None, "fork"):
        with DataLoader(split, 4, num_workers=1, multiprocessing_context=method) as loader:
            assert sorted(int(i) for batch in loader for i in batch["cls"]) == expected


def test_a_child_leaves_the_connections_of_its_parents_broadcast_behind() -> None:
    """They go on being the parent's: the child neither uses them nor, as garbage, waits for their threads."""
    sharing = Sharing({0: lambda batch, _: batch}, Broadcast(), 0, pin=None)
    connections: Any = object()
    sharing._group = connections
    child = os.fork()
    if child == 0:
        os._exit(0 if sharing._group is None and connections in _left_behind else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sharing._group is connections
