"""``get_worker_info()``: functions of users see their own data set in workers, as under torch's loader.

torch's own loader is the reference: the same set and functions run under both.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from csv import reader
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    IterDataPipe,
    SequentialSampler,
    Subset,
    get_worker_info,
)
from torch.utils.data.graph_settings import apply_sharding

from infra import DeviceMesh
from streaming import Broadcast, DataLoader, DeviceMeshSampler, OrdinaryDataset, RetrySampler
from streaming.errors import ConfigError, DataError
from tests.support.processes.leftovers import leftovers
from tests.support.processes.played_ranks import played
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

SIZE = 24
Look = tuple[Any, ...] | None


def look(own: object) -> Look:
    """What a function of the user sees: its worker, and whether the data set there is ``own``."""
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers, info.dataset is own)


class Mapped(Dataset[Any]):
    """Rows are what its methods see, and what ``worker_init_fn`` has set."""

    start, end = 0, SIZE
    begun: Any = None
    outer: Any = None

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, index: int) -> Any:
        return self.start + index, look(self if self.outer is None else self.outer), self.begun


class Iterated(IterableDataset[Any]):
    """The same."""

    begun: Any = None
    outer: Any = None

    def __init__(self, start: int = 0, end: int = SIZE) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.start, self.end):
            yield number, look(self if self.outer is None else self.outer), self.begun


class ByShards(Iterated):
    """Cuts itself where it is asked to."""

    def shard(self, num_shards: int, index: int) -> ByShards:
        made = copy.copy(self)
        size = self.end - self.start
        made.start, made.end = self.start + size * index // num_shards, self.start + size * (index + 1) // num_shards
        made.outer = self
        return made


class Piped(IterDataPipe[Any]):
    """A source of DataPipes."""

    begun: Any = None
    outer: Any = None

    def __iter__(self) -> Iterator[Any]:
        yield from Iterated.__iter__(self)  # type: ignore[arg-type]

    start, end = 0, SIZE


class Itself(Iterated):
    """Its own iterator, which begins anew in ``__iter__``."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at = self.start
        return self

    def __next__(self) -> Any:
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        return self.at - 1, look(self if self.outer is None else self.outer), self.begun


def subset() -> Any:
    return Subset(Mapped(), range(SIZE))


def concat() -> Any:
    return ConcatDataset([Mapped()])


