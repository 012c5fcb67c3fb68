"""Small datasets whose samples are recognized by content, and ways to simulate all ranks of a mesh in one process."""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.run.engine.memory.arena import PAGE_BYTES
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import DEFAULT_RULE, ChunkCutter, ChunkRule
from streaming.storage import Storage
from streaming.testing.ranks import mesh_of as mesh_of  # noqa: PLC0414  tests take it from here
from streaming.types import Int64Array

WORLD_SIZES = (1, 2, 3, 4, 6, 8)
SMALL_WINDOW: Mapping[str, Any] = {"shuffle": ShuffleConfig(window=40)}
"""For streamed datasets: filling the window of 4,096 samples would read a dataset of 200 twenty times."""
Batches = list[Counter[str]]
"""Global batches as multisets of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """Shards of known content.

    Attributes:
        url: All shards, as a directory.
        keys: Keys in storage order.
        storage_options: Options to read them with.
        options: Options to open them with, unless a test gives others.
    """

    url: str
    keys: tuple[str, ...]
    storage_options: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, **options: Any) -> StreamingDataset:
        return StreamingDataset(self.url, storage_options=self.storage_options, **{**self.options, **options})


def make_sample(number: int) -> dict[str, Any]:
    """A sample with an int, text, JSON, bytes of varying length and an array of one shape."""
    return {
        "__key__": f"{number:05d}",
        "cls": number,
        "txt": f"text of {number}",
        "json": {"number": number},
        "bin": bytes([number % 256]) * (number % 37),
        "vec.npy": np.arange(number, number + 4, dtype=np.float32),
    }


def write_set(
    directory: str | os.PathLike[str],
    shard_sizes: Sequence[int] = (41, 7, 23, 1, 60, 40, 30),
    *,
    chunk_samples: int = 8,
    storage_options: Mapping[str, Any] | None = None,
    indexed: bool = True,
    first: int = 0,
) -> SampleSet:
    """Write shards of these sizes, cut into chunks of ``chunk_samples`` (the last one of a shard may be smaller).

    Writing 200 samples takes a tenth of a second, so the bytes of a dataset written to disk are kept.
    """
    keys = tuple(f"{number:05d}" for number in range(first, first + sum(shard_sizes)))
    found = SampleSet(url=f"{os.fspath(directory)}/", keys=keys, storage_options=storage_options)
    if storage_options is None:
        for name, data in _files_of(tuple(shard_sizes), chunk_samples, indexed, first).items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    else:
        _write_anew(directory, shard_sizes, chunk_samples, storage_options, indexed, first)
    return found


@cache
def _files_of(shard_sizes: tuple[int, ...], chunk_samples: int, indexed: bool, first: int) -> dict[str, bytes]:
    """Bytes by relative path."""
    with tempfile.TemporaryDirectory() as folder:
        _write_anew(folder, shard_sizes, chunk_samples, None, indexed, first)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _write_anew(
    directory: str | os.PathLike[str],
    shard_sizes: Sequence[int],
    chunk_samples: int,
    storage_options: Mapping[str, Any] | None,
    indexed: bool,
    first: int,
) -> None:
    number = first
    for shard, size in enumerate(shard_sizes):
        pattern = f"{os.fspath(directory)}/{{:06d}}.tar"
        with ShardWriter(pattern, start_shard=shard, index=False, storage_options=storage_options) as writer:
            for number in range(number, number + size):  # noqa: B020  continues where the previous shard ended
                writer.write(make_sample(number))
        number += 1
    if indexed:
        storage = Storage(storage_options)
        urls = expand_urls(f"{os.fspath(directory)}/", storage)
        index_shards(storage, urls, rule=ChunkRule(min_bytes=1, min_samples=chunk_samples))


def check_batch(batch: Mapping[str, Any]) -> list[str]:
    """The keys of a batch, after checking every field against its sample's key."""
    keys: list[str] = batch["__key__"]
    numbers = [int(key) for key in keys]
    assert batch["cls"].dtype == torch.int64
    assert batch["cls"].tolist() == numbers
    assert batch["txt"] == [f"text of {number}" for number in numbers]
    assert batch["json"] == [{"number": number} for number in numbers]
    assert [bytes(data) for data in batch["bin"]] == [bytes([number % 256]) * (number % 37) for number in numbers]
    assert batch["vec.npy"].tolist() == [list(range(number, number + 4)) for number in numbers]
    return keys


