"""Changes of a set whose store fails, or whose process is killed: at each write, by an error and by the kernel."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.make.convert.append import append
from streaming import StreamingDataset
from streaming.errors import ConfigError, StorageError
from streaming.storage import Storage
from tests.support.models.living_sets import interrupted
from tests.support.processes.forked import Forked
from tests.support.tiers import first_here


@dataclass(kw_only=True)
class OneSet:
    """A set of small rows, converted from a folder of JSON lines that gets a file per day."""

    url: str
    source: Path
    options: Mapping[str, Any]
    days: int = 0
    rows: int = 0

    @classmethod
    def made(cls, url: str, source: Path, options: Mapping[str, Any], num: int) -> OneSet:
        one = cls(url=url, source=source, options=options)
        source.mkdir()
        one.day(num)
        how = ConvertOptions(max_samples=3, key_field="id", columns=("n",))
        convert(str(source), url, options=how, storage_options=options)
        return one

    @property
    def storage(self) -> Storage:
        return Storage(self.options)

    def day(self, num: int) -> None:
        rows = [{"id": f"{row:05d}", "n": row % 7} for row in range(self.rows, self.rows + num)]
        (self.source / f"{self.days:04d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.days, self.rows = self.days + 1, self.rows + num


CHANGES: dict[str, Callable[[OneSet], object]] = {
    "append": lambda one: append(str(one.source), one.url, storage_options=one.options),
    "dedupe": lambda one: dedupe(one.url, storage=one.storage, by="key"),
    "delete": lambda one: delete(one.url, storage=one.storage, keys=["00001", "00004", "00005"]),
    "prune": lambda one: prune(one.url, storage=one.storage, drop=["old"]),
    "tag": lambda one: tag(one.url, "new", storage=one.storage),
}


def prepare(one: OneSet, change: str, *, lives: bool) -> None:
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


@pytest.mark.thorough
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
            one = OneSet.made(str(tmp_path / f"{lives}-{at}"), tmp_path / f"days-{lives}-{at}", {}, 7)
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
        one = OneSet.made(str(tmp_path / f"{at}"), tmp_path / f"days-{at}", {}, 7)
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


def keys_of(one: OneSet) -> list[str]:
    return [sample["__key__"] for sample in StreamingDataset(one.url, storage_options=one.options)]
