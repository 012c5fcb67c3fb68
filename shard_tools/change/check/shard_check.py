"""Compare one shard with its index: every byte is read once, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from shard_tools.change.sets.open_set import load_samples
from shard_tools.running.progress import Progress
from shard_tools.running.report import Finding
from streaming.build.decode import FieldDecoder, decode_field
from streaming.errors import ChecksumError, ConfigError, DataError, DecodeError, NotFoundError, StorageError
from streaming.shards.fetch.checksums import sums_of
from streaming.shards.fetch.layout import UnitLayout
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import stable_hash
from streaming.shards.index.large_members import LargeSums
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.tar import ChunkLayout, parse_chunk
from streaming.shards.tar.passed_over import PassedOver
from streaming.storage import Reader, Storage, WrongBytesError, crc_of, redact
from streaming.types import Int64Array

_REINDEX = "if the shard is right, run `shard_tools index --force`; if not, restore it"
_REPLACED = "restore the shard that was indexed, or run `shard_tools index --force` for this one"
_CONVERT_AGAIN = "restore the shard that was written, or convert again with --overwrite"
_MAX_TAIL_BYTES = 1 << 20  # read at a time after the last chunk
_KEYS_AT_ONCE = 1 << 13  # hashed in one call; smaller batches cost more per key
_MAX_KEYS_LISTED = 10  # findings about single samples, per chunk and kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard, and the index rows to check it against; small, and can be pickled.

    Attributes:
        url: The shard.
        chunks: Its chunk rows in the chunk table: a table of this one shard.
        index_url: Location of its sample table, if not beside it.
        fields: The fields that the conversion of this shard writes, True for those of every sample; None: unknown.
    """

    url: str
    chunks: ChunkTable
    index_url: str | None
    fields: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOutcome:
    """The result of checking one shard.

    Attributes:
        findings: Findings in byte order.
        key_hashes: int64 ``[n]``, a hash of every key in the tar, equal in every process; 8 bytes instead of about 60
        for the key.
        num_bytes: Bytes read.
        not_decoded: Fields that are never decoded.
        passed_over: Files that belong to no sample.
        first: Checksum and size of the first chunk, if it differs from the index: perhaps it is that of another shard.
        The first finding of kind ``checksum`` is about it.
    """

    findings: tuple[Finding, ...]
    key_hashes: Int64Array
    num_bytes: int
    not_decoded: frozenset[str]
    passed_over: PassedOver
    first: tuple[int, int] | None


