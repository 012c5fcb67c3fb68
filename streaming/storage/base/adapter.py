"""Define what an adapter for one kind of store must do; the facade adds retries, exact lengths and counters.

An adapter makes ONE attempt per call and turns every foreign error into a type of ``streaming.errors``. The types
defined here tell the retry loop which errors another attempt may cure; everything else is final.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from streaming.common.forks import Maker
from streaming.errors import AccessDeniedError, NotFoundError, StorageError, TransferError, redact

_T = TypeVar("_T")

ReadBuffer = memoryview
"""The result of a read: contiguous, one-dimensional, unsigned bytes; owned by whoever holds it."""

Observer = Callable[[str, int], None]
"""Called as ``observer(name, amount)``, from any thread, so it must be quick. The names: "requests", "bytes",
"retries", "throttled" (answers that said "too busy"), "hedges", "hedges_won", "mirror_reads"."""

DEFAULT_PART_BYTES = 16 << 20
"""Part size of multipart uploads: 10,000 parts (the S3 limit) make 160 GB, and four in flight stay at 64 MiB."""


class TransientError(TransferError):
    """A transient fault: throttling, 5xx, a reset, a short or stalled transfer. The retry loop tries again."""


class ThrottledError(TransientError):
    """The store reports too many requests. Fewer are sent at once, and the retry loop tries again."""


class ChangedError(TransferError):
    """The object was replaced, or is shorter than expected. Final: more attempts would not help, or mix versions."""


class RangeIgnoredError(TransferError):
    """The answer is not the requested range. Final if ranges never worked at this store; otherwise transient."""


class FinalError(StorageError):
    """The store's answers are unreadable and will remain so: asking in another way does not help."""


class UnreachableError(TransientError):
    """No connection at all (unknown host, connection refused). Retried for a few seconds only."""


RESUMED = "a job that resumes from its last state_dict loses no sample, and a command goes on where it stopped"
"""Words for the cost of a restart, for messages."""


class KeyRefusedError(AccessDeniedError):
    """The store refuses the key itself: it has expired, or is unknown. There may be a new one by now.

    Attributes:
        forget: Makes the next attempt look the keys up again; None: there is nowhere to look.
    """

    def __init__(self, message: str, forget: Callable[[], None] | None = None) -> None:
        super().__init__(message)
        self.forget = forget

    def __reduce__(self) -> tuple[type[KeyRefusedError], tuple[str]]:
        return KeyRefusedError, (str(self),)


def with_keys_of_now(attempt: Callable[[], _T]) -> _T:
    """Return the result of ``attempt``; if its key is refused, look up the keys and try once more.

    Raises:
        AccessDeniedError: The new key is refused, too, or there is nowhere to look.
    """
    try:
        try:
            return attempt()
        except KeyRefusedError as error:
            if error.forget is None:
                raise
            error.forget()
        return attempt()
    except KeyRefusedError as error:
        raise AccessDeniedError(*error.args) from error.__cause__


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object or file.

    ``version`` changes whenever the content may have changed (ETag, generation; ``mtime_ns-inode-size`` for files);
    None if the store has nothing of the kind.
    """

    url: str
    size_bytes: int
    version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How a store is reached, in words without secrets.

    Attributes:
        client: What talks to it.
        endpoint: Its host, or the URL of its server; "": none that is known.
        credentials: Where they come from.
        region: Its region, and where that comes from; None: it has none.
    """

    client: str
    endpoint: str = ""
    credentials: str = "none"
    region: str | None = None


class Sink(Protocol):
    """Receives the bytes of an answer, in order."""

    def take(self, put: Callable[[memoryview], int]) -> None:
        """Let ``put`` write bytes to the beginning of the room that is left, and return how many it wrote.

        ``put`` may use the room only during the call: the memory is the caller's, who may be gone a moment later.
        """


