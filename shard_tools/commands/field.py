"""Parse the command ``field``: fields that are added to the samples of a set later."""

from __future__ import annotations

from typing import Any, get_args

import click
from click.core import ParameterSource

from shard_tools.change.fields.join import FromSet, join_field
from shard_tools.change.fields.listed import FieldDropReport, FieldsReport, drop_field, list_fields
from shard_tools.change.fields.target import FieldReport, OnMissing
from shard_tools.change.functions.field import compute_field
from shard_tools.change.functions.run import Running
from shard_tools.running.progress import progress_bar
from shard_tools.terminal.options import (
    COUNT,
    as_storage_options,
    engine_option,
    json_option,
    names,
    quiet_option,
    with_storage_options,
)
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import counted, format_bytes
from streaming.shards.index.columns import KEY
from streaming.storage import Storage

_JOIN_WORKERS = 8


@click.group("field")
def field_group() -> None:
    """Add, list and drop late fields.

    Late fields are fields, such as latents or captions, in tars beside existing shards; these stay as they are.

    \b
    Example:
      shard_tools field add s3://bucket/train/ latents.npy --compute mymodule:encode --fields jpg
    """


@field_group.command("add")
@quiet_option
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
@json_option
@with_storage_options
def add_command(
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
            report = compute_field(
                target, name, str(compute), fields=fields, running=running, progress=progress, **how
            )
    emit(report, as_json=as_json, for_people=_show_added)


@field_group.command("list")
@click.argument("target", metavar="SET")
@json_option
@with_storage_options
def list_command(target: str, *, as_json: bool, **arguments: Any) -> None:
    """List the late fields of SET.

    \b
    Example:
      shard_tools field list s3://bucket/train/
    """
    report = list_fields(target, storage=Storage(as_storage_options(arguments)))
    emit(report, as_json=as_json, for_people=_show_fields)


@field_group.command("drop")
@quiet_option
@click.argument("target", metavar="SET")
@click.argument("name", metavar="NAME")
@json_option
@with_storage_options
def drop_command(target: str, name: str, *, as_json: bool, **arguments: Any) -> None:
    """Take the late field NAME from SET.

    Its files are deleted; if SET lives, `version prune` does so when no version has the field.

    \b
    Example:
      shard_tools field drop s3://bucket/train/ latents.npy
    """
    report = drop_field(target, name, storage=Storage(as_storage_options(arguments)))
    emit(report, as_json=as_json, for_people=_show_dropped)


def _show_added(report: FieldReport) -> None:
    there = report.num_shards - report.num_written
    done = "complete already; nothing written" if not report.num_written else f"{counted(report.num_written, 'tar')} written"
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


def _show_dropped(report: FieldDropReport) -> None:
    files = counted(report.num_files, "file") if report.num_files else "no file"
    click.echo(f"{report.name} (version {report.version}): dropped, {files} deleted")
