"""Distinguish exceptions of a signal handler, which can occur at any line, from errors of the line itself."""

from __future__ import annotations

import signal
import traceback
from functools import partial
from typing import Any


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether ``error`` is no ``Exception``, or a signal handler (such as a timeout) raised it or its cause."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    seen = set[int]()
    while error is not None and id(error) not in seen:  # a chain of causes may be circular
        seen.add(id(error))
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if not isinstance(error, Exception) or any(frame.f_code in codes for frame in frames):
            return True
        error = error.__cause__ or error.__context__
    return False


def _code_of(handler: Any) -> Any:
    """Return the code object of a function, a method or a callable object; None if it is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = type(handler).__call__ if callable(handler) else None
    return getattr(function, "__code__", None)
