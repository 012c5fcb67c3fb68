"""``bench --tune``: it tries a bounded number of settings, chooses the least that is as fast, and writes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.bench import delivery, tune
from shard_tools.look.bench.delivery import PAUSED_SHARE, LoopRun
from shard_tools.look.bench.run import BenchOptions
from shard_tools.look.bench.tune import Tried, TunePlan, chosen, reason, spread_of, tried_in_turn
from streaming import DataLoader, StreamingDataset
from streaming.common.platforms import num_cores
from streaming.errors import ConfigError, IndexMissingError
from streaming.watch.tuned.file import DEFAULT_NAME, read_tuned
from streaming.watch.tuned.machinery import MACHINERY

SAMPLES = 96
Rate = Callable[[Mapping[str, Any]], float]
MOST_SETTINGS = 7


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)], prog_name="shard_tools")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("tune")
    with ShardWriter(f"{found}/{{:06d}}.tar", max_samples=24) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:05d}", "json": {"n": number}, "cls": number})
    return f"{found}/"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Stand in for measuring: a machine with so many cores on which settings have these rates; the passes made."""
    passes: list[dict[str, Any]] = []

    def stand_in(cores: int, rate: Rate, **more: Any) -> list[dict[str, Any]]:
        def measure(urls: Any, part: Any, settings: Mapping[str, Any], *, seconds: float, **_: Any) -> LoopRun:
            passes.append({"seconds": seconds, "samples": part[1] - part[0], **settings})
            return LoopRun(settings=settings, samples_per_s=rate(settings), **more)

        monkeypatch.setattr(tune, "num_cores", lambda: cores)
        monkeypatch.setattr(tune, "has_worker_processes", lambda: True)
        monkeypatch.setattr(delivery, "measure", measure)
        return passes

    return stand_in


def by_processes(settings: Mapping[str, Any]) -> float:
    """Python of one's own: threads share an interpreter."""
    return 1000.0 * (settings["num_workers"] or 1)


def by_threads(settings: Mapping[str, Any]) -> float:
    """Decoders that leave the interpreter alone: processes have a hand-over beside."""
    return 900.0 * settings["num_workers"] or 1000.0 * settings["num_threads"]


def by_the_store(_settings: Mapping[str, Any]) -> float:
    return 1000.0


def by_batches_ahead(settings: Mapping[str, Any]) -> float:
    return 1000.0 * settings["prefetch_factor"]


# ------------------------------------------------------------------------------------------------ what is tried


@pytest.mark.parametrize("processes", [True, False])
@pytest.mark.parametrize("cores", [1, 2, 3, 4, 5, 8, 16, 128, 100_000])
def test_few_settings_are_tried_within_the_time(cores: int, processes: bool) -> None:
    plan = TunePlan.of(20.0, cores, processes=processes)
    assert 1 + 2 <= plan.num_settings <= MOST_SETTINGS
    assert plan.num_passes * plan.pass_s * (1 + PAUSED_SHARE) == pytest.approx(plan.seconds) == 20.0
    assert len({json.dumps(one) for one in plan.builders}) == len(plan.builders)
    assert any(one["num_workers"] for one in plan.builders) == processes
    for one in plan.builders:
        assert max(one["num_workers"], one.get("num_threads", 0)) <= cores
        for name, value in one.items():
            MACHINERY[name](name, value)


def test_settings_are_measured_there_and_back() -> None:
    """A machine that becomes slower all the time makes none of them look faster than another."""
    order: list[int] = []

    def slower(settings: dict[str, Any]) -> LoopRun:
        order.append(settings["num_threads"])
        return LoopRun(settings=settings, samples_per_s=1000.0 - 10 * len(order))

    settings = [{"num_workers": 0, "num_threads": number, "prefetch_factor": 2} for number in range(1, 6)]
    tried = tried_in_turn(settings, slower)
    assert order == [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]
    assert {one.samples_per_s for one in tried} == {945.0}


# --------------------------------------------------------------------------------------------------- what is chosen


def setting(rate: float, workers: int = 0, threads: int = 1, ahead: int = 2, spread: float = 0.0) -> Tried:
    built = {"num_workers": workers} if workers else {"num_workers": 0, "num_threads": threads}
    return Tried(options={**built, "prefetch_factor": ahead}, samples_per_s=rate, spread=spread)


SETTINGS = st.builds(
    setting, rate=st.floats(1, 1e6), workers=st.integers(0, 8), threads=st.integers(1, 8),
    ahead=st.sampled_from([2, 4, 8]), spread=st.floats(0, 2),
)  # fmt: skip


