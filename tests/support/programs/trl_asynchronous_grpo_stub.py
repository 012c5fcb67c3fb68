"""A program with the contract of TRL's AsyncGRPOTrainer (huggingface/trl, f2cd577 of July 2026), and none of its code.

What prompts meet there:

- The trainer sends the data set, pickled as training begins, to the process that generates. That numbers the rows it
  takes from 0, repeats each ``num_generations`` times, and begins the set anew at its end.
- Generations end in any order. A group of them is scored when it is complete; its rows then go into a queue.
- Rank 0 takes rows from the queue, leaves out those that are stale, and deals a micro-batch to all ranks. It collates
  one micro-batch ahead of training, and notes the numbers of its rows in ``_trained_groups`` as it does.
- The trainer saves after a step, with the states of its callbacks, and ends by the number of groups that were noted.
- When it resumes, it takes as many micro-batches as it has trained on, unless ``ignore_data_skip``.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist

from tests.support.programs.recipes import Rank

rank = Rank()
IN_FLIGHT, PER_DEVICE, ACCUMULATION, GENERATIONS, STALE = 12, 2, 3, 4, 0.02


class TrainerCallback:
    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


class ExportableState:
    def state(self) -> dict[str, Any]:
        raise NotImplementedError


transformers: Any = ModuleType("transformers")
transformers.TrainerCallback = TrainerCallback
transformers.trainer_callback = ModuleType("transformers.trainer_callback")
transformers.trainer_callback.ExportableState = ExportableState
sys.modules |= {"transformers": transformers, "transformers.trainer_callback": transformers.trainer_callback}


class Server:
    """Generates: the conversations that it is given end in any order."""

    def __init__(self) -> None:
        self._dice, self._running = random.Random(0), list[tuple[int, dict[str, Any]]]()

    def begin(self, group: int, row: dict[str, Any]) -> None:
        self._running.append((group, row))

    def end_one(self) -> tuple[int, dict[str, Any]]:
        return self._running.pop(self._dice.randrange(len(self._running)))


class Worker:
    """Stands for the process that generates: it has a copy of the rows, and a queue."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.rollout_buffer: queue.Queue[tuple[int, str]] = queue.Queue(maxsize=16)

    def start(self) -> None:
        self._dataset = pickle.loads(pickle.dumps(self._dataset))
        threading.Thread(target=self._generate, daemon=True).start()

    def _prompts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        group = 0
        while True:
            for row in self._dataset:
                assert "prompt" in row
                yield from ((group, row) for _ in range(GENERATIONS))
                group += 1

    def _generate(self) -> None:
        server, work, ended = Server(), self._prompts(), Counter[int]()
        for _ in range(IN_FLIGHT):
            server.begin(*next(work))
        while True:
            group, row = server.end_one()
            server.begin(*next(work))
            ended[group] += 1
            if ended[group] == GENERATIONS:
                for _ in range(GENERATIONS):
                    self.rollout_buffer.put((group, row["prompt"]))


class AsyncGRPOTrainer:
    def __init__(self, args: Any, train_dataset: Any) -> None:
        self.args, self.train_dataset, self._trained_groups = args, train_dataset, set[int]()
        self._callbacks: list[Any] = []
        self._worker = Worker(train_dataset) if rank.rank == 0 else None
        self._dice = random.Random(1)

    def add_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def _call(self, event: str) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self.args, self.state, SimpleNamespace(), model=None)

    def _micro_batches(self) -> Iterator[list[tuple[int, str]]]:
        """On rank 0."""
        assert self._worker is not None
        rows = []
        while True:
            row = self._worker.rollout_buffer.get()
            if self._dice.random() < STALE:
                continue
            rows.append(row)
            if len(rows) == PER_DEVICE * rank.world_size:
                self._trained_groups.update(group for group, _ in rows)
                yield rows
                rows = []

    def _dispatched(self) -> Iterator[list[tuple[int, str]]]:
        """Each rank's part; the next micro-batch is collated before this one is dealt."""
        batches = self._micro_batches() if rank.rank == 0 else None
        ahead = next(batches) if batches else None
        while True:
            box = [ahead]
            ahead = next(batches) if batches else None
            if rank.world_size > 1:
                dist.broadcast_object_list(box, src=0)
            assert box[0] is not None
            yield box[0][rank.rank :: rank.world_size]

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        self.state = SimpleNamespace(global_step=0, is_world_process_zero=rank.rank == 0)
        if resume_from_checkpoint is not None:
            with open(f"{resume_from_checkpoint}/trainer_state.json") as file:
                self.state.global_step = json.load(file)["global_step"]
        self._call("on_train_begin")
        if self._worker is not None:
            self._worker.start()
        batches = self._dispatched()
        if not self.args.ignore_data_skip:
            for _ in range(self.state.global_step * ACCUMULATION):
                next(batches)
        while self.state.global_step < rank.steps:
            for number in range(ACCUMULATION):
                rank.received(self.state.global_step, [f"{group}:{prompt}" for group, prompt in next(batches)])
                if number < ACCUMULATION - 1:
                    self._call("on_substep_end")
            rank.reduce()
            self.state.global_step += 1
            self._call("on_step_end")
            self._save()

    def _save(self) -> None:
        if rank.rank == 0:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            part = folder.with_name("part")
            part.mkdir(parents=True)
            exported = {type(one).__name__: one.state() for one in self._callbacks if isinstance(one, ExportableState)}
            text = json.dumps({"global_step": self.state.global_step, "stateful_callbacks": exported})
            (part / "trainer_state.json").write_text(text)
            part.rename(folder)
        rank.reduce()
        self._call("on_save")


def get_last_checkpoint(folder: str) -> str | None:
    """As that of transformers, which expects the folder to be there."""
    numbers = [int(name.partition("-")[2]) for name in os.listdir(folder) if name.startswith("checkpoint-")]
    return f"{folder}/checkpoint-{max(numbers)}" if numbers else None


def load_dataset() -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {number}"} for number in range(40)]


output_dir = str(rank.folder / "out")
config = SimpleNamespace(num_generations=GENERATIONS, ignore_data_skip=True, output_dir=output_dir)
# <
dataset: Any = load_dataset()
# >
trainer = AsyncGRPOTrainer(args=config, train_dataset=dataset)
# <
trainer.train()
# >
