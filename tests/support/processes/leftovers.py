"""What a loader might leave behind in this process and on this machine."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil


def our_threads() -> set[threading.Thread]:
    """Running threads that the package started."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardstream-")}


def commands_about(folder: Path) -> list[str]:
    """Commands that run on this machine and name a folder: a program that works in it, and what it has started."""
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if str(folder) in command]


def descriptors(below: Path | str | None = None) -> Counter[tuple[str, int]]:
    """Return the open descriptors of this process, by path or kind, and inode.

    Subtract those of an earlier moment. Their number alone says nothing: another thread, or what an earlier test has
    left, may close its own meanwhile.

    Args:
        below: Only this file, or the files in this folder.
    """
    found = Counter[tuple[str, int]]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed the folder, or closed just now
            target, inode = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(int(descriptor)).st_ino
            if below is None or Path(target).is_relative_to(below):
                found[target, inode] += 1
    return found


def leftovers() -> Counter[str]:
    """Threads of ours, open descriptors, child processes, and files of ours in shared and temporary folders."""
    resource_tracker.ensure_running()  # multiprocessing starts it with the first named lock, and keeps it
    gc.collect()
    found = Counter(f"thread {one.name}" for one in our_threads())
    for (target, _), count in descriptors().items():
        found[f"descriptor {target}"] += count
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found.update(f"child {pid}" for pid in (task / "children").read_text().split())
    for folder in ("/dev/shm", tempfile.gettempdir()):
        own = str(os.getpid())
        found.update(f"file {name}" for name in os.listdir(folder) if "shardstream" in name and own in name)
    with open("/proc/self/maps") as maps:
        found["mappings of an arena"] = sum("shardstream-arena" in line for line in maps)
    return found
