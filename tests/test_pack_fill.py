"""The count of labels that ``Filler.labels`` gives is that of the labels it writes, whichever way it comes by it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from streaming.packing.fill import Filler, segments_of
from streaming.packing.layout import IGNORED, PackRows, PackShape

CHOICES = list(product((False, True), (False, True), (1, 4), (False, True)))


@pytest.mark.parametrize(("shift", "across", "multiple", "masked"), CHOICES)
def test_counts_labels(shift: bool, across: bool, multiple: int, masked: bool) -> None:
    lengths = np.array([16, 3, 5, 0, 8, 7, 1])
    tokens = np.arange(100, 100 + lengths.sum()).astype("<u2")
    mask = np.arange(lengths.sum()).astype(np.uint8) % 3
    before = np.cumsum(lengths) - lengths
    rows = PackRows(
        splits=np.array([0, 1, 4, 5, 7]), samples=np.arange(7), starts=np.zeros(7, np.int64), stops=lengths,
        lengths=lengths,
    )  # fmt: skip
    shape = PackShape(length=16, field="tok", dtype="<u2", shift_labels=shift, labels_across=across, multiple=multiple)
    available = lengths.copy()
    available[[1, 4]] = 0  # cannot be read: one of a pack's documents, and all that a pack has
    filler = Filler(memoryview(tokens.tobytes() + mask.tobytes()), rows, segments_of(rows, available, shape), shape)
    input_ids, labels = np.empty(64, np.int64), np.empty(64, np.int64)
    filler.input_ids(2 * before, input_ids)
    count = filler.labels(input_ids, tokens.nbytes + before if masked else None, labels)
    assert count == np.count_nonzero(labels != IGNORED)
    assert 0 < count <= available.sum()
