"""Hold the common parts of loops over torch datasets: options, worker processes, and collation."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.context
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import collate as collate_as_torch
from torch.utils.data._utils.collate import default_collate_fn_map

from infra import DeviceMesh
from streaming.build.batches.collate import default_collate, promoted, without_rows
from streaming.build.batches.jagged import Form, checked_jagged
from streaming.common.arguments import (
    check_choice,
    check_worker_init_fn,
    checked_flag,
    checked_seed,
    checks_names,
    is_number,
)
from streaming.common.platforms import check_open_files
from streaming.errors import ConfigError
from streaming.order.plan.settings import Shape
from streaming.others.torch_datasets.retry import NoRow
from streaming.others.torch_datasets.worker_info import BeginWorker
from streaming.run.engine.workers.context import ServerContext, cure_of_refusal
from streaming.run.engine.workers.fork_server import SHARED, ForkServer
from streaming.run.engine.workers.main import BeginProcess
from streaming.run.engine.workers.surroundings import Surroundings
from streaming.run.options.loader_options import RULES, LoaderOptions
from streaming.run.replicas.options import Broadcast

Sharding = Literal["auto", "worker_info", "self", "dispatch"]
"""How an iterable dataset is divided into parts (``worker_parts``), or dealt by one rank (``dispatch``)."""

_log = logging.getLogger(__name__)

_PRELOAD = "streaming.others.torch_datasets.map_style"
"""Module that worker processes of both loops need: 0.3 s of imports, done once by the fork server for all workers."""
_FILES_OF_WORKER = 4
"""Number of files that this process opens per worker: its connection, its sentinel, and both ends of its queue. Each
tensor in transit takes another one, unless it has a name (``torch.multiprocessing.set_sharing_strategy``)."""
_FEEDER_S = 5.0  # for a daemon thread that has finished its work


_MAP_ONLY = {
    "shuffle": "an iterable data set comes in its own order; shuffle inside it, for example with a buffer, and leave "
    "this out",
    "on_error": "an iterable data set that raises ends the epoch; catch errors inside it",
    "max_retries": "a sample of an iterable data set cannot be asked for again; retry inside it",
    "max_bad_samples": "an iterable data set that raises ends the epoch; count errors inside it",
    "persistent_workers": "worker processes of an iterable data set end with each pass over it, or never with "
    "epoch_size=; leave it out",
}
_ITERABLE_ONLY = {"sharding": "samples of a map-style data set are dealt out one by one; leave it out"}


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class OrdinaryDataset:
    """Read a map-style or iterable torch dataset with options of its own.

    A dataset that needs no options can be given to ``DataLoader`` directly::

        DataLoader(dataset, 32)
        DataLoader(OrdinaryDataset(dataset, seed=3, on_error="skip"), 32)
        DataLoader(OrdinaryDataset(rows, sharding="dispatch"), 32)

    Attributes:
        dataset: The dataset, or a callable that makes one. For all other attributes, None means the default.
        shuffle: For map-style datasets (default True).
        seed: Seed of the order of a map-style dataset, and of the random numbers that an iterable one draws (default
            0).
        on_error: For map-style datasets: ``"substitute"`` (the default), ``"skip"`` or ``"raise"``; for this and the
            next two, see ``RetrySampler``.
        max_retries: For map-style datasets (default 2).
        max_bad_samples: For map-style datasets (default 0.001).
        sharding: How an iterable dataset is divided: ``"auto"`` (the default), ``"worker_info"`` or ``"self"``. If it
            cannot be divided (a cursor, a socket): ``"dispatch"``; only rank 0 iterates, itself or in one worker, and
            sends every rank its rows (docs/dispatch.md); ``DataLoader(…, replicate=Broadcast(…))`` then configures the
            sending.
        multiprocessing_context: Start method of the ``num_workers`` torch worker processes.
        persistent_workers: Whether the worker processes of a map-style dataset are kept for the next epoch (default
            True).
        timeout: Seconds that a batch from worker processes may take (default 0: no limit); see also ``stall_report_s``.
        worker_init_fn: Called in each worker process when it starts, with its number.
            ``torch.utils.data.get_worker_info().dataset`` is the dataset of that process (docs/coming-from/torch.md).
    """

    dataset: Any = field(kw_only=False)
    shuffle: bool | None = None
    seed: int | None = None
    on_error: str | None = None
    max_retries: int | None = None
    max_bad_samples: float | None = None
    sharding: Sharding | None = None
    multiprocessing_context: str | multiprocessing.context.BaseContext | None = None
    persistent_workers: bool | None = None
    timeout: float | None = None
    worker_init_fn: Callable[[int], None] | None = None

    def config(self, options: LoaderOptions[Any], shape: Shape, mesh: DeviceMesh, *, iterable: bool) -> OrdinaryConfig:
        """Return the options of a loop over this dataset.

        Args:
            options: The loader's options; some may be given in either place.
            shape: Shape of the batches.
            mesh: The mesh, including this process's place in it.
            iterable: Whether the dataset is iterable.

        Raises:
            ConfigError: An option does not apply to this dataset, or was given twice with different values.
        """
        chosen = {one.name: value for one in fields(self)[1:] if (value := getattr(self, one.name)) is not None}
        for name in [one.name for one in fields(self)[1:] if one.name in RULES]:
            if (value := getattr(options, name)) is not None and chosen.setdefault(name, value) != value:
                raise ConfigError(
                    f"{name}: OrdinaryDataset(…, {name}={chosen[name]!r}) and DataLoader(…, {name}={value!r}) "
                    "contradict each other; give one of them"
                )
        says_what_holds = {"shuffle"} if shape.epoch_size is not None else {"shuffle", "persistent_workers"}
        for name, why in (_MAP_ONLY if iterable else _ITERABLE_ONLY).items():
            if name in chosen and not (name in says_what_holds and chosen[name] is False):
                raise ConfigError(f"{name}: {why}")
        replicas = options.replicas
        replicas.check_plain(dispatch=self.sharding == "dispatch")
        if isinstance(replicas.replicate, Broadcast):
            chosen["broadcast"] = replicas.replicate
        return OrdinaryConfig(
            shape=shape, mesh=mesh, num_workers=options.num_workers, prefetch_factor=options.num_ahead,
            pin_memory=options.pin_memory, collate_fn=options.collate_fn,
            jagged=checked_jagged(options.jagged, options.collate_fn), says_sharding="sharding" in chosen, **chosen,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdinaryConfig:
    """Options of a loop over an ordinary dataset, with the defaults of ``OrdinaryDataset`` filled in.

    Attributes:
        shape: Shape of the batches.
        mesh: The mesh, including this process's place in it.
        num_workers: Number of torch worker processes; 0: this process.
        prefetch_factor: Batches requested ahead, per worker.
        pin_memory: Whether to page-lock batches, if CUDA is available.
        collate_fn: Function of the list of samples of a batch. None: ``streaming.build.batches.collate`` for dicts,
            else torch's.
        jagged: Fields of such dicts whose values are concatenated, and the form of each.
        broadcast: How the reading rank sends batches to the others, with ``sharding="dispatch"``.
        says_sharding: Whether the user chose ``sharding``.
    """

    shape: Shape
    mesh: DeviceMesh
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    jagged: Mapping[str, Form] = field(default_factory=dict)
    shuffle: bool = True
    seed: int = 0
    on_error: str = "substitute"
    max_retries: int = 2
    max_bad_samples: float = 0.001
    sharding: Sharding = "auto"
    says_sharding: bool = False
    broadcast: Broadcast = field(default_factory=Broadcast)
    multiprocessing_context: str | multiprocessing.context.BaseContext | None = None
    persistent_workers: bool = True
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        checked_seed("seed", self.seed)
        self._check_together()
        for name in ("shuffle", "persistent_workers"):
            checked_flag(name, getattr(self, name))
        check_choice("sharding", self.sharding, get_args(Sharding))
        methods, how = multiprocessing.get_all_start_methods(), self.multiprocessing_context
        if how not in {None, *methods} and not isinstance(how, multiprocessing.context.BaseContext):
            raise ConfigError(f"multiprocessing_context: expected None or one of {', '.join(methods)}, got {how!r}")

    def _check_together(self) -> None:
        check_worker_init_fn(self.worker_init_fn, self.num_workers)
        if not is_number(self.timeout) or not self.timeout >= 0:
            raise ConfigError(f"timeout: expected seconds, or 0 for no limit, got {self.timeout!r}")
        if self.timeout and not self.num_workers:
            raise ConfigError(
                "timeout: it applies to batches of worker processes, and num_workers is 0; stall_report_s= logs what a "
                "batch is waiting for"
            )
        if self.on_error == "skip" and self.shape.last_batch == "pad":
            raise ConfigError(
                'on_error="skip" leaves samples out of their batches, but last_batch="pad" keeps batches full; use '
                'on_error="substitute", or last_batch="partial"'
            )


class Workers:
    """Start the worker processes of one loop. The constructor immediately starts the server that forks them.

    Args:
        config: Options of the loop.
        num_workers: Number of worker processes.
    """

    def __init__(self, config: OrdinaryConfig, num_workers: int) -> None:
        self._config = config
        self._num_workers = num_workers
        if num_workers:
            by_file = _sharing_strategy() == "file_descriptor"
            check_open_files("num_workers", num_workers, _FILES_OF_WORKER + config.prefetch_factor * by_file)
        linux = sys.platform == "linux"  # other systems have no such server
        self._from_server = linux and num_workers > 0 and config.multiprocessing_context is None
        self._server: ForkServer | None = SHARED.borrow() if self._from_server else None
        self._context: ServerContext | None = None
        self._surroundings: Surroundings | None = None
        self._end = weakref.finalize(self, _give_back, self._server)

    def torch_options(self, begin: BeginWorker) -> dict[str, Any]:
        """Return arguments for a new ``torch.utils.data.DataLoader``, with ``begin`` as its ``worker_init_fn``.

        If an object cannot be sent to another process, workers are forked instead, with a warning.
        """
        self.forget()
        shared = (begin.dataset, self._config.collate_fn)
        config, num_workers = self._config, self._num_workers
        if self._from_server:
            try:
                self._surroundings = Surroundings.taken()
                self._context = ServerContext(
                    (one for one in shared if one is not None), preload=_PRELOAD, surroundings=self._surroundings
                )
            except Exception as error:  # a user's object may raise anything
                if cure := cure_of_refusal(error):  # not the object's fault
                    error.add_note(cure)
                    raise
                _log.warning(
                    "the data set or collate_fn cannot be sent to worker processes: %s: %s. The workers are forked "
                    "from this process instead, and may hang on locks that its threads hold. Open files, locks and "
                    'connections on their first use in the worker; or pass multiprocessing_context="fork" to accept '
                    "the risk",
                    type(error).__name__, error,
                )  # fmt: skip
        method = config.multiprocessing_context or ("fork" if self._from_server else None)
        return {
            "num_workers": num_workers,
            "prefetch_factor": config.prefetch_factor if num_workers else None,
            "pin_memory": config.pin_memory and torch.cuda.is_available(),
            "multiprocessing_context": self._context or (method if num_workers else None),
            "timeout": config.timeout if num_workers else 0,
            "worker_init_fn": begin if self._context is None else BeginProcess(begin),
        }

    def lag_behind(self) -> bool:
        """Return whether settings of this process have changed since workers started, or since the last call."""
        before, now = self._surroundings, Surroundings.taken()
        if before is None or self._context is None:  # another context, such as fork, starts the workers
            return False
        self._surroundings = self._context.surroundings = now
        return bool(now.changed_since(before))

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Replace torch's error about an ended worker process by one that explains how it ended, with cures."""
        try:
            yield
        except OSError as error:  # raised in this process when workers start; errors of workers arrive without an errno
            if self._context is not None and error.errno is not None and (cure := cure_of_refusal(error)):
                error.add_note(cure)
            raise
        except RuntimeError as error:
            why = None if self._context is None else self._context.why_ended()
            if why is None:
                raise
            raise why from why.__cause__ or error

    def close(self) -> None:
        """Release the server once the workers are gone; starting more workers acquires it again."""
        self.forget()
        self._end()

    def leave_behind(self) -> None:
        """Release everything in a forked child, because it belongs to the parent."""
        self._end.detach()
        self._context = self._server = self._surroundings = None

    def forget(self) -> None:
        """Release the objects that were sent to workers that are gone."""
        context, self._context, self._surroundings = self._context, None, None
        if context is not None:
            context.close()


