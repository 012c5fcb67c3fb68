"""Pause one side of all loaders, so that tests fail whose results depend on which side is quicker: ``--pause``.

A test that passes by luck passes nearly always. With pauses, one side is always the slower one; a test that depends on
that fails each time. Worker processes are not paused, only the threads that wait for them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from streaming.run.engine.delivery import Delivery
from streaming.run.engine.threads.jobs import JobThreads
from streaming.storage.requests.threads import RequestThreads

FIRST_BATCHES = 2
"""Batches of a run after which the consumer pauses."""
CONSUMER_S, THREAD_S = 0.1, 0.02
MOST = {"consumer": 4, "builders": 60, "requests": 60}
"""Pauses per test, by side: enough for one side to be done, and few enough for 11,000 tests."""


class Pauses:
    """Let one side of all loaders in this process pause.

    Args:
        side: A key of ``MOST``.
        patch: Replaces methods.

    Attributes:
        taken: Number of pauses per test.
    """

    def __init__(self, side: str, patch: pytest.MonkeyPatch) -> None:
        self.taken: Counter[str] = Counter()
        self._most = MOST[side]
        match side:
            case "consumer":
                patch.setattr(Delivery, "__next__", self._consumer(Delivery.__next__))
            case "builders":
                patch.setattr(threading.Thread, "run", self._builder(threading.Thread.run))
                for reader in _readers(Delivery):
                    patch.setattr(reader, "_build", self._builder(reader.__dict__["_build"]))
            case "requests":
                patch.setattr(JobThreads, "submit", self._job(JobThreads.submit))
                patch.setattr(RequestThreads, "run", self._job(RequestThreads.run))

    def _pause(self, seconds: float) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")  # of whichever thread
        if self.taken[test] < self._most:
            self.taken[test] += 1
            time.sleep(seconds)

    def _consumer(self, following: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def paused(of: Any) -> Any:
            batch = following(of)
            if of._handed_out - of._first <= FIRST_BATCHES:
                self._pause(CONSUMER_S)
            return batch

        return paused

    def _builder(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def paused(of: Any, *arguments: Any) -> Any:
            if threading.current_thread().name.startswith("shardstream-build"):
                self._pause(THREAD_S)
            return work(of, *arguments)

        return paused

    def _job(self, begin: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def paused(of: Any, job: Callable[[], Any]) -> None:
            def late() -> Any:
                self._pause(THREAD_S)
                return job()

            begin(of, late)

        return paused


def _readers(kind: type[Any]) -> list[type[Any]]:
    """Return the kinds of deliveries that define how batches are built."""
    below = [found for one in kind.__subclasses__() for found in _readers(one)]
    built = kind.__dict__.get("_build")
    return below if built is None or getattr(built, "__isabstractmethod__", False) else [kind, *below]
