"""Find samples that a set has more than once, and keep one of each: the command ``dedupe``."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shard_tools.change.life.delete import keys_of, leave_out, set_of, stored
from shard_tools.change.life.rewrite import Mask
from shard_tools.change.sets.open_set import READ_THREADS, tables_of
from shard_tools.make.write.change import open_head
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming import StreamingDataset
from streaming.common.arguments import did_you_mean
from streaming.common.threads import map_threads
from streaming.errors import ConfigError
from streaming.shards.index.columns import stable_hash
from streaming.shards.index.large_members import LARGE_BYTES
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, redact
from streaming.types import Int64Array

Keep = Literal["first", "newest"]
CONTENT, KEY = "content", "key"
_AT_ONCE_BYTES, _AT_ONCE = 64 << 20, 4096
"""Bytes of samples that are read together for the comparison."""
_FIELDS_MIXED = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Report):
    """A duplicate that is left out, and the sample that stays instead.

    Attributes:
        key: Key of the duplicate.
        shard: Name of the duplicate's shard.
        kept_key: Key of the sample that stays.
        kept_shard: Name of that sample's shard.
    """

    key: str
    shard: str
    kept_key: str
    kept_shard: str

    def to_line(self) -> bytes:
        """Return the pair as a line of JSON."""
        return json.dumps(self.as_dict()).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupeReport(Report):
    """The duplicates of a set.

    Attributes:
        target: The set.
        by: What was compared: ``key``, ``content``, or the name of a field.
        version: The version without duplicates; the previous one if there were none.
        num_removed: Number of samples left out.
        num_samples: Number of samples that stay.
        num_compared: Number of samples whose bytes were read because the index alone could not decide.
        num_shards: Number of shards that were rewritten or removed.
        dry_run: Whether nothing was written.
        pairs: Every duplicate, with the sample that stays.
        seconds: Wall time.
    """

    target: str
    by: str
    version: int
    num_removed: int
    num_samples: int
    num_compared: int
    num_shards: int
    dry_run: bool
    pairs: tuple[Pair, ...]
    seconds: float

    @property
    def groups(self) -> list[list[str]]:
        """Keys of the samples that are the same, the one that stays first."""
        found: dict[tuple[str, str], list[str]] = {}
        for pair in self.pairs:
            found.setdefault((pair.kept_shard, pair.kept_key), [pair.kept_key]).append(pair.key)
        return [*found.values()]

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form, with ``groups`` and, for ``num_removed``, also ``removed``."""
        return {"groups": self.groups, "removed": self.num_removed, **super(DedupeReport, self).as_dict()}


def dedupe(
    home: str,
    *,
    storage: Storage,
    by: str = CONTENT,
    keep: Keep = "first",
    dry_run: bool = False,
    workers: int = 4,
    progress: Progress | None = None,
) -> DedupeReport:
    """Leave the duplicates out of the set in ``home``, and publish the result as its next version.

    The index rules out most samples: by key, or by the sizes of fields and the checksums of large ones. The bytes of
    the remaining candidates are read and compared by SHA-256.

    Args:
        home: Directory of the set.
        storage: The store.
        by: ``"content"``: samples whose fields all have the same bytes; ``"key"``; or the name of a field.
        keep: Which duplicate stays, in the order of the set.
        dry_run: Only report the duplicates.
        workers: Number of shards written in parallel.
        progress: Receives the shards as they are written.

    Raises:
        ConfigError: No sample has the field.
        OvertakenError: Another change of the set was published meanwhile.
        IndexMissingError, UnfinishedError: The set has no index, or is unfinished.
        DataError: A sample is damaged.
        StorageError: The store failed.
    """
    begun_s = time.monotonic()
    head = open_head(storage, home)
    if by == KEY:
        same, num_compared = _by_key(head, storage), 0
    else:
        same, num_compared = _by_bytes(head, storage, by)
    groups = [group if keep == "first" else group[::-1] for group in same]
    places = _Places(head, storage)
    pairs = tuple(places.pair(other, group[0]) for group in groups for other in group[1:])
    leaves = places.masks([other for group in groups for other in group[1:]])
    done = leave_out(
        head, storage, leaves, command="dedupe", dry_run=dry_run, workers=workers, progress=progress or NoProgress()
    )
    return DedupeReport(
        target=redact(home), by=by, version=done, num_removed=len(pairs),
        num_samples=head.table.total_samples - len(pairs), num_compared=num_compared, num_shards=len(leaves),
        dry_run=dry_run, pairs=pairs, seconds=time.monotonic() - begun_s,
    )  # fmt: skip


