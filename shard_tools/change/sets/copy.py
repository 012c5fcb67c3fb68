"""Copy shards from one store to another, checking every byte, and writing the index last."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial

import click
import crc32c
import numpy as np

from shard_tools.change.sets.copied import CHECKS, CopyNote, recorded
from shard_tools.change.sets.late import Takes, tell_left_out
from shard_tools.change.sets.open_set import relative_names, shards_beside, unlike_sets
from shard_tools.change.sets.target import TargetContents
from shard_tools.make.convert.journal import (
    NAME,
    SOURCES,
    Journal,
    TargetNotEmptyError,
    has_file,
    lists_inputs,
    load_journal,
    load_sources,
    save_journal,
    sources_of,
    whole_journal,
)
from shard_tools.make.convert.pack import Destination, refuse_overlap, warn_of_nesting
from shard_tools.make.write.above import meet_above
from shard_tools.make.write.mark import TargetMark, digest_of_work
from shard_tools.running.engine import Calls
from shard_tools.running.printing import rate
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.common.arguments import check_choice, counted, format_bytes
from streaming.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    DataError,
    IndexFormatError,
    IndexMismatchError,
    NotFoundError,
    TransferError,
    shell_place,
)
from streaming.shards.catalog.build import (
    home_of,
    in_order,
    load_tables,
    place_in_index,
    read_chunks,
    read_schema,
    samples_url,
    shard_name,
)
from streaming.shards.fetch.read import FetchRange, fetch_range
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import SCHEMA_FILE, UNFINISHED_FILE, samples_path, video_path
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.schema.joined import SchemaConflict, joined
from streaming.shards.schema.value import Schema
from streaming.shards.versions.history import kept_versions
from streaming.shards.versions.publish import change_schema, write_index
from streaming.shards.video.read import list_videos, read_video_table
from streaming.storage import ReadBuffer, Storage, StoreWriter, join_url, redact, split_url

_log = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 20  # read at a time after the last chunk: the end-of-archive mark, usually one or a few KiB
_TABLE_THREADS = 16  # at least: sample tables are small files
_TAKES = Takes(
    keep_columns=lambda _: (
        "they fit the copy: bring it their folder, _shardstream/columns, with a tool of the store, such as `cp -r`"
    ),
    videos=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport(Report):
    """The result of copying.

    Attributes:
        target: Location of the shards now.
        num_shards: Shards of the source.
        num_samples: Their samples.
        num_bytes: Their bytes.
        num_copied: Shards that this run wrote; the others existed already.
        num_copied_bytes: Bytes of those.
        num_read: Of the others, those that were read and found right; the rest is known by recorded checksums.
        num_deleted: Shards deleted at the target, which an earlier copy brought and the source has no longer.
        num_without_samples: Shards without a sample table, which the source lacks, too.
        seconds: Wall time.
    """

    target: str
    num_shards: int
    num_samples: int
    num_bytes: int
    num_copied: int
    num_copied_bytes: int
    num_read: int
    num_deleted: int
    num_without_samples: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """One shard: its source, its target, and its rows of the chunk table (a table of this shard)."""

    source: str
    target: str
    chunks: ChunkTable

    @property
    def size_bytes(self) -> int:
        return self.chunks.shards[0].size_bytes

    @property
    def end(self) -> int:
        """End of the last chunk."""
        return int(self.chunks.byte_end[-1]) if self.chunks.num_chunks else 0


def copy(
    source: str | Sequence[str],
    target: str,
    *,
    index_url: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    target_options: Mapping[str, object] | None = None,
    workers: int = 4,
    overwrite: bool = False,
    delete: bool = False,
    check: str = "recorded",
    allow_unfinished: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy the shards of ``source`` and their index to ``target``, byte for byte; directories are kept.

    Before anything is written, everything at the target is compared: there may be shards of this set, in whatever
    number, but no others. Every chunk is compared with the checksum in the index before it is written. A shard appears
    at the target only when it is whole; sample tables follow when all shards are there, and the chunk table comes
    last, merged with that of other shards of the set. Until then the target is marked as unfinished. An interrupted
    run is continued by running it again. A shard that exists at the target is skipped if a copy noted its checksums
    (``_shardstream/copied-*.json``), and its store says that it is the same since; else it is read, and skipped if it
    is right.

    Memory: per worker one chunk, and the buffer of the target's writer (up to four parts of 16 MiB).

    Args:
        source: Indexed shards, as in ``StreamingDataset``; several sources keep the differing parts of their folders.
        target: Directory or prefix.
        index_url: Location of the source's index, if not beside its shards.
        storage_options: Options of the source's store.
        target_options: Options of the target's store; None: those of the source.
        workers: Number of shards copied in parallel.
        overwrite: Replace different shards of the same name.
        delete: Delete shards at the target that an earlier copy brought and the source has no longer.
        check: ``"recorded"``, or ``"full"``: read every shard that exists at the target.
        allow_unfinished: Copy what is there of an unfinished source; the copy stays marked as unfinished, too.
        executor: Executor on which shards and sample tables are copied, such as a cluster, instead of on threads.
        progress: Receives bytes and shards.

    Raises:
        IndexMissingError: The source has no index to check against.
        UnfinishedError: The source is unfinished.
        ChecksumError, IndexMismatchError: A shard of the source is damaged, or is not the one that was indexed.
        TargetNotEmptyError: The target holds a different shard of the same name, files that are not of this set, or
        shards that this set has no longer, and ``delete`` is False.
        ConfigError: Source and target are the same place, two shards would have the same name, or the executor is on a
        machine that cannot access the files of this one.
        StorageError: A store failed.
    """
    started = time.monotonic()
    progress = progress or NoProgress()
    check_choice("check", check, CHECKS)
    there, here = Storage(storage_options), Storage(storage_options if target_options is None else target_options)
    place = Destination.of(target)
    if "{" in target:
        raise ConfigError(f"{redact(target)}: copied shards keep their names; give a folder or prefix")
    sources = [source] if isinstance(source, str) else list(source)
    for one in sources if target_options is None else ():
        refuse_overlap(one, place)
        warn_of_nesting(one, place)
    urls, marks = shards_beside(sources, there, place.directory, allow_unfinished=allow_unfinished)
    names = relative_names(urls)
    tables = load_tables(there, urls, index_url)
    shards = _shards(urls, names, in_order(urls, index_url, tables), place.directory)
    num_bytes = sum(shard.size_bytes for shard in shards)
    progress.start(total_bytes=num_bytes, total=len(shards))
    written, known = {shard.target for shard in shards}, _sizes_of_set(shards, tables, index_url)
    mark = _mark_of(shards, here, " ".join(sources), None if marks else len(shards))
    note, writers = _note_of(shards, place, sources, here), mark.others(of_other_work=True)
    former = _former(note, written, known)
    contents = TargetContents.of(place, here, written=written, known=known, writers=writers, brought=former)
    gone = _gone(former, contents, here, " ".join(sources), delete=delete)
    meanings = _meet(shards, there, here, index_url, contents, overwrite=overwrite)
    calls = Calls(workers=workers, executor=executor, progress=progress)
    known_right = recorded(_alike(shards, contents) if check == "recorded" else [], place.directory, contents, here)
    right = _find_right(shards, contents, known_right, here, calls, overwrite=overwrite)
    missing = [shard for shard in shards if shard.target not in right]
    if missing or gone or mark.is_set() or marks:
        mark.begin()
    note.keep(former)
    for shard in (shard for shard in shards if shard.target in right):
        note.add(shard, contents.versions.get(shard.target), is_new=shard.target not in known_right)
    _bring_all(missing, shards[0], there, here, note, calls)
    num_without = _copy_index(shards, tables, meanings, there, here, index_url, calls, former=former)
    _delete(gone, here, note)
    if mark.is_begun and not marks:
        is_all = known.keys() <= written  # so it completes earlier copies of parts that were interrupted
        mark.finish(lambda one: is_all and one is not None and one.work == mark.work)
    return CopyReport(
        target=redact(place.directory), num_shards=len(shards), num_bytes=num_bytes, num_copied=len(missing),
        num_samples=sum(shard.chunks.total_samples for shard in shards), num_deleted=len(gone),
        num_copied_bytes=sum(shard.size_bytes for shard in missing), num_read=len(right - known_right),
        num_without_samples=num_without, seconds=time.monotonic() - started,
    )  # fmt: skip


