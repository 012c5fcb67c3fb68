"""Detect functions that draw from generators other than ``rng``, by what they do.

Such generators are those of the process (``random``, ``numpy.random``, ``torch``), and those that users' objects hold.
Their functions, too, get the same numbers everywhere: the generators are seeded before each sample, by its position in
the epoch. That takes 2 to 20 us each, so it is done only for functions that draw, and only for the generators that they
use. Drawing is detected batch by batch: the generators are set to a known state, the batch is built, and their state
shows whether something was drawn. If so, the batch is built again, seeded. No draw escapes, however rare; a batch of
functions that draw nothing costs 25 us.

This is safe only if nothing else draws at the same time: in worker processes, and on the thread that asks for a batch
while it waits for it. In the training process the generators belong to the training: their state is restored
afterwards, and builder threads, which run in parallel with the training, never touch them. So without worker processes
the asking thread builds the first batch, under watch, and continues to build all batches if functions draw.

Functions that drew nothing in the first batch may still draw for a rare sample, if code that they reach names a
function that draws. Builder threads call them by :class:`DrawGuard`, which stops a call before it draws; the batch
then goes to the asking thread, as do all later ones. Generators that users' objects hold are not the training's:
builder threads draw from them, too, but one batch at a time.

Names are found without calling anything: what bytecode loads is followed through closures, globals, modules, methods,
attributes and partials, into all code except that of torch, NumPy and Python. This may miss what is reached in other
ways (``getattr``, compiled code).
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import random
import sys
import types
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.nn import functional

from streaming.batches.draws import ALL_GENERATORS, OwnGenerator, seed_generators

_T = TypeVar("_T")
_R = TypeVar("_R")
_KNOWN = 0x5EED_0F_5A3D
_EXPECTED = {
    "random": random.Random(_KNOWN).getrandbits(64),  # noqa: S311  not a secret
    "numpy": np.random.RandomState(_KNOWN & 0xFFFFFFFF)._bit_generator.random_raw(),
    "torch": int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(_KNOWN >> 1))),
}


class DrawWatch:
    """Build batches so that random numbers from generators other than ``rng`` depend only on the samples.

    Not thread-safe: nothing else may draw while it builds.

    Args:
        functions: Those that build; the generators that their objects hold are watched, too.

    Attributes:
        found: Names of the generators that functions were seen to draw from so far.
        own: By name, the generators that objects of the functions hold.
    """

    def __init__(self, functions: Iterable[Any] = ()) -> None:
        self.found: frozenset[str] = frozenset()
        self.own: dict[str, OwnGenerator] = {}
        self._functions = tuple(functions)
        self._looks_left = 2

    def build(
        self, attempt: Callable[[frozenset[str], Callable[[_R], None]], _T], report: Callable[[_R], object], *,
        is_alone: bool = True,
    ) -> _T:  # fmt: skip
        """Return what ``attempt`` returns, or raise what it raises.

        Call it again while it draws from unseeded generators.

        Args:
            attempt: Receives the generators to seed before each sample, and a function to report to.
            report: Receives at the end what the last attempt reported; may raise.
            is_alone: Nothing else draws from the generators of the process meanwhile; otherwise these are left alone.
        """
        while True:
            reports: list[_R] = []
            self._look(2)
            marks = {name: one.mark() for name, one in self.own.items() if name not in self.found}
            if is_alone:
                seed_generators(_KNOWN, ALL_GENERATORS)
            error: Exception | None = None
            result: Any = None
            try:
                result = attempt(self.found, reports.append)
            except Exception as caught:  # noqa: BLE001  raised below, unless the right numbers may avert it
                error = caught
            drawn = {name for name, mark in marks.items() if self.own[name].mark() != mark} | self._look(1)
            drawn |= (_drawn() if is_alone else frozenset()) - self.found
            if drawn:
                self.found |= drawn
                continue
            for one in reports:
                report(one)
            if error is not None:
                raise error
            return cast("_T", result)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the state of all generators at the end, whatever was drawn inside."""
        self._look(2)
        states = [(one, one.state()) for one in self.own.values()]
        try:
            with kept_generators():
                yield
        finally:
            for one, state in states:
                one.restore(state)

    def _look(self, left: int) -> frozenset[str]:
        """Look for generators if so many looks are left: before the first batch, and for those that it makes.

        Returns:
            The names of new ones.
        """
        if self._looks_left != left:
            return frozenset()
        self._looks_left -= 1
        new = {name: one for name, one in own_generators(self._functions).items() if name not in self.own}
        self.own |= new
        return frozenset(new)


