"""Deliver one rank's batches of one epoch in order: threads, building ahead, delivery and closing, for every reader.

Life cycle of a batch::

    ready -> being built -> built -> delivered

- *Ready* is up to the reader (plan and fetch, or read and gather): ``_num_ready``.
- Batches are begun strictly in order, each once: by the thread that counts it in ``_started`` under the lock. That is
  a builder thread, or the consumer if no builder has begun the batch that it requests.
- A built batch, or the error that prevented it, waits in ``_results`` until the consumer takes it.
- Batches are delivered strictly in order; ``_handed_out`` is the number of the next one. At most ``_depth.now`` batches
  are begun beyond it.
- An exception that ends a thread reaches the consumer, whatever line raised it: as the result of the batch that the
  thread had begun, or else as the failure of the whole run, which the consumer gets at its next batch.
- ``close`` ends the run once. ``_closing`` wakes all threads, then ``_closed`` stops each of them at its next step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from streaming.build.batches.build import BadSample, BadSampleReport
from streaming.common.arguments import format_bytes
from streaming.common.counters import Metrics
from streaming.common.monitor import Monitor
from streaming.order.plan.memory import enough_for_batches_mib
from streaming.run.engine.batch_bytes import tensor_bytes, weigh
from streaming.run.engine.builders import Builder
from streaming.run.engine.status import thread_lines
from streaming.run.engine.threads.jobs import GRACE_S, LOOK_UP_S, GivenUpError, leave_to_parent, still_alive, tell_of

_log = logging.getLogger(__name__)

_LOCK_S = 2.0
"""How long a report waits for the lock, which is never held for longer than milliseconds."""
_SHORT_STEP_S = 0.2e-3
"""Time between two requests within which no thread builds a batch if it has to be woken first."""
_SHORT_STEPS = 8
"""Number of consecutive short steps that show that the consumer only pulls batches. Eight times this number forgives
one long step, in which the consumer waited for a core or for the GIL."""
_HELD_UP = 16
"""Factor by which the number of batches built ahead may grow while slow ones hold up others."""
_MOMENT_S = 1e-3
"""Time for which builders leave the GIL to a loop that has just received a batch and releases the previous one."""
_WITH_USER = 2
"""Batches that a training loop usually holds: the last one is still in use while it requests the next one."""

_OWN_BYTES = 8 << 20
"""Memory for threads, row tables and heap fragmentation in addition to chunks and batches: 5 to 8 MiB
(tests/support/programs/memory_run.py, two cores, 2026-11); at most a sixteenth of memory_limit.
"""


class Depth:
    """Bound the number of batches built ahead by the largest one seen. Call under the caller's lock.

    Args:
        most: Upper bound on batches that are built but not delivered, unless a slow one holds up others.
        batch_bytes: Upper bound on their bytes; one batch is always allowed.
        num_builders: Number of threads that build at the same time.

    Attributes:
        now: The current bound; 1 until the first batch shows how large batches are.
    """

    def __init__(self, most: int, batch_bytes: int, num_builders: int) -> None:
        self._most = most
        self._most_held_up = most * _HELD_UP
        self._batch_bytes = batch_bytes - min(_OWN_BYTES, batch_bytes // 4)
        self._num_builders = num_builders
        self._largest_bytes = self._making_bytes = 0
        self.now = 1

    def saw(self, batch_bytes: int, object_bytes: int, *, is_local: bool) -> None:
        """Record the size of a batch that was built in this process or (not ``is_local``) in another.

        Building a batch takes its size twice: as samples, and as the batch made from them. In this process it takes
        three times its size, because the C library retains memory that a thread has freed. Python objects in the batch
        (``object_bytes``) take three times their size in another process too: there it is the heap, and the record that
        pickle keeps for each object.
        """
        self._largest_bytes = max(self._largest_bytes, batch_bytes)
        self._making_bytes = max(self._making_bytes, 2 * batch_bytes if is_local else batch_bytes + object_bytes)
        self._bound()

    def held_up(self) -> None:
        """Double the bound: builders were idle because a slow batch precedes many built ones.

        The next slow batch then begins earlier. Memory still limits the bound.
        """
        self._most = min(2 * self._most, self._most_held_up)
        self._bound()

    def _bound(self) -> None:
        room_bytes = self._batch_bytes - _WITH_USER * self._largest_bytes
        all_being_built = room_bytes // max(1, self._largest_bytes + self._making_bytes)
        fitting = (room_bytes - self._num_builders * self._making_bytes) // max(1, self._largest_bytes)
        self.now = max(1, min(self._most, max(all_being_built, fitting)))

    @property
    def least_bytes(self) -> int:
        """Bytes needed to build one batch ahead: the batches that the loop holds, that one, and its building."""
        return (_WITH_USER + 1) * self._largest_bytes + self._making_bytes


class Haste:
    """Detect a consumer that leaves no time between two batches to build the next one. For one thread.

    Attributes:
        is_great: Whether it leaves none: it requests batch after batch, as if to copy or to count them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_s = -math.inf
        self._num_short = 0
        self.is_great = False

    def asks(self) -> None:
        """Note that the consumer requests a batch."""
        if self._clock() - self._left_s < _SHORT_STEP_S:
            self._num_short = min(self._num_short + 1, _SHORT_STEPS**2)
        else:
            self._num_short //= _SHORT_STEPS
        self.is_great = self._num_short >= _SHORT_STEPS

    def leaves(self) -> None:
        """Note that the consumer leaves with a batch."""
        self._left_s = self._clock()


