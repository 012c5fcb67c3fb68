"""Manage decode workers from the parent: each call of ``build`` gives one free worker one batch to build."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.build.batches.build import BadSampleReport, Recipe
from streaming.build.batches.rows import Rows
from streaming.build.decode import together
from streaming.common.counters import Metrics
from streaming.errors import ConfigError, DataError, WorkerDiedError
from streaming.run.engine.memory.arena import Arena
from streaming.run.engine.threads.jobs import GivenUpError
from streaming.run.engine.threads.pace import WorkerPace
from streaming.run.engine.threads.stacks import state_of
from streaming.run.engine.workers.channel import ChannelClosedError
from streaming.run.engine.workers.fork_server import ForkServer
from streaming.run.engine.workers.in_progress import BatchWork
from streaming.run.engine.workers.inline_builder import StandInWorker, as_in_a_process
from streaming.run.engine.workers.main import (
    ABORT,
    ABORTED,
    DATA,
    DONE,
    FAILED,
    GO_ON,
    NEXT,
    ORDER,
    READ,
    REPORT,
    SUBSTITUTE,
    BatchOrder,
    describe_rows,
)
from streaming.run.engine.workers.portable import dumps, fingerprint
from streaming.run.engine.workers.processes import MAX_DEATHS, Processes, Worker
from streaming.run.engine.workers.ring import BatchRing, Slot
from streaming.run.engine.workers.surroundings import Surroundings
from streaming.run.engine.workers.transport import Parcel, error_from_wire, rows_to_wire, unpack
from streaming.storage import ChangedError, redact
from streaming.types import ReadBuffer

_LISTED = 16
_log = logging.getLogger(__name__)

Substitutes = Callable[[int], Iterator[Rows]]


@dataclass(slots=True, eq=False)
class _Job:
    """One call of ``build``. Counts the reports passed on, so that a batch that is redone does not repeat them.

    ``give_up`` is for any thread, everything else for the one that builds. ``_lock`` guards ``_worker`` and
    ``_given_up``: ``give_up`` must not hit a worker that already has another job.
    """

    rows: Rows
    valid: npt.NDArray[np.bool_] | None
    substitutes: Substitutes
    report: BadSampleReport
    seed: int | None
    batch: int
    num_reported: int = 0
    deaths: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _worker: Worker | None = None
    _given_up: bool = False

    def told(self) -> dict[str, Any]:
        """Return what is being built, for traces."""
        return {"batch": self.batch, "samples": len(self.rows.keys)}

    def is_wanted(self) -> bool:
        """Return whether no thread has given up the job."""
        return not self._given_up

    def begin(self, worker: Worker) -> None:
        """Note that ``worker`` has the job now."""
        with self._lock:
            self._worker = worker  # from here on `give_up` shuts this worker's channel
            if self._given_up:
                worker.channel.shut()

    def end(self) -> bool:
        """Note that no worker has the job any more. Return whether it is still needed; if not, the channel was shut."""
        with self._lock:
            self._worker = None  # from here on `give_up` shuts no channel: the worker may have another job
            return not self._given_up

    def give_up(self) -> None:
        """Note that the job is no longer needed: talking to its worker raises ChannelClosedError."""
        with self._lock:
            self._given_up = True  # final: the worker that has the job, or the next one, finds its channel shut
            if self._worker is not None:
                self._worker.channel.shut()


class _BatchFailedError(Exception):
    """The batch failed with an error; the worker is intact."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class WorkerPool:
    """Build batches in ``num_workers`` processes. Thread-safe: one thread per worker may be in ``build``.

    Processes start together with the first ``build`` or ``start``. ``close``, garbage collection or the end of the
    interpreter stops them. They also end when this process is gone.

    Args:
        num_workers: Number of processes.
        recipe: How to build. Its ``finish`` runs here, in the calling thread.
        arena: Holds most rows; must stay open while ``build`` runs.
        ring: Holds the batches. The caller closes it, after the pool.
        metrics: Counts ``worker_restarts``; None: no count.
        server: A running fork server, which the caller closes after the pool; None: the one that all pools share.
        pace: See the attribute; None: no comparison.

    Attributes:
        num_workers: Number of processes.
        pace: Compares batches that are built here with those of processes.

    Raises:
        ConfigError: ``num_workers`` is not positive, or a function of the recipe cannot be sent to a process.
    """

    def __init__(
        self, num_workers: int, recipe: Recipe, arena: Arena, *, ring: BatchRing, metrics: Metrics | None = None,
        server: ForkServer | None = None, pace: WorkerPace | None = None,
    ) -> None:  # fmt: skip
        if num_workers < 1:
            raise ConfigError(f"num_workers: a pool needs at least one worker, got {num_workers}")
        self.num_workers = num_workers
        self._recipe = recipe
        self._arena = arena
        self._ring = ring
        self._metrics = metrics or Metrics()
        self._metrics.add("worker_restarts", 0)
        self.pace = pace or WorkerPace(self._metrics, num_workers, 0, 1)
        self._sent = self._fingerprint()
        self._pickle = self._pickled(dumps)
        self._processes = Processes(
            num_workers, self._pickle, arena.fd, len(arena.memory), server,
            replaced=partial(self._metrics.add, "worker_restarts"), num_slots=ring.num_slots,
        )  # fmt: skip
        self._stand_in: StandInWorker | None = None
        self._may_stand_in = recipe.worker_init_fn is None  # the changes that it makes could not be undone
        self._jobs: set[_Job] = set()
        self._end = weakref.finalize(self, self._processes.close)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have answered so far."""
        return [worker.pid for worker in self._processes.all() if worker.pid is not None]

    @property
    def server_pid(self) -> int | None:
        """Process id of the fork server; None before the start."""
        return self._processes.server_pid

    @property
    def has_started(self) -> bool:
        """Whether processes have been started."""
        return bool(self._processes.all())

    def check_files(self) -> None:
        """See ``Processes``."""
        self._processes.check_files()

    def start(self) -> None:
        """Start the processes unless they are running, without waiting until they are ready."""
        self._processes.start()

    def limit_ring(self, limit_bytes: int) -> None:
        """Limit the bytes of all slots; above it, free slots of the ring return their pages."""
        self._ring.limit_bytes = limit_bytes

    def renew(self) -> bool:
        """Replace the processes if the recipe, or a global of the main script that it names, has changed.

        No ``build`` may be running.

        Returns:
            Whether it has changed.

        Raises:
            ConfigError: It can no longer be sent to a process.
        """
        now = self._fingerprint()
        if now == self._sent or now != self._fingerprint():  # or each pickle of it differs
            return False
        self._sent, self._pickle, self._stand_in = now, self._pickled(dumps), None
        self._processes.renew(self._pickle)
        return True

    def surround(self, surroundings: Surroundings) -> None:
        """Build with these settings from now on."""
        self._processes.surround(surroundings)

    def start_if_up(self, tell: Callable[[], None] | None = None) -> bool:
        """Start the processes unless they are running. Return whether one is up, or none ever will be.

        If not, ``tell`` is called once when that becomes true, in any thread.
        """
        self._processes.start()
        return self._processes.when_up(tell)

    def starts_quickly(self) -> bool:
        """Return whether a process would start in milliseconds, rather than seconds of CPU time."""
        return self._processes.starts_quickly()

    def num_up(self) -> int:
        """Return the number of processes that take batches; all if none can start, so that a request raises why."""
        return self._processes.num_up()

    def is_up(self) -> bool:
        """Return whether a process is up, or none ever will be."""
        return self._processes.is_up()

    def can_stand_in(self) -> bool:
        """Return whether the calling thread can build, with copies of the functions, the same batches as a process.

        Only the main thread can: while another thread builds, the training may draw from the generators of the process.
        No thread can after functions have changed settings of the process.
        """
        if not self._may_stand_in or threading.current_thread() is not threading.main_thread():
            return False
        if self._stand_in is None:
            self._stand_in = StandInWorker.of(self._pickle)
        return self._stand_in is not None

    def build_here(
        self,
        rows: Rows,
        valid: npt.NDArray[np.bool_] | None,
        substitutes: Substitutes,
        report: BadSampleReport,
        *,
        seed: int,
        batch: int = -1,
    ) -> Any:
        """Return the same batch as ``build``, made in the calling thread. Call only if ``can_stand_in``.

        Nothing else may draw from the generators of the process meanwhile.
        """
        stand_in = self._stand_in
        if stand_in is None:
            raise AssertionError("call can_stand_in first")
        changed: list[str] = []
        try:
            with as_in_a_process(), self._processes.surroundings.in_process(changed):
                slot = self._ring.take()
                try:
                    parcel = stand_in.build(rows, valid, substitutes, report, seed=seed, batch=batch, slot=slot)
                except BaseException:  # its frames may hold memory of the slot
                    self._ring.discard(slot)
                    raise
                try:
                    unpacked = self._unpacked(parcel, slot, rows)
                except _BatchFailedError as failed:
                    raise failed.error from None
        finally:
            if changed:
                self._never_again(changed)
        return self._recipe.finished(unpacked)

    def _never_again(self, changed: list[str]) -> None:
        """Call functions only in worker processes from here on, because they changed this process, and log it."""
        self._may_stand_in = False
        _log.warning(
            "transform, decode or collate_fn changed settings of the whole process, while this process built a batch "
            "because no worker process was up: %s. They were put back, so that training keeps its own, and from here "
            "on worker processes alone call the functions. Set up in worker_init_fn= what they need",
            ", ".join(changed),
        )  # fmt: skip

    def dismiss_stand_in(self) -> None:
        """Drop this process's copies of the functions, unless they are running."""
        if self._stand_in is not None and not self._stand_in.describe():
            self._stand_in = None

    def build(
        self,
        rows: Rows,
        valid: npt.NDArray[np.bool_] | None,
        substitutes: Substitutes,
        report: BadSampleReport,
        *,
        seed: int | None = None,
        batch: int = -1,
    ) -> Any:
        """Return the batch of ``rows``, like ``BatchBuilder.build``. Its tensors lie in the ring.

        ``substitutes`` and ``report`` are called in this thread, while the worker waits. An exception of theirs aborts
        the batch and is raised here. A worker that dies is replaced and its batch built again.

        Args:
            rows: The rows.
            valid: Mask, or None.
            substitutes: For row i of the batch, single rows to try instead.
            report: Called with every sample that could not be delivered, once each even if the batch is redone.
            seed: Key of the epoch, which determines the random numbers of the recipe's functions; None: no seeding.
            batch: Number of the batch, for ``describe``.

        Raises:
            WorkerDiedError: The batch killed ``MAX_DEATHS`` workers.
            RuntimeError: The pool is closed, or was closed meanwhile.
            GivenUpError: The batch was given up.
            BaseException: An exception of the recipe's functions, with the worker's traceback as a note.
        """
        job = _Job(rows, valid, substitutes, report, seed, batch)
        self._jobs.add(job)
        try:
            return self._recipe.finished(self._done(job))
        finally:
            self._jobs.discard(job)

    def give_up(self) -> None:
        """Give up all batches in progress: their workers are killed, and calls of ``build`` raise GivenUpError.

        The pool stays usable. It replaces the killed workers when they are needed.
        """
        for job in self._jobs.copy():
            job.give_up()
        self._processes.wake()

    def describe(self) -> list[str]:
        """Describe what each worker does, and how the ring's slots are used. May be called from any thread."""
        workers = self._processes.all()
        building = sum(worker.work is not None for worker in workers)
        kept = max(0, self._ring.num_taken - building)
        ring = f"ring: {self._ring.num_free} slots free, {building} in building, {kept} hold batches still in use"
        stand_in = self._stand_in
        return [*(() if stand_in is None else stand_in.describe()), *map(_state_of, workers), ring]

    def close(self) -> None:
        """End the processes, even in the middle of a batch. Calls of ``build`` in progress raise RuntimeError."""
        self._end()

    def _bury(self, worker: Worker, job: _Job) -> None:
        """Record how the worker died, and replace it.

        Raises:
            WorkerDiedError: The batch has killed too many workers.
        """
        job.deaths.append(self._processes.replace(worker))
        if len(job.deaths) < MAX_DEATHS:
            return
        rows = job.rows
        listed = ", ".join(
            f"{redact(url)} {key!r}" for url, key in list(zip(rows.urls, rows.keys, strict=True))[:_LISTED]
        )
        raise WorkerDiedError(
            f"{len(job.deaths)} decode workers in a row died on the same batch of "
            f"{describe_rows(rows.keys, rows.urls)}: {'; '.join(job.deaths)}. If killed by SIGKILL, lower num_workers, "
            f"batch_size or memory_limit, or give the job more memory. Otherwise a decoder or transform crashes or "
            f"exits on one of its samples ({listed}{', …' if len(rows.keys) > _LISTED else ''}): "
            f"num_workers=0 shows where"
        )

    # --- the dialogue about one batch ---

    def _done(self, job: _Job) -> Any:
        """Return the batch, without ``finish``; see ``build``."""
        while True:
            worker = self._processes.take(job.is_wanted)
            if worker is None:
                raise GivenUpError
            worker.work = BatchWork(job.batch, job.rows.keys, job.rows.urls)
            job.begin(worker)
            batch: Any = None
            is_dead, error = False, None
            try:
                batch = self._converse(worker, job)
            except ChannelClosedError:
                is_dead = True
            except _BatchFailedError as failed:
                error = failed.error
            except BaseException:  # in the middle of a message, such as KeyboardInterrupt
                with suppress(RuntimeError):  # closed meanwhile
                    self._processes.replace(worker, kill=True)
                raise
            if not job.end():
                self._processes.retire(worker)
                raise GivenUpError
            if is_dead:
                self._bury(worker, job)
                continue
            self._processes.give_back(worker)
            if error is not None:
                raise error
            return batch

    def _converse(self, worker: Worker, job: _Job) -> Any:
        """Return the batch, without ``finish``.

        Raises:
            ChannelClosedError: The worker has died.
            _BatchFailedError: The batch cannot be built.
        """
        slot = self._ring.take()
        lap = self.pace.begin()
        try:
            self._processes.follow(worker)
            self._send_order(worker, job, slot)
            parcel, cpu_s = self._await_parcel(worker, job)
            slot.follow()
        except _BatchFailedError:
            self._ring.give_back(slot)
            raise
        except BaseException:  # the worker may still write to the slot
            self._ring.discard(slot)
            raise
        batch = self._unpacked(parcel, slot, job.rows)
        self.pace.there(lap, len(job.rows.keys), cpu_s)
        return batch

    def _send_order(self, worker: Worker, job: _Job, slot: Slot) -> None:
        gone = worker.slots - self._ring.numbers()
        worker.slots -= gone
        is_new = slot.number not in worker.slots
        worker.slots.add(slot.number)
        order = BatchOrder(
            rows=rows_to_wire(job.rows, self._arena),
            valid=job.valid,
            slot=slot.number,
            gone=tuple(gone),
            seed=job.seed,
        )
        worker.channel.send((ORDER, order), [slot.fd] if is_new else [])

    def _fingerprint(self) -> bytes:
        return self._pickled(fingerprint)

    def _pickled(self, how: Callable[[Any], bytes]) -> bytes:
        try:
            return how(replace(self._recipe, finish=None))
        except Exception as error:  # a user's object may raise anything
            raise ConfigError(
                f"decode, transform or collate_fn cannot be sent to worker processes: {type(error).__name__}: {error}. "
                f"Open files, locks and connections inside the function, at its first call, or use num_workers=0"
            ) from error

    def _await_parcel(self, worker: Worker, job: _Job) -> tuple[Parcel, float]:
        """Return the batch, and the CPU time that the worker took for it."""
        dialogue = _Dialogue(job, self._arena)
        while True:
            (kind, *rest), _ = worker.channel.receive()
            if kind == DONE:
                parcel: Parcel = rest[0]
                # Processes of one machine share the clock.
                self._metrics.observer.seen(f"worker {worker.pid}", "build_in_worker", *rest[1], job.told)
                return parcel, rest[2]
            if kind == FAILED:
                raise _BatchFailedError(error_from_wire(rest[0]))
            try:
                reply = dialogue.reply(kind, rest[0])
            except BaseException as error:
                _abort(worker)
                raise _BatchFailedError(error) from error
            worker.channel.send(reply)

    def _unpacked(self, parcel: Parcel, slot: Slot, rows: Rows) -> Any:
        self._ring.want_span(slot.span_bytes)
        slot.touched(parcel.used_bytes)
        memory = self._ring.wrap(slot, parcel.used_bytes)
        try:
            return unpack(parcel, memory, rows.keys, rows.urls)
        except Exception as error:  # a user's class that cannot be loaded
            raise _BatchFailedError(error) from error


