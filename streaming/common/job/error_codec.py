"""Encode an exception as JSON, and decode it on another rank. No pickle, no import."""

from __future__ import annotations

import builtins
import json
import sys
from typing import Any

from streaming import errors
from streaming.errors import WorkerError


def error_to_json(error: BaseException) -> bytes:
    """Return an exception as JSON: its type by name, its arguments where they are plain, its message and notes."""
    args = [arg if isinstance(arg, (str, int, float, bool, type(None))) else None for arg in error.args]
    plain = all(arg is None or type(arg) in {str, int, float, bool} for arg in error.args)
    kind = type(error)
    return json.dumps({
        "module": kind.__module__, "name": kind.__qualname__, "args": args if plain else None,
        "message": str(error), "notes": list(getattr(error, "__notes__", ())),
    }).encode()  # fmt: skip


def error_from_json(data: bytes, note: str) -> BaseException:
    """Return the exception with one more note, of the same type and message if that type is known here.

    Otherwise it is a ``WorkerError`` that names the type.
    """
    told = json.loads(data)
    error = _same_type(told)
    if error is None:
        error = WorkerError(f"{told['module']}.{told['name']}: {told['message']}")
    for old in told["notes"]:
        error.add_note(old)
    error.add_note(note)
    return error


def _same_type(told: dict[str, Any]) -> BaseException | None:
    """Make the error again, if its type is loaded here and gives the same message; else None."""
    home = {"builtins": builtins, errors.__name__: errors}.get(told["module"], sys.modules.get(told["module"]))
    kind: Any = getattr(home, told["name"], None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    try:
        error: BaseException = kind(*([told["message"]] if told["args"] is None else told["args"]))
    except Exception:  # noqa: BLE001  any class may ask for anything
        return None
    return error if str(error) == told["message"] else None
