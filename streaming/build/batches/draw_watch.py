"""Detect functions that draw from generators other than ``rng``, by watching the state of the generators.

Such generators are those of the process (``random``, ``numpy.random``, ``torch``), and those that users' objects hold.
Functions that use them also get the same numbers everywhere: the generators are seeded before each sample, by its
position in the epoch. Seeding takes 2 to 20 us per generator, so it is done only for functions that draw, and only for
the generators that they use. Drawing is detected batch by batch: the generators are set to a known state, the batch is
built, and their state shows whether something was drawn. If so, the batch is built again, seeded. Every draw is
detected, however rare; watching a batch whose functions draw nothing costs 25 us.

This is safe only where nothing else draws at the same time: in worker processes, and on the thread that requests a
batch while it waits for it. In the training process the generators belong to the training: their state is restored
afterwards, and builder threads, which run in parallel with the training, never touch them. So without worker processes
the requesting thread builds the first batch, under watch, and continues to build all batches if functions draw.

Functions that drew nothing in the first batch are then called by builder threads, where draws cannot be attributed: a
later draw is not detected, unless the requesting thread builds every batch (``num_threads=0``) or worker processes do.
Generators that users' objects hold do not belong to the training: builder threads draw from them, too, but one batch at
a time.

Such generators are found by following the objects that functions hold, and the globals that their code names, without
calling anything (:func:`_reached`). Generators reached in other ways (``getattr``, compiled code) are not found. A name
in code may be an attribute of something else, and the global of that name may belong to the training. So generators
that are only named are watched like those of the process: where nothing else draws.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch

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
        functions: The functions that build; the generators that their objects hold are watched, too.

    Attributes:
        found: Names of the generators that functions have drawn from so far.
        own: The generators that objects of the functions hold, by name.
    """

    def __init__(self, functions: Iterable[Any] = ()) -> None:
        self.found: frozenset[str] = frozenset()
        self.own: dict[str, OwnGenerator] = {}
        self._functions = tuple(functions)
        self._looks_left = 2

    @property
    def draws_beside(self) -> bool:
        """Whether functions draw from generators of their own, so builder threads must build one batch at a time."""
        return any(one.is_held or name in self.found for name, one in self.own.items())

    def build(
        self, attempt: Callable[[frozenset[str], Callable[[_R], None]], _T], report: Callable[[_R], object], *,
        is_alone: bool = True,
    ) -> _T:  # fmt: skip
        """Call ``attempt``, again while it draws from unseeded generators; return its result or raise its error.

        Args:
            attempt: Receives the generators to seed before each sample, and a function that collects reports.
            report: Receives the reports of the last attempt at the end; may raise.
            is_alone: Whether nothing else draws from the generators of the process meanwhile. Otherwise neither these
                nor the generators that functions only name are touched.
        """
        while True:
            reports: list[_R] = []
            self._look(2)
            watched = [name for name, one in self.own.items() if is_alone or one.is_held]
            marks = {name: self.own[name].mark() for name in watched if name not in self.found}
            if is_alone:
                seed_generators(_KNOWN, ALL_GENERATORS)
            error: Exception | None = None
            result: Any = None
            try:
                result = attempt(self.found, reports.append)
            except Exception as caught:  # noqa: BLE001  raised below, unless an attempt with seeded numbers follows
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
        """Restore the state of all generators at the end of the block."""
        self._look(2)
        states = [(one, one.state()) for one in self.own.values()]
        try:
            with kept_generators():
                yield
        finally:
            for one, state in states:
                one.restore(state)

    def _look(self, left: int) -> frozenset[str]:
        """Look for generators if exactly ``left`` looks are left: before the first batch, and after it for new ones.

        Returns:
            The names of new generators.
        """
        if self._looks_left != left:
            return frozenset()
        self._looks_left -= 1
        new = {name: one for name, one in own_generators(self._functions).items() if name not in self.own}
        self.own |= new
        return frozenset(new)


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
    """Restore the state of the process's generators at the end of the block; takes 0.1 ms."""
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


_MOST_OBJECTS = 2_000
"""Maximum number of objects examined for one dataset: a few tenths of a second."""
_MOST_CODE = 100
"""Maximum number of functions and classes whose names are followed."""
_FOREIGN = frozenset(("torch", "numpy", "PIL", "cv2", "scipy", "pandas", *sys.stdlib_module_names))


def own_generators(functions: Iterable[Any]) -> dict[str, OwnGenerator]:
    """Return the generators that objects of ``functions`` hold, by the path to them (``"Compose.rng"``).

    The names do not depend on the process.
    """
    found: dict[str, OwnGenerator] = {}
    for name, one, is_held in _reached(functions):
        generator = OwnGenerator.of(_free(name, found), one, is_held=is_held)
        if generator is not None:
            found[_free(name, found)] = generator
    return found


def _reached(functions: Iterable[Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield (path, object, whether it is held) for all that ``functions`` reach; objects not held are named globals.

    Held objects come before named ones, the nearest first. The code of torch, NumPy and Python is not followed.
    """
    most_code = _MOST_CODE
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    objects = deque((getattr(one, "__qualname__", type(one).__qualname__), one, True) for one in functions)
    code: deque[tuple[str, Any]] = deque()
    while objects or (code and most_code):
        if not objects:
            objects.extend((*named, False) for named in _named_by(*code.popleft()))
            most_code -= 1
            continue
        name, one, is_held = objects.popleft()
        if isinstance(one, np.random.Generator):
            one = one.bit_generator  # two generators may share it
        if id(one) in seen:
            continue
        if len(seen) == _MOST_OBJECTS:
            return
        seen[id(one)] = one
        yield name, one, is_held
        objects.extend((name + suffix, part, is_held) for suffix, part in _held(one))
        if not isinstance(one, (type, types.FunctionType)):
            objects.append((name, type(one), is_held))
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
    """Yield the objects that an object holds, each after the expression that reaches it."""
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
    """Yield the functions of a user's class, or the globals, and parts of modules, that a user's function may name."""
    if isinstance(code, type):
        parts = (part for kind in code.__mro__ if not _is_foreign(kind) for part in vars(kind).values())
        functions = (one for one in map(_function_of, parts) if isinstance(one, types.FunctionType))
        yield from ((f"{name}.{one.__name__}", one) for one in functions)
        return
    names = _names_in(code.__code__)
    for called in names:
        one = code.__globals__.get(called, sys.modules.get(called))
        if isinstance(one, types.ModuleType):
            in_module = {} if one.__name__.partition(".")[0] in _FOREIGN else vars(one)
            yield from ((other, in_module[other]) for other in names if other in in_module)
        elif one is not None:
            yield called, one


def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals, attributes and imports in code, and in functions inside it."""
    inside = (_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return (*code.co_names, *(name for names in inside for name in names))


def _function_of(part: Any) -> Any:
    """Return the function in an entry of a class."""
    return part.fget if isinstance(part, property) else getattr(part, "__func__", part)


def _cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the closure variables of a function, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return {name: _content(cell) for name, cell in cells}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_foreign(one: Any) -> bool:
    """Return whether ``one`` is code of torch, NumPy or Python."""
    return str(getattr(one, "__module__", "")).partition(".")[0] in _FOREIGN
