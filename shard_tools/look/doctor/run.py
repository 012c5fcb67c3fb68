"""Look at everything, and put it into one report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra import MeshError, discover
from shard_tools.look.doctor.judge import Trouble, troubles
from shard_tools.look.doctor.machine import Machine, look_at_machine
from shard_tools.look.doctor.packages import PackageState, look_at_packages
from shard_tools.look.doctor.store import StoreLook, look_at_store
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.types import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport(Report):
    """What was seen, and what is wrong.

    Attributes:
        version: Of shardstream.
        machine: This machine.
        launcher: What started this process, with its place among others.
        packages: Packages that are needed, and those of extras that are installed or broken.
        extras: By name which packages of an extra are missing.
        store: What was seen of the store; None: nobody asked.
        findings: What is wrong.
    """

    version: str
    machine: Machine
    launcher: str
    packages: tuple[PackageState, ...]
    extras: Mapping[str, Sequence[str]]
    store: StoreLook | None
    findings: tuple[Trouble, ...]

    @property
    def is_blind(self) -> bool:
        """Whether a store was to be looked at and did not let itself be looked at."""
        return self.store is not None and bool(self.store.trouble)


def doctor(
    urls: Sequence[str] = (), *, storage_options: Mapping[str, object] | None = None, index_url: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None, imports: bool = True, progress: Progress | None = None,
) -> DoctorReport:  # fmt: skip
    """Look at this machine, at the packages that are installed, and at a set. Writes nothing.

    Args:
        urls: Shards, as for ``StreamingDataset``; none: look at no store.
        storage_options: As for ``StreamingDataset``.
        index_url: Location of the index, if not beside the shards.
        cache_dir: Folder of a cache; None: that of temporary files.
        imports: Import all packages, in a process of their own, to see whether they work.
        progress: Receives each part that was looked at.

    Raises:
        ConfigError: An option of the store is not one.
    """
    progress = progress or NoProgress()
    progress.start(total_bytes=None, total=3)
    machine = look_at_machine(None if cache_dir is None else os.fspath(cache_dir))
    launcher, trouble, ranks_here = _launcher()
    progress.advance(num=1)
    store = look_at_store(urls, storage_options=storage_options, index_url=index_url) if urls else None
    progress.advance(num=1)
    packages = look_at_packages(imports=imports)
    progress.advance(num=1)
    return DoctorReport(
        version=VERSION,
        machine=machine,
        launcher=launcher,
        packages=packages,
        extras=extras_of(packages),
        store=store,
        findings=troubles(packages, machine, store, launcher=trouble, ranks_here=ranks_here),
    )


def extras_of(packages: Sequence[PackageState]) -> dict[str, list[str]]:
    """Return which packages of each extra are missing."""
    names = dict.fromkeys(extra for one in packages for extra in one.extras)
    return {
        extra: [one.name for one in packages if extra in one.extras and not one.version] for extra in names
    }  # fmt: skip


def _launcher() -> tuple[str, str, int]:
    """Return what started this process, what is wrong with what it says, and how many ranks are on this machine."""
    try:
        found = discover()
    except MeshError as error:
        return "contradicts itself", str(error), 1
    here = found.local_world_size or 1
    return f"{found.launcher}, rank {found.rank} of {found.world_size}, {here} on this machine", "", here
