"""Fetching one unit: a run of consecutive samples of one shard, checked and taken apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import crc32c

from streaming.cache import NodeCache
from streaming.errors import ChecksumError, DataError, IndexMismatchError, NotFoundError, StorageError
from streaming.index.samples import SampleTable
from streaming.layout import UnitLayout
from streaming.narrow import checksum_error, narrowed
from streaming.storage import ChangedError, Storage
from streaming.tar import parse_chunk

UnitKey: TypeAlias = tuple[str, int, int]
"""URL, first byte, one past the last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRange:
    """What one ranged GET asks for: ``num_samples`` whole samples of one shard.

    Attributes:
        url: The shard.
        byte_start: First byte in the shard.
        byte_end: One past the last byte.
        first_sample: Number, within the shard, of the first sample of the range.
        num_samples: Samples that the range holds, by the index.
        crc32c: CRC32C of the bytes, or None where the index has none for this range.
        shard_bytes: Size of the whole shard, by the index.
        version: Tells this shard from others that lie, or lay, at the same URL.
        spans: Where ``crc32c`` is None: end (relative to ``byte_start``) and CRC32C of each of the spans that make the
            range. Empty where the index has none; then the tar header checksums are verified instead.
        lead: Samples at the beginning that nobody asked for; they are here because a checksum covers them too.
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

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return self.byte_end - self.byte_start

    @property
    def sums(self) -> tuple[tuple[int, int], ...]:
        """End (relative) and CRC32C of each piece with a checksum; they make the range, or there are none."""
        return self.spans if self.crc32c is None else ((self.num_bytes, self.crc32c),)

    @property
    def key(self) -> UnitKey:
        """What tells this range from any other."""
        return self.url, self.byte_start, self.byte_end


def fetch_range(
    storage: Storage,
    wanted: FetchRange,
    out: memoryview,
    cache: NodeCache | None = None,
    samples: Callable[[], SampleTable | None] = lambda: None,
) -> UnitLayout:
    """Fill ``out`` (exactly ``wanted.num_bytes`` long) and return where each field lies, relative to ``out``.

    With a cache, the bytes come from there if they can, and go there if they could not. Where they are damaged, but
    the sample table has checksums for parts of them, the layout says which samples are bad.

    Args:
        storage: Where the shard is.
        wanted: The range.
        out: Where to.
        cache: The node's cache, if there is one.
        samples: The sample table of the shard, or None; asked for only if bytes are damaged.

    Raises:
        ChecksumError: The bytes are damaged, and nobody knows which of them.
        TarError: The bytes match no checksum (there is none) and are not whole samples.
        IndexMismatchError, StorageError: As :func:`fetch_bytes`.
    """
    try:
        return _fetched(storage, wanted, out, cache)
    except ChecksumError:
        table = samples()
        stop = wanted.first_sample + wanted.num_samples
        found = None if table is None else narrowed(table, wanted.first_sample, stop, out, wanted.url)
        if found is None:
            raise
        return found


def _fetched(storage: Storage, wanted: FetchRange, out: memoryview, cache: NodeCache | None) -> UnitLayout:
    if cache is None:
        fetch_bytes(storage, wanted, out)
        return layout_of(wanted, out)
    read = partial(fetch_bytes, storage, wanted)
    hit = cache.read_into(wanted.url, wanted.version, wanted.byte_start, out, read, crc32c=wanted.crc32c)
    try:
        if hit and wanted.crc32c is None:  # else the cache compared it
            _check(storage, wanted, out)
        return layout_of(wanted, out)
    except DataError:
        if not hit:
            raise
        cache.invalidate(wanted.url, wanted.version, wanted.byte_start, wanted.num_bytes)
        fetch_bytes(storage, wanted, out)
        return layout_of(wanted, out)


def fetch_bytes(storage: Storage, wanted: FetchRange, out: memoryview) -> None:
    """Fill ``out`` from the store.

    Bytes that differ from the index's checksum are fetched once more before they count as damaged.

    Raises:
        IndexMismatchError: The shard is missing, or is another one than the index describes.
        ChecksumError: The bytes are damaged, in a shard of the right size; ``out`` holds them as they are.
        StorageError: The store did not deliver.
    """
    try:
        _read(storage, wanted, out)
        if _differing(wanted, out) is not None:
            storage.read_into(wanted.url, wanted.byte_start, out)
            _check(storage, wanted, out)
    except NotFoundError as error:
        raise IndexMismatchError(
            f"{wanted.url}: the index lists this shard, but the store does not have it. Bring the shard back, or "
            f"rebuild the index: shard_tools index <urls of the shards that there are>"
        ) from error
    except StorageError as error:
        _check_size(storage, wanted, error)
        raise


def _read(storage: Storage, wanted: FetchRange, out: memoryview) -> None:
    """Fill ``out``. Of a shard that was replaced since this process first read it, the checksums decide.

    Raises:
        IndexMismatchError: It was replaced, by something that the index does not describe.
        ChangedError: It was replaced, and there are no checksums.
    """
    try:
        storage.read_into(wanted.url, wanted.byte_start, out)
    except ChangedError as error:
        if not wanted.sums:
            raise
        storage.read_into(wanted.url, wanted.byte_start, out)
        if _differing(wanted, out) is not None:
            _check_size(storage, wanted, error)
            raise IndexMismatchError(
                f"{wanted.url}, bytes {wanted.byte_start}-{wanted.byte_end}: the shard was replaced while it was being "
                f"read, and is not the one that the index describes. Restore it, or write shards under new names and "
                f"index them"
            ) from error


def layout_of(wanted: FetchRange, out: memoryview) -> UnitLayout:
    """Where each field lies in the bytes of ``wanted``.

    Raises:
        TarError: They are not whole samples.
        IndexMismatchError: They are another number of samples.
    """
    layout = parse_chunk(out, url=wanted.url, base=wanted.byte_start, verify_headers=not wanted.sums)
    if len(layout.keys) != wanted.num_samples:
        raise IndexMismatchError(
            f"{wanted.url}, bytes {wanted.byte_start}-{wanted.byte_end}: {len(layout.keys)} samples where the index "
            f"says {wanted.num_samples}. Rebuild the index: shard_tools index --force {wanted.url}"
        )
    return UnitLayout(keys=layout.keys, fields=layout.fields, starts=layout.starts, sizes=layout.sizes)


def _differing(wanted: FetchRange, out: memoryview) -> tuple[int, int, int, int] | None:
    """The first piece whose bytes do not match: start and end in ``out``, CRC32C found and expected."""
    start = 0
    for end, expected in wanted.sums:
        got = crc32c.crc32c(out[start:end])
        if got != expected:
            return start, end, got, expected
        start = end
    return None


def _check(storage: Storage, wanted: FetchRange, out: memoryview) -> None:
    found = _differing(wanted, out)
    if found is None:
        return
    _check_size(storage, wanted, None)
    start, end, got, expected = found
    raise checksum_error(wanted.url, wanted.byte_start + start, wanted.byte_start + end, got, expected)


def _check_size(storage: Storage, wanted: FetchRange, cause: Exception | None) -> None:
    """Explain a failed read by the size of the shard, if that is what is wrong."""
    try:
        size_bytes = storage.info(wanted.url).size_bytes
    except StorageError:
        return
    if size_bytes != wanted.shard_bytes:
        raise IndexMismatchError(
            f"{wanted.url}: {size_bytes} bytes, the index says {wanted.shard_bytes}: the shard was replaced or "
            f"truncated after it was indexed. Restore it, or rebuild the index: "
            f"shard_tools index --force {wanted.url}"
        ) from cause
