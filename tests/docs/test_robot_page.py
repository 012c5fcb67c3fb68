"""From LeRobot: the page runs as it stands, on a set with a task that changes and a picture that is damaged."""

from __future__ import annotations

import json
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
    RobotSet(lengths=(7, 6, 5), per_video=1, per_table=1, grain=60).write(folder)
    path = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index("task_index")
    pq.write_table(table.set_column(at, "task_index", pa.array(NUMBERS)), path)
    video = folder / f"videos/{FRONT}/chunk-000/file-001.mp4"
    data = np.frombuffer(video.read_bytes(), np.uint8).copy()
    begin = data.tobytes().index(b"mdat") + 600
    data[begin : begin + 2000 : 7] ^= 255
    video.write_bytes(data.tobytes())


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "robot")
    convert("robot", "episodes")
    assert index_video(["episodes/"], storage=Storage()).num_damaged == 0, "pictures are not decoded"
    seen: list[object] = []
    names: dict[str, object] = {"train_step": lambda *batch: seen.append(batch)}
    ours = [block for block in blocks(PAGE.read_text()) if block.language in PYTHON and "theirs" not in block.words]
    for block in ours[1:]:  # the first trains on all, and would stop at the damage
        names |= {"front": f"{FRONT}.mp4"}
        exec("from streaming import DataLoader, StreamingDataset, Windows", names)
        run_python(block, names, PAGE)
    assert len(ours) == 4
    assert names["words"] == {"0": TASKS[0], "1": TASKS[1]}
    assert names["task_of_step"] == [TASKS[number] for number in NUMBERS]
    windows = names["windows"]
    assert isinstance(windows, Windows)
    assert [windows[step]["word"] for step in range(len(NUMBERS))] == [TASKS[number] for number in NUMBERS]
    bad = [json.loads(line)["key"] for line in Path("bad.jsonl").read_text().splitlines()]
    assert bad == ["episode_000001"]
