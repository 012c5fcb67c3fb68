"""LeRobot sets as its own programs write them: tables of steps, MP4 files of one or several episodes, descriptions."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from shard_tools.make.convert.robots.layout import DATA, EPISODES, VIDEO, joined_statistics
from tests.support.sources import streams

TASKS = ("pick the cube", "pour the tea", "stack the blocks")
STATE = 3
_OLD_NAME = "chunk-{episode_chunk:03d}/episode_{episode_index:06d}"


@dataclass(frozen=True, kw_only=True)
class RobotSet:
    """What a set is made of.

    Attributes:
        lengths: Number of steps of each episode.
        cameras: Height and width of each camera's frames.
        per_video: Number of episodes in one MP4 file.
        per_table: Number of episodes in one Parquet file.
        per_group: Whether each episode is a row group, as LeRobot records them; else a table is one, as it converts.
        version: Version of the format.
        images: Names of features with an encoded image for each step.
        codec: FFmpeg's encoder, and its options.
        grain: Noise in each frame, so that it takes bytes.
    """

    lengths: Sequence[int]
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {"observation.images.front": (32, 48)})
    per_video: int = 3
    per_table: int = 4
    per_group: bool = True
    version: str = "v3.0"
    fps: int = 10
    images: Sequence[str] = ()
    codec: tuple[str, Mapping[str, str]] = ("libx264", {"g": "4", "bf": "0", "preset": "ultrafast"})
    seed: int = 0
    grain: int = 0

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The features in ``info.json``."""
        found: dict[str, dict[str, Any]] = {
            "action": {"dtype": "float32", "shape": [STATE], "names": ["a", "b", "c"]},
            "observation.state": {"dtype": "float32", "shape": [STATE], "names": None},
            "observation.grid": {"dtype": "int64", "shape": [2, 2], "names": None},
            "next.done": {"dtype": "bool", "shape": [1], "names": None},
            "note": {"dtype": "string", "shape": [1], "names": None},
        }
        for name, (height, width) in self.cameras.items():
            info = {"video.fps": self.fps, "video.codec": "h264"}
            found[name] = {"dtype": "video", "shape": [height, width, 3], "names": ["h", "w", "c"], "info": info}
        for name in self.images:
            found[name] = {"dtype": "image", "shape": [8, 8, 3], "names": ["h", "w", "c"]}
        found["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
        for name in ("frame_index", "episode_index", "index", "task_index"):
            found[name] = {"dtype": "int64", "shape": [1], "names": None}
        return found

    def steps(self, index: int) -> dict[str, Any]:
        """The columns of an episode."""
        length, rng = self.lengths[index], np.random.default_rng([self.seed, index])
        before = sum(self.lengths[:index])
        found: dict[str, Any] = {
            "action": rng.standard_normal((length, STATE)).astype(np.float32),
            "observation.state": rng.standard_normal((length, STATE)).astype(np.float32),
            "observation.grid": rng.integers(0, 9, (length, 2, 2)),
            "next.done": np.arange(length) == length - 1,
            "note": [f"step {number} of {index}" for number in range(length)],
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, index),
            "index": np.arange(before, before + length),
            "task_index": np.full(length, index % len(TASKS)),
        }
        for name in self.images:
            found[name] = [{"bytes": _png(index + number), "path": f"{number}.png"} for number in range(length)]
        return found

    def table(self, index: int) -> pa.Table:
        """The steps of an episode, with the types of LeRobot's files."""
        columns = {}
        for name, values in self.steps(index).items():
            if isinstance(values, list) or values.ndim == 1:
                columns[name] = pa.array(values)
            elif values.ndim == 2:
                columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            else:
                columns[name] = pa.array(values.tolist())
        return pa.table(columns)

    def statistics(self, index: int) -> dict[str, dict[str, Any]]:
        """The statistics of an episode, of its numbers and its cameras."""
        found = {}
        for name, values in self.steps(index).items():
            if isinstance(values, list) or values.dtype == bool:
                continue
            rows = values.reshape(len(values), *(values.shape[1:] or (1,))).astype(np.float64)
            found[name] = {
                "min": rows.min(0).tolist(), "max": rows.max(0).tolist(), "mean": rows.mean(0).tolist(),
                "std": rows.std(0).tolist(), "count": [len(rows)], "q50": np.median(rows, 0).tolist(),
            }  # fmt: skip
        for name in self.cameras:
            numbers = {"min": 0.0, "max": 1.0, "mean": 0.5, "std": 0.25}
            found[name] = {key: [[[one]]] * 3 for key, one in numbers.items()} | {"count": [self.lengths[index]]}
        return found

    def video(self, camera: str, index: int) -> bytes:
        """The video of an episode, as its encoder writes it."""
        height, width = self.cameras[camera]
        codec, options = self.codec
        salt = 1000 * index + 7 * list(self.cameras).index(camera) + 31 * self.seed
        out = io.BytesIO()
        with av.open(out, "w", format="mp4") as container:
            stream = container.add_stream(codec, rate=self.fps, options={**options, "threads": "1"})
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            for number in range(self.lengths[index]):
                frame = av.VideoFrame.from_ndarray(streams.picture(salt + number, height, width, self.grain))
                frame.pts, frame.time_base = number, Fraction(1, self.fps)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return out.getvalue()

    # ------------------------------------------------------------------------------------------------ the files

    def write(self, folder: Path) -> Path:
        """Write the set."""
        rows = [self._row(index) for index in range(len(self.lengths))]
        old = self.version.startswith("v2")
        self._write_tables(folder, rows, old=old)
        for camera in self.cameras:
            self._write_videos(folder, camera, rows, old=old)
        info = {
            "codebase_version": self.version, "robot_type": "so100", "total_episodes": len(self.lengths),
            "total_frames": sum(self.lengths), "total_tasks": len(TASKS), "chunks_size": 1000, "fps": self.fps,
            "data_files_size_in_mb": 100, "video_files_size_in_mb": 200,
            "splits": {"train": f"0:{len(self.lengths)}"}, "features": self.features,
            "data_path": f"data/{_OLD_NAME}.parquet" if old else DATA,
            "video_path": f"videos/{_OLD_NAME}.mp4".replace("/episode", "/{video_key}/episode") if old else VIDEO,
        }  # fmt: skip
        each = [self.statistics(index) for index in range(len(self.lengths))]
        (folder / "meta").mkdir(parents=True, exist_ok=True)
        (folder / "meta/info.json").write_text(json.dumps(info))
        if old:
            _lines(folder / "meta/tasks.jsonl", [{"task_index": n, "task": one} for n, one in enumerate(TASKS)])
            _lines(folder / "meta/episodes.jsonl", [{key: row[key] for key in _OLD_ROW} for row in rows])
            told = [{"episode_index": index, "stats": one} for index, one in enumerate(each)]
            _lines(folder / "meta/episodes_stats.jsonl", told)
            return folder
        (folder / "meta/stats.json").write_text(json.dumps(joined_statistics(each)))
        tasks = pd.DataFrame({"task_index": range(len(TASKS))}, index=list(TASKS))  # texts are the index, as there
        tasks.to_parquet(folder / "meta/tasks.parquet")
        flat = [
            row | {f"stats/{name}/{key}": value for name, some in each[index].items() for key, value in some.items()}
            for index, row in enumerate(rows)
        ]
        path = folder / EPISODES.format(chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(flat), path, row_group_size=10)
        return folder

    def _row(self, index: int) -> dict[str, Any]:
        before = sum(self.lengths[:index])
        return {
            "episode_index": index, "tasks": [TASKS[index % len(TASKS)]], "length": self.lengths[index],
            "data/chunk_index": 0, "data/file_index": index // self.per_table, "dataset_from_index": before,
            "dataset_to_index": before + self.lengths[index], "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0, "success": index % 2 == 0,
        }  # fmt: skip

    def _write_tables(self, folder: Path, rows: Sequence[dict[str, Any]], *, old: bool) -> None:
        by_file: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            name = f"data/chunk-000/episode_{index:06d}.parquet" if old else _named(DATA, row["data/file_index"])
            by_file.setdefault(name, []).append(index)
        for name, some in by_file.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            tables = [self.table(index) for index in some]
            with pq.ParquetWriter(path, tables[0].schema) as writer:
                for table in tables if self.per_group else [pa.concat_tables(tables)]:
                    writer.write_table(table)

    def _write_videos(self, folder: Path, camera: str, rows: Sequence[dict[str, Any]], *, old: bool) -> None:
        per = 1 if old else self.per_video
        for number, first in enumerate(range(0, len(rows), per)):
            some = range(first, min(first + per, len(rows)))
            name = f"videos/chunk-000/{camera}/episode_{first:06d}.mp4"
            path = folder / (name if old else _named(VIDEO, number, video_key=camera))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(concatenated([self.video(camera, index) for index in some]))
            at = 0
            for index in some:
                end = at + self.lengths[index]
                rows[index][f"videos/{camera}/chunk_index"] = 0
                rows[index][f"videos/{camera}/file_index"] = number
                rows[index][f"videos/{camera}/from_timestamp"] = at / self.fps
                rows[index][f"videos/{camera}/to_timestamp"] = end / self.fps
                at = end


