"""Select which samples of some shards are read, as values: all, a range, those that a filter keeps, a group."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import rows_by, sums
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import Bits, kept_rows
from streaming.types import Int64Array, override

_BLOCK = 32  # in bytes; the set bits before each block are counted once
_AT_ONCE = 1 << 16  # rows handled at once: 2 MiB of bits
_COUNTED_AT_ONCE = 1 << 22  # counts of chunks and groups at once: 32 MiB
_POPCOUNT = np.array([byte.bit_count() for byte in range(256)], np.uint8)


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection(ABC):
    """Samples of some shards, in storage order, and the rows of a table that hold them; immutable.

    Readers of a dataset ask this value, and never which form it has: all forms answer all questions, by these laws
    (``tests/catalog/test_selection.py``)::

        s.over(a).over(b) = s.over(b)      other rows, the same samples and identity
        s.between(a, b).between(c, d) = s.between(a + c, a + d)      for d <= b - a
        s.every(n).every(m) = s.every(n * m)
        s.mask(shard)[s.samples(first, stop)] is True for the rows of this shard, and all else False

    Attributes:
        chunks: The chunks of all shards, to which the identity refers.
        whole: The rows of all shards: ``chunks``, or the units into which these are cut.
        table: Those of these rows that have samples of this selection; ``num_samples`` counts only these samples. If a
            range begins inside a row, ``first_sample`` is the first sample of the range; bytes and checksums stay those
            of the whole row. So the table must not be written.
        rows: Number in ``whole`` of each row of ``table``.
        can_be_cut: Whether :meth:`over` works.
    """

    chunks: ChunkTable = field(repr=False)
    whole: ChunkTable = field(repr=False)
    table: ChunkTable = field(repr=False)
    rows: range | Int64Array = field(repr=False)
    can_be_cut = True

    @property
    @abstractmethod
    def identity(self) -> str:
        """Distinguishes these samples from all others, whatever the rows: the fingerprint of the set."""

    @property
    def filter(self) -> str:
        """Identifies the choice of samples between the first and the last; "": all are kept."""
        return ""

    @property
    def words(self) -> str:
        """The range in words, for messages; "": there is none."""
        return ""

    @property
    def can_grow(self) -> bool:
        """Whether the same selection of fewer shards can be recognized."""
        return False

    @property
    def stored_samples(self) -> Int64Array:
        """int64 [C], number of samples in the bytes of each row, including those that a filter leaves out."""
        return self.table.num_samples

    def stored_between(self, firsts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return the same for each run of rows ``[first, stop)``, including the bytes between them, int64 [n]."""
        before = sums(self.table.num_samples)
        return before[stops] - before[firsts]

    @abstractmethod
    def over(self, whole: ChunkTable) -> Selection:
        """Return the same samples, in the rows of another table of the same shards."""

    @abstractmethod
    def between(self, first: int, stop: int) -> Selection:
        """Return samples ``[first, stop)`` of this selection."""

    def every(self, step: int) -> Selection:
        """Return the first of these samples and every ``step``-th one after it."""
        return self if step == 1 else Every.of(self, step)

    def inside(self, rows: Int64Array, offsets: Int64Array) -> Int64Array:  # noqa: ARG002  as filters need it
        """Return the position of the sample at each offset, counted from ``first_sample`` of its row, int64 [n]."""
        return offsets

    def kept(self, shard: int, first: int, stop: int) -> npt.NDArray[np.bool_]:  # noqa: ARG002  as filters need it
        """Return whether each of samples ``[first, stop)`` of a shard is delivered if its row is read, bool [n].

        A row inside which a range begins or ends is read as a whole.
        """
        return np.ones(stop - first, np.bool_)

    def samples(self, first: int, stop: int) -> Int64Array:
        """Return the numbers in their shard of the samples of rows ``[first, stop)`` of ``table``, int64 [n]."""
        counts = self.table.num_samples[first:stop]
        rows = np.repeat(np.arange(first, stop), counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.table.first_sample[rows] + self.inside(rows, offsets)

    def mask(self, shard: int) -> npt.NDArray[np.bool_]:
        """Return whether each sample of a shard is in the selection, bool [n]."""
        found = np.zeros(self.whole.shards[shard].num_samples, np.bool_)
        found[self.samples(*self.table.rows_of(shard))] = True
        return found

    def rows_when(self, identity: str, num_shards: int | None) -> int | None:
        """Return the number of rows that this selection had when this was its identity.

        Returns None unless shards have only been appended since then.

        Args:
            identity: An identity, current or earlier.
            num_shards: Number of shards at that time; None: search, from all shards downwards.
        """
        if identity == self.identity:
            return self.table.num_chunks
        last = len(self.chunks.shards) if self.can_grow else 0
        for count in range(last - 1, 0, -1) if num_shards is None else (num_shards,):
            if 0 < count < last and identity == self.identity_when(count):
                return int(np.searchsorted(self.table.shard, count))
        return None

    def identity_when(self, num_shards: int) -> str:
        """Return the identity of the same selection of the first shards alone."""
        return self.chunks.take(range(num_shards)).fingerprint


class Everything(Selection):
    """All samples."""

    can_grow = True

    @classmethod
    def of(cls, chunks: ChunkTable) -> Everything:
        """Return all samples of these chunks."""
        return cls(chunks=chunks, whole=chunks, table=chunks, rows=range(chunks.num_chunks))

    @property
    @override
    def identity(self) -> str:
        return self.chunks.fingerprint

    @override
    def over(self, whole: ChunkTable) -> Everything:
        return replace(self, whole=whole, table=whole, rows=range(whole.num_chunks))

    @override
    def between(self, first: int, stop: int) -> Range:
        return Range.of(self.chunks, self.whole, first, max(first, stop))


@dataclass(frozen=True, kw_only=True, eq=False)
class Range(Selection):
    """Samples ``[first, stop)`` of all."""

    first: int
    stop: int

    @classmethod
    def of(cls, chunks: ChunkTable, whole: ChunkTable, first: int, stop: int) -> Range:
        """Return a range of the samples of these chunks."""
        low, table = whole.between(first, stop)
        rows = range(low, low + table.num_chunks)
        return cls(chunks=chunks, whole=whole, first=first, stop=stop, table=table, rows=rows)

    @cached_property
    @override
    def identity(self) -> str:
        is_cut = self.whole is not self.chunks
        return (self.over(self.chunks) if is_cut else self).table.fingerprint

    @override
    def over(self, whole: ChunkTable) -> Range:
        return Range.of(self.chunks, whole, self.first, self.stop)

    @override
    def between(self, first: int, stop: int) -> Range:
        return Range.of(self.chunks, self.whole, self.first + first, self.first + max(first, stop))

    @property
    @override
    def words(self) -> str:
        return f"a view of samples {self.first} to {self.stop}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen(Selection):
    """Samples ``[first, stop)`` of those that are chosen one by one. Each has a *rank* among the chosen.

    Attributes:
        name: Identity of all chosen samples; see ``streaming.order.plan.state.filter_fingerprint``.
        total: Number of all chosen samples.
        begins: int64 [C], number of chosen samples before each row.
    """

    name: str
    total: int
    first: int
    stop: int
    rows: Int64Array = field(repr=False)
    begins: Int64Array = field(repr=False)

    @property
    @override
    def identity(self) -> str:
        return f"{self.name};samples={self.first} to {self.stop}" if self.is_part else self.name

    @property
    @override
    def filter(self) -> str:
        return self.identity

    @property
    @override
    def words(self) -> str:
        return f"a view of samples {self.first} to {self.stop}" if self.is_part else ""

    @property
    def is_part(self) -> bool:
        """Whether this is a range of the chosen samples."""
        return (self.first, self.stop) != (0, self.total)

    @cached_property
    @override
    def stored_samples(self) -> Int64Array:
        return self.whole.num_samples[self.rows]

    @override
    def stored_between(self, firsts: Int64Array, stops: Int64Array) -> Int64Array:
        return _stored_in_runs(self.whole, self.rows, firsts, stops)

    @override
    def between(self, first: int, stop: int) -> Self:
        low, high = self.first + first, self.first + max(first, stop)
        begins = np.maximum(self.begins, self.first)
        ends = begins + self.table.num_samples
        row = int(np.searchsorted(ends, low, side="right"))
        rows = slice(row, int(np.searchsorted(begins, high)) if low < high else row)
        counts = np.minimum(ends[rows], high) - np.maximum(begins[rows], low)
        table = self.table.rows(np.arange(len(ends))[rows], counts)
        return replace(self, table=table, rows=self.rows[rows], begins=self.begins[rows], first=low, stop=high)


@dataclass(frozen=True, kw_only=True, eq=False)
class Filtered(Chosen):
    """The samples that a filter keeps, or a range of them."""

    bits: Kept = field(repr=False)

    @classmethod
    def of(cls, chunks: ChunkTable, whole: ChunkTable, bits: Kept, name: str) -> Filtered:
        """Return all samples of these chunks that are kept."""
        places = bits.shard_places[whole.shard] + whole.first_sample
        begins = bits.ranks(places)
        counts = bits.ranks(places + whole.num_samples) - begins
        rows = np.flatnonzero(counts)
        return cls(
            chunks=chunks, whole=whole, bits=bits, name=name, total=bits.total, first=0, stop=bits.total,
            table=whole.rows(rows, counts[rows]), rows=rows, begins=begins[rows],
        )  # fmt: skip

    @override
    def over(self, whole: ChunkTable) -> Filtered:
        return Filtered.of(self.chunks, whole, self.bits, self.name).between(self.first, self.stop)

    @override
    def inside(self, rows: Int64Array, offsets: Int64Array) -> Int64Array:
        places = self.bits.places(np.maximum(self.begins[rows], self.first) + offsets)
        found: Int64Array = places - self.bits.shard_places[self.table.shard[rows]] - self.table.first_sample[rows]
        return found

    @override
    def kept(self, shard: int, first: int, stop: int) -> npt.NDArray[np.bool_]:
        return self.bits.rows(shard, first, stop)

    @property
    @override
    def can_grow(self) -> bool:
        return not self.is_part

    @override
    def identity_when(self, num_shards: int) -> str:
        asked = self.name.partition(";")[2].rpartition("kept=")[0]
        return f"{super().identity_when(num_shards)};{asked}kept={self.bits.digest_of(num_shards)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Member(Chosen):
    """The samples of one group, or a range of them. Groups read parts of the same chunks, so they are not cut."""

    groups: SampleGroups = field(repr=False)
    number: int

    can_be_cut = False

    def over(self, whole: ChunkTable) -> Member:  # noqa: ARG002  as Selection has it
        """Refuse: see ``can_be_cut``."""
        raise TypeError("groups are not cut")

    def inside(self, rows: Int64Array, offsets: Int64Array) -> Int64Array:
        """See ``Selection``; searches each row concerned."""
        found = np.empty(len(offsets), np.int64)
        for row, of_row in rows_by(rows):
            first = int(self.table.first_sample[row])
            stop, begin = first + int(self.whole.num_samples[self.rows[row]]), int(self.begins[row])
            members = np.flatnonzero(self.kept(int(self.table.shard[row]), first, stop))
            found[of_row] = members[max(begin, self.first) - begin + offsets[of_row]]
        return found

    @override
    def kept(self, shard: int, first: int, stop: int) -> npt.NDArray[np.bool_]:
        place = int(self.groups.shard_places[shard])
        found: npt.NDArray[np.bool_] = self.groups.codes[place + first : place + stop] == self.number
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Every(Selection):
    """Every ``step``-th sample of another selection, from its first to its last one.

    Attributes:
        base: The other selection.
        at: int64 [C], row of ``base.table`` for each row of ``table``.
        begins: int64 [C], position in each row of its first sample in this selection, counted among the samples of
            ``base`` in that row.
        leads: int64 [C], number of samples of each row before the first one of ``base``.
    """

    base: Selection
    step: int
    at: Int64Array = field(repr=False)
    rows: Int64Array = field(repr=False)
    begins: Int64Array = field(repr=False)
    leads: Int64Array = field(repr=False)

    @classmethod
    def of(cls, base: Selection, step: int) -> Every:
        """Return every ``step``-th sample of a selection that is not an ``Every`` itself."""
        total = base.table.total_samples
        base = base.between(0, total if total == 0 else total - (total - 1) % step)
        starts = sums(base.table.num_samples)
        ranks = -(-starts // step)  # int64 [rows]: rank of the first sample at or after each row's start
        at = np.flatnonzero(np.diff(ranks))
        rows = np.asarray(base.rows, np.int64)[at]
        return cls(
            chunks=base.chunks, whole=base.whole, base=base, step=step, at=at, rows=rows,
            table=base.whole.rows(rows, np.diff(ranks)[at]), begins=ranks[at] * step - starts[at],
            leads=base.table.first_sample[at].astype(np.int64) - base.whole.first_sample[rows],
        )  # fmt: skip

    @property
    @override
    def can_be_cut(self) -> bool:  # type: ignore[override]
        return self.base.can_be_cut

    @property
    @override
    def identity(self) -> str:
        return f"{self.base.identity};every={self.step}"

    @property
    @override
    def filter(self) -> str:
        return self.identity

    @property
    @override
    def words(self) -> str:
        return ", ".join(filter(None, [self.base.words, f"step {self.step}"]))

    @cached_property
    @override
    def stored_samples(self) -> Int64Array:
        return self.whole.num_samples[self.rows]

    @override
    def stored_between(self, firsts: Int64Array, stops: Int64Array) -> Int64Array:
        return _stored_in_runs(self.whole, self.rows, firsts, stops)

    @override
    def over(self, whole: ChunkTable) -> Selection:
        return self.base.over(whole).every(self.step)

    @override
    def between(self, first: int, stop: int) -> Selection:
        low, high = first * self.step, (stop - 1) * self.step + 1
        return self.base.between(low, max(low, high)).every(self.step)

    @override
    def every(self, step: int) -> Selection:
        return self if step == 1 else self.base.every(self.step * step)

    @override
    def inside(self, rows: Int64Array, offsets: Int64Array) -> Int64Array:
        return self.leads[rows] + self.base.inside(self.at[rows], self.begins[rows] + offsets * self.step)

    @override
    def kept(self, shard: int, first: int, stop: int) -> npt.NDArray[np.bool_]:
        low, high = self.table.rows_of(shard)
        firsts = self.table.first_sample[low:high]
        low, high = (
            low + max(int(np.searchsorted(firsts, first, side="right")) - 1, 0),
            low + int(np.searchsorted(firsts, stop)),
        )
        numbers = self.samples(low, max(low, high))
        found = np.zeros(stop - first, np.bool_)
        found[numbers[(numbers >= first) & (numbers < stop)] - first] = True
        return found


class Kept:
    """The bits of all shards, shard after shard, each starting at a byte of its own; immutable.

    A bit has a *place* (its number among all bits) and, if it is set, a *rank* (the number of set bits before it).

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

    @property
    def total(self) -> int:
        """Number of kept samples."""
        return int(self._before[-1])

    @cached_property
    def digest(self) -> str:
        """Identifies this choice among all choices over the same shards; 32 hex digits."""
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
            # uint8 [m, _BLOCK]: the bits of each place's block, with the bits from the place on cleared.
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
            # [m, 8]: set bits of each rank's byte up to each bit; the number of these counts within `left` is the
            # place.
            bit = np.unpackbits(self._bits[blocks, byte][:, None], axis=1, bitorder="little").cumsum(axis=1)
            found[at : at + _AT_ONCE] = blocks * (8 * _BLOCK) + byte * 8 + (bit <= left[:, None]).sum(axis=1)
        return found

    def rows(self, shard: int, first: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return whether each of samples ``[first, stop)`` of a shard is kept, bool [n]."""
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
        found = [self._pieces(chunks, num_groups) for chunks in _blocks(table.num_chunks, num_groups)]
        # The pieces of chunks, sorted by group, then by chunk.
        chunks, groups, sizes = (np.concatenate([one[i] for one in found]) for i in range(3))
        by_group = np.argsort(groups, kind="stable")
        self._chunks, self._counts = chunks[by_group], sizes[by_group]
        self._borders: Int64Array = np.searchsorted(groups[by_group], np.arange(num_groups + 1))
        self.sizes: Int64Array = np.bincount(groups, sizes, num_groups).astype(np.int64)
        """int64 [num_groups], number of samples of each group."""

    @cached_property
    def digest(self) -> str:
        """Identifies these groups among all groupings of the same shards; 32 hex digits."""
        return hashlib.blake2b(self.codes.astype("<u2").tobytes(), digest_size=16).hexdigest()

    def selected(self, number: int, name: str) -> Member:
        """Return the samples of one group, whose identity is ``name``."""
        low, high = self._borders[number : number + 2].tolist()
        chunks, counts, total = self._chunks[low:high], self._counts[low:high], int(self.sizes[number])
        return Member(
            chunks=self.table, whole=self.table, groups=self, number=number, name=name, total=total, first=0,
            stop=total, table=self.table.rows(chunks, counts), rows=chunks, begins=np.cumsum(counts) - counts,
        )  # fmt: skip

    def _pieces(self, chunks: range, num_groups: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return chunk, group and number of samples of the pieces of some consecutive chunks."""
        sizes = self.table.num_samples[chunks.start : chunks.stop]
        first = int(self.shard_places[self.table.shard[chunks.start]] + self.table.first_sample[chunks.start])
        codes = self.codes[first : first + int(sizes.sum())].astype(np.int64)
        cells = np.repeat(np.arange(len(chunks)) * (num_groups + 1), sizes) + codes
        counts = np.bincount(cells, minlength=len(chunks) * (num_groups + 1))
        counts = counts.reshape(len(chunks), num_groups + 1)[:, :num_groups]
        at, group = np.nonzero(counts)
        return at + chunks.start, group, counts[at, group]


def _stored_in_runs(whole: ChunkTable, rows: Int64Array, firsts: Int64Array, stops: Int64Array) -> Int64Array:
    """Return the number of samples in the bytes between two of some rows of a table, int64 [n]."""
    before = sums(whole.num_samples)
    return before[rows[stops - 1] + 1] - before[rows[firsts]]


def _blocks(num_chunks: int, num_groups: int) -> list[range]:
    """Return ranges of chunks whose samples are counted at once."""
    step = max(_COUNTED_AT_ONCE // (num_groups + 1), 1)
    return [range(at, min(at + step, num_chunks)) for at in range(0, num_chunks, step)]


def _parts(bits: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
    return [bits[at : at + _AT_ONCE] for at in range(0, len(bits), _AT_ONCE)]
