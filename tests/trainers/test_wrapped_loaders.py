"""``as_torch`` and ``one_behind``: in programs that ask for torch's class, or fetch the next batch before they save."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState

import streaming
from streaming import (
    DataLoader,
    DeviceMeshFetcher,
    DeviceMeshSampler,
    DevicePrefetcher,
    Mixture,
    Packed,
    RetrySampler,
    StreamingDataset,
    Tickets,
    as_torch,
    one_behind,
)
from streaming.errors import ConfigError, IteratorSupersededError
from streaming.integrations.accelerate import prepare_loader
from tests.support.contracts.loop_kinds import ALONE, Passes, Squares, rows_of
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.sets.packed_sets import write as write_documents
from tests.support.tiers import first_here

SIZE, NUM_BATCHES, EPOCHS = 10, 4, 3
OPTIONS: dict[str, Any] = {"global_batch_size": SIZE, "device_mesh": ALONE}
LOADERS = (
    "DataLoader", "micro-batches, prefetcher", "iterable", "fetcher", "prefetcher", "packs", "micro-batches", "tuples",
    "map-style", "mixture", "workers", "prefetcher, workers",
)  # fmt: skip


class Loaders:
    """By name: a function that makes a loader."""

    def __init__(self, folder: Path) -> None:
        self.samples: SampleSet = write_set(folder / "train", (9, 20, 11))
        write_documents(folder / "documents", num_docs=60)
        self._documents = str(folder / "documents")

    def make(self, kind: str) -> Any:
        def own(**more: Any) -> DataLoader:
            return DataLoader(self.samples.open(seed=5, fields=("cls",)), **OPTIONS | {"num_threads": 0} | more)

        halves = {"low": self.samples.open(subset=(0, 19)), "high": self.samples.open(subset=(19, 40))}
        makers: dict[str, Callable[[], Any]] = {
            "DataLoader": own,
            "workers": lambda: own(num_workers=1, num_threads=None),
            "tuples": lambda: own(as_tuple=("cls", "__key__")),
            "fetcher": lambda: DeviceMeshFetcher(self.samples.open(seed=5), **OPTIONS),
            "prefetcher": lambda: DevicePrefetcher(own(), "cpu", depth=2),
            "prefetcher, workers": lambda: DevicePrefetcher(own(num_workers=1, num_threads=None), "cpu", depth=3),
            "micro-batches": lambda: own(micro_batch_size=4),
            "micro-batches, prefetcher": lambda: DevicePrefetcher(own(micro_batch_size=4), "cpu"),
            "map-style": lambda: DataLoader(Squares(), **OPTIONS | {"last_batch": "partial"}),
            "iterable": lambda: DataLoader(Passes(), **OPTIONS),
            "packs": lambda: DataLoader(Packed(StreamingDataset(self._documents), 64), **OPTIONS | {
                "global_batch_size": 2}),
            "mixture": lambda: DataLoader(Mixture(halves, weights={"low": 1, "high": 2}), **OPTIONS),
        }  # fmt: skip
        return makers[kind]()

    def truth(self, kind: str, number: int) -> list[tuple[int, ...]]:
        """The rows of the first batches, epoch after epoch."""
        return rows_behind(self.make(kind), number)


def rows(batch: Any) -> tuple[Any, ...]:
    return tuple(batch[0].tolist()) if isinstance(batch, tuple) else rows_of(batch)


def rows_behind(loader: Any, number: int) -> list[tuple[int, ...]]:
    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    return [rows(batch) for batch in islice(forever(), number)]


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> Loaders:
    return Loaders(tmp_path_factory.mktemp("wrapped"))


pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate keeps one state per process."""
    PartialState(cpu=True)
    yield
    for state in (PartialState, AcceleratorState, GradientState):
        state._reset_state()


# ------------------------------------------------------------------------------------------------------- as_torch


def as_timm(loader: Any, number: int) -> list[Any]:
    """Counts epochs itself, and tells the sampler."""
    found: list[Any] = []
    while True:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(loader.epoch)
        for batch in loader:
            found.append(rows(batch))
            if len(found) == number:
                return found