class RangeBody(Protocol):
    """An answer whose bytes are still arriving. Used by one thread; ``fill`` is called at most once."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes in this answer, as announced by the store."""

    @property
    def version(self) -> str | None:
        """The ``version`` to pass to continue with the same object; None if the store cannot guarantee that."""

    def fill(self, sink: Sink) -> None:
        """Give the bytes to ``sink``, each piece as soon as it arrives.

        There are fewer than ``num_bytes`` if the answer ends early. Raises if the connection breaks; what the sink took
        before stays valid. Exceptions of the sink pass through.
        """

    def close(self) -> None:
        """Release the connection or descriptor; always called, once."""


class StoreWriter(Protocol):
    """Write one object. Nothing is visible before ``close``; leaving the context by an exception aborts.

    It cannot be used in a forked child: ``write`` and ``close`` raise ForkedError there, ``abort`` does nothing.

    Attributes:
        num_bytes: Bytes written so far.
    """

    num_bytes: int

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``, which is copied before this returns; return its number of bytes."""

    def close(self) -> None:
        """Publish everything written, atomically. Calling it again does nothing."""

    def abort(self) -> None:
        """Discard everything written; the store is unchanged. Does nothing after ``abort`` or ``close``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def changed_before(url: str) -> ChangedError:
    """Return the error for an object that has another version than the one that was to be replaced."""
    return ChangedError(f"writing {redact(url)}: somebody else has written it meanwhile; nothing was replaced")


def check_version(version: str | None, info: Callable[[], ObjectInfo], url: str) -> None:
    """Compare what ``info`` says now with the version that is to be replaced; None: there is to be none.

    Raises:
        ChangedError: It differs.
    """
    try:
        found = info().version
    except NotFoundError:
        if version is None:
            return
        raise changed_before(url) from None
    if version is None or found != version:
        raise changed_before(url)


def maker_of_writer(url: str) -> Maker:
    """Return this process, as the maker of a writer of ``url``."""
    return Maker(f"the open writer of {redact(url)}", "Close it before the fork, or open another one in this process")


class Adapter(Protocol):
    """One kind of store. Thread-safe. Raises types of ``streaming.errors`` only.

    Attributes:
        in_pieces: :meth:`open_range` returns when the answer begins; else when all of it has arrived.
        keeps_versions: :meth:`open_range` reports versions and can be restricted to one; else only :meth:`info` reports
            them, and :meth:`open_range` is given none.
    """

    in_pieces: bool
    keeps_versions: bool

    def way(self, url: str) -> Target:
        """Return how ``url`` is reached; sends nothing."""

    def info(self, url: str) -> ObjectInfo:
        """Return size and version of one object."""

    def open_range(self, url: str, start: int, stop: int | None, version: str | None) -> RangeBody:
        """Request bytes [start, stop), or from ``start`` to the end; only of this ``version``, if one is given."""

    def list(self, url: str) -> list[ObjectInfo]:
        """Return all objects below ``url`` taken as a directory, in any order; empty if there are none."""

    def put(self, url: str, data: memoryview) -> None:
        """Create or replace one object, atomically."""

    def put_if(self, url: str, data: memoryview, version: str | None) -> None:
        """Replace one object if it has the ``version`` that :meth:`info` reported; None: create it if there is none.

        Raises:
            ChangedError: It has another version, is gone, or is there already; nothing was written.
        """

    def open_write(self, url: str, part_bytes: int) -> StoreWriter:
        """Return a writer that creates or replaces one object."""

    def delete(self, url: str) -> None:
        """Remove one object; does nothing if there is none."""


def copy_piece(piece: Any, room: memoryview) -> int:
    """Copy as much of ``piece`` (a buffer) as fits to the beginning of ``room``; return its number of bytes.

    Other threads run meanwhile: if the room was never touched, the system clears it first, which takes longer than the
    copy.
    """
    count = min(len(piece), len(room))
    if count:
        np.copyto(np.frombuffer(room, np.uint8, count), np.frombuffer(piece, np.uint8, count))
    return count
