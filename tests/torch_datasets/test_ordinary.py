"""Loops over ordinary map-style and iterable torch data sets."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from infra import DeviceMesh
from streaming import DataLoader, OrdinaryDataset
from streaming.common.arguments import option_names
from streaming.errors import ConfigError, DataError, IteratorEndedError, StateError, TooManyBadSamplesError
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.order.plan.state import LoaderState
from streaming.others.torch_datasets.iterable import IterableLoop, IterableState
from streaming.others.torch_datasets.map_style import MapLoop, open_ordinary
from streaming.others.torch_datasets.options import OrdinaryConfig
from tests.support.code.folders import PROGRAMS
from tests.support.processes.forked import Forked, all_end
from tests.support.processes.leftovers import leftovers
from tests.support.shared_fixtures import server_imports
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")


def config(rank: int = 0, world_size: int = 1, **options: Any) -> OrdinaryConfig:
    mesh = DeviceMesh.from_sizes(dp_size=world_size, rank=rank, world_size=world_size)
    chosen = {name: options.pop(name) for name in ("last_batch", "epoch_size") if name in options}
    sizes = Sizes.constant(options.pop("global_batch_size", 8))
    shape = Shape(sizes=sizes, num_ranks=world_size, **chosen)
    return OrdinaryConfig(shape=shape, mesh=mesh, **options)


class Squares(Dataset[Any]):
    """Dicts with their index; some are rotten."""

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        self.size, self.bad = size, bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise ValueError(f"sample {index} is rotten")
        return {"id": index, "x": np.full(3, index, np.float32), "__key__": str(index)}


class Stream(IterableDataset[int]):
    """0, 1, 2, …: knows nothing of ranks and workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)


class Sharded(Stream):
    """Can be cut; counts what it reads by raising where it would read another's."""

    def __init__(self, size: int, num_shards: int, chosen: tuple[int, ...] | None = None) -> None:
        super().__init__(size)
        self.num_shards, self.chosen = num_shards, tuple(range(num_shards)) if chosen is None else chosen
        self.total = num_shards

    def shard(self, num_shards: int, index: int) -> Sharded:
        made = Sharded(self.size, self.total, self.chosen[index::num_shards])
        made.num_shards = len(made.chosen)
        return made

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is None  # not to be cut twice
        for shard in self.chosen:
            yield from range(shard, self.size, self.total)


class Shuffled(Stream):
    """Draws its order from Python's global random numbers, as many do."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.shuffle(order)
        yield from order


class ByWorkerInfo(Stream):
    """As torch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(self.size) if info is None else range(info.id, self.size, info.num_workers)


class Stateful(Stream):
    """With the protocol of torchdata's StatefulDataLoader; never goes over what it gave."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.size:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class InTwo(Stream):
    """The data set has a state, and its iterator another one; both are given as they lie, and change later."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.own = {"turned": 0}

    def set_epoch(self, epoch: int) -> None:
        self.own["turned"] = 7 * epoch

    def __iter__(self) -> Iterator[int]:
        return _Place(self)

    def state_dict(self) -> dict[str, int]:
        return self.own

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.own = {"turned": state["turned"]}


class _Place(Iterator[int]):
    def __init__(self, stream: InTwo) -> None:
        self.stream, self.own = stream, {"at": 0}

    def __next__(self) -> int:
        if self.own["at"] == self.stream.size:
            raise StopIteration
        self.own["at"] += 1
        return (self.own["at"] + self.stream.own["turned"]) % self.stream.size

    def state_dict(self) -> dict[str, int]:
        return self.own

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.own = {"at": state["at"]}


