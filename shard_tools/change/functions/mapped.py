"""Apply a function to the samples of a set and write the results as a new set: the command ``map``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa

from shard_tools.change.functions.append import MAP, NewInputs, journal_of_function
from shard_tools.change.functions.produce import Given, Produce
from shard_tools.change.functions.run import FunctionReport, Running, add_made, pack_made
from shard_tools.change.sets.bad_list import BadList
from shard_tools.change.sets.late import Takes
from shard_tools.change.sets.open_set import READ_THREADS, load_samples, open_set, table_of_shard
from shard_tools.change.sets.pieces import ShardPieces
from shard_tools.change.sets.rewrite.meaning import Retold
from shard_tools.change.sets.rewrite.selection import ShardPart, Taken, select
from shard_tools.change.sets.rewrite.shard_source import ShardSource
from shard_tools.make.convert.base.identity import KnownInputs, Origins, SourceIdentity, SourceStorage
from shard_tools.make.convert.base.records import Record, ShardOptions
from shard_tools.make.convert.pack import Destination, Lift, refuse_overlap, warn_of_nesting
from shard_tools.make.write.change import open_head
from shard_tools.running.engine import Shared
from shard_tools.running.functions import imported
from shard_tools.running.progress import NoProgress, Progress
from streaming.build.batches.bad_file import shown_url
from streaming.build.decode import decode_field, resolve_decoders
from streaming.build.decode.values import packed
from streaming.common.arguments import counted, unpacked_name
from streaming.common.identities import identity_of
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError, DecodeError
from streaming.sets.filters.select import late_names
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import KEY
from streaming.shards.index.layout import without_work, work_of
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.where import unknown_column
from streaming.shards.schema.joined import Classes
from streaming.shards.tar.blocks import is_meta
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, join_url, redact, split_url
from streaming.types import Int64Array

_log = logging.getLogger(__name__)
_WINDOW_BYTES = 8 << 20
_PART_DIGITS = 3
_PLAIN = (str, bytes, int, float, bool, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class MapOptions(ShardOptions):
    """Options of the new shards, in addition to ``ShardOptions``.

    Attributes:
        fields: Fields that the function gets, decoded; None: all. The others are kept unchanged.
        where: Condition on columns, as ``StreamingDataset`` takes it.
        view: Name of a saved view to take the samples from.
        columns: Late columns to include in the new sample tables, in addition to the old tables' columns.
        index_url: Location of the source's index, if not beside its shards.
        allow_unfinished: Accept an unfinished source, and take the samples that are there.
        classes: ``"union"``: match the classes of several sets by name, and renumber them.
    """

    fields: tuple[str, ...] | None = None
    where: str | None = None
    view: str | None = None
    columns: tuple[str, ...] = ()
    index_url: str | None = None
    allow_unfinished: bool = False
    classes: Classes = None


def map_set(
    source: str | Sequence[str],
    target: str,
    spec: str,
    *,
    options: MapOptions | None = None,
    append: bool = False,
    running: Running | None = None,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> FunctionReport:
    """Apply a function to the samples of ``source``, and write the results into indexed shards in ``target``.

    The function gets one sample, a dict of its fields, decoded as training does by default, with ``__key__`` and
    ``__url__``. It returns the fields that change (None removes one), a list or generator of such dicts to make
    several samples of one, or None to leave the sample out. Fields that it does not return, or returns unchanged, keep
    their bytes; if it returns the dict that it got, fields that it deleted from it are removed. Samples keep the
    columns of their sample tables, and their keys (``KEY-000``, … for several) unless the function changes
    ``__key__``. Every byte read is checked. Deterministic and resumable, like :func:`shard_tools.optimize`.

    Args:
        source: Shards, as for ``StreamingDataset``; several sources are read in this order.
        target: Folder or prefix for the new shards, or a pattern such as ``"out/train-{:06d}.tar"``.
        spec: ``"module:function"``: a module that can be imported, also from the current folder.
        options: Options of the new shards.
        append: Add to the set in ``target``, which the same function made, the samples of shards that are new to it,
            and publish them as its next version. Shards are known by their content. The set gives the options, except
            ``index_url``, ``allow_unfinished`` and ``workers``.
        running: Where the function runs, and how its failures are treated.
        storage_options: Options of both stores.
        progress: Receives the samples read and the bytes written.

    Raises:
        ConfigError: There is no such function, or options do not fit the source.
        TargetNotEmptyError: The target holds shards of other work.
        OvertakenError: With ``append``, another change of the set was published meanwhile; nothing was added.
        DataError: A sample cannot be read or stored, or no sample is left.
        Exception: The function's exception; a note names the sample.
    """
    options = options or MapOptions()
    function = imported(spec, "map")
    storage = Storage(storage_options)
    place = Destination.of(target)
    sources = [source] if isinstance(source, str) else [*source]
    for one in sources:
        refuse_overlap(one, place)
        warn_of_nesting(one, place)
    if append:
        options = _options_of(open_head(storage, place.directory), storage, options)
    inputs, versions, retold = _selected(sources, place, options, storage, storage_options)
    names = tuple(dict.fromkeys((*inputs.taken.columns, *options.columns)))
    work = Produce(
        function=MapCall(function=function, fields=options.fields), read=inputs.read,
        columns={name: Lift(name) for name in names}, name=spec,
    )  # fmt: skip
    identity = {
        **options.identity(), "function": identity_of(function), "columns": list(names), "late": versions,
        "fields": None if options.fields is None else sorted(options.fields), "where": options.where,
        "view": options.view, **retold.identity(),
    }  # fmt: skip
    how: dict[str, Any] = {"running": running or Running(), "progress": progress or NoProgress()}
    if append:
        new = NewInputs(inputs, place, identity, storage_options, made_by=MAP)
        return add_made(replace(work, read=new.inputs.read), new, schema=retold.schema(names), **how)
    return pack_made(
        work, inputs, place, options, command=("map", " ".join(sources)), identity=identity,
        storage_options=storage_options, schema=retold.schema(names), **how,
    )  # fmt: skip


def _options_of(head: Head, storage: Storage, given: MapOptions) -> MapOptions:
    """Return the options with which a set was made; ``given`` are those that say how it is read.

    Raises:
        ConfigError: Another command made it, or its source was selected or changed in a way that fits no new samples.
    """
    said = journal_of_function(head, storage, MAP).options
    if said["view"] is not None or "meaning" in said:
        what = f"of the view {said['view']!r}" if said["view"] is not None else "with classes renumbered by name"
        raise ConfigError(
            f"--append: {redact(head.home)} was made {what}, which says nothing of new samples; map the whole source "
            "to another target"
        )
    return MapOptions(
        max_bytes=said["max_bytes"], max_samples=said["max_samples"], columns=tuple(said["late"]),
        fields=None if said["fields"] is None else tuple(said["fields"]), where=said["where"], workers=given.workers,
        index_url=given.index_url, allow_unfinished=given.allow_unfinished,
    )  # fmt: skip


def _selected(
    sources: list[str], place: Destination, options: MapOptions, storage: Storage,
    storage_options: Mapping[str, object] | None,
) -> tuple[SampleInputs, dict[str, str], Retold]:  # fmt: skip
    """Return the selected samples, the versions of the late columns that are kept, and the common schema."""
    shards = open_set(
        sources, storage, options.index_url, exclude=place.directory, allow_unfinished=options.allow_unfinished,
        meets=False,
    )  # fmt: skip
    retold = Retold.of(shards, storage, classes=options.classes, fields=None, takes=Takes(columns=options.columns))
    retold.check_selected(shards, storage, where=options.where, view=options.view)
    late = shards.late_columns(storage, options.columns)
    taken = select(
        shards, storage, kept=shards.kept(storage, where=options.where, view=options.view), late=[*late.values()],
        drop=BadList(by_shard={}), needed=(), fields=None, with_keys=False, progress=NoProgress(),
    )  # fmt: skip
    known = {*taken.columns, *late, *late_names(storage, shards.as_opened), KEY}
    for name in sorted({*options.columns} - known):
        raise unknown_column(name, known, "--columns")
    for name in sorted({*(options.fields or ())} - {*taken.fields}):
        there = ", ".join(taken.fields)
        raise ConfigError(
            f"--fields: no sample of {' '.join(map(redact, sources))} has a field {name!r}; there are: {there}"
        )
    read = _ReadShards(
        urls=shards.urls, index_url=options.index_url, storage_options=storage_options,
        scanned=shards.scanned is not None, retold=retold,
    )  # fmt: skip
    inputs = SampleInputs(taken=taken, urls=shards.urls, chunks=shards.chunks, read=read, storage=storage)
    return inputs, {name: column.version for name, column in sorted(late.items())}, retold


_Rows = tuple[int, Int64Array, dict[str, pa.Array]]


class SampleInputs:
    """Samples of a selection, read as bytes by the worker processes.

    Args:
        taken: The selection.
        urls: The shards.
        chunks: Their chunk table.
        read: Reads the samples of a part.
        storage: Their store.
    """

    def __init__(
        self, *, taken: Taken, urls: tuple[str, ...], chunks: ChunkTable, read: _ReadShards, storage: Storage
    ) -> None:
        self.taken, self.urls, self.read = taken, urls, read
        self._chunks, self._storage = chunks, storage
        of_folders = {split_url(url)[0]: url for url in urls}
        self.shared: Shared = [(storage, url) for url in of_folders.values()]
        self._facts: dict[str, object] = {
            "kind": "shards", "num_inputs": taken.num_samples, "fingerprint": chunks.fingerprint,
            "samples": taken.digest(),
        }  # fmt: skip
        self._firsts = np.cumsum([0] + [part.rows.size for part in taken.parts])
        store = SourceStorage.of(storage)
        infos = zip(urls, self._firsts.tolist(), map_threads(store.info, urls, READ_THREADS), strict=False)
        inputs = [
            SourceIdentity(
                name=split_url(url)[1], url=url, number=first, size_bytes=info.size_bytes, version=info.version,
                content=chunks.of_shard(number).fingerprint,
            )
            for number, (url, first, info) in enumerate(infos)
        ]  # fmt: skip
        self._origins = Origins(inputs=inputs, store=store)

    def new_to(self, known: KnownInputs) -> SampleInputs:
        """Return the samples of shards that are not known, nor rewritten from known ones.

        Raises:
            ConfigError: A shard may hold samples of a known one that is gone.
        """
        gone = {
            name: one for one in known.gone(self._origins.inputs) for name in (one.name, without_work(one.name))
        }  # fmt: skip
        which, num_rest = list[int](), 0
        for number, one in enumerate(self._origins.inputs):
            if known.has(one):
                continue
            before = None if work_of(one.name) is None else gone.get(without_work(one.name))
            if before is not None and self._is_rest(number, before):
                num_rest += 1
            else:
                which.append(number)
        if num_rest:
            _log.warning(
                "samples were deleted from %s of the source since; what was made of them stays in the target until you "
                "delete it there, too", counted(num_rest, "shard"),
            )  # fmt: skip
        urls = tuple(self.urls[number] for number in which)
        return SampleInputs(
            taken=replace(self.taken, parts=tuple(self.taken.parts[number] for number in which)), urls=urls,
            chunks=ChunkTable.concat([self._chunks.of_shard(number) for number in which]),
            read=replace(self.read, urls=urls), storage=self._storage,
        )  # fmt: skip

    def _is_rest(self, number: int, before: SourceIdentity) -> bool:
        """Return whether a shard was written in place of a known one, and so holds only samples of that one.

        Raises:
            ConfigError: The index no longer says what that one held.
        """
        url = self.urls[number]
        old = load_samples(self._storage, join_url(split_url(url)[0], before.name), self.read.index_url)
        if old is None:
            raise ConfigError(
                f"--append: {redact(url)} may be written in place of {before.name}, which the target was made of, and "
                "the index no longer says what that held; map the whole source to another target"
            )
        is_it = old.chunks.fingerprint == before.content
        return is_it and {*self.taken.parts[number].samples().keys} <= {*old.keys}

    def origins(self) -> Origins:
        """Return the shards, each with the number of its first selected sample."""
        return self._origins

    def __len__(self) -> int:
        return self.taken.num_samples

    def identity(self) -> dict[str, object]:
        """Return the identity of the shards' content and of the selection."""
        return dict(self._facts)

    def part(self, start: int, stop: int) -> list[_Rows]:
        """Return the number, rows and columns of each shard that holds these samples."""
        found: list[_Rows] = []
        which = int(np.searchsorted(self._firsts, start, side="right")) - 1
        while start < stop:
            part, first = self.taken.parts[which], int(self._firsts[which])
            low, high = start - first, min(stop - first, part.rows.size)
            if high > low:
                columns = {name: column.slice(low, high - low) for name, column in part.columns.items()}
                found.append((which, part.rows[low:high], columns))
            start, which = first + high, which + 1
        return found

    def describe(self, number: int) -> str:
        """Return the number and shard of a sample."""
        ((which, rows, _),) = self.part(number, number + 1)
        return f"sample {rows[0]} of {shown_url(self.urls[which])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadShards:
    """Read samples of shards as records, in a worker process; every byte is checked."""

    urls: tuple[str, ...]
    index_url: str | None
    storage_options: Mapping[str, object] | None
    scanned: bool
    retold: Retold

    def __call__(self, part: list[_Rows]) -> Iterator[Given]:
        storage = Storage(self.storage_options)
        for which, rows, columns in part:
            url = self.urls[which]
            table = _table(self, which)
            whole = ShardPart(
                pieces=ShardPieces.of(url, table), rows=rows, sizes=np.diff(table.record_starts)[rows], columns=columns,
                keys=None, present=None, first=0, samples=partial(_itself, table),
            )  # fmt: skip
            for row, found in zip(rows.tolist(), _records(whole, storage, self.retold), strict=True):
                error = found if isinstance(found, DataError) else None
                yield Given(
                    value=(url, found), error=error, url=shown_url(url), key=table.keys[row], number_in_shard=row
                )  # fmt: skip


