"""Check the tars of late fields: every byte, against their tables and the shards that they go with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from shard_tools.change.fields.tar import LateTar
from shard_tools.change.fields.target import again
from shard_tools.change.sets.open_set import load_samples
from shard_tools.running.report import Finding
from streaming.common.arguments import counted
from streaming.common.threads import map_threads
from streaming.errors import DataError, ShardstreamError, StorageError
from streaming.shards.catalog.build import home_of, read_schema, shard_name
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.late.fields import read_late_table
from streaming.shards.late.table import LateTable
from streaming.storage import Storage, redact

_Check = Callable[[], None]


def check_fields(
    rows_of: Mapping[str, ChunkTable], *, storage: Storage, index_url: str | None, workers: int
) -> list[Finding]:  # fmt: skip
    """Read the tars of the late fields of some shards, and return what is wrong.

    Args:
        rows_of: The chunk table of each shard alone, by URL.
        storage: Store of the index.
        index_url: Location of the index, if not beside the shards.
        workers: Tars at a time.
    """
    found: list[Finding] = []
    for home in dict.fromkeys(home_of(url, index_url) for url in rows_of):
        mine = {shard_name(url, index_url): rows for url, rows in rows_of.items() if home_of(url, index_url) == home}
        try:
            fields = read_schema(storage, home).late_fields
        except (DataError, StorageError):  # which the check of index files tells
            continue
        for name, version in fields.items():
            try:
                late = read_late_table(storage, home, name, version)
            except (DataError, StorageError) as error:
                found.append(Finding(kind="late", shard=home, what=str(error), cure=again(home, name)))
                continue
            found += _of_field(home, late, mine, storage, index_url, workers)
    return found


def _of_field(
    home: str, late: LateTable, mine: Mapping[str, ChunkTable], storage: Storage, index_url: str | None, workers: int
) -> Iterator[Finding]:  # fmt: skip
    lacking = [name for name, rows in mine.items() if late.fingerprints.get(name) != rows.fingerprint]
    if lacking:
        what = (
            f"field {late.name!r} has no values for {counted(len(lacking), 'shard')}, first {lacking[0]!r}, which came "
            "or changed after it"
        )
        cure = f"run the command again that added it: {again(home, late.name).removesuffix(' --overwrite')}"
        yield Finding(kind="late", shard=home, what=what, cure=cure)
    tars = [
        LateTar(field=late.name, work=late.work, home=home, rows=rows, storage=storage)
        for name, rows in mine.items() if name not in lacking
    ]  # fmt: skip
    check = partial(_of_tar, late, index_url)
    yield from (one for one in map_threads(check, tars, workers) if one is not None)


def _of_tar(late: LateTable, index_url: str | None, tar: LateTar) -> Finding | None:
    """Return what is wrong with a tar; None: nothing."""
    cure = again(tar.home, late.name)
    try:
        expected = late.chunks.of_shard(late.numbers[tar.shard])
        table = tar.samples()
        if table.chunks != expected:
            return Finding(kind="late", shard=tar.url, what="its sample table is of another tar", cure=cure)
        size_bytes = tar.storage.info(tar.url).size_bytes
        if size_bytes != table.shard.size_bytes:
            what = f"{size_bytes} bytes, the index says {table.shard.size_bytes}"
            return Finding(kind="size", shard=tar.url, what=what, cure=cure)
        base = load_samples(tar.storage, tar.shard_url, index_url)
        if base is not None and list(base.keys) != list(table.keys):
            return Finding(kind="keys", shard=tar.url, what="its keys are not those of its shard", cure=cure)
        for _ in tar.values():
            pass
    except ShardstreamError as error:
        what = str(error).removeprefix(f"{redact(tar.url)}: ")
        return Finding(kind="late", shard=tar.url, what=what, cure=cure)
    return None
