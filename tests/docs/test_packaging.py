"""What is installed: the version has one source, the extras are complete, the licence comes along."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from folders import ROOT

import streaming

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "streaming/types.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", streaming.__version__)
    told = subprocess.run(
        [sys.executable, "-m", "shard_tools", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout == f"shard_tools, version {streaming.__version__}\n"


def test_extra_all_names_every_other_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (every,) = extras["all"]
    named = set(re.fullmatch(r"shardstream\[(.*)\]", every)[1].split(","))
    assert named == extras.keys() - {"all", "dev", "docs"}  # the last builds the site of this repository


def test_the_licence_is_the_one_that_is_named() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_a_wheel_holds_all_packages_their_marker_and_the_licence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob(f"shardstream-{streaming.__version__}-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        str(path.relative_to(ROOT))
        for name in ("streaming", "shard_tools", "infra")
        for path in (ROOT / name).rglob("*.py")
    }
    assert modules <= names
    assert {"streaming/py.typed", f"shardstream-{streaming.__version__}.dist-info/licenses/LICENSE"} <= names
