"""Frames of windows equal those of whole decoded videos: every codec, kind of group, container, rate and rotation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streaming import StreamingDataset, Video, Windows
from tests.support.sets import recordings
from tests.support.sources import drawn_videos, streams
from tests.support.tiers import first_here


def check(folder: Path, data: bytes) -> None:
    """Compare all rows of a video with the whole of it."""
    name = "front.mkv" if data[:4] == b"\x1a\x45\xdf\xa3" else "front.mp4"
    recordings.write(folder, [recordings.Recorded(key="0", members={name: data})])
    windows, whole = Windows(StreamingDataset(folder), video={name: [-0.1, 0.0]}, groups=1), Video(details=True)(data)
    assert isinstance(whole, dict)
    assert [row["__time__"] for row in windows] == whole["times"].tolist()
    for number, row in enumerate(windows):
        before, _ = recordings.shown(whole["times"], whole["times"][number] - 0.1)
        assert np.array_equal(row[name], whole["frames"][[before, number]])


@pytest.mark.parametrize("number", first_here(range(27), 4))
def test_of_every_codec(tmp_path: Path, number: int) -> None:
    _, data = drawn_videos.drawn_video(number, 5)
    check(tmp_path / "set", data)


MADE = {
    "varying rate": lambda: streams.video(num_frames=50, varying=True),
    "turned": lambda: streams.remuxed(streams.video(num_frames=20), turn=90),
    "an edit list": lambda: streams.remuxed(streams.video(num_frames=30), earlier=streams.TICKS // 5),
    "beside sound": lambda: streams.video(num_frames=40, streams=2, sound_s=1.0),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_of_other_files(tmp_path: Path, make: object) -> None:
    assert callable(make)
    check(tmp_path / "set", make())