def ids(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        kept = batch["id"]
        return (kept[batch["__valid__"]] if "__valid__" in batch else kept).tolist()
    return batch.tolist()


# --- map-style ---


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("last_batch", first_here(["partial", "drop", "pad"], 1))
def test_map_style_keeps_the_promises(num_workers: int, last_batch: str) -> None:
    before = leftovers()
    reference: list[list[list[int]]] = []
    for world_size in (1, 2, 4):
        loops = [
            MapLoop(Squares(43), config(rank, world_size, last_batch=last_batch, num_workers=num_workers, seed=4))
            for rank in range(world_size)
        ]
        for epoch in range(2):
            ranks = [[ids(batch) for batch in loop.run()] for loop in loops]
            assert {len(one) for one in ranks} == {loops[0].num_batches}
            batches = [[i for rows in batch for i in rows] for batch in zip(*ranks, strict=True)]
            if world_size == 1:
                reference.append(batches)
            assert batches == reference[epoch]
            assert {loop.epoch for loop in loops} == {epoch + 1}
        for loop in loops:
            loop.close()
    seen = Counter(i for batch in reference[0] for i in batch)
    assert seen == Counter(range(43)) if last_batch != "drop" else len(seen) == 40
    assert reference[0] != reference[1]
    assert leftovers() - before == {}


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_map_style_resumes_to_the_batch_on_another_world_size(num_workers: int) -> None:
    loop = MapLoop(Squares(43), config(num_workers=num_workers, last_batch="partial"))
    assert loop.state().samples_seen == 0
    found, states = [], []
    for _ in range(2):
        for batch in loop.run():
            found.append(ids(batch))
            states.append(loop.state().to_dict())
    loop.close()
    json.dumps(states)
    for stop in (1, 3, 5, 6, 7):
        ranks = []
        for rank in range(2):
            other = MapLoop(Squares(43), config(rank, 2, num_workers=num_workers, last_batch="partial"))
            other.load(LoaderState.from_dict(states[stop - 1]))
            epochs = 2 if stop <= 6 else 1
            ranks.append([ids(batch) for _ in range(epochs) for batch in other.run()])
            other.close()
        assert [a + b for a, b in zip(*ranks, strict=True)] == found[stop:]


def test_map_style_left_early_and_used_again() -> None:
    before = leftovers()
    loop = MapLoop(Squares(40), config(num_workers=2))
    first = [ids(batch) for batch in islice(loop.run(), 2)]
    assert loop.state().samples_seen == 16
    assert [ids(batch) for batch in loop.run()][:2] != first
    running = loop.run()
    next(running)
    assert loop.epoch == 2
    loop.close()
    assert loop.describe() == "not running"
    with pytest.raises(IteratorEndedError, match="the loader was closed"):
        next(running)
    loop.set_epoch(0)
    assert [ids(batch) for batch in loop.run()][:2] == first
    assert loop.report()["batches"] == 2 + 5 + 1 + 5
    loop.close()
    del running
    assert leftovers() - before == {}


class Rotten(Dataset[Any]):
    """Every second sample cannot be had; a file is made for each that was tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> str:
        if index % 2:
            (self.folder / str(index)).touch()
            raise ValueError(f"sample {index} is rotten")
        return str(index)  # no tensor, which would be in shared memory as long as the error is held


def test_bad_samples_that_come_while_workers_start_leave_no_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's loader asks for indices as it starts them: an error there would leave them to the collector."""
    ask = _MultiProcessingDataLoaderIter._try_put_index
    asked = count()

    def slow(loader: Any) -> None:
        ask(loader)
        while next(asked) == 1 and len(list(tmp_path.iterdir())) < 3:  # more than are allowed are known
            pass

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_put_index", slow)
    before = leftovers()
    loop = MapLoop(Rotten(tmp_path), config(num_workers=2, max_bad_samples=1))
    with pytest.raises(TooManyBadSamplesError) as caught:
        list(loop.run())
    assert caught.value.__traceback__ is not None  # which may hold what raised it
    assert leftovers() - before == {}


def test_map_style_bad_samples() -> None:
    loop = MapLoop(Squares(40, bad=(3, 11)), config(num_workers=2, max_bad_samples=5))
    assert 3 not in {i for batch in loop.run() for i in ids(batch)}
    report = loop.report()
    assert sorted(one["number"] for one in report["bad"]) == [3, 11]
    assert report["bad_samples"] == 2
    loop.close()
    before = leftovers()
    loop = MapLoop(Squares(400, bad=tuple(range(0, 400, 3))), config(num_workers=2, max_bad_samples=1))
    with pytest.raises(TooManyBadSamplesError):
        list(loop.run())
    assert leftovers() - before == {}
    loop = MapLoop(Squares(40, bad=(3,)), config(on_error="raise"))
    with pytest.raises(ValueError, match="sample 3"):
        list(loop.run())


def test_batches_of_dicts_and_of_anything_else() -> None:
    (batch,) = islice(MapLoop(Squares(40), config(shuffle=False)).run(), 1)
    assert batch["__key__"] == [str(i) for i in range(8)]
    assert batch["x"].shape == (8, 3)
    pairs = [(torch.tensor(i), i % 2) for i in range(40)]
    (batch,) = islice(MapLoop(pairs, config(shuffle=False)).run(), 1)
    assert [part.tolist() for part in batch] == [list(range(8)), [0, 1] * 4]
    (batch,) = islice(MapLoop(pairs, config(shuffle=False, collate_fn=len)).run(), 1)
    assert batch == 8
    with pytest.raises(ConfigError, match="__valid__"):
        list(MapLoop(pairs, config(last_batch="pad")).run())


def test_partial_gives_empty_batches_to_ranks_beyond_the_last_samples() -> None:
    loop = MapLoop(Squares(17), config(0, 4, last_batch="partial", shuffle=False))
    *_, last = loop.run()
    assert last["x"].shape == (0, 3)
    assert last["__key__"] == []
    *_, last = MapLoop(list(range(17)), config(0, 4, last_batch="partial", shuffle=False)).run()
    assert last.shape == (0,)


def test_what_is_no_data_set_is_named() -> None:
    for wrong, message in ((3, "got 3"), ("s3://x", "got a str"), (iter([1]), "read only once"), ([], "empty")):
        with pytest.raises(ConfigError, match=message):
            open_ordinary(wrong, config())
    assert isinstance(open_ordinary(lambda: Squares(8), config()), MapLoop)
    assert isinstance(open_ordinary([1] * 8, config()), MapLoop)
    assert isinstance(open_ordinary(lambda: Stream(8), config()), IterableLoop)


# --- iterable ---


def play(make: Any, world_size: int, **options: Any) -> list[list[list[int]]]:
    """Batches of all ranks, one after the other: epoch_size says when they end."""
    ranks = []
    for rank in range(world_size):
        loop = open_ordinary(make(), config(rank, world_size, **options))
        ranks.append([ids(batch) for batch in loop.run()])
        loop.close()
    return ranks


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", first_here([2, 1, 4], 1))
@pytest.mark.parametrize(
    "make", [lambda: Stream(64), lambda: Shuffled(64), lambda: Sharded(64, 8)], ids=["plain", "shuffled", "sharded"]
)
def test_iterables_are_dealt_exactly_once(make: Any, world_size: int, num_workers: int) -> None:
    random.seed(world_size)  # of no consequence
    before, outside = leftovers(), random.getstate()
    ranks = play(make, world_size, num_workers=num_workers, epoch_size=64)
    assert {len(one) for one in ranks} == {8}
    assert Counter(i for one in ranks for batch in one for i in batch) == Counter(range(64))
    assert random.getstate() == outside
    assert leftovers() - before == {}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterables_that_cut_themselves(num_workers: int) -> None:
    ranks = play(lambda: ByWorkerInfo(64), 4, num_workers=num_workers, epoch_size=64, sharding="worker_info")
    assert Counter(i for one in ranks for batch in one for i in batch) == Counter(range(64))
    ranks = play(lambda: ByWorkerInfo(64), 2, num_workers=num_workers, epoch_size=64)  # else it sees no worker
    assert Counter(i for one in ranks for batch in one for i in batch) == Counter(range(64))
    ranks = play(lambda: ByWorkerInfo(64), 1, num_workers=num_workers, epoch_size=64, sharding="self")
    assert Counter(i for one in ranks for batch in one for i in batch) == Counter(range(64))


def test_warnings_are_honest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    IterableLoop(Sharded(64, 8), config(0, 2, epoch_size=64, num_workers=2))
    IterableLoop(Stream(64), config())
    IterableLoop(Stream(64), config(0, 2, epoch_size=64, sharding="self"))
    assert not caplog.records
    IterableLoop(Stream(64), config(0, 2, epoch_size=64, num_workers=2))
    assert "each of 4 parts (ranks times workers) reads all of it" in caplog.text
    caplog.clear()
    IterableLoop(Sharded(64, 6), config(0, 2, epoch_size=64, num_workers=8))
    assert "3 of 8 workers are used" in caplog.text
    assert "reads all" not in caplog.text
    caplog.clear()
    IterableLoop(Sharded(64, 1), config(0, 2, epoch_size=64))
    assert "fewer than 2 shards" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.matrix), 2])
