"""Windows of robot episodes: rows per CPU second, bytes and memory, beside LeRobot's own readers of the same set.

Run: ``python benchmarks/bench_windows.py [--rounds 3] [--lerobot /path/to/its/python]``, over data that it makes: 3
cameras, H.264, a key frame every two seconds.

A row has three frames of one camera (0.2 and 0.1 s ago, and now), one of each other, and 16 actions. The contestants
are processes that take turns; each delivers rows to Python as batches of 32, without workers, on the threads that it
has by default.

1. Rows per CPU second, user and system, all threads, from the open set on.
2. Bytes read of an epoch, over the bytes of all groups of pictures and tables.
3. The most memory that a process took.

``--lerobot`` is a Python that has lerobot, and torchcodec or torchvision (an environment of its own, since it asks for
other releases). The reader of tables is also made again here: rows by pyarrow, frames by PyAV at the place that the
table says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import made_once

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests are not installed

from shard_tools.change.columns.video import index_video  # noqa: E402
from shard_tools.make.convert import convert  # noqa: E402
from streaming.storage import Storage  # noqa: E402
from tests.support.sources.robot_sets import RobotSet  # noqa: E402

CAMERAS = {f"observation.images.{name}": (240, 320) for name in ("front", "side", "wrist")}
FRONT, SIDE, WRIST = CAMERAS
FPS, ACTIONS, BATCH = 30, 16, 32
MEASURED = """
import json, resource, sys, time

def used():
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)

def measured(batches, most, **more):
    rows, start = 0, used()
    for batch in batches:
        rows += len(batch["action"])
        if rows >= most:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"rows": rows, "cpu_s": used() - start, "peak_bytes": peak, **more}))
"""
OURS = """
import numpy as np
from streaming import DataLoader, StreamingDataset, Windows

folder, most, front, side, wrist = sys.argv[1], int(sys.argv[2]), *sys.argv[3:6]
windows = Windows(
    StreamingDataset(folder, seed=1),
    video={f"{front}.mp4": [-0.2, -0.1, 0.0], f"{side}.mp4": [0.0], f"{wrist}.mp4": [0.0]},
    columns={"action.npy": (0, %d)}, names={"action.npy": "action"},
)
with DataLoader(windows, %d, memory_limit="4GiB") as loader:
    measured(loader, most, total=len(windows))
    metrics = loader.metrics()
print(json.dumps({"read_bytes": metrics["storage_bytes"]}))
"""
LEROBOT = """
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset

folder, most, front, side, wrist, how = sys.argv[1], int(sys.argv[2]), *sys.argv[3:6], sys.argv[6]
torch.manual_seed(0)
deltas = {front: [-0.2, -0.1, 0.0], side: [0.0], wrist: [0.0], "action": [step / %d for step in range(%d)]}
if how == "streaming":
    dataset = StreamingLeRobotDataset("made/here", root=folder, delta_timestamps=deltas, buffer_size=100)
    loader = torch.utils.data.DataLoader(dataset, %d)
else:
    dataset = LeRobotDataset("made/here", root=folder, delta_timestamps=deltas, video_backend=how)
    loader = torch.utils.data.DataLoader(dataset, %d, shuffle=True)
measured(loader, most)
"""
TABLE = """
import bisect
from functools import lru_cache
import av, numpy as np, pyarrow as pa, pyarrow.parquet as pq, torch
from pathlib import Path

folder, most, *cameras = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
info = json.loads((folder / "meta/info.json").read_text())
steps = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("data/*/*.parquet"))])
episodes = [row for path in sorted(folder.glob("meta/episodes/*/*.parquet")) for row in pq.read_table(path).to_pylist()]
actions = np.array(steps.column("action").to_pylist(), np.float32)
of_row, times = steps.column("episode_index").to_numpy(), steps.column("timestamp").to_numpy()

@lru_cache(64)
def opened(path):
    container = av.open(str(path))
    container.streams.video[0].thread_type = "AUTO"
    return container, container.streams.video[0]

