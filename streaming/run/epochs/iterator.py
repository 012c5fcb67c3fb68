"""Iterate a loop: the common part of all loops, and the users' iterator.

Life cycle of an iteration::

    made -> begun -> batch, batch, … -> over -> let go

- ``Batches`` opens a turn, which ends the turn of the iterator before it, and stops that iterator's run.
- The first request begins: ``Position.begin`` gives the place, ``Loop.start`` a run from there on. The loop keeps it as
  ``running``.
- Each request takes a batch from the run, advances the position, and only then returns the batch.
- After the last batch, an error, ``close`` or the end of the turn, no batch follows. ``_let_go`` closes the run and
  stops the watchdog; the next request raises.
- After an interrupt (``is_interrupt``) the loop also discards its machinery (``Loop.clean_up``).
"""

from __future__ import annotations

import errno
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar

from streaming.common.counters import Metrics, waited_here_s
from streaming.common.forks import Maker
from streaming.errors import ConfigError, IteratorEndedError
from streaming.order.plan.settings import Shape
from streaming.order.plan.state import LoaderState
from streaming.run.epochs.interrupts import is_interrupt
from streaming.run.epochs.micro_batches import MicroRun, Within
from streaming.run.epochs.position import Place, Position
from streaming.run.epochs.run import Run
from streaming.run.epochs.tuples import tuple_of
from streaming.run.epochs.watch import Watchdog
from streaming.types import BatchT
from streaming.watch.tracing.ranges import ProfilerRanges

NO_SOURCES_SEEN = (
    "seen: works with a loader over a Mixture only; this loader reads a single data set, whose samples state_dict() "
    "counts"
)
NO_SOURCES_WEIGHED = (
    "set_weights: works with a loader over a Mixture only; this loader reads a single data set: give it a "
    "Mixture({…: dataset, …}, weights=…)"
)


NO_STEPS = (
    "steps: this loader's batches are not cut into micro-batches; give it micro_batch_size=, the most rows of one on "
    "each rank"
)
_Answer = TypeVar("_Answer")


