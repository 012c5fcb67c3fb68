"""docs/waiting.md: its programs run, and each kind of waiting shows where its table says."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools.look.trace import merge_traces
from streaming import DataLoader, DevicePrefetcher
from streaming.shards.fetch import read
from tests.support.code.folders import ROOT
from tests.support.processes.waiting import PATIENCE_S, is_timed, until
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.thorough

PAGE = ROOT / "docs" / "waiting.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("waiting") / "train", (150, 90), chunk_samples=4)


def test_its_programs_run(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look, profiled = _BLOCK.findall(PAGE.read_text())
    smaller = {
        "s3://bucket/train/": samples.url, "batch_size=256": "batch_size=8", "step == 100": "step == 3",
        "step == 121": "step == 8", "steps=20": "steps=4",
    }  # fmt: skip
    for old, new in smaller.items():
        assert old in look, old
        look = look.replace(old, new)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"train_step": lambda _: time.sleep(0.002)}
    exec(compile(look, "waiting.md", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"^consumer_s +\d+%$", said, re.MULTILINE)
    assert "prefetcher to" in said
    assert "not running" not in said
    assert len(json.loads((tmp_path / "trace-0.json").read_text())["shardstream"]["steps"]) == 4
    exec(compile(profiled, "waiting.md", "exec"), names)
    found = (tmp_path / "profile.json").read_text()
    names["batches"].close()
    assert all(f"shardstream.{name}" in found for name in ("hand_over", "build", "copy"))  # all is in memory


BUILDS = threading.Event()
"""A builder is at work on a batch, which is not done before the consumer has waited for it."""
LET_GO = threading.Event()
"""Nobody waits for the consumer any more."""


def wait_until_it_waits(name: str) -> None:
    until(lambda: LET_GO.is_set() or is_timed(name), f"the consumer waits: {name}")


def asleep(seconds: float, result: Callable[[Any], Any] = lambda one: one) -> Callable[[Any], Any]:
    """Return a function that takes time in a builder, while the consumer waits for it, and none in the consumer."""

    def call(given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            BUILDS.set()
            wait_until_it_waits("wait_for_build_s")
            time.sleep(seconds)
            BUILDS.clear()
        return result(given)

    return call


def drawing(sample: Any) -> Any:
    time.sleep(0.005)
    return sample | {"drawn": np.random.rand()}  # noqa: NPY002  that is the point


def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each read take 0.1 s from when somebody waits for it."""
    real = read.fetch_unit

    def slow(*args: Any, **options: Any) -> Any:
        wait_until_it_waits("wait_for_fetch_s")
        time.sleep(0.1)
        return real(*args, **options)

    monkeypatch.setattr("streaming.shards.catalog.source.fetch_unit", slow)
    monkeypatch.setattr("streaming.shards.catalog.source.ChunkSource.in_place", None)


CAUSES: dict[str, tuple[dict[str, Any], float, str, str]] = {
    "store": ({}, 0.0, "wait_for_fetch_s", "wait for bytes"),
    "transform": ({"transform": asleep(0.005)}, 0.0, "wait_for_build_s", "wait for a builder"),
    "collate": ({"collate_fn": asleep(0.04, len)}, 0.0, "wait_for_build_s", "wait for a builder"),
    "global random numbers": ({"transform": drawing}, 0.0, "build_in_consumer_s", "build"),
    "step": ({}, 0.1, "consumer_s", "your step"),
}


@pytest.mark.parametrize("what", CAUSES)
def test_each_cause_shows_where_the_table_says(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    options, step_s, share, cause = CAUSES[what]
    BUILDS.clear()
    LET_GO.clear()
    assert f"`{share}`" in PAGE.read_text()
    assert f"`{cause}`" in PAGE.read_text()
    if what == "store":
        store(monkeypatch)
    dataset = samples.open(seed=1, transform=options.get("transform"))
    loader = DataLoader(dataset, batch_size=8, num_threads=1, collate_fn=options.get("collate_fn"))
    with DevicePrefetcher(loader, "cpu", depth=1) as batches:
        batches.trace(tmp_path / "t.json", steps=12)
        for number, _ in enumerate(batches):
            time.sleep(step_s)
            if number == 12:
                break
            if what in {"transform", "collate"}:  # else this thread might build the next batch
                assert BUILDS.wait(PATIENCE_S)
        LET_GO.set()
        now = batches.metrics()
    parts = ("consumer_s", "wait_for_fetch_s", "wait_for_build_s", "build_in_consumer_s")
    assert max(parts, key=lambda name: now.get(name, 0)) == share
    found = merge_traces([str(tmp_path / "t.json")]).ranks[0].seconds
    assert next(iter(found)) == cause
    if what == "global random numbers":
        assert now["batches_in_turn"] > 0
