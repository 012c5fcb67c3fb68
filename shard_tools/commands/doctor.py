"""Parse the command ``doctor``: faults and limits of this machine and a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from shard_tools.look.doctor.machine import SHM, Machine
from shard_tools.look.doctor.packages import PackageState
from shard_tools.look.doctor.run import DoctorReport, doctor
from shard_tools.look.doctor.store import StoreLook
from shard_tools.running.progress import progress_bar
from shard_tools.running.report import plain
from shard_tools.terminal.options import as_storage_options, index_option, report_options, with_storage_options
from shard_tools.terminal.verbs import emit, finish
from streaming.common.arguments import counted, format_bytes
from streaming.storage import redact_text


@click.command("doctor")
@click.argument("urls", nargs=-1, metavar="[URL...]")
@click.option("--cache-dir", metavar="FOLDER", help="Folder of a cache.  [default: that of temporary files]")
@click.option("--no-imports", is_flag=True, help="Do not try to import packages, which takes seconds.")
@index_option
@report_options
@with_storage_options
def doctor_command(urls: tuple[str, ...], *, no_imports: bool, as_json: bool, **arguments: Any) -> None:
    """Examine this machine, its packages and the store of URL; report faults and limits.

    Lists versions, extras, cores, memory, shared memory, descriptors, disk, the launcher, and for the store its route,
    the source of the credentials, the time of an answer and the error of its clock. The text holds no secret and can be
    pasted into a question. Nothing is written. Exits with 1 if something is wrong, and with 3 if the store could not be
    examined.

    \b
    Example:
      shard_tools doctor
      shard_tools doctor s3://bucket/train/ --cache-dir /scratch/cache
      shard_tools doctor s3://bucket/train/ --json > doctor.json
    """
    with progress_bar("doctor", "parts") as progress:
        report = doctor(
            urls, storage_options=as_storage_options(arguments), imports=not no_imports, progress=progress, **arguments
        )
    emit(report, as_json=as_json, for_people=_show)
    finish(failed=bool(report.findings), blind=report.is_blind)


def _show(report: DoctorReport) -> None:
    """Print everything, one line each, and the faults last."""
    rows = [("shardstream", f"{report.version}, Python {report.machine.python}, {report.machine.system}")]
    rows += _package_rows(report)
    rows += _machine_rows(report.machine)
    rows.append(("launcher", report.launcher))
    rows += _store_rows(report.store) if report.store is not None else []
    rows += [("limit", one) for one in report.limits]
    for name, said in rows:
        _echo(f"{name:<14}{said}")
    _echo("")
    _echo("nothing wrong was found" if not report.findings else f"{counted(len(report.findings), 'finding')}:")
    for one in report.findings:
        _echo(f"- {one}")


def _package_rows(report: DoctorReport) -> Iterator[tuple[str, str]]:
    needed = [one for one in report.packages if not one.extras]
    yield "packages", _named(needed) or "unknown: shardstream is not installed, but read from its source"
    for one in needed:
        if one.says:
            cuda = f"CUDA {one.says['cuda']}, {counted(int(str(one.says['devices'])), 'device')}"
            yield one.name, cuda if one.says["cuda"] else "without CUDA"
    for extra, told in report.extras.items():
        missing = told["missing"]
        there = _named([one for one in report.packages if extra in one.extras and one.version])
        said = f"not installed ({told['for']})" if missing else there
        yield f"[{extra}]", f"{there}; without {', '.join(missing)}" if missing and there else said  # type: ignore[arg-type]


def _named(packages: list[PackageState]) -> str:
    return ", ".join(
        f"{one.name} {'BROKEN' if one.error else one.version or 'MISSING'}{' (too old)' if one.is_too_old else ''}"
        for one in packages
    )


def _machine_rows(machine: Machine) -> Iterator[tuple[str, str]]:
    quota = "" if machine.quota_cores is None else f", the time of {machine.quota_cores:.3g} by the control group"
    yield "cores", f"{machine.cores} of {machine.cores_there}{quota}"
    limited = " by the control group" if machine.is_memory_limited else ""
    left = "" if machine.memory_left_bytes is None else f", {format_bytes(machine.memory_left_bytes)} left"
    yield "memory", f"{format_bytes(machine.memory_bytes)}{limited}{left}"
    if machine.shm_bytes is not None:
        yield SHM, f"{format_bytes(machine.shm_bytes)}, {format_bytes(machine.shm_left_bytes or 0)} left"
    yield "descriptors", f"{_limit(machine.descriptors)}, up to {_limit(machine.most_descriptors)}"
    free = "" if machine.cache_left_bytes is None else f", {format_bytes(machine.cache_left_bytes)} left"
    yield "cache", f"{machine.cache_dir}{free}{'' if machine.is_cache_writable else ', not writable'}"
    yield "processes", f"{machine.start_method} by default; ours come from a fork server of their own"


def _limit(number: int) -> str:
    return "no limit" if number == sys.maxsize else f"{number:,}"


def _store_rows(store: StoreLook) -> Iterator[tuple[str, str]]:
    at = f" at {store.endpoint}" if store.endpoint else ""
    yield "store", f"{store.url} by {store.client or 'no client'}{at}"
    if store.region is not None:
        yield "region", store.region
    yield "credentials", store.credentials or "unknown"
    if store.clock_s is not None:
        yield "clock", f"{-store.clock_s:+,.1f} s from the store's"
    if store.num_shards is not None:
        yield "shards", f"{store.num_shards:,}, found in {_ms(store.list_s)}"
    if store.read_s is not None:
        chunk = f", {_ms(store.chunk_read_s)} for a chunk" if store.chunk_read_s is not None else ""
        retried = f", repeated after failures: {store.retries:,}" if store.retries else ""
        yield "a read", f"{_ms(store.read_s)} for a few bytes{chunk}{retried}"
    if store.num_samples is not None:
        yield "index", f"{counted(store.num_samples, 'sample')}, {format_bytes(store.num_bytes or 0)}"


def _ms(seconds: float | None) -> str:
    return f"{(seconds or 0) * 1000:,.1f} ms"


def _echo(text: str) -> None:
    click.echo(plain(redact_text(text)))
