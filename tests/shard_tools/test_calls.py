"""Verbs whose calls run elsewhere report and write what they do here. Nodes that die: test_verbs_ray.py."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shard_tools.change.columns.compute import ComputeOptions, compute_column
from shard_tools.change.columns.target import ColumnTarget
from shard_tools.change.functions.mapped import map_set
from shard_tools.change.functions.run import Running
from shard_tools.change.sets.copy import copy
from shard_tools.change.sets.rewrite.reshard import reshard
from shard_tools.cli import cli
from shard_tools.look.stats.run import StatsOptions, stats
from shard_tools.make.convert import convert
from shard_tools.running.engine import Calls
from streaming.errors import ConfigError
from streaming.storage import Storage
from tests.support.contracts.verb_cases import LENGTH, NUM_SHARDS, PER_SHARD, VERBS, write_damaged, write_good
from tests.support.servers.on_loopback import MiniS3Server, fresh_name

pytestmark = pytest.mark.thorough

_MOST_BYTES = 1 << 20


class OtherMachine(Executor):
    """Run each call as another machine would: what it gets and what it gives is pickled.

    Args:
        before: Called before each call; what it returns, after it.
    """

    def __init__(self, before: Callable[[], Callable[[], None]] = lambda: lambda: None) -> None:
        self.num_calls, self._before = 0, before

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_calls += 1
        sent = pickle.dumps((function, args, kwargs))
        future: Future[Any] = Future()
        after = self._before()
        try:
            function, args, kwargs = pickle.loads(sent)
            result = pickle.dumps(function(*args, **kwargs))
            assert len(result) < _MOST_BYTES
            future.set_result(pickle.loads(result))
        except BaseException as error:
            future.set_exception(pickle.loads(pickle.dumps(error)))
        finally:
            after()
        return future


class Counted:
    """A progress that adds up."""

    def __init__(self) -> None:
        self.totals = [0, 0]

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Nothing to do."""

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        self.totals = [self.totals[0] + num_bytes, self.totals[1] + num]


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Callable[[], str], Storage]:
    """Makes folders or prefixes, each with both sets, and their store."""
    if request.param == "disk":
        return lambda: str(tmp_path / fresh_name()), Storage()
    server: MiniS3Server = request.getfixturevalue("mini_s3")
    return lambda: f"{server.create_bucket(fresh_name())}/sets", Storage(server.storage_options)


