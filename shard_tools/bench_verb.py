"""Parse the command ``bench``: how fast this machine reads a set, what limits it, and what would help."""

from __future__ import annotations

from typing import Any

import click

from shard_tools.bench.prices import load_prices
from shard_tools.bench.run import BenchOptions, BenchReport, bench
from shard_tools.options import (
    COUNT,
    SIZE,
    as_storage_options,
    index_option,
    json_option,
    unfinished_option,
    with_storage_options,
)
from shard_tools.running.progress import progress_bar
from shard_tools.running.report import plain
from shard_tools.verbs import emit
from streaming.arguments import counted, format_bytes
from streaming.storage import Storage

_OF_DATASET = ("cache_dir", "cache_limit")


@click.command("bench")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Time to measure, beside what it takes to start.",
)
@click.option("--bytes", "max_bytes", type=SIZE, default="1GB", show_default=True, help="Bytes to read, about.")
@click.option("--batch-size", type=COUNT, default=64, show_default=True, help="Samples per batch, as in training.")
@click.option(
    "--memory-limit", type=SIZE, default="4GiB", show_default=True, help="The loader's memory limit, as in training."
)
@click.option("--prices", metavar="FILE", help="TOML or JSON with prices, in place of the built-in ones.")
@index_option
@unfinished_option
@json_option
@with_storage_options
def bench_command(urls: tuple[str, ...], *, prices: str | None, as_json: bool, **arguments: Any) -> None:
    """Measure how fast this machine reads a set, and say what limits it.

    Measures the store (latency and bandwidth, by size and number of requests), decoding (on threads and in processes)
    and delivery (a DataLoader loop with nothing that uses its batches). Says which of them limits and why, suggests
    settings for DataLoader and StreamingDataset, and what an epoch costs. Nothing is written.

    \b
    Example:
      shard_tools bench s3://bucket/train/
      shard_tools bench s3://bucket/train/ --seconds 60 --bytes 10GB --batch-size 256 --json
      shard_tools bench gs://bucket/train/ --prices prices.toml
    """
    storage_options = as_storage_options(arguments)
    index_url = arguments.pop("index_url")
    table = None if prices is None else load_prices(Storage(storage_options).read(prices), prices)
    with progress_bar("bench", "measurements") as progress:
        report = bench(
            urls, storage_options=storage_options, index_url=index_url, progress=progress,
            options=BenchOptions(prices=table, **arguments),
        )  # fmt: skip
    emit(report, as_json=as_json, for_people=_show)


def _show(report: BenchReport) -> None:
    """Print what was measured, and the advice."""
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
    _show_cost(report)


def _show_cost(report: BenchReport) -> None:
    cost = report.cost
    said = f"epoch  {counted(cost.requests, 'request')}, {format_bytes(cost.num_bytes)}"
    if cost.for_requests is None:
        click.echo(f"{said}; no prices are known for this store, give --prices")
        return
    click.echo(
        f"{said}: {cost.for_requests:,.2f} {cost.currency} for requests, and for bytes {cost.same_region:,.2f} in the "
        f"store's region, {cost.internet:,.2f} out to the internet ({cost.prices})"
    )
