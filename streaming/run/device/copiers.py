"""Copy batches to a device: the part of ``DevicePrefetcher`` that depends on the kind of device."""

from __future__ import annotations

import copy
import time
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from streaming.build.batches.jagged import fresh, nested_on, nested_parts
from streaming.run.engine.workers.ring import Memory, PageLocker

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_GROWTH = 50e-6, 500e-6, 1.25
"""Pauses between polls of an event, in seconds: at first short compared with a copy of some MB, later at most one poll
per 0.5 ms during a long step."""

_PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None), memoryview, bytearray})
"""Types that cannot hold a tensor: lists of nothing else are passed through without examining each element."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Return whether all work before it is done."""

    def synchronize(self) -> None:
        """Block until all work before it is done, in the device's own way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A batch whose copies have been issued.

    Attributes:
        batch: The device's batch. Its contents are valid only in a stream that has waited for ``event``.
        event: Done when the last copy is done; until then keep the source and ``staged``.
        staged: Page-locked copies of source tensors that were not page-locked.
    """

    batch: Any
    event: Event
    staged: tuple[torch.Tensor, ...] = ()


class Copier(Protocol):
    """Copy batches to a device. For one thread.

    Attributes:
        page_locker: Locks memory for this device's copies; None: they need no locked memory.
    """

    page_locker: PageLocker | None

    def issue(self, batch: Any) -> Copied:
        """Start the copies of ``batch`` and return at once. If this raises, no copy is in progress any more."""

    def hand_over(self, copied: Copied) -> None:
        """Make the consumer's stream, the current one, wait for the copies, and keep their memory for it."""

    def mark(self) -> Event:
        """Return an event after everything submitted to the consumer's stream so far."""

    def wait(self, event: Event) -> None:
        """Block until ``event``, which comes from this copier, is done."""


class _Done:
    """An event whose work is already done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuCopier:
    """Pass tensors through. A tensor on another device is copied to the CPU before ``issue`` returns."""

    page_locker: PageLocker | None = None

    def issue(self, batch: Any) -> Copied:
        """Return ``batch``; its tensors are passed through."""
        return Copied(batch=map_tensors(batch, lambda tensor: tensor.to("cpu")), event=_Done())

    def hand_over(self, copied: Copied) -> None:
        """Do nothing: there is no other stream."""

    def mark(self) -> Event:
        """Return an event that is done."""
        return _Done()

    def wait(self, event: Event) -> None:
        """Return once the event is done."""
        event.synchronize()


class CudaPageLocker:
    """Register memory with CUDA: ``cudaHostRegister``, portable, so that every device of the process may copy from it.

    The memory must be kept until copies from it are done: torch's host allocator does not know it.

    Args:
        device: A CUDA device with its index.
        cuda: Replaces ``torch.cuda`` in tests: ``device`` and ``cudart``.
    """

    _PORTABLE = 1

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda

    def lock(self, memory: Memory) -> bool:
        """See ``PageLocker``."""
        with self._cuda.device(self._device):
            code = self._cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, self._PORTABLE)
        return int(code) == 0

    def unlock(self, memory: Memory) -> None:
        """See ``PageLocker``. At interpreter exit CUDA may be gone already, and the registration with it."""
        with self._cuda.device(self._device):
            self._cuda.cudart().cudaHostUnregister(memory.ctypes.data)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``PageLocker``. Uses torch's host allocator, which caches memory and tracks copies in progress."""
        with self._cuda.device(self._device):
            return fresh(shape, dtype, pinned=True)


