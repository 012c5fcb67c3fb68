"""Fill the arrays of batches of packs from memory, all tokens of a batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.arrays import sums
from streaming.packing.layout import IGNORED, NO_DOCUMENT, PackRows, PackShape
from streaming.packing.rules import rounded
from streaming.types import Int64Array

_LONG = 128
"""Tokens of a run, on average, from which on a copy of each costs less than a gather (benchmarks/bench_packs.py)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Cut the places of R packs, one after the other, into runs: one for each piece, one for each gap; none is empty.

    Lists have an entry for each pack and one more, so that what packs ``[low, high)`` have is the difference.

    Attributes:
        counts: int64[S], places of each run.
        begins: int64[S], first place of each run.
        documents: [S], number of the run's document in its pack; ``NO_DOCUMENT`` for gaps. Small integers.
        there: bool[n], pieces of which there are tokens: in order, they are the runs that are no gaps.
        runs: Runs before each pack.
        places: Places before each pack.
        tokens: Tokens before each pack.
        pieces: Pieces of which there are tokens, before each pack.
        filled: Packs that hold any token, before each pack.
        heads: int64[H], where documents and the padding behind them begin.
        head_splits: Of ``heads`` those before each pack.
        longest: Places of the longest document of each pack; padding is one.
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
        """R."""
        return len(self.runs) - 1

    def cu_seqlens(self, low: int, high: int, shape: PackShape) -> tuple[npt.NDArray[np.int32], int]:
        """Return where documents begin among the places of packs ``[low, high)``, and their number.

        The longest of them.
        """
        first, num_places = self.places[low], self.places[high] - self.places[low]
        heads = self.heads[self.head_splits[low] : self.head_splits[high]]
        fixed = None if shape.max_docs is None else (high - low) * (shape.max_docs + 1) + 1
        found = np.empty(fixed or len(heads) + 1, np.int32)
        np.subtract(heads, first, out=found[: len(heads)], casting="unsafe")
        found[len(heads) :] = num_places
        return found, max(self.longest[low:high], default=0) if fixed is None else shape.length


def segments_of(rows: PackRows, available: Int64Array, shape: PackShape, widths: Int64Array | None = None) -> Segments:
    """Lay out the pieces of which so many tokens are there, ``available`` int64[n], counted from the document's first.

    Pieces of a pack follow one another; what is left of its row is padding, a document of its own in ``cu_seqlens``.

    Args:
        rows: The packs.
        available: Tokens that the document of each piece has.
        shape: What a batch looks like.
        widths: int64[R], places of each pack; None: ``shape.length`` each.
    """
    num_packs, packs = rows.num_packs, rows.packs
    widths = np.full(num_packs, shape.length) if widths is None else widths
    taken = np.minimum(rows.stops, available)
    taken -= rows.starts
    np.maximum(taken, 0, out=taken)
    there = taken > 0  # a document that could not be read has no run, and so needs no number
    before = sums(there)
    numbers = before[:-1] - before[rows.splits[:-1]][packs]
    rooms = rounded(taken, shape.multiple)
    used = sums(rooms)[rows.splits]
    # A run for each piece, one for the gap up to its room where there can be any, and one for the rest of each row, in
    # order of places.
    step = 1 if shape.multiple == 1 else 2
    pieces = step * np.arange(len(taken)) + packs
    rests = step * rows.splits[1:] + np.arange(num_packs)
    counts = np.zeros(step * len(taken) + num_packs, np.int64)
    counts[pieces], counts[rests] = taken, widths - np.diff(used)
    heads = np.ones(len(counts), np.bool_)
    if step > 1:
        counts[pieces + 1], heads[pieces + 1] = rooms - taken, False
    # Repeated as the smallest numbers that hold them: a quarter of the memory traffic.
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
    """Say where in memory what fills the runs lies; of gaps it means nothing.

    Attributes:
        dtype: Of an item.
        memory: Memory, as bytes or, to be gathered from, as items.
        firsts: First byte of each run, or int64[S], its first item.
        stops: One past its last byte; empty where runs are gathered.
    """

    dtype: np.dtype[Any]
    memory: memoryview | npt.NDArray[Any]
    firsts: list[int] | Int64Array
    stops: list[int]