_OLD_ROW = ("episode_index", "tasks", "length")


def _png(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, 7, 9)).save(out, "PNG")
    return out.getvalue()


def _lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _named(template: str, number: int, **more: str) -> str:
    return template.format(chunk_index=0, file_index=number, **more)


def concatenated(videos: Sequence[bytes]) -> bytes:
    """Join videos of one encoder without encoding them, as LeRobot does."""
    if len(videos) == 1:
        return videos[0]
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as target:
        copy: Any = None
        at = 0
        for data in videos:
            with av.open(io.BytesIO(data)) as source:
                stream = source.streams.video[0]
                if copy is None:
                    copy = target.add_stream_from_template(stream, opaque=True)
                    copy.time_base = stream.time_base
                first = stream.start_time or 0
                end = 0
                for packet in source.demux(stream):
                    if packet.dts is None or packet.pts is None:
                        continue
                    end = max(end, packet.pts - first + (packet.duration or 0))
                    packet.pts, packet.dts = packet.pts - first + at, packet.dts - first + at
                    packet.stream = copy
                    target.mux(packet)
                at += end
    return out.getvalue()


def packets(data: bytes) -> list[tuple[float, bytes]]:
    """Return the packets of a video that are shown, by time after the first frame, in order of decoding."""
    with av.open(io.BytesIO(data)) as source:
        stream = source.streams.video[0]
        first = stream.start_time or 0
        return [
            (float((one.pts - first) * stream.time_base), bytes(one))
            for one in source.demux(stream)
            if one.pts is not None and not one.is_discard
        ]


