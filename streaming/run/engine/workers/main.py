"""Run as a decode worker: take the rows of a batch, read their bytes from the arena, build it in a ring slot.

The server forks a worker, which receives the recipe and then one order after another until the socket ends. It owns
nothing that outlives it, and holds nothing of the user's except their functions.

Messages are tuples that start with their kind. To the worker: ``SETUP``, then ``LAY`` (settings of the process) or
``ORDER``; during a build, ``NEXT`` (a substitute, or None), ``GO_ON`` (a report was noted), ``DATA`` (of a store) or
``ABORT``. From the worker: ``HELLO`` once; ``LAID``; ``SUBSTITUTE``, ``REPORT`` and ``READ`` during a build; ``DONE``,
``FAILED`` or ``ABORTED`` at the end.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import logging
import mmap
import os
import pickle
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import process, resource_tracker, spawn
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from streaming.build.batches.build import BadSample, BadSampleReport, BatchBuilder, Recipe
from streaming.build.batches.draw_watch import DrawWatch
from streaming.build.batches.draws import ALL_GENERATORS, BatchDraws, seed_generators
from streaming.build.batches.jagged import fresh
from streaming.build.batches.rows import DecodedRow, Rows
from streaming.build.decode import use_one_thread
from streaming.common.forks import leave_signals_to_the_job, signals_held_back
from streaming.common.platforms import trim_heap
from streaming.errors import ConfigError
from streaming.run.engine.workers.channel import Channel, ChannelClosedError
from streaming.run.engine.workers.in_progress import STACK_SIGNAL
from streaming.run.engine.workers.portable import cure_of, received
from streaming.run.engine.workers.ring import Slot, SlotWriter
from streaming.run.engine.workers.surroundings import lay
from streaming.run.engine.workers.transport import Parcel, WireRows, error_to_wire, pack, rows_from_wire
from streaming.types import ReadBuffer

Kind = Literal[
    "setup", "hello", "lay", "laid", "order", "substitute", "next", "report", "go on", "read", "data", "abort", "done",
    "failed", "aborted",
]  # fmt: skip
SETUP: Kind = "setup"
HELLO: Kind = "hello"
LAY: Kind = "lay"
LAID: Kind = "laid"
ORDER: Kind = "order"
SUBSTITUTE: Kind = "substitute"
NEXT: Kind = "next"
REPORT: Kind = "report"
GO_ON: Kind = "go on"
READ: Kind = "read"
DATA: Kind = "data"
ABORT: Kind = "abort"
DONE: Kind = "done"
FAILED: Kind = "failed"
ABORTED: Kind = "aborted"

_log = logging.getLogger(__name__)
_inherited: list[int] = []
"""Descriptors that were sent with this process."""

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "500"
"""OOM score that counts like half of the machine's memory: a training process rarely exceeds a worker by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """One batch to build.

    Attributes:
        rows: Its rows.
        valid: Its mask, or None.
        slot: Number of the ring slot to build it in. The slot's descriptor is sent along the first time.
        gone: Slots that will not be used again.
        seed: Key of the epoch for random numbers of the user's functions; None: no seeding.
    """

    rows: WireRows
    valid: npt.NDArray[np.bool_] | None
    slot: int
    gone: tuple[int, ...]
    seed: int | None


@dataclass(slots=True)
class _Reading:
    """A thread's request for bytes of a distant member, and the answer: bytes, an error, or None until it comes."""

    of: tuple[int, int, int, bool]
    found: Any = None


class _AbortedError(BaseException):
    """Signal that the parent no longer needs this batch. Not for users to catch."""


def run(sock: socket.socket, server_pid: int) -> int:
    """Serve orders from ``sock`` until it ends. Return the exit code."""
    die_with(server_pid)
    torch.set_num_threads(1)
    use_one_thread()
    seed_generators(int.from_bytes(os.urandom(8), "little"), ALL_GENERATORS)
    with suppress(ChannelClosedError):
        _Worker(Channel(sock)).serve()
    return 0


