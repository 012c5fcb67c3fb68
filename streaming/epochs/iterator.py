"""Iterate a loop: what all kinds of loops share, and the iterator that they hand to the user."""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, Self

from streaming.epochs.interrupts import is_interrupt
from streaming.epochs.position import Place, Position
from streaming.epochs.watch import Watchdog
from streaming.errors import IteratorEndedError
from streaming.forks import Maker
from streaming.metrics import Metrics
from streaming.plan.settings import Shape


class Run(Protocol):
    """The batches of the rest of one epoch, being produced in the background."""

    def __next__(self) -> Any:
        """Return the next batch."""

    def close(self) -> None:
        """Stop producing."""

    def describe(self) -> str:
        """Say what it is at, for people."""


class RunOver:
    """Stand over another run, which it closes and describes; what it makes of the batches says the class below it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def close(self) -> None:
        """Stop producing."""
        self._run.close()

    def describe(self) -> str:
        """Say what it is at, for people."""
        return self._run.describe()


class Closable(ABC):
    """Close at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and processes, free memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Loop(ABC):
    """Epochs one after the other, by the rules of ``Position``. For one thread, but for ``close`` and ``describe``.

    Args:
        shape: Of the batches.
        position: One that somebody else knows as well; default: an own one.

    Attributes:
        shape: Of the batches.
        position: Where the loop stands.
        metrics: Where everything is counted.
        running: What produces batches at this moment, if anything does.
        announce: Told of the place at which an iteration begins.
    """

    is_counted = True
    """``batches_left`` is known before the epoch's end is met."""

    def __init__(self, shape: Shape, position: Position | None = None) -> None:
        self.position = Position() if position is None else position
        self.metrics = Metrics()
        self.shape = shape
        self.running: Run | None = None
        self.announce: Callable[[Loop, Place], None] | None = None
        self._watchdog: Watchdog | None = None

    @abstractmethod
    def start(self, place: Place, seed: int | None) -> Run:
        """Begin to produce the batches of the epoch from ``place`` on.

        Args:
            place: Where ``Position.begin`` begins.
            seed: A new seed for the order; None: as before.
        """

    @abstractmethod
    def batches_left(self, samples_seen: int) -> int:
        """Count the batches of an epoch that come after its first ``samples_seen`` samples."""

    def left_behind(self, place: Place) -> int:
        """Count the batches of its epoch that come behind a place."""
        return self.batches_left(place.samples_seen)

    def after_batch(self, place: Place, run: Any) -> Place:  # noqa: ARG002  for loops whose runs know more
        """Return the place behind the batch that ``run`` has just given, which comes after ``place``."""
        seen = place.samples_seen + self.shape.global_batch_size
        if self.batches_left(seen):
            return Place(epoch=place.epoch, samples_seen=seen)
        return Place(epoch=place.epoch + 1, samples_seen=0)

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self.position.epoch

    @property
    def num_batches(self) -> int:
        """Batches of a whole epoch."""
        return self.batches_left(0)

    def run(self, watchdog: Watchdog | None = None) -> Batches:
        """Make an iterator over the epoch due, or the rest of it; the one before is superseded and lets go of all."""
        batches = Batches(self, watchdog or Watchdog(None, "no batch", self.describe))
        self._watchdog = watchdog
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; where it is the one due, a loaded place is kept."""
        if self.position.set_epoch(epoch):
            self.stop()

    def set_seed(self, seed: int) -> None:
        """Take a new order from the next epoch that starts."""
        self.position.set_seed(seed)

    def go_to(self, place: Place, next_seed: int | None, what: str = "load_state_dict()") -> None:
        """Go on from a checkpoint; one behind the last batch of an epoch, of an older release, is the next epoch's."""
        if self.is_counted and not self.left_behind(place):
            place = Place(epoch=place.epoch + 1, samples_seen=0, detail=place.detail)
        if self.position.load(place, next_seed, what):
            self.stop()

    def describe(self) -> str:
        """Say what the loop waits for at this moment."""
        running = self.running
        return "not running" if running is None else running.describe()

    def close(self) -> None:
        """Stop threads and processes, free memory. The loop may be used again; it starts them anew."""
        self.position.close()
        self.stop()

    def stop(self) -> None:
        """End the run in progress, and the watch over it."""
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
        """Give up what an interrupt may have caught in the middle of its book-keeping."""


