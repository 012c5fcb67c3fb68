"""Sets that live: random histories of changes, kills and two writers, against a model that knows nothing of shards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shard_tools.change.check.verify import verify
from shard_tools.change.life.delete import delete
from shard_tools.change.life.prune import prune
from shard_tools.change.life.versions import tag
from shard_tools.make.convert.append import append
from streaming import StreamingDataset
from streaming.errors import ConfigError
from streaming.shards.versions.history import kept_versions
from streaming.shards.versions.publish import read_head
from tests.support.models.living_sets import Killed, LivingSet, interrupted, kill, play
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.tiers import first_here

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


CHANGES: dict[str, Callable[[LivingSet], object]] = {
    "append": lambda one: append(str(one.source), one.url, storage_options=one.options),
    "delete": lambda one: delete(one.url, storage=one.storage, keys=["00001", "00004", "00005"]),
    "prune": lambda one: prune(one.url, storage=one.storage, drop=["old"]),
    "tag": lambda one: tag(one.url, "new", storage=one.storage),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("change", first_here(CHANGES, 0))
def test_killed_at_every_write(tmp_path: Path, change: str, before: bool) -> None:
    """The first change of a set, and a later one, at each write: it is what it was, or what it becomes."""
    for lives in (False, True):
        deaths, at = 0, 0
        while deaths == at:
            one = LivingSet.made(str(tmp_path / f"{lives}-{at}"), tmp_path / f"days-{lives}-{at}", {}, 7)
            if lives or change == "prune":
                tag(one.url, "old", storage=one.storage)
                delete(one.url, storage=one.storage, keys=["00000"])
            was = keys_of(one)
            one.day(4)
            try:
                with interrupted(at, kill, before=before):
                    CHANGES[change](one)
            except Killed:
                deaths += 1
            now = keys_of(one)
            with contextlib.suppress(ConfigError):  # a name that a run has given up just before it was killed
                CHANGES[change](one)
            becomes = keys_of(one)
            assert now in (was, becomes)
            assert not verify([one.url], storage=one.storage).findings
            if change == "append":
                assert becomes == [*was, *(f"{number:05d}" for number in range(7, 11))]
            prune(one.url, storage=one.storage)
            left = {path.name for path in Path(one.url).glob("*.tar")}
            tables = [*kept_versions(one.storage, one.url), read_head(one.storage, one.url)]
            assert left == {shard.name for each in tables for shard in each.table.shards}
            at += 1
        assert deaths >= (1 if change == "tag" else 4)


def keys_of(one: LivingSet) -> list[str]:
    return [sample["__key__"] for sample in StreamingDataset(one.url, storage_options=one.options)]