@given(st.lists(SETTINGS, min_size=1, max_size=8))
def test_the_choice_is_as_fast_as_the_fastest_and_none_as_fast_takes_less(tried: list[Tried]) -> None:
    best, fastest, apart = chosen(tried), max(one.samples_per_s for one in tried), spread_of(tried)
    assert 0.05 <= apart <= 0.25
    assert best.samples_per_s >= fastest * (1 - apart)
    for one in tried:
        if one.samples_per_s >= fastest * (1 - apart):
            assert tune._machinery(best) <= tune._machinery(one)
    assert reason(best, tried)


@pytest.mark.parametrize(
    ("tried", "best"),
    [
        ([setting(100, threads=1), setting(104, threads=4)], 0),  # within 5 %
        ([setting(100, threads=1), setting(120, threads=4)], 1),
        ([setting(100, spread=0.3), setting(120, threads=4, spread=0.2)], 0),  # not told apart
        ([setting(100, spread=9.0), setting(140, threads=4, spread=9.0)], 1),  # but for what nobody would miss
        ([setting(100, workers=1), setting(97, threads=8)], 1),  # threads before processes
        ([setting(100, workers=4), setting(97, workers=2)], 1),
        ([setting(100, ahead=4), setting(101, ahead=2)], 1),
        ([setting(100, workers=8), setting(50, threads=4)], 0),
    ],
)
def test_processes_threads_and_batches_ahead_have_to_pay(tried: list[Tried], best: int) -> None:
    assert chosen(tried) is tried[best]
    assert chosen(tried[::-1]) is tried[best]


