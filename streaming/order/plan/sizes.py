"""Represent numbers that change with the rows of a run: ``Steps``, and batch sizes in particular: ``Sizes``.

``RunSteps`` locates the steps of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

from streaming.common.arguments import checked_count, checked_int, is_list, is_whole, resolve_batch_size
from streaming.errors import ConfigError
from streaming.order.plan.order import default_lanes
from streaming.order.plan.schedule import Schedule, value_at
from streaming.types import LastBatch

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Steps:
    """Integers by row, which counts samples of the run over all ranks and epochs. Each applies from its row on.

    A number that never changes is a single step.

    Attributes:
        steps: Rows, the first 0, and the number from each row on.

    Raises:
        ConfigError: A number is not an integer, or is out of range.
    """

    steps: tuple[tuple[int, int], ...]

    _name: ClassVar[str] = "steps"

    def __post_init__(self) -> None:
        # Numbers may have NumPy types, and states are JSON.
        steps = [(row, checked_int(self._name, number, 1, _MOST)) for row, number in self.steps]
        object.__setattr__(self, "steps", tuple(steps))

    @classmethod
    def constant(cls, number: int) -> Self:
        """Return a number that never changes."""
        return cls(((0, number),))

    @classmethod
    def from_text(cls, text: object, name: str) -> Self:
        """Rebuild the numbers from the text of ``to_text``; ``name`` names them in messages.

        Raises:
            ConfigError: The text is malformed.
        """
        try:
            found = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            found = None
        if not is_list(found) or not found or not all(is_list(step) and len(step) == 2 for step in found):
            raise ConfigError(f"{name}: expected rows and sizes as JSON, such as '[[0, 256]]', got {text!r}")
        steps = [(checked_count(name, row), checked_int(name, size, 1, _MOST)) for row, size in found]
        if [row for row, _ in steps] != sorted({row for row, _ in steps} | {0}):
            raise ConfigError(f"{name}: expected rows that increase, the first 0, got {text!r}")
        return cls(tuple(steps))

    def to_text(self) -> str:
        """Return the numbers as a single string, because programs that save states take lists apart."""
        return json.dumps(self.steps)

    def followed_by(self, other: Steps, row: int) -> Self:
        """Return the numbers of a run that has these before a row, and those of ``other`` from the row on."""
        later = [(row, other.at(row)), *(step for step in other.steps if step[0] > row)]
        found: list[tuple[int, int]] = []
        for step in [*(step for step in self.steps if step[0] < row), *later]:
            if not found or found[-1][1] != step[1]:
                found.append(step)
        return type(self)(tuple(found))

    def goes_on_as(self, other: Steps, row: int) -> bool:
        """Return whether ``other`` has the same numbers from a row on."""
        return self.followed_by(other, row) == self.followed_by(self, row)

    def __str__(self) -> str:
        return ", ".join(f"{number:,} from row {row:,} on" for row, number in self.steps)

    @property
    def is_constant(self) -> bool:
        """Whether the number never changes."""
        return len(self.steps) == 1

    @property
    def option(self) -> int | Schedule:
        """The value of an option that gives these numbers."""
        return self.at(0) if self.is_constant else Schedule.steps(dict(self.steps))

    @property
    def plain(self) -> int | list[list[int]]:
        """The numbers as JSON for people: one number, or rows and the number from each row on."""
        return self.at(0) if self.is_constant else [list(step) for step in self.steps]

    @property
    def most(self) -> int:
        """The largest number."""
        return max(number for _, number in self.steps)

    def at(self, row: int) -> int:
        """Return the number that applies at a row."""
        steps = self.steps
        return steps[0][1] if len(steps) == 1 else value_at(steps, row)  # called once per batch

    def next_change(self, row: int) -> int | None:
        """Return the next row at which the number changes."""
        return None if len(self.steps) == 1 else next((start for start, _ in self.steps if start > row), None)


def steps_of(name: str, given: Any, example: str) -> list[tuple[int, Any]]:
    """Return an option as rows and the value from each row on, given a schedule of integers or a single value.

    Raises:
        ConfigError: The option is a dict or an invalid schedule; ``example`` is a valid one.
    """
    if isinstance(given, Mapping):
        raise ConfigError(f"{name}: numbers by row are a schedule; write Schedule.steps({dict(given)})")
    if not isinstance(given, Schedule):
        return [(0, given)]
    steps = given.segments()
    if given.shape != "steps" or not all(is_whole(number) and number >= 1 for _, number in steps):
        raise ConfigError(f"{name}: expected an integer, or Schedule.steps of integers such as {example}; got {given}")
    return steps


@dataclass(frozen=True, slots=True)
class Sizes(Steps):
    """Global batch sizes by row. A batch has the size of its first row."""

    _name: ClassVar[str] = "global_batch_size"

    @classmethod
    def of(cls, given: int | Sizes) -> Sizes:
        """Return ``Sizes`` unchanged, and a number as the constant size of all batches."""
        return given if isinstance(given, Sizes) else cls.constant(given)

    @classmethod
    def chosen(cls, batch_size: object, global_batch_size: object, num_ranks: int) -> Self:
        """Return the sizes that a user chose: per rank or over all ranks, as an integer or a schedule of them.

        Raises:
            ConfigError: Neither or both are given, one is neither an integer nor a ``Schedule.steps`` of integers, or a
                rank would get no sample of a full batch.
        """
        given: dict[str, Any] = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        name = "batch_size" if isinstance(batch_size, Schedule) else "global_batch_size"
        steps = steps_of(name, given[name], "Schedule.steps({0: 256, 10**6: 512})")
        return cls(
            tuple((row, resolve_batch_size(num_ranks=num_ranks, **{**given, name: size})) for row, size in steps)
        )

    def batches_alike(self, row: int, num_samples: int, last_batch: LastBatch) -> int:
        """Return how many batches of the ``num_samples`` samples from a row on have the size of the first batch."""
        size, border = self.at(row), self.next_change(row)
        whole = num_samples // size if last_batch == "drop" else -(-num_samples // size)
        return max(0, whole if border is None else min(whole, -(-(border - row) // size)))

    def batches(self, row: int, num_samples: int, last_batch: LastBatch) -> int:
        """Return how many batches the ``num_samples`` samples from a row on fill."""
        if len(self.steps) == 1:  # called once per batch
            size = self.steps[0][1]
            return max(0, num_samples // size if last_batch == "drop" else -(-num_samples // size))
        found = 0
        while True:
            count, border = self.batches_alike(row, num_samples, last_batch), self.next_change(row)
            found, length = found + count, count * self.at(row)
            row, num_samples = row + length, num_samples - length
            if border is None or row < border or num_samples <= 0:
                return found

    @property
    def size_for_lanes(self) -> int:
        """The batch size that determines the default number of lanes.

        It is the greatest common divisor of all sizes, so that lanes divide each batch. If the divisor is so small that
        batches would hardly be mixed, it is the smallest size.
        """
        sizes = [size for _, size in self.steps]
        common, least = math.gcd(*sizes), min(sizes)
        return common if 2 * default_lanes(common) >= default_lanes(least) else least


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """Locate the steps of a run: its global batches, counted from the start of the run over epochs of equal size.

    The sizes are certain only from a place in an epoch on. Earlier batches of that epoch may have had other sizes,
    which were not recorded. Then no batch of the given sizes ends at the place, but a batch begins there nevertheless.

    Attributes:
        sizes: Sizes of batches by row of the run.
        epoch_size: Samples of an epoch.
        last_batch: Treatment of the samples of an epoch that do not fill a batch.
        epoch: Epoch of the place.
        seen: Samples of that epoch before the place.
    """

    sizes: Sizes
    epoch_size: int
    last_batch: LastBatch
    epoch: int = 0
    seen: int = 0

    def row_of(self, epoch: int, seen: int = 0) -> int:
        """Return the row of the run at a place."""
        return epoch * self.epoch_size + seen

    @cached_property
    def _before(self) -> tuple[int, bool]:
        row, seen = self.row_of(self.epoch), min(self.seen, self.epoch_size)
        whole, begun = (self.sizes.batches(row, seen, tail) for tail in ("drop", "partial"))
        return begun, whole == begun or seen == self.epoch_size

    @property
    def begun(self) -> int:
        """Number of batches of the place's epoch before the place."""
        return self._before[0]

    @property
    def fits(self) -> bool:
        """Whether a batch ends at the place."""
        return self._before[1]

    def count(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        row = self.row_of(epoch)
        if self.fits or epoch != self.epoch:
            return self.sizes.batches(row, self.epoch_size, self.last_batch)
        return self.begun + self.sizes.batches(row + self.seen, self.epoch_size - self.seen, self.last_batch)

    def _epochs(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield each epoch, its first step, its number of steps, and whether all later epochs have the same number."""
        first = epoch = 0
        while True:
            count = self.count(epoch)
            settled = self.sizes.next_change(self.row_of(epoch)) is None
            yield epoch, first, count, settled and (self.fits or epoch > self.epoch)
            first, epoch = first + count, epoch + 1

    def first(self, epoch: int) -> int:
        """Return the first step of an epoch."""
        for number, first, count, are_alike in self._epochs():
            if number == epoch or are_alike:
                return first + (epoch - number) * count
        raise AssertionError("epochs go on")

    def epoch_at(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and its first step.

        Raises:
            ConfigError: There is no such step.
        """
        for epoch, first, count, are_alike in self._epochs():
            if step < first + count:
                return epoch, first
            if are_alike and not count:
                raise ConfigError(f"step {step:,}: the run ends at step {first:,}: no later epoch fills one batch")
            if are_alike:
                return epoch + (step - first) // count, step - (step - first) % count
        raise AssertionError("epochs go on")

    @property
    def at(self) -> int:
        """The step that begins at the place."""
        return self.first(self.epoch) + self.begun

    @property
    def unknown(self) -> range:
        """The steps before the place whose batches had other sizes."""
        first = self.first(self.epoch)
        return range(first, first if self.fits else first + self.begun)
