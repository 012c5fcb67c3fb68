"""Parse the command ``clean``: remove leftovers of killed runs."""

from __future__ import annotations

import re
from typing import Any

import click

from shard_tools.change.sets.clean import CleanReport, clean
from shard_tools.terminal.options import as_storage_options, report_options, with_storage_options
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import counted, format_bytes

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class AgeType(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click alone
    """A duration, written as ``90s``, ``30m``, ``12h`` or ``2d``."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the duration in seconds."""
        if isinstance(value, (int, float)):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if found is None:
            self.fail(f"{value!r} is not a time such as 90s, 30m, 12h or 2d", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


@click.command("clean")
@click.argument("url")
@click.option(
    "--older-than", "older_than_s", type=AgeType(), default="1d", show_default=True, metavar="TIME",
    help="Keep uploads that began later: somebody may be writing them.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only report what would be removed.")
@report_options
@with_storage_options
def clean_command(url: str, *, older_than_s: float, dry_run: bool, as_json: bool, **arguments: Any) -> None:
    """Remove leftovers of killed runs below URL: temporary files, and unfinished uploads to S3.

    Shards, indexes and marks of unfinished sets are kept, so that their command can continue. Stores charge for the
    parts of unfinished uploads, but do not show them in ordinary listings.

    \b
    Example:
      shard_tools clean s3://bucket/train/ --dry-run
      shard_tools clean /data/train/
    """
    options = as_storage_options(arguments)
    report = clean(url, storage_options=options, older_than_s=older_than_s, dry_run=dry_run)
    emit(report, as_json=as_json, for_people=_show)


def _show(report: CleanReport) -> None:
    """Print the leftovers."""
    for one in report.found:
        size = "" if one.num_bytes is None else f", {format_bytes(one.num_bytes)}"
        done = f"kept: {one.why_kept}" if one.why_kept else "would be removed" if report.dry_run else "removed"
        click.echo(f"{one.kind} {one.url}{size}, {one.age_s / 3600:,.1f} h old: {done}")
    gone = sum(one.removed for one in report.found)
    click.echo(f"{counted(len(report.found), 'left-over')} found, {gone:,} removed")
    for place in report.unfinished:
        click.echo(f"{place} is unfinished, and kept: run its command again, or delete it", err=True)
    for words in report.not_listed:
        click.echo(words, err=True)
