"""Parse the command ``stats``, and show its report as text."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import click
from click.core import ParameterSource

from shard_tools.look.show.overview.cards import stats_page
from shard_tools.look.stats.report import StatsReport
from shard_tools.look.stats.run import JOURNALS, StatsOptions, stats
from shard_tools.look.stats.sketches import WORDS, Distribution, Top
from shard_tools.look.stats.survey import DEFAULT_LIMIT
from shard_tools.look.stats.totals import FieldTotals
from shard_tools.running.engine import DEFAULT_WORKERS, open_engine
from shard_tools.running.printing import show_table
from shard_tools.running.progress import progress_bar
from shard_tools.running.report import plain
from shard_tools.running.templates import jinja
from shard_tools.terminal.options import COUNT, on_shards, on_shards_in_parallel
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import checked_path, counted, format_bytes
from streaming.errors import ConfigError
from streaming.sets.filters.select import parse_subset
from streaming.storage import Storage, redact_text

_SHOWN = 6  # words of a field, values of a column
_RARE = 100  # a value is rare if fewer than one in 100 samples has it


@click.command("stats")
@click.option(
    "--limit", type=COUNT, default=DEFAULT_LIMIT, show_default=True, metavar="N",
    help="Read the bytes of N samples, spread over all shards.",
)  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Read the bytes of all samples; can be stopped and continued.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of their choice.")
@click.option("--where", metavar="CONDITION", help="Only samples that match; see docs/filters.md.")
@click.option("--view", metavar="NAME", help="Only the samples of a saved view.")
@click.option("--subset", metavar="A..B", help="Only a range of the stored samples: 0%..80%, or 1000..2000.")
@click.option("--html", metavar="FILE", help="Also write the report as one HTML file, with plots (extra: show).")
@click.option(
    "--journal", default=JOURNALS, show_default=True, metavar="URL",
    help="With --all: folder or prefix where the progress is kept until it is done.",
)  # fmt: skip
@on_shards_in_parallel()
@on_shards
@click.pass_context
def stats_command(
    context: click.Context, /, *, urls: tuple[str, ...], storage: Storage, limit: int, everything: bool,
    subset: str | None, html: str | None, as_json: bool, index_url: str | None, allow_unfinished: bool,
    engine: str, workers: int | None, **arguments: Any,
) -> None:  # fmt: skip
    """Summarize a set, and report surprises for training.

    Shows fields with their sizes, kinds of content, classes, sizes and modes of images, codecs, rates and durations of
    sounds and videos, lengths of texts, tokens, columns (late ones, too), duplicates, and surprises, each with its
    cure. Facts from the index cover all samples; the rest comes from --limit of them.

    \b
    Example:
      shard_tools stats s3://bucket/train/
      shard_tools stats s3://bucket/train/ --all --html report.html
      shard_tools stats shards/ --where "tokens >= 512" --json
    """
    given = {
        name for name in ("limit", "journal") if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }  # fmt: skip
    if everything and "limit" in given:
        raise click.UsageError("--limit and --all cannot be combined: give one of them.")
    if "journal" in given and not everything:
        raise click.UsageError("--journal has no effect without --all. Leave it out.")
    if html is not None:
        jinja("--html", "show")  # before the work
        check_page(html)
    workers = workers or DEFAULT_WORKERS[engine]
    arguments |= {"limit": None if everything else limit, "subset": parse_subset(subset), "workers": workers}
    with open_engine(engine, workers) as executor, progress_bar("stats", "shards") as progress:
        report = stats(
            urls, storage=storage, index_url=index_url, options=StatsOptions(**arguments),
            allow_unfinished=allow_unfinished, executor=executor, progress=progress,
        )  # fmt: skip
    if html is not None:
        write_page(html, stats_page(report))
    emit(report, as_json=as_json, for_people=show_stats)


def check_page(path: str) -> None:
    """Refuse a local file of ``--html`` that cannot be written, before the work; an existing file is not changed.

    Raises:
        ConfigError: The file cannot be written.
    """
    checked_path("--html", path)
    with _errors_of(path):
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_replaced(path):
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or "."):
                pass


def write_page(path: str, text: str) -> None:
    """Write the local file of ``--html`` atomically.

    Raises:
        ConfigError: It cannot be written.
    """
    content = text.encode("utf-8", "backslashreplace")
    with _errors_of(path):
        if _is_replaced(path):
            Storage().put(os.path.abspath(path), content)
        else:
            with open(path, "wb") as file:
                file.write(content)


def _is_replaced(path: str) -> bool:
    """Return whether a new file replaces the path; a device or pipe, such as /dev/stdout, is written directly."""
    return not os.path.exists(path) or os.path.isfile(path)


@contextlib.contextmanager
def _errors_of(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"--html {path}: {why}; give the path of a file that can be written") from error


def show_stats(report: StatsReport) -> None:
    """Print totals, fields, columns, duplicates and surprises."""
    mean = report.num_bytes / report.num_samples if report.num_samples else 0
    click.echo(f"samples    {report.num_samples:,}{f' ({plain(report.selected)})' if report.selected else ''}")
    click.echo(f"bytes      {report.num_bytes:,} ({format_bytes(report.num_bytes)}, {format_bytes(mean)} a sample)")
    click.echo(f"shards     {report.num_shards:,}")
    click.echo(f"chunks     {report.num_chunks:,}")
    click.echo(f"read       {report.read_words}")
    totals = report.totals
    show_table(
        ("field", "kind", "samples", "bytes min", "p50", "mean", "max"),
        [
            (name, report.kinds[name], f"{one.num:,}", *_sizes(one.sizes))
            for name, one in sorted(totals.fields.items())
        ],
    )  # fmt: skip
    for name, one in sorted(totals.fields.items()):
        for line in _shown(one):
            click.echo(f"{plain(name)}: {line}")
    _show_tokens(report)
    classes = report.classes
    for name, top in sorted(classes.once.items()):
        many = f"{len(top.counts):,}" if top.is_exact else f"more than {WORDS:,}"
        click.echo(f"classes of {plain(classes.title(name))}: {many}{_missing(report, name)}: {_most(top)}")
    columns = [(name, one) for name, one in sorted(totals.columns.items()) if name not in classes.once]
    show_table(
        ("column", "type", "missing", "min", "max", "most frequent"),
        [
            (
                f"{name}{' (late)' if one.is_late else ''}", one.type, f"{report.num_seen - one.num:,}",
                *(_ends(one.numbers) if one.numbers.num else (one.least or "", one.most or "")), _frequent(one.top),
            )
            for name, one in columns
        ],
    )  # fmt: skip
    _show_duplicates(report)
    for found in report.found:
        what, why, cure = (plain(redact_text(text)) for text in (found.what, found.why, found.cure))
        named = ", ".join(" = ".join(plain(one.key) for one in group) for group in found.groups)
        click.echo(f"! {what}\n" + f"    such as: {named}\n" * bool(named) + f"    why:  {why}\n    cure: {cure}")
    click.echo(f"{counted(len(report.found), 'surprise')}")


def _show_tokens(report: StatsReport) -> None:
    if report.num_tokens is not None:
        click.echo(f"tokens     {report.num_tokens:,}")
    if report.supervised is not None:
        supervised, of = report.supervised
        click.echo(f"supervised {supervised / max(of, 1):.1%} of the {counted(of, 'token')} whose masks were read")


def _missing(report: StatsReport, name: str) -> str:
    """Return how many samples lack the class of a column, in words."""
    column = report.totals.columns.get(name)
    missing = 0 if column is None else report.num_seen - column.num
    return f" ({missing:,} missing)" if missing else ""


def _show_duplicates(report: StatsReport) -> None:
    keys = report.totals.keys
    about = "" if keys.is_exact else "about "
    click.echo(f"duplicates {about}{keys.num_again:,} of {keys.num:,} keys", nl=False)
    compared = report.compared
    if compared is None:
        click.echo("; contents were not compared (--all compares them)")
        return
    contents = report.totals.fields[compared].repeats
    about = "" if contents.is_exact else "about "
    click.echo(f"; {about}{contents.num_again:,} of {contents.num:,} contents of {plain(compared)} that were compared")


def _sizes(spread: Distribution) -> tuple[str, ...]:
    told = spread.told()
    return tuple(format_bytes(told[name] or 0) for name in ("min", "p50", "mean", "max"))


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,}" if isinstance(number, int) else f"{number:,.4g}"


def _ends(spread: Distribution) -> tuple[str, str]:
    return _number(spread.told()["min"]), _number(spread.told()["max"])


def _shown(one: FieldTotals) -> Iterator[str]:
    for what, spread in sorted(one.numbers.items()):
        told = spread.told()
        yield f"{what} " + ", ".join(f"{name} {_number(told[name])}" for name in ("min", "p50", "mean", "max"))
    for what, top in one.shown_words():
        yield f"{what} {_most(top, one.num_looked)}"


def _most(top: Top, total: int | None = None) -> str:
    found = [f"{plain(str(word))[:40]} {count / (total or top.num):.1%}" for word, count in top.most_common(_SHOWN)]
    return ", ".join(found) + (", …" if len(top.counts) > _SHOWN else "")


def _frequent(top: Top) -> str:
    """Return the most frequent values of a column, or the number of values if each is rare."""
    most = max(top.counts.values(), default=0)
    if most * _RARE >= top.num:
        return _most(top)
    return f"{len(top.counts):,} different" if top.is_exact else f"more than {WORDS:,} different"
