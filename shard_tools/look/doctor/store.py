"""Look at a store and a set in it: how it is reached, how fast it answers, whether the set has an index."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import numpy as np

from shard_tools.change.sets.open_set import shards_beside, sizes_of
from shard_tools.look.bench.requests import MOST_AT_ONCE, SMALL_BYTES, UnreadRanges, probe
from shard_tools.look.doctor.machine import without_home
from shard_tools.running.report import Report
from streaming.errors import DataError, IndexMissingError, ShardstreamError
from streaming.shards.catalog.build import load_index
from streaming.shards.catalog.unfinished import Mark
from streaming.shards.index.chunk_table import ChunkTable
from streaming.storage import Storage, redact

_PATIENCE = {"deadline_s": 20.0, "connect_timeout_s": 3.0, "read_timeout_s": 10.0}
"""Short timeouts, so that an unreachable store is reported soon; the user's own options override them."""
_CLOCK_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLook(Report):
    """Observations of a store and of a set in it; None: not reached.

    Attributes:
        url: URL that was examined.
        client: Client that talks to the store.
        endpoint: Its host; "": none.
        credentials: Where the credentials come from, in words.
        region: Its region, and where that comes from.
        clock_s: How far the store's clock is ahead of this machine's; None: unknown, or no clock of its own.
        num_shards: Shards found.
        list_s: Time to list them.
        read_s: Time of a small read.
        chunk_read_s: Time to read a chunk.
        chunk_bytes: Median bytes of a chunk.
        retries: Requests repeated after failures.
        num_samples: Samples, by the index.
        num_bytes: Bytes of the shards.
        trouble: The store's error; "": none.
        index_trouble: What is wrong with the index or the set; "": nothing.
    """

    url: str
    client: str = ""
    endpoint: str = ""
    credentials: str = ""
    region: str | None = None
    clock_s: float | None = None
    num_shards: int | None = None
    list_s: float | None = None
    read_s: float | None = None
    chunk_read_s: float | None = None
    chunk_bytes: int | None = None
    retries: int = 0
    num_samples: int | None = None
    num_bytes: int | None = None
    trouble: str = ""
    index_trouble: str = ""

    @property
    def most_bytes_per_s(self) -> float | None:
        """The highest read rate of a loader if each of its requests takes as long as the one measured."""
        if not self.chunk_bytes or not self.chunk_read_s:
            return None
        return MOST_AT_ONCE * self.chunk_bytes / self.chunk_read_s


def look_at_store(
    urls: Sequence[str], *, storage_options: Mapping[str, object] | None = None, index_url: str | None = None
) -> StoreLook:
    """Find the shards at ``urls``, read a few bytes of them, and open their index. Raises no error of the store.

    Args:
        urls: Shards, as for ``StreamingDataset``.
        storage_options: As for ``StreamingDataset``.
        index_url: Location of the index, if not beside the shards.

    Raises:
        ConfigError: There is no such option of the store.
    """
    storage = Storage(_PATIENCE | dict(storage_options or {}))
    seen: dict[str, object] = {"url": without_home(", ".join(map(redact, urls)))}
    try:
        way = storage.way_to(urls[0])
        seen |= {"client": way.client, "endpoint": way.endpoint, "credentials": way.credentials, "region": way.region}
        ca_file = (storage_options or {}).get("ca_file")
        seen["clock_s"] = clock_ahead_s(way.endpoint, None if ca_file is None else str(ca_file))
        began_s = time.perf_counter()
        shards, marks = shards_beside(urls, storage, None, allow_unfinished=True)
        seen |= {"list_s": time.perf_counter() - began_s, "num_shards": len(shards)}
        table, seen["index_trouble"] = _index(storage, shards, index_url, marks)
        sizes = sizes_of(storage, shards[:1])
        ranges = UnreadRanges(shards[:1], sizes)
        seen["read_s"] = probe(storage, ranges, min(SMALL_BYTES, sizes[0]), 1, 0, 0).read_s
        if table is not None and table.total_samples:
            chunk_bytes = int(np.median(table.chunk_bytes))
            seen |= {"num_samples": table.total_samples, "num_bytes": table.total_bytes, "chunk_bytes": chunk_bytes}
            seen["chunk_read_s"] = probe(storage, ranges, min(chunk_bytes, sizes[0]), 1, 0, 0).read_s
    except ShardstreamError as error:
        seen["trouble"] = without_home("; ".join([str(error), *getattr(error, "__notes__", ())]))
    return StoreLook(**seen, retries=int(storage.metrics.get("retries")))  # type: ignore[arg-type]  # as seen


def _index(
    storage: Storage, shards: Sequence[str], index_url: str | None, marks: Sequence[Mark]
) -> tuple[ChunkTable | None, str]:
    """Return the chunk table, and what is wrong with the set."""
    said = [f"{mark.directory}: {mark.state}; {mark.cure}" for mark in marks]
    try:
        return load_index(storage, shards, index_url), without_home("; ".join(said))
    except (IndexMissingError, DataError) as error:
        return None, without_home("; ".join([*said, str(error)]))


def clock_ahead_s(endpoint: str, ca_file: str | None = None) -> float | None:
    """Return how far the clock of a server is ahead of this machine's, from its responses; None: unknown.

    Any response to a request without credentials suffices. It gives whole seconds.
    """
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        if not parts.hostname or parts.scheme not in {"http", "https"}:
            return None
        if parts.scheme == "http":
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_CLOCK_TIMEOUT_S)
        else:
            context = ssl.create_default_context()
            if ca_file is not None:
                context.load_verify_locations(ca_file)
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=_CLOCK_TIMEOUT_S, context=context
            )
    except (ValueError, OSError):
        return None
    try:
        connection.request("HEAD", "/", headers={"user-agent": "shardstream"})
        local_time = datetime.now(UTC)
        server_time = parsedate_to_datetime(connection.getresponse().getheader("date") or "")
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        with suppress(OSError):
            connection.close()
    return (server_time - local_time).total_seconds() + 0.5 if server_time.tzinfo is not None else None
