"""The dashboard for Grafana asks for series that loaders export, by labels that they have, counters by their rate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import streaming.metrics
from streaming import DataLoader
from streaming.watch.metrics.exported import LABELS
from streaming.watch.metrics.table import EXPORTED, OF_EXPORTS, OF_ORDINARY
from tests.support.code.folders import ROOT
from tests.support.sets.data_sets import write_set

PATH = ROOT / "infra" / "deploy" / "grafana" / "shardstream.json"
_SERIES = re.compile(r"(rate\()?(shardstream_\w+)\{([^}]*)\}(\[\$__rate_interval\]\))?")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(PATH.read_text())


def expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def balanced(text: str) -> bool:
    depth = 0
    for letter in re.sub(r'"[^"]*"', "", text):
        depth += (letter in "({[") - (letter in ")}]")
        if depth < 0:
            return False
    return depth == 0


def test_it_asks_for_what_is_exported(dashboard: dict[str, Any]) -> None:
    asked = set()
    for title, expression in expressions(dashboard):
        assert balanced(expression), (title, expression)
        found = _SERIES.findall(expression)
        assert len(found) == expression.count("shardstream_"), (title, expression)
        for opened, name, labels, closed in found:
            number = EXPORTED[name]
            assert bool(opened) == bool(closed) == (number.kind == "counter"), (title, expression)
            assert set(re.findall(r"(\w+)[!=]", labels)) <= {"job", *LABELS}, (title, labels)
            asked.add(name)
    assert len(asked) > 20


def test_a_loader_of_shards_has_all_but_what_others_have(dashboard: dict[str, Any], tmp_path: Any) -> None:
    registry = CollectorRegistry()
    samples = write_set(tmp_path / "set", (20,))
    dataset = samples.open(cache_dir=str(tmp_path / "cache"))
    with DataLoader(dataset, batch_size=4) as loader:
        streaming.metrics.prometheus(loader, registry)
        for _ in loader:
            pass
        for _ in loader:
            pass
        families = text_string_to_metric_families(generate_latest(registry).decode())
        there = {sample.name for family in families for sample in family.samples}
    asked = {name for _, expression in expressions(dashboard) for _, name, _, _ in _SERIES.findall(expression)}
    # What a loader may not meet: no worker died, no disk failed, nothing was mapped, exchanged, built in a thread, and
    # no bytes were waited for.
    seldom = "worker_restarts cache_errors mapped_bytes exchange_s wait_for_build_s build_in_consumer_s cache_hits"
    seldom += " wait_for_fetch_s"
    rare = {one.prometheus_name for one in OF_ORDINARY}
    rare |= {name for name, one in EXPORTED.items() if one.name in [*seldom.split(), "cache_hit_bytes"]}
    assert asked - there <= rare
    assert {one.prometheus_name for one in OF_EXPORTS if one.name == "epoch"} <= asked


def test_variables_and_panels_hold_together(dashboard: dict[str, Any]) -> None:
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps(dashboard))) - {"__rate_interval", "__all"}
    assert used == set(variables)
    for one in variables.values():
        if one["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["query"]["query"]).groups()  # type: ignore[union-attr]
            assert name in EXPORTED
            assert label in {"job", *LABELS}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["datasource"]["uid"] == "$datasource"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
