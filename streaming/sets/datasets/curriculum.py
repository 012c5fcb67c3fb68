"""Draw easy samples first, from a pool that grows with the rows of the run: ``Curriculum``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from infra import is_first_process
from streaming.common.arguments import check_choice, checked_count, checks_names, is_list, is_number, is_whole, shows
from streaming.errors import ConfigError
from streaming.order.plan.schedule import Schedule
from streaming.sets.datasets.dataset import StreamingDataset
from streaming.sets.datasets.grouped import ELSEWHERE, GroupedSet, check_dataset
from streaming.sets.filters.groups import Codes, Counted, Values, numbers_of
from streaming.sets.sources.grouped import GroupedSource, Nulls, check_missing, grouped, resharding
from streaming.sets.sources.mixed import Quotas
from streaming.types import Int64Array

By: TypeAlias = Literal["percentile", "value"]
Buckets: TypeAlias = int | Sequence[float]
MAX_CELLS = 1024
"""Maximum number of cells in the grid of several metrics. Each is a source of the mixture: a few ms of planning."""
_UNIT = 2**32  # differences of shares below this do not count: 0.3 is three tenths
_WHOLE = 2**53  # floats below it represent whole numbers exactly
_LINES = 6
_ELSEWHERE = ELSEWHERE | {
    "curriculum_type": 'write by="percentile" or "value", and the shape as Schedule.linear, .root, .steps or .custom',
    "difficulty_type": 'write by="percentile" or "value"',
    "schedule_type": "write schedule=Schedule.linear(…), .root(…), .steps(…) or .custom(…)",
    "min_difficulty": "it is where the schedule begins: Schedule.linear(min, max, over=…)",
    "max_difficulty": "it is where the schedule ends: Schedule.linear(min, max, over=…)",
    "difficulty_step": "write buckets=…, or Schedule.steps({0: …, …})",
    "total_curriculum_step": "write it as over= of the schedule, in samples: steps times the global batch size",
    "root_degree": "write Schedule.root(…, degree=…)",
    "column": "write metric=…",
    "weights": "write schedule=…, for the difficulty; to weight classes use Balanced, to weight data sets Mixture",
}
_log = logging.getLogger("streaming")


@checks_names(_ELSEWHERE)
class Curriculum(GroupedSet):
    """Draw from a pool of samples that grows during the run, easy samples first, like DeepSpeed's curriculum sampler.

    A curriculum is itself a dataset, for a ``DataLoader`` or a ``Mixture``, with all their promises. The samples are
    divided once into buckets by the metric. A bucket is open when its upper border is at most the scheduled difficulty;
    the easiest bucket is always open. Samples are drawn from each open bucket in proportion to its size, so all samples
    of the pool come equally often; a bucket that opens gets its share from that row on. A curriculum has no end: count
    steps, or give the loader an ``epoch_size``. ::

        short_first = Curriculum(web, metric="tokens", schedule=Schedule.root(0.1, 1.0, over=100_000))
        loader = DataLoader(short_first, batch_size=8)

    Rows count the samples of the whole run, over all ranks and epochs, and within a ``Mixture`` those of all its
    sources. Because chunks are used whole, samples of a bucket may come earlier or later than its row, by up to one
    window plus one chunk of each open bucket in every lane (docs/mixing.md).

    Args:
        dataset: A ``StreamingDataset`` with an index, filtered or not. Its order settings are used.
        metric: Numeric column of the sample tables, or late column; low values are easy. Or a dict of columns and their
            schedules: a sample is then in the pool if every metric admits it.
        schedule: A ``Schedule`` of numbers: the difficulty by row. If it falls, buckets close again.
        by: Unit of the schedule. ``"percentile"``: the fraction of samples that are at most as difficult, from 0 to 1;
            ``"value"``: values of the metric. A dict if metrics differ.
        buckets: Number of buckets with equally many samples (samples of equal value stay together), or the upper
            borders of the buckets in the schedule's unit. A dict if metrics differ. The pool matches the schedule
            exactly where its steps lie on borders; between two borders the lower one applies.
        nulls: What to do with samples without a value (NULL or NaN): ``"error"``, or ``"drop"`` them.
        quotas: How exactly shares are kept. ``"chunks"``: up to about one chunk per bucket and lane, with the memory of
            a single dataset. ``"exact"``: at every row, and no sample comes before the row at which its bucket opens;
            memory grows with the number of buckets. See ``Mixture``; as a source of one, the curriculum follows the
            mixture's ``quotas``.
        name_sources: Whether ``batch["__source__"]`` names the bucket, such as ``"tokens<=512"``. By default the entry
            is absent; within a mixture it holds the curriculum's name there.

    Raises:
        ConfigError: An argument is invalid; the column does not exist or is not numeric; or the pool would be empty.
        IndexMissingError: There is no index, or no sample table.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        metric: str | Mapping[str, Schedule],
        schedule: Schedule | None = None,
        *,
        by: By | Mapping[str, By] = "percentile",
        buckets: Buckets | Mapping[str, Buckets] = 16,
        nulls: Nulls = "error",
        quotas: Quotas = "chunks",
        name_sources: bool = False,
    ) -> None:
        check_dataset(dataset, "Curriculum")
        metrics = _checked_metrics(metric, schedule, by, buckets)
        made: list[_Grid] = []

        def coding(counted: Mapping[str, Counted]) -> _Grid:
            check_missing("Curriculum", counted, nulls)
            made.append(_Grid(tuple(one.cut(counted[one.name]) for one in metrics)))
            return made[-1]

        grouping = grouped(dataset.source, "Curriculum", "metric", [one.name for one in metrics], coding)
        grid = self._grid = made[-1]
        sizes = grouping.groups.sizes
        cells = {int(cell): grid.name_of(cell) for cell in np.flatnonzero(sizes).tolist()}
        if not cells:
            raise ConfigError(
                "Curriculum: no sample of the data set has a value for the metric; add values with `shard_tools "
                "column add`"
            )
        pools = grid.pools(list(cells))
        _check_pools(grid, pools)
        _warn_if_never_open(grid, pools, sizes[list(cells)])
        weights = {
            row: {
                name: int(sizes[cell]) * int(is_open) for (cell, name), is_open in zip(cells.items(), pool, strict=True)
            }
            for row, pool in pools
        }
        self._pools = [(row, sum(shares.values())) for row, shares in weights.items()]
        self._source = GroupedSource(
            dataset.source, grouping, cells, Schedule.steps(weights), kind="Curriculum", name_sources=name_sources,
            quotas=quotas, cure=resharding(dataset.source, metrics[0].name), by_name=_as_given,
        )  # fmt: skip
        self._dataset = dataset
        if is_first_process():
            _log.info("%s", self.plan_in_words())

    def pool(self, row: int) -> dict[str, int]:
        """Return the buckets that are open at a row of the run, by name, and the number of samples in each.

        Example: ``sum(curriculum.pool(0).values())`` samples form the first pool.

        Raises:
            ConfigError: ``row`` is not a non-negative integer.
        """
        weights = self._source.blend.at(checked_count("Curriculum.pool: row", row))
        return {name: int(size) for name, size in sorted(weights.items()) if size}

    def plan_in_words(self) -> str:
        """Describe how the size of the pool changes over the run: ``print(curriculum.plan_in_words())``."""
        total = sum(self.sizes.values())
        shown = self._pools if len(self._pools) <= _LINES else [*self._pools[: _LINES - 1], self._pools[-1]]
        parts = [f"{size:,} ({size / total:.1%}) from row {row:,} on" for row, size in shown]
        if len(shown) < len(self._pools):
            parts.insert(-1, f"{len(self._pools) - len(shown)} more")
        metrics = ", ".join(f"{one.name} by {one.by}" for one in self._grid.metrics)
        return f"Curriculum by {metrics}: of {total:,} samples in {len(self.names)} buckets, {', '.join(parts)}"

    @shows
    def __repr__(self) -> str:
        metrics = ", ".join(f"{one.name} by {one.by}" for one in self._grid.metrics)
        parts = [self._source.words(), metrics]
        if not self._source.is_reweighed:
            parts.append(f"a pool of {self._pools[0][1]:,} samples at first")
        return f"Curriculum({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetricOptions:
    """The user's settings for one metric."""

    name: str
    schedule: Schedule
    by: By
    buckets: Buckets

    def cut(self, counted: Counted) -> _Metric:
        """Divide the metric into buckets, according to the values that occur.

        Raises:
            ConfigError: The values are not numbers.
        """
        values = numbers_of(counted.values)
        if values is None:
            raise ConfigError(
                f"Curriculum: metric: column {self.name!r} holds {counted.values.type}, not numbers; give a column of "
                "numbers, added with `shard_tools column add`"
            )
        reached, total = np.cumsum(counted.counts), int(counted.counts.sum())
        if self.by == "value" and not isinstance(self.buckets, int):
            borders = [(float(border), float(border)) for border in self.buckets if total]
        else:
            shares = self._shares()
            places = [int(np.searchsorted(reached, math.ceil(share * total))) for share in shares]
            found = [float(values[place]) for place in places if total]
            opens = found if self.by == "value" else [float(share) for share in shares]
            borders = list(zip(found, opens, strict=False))
        if total and values[-1] > borders[-1][0]:
            borders.append((float(values[-1]), 1.0 if self.by == "percentile" else float(values[-1])))
        # If no value lies between several borders, keep the first: it opens everything below.
        below = [0, *(int(np.searchsorted(values, upper, side="right")) for upper, _ in borders)]
        kept = [one for one, (before, here) in zip(borders, pairwise(below), strict=True) if here > before]
        least = float(values[0]) if total else math.nan
        return _Metric(name=self.name, by=self.by, schedule=self.schedule, borders=tuple(kept), least=least)

    def _shares(self) -> list[Fraction]:
        if isinstance(self.buckets, int):
            return [Fraction(number, self.buckets) for number in range(1, self.buckets + 1)]
        return [Fraction(share).limit_denominator(10**9) for share in self.buckets]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metric:
    """A metric divided into buckets.

    Attributes:
        name: The column.
        by: Unit of the schedule.
        schedule: Difficulty by row.
        borders: For each bucket, its largest value, and the difficulty from which it is open.
        least: The smallest value.
    """

    name: str
    by: By
    schedule: Schedule
    borders: tuple[tuple[float, float], ...]
    least: float

    def bucket_of(self, values: Values) -> Int64Array:
        """Return the bucket of each value, or -1 for a missing value."""
        uppers = np.array([upper for upper, _ in self.borders])
        numbers: Any = numbers_of(values)  # columns of other kinds were refused when they were counted
        missing = np.isnan(numbers)
        return np.where(missing, -1, np.searchsorted(uppers, np.where(missing, 0, numbers)))

    def open_at(self, difficulty: float) -> npt.NDArray[np.bool_]:
        """Return a mask of the buckets that are open at a difficulty; the first always is."""
        opens = np.array([given for _, given in self.borders])
        unit = _UNIT if self.by == "percentile" else 0
        found: npt.NDArray[np.bool_] = (
            np.rint(opens * unit) <= round(difficulty * unit) if unit else opens <= difficulty
        )
        found[:1] = True
        return found

    def name_of(self, bucket: int) -> str:
        """Return the name of a bucket, in the form of a source name."""
        upper, short = self.borders[bucket][0], {f"{one:.6g}" for one, _ in self.borders}
        if upper.is_integer() and abs(upper) < _WHOLE:
            return f"{self.name}<={int(upper)}"
        return f"{self.name}<={upper:.6g}" if len(short) == len(self.borders) else f"{self.name}<={upper!r}"


