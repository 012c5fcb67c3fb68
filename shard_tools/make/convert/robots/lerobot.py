"""Read LeRobot sets (v2.0, v2.1, v3.0): a sample is an episode, with the videos of its cameras and arrays of its steps.

Neither LeRobot nor pandas is imported, and no frame is decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from shard_tools.make.convert.base.files import SourceFile, identity_of, list_files, open_stored, read_file
from shard_tools.make.convert.base.identity import EVERYWHERE, ChangedInputError, Origins, origins_of
from shard_tools.make.convert.base.records import (
    NUMBER_KEYS,
    NoRecordError,
    Record,
    SourceOptions,
    number_key,
    numbered,
    permutation,
)
from shard_tools.make.convert.base.rows import dump_array, json_of
from shard_tools.make.convert.robots.checks import check_order, check_statistics
from shard_tools.make.convert.robots.cut import cut_video, num_frames
from shard_tools.make.convert.robots.episodes import Episode, Footage, SetFiles, read_episodes
from shard_tools.make.convert.robots.layout import INFO, Info
from shard_tools.make.convert.robots.tables import array_of, packed, type_differs
from shard_tools.running.engine import map_sized
from streaming.errors import ConfigError, DataError, NotFoundError, ShardstreamError
from streaming.storage import Storage, redact

NOTE = "lerobot"
"""Entry of an episode's ``json`` with what holds for all of its set."""
HIDDEN = "an episode begins between key frames: the frames before it, which its own depend on, are stored and hidden"
TOO_SHORT = "a video has fewer frames than its episode has steps"
OTHER_TYPE = "numbers are stored in the type that info.json declares, and the tables have another"
SURPLUS = "frames of a video that belong to no episode are left out"
_JSON = "json"


def of_camera(name: str, remark: str) -> str:
    """Return a remark about the video of a camera."""
    return f"camera {name!r}: {remark}"


