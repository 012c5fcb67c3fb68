"""Salvage the intact samples of damaged tars, and report exactly what is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import click
import numpy as np
from crc32c import crc32c

from shard_tools.change.sets.late import Takes, tell_left_out
from shard_tools.change.sets.open_set import load_samples, relative_names, sizes_of
from shard_tools.change.sets.target import TargetContents
from shard_tools.make.convert.journal import TargetNotEmptyError
from shard_tools.make.convert.pack import Destination, refuse_overlap
from shard_tools.make.write.mark import TargetMark, digest_of_work
from shard_tools.running.printing import SHOWN_FINDINGS
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import plain, plain_place
from streaming.common.arguments import counted
from streaming.errors import ConfigError, DataError, IndexFormatError, TarError
from streaming.shards.catalog.build import home_of, index_shards, read_schema, write_schema
from streaming.shards.catalog.unfinished import expand_whole
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.tar.blocks import (
    BLOCK_BYTES,
    DATALESS_TYPES,
    EXTENSION_TYPES,
    MAX_EXTENSION_BYTES,
    MAX_MEMBER_BYTES,
    PAX_TYPES,
    REGULAR_TYPES,
    Origin,
    checksum_matches,
    decode_name,
    is_meta,
    member_of_pax,
    padded,
    parse_number,
    parse_pax,
    split_name,
)
from streaming.shards.tar.headers import END_OF_ARCHIVE, member_header, padding
from streaming.shards.tar.walk import plain_name
from streaming.storage import Storage, StoreWriter, join_url, redact, split_url

_WINDOW_BYTES = 8 << 20  # read in one request
_log = logging.getLogger(__name__)
_HARD_LINK = ord("1")
_TAKES = Takes(keep_columns=lambda _: "add them to the new set, as they were added to this one", tables=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRepair:
    """The result of repairing one shard.

    Attributes:
        url: The shard.
        target: Location of the repaired shard; None: nothing was written, because samples would be lost.
        num_samples: Number of samples saved, or that would be saved.
        num_links: Number of hard links written as the files they refer to.
        mended: Defects that cost no sample.
        lost: Each loss, with its place and cause.
        lost_keys: Known keys of samples that are lost or incomplete.
        exact: Whether an index listed all samples; otherwise there may be further, unknown losses.
    """

    url: str
    target: str | None
    num_samples: int
    num_links: int
    mended: tuple[str, ...]
    lost: tuple[str, ...]
    lost_keys: tuple[str, ...]
    exact: bool

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        plain = {name: getattr(self, name) for name in ("num_samples", "num_links", "exact", "target")}
        lists = {name: list(getattr(self, name)) for name in ("mended", "lost", "lost_keys")}
        return {"url": redact(self.url), **plain, **lists}


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """The results of all shards, in their order."""

    target: str
    shards: tuple[ShardRepair, ...]

    @property
    def ok(self) -> bool:
        """Whether all shards were written."""
        return all(shard.target is not None for shard in self.shards)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        return {"ok": self.ok, "target": redact(self.target), "shards": [shard.as_dict() for shard in self.shards]}


def repair(
    urls: Sequence[str],
    target: str,
    *,
    storage: Storage,
    index_url: str | None = None,
    drop_damaged: bool = False,
    allow_unfinished: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Salvage the shards at ``urls``: write their intact samples to ``target``, under the same names, and index them.

    Folders below the innermost one that holds all shards are kept. Until all shards are written and indexed, the target
    is marked as unfinished. It may already hold shards that an earlier run of the same work wrote, and no others.

    Members are found by their headers; after damage the search continues at the next valid header. Repaired without
    loss: a missing end-of-archive marker, archives concatenated with ``cat``, hard links (written as files), long
    padding. If there is an index of the original shard, its checksums identify damaged bytes, and its keys identify
    everything that is lost. Without one, bytes inside members are trusted, and a sample next to damage counts as
    incomplete if it lacks a field that all others have.

    Args:
        urls: Shards, as for ``StreamingDataset``; not compressed.
        target: Folder or prefix, different from theirs.
        storage: Store of both.
        index_url: Location of the shards' index, if not beside them.
        drop_damaged: Write a shard even if it has lost samples; otherwise it is left out and reported.
        allow_unfinished: Accept an unfinished set, and repair the shards that are there.
        progress: Receives bytes and shards.

    Raises:
        UnfinishedError: The set is unfinished.
        TargetNotEmptyError: The target holds other shards.
        ConfigError: A shard is compressed, source and target are the same place, or two shards would have the same
            name.
        StorageError: A store failed.
    """
    progress = progress or NoProgress()
    where = Destination.of(target)
    folder = where.directory
    shards, _ = expand_whole(urls, storage, exclude=folder, allow_unfinished=allow_unfinished)
    goals = _goals(shards, folder)
    sizes = sizes_of(storage, shards)
    progress.start(total_bytes=sum(sizes), total=len(shards))
    mark = TargetMark(
        storage, [split_url(goal)[0] for goal in goals], command="repair", work=digest_of_work("repair", sorted(goals)),
        what=redact(urls[0]), num_shards=len(shards),
    )  # fmt: skip
    there = TargetContents.of(where, storage, written=set(goals), known={}, writers=mark.others()).sizes
    done: dict[str, ShardRepair] = {}
    todo = list(zip(shards, goals, sizes, strict=True))
    for url, goal, size_bytes in sorted(todo, key=lambda one: one[1] not in there):  # before anything is written
        salvage = _salvaged(storage, url, size_bytes, index_url)
        if goal in there:
            _check_same(salvage, storage, goal, there[goal])
        elif drop_damaged or not salvage.lost:
            mark.begin_once()
            with storage.open_write(goal) as out:
                salvage.write(out)
        is_there = goal in there or drop_damaged or not salvage.lost
        done[url] = salvage.report(goal if is_there else None)
        progress.advance(num_bytes=size_bytes, num=1)
    written = [goal for url, goal, _ in todo if done[url].target is not None]
    if written:
        mark.begin_once()
        index_shards(storage, written, force=True, duplicate_keys="keep")
        _carry_schemas({split_url(goal)[0]: home_of(url, index_url) for url, goal, _ in todo}, storage)
        mark.finish()
    return RepairReport(target=folder, shards=tuple(done[url] for url in shards))


