"""Datasets as torch's users write them, by what they keep: a position, a state, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import ChainDataset, Dataset, IterableDataset

SIZE = 22
Draw = Callable[[], int]


class Stateless(IterableDataset[int]):
    """Rows in their order, each time."""

    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)


class Keeper(IterableDataset[int]):
    """torchdata's pattern: it says where it is, begins there, and counts its epochs."""

    def __init__(self) -> None:
        self.i, self.epoch = 0, 0
        self.resume: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.i, self.resume = self.resume or 0, None
        for row in range(self.i, SIZE):
            self.i += 1
            yield 1000 * self.epoch + row
        self.i, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.resume, self.epoch = state["i"], state["epoch"]


class NotReset(Keeper):
    """What it says behind its end is a place where nothing is left."""

    def __iter__(self) -> Iterator[int]:
        self.i, self.resume = self.resume or 0, None
        for row in range(self.i, SIZE):
            self.i += 1
            yield row


class Continuing(IterableDataset[int]):
    """Each epoch has the next rows of a stream."""

    def __init__(self) -> None:
        self.at, self.left = 0, SIZE

    def __iter__(self) -> Iterator[int]:
        while self.left:
            self.at, self.left = self.at + 1, self.left - 1
            yield self.at - 1
        self.left = SIZE

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "left": self.left}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at, self.left = state["at"], state["left"]


class Rows(Iterator[int]):
    """An iterator with a state."""

    def __init__(self, begin: int = 0) -> None:
        self.begin, self.i = begin, 0

    def __next__(self) -> int:
        if self.i == SIZE:
            raise StopIteration
        self.i += 1
        return self.begin + self.i - 1

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.i = state["i"]


class StatefulIterator(IterableDataset[int]):
    """Only its iterators have a state."""

    def __iter__(self) -> Iterator[int]:
        return Rows()


class Both(IterableDataset[int]):
    """It has a state, which lasts, and its iterators have one, too."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return Rows(1000 * self.begun)

    def state_dict(self) -> dict[str, int]:
        return {"begun": self.begun}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.begun = state["begun"] - 1  # what continues is begun once more


class OwnIterator(Rows, IterableDataset[int]):
    """It is its own iterator, for one pass."""

    def __init__(self) -> None:
        Rows.__init__(self)

    def __iter__(self) -> Self:
        return self


class OwnIteratorAnew(Rows, IterableDataset[int]):
    """It is its own iterator, which begins anew each time."""

    def __init__(self) -> None:
        Rows.__init__(self)

    def __iter__(self) -> Self:
        self.i = 0
        return self


def _python() -> int:
    return random.randrange(10**6)


def _numpy() -> int:
    return int(np.random.randint(10**6))  # noqa: NPY002  the global one


def _torch() -> int:
    return int(torch.randint(10**6, ()))


class Drawing(IterableDataset[int]):
    """Draws an order as a pass begins, and something for each row."""

    def __init__(self, draw: Draw, *, order: bool = True, each: int = 1) -> None:
        self.draw, self.order, self.each = draw, order, each
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        rows = [self.draw() for _ in range(SIZE)] if self.order else [0] * SIZE
        for number in range(self.at, SIZE):
            self.at += 1
            yield 100 * (rows[number] + (self.draw() if number % self.each == 0 else 0)) + number
        self.at = 0


class DrawingKeeper(Drawing):
    """Knows its place, and nothing of its random numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class SavesGenerator(Drawing):
    """Knows its place, and saves torch's generator, as in torchdata's own tests."""

    def __init__(self) -> None:
        super().__init__(_torch, order=False)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(torch.tensor(state["generator"], dtype=torch.uint8))


class SavesOwnGenerator(Drawing):
    """Knows its place, and saves a generator of its own."""

    def __init__(self) -> None:
        self.own = OwnTorch()
        super().__init__(self.own, order=False)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.own.torchs.get_state().tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]
        self.own.torchs.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


class OwnPython:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(7)

    def __call__(self) -> int:
        return self.generator.randrange(10**6)


class OwnNumpy(OwnPython):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __call__(self) -> int:
        return int(self.rng.integers(10**6))


class OwnTorch(OwnPython):
    def __init__(self) -> None:
        self.torchs = torch.Generator().manual_seed(7)

    def __call__(self) -> int:
        return int(torch.randint(10**6, (), generator=self.torchs))


ITERABLES: dict[str, Callable[[], Any]] = {
    "stateless": Stateless,
    "chained": lambda: ChainDataset([Stateless(), Stateless()]),
    "keeper": Keeper,
    "not reset": NotReset,
    "continuing": Continuing,
    "stateful iterator": StatefulIterator,
    "both": Both,
    "iterator of its own, made anew": lambda: OwnIterator,
    "iterator of its own, begins anew": OwnIteratorAnew,
    "python's": lambda: Drawing(_python),
    "numpy's": lambda: Drawing(_numpy),
    "torch's": lambda: Drawing(_torch),
    "python's, state": lambda: DrawingKeeper(_python),
    "numpy's, state": lambda: DrawingKeeper(_numpy),
    "torch's, state": lambda: DrawingKeeper(_torch),
    "torch's, order only": lambda: DrawingKeeper(_torch, each=SIZE),
    "torch's, rows only": lambda: DrawingKeeper(_torch, order=False),
    "torch's, rare rows": lambda: DrawingKeeper(_torch, order=False, each=7),
    "generator in the state": SavesGenerator,
    "own generator in the state": SavesOwnGenerator,
    "own python": lambda: Drawing(OwnPython()),
    "own numpy": lambda: Drawing(OwnNumpy()),
    "own torch": lambda: Drawing(OwnTorch()),
    "own python, state": lambda: DrawingKeeper(OwnPython()),
    "own numpy, state": lambda: DrawingKeeper(OwnNumpy()),
    "own torch, state": lambda: DrawingKeeper(OwnTorch()),
}
"""By kind: a function that makes one."""


class Map(Dataset[int]):
    """Map-style, without a state."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Counting(Map):
    """Counts what it was asked for; of its copies each counts for itself."""

    def __init__(self) -> None:
        self.asked = 0

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return 1000 * self.asked + index

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.asked = state["asked"]


class Noisy(Map):
    """Draws from a generator of its own, whose state it saves."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> int:
        return 100 * int(torch.randint(10**6, (), generator=self.generator)) + index

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class OfProcess(Map):
    """Draws from torch's generator of the process, whose state it saves."""

    def __getitem__(self, index: int) -> int:
        return 100 * int(torch.randint(10**6, ())) + index

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["generator"])


MAPS: dict[str, Callable[[], Any]] = {"map": Map, "counting": Counting, "noisy": Noisy, "of the process": OfProcess}
"""By kind: a function that makes one."""
