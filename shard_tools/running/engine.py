"""Run the calls of long verbs: on threads of this process, or by an executor, such as one on a Ray cluster.

The interface is the standard ``concurrent.futures.Executor``: a library function that receives one runs its calls
there. The resulting bytes are the same either way.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.ray_engine import RayExecutor
from streaming.common.threads import in_order, map_threads, name_item
from streaming.errors import ConfigError
from streaming.storage import Storage, redact, scheme_of

ENGINES = ("local", "ray")
DEFAULT_WORKERS = {"local": 8, "ray": 64}
"""Concurrent calls: threads of this machine; on Ray the number of CPUs, but at most this number."""
DEFAULT_MEMORY = "1GiB"
"""Concurrent calls of verbs that reorder samples or keys."""
_RUN_ITEMS, _RUN_BYTES = 64, 1 << 20
_AHEAD_BYTES = 128 << 20
_T = TypeVar("_T")
_R = TypeVar("_R")


def open_engine(name: str, workers: int | None) -> AbstractContextManager[Executor | None]:
    """Open the executor of this name, for ``with``; None for ``"local"``: threads and processes of this machine.

    Raises:
        ConfigError: The package of the executor is missing.
    """
    return _open_ray(workers or DEFAULT_WORKERS["ray"]) if name == "ray" else nullcontext(None)


@contextmanager
def _open_ray(workers: int) -> Iterator[Executor]:
    """Open it; keep Ray's own output, such as a message that a node died, out of the report on standard output."""
    with redirect_stdout(sys.stderr), RayExecutor(workers) as executor:
        yield executor


Shared = Sequence[tuple["Storage", str]]
"""Files with their stores, which calls on other machines must see as this process does."""


def ordered(
    executor: Executor, function: Callable[[_T], _R], items: Iterable[_T], ahead: int, *, shared: Shared = ()
) -> Generator[_R, None, None]:
    """Map ``items`` in order, with at most ``ahead`` items in progress or ready.

    Args:
        executor: Executor of the calls.
        function: Function to call.
        items: The items.
        ahead: Maximum number of items in progress or ready.
        shared: Files to check before each call, if they are local and exist, because another machine's disk would look
            empty.

    Raises:
        ConfigError: A call does not see one of the files.
    """
    there = tuple((storage, url) for storage, url in shared if scheme_of(url) == "file" and storage.exists(url))
    yield from in_order(executor, _Seeing(function, there) if there else function, items, ahead)


def map_sized(
    function: Callable[[_T], _R], items: Sequence[_T], size_of: Callable[[_T], int], num_threads: int
) -> Generator[_R, None, None]:
    """Map ``items`` like ``map_threads``; small items are passed to threads in runs, which saves time.

    Memory: results of up to ``_AHEAD_BYTES`` wait for the consumer, or one if it is larger.

    Args:
        function: The function.
        items: The items.
        size_of: Returns the number of bytes of an item's result.
        num_threads: Number of threads; with 1, the consumer's thread is used.
    """
    if num_threads <= 1:
        yield from map_threads(function, items, num_threads)
        return
    num_done = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="shard_tools") as pool:
        runs = in_order(
            pool, partial(_each, function), _runs(items, size_of), 2 * num_threads,
            size_of=itemgetter(1), most_bytes=_AHEAD_BYTES,
        )  # fmt: skip
        with closing(runs):
            for done, error in runs:
                yield from done
                num_done += len(done)
                if error is not None:
                    name_item(error, num_done)
                    raise error


def _runs(items: Sequence[_T], size_of: Callable[[_T], int]) -> Generator[tuple[list[_T], int], None, None]:
    """Yield items in runs, with their total bytes."""
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


def _each(function: Callable[[_T], _R], run: tuple[list[_T], int]) -> tuple[list[_R], Exception | None]:
    """Return the results of a run up to the first error, and the error."""
    done: list[_R] = []
    try:
        for item in run[0]:
            done.append(function(item))  # noqa: PERF401  results are kept when a later call fails
    except Exception as error:  # noqa: BLE001  raised in the consumer, after the results
        return done, error
    return done, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Make the calls of a verb: on threads of this process, or by an executor, such as one on a Ray cluster.

    Attributes:
        workers: Number of calls in progress.
        executor: Executor of the calls; None: threads.
        progress: Receives the progress of the calls.
    """

    workers: int
    executor: Executor | None = None
    progress: Progress = field(default_factory=NoProgress)

    def map(
        self, call: Callable[[_T, Progress], _R], items: Iterable[_T], *, shared: Shared = ()
    ) -> Generator[_R, None, None]:
        """Map ``items`` in order, at most ``2 * workers`` ahead of the consumer.

        An executor may pickle calls and repeat a lost one: ``call`` must be a function of a module, or a ``partial`` of
        one, its results small, and a second run of it harmless. With an executor, the progress of a call arrives with
        its result.

        Args:
            call: Called with an item and a progress.
            items: The items.
            shared: Files that calls on other machines must see, as for :func:`ordered`.

        Raises:
            ConfigError: A call does not see one of the files.
        """
        if self.executor is None:
            yield from map_threads(lambda item: call(item, self.progress), items, self.workers)
            return
        calls = ordered(self.executor, _Elsewhere(call), items, 2 * self.workers, shared=shared)
        with closing(calls) as results:
            for result, num_bytes, num in results:
                self.progress.advance(num_bytes=num_bytes, num=num)
                yield result


@dataclass(slots=True)
class _Tally:
    """Sum up the progress of one call."""

    num_bytes: int = 0
    num: int = 0

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Do nothing: the total is known here."""

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Count bytes and items."""
        self.num_bytes += num_bytes
        self.num += num


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A call on another machine, whose progress comes back with its result."""

    call: Callable[[Any, Progress], Any]

    def __call__(self, item: Any) -> tuple[Any, int, int]:
        tally = _Tally()
        result = self.call(item, tally)
        return result, tally.num_bytes, tally.num


@dataclass(frozen=True, slots=True)
class _Seeing:
    """A call that fails where the shared files are not visible."""

    function: Callable[[Any], Any]
    shared: tuple[tuple[Storage, str], ...]

    def __call__(self, item: Any) -> Any:
        for storage, url in self.shared:
            if not storage.exists(url):
                raise ConfigError(
                    f"{redact(url)} is on this machine's disk, but not on that of {socket.gethostname()}, which was to "
                    "work on it: with --engine ray, all nodes must see the same files. Use a shared disk or an object "
                    "store, or --engine local"
                )
        return self.function(item)
