"""DevicePrefetcher: on the CPU, on a simulated CUDA device that does as little as it may, and on a real one."""

from __future__ import annotations

import gc
import json
import random
import threading
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError, IteratorEndedError, IteratorSupersededError, StateError
from streaming.run.device.copiers import Copied, CpuCopier, CudaCopier, _is_dense, map_tensors
from streaming.run.device.prefetcher import DevicePrefetcher, resolve_device
from tests.support.code.folders import ROOT

pytestmark = pytest.mark.usefixtures("one_fork_server")

CUDA0 = torch.device("cuda", 0)
NUM_SAMPLES = 37


# --- a loader that tells what happens to it ---


class Loader:
    """Batches 0, 1, 2, …; the position counts batches pulled, an epoch ends when ``size`` have been."""

    def __init__(self, size: int, *, fail_at: int | None = None) -> None:
        self.size, self.fail_at = size, fail_at
        self.epoch, self.pulled, self.running, self.closed = 0, 0, 0, 0
        self.position: dict[str, Any] = {"at": {"batch": 0}, "next_seed": None}

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.running += 1
        try:
            start = self.position["at"]["batch"] if self.pulled == 0 else 0
            for number in range(start, self.size):
                if number == self.fail_at:
                    raise ValueError(f"batch {number}")
                self.pulled += 1
                self.position["at"]["batch"] = number + 1
                yield {"x": torch.full((2,), number), "__key__": [str(number)]}
            self.epoch += 1
            self.position["at"]["batch"] = 0
        finally:
            self.running -= 1

    def state_dict(self) -> dict[str, Any]:
        return self.position  # not a copy, as some loaders do

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = json.loads(json.dumps(state))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.position["at"]["batch"] = 0

    def seed(self, seed: int) -> None:
        self.position["next_seed"] = seed

    def metrics(self) -> dict[str, Any]:
        return {"pulled": self.pulled}

    def close(self) -> None:
        self.closed += 1


def number_of(batch: Mapping[str, Any]) -> int:
    assert batch["__key__"] == [str(batch["x"][0].item())]
    return int(batch["x"][0])


# --- order, depth, state ---


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 8])
def test_all_batches_in_order_with_depth_of_them_ahead(depth: int, size: int) -> None:
    loader = Loader(size)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=depth)
    assert len(prefetcher) == size
    seen = []
    for batch in prefetcher:
        seen.append(number_of(batch))
        assert loader.pulled == min(size, len(seen) + depth)
    assert seen == list(range(size))


def test_nothing_is_pulled_before_the_first_batch_is_asked_for() -> None:
    loader = Loader(3)
    iter(DevicePrefetcher(loader, "cpu"))
    assert (loader.pulled, loader.running) == (0, 0)


@pytest.mark.parametrize("depth", [1, 3])
def test_state_is_that_of_the_batch_handed_out_last(depth: int) -> None:
    loader = Loader(5)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=depth)
    assert prefetcher.state_dict()["at"] == {"batch": 0}
    for count, _ in enumerate(prefetcher, 1):
        assert prefetcher.state_dict()["at"] == {"batch": count}
        assert prefetcher.epoch == 0
    assert (prefetcher.epoch, prefetcher.state_dict()["at"]) == (1, {"batch": 0})


def test_a_state_is_the_callers_own() -> None:
    prefetcher = DevicePrefetcher(Loader(3), "cpu")
    next(iter(prefetcher))
    stream = iter(prefetcher)
    next(stream)
    prefetcher.state_dict()["at"]["batch"] = 99
    assert prefetcher.state_dict()["at"] == {"batch": 1}


def test_a_loop_left_early_keeps_its_position_and_takes_the_loader_back() -> None:
    loader = Loader(4)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=9)
    for batch in prefetcher:
        assert loader.epoch == 1
        if number_of(batch) == 1:
            break
    assert (prefetcher.epoch, prefetcher.state_dict()["at"]) == (0, {"batch": 2})
    assert loader.epoch == 0
    assert [number_of(batch) for batch in prefetcher] == [0, 1, 2, 3]
    assert (loader.epoch, prefetcher.epoch) == (1, 1)