class Closable(ABC):
    """Base class of objects that are closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and processes, and free memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Loop(ABC):
    """Run one epoch after another by the rules of ``Position``. For one thread, except ``close`` and ``describe``.

    Args:
        shape: Shape of the batches.
        position: A position that is shared with another object; default: a new one.

    Attributes:
        shape: Shape of the batches.
        position: Current position of the loop.
        metrics: Counters and times.
        running: The run that currently produces batches, if any.
        announce: Called with the place at which an iteration begins.
        as_tuple: Entries of a batch that are handed out as a tuple; None: batches are handed out as they are.
        samples_per_epoch: Number of samples of an epoch, over all ranks; only if ``is_counted``.
    """

    samples_per_epoch: int

    is_counted = True
    """Whether ``batches_left`` is known before the end of the epoch is reached."""
    state_type: Any = LoaderState
    """Class of the loop's states. Its ``from_dict`` reads the result of ``to_dict``."""
    can_seek = True
    """Whether a place alone determines the samples from there on, without the state of a dataset or of readers."""

    @property
    def is_elastic(self) -> bool:
        """Whether global batches hold the same samples, in the same order, on any number of ranks."""
        return self.can_seek

    no_remesh = (
        "it works with a StreamingDataset or a Mixture only. For this data set make a new DataLoader with the new "
        "device_mesh and call load_state_dict(state)"
    )
    """Reason why the loop cannot change its world, and the cure."""

    def __init__(self, shape: Shape, position: Position | None = None) -> None:
        self.position = Position() if position is None else position
        self.metrics = Metrics(ProfilerRanges())
        self.shape = shape
        self.running: Run | None = None
        self.announce: Callable[[Loop, Place], None] | None = None
        self.as_tuple: tuple[str, ...] | None = None
        self._watchdog: Watchdog | None = None

    @abstractmethod
    def start(self, place: Place, seed: int | None) -> Run:
        """Start producing the batches of the epoch from ``place`` on.

        Args:
            place: The place returned by ``Position.begin``.
            seed: A new seed for the order; None: keep the current one.
        """

    def begun(self, place: Place, seed: int | None) -> Run:
        """Start producing batches, or the micro-batches of each, from ``place`` on."""
        if self.shape.micro_batch_size is None:
            return self.start(place, seed)
        steps = self.start(replace(place, micro_batches=0), seed)
        return MicroRun(steps, place, self)

    def number_of(self, place: Place) -> int:
        """Return the number of the batch at a place in its epoch, from 0."""
        first = self.row_of(replace(place, samples_seen=0))
        return self.shape.sizes.batches(first, place.samples_seen, "partial")

    def rows_of_step(self, place: Place) -> int | None:
        """Return rows of the batch at a place over all ranks, padding not counted; None: one rank does not know."""
        return min(self.shape.sizes.at(self.row_of(place)), self.samples_per_epoch - place.samples_seen)

    def micro_batches_left(self, place: Place) -> int:
        """Return the number of batches of an epoch after a place in it; of micro-batches, if batches are cut."""
        if self.shape.micro_batch_size is None:
            return self.left_behind(place)
        left = self.samples_per_epoch - place.samples_seen
        return self.shape.num_parts_of(self.row_of(place), left) - place.micro_batches

    @abstractmethod
    def batches_left(self, samples_seen: int) -> int:
        """Return the number of batches of an epoch after its first ``samples_seen`` samples."""

    def left_behind(self, place: Place) -> int:
        """Return the number of batches of an epoch after a place in it."""
        return self.batches_left(place.samples_seen)

    def after_batch(self, place: Place, run: Any) -> Place:  # noqa: ARG002  for loops whose runs know more
        """Return the place after the batch that ``run`` has just returned; ``place`` is the place before it."""
        seen = place.samples_seen + self.shape.sizes.at(self.row_of(place))
        return self.settled(Place(epoch=place.epoch, samples_seen=seen))

    def after(self, place: Place, run: Any) -> Place:
        """Return the place after the batch or micro-batch that ``run`` has just returned; ``place`` is before it."""
        if isinstance(run, MicroRun) and run.is_inside:
            return place.after_micro_batch()
        return self.after_batch(place, run)

    def settled(self, place: Place) -> Place:
        """Return a place as an end, after all samples of its epoch, if no batch of the epoch follows it.

        So an end is the same whatever the size of the batches before it, and the row after it begins the next epoch.
        """
        if not self.is_counted or not (place.is_end or not self.left_behind(place)):
            return place
        return replace(place, samples_seen=self.samples_per_epoch, is_end=True, has_begun=False, micro_batches=0)

    def row_of(self, place: Place) -> int:
        """Return the number of samples before a place, over all ranks; any number if batch sizes never change."""
        return place.samples_seen

    @property
    def next_shape(self) -> Shape:
        """Shape of the next batch."""
        return self.shape.at(self.row_of(self.position.place))

    def outlook(self, place: Place) -> str:  # noqa: ARG002  for loops that know their next samples
        """Describe the changes in reading after ``place``; "" if there are none."""
        return ""

    def now_read(self, dataset: Any) -> Any:
        """Return the dataset in its current form, if a state or a call has changed it since the loop was made."""
        return dataset

    @property
    def is_endless(self) -> bool:
        """Whether an epoch has no end."""
        return self.position.is_endless

    def check_ends(self) -> None:
        """Check that an epoch has an end, so that its batches can be counted.

        Raises:
            TypeError: It has none.
        """
        if self.is_endless:
            raise TypeError(
                "this DataLoader has no len(): its Mixture is without end. Count steps in the training loop, or give "
                "an epoch_size="
            )

    def seen(self) -> dict[str, dict[str, float]]:
        """Count the samples drawn from each source.

        Raises:
            ConfigError: There are no sources.
        """
        raise ConfigError(NO_SOURCES_SEEN)

    def set_weights(self, weights: Any, *, at: int | None, timeout_s: float) -> int:  # noqa: ARG002
        """Change the weights of the sources.

        Raises:
            ConfigError: There are no sources.
        """
        raise ConfigError(NO_SOURCES_WEIGHED)

    def state(self) -> Any:
        """Return the position as a ``state_type``. It is the same on every rank."""
        return self.state_at(self.position.place)

    @abstractmethod
    def state_at(self, place: Place) -> Any:
        """Return the state that continues from a place of the current run."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Continue from a state.

        Raises:
            StateError: It does not fit.
        """

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return all metrics and bad samples, by name."""

    def numbers(self) -> dict[str, float]:
        """Return the numbers of ``report`` that this process knows. May be called from any thread."""
        return self.metrics.snapshot()

    def numbers_elsewhere(self) -> dict[int, dict[str, float]]:
        """Return the numbers of processes that read for this one, by data rank, as far as they answer at once."""
        return {}

    def page_lock(self, locker: Any) -> None:  # noqa: B027  most have nothing to lock
        """Page-lock batches from now on, if the loop builds them itself; None turns this off."""

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self.position.epoch

    @property
    def num_batches(self) -> int:
        """Number of batches in a whole epoch."""
        return self.batches_left(0)

    def run(self, watchdog: Watchdog | None = None, *, with_state: bool = False) -> Batches[Any]:
        """Return an iterator over the next epoch, or the rest of the current one.

        It supersedes the previous iterator. With ``with_state`` it yields pairs: a batch, and the state after it.
        """
        watched = watchdog or Watchdog(None, "no batch", self.describe)
        batches: Batches[Any] = Batches(self, watched, with_state=with_state)
        self._watchdog = watchdog
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. If that epoch is already next, keep a loaded place."""
        if self.position.set_epoch(epoch):
            self.stop()

    def set_seed(self, seed: int) -> None:
        """Shuffle with a new seed, from the next epoch that starts."""
        self.position.set_seed(seed)

    def go_to(self, place: Place, next_seed: int | None, what: str = "load_state_dict()") -> None:
        """Continue from a checkpoint."""
        if self.position.load(self.settled(place), next_seed, what):
            self.stop()

    def succeed(self, other: Loop) -> None:
        """Replace another loop over the same dataset: continue in its epoch, with its seed."""
        self.metrics.observer = other.metrics.observer
        here, there = self.position, other.position
        there.leave_end()
        self.set_epoch(there.place.epoch)
        seed, has_begun = there.next_seed, there.place.has_begun
        if seed is not None and (seed, has_begun) != (here.next_seed, here.place.has_begun):
            self.set_seed(seed)

    def describe(self) -> str:
        """Describe what the loop is waiting for right now."""
        running = self.running
        return "not running" if running is None else running.describe()

    def close(self) -> None:
        """Stop threads and processes, and free memory. The loop can be used again, and then starts new ones."""
        self.position.close()
        self.stop()

    def stop(self) -> None:
        """End the current run and its watchdog."""
        running, self.running = self.running, None
        watchdog, self._watchdog = self._watchdog, None
        try:
            if running is not None:
                running.close()
        finally:
            if watchdog is not None:
                watchdog.stop()

    @abstractmethod
    def clean_up(self) -> None:
        """Discard whatever an interrupt may have left in an inconsistent state."""


