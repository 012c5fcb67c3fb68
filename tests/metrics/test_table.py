"""The table of numbers: the one in the code and those of docs/metrics.md are the same, and names follow the rules."""

from __future__ import annotations

import re

import pytest

from streaming.watch.metrics.table import EXPORTED, NUMBERS, OF_EXPORTS, OF_LOADERS, OF_ORDINARY, OF_SHARDS, Number
from tests.support.code.folders import ROOT

PAGE = ROOT / "docs" / "metrics.md"
SECTIONS = {
    "All loaders": OF_LOADERS,
    "Loaders of shards": OF_SHARDS,
    "Loaders of ordinary datasets, and of remote readers": OF_ORDINARY,
    "Prometheus": OF_EXPORTS,
}


def plain(markdown: str) -> str:
    """A cell without its markup, and without links in brackets to other pages."""
    linked = re.sub(r" \(\[[^\]]*\]\([^)]*\)\)", "", markdown)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", linked).replace("`", "")


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_the_rows_of_the_code_in_their_order(section: str) -> None:
    text = PAGE.read_text().split(f"\n## {section}\n")[1].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    assert [(name, kind, plain(meaning)) for name, kind, meaning in rows] == [
        (one.name, one.kind, one.meaning) for one in SECTIONS[section]
    ]


def test_names_follow_the_rules_of_prometheus_and_differ() -> None:
    rows = [one for numbers in SECTIONS.values() for one in numbers]
    assert len(rows) == len(NUMBERS) == len(EXPORTED) == len({one.opentelemetry_name for one in rows})
    for one in rows:
        name = one.prometheus_name
        assert re.fullmatch(r"shardstream_[a-z][a-z_]*", name)
        assert name.endswith("_total") == (one.kind == "counter")
        assert ("_seconds" in name, "bytes" in name) == (one.unit == "s", one.unit == "By")


@pytest.mark.parametrize(
    ("name", "kind", "exported", "instrument", "unit"),
    [
        ("batches", "counter", "shardstream_batches_total", "shardstream.batches", ""),
        ("build_s", "counter", "shardstream_build_seconds_total", "shardstream.build", "s"),
        ("arena_bytes", "gauge", "shardstream_arena_bytes", "shardstream.arena", "By"),
        ("a_s_per_batch", "gauge", "shardstream_a_seconds_per_batch", "shardstream.a_s_per_batch", "s"),
    ],
)
def test_names_of_exporters(name: str, kind: str, exported: str, instrument: str, unit: str) -> None:
    number = Number(name=name, kind=kind, meaning="")  # type: ignore[arg-type]
    assert (number.prometheus_name, number.opentelemetry_name, number.unit) == (exported, instrument, unit)