def frames(path, seconds):
    container, stream = opened(path)
    container.seek(int(max(0, min(seconds) - 1e-4) / stream.time_base), stream=stream)
    shown = []
    for frame in container.decode(stream):
        shown.append(frame)
        if frame.time >= max(seconds) - 1e-4:
            break
    return torch.stack([
        torch.from_numpy(min(shown, key=lambda one: abs(one.time - at)).to_ndarray(format="rgb24")) for at in seconds
    ])

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(of_row)

    def __getitem__(self, row):
        episode = episodes[of_row[row]]
        low, high = episode["dataset_from_index"], episode["dataset_to_index"] - 1
        found = {"action": actions[np.clip(np.arange(row, row + %d), low, high)]}
        for camera, deltas in zip(cameras, ((-0.2, -0.1, 0.0), (0.0,), (0.0,))):
            numbers = {key: episode[f"videos/{camera}/{key}"] for key in ("chunk_index", "file_index")}
            path = folder / info["video_path"].format(video_key=camera, **numbers)
            begin = episode[f"videos/{camera}/from_timestamp"]
            found[camera] = frames(path, [begin + max(0.0, float(times[row]) + delta) for delta in deltas])
        return found

torch.manual_seed(0)
measured(torch.utils.data.DataLoader(Rows(), %d, shuffle=True), most)
"""


def make_lerobot(folder: str, episodes: int, seconds: int) -> None:
    """Write the set: the videos of all episodes in one file for each camera, as LeRobot does up to 200 MB."""
    codec = (
        "libx264",
        {"g": str(2 * FPS), "bf": "0", "preset": "veryfast", "keyint_min": str(2 * FPS), "sc_threshold": "0"},
    )
    lengths = [seconds * FPS] * episodes
    many = {"per_video": episodes, "per_table": episodes, "grain": 40}
    RobotSet(lengths=lengths, cameras=CAMERAS, fps=FPS, codec=codec, **many).write(Path(folder))


def run(python: str, program: str, folder: str, most: int, how: str) -> dict[str, Any]:
    """Run a contestant in a process of its own; return what it measured."""
    environ = os.environ | {"PYTHONPATH": str(ROOT) if python == sys.executable else "", "HF_HUB_OFFLINE": "1"}
    command = [python, "-c", MEASURED + program, folder, str(most), FRONT, SIDE, WRIST, how]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise SystemExit(f"{how}: {done.stderr[-3000:]}")
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def contestants(given: argparse.Namespace, source: str, shards: str) -> dict[str, tuple[str, str, str, str]]:
    """Return (python, program, folder, argument) by name."""
    found = {
        "Windows": (sys.executable, OURS % (ACTIONS, BATCH), shards, "0"),
        "table reader, PyAV (made here)": (sys.executable, TABLE % (ACTIONS, BATCH), source, "pyav"),
    }
    if given.lerobot:
        program = LEROBOT % (FPS, ACTIONS, BATCH, BATCH)
        for how in given.backends.split(","):
            found[f"lerobot, {how}"] = (given.lerobot, program, source, how)
    return found


def main() -> None:
    """Make the set, let the contestants take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-bench"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=640, help="rows of a turn; Windows deliver an epoch")
    parser.add_argument("--lerobot", default="", help="a Python that has lerobot")
    parser.add_argument("--backends", default="torchcodec,streaming", help="of lerobot: torchcodec, pyav, streaming")
    given = parser.parse_args()
    name = f"robots-{given.episodes}x{given.seconds}-grain40"
    source = made_once(given.data, name, lambda folder: make_lerobot(folder, given.episodes, given.seconds))

    def make_shards(folder: str) -> None:
        convert(source, folder)
        index_video([f"{folder}/"], storage=Storage())

    shards = made_once(given.data, f"{name}-shards", make_shards)
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(given.rounds):
        for one, (python, program, folder, how) in contestants(given, source, shards).items():
            most = given.rows if one != "Windows" else 1 << 40
            found.setdefault(one, []).append(run(python, program, folder, most, how))
            print(one, found[one][-1], file=sys.stderr, flush=True)
    whole = sum(path.stat().st_size for path in Path(shards).glob("*.tar"))
    print("| reader | rows per CPU second | lowest | memory, MB |\n|---|---|---|---|")
    for one, each in found.items():
        rates = [turn["rows"] / turn["cpu_s"] for turn in each]
        peak = max(turn["peak_bytes"] for turn in each) / 1e6
        print(f"| {one} | {statistics.median(rates):,.0f} | {min(rates):,.0f} | {peak:,.0f} |")
    read = max(turn["read_bytes"] for turn in found["Windows"])
    print(f"\nWindows read {read / 1e6:.1f} MB of shards of {whole / 1e6:.1f} MB: {read / whole:.2f} of them")


if __name__ == "__main__":
    main()
