"""Iterate over this rank's batches of a dataset, for training: ``DataLoader``."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from infra import DeviceMesh
from streaming.common.arguments import checked_count, checks_names
from streaming.errors import ConfigError
from streaming.loader_face import LoaderFace
from streaming.loop_core import resolved
from streaming.order.plan.settings import Shape
from streaming.others.remote import open_remote
from streaming.others.torch_datasets.as_torch import called_as_torchs, check_whole, refuse_whole
from streaming.others.torch_datasets.kinds import is_iterable, resolve_dataset
from streaming.others.torch_datasets.map_style import open_ordinary
from streaming.others.torch_datasets.options import OrdinaryDataset
from streaming.run.device.copiers import page_locked
from streaming.run.epochs.iterator import NO_STEPS, Batches
from streaming.run.epochs.micro_batches import TrainingSteps
from streaming.run.loops.opening import OpenLoop, open_shards
from streaming.run.loops.options import ELSEWHERE, refuse_change, refuse_rebuilding
from streaming.run.options.loader_options import LoaderOptions
from streaming.sets.datasets.face import DataSet
from streaming.types import BatchT
from streaming.watch.tuned.chosen import takes_tuned

_log = logging.getLogger(__name__)
_Given = ParamSpec("_Given")
_Batch = TypeVar("_Batch")


def _takes_options(
    options: Callable[_Given, LoaderOptions[_Batch]],
) -> Callable[
    [Callable[[DataLoader[_Batch], Any, LoaderOptions[_Batch]], None]],
    Callable[Concatenate[DataLoader[_Batch], Any, _Given], None],
]:
    """Decorate a constructor so that it takes the dataset and each option by name, and gets the options as one value.

    So the constructor's signature, for people and for type checkers, is that of the table of options.
    """

    def decorate(init: Callable[[DataLoader[_Batch], Any, LoaderOptions[_Batch]], None]) -> Any:
        @functools.wraps(init)
        def taking(self: DataLoader[_Batch], dataset: Any, batch_size: Any = None, **named: Any) -> None:
            init(self, dataset, options(batch_size=batch_size, **named))  # type: ignore[call-arg]

        own = [*inspect.signature(init).parameters.values()][:-1]
        taking.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*own, *inspect.signature(options).parameters.values()], return_annotation=None
        )
        return taking

    return decorate


@checks_names(ELSEWHERE)
class DataLoader(LoaderFace[BatchT]):
    """Iterate over this rank's batches of a dataset, epoch after epoch.

    Every sample of an epoch reaches exactly one data-parallel rank, every rank gets the same number of batches, and the
    content of global batch k depends only on the dataset, its order settings, the epoch and the global batch size. ::

        dataset = StreamingDataset("s3://bucket/train/")
        loader = DataLoader(dataset, batch_size=256, num_workers=8)
        for epoch in range(loader.epoch, 10):
            for batch in loader:                    # {"jpg": uint8 [B, H, W, 3], "cls": int64 [B], "__key__": list}
                train_step(batch)

    Each ``iter(loader)`` begins the next epoch. The first one after construction, ``set_epoch`` or ``load_state_dict``
    begins at the position that these set. An epoch is over when its last batch has been delivered. If a loop is left
    early, the state points to the batch that would have come next. Only one iterator is active at a time: a new one
    supersedes the old one, which then raises ``IteratorSupersededError``.

    Use a loader from one thread. A batch belongs to the caller that received it.

    Args:
        dataset: A ``StreamingDataset``, a ``Mixture`` or a ``Packed`` set, or the ``DataSet`` of a source of your own
            (CONTRIBUTING.md); a map-style or iterable torch dataset (wrapped in an ``OrdinaryDataset`` if it needs
            options of its own); or a callable that makes one of these.
        batch_size: Samples per data-parallel rank. Give either this or ``global_batch_size``. An explicit None, as in
            torch: the items of a torch dataset are batches, delivered unchanged; positions, ``epoch_size`` and ranks
            count items, and ``collate_fn`` is a function of one item.
        global_batch_size: Samples over all data-parallel ranks. Ranks get equal shares, or shares that differ by one.
            Either size may be a ``Schedule.steps`` of integers, such as ``Schedule.steps({0: 256, 10**6: 512})``: the
            size of a batch is the value at its first row, counted in samples of the run over all ranks and epochs.
        micro_batch_size: Most rows of a micro-batch. A global batch is then a *step*, and each rank's share of it comes
            in micro-batches: ``loader.steps()`` yields steps, ``iter(loader)`` their micro-batches, which
            ``len(loader)`` counts. All ranks have as many of them in a step; on a rank they differ by at most one row
            (docs/trainers.md).
        num_workers: Processes that decode and collate; 0: threads of this process.
        num_threads: Threads that decode and collate when ``num_workers`` is 0. None: one per core, up to 4; 0: the
            calling thread. With ``num_workers``: 0 means that this process builds nothing; by default it builds the
            first batches, with copies of your functions, until a worker process is ready. If no function of yours is
            involved, threads and processes decode images together, as many as the larger of the two numbers.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None to detect it from torch.distributed or,
            failing that, from the launcher. Detection is repeated until the first iteration (see ``infra.MeshFinder``).
        last_batch: What to do with samples that do not fill a global batch. ``"drop"`` leaves them out; ``"pad"`` fills
            the batch by repeating samples, which are False in ``batch["__valid__"]`` (bool [B], in every batch);
            ``"partial"`` makes a smaller batch. All ranks get the same number of batches: a rank that has no row in the
            last one gets a batch of 0 rows with the same fields, dtypes and trailing shapes. For this, a ``collate_fn``
            is not called with an empty list, but with one stand-in sample and with two, and each dimension is cut by as
            much as it grows per sample.
        epoch_size: Samples in a virtual epoch over endless repetition of the data; default: one pass over the data.
        collate_fn: Function of the list of samples (dicts) of a batch. Default: numbers and arrays of equal shape
            become tensors, with types promoted as in torch; everything else becomes a list.
        as_tuple: Entries of a batch, such as ``("jpg", "cls")``: batches are tuples of these, ``for images, labels in
            loader``, as programs written for torch's datasets of pairs expect. Other entries, such as ``"__key__"`` and
            ``"__micro__"``, can be among them.
        jagged: Fields whose size differs from sample to sample, such as ``("audio", "jpg")``: arrays, or bytes if they
            are not decoded, are concatenated into one tensor with row offsets, a ``Jagged``. A mapping chooses the
            form: ``{"audio": "nested"}`` makes torch's nested tensor, ``{"jpg": "flat"}`` is for rows that differ along
            several axes. Arrays of unequal shape in other fields stay a list.
        prefetch_factor: Batches built ahead, per worker process or thread; None means 2, as in torch. If slow batches
            hold up finished ones, up to 16 times as many, within ``memory_limit``.
        pin_memory: Page-lock the tensors of each batch (needs CUDA).
        memory_limit: Upper bound on everything this rank buffers, such as ``"4GiB"``. A run that needs more is refused
            when it starts. None: 4 GiB or, in a control group with a memory limit, this rank's part of half that limit,
            whichever is less.
        tuned: A file of options that `shard_tools bench URL --tune` found on this machine: a path or URL. It may set
            ``num_workers``, ``num_threads``, ``prefetch_factor``, ``memory_limit`` and ``pin_memory`` if you do not
            give these here (None counts as not given). One INFO line names the options it sets and the options of yours
            that are kept; a WARNING is logged if it was measured with other cores or another version.
        stall_report_s: Seconds without a batch after which a warning on ``streaming.run.epochs.watch`` reports what
            every stage is waiting for, and again each time the wait has doubled; None: never.
        remote_group: A ``RemoteGroup`` or its name: Ray actors create the dataset and read it. ``dataset`` must then be
            a function and ``device_mesh`` the mesh of the training processes; the loop yields a ``RemoteBatch`` (one
            handle per data rank) instead of a batch (docs/ray.md).
        replicate: How ranks that share a data rank get the same batches. ``"read"``: each reads for itself;
            ``"broadcast"`` (or a ``Broadcast``): one rank reads and sends its batches to the others.
        stage_fields: The entries of a batch that the first and the last pipeline stage use. Stages in between get
            batches without payload and read nothing.
        sequence: How to slice sequences among context-parallel ranks.
        balance: For packs: ``"local"`` sorts the rows of each batch by cost, most expensive first, so that the most
            expensive microbatches of all ranks coincide; ``"exchange"`` deals the packs of a global batch to the ranks
            by cost, through a gloo group, which requires all ranks to leave their loops after the same batch. None:
            keep the order.
        cost: Cost of a pack: the document length c beyond which attention costs more than everything else (default:
            61,000, for a model of 8 billion parameters); a budget, a column or arithmetic over columns of its
            documents, as text: ``"patches"``, ``"num_labels"``, ``"tokens * tokens"``; or a pure function of the
            lengths of its pieces (int64 [n]) and of the columns that its keyword-only parameters name.
        agreement_timeout: Seconds that the first iteration waits for the other ranks of the mesh, to check that all are
            about to read the same data. Ranks that differ raise an error; absent ranks cause a warning. None: no check.
        drop_last: torch's name: True means ``last_batch="drop"``, False ``"partial"``.
        shuffle: For map-style torch datasets (default True); a ``StreamingDataset`` has its own. This option and the
            next three exist for compatibility with torch's loader; ``OrdinaryDataset`` has them too.
        multiprocessing_context: Start method of the torch worker processes that read ordinary datasets.
        persistent_workers: Whether the worker processes of a map-style dataset are kept for the next epoch (default
            True). The workers of a ``StreamingDataset`` are always kept.
        timeout: Seconds that a batch from torch worker processes may take (default 0: no limit); see also
            ``stall_report_s``.
        worker_init_fn: Function of a worker's number, called in each worker process before it builds its first batch.
            It sets up anything that workers do not get from this process (docs/settings.md). With it, this process
            builds no batches before a worker is ready. ``OrdinaryDataset`` has it too.
        generator: Refused: use ``seed``.
        sampler: Refused, because this loader deals the samples itself; ``DeviceMeshSampler`` is for torch's loader.
        batch_sampler: Refused, like ``sampler``.
        pin_memory_device: Refused: use ``DevicePrefetcher``.
        in_order: Must be True: batches always come in order.

    Raises:
        ConfigError: An argument or a combination of arguments is invalid. A misspelled name raises ``OptionError``,
            which is also a ``TypeError``.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            refuse_rebuilding(name)
            return super().__getattr__(name)

    _epochs_apart = 0
    """The loader's epoch number minus the trainer's; see ``EpochSampler.set_epoch``."""

    @called_as_torchs
    @takes_tuned
    @_takes_options(LoaderOptions)
    def __init__(self, dataset: Any, options: LoaderOptions[BatchT]) -> None:
        self._begin(dataset, options)

    @staticmethod
    def _opened(dataset: Any, options: LoaderOptions[Any], shape: Shape, mesh: DeviceMesh) -> OpenLoop:
        """See ``LoaderFace``; accepts sets of shards, torch's datasets, and functions that actors call."""
        if options.remote_group is not None:
            loop = open_remote(dataset, options, shape, mesh, _made_in_actor)
            return OpenLoop(loop=loop, given=dataset, dataset=dataset, announces=False)
        made = resolved(dataset)
        if isinstance(made, DataSet):
            refuse_whole(options.collate_fn)
            return open_shards(made, options, shape, mesh, pin=page_locked)
        return _open_torch_dataset(made, options, shape, mesh)

    def steps(self) -> TrainingSteps[BatchT]:
        """Return the steps of the next epoch, or the rest of the current one, each an iterator over its micro-batches.

        Needs ``micro_batch_size``. A step is a global batch, whose rows are the same on any number of ranks. What it
        holds is known when it begins, so the loss of each micro-batch can be divided by that. ::

            for step in loader.steps():
                for micro in step:
                    (loss_sum(model, micro) / step.num_rows).backward()
                optimizer.step()

        ``len(loader.steps())`` is the number of steps in a whole epoch; ``len(loader)`` counts micro-batches.

        Raises:
            ConfigError: Batches are not cut into micro-batches.
        """
        return TrainingSteps(self._begin_steps, self._num_steps)

    def _begin_steps(self) -> Batches[BatchT]:
        if self.micro_batch_size is None:
            raise ConfigError(NO_STEPS)
        return self._iterated(with_state=False)

    def _set_trainers_epoch(self, epoch: int) -> None:
        """See ``EpochSampler.set_epoch``."""
        loop, asked = self._loop, checked_count("epoch", epoch)
        own = asked + self._epochs_apart
        if own != loop.epoch and not loop.is_counted and loop.position.has_first_batch_out:
            self._epochs_apart = loop.epoch - asked
            _log.info(
                "set_epoch(%d) by a trainer that already holds the first batch of epoch %d: it continues with this "
                "epoch, and the next ones are counted from there", asked, loop.epoch,
            )  # fmt: skip
            return
        if own not in {loop.epoch, loop.epoch + 1}:  # a trainer that counts from 0 again
            self._epochs_apart, own = 0, asked
        self.set_epoch(own)

    def __setattr__(self, name: str, value: object) -> None:
        refuse_change(name, value)
        super().__setattr__(name, value)

    @property
    def sampler(self) -> EpochSampler:
        """An object on which trainers call ``set_epoch``; it does not yield indices."""
        return EpochSampler(self)

    batch_sampler = sampler

    @property
    def num_workers(self) -> int:
        """Number of worker processes, as given. Trainers read this attribute and the next four."""
        return self._core.options.num_workers

    @property
    def prefetch_factor(self) -> int | None:
        """Batches built ahead per worker process; None without worker processes, as in torch."""
        return self._core.options.num_ahead if self.num_workers else None

    @property
    def pin_memory(self) -> bool:
        """Whether batches are page-locked, if CUDA is available."""
        return self._core.options.pin_memory

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any] | None:
        """The collate function, as given."""
        return self._core.options.collate_fn

    @property
    def drop_last(self) -> bool:
        """Whether samples that do not fill a global batch are left out."""
        return self._core.shape.last_batch == "drop"


