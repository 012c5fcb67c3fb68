"""Write a LeRobot set (v3.0): the inverse of ``convert --from lerobot``.

Each episode's videos are files of their own, byte by byte those of the sample. Tables of steps hold several episodes,
one in each row group, and beside each stands its table of episodes, which completes it: an interrupted run goes on
behind the last one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.change.export.job import ExportJob, Written
from shard_tools.change.export.lerobot_meta import (
    TaskNumbers,
    check_features,
    episode_table,
    info_of,
    parquet_of,
    plain_notes,
    unlike,
)
from shard_tools.change.sets.bad_list import BadList
from shard_tools.change.sets.rewrite.selection import Taken, select
from shard_tools.change.sets.rewrite.shard_source import ShardSource
from shard_tools.make.convert.base.records import Record
from shard_tools.make.convert.journal import TargetNotEmptyError
from shard_tools.make.convert.robots.layout import (
    DATA,
    EPISODES,
    INFO,
    STATS,
    SUBTASKS,
    TASKS,
    VIDEO,
    Feature,
    features_of,
    joined_statistics,
    numbered_path,
)
from shard_tools.make.convert.robots.lerobot import NOTE
from shard_tools.make.convert.robots.tables import column_of, type_of, unpacked
from shard_tools.running.progress import NoProgress, Progress
from streaming.build.decode.arrays import npy
from streaming.errors import ConfigError, DataError
from streaming.storage import join_url, redact
from streaming.types import Int64Array

MARK = "meta/shardstream.json"
"""File that names the samples that the files hold, and says whether all files are there."""
_FACTS = b"shardstream-export"
_GROUP_BYTES, _GROUP_EPISODES = 64 << 20, 1000
_WINDOW_BYTES = 64 << 20
_INDEX = "episode_index"
_FOLDERS = ("data/", "meta/", "videos/")
_log = logging.getLogger(__name__)


def write(job: ExportJob, progress: Progress) -> Written:
    """Write the selected episodes, in the order of their numbers, as a LeRobot set.

    Raises:
        ConfigError: The samples are no episodes of LeRobot sets, or of sets that cannot be one.
        TargetNotEmptyError: The target holds other files.
        DataError: A sample is damaged.
    """
    options = job.options
    taken = select(
        job.opened, job.storage, kept=job.opened.kept(job.storage, where=options.where, view=options.view), late=(),
        drop=BadList(by_shard={}, num_unreadable=0), needed=(), fields=None, with_keys=False, progress=NoProgress(),
    )  # fmt: skip
    if not taken.num_samples:
        raise ConfigError("no sample is left: --where or --view keeps none")
    order = _order_of(taken)
    said = hashlib.sha256(f"{job.fingerprint}\0{taken.digest()}".encode() + order.astype("<i8").tobytes()).hexdigest()
    export = _Export(job=job, identity=said, total=taken.num_samples)
    there = export.begin()
    source = ShardSource(
        taken, order, job.storage, fingerprint=job.fingerprint, fields=None, window_bytes=_WINDOW_BYTES, num_threads=2
    )
    if not there:
        with closing(source.records(export.num_episodes)) as records:
            for record in records:
                export.add(record)
                progress.advance(num_bytes=sum(map(len, record.fields.values())))
        export.finish()
    progress.advance(num=len(job.opened.urls))
    return Written(files=tuple(export.files), num_samples=taken.num_samples, num_bytes=export.num_bytes)


def _order_of(taken: Taken) -> Int64Array:
    """Return the samples in the order of their numbers as episodes, if each has one of its own; else as they are."""
    values = [part.columns.get(_INDEX) for part in taken.parts if part.rows.size]
    known = [one for one in values if one is not None and pa.types.is_integer(one.type) and not one.null_count]
    plain = np.arange(taken.num_samples)
    if len(known) != len(values):
        return plain
    numbers = np.concatenate([one.to_numpy() for one in known])
    if np.unique(numbers).size != numbers.size:
        _log.warning("several samples have one episode_index, as those of several sets: numbered in the set's order")
        return plain
    return np.argsort(numbers, kind="stable").astype(np.int64)


@dataclass(slots=True)
class _Group:
    """Episodes that share a table of steps."""

    steps: list[pa.Table] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(kw_only=True)
class _Export:
    """The state of an export. Used by one thread.

    Attributes:
        job: The export.
        identity: Names its samples, in their order.
        total: Number of its episodes.
        files: Names of all files so far, with whether this run wrote them.
        num_episodes: Number of episodes so far.
        num_bytes: Bytes of the samples that this run read.
    """

    job: ExportJob
    identity: str
    total: int
    files: list[tuple[str, bool]] = field(default_factory=list)
    num_episodes: int = 0
    num_bytes: int = 0
    _num_steps: int = 0
    _num_groups: int = 0
    _num_renumbered: int = 0
    _first: Mapping[str, Any] | None = None
    _first_key: str = ""
    _features: tuple[Feature, ...] = ()
    _group: _Group = field(default_factory=_Group)
    _stats: list[dict[str, Any]] = field(default_factory=list)  # of each group
    _same_stats: bool = True
    _tasks: TaskNumbers = field(default_factory=lambda: TaskNumbers("task"))
    _subtasks: TaskNumbers = field(default_factory=lambda: TaskNumbers("subtask"))

    # -------------------------------------------------------------------------------------------- what is there

    def begin(self) -> bool:
        """Look at the target; return whether an earlier run has written everything. Else go on behind it.

        Raises:
            TargetNotEmptyError: It holds other files.
        """
        storage, target = self.job.storage, self.job.target
        base = target.rstrip("/") + "/"
        there = [info.url.removeprefix(base) for info in storage.list(target)]
        there = [name for name in there if name.startswith(_FOLDERS)]
        mark = self._mark() if MARK in there else {}
        if mark.get("samples") == self.identity:
            if mark.get("complete"):
                self.files = [(name, False) for name in sorted({*there} - {MARK})]
                return True
            self._go_on({*there})
            return False
        if there and not self.job.options.overwrite:
            raise TargetNotEmptyError(
                f"{redact(target)}: it holds {there[0]}, which is not of these samples; give another target, or "
                "--overwrite, which deletes what is in data/, meta/ and videos/ there"
            )
        for name in sorted(there, key=lambda name: name == MARK):  # the mark last
            storage.delete(join_url(target, name))
        self._write_mark(is_complete=False)
        return False

    def _mark(self) -> Mapping[str, Any]:
        try:
            content = json.loads(bytes(self.job.storage.read(join_url(self.job.target, MARK))))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _write_mark(self, *, is_complete: bool) -> None:
        content = {"written_by": "shard_tools export", "samples": self.identity, "complete": is_complete}
        self.job.storage.put(join_url(self.job.target, MARK), json.dumps(content).encode())

    def _go_on(self, there: set[str]) -> None:
        """Take over the groups of an earlier run up to the first that is not complete."""
        while (name := numbered_path(EPISODES, self._num_groups)) in there:
            data = self.job.storage.read(join_url(self.job.target, name))
            try:
                table = pq.ParquetFile(pa.BufferReader(data)).read()
                state = json.loads((table.schema.metadata or {})[_FACTS])
            except (pa.ArrowException, OSError, ValueError, KeyError):
                return  # it is written again
            self._first, self._first_key, self._same_stats = state["first"], state["first_key"], state["same_stats"]
            self._features = features_of(self._first["info"]["features"], INFO)
            self._tasks, self._subtasks = TaskNumbers("task", state["tasks"]), TaskNumbers("subtask", state["subtasks"])
            self._num_steps, self._num_renumbered = state["num_steps"], state["num_renumbered"]
            self._stats.append(state["stats"])
            for number in range(self.num_episodes, state["num_episodes"]):
                self.files += [(path, False) for path in self._video_paths(number).values()]
            self.files += [(numbered_path(DATA, self._num_groups), False), (name, False)]
            self.num_episodes = state["num_episodes"]
            self._num_groups += 1

    # ------------------------------------------------------------------------------------------------- episodes

    def add(self, record: Record) -> None:
        """Write the videos of an episode, and collect its steps.

        Raises:
            ConfigError: It is no episode of a LeRobot set, or of another kind of set than the first.
            DataError: A field is damaged.
        """
        said = self._said(record)
        index, group = self.num_episodes, self._group
        for name, path in self._video_paths(index).items():
            self._put(path, self._field(record, name))
        moves = {
            "task": self._tasks.taken(said["texts"].get("task", {})),
            "subtask": self._subtasks.taken(said["texts"].get("subtask", {})),
        }
        steps = self._steps(record, index, moves)
        self._num_renumbered += said[_INDEX] != index
        group.rows.append(self._row(said, index, steps.num_rows))
        group.stats.append(said.get("stats") or {})
        group.steps.append(steps)
        group.num_bytes += steps.nbytes
        self.num_bytes += sum(map(len, record.fields.values()))
        self.num_episodes, self._num_steps = index + 1, self._num_steps + steps.num_rows
        if group.num_bytes >= _GROUP_BYTES or len(group.rows) >= _GROUP_EPISODES:
            self._end_group()

    def _said(self, record: Record) -> dict[str, Any]:
        """Return the content of ``json``.

        Raises:
            ConfigError: It does not say what LeRobot needs, or contradicts the first episode's.
        """
        try:
            said = json.loads(record.fields["json"])
            info = said[NOTE]["info"]
            features = features_of(info["features"], f"sample {record.key!r}")
            texts = {kind: {int(number): text for number, text in one.items()} for kind, one in said["texts"].items()}
            said = {
                **said,
                "texts": texts,
                "tasks": [*said["tasks"]],
                _INDEX: int(said[_INDEX]),
                "fps": float(info["fps"]),
            }
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"sample {record.key!r}: its json does not say what a LeRobot set needs ({error!r}); sets that "
                "`shard_tools convert SOURCE TARGET --from lerobot` has written can be exported"
            ) from error
        if self._first is None:
            check_features(one.name for one in features)
            self._first, self._first_key, self._features = said[NOTE], record.key, features
        elif self._first != said[NOTE]:
            difference = unlike(self._first["info"], info)
            if difference:
                raise ConfigError(
                    f"samples {self._first_key!r} and {record.key!r} cannot be in one LeRobot set: {difference}; "
                    "export them apart, with --where"
                )
            self._same_stats = False
        return said

    def _video_paths(self, index: int) -> dict[str, str]:
        """Return the file of each camera's field, for an episode."""
        return {
            one.field: numbered_path(VIDEO, index, video_key=one.name) for one in self._features if one.is_video
        }  # fmt: skip

    def _field(self, record: Record, name: str) -> bytes:
        if name not in record.fields:
            raise ConfigError(f"sample {record.key!r}: no field {name!r}, which its set has; leave the sample out")
        return record.fields[name]

    def _steps(self, record: Record, index: int, moves: Mapping[str, Mapping[int, int]]) -> pa.Table:
        """Return the steps of an episode, with their numbers in the new set.

        Raises:
            DataError: A field is damaged, or they have unlike lengths.
        """
        columns: dict[str, pa.Array | pa.ChunkedArray] = {}
        for one in self._features:
            if one.is_video:
                continue
            data, what = self._field(record, one.field), f"sample {record.key!r}, field {one.field!r}"
            if not one.is_array:
                columns[one.name] = unpacked(data, what)
                continue
            try:
                array = npy(data)
                columns[one.name] = column_of(self._renumbered(one.name, array, index, moves), one)
            except (ValueError, KeyError, pa.ArrowException) as error:
                raise DataError(f"{what}: {error}; leave the sample out, with --where") from error
        if len({len(column) for column in columns.values()}) != 1:
            raise DataError(
                f"sample {record.key!r}: its fields have unlike numbers of steps; leave it out, with --where"
            )
        return pa.table(columns)

    def _renumbered(
        self, name: str, array: npt.NDArray[Any], index: int, moves: Mapping[str, Mapping[int, int]]
    ) -> npt.NDArray[Any]:
        if name == _INDEX:
            return np.full_like(array, index)
        if name == "index":
            return np.arange(self._num_steps, self._num_steps + len(array), dtype=array.dtype)
        kind = name.removesuffix("_index")
        if kind in moves and any(there != here for there, here in moves[kind].items()):
            return np.array([moves[kind][number] for number in array.tolist()], array.dtype)
        return array

    def _row(self, said: Mapping[str, Any], index: int, length: int) -> dict[str, Any]:
        """Return the row of an episode in the table of episodes."""
        row = {_INDEX: index, "tasks": said["tasks"], "length": length}
        for kind, number in (("data/", self._num_groups), ("meta/episodes/", self._num_groups)):
            row |= _numbers(kind, number)
        row |= {"dataset_from_index": self._num_steps, "dataset_to_index": self._num_steps + length}
        for one in self._features:
            if one.is_video:
                times = {"from_timestamp": 0.0, "to_timestamp": length / said["fps"]}
                row |= _numbers(f"videos/{one.name}/", index)
                row |= {f"videos/{one.name}/{name}": value for name, value in times.items()}
        return row | plain_notes(said.get("notes") or {})

    # --------------------------------------------------------------------------------------------------- groups

    def _end_group(self) -> None:
        """Write the steps of a group, then its episodes, which complete it."""
        group, number, self._group = self._group, self._num_groups, _Group()
        self._put(numbered_path(DATA, number), self._steps_file(group.steps))
        self._stats.append(joined_statistics(group.stats))
        state = {
            "first": self._first, "first_key": self._first_key, "same_stats": self._same_stats,
            "tasks": self._tasks.numbers, "subtasks": self._subtasks.numbers, "num_steps": self._num_steps,
            "num_renumbered": self._num_renumbered, "num_episodes": self.num_episodes, "stats": self._stats[-1],
        }  # fmt: skip
        table = episode_table(group.rows, group.stats)
        self._put(numbered_path(EPISODES, number), parquet_of(table, {_FACTS: json.dumps(state).encode()}))
        self._num_groups += 1

    def _steps_file(self, each: list[pa.Table]) -> bytes:
        """Return a table of steps, one episode in each row group, typed for ``datasets`` as LeRobot does."""
        types = {one.name: _type_of(one) for one in self._features if not one.is_video}
        told = {b"huggingface": json.dumps({"info": {"features": types}}).encode()} if all(types.values()) else {}
        schema = each[0].schema.with_metadata(told)
        out = pa.BufferOutputStream()
        with pq.ParquetWriter(out, schema, compression="snappy") as writer:
            for steps in each:
                writer.write_table(steps.cast(schema), row_group_size=max(1, steps.num_rows))
        data: bytes = out.getvalue().to_pybytes()
        return data

    def finish(self) -> None:
        """Write the last group, and the descriptions of the whole set; ``info.json`` last."""
        if self._group.rows:
            self._end_group()
        assert self._first is not None, "there is at least one episode"  # noqa: S101
        content = self._first["info"]
        is_whole = (
            self._same_stats and not self._num_renumbered and content.get("total_episodes") == self.num_episodes
        )  # fmt: skip
        stats = self._first["stats"] if is_whole and self._first["stats"] else joined_statistics(self._stats)
        self._put(STATS, _json(stats))
        self._put(TASKS, self._tasks.table())
        if self._subtasks.numbers:
            self._put(SUBTASKS, self._subtasks.table())
        info = info_of(
            content, num_episodes=self.num_episodes, num_steps=self._num_steps, num_tasks=len(self._tasks.numbers)
        )
        self._put(INFO, _json(info))
        self._write_mark(is_complete=True)
        self._log()

    def _log(self) -> None:
        shown = redact(self.job.target)
        if self._num_renumbered:
            _log.warning(
                "%s: %d of %d episodes have another number than in the set that they come from: LeRobot numbers them "
                "without gaps", shown, self._num_renumbered, self.num_episodes,
            )  # fmt: skip
        moved = self._tasks.num_moved + self._subtasks.num_moved
        if moved:
            _log.warning("%s: %d tasks have another number than in the sets that they come from", shown, moved)
        counted = {one.name for one in self._features if one.dtype != "string"}
        lacks = counted - {name for one in self._stats for name in one}
        if lacks and self._stats:
            _log.warning("%s: no statistics of %s: its episodes have none", shown, ", ".join(sorted(lacks)))

    def _put(self, name: str, data: bytes) -> None:
        self.job.storage.put(join_url(self.job.target, name), data)
        self.files.append((name, True))


def _type_of(feature: Feature) -> dict[str, Any] | None:
    """Return the type of a feature for ``datasets``; None: it is not known here."""
    if feature.is_array:
        return type_of(feature)
    return {"image": {"_type": "Image"}, "string": {"dtype": "string", "_type": "Value"}}.get(feature.dtype)


def _numbers(kind: str, number: int) -> dict[str, int]:
    chunk, file = divmod(number, 1000)
    return {f"{kind}chunk_index": chunk, f"{kind}file_index": file}


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=4, ensure_ascii=False).encode() + b"\n"