@dataclass(frozen=True, slots=True)
class _Grid:
    """The buckets of all metrics, and the cells in which they meet: a ``Coding``."""

    metrics: tuple[_Metric, ...]

    def __post_init__(self) -> None:
        if self.num_groups > MAX_CELLS:
            counts = " x ".join(str(len(one.borders)) for one in self.metrics)
            raise ConfigError(
                f"Curriculum: buckets: the metrics' buckets make {counts} cells, but at most {MAX_CELLS:,} are "
                f"allowed. Give fewer, such as buckets={max(int(MAX_CELLS ** (1 / len(self.metrics))), 1)}"
            )

    @property
    def num_groups(self) -> int:
        """Number of cells."""
        return math.prod(len(one.borders) for one in self.metrics)

    def codes(self, columns: Mapping[str, Values], num_rows: int) -> Codes:
        """See ``Coding``."""
        cells, missing = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.bool_)
        for metric in self.metrics:
            buckets = metric.bucket_of(columns[metric.name])
            missing |= buckets < 0
            cells = cells * len(metric.borders) + buckets
        return np.where(missing, self.num_groups, cells).astype(np.uint16)

    def buckets_of(self, cell: int) -> list[int]:
        """Return the bucket of each metric."""
        found = []
        for metric in reversed(self.metrics):
            cell, bucket = divmod(cell, len(metric.borders))
            found.append(bucket)
        return found[::-1]

    def name_of(self, cell: int) -> str:
        """Return the name of a cell, in the form of a source name."""
        pairs = zip(self.metrics, self.buckets_of(int(cell)), strict=True)
        return ",".join(metric.name_of(bucket) for metric, bucket in pairs)

    def pools(self, cells: Sequence[int]) -> list[tuple[int, npt.NDArray[np.bool_]]]:
        """Return the rows at which the pool changes, each with a mask of the ``cells`` in the pool from then on."""
        buckets = np.array([self.buckets_of(cell) for cell in cells])
        rows = sorted({row for metric in self.metrics for row, _ in metric.schedule.segments()})
        found: list[tuple[int, npt.NDArray[np.bool_]]] = []
        segments: list[Any] = [metric.schedule.segments() for metric in self.metrics]
        at = [0] * len(segments)
        for row in rows:
            is_open = np.ones(len(cells), np.bool_)
            for number, (metric, steps) in enumerate(zip(self.metrics, segments, strict=True)):
                while at[number] + 1 < len(steps) and steps[at[number] + 1][0] <= row:
                    at[number] += 1
                is_open &= metric.open_at(steps[at[number]][1])[buckets[:, number]]
            if not found or (found[-1][1] != is_open).any():
                found.append((row, is_open))
        return found


