"""Find shards in few round trips, and serialize the result for ranks that did not search themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from streaming.common.job.shared_results import framed, unframed
from streaming.shards.index.chunk_table import ChunkTable, shard_rows, shards_of_rows
from streaming.shards.schema.value import Schema
from streaming.storage import ObjectInfo, ReadBuffer, Reader, Storage, WrongBytesError
from streaming.types import override

_COLUMNS = ("shard", "first_sample", "num_samples", "byte_start", "byte_end", "crc32c")
_THREADS = 32
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundShards:
    """The result of finding shards.

    Attributes:
        urls: The shards.
        table: The chunk table over them; None if there is no index (for a large set, permanently).
        sizes: Size of each shard, if there is no index.
        missing_index: Why there is no index, and what to do; "" if there is one.
        schemas: What the sets say that they mean, by directory of the index; those that say nothing are empty.
        versions: Of sets that live, the number of the version that is read, by directory.
    """

    urls: tuple[str, ...]
    table: ChunkTable | None
    sizes: tuple[int, ...] = ()
    missing_index: str = ""
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the value as bytes; columns as they lie in memory, little-endian."""
        head: dict[str, Any] = {"urls": self.urls, "sizes": self.sizes, "missing_index": self.missing_index,
                                "schemas": {home: one.as_dict() for home, one in self.schemas.items()},
                                "versions": {**self.versions}}  # fmt: skip
        columns = []
        if self.table is not None:
            head["shards"] = shard_rows(self.table.shards)
            head["chunks"] = self.table.num_chunks
            columns = [np.ascontiguousarray(getattr(self.table, name)) for name in _COLUMNS]
            head["dtypes"] = [column.dtype.str for column in columns]
        return framed(head, *(column.tobytes() for column in columns))

    @classmethod
    def from_bytes(cls, data: bytes) -> FoundShards:
        """Return the inverse."""
        head, start = unframed(data)
        table = None
        if "shards" in head:
            columns: dict[str, Any] = {}
            for name, dtype in zip(_COLUMNS, head["dtypes"], strict=True):
                columns[name] = np.frombuffer(data, dtype, head["chunks"], start)
                start += columns[name].nbytes
            table = ChunkTable(shards=shards_of_rows(head["shards"]), **columns)
        return cls(
            urls=tuple(head["urls"]), table=table, sizes=tuple(head["sizes"]), missing_index=head["missing_index"],
            schemas={home: Schema.from_dict(one) for home, one in head["schemas"].items()}, versions=head["versions"],
        )  # fmt: skip


class StorageAhead(Storage):
    """Read from a store while a dataset is being opened, assuming that no object changes meanwhile.

    Caches objects that it has read completely, and facts about objects, also from listings. For one thread; close it.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._threads = ThreadPoolExecutor(_THREADS, "shardstream-open")
        self._listed: dict[str, ObjectInfo] = {}
        self._infos: dict[str, Future[ObjectInfo]] = {}
        self._wholes: dict[str, Future[ReadBuffer]] = {}
        self._asked: list[Future[Any]] = []

    def __repr__(self) -> str:
        return f"StorageAhead({self._storage!r})"

    def close(self) -> None:
        """Drop the cache. Requests in progress end on their own. If there are none, no thread is left."""
        self._threads.shutdown(wait=all(asked.done() for asked in self._asked), cancel_futures=True)

    def was_listed(self, url: str) -> bool:
        """Return whether ``url`` was in a listing or has been requested."""
        return url in self._listed or url in self._infos

    def listed(self, end: str) -> list[str]:
        """Return the objects of all listings whose URL ends with ``end``."""
        return [url for url in {**self._listed, **self._infos} if url.endswith(end)]

    def listed_below(self, part: str) -> list[str]:
        """Return what is before ``part`` in the URLs of listings that hold it, each once."""
        return [*dict.fromkeys(url.partition(part)[0] for url in self._listed if part in url)]

    def will_ask(self, url: str) -> None:
        """Request size and version of ``url`` in the background."""
        if url not in self._listed:
            self._start(self._infos, url, self._storage.info)

    def will_read(self, url: str) -> None:
        """Read all of ``url`` in the background."""
        self._start(self._wholes, url, self._storage.read)

    @override
    def info(self, url: str) -> ObjectInfo:
        known = self._listed.get(url)
        return self._told(self._infos, url, self._storage.info) if known is None else known

    def read(self, url: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> ReadBuffer:  # noqa: ARG002
        """See ``Storage``; no version is compared."""
        if start or stop is not None:
            whole = self._wholes.get(url)
            return self._storage.read(url, start, stop) if whole is None else whole.result()[start:stop]
        return self._told(self._wholes, url, self._storage.read)

    def until_right(self, url: str, attempt: Callable[[Reader], _T]) -> _T:
        """See ``Storage``; what was read ahead is the first answer."""
        try:
            return attempt(self)
        except WrongBytesError:
            self._wholes.pop(url, None)
            return self._storage.until_right(url, attempt)

    @override
    def list(self, url: str) -> Iterator[ObjectInfo]:
        for info in self._storage.list(url):
            if info.size_bytes:  # an empty one may be a folder marker: only a request shows which
                self._listed[info.url] = info
            yield info

    def _start(self, asked: dict[str, Future[_T]], url: str, ask: Callable[[str], _T]) -> Future[_T]:
        if url not in asked:
            asked[url] = self._threads.submit(ask, url)
            self._asked.append(asked[url])
        return asked[url]

    def _told(self, asked: dict[str, Future[_T]], url: str, ask: Callable[[str], _T]) -> _T:
        """Return the answer, from the background request if there is one, otherwise from a new one."""
        if url not in asked:
            answer: Future[_T] = Future()
            try:
                answer.set_result(ask(url))
            except Exception as error:  # noqa: BLE001  raised below, and again at each later request
                answer.set_exception(error)
            asked[url] = answer
        return asked[url].result()
