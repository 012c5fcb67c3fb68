"""Decode members that are too large to be read as a whole: their decoders get a file, and read ranges of it."""

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
"""What is read at a place that was not expected: 1.5 ms at the 85 MB/s of one GET, beside 15 to 30 ms until its first
byte; a parser's next steps are mostly within."""
MOST_AHEAD_BYTES = 4 << 20
"""Reads that go on where the last one ended double up to this, by when a request is 5 % of what its bytes take. Some
libraries read all before a place (MP3): they are better off with few requests."""
KEPT_BYTES = 2 << 20
"""What a file keeps of what it has read: head, index, and the place of the clip."""
READS_AT_ONCE = 8
"""Members of a batch that are decoded at the same time: each waits for one request after the other."""
_LOOK_UP_S = 1.0
"""The longest wait without a look: a Ctrl-C that comes just before one is handled when it ends."""
_GRID_BYTES = 16 << 10
"""Blocks begin at multiples of this, because parsers go back by some bytes."""


class ReadRange(Protocol):
    """Return bytes ``[start, stop)`` of one member; ``whole``: all of it, compared with its checksum."""

    def __call__(self, start: int, stop: int, *, whole: bool) -> ReadBuffer: ...  # noqa: D102


class ReadDistant(Protocol):
    """Read bytes of the shard of a chunk, of members that are in no buffer; see ``Bytes.read_distant``."""

    def __call__(self, chunk_id: int, start: int, stop: int, *, whole: bool) -> ReadBuffer: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class DistantMember:
    """A member that was left in the store.

    Attributes:
        read: Reads bytes of it.
        num_bytes: Its size.
    """

    read: ReadRange
    num_bytes: int

    @classmethod
    def at(cls, read: ReadRange, first: int, num_bytes: int) -> Self:
        """Return a member from byte ``first`` on of what ``read`` reads."""

        def within(start: int, stop: int, *, whole: bool) -> ReadBuffer:
            return read(first + start, first + stop, whole=whole)

        return cls(read=within, num_bytes=num_bytes)


class MemberFile(io.RawIOBase):
    """A member as a seekable binary file that reads blocks of it as they are needed. For one thread.

    Libraries in C call it, which can neither raise what went wrong here nor stop at Ctrl-C: so it ends like an empty
    file, and ``failure`` says why. Who calls the decoder must look there first.

    Args:
        member: The member.

    Attributes:
        failure: What a read raised, after which the file has no more bytes; None: nothing.
    """

    def __init__(self, member: DistantMember) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self._member = member
        self._at = 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()  # by first byte; they do not overlap
        self._ahead_bytes = BLOCK_BYTES
        self._expected = -1  # where the next read goes on with the last one

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
            raise ValueError(f"seek({offset}, {whence}): expected a place behind the beginning")
        self._at = base + offset
        return self._at

    @override
    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer``, except behind the end; return the number of bytes."""
        out = memoryview(buffer).cast("B")
        done = 0
        try:
            while done < len(out) and self._at < self._member.num_bytes and self.failure is None:
                block, skip = self._block(len(out) - done)
                part = block[skip : skip + len(out) - done]
                out[done : done + len(part)] = part
                done += len(part)
                self._at += len(part)
        except BaseException as error:  # noqa: BLE001  for who called the decoder: see the class
            self.failure = error
        return done if self.failure is None else 0

    def _block(self, wanted: int) -> tuple[memoryview, int]:
        """Return the block that holds the next byte, and where in it."""
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
    """What a job returned or raised."""

    def __init__(self, job: Callable[[], _T]) -> None:
        self._error: BaseException | None = None
        try:
            self._value = job()
        except BaseException as error:  # noqa: BLE001  for whoever asks for the value
            self._error = error

    def get(self) -> _T:
        """Return the value, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._value


def together(jobs: Sequence[Callable[[], _T]], num_threads: int = READS_AT_ONCE) -> list[Outcome[_T]]:
    """Run jobs that mostly wait for a store, several at a time; return when all have ended.

    On daemon threads, so a store that hangs keeps no interpreter from its end. If the wait ends early, as by Ctrl-C,
    no other job begins.
    """
    if len(jobs) < 2:
        return [Outcome(job) for job in jobs]
    found: list[Outcome[_T] | None] = [None] * len(jobs)
    places = iter(range(len(jobs)))
    lock, ended = threading.Lock(), threading.Event()

    def run() -> None:
        while not ended.is_set():
            with lock:  # each place is taken by one thread
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
    """Return what ``decoder`` makes of a distant member, of which it reads what it needs.

    Nothing tells whether parts have the right bytes. So if they do not decode, or the shard was replaced, the member is
    read as a whole and compared with its checksum before anything is said of the sample.

    Raises:
        ChecksumError: The member is damaged.
        IndexMismatchError: The shard was replaced by one that differs.
        DecodeError: It is as it was written, and does not decode; see ``decode_field``.
        BaseException: Whatever reading raised, of which the sample knows nothing.
    """
    read_ranges: Callable[[Any], object] = decoder
    with MemberFile(member) as file:
        try:
            value = read_ranges(file)
        except Exception as error:
            if file.failure is None and isinstance(error, (ConfigError, MemoryError)):
                raise
            # boundary to foreign decoders: the whole member tells what it is
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
