"""The examples of CONTRIBUTING.md run, each of them against the tables that it adds a line to."""

from __future__ import annotations

import re
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from infra import launch
from shard_tools.make.convert.sources import LAYOUTS
from streaming import DataLoader
from streaming.build.decode.registry import BY_EXTENSION, BY_NAME
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import blocks
from tests.support.sets.data_sets import write_set

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MOST_LINES = 60


def test_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "READERS", launch.READERS)
    tables = (BY_EXTENSION, BY_NAME, LAYOUTS)
    before = [dict(table) for table in tables]
    names: dict[str, object] = {"__name__": "contributing"}
    monkeypatch.setitem(sys.modules, "contributing", ModuleType("contributing"))  # dataclasses look there
    ran = 0
    try:
        for block in blocks(PAGE):
            if block.language == "python":
                exec(compile("\n" * (block.line - 1) + block.code, "CONTRIBUTING.md", "exec"), names)
                ran += 1
        added = [sorted(table.keys() - old.keys()) for table, old in zip(tables, before, strict=True)]
        assert (ran, added) == (10, [["wav"], ["wav"], ["fasta"]])
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()  # type: ignore[attr-defined]
            table.update(old)  # type: ignore[attr-defined]


def test_the_command_prints_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [one for one in blocks(PAGE) if one.language == "python" and "longest_command" in one.code]
    names: dict[str, Any] = {"__name__": "contributing"}
    monkeypatch.setitem(sys.modules, "contributing", ModuleType("contributing"))
    exec(compile(block.code, "CONTRIBUTING.md", "exec"), names)
    write_set(tmp_path / "set", (3, 4))
    result = CliRunner().invoke(names["longest_command"], [str(tmp_path / "set")])
    assert (result.exit_code, result.output) == (0, "000001.tar: 4 samples\n")


def test_examples_are_short() -> None:
    parts = {part.partition("\n")[0]: part for part in PAGE.split("\n## How to add a ")[1:]}
    assert [*parts] == [
        "store",
        "kind of source",
        "kind of row",
        "kind of order",
        "decoder",
        "command",
        "source of `convert`",
        "launcher",
    ]
    lines = {name: [block.code.count("\n") for block in blocks(part)] for name, part in parts.items()}
    assert {name: found for name, found in lines.items() if not found or max(found) >= MOST_LINES} == {}


def test_folders_of_the_page_are_there() -> None:
    table = PAGE.partition("\n## Where code goes\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:streaming|shard_tools|infra)/[a-z_/]*)", table))
    assert [name for name in named if not (ROOT / name).is_dir()] == []
    told = set(re.findall(r"([a-z_]+)/", table))
    assert {path.parent.name for path in (ROOT / "streaming").glob("*/__init__.py")} <= told


def test_a_batch_passes_the_stops_of_its_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the page are called, with any method that takes the place of one in a class below."""
    part = PAGE.partition("\n## The life of a batch\n")[2].partition("\n## ")[0]
    stops = re.findall(r"^\| (\d+) \|.*\| `([a-z_/]+)\.py` `([\w.]+)` \|$", part, re.MULTILINE)
    assert [int(number) for number, _, _ in stops] == list(range(1, 13))
    code_of = {}
    for _, file, name in stops:
        found: Any = import_module(file.replace("/", "."))
        *owner, function = name.split(".")
        owners = [getattr(found, owner[0])] if owner else [found]
        for one in owners:
            owners += one.__subclasses__() if owner else []
        for one in owners:
            if function in vars(one):
                code_of[vars(one)[function].__code__] = name
    data = write_set(tmp_path, (6, 6))
    passed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in code_of:
            passed.add(code_of[frame.f_code])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with DataLoader(data.open(), batch_size=4, num_threads=1, prefetch_factor=1) as loader:
            next(iter(loader))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert [name for _, _, name in stops if name not in passed] == []
