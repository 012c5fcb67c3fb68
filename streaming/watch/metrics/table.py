"""Define the numbers of ``loader.metrics()``: the one table of names, kinds, units and meanings.

``docs/metrics.md`` shows the same rows, and exporters derive their names from them. Nothing here depends on a library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge"]
_PREFIX = "shardstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number that loaders count.

    Attributes:
        name: Its name in ``loader.metrics()``; its end names the unit.
        kind: ``"counter"`` grows from 0 and never falls while a loader lives; ``"gauge"`` may rise and fall.
        meaning: What it counts, in words.
    """

    name: str
    kind: Kind
    meaning: str

    @property
    def unit(self) -> str:
        """``"s"``, ``"By"`` (bytes) or ``""``: the unit by the names of UCUM, which OpenTelemetry uses."""
        return "s" if self.name.endswith(("_s", "_s_per_batch")) else "By" if self.name.endswith("_bytes") else ""

    @property
    def prometheus_name(self) -> str:
        """The name of the time series: base units in full, and ``_total`` at the end of counters."""
        spelled = self.name.replace("_s_per_batch", "_seconds_per_batch")
        spelled = f"{spelled.removesuffix('_s')}_seconds" if spelled.endswith("_s") else spelled
        return f"{_PREFIX}_{spelled}{'_total' if self.kind == 'counter' else ''}"

    @property
    def opentelemetry_name(self) -> str:
        """The name of the instrument, without the unit: converted to Prometheus it is ``prometheus_name``."""
        return f"{_PREFIX}.{self.name.removesuffix('_bytes').removesuffix('_s')}"


def _rows(kind: Kind, **meanings: str) -> tuple[Number, ...]:
    return tuple(Number(name=name, kind=kind, meaning=meaning) for name, meaning in meanings.items())


OF_LOADERS = (
    *_rows(
        "counter",
        batches="batches delivered",
        consumer_s="time between two batches: your own work",
        in_loader_s="time that the training thread spent inside the loader: waits, building, hand-over",
        first_batch_s="the part of it spent on the first batches of iterations",
        unhidden_s="the part of in_loader_s, after first batches, that was no wait: the training thread's own work, "
        "which no prefetching hides",
        consumer_thread_s="CPU time of the training thread inside the loader",
        copy_s="with DevicePrefetcher: time that the training thread spent starting copies to the device",
        wait_for_device_s="with it: time that the training thread waited for the device, which is busy then",
        bad_samples="samples that could not be delivered, each counted once per epoch",
    ),
)
"""Numbers of every kind of loader."""

OF_SHARDS = (
    *_rows(
        "counter",
        wait_for_fetch_s="time the consumer waited for bytes",
        wait_for_build_s="time the consumer waited for a batch to be decoded and collated",
        build_in_consumer_s="time the consumer spent building batches itself",
        first_batch_wait_s="the part of the two waits above spent on the first batches of epochs",
        build_s="time background threads spent building batches, or having workers build them; summed over threads",
        fetch_s="time fetch threads were busy; summed over threads",
        plan_s="time spent planning: which samples and chunks come next; in any thread",
        fetched_chunks="completed fetches",
        fetched_bytes="bytes they delivered, including those from the cache and from memory maps",
        mapped_bytes="the part of them that was mapped from local files, not read",
        worker_restarts="worker processes that died or had to be killed, and were replaced",
        batches_before_workers="batches built in this process while the first worker processes started",
        batches_beside_workers="batches built by threads of this process while worker processes were up",
        changed_lengths="documents of a Packed dataset whose number of tokens differs from their column",
        dropped_samples="samples that your transform dropped",
        exchange_s='time for redistributing packs over the ranks (balance="exchange"), including waits for other ranks',
        exchanged_bytes="bytes of packs that this rank sent for it",
        batches_in_turn="batches that the consumer built because functions draw from global generators",
        requests="requests to the store, including retries, hedges and (through fsspec) version checks",
        storage_bytes="bytes that the store sent",
        retries="requests repeated after a failure, or because bytes came wrong",
        throttled='responses that said "too busy" (429, 503)',
        hedges="second requests for stalled reads",
        hedges_won="second requests that finished first",
        mirror_reads="reads served by a mirror",
        cache_hits="reads served by the node cache",
        cache_hit_bytes="their bytes",
        cache_misses="reads that the node cache could not serve",
        cache_miss_bytes="their bytes",
        cache_wait_s="time spent waiting for another process to fetch the same data",
        cache_wait_timeouts="such waits that timed out",
        cache_write_s="time spent writing to the cache",
        cache_not_stored="entries that could not be stored, for example for lack of space",
        cache_evictions="entries removed to make room",
        cache_evicted_bytes="their bytes",
        cache_damaged="entries that failed their checksum and were fetched again",
        cache_errors="failures of the cache's disk; the store served those reads instead",
    ),
    *_rows(
        "gauge",
        consumer_thread_s_per_batch="consumer_thread_s per batch, on average",
        unhidden_s_per_batch="unhidden_s per batch, on average",
        fetched_ahead="batches ahead of training whose bytes are in memory, now",
        built_ahead="batches that are built and wait for delivery, now",
        requests_in_flight="requests to the store that are under way, now",
        arena_bytes="chunks in memory, now",
        arena_peak_bytes="chunks in memory, peak",
        arena_limit_bytes="the most that chunks may take, as planned: limit_bytes of shard_tools plan",
        ring_bytes="batches from workers in memory, now",
        ring_peak_bytes="batches from workers in memory, peak",
        batches_over_bytes="by how much batches may exceed their quarter of memory_limit, because three of them do not "
        "fit",
        ring_slots_in_use="batches from workers that are being built, are waiting, or are referenced by your program, "
        "now",
    ),
)
"""Additional numbers of loaders of shards."""

OF_ORDINARY = (
    *_rows(
        "counter",
        wait_for_batch_s="time the consumer waited for torch's loader, for the readers, or for the rank that reads for "
        'it (replicate="broadcast")',
        discarded_batches="batches left out because another rank ran out of data",
        reader_restarts="remote readers that were restarted",
    ),
    *_rows("gauge", largest_step_bytes="the largest step that remote readers delivered"),
)
"""Additional numbers of loaders of torch's datasets and of remote readers."""

OF_EXPORTS = _rows(
    "gauge",
    epoch="the epoch in progress, or the next one",
    samples_seen="samples of it that training has received, over all ranks",
    world_size="number of ranks",
)
"""Numbers that exporters add; they are not in ``loader.metrics()``."""

NUMBERS = {one.name: one for one in (*OF_LOADERS, *OF_SHARDS, *OF_ORDINARY, *OF_EXPORTS)}
EXPORTED = {one.prometheus_name: one for one in NUMBERS.values()}
