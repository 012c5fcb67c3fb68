"""Shard iterable datasets in the worker: select the samples of its part, and track its position.

With R data-parallel ranks and W workers each, the dataset is divided into R * W *parts*, by the first of these ways
that applies:

1. ``dataset.shard(num_shards=, index=)``, as in Hugging Face's datasets, if there are enough shards; or a
   ``sharding_filter`` in a graph of torch's DataPipes. A part reads its own shards and nothing else.
2. ``sharding="worker_info"``: the dataset shards itself by ``torch.utils.data.get_worker_info()``, as torch's
   documentation shows. It sees itself as worker r * W + w of R * W, so ranks are treated like workers.
3. ``sharding="self"``: the dataset detects ranks and workers itself (webdataset's splitters); all samples are taken. 4.
Otherwise every (R * W)-th sample. Every part reads everything in the same order, so the random numbers of Python,
   NumPy and torch are the same in all parts while they read.

In cases 1 and 4 the dataset does not see that it runs in a worker, so it cannot be sharded twice. ``worker_info``
controls the view of users' other functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_sharding, get_all_graph_pipes

from streaming.common.arguments import checked_count, is_whole
from streaming.errors import ConfigError, DataError, StateError
from streaming.order.plan.state import LoaderState
from streaming.others.torch_datasets.generators import SetGenerators
from streaming.others.torch_datasets.kinds import read_up
from streaming.others.torch_datasets.options import Collate, Sharding, with_valid
from streaming.others.torch_datasets.worker_info import seen, worker_info
from streaming.types import LastBatch

_FIRST_KEYS = frozenset({"worker", "pass_number", "num_items", "state", "ended"})
"""Entries that every cursor in a state has; states of earlier versions have only these."""
_BOTH = "dataset, iterator"  # the only key of a cursor's state that holds two states


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position of one worker's part.

    To continue from it, load ``state``, read and discard ``again`` samples, and restore ``draws``.

    Attributes:
        worker: Number of the worker, from 0.
        pass_number: Pass over the dataset.
        num_items: Number of samples taken from the dataset in this pass, including those of other parts.
        state: The ``state_dict`` of the dataset or its iterator, or of both, at a point ``again`` samples earlier; that
            of the dataset alone at the start of the pass, or after its end. None if neither has a state.
        ended: Whether the part has no more samples in this pass, and no other pass follows.
        again: Number of samples before this point to read again because random numbers were drawn for them; without a
            state, all samples before it.
        draws: States of the generators drawn from in this pass, if the dataset or its iterator has a state.
        first: First states of own generators that have been drawn from; see
            ``streaming.others.torch_datasets.generators``.
    """

    worker: int
    pass_number: int
    num_items: int = 0
    state: Any = None
    ended: bool = False
    again: int = 0
    draws: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_skipped(self) -> int:
        """Number of samples to read and discard after loading the state."""
        return self.num_items if self.state is None else self.again

    @property
    def in_next_pass(self) -> Cursor:
        """Return the start of the next pass, with the state of the dataset after the end of this one.

        If the pass has not ended, only the first states of its generators are passed on.
        """
        state = self.state if self.ended else None
        return Cursor(worker=self.worker, pass_number=self.pass_number + 1, state=state, first=self.first)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for a checkpoint, which is JSON-serializable if the dataset's own state is."""
        made = {one.name: getattr(self, one.name) for one in fields(self)}
        return made | {"draws": dict(self.draws), "first": dict(self.first)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cursor:
        """Rebuild a cursor from the dict of :meth:`to_dict`.

        Raises:
            StateError: The dict is malformed.
        """
        if not isinstance(data, Mapping) or not _FIRST_KEYS <= set(data) <= set(cls.__slots__):
            raise StateError(f"state: expected the position of a worker, got {data!r}")
        for name in ("worker", "pass_number", "num_items", "again"):
            try:
                checked_count(name, data.get(name, 0))
            except ConfigError as error:
                raise StateError(f"state: {error}") from error
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsState(LoaderState):
    """The state of one rank, including the positions of its worker processes.

    Attributes:
        cursors: Position of each worker's part, in the order in which they deliver next.
        data_rank: Data rank whose state this is.
        data_world_size: Number of data ranks.
    """

    cursors: tuple[Cursor, ...] = ()
    data_rank: int = 0
    data_world_size: int = 1

    def other_place(self, data_rank: int, data_world_size: int, num_workers: int) -> str:
        """Describe how a rank and its workers differ from those that saved this state; "" if they do not."""
        was = (self.data_rank, self.data_world_size, len(self.cursors))
        if was == (data_rank, data_world_size, num_workers):
            return ""
        return (
            f"the state is of data rank {was[0]} of {was[1]} with {was[2]} workers, this is rank {data_rank} of "
            f"{data_world_size} with {num_workers}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dict, which is JSON-serializable if the dataset's own state is."""
        return {
            **LoaderState.to_dict(self),
            "cursors": [cursor.to_dict() for cursor in self.cursors],
            "data_rank": self.data_rank,
            "data_world_size": self.data_world_size,
        }

    @classmethod
    def _from_parts(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild a state from the dict of ``to_dict``, which has ``cursors``.

        Raises:
            StateError: The dict is malformed.
        """
        extra = [one.name for one in fields(PartsState)[len(fields(LoaderState)) :]]
        base = LoaderState.from_dict({name: value for name, value in data.items() if name not in extra})
        try:
            rank, world_size = (checked_count(name, data.get(name)) for name in extra[1:])
        except ConfigError as error:
            raise StateError(f"state: {error}") from error
        return cls(
            **{one.name: getattr(base, one.name) for one in fields(LoaderState)},
            cursors=tuple(Cursor.from_dict(cursor) for cursor in data["cursors"]),
            data_rank=rank,
            data_world_size=world_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A batch on its way to the training loop.

    Attributes:
        batch: The collated batch; page-locked by torch if requested.
        after: Position of the worker's part after the batch.
        is_end: Whether there is no batch, only the position after the part's end.
    """

    batch: Any
    after: Cursor
    is_end: bool = False

    def pin_memory(self) -> Packet:
        """Page-lock the batch, for torch's ``DataLoader``."""
        return replace(self, batch=pinned(self.batch))


def pinned(batch: Any) -> Any:
    """Page-lock a batch like torch's ``DataLoader``."""
    from torch.utils.data._utils.pin_memory import pin_memory  # noqa: PLC0415  private; only needed with CUDA

    return pin_memory(batch)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSettings:
    """Settings common to all workers of a rank.

    Attributes:
        first_part: Part of worker 0.
        num_parts: Number of parts over all ranks and workers.
        batch_size: Samples in a full batch of this rank.
        last_batch: What to do with samples that do not fill the last batch of a pass.
        endless: Whether passes follow each other without an end, with batches that span them.
        seed: Seed of the random numbers that the dataset draws.
        sharding: How the dataset is divided.
        goes_on: Whether the dataset in this process has itself read the previous pass, and is still at its end.
    """

    first_part: int
    num_parts: int
    batch_size: int
    last_batch: LastBatch
    endless: bool
    seed: int
    sharding: Sharding
    goes_on: bool = False


class SharedStream(IterableDataset[Packet]):
    """Iterate over the packets of the calling worker's part.

    Args:
        dataset: The user's dataset.
        settings: Settings of the rank.
        cursors: Positions to begin at, one per worker process; their ``worker`` is the part of that process.
        collate: Collates samples.
    """

    def __init__(self, dataset: Any, settings: ShareSettings, cursors: tuple[Cursor, ...], collate: Collate) -> None:
        self.dataset, self.settings, self.cursors, self.collate = dataset, settings, cursors, collate

    def __iter__(self) -> Iterator[Packet]:
        info = get_worker_info()
        is_only = info is None or len(self.cursors) == 1  # this process may be a worker of another loader
        after = self.cursors[0 if is_only else self.numbers.index(info.id)]  # type: ignore[union-attr]
        part = None if after.ended else _Part(self.dataset, self.settings, after)
        while part is not None:
            samples, after = part.take(self.settings.batch_size)
            if not samples or (len(samples) < self.settings.batch_size and self.settings.last_batch == "drop"):
                break
            yield Packet(batch=self._collated(samples), after=after)
        yield Packet(batch=None, after=after, is_end=True)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The worker number of each process, as users see it; under "worker_info", counted over all ranks."""
        first = self.settings.first_part if self.settings.sharding == "worker_info" else 0
        return tuple(first + cursor.worker for cursor in self.cursors)

    def _collated(self, samples: list[Any]) -> Any:
        if self.settings.last_batch != "pad":
            return self.collate(samples)
        size = self.settings.batch_size
        rows = [samples[number % len(samples)] for number in range(size)]
        return with_valid(self.collate(rows), torch.from_numpy(np.arange(size) < len(samples)))


class _Part:
    """The samples of one part, pass after pass."""

    def __init__(self, dataset: Any, settings: ShareSettings, cursor: Cursor) -> None:
        self._settings = settings
        self._worker, self._pass, self._num_items = cursor.worker, cursor.pass_number, cursor.num_items
        self._number = settings.first_part + cursor.worker
        self._dataset, own = cut_dataset(dataset, self._number, settings)
        self._goes_on = settings.goes_on and self._dataset is dataset
        self._stride, self._offset = (1, 0) if own else (settings.num_parts, self._number)
        self._generators = SetGenerators(self._dataset, settings.seed, cursor.first)
        self._iterator: Any = None  # of this pass, once it has begun
        self._before: tuple[int, Any] | None = (cursor.num_items - cursor.num_skipped, cursor.state)
        self._ended = False
        self._samples = self._open(cursor)

    def take(self, count: int) -> tuple[list[Any], Cursor]:
        """Return the next samples, at most ``count``, and the position after them.

        There are fewer only at the end of a pass, and never if passes are endless.
        """
        samples: list[Any] = []
        with self._generators.drawing(), self._seen():
            while len(samples) < count:
                if len(samples) == count - 1:
                    self._look_back()
                sample = next(self._samples, _END)
                if sample is not _END:
                    samples.append(sample)
                elif not self._settings.endless:
                    self._ended = True
                    break
                else:
                    self._next_pass()
            return samples, self._cursor()

    def _seen(self) -> AbstractContextManager[None]:
        """Make ``get_worker_info`` return the view for the dataset inside the block."""
        settings, info = self._settings, get_worker_info()
        if settings.sharding == "auto":
            return seen(None)
        if settings.sharding == "self" or (info is None and settings.num_parts == 1):
            return nullcontext()
        seed = torch.initial_seed() if info is None else info.seed
        return seen(worker_info(self._number, settings.num_parts, seed, self._dataset))

    def _look_back(self) -> None:
        """Record the position before the last sample of a batch, if the sample may draw random numbers.

        A run that continues after the batch reads this sample again. Draws at the start of a pass then use the numbers
        of that start, and later draws the numbers of this sample.
        """
        if self._iterator is not None:
            self._before = (self._num_items, self._state()) if self._has_state and self._generators.drawn() else None

    def _cursor(self) -> Cursor:
        """Return the position of this part."""
        made = Cursor(
            worker=self._worker, pass_number=self._pass, num_items=self._num_items, ended=self._ended,
            first=self._generators.first,
        )  # fmt: skip
        if self._ended:
            return replace(made, state=self._state_of_set())
        drawn = self._generators.drawn() if self._has_state else frozenset()
        if not drawn:
            return replace(made, state=self._state())
        at, state = (self._num_items, self._state()) if self._before is None else self._before
        return replace(made, state=state, again=self._num_items - at, draws=self._generators.states(drawn))

    @property
    def _has_state(self) -> bool:
        return has_state(self._iterator) or has_state(self._dataset)

    def _state(self) -> Any:
        """Return a copy of the state of the iterator or the dataset; of both, if they are separate objects."""
        one, other = self._iterator, self._dataset
        if has_state(one) and has_state(other) and one is not other:
            return copy.deepcopy({_BOTH: [other.state_dict(), one.state_dict()]})
        return next((copy.deepcopy(each.state_dict()) for each in (one, other) if has_state(each)), None)

    def _state_of_set(self) -> Any:
        """Return a copy of the state of the dataset between two iterators."""
        return copy.deepcopy(self._dataset.state_dict()) if has_state(self._dataset) else None

    def _open(self, cursor: Cursor) -> Iterator[Any]:
        """Yield the part's samples of this pass from ``cursor`` on. Lazy: runs inside ``take``."""
        state = None if self._goes_on and not cursor.num_items else cursor.state
        is_handed_on = state is not None and cursor.num_items == cursor.num_skipped
        self._iterator = self._begun(state, is_handed_on=is_handed_on)
        items = self._items(is_handed_on=is_handed_on)
        for _ in islice(items, cursor.num_skipped):
            pass
        self._generators.restore(cursor.draws)
        self._any = self._num_items > 0
        for item in items:
            mine = self._num_items % self._stride == self._offset
            self._num_items += 1
            if mine:
                self._any = True
                yield item

    def _begun(self, state: Any, *, is_handed_on: bool) -> Any:
        """Return an iterator over the dataset that continues from ``state``.

        After the end of a pass, the first iterator after ``load_state_dict`` belongs to that pass, which has ended.
        """
        is_both = isinstance(state, Mapping) and set(state) == {_BOTH}
        of_dataset, of_iterator = state[_BOTH] if is_both else (state, state)
        if is_handed_on and has_state(self._dataset):
            self._dataset.load_state_dict(of_dataset)
            iter(self._dataset)
        self._generators.begin(self._pass)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._pass)
        if state is not None and not is_handed_on and has_state(self._dataset):
            self._dataset.load_state_dict(of_dataset)
        iterator = iter(self._dataset)
        begins_anew = iterator is self._dataset  # ``iter`` may have dropped its state
        is_of_iterator = begins_anew or is_both or not has_state(self._dataset)
        if state is not None and not is_handed_on and is_of_iterator and has_state(iterator):
            iterator.load_state_dict(of_iterator)
        return iterator

    def _items(self, *, is_handed_on: bool) -> Iterator[Any]:
        """Yield the rest of the pass.

        A generator with a state from after the end of a pass finds only now that nothing is left. Then the next
        iterator belongs to this pass.
        """
        item = next(self._iterator, _END)
        if item is _END and is_handed_on:
            self._iterator = iter(self._dataset)
            item = next(self._iterator, _END)
        while item is not _END:  # "for" would restart an iterator that is the dataset itself
            yield item
            item = next(self._iterator, _END)

    def _next_pass(self) -> None:
        if self._iterator is self._dataset and not self._num_items:
            raise read_up(self._dataset)
        if not self._any:
            raise DataError(
                f"part {self._number} of {self._settings.num_parts} (data-parallel ranks times workers) has no sample "
                f"in pass {self._pass}: the data set has too few samples or shards; use fewer workers or ranks"
            )
        self._pass, self._num_items, self._iterator = self._pass + 1, 0, None
        self._before = (0, self._state_of_set())
        self._samples = self._open(Cursor(worker=self._worker, pass_number=self._pass))


def cut_dataset(dataset: Any, part: int, settings: ShareSettings) -> tuple[Any, bool]:
    """Return the dataset of a part, and whether it holds only that part (otherwise take every n-th sample)."""
    if settings.num_parts == 1:
        return dataset, True
    if has_sharding_filter(dataset):  # torch's loader also does, whatever else divides them
        apply_sharding(dataset, settings.num_parts, part)
        return dataset, True
    if settings.sharding in {"worker_info", "self"}:
        return dataset, True
    if can_shard(dataset, settings.num_parts):
        return dataset.shard(num_shards=settings.num_parts, index=part), True
    return dataset, False


def has_state(one: object) -> bool:
    """Return whether ``one`` saves and loads its position, like torchdata's ``Stateful``."""
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def has_sharding_filter(dataset: Any) -> bool:
    """Return whether ``dataset`` is a graph of DataPipes with a ``sharding_filter`` in it."""
    if not isinstance(dataset, IterDataPipe):
        return False
    return any(hasattr(pipe, "apply_sharding") for pipe in get_all_graph_pipes(traverse_dps(dataset)))


def num_shards(dataset: Any) -> int | None:
    """Return the number of shards that ``dataset.shard`` can divide; None if it cannot, or the number is unknown."""
    for name in ("num_shards", "n_shards"):
        count = getattr(dataset, name, None)
        if is_whole(count):
            return count
    return None


def can_shard(dataset: Any, num_parts: int) -> bool:
    """Return whether ``dataset.shard`` can make ``num_parts`` parts; True if the number of shards is unknown."""
    if not callable(getattr(dataset, "shard", None)):
        return False
    count = num_shards(dataset)
    return count is None or count >= num_parts


class _End:
    """Mark the end of the samples."""


_END = _End()
