"""``micro_batch_size``: a step is the same on any world, whatever it is cut into, and a run resumes inside one."""

from __future__ import annotations

import json
import logging
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shard_tools.look.trace import merge_traces
from streaming import Broadcast, DataLoader, DevicePrefetcher, Packed, Schedule, StageFields, StreamingDataset
from streaming.errors import ConfigError, IteratorSupersededError, StateError
from streaming.integrations.batch_numbers import batches_seen, begin_at
from streaming.run.engine import delivery
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import blocks
from tests.support.contracts.option_kinds import COUNT, KINDS, Places, plain
from tests.support.processes.played_ranks import Play, played
from tests.support.sets.data_sets import mesh_of
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

STEPS = 8
"""Steps that a case reads: more than an epoch of most."""
CASES, PER_TEST = 1_000, 10
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
    wide.pop("__micro__", None)
    each = [{name: value[i] for name, value in wide.items() if name != "cu_seqlens"} for i in range(count)]
    return [row for one, counts in zip(each, marks, strict=True) for row in one_row(one | {"__valid__": counts})]


def unmarked(part: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch without what says where it is."""
    return {name: value for name, value in part.items() if name not in ("__step__", "__micro__")}


def one_row(row: Any) -> list[str]:
    """A row as text, or nothing if it does not count."""
    valid = row.get("__valid__", True)
    of_batch = ("__valid__", "cu_seqlens", "max_seqlen", "__step__", "__micro__")
    content = {name: value for name, value in row.items() if name not in of_batch}
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

    @property
    def has_labels(self) -> bool:
        return self.kind in ("packed", "padded") and "collate_fn" not in self.options

    @property
    def is_refused(self) -> bool:
        """Whether an epoch has too few rows for a batch."""
        try:
            self.loader(micro_batch_size=self.micro).close()
        except ConfigError as error:
            if "do not fill one global batch" in str(error):
                return True
            raise
        return False

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
        labels = step.num_labels if self.has_labels else None
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
    truth = case.whole(0, 1)
    ranks = [case.cut(rank, case.world) for rank in range(case.world)]
    check_cut(case, ranks)
    assert merged(ranks) == list(map(Counter, truth))
    if case.has_labels:
        with case.loader(0, 1, micro_batch_size=case.micro) as loader:  # alone, it has all labels of a step
            due = [case.taken(loader, step).num_labels for step in islice(steps_of(loader), STEPS)]
        assert [sum(one.num_labels or 0 for one in step) for step in zip(*ranks, strict=True)] == due
    last = case.world - 1
    assert [step.rows for step in ranks[last]] == case.whole(last, case.world), "as on the rank whose steps are not cut"


def check_resumed(case: Case, number: int, caplog: pytest.LogCaptureFixture) -> None:
    """A run goes on behind any micro-batch: there in the same world, from the beginning of the step in another one."""
    ranks = [case.cut(rank, case.world) for rank in range(case.world)]
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


@pytest.mark.parametrize("first", first_here(range(0, CASES, PER_TEST), 1))
def test_steps_are_the_same_on_any_world_and_resume_inside(
    places: Places, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """1,000 random cases of set, sizes, world and place of the resume, in the model's steps; ``make test`` has 10."""
    for number in range(first, first + PER_TEST):
        case = Case.draw(number, places)
        if case.is_refused:
            continue
        try:
            check_case(case)
            check_resumed(case, number, caplog)
        except BaseException as error:
            error.add_note(f"case {number}: {case}")
            raise


# ------------------------------------------------------------------------------------------- beside other features

SIZE = {"global_batch_size": 8, "micro_batch_size": 3, "last_batch": "partial"}


def loader_of(places: Places, rank: int = 0, world: int = 1, **options: Any) -> DataLoader:
    return DataLoader(StreamingDataset(places.url("whole"), seed=3), device_mesh=mesh_of(world, rank), **SIZE | options)


def keys(batches: Any) -> list[list[str]]:
    return [batch["__key__"] for batch in batches]


def doubled(samples: list[Any]) -> dict[str, Any]:
    """A batch of the user's, whose form depends on its rows."""
    return {"__key__": [one["__key__"] for one in samples], "twice": torch.tensor([2 * one["cls"] for one in samples])}


@dataclass
class Held:
    """A batch of a class of the user's."""

    samples: list[Any]

    def __post_init__(self) -> None:
        self.samples = [one["__key__"] if isinstance(one, dict) else one for one in self.samples]


MADE: dict[str, dict[str, Any]] = {
    "the asking thread": {"num_threads": 0},
    "collate_fn in workers": {"num_workers": 2, "collate_fn": doubled},
    "jagged": {"jagged": ("bin",)},
    "threads": {"num_threads": 2},
    "workers": {"num_workers": 2},
    "collate_fn in threads": {"collate_fn": doubled},
    "nested": {"jagged": {"bin": "nested"}},
    "page-locked, where there is a device": {"pin_memory": True},
}


@pytest.mark.parametrize("name", first_here(MADE, 3))
def test_a_micro_batch_is_what_a_batch_of_its_rows_would_be(places: Places, name: str) -> None:
    """Whoever builds it; also those without rows, which a rank with a smaller share has, and those of one row."""
    for rank, micro in ((0, 1), (1, 1), (2, 2)):
        with loader_of(places, rank, 3, micro_batch_size=micro, **MADE[name]) as loader:
            parts = [part for step in loader.steps() for part in step]
        with loader_of(places, rank, 3, micro_batch_size=micro, **MADE[name]) as loader:
            assert len(loader) == len(parts) == {1: 9, 2: 6}[micro]
            assert [plain(part) for part in loader] == [plain(part) for part in parts], (
                "plain iteration gives them, too"
            )
            assert (loader.batch_size, loader.micro_batch_size, loader.global_batch_size) == (micro, micro, 8)
        sizes = [len(part["__key__"]) for part in parts]
        assert sizes == {(0, 1): [0, 1, 1] * 3, (1, 1): [1, 1, 1] * 3, (2, 2): [1, 2] * 3}[rank, micro]
        whole = {"global_batch_size": 3, "micro_batch_size": None, **MADE[name]}
        with loader_of(places, **whole) as loader:
            form = next(iter(loader))
        for part in parts:
            assert part.keys() == {*form, "__step__", "__micro__"}
            for entry, value in part.items():
                if entry in ("__step__", "__micro__"):
                    continue
                assert type(value) is type(form[entry])
                if isinstance(value, torch.Tensor) and not value.is_nested:
                    assert (value.dtype, value.shape[1:]) == (form[entry].dtype, form[entry].shape[1:])


def drawn(samples: list[Any]) -> dict[str, Any]:
    return {"__key__": [one["__key__"] for one in samples], "drawn": random.random()}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_collate_fn_draws_follows_from_the_micro_batch(places: Places, num_workers: int) -> None:
    """Two of a step draw unlike numbers, and a run that resumes between them the same as one that did not."""
    with loader_of(places, collate_fn=drawn, num_workers=num_workers) as loader:
        due, states = [], []
        for part in loader:
            due.append(part)
            states.append(loader.state_dict())
    assert len({part["drawn"] for part in due}) == 9
    with loader_of(places, collate_fn=drawn) as loader:
        loader.load_state_dict(states[4])
        assert list(loader) == due[5:]


def test_ranks_with_as_many_rows_have_no_empty_micro_batches_with_padding(places: Places) -> None:
    for rank in range(3):
        with loader_of(places, rank, 3, micro_batch_size=1, last_batch="pad") as loader:
            assert all(len(part["__key__"]) == 1 for part in loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_prefetcher_hands_out_the_same_steps_and_its_states_are_those_of_training(
    places: Places, num_workers: int
) -> None:
    def taken(source: Any, most: int = 100) -> list[Any]:
        found = []
        for step in islice(source.steps(), most):
            about = step.num_rows, step.num_micro_batches, len(step)
            found += [(*about, part["__key__"], source.state_dict()) for part in step]
        return found

    with loader_of(places, global_batch_size=10) as loader:
        due = taken(loader)
    assert [one[:3] for one in due] == [*[(10, 4, 4)] * 8, *[(4, 2, 2)] * 2]
    with loader_of(places, global_batch_size=10, num_workers=num_workers) as loader:
        prefetcher = DevicePrefetcher(loader, "cpu", depth=4)
        assert len(prefetcher.steps()) == len(loader.steps()) == 3
        assert taken(prefetcher) == due
        assert loader.epoch == 1
    state = due[5][-1]
    with loader_of(places, global_batch_size=10) as loader:
        loader.load_state_dict(state)
        again = taken(DevicePrefetcher(loader, "cpu"))
        assert again[0][:3] == (10, 4, 2), "the step of which two are left"
        assert [one[3:] for one in again] == [one[3:] for one in due[6:]]
    with (
        loader_of(places, micro_batch_size=None) as loader,
        pytest.raises(ConfigError, match="give it micro_batch_size="),
    ):
        next(iter(DevicePrefetcher(loader, "cpu").steps()))


def test_labels_of_a_step_are_those_of_its_micro_batches(places: Places) -> None:
    packed = KINDS["packed"].make(places, {"Packed": {"length": 8}})

    def summed(packs: list[Any]) -> dict[str, Any]:
        return {"num_labels": torch.tensor(sum(one["num_labels"] for one in packs))}

    for options in ({}, {"collate_fn": summed}):
        with DataLoader(packed, global_batch_size=7, micro_batch_size=3, **options) as loader:
            for step in loader.steps():
                about = step.num_labels
                assert about == sum(int(part["num_labels"]) for part in step) > 0
    for collate_fn in (list, lambda packs: {"num_labels": torch.tensor([one["num_labels"] for one in packs])}):
        with DataLoader(packed, global_batch_size=7, micro_batch_size=3, collate_fn=collate_fn) as loader:
            step = next(iter(loader.steps()))
            with pytest.raises(ConfigError, match="not every micro-batch says its 'num_labels'"):
                _ = step.num_labels
    with DataLoader(packed, global_batch_size=7, micro_batch_size=3) as loader:
        assert next(iter(loader.steps())).num_tokens > 0


def test_rows_of_a_step_are_not_known_where_ranks_mask_what_they_cannot_read(places: Places) -> None:
    data = StreamingDataset(places.url("bad"), seed=3, on_error="skip", max_bad_samples=3)
    with DataLoader(data, micro_batch_size=3, global_batch_size=8) as loader:
        steps = iter(loader.steps())
        step = next(steps)
        with pytest.raises(ConfigError, match=r"on_error=\"skip\".*Sum batch"):
            _ = step.num_rows
        assert [part["__valid__"].shape for part in step] == [(2,), (3,), (3,)]


@pytest.mark.parametrize("size", [8, Schedule.steps({0: 8, 20: 5})])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_each_micro_batch_names_its_step_and_its_place_in_it(
    places: Places, world: int, *, ahead: bool, size: Any
) -> None:
    """The number in the epoch, on any number of ranks, after a resume, in a second epoch and under a prefetcher."""
    with loader_of(places, world - 1, world, global_batch_size=size) as loader:
        source: Any = DevicePrefetcher(loader, "cpu") if ahead else loader
        for _ in range(2):
            due, states, numbers, count = [], [], [], len(source.steps())
            for number, step in enumerate(source.steps()):
                assert step.number == number
                numbers.append(number)
                due += [(number, (micro, step.num_micro_batches)) for micro in range(step.num_micro_batches)]
                for part in step:
                    states.append(source.state_dict())
                    assert (part["__step__"], part["__micro__"]) == due[len(states) - 1]
            assert numbers == list(range(count))
    for done in range(len(states) - 1):
        with loader_of(places, world - 1, world, global_batch_size=size) as loader:
            loader.load_state_dict(states[done])
            assert [(part["__step__"], part["__micro__"]) for part in loader] == due[done + 1 :]


def test_only_dicts_name_their_step_and_an_entry_of_that_name_is_refused(places: Places) -> None:
    whole = {"x": torch.zeros(3)}
    same: dict[str, Any] = {"collate_fn": lambda _: whole}
    for options in ({"collate_fn": list}, {"collate_fn": tuple}, {"as_tuple": ("cls",)}):
        with loader_of(places, **options) as loader:
            assert all(isinstance(part, (list, tuple)) for part in loader)
            assert [step.number for step in loader.steps() if list(step)] == [0, 1, 2]
    with loader_of(places, **same) as loader:
        assert [part["__step__"] for part in loader] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert whole.keys() == {"x"}, "a dict that a function returns again and again stays what it is"
    with loader_of(places, as_tuple=("cls", "__micro__")) as loader:
        assert [micro for _, micro in loader][:3] == [(0, 3), (1, 3), (2, 3)]
    for name in ("__step__", "__micro__"):
        with (
            loader_of(places, collate_fn=lambda _, name=name: {name: 1}) as loader,
            pytest.raises(ConfigError, match=rf"have an entry '{name}' already.*another name"),
        ):
            next(iter(loader))


def test_a_loop_that_leaves_a_step_early_must_say_so(places: Places) -> None:
    with loader_of(places) as loader:
        steps = iter(loader.steps())
        next(next(steps))
        with pytest.raises(ConfigError, match=r"2 of the 3 micro-batches of a step were not taken.*list\(step\)"):
            next(steps)
    with loader_of(places) as loader:
        found = []
        for step in loader.steps():
            found.append(next(step)["__key__"])
            list(step)
        assert len(found) == 3
    with loader_of(places) as loader:
        for step in loader.steps():
            next(step)
            break
        state = loader.state_dict()
        assert json.loads(state["micro_batches"]) == [1, 3, 8, 1]
        assert [len(list(step)) for step in loader.steps()] == [3, 3, 3], (
            "a loop left early goes on with the next epoch"
        )
        loader.load_state_dict(state)
        (first, *_) = [(len(step), step.num_micro_batches, list(step)) for step in loader.steps()]
        assert first[:2] == (2, 3)


def test_an_iterator_over_steps_is_superseded_as_others(places: Places) -> None:
    with loader_of(places) as loader:
        steps = iter(loader.steps())
        step = next(steps)
        iter(loader)
        for again in (step, steps, steps):
            with pytest.raises(IteratorSupersededError):
                next(again)


def test_an_epoch_that_has_begun_inside_its_first_step_keeps_its_order(places: Places) -> None:
    """``seed``, ``set_epoch``, pickling and a second iterator, where no whole step was received."""
    with loader_of(places) as loader:
        due = keys(loader)
    with loader_of(places) as loader:
        parts = iter(loader)
        found = keys(islice(parts, 1))
        sent = pickle.loads(pickle.dumps(loader))
        loader.seed(77)
        loader.set_epoch(0)
        states = [loader.state_dict()]
        found += keys(islice(parts, 1))
        states.append(loader.state_dict())
        found += keys(parts)
        assert found == due
        after = keys(loader)
        assert after != due, "the next epoch is in the order of another seed"
    with sent:
        assert keys(sent) == due[1:]
    for number, state in enumerate(states, 1):
        with loader_of(places) as loader:
            loader.load_state_dict(state)
            loader.set_epoch(0)
            assert keys(loader) == due[number:]
            assert (loader.epoch, len(loader), loader.batches_left) == (1, 9, 9)
            assert keys(loader) == after
    with loader_of(places) as loader:
        loader.load_state_dict(states[0])
        assert loader.batches_left == 8
        next(iter(loader))
        assert loader.batches_left == 7


@pytest.mark.parametrize("world", [2, 3])
def test_another_world_by_remesh_repeats_the_step_and_the_same_one_goes_on(places: Places, world: int) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(loader_of(places, rank, 2)) for rank in range(2)]
        iterators = [iter(loader) for loader in ranks]
        first = [keys(islice(parts, 3)) for parts in iterators]  # a step of two, and one more
        state = ranks[0].state_dict()
        if world == 3:
            ranks.append(stack.enter_context(loader_of(places, 2, 3)))
        for rank, loader in enumerate(ranks):
            loader.remesh(rank, world, at=state)
        rest = [keys(loader) for loader in ranks]
    kept = 3 if world == 2 else 2
    seen = Counter(key for one in first for part in one[:kept] for key in part)
    seen += Counter(key for one in rest for part in one for key in part)
    assert seen == dict.fromkeys(seen, 1)
    assert len(seen) == COUNT


def test_remesh_by_a_number_counts_steps(places: Places) -> None:
    with loader_of(places) as loader:
        due = keys(loader)
        loader.remesh(0, 1, at=1)
        assert keys(loader) == due[3:]


@pytest.mark.parametrize("other", [{"micro_batch_size": None}, {"micro_batch_size": 4}, {"global_batch_size": 6}])
def test_a_loader_that_cuts_otherwise_begins_the_step_again(
    places: Places, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with loader_of(places) as loader:
        due = keys(loader)
        list(islice(loader, 4))
        state = loader.state_dict()
    with loader_of(places, **other) as loader:
        loader.load_state_dict(state)
        rows = [key for part in loader for key in part["__key__"]]
    assert len(rows) == COUNT - 8
    assert "after 1 of the 3 micro-batches of a step of 8 rows on 1 ranks" in caplog.text
    assert len(due) == 9


def test_states_without_micro_batches_are_read_and_others_are_refused(places: Places) -> None:
    with loader_of(places, micro_batch_size=None) as loader:
        next(iter(loader))
        state = loader.state_dict()
        assert "micro_batches" not in state
    with loader_of(places) as loader:
        loader.load_state_dict(state)
        assert loader.batches_left == 6
        for text in ("[1, 3, 8]", "[3, 3, 8, 1]", "[-1, 3, 8, 1]", "[true, 3, 8, 1]", "x", 5, None):
            with pytest.raises(StateError, match="micro_batches"):
                loader.load_state_dict(state | {"micro_batches": text})


def test_shards_without_an_index_are_cut_too(places: Places) -> None:
    for number in range(5):
        case = Case.draw(number, places, ("unindexed",))
        if case.is_refused:
            continue
        ranks = [case.cut(rank, case.world) for rank in range(case.world)]
        check_cut(case, ranks)
        for rank, steps in enumerate(ranks):
            assert [step.rows for step in steps] == case.whole(rank, case.world)
            state = steps[1].states[0]
            left = steps[1].parts[1:]
            found = case.cut(rank, case.world, state, STEPS - (1 if left else 2))
            assert [step.parts for step in found] == ([left] if left else []) + [step.parts for step in steps[2:]]


def test_weights_change_between_micro_batches(places: Places, play: Play) -> None:
    def run(mesh: Any) -> tuple[list[Any], int]:
        mix = KINDS["mixture"].make(places, {"Mixture": {"weights": {"a": 1, "b": 1}}})
        with DataLoader(mix, device_mesh=mesh, **SIZE) as loader:
            steps, found = iter(loader.steps()), []
            for number in range(40):
                parts = []
                for part in next(steps):
                    parts.append(part["__source__"])
                    if number == 2 and len(parts) == 1:
                        row = loader.set_weights({"a": 0, "b": 1})
                found.append([name for names in parts for name in names])
            return found, row

    ranks = play(run, dp_size=2)
    assert ranks[0][1] == ranks[1][1]
    border = ranks[0][1] // 8
    for steps, _ in ranks:
        assert {name for step in steps[:border] for name in step} == {"a", "b"}
        assert {name for step in steps[border + 1 :] for name in step} == {"b"}


@pytest.mark.parametrize("sizes", [{"dp_size": 1, "tp_size": 2}, {"dp_size": 2, "tp_size": 2}])
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 1}, {"collate_fn": doubled}, {"collate_fn": Held}])
def test_one_rank_sends_its_micro_batches_to_its_replicas(
    places: Places, play: Play, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    def run(mesh: Any) -> list[Any]:
        data = StreamingDataset(places.url("whole"), seed=3)
        how: Any = (
            Broadcast(encode=vars, decode=lambda sent: Held(**sent)) if options.get("collate_fn") is Held else None
        )
        with DataLoader(data, device_mesh=mesh, replicate=how or "broadcast", **SIZE | options) as loader:
            return [plain(vars(part) if how else part) for step in loader.steps() for part in step]

    got = play(run, **sizes)
    for share in range(sizes["dp_size"]):
        with loader_of(places, share, sizes["dp_size"], **options) as loader:
            due = [plain(vars(part) if isinstance(part, Held) else part) for part in loader]
        assert got[2 * share] == got[2 * share + 1] == due


def test_stages_and_slices_are_cut_from_each_micro_batch(places: Places, play: Play) -> None:
    def run(mesh: Any, replicate: str) -> list[Any]:
        packed = KINDS["packed"].make(places, {"Packed": {"length": 8, "shift_labels": True}})
        stages = StageFields(first=("input_ids",), last=("labels",))
        options: dict[str, Any] = {"stage_fields": stages, "replicate": replicate, "last_batch": "pad"}
        with DataLoader(packed, device_mesh=mesh, global_batch_size=5, micro_batch_size=2, **options) as loader:
            return [plain(part) for step in loader.steps() for part in step]

    for replicate in ("read", "broadcast"):
        first, middle, last = play(lambda mesh: run(mesh, replicate), dp_size=1, pp_size=3)  # noqa: B023
        for a, b, c in zip(first, middle, last, strict=True):
            assert a["__num_samples__"] == b["__num_samples__"] == c["__num_samples__"] in (1, 2)
            assert a["__valid__"] == b["__valid__"] == c["__valid__"]
            assert len(a["input_ids"][1]) == len(c["labels"][1]) == a["__num_samples__"]
            assert set(b) == {"__num_samples__", "__valid__", "__step__", "__micro__"}


@pytest.mark.parametrize("micro", [1, 2])
def test_packs_are_exchanged_over_the_whole_step(places: Places, play: Play, micro: int) -> None:
    """Each rank gets the packs that it gets without micro-batches, in the same order, cut."""

    def run(mesh: Any, cut: int | None) -> list[list[Any]]:
        packed = KINDS["packed"].make(places, {"Packed": {"length": 8}})
        options: dict[str, Any] = {"balance": "exchange", "cost": 4, "global_batch_size": 7, "last_batch": "partial"}
        with DataLoader(packed, device_mesh=mesh, micro_batch_size=cut, **options) as loader:
            steps: Any = ([batch] for batch in loader) if cut is None else loader.steps()
            return [[row for part in step for row in rows_of("packed", part)] for step in steps]

    whole, cut = (play(lambda mesh: run(mesh, size), dp_size=2) for size in (None, micro))  # noqa: B023
    assert cut == whole
    assert sum(map(len, whole[0])) + sum(map(len, whole[1])) > 20


@pytest.mark.parametrize(
    ("kind", "words"),
    [("map-style", "write batch_size=3"), ("iterable", "write batch_size=3"), ("remote", "BatchHandle")],
)
def test_where_nobody_can_cut_it_is_refused(places: Places, kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"micro_batch_size: .*{words}"):
        DataLoader(KINDS[kind].make(places, {}), **{**KINDS[kind].loader, **SIZE})


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_a_size_that_is_none_is_refused(places: Places, size: Any) -> None:
    with pytest.raises(ConfigError, match="micro_batch_size"):
        loader_of(places, micro_batch_size=size)


def test_padded_packs_come_one_by_one_whatever_the_world(places: Places) -> None:
    """Several in a step, which have no common shape, so that a step is the same on half as many ranks."""
    packed = Packed(StreamingDataset(places.url("whole"), seed=3), 24, padded=True)
    with pytest.raises(ConfigError, match="give micro_batch_size=1, which hands them out one by one"):
        DataLoader(packed, global_batch_size=4, device_mesh=mesh_of(1, 0))
    with DataLoader(packed, global_batch_size=4, micro_batch_size=1, device_mesh=mesh_of(1, 0)) as loader:
        widths = [{tuple(part["input_ids"].shape) for part in step} for step in loader.steps()]
    assert any(len(one) > 1 for one in widths)


def test_whole_samples_that_a_transform_drops_leave_their_micro_batch(places: Places) -> None:
    """Cuts lie between packs, whatever is left of each."""

    def odd(sample: dict[str, Any]) -> dict[str, Any] | None:
        return sample if int(sample["__key__"]) % 2 else None

    data = StreamingDataset(places.url("whole"), seed=3, transform=odd, max_bad_samples=1.0)
    packed = Packed(data, 200, column="size", padded=True, field=None)
    options: dict[str, Any] = {"global_batch_size": 3, "last_batch": "partial", "device_mesh": mesh_of(1, 0)}
    with DataLoader(packed, micro_batch_size=1, **options) as loader:
        cut = [[plain(unmarked(part)) for part in step] for step in loader.steps()]
    with DataLoader(packed, collate_fn=list, **options) as loader:
        assert cut == [[plain(one) for one in batch] for batch in loader]


@pytest.mark.parametrize("kind", ["plain", "packed", "mixture", "where"])
def test_a_loop_in_haste_gets_the_same_from_batches_that_are_looked_up_together(
    places: Places, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(rank: int) -> list[Any]:
        data = KINDS[kind].make(
            places, {"StreamingDataset": {"fields": ("cls", "txt", "bin")}} if kind != "packed" else {}
        )
        options: dict[str, Any] = {"global_batch_size": 5, "micro_batch_size": 1, "epoch_size": 303}
        options |= {"jagged": ("bin",)} if kind == "where" else {}
        with DataLoader(data, device_mesh=mesh_of(2, rank), last_batch="pad", num_threads=1, **options) as loader:
            padded = [plain(part) for step in loader.steps() for part in step]
        with DataLoader(data, device_mesh=mesh_of(2, rank), last_batch="partial", num_threads=1, **options) as loader:
            return [padded, [plain(part) for step in loader.steps() for part in step]]

    due = [taken(rank) for rank in range(2)]
    monkeypatch.setattr(delivery, "_SHORT_STEP_S", 1e9)
    assert [taken(rank) for rank in range(2)] == due
    assert [len(parts) for parts in due[0]] == [61 * 3, 60 * 3 + 2]


def test_scripts_skip_batches_by_micro_batches(places: Places) -> None:
    with loader_of(places) as loader:
        due = keys(loader)
    for number in range(10):
        with loader_of(places) as loader:
            assert begin_at(loader, number) == 0
            assert batches_seen(loader) == number or number == 9
            assert keys(loader) == due[number:]
    with (
        loader_of(places) as loader,
        pytest.raises(ConfigError, match=r"got 10 batches, but an epoch .* has 9 on each"),
    ):
        begin_at(loader, 10)


class Totals(torch.nn.Module):
    """A model of a table, so that gradients show which tokens count how much."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 200 * 8, dtype=torch.float64).reshape(200, 8))
        self.head = torch.nn.Parameter(torch.linspace(1, -1, 8 * 200, dtype=torch.float64).reshape(8, 200))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids] @ self.head

    def no_sync(self) -> nullcontext[None]:
        return nullcontext()


def gradients_of(places: Places, code: str) -> list[list[float]]:
    """Run a training loop on one rank; the gradients of each step."""
    model, found = Totals(), []

    def step() -> None:
        found.append([*model.table.grad.flatten().tolist(), *model.head.grad.flatten().tolist()])  # type: ignore[union-attr]

    optimizer = SimpleNamespace(step=step, zero_grad=model.zero_grad)
    alone = SimpleNamespace(all_reduce=lambda total: total, get_world_size=lambda: 1)
    names = {
        "torch": torch, "dist": alone, "nullcontext": nullcontext, "ddp": model, "optimizer": optimizer,
        "URL": places.url("whole"), "DataLoader": DataLoader, "StreamingDataset": StreamingDataset, "Packed": Packed,
    }  # fmt: skip
    exec(code, names)
    return found


def test_the_loop_on_the_page_has_the_gradients_of_whole_batches(places: Places) -> None:
    (code,) = (block.code for block in blocks((ROOT / "docs/trainers.md").read_text()) if ".steps()" in block.code)
    code = code.replace("8192", "8").replace("global_batch_size=512", "global_batch_size=7")
    cut = gradients_of(places, code.replace("micro_batch_size=8", "micro_batch_size=2"))
    whole = gradients_of(places, code.replace("micro_batch_size=8", "micro_batch_size=7"))
    assert len(cut) == len(whole) > 2
    assert np.abs(np.array(whole)).sum() > 0
    np.testing.assert_allclose(cut, whole, atol=1e-12)


def test_a_trace_shows_the_waits_of_a_step_together(places: Places, tmp_path: Path) -> None:
    with loader_of(places) as loader:
        loader.trace(tmp_path / "rank-0.json", steps=9)
        assert len(list(loader)) == 9
    report = merge_traces([str(tmp_path / "rank-0.json")])
    assert [one.steps for one in report.ranks] == [9]
    assert [one.samples_seen for one in report.steps] == [0, 8, 16]
