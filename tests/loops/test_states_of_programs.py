"""A state means one thing: whatever a program counts, in every kind of loop, wherever it saves, a batch comes once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import pytest

from streaming import DataLoader, DevicePrefetcher, Mixture, OrdinaryDataset, Packed, StreamingDataset
from streaming.errors import ConfigError
from tests.support.contracts.loop_kinds import (
    ALONE,
    KINDS,
    NUM_BATCHES,
    SHARD_SIZES,
    SIZE,
    Passes,
    compress,
    epochs_of,
    makers,
    rows_of,
)
from tests.support.contracts.program_kinds import (
    EPOCHS,
    FETCHING,
    PROGRAMS,
    STEPS,
    Checkpoint,
    Program,
    reads_ahead,
    run,
)
from tests.support.processes.played_ranks import read_here
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.sets.packed_sets import write as write_documents
from tests.support.tiers import first_here

Maker = Callable[[], Any]
MORE_KINDS = (
    "drop", "virtual epochs", "mixture", "mixture, virtual epochs", "packs", "stream", "dispatch",
    "prefetcher, foreign", "remote", "remote, iterable", "remote, stream", "remote, mixture",
)  # fmt: skip
ALL_KINDS = (*KINDS, *MORE_KINDS)
every_kind = pytest.mark.parametrize("kind", ALL_KINDS)


@pytest.fixture(autouse=True)
def readers(monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Maker]:
    folder = tmp_path_factory.mktemp("states")
    samples = write_set(folder / "train", SHARD_SIZES)
    write_documents(folder / "documents", num_docs=100)
    (folder / "compressed").mkdir()
    return makers(samples, compress(samples, folder / "compressed")) | more_makers(samples, str(folder / "documents"))


def more_makers(samples: SampleSet, documents: str) -> dict[str, Maker]:
    one: dict[str, Any] = {"batch_size": SIZE, "device_mesh": ALONE}
    whole, virtual = one | {"last_batch": "partial"}, one | {"epoch_size": NUM_BATCHES * SIZE}
    remote = {"remote_group": "readers", "num_threads": 0}

    def mixture(**options: Any) -> Mixture:
        halves = {"low": samples.open(subset=(0, 19)), "high": samples.open(subset=(19, 38))}
        return Mixture(halves, seed=3, **options)

    def packs() -> Packed:
        return Packed(StreamingDataset(documents, seed=3), 64)

    pack_batch = -(-len(packs()) // NUM_BATCHES)
    weights = {"low": 2, "high": 1}
    return {
        "drop": lambda: DataLoader(samples.open(seed=5), 9, device_mesh=ALONE, num_threads=0),
        "virtual epochs": lambda: DataLoader(samples.open(seed=5), num_threads=0, **virtual),
        "mixture": lambda: DataLoader(mixture(repeats={"low": 1, "high": 1}), num_threads=0, **whole),
        "mixture, virtual epochs": lambda: DataLoader(mixture(weights=weights), num_threads=0, **virtual),
        "packs": lambda: DataLoader(packs(), pack_batch, device_mesh=ALONE, last_batch="partial", num_threads=0),
        "stream": lambda: DataLoader(Passes(), **virtual),
        "dispatch": lambda: DataLoader(OrdinaryDataset(Passes(), sharding="dispatch"), **whole),
        "prefetcher, foreign": lambda: DevicePrefetcher(Foreign(samples), "cpu", depth=2),
        "remote": lambda: DataLoader(partial(samples.open, seed=5), **whole, **remote),
        "remote, iterable": lambda: DataLoader(partial(Passes), **whole, remote_group="readers"),
        "remote, stream": lambda: DataLoader(partial(Passes), **virtual, remote_group="readers"),
        "remote, mixture": lambda: DataLoader(partial(mixture, weights=weights), **virtual, **remote),
    }


class Foreign:
    """A loader of another library, whose place a prefetcher has to note: ours, but nobody knows."""

    def __init__(self, samples: SampleSet) -> None:
        self._loader = DataLoader(samples.open(seed=5), SIZE, device_mesh=ALONE, last_batch="partial", num_threads=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader


@pytest.fixture(scope="module")
def truth(made: dict[str, Maker]) -> dict[str, list[tuple[int, ...]]]:
    """By kind: the batches of the first epochs, one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        read_here(patch)
        found = {kind: list(chain.from_iterable(epochs_of(make, EPOCHS))) for kind, make in made.items()}
    for kind, batches in found.items():
        assert len(set(batches)) == STEPS, kind
    return found


def chosen(saved: list[Checkpoint], *, every: bool) -> list[Checkpoint]:
    """Those of the first epoch but one step between others, and that of the very last step."""
    if every:
        return saved
    early = [one for one in saved if one.trained <= NUM_BATCHES and (one.moment, one.trained) not in NOT_CHOSEN]
    return [*early, next(one for one in reversed(saved) if one.moment == "step")]


NOT_CHOSEN = {("step", 1), ("step", 3)}
NEVER_BEHIND = {"sampler", "retry", "follow", "prefetcher, foreign"}
"""Kinds whose position nobody can hold back."""