class EpochSampler:
    """The object that trainers find as ``loader.sampler`` and ``loader.batch_sampler``; it forwards ``set_epoch``.

    It yields no indices, because the loader has already dealt the samples to the ranks. A program that tries to shard
    them again, or to skip some, gets an error that explains this.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, by the trainer's count; see ``DataLoader.set_epoch``.

        Lightning reads a batch of a loader without a length before it calls this, and counts from 0 in each ``fit``.
        The current iteration is then the trainer's ``epoch``, and later ones are counted from there.
        """
        self._loader._set_trainers_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Refuse to yield indices.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "this loader's sampler gives no indices: its batches are already split over the ranks, and it resumes from "
            "a state by itself. Give the loader to the program unchanged, without its prepare or skip functions; "
            "streaming.integrations has what Accelerate and transformers need"
        )


def _made_in_actor(dataset: Any, options: LoaderOptions[Any]) -> DataLoader[Any]:
    """Return a loader made from ``options``, inside an actor."""
    loader: DataLoader[Any] = DataLoader.__new__(DataLoader)
    loader._begin(dataset, options)
    return loader


def _open_torch_dataset(made: Any, options: LoaderOptions[Any], shape: Shape, mesh: DeviceMesh) -> OpenLoop:
    """Open the loop over a torch dataset, which may be wrapped with options of its own."""
    options.refuse("torch", made)
    shape.check_one_size()
    check_whole(options.collate_fn, shape, mesh)
    own = made if isinstance(made, OrdinaryDataset) else OrdinaryDataset(made)
    read = resolve_dataset(own.dataset)
    loop = open_ordinary(read, own.config(options, shape, mesh, iterable=is_iterable(read)))
    return OpenLoop(loop=loop, given=made, dataset=read)