class LeRobotSet:
    """Episodes of a LeRobot set, in their order.

    The fields of a sample: the video of each camera (``observation.images.front.mp4``), an array of each feature of
    numbers (``action.npy``, one row for each step), Parquet of every other feature, and ``json`` with tasks, length,
    statistics and what the set states. A video of one episode is stored unchanged; of one that several share, the
    episode's packets are stored, unchanged, in a file of their own.

    Raises:
        NotFoundError: There is no LeRobot set.
        DataError: A description is damaged, or leads out of the set's folder.
    """

    kind = "lerobot"
    columns = ("task", "episode_index", "length")

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        if options.key_field not in {None, "episode_index", NUMBER_KEYS}:
            raise ConfigError(
                f"--key: lerobot takes its keys from 'episode_index' or 'number', not from {options.key_field!r}"
            )
        self._storage, self._num_threads, self._tolerant = storage, options.num_threads, options.tolerant
        self._by_number = options.key_field == NUMBER_KEYS
        found, skipped = list_files([spec], storage, options.exclude, options.walks)
        self._there = SetFiles({file.name: file for file in found}, storage)
        if not self._there.has(INFO):
            raise NotFoundError(f"{redact(spec)}: no {INFO} there; name the folder that holds meta/, data/ and videos/")
        self._info = Info.of(*self._there.json(INFO))
        episodes, lost = read_episodes(self._there, self._info)
        self.skipped = (*(one for one in skipped if one.is_lost), *lost)
        if not episodes:
            raise NoRecordError(f"{redact(spec)}: a LeRobot set without an episode that is whole", self.skipped)
        if options.shuffle_seed is not None:
            episodes = [episodes[place] for place in permutation(len(episodes), options.shuffle_seed)]
        self._episodes = episodes
        self._texts = self._there.texts(self._info)
        self._old = self._there.old_statistics() if self._info.is_old else {}
        self._whole = {
            "info": self._info.content, "stats": self._there.whole_statistics(),
            "fields": {one.name: one.field for one in self._info.features},
        }  # fmt: skip

    @property
    def num_records(self) -> int:
        """Number of episodes."""
        return len(self._episodes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables and videos that hold episodes."""
        return sum(file.size_bytes for file in self._files().values())

    @property
    def fields(self) -> Mapping[str, bool]:
        """A field for each feature, and ``json``."""
        return {_JSON: True, **{one.field: True for one in self._info.features}}

    def identity(self) -> dict[str, object]:
        """Return a digest of what the set states, and of its episodes in order."""
        said = hashlib.sha256(json.dumps([self._whole["info"], self._whole["fields"]]).encode()).hexdigest()
        lines = [f"{one.index}\0{one.length}\0{[file.name for file in one.files]}" for one in self._episodes]
        return {**identity_of(self.kind, [said, *lines]), "num_files": len(self._files())}

    def origins(self) -> Origins:
        """Return the descriptions, then tables and videos, numbered by the first record that is made of them."""
        meta = [file for name, file in sorted(self._there.files.items()) if name.startswith("meta/")]
        found = origins_of(meta, self._storage, number=EVERYWHERE)
        firsts: dict[int, list[SourceFile]] = {}
        seen: set[str] = set()
        for number, episode in enumerate(self._episodes):
            for file in episode.files:
                if file.name not in seen:
                    seen.add(file.name)
                    firsts.setdefault(number, []).append(file)
        for number, files in firsts.items():
            found += origins_of(files, self._storage, number=number)
        return Origins(inputs=found, store=self._storage)

    def _files(self) -> dict[str, SourceFile]:
        return {file.name: file for episode in self._episodes for file in episode.files}

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the episodes from number ``start`` on, read by several threads."""
        items = list(enumerate(self._episodes))[start:]
        return numbered(map_sized(self._read, items, lambda one: one[1].about_bytes, self._num_threads), start)

    def _read(self, item: tuple[int, Episode]) -> Record:
        number, episode = item
        key = number_key(number) if self._by_number else f"episode_{episode.index:06d}"
        where = f"{redact(episode.data.url)}, episode {episode.index}"
        try:
            return self._record(episode, key, where)
        except ChangedInputError:
            raise
        except DataError as error:
            if not self._tolerant:
                raise
            return Record(key=key, fields={}, where=where, problem=error)

    def _record(self, episode: Episode, key: str, where: str) -> Record:
        """Return the sample of an episode.

        Raises:
            DataError: A file is damaged, or does not hold what the set states.
        """
        table = self._steps(episode, where)
        remarks: list[str] = []
        fields = {one.field: packed(table.column(one.name), one.name) for one in self._info.columns if not one.is_array}
        statistics = self._there.statistics(episode, self._old)
        arrays = self._arrays(table, statistics, where)
        for feature in self._info.columns:
            if feature.is_array:
                fields[feature.field] = dump_array(arrays[feature.name])
                remarks += [OTHER_TYPE] if type_differs(table.column(feature.name), feature) else []
        for feature in self._info.videos:
            data, remark = self._video(episode, episode.videos[feature.name], where)
            fields[feature.field] = data
            remarks += [of_camera(feature.name, remark)] if remark else []
        content = self._said(episode, table, statistics)
        fields[_JSON], remark = json_of(content)
        remarks += [remark] if remark else []
        metadata = {**episode.notes, **{name: content[name] for name in self.columns}, "tasks": list(episode.tasks)}
        return Record(
            key=key, fields=fields, metadata=metadata, where=where, remarks=tuple(dict.fromkeys(remarks))
        )  # fmt: skip

    def _arrays(self, table: pa.Table, statistics: Mapping[str, Any], where: str) -> dict[str, npt.NDArray[Any]]:
        """Return the features of numbers by name, as the set states them.

        Raises:
            DataError: They are not: of another shape, out of order, or beyond the episode's statistics.
        """
        try:
            found = {one.name: array_of(table.column(one.name), one) for one in self._info.columns if one.is_array}
            check_order(found, self._info.fps)
            check_statistics(found, statistics)
        except DataError as error:
            raise DataError(
                f"{where}: {error}; {self._cures('fetch the set again', 'correct what is wrong in it')}"
            ) from error
        return found

    def _cures(self, *others: str) -> str:
        """Return what helps, with the option that leaves an episode out unless it is given."""
        cures = [*others] if self._tolerant else [*others, "leave the episode out with --on-error skip"]
        return f"{', '.join(cures[:-1])}, or {cures[-1]}"

    def _steps(self, episode: Episode, where: str) -> pa.Table:
        """Return the steps of an episode.

        Raises:
            DataError: The table has another number of steps, or lacks a column.
        """
        table = self._there.groups.episode(episode.data, episode.index)
        if table.num_rows != episode.length:
            raise DataError(
                f"{where}: {table.num_rows} steps in the table, and {episode.length} by the table of episodes; fetch "
                "the set again"
            )
        lacks = [one.name for one in self._info.columns if one.name not in table.schema.names]
        if lacks:
            raise DataError(f"{where}: no column {lacks[0]!r}, which {INFO} has; fetch the set again")
        return table

    def _video(self, episode: Episode, footage: Footage, where: str) -> tuple[bytes, str]:
        """Return the video of an episode, and a remark about it or ``""``.

        Raises:
            DataError: It is damaged, or cannot be cut.
        """
        try:
            return self._whole_or_cut(footage, episode.length)
        except ShardstreamError:
            raise
        except Exception as error:
            raise DataError(
                f"{where}: {footage.file.shown_url} from second {footage.begin_s:.3f} on: {error}; "
                + self._cures("fetch the file again", "encode it with a key frame at the beginning of each episode")
            ) from error

    def _whole_or_cut(self, footage: Footage, length: int) -> tuple[bytes, str]:
        if footage.num_episodes > 1:
            with open_stored(footage.file, self._storage, unzip=False) as stream:
                found = cut_video(stream, footage.begin_s, length)
            return found.data, HIDDEN if found.num_hidden else ""
        data = read_file(footage.file, self._storage)
        num = num_frames(data)
        if num > length:
            return cut_video(data, footage.begin_s, length).data, SURPLUS
        return data, TOO_SHORT if num < length else ""

    def _said(self, episode: Episode, table: pa.Table, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of ``json``."""
        numbers = {
            kind: {
                str(one): names[one] for one in sorted(set(table.column(f"{kind}_index").to_pylist())) if one in names
            }
            for kind, names in self._texts.items()
            if f"{kind}_index" in table.schema.names
        }
        tasks = episode.tasks or tuple(numbers.get("task", {}).values())
        return {
            "episode_index": episode.index, "length": episode.length, "task": tasks[0] if tasks else None,
            "tasks": list(tasks), "fps": self._info.content["fps"], "robot_type": self._info.content.get("robot_type"),
            "notes": episode.notes, "texts": numbers, "stats": statistics,
            NOTE: self._whole,
        }  # fmt: skip
