"""The ``Storage`` that everything else talks to: picks the adapter, retries, checks lengths, counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TypeVar

from streaming.errors import ConfigError, NotFoundError
from streaming.metrics import Metrics
from streaming.storage.active import ActiveCalls, ActiveRequest, Call
from streaming.storage.base import DEFAULT_PART_BYTES, Adapter, ObjectInfo, Observer, ReadBuffer, StoreWriter
from streaming.storage.crew import Crew
from streaming.storage.fs import FsspecAdapter
from streaming.storage.local import LocalAdapter
from streaming.storage.object import OBJECT_SCHEMES, ObjectAdapter
from streaming.storage.options import parse_options
from streaming.storage.retry import retrying
from streaming.storage.traffic import Traffic
from streaming.storage.transfer import Transfer
from streaming.storage.urls import as_url, scheme_of, split_query

_T = TypeVar("_T")

COUNTED = ("requests", "bytes", "retries", "throttled", "hedges", "hedges_won", "mirror_reads")
_METRICS = {"bytes": "storage_bytes"}


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
        observer: Called with a name and an amount, as :data:`~streaming.storage.base.Observer` says.

    Attributes:
        metrics: The same counts, under the same names but for ``storage_bytes``.
    """

    def __init__(self, options: Mapping[str, object] | None = None, *, observer: Observer | None = None) -> None:
        self._given = dict(options or {})
        self._options = parse_options(self._given)
        self._observer = observer
        self._lock = threading.Lock()
        self._adapters: dict[type, Adapter] = {}
        self._active = ActiveCalls()
        self._crew = Crew()
        self._traffic: dict[str, Traffic] = {}
        self.metrics = Metrics()
        for name in COUNTED:
            self.metrics.add(_METRICS.get(name, name), 0)

    def __reduce__(self) -> tuple[type[Storage], tuple[dict[str, object]]]:
        return Storage, (self._given,)

    def __repr__(self) -> str:
        return f"Storage(options=<{', '.join(sorted(self._given)) or 'none'}>)"  # names only: values may be secret

    def in_flight(self) -> list[ActiveRequest]:
        """The calls under way in all threads, oldest first: for reports on what is being waited for."""
        return self._active.snapshot()

    def info(self, url: str) -> ObjectInfo:
        """Size and version of the object or file at ``url``."""
        return self._call(url, lambda adapter: adapter.info(url))

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
        return self._transfer(url, start, stop)

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
        self._transfer(url, start, start + len(view), view)

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """All objects below ``url`` taken as a directory, at any depth, sorted by URL; nothing if there are none.

        Raises:
            NotFoundError: If the bucket does not exist.
        """
        found = self._call(url, lambda adapter: adapter.list(url))
        return iter(sorted(found, key=lambda info: info.url))

    def put(self, url: str, data: bytes | bytearray | memoryview) -> None:
        """Create or replace ``url`` with ``data``, atomically: readers see the old or the new, whole."""
        view = memoryview(data).cast("B")
        if scheme_of(url) in OBJECT_SCHEMES and len(view) > DEFAULT_PART_BYTES:
            with self.open_write(url) as writer:
                writer.write(view)
            return
        self._call(url, lambda adapter: adapter.put(url, view))

    def open_write(self, url: str, part_bytes: int = DEFAULT_PART_BYTES) -> StoreWriter:
        """A writer that creates or replaces ``url`` when it is closed; see :class:`StoreWriter`.

        Object stores get one put up to ``part_bytes``, beyond it an upload in parts of that size while the caller
        writes.
        """
        return self._adapter(url).open_write(url, part_bytes)

    def delete(self, url: str) -> None:
        """Remove ``url``; nothing happens when there is no such object."""
        self._call(url, lambda adapter: adapter.delete(url))

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

    def _transfer(self, url: str, start: int, stop: int | None, out: memoryview | None = None) -> memoryview:
        adapter, traffic = self._adapter(url), self._traffic_of(url)
        transfer = Transfer(adapter, url, start, stop, count=self._count, out=out)
        hedging = traffic if isinstance(adapter, ObjectAdapter) and self._options.hedging.hedge else None
        with self._active.under_way(url, start, stop) as call, self._crew if hedging else nullcontext():
            try:
                if not transfer.is_done:
                    self._retrying(call, lambda until_s: transfer.attempt(call, hedging, until_s), traffic)
                return transfer.result()
            finally:
                transfer.forget()

    def _call(self, url: str, attempt: Callable[[Adapter], _T]) -> _T:
        adapter = self._adapter(url)
        with self._active.under_way(url) as call:
            return self._retrying(call, lambda _: attempt(adapter), self._traffic_of(url))

    def _retrying(self, call: Call, attempt: Callable[[float], _T], traffic: Traffic | None) -> _T:
        policy = self._options.retry
        until_s = call.began_s + policy.deadline_s

        def counted() -> _T:
            call.attempt += 1
            self._count("requests", 1)
            with nullcontext() if traffic is None else traffic.request(until_s):
                return attempt(until_s)

        if traffic is not None:
            traffic.retries.earn()
        return retrying(
            policy,
            counted,
            progress=lambda: call.received,
            on_retry=lambda: self._count("retries", 1),
            allowance=None if traffic is None else traffic.retries,
        )

    def _traffic_of(self, url: str) -> Traffic | None:
        """What is known of the bucket or host of ``url``; None for files."""
        scheme = scheme_of(url)
        if scheme == "file":
            return None
        name = f"{scheme}://{split_query(url)[0].partition('://')[2].partition('/')[0]}"
        with self._lock:
            if name not in self._traffic:
                self._traffic[name] = Traffic(name, self._options, self._crew, self._count)
            return self._traffic[name]

    def _count(self, name: str, amount: int) -> None:
        self.metrics.add(_METRICS.get(name, name), amount)
        if self._observer is not None:
            self._observer(name, amount)