def chain() -> Any:
    return ChainDataset([Iterated(0, SIZE // 2), Iterated(SIZE // 2)])


def pipes() -> Any:
    return Piped().sharding_filter()


MAPS: dict[str, Callable[[], Any]] = {"map": Mapped, "subset": subset, "concat": concat}
ITERABLES: dict[str, Callable[[], Any]] = {
    "iterable": Iterated, "shards": ByShards, "chain": chain, "pipes": pipes, "itself": Itself,
}  # fmt: skip


def leaves(dataset: Any) -> list[Any]:
    """The data sets inside that make rows."""
    if isinstance(dataset, (Subset, ChainDataset, ConcatDataset)) or hasattr(dataset, "source_datapipe"):
        inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None) or dataset.source_datapipe]
        return [leaf for each in inner for leaf in leaves(each)]
    return [dataset]


def set_up(number: int) -> None:
    """torch's documented pattern: set attributes of this worker's data set."""
    info = get_worker_info()
    assert info is not None
    assert number == info.id
    assert info.seed == torch.initial_seed()
    for leaf in leaves(info.dataset):
        leaf.outer, leaf.begun = info.dataset, (info.id, info.num_workers, type(info.dataset).__name__)


def gathered(samples: list[Any]) -> list[Any]:
    """Rows, each with what the function that collates sees: the set that was set up in this process, or none."""
    info = get_worker_info()
    seen = None if info is None else (info.id, info.num_workers, leaves(info.dataset)[0].begun)
    return [(*sample, seen) for sample in samples]


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def flat(batches: Any) -> list[Any]:
    return [row for batch in batches for row in batch]


def numbers(rows: Sequence[Any]) -> list[int]:
    return sorted(row[0] for row in rows)


def mesh(rank: int = 0, ranks: int = 1) -> DeviceMesh:
    return DeviceMesh.from_sizes(dp_size=ranks, rank=rank, world_size=ranks)


def under_torch(dataset: Any, num_workers: int, init: Any, collate: Any = gathered) -> list[Any]:
    loader = torch.utils.data.DataLoader(
        dataset, 4, num_workers=num_workers, worker_init_fn=init, collate_fn=collate, multiprocessing_context=None
    )
    return flat(loader)


def ours(dataset: Any, num_workers: int, init: Any, collate: Any = gathered, **options: Any) -> DataLoader:
    own = {name: options.pop(name) for name in ("sharding", "multiprocessing_context") if name in options}
    options = {"device_mesh": mesh(), "last_batch": "partial", **options}
    chosen = OrdinaryDataset(dataset, worker_init_fn=init if num_workers else None, **own)
    return DataLoader(chosen, options.pop("batch_size", 4), num_workers=num_workers, collate_fn=collate, **options)


def under_ours(dataset: Any, num_workers: int, init: Any, collate: Any = gathered, **options: Any) -> list[Any]:
    before = leftovers()
    with ours(dataset, num_workers, init, collate, **options) as loader:
        rows = flat(loader)
    assert leftovers() - before == {}
    return rows


def seen(rows: list[Any]) -> tuple[set[Any], ...]:
    """What is seen in methods, in ``worker_init_fn``, and where batches are collated."""
    _, method, begun, collate = zip(*rows, strict=True)
    return set(method), set(begun), set(collate)


def workers(count: int, kind: str) -> tuple[set[Any], ...]:
    """What torch's documentation promises."""
    begun = {(number, count, kind) for number in range(count)}
    return {(*one[:2], True) for one in begun}, begun, {(*one[:2], one) for one in begun}


# --- the table: kind of set, sharding, workers, and where one looks ---


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", first_here(MAPS, 1))
def test_map_style_sets_are_seen_as_under_torch(kind: str, num_workers: int) -> None:
    reference = under_torch(MAPS[kind](), num_workers, set_up if num_workers else None)
    rows = under_ours(MAPS[kind](), num_workers, set_up, shuffle=False)
    assert seen(rows) == seen(reference)
    assert numbers(rows) == numbers(reference) == list(range(SIZE))
    if num_workers:
        assert seen(rows) == workers(2, type(MAPS[kind]()).__name__)
    else:
        assert seen(rows) == ({None}, {None}, {None})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sharding", ["auto", "worker_info", "self", "dispatch"])
@pytest.mark.parametrize("kind", first_here(ITERABLES, 1))
def test_iterable_sets_are_seen_as_under_torch(kind: str, sharding: str, num_workers: int) -> None:
    make = ITERABLES[kind]
    count = min(1, num_workers) if sharding == "dispatch" else num_workers
    rows = under_ours(make(), num_workers, set_up, sharding=sharding)
    if not num_workers:
        assert seen(rows) == ({None}, {None}, {None})
    else:
        method, begun, collate = workers(count, type(make()).__name__)
        hidden = sharding in {"auto", "dispatch"}  # a set that divides itself would be divided twice
        assert seen(rows) == ({None} if hidden else method, begun, collate)
    divides = sharding in {"auto", "dispatch"} or kind == "pipes"  # these sets divide nothing by themselves
    assert numbers(rows) == sorted([*range(SIZE)] * (1 if divides else max(1, count)))
    if kind != "pipes" and sharding == "self":  # torch shows a wrapper of its own around pipes, and divides them
        reference = under_torch(make(), num_workers, set_up if num_workers else None)
        assert seen(rows) == seen(reference)
        assert numbers(rows) == numbers(reference)


@pytest.mark.parametrize("method", first_here(["fork", "spawn"], 1))
@pytest.mark.parametrize(("kind", "sharding"), [("map", None), ("iterable", "self")])
def test_so_they_are_where_workers_start_otherwise(kind: str, sharding: str | None, method: str) -> None:
    make = {**MAPS, **ITERABLES}[kind]
    rows = under_ours(make(), 2, set_up, sharding=sharding, multiprocessing_context=method)
    assert seen(rows) == workers(2, type(make()).__name__)


class Begins(Mapped):
    """Sets itself up: its method is the ``worker_init_fn``."""

    def begin(self, number: int) -> None:
        assert get_worker_info().dataset is self  # type: ignore[union-attr]
        self.begun = (number, 2, "Begins")


class BeginsStream(Iterated):
    begin = Begins.begin


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", [Begins, BeginsStream])
def test_a_method_of_the_set_is_a_function_to_begin_with(kind: Any, method: str | None) -> None:
    dataset = kind()
    sharding = "self" if kind is BeginsStream else None
    rows = under_ours(dataset, 2, dataset.begin, sharding=sharding, multiprocessing_context=method)
    assert seen(rows)[1] == {(number, 2, "Begins") for number in range(2)}
    assert dataset.begun is None


def test_the_worker_that_reads_for_all_ranks_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(here: DeviceMesh) -> list[Any]:
        options = {"sharding": "dispatch", "device_mesh": here, "replicate": Broadcast(timeout_s=60)}
        with ours(Iterated(), 1, set_up, gathered, **options) as loader:
            return flat(loader)

    ranks = played(monkeypatch)(run, dp_size=2)
    _, begun, collate = workers(1, "Iterated")
    assert [seen(rows) for rows in ranks] == [({None}, begun, collate)] * 2
    assert numbers(flat(ranks)) == list(range(SIZE))


def test_kept_workers_keep_their_set() -> None:
    with ours(Mapped(), 2, set_up) as loader:
        for _ in range(3):
            assert seen(flat(loader)) == workers(2, "Mapped")


@pytest.mark.parametrize("epoch_size", [None, 16])
def test_workers_of_streams_see_it_in_every_epoch(epoch_size: int | None) -> None:
    with ours(Iterated(), 2, set_up, sharding="self", epoch_size=epoch_size) as loader:
        for _ in range(3):
            assert seen(flat(loader)) == workers(2, "Iterated")


@pytest.mark.thorough
def test_a_function_that_makes_sets_or_iterators() -> None:
    for kind in (Mapped, Iterated):
        assert seen(under_ours(lambda kind=kind: kind(), 2, set_up, sharding=None if kind is Mapped else "self")) == (
            workers(2, kind.__name__)
        )
    rows = under_ours(OfFunction(), 2, OfFunction.begin, as_they_are, sharding="self")
    assert Counter(rows) == Counter({(0, 7): 1, (1, 7): 1}), "what is set on the function is seen where it is called"


class OfFunction:
    """A function, with attributes, that makes iterators."""

    number, seen = 0, 0

    def __call__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.number, self.seen)])

    @staticmethod
    def begin(number: int) -> None:
        made_by = get_worker_info().dataset  # type: ignore[union-attr]
        assert isinstance(made_by, OfFunction)
        made_by.number, made_by.seen = number, 7


