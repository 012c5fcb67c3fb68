"""Measure a set on this machine, judge the result, and try settings that may be faster."""

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
"""Share of the time per measurement, and of the bytes; decoding takes next to no bytes."""
_LOOPS = 3
_IS_FASTER = 1.1
_IS_UNSURE = 0.5
_LEAST_CACHED = 0.2  # share of the set; a smaller cache is not worth its disk
_FREE_SHARE = 0.8  # share of the free disk


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of a measurement.

    Attributes:
        seconds: Time to measure, start-up not included.
        max_bytes: Approximate number of bytes to read from the store.
        batch_size: Samples per batch, as in training.
        memory_limit: Bytes, as in training; None: the default of a loader in this process.
        allow_unfinished: Measure the finished part of an unfinished set.
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
        """The memory limit of the measured loaders, in bytes."""
        return self.memory_limit or default_memory_limit(group_limits().memory_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport(Report):
    """Measurements, the stage that limits, and what would help.

    Attributes:
        limit: The stage that limits.
        why: Why, in words.
        sure: How certain this is, in words, from the spread of repeats.
        suggest: Suggested options of ``DataLoader`` and ``StreamingDataset``.
        convert: Options of the next ``convert`` or ``reshard``.
        expect: The measured gain of the suggestion, or the expected one if it was not tried.
        samples_per_s: Rate of the store, decoding and delivery, each by itself; None: not measured.
        probes: Reads of different sizes at different concurrency.
        decoding: Decoding alone; None: samples have no field.
        not_decoded: Fields that fail to decode by default in most samples; they were delivered as raw bytes.
        deliveries: Loops over batches: first with the given settings, then with others.
        error_share: Share of requests that failed and were repeated.
        num_chunks: Chunks of the set, which is the number of requests per epoch.
        num_samples: Samples of the set.
        num_bytes: Bytes of its chunks.
        chunk_bytes: Median bytes of a chunk.
        cores: Cores that this process may use.
        seconds: Duration of the measurement.
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

    Reads parts of shards, decodes some samples repeatedly, and runs a loop that discards its batches. A script that
    calls this needs its ``if __name__ == "__main__":`` guard, because decoding is also measured in processes.

    Args:
        urls: Shards, as for ``StreamingDataset``, with an index.
        storage_options: As for ``StreamingDataset``.
        index_url: Location of the index, if not beside the shards.
        options: Options of the measurement.
        progress: Receives each measurement.

    Raises:
        NotFoundError: Nothing matches ``urls``.
        IndexMissingError: The shards have no index; the message says how to make one.
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
    """Open an indexed set and require that it has samples.

    Raises:
        ConfigError: The set has no samples.
        NotFoundError: Nothing matches ``urls``.
        IndexMissingError: The shards have no index; the message says how to make one.
    """
    shards, marks = shards_beside(urls, storage, None, allow_unfinished=options.allow_unfinished)
    chunks = load_index(storage, shards, index_url)
    if not chunks.total_samples:
        raise ConfigError("this set has no samples, so there is nothing to measure")
    return OpenSet(urls=shards, chunks=chunks, scanned=None, index_url=index_url, marks=marks)


def _decoded(
    opened: OpenSet, storage: Storage, options: BenchOptions, cores: int
) -> tuple[Decoding | None, tuple[str, ...]]:
    """Measure decoding alone; also return the fields left out because they fail to decode in most samples."""
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
    """Return the settings to use, and the gain they bring."""
    baseline, best = tried[0], max(tried, key=lambda one: one.samples_per_s)
    gain = best.samples_per_s / max(baseline.samples_per_s, 1e-9)
    is_faster = baseline.refused or gain > max(_IS_FASTER, 1 + baseline.spread / 2)
    chosen = dict((best if is_faster and not best.refused else baseline).settings)
    suggest = {"num_workers": 0, "prefetch_factor": 2, **chosen}
    suggest["memory_limit"] = f"{-(-suggest['memory_limit'] >> 20)}MiB"
    suggest.pop("batch_size")  # the training decides it
    if limit in {"latency", "bandwidth", "errors"} and not found.is_local:
        cache = _cache(set_bytes)
        return {**suggest, **cache}, (
            "from the second epoch on, cached chunks come from this machine's disk"
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
    """Return the rate of each stage by itself, in samples per second."""
    alone = found.decoding
    return {
        "store": found.most_bytes_per_s / max(1.0, found.sample_bytes),
        "decoding": None if alone is None else max(alone.threads, alone.processes or 0.0),
        "delivery": found.delivery.samples_per_s,
    }


def _sure(found: Measured) -> str:
    """Describe how far repeats differ."""
    spreads = {"reads": found.best.spread, "the loop's halves": found.delivery.spread}
    if found.decoding is not None:
        spreads["decoding"] = found.decoding.spread
    name = max(spreads, key=lambda one: spreads[one])
    said = f"repeats differ by at most {spreads[name]:.0%} ({name})"
    return (
        f"unsure: {said}; measure longer (--seconds), or on a quieter machine" if spreads[name] > _IS_UNSURE else said
    )
