"""Look at what this machine gives to a process: cores, memory, descriptors, disk."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass

from streaming.common.platforms import group_limits, memory_bytes, num_cores

SHM = "/dev/shm"  # noqa: S108  only looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a process may use here; None: the system does not say.

    Attributes:
        system: Kernel and processor.
        python: Version of Python.
        cores: Cores that this process may run on.
        cores_there: Cores of the machine.
        quota_cores: Cores' worth of time that its control group allows.
        memory_bytes: Memory that it may use.
        memory_left_bytes: How much of that is left now.
        is_memory_limited: Whether a control group limits it, rather than the machine.
        shm_bytes: Size of /dev/shm.
        shm_left_bytes: What is free there.
        descriptors: How many it may have open.
        most_descriptors: How far it may raise that.
        cache_dir: Folder of a cache, with ~ for that of this user.
        cache_left_bytes: What is free there.
        is_cache_writable: Whether it can be written.
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

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        return asdict(self)


def look_at_machine(cache_dir: str | None) -> Machine:
    """Look at this machine.

    Args:
        cache_dir: Folder of a cache; None: where temporary files are, as ``shard_tools bench`` suggests.
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
    )


def without_home(text: str) -> str:
    """Return ``text`` with ~ for the folder of this user, whose name may be in it."""
    home = os.path.expanduser("~").rstrip("/")
    return text.replace(home, "~") if home.count("/") > 1 else text


def _nearest(folder: str) -> str:
    """Return the folder, or that above it which exists."""
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
    """Return size and free bytes of the file system of ``folder``."""
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