def test_a_loaded_state_ends_the_loop_and_is_the_position() -> None:
    loader = Loader(6)
    prefetcher = DevicePrefetcher(loader, "cpu")
    stream = iter(prefetcher)
    next(stream)
    loader.pulled = 0
    prefetcher.load_state_dict({"at": {"batch": 4}, "next_seed": None})
    loader.pulled = 0
    assert prefetcher.state_dict()["at"] == {"batch": 4}
    with pytest.raises(IteratorSupersededError, match=r"load_state_dict\(\) was called by .*test_device\.py"):
        next(stream)
    assert [number_of(batch) for batch in prefetcher] == [4, 5]


def test_set_epoch_ends_the_loop_unless_it_is_the_one_in_progress() -> None:
    loader = Loader(3)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=8)
    stream = iter(prefetcher)
    next(stream)
    prefetcher.set_epoch(0)
    assert loader.epoch == 1, "the loader has read to the end and stays there"
    assert number_of(next(stream)) == 1
    prefetcher.set_epoch(1)
    with pytest.raises(IteratorSupersededError, match=r"set_epoch\(1\) was called by .*test_device\.py"):
        next(stream)
    assert (prefetcher.epoch, loader.epoch, loader.running) == (1, 1, 0)
    assert prefetcher.state_dict()["at"] == {"batch": 0}


def test_a_seed_reaches_the_states_of_batches_pulled_before_it() -> None:
    prefetcher = DevicePrefetcher(Loader(4), "cpu")
    stream = iter(prefetcher)
    next(stream)
    prefetcher.seed(7)
    assert prefetcher.state_dict() == {"at": {"batch": 1}, "next_seed": 7}
    next(stream)
    assert prefetcher.state_dict() == {"at": {"batch": 2}, "next_seed": 7}


def test_metrics_and_close_are_passed_on() -> None:
    loader = Loader(4)
    with DevicePrefetcher(loader, "cpu") as prefetcher:
        assert prefetcher.metrics() == {"pulled": 0}
    assert loader.closed == 1


def test_a_plain_iterable_is_enough() -> None:
    prefetcher = DevicePrefetcher([torch.tensor(1), torch.tensor(2), "three"], "cpu")
    assert list(prefetcher) == list(prefetcher) == [1, 2, "three"]
    prefetcher.close()
    with pytest.raises(AttributeError, match="state_dict"):
        prefetcher.state_dict()


# --- ends ---


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_an_error_of_the_loader_comes_after_the_batches_before_it(fail_at: int) -> None:
    loader = Loader(9, fail_at=fail_at)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=3)
    seen = []
    with pytest.raises(ValueError, match=f"batch {fail_at}"):
        seen.extend(number_of(batch) for batch in prefetcher)
    assert seen == list(range(fail_at))
    assert prefetcher.state_dict()["at"] == {"batch": fail_at}
    assert (loader.running, loader.pulled) == (0, fail_at)


def test_an_error_of_a_copy_comes_at_its_place_too() -> None:
    class Failing(CpuCopier):
        def issue(self, batch: Any) -> Copied:
            if number_of(batch) == 2:
                raise torch.OutOfMemoryError("no room for batch 2")
            return super().issue(batch)

    loader = Loader(9)
    seen = []
    with pytest.raises(torch.OutOfMemoryError, match="batch 2"):
        seen.extend(number_of(batch) for batch in DevicePrefetcher(loader, "cpu", copier=Failing()))
    assert (seen, loader.running) == ([0, 1], 0)


