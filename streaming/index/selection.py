"""Record which samples of some shards a filter keeps, or the group of each, and make the chunk table of the rest."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streaming.arrays import rows_by, sums
from streaming.index.chunk_table import ChunkTable
from streaming.index.columns import Bits, kept_rows
from streaming.types import Int64Array

_BLOCK = 32  # bytes; the set bits before each block are counted once
_AT_ONCE = 1 << 16  # rows handled at once: 2 MiB of bits
_COUNTED_AT_ONCE = 1 << 22  # counts of chunks and groups at once: 32 MiB
_POPCOUNT = np.array([byte.bit_count() for byte in range(256)], np.uint8)


class Choice(Protocol):
    """Which samples of some shards are given. A sample has a *place*, and a *rank*: the number of given ones before it.

    Attributes:
        chunk_places: int64 [C], place of the first sample of each chunk of the whole table.
        total: Samples given.
    """

    @property
    def chunk_places(self) -> Int64Array: ...  # noqa: D102

    @property
    def total(self) -> int: ...  # noqa: D102

    def places(self, ranks: Int64Array) -> Int64Array:
        """Return the place of each rank, int64 [n]."""

    def rows(self, shard: int, first: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which of samples ``[first, stop)`` of a shard are given, bool [n]."""


class Kept:
    """The bits of all shards, one shard after the other, each starting at a byte of its own; immutable.

    A bit has a *place* (its number among all bits) and, if it is set, a *rank* (the number of set ones before it).

    Args:
        table: The chunk table of the shards, whole.
        bits: Bits of each shard, ``ceil(n / 8)`` bytes for ``n`` samples; see ``columns.Bits``.
    """

    def __init__(self, table: ChunkTable, bits: Sequence[Bits]) -> None:
        sizes = np.array([-(-shard.num_samples // 8) for shard in table.shards], np.int64)
        if [one.size for one in bits] != sizes.tolist():
            raise ValueError("bits of other shards")
        self.shard_places: Int64Array = (np.cumsum(sizes) - sizes) * 8
        padding = np.zeros(_BLOCK - int(sizes.sum()) % _BLOCK, np.uint8)
        self._bits = np.concatenate([*bits, padding]).reshape(-1, _BLOCK)
        counts = [_POPCOUNT[part].sum(axis=1, dtype=np.int64) for part in _parts(self._bits)]
        self._before = sums(np.concatenate(counts))
        self._count(table)

    def over(self, table: ChunkTable) -> Kept:
        """Return the same choice, counted by the rows of another table of the same shards."""
        made = copy.copy(self)
        made._count(table)
        return made

    def _count(self, table: ChunkTable) -> None:
        self.chunk_places: Int64Array = self.shard_places[table.shard] + table.first_sample
        ends = self.ranks(self.chunk_places + table.num_samples)
        self.chunk_ranks: Int64Array = self.ranks(self.chunk_places)
        """int64 [C], samples kept before each chunk."""
        self.chunk_counts: Int64Array = ends - self.chunk_ranks
        """int64 [C], samples kept of each chunk."""

    @property
    def total(self) -> int:
        """Samples kept."""
        return int(self._before[-1])

    @cached_property
    def digest(self) -> str:
        """Identifies this choice among all of the same shards; 32 hex digits."""
        return hashlib.blake2b(self._bits.tobytes(), digest_size=16).hexdigest()

    def digest_of(self, num_shards: int) -> str:
        """Return the digest of the same choice of the first shards alone."""
        size = int(self.shard_places[num_shards]) // 8 if num_shards < len(self.shard_places) else None
        if size is None:
            return self.digest
        some = self._bits.reshape(-1)[:size].tobytes() + bytes(_BLOCK - size % _BLOCK)
        return hashlib.blake2b(some, digest_size=16).hexdigest()

    def ranks(self, places: Int64Array) -> Int64Array:
        """Return the number of kept samples before each place, int64 [n]."""
        found = np.empty(len(places), np.int64)
        for at in range(0, len(places), _AT_ONCE):
            some = places[at : at + _AT_ONCE]
            blocks, inside = np.divmod(some, 8 * _BLOCK)
            room = np.arange(_BLOCK) * 8
            # uint8 [m, _BLOCK]: the bits of each place's block, with those from the place on cleared.
            left = np.clip(inside[:, None] - room, 0, 8)
            masked = self._bits[np.minimum(blocks, len(self._bits) - 1)] & ((1 << left) - 1).astype(np.uint8)
            found[at : at + _AT_ONCE] = self._before[blocks] + _POPCOUNT[masked].sum(axis=1, dtype=np.int64)
        return found

    def places(self, ranks: Int64Array) -> Int64Array:
        """Return the place of each rank, int64 [n]."""
        found = np.empty(len(ranks), np.int64)
        for at in range(0, len(ranks), _AT_ONCE):
            some = ranks[at : at + _AT_ONCE]
            blocks = np.searchsorted(self._before, some, side="right") - 1
            left = some - self._before[blocks]
            rows = np.arange(len(some))
            # uint16 [m, _BLOCK]: set bits up to the end of each byte of the block.
            counts = _POPCOUNT[self._bits[blocks]].cumsum(axis=1, dtype=np.uint16)
            byte = (counts <= left[:, None]).sum(axis=1)
            left = left - np.where(byte > 0, counts[rows, byte - 1], 0)
            # bool [m, 8]: bits of each rank's byte, then the position at which the set bits exceed those left.
            bit = np.unpackbits(self._bits[blocks, byte][:, None], axis=1, bitorder="little").cumsum(axis=1)
            found[at : at + _AT_ONCE] = blocks * (8 * _BLOCK) + byte * 8 + (bit <= left[:, None]).sum(axis=1)
        return found

    def rows(self, shard: int, first: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which of samples ``[first, stop)`` of a shard are kept, bool [n]."""
        place = int(self.shard_places[shard])
        low, high = (place + first) // 8, -(-(place + stop) // 8)
        some = kept_rows(self._bits.reshape(-1)[low:high], 8 * (high - low))
        return some[place + first - 8 * low :][: stop - first]


class SampleGroups:
    """The group of each sample of some shards: one number per sample, whatever the number of groups; immutable.

    Args:
        table: The chunk table of the shards, whole.
        codes: Number of the group of each sample, shard after shard; ``num_groups``: no group.
        num_groups: Number of groups; some may be empty.
    """

    def __init__(self, table: ChunkTable, codes: npt.NDArray[np.uint16], num_groups: int) -> None:
        counts = np.array([shard.num_samples for shard in table.shards], np.int64)
        if len(codes) != counts.sum():
            raise ValueError("codes of other shards")
        self.table = table
        self.codes = codes.astype(np.uint8) if num_groups < 2**8 else codes
        self.codes.setflags(write=False)
        self.shard_places: Int64Array = np.cumsum(counts) - counts
        self.chunk_places: Int64Array = self.shard_places[table.shard] + table.first_sample
        found = [self._pieces(chunks, num_groups) for chunks in _blocks(table.num_chunks, num_groups)]
        # The pieces of chunks, sorted by group, then by chunk.
        chunks, groups, sizes = (np.concatenate([one[i] for one in found]) for i in range(3))
        by_group = np.argsort(groups, kind="stable")
        self._chunks, self._counts = chunks[by_group], sizes[by_group]
        self._borders: Int64Array = np.searchsorted(groups[by_group], np.arange(num_groups + 1))
        self.sizes: Int64Array = np.bincount(groups, sizes, num_groups).astype(np.int64)
        """int64 [num_groups], samples of each group."""

    def chunk_stop(self, place: int) -> int:
        """Return the place after the last sample of the chunk that holds a place."""
        chunk = int(np.searchsorted(self.chunk_places, place, side="right")) - 1
        return int(self.chunk_places[chunk] + self.table.num_samples[chunk])

    @cached_property
    def digest(self) -> str:
        """Identifies these groups among all of the same shards; 32 hex digits."""
        return hashlib.blake2b(self.codes.astype("<u2").tobytes(), digest_size=16).hexdigest()

    def selected(self, number: int, fingerprint: str) -> Selected:
        """Return the samples of one group, in the form of a filter that keeps them."""
        low, high = self._borders[number : number + 2].tolist()
        chunks, counts = self._chunks[low:high], self._counts[low:high]
        ranks: Int64Array = np.cumsum(counts) - counts
        kept = Member(self, number, self.chunk_places[chunks], ranks, int(self.sizes[number]))
        return Selected(
            kept=kept, table=self.table.rows(chunks, counts), chunks=chunks, ranks=ranks, first=0, stop=kept.total,
            fingerprint=fingerprint,
        )  # fmt: skip

    def _pieces(self, chunks: range, num_groups: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return chunk, group and number of samples of the pieces of some consecutive chunks."""
        sizes = self.table.num_samples[chunks.start : chunks.stop]
        first = int(self.chunk_places[chunks.start])
        codes = self.codes[first : first + int(sizes.sum())].astype(np.int64)
        cells = np.repeat(np.arange(len(chunks)) * (num_groups + 1), sizes) + codes
        counts = np.bincount(cells, minlength=len(chunks) * (num_groups + 1))
        counts = counts.reshape(len(chunks), num_groups + 1)[:, :num_groups]
        at, group = np.nonzero(counts)
        return at + chunks.start, group, counts[at, group]


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """The samples of one group; a ``Choice``.

    Attributes:
        groups: All groups.
        number: Number of this group.
        firsts: int64 [n], place of the first sample of each chunk that has samples of the group.
        ranks: int64 [n], rank of the first such sample.
        total: Samples of the group.
    """

    groups: SampleGroups = field(repr=False)
    number: int
    firsts: Int64Array = field(repr=False)
    ranks: Int64Array = field(repr=False)
    total: int

    @property
    def chunk_places(self) -> Int64Array:
        """See ``Choice``."""
        return self.groups.chunk_places

    def places(self, ranks: Int64Array) -> Int64Array:
        """See ``Choice``; searches each chunk concerned."""
        found = np.empty(len(ranks), np.int64)
        pieces = np.searchsorted(self.ranks, ranks, side="right") - 1
        for piece, rows in rows_by(pieces):
            first = int(self.firsts[piece])
            last = self.groups.chunk_stop(first)
            inside = np.flatnonzero(self.groups.codes[first:last] == self.number)
            found[rows] = first + inside[ranks[rows] - self.ranks[piece]]
        return found

    def rows(self, shard: int, first: int, stop: int) -> npt.NDArray[np.bool_]:
        """See ``Choice``."""
        place = int(self.groups.shard_places[shard])
        found: npt.NDArray[np.bool_] = self.groups.codes[place + first : place + stop] == self.number
        return found


def _blocks(num_chunks: int, num_groups: int) -> list[range]:
    """Return ranges of chunks whose samples are counted at once."""
    step = max(_COUNTED_AT_ONCE // (num_groups + 1), 1)
    return [range(at, min(at + step, num_chunks)) for at in range(0, num_chunks, step)]


def _parts(bits: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
    return [bits[at : at + _AT_ONCE] for at in range(0, len(bits), _AT_ONCE)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selected:
    """The chunks of which a filter keeps samples, or a range of the kept samples.

    Attributes:
        kept: Which samples are kept.
        table: Rows of these chunks in the whole chunk table, except that ``num_samples`` counts the samples given. Must
            not be written.
        chunks: int64 [C], number of each chunk in the whole table.
        ranks: int64 [C], rank of the first sample that each chunk gives.
        first: Rank of the first sample.
        stop: One past the rank of the last one.
        fingerprint: Fingerprint of the filter; see ``streaming.plan.state.filter_fingerprint``.
    """

    kept: Choice = field(repr=False)
    table: ChunkTable = field(repr=False)
    chunks: Int64Array = field(repr=False)
    ranks: Int64Array = field(repr=False)
    first: int
    stop: int
    fingerprint: str

    @classmethod
    def of(cls, whole: ChunkTable, kept: Kept, fingerprint: str) -> Selected:
        """Return all that is kept of the shards of a chunk table."""
        chunks = np.flatnonzero(kept.chunk_counts)
        rows = whole.rows(chunks, kept.chunk_counts[chunks])
        return cls(
            kept=kept, table=rows, chunks=chunks, ranks=kept.chunk_ranks[chunks], first=0, stop=kept.total,
            fingerprint=fingerprint,
        )  # fmt: skip

    @property
    def can_be_cut(self) -> bool:
        """Whether :meth:`over` knows the same samples in another table: not of groups."""
        return isinstance(self.kept, Kept)

    def over(self, whole: ChunkTable) -> Selected:
        """Return the same samples, as rows of another table of the same shards."""
        if not isinstance(self.kept, Kept):
            raise TypeError("groups are not cut")
        every = Selected.of(whole, self.kept.over(whole), self.fingerprint)
        return replace(every.between(self.first, self.stop), fingerprint=self.fingerprint)

    def between(self, first: int, stop: int) -> Selected:
        """Return samples ``[first, stop)`` of these."""
        low, high = self.first + first, self.first + max(first, stop)
        ends = self.ranks + self.table.num_samples
        rows = slice(int(np.searchsorted(ends, low, side="right")), int(np.searchsorted(self.ranks, high)))
        ranks = np.maximum(self.ranks[rows], low)
        counts = np.minimum(ends[rows], high) - ranks
        table = self.table.rows(np.arange(len(ends))[rows], counts)
        whole = self.fingerprint.partition(";samples=")[0]
        fingerprint = whole if (low, high) == (0, self.kept.total) else f"{whole};samples={low} to {high}"
        return replace(
            self, table=table, chunks=self.chunks[rows], ranks=ranks, first=low, stop=high, fingerprint=fingerprint
        )

    @property
    def is_whole(self) -> bool:
        """Whether this is all that a filter keeps of the shards: neither a group nor a range of samples."""
        return isinstance(self.kept, Kept) and self.fingerprint.endswith(f";kept={self.kept.digest}")

    def fingerprint_of(self, base: str, num_shards: int) -> str:
        """Return the fingerprint of the same whole filter over the first shards alone, whose own one is ``base``."""
        if not isinstance(self.kept, Kept):
            raise TypeError("groups are no filter")
        asked = self.fingerprint.partition(";")[2].rpartition("kept=")[0]
        return f"{base};{asked}kept={self.kept.digest_of(num_shards)}"

    def rows(self, shard: int, num_samples: int) -> npt.NDArray[np.bool_]:
        """Return which samples of a shard with ``num_samples`` samples are given, bool [num_samples]."""
        found = np.zeros(num_samples, np.bool_)
        of_shard = np.flatnonzero(self.table.shard == shard)
        chunk_ids = np.repeat(of_shard, self.table.num_samples[of_shard])
        within = np.arange(len(chunk_ids)) - np.searchsorted(chunk_ids, chunk_ids)
        found[self.table.first_sample[chunk_ids] + self.inside(chunk_ids, within)] = True
        return found

    def inside(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """Return the number inside its chunk's bytes of the sample at each offset, int64 [n]."""
        places = self.kept.places(self.ranks[chunk_ids] + offsets)
        found: Int64Array = places - self.kept.chunk_places[self.chunks[chunk_ids]]
        return found
