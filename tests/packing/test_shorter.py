"""Packs in shorter rows: the same tokens, as few documents cut as the room allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.common.arrays import sums
from streaming.order.packing.layout import PackRows
from streaming.order.packing.shorter import shorter


def packs_of(*packs: list[int], multiple: int = 1) -> PackRows:
    """Packs of whole documents of these lengths; each document begins with a token of its own."""
    lengths = np.array([size for pack in packs for size in pack], np.int64)
    starts = np.arange(len(lengths)) * 1000
    return PackRows(
        splits=sums([len(pack) for pack in packs]), samples=np.arange(len(lengths)), starts=starts,
        stops=starts + lengths, lengths=starts + lengths, sources=np.arange(len(packs)),
    )  # fmt: skip


def rows_of(packs: PackRows) -> list[list[tuple[int, int, int]]]:
    pieces = list(zip(packs.samples.tolist(), packs.starts.tolist(), packs.stops.tolist(), strict=True))
    return [pieces[low:high] for low, high in zip(packs.splits[:-1], packs.splits[1:], strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[PackRows, int, int, int]:
    multiple, parts = draw(st.sampled_from((1, 1, 4))), draw(st.integers(1, 5))
    length = parts * multiple * draw(st.integers(1, 30))
    packs = []
    for _ in range(draw(st.integers(0, 3))):
        left, pack = length, []
        while left >= multiple and draw(st.integers(0, 9)):
            pack.append(draw(st.integers(1, left // multiple * multiple)))
            left -= -(-pack[-1] // multiple) * multiple
        packs.append(pack)
    return packs_of(*packs), length, parts, multiple


@given(cases())
def test_every_token_stands_in_one_row_and_rows_hold_what_fits(case: tuple[PackRows, int, int, int]) -> None:
    packs, length, parts, multiple = case
    found = shorter(packs, length, parts, multiple)
    assert found.num_packs == packs.num_packs * parts
    for number, pack in enumerate(rows_of(packs)):
        rows = rows_of(found)[number * parts : (number + 1) * parts]
        tokens = [(doc, token) for row in rows for doc, start, stop in row for token in range(start, stop)]
        assert sorted(tokens) == [(doc, token) for doc, start, stop in pack for token in range(start, stop)]
        for row in rows:
            assert sum(-(-(stop - start) // multiple) * multiple for _, start, stop in row) <= length // parts
            assert len({doc for doc, _, _ in row}) == len(row)
            assert all(stop > start for _, start, stop in row)
    assert found.sources is not None
    assert packs.sources is not None
    assert found.sources.tolist() == packs.sources.repeat(parts).tolist()
    assert set(zip(found.samples.tolist(), found.lengths.tolist(), strict=True)) == set(
        zip(packs.samples.tolist(), packs.lengths.tolist(), strict=True)
    )


@pytest.mark.parametrize(
    ("sizes", "parts", "due"),
    [
        ([3, 2, 4, 3], 1, [[(0, 0, 3), (1, 0, 2), (2, 0, 4), (3, 0, 3)]]),  # as it was
        ([3, 2, 4, 3], 2, [[(1, 0, 2), (2, 0, 4)], [(0, 0, 3), (3, 0, 3)]]),  # nothing is cut
        ([12], 3, [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 12)]]),
        ([1, 7, 1], 2, [[(0, 0, 1), (1, 0, 4), (2, 0, 1)], [(1, 4, 7)]]),  # the long one fills the room that is left
        ([2], 4, [[(0, 0, 2)], [], [], []]),  # a pack that is not full
    ],
)
def test_documents_stay_whole_where_they_fit(
    sizes: list[int], parts: int, due: list[list[tuple[int, int, int]]]
) -> None:
    rows = rows_of(shorter(packs_of(sizes), 12, parts))
    assert [[(doc, start - 1000 * doc, stop - 1000 * doc) for doc, start, stop in row] for row in rows] == due