class _Places:
    """Map the number of a sample in the set to its shard and key."""

    def __init__(self, head: Head, storage: Storage) -> None:
        self._head, self._storage = head, storage
        self._ends = np.cumsum([shard.num_samples for shard in head.table.shards])
        self._keys: dict[int, list[bytes]] = {}

    def pair(self, other: int, kept: int) -> Pair:
        """Return the pair of a duplicate and the sample that stays."""
        (key, shard), (kept_key, kept_shard) = self._of(other), self._of(kept)
        return Pair(key=key, shard=shard, kept_key=kept_key, kept_shard=kept_shard)

    def masks(self, numbers: Sequence[int]) -> dict[str, Mask]:
        """Return a mask for each shard that marks these samples."""
        found: dict[str, Mask] = {}
        for number in numbers:
            shard, row = self._place(number)
            info = self._head.table.shards[shard]
            found.setdefault(info.name, np.zeros(info.num_samples, np.bool_))[row] = True
        return found

    def _place(self, number: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - (int(self._ends[shard - 1]) if shard else 0)

    def _of(self, number: int) -> tuple[str, str]:
        shard, row = self._place(number)
        if shard not in self._keys:
            self._keys[shard] = keys_of(self._storage, self._head, shard).cast(pa.binary()).to_pylist()
        return self._keys[shard][row].decode("utf-8", "surrogateescape"), self._head.table.shards[shard].name


def _by_key(head: Head, storage: Storage) -> list[list[int]]:
    """Return the numbers of the samples with one key, for each key that occurs more than once."""
    shards = range(len(head.table.shards))
    of_shard = partial(keys_of, storage, head)
    hashes = [stable_hash(keys).to_numpy(zero_copy_only=False) for keys in map_threads(of_shard, shards, READ_THREADS)]
    again = _occurring_again(np.concatenate(hashes))
    ends = np.cumsum([len(one) for one in hashes])
    groups: dict[bytes, list[int]] = {}
    for shard in np.unique(np.searchsorted(ends, again, side="right")).tolist():
        first = int(ends[shard]) - len(hashes[shard])
        rows = again[(again >= first) & (again < ends[shard])]
        keys = of_shard(shard).cast(pa.binary()).take(pa.array(rows - first)).to_pylist()
        for number, key in zip(rows.tolist(), keys, strict=True):
            groups.setdefault(key, []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def _by_bytes(head: Head, storage: Storage, by: str) -> tuple[list[list[int]], int]:
    """Return groups of samples with equal bytes, by their numbers, and the number of samples that were read.

    The codes of :func:`_codes` narrow the search from the index alone; digests of the bytes decide.

    Raises:
        ConfigError: No sample has the field.
    """
    field = None if by == CONTENT else by.lower()
    there: set[str] = set()
    codes, of_sizes, sizes, all_summed = [], [], [], True
    for _, _, table in tables_of(set_of(head), storage, READ_THREADS):
        there.update(table.fields)
        codes.append(_codes(table, field, with_sums=True))
        of_sizes.append(_codes(table, field, with_sums=False))
        sizes.append(np.diff(table.record_starts))
        all_summed &= _has_sums(table)
    if field is not None and field not in there:
        raise ConfigError(
            f"--by {by!r}: no sample of {redact(head.home)} has such a field{did_you_mean(by, there)}; give key, "
            f"content, or one of {', '.join(sorted(there))}"
        )
    compared = sorted(there) if field is None else [field]  # no late fields, which some shards may lack
    code = np.concatenate(codes if all_summed else of_sizes)
    candidates = _occurring_again(code)
    candidates = candidates[code[candidates] != 0]
    groups: dict[bytes, list[int]] = {}
    if not candidates.size:
        return [], 0
    opened = stored(head, storage, compared)
    for some in _parts(candidates, np.concatenate(sizes)):
        for number, digest in zip(some.tolist(), _digests(opened, some), strict=True):
            groups.setdefault(digest, []).append(number)
    return [group for group in groups.values() if len(group) > 1], candidates.size


def _occurring_again(codes: npt.NDArray[np.int64] | npt.NDArray[np.uint64]) -> Int64Array:
    """Return the positions, ascending, of values that occur more than once."""
    _, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
    return np.flatnonzero(counts[inverse] > 1).astype(np.int64)


def _has_sums(table: SampleTable) -> bool:
    """Return whether every large member has a checksum: an index by another writer may have a higher threshold."""
    none = np.full(table.num_samples, -1)
    large = ((sizes >= LARGE_BYTES, table.large.fields.get(name, none)) for name, (_, sizes) in table.fields.items())
    return all(bool((sums[is_large] >= 0).all()) for is_large, sums in large)


def _codes(table: SampleTable, field: str | None, *, with_sums: bool) -> npt.NDArray[np.uint64]:
    """Return a code for each sample of a shard: equal bytes give equal codes; 0 if the sample lacks the field."""
    found = np.zeros(table.num_samples, np.uint64)
    for name, (starts, sizes) in table.fields.items():
        if field is not None and name != field:
            continue
        one = (sizes.astype(np.uint64) << np.uint64(32)) + np.uint64(1)
        sums = table.large.fields.get(name)
        if sums is not None and with_sums:
            one += np.maximum(sums, 0).astype(np.uint64)
        salt = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
        mixed = ((one ^ salt) * _FIELDS_MIXED) | np.uint64(1)
        found += np.where(starts >= 0, mixed, np.uint64(0))
    return found


def _parts(numbers: Int64Array, sizes: Int64Array) -> Iterator[Int64Array]:
    """Yield the numbers of samples in groups that are read together."""
    first, num_bytes = 0, 0
    for place, number in enumerate(numbers.tolist()):
        num_bytes += int(sizes[number])
        if num_bytes >= _AT_ONCE_BYTES or place + 1 - first >= _AT_ONCE:
            yield numbers[first : place + 1]
            first, num_bytes = place + 1, 0
    if first < numbers.size:
        yield numbers[first:]


def _digests(opened: StreamingDataset, numbers: Int64Array) -> list[bytes]:
    """Return a digest of the compared bytes of each of these samples."""
    found = []
    for sample in opened[numbers.tolist()]:
        digest = hashlib.sha256()
        for name in sorted(name for name in sample if not name.startswith("__")):
            content = bytes(sample[name])
            digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
        found.append(digest.digest())
    return found
