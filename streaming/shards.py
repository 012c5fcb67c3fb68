"""Opening a data set: from the URLs that a user writes to shards with an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike

from streaming.errors import IndexMismatchError, IndexMissingError, NotFoundError
from streaming.index.chunks import ChunkTable
from streaming.index.layout import samples_path
from streaming.index.samples import SampleTable
from streaming.peers import Peers
from streaming.scan import check_sizes, load_index, scan_shard, shard_name
from streaming.storage import Storage, expand_urls, join_url, split_url
from streaming.units import format_bytes

SCAN_LIMIT_BYTES = 1 << 30
"""Sets up to this size are indexed at every start: a second of reading from disk, some from a bucket."""

CHECKED_AT_OPEN = 256
"""Sets of up to so many shards have every shard's size checked at start; in larger ones a shard of another size than
the index says shows at its first damaged or failing read."""

PEER_WAIT_S = 20.0
"""How long a process waits for a peer's share of indexing on the fly before it does that itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShards:
    """Shards in the order of the data set.

    Attributes:
        urls: The shards.
        table: The chunk table over them; None for a large set without an index.
        missing_index: Why there is none, and the cure; "" if there is one.
        index: Where the index lies, if not beside the shards.
        scanned: Sample tables of a set that was indexed on the fly, one per shard; else None.
    """

    urls: tuple[str, ...]
    table: ChunkTable | None
    missing_index: str
    index: str | None
    scanned: tuple[SampleTable, ...] | None


def open_shards(
    storage: Storage,
    urls: str | PathLike[str] | Sequence[str | PathLike[str]],
    index: str | None,
    peers: Peers | None = None,
) -> OpenShards:
    """The shards that ``urls`` stand for, with their index; small sets without one are indexed in memory.

    Args:
        storage: Where they are.
        urls: As users write them.
        index: Where the index lies, if not beside the shards.
        peers: Other processes that open the same set: each indexes its share of a set without an index.

    Raises:
        NotFoundError: Nothing matches, or a shard is missing.
        IndexMismatchError: The index does not cover or describe these shards.
    """
    shards = tuple(expand_urls(urls, storage))
    try:
        table = load_index(storage, shards, index)
    except IndexMissingError as missing:
        return _without_index(storage, shards, index, missing, peers)
    if len(shards) <= CHECKED_AT_OPEN:
        try:
            check_sizes(storage, shards, table)
        except NotFoundError as error:
            raise IndexMismatchError(
                f"the index lists a shard that the store does not have: {error}. Bring it back, leave it out of the "
                f"URLs, or rebuild the index: shard_tools index <urls of the shards that there are>"
            ) from error
    return OpenShards(urls=shards, table=table, missing_index="", index=index, scanned=None)


def sample_table(storage: Storage, shards: OpenShards, shard: int) -> SampleTable | None:
    """The sample table of one shard, or None if there is none."""
    if shards.scanned is not None:
        return shards.scanned[shard]
    url = shards.urls[shard]
    home = split_url(url)[0] if shards.index is None else shards.index
    path = join_url(home, samples_path(shard_name(url, shards.index)))
    try:
        return SampleTable.from_parquet(storage.read(path), path)
    except NotFoundError:
        return None


def _without_index(
    storage: Storage, urls: tuple[str, ...], index: str | None, missing: IndexMissingError, peers: Peers | None
) -> OpenShards:
    with ThreadPoolExecutor(min(16, len(urls)), "shardstream-open") as threads:
        sizes = list(threads.map(lambda url: storage.info(url).size_bytes, urls))
        compressed = [url for url in urls if url.partition("?")[0].endswith((".gz", ".tgz"))]
        total_bytes = sum(sizes)
        if total_bytes > SCAN_LIMIT_BYTES or compressed:
            why = (
                f"{compressed[0]} is compressed, and compressed shards have no index"
                if compressed
                else f"{missing}; its {format_bytes(total_bytes)} are too much to index at every start"
            )
            return OpenShards(urls=urls, table=None, missing_index=why, index=index, scanned=None)
        scanned = tuple(_scan(storage, urls, sizes, peers, threads))
    table = ChunkTable.concat([samples.chunks for samples in scanned])
    return OpenShards(urls=urls, table=table, missing_index="", index=index, scanned=scanned)


def _scan(
    storage: Storage, urls: tuple[str, ...], sizes: list[int], peers: Peers | None, threads: Executor
) -> list[SampleTable]:
    """The sample tables of all shards; with peers, every R-th is scanned here and the others are waited for."""

    def scan(place: int) -> SampleTable:
        return scan_shard(storage, urls[place], split_url(urls[place])[1])

    if peers is None:
        return list(threads.map(scan, range(len(urls))))
    digest = hashlib.sha256(json.dumps([urls, sizes]).encode()).hexdigest()
    mine = range(peers.rank, len(urls), peers.world_size)
    found = dict(zip(mine, threads.map(scan, mine), strict=True))
    for place, table in found.items():
        peers.leave(f"{digest}/{place}", table.to_parquet())
    missing: list[int] = []
    for place in range(len(urls)):
        if place not in found:
            data = None if missing else peers.find(f"{digest}/{place}", PEER_WAIT_S)
            if data is None:
                missing.append(place)
            else:
                found[place] = SampleTable.from_parquet(data, f"{urls[place]} (by a peer)")
    found.update(zip(missing, threads.map(scan, missing), strict=True))
    return [found[place] for place in range(len(urls))]
