"""Sets that live: random histories of changes, kills and two writers, against a model that knows nothing of shards."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.living_sets import LivingSet, play
from tests.support.servers.on_loopback import MiniS3Server, fresh_name

Place = tuple[str, Mapping[str, Any]]
"""A directory, and the options of its store."""
STORES = ["local", "s3", "without conditional writes"]


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Place]:
    """``places("store/number")`` is a new directory in that store."""

    def place(name: str) -> Place:
        store, _, number = name.partition("/")
        if store == "s3":
            server: MiniS3Server = request.getfixturevalue("mini_s3")
            return f"{server.create_bucket(fresh_name())}/set", server.storage_options
        return (str(tmp_path / number / "set") if store == "local" else f"memory://{fresh_name()}/set"), {}

    return place


@pytest.mark.parametrize("store", STORES)
def test_every_version_is_what_the_model_has(
    places: Callable[[str], Place], tmp_path: Path, store: str, request: pytest.FixtureRequest
) -> None:
    """Append, delete, tag and prune; killed at writes, or overtaken: see ``living_sets``."""
    cases = int(request.config.getoption("--differential-cases"))
    first, seed = (request.config.getoption(f"--differential-{name}") for name in ("first", "seed"))
    for number in range(first, first + max(1, cases // 100)):
        url, options = places(f"{store}/{number}")
        folder = tmp_path / f"days-{number}"
        dice = random.Random(f"{seed} {number} {store}")
        one = LivingSet.made(url, folder, options, dice.randrange(2, 14))
        told = play(one, dice, 6 if cases <= 100 else 12)
        assert told, f"number {number}"
