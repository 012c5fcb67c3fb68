"""What every kind of loop promises, whatever it reads: one class for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import (
    DataLoader,
    DeviceMeshFetcher,
    DevicePrefetcher,
    Mixture,
    OrdinaryDataset,
    Packed,
    RemoteBatch,
    ShuffleConfig,
    StreamingDataset,
)
from streaming.errors import IteratorEndedError, IteratorSupersededError, TooManyBadSamplesError
from tests.support.contracts.loop_kinds import (
    ALONE,
    NUM_BATCHES,
    NUM_SAMPLES,
    SHARD_SIZES,
    SIZE,
    Passes,
    Squares,
    compress,
    rows_of,
)
from tests.support.processes.leftovers import leftovers
from tests.support.processes.played_ranks import read_here
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.tiers import first_here

ROTTEN = 7
Make = Callable[..., Any]
Batches = list[tuple[int, ...]]


def rot(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == ROTTEN:
        raise ValueError("rotten")
    return sample


class Rotten(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return rot(super().__getitem__(index))


class RottenPasses(Passes):
    """Rotten in the second batch of the first pass."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (rot({"cls": sample["cls"] - SIZE}) | sample for sample in super().__iter__())


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("contract") / "train", SHARD_SIZES)


@pytest.fixture(scope="module")
def unlisted(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return compress(samples, tmp_path_factory.mktemp("unlisted"))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Documents that fill a pack each, so that there are as many; tokens are their number. By whether one is rotten."""
    found = {rotten: tmp_path_factory.mktemp("documents") for rotten in (False, True)}
    for rotten, folder in found.items():
        with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=20, columns={"tokens": lambda _: 4}) as writer:
            for number in range(NUM_SAMPLES):
                tokens, is_bad = np.full(4, number, "<u2").tobytes(), rotten and number == ROTTEN
                writer.write({"__key__": "rotten" if is_bad else str(number), "tok": tokens[is_bad:]})
    return found


def mixed(dataset: StreamingDataset) -> Mixture:
    return Mixture({"first": dataset[: NUM_SAMPLES // 2], "second": dataset[NUM_SAMPLES // 2 :]}, seed=5)


@pytest.fixture
def opened(
    samples: SampleSet, unlisted: SampleSet, documents: dict[bool, Path], tmp_path: Path
) -> Callable[[str, int | None], Any]:
    """What loaders of a kind read; ``limit``: a sample is rotten, and so many may be."""

    def data(kind: str, limit: int | None) -> Any:
        chosen: dict[str, Any] = {"seed": 5} | ({} if limit is None else {"transform": rot, "max_bad_samples": limit})
        rows = Squares() if limit is None else Rotten()
        passes = Passes if limit is None else RottenPasses
        allowed: dict[str, Any] = {} if limit is None else {"max_bad_samples": limit}
        makers: dict[str, Callable[[], Any]] = {
            # Without an index the default window reads all samples a hundred times before the first one leaves it.
            "unindexed": lambda: unlisted.open(shuffle=ShuffleConfig(window=4), **chosen),
            "cached": lambda: samples.open(cache_dir=tmp_path, **chosen),
            "mixture": lambda: mixed(samples.open(**chosen)),
            "packed": lambda: Packed(StreamingDataset(documents[limit is not None], seed=5, **allowed), 4),
            "map-style": lambda: OrdinaryDataset(rows, seed=5, max_retries=0, max_bad_samples=limit),
            "iterable": passes,
            "dispatched": lambda: OrdinaryDataset(passes(), sharding="dispatch"),
            "remote": lambda: partial(samples.open, **chosen),
        }
        return makers.get(kind, lambda: samples.open(**chosen))()

    return data


@pytest.fixture
def make(
    request: pytest.FixtureRequest, opened: Callable[[str, int | None], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes loaders of the kind that the test is about; none leaves anything behind."""
    kind = request.param
    if kind == "remote":
        read_here(monkeypatch)
    before, made = leftovers(), []

    def loader(*, limit: int | None = None, **options: Any) -> Any:
        options = {"batch_size": SIZE, "device_mesh": ALONE, "last_batch": "partial", **options}
        if kind == "unindexed":
            options["epoch_size"] = NUM_SAMPLES
        if kind == "remote":
            options["remote_group"] = "readers"
        one: Any = (DeviceMeshFetcher if kind == "fetcher" else DataLoader)(opened(kind, limit), **options)
        made.append(DevicePrefetcher(one, "cpu") if kind == "prefetcher" else one)
        return made[-1]

    yield loader
    for one in made:
        one.close()
    made.clear()
    assert leftovers() - before == {}


@pytest.fixture
def expected(make: Make, request: pytest.FixtureRequest, two_epochs: dict[str, list[Batches]]) -> list[Batches]:
    """The batches of two epochs of an undisturbed loader of the kind, played once for all tests."""
    kind = request.node.callspec.params["make"]
    if kind not in two_epochs:
        two_epochs[kind] = [taken(loader) for loader in [make()] for _ in range(2)]
    return two_epochs[kind]


@pytest.fixture(scope="module")
def two_epochs() -> dict[str, list[Batches]]:
    """Those of all kinds, as they are played."""
    return {}


def taken(loader: Any, count: int | None = None) -> Batches:
    """The next batches of one iteration; it is left behind the last of them."""
    return [rows_of(batch) for batch in islice(iter(loader), count)]


def counted(batch: Any) -> int:
    """Rows that are no padding."""
    batch = batch.get() if isinstance(batch, RemoteBatch) else batch
    return sum(sample["__valid__"] for sample in batch) if isinstance(batch, list) else int(batch["__valid__"].sum())


GO_ON = ("indexed", "unindexed", "cached", "mixture", "fetcher", "map-style", "prefetcher", "remote", "packed")
"""Kinds in which another sample stands for a bad one, or padding for a document of a pack."""
END = ("iterable", "dispatched")
"""Those whose data set ends the epoch where it raises: nothing of it can be asked for again."""


@pytest.mark.parametrize("make", [*GO_ON, *END], indirect=True)
class TestEveryLoop:
    @pytest.mark.parametrize("count", [0, 1, NUM_BATCHES])
    def test_closed_it_ends_at_once_and_can_be_used_again(
        self, make: Make, expected: list[Batches], count: int
    ) -> None:
        loader = make()
        batches = iter(loader)
        assert [rows_of(next(batches)) for _ in range(count)] == expected[0][:count]
        loader.close()
        loader.close()
        if count == NUM_BATCHES:
            assert list(batches) == []
        else:
            with pytest.raises(IteratorEndedError, match=rf"the loader was closed by .*{Path(__file__).name}:\d+"):
                next(batches)
        assert loader.epoch == (count == NUM_BATCHES)
        assert taken(loader) == expected[1 if count else 0]

    def test_left_early_the_next_iteration_is_the_next_epoch(self, make: Make, expected: list[Batches]) -> None:
        with make() as loader:
            assert taken(loader, 2) == expected[0][:2]
            assert (loader.epoch, loader.state_dict()["samples_seen"]) == (0, 2 * SIZE)
            assert [len(batch) for batch in taken(loader)] == [len(batch) for batch in expected[1]]
            assert loader.epoch == 2

    @pytest.mark.parametrize("count", first_here([0, 1, NUM_BATCHES, *range(2, NUM_BATCHES)], 3))
    def test_a_state_goes_on_behind_the_batch_handed_out_last(
        self, make: Make, expected: list[Batches], count: int
    ) -> None:
        with make() as loader:
            assert taken(loader, count) == expected[0][:count]
            state = json.loads(json.dumps(loader.state_dict()))
        with make() as other:
            other.load_state_dict(state)
            assert other.epoch == state["epoch"] == (count == NUM_BATCHES)
            inner = getattr(other, "loader", other)
            if isinstance(state.get("cursors"), list):
                with pytest.raises(TypeError, match="no length"):
                    inner.batches_left  # noqa: B018
            else:
                assert inner.batches_left == (NUM_BATCHES - count or NUM_BATCHES)
            assert taken(other) == (expected[0][count:] if count < NUM_BATCHES else expected[1])

    @pytest.mark.parametrize("seeds", first_here([(8,), ()], 1), ids=["in an epoch with a new seed", ""])
    def test_a_seed_given_while_all_batches_are_held_back_is_for_the_next_epoch(
        self, make: Make, seeds: tuple[int, ...]
    ) -> None:
        with make() as loader:
            inner = getattr(loader, "loader", loader)
            for seed in seeds:
                taken(loader)
                loader.seed(seed)
            batches = iter(inner)
            first = rows_of(next(batches))
            batches.hold_back(1)
            loader.seed(9)
            states = [json.loads(json.dumps(inner.state_dict())) for _ in range(2)]
            batches.hold_back(-1)
            states[1] |= {"has_begun": False, "next_seed": None}  # as if no seed had been given
            expected = [[first, *map(rows_of, batches)], taken(loader)]
        for state, epochs in zip(states, (2, 1), strict=True):
            with make() as other:
                other.load_state_dict(state)
                assert [taken(other) for _ in range(epochs)] == expected[:epochs]

    @pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
    def test_the_tail_is_what_last_batch_says(self, make: Make, last_batch: str) -> None:
        rest = NUM_SAMPLES % SIZE
        with make(last_batch=last_batch) as loader:
            batches = list(loader)
        sizes = [len(rows_of(batch)) for batch in batches]
        assert sizes[:3] == [SIZE] * 3
        assert sizes[3:] == {"drop": [], "pad": [SIZE], "partial": [rest]}[last_batch]
        if last_batch == "pad":
            assert [counted(batch) for batch in batches] == [SIZE, SIZE, SIZE, rest]

    def test_a_second_iterator_takes_the_place_of_the_first(self, make: Make) -> None:
        with make() as loader:
            first = iter(loader)
            next(first)
            second = iter(loader)
            next(second)
            for _ in range(2):
                with pytest.raises(IteratorSupersededError, match=rf"another one was made by .*{Path(__file__).name}"):
                    next(first)
            assert loader.describe() != "not running"
            assert loader.epoch == 1
            assert len(list(second)) == NUM_BATCHES - 1
            assert loader.epoch == 2


@pytest.mark.parametrize("make", GO_ON, indirect=True)
class TestEveryLoopThatGoesOn:
    def test_a_bad_sample_is_named_and_another_or_padding_stands_in(self, make: Make) -> None:
        with make(limit=1) as loader:
            rows = [row for batch in taken(loader) for row in batch]
            found = loader.metrics()
        assert len(rows) == NUM_SAMPLES
        assert ROTTEN not in rows
        assert sum(one["bad_samples"] for one in found.get("readers", [found])) == len(found["bad"]) == 1
        assert "rotten" in str(found["bad"][0])

    def test_one_too_many_stops_it_by_name(self, make: Make) -> None:
        with (
            make(limit=0) as loader,
            pytest.raises(TooManyBadSamplesError, match=r"max_bad_samples(=| allows )0(?s:.*)rotten"),
        ):
            list(loader)


@pytest.mark.parametrize("make", END, indirect=True)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.usefixtures("one_fork_server")
def test_an_error_of_the_data_set_comes_behind_the_batches_before_it(make: Make, num_workers: int) -> None:
    with make(limit=0, num_workers=num_workers) as loader:
        batches = iter(loader)
        assert rows_of(next(batches)) == (*range(SIZE),)
        with pytest.raises(ValueError, match="rotten"):
            next(batches)
        with pytest.raises(IteratorEndedError, match=r"ValueError: (rotten|Caught ValueError)"):
            next(batches)
        assert (loader.epoch, loader.state_dict()["samples_seen"]) == (0, SIZE)
        loader.set_epoch(1)
        assert [row for batch in taken(loader) for row in batch] == [*range(1000, 1000 + NUM_SAMPLES)]
