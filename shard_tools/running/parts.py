"""Run a work over the parts of its inputs, here or by an executor; hand out what it makes in the order of inputs.

How inputs are cut into parts depends on how long they take, and the results never depend on it.
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
)  # of a call elsewhere, which costs some milliseconds


class Item(NamedTuple):
    """One result: something small that can be pickled, and the bytes that belong to it.

    The bytes are valid until the next item is asked for.
    """

    meta: Any
    buffers: Sequence[Any]


class Work(Protocol):
    """What runs in a process, for a part of the inputs. It must give the same items whenever it is called again."""

    def __call__(
        self, start: int, part: Any, *, skip: int, avoid: frozenset[int], note: Callable[[int], None]
    ) -> Iterator[Item]:
        """Yield the items of a part: at least one for each input.

        Args:
            start: Number of its first input.
            part: The inputs, as the parent described them.
            skip: So many items are not wanted.
            avoid: Inputs that have killed processes: each gives an item that says so.
            note: To be called with the number of each input before it is worked on.
        """


class Pace:
    """Choose how many inputs make a part, by what earlier ones took. Results do not depend on it."""

    def __init__(self, part_s: float, part_bytes: int, part_inputs: int = _PART_INPUTS) -> None:
        self._part_s, self._part_bytes, self._part_inputs, self._size = part_s, part_bytes, part_inputs, 1

    @property
    def size(self) -> int:
        """Inputs of the next part."""
        return self._size

    def note(self, num_inputs: int, seconds: float, num_bytes: int) -> None:
        """Learn from a part; it grows by at most four times at once."""
        by_time = num_inputs * self._part_s / max(seconds, 1e-9)
        by_bytes = num_inputs * self._part_bytes / max(num_bytes, 1)
        self._size = max(1, min(int(by_time), int(by_bytes), 4 * num_inputs, self._part_inputs))


class Runner(Protocol):
    """Where a work runs."""

    def items(
        self, part: Callable[[int, int], Any], start: int, stop: int, skip: int = 0
    ) -> Generator[Item, None, None]:
        """Yield the items of inputs ``start`` to ``stop``, in order; of the first input without ``skip`` items.

        Args:
            part: Describes the inputs from one number to another for the work.
            start: The first input.
            stop: The end of the inputs.
            skip: See above.

        Raises:
            Exception: Whatever the work raised, when all items before are handed out.
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
    """Run the work by an executor that repeats a call whose process dies, such as that of a Ray cluster.

    Args:
        work: The work.
        executor: The executor.
        ahead: Calls in progress or ready.
        shared: Files that calls must see; as for :func:`~shard_tools.running.engine.ordered`.
    """

    def __init__(self, work: Work, executor: Executor, ahead: int, shared: Shared = ()) -> None:
        self._far = _Far(work)
        self._shared = shared
        self._executor, self._ahead = executor, ahead
        self._pace = Pace(_FAR_S, _FAR_BYTES)

    def items(
        self, part: Callable[[int, int], Any], start: int, stop: int, skip: int = 0
    ) -> Generator[Item, None, None]:
        """Yield the items. Where a call did not survive, its inputs are tried one by one, to find the one at fault."""
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
