"""Parse the commands ``column``, ``field`` and ``view``, which add values, fields and filters to existing shards."""

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
from shard_tools.change.fields.join import FromSet, join_field
from shard_tools.change.fields.listed import FieldDropReport, FieldsReport, drop_field, list_fields
from shard_tools.change.fields.target import FieldReport, OnMissing
from shard_tools.change.functions.field import compute_field
from shard_tools.change.functions.length import LENGTH, LengthOptions, measure_column
from shard_tools.change.functions.run import Running
from shard_tools.running.engine import DEFAULT_MEMORY, DEFAULT_WORKERS, open_engine
from shard_tools.running.printing import show_earlier
from shard_tools.running.progress import progress_bar
from shard_tools.terminal.options import (
    COUNT,
    SIZE,
    as_storage_options,
    dry_run_option,
    engine_option,
    names,
    on_named,
    on_shards,
    on_shards_in_parallel,
    report_options,
    with_storage_options,
)
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import counted, format_bytes
from streaming.shards.index.columns import KEY
from streaming.storage import Storage

_JOIN_WORKERS = 8


@click.group("column")
def column_group() -> None:
    """Add, list and drop late columns.

    Late columns are values added to existing shards, for filters.

    \b
    Example:
      shard_tools column add s3://bucket/train/ score --from scores.parquet --on key
    """