class _KeyHashes:
    """Hash keys in batches."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._hashes: list[Int64Array] = [np.empty(0, np.int64)]

    def add(self, keys: Sequence[str]) -> None:
        """Add keys."""
        self._keys += keys
        if len(self._keys) >= _KEYS_AT_ONCE:
            self._hash()

    def hashes(self) -> Int64Array:
        """Return the hash of each key, in order."""
        if self._keys:
            self._hash()
        return np.concatenate(self._hashes)

    def _hash(self) -> None:
        try:
            texts = pa.array(self._keys, pa.string())
        except UnicodeEncodeError:  # bytes of a name that are not UTF-8
            encoded = [key.encode("utf-8", "surrogateescape") for key in self._keys]
            texts = pa.array(encoded, pa.binary()).view(pa.string())
        self._hashes.append(stable_hash(texts).to_numpy(zero_copy_only=False))
        self._keys = []


@dataclass(slots=True, kw_only=True)
class ShardCheck:
    """Check one shard. Use it once, from one thread.

    Args:
        task: The shard, and its index rows.
        storage: Store of the shard.
        decoder: Decodes every field too, if given.
        progress: Receives the number of bytes.
    """

    task: ShardTask
    storage: Storage
    decoder: FieldDecoder | None
    progress: Progress
    findings: list[Finding] = field(default_factory=list)
    keys: _KeyHashes = field(default_factory=_KeyHashes)
    num_bytes: int = 0
    not_decoded: set[str] = field(default_factory=set)
    passed_over: PassedOver = field(default_factory=PassedOver)
    first: tuple[int, int] | None = None

    def run(self) -> ShardOutcome:
        """Read the whole shard. Never raise for a fault in the shard or its index."""
        try:
            self._check()
        except NotFoundError:
            self._find(
                "missing",
                "the shard is in the index but not in the store",
                cure="restore it, or take it out of the index with `shard_tools index --prune`",
            )
        except StorageError as error:
            self._find("read", f"cannot be read: {error}", cure="see the message; then verify again")
        return ShardOutcome(
            findings=tuple(self.findings),
            key_hashes=self.keys.hashes(),
            num_bytes=self.num_bytes,
            not_decoded=frozenset(self.not_decoded),
            passed_over=self.passed_over,
            first=self.first,
        )

    def _find(self, kind: str, what: str, *, cure: str = _REINDEX, **facts: object) -> None:
        self.findings.append(Finding(kind=kind, shard=self.task.url, what=what, cure=cure, **facts))  # type: ignore[arg-type]

    def _check(self) -> None:
        chunks, url = self.task.chunks, self.task.url
        size_bytes, promised = self.storage.info(url).size_bytes, chunks.shards[0].size_bytes
        if size_bytes != promised:
            what = "the shard is cut off" if size_bytes < promised else "the shard is longer than it was"
            self._find(
                "size", what, cure=_REPLACED, byte_start=min(size_bytes, promised), byte_end=max(size_bytes, promised),
                expected=f"{promised} bytes", got=f"{size_bytes} bytes",
            )  # fmt: skip
        samples = self._load_samples()
        for row in range(chunks.num_chunks):
            start, end = int(chunks.byte_start[row]), int(chunks.byte_end[row])
            if end > size_bytes:
                break  # reported by its size
            self._check_chunk(row, start, end, samples)
        if size_bytes == promised:
            self._check_tail(int(chunks.byte_end[-1]) if chunks.num_chunks else 0, size_bytes)

    def _load_samples(self) -> SampleTable | None:
        try:
            samples = load_samples(self.storage, self.task.url, self.task.index_url)
        except DataError as error:
            self._find("index", f"the sample table is damaged: {error}", cure="run `shard_tools index`")
            return None
        if samples is None:
            self._find("index", "the shard has no sample table", cure="run `shard_tools index --force`")
        elif samples.chunks != self.task.chunks:
            self._find(
                "index", "the chunk table and the shard's sample table disagree", cure="run `shard_tools index --force`"
            )
        else:
            return samples
        return None

    def _asked(self, start: int, end: int, promised: int) -> tuple[memoryview, int]:
        """Return bytes of the shard and their CRC32C; read them a second time if it differs from the promised one."""
        answers: list[tuple[memoryview, int]] = []

        def attempt(reader: Reader) -> None:
            body = reader.read(self.task.url, start, end)
            answers[:] = [(body, crc_of((body,))[0])]
            if answers[0][1] != promised:
                raise WrongBytesError(ChecksumError(f"{self.task.url}, bytes {start}-{end}"))

        with suppress(ChecksumError):  # this command has its own message for it
            self.storage.until_right(self.task.url, attempt)
        return answers[0]

    def _check_chunk(self, row: int, start: int, end: int, samples: SampleTable | None) -> None:
        chunks, url = self.task.chunks, self.task.url
        promised = int(chunks.crc32c[row])
        body, found = self._asked(start, end, promised)
        self.num_bytes += len(body)
        self.progress.advance(num_bytes=len(body))
        if found != promised:
            self.first = (found, end - start) if row == 0 else self.first
            self._find(
                "checksum", "the bytes are not those that were indexed", cure=_REPLACED, byte_start=start, byte_end=end,
                expected=f"CRC32C {promised:08x}", got=f"{found:08x}",
            )  # fmt: skip
        try:
            layout = parse_chunk(body, url=url, base=start, verify_headers=True, repeats=True)
        except DataError as error:
            self._find("tar", f"not a run of whole tar members: {error}", byte_start=start, byte_end=end)
            return
        self.keys.add(layout.keys)
        if layout.passed_over:
            self.passed_over = self.passed_over.and_of(redact(url), layout.passed_over)
        if int(layout.record_starts[-1]) != end - start:
            self._find(
                "tar",
                "the archive ends inside the chunk",
                byte_start=start + int(layout.record_starts[-1]),
                byte_end=end,
            )
        if len(layout.keys) != int(chunks.num_samples[row]):
            self._find(
                "samples", "the chunk holds another number of samples", byte_start=start, byte_end=end,
                expected=str(int(chunks.num_samples[row])), got=str(len(layout.keys)),
            )  # fmt: skip
        elif samples is not None and found == promised:
            self._compare(layout, body, samples, int(chunks.first_sample[row]), start)
        if self.task.fields is not None:
            self._check_fields(layout, self.task.fields, start)
        if self.decoder is not None:
            self._decode(layout, body, start)

    def _check_fields(self, layout: ChunkLayout, promised: Mapping[str, bool], base: int) -> None:
        """Compare the fields of a chunk's samples with those that the conversion writes."""
        for name in sorted({*promised, *layout.fields}):
            column = layout.fields.index(name) if name in layout.fields else None
            there = np.zeros(len(layout.keys), bool) if column is None else layout.starts[:, column] >= 0
            if promised.get(name):
                odd, what = ~there, f"the sample lacks the field {name!r}, which every sample of this conversion has"
            elif name not in promised:
                odd, what = there, f"the sample has a field {name!r}, which this conversion does not make"
            else:
                continue
            for number in np.flatnonzero(odd)[:_MAX_KEYS_LISTED].tolist():
                span = (layout.record_starts[number : number + 2] + base).tolist()
                self._find(
                    "fields", what, key=layout.keys[number], byte_start=span[0], byte_end=span[1], cure=_CONVERT_AGAIN
                )

    def _compare(self, layout: ChunkLayout, body: memoryview, samples: SampleTable, first: int, base: int) -> None:
        """Compare the sample table's rows of one chunk with the members in the tar."""
        last = first + len(layout.keys)
        for number, (got, expected) in enumerate(zip(layout.keys, samples.keys[first:last], strict=True)):
            if got != expected:
                span = layout.record_starts[number : number + 2] + base
                self._find(
                    "keys", "the sample table has another key here", key=got, byte_start=int(span[0]),
                    byte_end=int(span[1]), expected=repr(expected), got=repr(got),
                )  # fmt: skip
                return  # all following ones are shifted
        if not np.array_equal(samples.record_starts[first : last + 1], layout.record_starts + base):
            self._find("fields", "the sample table has other record bounds", byte_start=base)
        else:
            self._compare_sums(body, samples, first, last)
        for name in sorted({*layout.fields, *samples.fields}):
            self._compare_field(name, layout, samples, first, base)

    def _compare_sums(self, body: memoryview, samples: SampleTable, first: int, last: int) -> None:
        """Compare all checksums in a chunk whose bytes are intact and whose records match the table."""
        base = int(samples.record_starts[first])
        spans_alone = replace(samples, large=LargeSums())
        for one in dict.fromkeys((*sums_of(spans_alone, first, last), *sums_of(samples, first, last))):
            found, _ = crc_of(body[start - base : end - base] for start, end in one.ranges)
            if found != one.crc32c:
                self._find(
                    "index", "the sample table has another checksum for these bytes, which are right",
                    cure="run `shard_tools index --force`", byte_start=one.ranges[0][0], byte_end=one.ranges[-1][1],
                    expected=f"CRC32C {one.crc32c:08x}", got=f"{found:08x}",
                )  # fmt: skip

    def _compare_field(self, name: str, layout: ChunkLayout, samples: SampleTable, first: int, base: int) -> None:
        count = len(layout.keys)
        absent = (np.full(count, -1, np.int64), np.zeros(count, np.int64))
        there = absent
        if name in layout.fields:
            column = layout.fields.index(name)
            starts = layout.starts[:, column]
            there = (np.where(starts < 0, -1, starts + base), layout.sizes[:, column])
        told = absent
        if name in samples.fields:
            starts, sizes = samples.fields[name]
            told = (starts[first : first + count], sizes[first : first + count])
        differ = (there[0] != told[0]) | ((there[1] != told[1]) & (there[0] >= 0))
        for number in np.flatnonzero(differ)[:_MAX_KEYS_LISTED].tolist():
            self._find(
                "fields", f"the sample table has other bytes for field {name!r}", key=layout.keys[number],
                expected=_span(told, number), got=_span(there, number),
            )  # fmt: skip

    def _decode(self, layout: ChunkLayout, body: memoryview, base: int) -> None:
        if self.decoder is None:
            return
        numbers = range(len(layout.keys))
        for number, column, what in undecodable(self.decoder, layout, body, numbers, self.task.url, self.not_decoded):
            start, size = int(layout.starts[number, column]), int(layout.sizes[number, column])
            self._find(
                "decode", what, key=layout.keys[number], byte_start=base + start, byte_end=base + start + size,
                cure="remove or replace this sample",
            )  # fmt: skip

    def _check_tail(self, start: int, size_bytes: int) -> None:
        """Check that only zeros follow the last chunk: the end-of-archive marker and padding."""
        for begin, end in _pieces(start, size_bytes, _MAX_TAIL_BYTES):
            body = np.frombuffer(self.storage.read(self.task.url, begin, end), np.uint8)
            self.num_bytes += body.size
            self.progress.advance(num_bytes=body.size)
            if body.any():
                at = begin + int(np.flatnonzero(body)[0])
                self._find("tail", "bytes after the last chunk that are not zero", byte_start=at, byte_end=size_bytes)
                return
        if size_bytes - start < 1024:
            self._find("tail", "the end-of-archive mark is missing", byte_start=start, byte_end=size_bytes)


def undecodable(
    decoder: FieldDecoder, layout: ChunkLayout | UnitLayout, body: memoryview, numbers: Iterable[int], url: str,
    not_decoded: set[str],
) -> Iterator[tuple[int, int, str]]:  # fmt: skip
    """Decode the fields of some samples; yield number, column and problem of those that cannot be decoded.

    Fields without a safe decoder are added to ``not_decoded``.
    """
    for column, name in enumerate(layout.fields):
        try:
            decode = decoder.decoder_for(name)
        except ConfigError:  # a pickle and the like: safe to store, not to open
            not_decoded.add(name)
            continue
        for number in numbers:
            start, size = int(layout.starts[number, column]), int(layout.sizes[number, column])
            if start < 0:
                continue
            try:
                decode_field(decode, body[start : start + size], url=url, key=layout.keys[number], field=name)
            except DecodeError as error:
                yield number, column, f"field {name!r} does not decode: {error}"


def _pieces(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, step):
        yield begin, min(stop, begin + step)


def _span(column: tuple[Int64Array, Int64Array], number: int) -> str:
    start, size = int(column[0][number]), int(column[1][number])
    return "none" if start < 0 else f"[{start}, {start + size})"
