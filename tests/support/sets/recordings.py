"""Recordings of robots: two cameras, what was done meanwhile, and a model of the windows over them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools import ShardWriter
from shard_tools.change.columns.video import index_video
from streaming import Video
from streaming.storage import Storage
from tests.support.sources import streams

RATE = 30
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One recording as it was written.

    Attributes:
        key: Its key.
        members: Its fields.
    """

    key: str
    members: Mapping[str, Any]


def npy(array: np.ndarray[Any, Any]) -> bytes:
    """An array as a file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def parquet(columns: Mapping[str, Any]) -> bytes:
    """A Parquet table of arrays."""
    arrays = {
        name: pa.array(values.tolist()) if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(
            pa.array(values.ravel()), values.shape[1]
        )
        for name, values in columns.items()
    }  # fmt: skip
    out = io.BytesIO()
    pq.write_table(pa.table(arrays), out)
    return out.getvalue()


def recorded(number: int, *, num_frames: int | None = None, size: tuple[int, int] = (32, 48)) -> Recorded:
    """A recording of 20 to 50 frames; cameras differ in their groups and numbers of frames."""
    count = num_frames or 20 + number * 7 % 31
    gop = (4, 7, 12)[number % 3]
    steps = np.arange(count)
    times = steps / RATE
    members: dict[str, Any] = {
        "front.mp4": streams.video("mp4", count, size=size, gop=gop, first=number),
        "wrist.mp4": streams.video("mp4", max(5, count - 3), size=size, gop=5, bframes=0, first=number + 50),
        "action.npy": npy((1000 * number + np.arange(count * 2)).reshape(count, 2).astype(np.float32)),
        "imu.npy": npy((1000 * number + np.arange(count * 4)).astype(np.int64)),  # 120 a second
        "force.npy": npy(np.arange(count // 2).astype(np.float64) + number),
        "force_time.npy": npy(np.arange(count // 2) * 2 / RATE + 0.01),
        "steps.parquet": parquet({"action": (np.arange(count * 3) + number).reshape(count, 3).astype(np.float32),
                                  "at": times, "reward": steps * number}),
        "json": {"task": f"task {number % 3}"},
    }  # fmt: skip
    return Recorded(key=f"{number:04d}", members=members)


def write(folder: Path, recordings: Sequence[Recorded], *, each: int = 3, index: bool = True) -> Path:
    """Write recordings to shards of ``each``, with an index of their videos."""
    columns = {"number": lambda sample: int(sample["__key__"])}
    with ShardWriter(str(folder / "{:03d}.tar"), max_samples=each, columns=columns) as writer:
        for one in recordings:
            writer.write({"__key__": one.key, **one.members})
    if index:
        index_video([str(folder)], storage=Storage(None), workers=1)
    return folder


def of_set(num: int = 7) -> list[Recorded]:
    """Recordings of a set."""
    return [recorded(number) for number in range(num)]


def damaged(folder: Path, target: Path, places: list[tuple[str, int]]) -> Path:
    """A copy of a set of which single bytes differ: each by shard and byte."""
    target.mkdir()
    (target / "_shardstream").symlink_to(folder / "_shardstream")
    for shard in sorted(folder.glob("*.tar")):
        data = bytearray(shard.read_bytes())
        for name, at in places:
            if name == shard.name:
                data[at] ^= 0xFF
        (target / shard.name).write_bytes(data)
    return target


# --- the model: whole videos, one row at a time ---


class Model:
    """The windows over recordings, from whole decoded videos and plain loops.

    Args:
        recordings: The recordings, in the order of the set.
        options: The options of ``Windows``.
    """

    def __init__(self, recordings: Sequence[Recorded], options: Mapping[str, Any]) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.places: list[tuple[int, int]] = []
        for number, one in enumerate(recordings):
            if any(name not in one.members for name in options["video"]):
                continue
            videos = {name: decoded(one.members[name], options.get("size")) for name in options["video"]}
            for place, row in enumerate(self._rows(one, videos)):
                self.rows.append(row)
                self.places.append((number, place))

    def _rows(self, one: Recorded, videos: Mapping[str, Any]) -> list[Row]:
        first = next(iter(videos.values()))
        every = self.options.get("every", "frame")
        if every == "frame":
            moments = list(first["times"])
        else:
            moments, number = [], 0
            while first["times"][0] + every * number < first["times"][-1] + 1 / RATE - 1e-6:
                moments.append(first["times"][0] + every * number)
                number += 1
        found = [self._row(one, videos, moment) for moment in moments]
        return [row for row in found if row is not None]

    def _row(self, one: Recorded, videos: Mapping[str, Any], moment: float) -> Row | None:
        names, first = self.options.get("names", {}), next(iter(videos.values()))
        frame, _ = shown(first["times"], moment)
        row: Row = {"__key__": one.key, "__time__": moment}
        there: list[bool] = []
        for name, offsets in self.options["video"].items():
            places = [shown(videos[name]["times"], moment + offset) for offset in offsets]
            row[names.get(name, name)] = np.stack([videos[name]["frames"][place] for place, _ in places])
            there += [valid for _, valid in places]
        steps: list[bool] = []
        reaches = not all(there)
        for name, wanted in self.options.get("columns", {}).items():
            table = _table(one, name)
            clock = self.options.get("clocks", {}).get(name)
            placed = [_step(wanted_one, moment, frame, first, clock, one) for wanted_one in _offsets(wanted)]
            row[names.get(name, name)] = np.stack([table[min(max(at, 0), len(table) - 1)] for at, _ in placed])
            steps += [0 <= at < len(table) for at, _ in placed]
            is_known = name.endswith(".npy") and not isinstance(clock, str)  # how many steps it has, from its size
            reaches |= not all(0 <= at < len(table) if is_known else within for at, within in placed)
        if self.options.get("edge") == "drop" and reaches:
            return None
        for name in self.options.get("carry", ()):
            row[names.get(name, name)] = one.members[name]
        row["__valid_frames__"] = np.array(there)
        if steps:
            row["__valid_steps__"] = np.array(steps)
        return row


@cache
def decoded(data: bytes, size: tuple[int, int] | None) -> Any:
    """All frames of a video, and their times."""
    return Video(details=True, size=size)(data)


def shown(times: Any, moment: float) -> tuple[int, bool]:
    """The frame shown at a moment, and whether there is one."""
    if moment < times[0] - 1e-6:
        return 0, False
    if moment >= times[-1] + 1 / RATE - 1e-6:
        return len(times) - 1, False
    return max(at for at, time in enumerate(times) if time <= moment + 1e-6), True


def _offsets(wanted: Any) -> list[float]:
    if isinstance(wanted, tuple):
        return list(range(*wanted))
    return list(wanted)


def _table(one: Recorded, name: str) -> Any:
    field, _, column = name.partition(":")
    if not column:
        return np.load(io.BytesIO(one.members[field]))
    values = pq.read_table(io.BytesIO(one.members[field])).column(column).to_pylist()
    return np.array(values, np.float32 if column == "action" else None)


def _step(offset: float, moment: float, frame: int, first: Any, clock: Any, one: Recorded) -> tuple[int, bool]:
    """The step of a table, and whether the moment lies within the recording."""
    in_seconds = isinstance(offset, float)
    if clock is None:
        if not in_seconds:
            return frame + int(offset), 0 <= frame + offset < len(first["times"])
        at, valid = shown(first["times"], moment + offset)
        return (at if valid else -1 if moment + offset < first["times"][0] else 10**9), valid
    reach = offset if in_seconds else 0.0 if isinstance(clock, str) else offset / clock
    within = shown(first["times"], moment + reach)[1]
    time = moment + (offset if in_seconds else 0.0)
    if isinstance(clock, str):
        at = int((_table(one, clock) <= time + 1e-6).sum()) - 1
    else:
        at = int(np.floor((time + 1e-6) * clock))
    return at + (0 if in_seconds else int(offset)), within


def differ(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """How a row differs from the model's; "": not at all."""
    for name, value in expected.items():
        got = found.get(name)
        same = np.array_equal(np.asarray(got), value) if isinstance(value, np.ndarray) else got == value
        if isinstance(value, np.ndarray) and same and np.asarray(got).dtype != value.dtype:
            return f"{name}: {np.asarray(got).dtype} for {value.dtype}"
        if not same:
            return f"{name}: {got!r:.400} for {value!r:.400}"
    extra = set(found) - set(expected) - {"__url__", "__source__", "__valid__"}
    return f"also {sorted(extra)}" if extra else ""


def task_of(sample: Mapping[str, Any]) -> str:
    """The task of a carried description."""
    return str(json.loads(json.dumps(sample["json"]))["task"])
