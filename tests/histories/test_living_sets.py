"""Sets that live: random histories of changes, kills and two writers, against a model that knows nothing of shards."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.change.check.verify import verify
from shard_tools.change.life.dedupe import dedupe
from shard_tools.change.life.delete import delete
from shard_tools.change.life.prune import prune
from shard_tools.change.life.versions import tag
from shard_tools.cli import cli
from shard_tools.make.convert.append import append
from streaming import StreamingDataset
from streaming.errors import ConfigError, StorageError
from streaming.shards.versions.history import kept_versions
from streaming.shards.versions.publish import read_head
from tests.support.models.living_sets import Killed, LivingSet, interrupted, kill, play
from tests.support.processes.forked import Forked
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
    "dedupe": lambda one: dedupe(one.url, storage=one.storage, by="key"),
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
            prepare(one, change, lives=lives)
            was = keys_of(one)
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


def prepare(one: LivingSet, change: str, *, lives: bool) -> None:
    """Let there be something to change."""
    if change == "dedupe":
        how: dict[str, Any] = {"append": True} if lives else {"start_shard": 3}
        with ShardWriter(f"{one.url}/{{:06d}}.tar", storage_options=one.options, **how) as writer:
            for key in ("00002", "00005"):
                writer.write({"__key__": key, "json": {"id": key, "n": 1}})
    if lives or change == "prune":
        tag(one.url, "old", storage=one.storage)
        delete(one.url, storage=one.storage, keys=["00000"])
    one.day(4)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), StorageError("no answer")])
@pytest.mark.parametrize("change", ["tag", *first_here([one for one in CHANGES if one != "tag"], 0)])
def test_a_store_that_fails_at_every_write(tmp_path: Path, change: str, error: Exception) -> None:
    """A full disk, a store that does not answer: the set is what it was, with nothing left, or what it becomes."""

    told: list[int] = []

    def fail() -> None:
        told.append(1)
        raise error

    for lives in (False, True):
        for at in itertools.count():
            told.clear()
            one = LivingSet.made(str(tmp_path / f"{lives}-{at}"), tmp_path / f"days-{lives}-{at}", {}, 7)
            prepare(one, change, lives=lives)
            was, shards = keys_of(one), {*Path(one.url).glob("*.tar")}
            with contextlib.suppress(OSError, StorageError), interrupted(at, fail, before=True):
                CHANGES[change](one)
            now = keys_of(one)
            if now == was and change != "prune":
                assert {*Path(one.url).glob("*.tar")} == shards
            with contextlib.suppress(ConfigError):  # a name that was given up, or given, just before
                CHANGES[change](one)
            assert now in (was, keys_of(one))
            assert not verify([one.url], storage=one.storage).findings
            if not told:
                break
        assert at >= (1 if change == "tag" else 4)


KILLED = """
import os, sys
at, place, *words = sys.argv[1:]
left = [int(at)]
def notice(event, arguments):
    writes = event in {"os.rename", "os.remove"}
    if event == "open":
        path, mode, flags = arguments
        writes = bool(set(mode) & set("wxa+")) if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))
    if writes and str(arguments[0]).startswith(place):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(notice)
from shard_tools.cli import cli
cli(words, prog_name="shard_tools")
"""
VERBS: dict[str, list[str]] = {
    "append": ["append", "{source}", "{url}"], "delete": ["delete", "{url}", "--where", "n = 1"],
    "dedupe": ["dedupe", "{url}", "--by", "key"], "tag": ["version", "tag", "{url}", "new"],
    "prune": ["version", "prune", "{url}"],
}  # fmt: skip


@pytest.mark.parametrize("verb", first_here(VERBS, 0))
def test_a_command_that_is_killed_for_good(tmp_path: Path, forked: Forked, verb: str) -> None:
    """SIGKILL at any opening of a file to write, renaming or removal: run again, the same command finishes."""
    for number, at in enumerate((0, 1, 2, 3, 5, 8, 11, 15, 20, 26, 33) if verb != "append" else (1, 6, 12, 19)):
        one = LivingSet.made(str(tmp_path / f"{at}"), tmp_path / f"days-{at}", {}, 7)
        prepare(one, verb, lives=number % 2 == 1)
        was = keys_of(one)
        words = [word.format(url=one.url, source=one.source) for word in VERBS[verb]]
        ended = forked.start(KILLED, str(at), one.url, *words, output=tmp_path / f"said-{at}").wait()
        assert ended in {-signal.SIGKILL, 0}, (tmp_path / f"said-{at}").read_text()
        now = keys_of(one)
        again = CliRunner().invoke(cli, words, prog_name="shard_tools")
        assert again.exit_code == 0 or "exists already" in again.stderr, again.output
        assert now in (was, keys_of(one))
        assert not verify([one.url], storage=one.storage).findings
        assert not prune(one.url, storage=one.storage).pending


def keys_of(one: LivingSet) -> list[str]:
    return [sample["__key__"] for sample in StreamingDataset(one.url, storage_options=one.options)]
