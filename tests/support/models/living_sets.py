"""A set that lives, next to a model that knows nothing of shards: versions are rows. And faults at its writes.

What changes a set, and how a history is drawn and judged, is in ``set_changes.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shard_tools.change.fields.listed import files_held
from shard_tools.change.life.versions import HistoryReport, history
from shard_tools.change.sets.rewrite import shard_source
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.running import engine
from streaming import DataLoader, StreamingDataset
from streaming.common import threads
from streaming.errors import IndexMismatchError
from streaming.run.loops import epoch_loop
from streaming.shards.catalog import listing
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.layout import SCHEMA_FILE, chunks_path, column_path, samples_path, version_path
from streaming.shards.late import fields as late_fields
from streaming.shards.schema.value import is_copy
from streaming.shards.versions.publish import read_head, schema_of
from streaming.storage import Storage, StoreWriter, join_url

WRITES = ("put", "put_if", "delete", "open_write")
CLASS_NAMES = ("ant", "bee", "cat", "dog", "elk", "fox")
MOST_SAMPLES = 3
"""Samples of a shard."""


# ----------------------------------------------------------------------------------------------------- faults at writes


class Killed(BaseException):
    """The process ends here: nothing after it runs, as after SIGKILL."""


class _Writes:
    """Counts writes, and calls ``act`` at one of them.

    Attributes:
        left: Number of writes until then; negative afterwards.
    """

    def __init__(self, at: int, act: Callable[[], object], *, before: bool) -> None:
        self.left, self._act, self._before = at, act, before
        self._is_busy = self._is_dead = False

    def one(self, real: Callable[[], Any]) -> Any:
        """Write."""
        if self._is_dead:
            raise Killed
        if self._is_busy:
            return real()
        self.left -= 1
        is_it = self.left == -1
        if is_it and self._before:
            self._call()
        found = real()
        if is_it and not self._before:
            self._call()
        return found

    def _call(self) -> None:
        self._is_busy = True
        try:
            self._act()
        except Killed:
            self._is_dead = True
            raise
        self._is_busy = False


class _Writer:
    """A writer whose object appears, or does not, when it is closed."""

    def __init__(self, below: StoreWriter, writes: _Writes) -> None:
        self._below, self._writes = below, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self._below.abort()

    def close(self) -> None:
        self._writes.one(self._below.close)


@contextmanager
def interrupted(at: int, act: Callable[[], object], *, before: bool, only: Sequence[str] = WRITES) -> Iterator[None]:
    """Call ``act`` once, before or after the ``at``-th write to any store, by this thread or another one.

    An object that is written in pieces is written when its writer is closed. If ``act`` kills, the process is dead: no
    later write takes place, such as of code that tidies up.
    """
    writes = _Writes(at, act, before=before)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: writes.one(lambda: real(*args, **kwargs))

    def opened(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: _Writer(real(*args, **kwargs), writes)

    with pytest.MonkeyPatch.context() as patch:
        for name in only:
            patch.setattr(Storage, name, (opened if name == "open_write" else counted)(getattr(Storage, name)))
        yield


def kill() -> None:
    raise Killed


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample.

    Attributes:
        key: Its key.
        fields: The bytes of its fields, but for the number of its class.
        label: The name of its class; None: it has none.
        n: Its value in the column ``n``.
        late: Its values of late fields; None: it has no value; fields that lack values for it are left out.
    """

    key: str
    fields: Mapping[str, bytes]
    label: str | None = None
    n: int = 0
    late: Mapping[str, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of a set.

    Attributes:
        rows: Its samples, in their order.
        classes: The names of its classes, in the order of their numbers.
        late: Its late fields, and how each was made.
    """

    rows: tuple[Row, ...]
    classes: tuple[str, ...] = ()
    late: Mapping[str, str] = field(default_factory=dict)

    @property
    def lacking(self) -> set[str]:
        """Its late fields that some samples, added after them, have no values of."""
        return {name for name in self.late if any(name not in row.late for row in self.rows)}

    @property
    def keys(self) -> list[str]:
        return [row.key for row in self.rows]

    def without(self, numbers: set[int]) -> Version:
        """Return the version without the rows at these places."""
        return replace(self, rows=tuple(row for at, row in enumerate(self.rows) if at not in numbers))

    def again(self) -> set[str]:
        """Return the keys that occur more than once."""
        return {key for key, count in Counter(self.keys).items() if count > 1}


@dataclass(kw_only=True)
class SetState:
    """All that is known of a set by the model.

    Attributes:
        versions: Versions by number.
        tags: Numbers by name.
        numbered: Earlier versions that stay under their number.
        lives: Whether a change makes a version.
        read: The days of the source that it holds.
        records: Number of the next record, where keys are numbers.
    """

    versions: dict[int, Version]
    tags: dict[str, int] = field(default_factory=dict)
    numbered: set[int] = field(default_factory=set)
    lives: bool = False
    read: frozenset[int] = frozenset()
    records: int = 0

    @property
    def number(self) -> int:
        return max(self.versions)

    @property
    def now(self) -> Version:
        return self.versions[self.number]

    def copied(self) -> SetState:
        """Return a copy that can be changed."""
        return replace(self, versions={**self.versions}, tags={**self.tags}, numbered={*self.numbered})

    def publish(self, version: Version) -> None:
        """Make this the next version."""
        self.lives = True
        self.numbered.add(self.number)
        self.versions[self.number + 1] = version

    def say(self, version: Version) -> None:
        """Change what the set means: of one that lives, as its next version."""
        if not self.lives:
            self.versions[self.number] = version
        elif version != self.now:
            self.publish(version)

    def prune(self, keep: int, drop: Sequence[str]) -> None:
        """Drop versions."""
        if not self.lives:
            return
        self.tags = {name: number for name, number in self.tags.items() if name not in drop}
        earlier = sorted(self.numbered - {self.number})
        self.numbered = {*earlier[len(earlier) - keep :]} if keep else set()
        stays = {*self.tags.values(), self.number, *self.numbered}
        self.versions = {number: one for number, one in self.versions.items() if number in stays}

    def shown(self) -> Seen:
        """Return what can be seen of the set at a glance."""
        now = self.now
        return (self.number, tuple(sorted(self.versions)), tuple(sorted(self.tags.items())), tuple(now.keys),
                tuple(sorted(now.late)), now.classes)  # fmt: skip


Seen = tuple[int, tuple[int, ...], tuple[tuple[str, int], ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]


@dataclass
class Source:
    """A folder that grows by days, and the rows of each: ``rows``, ``numbers`` (which are the keys), ``images``."""

    folder: Path
    kind: str
    days: list[list[Row]] = field(default_factory=list)

    @property
    def spec(self) -> str:
        return str(self.folder)

    @property
    def options(self) -> ConvertOptions:
        if self.kind == "images":
            return ConvertOptions(kind="images", max_samples=MOST_SAMPLES, keep_order=True)
        key = "id" if self.kind == "rows" else None
        return ConvertOptions(kind="jsonl", max_samples=MOST_SAMPLES, key_field=key, columns=("n",))

    def add(self, rows: list[Row]) -> None:
        """Write a day."""
        place = self.folder / f"{len(self.days):04d}"
        if self.kind == "images":
            for row in rows:
                path = self.folder / f"{row.key}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(row.fields["png"])
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            place.with_suffix(".jsonl").write_bytes(b"".join(row.fields["json"] + b"\n" for row in rows))
        self.days.append(sorted(rows, key=lambda row: row.key) if self.kind == "images" else rows)

    def unread(self, state: SetState, upto: int | None = None) -> list[Row]:
        """Return the rows that a set does not have, of the days up to one, as it will have them."""
        some = [row for day, rows in enumerate(self.days[:upto]) if day not in state.read for row in rows]
        if self.kind == "images":
            return sorted(some, key=lambda row: row.key)
        if self.kind == "numbers":
            return [replace(row, key=f"{state.records + at:09d}") for at, row in enumerate(some)]
        return some


def new_row(number: int, kind: str, label: str) -> Row:
    """Return a row that nobody has; of images in a class."""
    if kind == "images":
        name = f"{label}/{number:05d}"
        note = json.dumps({"class": label, "path": f"{name}.png"}, separators=(",", ":")).encode()
        return Row(key=name, label=label, fields={"png": f"no picture, number {number}".encode(), "json": note})
    content = {"id": f"{number:05d}", "n": number % 7}
    return Row(key=f"{number:05d}", n=number % 7, fields={"json": json.dumps(content, separators=(",", ":")).encode()})


# ------------------------------------------------------------------------------------------------------------ real sets


@dataclass
class LivingSet:
    """A set in a store.

    Attributes:
        url: Directory of the set.
        options: Options of its store.
        source: The source that it is made of; None: it is made of other sets.
        kind: The kind of its rows, as in ``Source``.
        copy_of: The set that it was copied from; "": from none.
        held: The files of each version, by its number, as they were when it was first seen.
    """

    url: str
    options: Mapping[str, Any]
    source: Source | None
    kind: str
    copy_of: str = ""
    held: dict[int, dict[str, bytes]] = field(default_factory=dict)

    @property
    def storage(self) -> Storage:
        return Storage(self.options)

    def convert(self) -> SetState:
        """Make the set of its source, and return its model."""
        assert self.source is not None
        convert(self.source.spec, self.url, options=self.source.options, storage_options=self.options)
        state = SetState(versions={})
        rows = tuple(self.source.unread(state))
        classes = tuple(sorted({row.label for row in rows if row.label is not None}))
        return SetState(
            versions={1: Version(rows=rows, classes=classes)}, read=frozenset(range(len(self.source.days))),
            records=len(rows),
        )  # fmt: skip

    def lives(self) -> bool:
        """Return whether a change makes a version: it lives, or somebody was killed who had begun to let it live."""
        if read_head(self.storage, self.url).lives:
            return True
        schema = join_url(self.url, SCHEMA_FILE)
        return self.storage.exists(schema) and is_copy(self.storage.read(schema))

    def files(self) -> dict[str, bytes]:
        """Return the bytes of all files, by their path in the set."""
        if self.url.startswith("memory://"):
            below = self.url.removeprefix("memory:/") + "/"
            there = MemoryFileSystem.store
            return {name.removeprefix(below): there[name].getvalue() for name in list(there) if name.startswith(below)}
        if "://" not in self.url:
            found = (path for path in Path(self.url).rglob("*") if path.is_file() and not path.name.startswith("."))
            return {str(path.relative_to(self.url)): path.read_bytes() for path in found}
        storage, below = self.storage, join_url(self.url, "")
        return {info.url.removeprefix(below): bytes(storage.read(info.url)) for info in storage.list(self.url)}

    def open(self, version: int | str | None = None, **options: Any) -> StreamingDataset:
        """Open a version, with fields as their bytes."""
        return StreamingDataset(self.url, version=version, decode=None, storage_options=self.options, **options)

    def shown(self) -> Seen:
        """Return what can be seen of the set at a glance.

        Raises:
            ShardstreamError: Nothing can: it is not there, or not whole.
        """
        dataset = self.open(fields=("json",))
        report = history(self.url, storage=self.storage)
        now = next(one for one in report.versions if one.is_current)
        schema = schema_of(self.storage, self.url)
        return (
            now.number, tuple(sorted(one.number for one in report.versions)), tags_of(report),
            tuple(sample["__key__"] for sample in dataset), tuple(sorted(schema.late_fields)),
            tuple(now.classes.get("cls", ())),
        )  # fmt: skip

    # --- checks ---

    def check(self, state: SetState, also: Collection[int | str] = ()) -> None:
        """Compare the set with the model: the files of every version, and what is read of the current one.

        Args:
            state: The model.
            also: Numbers or names of further versions that are read.
        """
        report = history(self.url, storage=self.storage)
        listed = {one.number: one for one in report.versions}
        assert listed.keys() == state.versions.keys()
        assert dict(tags_of(report)) == state.tags
        self._check_held(state)
        for name in (None, *also):
            number = state.number if name is None else state.tags.get(str(name), name)
            classes = listed[int(number)].classes.get("cls", ())
            assert tuple(classes) == state.versions[int(number)].classes
            self._check_version(state.versions[int(number)], name)

    def _check_held(self, state: SetState) -> None:
        """Every file of every version is what it was, by every byte."""
        there = self.files()
        for number in {*self.held} - {*state.versions}:
            del self.held[number]
        for number in state.versions:
            if not state.lives:
                continue  # what it means is changed in its place
            if number not in self.held:
                self._hold(number, number == state.number, there)
            for path, data in self.held.get(number, {}).items():
                if path:
                    assert there[path] == data, path
                else:  # its chunk table
                    names = [str(number), *(name for name, one in state.tags.items() if one == number)]
                    places = [chunks_path()] if number == state.number else [version_path(name) for name in names]
                    assert data in [there[place] for place in places if place in there]

    def _hold(self, number: int, is_current: bool, there: Mapping[str, bytes]) -> None:
        """Note the files of a version; of one that was killed before it lived, what it means may still change."""
        path = chunks_path() if is_current else version_path(str(number))
        data = there[path]
        table = ChunkTable.from_parquet(data, path)
        paths = self.paths_of(table) & there.keys()
        assert {shard.name for shard in table.shards} <= paths
        if table.version is not None:
            self.held[number] = {"": data, **{one: there[one] for one in paths}}

    def paths_of(self, table: ChunkTable) -> set[str]:
        """Return the paths of the files that a version consists of, but for its chunk table."""
        schema = schema_of(self.storage, self.url, table)
        below = join_url(self.url, "")
        late = {url.removeprefix(below) for url in files_held(self.storage, self.url, [schema])}
        columns = {column_path(name, shard.name) for name, one in schema.columns.items() if one.is_late
                   for shard in table.shards}  # fmt: skip
        return late | columns | {path for shard in table.shards for path in (shard.name, samples_path(shard.name))}

    def _check_version(self, wanted: Version, name: int | str | None) -> None:
        fields = None
        if wanted.lacking:
            with pytest.raises(IndexMismatchError, match="has no values for"):
                self.open(name)
            base = {field for row in wanted.rows for field in row.fields} | ({"cls"} if wanted.classes else set())
            fields = tuple(sorted(base | ({*wanted.late} - wanted.lacking)))
        dataset = self.open(name, fields=fields)
        left_out = wanted.lacking
        samples = list(dataset)  # each byte by its checksum
        assert [one["__key__"] for one in samples] == wanted.keys
        for sample, row in zip(samples, wanted.rows, strict=True):
            check_sample(sample, row, wanted, left_out)
        with DataLoader(dataset, batch_size=5, last_batch="partial", num_threads=0, collate_fn=list) as loader:
            delivered = Counter(sample["__key__"] for batch in loader for sample in batch)
        assert delivered == Counter(wanted.keys)
        if name is not None:
            return
        value = wanted.rows[0].label if wanted.classes else wanted.rows[0].n
        where, mine = (f"class = '{value}'", "label") if wanted.classes else (f"n = {value}", "n")
        chosen = self.open(name, fields=("json",), where=where)
        assert [one["__key__"] for one in chosen] == [row.key for row in wanted.rows if getattr(row, mine) == value]


def tags_of(report: HistoryReport) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, one.number) for one in report.versions for name in one.names))


def check_sample(sample: Mapping[str, Any], row: Row, version: Version, left_out: set[str]) -> None:
    """Compare a sample with a row: every field by every byte, and the class by its name."""
    found = {name: bytes(value) for name, value in sample.items() if not name.startswith("__")}
    if row.label is not None:
        assert version.classes[int(found.pop("cls"))] == row.label
    late = {name: value for name, value in row.late.items() if value is not None and name not in left_out}
    assert found == {**row.fields, **late}, row.key


@contextmanager
def few_threads() -> Iterator[None]:
    """Do on this thread what is else done on many: a history of small sets takes a fraction of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epoch_loop, "FETCH_THREADS", 1)
        for module in (threads, listing, late_fields, shard_source, engine):
            patch.setattr(module, "ThreadPoolExecutor", OnThisThread)
        yield


class OnThisThread(Executor):
    """Calls at once what is submitted."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
