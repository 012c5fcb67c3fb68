"""Mixtures of three sources whose keys say where they come from, and the batches of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming import DataLoader, Mixture
from tests.support.sets.data_sets import Batches, SampleSet, check_batch, world_from

FIRST = {"web": 0, "code": 10_000, "math": 20_000}


def mixture(sets: Mapping[str, SampleSet], names: str = "web code math", **options: Any) -> Mixture:
    return Mixture({name: sets[name].open() for name in names.split()}, **options)


def source_of(key: str) -> str:
    number = int(key)
    return max((name for name in FIRST if FIRST[name] <= number), key=FIRST.__getitem__)


def take(loader: DataLoader, count: int) -> list[list[str]]:
    """The keys of so many batches, each checked against its source."""
    found = []
    for batch in loader:
        keys = check_batch(batch)
        assert batch["__source__"] == [source_of(key) for key in keys]
        found.append(keys)
        if len(found) == count:
            break
    return found


def world(
    mix: Mixture, ranks: int, count: int, state: Any = None, *, size: int = 12, **options: Any
) -> tuple[Batches, dict[str, Any]]:
    """So many global batches from a state on, of all ranks, and the state behind them."""
    return world_from(mix, ranks, lambda loader: take(loader, count), state, global_batch_size=size, **options)


def take_on(loader: DataLoader, count: int) -> list[list[str]]:
    """Go on, in a new iterator, where the last one was left."""
    loader.load_state_dict(loader.state_dict())
    return take(loader, count)
