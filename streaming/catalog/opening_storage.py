"""Opening a data set in few round trips: what is asked for again is known, what will be asked for is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from streaming.storage import ObjectInfo, ReadBuffer, Storage

_THREADS = 32
_T = TypeVar("_T")


class StorageAhead(Storage):
    """A storage as it is while a data set is being opened: every object is taken not to change in that time.

    Remembers what it read whole and what it was told about objects, by listings too. For one thread; close it.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._threads = ThreadPoolExecutor(_THREADS, "shardstream-open")
        self._infos: dict[str, Future[ObjectInfo]] = {}
        self._wholes: dict[str, Future[ReadBuffer]] = {}

    def close(self) -> None:
        """Forget everything; what is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def will_ask(self, url: str) -> None:
        """Ask for size and version of ``url`` in the background."""
        self._start(self._infos, url, self._storage.info)

    def will_read(self, url: str) -> None:
        """Read all of ``url`` in the background."""
        self._start(self._wholes, url, self._storage.read)

    def info(self, url: str) -> ObjectInfo:
        """See ``Storage``."""
        return self._start(self._infos, url, self._storage.info).result()

    def read(self, url: str, start: int = 0, stop: int | None = None) -> ReadBuffer:
        """See ``Storage``."""
        if start or stop is not None:
            whole = self._wholes.get(url)
            return self._storage.read(url, start, stop) if whole is None else whole.result()[start:stop]
        return self._start(self._wholes, url, self._storage.read).result()

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """See ``Storage``."""
        for info in self._storage.list(url):
            if info.size_bytes:  # an empty one may be the mark of a folder: only asking tells
                known: Future[ObjectInfo] = Future()
                known.set_result(info)
                self._infos[info.url] = known
            yield info

    def _start(self, asked: dict[str, Future[_T]], url: str, ask: Callable[[str], _T]) -> Future[_T]:
        if url not in asked:
            asked[url] = self._threads.submit(ask, url)
        return asked[url]
