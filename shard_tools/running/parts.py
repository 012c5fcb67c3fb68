"""Run a work over the parts of its inputs, here or by an executor, and yield the results in the order of inputs.

The size of parts depends on how long inputs take; the results never depend on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, Protocol

import numpy as np

from shard_tools.running.engine import Shared, ordered
from streaming.errors import WorkerDiedError

_PART_INPUTS = 4096
_HERE_INPUTS = 64
_FAR_S, _FAR_BYTES = (
    2.0,
    8 << 20,
)  # per call by an executor, which costs some milliseconds


class Item(NamedTuple):
    """One result: a small picklable value, and the bytes that belong to it.

    The bytes are valid until the next item is requested.
    """

    meta: Any
    buffers: Sequence[Any]


class Work(Protocol):
    """The function that processes run on a part of the inputs. Repeated calls must give the same items."""

    def __call__(
        self, start: int, part: Any, *, skip: int, avoid: frozenset[int], note: Callable[[int], None]
    ) -> Iterator[Item]:
        """Yield the items of a part: at least one per input.

        Args:
            start: Number of the part's first input.
            part: The inputs, as the parent described them.
            skip: Number of items to leave out at the beginning.
            avoid: Inputs that killed processes: each must give an item that reports this.
            note: Called with the number of each input before work on it begins.
        """


class Pace:
    """Choose the number of inputs per part from the duration of earlier parts. Results do not depend on it."""

    def __init__(self, part_s: float, part_bytes: int, part_inputs: int = _PART_INPUTS) -> None:
        self._part_s, self._part_bytes, self._part_inputs, self._size = part_s, part_bytes, part_inputs, 1

    @property
    def size(self) -> int:
        """Number of inputs of the next part."""
        return self._size

    def note(self, num_inputs: int, seconds: float, num_bytes: int) -> None:
        """Adjust the size to the duration of a part; it grows by at most a factor of four at once."""
        by_time = num_inputs * self._part_s / max(seconds, 1e-9)
        by_bytes = num_inputs * self._part_bytes / max(num_bytes, 1)
        self._size = max(1, min(int(by_time), int(by_bytes), 4 * num_inputs, self._part_inputs))


class Runner(Protocol):
    """An environment that runs a work."""

    def items(
        self, part: Callable[[int, int], Any], start: int, stop: int, skip: int = 0
    ) -> Generator[Item, None, None]:
        """Yield the items of inputs ``start`` to ``stop``, in order, leaving out ``skip`` items of the first input.

        Args:
            part: Describes a range of inputs for the work.
            start: The first input.
            stop: The end of the inputs.
            skip: Number of items of the first input to leave out.

        Raises:
            Exception: Any exception of the work, after all items before it were yielded.
        """


class HereRunner:
    """Run the work in this process."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def items(
        self, part: Callable[[int, int], Any], start: int, stop: int, skip: int = 0
    ) -> Generator[Item, None, None]:
        """Yield the items."""
        for first in range(start, stop, _HERE_INPUTS):
            inputs = part(first, min(stop, first + _HERE_INPUTS))
            yield from self._work(first, inputs, skip=skip, avoid=frozenset(), note=_note_nothing)
            skip = 0


class ExecutorRunner:
    """Run the work by an executor that repeats a call whose process dies, such as an executor of a Ray cluster.

    Args:
        work: The work.
        executor: The executor.
        ahead: Number of calls in progress or ready.
        shared: Files that calls must see, as for :func:`~shard_tools.running.engine.ordered`.
    """

    def __init__(self, work: Work, executor: Executor, ahead: int, shared: Shared = ()) -> None:
        self._far = _Far(work)
        self._shared = shared
        self._executor, self._ahead = executor, ahead
        self._pace = Pace(_FAR_S, _FAR_BYTES)

    def items(
        self, part: Callable[[int, int], Any], start: int, stop: int, skip: int = 0
    ) -> Generator[Item, None, None]:
        """Yield the items. If a call did not survive, its inputs are tried one by one to find the cause."""
        while start < stop:
            calls: deque[tuple[int, int]] = deque()
            given = self._calls(part, start, stop, skip, calls)
            results = ordered(self._executor, self._far, given, self._ahead, shared=self._shared)
            try:
                for metas, sizes, data, seconds in results:
                    start, num_inputs = sum(calls[0]), calls.popleft()[1]
                    skip = 0
                    self._pace.note(num_inputs, seconds, data.nbytes)
                    yield from _items(metas, sizes, data)
            except WorkerDiedError:
                first, num_inputs = calls[0]
            else:
                return
            for number in range(first, first + num_inputs):
                yield from self._alone(part, number, skip)
                skip = 0
            start = first + num_inputs

    def _calls(
        self, part: Callable[[int, int], Any], start: int, stop: int, skip: int, calls: deque[tuple[int, int]]
    ) -> Iterator[tuple[int, Any, int, frozenset[int]]]:
        while start < stop:
            end = min(stop, start + self._pace.size)
            calls.append((start, end - start))
            yield start, part(start, end), skip, frozenset()
            start, skip = end, 0

    def _alone(self, part: Callable[[int, int], Any], number: int, skip: int) -> Iterator[Item]:
        inputs = part(number, number + 1)
        try:
            metas, sizes, data, _ = self._executor.submit(self._far, (number, inputs, skip, frozenset())).result()
        except WorkerDiedError:
            avoid = frozenset({number})
            metas, sizes, data, _ = self._executor.submit(self._far, (number, inputs, skip, avoid)).result()
        yield from _items(metas, sizes, data)


class _Far:
    """A call of the work whose result is one value: items, and all bytes in one array."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(
        self, call: tuple[int, Any, int, frozenset[int]]
    ) -> tuple[list[Any], list[list[int]], np.ndarray[Any, np.dtype[np.uint8]], float]:
        start, part, skip, avoid = call
        begun_s = time.perf_counter()
        metas, sizes, copies = [], [], bytearray()
        for meta, buffers in self._work(start, part, skip=skip, avoid=avoid, note=_note_nothing):
            metas.append(meta)
            sizes.append([len(buffer) for buffer in buffers])
            for buffer in buffers:
                copies += buffer
        return metas, sizes, np.frombuffer(copies, np.uint8), time.perf_counter() - begun_s


def _items(metas: Sequence[Any], sizes: Sequence[Sequence[int]], data: Any) -> Iterator[Item]:
    offset, view = 0, memoryview(data)
    for meta, some in zip(metas, sizes, strict=True):
        buffers = []
        for size in some:
            buffers.append(view[offset : offset + size])
            offset += size
        yield Item(meta, buffers)


def _note_nothing(_: int) -> None:
    pass
