"""Hand out the micro-batches of each step: ``MicroRun``, over a run of lists of them; and steps, as users see them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self

import torch

from streaming.common.arguments import is_whole
from streaming.errors import ConfigError
from streaming.run.epochs.position import Lasting, Place
from streaming.run.epochs.run import Run, RunOver
from streaming.types import BatchT


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step when it begins.

    Attributes:
        number: Its number in its epoch, from 0.
        num_rows: Its rows over all ranks, padding not counted; None: that is not known on one rank.
        num_micro_batches: How many micro-batches it has, the same on every rank.
        counts: Sums of the counts in its micro-batches on this rank.
    """

    number: int
    num_rows: int | None
    num_micro_batches: int
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Within:
    """A micro-batch's place in its step.

    Attributes:
        facts: The step.
        index: Number of the micro-batch in it.
    """

    facts: StepFacts
    index: int


_COUNTS = ("num_labels", "num_tokens")
"""Entries of packs that count their contents."""
STEP, MICRO = "__step__", "__micro__"
"""Entries of a micro-batch: the number of its step, and its own number in it with that of all of them."""


class StepPlaces(Protocol):
    """Know the steps of a run by their places."""

    def number_of(self, place: Place) -> int:
        """Return the number of the step at a place in its epoch, from 0."""

    def rows_of_step(self, place: Place) -> int | None:
        """Return rows of the step at a place over all ranks, padding not counted; None: one rank does not know."""

    def after_batch(self, place: Place, run: Any) -> Place:
        """Return the place after the step at a place."""


class MicroRun(RunOver):
    """Hand out the micro-batches of a run of steps one by one. For one thread, except ``close`` and ``describe``.

    Micro-batches that are dicts get two entries, ``__step__`` and ``__micro__``.

    Args:
        run: Produces, for each step, the list of its micro-batches.
        place: Place of the first step. Micro-batches of the step before the place are not delivered again.
        steps: Knows the steps.

    Attributes:
        within: Place of the last delivered micro-batch in its step; None: none was delivered.
    """

    def __init__(self, run: Run, place: Place, steps: StepPlaces) -> None:
        super().__init__(run)
        self._steps = steps
        self._next, self._skip = place, place.micro_batches
        self._left: deque[Any] = deque()
        self._facts = StepFacts(number=0, num_rows=None, num_micro_batches=0)
        self.within: Within | None = None

    def upcoming(self) -> Within:
        """Return the place of the next micro-batch in its step. Reads the step if none of it was delivered.

        Raises:
            StopIteration: There is none.
        """
        if not self._left:
            step: Sequence[Any] = next(self._run)
            place = self._next
            self._facts = StepFacts(
                number=self._steps.number_of(place), num_rows=self._steps.rows_of_step(place),
                num_micro_batches=len(step), counts=_counted(step),
            )  # fmt: skip
            self._next, skip, self._skip = self._steps.after_batch(place, None), self._skip, 0
            self._left.extend(step[skip:])
        return Within(self._facts, self._facts.num_micro_batches - len(self._left))

    def __next__(self) -> Any:
        """Return the next micro-batch."""
        self.within = self.upcoming()
        return _marked(self._left.popleft(), self.within)

    @property
    def is_inside(self) -> bool:
        """Whether more of the step follows the last delivered micro-batch."""
        return bool(self._left)


def _marked(batch: Any, within: Within) -> Any:
    """Return a micro-batch that names its place; unchanged if it is no dict.

    Raises:
        ConfigError: It has such an entry already.
    """
    if not isinstance(batch, dict):
        return batch
    for name in (STEP, MICRO):
        if name in batch:
            raise ConfigError(
                f"micro_batch_size: batches have an entry {name!r} already, but that name says where a micro-batch is: "
                "the number of its step, or (number, of how many). Give the field, or the entry that collate_fn "
                "returns, another name"
            )
    marked = copy.copy(batch)  # a function may return one dict again and again
    marked[STEP], marked[MICRO] = within.facts.number, (within.index, within.facts.num_micro_batches)
    return marked


