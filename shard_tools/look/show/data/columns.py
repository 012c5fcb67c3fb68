"""Show the distribution of column values, and two columns against each other; each bar is a condition to click."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.look.show.base.page import Query, address
from shard_tools.look.show.base.plots import Histogram, histogram, label
from shard_tools.look.show.base.samples import SampleSet
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.find.arranged import are_numbers, as_plain, joined_values, read_words, spread_shards
from shard_tools.look.stats.sketches import WORD_CHARACTERS, Word, is_wide
from shard_tools.look.stats.totals import ColumnTotals
from shard_tools.running.report import Report
from streaming.common.arguments import counted
from streaming.common.threads import on_threads
from streaming.errors import ConfigError, ShardstreamError
from streaming.sets.filters.select import reading_threads
from streaming.shards.index.columns import Values, fitting, kept_rows
from streaming.shards.index.where import Where, parse_where
from streaming.storage import redact_text

ASKS = ("source", "where", "name", "against")
_TOP = 12
_TOLD = 10  # top values in JSON
_CELLS = 16
_WIDEST_LABEL = 24
_ASKED_SETS = 16  # of a mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """A bar to click: its label, count, length in percent, and the address of its samples."""

    label: str
    count: int
    share: float
    width: float
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnShown:
    """A column.

    Attributes:
        name: Its name.
        type: Type of its values, in Arrow's words.
        is_late: Whether it is a late column.
        num: Number of samples read.
        missing: Number of these samples without a value.
        least, most: The range of its numbers or texts; None: it has none.
        middle: Median of its numbers; None: they are not numbers.
        mean: Mean of its numbers.
        distinct: Number of distinct values; None: too many to count.
        top: The most frequent values, with their counts.
        plot: Distribution of its numbers; None: not numbers, or too few.
        bars: Links of the bars of ``plot``.
        words: The most frequent values, to click.
        missing_address: Address of the samples without a value.
    """

    name: str
    type: str
    is_late: bool
    num: int
    missing: int
    least: Any
    most: Any
    middle: float | None
    mean: float | None
    distinct: int | None
    top: tuple[tuple[Word, int], ...]
    plot: Histogram | None
    bars: tuple[str, ...]
    words: tuple[Bin, ...]
    missing_address: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "name": self.name, "type": self.type, "late": self.is_late, "samples": self.num, "missing": self.missing,
            "min": self.least, "max": self.most, "p50": self.middle, "mean": self.mean, "distinct": self.distinct,
            "top": [[value, count] for value, count in self.top[:_TOLD]],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of a plot of two columns: its place, darkness, label, and the address of its samples."""

    x: int
    y: int
    weight: float
    title: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """Two columns against each other: counts of samples, with each column divided by range or by value.

    The titles are those of both axes: their column, and how it is divided.
    """

    across: str
    up: str
    titles: tuple[str, str]
    across_labels: tuple[str, ...]
    up_labels: tuple[str, ...]
    cells: tuple[Cell, ...]
    counts: tuple[tuple[int, ...], ...]
    num: int

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "name": self.across, "against": self.up, "columns": self.across_labels, "rows": self.up_labels,
            "counts": self.counts, "samples": self.num,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsPage(Report):
    """The columns of a set.

    Attributes:
        source: Name of the set among the sources.
        sources: All sources.
        columns: The columns, or the requested one.
        names: Names of all columns.
        crossed: Two columns against each other.
        read: The samples read, in words.
        where: The condition that chose the samples.
        problem: Why it cannot be evaluated; "": it can.
    """

    source: str
    sources: tuple[str, ...]
    columns: tuple[ColumnShown, ...]
    names: tuple[str, ...]
    crossed: Crossed | None
    read: str
    where: str
    problem: str = ""

    @property
    def status(self) -> HTTPStatus:
        """Status of the response."""
        return HTTPStatus.BAD_REQUEST if self.problem else HTTPStatus.OK

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        values = {"source": self.source, "read": self.read, "columns": [one.as_dict() for one in self.columns]}
        return values | ({} if self.crossed is None else {"crossed": self.crossed.as_dict()})


def columns(subject: Subject, query: Query) -> ColumnsPage:
    """Return the distributions of a set's columns: all, or one by name; with ``against``, two columns crossed.

    Raises:
        ConfigError: A parameter is invalid, or there is no such column.
    """
    source = query.text("source") or next(iter(subject.sets), "")
    within, where, name, other = (
        subject.set_of(source),
        query.text("where").strip(),
        query.text("name"),
        query.text("against"),
    )
    if other and not name:
        raise ConfigError("against: expected name, too: the column that it is compared with")
    names = [one for one in (name, other) if one] or list(within.column_names)
    if name:
        within.check_columns(names, "name")
    sources = tuple(one for one in subject.sets if one)
    try:
        taken = subject.keep("columns", ColumnReading).of(source, within, where, tuple(names))
    except ConfigError as error:
        if not where or query.text("format") == "json":
            raise
        return ColumnsPage(
            source=source, sources=sources, columns=(), names=within.column_names, read="", where=where, crossed=None,
            problem=redact_text(str(error)),
        )  # fmt: skip
    shown = [_shown(one, taken, source, where) for one in names]
    return ColumnsPage(
        source=source, sources=sources, columns=tuple(shown[:1] if other else shown),
        names=within.column_names, read=taken.words, where=where,
        crossed=_crossed(name, other, taken, source, where) if other else None,
    )  # fmt: skip