def _carry_schemas(homes: Mapping[str, str], storage: Storage) -> None:
    """Copy the schemas of sets to the repaired ones, by the directories of both; a damaged schema is lost."""
    for directory, home in homes.items():
        try:
            schema = read_schema(storage, home)
            tell_left_out({home: schema}, storage, _TAKES)
            write_schema(storage, directory, schema.without_late())
        except IndexFormatError as error:
            _log.warning("%s; what the set means is lost: number its classes, or describe its tokens, again", error)


def _goals(shards: Sequence[str], folder: str) -> list[str]:
    """Return the target of each shard.

    Raises:
        ConfigError: A shard is compressed, or would be written where shards are read.
    """
    goals = [join_url(folder, name) for name in relative_names(shards)]
    for place in {split_url(goal)[0] for goal in goals}:
        for source in {split_url(url)[0] for url in shards}:
            refuse_overlap(source, Destination.of(place))
    for url in shards:
        if not url.endswith(".tar"):
            raise ConfigError(f"{redact(url)}: only plain tars are repaired; decompress it first (`gunzip`)")
    return goals


def _salvaged(storage: Storage, url: str, size_bytes: int, index_url: str | None) -> _Salvage:
    """Find the intact samples of a shard."""
    try:
        table = load_samples(storage, url, index_url)
    except DataError:
        table = None
    salvage = _Salvage(_Source(storage, url, size_bytes), table)
    salvage.run()
    return salvage


def _check_same(salvage: _Salvage, storage: Storage, goal: str, size_bytes: int) -> None:
    """Check that the target already holds exactly what would be written, as an earlier run left it.

    Raises:
        TargetNotEmptyError: It holds something else.
    """
    comparing = _Comparing(_Source(storage, goal, size_bytes))
    salvage.write(comparing)
    if not comparing.is_same:
        raise TargetNotEmptyError(
            f"{redact(goal)} is not what is left of {redact(salvage.url)}; give another target, or delete it"
        )


