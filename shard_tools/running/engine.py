"""Run the calls of long verbs: on threads of this process, or by an executor, such as one on a Ray cluster.

The interface is the standard ``concurrent.futures.Executor``: a library function that is given one runs its calls
there. The resulting bytes are the same either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from shard_tools.running.ray_engine import RayExecutor

ENGINES = ("local", "ray")
DEFAULT_WORKERS = {"local": 8, "ray": 64}
"""Concurrent calls: threads of this machine; on Ray the number of CPUs, but at most this number."""
DEFAULT_MEMORY = "1GiB"
"""Of verbs that bring samples, or keys, into another order."""
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
