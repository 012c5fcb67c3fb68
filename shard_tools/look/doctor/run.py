"""Look at everything, and make one report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra import MeshError, discover
from shard_tools.look.doctor.judge import Trouble, limits, troubles
from shard_tools.look.doctor.machine import Machine, look_at_machine
from shard_tools.look.doctor.packages import GIVES, PackageState, look_at_packages
from shard_tools.look.doctor.store import StoreLook, look_at_store
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.types import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport(Report):
    """Observations, what will limit, and what is wrong.

    Attributes:
        version: Version of shardstream.
        machine: This machine.
        launcher: The launcher of this process, with the process's rank.
        packages: Required packages, and those of extras that are installed or broken.
        extras: By name, the purpose of an extra and its missing packages.
        store: Observations of the store; None: no store was given.
        limits: What will limit a job here.
        findings: What is wrong.
    """

    version: str
    machine: Machine
    launcher: str
    packages: tuple[PackageState, ...]
    extras: Mapping[str, Mapping[str, object]]
    store: StoreLook | None
    limits: tuple[str, ...]
    findings: tuple[Trouble, ...]

    @property
    def is_blind(self) -> bool:
        """Whether a store was given but could not be examined."""
        return self.store is not None and bool(self.store.trouble)


def doctor(
    urls: Sequence[str] = (), *, storage_options: Mapping[str, object] | None = None, index_url: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None, imports: bool = True, progress: Progress | None = None,
) -> DoctorReport:  # fmt: skip
    """Look at this machine, at the installed packages, and at a set. Writes nothing.

    Args:
        urls: Shards, as for ``StreamingDataset``; none: skip the store.
        storage_options: As for ``StreamingDataset``.
        index_url: Location of the index, if not beside the shards.
        cache_dir: Folder of a cache; None: the folder of temporary files.
        imports: Import all packages, in a separate process, to see whether they work.
        progress: Receives each part that was examined.

    Raises:
        ConfigError: There is no such option of the store.
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
        limits=limits(machine, store, ranks_here=ranks_here),
        findings=troubles(packages, machine, store, launcher=trouble, ranks_here=ranks_here),
    )


def extras_of(packages: Sequence[PackageState]) -> dict[str, dict[str, object]]:
    """Return the purpose of each extra, and its missing packages."""
    names = dict.fromkeys([*GIVES, *(extra for one in packages for extra in one.extras)])
    return {
        extra: {
            "for": GIVES.get(extra, ""),
            "missing": [one.name for one in packages if extra in one.extras and not one.version],
        }
        for extra in names
        if any(extra in one.extras for one in packages)
    }


def _launcher() -> tuple[str, str, int]:
    """Return the launcher of this process, what is wrong with its variables, and the ranks on this machine."""
    try:
        found = discover()
    except MeshError as error:
        return "contradicts itself", str(error), 1
    here = found.local_world_size or 1
    return f"{found.launcher}, rank {found.rank} of {found.world_size}, {here} on this machine", "", here
