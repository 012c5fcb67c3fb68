"""Change the batch size with the rows of a run: the size of each batch, and the number of batches."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Self

from streaming.arguments import checked_count, checked_int, is_list, is_whole, resolve_batch_size
from streaming.errors import ConfigError
from streaming.plan.order import default_lanes
from streaming.plan.schedule import Schedule, value_at
from streaming.types import LastBatch


@dataclass(frozen=True, slots=True)
class Ramp:
    """Global batch sizes by row: samples of the run, over all ranks and epochs. A batch has the size of its first row.

    Attributes:
        steps: Rows, the first 0, and the size of batches that begin from each on.
    """

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def chosen(cls, batch_size: object, global_batch_size: object, num_ranks: int) -> Self | None:
        """Return the ramp that a user gave as one of the two sizes; None if neither is a schedule.

        Raises:
            ConfigError: It is not a ``Schedule.steps`` of batch sizes, or both are given.
        """
        per_rank = isinstance(batch_size, Schedule)
        schedule = batch_size if per_rank else global_batch_size
        if not isinstance(schedule, Schedule):
            return None
        name = "batch_size" if per_rank else "global_batch_size"
        if schedule.shape != "steps" or not all(is_whole(size) and size >= 1 for _, size in schedule.segments()):
            raise ConfigError(
                f"{name}: expected an integer, or Schedule.steps of integers such as Schedule.steps({{0: 256, 10**6: "
                f"512}}); got {schedule}"
            )
        other = global_batch_size if per_rank else batch_size
        steps = []
        for row, size in schedule.segments():
            sizes = {"batch_size": size, "global_batch_size": other} if per_rank else {
                "batch_size": other, "global_batch_size": size
            }  # fmt: skip
            steps.append((row, resolve_batch_size(num_ranks=num_ranks, **sizes)))  # type: ignore[arg-type]
        return cls(tuple(steps))

    @classmethod
    def from_text(cls, text: object) -> Self:
        """Return the ramp of ``to_text``.

        Raises:
            ConfigError: The text is of no ramp.
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
        """Return the ramp as a single value: programs that save states take lists apart."""
        return json.dumps(self.steps)

    def followed_by(self, other: Ramp, row: int) -> Ramp:
        """Return the sizes of a run that had these before a row, and has those of ``other`` from there on."""
        later = [(row, other.size_at(row)), *(step for step in other.steps if step[0] > row)]
        found: list[tuple[int, int]] = []
        for step in [*(step for step in self.steps if step[0] < row), *later]:
            if not found or found[-1][1] != step[1]:
                found.append(step)
        return Ramp(tuple(found))

    def __str__(self) -> str:
        return ", ".join(f"{size:,} from row {row:,} on" for row, size in self.steps)

    def size_at(self, row: int) -> int:
        """Return the size of a batch that begins at a row."""
        return value_at(self.steps, row)

    def border_behind(self, row: int) -> int | None:
        """Return the next row at which the batch size changes."""
        return next((start for start, _ in self.steps if start > row), None)

    def batches_of_size(self, row: int, num_samples: int, last_batch: LastBatch) -> int:
        """Return how many batches of ``num_samples`` samples from a row on have the size of the first."""
        size, border = self.size_at(row), self.border_behind(row)
        whole = num_samples // size if last_batch == "drop" else -(-num_samples // size)
        return max(0, whole if border is None else min(whole, -(-(border - row) // size)))

    def batches_in(self, row: int, num_samples: int, last_batch: LastBatch) -> int:
        """Return how many batches ``num_samples`` samples from a row on make."""
        found = 0
        while True:
            count, border = self.batches_of_size(row, num_samples, last_batch), self.border_behind(row)
            found, length = found + count, count * self.size_at(row)
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
