"""Map items on threads, or by any executor: in order, with bounded work ahead, and no thread left after an error.

Errors of this package name their subject. Any other error gets a note with the number of its item.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

from streaming.errors import ShardstreamError

_T = TypeVar("_T")
_R = TypeVar("_R")


def on_threads(
    function: Callable[[_T], _R], items: Sequence[_T], num_threads: int, *, name: str = "shardstream"
) -> list[_R]:
    """Return ``function`` of each item, in order. Unlike in :func:`map_threads`, a slow item delays no other."""
    return list(map_threads(function, items, min(num_threads, len(items)), name=name, ahead=sys.maxsize))


def map_threads(
    function: Callable[[_T], _R],
    items: Iterable[_T],
    num_threads: int,
    *,
    name: str = "shardstream",
    ahead: int | None = None,
) -> Generator[_R, None, None]:
    """Yield ``function`` of each item, in order. Close or exhaust the generator: then no thread is left.

    Args:
        function: Called on threads; with ``num_threads`` of at most 1, on the consumer's thread.
        items: The items, taken one by one by the consumer.
        num_threads: Number of threads.
        name: Prefix of the threads' names, for stack dumps.
        ahead: Maximum number of items in progress or ready. Default: two per thread.

    Raises:
        Exception: The error of a call, in the order of items; calls that have not begun are canceled.
    """
    if num_threads <= 1:
        for number, item in enumerate(items):
            try:
                found = function(item)
            except Exception as error:
                name_item(error, number)
                raise
            yield found
        return
    pool = ThreadPoolExecutor(num_threads, name)
    try:
        yield from in_order(pool, function, items, 2 * num_threads if ahead is None else ahead)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_order(
    executor: Executor,
    function: Callable[[_T], _R],
    items: Iterable[_T],
    ahead: int,
    *,
    size_of: Callable[[_T], int] | None = None,
    most_bytes: int = 0,
) -> Generator[_R, None, None]:
    """Yield ``function`` of each item as an executor returns it, in order.

    Args:
        executor: Runs the calls.
        function: The function.
        items: The items.
        ahead: Maximum number of items in progress or ready.
        size_of: Returns the bytes of an item's result, to bound these bytes, too.
        most_bytes: Maximum bytes of results in progress or ready; a single item may have more.

    Raises:
        Exception: The error of a call, in the order of items; calls that have not begun are canceled.
    """
    pending: deque[tuple[int, int, Future[_R]]] = deque()  # number of the item, its bytes, its call
    pending_bytes = 0
    try:
        for number, item in enumerate(items):
            size = 0 if size_of is None else size_of(item)
            while pending and pending_bytes + size > most_bytes and size_of is not None:
                pending_bytes -= pending[0][1]
                yield _result(pending)
            pending.append((number, size, executor.submit(function, item)))
            pending_bytes += size
            if len(pending) >= ahead:
                pending_bytes -= pending[0][1]
                yield _result(pending)
        while pending:
            yield _result(pending)
    finally:
        for _, _, future in pending:
            future.cancel()


def _result(pending: deque[tuple[int, int, Future[_R]]]) -> _R:
    number, _, future = pending.popleft()
    try:
        return future.result()
    except Exception as error:
        name_item(error, number)
        raise


def name_item(error: Exception, number: int) -> None:
    """Add a note with the number of the item to an error that has no other hint."""
    if not isinstance(error, ShardstreamError) and not getattr(error, "__notes__", None):
        error.add_note(f"for item {number} of those processed in parallel")
