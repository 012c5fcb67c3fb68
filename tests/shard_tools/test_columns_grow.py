"""A set grows: the command that added a late column makes the values of new shards only, and the column stays as it is.

States and views that were made before then mean the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shard_tools import ShardWriter, select
from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError
from tests.support.code.cure_messages import error_of, tool
from tests.support.contracts.meeting_kinds import logged

FIRST, ALL = 20, 32
WAYS = {
    "lift": ("--lift", "json.n"),
    "compute": ("--compute", "doubling:doubled", "--fields", "json"),
    "from": ("--from", "scores.parquet", "--on", "key"),
    "bytes": ("--compute", "bytes", "--fields", "bin"),
    "length": ("--compute", "length", "--field", "bin", "--after", "doubling:parts", "--workers", "1"),
}
MODULE = """
FACTOR = 2

def doubled(sample):
    return FACTOR * sample["json"]["n"]

def parts(sample):
    return {"bin": list(sample["bin"]) * (FACTOR - 1)}
"""


def value(way: str, number: int) -> int:
    return {"lift": number, "compute": 2 * number, "from": 3 * number}.get(way, 10 + number % 3)


def write(name: str, numbers: range) -> None:
    with ShardWriter(f"in/{name}-{{:02d}}.tar", max_samples=8, index=False) as writer:
        for number in numbers:
            writer.write({"__key__": f"k{number:03d}", "json": {"n": number}, "bin": bytes(10 + number % 3)})


def scores(num: int) -> None:
    rows = pa.table({"key": [f"k{number:03d}" for number in range(num)], "score": [3 * n for n in range(num)]})
    pq.write_table(rows, "scores.parquet")


def files(name: str = "late") -> dict[str, bytes]:
    found = Path("set/_shardstream/columns", name).iterdir()
    return {path.name: path.read_bytes() for path in found if path.name != "column.json"}


def add(way: str, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tool("column", "add", "set", "late", *WAYS[way], *more, "--json").stdout)
    return found


def read(**options: Any) -> list[int]:
    return [sample["json"]["n"] for sample in StreamingDataset("set", shuffle=False, **options)]


@pytest.fixture(autouse=True)
def first_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of three shards in the current folder, converted from tars."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    Path("doubling.py").write_text(MODULE)
    scores(ALL)
    write("a", range(FIRST))
    tool("convert", "in", "set", "--max-samples", "8")


def grow() -> list[str]:
    write("b", range(FIRST, ALL))
    with logged() as said:
        tool("append", "in", "set")
    return said


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_the_same_command_makes_what_is_missing(way: str) -> None:
    first = add(way)
    tool("version", "tag", "set", "v1")
    where = "late >= 0"
    with DataLoader(StreamingDataset("set", version="v1", where=where), batch_size=4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    before = files()
    assert any("run the command that added it again, which makes only what is missing" in line for line in grow())
    with logged() as said:
        second = add(way)
    assert not said
    assert (second["column_version"], second["num_samples"]) == (first["column_version"], ALL)
    assert before.items() < files().items()
    assert second["num_missing"] == 0
    assert add(way)["was_complete"]
    for number in (0, FIRST - 1, FIRST, ALL - 1):
        assert number in read(where=f"late = {value(way, number)}")
    with logged() as said, DataLoader(StreamingDataset("set", version="v1", where=where), batch_size=4) as loader:
        loader.load_state_dict(state)
        assert sum(len(batch["__key__"]) for batch in loader) == FIRST - 4
    assert not said


@pytest.mark.parametrize("way", ["compute", "length"])
def test_values_of_other_code_are_named(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version covers a function's own source, not what it calls or reads."""
    add(way)
    grow()
    Path("doubling.py").write_text(MODULE.replace("FACTOR = 2", "FACTOR = 30"))
    monkeypatch.delitem(sys.modules, "doubling", raising=False)
    with logged() as said:
        add(way)
    assert [line for line in said if "are different when they are made again" in line and "with --overwrite" in line]
    with logged() as said:
        add(way, "--overwrite")
    assert not said
    assert len(read(where=f"late >= {30 if way == 'compute' else 290}")) >= ALL - 1


@pytest.mark.parametrize("way", ["lift", "compute"])
def test_a_run_that_is_stopped_leaves_the_earlier_values(way: str) -> None:
    add(way)
    grow()
    filled = {name.removesuffix(".parquet") for name in files()}
    new = sorted(path.name for path in Path("set").glob("*.tar") if path.name not in filled)
    assert new
    (broken := Path("set", new[-1])).rename("away")
    tool("column", "add", "set", "late", *WAYS[way], code=1)
    assert read(where="late >= 0", version=1) == [*range(FIRST)]
    Path("away").rename(broken)
    assert add(way)["num_missing"] == 0
    assert sorted(read(where="late >= 0")) == [*range(ALL)]


def test_another_way_to_make_it_still_needs_overwrite() -> None:
    scores(FIRST)
    first = add("from")
    grow()
    scores(ALL)  # a file with further rows may have other values for the old ones
    for way in ("from", "lift"):
        refused = tool("column", "add", "set", "late", *WAYS[way], code=2).stderr
        assert "made from scores.parquet as it was then" in refused
        assert "--overwrite, which makes all its values again" in refused
    assert add("from", "--overwrite")["column_version"] != first["column_version"]


def test_columns_of_an_index_are_completed() -> None:
    tool("index", "set", "--columns", "json.n")
    before = files("json.n")
    grow()
    tool("index", "set", "--columns", "json.n")
    assert before.items() < files("json.n").items()
    assert len(read(where='"json.n" >= 0')) == ALL


def test_a_function_that_is_passed_completes_nothing() -> None:
    """It may carry values that are compared with nothing."""
    select(lambda sample: sample["json"]["n"] % 2 == 0, "set", "even")
    grow()
    assert "already exists" in error_of(lambda: select(lambda sample: True, "set", "even"), ConfigError)