def _note_of(shards: Sequence[_Shard], place: Destination, sources: Sequence[str], here: Storage) -> CopyNote:
    """Return the note of this copy, beside its first shard."""
    home = split_url(shards[0].target)[0] or "."
    source = " ".join(one.rstrip("/") for one in sources)
    return CopyNote.of(place.directory, home, digest_of_work("copy", redact(source)), here)


def _former(note: CopyNote, written: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Return the shards that an earlier run of this copy noted, and that the source has no longer: their versions."""
    homes = {split_url(url)[0] for url in written}
    noted = note.earlier().items()
    return {url: one for url, one in noted if url not in known and url not in written and split_url(url)[0] in homes}


def _gone(former: Collection[str], contents: TargetContents, here: Storage, what: str, *, delete: bool) -> list[str]:
    """Return those of them that are at the target, in none of the versions that it keeps.

    Raises:
        TargetNotEmptyError: There are some, and ``delete`` is False.
    """
    there = sorted(url for url in former if url in contents.sizes)
    held = {url for home in {split_url(url)[0] for url in there} for url in _held(here, home)}
    gone = [url for url in there if url not in held]
    if gone and not delete:
        raise TargetNotEmptyError(
            f"{redact(split_url(gone[0])[0])} holds {counted(len(gone), 'shard')} that an earlier copy brought and "
            f"{redact(what)} has no longer, such as {redact(gone[0])}; delete them there, too, with --delete, or give "
            "another target"
        )
    return gone


def _delete(gone: Sequence[str], here: Storage, note: CopyNote) -> None:
    """Delete shards that the index no longer lists, and their sample tables."""
    for url in gone:
        directory, name = split_url(url)
        here.delete(url)
        here.delete(join_url(directory, samples_path(name)))
        for one in list_videos(here, directory):
            if one.shard == name:
                here.delete(one.url)
    note.forget(gone)


def _held(here: Storage, home: str) -> list[str]:
    """Return the shards of all versions of a target that has some."""
    versions = [one.table for one in kept_versions(here, home)]
    return [join_url(home, shard.name) for table in [*versions, *_living(here, home)] for shard in table.shards]


def _living(here: Storage, home: str) -> list[ChunkTable]:
    with suppress(NotFoundError):
        table = read_chunks(here, home)
        return [table] if table.version is not None else []
    return []


def _bring_all(
    missing: Sequence[_Shard], first: _Shard, there: Storage, here: Storage, note: CopyNote, calls: Calls
) -> None:
    """Copy the shards that are missing, and note them."""
    marked = join_url(split_url(first.target)[0] or ".", UNFINISHED_FILE)
    shared = [(there, first.source), (here, marked)]
    with closing(calls.map(partial(_bring, there, here), missing, shared=shared)) as brought:
        for shard, version in zip(missing, brought, strict=True):
            note.add(shard, version)
    note.write()


def _copy_index(
    shards: Sequence[_Shard], tables: Mapping[str, ChunkTable], meanings: Mapping[str, Schema], there: Storage,
    here: Storage, index_url: str | None, calls: Calls, *, former: Collection[str],
) -> int:  # fmt: skip
    """Write sample tables, indexes of videos, schemas, and chunk tables without the ``former`` shards.

    ``tables`` are those of the source as it was when the copy began. Return the number of shards without a sample
    table.
    """
    small = Calls(workers=max(calls.workers, _TABLE_THREADS), executor=calls.executor)
    shared = [(there, samples_url(shards[0].source, index_url)), (here, shards[0].target)]
    num_without = len(shards) - sum(small.map(partial(_copy_samples, there, here, index_url), shards, shared=shared))
    homes = {home_of(shard.source, index_url): split_url(shard.target)[0] for shard in reversed(shards)}
    videos = _videos_of(shards, there, index_url)
    list(small.map(partial(_copy_videos, there, here, index_url), videos, shared=shared))
    for home, directory in homes.items():
        if meanings[directory]:
            change_schema(here, directory, meanings[directory])
        mine = [shard for shard in shards if home_of(shard.source, index_url) == home]
        with suppress(IndexFormatError):  # `verify` of the source reports it
            journal = _journal_of(home, tables[home], there, sum(shard.chunks.total_samples for shard in mine))
            if journal is not None:
                save_journal(directory, journal, here)
        _leave_inputs_out(home, tables[home], directory, there, here)
    _write_chunk_tables(shards, here, former)
    return num_without


def _leave_inputs_out(home: str, table: ChunkTable, directory: str, there: Storage, here: Storage) -> None:
    """Let a copy say that it does not know the inputs of the set, for `append`, if its journal does not say so."""
    with suppress(IndexFormatError):  # `verify` of the source reports it
        if has_file(directory, NAME, here) and lists_inputs(load_journal(directory, here)):
            return
    grown = table.version is not None and table.version.inputs
    known = grown or any(has_file(home, name, there) for name in (SOURCES, NAME))
    if known and not _has_list(directory, here):
        here.put(join_url(directory, SOURCES), sources_of([]))


def _has_list(directory: str, storage: Storage) -> bool:
    """Return whether a list of inputs is there that is not damaged: a shard may be brought back to its own set."""
    with suppress(IndexFormatError):
        load_sources(directory, storage)
        return has_file(directory, SOURCES, storage)
    return False


def _journal_of(home: str, table: ChunkTable, storage: Storage, num_samples: int) -> Journal | None:
    """Return the journal for a copy of the set in ``home``, if its conversion is known and all of it is copied.

    It lists the fields of the samples. Of a set that was changed since, it says how that was made, for `append`.

    Args:
        home: The set.
        table: Its chunk table as it was when the copy began: somebody may have published another version since.
        storage: The store.
        num_samples: Number of samples that are copied.
    """
    journal = whole_journal(home, storage, num_samples)
    if journal is not None:
        return journal
    with suppress(NotFoundError, AccessDeniedError):
        found = load_journal(home, storage)
        if table.version is not None and table.total_samples == num_samples and found is not None and found.complete:
            return replace(found, num_samples=num_samples, fields=None)
    return None


def _shards(urls: Sequence[str], names: Sequence[str], chunks: ChunkTable, target: str) -> list[_Shard]:
    shards = []
    for position, (url, name) in enumerate(zip(urls, names, strict=True)):
        rows = chunks.of_shard(position)
        info = replace(rows.shards[0], name=name.rpartition("/")[2])
        shards.append(_Shard(source=url, target=join_url(target, name), chunks=replace(rows, shards=(info,))))
    return shards


def _sizes_of_set(shards: Sequence[_Shard], tables: Mapping[str, ChunkTable], index_url: str | None) -> dict[str, int]:
    """Return the sizes of all shards in the source's directories, copied or not, by target."""
    sizes: dict[str, int] = {}
    for shard in {split_url(shard.target)[0]: shard for shard in shards}.values():
        directory = split_url(shard.target)[0]
        above = shard_name(shard.source, index_url).removesuffix(split_url(shard.source)[1])
        for one in tables[home_of(shard.source, index_url)].shards:
            name = one.name.removeprefix(above)
            if one.name.startswith(above) and "/" not in name:
                sizes[join_url(directory, name)] = one.size_bytes
    return sizes


def _mark_of(shards: Sequence[_Shard], here: Storage, source: str, num_shards: int | None) -> TargetMark:
    """Return the mark of this copy of ``num_shards`` in all; copies of parts of one set count as the same work."""
    work = digest_of_work("copy", sorted({redact(split_url(shard.source)[0]) for shard in shards}))
    return TargetMark(
        here, [split_url(shard.target)[0] for shard in shards], command="copy", work=work, what=redact(source),
        writer=digest_of_work("copy", redact(source)), num_shards=num_shards,
    )  # fmt: skip


def _meet(
    shards: Sequence[_Shard], there: Storage, here: Storage, index_url: str | None, contents: TargetContents, *,
    overwrite: bool,
) -> dict[str, Schema]:  # fmt: skip
    """Return the schema to write in each directory of the target.

    A set above the target is read together with the copies, so its schema must not contradict theirs.

    Raises:
        TargetNotEmptyError: The schema at the target contradicts the source's, in classes or tokens.
        ConfigError: The schema of a set above the target does.
    """
    homes = {split_url(shard.target)[0]: home_of(shard.source, index_url) for shard in shards}
    whole = {home: read_schema(there, home) for home in dict.fromkeys(homes.values())}
    tell_left_out(whole, there, _TAKES)
    sets = {directory: whole[home].without_late() for directory, home in homes.items()}
    for finding in unlike_sets([*dict.fromkeys(homes.values())], there):
        _log.warning("%s; %s", finding.what, finding.cure)
    found = {}
    for directory, one in sets.items():
        has_schema = join_url(directory, SCHEMA_FILE) in contents.sizes
        known = read_schema(here, directory) if has_schema and not overwrite else Schema()
        both = joined({redact(homes[directory]): one, redact(directory): known})
        if isinstance(both, SchemaConflict):
            raise TargetNotEmptyError(
                f"{redact(join_url(directory, SCHEMA_FILE))} belongs to another set: {both}; give another target, or "
                "replace it with --overwrite"
            )
        found[directory] = both
        meet_above(directory, both, here, is_whole=True)
    return found


def _alike(shards: Sequence[_Shard], contents: TargetContents) -> list[_Shard]:
    """Return the shards that are at the target with their size."""
    return [shard for shard in shards if contents.sizes.get(shard.target) == shard.size_bytes]


def _find_right(
    shards: Sequence[_Shard], contents: TargetContents, known: AbstractSet[str], here: Storage, calls: Calls, *,
    overwrite: bool,
) -> set[str]:  # fmt: skip
    """Return the targets that hold the very shard already: those that are known to, and those that are read.

    Raises:
        TargetNotEmptyError: One holds a different shard, which must not be overwritten.
    """
    present = [shard for shard in shards if shard.target in contents.sizes]
    alike = _alike(present, contents)

    def refuse(shard: _Shard) -> None:
        if not overwrite:
            raise TargetNotEmptyError(
                f"{redact(shard.target)} is not the same shard as {redact(shard.source)} "
                f"({contents.sizes[shard.target]} bytes, expected {shard.size_bytes} with the checksums of the index); "
                "give another target, or replace it with --overwrite"
            )

    for shard in present if len(alike) < len(present) else ():
        if contents.sizes[shard.target] != shard.size_bytes:
            refuse(shard)

    right = {*known}
    unknown = [shard for shard in alike if shard.target not in known]
    for shard in (shard for shard in alike if shard.target in known):
        calls.progress.advance(num_bytes=shard.size_bytes, num=1)
    shared = [(here, shard.target) for shard in unknown[:1]]
    with closing(calls.map(partial(_is_right, here), unknown, shared=shared)) as found:
        for shard, is_right in zip(unknown, found, strict=True):
            if is_right:
                right.add(shard.target)
            else:
                refuse(shard)
    return right


def _is_right(here: Storage, shard: _Shard, progress: Progress) -> bool:
    for start, end, expected in _ranges(shard.chunks):
        if crc32c.crc32c(here.read(shard.target, start, end)) != expected:
            return False
    if any(np.frombuffer(tail, np.uint8).any() for tail in _tails(shard, shard.target, here)):
        return False
    progress.advance(num_bytes=shard.size_bytes, num=1)
    return True


def _ranges(chunks: ChunkTable) -> list[tuple[int, int, int]]:
    """Return start, end and checksum of every chunk."""
    return list(zip(chunks.byte_start.tolist(), chunks.byte_end.tolist(), chunks.crc32c.tolist(), strict=True))


def _tails(shard: _Shard, url: str, storage: Storage) -> list[memoryview]:
    """Return the bytes after the last chunk."""
    starts = range(shard.end, shard.size_bytes, _TAIL_BYTES)
    return [storage.read(url, start, min(shard.size_bytes, start + _TAIL_BYTES)) for start in starts]


def _bring(there: Storage, here: Storage, shard: _Shard, progress: Progress) -> str | None:
    """Copy one shard, and return its version there; a second time, its target is replaced when the copy is whole."""
    size_bytes = there.info(shard.source).size_bytes
    if size_bytes != shard.size_bytes:
        raise IndexMismatchError(
            f"{redact(shard.source)}: {size_bytes} bytes, the index says {shard.size_bytes}: replaced or cut off since "
            f"it was indexed. Restore it, or run `shard_tools index --force {shell_place(shard.source)}`"
        )
    with here.open_write(shard.target) as out:
        _stream(shard, there, out)
    got = here.info(shard.target)
    if got.size_bytes != shard.size_bytes:
        raise TransferError(
            f"{redact(shard.target)}: {got.size_bytes} bytes at the target, {shard.size_bytes} were written"
        )
    progress.advance(num_bytes=shard.size_bytes, num=1)
    return got.version


def _stream(shard: _Shard, there: Storage, out: StoreWriter) -> None:
    for row, (start, end, expected) in enumerate(_ranges(shard.chunks)):
        wanted = FetchRange(
            url=shard.source,
            byte_start=start,
            byte_end=end,
            first_sample=int(shard.chunks.first_sample[row]),
            num_samples=int(shard.chunks.num_samples[row]),
            crc32c=expected,
            shard_bytes=shard.size_bytes,
        )
        buffer = bytearray(wanted.num_bytes)
        with memoryview(buffer) as view:
            fetch_range(there, wanted, view)
            out.write(view)
    for tail in _tails(shard, shard.source, there):
        if np.frombuffer(tail, np.uint8).any():
            raise ChecksumError(
                f"{redact(shard.source)}: bytes after the last chunk that are not zero; see "
                f"`shard_tools verify {shell_place(shard.source)}`"
            )
        out.write(tail)


def _parsed(data: ReadBuffer, source: str) -> tuple[SampleTable, bytes]:
    """Return a sample table, and its bytes unchanged."""
    return SampleTable.from_parquet(data, source), bytes(data)


def _copy_samples(there: Storage, here: Storage, index_url: str | None, shard: _Shard, _: Progress) -> bool:
    """Copy the sample table of a shard; return whether there is one."""
    url = samples_url(shard.source, index_url)
    try:
        table, body = there.read_parsed(url, _parsed, is_sealed)
    except NotFoundError:
        return False
    info = shard.chunks.shards[0]
    if table.shard != info:  # its name differs at the source
        table = replace(table, chunks=replace(table.chunks, shards=(info,)))
        body = table.to_parquet()
    if table.chunks != shard.chunks:
        raise DataError(
            f"{redact(url)}: the sample table and the chunk table disagree; run `shard_tools index --force "
            f"{shell_place(shard.source)}`"
        )
    here.put(join_url(split_url(shard.target)[0], samples_path(info.name)), body)
    return True


def _videos_of(shards: Sequence[_Shard], there: Storage, index_url: str | None) -> list[tuple[_Shard, list[str]]]:
    """Return the shards whose videos are indexed, each with the fields."""
    places = {place_in_index(shard.source, index_url): shard for shard in shards}
    found: dict[str, tuple[_Shard, list[str]]] = {}
    for home in dict.fromkeys(home for home, _ in places):
        for one in list_videos(there, home):
            shard = places.get((home, one.shard))
            if shard is not None:
                found.setdefault(shard.source, (shard, []))[1].append(one.field)
    return [*found.values()]


def _copy_videos(
    there: Storage, here: Storage, index_url: str | None, one: tuple[_Shard, list[str]], _: Progress
) -> None:  # fmt: skip
    """Copy the index of the videos of a shard. One that is damaged, or of another content, is left out."""
    shard, fields = one
    home, name = place_in_index(shard.source, index_url)
    info = shard.chunks.shards[0]
    rows = replace(shard.chunks, shards=(replace(info, name=name),))
    for field in fields:
        try:
            table = read_video_table(there, home, rows, field)
        except DataError as error:
            _log.warning("%s; the copy is without it", error)
            continue
        table = replace(table, shard=info, fingerprint=shard.chunks.fingerprint)
        here.put(join_url(split_url(shard.target)[0], video_path(field, info.name)), table.to_parquet())


def _write_chunk_tables(shards: Sequence[_Shard], here: Storage, former: Collection[str]) -> None:
    """Write the chunk table of each directory of the target: the copied shards, and others of the set there before."""
    homes: dict[str, dict[str, ChunkTable]] = {}
    for shard in shards:
        homes.setdefault(split_url(shard.target)[0], {})[shard.chunks.shards[0].name] = shard.chunks
    for home, tables in homes.items():
        before: ChunkTable | None = None
        with suppress(NotFoundError):
            before = read_chunks(here, home)
        listed = {} if before is None else before.by_shard()
        known = {name: one for name, one in listed.items() if join_url(home, name) not in former}
        write_index(here, home, ChunkTable.merged(known, tables), before)


def show_copy(report: CopyReport) -> None:
    """Print the outcome of copying."""
    click.echo(
        f"{report.target}: {counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{format_bytes(report.num_bytes)}; {report.num_copied:,} copied, "
        f"{report.num_shards - report.num_copied:,} were there already, {report.num_read:,} of them read"
        f"{f', {report.num_deleted:,} deleted' if report.num_deleted else ''}, in {report.seconds:.1f} s "
        f"({rate(report.num_bytes, report.seconds)})"
    )
