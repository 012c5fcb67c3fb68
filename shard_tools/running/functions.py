"""Import users' functions by name, identify them (by source text, or else by bytecode), and pickle them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import itertools
import os
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import CodeType, FunctionType, MethodType
from typing import Any

import cloudpickle
import numpy as np

from streaming import errors
from streaming.common.platforms import working_folder
from streaming.errors import ConfigError

_SHOWN = 16  # number of hex digits
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


def source_digest(function: Any) -> str:
    """Return a digest of a function's source, which changes when it is edited; "" if there is no source."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


def identity_of(function: Any) -> str:
    """Describe a function so that other functions, and edited versions, have different descriptions.

    The description consists of its name, a digest of its source text (or bytecode, without source) and one of the
    values that it carries: defaults, closure, arguments of ``functools.partial``, attributes of an object. It does not
    cover functions that it calls, nor values that cannot be compared.
    """
    carried: list[object] = []
    while isinstance(function, (functools.partial, MethodType)):
        if isinstance(function, functools.partial):
            carried += [function.args, function.keywords]
            function = function.func
        else:
            carried.append(function.__self__)
            function = function.__func__
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    if not isinstance(function, (FunctionType, type)) and not hasattr(function, "__qualname__"):
        carried.append(getattr(function, "__dict__", {}))
        function = type(function)
    carried += [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]
    carried += [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
    text = source_digest(function)
    if text:
        basis = f"source text {text[:_SHOWN]}"
    elif (code := getattr(function, "__code__", None)) is not None:
        basis = f"bytecode of Python {sys.version_info[0]}.{sys.version_info[1]} {digest_of(_code_parts(code))}"
    else:
        basis = f"of module {getattr(function, '__module__', None)}"
    return f"{function.__qualname__} ({basis}, values {digest_of(carried)})"


def digest_of(value: object) -> str:
    """Return hex digits that are the same for equal values of plain types, in every process.

    Values of other types are represented by the names of their types.
    """
    sha = hashlib.sha256()
    for piece in _pieces(value, set()):
        sha.update(piece)
    return sha.hexdigest()[:_SHOWN]


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


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _code_parts(code: CodeType) -> tuple[object, ...]:
    constants = tuple(_code_parts(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames


def _pieces(value: Any, inside: set[int]) -> Iterable[bytes]:  # noqa: C901, PLR0911  one per kind
    """Yield bytes that identify the value uniquely; ``inside`` are the containers around it."""
    if value is None or isinstance(value, (bool, int, complex)):
        return _named(type(value).__name__, repr(value).encode())
    if isinstance(value, float):
        return _named("float", struct.pack("<d", value))
    if isinstance(value, str):
        return _named("str", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _named("bytes", bytes(value))
    if isinstance(value, os.PathLike):
        return _named("path", os.fsencode(value))
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        array = np.asarray(value)
        return _named(f"array {array.dtype.str} {array.shape}", array.tobytes())
    if isinstance(value, FunctionType):
        text = "" if id(value.__code__) in inside else source_digest(value) or value.__qualname__
        return _named("function", text.encode())
    if id(value) in inside:
        return _named("again", b"")
    if isinstance(value, Mapping):
        return _joined("mapping", [part for pair in value.items() for part in pair], inside | {id(value)})
    if isinstance(value, (list, tuple)):
        return _joined(type(value).__name__, value, inside | {id(value)})
    if isinstance(value, (set, frozenset)):
        return _joined("set", sorted(map(digest_of, value)), inside)
    if is_dataclass(value) and not isinstance(value, type):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return _joined(kind, [getattr(value, one.name, None) for one in fields(value)], inside | {id(value)})
    return _named("other", f"{type(value).__module__}.{type(value).__qualname__}".encode())


def _named(kind: str, content: bytes) -> list[bytes]:
    return [f"{kind} {len(content)}:".encode(), content]


def _joined(kind: str, parts: Iterable[object], inside: set[int]) -> Iterable[bytes]:
    yield f"{kind} (".encode()
    for part in parts:
        yield from _pieces(part, inside)
    yield b")"