def robots(folder: Path, count: int) -> Path:
    """A set of this many short episodes."""
    return RobotSet(lengths=[3 + number % 4 for number in range(count)]).write(folder)


@dataclass(frozen=True, kw_only=True)
class ReadEpisode:
    """An episode as LeRobot's published layout (v3.0) gives it: its row, its steps, the frames of its cameras."""

    row: Mapping[str, Any]
    steps: pa.Table
    frames: Mapping[str, np.ndarray[Any, Any]]
    tasks: Sequence[str]


def read_set(folder: Path) -> list[ReadEpisode]:
    """Read a set of v3.0 by its layout alone, with pyarrow and PyAV, as LeRobot's reader finds steps and frames."""
    info = json.loads((folder / "meta/info.json").read_text())
    rows = [
        row
        for path in sorted(folder.glob("meta/episodes/*/*.parquet"))
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    tables = [pq.ParquetFile(path).read() for path in sorted(folder.glob("data/*/*.parquet"))]
    steps = pa.concat_tables([table.replace_schema_metadata(None) for table in tables])
    assert steps.column("index").to_pylist() == list(range(info["total_frames"])), "rows are found by their place"
    assert [row["episode_index"] for row in rows] == list(range(info["total_episodes"])), "and so are episodes"
    tasks = pq.ParquetFile(folder / "meta/tasks.parquet").read()
    text = next(name for name in tasks.schema.names if name != "task_index")
    texts = tasks.column(text).to_pylist()
    cameras = [name for name, one in info["features"].items() if one["dtype"] == "video"]
    decoded: dict[Path, list[tuple[float, np.ndarray[Any, Any]]]] = {}
    found = []
    for row in rows:
        first, stop = row["dataset_from_index"], row["dataset_to_index"]
        frames = {}
        for camera in cameras:
            numbers = {key: row[f"videos/{camera}/{key}"] for key in ("chunk_index", "file_index")}
            path = folder / info["video_path"].format(video_key=camera, **numbers)
            shown = decoded.setdefault(path, _decoded(path)) if path not in decoded else decoded[path]
            wanted = row[f"videos/{camera}/from_timestamp"] + np.arange(stop - first) / info["fps"]
            frames[camera] = np.stack([min(shown, key=lambda one, at=time: abs(one[0] - at))[1] for time in wanted])
        part = steps.slice(first, stop - first)
        tasks_of = [texts[number] for number in part.column("task_index").to_pylist()]
        found.append(ReadEpisode(row=row, steps=part, frames=frames, tasks=tasks_of))
    return found


def _decoded(path: Path) -> list[tuple[float, np.ndarray[Any, Any]]]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
