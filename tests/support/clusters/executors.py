"""Executors that behave as clusters do: they pickle, or stop in the middle."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Sending(ThreadPoolExecutor):
    """Pickles calls and their results, as a cluster does, and notes the size of each call."""

    def __init__(self) -> None:
        super().__init__(3)
        self.call_bytes: list[int] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.call_bytes.append(len(pickle.dumps(args)))
        return super().submit(_run, pickle.dumps((function, args, kwargs)))


def _run(call: bytes) -> Any:
    function, args, kwargs = pickle.loads(call)
    return pickle.loads(pickle.dumps(function(*args, **kwargs)))


class Stopping(ThreadPoolExecutor):
    """Fails the call that would write a certain shard."""

    def __init__(self, shard: int) -> None:
        super().__init__(3)
        self._shard = shard

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        first = args[0][0] if isinstance(args[0], tuple) else args[0]
        if getattr(first, "number", None) == self._shard:
            function = _stop
        return super().submit(function, *args, **kwargs)


def _stop(*_: Any) -> None:
    raise InterruptedError("stopped")