def _as_given(weights: Any) -> Any:
    return weights


def _checked_metrics(metric: Any, schedule: Any, by: Any, buckets: Any) -> list[_MetricOptions]:
    """Return the validated settings of the metrics.

    Raises:
        ConfigError: A setting is invalid.
    """
    if isinstance(metric, Mapping):
        if schedule is not None:
            raise ConfigError(
                "Curriculum: schedule: each of several metrics has its own schedule in metric=; leave this one out"
            )
        if not metric:
            raise ConfigError('Curriculum: metric: expected at least one, got none; write metric="tokens", schedule=…')
        schedules = dict(metric)
    elif isinstance(metric, str) and metric:
        schedules = {metric: schedule}
    else:
        raise ConfigError(
            f'Curriculum: metric: expected the name of a column, or a dict such as {{"tokens": Schedule…}}, got '
            f"{metric!r}"
        )
    for what, given in (("by", by), ("buckets", buckets)):
        if isinstance(given, Mapping) and set(given) != set(schedules):
            raise ConfigError(
                f"Curriculum: {what}: expected a dict with the keys of metric=, {', '.join(map(str, schedules))}, got "
                f"the keys {', '.join(map(str, given)) or 'none'}"
            )
    metrics = []
    for name, own in schedules.items():
        kind = by[name] if isinstance(by, Mapping) else by
        parts = buckets[name] if isinstance(buckets, Mapping) else buckets
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"Curriculum: metric: expected names of columns without a slash, got {name!r}")
        check_choice("Curriculum: by", kind, get_args(By))
        _check_schedule(name, own, kind)
        metrics.append(_MetricOptions(name=name, schedule=own, by=kind, buckets=_checked_buckets(parts, kind)))
    return metrics


