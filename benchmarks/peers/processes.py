"""The processes below one, and what they have used. Linux; standard library only."""

from __future__ import annotations

import contextlib
import os

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def _fields(pid: int | str) -> list[str]:
    """What ``/proc/PID/stat`` says after the name: state, parent, …"""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def descendants(root: int) -> list[int]:
    """Processes below ``root``, zombies left out."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = _fields(name)[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(name))
    found, front = [], [root]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


def cpu_s(root: int) -> float:
    """User and system time of ``root`` and all below it so far, with those that have ended and were waited for."""
    ticks = 0
    for pid in (root, *descendants(root)):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _fields(pid)[11:15]))
    return ticks / _TICKS_A_SECOND
