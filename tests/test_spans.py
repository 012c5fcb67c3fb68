"""Spans: runs of records with a checksum of their own, and reading parts of chunks that are checked by them."""

from __future__ import annotations

import crc32c
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.index.cutter import ChunkCutter, ChunkRule
from streaming.index.spans import SPAN_BYTES, SpanCutter, separate

RULE = ChunkRule(target_bytes=300_000, min_bytes=120_000, min_samples=20)
sizes_of_records = st.lists(st.sampled_from([512, 1536, 30_000, SPAN_BYTES - 512, SPAN_BYTES, 200_000]), max_size=60)


def spans_by_the_rule(sizes: list[int]) -> list[int]:
    """One past the last record of each closed span, from the sentence in docs/format.md."""
    chunks, ends, num_bytes = ChunkCutter(RULE), [], 0
    for number, size in enumerate(sizes):
        num_bytes += size
        if chunks.add(size) or num_bytes >= SPAN_BYTES:
            ends.append(number + 1)
            num_bytes = 0
    return ends


@given(sizes_of_records, st.lists(st.integers(0, 60), max_size=5))
def test_spans_follow_the_rule_however_records_come(sizes: list[int], stops: list[int]) -> None:
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    bounds = [0, *sorted(stop for stop in stops if stop < len(sizes)), len(sizes)]
    chunks, spans = ChunkCutter(RULE), SpanCutter()
    found: list[int] = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        piece = starts[low : high + 1]
        found += [low + cut for cut in spans.extend(piece, chunks.extend(piece).tolist())]
    assert found == spans_by_the_rule(sizes)


@given(sizes_of_records)
def test_one_by_one_as_all_at_once(sizes: list[int]) -> None:
    chunks, spans = ChunkCutter(RULE), SpanCutter()
    found = [n + 1 for n, size in enumerate(sizes) if spans.add(size, chunk_closes=chunks.add(size))]
    assert found == spans_by_the_rule(sizes)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=5000), st.booleans()), max_size=20))
def test_checksums_of_spans_out_of_running_ones(parts: list[tuple[bytes, bool]]) -> None:
    running, crc = [], 0
    for data, first in parts:
        crc = crc32c.crc32c(data, 0 if first else crc)
        running.append(crc)
    firsts = np.array([first or not number for number, (_, first) in enumerate(parts)], np.bool_)
    found = separate(np.array(running, np.uint32), np.array([len(data) for data, _ in parts], np.int64), firsts)
    assert found.dtype == np.uint32
    assert found.tolist() == [crc32c.crc32c(data) for data, _ in parts]


def test_checksums_of_long_spans() -> None:
    data = np.random.default_rng(0).bytes((5 << 20) + 7)
    cut = (1 << 20) + 3
    running = np.array([crc32c.crc32c(data[:cut]), crc32c.crc32c(data)], np.uint32)
    found = separate(running, np.array([cut, len(data) - cut]), np.array([True, False]))
    assert found.tolist() == [crc32c.crc32c(data[:cut]), crc32c.crc32c(data[cut:])]
