"""One rank's batches of one epoch over shards without an index, in order: who reads, who builds, who waits for what.

Life cycle of a batch k::

    read and shuffled -> gathered in the arena -> being built -> built -> handed out

One thread reads, so that the order is its own, whoever builds. It gathers batches as long as there is room in the
arena; builder threads, or the consumer, take them from there; each is handed out when those before it are.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from streaming.batches.build import BadSample, BadSampleReport
from streaming.batches.draws import epoch_key
from streaming.engine.builders import Builder
from streaming.engine.crew import Crew
from streaming.engine.depth import Depth
from streaming.engine.grace import GRACE_S, LOOK_UP_S, leave_to_parent, still_alive, tell_of
from streaming.engine.memory.row_table import Rows
from streaming.engine.standing import thread_lines
from streaming.engine.unindexed.gather import Packing, neighbours, pack_samples
from streaming.engine.unindexed.read_ahead import ReadAhead, StreamClosedError
from streaming.engine.unindexed.samples import StreamSettings, samples_of
from streaming.metrics import Metrics
from streaming.storage import Storage, redact
from streaming.units import format_bytes

_ALONE = -1
"""Start of a batch that does not fit into the arena: it lies in memory of its own, while nothing is in the arena."""
_LOCK_S = 2.0
"""How long a report waits for the lock, which nobody keeps for more than milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A batch whose bytes are together.

    Attributes:
        rows: Its rows.
        start: Where they lie in the arena, or ``_ALONE``.
        num_bytes: How many bytes.
    """

    rows: Rows
    start: int
    num_bytes: int


class ShardStream:
    """Iterator over one rank's batches of one epoch; used once, then closed.

    ``__next__`` is for one consumer thread. ``close`` may be called from any thread, at any time, more than once.

    Args:
        storage: Where the shards are.
        settings: What to read.
        crew: Arena and builder; nobody else uses the arena.
        num_builders: Background threads that build batches, or have them built.
        batch_bytes: Bound on batches that are built but not handed out; one is always allowed.
        metrics: Where waits are counted.
        report: Told of every bad sample; may raise to stop the run.
    """

    def __init__(
        self, storage: Storage, settings: StreamSettings, crew: Crew, *, num_builders: int, batch_bytes: int,
        metrics: Metrics, report: BadSampleReport,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._draw_key = epoch_key(settings.order.seed, settings.epoch)
        self._reader = ReadAhead(storage, settings.piece_bytes)
        self._crew = crew
        self._arena = crew.arena
        self._builder: Builder = crew.builder
        self._metrics = metrics
        self._report = report
        self._changed = threading.Condition()
        self._gathered: dict[int, _Gathered] = {}
        self._in_use = 0
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        first = settings.first_batch
        self._num_gathered = self._started = self._handed_out = first
        self._handed_out_s = 0.0
        self._depth = Depth(settings.depth, batch_bytes, num_builders)
        self._reading = ""
        self._closed = False
        self._threads = [
            threading.Thread(target=self._read_loop, name="shardstream-stream", daemon=True),
            *(
                threading.Thread(target=self._build_loop, name=f"shardstream-build-{i}", daemon=True)
                for i in range(num_builders)
            ),
        ]
        leave_to_parent(self)
        for thread in self._threads:
            thread.start()

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: After the last one, and after ``close``.
            BaseException: Whatever kept the batch from being built, once; the stream is closed then.
        """
        number = self._handed_out
        if number > self._settings.first_batch:
            self._metrics.add("consumer_s", time.perf_counter() - self._handed_out_s)
        if number >= self._settings.num_batches or self._closed:
            raise StopIteration
        try:
            value = self._take(number)
        except StopIteration as error:  # of a user's function: left alone, it would end the epoch in silence
            self.close()
            raise RuntimeError(f"batch {number}: a decoder, transform or collate_fn raised StopIteration") from error
        except BaseException:
            self.close()
            raise
        if self._closed:
            raise StopIteration
        with self._changed:
            self._handed_out = number + 1
            self._changed.notify_all()
        self._handed_out_s = time.perf_counter()
        return value

    def close(self) -> None:
        """Stop reading and building, give back the arena's room; what is under way has ``GRACE_S`` to end.

        Then worker processes are killed. A thread that is still in a user's function is left behind with the arena,
        which is marked as abandoned, and a warning says where it is.
        """
        if self._closed or not self._begin_to_close():
            return
        self._reader.close()
        busy = still_alive(self._threads)
        if busy:
            self._builder.give_up()
            busy = still_alive(busy, 0 if self._builder.is_local else GRACE_S)
        if busy:
            tell_of(busy)
            return
        with self._changed:
            self._crew.abandoned = threading.current_thread() in self._threads
            while self._gathered:
                self._give_back(self._gathered.popitem()[1])
            self._results.clear()

    def _begin_to_close(self) -> bool:
        """Whether nobody has. Ask ``_closed`` first: the interpreter may have ended a thread that holds the lock."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._crew.abandoned = True  # until it is known better, should this be interrupted
            self._changed.notify_all()
            return True

    def describe(self) -> str:
        """What the next batch waits for, and what every stage is at, for people; from any thread."""
        if not self._changed.acquire(timeout=_LOCK_S):
            return "\n".join(["a thread keeps the engine's lock", *thread_lines("shardstream-")])
        try:
            lines = self._standing()
        finally:
            self._changed.release()
        return "\n".join([*lines, *self._builder.describe()])

    def _standing(self) -> list[str]:
        number = self._handed_out
        if self._closed or number >= self._settings.num_batches:
            waits_for = "the epoch is over"
        elif number in self._results:
            waits_for = "is built"
        elif number >= self._num_gathered:
            waits_for = "waits for its samples"
        else:
            waits_for = "is being built" if number < self._started else "can be built"
        batch = (
            f"batch {number} of {self._settings.num_batches}: {waits_for}; {self._num_gathered} batches read, "
            f"{self._started} started, {len(self._results)} wait to be handed out"
        )
        arena = f"{format_bytes(self._arena.used_bytes)} of {format_bytes(self._arena.budget_bytes)} in use"
        reading = redact(self._reading) if self._reading else "nothing yet"
        return [batch, f"arena: {arena}", f"reading {reading}"]

    # --- reading ---

    def _read_loop(self) -> None:
        number = 0
        try:
            samples = samples_of(self._reader, self._settings, self._before_sample)
            for number in range(self._settings.num_batches):
                batch = list(islice(samples, self._settings.batch_size))
                if self._closed:
                    return
                if number >= self._settings.first_batch:
                    self._gather(number, pack_samples(batch, self._settings.fields))
        except StreamClosedError:
            return
        except BaseException as error:  # noqa: BLE001  a thread border: the consumer gets it
            with self._changed:
                self._results[max(number, self._settings.first_batch)] = None, error
                self._changed.notify_all()
        finally:
            self._reader.close()

    def _before_sample(self, url: str) -> None:
        if self._closed:
            raise StreamClosedError
        self._reading = url

    def _gather(self, number: int, packing: Packing) -> None:
        with self._changed:
            while (start := self._admit(number, packing.num_bytes)) is None:
                self._changed.wait()
            self._in_use += 1
            self._metrics.peak("arena_peak_bytes", self._arena.used_bytes)
        arena = self._arena
        rows = packing.place_alone() if start == _ALONE else packing.place(arena.memory, arena.view, start)
        with self._changed:
            self._gathered[number] = _Gathered(rows=rows, start=start, num_bytes=packing.num_bytes)
            self._num_gathered = number + 1
            self._changed.notify_all()

    def _admit(self, number: int, num_bytes: int) -> int | None:
        """Where batch ``number`` is to lie; None while there is no room, or enough is read ahead. Under the lock."""
        if self._closed:
            raise StreamClosedError
        if number - self._started >= self._settings.depth:
            return None
        if num_bytes > self._arena.budget_bytes:
            return None if self._in_use else _ALONE
        return self._arena.allocate(num_bytes)

    def _give_back(self, batch: _Gathered) -> None:
        """Nobody needs the batch's bytes any more. Under the lock."""
        self._in_use -= 1
        if batch.start != _ALONE:
            self._arena.free(batch.start, batch.num_bytes)

    # --- building ---

    def _take(self, number: int) -> Any:
        """The batch, built by a builder or, if none has begun with it, right here."""
        with self._changed:
            while not self._closed:
                if number in self._results:
                    value, error = self._results.pop(number)
                    if error is not None:
                        raise error
                    return value
                if self._builder.is_local and number == self._started < self._num_gathered:
                    self._started += 1
                    break
                self._wait(number)
            else:
                return None
        with self._metrics.timed("build_in_consumer_s"):
            return self._build(number)

    def _wait(self, number: int) -> None:
        """Wait for a change, and say what the consumer waited for."""
        waits_for_fetch = number >= self._num_gathered
        if self._can_start():
            self._changed.notify_all()
        started_s = time.perf_counter()
        self._changed.wait(LOOK_UP_S)
        waited_s = time.perf_counter() - started_s
        self._metrics.add("wait_for_fetch_s" if waits_for_fetch else "wait_for_build_s", waited_s)
        if number == self._settings.first_batch:
            self._metrics.add("first_batch_wait_s", waited_s)

    def _can_start(self) -> bool:
        """Whether a builder may begin with a batch: never with what is the consumer's to build."""
        if self._builder.in_consumer:
            return False
        return self._started < min(self._num_gathered, self._handed_out + self._depth.now)

    def _build_loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._can_start():
                    self._changed.wait()
                if self._closed:
                    return
                number = self._started
                self._started += 1
            error: BaseException | None = None
            value: Any = None
            try:
                with self._metrics.timed("build_s"):
                    value = self._build(number)
            except BaseException as caught:  # noqa: BLE001  a thread border: the consumer gets it
                error = caught
            self._deliver(number, value, error)
            value = error = None  # a thread that waits must not keep a batch

    def _deliver(self, number: int, value: Any, error: BaseException | None) -> None:
        with self._changed:
            if self._closed:  # nobody asks for it any more
                return
            self._results[number] = value, error
            self._depth.saw(value, is_local=self._builder.is_local)
            self._changed.notify_all()

    def _build(self, number: int) -> Any:
        with self._changed:
            batch = self._gathered.pop(number)
        try:
            first = self._settings.first_position(number)
            rows = replace(batch.rows, positions=np.arange(first, first + len(batch.rows.keys)))
            return self._builder.build(
                rows, None, lambda row: neighbours(batch.rows, row), self._tell, seed=self._draw_key, batch=number,
            )  # fmt: skip
        finally:
            with self._changed:
                self._give_back(batch)
                self._changed.notify_all()

    def _tell(self, bad: BadSample) -> None:
        if not self._closed:  # else nobody asked for the batch
            self._report(bad)