@pytest.mark.parametrize(
    ("cores", "rate", "options"),
    [
        (8, by_processes, {"num_workers": 8, "prefetch_factor": 2}),
        (1, by_processes, {"num_workers": 0, "num_threads": 1, "prefetch_factor": 2}),
        (8, by_threads, {"num_workers": 0, "num_threads": 8, "prefetch_factor": 2}),
        (8, by_the_store, {"num_workers": 0, "num_threads": 1, "prefetch_factor": 2}),
        (8, by_batches_ahead, {"num_workers": 0, "num_threads": 1, "prefetch_factor": 8}),
    ],
)
def test_the_file_has_what_the_machine_is_fastest_with(
    folder: str, tmp_path: Path, measured: Callable[..., list[dict[str, Any]]], cores: int, rate: Rate,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Its passes stay within what was said before; batches ahead are tried with the builders that were best."""
    passes = measured(cores, rate)
    result = run(folder, "--tune", "--seconds", 30, "--bytes", "1MB", "--out", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    plan = TunePlan.of(30, cores)
    said = f"{plan.num_settings} settings in {plan.num_passes} passes: at most 30 s in all"
    assert said in result.stderr
    assert len(passes) == plan.num_passes
    assert sum(one["seconds"] for one in passes) * (1 + PAUSED_SHARE) <= 30.001
    found = read_tuned(tmp_path / "found.json")
    assert (found.options, found.cores) == (options, cores)
    assert len(found.measured) == 0  # not looked into
    last = passes[-1]
    assert (last["num_workers"], last.get("num_threads")) == (options["num_workers"], options.get("num_threads"))
    written = json.loads((tmp_path / "found.json").read_text())["measured"]
    assert len(written["tried"]) == plan.num_settings
    assert written["urls"] == [folder]
    assert "use    DataLoader(…, num_workers=" in result.stdout
    assert result.stdout.count(" samples/s") == plan.num_settings


def test_what_the_store_limits_is_said(folder: str, measured: Callable[..., Any], tmp_path: Path) -> None:
    measured(4, by_the_store, fetch_share=0.6)
    result = run(folder, "--tune", "--out", tmp_path / "a.json")
    assert "waits 60% of its time for bytes, which none of these options changes" in result.stdout


def test_memory_is_written_only_if_it_was_chosen(folder: str, measured: Callable[..., Any], tmp_path: Path) -> None:
    """The loader's own default knows the control group in which it runs."""
    passes, path = measured(4, by_threads), tmp_path / DEFAULT_NAME
    assert run(folder, "--tune", "--out", path).exit_code == 0
    assert "memory_limit" not in read_tuned(path).options
    assert run(folder, "--tune", "--out", path, "--memory-limit", "100MB").exit_code == 0
    assert read_tuned(path).options["memory_limit"] == "96MiB"
    assert passes[-1]["memory_limit"] == 100_000_000


def test_json_has_all_that_was_tried(folder: str, measured: Callable[..., Any], tmp_path: Path) -> None:
    measured(4, by_processes)
    result = run(folder, "--tune", "--json", "--out", tmp_path / "a.json")
    found = json.loads(result.stdout)
    assert found["options"] == {"num_workers": 4, "prefetch_factor": 2}
    assert len(found["tried"]) == TunePlan.of(20, 4).num_settings
    assert {"why", "cores", "memory_bytes", "batch_size", "not_decoded"} <= found.keys()


# ----------------------------------------------------------------------------------------------------- real passes


def read_with(folder: str, path: Path) -> list[str]:
    dataset = StreamingDataset(folder)
    with DataLoader(dataset, 8, tuned=path) as loader:
        return [key for batch in loader for key in batch["__key__"]]


def check_real(folder: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real run writes a file that a loader here takes without a doubt, and batches are those without it."""
    result = run(folder, "--tune", "--seconds", 0.2, "--out", path)
    assert result.exit_code == 0, result.output
    assert f"written: {path}" in result.stdout
    tried = json.loads(path.read_text())["measured"]["tried"]
    assert all(one["samples_per_s"] > 0 for one in tried)
    assert read_tuned(path).cores == num_cores()
    with DataLoader(StreamingDataset(folder), 8) as loader:
        expected = [key for batch in loader for key in batch["__key__"]]
    with caplog.at_level(logging.WARNING, "streaming.loader"):
        caplog.clear()
        assert read_with(folder, path) == expected
    assert [line for line in caplog.messages if line.startswith("tuned")] == []


@pytest.mark.thorough
def test_a_real_run_on_threads(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is written where one of the same kind is, and nowhere else."""
    monkeypatch.setattr(tune, "has_worker_processes", lambda: False)
    before = sorted(Path(folder).rglob("*"))
    check_real(folder, tmp_path / DEFAULT_NAME, caplog)
    check_real(folder, tmp_path / DEFAULT_NAME, caplog)
    assert sorted(tmp_path.iterdir()) == [tmp_path / DEFAULT_NAME]
    assert sorted(Path(folder).rglob("*")) == before


@pytest.mark.thorough
def test_a_real_run_with_processes(folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_real(folder, tmp_path / DEFAULT_NAME, caplog)


def test_its_name_is_tuned_json_unless_another_is_given(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Callable[..., Any]
) -> None:
    measured(2, by_threads)
    monkeypatch.chdir(tmp_path)
    assert run(folder, "--tune").exit_code == 0
    assert read_tuned(tmp_path / DEFAULT_NAME).options["num_threads"] == 2


# ---------------------------------------------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "x.json"), "only --tune writes a file"),
        (("--tune", "--seconds", "0"), "--seconds"),
        (("--tune", "--bytes", "0"), "--bytes"),
        (("--tune", "--batch-size", "0"), "--batch-size"),
    ],
)
def test_wrong_usage_ends_with_2(folder: str, arguments: tuple[str, ...], said: str) -> None:
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("what", ["text", "shard", "folder", "other json", "damaged"])
def test_a_file_of_another_kind_is_not_written_over(
    folder: str, tmp_path: Path, what: str, measured: Callable[..., Any]
) -> None:
    """This is said before anything is measured."""
    passes, path = measured(2, by_threads), tmp_path / "out"
    if what == "folder":
        path.mkdir()
    else:
        content = {"text": b"notes", "shard": bytes(3 << 20), "other json": b'{"sources": {}}', "damaged": b'{"shar'}
        path.write_bytes(content[what])
    before = None if what == "folder" else path.read_bytes()
    result = run(folder, "--tune", "--out", path)
    assert result.exit_code == 2
    assert f"--out {path}: this " in result.stderr
    assert passes == []
    assert before is None or path.read_bytes() == before


def test_too_little_memory_is_named_with_what_is_enough(folder: str, tmp_path: Path) -> None:
    result = run(folder, "--tune", "--seconds", 0.1, "--memory-limit", "1KB", "--out", tmp_path / "a.json")
    assert result.exit_code == 2
    assert "--memory-limit: no loader starts" in result.stderr
    assert not (tmp_path / "a.json").exists()


def test_sets_that_cannot_be_measured_are_refused(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/bare/{{:06d}}.tar", index=False) as writer:
        writer.write({"__key__": "a", "txt": b"1"})
    with pytest.raises(IndexMissingError, match="shard_tools index"):
        tune.tune([f"{tmp_path}/bare/"])
    with pytest.raises(ConfigError, match="expected more than 0"):
        BenchOptions(seconds=0)