@column_group.command("add")
@dry_run_option
@click.option("--from", "source", metavar="FILE", help="Parquet, JSONL or CSV file, or a pattern: one row per sample.")
@click.option("--on", metavar="COLUMN", help="Column of FILE with the samples' keys.")
@click.option("--value", metavar="COLUMN", help="Column of FILE with the values. Default: NAME, or the only other one.")
@click.option("--lift", metavar="PATH", help="Take the values from the samples instead, such as json.similarity.")
@click.option(
    "--compute", metavar="tokens|bytes|length|MODULE:FUNCTION",
    help="Compute the values from the samples: tokens or bytes of a field, the length of values, or your function.",
)  # fmt: skip
@click.option("--fields", type=names, metavar="A,B", help="With --compute: read and decode only these fields.")
@click.option("--after", metavar="MODULE:FUNCTION", help="With --compute length: the transform of training.")
@click.option("--field", metavar="FIELD", help="With --compute length: the field to measure, if there are several.")
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
def add_command(  # noqa: PLR0913  the options of the command
    urls: list[str], *, storage: Storage, source: str | None, on: str | None, lift: str | None, compute: str | None,
    fields: tuple[str, ...] | None, dtype: str | None, after: str | None, field: str | None, engine: str,
    workers: int | None, as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Add the late column NAME to the shards at URL.

    Values are joined from a file by key, taken from the samples, or computed. The column is stored beside the index, in
    one file per shard; shards are not written, and with --from not even read. Keys that do not match are reported. It
    is an error if no key matches, or if a key occurs twice in the table. A function gets a decoded sample (a dict) and
    returns a number, text, a bool or None. It is called on several threads, or on Ray, where every node must be able
    to import its module. The length is the first dimension of what a transform returns, which runs in processes.

    \b
    Example:
      shard_tools column add s3://bucket/train/ score --from 's3://bucket/scores/*.parquet' --on key
      shard_tools column add laion/ similarity --lift json.similarity
      shard_tools column add s3://bucket/train/ words --compute mymodule:count_words --fields txt
      shard_tools column add s3://bucket/tokens/ length --compute tokens
      shard_tools column add s3://bucket/train/ bytes_of_txt --compute bytes --fields txt
      shard_tools column add s3://bucket/speech/ frames --compute length --after mymodule:features --field flac
    """
    if [source, lift, compute].count(None) != 2 or (source is not None and on is None):
        raise click.UsageError("Give one of --from FILE --on COLUMN, --lift PATH, and --compute FUNCTION.")
    if compute is None and (fields or dtype):
        raise click.UsageError("--fields and --dtype are for --compute.")
    if compute != LENGTH and (after or field):
        raise click.UsageError("--after and --field are for --compute length.")
    if compute == LENGTH and dtype:
        raise click.UsageError("--dtype is for --compute tokens.")
    source_of = click.get_current_context().get_parameter_source
    if source is not None and ParameterSource.COMMANDLINE in {source_of("engine"), source_of("workers")}:
        raise click.UsageError("--engine and --workers are for --lift and --compute: --from reads no shards.")
    which = {option: arguments.pop(option) for option in ("name", "index_url", "overwrite", "allow_unfinished")}
    target = ColumnTarget(urls, storage=storage, **which)
    if compute == LENGTH:
        measured = LengthOptions(after=after, field=field, fields=fields)
        with progress_bar("column", "shards") as progress:
            running = Running(workers=workers, engine=engine)
            report = measure_column(target, urls, options=measured, running=running, progress=progress)
        emit(report, as_json=as_json, for_people=show_added)
        return
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
@dry_run_option
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


@click.group("field")
def field_group() -> None:
    """Add, list and drop late fields.

    Late fields are fields, such as latents or captions, in tars beside existing shards; these stay as they are.

    \b
    Example:
      shard_tools field add s3://bucket/train/ latents.npy --compute mymodule:encode --fields jpg
    """


@field_group.command("add")
@dry_run_option
@click.argument("target", metavar="SET")
@click.argument("name", metavar="NAME")
@click.option("--compute", metavar="MODULE:FUNCTION", help="Compute the values from the samples, with your function.")
@click.option("--from", "source", metavar="OTHER", help="Take the values from the samples of another set.")
@click.option("--on", metavar="key|COLUMN", help="With --from: what has the keys of SET there.  [default: its keys]")
@click.option("--field", metavar="FIELD", help="With --from: the field there.  [default: NAME]")
@click.option("--fields", type=names, metavar="A,B", help="With --compute: read and decode only these fields.")
@click.option(
    "--on-missing", type=click.Choice(get_args(OnMissing)), default="error", show_default=True,
    help="Samples without a value are an error, or are left without the field.",
)  # fmt: skip
@engine_option
@click.option(
    "--workers", type=COUNT,
    help="With --compute: processes (default: one per core), or Ray tasks (64); with --from: threads (8).",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace a late field of this name, and make all values again.")
@report_options
@with_storage_options
def add_field_command(
    target: str, name: str, *, compute: str | None, source: str | None, on: str | None, field: str | None,
    fields: tuple[str, ...] | None, on_missing: OnMissing, engine: str, workers: int | None, overwrite: bool,
    as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Add the late field NAME to the samples of SET, a directory of indexed shards.

    The end of NAME says the format, as in shards: latents.npy, caption.txt. A function gets a decoded sample (a dict)
    and returns the value, or None. Values of another set are found by key; keys that are missing or occur twice there
    are an error. A run that was stopped goes on when it is run again, and so does one for shards that came later.

    \b
    Example:
      shard_tools field add s3://bucket/train/ latents.npy --compute mymodule:encode --fields jpg
      shard_tools field add s3://bucket/train/ caption.txt --from s3://bucket/captions/ --field txt --on key
    """
    if (compute is None) == (source is None):
        raise click.UsageError("Give one of --compute MODULE:FUNCTION and --from OTHER.")
    if compute is None and fields:
        raise click.UsageError("--fields is for --compute.")
    if source is None and (on or field):
        raise click.UsageError("--on and --field are for --from.")
    if source is not None and click.get_current_context().get_parameter_source("engine") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--engine is for --compute: --from only copies values.")
    options = as_storage_options(arguments)
    how: dict[str, Any] = {
        "storage": Storage(options), "storage_options": options, "on_missing": on_missing, "overwrite": overwrite,
    }  # fmt: skip
    with progress_bar("field", "samples" if source is None else "shards") as progress:
        if source is not None:
            taken = FromSet(url=source, field=field or name, on=KEY if on in {None, "key"} else str(on))
            report = join_field(target, name, taken, workers=workers or _JOIN_WORKERS, progress=progress, **how)
        else:
            running = Running(workers=workers, engine=engine)
            report = compute_field(target, name, str(compute), fields=fields, running=running, progress=progress, **how)
    emit(report, as_json=as_json, for_people=_show_field_added)


@field_group.command("list")
@click.argument("target", metavar="SET")
@report_options
@with_storage_options
def list_fields_command(target: str, *, as_json: bool, **arguments: Any) -> None:
    """List the late fields of SET.

    \b
    Example:
      shard_tools field list s3://bucket/train/
    """
    report = list_fields(target, storage=Storage(as_storage_options(arguments)))
    emit(report, as_json=as_json, for_people=_show_fields)


@field_group.command("drop")
@dry_run_option
@click.argument("target", metavar="SET")
@click.argument("name", metavar="NAME")
@report_options
@with_storage_options
def drop_field_command(target: str, name: str, *, as_json: bool, **arguments: Any) -> None:
    """Take the late field NAME from SET.

    Its files are deleted; if SET lives, `version prune` does so when no version has the field.

    \b
    Example:
      shard_tools field drop s3://bucket/train/ latents.npy
    """
    report = drop_field(target, name, storage=Storage(as_storage_options(arguments)))
    emit(report, as_json=as_json, for_people=_show_field_dropped)


@click.group("view")
def view_group() -> None:
    """Save, list and show named filters.

    A view is stored beside the index, for StreamingDataset(view=NAME).

    \b
    Example:
      shard_tools view save s3://bucket/train/ clean-v2 --where "score >= 0.3 and lang = 'en'"
    """


@view_group.command("save")
@dry_run_option
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
    show_earlier(0, was_complete=report.was_complete)
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


def _show_field_added(report: FieldReport) -> None:
    there = report.num_shards - report.num_written
    done = (
        "complete already; nothing written"
        if not report.num_written
        else f"{counted(report.num_written, 'tar')} written"
    )
    done += f", {there:,} there already" if there and report.num_written else ""
    published = f", version {report.set_version} of the set" if report.set_version else ""
    click.echo(
        f"field {report.name} (version {report.version}): {done}; "
        f"{counted(report.num_samples - report.num_missing, 'value')} for {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)}, from {report.made_from}{published}, in {report.seconds:.1f} s"
    )


def _show_fields(report: FieldsReport) -> None:
    for one in report.fields:
        lacking = one["lacking"]
        assert isinstance(lacking, list)  # noqa: S101  as list_fields has it
        lacks = f"  lacks {counted(len(lacking), 'shard')}, first {lacking[0]}" if lacking else ""
        click.echo(
            f"{one['name']}  version {one['version']}  {counted(int(str(one['num_samples'])), 'sample')}, "
            f"{one['num_missing']:,} without a value  {format_bytes(int(str(one['num_bytes'])))}  from "
            f"{one['made_from']}{lacks}"
        )
    if not report.fields:
        click.echo("no late fields")


def _show_field_dropped(report: FieldDropReport) -> None:
    files = counted(report.num_files, "file") if report.num_files else "no file"
    click.echo(f"{report.name} (version {report.version}): dropped, {files} deleted")
