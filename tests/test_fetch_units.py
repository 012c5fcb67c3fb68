"""Mixtures whose chunks are cut into fetch units: ``fetch_bytes=``."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from data_sets import Batches, loaders, merged, total, world_from
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.catalog.cut import units_of
from streaming.index.chunk_table import ShardInfo, one_shard_table
from streaming.index.sample_table import Spans
from streaming.index.spans import SPAN_BYTES

KIB = 1024
EXACT, ONE_SOURCE = {"quotas": "exact"}, {"batches": "one_source"}
SIZES = {"code": (60,), "math": (30, 20), "web": (90, 70)}
WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}
UNITS = {"web": 200 * KIB, "code": 64 * KIB}
FEW_LANES = ShuffleConfig(lanes=2)


def content(key: str) -> bytes:
    """Bytes of 1 to 30 KiB that follow from a key."""
    digest = hashlib.sha256(key.encode()).digest()
    return digest * (32 + digest[0] * 4)


def write(folder: Path, name: str, shards: Sequence[int], *, first_shard: int = 0) -> None:
    number = sum(SIZES[name][:first_shard])
    for shard, count in enumerate(shards, first_shard):
        with ShardWriter(f"{folder}/{name}/{{:06d}}.tar", start_shard=shard, columns={"n": "json.n"}) as writer:
            for number in range(number, number + count):  # noqa: B020  continues where the last shard ended
                key = f"{name}-{number:03d}"
                writer.write({"__key__": key, "bin": content(key), "json": {"n": number}})
            number += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    for name, shards in SIZES.items():
        write(root, name, shards)
    return root


def mixture(folder: Path, names: str = "web code math", **options: Any) -> Mixture:
    options = {"quotas": "exact", "shuffle": FEW_LANES, **options}
    return Mixture({name: StreamingDataset(f"{folder}/{name}/", decode="raw") for name in names.split()}, **options)


def take(loader: DataLoader, count: int = 10**6) -> list[list[str]]:
    found: list[list[str]] = []
    for batch in loader:
        assert [bytes(data) for data in batch["bin"]] == [content(key) for key in batch["__key__"]]
        assert batch["__source__"] == [key.partition("-")[0] for key in batch["__key__"]]
        valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(batch["__key__"])
        found.append([key for key, is_real in zip(batch["__key__"], valid, strict=True) if is_real])
        if len(found) == count:
            break
    return found


def world(mix: Any, ranks: int, count: int, state: Any = None, **options: Any) -> tuple[Batches, dict[str, Any]]:
    return world_from(mix, ranks, lambda loader: take(loader, count), state, **{"global_batch_size": 12, **options})


# --- where chunks are cut ---


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.integers(1, 400).map(lambda blocks: 512 * blocks), min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 39)), unit_bytes=st.integers(SPAN_BYTES, 10 * SPAN_BYTES), seed=st.integers(0, 9),
)  # fmt: skip
def test_units_hold_whole_spans_once_and_their_sums_follow_from_those_of_spans(
    records: list[int], cuts: set[int], unit_bytes: int, seed: int
) -> None:
    crc32c = pytest.importorskip("crc32c").crc32c
    data = np.random.default_rng(seed).bytes(sum(records))
    starts = np.concatenate(([0], np.cumsum(records)))
    bounds = np.array([0, *sorted(cut for cut in cuts if cut < len(records)), len(records)])
    spans = [int(bounds[0])]
    for number in range(1, len(records)):
        if number in bounds or starts[number] - starts[spans[-1]] >= SPAN_BYTES:
            spans.append(number)
    rows = {
        "first_sample": bounds[:-1], "num_samples": np.diff(bounds), "byte_start": starts[bounds[:-1]],
        "byte_end": starts[bounds[1:]], "crc32c": np.zeros(len(bounds) - 1),
    }  # fmt: skip
    firsts = np.array(spans)
    ends = starts[[*spans[1:], len(records)]]
    sums = np.array([crc32c(data[a:b]) for a, b in zip(starts[firsts], ends, strict=True)], np.uint32)
    table = one_shard_table(ShardInfo(name="a.tar", size_bytes=len(data), num_samples=len(records)), rows)
    found = units_of(Spans(chunks=table, firsts=firsts, byte_starts=starts[firsts], crc32c=sums), unit_bytes)
    first, counts, begins, stops, crcs = found
    assert first.tolist() == [0, *np.cumsum(counts)[:-1].tolist()]
    assert begins.tolist() == [0, *stops[:-1].tolist()]
    assert stops[-1] == len(data)
    assert set(table.byte_start.tolist()) <= set(begins.tolist()) <= set(starts[firsts].tolist())
    assert crcs.tolist() == [crc32c(data[a:b]) for a, b in zip(begins, stops, strict=True)]
    largest = max(ends - starts[firsts])
    assert max(stops - begins) <= unit_bytes + largest
    for size, start, end in zip(table.chunk_bytes, table.byte_start, table.byte_end, strict=True):
        assert ((begins >= start) & (begins < end)).sum() <= -(-size // unit_bytes)


# --- P1 to P5 ---


@pytest.mark.parametrize("options", [EXACT, ONE_SOURCE])
def test_any_world_stopped_and_resumed_gives_the_same_batches(folder: Path, options: dict[str, Any]) -> None:
    mix = mixture(folder, weights=WEIGHTS, fetch_bytes=UNITS, **options)
    assert len(mix.leaves["web"].chunk_samples) > 12
    assert len(mix.leaves["math"].chunk_samples) == 2
    whole, _ = world(mix, 1, 24)
    before, state = world(mix, 3, 11)
    after, _ = world(mix, 2, 13, state)
    assert before + after == whole
    assert state["version"] == 5
    assert state["ledger"][0]["fetch_bytes"] == {"code": 64 * KIB, "web": 200 * KIB}


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_that_ends_has_each_sample_once(folder: Path, ranks: int) -> None:
    mix = mixture(folder, fetch_bytes=UNITS)
    for_each = [
        take(loader) for loader in loaders(cast("StreamingDataset", mix), ranks, global_batch_size=12, last_batch="pad")
    ]
    assert total(merged(for_each)) == Counter(
        f"{name}-{number:03d}" for name, shards in SIZES.items() for number in range(sum(shards))
    )


def test_changed_weights_go_on_with_the_units_of_the_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = mixture(folder, weights=WEIGHTS, fetch_bytes="1MiB")
    other = mixture(folder, weights={"web": 1, "code": 1, "math": 5}, fetch_bytes="1MiB")
    assert begun.fetch_bytes != other.fetch_bytes
    _, state = world(begun, 1, 10)
    same = mixture(folder, weights={"web": 1, "code": 1, "math": 5}, fetch_bytes=begun.fetch_bytes)
    expected, _ = world(same, 1, 30, state)
    with caplog.at_level(logging.INFO):
        assert world(other, 2, 30, state)[0] == expected
    assert "fetch_bytes: the run continues with the fetch units that it began with: code" in caplog.text
    _, last = world(other, 1, 30, state)
    assert [entry["fetch_bytes"] for entry in last["ledger"]] == [begun.fetch_bytes] * 2


def test_a_run_that_began_with_whole_chunks_keeps_them(folder: Path) -> None:
    whole = mixture(folder, weights=WEIGHTS)
    expected, _ = world(whole, 1, 20)
    _, state = world(whole, 1, 8)
    assert "fetch_bytes" not in state["ledger"][0]
    after, last = world(mixture(folder, weights=WEIGHTS, fetch_bytes=UNITS), 2, 12, state)
    assert after == expected[8:]
    assert last["ledger"] == state["ledger"]
