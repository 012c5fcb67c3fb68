"""What may stand in for a sample, in which order, where nothing of it or only a part is in memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streaming import StreamingDataset
from streaming.errors import ChecksumError
from streaming.run.engine.memory.chunk_store import Unit
from streaming.run.engine.substitutes import Substitutes
from streaming.shards.fetch.read import FetchRange
from tests.support.sets.data_sets import write_set


@pytest.fixture
def dataset(tmp_path: Path) -> StreamingDataset:
    """Samples 3 to 15 of one shard with chunks of 4: chunk 0 has one of its samples, the last."""
    write_set(tmp_path, (16,), chunk_samples=4)
    return StreamingDataset(tmp_path, shuffle=False)[3:]


def in_place_of(dataset: StreamingDataset, chunk: int, offset: int, *units: Unit) -> list[tuple[int, ...]]:
    """Key and number of each, where ``units`` are all that memory holds of each chunk; all chunks come before."""
    counts = dataset.source.table.num_samples
    earlier = SimpleNamespace(chunks_before=lambda one: [other for other in (2, 1, 0) if other != one])
    settings = SimpleNamespace(seed=0)
    plan: Any = SimpleNamespace(chunk_samples=counts, order=lambda _: earlier, settings=settings)
    held: Any = SimpleNamespace(
        changed=threading.Condition(), hold=lambda _: list(units), release=lambda _: None, rows=None,
        arena=SimpleNamespace(memory=None, view=None),
    )  # fmt: skip
    found = Substitutes(
        plan, np.cumsum([0, *counts]), dataset.source, held, None, lambda rows: replace(rows, sources=np.array([7]))
    )
    with found:
        rows = list(found.of(chunk, offset, 0))
    assert all(one.sources is not None and one.sources.tolist() == [7] for one in rows), "narrowed"
    return [(int(one.keys[0]), *one.numbers.tolist()) for one in rows if one.numbers is not None]


EXPECTED = [(key, key - 3) for key in (10, 11, 8, 4, 5, 6, 7, 3)]


def test_the_rest_of_the_chunk_then_earlier_ones_of_the_view_alone(
    dataset: StreamingDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_place_of(dataset, 2, 1) == EXPECTED
    fetch = dataset.source.fetch_unit

    def fail(wanted: FetchRange, out: memoryview) -> Any:
        if wanted == dataset.source.chunk(1):
            raise ChecksumError("none of it can be read")
        return fetch(wanted, out)

    monkeypatch.setattr(dataset.source, "fetch_unit", fail)
    assert in_place_of(dataset, 2, 1) == [*EXPECTED[:3], *EXPECTED[7:]]


def test_a_part_in_memory_that_is_damaged_is_not_used(dataset: StreamingDataset) -> None:
    whole = dataset.source.chunk(2)
    part = replace(whole, byte_end=whole.byte_end - 512, num_samples=3)
    damaged = Unit(wanted=part, start=0, num_bytes=part.num_bytes, skew_bytes=0)
    damaged.damage = ChecksumError("a damaged part")
    assert in_place_of(dataset, 2, 1, damaged) == EXPECTED
    damaged.wanted = whole
    assert in_place_of(dataset, 2, 1, damaged) == EXPECTED[3:], "the whole chunk"
