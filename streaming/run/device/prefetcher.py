"""Copy batches to the training device while the previous step runs: ``DevicePrefetcher``.

The life of a batch::

    loader ──pull──▶ source batch ──copy issued on a side stream──▶ device batch ──handed over──▶ consumer
                        │ held until the copy's event is done          │ consumer's stream waits for the event
                        ▼                                              ▼
                     released (its ring slot is reused)             freed by the consumer, reused after its stream

- There is no thread. Copies are asynchronous: the host only has to *issue* them ``depth`` batches before they are
  needed, and it does so whenever the consumer requests a batch.
- A thread would help only if the loader were late with a batch while an older one was already on the device. But a late
  loader has nothing built ahead; it is then the bottleneck, and meanwhile the consumer has ``depth`` steps of work
  queued on the device.
- The costs of a thread are certain: it competes with the training loop for the GIL, and complicates shutdown.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from streaming.common.arguments import checks_names, is_whole
from streaming.common.counters import Observation
from streaming.common.forks import Maker
from streaming.errors import ConfigError, IteratorEndedError
from streaming.run.device.account import BatchAccount, HeldBack, Noted
from streaming.run.device.copiers import Copied, Copier, CpuCopier, CudaCopier, Event
from streaming.run.engine.workers.ring import PageLocker
from streaming.run.epochs.iterator import NO_STEPS, Batches, Closable, close_at_exit, failed
from streaming.run.epochs.micro_batches import TrainingSteps, Within
from streaming.run.epochs.position import Turn
from streaming.run.epochs.watch import STALL_REPORT_S, Watchdog
from streaming.types import BatchT

_END = object()
_Answer = TypeVar("_Answer")


class _Held(NamedTuple):
    """A source that is kept until its copy is done, and the start time of the copy."""

    event: Event
    source: Any
    begun_s: float


@dataclass(slots=True, kw_only=True)
class _Flight:
    """State of one iteration. For one thread, except ``close``, which any thread may call at any time, repeatedly.

    While that thread is inside, ``close`` from another thread leaves the clean-up to it; closing the loader wakes it.

    Invariants: ``busy`` is the id of the thread between ``advance`` and the end of ``hand_out``; ``ahead`` holds at
    most ``depth + 1`` batches, and ``within`` the place of each in its step; ``held`` holds every source whose copy may
    be in progress, in the order of the copies; the host is at most ``depth`` steps ahead of the device, since otherwise
    memory that waits for the consumer's stream would pile up.
    """

    source: Iterator[Any]
    owns_source: bool
    copier: Copier
    depth: int
    account: BatchAccount
    watchdog: Watchdog
    where: str
    done_s: float = 0.0
    stage: str = "hands out batches"
    ahead: deque[Copied] = field(default_factory=deque)
    held: deque[_Held] = field(default_factory=deque)
    within: deque[Within | None] = field(default_factory=deque)
    steps: deque[Event] = field(default_factory=deque)
    failure: Exception | None = None
    has_failed: bool = False
    num_handed_out: int = 0
    has_looked: bool = False
    ended: bool = False
    closing: bool = False
    closed: bool = False
    busy: int | None = None
    maker: Maker = field(default_factory=lambda: Maker("this iteration over a DevicePrefetcher", "Begin one here"))

    def advance(self) -> bool:
        """Return whether there is a next batch. If so, copies of the ``depth`` batches after it have been issued.

        Raises:
            Exception: An error of the loader or of a copy, once the batches before it have been delivered.
            ForkedError: The process is a forked child.
        """
        self.maker.check()
        self.busy = threading.get_ident()  # set before closing is read; close() sets closing before it reads busy
        ready = False
        try:
            ready = not self.closing and self._advance() and not self.closing
            return ready
        finally:
            if not ready:
                self.busy = None

    def _advance(self) -> bool:
        if not self.has_looked:  # the device has nothing more to do since then
            self._pace()
        while self.held and self.held[0].event.query():
            self._let_go()
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
        """Return the batch that ``advance`` announced. The current stream waits for its copy.

        Raises:
            IteratorEndedError: The loader was moved or closed in the meantime.
        """
        try:
            copied = self.ahead[0]
            self.copier.hand_over(copied)
            self.account.handed_out()
            self.ahead.popleft()
            self.within.popleft()
            self.has_looked = False
            self.num_handed_out += 1
        finally:
            self.busy = None
        return copied.batch

    def look(self) -> Within | None:
        """Return the place in its step of the batch that ``advance`` announced."""
        self.has_looked, self.busy = True, None
        return self.within[0]

    @property
    def is_over(self) -> bool:
        """Whether the last batch has been delivered.

        This is known because one more batch was requested from the source before that.
        """
        return self.ended and not self.ahead and not self.has_failed

    def close(self) -> None:
        """Wait for the copies in progress, then release their memory and stop the source. May be called repeatedly.

        Does nothing in a forked child: device, copies and source belong to the parent.
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
                self._await(self.held[0].event, "waits for copies under way, to end")
                self._let_go()
            self.ahead.clear()
            self.within.clear()
        finally:
            source, self.source = self.source, iter(())
            self.failure = None
            self.steps.clear()
            self.watchdog.stop()
            if self.owns_source and hasattr(source, "close"):
                source.close()

    def _let_go(self) -> None:
        """Release the oldest source, whose copy is done."""
        held = self.held.popleft()
        begun_s, self.done_s = max(held.begun_s, self.done_s), time.perf_counter()  # copies run one after another
        self.account.metrics.observer.seen(self.where, "copies", begun_s, self.done_s, dict)

    def _pace(self) -> None:
        """Keep the host at most ``depth`` steps ahead of the device."""
        if self.num_handed_out:
            self.steps.append(self.copier.mark())
        while len(self.steps) > self.depth:
            self._await(self.steps.popleft(), "waits for the device to come within depth steps")

    def _await(self, event: Event, stage: str) -> None:
        """Block until ``event`` is done. A watchdog reports if that takes too long."""
        if event.query():
            return
        with self._in_stage(stage), self.account.metrics.timed("wait_for_device_s"):
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
        before, self.stage = self.stage, "waits for the loader"
        try:
            batch = next(self.source, _END)
            if batch is _END:
                self.ended = True
                return
            self.account.pulled()
            self.stage = "starts the copies of a batch"
            with self.account.metrics.timed("copy_s"):
                copied = self.copier.issue(batch)
        except Exception as error:  # noqa: BLE001  raised when it is due, after the batches before it
            self.ended, self.has_failed, self.failure = True, True, error
        else:
            self.held.append(_Held(copied.event, (batch, copied.staged), time.perf_counter()))
            self.within.append(getattr(self.source, "within", None))
            self.ahead.append(replace(copied, staged=()))
        finally:
            self.stage = before


