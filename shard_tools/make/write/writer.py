"""Write samples into deterministic tar shards with their index, on any store: ``ShardWriter``."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import numpy as np

from shard_tools.make.write.change import SetChange, next_number, open_head, with_added
from shard_tools.make.write.columns import ColumnSpec, ColumnValue, parse_columns
from shard_tools.make.write.encode import Buffers, encode_field
from shard_tools.make.write.keys import SeenKeys, check_field, check_key
from shard_tools.make.write.mark import TargetMark, digest_of_work
from shard_tools.make.write.recorder import IndexRecorder, TarRecord
from shard_tools.make.write.sample_runs import SampleRun, sample_run
from streaming.common.arguments import checks_names, is_list, is_whole, parse_bytes
from streaming.common.forks import Maker
from streaming.errors import SEVERAL, ConfigError, ShardstreamError, StorageError
from streaming.shards.catalog.unfinished import WRITER
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.schema.value import Schema, class_schema
from streaming.shards.tar.blocks import is_meta
from streaming.shards.tar.group import MAX_FIELDS
from streaming.shards.tar.headers import END_OF_ARCHIVE, member_header, padding
from streaming.shards.versions.history import refuse_tags
from streaming.storage import Storage, StoreWriter, join_url, redact, scheme_of, split_url
from streaming.types import override

DEFAULT_MAX_BYTES = "256MB"
"""Default size of a shard: one connection reads it in a few seconds; 100 TB make 400,000 objects."""
_SILENT: Final = Schema()
_BRACES: Final = re.compile(r"\{(?::(?:0([0-9]{1,2}))?d?)?\}")
_PERCENT: Final = re.compile(r"%(?:0([0-9]{1,2}))?d")
# A sample's pieces are joined into one buffer up to this size: fewer calls for small samples, no copies of large ones.
_JOIN_BYTES: Final = 1 << 20
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("out", "local", "remote"), 'give the shards as the first argument, such as "s3://bucket/train/{:06d}.tar"'
    ),
    **dict.fromkeys(("size_limit", "maxsize", "chunk_bytes"), "write max_bytes=…"),
    **dict.fromkeys(("maxcount", "chunk_size"), "write max_samples=…"),
    "exist_ok": "write overwrite=True",
    **dict.fromkeys(("compression", "compress"), "leave it out: shards are not compressed; fields may be"),
    "hashes": "leave it out: the index has checksums of every sample",
    "keep_local": "leave it out: nothing is kept here",
    "encoder": "leave it out: values are encoded by the extension of their field, and bytes are kept",
}
"""Options of other writers, and their equivalents here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    """A URL with a placeholder for the shard's number in its last component."""

    directory: str
    stem: str
    suffix: str
    num_digits: int

    def url(self, shard: int) -> str:
        return join_url(self.directory, f"{self.stem}{shard:0{self.num_digits}d}{self.suffix}")

    def mark(self, storage: Storage, start_shard: int) -> TargetMark:
        """Return the mark of a writer that begins with this shard."""
        name = f"{self.stem}{{:0{self.num_digits}d}}{self.suffix}"
        return TargetMark(
            storage, [self.directory], command=WRITER, work=digest_of_work(WRITER, name, start_shard), what=name,
            start=start_shard,
        )  # fmt: skip


