"""Read what a LeRobot set says of its episodes: tasks, lengths, files, statistics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from shard_tools.make.convert.base.arrow import open_parquet, told
from shard_tools.make.convert.base.files import SourceFile
from shard_tools.make.convert.base.records import Skipped
from shard_tools.make.convert.robots.layout import (
    INFO,
    OF_EPISODE,
    OF_FILES,
    OLD_EPISODES,
    OLD_STATS,
    OLD_TASKS,
    STATS,
    SUBTASKS,
    TASKS,
    Info,
    filled,
    nested,
    parsed,
)
from shard_tools.make.convert.robots.tables import RowGroups
from streaming.errors import DataError, NotFoundError
from streaming.storage import Storage

_EPISODES = "meta/episodes/"
_PANDAS_INDEX = "__index_level_0__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footage:
    """The frames of an episode in the video of one camera.

    Attributes:
        file: The video.
        begin_s: The second of the video at which the episode begins.
        num_episodes: Number of episodes in it.
    """

    file: SourceFile
    begin_s: float
    num_episodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One recording.

    Attributes:
        index: Its number in the set.
        length: Number of its steps.
        tasks: Its tasks, as texts.
        notes: Other values that the set notes about it.
        data: The table with its steps.
        videos: Its frames, by the name of the camera's feature.
        noted_in: The table of episodes with its row, and so its statistics; None in v2.
    """

    index: int
    length: int
    tasks: tuple[str, ...]
    notes: Mapping[str, Any]
    data: SourceFile
    videos: Mapping[str, Footage]
    noted_in: SourceFile | None = None

    @property
    def files(self) -> list[SourceFile]:
        """The files with its content."""
        return [self.data, *(one.file for one in self.videos.values())]

    @property
    def about_bytes(self) -> int:
        """About the bytes of its videos: each episode's share of a file."""
        return sum(one.file.size_bytes // one.num_episodes for one in self.videos.values())


class SetFiles:
    """The files of a set by their names in it, and the content of those below ``meta/``. Picklable."""

    def __init__(self, files: Mapping[str, SourceFile], storage: Storage) -> None:
        self.files, self.groups = files, RowGroups(storage)
        self._storage = storage

    def json(self, name: str) -> tuple[Any, str]:
        """Return the content of a JSON file, and its place for messages.

        Raises:
            NotFoundError: There is none.
            DataError: It is damaged.
        """
        file = self._file(name)
        return parsed(bytes(self._storage.read(file.url)), file.shown_url), file.shown_url

    def lines(self, name: str) -> Iterator[tuple[bytes, str]]:
        """Yield the lines of a file that are not blank, each with its place for messages."""
        file = self._file(name)
        for number, line in enumerate(bytes(self._storage.read(file.url)).split(b"\n"), 1):
            if line.strip():
                yield line, f"{file.shown_url}, line {number}"

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return name in self.files

    def _file(self, name: str) -> SourceFile:
        if name not in self.files:
            raise NotFoundError(f"no file {name} in the set; fetch the set again, whole, or name its folder")
        return self.files[name]

    def rows(self, name: str, *, leave_out: str = "") -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the rows of a Parquet file, each with its place for messages.

        Args:
            name: The file.
            leave_out: Beginning of the names of columns to leave out.

        Raises:
            DataError: The file is damaged.
        """
        file = self._file(name)
        with told(file), open_parquet(file, self._storage) as parquet:
            columns = [one for one in parquet.schema_arrow.names if not leave_out or not one.startswith(leave_out)]
            for group in range(parquet.metadata.num_row_groups):
                for number, row in enumerate(parquet.read_row_group(group, columns=columns).to_pylist()):
                    yield row, f"{file.shown_url}, row group {group}, row {number}"

    def texts(self, info: Info) -> dict[str, dict[int, str]]:
        """Return the texts of tasks, and of subtasks if there are any, by kind and number.

        Raises:
            DataError: A file is damaged or lacks them.
        """
        if info.is_old:
            rows = ((json_object(line, where), where) for line, where in self.lines(OLD_TASKS))
            return {"task": dict(_text_of(row, "task", where) for row, where in rows)}
        found = {}
        for kind, name in (("task", TASKS), ("subtask", SUBTASKS)):
            if kind == "task" or self.has(name):
                found[kind] = dict(_text_of(row, kind, where) for row, where in self.rows(name))
        return found

    def whole_statistics(self) -> Any:
        """Return the statistics of all episodes together; None: the set has none."""
        return self.json(STATS)[0] if self.has(STATS) else None

    def statistics(self, episode: Episode, old: Mapping[int, bytes]) -> dict[str, Any]:
        """Return the statistics of an episode by feature; ``old`` are the lines of v2."""
        if episode.noted_in is None:
            told_of = json_object(old[episode.index], OLD_STATS) if episode.index in old else {}
            return dict(told_of.get("stats") or {})
        table = self.groups.episode(episode.noted_in, episode.index)
        return nested((name, table.column(name)[0].as_py()) for name in table.schema.names if name[:6] == "stats/")

    def old_statistics(self) -> dict[int, bytes]:
        """Return the lines with the statistics of v2.1, by episode.

        Raises:
            DataError: A line is damaged.
        """
        lines = self.lines(OLD_STATS) if self.has(OLD_STATS) else ()
        return {_whole(json_object(line, where), "episode_index", where): line for line, where in lines}


def read_episodes(there: SetFiles, info: Info) -> tuple[list[Episode], list[Skipped]]:
    """Return the episodes in their order, and those without files.

    Raises:
        DataError: A description is damaged, contradicts itself, or leads out of the set.
    """
    found: list[Episode] = []
    lost: list[Skipped] = []
    seen: set[int] = set()
    reader = _old_rows(there) if info.is_old else _rows(there)
    for row, where, noted_in in reader:
        index, length = _whole(row, "episode_index", where), _whole(row, "length", where)
        if index in seen:
            raise DataError(f"{where}: episode {index} is there twice; fetch the set again")
        seen.add(index)
        places = _places_of(row, index, info, where)
        missing = [name for name, _ in places.values() if not there.has(name) or not there.files[name].size_bytes]
        if missing or not length:
            reason = f"no file {missing[0]}, or an empty one" if missing else "it has no steps"
            lost.append(Skipped(path=f"episode {index}", reason=reason, is_lost=True))
            continue
        found.append(
            Episode(
                index=index,
                length=length,
                tasks=_tasks_of(row, where),
                noted_in=noted_in,
                notes=_notes_of(row),
                data=there.files[places[""][0]],
                videos={
                    key: Footage(file=there.files[name], begin_s=begin) for key, (name, begin) in places.items() if key
                },
            )
        )
    stated = info.content.get("total_episodes", len(seen))
    if stated != len(seen):
        reason = f"it counts {stated} episodes, and the tables of episodes {len(seen)}"
        lost.append(Skipped(path=INFO, reason=reason, is_lost=True))
    return _shared(sorted(found, key=lambda one: one.index)), lost


def _shared(episodes: Sequence[Episode]) -> list[Episode]:
    """Note how many episodes each video holds."""
    users = Counter(one.file.name for episode in episodes for one in episode.videos.values())
    return [
        replace(
            episode,
            videos={
                key: Footage(file=one.file, begin_s=one.begin_s, num_episodes=users[one.file.name])
                for key, one in episode.videos.items()
            },
        )
        for episode in episodes
    ]


_Rows: TypeAlias = Iterator[tuple[dict[str, Any], str, SourceFile | None]]


def _rows(there: SetFiles) -> _Rows:
    names = sorted(name for name in there.files if name.startswith(_EPISODES) and name.endswith(".parquet"))
    if not names:
        raise NotFoundError(f"no file {_EPISODES}chunk-*/file-*.parquet in the set; fetch the set again, whole")
    for name in names:
        for row, where in there.rows(name, leave_out="stats/"):
            yield row, where, there.files[name]


def _old_rows(there: SetFiles) -> _Rows:
    for line, where in there.lines(OLD_EPISODES):
        yield json_object(line, where), where, None


def _places_of(row: Mapping[str, Any], index: int, info: Info, where: str) -> dict[str, tuple[str, float]]:
    """Return the path of the table (``""``) and of each camera's video, with the second at which the episode begins.

    Raises:
        DataError: The row does not say it, or a path leads out of the set.
    """
    chunk = index // info.chunks_size
    found = {}
    for key in ("", *(one.name for one in info.videos)):
        template = info.video_path if key else info.data_path
        if template is None:
            raise DataError(f"{where}: {INFO} has the camera {key!r}, and no video_path; correct it")
        begin = 0.0
        if info.is_old:
            values: dict[str, str | int] = {"episode_chunk": chunk, "episode_index": index}
        else:
            of = f"videos/{key}/" if key else "data/"
            values = {name: _whole(row, of + name, where) for name in ("chunk_index", "file_index")}
            begin = _second(row, f"{of}from_timestamp", where) if key else 0.0
        found[key] = filled(template, values | ({"video_key": key} if key else {}), where), begin
    return found


def _tasks_of(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    tasks = row.get("tasks")
    tasks = [tasks] if isinstance(tasks, str) else [] if tasks is None else tasks
    if not isinstance(tasks, list) or not all(isinstance(one, str) for one in tasks):
        raise DataError(f"{where}: tasks {tasks!r}; expected texts")
    return tuple(tasks)


def _notes_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in OF_EPISODE and not name.startswith(OF_FILES)}


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Return an object of JSON.

    Raises:
        DataError: It is anything else.
    """
    content = parsed(line, where)
    if not isinstance(content, dict):
        raise DataError(f"{where}: expected an object, got {json.dumps(content)[:40]}; fetch the file again")
    return content


def _whole(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DataError(f"{where}: {name} is {value!r}; expected a whole number of at least 0: fetch the set again")
    return value


def _second(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise DataError(f"{where}: {name} is {value!r}; expected a number of seconds: fetch the set again")
    return float(value)


def _text_of(row: Mapping[str, Any], kind: str, where: str) -> tuple[int, str]:
    """Return the number and the text of a task; LeRobot stores the texts as the index of a table of pandas."""
    text = next((row[name] for name in (kind, _PANDAS_INDEX) if isinstance(row.get(name), str)), None)
    if text is None:
        raise DataError(f"{where}: no text of a {kind}; fetch the set again")
    return _whole(row, f"{kind}_index", where), text