@checks_names()
class DevicePrefetcher(Closable, Generic[BatchT]):
    """Yield the loader's batches with every tensor on ``device``, in order, with ``depth`` batches copied ahead.

    ::

        for batch in DevicePrefetcher(loader, device="cuda"):
            loss = model(batch["jpg"])

    Tensors are found in arbitrarily nested dicts, lists, tuples and named tuples; everything else is passed through.
    Containers that hold tensors are copied. A batch belongs to the caller that received it. On the CPU, tensors are
    passed through too, and everything else behaves the same: batches pulled ahead, state, errors, shutdown.

    Device memory: ``depth + 2`` batches, or up to ``2 * depth + 2`` if the host runs ahead of the device. Host memory
    of a batch is released when its copy is done and the next batch is requested; at most ``2 * depth + 1`` batches are
    held.

    The stream that is current when a batch is requested may use the batch immediately; another stream needs the usual
    synchronization (``wait_stream``, ``record_stream``). To bound memory, the host waits until the device is at most
    ``depth`` steps behind.

    A ``streaming.DataLoader`` knows which batches are held back here, so its ``state_dict`` and ``epoch`` refer to the
    delivered batches, and so do those of this object. Any other loader runs ahead: call ``state_dict``, ``set_epoch``,
    ``seed`` and ``load_state_dict`` on *this* object, which forwards the right values. An error of the loader is raised
    after the batches before it. At the end of an iteration, whatever its cause, copies in progress are completed and
    the loader's iterator is closed. Epochs follow each other as with the loader itself. Only one iterator is active at
    a time: a superseded one raises ``IteratorSupersededError``.

    Use it from one thread; ``close`` may be called from any.

    Args:
        loader: A ``streaming.DataLoader``, or any iterable of batches. Methods that it lacks raise ``AttributeError``.
        device: ``"cuda"``, ``"cuda:1"``, ``"cpu"`` or a ``torch.device``; None: the current CUDA device, or the CPU if
            there is none.
        depth: Number of batches copied ahead of the delivered one, at least 1. With 1, one copy overlaps one step; 2
            also absorbs steps and batches of uneven length.
        copier: Copies batches; default: the copier for ``device``.

    Raises:
        ConfigError: There is no such device, or ``depth`` is not a positive integer.
    """

    def __init__(
        self, loader: Iterable[BatchT], device: str | int | torch.device | None = None, *,
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
        self._noted: Noted | None = None  # None: the loader's position is the consumer's position

    def __iter__(self) -> Iterator[BatchT]:
        """Return an iterator over the loader's batches. The previous iterator is superseded and releases everything."""
        return self._iterated(with_state=False)

    def with_state(self) -> Iterator[tuple[BatchT, dict[str, Any]]]:
        """Return an iterator, like ``iter``, that yields each batch with the state that continues after it.

        See ``DataLoader.with_state``. The states do not include the batches that this object copies ahead.
        """
        return self._iterated(with_state=True)

    def steps(self) -> TrainingSteps[BatchT]:
        """Return the loader's steps, each an iterator over its micro-batches on the device; see ``DataLoader.steps``.

        Raises:
            ConfigError: The loader's batches are not cut into micro-batches.
        """
        return TrainingSteps(self._begin_steps, lambda: len(self.loader.steps()))

    def _begin_steps(self) -> _DeviceBatches[BatchT]:
        if getattr(self.loader, "micro_batch_size", None) is None:
            raise ConfigError(NO_STEPS)
        return self._iterated(with_state=False)

    def _iterated(self, *, with_state: bool) -> _DeviceBatches[Any]:
        if self._turn is not None:
            self._turn.pass_on()
        self._stop()
        turn = self._turn = Turn()
        if hasattr(self.loader, "add_stage"):
            self.loader.add_stage(self.describe_stage)
        self._page_lock(self._copier.page_locker)
        source = iter(self.loader)
        if source is self.loader and isinstance(source, Batches) and source.is_over:
            raise ConfigError(
                "DevicePrefetcher: got an iterator of a loader, which lasts one epoch, and that is over. Give the "
                "loader, and for states beside the batches iterate prefetcher.with_state()"
            )
        self._noted = None if isinstance(source, Batches) else Noted(self.loader)
        flight = self._flight = _Flight(
            source=source, owns_source=source is not self.loader, copier=self._copier, depth=self.depth,
            account=self._noted or HeldBack(source), watchdog=self._watchdog(),
            where=f"copies to {self.device}",
        )  # fmt: skip
        return _DeviceBatches(self, flight, turn, with_state=with_state)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, as given by the loader."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        noted = self._noted
        epoch: int = self.loader.epoch if noted is None or noted.epoch is None else noted.epoch
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch`` and end the current iteration, unless ``epoch`` is the one in progress."""
        if self._noted is not None and self._noted.epoch == epoch:
            return
        if self._noted is not None:
            self._move(f"set_epoch({epoch})")
        self.loader.set_epoch(epoch)
        source = None if self._flight is None else self._flight.source
        if isinstance(source, Batches) and source.has_ended:
            self._move(f"set_epoch({epoch})")

    def seed(self, seed: int) -> None:
        """Shuffle with a new seed from the consumer's next epoch on, even if the loader has finished this one."""
        self.loader.seed(seed)
        if self._noted is not None:
            self._noted.seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, even if more have been pulled from the loader.

        A program that reads ahead of this object needs ``with_state``.
        """
        state: dict[str, Any]
        if self._noted is None or self._noted.state is None:
            state = self.loader.state_dict()
        else:
            state = copy.deepcopy(self._noted.state)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, of this object or of the loader. This ends the current iteration."""
        self._move("load_state_dict()")
        self.loader.load_state_dict(state)
        self._noted = None

    def remesh(self, dp_rank: int, dp_size: int, *, at: Mapping[str, Any] | int) -> None:
        """Continue in another world, like the loader's ``remesh``. Batches held here are discarded and come again."""
        self.loader.remesh(dp_rank, dp_size, at=at)
        self._move("remesh()")
        self._noted = None

    def metrics(self) -> dict[str, Any]:
        """Return the loader's metrics. ``consumer_s`` is then the time between two batches that this object takes."""
        numbers: dict[str, Any] = self.loader.metrics()
        return numbers

    def trace(self, path: str | os.PathLike[str], steps: int = 20) -> None:
        """Record the next steps of the loop over this object, like the loader's ``trace``, with its copies.

        A copy ends, in its lane, when the host first sees that it is done.

        Raises:
            ConfigError: The loader is not one of ours; see also ``DataLoader.trace``.
        """
        trace = getattr(self.loader, "trace", None)
        if trace is None:
            raise ConfigError(
                f"trace: works over a streaming.DataLoader only; this prefetcher copies the batches of a "
                f"{type(self.loader).__name__}, whose work nobody records"
            )
        trace(path, steps)

    def _is_iterated(self) -> bool:
        """Return whether a loop over this object or the loader is in progress, which another iterator would end."""
        if self._turn is not None and self._turn.lasts:
            return True
        is_iterated = getattr(self.loader, "_is_iterated", None)
        return is_iterated is not None and bool(is_iterated())

    def _observed(self) -> Observation:
        """Return the numbers of the loader that exporters read. May be called from any thread."""
        found: Observation = self.loader._observed()
        return found

    def describe(self) -> str:
        """Describe what this object and the loader are doing. May be called from any thread."""
        describe = getattr(self.loader, "describe", None)
        if describe is None:
            return self.describe_stage()
        told: str = describe()
        return told if hasattr(self.loader, "add_stage") else f"{told}\n{self.describe_stage()}"

    def describe_stage(self) -> str:
        """Describe what this object is doing. May be called from any thread."""
        flight = self._flight
        if flight is None:
            return f"prefetcher to {self.device}: not running"
        return (
            f"prefetcher to {self.device}: {flight.stage}; {len(flight.ahead)} batches ahead, {len(flight.held)} "
            f"copies not yet known to be done, {len(flight.steps)} steps queued on the device and not yet known to be "
            "done"
        )

    def close(self) -> None:
        """Wait for copies in progress, release all memory and close the loader."""
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

        return Watchdog(after_s, f"{self.device} has made no progress", describe)

    def _move(self, what: str) -> None:
        """End the current iteration, because the method named ``what`` moves the loader."""
        if self._turn is not None and (self._turn.has_begun or self._noted is not None):
            self._turn.move(what)
            self._stop()
            self._noted = None

    def _stop(self) -> None:
        if self._flight is not None:
            self._end(self._flight)

    def _end(self, flight: _Flight) -> None:
        """Close ``flight``. If a foreign loader is already in the next epoch and the consumer is not, set it back."""
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
        ConfigError: There is no such device, or it is neither a CPU nor a CUDA device.
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
            f"device: {device!r} was requested, but torch sees no CUDA device (a CPU build of torch, no driver, or "
            f'CUDA_VISIBLE_DEVICES hides it). Use device="cpu", or device=None: CUDA where there is one, else the CPU'
        )
    index, count = torch.cuda.current_device() if found.index is None else found.index, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device: {device!r} was requested, but torch sees {count} CUDA devices (0 to {count - 1})")
    return torch.device("cuda", index)


