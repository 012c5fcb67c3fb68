"""Define the base class of every dataset: its source, its length, its samples by number and in storage order."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, SupportsIndex, TypeAlias, TypeVar

import numpy as np

from streaming.common.arguments import checked_number
from streaming.common.migration_hints.names import look_elsewhere
from streaming.errors import ConfigError
from streaming.types import Int64Array, Sample, Transform


class NumberArray(Protocol):
    """Interface of arrays and tensors of whole numbers."""

    def __len__(self) -> int: ...

    def tolist(self) -> Any:
        """Return the numbers as Python integers, in nested lists if there are several dimensions."""


Numbers: TypeAlias = Sequence[int] | NumberArray
"""Numbers of samples: a list, a tuple, a range, an array or a tensor."""


class Shown(Protocol):
    """Interface of the part of a source that users see; ``streaming.run.engine.source.Source`` is what loops use.

    Attributes:
        shuffle: Whether epochs are shuffled.
        seed: Seed of the order.
    """

    shuffle: bool
    seed: int

    @property
    def fingerprint(self) -> str:
        """Identifies the samples."""

    @property
    def urls(self) -> Sequence[str]:
        """The URLs of the shards, as requested from the store; they may contain secrets."""

    @property
    def num_readable(self) -> int:
        """Number of samples that ``read`` can return."""

    def read(self, numbers: Int64Array) -> list[Sample]:
        """Return samples by number, in this order."""

    def scan(self) -> Iterator[Sample]:
        """Yield all samples in storage order, reading chunk by chunk."""

    def mapped(self, function: Transform) -> Self:
        """Return the same source that also calls ``function`` on each sample."""


ShownT = TypeVar("ShownT", bound=Shown)


class DataSet(Generic[ShownT]):
    """Hold a source, and expose the part of it that users need.

    Loops, the engine and tools use only ``source``, so the methods that they call are not repeated here. Wrap a source
    of your own in this class to give it to a ``DataLoader``: ``DataLoader(DataSet(source), batch_size=256)``.

    Args:
        source: The source, of any kind.
    """

    _noun = "sample"
    _source: ShownT

    def __init__(self, source: ShownT) -> None:
        self._source = source

    def __repr__(self) -> str:
        return f"DataSet of a {type(self._source).__name__}, {self._source.num_readable} samples"

    if not TYPE_CHECKING:  # type checkers know which names there are

        def __getattr__(self, name: str) -> object:
            return look_elsewhere(self, name, "of_datasets")

    @property
    def source(self) -> ShownT:
        """The source that loops and tools read: chunks, bytes and orders, as in ``dataset.source.chunk_samples``."""
        return self._source

    @property
    def fingerprint(self) -> str:
        """Identifies the samples, as a ``state_dict`` records them: ``dataset.fingerprint == other.fingerprint``."""
        return self._source.fingerprint

    @property
    def urls(self) -> Sequence[str]:
        """The shards in their order, which may contain secrets: ``print(len(dataset.urls), "shards")``."""
        return self._source.urls

    @property
    def shuffle(self) -> bool:
        """Whether epochs are shuffled: ``assert dataset.shuffle``; ``dataset[i]`` always counts in storage order."""
        return self._source.shuffle

    @property
    def seed(self) -> int:
        """Seed of the order that a new loader begins with: ``print(dataset.seed)``; ``loader.seed(7)`` changes it."""
        return self._source.seed

    def __len__(self) -> int:
        """Return the number of samples: ``len(dataset)``."""
        return self._source.num_readable

    def map(self, function: Transform) -> Self:
        """Return a data set of the same samples that also calls ``function`` on each: ``dataset.map(resize)``.

        Raises:
            ConfigError: ``function`` is not a function of a sample, or this kind of set would not call it.
        """
        return reading(self, self._source.mapped(function))

    def _sliced(self, wanted: builtins.slice) -> Any:  # noqa: ARG002  some have ranges
        """Return a range of the samples, or raise an error that names what to slice instead."""
        raise ConfigError(
            f"dataset[a:b]: a {type(self._source).__name__} has no ranges; write dataset[range(a, b)], which is a list "
            "of samples"
        )

    def __getitem__(self, index: Any) -> Any:
        """Return sample ``index``, decoded and transformed; a list of samples for several numbers; or a view.

        Raises:
            IndexError: There is no such sample.
            TypeError: ``index`` is neither a number, a range, nor numbers.
            ConfigError: ``index`` is a mask, or a range that this kind of set does not support.
        """
        if isinstance(index, builtins.slice):
            return self._sliced(index)
        if isinstance(index, (list, tuple, range)) or getattr(index, "ndim", None):
            return self.__getitems__(index)
        return self._source.read(np.array([self._number(index)], np.int64))[0]

    def __getitems__(self, numbers: Numbers) -> list[Sample]:
        """Return a list of samples by number, in this order; torch's ``DataLoader`` calls this once per batch.

        Samples that lie close together are read with one request, and several requests run concurrently.

        Raises:
            IndexError: There is no such sample; the message has the number.
            ConfigError: ``numbers`` is a mask, or has several dimensions.
        """
        listed = list(numbers) if isinstance(numbers, Sequence) else numbers.tolist()
        if any(isinstance(one, list) for one in listed):
            raise ConfigError("dataset[…]: expected numbers in one dimension, got an array of several")
        if any(isinstance(one, bool) for one in listed):
            raise ConfigError(
                "dataset[…]: expected numbers of samples, got a mask of booleans; write dataset[np.flatnonzero(mask)]"
            )
        return self._source.read(np.array([self._number(one) for one in listed], np.int64))

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples once, in storage order, reading chunk by chunk; to train, use a ``DataLoader``."""
        return self._source.scan()

    def _number(self, index: SupportsIndex) -> int:
        return checked_number(index, self._source.num_readable, self._noun, "the data set has")


DataSetT = TypeVar("DataSetT", bound=DataSet[Any])


def reading(dataset: DataSetT, source: Any) -> DataSetT:
    """Return the same data set over another source of the same kind; ``dataset`` itself if the source is its own."""
    if source is dataset.source:
        return dataset
    made = copy.copy(dataset)
    made._source = source
    return made