@pytest.mark.parametrize("make", [*MAPS.values(), *ITERABLES.values()])
def test_the_set_of_a_loader_is_the_users(make: Callable[[], Any]) -> None:
    dataset = make()
    with ours(dataset, 0, None) as loader:
        assert loader.dataset is dataset


# --- the three recipes of torch's documentation ---


class Range(IterableDataset[int]):
    """``MyIterableDataset`` of torch's documentation, and as one that asks for its worker in ``__iter__``."""

    def __init__(self, start: int, end: int, *, asks: bool = False) -> None:
        self.start, self.end, self.asks = start, end, asks

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None or not self.asks:
            return iter(range(self.start, self.end))
        per_worker = math.ceil((self.end - self.start) / info.num_workers)
        start = self.start + info.id * per_worker
        return iter(range(start, min(start + per_worker, self.end)))


class RangeItself(Range):
    """Its own iterator."""

    def __iter__(self) -> Iterator[int]:
        self.rest = super().__iter__()
        return self

    def __next__(self) -> int:
        return next(self.rest)


def divide(number: int) -> None:
    """``worker_init_fn`` of torch's documentation."""
    info: Any = get_worker_info()
    dataset = info.dataset
    overall_start, overall_end = dataset.start, dataset.end
    per_worker = math.ceil((overall_end - overall_start) / float(info.num_workers))
    dataset.start = overall_start + number * per_worker
    dataset.end = min(dataset.start + per_worker, overall_end)


