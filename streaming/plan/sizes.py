"""Size batches by the rows of a run: the size of each batch, and the number of batches."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Self

from streaming.arguments import checked_count, checked_int, is_list, is_whole, resolve_batch_size
from streaming.errors import ConfigError
from streaming.plan.order import default_lanes
from streaming.plan.schedule import Schedule, value_at
from streaming.types import LastBatch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Global batch sizes by row: samples of the run, over all ranks and epochs. A batch has the size of its first row.

    A run whose batches never change their size has a single step.

    Attributes:
        steps: Rows, the first 0, and the size of batches that begin from each on.

    Raises:
        ConfigError: A size is not an integer, or is out of range.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        # Sizes may be NumPy's, and states are JSON.
        steps = [(row, checked_int("global_batch_size", size, 1, 2**31 - 1)) for row, size in self.steps]
        object.__setattr__(self, "steps", tuple(steps))

    @classmethod
    def of(cls, given: int | Sizes) -> Sizes:
        """Return sizes as they are, and a number as the size of all batches."""
        return given if isinstance(given, Sizes) else cls.constant(given)

    @classmethod
    def constant(cls, size: int) -> Self:
        """Return batches that all have the same size."""
        return cls(((0, size),))

    @classmethod
    def chosen(cls, batch_size: object, global_batch_size: object, num_ranks: int) -> Self:
        """Return the sizes that a user chose: per rank or over all ranks, as an integer or a schedule of them.

        Raises:
            ConfigError: Neither or both are given, one is neither an integer nor a ``Schedule.steps`` of integers, or a
                rank would get nothing of a full batch.
        """
        given: dict[str, Any] = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        name = "batch_size" if isinstance(batch_size, Schedule) else "global_batch_size"
        schedule, steps = given[name], [(0, given[name])]
        if isinstance(schedule, Schedule):
            steps = schedule.segments()
            if schedule.shape != "steps" or not all(is_whole(size) and size >= 1 for _, size in steps):
                raise ConfigError(
                    f"{name}: expected an integer, or Schedule.steps of integers such as Schedule.steps({{0: 256, "
                    f"10**6: 512}}); got {schedule}"
                )
        return cls(
            tuple((row, resolve_batch_size(num_ranks=num_ranks, **{**given, name: size})) for row, size in steps)
        )

    @classmethod
    def from_text(cls, text: object) -> Self:
        """Return the sizes of ``to_text``.

        Raises:
            ConfigError: The text is of none.
        """
        try:
            found = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            found = None
        if not is_list(found) or not found or not all(is_list(step) and len(step) == 2 for step in found):
            raise ConfigError(f"batch_sizes: expected rows and sizes as JSON, such as '[[0, 256]]', got {text!r}")
        steps = [(checked_count("batch_sizes", row), checked_int("batch_sizes", size, 1, 2**31 - 1))
                 for row, size in found]  # fmt: skip
        if [row for row, _ in steps] != sorted({row for row, _ in steps} | {0}):
            raise ConfigError(f"batch_sizes: expected rows that increase, the first 0, got {text!r}")
        return cls(tuple(steps))

    def to_text(self) -> str:
        """Return the sizes as a single value: programs that save states take lists apart."""
        return json.dumps(self.steps)

    def followed_by(self, other: Sizes, row: int) -> Sizes:
        """Return the sizes of a run that had these before a row, and has those of ``other`` from there on."""
        later = [(row, other.at(row)), *(step for step in other.steps if step[0] > row)]
        found: list[tuple[int, int]] = []
        for step in [*(step for step in self.steps if step[0] < row), *later]:
            if not found or found[-1][1] != step[1]:
                found.append(step)
        return Sizes(tuple(found))

    def __str__(self) -> str:
        return ", ".join(f"{size:,} from row {row:,} on" for row, size in self.steps)

    @property
    def is_constant(self) -> bool:
        """Whether all batches have the same size."""
        return len(self.steps) == 1

    @property
    def option(self) -> int | Schedule:
        """The option ``global_batch_size`` that asks for these sizes."""
        return self.at(0) if self.is_constant else Schedule.steps(dict(self.steps))

    @property
    def plain(self) -> int | list[list[int]]:
        """These sizes as JSON, for people: a number, or rows and the sizes from each on."""
        return self.at(0) if self.is_constant else [list(step) for step in self.steps]

    @property
    def most(self) -> int:
        """The largest size."""
        return max(size for _, size in self.steps)

    def at(self, row: int) -> int:
        """Return the size of a batch that begins at a row."""
        return value_at(self.steps, row)

    def next_change(self, row: int) -> int | None:
        """Return the next row at which the batch size changes."""
        return next((start for start, _ in self.steps if start > row), None)

    def batches_alike(self, row: int, num_samples: int, last_batch: LastBatch) -> int:
        """Return how many batches of ``num_samples`` samples from a row on have the size of the first."""
        size, border = self.at(row), self.next_change(row)
        whole = num_samples // size if last_batch == "drop" else -(-num_samples // size)
        return max(0, whole if border is None else min(whole, -(-(border - row) // size)))

    def batches(self, row: int, num_samples: int, last_batch: LastBatch) -> int:
        """Return how many batches ``num_samples`` samples from a row on make."""
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

        The greatest common divisor of all sizes, so that lanes divide each batch; but the smallest size if the divisor
        is so small that batches would hardly be mixed.
        """
        sizes = [size for _, size in self.steps]
        common, least = math.gcd(*sizes), min(sizes)
        return common if 2 * default_lanes(common) >= default_lanes(least) else least
