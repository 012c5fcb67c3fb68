"""Sets that live: random histories of all that changes them, with kills and two writers, against a model.

``make set-histories`` plays 10,000 (``--set-histories``, otherwise 32, of which ``make test`` plays 4), from number
``--set-histories-first`` on; a failure names its number. A history takes 6 to 10 steps on local disk, on S3, or in a
store without conditional writes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
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
from tests.support.models.living_sets import (
    Killed,
    LivingSet,
    SetState,
    Source,
    few_threads,
    interrupted,
    kill,
    new_row,
)
from tests.support.models.set_changes import KINDS, World, forget
from tests.support.programs import foreign_reader
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.tiers import first_here

Place = tuple[str, Mapping[str, Any]]
STORES = ["local", "without conditional writes", "s3"]


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Callable[[str], Place]]:
    """``places(store)(name)`` is a new directory in that store."""

    def of(store: str) -> Callable[[str], Place]:
        unlike = fresh_name()
        if store == "s3":
            server: MiniS3Server = request.getfixturevalue("mini_s3")
            bucket = server.create_bucket(fresh_name())
            return lambda name: (f"{bucket}/{name}", server.storage_options)
        base = str(tmp_path / unlike) if store == "local" else f"memory://{unlike}"
        return lambda name: (f"{base}/{name}", {})

    return of


NUM_PARTS = 8


def store_of(number: int) -> str:
    """Return the store of a history: most are played where that is fast."""
    return STORES[2] if number % 12 == 8 else STORES[(number + number // NUM_PARTS) % 2]


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("part", first_here(range(NUM_PARTS), 1))
def test_every_version_is_what_the_model_has(
    part: int, places: Callable[[str], Callable[[str], Place]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Append, delete, dedupe, split, merge, tag, prune, late fields, copy; killed at writes, or overtaken."""
    option = request.config.getoption
    first, num, seed = (option(f"--set-histories{end}") for end in ("-first", "", "-seed"))
    for number in range(first + part, first + num, NUM_PARTS):
        dice = random.Random(f"{seed} {number}")
        store = option("--set-histories-store") or store_of(number)
        world = World.made(dice, places(store), tmp_path / f"source-{number}")
        try:
            with few_threads() if number % 16 else contextlib.nullcontext():
                world.play(dice.randrange(6, 11))
        except BaseException as error:
            error.add_note(
                f"history {number} of seed {seed}, {store}; to play it alone: pytest -n 0 "
                f"tests/histories/test_living_sets.py -k every_version --set-histories-seed {seed} "
                f"--set-histories-first {number} --set-histories 1 --set-histories-store {store!r}"
            )
            raise
        finally:
            forget(world)


# --------------------------------------------------------------------------------------------------- other libraries


def base_tars(world: World, name: str, folder: Path) -> list[tuple[str, Any]]:
    """Put the shards of the current version of a set into a folder; return key and content of its samples."""
    one = world.sets[name]
    folder.mkdir(parents=True)
    for shard in read_head(one.storage, one.url).table.shards:
        shutil.copy(Path(one.url) / shard.name, folder / shard.name)
    return [(row.key, json.loads(row.fields["json"])) for row in world.states[name].now.rows]


def histories_on_disk(
    places: Callable[[str], Callable[[str], Place]], tmp_path: Path, seeds: Sequence[int], kinds: Collection[str]
) -> dict[Path, list[tuple[str, Any]]]:  # fmt: skip
    """Play histories on disk; return folders with the base tars of each set after each step, and their samples."""
    found: dict[Path, list[tuple[str, Any]]] = {}
    for seed in seeds:
        world = World.made(random.Random(f"others {seed}"), places("local"), tmp_path / f"source-{seed}", kinds)
        for number in range(7):
            world.step()
            for name in world.states:
                folder = tmp_path / "others" / f"{seed}-{number}-{name.replace('/', '-')}"
                found[folder] = base_tars(world, name, folder)
    return found


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_the_base_tars_after_each_operation(
    places: Callable[[str], Callable[[str], Place]], tmp_path: Path
) -> None:
    webdataset = pytest.importorskip("webdataset")
    for folder, wanted in histories_on_disk(places, tmp_path, [2], KINDS).items():
        shards = sorted(str(path) for path in folder.glob("*.tar"))
        read = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
        assert [(sample["__key__"], json.loads(sample["json"])) for sample in read] == wanted
    gc.collect()  # it leaves files open


ENERGON = Path(tempfile.gettempdir(), "shardstream-peers/venvs/energon/bin/python")


@pytest.mark.thorough
@pytest.mark.parametrize("library", ["datasets", "energon"])
def test_other_libraries_read_the_base_tars_after_each_operation(
    places: Callable[[str], Callable[[str], Place]], tmp_path: Path, library: str
) -> None:
    """In their own processes; of Energon, which takes seconds to prepare a folder, each history's last sets."""
    python = Path(sys.executable) if library == "datasets" else ENERGON
    if not python.exists():
        pytest.skip(f"needs {python}: make peers")
    folders = histories_on_disk(places, tmp_path, [3, 4, 5], ("rows", "numbers"))
    if library == "energon":
        folders = {one: rows for one, rows in folders.items() if one.name.split("-")[1] == "6"}
    folders = {one: rows for one, rows in folders.items() if len({*rows_keys(rows)}) == len(rows)}
    program = Path(foreign_reader.__file__)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [python, program, library, *map(str, folders)], check=False, capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for line, wanted in zip(done.stdout.splitlines(), folders.values(), strict=True):
        assert sorted((key, rest) for key, rest in json.loads(line)) == sorted(wanted, key=lambda one: one[0])


def rows_keys(rows: Sequence[tuple[str, Any]]) -> list[str]:
    return [key for key, _ in rows]


# -------------------------------------------------------------------------------------------- killed at every write


def made(place: Path, folder: Path) -> tuple[LivingSet, SetState]:
    """A set of seven rows."""
    source = Source(folder, "rows")
    source.add([new_row(number, "rows", "") for number in range(7)])
    living = LivingSet(url=str(place), options={}, source=source, kind="rows")
    return living, living.convert()


CHANGES: dict[str, Callable[[LivingSet], object]] = {
    "append": lambda one: append(one.source.spec, one.url, storage_options=one.options),  # type: ignore[union-attr]
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
            living, _ = made(tmp_path / f"{lives}-{at}", tmp_path / f"days-{lives}-{at}")
            if lives or change == "prune":
                tag(living.url, "old", storage=living.storage)
                delete(living.url, storage=living.storage, keys=["00000"])
            was = keys_of(living)
            assert living.source is not None
            living.source.add([new_row(number, "rows", "") for number in range(7, 11)])
            try:
                with interrupted(at, kill, before=before):
                    CHANGES[change](living)
            except Killed:
                deaths += 1
            now = keys_of(living)
            with contextlib.suppress(ConfigError):  # a name that a run has given up just before it was killed
                CHANGES[change](living)
            becomes = keys_of(living)
            assert now in (was, becomes)
            assert not verify([living.url], storage=living.storage).findings
            if change == "append":
                assert becomes == [*was, *(f"{number:05d}" for number in range(7, 11))]
            prune(living.url, storage=living.storage)
            left = {path.name for path in Path(living.url).glob("*.tar")}
            tables = [*kept_versions(living.storage, living.url), read_head(living.storage, living.url)]
            assert left == {shard.name for each in tables for shard in each.table.shards}
            at += 1
        assert deaths >= (1 if change == "tag" else 4)


def keys_of(one: LivingSet) -> list[str]:
    return [sample["__key__"] for sample in StreamingDataset(one.url, storage_options=one.options)]
