"""INFO lines come once a job: of two ranks the second says nothing that the first one says, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shard_tools import ShardWriter
from tests.support.tiers import first_here

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
from streaming import Balanced, Curriculum, DataLoader, Mixture, Packed, Schedule, StreamingDataset

def drawn(sample, generators=__import__("random").Random(0)):
    return {**sample, "drawn": generators.random()}

folder, kind = sys.argv[1:]
def one(**options):
    return StreamingDataset(folder, **options)
made = {
    "set": lambda: one(transform=drawn),
    "where": lambda: one(where="number < 48"),
    "mixture": lambda: Mixture({"a": one(), "b": one()}, weights={"a": 1, "b": 3}, unit="bytes"),
    "balanced": lambda: Balanced(one(), by="cls"),
    "curriculum": lambda: Curriculum(one(), "number", Schedule.root(0.2, 1.0, over=64), buckets=4),
    "packed": lambda: Packed(one(), 32, field="tok", dtype="uint16"),
}[kind]()
options = {} if kind in ("set", "where", "packed") else {"epoch_size": 64}
with DataLoader(made, 8, **options) as loader:
    for number, batch in enumerate(loader):
        if number == 3:
            break
"""
KINDS = ("mixture", "curriculum", "packed", "where", "set", "balanced")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("said")
    columns = {
        "number": lambda sample: int(sample["number.txt"]),
        "cls": lambda sample: int(sample["number.txt"]) % 4,
        "tokens": lambda sample: len(sample["tok"]) // 2,
    }
    with ShardWriter(folder / "{:03d}.tar", max_samples=32, columns=columns) as writer:
        for number in range(64):
            writer.write(
                {"__key__": f"{number:02}", "tok": np.arange(8, dtype=np.uint16).tobytes(), "number.txt": f"{number}"}
            )
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("kind", first_here(KINDS, 1))
def test_each_line_comes_once_a_job(folder: Path, kind: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), kind],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = []
    for one in ranks:
        output = one.communicate()[0]
        assert one.returncode == 0, output
        said.append(re.findall(r"^INFO (.*)$", output, re.MULTILINE))
    assert said[0], "what the first one says"
    assert said[1] == []
