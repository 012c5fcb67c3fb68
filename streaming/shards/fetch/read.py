"""Fetch one unit: a run of consecutive samples of one shard, checked and located."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from streaming.errors import ChecksumError, DataError, IndexMismatchError, NotFoundError, StorageError, shell_place
from streaming.order.plan.memory import LEAST_MAPPED_BYTES, PAGE_BYTES, whole_pages
from streaming.shards.cache import NodeCache
from streaming.shards.fetch.checksums import Mask, Sum, crc_of_member, sums_of
from streaming.shards.fetch.damage import checksum_error, layout_by_table, narrowed, summed_parts
from streaming.shards.fetch.distant import Distant
from streaming.shards.fetch.layout import Fetched, TakeApart, UnitLayout
from streaming.shards.fetch.pieces import RangePieces, pieces_of
from streaming.shards.index.large_members import LARGE_BYTES
from streaming.shards.index.sample_table import Records, SampleTable
from streaming.shards.tar import parse_chunk
from streaming.storage import (
    ChangedError,
    Checked,
    DifferentSumError,
    Reader,
    Storage,
    WrongBytesError,
    looked_for,
    redact,
)
from streaming.types import Int64Array


class ShardReading(NamedTuple):
    """Identify the reading of a shard. A unit of one reading may lack bytes that another reading needs.

    Two sources of a mixture may read different pieces of the same bytes of a shard, because they want other fields or
    keep other samples. So only units of the same reading can replace each other.

    Attributes:
        source: Source of a mixture; 0 for a single set.
        url: The shard.
        fields: Fields that are read; None: all.
        kept: Identifies the samples that a filter keeps, as ``Selection.filter`` does; "": all.
    """

    source: int
    url: str
    fields: tuple[str, ...] | None
    kept: str


class UnitKey(NamedTuple):
    """Identify a unit: its reading, and its bytes ``[byte_start, byte_end)``."""

    reading: ShardReading
    byte_start: int
    byte_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRange:
    """One ranged GET: ``num_samples`` whole samples of one shard.

    Attributes:
        url: The shard.
        byte_start: First byte in the shard.
        byte_end: End (exclusive) in the shard.
        first_sample: Number, within the shard, of the first sample of the range.
        num_samples: Number of samples that the range holds, according to the index.
        crc32c: CRC32C of the bytes; None if the index has none for this range.
        shard_bytes: Size of the whole shard, according to the index.
        version: Distinguishes this shard from others that are, or were, at the same URL.
        spans: If ``crc32c`` is None: end (relative to ``byte_start``) and CRC32C of each of the spans in the range.
            Empty if the index has none; then the tar header checksums are verified instead.
        lead: Number of samples at the beginning that were not requested, but share a checksum.
        fields: Fields to deliver; None: all.
        kept: Identifies the samples of the shard that a filter keeps; "": all.
        source: Source of a mixture: two sources may read the same bytes in different ways.
        beside: Ranges of other tars, which hold more fields of the same samples, and perhaps of some around them; see
            :mod:`streaming.shards.fetch.beside`.
        late: If it is a range of a tar of a late field: that field, the only one to deliver.
    """

    url: str
    byte_start: int
    byte_end: int
    first_sample: int
    num_samples: int
    crc32c: int | None
    shard_bytes: int
    version: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    lead: int = 0
    fields: tuple[str, ...] | None = None
    kept: str = ""
    source: int = 0
    beside: tuple[FetchRange, ...] = ()
    late: str = ""
    _placed: tuple[tuple[int, FetchRange], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_placed", self._in_memory() if self.beside else ())

    @property
    def parts(self) -> tuple[tuple[int, FetchRange], ...]:
        """This range and those beside it, each alone, and where each begins in memory if it is read as a whole."""
        return self._placed or ((0, self),)

    @property
    def shown_url(self) -> str:
        """The URL for messages."""
        return redact(self.url)

    @property
    def num_bytes(self) -> int:
        """Memory that the range takes: its length; with others beside it, as far as the last of them."""
        if not self.beside:
            return self.byte_end - self.byte_start
        place, last = self.parts[-1]
        return place + last.num_bytes

    @property
    def skew_bytes(self) -> int:
        """How far into a page it begins if it may be mapped: as in its file."""
        return self.byte_start % PAGE_BYTES if self.byte_end - self.byte_start >= LEAST_MAPPED_BYTES else 0

    def _in_memory(self) -> tuple[tuple[int, FetchRange], ...]:
        found, end = [(0, self._copied(()))], self.byte_end - self.byte_start
        for one in self.beside:
            place = int(place_behind(self.skew_bytes, end, one.skew_bytes))
            found.append((place, one if one.source == self.source else replace(one, source=self.source)))
            end = place + one.num_bytes
        return tuple(found)

    def with_beside(self, beside: tuple[FetchRange, ...]) -> FetchRange:
        """Return the range with others beside it. One is made for each chunk, and ``replace`` takes long."""
        found = self._copied(beside)
        if beside:
            object.__setattr__(found, "_placed", found._in_memory())
        return found

    def _copied(self, beside: tuple[FetchRange, ...]) -> FetchRange:
        found = object.__new__(FetchRange)
        for name in _NAMES:
            object.__setattr__(found, name, getattr(self, name))
        object.__setattr__(found, "beside", beside)
        object.__setattr__(found, "_placed", ())
        return found

    @property
    def sums(self) -> tuple[tuple[int, int], ...]:
        """End (relative) and CRC32C of each piece with a checksum. They cover the range, but not those beside it."""
        return self.spans if self.crc32c is None else ((self.byte_end - self.byte_start, self.crc32c),)

    @property
    def summed(self) -> tuple[tuple[int, int, int], ...]:
        """Where each piece with a checksum begins and ends in memory, with that of ranges beside it, and its CRC32C."""
        found = []
        for place, part in self.parts:
            start = 0
            for end, expected in part.sums:
                found.append((place + start, place + end, expected))
                start = end
        return tuple(found)

    @property
    def reading(self) -> ShardReading:
        """The reading of the shard. Units that share samples with this one must have the same reading."""
        return ShardReading(self.source, self.url, self.fields, self.kept)

    @property
    def key(self) -> UnitKey:
        """Identifies this range, and its reading."""
        return UnitKey(self.reading, self.byte_start, self.byte_end)


_NAMES = tuple(one.name for one in fields(FetchRange) if one.name not in {"beside", "_placed"})


def place_behind(skew_bytes: Int64Array | int, end: Int64Array | int, next_skew: Int64Array | int) -> Int64Array:
    """Return where in memory a range begins that lies behind others: on a page of its own, so that it can be mapped.

    Args:
        skew_bytes: How far into a page the first of them begins.
        end: Where the others end, from the beginning of the first.
        next_skew: How far into a page the range begins.
    """
    found: Int64Array = whole_pages(end + skew_bytes) - skew_bytes + next_skew
    return found


Apart: TypeAlias = Callable[[FetchRange], UnitLayout | TakeApart]
"""Returns the locations of the samples of a completely read, verified range, or a function that finds them."""


def apart_later(wanted: FetchRange) -> TakeApart:
    """Return a function that finds the samples in the bytes of a completely read, verified range."""
    return partial(layout_of, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """Facts about a shard that partial reads need.

    Attributes:
        samples: The sample table of the shard; None if it has none. Requested only if large samples are read by fields,
            or bytes are damaged.
        gap_bytes: Gaps from this size on are not read: the number of bytes read in the time of one more request.
        kept: Returns which of samples ``[first, stop)`` of the shard are delivered, bool [n].
        apart: Locates the samples of a range that was read completely.
        distant: Determines the members that are not read; None: there are none.
    """

    samples: Callable[[], SampleTable | None]
    gap_bytes: int
    kept: Callable[[int, int], Mask] = lambda first, stop: np.ones(stop - first, np.bool_)
    apart: Apart = apart_later
    distant: Distant | None = None


_NOTHING_KNOWN = ShardFacts(samples=lambda: None, gap_bytes=0)


def fetch_range(
    storage: Storage, wanted: FetchRange, out: memoryview, known: ShardFacts = _NOTHING_KNOWN
) -> UnitLayout:
    """Fetch a range into ``out`` and locate its samples immediately; see :func:`fetch_unit`.

    Raises:
        TarError: There is no checksum, and the bytes are not whole samples.
        ChecksumError, IndexMismatchError, StorageError: As for :func:`fetch_unit`.
    """
    return fetch_unit(storage, wanted, out, None, known).apart(out)


def fetch_unit(
    storage: Storage,
    wanted: FetchRange,
    out: memoryview,
    cache: NodeCache | None = None,
    known: ShardFacts = _NOTHING_KNOWN,
) -> Fetched:
    """Fetch a range into ``out`` (of ``wanted.num_bytes``, or :func:`size_of_unit`). Return where each field is in it.

    For whole ranges that match their checksums, a function locates the samples later.

    Fields that are not wanted are left out if that saves enough and the sample table has checksums of the others. Then
    the first bytes of ``out`` hold the pieces that were read. With a cache, the bytes are read from it if possible, and
    stored in it otherwise. If bytes are damaged but the sample table has checksums for parts of them, the layout names
    the bad samples.

    Raises:
        ChecksumError: The bytes are damaged, and the bad samples cannot be determined.
        TarError: There is no checksum, and the bytes are not whole samples.
        IndexMismatchError: The shard is missing, or differs from the one in the index.
        StorageError: The store failed.
    """
    rows = range(wanted.first_sample, wanted.first_sample + wanted.num_samples)
    part = _part_of(wanted, rows, known)
    read = _Read(storage, wanted, part or _whole_of(wanted))
    if len(out) < read.plan.pieces.num_bytes:
        raise IndexMismatchError(
            f"{wanted.shown_url}: this shard's sample table existed when the epoch began, and is now gone; without it "
            f"fields cannot be left out, and there is no room for all of them. Rebuild it: "
            f"shard_tools index {shell_place(wanted.url)}"
        )

    def layout() -> UnitLayout:
        if part is not None:
            return layout_by_table(part.samples, rows, part.pieces, wanted.fields, {}, known.distant)
        found = known.apart(wanted)
        return found if isinstance(found, UnitLayout) else found(out)

    try:
        if part is None and cache is None:
            return Fetched(checked=read.into(out), found=known.apart(wanted))
        return _through_cache(read, out[: read.plan.pieces.num_bytes], cache, layout)
    except ChecksumError:
        table = known.samples() if part is None else part.samples
        kept, distant = known.kept(rows.start, rows.stop), None if part is None else known.distant
        found, pieces = None, read.plan.pieces
        if table is not None:
            found = narrowed(table, rows, pieces, out, wanted.fields, wanted.shown_url, kept=kept, distant=distant)
        if found is None:
            raise
        return found


def size_of_unit(wanted: FetchRange, known: ShardFacts) -> int:
    """Return the number of bytes of ``out`` that :func:`fetch_range` will use."""
    part = _part_of(wanted, range(wanted.first_sample, wanted.first_sample + wanted.num_samples), known)
    return wanted.num_bytes if part is None else part.pieces.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The pieces to read, and the checksums to verify them."""

    pieces: RangePieces
    sums: tuple[Sum, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part(_Plan):
    """A plan for reading some fields of a range, using this sample table."""

    samples: SampleTable


def _part_of(wanted: FetchRange, rows: range, known: ShardFacts) -> _Part | None:
    """Return the plan for the wanted fields and samples; None: read the whole range.

    The sample table is not even requested if samples are small on average, no long run of them is filtered out, and no
    member can be distant. (Whether a member is distant must not depend on the rest of the range.)
    """
    kept, mean_bytes = known.kept(rows.start, rows.stop), wanted.num_bytes / max(1, len(rows))
    hole = 0 if np.count_nonzero(kept) == len(kept) else _longest_run(~kept)
    has_large = wanted.fields is not None and wanted.num_bytes >= known.gap_bytes and mean_bytes >= LARGE_BYTES
    has_large |= known.distant is not None and known.distant.may_be_in(wanted.num_bytes)
    if not has_large and (not hole or hole * mean_bytes < known.gap_bytes):
        return None
    table = known.samples()
    if table is None or (not hole and not table.large.fields):
        return None
    sums = sums_of(table, rows.start, rows.stop, wanted.fields, kept, known.distant)
    pieces = pieces_of(sums, wanted.byte_start, wanted.byte_end, known.gap_bytes)
    return None if pieces is None else _Part(pieces=pieces, sums=sums, samples=table)


def _longest_run(mask: Mask) -> int:
    """Return the length of the longest run of True."""
    edges = np.flatnonzero(np.concatenate(([True], ~mask, [True])))
    return int(np.diff(edges).max()) - 1


def _whole_of(wanted: FetchRange) -> _Plan:
    sums, start = [], wanted.byte_start
    for end, expected in wanted.sums:
        stop = wanted.byte_start + end
        sums.append(Sum(ranges=((start, stop),), crc32c=expected, first=0, stop=wanted.num_samples))
        start = stop
    return _Plan(pieces=RangePieces(ranges=((wanted.byte_start, wanted.byte_end),)), sums=tuple(sums))


def _through_cache(read: _Read, out: memoryview, cache: NodeCache | None, layout: Callable[[], UnitLayout]) -> Fetched:
    """Return the bytes, from the cache or the store, with ``layout()``. An unusable cache entry is fetched again."""
    if cache is None or not len(out):
        return Fetched(checked=read.into(out), found=layout())
    url, version, start = read.identity
    checked, hit = cache.read_into(url, version, start, out, read.into, crc32c=read.crc32c)
    try:
        if hit and read.crc32c is None:  # otherwise the cache has compared the bytes
            checked = read.compared(out)
        return Fetched(checked=checked, found=layout())
    except DataError:
        if not hit:
            raise
        cache.invalidate(url, version, start, len(out))
        return Fetched(checked=read.into(out), found=layout())


class _Read:
    """Execute a plan for one range."""

    def __init__(self, storage: Storage, wanted: FetchRange, plan: _Plan) -> None:
        self.plan = plan
        self._storage = storage
        self._wanted = wanted
        self._is_whole = not isinstance(plan, _Part)

    @property
    def crc32c(self) -> int | None:
        """CRC32C of all bytes, if the index has it."""
        return self._wanted.crc32c if self._is_whole else None

    @property
    def identity(self) -> tuple[str, str, int]:
        """URL, version and first byte; together with the size they identify these bytes."""
        wanted = self._wanted
        if self._is_whole:
            return wanted.url, wanted.version, wanted.byte_start
        digest = hashlib.blake2b(repr(self.plan.pieces.ranges).encode(), digest_size=16).hexdigest()
        return wanted.url, f"{wanted.version}|pieces {digest}", wanted.byte_start

    def into(self, out: memoryview) -> Checked:
        """Fetch ``out`` from the store.

        Bytes that differ from the index's checksum are fetched again, with the retries of failed requests, before they
        count as damaged. If the shard was replaced since this process first read it, the checksums decide.

        Raises:
            IndexMismatchError: The shard is missing, or differs from the one in the index.
            ChecksumError: The bytes are damaged, in a shard of the right size; ``out`` holds them.
            StorageError: The store failed.
        """
        with self._explained():
            try:
                return self._until_right(out)
            except ChangedError as error:
                try:
                    return self._until_right(out)
                except ChecksumError:
                    raise self._replaced(error) from error

    def part_into(self, out: memoryview) -> None:
        """Fetch ``out`` from the store, without a way to check its bytes.

        Raises:
            ChangedError: The shard was replaced since this process first read it.
            IndexMismatchError, StorageError: As for :meth:`into`.
        """
        with self._explained():
            _fill(self._storage, self._wanted.url, self.plan.pieces, out, summed=False)

    def compared(self, out: memoryview) -> Checked:
        """Compare the bytes with their checksums.

        Raises:
            ChecksumError: They differ.
        """
        return _compared(self._wanted.url, self.plan.pieces, self.plan.sums, out)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        wanted = self._wanted
        try:
            yield
        except NotFoundError as error:
            raise IndexMismatchError(
                f"{wanted.shown_url}: the index lists this shard, but the store does not have it"
                f"{looked_for(wanted.url)}. Restore the shard, or rebuild the index: shard_tools index <urls of the "
                f"shards that exist>"
            ) from error
        except StorageError as error:
            _check_size(self._storage, wanted, error)
            raise
        except ChecksumError:
            _check_size(self._storage, wanted, None)
            raise

    def _until_right(self, out: memoryview) -> Checked:
        return fill_checked(self._storage, self._wanted.url, self.plan.pieces, self.plan.sums, out)

    def _replaced(self, error: ChangedError) -> IndexMismatchError:
        wanted = self._wanted
        _check_size(self._storage, wanted, error)
        return IndexMismatchError(
            f"{wanted.shown_url}, bytes {wanted.byte_start}-{wanted.byte_end}: the shard was replaced while it was "
            f"being read, and is not the one that the index describes. Restore it, or write shards under new names and "
            f"index them"
        )


def fill_checked(storage: Storage, url: str, pieces: RangePieces, sums: Sequence[Sum], out: memoryview) -> Checked:
    """Fill ``out`` with pieces of a shard that match their checksums. Wrong bytes are requested again, by the policy.

    Raises:
        ChangedError: The shard was replaced since this process first read it.
        ChecksumError: The bytes stay wrong; ``out`` holds them.
        StorageError: The store failed.
    """

    def attempt(reader: Reader) -> Checked:
        _fill(reader, url, pieces, out, summed=True)
        try:
            return _compared(url, pieces, sums, out)
        except ChecksumError as error:
            _check_unchanged(reader, url)
            raise WrongBytesError(error) from error

    return storage.until_right(url, attempt)


def _fill(reader: Reader, url: str, pieces: RangePieces, out: memoryview, *, summed: bool) -> None:
    for (start, _), part in zip(pieces.ranges, pieces.parts(out, pieces.ranges), strict=True):
        reader.read_into(url, start, part, summed=summed)


def _compared(url: str, pieces: RangePieces, sums: Sequence[Sum], data: memoryview) -> Checked:
    """Compare pieces with their checksums.

    Raises:
        ChecksumError: They differ.
    """
    try:
        return Checked.comparing(pieces.num_bytes, summed_parts(sums, pieces, data))
    except DifferentSumError as error:
        one = sums[error.number]
        raise checksum_error(redact(url), one.ranges[0][0], one.ranges[-1][1], error.got, one.crc32c) from None


def _check_unchanged(reader: Reader, url: str) -> None:
    """Check whether bytes that differ belong to another version of the shard: some stores report it only on request.

    Raises:
        ChangedError: They do.
    """
    try:
        reader.check_unchanged(url)
    except ChangedError:
        raise
    except StorageError:
        return  # unknown, so the bytes count as damaged


def read_part(storage: Storage, wanted: FetchRange, start: int, stop: int) -> bytearray:
    """Return bytes ``[start, stop)`` of a shard: a part of a distant member, which cannot be checked.

    Args:
        storage: The store.
        wanted: Any range of the shard.
        start: First byte in the shard.
        stop: End (exclusive).

    Raises:
        ChangedError: The shard was replaced since this process first read it, perhaps by other content.
        IndexMismatchError: The shard is missing, or has another size than in the index.
        StorageError: The store failed.
    """
    out = bytearray(stop - start)
    with memoryview(out) as view:
        _read_of(storage, wanted, start, stop, ()).part_into(view)
    return out


def read_member(storage: Storage, wanted: FetchRange, start: int, stop: int, samples: SampleTable | None) -> bytearray:
    """Return bytes ``[start, stop)`` of a shard: a whole distant member, which matches its checksum.

    Args:
        storage: The store.
        wanted: Any range of the shard.
        start: First byte in the shard.
        stop: End (exclusive).
        samples: The sample table, which has the checksum; None: it is gone.

    Raises:
        ChecksumError: The member is damaged.
        IndexMismatchError: The shard is missing, or differs from the one in the index; or its sample table does.
        StorageError: The store failed.
    """
    crc = None if samples is None else crc_of_member(samples, start, stop)
    if crc is None:
        raise IndexMismatchError(
            f"{wanted.shown_url}, bytes {start}-{stop}: the checksum of this member was in the shard's sample table "
            f"when the epoch began, and is now gone. Rebuild the table: shard_tools index {shell_place(wanted.url)}"
        )
    out = bytearray(stop - start)
    with memoryview(out) as view:
        member = Sum(ranges=((start, stop),), crc32c=crc, first=0, stop=1)
        _read_of(storage, wanted, start, stop, (member,)).into(view)
    return out


def _read_of(storage: Storage, wanted: FetchRange, start: int, stop: int, sums: tuple[Sum, ...]) -> _Read:
    plan = _Plan(pieces=RangePieces(ranges=((start, stop),)), sums=sums)
    return _Read(storage, replace(wanted, byte_start=start, byte_end=stop), plan)


def checked_range(wanted: FetchRange, data: memoryview) -> Checked:
    """Compare all bytes of a range with the index, if it has checksums of them. It has none of a partial range.

    Raises:
        ChecksumError: They differ.
    """
    if len(data) < wanted.num_bytes:
        return Checked.comparing(len(data), ())
    plan = _whole_of(wanted)
    return _compared(wanted.url, plan.pieces, plan.sums, data)


def reads_whole(wanted: FetchRange, known: ShardFacts) -> bool:
    """Return whether :func:`fetch_unit` reads all of a range."""
    return _part_of(wanted, range(wanted.first_sample, wanted.first_sample + wanted.num_samples), known) is None


def layout_of(wanted: FetchRange, out: memoryview) -> UnitLayout:
    """Return where each field is in the bytes of ``wanted``.

    Raises:
        TarError: They are not whole samples.
        IndexMismatchError: The number of samples differs.
    """
    layout = parse_chunk(out, url=wanted.shown_url, base=wanted.byte_start, repeats=True)
    if len(layout.keys) != wanted.num_samples:
        shown = wanted.shown_url
        raise IndexMismatchError(
            f"{shown}, bytes {wanted.byte_start}-{wanted.byte_end}: {len(layout.keys)} samples where the index "
            f"says {wanted.num_samples}. Rebuild the index: shard_tools index --force {shell_place(wanted.url)}"
        )
    return UnitLayout(
        keys=layout.keys, fields=layout.fields, starts=layout.starts, sizes=layout.sizes, num_bytes=wanted.num_bytes
    )


def layout_by_records(records: Records, wanted: FetchRange) -> UnitLayout | None:
    """Return the places of fields in the bytes of ``wanted``, which match their checksums; None if impossible."""
    rows = range(wanted.first_sample, wanted.first_sample + wanted.num_samples)
    if rows.stop > len(records.keys):
        return None
    found = layout_by_table(records, rows, _whole_of(wanted).pieces, None, {})
    is_odd = (found.starts < -1) | (found.sizes < 0) | (found.sizes > wanted.num_bytes - found.starts)
    return None if (is_odd & (found.starts != -1)).any() else found


def _check_size(storage: Storage, wanted: FetchRange, cause: Exception | None) -> None:
    """Explain a failed read by the size of the shard, if that is the cause."""
    try:
        size_bytes = storage.info(wanted.url).size_bytes
    except StorageError:
        return
    if size_bytes != wanted.shard_bytes:
        shown = wanted.shown_url
        raise IndexMismatchError(
            f"{shown}: {size_bytes} bytes, the index says {wanted.shard_bytes}: the shard was replaced or "
            f"truncated after it was indexed. Restore it, or rebuild the index: "
            f"shard_tools index --force {shell_place(wanted.url)}"
        ) from cause