class Batches:
    """Iterate the rest of one epoch. After its last batch it raises ``StopIteration``, always again.

    For one thread at a time of the process that made it: where several ask, each batch goes to one of them.

    It begins when the first batch is asked for: until then ``set_epoch`` and ``load_state_dict`` say where. When it is
    dropped or closed, its threads end and its memory goes back. One that the interpreter's end finds is closed before
    that ends threads wherever they are, with the locks that they hold.

    Raises:
        IteratorSupersededError: From ``next``, always again: another iterator of this loader, ``set_epoch``,
            ``load_state_dict`` or ``remesh`` took its place; the message names the line.
        IteratorEndedError: The same after the loader's ``close``, or after another error.
        ForkedError: In a forked child: the threads and processes that build batches are the parent's.
    """

    def __init__(self, loop: Loop, watchdog: Watchdog) -> None:
        self._maker = Maker("this iteration over a loader", "Begin one here: iter(loader) works in a forked child, too")
        self._loop = loop
        self._watchdog = watchdog
        self._place: Place | None = None  # behind the batch handed out last; None: not begun
        self._run: Run | None = None
        self._is_over = False
        self._failure: str | None = None
        self._asked = threading.RLock()
        self._turn = loop.position.open()
        loop.stop()
        weakref.finalize(self, close_at_exit, weakref.ref(self))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch; the position moves on before it is handed out."""
        self._maker.check()
        with self._asked:  # held until the position is behind the batch: no two threads begin, or take the same one
            return self._answer()

    def _answer(self) -> Any:
        if self._is_over:
            self._let_go()
            raise StopIteration
        if self._turn.has_ended:
            self._let_go()
            self._turn.check()
        if self._failure is not None:
            raise IteratorEndedError(self._failure)
        begun_s = time.thread_time()
        self._watchdog.begin()
        try:
            return self._next()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._watchdog.end()
            self._loop.metrics.add("consumer_thread_s", time.thread_time() - begun_s)

    def hold_back(self, change: int) -> None:
        """Count batches that training has not received: for a wrapper that reads ahead.

        It tells of each batch that it keeps and of each that it passes on, oldest first, so that the loader's
        ``state_dict`` answers for what the training has received::

            batches = iter(loader)
            kept = next(batches)
            batches.hold_back(1)
            ...
            batches.hold_back(-1)
            return kept

        Raises:
            IteratorEndedError: The loader was moved or closed meanwhile, so that batches kept are not to be passed on.
        """
        self._turn.check()
        self._loop.position.hold_back(change)

    @property
    def has_ended(self) -> bool:
        """It was superseded, or its loader was closed."""
        return self._turn.has_ended

    def close(self) -> None:
        """End the iteration here. The loader goes on with the next epoch. In a forked child nothing happens."""
        self._is_over = True
        self._turn.is_open = False
        self._let_go()

    def __del__(self) -> None:
        if hasattr(self, "_turn"):
            self._turn.is_open = False
            self._let_go()

    def _next(self) -> Any:
        place, run = self._place, self._run
        if place is None or run is None:
            place, run = self._begin()
        batch = self._taken(run)
        after = self._place = self._loop.after_batch(place, run)
        self._is_over = after.epoch != place.epoch
        self._loop.position.advance(after)
        self._loop.metrics.add("batches")
        return batch

    def _begin(self) -> tuple[Place, Run]:
        place, seed = self._loop.position.begin(self._turn)
        run = self._run = self._loop.running = self._loop.start(place, seed)
        self._place = place
        if self._loop.announce is not None:
            self._loop.announce(self._loop, place)
        return place, run

    def _taken(self, run: Run) -> Any:
        try:
            batch = next(run)
        except StopIteration:
            self._turn.check()
            if self._loop.is_counted:
                raise IteratorEndedError(f"an epoch ended before its last batch; {run.describe()}") from None
            self._is_over = True
            self._loop.position.finish()
            raise
        self._turn.check()  # another thread may have closed the loader while this one waited
        return batch

    def _fail(self, error: BaseException) -> None:
        self._failure = failed(error)  # of no account where the iterator is over
        if not isinstance(error, StopIteration) and is_interrupt(error) and not self._turn.has_ended:
            self._loop.running = None
            self._loop.clean_up()
        self._let_go()

    def _let_go(self) -> None:
        """End what runs for this iterator. May be called again, and from the collector.

        The turn stays open behind the last batch, for a wrapper may hold some back that it is still passing on.
        """
        if not self._maker.is_here:
            return
        run, self._run = self._run, None
        try:
            if run is not None:
                if self._loop.running is run:
                    self._loop.running = None
                run.close()
        finally:
            self._watchdog.stop()


def failed(error: BaseException) -> str:
    """Say what an iterator says that is asked again after ``error``."""
    return f"this iterator ended with an error before ({type(error).__name__}: {error}); call iter() again"


def close_at_exit(this: weakref.ref[Any]) -> None:
    """Close an iterator that the interpreter's end finds: later, modules that it needs are gone."""
    batches = this()
    if batches is not None:
        batches.close()
