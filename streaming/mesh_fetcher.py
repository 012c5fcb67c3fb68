"""Fetch one rank's share of a dataset, batch by batch, with a resumable position: ``DeviceMeshFetcher``."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias

from infra import DeviceMesh, MeshFinder
from streaming.common.arguments import (
    checked_int,
    checked_seconds,
    checks_names,
    is_whole,
    seconds_or_none,
    shows,
)
from streaming.common.counters import Observation
from streaming.common.job.agreement import DEFAULT_TIMEOUT_S
from streaming.common.job.store import tell_of_going_on
from streaming.common.migration_hints.methods import OF_LOADERS, look_elsewhere
from streaming.errors import ConfigError
from streaming.order.plan.order import ENDLESS
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.settings import Shape
from streaming.order.plan.state import LoaderState
from streaming.others.torch_datasets.kinds import resolve_dataset
from streaming.run.device.copiers import page_locked
from streaming.run.engine.workers.ring import PageLocker
from streaming.run.epochs.iterator import Batches, Closable, Loop
from streaming.run.epochs.position import calling_line
from streaming.run.epochs.watch import STALL_REPORT_S, Watchdog
from streaming.run.loops.base import LoopConfig
from streaming.run.loops.descriptions import Announcer, what_is_read
from streaming.run.loops.epoch_loop import EpochLoop
from streaming.run.loops.options import (
    no_dataset,
    refuse_what_deals,
    streaming_config,
)  # fmt: skip
from streaming.run.loops.streamed import StreamedLoop
from streaming.run.replicas.options import Replicas
from streaming.run.replicas.start_check import StartCheck
from streaming.sets.datasets.face import DataSet
from streaming.types import Sample, SamplesT
from streaming.watch.tracing.file import TraceFile, checked_steps, here
from streaming.watch.tracing.recorder import Recorder

_log = logging.getLogger("streaming.loader")  # whichever class it is, by the name that users filter by
NO_CHECK = "no check"
_NOT_OPTIONS = frozenset({"self", "dataset", "device_mesh", "__class__"})
_Stages: TypeAlias = list[weakref.WeakMethod[Callable[[], str]]]


@checks_names()
class DeviceMeshFetcher(Closable, Generic[SamplesT]):
    """Fetch one rank's share of a dataset, batch by batch, as lists of sample dicts.

    It maps chunks to the rank, buffers and shuffles them, retries failed reads and substitutes unreadable samples,
    exactly as a ``DataLoader`` with the same arguments does. (``DataLoader`` is this class plus workers, collation and
    the interface that trainers expect.) Samples are decoded in the calling thread and are not collated; fetching runs
    ahead in the background. Use it in a training loop of your own, or to inspect any rank's share from a single
    process::

        mesh = DeviceMesh.from_sizes(dp_size=8, rank=3)
        for samples in DeviceMeshFetcher(dataset, device_mesh=mesh, batch_size=32):
            print([sample["__key__"] for sample in samples])

    Args:
        dataset: A ``StreamingDataset``, a ``Mixture`` or a ``Packed`` set, or a callable that makes one.
        batch_size: Samples per data-parallel rank. Give either this or ``global_batch_size``.
        global_batch_size: Samples over all data-parallel ranks.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None to detect it; see ``infra.MeshFinder``.
        last_batch: As for ``DataLoader``. With ``"pad"``, each sample's ``"__valid__"`` is False if it is padding.
        epoch_size: Samples in a virtual epoch; default: one pass over the data.
        memory_limit: Upper bound on everything this rank buffers; None as for ``DataLoader``.
        agreement_timeout: As for ``DataLoader``.

    Raises:
        ConfigError: An argument or a combination of arguments is invalid. A misspelt name raises ``OptionError``, which
            is also a ``TypeError``.
    """

    _loop: Loop

    if not TYPE_CHECKING:  # type checkers know which names there are

        def __getattr__(self, name: str) -> object:
            return look_elsewhere(self, name, OF_LOADERS)

    def __init__(
        self,
        dataset: DataSet[Any] | Callable[[], DataSet[Any]],
        batch_size: int | Schedule | None = None,
        *,
        global_batch_size: int | Schedule | None = None,
        device_mesh: Any = None,
        last_batch: str = "drop",
        epoch_size: int | None = None,
        memory_limit: int | str | None = None,
        agreement_timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._begin(dataset, device_mesh, options_of(locals()))

    def _begin(self, dataset: Any, device_mesh: Any, options: dict[str, Any]) -> None:
        """Store the options, find the mesh and open the loop of this process's place in it.

        The one beginning of every loader: of a new one, and of one that was sent to another process.
        """
        if isinstance(dataset, str):
            raise no_dataset(dataset)
        self._options = options
        self._given = self._dataset = dataset
        self._loaded: Mapping[str, Any] | None = None
        self._generation = 0
        self._counted_at = ""  # the line of the program that first asked for the length
        self._locker: PageLocker | None = None
        self.stall_report_s = seconds_or_none(
            "stall_report_s", options.get("stall_report_s", STALL_REPORT_S), "no reports"
        )
        self._stages: _Stages = []
        self._watchdog: Watchdog | None = None
        self._check: StartCheck | None = None
        self._tracing: Recorder | None = None
        self._finder = MeshFinder(device_mesh)
        self._open(self._finder.mesh)

    def _open(self, mesh: DeviceMesh) -> None:
        """Open the loop of this process's place in a mesh, by the options."""
        options = self._options
        timeout_s = seconds_or_none("agreement_timeout", options["agreement_timeout"], NO_CHECK)
        self._shape = shape_of(options, mesh)
        made = self._resolve(self._given)
        if not isinstance(made, DataSet):
            raise no_dataset(made)
        config = streaming_config(
            made.source, mesh, Replicas(), shape=self._shape, num_workers=0, num_threads=0, collate_fn=as_they_are,
            jagged=None, prefetch_factor=2, pin_memory=False, memory_limit=options["memory_limit"], pin=page_locked,
        )  # fmt: skip
        self._stream(made, config, timeout_s)

    def _resolve(self, dataset: Any) -> Any:
        """Return the dataset itself, calling the function that makes it if one was given."""
        made = dataset if isinstance(dataset, DataSet) else resolve_dataset(dataset)
        refuse_what_deals(made)
        self._given = self._dataset = made
        return made

    def _stream(self, dataset: DataSet[Any], config: LoopConfig, timeout_s: float | None) -> None:
        """Open the loop over a streamed dataset, and the check that compares it with the loops of other ranks."""
        loop: EpochLoop | StreamedLoop
        source = dataset.source
        if source.indexed:
            loop = EpochLoop(source, config)
        else:
            self._shape.check_one_size()
            loop = StreamedLoop(source, config)
        self._loop = loop
        same: dict[str, Any] = {
            "global_batch_size": self._shape.sizes.plain,
            "last_batch": self._shape.last_batch,
        }
        if (balance := config.recipe.items.balance) is not None:
            same["balance"] = balance.how
        self._check = StartCheck(source, config.mesh, same, config.replicas, timeout_s, loop.state)
        loop.announce = Announcer(dataset, loop, self._finder)

    @property
    def dataset(self) -> Any:
        """The dataset that is read: the one given, or the one that the function made.

        After ``set_weights``, and after a state with such weights was loaded, a ``Mixture`` that has them.
        """
        return self._loop.now_read(self._dataset)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh, including this process's place in it."""
        self._look_again()
        return self._finder.mesh

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self._loop.epoch

    @property
    def global_batch_size(self) -> int:
        """Samples per batch over all data-parallel ranks.

        With a schedule of batch sizes: the size of the next batch.
        """
        self._look_again()
        return self._loop.next_shape.global_batch_size

    @property
    def batch_size(self) -> int:
        """Samples in a full batch on this rank. With a schedule of batch sizes: the size of the next batch."""
        mesh = self.device_mesh
        return self._loop.next_shape.rows_of(mesh.data_rank)

    @property
    def has_ramp(self) -> bool:
        """Whether the batch size follows a schedule."""
        return not self._shape.sizes.is_constant

    @property
    def batches_left(self) -> int:
        """Batches of the current epoch that have not been received yet.

        Raises:
            TypeError: The length of the epoch is unknown, as for ``len(loader)``, and this is not its end.
        """
        self._look_again()
        self._loop.check_ends()
        place = self._loop.position.place
        return 0 if place.is_end else self._loop.left_behind(place)

    def __iter__(self) -> Batches[SamplesT]:
        """Return an iterator over the next epoch, or over the rest of the current one.

        Wrappers that read ahead call the iterator's ``hold_back``.
        """
        return self._iterated(with_state=False)

    def with_state(self) -> Batches[tuple[SamplesT, dict[str, Any]]]:
        """Return an iterator, like ``iter(loader)``, that yields each batch with the state that continues after it.

        For programs that read ahead: ``state_dict`` describes the latest batch handed out, not the one trained on. ::

            ahead = deque()
            for batch, state in loader.with_state():
                ahead.append((stage(batch), state))
                if len(ahead) > 2:
                    batch, state = ahead.popleft()
                    train_step(batch)
                    save(model, state)

        The states are those of ``state_dict``: JSON-able dicts. What is called later, such as ``seed``, is not in them.
        """
        return self._iterated(with_state=True)

    def _iterated(self, *, with_state: bool) -> Batches[Any]:
        self._look_again(to_read=True)
        if self._check is not None:
            self._check.first()
        report = partial(_report, weakref.WeakMethod(self._loop.describe), self._stages)
        self._watchdog = Watchdog(self.stall_report_s, "no batch", report)
        return self._loop.run(self._watchdog, with_state=with_state)

    def __getitems__(self, numbers: list[int]) -> list[Any]:  # what torch's DataLoader calls on a map-style dataset
        """Refuse to serve as the dataset of torch's ``DataLoader``.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"torch's DataLoader: expected a data set, got a {type(self).__name__}, which makes batches itself; "
            "iterate over it as it is, or give torch's the samples: TorchIterable(loader.dataset)"
        )

    @shows
    def __repr__(self) -> str:
        mesh, size = self.device_mesh, self.global_batch_size
        epoch = f"epoch {self.epoch}"
        with suppress(TypeError):  # of unknown length
            epoch += f" of {self._num_batches()} batches"
        workers = self._options.get("num_workers", 0)
        parts = [what_is_read(self.dataset), f"global_batch_size={size}", f"num_workers={workers}", epoch]
        parts.append(f"rank {mesh.rank} of {mesh.world_size} (found by: {self._finder.found_by})")
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
        self._look_again()
        if self._check is None:
            raise ConfigError("check_agreement: works with a StreamingDataset only")
        self._check.now(checked_seconds("check_agreement: timeout", timeout))

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; it is the same on every rank.

        Raises:
            TypeError: The dataset is a ``Mixture`` without an end.
        """
        number = self._num_batches()
        self._counted_at = self._counted_at or calling_line()
        return number

    def _num_batches(self) -> int:
        self._look_again()
        self._loop.check_ends()
        return self._loop.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``. If that epoch is already next, a loaded position is kept.

        Called with the number of the epoch in progress, it leaves the running iterator alone, and the next iterator
        starts that epoch from its beginning. Any other number ends the running iterator. A ``Mixture`` without an end
        has a single epoch: every ``iter(loader)`` continues it, and ``set_epoch`` has no effect.
        """
        self._loop.set_epoch(epoch)

    def seed(self, seed: int) -> None:
        """Shuffle with a new seed, from the next epoch that starts."""
        self._loop.set_seed(seed)

    def seen(self) -> dict[str, dict[str, float]]:
        """Count the samples drawn from each source of a ``Mixture`` up to this position, over all ranks and epochs.

        The counts are computed from the plan and the ledger, without a log or other ranks, so they are also right after
        a resume.

        Returns:
            For each source: ``samples``; ``passes``, which is ``samples`` divided by the size of the source; and with
            ``unit="tokens"`` also ``tokens``, an estimate: ``samples`` times the mean length by which the weights are
            divided. A source that has since been dropped has ``samples`` only.

        Raises:
            ConfigError: The dataset is not a ``Mixture``.
        """
        self._look_again()
        return self._loop.seen()

    def set_weights(self, weights: Mapping[str, float], *, at: int | None = None, timeout: float = 600.0) -> int:
        """Change the weights of a ``Mixture``, from a row soon after those that training has received.

        Every rank must call this at about the same step with the same weights; the ranks agree on the row through the
        job's store. All of them make the change, or none does. The change is recorded in the ledger in
        ``state_dict()``, so the run can be resumed and replayed. With exact shares the weights apply 16 steps after the
        furthest rank's; what was read ahead for later steps is planned again. With ``quotas="chunks"``, chunks that the
        shuffle window has begun are read to their end, so the change begins later and is gradual (docs/mixing.md). The
        log says at which step the new weights take effect.

        Args:
            weights: Share of each source, as for ``Mixture(weights=…)``, or of each class, as for
                ``Balanced(weights=…)``: a dict by the values of the column, or ``"balanced"``. They replace a
                ``Schedule`` as well, but not the weights of nested mixtures and curricula.
            at: Row (sample of the run, counted over all ranks) from which the weights apply, no sooner than without
                ``at``. It is needed if ranks cannot ask each other, and then all must call this at the same step.
            timeout: Seconds to wait for the other ranks, in each of two rounds.

        Returns:
            The row from which the weights apply.

        Raises:
            ConfigError: The dataset is not a mixture without an end; the weights are invalid; ``at`` is too soon (the
                message says from which row on), not a row of the run, or missing; or ``timeout`` is not a number of
                seconds.
            AgreementError: Ranks gave different weights, did not arrive in time, or one cannot make the change.
            MemoryLimitError: The new weights need more memory than ``memory_limit``.
        """
        self._look_again()
        seconds = checked_seconds("set_weights: timeout", timeout)
        return self._loop.set_weights(weights, at=at, timeout_s=seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch received: a small JSON-serializable dict, the same on every rank.

        After the last batch of an epoch, and before the loop asks for one more, it is the end of that epoch: from there
        the next iteration has no batches, and the one after it is the next epoch. Once the loop has asked, or dropped
        its iterator, it is the start of the next epoch. Batches that a wrapper such as ``DevicePrefetcher`` is still
        holding back do not count as received. A program that reads ahead by itself needs ``with_state``.
        """
        state: dict[str, Any] = self._loop.state().to_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict`` that was saved with any world size and any number of workers.

        Raises:
            StateError: The state is malformed or belongs to another dataset.
        """
        self._loop.load(self._loop.state_type.from_dict(state))
        self._loaded = state

    @property
    def generation(self) -> int:
        """How many times ``remesh`` has changed the world.

        Batches received under a lower number belong to an earlier world.
        """
        return self._generation

    def remesh(self, dp_rank: int, dp_size: int, *, at: Mapping[str, Any] | int) -> None:
        """Continue from the last committed step with more or fewer data-parallel ranks, without a restart.

        Every rank that stays or joins calls this with the rank and size that the job's quorum gives (torchft, Ray
        Train, torchrun), and then ``iter(loader)``. Batches after ``at`` are discarded, whether or not they were handed
        out, and come again: the same global batches, dealt to the new ranks. Worker processes are kept, and so are the
        chunks in memory that are needed soon. The call does not wait for other ranks. Iterators made before it raise
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
                batches that the run has committed over all epochs (of ``len(loader)`` batches each).

        Raises:
            ConfigError: A number is out of range; this is not a loader over an indexed ``StreamingDataset`` or
                ``Mixture``; or the ranks of a replica group share one reader (``replicate="broadcast"``).
            StateError: The state is malformed, or belongs to another dataset.
        """
        self._look_again()
        loop, old, size = self._loop, self._finder.mesh, self._shape.global_batch_size
        if not isinstance(loop, EpochLoop):
            raise ConfigError(f"remesh: {loop.no_remesh}")
        checked_int("remesh: dp_size", dp_size, 1, 2**31 - 1)
        mesh = old.with_data_rank(checked_int("remesh: dp_rank", dp_rank, 0, dp_size - 1), int(dp_size))
        position, number = _committed(at, size), self._generation + 1
        who = f"data-parallel rank {mesh.data_rank} of {mesh.data_world_size}"
        dropped = loop.remesh(mesh, position, f"remesh() to {who}, generation {number},") // size
        self._generation, self._shape, self._finder = number, loop.shape, MeshFinder(mesh)
        self._loaded = loop.state().to_dict()
        self._options = {**self._options, "batch_size": None, "global_batch_size": loop.shape.sizes.option}
        loop.announce = Announcer(self._dataset, loop, self._finder)
        if self._check is not None:
            self._check = self._check.opened(mesh)
        tell_of_going_on(mesh.world_size)
        place = loop.position.place
        _log.info(
            "remesh: %s (it was %d of %d), generation %d: continues in epoch %d after %d samples; %d of the batches "
            "handed out come again", who, old.data_rank, old.data_world_size, number, place.epoch, place.samples_seen,
            dropped,
        )  # fmt: skip

    def metrics(self) -> dict[str, Any]:
        """Return counters and waiting times since the loader was made; names end in their unit.

        ``bad`` lists the bad samples of the current epoch.
        """
        return self._loop.report()

    def trace(self, path: str | os.PathLike[str], steps: int = 20) -> None:
        """Record the next ``steps`` steps of this loader, and write them to a file for Perfetto or chrome://tracing.

        The file shows who did what and when: a lane for each thread that fetches or builds, each worker process, copies
        to the device, and the consumer, who waits, gets a batch, or is in its own step; arrows lead from chunks to
        batches to steps. ``shard_tools trace merge`` joins the files of several ranks and sums up where the time went.
        A step begins when its batch is handed over, and ends when the next one is asked for; recording begins now.

        The file is written when the steps are over, by the thread that then asks for a batch. With the steps so far it
        is written when an epoch ends, which does not end the recording, and when the loader is closed, which does.
        Until it is whole it has another name. If it cannot be written then, a warning says so.

        Args:
            path: Path of the file, which is replaced; ``{rank}`` stands for this process's rank.
            steps: How many.

        Raises:
            ConfigError: An argument is invalid, nothing can be written at ``path``, or an earlier trace is still being
                recorded.
        """
        number = checked_steps(steps)
        self._look_again()
        if self._tracing is not None and not self._tracing.is_over:
            done = len(self._tracing.recording.steps)
            raise ConfigError(
                f"trace: an earlier call is still recording: {done} of {self._tracing.num_steps} steps are over. Wait "
                "until its file is written, or close the loader, which writes it"
            )
        metrics, mesh = self._loop.metrics, self._finder.mesh
        about = {**here(), "world_size": mesh.world_size, "data_rank": mesh.data_rank, "asked_steps": number}
        file = TraceFile(path, mesh.rank, about)
        self._tracing = Recorder(metrics, number, partial(_place_of, weakref.ref(self)), file.write)
        weakref.finalize(self, self._tracing.close)

    def _is_iterated(self) -> bool:
        """Tell whether a loop over this loader is under way, which another iterator would end."""
        return self._loop.position.is_iterated

    def _observed(self) -> Observation:
        """Return what exporters read; from any thread, without looking for the mesh or opening anything."""
        mesh, loop = self._finder.mesh, self._loop
        place = loop.position.place
        return Observation(
            rank=mesh.rank, data_rank=mesh.data_rank, world_size=mesh.world_size, epoch=place.epoch,
            samples_seen=place.samples_seen, numbers=loop.numbers(), readers=loop.numbers_elsewhere(),
        )  # fmt: skip

    def describe(self) -> str:
        """Describe what the next batch is waiting for right now, one line per stage. May be called from any thread."""
        waiting_s = None if self._watchdog is None else self._watchdog.waiting_s
        waiting = [] if waiting_s is None else [f"the consumer has waited {waiting_s:.1f} s for a batch"]
        return "\n".join([*waiting, _report(weakref.WeakMethod(self._loop.describe), self._stages)])

    def add_stage(self, describe: Callable[[], str]) -> None:
        """Add a line from ``describe`` to this loader's reports; for stages that consume its batches.

        Args:
            describe: A bound method. It may be called from any thread, and is held by a weak reference.
        """
        self._stages[:] = [stage for stage in self._stages if stage() is not None]
        self._stages.append(weakref.WeakMethod(describe))

    def page_lock(self, locker: PageLocker | None) -> None:
        """Build batches in page-locked memory from now on; None turns this off.

        For ``DevicePrefetcher``, which holds each batch until it has been copied. Other callers must wait for their
        copies to finish before they release a batch, because worker processes reuse its memory immediately.
        """
        self._locker = locker
        self._loop.page_lock(locker)

    def close(self) -> None:
        """Stop all threads and free memory. A running iterator raises an error; the loader itself can be used again."""
        try:
            self._loop.close()
        finally:
            if self._tracing is not None:
                self._tracing.close()

    shutdown = close
    """The same method under the name that torchdata's DataLoader2 used."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to continue from here, for example under ``torch.multiprocessing.spawn``.

        If no mesh was given, the other process detects its own.
        """
        mesh = self._finder.mesh if self._finder.found_by == "given" else None
        state = self.state_dict()
        is_new = not (state["epoch"] or state["samples_seen"]) and state["next_seed"] is None and self._loaded is None
        is_new = is_new and not self._loop.position.was_seeded
        is_new = is_new and len(state.get("ledger") or ()) < 2  # else set_weights() was called
        options = {**self._options, "device_mesh": mesh}
        return {"dataset": self._given, "options": options, "state": None if is_new else state}

    def __setstate__(self, made: dict[str, Any]) -> None:
        options = dict(made["options"])
        self._begin(made["dataset"], options.pop("device_mesh"), options)
        if made["state"] is not None:
            self.load_state_dict(made["state"])

    def uncollated(self) -> Self:
        """Return another loader of the same batches, from here on, that hands out each as a list of its samples.

        They are decoded and transformed as here. ``Tickets`` reads this one's samples through it.

        Raises:
            ConfigError: This loader has options that act on whole batches.
        """
        made: Self = object.__new__(type(self))
        given = self.__getstate__()
        made.__setstate__({**given, "options": self._uncollated_options(given["options"])})
        return made

    def _uncollated_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "last_batch": _without_padding(options["last_batch"])}

    def _look_again(self, *, to_read: bool = False) -> None:
        """Open the loop anew if this process's place in the mesh has changed since the loader was made."""
        finder, old = self._finder, self._loop
        if not finder.look_again(to_read=to_read):
            return
        _log.info(
            "this process is rank %d of %d (found by: %s), unlike when the loader was made; the plan is made anew",
            finder.mesh.rank, finder.mesh.world_size, finder.found_by,
        )  # fmt: skip
        old.close()
        self._open(finder.mesh)
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
        self._loop.succeed(old)
        self.page_lock(self._locker)


