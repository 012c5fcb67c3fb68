"""One contestant over one workload in the storage benchmark's engine; runs in the engine's environment.

``MLPERF_STORAGE_TURN`` is a JSON object (see ``run.py``); the result goes to its ``output``. The engine's loop, its
sleep and its utilization are used as they are; only the time of a step is set anew for every epoch, by ``search.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [_HERE, os.path.join(os.path.dirname(_HERE), "peers")]

from contestants import CONTESTANTS
from dlio_benchmark.main import DLIOBenchmark
from dlio_benchmark.utils.utility import DLIOMPI
from loaders import asked
from processes import cpu_s
from search import Trial, search


class Found(Exception):  # noqa: N818  the end of a search
    """The search is over; the argument is its result."""


class Searching(DLIOBenchmark):  # type: ignore[misc]
    """The engine, with a step time for each epoch; several epochs are a trial."""

    def __init__(self, config: dict[str, Any], seconds: float, goal: float, confirmations: int) -> None:
        super().__init__(config)
        self._seconds = seconds
        self._search: Generator[float, Trial, Trial] = search(goal=goal, confirmations=confirmations)
        self.computation_time = next(self._search)
        self.trials: list[Trial] = []
        self._first_epoch = 2
        self._begun_cpu_s = 0.0

    def _train(self, epoch: int) -> int:
        done = epoch - self._first_epoch  # the first epoch, with its imports and processes, is in no trial
        if done <= 0:
            self._begun_cpu_s = cpu_s(os.getpid())
        elif self._is_enough(done):
            trial = self._trial(done)
            self.trials.append(trial)
            try:
                self.computation_time = self._search.send(trial)
            except StopIteration as end:
                raise Found(end.value) from None
            self._first_epoch, self._begun_cpu_s = epoch, cpu_s(os.getpid())
        steps: int = super()._train(epoch)
        return steps

    def _is_enough(self, done: int) -> bool:
        """Epochs of a trial take some seconds together."""
        per_s = self.stats.train_throughput[-done:]
        return sum(self.num_samples * self.num_files_train / one for one in per_s) >= self._seconds

    def _trial(self, done: int) -> Trial:
        batches = done * self.steps_per_epoch
        return Trial(
            step_s=self.computation_time,
            utilization=sum(self.stats.train_au[-done:]) / done / 100,
            cpu_s=(cpu_s(os.getpid()) - self._begun_cpu_s) / batches,
            whole_s=self.batch_size / (sum(self.stats.train_throughput[-done:]) / done),
        )


def configuration(turn: dict[str, Any]) -> dict[str, Any]:
    """The engine's configuration."""
    one = CONTESTANTS[turn["contestant"]]
    reader: dict[str, Any] = {
        "data_loader": one.data_loader, "read_threads": one.workers, "batch_size": turn["batch_size"],
        "file_shuffle": "seed", "sample_shuffle": "seed", "prefetch_size": 2,
    }  # fmt: skip
    if one.plug_in:
        reader |= {"data_loader_classname": f"loaders.{one.plug_in}", "data_loader_sampler": "index"}
    return {
        "model": turn["workload"], "framework": one.framework,
        "workflow": {"generate_data": False, "train": True, "checkpoint": False, "evaluation": False},
        "dataset": {
            "data_folder": os.path.join(turn["data"], one.format), "format": one.format, "keep_files": True,
            "num_files_train": turn["num_samples"] // turn["per_file"][one.format],
            "num_samples_per_file": turn["per_file"][one.format], "record_length": turn["sample_bytes"],
            "record_length_resize": turn["sample_bytes"],
        },
        "reader": reader,
        "train": {"epochs": 1_000_000, "computation_time": 0.0, "seed": 1},
        "checkpoint": {"checkpoint_folder": os.path.join(turn["scratch"], "checkpoints")},
        "storage": {"storage_type": "local_fs", "storage_root": turn["data"]},
        "output": {"folder": turn["scratch"]},
        "metric": {"au": 0.9},
    }  # fmt: skip


def main() -> None:
    turn = asked()
    DLIOMPI.get_instance().initialize()
    engine = Searching(configuration(turn), turn["seconds"], turn["goal"], turn["confirmations"])
    engine.initialize()
    try:
        engine.run()
    except Found as found:
        (best,) = found.args
    rate = best.batches_per_s * turn["batch_size"]
    gigabytes = turn["batch_size"] * turn["sample_bytes"] / 1e9
    result = {
        "samples_per_s": rate, "step_ms": 1e3 * best.step_s, "utilization": best.utilization,
        "cpu_s_per_gb": best.cpu_s / gigabytes, "engine_samples_per_s": turn["batch_size"] / best.whole_s,
        "unhidden_ms": 1e3 * best.step_s * (1 / best.utilization - 1),
        "trials": [[one.step_s, one.utilization] for one in engine.trials],
    }  # fmt: skip
    unfinished = turn["output"] + ".unfinished"
    with open(unfinished, "w") as file:
        json.dump(result, file)
    os.replace(unfinished, turn["output"])
    sys.stdout.flush()
    os._exit(0)  # workers and pipelines of others are left behind: their ends are not measured


if __name__ == "__main__":
    main()
