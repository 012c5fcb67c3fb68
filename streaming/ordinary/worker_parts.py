"""Shard iterable datasets in the worker: which samples belong to this part, and its position.

With R data-parallel ranks and W workers each, the dataset is divided into R * W *parts*. How, best first:

1. ``dataset.shard(num_shards=, index=)``, as in Hugging Face's datasets, if there are enough shards; or a
   ``sharding_filter`` in a graph of torch's DataPipes. A part reads its own shards and nothing else.
2. ``sharding="worker_info"``: the dataset shards itself by ``torch.utils.data.get_worker_info()``, as torch's
   documentation shows. It sees itself as worker r * W + w of R * W, so that ranks are treated like workers.
3. ``sharding="self"``: the dataset knows ranks and workers by itself (webdataset's splitters); all samples are taken.
4. Otherwise every (R * W)-th sample. Every part reads everything, and in the same order: therefore the random numbers
   of Python, NumPy and torch are the same in all parts while they read.

In cases 1 and 4 the dataset does not see that it runs in a worker, so that it cannot be sharded twice. What the other
functions of users see is decided in ``ordinary.worker_info``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_sharding, get_all_graph_pipes

from streaming.arguments import checked_count, is_whole
from streaming.batches.draw_watch import generator_states, set_generator_states
from streaming.batches.draws import ALL_GENERATORS, seed_generators
from streaming.errors import ConfigError, DataError, StateError
from streaming.ordinary.kinds import read_up
from streaming.ordinary.options import Collate, Sharding, with_valid
from streaming.ordinary.worker_info import seen, worker_info
from streaming.plan.permutation import hash_words
from streaming.types import LastBatch

_BOTH = "dataset, iterator"  # the only key of a cursor's state that holds two states


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position of one worker's part.

    Attributes:
        worker: Number of the worker, from 0.
        pass_number: Pass over the dataset.
        num_items: Number of samples taken from the dataset in this pass, including those of other parts.
        state: The ``state_dict`` of the dataset or its iterator at that point, or of both; None if they have none.
        ended: The part has no more samples in this pass, and no other pass follows.
    """

    worker: int
    pass_number: int
    num_items: int = 0
    state: Any = None
    ended: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for a checkpoint, which is JSON-serializable if the dataset's own state is."""
        return {**asdict(replace(self, state=None)), "state": self.state}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cursor:
        """Rebuild a cursor from the dict of :meth:`to_dict`.

        Raises:
            StateError: The dict is malformed.
        """
        if not isinstance(data, Mapping) or set(data) != set(cls.__slots__):
            raise StateError(f"state: expected the position of a worker, got {data!r}")
        for name in ("worker", "pass_number", "num_items"):
            try:
                checked_count(name, data[name])
            except ConfigError as error:
                raise StateError(f"state: {error}") from error
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A batch on its way to the training loop.

    Attributes:
        batch: The collated batch; page-locked by torch if requested.
        after: Position of the worker's part after it.
    """

    batch: Any
    after: Cursor

    def pin_memory(self) -> Packet:
        """Page-lock the batch, for torch's ``DataLoader``."""
        return replace(self, batch=pinned(self.batch))


def pinned(batch: Any) -> Any:
    """Page-lock a batch as torch's ``DataLoader`` does."""
    from torch.utils.data._utils.pin_memory import pin_memory  # noqa: PLC0415  private, and only with CUDA

    return pin_memory(batch)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSettings:
    """Settings common to all workers of a rank.

    Attributes:
        first_part: Part of worker 0.
        num_parts: Number of parts over all ranks and workers.
        batch_size: Samples in a full batch of this rank.
        last_batch: What to do with samples that do not fill the last batch of a pass.
        endless: Passes follow each other without an end, and batches span them.
        seed: Seed of the random numbers that the dataset draws.
        sharding: How the dataset is divided.
    """

    first_part: int
    num_parts: int
    batch_size: int
    last_batch: LastBatch
    endless: bool
    seed: int
    sharding: Sharding


