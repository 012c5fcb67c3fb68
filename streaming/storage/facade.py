"""The ``Storage`` that everything else talks to: picks the adapter, retries, checks lengths, counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import TypeVar

import numpy as np

from streaming.errors import ConfigError, NotFoundError, TransferError
from streaming.storage.active import ActiveCalls, ActiveRequest, Call
from streaming.storage.base import (
    DEFAULT_PART_BYTES,
    Adapter,
    ObjectInfo,
    Observer,
    PassingError,
    ReadBuffer,
    StoreWriter,
)
from streaming.storage.fs import FsspecAdapter
from streaming.storage.local import LocalAdapter
from streaming.storage.object import OBJECT_SCHEMES, ObjectAdapter
from streaming.storage.options import parse_options
from streaming.storage.retry import retrying
from streaming.storage.urls import as_url, redact, scheme_of

_T = TypeVar("_T")


class Storage:
    """Reads and writes objects and files by URL.

    Plain paths and ``file:``; ``s3:``, ``gs:``, ``az:`` (``abfs:``) and ``http(s):`` through obstore; every other
    scheme, and on request (``client="fsspec"``) these too, through fsspec. Thread-safe, picklable (without the
    observer) and cheap to make: connections are made at first use, once per bucket, and credentials are looked up then.

    Every call retries passing faults with growing, jittered delays; time-outs and limits are options (see
    :class:`~streaming.storage.retry.RetryPolicy`). Every method raises types of ``streaming.errors`` only:
    ``NotFoundError``, ``AccessDeniedError``, ``TransferError``, ``StorageError``, and ``ConfigError`` for what cannot
    work.

    Args:
        options: See :class:`~streaming.storage.options.StorageOptions`; unknown names are a ``ConfigError``.
        observer: Called with ("requests" | "bytes" | "retries", amount) from the calling threads.
    """

    def __init__(self, options: Mapping[str, object] | None = None, *, observer: Observer | None = None) -> None:
        self._given = dict(options or {})
        self._options = parse_options(self._given)
        self._observer = observer
        self._lock = threading.Lock()
        self._adapters: dict[type, Adapter] = {}
        self._active = ActiveCalls()

    def __reduce__(self) -> tuple[type[Storage], tuple[dict[str, object]]]:
        return Storage, (self._given,)

    def __repr__(self) -> str:
        return f"Storage(options=<{', '.join(sorted(self._given)) or 'none'}>)"  # names only: values may be secret

    def in_flight(self) -> list[ActiveRequest]:
        """The calls under way in all threads, oldest first: for reports on what is being waited for."""
        return self._active.snapshot()

    def info(self, url: str) -> ObjectInfo:
        """Size and version of the object or file at ``url``."""
        return self._call(url, lambda: self._adapter(url).info(url))

    def exists(self, url: str) -> bool:
        """Whether there is an object or file at ``url``; a missing bucket is False too."""
        try:
            self.info(url)
        except NotFoundError:
            return False
        return True

    def read(self, url: str, start: int = 0, stop: int | None = None) -> ReadBuffer:
        """Bytes [start, stop) of ``url``; to its end without ``stop``. One request where nothing fails.

        Returns:
            Memory of exactly that many bytes, owned by the caller.

        Raises:
            TransferError: If the object is shorter, or its bytes did not come within the limits.
        """
        return self._transfer(_Transfer(self._adapter(url), url, start, stop, self._count))

    def read_into(self, url: str, start: int, out: memoryview) -> None:
        """Fill all of ``out`` with the bytes of ``url`` from ``start`` on.

        ``out`` is writable, contiguous, any item type. Files are read straight into it; object stores cost one copy.
        What ``out`` holds after an error is undefined.

        Raises:
            TransferError: As :meth:`read`.
        """
        view = out.cast("B") if out.format != "B" or out.ndim != 1 else out
        if view.readonly:
            raise ConfigError("read_into: out is read-only; give writable memory")
        self._transfer(_Transfer(self._adapter(url), url, start, start + len(view), self._count, view))

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """All objects below ``url`` taken as a directory, at any depth, sorted by URL; nothing if there are none.

        Raises:
            NotFoundError: If the bucket does not exist.
        """
        found = self._call(url, lambda: self._adapter(url).list(url))
        return iter(sorted(found, key=lambda info: info.url))

    def put(self, url: str, data: bytes | bytearray | memoryview) -> None:
        """Create or replace ``url`` with ``data``, atomically: readers see the old or the new, whole."""
        view = memoryview(data).cast("B")
        if scheme_of(url) in OBJECT_SCHEMES and len(view) > DEFAULT_PART_BYTES:
            with self.open_write(url) as writer:
                writer.write(view)
            return
        self._call(url, lambda: self._adapter(url).put(url, view))

    def open_write(self, url: str, part_bytes: int = DEFAULT_PART_BYTES) -> StoreWriter:
        """A writer that creates or replaces ``url`` when it is closed; see :class:`StoreWriter`.

        Object stores get one put up to ``part_bytes``, beyond it an upload in parts of that size while the caller
        writes.
        """
        return self._adapter(url).open_write(url, part_bytes)

    def delete(self, url: str) -> None:
        """Remove ``url``; nothing happens when there is no such object."""
        self._call(url, lambda: self._adapter(url).delete(url))

    def _adapter(self, url: str | os.PathLike[str]) -> Adapter:
        scheme = scheme_of(as_url(url))
        if scheme == "file":
            kind: type = LocalAdapter
        elif scheme in OBJECT_SCHEMES and self._options.client != "fsspec":
            kind = ObjectAdapter
        else:
            kind = FsspecAdapter
        with self._lock:
            if kind not in self._adapters:
                self._adapters[kind] = kind() if kind is LocalAdapter else kind(self._options)
            return self._adapters[kind]

    def _transfer(self, transfer: _Transfer) -> memoryview:
        if transfer.out is None or len(transfer.out):
            with self._active.under_way(transfer.url, transfer.start, transfer.stop) as call:
                self._retrying(call, lambda: transfer.attempt(call))
        return memoryview(b"") if transfer.out is None else transfer.out

    def _call(self, url: str, attempt: Callable[[], _T]) -> _T:
        with self._active.under_way(url) as call:
            return self._retrying(call, attempt)

    def _retrying(self, call: Call, attempt: Callable[[], _T]) -> _T:
        def counted() -> _T:
            call.attempt += 1
            self._count("requests", 1)
            return attempt()

        return retrying(
            self._options.retry,
            counted,
            progress=lambda: call.received,
            on_retry=lambda: self._count("retries", 1),
        )

    def _count(self, name: str, amount: int) -> None:
        if self._observer is not None:
            self._observer(name, amount)


class _Transfer:
    """One range on its way into memory. What came stays; an attempt asks for the rest, of the same version."""

    def __init__(
        self,
        adapter: Adapter,
        url: str,
        start: int,
        stop: int | None,
        count: Callable[[str, int], None],
        out: memoryview | None = None,
    ) -> None:
        if start < 0 or (stop is not None and stop < start):
            raise ConfigError(f"reading {redact(url)}: [{start}, {stop}) is not a range; 0 <= start <= stop is needed")
        self.url = url
        self.start = start
        self.stop = stop
        self.out = _memory(stop - start) if out is None and stop is not None else out
        self._adapter = adapter
        self._count = count
        self._version: str | None = None

    def attempt(self, call: Call) -> None:
        """Ask for what is missing and take what comes; ``call.received`` says how far it is."""
        first = self.start + call.received
        with closing(self._adapter.open_range(self.url, first, self.stop, self._version)) as body:
            self._version = self._version or body.version
            if self.out is None:  # the end is known only now
                self.stop = call.stop = self.start + body.num_bytes
                self.out = _memory(body.num_bytes)
            rest = self.out[call.received :]
            if body.num_bytes < len(rest):  # the store's own word: asking again would not help
                raise TransferError(self._short(first, body.num_bytes, "was the object truncated or replaced?"))
            for count in body.fill(rest):
                call.received += count
                self._count("bytes", count)
        if call.received != len(self.out):
            raise PassingError(self._short(first, self.start + call.received - first, "the answer ended early"))

    def _short(self, first: int, got: int, why: str) -> str:
        where = f"reading {redact(self.url)} bytes [{first}, {self.stop})"
        return f"{where}: got {got} bytes, expected {(self.stop or first) - first}; {why}"


def _memory(num_bytes: int) -> memoryview:
    """Writable bytes that nobody has zeroed: they are about to be overwritten."""
    return np.empty(num_bytes, np.uint8).data
