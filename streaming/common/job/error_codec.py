"""Encode an exception as JSON, and decode it on another rank. No pickle, no import."""

from __future__ import annotations

import builtins
import json
import sys
from typing import Any

from streaming import errors
from streaming.errors import WorkerError


def error_to_json(error: BaseException) -> bytes:
    """Return an exception as JSON: the name of its type, its arguments if they are plain, its message and notes."""
    args = [arg if isinstance(arg, (str, int, float, bool, type(None))) else None for arg in error.args]
    plain = all(arg is None or type(arg) in {str, int, float, bool} for arg in error.args)
    kind = type(error)
    return json.dumps({
        "module": kind.__module__, "name": kind.__qualname__, "args": args if plain else None,
        "message": str(error), "notes": list(getattr(error, "__notes__", ())),
    }).encode()  # fmt: skip


def error_from_json(data: bytes, note: str) -> BaseException:
    """Return the exception with one more note.

    It has the same type and message if that type is known here; otherwise it is a ``WorkerError`` that names the type.
    """
    record = json.loads(data)
    error = _same_type(record)
    if error is None:
        error = WorkerError(f"{record['module']}.{record['name']}: {record['message']}")
    for old in record["notes"]:
        error.add_note(old)
    error.add_note(note)
    return error


def _same_type(record: dict[str, Any]) -> BaseException | None:
    """Rebuild the error if its type is loaded here and gives the same message; otherwise return None."""
    home = {"builtins": builtins, errors.__name__: errors}.get(record["module"], sys.modules.get(record["module"]))
    kind: Any = getattr(home, record["name"], None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    try:
        error: BaseException = kind(*([record["message"]] if record["args"] is None else record["args"]))
    except Exception:  # noqa: BLE001  a class may require any arguments
        return None
    return error if str(error) == record["message"] else None
