"""Track the position in a run: the rules of ``iter``, ``set_epoch`` and checkpoints, for all loops."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from streaming import errors
from streaming.common.arguments import checked_count, checked_seed
from streaming.errors import ConfigError, IteratorEndedError, IteratorSupersededError
from streaming.order.plan.state import LoaderState

_Item = TypeVar("_Item")
_OURS = str(Path(errors.__file__).resolve().parent)
_NOT_THE_USERS = (_OURS, "/torch/utils/data/")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place between two batches.

    Attributes:
        epoch: Epoch of the next batch.
        samples_seen: Number of samples of that epoch, over all ranks, before the place.
        detail: Additional data that the loop needs to continue from here. ``Position`` only stores it.
        is_end: The place follows the last batch of ``epoch``, and the end has not been left. ``samples_seen`` is then
            the number of all samples of the epoch, as far as the loop knows it.
        has_begun: At 0 samples: batches of the epoch are already in progress, in the previous order. A pending seed
            applies to the epoch after it.
        micro_batches: Micro-batches of the step at ``samples_seen`` that come before it; more of that step follow.
    """

    epoch: int
    samples_seen: int
    detail: Any = None
    is_end: bool = False
    has_begun: bool = False
    micro_batches: int = 0

    @classmethod
    def of(cls, state: LoaderState, detail: Any = None) -> Self:
        """Return the place of a state."""
        return cls(
            epoch=state.epoch, samples_seen=state.samples_seen, detail=detail, is_end=state.is_end,
            has_begun=state.has_begun,
        )  # fmt: skip

    @property
    def onward(self) -> Self:
        """The place of the next batch: the start of the next epoch if this is the end of one."""
        return replace(self, epoch=self.epoch + 1, samples_seen=0, is_end=False) if self.is_end else self

    def after_micro_batch(self) -> Self:
        """Return the place after one more micro-batch of the step, if others of the step follow."""
        has_begun = self.has_begun or not self.samples_seen
        return replace(self, micro_batches=self.micro_batches + 1, has_begun=has_begun)


class Turn:
    """The right of one iterator to deliver batches. It ends once and for all, from any thread.

    Attributes:
        has_begun: Its iterator has received a request for a batch.
        is_open: Its iterator has been neither closed nor dropped.
        is_over: Its iterator has delivered its last batch, or failed.
    """

    __slots__ = ("_error", "has_begun", "is_open", "is_over")

    def __init__(self) -> None:
        self.has_begun = False
        self.is_open = True
        self.is_over = False
        self._error: tuple[type[IteratorEndedError], str] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether ``check`` raises."""
        return self._error is not None

    @property
    def lasts(self) -> bool:
        """Whether its iterator has more batches, and may still be asked for them."""
        return self.is_open and not self.is_over and self._error is None

    def check(self) -> None:
        """Check that the turn lasts.

        Raises:
            IteratorEndedError: It has ended. The message gives the reason.
        """
        if self._error is not None:
            kind, why = self._error
            raise kind(why)

    def pass_on(self) -> None:
        """End the turn because another iterator is being made."""
        self._end(
            IteratorSupersededError,
            f"this iterator was superseded: another one was made by {calling_line()} before this one was exhausted. A "
            "loader has one iterator at a time: finish or drop one before making the next. For two loops side by side "
            "make two loaders; to look at a sample use dataset[i]",
        )

    def move(self, what: str) -> None:
        """End the turn because the method named ``what`` moves the loader."""
        self._end(
            IteratorSupersededError,
            f"this iterator was superseded: {what} was called by {calling_line()} before it was exhausted. Call iter() "
            "again afterwards",
        )

    def close(self) -> None:
        """End the turn because the loader is being closed."""
        self._end(
            IteratorEndedError,
            f"this iterator was ended: the loader was closed by {calling_line()}. Call iter() again to start the next "
            "epoch, or load_state_dict() first to resume where this one was",
        )

    def _end(self, kind: type[IteratorEndedError], why: str) -> None:
        if self._error is None:  # keep the first reason
            self._error = (kind, why)


class Lasting(Iterator[_Item]):
    """Iterate over a generator with persistent errors: once its turn has ended, every ``next`` raises the error again.

    (A generator that has raised would look exhausted.)
    """

    def __init__(self, items: Generator[_Item, None, None]) -> None:
        self._items = items
        self._error: IteratorEndedError | None = None

    def __next__(self) -> _Item:
        """Return the next item."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        try:
            return next(self._items)
        except IteratorEndedError as error:
            self._error = type(error)(*error.args)
            raise

    def close(self) -> None:
        """End the iteration and release what it holds, like a generator's ``close``."""
        self._items.close()


