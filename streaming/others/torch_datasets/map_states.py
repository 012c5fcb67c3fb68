"""Track the states of a map-style dataset that has ``state_dict``: one per copy, after its latest batch.

Each worker process has a copy of the dataset; without workers there is only the dataset itself. Copies deliver in turn,
so batch k of a run is read from the k-th state in line. A worker sends its state with each batch, and the first batches
of a run carry the states from which they are read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from streaming.order.plan.state import LoaderState
from streaming.others.torch_datasets.retry import Brought
from streaming.others.torch_datasets.worker_parts import Cursor, Packet, PartsState


@dataclass(frozen=True, slots=True, kw_only=True)
class MapState(PartsState):
    """The state of one rank over a map-style dataset that has a state of its own.

    Without ``cursors`` it is the same on all ranks, and its dict is that of any other loader.
    """

    @classmethod
    def of(cls, state: LoaderState, cursors: tuple[Cursor, ...], data_rank: int, data_world_size: int) -> Self:
        """Return ``state`` with the states of the copies of the dataset."""
        same = {one.name: getattr(state, one.name) for one in fields(LoaderState)}
        return cls(**same, cursors=cursors, data_rank=data_rank, data_world_size=data_world_size)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict, which is JSON-serializable if the dataset's own state is."""
        return PartsState.to_dict(self) if self.cursors else LoaderState.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild a state from the dict of :meth:`to_dict`.

        Raises:
            StateError: The dict is malformed.
        """
        if isinstance(data, Mapping) and "cursors" in data:
            return cls._from_parts(data)
        return cls.of(LoaderState.from_dict(data), (), 0, 1)


class StatesOfCopies:
    """The states of the copies of a dataset. For one thread.

    Args:
        dataset: The dataset.
        num_workers: Number of worker processes.

    Attributes:
        line: The states in the order in which their copies deliver next; empty before any copy has delivered.
    """

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self._dataset, self._num_workers = dataset, num_workers
        self.line: tuple[Cursor, ...] = ()
        self._due: tuple[Cursor, ...] = ()
        self._begun: tuple[Cursor, ...] = ()
        self._has_run = False

    @property
    def num_copies(self) -> int:
        """Number of copies that read."""
        return max(1, self._num_workers)

    def load(self, line: tuple[Cursor, ...]) -> None:
        """Continue from the states of a checkpoint; empty if it has no fitting states."""
        self.line, self._has_run = line, self._has_run or bool(line)
        self._due = line

    def begin(self, line: tuple[Cursor, ...], *, as_made: bool) -> None:
        """Begin a run from states.

        Args:
            line: The states; empty: the dataset as it was created.
            as_made: Whether the copies are new, and stay unchanged.
        """
        loaded, self._due = self._due, ()
        if as_made:
            self.line = ()
        elif self._num_workers or loaded:  # without workers, the dataset is at its position already
            self.line = line or (self._made() if self._has_run else ())
            self._due = self.line
        self._begun = self.line or self._here()
        self._has_run = True

    def before_first_batch(self, *, running: bool) -> tuple[Cursor, ...]:
        """Return the states from which a run's first batch is read; empty if worker processes have not sent any."""
        return self._begun if running else self._here()

    def bring(self, batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Yield the indices of batches; the first batches carry the states from which they are read."""
        due, self._due = list(self._due), ()
        for number, rows in enumerate(batches):
            yield Brought(rows, due[number].state) if number < len(due) else rows

    def received(self, packet: Packet) -> None:
        """Record the state of the copy that delivered a batch: the first in line becomes the last."""
        first, *rest = self.line or self._made()
        self.line = (*rest, replace(first, state=packet.after.state))

    def _made(self) -> tuple[Cursor, ...]:
        """Return the initial positions of the copies, with the dataset's state if worker processes read."""
        state = copy.deepcopy(self._dataset.state_dict()) if self._num_workers else None
        return tuple(Cursor(worker=number, pass_number=0, state=state) for number in range(self.num_copies))

    def _here(self) -> tuple[Cursor, ...]:
        """Return the state of the dataset, if this process reads it."""
        if self._num_workers:
            return ()
        return (Cursor(worker=0, pass_number=0, state=copy.deepcopy(self._dataset.state_dict())),)


class BringsStates:
    """A batch sampler for torch's loader whose first batches carry the states from which they are read."""

    def __init__(self, sampler: Any, states: StatesOfCopies) -> None:
        self._sampler, self._states = sampler, states

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._states.bring(self._sampler)


@dataclass(frozen=True, slots=True)
class WithState:
    """Collate a batch, and add the state of the dataset after it.

    Args:
        collate: Collates samples.
        dataset: The dataset of the same process.
    """

    collate: Callable[[list[Any]], Any]
    dataset: Any

    def __call__(self, samples: list[Any]) -> Packet:
        """Return the batch with the state."""
        state = copy.deepcopy(self.dataset.state_dict())
        return Packet(batch=self.collate(samples), after=Cursor(worker=0, pass_number=0, state=state))