def test_an_interrupt_comes_at_once() -> None:
    class Interrupted(Loader):
        def state_dict(self) -> dict[str, Any]:
            if self.pulled == 3:
                raise KeyboardInterrupt
            return super().state_dict()

    loader = Interrupted(9)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=2)
    with pytest.raises(KeyboardInterrupt):
        next(iter(prefetcher))
    assert loader.running == 0
    assert prefetcher.state_dict()["at"] == {"batch": 0}, "two were pulled, none was handed out"


def test_an_error_in_the_loop_closes_the_source() -> None:
    loader = Loader(9)

    def train() -> None:
        for _ in DevicePrefetcher(loader, "cpu"):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train()
    assert loader.running == 0


def check_that_it_raises(stream: Any, taken: int, kind: type[IteratorEndedError]) -> None:
    """But not behind its last batch."""
    for _ in range(2):
        if taken == 5:
            assert next(stream, "over") == "over"
        else:
            with pytest.raises(kind):
                next(stream)


def close_prefetcher(prefetcher: DevicePrefetcher, stream: Any, taken: int) -> None:
    prefetcher.close()
    state = prefetcher.state_dict()
    check_that_it_raises(stream, taken, IteratorEndedError)
    assert prefetcher.state_dict() == state


def close_stream(prefetcher: DevicePrefetcher, stream: Any, taken: int) -> None:
    stream.close()
    assert next(stream, "over") == "over"


def begin_anew(prefetcher: DevicePrefetcher, stream: Any, taken: int) -> None:
    anew = iter(prefetcher)
    assert number_of(next(anew)) == 0
    check_that_it_raises(stream, taken, IteratorSupersededError)
    assert number_of(next(anew)) == 1, "the end of the old loop does not disturb the new one"
    anew.close()


@pytest.mark.parametrize("end", [close_prefetcher, close_stream, begin_anew])
@pytest.mark.parametrize("taken", [1, 3, 5])
def test_every_end_closes_the_source_and_lets_go_of_batches(
    end: Callable[[DevicePrefetcher, Any, int], None], taken: int
) -> None:
    loader = Loader(5)
    copier = Remembering()
    prefetcher = DevicePrefetcher(loader, "cpu", copier=copier)
    stream = iter(prefetcher)
    for _ in range(taken):
        next(stream)
    end(prefetcher, stream, taken)
    prefetcher.close()
    assert loader.running == 0
    assert [ref() for ref in copier.sources] == [None] * len(copier.sources)


class ClosableIterator:
    """An iterator that somebody else refers to as well, so that it stops only when it is closed."""

    def __init__(self) -> None:
        self.closed = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return 1

    def close(self) -> None:
        self.closed = True


def test_the_loaders_iterator_is_closed_but_not_one_that_was_given() -> None:
    iterator = ClosableIterator()

    class Loading:
        def __iter__(self) -> Iterator[int]:
            return iterator

    next(iter(DevicePrefetcher(Loading(), "cpu")))
    assert iterator.closed
    numbers = iter(range(9))
    given = (number for number in numbers)
    prefetcher = DevicePrefetcher(given, "cpu", depth=1)
    assert next(iter(prefetcher)) == 0
    assert next(given) == 2, "it is its owner's"
    prefetcher.close()
    assert list(given) == []


def test_a_stop_iteration_in_a_copy_does_not_pass_for_the_end() -> None:
    class Stopping(CpuCopier):
        def issue(self, batch: Any) -> Copied:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iter(DevicePrefetcher(Loader(3), "cpu", copier=Stopping())))


def test_dropping_everything_closes_the_source_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        loader = Loader(5)
        prefetcher = DevicePrefetcher(loader, "cpu")
        stream = iter(prefetcher)
        next(stream)
        ref = weakref.ref(prefetcher)
        del stream
        assert loader.running == 0
        del prefetcher
        assert ref() is None
    finally:
        gc.enable()


class Remembering(CpuCopier):
    """Holds source tensors weakly."""

    def __init__(self) -> None:
        self.sources: list[weakref.ref[torch.Tensor]] = []

    def issue(self, batch: Any) -> Copied:
        self.sources.append(weakref.ref(batch["x"]))
        return super().issue(batch)


