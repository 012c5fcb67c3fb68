"""``shard_tools trace merge``: clocks are aligned by steps, time is summed up, and no file is believed unseen."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shard_tools.cli import cli
from shard_tools.look.trace import merge_traces, read
from streaming import DataLoader
from streaming.errors import ConfigError, DataError, ShardstreamError
from tests.support.sets.data_sets import mesh_of, write_set

Content = dict[str, Any]
STEPS = 6


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    """Traces of two ranks, as loaders wrote them."""
    folder = tmp_path_factory.mktemp("merge")
    samples = write_set(folder / "set", (41, 23), chunk_samples=4)
    for rank in range(2):
        with DataLoader(samples.open(seed=1), global_batch_size=8, device_mesh=mesh_of(2, rank)) as loader:
            loader.trace(folder / "t{rank}.json", STEPS)
            list(loader)
    return [json.loads((folder / f"t{rank}.json").read_text()) for rank in range(2)]


def moved(content: Content, by_us: float, clock: str) -> Content:
    """The same on a machine whose clock shows another time."""
    content = copy.deepcopy(content)
    for event in content["traceEvents"]:
        event["ts"] += by_us if event["ph"] != "M" else 0
    for step in content["shardstream"]["steps"]:
        for name in ("asked_us", "received_us", "ended_us"):
            step[name] += by_us
    content["shardstream"]["clock"] = clock
    return content


def as_rank(content: Content, rank: int) -> Content:
    content = copy.deepcopy(content)
    content["shardstream"]["rank"] = rank
    for event in content["traceEvents"]:
        event["pid"] = rank
    return content


def save(folder: Path, *contents: Content) -> list[str]:
    paths = [folder / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    return [str(path) for path in paths]


def work_of(content: Content, rank: int) -> list[Any]:
    return [
        (event["name"], event["tid"], event["ts"], event["dur"])
        for event in content["traceEvents"]
        if event["ph"] == "X" and event["pid"] == rank
    ]


def test_ranks_of_one_machine_are_not_shifted(written: list[Content], tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    report = merge_traces(save(tmp_path, *reversed(written)), str(out))
    assert [(one.rank, one.shift_us, one.is_same_clock, one.steps) for one in report.ranks] == [
        (0, 0.0, True, STEPS), (1, 0.0, True, STEPS),
    ]  # fmt: skip
    merged = json.loads(out.read_text())
    for rank, content in enumerate(written):
        assert work_of(merged, rank) == work_of(content, rank)
    ids = [event["id"] for event in merged["traceEvents"] if event["ph"] == "s"]
    assert len(set(ids)) == len(ids) > 0
    names = {event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    assert [(step.epoch, step.samples_seen) for step in report.steps] == [(0, 8 * step) for step in range(STEPS)]


def test_another_clock_is_found_by_the_ends_of_steps(written: list[Content], tmp_path: Path) -> None:
    off = moved(as_rank(written[0], 1), 5e9, "another machine")
    off["shardstream"]["steps"].pop()  # fewer steps in common
    out = tmp_path / "all.json"
    report = merge_traces(save(tmp_path, written[0], off), str(out))
    assert report.ranks[1].shift_us == pytest.approx(-5e9, abs=0.01)
    assert not report.ranks[1].is_same_clock
    assert report.ranks[1].spread_us == pytest.approx(0, abs=0.01)
    merged = json.loads(out.read_text())
    mine, theirs = work_of(merged, 0), work_of(merged, 1)
    assert [one[2] for one in mine] == pytest.approx([one[2] for one in theirs], abs=0.01)
    assert len(report.steps) == STEPS - 1


def test_one_late_step_moves_no_clock(written: list[Content], tmp_path: Path) -> None:
    off = moved(as_rank(written[0], 1), 1e6, "")
    late = off["shardstream"]["steps"][2]
    late["ended_us"] += 40_000
    report = merge_traces(save(tmp_path, written[0], off))
    assert report.ranks[1].shift_us == pytest.approx(-1e6, abs=0.01)
    assert report.ranks[1].spread_us == pytest.approx(40_000, abs=0.01)


def test_time_is_divided_by_cause(written: list[Content], tmp_path: Path) -> None:
    content = copy.deepcopy(written[0])
    steps = content["shardstream"]["steps"]
    lane = next(one["tid"] for one in content["traceEvents"] if one["name"] == "thread_name"
                and one["args"]["name"] == "consumer")  # fmt: skip
    content["traceEvents"] = [one for one in content["traceEvents"] if one["ph"] == "M"]
    for number, step in enumerate(steps):
        step |= {"asked_us": number * 1000.0, "received_us": number * 1000.0 + 700, "ended_us": (number + 1) * 1000.0}
        work = {"ph": "X", "pid": 0, "tid": lane, "ts": number * 1000.0, "dur": 500.0, "args": {}}
        content["traceEvents"] += [work | {"name": "wait for bytes"}, work | {"name": "fetch", "tid": lane + 1}]
    report = merge_traces(save(tmp_path, content))
    assert report.ranks[0].seconds == pytest.approx(
        {"wait for bytes": 0.0005 * STEPS, "your step": 0.0003 * STEPS, "other": 0.0002 * STEPS}
    )
    assert [*report.ranks[0].seconds] == ["wait for bytes", "your step", "other"]
    assert report.worst == (0, "wait for bytes", STEPS)
    assert {step.seconds for step in report.steps} == {0.0005}


def test_a_step_that_is_not_over_counts_and_aligns_nothing(written: list[Content], tmp_path: Path) -> None:
    off = moved(as_rank(written[0], 1), 1e6, "another machine")
    last = off["shardstream"]["steps"][-1]
    last |= {"ended_us": last["ended_us"] + 30e6, "is_over": False}
    paths = save(tmp_path, written[0], off)
    report = merge_traces(paths)
    assert [(one.steps, one.unfinished) for one in report.ranks] == [(STEPS, 0), (STEPS, 1)]
    assert report.ranks[1].spread_us == pytest.approx(0, abs=0.01)
    assert report.ranks[1].seconds["your step"] > 30
    assert f"rank 1    {STEPS} steps (1 not over), " in CliRunner().invoke(cli, ["trace", "merge", *paths]).output
    for step in off["shardstream"]["steps"]:
        step["is_over"] = False
    with pytest.raises(ConfigError, match="no step in common"):
        merge_traces(save(tmp_path, written[0], off))
    off["shardstream"]["clock"] = written[0]["shardstream"]["clock"]
    assert merge_traces(save(tmp_path, written[0], off)).ranks[1].spread_us is None


def no_common_step(content: Content) -> None:
    for step in content["shardstream"]["steps"]:
        step["epoch"] += 7


def bad_time(content: Content) -> None:
    content["traceEvents"][-1]["ts"] = float("nan")


def bad_steps(content: Content) -> None:
    content["shardstream"]["steps"][0]["received_us"] = 0


WRONG: dict[str, tuple[Callable[[Content], object], type[ShardstreamError], str]] = {
    "foreign": (lambda one: one.pop("shardstream"), ConfigError, "not a trace of a loader"),
    "newer": (lambda one: one["shardstream"].update(format=2), ConfigError, "format 2"),
    "merged": (lambda one: one["shardstream"].update(ranks=[]), ConfigError, "merged before"),
    "same rank": (lambda one: one["shardstream"].update(rank=0), ConfigError, "both of rank 0"),
    "other job": (lambda one: one["shardstream"].update(world_size=8), ConfigError, "of 2 ranks, .* of 8"),
    "rank": (lambda one: one["shardstream"].update(rank=5), DataError, "rank 5 of 2"),
    "text": (lambda one: one["shardstream"].update(rank="1"), DataError, "rank is '1'"),
    "no events": (lambda one: one.update(traceEvents={}), DataError, "no list"),
    "odd events": (lambda one: one["traceEvents"].append(3), DataError, "no list of objects"),
    "time": (bad_time, DataError, "ts is nan"),
    "steps": (bad_steps, DataError, "do not follow"),
    "unnamed": (lambda one: one["traceEvents"][-1].pop("name"), DataError, "without ph or name"),
    "no step": (no_common_step, ConfigError, "no step in common"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused_by_name(written: list[Content], tmp_path: Path, what: str) -> None:
    change, kind, message = WRONG[what]
    other = copy.deepcopy(written[1])
    change(other)
    paths = save(tmp_path, written[0], other)
    with pytest.raises(kind, match=message) as caught:
        merge_traces(paths, str(tmp_path / "all.json"))
    assert "1.json" in str(caught.value)
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"3", b'{"traceEvents": []}'])
def test_what_is_no_json_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises((DataError, ConfigError), match=r"x\.json"):
        merge_traces([str(path)])


def test_no_more_is_read_than_a_trace_has(
    written: list[Content], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="more than the 1,000"):
        merge_traces(save(tmp_path, written[0]))


def test_the_command(written: list[Content], tmp_path: Path) -> None:
    paths = save(tmp_path, written[0], moved(written[1], 3e6, "b"))
    out = str(tmp_path / "all.json")
    done = CliRunner().invoke(cli, ["trace", "merge", *paths, "-o", out])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith(f"rank 0    {STEPS} steps, ")
    assert "shifted by -" in lines[1]
    assert lines[2].startswith("longest before a batch: rank ")
    assert lines[3] == f"written: {out}"
    found = json.loads(CliRunner().invoke(cli, ["trace", "merge", paths[0], "--json"]).output)
    assert found["ranks"][0]["steps"] == STEPS
    assert found["path"] is None
    for wrong in (["trace", "merge", *paths, "-o", paths[0]], ["trace", "merge", "none.json"], ["trace", "merge", out],
                  ["trace", "merge", *paths, "-o", str(tmp_path / "no" / "x.json")]):  # fmt: skip
        assert CliRunner().invoke(cli, wrong).exit_code == 2
    assert json.loads(Path(paths[0]).read_text()) == written[0]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0.json", "1.json", "all.json"]
