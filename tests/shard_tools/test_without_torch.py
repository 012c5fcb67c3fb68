"""A machine that prepares data has no torch: every verb works there, and what builds batches says what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.dom import minidom

import pytest

from shard_tools.cli import cli
from streaming.common.platforms import later
from tests.release import verbs
from tests.support.code.folders import ROOT, TESTS
from tests.support.code.page_blocks import blocks

pytestmark = pytest.mark.thorough

DATA = TESTS / "shard_tools" / "data"


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which this process and all that it starts find no torch."""
    (tmp_path / "gone" / "torch").mkdir(parents=True)
    hidden = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    (tmp_path / "gone" / "torch" / "__init__.py").write_text(hidden)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "gone"), str(ROOT)])}


def run(environment: dict[str, str], *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, check=False, capture_output=True, text=True, timeout=250)


def test_the_steps_of_a_release_have_every_verb() -> None:
    tried = {words.split()[0] for _, words in verbs.COMMANDS}
    assert {*cli.commands} - tried == {"doctor"}, "whose findings are about the machine"


def test_every_verb_runs_or_names_what_it_needs(tmp_path: Path, without_torch: dict[str, str]) -> None:
    (tmp_path / "work").mkdir()
    ran = run(without_torch, TESTS / "release" / "verbs.py", tmp_path / "work", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    said = {name: text for name, text in told["steps"].items() if text}
    assert said == {"bench": f"Error: shard_tools bench: this {verbs.REFUSED.strip()}"}
    assert len(told["steps"]) > 40
    assert not told["torch"]


@pytest.mark.parametrize("kind", ["mds/compressed", "litdata/compressed", "tfrecord/examples"])
def test_sets_of_other_packages_are_converted(tmp_path: Path, without_torch: dict[str, str], kind: str) -> None:
    command = ("-m", "shard_tools", "convert", DATA / kind, tmp_path / "out", "--from", kind.partition("/")[0])
    ran = run(without_torch, *command, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    ran = run(without_torch, "-m", "shard_tools", "verify", tmp_path / "out", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_what_trains_says_what_it_needs(tmp_path: Path, without_torch: dict[str, str]) -> None:
    ran = run(without_torch, "-c", "from streaming import DataLoader", cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith(
        "ModuleNotFoundError: streaming.DataLoader needs torch, which is not installed; pip install torch"
    )


def test_another_module_that_is_missing_is_not_taken_for_torch(tmp_path: Path) -> None:
    broken = tmp_path / "torch" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("import no_such_module\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ran = run(environment, "-c", "from streaming import DataLoader", cwd=tmp_path)
    assert ran.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_module'"


def test_the_page_names_all_that_is_to_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {line.partition(">")[0] for line in project["dependencies"]}
    (block,) = [block for block in blocks((ROOT / "docs" / "versions.md").read_text()) if "--no-deps" in block.code]
    named = {word for line in block.code.splitlines() for word in line.partition("#")[0].split()[2:]}
    assert named == needed - {"torch"} | {"--no-deps", "shardstream"}


def test_a_stand_in_is_replaced_by_the_module_at_its_first_use() -> None:
    names: dict[str, Any] = {}
    names["dom"] = later("xml.dom.minidom", names, "dom")
    assert "xml.dom.minidom" in repr(names["dom"])
    assert type(names["dom"]) is not ModuleType  # to look at it is no use
    stand_in = names["dom"]
    assert names["dom"].parseString is minidom.parseString
    assert names["dom"] is minidom
    assert stand_in.parseString is minidom.parseString  # another thread may still hold it
    with pytest.raises(AttributeError, match="no attribute 'none_such'"):
        _ = stand_in.none_such
