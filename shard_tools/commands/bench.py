"""Parse the commands that show where time is spent: ``bench`` on this machine, ``trace`` for a job that ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from shard_tools.look.bench.run import BenchOptions, BenchReport, bench
from shard_tools.look.bench.tune import TuneReport, check_out, plan_here, tune, write_tuned
from shard_tools.look.trace.merge import MergeReport, RankReport, merge_traces
from shard_tools.running.progress import progress_bar
from shard_tools.running.report import plain, plain_place
from shard_tools.running.switches import is_on
from shard_tools.terminal.options import (
    COUNT,
    SIZE,
    as_storage_options,
    debug_option,
    index_option,
    report_options,
    unfinished_option,
    with_storage_options,
)
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import counted, format_bytes
from streaming.storage import Storage
from streaming.watch.tuned.file import DEFAULT_NAME

_OF_DATASET = ("cache_dir", "cache_limit")


@click.command("bench")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Time to measure, in addition to the start.",
)
@click.option("--bytes", "max_bytes", type=SIZE, default="1GB", show_default=True, help="Bytes to read, about.")
@click.option("--batch-size", type=COUNT, default=64, show_default=True, help="Samples per batch, as in training.")
@click.option(
    "--memory-limit",
    type=SIZE,
    help="The loader's memory limit, as in training. Default: the loader's own, 4 GiB or what a control group allows.",
)
@click.option("--tune", "to_tune", is_flag=True, help="Try settings of DataLoader instead, and write the best ones.")
@click.option("-o", "--out", metavar="FILE", help=f"With --tune: the file to write. Default: {DEFAULT_NAME}.")
@index_option
@unfinished_option
@report_options
@with_storage_options
def bench_command(urls: tuple[str, ...], *, to_tune: bool, out: str | None, as_json: bool, **arguments: Any) -> None:
    """Measure how fast this machine reads a set, and report the bottleneck.

    Measures the store (latency and bandwidth, by size and number of requests), decoding (on threads and in processes)
    and delivery (a DataLoader loop that does not use its batches). Reports which of them is the limit and why, suggests
    settings for DataLoader and StreamingDataset, and counts the requests and bytes of an epoch. Nothing is written.

    With --tune it measures delivery only, with one and more threads and processes, then with more batches ahead, each
    twice. It writes the smallest setting that is as fast as the fastest to a file, for DataLoader(tuned="tuned.json").

    \b
    Example:
      shard_tools bench s3://bucket/train/
      shard_tools bench s3://bucket/train/ --seconds 60 --bytes 10GB --batch-size 256 --json
      shard_tools bench s3://bucket/train/ --tune --batch-size 256 --out tuned.json
    """
    storage_options = as_storage_options(arguments)
    index_url = arguments.pop("index_url")
    if out is not None and not to_tune:
        raise click.UsageError("--out: only --tune writes a file; add --tune, or leave --out out")
    options = BenchOptions(**arguments)
    if to_tune:
        target = out or DEFAULT_NAME
        _tune(urls, storage_options, index_url=index_url, options=options, out=target, as_json=as_json)
        return
    with progress_bar("bench", "measurements") as progress:
        report = bench(
            urls, storage_options=storage_options, index_url=index_url, progress=progress, options=options
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=_show)


def _tune(
    urls: tuple[str, ...], storage_options: Mapping[str, object], *, index_url: str | None, options: BenchOptions,
    out: str, as_json: bool,
) -> None:  # fmt: skip
    """Print the expected time, measure, print the results, and write them."""
    storage, plan = Storage(storage_options), plan_here(options)
    check_out(out, storage)
    if not is_on("quiet"):
        click.echo(
            f"{counted(plan.num_settings, 'setting')} in {counted(plan.num_passes, 'pass')}: at most {plan.seconds:g} "
            "s in all, in addition to the start of processes",
            err=True,
        )
    with progress_bar("tune", "passes") as progress:
        report = tune(urls, storage_options=storage_options, index_url=index_url, options=options, progress=progress)
    emit(report, as_json=as_json, for_people=_show_tuned)
    write_tuned(report, out, storage)
    if not is_on("quiet"):
        click.echo(f"written: {plain_place(out)}", err=as_json)


def _show_tuned(report: TuneReport) -> None:
    """Print a line for each setting, and the options."""
    for one in report.tried:
        unhidden = "" if one.unhidden_ms is None else f", unhidden {one.unhidden_ms:,.2f} ms a batch"
        said = one.refused or (
            f"{one.samples_per_s:>11,.0f} samples/s, spread {one.spread:.0%}, waits for bytes {one.fetch_share:.0%}, "
            f"for batches {one.build_share:.0%}{unhidden}"
        )
        click.echo(f"{_shown(one.options):<50} {said}")
    if report.not_decoded:
        click.echo(f"as bytes, since most do not decode: {plain(', '.join(report.not_decoded))}")
    click.echo("")
    click.echo(f"use    DataLoader(…, {_shown(report.options)})")
    click.echo(f"       {report.why}")


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _show(report: BenchReport) -> None:
    """Print the measurements and the advice."""
    click.echo(f"limit: {report.limit}; {report.why}")
    click.echo(f"sure?  {report.sure}")
    click.echo("")
    for one in report.probes:
        click.echo(
            f"store     {format_bytes(one.size_bytes):>10} x {one.at_once:<3} {format_bytes(one.bytes_per_s):>10}/s, "
            f"{one.read_s * 1000:,.1f} ms each, spread {one.spread:.0%}"
            f"{f', repeated after failures: {one.retries:,}' if one.retries else ''}"
        )
    if report.decoding is not None:
        alone = report.decoding
        processes = "" if alone.processes is None else f", {alone.processes:,.0f} in {alone.num} processes"
        click.echo(
            f"decoding  {alone.one_thread:,.0f} samples/s on a thread, {alone.threads:,.0f} on {alone.num}{processes}"
        )
    if report.not_decoded:
        click.echo(f"          as bytes, since most do not decode: {plain(', '.join(report.not_decoded))}")
    for loop in report.deliveries:
        settings = ", ".join(f"{name}={value}" for name, value in loop.settings.items())
        said = loop.refused or (
            f"{loop.samples_per_s:,.0f} samples/s; waits for bytes {loop.fetch_share:.0%}, for batches "
            f"{loop.build_share:.0%}"
            f"{'' if loop.unhidden_ms is None else f'; unhidden {loop.unhidden_ms:,.2f} ms a batch'}"
        )
        click.echo(f"delivery  {settings}: {said}")
    click.echo("")
    dataset = [f"{name}={report.suggest[name]!r}" for name in _OF_DATASET if name in report.suggest]
    loader = [f"{name}={value!r}" for name, value in report.suggest.items() if name not in _OF_DATASET]
    click.echo(f"use    DataLoader(…, {', '.join(loader)})")
    if dataset:
        click.echo(f"       StreamingDataset(…, {', '.join(dataset)})")
    for name, value in report.convert.items():
        click.echo(f"       shard_tools reshard … --{name.replace('_', '-')} {value}: larger shards have larger chunks")
    click.echo(f"       {report.expect}")
    click.echo(f"epoch  {counted(report.num_chunks, 'request')}, {format_bytes(report.num_bytes)}")


@click.group("trace")
def trace_group() -> None:
    """Merge and summarize the traces that ``loader.trace(path)`` writes."""


@trace_group.command("merge")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--out", metavar="OUT", help="The file to write, for Perfetto. Default: none, only the summary.")
@report_options
@debug_option
def merge_command(files: tuple[str, ...], *, out: str | None, as_json: bool) -> None:
    """Merge the traces of several ranks into one file, and report their waits.

    Give the files that `loader.trace("trace-{rank}.json")` wrote. Ranks on one machine share its clock. The times of
    ranks on other machines are shifted so that their steps end when those of the lowest rank do; the summary shows the
    shift, and the remaining difference. Open the result at ui.perfetto.dev, or in chrome://tracing.

    \b
    Example:
      shard_tools trace merge trace-*.json -o trace.json
      shard_tools trace merge trace-0.json --json
    """
    emit(merge_traces(files, out), as_json=as_json, for_people=_show_merged)


def _show_merged(report: MergeReport) -> None:
    """Print a line per rank, and the rank that the others wait for."""
    for one in report.ranks:
        click.echo(_rank_line(one))
    if (worst := report.worst) is not None:
        rank, cause, count = worst
        longest = max(step.seconds for step in report.steps if (step.rank, step.cause) == (rank, cause))
        click.echo(
            f"longest before a batch: rank {rank}, {cause}, in {count} of {counted(len(report.steps), 'step')} that "
            f"all took, up to {longest * 1000:,.1f} ms"
        )
    missing = report.world_size - len(report.ranks)
    if missing:
        click.echo(f"without {counted(missing, 'rank')} of {report.world_size}", err=True)
    if report.path is not None:
        click.echo(f"written: {plain(report.path)}")


def _rank_line(one: RankReport) -> str:
    whole_s = sum(one.seconds.values())
    steps = counted(one.steps, "step")
    said = ", ".join(f"{cause} {seconds / whole_s:.0%}" for cause, seconds in one.seconds.items() if whole_s)
    shift = "" if one.is_same_clock else f"; shifted by {one.shift_us / 1000:+,.3f} ms"
    end = "" if one.spread_us is None else f"; its steps end within {one.spread_us / 1000:,.1f} ms of the first's"
    unfinished = f" ({one.unfinished} not over)" if one.unfinished else ""
    cut = "; cut off, it was full" if one.is_cut_off else ""
    return f"rank {one.rank:<4} {steps}{unfinished}, {whole_s:,.2f} s: {said or 'nothing'}{shift}{end}{cut}"
