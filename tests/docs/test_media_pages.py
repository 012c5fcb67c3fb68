"""Sound and video for users: the page runs as it stands, and the examples learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shard_tools import ShardWriter
from tests.support.code.folders import EXAMPLES, ROOT
from tests.support.code.page_blocks import PYTHON, blocks, run_python
from tests.support.processes.forked import Forked
from tests.support.sources import streams

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # the examples learn

PROGRAM = """
import os, runpy, sys
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(name, None)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ShardWriter("recordings/{:06d}.tar", max_samples=4) as writer:
        for number in range(8):
            seconds = 2.0 + number % 3
            fields = {
                "flac": streams.sound("flac", seconds, channels=2),
                "mp4": streams.video("mp4", round(30 * seconds)),
            }
            writer.write({"__key__": f"{number}", **fields})
    page = ROOT / "docs" / "sound-and-video.md"
    found = [block for block in blocks(page.read_text()) if block.language in PYTHON]
    names: dict[str, object] = {}
    for block in found:
        assert block.excuse is None
        run_python(block, names, page)
    assert len(found) == 5
    batch = names["batch"]
    assert isinstance(batch, dict)
    assert batch["audio"].shape == (8, 160_000)
    assert min(batch["length"].tolist()) == 32_000


def test_the_policy_learns_from_both_robots(forked: Forked, tmp_path: Path) -> None:
    words = (str(EXAMPLES / "train_policy.py"), "--out", str(tmp_path / "out"), "--epochs", "4", "--count", "16")
    example = forked.start(PROGRAM, *words, output=tmp_path / "output", leads=True)
    assert example.wait_for_all(800) == 0, (tmp_path / "output").read_text()
    said = (tmp_path / "output").read_text()
    errors = [float(one) for found in re.findall(r"error ([\d.]+) and ([\d.]+)", said) for one in found]
    assert len(errors) == 8
    assert max(errors[-2:]) < 0.7, said  # 1 is an error as long as a step
    assert (tmp_path / "out" / "train_policy.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("name", "arguments", "least"),
    [
        ("speech.py", ("--epochs", "5", "--per-word", "60"), 60),  # by chance 17
        ("video_clips.py", ("--epochs", "5", "--count", "200"), 60),  # by chance 25
    ],
)
def test_the_examples_learn(forked: Forked, tmp_path: Path, name: str, arguments: tuple[str, ...], least: int) -> None:
    words = (str(EXAMPLES / name), "--out", str(tmp_path / "out"), *arguments)
    example = forked.start(PROGRAM, *words, output=tmp_path / "output", leads=True)
    assert example.wait_for_all(800) == 0, (tmp_path / "output").read_text()
    said = (tmp_path / "output").read_text()
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", said)]
    assert len(accuracies) == 5
    assert accuracies[-1] > least, said
    picture = re.search(r"picture: (\S+)", said)
    assert picture is not None
    assert Path(picture[1]).stat().st_size > 5_000