class CudaCopier:
    """Copy on a stream of its own.

    Device memory is allocated in the side stream, so that a copy never waits for the consumer's kernels. The caching
    allocator would return such memory to the side stream as soon as its tensor is dropped, even if kernels that read it
    are still queued; ``record_stream`` prevents that.

    A source that is not page-locked is first copied to page-locked memory of torch's host allocator, on the calling
    thread: from pageable memory CUDA copies more slowly, and makes the host wait. Our own loader's batches are built in
    page-locked memory from the start.

    Events are polled, with pauses. CUDA's blocking wait sleeps until an interrupt, which may come milliseconds late on
    a virtual machine: copies alone reached 43 GB/s with it and 54 GB/s with polling, for the same CPU time (on an H100
    whose bare copy reaches 54 GB/s). CUDA's spinning wait occupies a core.

    Args:
        device: A CUDA device with its index.
        cuda: Replaces ``torch.cuda`` in tests: ``Stream``, ``Event``, ``stream`` and ``current_stream``.
        pause: Sleeps for the given number of seconds.
    """

    def __init__(
        self, device: torch.device, cuda: Any = torch.cuda, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.page_locker: PageLocker | None = CudaPageLocker(device, cuda)
        self._pause = pause
        self._device = device
        self._cuda = cuda
        self._side = cuda.Stream(device=device)

    def issue(self, batch: Any) -> Copied:
        """Start the copies of ``batch`` on the side stream."""
        staged: list[torch.Tensor] = []
        consumer = self._cuda.current_stream(self._device)
        try:
            with self._cuda.stream(self._side):
                moved = map_tensors(batch, lambda tensor: self._move(tensor, staged, consumer))
                event = self._cuda.Event()
                event.record(self._side)
        except BaseException:
            self._side.synchronize()  # now the caller releases the source
            raise
        return Copied(batch=moved, event=event, staged=tuple(staged))

    def hand_over(self, copied: Copied) -> None:
        """Make the current stream wait for the copies, and the allocator wait for the current stream."""
        consumer = self._cuda.current_stream(self._device)
        consumer.wait_event(copied.event)

        def keep_for_consumer(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == self._device and tensor.layout == torch.strided:
                tensor.record_stream(consumer)
            return tensor

        map_tensors(copied.batch, keep_for_consumer)

    def mark(self) -> Event:
        """Return an event at the end of the current stream."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event  # type: ignore[no-any-return]  # torch.cuda is Any here

    def wait(self, event: Event) -> None:
        """Poll ``event`` until it is done."""
        pause_s = _FIRST_PAUSE_S
        while not event.query():
            self._pause(pause_s)
            pause_s = min(pause_s * _PAUSE_GROWTH, _LONGEST_PAUSE_S)

    def _move(self, tensor: torch.Tensor, staged: list[torch.Tensor], consumer: Any) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        if tensor.layout != torch.strided:  # sparse: no stream can be recorded, so copy at once in the consumer's
            with self._cuda.stream(consumer):
                return tensor.to(self._device)
        if tensor.device.type == "cpu" and tensor.numel():
            if not _is_dense(tensor):  # torch would gather it into pageable memory
                tensor = tensor.contiguous()
                staged.append(tensor)
            if not tensor.is_pinned():
                tensor = tensor.pin_memory()
                staged.append(tensor)
        return tensor.to(self._device, non_blocking=True)


def map_tensors(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], others: Callable[[Any], Any] | None = None
) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in nested dicts, lists, tuples and named tuples.

    Containers keep their types. Those that hold only text and numbers are returned unchanged, and so are all other
    objects unless ``others`` converts them. For a nested tensor of the jagged layout ``function`` is applied to values
    and offsets. A ``PackedSequence`` keeps ``batch_sizes`` on the CPU, where torch requires it.
    """
    if isinstance(value, torch.Tensor):
        nested = nested_parts(value)
        return function(value) if nested is None else nested_on(*map(function, nested))
    if isinstance(value, Mapping):
        return _map_mapping(value, function, others)
    if isinstance(value, list | tuple) and not _PLAIN.issuperset(map(type, value)):
        return _map_sequence(value, function, others)
    return value if others is None else others(value)


def _map_mapping(
    value: Mapping[Any, Any], function: Callable[[torch.Tensor], torch.Tensor], others: Callable[[Any], Any] | None
) -> Mapping[Any, Any]:
    moved = {name: map_tensors(one, function, others) for name, one in value.items()}
    if type(value) is dict or not isinstance(value, dict | UserDict):
        return moved
    clone = copy.copy(value)  # keeps attributes that a subclass adds, such as a default factory
    clone.update(moved)
    return clone


def _map_sequence(
    value: list[Any] | tuple[Any, ...],
    function: Callable[[torch.Tensor], torch.Tensor],
    others: Callable[[Any], Any] | None,
) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, PackedSequence):
        data, sizes, *indices = value
        return type(value)(function(data), sizes, *(map_tensors(one, function, others) for one in indices))
    items = [map_tensors(one, function, others) for one in value]
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return items if type(value) is list else type(value)(items)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a copy on another device has the same strides, so that it is a single run of bytes."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def page_locked(batch: Any) -> Any:
    """Return a batch with its tensors, at any depth, in page-locked memory. Containers keep their types."""
    return map_tensors(batch, torch.Tensor.pin_memory, _locked_by_itself)


def _locked_by_itself(thing: Any) -> Any:
    """Page-lock an object that has its own method for it, as torch's loader does for batches of a user's class."""
    return thing.pin_memory() if hasattr(thing, "pin_memory") else thing
