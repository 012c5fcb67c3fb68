"""Loop over a rank's share: ``DataLoader``, which training runs; under it is ``streaming.mesh_fetcher``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch

from infra import DeviceMesh, as_device_mesh
from streaming.arguments import checks_names, seconds_or_none
from streaming.batches.jagged import Form
from streaming.batches.portion import StageFields
from streaming.batches.sequence import SequenceSlice
from streaming.device.copiers import page_locked
from streaming.epochs.watch import STALL_REPORT_S
from streaming.errors import ConfigError
from streaming.job.agreement import DEFAULT_TIMEOUT_S
from streaming.loops.map_style import is_iterable, open_ordinary, resolve_dataset
from streaming.loops.options import (
    ELSEWHERE,
    STREAMED,
    check_one_size,
    check_streaming,
    checked_balance,
    given,
    refuse_torch_names,
    streaming_config,
    without_torchs_defaults,
)  # fmt: skip
from streaming.loops.ordinary_options import OrdinaryDataset
from streaming.loops.words import Announcer
from streaming.mesh_fetcher import NO_CHECK, DeviceMeshFetcher, options_of
from streaming.packing.balance import Balance, Cost
from streaming.plan.schedule import Schedule
from streaming.remote import RemoteGroup, open_remote
from streaming.replicas.options import Broadcast, Replicas

_BUILDING = ("num_workers", "prefetch_factor", "collate_fn", "jagged", "pin_memory")
_IN_ACTORS = (
    *("num_threads", "memory_limit", "replicate", "stage_fields", "sequence"),
    *("agreement_timeout", "balance", "cost"),
)
_OF_TORCH = ("shuffle", "multiprocessing_context", "persistent_workers", "timeout", "worker_init_fn")
"""What programs for torch's loader give, which here belongs to an ``OrdinaryDataset``."""


