"""``micro_batch_size``: a step is the same on any world, whatever it is cut into, and a run resumes inside one."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from streaming import DataLoader, DevicePrefetcher, Packed, Schedule, StreamingDataset
from streaming.errors import ConfigError, StateError
from tests.support.contracts.option_kinds import COUNT, KINDS, Places, plain
from tests.support.processes.played_ranks import Play, played
from tests.support.sets.data_sets import mesh_of
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

STEPS = 12
"""Steps that a case reads: more than two epochs of most."""
CASES, PER_TEST = 1_000, 25
INDEXED = ("plain", "where", "mixture", "nested", "packed", "padded", "by size", "balanced", "curriculum")
ONE_BY_ONE = ("padded", "by size")
"""Kinds of which each row is a batch by itself."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places.write(tmp_path_factory.mktemp("micro"))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return played(monkeypatch)


# --------------------------------------------------------------------------------------------------------- what is seen


def rows_of(kind: str, batch: Any) -> list[str]:
    """The rows of a batch that count, each as text of all that it holds."""
    if isinstance(batch, list):  # by collate_fn=list
        return [row for one in batch for row in one_row(one)]
    if kind in ONE_BY_ONE:
        return one_row(batch) if batch["__key__"] else []
    count = len(batch["__key__"])
    marks = batch["__valid__"].tolist() if "__valid__" in batch else [True] * count
    wide = {name: value for name, value in batch.items() if hasattr(value, "__len__") and len(value) == count}
    each = [{name: value[i] for name, value in wide.items() if name != "cu_seqlens"} for i in range(count)]
    return [row for one, counts in zip(each, marks, strict=True) for row in one_row(one | {"__valid__": counts})]


def one_row(row: Any) -> list[str]:
    """A row as text, or nothing if it does not count."""
    valid = row.get("__valid__", True)
    content = {name: value for name, value in row.items() if name not in ("__valid__", "cu_seqlens", "max_seqlen")}
    counts = valid if isinstance(valid, bool) else bool(valid.all())
    return [json.dumps(plain(content), default=str)] if counts else []


def size_of(kind: str, batch: Any) -> int:
    """Rows as planned, those that fill a batch up too."""
    if isinstance(batch, list):
        return len(batch)
    return int(bool(batch["__key__"])) if kind in ONE_BY_ONE else len(batch["__key__"])


