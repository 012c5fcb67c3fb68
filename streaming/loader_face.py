"""Give every loader its public methods: ``LoaderFace``, the base of ``DataLoader`` and ``DeviceMeshFetcher``."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias

from infra import DeviceMesh
from streaming.common.arguments import checked_seconds, shows
from streaming.common.counters import Observation
from streaming.common.migration_hints.names import look_elsewhere
from streaming.errors import ConfigError
from streaming.loop_core import LoopCore
from streaming.order.plan.settings import Shape
from streaming.run.engine.workers.ring import PageLocker
from streaming.run.epochs.iterator import Batches, Closable, Loop
from streaming.run.epochs.position import Place, calling_line
from streaming.run.epochs.watch import Watchdog
from streaming.run.loops.descriptions import what_is_read
from streaming.run.loops.opening import OpenLoop
from streaming.run.options.loader_options import LoaderOptions
from streaming.types import BatchT
from streaming.watch.tracing.file import TraceFile, checked_steps, here
from streaming.watch.tracing.recorder import Recorder

_Stages: TypeAlias = list[weakref.WeakMethod[Callable[[], str]]]


class LoaderFace(Closable, Generic[BatchT]):
    """Iterate over the batches of one rank, with a resumable position.

    A face holds a ``LoopCore`` and exposes it to users. It adds the services for one consumer: reports of waits, and
    traces. A subclass defines the constructor and the datasets that it accepts.

    Attributes:
        stall_report_s: Seconds without a batch after which a warning reports what every stage waits for; None: never.
    """

    if not TYPE_CHECKING:  # type checkers know which names there are

        def __getattr__(self, name: str) -> object:
            return look_elsewhere(self, name, "of_loaders")

    def _begin(self, dataset: Any, options: LoaderOptions[Any]) -> None:
        """Open the loop, for a new loader or one that was sent to another process or an actor."""
        self.stall_report_s = options.stall_report_s
        self._counted_at = ""  # the line of the program that first requested the length
        self._stages: _Stages = []
        self._watchdog: Watchdog | None = None
        self._tracing: Recorder | None = None
        self._lent_to = ""  # what reads this loader's samples from now on
        self._core = LoopCore(dataset, options, self._opened)

    @staticmethod
    @abstractmethod
    def _opened(dataset: Any, options: LoaderOptions[Any], shape: Shape, mesh: DeviceMesh) -> OpenLoop:
        """Open the loop over a dataset in a mesh.

        Raises:
            ConfigError: This kind of loader does not accept the dataset or an option.
        """

    @property
    def _loop(self) -> Loop:
        return self._core.loop

    @property
    def dataset(self) -> Any:
        """The dataset that is read: the one given, or the one that the given function returned.

        After ``set_weights``, or after loading a state with such weights, it is a ``Mixture`` with these weights.
        """
        return self._loop.now_read(self._core.dataset)

    @property
    def is_elastic(self) -> bool:
        """Whether global batches hold the same samples, in the same order, on any number of ranks."""
        return self._core.now().is_elastic

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh, including this process's place in it."""
        self._core.now()
        return self._core.finder.mesh

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self._loop.epoch

    @property
    def global_batch_size(self) -> int:
        """Samples per batch over all data-parallel ranks.

        With a schedule of batch sizes: the size of the next batch.
        """
        return self._core.now().next_shape.global_batch_size

    @property
    def batch_size(self) -> int:
        """Samples in a full batch, or micro-batch, on this rank. With a schedule of batch sizes: in the next batch."""
        mesh = self.device_mesh
        shape = self._loop.next_shape
        return -(-shape.rows_of(mesh.data_rank) // shape.num_parts(shape.global_batch_size))

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples of a micro-batch on each rank, as given; None: batches are not cut."""
        return self._core.shape.micro_batch_size

    @property
    def has_ramp(self) -> bool:
        """Whether the batch size follows a schedule."""
        return not self._core.shape.sizes.is_constant

    @property
    def batches_left(self) -> int:
        """Number of batches, or micro-batches, of the current epoch that have not been received yet.

        Raises:
            TypeError: The length of the epoch is unknown, as for ``len(loader)``, and the epoch is not over.
        """
        loop = self._core.now()
        loop.check_ends()
        place = loop.position.place
        return 0 if place.is_end else loop.micro_batches_left(place)

    def __iter__(self) -> Batches[BatchT]:
        """Return an iterator over the next epoch, or over the rest of the current one.

        Wrappers that read ahead call the iterator's ``hold_back``.
        """
        return self._iterated(with_state=False)

    def with_state(self) -> Batches[tuple[BatchT, dict[str, Any]]]:
        """Return an iterator, like ``iter(loader)``, that yields each batch with the state that continues after it.

        For programs that read ahead: ``state_dict`` describes the latest batch delivered, not the one trained on. ::

            ahead = deque()
            for batch, state in loader.with_state():
                ahead.append((stage(batch), state))
                if len(ahead) > 2:
                    batch, state = ahead.popleft()
                    train_step(batch)
                    save(model, state)

        The states are those of ``state_dict``: JSON-serializable dicts. Later calls, such as ``seed``, do not change
        them.
        """
        return self._iterated(with_state=True)

    def _num_steps(self) -> int:
        loop = self._core.now()
        loop.check_ends()
        return loop.num_batches

    def _iterated(self, *, with_state: bool) -> Batches[Any]:
        self._check_own("iterating", "iterate over the {0}")
        loop = self._core.now(to_read=True)
        if self._core.check is not None:
            self._core.check.first()
        report = partial(_report, weakref.WeakMethod(loop.describe), self._stages)
        self._watchdog = Watchdog(self.stall_report_s, "no batch", report)
        return loop.run(self._watchdog, with_state=with_state)

    def __getitems__(self, numbers: list[int]) -> list[Any]:  # torch's DataLoader calls this on a map-style dataset
        """Refuse to serve as the dataset of torch's ``DataLoader``.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"torch's DataLoader: expected a data set, got a {type(self).__name__}, which makes batches itself; "
            "iterate over it directly, or give torch's the samples: TorchIterable(loader.dataset)"
        )

    @shows
    def __repr__(self) -> str:
        mesh, size = self.device_mesh, self.global_batch_size
        epoch = f"epoch {self.epoch}"
        with suppress(TypeError):  # of unknown length
            epoch += f" of {self._num_batches()} batches"
        workers = f"num_workers={self._core.options.num_workers}"
        parts = [what_is_read(self.dataset), f"global_batch_size={size}", workers, epoch]
        parts.append(f"rank {mesh.rank} of {mesh.world_size} (found by: {self._core.finder.found_by})")
        return f"{type(self).__name__}({', '.join(parts)})"

    def check_agreement(self, timeout: float = 600.0) -> None:
        """Compare dataset, order, options and position across all ranks of the mesh. Every rank must call this.

        The first iteration of a loader over a ``StreamingDataset`` runs the same check, but only logs a warning if some
        ranks do not arrive within ``agreement_timeout``.

        Args:
            timeout: Seconds to wait for the other ranks.

        Raises:
            AgreementError: Ranks differ (the message names them and their values), or some did not arrive within
                ``timeout``.
            ConfigError: torch.distributed is not initialized, this is an ordinary dataset, or ``timeout`` is not a
                number.
        """
        self._core.now()
        if self._core.check is None:
            raise ConfigError("check_agreement: works with a StreamingDataset only")
        self._core.check.now(checked_seconds("check_agreement: timeout", timeout))

    def __len__(self) -> int:
        """Return the number of batches, or micro-batches, in a whole epoch; it is the same on every rank.

        Raises:
            TypeError: The dataset is a ``Mixture`` without an end.
        """
        number = self._num_batches()
        self._counted_at = self._counted_at or calling_line()
        return number

    def _num_batches(self) -> int:
        loop, steps = self._core.now(), self._num_steps()
        if self.micro_batch_size is None:
            return steps
        return loop.micro_batches_left(Place(epoch=loop.epoch, samples_seen=0))

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of ``epoch``. If that epoch is already next, a loaded position is kept.

        With the number of the epoch in progress, the running iterator is left alone, and the next iterator starts that
        epoch from its beginning. Any other number ends the running iterator. A ``Mixture`` without an end has a single
        epoch: every ``iter(loader)`` continues it, and ``set_epoch`` has no effect.
        """
        self._check_own("set_epoch", "call it before the {0} begin")
        self._loop.set_epoch(epoch)

    def seed(self, seed: int) -> None:
        """Shuffle with a new seed from the next epoch on."""
        self._loop.set_seed(seed)

    def seen(self) -> dict[str, dict[str, float]]:
        """Count the samples drawn from each source of a ``Mixture`` up to this position, over all ranks and epochs.

        The counts are computed from the plan and the ledger, without a log or other ranks, so they are correct after a
        resume, too.

        Returns:
            For each source: ``samples``; ``passes``, which is ``samples`` divided by the size of the source; and with
            ``unit="tokens"`` also ``tokens``, an estimate: ``samples`` times the mean length by which the weights are
            divided. A source that has been dropped has only ``samples``.

        Raises:
            ConfigError: The dataset is not a ``Mixture``.
        """
        return self._core.now().seen()

    def set_weights(self, weights: Mapping[str, float], *, at: int | None = None, timeout: float = 600.0) -> int:
        """Change the weights of a ``Mixture``, from a row soon after those that training has received.

        Every rank must call this at about the same step with the same weights; the ranks agree on the row through the
        job's store. All of them make the change, or none does. The change is recorded in the ledger in
        ``state_dict()``, so the run can be resumed and replayed. With exact shares the weights apply 16 steps after the
        step of the furthest rank; batches read ahead beyond that are planned again. With ``quotas="chunks"``, chunks
        that the shuffle window has begun are read to their end, so the change begins later and is gradual
        (docs/mixing.md). The step at which the new weights take effect is logged.

        Args:
            weights: Share of each source, as for ``Mixture(weights=…)``, or of each class, as for
                ``Balanced(weights=…)``: a dict by the values of the column, or ``"balanced"``. They replace a
                ``Schedule`` as well, but not the weights of nested mixtures and curricula.
            at: Row (sample of the run, counted over all ranks) from which the weights apply, no sooner than without
                ``at``. It is required if ranks cannot communicate, and then all must call this at the same step.
            timeout: Seconds to wait for the other ranks, in each of two rounds.

        Returns:
            The row from which the weights apply.

        Raises:
            ConfigError: The dataset is not a mixture without an end; the weights are invalid; ``at`` is too soon (the
                message names the first possible row), not a row of the run, or missing; or ``timeout`` is not a number
                of seconds.
            AgreementError: Ranks gave different weights, a rank did not arrive in time, or a rank cannot make the
                change.
            MemoryLimitError: The new weights need more memory than ``memory_limit``.
        """
        seconds = checked_seconds("set_weights: timeout", timeout)
        return self._core.now().set_weights(weights, at=at, timeout_s=seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch received: a small JSON-serializable dict, the same on every rank.

        After the last batch of an epoch, until the loop requests another one, the position is the end of that epoch:
        from there the next iteration has no batches, and the one after it is the next epoch. Once the loop has
        requested another batch or dropped its iterator, the position is the start of the next epoch. Batches that a
        wrapper such as ``DevicePrefetcher`` is still holding back do not count as received. A program that reads ahead
        by itself needs ``with_state``.
        """
        self._check_own("state_dict", "save {0}.state_dict()")
        state: dict[str, Any] = self._loop.state().to_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict`` that was saved with any world size and any number of workers.

        Raises:
            StateError: The state is malformed or belongs to another dataset.
        """
        self._check_own("load_state_dict", "write {0}.load_state_dict(state)")
        self._core.load(state)

    @property
    def generation(self) -> int:
        """Number of times that ``remesh`` has changed the world.

        Batches received under a lower number belong to an earlier world.
        """
        return self._core.generation

    def remesh(self, dp_rank: int, dp_size: int, *, at: Mapping[str, Any] | int) -> None:
        """Continue from the last committed step with more or fewer data-parallel ranks, without a restart.

        Every rank that stays or joins calls this with the rank and size from the job's quorum (torchft, Ray Train,
        torchrun), and then ``iter(loader)``. Batches after ``at`` are discarded, even if they were already delivered,
        and come again: the same global batches, dealt to the new ranks. Worker processes are kept, as are chunks in
        memory that are needed soon. The call does not wait for other ranks. Iterators made before it raise
        ``IteratorSupersededError``. ::

            if quorum.changed:
                loader.remesh(quorum.rank, quorum.size, at=quorum.committed_steps)
                batches = iter(loader)

        The global batch size does not change, even if ``batch_size`` was given per rank; it need not be divisible by
        ``dp_size``. A process that joins must make its loader with the same ``global_batch_size``. The count of bad
        samples starts again from zero, as after a resume.

        Args:
            dp_rank: This process's data-parallel rank, in [0, dp_size).
            dp_size: The new number of data-parallel ranks. Ranks along the other axes of the mesh do not change.
            at: The ``state_dict()`` taken after the last batch that all ranks committed; or the number of global
                batches that the run has committed over all epochs (of ``len(loader)`` batches each, or
                ``len(loader.steps())`` with micro-batches).

        Raises:
            ConfigError: A number is out of range; this is not a loader over an indexed ``StreamingDataset`` or
                ``Mixture``; or the ranks of a replica group share one reader (``replicate="broadcast"``).
            StateError: The state is malformed, or belongs to another dataset.
        """
        self._check_own("remesh", "close the {0}, and begin new ones in the new world from {0}.state_dict()")
        self._core.remesh(dp_rank, dp_size, at)

    def metrics(self) -> dict[str, Any]:
        """Return counters and waiting times since the loader was created; names end in their unit.

        ``bad`` lists the bad samples of the current epoch.
        """
        return self._loop.report()

    def trace(self, path: str | os.PathLike[str], steps: int = 20) -> None:
        """Record the next ``steps`` steps of this loader, and write them to a file for Perfetto or chrome://tracing.

        The file has a lane for each thread that fetches or builds, for each worker process, for copies to the device,
        and for the consumer, which waits, gets a batch, or runs its step; arrows lead from chunks to batches to steps.
        ``shard_tools trace merge`` joins the files of several ranks and sums up the time spent in each stage.

        A step begins when its batch is delivered, and ends when the next one is requested; recording begins now. When
        the steps are over, the thread that next requests a batch writes the file. The steps so far are also written
        when an epoch ends, which does not end the recording, and when the loader is closed, which does. The file is
        written under a temporary name first. If writing fails, a warning is logged.

        Args:
            path: Path of the file, which is replaced; ``{rank}`` stands for this process's rank.
            steps: Number of steps to record.

        Raises:
            ConfigError: An argument is invalid, nothing can be written at ``path``, or an earlier trace is still being
                recorded.
        """
        number, metrics = checked_steps(steps), self._core.now().metrics
        if self._tracing is not None and not self._tracing.is_over:
            done = len(self._tracing.recording.steps)
            raise ConfigError(
                f"trace: an earlier call is still recording: {done} of {self._tracing.num_steps} steps are over. Wait "
                "until its file is written, or close the loader, which writes it"
            )
        mesh = self._core.finder.mesh
        about = {**here(), "world_size": mesh.world_size, "data_rank": mesh.data_rank, "asked_steps": number}
        file = TraceFile(path, mesh.rank, about)
        self._tracing = Recorder(metrics, number, partial(_place_of, weakref.ref(self._core)), file.write)
        weakref.finalize(self, self._tracing.close)

    @property
    def _was_loaded(self) -> bool:
        """Whether this loader began, or goes on, from a state."""
        return self._core.was_loaded

    def _is_iterated(self) -> bool:
        """Return whether a loop over this loader is in progress, which another iterator would end."""
        return self._loop.position.is_iterated

    def _observed(self) -> Observation:
        """Return the values for exporters; callable from any thread, without detecting the mesh or opening anything."""
        mesh, loop = self._core.finder.mesh, self._loop
        place = loop.position.place
        return Observation(
            rank=mesh.rank, data_rank=mesh.data_rank, world_size=mesh.world_size, epoch=place.epoch,
            samples_seen=place.samples_seen, numbers=loop.numbers(), readers=loop.numbers_elsewhere(),
        )  # fmt: skip

    def describe(self) -> str:
        """Describe what the next batch is waiting for, one line per stage. May be called from any thread."""
        waiting_s = None if self._watchdog is None else self._watchdog.waiting_s
        waiting = [] if waiting_s is None else [f"the consumer has waited {waiting_s:.1f} s for a batch"]
        return "\n".join([*waiting, _report(weakref.WeakMethod(self._loop.describe), self._stages)])

    def add_stage(self, describe: Callable[[], str]) -> None:
        """Add a line from ``describe`` to this loader's reports; for stages that consume its batches.

        Args:
            describe: A bound method, called from any thread and held by a weak reference.
        """
        self._stages[:] = [stage for stage in self._stages if stage() is not None]
        self._stages.append(weakref.WeakMethod(describe))

    def page_lock(self, locker: PageLocker | None) -> None:
        """Build batches in page-locked memory from now on; None turns this off.

        For ``DevicePrefetcher``, which holds each batch until it has been copied. Other callers must wait for their
        copies to finish before they release a batch, because worker processes reuse its memory immediately.
        """
        self._core.page_lock(locker)

    def close(self) -> None:
        """Stop all threads and free memory. A running iterator raises an error; the loader itself can be used again."""
        try:
            self._loop.close()
        finally:
            if self._tracing is not None:
                self._tracing.close()

    shutdown = close
    """The same method under the name that torchdata's DataLoader2 used."""

    def uncollated(self) -> Self:
        """Return another loader of the same batches, from here on, that delivers each as a list of its samples.

        The samples are decoded and transformed as in this loader; ``collate_fn`` is not called, and padding is left
        out. ``Tickets`` reads samples through it.

        Raises:
            ConfigError: This loader has options that act on whole batches.
        """
        self._check_own("uncollated", "use the {0}, which deliver the samples")
        sent = self._core.sent()
        made: Self = object.__new__(type(self))
        made.__setstate__({**sent, "options": sent["options"].uncollated()})
        return made

    def lend(self, reader: Self, borrower: str) -> None:
        """Let another loader read this one's samples from here on: it shares its loop, and cannot be moved from here.

        Args:
            reader: The loader that reads, such as that of ``uncollated``.
            borrower: What reads it, a plural noun for messages, such as ``tickets``.
        """
        self._core.loop.close()
        self._core, self._lent_to = reader._core, borrower

    def _check_own(self, what: str, cure: str) -> None:
        """Refuse what would read or move a loader that something else reads.

        Raises:
            ConfigError: It is lent.
        """
        if self._lent_to:
            cure = cure.format(self._lent_to)
            raise ConfigError(f"{what}: {self._lent_to.capitalize()} read this loader from now on; {cure}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with which another process continues from here, as under ``torch.multiprocessing.spawn``.

        If no mesh was given, the other process detects its own.
        """
        self._check_own("pickling", "send a loader before the {0} begin")
        return self._core.sent()

    def __setstate__(self, sent: dict[str, Any]) -> None:
        self._begin(sent["dataset"], sent["options"])
        if sent["state"] is not None:
            self.load_state_dict(sent["state"])


def _place_of(core: weakref.ref[LoopCore]) -> tuple[int, int]:
    """Return the place of the batch after the one received last."""
    alive = core()
    return (-1, -1) if alive is None else alive.next_place()


def _report(loop: weakref.WeakMethod[Callable[[], str]], stages: _Stages) -> str:
    """Describe the state of the loop and of all stages that consume its batches.

    Weak references, because the loop holds the watchdog that calls this: threads and memory are then freed with the
    loop at once, even if garbage collection is disabled.
    """
    return "\n".join(describe() for part in (loop, *stages) if (describe := part()) is not None)
