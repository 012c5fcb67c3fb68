"""Make the descriptions of a LeRobot set: its episodes, tasks and statistics. Pure."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.make.convert.robots.layout import DATA, OF_EPISODE, SERIAL, VERSION, VIDEO
from streaming.errors import ConfigError

_MOST_UNUSED = 100_000
_OLD = ("total_chunks", "total_videos")


def parquet_of(table: pa.Table, metadata: Mapping[bytes, bytes]) -> bytes:
    """Return a table as a Parquet file with this metadata."""
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(dict(metadata)), out, compression="snappy")
    return out.getvalue()


def episode_table(rows: Sequence[Mapping[str, Any]], stats: Sequence[Mapping[str, Mapping[str, Any]]]) -> pa.Table:
    """Return the table of some episodes.

    Args:
        rows: What holds for each of them.
        stats: The statistics of each, by feature.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    kinds = dict.fromkeys((feature, kind) for one in stats for feature, some in one.items() for kind in some)
    for feature, kind in kinds:
        values = [one.get(feature, {}).get(kind) for one in stats]
        first = next((value for value in values if value is not None), None)
        item = pa.int64() if kind == "count" else pa.float64()
        columns[f"stats/{feature}/{kind}"] = pa.array(values, _lists_of(item, first))
    return pa.table(columns)


def _lists_of(item: pa.DataType, value: object) -> pa.DataType:
    return pa.list_(_lists_of(item, value[0] if value else None)) if isinstance(value, list) else item


class TaskNumbers:
    """The texts of tasks, or of subtasks, by their numbers. TaskNumbers keep their numbers where no other has them.

    Attributes:
        numbers: The number of each text.
        num_moved: Number of texts that got another number.
    """

    def __init__(self, kind: str, numbers: Mapping[str, int] | None = None) -> None:
        self._kind = kind
        self.numbers = dict(numbers or {})
        self._used = set(self.numbers.values())
        self.num_moved = 0

    def taken(self, texts: Mapping[int, str]) -> dict[int, int]:
        """Add the texts of an episode; return their numbers here by their numbers there."""
        moves = {}
        for there, text in texts.items():
            here = self.numbers.get(text)
            if here is None:
                here = there
                if here in self._used:
                    here = next(number for number in range(len(self._used) + 1) if number not in self._used)
                    self.num_moved += 1
                self.numbers[text] = here
                self._used.add(here)
            moves[there] = here
        return moves

    def table(self) -> bytes:
        """Return them as LeRobot reads them: by place, so that numbers without a text get one that says so.

        Raises:
            ConfigError: Most numbers have no text.
        """
        most = max(self._used, default=-1) + 1
        if most > 2 * len(self._used) + _MOST_UNUSED:
            raise ConfigError(f"numbers of {self._kind}s up to {most - 1}, and {len(self._used)} texts; renumber them")
        by_number = {number: text for text, number in self.numbers.items()}
        texts = [by_number.get(number, f"(unused {number})") for number in range(most)]
        index, column = self._kind, f"{self._kind}_index"
        table = pa.table({column: pa.array(range(most), pa.int64()), index: pa.array(texts, pa.string())})
        described = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for name, kind, numpy in ((column, "int64", "int64"), (index, "unicode", "object"))
        ]
        facts = {"index_columns": [index], "column_indexes": [], "columns": described, "pandas_version": "2.0.0"}
        return parquet_of(table, {b"pandas": json.dumps(facts).encode()})


def info_of(content: Mapping[str, Any], *, num_episodes: int, num_steps: int, num_tasks: int) -> dict[str, Any]:
    """Return ``info.json`` of the episodes that are written, from that of the set that they come from."""
    found = {name: value for name, value in content.items() if name not in _OLD}
    has_videos = any(one.get("dtype") == "video" for one in content["features"].values())
    whole = content.get("total_episodes") == num_episodes and content.get("splits")
    return found | {
        "codebase_version": VERSION, "total_episodes": num_episodes, "total_frames": num_steps,
        "total_tasks": num_tasks, "splits": content["splits"] if whole else {"train": f"0:{num_episodes}"},
        "data_path": DATA, "video_path": VIDEO if has_videos or content.get("video_path") == VIDEO else None,
        "chunks_size": content.get("chunks_size", 1000),
        "data_files_size_in_mb": content.get("data_files_size_in_mb", 100),
        "video_files_size_in_mb": content.get("video_files_size_in_mb", 200),
    }  # fmt: skip


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return in what two sets differ, so that they cannot be one; "" if they do not."""
    for name in ("fps", "robot_type"):
        if one.get(name) != other.get(name):
            return f"{name} is {one.get(name)!r} and {other.get(name)!r}"
    mine, theirs = ({name: _shape(said) for name, said in some["features"].items()} for some in (one, other))
    for name in dict.fromkeys((*mine, *theirs)):
        if mine.get(name) != theirs.get(name):
            return f"feature {name!r} is {_told(mine.get(name))} and {_told(theirs.get(name))}"
    return ""


def _shape(said: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    return said["dtype"], tuple(said.get("shape") or ())


def _told(one: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if one is None else f"{one[0]} {[*one[1]]}"


def check_features(names: Iterable[str]) -> None:
    """Refuse a set without the features that number its steps.

    Raises:
        ConfigError: One is missing.
    """
    there = {*names}
    lacks = [name for name in SERIAL if name not in there]
    if lacks:
        raise ConfigError(f"--to lerobot: the episodes have no feature {lacks[0]!r}, which every LeRobot set has")


def plain_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further columns of an episode; names of LeRobot's own are left out."""
    return {name: value for name, value in notes.items() if name not in OF_EPISODE}
