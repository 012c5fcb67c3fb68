"""Detect functions that use the global random generators of the process: ``random``, ``numpy.random``, ``torch``.

These functions, too, get the same numbers everywhere: the generators are seeded before each sample, by its position in
the epoch. That takes 10 us, so it is done only for functions that draw, and only for the generators that they use.
Drawing is detected batch by batch: the generators are set to a known state, the batch is built, and their next numbers
show whether something was drawn. If so, the batch is built again, seeded. No draw escapes, however rare; a batch of
functions that draw nothing costs 25 us.

This is safe only if nothing else draws at the same time: in worker processes, and on the thread that asks for a batch
while it waits for it. In the training process the generators belong to the training: their state is restored
afterwards, and builder threads, which run in parallel with the training, never touch them. So without worker processes
the asking thread builds the first batch, under watch, and continues to build all batches if functions draw. Code that
names a drawing function is assumed to draw, so that a function that draws rarely is not mistaken for one that never
does.

Names are found without calling anything: what bytecode loads is followed through closures, globals, modules, methods,
attributes and partials, into all code except that of torch, NumPy and Python. This may miss what is reached in other
ways (``getattr``, compiled code), and may report code that never actually draws.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import random
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch

from streaming.batches.draws import ALL_GENERATORS, seed_generators

_T = TypeVar("_T")
_R = TypeVar("_R")
_KNOWN = 0x5EED_0F_5A3D
_EXPECTED = {
    "random": random.Random(_KNOWN).getrandbits(64),  # noqa: S311  not a secret
    "numpy": np.random.RandomState(_KNOWN & 0xFFFFFFFF)._bit_generator.random_raw(),
    "torch": int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(_KNOWN >> 1))),
}


class DrawWatch:
    """Build batches so that random numbers from the process's generators depend only on the samples.

    Not thread-safe: nothing else may draw while it builds.

    Attributes:
        found: Generators that functions were seen to draw from so far.
    """

    def __init__(self) -> None:
        self.found: frozenset[str] = frozenset()

    def build(
        self, attempt: Callable[[frozenset[str], Callable[[_R], None]], _T], report: Callable[[_R], object]
    ) -> _T:
        """Return what ``attempt`` returns, or raise what it raises.

        Call it again while it draws from unseeded generators.

        Args:
            attempt: Receives the generators to seed before each sample, and a function to report to.
            report: Receives at the end what the last attempt reported; may raise.
        """
        while True:
            reports: list[_R] = []
            seed_generators(_KNOWN, ALL_GENERATORS)
            error: Exception | None = None
            result: Any = None
            try:
                result = attempt(self.found, reports.append)
            except Exception as caught:  # noqa: BLE001  raised below, unless the right numbers may avert it
                error = caught
            drawn = _drawn() - self.found
            if drawn:
                self.found |= drawn
                continue
            for one in reports:
                report(one)
            if error is not None:
                raise error
            return cast("_T", result)


def _drawn() -> frozenset[str]:
    """Return the generators that are no longer in the state ``_KNOWN``."""
    got = {
        "random": random.getrandbits(64),
        "numpy": np.random.mtrand._rand._bit_generator.random_raw(),
        "torch": int(torch.empty((), dtype=torch.int64).random_()),
    }
    return frozenset(name for name, value in got.items() if value != _EXPECTED[name])


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the state of the process's generators at the end, whatever was drawn inside; takes 0.1 ms."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def generator_states() -> tuple[Any, Any, Any]:
    """Return the states of the process's generators; for torch, only that of the CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  the global one


def set_generator_states(states: tuple[Any, Any, Any]) -> None:
    """Restore the result of ``generator_states``."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002  the global one
    torch.set_rng_state(states[2])


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
"""Maximum number of objects examined for one dataset: some tenths of a second."""
_FOREIGN = frozenset(("torch", "numpy", "PIL", "cv2", "scipy", "pandas", *sys.stdlib_module_names))
_ROOTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


def named_draw(functions: Iterable[Any]) -> str:
    """Return the first drawing function that code reachable from ``functions`` names (``"random.gauss"``), or ""."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
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
    """Return the name of ``one`` if it draws from a generator of the process; otherwise ""."""
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
    """Return the components of an object that may hold functions."""
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
    """Return a drawing function that it names, or "", and the user's other objects that it refers to."""
    if _is_foreign(function):
        return "", []
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    known = ChainMap({name: _content(cell) for name, cell in cells}, function.__globals__, vars(builtins))
    others = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return _in_code(function.__code__, known, others), others


def _in_code(code: types.CodeType, known: ChainMap[str, Any], others: list[Any]) -> str:  # noqa: C901  one per kind
    """Follow each ``a.b.c`` that is loaded as far as ``known`` names resolve it; see ``_in_function``."""
    known = known.new_child(dict.fromkeys(code.co_varnames))  # unknown until they are stored
    own_generator = any(isinstance(names, tuple) and "generator" in names for names in code.co_consts)
    one: Any = None  # the object that was just loaded
    importing: Any = None  # the module from which names are being imported
    constant: Any = None
    for opname, name in _steps(code):
        if opname in _ROOTS:
            one = known.get(name)
        elif opname in _ATTRIBUTES:
            if one is None and name in _TENSOR_DRAWS and not own_generator:
                return f"Tensor.{name}"
            importing = one if opname == "IMPORT_FROM" else None
            one = inspect.getattr_static(one, name, None)
        elif opname == "IMPORT_NAME":
            importing = one = sys.modules.get(name if constant else name.partition(".")[0])
        elif opname.startswith("STORE_") and one is not None:
            known[name], one = one, importing
        else:
            one, importing, constant = None, None, name
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


@functools.lru_cache(maxsize=1024)
def _steps(code: types.CodeType) -> tuple[tuple[str, Any], ...]:
    """Return the instructions of a code object, with their arguments.

    Cached, because it takes a millisecond, and every loader examines the same code.
    """
    return tuple((step.opname, step.argval) for step in dis.get_instructions(code))


def _is_code(part: Any) -> bool:
    return isinstance(part, (types.FunctionType, staticmethod, classmethod, property))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_foreign(one: Any) -> bool:
    """Tell whether it is torch's, NumPy's or Python's own code."""
    return str(getattr(one, "__module__", "")).partition(".")[0] in _FOREIGN
