"""Distinguish the kinds of torch datasets: map-style, iterable, a function that makes one, an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch.utils.data import IterableDataset

from streaming.errors import DataError


def is_map_style(dataset: object) -> bool:
    """Return whether samples can be accessed by number."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_iterable(dataset)


def is_iterable(dataset: object) -> bool:
    """Return whether samples can only be iterated."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def reads_once(dataset: object) -> bool:
    """Return whether a dataset is an iterator that cannot restart, such as a generator, a file or a reader of one.

    An iterator with an ``__iter__`` written in Python may restart there. If it does not, the loop notices at the second
    pass, which yields nothing.
    """
    if not hasattr(dataset, "__next__") or isinstance(dataset, IterableDataset) or is_map_style(dataset):
        return False
    begin = getattr(type(dataset), "__iter__", None)
    return not isinstance(begin, FunctionType) or begin is Iterator.__iter__  # the latter only returns self


def read_up(dataset: object) -> DataError:
    """Return the error for an iterator that yielded samples in one pass and none in the next."""
    return DataError(
        f"{type(dataset).__name__}: this iterator has been read to its end and does not restart in __iter__. Set it "
        "back there, or give the function that makes it, which is called for every pass"
    )


class Again:
    """An iterable over the result of a function that is called once per pass.

    Attributes:
        make: The function.
    """

    def __init__(self, make: Any) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def resolve_dataset(dataset: Any) -> Any:
    """Return the dataset, calling the function that makes it if one was given.

    A callable that makes iterators is kept, and called for every pass.
    """
    if isinstance(dataset, type) or (callable(dataset) and not is_map_style(dataset) and not is_iterable(dataset)):
        made = dataset()
        return Again(dataset) if hasattr(made, "__next__") else made
    return dataset
