"""Separate the random numbers that an iterable dataset draws from the training's, and save their state.

A dataset draws from two kinds of generators:

- generators of the process (``random``, ``numpy.random``, torch's on the CPU): seeded by (seed, pass) when a pass
  begins, the same in all parts, and swapped with the training's while the dataset is read;
- generators that its objects hold or its code names: unchanged in pass 0. A generator that has been drawn from is
  seeded by (seed, pass, its first state) when a later pass begins. So ranks, workers and resumed runs get the same
  numbers in that pass, wherever they left the previous one.

States of generators are JSON text, so they can be part of a checkpoint.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from streaming.build.batches.draw_watch import generator_states, own_generators, set_generator_states
from streaming.build.batches.draws import ALL_GENERATORS, seed_generators
from streaming.order.plan.permutation import hash_words

_PROCESS = ("random", "numpy", "torch")
"""Names of the process's generators, in the order of ``generator_states``."""


class SetGenerators:
    """The generators that one part of a dataset draws from. For one thread.

    Args:
        dataset: The dataset of the part.
        seed: Seed of the loop.
        first: First states of own generators that have been drawn from since they were made.
    """

    def __init__(self, dataset: Any, seed: int, first: Mapping[str, str]) -> None:
        self._own = own_generators([dataset])
        self._seed = seed
        self._made = {name: (one.mark(), one.state()) for name, one in self._own.items() if name not in first}
        self._first = dict(first)
        self._inside: tuple[Any, Any, Any] | None = None
        self._begun: dict[str, object] = {}

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Swap the process's generators with those of the dataset inside the block."""
        self._adopt_others()
        outside = generator_states()
        if self._inside is not None:
            set_generator_states(self._inside)
        try:
            yield
        finally:
            self._inside = generator_states()
            set_generator_states(outside)
            self._note_moved()

    def begin(self, pass_number: int) -> None:
        """Seed the generators for a pass. Call inside the block of ``drawing``."""
        seed_generators(hash_words(self._seed, pass_number, 0), ALL_GENERATORS)
        for name, text in self.first.items():
            if name in self._own and pass_number == 0:
                self._own[name].restore(_state(text))
            elif name in self._own:
                self._own[name].seed(hash_words(self._seed, pass_number, zlib.crc32(text.encode())))
        self._begun = self._marks()

    @property
    def first(self) -> dict[str, str]:
        """Return the first states of own generators that have been drawn from. Call inside the block."""
        self._note_moved()
        return dict(self._first)

    def drawn(self) -> frozenset[str]:
        """Return the names of generators that were drawn from since the pass began. Call inside the block."""
        return frozenset(name for name, mark in self._marks().items() if self._begun.get(name) != mark)

    def states(self, names: frozenset[str]) -> dict[str, str]:
        """Return the current states of generators. Call inside the block."""
        now = dict(zip(_PROCESS, generator_states(), strict=True))
        return {name: _text(now[name] if name in now else self._own[name].state()) for name in sorted(names)}

    def restore(self, states: Mapping[str, str]) -> None:
        """Restore the result of ``states``. Call inside the block."""
        if not states:
            return
        now = dict(zip(_PROCESS, generator_states(), strict=True))
        now |= {name: _state(text) for name, text in states.items() if name in now}
        set_generator_states((now["random"], now["numpy"], now["torch"]))
        for name in self._own.keys() & states.keys():
            self._own[name].restore(_state(states[name]))

    def _note_moved(self) -> None:
        """Record the generators that were drawn from since they were created."""
        moved = [name for name, (mark, _) in self._made.items() if self._own[name].mark() != mark]
        self._first |= {name: _text(self._made.pop(name)[1]) for name in moved}

    def _adopt_others(self) -> None:
        """Adopt the current state of generators that code only names: other code has drawn from them meanwhile."""
        for name in [name for name in self._made if not self._own[name].is_held]:
            self._begun[name] = mark = self._own[name].mark()
            self._made[name] = mark, self._own[name].state()

    def _marks(self) -> dict[str, object]:
        marks: dict[str, object] = dict(zip(_PROCESS, map(_mark, generator_states()), strict=True))
        return {name: one.mark() for name, one in self._own.items()} | marks


def _mark(state: Any) -> object:
    """Return a value that is equal for equal states of a generator of the process."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)


def _text(state: Any) -> str:
    return json.dumps(_plain(state))


def _state(text: str) -> Any:
    return _restored(json.loads(text))


def _plain(value: Any) -> Any:
    """Return the state of a generator in JSON's types: other values become a dict of their kind and content."""
    if isinstance(value, torch.Tensor):
        return {"bytes": base64.b64encode(value.numpy().tobytes()).decode()}
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, value.tolist()]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    if isinstance(value, Mapping):
        return {"dict": {name: _plain(one) for name, one in value.items()}}
    return value


def _restored(value: Any) -> Any:
    """Return the argument of ``_plain``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return torch.frombuffer(bytearray(base64.b64decode(content)), dtype=torch.uint8)
    if kind == "array":
        return np.array(content[1], dtype=content[0])
    if kind == "tuple":
        return tuple(_restored(one) for one in content)
    return {name: _restored(one) for name, one in content.items()}