@pytest.mark.parametrize("epoch_size", [None, 24])
@pytest.mark.parametrize("make", first_here([Stateful, Stream, Shuffled, InTwo, lambda size: Sharded(size, 8)], 1))
def test_iterables_resume_to_the_batch(
    make: Any, epoch_size: int | None, num_workers: int, request: pytest.FixtureRequest
) -> None:
    """From every batch; with workers, which start anew each time, from one of each kind."""
    options = {"num_workers": num_workers, "epoch_size": epoch_size, "last_batch": "partial", "seed": 2}
    loop = open_ordinary(make(43), config(**options))
    found, states, first = [], [], [0]
    for _ in range(3):
        for batch in loop.run():
            found.append(ids(batch))
            states.append(json.loads(json.dumps(loop.state().to_dict())))
        first.append(len(found))
        states[-1] = loop.state().to_dict()
    loop.close()
    if epoch_size is None:
        for start, stop in pairwise(first):
            assert Counter(i for batch in found[start:stop] for i in batch) == Counter(range(43))
    else:
        assert first == [0, 3, 6, 9]
    stops = set(range(1, len(found)))
    if num_workers and not request.config.getoption("--matrix"):
        stops &= {2, first[1] - 1, first[1], first[1] + 1, len(found) - 1}
    for stop in sorted(stops):
        other = open_ordinary(make(43), config(**options))
        other.load(IterableState.from_dict(states[stop - 1]))
        rest = [ids(batch) for _ in range(3 - other.epoch) for batch in other.run()]
        other.close()
        assert rest == found[stop:], stop


