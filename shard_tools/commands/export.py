"""Parse the command ``export``: write the files that other programs need to read a set."""

from __future__ import annotations

from typing import Any

import click

from shard_tools.change.export.job import ExportOptions
from shard_tools.change.export.run import FORMATS, ExportReport, export
from shard_tools.running.engine import DEFAULT_WORKERS
from shard_tools.running.progress import progress_bar
from shard_tools.terminal.options import (
    COUNT,
    PAIR,
    as_storage_options,
    dry_run_option,
    index_option,
    names,
    places_and_target,
    report_options,
    unfinished_option,
    with_storage_options,
)
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import counted

_SHOWN = 3


@click.command("export")
@dry_run_option
@click.argument("urls", nargs=-1, required=True, metavar="URL... TARGET")
@click.option(
    "--to", required=True, type=click.Choice(tuple(FORMATS)), help="The format, or the program that reads it."
)
@click.option(
    "--split",
    "splits",
    type=PAIR,
    multiple=True,
    metavar="NAME=PATTERN",
    help="Shards of a split, such as val='val-*.tar'; the first pattern that fits decides.  [default: by folder]",
)
@click.option("--where", metavar="CONDITION", help="Parquet, lerobot: keep samples that match.")
@click.option("--view", metavar="NAME", help="Parquet, lerobot: keep the samples of a saved view.")
@click.option("--fields", type=names, metavar="EXT,...", help="Parquet only: keep these fields.")
@click.option("--columns", type=names, default=(), metavar="A,B", help="Parquet only: late columns to keep.")
@click.option("--workers", type=COUNT, default=DEFAULT_WORKERS["local"], show_default=True, help="Shards in parallel.")
@click.option("--overwrite", is_flag=True, help="Replace existing files that have other content.")
@index_option
@unfinished_option
@report_options
@with_storage_options
def export_command(
    urls: tuple[str, ...], *, to: str, as_json: bool, fields: tuple[str, ...] | None, **arguments: Any
) -> None:
    """Write the files that another program needs to read the shards at URL: metadata, or Parquet in TARGET.

    energon, dali, wids and card write metadata from the index, and those programs read the tars themselves. parquet and
    hf (for `datasets`, with a card) write the samples, one file per shard; lerobot writes the episodes of a set that
    `convert --from lerobot` wrote. The shards are never changed. A run that was stopped continues where it left off
    when it is run again.

    \b
    Example:
      shard_tools export shards/ shards/ --to energon --split val='val-*.tar' --split train='*'
      shard_tools export s3://bucket/train/ index/ --to dali
      shard_tools export shards/ parquet/ --to hf --where "width >= 256" --fields jpg,cls
    """
    places, target = places_and_target(urls)
    storage_options = as_storage_options(arguments)
    options = ExportOptions(fields=None if fields is None else tuple(name.lstrip(".") for name in fields), **arguments)
    with progress_bar("export", "shards") as progress:
        report = export(
            places, target, to=to, options=options, storage_options=storage_options, progress=progress
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=_show)


def _show(report: ExportReport) -> None:
    """Print the files and totals."""
    shown = ", ".join(report.files[:_SHOWN])
    more = f", … ({counted(len(report.files), 'file')})" if len(report.files) > _SHOWN else ""
    there = len(report.files) - report.num_written
    click.echo(
        f"{report.target}: {shown}{more}, for {counted(report.num_samples, 'sample')} in "
        f"{counted(report.num_shards, 'shard')}"
        + (f"; {counted(there, 'file')} of them there before" if there else "")
        + ("; the tars are read directly" if report.reads_tars else "")
    )