@every_kind
@pytest.mark.parametrize("program", first_here(PROGRAMS, 2), ids=lambda program: program.__name__)
def test_every_program_goes_on_with_the_next_batch(
    program: Program, kind: str, made: dict[str, Maker], truth: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    loader = made[kind]()
    if program is reads_ahead and not hasattr(loader, "with_state"):
        pytest.skip("samplers have no batches of their own")
    if program in FETCHING and kind in NEVER_BEHIND:
        with pytest.raises(ConfigError, match=r"^one_behind\(loader\): "):
            run(program, loader)
        return
    job = run(program, loader)
    close(loader)
    assert job.trained == truth[kind]
    bodies = {one.trained: one.state for one in job.saved if one.moment == "step"}
    for checkpoint in chosen(job.saved, every=request.config.getoption("--matrix")):
        loader = made[kind]()
        loader.load_state_dict(checkpoint.state)
        rest = run(program, loader, checkpoint.own)
        close(loader)
        assert rest.trained == truth[kind][checkpoint.trained :], checkpoint
        for one in rest.saved:
            if one.moment == "step":
                assert one.state == bodies[checkpoint.trained + one.trained], "as if it had never been interrupted"


def close(loader: Any) -> None:
    if hasattr(loader, "close"):
        loader.close()


@every_kind
def test_a_program_that_counts_by_next_hears_that_the_epoch_is_over(
    kind: str, made: dict[str, Maker], truth: dict[str, Any]
) -> None:
    """It looks like one that asks for the rest: the state says "the end", and nothing is skipped in silence."""
    loader = made[kind]()
    batches = iter(loader)
    for _ in range(NUM_BATCHES):
        next(batches)
    end = loader.state_dict()
    again = made[kind]()
    again.load_state_dict(end)
    assert again.state_dict() == end
    assert next(iter(again), None) is None
    assert rows_of(next(iter(again))) == truth[kind][NUM_BATCHES]
    again.load_state_dict(end)
    again.set_epoch(1)
    assert rows_of(next(iter(again))) == truth[kind][NUM_BATCHES], "or it says where to go on"
    if kind not in {"sampler", "retry", "follow", "prefetcher, foreign"}:
        assert end["epoch"] == 0 == loader.epoch
    del batches
    assert loader.epoch == 1, "nobody can ask for more"
    close(loader)
    close(again)


@pytest.mark.parametrize("kind", ["indexed", "iterable", "stream", "mixture", "prefetcher", "remote"])
def test_nothing_is_abandoned_at_an_end(kind: str, made: dict[str, Maker], caplog: pytest.LogCaptureFixture) -> None:
    loader = made[kind]()
    batches = iter(loader)
    for _ in range(NUM_BATCHES):
        next(batches)
    end = loader.state_dict()
    for epoch in (0, 1, 2):
        loader.load_state_dict(end)
        loader.set_epoch(epoch)
        assert len(list(loader)) == (NUM_BATCHES if epoch else 0)
        assert loader.epoch == epoch + 1
    close(loader)
    assert not [one for one in caplog.records if "abandoned" in one.getMessage()]


# --- with_state ---

with_batches = pytest.mark.parametrize(
    "kind", [kind for kind in ALL_KINDS if kind not in {"sampler", "retry", "follow"}]
)


@with_batches
def test_each_batch_comes_with_the_state_after_it(kind: str, made: dict[str, Maker], truth: dict[str, Any]) -> None:
    plain, paired = made[kind](), made[kind]()
    for epoch in range(2):
        states = [plain.state_dict() for _ in plain]
        pairs = list(paired.with_state())
        assert [rows_of(batch) for batch, _ in pairs] == truth[kind][epoch * NUM_BATCHES :][:NUM_BATCHES]
        assert [state for _, state in pairs] == states
        assert json.loads(json.dumps(states)) == states
        assert paired.state_dict() == plain.state_dict()
    pairs = iter(paired.with_state())
    next(pairs)
    _, state = next(pairs)
    paired.load_state_dict(state)
    assert next(paired.with_state())[1] != state
    for one in (plain, paired):
        close(one)


@pytest.mark.parametrize("kind", ["indexed", "map-style", "iterable", "unindexed", "mixture", "packs", "remote"])
def test_pairs_through_a_prefetcher_stay_pairs(kind: str, made: dict[str, Maker], truth: dict[str, Any]) -> None:
    """Of the loader's pairs, three are read ahead: each has its own state, and the loader's is of what was received."""
    with made[kind]() as loader, made[kind]() as plain:
        states = [plain.state_dict() for _ in plain]
        for number, (batch, state) in enumerate(DevicePrefetcher(loader.with_state(), "cpu", depth=3)):
            assert rows_of(batch) == truth[kind][number]
            assert state == loader.state_dict() == states[number]
        assert loader.epoch == 1
        ahead = DevicePrefetcher(loader.with_state(), "cpu")
        assert len(list(ahead)) == NUM_BATCHES
        with pytest.raises(ConfigError, match=r"an iterator of a loader, which lasts one epoch.*prefetcher.with_state"):
            iter(ahead)


def test_several_threads_that_ask_get_pairs_that_belong_together(made: dict[str, Maker], truth: dict[str, Any]) -> None:
    with made["indexed"]() as loader, made["indexed"]() as plain, ThreadPoolExecutor(4) as threads:
        states = [plain.state_dict() for _ in plain]
        pairs = loader.with_state()
        for batch, state in threads.map(lambda _: next(pairs), range(NUM_BATCHES)):
            assert state == states[truth["indexed"].index(rows_of(batch))]


# --- an end is one whatever follows ---


@pytest.mark.parametrize("kind", ["drop", "map-style", "mixture", "virtual epochs"])
def test_an_end_stays_one_under_another_batch_size(kind: str, made: dict[str, Maker]) -> None:
    """Also where smaller batches would find samples that were left out."""
    with made[kind]() as loader:
        batches = iter(loader)
        for _ in range(NUM_BATCHES):
            next(batches)
        end = loader.state_dict()
        dataset = loader.dataset
    size = end["epoch_size"]
    with DataLoader(dataset, 2, device_mesh=ALONE, num_threads=0, epoch_size=size) as other:
        other.load_state_dict(end)
        assert (other.epoch, other.batches_left, list(other), other.epoch) == (0, 0, [], 1)
        assert len(list(other)) == len(other)
