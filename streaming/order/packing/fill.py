"""Fill the arrays of batches of packs from memory, all tokens of a batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import sums
from streaming.order.packing.layout import NO_DOCUMENT, PackRows, PackShape
from streaming.order.packing.rules import rounded
from streaming.types import Int64Array

_LONG = 128
"""Mean tokens per run above which copying each run is faster than gathering (benchmarks/bench_packs.py)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """The token positions of R consecutive packs, divided into non-empty runs: one per piece and one per gap.

    Lists have R + 1 entries, so that differences give the values of packs ``[low, high)``.

    Attributes:
        counts: int64 [S], positions of each run.
        begins: int64 [S], first position of each run.
        documents: [S], number of the run's document in its pack; ``NO_DOCUMENT`` for gaps. Small integers.
        there: bool [n], whether the tokens of a piece are available; such pieces are the runs that are not gaps, in
            order.
        runs: Number of runs before each pack.
        places: Number of positions before each pack.
        tokens: Number of tokens before each pack.
        pieces: Number of available pieces before each pack.
        filled: Number of packs with any token before each pack.
        heads: int64 [H], positions at which documents begin, and the padding after them.
        head_splits: Number of ``heads`` before each pack.
        longest: Length of the longest document of each pack; padding counts as one.
    """

    counts: Int64Array
    begins: Int64Array
    documents: npt.NDArray[np.signedinteger[Any]]
    there: npt.NDArray[np.bool_]
    runs: list[int]
    places: list[int]
    tokens: list[int]
    pieces: list[int]
    filled: list[int]
    heads: Int64Array
    head_splits: list[int]
    longest: list[int]

    @property
    def num_packs(self) -> int:
        """Number of packs, R."""
        return len(self.runs) - 1

    def cu_seqlens(self, low: int, high: int, shape: PackShape) -> tuple[npt.NDArray[np.int32], int]:
        """Return the document offsets among the positions of packs ``[low, high)``, and the longest length.

        With ``max_docs``, both are static: offsets are filled up with the end, and the length is that of a pack.
        """
        first, num_places = self.places[low], self.places[high] - self.places[low]
        heads = self.heads[self.head_splits[low] : self.head_splits[high]]
        fixed = None if shape.max_docs is None else (high - low) * (shape.max_docs + 1) + 1
        found = np.empty(fixed or len(heads) + 1, np.int32)
        np.subtract(heads, first, out=found[: len(heads)], casting="unsafe")
        found[len(heads) :] = num_places
        return found, max(self.longest[low:high], default=0) if fixed is None else shape.length


