"""Fetch units into the arena in the background, share them, and release them by reference count.

Life cycle of a unit::

    admitted -> waiting -> being fetched -> fetched -> settled -> released -> dropped, or kept as cold

- ``admit`` allocates its room and adds a user; a unit that is already here only gets another user.
- A fetching thread reads its bytes and marks it as ready, whatever happens.
- ``settle`` enters its samples into the row table, or records the error.
- ``release`` removes a user. A unit without users is dropped or, with ``retain``, kept until its room is needed.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streaming.common.counters import Metrics
from streaming.common.monitor import Monitor
from streaming.errors import DataError, IndexFormatError, IndexMismatchError
from streaming.run.engine.memory.arena import Arena
from streaming.run.engine.memory.lent import ViewLeases
from streaming.run.engine.memory.mapped import FileMaps, NoMaps
from streaming.run.engine.memory.row_table import RowTable
from streaming.run.engine.threads.jobs import JobThreads
from streaming.shards.fetch.beside import fetch_parts
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import Apart, FetchRange, ShardReading, UnitKey, apart_later

IN_FLIGHT_BYTES = 128 << 20
"""Bytes in flight: 100 ms at 10 Gbit/s. With more, the first chunks from a nearby store arrive later. With half, the
first batch from a distant store takes 3.5 to 4.5 round trips instead of 2.4 to 2.9
(``benchmarks/bench_first_batch.py --far``), because its chunks are no longer all fetched together."""
LEAST_IN_FLIGHT = 8
"""Minimum number of chunks in flight, whatever their size: one connection to a distant store does not fill the
network.
"""
_BESIDE_FIRST_BATCH = 2
"""Number of chunks in flight at which no other fetch begins before the first batch, unless that batch needs it: reading
ahead takes network, cores and the GIL from the first batch (docs/design/0050)."""
_STOP_S = 1.0
"""Time for which closing waits for fetches in progress. Their memory stays mapped until they have ended."""

Fetch = Callable[[FetchRange, memoryview], Fetched]


@dataclass(slots=True, eq=False)
class Unit:
    """One fetched piece of the arena. Changed only under the store's lock.

    Attributes:
        wanted: The range to fetch.
        start: Start of its bytes in the arena.
        skew_bytes: Padding before its bytes, which belongs to it too.
        is_mapped: Its bytes are mapped from a file.
        num_bytes: Size of its allocation: as given by ``room``, or the whole range until its need is known.
        users: Number of pieces of the plan that still need it; at 0 it may be dropped.
        ready: The fetch has ended, successfully or not.
        fetched: The fetched bytes, until ``ChunkStore.settle`` has found the samples in them.
        first_row: Row of its first sample in the row table; -1 while not ready, or if none of it can be read.
        damage: Why none of it can be read, if so. (Damage of single samples is in the row table.)
        failure: Why the fetch failed altogether, if it did.
        asked_at_s: Time of the request, by ``time.monotonic``.
        begun_at_s: Time when a thread began to fetch it; 0: not yet.
    """

    wanted: FetchRange
    start: int
    num_bytes: int
    skew_bytes: int = 0
    is_mapped: bool = False
    users: int = 0
    ready: bool = False
    fetched: Fetched | None = None
    first_row: int = -1
    damage: DataError | None = None
    failure: BaseException | None = None
    asked_at_s: float = field(default_factory=time.monotonic)
    begun_at_s: float = 0.0

    def told(self) -> dict[str, Any]:
        """Return what is fetched, for traces."""
        wanted = self.wanted
        return {
            "of": wanted.key, "shard": wanted.shown_url, "byte_start": wanted.byte_start, "bytes": wanted.num_bytes,
            "samples": wanted.num_samples, "waited_s": self.begun_at_s - self.asked_at_s,
        }  # fmt: skip


class UnitTable:
    """Units by key. A unit is found only for ranges of the same reading of its shard. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[ShardReading, dict[tuple[int, int], Unit]] = {}

    def __iter__(self) -> Iterator[Unit]:
        return (unit for units in self._of.values() for unit in units.values())

    def __contains__(self, wanted: FetchRange) -> bool:
        return self.get(wanted) is not None

    def get(self, wanted: FetchRange) -> Unit | None:
        """Return the unit of exactly this range."""
        units = self._of.get(wanted.reading)
        return None if units is None else units.get((wanted.byte_start, wanted.byte_end))

    def with_samples_of(self, wanted: FetchRange) -> list[Unit]:
        """Return the units of the same reading that share samples with a range."""
        first, stop = wanted.first_sample, wanted.first_sample + wanted.num_samples
        return [
            unit
            for unit in self._of.get(wanted.reading, {}).values()
            if unit.wanted.first_sample < stop and first < unit.wanted.first_sample + unit.wanted.num_samples
        ]

    def add(self, unit: Unit) -> None:
        """Enter a unit whose range is not in the table yet."""
        wanted = unit.wanted
        self._of.setdefault(wanted.reading, {})[wanted.byte_start, wanted.byte_end] = unit

    def remove(self, unit: Unit) -> None:
        """Remove a unit."""
        wanted = unit.wanted
        units = self._of[wanted.reading]
        del units[wanted.byte_start, wanted.byte_end]
        if not units:
            del self._of[wanted.reading]