def test_a_batch_lives_as_long_as_the_consumer_wants() -> None:
    copier = Remembering()
    stream = iter(DevicePrefetcher(Loader(9), "cpu", depth=2, copier=copier))
    next(stream)
    next(stream)
    alive = [ref() is not None for ref in copier.sources]
    assert alive == [False, False, True, True], "neither the generator nor the queue keeps what was handed out"


# --- arguments and structures ---


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, "2", None])
def test_a_depth_that_is_none(depth: Any) -> None:
    with pytest.raises(ConfigError, match="depth: expected an integer of at least 1"):
        DevicePrefetcher([], "cpu", depth=depth)


def test_a_loader_that_is_none() -> None:
    with pytest.raises(ConfigError, match="loader: expected a DataLoader"):
        DevicePrefetcher(3, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_cuda_without_cuda_names_the_cure(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'sees no CUDA device.*device="cpu", or device=None'):
        DevicePrefetcher([], device)


@pytest.mark.parametrize("device", ["mps", "meta", "gpu", "", -1, True, 1.5])
def test_devices_that_are_none(device: Any) -> None:
    with pytest.raises(ConfigError, match='device: expected "cuda", "cuda:N", "cpu" or None'):
        resolve_device(device)


def test_the_default_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(None) == resolve_device("cpu") == resolve_device("cpu:0") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device(None) == resolve_device("cuda") == resolve_device(1) == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == CUDA0
    with pytest.raises(ConfigError, match=r"sees 2 CUDA devices \(0 to 1\)"):
        resolve_device("cuda:2")


class Pair(NamedTuple):
    left: Any
    right: Any


def test_nested_structures_keep_their_types_and_everything_but_tensors() -> None:
    odd = object()
    names, views = ["a", "b"], (memoryview(b"x"), b"y")
    array = np.arange(3)
    batch = {
        "pair": Pair(torch.tensor(1), [torch.tensor(2), {"deep": (torch.tensor(3), odd)}]),
        "names": names, "views": views, "array": array, "size": torch.Size([2, 3]), "empty": [],
        "ordered": OrderedDict(b=torch.tensor(4), a=1), "user": UserDict(t=torch.tensor(5)), 7: None,
    }  # fmt: skip
    moved = map_tensors(batch, lambda tensor: tensor + 10)
    assert list(moved) == list(batch)
    assert type(moved["pair"]) is Pair
    assert (moved["pair"].left, moved["pair"].right[0], moved["pair"].right[1]["deep"][0]) == (11, 12, 13)
    assert moved["pair"].right[1]["deep"][1] is odd
    assert moved["names"] is names
    assert moved["views"] is views
    assert moved["array"] is array
    assert type(moved["size"]) is torch.Size
    assert type(moved["ordered"]) is OrderedDict
    assert (list(moved["ordered"]), moved["ordered"]["b"]) == (["b", "a"], 14)
    assert type(moved["user"]) is UserDict
    assert moved["user"]["t"] == 15
    assert (batch["pair"].left, batch["ordered"]["b"], batch["user"]["t"]) == (1, 4, 5), "the source is as it was"


def test_a_default_factory_and_a_packed_sequence_survive() -> None:
    moved = map_tensors(defaultdict(list, x=torch.zeros(1)), torch.ones_like)
    assert moved["x"] == 1
    assert moved["new"] == []
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = map_tensors(packed, lambda tensor: tensor * 2)
    assert type(moved) is PackedSequence
    assert moved.data.tolist() == [2.0] * 5
    assert moved.batch_sizes is packed.batch_sizes
    assert map_tensors(pack_sequence([torch.ones(2)]), lambda tensor: tensor).sorted_indices is None


def test_dense_layouts_are_those_that_a_copy_keeps() -> None:
    base = torch.arange(24).reshape(2, 3, 4)
    images = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert [_is_dense(one) for one in (base, base.permute(2, 0, 1), images, torch.tensor(1))] == [True] * 4
    assert [_is_dense(one) for one in (base[:, :, ::2], base[:, 1:], base[:1].expand(5, 3, 4))] == [False] * 3


def test_on_the_cpu_tensors_are_passed_through() -> None:
    tensor = torch.zeros(3)
    assert next(iter(DevicePrefetcher([{"x": [tensor]}], "cpu")))["x"][0] is tensor


# --- our own loader ---


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    folder = tmp_path_factory.mktemp("device")
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=9) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:03d}", "cls": number})
    return StreamingDataset(f"{folder}/", shuffle=ShuffleConfig(seed=3, window=5))