class FabricLike:
    """Copies the attributes, and gives the sampler the number of its own iterations, as Fabric's wrapper does."""

    def __init__(self, loader: Any) -> None:
        self.__dict__.update(loader.__dict__)
        self._dataloader, self._num_iter_calls = loader, 0

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        for sampler in (self._dataloader.sampler, getattr(self._dataloader.batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(self._num_iter_calls)
        self._num_iter_calls += 1
        yield from iter(self._dataloader)


def as_fabric(loader: Any, number: int) -> list[Any]:
    return rows_behind(FabricLike(loader), number)


def as_lightning(loader: Any, number: int) -> list[Any]:
    """Makes an iterator that nobody asks, then the one that is used, then tells the epoch."""
    found: list[Any] = []
    while True:
        iter(loader)
        batches = iter(loader)
        loader.sampler.set_epoch(loader.epoch)
        for batch in batches:
            found.append(rows(batch))
            if len(found) == number:
                return found


def as_accelerate(loader: Any, number: int) -> list[Any]:
    """Prepares the loader beside the model."""
    accelerator = Accelerator(cpu=True)
    prepared = as_torch(prepare_loader(accelerator, loader))
    _, given = accelerator.prepare(torch.nn.Linear(1, 1), prepared)
    assert given is prepared
    return rows_behind(given, number)


ASKING: dict[str, Callable[[Any, int], list[Any]]] = {
    "timm": as_timm, "Fabric": as_fabric, "Lightning": as_lightning, "plain": rows_behind,
}  # fmt: skip


@pytest.mark.parametrize("kind", first_here(LOADERS, 5))
def test_programs_that_ask_get_torchs_class_with_the_loaders_rows_and_position(loaders: Loaders, kind: str) -> None:
    whole = loaders.truth(kind, 9)
    for name, program in ASKING.items():
        loader = loaders.make(kind)
        wrapped = as_torch(loader)
        assert isinstance(wrapped, torch.utils.data.DataLoader), name
        assert program(wrapped, 6) == whole[:6], name
        state = json.loads(json.dumps(wrapped.state_dict()))
        assert state == loader.state_dict()
        loader.close()
        again = as_torch(loaders.make(kind))
        again.load_state_dict(state)
        assert program(again, 3) == whole[6:], name
        again.close()


@pytest.mark.parametrize("kind", ["DataLoader", "workers", "prefetcher", "micro-batches", "map-style"])
def test_accelerate_leaves_a_prepared_loader_of_torchs_class_alone(loaders: Loaders, kind: str) -> None:
    assert as_accelerate(loaders.make(kind), 6) == loaders.truth(kind, 6)
    assert as_accelerate(as_torch(loaders.make(kind)), 6) == loaders.truth(kind, 6)


@pytest.mark.parametrize("kind", LOADERS)
def test_attributes_are_those_of_the_loader_and_its_dataset(loaders: Loaders, kind: str) -> None:
    loader = loaders.make(kind)
    wrapped = as_torch(loader)
    below = loader.loader if isinstance(loader, DevicePrefetcher) else loader
    names = ("batch_size", "global_batch_size", "drop_last", "num_workers", "prefetch_factor", "pin_memory", "epoch")
    for name in names:
        if hasattr(loader, name):
            assert getattr(wrapped, name) == getattr(loader, name), name
    try:
        length = len(loader)
    except TypeError:
        with pytest.raises(TypeError):
            len(wrapped)
    else:
        assert len(wrapped) == len(wrapped.sampler) == length
    if hasattr(below.dataset, "__len__") and kind != "mixture":
        assert len(wrapped.dataset) == len(below.dataset)
    if hasattr(below.dataset, "urls"):
        assert wrapped.dataset.urls == below.dataset.urls
    if kind == "DataLoader":
        assert wrapped.dataset[3]["__key__"] == below.dataset[3]["__key__"]
    assert vars(FabricLike(wrapped))["batch_size"] == wrapped.batch_size
    assert "as_torch(" in repr(wrapped)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("wrap", [as_torch, one_behind, lambda loader: as_torch(one_behind(loader))])
def test_copies_of_wrapped_loaders_read_what_they_would(
    loaders: Loaders, wrap: Callable[[Any], Any], how: Callable[[Any], Any]
) -> None:
    whole = loaders.truth("DataLoader", 4)
    wrapped = wrap(loaders.make("DataLoader"))
    copied = how(wrapped)
    assert rows_behind(copied, 4) == whole
    assert copied.sampler.set_epoch(2) is None
    assert copied.epoch == 2


def test_a_program_that_takes_it_apart_is_refused(loaders: Loaders) -> None:
    for kind in ("DataLoader", "map-style", "fetcher", "prefetcher"):
        wrapped = as_torch(loaders.make(kind))
        for apart in (
            torch.utils.data.DataLoader(wrapped.dataset, batch_size=None),
            prepare_data_loader(wrapped, num_processes=2, process_index=1),
            prepare_data_loader(wrapped, put_on_device=True),
        ):
            with pytest.raises(ConfigError, match=r"takes the loader apart.*as_torch\(prepare_loader\(accelerator"):
                next(iter(apart))
        with pytest.raises(ConfigError, match="gives no indices"):
            next(iter(wrapped.sampler))
        with pytest.raises(ConfigError, match="would be split again"):
            DataLoader(wrapped, 4)


def test_an_epoch_told_by_a_program_that_counts_from_the_state_is_obeyed(
    loaders: Loaders, caplog: pytest.LogCaptureFixture
) -> None:
    """Fabric counts its own iterations; timm counts epochs. Both are right, also without a state."""
    whole = loaders.truth("DataLoader", 5 * NUM_BATCHES)
    wrapped = as_torch(loaders.make("DataLoader"))
    wrapped.sampler.set_epoch(3)  # timm resumes so, without a state
    assert rows_behind(wrapped, 2 * NUM_BATCHES) == whole[3 * NUM_BATCHES :]
    wrapped.sampler.set_epoch(1)
    assert rows_behind(wrapped, NUM_BATCHES) == whole[NUM_BATCHES : 2 * NUM_BATCHES]
    loader = loaders.make("DataLoader")
    loader.set_epoch(3)
    state = loader.state_dict()
    with caplog.at_level(logging.INFO, "streaming.wrappers"):
        for load in (as_torch, lambda one: one):  # whichever of them gets the state
            loader = loaders.make("DataLoader")
            wrapped = as_torch(loader)
            load(loader).load_state_dict(state)
            assert as_fabric(wrapped, 2 * NUM_BATCHES) == whole[3 * NUM_BATCHES :]
    assert "counts how often this process has iterated; the loader goes on with epoch 3" in caplog.text


# ----------------------------------------------------------------------------------------------------- one_behind


def fetches_during_the_step(loader: Any, trained: list[Any], most: int) -> None:
    """As nanoGPT: the next batch is fetched between backward and the optimizer's step; it saves after that."""
    ahead = one_behind(loader)
    batches = iter(ahead)
    batch = next(batches)
    for _ in range(most):
        trained.append(rows(batch))
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(ahead)
            batch = next(batches)


def fetches_from_an_endless_generator(loader: Any, trained: list[Any], most: int) -> None:
    """As nanochat."""
    ahead = one_behind(loader)

    def forever() -> Iterator[Any]:
        while True:
            yield from ahead

    batches = forever()
    batch = next(batches)
    for _ in range(most):
        trained.append(rows(batch))
        batch = next(batches)


def looks_whether_the_batch_is_the_last(loader: Any, trained: list[Any], most: int) -> None:
    """As Lightning with a loader without a length."""
    wrapped = one_behind(loader)
    while True:
        batches = iter(wrapped)
        kept = next(batches, None)
        while kept is not None:
            following = next(batches, None)
            trained.append(rows(kept))
            if len(trained) == most:
                return
            kept = following


FETCHING = (fetches_during_the_step, fetches_from_an_endless_generator, looks_whether_the_batch_is_the_last)


@pytest.mark.parametrize("kind", first_here(LOADERS, 3))
@pytest.mark.parametrize("program", FETCHING, ids=lambda program: program.__name__)
def test_a_program_that_has_fetched_the_next_batch_resumes_with_it(
    loaders: Loaders, kind: str, program: Callable[[Any, list[Any], int], None]
) -> None:
    """Stopped after each of the steps of more than an epoch, also the last one of it."""
    whole = loaders.truth(kind, 14)
    for stop in (1, 2, 3, 4, 5, 12):
        loader = loaders.make(kind)
        trained: list[Any] = []
        program(loader, trained, stop)
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        loader = loaders.make(kind)
        loader.load_state_dict(state)
        program(loader, trained, 2 if program is not looks_whether_the_batch_is_the_last else stop + 2)
        assert trained == whole[: stop + 2], stop
        loader.close()


@pytest.mark.parametrize("kind", LOADERS)
def test_states_are_those_before_the_batch_in_hand(loaders: Loaders, kind: str) -> None:
    """The same as of a loop that saves before each batch."""
    plain, loader = loaders.make(kind), loaders.make(kind)
    due = [plain.state_dict(), *(state for _, state in islice(plain.with_state(), 7))]
    found = [loader.state_dict() for _ in islice(one_behind(loader), 7)]
    assert found
    assert found == due[: len(found)]


def test_an_iterator_stays_one_and_an_iterable_begins_epochs(loaders: Loaders) -> None:
    whole = loaders.truth("DataLoader", 3 * NUM_BATCHES)
    with loaders.make("DataLoader") as loader:
        batches = one_behind(loader)
        assert len(batches) == NUM_BATCHES
        first = rows(next(batches))
        assert [first, *map(rows, batches)] == whole[:NUM_BATCHES], "a loop continues what next() has begun"
        with pytest.raises(StopIteration):
            next(batches)
        assert rows(next(iter(batches))) == whole[NUM_BATCHES]
        assert rows(next(batches)) == whole[NUM_BATCHES + 1], "the same iterator"
        state = loader.state_dict()
        loader.load_state_dict(state)
        with pytest.raises(IteratorSupersededError):
            next(batches)
        assert [rows(batch) for batch in batches] == whole[NUM_BATCHES + 1 : 2 * NUM_BATCHES]
    with loaders.make("DataLoader") as loader:
        batches = one_behind(loader)
        assert [[rows(batch) for batch in batches] for _ in range(3)] == [
            whole[at : at + NUM_BATCHES] for at in (0, NUM_BATCHES, 2 * NUM_BATCHES)
        ]


def test_tickets_over_wrapped_loaders_are_those_of_the_loader(loaders: Loaders) -> None:
    due = [sample["__key__"] for _, sample in Tickets(loaders.make("DataLoader"))]
    for wrap in (as_torch, one_behind):
        tickets = Tickets(wrap(loaders.make("DataLoader")))
        assert [sample["__key__"] for _, sample in tickets] == due


REFUSED: dict[str, tuple[Callable[[Loaders], Any], str]] = {
    "torch's": (lambda _: torch.utils.data.DataLoader([1]), "to the program unchanged"),
    "a sampler": (lambda _: DeviceMeshSampler(8, batch_size=2), r"batch_sampler=sampler\).*sampler.follow\(loader\)"),
    "a retry sampler": (
        lambda _: RetrySampler(DeviceMeshSampler(38, batch_size=2), Squares()), r"sampler.follow\(loader\)"
    ),
    "tickets": (lambda loaders: Tickets(loaders.make("DataLoader")), "until it is settled"),
    "a set": (lambda loaders: loaders.samples.open(), r"DataLoader\(dataset, batch_size=…\)"),
    "steps": (lambda loaders: loaders.make("micro-batches").steps(), "got a .*TrainingSteps"),
    "an epoch": (lambda loaders: iter(loaders.make("DataLoader")), "give the loader that it iterates over"),
    "pairs": (lambda loaders: loaders.make("DataLoader").with_state(), "give the loader that it iterates over"),
    "a list": (lambda _: [1, 2], "got a builtins.list"),
}  # fmt: skip


@pytest.mark.parametrize("wrap", ["as_torch", "one_behind"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_loader_is_refused_with_the_way(loaders: Loaders, case: str, wrap: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"^{wrap}\(loader\): expected a streaming.DataLoader.*{words}"):
        getattr(streaming, wrap)(make(loaders))


def test_as_torch_of_its_own_result_is_refused(loaders: Loaders) -> None:
    wrapped = as_torch(loaders.make("DataLoader"))
    with pytest.raises(ConfigError, match=r"^as_torch\(loader\): .*as_torch has made it already; use it as it is"):
        as_torch(wrapped)
    assert len(list(wrapped)) == len(wrapped)


def test_what_cannot_be_one_behind_is_refused(loaders: Loaders) -> None:
    loader = loaders.make("micro-batches")
    with pytest.raises(ConfigError, match="micro-batches are held back, not steps"):
        one_behind(loader).steps()
    with pytest.raises(ConfigError, match="got such an iterator already"):
        one_behind(one_behind(loader))
    accelerator = SimpleNamespace(
        num_processes=1, torch_device_mesh=None, is_main_process=True, device=torch.device("cpu"),
        register_for_checkpointing=lambda _: None, _models=[None],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"Wrap the loader first.*prepare_loader\(accelerator, one_behind\(loader\)"):
        one_behind(prepare_loader(accelerator, loader))
    assert len(list(prepare_loader(accelerator, one_behind(loader)))) == len(loader)
    foreign = DevicePrefetcher(torch.utils.data.DataLoader(list(range(8)), 4), "cpu")
    with pytest.raises(ConfigError, match=r"cannot be held back; iterate prefetcher.with_state\(\)"):
        one_behind(foreign)
    batches: Any = iter(foreign)
    next(batches)
    with pytest.raises(ConfigError, match="whose position nobody can hold back"):
        batches.hold_back(1)
    assert [batch.tolist() for batch in as_torch(foreign)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_epochs_go_on_over_kinds_of_loops(loaders: Loaders) -> None:
    for kind in ("DataLoader", "prefetcher", "iterable", "map-style"):
        loader = loaders.make(kind)
        wrapped = one_behind(loader)
        found = [[rows(batch) for batch in wrapped] for _ in range(EPOCHS)]
        assert list(chain.from_iterable(found)) == loaders.truth(kind, sum(map(len, found)))
        assert loader.epoch == EPOCHS