def _check_schedule(name: str, schedule: Any, by: By) -> None:
    if not isinstance(schedule, Schedule) or schedule.names:
        got = "a Schedule of dicts" if isinstance(schedule, Schedule) else repr(schedule)
        raise ConfigError(
            f"Curriculum: schedule of {name!r}: expected a Schedule of numbers, such as Schedule.root(0.1, 1.0, "
            f"over=100_000), got {got}"
        )
    numbers: list[Any] = [value for _, value in schedule.segments()]
    if by == "percentile" and max(numbers) > 1:
        raise ConfigError(
            f"Curriculum: schedule of {name!r}: percentiles go from 0 to 1, got {max(numbers)}; for values of the "
            'column write by="value"'
        )


def _checked_buckets(given: Any, by: By) -> Buckets:
    if is_whole(given):
        if not 1 <= given <= MAX_CELLS:
            raise ConfigError(f"Curriculum: buckets: expected 1 to {MAX_CELLS}, got {given}")
        return int(given)
    borders = given.tolist() if isinstance(given, np.ndarray) and given.ndim == 1 else given
    if not is_list(borders) or not 1 <= len(borders) < MAX_CELLS:
        raise ConfigError(f"Curriculum: buckets: expected how many, or a list of borders, got {given!r}")
    borders = list(borders)
    if not all(is_number(one) and math.isfinite(one) for one in borders) or any(
        low >= high for low, high in pairwise(borders)
    ):
        raise ConfigError(f"Curriculum: buckets: expected ascending borders, got {borders}")
    if by == "percentile" and not 0 < borders[0] <= borders[-1] <= 1:
        raise ConfigError(
            f"Curriculum: buckets: borders by percentile must be above 0 and at most 1, got {borders}; for values of "
            'the column write by="value"'
        )
    return [float(one) for one in borders]


