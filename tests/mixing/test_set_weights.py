"""Other weights in a running job: within a few steps, from the same row on all ranks, or on none.

Ranks are threads here, with a store and real gloo connections between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra import DeviceMesh
from streaming import (
    DataLoader,
    DevicePrefetcher,
    Mixture,
    Packed,
    Schedule,
    ShuffleConfig,
    StreamingDataset,
)
from streaming.errors import AgreementError, ConfigError, MemoryLimitError, StateError
from streaming.run.loops.epoch_loop import EpochLoop
from tests.support.processes.played_ranks import Play, played, read_here
from tests.support.sets.data_sets import SampleSet, check_batch, merged, mesh_of, write_set
from tests.support.sets.packed_sets import write as write_documents

SIZE = 24
SOON = 20
"""Steps after which other weights act at the latest, where shares are exact."""
WEB, CODE = {"web": 1, "code": 0}, {"web": 0, "code": 1}
EXACT: dict[str, Any] = {"quotas": "exact"}
CHUNKS: dict[str, Any] = {"quotas": "chunks"}
ONE_SOURCE: dict[str, Any] = {"batches": "one_source"}
pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    root = tmp_path_factory.mktemp("sets")
    return {
        "web": write_set(root / "web", (300, 300)),
        "code": write_set(root / "code", (200, 100), first=10_000),
        "math": write_set(root / "math", (60,), first=20_000),
    }


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Play:
    """``threads(function, **sizes)``: the function's results for the mesh of each rank, each in a thread of its own."""
    return played(monkeypatch)


def mixture(sets: dict[str, SampleSet], names: str = "web code", **options: Any) -> Mixture:
    made = {"weights": dict.fromkeys(names.split(), 1), "shuffle": ShuffleConfig(seed=5, lanes=6), **options}
    return Mixture({name: sets[name].open() for name in names.split()}, **made)


def keys_of(batches: Iterator[Any], count: int) -> list[list[str]]:
    return [check_batch(next(batches)) for _ in range(count)]


def replayed(mix: Mixture, state: dict[str, Any], count: int, **options: Any) -> Any:
    """Global batches from the first row on, by the ledger of a state."""
    with DataLoader(mix, global_batch_size=SIZE, num_threads=0, **options) as loader:
        loader.load_state_dict({**json.loads(json.dumps(state)), "epoch": 0, "samples_seen": 0})
        found: list[list[str]] = []
        while len(found) < count:  # over epochs, if there are any
            found += [check_batch(batch) for _, batch in zip(range(count - len(found)), loader, strict=False)]
    return merged([found])


# --- how soon ---


