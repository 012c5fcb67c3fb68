"""Describe in one line where a thread or a process currently is, for reports of stalls."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import TypeAlias

from streaming import errors

Spot: TypeAlias = tuple[str, int, str]
"""File, line, function."""

_OURS = os.path.dirname(os.path.abspath(errors.__file__))
_NOT_THE_USERS = (_OURS, os.path.dirname(os.__file__), "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STATES = {
    "R": "alive", "S": "alive", "I": "alive", "D": "in uninterruptible sleep: the system waits for a device or a file",
    "T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead, its status not collected yet", "X": "dead",
}  # fmt: skip


def thread_named(prefix: str) -> list[threading.Thread]:
    """Return this process's threads whose names begin with ``prefix``, sorted by name."""
    return sorted((one for one in threading.enumerate() if one.name.startswith(prefix)), key=lambda one: one.name)


def where_is(ident: int | None) -> str:
    """Return where a thread of this process is; "" if it has ended."""
    frame = None if ident is None else sys._current_frames().get(ident)
    return summary(_places(frame))


def where_in(dump: str) -> str:
    """Return the same from the output of ``faulthandler``; "" if that is empty."""
    return summary((file, int(line), name) for file, line, name in _DUMPED.findall(dump))


def summary(innermost_first: Iterable[Spot]) -> str:
    """Return the innermost spot in the user's own code, and the innermost spot overall if that differs."""
    spots = list(innermost_first)
    if not spots:
        return ""
    users = next((spot for spot in spots if _is_users(spot[0])), None)
    if users is None or users == spots[0]:
        return _text(spots[0])
    return f"{_text(users)} (in {_text(spots[0])})"


def state_of(pid: int) -> str:
    """Return whether a process is alive, in words, from ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return _STATES.get(state, f"in state {state}")


def _is_users(file: str) -> bool:
    return not file.startswith(_NOT_THE_USERS) and not any(folder in file for folder in _INSTALLED)


def _places(frame: FrameType | None) -> Iterable[Spot]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _text(spot: Spot) -> str:
    file, line, name = spot
    return f"{name}, {file}:{line}"