def run_process(sock: socket.socket, server_pid: int) -> int:
    """Run the ``multiprocessing`` process that the parent sends (see ``context``). Return its exit code.

    SIGTERM is blocked until ``BeginProcess``, because torch's loop installs a handler that ends the process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with(server_pid)
    channel = Channel(sock)
    try:
        (settings, sent, begin, rest), fds = channel.receive()
        channel.send((os.getpid(),))
    except ChannelClosedError:
        return 1
    lay(settings)  # the server has the settings of its own start
    tracker: Any = resource_tracker
    tracker._resource_tracker._fd = fds[len(sent)]
    _inherited[:] = fds
    current: Any = process.current_process()
    current._inheriting = True
    try:
        spawn.prepare(pickle.loads(begin))  # noqa: S301  from our parent
        things = [received(body, places, fd) for (body, places), fd in zip(sent, fds, strict=False)]
        started: Any = _Unpickler(io.BytesIO(rest), things).load()
    except BaseException as error:  # noqa: BLE001  process boundary: the parent gets it
        with suppress(ChannelClosedError):
            channel.send((error_to_wire(error, f"in worker process {os.getpid()}, starting"),))
        return 1
    finally:
        del current._inheriting
    for problem in lay(settings):  # imports may have changed settings
        _log.warning("a setting of the training process cannot be laid in this worker process: %s", problem)
    code: int = started._bootstrap(parent_sentinel=sock.fileno())
    return code


@dataclass(frozen=True, slots=True)
class BeginProcess:
    """Replace torch's handler of SIGTERM, which ends the process: the ``worker_init_fn`` of torch's loader.

    Args:
        then: The user's ``worker_init_fn``, called after that.
    """

    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        """Begin in worker process ``number``."""
        leave_signals_to_the_job({signal.SIGTERM})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _start_manager()
        if self.then is not None:
            self.then(number)


def _start_manager() -> None:
    """Start torch's shared-memory manager, if needed, while signals are blocked, so that signals do not end it."""
    if torch.multiprocessing.get_sharing_strategy() == "file_system":  # type: ignore[no-untyped-call]
        with signals_held_back():
            fresh((1,), torch.uint8).share_memory_()  # type: ignore[no-untyped-call]


class Descriptor:
    """Represent a descriptor of the parent in a message: its index among the descriptors sent along."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return the child's own descriptor."""
        return os.dup(_inherited[self._place])


class _Unpickler(pickle.Unpickler):
    """Resolve references to objects that are sent once for all processes."""

    def __init__(self, file: Any, things: list[Any]) -> None:
        super().__init__(file)
        self._things = things

    def persistent_load(self, number: int) -> Any:
        return self._things[number]


def die_with(server_pid: int) -> None:
    """Have the kernel kill this process when the server ends, however it ends. Die first if memory runs out."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        os._exit(1)
    _be_killed_first()


def _be_killed_first() -> None:
    """Make the kernel's OOM killer prefer a worker, which is replaced, over the training process."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)


class SlotBuilder:
    """Build batches in slots, such that functions' random numbers depend on the samples alone. For one thread.

    Nothing else may draw from the generators of the process meanwhile.

    Args:
        recipe: How to build.
        place: Receives the row that is being decoded.

    Attributes:
        watch: Records which generators functions draw from.
    """

    def __init__(self, recipe: Recipe, place: DecodedRow) -> None:
        self._recipe, self._place = recipe, place
        functions = recipe.functions_of_user
        self.watch = DrawWatch(functions)
        self._watches = bool(functions)

    def build(
        self, rows: Rows, valid: npt.NDArray[np.bool_] | None, slot: Slot, seed: int | None,
        substitutes: Callable[[int], Iterator[Rows]], report: BadSampleReport,
    ) -> Parcel:  # fmt: skip
        """Return the batch of ``rows``, with its memory in ``slot``. The other arguments are those of a ``Builder``."""
        self._place[0] = -1

        def attempt(seeds: frozenset[str], report: BadSampleReport) -> tuple[Any, SlotWriter]:
            writer = SlotWriter(slot)
            draws = BatchDraws(seed or 0, rows.positions, seeds, self.watch.own)
            builder = BatchBuilder(self._recipe, substitutes, report, writer.allocate, self._place, draws)
            return builder.build(rows, valid), writer

        if seed is None or not self._watches:
            batch, writer = attempt(frozenset(), report)
        else:
            batch, writer = self.watch.build(attempt, report)
        return pack(batch, rows, writer)


