"""Random data sets in random histories, against one rank to which nothing happens.

A case draws a tree of data sets (filters, parts, mixtures in mixtures, packs, curricula, classes) and options of the
loader; then what happens to a job: batches, checkpoints with which other numbers of ranks go on, ``remesh``, copies,
loops that are left, other seeds, epochs, weights and sources, with and without a ``DevicePrefetcher``. Each global
batch is compared with the one that a single rank gets at that place, as are the states of all ranks; at last a run
without end is played once more, by the ledger of its last state alone.

A failure names the case, which is drawn from its seed and number. The normal run plays 10, ``make differential`` a
twentieth of its cases.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import (
    DataLoader,
    DevicePrefetcher,
    Schedule,
)  # fmt: skip
from streaming.errors import ConfigError, MemoryLimitError, StateError
from tests.support.models.drawn_sets import (
    MOST_RANKS,
    SIZES,
    Spec,
    draw_options,
    draw_tree,
    draw_weights,
    make,
    packs_of,
)
from tests.support.sets.data_sets import mesh_of

Changes = list[tuple[int, dict[str, float]]]
"""Rows from which other weights hold."""
Rows = Counter[tuple[Any, ...]]
"""Rows of a global batch: key, source, and what the transform drew or the tokens of the pack."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("histories")
    for name, size in SIZES.items():
        dice = np.random.default_rng(size)
        columns = {"tokens": lambda one: len(one["tok"]) // 2, "cls": lambda one: one["cls"]}
        with ShardWriter(str(root / name / "{:06d}.tar"), max_samples=max(5, size // 4), columns=columns) as writer:
            for number in range(size):
                length = int(min(400, dice.lognormal(3.0, 1.2)))
                tokens = dice.integers(0, 60_000, length, np.uint16).tobytes()
                writer.write({"__key__": f"{name}{number:04d}", "cls": int(dice.integers(5)), "tok": tokens})
    return root


def rows_of(batch: Mapping[str, Any]) -> Rows:
    keys = batch["__key__"]
    valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(keys)
    sources = batch.get("__source__", [None] * len(keys))
    content: list[Any]
    if "input_ids" in batch:
        keys = [tuple(documents) for documents in keys]
        content = [(ids.numpy().tobytes(), labels.numpy().tobytes())
                   for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)]  # fmt: skip
    else:  # sources that draw nothing have no such field, in some batches beside others that do
        content = [None if draw is None else int(draw) for draw in batch.get("draw", [None] * len(keys))]
    rows = zip(keys, sources, content, valid, strict=True)
    return Counter((key, source, what) for key, source, what, is_valid in rows if is_valid)


def pickled(loader: DataLoader) -> DataLoader:
    copied: DataLoader = pickle.loads(pickle.dumps(loader))
    return copied


class Undisturbed:
    """What one rank gets, by seed, epoch and number of the batch; behind a state from which it went on."""

    def __init__(self, case: Case, changes: Changes, base: Any = None, first: int = 0) -> None:
        self._case, self._changes, self._base, self._first = case, changes, base, first
        self._open: dict[tuple[int | None, int], tuple[DataLoader, Iterator[Any], list[Rows | None]]] = {}

    def batch(self, seed: int | None, epoch: int, number: int) -> Rows | None:
        """The batch; None behind the last one."""
        if (seed, epoch) not in self._open:
            loader = self._case.loader(1, 0)
            if seed is not None:
                loader.seed(seed)
            if self._base is not None:
                loader.load_state_dict(self._base)
            for row, weights in self._changes:
                loader.set_weights(weights, at=row)
            if epoch:
                loader.set_epoch(epoch)
            self._open[seed, epoch] = loader, iter(loader), [None] * self._first
        _, batches, got = self._open[seed, epoch]
        while len(got) <= number:
            batch = next(batches, None)
            if batch is None:
                return None
            got.append(rows_of(batch))
        return got[number]

    def close(self) -> None:
        for loader, _, _ in self._open.values():
            loader.close()


class Case:
    """A job: its ranks, and where they are to be.

    ``epoch`` and ``number`` are the batch that is due; ``seed`` is in force, ``next_seed`` waits for the next epoch.
    """

    def __init__(self, dice: random.Random, folder: Path) -> None:
        self.dice, self.folder = dice, folder
        if dice.random() < 0.1:
            self.spec: Spec = {"kind": "numbers", "size": dice.choice((5, 60, 333))}
        else:
            self.spec = draw_tree(dice, 0, dice.choice((64, 128, 300)) if dice.random() < 0.3 else 0)
        self.options = draw_options(dice, self.spec)
        self.depth = dice.choice((0, 1, 2))  # of a DevicePrefetcher
        size = self.options["global_batch_size"]
        self.most_ranks = min(MOST_RANKS, *(size.values() if isinstance(size, dict) else [size]))
        self.told: list[str] = []
        self.ranks: list[Any] = []
        self.iterators: list[Iterator[Any]] | None = None
        self.seed: int | None = None
        self.next_seed: int | None = None
        self.epoch = self.number = 0
        self.changes: Changes = []
        self.base: Any = None
        self.first = 0
        self.received: list[Rows] = []
        self.reference = Undisturbed(self, [])

    def loader(self, num_ranks: int, rank: int) -> DataLoader:
        size = self.options["global_batch_size"]
        options = {**self.options, "global_batch_size": Schedule.steps(size) if isinstance(size, dict) else size}
        return DataLoader(make(self.folder, self.spec), device_mesh=mesh_of(num_ranks, rank), **options)

    def front(self, num_ranks: int, rank: int) -> Any:
        """What the loop of a rank iterates."""
        loader = self.loader(num_ranks, rank)
        return DevicePrefetcher(loader, "cpu", depth=self.depth) if self.depth else loader

    def loader_of(self, front: Any) -> DataLoader:
        loader: DataLoader = front.loader if self.depth else front
        return loader

    def open(self) -> None:
        """Start the job.

        Raises:
            ConfigError: There is no such data set, or no such loader over it.
            MemoryLimitError: It needs more than ``memory_limit``.
        """
        self.ranks = self.world(self.dice.randint(1, self.most_ranks))
        self.reference.batch(None, 0, 0)
        ledger = self.ranks[0].state_dict().get("ledger")
        self.is_endless = bool(ledger) and ledger[-1].get("quotas") is None
        self.is_drawn_from = self.is_endless and self.spec["kind"] == "mixture"
        self.has_passes = not self.is_endless or "epoch_size" in self.options

    def world(self, num_ranks: int, state: Any = None) -> list[Any]:
        ranks = [self.front(num_ranks, rank) for rank in range(num_ranks)]
        for rank in ranks if state is not None else ():
            rank.load_state_dict(json.loads(json.dumps(state)))
        return ranks

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.reference.close()

    def due(self) -> Rows | None:
        return self.reference.batch(self.seed, self.epoch, self.number)

    def step(self) -> bool:
        """Take a batch on each rank; whether there was one."""
        self.iterators = self.iterators or [iter(rank) for rank in self.ranks]
        due, batches = self.due(), [next(iterator, None) for iterator in self.iterators]
        found = [rows_of(batch) for batch in batches if batch is not None]
        assert len(found) == (0 if due is None else len(batches))
        if due is None:
            self.leave()
            return False
        assert sum(found, Counter()) == due
        if not self.has_passes:
            self.received.append(due)
        self.number += 1
        return True

    def leave(self) -> None:
        """Leave the loop: the next one begins the next epoch, if there are epochs."""
        self.iterators = None
        if self.has_passes:
            self.go_to(self.epoch + 1)

    def go_to(self, epoch: int) -> None:
        self.iterators, self.epoch, self.number = None, epoch, 0
        if self.next_seed is not None:
            self.seed, self.next_seed = self.next_seed, None

    def state(self) -> Any:
        """The state, which is the same on all ranks; behind the last batch of an epoch, it is the end of that."""
        states = [json.dumps(rank.state_dict(), sort_keys=True) for rank in self.ranks]
        assert states == states[:1] * len(states)
        if self.has_passes and not self.number:
            self.go_to(self.epoch)
        self.iterators = None
        return json.loads(states[0])

    # --- what happens ---

    def take(self) -> None:
        for _ in range(self.dice.choice((1, 2, 5, 11))):
            if not self.step():
                break

    def whole(self) -> None:
        while self.has_passes and self.number < 200 and self.step():
            pass

    def leave_early(self) -> None:
        if self.iterators is not None and self.number:
            self.leave()
            self.take()

    def resume(self) -> None:
        state = self.state()
        for rank in self.ranks:
            rank.close()
        self.ranks = self.world(self.dice.randint(1, self.most_ranks), state)

    def remesh(self) -> None:
        if self.spec["kind"] == "numbers":
            return
        state, places = self.state(), list(range(self.dice.randint(1, self.most_ranks)))
        self.dice.shuffle(places)
        for rank in self.ranks[len(places) :]:
            rank.close()
        stay = self.ranks[: len(places)]
        self.ranks = stay + [self.front(1, 0) for _ in places[len(stay) :]]
        for rank, place in zip(self.ranks, places, strict=True):
            rank.remesh(place, len(places), at=state)

    def copied(self) -> None:
        if self.depth:
            return
        if self.iterators is not None and self.has_passes and self.due() is None:
            self.leave()  # the copies go on from where the loops left their loaders
        self.state()
        copies = [copy.deepcopy(one) if self.dice.random() < 0.5 else pickled(one) for one in self.ranks]
        for rank in self.ranks:
            rank.close()
        self.ranks = copies

    def set_epoch(self) -> None:
        epoch = self.dice.randint(0, 3) if self.has_passes else self.epoch
        is_in_it = bool(epoch == self.epoch and self.number)
        for rank in self.ranks:
            rank.set_epoch(epoch)
        if is_in_it and self.iterators is None:
            return  # a loaded position is kept
        if self.has_passes:
            self.go_to(epoch)
        if is_in_it:  # only a loop that begins anew goes back
            self.take()

    def set_seed(self) -> None:
        seed = self.dice.randint(10, 15)
        if self.is_endless:
            with pytest.raises(ConfigError, match="without end has one order"):
                self.ranks[0].seed(seed)
            return
        for rank in self.ranks:
            rank.seed(seed)
        self.next_seed = seed
        if self.iterators is None and not self.number:
            self.go_to(self.epoch)

    def set_weights(self) -> None:
        if not self.is_drawn_from:
            return
        weights = draw_weights(self.dice, list(self.spec["sources"]))
        state = self.ranks[0].state_dict()
        row = state["epoch"] * self.options.get("epoch_size", 0) + state["samples_seen"]
        row += self.dice.choice((0, 40, 300, 1_000))
        answers = [self.takes(self.loader_of(rank), weights, row) for rank in self.ranks]
        assert answers in ([True] * len(answers), [False] * len(answers))
        if answers[0]:
            self.go_on_with([*self.changes, (row, weights)], self.base, self.first)

    @staticmethod
    def takes(loader: DataLoader, weights: dict[str, float], row: int) -> bool:
        """Whether the rank takes weights from a row on; it refuses rows that are planned."""
        try:
            return loader.set_weights(weights, at=row) == row
        except ConfigError as refusal:
            return "planned already" not in str(refusal)

    def go_on_with(self, changes: Changes, base: Any, first: int) -> None:
        self.reference.close()
        self.changes, self.base, self.first = changes, base, first
        self.reference = Undisturbed(self, changes, base, first)

    def other_sources(self) -> None:
        """Go on from a checkpoint with a source more, or with other weights."""
        if not self.is_drawn_from or self.has_passes or isinstance(self.options["global_batch_size"], dict):
            return
        before, spec = self.spec, copy.deepcopy(self.spec)
        if self.dice.random() < 0.5:
            spec["sources"][f"t{len(self.told)}"] = draw_tree(self.dice, 2, packs_of(spec))
        spec["options"]["weights"] = draw_weights(self.dice, list(spec["sources"]))
        state, self.spec = self.state(), spec
        try:
            ranks = self.world(self.dice.randint(1, self.most_ranks), state)
        except ConfigError:  # such as packs of a document set that a filter leaves empty
            self.spec = before
            return
        for rank in self.ranks:
            rank.close()
        self.ranks = ranks
        self.go_on_with([], state, self.number)

    def replay(self) -> None:
        """Play a run without end from its beginning, by the ledger of its last state alone."""
        if self.has_passes or not self.is_drawn_from or not self.received:
            return
        state = self.state() | {"samples_seen": 0, "has_begun": False}
        with self.loader(1, 0) as loader:
            loader.load_state_dict(state)
            assert [rows_of(batch) for batch in islice(loader, len(self.received))] == self.received

    def play(self) -> None:
        happenings = [self.take] * 4 + [self.resume, self.remesh] * 3 + [self.set_weights, self.other_sources] * 2
        happenings += [self.copied, self.leave_early, self.set_epoch] + [self.whole, self.set_seed] * 2
        for _ in range(self.dice.randint(3, 8)):
            happens = self.dice.choice(happenings)
            self.told.append(f"{happens.__name__} in epoch {self.epoch} at batch {self.number} on {len(self.ranks)}")
            happens()
        self.replay()


def play(seed: int, number: int, folder: Path) -> bool:
    """Play a case; whether there was such a job."""
    case = Case(random.Random(f"{seed}/{number}"), folder)
    try:
        try:
            case.open()
        except (ConfigError, MemoryLimitError):
            return False
        try:
            case.play()
        except MemoryLimitError:  # a later epoch, or a larger world's smaller one, needs more
            assert "memory_limit" in case.options
        except (AssertionError, ConfigError, StateError) as error:
            story = "; ".join(case.told)
            raise AssertionError(f"case {number} of seed {seed}: {case.spec} {case.options}: {story}") from error
    finally:
        case.close()
    return True


def test_a_job_gets_what_an_undisturbed_rank_gets(folder: Path, request: pytest.FixtureRequest) -> None:
    count = max(10, request.config.option.differential_cases // 20)
    first, seed = request.config.option.differential_first, request.config.option.differential_seed
    played = [play(seed, number, folder) for number in range(first, first + count)]
    assert sum(played) > count / 3, "else most of what is drawn is refused"