@pytest.mark.thorough
@pytest.mark.parametrize("dealt", [EXACT, ONE_SOURCE, CHUNKS], ids=str)
def test_it_acts_soon_although_all_data_is_here(sets: dict[str, SampleSet], dealt: dict[str, Any]) -> None:
    """It came after everything that was read ahead: of data that fits into memory, after 170 steps or more."""
    mix = mixture(sets, weights=WEB, **dealt)
    count, loads = 120 if dealt == CHUNKS else 40, []
    with DataLoader(mix, global_batch_size=SIZE) as loader:
        batches = iter(loader)
        keys_of(batches, 30)
        state = loader.state_dict()
        row = loader.set_weights(CODE)
        after = keys_of(batches, count)
        end = loader.state_dict()
    assert replayed(mix, end, 30 + count)[30:] == merged([after])
    assert [entry["from"] for entry in end["ledger"]] == [0, row]
    with DataLoader(mix, global_batch_size=SIZE) as loader:
        loader.load_state_dict(state)
        loads.append(loader.set_weights(CODE))
    assert loads == [row], "it acts when a run that was resumed here would"
    is_code = [all(int(key) >= 10_000 for key in keys) for keys in after]
    if dealt == CHUNKS:
        assert row <= (30 + 100) * SIZE
        assert all(is_code[100:])
    else:
        assert row <= (30 + SOON) * SIZE
        assert is_code == [step * SIZE >= row - 30 * SIZE for step in range(count)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dealt", [EXACT, pytest.param(ONE_SOURCE, marks=pytest.mark.matrix)], ids=["samples", "batches"]
)
def test_it_acts_soon_on_packs(tmp_path: Path, dealt: dict[str, Any]) -> None:
    """A group of packs is small, and so thousands of steps of them were read ahead."""
    for number, name in enumerate(("web", "code")):
        write_documents(tmp_path / name, seed=number, num_docs=2_000)
    packs = {name: Packed(StreamingDataset(tmp_path / name), 64) for name in ("web", "code")}
    mix = Mixture(packs, weights=WEB, **dealt)
    with DataLoader(mix, global_batch_size=8) as loader:
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        row = loader.set_weights(CODE)
        assert row <= (10 + SOON) * 8
        drawn = [set(next(batches)["__source__"]) for _ in range(60)]
    assert drawn == [{"code"} if (10 + step) * 8 >= row else {"web"} for step in range(60)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dealt", "replicate", "sizes"),
    [
        (EXACT, "broadcast", {"dp_size": 2, "tp_size": 2}),
        pytest.param(CHUNKS, "read", {"dp_size": 3}, marks=pytest.mark.matrix),
        pytest.param(ONE_SOURCE, "read", {"dp_size": 3}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_beside_exchanged_packs(
    tmp_path: Path, threads: Play, dealt: dict[str, Any], replicate: Any, sizes: dict[str, int]
) -> None:
    for number, name in enumerate(("web", "code")):
        write_documents(tmp_path / name, seed=number, num_docs=600, first=number * 1_000_000)
    packs = {name: Packed(StreamingDataset(tmp_path / name), 64) for name in ("web", "code")}
    mix, count = Mixture(packs, weights=WEB, shuffle=ShuffleConfig(seed=5, lanes=6), **dealt), 40

    def train(mesh: DeviceMesh) -> tuple[int, list[Any], dict[str, Any]]:
        options: dict[str, Any] = {"replicate": replicate, "balance": "exchange", "cost": 64, "num_threads": 0}
        with DataLoader(mix, global_batch_size=12, device_mesh=mesh, **options) as loader:
            batches = iter(loader)
            got = [next(batches)["input_ids"].tolist() for _ in range(8)]
            row = loader.set_weights(CODE)
            got += [next(batches)["input_ids"].tolist() for _ in range(count - 8)]
            return row, got, loader.state_dict()

    told = threads(train, **sizes)
    assert len({row for row, _, _ in told}) == len({json.dumps(state) for _, _, state in told}) == 1
    with DataLoader(mix, global_batch_size=12, num_threads=0) as loader:
        loader.load_state_dict({**told[0][2], "epoch": 0, "samples_seen": 0})
        for step, whole in zip(range(count), loader, strict=False):
            mine = [pack for _, got, _ in told[:: sizes.get("tp_size", 1)] for pack in got[step]]
            assert sorted(mine) == sorted(whole["input_ids"].tolist()), step


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_a_prefetcher_holds_come_as_they_are(sets: dict[str, SampleSet], num_workers: int) -> None:
    mix = mixture(sets, weights=WEB, **EXACT)
    with DataLoader(mix, global_batch_size=SIZE, num_workers=num_workers) as loader:
        on_device = DevicePrefetcher(loader, "cpu", depth=4)
        batches = iter(on_device)
        got = keys_of(batches, 5)
        row = loader.set_weights(CODE)
        got += keys_of(batches, 40)
        state = on_device.state_dict()
        assert state["samples_seen"] == 45 * SIZE
        on_device.close()
    assert row <= (5 + SOON) * SIZE
    assert merged([got]) == replayed(mix, state, 45)


@pytest.mark.thorough
def test_a_wrapper_that_holds_back_many_batches_counts_with_what_it_holds(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, weights=WEB, **EXACT)
    with DataLoader(mix, global_batch_size=SIZE, num_threads=0) as loader:
        on_device = DevicePrefetcher(loader, "cpu", depth=40)
        batches = iter(on_device)
        got = keys_of(batches, 2)
        assert loader.set_weights(CODE) == (2 + 40) * SIZE
        got += keys_of(batches, 50)
        assert merged([got]) == replayed(mix, on_device.state_dict(), 52)
        on_device.close()


@pytest.mark.thorough
def test_over_epochs_and_batches_that_grow(sets: dict[str, SampleSet]) -> None:
    """At the last batch of an epoch, where a batch size ends, and twice before a batch comes."""
    mix = mixture(sets, weights=WEB, **EXACT)
    sizes: dict[str, Any] = {"global_batch_size": Schedule.steps({0: 12, 240: 24}), "epoch_size": 480}
    with DataLoader(mix, num_threads=0, **sizes) as loader:
        got: list[list[str]] = []
        rows = []
        while len(got) < 80:
            for batch in loader:
                got.append(check_batch(batch))
                if len(got) in {3, 20, 30, 50}:
                    rows.append(loader.set_weights(CODE if len(got) in {3, 30} else WEB))
                    rows.append(loader.set_weights({"web": len(got), "code": 3}))
        state = loader.state_dict()
    assert rows == sorted(rows)
    assert [entry["from"] for entry in state["ledger"]] == [0, *rows]
    with DataLoader(mix, num_threads=0, **sizes) as loader:
        loader.load_state_dict({**state, "epoch": 0, "samples_seen": 0})
        again: list[list[str]] = []
        while len(again) < len(got):
            again += [check_batch(batch) for batch in loader]
    assert again == got


@pytest.mark.thorough
def test_chunks_that_are_here_are_not_fetched_again(sets: dict[str, SampleSet]) -> None:
    with DataLoader(mixture(sets, **EXACT), global_batch_size=SIZE) as loader:
        batches = iter(loader)
        keys_of(batches, 60)
        before = loader.metrics()["fetched_chunks"]
        loader.set_weights({"web": 2, "code": 1})
        keys_of(batches, 40)
        assert loader.metrics()["fetched_chunks"] == before


# --- on all ranks ---


def started(mix: Mixture, mesh: DeviceMesh, steps: int, **options: Any) -> tuple[DataLoader, Iterator[Any], Any]:
    loader = DataLoader(mix, global_batch_size=SIZE, device_mesh=mesh, num_threads=0, **options)
    batches = iter(loader)
    return loader, batches, keys_of(batches, steps)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicate", "at", "dealt"),
    [
        ("broadcast", None, EXACT),
        ("read", 60 * SIZE + 5, EXACT),
        ("read", None, CHUNKS),
        pytest.param("read", None, EXACT, marks=pytest.mark.matrix),
        pytest.param("broadcast", 60 * SIZE + 5, EXACT, marks=pytest.mark.matrix),
        pytest.param("broadcast", None, CHUNKS, marks=pytest.mark.matrix),
        pytest.param("read", 90 * SIZE, CHUNKS, marks=pytest.mark.matrix),
        pytest.param("broadcast", None, ONE_SOURCE, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_all_ranks_change_at_one_row_whichever_is_behind(
    sets: dict[str, SampleSet], threads: Play, replicate: Any, at: int | None, dealt: dict[str, Any]
) -> None:
    mix = mixture(sets, weights=WEB, **dealt)
    count = 120 if dealt == CHUNKS else 75

    def train(mesh: DeviceMesh) -> tuple[int, Any, Any]:
        loader, batches, got = started(mix, mesh, 8 - mesh.data_rank, replicate=replicate)
        with loader:
            row = loader.set_weights(CODE, at=at)
            got += keys_of(batches, count - len(got))
            return row, got, loader.state_dict()

    told = threads(train, dp_size=3, tp_size=2)
    ((row,), (state,)) = {one[0] for one in told}, [json.loads(one) for one in {json.dumps(one[2]) for one in told}]
    assert row == at or row <= (8 + (100 if dealt == CHUNKS else SOON)) * SIZE
    assert [one[1] for one in told[::2]] == [one[1] for one in told[1::2]]
    assert merged([one[1] for one in told[::2]]) == replayed(mix, state, count)


@pytest.mark.thorough
@pytest.mark.parametrize("at", [8 * SIZE, 23 * SIZE])
def test_a_row_that_is_too_soon_is_refused_on_all_ranks_with_the_row_that_is_not(
    sets: dict[str, SampleSet], threads: Play, at: int
) -> None:
    mix = mixture(sets, weights=WEB, **EXACT)

    def train(mesh: DeviceMesh) -> tuple[str, int]:
        loader, _, _ = started(mix, mesh, 8 - mesh.rank)
        with loader:
            with pytest.raises(ConfigError) as refusal:
                loader.set_weights(CODE, at=at)
            return str(refusal.value), loader.set_weights(CODE, at=24 * SIZE)

    first = 24 * SIZE
    said = f"set_weights: at={at}: rows before {first} are planned already; give a row from {first} on, or leave at out"
    assert set(threads(train, dp_size=4)) == {(said, first)}


@pytest.mark.thorough
def test_what_one_rank_cannot_do_is_refused_on_all(
    sets: dict[str, SampleSet], threads: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are none there, or that need more memory than it has; then it works."""
    mix = mixture(sets, weights=WEB, **EXACT)
    replanned = EpochLoop._replanned
    scarce = {"memory": True}

    def one_has_too_little(loop: EpochLoop, *args: Any) -> Any:
        if loop.config.mesh.rank == 2 and scarce["memory"]:
            raise MemoryLimitError("too little")
        return replanned(loop, *args)

    monkeypatch.setattr(EpochLoop, "_replanned", one_has_too_little)

    def train(mesh: DeviceMesh) -> tuple[list[str], Any, Any]:
        loader, batches, got = started(mix, mesh, 3)
        said = []
        with loader:
            for weights in ({"web": -1, "code": 1} if mesh.rank == 1 else CODE, CODE):
                with pytest.raises((ConfigError, AgreementError, MemoryLimitError)) as refusal:
                    loader.set_weights(weights)
                said.append(f"{type(refusal.value).__name__}: {refusal.value}")
            scarce["memory"] = False
            got += keys_of(batches, 2)
            loader.set_weights(CODE)
            got += keys_of(batches, 40)
            return said, got, loader.state_dict()

    told = threads(train, dp_size=3)
    invalid, scarcely = zip(*(said for said, _, _ in told), strict=True)
    assert invalid[1].startswith("ConfigError: set_weights: 'web': expected a number")
    assert all("because rank 1 cannot: set_weights: 'web'" in invalid[rank] for rank in (0, 2))
    assert scarcely[2] == "MemoryLimitError: too little"
    assert all("AgreementError: set_weights: nothing has changed, because rank 2 cannot: too little" in scarcely[rank]
               for rank in (0, 1))  # fmt: skip
    states = [state for _, _, state in told]
    assert states[0] == states[1] == states[2]
    assert len(states[0]["ledger"]) == 2
    assert merged([got for _, got, _ in told]) == replayed(mix, states[0], 45)


@pytest.mark.thorough
def test_numbers_of_numpy_mean_the_same_on_several_ranks(sets: dict[str, SampleSet], threads: Play) -> None:
    mix = mixture(sets, **EXACT)
    weights = {"web": np.float32(0.25), "code": np.int64(3)}

    def train(mesh: DeviceMesh) -> Any:
        loader, _, _ = started(mix, mesh, 2)
        with loader:
            row = loader.set_weights(weights if mesh.rank else {"web": 0.25, "code": 3}, at=np.int64(2_400))  # type: ignore[arg-type]
            return json.dumps([row, loader.state_dict()])

    assert len({*threads(train, dp_size=2), *threads(train, dp_size=1, tp_size=2)}) == 1


def test_ranks_that_cannot_ask_each_other_are_told_the_same_row(sets: dict[str, SampleSet]) -> None:
    """It depended on how far each had read ahead; one of them took a row that the next one refused."""
    mix = mixture(sets, weights=WEB, **EXACT)
    said, rows, got, states = set(), set(), [], []
    for rank in range(2):
        limit = ("64MiB", "1GiB")[rank]
        loader, batches, keys = started(mix, mesh_of(2, rank), 5, memory_limit=limit)
        with loader:
            for at in (None, 5 * SIZE, 21 * SIZE - 1):
                with pytest.raises(ConfigError, match=rf"{21 * SIZE} o") as refusal:
                    loader.set_weights(CODE, at=at)
                said.add(str(refusal.value))
            rows.add(loader.set_weights(CODE, at=21 * SIZE))
            got.append(keys + keys_of(batches, 40))
            states.append(loader.state_dict())
    assert len(said) == 3
    assert rows == {21 * SIZE}
    assert states[0] == states[1]
    assert merged(got) == replayed(mix, states[0], 45)


# --- what a state says of a change to come ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dealt", "steps"),
    [(EXACT, 5), (CHUNKS, 0), *(pytest.param(dealt, steps, marks=pytest.mark.matrix) for dealt, steps in
                                ((EXACT, 0), (ONE_SOURCE, 0), (ONE_SOURCE, 5), (CHUNKS, 5)))],
    ids=str,
)  # fmt: skip
def test_a_source_is_needed_until_the_change_that_drops_it_acts(
    sets: dict[str, SampleSet], dealt: dict[str, Any], steps: int
) -> None:
    """Such a state was taken, and the first batch was an error."""
    mix = mixture(sets, "web code math", **dealt)
    with DataLoader(mix, global_batch_size=SIZE, num_threads=0) as loader:
        batches = iter(loader)
        keys_of(batches, steps)
        row = loader.set_weights({"web": 1, "code": 1, "math": 0}, at=100 * SIZE)
        state = loader.state_dict()
        keys_of(batches, 300 if dealt == CHUNKS else 100)
        late = loader.state_dict()
    without = mixture(sets, "web code", **dealt)
    with DataLoader(without, global_batch_size=SIZE, num_threads=0) as loader:
        with pytest.raises(StateError, match=r"'math', which (it|this mixture) lacks.*Add the source.* weight 0"):
            loader.load_state_dict(state)
        assert len(keys_of(iter(loader), 2)) == 2  # it goes on as before
        loader.load_state_dict(late)
        assert len(keys_of(iter(loader), 2)) == 2
    assert row == 100 * SIZE


def test_a_source_that_a_change_to_come_would_draw_may_be_dropped(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, "web code math", weights={"web": 1, "code": 1, "math": 0}, **EXACT)
    with DataLoader(mix, global_batch_size=SIZE, num_threads=0) as loader:
        keys_of(iter(loader), 3)
        loader.set_weights({"web": 1, "code": 1, "math": 1}, at=30 * SIZE)
        state = loader.state_dict()
    with DataLoader(mixture(sets, "web code", **EXACT), global_batch_size=SIZE, num_threads=0) as loader:
        loader.load_state_dict(state)
        assert len(keys_of(iter(loader), 60)) == 60


def test_a_remote_group_says_what_to_do_instead(sets: dict[str, SampleSet], monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)
    one: dict[str, Any] = {"device_mesh": mesh_of(1, 0), "remote_group": "readers"}
    with DataLoader(lambda: mixture(sets, weights=WEB, **EXACT), SIZE, **one) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        with pytest.raises(ConfigError, match=r"set_weights: not with remote_group.*other weights.*load_state_dict"):
            loader.set_weights(CODE)
        state = loader.state_dict()
    with DataLoader(lambda: mixture(sets, weights=CODE, **EXACT), SIZE, **one) as loader:
        loader.load_state_dict(state)
        assert set(next(iter(loader)).handles[0].get()["__source__"]) == {"code"}
