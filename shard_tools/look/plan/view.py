"""Show a plan to people: text, and a picture if matplotlib is installed."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from shard_tools.look.plan.loads import RankLoad
from shard_tools.look.plan.report import EXACT_RANKS, PlanReport
from shard_tools.look.plan.shares import MixtureShares
from streaming.common.arguments import counted, format_bytes
from streaming.errors import ConfigError
from streaming.sets.sources.fetch_units import shown_total
from streaming.shards.versions.history import shown_versions

_SHOWN_RANKS = 16
_SHOWN_REPLICAS = 8
_SHOWN_SOURCES = 20
_SHOWN_PASSES = 3
_WIDE = 140


def show_plan(report: PlanReport) -> None:
    """Print totals, the sources of a mixture, spreads, a table of data ranks, warnings."""
    for line in _summary(report):
        click.echo(line)
    if report.shares is not None:
        _show_sources(report.shares)
    _show_spread(report)
    _show_ranks(report)
    for warning in report.warnings:
        click.echo(f"Warning: {warning}", err=True)


def save_plot(report: PlanReport, path: str) -> None:
    """Plot bytes read, requests and memory of data ranks, and shares of a mixture, to a new PNG file at ``path``.

    Raises:
        ConfigError: matplotlib is not installed, or ``path`` cannot be written.
    """
    try:
        backend, drawing = import_module("matplotlib.backends.backend_agg"), import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib, which is not installed: pip install matplotlib") from error
    if not path.lower().endswith(".png") or not os.path.isdir(os.path.dirname(path) or "."):
        raise ConfigError(f"--plot: expected FILE.png in a folder that exists, got {path!r}")
    figure = drawing.Figure(figsize=(9, 7 if report.shares is None else 10), layout="constrained")
    backend.FigureCanvasAgg(figure)
    ranks = [load.dp_rank for load in report.loads]
    rows = (
        ("read, GiB", [load.read_bytes / 2**30 for load in report.loads], None),
        ("requests", [load.num_requests for load in report.loads], None),
        ("live, GiB", [load.live_bytes / 2**30 for load in report.loads], report.memory_limit_bytes / 2**30),
    )
    height = len(rows) + (report.shares is not None)
    for place, (label, values, limit) in enumerate(rows, 1):
        axes = figure.add_subplot(height, 1, place)
        axes.bar(ranks, values, width=1.0 if len(ranks) > _SHOWN_RANKS else 0.8)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        if limit is not None:
            axes.axhline(limit, linestyle="--", color="black", label="memory_limit")
            axes.legend()
    axes.set_xlabel("data rank")
    if report.shares is not None:
        _draw_shares(figure.add_subplot(height, 1, height), report.shares)
    figure.suptitle(
        f"{report.data_world_size} data ranks, {report.lanes} lanes: {report.amplification:.2f} times the bytes"
    )
    figure.savefig(path)


def _draw_shares(axes: Any, shares: MixtureShares) -> None:
    """Draw the actual share of each source in each part of the plan, and its target share as a dashed line."""
    rows = [0, *shares.rows]
    order = sorted(range(len(shares.sources)), key=lambda at: -shares.sources[at].target)
    for number, at in enumerate(order[:_SHOWN_SOURCES]):
        for listed, style in ((shares.counts, "-"), (shares.targets, "--")):
            known = [0, *(row[at] for row in listed)]
            parts = [
                100 * (now - before) / (stop - start)
                for before, now, start, stop in zip(known, known[1:], rows, rows[1:], strict=False)
            ]
            label = shares.sources[at].name if style == "-" else None
            axes.plot(shares.rows, parts, style, color=f"C{number}", label=label, marker="." if label else None)
    axes.set_ylabel("share, %")
    axes.set_xlabel("samples drawn; dashed: the target")
    axes.set_ylim(bottom=0)
    axes.legend(ncols=5, fontsize="small")


def _show_sources(shares: MixtureShares) -> None:
    names = (
        "source",
        "samples",
        "kept",
        "target",
        "drawn",
        "strayed",
        "passes",
        "begins at step",
        "requests",
        "read",
        "live",
    )
    table = Table(*names, "ampl.", box=None, pad_edge=False)
    shown = sorted(shares.sources, key=lambda one: (-one.target, one.name))
    for one in shown[:_SHOWN_SOURCES]:
        begins = [f"{number}: {step:,}" for number, step in one.begins.items()]
        table.add_row(
            one.name,
            f"{one.num_samples:,}",
            f"{one.kept:.0%}",
            f"{one.target:.2%}",
            f"{one.realised:.2%}",
            f"{one.strayed:,}",
            f"{one.passes:.2f}",
            ", ".join(begins[:_SHOWN_PASSES]) + (", …" if len(begins) > _SHOWN_PASSES else "") if begins else "-",
            f"{one.num_requests:,}",
            format_bytes(one.read_bytes),
            format_bytes(one.live_bytes),
            f"{one.amplification:.2f}",
        )
    _print(table, _WIDE)
    if len(shown) > _SHOWN_SOURCES:
        click.echo(f"… {len(shown) - _SHOWN_SOURCES:,} more; --json lists all")
    if not shares.by_chunks:
        return
    units = sorted(one.exact_unit_bytes for one in shares.sources)
    total = shares.exact_fetch_bytes
    needs = f'\nquotas="exact" would hold {format_bytes(shares.exact_live_bytes)} per rank'
    if shares.exact_fits:
        click.echo(f"{needs}, which fits into the memory_limit.")
        return
    if not shares.can_be_cut:
        click.echo(f"{needs}, which does not fit into the memory_limit, and fetch_bytes cannot cut these sources.")
        return
    named = "Even the smallest fetch_bytes" if total is None else f'With fetch_bytes="{shown_total(total)}" it'
    fits = "would not fit" if total is None else "would fit"
    click.echo(
        f"{needs}: chunks of each source in each lane. {named} {fits} into the memory_limit: "
        f"{counted(shares.exact_num_requests, 'request')}, for units of {format_bytes(units[0])} to "
        f"{format_bytes(units[-1])}."
    )


def _summary(report: PlanReport) -> list[str]:
    axes = " x ".join(f"{name} {size}" for name, size in report.axes.items() if size > 1) or "one process"
    per_rank = report.global_batch_size / report.data_world_size
    lanes = f"{counted(report.lanes, 'lane')}, window {counted(report.window, 'sample')}"
    order = lanes if report.shuffle else "storage order"
    about = "about " if report.sampled or report.filtered else "at most "
    total = report.total("read_bytes")
    shards = f"{counted(report.num_chunks, 'chunk')} of {counted(report.num_shards, 'shard')}"
    requests = counted(report.total("num_requests"), "request")
    if report.windows is None:
        requests += f", one per {report.unit}" + (" and late field" if report.num_ranges > 1 else "")
    first = f"{counted(report.total('start_requests'), 'request')} before the first batch"
    at_most = "" if report.data_world_size <= EXACT_RANKS else "at most "
    limit, least = format_bytes(report.memory_limit_bytes), format_bytes(report.least_limit_bytes)
    once = format_bytes(report.needed_limit_bytes)
    thing = "sample" if report.packs is None else "pack"
    thing = thing if report.windows is None else "window"
    size = f"{counted(report.global_batch_size, thing)}, {per_rank:,.6g} per data rank"
    if report.ramp is not None:
        size = ", ".join(f"{counted(count, thing)} from row {row:,} on" for row, count in report.ramp.items())
    ranks = f"{counted(report.data_world_size, 'data rank')}, {counted(report.replica_world_size, 'process')}"
    lines = [
        f"data      {counted(report.num_samples, thing)} in {shards}, {format_bytes(report.num_bytes)}"
        + (f"; {shown_versions(report.versions)}" if report.versions else ""),
        f"mesh      {axes}: {ranks} each",
        f"batch     {size}",
        f"epoch {report.epoch:<3} {counted(report.num_batches, 'batch')}, {counted(report.epoch_samples, thing)}"
        + ("" if report.has_end else ", of a mixture without end"),
        f"order     {order}; a rank's batch mixes {counted(report.mixed_chunks, 'chunk')}",
        f"read      {about}{format_bytes(total)} in {requests}: {report.amplification:.2f} times the bytes",
        f"start     {at_most}{format_bytes(report.total('start_bytes'))} in {first}",
        f"memory    a memory_limit of {least} suffices for every epoch, {once} to fetch each chunk once; it is {limit}",
    ]
    if report.packs is not None:
        lines.insert(1, f"packs     {report.packs.in_words(report.sample_bytes)}")
        if rows := report.packs.rows_in_words:
            lines.insert(2, f"rows      a batch has {rows}")
    if report.windows is not None:
        lines.insert(1, f"windows   {report.windows.in_words}")
    if report.replica_world_size > 1:
        every = format_bytes(total * report.replica_world_size)
        lines.insert(-2, f"replicas  {about}{every} if every process reads for itself, without a shared cache")
    return lines


def _show_spread(report: PlanReport) -> None:
    shown, every = len(report.loads), report.data_world_size
    title = f"{shown:,} of {every:,} data ranks, at equal distances" if report.sampled else f"{every:,} data ranks"
    table = Table(title, "min", "mean", "max", box=None, pad_edge=False)
    rows = (("samples", "num_samples", False), ("requests", "num_requests", False), ("bytes read", "read_bytes", True))
    for label, name, is_bytes in (*rows, ("live memory", "live_bytes", True)):
        spread = report.spread(name)
        values = (spread.least, spread.mean, spread.most)
        table.add_row(label, *(format_bytes(value) if is_bytes else f"{value:,.6g}" for value in values))
    amplification = report.spread("amplification")
    values = (amplification.least, amplification.mean, amplification.most)
    table.add_row("amplification", *(f"{value:.2f}" for value in values))
    _print(table)


def _show_ranks(report: PlanReport) -> None:
    names = ("data rank", "processes", "lanes", "samples", "chunks", "requests", "read", "live", "ampl.")
    table = Table(*names, box=None, pad_edge=False)
    for load in report.loads[:_SHOWN_RANKS]:
        table.add_row(
            str(load.dp_rank),
            _processes(load),
            f"{load.lanes[0]}-{load.lanes[1] - 1}" if load.lanes[1] > load.lanes[0] else "-",
            f"{load.num_samples:,}",
            f"{load.num_chunks:,}",
            f"{load.num_requests:,}",
            format_bytes(load.read_bytes),
            format_bytes(load.live_bytes),
            f"{load.amplification:.2f}",
        )
    _print(table)
    if len(report.loads) > _SHOWN_RANKS:
        click.echo(f"… {len(report.loads) - _SHOWN_RANKS:,} more; --json lists all that were worked out")


def _processes(load: RankLoad) -> str:
    shown = ",".join(map(str, load.ranks[:_SHOWN_REPLICAS]))
    return f"{shown},…" if len(load.ranks) > _SHOWN_REPLICAS else shown


def _print(table: Table, width: int = 100) -> None:
    click.echo("")
    Console(width=max(width, shutil.get_terminal_size().columns)).print(table)
