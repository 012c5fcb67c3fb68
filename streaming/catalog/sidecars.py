"""Head starts: what Energon, DALI and wids left beside shards, used when a shard is scanned and held against it.

A sidecar never decides what goes into the index: each byte of a shard is read and parsed all the same. Energon's
borders let one large shard be scanned in several parts at a time, and every sidecar is compared with what was found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from streaming.catalog.scan import Progress, join_parts, scan_part, scan_shard
from streaming.errors import ConfigError, DataError, IndexFormatError, IndexMismatchError, StorageError
from streaming.index.cutter import DEFAULT_RULE, ChunkRule, cut_records
from streaming.index.headstart import DaliField, WidsShard, parse_dali_idx, parse_energon_idx, parse_wids
from streaming.index.sample_table import SampleTable
from streaming.storage import Storage, join_url, redact, scheme_of, split_url
from streaming.storage.urls import local_path
from streaming.types import DuplicateKeys, Int64Array

SPLIT_BYTES = 64 << 20
"""Parts of a shard scanned at a time are at least this long: a thread and a chunk border cost little beside it."""
MAX_SIDECAR_BYTES = 64 << 20
"""Larger files are taken for something else: Energon needs 8 bytes a sample, DALI some 30 a field."""
_MAX_JSON_FILES = 8  # more are not descriptions of shards but data (a file of statistics per shard, say)
_CURE = "renew or delete the sidecar, or leave it aside with `shard_tools index --no-head-starts URL`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecars:
    """The sidecars of one shard: URLs of ``X.tar.idx`` (Energon) and ``X.idx`` (DALI), and its row in a wids JSON."""

    energon: str | None = None
    dali: str | None = None
    wids: tuple[str, WidsShard] | None = None


def find_sidecars(storage: Storage, urls: Iterable[str]) -> dict[str, Sidecars]:
    """The sidecars of those of the shards at ``urls`` that have any. Each directory is listed once.

    A store that cannot list, or does not allow it, has no head starts.
    """
    folders: dict[str, list[str]] = {}
    for url in urls:
        folders.setdefault(split_url(url)[0], []).append(url)
    found: dict[str, Sidecars] = {}
    for folder, shards in folders.items():
        try:
            listed = _names_in(storage, folder)
            sizes = {name: size for name, size in listed.items() if size <= MAX_SIDECAR_BYTES}
            wids = _wids_rows(storage, folder, sizes)
        except (StorageError, ConfigError):
            continue
        for url in shards:
            name = split_url(url)[1]
            dali = name.removesuffix("tar") + "idx" if name.endswith(".tar") else ""
            sidecars = Sidecars(
                energon=join_url(folder, name + ".idx") if name + ".idx" in sizes else None,
                dali=join_url(folder, dali) if dali in sizes else None,
                wids=wids.get(name),
            )
            if sidecars != Sidecars():
                found[url] = sidecars
    return found


def _names_in(storage: Storage, folder: str) -> dict[str, int]:
    """Names and sizes of the files in ``folder`` itself (a store's listing may hold what is below it, too)."""
    if scheme_of(folder) == "file":  # not a walk through all that lies below a local folder
        try:
            with os.scandir(local_path(folder) or ".") as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except OSError:  # without head starts; who reads the shards says what is wrong
            return {}
    infos = ((split_url(info.url), info.size_bytes) for info in storage.list(folder))
    return {name: size_bytes for (directory, name), size_bytes in infos if directory == folder}


def _wids_rows(storage: Storage, folder: str, sizes: Mapping[str, int]) -> dict[str, tuple[str, WidsShard]]:
    """Rows of wids descriptions by the shard's file name, with the URL of the description."""
    documents = [name for name in sizes if name.endswith(".json")]
    rows: dict[str, tuple[str, WidsShard]] = {}
    for name in documents if len(documents) <= _MAX_JSON_FILES else []:
        url = join_url(folder, name)
        try:
            shards = parse_wids(bytes(storage.read(url)), redact(url))
        except IndexFormatError:  # another kind of JSON
            continue
        rows.update({shard.url.rsplit("/", 1)[-1]: (url, shard) for shard in shards})
    return rows


def scan_with_sidecars(
    storage: Storage,
    url: str,
    name: str,
    sidecars: Sidecars,
    *,
    rule: ChunkRule = DEFAULT_RULE,
    duplicate_keys: DuplicateKeys = "error",
    progress: Progress | None = None,
    parallel: int = 1,
) -> SampleTable:
    """As :func:`~streaming.catalog.scan.scan_shard`, in up to ``parallel`` parts, and checked against ``sidecars``.

    Raises:
        IndexMismatchError: If a sidecar says other than the shard; nothing was taken over from it.
        DataError: As ``scan_shard``.
    """
    size_bytes = storage.info(url).size_bytes
    borders = None if sidecars.energon is None else _read_energon(storage, sidecars.energon, url, size_bytes)
    table = None
    if borders is not None:
        starts = part_starts(borders, size_bytes, min(parallel, size_bytes // SPLIT_BYTES), rule)
        if len(starts) > 1 and duplicate_keys == "error":
            table = _scan_parts(storage, url, name, starts, size_bytes, rule=rule, progress=progress)
            progress = None  # those bytes were told
    if table is None:
        table = scan_shard(storage, url, name, rule=rule, duplicate_keys=duplicate_keys, progress=progress)
    if borders is not None and sidecars.energon is not None:
        _check_energon(borders, table, sidecars.energon, url)
    if sidecars.dali is not None:
        _check_dali(storage, table, sidecars.dali, url)
    if sidecars.wids is not None:
        _check_wids(table, *sidecars.wids, url)
    return table


def part_starts(borders: Int64Array, size_bytes: int, num_parts: int, rule: ChunkRule = DEFAULT_RULE) -> list[int]:
    """Where parts of about equal length may begin: at chunks of a shard whose records have these ``borders``."""
    if num_parts < 2 or borders.size < 3:
        return [0]
    records = borders.copy()
    records[0] = 0  # members before the first sample belong to it
    chunks = records[cut_records(records, rule)[:-1]]
    wanted = np.arange(1, num_parts) * (size_bytes // num_parts)
    near = np.clip(np.searchsorted(chunks, wanted), 0, chunks.size - 1)
    return sorted({0, *chunks[near].tolist()})


def _scan_parts(
    storage: Storage,
    url: str,
    name: str,
    starts: Sequence[int],
    size_bytes: int,
    *,
    rule: ChunkRule,
    progress: Progress | None,
) -> SampleTable | None:
    """The table of a shard scanned in parts; None if it cannot be sure to be that of one scan."""
    stops = [*starts[1:], size_bytes]
    with ThreadPoolExecutor(len(starts), thread_name_prefix="scan-part") as pool:
        futures = [
            pool.submit(scan_part, storage, url, start, stop, whole=stop == size_bytes, rule=rule, progress=progress)
            for start, stop in zip(starts, stops, strict=True)
        ]
    try:
        parts = [future.result() for future in futures]
        if any(part.first_header != part.start for part in parts[1:]):
            return None
        table = join_parts(parts, name, size_bytes, redact(url))  # a sample cut in two would be a key that comes twice
    except DataError:
        return None
    same = np.array_equal(cut_records(table.record_starts, rule)[:-1], table.chunks.first_sample)
    return table if same else None


def _read_energon(storage: Storage, sidecar: str, url: str, size_bytes: int) -> Int64Array:
    try:
        return parse_energon_idx(bytes(storage.read(sidecar)), redact(sidecar), size_bytes)
    except IndexFormatError as error:
        raise IndexMismatchError(f"{error}; beside {redact(url)}; {_CURE}") from error


def _mismatch(sidecar: str, url: str, what: str) -> IndexMismatchError:
    return IndexMismatchError(f"{redact(sidecar)} does not describe {redact(url)}: {what}; {_CURE}")


def _check_energon(borders: Int64Array, table: SampleTable, sidecar: str, url: str) -> None:
    if borders.size - 1 != table.num_samples:
        raise _mismatch(sidecar, url, f"{borders.size - 1} samples, the shard has {table.num_samples}")
    wrong = np.flatnonzero(borders[1:-1] != table.record_starts[1:-1])
    if wrong.size:
        at = int(wrong[0]) + 1
        raise _mismatch(sidecar, url, f"sample {at} at byte {borders[at]}, it begins at {table.record_starts[at]}")


def _check_dali(storage: Storage, table: SampleTable, sidecar: str, url: str) -> None:
    data = bytes(storage.read(sidecar))
    if not data.startswith(b"v1."):  # this suffix has other users
        return
    try:
        samples = parse_dali_idx(data, redact(sidecar))
    except IndexFormatError as error:
        raise IndexMismatchError(f"{error}; beside {redact(url)}; {_CURE}") from error
    if len(samples) != table.num_samples:
        raise _mismatch(sidecar, url, f"{len(samples)} samples, the shard has {table.num_samples}")
    ranges: list[list[tuple[int, int]]] = [[] for _ in samples]
    for starts, sizes in table.fields.values():
        for row, start, size in zip(ranges, starts.tolist(), sizes.tolist(), strict=True):
            if start >= 0:
                row.append((start, size))
    for index, (sample, row) in enumerate(zip(samples, ranges, strict=True)):
        _check_sample(sample, row, index, sidecar, url)


def _check_sample(
    sample: tuple[DaliField, ...], ranges: list[tuple[int, int]], index: int, sidecar: str, url: str
) -> None:
    said = sorted((field.start, field.size) for field in sample)
    if said != sorted(ranges):
        raise _mismatch(
            sidecar, url, f"sample {index} has fields at (byte, size) {said[:4]}, found at {sorted(ranges)[:4]}"
        )


def _check_wids(table: SampleTable, sidecar: str, row: WidsShard, url: str) -> None:
    if row.num_samples != table.num_samples:
        raise _mismatch(sidecar, url, f"{row.num_samples} samples, the shard has {table.num_samples}")
    if row.size_bytes is not None and row.size_bytes != table.shard.size_bytes:
        raise _mismatch(sidecar, url, f"{row.size_bytes} bytes, the shard has {table.shard.size_bytes}")