def test_stateful_iterables_are_not_read_again(caplog: pytest.LogCaptureFixture) -> None:
    loop = IterableLoop(Stateful(40), config())
    list(islice(loop.run(), 2))
    state = loop.state()
    assert state.cursors[0].state == {"at": 16}
    other = Stateful(40)
    again = IterableLoop(other, config())
    again.load(state)
    assert "read again" not in caplog.text
    (batch,) = islice(again.run(), 1)
    assert ids(batch) == list(range(16, 24))
    assert other.at == 32  # one batch ahead, to know the last one
    plain = IterableLoop(Stream(40), config())
    list(islice(plain.run(), 1))
    IterableLoop(Stream(40), config()).load(plain.state())
    assert "read again" in caplog.text


def test_an_epoch_that_is_gone_on_with_in_larger_batches_is_no_longer() -> None:
    loop = IterableLoop(Stream(1000), config(epoch_size=96))
    list(islice(loop.run(), 3))
    again = IterableLoop(Stream(1000), config(epoch_size=96, global_batch_size=16))
    again.load(loop.state())
    assert [i for batch in again.run() for i in ids(batch)] == list(range(24, 88))


def test_seeds_epochs_and_loops_left_early() -> None:
    loop = IterableLoop(Shuffled(40), config(seed=1))
    first = [ids(batch) for batch in loop.run()]
    assert list(islice(loop.run(), 1))
    loop.set_epoch(1)
    second = [ids(batch) for batch in loop.run()]
    assert loop.epoch == 2
    assert second != first
    loop.set_epoch(0)
    assert [ids(batch) for batch in loop.run()] == first
    loop.set_seed(5)
    third = [ids(batch) for batch in loop.run()]
    assert third != second
    loop.set_epoch(0)
    assert [ids(batch) for batch in loop.run()] != first
    with pytest.raises(TypeError, match="epoch_size"):
        _ = loop.num_batches


