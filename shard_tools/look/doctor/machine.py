"""Look at the resources of a process on this machine: cores, memory, descriptors, disk."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass

from streaming.common.platforms import group_limits, memory_bytes, num_cores

SHM = "/dev/shm"  # noqa: S108  only inspected


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of a process here; None: the system does not report it.

    Attributes:
        system: Kernel and processor.
        python: Version of Python.
        cores: Cores that this process may run on.
        cores_there: All cores of the machine.
        quota_cores: CPU time that its control group allows, in cores.
        memory_bytes: Memory that it may use.
        memory_left_bytes: The part of that memory that is free now.
        is_memory_limited: Whether a control group, not the machine, sets the limit.
        shm_bytes: Size of /dev/shm.
        shm_left_bytes: Free bytes there.
        descriptors: Number of descriptors that it may have open.
        most_descriptors: Limit to which it may raise that number.
        cache_dir: Folder of a cache, with ~ for this user's home.
        cache_left_bytes: Free bytes there.
        is_cache_writable: Whether it can be written.
        is_home_writable: Whether this user's cache folder can be written.
        start_method: How Python starts processes by default.
    """

    system: str
    python: str
    cores: int
    cores_there: int
    quota_cores: float | None
    memory_bytes: int
    memory_left_bytes: int | None
    is_memory_limited: bool
    shm_bytes: int | None
    shm_left_bytes: int | None
    descriptors: int
    most_descriptors: int
    cache_dir: str
    cache_left_bytes: int | None
    is_cache_writable: bool
    is_home_writable: bool
    start_method: str

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        return asdict(self)


def look_at_machine(cache_dir: str | None) -> Machine:
    """Look at this machine.

    Args:
        cache_dir: Folder of a cache; None: the folder of temporary files, as ``shard_tools bench`` suggests.
    """
    group = group_limits()
    folder = os.path.abspath(os.path.expanduser(cache_dir or tempfile.gettempdir()))
    there = _nearest(folder)
    left = [one for one in (_free_memory_bytes(), group.memory_left_bytes) if one is not None]
    shm = _room(SHM)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        system=platform.platform(),
        python=f"{platform.python_version()}{_without_gil()}",
        cores=num_cores(),
        cores_there=os.cpu_count() or 1,
        quota_cores=group.cores,
        memory_bytes=memory_bytes(),
        memory_left_bytes=min(left, default=None),
        is_memory_limited=group.memory_bytes == memory_bytes(),
        shm_bytes=shm and shm[0],
        shm_left_bytes=shm and shm[1],
        descriptors=_bounded(soft),
        most_descriptors=_bounded(hard),
        cache_dir=without_home(folder),
        cache_left_bytes=shutil.disk_usage(there).free,
        is_cache_writable=os.access(there, os.W_OK),
        is_home_writable=os.access(_nearest(os.path.expanduser("~/.cache/shardstream")), os.W_OK),
        start_method=multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
    )


def without_home(text: str) -> str:
    """Return ``text`` with ~ for this user's home folder, since that may contain the user's name."""
    home = os.path.expanduser("~").rstrip("/")
    return text.replace(home, "~") if home.count("/") > 1 else text


def _nearest(folder: str) -> str:
    """Return the folder, or the nearest existing folder above it."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _free_memory_bytes() -> int | None:
    with suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _room(folder: str) -> tuple[int, int] | None:
    """Return total and free bytes of the file system of ``folder``."""
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return None
    return found.total, found.free


def _bounded(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _without_gil() -> str:
    is_on = getattr(sys, "_is_gil_enabled", None)
    return "" if is_on is None or is_on() else ", free-threaded"