class _Comparing:
    """A file-like object that compares written bytes with those of a shard."""

    def __init__(self, source: _Source) -> None:
        self._source, self._at, self._differs = source, 0, False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Compare the next bytes."""
        stop = self._at + len(data)
        there = b"" if self._differs else b"".join(self._source.pieces(self._at, stop))
        self._at, self._differs = stop, self._differs or there != data
        return len(data)

    @property
    def is_same(self) -> bool:
        """Whether exactly the bytes of the shard were written."""
        return not self._differs and self._at == self._source.size_bytes


class _Source:
    """The bytes of a shard, read in windows."""

    def __init__(self, storage: Storage, url: str, size_bytes: int) -> None:
        self.url, self.size_bytes = url, size_bytes
        self._storage, self._start, self._window = storage, 0, memoryview(b"")

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes ``[start, stop)``, truncated at the end of the shard; at most one window."""
        stop = min(stop, self.size_bytes)
        if not (self._start <= start and stop <= self._start + len(self._window)):
            end = max(start, min(self.size_bytes, start + _WINDOW_BYTES))
            self._start, self._window = start, self._storage.read(self.url, start, end)
        return self._window[start - self._start : max(start, stop) - self._start]

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes ``[start, stop)``, a window at a time."""
        for begin in range(start, stop, _WINDOW_BYTES):
            yield self.read(begin, min(stop, begin + _WINDOW_BYTES))


@dataclass(slots=True, kw_only=True)
class _Member:
    """A member of the tar: its bytes are ``[data, data + size)``; the next header is at ``next``."""

    name: bytes
    kind: int
    link: bytes
    data: int
    size: int
    next: int


@dataclass(slots=True)
class _Sample:
    """Adjacent members with one key; ``beside`` is true if there is damage before or after them."""

    key: str
    members: dict[str, _Member] = field(default_factory=dict)
    beside: bool = False


class _DamageError(Exception):
    """No intact member begins here; ``next`` is the expected start of the next one, ``name`` the member's, if known."""

    def __init__(self, why: str, next_header: int | None = None, name: bytes = b"") -> None:
        super().__init__(why)
        self.next, self.name = next_header, name


def _header_at(source: _Source, at: int) -> bytes:
    return bytes(source.read(at, at + BLOCK_BYTES))


def _holds(source: _Source, at: int) -> bool:
    """Return whether there is a header or the end-of-archive marker at ``at``."""
    header = _header_at(source, at)
    return at == source.size_bytes or (len(header) == BLOCK_BYTES and (not any(header) or checksum_matches(header)))


def _member_at(source: _Source, at: int) -> _Member | None:
    """Return the member whose headers begin at ``at``; None for a block of zeros.

    Raises:
        _DamageError: There is no member, or only a part of one.
    """
    name: bytes | None = None
    link: bytes | None = None
    size: int | None = None
    while True:
        header, start = _header_at(source, at), at + BLOCK_BYTES
        if len(header) < BLOCK_BYTES:
            raise _DamageError("cut off inside a header", name=name or b"")
        if name is None and size is None and not any(header):
            return None
        stored = parse_number(header[124:136])
        plausible = stored is not None and 0 <= stored < MAX_MEMBER_BYTES
        stored = stored if stored is not None and plausible and header[156] not in DATALESS_TYPES else 0
        if not checksum_matches(header) or not plausible:
            after = start + padded(stored)
            raise _DamageError("no header that holds", after if plausible and _holds(source, after) else None)
        if header[156] not in EXTENSION_TYPES and header[156] != ord("g"):
            break
        told = _extension(source, header[156], start, stored)
        name = name if told[0] is None else told[0]
        link = link if told[1] is None else told[1]
        size = size if told[2] is None else told[2]
        at = start + padded(stored)
    kind = header[156]
    name = plain_name(header) if name is None else name
    size = 0 if kind in DATALESS_TYPES else stored if size is None else size
    if start + size > source.size_bytes:
        raise _DamageError("cut off inside a member", name=name)
    if kind not in REGULAR_TYPES and kind not in DATALESS_TYPES:
        raise _DamageError(f"a member of type {chr(kind)!r}, which is not read", start + padded(size), name)
    link = header[157:257].split(b"\0", 1)[0] if link is None else link
    return _Member(name=name, kind=kind, link=link, data=start, size=size, next=start + padded(size))


