"""Make what pages show of a report of ``stats``: facts, cards of fields and columns, surprises; and its own file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shard_tools.look.show.base.plots import Histogram, Row, histogram, rows
from shard_tools.look.show.base.render import render
from shard_tools.look.stats.report import StatsReport
from shard_tools.look.stats.sketches import Distribution, Top
from shard_tools.look.stats.surprises import Group
from shard_tools.look.stats.totals import Classes, ExampleSample
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSample:
    """A sample that shows a surprise: its key, and the address of its page; "": in a file."""

    key: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SurpriseShown:
    """A surprise: its texts, and the first samples that show it, in groups of equal ones."""

    what: str
    why: str
    cure: str
    groups: tuple[tuple[NamedSample, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsShown:
    """A report as pages show it."""

    read: str
    facts: tuple[tuple[str, str], ...]
    surprises: tuple[SurpriseShown, ...]
    sizes: tuple[Histogram, ...]
    fields: tuple[Card, ...]
    classes: tuple[Words, ...]
    columns: tuple[Card, ...]


def stats_shown(report: StatsReport, address_of: Callable[[ExampleSample], str]) -> StatsShown:
    """Return a report as pages show it.

    Args:
        report: The report.
        address_of: Returns the address of a sample's page.
    """
    sizes = _histogram("bytes of a sample", report.totals.sizes, in_bytes=True)
    return StatsShown(
        read=report.read_words,
        facts=tuple(_facts(report)),
        surprises=tuple(
            SurpriseShown(
                what=redact_text(one.what), why=redact_text(one.why), cure=redact_text(one.cure),
                groups=tuple(_named(group, address_of) for group in one.groups),
            ) for one in report.found
        ),
        sizes=() if sizes is None else (sizes,),
        fields=tuple(_field_cards(report)),
        classes=tuple(_class_words(report.classes)),
        columns=tuple(_column_cards(report)),
    )  # fmt: skip


def stats_page(report: StatsReport) -> str:
    """Return the report of ``shard_tools stats`` as a page: one self-contained file.

    Raises:
        ConfigError: Jinja is not installed.
    """
    title = f"{report.url} · shard_tools stats"
    shown = stats_shown(report, lambda _: "")
    return render("stats.html", title=title, url=report.url, selected=report.selected, shown=shown)


def _named(group: Group, address_of: Callable[[ExampleSample], str]) -> tuple[NamedSample, ...]:
    return tuple(NamedSample(key=one.key, address=address_of(one)) for one in group)


def _facts(report: StatsReport) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts about the whole set."""
    keys, compared = report.totals.keys, report.compared
    yield "samples", f"{report.num_samples:,}"
    mean = report.num_bytes / max(report.num_samples, 1)
    yield "bytes", f"{format_bytes(report.num_bytes)}, {format_bytes(mean)} a sample"
    yield "shards", f"{report.num_shards:,}"
    yield "chunks", f"{report.num_chunks:,}"
    about = "" if report.has_seen_all else "about "
    scale = report.num_samples / max(report.num_seen, 1)
    if report.num_tokens is not None:
        yield "tokens", f"{about}{round(report.num_tokens * scale):,}"
    if report.supervised is not None:
        yield "supervised", f"{report.supervised[0] / max(report.supervised[1], 1):.1%}"
    for name, one in sorted(report.totals.fields.items()):
        seconds = one.numbers.get("seconds")
        if seconds is not None and seconds.num:
            yield f"length of {name}", f"about {_time(seconds.total / seconds.num * one.num * scale)}"
    yield "duplicate keys", f"{keys.num_again:,}"
    if compared is None:
        yield "duplicate contents", "not compared"
    else:
        contents = report.totals.fields[compared].repeats
        yield "duplicate contents", f"{contents.num_again:,} of {contents.num:,} {compared}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _field_cards(report: StatsReport) -> list[Card]:
    cards, same = [], report.classes.same
    for name, one in sorted(report.totals.fields.items()):
        facts = [("kind", report.kinds[name]), ("samples", f"{one.num:,}")]
        facts += [("classes", f"those of {same[name]}")] if name in same else []
        facts += [("of all", f"{one.num / report.num_seen:.1%}")] if report.num_seen else []
        facts += [("bytes", format_bytes(one.sizes.total)), ("empty", f"{one.num_empty:,}")]
        facts += [("looked at", f"{one.num_read:,}"), ("broken", f"{one.num_broken:,}")]
        plots = [_histogram("bytes", one.sizes, in_bytes=True)]
        plots += [_histogram(what, spread) for what, spread in sorted(one.numbers.items())]
        shown = [_words(what, top, total=one.num_looked) for what, top in one.shown_words()]
        card = Card(
            name=name, facts=tuple(facts), histograms=tuple(plot for plot in plots if plot is not None),
            words=tuple(shown), broken=tuple(redact_text(f"{each.key}: {each.what}") for each in one.broken),
        )  # fmt: skip
        cards.append(card)
    return cards


def _column_cards(report: StatsReport) -> list[Card]:
    cards, classes = [], report.classes
    for name, one in sorted(report.totals.columns.items()):
        if name in classes.once:
            continue
        facts = [("type", one.type), ("missing", f"{report.num_seen - one.num:,}")]
        if name in classes.same:
            facts += [("classes", f"those of {classes.same[name]}")]
            cards.append(Card(name=name, facts=tuple(facts), histograms=(), words=()))
            continue
        facts += [("added later", "yes")] if one.is_late else []
        facts += [("min", one.least), ("max", one.most)] if one.least is not None and one.most is not None else []
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
    middle = (f"half up to {shown['p50']}", f"mean {shown['mean']}")
    return histogram(
        name, spread.bins(), is_wide=spread.is_wide, least=shown["min"], most=shown["max"], middle=middle
    )  # fmt: skip


def _words(name: str, top: Top, shown: int = _SHOWN, *, total: int | None = None) -> Words:
    others = f"{counted(len(top.counts) - shown, 'other')}" if len(top.counts) > shown else ""
    if not top.is_exact:
        others = f"more than {len(top.counts):,} others; counts are too low by {top.lost:,} at most"
    return Words(name=name, rows=rows(top.most_common(shown), total or top.num), others=others)


def _class_words(classes: Classes) -> list[Words]:
    return [_words(classes.title(name), top, _SHOWN_CLASSES) for name, top in sorted(classes.once.items())]


def _bytes(number: float | None) -> str:
    return format_bytes(number or 0)


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,}" if isinstance(number, int) else f"{number:,.4g}"
