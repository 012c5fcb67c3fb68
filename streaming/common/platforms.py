"""Provide features that only some machines have, so that all differences are in one place.

Linux has everything. macOS reads, writes and indexes, with threads: worker processes need anonymous files that several
processes map (``memfd_create``), sockets that preserve message boundaries, and a kernel that ends children with their
parent. No other system has the locks and positioned reads that the package relies on. Machines that only prepare data
have no torch (``later``).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from streaming.errors import ConfigError

_log = logging.getLogger(__name__)

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Python has this name since 3.12; the number is that of Linux."""
_SPARE_FILES = 24
"""Number of open files besides the counted ones: shards, connections, a starting process."""
_NO_LIMIT = 1 << 60
"""Version 1 of control groups writes "no limit" as the largest number of whole pages."""


def later(module: str, names: dict[str, Any], name: str | None = None) -> Any:
    """Return a placeholder of a module; its first use imports the module, which replaces the placeholder.

    So a module that builds batches can be imported to plan them, on a machine without torch, and at no later cost::

        torch = later("torch", globals())

    Args:
        module: The module to import.
        names: The global names of the module that uses it.
        name: The global name to replace; default: ``module``.
    """
    return _Later(module, names, name or module)


class _Later(ModuleType):
    """The placeholder of ``later``. Threads that use it concurrently all replace it with the same module."""

    def __init__(self, module: str, names: dict[str, Any], name: str) -> None:
        super().__init__(module)
        self._names, self._name = names, name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # accessed by tools that inspect all objects, such as repr
            raise AttributeError(f"module {self.__name__!r} is imported by the first use of another name")
        module = import_module(self.__name__)
        self._names[self._name] = module
        return getattr(module, attribute)


def num_cores() -> int:
    """Return the number of cores that this process may use, as far as the system reports it."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The limits of this process's control groups; None: no limit, or no control group.

    Attributes:
        cores: CPU time in cores, such as 1.5.
        memory_bytes: Memory, including the page cache of files.
        memory_left_bytes: Memory that is still free, including page cache that can be dropped.
    """

    cores: float | None = None
    memory_bytes: int | None = None
    memory_left_bytes: int | None = None


def group_limits(root: str = "/") -> GroupLimits:
    """Return the tightest limits of the control groups that hold this process, of version 1 or 2.

    Args:
        root: The directory that contains ``/proc`` and ``/sys``.
    """
    cores: list[float] = []
    memory: list[tuple[int, int]] = []
    for folder in _group_folders(root):
        quota, period = (_text_of(folder, "cpu.max") or "").split() or ("max", "100000")
        old = _text_of(folder, "cpu.cfs_quota_us"), _text_of(folder, "cpu.cfs_period_us")
        quota, period = (old[0] or quota, old[1] or period) if quota == "max" else (quota, period)
        if quota.isdecimal() and period.isdecimal() and int(quota):
            cores.append(int(quota) / max(1, int(period)))
        limit = _text_of(folder, "memory.max") or _text_of(folder, "memory.limit_in_bytes") or "max"
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            used = int(_text_of(folder, "memory.current") or _text_of(folder, "memory.usage_in_bytes") or 0)
            memory.append((int(limit), max(0, int(limit) - used + _droppable(folder))))
    least = min(memory, default=(None, None))
    return GroupLimits(cores=min(cores, default=None), memory_bytes=least[0], memory_left_bytes=least[1])


