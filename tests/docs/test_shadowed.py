"""Packages of the same name in the way: the error says which file shadows which, and the cure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.code.folders import ROOT

pytestmark = pytest.mark.thorough


def run(code: str, *paths: Path) -> str:
    """What a process with these folders first on its path says as it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100, env=environment,
        cwd=paths[0],
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    return ran.stderr.strip().splitlines()[-1]


def package(folder: Path, name: str, text: str = "") -> Path:
    (folder / name).mkdir(parents=True)
    path = folder / name / "__init__.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "code",
    ["import streaming", "from streaming.loader import DataLoader", "from streaming import StreamingDataset",
     "import shard_tools", "from streaming.errors import ConfigError"],
)  # fmt: skip
def test_a_package_infra_of_the_user(tmp_path: Path, code: str) -> None:
    theirs = package(tmp_path, "infra", "region = 'eu'\n")
    said = run(code, tmp_path)
    assert said.startswith(f"ImportError: import infra: {theirs} shadows shardstream's own package")
    assert str(ROOT / "infra" / "__init__.py") in said
    assert "Rename the former" in said


def test_a_folder_infra_without_code_is_not_in_the_way(tmp_path: Path) -> None:
    """A namespace package gives way to a real one anywhere on the path."""
    (tmp_path / "infra").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", "import streaming.errors"], check=True, env=environment, timeout=100)


@pytest.mark.parametrize("code", ["import shard_tools", "from shard_tools import ShardWriter"])
def test_another_package_streaming(tmp_path: Path, code: str) -> None:
    theirs = package(tmp_path, "streaming", "class StreamingDataset: ...\n")
    said = run(code, tmp_path)
    assert said.startswith(f"ImportError: import streaming: {theirs} shadows shardstream's own package")
    assert str(ROOT / "streaming" / "__init__.py") in said
    assert "separate environments" in said


@pytest.mark.parametrize(
    "code", ["from streaming.loader import DataLoader", "import shard_tools", "import streaming.sets.datasets.dataset"]
)
def test_mosaics_files_installed_over_ours(tmp_path: Path, code: str) -> None:
    shutil.copytree(ROOT / "streaming", tmp_path / "streaming", ignore=shutil.ignore_patterns("__pycache__"))
    theirs = tmp_path / "streaming" / "__init__.py"
    theirs.write_text("class StreamingDataset: ...\n")
    said = run(code, tmp_path)
    assert said.startswith(f"ImportError: import streaming: {theirs} belongs to another package, such as MosaicML's")
    assert "pip uninstall mosaicml-streaming" in said