def _extension(source: _Source, kind: int, start: int, size: int) -> tuple[bytes | None, bytes | None, int | None]:
    """Read the name, link and size that an extension header gives to the next member; None: not given.

    Raises:
        _DamageError: It is damaged.
    """
    payload = bytes(source.read(start, start + min(size, MAX_EXTENSION_BYTES)))
    if len(payload) < size:
        raise _DamageError("a header that is cut off or too long")
    if kind in b"LK":
        text = payload.split(b"\0", 1)[0]
        return (text, None, None) if kind == ord("L") else (None, text, None)
    if kind not in PAX_TYPES:
        return None, None, None
    try:
        records = parse_pax(payload, Origin(source.url), start)
        path, told = member_of_pax(records, Origin(source.url), start)
    except TarError as error:
        raise _DamageError(str(error), start + padded(size)) from error
    return path, records.get(b"linkpath"), told


class _Salvage:
    """Salvage one shard. Use it once."""

    def __init__(self, source: _Source, table: SampleTable | None) -> None:
        self._source, self._table = source, table
        self._by_name: dict[bytes, _Member] = {}
        self._samples: list[_Sample] = []
        self._order: list[_Sample | _Member] = []  # to be written: samples, and files that belong to none
        self._num_links = 0
        self._mended: dict[str, None] = {}
        self.lost: list[str] = []
        self._lost_keys: dict[str, None] = {}

    def run(self) -> None:
        """Find the intact members."""
        at, ended, open_end = 0, False, False
        while at < self._source.size_bytes:
            try:
                member = _member_at(self._source, at)
            except _DamageError as error:
                at, open_end = self._skip(at, error), True
                continue
            if member is None:
                ended, at = True, self._after_zeros(at)
                continue
            if ended:
                self._mended["archives that were joined by cat"] = None
                ended = False
            self._take(member, beside=open_end)
            at, open_end = member.next, False
        if not ended:
            self._mended["no end-of-archive mark: what may have come after is not known"] = None
            if self._samples:
                self._samples[-1].beside = True
        self._compare_with_index()
        self._drop_incomplete()

    def _skip(self, at: int, error: _DamageError) -> int:
        """Record the loss at ``at``; return the position of the next header."""
        after = error.next if error.next is not None else self._next_header(at + BLOCK_BYTES)
        whose = f", member {decode_name(error.name)!r}" if error.name else ""
        self.lost.append(f"bytes {at}-{after}{whose}: {error}")
        split = split_name(decode_name(error.name)) if error.name else None
        if split is not None:
            self._lost_keys[split[0]] = None
        if self._samples:
            self._samples[-1].beside = True
        return after

    def _next_header(self, at: int) -> int:
        while at < self._source.size_bytes:
            window = np.frombuffer(self._source.read(at, at + _WINDOW_BYTES), np.uint8)
            blocks = window[: window.size - window.size % BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
            magic = (blocks[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all(axis=1)
            for row in np.flatnonzero(magic).tolist():
                if checksum_matches(blocks[row].tobytes()):
                    return at + row * BLOCK_BYTES
            at += max(BLOCK_BYTES, len(blocks) * BLOCK_BYTES)
        return self._source.size_bytes

    def _after_zeros(self, at: int) -> int:
        while at < self._source.size_bytes:
            window = np.frombuffer(self._source.read(at, at + _WINDOW_BYTES), np.uint8)
            if window.any():
                return at + int(np.flatnonzero(window)[0]) // BLOCK_BYTES * BLOCK_BYTES
            at += window.size
        return at

    def _take(self, member: _Member, *, beside: bool) -> None:
        split = split_name(decode_name(member.name))
        if member.kind == _HARD_LINK and split is not None:
            meant = self._by_name.get(member.link)
            if meant is None:
                self.lost.append(f"member {decode_name(member.name)!r}: a hard link to a file that does not exist")
                self._lost_keys[split[0]] = None
                return
            self._num_links += 1
            member = _Member(name=member.name, kind=ord("0"), link=b"", data=meant.data, size=meant.size, next=0)
        if member.kind not in REGULAR_TYPES:
            return
        self._by_name[member.name] = member
        if split is None:
            self._order.append(member)
            return
        key, extension = split
        if is_meta(extension):
            self.lost.append(f"member {decode_name(member.name)!r}: {extension} is no name for a field; left out")
            return
        if not self._samples or self._samples[-1].key != key or extension in self._samples[-1].members:
            self._samples.append(_Sample(key))
            self._order.append(self._samples[-1])
        self._samples[-1].members[extension] = member
        self._samples[-1].beside |= beside

    def _compare_with_index(self) -> None:
        """Find damaged bytes by the index of the original shard."""
        table = self._table
        if table is None:
            return
        bounds = table.span_starts if table.num_spans else np.append(table.chunks.first_sample, table.num_samples)
        sums = table.span_crc32c if table.num_spans else table.chunks.crc32c
        for low, high, expected in zip(bounds[:-1].tolist(), bounds[1:].tolist(), sums.tolist(), strict=True):
            start, stop = (int(table.record_starts[row]) for row in (low, high))
            if stop > self._source.size_bytes:
                break  # unknown, so members with intact headers are kept
            found = 0
            for piece in self._source.pieces(start, stop):
                found = crc32c(piece, found)
            if found != expected:
                self.lost.append(
                    f"bytes {start}-{stop}: not those that were indexed; {counted(high - low, 'sample')} there"
                )
                self._lost_keys.update(dict.fromkeys(table.keys[low:high]))
        gone = sorted({*table.keys} - {sample.key for sample in self._samples} - self._lost_keys.keys())
        if gone:
            self.lost.append(f"of the index, not there: {counted(len(gone), 'sample')}, such as {gone[0]!r}")
            self._lost_keys.update(dict.fromkeys(gone))

    def _drop_incomplete(self) -> None:
        whole = [sample.members.keys() for sample in self._samples if not sample.beside]
        common = set.intersection(*map(set, whole)) if whole else set()
        for sample in self._samples:
            lacking = sorted(common - sample.members.keys()) if sample.beside else []
            if lacking:
                self.lost.append(f"sample {sample.key!r}: without field {lacking[0]!r}, beside what is lost")
                self._lost_keys[sample.key] = None
        gone = {id(sample) for sample in self._samples if sample.key in self._lost_keys}
        self._samples = [sample for sample in self._samples if id(sample) not in gone]
        self._order = [entry for entry in self._order if id(entry) not in gone]

    @property
    def url(self) -> str:
        """URL of the shard."""
        return self._source.url

    def write(self, out: StoreWriter | _Comparing) -> None:
        """Write the salvaged members."""
        for entry in self._order:
            for member in entry.members.values() if isinstance(entry, _Sample) else (entry,):
                out.write(member_header(_text(member.name, self._source.url), member.size))
                for piece in self._source.pieces(member.data, member.data + member.size):
                    out.write(piece)
                out.write(padding(member.size))
        out.write(END_OF_ARCHIVE)

    def report(self, target: str | None) -> ShardRepair:
        """Return the result."""
        return ShardRepair(
            url=self._source.url,
            target=target,
            num_samples=len(self._samples),
            num_links=self._num_links,
            mended=tuple(self._mended),
            lost=tuple(self.lost),
            lost_keys=tuple(self._lost_keys),
            exact=self._table is not None,
        )


def _text(name: bytes, url: str) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        what = f"the name {name!r} is not UTF-8; rename the file with `tar --transform`"
        raise ConfigError(f"{redact(url)}: {what}") from None


def show_repair(report: RepairReport) -> None:
    """Print the result of every damaged shard, and the total."""
    for shard in report.shards:
        links = [f"{counted(shard.num_links, 'hard link')} written out"] if shard.num_links else []
        for text in (*shard.mended, *links):
            click.echo(f"{plain_place(shard.url)}: mended: {plain(text)}")
        for text in shard.lost[:SHOWN_FINDINGS]:
            click.echo(f"{plain_place(shard.url)}: lost: {plain(text)}")
        if shard.lost:
            more = f"… and {len(shard.lost) - SHOWN_FINDINGS:,} more; " if len(shard.lost) > SHOWN_FINDINGS else ""
            known = "by its index" if shard.exact else "by name, and perhaps more: there is no index to tell"
            click.echo(
                f"{plain_place(shard.url)}: {more}{counted(len(shard.lost_keys), 'sample')} lost or incomplete {known}"
            )
        if shard.target is None:
            click.echo(f"{plain_place(shard.url)}: not written; --drop-damaged writes the {shard.num_samples:,} others")
    written = [shard for shard in report.shards if shard.target is not None]
    click.echo(
        f"{plain_place(report.target)}: {len(written):,} of {counted(len(report.shards), 'shard')}, "
        f"{counted(sum(shard.num_samples for shard in written), 'sample')}, indexed"
    )