class ChunkStore:
    """All units that are in the arena or being fetched.

    ``changed`` (a condition) guards all state. Callers of all methods hold it, except where noted; background threads
    acquire it themselves, and notify it when a unit becomes ready.

    Attributes:
        limit_bytes: Bytes of the arena to use, in addition to those that only users' views keep.
        lender: Cuts views for users.
        room: Sizes of units for which only some fields are read, if known beforehand. Other units are allocated for the
            whole range, and shrink to the bytes that they need after the fetch.
        failure: Exception that ended the thread which keeps the units' bytes unchanged; None: none. The consumer gets
            it next.
        retain: Keep units that are no longer needed as long as there is room, because the next epoch needs them again.
        is_beginning: A run has no batch yet.
        is_held: Units that are no longer needed were kept because another plan may need them: ``keep_first`` is due.
        abandoned: A finished run has left behind, or may still leave behind, a thread that reads from the arena. Such a
            store must be closed and not used again; ``close`` leaves the memory to the last reference.
    """

    def __init__(
        self, *, fetch: Fetch, arena: Arena, num_threads: int, metrics: Metrics, changed: Monitor,
        maps: FileMaps | NoMaps, apart: Apart | None = None,
    ) -> None:  # fmt: skip
        self.arena = arena
        self.rows = RowTable()
        self.changed = changed
        self._fetch = fetch
        self._maps = maps
        self.lender = ViewLeases(arena, fetch)
        self._apart = apart or apart_later
        self.limit_bytes = arena.budget_bytes
        self.room: Mapping[UnitKey, int] = {}
        self.retain = self.is_held = False
        self.abandoned = False
        self.failure: BaseException | None = None
        maps.fail = self._fail
        self._metrics = metrics
        self._threads = JobThreads(num_threads, "shardstream-fetch")
        self.is_beginning = False
        self._awaited: deque[Unit] = deque()
        self._waiting: deque[Unit] = deque()
        self._num_in_flight = 0
        self._in_flight_bytes = 0
        self._units = UnitTable()
        self._cold: OrderedDict[UnitKey, Unit] = OrderedDict()
        self._closed = False

    def admit(self, wanted: FetchRange, *, is_awaited: bool = False) -> Unit | None:
        """Add a user to the unit and return it. Start its fetch if necessary. None: there is no room for it now.

        ``is_awaited``: the first batch needs it, so it precedes all others.
        """
        unit = self._units.get(wanted)
        if unit is None:
            skew = self._maps.skew_bytes(wanted)
            room = self.room.get(wanted.key, wanted.num_bytes)
            start = self._allocate(skew + room)
            if start is None:
                return None
            unit = Unit(wanted=wanted, start=start + skew, num_bytes=room, skew_bytes=skew)
            self._units.add(unit)
            (self._awaited if is_awaited else self._waiting).append(unit)
            self._start_fetches()
        elif is_awaited and unit in self._waiting:  # left by a run that ended before its first batch
            self._waiting.remove(unit)
            self._awaited.append(unit)
            self._start_fetches()
        self._cold.pop(wanted.key, None)
        unit.users += 1
        return unit

    def begin(self) -> None:
        """Prepare for a first batch: until ``go_on``, hardly anything is fetched but the units that it needs."""
        self.is_beginning = True

    def go_on(self) -> None:
        """Fetch as far ahead as there is room, since the first batch is built."""
        if self.is_beginning:
            self.is_beginning = False
            self._start_fetches()

    def beside(self, job: Callable[[], object]) -> None:
        """Run a job for a unit on a fetching thread. Its exception reaches the thread that needs the result."""

        def run() -> None:
            with suppress(Exception):
                job()

        self._threads.submit(run)

    def holds(self, wanted: FetchRange) -> bool:
        """Return whether the unit is here or being fetched, so that no fetch has to start for it."""
        return wanted in self._units

    def release(self, unit: Unit) -> None:
        """Remove one user. A unit without users is dropped, or kept until its room is needed."""
        unit.users -= 1
        if unit.users == 0 and unit.ready and not self._closed:
            self._retire(unit)

    def keep_first(self, wanted: Iterable[FetchRange]) -> int:
        """Keep the unused units that are in ``wanted``, and drop the others. Return the number of units kept.

        When room runs out, the last units of ``wanted`` are dropped first.
        """
        self.is_held = False
        kept = [self._cold.pop(one.key) for one in wanted if one.key in self._cold]
        while self._cold:
            self._drop(self._cold.popitem()[1])
        # Invariant: _cold is evicted from its beginning, so the units needed first are at its end.
        self._cold.update((unit.wanted.key, unit) for unit in reversed(kept))
        return len(kept)

    def hold(self, wanted: FetchRange) -> list[Unit]:
        """Return fetched units of the same reading that share samples with a range, and add a user to each."""
        found = [one for one in self._units.with_samples_of(wanted) if one.ready and one.failure is None]
        for unit in found:
            self.settle(unit)
            self._cold.pop(unit.wanted.key, None)
            unit.users += 1
        return found

    def settle(self, unit: Unit) -> None:
        """Locate the samples of a fetched unit, unless done before. Set ``first_row``, or the error.

        Raises:
            BaseException: An exception that is not an ``Exception``, such as Ctrl-C: it does not concern the unit.
        """
        fetched, unit.fetched = unit.fetched, None
        if fetched is None:
            return
        with self.arena.view[unit.start : unit.start + unit.num_bytes] as data:
            try:
                self._found(unit, fetched, fetched.apart(data))
            except Exception as error:  # noqa: BLE001  the consumer gets it when it needs the unit
                _note(unit, error)

    @property
    def is_broken(self) -> bool:
        """Whether no other run may use this store. Needs no lock."""
        return self.abandoned or self.failure is not None

    def pending(self) -> list[Unit]:
        """Return the units whose fetch has not ended yet."""
        return [unit for unit in self._units if not unit.ready]

    def close(self) -> None:
        """Stop the threads and free the memory. Slow fetches are left to end later."""
        with self.changed:
            if self._closed:
                return
            # Invariant: no fetch begins, and later results are not entered, so the memory may be freed.
            self._closed = True
        self._threads.stop(_STOP_S)
        self.lender.close(keeps_arena=self.abandoned)
        self.arena.close(keep_mapped=self.abandoned)
        self._maps.close()
        self._maps.fail = _ignore  # so that nothing of a closed run waits for the garbage collector

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error  # it ends the current run, and no other run uses this store
            self.changed.notify_all()

    def _allocate(self, num_bytes: int) -> int | None:
        self._free_returned()
        start = self._try_allocate(num_bytes)
        while start is None and self._cold:
            self._drop(self._cold.popitem(last=False)[1])
            start = self._try_allocate(num_bytes)
        self._metrics.peak("arena_peak_bytes", self.arena.used_bytes)
        return start

    def _try_allocate(self, num_bytes: int) -> int | None:
        if self.arena.used_bytes - self.lender.kept_bytes + num_bytes > self.limit_bytes:
            return None
        return self.arena.allocate(num_bytes)

    def _free_returned(self) -> None:
        for wanted, start, place in self.lender.freed():
            self._maps.unmap(wanted, start)
            self.arena.free(*place)

    def _retire(self, unit: Unit) -> None:
        if self.retain and (unit.first_row >= 0 or unit.fetched is not None):
            self._cold[unit.wanted.key] = unit
        else:
            self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        self._units.remove(unit)
        if self.lender.release(unit.start):
            self._maps.unmap(unit.wanted, unit.start)
            self.arena.free(unit.start - unit.skew_bytes, unit.skew_bytes + unit.num_bytes)
        if unit.first_row >= 0:
            self.rows.remove(unit.first_row, unit.wanted.num_samples)

    def _start_fetches(self) -> None:
        while (unit := self._next_to_fetch()) is not None:
            self._num_in_flight += 1
            self._in_flight_bytes += unit.wanted.num_bytes
            self._threads.submit(partial(self._run, unit))

    def _next_to_fetch(self) -> Unit | None:
        """Return the next unit to fetch, and stop it waiting; None: there is none, or enough is in flight."""
        waiting = self._awaited or self._waiting
        is_beside = self.is_beginning and waiting is self._waiting
        least, most_bytes = (_BESIDE_FIRST_BATCH, 0) if is_beside else (LEAST_IN_FLIGHT, IN_FLIGHT_BYTES)
        if not waiting:
            return None
        if self._num_in_flight >= least and self._in_flight_bytes + waiting[0].wanted.num_bytes > most_bytes:
            return None
        return waiting.popleft()

    def _run(self, unit: Unit) -> None:
        """Fetch one unit on a background thread, and notify all waiting threads, whatever happens."""
        if self._closed:
            return
        unit.begun_at_s = time.monotonic()
        fetched: Fetched | None = None
        try:
            fetched = self._fetched(unit)
        except BaseException as error:  # noqa: BLE001  thread boundary: the consumer gets it
            _note(unit, error)
        self._metrics.add("fetched_chunks")
        with self.changed:
            try:
                self._enter(unit, fetched)
            except BaseException as error:  # noqa: BLE001  thread boundary: the consumer gets it
                unit.failure = error
            unit.ready = True  # its fetch no longer counts, so another may begin
            self._num_in_flight -= 1
            self._in_flight_bytes -= unit.wanted.num_bytes
            if not self._closed:
                self._start_fetches()
            if unit.users == 0 and not self._closed:
                self._retire(unit)
            self.changed.notify_all()

    def _fetched(self, unit: Unit) -> Fetched:
        """Fetch the bytes of a unit to its place in the arena."""
        place = slice(unit.start, unit.start + unit.num_bytes)
        with self._metrics.timed("fetch_s", unit.told), self.arena.view[place] as out:
            return fetch_parts(unit.wanted, out, partial(self._part, unit))

    def _part(self, unit: Unit, wanted: FetchRange, place: int, out: memoryview) -> Fetched:
        """Fetch the bytes of one of the ranges of a unit, or map them, to their ``place`` in it."""
        is_in_place = any(place == one for one, _ in unit.wanted.parts)  # not behind a range that is read in pieces
        mapped = self._maps.map(wanted, unit.start + place, out) if is_in_place else None
        if mapped is None:
            return self._fetch(wanted, out)
        unit.is_mapped = True
        self._metrics.count("mapped_bytes", len(out))
        return Fetched(checked=mapped, found=self._apart(wanted))

    def _enter(self, unit: Unit, fetched: Fetched | None) -> None:
        """Enter the samples of a unit into the row table, or keep the means to locate them. Call under the lock."""
        layout = None if fetched is None or not isinstance(fetched.found, UnitLayout) else fetched.found
        self._metrics.add("fetched_bytes", unit.num_bytes if layout is None else layout.num_bytes)
        if fetched is None or layout is None:
            unit.fetched = fetched
        elif not self._closed:
            skew = unit.skew_bytes
            self.arena.shrink(unit.start - skew, skew + unit.num_bytes, skew + layout.num_bytes)
            unit.num_bytes = layout.num_bytes
            self._found(unit, fetched, layout)

    def _found(self, unit: Unit, fetched: Fetched, layout: UnitLayout) -> None:
        unit.first_row = self.rows.add(layout, unit.start)
        self.lender.add(
            unit.wanted, unit.start, fetched.checked, skew_bytes=unit.skew_bytes, num_bytes=unit.num_bytes,
            is_mapped=unit.is_mapped,
        )  # fmt: skip


def _note(unit: Unit, error: BaseException) -> None:
    """Record an error on the unit: damage of its bytes, or failure of the fetch."""
    if isinstance(error, DataError) and not isinstance(error, (IndexFormatError, IndexMismatchError)):
        unit.damage = error
    else:
        unit.failure = error


def _ignore(_: BaseException) -> None:
    """Ignore errors after the end."""
