"""From LeRobot: the page runs as it stands, on a set with a task that changes and a picture that is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shard_tools.change.columns.video import index_video
from shard_tools.make.convert import convert
from streaming import Windows
from streaming.storage import Storage
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import PYTHON, blocks, run_python
from tests.support.sources.robot_sets import TASKS, RobotSet

PAGE = ROOT / "docs" / "coming-from" / "lerobot.md"
FRONT = "observation.images.front"
NUMBERS = [0, 0, 0, 1, 1, 1, 1]
"""The task of each step of episode 0."""


def write(folder: Path) -> None:
    RobotSet(lengths=(7, 30, 5), per_video=1, per_table=1, grain=60).write(folder)
    path = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index("task_index")
    pq.write_table(table.set_column(at, "task_index", pa.array(NUMBERS)), path)


def damage(folder: Path) -> None:
    video = folder / f"videos/{FRONT}/chunk-000/file-001.mp4"
    data = np.frombuffer(video.read_bytes(), np.uint8).copy()
    begin = data.tobytes().index(b"mdat") + 600
    data[begin : begin + 2000 : 7] ^= 255
    video.write_bytes(data.tobytes())


def convert_and_index() -> None:
    shutil.rmtree("episodes", ignore_errors=True)
    convert("robot", "episodes")
    assert index_video(["episodes/"], storage=Storage()).num_damaged == 0, "pictures are not decoded"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "robot")
    convert_and_index()
    rows: list[int] = []
    names: dict[str, object] = {"train_step": lambda frames, _: rows.append(len(frames))}
    ours = [block for block in blocks(PAGE.read_text()) if block.language in PYTHON and "theirs" not in block.words]
    train, word, window, decode = ours
    for block in (train, word, window):
        run_python(block, names, PAGE)
    assert rows == [32], "a batch of 42 moments"
    assert names["words"] == {"0": TASKS[0], "1": TASKS[1]}
    assert names["task_of_step"] == [TASKS[number] for number in NUMBERS]
    windows = names["windows"]
    assert isinstance(windows, Windows)
    first = [row["word"] for row in windows if row["__key__"] == "episode_000000"]
    assert sorted(first) == sorted(TASKS[number] for number in NUMBERS)
    damage(tmp_path / "robot")
    convert_and_index()
    run_python(decode, names, PAGE)
    bad = [json.loads(line)["key"] for line in Path("bad.jsonl").read_text().splitlines()]
    assert bad == ["episode_000001"]