class Memory(Protocol):
    """Memory from which batches are built; it outlives a run.

    Attributes:
        abandoned: Whether a finished run has left behind, or may still leave behind, a thread that uses this memory. No
            other run may use it then.
    """

    abandoned: bool


class Delivery(ABC):
    """Iterate over the batches ``[first, num_batches)`` of one rank. Used once, then closed.

    ``__next__`` is for one consumer thread. ``close`` and ``describe`` may be called from any thread, at any time,
    repeatedly.

    ``_changed`` guards ``_started``, ``_handed_out``, ``_results``, ``_failure``, ``_depth``, ``_quiet``, ``_closing``
    and ``_closed``. Reads of ``_closed`` need no lock, since it is set once; neither does the consumer while
    ``_quiet``.

    Args:
        builder: Builds batches.
        memory: The memory from which batches are built.
        first: Number of the first batch.
        num_batches: Number past the last batch.
        num_builders: Number of background threads that build batches, or wait for worker processes that do.
        depth: Upper bound on batches that are built but not delivered.
        batch_bytes: Upper bound on the bytes of these batches; one batch is always allowed.
        metrics: Counts waits.
        report: Called for every bad sample; may raise to stop the run.
        changed: Held for every change of state, and notified after it.
    """

    def __init__(
        self, builder: Builder, memory: Memory, *, first: int, num_batches: int, num_builders: int, depth: int,
        batch_bytes: int, metrics: Metrics, report: BadSampleReport, changed: Monitor,
    ) -> None:  # fmt: skip
        self._builder = builder
        self._memory = memory
        self._first = first
        self._num_batches = num_batches
        self._metrics = metrics
        self._tell = report
        self._changed = changed
        self._started = self._handed_out = first
        self._batch_bytes = batch_bytes
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._failure: BaseException | None = None
        self._depth = Depth(depth, batch_bytes, num_builders)
        self._haste = Haste()
        self._quiet = False
        """Whether the consumer cuts batches from memory that only it holds: a delivery then affects no other thread."""
        self._closing = self._closed = False
        self._consumer: threading.Thread | None = None
        self._builders = [
            threading.Thread(target=self._run, args=(work,), name=f"shardstream-build-{place}", daemon=True)
            for place, work in enumerate(partial(self._build_all, place) for place in range(num_builders))
        ]
        self._threads = list(self._builders)

    # --- methods of a reader; called under the lock, except _build, _told and _stop_reading ---

    @abstractmethod
    def _num_ready(self) -> int:
        """Return the number below which the reader has all that it takes to begin a batch."""

    def _can_advance(self) -> bool:
        """Return whether ``_advance`` may have something to do."""
        return False

    @abstractmethod
    def _build(self, number: int) -> Any:
        """Build a batch that was begun. Called in any thread, without the lock."""

    @abstractmethod
    def _told(self, number: int) -> Mapping[str, Any]:
        """Return what a built batch is made of, for traces. Called in any thread, without the lock."""

    @abstractmethod
    def _give_back(self) -> None:
        """Release everything that the reader holds. No thread uses it any more."""

    @abstractmethod
    def _status(self) -> list[str]:
        """Describe, in lines, what the next batch waits for and what the reader does."""

    def _advance(self) -> None:  # noqa: B027  not every reader has something to start
        """Start everything that has become possible. An exception ends the run."""

    def _begin(self, number: int) -> None:
        """Count ``number``, which the consumer is about to build, as started, with all others that it builds along."""
        self._started = number + 1

    def _finish(self, number: int) -> None:  # noqa: B027  or something to give back then
        """Record that a batch is built."""

    def _obstacle(self) -> BaseException | None:
        """Return the error that prevents the next batch from ever becoming ready, if there is one."""
        return None

    def _stop_reading(self) -> None:  # noqa: B027  or threads of its own
        """Stop the reader's own threads. Called in the thread that closes, without the lock."""

    # --- the consumer ---

    def _start(self, *readers: Callable[[], None]) -> None:
        """Prepare builder threads, and one thread per reader in ``readers``. The first request starts them.

        By then the reader's state is complete. Started earlier, threads would keep a run alive that an interrupt has
        left without an owner.
        """
        more = [
            threading.Thread(target=self._run, args=(reader,), name="shardstream-stream", daemon=True)
            for reader in readers
        ]
        self._threads = [*more, *self._builders]
        leave_to_parent(self)

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: After the last one, and after ``close``.
            BaseException: The error that prevented the batch, raised once; the run is closed then.
        """
        number = self._handed_out
        if number >= self._num_batches:
            raise StopIteration
        self._haste.asks()
        # Set before _closed is read: close() sets _closed before it reads this.
        self._consumer = threading.current_thread()
        try:
            value = None if self._closed else self._take_or_close(number)
        finally:
            self._consumer = None
            if self._closed:
                with self._changed:
                    # _closed is set, so every waiting thread looks again and ends.
                    self._changed.notify_all()
        if self._closed:
            raise StopIteration
        if self._quiet:
            self._handed_out = number + 1
        else:
            with self._changed:  # one more batch may be built ahead now
                self._handed_out = number + 1
                if not self._builders or not self._builds_ahead:
                    with suppress(Exception):  # this batch is good; the next one raises the failure of the run
                        self._go_on()
                if self._threads:  # builders advance instead, so the consumer need not plan
                    self._changed.notify_all()
        self._haste.leaves()
        return value

    def _take_or_close(self, number: int) -> Any:
        try:
            if number == self._first:
                self._set_out()
            return self._take(number)
        except StopIteration as error:  # from a user's function: passed on, it would end the epoch silently
            self.close()
            raise RuntimeError(f"batch {number}: a decoder, transform or collate_fn raised StopIteration") from error
        except Exception:
            if self._closed:  # by another thread: nobody needs the batch or its error
                return None
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _set_out(self) -> None:
        """Begin to read, and then to build: processes start while the first bytes are on their way."""
        self._builder.check_files()
        self._metrics.add("first_batch_wait_s", 0.0)  # known, also if the first bytes come before they are waited for
        for thread in self._threads:
            if thread not in self._builders:
                thread.start()
        with self._changed:
            # What is planned is requested, so the first bytes are on their way.
            self._go_on()
        self._builder.begin(partial(_look_again, weakref.ref(self)))
        for thread in self._builders[:1]:  # one batch at a time, until one shows how large they are
            thread.start()

    def _take(self, number: int) -> Any:
        """Return the batch from a builder or, if none has begun it, build it in this thread."""
        with self._changed:
            # Each batch is built once: by the thread that counts it in _started under this lock.
            while not self._closed:
                if number not in self._results:
                    self._go_on()
                if number in self._results:
                    value, error = self._results.pop(number)
                    if error is not None:
                        raise error
                    return value
                if self._builder.is_local and number == self._started < self._num_ready():
                    self._begin(number)
                    break
                self._wait(number)
            else:
                return None
        return self._build_here(number)

    def _build_here(self, number: int) -> Any:
        """Build in the consumer's thread a batch that the consumer has begun, or that a builder has to leave to it."""
        with self._metrics.timed("build_in_consumer_s", self._told, number):
            value = self._build(number)
        with self._changed:
            if not self._closed:  # otherwise the run releases everything at once
                self._finish(number)
        return value

    def _wait(self, number: int) -> None:
        """Wait for a change, and record what the consumer waited for."""
        waits_for_fetch = number >= self._num_ready()
        obstacle = self._obstacle() if waits_for_fetch else None
        if obstacle is not None:
            raise obstacle
        self._look_at_depth()
        if self._can_start():
            self._changed.notify_all()
        waiting = self._metrics.timed("wait_for_fetch_s" if waits_for_fetch else "wait_for_build_s")
        with waiting:
            self._changed.wait(LOOK_UP_S, when=partial(self._consumer_has_work, number))
        if number == self._first:
            self._metrics.add("first_batch_wait_s", waiting.seconds)

    def _look_at_depth(self) -> None:
        """Allow more batches ahead if only one batch holds up the consumer: half of those behind it are built.

        Called by the waiting consumer, and by builders that may not begin another batch.
        """
        if self._consumer is None or self._handed_out in self._results:
            return
        is_full = self._started == self._handed_out + self._depth.now < self._num_ready()
        if is_full and 2 * len(self._results) >= self._depth.now > 1:
            self._depth.held_up()

    def _consumer_has_work(self, number: int) -> bool:
        """Return whether the waiting consumer can take its batch, build it, call ``_go_on``, or has to end."""
        if self._closing or self._failure is not None or number in self._results or self._can_advance():
            return True
        return self._builder.is_local and number == self._started < self._num_ready()

    # --- the threads ---

    def _run(self, work: Callable[[], None]) -> None:
        """Run a thread of this delivery to its end. An exception ends the run for all threads."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001  thread boundary: the consumer gets it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the run: the consumer gets ``error`` when it next requests a batch."""
        with self._changed:
            self._failure = self._failure or error  # keep the first one; later ones may be its consequences
            self._changed.notify_all()

    def _go_on(self) -> None:
        """Call ``_advance`` unless the run has failed; under the lock.

        Raises:
            BaseException: The failure of the run. An interrupted ``_advance`` must not be continued.
        """
        if self._failure is None and not self._closed:
            try:
                self._advance()
            except BaseException as error:
                self._failure = error
                raise
        if self._failure is not None and not self._closed:
            raise self._failure

    def _can_start(self, place: int = 0) -> bool:
        """Return whether the builder at ``place`` may begin a batch. Never true for the consumer's own batch.

        The number of working builders is the number of batches that may be in progress. The first free builders work,
        because each thread, and each process behind it, keeps memory of its own after its first batch.
        """
        if self._builder.in_consumer or place >= self._depth.now or not self._builds_ahead:
            return False
        if place and (self._builder.is_quick or place >= self._builder.most_at_once):
            return False
        return self._started < min(self._num_ready(), self._handed_out + self._depth.now)

    def _build_all(self, place: int) -> None:
        others = [] if place else self._builders[1:]
        while (number := self._next_to_build(place)) is not None:
            self._deliver(number)
            # Not by the consumer: a thread that starts needs the interpreter's lock, and its starter waits for that.
            # If the run ends meanwhile, each looks first, and ends; close() waits for this thread, and then for them.
            while others:
                others.pop(0).start()

    def _next_to_build(self, place: int) -> int | None:
        """Return the next batch for a builder to begin; wait until there is one. None: the run is over."""
        with self._changed:
            while not self._closed and self._failure is None and not self._can_start(place):
                # Perhaps nobody else has noticed what has been fetched: the consumer is in its step, and notifications
                # sent before this wait are lost. So look first.
                if self._builder_looks():
                    self._go_on()
                    if self._can_start(place):
                        break
                self._changed.wait(when=partial(self._builder_has_work, place))
                if self._results and not self._is_urgent():
                    self._changed.wait(_MOMENT_S, when=self._is_urgent)
            if self._closed or self._failure is not None:
                return None
            self._started += 1  # no other thread begins it
            return self._started - 1

    def _is_urgent(self) -> bool:
        """Return whether the consumer waits for a batch, or the run has to end."""
        if self._closing or self._failure is not None:
            return True
        return self._consumer is not None and self._handed_out not in self._results

    def _builder_has_work(self, place: int) -> bool:
        """Return whether the builder at ``place`` has to begin a batch, to call ``_go_on``, or to end."""
        if self._closing or self._failure is not None or self._can_start(place):
            return True
        return self._builder_looks() and self._can_advance()

    def _builder_looks(self) -> bool:
        """Return whether builders call ``_go_on``: only after the consumer has, since setup may be unfinished."""
        return self._builds_ahead and self._started > self._first

    @property
    def _builds_ahead(self) -> bool:
        """Whether threads build. They build quick batches only if the consumer leaves them the time."""
        return not (self._builder.is_quick and self._haste.is_great)

    def _deliver(self, number: int) -> None:
        """Build a batch in a builder thread; leave it, or the error that prevented it, for the consumer."""
        value: Any = None
        error: BaseException | None = None
        num_bytes = object_bytes = 0
        try:
            with self._metrics.timed("build_s", self._told, number):
                value = self._build(number)
            num_bytes = weigh(value)
            object_bytes = num_bytes - tensor_bytes(value)
        except BaseException as caught:  # noqa: BLE001  thread boundary: the consumer gets it
            value, error = None, caught
        with self._changed:
            if self._closed:  # nobody needs the batch any more
                return
            self._results[number] = value, error  # started and built; untouched until the consumer takes it
            self._depth.saw(num_bytes, object_bytes, is_local=self._builder.builds_here)
            self._finish(number)
            least_bytes = self._depth.least_bytes
            self._go_on()
            self._look_at_depth()
            self._changed.notify_all()
        if least_bytes > self._batch_bytes:
            self._tell_of_large(num_bytes, least_bytes)

    def _tell_of_large(self, num_bytes: int, least_bytes: int) -> None:
        """Warn once that batches exceed their part of ``memory_limit``, however few are built ahead."""
        is_told = self._metrics.get("batches_over_bytes")
        self._metrics.peak("batches_over_bytes", least_bytes - self._batch_bytes)
        if not is_told:
            _log.warning(
                "memory_limit: a batch of %s is too large for it. Two batches that the loop holds, one ahead and the "
                "one being made take up to %s, but batches get only %s of the limit, so memory may exceed the limit by "
                'the difference. Use memory_limit="%dMiB" (by the batches made so far; larger ones need more), or a '
                "smaller batch",
                format_bytes(num_bytes), format_bytes(least_bytes), format_bytes(self._batch_bytes),
                enough_for_batches_mib(least_bytes),
            )  # fmt: skip

    def _report(self, bad: BadSample) -> None:
        """Report a bad sample.

        Raises:
            GivenUpError: The run is over, so the batch will not be delivered.
        """
        if self._closed:
            raise GivenUpError
        self._tell(bad)

    # --- the end ---

    def close(self) -> None:
        """Stop reading and building, and release all resources. Batches in progress have ``GRACE_S`` to finish.

        After that, worker processes are killed. A thread that is still in a user's function is left behind: the memory
        that it reads is kept and marked as abandoned, and a warning names the function.
        """
        if self._closed or not self._begin_to_close():
            return
        self._stop_reading()
        busy = still_alive(self._threads)
        if busy:
            self._builder.give_up()
            busy = still_alive(busy, 0 if self._builder.is_local else GRACE_S)
        own = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._consumer in (None, own), 0 if busy else GRACE_S)
            consumer = self._consumer
            if consumer not in (None, own):
                busy.append(consumer)
            self._quiet = False
            self._results.clear()  # nobody needs batches of a finished run
            if not busy:  # no other thread refers to the run any more
                self._memory.abandoned = own in self._threads
                self._give_back()
            # A thread that was never started still refers to the run, which would not be freed with its last owner.
            self._threads = [one for one in self._threads if one.ident is not None]
            self._builders = [one for one in self._builders if one.ident is not None]
        if busy:
            tell_of(busy)

    def _begin_to_close(self) -> bool:
        """Start to close; return whether this call is the first to do so.

        Check ``_closed`` first: at interpreter exit, a thread may have ended while it held the lock.
        """
        with self._changed:
            if self._closed:
                return False
            self._memory.abandoned = True  # until proven otherwise, in case this is interrupted
            # Notified before _closed: if that is interrupted, the next call closes. Invariant: all waiters are
            # notified.
            self._closing = True
            self._changed.notify_all()
            # Invariant: only one caller closes, and every thread that checks this stops at its next step.
            self._closed = True
            return True

    def ahead(self) -> dict[str, float]:
        """Count the batches ahead of the consumer by stage. May be called from any thread."""
        if self._closed or not self._changed.acquire(timeout=_LOCK_S):
            return {}
        try:
            return {"fetched_ahead": max(0, self._num_ready() - self._handed_out), "built_ahead": len(self._results)}
        finally:
            self._changed.release()

    def describe(self) -> str:
        """Describe what the next batch waits for and what every stage does. May be called from any thread."""
        if not self._changed.acquire(timeout=_LOCK_S):
            return "\n".join(["a thread is holding the engine's lock", *thread_lines("shardstream-")])
        try:
            lines = self._status()
        finally:
            self._changed.release()
        return "\n".join([*lines, *self._builder.describe()])


def _look_again(one: weakref.ref[Delivery]) -> None:
    """Have builder threads check whether they may begin a batch."""
    delivery = one()
    if delivery is not None:
        with delivery._changed:
            # From now on, every waiting thread sees the builder's new state.
            delivery._changed.notify_all()