def divide_inside(number: int) -> None:
    """The same, of the first set of a chain."""
    info: Any = get_worker_info()
    first = info.dataset.datasets[0]
    first.start, first.end = first.start + number, first.start + number + 1


class Files(IterableDataset[str]):
    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[str]:
        yield from self.files


def divide_in_place(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.files[:] = info.dataset.files[number :: info.num_workers]


def rows_of(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch]


@pytest.mark.parametrize("kind", first_here([Range, RangeItself], 1))
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranges_per_worker(kind: type[Range], ranks: int, num_workers: int) -> None:
    reference = sorted(rows_of(torch.utils.data.DataLoader(kind(3, 27), 4, num_workers=num_workers,
                                                           worker_init_fn=divide)))  # fmt: skip
    found: list[int] = []
    for rank in range(ranks):
        with ours(kind(3, 27), num_workers, divide, None, sharding="worker_info", device_mesh=mesh(rank, ranks),
                  batch_size=2, epoch_size=24) as loader:  # fmt: skip
            found += rows_of(loader)
    assert sorted(found) == reference == list(range(3, 27))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", first_here([Range, RangeItself], 1))
@pytest.mark.parametrize("sharding", first_here(["worker_info", "self"], 1))
@pytest.mark.parametrize("way", ["worker_init_fn", "__iter__"])
def test_ranges_per_worker_are_resumed_where_they_were(kind: type[Range], sharding: str, way: str) -> None:
    """The worker that delivers next comes first: it must not get the range of another."""

    def made() -> DataLoader:
        init = divide if way == "worker_init_fn" else None
        return ours(kind(0, 20, asks=init is None), 2, init, None, sharding=sharding)

    with made() as loader:
        batches, states = [], []
        for batch in loader:
            batches.append(batch.tolist())
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert sorted(flat(batches)) == list(range(20))
    for stop in (1, 2, 3):
        with made() as loader:
            loader.load_state_dict(states[stop - 1])
            assert [batch.tolist() for batch in loader] == batches[stop:]


@pytest.mark.parametrize(
    ("dataset", "init", "names"),
    [(Range(0, 20), divide, "end(, start)?"), (ChainDataset([Range(0, 9)]), divide_inside, "end(, start)?"),
     (Files(["a", "b", "c"]), divide_in_place, "files"), (ByShards(), set_up, "begun, outer"),
     (OfFunction(), OfFunction.begin, "(number, )?seen")],
)  # fmt: skip
def test_what_would_be_divided_twice_is_refused(dataset: Any, init: Any, names: str) -> None:
    """By ``worker_init_fn`` and by us. Samples would be lost in silence."""
    with pytest.raises(ConfigError, match=f"worker_init_fn sets {names} of an iterable") as caught:
        under_ours(dataset, 2, init, as_they_are)
    assert 'sharding="worker_info"' in str(caught.value)


def reads(number: int) -> None:
    info: Any = get_worker_info()
    random.seed(info.seed + number)
    assert info.dataset.start == 0


def test_pipes_that_are_divided_as_formerly() -> None:
    """By what torch's loader does by itself today, and we do."""

    def apply(number: int) -> None:
        info: Any = get_worker_info()
        apply_sharding(info.dataset, info.num_workers, number)

    assert numbers(under_ours(pipes(), 2, apply, as_they_are)) == list(range(SIZE))


@pytest.mark.parametrize(
    ("num_workers", "init", "sharding"), [(2, reads, None), (1, divide, None), (2, set_up, "auto")]
)
def test_what_is_divided_once_is_not(num_workers: int, init: Any, sharding: str | None) -> None:
    assert sorted(under_ours(Range(0, 20), num_workers, init, as_they_are, sharding=sharding)) == list(range(20))


class Lines(Dataset[str]):
    """A file that each worker opens for itself."""

    file: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, str]:
        self.file.seek(3 * index)
        return os.getpid(), self.file.read(2)


class LinesOnce(IterableDataset[Any]):
    file: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        self.file.seek(0)
        for line in self.file:
            yield os.getpid(), line.strip()


