"""Identify functions and plain values, so that another process knows whether they are the same."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

_SHOWN = 16  # number of hex digits


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
