"""The end of threads that run users' functions: a moment to end by themselves; then they are left behind, and told of.

No thread can be ended from outside. One that is left behind is a daemon, so the interpreter's end does not wait for it;
what it reads from is not freed under it, and what it makes is thrown away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from streaming.engine.stacks import where_is
from streaming.forks import in_children

GRACE_S = 1.0
"""For batches under way to end: most take milliseconds, and a process that is killed costs a fork and warm caches.
Short beside what a person, or a cluster that stops a job, waits for."""

LOOK_UP_S = 1.0
"""The longest wait in one piece of a thread that may be the main one. Python runs signal handlers between two steps of
its own: a Ctrl-C that comes when it has decided to wait, but does not wait yet, is seen when that wait ends."""

_log = logging.getLogger(__name__)


class GivenUpError(Exception):
    """Nobody wants the batch any more. Whoever ended the run gets no error."""


def still_alive(threads: Iterable[threading.Thread], grace_s: float = GRACE_S) -> list[threading.Thread]:
    """Those that have not ended within ``grace_s``, all together, but for the calling thread."""
    deadline_s = time.monotonic() + grace_s
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return [thread for thread in others if thread.is_alive()]


def leave_to_parent(run: Any) -> None:
    """Have forked children take ``run`` for closed: its threads are the parent's, there is nobody to wait for."""
    in_children(run, _take_for_closed)


def tell_of(left: Iterable[threading.Thread]) -> None:
    """One warning that names each thread left behind, and the function that it is in."""
    places = [
        f"thread {thread.name} in {where_is(thread.ident) or 'a function that has just returned'}" for thread in left
    ]
    _log.warning(
        "a run was ended, but a function that it called has not returned: %s. A thread cannot be stopped from outside: "
        "it stays, with the memory that it reads from, until that function returns; its batch is thrown away. Give the "
        "function a time limit, or use num_workers: processes can be killed",
        "; ".join(places),
    )


def _take_for_closed(run: Any) -> None:
    run._closed = True