@checks_names(_ELSEWHERE)
class ShardWriter:
    """Write samples into WebDataset shards of bounded size, and the index beside them.

    ::

        with ShardWriter("s3://bucket/train/{:06d}.tar", max_bytes="256MB") as writer:
            writer.write({"__key__": "000001", "jpg": jpeg_bytes, "cls": 3, "json": {"w": 400}})

    The same samples give the same shards and the same index, byte for byte: fields are sorted by name, and headers hold
    no times, owners or insertion order. A shard becomes visible only when it is complete; its sample table follows
    immediately, and :meth:`close` adds all shards to the directory's chunk table.

    From before the first shard until :meth:`close` has returned, the directory is marked as unfinished. Readers refuse
    it, also after the writer was killed or failed. In that case, run the program again with ``overwrite``, or with
    ``start_shard`` after the existing shards; or accept the existing shards with ``shard_tools index
    --allow-unfinished``.

    Memory: the parts that the store's writer has in flight, the current sample, its shard's sample table, and a few
    bytes per key (``shard_tools.make.write.keys.SeenKeys``). Large values are written without a copy.

    Not thread-safe. Use a writer only in the process that made it: in a forked child ``write`` and ``close`` raise
    ForkedError, and leaving the context does nothing. Several writers, also in several processes, may fill one
    directory with shards of different numbers (``start_shard``); each knows only its own keys, and the directory stays
    marked until the last one is closed.

    Args:
        pattern: URL or path of the shards with one placeholder for the number: ``"s3://bucket/train/{:06d}.tar"``, or
            ``%06d`` as in printf.
        max_bytes: Maximum size of a shard; a single sample may exceed it. 256 MB is large enough for sequential reads,
            and small enough to be rewritten or uploaded again.
        max_samples: Maximum number of samples per shard; None: no limit.
        storage_options: Options of the store, as for ``StreamingDataset``.
        index: True: write the index to ``_shardstream/`` beside the shards; a URL: write it there; False: write none.
        columns: Values to store in the sample table, by column name: a callable that takes the sample as passed to
            :meth:`write`, or a path such as ``"json.w"``. A list of paths names the columns after the paths.
        overwrite: Replace existing shards, which are refused otherwise. Shards with higher numbers from an earlier,
            longer run are not deleted: delete them, or write to an empty directory.
        start_shard: Number of the first shard.
        classes: Names of classes in the order of their numbers, by field, such as ``{"cls": ["cat", "dog"]}``; if a
            column has the field's name, the same names apply to it. Readers get the names, and compare them when this
            set is joined with another. All writers of one directory must give the same names.
        append: Add to an existing set: the shards get new names, and :meth:`close` publishes them as the set's next
            version. Until then, and if the writer fails, readers see the earlier version. If two writers append at the
            same time, one succeeds, and :meth:`close` of the other raises.

    Raises:
        ConfigError: An argument is invalid.
    """

    _marks = True
    _schema: Schema | None = None

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        max_bytes: int | str = DEFAULT_MAX_BYTES,
        max_samples: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        index: bool | str | os.PathLike[str] = True,
        columns: ColumnSpec = None,
        overwrite: bool = False,
        start_shard: int = 0,
        classes: Mapping[str, Sequence[str]] | None = None,
        append: bool = False,
    ) -> None:
        self._pattern = _parse_pattern(pattern)
        self._max_bytes = parse_bytes(max_bytes, name="max_bytes")
        self._max_samples = _positive(max_samples, "max_samples")
        if not is_whole(start_shard) or start_shard < 0:
            raise ConfigError(f"start_shard: expected an int of at least 0, got {start_shard!r}")
        self._next_shard = start_shard
        self._overwrite = overwrite
        self._storage = Storage(storage_options)
        self._seen = SeenKeys()
        self._shards: list[str] = []
        self._num_samples = 0
        self._out: StoreWriter | None = None
        self._url = ""
        self._shard_bytes = 0
        self._shard_samples = 0
        self._state = "open"
        self._maker = Maker("this ShardWriter", "Make one in this process, with shards of other numbers (start_shard)")
        schema = checked_schema(classes, columns) if self._schema is None else self._schema
        self._recorder = IndexRecorder.create(
            self._storage, self._pattern.directory, index=index, columns=columns, schema=schema
        )  # fmt: skip
        self._mark = self._pattern.mark(self._storage, start_shard) if self._marks and not append else None
        self._change = self._appending(schema, overwrite=overwrite, index=index) if append else None
        self._may_differ = False  # whether the directory may have changed

    @property
    def shards(self) -> tuple[str, ...]:
        """URLs of the shards published so far, in order."""
        return tuple(self._shards)

    @property
    def num_shards(self) -> int:
        """Number of shards published so far."""
        return len(self._shards)

    @property
    def num_samples(self) -> int:
        """Number of samples accepted by :meth:`write`."""
        return self._num_samples

    def write(self, sample: Mapping[str, object]) -> None:
        """Append one sample: ``__key__`` and one entry per field.

        Values are encoded according to the field's extension (``shard_tools.make.write.encode``). Other entries named
        ``__…__`` are left out, such as the ``__url__`` of a sample that was read. The caller may change the values
        after this has returned.

        Raises:
            ConfigError: A key, field or value cannot be stored so that every reader gets it back. Nothing of the sample
                has been written, and the writer can still be used.
            DuplicateKeyError: The key was used before.
            StorageError: The store failed; the open shard is dropped and the writer is closed.
        """
        if self._state != "open":
            raise ConfigError(f"this ShardWriter is {self._state}; make a new one to write more")
        self._maker.check()
        key = _key_of(sample)
        record = make_record(sample, key)
        rolls = self._out is None or self._is_full(record.num_bytes)
        self._seen.check(key, new_shard=rolls)
        values = self._recorder.column_values(sample, key) if self._recorder else ()
        try:
            if rolls:
                self._finish_shard()
                self._start_shard()
            self._append(record, values)
        except BaseException:
            self.abort()
            raise
        self._seen.add(key, new_shard=rolls)

    def close(self, *, chunk_table: bool = True) -> None:
        """Publish the last shard and the chunk table. Calling it again does nothing.

        Args:
            chunk_table: False leaves the chunk table to another writer of the directory, which must be closed later and
                then adds the shards of all writers. Until then the directory stays marked as unfinished.

        Raises:
            StorageError: The store failed. Shards published before remain; the open one is dropped.
        """
        if self._state != "open":
            return
        self._maker.check()
        try:
            self._finish_shard()
            if self._change is not None and self._recorder is not None:
                self._publish(self._change, self._recorder)
            elif chunk_table and self._recorder is not None:
                self._recorder.publish_chunk_table()
            if self._mark is not None and (self._shards or self._recorder is not None):
                awaits_table = self._recorder is not None and not chunk_table
                self._mark.finish_shards(self._next_shard, awaits_table=awaits_table)
        except BaseException:
            self.abort()
            raise
        self._state = "closed"

    def _publish(self, change: SetChange, recorder: IndexRecorder) -> None:
        """Publish the set with the shards of this writer, if there are any."""
        if not self._shards:
            return
        tables, meaning = recorder.recorded()
        table = ChunkTable.merged(change.head.table.by_shard(), tables)
        change.publish(table, schema=with_added(change.head, meaning))
        change.__exit__(None, None, None)

    def abort(self) -> None:
        """Drop the open shard and stop.

        Shards published before remain, without an entry in the chunk table, and the directory stays marked as
        unfinished.
        """
        if self._state != "open" or not self._maker.is_here:
            return
        self._state = "aborted"
        out, self._out = self._out, None
        if out is not None:
            out.abort()
        if self._mark is not None and not self._may_differ:
            with suppress(ShardstreamError):  # the directory stays marked
                self._mark.withdraw()
        if self._change is not None and self._url:
            self._change.__exit__(ShardstreamError, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _is_full(self, num_bytes: int) -> bool:
        return is_full(
            self._shard_bytes,
            self._shard_samples,
            num_bytes,
            max_bytes=self._max_bytes,
            max_samples=self._max_samples,
        )

    def _appending(self, schema: Schema, *, overwrite: bool, index: object) -> SetChange:
        """Return the change of the set that this writer makes; its shards follow those that are there.

        Raises:
            ConfigError: Another option contradicts it, or the set means something else.
        """
        if overwrite or self._next_shard or index is not True:
            raise ConfigError(
                "append=True: the set says which shard is next, and has its index beside the shards; leave overwrite, "
                "start_shard and index out"
            )
        pattern = self._pattern
        head = open_head(self._storage, pattern.directory or ".")
        self._next_shard = next_number((one.name for one in head.table.shards), pattern.stem, pattern.suffix)
        change = SetChange(
            self._storage, head, command="ShardWriter", what=redact(pattern.url(0)), identity=uuid4().hex
        )
        with_added(head, schema)
        self._pattern = replace(pattern, suffix=change.named(pattern.suffix))
        return change

    def _start_shard(self) -> None:
        url = self._pattern.url(self._next_shard)
        if self._change is not None:
            if not self._shards:
                self._change.__enter__()
            self._change.writes([split_url(url)[1]])
        if not self._overwrite and self._storage.exists(url):
            raise StorageError(
                f"{redact(url)} exists already; pass overwrite=True to replace it, or keep it and pass "
                f"another pattern or a start_shard beyond {self._next_shard}"
            )
        if self._mark is not None and not self._mark.is_begun:
            if self._recorder is not None and not self._overwrite:
                self._recorder.check_beside()
            self._begin(self._mark)
        self._next_shard += 1
        self._url = url
        self._shard_bytes = 0
        self._shard_samples = 0
        self._out = self._storage.open_write(url)
        if self._recorder is not None:
            self._recorder.start_shard(url)

    def _begin(self, mark: TargetMark) -> None:
        """Mark the directory before the first shard.

        An existing shard directly before the first one comes from an interrupted writer. With ``overwrite`` it may be
        older, so it does not count.

        Raises:
            ConfigError: The set there has tagged versions, which would be overwritten.
        """
        if self._overwrite:
            refuse_tags(self._storage, self._pattern.directory or ".")
        before = self._next_shard - 1
        mark.begin_shards(goes_on=lambda: not self._overwrite and self._storage.exists(self._pattern.url(before)))

    def _append(self, record: TarRecord, values: tuple[ColumnValue, ...]) -> None:
        out = self._out
        if out is None:  # pragma: no cover  # our own invariant
            raise ConfigError("no shard is open")
        pieces: Buffers = record.pieces
        if record.num_bytes <= _JOIN_BYTES:
            pieces = [b"".join(pieces)]
        if self._recorder is not None:
            self._recorder.add(record, pieces, values)
        for piece in pieces:
            out.write(piece)
        self._shard_bytes += record.num_bytes
        self._shard_samples += 1
        self._num_samples += 1

    def _finish_shard(self) -> None:
        out = self._out
        if out is None:
            return
        out.write(END_OF_ARCHIVE)
        if self._recorder is not None:
            self._recorder.seal_shard(self._shard_bytes + len(END_OF_ARCHIVE), replaces=self._overwrite)
        self._may_differ = True
        out.close()
        self._out = None
        self._shards.append(self._url)
        if self._recorder is not None:
            self._recorder.publish_shard()


class UnmarkedWriter(ShardWriter):
    """Write shards like ``ShardWriter``, for a command that marks the directory itself and has many samples."""

    _marks = False

    on_shard: Callable[[int, int, int], None] | None = None
    """Called after each shard with the number of shards so far, of their samples, and of the bytes of this shard."""

    def __init__(self, pattern: str, *, schema: Schema = _SILENT, **options: Any) -> None:
        self._schema = schema
        super().__init__(pattern, **options)

    @override
    def _finish_shard(self) -> None:
        num_shards = self.num_shards
        super()._finish_shard()
        if self.on_shard is not None and self.num_shards > num_shards:
            self.on_shard(self.num_shards, self.num_samples, self._shard_bytes)

    def finish(self) -> tuple[dict[str, ChunkTable], Schema]:
        """Publish the last shard, and close; return the shards' chunk tables by name, and what they mean.

        They are in no chunk table yet: that is up to the caller.
        """
        self.close(chunk_table=False)
        return ({}, Schema()) if self._recorder is None else self._recorder.recorded()

    @property
    def shard_bytes(self) -> int:
        """Bytes of the samples in the open shard."""
        return self._shard_bytes

    def write_all(self, samples: Sequence[Mapping[str, object]]) -> None:
        """Append samples in order like :meth:`write`: the same bytes, in less time for small samples.

        Raises:
            ConfigError: As for :meth:`write`; the samples before are written (``num_samples``).
            DuplicateKeyError: As for :meth:`write`.
            StorageError: The store failed.
        """
        for _, group in itertools.groupby(samples, key=tuple):
            alike = [*group]
            run = self._run_of(alike) if len(alike) > 1 and self._state == "open" else None
            if run is not None:
                self._write_run(run)
                continue
            for sample in alike:
                self.write(sample)

    def _run_of(self, samples: Sequence[Mapping[str, object]]) -> SampleRun | None:
        columns = self._recorder.columns_of(samples) if self._recorder else ()
        return None if columns is None else sample_run(samples, columns)

    def _write_run(self, run: SampleRun) -> None:
        self._maker.check()
        at, done_bytes = 0, 0
        while at < len(run.keys):
            rolls = self._out is None or self._is_full(int(run.ends[at]) - done_bytes)
            room = self._max_bytes - len(END_OF_ARCHIVE) - (0 if rolls else self._shard_bytes)
            stop = max(at + 1, int(np.searchsorted(run.ends, done_bytes + room, side="right")))
            if self._max_samples is not None:
                stop = min(stop, at + self._max_samples - (0 if rolls else self._shard_samples))
            stop = at + self._seen.add_all(run.keys[at:stop], new_shard=rolls)
            if stop == at:
                self._seen.check(run.keys[at], new_shard=rolls)  # raises the error of this key
            part = run.part(at, stop)
            try:
                if rolls:
                    self._finish_shard()
                    self._start_shard()
                self._append_run(part)
            except BaseException:
                self.abort()
                raise
            at, done_bytes = stop, int(run.ends[stop - 1])

    def _append_run(self, run: SampleRun) -> None:
        out = self._out
        if out is None:  # pragma: no cover  # our own invariant
            raise ConfigError("no shard is open")
        content = b"".join(run.pieces)
        if self._recorder is not None:
            self._recorder.add_run(run, content)
        out.write(content)
        self._shard_bytes += len(content)
        self._shard_samples += len(run.keys)
        self._num_samples += len(run.keys)


def checked_schema(classes: Any, columns: ColumnSpec) -> Schema:
    """Return the schema of a writer's classes.

    Raises:
        ConfigError: They are not lists of distinct names, by field.
    """
    given = {} if classes is None else classes
    if not isinstance(given, Mapping):
        raise ConfigError(f'classes: expected names by field, such as {{"cls": ["cat", "dog"]}}, got {classes!r}')
    for name, names in given.items():
        is_names = is_list(names) and all(isinstance(one, str) and one for one in names)
        if not isinstance(name, str) or not is_names or len({*names}) < len(names):
            raise ConfigError(f"classes[{name!r}]: expected a list of different names, got {names!r}")
    of_columns = {name: names for name, names in given.items() if name in parse_columns(columns)}
    return class_schema(given, of_columns)


def is_full(shard_bytes: int, shard_samples: int, num_bytes: int, *, max_bytes: int, max_samples: int | None) -> bool:
    """Return whether a record of ``num_bytes`` must start a new shard, given the size of the current one."""
    if max_samples is not None and shard_samples >= max_samples:
        return True
    return shard_bytes + num_bytes + len(END_OF_ARCHIVE) > max_bytes


def make_record(sample: Mapping[str, object], key: str) -> TarRecord:
    """Return the tar blocks of one sample, its fields sorted by name.

    Raises:
        ConfigError: A field or value cannot be stored, or the sample has no fields.
    """
    fields = tuple(sorted(check_field(name, key) for name in sample if not (isinstance(name, str) and is_meta(name))))
    if not fields:
        raise ConfigError(f"sample {key!r} has no field but __key__; readers would never see it; add one or skip it")
    if len(fields) > MAX_FIELDS:
        raise ConfigError(
            f"sample {key!r} has {len(fields)} fields, readers take at most {MAX_FIELDS}; pack them together"
        )
    pieces: Buffers = []
    starts, sizes = [], []
    offset = 0
    for field in fields:
        content = encode_field(sample[field], field=field, key=key)
        size = sum(map(len, content))
        header = member_header(f"{key}.{field}", size)
        pad = padding(size)
        starts.append(offset + len(header))
        sizes.append(size)
        pieces += (header, *content, pad)
        offset += len(header) + size + len(pad)
    return TarRecord(key=key, fields=fields, starts=tuple(starts), sizes=tuple(sizes), num_bytes=offset, pieces=pieces)


def _key_of(sample: Mapping[str, object]) -> str:
    try:
        key = sample["__key__"]
    except KeyError:
        raise ConfigError(
            f"the sample has no '__key__', only {sorted(map(str, sample))}; add a unique str such as '000001'"
        ) from None
    return check_key(key)


def _positive(value: int | None, name: str) -> int | None:
    if value is not None and (not is_whole(value) or value < 1):
        raise ConfigError(f"{name}: expected an int of at least 1, or None, got {value!r}")
    return value


def refuse_several(target: str, *parts: str) -> None:
    """Refuse parts of a target's name that readers would expand to several URLs in its store.

    Local files and folders are read by their exact names.

    Raises:
        ConfigError: There are braces, or ``::``.
    """
    special = next((found[0] for part in parts if (found := SEVERAL.search(part))), "")
    if special and scheme_of(target) != "file":
        raise ConfigError(
            f"{redact(target)}: no object can be read by a name with {special!r}, which stands for several URLs; leave "
            "braces and '::' out of the names of folders and shards"
        )


def _parse_pattern(pattern: str | os.PathLike[str]) -> _Pattern:
    pattern = os.fspath(pattern)
    directory, name = split_url(pattern)
    matches = list(_BRACES.finditer(name)) or list(_PERCENT.finditer(name))
    if len(matches) != 1:
        raise ConfigError(
            f"{redact(pattern)}: the file name needs exactly one place for the shard's number, such as "
            f"'{{:06d}}.tar' or '%06d.tar'; got {len(matches)} in {name!r}"
        )
    if not name.endswith(".tar"):
        raise ConfigError(
            f"{redact(pattern)}: shards are plain tar files; end the name with '.tar' "
            "(compressed ones have no random access)"
        )
    (match,) = matches
    stem, suffix = name[: match.start()], name[match.end() :]
    refuse_several(pattern, directory, stem, suffix)
    return _Pattern(
        directory=directory,
        stem=stem,
        suffix=suffix,
        num_digits=int(match[1] or 0),
    )
