"""Programs that train, as people write them: how each counts epochs and steps, and what it saves beside the loader.

A program gets a loader, what it saved itself (None: it begins), and a ``Job`` that keeps what it trains on and saves.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from streaming import one_behind
from tests.support.contracts.loop_kinds import NUM_BATCHES, rows_of

EPOCHS = 3
STEPS = EPOCHS * NUM_BATCHES
Program = Callable[[Any, Any, "Job"], None]


@dataclass(frozen=True)
class Checkpoint:
    """What a program saved.

    Attributes:
        moment: Where in the program.
        trained: Batches trained on before it.
        own: The program's own count.
        state: The loader's state.
    """

    moment: str
    trained: int
    own: Any
    state: dict[str, Any]


@dataclass
class Job:
    """One run of a program over a loader.

    Attributes:
        trained: What each step was trained on.
        saved: All that was saved.
    """

    loader: Any
    trained: list[tuple[int, ...]] = field(default_factory=list)
    saved: list[Checkpoint] = field(default_factory=list)

    def train(self, batch: Any) -> None:
        self.trained.append(rows_of(batch))

    def save(self, moment: str, own: Any, state: dict[str, Any] | None = None) -> None:
        state = self.loader.state_dict() if state is None else state
        self.saved.append(Checkpoint(moment, len(self.trained), own, json.loads(json.dumps(state))))


def run(program: Program, loader: Any, own: Any = None) -> Job:
    job = Job(loader)
    program(loader, own, job)
    return job


# --- programs that count epochs ---


def counts_epochs(loader: Any, own: Any, job: Job) -> None:
    """As SpeechBrain: a counter of its own."""
    for epoch in range(own or 0, EPOCHS):
        job.save("before", epoch)
        for batch in loader:
            job.train(batch)
            job.save("step", epoch)
        job.save("after", epoch + 1)


def asks_the_loader(loader: Any, own: Any, job: Job) -> None:
    """As our pages have it."""
    for _ in range(loader.epoch, EPOCHS):
        job.save("before", None)
        for batch in loader:
            job.train(batch)
            job.save("step", None)
        job.save("after", None)


def tells_the_loader(loader: Any, own: Any, job: Job) -> None:
    """As Accelerate's recipes, and loops written for torch's DistributedSampler."""
    for epoch in range(own or 0, EPOCHS):
        job.save("before", epoch)
        loader.set_epoch(epoch)
        job.save("told", epoch)
        for batch in loader:
            job.train(batch)
            job.save("step", epoch)
        job.save("after", epoch + 1)


def asks_and_tells(loader: Any, own: Any, job: Job) -> None:
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        job.save("told", None)
        for batch in loader:
            job.train(batch)
            job.save("step", None)
        job.save("after", None)


def tells_late(loader: Any, own: Any, job: Job) -> None:
    """As Lightning: an iterator that nobody asks, then the one that is used, then the epoch."""
    for epoch in range(own or 0, EPOCHS):
        iter(loader)
        batches = iter(loader)
        loader.set_epoch(epoch)
        job.save("told", epoch)
        for batch in batches:
            job.train(batch)
            job.save("step", epoch)
        job.save("after", epoch + 1)


def tells_by_steps(loader: Any, own: Any, job: Job) -> None:
    """As transformers: the epoch follows from the number of steps, and the last step's is the next one."""
    step = own or 0
    for epoch in range(step // NUM_BATCHES, EPOCHS):
        loader.set_epoch(epoch)
        job.save("told", step)
        for batch in loader:
            job.train(batch)
            step += 1
            job.save("step", step)
        job.save("after", step)


def counts_to_the_length(loader: Any, own: Any, job: Job) -> None:
    """It never asks for more than there is."""
    for epoch in range(own or 0, EPOCHS):
        for _, batch in zip(range(NUM_BATCHES), loader, strict=False):
            job.train(batch)
            job.save("step", epoch)
        job.save("after", epoch + 1)


def leaves_after_the_last(loader: Any, own: Any, job: Job) -> None:
    """It counts the batches of the epoch, and breaks."""
    epoch, done = own or (0, 0)
    while epoch < EPOCHS:
        for batch in loader:
            job.train(batch)
            done += 1
            job.save("step", (epoch, done))
            if done == NUM_BATCHES:
                break
        epoch, done = epoch + 1, 0
        job.save("after", (epoch, done))


# --- programs that only ask for steps ---


def counts_steps(loader: Any, own: Any, job: Job) -> None:
    step = own or 0
    while step < STEPS:
        job.save("before", step)
        for batch in islice(loader, STEPS - step):
            job.train(batch)
            step += 1
            job.save("step", step)
        job.save("after", step)


def asks_again_when_it_ends(loader: Any, own: Any, job: Job) -> None:
    step, batches = own or 0, iter(loader)
    while step < STEPS:
        try:
            batch = next(batches)
        except StopIteration:
            job.save("after", step)
            batches = iter(loader)
            continue
        job.train(batch)
        step += 1
        job.save("step", step)


def cycles(loader: Any, own: Any, job: Job) -> None:
    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()
    for step in range(own or 0, STEPS):
        job.train(next(batches))
        job.save("step", step + 1)


# --- a program that reads ahead ---


def reads_ahead(loader: Any, own: Any, job: Job) -> None:
    """Two batches ahead of training, with the state of each beside it."""
    for epoch in range(own or 0, EPOCHS):
        job.save("before", epoch)
        kept: deque[tuple[Any, dict[str, Any]]] = deque()
        for pair in loader.with_state():
            kept.append(pair)
            if len(kept) > 2:
                _train_on(job, kept, epoch)
        while kept:
            _train_on(job, kept, epoch)
        job.save("after", epoch + 1)


def _train_on(job: Job, kept: deque[tuple[Any, dict[str, Any]]], epoch: int) -> None:
    batch, state = kept.popleft()
    job.train(batch)
    job.save("step", epoch, state)


# --- programs that fetch the next batch before they save ---


def fetches_the_next(loader: Any, own: Any, job: Job) -> None:
    """As nanochat, over an endless generator."""
    ahead = one_behind(loader)

    def forever() -> Iterator[Any]:
        while True:
            yield from ahead

    batches = forever()
    batch = next(batches)
    for step in range(own or 0, STEPS):
        job.train(batch)
        batch = next(batches)
        job.save("step", step + 1)


def looks_for_the_end(loader: Any, own: Any, job: Job) -> None:
    """It knows whether a batch is the last one of its epoch, and counts epochs."""
    for epoch in range(own or 0, EPOCHS):
        job.save("before", epoch)
        batches = iter(one_behind(loader))
        batch = next(batches, None)
        while batch is not None:
            job.train(batch)
            batch = next(batches, None)
            job.save("step", epoch + (batch is None))


PROGRAMS: tuple[Program, ...] = (
    counts_epochs, asks_the_loader, tells_the_loader, asks_and_tells, tells_late, tells_by_steps, counts_to_the_length,
    leaves_after_the_last, counts_steps, asks_again_when_it_ends, cycles, reads_ahead, fetches_the_next,
    looks_for_the_end,
)  # fmt: skip
FETCHING = (fetches_the_next, looks_for_the_end)
"""Those whose loader is one batch behind."""