def loader_of(dataset: StreamingDataset, **options: Any) -> DataLoader:
    mesh = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})
    return DataLoader(dataset, 4, device_mesh=mesh, last_batch="partial", memory_limit="64MiB", **options)


def labels(batches: Any) -> list[list[int]]:
    return [batch["cls"].tolist() for batch in batches]


@pytest.mark.parametrize("depth", [1, 4, 40])
def test_state_equals_that_of_the_bare_loader_at_every_step(dataset: StreamingDataset, depth: int) -> None:
    with loader_of(dataset) as bare, DevicePrefetcher(loader_of(dataset), "cpu", depth=depth) as prefetcher:
        assert len(prefetcher) == len(bare) == 10
        for epoch in range(2):
            assert prefetcher.epoch == epoch
            assert prefetcher.state_dict() == bare.state_dict()
            for expected, batch in zip(bare, prefetcher, strict=True):
                assert batch["cls"].tolist() == expected["cls"].tolist()
                assert prefetcher.state_dict() == bare.state_dict()
                assert prefetcher.epoch == bare.epoch
                if epoch == 0 and 5 in expected["cls"]:
                    bare.seed(11)
                    prefetcher.seed(11)
                    assert prefetcher.state_dict() == bare.state_dict()
        assert prefetcher.state_dict() == bare.state_dict()


def test_a_foreign_state_is_refused(dataset: StreamingDataset) -> None:
    with DevicePrefetcher(loader_of(dataset), "cpu") as prefetcher:
        stream = iter(prefetcher)
        next(stream)
        state = prefetcher.state_dict()
        with pytest.raises(StateError, match="another data set"):
            prefetcher.load_state_dict({**state, "fingerprint": "0" * 64})
        assert prefetcher.state_dict() == state


def loader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardstream-build")}


def test_leaving_the_loop_stops_the_loaders_threads(dataset: StreamingDataset) -> None:
    others = loader_threads()
    prefetcher = DevicePrefetcher(loader_of(dataset, num_workers=2), "cpu")
    for _ in prefetcher:
        assert loader_threads() - others
        break
    assert loader_threads() <= others
    prefetcher.close()


# --- a simulated CUDA device ---


class Stream:
    """Work in order; an operation returns whether it could run."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.work: deque[Callable[[], bool]] = deque()

    def put(self, operation: Callable[[], object]) -> None:
        self.work.append(lambda: (operation(), True)[1])

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: event.done)

    def run_one(self) -> bool:
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True

    def synchronize(self) -> None:
        self.cuda.run_until(lambda: not self.work, self)


class Event:
    """Done when the stream comes to it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.done = cuda, False

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.put(lambda: setattr(self, "done", True))

    def query(self) -> bool:
        self.cuda.looked_at = self.stream
        return self.done


