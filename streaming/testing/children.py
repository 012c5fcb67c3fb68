"""Fork children of a test, with a deadline: their results are returned, and no child is left behind."""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Self

DEADLINE_S = 120.0


class Child:
    """A process forked from this one that runs ``function``, at once or after ``go``.

    Use it as a context manager; the process is gone at its end.
    """

    def __init__(self, function: Callable[[], Any], *, waits: bool = False) -> None:
        self._gate, gate = os.pipe()
        theirs, self._answer = gate, -1
        self._answer, answer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of forks in threaded processes, which are tested here
            self.pid = os.fork()
        if not self.pid:
            os.close(theirs)
            _run(function, self._gate if waits else None, answer)
        os.close(answer)
        os.close(self._gate)
        self._gate = theirs

    def go(self) -> None:
        """Let the function run."""
        os.write(self._gate, b"!")

    def result(self) -> Any:
        """Return the function's result.

        Raises:
            AssertionError: The function raised, or did not end in time.
        """
        data = b""
        while select.select([self._answer], [], [], DEADLINE_S)[0]:
            piece = os.read(self._answer, 1 << 16)
            if not piece:
                failed, value = pickle.loads(data)
                assert not failed, f"in the forked child:\n{value}"
                return value
            data += piece
        raise AssertionError(f"the forked child {self.pid} hangs: no answer in {DEADLINE_S} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._gate)
        os.close(self._answer)


def in_child(function: Callable[[], Any]) -> Any:
    """Return the result of ``function`` in a forked child."""
    with Child(function) as child:
        return child.result()


def _run(function: Callable[[], Any], gate: int | None, answer: int) -> None:
    try:
        try:
            if gate is not None:
                os.read(gate, 1)
            message = False, function()
        except BaseException:  # noqa: BLE001  the parent gets it
            message = True, traceback.format_exc()
        with os.fdopen(answer, "wb") as file:
            pickle.dump(message, file)
    finally:
        os._exit(0)
