"""What ``Filler`` writes is what a loop over tokens writes, and the labels that it counts are those that bear loss."""

from __future__ import annotations

import sys
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from streaming.order.packing.fill import Filler, Segments, segments_of
from streaming.order.packing.layout import PackRows, PackShape

CHOICES = list(product((False, True), (False, True), (1, 4), (False, True)))


def packs_of(splits: list[int], starts: list[int], stops: list[int], lengths: list[int]) -> PackRows:
    samples = np.arange(len(starts))
    return PackRows(
        splits=np.array(splits), samples=samples, starts=np.array(starts), stops=np.array(stops),
        lengths=np.array(lengths),
    )  # fmt: skip


@pytest.mark.parametrize(("shift", "across", "multiple", "masked"), CHOICES)
def test_counts_labels(shift: bool, across: bool, multiple: int, masked: bool) -> None:
    lengths = np.array([16, 3, 5, 0, 8, 7, 1])
    tokens = np.arange(100, 100 + lengths.sum()).astype("<u2")
    mask = np.arange(lengths.sum()).astype(np.uint8) % 3
    before = np.cumsum(lengths) - lengths
    rows = packs_of([0, 1, 4, 5, 7], [0] * 7, lengths.tolist(), lengths.tolist())
    shape = PackShape(
        length=16, field="tok", dtype="<u2", shift_labels=shift, labels_across=across, multiple=multiple, ignore_id=-1
    )
    available = lengths.copy()
    available[[1, 4]] = 0  # cannot be read: one of a pack's documents, and all that a pack has
    filler = Filler(memoryview(tokens.tobytes() + mask.tobytes()), rows, segments_of(rows, available, shape), shape)
    input_ids, labels = np.empty(64, np.int64), np.empty(64, np.int64)
    filler.input_ids(2 * before, input_ids)
    count = filler.labels(input_ids, tokens.nbytes + before if masked else None, labels)
    assert count == np.count_nonzero(labels != -1)
    assert 0 < count <= available.sum()


def test_packs_that_are_kept_say_what_they_take() -> None:
    kept = packs_of(list(range(301)), [0] * 300, [1] * 300, [1] * 300).kept()
    taken = kept.pieces.nbytes + sys.getsizeof(kept.splits) + sum(map(sys.getsizeof, kept.splits))
    assert taken <= kept.num_bytes <= 1.2 * taken


WRITTEN = {
    # Pieces of each pack as (document, first token, one past the last), tokens that each document has, and what else.
    "documents that begin at odd bytes": ([[(0, 0, 5), (1, 0, 3)], [(2, 0, 7)]], [5, 3, 7], {"length": 8}),
    "longer gaps than there is memory": ([[(0, 0, 5)], [(1, 0, 2)]], [5, 2], {"length": 2000, "pad_id": 9}),
    "many gaps": ([[(n, 0, 1 + n % 3) for n in range(12)]], [1 + n % 3 for n in range(12)],
                  {"length": 64, "multiple": 4, "pad_id": 9}),
    "a document beyond 16 bits": ([[(0, 0, 9)], [(1, 0, 70_000), (2, 0, 9)]], [9, 70_000, 9], {"length": 70_020}),
    "windows that overlap by most": ([[(0, 0, 8)], [(0, 2, 10)], [(0, 4, 12), (1, 0, 3)]], [12, 3],
                                     {"length": 11, "stale": 6}),
    "a window shorter than planned": ([[(0, 0, 8), (1, 0, 8)], [(0, 4, 12), (2, 0, 3)]], [6, 8, 3],
                                      {"length": 16, "stale": 4}),
    "a window beyond what there is": ([[(0, 0, 8)], [(0, 4, 12), (1, 0, 3)]], [3, 3], {"length": 12, "stale": 2}),
    "one that cannot be read": ([[(0, 0, 3), (1, 0, 3), (2, 0, 2)], [(3, 0, 4)]], [3, 0, 2, 0], {"length": 9}),
}  # fmt: skip


@pytest.mark.parametrize(("case", "shift"), [*product(WRITTEN, (False, True))])
def test_writes_what_a_loop_writes(case: str, shift: bool) -> None:
    """All packs at once and each alone; windows behind their first one bear no loss where they overlap."""
    packs, available, options = WRITTEN[case]
    shape = PackShape(field="tok", dtype="<u2", shift_labels=shift, ignore_id=-1 if shift else -100, **options)
    tokens = [(1000 * n + np.arange(count)) % 2**16 for n, count in enumerate(available)]
    memory = b"?" + b"".join(one.astype("<u2").tobytes() for one in tokens)
    begins = 1 + 2 * (np.cumsum(available) - available)
    pieces = [piece for pack in packs for piece in pack]
    documents = np.array([document for document, *_ in pieces])
    rows = packs_of(
        np.cumsum([0, *map(len, packs)]).tolist(), *([one[at] for one in pieces] for at in (1, 2, 2))
    )  # fmt: skip
    segments = segments_of(rows, np.array(available)[documents], shape)
    filler = Filler(memoryview(memory), rows, segments, shape)
    for low, high in [(0, len(packs)), *pairwise(range(len(packs) + 1))]:
        expected = _written(packs[low:high], tokens, shape)
        got: dict[str, Any] = {name: np.empty((high - low) * shape.length, np.int64) for name in expected["arrays"]}
        ids = filler.input_ids(begins[documents], got["input_ids"], low, high)
        count = filler.labels(ids, None, got["labels"], low, high)
        filler.position_ids(got["position_ids"], low, high)
        filler.document_ids(got["document_ids"], low, high)
        for name, written in expected["arrays"].items():
            assert got[name].tolist() == written, name
        assert count == np.count_nonzero(got["labels"] != shape.ignore_id)
        assert _borders(segments, low, high, shape) == (expected["cu_seqlens"], max(np.diff(expected["cu_seqlens"])))


def _borders(segments: Segments, low: int, high: int, shape: PackShape) -> tuple[list[int], int]:
    borders, longest = segments.cu_seqlens(low, high, shape)
    return borders.tolist(), longest


def _written(packs: list[Any], tokens: list[Any], shape: PackShape) -> dict[str, Any]:
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    documents: list[int] = []
    borders = [0]
    for number, pack in enumerate(packs):
        used = number * shape.length
        there = 0
        for document, start, stop in pack:
            said = tokens[document][start:stop].tolist()
            if not said:
                continue
            room = -(-len(said) // shape.multiple) * shape.multiple
            gap = room - len(said)
            ids += said + [shape.pad_id] * gap
            first = max(1, shape.stale if start else 0)  # nothing predicts the first token of a document
            labels += [shape.ignore_id] * min(first, len(said)) + said[first:] + [shape.ignore_id] * gap
            positions += [*range(len(said)), *range(gap)]
            documents += [there] * len(said) + [-1] * gap
            there, used = there + 1, used + room
            borders.append(used)
        rest = (number + 1) * shape.length - used
        ids += [shape.pad_id] * rest
        labels += [shape.ignore_id] * rest
        positions += range(rest)
        documents += [-1] * rest
        borders += [used + rest] if rest else []
    if shape.shift_labels:
        rows = [labels[row * shape.length : (row + 1) * shape.length] for row in range(len(packs))]
        labels = [label for row in rows for label in [*row[1:], shape.ignore_id]]
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions, "document_ids": documents}
    return {"arrays": arrays, "cu_seqlens": borders}