class FakeCuda:
    """Streams that run when they are waited for, and else as ``seed`` likes; memory as CUDA and the allocator treat it.

    A copy reads and writes bare memory at the time when its stream comes to it. Host memory that nothing refers to any
    more is overwritten at once, as by the next batch in a ring. Device memory that nothing refers to is given to the
    next allocation, once the streams recorded on it have come to where they were when it was freed.
    """

    def __init__(self, seed: int | None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.consumer, self.side = Stream(self), Stream(self)
        self.current = self.consumer
        self.free: list[tuple[np.ndarray, list[Event]]] = []
        self.num_blocks, self.num_host, self.fail_after = 0, 0, -1
        self.looked_at = self.consumer

    def Stream(self, device: torch.device) -> Stream:
        assert device == CUDA0
        return self.side

    def Event(self) -> Event:
        return Event(self)

    def pause(self, _seconds: float) -> None:
        """Whoever pauses waits for the event that he looked at last."""
        other = self.side if self.looked_at is self.consumer else self.consumer
        assert self.looked_at.run_one() or other.run_one(), "deadlock"

    def current_stream(self, device: torch.device) -> Stream:
        assert device == CUDA0
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run_until(self, reached: Callable[[], bool], stream: Stream) -> None:
        while not reached():
            other = self.side if stream is self.consumer else self.consumer
            assert stream.run_one() or other.run_one(), "deadlock"

    def some_time_passes(self) -> None:
        if self.random is not None:
            for _ in range(self.random.randrange(12)):
                self.random.choice((self.side, self.consumer)).run_one()

    def host(self, value: int, *, pinned: bool) -> HostTensor:
        memory = np.full(4, value)
        return self._host_tensor(memory, pinned=pinned)

    def _host_tensor(self, memory: np.ndarray, *, pinned: bool) -> HostTensor:
        lease = memory.view()
        self.num_host += 1
        weakref.finalize(lease, self._overwrite, memory)
        tensor = torch.from_numpy(lease).as_subclass(HostTensor)
        tensor.cuda_layer, tensor.memory, tensor.pinned = self, memory, pinned
        return tensor

    def _overwrite(self, memory: np.ndarray) -> None:
        memory[:] = -1
        self.num_host -= 1

    def allocate(self) -> OnDevice:
        self.some_time_passes()
        usable = [entry for entry in self.free if all(event.done for event in entry[1])]
        if usable:
            self.free.remove(next(entry for entry in self.free if entry is usable[0]))
            block = usable[0][0]
        else:
            block = np.full(4, -2)
            self.num_blocks += 1
        used_by: list[Stream] = []
        lease = block.view()
        weakref.finalize(lease, self._free, block, used_by)
        tensor = torch.from_numpy(lease).as_subclass(OnDevice)
        tensor.memory, tensor.used_by = block, used_by
        return tensor

    def _free(self, block: np.ndarray, used_by: list[Stream]) -> None:
        events = []
        for stream in used_by:
            event = Event(self)
            event.record(stream)
            events.append(event)
        self.free.append((block, events))


class HostTensor(torch.Tensor):
    """Host memory; page-locked or not."""

    cuda_layer: FakeCuda
    memory: np.ndarray
    pinned: bool

    def is_pinned(self, *args: Any) -> bool:
        return self.pinned

    def pin_memory(self, *args: Any) -> HostTensor:
        assert not self.pinned
        return self.cuda_layer._host_tensor(self.memory.copy(), pinned=True)

    def to(self, device: torch.device, *, non_blocking: bool) -> OnDevice:  # type: ignore[override]
        cuda = self.cuda_layer
        assert device == CUDA0
        assert non_blocking
        assert self.pinned, "a copy from pageable memory makes the host wait"
        assert cuda.current is cuda.side
        if cuda.fail_after == 0:
            raise torch.OutOfMemoryError("device full")
        cuda.fail_after -= 1
        target, source = cuda.allocate(), self.memory
        block = target.memory
        cuda.current.put(lambda: np.copyto(block, source))
        return target


class OnDevice(torch.Tensor):
    """Device memory."""

    memory: np.ndarray
    used_by: list[Stream]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA0

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.used_by.append(stream)


class RingLoader:
    """Two tensors a batch, of which nothing but the batch refers to their memory."""

    def __init__(self, cuda: FakeCuda, size: int, *, pinned: bool) -> None:
        self.cuda, self.size, self.pinned = cuda, size, pinned

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.size):
            self.cuda.some_time_passes()
            yield {
                "x": self.cuda.host(number, pinned=self.pinned),
                "y": [self.cuda.host(100 + number, pinned=not self.pinned)],
            }