def test_states_of_other_places_are_refused() -> None:
    loop = IterableLoop(Stream(40), config(0, 2, epoch_size=16))
    list(islice(loop.run(), 1))
    state = loop.state()
    for other, message in (
        (IterableLoop(Stream(40), config(1, 2, epoch_size=16)), "data rank 0 of 2"),
        (IterableLoop(Stream(40), config(0, 2, epoch_size=16, num_workers=2)), "with 1 workers"),
        (IterableLoop(Stream(40), config(0, 2, epoch_size=24)), "epoch_size"),
    ):
        with pytest.raises(StateError, match=message):
            other.load(state)
    with pytest.raises(StateError, match="iterable"):
        IterableState.from_dict(MapLoop(Squares(40), config()).state().to_dict())
    with pytest.raises(StateError):
        LoaderState.from_dict(state.to_dict())
    broken = state.to_dict()
    broken["cursors"] = [{"worker": -1, "pass_number": 0, "num_items": 0, "state": None, "ended": False}]
    with pytest.raises(StateError, match="worker"):
        IterableState.from_dict(broken)


def test_padding_empty_parts_and_ranks_without_an_end() -> None:
    batches = list(open_ordinary(lambda: ({"id": i} for i in range(11)), config(last_batch="pad")).run())
    assert [ids(batch) for batch in batches] == [list(range(8)), [8, 9, 10]]
    assert batches[1]["id"].shape == (8,)
    with pytest.raises(DataError, match="no sample in pass"):
        list(IterableLoop(Stream(1), config(1, 2, epoch_size=64)).run())
    with pytest.raises(ConfigError, match="init_process_group"):
        IterableLoop(Stream(64), config(0, 2))
    with pytest.raises(ConfigError, match="epoch_size"):
        IterableLoop(Stream(64), config(epoch_size=7))
    empty = open_ordinary(lambda: iter(()), config())
    assert [list(empty.run()), list(empty.run()), empty.epoch] == [[], [], 2], "an epoch without a batch is one, too"


def test_a_function_that_makes_a_generator_is_called_for_every_pass() -> None:
    loop = open_ordinary(lambda: (i for i in range(16)), config(num_workers=1))
    assert [[ids(batch) for batch in loop.run()] for _ in range(2)] == [[list(range(8)), list(range(8, 16))]] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_hugging_face_streams(num_workers: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    if num_workers:
        server_imports("datasets")  # which takes each worker a second
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number * 10 + line}\n" for line in range(8 + number % 3)))
    expected = sorted(number * 10 + line for number in range(8) for line in range(8 + number % 3))

    def make() -> Any:
        files = [str(tmp_path / f"{number}.txt") for number in range(8)]
        stream = datasets.IterableDataset.from_generator(_lines, gen_kwargs={"files": files})
        return stream.shuffle(seed=3, buffer_size=1)

    loop = open_ordinary(make(), config(num_workers=num_workers, last_batch="partial", sharding="auto"))
    assert isinstance(loop, IterableLoop)
    found, states = [], []
    for batch in loop.run():
        found.append(ids(batch))
        states.append(json.loads(json.dumps(loop.state().to_dict())))
    loop.close()
    assert sorted(i for batch in found for i in batch) == expected
    assert all(cursor["state"] for cursor in states[3]["cursors"])
    other = open_ordinary(make(), config(num_workers=num_workers, last_batch="partial"))
    other.load(IterableState.from_dict(states[3]))
    assert [ids(batch) for batch in other.run()] == found[4:]
    other.close()
    if num_workers == 0:
        ranks = [open_ordinary(make(), config(rank, 2, epoch_size=8 * 5)) for rank in range(2)]
        got = [[i for batch in one.run() for i in ids(batch)] for one in ranks]
        assert not set(got[0]) & set(got[1])