def _sharing_strategy() -> str:
    strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    return strategy


def _give_back(server: ForkServer | None) -> None:
    if server is not None:
        SHARED.give_back(server)


class TorchLoader(DataLoader[Any]):
    """torch's loader, usable under any default device, on which torch would draw its seed with a CPU generator."""

    def __iter__(self) -> Any:
        """Begin an iteration."""
        with torch.device("cpu"):
            return super().__iter__()


class Collate:
    """``collate_fn`` of the config; picklable if the user's is. It is never called without samples."""

    def __init__(self, config: OrdinaryConfig) -> None:
        self._collate_fn, self._jagged = config.collate_fn, config.jagged

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of ``samples``; for a single ``NoRow``, the batch of no rows."""
        if samples and isinstance(samples[0], NoRow):
            return without_rows(self, samples[0].sample)
        if self._collate_fn is not None:
            return self._collate_fn(list(samples))
        if all(isinstance(sample, Mapping) for sample in samples):
            return default_collate(samples, jagged=self._jagged)
        if self._jagged:
            raise ConfigError(
                f"jagged={tuple(self._jagged)!r} names fields of samples that are dicts, got samples of type "
                f"{type(samples[0]).__name__}. Give dicts, or a collate_fn that calls Jagged.of([…])"
            )
        try:
            return collate_as_torch(list(samples), collate_fn_map=_by_rule())
        except RuntimeError as error:  # torch reports unequal sizes or a lack of shared memory, without a cure
            error.add_note(
                cure_of_refusal(error)
                or "samples of different sizes do not stack: give dicts, whose fields are laid end to end by "
                'DataLoader(…, jagged=("name",)), or a collate_fn that pads them or calls Jagged.of([…])'
            )
            raise


def _by_rule() -> dict[Any, Callable[..., Any]]:
    """Return torch's collate functions for numbers and tensors, with our rule for values of different types first.

    Torch's own result depends on the first value, and on whether a worker process collates.
    """
    return {kind: partial(_collate_values, function) for kind, function in default_collate_fn_map.items()}


def _collate_values(function: Callable[..., Any], values: Sequence[Any], *, collate_fn_map: Any) -> Any:
    made = promoted(values)
    return function(values, collate_fn_map=collate_fn_map) if made is None else made


def with_valid(batch: Any, valid: torch.Tensor) -> Any:
    """Return ``batch`` with its mask.

    Raises:
        ConfigError: The batch is not a dict, so it cannot hold a mask.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f'last_batch="pad" puts a mask into batch["__valid__"], so batches must be dicts; got a '
            f"{type(batch).__name__}. Give samples that are dicts, a collate_fn that returns one, or "
            f'last_batch="partial"'
        )
    return {**batch, "__valid__": valid}


def leave_behind(iterator: object) -> None:
    """Keep an iterator of torch's ``DataLoader`` in a forked child from ending the parent's worker processes."""
    if hasattr(iterator, "_shutdown"):
        iterator._shutdown = True


def shut_down(iterator: object) -> None:
    """Stop the worker processes behind an iterator of torch's ``DataLoader`` now, not when it is collected."""
    stop = getattr(iterator, "_shutdown_workers", None)  # private; otherwise collection stops them
    if stop is None:
        return
    stop()
    for queue in getattr(iterator, "_index_queues", ()):  # their threads close descriptors when they end
        thread = getattr(queue, "_thread", None)
        if thread is not None:
            thread.join(timeout=_FEEDER_S)