def prefetcher_on(cuda: FakeCuda, loader: Any, depth: int) -> DevicePrefetcher:
    return DevicePrefetcher(loader, "cpu", depth=depth, copier=CudaCopier(CUDA0, cuda, cuda.pause))


def read_on_device(cuda: FakeCuda, batch: dict[str, Any], into: list[int]) -> None:
    """Kernels on the consumer's stream that read the batch's memory when they run."""
    for tensor in (batch["x"], batch["y"][0]):
        block = tensor.memory
        cuda.consumer.put(lambda block=block: into.extend(set(block.tolist())))


@pytest.mark.parametrize("seed", [None, *range(40)])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("pinned", [True, False])
def test_every_kernel_reads_its_own_batch_on_a_device_as_late_as_it_likes(
    seed: int | None, depth: int, pinned: bool
) -> None:
    cuda = FakeCuda(seed)
    read: list[int] = []
    for batch in prefetcher_on(cuda, RingLoader(cuda, 12, pinned=pinned), depth):
        read_on_device(cuda, batch, read)
        cuda.some_time_passes()
        del batch  # freed by the host long before the device has read it
    cuda.consumer.synchronize()
    assert read == [value for number in range(12) for value in (number, 100 + number)]
    assert cuda.num_host == 0, "all source memory is home"


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_memory_is_bounded_on_a_device_that_runs_only_when_it_is_waited_for(depth: int) -> None:
    cuda = FakeCuda(None)
    most_host = 0
    read: list[int] = []
    for batch in prefetcher_on(cuda, RingLoader(cuda, 60, pinned=True), depth):
        read_on_device(cuda, batch, read)
        most_host = max(most_host, cuda.num_host)
    cuda.consumer.synchronize()
    assert len(read) == 120
    assert cuda.num_blocks // 2 <= 2 * depth + 2
    assert most_host // 3 <= 2 * depth + 1, "two tensors and the page-locked copy of one"


@pytest.mark.parametrize("taken", [0, 1, 2, 7])
@pytest.mark.parametrize("end", ["close", "drop", "leave", "exhaust"])
def test_no_end_leaves_a_copy_in_flight(taken: int, end: str) -> None:
    cuda = FakeCuda(None)
    prefetcher = prefetcher_on(cuda, RingLoader(cuda, 7, pinned=True), 2)
    stream = iter(prefetcher)
    for _ in range(taken):
        next(stream)
    if end == "close":
        prefetcher.close()
    elif end == "drop":
        del stream
    elif end == "exhaust":
        assert len(list(stream)) == 7 - taken
    else:
        stream.close()  # type: ignore[attr-defined]
    assert not cuda.side.work, "the side stream came to its end"
    assert cuda.num_host == 0


def test_source_memory_goes_home_when_its_copy_is_done_and_not_before() -> None:
    cuda = FakeCuda(None)
    stream = iter(prefetcher_on(cuda, RingLoader(cuda, 9, pinned=True), 1))
    next(stream)
    assert cuda.num_host == 2 * 3, "two batches of three host tensors are being copied"
    next(stream)
    assert cuda.num_host == 3 * 3
    cuda.side.synchronize()
    assert cuda.num_host == 3 * 3
    next(stream)
    assert cuda.num_host == 1 * 3, "three are done and gone, one more has begun"