class DrawSeenError(BaseException):
    """A function was about to draw where it may not. Not for users to catch.

    Attributes:
        draw: What it was about to call.
    """

    def __init__(self, draw: str) -> None:
        super().__init__(f"{draw} was about to be called beside the training")
        self.draw = draw


class DrawGuard:
    """Stop functions that are about to draw from a generator of the process, before they do. Thread-safe.

    It sees calls from Python code, at 0.2 us each. NumPy's are invisible to it, so it stops code that names one.
    """

    def __init__(self) -> None:
        self._named: dict[types.CodeType, str] = {}  # draws of NumPy by the code that names them; "" for most

    def call(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns.

        Raises:
            DrawSeenError: It was about to draw, even if it has caught this.
        """
        if sys.getprofile() is not None:  # a profiler of the user's: nothing can be seen beside it
            raise DrawSeenError("code under a profiler")
        seen: list[DrawSeenError] = []

        def hook(frame: types.FrameType, event: str, called: Any) -> None:
            draw = ""
            if event == "c_call":
                if called.__name__ not in _COMPILED_DRAWS:
                    return
                draw = as_draw(called)
                if draw.startswith(("torch", "Tensor")) and _passes_generator(frame.f_code):
                    return
            elif event == "call":
                named = self._named.get(frame.f_code)
                draw = self._look_at(frame) if named is None else named
            if draw:
                seen.append(DrawSeenError(draw))
                raise seen[0]

        sys.setprofile(hook)
        try:
            result = function()
        finally:
            sys.setprofile(None)
            if seen:
                raise seen[0]
        return result

    def _look_at(self, frame: types.FrameType) -> str:
        """Return the first draw of NumPy's that is named by the code that is about to run, or ""."""
        draw = ""
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _FOREIGN:
            known = ChainMap(dict(frame.f_locals), frame.f_globals, vars(builtins))
            draw = next((one for one in _draws_in(frame.f_code, known, []) if one.startswith("numpy")), "")
        self._named[frame.f_code] = draw
        return draw


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
_COMPILED_DRAWS = _TORCH_DRAWS | _TENSOR_DRAWS | {"random", "getrandbits", "getstate", "setstate", "set_state"}
_MOST_OBJECTS = 2_000
"""Maximum number of objects examined for one dataset: some tenths of a second."""
_MOST_CODE = 100
"""Maximum number of functions and classes read in search of generators: some hundredths of a second."""
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


def own_generators(functions: Iterable[Any]) -> dict[str, OwnGenerator]:
    """Return the generators that objects of ``functions`` hold, by where they were found (``"Compose.rng"``).

    Objects come before code, the nearest first. The names do not depend on the process.
    """
    found: dict[str, OwnGenerator] = {}
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    objects = deque((getattr(one, "__qualname__", type(one).__qualname__), one) for one in functions)
    code: deque[tuple[str, Any]] = deque()
    num_read = 0
    while objects or (code and num_read < _MOST_CODE):
        if not objects:
            name, one = code.popleft()
            num_read += 1
            objects.extend(_named_by(name, one))
            continue
        name, one = objects.popleft()
        if isinstance(one, np.random.Generator):
            one = one.bit_generator  # which two of them may share
        if id(one) in seen or len(seen) == _MOST_OBJECTS:
            continue
        seen[id(one)] = one
        generator = OwnGenerator.of(_free(name, found), one)
        if generator is not None:
            found[_free(name, found)] = generator
        objects.extend((name + suffix, part) for suffix, part in _held(one))
        if isinstance(one, types.FunctionType):
            code.append((name, one))
        elif not isinstance(one, type) and not _is_foreign(type(one)) and id(type(one)) not in seen:
            seen[id(type(one))] = type(one)
            code.append((type(one).__qualname__, type(one)))
    return found


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """Return ``name``, numbered if it is taken."""
    number = 2
    free = name
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    return free


def _held(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, and how to write where."""
    if isinstance(one, functools.partial):
        yield from (("", one.func), *((f".args[{at}]", part) for at, part in enumerate(one.args)))
        yield from ((f".{name}", part) for name, part in one.keywords.items())
    elif isinstance(one, types.MethodType):
        yield from (("", one.__func__), (".__self__", one.__self__))
    elif isinstance(one, types.FunctionType):
        yield from ((f".{name}", part) for name, part in _cells_of(one).items())
        yield from ((f".{name}", part) for name, part in vars(one).items())
        yield from (("", part) for part in (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()))
    elif isinstance(one, Mapping):
        yield from ((f"[{name!r}]", part) for name, part in list(one.items())[:_MOST_OBJECTS])
    elif isinstance(one, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{at}]", part) for at, part in enumerate(list(one)[:_MOST_OBJECTS]))
    elif isinstance(one, torch.nn.Module) or not (
        isinstance(one, (type, types.ModuleType, torch.Tensor)) or _is_foreign(type(one))
    ):
        yield from ((f".{name}", part) for name, part in getattr(one, "__dict__", {}).items())
        slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from ((f".{name}", getattr(one, name, None)) for name in slots)


def _named_by(name: str, code: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a class, or the user's objects that a function refers to, by their global names."""
    if isinstance(code, type):
        yield from ((f"{name}.{getattr(part, '__name__', '')}", part) for part in map(_function_of, _parts(code)))
        return
    names = {id(value): key for key, value in code.__globals__.items()} if not _is_foreign(code) else {}
    yield from ((names.get(id(part), name), part) for part in _in_function(code)[1])


def _function_of(part: Any) -> Any:
    """Return the function of a class's entry."""
    return part.fget if isinstance(part, property) else getattr(part, "__func__", part)


def as_draw(one: Any) -> str:
    """Return the name of ``one`` if it draws from a generator of the process; otherwise ""."""
    owner = getattr(one, "__self__", None)
    name = getattr(one, "__name__", "")
    if owner is not None and owner is getattr(random.random, "__self__", None):
        return f"random.{name}"
    if owner is not None and owner is getattr(np.random.rand, "__self__", None):
        return f"numpy.random.{name}"
    if isinstance(owner, torch.Tensor) and name in _TENSOR_DRAWS:
        return f"Tensor.{name}"
    is_named = name in _TORCH_DRAWS and any(getattr(module, name, None) is one for module in (torch, functional))
    if is_named or owner is torch.default_generator:
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
    known = ChainMap(_cells_of(function), function.__globals__, vars(builtins))
    others = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found = list(_draws_in(function.__code__, known, others))
    return found[0] if found else "", others


def _cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return what a function closes over, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return {name: _content(cell) for name, cell in cells}


def _draws_in(code: types.CodeType, known: ChainMap[str, Any], others: list[Any]) -> Iterator[str]:
    """Follow each ``a.b.c`` that is loaded as far as ``known`` names resolve it; see ``_in_function``."""
    known = known.new_child(dict.fromkeys(code.co_varnames))  # unknown until they are stored
    own_generator = _passes_generator(code)
    one: Any = None  # the object that was just loaded
    importing: Any = None  # the module from which names are being imported
    constant: Any = None
    for opname, name in _steps(code):
        if opname in _ROOTS:
            one = known.get(name)
        elif opname in _ATTRIBUTES:
            if one is None and name in _TENSOR_DRAWS and not own_generator:
                yield f"Tensor.{name}"
            importing = one if opname == "IMPORT_FROM" else None
            one = inspect.getattr_static(one, name, None)
        elif opname == "IMPORT_NAME":
            importing = one = sys.modules.get(name if constant else name.partition(".")[0])
        elif opname.startswith("STORE_") and one is not None:
            known[name], one = one, importing
        else:
            one, importing, constant = None, None, name
            if isinstance(constant, types.CodeType):  # a function inside this one
                yield from _draws_in(constant, known, others)
        found = as_draw(one)
        if found and not (own_generator and found.startswith("torch")):
            yield found
        if not found and one is not None and not isinstance(one, types.ModuleType):
            others.append(one)


def _passes_generator(code: types.CodeType) -> bool:
    """Tell whether code passes ``generator=`` to something."""
    return any(isinstance(names, tuple) and "generator" in names for names in code.co_consts)


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
