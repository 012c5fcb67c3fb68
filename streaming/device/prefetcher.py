"""Copy batches to the training device while the step before them runs: ``DevicePrefetcher``.

The way of one batch::

    loader ──pull──▶ source batch ──copy issued on a side stream──▶ device batch ──handed over──▶ consumer
                        │ held until the copy's event is done          │ consumer's stream waits for the event
                        ▼                                              ▼
                     let go (a ring slot goes home)                 freed by the consumer, reused after its stream

There is no thread. Copies are asynchronous, so all that the host has to do is to *issue* them, ``depth`` batches before
they are needed, and that happens whenever the consumer asks for a batch. A thread would help only where the loader is
late with a batch while an older one lies on the device already; but a loader that is late has nothing built ahead, and
then the loader limits the consumer, who meanwhile has ``depth`` steps of work queued on the device. What a thread
costs is certain: it takes the interpreter lock from the training loop, and makes every way of stopping harder.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from streaming.arguments import checks_names, is_whole
from streaming.device.account import Account, HeldBack, Noted
from streaming.device.copiers import Copied, Copier, CpuCopier, CudaCopier, Event
from streaming.engine.workers.ring import PageLocker
from streaming.epochs.iterator import Batches, Closable, close_at_exit, failed
from streaming.epochs.position import Turn
from streaming.epochs.watch import STALL_REPORT_S, Watchdog
from streaming.errors import ConfigError, IteratorEndedError
from streaming.forks import Maker

_END = object()


@dataclass(slots=True, kw_only=True)
class _Flight:
    """What one loop has under way. For one thread, but for ``close``, which any may call, again and again.

    While the one thread is busy here, others' ``close`` leaves the tidying to it: the loader, once closed, lets it go.

    Invariants: ``busy`` is the thread between ``advance`` and the end of ``hand_out``; at most ``depth + 1`` batches
    are in ``ahead``; every source whose copy may be under way is in ``held``, in the order of the copies; the host is
    at most ``depth`` steps ahead of the device, because otherwise memory that
    waits for the consumer's stream would pile up.
    """

    source: Iterator[Any]
    owns_source: bool
    copier: Copier
    depth: int
    account: Account
    watchdog: Watchdog
    stage: str = "hands out batches"
    ahead: deque[Copied] = field(default_factory=deque)
    held: deque[tuple[Event, Any]] = field(default_factory=deque)
    steps: deque[Event] = field(default_factory=deque)
    failure: Exception | None = None
    has_failed: bool = False
    num_handed_out: int = 0
    ended: bool = False
    closing: bool = False
    closed: bool = False
    busy: int | None = None
    maker: Maker = field(default_factory=lambda: Maker("this iteration over a DevicePrefetcher", "Begin one here"))

    def advance(self) -> bool:
        """Tell whether there is a next batch; if so, ``depth`` batches behind it are under way, too.

        Raises:
            Exception: What the loader or a copy raised, once the batches before it are handed out.
            ForkedError: In a forked child, at once.
        """
        self.maker.check()
        self.busy = threading.get_ident()  # first this, then a look at closing: close does it the other way
        ready = False
        try:
            ready = not self.closing and self._advance() and not self.closing
            return ready
        finally:
            if not ready:
                self.busy = None

    def _advance(self) -> bool:
        self._pace()
        while self.held and self.held[0][0].query():
            self.held.popleft()
        while len(self.ahead) <= self.depth and not self.ended:
            self._pull()
        if not self.ahead and self.failure is not None:
            failure, self.failure = self.failure, None
            try:
                raise failure
            finally:
                del failure  # or its traceback would refer to itself
        return bool(self.ahead)

    def hand_out(self) -> Any:
        """Return the next batch, of which ``advance`` told; the current stream waits for it.

        Raises:
            IteratorEndedError: The loader was moved or closed meanwhile.
        """
        try:
            copied = self.ahead[0]
            self.copier.hand_over(copied)
            self.account.handed_out()
            self.ahead.popleft()
            self.num_handed_out += 1
        finally:
            self.busy = None
        return copied.batch

    @property
    def is_over(self) -> bool:
        """The last batch is handed out. While one is, the source has been asked for a further one."""
        return self.ended and not self.ahead and not self.has_failed

    def close(self) -> None:
        """Wait for the copies under way, then let go of their memory and stop the source. May be called again.

        In a forked child nothing happens: device, copies and source are the parent's.
        """
        if not self.maker.is_here:
            self.closed = self.ended = True
            return
        self.closing = True
        if self.closed or self.busy not in (None, threading.get_ident()):
            return
        self.closed = self.ended = True
        try:
            while self.held:
                self._await(self.held[0][0], "waits for copies under way, to end")
                self.held.popleft()
            self.ahead.clear()
        finally:
            source, self.source = self.source, iter(())
            self.failure = None
            self.steps.clear()
            self.watchdog.stop()
            if self.owns_source and hasattr(source, "close"):
                source.close()

    def _pace(self) -> None:
        """Keep the host at most ``depth`` steps ahead of the device."""
        if self.num_handed_out:
            self.steps.append(self.copier.mark())
        while len(self.steps) > self.depth:
            self._await(self.steps.popleft(), "waits for the device to come within depth steps")

    def _await(self, event: Event, stage: str) -> None:
        """Block until ``event`` is done; if that takes too long, there will be a report."""
        if event.query():
            return
        with self._in_stage(stage):
            self.watchdog.begin()
            try:
                self.copier.wait(event)
            finally:
                self.watchdog.end()

    @contextmanager
    def _in_stage(self, stage: str) -> Iterator[None]:
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def _pull(self) -> None:
        """Take one batch from the loader and start its copies."""
        try:
            with self._in_stage("waits for the loader"):
                batch = next(self.source, _END)
            if batch is _END:
                self.ended = True
                return
            self.account.pulled()
            with self._in_stage("starts the copies of a batch"):
                copied = self.copier.issue(batch)
        except Exception as error:  # noqa: BLE001  delivered at its place, after the batches before it
            self.ended, self.has_failed, self.failure = True, True, error
        else:
            self.held.append((copied.event, (batch, copied.staged)))
            self.ahead.append(replace(copied, staged=()))


@checks_names()
class DevicePrefetcher(Closable):
    """The loader's batches with every tensor on ``device``, in order, ``depth`` of them copied ahead.

    Tensors are found in dicts, lists, tuples and named tuples, nested as you like; everything else is passed on as it
    is. Containers that hold tensors are new ones; a batch belongs to whoever got it. On the CPU tensors are passed
    through, and all else is the same: batches pulled ahead, state, errors, ending.

    Memory on the device: ``depth + 2`` batches, and where the host runs ahead of the device up to ``2 * depth + 2``.
    Host memory is let go when its copy is done and the next batch is asked for; at most ``2 * depth + 1`` are held.

    The stream that is current when a batch is asked for may use it at once; another stream needs the usual care
    (``wait_stream``, ``record_stream``). To bound memory, the host waits until the device has come within ``depth``
    steps.

    While a loop is in progress a ``streaming.DataLoader`` is told which batches are held back here: its ``state_dict``
    and ``epoch`` answer for the batches handed out, as those of this object do. A loader of another kind is ahead; so
    ask *this* object, and tell it ``set_epoch``, ``seed`` and ``load_state_dict``; it passes on what is right. An error
    of the loader comes after the batches before it. However a loop ends, copies under way are waited for and the
    loader's iterator is closed. Epochs follow each other as with the loader itself, and one iterator at a time: a
    superseded one raises ``IteratorSupersededError``.

    For one thread; ``close`` may be called from any.

    Args:
        loader: A ``streaming.DataLoader``, or any iterable of batches. Methods that it lacks raise ``AttributeError``.
        device: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, a ``torch.device``; None: CUDA's current device where there is
            one, else the CPU.
        depth: Batches copied ahead of the one handed out, at least 1. With 1, one copy runs beside one step; 2 also
            covers steps and batches of uneven length.
        copier: How batches get there; default: what ``device`` needs.

    Raises:
        ConfigError: No such device, or ``depth`` is no positive integer.
    """

    def __init__(
        self, loader: Iterable[Any], device: str | int | torch.device | None = None, *,
        depth: int = 2, copier: Copier | None = None,
    ) -> None:  # fmt: skip
        if not is_whole(depth) or depth < 1:
            raise ConfigError(f"depth: expected an integer of at least 1 (batches copied ahead), got {depth!r}")
        if not isinstance(loader, Iterable):
            raise ConfigError(f"loader: expected a DataLoader or another iterable of batches, got {loader!r}")
        self.loader: Any = loader
        self.device = resolve_device(device)
        self.depth = depth
        self._copier: Copier = copier or (CudaCopier(self.device) if self.device.type == "cuda" else CpuCopier())
        self._flight: _Flight | None = None
        self._turn: Turn | None = None
        self._noted: Noted | None = None  # None: the loader's own position is the consumer's

    def __iter__(self) -> Iterator[Any]:
        """Make an iterator over the loader's batches; the one before is superseded, and lets go of all."""
        if self._turn is not None:
            self._turn.pass_on()
        self._stop()
        turn = self._turn = Turn()
        if hasattr(self.loader, "add_stage"):
            self.loader.add_stage(self.describe_stage)
        self._page_lock(self._copier.page_locker)
        source = iter(self.loader)
        self._noted = None if isinstance(source, Batches) else Noted(self.loader)
        flight = self._flight = _Flight(
            source=source, owns_source=source is not self.loader, copier=self._copier, depth=self.depth,
            account=self._noted or HeldBack(source), watchdog=self._watchdog(),
        )  # fmt: skip
        return _DeviceBatches(self, flight, turn)

    def __len__(self) -> int:
        """Return the batches of a whole epoch, as the loader says."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        noted = self._noted
        epoch: int = self.loader.epoch if noted is None or noted.epoch is None else noted.epoch
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, which ends a loop in progress; the one in progress goes on as it is."""
        if self._noted is not None and self._noted.epoch == epoch:
            return
        if self._noted is not None:
            self._move(f"set_epoch({epoch})")
        self.loader.set_epoch(epoch)
        source = None if self._flight is None else self._flight.source
        if isinstance(source, Batches) and source.has_ended:
            self._move(f"set_epoch({epoch})")

    def seed(self, seed: int) -> None:
        """Set another order, from the next epoch on that *you* start, though the loader may have ended this one."""
        self.loader.seed(seed)
        if self._noted is not None:
            self._noted.seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch handed out last, though ``depth`` further ones may have been pulled."""
        state: dict[str, Any]
        if self._noted is None or self._noted.state is None:
            state = self.loader.state_dict()
        else:
            state = copy.deepcopy(self._noted.state)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, of this object or of the loader; ends a loop in progress."""
        self._move("load_state_dict()")
        self.loader.load_state_dict(state)
        self._noted = None

    def remesh(self, dp_rank: int, dp_size: int, *, at: Mapping[str, Any] | int) -> None:
        """Let the loader go on in another world, as its own ``remesh`` does; batches held here come again."""
        self.loader.remesh(dp_rank, dp_size, at=at)
        self._move("remesh()")
        self._noted = None

    def metrics(self) -> dict[str, Any]:
        """Return the loader's metrics; its ``wait_s`` is what this object waited for the loader."""
        numbers: dict[str, Any] = self.loader.metrics()
        return numbers

    def describe(self) -> str:
        """Say what this object and the loader are at. From any thread."""
        describe = getattr(self.loader, "describe", None)
        if describe is None:
            return self.describe_stage()
        told: str = describe()
        return told if hasattr(self.loader, "add_stage") else f"{told}\n{self.describe_stage()}"

    def describe_stage(self) -> str:
        """Say what this object is at. From any thread."""
        flight = self._flight
        if flight is None:
            return f"prefetcher to {self.device}: not running"
        return (
            f"prefetcher to {self.device}: {flight.stage}; {len(flight.ahead)} batches ahead, {len(flight.held)} "
            f"copies not known to be done, {len(flight.steps)} steps given to the device and not known to be done"
        )

    def close(self) -> None:
        """Wait for copies under way, let go of all memory, close the loader."""
        if self._turn is not None:
            self._turn.close()
        try:
            self._stop()
        finally:
            if hasattr(self.loader, "close"):
                self.loader.close()

    def _page_lock(self, locker: PageLocker | None) -> None:
        if hasattr(self.loader, "page_lock"):
            self.loader.page_lock(locker)

    def _watchdog(self) -> Watchdog:
        after_s = getattr(self.loader, "stall_report_s", STALL_REPORT_S)
        this = weakref.ref(self)

        def describe() -> str:
            alive = this()
            return "" if alive is None else alive.describe()

        return Watchdog(after_s, f"{self.device} gets no further", describe)

    def _move(self, what: str) -> None:
        """End the loop in progress, because the method ``what`` takes the loader elsewhere."""
        if self._turn is not None and (self._turn.has_begun or self._noted is not None):
            self._turn.move(what)
            self._stop()
            self._noted = None

    def _stop(self) -> None:
        if self._flight is not None:
            self._end(self._flight)

    def _end(self, flight: _Flight) -> None:
        """Close ``flight``. If another's loader has begun the next epoch and the consumer has not, take it back."""
        is_over = flight.is_over
        try:
            flight.close()
        finally:
            if self._flight is flight and flight.closed:
                self._flight = None
                self._page_lock(None)
                if is_over:
                    self._noted = None
                epoch = None if self._noted is None else self._noted.epoch
                if epoch is not None and epoch != self.loader.epoch and hasattr(self.loader, "set_epoch"):
                    self.loader.set_epoch(epoch)


