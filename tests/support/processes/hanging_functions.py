"""User functions that hang, in any thread or process, and the test's end of them."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.processes.waiting import PATIENCE_S, until

BATCH = 8
GOOD_BATCHES = 3
"""Batches before the first in which every sample hangs; a prefetcher pulls two before it hands out the first."""
STANDS_S = 0.2


def await_byte(pipe: str) -> None:
    """Returns when somebody has written to ``pipe``.

    It wakes from time to time: a signal that arrives just before Python begins to wait is noticed only then.
    """
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        while True:
            if select.select([descriptor], [], [], 0.2)[0]:
                with suppress(BlockingIOError):  # another reader was first
                    os.read(descriptor, 1)
                    return
    finally:
        os.close(descriptor)


def until_it_stands(thread: threading.Thread) -> None:
    """Wait until ``thread`` has been in the same call for a while.

    Python prints and drops an exception that a signal raises in a ``weakref`` callback, and batches have such.
    """
    last, since_s = None, time.monotonic()
    while last is None or time.monotonic() - since_s < STANDS_S:
        time.sleep(STANDS_S / 10)
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not last:
            last, since_s = frame, time.monotonic()


class Hang:
    """A transform that hangs from batch ``GOOD_BATCHES`` on, in any process, until it is released.

    It reports this in one pipe, ``here``, and reads from another, ``gate``, that nobody writes to.

    Attributes:
        spares: A thread in which it does not hang: a consumer may build batches as well as its builders.
        num_hanging: Samples that hang in this process, or did.
    """

    def __init__(self, folder: str) -> None:
        self.here, self.gate = f"{folder}/here", f"{folder}/gate"
        self.first = GOOD_BATCHES * BATCH
        self.spares: threading.Thread | None = None
        self.num_hanging = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] >= self.first and threading.current_thread() is not self.spares:
            self.num_hanging += 1
            self.say()
            self.hang()
            raise ValueError("a bad sample, if anybody asked")
        return sample

    def step(self, number: int) -> None:
        """Be a consumer's step with its batch of that number, which takes until a builder hangs, if one may.

        The thread that it spares might otherwise build all batches itself.
        """
        if self.spares is not None and number >= GOOD_BATCHES - 1:
            until(lambda: self.num_hanging, "a builder begins a batch")

    def say(self) -> None:
        with open(self.here, "wb", buffering=0) as here:
            here.write(b"!")

    def hang(self) -> None:
        await_byte(self.gate)


class Busy(Hang):
    """The same, but it computes forever, and cannot be released."""

    def hang(self) -> None:
        while True:
            pass


class Hung:
    """The test's end of functions that hang on the pipes in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.transform = Hang(str(folder))
        os.mkfifo(self.transform.here)
        os.mkfifo(self.transform.gate)
        self._before = set(threading.enumerate())
        self._here = os.open(self.transform.here, os.O_RDWR)

    def wait(self) -> None:
        """Wait until a sample hangs."""
        assert os.read(self._here, 1) == b"!"

    def let_go(self) -> None:
        """Release hanging samples, and any that reach the pipe later; returns when all have ended."""
        writer = os.open(self.transform.gate, os.O_RDWR | os.O_NONBLOCK)
        latest_s = time.monotonic() + PATIENCE_S
        for thread in self.left_behind():
            while thread.is_alive():
                assert time.monotonic() < latest_s, f"{thread.name} does not end"
                with suppress(BlockingIOError):
                    os.write(writer, b"!")
                thread.join(0.01)
        os.close(writer)

    def left_behind(self) -> list[threading.Thread]:
        """Threads of loaders begun since this object was made."""
        ours = ("shardstream-build", "shardstream-stream")
        return [one for one in threading.enumerate() if one.name.startswith(ours) and one not in self._before]

    def close(self) -> None:
        os.close(self._here)