def test_a_copy_that_fails_half_way_is_waited_for_before_its_source_goes() -> None:
    cuda = FakeCuda(None)
    cuda.fail_after = 3  # the second tensor of the second batch
    written: list[int] = []
    original = FakeCuda._overwrite

    def overwrite(self: FakeCuda, memory: np.ndarray) -> None:
        written.append(len(self.side.work))
        original(self, memory)

    stream = iter(prefetcher_on(cuda, RingLoader(cuda, 9, pinned=True), 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCuda, "_overwrite", overwrite)
        next(stream)
        with pytest.raises(torch.OutOfMemoryError):
            next(stream)
        gc.collect()
    assert set(written) == {0}, "no host memory was let go while the side stream had work"
    assert cuda.num_host == 0


def test_tensors_that_are_there_already_are_passed_through_and_recorded() -> None:
    cuda = FakeCuda(None)
    tensor = cuda.allocate()
    batch = next(iter(prefetcher_on(cuda, [{"x": tensor}], 1)))
    assert batch["x"] is tensor
    assert tensor.used_by == [cuda.consumer]


# --- a real one ---

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("pinned", [True, False])
def test_cuda_values_of_every_layout(pinned: bool) -> None:
    base = torch.arange(24).reshape(2, 3, 4)
    sources = {
        "plain": base, "permuted": base.permute(2, 0, 1), "strided": base[:, :, ::2],
        "expanded": base[:1].expand(5, 3, 4),
        "scalar": torch.tensor(7), "empty": torch.empty(0, 3), "half": base.half(), "bool": base > 3,
        "sparse": torch.eye(3).to_sparse(),
    }  # fmt: skip
    if pinned:
        sources = {name: one.pin_memory() if name in ("plain", "half") else one for name, one in sources.items()}
    for batch in DevicePrefetcher([sources] * 5, "cuda"):
        for name, tensor in batch.items():
            assert tensor.device.type == "cuda"
            assert tensor.dtype == sources[name].dtype
            assert torch.equal(tensor.to_dense().cpu(), sources[name].to_dense()), name


@pytest.mark.gpu
@needs_cuda
def test_cuda_slots_of_registered_memory_are_not_reused_while_they_are_copied() -> None:
    slot_elements = 4 << 20
    ring = torch.empty(8, slot_elements, dtype=torch.int64).numpy()
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(ring.ctypes.data, ring.nbytes, 0)) == 0
    free = deque(range(8))

    def batches() -> Iterator[torch.Tensor]:
        for number in range(64):
            slot = free.popleft()
            lease = ring[slot].view()
            lease[:] = number
            weakref.finalize(lease, free.append, slot)
            tensor = torch.from_numpy(lease)
            assert tensor.is_pinned()
            del lease
            yield tensor
            del tensor

    try:
        extremes = []
        for batch in DevicePrefetcher(batches(), "cuda", depth=2):
            torch.cuda._sleep(5_000_000)  # the device is behind the host
            extremes.append(torch.stack([batch.min(), batch.max()]))
            del batch
        assert torch.stack(extremes).cpu().tolist() == [[number, number] for number in range(64)]
        assert len(free) == 8
    finally:
        torch.cuda.synchronize()
        assert int(runtime.cudaHostUnregister(ring.ctypes.data)) == 0


@pytest.mark.gpu
@needs_cuda
def test_cuda_consumer_on_a_stream_of_its_own_and_bounded_memory() -> None:
    source = [torch.full((1 << 20,), float(number)).pin_memory() for number in range(64)]
    mine = torch.cuda.Stream()
    sums = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats().get("active_bytes.all.current", 0)
    with torch.cuda.stream(mine):
        for batch in DevicePrefetcher(source, "cuda", depth=2):
            torch.cuda._sleep(5_000_000)
            sums.append(batch.max())
            del batch
    mine.synchronize()
    assert torch.stack(sums).tolist() == [float(number) for number in range(64)]
    most = torch.cuda.memory_stats()["active_bytes.all.peak"]  # memory that waits for a stream is active
    assert most - before < 8 * source[0].nbytes


def test_the_benchmark_says_so_without_cuda(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench_device  # noqa: PLC0415  found by the path above

    bench_device.main([])
    assert "no CUDA device" in capsys.readouterr().out