def _place_of(loader: weakref.ref[DeviceMeshFetcher[Any]]) -> tuple[int, int]:
    """Return the place from which the batch comes that follows the one received last."""
    alive = loader()
    place = None if alive is None else alive._loop.position.place.onward
    return (-1, -1) if place is None else (place.epoch, place.samples_seen)


def _committed(at: Any, global_batch_size: int) -> LoaderState | int:
    """Check the argument ``at`` of ``remesh`` and return it as a state or a number of global batches.

    Raises:
        ConfigError, StateError: It is neither.
    """
    if isinstance(at, Mapping):
        return LoaderState.from_dict(at)
    if is_whole(at):
        return checked_int("remesh: at", at, 0, ENDLESS // global_batch_size)
    raise ConfigError(f"remesh: at: expected a state_dict() or a number of global batches, got {at!r}")


def _report(loop: weakref.WeakMethod[Callable[[], str]], stages: _Stages) -> str:
    """Describe the state of the loop and of all stages that consume its batches.

    Weak references: the loop keeps the watchdog that calls this, and threads and memory go with the loop at once, also
    in a job that has switched garbage collection off.
    """
    return "\n".join(describe() for part in (loop, *stages) if (describe := part()) is not None)


def shape_of(options: Mapping[str, Any], mesh: DeviceMesh) -> Shape:
    """Return the shape of batches that options ask for in a mesh."""
    return Shape.chosen(
        options["batch_size"], options["global_batch_size"], mesh.data_world_size,
        last_batch=options["last_batch"], drop_last=options.get("drop_last"), epoch_size=options["epoch_size"],
    )  # fmt: skip


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a constructor's ``locals()`` that are options."""
    return {name: value for name, value in given.items() if name not in _NOT_OPTIONS}


def _without_padding(last_batch: str) -> str:
    return "partial" if last_batch == "pad" else last_batch


def as_they_are(samples: list[Sample]) -> list[Sample]:
    """Return the samples of a batch, not collated."""
    return samples
