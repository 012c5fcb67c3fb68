"""Make the page of ``shard_tools stats``: one self-contained file."""

from __future__ import annotations

from dataclasses import dataclass

from shard_tools.look.show.base.plots import Histogram, Row, histogram, rows
from shard_tools.look.show.base.render import render
from shard_tools.look.stats.report import StatsReport
from shard_tools.look.stats.sketches import Distribution, Top
from streaming.common.arguments import counted, format_bytes
from streaming.storage import redact_text

_SHOWN = 12  # words per plot
_SHOWN_CLASSES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A plot of words: the most frequent ones, and the number of others."""

    name: str
    rows: tuple[Row, ...]
    others: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A field or a column: its name, facts in words, and its plots."""

    name: str
    facts: tuple[tuple[str, str], ...]
    histograms: tuple[Histogram, ...]
    words: tuple[Words, ...]
    broken: tuple[str, ...] = ()


def stats_page(report: StatsReport) -> str:
    """Return the report of ``shard_tools stats`` as a page.

    Raises:
        ConfigError: Jinja is not installed.
    """
    keys, compared = report.totals.keys, report.compared
    contents = report.totals.fields[compared].repeats if compared else None
    facts = (
        ("samples", f"{report.num_samples:,}"),
        ("bytes", format_bytes(report.num_bytes)),
        ("shards", f"{report.num_shards:,}"),
        ("chunks", f"{report.num_chunks:,}"),
        ("duplicate keys", f"{keys.num_again:,}"),
        ("duplicate contents", "not compared" if contents is None else f"{contents.num_again:,}"),
    )
    sizes = [_histogram("bytes of a sample", report.totals.sizes, in_bytes=True)]
    return render(
        "stats.html",
        title=f"{report.url} · shard_tools stats",
        url=report.url,
        selected=report.selected,
        read=report.read_words,
        facts=facts,
        sizes=[one for one in sizes if one is not None],
        surprises=[{name: redact_text(text) for name, text in one.as_dict().items()} for one in report.found],
        fields=_field_cards(report),
        classes=[_words(name, top, _SHOWN_CLASSES) for name, top in sorted(report.classes().items())],
        columns=_column_cards(report),
        compared=compared,
        num_compared="" if contents is None else f"{contents.num:,}",
    )


def _field_cards(report: StatsReport) -> list[Card]:
    cards = []
    for name, one in sorted(report.totals.fields.items()):
        facts = [("kind", report.kinds[name]), ("samples", f"{one.num:,}")]
        facts += [("of all", f"{one.num / report.num_samples:.1%}")] if report.num_samples else []
        facts += [("bytes", format_bytes(one.sizes.total)), ("empty", f"{one.num_empty:,}")]
        facts += [("looked at", f"{one.num_read:,}"), ("broken", f"{one.num_broken:,}")]
        plots = [_histogram("bytes", one.sizes, in_bytes=True)]
        plots += [_histogram(what, spread) for what, spread in sorted(one.numbers.items())]
        shown = [_words(what, top, total=one.num_looked) for what, top in one.shown_words()]
        card = Card(
            name=name, facts=tuple(facts), histograms=tuple(plot for plot in plots if plot is not None),
            words=tuple(shown), broken=tuple(map(redact_text, one.broken)),
        )  # fmt: skip
        cards.append(card)
    return cards


def _column_cards(report: StatsReport) -> list[Card]:
    cards = []
    for name, one in sorted(report.totals.columns.items()):
        facts = [("type", one.type), ("missing", f"{report.num_samples - one.num:,}")]
        facts += [("added later", "yes")] if one.is_late else []
        facts += [("least", one.least), ("most", one.most)] if one.least is not None and one.most is not None else []
        facts += [("not finite", f"{one.numbers.num_not_finite:,}")] if one.numbers.num_not_finite else []
        plot = _histogram("values", one.numbers)
        few = not one.numbers.num or (one.top.is_exact and len(one.top.counts) <= _SHOWN)
        cards.append(
            Card(
                name=name,
                facts=tuple(facts),
                histograms=() if plot is None else (plot,),
                words=(_words("values", one.top),) if few and one.top.counts else (),
            )
        )
    return cards


def _histogram(name: str, spread: Distribution, *, in_bytes: bool = False) -> Histogram | None:
    if not spread.num:
        return None
    numbers = spread.told()
    shown = {what: _bytes(number) if in_bytes else _number(number) for what, number in numbers.items()}
    middle = f"half up to {shown['p50']}, mean {shown['mean']}"
    return histogram(name, spread.bins(), least=shown["min"], most=shown["max"], middle=middle)


def _words(name: str, top: Top, shown: int = _SHOWN, *, total: int | None = None) -> Words:
    others = f"{counted(len(top.counts) - shown, 'other')}" if len(top.counts) > shown else ""
    if not top.is_exact:
        others = f"more than {len(top.counts):,} others; counts are too low by {top.lost:,} at most"
    return Words(name=name, rows=rows(top.most_common(shown), total or top.num), others=others)


def _bytes(number: float | None) -> str:
    return format_bytes(number or 0)


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,}" if isinstance(number, int) else f"{number:,.4g}"
