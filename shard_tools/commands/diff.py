"""Parse the command ``diff``: the differences between two sets."""

from __future__ import annotations

from typing import Any

import click

from shard_tools.look.diff.compare import ChangedSample, DiffOptions, DiffReport, diff
from shard_tools.running.progress import progress_bar
from shard_tools.running.report import plain
from shard_tools.terminal.options import (
    SECRET_PAIR,
    SIZE,
    as_storage_options,
    report_options,
    typed_option,
    unfinished_option,
    with_storage_options,
)
from shard_tools.terminal.verbs import emit, finish
from streaming.common.arguments import counted, format_bytes
from streaming.storage import Storage

_SHOWN, _LISTED = 20, 100_000
_SHOWN_SHARDS = 5


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--index", "index_a", metavar="URL", help="Location of A's index. Default: beside the shards.")
@click.option("--index-b", metavar="URL", help="Location of B's index. Default: beside the shards.")
@click.option(
    "--option-b",
    type=SECRET_PAIR,
    multiple=True,
    metavar="K=V",
    help="Option of B's store, such as endpoint_url=URL; the other store options then apply to A only.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Keys to list per kind of difference; counts always cover all.  [default: {_SHOWN}; with --json {_LISTED:,}]",
)
@click.option(
    "--memory",
    "memory_bytes",
    type=SIZE,
    default="1GiB",
    show_default=True,
    help="Memory for keys and checksums; larger sets use temporary files.",
)
@unfinished_option
@report_options
@with_storage_options
def diff_command(
    a: str, b: str, *, option_b: tuple[tuple[str, str], ...], limit: int | None, as_json: bool, **arguments: Any
) -> None:
    """Compare the samples of A and B by key and content, and their columns.

    The order of samples and their distribution over shards do not matter; shards that were added, removed, replaced or
    reordered are reported. Samples that the checksums of both indexes can compare are not read. A set without an index
    is read whole. Exits with 0 if the sets are equal, and with 1 if they differ.

    \b
    Example:
      shard_tools diff s3://bucket/train-v1/ s3://bucket/train-v2/
      shard_tools diff shards/ resharded/ --json --limit 10
    """
    storage_options = as_storage_options(arguments)
    options_b = {key: typed_option(key, text) for key, text in option_b}
    options = DiffOptions(limit=(_LISTED if as_json else _SHOWN) if limit is None else limit, **arguments)
    with progress_bar("diff", "shards") as progress:
        report = diff(
            a, b, storage=Storage(storage_options), storage_b=Storage(options_b) if options_b else None,
            options=options, progress=progress,
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=_show)
    finish(failed=not report.equal)


def _show(report: DiffReport) -> None:
    """Print the differences as text."""
    click.echo(_summary(report))
    for name, keys, total in (("A", report.only_a, report.num_only_a), ("B", report.only_b, report.num_only_b)):
        if keys:
            click.echo(f"only in {name}: {_listed(keys, total)}")
    if report.changed:
        click.echo(f"changed: {_listed([_changed(one) for one in report.changed], report.num_changed)}")
    for told in report.schema:
        click.echo(f"other meaning: {told}")
    for line in _shard_lines(report):
        click.echo(line)
    for name, count in zip("AB", report.repeated, strict=True):
        if count:
            click.echo(
                f"{name} has {counted(count, 'sample')} whose key occurs more than once; of each key, equal samples "
                "are matched first, then the others in order",
                err=True,
            )
    if report.unindexed:
        click.echo(f"without an index, and so read whole, without columns: {' and '.join(report.unindexed)}", err=True)
    click.echo(f"read {format_bytes(report.num_read_bytes)} of shards, beside the index, in {report.seconds:.1f} s")


def _summary(report: DiffReport) -> str:
    """Return one line: counts of samples by difference, and the columns that differ."""
    parts = [
        f"{counted(count, 'sample')} only in {name}"
        for name, count in (("A", report.num_only_a), ("B", report.num_only_b))
        if count
    ]
    if report.num_changed:
        fields = ", ".join(f"field {plain(name)} of {count:,}" for name, count in report.fields.items())
        parts.append(f"{report.num_changed:,} changed: {fields}")
    said = [", ".join(parts)] if parts else []
    if report.columns is not None:
        said += [f"column {plain(name)} added" for name in report.columns.only_b]
        said += [f"column {plain(name)} removed" for name in report.columns.only_a]
        said += [f"column {plain(name)}: {count:,} other values" for name, count in report.columns.changed.items()]
    same = f"{counted(report.same, 'sample')} the same"
    return "; ".join([*said, same]) if said else f"equal: {same}"


def _listed(names: Any, total: int) -> str:
    more = f", … {total - len(names):,} more" if total > len(names) else ""
    return f"{', '.join(map(plain, names))}{more}"


def _changed(sample: ChangedSample) -> str:
    return f"{sample.key} ({', '.join(sample.fields)})"


def _shard_lines(report: DiffReport) -> list[str]:
    """Return the lines about shards that differ."""
    shards = report.shards
    lines = [
        f"shards {what}: {_listed(names[:_SHOWN_SHARDS], len(names))}"
        for what, names in (("only in A", shards.only_a), ("only in B", shards.only_b), ("replaced", shards.replaced))
        if names
    ]
    return [*lines, *(["shards in another order"] if shards.reordered else [])]
