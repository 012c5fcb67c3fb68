"""Scanning a shard as it lies in a store: one pass over its bytes gives its sample table and chunk rows.

A scan reads a shard once, front to back, in bounded memory. Whoever cuts chunks uses one rule
(:mod:`streaming.index.cutter`), so scanning a shard of our own writer gives the writer's index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from streaming.errors import ConfigError, DuplicateKeyError
from streaming.index.cutter import DEFAULT_RULE, ChunkCutter, ChunkRule
from streaming.index.samples import SampleTable
from streaming.storage import Storage, redact
from streaming.tar.group import ChunkLayout, check_density
from streaming.tar.scanner import TarScanner

READ_BYTES = 16 << 20
"""One ranged GET of a scan; two are in memory at a time."""
Progress = Callable[[str, int], None]
"""Called as ``progress(url, num_bytes)`` with the bytes of a shard that were scanned since the last call."""

_FEED_BYTES = 2 << 20  # parsed at a time, so that header blocks are still in the CPU's cache when CRC32C reads them


def scan_shard(
    storage: Storage,
    url: str,
    name: str,
    *,
    read_bytes: int = READ_BYTES,
    rule: ChunkRule = DEFAULT_RULE,
    progress: Progress | None = None,
) -> SampleTable:
    """The sample table, with chunk rows and CRC32C, of the shard at ``url``.

    Reads the shard once; holds two pieces of ``read_bytes`` and the table, whatever the size of shard or members.
    Header checksums are verified. The result depends on the shard's bytes, ``name`` and ``rule`` alone.

    Args:
        storage: Where to read.
        url: The shard.
        name: Its name in the index.
        read_bytes: Bytes per request.
        rule: Where chunks are cut.
        progress: Told about scanned bytes, from the calling thread.

    Raises:
        TarError: If the shard is damaged or truncated, or ends without an end-of-archive mark.
        DuplicateKeyError: If a key comes twice in the shard, or a field twice in a sample.
        ConfigError: If the shard is compressed.
        StorageError: If it cannot be read.
    """
    size_bytes = storage.info(url).size_bytes
    scan = _Scan(redact(url), rule)
    for piece in _pieces(storage, url, size_bytes, read_bytes):
        for start in range(0, len(piece), _FEED_BYTES):
            scan.feed(piece[start : start + _FEED_BYTES])
        if progress is not None:
            progress(url, len(piece))
    return scan.finish(name, size_bytes)


def _pieces(storage: Storage, url: str, size_bytes: int, read_bytes: int) -> Iterator[memoryview]:
    """The bytes of ``url``, the next piece being read while one is used; a piece is valid until the next."""
    buffers = [np.empty(min(read_bytes, size_bytes), np.uint8).data for _ in range(2)]

    def read(index: int) -> memoryview:
        start = index * read_bytes
        out = buffers[index % 2][: min(read_bytes, size_bytes - start)]
        storage.read_into(url, start, out)
        return out

    num_pieces = -(-size_bytes // read_bytes)
    with ThreadPoolExecutor(1, thread_name_prefix="scan-read") as reader:
        ahead = reader.submit(read, 0) if num_pieces else None
        for index in range(1, num_pieces + 1):
            piece = ahead.result() if ahead else memoryview(b"")
            ahead = reader.submit(read, index) if index < num_pieces else None
            yield piece


class _Scan:
    """The state of one scan: layouts so far, and the CRC32C of the open chunk."""

    def __init__(self, shown_url: str, rule: ChunkRule) -> None:
        self.url = shown_url
        self.scanner = TarScanner(shown_url, verify_headers=True)
        self.cutter = ChunkCutter(rule)
        self.layouts: list[ChunkLayout] = []
        self.num_samples = 0
        self.bounds = [0]  # first sample of each chunk so far
        self.crcs: list[int] = []
        self.crc = 0  # of the open chunk, up to byte `summed`
        self.summed = 0
        self.kept = b""  # the bytes from `summed` on

    def feed(self, piece: memoryview) -> None:
        if self.scanner.num_bytes == 0 and bytes(piece[:2]) == b"\x1f\x8b":
            raise compressed_error(self.url)
        layout = self.scanner.feed(piece)
        borders = self._take(layout)
        start = self.scanner.num_bytes - len(piece)  # where the piece begins
        for border in borders:
            self._sum(piece, start, border)
            self.crcs.append(self.crc)
            self.crc = 0
        self._sum(piece, start, min(self.scanner.settled, self.scanner.num_bytes))
        self.kept += bytes(piece[max(0, self.summed - start) :])

    def _take(self, layout: ChunkLayout) -> list[int]:
        """Note the records of ``layout``; the offsets at which chunks end."""
        if not layout.keys:
            return []
        cuts = self.cutter.extend(layout.record_starts)
        self.layouts.append(layout)
        self.bounds += (cuts + self.num_samples).tolist()
        self.num_samples += len(layout.keys)
        borders: list[int] = layout.record_starts[cuts].tolist()
        return borders

    def _sum(self, piece: memoryview, start: int, stop: int) -> None:
        """Go on with the CRC32C up to byte ``stop``, through the kept bytes and those of the piece at ``start``."""
        from_kept = min(len(self.kept), stop - self.summed)
        if from_kept > 0:
            self.crc = crc32c(self.kept[:from_kept], self.crc)
            self.kept = self.kept[from_kept:]
            self.summed += from_kept
        if stop > self.summed:
            self.crc = crc32c(piece[self.summed - start : stop - start], self.crc)
            self.summed = stop

    def finish(self, name: str, size_bytes: int) -> SampleTable:
        self._take(self.scanner.finish())
        if self.num_samples > self.bounds[-1]:
            self.bounds.append(self.num_samples)
        if len(self.crcs) < len(self.bounds) - 1:
            self.crcs.append(self.crc)
        keys = [key for layout in self.layouts for key in layout.keys]
        starts = [layout.record_starts[:-1] for layout in self.layouts]
        record_starts = np.concatenate([*starts, [self.scanner.settled if keys else 0]]).astype(np.int64)
        _check_unique(keys, record_starts, self.url)
        return SampleTable.build(
            name=name,
            size_bytes=size_bytes,
            keys=keys,
            record_starts=record_starts,
            fields=_join_fields(self.layouts, self.url),
            chunk_bounds=np.array(self.bounds, np.int64),
            crc32c=np.array(self.crcs, np.uint32),
        )


def _join_fields(layouts: Sequence[ChunkLayout], url: str) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Offsets and sizes of each field over all layouts, -1 and 0 where samples lack it."""
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


def _check_unique(keys: list[str], record_starts: NDArray[np.int64], url: str) -> None:
    if len(set(keys)) == len(keys):
        return
    seen: dict[str, int] = {}
    for index, key in enumerate(keys):
        first = seen.setdefault(key, index)
        if first != index:
            raise DuplicateKeyError(
                f"{url}: key {key!r} comes twice, at bytes {record_starts[first]} and {record_starts[index]}, "
                "with other samples between: the files of a sample must stand together; sort the archive by name "
                "(`tar --sort=name`), or write it anew with `shard_tools reshard`"
            )


def compressed_error(url: str) -> ConfigError:
    """What is raised for a compressed shard."""
    return ConfigError(
        f"{url}: a compressed shard has no byte ranges to index; decompress it (`gunzip`), or stream it as it is"
    )