def has_columns(subject: Subject) -> bool:
    """Return whether a set has columns, or cannot say so: then the page reports why."""
    return subject.keep("has columns", lambda: any(map(_has_columns, list(subject.sets.values())[:_ASKED_SETS])))


def _has_columns(within: SampleSet) -> bool:
    try:
        return bool(within.column_names)
    except ShardstreamError:
        return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnsTaken:
    """Columns of the samples that were read.

    Attributes:
        values: By column, one array per shard.
        late: Names of late columns.
        words: The samples read, in words.
    """

    values: Mapping[str, Sequence[Values]]
    late: frozenset[str]
    words: str

    @property
    def num(self) -> int:
        """Number of samples read."""
        return sum(len(one) for one in next(iter(self.values.values()), ()))


class ColumnReading:
    """Read columns, and cache the latest."""

    def __init__(self) -> None:
        self._kept: tuple[Any, ColumnsTaken] | None = None

    def of(self, source: str, within: SampleSet, where: str, names: tuple[str, ...]) -> ColumnsTaken:
        """Return columns of the samples that meet a condition, from all shards or from some spread evenly over the set.

        Raises:
            ConfigError: The condition cannot be evaluated.
        """
        request, kept = (source, where, names), self._kept
        if kept is not None and kept[0] == request:
            return kept[1]
        taken = _take(within, where, names)
        self._kept = request, taken
        return taken


def _take(within: SampleSet, where: str, names: tuple[str, ...]) -> ColumnsTaken:
    condition = parse_where(where) if where else None
    if condition is not None:
        within.check_columns(condition.names or (), "where")
    shards = spread_shards(within)

    def read(shard: int) -> dict[str, Values]:
        return _of_shard(within, shard, names, condition)

    parts = on_threads(read, shards, reading_threads(within.source.shards), name="shardstream-columns")
    values = {name: [part[name] for part in parts] for name in names}
    return ColumnsTaken(values=values, late=frozenset(within.late), words=read_words(within, shards))


def _of_shard(within: SampleSet, shard: int, names: tuple[str, ...], condition: Where | None) -> dict[str, Values]:
    needed = {*names, *((condition.names or ()) if condition is not None else ())}
    found = within.columns(shard, needed)
    kept = within.source.selection.mask(shard)
    if condition is not None:
        kept = kept & kept_rows(fitting(condition, found, len(kept)), len(kept))
    mask = None if kept.all() else pa.array(kept)
    return {name: as_plain(found[name] if mask is None else found[name].filter(mask)) for name in names}


def _shown(name: str, taken: ColumnsTaken, source: str, where: str) -> ColumnShown:
    totals, draw = ColumnTotals(is_late=name in taken.late), np.random.default_rng(0)
    for values in taken.values[name]:
        totals.add(name, values, draw)
    summary = totals.numbers.told() if totals.numbers.num else {}
    is_few = totals.top.is_exact and len(totals.top.counts) <= _TOP
    plot: Histogram | None = None
    bars: tuple[str, ...] = ()
    if totals.numbers.num and not is_few:
        plot, bars = _plotted(name, totals, source, where)
    top = tuple(totals.top.most_common(_TOP))
    most = max((count for _, count in top), default=1)
    words = tuple(
        Bin(
            label=label(value), count=count, share=count / max(totals.num, 1), width=100 * count / most,
            address=_link(source, where, _equals(name, value)),
        ) for value, count in top
    )  # fmt: skip
    return ColumnShown(
        name=name, type=totals.type, is_late=totals.is_late, num=taken.num, missing=taken.num - totals.num,
        least=summary.get("min", totals.least), most=summary.get("max", totals.most), middle=summary.get("p50"),
        mean=summary.get("mean"), distinct=len(totals.top.counts) if totals.top.is_exact else None, top=top, plot=plot,
        bars=bars, words=() if plot else words, missing_address=_link(source, where, f"{_quoted(name)} IS NULL"),
    )  # fmt: skip