def open_file(number: int) -> None:
    dataset = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.file = open(dataset.path)  # type: ignore[attr-defined]  # noqa: SIM115  until the worker ends


@pytest.mark.thorough
@pytest.mark.parametrize("sharding", ["map", "auto", "dispatch"])
def test_a_file_per_worker(tmp_path: Path, sharding: str) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number:02}\n" for number in range(SIZE)))
    lines = sorted(f"{number:02}" for number in range(SIZE))
    if sharding == "map":
        dataset: Any = Lines(path)
        assert sorted(line for _, line in under_torch(dataset, 2, open_file, as_they_are)) == lines
        rows = under_ours(dataset, 2, open_file, as_they_are)
    else:
        dataset = LinesOnce(path)
        rows = under_ours(dataset, 2, open_file, as_they_are, sharding=sharding)
    assert sorted(line for _, line in rows) == lines
    assert len({pid for pid, _ in rows} - {os.getpid()}) == (1 if sharding == "dispatch" else 2)
    assert dataset.file is None


class Draws(Dataset[Any]):
    rng: Any = None
    seed: Any = None

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        return index, info.id, self.seed, int(self.rng.integers(1 << 60))


def seed_worker(number: int) -> None:
    info: Any = get_worker_info()
    assert info.seed == torch.initial_seed()
    info.dataset.seed, info.dataset.rng = info.seed - number, np.random.default_rng(info.seed)


@pytest.mark.thorough
def test_a_generator_per_worker() -> None:
    for rows in (
        under_torch(Draws(), 2, seed_worker, as_they_are),
        under_ours(Draws(), 2, seed_worker, as_they_are, shuffle=False),
    ):
        assert [row[0] for row in rows] == list(range(SIZE))
        assert {row[1] for row in rows} == {0, 1}
        assert len({row[2] for row in rows}) == 1, "a base seed, and the worker's number"
        assert len({row[3] for row in rows}) == SIZE


# --- RetrySampler under torch's loader ---


class Own(Mapped):
    def extra(self) -> str:
        return "method"


def set_up_own(number: int) -> None:
    dataset = get_worker_info().dataset  # type: ignore[union-attr]
    assert isinstance(dataset, Own)
    assert isinstance(dataset, Mapped)
    dataset.begun = (number, type(dataset.extra()).__name__)


@pytest.mark.parametrize("method", [None, pytest.param("spawn", marks=pytest.mark.thorough)])
def test_a_sampler_that_retries_stands_for_the_set(method: str | None) -> None:
    dataset = Own()
    sampler = RetrySampler(DeviceMeshSampler(dataset, 4, device_mesh=mesh(), shuffle=False), dataset)
    loader = torch.utils.data.DataLoader(
        sampler.dataset, batch_sampler=sampler, num_workers=2, worker_init_fn=set_up_own, collate_fn=as_they_are,
        multiprocessing_context=method,
    )  # fmt: skip
    rows = flat(sampler.follow(loader))
    assert [row[0] for row in rows] == list(range(SIZE))
    assert {row[2] for row in rows} == {(number, "str") for number in range(2)}
    assert dataset.begun is None
    sampler.close()


def test_attributes_go_through_it() -> None:
    dataset: Any = Subset(Own(), range(3))
    stand: Any = RetrySampler(SequentialSampler(dataset), dataset).dataset
    assert isinstance(stand, Subset)
    assert isinstance(stand, Dataset)
    assert stand.dataset is dataset.dataset
    stand.added = 5
    assert dataset.added == 5
    assert vars(stand) is vars(dataset)
    del stand.added
    assert not hasattr(dataset, "added")
    assert (len(stand), stand[1][0], repr(stand)) == (3, 1, repr(dataset))
    with pytest.raises(AttributeError, match="Subset"):
        _ = stand.nothing
    for other in (pickle.loads(pickle.dumps(stand)), copy.deepcopy(stand)):
        other.indices = [2]
        assert (len(other), other[0][0], len(stand)) == (1, 2, 3)
    shallow = copy.copy(stand)
    shallow.indices = [0]
    assert len(dataset) == 1


