"""Measure a set on this machine, judge, and try what may be faster."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shard_tools.change.sets.open_set import OpenSet, shards_beside
from shard_tools.look.bench import decoding, requests
from shard_tools.look.bench.decoding import Decoding
from shard_tools.look.bench.delivery import LoopRun, Loops
from shard_tools.look.bench.judge import Limit, Measured, candidates, convert_advice, judge
from shard_tools.look.bench.requests import Probe, UnreadRanges
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.common.arguments import default_memory_limit, format_bytes
from streaming.common.platforms import group_limits, memory_bytes, num_cores
from streaming.errors import ConfigError
from streaming.shards.catalog.build import load_index
from streaming.storage import Storage, scheme_of

_FOR_STORE, _FOR_DECODING, _FOR_DELIVERY = 0.4, 0.15, 0.45
"""Parts of the time; of the bytes decoding takes next to nothing."""
_LOOPS = 3
_IS_FASTER = 1.1
_IS_UNSURE = 0.5
_LEAST_CACHED = 0.2  # of the set: a smaller cache is not worth its disk
_FREE_SHARE = 0.8  # of the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure, and how long.

    Attributes:
        seconds: Time, beside what it takes to start.
        max_bytes: Bytes to read from the store, about.
        batch_size: As in training.
        memory_limit: Bytes, as in training; None: what a loader takes by default in this process.
        allow_unfinished: Measure what is there of a set that is not whole.
    """

    seconds: float = 20.0
    max_bytes: int = 10**9
    batch_size: int = 64
    memory_limit: int | None = None
    allow_unfinished: bool = False

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.max_bytes <= 0:
            raise ConfigError("--seconds and --bytes: expected more than 0: a measurement takes some of both")

    @property
    def limit_bytes(self) -> int:
        """The memory limit with which loaders are measured."""
        return self.memory_limit or default_memory_limit(group_limits().memory_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport(Report):
    """What was measured, what limits, and what would help.

    Attributes:
        limit: The stage that limits.
        why: Why, in words.
        sure: How sure this is, in words, by the spread of repeats.
        suggest: Options of ``DataLoader`` and ``StreamingDataset``.
        convert: Options of the next ``convert`` or ``reshard``.
        expect: What the suggestion brought when it was tried, or what it will bring.
        samples_per_s: By stage: what the store, decoding and delivery reach by themselves; None: not measured.
        probes: Reads of different sizes, a different number at a time.
        decoding: Decoding alone; None: samples have no field.
        not_decoded: Fields of which most samples cannot be decoded by default; they were taken as bytes.
        deliveries: Loops over batches: with the settings given, then others that were tried.
        error_share: Part of the requests that failed and were repeated.
        num_chunks: Chunks of the set, which are the requests of an epoch.
        num_samples: Its samples.
        num_bytes: Bytes of its chunks.
        chunk_bytes: Median bytes of a chunk.
        cores: Cores that this process may use.
        seconds: Time that it took.
    """

    limit: Limit
    why: str
    sure: str
    suggest: Mapping[str, Any]
    convert: Mapping[str, Any]
    expect: str
    samples_per_s: Mapping[str, float | None]
    probes: tuple[Probe, ...]
    decoding: Decoding | None
    not_decoded: tuple[str, ...]
    deliveries: tuple[LoopRun, ...]
    error_share: float
    num_chunks: int
    num_samples: int
    num_bytes: int
    chunk_bytes: int
    cores: int
    seconds: float


def bench(
    urls: Sequence[str], *, storage_options: Mapping[str, object] | None = None, index_url: str | None = None,
    options: BenchOptions | None = None, progress: Progress | None = None,
) -> BenchReport:  # fmt: skip
    """Measure how fast this machine reads a set, which stage limits, and which settings help. Writes nothing.

    Reads parts of shards, decodes some samples again and again, and runs a loop over batches that nobody uses. A script
    that calls this needs its ``if __name__ == "__main__":`` guard, because decoding is also measured in processes.

    Args:
        urls: Shards, as for ``StreamingDataset``, with an index.
        storage_options: As for ``StreamingDataset``.
        index_url: Location of the index, if not beside the shards.
        options: What to measure.
        progress: Receives each measurement.

    Raises:
        NotFoundError: Nothing matches ``urls``.
        IndexMissingError: They have no index; the message says how to make one.
    """
    options, progress = options or BenchOptions(), progress or NoProgress()
    began_s, storage = time.monotonic(), Storage(storage_options)
    progress.start(total_bytes=None, total=2 + _LOOPS)
    opened = opened_set(urls, storage, index_url, options)
    shards, chunks = opened.urls, opened.chunks
    chunk_bytes = int(np.median(chunks.chunk_bytes))
    probes = requests.measure(
        storage, UnreadRanges(shards, [shard.size_bytes for shard in chunks.shards]), chunk_bytes=chunk_bytes,
        seconds=_FOR_STORE * options.seconds, max_bytes=int(_FOR_STORE * options.max_bytes),
    )  # fmt: skip
    progress.advance(num=1)
    cores = num_cores()
    decoded, failing = _decoded(opened, storage, options, cores)
    progress.advance(num=1)
    loops = Loops(
        opened, storage_options or {}, progress, seconds=_FOR_DELIVERY / _LOOPS * options.seconds,
        max_bytes=int(_FOR_DELIVERY / _LOOPS * options.max_bytes), batch_size=options.batch_size, not_decoded=failing,
    )  # fmt: skip
    first_settings = {"batch_size": loops.batch_size, "memory_limit": options.limit_bytes}
    baseline = loops.run(first_settings)
    found = Measured(
        probes=probes, decoding=decoded, delivery=baseline, sample_bytes=chunks.total_bytes / chunks.total_samples,
        chunk_bytes=chunk_bytes, is_local=scheme_of(shards[0]) == "file",
    )  # fmt: skip
    verdict = judge(found)
    others = candidates(verdict.limit, first_settings, cores=cores, memory_bytes=memory_bytes() // 2)
    tried = (baseline, *map(loops.run, others))
    suggest, expect = _suggestion(verdict.limit, tried, found, chunks.total_bytes)
    return BenchReport(
        limit=verdict.limit,
        why=verdict.why,
        sure=_sure(found),
        suggest=suggest,
        convert=convert_advice(found, verdict.limit),
        expect=expect,
        samples_per_s=_stages(found),
        probes=tuple(probes),
        decoding=decoded,
        not_decoded=failing,
        deliveries=tried,
        error_share=found.error_share,
        num_chunks=chunks.num_chunks,
        num_samples=chunks.total_samples,
        num_bytes=chunks.total_bytes,
        chunk_bytes=chunk_bytes,
        cores=cores,
        seconds=time.monotonic() - began_s,
    )


def opened_set(urls: Sequence[str], storage: Storage, index_url: str | None, options: BenchOptions) -> OpenSet:
    """Open an indexed set that has samples.

    Raises:
        ConfigError: It has none.
        NotFoundError: Nothing matches ``urls``.
        IndexMissingError: They have no index; the message says how to make one.
    """
    shards, marks = shards_beside(urls, storage, None, allow_unfinished=options.allow_unfinished)
    chunks = load_index(storage, shards, index_url)
    if not chunks.total_samples:
        raise ConfigError("this set has no samples, so there is nothing to measure")
    return OpenSet(urls=shards, chunks=chunks, scanned=None, index_url=index_url, marks=marks)


def _decoded(
    opened: OpenSet, storage: Storage, options: BenchOptions, cores: int
) -> tuple[Decoding | None, tuple[str, ...]]:
    """Measure decoding alone, and name the fields that it leaves out because most samples cannot be decoded."""
    samples, record_bytes = decoding.some_samples(opened, storage)
    samples = [sample for sample in samples if sample]
    failing = decoding.failing_fields(samples)
    samples = [{name: data for name, data in sample.items() if name not in failing} for sample in samples]
    if not samples:
        return None, failing
    weight = record_bytes / (opened.chunks.total_bytes / opened.chunks.total_samples)
    seconds = _FOR_DECODING * options.seconds
    return decoding.measure(samples, seconds=seconds, cores=cores, weight=weight), failing


def _suggestion(limit: Limit, tried: Sequence[LoopRun], found: Measured, set_bytes: int) -> tuple[dict[str, Any], str]:
    """Return the settings to use, and what they bring."""
    baseline, best = tried[0], max(tried, key=lambda one: one.samples_per_s)
    gain = best.samples_per_s / max(baseline.samples_per_s, 1e-9)
    is_faster = baseline.refused or gain > max(_IS_FASTER, 1 + baseline.spread / 2)
    chosen = dict((best if is_faster and not best.refused else baseline).settings)
    suggest = {"num_workers": 0, "prefetch_factor": 2, **chosen}
    suggest["memory_limit"] = f"{-(-suggest['memory_limit'] >> 20)}MiB"
    suggest.pop("batch_size")  # which belongs to the training
    if limit in {"latency", "bandwidth", "errors"} and not found.is_local:
        cache = _cache(set_bytes)
        return {**suggest, **cache}, (
            "from the second epoch on, what is in the cache comes from this machine's disk"
            if cache
            else f"no setting helps: {format_bytes(set_bytes)} do not fit on this machine's disk"
        )
    if baseline.refused:
        return suggest, f"with it the loader starts, and delivers {best.samples_per_s:,.0f} samples/s"
    if is_faster:
        return suggest, f"tried: {gain:.1f} times as fast ({best.samples_per_s:,.0f} samples/s)"
    return suggest, "of the settings that were tried, none is faster than these"


def _cache(set_bytes: int) -> dict[str, Any]:
    """Return the options of a cache on this machine's disk, if there is room for enough of the set."""
    folder = tempfile.gettempdir()
    room = int(shutil.disk_usage(folder).free * _FREE_SHARE)
    if room < _LEAST_CACHED * set_bytes:
        return {}
    limit_bytes = min(room, set_bytes + set_bytes // 10 + (64 << 20))
    return {"cache_dir": os.path.join(folder, "shardstream-cache"), "cache_limit": f"{-(-limit_bytes >> 20)}MiB"}


def _stages(found: Measured) -> dict[str, float | None]:
    """Return what each stage reaches by itself, in samples per second."""
    alone = found.decoding
    return {
        "store": found.most_bytes_per_s / max(1.0, found.sample_bytes),
        "decoding": None if alone is None else max(alone.threads, alone.processes or 0.0),
        "delivery": found.delivery.samples_per_s,
    }


def _sure(found: Measured) -> str:
    """Say how far repeats differ."""
    spreads = {"reads": found.best.spread, "the loop's halves": found.delivery.spread}
    if found.decoding is not None:
        spreads["decoding"] = found.decoding.spread
    name = max(spreads, key=lambda one: spreads[one])
    said = f"repeats differ by at most {spreads[name]:.0%} ({name})"
    return (
        f"unsure: {said}; measure longer (--seconds), or on a quieter machine" if spreads[name] > _IS_UNSURE else said
    )
