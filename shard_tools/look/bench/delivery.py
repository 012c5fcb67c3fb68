"""Measure delivery: run a real ``DataLoader`` loop that discards its batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shard_tools.change.sets.open_set import OpenSet
from shard_tools.running.progress import Progress
from shard_tools.running.report import Report
from streaming.errors import MemoryLimitError

_PAUSED_STEPS, _UNCOUNTED, _LEAST_COUNTED = 20, 2, 3
PAUSED_SHARE = 0.5  # extra time for paused steps, as a share of a loop's time
_BATCHES_A_PAUSE, _LEAST_PAUSE_S = 4, 0.01
_LEAST_BATCHES = 8  # per loop


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun(Report):
    """Results of a loop over some of the samples with given settings.

    Attributes:
        settings: Arguments of the loader.
        samples_per_s: Rate from the first batch on. If the loop ran out of samples early, the waits for the first batch
            count too.
        spread: Difference between the faster and the slower half, as a share of the mean; 0 if the loop ended early.
        fetch_share: Share of the time that the loop waited for bytes.
        build_share: Share of the time that it waited for batches to be built, or built them itself.
        unhidden_ms: Median time that a batch still costs after a step long enough to prepare it: taking it and
            releasing the previous one. None: too few batches or too little time to measure.
        num_samples: Samples delivered.
        num_bytes: Bytes received from the store.
        requests: Requests sent to the store.
        retries: Requests that repeated failed ones.
        chunks_bytes: Memory available for chunks.
        refused: Why the loader refused to start; "": it started.
    """

    settings: Mapping[str, Any]
    samples_per_s: float = 0.0
    spread: float = 0.0
    fetch_share: float = 0.0
    build_share: float = 0.0
    unhidden_ms: float | None = None
    num_samples: int = 0
    num_bytes: int = 0
    requests: int = 0
    retries: int = 0
    chunks_bytes: int = 0
    refused: str = ""


class Loops:
    """Run loops over parts of a set, each over different samples if there are enough.

    Attributes:
        batch_size: Samples per batch: as in training, or fewer if there are too few samples.
    """

    def __init__(
        self, opened: OpenSet, storage_options: Mapping[str, object], progress: Progress, *, seconds: float,
        max_bytes: int, batch_size: int, not_decoded: Sequence[str],
    ) -> None:  # fmt: skip
        self._opened, self._storage_options, self._progress = opened, storage_options, progress
        self._not_decoded, self._seconds = not_decoded, seconds
        self._total = opened.chunks.total_samples
        sample_bytes = max(1.0, opened.chunks.total_bytes / self._total)
        self._num_samples = min(self._total, max(1, int(max_bytes / sample_bytes)))
        self._first = 0
        self.batch_size = min(batch_size, max(1, self._num_samples // _LEAST_BATCHES))

    def run(self, settings: Mapping[str, Any]) -> LoopRun:
        """Measure a loop with these settings."""
        first = self._first if self._first + self._num_samples <= self._total else 0
        self._first = first + self._num_samples
        found = measure(
            self._opened.urls, (first, first + self._num_samples), settings, seconds=self._seconds,
            storage_options=self._storage_options, index_url=self._opened.index_url, not_decoded=self._not_decoded,
        )  # fmt: skip
        self._progress.advance(num=1, num_bytes=found.num_bytes)
        return found


def measure(
    urls: Sequence[str], part: tuple[int, int], settings: Mapping[str, Any], *, seconds: float,
    storage_options: Mapping[str, object], index_url: str | None, not_decoded: Sequence[str] = (),
) -> LoopRun:  # fmt: skip
    """Run a loop over a part of the samples for ``seconds``, or until it ends.

    Args:
        urls: The shards.
        part: First sample, and the one after the last.
        settings: Arguments of the loader.
        seconds: Time from the first batch on.
        storage_options: As for ``StreamingDataset``.
        index_url: Location of the index, if not beside the shards.
        not_decoded: Fields delivered as raw bytes.
    """
    from streaming import DataLoader, StreamingDataset  # noqa: PLC0415  imports torch

    dataset = StreamingDataset(
        list(urls), index=index_url, subset=part, storage_options=dict(storage_options), max_bad_samples=1.0,
        decode=dict.fromkeys(not_decoded) or "auto", classes="own",
    )  # fmt: skip
    try:
        with DataLoader(dataset, last_batch="partial", agreement_timeout=None, **settings) as loader:
            return _loop(loader, settings, seconds)
    except MemoryLimitError as error:
        return LoopRun(settings=settings, refused=str(error))


def _loop(loader: Any, settings: Mapping[str, Any], seconds: float) -> LoopRun:
    ends: list[tuple[float, int]] = []  # time and samples of each batch
    is_whole, batches = True, iter(loader)
    for batch in batches:
        ends.append((time.perf_counter(), len(batch["__key__"])))
        if ends[-1][0] - ends[0][0] > seconds:
            is_whole = False
            break
    numbers = {name: float(value) for name, value in loader.metrics().items() if isinstance(value, (int, float))}
    later_s = ends[-1][0] - ends[0][0]
    fetch_s = numbers.get("wait_for_fetch_s", 0.0)
    build_s = numbers.get("wait_for_build_s", 0.0) + numbers.get("build_in_consumer_s", 0.0)
    # The time left, counted from the first batch: before it, libraries are imported and threads start.
    rest_s = max(0.0, later_s - (fetch_s + build_s - numbers.get("first_batch_wait_s", 0.0)))
    looked_at_s = max(fetch_s + build_s + rest_s, 1e-9)
    total = sum(count for _, count in ends)
    # A loop that ended by itself fetched much of its data before the first batch, so those waits count too.
    rate = total / looked_at_s if is_whole else (total - ends[0][1]) / max(later_s, 1e-9)
    return LoopRun(
        settings=settings,
        samples_per_s=rate,
        spread=0.0 if is_whole else _spread(ends),
        fetch_share=fetch_s / looked_at_s,
        build_share=build_s / looked_at_s,
        unhidden_ms=None if is_whole else _unhidden_ms(batches, later_s / (len(ends) - 1), seconds),
        num_samples=total,
        num_bytes=int(numbers.get("storage_bytes", 0)),
        requests=int(numbers.get("requests", 0)),
        retries=int(numbers.get("retries", 0)),
        chunks_bytes=int(numbers.get("arena_limit_bytes", 0)),
    )


def _unhidden_ms(batches: Iterator[Any], batch_s: float, seconds: float) -> float | None:
    """Return the time in ms that a batch costs after steps long enough to prepare several, release included.

    Args:
        batches: The rest of a loop.
        batch_s: Time per batch at full speed.
        seconds: Time that the loop has taken so far.
    """
    pause_s = max(_LEAST_PAUSE_S, _BATCHES_A_PAUSE * batch_s)
    num_steps = min(_UNCOUNTED + _PAUSED_STEPS, int(PAUSED_SHARE * seconds / pause_s))
    if num_steps < _UNCOUNTED + _LEAST_COUNTED:
        return None
    taken_s: list[float] = []
    for _ in range(num_steps):
        time.sleep(pause_s)
        start_s = time.perf_counter()
        batch = next(batches, None)  # releases the previous one
        if batch is None:
            break
        taken_s.append(time.perf_counter() - start_s)
    counted = taken_s[_UNCOUNTED:]
    return 1000 * statistics.median(counted) if len(counted) >= _LEAST_COUNTED else None


def _spread(ends: Sequence[tuple[float, int]]) -> float:
    """Return the rate difference of the two halves of a loop, as a share of their mean."""
    middle = len(ends) // 2
    rates = [
        sum(count for _, count in part[1:]) / max(part[-1][0] - part[0][0], 1e-9)
        for part in (ends[: middle + 1], ends[middle:])
    ]
    return abs(rates[0] - rates[1]) / max(sum(rates) / 2, 1e-9)
