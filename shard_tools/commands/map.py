"""Parse the command ``map``, which applies a user's function to the samples of a set."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from shard_tools.change.functions.mapped import MapOptions, map_set
from shard_tools.change.functions.run import FunctionReport, Running
from shard_tools.change.functions.source import ON_ERROR
from shard_tools.running.printing import show_earlier
from shard_tools.running.progress import progress_bar
from shard_tools.terminal.options import (
    COUNT,
    LIMIT,
    STORAGE_OPTION_NAMES,
    as_storage_options,
    dry_run_option,
    engine_option,
    index_option,
    names,
    places_and_target,
    refuse_options_of_the_set,
    report_options,
    shard_size_options,
    start_over_option,
    unfinished_option,
    union_option,
    with_storage_options,
)
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import counted, format_bytes

_OF_APPEND = frozenset(
    {"sources", "append", "engine", "workers", "on_error", "max_bad", "write_bad", "index_url", "allow_unfinished",
     "as_json", "dry_run", "quiet", "debug", *STORAGE_OPTION_NAMES}
)  # fmt: skip


@click.command("map")
@dry_run_option
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE... TARGET MODULE:FUNCTION")
@shard_size_options
@click.option("--fields", type=names, metavar="A,B", help="Decode only these for the function; others stay unchanged.")
@click.option("--where", metavar="CONDITION", help='Take only samples that match, such as "tokens >= 512".')
@click.option("--view", metavar="NAME", help="Take only the samples of a saved view.")
@click.option("--columns", type=names, default=(), metavar="A,B", help="Late columns to keep, in the sample tables.")
@union_option
@click.option(
    "--on-error",
    type=click.Choice(ON_ERROR),
    default="raise",
    show_default=True,
    help="What to do with samples on which the function fails.",
)
@click.option(
    "--max-bad", type=LIMIT, metavar="N|SHARE",
    help="With --on-error drop: most of these, or a share of the samples.  [default: 0.1%]",
)  # fmt: skip
@click.option("--write-bad", metavar="FILE", help="With --on-error drop: list them, for reshard --drop.")
@engine_option
@click.option("--workers", type=COUNT, help="Processes (default: one per core), or Ray tasks (default 64).")
@start_over_option
@click.option(
    "--append", is_flag=True, help="Add the samples of new shards to the set in TARGET, with the set's options."
)
@index_option
@unfinished_option
@report_options
@with_storage_options
def map_command(
    sources: tuple[str, ...], *, engine: str, workers: int | None, append: bool, on_error: str, max_bad: float | None,
    write_bad: str | None, fields: tuple[str, ...] | None, as_json: bool, **arguments: Any,
) -> None:  # fmt: skip
    """Apply your function to the samples of SOURCE, and write the results into new shards in TARGET.

    The function gets a decoded sample (a dict). It returns the fields that change (None removes one), several such
    dicts, or None to leave the sample out. Other fields keep their bytes, samples their keys and columns. It runs in
    worker processes. A run that was stopped continues where it left off when it is run again. With --append, only
    shards of SOURCE that TARGET was not made of are read.

    \b
    Example:
      shard_tools map s3://bucket/raw/ s3://bucket/small/ mymodule:resize --fields jpg
      shard_tools map 's3://bucket/day-*/' more/ all/ mymodule:clean
      shard_tools map shards/ english/ mymodule:clean --where "lang = 'en'" --on-error drop --write-bad bad.jsonl
    """
    if append:
        refuse_options_of_the_set(_OF_APPEND)
    if on_error == "raise" and (max_bad is not None or write_bad is not None):
        raise click.UsageError("--max-bad and --write-bad are for --on-error drop.")
    *named, function = sources
    if ":" not in function or "/" in function:
        raise click.UsageError(f"The last argument names your function as MODULE:FUNCTION; got {function!r}.")
    places, target = places_and_target(tuple(named))
    running = Running(
        workers=workers, engine=engine, on_error=on_error, max_bad_samples=max_bad, bad_samples_file=write_bad
    )
    storage_options = as_storage_options(arguments)
    options = MapOptions(fields=None if fields is None else tuple(name.lstrip(".") for name in fields), **arguments)
    with progress_bar("map", "samples") as progress:
        report = map_set(
            places, target, function, options=options, append=append, running=running,
            storage_options=storage_options, progress=progress,
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=partial(show_made, is_added=append))


def show_made(report: FunctionReport, *, is_added: bool = False) -> None:
    """Print the totals of the inputs and samples, which are added to a set or are a set of their own."""
    if is_added:
        was = counted(report.num_resumed_samples, "sample")
        click.echo("nothing new; nothing written" if report.was_complete else f"added to {was}")
    else:
        show_earlier(report.num_resumed_samples, was_complete=report.was_complete, changed=report.changed)
    click.echo(
        f"{counted(report.num_inputs, 'sample')} taken, {report.num_empty:,} left out by the function, "
        f"{report.num_failed:,} on which it failed\n"
        f"{report.target}: {counted(report.num_samples, 'sample')} in {counted(report.num_shards, 'shard')}, "
        f"{format_bytes(report.num_bytes)}, in {report.seconds:.1f} s"
    )
