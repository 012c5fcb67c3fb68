"""Wait for what another thread or process does; if it never does, say what was waited for.

Where an event can be had, wait for it, ``PATIENCE_S`` at most. ``until`` is for the rest: what another process has
written, or what no code announces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 120.0
"""The end of a wait that is in vain: much longer than a machine with other work needs, and shorter than a test may."""
_LOOKS_EVERY_S = 0.01

Found = TypeVar("Found")


def until(
    condition: Callable[[], Found], what: str, *, within_s: float = PATIENCE_S, details: Callable[[], object] = str
) -> Found:
    """Return what ``condition`` returns, once that is true.

    Args:
        condition: Looked at again and again; it may raise, such as where the process that is waited for has ended.
        what: What is waited for, to be read after "waited in vain:".
        within_s: When to give up.
        details: What else to say then, such as a process's output.

    Raises:
        AssertionError: It has not come true in time.
    """
    end_s = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() >= end_s:
            raise AssertionError(f"waited in vain for {within_s:.0f} s: {what} {details()}".rstrip())
        time.sleep(_LOOKS_EVERY_S)
    return found


def is_timed(name: str, metrics: object = None) -> bool:
    """Tell whether a thread is at work of this name, such as ``wait_for_build_s``, that is timed for ``metrics``."""
    from streaming.common.counters import under_way  # noqa: PLC0415  servers, which need this module, need nothing of ours

    return any(one.name == name and metrics in (None, one.metrics) for one, _ in list(under_way()))


def started(*tasks: Callable[[], object], name: str = "test") -> list[threading.Thread]:
    """Return a running thread for each task; those that hang do not keep the process alive."""
    threads = [threading.Thread(target=task, name=f"{name}-{number}", daemon=True) for number, task in enumerate(tasks)]
    for thread in threads:
        thread.start()
    return threads


def ended(*threads: threading.Thread) -> None:
    """Wait until threads have ended."""
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"waited in vain for {PATIENCE_S:.0f} s: {thread.name} ends"
