"""Parse the commands ``column`` and ``view``, which add values and filters to existing shards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, get_args

import click
from click.core import ParameterSource

from shard_tools.change.columns.compute import ComputeOptions, compute_column
from shard_tools.change.columns.join import JoinOptions, Missing, join_column
from shard_tools.change.columns.lift import lift_column
from shard_tools.change.columns.target import AddReport, ColumnTarget, ListReport, drop_column, list_all
from shard_tools.change.columns.views import ViewReport, ViewsReport, save, show, show_all
from shard_tools.running.engine import DEFAULT_MEMORY, DEFAULT_WORKERS, open_engine
from shard_tools.running.progress import progress_bar
from shard_tools.terminal.options import SIZE, names, on_named, on_shards, on_shards_in_parallel, writing_options
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import counted
from streaming.storage import Storage


@click.group("column")
def column_group() -> None:
    """Add, list and drop late columns.

    Late columns are values added to existing shards, for filters.

    \b
    Example:
      shard_tools column add s3://bucket/train/ score --from scores.parquet --on key
    """


@column_group.command("add")
@writing_options
@click.option("--from", "source", metavar="FILE", help="Parquet, JSONL or CSV file, or a pattern: one row per sample.")
@click.option("--on", metavar="COLUMN", help="Column of FILE with the samples' keys.")
@click.option("--value", metavar="COLUMN", help="Column of FILE with the values. Default: NAME, or the only other one.")
@click.option("--lift", metavar="PATH", help="Take the values from the samples instead, such as json.similarity.")
@click.option(
    "--compute", metavar="tokens|MODULE:FUNCTION", help="Compute the values from the samples, with your function."
)
@click.option("--fields", type=names, metavar="A,B", help="With --compute: read and decode only these fields.")
@click.option(
    "--dtype", type=click.Choice(["uint16", "uint32"]), help="With --compute tokens. Default: as recorded in the set."
)
@click.option(
    "--missing",
    type=click.Choice(get_args(Missing)),
    default="null",
    show_default=True,
    help="Samples without a row or value get none, or are an error.",
)
@click.option("--memory", "memory_bytes", type=SIZE, default=DEFAULT_MEMORY, show_default=True, help="Memory for keys.")
@on_shards_in_parallel(what="With --lift or --compute: shards")
@click.option("--overwrite", is_flag=True, help="Replace a late column of this name.")
@on_named("column")
def add_command(
    urls: list[str], *, storage: Storage, source: str | None, on: str | None, lift: str | None, compute: str | None,
    fields: tuple[str, ...] | None, dtype: str | None, engine: str, workers: int | None, as_json: bool,
    **arguments: Any,
) -> None:  # fmt: skip
    """Add the late column NAME to the shards at URL.

    Values are joined from a file by key, taken from the samples, or computed. The column is stored beside the index, in
    one file per shard; shards are not written, and with --from not even read. Keys that do not match are reported. It
    is an error if no key matches, or if a key occurs twice in the table. A function gets a decoded sample (a dict) and
    returns a number, text, a bool or None. It is called on several threads, or on Ray, where every node must be able
    to import its module.

    \b
    Example:
      shard_tools column add s3://bucket/train/ score --from 's3://bucket/scores/*.parquet' --on key
      shard_tools column add laion/ similarity --lift json.similarity
      shard_tools column add s3://bucket/train/ words --compute mymodule:count_words --fields txt
      shard_tools column add s3://bucket/tokens/ length --compute tokens
    """
    if [source, lift, compute].count(None) != 2 or (source is not None and on is None):
        raise click.UsageError("Give one of --from FILE --on COLUMN, --lift PATH, and --compute FUNCTION.")
    if compute is None and (fields or dtype):
        raise click.UsageError("--fields and --dtype are for --compute.")
    source_of = click.get_current_context().get_parameter_source
    if source is not None and ParameterSource.COMMANDLINE in {source_of("engine"), source_of("workers")}:
        raise click.UsageError("--engine and --workers are for --lift and --compute: --from reads no shards.")
    which = {option: arguments.pop(option) for option in ("name", "index_url", "overwrite", "allow_unfinished")}
    target = ColumnTarget(urls, storage=storage, **which)
    workers = workers or DEFAULT_WORKERS[engine]
    there = nullcontext() if source is not None else open_engine(engine, workers)
    with there as executor, progress_bar("column", "shards") as progress:
        if lift is not None:
            report = lift_column(target, lift, workers=workers, executor=executor, progress=progress)
        elif compute is not None:
            computing = ComputeOptions(fields=fields, dtype=dtype, workers=workers)
            report = compute_column(target, compute, options=computing, executor=executor, progress=progress)
        else:
            options = JoinOptions(on=str(on), **arguments)
            report = join_column(target, str(source), storage=storage, options=options, progress=progress)
    emit(report, as_json=as_json, for_people=show_added)


@column_group.command("list")
@on_shards
def list_command(urls: tuple[str, ...], *, as_json: bool, **arguments: Any) -> None:
    """List the late columns of shards.

    \b
    Example:
      shard_tools column list s3://bucket/train/
    """
    report = list_all(urls, **arguments)
    emit(report, as_json=as_json, for_people=_show_columns)


@column_group.command("drop")
@writing_options
@on_named("column")
def drop_command(urls: list[str], *, as_json: bool, **arguments: Any) -> None:
    """Delete the late column NAME. Runs and views that use it will no longer work.

    \b
    Example:
      shard_tools column drop s3://bucket/train/ score
    """
    report = drop_column(urls, **arguments)
    deleted = f"{report.name}: {counted(report.num_files, 'file')} deleted"
    emit(report, as_json=as_json, for_people=lambda _: click.echo(deleted))


@click.group("view")
def view_group() -> None:
    """Save, list and show named filters.

    A view is stored beside the index, for StreamingDataset(view=NAME).

    \b
    Example:
      shard_tools view save s3://bucket/train/ clean-v2 --where "score >= 0.3 and lang = 'en'"
    """


@view_group.command("save")
@writing_options
@click.option("--where", metavar="CONDITION", help="Condition for samples to keep; see docs/filters.md.")
@click.option("--subset", metavar="A..B", help="Range of the stored samples: 0%..80%, or 1000..2000.")
@click.option("--exclude", metavar="FILE", help="Text file of keys to leave out, one per line.")
@click.option("--overwrite", is_flag=True, help="Replace a view of this name.")
@on_named("view")
def save_command(urls: list[str], *, as_json: bool, **arguments: Any) -> None:
    """Save a filter for the shards at URL as the view NAME, with the versions of its late columns.

    \b
    Example:
      shard_tools view save s3://bucket/train/ clean-v2 --where "score >= 0.3" --subset 0%..80%
    """
    report = save(urls, **arguments)
    emit(report, as_json=as_json, for_people=_show_view)


@view_group.command("list")
@on_shards
def views_command(urls: tuple[str, ...], *, as_json: bool, **arguments: Any) -> None:
    """List the views of shards.

    \b
    Example:
      shard_tools view list s3://bucket/train/
    """
    report = show_all(urls, **arguments)
    emit(report, as_json=as_json, for_people=_show_views)


@view_group.command("show")
@on_named("view")
def show_command(urls: list[str], *, as_json: bool, **arguments: Any) -> None:
    """Show one view: its conditions, and the versions of the columns that it was saved with.

    \b
    Example:
      shard_tools view show s3://bucket/train/ clean-v2
    """
    report = show(urls, **arguments)
    emit(report, as_json=as_json, for_people=_show_view)


def show_added(report: AddReport) -> None:
    """Print the totals, and the keys that did not match."""
    for count, what, keys in (
        (counted(report.num_missing, "sample"), "without a value", report.first_missing),
        (counted(report.num_unmatched, "row"), "without a sample", report.first_unmatched),
    ):
        if not count.startswith("0 "):
            click.echo(f"{what}: {count}{f', first {chr(44).join(keys)}' if keys else ''}", err=True)
    if report.num_shared:
        click.echo(f"with the key of another sample, and its value: {counted(report.num_shared, 'sample')}", err=True)
    click.echo(
        f"column {report.name} ({report.type}, version {report.column_version}): "
        f"{counted(report.num_samples - report.num_missing, 'value')} for {counted(report.num_samples, 'sample')} in "
        f"{counted(report.num_shards, 'shard')}, in {report.seconds:.1f} s"
    )


def _show_columns(report: ListReport) -> None:
    for column in report.columns:
        click.echo(
            f"{column['name']}  {column['type']}  version {column['column_version']}  "
            f"{counted(int(str(column['num_samples'])), 'sample')}, {column['num_missing']:,} without a value  from "
            f"{column['made_from']}"
        )
    if not report.columns:
        click.echo("no late columns")


def _show_view(report: ViewReport) -> None:
    said = [f"where {report.where}"] if report.where else []
    said += [f"subset {report.subset[0]} to {report.subset[1]}"] if report.subset else []
    said += [f"without {counted(report.num_excluded, 'key')}"] if report.num_excluded else []
    said += [f"column {name} version {version}" for name, version in report.columns.items()]
    click.echo(
        f"{report.name}  {report.num_kept:,} of {counted(report.num_samples, 'sample')}  hash {report.hash}\n"
        + "\n".join(f"  {line}" for line in said)
    )


def _show_views(report: ViewsReport) -> None:
    for view in report.views:
        _show_view(view)
    if not report.views:
        click.echo("no views")