class _DeviceBatches(Generic[BatchT]):
    """Iterator over one flight, with the rules of ``streaming.run.epochs.iterator.Batches``."""

    def __init__(self, prefetcher: DevicePrefetcher[Any], flight: _Flight, turn: Turn, *, with_state: bool) -> None:
        self._prefetcher, self._flight, self._turn = prefetcher, flight, turn
        self._with_state = with_state
        self._failure: str | None = None
        self._is_over = False
        weakref.finalize(self, close_at_exit, weakref.ref(self))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchT:
        """Return the next batch, on the device."""
        return self._answer(self._hand_out)

    def upcoming(self) -> Within:
        """See ``Batches.upcoming``: the batch is copied, and not handed out."""
        return self._answer(self._look)

    def _answer(self, act: Callable[[], _Answer]) -> _Answer:
        self._flight.maker.check()
        if self._is_over:
            self._end()
            raise StopIteration
        self._turn.check()
        if self._failure is not None:
            raise IteratorEndedError(self._failure)
        self._turn.has_begun = True
        asked = self._flight.account.metrics.observer.asks()
        if asked is None:
            return self._advanced(act)
        with asked:
            return self._advanced(act)

    def _advanced(self, act: Callable[[], _Answer]) -> _Answer:
        try:
            if self._flight.advance():
                return act()  # no name here: the consumer alone decides how long the batch lives
            self._turn.check()
            self._is_over = True
        except BaseException as error:
            self._failure = failed(error)
            self._end()
            if not isinstance(error, StopIteration):
                raise
            why = f"StopIteration was raised while a batch was made, and must not be taken for the end: {error}"
            raise RuntimeError(why) from error
        self._end()
        raise StopIteration

    def hold_back(self, change: int) -> None:
        """See ``Batches.hold_back``: batches that this iterator has handed out, and training has not received.

        Raises:
            ConfigError: The loader is not one of ours.
            IteratorEndedError: The loader was moved or closed meanwhile.
        """
        self._turn.check()
        self._flight.account.hold_back(change)

    @property
    def has_ended(self) -> bool:
        """Whether the iterator was superseded, or its loader was moved or closed."""
        return self._turn.has_ended

    def close(self) -> None:
        """End this iteration. The loader continues with the next epoch."""
        self._is_over = True
        self._end()

    def __del__(self) -> None:
        if hasattr(self, "_is_over"):
            self._end()

    def _look(self) -> Within:
        found = self._flight.look()
        if found is None:
            raise ConfigError(NO_STEPS)
        return found

    def _hand_out(self) -> BatchT:
        batch: Any = self._flight.hand_out()
        self._is_over = self._turn.is_over = self._flight.is_over
        if self._with_state:
            batch = batch, self._prefetcher.state_dict()
        handed_out: BatchT = batch
        return handed_out

    def _end(self) -> None:
        self._turn.is_open = False
        self._prefetcher._end(self._flight)
