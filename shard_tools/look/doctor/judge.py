"""Decide from observations what is wrong, each with its cure, and what will limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shard_tools.look.bench.requests import MOST_AT_ONCE
from shard_tools.look.doctor.machine import SHM, Machine
from shard_tools.look.doctor.packages import PackageState, troubles_of
from shard_tools.look.doctor.store import StoreLook
from shard_tools.running.report import Report
from streaming.common.arguments import counted, default_memory_limit, format_bytes, loaders_share

_DEFAULT_THREADS = 4
"""Decoding threads, unless there are fewer cores."""
_LEAST_BESIDE_BYTES = 1 << 30
"""Memory in addition to a loader's buffers: Python, torch and a small model."""
_LEAST_SHM_BYTES = 512 << 20
"""Docker's default is 64 MiB."""
_LEAST_DESCRIPTORS = 1024
_LEAST_DISK_BYTES = 1 << 30
_MOST_CLOCK_S = 60.0
"""Stores refuse signatures that are 15 minutes old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble(Report):
    """One problem.

    Attributes:
        kind: ``package``, ``cores``, ``memory``, ``shm``, ``descriptors``, ``disk``, ``launcher``, ``clock``,
            ``store`` or ``index``.
        what: The problem, with the figure.
        cure: What to do; "": ``what`` includes it.
    """

    kind: str
    what: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}{f'; {self.cure}' if self.cure else ''}"


def troubles(
    packages: Sequence[PackageState], machine: Machine, store: StoreLook | None, *, launcher: str, ranks_here: int
) -> tuple[Trouble, ...]:
    """Return all problems.

    Args:
        packages: Packages.
        machine: This machine.
        store: A store; None: no store was given.
        launcher: What is wrong with the variables of a launcher; "": nothing.
        ranks_here: Processes of the job on this machine.
    """
    found = [Trouble(kind="package", what=what, cure=cure) for what, cure in troubles_of(packages)]
    found += _of_compute(machine, ranks_here)
    found += _of_disk(machine)
    if launcher:
        found.append(Trouble(kind="launcher", what=launcher))
    if store is not None:
        found += _of_store(store)
    return tuple(found)


def _of_compute(machine: Machine, ranks_here: int) -> list[Trouble]:
    found = []
    threads = min(machine.cores, _DEFAULT_THREADS)
    if machine.quota_cores is not None and machine.quota_cores < threads:
        found.append(
            Trouble(
                kind="cores",
                what=f"the control group allows the time of {machine.quota_cores:.3g} cores, but "
                f"{counted(machine.cores, 'core')} can be seen, so {threads} threads decode by default and are stopped "
                "again and again",
                cure=f"write DataLoader(num_threads={max(1, int(machine.quota_cores))}), or raise that limit",
            )
        )
    limit, share = _default_limit(machine, ranks_here), loaders_share(machine.memory_bytes, ranks_here)
    buffered = ranks_here * limit
    if machine.memory_bytes < buffered + _LEAST_BESIDE_BYTES and limit > share:
        found.append(
            Trouble(
                kind="memory",
                what=f"{format_bytes(machine.memory_bytes)} may be used, and "
                f"{counted(ranks_here, 'loader')} may buffer up to {format_bytes(buffered)} by default",
                cure=f'write DataLoader(memory_limit="{share >> 20}MiB")',
            )
        )
    if machine.shm_bytes is not None and machine.shm_bytes < _LEAST_SHM_BYTES:
        found.append(
            Trouble(
                kind="shm",
                what=f"{SHM} has {format_bytes(machine.shm_bytes)}, too little for worker processes over data sets "
                "of torch, and for Ray; those over sets in shards do not use it",
                cure="start the container with `--shm-size=8g`, or on Kubernetes mount an emptyDir of medium Memory",
            )
        )
    if machine.descriptors < _LEAST_DESCRIPTORS:
        may_raise = machine.most_descriptors >= _LEAST_DESCRIPTORS
        found.append(
            Trouble(
                kind="descriptors",
                what=f"a process may have {counted(machine.descriptors, 'descriptor')} open",
                cure=f"`ulimit -n {min(machine.most_descriptors, 65_536)}` before it starts"
                if may_raise
                else "have the hard limit raised: LimitNOFILE of systemd, `--ulimit` of Docker, limits.conf",
            )
        )
    return found


def _default_limit(machine: Machine, ranks_here: int) -> int:
    """Return the default ``memory_limit`` of a loader, in bytes."""
    return default_memory_limit(machine.memory_bytes if machine.is_memory_limited else None, ranks_here)


def _of_disk(machine: Machine) -> list[Trouble]:
    shown, left = machine.cache_dir, machine.cache_left_bytes
    if not machine.is_cache_writable:
        return [Trouble(kind="disk", what=f"{shown} cannot be written", cure="give another folder as cache_dir=")]
    if left is not None and left < _LEAST_DISK_BYTES:
        what = f"{format_bytes(left)} are free at {shown}, little for a cache or temporary files"
        return [Trouble(kind="disk", what=what, cure="make room, or give another folder as cache_dir=")]
    return []


def _of_store(store: StoreLook) -> list[Trouble]:
    found = []
    if store.clock_s is not None and abs(store.clock_s) > _MOST_CLOCK_S:
        side = "behind" if store.clock_s > 0 else "ahead of"
        found.append(
            Trouble(
                kind="clock",
                what=f"this machine's clock is {abs(store.clock_s):,.0f} s {side} the store's, which refuses requests "
                "from 15 minutes on",
                cure="set it, by chrony or systemd-timesyncd",
            )
        )
    if store.trouble:
        found.append(Trouble(kind="store", what=store.trouble))
    if store.index_trouble:
        found.append(Trouble(kind="index", what=store.index_trouble))
    return found


def limits(machine: Machine, store: StoreLook | None, *, ranks_here: int = 1) -> tuple[str, ...]:
    """Describe what will limit a job here, with the figures."""
    buffered = format_bytes(_default_limit(machine, ranks_here))
    cores = machine.cores if machine.quota_cores is None else min(machine.cores, machine.quota_cores)
    threads = min(machine.cores, _DEFAULT_THREADS)
    found = [
        f"cores: {cores:.3g} for decoding and transforms; {threads} threads by default, num_workers= for processes",
        f"memory: a loader buffers up to {buffered} of {format_bytes(machine.memory_bytes)}; memory_limit= for others",
    ]
    if machine.cache_left_bytes is not None and machine.is_cache_writable:
        room = format_bytes(machine.cache_left_bytes * 4 // 5)
        found.append(f"disk: cache_dir={machine.cache_dir} may take {room}")
    if not machine.is_home_writable:
        found.append("home: ~/.cache cannot be written, so `shard_tools stats --all` needs --journal")
    if store is not None and store.most_bytes_per_s is not None and store.client != "files":
        found.append(
            f"store: {MOST_AT_ONCE} requests at once for chunks of {format_bytes(store.chunk_bytes or 0)} that take "
            f"{(store.chunk_read_s or 0) * 1000:,.0f} ms each bring {format_bytes(store.most_bytes_per_s)}/s at most; "
            "`shard_tools bench` measures the actual rate"
        )
    return tuple(found)