def _check_pools(grid: _Grid, pools: Sequence[tuple[int, npt.NDArray[np.bool_]]]) -> None:
    for row, pool in pools:
        if not pool.any():
            names = " and ".join(one.name for one in grid.metrics)
            raise ConfigError(
                f"Curriculum: schedule: at row {row:,} no sample is easy enough by {names} at once; start one of the "
                "schedules at a higher difficulty"
            )


def _warn_if_never_open(
    grid: _Grid, pools: Sequence[tuple[int, npt.NDArray[np.bool_]]], sizes: npt.NDArray[np.integer[Any]]
) -> None:
    """Log a warning if a schedule of values never reaches the largest value: perhaps it was meant in another unit."""
    never = 1 - sizes[np.any([pool for _, pool in pools], axis=0)].sum() / sizes.sum()
    for metric in grid.metrics:
        values: list[Any] = [value for _, value in metric.schedule.segments()]
        reached, largest = max(values), metric.borders[-1][0]
        if metric.by == "value" and never and reached < metric.borders[-1][1]:
            _log.warning(
                'Curriculum: %.1f%% of the samples are never drawn. With by="value" the schedule of %r is in values of '
                "that column, which go from %.6g to %.6g, but it reaches %.6g at most. For fractions of the samples "
                'write by="percentile"; otherwise let it reach %.6g. (To leave hard samples out for good, filter the '
                "data set with where=…)", 100 * never, metric.name, metric.least, largest, reached, largest,
            )  # fmt: skip
