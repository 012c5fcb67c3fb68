"""Fill the arrays of a batch of packs from memory, all of its tokens at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.packing.layout import IGNORED, NO_DOCUMENT, PackRows, PackShape
from streaming.packing.rules import rounded
from streaming.types import Int64Array

_LONG = 128
"""Tokens of a run, on average, from which on a copy of each costs less than a gather (benchmarks/bench_packs.py)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Cut the B * T places of a batch, row after row, into runs: one for each piece, one for each gap; none is empty.

    Attributes:
        counts: int64[S], places of each run.
        begins: int64[S], first place of each run.
        documents: int64[S], number of the run's document in its pack; ``NO_DOCUMENT`` for gaps.
        there: bool[n], pieces of which there are tokens: in order, they are the runs that are no gaps.
        taken: int64[n], tokens of each piece that there are.
        cu_seqlens: int32[m], where documents begin among the places, and their number.
        longest: Places of the longest document.
        num_filled: Packs that hold any token.
    """

    counts: Int64Array
    begins: Int64Array
    documents: Int64Array
    there: npt.NDArray[np.bool_]
    taken: Int64Array
    cu_seqlens: npt.NDArray[np.int32]
    longest: int
    num_filled: int


def segments_of(rows: PackRows, available: Int64Array, shape: PackShape) -> Segments:
    """Lay out the pieces of which so many tokens are there, ``available`` int64[n], counted from the document's first.

    Pieces of a pack follow one another; what is left of its row is padding, a document of its own in ``cu_seqlens``.
    """
    num_packs, packs = rows.num_packs, rows.packs
    taken = np.minimum(rows.stops, available)
    taken -= rows.starts
    np.maximum(taken, 0, out=taken)
    there = taken > 0  # a document that could not be read has no number
    before = _sums(there)
    numbers = before[:-1] - before[rows.splits[:-1]][packs]
    numbers[~there] = NO_DOCUMENT
    rooms = rounded(taken, shape.multiple)
    used = _sums(rooms)[rows.splits]
    # Two runs a piece (its tokens, the gap up to its room) and one a pack (the rest of the row), in order of places.
    pieces = 2 * np.arange(len(taken)) + packs
    rests = 2 * rows.splits[1:] + np.arange(num_packs)
    counts = np.empty(2 * len(taken) + num_packs, np.int64)
    counts[pieces], counts[pieces + 1], counts[rests] = taken, rooms - taken, shape.length - np.diff(used)
    documents = np.full(len(counts), NO_DOCUMENT)
    documents[pieces] = numbers
    heads = np.ones(len(counts), np.bool_)
    heads[pieces + 1] = False
    runs = np.flatnonzero(counts)
    counts, documents, heads = counts[runs], documents[runs], heads[runs]
    begins = np.cumsum(counts) - counts
    cu_seqlens = np.append(begins[heads], num_packs * shape.length)
    longest = int(np.diff(cu_seqlens).max(initial=0))
    if shape.max_docs is not None:  # each pack may have so many, and padding
        fixed = np.full(num_packs * (shape.max_docs + 1) + 1, num_packs * shape.length)
        fixed[: len(cu_seqlens)] = cu_seqlens
        cu_seqlens, longest = fixed, shape.length
    return Segments(
        counts=counts, begins=begins, documents=documents, there=there, taken=taken,
        cu_seqlens=cu_seqlens.astype(np.int32), longest=longest, num_filled=int(np.count_nonzero(np.diff(used))),
    )  # fmt: skip


def _sums(values: npt.NDArray[Any]) -> Int64Array:
    """Sum of all values before each, and of all; int64[n + 1]."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