class Position:
    """Track where the next iteration begins, and what a checkpoint holds. Independent of datasets.

    The rules; *received* means: delivered, and not held back by a wrapper (``hold_back``). Where batches are cut, a
    batch is a micro-batch.

    1. ``place`` is the place after the last batch received: the next batch comes from there. Checkpoints store it.
    2. A place is *due* if it was set by construction, ``set_epoch``, ``load`` or leaving the end of an epoch, and no
      batch has been received since. ``begin`` starts at a place that is due; from any other it advances to the next
      epoch and leaves the rest of the current one unread. An iterator that has received no request for a batch, or has
      delivered none, changes nothing.
    3. After the last batch of an epoch, ``place`` is its *end*, as long as the iterator that delivered it can still be
      asked for more. Once that iterator is asked again, closed, dropped or superseded, the end is left: ``place`` is
      then (next epoch, 0), and due. A loaded end is left by the first iterator that is asked for a batch: it has none.
    4. ``set_epoch(e)``: if ``place`` is due in epoch e, nothing changes, so that a loaded place survives trainers that
      call ``set_epoch`` first. If epoch e is in progress, or at its end, the next ``begin`` restarts it at 0, and an
      open iterator continues undisturbed. From the end of epoch e - 1 it leaves that end, as an iterator would. From
      any other epoch it goes to (e, 0).
    5. ``set_seed`` takes effect at the next ``begin`` at 0 samples. If batches of an epoch are held back and none has
      been received, the epoch keeps its order, even if it is begun again, here or from a checkpoint
      (``Place.has_begun``).
    6. There is one turn at a time: ``open`` ends the previous one. ``set_epoch`` and ``load`` end the current turn if
      they move the place; an iterator that has not begun yet begins at the new place.
    7. Leaving the rest of an epoch that was loaded in its middle logs one WARNING.
    8. An epoch without an end (``is_endless``) is never left: ``begin`` continues after the last batch received, and
      ``set_epoch``, which trainers call with numbers of their own, has no effect.

    For one thread, except ``close``, which any thread may call.

    Attributes:
        next_seed: Seed that applies from the next ``begin`` at 0 samples; None: no change.
        is_endless: The current epoch has no end.
        was_seeded: A seed has been applied since construction, so the order is no longer the original one.
    """

    _start: Place
    _places: deque[Place]
    _is_loaded: bool
    _num_handed_out: int
    _num_held: int
    _starts_again: bool

    def __init__(self) -> None:
        self.next_seed: int | None = None
        self.is_endless = False
        self.was_seeded = False
        self._turn: Turn | None = None
        self._go_to(Place(epoch=0, samples_seen=0), is_loaded=False)

    @property
    def place(self) -> Place:
        """The place after the last batch received."""
        place = self._places[-1 - self._num_held]
        return place.onward if self._is_at_end and self._is_dropped and not self._starts_again else place

    @property
    def handed_out(self) -> Place:
        """The place after the last delivered batch, whether training has received it or a wrapper holds it back."""
        return self._places[-1]

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self.place.epoch

    @property
    def samples_seen(self) -> int:
        """Samples of that epoch, over all ranks, that have been received."""
        return self.place.samples_seen

    @property
    def is_due(self) -> bool:
        """Whether the next iteration begins at ``place`` rather than with the epoch after it."""
        return self._num_received == 0 or self.place.epoch != self._start.epoch

    @property
    def upcoming(self) -> Place:
        """The place at which the next iteration begins. At a loaded end it has no batch."""
        place = self.place
        if self.is_due or self.is_endless:
            return place
        if self._starts_again:
            return self._beginning()
        after = replace(place, epoch=place.epoch + 1, samples_seen=0, is_end=False)
        return replace(after, micro_batches=0, has_begun=False) if place.micro_batches else after

    @property
    def has_first_batch_out(self) -> bool:
        """Whether the current iterator has delivered one batch, and is neither closed nor dropped."""
        return self._num_handed_out == 1 and self._turn is not None and self._turn.is_open and self._turn.has_begun

    @property
    def is_iterated(self) -> bool:
        """Whether there is an iterator that has more batches."""
        return self._turn is not None and self._turn.lasts

    def open(self) -> Turn:
        """Return a turn for a new iterator, and end the previous one."""
        if self._turn is not None:
            self._turn.pass_on()
        if not self._starts_again:
            self.leave_end()
        self._turn = Turn()
        return self._turn

    def leave_end(self) -> None:
        """Go to the start of the next epoch, from an end that an iterator has reached; anywhere else, do nothing."""
        if self._is_at_end:
            self._go_to(self._places[-1].onward, is_loaded=False)

    def asked_for_more(self, turn: Turn) -> None:
        """Record that the iterator of ``turn`` was asked for more than its last batch.

        A wrapper that still holds batches back has asked on its own behalf: the end is left when it drops the iterator.
        """
        if turn is self._turn:
            self.leave_end()

    def begin(self, turn: Turn) -> tuple[Place, int | None]:
        """Enter the epoch, or the rest of it, for ``turn``.

        Returns:
            The place to begin at, and the seed of the order from here on (None: no change). An epoch that begins
            because the previous one was left has the ``detail`` of the place where that was left; with another seed it
            has none. At a loaded end there is no batch to begin with: call ``finish``.

        Raises:
            IteratorEndedError: The turn has ended.
        """
        turn.check()
        turn.has_begun = True
        if not (self.is_due or self.is_endless or self._starts_again):
            self._warn_of_the_rest("a new iteration begins with the next epoch")
        self._go_to(self.upcoming, is_loaded=self.is_due and self._is_loaded and self._num_received == 0)
        seed = None
        if self.next_seed is not None and self._start.samples_seen == 0 and not self._start.has_begun:
            seed, self.next_seed, self.was_seeded = self.next_seed, None, True
            # The detail belongs to the previous order: a checkpoint, or another begin, must not find it here.
            self._go_to(replace(self._start, detail=None), is_loaded=False)
        return self._start, seed

    def advance(self, place: Place) -> None:
        """Record that a batch was delivered and that ``place`` follows it; after the last batch, the epoch's end."""
        self._num_handed_out += 1
        self._starts_again = False
        self._places.append(place)  # this call comes first: an interrupt comes before all changes, or after them
        while len(self._places) > self._num_held + 2:  # may be held back: these, and the one delivered now
            self._places.popleft()

    def hold_back(self, change: int) -> None:
        """Add ``change`` to the number of batches that were delivered but not received by training.

        For wrappers that read ahead: 1 immediately after each batch that they keep, -1 when they pass one on, oldest
        first. ``place`` and everything derived from it then describe what training has received. Batches still held
        back when the next iteration begins, or when the place is set, count as never received.

        Raises:
            ConfigError: The number held back would exceed the number delivered, or be negative.
        """
        held = self._num_held + change
        if not 0 <= held < len(self._places):
            raise ConfigError(
                f"hold_back: cannot hold back {held} of {self._num_handed_out} batches handed out; call it with 1 "
                "right after each batch that is kept, and with -1 when one is passed on"
            )
        self._num_held = held

    def finish(self) -> None:
        """Record that the current epoch has turned out to have no further batch."""
        place = self.place
        after = place.onward if place.is_end else Place(epoch=place.epoch + 1, samples_seen=0)
        self._go_to(after, is_loaded=False)

    def set_epoch(self, epoch: int) -> bool:
        """Go to the start of ``epoch``, by rule 4.

        Returns:
            Whether this ends the current turn.

        Raises:
            ConfigError: ``epoch`` is not a valid epoch number.
        """
        checked_count("epoch", epoch)
        if self.is_endless:
            return False
        place = self.place
        if place.is_end and epoch == place.onward.epoch:
            self._go_to(place.onward, is_loaded=False)
            return False
        if epoch != place.epoch:
            self._warn_of_the_rest(f"set_epoch({epoch}) was called")
            return self._move(Place(epoch=epoch, samples_seen=0), f"set_epoch({epoch})")
        if not self.is_due:
            if self._turn is not None and self._turn.is_open:
                self._starts_again = True
            else:
                self._go_to(self._beginning(), is_loaded=False)
        return False

    def set_seed(self, seed: int) -> None:
        """Change the order, from the next ``begin`` at 0 samples.

        Raises:
            ConfigError: ``seed`` is not a valid seed.
        """
        self.next_seed = checked_seed("seed", seed)
        place, turn = self._places[-1 - self._num_held], self._turn
        is_held = self._num_handed_out > 0 and self._num_received == 0 and turn is not None and turn.is_open
        has_begun = (is_held or place.micro_batches > 0) and place.samples_seen == 0
        self._places[-1 - self._num_held] = replace(place, has_begun=has_begun)

    def load(self, place: Place, next_seed: int | None, what: str = "load_state_dict()") -> bool:
        """Load a place and seed on behalf of the method ``what``. Return whether this ends the current turn."""
        ends = self._move(place, what)
        self._is_loaded = (place.samples_seen > 0 or place.micro_batches > 0) and not place.is_end
        self.next_seed = next_seed
        return ends

    def close(self) -> None:
        """End the current turn because the loader is closed; keep the place. May be called from any thread."""
        if self._turn is not None:
            self._turn.close()

    @property
    def _num_received(self) -> int:
        return self._num_handed_out - self._num_held

    @property
    def _is_at_end(self) -> bool:
        """Whether the last batch received was the last one of its epoch, and that end has not been left."""
        return self._num_received > 0 and self._num_held == 0 and self._places[-1].is_end

    @property
    def _is_dropped(self) -> bool:
        return self._turn is not None and not self._turn.is_open

    def _beginning(self) -> Place:
        """Return the start of the current epoch. If the epoch was loaded in its middle, the detail is unknown."""
        start = self._start
        return Place(epoch=start.epoch, samples_seen=0, detail=None if start.samples_seen else start.detail)

    def _move(self, place: Place, what: str) -> bool:
        self._go_to(place, is_loaded=False)
        if self._turn is None or not self._turn.has_begun:
            return False
        self._turn.move(what)
        return True

    def _go_to(self, place: Place, *, is_loaded: bool) -> None:
        self._start = place
        self._is_loaded = is_loaded
        # Invariant: the last place follows the last delivered batch, the one before it follows the batch before, and
        # so on.
        self._places = deque([place])
        self._num_handed_out = 0
        self._num_held = 0
        self._starts_again = False

    def _warn_of_the_rest(self, why: str) -> None:
        place = self.place
        if self._is_loaded and place.epoch == self._start.epoch:
            _log.warning(
                "epoch %d, resumed at sample %d, is abandoned at sample %d: %s (by %s). The rest of it is not read",
                place.epoch, self._start.samples_seen, place.samples_seen, why, calling_line(),
            )  # fmt: skip


def calling_line() -> str:
    """Return the line of the user's program, or of a trainer, that is being executed."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _NOT_THE_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
