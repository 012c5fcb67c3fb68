"""Tell what came out of a signal's handler, at any line at all, from errors of the line that raised them."""

from __future__ import annotations

import signal
import traceback
from functools import partial
from typing import Any


def is_interrupt(error: BaseException | None) -> bool:
    """Tell whether it is no ``Exception``, or a signal's handler threw it or its cause: a time limit, say."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while error is not None:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if not isinstance(error, Exception) or any(frame.f_code in codes for frame in frames):
            return True
        error = error.__cause__ or error.__context__
    return False


def _code_of(handler: Any) -> Any:
    """Return the code that runs: of a function, a method, or an object that can be called; None: none of Python's."""
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = type(handler).__call__ if callable(handler) else None
    return getattr(function, "__code__", None)