@checks_names(ELSEWHERE)
class DataLoader(DeviceMeshFetcher):
    """Batches of this process's share of a data set, epoch after epoch.

    Every sample of an epoch reaches exactly one data-parallel rank, every rank gets the same number of batches, and the
    content of global batch k depends only on the data set, its order settings, the epoch and the global batch size.

    Every ``iter(loader)`` begins the next epoch, but for the first one after the making, ``set_epoch`` or
    ``load_state_dict``: that begins where these say. An epoch is over when its last batch is handed out. The state of a
    loop that was left early points to the batch that would have come next. One iterator at a time: a second one
    supersedes the first, which raises ``IteratorSupersededError`` when it is asked again.

    For one thread. A batch belongs to whoever got it.

    Args:
        dataset: A ``StreamingDataset`` or ``Mixture``, a map-style or iterable torch data set (in an
            ``OrdinaryDataset`` where it needs options of its own), or a callable that makes one of these.
        batch_size: Samples per data-parallel rank; or give ``global_batch_size``.
        global_batch_size: Samples over all data-parallel ranks; ranks get equal shares, or shares that differ by one.
            Either size may be a ``Schedule.steps`` of integers, such as ``Schedule.steps({0: 256, 10**6: 512})``: a
            batch has the size that holds at its first row, counted in samples of the run over all ranks and epochs.
        num_workers: Processes that decode and collate; 0: threads of this process.
        num_threads: Threads that do so where ``num_workers`` is 0; None: one per core, up to 4; 0: the caller's.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None: what torch.distributed says, else the
            launcher; looked up again until the first iteration (see ``infra.MeshFinder``).
        last_batch: ``"drop"`` leaves out samples that do not fill a global batch; ``"pad"`` repeats samples and marks
            them False in ``batch["__valid__"]`` (bool [B], in every batch); ``"partial"`` gives smaller batches. All
            ranks get the same number of batches: one without a row in the tail gets a batch of 0 rows, of the same
            fields, dtypes and trailing shapes. A ``collate_fn`` is never called without samples for it, but with one
            and with two that stand in, and what grows with their number is cut back.
        epoch_size: Samples in a virtual epoch over endless repetition; default: one pass over the data.
        collate_fn: Function of the list of samples (dicts) of one batch; default: equal-shaped arrays and numbers
            become tensors, everything else a list.
        jagged: Fields whose size differs from sample to sample, such as ``("audio", "jpg")``: arrays, or bytes where
            they are not decoded, come end to end in one tensor with their borders, as a ``Jagged``. A mapping says the
            form: ``{"audio": "nested"}`` is torch's nested tensor, ``{"jpg": "flat"}`` is for rows that differ along
            several axes. Without, such arrays stay a list.
        prefetch_factor: Batches built ahead, per worker process or thread; None, as in torch: 2.
        pin_memory: Page-lock the batch's tensors (needs CUDA).
        memory_limit: For all that this rank buffers; a plan that needs more is refused at the start of an epoch.
        stall_report_s: Where no batch comes for that long, a warning on the logger ``streaming.epochs.watch`` says what
            every stage waits for, and again when that time has doubled; None: never.
        remote_group: A ``RemoteGroup`` or the name of one: Ray actors make the data set and read. ``dataset`` is then a
            function, ``device_mesh`` the mesh of the processes that train, and the loop gives ``RemoteBatch``es, a
            handle for each data rank, in place of batches (docs/ray.md).
        replicate: Of the ranks of one data share, ``"read"``: each reads for itself; ``"broadcast"`` (or a
            ``Broadcast``): one reads and sends its batches to the others.
        stage_fields: What the first and the last pipeline stage use of a batch; stages in between get batches without
            payload and read nothing.
        sequence: Gives context-parallel peers their slices of the sequence.
        balance: For packs: ``"local"`` puts the rows of each batch in order, the dearest first, so that the dearest
            microbatches of all ranks meet; ``"exchange"`` deals the packs of a global batch over the ranks by cost,
            over a gloo group; all ranks then leave their loops after the same batch. None: as the order deals them.
        cost: What a pack costs: a pure function of the lengths of its pieces, int64 [n], or c, the length from which a
            document costs more in attention than in all the rest; default: 61,000, as for 8 billion parameters.
        agreement_timeout: How many seconds the first iteration waits for the other ranks of the mesh, to compare with
            them what it is about to read; ranks that differ are an error, absent ones a warning. None: no comparison.
        drop_last: torch's name: True for ``last_batch="drop"``, False for ``"partial"``.
        shuffle: For map-style torch data sets (default True); a ``StreamingDataset`` has its own. This option and the
            next four are what programs for torch's loader give; ``OrdinaryDataset`` has them too.
        multiprocessing_context: How the ``num_workers`` torch processes start that read ordinary data sets.
        persistent_workers: Whether those of map-style data sets stay for the next epoch (default True); those of a
            ``StreamingDataset`` always do.
        timeout: Seconds that a batch of such processes may take (default 0: no limit); see ``stall_report_s``.
        worker_init_fn: Called in such processes as they start.
        generator: Not here: see ``seed``.
        sampler: Not here, because this loader deals out the samples; ``DeviceMeshSampler`` is for torch's loader.
        batch_sampler: As ``sampler``.
        pin_memory_device: Not here: see ``DevicePrefetcher``.
        in_order: Always.

    Raises:
        ConfigError: An argument, or a combination, cannot work. A misspelt one is an ``OptionError``, a ``TypeError``.
    """

    def __init__(  # noqa: PLR0913  torch's knobs, by torch's names
        self,
        dataset: Any,
        batch_size: int | Schedule | None = None,
        *,
        global_batch_size: int | Schedule | None = None,
        num_workers: int = 0,
        num_threads: int | None = None,
        device_mesh: Any = None,
        last_batch: str = "drop",
        epoch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        jagged: Sequence[str] | Mapping[str, Form] | None = None,
        prefetch_factor: int | None = 2,
        pin_memory: bool = False,
        memory_limit: int | str = "4GiB",
        stall_report_s: float | None = STALL_REPORT_S,
        remote_group: RemoteGroup | str | None = None,
        replicate: Literal["read", "broadcast"] | Broadcast = "read",
        stage_fields: StageFields | None = None,
        sequence: SequenceSlice | None = None,
        balance: Balance | None = None,
        cost: Cost | int | None = None,
        agreement_timeout: float | None = DEFAULT_TIMEOUT_S,
        drop_last: bool | None = None,
        shuffle: bool | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        persistent_workers: bool | None = None,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        options = without_torchs_defaults(options_of(locals()))
        refuse_torch_names(options)
        if remote_group is None:
            agreement_timeout = seconds_or_none("agreement_timeout", agreement_timeout, NO_CHECK)
        mesh = self._begin(dataset, as_device_mesh(device_mesh) if remote_group is not None else device_mesh, options)
        choices: dict[str, Any] = {name: options[name] for name in _BUILDING} | {"shape": self._shape}
        ordinary = given(**{name: options[name] for name in _OF_TORCH})
        if remote_group is not None:
            check_one_size(self._shape)
            there = {name: options[name] for name in _IN_ACTORS}
            self._loop = open_remote(dataset, DataLoader, mesh, remote_group, **there, **choices, **ordinary)
            return
        replicas = Replicas(replicate=replicate, stage_fields=stage_fields, sequence=sequence)
        made = self._resolve(dataset)
        rules = checked_balance(balance, cost, made, collate_fn=collate_fn)
        if not isinstance(made, STREAMED):
            self._open_ordinary(made, ordinary, mesh, replicas, choices)
            return
        check_streaming(ordinary, made)
        config = streaming_config(
            made, mesh, replicas, num_threads=num_threads, memory_limit=memory_limit, pin=page_locked, **choices
        )
        self._stream(made, replace(config, balance=rules), agreement_timeout)

    _make: Callable[..., None] = __init__

    def _open_ordinary(
        self, made: Any, at_the_loader: Mapping[str, Any], mesh: DeviceMesh, replicas: Replicas, choices: dict[str, Any]
    ) -> None:
        check_one_size(self._shape)
        own = made if isinstance(made, OrdinaryDataset) else OrdinaryDataset(made)
        self.dataset = read = resolve_dataset(own.dataset)
        config = own.config(at_the_loader, mesh, replicas, iterable=is_iterable(read), **choices)
        self._loop = open_ordinary(read, config)
        self._loop.announce = Announcer(read, self._loop, self._finder)

    @property
    def sampler(self) -> EpochSampler:
        """For trainers, which call ``loader.sampler.set_epoch``; it is no source of indices."""
        return EpochSampler(self)

    batch_sampler = sampler

    @property
    def num_workers(self) -> int:
        """As it was given, and so for the next four, which trainers look at."""
        return int(self._options["num_workers"])

    @property
    def prefetch_factor(self) -> int | None:
        """Batches built ahead, per worker process; None without, as torch has it (threads build as many ahead)."""
        return int(self._options["prefetch_factor"]) if self.num_workers else None

    @property
    def pin_memory(self) -> bool:
        """Whether batches are page-locked, where there is CUDA."""
        return bool(self._options["pin_memory"])

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any] | None:
        """The function that was given."""
        collate_fn: Callable[[list[Any]], Any] | None = self._options["collate_fn"]
        return collate_fn

    @property
    def drop_last(self) -> bool:
        """Whether samples that do not fill a global batch are left out."""
        return self._shape.last_batch == "drop"


class EpochSampler:
    """What trainers find as ``loader.sampler`` and ``loader.batch_sampler``: it passes ``set_epoch`` on.

    It gives no indices, because the loader has dealt the samples out to the ranks already: a program that wants to cut
    them into shares once more, or to skip some, is told so.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last

    def set_epoch(self, epoch: int) -> None:
        """See ``DataLoader.set_epoch``."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        """Count the batches in a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "this loader's sampler gives no indices: its batches are shares of the ranks, and it resumes from a state "
            "by itself. Give the loader as it is to the program, without its prepare or skip functions; "
            "streaming.integrations has what Accelerate and transformers need"
        )