def _counted(step: Sequence[Any]) -> dict[str, int]:
    """Return the sum of each count that every micro-batch has."""
    if not all(isinstance(one, Mapping) for one in step):
        return {}
    said = {name: [one.get(name) for one in step] for name in _COUNTS}
    return {name: sum(map(int, values)) for name, values in said.items() if all(map(_is_number, values))}


def _is_number(value: Any) -> bool:
    """Tell whether it is a whole number, or a tensor of one, and not a field of that name."""
    return is_whole(value) or (isinstance(value, torch.Tensor) and not value.ndim and not value.is_floating_point())


class MicroBatches(Protocol):
    """An iterator over micro-batches that knows their steps."""

    def __next__(self) -> Any:
        """Return the next micro-batch."""

    def upcoming(self) -> Within:
        """Return the place in its step of the micro-batch that comes next, without handing it out.

        Raises:
            StopIteration: There is none.
        """


class TrainingStep(Generic[BatchT]):
    """One step of training on one rank: an iterator over its micro-batches, which can be taken once.

    ``len(step)`` is the number that are left to take.

    Attributes:
        number: Number of the step in its epoch, from 0, as in ``batch["__step__"]``; also after a resume. It counts as
            if the whole epoch had the sizes of this loader, so it jumps where a resume changes ``global_batch_size``.
        num_micro_batches: Micro-batches of the step, the same on every rank; also those before the state from which a
            run resumed inside the step.
    """

    def __init__(self, begins: Within, batches: MicroBatches) -> None:
        self._facts, self._batches = begins.facts, batches
        self._left = begins.facts.num_micro_batches - begins.index
        self.number = begins.facts.number
        self.num_micro_batches = begins.facts.num_micro_batches

    @property
    def num_rows(self) -> int:
        """Rows of the step over all ranks, those that fill the last one up not counted.

        Raises:
            ConfigError: With ``on_error="skip"`` a rank does not know which rows of others are masked.
        """
        if self._facts.num_rows is None:
            raise ConfigError(
                'step.num_rows: with on_error="skip" a rank does not know how many rows others could not read. Sum '
                'batch["__valid__"] over micro-batches and ranks, or use on_error="substitute"'
            )
        return self._facts.num_rows

    @property
    def num_labels(self) -> int:
        """Labels in all micro-batches of the step on this rank, for packs; sum it over the data-parallel ranks.

        Raises:
            ConfigError: Micro-batches do not have this count.
        """
        return self._count("num_labels")

    @property
    def num_tokens(self) -> int:
        """Tokens in all micro-batches of the step on this rank, like ``num_labels``."""
        return self._count("num_tokens")

    def _count(self, name: str) -> int:
        if name not in self._facts.counts:
            raise ConfigError(
                f"step.{name}: not every micro-batch says its {name!r}. Packs do; let a collate_fn return a dict with "
                "that number, and stage_fields name it"
            )
        return self._facts.counts[name]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchT:
        """Return the next micro-batch."""
        if not self._left:
            raise StopIteration
        batch: BatchT = next(self._batches)
        self._left -= 1
        return batch

    def __len__(self) -> int:
        return self._left


class TrainingSteps(Generic[BatchT]):
    """The steps of the next epoch, or of the rest of the current one, each an iterator over its micro-batches.

    ``len`` is the number of steps in a whole epoch.

    Args:
        begin: Begins to iterate over micro-batches.
        count: Counts the steps of an epoch.
    """

    def __init__(self, begin: Callable[[], MicroBatches], count: Callable[[], int]) -> None:
        self._begin, self._count = begin, count

    def __iter__(self) -> Iterator[TrainingStep[BatchT]]:
        return Lasting(self._steps(self._begin()))

    def _steps(self, batches: MicroBatches) -> Generator[TrainingStep[BatchT], None, None]:
        step: TrainingStep[BatchT] | None = None
        while True:
            try:
                begins = batches.upcoming()
            except StopIteration:
                return
            if step is not None and len(step):
                raise ConfigError(
                    f"steps: {len(step)} of the {step.num_micro_batches} micro-batches of a step were not taken before "
                    "the next step. To leave them out, take them: list(step)"
                )
            step = TrainingStep(begins, batches)
            yield step

    def __len__(self) -> int:
        return self._count()