def test_a_list_has_no_attributes_to_set() -> None:
    stand: Any = RetrySampler([0, 1], [5, 6]).dataset
    with pytest.raises(AttributeError):
        stand.start = 3
    assert list(stand) == [5, 6]
    assert isinstance(stand, list)


@pytest.mark.parametrize("dataset", [Mapped(), [1, 2, 3]])
@pytest.mark.parametrize("sampler", [SequentialSampler(Mapped()), DeviceMeshSampler(3, 1, device_mesh=mesh())])
def test_swapped_arguments_are_named(dataset: Any, sampler: Any) -> None:
    with pytest.raises(ConfigError, match=r"the sampler first: write RetrySampler\(sampler, dataset\), not Retry"):
        RetrySampler(dataset, sampler)


def test_a_sampler_that_yields_no_indices_is_named() -> None:
    sampler = RetrySampler([{"row": 1}, {"row": 2}], [0, 1])
    with pytest.raises(
        ConfigError, match=r"sampler: expected one that yields indices .* got a dict; RetrySampler\(sam"
    ):
        list(sampler)


def test_what_has_no_rows_by_number_is_no_set_to_retry() -> None:
    with pytest.raises(ConfigError, match="the sampler first"):
        RetrySampler(Mapped(), [0, 1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dataset: expected a map-style data set .* got a Iterated"):
        RetrySampler(SequentialSampler(Mapped()), Iterated())  # type: ignore[arg-type]


# --- sets that are their own iterators ---


class Cursor:
    """An iterator of Python that is read once."""

    def __init__(self, size: int) -> None:
        self.rows = iter(range(size))

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> int:
        return next(self.rows)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("epoch_size", [None, 16])
def test_an_iterator_that_begins_anew_is_read_anew(num_workers: int, epoch_size: int | None) -> None:
    with ours(RangeItself(0, 16), num_workers, None, None, epoch_size=epoch_size) as loader:
        epochs, states = [], []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch.tolist())
                states.append(loader.state_dict())
    assert [sorted(flat(epoch)) for epoch in epochs] == [list(range(16))] * 2
    for stop in (1, 3, 5):
        with ours(RangeItself(0, 16), num_workers, None, None, epoch_size=epoch_size) as loader:
            loader.load_state_dict(states[stop - 1])
            rest = [batch.tolist() for _ in range(2 - loader.epoch) for batch in loader]
            assert rest == (epochs[0] + epochs[1])[stop:]


class Stateful(RangeItself):
    """Says where it is, and forgets it where it begins."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_with_a_state_goes_on(num_workers: int) -> None:
    with ours(Stateful(0, 16), num_workers, None, None) as loader:
        first = [batch.tolist() for batch in islice(loader, 2)]
        state = loader.state_dict()
    with ours(Stateful(0, 16), num_workers, None, None) as loader:
        loader.load_state_dict(state)
        assert sorted(flat(first) + rows_of(loader)) == list(range(16))


@pytest.mark.parametrize("epoch_size", [None, 16])
def test_an_iterator_that_does_not_is_named_at_its_second_pass(epoch_size: int | None) -> None:
    with ours(Cursor(20), 0, None, None, epoch_size=epoch_size) as loader:
        assert rows_of(loader) == list(range(epoch_size or 20))
        with pytest.raises(DataError, match=r"Cursor: this iterator has been read to its end.* give the function tha"):
            rows_of(loader)


@pytest.mark.parametrize(
    "once",
    [(number for number in range(4)), iter([1]), map(int, "12"), reader(["1,2"])],
    ids=lambda one: type(one).__name__,
)
def test_what_can_be_read_only_once_is_refused(once: Any) -> None:
    with pytest.raises(ConfigError, match=r"read only once; give the function that makes it, which is called for"):
        DataLoader(once, 2, device_mesh=mesh())


def test_it_runs_inside_a_worker_of_another_loader() -> None:
    """Where ``get_worker_info`` is that of the other."""
    rows = list(torch.utils.data.DataLoader(Nested(), None, num_workers=2))
    assert rows == [list(range(8))] * 2


class Nested(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield sorted(rows_of(ours(Range(0, 8, asks=True), 0, None, None, sharding="worker_info")))