def _itself(table: SampleTable) -> SampleTable:
    return table


def _records(part: ShardPart, storage: Storage, retold: Retold) -> Iterator[Record | DataError]:
    """Yield the record of each row, or the error of a damaged row."""
    done = 0
    while done < part.rows.size:
        taken = Taken(
            parts=(part.taken(np.arange(done, part.rows.size)),), columns=(), fields=(), num_source=0, num_dropped=0,
            num_filtered=0, not_found=(),
        )  # fmt: skip
        source = ShardSource(
            taken, None, storage, fingerprint="", fields=None, window_bytes=_WINDOW_BYTES, num_threads=1,
            changes=retold.of_shard if retold.by_home else None,
        )  # fmt: skip
        try:
            for record in source.records(0):
                yield record
                done += 1
        except DataError as error:
            yield error
            done += 1


@lru_cache(maxsize=4)
def _table_at(url: str, index_url: str | None, scanned: bool, options: tuple[tuple[str, object], ...]) -> SampleTable:  # noqa: FBT001
    return table_of_shard(Storage(dict(options)), url, index_url, scanned=scanned)


def _table(read: _ReadShards, which: int) -> SampleTable:
    options = tuple(sorted((read.storage_options or {}).items()))
    return _table_at(read.urls[which], read.index_url, read.scanned, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCall:
    """Call the function on the decoded fields of a record, and merge its result with the unchanged fields.

    Attributes:
        function: The user's function.
        fields: Fields that it gets; None: all.
    """

    function: Callable[[Any], Any]
    fields: tuple[str, ...] | None

    def __call__(self, given: tuple[str, Record]) -> Any:
        """Return a sample, an iterator of several, or None."""
        url, record = given
        decoders = resolve_decoders("auto")
        decoded: dict[str, Any] = {}
        try:
            for name in record.fields if self.fields is None else self.fields:
                if name in record.fields:
                    decoder = decoders.decoder_for(name)
                    decoded[name] = decode_field(decoder, record.fields[name], url=url, key=record.key, field=name)
        except (DecodeError, ConfigError) as error:
            error.add_note("--fields says which fields are decoded for the function")
            raise
        sample = {"__key__": record.key, "__url__": redact(url), **decoded}
        answer = _Answer(record=record, decoded=decoded, sample=sample)
        result = self.function(answer.sample)
        if result is None or isinstance(result, Mapping):
            return None if result is None else answer.joined(result, None)
        return answer.several(result) if isinstance(result, (list, tuple, Iterator)) else result


class _Answer:
    """The fields that a function got, to be compared with its result."""

    def __init__(self, *, record: Record, decoded: dict[str, Any], sample: dict[str, Any]) -> None:
        self.sample = sample
        self._record, self._decoded = record, decoded
        self._sums = {name: crc32c.crc32c(_bytes(one)) for name, one in decoded.items() if isinstance(one, np.ndarray)}

    def several(self, results: Any) -> Iterator[Any]:
        """Yield each of several samples, merged with the unchanged fields."""
        for part, result in enumerate(results):
            yield self.joined(result, part) if isinstance(result, Mapping) else result

    def joined(self, result: Mapping[Any, Any], part: int | None) -> dict[Any, Any]:
        """Return a result merged with the unchanged fields; ``part`` is its number among several."""
        record = self._record
        gone = self._decoded.keys() - result.keys() if result is self.sample else set()
        fields: dict[Any, Any] = {name: value for name, value in record.fields.items() if name not in gone}
        for name, value in result.items():
            if isinstance(name, str) and is_meta(name):
                continue
            if value is None:
                fields.pop(name, None)
            elif not self._is_same(name, value):
                fields[name] = self._packed(name, value)
        key = result.get("__key__", record.key)
        if part is not None and key == record.key:
            key = f"{key}-{part:0{_PART_DIGITS}d}"
        return {**fields, "__key__": key, "__metadata__": record.metadata}

    def _packed(self, name: Any, value: Any) -> Any:
        """Return a value as its field stores it: bytes that were decompressed for the function are compressed again."""
        was_unpacked = isinstance(self._decoded.get(name), bytes) and unpacked_name(name) is not None
        return packed(value) if was_unpacked and isinstance(value, bytes) else value

    def _is_same(self, name: Any, value: Any) -> bool:
        """Return whether a value is unchanged, so that the field can keep its bytes."""
        if name not in self._decoded or value is not self._decoded[name]:
            return False
        if isinstance(value, _PLAIN):
            return True
        if name in self._sums:
            return self._sums[name] == crc32c.crc32c(_bytes(value))
        return _equal(value, resolve_decoders("auto").decoder_for(name)(self._record.fields[name]))


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _equal(one: Any, other: Any) -> bool:
    """Compare decoded values, which may hold arrays."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124  NaN