class Filler:
    """Write the entries of batches of packs.

    Where runs are long, they are copied one by one in a single call; short ones are gathered place by place.

    Args:
        view: Memory in which the documents lie.
        rows: The packs.
        segments: How they are laid out.
        shape: What a batch looks like.
    """

    def __init__(self, view: memoryview, rows: PackRows, segments: Segments, shape: PackShape) -> None:
        self._view, self._rows, self._segments, self._shape = view, rows, segments, shape
        is_gap = segments.documents == NO_DOCUMENT
        self._gaps = np.flatnonzero(is_gap)
        self._gap_splits = np.searchsorted(self._gaps, segments.runs).tolist()
        self._gap_begins = segments.begins[self._gaps].tolist()
        self._gap_counts = segments.counts[self._gaps].tolist()
        self._pieces = np.flatnonzero(~is_gap)
        self._piece_begins = segments.begins[self._pieces]
        there = segments.there
        is_later = rows.starts[there] > 0  # a window behind another one of its document
        self._stale_counts = np.minimum(is_later * shape.stale, segments.counts[self._pieces])
        self._copies_runs = segments.places[-1] > _LONG * len(is_gap)
        # Places are counted modulo 2**16 where no document is longer: a quarter of the memory traffic.
        self._count = np.dtype(np.uint16 if max(segments.longest, default=0) <= 1 << 16 else np.int64)
        self._counted_begins = segments.begins.astype(self._count)

    def find(self, starts: Int64Array, dtype: str | np.dtype[Any]) -> FoundItems:
        """Find what fills the runs, of documents whose items begin at bytes ``starts``, int64[n]."""
        item, segments, there = np.dtype(dtype), self._segments, self._segments.there
        size, counts = item.itemsize, segments.counts
        starts = np.where(there, starts, 0)
        firsts = np.zeros(len(counts), np.int64)
        longest = int(counts.max(initial=0)) * size
        view = self._view
        if self._copies_runs:
            firsts[self._pieces] = (starts + size * self._rows.starts)[there]
            if len(view) < longest:  # nothing but a gap is longer than all there is
                view = memoryview(bytes(view) + bytes(longest))
            return FoundItems(dtype=item, memory=view, firsts=firsts.tolist(), stops=(firsts + size * counts).tolist())
        if (starts % size).any():  # documents begin at multiples of 512 in any tar; what does not is laid anew
            view, starts = self._laid_anew(starts, size)
        data = np.frombuffer(view, item, len(view) // size)
        firsts[self._pieces] = (starts // size + self._rows.starts)[there]
        firsts -= segments.begins
        return FoundItems(dtype=item, memory=data if len(data) else np.zeros(1, item), firsts=firsts, stops=[])

    def input_ids(
        self, starts: Int64Array | FoundItems, out: npt.NDArray[np.int64], low: int = 0, high: int = -1
    ) -> npt.NDArray[Any]:
        """Write the tokens of packs ``[low, high)``, all by default, into ``out`` [places].

        ``starts`` int64[n]: the bytes with which documents begin, or what was found of them.

        Returns:
            The same as they were read, [places]: smaller numbers, from which ``labels`` are made in less time.
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
        """Write the place of each token in its piece; padding counts on from where it begins, on its own."""
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
        """Write what each place is to predict, or is predicted as; ``masks`` int64[n]: first byte of each mask.

        ``input_ids`` are those of the packs, or what ``input_ids`` returned.

        Returns:
            How many of them bear loss.
        """
        low, high = self._span(low, high)
        shape, segments = self._shape, self._segments
        shift = int(shape.shift_labels)  # all that follows is written so many places further ahead
        labels = out[: max(len(out) - shift, 0)]
        labels[:] = input_ids[shift:]
        if masks is not None:
            found = masks if isinstance(masks, FoundItems) else self.find(masks, np.dtype(np.uint8))
            labels[self._items(found, low, high)[shift:] == 0] = IGNORED
        self._fill_gaps(out, IGNORED, low, high, shift)
        first_piece, last_piece = segments.pieces[low], segments.pieces[high]
        before = segments.places[low] + shift
        if not shape.labels_across:  # nothing is predicted from another document; that of place -1 is ignored, too
            out[self._piece_begins[first_piece:last_piece] - before] = IGNORED
        if shape.stale:
            counts = self._stale_counts[first_piece:last_piece]
            begins = self._piece_begins[first_piece:last_piece] - before + counts - np.cumsum(counts)
            out[begins.repeat(counts) + np.arange(counts.sum())] = IGNORED
        if shift and high > low:
            out.reshape(high - low, -1)[:, -1] = IGNORED
        if masks is not None or shape.stale:
            return int(np.count_nonzero(out != IGNORED))
        # Every token but those that begin a document; a shift alone loses the first of each row.
        lost = last_piece - first_piece if not shape.labels_across else 0
        if shape.labels_across and shape.shift_labels:
            lost = segments.filled[high] - segments.filled[low]
        return segments.tokens[high] - segments.tokens[low] - lost

    def _span(self, low: int, high: int) -> tuple[int, int]:
        return low, self._segments.num_packs if high < 0 else high

    def _runs(self, low: int, high: int) -> slice:
        return slice(self._segments.runs[low], self._segments.runs[high])

    def _fill_gaps(self, out: npt.NDArray[np.int64], value: int, low: int, high: int, shift: int = 0) -> None:
        """Write ``value`` to the gaps of packs ``[low, high)``, ``shift`` places ahead of where they are."""
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
        """Return an item for each place of packs ``[low, high)``; those of gaps mean nothing."""
        runs, memory = self._runs(low, high), found.memory
        if isinstance(memory, memoryview):
            cuts = map(slice, found.firsts[runs], found.stops[runs])
            return np.frombuffer(b"".join(map(memory.__getitem__, cuts)), found.dtype)
        firsts = np.asarray(found.firsts[runs]) + self._segments.places[low]
        wanted = firsts.repeat(self._segments.counts[runs])
        wanted += _places(len(wanted), wanted.dtype)
        return memory.take(wanted, mode="clip")

    def _laid_anew(self, starts: Int64Array, size: int) -> tuple[memoryview, Int64Array]:
        """Return the documents that are there one after the other, and the byte at which each begins."""
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
