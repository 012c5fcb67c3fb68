"""Windows of LeRobot sets that ``convert`` wrote: frames and steps of each moment; two robots with unlike cameras."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from shard_tools.change.columns.video import index_video
from shard_tools.make.convert import convert
from streaming import DataLoader, Mixture, StreamingDataset, Windows
from streaming.storage import Storage
from tests.support.sources.robot_sets import RobotSet
from tests.support.tiers import first_here

FRONT, WRIST, TOP = "observation.images.front", "observation.images.wrist", "observation.images.top"
X264 = {"bf": "0", "preset": "ultrafast"}
SETS = {
    "shared videos": RobotSet(lengths=(9, 14, 6), per_video=3, cameras={FRONT: (32, 48), WRIST: (16, 16)}),
    "pictures between": RobotSet(
        lengths=(9, 14, 6),
        per_video=2,
        cameras={FRONT: (32, 48), WRIST: (16, 16)},
        codec=("libx264", X264 | {"bf": "2"}),
    ),
    "v2.1": RobotSet(lengths=(9, 14, 6), version="v2.1", cameras={FRONT: (32, 48), WRIST: (16, 16)}),
}


def stored(made: RobotSet, folder: Path) -> StreamingDataset:
    made.write(folder / "in")
    convert(f"{folder}/in", f"{folder}/set")
    assert index_video([f"{folder}/set/"], storage=Storage()).num_damaged == 0
    return StreamingDataset(f"{folder}/set/", shuffle=False)


def frames_of(data: bytes) -> np.ndarray[Any, Any]:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])])


@pytest.mark.parametrize("name", first_here(SETS, 1))
def test_a_window_holds_the_frames_and_steps_around_its_moment(name: str, tmp_path: Path) -> None:
    made = SETS[name]
    windows = Windows(
        stored(made, tmp_path),
        video={f"{FRONT}.mp4": [-0.2, 0.0], f"{WRIST}.mp4": [0.0]},
        columns={"action.npy": (0, 3), "timestamp.npy": [0]},
        carry=("json",),
    )
    assert len(windows) == sum(made.lengths)
    numbers = range(len(made.lengths))
    frames = {camera: [frames_of(made.video(camera, index)) for index in numbers] for camera in made.cameras}
    seen = []
    for row in windows:
        index, step = row["json"]["episode_index"], round(row["__time__"] * made.fps)
        seen.append((index, step))
        steps = made.steps(index)
        np.testing.assert_array_equal(row[f"{FRONT}.mp4"][0], frames[FRONT][index][max(0, step - 2)])
        np.testing.assert_array_equal(row[f"{FRONT}.mp4"][1], frames[FRONT][index][step])
        np.testing.assert_array_equal(row[f"{WRIST}.mp4"][0], frames[WRIST][index][step])
        assert row["__valid_frames__"].tolist() == [step >= 2, True, True]
        there = row["__valid_steps__"].tolist()[:3]
        np.testing.assert_array_equal(row["action.npy"][there], steps["action"][step : step + 3])
        np.testing.assert_allclose(row["timestamp.npy"], steps["timestamp"][step], atol=1e-6)
    assert sorted(seen) == [(index, step) for index, length in enumerate(made.lengths) for step in range(length)]


def test_two_robots_with_unlike_cameras_share_batches(tmp_path: Path) -> None:
    one = RobotSet(lengths=(6, 5), cameras={FRONT: (32, 48)})
    two = RobotSet(lengths=(4, 7), cameras={TOP: (48, 32)}, fps=20, seed=3)
    sources = {}
    for name, made, camera in (("one", one, FRONT), ("two", two, TOP)):
        names = {f"{camera}.mp4": "camera", "action.npy": "action"}
        video, columns = {f"{camera}.mp4": [0.0]}, {"action.npy": (0, 2)}
        recordings = stored(made, tmp_path / name)
        sources[name] = Windows(recordings, video=video, columns=columns, names=names, size=(16, 24))
    rows = 0
    with DataLoader(Mixture(sources), batch_size=5, last_batch="partial") as loader:
        for batch in loader:
            assert batch["camera"].shape[1:] == (1, 16, 24, 3)
            assert batch["action"].shape[1:] == (2, 3)
            rows += len(batch["action"])
    assert rows == 22
