"""``DataLoader``: the loop that training runs."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import torch

from infra import DeviceMesh, MeshFinder, as_device_mesh
from streaming.batches.build import Recipe
from streaming.dataset import StreamingDataset
from streaming.engine.workers.ring import PageLocker
from streaming.errors import ConfigError
from streaming.loops.base import BaseLoop
from streaming.loops.fetcher import (
    EpochLoop,
    LoopConfig,
    checked_last_batch,
    checked_memory_limit,
    resolve_batch_size,
)  # fmt: skip
from streaming.loops.map_style import OrdinaryLoop, open_ordinary, resolve_dataset
from streaming.loops.ordinary_options import OrdinaryConfig, checked_options
from streaming.loops.streamed import StreamedLoop
from streaming.loops.watch import STALL_REPORT_S, Watchdog, Watched, checked_stall_report_s
from streaming.plan.state import LoaderState
from streaming.remote import RemoteLoop, open_remote
from streaming.replicas.options import MoreOptions, split_options
from streaming.replicas.start_check import StartCheck
from streaming.storage import redact

_log = logging.getLogger(__name__)

_NOT_OPTIONS = frozenset({"self", "dataset", "device_mesh", "more", "__class__"})


class DataLoader:
    """Batches of this process's share of a data set, epoch after epoch.

    Every sample of an epoch reaches exactly one data-parallel rank, every rank gets the same number of batches, and the
    content of global batch k depends only on the data set, its order settings, the epoch and the global batch size.

    For one thread. A batch belongs to whoever got it. Leaving the loop early is fine; the next ``for`` starts the same
    epoch anew.

    Args:
        dataset: A ``StreamingDataset``, a map-style or iterable torch data set, or a callable that makes one.
        batch_size: Samples per data-parallel rank; or give ``global_batch_size``.
        global_batch_size: Samples over all data-parallel ranks; ranks get equal shares, or shares that differ by one.
        num_workers: Processes that decode and collate; 0: threads of this process.
        num_threads: Threads that do so where ``num_workers`` is 0; None: one per core, up to 4; 0: the caller's.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None: what torch.distributed says, else the
            launcher; looked up again until the first iteration (see ``infra.MeshFinder``).
        last_batch: ``"drop"`` leaves out samples that do not fill a global batch; ``"pad"`` repeats samples and marks
            them False in ``batch["__valid__"]`` (bool [B], in every batch); ``"partial"`` gives smaller batches (of 0
            rows, where there are fewer samples than ranks).
        epoch_size: Samples in a virtual epoch over endless repetition; default: one pass over the data.
        collate_fn: Function of the list of samples (dicts) of one batch; default: equal-shaped arrays and numbers
            become tensors, everything else a list.
        prefetch_factor: Batches built ahead, per worker process or thread.
        pin_memory: Page-lock the batch's tensors (needs CUDA).
        memory_limit: For all that this rank buffers; a plan that needs more is refused at the start of an epoch.
        stall_report_s: Where no batch comes for that long, a warning on the logger ``streaming.loops.watch`` says what
            every stage waits for, and again when that time has doubled; None: never.
        more: ``remote_group``, a ``RemoteGroup`` or the name of one: Ray actors make the data set and read. ``dataset``
            is then a function, ``device_mesh`` the mesh of the processes that train, and the loop gives
            ``RemoteBatch``es, a handle for each data rank, in place of batches (docs/ray.md).
            About replicas: ``replicate``: ``"read"``: each reads for itself; ``"broadcast"`` (or a ``Broadcast``):
            one reads and sends its batches to the others. ``stage_fields``, a ``StageFields``: what the first and the
            last pipeline stage use of a batch; stages in between get batches without payload and read nothing.
            ``sequence``, a ``SequenceSlice``: context-parallel peers get their slices of the sequence.
            ``agreement_timeout`` (60 s; None: off): how long the first iteration waits for the other ranks of the mesh,
            to compare with them what it is about to read; ranks that differ are an error, absent ones a warning.
            For map-style and iterable torch data sets, which ``num_workers`` torch processes read (0: this one):
            ``shuffle``, ``seed``, ``on_error``, ``max_retries``, ``max_bad_samples``, ``sharding`` and
            ``multiprocessing_context``; see ``OrdinaryConfig``.

    Raises:
        ConfigError: An argument, or a combination, cannot work.
    """

    _inline = False
    """Batches are built by the thread that asks for them."""

    def __init__(  # noqa: PLR0913  torch's knobs, by torch's names
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        num_workers: int = 0,
        num_threads: int | None = None,
        device_mesh: Any = None,
        last_batch: str = "drop",
        epoch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        memory_limit: int | str = "4GiB",
        stall_report_s: float | None = STALL_REPORT_S,
        **more: Unpack[MoreOptions],
    ) -> None:
        options = {**locals(), **more}
        self._options = {name: value for name, value in options.items() if name not in _NOT_OPTIONS}
        self._loaded: Mapping[str, Any] | None = None
        self._locker: PageLocker | None = None
        if isinstance(dataset, str):
            raise _no_dataset(dataset)
        self.stall_report_s = checked_stall_report_s(stall_report_s)
        self._stages: _Stages = []
        self._watchdog: Watchdog | None = None
        self._check: StartCheck | None = None
        remote_group = more.pop("remote_group", None)
        if remote_group is not None:
            self.dataset, mesh = dataset, as_device_mesh(device_mesh)
            self._finder = MeshFinder(mesh)
            self._loop: EpochLoop | StreamedLoop | OrdinaryLoop | RemoteLoop = open_remote(
                dataset, DataLoader, mesh, remote_group,
                global_batch_size=resolve_batch_size(batch_size, global_batch_size, mesh),
                num_workers=num_workers, num_threads=num_threads, last_batch=last_batch, epoch_size=epoch_size,
                collate_fn=collate_fn, prefetch_factor=prefetch_factor, pin_memory=pin_memory,
                memory_limit=memory_limit, **more,
            )  # fmt: skip
            return
        if not isinstance(dataset, StreamingDataset):
            dataset = resolve_dataset(dataset)
        self.dataset = dataset
        self._finder = MeshFinder(device_mesh)
        mesh = self._finder.mesh
        global_batch_size = resolve_batch_size(batch_size, global_batch_size, mesh)
        replicas, agreement_timeout_s, ordinary = split_options(more)
        if not isinstance(dataset, StreamingDataset):
            if self._inline:
                raise _no_dataset(dataset)
            replicas.check_plain()
            self._loop = open_ordinary(
                dataset,
                OrdinaryConfig(
                    global_batch_size=global_batch_size, mesh=mesh, last_batch=checked_last_batch(last_batch),
                    epoch_size=epoch_size, num_workers=num_workers, prefetch_factor=prefetch_factor,
                    pin_memory=pin_memory, collate_fn=collate_fn, **checked_options(ordinary),
                ),
            )  # fmt: skip
            return
        if ordinary:
            raise ConfigError(
                f"{', '.join(ordinary)}: for map-style and iterable torch data sets only; a StreamingDataset has such "
                "choices itself"
            )
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn: expected a function of a list of samples, got {collate_fn!r}")
        if not isinstance(pin_memory, bool):
            raise ConfigError(f"pin_memory: expected True or False, got {pin_memory!r}")
        _check_count("num_workers", num_workers, 0)
        _check_count("num_threads", 0 if num_threads is None else num_threads, 0)
        _check_count("prefetch_factor", prefetch_factor, 1)
        _check_count("epoch_size", 1 if epoch_size is None else epoch_size, 1)
        replicas.check(dataset.on_error)
        threads = 0 if self._inline else min(4, os.cpu_count() or 1) if num_threads is None else num_threads
        recipe = Recipe(
            decoders=dataset.decoders, transform=dataset.transform, collate_fn=collate_fn, on_error=dataset.on_error,
            portion=replicas.built(mesh),
            finish=_pin if pin_memory and torch.cuda.is_available() else None,
        )  # fmt: skip
        config = LoopConfig(
            global_batch_size=global_batch_size,
            mesh=mesh,
            last_batch=checked_last_batch(last_batch),
            epoch_size=epoch_size,
            memory_limit_bytes=checked_memory_limit(memory_limit),
            num_workers=num_workers,
            num_threads=threads,
            depth=prefetch_factor * max(1, num_workers or threads),
            recipe=recipe,
            replicas=replicas,
        )
        self._loop = loop = EpochLoop(dataset, config) if dataset.indexed else StreamedLoop(dataset, config)
        options = {"global_batch_size": global_batch_size, "last_batch": last_batch}
        self._check = StartCheck(dataset, mesh, options, replicas, agreement_timeout_s, loop.state)

    @property
    def device_mesh(self) -> DeviceMesh:
        """Where this process stands among those that train."""
        self._look_again()
        return self._finder.mesh

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self._loop.epoch

    @property
    def global_batch_size(self) -> int:
        """Samples of one batch over all data-parallel ranks."""
        self._look_again()
        return self._loop.config.global_batch_size

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch in progress; after its last batch, ``epoch`` is the next one."""
        self._look_again(to_read=True)
        if self._check is not None:
            self._check.first()
        report = partial(_report, self._loop, self._stages)
        self._watchdog = Watchdog(self.stall_report_s, "no batch", report)
        return Watched(self._loop.run(), self._watchdog, self._loop.metrics)

    def check_agreement(self, timeout: float = 600.0) -> None:
        """Compare data set, order, options and position with all ranks of the mesh; all of them must call this.

        The first iteration of a loader over a ``StreamingDataset`` does the same, but goes on with a warning when ranks
        do not come within ``agreement_timeout``.

        Raises:
            AgreementError: Ranks differ; names them and their values. Or some did not come within ``timeout`` seconds.
            ConfigError: torch.distributed is not set up, or this is an ordinary data set.
        """
        self._look_again()
        if self._check is None:
            raise ConfigError("check_agreement: for a StreamingDataset only")
        self._check.now(timeout)

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        self._look_again()
        return self._loop.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; if it is the one in progress, a loaded position is kept."""
        self._loop.set_epoch(epoch)

    def seed(self, seed: int) -> None:
        """A new order, from the next epoch that starts."""
        self._loop.set_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch handed out last: small, JSON-able, the same on every rank."""
        return self._loop.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``, of any world size and number of workers.

        Raises:
            StateError: It is malformed or belongs to another data set.
        """
        state_type: Any = getattr(self._loop, "state_type", LoaderState)
        self._loop.load(state_type.from_dict(state))
        self._loaded = state

    def metrics(self) -> dict[str, Any]:
        """Counters and waits since the loader was made, by name and unit; ``bad`` lists this epoch's bad samples."""
        return self._loop.report()

    def describe(self) -> str:
        """In words, a line for each stage: what the next batch waits for at this moment. From any thread."""
        waiting_s = None if self._watchdog is None else self._watchdog.waiting_s
        waiting = [] if waiting_s is None else [f"the consumer has waited {waiting_s:.1f} s for a batch"]
        return "\n".join([*waiting, _report(self._loop, self._stages)])

    def add_stage(self, describe: Callable[[], str]) -> None:
        """Let ``describe``, a bound method of something behind this loader, add a line to its reports.

        Called in any thread. It is not kept alive.
        """
        self._stages[:] = [stage for stage in self._stages if stage() is not None]
        self._stages.append(weakref.WeakMethod(describe))

    def page_lock(self, locker: PageLocker | None) -> None:
        """Have worker processes' batches built in page-locked memory from now on; None: not any more.

        For ``DevicePrefetcher``, which keeps a batch until it is copied: nobody else may copy from such memory without
        waiting, because it is built in again as soon as the batch is let go.
        """
        self._locker = locker
        if isinstance(self._loop, BaseLoop):
            self._loop.page_lock(locker)

    def close(self) -> None:
        """Stop threads and free memory. The loader may be used again, from the start of the epoch in progress."""
        self._loop.close()

    shutdown = close
    """As DataLoader2 called it."""

    def _look_again(self, *, to_read: bool = False) -> None:
        """Plan anew where this process turns out to be another than it seemed when the loader was made."""
        finder, old = self._finder, self._loop
        if not finder.look_again(to_read=to_read):
            return
        _log.info(
            "this process is rank %d of %d (found by: %s), other than when the loader was made: planned anew",
            finder.mesh.rank, finder.mesh.world_size, finder.found_by,
        )  # fmt: skip
        state: Any = old.state()
        loaded, locker, stages = self._loaded, self._locker, self._stages
        old.close()
        DataLoader.__init__(self, self.dataset, **{**self._options, "device_mesh": finder.mesh})
        self._finder, self._stages = finder, stages
        if loaded is not None:
            self.load_state_dict(loaded)
        self._loop.set_epoch(state.epoch)
        if state.next_seed is not None:
            self._loop.set_seed(state.next_seed)
        self.page_lock(locker)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_Stages: TypeAlias = list[weakref.WeakMethod[Callable[[], str]]]


def _report(loop: EpochLoop | StreamedLoop | OrdinaryLoop | RemoteLoop, stages: _Stages) -> str:
    """What the loop and all behind it are at."""
    behind = [describe() for stage in stages if (describe := stage()) is not None]
    return "\n".join([loop.describe(), *behind])


def _no_dataset(given: object) -> ConfigError:
    what = "dataset: expected a StreamingDataset, a torch data set, or a function that makes one"
    if isinstance(given, str):
        url = redact(given)
        return ConfigError(f"{what}, got the string {url!r}; write StreamingDataset({url!r})")
    return ConfigError(f"{what}, got {given!r}")


def _check_count(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name}: expected an integer of at least {minimum}, got {value!r}")


def _pin(batch: Any) -> Any:
    """``batch`` with its tensors in page-locked memory."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return {name: _pin(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], torch.Tensor):
        return type(batch)(_pin(value) for value in batch)
    return batch