def _lines(files: list[str]) -> Iterator[dict[str, int]]:
    for file in files:
        for line in Path(file).read_text().splitlines():
            yield {"id": int(line)}


def test_data_pipes_with_a_sharding_filter() -> None:
    pipes = pytest.importorskip("torch.utils.data.datapipes.iter")

    def make() -> Any:
        return pipes.IterableWrapper(range(64)).shuffle().sharding_filter()

    ranks = play(make, 2, num_workers=2, epoch_size=64)
    flat = [i for one in ranks for batch in one for i in batch]
    assert Counter(flat) == Counter(range(64))
    assert flat != sorted(flat)


# --- real processes ---


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_with_uneven_data_end_together(tmp_path: Path, forked: Forked, num_workers: int) -> None:
    """Two processes over gloo; rank 1 has a third of the samples of rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    arguments, output = (str(tmp_path), str(num_workers)), tmp_path / "said"
    started = forked.start_ranks(PROGRAMS / "ordinary_rank.py", *arguments, world_size=2, output=output, environ=place)
    assert all_end(started, 150) == [0, 0], output.read_text()[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name in ("drop", "pad"):
        assert {tuple(map(len, one[name])) for one in ranks} == {tuple(map(len, ranks[0][name]))}
    assert len(ranks[0]["drop"][0]) == (5 if num_workers == 0 else 4)  # of 60 samples and of 20, in fours
    assert len(ranks[0]["pad"][0]) == (15 if num_workers == 0 else 16)
    for one in ranks:  # also where it is resumed when a rank has nothing of its own any more
        assert one["resumed"] == one["pad"][0]
    for epoch in range(2):  # under "pad" nothing is lost and nothing twice: evaluation is exact
        kept = Counter(i for one in ranks for batch in one["pad"][epoch] for i in batch)
        assert kept == Counter([*range(60), *range(100, 120)])
    assert ranks[0]["discarded"] > 0
    assert ranks[0]["leftovers"] == ranks[1]["leftovers"] == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "method"),
    [
        (Squares, "fork"),
        pytest.param(Stream, "forkserver", marks=pytest.mark.thorough),
        pytest.param(Squares, "forkserver", marks=pytest.mark.matrix),
        pytest.param(Stream, "fork", marks=pytest.mark.matrix),
    ],
)
def test_workers_start_either_way(make: Any, method: str) -> None:
    loop = open_ordinary(make(40), config(num_workers=1, multiprocessing_context=method, epoch_size=40))
    assert sorted(i for batch in loop.run() for i in ids(batch)) == list(range(40))
    loop.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_workers", -1), ("prefetch_factor", 0), ("seed", -1), ("sharding", "other"), ("shuffle", 1),
     ("pin_memory", 1), ("collate_fn", 3), ("epoch_size", 0), ("multiprocessing_context", "thread")],
)  # fmt: skip
def test_wrong_choices_are_named(option: str, value: Any) -> None:
    wrong: dict[str, Any] = {option: value}
    is_own, data = option in option_names(OrdinaryDataset), Squares(8) if option == "shuffle" else Stream(8)
    with pytest.raises(ConfigError, match=f"^{option}: expected"):
        DataLoader(OrdinaryDataset(data, **wrong if is_own else {}), 4, **{} if is_own else wrong)


def test_an_error_in_the_data_set_stops_workers() -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[int]:
            yield from range(10)
            raise OSError("the disk is gone")

    before = leftovers()
    loop = IterableLoop(Broken(0), config(num_workers=1))
    with pytest.raises(OSError, match="the disk is gone"):
        list(loop.run())
    assert leftovers() - before == {}
