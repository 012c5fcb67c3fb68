"""Decode members that are too large to read as a whole: their decoders get a file, and read ranges of it."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from streaming.build.decode.registry import decode_field
from streaming.errors import ChecksumError, ConfigError, IndexMismatchError
from streaming.storage import ChangedError, redact
from streaming.types import Decoder, ReadBuffer, override

BLOCK_BYTES = 128 << 10
"""Size of a read at an unexpected offset: 1.5 ms at the 85 MB/s of one GET, compared with 15 to 30 ms until its first
byte; the next steps of a parser mostly stay within it."""
MOST_AHEAD_BYTES = 4 << 20
"""Maximum size of sequential reads, which double up to it: the latency of a request is then 5 % of its transfer. Some
libraries read everything before an offset (MP3), so fewer requests help."""
KEPT_BYTES = 2 << 20
"""Bytes that a file caches: enough for the head, the index, and the surroundings of a clip."""
READS_AT_ONCE = 8
"""Number of members of a batch that are decoded concurrently: each waits for its requests in sequence."""
_LOOK_UP_S = 1.0
"""Longest uninterrupted wait, in seconds: a Ctrl-C that arrives just before a wait is handled when the wait ends."""
_GRID_BYTES = 16 << 10
"""Alignment of blocks, because parsers go back by a few bytes."""


class ReadRange(Protocol):
    """Return bytes ``[start, stop)`` of one member; with ``whole``, all of it, verified by its checksum."""

    def __call__(self, start: int, stop: int, *, whole: bool) -> ReadBuffer: ...  # noqa: D102


class ReadDistant(Protocol):
    """Read bytes of a chunk's shard, for members that are in no buffer; see ``Bytes.read_distant``."""

    def __call__(self, chunk_id: int, start: int, stop: int, *, whole: bool) -> ReadBuffer: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class DistantMember:
    """A member that was left in the store.

    Attributes:
        read: Reads bytes of the member.
        num_bytes: Size of the member.
    """

    read: ReadRange
    num_bytes: int

    @classmethod
    def at(cls, read: ReadRange, first: int, num_bytes: int) -> Self:
        """Return the member that begins at byte ``first`` of the data that ``read`` reads."""

        def within(start: int, stop: int, *, whole: bool) -> ReadBuffer:
            return read(first + start, first + stop, whole=whole)

        return cls(read=within, num_bytes=num_bytes)


