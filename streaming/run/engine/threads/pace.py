"""Compare, within one run, the cost of a sample in threads of this process and in worker processes.

Threads build the first batches, until a worker process is up, so both do the same work on the same machine.
"""

from __future__ import annotations

import logging
import time
from itertools import count

from streaming.common.counters import Metrics

_log = logging.getLogger(__name__)

MARGIN = 1.25
"""Factor by which processes must be slower than threads, by both clocks, before it is logged."""
LEAST_SAMPLES = 32
LEAST_HERE_S = 0.05
"""Minimum number of samples that threads have built, and minimum CPU time for them."""
LEAST_THERE_S = 1.0
LEAST_THERE = 8
"""Minimum time for which worker processes have built, and minimum number of their batches, on average per process."""
_WARMS_UP = 1
"""Number of first batches of a thread or process that do not count: they load libraries and touch memory."""
WAITS = 0.5
"""Minimum share of the time that the consumer waits for builders: otherwise a slow builder slows nothing."""

Lap = tuple[float, float]
"""Start of some work: by the clock, and in CPU time of its thread."""


class WorkerPace:
    """Log once if a loader's worker processes are slower than its threads would be. Thread-safe.

    If threads may continue to build (``acts``), the message says that they do.

    The rate of threads is that of the first batches, times the number of cores. Functions that may hold the GIL count
    as one thread, whatever the number of threads. CPU time alone misses waiting, and wall time alone grows while others
    use the machine, so both must agree.

    Args:
        metrics: Counts ``wait_for_build_s``.
        num_workers: Number of worker processes.
        num_threads: Number of threads that would build without them; 0: nothing is built here, and nothing compared.
        num_cores: Number of cores that all of them share.
        acts: Threads may continue to build if they are faster, since batches need no user code.

    Attributes:
        is_open: Whether batches are still compared. Until then each costs some microseconds, and nothing afterwards.
        threads_first: Whether threads continue to build, because processes are slower.
    """

    def __init__(
        self, metrics: Metrics, num_workers: int, num_threads: int, num_cores: int, *, acts: bool = False
    ) -> None:
        self.is_open = num_workers > 0 and num_threads > 0
        self.threads_first = False
        self._acts, self._num_threads = acts, num_threads
        self._metrics = metrics
        self._num_workers, self._num_cores = num_workers, num_cores
        self._lanes = min(num_threads, num_cores)
        self._seen = Metrics()  # sums; threads add to them, and forked children may
        self._num_here, self._num_there, self._ends = count(), count(), count()  # each number is used once
        self._since = time.perf_counter(), 0.0

    def begin(self) -> Lap:
        """Note that this thread begins a batch, or gives one to a process."""
        return (time.perf_counter(), time.thread_time()) if self.is_open else (0.0, 0.0)

    def here(self, lap: Lap, samples: int, *, in_parallel: bool) -> None:
        """Note that this thread has built a batch; ``in_parallel``: as fast as if it were the only one."""
        if not self.is_open:
            return
        if not in_parallel:
            self._lanes, self._acts = 1, False
        if next(self._num_here) >= _WARMS_UP:
            self._add("here", lap, samples)

    def there(self, lap: Lap, samples: int, worker_cpu_s: float) -> None:
        """Note that a worker process has built a batch for this thread, in ``worker_cpu_s`` of its CPU time."""
        if not self.is_open:
            return
        early = _WARMS_UP * self._num_workers - next(self._num_there)
        if early == 1:
            self._since = time.perf_counter(), self._metrics.get("wait_for_build_s")
        if early > 0:
            return
        self._add("there", lap, samples, worker_cpu_s)
        seen = self._seen.snapshot()
        if seen.get("here_cpu_s", 0.0) < LEAST_HERE_S or seen["here"] < LEAST_SAMPLES:
            self.is_open = False
        elif early <= -LEAST_THERE * self._num_workers and seen["there_s"] >= LEAST_THERE_S * self._num_workers:
            self.is_open = False
            if next(self._ends) == 0:
                self._conclude(seen)

    def _add(self, who: str, lap: Lap, samples: int, more_cpu_s: float = 0.0) -> None:
        wall_s, cpu_s = time.perf_counter() - lap[0], time.thread_time() - lap[1] + more_cpu_s
        self._seen.add_each({who: samples, f"{who}_s": wall_s, f"{who}_cpu_s": cpu_s})

    def _conclude(self, seen: dict[str, float]) -> None:
        """Log that processes are slower, if that is clear and matters. Let threads continue to build if they may."""
        begun_s, before_s = self._since
        waited_s = self._metrics.get("wait_for_build_s") - before_s
        few_waits = waited_s < WAITS * (time.perf_counter() - begun_s)
        threads_each_s, workers_each_s = seen["here"] / seen["here_s"], seen["there"] / seen["there_s"]
        if self._acts:  # threads build beside processes in any case, so one thread is compared with one process
            lanes, workers, cores = 1, 1, 1
        else:
            lanes, workers, cores = self._lanes, self._num_workers, min(self._num_workers, self._num_cores)
        by_clock = lanes * threads_each_s, workers * workers_each_s
        by_cpu = lanes * seen["here"] / seen["here_cpu_s"], cores * seen["there"] / seen["there_cpu_s"]
        if few_waits or any(here < MARGIN * there for here, there in (by_clock, by_cpu)):
            return
        if self._acts:
            self.threads_first = True
            _log.info(
                "a worker process builds %s samples per second of CPU time, and a thread of this process, at the pace "
                "of the first batches, %s: threads of this process (%d) continue to build, and worker processes (%d) "
                "build the rest. The batches are the same; num_threads=0 leaves all of them to worker processes",
                f"{by_cpu[1]:,.0f}", f"{by_cpu[0]:,.0f}", self._num_threads, self._num_workers,
            )  # fmt: skip
            return
        _log.warning(
            "num_workers=%d is slower here than num_workers=0: worker processes (%d) build %s samples/s, and threads "
            "of this process (%d), at the pace of the first batches, %s/s. This process may use %d cores",
            self._num_workers, self._num_workers, f"{by_clock[1]:,.0f}", self._lanes, f"{by_clock[0]:,.0f}",
            self._num_cores,
        )  # fmt: skip