def resolve_device(device: str | int | torch.device | None) -> torch.device:
    """Return the CPU, or a CUDA device with its index.

    Raises:
        ConfigError: There is no such device, or it is of another kind.
    """
    has_cuda = torch.cuda.is_available()
    if device is None:
        device = "cuda" if has_cuda else "cpu"
    asked = f"cuda:{device}" if is_whole(device) else device
    found: torch.device | None = None
    with suppress(RuntimeError, TypeError):
        found = torch.device(asked)
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(f'device: expected "cuda", "cuda:N", "cpu" or None (CUDA if there is any), got {device!r}')
    if found.type == "cpu":
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError(
            f"device: {device!r} was asked for, but torch sees no CUDA device (a CPU build of torch, no driver, or "
            f'CUDA_VISIBLE_DEVICES hides it). Use device="cpu", or device=None: CUDA where there is one, else the CPU'
        )
    index, count = torch.cuda.current_device() if found.index is None else found.index, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device: {device!r} was asked for, but torch sees {count} CUDA devices (0 to {count - 1})")
    return torch.device("cuda", index)


class _DeviceBatches:
    """Iterate one flight. The rules are those of ``streaming.epochs.iterator.Batches``."""

    def __init__(self, prefetcher: DevicePrefetcher, flight: _Flight, turn: Turn) -> None:
        self._prefetcher, self._flight, self._turn = prefetcher, flight, turn
        self._failure: str | None = None
        self._is_over = False
        weakref.finalize(self, close_at_exit, weakref.ref(self))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch, on the device."""
        self._flight.maker.check()
        if self._is_over:
            self._end()
            raise StopIteration
        self._turn.check()
        if self._failure is not None:
            raise IteratorEndedError(self._failure)
        self._turn.has_begun = True
        try:
            if self._flight.advance():
                return self._hand_out()  # no name here: the consumer alone decides how long the batch lives
            self._turn.check()
            self._is_over = True
        except BaseException as error:
            self._failure = failed(error)
            self._end()
            if not isinstance(error, StopIteration):
                raise
            why = f"StopIteration was raised by what makes a batch, and must not pass for the end: {error}"
            raise RuntimeError(why) from error
        self._end()
        raise StopIteration

    def close(self) -> None:
        """End the iteration here. The loader goes on with the next epoch."""
        self._is_over = True
        self._end()

    def __del__(self) -> None:
        if hasattr(self, "_is_over"):
            self._end()

    def _hand_out(self) -> Any:
        batch = self._flight.hand_out()
        self._is_over = self._flight.is_over
        return batch

    def _end(self) -> None:
        self._turn.is_open = False
        self._prefetcher._end(self._flight)