def valid_keys(batch: Mapping[str, Any]) -> list[str]:
    """The keys of a checked batch, without padding."""
    keys = check_batch(batch)
    if "__valid__" not in batch:
        return keys
    assert batch["__valid__"].dtype == torch.bool
    return [key for key, valid in zip(keys, batch["__valid__"].tolist(), strict=True) if valid]


def loaders(dataset: StreamingDataset, world_size: int, **options: Any) -> Iterator[DataLoader]:
    """A loader for each rank in turn, closed when the next one is requested.

    The last rank builds its batches as the options say, in threads by default; the others in the calling thread, which
    takes a sixth less, unless worker processes build them.
    """
    here = {} if options.get("num_workers") else {"num_threads": 0}
    for rank in range(world_size):
        means = here if rank < world_size - 1 else {}
        with DataLoader(dataset, device_mesh=mesh_of(world_size, rank), **{**means, **options}) as loader:
            yield loader


def play(
    dataset: StreamingDataset,
    world_size: int,
    *,
    state: Mapping[str, Any] | None = None,
    epochs: int = 1,
    **options: Any,
) -> list[list[list[str]]]:
    """The samples that each of ``world_size`` ranks receives from ``state`` on: valid keys by rank, batch and row.

    Checks that all ranks have the same number of batches, which holds in every use.
    """
    ranks = []
    for loader in loaders(dataset, world_size, **options):
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        ranks.append([valid_keys(batch) for _ in range(epochs) for batch in loader])
    assert len({len(batches) for batches in ranks}) == 1, [len(batches) for batches in ranks]
    return ranks


def world_from(
    dataset: Any, ranks: int, take: Callable[[DataLoader], list[list[str]]], state: Any = None, **options: Any
) -> tuple[Batches, dict[str, Any]]:
    """Global batches taken from all ranks' loaders from a state on, and the state afterwards, the same on all."""
    found, states = [], []
    for loader in loaders(dataset, ranks, **options):
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        found.append(take(loader))
        states.append(loader.state_dict())
    assert all(one == states[0] for one in states)
    return merged(found), states[0]


def same_batch(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two batches are equal: names, keys, and every tensor bit by bit."""
    if one.keys() != other.keys():
        return False
    return all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


def merged(ranks: Iterable[Sequence[Sequence[str]]]) -> Batches:
    """Global batches made of what all ranks received."""
    return [Counter(key for rows in batches for key in rows) for batches in zip(*ranks, strict=True)]


def total(batches: Iterable[Counter[str]]) -> Counter[str]:
    """Number of occurrences of each key."""
    return sum(batches, Counter())


def data_gets(log: Sequence[Mapping[str, Any]], url: str) -> list[Mapping[str, Any]]:
    """The GETs of shards below an ``s3://bucket`` URL in a server's log."""
    folder = "/" + url.removeprefix("s3://").rstrip("/") + "/"
    return [
        entry
        for entry in log
        if entry["method"] == "GET" and str(entry["path"]).startswith(folder) and str(entry["path"]).endswith(".tar")
    ]


def chunk_pages(dataset: StreamingDataset) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes of each chunk in whole pages, as the arena counts them."""
    sizes = dataset.source.table.byte_end - dataset.source.table.byte_start
    return -(-sizes // PAGE_BYTES) * PAGE_BYTES


class JitteryStorage:
    """A storage whose reads end in a different order than they began, by delays that depend on ``seed``."""

    def __init__(self, storage: Storage, seed: int) -> None:
        self._storage = storage
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def read_into(self, url: str, start: int, out: memoryview, *, summed: bool = False) -> None:
        with self._lock:
            delay_s = self._random.choice((0, 0, 0, 0.001, 0.004))
        time.sleep(delay_s)  # what is tested: any timing
        self._storage.read_into(url, start, out, summed=summed)

    def until_right(self, url: str, attempt: Callable[[Any], Any]) -> Any:
        return Storage.until_right(self, url, attempt)  # type: ignore[arg-type]  # it passes itself to the attempt


def cut_records(record_starts: Int64Array, rule: ChunkRule = DEFAULT_RULE) -> Int64Array:
    """The first record of each chunk, and the number of records: int64 ``[C + 1]``, for a whole shard's records."""
    num_records = record_starts.size - 1
    cuts = ChunkCutter(rule).extend(record_starts)
    if num_records and (cuts.size == 0 or cuts[-1] != num_records):
        cuts = np.append(cuts, num_records)
    return np.concatenate((np.zeros(1, np.int64), cuts))