@pytest.mark.thorough
@pytest.mark.parametrize("verb", VERBS)
def test_reports_files_and_progress_are_those_of_one_machine(
    place: tuple[Callable[[], str], Storage], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, storage = place
    found, progress, executor = [], [], OtherMachine()
    for how in ({}, {"executor": executor}):
        base = new()
        write_good(f"{base}/good", storage)
        write_damaged(f"{base}/damaged", storage)
        progress.append(Counted())
        result = VERBS[verb](base, storage, workers=3, progress=progress[-1], **how)
        found.append(repr(result).replace(base, "BASE"))
    assert found[1] == found[0]
    assert executor.num_calls >= 4
    assert progress[1].totals == progress[0].totals
    assert progress[1].totals[1] >= 4


@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_that_another_machine_does_not_see_is_named(verb: str, tmp_path: Path) -> None:
    """Its shards would look lost there, and what is copied there would be."""
    base, storage = tmp_path / "sets", Storage()
    write_good(f"{base}/good", storage)
    write_damaged(f"{base}/damaged", storage)

    def hide() -> Callable[[], None]:
        base.rename(tmp_path / "hidden")

        def show() -> None:
            if base.exists():  # what was written there meanwhile
                base.rename(tmp_path / "scattered")
            (tmp_path / "hidden").rename(base)

        return show

    with pytest.raises(ConfigError, match=r"000\.tar|chunks\.parquet") as raised:
        VERBS[verb](str(base), storage, workers=3, executor=OtherMachine(hide))
    assert "all nodes must see the same files" in str(raised.value)
    assert not (tmp_path / "scattered").exists()


def test_a_source_of_map_that_another_machine_does_not_see_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the index, nor of the function."""
    write_good(f"{tmp_path}/good", Storage())

    def hide() -> Callable[[], None]:
        os.rename(tmp_path / "good", tmp_path / "hidden")
        return lambda: os.rename(tmp_path / "hidden", tmp_path / "good")

    monkeypatch.setattr("shard_tools.change.functions.run.open_engine", lambda *_: nullcontext(OtherMachine(hide)))
    with pytest.raises(ConfigError, match=r"good/.*all nodes must see the same files"):
        map_set(f"{tmp_path}/good/", f"{tmp_path}/out", "builtins:dict", running=Running(engine="ray", on_error="drop"))


@pytest.mark.parametrize("verb", [copy, convert, reshard])
def test_a_target_that_another_machine_does_not_see_is_named_before_work_is_lost(
    verb: Callable[..., Any], tmp_path: Path
) -> None:
    write_good(f"{tmp_path}/good", Storage())

    def hide() -> Callable[[], None]:
        os.rename(tmp_path / "out", tmp_path / "hidden")

        def show() -> None:
            if (tmp_path / "out").exists():  # what was written there meanwhile
                os.rename(tmp_path / "out", tmp_path / "scattered")
            os.rename(tmp_path / "hidden", tmp_path / "out")

        return show

    with pytest.raises(ConfigError, match="all nodes must see the same files"):
        verb(f"{tmp_path}/good/", f"{tmp_path}/out", executor=OtherMachine(hide))
    assert not (tmp_path / "scattered").exists()
    assert list((tmp_path / "out").glob("*.tar")) == []


class Stopped(Counted):
    """A progress that stops the verb at its third shard."""

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        super().advance(num_bytes=num_bytes, num=num)
        if self.totals[1] == 3:
            raise KeyboardInterrupt


def test_a_stopped_run_elsewhere_goes_on_with_either_engine(tmp_path: Path) -> None:
    storage = Storage()
    url = write_good(f"{tmp_path}/good", storage)
    options = StatsOptions(limit=None, journal=f"{tmp_path}/journal", save_every_s=0, workers=1)
    whole = stats([url], storage=storage, options=StatsOptions(limit=None)).as_dict()
    for executor in (OtherMachine(), None):
        with pytest.raises(KeyboardInterrupt):
            stats([url], storage=storage, options=options, executor=OtherMachine(), progress=Stopped())
        assert len(list((tmp_path / "journal").iterdir())) == 1
        assert stats([url], storage=storage, options=options, executor=executor).as_dict() == whole
        assert executor is None or executor.num_calls == NUM_SHARDS - 2
    for name, executor in (("there", OtherMachine()), ("here", None)):

        def target(name: str = name) -> ColumnTarget:
            return ColumnTarget([url], name, storage=storage, index_url=None, overwrite=False)

        chosen = ComputeOptions(fields=("txt",), workers=1)
        with pytest.raises(KeyboardInterrupt):
            compute_column(
                target(), LENGTH, options=chosen, executor=OtherMachine(), progress=Stopped()
            )  # fmt: skip
        written = [*(tmp_path / "good/_shardstream/columns" / name).iterdir()]
        times = {path: path.stat().st_mtime_ns for path in written}
        assert 3 <= len(written) < NUM_SHARDS
        report = compute_column(target(), LENGTH, options=chosen, executor=executor)
        assert (report.num_samples, report.num_missing) == (NUM_SHARDS * PER_SHARD, 0)
        assert {path: path.stat().st_mtime_ns for path in written} == times  # they were not computed again


def _fails_at_three(item: int, progress: Any) -> int:
    if item == 3:
        raise ValueError("three")
    return item


def test_calls_are_made_as_far_ahead_as_workers_allow() -> None:
    there = OtherMachine()
    results = Calls(workers=2, executor=there).map(_fails_at_three, range(100))
    assert next(results) == 0
    assert there.num_calls == 4
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert there.num_calls <= 8


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    for option in (["--engine", "ray"], ["--workers", "2"]):
        result = CliRunner().invoke(cli, ["column", "add", "a", "x", "--from", "f.csv", "--on", "key", *option])
        assert result.exit_code == 2
        assert "--engine and --workers are for --lift and --compute" in result.output