def segments_of(rows: PackRows, available: Int64Array, shape: PackShape, widths: Int64Array | None = None) -> Segments:
    """Lay out the pieces of packs, given the number of available tokens of each document.

    The pieces of a pack follow each other; the rest of its row is padding, which counts as a document in
    ``cu_seqlens``.

    Args:
        rows: The packs.
        available: int64 [n], number of available tokens of each piece's document, from its first token on.
        shape: The shape of a batch.
        widths: int64 [R], positions of each pack; None: ``shape.length`` each.
    """
    num_packs, packs = rows.num_packs, rows.packs
    widths = np.full(num_packs, shape.length) if widths is None else widths
    taken = np.minimum(rows.stops, available)
    taken -= rows.starts
    np.maximum(taken, 0, out=taken)
    there = taken > 0  # a document that could not be read has no run, and needs no number
    before = sums(there)
    numbers = before[:-1] - before[rows.splits[:-1]][packs]
    rooms = rounded(taken, shape.multiple)
    used = sums(rooms)[rows.splits]
    # By position: a run per piece, one for the gap after it if there can be one, and one for the rest of each row.
    step = 1 if shape.multiple == 1 else 2
    pieces = step * np.arange(len(taken)) + packs
    rests = step * rows.splits[1:] + np.arange(num_packs)
    counts = np.zeros(step * len(taken) + num_packs, np.int64)
    counts[pieces], counts[rests] = taken, widths - np.diff(used)
    heads = np.ones(len(counts), np.bool_)
    if step > 1:
        counts[pieces + 1], heads[pieces + 1] = rooms - taken, False
    # These will be repeated, so they have the smallest integer type that fits: a quarter of the memory traffic.
    documents = np.full(len(counts), NO_DOCUMENT, np.min_scalar_type(-int(widths.max(initial=1))))
    documents[pieces] = numbers
    runs = np.flatnonzero(counts)
    counts, documents, heads = counts[runs], documents[runs], heads[runs]
    begins = np.cumsum(counts) - counts
    places = sums(widths)
    run_splits = np.searchsorted(begins, places)
    head_begins = begins[heads]
    head_splits = sums(heads)[run_splits]
    sizes = np.diff(head_begins, append=places[-1:])
    longest = np.maximum.reduceat(sizes, head_splits[:-1]).tolist() if num_packs else []
    return Segments(
        counts=counts, begins=begins, documents=documents, there=there, runs=run_splits.tolist(),
        places=places.tolist(), tokens=sums(taken)[rows.splits].tolist(), pieces=before[rows.splits].tolist(),
        filled=sums(np.diff(used) > 0).tolist(), heads=head_begins, head_splits=head_splits.tolist(), longest=longest,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundItems:
    """The locations in memory of the items that fill the runs; values of gaps are meaningless.

    Attributes:
        dtype: Type of an item.
        memory: Memory, as bytes or, for gathering, as items.
        firsts: First byte of each run, or int64 [S], its first item.
        stops: End byte (exclusive) of each run; [] if items are gathered.
    """

    dtype: np.dtype[Any]
    memory: memoryview | npt.NDArray[Any]
    firsts: list[int] | Int64Array
    stops: list[int]


class Filler:
    """Write the entries of batches of packs.

    Long runs are copied, each by one call; short runs are gathered position by position.

    Args:
        view: Memory that holds the documents.
        rows: The packs.
        segments: Their layout.
        shape: The shape of a batch.
        unmasked: bool [n], the pieces whose documents have no loss mask: all their tokens count; None: none.
    """

    def __init__(
        self, view: memoryview, rows: PackRows, segments: Segments, shape: PackShape,
        unmasked: npt.NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        self._view, self._rows, self._segments, self._shape = view, rows, segments, shape
        is_gap = segments.documents == NO_DOCUMENT
        self._gaps = np.flatnonzero(is_gap)
        self._gap_splits = np.searchsorted(self._gaps, segments.runs).tolist()
        self._gap_begins = segments.begins[self._gaps].tolist()
        self._gap_counts = segments.counts[self._gaps].tolist()
        self._pieces = np.flatnonzero(~is_gap)
        self._piece_begins = segments.begins[self._pieces]
        # Pieces whose first token is not predicted: all, or those that begin a row.
        self._alone, self._alone_splits = self._piece_begins, segments.pieces
        if shape.labels_across:
            self._is_first = segments.documents[self._pieces] == 0
            self._alone, self._alone_splits = self._piece_begins[self._is_first], segments.filled
        there = segments.there
        self._unmasked: npt.NDArray[np.bool_] | None = None  # [S]
        if unmasked is not None:
            self._unmasked = np.zeros(len(is_gap), np.bool_)
            self._unmasked[self._pieces] = unmasked[there]
        is_later = rows.starts[there] > 0  # a window after another window of its document
        self._stale_counts = np.minimum(is_later * shape.stale, segments.counts[self._pieces])
        self._copies_runs = segments.places[-1] > _LONG * len(is_gap)
        # Positions are counted modulo 2**16 if no document is longer: a quarter of the memory traffic.
        self._count = np.dtype(np.uint16 if max(segments.longest, default=0) <= 1 << 16 else np.int64)
        self._counted_begins = segments.begins.astype(self._count)

    def find(self, starts: Int64Array, dtype: str | np.dtype[Any]) -> FoundItems:
        """Locate the items that fill the runs, for documents whose items begin at bytes ``starts``, int64 [n]."""
        item, segments, there = np.dtype(dtype), self._segments, self._segments.there
        size, counts = item.itemsize, segments.counts
        starts = np.where(there, starts, 0)
        firsts = np.zeros(len(counts), np.int64)
        longest = int(counts.max(initial=0)) * size
        view = self._view
        if self._copies_runs:
            firsts[self._pieces] = (starts + size * self._rows.starts)[there]
            if len(view) < longest:  # only a gap can be longer than all available bytes
                view = memoryview(bytes(view) + bytes(longest))
            return FoundItems(dtype=item, memory=view, firsts=firsts.tolist(), stops=(firsts + size * counts).tolist())
        if (starts % size).any():  # in a tar, documents begin at multiples of 512; misaligned ones are copied
            view, starts = self._aligned(starts, size)
        data = np.frombuffer(view, item, len(view) // size)
        firsts[self._pieces] = (starts // size + self._rows.starts)[there]
        firsts -= segments.begins
        return FoundItems(dtype=item, memory=data if len(data) else np.zeros(1, item), firsts=firsts, stops=[])

    def input_ids(
        self, starts: Int64Array | FoundItems, out: npt.NDArray[np.int64], low: int = 0, high: int = -1
    ) -> npt.NDArray[Any]:
        """Write the tokens of packs ``[low, high)`` (by default all) into ``out`` [positions].

        ``starts`` int64 [n]: the first bytes of the documents, or the result of ``find``.

        Returns:
            The same tokens in the type in which they were read, [positions]; ``labels`` is faster with these.
        """
        low, high = self._span(low, high)
        found = starts if isinstance(starts, FoundItems) else self.find(starts, self._shape.dtype)
        items = self._items(found, low, high)
        out[:] = items
        self._fill_gaps(out, self._shape.pad_id, low, high)
        return items

    def document_ids(self, out: npt.NDArray[np.int64], low: int = 0, high: int = -1) -> None:
        """Write the number of each token's document within its pack."""
        runs = self._runs(*self._span(low, high))
        out[:] = self._segments.documents[runs].repeat(self._segments.counts[runs])

    def position_ids(self, out: npt.NDArray[np.int64], low: int = 0, high: int = -1) -> None:
        """Write the position of each token in its piece; padding counts from its own beginning."""
        low, high = self._span(low, high)
        runs, first = self._runs(low, high), self._segments.places[low]
        begins = self._counted_begins[runs] - self._count.type(first % 2 ** (8 * self._count.itemsize))
        positions = begins.repeat(self._segments.counts[runs])
        np.subtract(_places(len(out), self._count), positions, out=positions)
        out[:] = positions

    def labels(
        self, input_ids: npt.NDArray[Any], masks: Int64Array | FoundItems | None, out: npt.NDArray[np.int64],
        low: int = 0, high: int = -1,
    ) -> int:  # fmt: skip
        """Write the label of each position; ``masks`` int64 [n]: first byte of each loss mask.

        ``input_ids`` are the tokens of the packs, or the result of the method ``input_ids``.

        Returns:
            The number of labels that contribute to the loss.
        """
        low, high = self._span(low, high)
        shape, segments, ignored = self._shape, self._segments, self._shape.ignore_id
        shift = int(shape.shift_labels)  # all labels below are written this many positions earlier
        labels = out[: max(len(out) - shift, 0)]
        labels[:] = input_ids[shift:]
        if masks is not None:
            found = masks if isinstance(masks, FoundItems) else self.find(masks, np.dtype(np.uint8))
            labels[self._without_loss(found, low, high)[shift:]] = ignored
        self._fill_gaps(out, ignored, low, high, shift)
        before = segments.places[low] + shift
        alone = slice(self._alone_splits[low], self._alone_splits[high])
        out[self._alone[alone] - before] = ignored  # with a shift, position -1, the end of a row, has no loss
        if shape.stale:
            span = self._pieces_of(low, high)
            counts = self._stale_counts[span]
            begins = self._piece_begins[span] - before + counts - np.cumsum(counts)
            out[begins.repeat(counts) + np.arange(counts.sum())] = ignored
        if shape.labels_across and shift and shape.multiple > 1:
            self._lead_over_gaps(out, low, high)
        if shift and high > low:
            out.reshape(high - low, -1)[:, -1] = ignored
        if masks is not None or shape.stale:
            return int(np.count_nonzero(out != ignored))
        return segments.tokens[high] - segments.tokens[low] - (alone.stop - alone.start)

    def _without_loss(self, masks: FoundItems, low: int, high: int) -> npt.NDArray[np.bool_]:
        """Return which tokens the masks exclude, by position."""
        excluded: npt.NDArray[np.bool_] = self._items(masks, low, high) == 0
        if self._unmasked is not None:
            runs = self._runs(low, high)
            excluded &= ~self._unmasked[runs].repeat(self._segments.counts[runs])
        return excluded

    def _lead_over_gaps(self, out: npt.NDArray[np.int64], low: int, high: int) -> None:
        """Move the labels of first tokens from the gap before them to the last token of the previous piece."""
        span, first = self._pieces_of(low, high), self._segments.places[low]
        begins = self._piece_begins[span] - first
        ends = begins + self._segments.counts[self._pieces[span]]
        later = np.flatnonzero(~self._is_first[span])
        later = later[begins[later] > ends[later - 1]]
        at = begins[later] - 1
        out[ends[later - 1] - 1] = out[at]
        out[at] = self._shape.ignore_id

    def _pieces_of(self, low: int, high: int) -> slice:
        return slice(self._segments.pieces[low], self._segments.pieces[high])

    def _span(self, low: int, high: int) -> tuple[int, int]:
        return low, self._segments.num_packs if high < 0 else high

    def _runs(self, low: int, high: int) -> slice:
        return slice(self._segments.runs[low], self._segments.runs[high])

    def _fill_gaps(self, out: npt.NDArray[np.int64], value: int, low: int, high: int, shift: int = 0) -> None:
        """Write ``value`` to the gaps of packs ``[low, high)``, ``shift`` positions earlier."""
        first, last = self._gap_splits[low], self._gap_splits[high]
        if last - first > 4 * (high - low):
            runs = self._runs(low, high)
            is_gap = (self._segments.documents[runs] == NO_DOCUMENT).repeat(self._segments.counts[runs])
            out[: len(out) - shift][is_gap[shift:]] = value
            return
        before = self._segments.places[low] + shift
        for begin, count in zip(self._gap_begins[first:last], self._gap_counts[first:last], strict=True):
            out[max(begin - before, 0) : begin - before + count] = value

    def _items(self, found: FoundItems, low: int, high: int) -> npt.NDArray[Any]:
        """Return the item of each position of packs ``[low, high)``; items of gaps are meaningless."""
        runs, memory = self._runs(low, high), found.memory
        if isinstance(memory, memoryview):
            cuts = map(slice, found.firsts[runs], found.stops[runs])
            return np.frombuffer(b"".join(map(memory.__getitem__, cuts)), found.dtype)
        firsts = np.asarray(found.firsts[runs]) + self._segments.places[low]
        wanted = firsts.repeat(self._segments.counts[runs])
        wanted += _places(len(wanted), wanted.dtype)
        return memory.take(wanted, mode="clip")

    def _aligned(self, starts: Int64Array, size: int) -> tuple[memoryview, Int64Array]:
        """Copy the available documents end to end; return the copy, and the byte at which each document begins."""
        copied, moved = bytearray(), np.zeros_like(starts)
        stops = starts + self._rows.stops * size
        for piece in np.flatnonzero(self._segments.there).tolist():
            moved[piece] = len(copied)
            copied += self._view[int(starts[piece]) : int(stops[piece])]
        return memoryview(bytes(copied)), moved


@lru_cache(maxsize=8)
def _places(count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    places = np.arange(count).astype(dtype)
    places.setflags(write=False)
    return places
