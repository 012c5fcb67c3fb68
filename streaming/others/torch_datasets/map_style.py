"""Loop over map-style torch datasets, with the same interface as ``streaming.run.loops.epoch_loop.EpochLoop``.

Map-style datasets (``__getitem__`` and ``__len__``) keep all promises: exactly once, equal ends, elastic, resumable to
the batch. For iterable ones see ``streaming.others.torch_datasets.iterable``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from infra import DeviceMesh
from streaming.common.forks import in_children
from streaming.errors import ConfigError
from streaming.order.plan.permutation import hash_words
from streaming.order.plan.plan import Plan
from streaming.order.plan.state import LoaderState
from streaming.others.torch_datasets.dispatch import DispatchLoop
from streaming.others.torch_datasets.iterable import IterableLoop
from streaming.others.torch_datasets.kinds import is_iterable, is_map_style, reads_once, resolve_dataset
from streaming.others.torch_datasets.map_states import BringsStates, MapState, StatesOfCopies, WithState
from streaming.others.torch_datasets.mesh_sampler import DeviceMeshSampler, with_substitutes
from streaming.others.torch_datasets.options import (
    Collate,
    OrdinaryConfig,
    TorchLoader,
    Workers,
    leave_behind,
    shut_down,
    with_valid,
)
from streaming.others.torch_datasets.retry import RetrySampler
from streaming.others.torch_datasets.worker_info import BeginWorker
from streaming.others.torch_datasets.worker_parts import Cursor, has_state
from streaming.run.epochs.iterator import Loop
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run
from streaming.types import override

_log = logging.getLogger(__name__)


def open_ordinary(dataset: Any, config: OrdinaryConfig) -> OrdinaryLoop:
    """Return the loop for a map-style or iterable dataset, or for one that a callable returns.

    Raises:
        ConfigError: The dataset is neither, or the options are inconsistent.
    """
    dataset = resolve_dataset(dataset)
    if reads_once(dataset):
        raise ConfigError(
            f"dataset: this {type(dataset).__name__} can be read only once; give the function that makes it, which is "
            "called for every pass"
        )
    if isinstance(dataset, (str, bytes, Mapping)):
        raise ConfigError(f"dataset: expected a StreamingDataset or a torch data set, got a {type(dataset).__name__}")
    if is_iterable(dataset):
        return (DispatchLoop if config.sharding == "dispatch" else IterableLoop)(dataset, config)
    if is_map_style(dataset):
        return MapLoop(dataset, config)
    if hasattr(dataset, "fetch_unit"):
        raise ConfigError(
            f"dataset: expected what users hold of a source, got the {type(dataset).__name__} itself; write "
            "DataLoader(DataSet(source), …), with DataSet of streaming.contracts"
        )
    raise ConfigError(
        f"dataset: expected a StreamingDataset, or a map-style (__getitem__ and __len__) or iterable (__iter__) torch "
        f"data set, or a function that makes one; got {dataset!r}"
    )


class MapLoop(Loop):
    """Run epochs over a map-style dataset. Used by one thread.

    Random numbers that the dataset or ``collate_fn`` draws in worker processes are seeded by (seed, data rank); the
    promises cover the choice of samples, not the results of random transforms.

    Args:
        dataset: The dataset; ``dataset[i]`` is called in worker processes, if there are any.
        config: The options.

    Attributes:
        workers: The worker processes of the loop.
        states: The states of the dataset; None if it has no ``state_dict``.

    Raises:
        ConfigError: The options are inconsistent.
    """

    state_type = MapState

    def __init__(self, dataset: Any, config: OrdinaryConfig) -> None:
        self.dataset = dataset
        self.config = config
        self.sampler = DeviceMeshSampler(
            dataset, global_batch_size=config.shape.global_batch_size, device_mesh=config.mesh, shuffle=config.shuffle,
            seed=config.seed, last_batch=config.shape.last_batch, epoch_size=config.shape.epoch_size,
        )  # fmt: skip
        super().__init__(config.shape, self.sampler.position)
        self.samples_per_epoch = self.sampler.epoch_samples
        self._rows = _Rows(self.sampler)
        self._retry = RetrySampler(
            self._rows, dataset, on_error=config.on_error, max_retries=config.max_retries,
            max_bad_samples=config.max_bad_samples, metrics=self.metrics,
        )  # fmt: skip
        self.workers = Workers(config, config.num_workers)
        self.states = StatesOfCopies(dataset, config.num_workers) if has_state(dataset) else None
        self._loader: DataLoader[Any] | None = None
        in_children(self, MapLoop._leave_behind)

    @override
    def batches_left(self, samples_seen: int) -> int:
        return self.sampler.batches_left(samples_seen)

    @override
    def left_behind(self, place: Place) -> int:
        num_samples = self.shape.epoch_size or self.sampler.samples_at(place)
        return self.shape.batches_in(num_samples - place.samples_seen)

    @property
    def can_seek(self) -> bool:  # type: ignore[override]
        """See ``Loop``: a dataset with a state of its own must be read up to the position."""
        return self.states is None

    @property
    def num_batches(self) -> int:
        """Number of batches in the current epoch, or in the next one between epochs."""
        return len(self.sampler)

    @override
    def start(self, place: Place, seed: int | None) -> Run:
        """See ``Loop``.

        Raises:
            ConfigError: The dataset is now empty, or too small for one batch.
            AgreementError: Its length differs between ranks.
        """
        self.sampler.use_seed(seed)
        is_new = self.sampler.follow_length(place)
        self.samples_per_epoch = self.sampler.epoch_samples
        keeps = self.config.persistent_workers or not self.config.num_workers
        if is_new or not keeps:
            self._drop_workers()  # they have outdated copies of the dataset
        if self.states is not None:
            line: tuple[Cursor, ...] = place.detail or (self.states.line if seed is not None else ())
            is_beginning = place.samples_seen == 0
            if is_beginning:
                line = tuple(sorted(line, key=lambda cursor: cursor.worker))
            are_new = self.config.num_workers > 0 and self._loader is None and not line
            self.states.begin(line, as_made=is_beginning and (not keeps or are_new))
        self._rows.plan = plan = self.sampler.plan(place)
        return _MapRun(self, plan, self._retry.follow(self._open()))

    @override
    def after_batch(self, place: Place, run: Any) -> Place:
        after = super().after_batch(place, run)
        return after if self.states is None else replace(after, detail=self.states.line)

    @override
    def state_at(self, place: Place) -> LoaderState:
        """See ``Loop``; the state of this rank only, if the dataset has a state of its own."""
        state = self.sampler.state_at(place)
        if self.states is None:
            return state
        line = place.detail or self.states.before_first_batch(running=self.running is not None)
        mesh = self.config.mesh
        return MapState.of(state, line, mesh.data_rank, mesh.data_world_size) if line else state

    def load(self, state: LoaderState) -> None:
        """Continue from ``state``.

        Raises:
            StateError: The state belongs to another dataset, epoch size or kind of order.
        """
        line = self._own_states(state)
        if self.sampler.load(state, line):
            self.stop()
        self.samples_per_epoch = self.sampler.epoch_samples
        if self.states is not None:
            if not line:  # copies that have read are no longer in their initial state
                self.stop()
                self._drop_workers()
            self.states.load(line)

    def _own_states(self, state: LoaderState) -> tuple[Cursor, ...]:
        """Return the states of the copies of the dataset, if ``state`` has them for this rank and its workers."""
        cursors = state.cursors if isinstance(state, MapState) else ()
        name, mesh = type(self.dataset).__name__, self.config.mesh
        if self.states is None:
            if cursors:
                _log.warning("%s has no load_state_dict: what the state holds of it is not loaded", name)
            return ()
        if not isinstance(state, MapState) or not cursors:
            if state.samples_seen:
                _log.warning("%s has a state_dict, but this state holds none: the data set stays unchanged", name)
            return ()
        other = state.other_place(mesh.data_rank, mesh.data_world_size, self.states.num_copies)
        if other:
            _log.warning(
                "the state of a %s is that of its copy where it was saved: %s. The samples come in their order, from a "
                "data set as it was made. For its state, save and load on every rank, with the same num_workers", name,
                other,
            )  # fmt: skip
        return () if other else cursors

    def report(self) -> dict[str, Any]:
        """Return all metrics, and the bad samples of this epoch by index."""
        bad = self._retry.bad
        return {**self.metrics.snapshot(), "bad": bad}

    def close(self) -> None:
        """Stop worker processes. The loop can be used again, and then starts new ones."""
        super().close()
        self.clean_up()

    @override
    def clean_up(self) -> None:
        """See ``Loop``: after an error, torch's loader is in an unknown state."""
        self._drop_workers()
        self.workers.close()
        self._retry.close()

    def _drop_workers(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            shut_down(loader._iterator)
            loader._iterator = None

    def _leave_behind(self) -> None:
        """Forget the parent's workers in a forked child; a loop begun here starts its own."""
        self.running = None
        loader, self._loader = self._loader, None
        if loader is not None:
            leave_behind(loader._iterator)
        self.workers.leave_behind()

    def _open(self) -> DataLoader[Any]:
        """Return one loader for all epochs, so that worker processes are kept while settings stay the same."""
        if self._loader is not None and self.workers.lag_behind():
            _log.info("settings of this process have changed: worker processes are restarted with them")
            shut_down(self._loader._iterator)
            self._loader._iterator = None
        if self._loader is None:
            config = self.config
            seed = hash_words(self.sampler.order.seed, config.mesh.data_rank) >> 1
            begin = BeginWorker(
                dataset=self.dataset, numbers=tuple(range(config.num_workers)), num_workers=config.num_workers,
                then=config.worker_init_fn,
            )  # fmt: skip
            collate: Any = Collate(config)
            self._loader = TorchLoader(
                self._retry.dataset,
                batch_sampler=self._retry if self.states is None else BringsStates(self._retry, self.states),
                collate_fn=collate if self.states is None else WithState(collate, self.dataset),
                persistent_workers=config.persistent_workers and config.num_workers > 0,
                generator=torch.Generator().manual_seed(seed),
                **self.workers.torch_options(begin),
            )
        return self._loader


class _Rows:
    """The sampler for torch's loader: the rows of one plan, without counting.

    Attributes:
        plan: Plan of the next iteration.
    """

    def __init__(self, sampler: DeviceMeshSampler) -> None:
        self._sampler = sampler
        self.plan: Plan | None = None

    @property
    def epoch_samples(self) -> int:
        """Number of samples in the epoch, over all ranks."""
        return self._sampler.epoch_samples

    @property
    def mesh(self) -> DeviceMesh:
        """The sampler's mesh."""
        return self._sampler.mesh

    @property
    def epoch(self) -> int:
        """The plan's epoch."""
        return self._sampler.epoch if self.plan is None else self.plan.epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._sampler.batches_left(0)

    def __iter__(self) -> Iterator[Any]:
        """Iterate without substitutes."""
        return self.iterate_with_substitutes(0)

    def iterate_with_substitutes(self, count: int) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """See ``DeviceMeshSampler``."""
        if self.plan is not None:
            yield from starmap(with_substitutes, self._sampler.rows(self.plan, count))

    def stand_in(self, batch: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Return an index with ``count`` substitutes, as a template for a batch that has no rows on this rank."""
        if self.plan is None:
            raise ConfigError("no plan has begun")
        return self._sampler.row_of_others(self.plan, batch, count)


class _MapRun:
    """The batches of one plan, from torch's loader."""

    def __init__(self, loop: MapLoop, plan: Plan, batches: Iterator[Any]) -> None:
        self._loop, self._plan, self._batches = loop, plan, batches
        self._number = 0
        self._waiting = False

    def __next__(self) -> Any:
        """Return the next batch."""
        self._waiting = True
        try:
            with self._loop.metrics.timed("wait_for_batch_s"), self._loop.workers.blamed():
                batch = next(self._batches)
            self._waiting = False
            if self._loop.states is not None:
                self._loop.states.received(batch)
                batch = batch.batch
            finished = self._finished(batch)
        except StopIteration:
            raise
        except BaseException:
            self._loop.clean_up()
            raise
        self._number += 1
        return finished

    def close(self) -> None:
        """Drop the batches that were requested."""
        self._batches = iter(())

    def describe(self) -> str:
        """Describe the current activity, for reports."""
        if not self._waiting:
            return "the consumer has a batch"
        workers = self._loop.config.num_workers
        where = f"{workers} torch worker processes" if workers else "this process"
        return f"waiting for {type(self._loop.dataset).__name__}[…] and collate_fn in {where}"

    def _finished(self, batch: Any) -> Any:
        config = self._loop.config
        if config.shape.last_batch == "pad":
            rows = self._plan.rank_batches(self._number, self._number + 1, config.mesh.data_rank)
            return with_valid(batch, torch.from_numpy(rows.valid))
        return batch


OrdinaryLoop: TypeAlias = MapLoop | IterableLoop
"""The result of ``open_ordinary``."""
