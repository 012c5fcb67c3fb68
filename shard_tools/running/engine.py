"""Run the calls of long verbs: on threads of this process, or by an executor, such as one on a Ray cluster.

The interface is the standard ``concurrent.futures.Executor``: a library function that is given one runs its calls
there. The resulting bytes are the same either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from shard_tools.running.ray_engine import RayExecutor

ENGINES = ("local", "ray")
DEFAULT_WORKERS = {"local": 8, "ray": 64}
"""Concurrent calls: threads of this machine; on Ray the number of CPUs, but at most this number."""
DEFAULT_MEMORY = "1GiB"
"""Of verbs that bring samples, or keys, into another order."""
_RUN_ITEMS, _RUN_BYTES = 64, 1 << 20
_AHEAD_BYTES = 128 << 20
_T = TypeVar("_T")
_R = TypeVar("_R")


def open_engine(name: str, workers: int | None) -> AbstractContextManager[Executor | None]:
    """Open the executor of this name, for ``with``; None for ``"local"``: threads and processes of this machine.

    Raises:
        ConfigError: Its package is missing.
    """
    return RayExecutor(workers or DEFAULT_WORKERS["ray"]) if name == "ray" else nullcontext(None)


def ordered(
    executor: Executor, function: Callable[[_T], _R], items: Iterable[_T], ahead: int
) -> Generator[_R, None, None]:
    """Map ``items`` in order, with at most ``ahead`` of them in progress or ready."""
    pending: deque[Future[_R]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def map_ordered(function: Callable[[_T], _R], items: Iterable[_T], num_threads: int) -> Generator[_R, None, None]:
    """Map ``items`` on threads, in order, at most ``2 * num_threads`` ahead of the consumer."""
    if num_threads <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="shard_tools") as pool:
        yield from ordered(pool, function, items, 2 * num_threads)


def map_sized(
    function: Callable[[_T], _R], items: Sequence[_T], size_of: Callable[[_T], int], num_threads: int
) -> Generator[_R, None, None]:
    """Map ``items`` like :func:`map_ordered`; small ones are handed to threads in runs, which saves time.

    Memory: results of up to ``_AHEAD_BYTES`` wait for the consumer, or one if it is larger.

    Args:
        function: The function.
        items: The items.
        size_of: Tells how many bytes the result of an item will have.
        num_threads: Number of threads; with 1, the consumer's own.
    """
    if num_threads <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="shard_tools") as pool:
        pending: deque[tuple[int, Future[tuple[list[_R], Exception | None]]]] = deque()
        waiting_bytes = 0
        try:
            for run, num_bytes in _runs(items, size_of):
                while pending and (len(pending) >= 2 * num_threads or waiting_bytes + num_bytes > _AHEAD_BYTES):
                    done_bytes, future = pending.popleft()
                    waiting_bytes -= done_bytes
                    yield from _results(future)
                pending.append((num_bytes, pool.submit(_each, function, run)))
                waiting_bytes += num_bytes
            while pending:
                yield from _results(pending.popleft()[1])
        finally:
            for _, future in pending:
                future.cancel()


def _runs(items: Sequence[_T], size_of: Callable[[_T], int]) -> Generator[tuple[list[_T], int], None, None]:
    """Yield items in runs, with their bytes."""
    run: list[_T] = []
    num_bytes = 0
    for item in items:
        size_bytes = size_of(item)
        if run and (len(run) >= _RUN_ITEMS or num_bytes + size_bytes > _RUN_BYTES):
            yield run, num_bytes
            run, num_bytes = [], 0
        run.append(item)
        num_bytes += size_bytes
    if run:
        yield run, num_bytes


def _each(function: Callable[[_T], _R], run: list[_T]) -> tuple[list[_R], Exception | None]:
    """Return the results of a run up to the first error, and the error."""
    done: list[_R] = []
    try:
        for item in run:
            done.append(function(item))  # noqa: PERF401  what is done is kept when a later one fails
    except Exception as error:  # noqa: BLE001  the consumer gets it, after the results
        return done, error
    return done, None


def _results(future: Future[tuple[list[_R], Exception | None]]) -> Generator[_R, None, None]:
    done, error = future.result()
    yield from done
    if error is not None:
        raise error
