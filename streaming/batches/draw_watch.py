"""Functions that draw from the generators of the whole process: ``random``, ``numpy.random``, ``torch`` on the CPU.

They get the same numbers everywhere, too: these generators are seeded before each sample, by its position in the epoch.
It takes 10 us, so it is done only for functions that do draw, and only of the generators that they draw from. Who draws
is found out batch by batch: the generators are set to a known state, the batch is built, and what they give next tells
whether somebody drew. If so, the batch is built again, seeded. Nothing that draws slips through, however rarely it
does; a batch of functions that draw nothing pays 25 us.

That is safe only where nobody else draws meanwhile: in worker processes, and on the thread that asks for a batch while
it waits for it. The generators of the training process belong to the training, so there their state is put back
afterwards, and builder threads, beside which the training goes on, never touch them. So without worker processes the
asking thread builds the first batch, under watch, and goes on to build them all if functions draw. Code that names a
drawing function is taken for one that draws: one that draws rarely is not mistaken for one that never does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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
    """Builds batches so that what functions draw from the process's generators depends on the samples alone.

    Not thread-safe: nobody else may draw while it builds.

    Attributes:
        found: Generators that functions were seen to draw from so far.
    """

    def __init__(self) -> None:
        self.found: frozenset[str] = frozenset()

    def build(
        self, attempt: Callable[[frozenset[str], Callable[[_R], None]], _T], report: Callable[[_R], object]
    ) -> _T:
        """What ``attempt`` gives, or raises: called again while it draws from generators that were not seeded.

        Args:
            attempt: Gets the generators that it is to seed before each sample, and a function to report to.
            report: Told at the end what the last attempt reported; may raise.
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
    """The generators that do not stand where ``_KNOWN`` put them."""
    got = {
        "random": random.getrandbits(64),
        "numpy": np.random.mtrand._rand._bit_generator.random_raw(),
        "torch": int(torch.empty((), dtype=torch.int64).random_()),
    }
    return frozenset(name for name, value in got.items() if value != _EXPECTED[name])


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the state of the process's generators back at the end, whatever was drawn inside; takes 0.1 ms."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def generator_states() -> tuple[Any, Any, Any]:
    """Of the process's generators, that of torch's CPU one alone."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  the global one


def set_generator_states(states: tuple[Any, Any, Any]) -> None:
    """Go on from ``generator_states``."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002  the global one
    torch.set_rng_state(states[2])