class SharedStream(IterableDataset[Packet]):
    """Iterate over the packets of the part of the worker that iterates.

    Args:
        dataset: The user's dataset.
        settings: Settings of the rank.
        cursors: Positions to begin at, one per worker process; ``worker`` says which part that process has.
        collate: Collates samples.
    """

    def __init__(self, dataset: Any, settings: ShareSettings, cursors: tuple[Cursor, ...], collate: Collate) -> None:
        self.dataset, self.settings, self.cursors, self.collate = dataset, settings, cursors, collate

    def __iter__(self) -> Iterator[Packet]:
        info = get_worker_info()
        is_only = info is None or len(self.cursors) == 1  # this process may be a worker of another loader
        cursor = self.cursors[0 if is_only else self.numbers.index(info.id)]  # type: ignore[union-attr]
        if cursor.ended:
            return
        part = _Part(self.dataset, self.settings, cursor)
        while True:
            samples = part.take(self.settings.batch_size)
            if not samples or (len(samples) < self.settings.batch_size and self.settings.last_batch == "drop"):
                return
            yield Packet(batch=self._collated(samples), after=part.cursor())

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of the worker in each process, as users see it; under "worker_info" counted over all ranks."""
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
        self._stride, self._offset = (1, 0) if own else (settings.num_parts, self._number)
        self._rng = _Rng()
        self._ended = False
        self._samples = self._open(cursor.state)

    def take(self, count: int) -> list[Any]:
        """Return the next samples, at most ``count``.

        Fewer come only at the end of a pass, never if passes are endless.
        """
        samples: list[Any] = []
        with self._rng, self._seen():
            while len(samples) < count:
                sample = next(self._samples, _END)
                if sample is not _END:
                    samples.append(sample)
                elif not self._settings.endless:
                    self._ended = True
                    break
                else:
                    self._next_pass()
        return samples

    def _seen(self) -> AbstractContextManager[None]:
        """Make ``get_worker_info`` return, inside the block, what the dataset shall see."""
        settings, info = self._settings, get_worker_info()
        if settings.sharding == "auto":
            return seen(None)
        if settings.sharding == "self" or (info is None and settings.num_parts == 1):
            return nullcontext()
        seed = torch.initial_seed() if info is None else info.seed
        return seen(worker_info(self._number, settings.num_parts, seed, self._dataset))

    def cursor(self) -> Cursor:
        """Return the position of this part."""
        state = None if self._ended else copy.deepcopy(self._state())  # at the end, datasets differ in this
        return Cursor(
            worker=self._worker, pass_number=self._pass, num_items=self._num_items, state=state, ended=self._ended
        )

    def _state(self) -> Any:
        """Return the state of the iterator or the dataset, which may be an object they still use.

        Both, if they are two.
        """
        one, other = self._iterator, self._dataset
        if has_state(one) and has_state(other) and one is not other:
            return {_BOTH: [other.state_dict(), one.state_dict()]}
        return next((each.state_dict() for each in (one, other) if has_state(each)), None)

    def _open(self, state: Any) -> Iterator[Any]:
        """Yield the part's samples of this pass from ``_num_items`` on. Lazy: runs inside ``take``."""
        self._rng.seed(hash_words(self._settings.seed, self._pass, 0))
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._pass)
        is_both = isinstance(state, Mapping) and set(state) == {_BOTH}
        of_dataset, of_iterator = state[_BOTH] if is_both else (state, state)
        if state is not None and has_state(self._dataset):
            self._dataset.load_state_dict(of_dataset)
        self._iterator = iter(self._dataset)
        begins_anew = self._iterator is self._dataset  # and may have forgotten its state in ``iter``
        if state is not None and has_state(self._iterator) and (begins_anew or is_both or not has_state(self._dataset)):
            self._iterator.load_state_dict(of_iterator)
        if state is None:
            for _ in range(self._num_items):
                if next(self._iterator, _END) is _END:
                    break
        self._any = self._num_items > 0
        while (item := next(self._iterator, _END)) is not _END:  # "for" would begin such an iterator again
            mine = self._num_items % self._stride == self._offset
            self._num_items += 1
            if mine:
                self._any = True
                yield item

    def _next_pass(self) -> None:
        if self._iterator is self._dataset and not self._num_items:
            raise read_up(self._dataset)
        if not self._any:
            raise DataError(
                f"part {self._number} of {self._settings.num_parts} (data-parallel ranks times workers) has no sample "
                f"in pass {self._pass}: the data set has too few samples or shards; use fewer workers or ranks"
            )
        self._pass, self._num_items = self._pass + 1, 0
        self._samples = self._open(None)


def cut_dataset(dataset: Any, part: int, settings: ShareSettings) -> tuple[Any, bool]:
    """Return the dataset of a part, and whether it holds only that part (otherwise take every n-th sample)."""
    if settings.num_parts == 1:
        return dataset, True
    if has_sharding_filter(dataset):  # torch's loader does so, too, whatever else divides them
        apply_sharding(dataset, settings.num_parts, part)
        return dataset, True
    if settings.sharding in {"worker_info", "self"}:
        return dataset, True
    if can_shard(dataset, settings.num_parts):
        return dataset.shard(num_shards=settings.num_parts, index=part), True
    return dataset, False


def has_state(one: object) -> bool:
    """Tell whether ``one`` saves and loads its position, as torchdata's ``Stateful`` does."""
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def has_sharding_filter(dataset: Any) -> bool:
    """Tell whether ``dataset`` is a graph of DataPipes with a ``sharding_filter`` in it."""
    if not isinstance(dataset, IterDataPipe):
        return False
    return any(hasattr(pipe, "apply_sharding") for pipe in get_all_graph_pipes(traverse_dps(dataset)))


def num_shards(dataset: Any) -> int | None:
    """Return the number of shards that ``dataset.shard`` can deal out; None if it cannot, or does not say."""
    for name in ("num_shards", "n_shards"):
        count = getattr(dataset, name, None)
        if is_whole(count):
            return count
    return None


def can_shard(dataset: Any, num_parts: int) -> bool:
    """Tell whether ``dataset.shard`` can make ``num_parts`` parts.

    If it does not say how many shards it has, assume so.
    """
    if not callable(getattr(dataset, "shard", None)):
        return False
    count = num_shards(dataset)
    return count is None or count >= num_parts


class _End:
    """Marks that there are no more samples."""


_END = _End()


class _Rng:
    """Separate random numbers of Python, NumPy and torch inside a ``with`` block.

    Those outside continue undisturbed.
    """

    def __init__(self) -> None:
        self._own: tuple[Any, Any, Any] | None = None
        self._outer: tuple[Any, Any, Any] | None = None

    def seed(self, seed: int) -> None:
        """Seed again. Only inside the block."""
        seed_generators(seed, ALL_GENERATORS)

    def __enter__(self) -> None:
        self._outer = generator_states()
        if self._own is not None:
            set_generator_states(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = generator_states()
        if self._outer is not None:
            set_generator_states(self._outer)