def _plotted(name: str, totals: ColumnTotals, source: str, where: str) -> tuple[Histogram, tuple[str, ...]]:
    summary, bins = totals.numbers.told(), totals.numbers.bins()
    least, most = (_number(summary[one]) for one in ("min", "max"))
    middle = (f"half up to {_number(summary['p50'])}", f"mean {_number(summary['mean'])}")
    plot = histogram(name, bins, is_wide=totals.numbers.is_wide, least=least, most=most, middle=middle)
    links = [
        _link(source, where, _between(name, low, high, is_last=number == len(bins) - 1))
        for number, (low, high, _) in enumerate(bins)
    ]
    return plot, tuple(links)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _equals(name: str, value: Word) -> str:
    """Return the condition that a column equals a value; for a text that was cut, that it begins with it."""
    if isinstance(value, bool):
        return f"{_quoted(name)} = {'TRUE' if value else 'FALSE'}"
    if isinstance(value, str):
        text = value.replace("'", "''")
        is_cut = len(value) == WORD_CHARACTERS
        return f"{_quoted(name)} LIKE '{text}%'" if is_cut else f"{_quoted(name)} = '{text}'"
    return f"{_quoted(name)} = {value!r}"


def _between(name: str, low: float, high: float, *, is_last: bool) -> str:
    return f"{_quoted(name)} >= {low!r} AND {_quoted(name)} {'<=' if is_last else '<'} {high!r}"


def _link(source: str, where: str, condition: str) -> str:
    return address("/", source=source, where=f"({where}) AND {condition}" if where else condition)


# --- two columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Axis:
    """Division of a column into parts: the part of each sample (-1: no value); label and condition of each part.

    The title is the column's name, and how it is divided.
    """

    codes: npt.NDArray[np.int64]
    labels: tuple[str, ...]
    conditions: tuple[str, ...]
    title: str


def _crossed(name: str, other: str, taken: ColumnsTaken, source: str, where: str) -> Crossed:
    across, up = _axis(name, taken), _axis(other, taken)
    there = (across.codes >= 0) & (up.codes >= 0)
    shape = (len(up.labels), len(across.labels))
    flat = up.codes[there] * max(shape[1], 1) + across.codes[there]
    counts = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)
    most = max(int(counts.max(initial=0)), 1)
    cells = [
        Cell(
            x=x, y=shape[0] - 1 - y, weight=math.sqrt(count / most),
            title=f"{name} {across.labels[x]}, {other} {up.labels[y]}: {counted(count, 'sample')}",
            address=_link(source, where, f"{across.conditions[x]} AND {up.conditions[y]}"),
        ) for y, row in enumerate(counts.tolist()) for x, count in enumerate(row) if count
    ]  # fmt: skip
    return Crossed(
        across=name, up=other, titles=(across.title, up.title), across_labels=across.labels, up_labels=up.labels,
        cells=tuple(cells), counts=tuple(map(tuple, counts.tolist())), num=int(there.sum()),
    )  # fmt: skip


def _axis(name: str, taken: ColumnsTaken) -> _Axis:
    """Divide the values of a column: numbers by range, other types by their most frequent values.

    Raises:
        ConfigError: The values cannot be compared.
    """
    values = joined_values(name, taken.values[name])
    distinct = pc.count_distinct(values).as_py()
    return _ranges(name, values) if are_numbers([values]) and distinct > _CELLS else _words(name, values)


def _ranges(name: str, values: Values) -> _Axis:
    numbers = values.cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy(zero_copy_only=False)
    finite = numbers[np.isfinite(numbers)]
    low, high = float(finite.min(initial=0) if not finite.size else finite.min()), float(finite.max(initial=0))
    wide = is_wide(low, high)
    edges = np.geomspace(low, high, _CELLS + 1) if wide else np.linspace(low, high, _CELLS + 1)
    edges[0], edges[-1] = low, high
    codes = np.where(
        np.isfinite(numbers), np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, _CELLS - 1), -1
    )
    pairs = list(zip(edges.tolist(), edges[1:].tolist(), strict=False))
    return _Axis(
        codes=codes.astype(np.int64), labels=tuple(f"{_number(one)} to {_number(two)}" for one, two in pairs),
        conditions=tuple(_between(name, *pair, is_last=at == _CELLS - 1) for at, pair in enumerate(pairs)),
        title=f"{name} (logarithmic)" if wide else name,
    )  # fmt: skip


def _words(name: str, values: Values) -> _Axis:
    found = pc.value_counts(values.drop_null())
    order = np.argsort(-found.field("counts").to_numpy(), kind="stable")[:_CELLS]
    words = found.field("values").take(pa.array(order))
    listed = words.to_pylist()
    if all(isinstance(one, (int, float)) for one in listed):
        listed.sort()
        words = pa.array(listed, words.type)
    codes = pc.index_in(values, value_set=words, skip_nulls=True).fill_null(-1).to_numpy(zero_copy_only=False)
    labels = tuple(one if len(one) <= _WIDEST_LABEL else one[:_WIDEST_LABEL] + "…" for one in map(label, listed))
    return _Axis(
        codes=codes.astype(np.int64), labels=labels, conditions=tuple(_equals(name, one) for one in listed), title=name
    )
