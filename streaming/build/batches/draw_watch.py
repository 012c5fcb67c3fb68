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

Names decide who is watched, never what is drawn: the guard takes half a microsecond a call, which functions that name
no draw need not pay. They are found without calling anything, see :func:`_reached`. This may miss what is reached in
other ways (``getattr``, compiled code).
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

from streaming.build.batches.draws import ALL_GENERATORS, OwnGenerator, seed_generators
from streaming.build.batches.jagged import fresh

_T = TypeVar("_T")
_R = TypeVar("_R")
_KNOWN = 0x5EED_0F_5A3D
_EXPECTED = {
    "random": random.Random(_KNOWN).getrandbits(64),  # noqa: S311  not a secret
    "numpy": np.random.RandomState(_KNOWN & 0xFFFFFFFF)._bit_generator.random_raw(),
    "torch": int(fresh((), torch.int64).random_(generator=torch.Generator().manual_seed(_KNOWN >> 1))),
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

    It sees calls from Python code, at 0.5 us each. NumPy's are invisible to it, so it stops code that names one.
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
            named = (as_draw(one) for _, one in _loaded_by(frame.f_code, known))
            draw = next((one for one in named if one.startswith("numpy")), "")
        self._named[frame.f_code] = draw
        return draw


def _drawn() -> frozenset[str]:
    """Return the generators that are no longer in the state ``_KNOWN``."""
    got = {
        "random": random.getrandbits(64),
        "numpy": np.random.mtrand._rand._bit_generator.random_raw(),
        "torch": int(fresh((), torch.int64).random_()),
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
_MOST_CODE = {"generators": 100, "draws": 500}
"""Maximum number of functions and classes read in search of each: some hundredths, some tenths of a second."""
_FOREIGN = frozenset(("torch", "numpy", "PIL", "cv2", "scipy", "pandas", *sys.stdlib_module_names))
_ROOTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


def named_draw(functions: Iterable[Any]) -> str:
    """Return a drawing function that code reachable from ``functions`` names (``"random.gauss"``), or ""."""
    return next((draw for draw in (as_draw(one) for _, one in _reached(functions, _MOST_CODE["draws"])) if draw), "")


def own_generators(functions: Iterable[Any]) -> dict[str, OwnGenerator]:
    """Return the generators that objects of ``functions`` hold, by where they were found (``"Compose.rng"``).

    The names do not depend on the process.
    """
    found: dict[str, OwnGenerator] = {}
    for name, one in _reached(functions, _MOST_CODE["generators"]):
        generator = OwnGenerator.of(_free(name, found), one)
        if generator is not None:
            found[_free(name, found)] = generator
    return found


def _reached(functions: Iterable[Any], most_code: int) -> Iterator[tuple[str, Any]]:
    """Yield what ``functions`` reach, and where.

    Objects that hold each other come before what code names, the nearest first. Code is all but that of torch, NumPy
    and Python; what its instructions load is followed through closures, globals, modules, attributes and methods.

    Args:
        functions: Where to begin.
        most_code: Maximum number of functions and classes whose code is read.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    objects = deque((getattr(one, "__qualname__", type(one).__qualname__), one) for one in functions)
    code: deque[tuple[str, Any]] = deque()
    while objects or (code and most_code):
        if not objects:
            objects.extend(_named_by(*code.popleft()))
            most_code -= 1
            continue
        name, one = objects.popleft()
        if isinstance(one, np.random.Generator):
            one = one.bit_generator  # which two of them may share
        if id(one) in seen:
            continue
        if len(seen) == _MOST_OBJECTS:
            return
        seen[id(one)] = one
        yield name, one
        objects.extend((name + suffix, part) for suffix, part in _held(one))
        if not isinstance(one, (type, types.FunctionType)):
            objects.append((name, type(one)))
        elif not _is_foreign(one):
            code.append((one.__qualname__ if isinstance(one, type) else name, one))


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
    elif isinstance(one, (staticmethod, classmethod, property)):
        yield "", _function_of(one)
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
    """Yield the functions of a user's class, or what a user's function refers to, by global names."""
    if isinstance(code, type):
        for part in (part for kind in code.__mro__ if not _is_foreign(kind) for part in vars(kind).values()):
            function = _function_of(part)
            if isinstance(function, types.FunctionType):
                yield f"{name}.{function.__name__}", function
    else:
        known = ChainMap(_cells_of(code), code.__globals__, vars(builtins))
        yield from ((called or name, part) for called, part in _loaded_by(code.__code__, known))


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
    if name in _TENSOR_DRAWS and (isinstance(owner, torch.Tensor) or one is getattr(torch.Tensor, name)):
        return f"Tensor.{name}"
    is_named = name in _TORCH_DRAWS and any(getattr(module, name, None) is one for module in (torch, functional))
    if is_named or owner is torch.default_generator:
        return f"torch.{name}"
    if isinstance(one, torch.nn.modules.dropout._DropoutNd) and one.training:
        return f"torch.nn.{type(one).__name__}"
    return ""


def _cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return what a function closes over, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return {name: _content(cell) for name, cell in cells}


def _loaded_by(code: types.CodeType, known: ChainMap[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what code loads, by its global name if it has one: each ``a.b.c`` as far as ``known`` names resolve it.

    Modules are left out, and so are draws of torch if the code passes ``generator=`` to something.
    """
    known = known.new_child(dict.fromkeys(code.co_varnames))  # unknown until they are stored
    own_generator = _passes_generator(code)
    one: Any = None  # the object that was just loaded
    importing: Any = None  # the module from which names are being imported
    constant: Any = None
    for opname, name in _steps(code):
        if opname in _ROOTS:
            one = known.get(name)
        elif opname in _ATTRIBUTES:
            importing = one if opname == "IMPORT_FROM" else None
            of_tensor = one is None and name in _TENSOR_DRAWS  # of what is unknown, so it may be one
            one = inspect.getattr_static(torch.Tensor if of_tensor else one, name, None)
        elif opname == "IMPORT_NAME":
            importing = one = sys.modules.get(name if constant else name.partition(".")[0])
        elif opname.startswith("STORE_") and one is not None:
            known[name], one = one, importing
        else:
            one, importing, constant = None, None, name
            if isinstance(constant, types.CodeType):  # a function inside this one
                yield from _loaded_by(constant, known)
        is_loaded = one is not None and not isinstance(one, types.ModuleType)
        if is_loaded and not (own_generator and as_draw(one).startswith(("torch", "Tensor"))):
            yield (name if opname == "LOAD_GLOBAL" else ""), one


def _passes_generator(code: types.CodeType) -> bool:
    """Tell whether code passes ``generator=`` to something."""
    return any(isinstance(names, tuple) and "generator" in names for names in code.co_consts)


@functools.lru_cache(maxsize=1024)
def _steps(code: types.CodeType) -> tuple[tuple[str, Any], ...]:
    """Return the instructions of a code object, with their arguments.

    Cached, because it takes a millisecond, and every loader examines the same code.
    """
    return tuple((step.opname, step.argval) for step in dis.get_instructions(code))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_foreign(one: Any) -> bool:
    """Tell whether it is torch's, NumPy's or Python's own code."""
    return str(getattr(one, "__module__", "")).partition(".")[0] in _FOREIGN
