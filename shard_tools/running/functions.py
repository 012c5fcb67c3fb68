"""Import users' functions by name, pickle them, and say what failed in them."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import cloudpickle

from streaming import errors
from streaming.common.platforms import working_folder
from streaming.errors import ConfigError

_MAIN_OF_A_CHILD = "__mp_main__"
_FAILED = "_shard_tools_failed"
_OURS = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(errors.__file__) + os.sep)


def imported(spec: str, option: str) -> Callable[..., Any]:
    """Import the function that ``module:function`` names, from Python's path or else from the current folder.

    Args:
        spec: The name.
        option: The option that names it, for errors.

    Raises:
        ConfigError: There is no such function.
    """
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{option}: expected a function as module:function, got {spec!r}")
    folder = working_folder()
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file here shadows nothing
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{option} {spec}: {error}. Modules are looked for where Python looks (PYTHONPATH), then in {folder}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{option} {spec}: expected {name} to be a function, got a {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def dumps(thing: Any, what: str = "it") -> bytes:
    """Pickle an object for a process that does not import the main script.

    Args:
        thing: The object.
        what: Its name, for the error.

    Raises:
        ConfigError: It cannot be pickled.
    """
    main = sys.modules.get(_MAIN_OF_A_CHILD)
    if main is not None and main.__name__ == _MAIN_OF_A_CHILD:  # in the parent it is another name of __main__
        cloudpickle.register_pickle_by_value(main)
    out = io.BytesIO()
    try:
        cloudpickle.Pickler(out, protocol=5).dump(thing)
    except Exception as error:  # a user's __reduce__ may raise anything
        raise ConfigError(f"{what} cannot be sent to worker processes: {type(error).__name__}: {error}") from error
    return out.getvalue()


def blame(error: BaseException, failed: str, cure: str = "") -> None:
    """Note which call of a user's function raised an error; commands then show the error without our traceback.

    Args:
        error: The exception that the function raised.
        failed: The call that failed, and its input.
        cure: What helps.
    """
    error.add_note(f"{failed}; {cure}" if cure else failed)
    vars(error)[_FAILED] = failed


def blamed(error: BaseException) -> str:
    """Return which call of a user's function raised an error; "" if unknown."""
    return str(vars(error).get(_FAILED, ""))


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error without our frames above the user's, if it has user's frames."""
    shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    outermost = shown
    while shown is not None:
        users = [*itertools.dropwhile(lambda frame: frame.filename.startswith(_OURS), shown.stack)]
        if users:
            shown.stack = traceback.StackSummary.from_list(users)
        shown = shown.__cause__ or shown.__context__
    return "".join(outermost.format()) if outermost else ""


def why_not_sent(function: Any) -> str:
    """Name a variable of a function that cannot be pickled; "" if all its variables can."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return _first_that_fails(getattr(function, "__dict__", {}), f"attribute of {type(function).__qualname__}")
    outer = _first_that_fails(found.nonlocals, "variable of the enclosing function")
    return outer or _first_that_fails(found.globals, "global variable")


def _first_that_fails(named: Mapping[str, object], what: str) -> str:
    for name, value in named.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # noqa: BLE001  a user's __reduce__ may raise anything
            return f"{what} {name!r}, of type {type(value).__qualname__} ({error})"
    return ""
