"""P4: resume is a position. One battery over every stop point and change of topology, and what a resume reads."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from infra import DeviceMesh
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import IteratorSupersededError, StateError
from streaming.order.plan.intervals import ChunkIntervals
from streaming.order.plan.order import EpochOrder, OrderSettings
from streaming.order.plan.plan import Plan
from streaming.run.engine.units import BLOCK_SAMPLES
from streaming.run.loops import epoch_loop
from streaming.shards.fetch.read import FetchRange
from streaming.shards.tar import ChunkLayout
from tests.support.processes.waiting import PATIENCE_S
from tests.support.sets.data_sets import (
    WORLD_SIZES,
    Batches,
    SampleSet,
    check_batch,
    loaders,
    merged,
    mesh_of,
    play,
    total,
    valid_keys,
    write_set,
)
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

SIZE = 24


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards and 28 chunks."""
    return write_set(tmp_path_factory.mktemp("resume") / "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A data set, loader options, and an uninterrupted run of two epochs: the truth of the battery.

    Attributes:
        dataset: The data set.
        options: Of every loader.
        epochs: Global batches of epochs 0 and 1, of one rank without interruption.
        states: The state after each number of batches of epoch 0.
    """

    dataset: StreamingDataset
    options: Mapping[str, Any]
    epochs: tuple[Batches, Batches]
    states: tuple[Mapping[str, Any], ...]

    @classmethod
    def run(cls, dataset: StreamingDataset, **options: Any) -> Case:
        options = {"global_batch_size": SIZE, "last_batch": "partial"} | options
        (loader,) = loaders(dataset, 1, **options)
        states, epochs = [loader.state_dict()], []
        for _ in range(2):
            rows = []
            for batch in loader:
                rows.append(valid_keys(batch))
                if not epochs:
                    states.append(loader.state_dict())
            epochs.append(merged([rows]))
        return cls(dataset=dataset, options=options, epochs=(epochs[0], epochs[1]), states=tuple(states))

    def check(self, stop: int, world_size: int, *, to_epoch: int = 1, **changed: Any) -> None:
        """Resume after ``stop`` batches on ``world_size`` ranks: the rest of epoch 0, if any, then all of epoch 1."""
        assert self.states[stop]["epoch"] == 0, "also in the body of the last step"
        options = {**self.options, **changed}
        ranks = play(self.dataset, world_size, state=self.states[stop], epochs=to_epoch + 1, **options)
        due = self.epochs[0][stop:] + (self.epochs[1] if to_epoch else [])
        assert merged(ranks) == due, (stop, world_size)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shuffled, partial": ({"seed": 5}, {}),
    "shuffled, drop, a batch that lanes do not divide": (
        {"shuffle": ShuffleConfig(lanes=5, window=30)},
        {"global_batch_size": 26, "last_batch": "drop"},
    ),
    "ordered": ({"shuffle": False}, {}),
    "virtual epochs beyond a pass": ({"seed": 5}, {"epoch_size": 300, "last_batch": "pad"}),
    "virtual epochs within a pass": ({"seed": 5}, {"epoch_size": 130}),
    "shuffled, pad": ({"seed": 5}, {"last_batch": "pad"}),
}


@pytest.fixture(scope="module", params=first_here(CASES, 4))
def case(request: pytest.FixtureRequest, samples: SampleSet) -> Case:
    data_options, options = CASES[request.param]
    return Case.run(samples.open(**data_options), **options)


# The battery


def test_every_stop_point(case: Case) -> None:
    """The rest of its epoch; the next one, too, from the first, the middle and the last."""
    last = len(case.epochs[0])
    for stop in range(len(case.states)):
        case.check(stop, 1, to_epoch=int(stop in {0, last // 2, last - 1, last}))


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_every_world_size(case: Case, world_size: int, request: pytest.FixtureRequest) -> None:
    """From one of four places, so that each size meets each; ``--matrix``: from all of them, in each kind."""
    num_batches = len(case.epochs[0])
    stops = [1, num_batches // 2, num_batches - 1, num_batches]
    if not request.config.getoption("--matrix"):
        turn = list(CASES).index(request.node.callspec.params["case"]) + WORLD_SIZES.index(world_size)
        stops = [stops[turn % len(stops)]]
    for stop in stops:
        case.check(stop, world_size)


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 3, "prefetch_factor": 4}])
def test_every_number_of_workers(case: Case, options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """The two take turns with the kinds of epochs at the longer list of stops; ``--matrix``: at both, all."""
    turn = list(CASES).index(request.node.callspec.params["case"]) + options["num_workers"] // 2
    every = request.config.getoption("--matrix")
    for stop, world_size in ((0, 1), (3, 3), (5, 2)) if every else (((0, 1), (5, 2)), ((3, 3),))[turn % 2]:
        case.check(stop, world_size, to_epoch=int(every or stop == 0), **options)


@pytest.mark.parametrize("before", WORLD_SIZES)
def test_every_change_of_world_size(case: Case, before: int, request: pytest.FixtureRequest) -> None:
    """The prefix really taken by one world, its state the same on all ranks, the rest by another.

    The six kinds of epochs take turns with the sizes, so that each is followed by each; ``--matrix``: in each kind.
    """
    stop = 4
    afters, turn = list(WORLD_SIZES), list(CASES).index(request.node.callspec.params["case"])
    if not request.config.getoption("--matrix"):
        afters = [WORLD_SIZES[(WORLD_SIZES.index(before) + turn) % len(WORLD_SIZES)]]
    prefix, states = [], []
    for loader in loaders(case.dataset, before, **case.options):
        batches = iter(loader)
        prefix.append([valid_keys(next(batches)) for _ in range(stop)])
        states.append(json.dumps(loader.state_dict()))
    assert set(states) == {json.dumps(case.states[stop])}
    for after in afters:
        rest = play(case.dataset, after, state=json.loads(states[0]), **case.options)
        assert merged(prefix) + merged(rest) == case.epochs[0], (before, after)


@pytest.mark.thorough
def test_a_chain_of_interruptions(case: Case, request: pytest.FixtureRequest) -> None:
    """One chain for each kind of epochs; ``--matrix``: three."""
    turn = list(CASES).index(request.node.callspec.params["case"])
    for seed in range(3) if request.config.getoption("--matrix") else (turn,):
        draw = random.Random(seed)
        found: Batches = []
        state: Mapping[str, Any] = case.states[0]
        while len(found) < len(case.epochs[0]):
            world_size, steps = draw.choice(WORLD_SIZES), draw.randint(1, 4)
            ranks: list[list[list[str]]] = []
            states = []
            for loader in loaders(case.dataset, world_size, num_workers=draw.choice((0, 1, 3)), **case.options):
                loader.load_state_dict(state)
                ranks.append([valid_keys(batch) for _, batch in zip(range(steps), loader, strict=False)])
                states.append(loader.state_dict())
            assert all(one == states[0] for one in states)
            found += merged(ranks)
            state = states[-1]
        assert found == case.epochs[0]


def test_states_are_small_json(case: Case) -> None:
    for state in case.states:
        text = json.dumps(state)
        assert len(text) < 1000
        assert json.loads(text) == state


# The surface


@pytest.fixture(scope="module")
def plain(samples: SampleSet) -> Case:
    return Case.run(samples.open(seed=5))


def open_at(case: Case, stop: int, **options: Any) -> DataLoader:
    loader = DataLoader(case.dataset, device_mesh=mesh_of(1, 0), **{**case.options, **options})
    loader.load_state_dict(case.states[stop])
    return loader


def test_set_epoch_keeps_the_loaded_position_of_its_own_epoch_only(plain: Case) -> None:
    with open_at(plain, 4) as loader:
        assert loader.epoch == 0
        loader.set_epoch(0)
        assert loader.state_dict() == plain.states[4]
        assert merged([[check_batch(batch) for batch in loader]]) == plain.epochs[0][4:]
    with open_at(plain, 4) as loader:
        loader.set_epoch(1)
        assert merged([[check_batch(batch) for batch in loader]]) == plain.epochs[1]
        assert loader.epoch == 2
        loader.set_epoch(0)
        assert merged([[check_batch(batch) for batch in loader]]) == plain.epochs[0]


def test_the_training_loop_of_the_readme_resumes(plain: Case) -> None:
    """``for epoch in range(loader.epoch, n): set_epoch(epoch); for batch in loader`` from any state of epoch 0."""
    for stop in (0, 4, len(plain.epochs[0])):
        with open_at(plain, stop) as loader:
            rows = []
            for epoch in range(loader.epoch, 2):
                loader.set_epoch(epoch)
                rows += [check_batch(batch) for batch in loader]
            assert loader.epoch == 2
        assert merged([rows]) == plain.epochs[0][stop:] + plain.epochs[1]


def test_a_state_that_was_loaded_and_not_used_is_handed_back(plain: Case) -> None:
    for stop, state in enumerate(plain.states):
        with open_at(plain, stop) as loader:
            assert loader.state_dict() == state


def test_state_counts_what_was_handed_out_not_what_was_read_ahead(plain: Case) -> None:
    for options in ({}, {"num_workers": 3, "prefetch_factor": 8}):
        with open_at(plain, 0, **options) as loader:
            for number, _ in enumerate(loader, 1):
                assert loader.state_dict() == plain.states[number]


def test_loading_in_the_middle_of_an_epoch_ends_that_loop(plain: Case) -> None:
    with open_at(plain, 0) as loader:
        batches = iter(loader)
        seen = [check_batch(next(batches)) for _ in range(2)]
        loader.load_state_dict(plain.states[6])
        assert loader.describe() == "not running", "it holds nothing until the next one is made"
        with pytest.raises(IteratorSupersededError, match=r"load_state_dict\(\) was called by .*test_resume\.py"):
            next(batches)
        assert merged([seen]) == plain.epochs[0][:2]
        assert loader.state_dict() == plain.states[6]
        assert merged([[check_batch(batch) for batch in loader]]) == plain.epochs[0][6:]


def test_seed_takes_effect_from_the_next_epoch(samples: SampleSet, plain: Case) -> None:
    other = Case.run(samples.open(seed=99))
    rows: list[list[str]] = []
    with open_at(plain, 0) as loader:
        for batch in loader:
            rows.append(check_batch(batch))
            if len(rows) == 3:
                loader.seed(99)
                state = json.loads(json.dumps(loader.state_dict()))
        first = len(rows)
        at_the_border = loader.state_dict()
        rows += [check_batch(batch) for batch in loader]
    assert merged([rows]) == plain.epochs[0] + other.epochs[1]
    for saved, expected in (
        (state, plain.epochs[0][3:] + other.epochs[1]),  # a resume in between does not forget it
        (at_the_border, other.epochs[1]),
    ):
        epochs = 2 if saved is state else 1
        assert merged(play(plain.dataset, 3, state=saved, epochs=epochs, **plain.options)) == expected
    assert first == len(plain.epochs[0])


def test_the_state_brings_its_order_along(samples: SampleSet, plain: Case) -> None:
    """A loader with another seed, window or lanes goes on in the order of the state."""
    for options in ({"seed": 1}, {"shuffle": ShuffleConfig(window=50, lanes=2)}):
        ranks = play(samples.open(**options), 2, state=plain.states[3], **plain.options)
        assert merged(ranks) == plain.epochs[0][3:]


# States that do not fit


def test_a_state_of_another_data_set_is_refused(samples: SampleSet, plain: Case, tmp_path: Any) -> None:
    others = [
        write_set(tmp_path / "shorter", (41, 7, 23, 1, 60, 40, 29)).open(),
        write_set(tmp_path / "other content", first=1).open(),
        write_set(tmp_path / "other chunks", chunk_samples=5).open(),
        StreamingDataset(f"{samples.url}{{000000..000005}}.tar"),
        StreamingDataset([f"{samples.url}{shard:06d}.tar" for shard in (1, 0, 2, 3, 4, 5, 6)]),
    ]
    for dataset in others:
        with DataLoader(dataset, device_mesh=mesh_of(1, 0), **plain.options) as loader:
            with pytest.raises(StateError, match=r"another data set.*202 samples"):
                loader.load_state_dict(plain.states[3])
            assert loader.state_dict()["samples_seen"] == 0


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"version": 2}, "version"),
        ({"version": "1"}, "version"),
        ({"version": None}, "version"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 1.5}, "epoch"),
        ({"samples_seen": 203}, "samples_seen"),
        ({"samples_seen": True}, "samples_seen"),
        ({"num_samples": 100}, "another data set"),
        ({"num_samples": 10**6, "samples_seen": 5000}, "another data set"),
        ({"fingerprint": ""}, "fingerprint"),
        ({"fingerprint": "0" * 64}, "another data set"),
        ({"next_seed": -1}, "next_seed"),
        ({"epoch_size": 100}, "epoch_size"),
        ({"order": {}}, "order settings"),
        ({"order": None}, "order settings"),
        ({"order": {"seed": 5, "lanes": 0, "window": 4, "shuffle": True}}, "lanes"),
        ({"order": {"seed": 5, "lanes": 1, "window": 0, "shuffle": False}}, "shuffle"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_an_edited_state_is_refused(plain: Case, edit: dict[str, Any], words: str) -> None:
    with open_at(plain, 2) as loader:
        with pytest.raises(StateError, match=words):
            loader.load_state_dict({**plain.states[3], **edit})
        assert loader.state_dict() == plain.states[2]  # nothing of it was taken over


@pytest.mark.parametrize("missing", ["version", "epoch", "samples_seen", "order", "fingerprint"])
def test_a_cut_state_is_refused(plain: Case, missing: str) -> None:
    state = {name: value for name, value in plain.states[3].items() if name != missing}
    words = (
        "expected what state_dict.. of a loader returned, got a dict of 'epoch'" if missing == "version" else missing
    )
    with open_at(plain, 0) as loader, pytest.raises(StateError, match=words):
        loader.load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], "{}", 3])
def test_what_is_no_state_is_refused(plain: Case, state: Any) -> None:
    with open_at(plain, 0) as loader, pytest.raises(StateError, match="state"):
        loader.load_state_dict(state)


# What a resume reads


class Gate:
    """Lets through the fetches of some chunks and holds back all others until it is opened."""

    def __init__(self, dataset: StreamingDataset, allowed: set[tuple[str, int, int]]) -> None:
        self._fetch = dataset.source.fetch_unit
        self._allowed = allowed
        self._open = threading.Event()
        self._lock = threading.Lock()
        self.passed: list[FetchRange] = []

    def __call__(self, wanted: FetchRange, out: memoryview) -> ChunkLayout:
        if (wanted.url, wanted.byte_start, wanted.byte_end) not in self._allowed:
            assert self._open.wait(PATIENCE_S)
        elif not self._open.is_set():
            with self._lock:
                self.passed.append(wanted)
        return self._fetch(wanted, out)

    def open(self) -> None:
        self._open.set()


def within_the_window(
    dataset: StreamingDataset, order: OrderSettings, lanes: range, first: int, last: int
) -> set[tuple[str, int, int]]:
    """The chunks of which a sample can come to lane positions ``[first, last)`` of some lanes, by the definition.

    A sample moves by less than W, so a chunk on lane positions [a, b) reaches positions [a - W + 1, b + W - 1).
    """
    epoch = EpochOrder(dataset.source.table.num_samples, order, 0)
    found = set()
    for lane in lanes:
        lane_start, lane_stop = epoch.lane_bounds(lane)
        for place, chunk in enumerate(epoch.chunk_order.tolist()):
            start = max(int(epoch.chunk_starts[place]), lane_start) - lane_start
            stop = min(int(epoch.chunk_starts[place + 1]), lane_stop) - lane_start
            reach = max(order.window - 1, 0)
            if start < stop and start - reach < last and first < stop + reach:
                wanted = dataset.source.chunk(chunk)
                found.add((wanted.url, wanted.byte_start, wanted.byte_end))
    return found


@pytest.fixture(scope="module")
def long_samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """640 samples in 160 chunks."""
    return write_set(tmp_path_factory.mktemp("long") / "train", (160,) * 4, chunk_samples=4)


@pytest.mark.parametrize(("window", "world_size"), [(0, 1), (1, 1), (4, 1), (10, 1), (10, 2), (4, 4)])
def test_the_first_batch_after_a_resume_reads_no_more_than_the_window(
    long_samples: SampleSet, window: int, world_size: int
) -> None:
    """Everything but the window's chunks is held back, and the first batch comes nevertheless."""
    size, lanes = 16, 4
    start = 480  # of 640: at 75 %
    for rank in range(world_size):
        dataset = long_samples.open(shuffle=ShuffleConfig(seed=3, window=window, lanes=lanes))
        options: dict[str, Any] = {"global_batch_size": size, "device_mesh": mesh_of(world_size, rank)}
        with DataLoader(dataset, **options) as loader:
            state = {**loader.state_dict(), "samples_seen": start}
            order = OrderSettings.from_dict(state["order"])
            mine = range(rank * lanes // world_size, (rank + 1) * lanes // world_size)
            allowed = within_the_window(dataset, order, mine, start // lanes, (start + size) // lanes)
            gate = Gate(dataset, allowed)
            dataset.source.fetch_unit = gate  # type: ignore[method-assign]
            loader.load_state_dict(state)
            batches = iter(loader)
            try:
                first = next(batches)
            finally:
                gate.open()
            keys = check_batch(first)
            assert len(keys) == size // world_size
            read = {(one.url, one.byte_start, one.byte_end) for one in gate.passed}
            assert read <= allowed
            assert len(gate.passed) == len(read)
            read_bytes = sum(one.num_bytes for one in gate.passed)
            data_bytes = int((dataset.source.table.byte_end - dataset.source.table.byte_start).sum())
            assert read_bytes <= data_bytes * len(mine) / lanes * (2 * window + 4 + 2 * 4) / (640 / lanes)
            rest = [keys, *(check_batch(batch) for batch in batches)]
        assert len(rest) == (640 - start) // size


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_fetches_after_a_resume_come_in_the_order_of_their_use(
    long_samples: SampleSet, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one fetch at a time, the order of requests is that of the plan; what is used up is not fetched."""
    monkeypatch.setattr(epoch_loop, "num_cores", lambda: 1)  # as many threads fetch from local disks
    start = 480
    for rank in range(world_size):
        dataset = long_samples.open(shuffle=ShuffleConfig(seed=3, window=4, lanes=4))
        asked: list[tuple[str, int]] = []
        fetch = dataset.source.fetch_unit

        def recorded(wanted: FetchRange, out: memoryview, fetch: Any = fetch, asked: Any = asked) -> ChunkLayout:
            asked.append((wanted.url, wanted.byte_start))
            layout: ChunkLayout = fetch(wanted, out)
            return layout

        dataset.source.fetch_unit = recorded  # type: ignore[method-assign]
        with DataLoader(dataset, global_batch_size=16, device_mesh=mesh_of(world_size, rank)) as loader:
            state = {**loader.state_dict(), "samples_seen": start}
            loader.load_state_dict(state)
            rest = [check_batch(batch) for batch in loader]
        plan = Plan(
            dataset.source.table.num_samples,
            OrderSettings.from_dict(state["order"]),
            global_batch_size=16,
            dp_world_size=world_size,
            start=start,
        )
        live = ChunkIntervals.joined(plan.needs_by_pass(rank, BLOCK_SAMPLES))
        _, first_uses = np.unique(live.chunk_ids, return_index=True)
        order = live.chunk_ids[np.sort(first_uses)]  # memory suffices: a chunk is read once
        wanted = map(dataset.source.chunk, order.tolist())
        assert asked == [(one.url, one.byte_start) for one in wanted]
        assert len(rest) == plan.num_batches == 10
        assert {*order.tolist()} == {*plan.rank_batches(0, 10, rank).chunk_ids.tolist()}


def test_whole_epoch_after_resume_counts_every_sample_once(plain: Case) -> None:
    """Prefix on 8 ranks, rest on 3: the union is the data set, counted from the keys."""
    prefix = []
    for loader in loaders(plain.dataset, 8, **plain.options):
        batches = iter(loader)
        prefix.append([valid_keys(next(batches)) for _ in range(5)])
        state = loader.state_dict()
    rest = play(plain.dataset, 3, state=state, **plain.options)
    assert set(total(merged(prefix) + merged(rest)).values()) == {1}
    assert total(merged(prefix) + merged(rest)).total() == len(plain.dataset)


def test_replicas_resume_alike(plain: Case) -> None:
    meshes = [DeviceMesh.from_sizes(dp_size=2, tp_size=2, rank=rank, environ={}) for rank in range(4)]
    found = []
    for mesh in meshes:
        with DataLoader(plain.dataset, device_mesh=mesh, **plain.options) as loader:
            loader.load_state_dict(plain.states[2])
            found.append([check_batch(batch) for batch in loader])
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert merged([found[0], found[2]]) == plain.epochs[0][2:]
