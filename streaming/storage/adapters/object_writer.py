"""Write one object to an object store: a single put while it is small, a multipart upload once it grows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from streaming.errors import StorageError
from streaming.storage.adapters.object_errors import RequestPlace, object_errors
from streaming.storage.adapters.obstore_client import client
from streaming.storage.base.adapter import StoreWriter, maker_of_writer, with_keys_of_now
from streaming.types import override

_PARTS_IN_FLIGHT = 4


class _AbortedError(Exception):
    """Makes obstore abandon the upload and remove the parts."""


class ObjectWriter(StoreWriter):
    """Write one object of a store. For one thread; from the first full part on, a separate thread sends parts.

    The life of a write:

    1. ``write`` collects one part. If ``close`` comes before the part is full, a single put writes the object.
    2. The first full part starts the uploading thread, which takes parts from a queue of one part; ``write`` waits
       while the queue is full.
    3. ``close`` queues the last part and the end, ``abort`` an error that makes obstore remove the parts.
    4. If the upload fails, the thread keeps emptying the queue up to the end, so that the caller never waits in vain.
       The next ``write`` of a full part, or ``close``, raises the error.

    Args:
        reach: Returns the store, with its current keys, the object's key in it, and the place for messages.
        part_bytes: Size of the parts.
    """

    def __init__(self, reach: Callable[[], tuple[Any, str, RequestPlace]], part_bytes: int) -> None:
        self._reach = reach
        self._store, self._key, self._place = reach()
        self._maker = maker_of_writer(self._place.url)
        self._part_bytes = max(part_bytes, 5 << 20)  # the smallest part that S3 accepts
        self._part = bytearray()
        self._parts: queue.Queue[bytes | _AbortedError | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._ended = False  # the uploading thread has seen the last item; only that thread sets it
        self._closed = False
        self.num_bytes = 0

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._closed:
            raise StorageError(f"writing {self._place}: this writer is closed")
        self._maker.check()
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            piece = view[done : done + self._part_bytes - len(self._part)]
            self._part += piece
            done += len(piece)
            if len(self._part) == self._part_bytes:
                self._send()
        self.num_bytes += done
        return done

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._maker.check()
        self._closed = True
        if self._thread is None:
            with_keys_of_now(self._put)
            self._part = bytearray()
            return
        if self._part:
            self._parts.put(bytes(self._part))
            self._part = bytearray()
        self._finish(None)

    @override
    def abort(self) -> None:
        if not self._closed and self._maker.is_here:
            self._closed = True
            self._part = bytearray()
            if self._thread is not None:
                self._finish(_AbortedError())

    def _put(self) -> None:
        store, key, place = self._reach()
        with object_errors(place, "writing"):
            client().api.put(store, key, bytes(self._part), use_multipart=False)

    def _send(self) -> None:
        """Pass the full part to the uploading thread; wait while its queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload, name="shardstream-upload", daemon=True)
            self._thread.start()
        part, self._part = bytes(self._part), bytearray()
        self._parts.put(part)
        if self._error is not None:
            self._closed = True
            self._finish(None)

    def _finish(self, last: _AbortedError | None) -> None:
        """End the uploading thread, and raise its error, if any."""
        self._parts.put(last)
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and last is None:
            error, self._error = self._error, None
            with object_errors(self._place, "writing"):
                raise error

    def _pieces(self) -> Iterator[bytes]:
        while (item := self._parts.get()) is not None:
            if isinstance(item, _AbortedError):
                self._ended = True
                raise item
            yield item
        self._ended = True

    def _upload(self) -> None:
        """Upload, on a thread: obstore pulls the parts and sends several at once."""
        try:
            client().api.put(
                self._store,
                self._key,
                self._pieces(),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=_PARTS_IN_FLIGHT,
            )
        except _AbortedError:
            return
        except Exception as error:  # noqa: BLE001 (thread boundary: _finish raises it in the caller's)
            self._error = error
            while not self._ended:  # never let the caller wait for room in the queue
                self._ended = not isinstance(self._parts.get(), bytes)
