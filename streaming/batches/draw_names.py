"""Which drawing function of ``random``, ``numpy.random`` or ``torch`` the code of users' functions names, if any.

Nothing is called: what bytecode loads is followed through closures, globals, modules, methods, attributes and
partials, into all code but torch's, NumPy's and Python's own. It may miss what is reached in other ways
(``getattr``, compiled code), and take code for drawing that never comes to it; :mod:`streaming.batches.draw_watch` uses
it beside a look at what is really drawn.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import random
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

_TORCH_DRAWS = frozenset(
    (
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli"),
        *("multinomial", "poisson", "dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d"),
        *("dropout3d", "rrelu", "gumbel_softmax", "manual_seed", "seed"),
    )
)
_TENSOR_DRAWS = frozenset(
    (
        *("bernoulli", "bernoulli_", "multinomial", "random_", "uniform_", "normal_", "exponential_", "geometric_"),
        *("cauchy_", "log_normal_"),
    )
)
_MOST_OBJECTS = 2_000
"""Looked at for one data set: at most some tenths of a second."""
_FOREIGN = frozenset(("torch", "numpy", "PIL", "cv2", "scipy", "pandas", *sys.stdlib_module_names))
_ROOTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


def named_draw(functions: Iterable[Any]) -> str:
    """The first drawing function that code reachable from ``functions`` names, such as ``"random.gauss"``, or ""."""
    seen: dict[int, Any] = {}  # keeps them alive, so that no number comes twice
    todo = list(functions)
    while todo and len(seen) < _MOST_OBJECTS:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        found = as_draw(one)
        if not found and isinstance(one, types.FunctionType):
            found, others = _in_function(one)
            todo += others
        if found:
            return found
        todo += _parts(one)
    return ""


def as_draw(one: Any) -> str:
    """The name of ``one``, if it draws from a generator of the process; else ""."""
    owner = getattr(one, "__self__", None)
    name = getattr(one, "__name__", "")
    if owner is not None and owner is getattr(random.random, "__self__", None):
        return f"random.{name}"
    if owner is not None and owner is getattr(np.random.rand, "__self__", None):
        return f"numpy.random.{name}"
    if callable(one) and name in _TORCH_DRAWS:
        for module in (torch, torch.nn.functional):
            if getattr(module, name, None) is one:
                return f"torch.{name}"
    if isinstance(one, torch.nn.modules.dropout._DropoutNd) and one.training:
        return f"torch.nn.{type(one).__name__}"
    return ""


def _parts(one: Any) -> list[Any]:  # noqa: PLR0911  one per kind
    """What an object is made of, as far as it may hold functions."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, types.MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, (staticmethod, classmethod)):
        return [one.__func__]
    if isinstance(one, property):
        return [one.fget]
    if isinstance(one, Mapping):
        return list(one.values())[:_MOST_OBJECTS]
    if isinstance(one, (list, tuple, set, frozenset)):
        return list(one)[:_MOST_OBJECTS]
    if isinstance(one, type):
        return [part for kind in one.__mro__ if not _is_foreign(kind) for part in vars(kind).values() if _is_code(part)]
    if isinstance(one, torch.nn.Module) and _is_foreign(type(one)):
        return list(one.children())
    if isinstance(one, (types.ModuleType, types.FunctionType, torch.Tensor)) or _is_foreign(type(one)):
        return []
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [type(one), *getattr(one, "__dict__", {}).values(), *(getattr(one, name, None) for name in slots)]


def _in_function(function: types.FunctionType) -> tuple[str, list[Any]]:
    """A drawing function that it names, or ""; and what else of the user's it refers to."""
    if _is_foreign(function):
        return "", []
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    known = {**vars(builtins), **function.__globals__, **{name: _content(cell) for name, cell in cells}}
    others = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return _in_code(function.__code__, known, others), others


def _in_code(code: types.CodeType, known: dict[str, Any], others: list[Any]) -> str:  # noqa: C901  one per kind
    """Follow each ``a.b.c`` that is loaded, as far as ``known`` names tell what it is; see ``_in_function``."""
    known = {name: value for name, value in known.items() if name not in code.co_varnames}
    own_generator = any(isinstance(names, tuple) and "generator" in names for names in code.co_consts)
    one: Any = None  # what has just been loaded
    importing: Any = None  # the module from which names are being imported
    constant: Any = None
    for step in dis.get_instructions(code):
        name = step.argval
        if step.opname in _ROOTS:
            one = known.get(name)
        elif step.opname in _ATTRIBUTES:
            if one is None and name in _TENSOR_DRAWS and not own_generator:
                return f"Tensor.{name}"
            importing = one if step.opname == "IMPORT_FROM" else None
            one = inspect.getattr_static(one, name, None)
        elif step.opname == "IMPORT_NAME":
            importing = one = sys.modules.get(name if constant else name.partition(".")[0])
        elif step.opname.startswith("STORE_") and one is not None:
            known[name], one = one, importing
        else:
            one, importing, constant = None, None, step.argval
            if isinstance(constant, types.CodeType):  # a function inside this one
                found = _in_code(constant, known, others)
                if found:
                    return found
        found = as_draw(one)
        if found and not (own_generator and found.startswith("torch")):
            return found
        if not found and one is not None and not isinstance(one, types.ModuleType):
            others.append(one)
    return ""


def _is_code(part: Any) -> bool:
    return isinstance(part, (types.FunctionType, staticmethod, classmethod, property))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_foreign(one: Any) -> bool:
    """Whether it is torch's, NumPy's or Python's own code."""
    return str(getattr(one, "__module__", "")).partition(".")[0] in _FOREIGN
