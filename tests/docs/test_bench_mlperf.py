"""The pure parts of ``benchmarks/mlperf_storage``: the search of the step time, the tables, the records."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from shard_tools.make.convert import open_source
from streaming.storage import Storage
from tests.support.code.folders import ROOT
from tests.support.code.script_modules import script_modules

FOLDER = str(ROOT / "benchmarks" / "mlperf_storage")
MODULES = ("contestants", "workloads", "search", "table")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return script_modules(monkeypatch, FOLDER, MODULES)


def searched(module: Any, make_s: float, kept_s: float, goal: float, hiccup: int = 0) -> tuple[Any, int]:
    """Search with a loader that makes a batch in ``make_s`` beside the step and keeps the thread for ``kept_s``.

    In trial ``hiccup`` it keeps it for a second.
    """
    search, count = module.search(goal=goal, confirmations=2), 0
    step_s = next(search)
    while True:
        count += 1
        assert count < 200
        whole_s = max(step_s + kept_s + (count == hiccup), make_s)
        trial = module.Trial(step_s=step_s, utilization=step_s / whole_s, cpu_s=1.0, whole_s=whole_s)
        try:
            step_s = search.send(trial)
        except StopIteration as end:
            return end.value, count


@pytest.mark.parametrize("goal", [0.9, 0.5])
@pytest.mark.parametrize(
    ("make_s", "kept_s"), [(0.1, 0.001), (0.1, 0.05), (0.001, 0.002), (1.0, 0.0), (0.003, 0.0003), (0.02, 0.3)]
)
def test_the_shortest_step_that_reaches_the_goal_is_found(bench, make_s, kept_s, goal):
    found, _ = searched(bench["search"], make_s, kept_s, goal)
    shortest_s = max(goal * make_s, kept_s * goal / (1 - goal))
    assert found.utilization >= goal
    assert shortest_s <= found.step_s <= shortest_s * bench["search"].PRECISION * 1.001


def test_what_was_reached_by_luck_is_not_the_result(bench):
    """A trial that was too good by chance is tried again, and a longer step taken."""
    search = bench["search"]
    one = search.search(confirmations=2)
    found, step_s, lucky = None, next(one), True
    while found is None:
        good = step_s >= 0.1 or (lucky and step_s > 0.05)
        lucky = lucky and not (good and step_s < 0.1)
        trial = search.Trial(step_s=step_s, utilization=0.95 if good else 0.5, whole_s=0.08)
        try:
            step_s = one.send(trial)
        except StopIteration as end:
            found = end.value
    assert 0.1 <= found.step_s <= 0.1 * search.PRECISION


def test_a_loader_that_is_never_fast_enough_has_no_result(bench):
    with pytest.raises(ValueError, match="with a step of 10 s"):
        searched(bench["search"], 30.0, 3.0, 0.9)


def test_the_tables_hold_medians_against_ours_and_say_what_failed(bench):
    def run(rate: float, **more: Any) -> dict[str, Any]:
        return {"samples_per_s": rate, "cpu_s_per_gb": 0.5, "step_ms": 12.0, "unhidden_ms": 1.25,
                "engine_samples_per_s": rate - 10, "utilization": 0.9, **more}  # fmt: skip

    runs = {
        "resnet50 disk shardstream": [run(1000), run(3000), run(2000)],
        "resnet50 disk torch": [run(500)],
        "resnet50 disk dali": [run(500), {"failed": "no | memory"}],
        "unet3d s3 s3torch": [run(5)],
    }
    results = {"machine": "a machine", "commit": "0123abcd", "engine": "e==1", "scale": 1.0, "goal": 0.9, "runs": runs}
    lines = bench["table"].document(json.loads(json.dumps(results))).splitlines()
    assert "| shardstream | 2,000 (1,000 to 3,000) | 1.00 x | 0.50 | 12.00 | 1.25 | 1,990 |" in lines
    assert "| torch, 2 workers | 500 | 0.25 x | 0.50 | 12.00 | 1.25 | 490 |" in lines
    assert "| DALI on the CPU, 2 threads | failed: no / memory |  |  |  |  |  |" in lines
    assert "## unet3d, S3" in lines
    assert "## cosmoflow, disk" not in lines


def test_records_are_those_of_tensorflow(bench, tmp_path):
    """What ``workloads.py`` writes, our converter of TFRecord files reads, sums included."""
    work = bench["workloads"].Workload(name="small", sample_bytes=300, batch_size=2, num_batches=6, per_file=4)
    (folder := tmp_path / "in").mkdir()
    records = bench["workloads"].Records(str(folder), work)
    payloads = list(bench["workloads"].samples(work, 1.0))
    for number, payload in enumerate(payloads):
        records.write(number, payload)
    records.close()
    assert len(list(folder.iterdir())) == 3
    source = open_source(str(folder), Storage(), kind="tfrecord")
    assert [max(map(bytes, one.fields.values()), key=len) for one in source.records(0)] == payloads
