"""Scan a shard in its store: one pass over its bytes gives its sample table and chunk rows.

A scan reads a shard once, sequentially, in bounded memory. All code that cuts chunks uses the same rule
(:mod:`streaming.shards.index.cutter`), so scanning a shard of our own writer gives the writer's index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
from crc32c import crc32c

from streaming.errors import ConfigError, DuplicateKeyError
from streaming.shards.index.cutter import DEFAULT_RULE, ChunkCutter, ChunkRule
from streaming.shards.index.keys import Keys
from streaming.shards.index.large_members import LARGE_BYTES, large_sums
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.index.spans import SpanCutter, spans_of
from streaming.shards.tar.group import DUPLICATES_CURE, PackedLayout, check_density
from streaming.shards.tar.keys import KeyLines, pack_keys, surely_unique
from streaming.shards.tar.passed_over import OnPassedOver, PassedOver
from streaming.shards.tar.scanner import TarScanner
from streaming.storage import Storage, redact, scheme_of
from streaming.types import DuplicateKeys, Int64Array

_log = logging.getLogger(__name__)

READ_BYTES = 16 << 20
"""One ranged GET of a scan; two are in memory at a time."""
LOCAL_READ_BYTES = 4 << 20
"""Size of one read of a local shard: its bytes are still in a CPU cache when they are parsed and summed."""
Progress = Callable[[str, int], None]
"""Called as ``progress(url, num_bytes)`` with the bytes of a shard that were scanned since the last call."""

_FEED_BYTES = 4 << 20  # parsed at a time: header blocks are still in the CPU's cache when CRC32C reads them


_ALONE_BYTES = 1 << 20  # from here on a span is summed without the GIL


def scan_shard(
    storage: Storage,
    url: str,
    name: str,
    *,
    read_bytes: int | None = None,
    rule: ChunkRule = DEFAULT_RULE,
    duplicate_keys: DuplicateKeys = "error",
    progress: Progress | None = None,
    on_passed_over: OnPassedOver | None = None,
) -> SampleTable:
    """Return the sample table, with chunk rows and CRC32C, of the shard at ``url``.

    Reads the shard once. Holds two pieces of ``read_bytes`` and the table, whatever the size of shard or members.
    Reading and CRC32C run in one thread, parsing in the caller's. Header checksums are verified. The result depends
    only on the shard's bytes, ``name`` and ``rule``.

    Args:
        storage: The store.
        url: The shard.
        name: Its name in the index.
        read_bytes: Bytes per request; default: ``LOCAL_READ_BYTES`` for files, otherwise ``READ_BYTES``.
        rule: Rule for cutting chunks.
        duplicate_keys: ``"keep"``: a key that occurs again, or a field that its sample already has, begins another
            sample.
        progress: Called with scanned bytes, from the calling thread.
        on_passed_over: Called at the end if there are files that belong to no sample; default: log a warning.

    Raises:
        TarError: The shard is damaged or truncated, or ends without an end-of-archive marker.
        DuplicateKeyError: A key occurs twice in the shard, or a field twice in a sample, unless kept.
        ConfigError: The shard is compressed.
        StorageError: It cannot be read.
    """
    size_bytes = storage.info(url).size_bytes
    scan = _Scan(redact(url), rule, duplicate_keys)
    step = read_bytes or (LOCAL_READ_BYTES if scheme_of(url) == "file" else READ_BYTES)
    with ThreadPoolExecutor(1, thread_name_prefix="scan-read") as helper:
        for piece in _pieces(helper, storage, url, size_bytes, step):
            for at in range(0, len(piece), _FEED_BYTES):
                found = scan.feed(piece[at : at + _FEED_BYTES])
                helper.submit(scan.sums.add, *found)
            if progress is not None:
                progress(url, len(piece))
    table = scan.finish(name, size_bytes)
    if scan.passed_over.num_files:
        (on_passed_over or tell_passed_over)(scan.passed_over)
    return table


def tell_passed_over(passed_over: PassedOver) -> None:
    """Log files that belong to no sample."""
    _log.warning("%s", passed_over)


def _pieces(helper: Executor, storage: Storage, url: str, size_bytes: int, read_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of ``url``, reading the next piece while one is in use.

    A piece is valid until the next one, and for work submitted to ``helper`` (which has one thread) before that.
    """
    buffers = [np.empty(min(read_bytes, size_bytes), np.uint8).data for _ in range(2)]

    def read(index: int) -> memoryview:
        begin = index * read_bytes
        out = buffers[index % 2][: min(read_bytes, size_bytes - begin)]
        storage.read_into(url, begin, out)
        return out

    num_pieces = -(-size_bytes // read_bytes)
    ahead = helper.submit(read, 0) if num_pieces else None
    for index in range(1, num_pieces + 1):
        piece = ahead.result() if ahead else memoryview(b"")
        ahead = helper.submit(read, index) if index < num_pieces else None
        yield piece


Borders = tuple[list[int], set[int], list[int]]
"""Ends of spans; those of them that are ends of chunks; starts and ends of large members, in any order."""


class _Sums:
    """CRC32C of chunk after chunk, recorded at borders of spans and large members. Pieces come in order."""

    def __init__(self) -> None:
        self.crcs: list[int] = []
        self.span_crcs: list[int] = []
        self.large_crcs: dict[int, int] = {}
        self.ahead: list[int] = []  # borders of large members that are beyond the bytes so far
        self.crc = 0  # CRC32C of the open chunk, up to byte `summed`
        self.summed = 0
        self.kept = b""  # the bytes from `summed` on

    def add(self, piece: memoryview, start: int, borders: Borders, settled: int) -> None:
        """Continue through ``piece``, which begins at byte ``start``, up to byte ``settled``."""
        stop = min(settled, start + len(piece))
        spans, chunks, large = borders
        self.ahead += large
        members = {border for border in self.ahead if border <= stop}
        self.ahead = [border for border in self.ahead if border > stop]
        ends = spans
        if members:
            ends, span_ends = sorted(members.union(spans)), set(spans)
        for border in ends:
            if self.kept or border - self.summed >= _ALONE_BYTES:
                self._sum(piece, start, border)
            else:  # A span takes 3 us: releasing the GIL to a waiting parser costs more.
                self.crc = crc32c(piece[self.summed - start : border - start], self.crc, 0)
                self.summed = border
            if members:
                if border in members:
                    self.large_crcs[border] = self.crc
                if border not in span_ends:
                    continue
            self.span_crcs.append(self.crc)
            if border in chunks:
                self.crcs.append(self.crc)
                self.crc = 0
        self._sum(piece, start, stop)
        self.kept += bytes(piece[max(0, self.summed - start) :])

    def _sum(self, piece: memoryview, start: int, stop: int) -> None:
        from_kept = min(len(self.kept), stop - self.summed)
        if from_kept > 0:
            self.crc = crc32c(self.kept[:from_kept], self.crc)
            self.kept = self.kept[from_kept:]
            self.summed += from_kept
        if stop > self.summed:
            self.crc = crc32c(piece[self.summed - start : stop - start], self.crc)
            self.summed = stop


class _Scan:
    """The state of one scan: the layouts so far, and the cutter. The sums belong to another thread."""

    def __init__(self, shown_url: str, rule: ChunkRule, duplicate_keys: DuplicateKeys) -> None:
        self.url = shown_url
        self.duplicate_keys: DuplicateKeys = duplicate_keys
        self.scanner = TarScanner(shown_url, repeats=duplicate_keys == "keep")
        self.sums = _Sums()
        self.cutter = ChunkCutter(rule)
        self.span_cutter = SpanCutter()
        self.layouts: list[PackedLayout] = []
        self.num_samples = 0
        self.passed_over = PassedOver()
        self.bounds = [0]  # first sample of each chunk so far
        self.span_ends: list[int] = []

    def feed(self, piece: memoryview) -> tuple[memoryview, int, Borders, int]:
        """Parse ``piece``. Return the arguments for the sums."""
        if self.scanner.num_bytes == 0 and bytes(piece[:2]) == b"\x1f\x8b":
            raise compressed_error(self.url)
        borders = (*self._take(self.scanner.feed_packed(piece)), self._large_borders())
        if self.scanner.passed_over:
            self.passed_over = self.passed_over.and_of(self.url, self.scanner.passed_over)
        return piece, self.scanner.num_bytes - len(piece), borders, self.scanner.settled

    def _large_borders(self) -> list[int]:
        """Return the borders of the large members whose headers have just been read."""
        members = self.scanner.members
        if members is None:
            return []
        large = members.sizes >= LARGE_BYTES
        if not large.any():
            return []
        starts = members.data[large]
        return [*starts.tolist(), *(starts + members.sizes[large]).tolist()]

    def _take(self, layout: PackedLayout) -> tuple[list[int], set[int]]:
        """Record the samples of ``layout``. Return the offsets at which spans end, and those at which chunks do."""
        if not len(layout.keys):
            return [], set()
        cuts = self.cutter.extend(layout.record_starts)
        self.layouts.append(layout)
        span_cuts = np.array(self.span_cutter.extend(layout.record_starts, cuts.tolist()), np.int64)
        self.bounds += (cuts + self.num_samples).tolist()
        self.span_ends += (span_cuts + self.num_samples).tolist()
        self.num_samples += len(layout.keys)
        return layout.record_starts[span_cuts].tolist(), set(layout.record_starts[cuts].tolist())

    def finish(self, name: str, size_bytes: int) -> SampleTable:
        """Close the last chunk and span at the end of the archive. Return the table of all records."""
        self._take(self.scanner.finish_packed())
        if self.num_samples > self.bounds[-1]:
            self.bounds.append(self.num_samples)
        crcs, span_crcs, large_crcs = self.sums.crcs, self.sums.span_crcs, self.sums.large_crcs
        if len(crcs) < len(self.bounds) - 1:
            crcs.append(self.sums.crc)
        if self.num_samples > (self.span_ends[-1] if self.span_ends else 0):
            self.span_ends.append(self.num_samples)
        if len(span_crcs) < len(self.span_ends):
            span_crcs.append(self.sums.crc)
        stop = self.scanner.settled if self.layouts else 0
        record_starts = np.concatenate([*(layout.record_starts[:-1] for layout in self.layouts), [stop]])
        record_starts = record_starts.astype(np.int64)
        span_starts = [0, *self.span_ends]
        fields = _join_fields(self.layouts, self.url)
        return SampleTable.build(
            name=name,
            size_bytes=size_bytes,
            keys=_joined_keys([one.keys for one in self.layouts], record_starts, self.url, self.duplicate_keys),
            record_starts=record_starts,
            fields=fields,
            chunk_bounds=np.array(self.bounds, np.int64),
            crc32c=np.array(crcs, np.uint32),
            spans=spans_of(record_starts, self.bounds, span_starts, span_crcs),
            large=large_sums(record_starts, fields, self.bounds, span_starts, span_crcs, large_crcs),
        )


def _join_fields(layouts: Sequence[PackedLayout], url: str) -> dict[str, tuple[Int64Array, Int64Array]]:
    """Return offsets and sizes of each field over all layouts; -1 and 0 where samples lack it."""
    names = list(dict.fromkeys(name for layout in layouts for name in layout.fields))
    num_samples = sum(len(layout.keys) for layout in layouts)
    check_density(num_samples, names, sum(int((layout.starts >= 0).sum()) for layout in layouts), url)
    fields = {name: (np.full(num_samples, -1, np.int64), np.zeros(num_samples, np.int64)) for name in names}
    row = 0
    for layout in layouts:
        rows = slice(row, row + len(layout.keys))
        for column, name in enumerate(layout.fields):
            fields[name][0][rows] = layout.starts[:, column]
            fields[name][1][rows] = layout.sizes[:, column]
        row = rows.stop
    return fields


def _joined_keys(
    parts: list[KeyLines | list[str]], record_starts: Int64Array, url: str, duplicate_keys: DuplicateKeys
) -> Keys:
    """Return all keys. Ascending ones are known to differ; others are compared unless duplicates are kept."""
    packed = [pack_keys(part) for part in parts]
    ends = np.cumsum([0] + [len(data) for data, _ in packed])
    stops = np.concatenate([np.empty(0, np.int64), *(s + end for (_, s), end in zip(packed, ends, strict=False))])
    keys = Keys.of_packed(b"".join(data for data, _ in packed), stops)
    if duplicate_keys == "error" and not surely_unique(parts):
        _check_unique(keys[:], record_starts, url)
    return keys


def _check_unique(keys: list[str], record_starts: Int64Array, url: str) -> None:
    if len(set(keys)) == len(keys):
        return
    seen: dict[str, int] = {}
    for index, key in enumerate(keys):
        first = seen.setdefault(key, index)
        if first != index:
            raise DuplicateKeyError(
                f"{url}: key {key!r} appears twice, at bytes {record_starts[first]} and {record_starts[index]}, "
                "with other samples in between: the files of a sample must be adjacent. Sort the archive by name "
                f"(`tar --sort=name`), or {DUPLICATES_CURE}"
            )


def compressed_error(url: str) -> ConfigError:
    """Return the error for a compressed shard."""
    return ConfigError(
        f"{url}: a compressed shard has no byte ranges to index; decompress it (`gunzip`), or stream it as it is"
    )