@dataclass
class Seen:
    """A step as one rank saw it.

    Attributes:
        num_rows: What it says of its rows.
        num_labels: What it says of its labels on this rank; None: rows have none.
        parts: The rows of each micro-batch that was taken.
        sizes: Their sizes.
        states: The state behind each.
    """

    num_rows: int
    num_labels: int | None
    parts: list[list[str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        return [row for part in self.parts for row in part]


@dataclass(frozen=True)
class Case:
    """Options of a run, drawn from a number."""

    kind: str
    options: dict[str, Any]
    world: int
    micro: int
    places: Places

    @classmethod
    def draw(cls, number: int, places: Places, kinds: tuple[str, ...] = INDEXED) -> Case:
        rng = random.Random(number)
        kind, world = rng.choice(kinds), rng.randint(1, 4)
        most = 4 if kind in (*ONE_BY_ONE, "packed") else 11
        size: Any = rng.randint(world, max(world, most))
        if rng.random() < 0.15 and kind not in ("curriculum", "unindexed"):
            size = Schedule.steps({0: size, rng.randint(1, 20): rng.randint(world, max(world, most))})
        options = {"global_batch_size": size, "last_batch": rng.choice(["drop", "partial", "pad"])}
        options["num_threads"] = rng.choice([0, 0, 2])
        if rng.random() < 0.3 and kind not in ONE_BY_ONE:
            options["collate_fn"] = list
        micro = 1 if kind in ONE_BY_ONE else rng.choice([1, 2, 3, 4, 5, 20])
        return cls(kind, KINDS[kind].loader | options, world, micro, places)

    def loader(self, rank: int = 0, world: int | None = None, **more: Any) -> DataLoader:
        options = {name: value for name, value in self.options.items() if name != "batch_size"}
        data = KINDS[self.kind].make(self.places, {"Packed": {"length": 8}} if self.kind == "packed" else {})
        return DataLoader(data, device_mesh=mesh_of(world or self.world, rank), **options, **more)

    def whole(self, rank: int, world: int) -> list[list[str]]:
        """The rows of each batch of a rank whose batches are not cut."""
        more = {"collate_fn": list} if self.kind in ONE_BY_ONE else {}
        with self.loader(rank, world, **more) as loader:
            return [rows_of(self.kind, batch) for batch in islice(batches_of(loader), STEPS)]

    def cut(self, rank: int, world: int, state: Any = None, most: int = STEPS) -> list[Seen]:
        """The steps of a rank."""
        with self.loader(rank, world, micro_batch_size=self.micro) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            return [self.taken(loader, step) for step in islice(steps_of(loader), most)]

    def taken(self, loader: Any, step: Any) -> Seen:
        labels = step.num_labels if self.kind in ("packed", "padded") and "collate_fn" not in self.options else None
        seen, left = Seen(step.num_rows, labels), len(step)
        for part in step:
            seen.parts.append(rows_of(self.kind, part))
            seen.sizes.append(size_of(self.kind, part))
            seen.states.append(loader.state_dict())
        assert len(seen.parts) == left
        return seen


def batches_of(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def steps_of(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader.steps()


def merged(ranks: list[list[Seen]]) -> list[Counter[str]]:
    return [Counter(row for one in step for row in one.rows) for step in zip(*ranks, strict=True)]


def check_cut(case: Case, ranks: list[list[Seen]]) -> None:
    """All ranks have as many micro-batches, which differ by at most a row on each and hold at most what was asked."""
    for step in zip(*ranks, strict=True):
        assert len({len(one.sizes) for one in step}) == 1
        assert all(one.num_rows == sum(len(two.rows) for two in step) for one in step)
        assert all(max(one.sizes) - min(one.sizes) <= 1 for one in step)
        most = max(max(one.sizes) for one in step)
        assert most <= case.micro
        shares = [sum(one.sizes) for one in step]
        assert len(step[0].sizes) == -(-max(shares) // case.micro) or not max(shares)
        assert all(one.states == step[0].states for one in step)


def check_case(case: Case) -> None:
    try:
        truth = case.whole(0, 1)
    except ConfigError as error:
        assert "do not fill one global batch" in str(error)
        return
    ranks = [case.cut(rank, case.world) for rank in range(case.world)]
    check_cut(case, ranks)
    assert merged(ranks) == list(map(Counter, truth))
    last = case.world - 1
    assert [step.rows for step in ranks[last]] == case.whole(last, case.world), "as on the rank whose steps are not cut"


def check_resumed(case: Case, number: int, caplog: pytest.LogCaptureFixture) -> None:
    """A run goes on behind any micro-batch: there in the same world, from the beginning of the step in another one."""
    try:
        ranks = [case.cut(rank, case.world) for rank in range(case.world)]
    except ConfigError as error:
        assert "do not fill one global batch" in str(error)
        return
    rng = random.Random(number)
    step = rng.randrange(len(ranks[0]) - 1)
    part = rng.randrange(len(ranks[0][step].parts))
    state = ranks[0][step].states[part]
    is_inside = part + 1 < len(ranks[0][step].parts)
    world = rng.choice([case.world, case.world, rng.randint(1, 4)])
    sizes = case.options["global_batch_size"]
    if world > (min(sizes.at(0), sizes.at(10**6)) if isinstance(sizes, Schedule) else sizes):
        world = case.world
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = [case.cut(rank, world, state, STEPS - step - (not is_inside)) for rank in range(world)]
    told = [line for line in caplog.messages if "the whole step comes again" in line]
    if not is_inside or world == case.world:
        assert not told
        due = [[one.parts for one in rank[step + (not is_inside) :]] for rank in ranks]
        if is_inside:
            due = [[rank[0][part + 1 :], *rank[1:]] for rank in due]
        if world == case.world:
            assert [[one.parts for one in rank] for rank in found] == due
        whole = merged(ranks)[step + 1 :]
        assert merged(found)[is_inside:] == whole
    else:
        assert len(told) == world
        assert merged(found) == merged(ranks)[step:]
        check_cut(case, found)


@pytest.mark.parametrize("first", first_here(range(0, CASES, PER_TEST), 2))
def test_steps_are_the_same_on_any_world_and_resume_inside(
    places: Places, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """1,000 random cases of set, sizes, world and place of the resume, in the model's steps; ``make test`` has 50."""
    for number in range(first, first + PER_TEST):
        case = Case.draw(number, places)
        try:
            check_case(case)
            check_resumed(case, number, caplog)
        except BaseException as error:
            error.add_note(f"case {number}: {case}")
            raise