class _Worker:
    """The state of one worker."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._slots: dict[int, Slot] = {}
        (kind, blob, arena_bytes, place, settings), fds = channel.receive()
        if kind != SETUP:
            raise ChannelClosedError(f"expected {SETUP!r}, got {kind!r}")
        self._memory = mmap.mmap(fds[0], arena_bytes, prot=mmap.PROT_READ)
        self._view = memoryview(self._memory)
        os.close(fds[0])
        self._row = memoryview(mmap.mmap(fds[1], mmap.PAGESIZE)).cast("q")
        faulthandler.register(STACK_SIGNAL, fds[1], all_threads=False)
        self._broken: ConfigError | None = None
        problems = lay(settings)
        recipe: Recipe | None = None
        try:
            recipe = pickle.loads(blob)  # noqa: S301  our parent's own functions
            self._builder = SlotBuilder(recipe, self._row)
        except Exception as error:  # noqa: BLE001  process boundary: the parent gets it with the first batch
            self._broken = ConfigError(
                f"decode, transform or collate_fn does not load in a worker process: {type(error).__name__}: {error}. "
                f"{cure_of(error)}"
            )
            self._broken.__cause__ = error
        problems += [one for one in lay(settings) if one not in problems]  # imports may have changed settings
        if recipe is not None and recipe.worker_init_fn is not None and self._broken is None:
            self._begin(recipe.worker_init_fn, place)
        self._found: dict[int, list[WireRows | None]] = {}
        self._turn, self._readings = threading.Lock(), deque[_Reading]()
        self._is_aborted = False
        channel.send((HELLO, os.getpid(), problems))

    def serve(self) -> None:
        """Execute orders until the channel is closed."""
        while True:
            (kind, order), fds = self._channel.receive()
            if kind == LAY:
                self._channel.send((LAID, lay(order)))
                continue
            if kind != ORDER:
                raise ChannelClosedError(f"expected {ORDER!r}, got {kind!r}")
            for number in order.gone:
                gone = self._slots.pop(number, None)
                if gone is not None:
                    gone.close()
            if fds:
                self._slots[order.slot] = Slot(order.slot, fds[0])
            answer = self._answer(order)
            self._channel.send(answer)
            made_objects = answer[0] == DONE and answer[1].body is None
            del answer
            if made_objects:  # returns half of a batch's bytes; decoding them took a hundred times as long
                trim_heap()

    def _begin(self, worker_init_fn: Callable[[int], object], place: int) -> None:
        try:
            worker_init_fn(place)
        except Exception as error:  # noqa: BLE001  process boundary: the parent gets it with the first batch
            self._broken = ConfigError(
                f"worker_init_fn({place}) failed in a worker process: {type(error).__name__}: {error}. Correct it, or "
                f"leave it out"
            )
            self._broken.__cause__ = error

    def _answer(self, order: BatchOrder) -> tuple[Any, ...]:
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        slot = self._slots[order.slot]
        rows: Rows | None = None
        if self._broken is not None:
            return FAILED, error_to_wire(self._broken, _where(None))
        try:
            slot.follow()
            self._is_aborted = False
            rows = rows_from_wire(order.rows, self._memory, self._view, self._read_distant)
            self._found.clear()
            parcel = self._builder.build(rows, order.valid, slot, order.seed, self._substitutes, self._report)
            return DONE, parcel, (begun_s, time.perf_counter()), time.process_time() - cpu_s
        except _AbortedError:
            return (ABORTED,)
        except ChannelClosedError:
            raise
        except BaseException as error:  # noqa: BLE001  process boundary: the parent gets it
            return FAILED, error_to_wire(error, _where(rows))

    def _substitutes(self, row: int) -> Iterator[Rows]:
        """Yield the parent's substitutes. Each is sent only once; a batch that is built again gets the same ones."""
        found = self._found.setdefault(row, [])
        for number in count():
            if number == len(found):
                found.append(self._ask((SUBSTITUTE, row)))
            wire = found[number]
            if wire is None:
                return
            yield rows_from_wire(wire, self._memory, self._view, self._read_distant)

    def _report(self, bad: BadSample) -> None:
        self._ask((REPORT, bad))

    def _read_distant(self, chunk_id: int, start: int, stop: int, *, whole: bool) -> ReadBuffer:
        """Have the parent read: it has the connections, the retries and the counters.

        Called from several threads at once: the first one requests the bytes for all that wait meanwhile.
        """
        mine = _Reading((chunk_id, start, stop, whole))
        self._readings.append(mine)
        with self._turn:
            if mine.found is None:
                asked = [self._readings.popleft() for _ in range(len(self._readings))]
                try:
                    for one, found in zip(asked, self._ask((READ, [one.of for one in asked])), strict=True):
                        one.found = found
                except BaseException as error:
                    for one in asked:  # Invariant: a waiting thread has an answer, or is still listed
                        one.found = error
                    raise
        if isinstance(mine.found, BaseException):
            raise mine.found
        data: ReadBuffer = mine.found
        return data

    def _ask(self, question: tuple[Any, ...]) -> Any:
        if self._is_aborted:
            raise _AbortedError
        self._channel.send(question)
        answer, _ = self._channel.receive()
        if answer[0] == ABORT:
            self._is_aborted = True
            raise _AbortedError
        return answer[1]


def _where(rows: Rows | None) -> str:
    what = "starting" if rows is None else f"building the batch of {describe_rows(rows.keys, rows.urls)}"
    return f"in decode worker {os.getpid()}, {what}"


def describe_rows(keys: list[str], urls: list[str]) -> str:
    """Describe the samples of a batch: all shards (up to three), and the first and last key."""
    if not keys:
        return "no samples"
    shards = list(dict.fromkeys(urls))
    more = f" and {len(shards) - 3} more" if len(shards) > 3 else ""
    return f"{len(keys)} samples, {keys[0]!r} to {keys[-1]!r}, of {', '.join(shards[:3])}{more}"