def _group_folders(root: str) -> list[str]:
    """Return the folders of all groups that hold this process, and of those above them."""
    mounts = os.path.join(root, "sys/fs/cgroup")
    folders = []
    for line in (_text_of(root, "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = os.path.join(mounts, controllers) if controllers else mounts
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        folders += [os.path.join(base, *parts[:depth]) for depth in range(len(parts) + 1)]
    return folders


def _text_of(folder: str, name: str) -> str | None:
    """Return the content of a small system file; None: there is no such file."""
    with suppress(OSError), open(os.path.join(folder, name), encoding="ascii", errors="replace") as file:
        return file.read().strip()
    return None


def _droppable(folder: str) -> int:
    """Return the bytes of page cache that the group frees when it needs memory."""
    lines = (_text_of(folder, "memory.stat") or "").splitlines()
    found = [line.split()[1] for line in lines if line.startswith(("inactive_file ", "total_inactive_file "))]
    return max((int(one) for one in found if one.isdecimal()), default=0)


def memory_bytes() -> int:
    """Return the memory that this process may use: that of the machine, or less if a control group limits it."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(there, group_limits().memory_bytes or there)


@cache
def boot_id() -> bytes:
    """Return an identifier of this boot of the machine; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(36)
    except OSError:
        return b""


def oom_kills() -> int | None:
    """Return the number of processes that the kernel has killed on this machine for lack of memory; None: unknown.

    Kills at the limit of a control group count, too.
    """
    lines = (_text_of("/proc", "vmstat") or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def working_folder() -> str:
    """Return the working directory, for processes that start there.

    Raises:
        ConfigError: It was deleted. A new process would fail to load libraries, without a clear error.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        name = ""
        with suppress(OSError):
            name = f" ({os.readlink('/proc/self/cwd').removesuffix(' (deleted)')})"
        raise ConfigError(
            f"the working directory of this process{name} was deleted, and other processes cannot start in it. "
            "os.chdir() to one that is there, or start the program from one; num_workers=0 starts no process"
        ) from error


def how_it_ended(name: str, code: int, oom_kills_before: int | None = None) -> str:
    """Describe how the process called ``name`` ended.

    Args:
        name: The process.
        code: Its exit code; negative: a signal.
        oom_kills_before: ``oom_kills()`` while the process ran; None: unknown.
    """
    if code >= 0:
        return f"{name} exited with code {code}"
    try:
        known = signal.Signals(-code).name
    except ValueError:
        known = f"signal {-code}"
    return f"{name} was killed by {known}{_perhaps_for_memory(oom_kills_before) if known == 'SIGKILL' else ''}"


def _perhaps_for_memory(oom_kills_before: int | None) -> str:
    now = oom_kills()
    if now is None or oom_kills_before is None:
        return " (probably by the kernel, for lack of memory)"
    if now > oom_kills_before:
        return f" by the kernel, for lack of memory (such kills on this machine meanwhile: {now - oom_kills_before})"
    return " (not by the kernel for lack of memory: such kills on this machine meanwhile: 0)"


def check_open_files(option: str, count: int, each: int, *, beside: int = 0) -> None:
    """Check that this process may open ``each`` files for each of ``count`` things, and ``beside`` files once.

    Args:
        option: The option that sets the number of things, for the message.
        count: Its value.
        each: Files for each of them.
        beside: Number of files for all of them together.

    Raises:
        ConfigError: It may not; the message gives the number needed, the limit, and the largest value that fits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    beside += _SPARE_FILES + len(os.listdir("/dev/fd"))
    needed = beside + count * each
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    how = f"Run `ulimit -n {needed}` before the program"
    if hard != resource.RLIM_INFINITY and needed > hard:
        how = f"Have the limit raised, which is {hard} at most (docker run --ulimit nofile={needed})"
    raise ConfigError(
        f"{option}={count}: this process needs {needed} open files ({each} for each, and {beside}), and may have "
        f"{soft} (ulimit -n). {how}, or use {option}={max(0, soft - beside) // each}"
    )


def has_worker_processes() -> bool:
    """Return whether decode workers can run, which requires Linux."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def possible_builders(num_workers: int, num_threads: int | None) -> tuple[int, int | None]:
    """Replace worker processes with threads, with one warning, on systems without worker processes.

    Returns:
        Number of worker processes; number of threads, None: the default.
    """
    if not num_workers or has_worker_processes():
        return num_workers, num_threads
    _warn_of_threads(num_workers)
    return 0, num_workers if num_threads is None else num_threads


@cache
def _warn_of_threads(num_workers: int) -> None:
    _log.warning(
        "num_workers=%d: worker processes need Linux, this is %s. As many threads build the same batches in their "
        "place, but your Python code runs on one thread at a time",
        num_workers, sys.platform,
    )  # fmt: skip


def unnamed_file(name: str) -> int:
    """Open an anonymous file, closed on exec: in memory on Linux, otherwise in the temporary directory.

    Args:
        name: The name shown in ``/proc``.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def want_huge_pages(memory: mmap.mmap) -> None:
    """Request huge pages if the system has them."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError:  # a kernel without them
            return


def remove_pages(memory: mmap.mmap, start: int = 0, num_bytes: int | None = None) -> None:
    """Return pages of a shared mapping to the system, in all processes; keep them if the system cannot do so."""
    advice = getattr(mmap, "MADV_REMOVE", None)
    if advice is not None:
        memory.madvise(advice, start, len(memory) - start if num_bytes is None else num_bytes)


def trim_heap() -> None:
    """Return the memory of freed objects, which the C library keeps per thread, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def will_need(descriptor: int, offset: int, num_bytes: int) -> None:
    """Advise the system which part of a file will be read, if it supports advice."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is not None:
        try:
            advise(descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)
        except OSError:  # only advice
            return