class _Dialogue:
    """Answer the questions of a worker that builds one batch."""

    def __init__(self, job: _Job, arena: Arena) -> None:
        self._job = job
        self._arena = arena
        self._standing_in: dict[int, Iterator[Rows]] = {}
        self._num_reports = 0

    def reply(self, kind: str, value: Any) -> tuple[Any, ...]:
        """Return the answer to one question.

        Raises:
            BaseException: Whatever ``report`` or ``substitutes`` raised.
        """
        if kind == REPORT:
            self._num_reports += 1
            if self._num_reports > self._job.num_reported:
                self._job.num_reported = self._num_reports
                self._job.report(value)
            return GO_ON, None
        if kind == READ:
            return DATA, [one.get() for one in together([partial(self._read, *one) for one in value])]
        if kind != SUBSTITUTE:
            raise AssertionError(f"a worker said {kind!r} while it built a batch")
        if value not in self._standing_in:
            self._standing_in[value] = self._job.substitutes(value)
        found = next(self._standing_in[value], None)
        return NEXT, None if found is None else rows_to_wire(found, self._arena)

    def _read(self, chunk_id: int, start: int, stop: int, whole: bool) -> ReadBuffer | Exception:  # noqa: FBT001
        """Return bytes of a distant member, or the error that the worker has to handle."""
        if self._job.rows.read_distant is None:
            raise AssertionError("a worker read from the store, although all it needs was in memory")
        try:
            return self._job.rows.read_distant(chunk_id, start, stop, whole=whole)
        except (ChangedError, DataError) as error:
            return error


def _state_of(worker: Worker) -> str:
    name = f"worker {worker.number}"
    work, pid = worker.work, worker.pid
    if pid is None:
        return f"{name} starts"
    name += f" (pid {pid}, {state_of(pid)})"
    if work is None:
        return f"{name} is idle"
    return f"{name} {work.describe(worker.progress.row())}; in {worker.progress.where(pid) or 'an unknown place'}"


def _abort(worker: Worker) -> None:
    """Have the worker abort the batch."""
    worker.channel.send((ABORT,))
    while worker.channel.receive()[0][0] != ABORTED:
        pass