class MemberFile(io.RawIOBase):
    """A member as a seekable binary file that reads blocks on demand. For one thread.

    C libraries call this file and can neither propagate its exceptions nor stop at Ctrl-C. So after an error it behaves
    like an empty file, and ``failure`` holds the error. The caller of the decoder must check ``failure`` first.

    Args:
        member: The member.

    Attributes:
        failure: Error of a read, after which the file has no more bytes; None: no error.
    """

    def __init__(self, member: DistantMember) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self._member = member
        self._at = 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()  # by first byte; they do not overlap
        self._ahead_bytes = BLOCK_BYTES
        self._expected = -1  # offset of the next read if it is sequential

    def __len__(self) -> int:
        return self._member.num_bytes

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._member.num_bytes}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"seek({offset}, {whence}): expected a position at or after the beginning")
        self._at = base + offset
        return self._at

    @override
    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` up to the end of the file; return the number of bytes."""
        out = memoryview(buffer).cast("B")
        done = 0
        try:
            while done < len(out) and self._at < self._member.num_bytes and self.failure is None:
                block, skip = self._block(len(out) - done)
                part = block[skip : skip + len(out) - done]
                out[done : done + len(part)] = part
                done += len(part)
                self._at += len(part)
        except BaseException as error:  # noqa: BLE001  for the caller of the decoder: see the class
            self.failure = error
        return done if self.failure is None else 0

    def _block(self, wanted: int) -> tuple[memoryview, int]:
        """Return the block that holds the next byte, and the byte's offset in it."""
        at, stop = self._at, self._member.num_bytes
        for start, block in self._blocks.items():
            if start <= at < start + len(block):
                self._blocks.move_to_end(start)
                return block, at - start
            if start > at:
                stop = min(stop, start)
        goes_on = at == self._expected
        self._ahead_bytes = min(2 * self._ahead_bytes, MOST_AHEAD_BYTES) if goes_on else BLOCK_BYTES
        begins = (start + len(block) for start, block in self._blocks.items() if start + len(block) <= at)
        start = max(at // _GRID_BYTES * _GRID_BYTES, *begins, 0)
        stop = min(stop, max(start + self._ahead_bytes, at + wanted))
        block = memoryview(self._member.read(start, stop, whole=False))
        self._expected = stop
        self._blocks[start] = block
        while len(self._blocks) > 1 and sum(map(len, self._blocks.values())) > KEPT_BYTES:
            self._blocks.popitem(last=False)
        return block, at - start


_T = TypeVar("_T")


class Outcome(Generic[_T]):
    """The result or the error of a job."""

    def __init__(self, job: Callable[[], _T]) -> None:
        self._error: BaseException | None = None
        try:
            self._value = job()
        except BaseException as error:  # noqa: BLE001  raised by get()
            self._error = error

    def get(self) -> _T:
        """Return the value, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._value


def together(jobs: Sequence[Callable[[], _T]], num_threads: int = READS_AT_ONCE) -> list[Outcome[_T]]:
    """Run jobs that mostly wait for a store, several at a time; return when all have ended.

    Jobs run on daemon threads, so a hanging store cannot keep the interpreter from exiting. If the wait is interrupted,
    as by Ctrl-C, no further job begins.
    """
    if len(jobs) < 2:
        return [Outcome(job) for job in jobs]
    found: list[Outcome[_T] | None] = [None] * len(jobs)
    places = iter(range(len(jobs)))
    lock, ended = threading.Lock(), threading.Event()

    def run() -> None:
        while not ended.is_set():
            with lock:  # exactly one thread takes each job
                place = next(places, None)
            if place is None:
                return
            found[place] = Outcome(jobs[place])

    threads = [
        threading.Thread(target=run, name=f"shardstream-member-{number}", daemon=True)
        for number in range(min(num_threads, len(jobs)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_UP_S)
    finally:
        ended.set()
    return [one for one in found if one is not None]


def decode_member(decoder: Decoder, member: DistantMember, *, url: str, key: str, field: str) -> object:
    """Return the value that ``decoder`` makes of a distant member, by reading the ranges that it needs.

    No checksum covers a range. So if decoding fails, or the shard was replaced, the whole member is verified by its
    checksum before the sample is reported as bad.

    Raises:
        ChecksumError: The member is damaged.
        IndexMismatchError: The shard was replaced by a different one.
        DecodeError: The member is intact, and does not decode; see ``decode_field``.
        BaseException: Reading failed, which is not the sample's fault.
    """
    read_ranges: Callable[[Any], object] = decoder
    with MemberFile(member) as file:
        try:
            value = read_ranges(file)
        except Exception as error:
            if file.failure is None and isinstance(error, (ConfigError, MemoryError)):
                raise
            # boundary to foreign decoders: verify the whole member first
        else:
            if file.failure is None:
                return value
        failure = file.failure
    if failure is not None and not isinstance(failure, ChangedError):
        raise failure
    try:
        whole = member.read(0, member.num_bytes, whole=True)
    except ChecksumError as error:
        if failure is None:
            raise
        raise IndexMismatchError(
            f"{redact(url)}: the shard was replaced while it was being read, and is not the one that the index "
            f"describes: field {field!r} of sample {key!r} has other bytes. Restore it, or write shards under new "
            f"names and index them"
        ) from error
    return decode_field(decoder, whole, url=url, key=key, field=field)