class Filler:
    """Write the entries of one batch of packs.

    Where runs are long, they are copied one by one in a single call; short ones are gathered place by place.

    Args:
        view: Memory in which the documents lie.
        rows: The packs.
        segments: How they are laid out.
        shape: What the batch looks like.
    """

    def __init__(self, view: memoryview, rows: PackRows, segments: Segments, shape: PackShape) -> None:
        self._view, self._rows, self._segments, self._shape = view, rows, segments, shape
        self._places = _places(rows.num_packs * shape.length)
        is_gap = segments.documents == NO_DOCUMENT
        self._pieces, self._gaps = np.flatnonzero(~is_gap), np.flatnonzero(is_gap)
        self._has_long_runs = len(self._places) > _LONG * len(is_gap)

    def input_ids(self, starts: Int64Array, out: npt.NDArray[np.int64]) -> None:
        """Write the tokens of documents that begin at bytes ``starts``, int64[n], into ``out`` [B * T]."""
        out[:] = self._gathered(starts, np.dtype(self._shape.dtype))
        self._fill_gaps(out, self._shape.pad_id)

    def document_ids(self, out: npt.NDArray[np.int64]) -> None:
        """Write the number of each token's document within its pack."""
        # Repeated as the smallest numbers that hold them, then cast: a quarter of the memory traffic.
        numbers = self._segments.documents.astype(np.min_scalar_type(-self._shape.length))
        out[:] = numbers.repeat(self._segments.counts)

    def position_ids(self, out: npt.NDArray[np.int64]) -> None:
        """Write the place of each token in its piece; padding counts on from where it begins, on its own."""
        segments = self._segments
        if self._has_long_runs:
            np.concatenate([self._places[:count] for count in segments.counts.tolist()], out=out)
        else:
            np.subtract(self._places, segments.begins.repeat(segments.counts), out=out)

    def labels(self, input_ids: npt.NDArray[np.int64], masks: Int64Array | None, out: npt.NDArray[np.int64]) -> int:
        """Write what each place is to predict, or is predicted as; ``masks`` int64[n]: first byte of each mask.

        Returns:
            How many of them bear loss.
        """
        shape, segments = self._shape, self._segments
        out[:] = input_ids
        if masks is not None:
            out[self._gathered(masks, np.dtype(np.uint8)) == 0] = IGNORED
        self._fill_gaps(out, IGNORED)
        if not shape.labels_across:  # nothing is predicted from another document
            out[segments.begins[self._pieces]] = IGNORED
        if shape.shift_labels:
            rows = out.reshape(-1, shape.length)
            rows[:, :-1] = rows[:, 1:]
            rows[:, -1:] = IGNORED
        if masks is not None:
            return int(np.count_nonzero(out != IGNORED))
        # Every token but those that begin a document; a shift alone loses the first of each row.
        lost = len(self._pieces) if not shape.labels_across else segments.num_filled if shape.shift_labels else 0
        return int(segments.taken.sum()) - lost

    def _fill_gaps(self, out: npt.NDArray[np.int64], value: int) -> None:
        segments = self._segments
        if len(self._gaps) > 4 * self._rows.num_packs:
            out[(segments.documents == NO_DOCUMENT).repeat(segments.counts)] = value
            return
        begins, counts = segments.begins[self._gaps], segments.counts[self._gaps]
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            out[begin : begin + count] = value

    def _gathered(self, starts: Int64Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An item for each place, [B * T]; those of gaps mean nothing."""
        counts = self._segments.counts
        data, begins = self._items(starts, dtype)
        firsts = np.zeros(len(counts), np.int64)  # item with which each run begins; gaps may have any
        firsts[self._pieces] = (begins // dtype.itemsize + self._rows.starts)[self._segments.there]
        longest = int(counts.max(initial=0))
        if len(data) < longest:  # nothing but a gap is longer than all there is
            data = np.concatenate([data, np.zeros(longest, dtype)])
        if self._has_long_runs:
            runs = zip(firsts.tolist(), (firsts + counts).tolist(), strict=True)
            return np.concatenate([data[first:stop] for first, stop in runs])
        firsts -= self._segments.begins
        wanted = firsts.repeat(counts)
        wanted += self._places
        return data.take(wanted, mode="clip")

    def _items(self, starts: Int64Array, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], Int64Array]:
        """The memory as items, and the byte at which each document begins in it."""
        size, there = dtype.itemsize, self._segments.there
        starts = np.where(there, starts, 0)
        if not (starts % size).any():
            return np.frombuffer(self._view, dtype, len(self._view) // size), starts
        # Documents begin at multiples of 512 in any tar; what does not is laid anew.
        copied, moved = bytearray(), np.zeros_like(starts)
        stops = starts + (self._rows.starts + self._segments.taken) * size
        for piece in np.flatnonzero(there).tolist():
            moved[piece] = len(copied)
            copied += self._view[int(starts[piece]) : int(stops[piece])]
        return np.frombuffer(bytes(copied), dtype), moved


@lru_cache(maxsize=4)
def _places(count: int) -> Int64Array:
    places = np.arange(count)
    places.setflags(write=False)
    return places
