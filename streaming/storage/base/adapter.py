"""Define the interface of an adapter for one kind of store; the facade adds retries, exact lengths and counters.

An adapter makes ONE attempt per call and translates every foreign error into a type of ``streaming.errors``. By the
types defined here, the retry loop recognizes the errors that another attempt may cure; all others are final.
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
"""The result of a read: contiguous, one-dimensional, unsigned bytes; owned by the holder."""

Observer = Callable[[str, int], None]
"""Called as ``observer(name, amount)``, from any thread, so it must be fast. The names: "requests", "bytes", "retries",
"throttled" (answers that report a busy store), "hedges", "hedges_won", "mirror_reads"."""

DEFAULT_PART_BYTES = 16 << 20
"""Part size of multipart uploads: 10,000 parts (the S3 limit) make 160 GB, and four in flight stay at 64 MiB."""


class TransientError(TransferError):
    """A transient fault: throttling, 5xx, a reset, a short or stalled transfer. The retry loop retries it."""


class ThrottledError(TransientError):
    """The store reports too many requests. Fewer are sent at once, and the retry loop retries this one."""


class ChangedError(TransferError):
    """The object was replaced, or is shorter than expected. Final: another attempt would fail, or mix versions."""


class RangeIgnoredError(TransferError):
    """The answer is not the requested range. Final if ranges never worked at this store; otherwise transient."""


class FinalError(StorageError):
    """The store's answers are unreadable and will remain so: another attempt would not help."""


class UnreachableError(TransientError):
    """No connection at all (unknown host, connection refused). Retried only for a few seconds."""


RESUMED = "a job that resumes from its last state_dict loses no sample, and a command continues where it stopped"
"""The cost of a restart, for messages."""


class KeyRefusedError(AccessDeniedError):
    """The store refuses the key itself: it has expired, or is unknown. There may be a new key by now.

    Attributes:
        forget: Makes the next attempt look up the keys again; None: the keys cannot be looked up.
    """

    def __init__(self, message: str, forget: Callable[[], None] | None = None) -> None:
        super().__init__(message)
        self.forget = forget

    def __reduce__(self) -> tuple[type[KeyRefusedError], tuple[str]]:
        return KeyRefusedError, (str(self),)


def with_keys_of_now(attempt: Callable[[], _T]) -> _T:
    """Return the result of ``attempt``; if its key is refused, look up the keys and try once more.

    Raises:
        AccessDeniedError: The new key is refused, too, or the keys cannot be looked up.
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
    None if the store has no versions.
    """

    url: str
    size_bytes: int
    version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A description of how a store is reached, without secrets.

    Attributes:
        client: The client library.
        endpoint: Its host, or the URL of its server; "": unknown.
        credentials: Source of the credentials.
        region: Its region, and the source of that; None: it has no region.
    """

    client: str
    endpoint: str = ""
    credentials: str = "none"
    region: str | None = None


class Sink(Protocol):
    """Receives the bytes of an answer, in order."""

    def take(self, put: Callable[[memoryview], int]) -> None:
        """Let ``put`` write bytes to the beginning of the remaining memory, and return their number.

        ``put`` may use the memory only during the call: it belongs to the caller, who may be gone a moment later.
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
        """Pass the bytes to ``sink``, each piece as soon as it arrives.

        If the answer ends early, there are fewer than ``num_bytes``. If the connection breaks, this raises an error;
        bytes taken before stay valid. Exceptions of the sink pass through.
        """

    def close(self) -> None:
        """Release the connection or descriptor; always called exactly once."""


class StoreWriter(Protocol):
    """Write one object. Nothing is visible before ``close``; leaving the context by an exception aborts.

    A writer cannot be used in a forked child: ``write`` and ``close`` raise ForkedError there, ``abort`` does nothing.

    Attributes:
        num_bytes: Bytes written so far.
    """

    num_bytes: int

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``, which is copied before this returns; return its number of bytes."""

    def close(self) -> None:
        """Publish everything written, atomically. A repeated call does nothing."""

    def abort(self) -> None:
        """Discard everything written; the store is unchanged. After ``abort`` or ``close``, this does nothing."""

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
        in_pieces: Whether :meth:`open_range` returns when the answer begins; otherwise, it returns when the whole
            answer has arrived.
        keeps_versions: Whether :meth:`open_range` reports versions and can be restricted to one; otherwise, only
            :meth:`info` reports them, and :meth:`open_range` gets none.
    """

    in_pieces: bool
    keeps_versions: bool

    def way(self, url: str) -> Target:
        """Return how ``url`` is reached, without sending anything."""

    def info(self, url: str) -> ObjectInfo:
        """Return size and version of one object."""

    def open_range(self, url: str, start: int, stop: int | None, version: str | None) -> RangeBody:
        """Request bytes [start, stop), or from ``start`` to the end; only of ``version``, if given."""

    def list(self, url: str) -> list[ObjectInfo]:
        """Return all objects below the directory ``url``, in any order; [] if there are none."""

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
        """Remove one object; do nothing if there is none."""


def copy_piece(piece: Any, room: memoryview) -> int:
    """Copy as much of ``piece`` (a buffer) as fits to the beginning of ``room``; return the number of bytes.

    Other threads run meanwhile: if the memory was never touched, the system clears it first, which takes longer than
    the copy.
    """
    count = min(len(piece), len(room))
    if count:
        np.copyto(np.frombuffer(room, np.uint8, count), np.frombuffer(piece, np.uint8, count))
    return count
