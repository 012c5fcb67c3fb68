"""Sets that live: random histories of changes, kills and two writers, against a model that knows nothing of shards."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.support.models.living_sets import LivingSet, play
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.tiers import first_here

Place = tuple[str, Mapping[str, Any]]
"""A directory, and the options of its store."""
STORES = ["local", "s3", "without conditional writes"]


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Place]:
    """``places(store)`` is a new directory in that store."""

    def place(store: str) -> Place:
        if store == "s3":
            server: MiniS3Server = request.getfixturevalue("mini_s3")
            return f"{server.create_bucket(fresh_name())}/set", server.storage_options
        if store == "local":
            return str(tmp_path / "set"), {}
        fsspec.filesystem("memory").store.clear()
        return "memory://living/set", {}

    return place


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("seed", first_here(range(12), 1))
def test_every_version_is_what_the_model_has(
    places: Callable[[str], Place], tmp_path: Path, seed: int, store: str
) -> None:
    url, options = places(store)
    dice = random.Random(f"{seed} {store}")
    one = LivingSet.made(url, tmp_path / "days", options, dice.randrange(2, 14))
    told = play(one, dice, 8)
    assert len(told) == 8
