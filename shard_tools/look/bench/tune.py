"""Try settings of the loader in turn, choose the simplest that is as fast as any, and write it for a loader.

Planning and choosing (``TunePlan``, ``chosen``) are pure; ``tune`` measures, and ``write_tuned`` writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shard_tools.look.bench import decoding
from shard_tools.look.bench.delivery import PAUSED_SHARE, LoopRun, Loops
from shard_tools.look.bench.run import BenchOptions, opened_set
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.common.arguments import MOST_BUILDERS
from streaming.common.platforms import has_worker_processes, memory_bytes, num_cores
from streaming.errors import ConfigError, NotFoundError
from streaming.storage import Storage, redact
from streaming.watch.tuned.file import Tuned, stored

Settings = dict[str, Any]
_ROUNDS = 2
_USUAL_THREADS, _USUAL_AHEAD = 4, 2  # defaults of a loader
_AHEAD = (4, 8)
_AS_FAST, _MOST_SPREAD = 0.05, 0.25
_IS_WAITING = 0.25
"""Share of its time that a loop waits for bytes above which the store limits, so the tried settings do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """The settings to try, and the time they take.

    Attributes:
        builders: Numbers of threads and processes, to be tried first.
        pass_s: Time per pass, its pauses not counted.
        seconds: Upper bound for all passes together, start-up not included.
    """

    builders: tuple[Settings, ...]
    pass_s: float
    seconds: float

    @property
    def num_settings(self) -> int:
        """Number of settings to try."""
        return len(self.builders) + len(_AHEAD)

    @property
    def num_passes(self) -> int:
        """Number of passes over some samples."""
        return _ROUNDS * self.num_settings

    @classmethod
    def of(cls, seconds: float, cores: int, *, processes: bool = True) -> TunePlan:
        """Return the plan for a machine with ``cores`` cores; ``processes``: whether worker processes can run there."""
        most = min(cores, MOST_BUILDERS)
        threads = sorted({1, min(_USUAL_THREADS, most), most})
        workers = sorted({max(1, most // 2), most}) if processes else []
        builders = (
            *({"num_workers": 0, "num_threads": number, "prefetch_factor": _USUAL_AHEAD} for number in threads),
            *({"num_workers": number, "prefetch_factor": _USUAL_AHEAD} for number in workers),
        )
        num_passes = _ROUNDS * (len(builders) + len(_AHEAD))
        return cls(builders=builders, pass_s=seconds / num_passes / (1 + PAUSED_SHARE), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Report):
    """Results of one setting: the medians of its passes.

    Attributes:
        options: Options of ``DataLoader``.
        samples_per_s: Samples delivered per second.
        spread: Difference between the fastest and the slowest pass, as a share of the rate.
        fetch_share: Share of the time that the loop waited for bytes.
        build_share: Share of the time that it waited for batches to be built, or built them.
        unhidden_ms: See ``LoopRun``.
        refused: Why the loader refused to start; "": it started.
    """

    options: Mapping[str, Any]
    samples_per_s: float
    spread: float = 0.0
    fetch_share: float = 0.0
    build_share: float = 0.0
    unhidden_ms: float | None = None
    refused: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any], runs: Sequence[LoopRun]) -> Tried:
        """Summarize the passes with these options."""
        rates = [one.samples_per_s for one in runs]
        unhidden = [one.unhidden_ms for one in runs if one.unhidden_ms is not None]
        rate = median(rates)
        return cls(
            options=options,
            samples_per_s=rate,
            spread=(max(rates) - min(rates)) / max(rate, 1e-9),
            fetch_share=median(one.fetch_share for one in runs),
            build_share=median(one.build_share for one in runs),
            unhidden_ms=median(unhidden) if unhidden else None,
            refused=next((one.refused for one in runs if one.refused), ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport(Report):
    """The chosen options, and all settings that were tried.

    Attributes:
        options: Options of ``DataLoader``, as written into the file.
        why: Why these were chosen.
        tried: All settings, in the order in which they were first tried.
        urls: URLs of the shards, as given.
        batch_size: Samples per batch.
        not_decoded: Fields that fail to decode by default in most samples; they were delivered as raw bytes.
        cores: Cores that this process may use.
        memory_bytes: Memory that it may use.
        seconds: Duration of the measurement.
    """

    options: Mapping[str, Any]
    why: str
    tried: tuple[Tried, ...]
    urls: tuple[str, ...]
    batch_size: int
    not_decoded: tuple[str, ...]
    cores: int
    memory_bytes: int
    seconds: float


def plan_here(options: BenchOptions) -> TunePlan:
    """Return what will be tried in this process."""
    return TunePlan.of(options.seconds, num_cores(), processes=has_worker_processes())


def tune(
    urls: Sequence[str], *, storage_options: Mapping[str, object] | None = None, index_url: str | None = None,
    options: BenchOptions | None = None, progress: Progress | None = None,
) -> TuneReport:  # fmt: skip
    """Try threads, worker processes, then batches ahead, and choose. Writes nothing.

    Args:
        urls: Shards, as for ``StreamingDataset``, with an index.
        storage_options: As for ``StreamingDataset``.
        index_url: Location of the index, if not beside the shards.
        options: Options of the measurement.
        progress: Receives each pass.

    Raises:
        NotFoundError: Nothing matches ``urls``.
        IndexMissingError: The shards have no index; the message says how to make one.
        ConfigError: The set has no samples, or no loader starts with the memory limit.
    """
    options, progress = options or BenchOptions(), progress or NoProgress()
    began_s, storage, plan = time.monotonic(), Storage(storage_options), plan_here(options)
    progress.start(total_bytes=None, total=plan.num_passes)
    opened = opened_set(urls, storage, index_url, options)
    failing = decoding.failing_fields([sample for sample in decoding.some_samples(opened, storage)[0] if sample])
    loops = Loops(
        opened, storage_options or {}, progress, seconds=plan.pass_s, max_bytes=options.max_bytes // plan.num_passes,
        batch_size=options.batch_size, not_decoded=failing,
    )  # fmt: skip
    fixed = {"batch_size": loops.batch_size, "memory_limit": options.limit_bytes}
    tried = tried_in_turn(plan.builders, lambda one: loops.run({**one, **fixed}))
    best = chosen(tried)
    ahead = [{**best.options, "prefetch_factor": number} for number in _AHEAD]
    tried += tried_in_turn(ahead, lambda one: loops.run({**one, **fixed}))
    best = chosen(tried)
    found: Settings = dict(best.options)
    if options.memory_limit is not None:  # else the loader's default, which respects its control group
        found["memory_limit"] = f"{-(-options.memory_limit >> 20)}MiB"
    return TuneReport(
        options=found, why=reason(best, tried), tried=tuple(tried), urls=tuple(urls), batch_size=loops.batch_size,
        not_decoded=failing, cores=num_cores(), memory_bytes=memory_bytes(), seconds=time.monotonic() - began_s,
    )  # fmt: skip


def tried_in_turn(settings: Sequence[Settings], run: Callable[[Settings], LoopRun]) -> list[Tried]:
    """Measure settings in rounds, every other round backward, so that drift affects all settings equally."""
    runs: list[list[LoopRun]] = [[] for _ in settings]
    for number in range(_ROUNDS):
        order = range(len(settings)) if number % 2 == 0 else range(len(settings) - 1, -1, -1)
        for position in order:
            runs[position].append(run(settings[position]))
    return [Tried.of(one, found) for one, found in zip(settings, runs, strict=True)]


def chosen(tried: Sequence[Tried]) -> Tried:
    """Return the simplest setting among those as fast as the fastest, within the spread.

    Raises:
        ConfigError: No loader started.
    """
    started = [one for one in tried if not one.refused]
    if not started:
        raise ConfigError(f"--memory-limit: no loader starts, so there is nothing to tune: {tried[0].refused}")
    least_rate = max(one.samples_per_s for one in started) * (1 - spread_of(started))
    return min((one for one in started if one.samples_per_s >= least_rate), key=_machinery)


def spread_of(tried: Sequence[Tried]) -> float:
    """Return the difference within which rates count as equal: the median spread of passes, within fixed bounds."""
    return min(_MOST_SPREAD, max(_AS_FAST, median(one.spread for one in tried if not one.refused)))


def _machinery(one: Tried) -> tuple[int, int, int]:
    """Sort key for settings by machine resources: no processes first, then fewer builders, then fewer batches ahead."""
    workers = one.options["num_workers"]
    return workers, one.options.get("num_threads", 0), one.options["prefetch_factor"]


def reason(best: Tried, tried: Sequence[Tried]) -> str:
    """Explain why this setting was chosen."""
    fastest = max(tried, key=lambda one: one.samples_per_s)
    said = "the fastest that was tried"
    if fastest is not best:
        slower = 1 - best.samples_per_s / fastest.samples_per_s
        said = (
            f"of those within {spread_of(tried):.0%} of the fastest, the one with the fewest processes, threads and "
            f"batches ahead; it was {slower:.0%} slower"
        )
    if best.fetch_share >= _IS_WAITING:
        said += (
            f"; it waits {best.fetch_share:.0%} of its time for bytes, which none of these options changes: bench "
            "without --tune says what limits the store"
        )
    return said


def check_out(url: str, storage: Storage) -> None:
    """Refuse to overwrite a file that does not hold tuned options.

    Raises:
        ConfigError: Such a file exists.
    """
    if os.path.isdir(url):
        raise ConfigError(f"--out {redact(url)}: this is a folder; name a file in it")
    try:
        stored(storage, url)
    except NotFoundError:
        return
    except ConfigError as error:
        raise ConfigError(
            f"--out {redact(url)}: this file exists and does not hold tuned options, so it is not overwritten; "
            "give another name, or move it away"
        ) from error


def write_tuned(report: TuneReport, url: str, storage: Storage) -> None:
    """Write the chosen options into a file for ``DataLoader(tuned=…)``."""
    tuned = Tuned(
        options=report.options, cores=report.cores, memory_bytes=report.memory_bytes,
        measured={
            "urls": report.urls, "batch_size": report.batch_size, "why": report.why,
            "tried": [one.as_dict() for one in report.tried],
        },
    )  # fmt: skip
    storage.put(url, tuned.to_bytes())