class Batches(Generic[BatchT]):
    """Iterate over the rest of one epoch. After its last batch, every call raises ``StopIteration``.

    Use it from one thread at a time, in the process that made it. If several threads request batches, each batch goes
    to one of them.

    It begins when the first batch is requested; until then ``set_epoch`` and ``load_state_dict`` determine the place.
    When it is dropped or closed, its threads end and its memory is released. An iterator that is still open at
    interpreter exit is closed first, before the interpreter stops threads at arbitrary points, with locks held.

    Raises:
        IteratorSupersededError: From every ``next`` after another iterator of this loader, ``set_epoch``,
            ``load_state_dict`` or ``remesh`` took over; the message names the line that did.
        IteratorEndedError: From every ``next`` after the loader was closed, or after another error.
        ForkedError: In a forked child: the threads and processes that build batches belong to the parent.
    """

    def __init__(self, loop: Loop, watchdog: Watchdog, *, with_state: bool = False) -> None:
        self._with_state = with_state
        self._maker = Maker("this iteration over a loader", "Begin one here: iter(loader) works in a forked child, too")
        self._loop = loop
        self._watchdog = watchdog
        self._place: Place | None = None  # after the last delivered batch; None: not begun
        self._was: Place | None = None  # before it
        self._run: Run | None = None
        self._is_over = False
        self._within: Within | None = None
        self._failure: str | None = None
        self._handed_out_s: float | None = None
        self._asked = threading.RLock()
        self._turn = loop.position.open()
        loop.stop()
        weakref.finalize(self, close_at_exit, weakref.ref(self))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchT:
        """Return the next batch. The position advances before the batch is returned."""
        self._maker.check()
        with self._asked:  # held until the position has advanced: no two threads begin, or take the same batch
            asked = self._loop.metrics.observer.asks()
            if asked is None:
                return self._answer(self._next)
            with asked:
                batch = self._answer(self._next)
                asked.got(self._told())
                return batch

    def upcoming(self) -> Within:
        """Return the place of the next micro-batch in its step. The step is read, but not delivered.

        Raises:
            StopIteration: There is none.
            ConfigError: Batches are not cut into micro-batches.
        """
        self._maker.check()
        with self._asked:
            return self._answer(self._upcoming, batches=0)

    @property
    def within(self) -> Within | None:
        """Place of the last delivered micro-batch in its step; None: none was delivered, or batches are not cut."""
        return self._run.within if isinstance(self._run, MicroRun) else self._within

    def _answer(self, act: Callable[[], _Answer], batches: int = 1) -> _Answer:
        if self._is_over:
            self._let_go()
            self._loop.position.asked_for_more(self._turn)
            raise StopIteration
        if self._turn.has_ended:
            self._let_go()
            self._turn.check()
        if self._failure is not None:
            raise IteratorEndedError(self._failure)
        begun_s, begun_thread_s, begun_waited_s = time.perf_counter(), time.thread_time(), waited_here_s()
        try:
            self._watchdog.begin()
            found = act()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._watchdog.end()
        self._count(batches, begun_s, begun_thread_s, begun_waited_s)
        return found

    def _count(self, batches: int, begun_s: float, begun_thread_s: float, begun_waited_s: float) -> None:
        """Count a batch that is about to be delivered, and the consumer's time since the last answer."""
        last_s, now_s = self._handed_out_s, time.perf_counter()
        self._handed_out_s = now_s
        spent = {
            "batches": batches, "in_loader_s": now_s - begun_s, "consumer_thread_s": time.thread_time() - begun_thread_s
        }  # fmt: skip
        if last_s is None:
            spent["first_batch_s"] = now_s - begun_s
        else:
            spent["consumer_s"] = begun_s - last_s
            spent["unhidden_s"] = max(0.0, now_s - begun_s - (waited_here_s() - begun_waited_s))
        self._loop.metrics.add_each(spent)

    def hold_back(self, change: int) -> None:
        """Change the number of batches that were delivered but not yet received by training.

        For wrappers that read ahead.

        A wrapper calls this for each batch that it keeps, and for each that it passes on, oldest first, so that the
        loader's ``state_dict`` describes what training has received::

            batches = iter(loader)
            kept = next(batches)
            batches.hold_back(1)
            ...
            batches.hold_back(-1)
            return kept

        Raises:
            IteratorEndedError: The loader was moved or closed in the meantime, so kept batches must not be passed on.
        """
        self._turn.check()
        self._loop.position.hold_back(change)

    @property
    def metrics(self) -> Metrics:
        """Metrics of the loop, for wrappers that count in them."""
        return self._loop.metrics

    def came_from(self) -> dict[str, Any]:
        """Return the state from which the last delivered batch comes again.

        Raises:
            ConfigError: No batch was delivered.
        """
        if self._was is None:
            raise ConfigError("came_from: no batch was handed out yet; call it after next()")
        state: dict[str, Any] = self._loop.state_at(self._was).to_dict()
        return state

    @property
    def is_over(self) -> bool:
        """Whether the last batch has been delivered."""
        return self._is_over

    @property
    def has_ended(self) -> bool:
        """Whether the iterator was superseded, or its loader was closed."""
        return self._turn.has_ended

    def close(self) -> None:
        """End this iteration. The loader continues with the next epoch. In a forked child this does nothing."""
        self._is_over = True
        self._turn.is_open = False
        self._let_go()

    def __del__(self) -> None:
        if hasattr(self, "_turn"):
            self._turn.is_open = False
            self._let_go()

    def _reading(self) -> tuple[Place, Run]:
        """Return the place of the next batch, and the run that produces it, which begins with the first one."""
        place, run = self._place, self._run
        return self._begin() if place is None or run is None else (place, run)

    def _upcoming(self) -> Within:
        _, run = self._reading()
        if not isinstance(run, MicroRun):
            raise ConfigError(NO_STEPS)
        found: Within = self._taken(run, run.upcoming)
        return found

    def _next(self) -> BatchT:
        place, run = self._reading()
        batch = self._taken(run, partial(next, run))
        if self._loop.as_tuple is not None:
            batch = tuple_of(batch, self._loop.as_tuple)
        self._was = place
        after = self._place = self._loop.after(place, run)
        self._is_over = self._turn.is_over = after.is_end
        self._loop.position.advance(after)
        if self._with_state:  # made here, where no other thread can request the next batch
            batch = batch, self._loop.state_at(after).to_dict()
        handed_out: BatchT = batch
        return handed_out

    def _told(self) -> dict[str, Any]:
        """Return the step of the last delivered batch, for traces."""
        loop, was, now = self._loop, self._was, self._place
        if was is None or now is None:
            return {}
        row, after = loop.row_of(was), now.onward
        return {
            "epoch": was.epoch, "samples_seen": was.samples_seen, "row": row,
            "after": (after.epoch, after.samples_seen), "global_batch_size": loop.shape.sizes.at(row),
        }  # fmt: skip

    def _begin(self) -> tuple[Place, Run]:
        place, seed = self._loop.position.begin(self._turn)
        if place.is_end:
            self._finish()
        run = self._run = self._loop.running = self._loop.begun(place, seed)
        self._place = place
        if self._loop.announce is not None:
            self._loop.announce(self._loop, place)
        return place, run

    def _taken(self, run: Run, take: Callable[[], Any]) -> Any:
        try:
            batch = take()
        except StopIteration:
            self._turn.check()
            if self._loop.is_counted:
                raise IteratorEndedError(f"an epoch ended before its last batch; {run.describe()}") from None
            self._finish()
        self._turn.check()  # another thread may have closed the loader while this one waited
        return batch

    def _finish(self) -> NoReturn:
        """End, because there is no further batch."""
        self._is_over = self._turn.is_over = True
        self._loop.position.finish()
        raise StopIteration

    def _fail(self, error: BaseException) -> None:
        self._turn.is_over = True
        self._failure = failed(error)  # has no effect if the iterator is exhausted
        _add_cure(error)
        if not isinstance(error, StopIteration) and is_interrupt(error) and not self._turn.has_ended:
            self._loop.running = None
            self._loop.clean_up()
        self._let_go()

    def _let_go(self) -> None:
        """End the run of this iterator. May be called repeatedly, also by the garbage collector.

        After the last batch the turn stays open, because a wrapper may still pass on batches that it held back.
        """
        if not self._maker.is_here:
            return
        run = self._run
        try:
            if run is not None:
                run.close()
                # Forgotten once closed: after an interrupt, the end of this iterator or its loop closes it.
                if self._loop.running is run:
                    self._loop.running = None
                self._within = self.within
                self._run = None
        finally:
            self._watchdog.stop()


def failed(error: BaseException) -> str:
    """Return the message for an iterator that is used again after ``error``."""
    return f"this iterator has already ended with an error ({type(error).__name__}: {error}); call iter() again"


def _add_cure(error: BaseException) -> None:
    """Add a note to an error that only reports a refusal of the system: which limits to raise, which options help."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        error.add_note(
            "The system allows no further thread. Raise the limit of threads (ulimit -u, or the container's limit of "
            "processes) or of address space (ulimit -v); num_threads=0 needs fewer threads"
        )
    elif isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
        error.add_note(
            "The system allows no further open file. Raise the limit (ulimit -n), or lower num_workers, "
            "prefetch_factor or the number of batches that are kept"
        )
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        error.add_note(
            "The system allows no further memory. Raise the limit (ulimit -v, or the container's memory), or lower "
            "memory_limit and num_workers; num_threads=0 needs less address space"
        )


def close_at_exit(this: weakref.ref[Any]) -> None:
    """Close an iterator that is open at interpreter exit, before modules that it needs are torn down."""
    batches = this()
    if batches is not None:
        batches.close()
