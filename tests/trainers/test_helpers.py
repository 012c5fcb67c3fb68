"""Functions of trainers that take a loader apart, skip batches, copy it or count it: right rows, or the way to them.

A function that put torch's loader over the whole data set in our place gave all rows to each rank, and said nothing.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState
from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from infra import DeviceMesh
from streaming import (
    DataLoader,
    DevicePrefetcher,
    Mixture,
    OrdinaryDataset,
    Packed,
    RemoteBatch,
    RemoteGroup,
    Schedule,
    ShuffleConfig,
    StreamingDataset,
    as_torch,
    one_behind,
)
from streaming.errors import ConfigError
from streaming.integrations.accelerate import count_all_ranks, prepare_loader, skip_first_batches
from streaming.integrations.loader_check import check_worlds
from tests.support.processes.played_ranks import read_here
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.sets.packed_sets import write
from tests.support.tiers import first_here

NUM_ROWS, SIZE = 48, 8


class Squares:
    """Map-style; notes which rows were read. The last two fill no batch."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_ROWS + 2

    def __getitem__(self, index: int) -> dict[str, int]:
        self.read.append(index)
        return {"x": index}


class Numbers(IterableDataset[dict[str, int]]):
    """Other rows in each pass."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"x": 1000 * self.epoch + number} for number in range(NUM_ROWS))


def own_iterator() -> Iterator[dict[str, int]]:
    """A function that makes iterators."""
    return ({"x": number} for number in range(NUM_ROWS))


class Kinds:
    """By name: a function that makes a loader of the kind for a place in a mesh. Epochs have six global batches."""

    def __init__(self, samples: SampleSet, documents: str) -> None:
        def dataset() -> Any:
            return samples.open(decode=None, fields=("cls",))

        self.makers: dict[str, Callable[..., DataLoader]] = {
            "iterable": lambda **of: DataLoader(Numbers(), **of),
            "iterable, epoch_size": lambda **of: DataLoader(Numbers(), epoch_size=NUM_ROWS, **of),
            "StreamingDataset": lambda **of: DataLoader(dataset(), **of),
            "map-style": lambda **of: DataLoader(Squares(), **of),
            "map-style, partial": lambda **of: DataLoader(Squares(), last_batch="partial", **of),
            "own iterator": lambda **of: DataLoader(own_iterator, epoch_size=NUM_ROWS, **of),
            "dispatch": lambda **of: DataLoader(OrdinaryDataset(Numbers(), sharding="dispatch"), **of),
            "Ray": lambda **of: DataLoader(dataset, remote_group=RemoteGroup(name="readers"), **of),
            "Mixture": lambda **of: DataLoader(
                Mixture({"a": dataset(), "b": dataset()}, weights={"a": 1, "b": 2}), epoch_size=NUM_ROWS, **of
            ),
            "unindexed": lambda **of: DataLoader(
                samples.open(decode=None, fields=("cls",), shuffle=ShuffleConfig(window=16)),
                epoch_size=NUM_ROWS, **of,
            ),
            "Packed": lambda **of: DataLoader(
                Packed(StreamingDataset(documents), 64), **{**of, "global_batch_size": 2, "last_batch": "partial"}
            ),
            "ramp": lambda **of: DataLoader(
                dataset(), **{**of, "global_batch_size": Schedule.steps({0: SIZE, 3 * SIZE: SIZE // 2})}
            ),
        }  # fmt: skip

    def loader(self, kind: str, rank: int = 0, ranks: int = 1) -> DataLoader:
        mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=rank, environ={})
        return self.makers[kind](global_batch_size=SIZE, device_mesh=mesh)


KINDS = (
    "iterable", "iterable, epoch_size", "StreamingDataset", "map-style", "own iterator", "dispatch", "Ray", "Mixture",
    "ramp",
)  # fmt: skip
ASKS_OTHERS = {"iterable", "dispatch"}
"""Kinds whose ranks ask each other how much comes."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("helpers") / "set", (12, 20, 16))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("documents") / "set"
    write(folder, num_docs=40)
    return str(folder)


@pytest.fixture
def kinds(samples: SampleSet, documents: str, monkeypatch: pytest.MonkeyPatch) -> Kinds:
    read_here(monkeypatch)
    return Kinds(samples, documents)


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate keeps one state per process."""
    PartialState(cpu=True)
    yield
    PartialState._reset_state()


def accelerator(processes: int = 1, **options: Any) -> Any:
    """What our functions ask an ``Accelerator`` for, in a job of so many processes."""
    return SimpleNamespace(
        **{
            "num_processes": processes, "torch_device_mesh": None, "split_batches": False, "is_main_process": True,
            "device": torch.device("cpu"), "register_for_checkpointing": lambda _: None,
            "_models": [], "_optimizers": [], "_schedulers": [],
        } | options
    )  # fmt: skip


def rows_of(batch: Any) -> list[Any]:
    if isinstance(batch, RemoteBatch):
        return rows_of(batch.get())
    if "input_ids" in batch:
        return batch["input_ids"].tolist()
    return list(batch["__key__"]) if "__key__" in batch else batch["x"].tolist()


def epochs_of(loader: Any, number: int) -> list[list[list[Any]]]:
    return [[rows_of(batch) for batch in loader] for _ in range(number)]


# ------------------------------------------------------------------------------------ what takes a loader apart


def dealt_again(loader: Any) -> Any:
    """As Ignite, Ray and others do."""
    options = {name: getattr(loader, name) for name in ("batch_size", "num_workers", "worker_init_fn", "generator")}
    return torch.utils.data.DataLoader(loader.dataset, sampler=DistributedSampler(loader.dataset, 2, 0), **options)


def cut_batches(loader: Any) -> Any:
    return list(BatchSampler(loader.batch_sampler, 2, drop_last=False))


REBUILDERS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "skip_first_batches": (
        lambda loader: accelerate.skip_first_batches(loader, 2), ConfigError, r"skip_first_batches\(loader, number\)",
    ),
    "prepare_data_loader": (
        lambda loader: prepare_data_loader(loader, num_processes=2, process_index=1), ConfigError, "prepare_loader",
    ),
    "DataLoaderDispatcher": (
        lambda loader: prepare_data_loader(loader, put_on_device=True, dispatch_batches=True), ConfigError,
        "prepare_loader",
    ),
    "split_batches": (
        lambda loader: prepare_data_loader(loader, num_processes=2, process_index=1, split_batches=True), ConfigError,
        "prepare_loader",
    ),
    "Ray": (dealt_again, AttributeError, "iterate over the loader itself, without a helper that rebuilds it"),
    "batch_sampler": (cut_batches, ConfigError, "gives no indices"),
}  # fmt: skip
WRAPPERS: dict[str, Callable[[DataLoader], Any]] = {
    "bare": lambda loader: loader,
    "prepared": lambda loader: prepare_loader(accelerator(loader.device_mesh.world_size), loader),
    "counted": lambda loader: count_all_ranks(accelerator(), loader),
    "skipped": lambda loader: skip_first_batches(loader, 1),
    "one_behind": one_behind,
}
CELLS = [
    pytest.param(kind, ranks, wrapper, id=f"{kind}-{ranks}-{wrapper}")
    for wrapper in WRAPPERS
    for ranks in (1, 2)
    for kind in KINDS
    if ranks == 1 or kind not in ASKS_OTHERS
]


@pytest.mark.parametrize(("kind", "ranks", "wrapper"), first_here(CELLS, 2 * len(KINDS) - len(ASKS_OTHERS)))
def test_no_loader_of_torch_takes_our_place(kinds: Kinds, kind: str, ranks: int, wrapper: str) -> None:
    for rank in range(ranks):
        with kinds.loader(kind, rank, ranks) as loader:
            wrapped = WRAPPERS[wrapper](loader)
            for name, (rebuild, error, words) in REBUILDERS.items():
                with pytest.raises(error) as refused:
                    rebuild(wrapped)
                assert re.search(words, str(refused.value)), name
            assert loader.state_dict()["samples_seen"] == 0


@pytest.mark.parametrize("kind", ["map-style", "StreamingDataset", "Mixture"])
def test_a_loader_inside_torchs_is_refused(kinds: Kinds, kind: str) -> None:
    with kinds.loader(kind) as loader:
        for of_torch in (torch.utils.data.DataLoader(loader), accelerate.data_loader.DataLoaderShard(loader)):
            with pytest.raises(ConfigError, match=r"which makes batches itself; iterate over it directly"):
                next(iter(of_torch))
        for taken_apart in (
            accelerate.skip_first_batches(as_torch(loader), 1),
            prepare_data_loader(as_torch(loader)),
        ):
            with pytest.raises(ConfigError, match=r"takes the loader apart to shard it"):
                next(iter(taken_apart))


def test_names_that_only_rebuilders_ask_for_are_no_attributes_to_others(kinds: Kinds) -> None:
    """Programs that look at all there is, as debuggers do, find no error."""
    with kinds.loader("map-style") as loader:
        for name in dir(loader):
            getattr(loader, name)
        for name in ("worker_init_fn", "generator", "persistent_workers", "timeout", "no_such_name"):
            assert not hasattr(loader, name)


# ------------------------------------------------------------------------------------------------------- copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", first_here([kind for kind in KINDS if kind not in {"Ray", "own iterator"}], 4))
def test_a_copy_reads_what_the_loader_would(kinds: Kinds, kind: str, how: str) -> None:
    (expected,) = epochs_of(kinds.loader(kind), 1)
    for wrap in (WRAPPERS["bare"], *([] if how == "copy" else [one_behind])):  # a copy of a wrapper has the same loader
        with kinds.loader(kind) as loader:
            batches = iter(loader)
            for _ in range(2):
                next(batches)
            copied = COPIES[how](wrap(loader))
            assert epochs_of(copied, 1) == [expected[2:]]


# ------------------------------------------------------------------------------------------- skip_first_batches


@pytest.mark.parametrize("number", [4, *(pytest.param(one, marks=pytest.mark.thorough) for one in (0, 1, 2, 5, 6))])
@pytest.mark.parametrize("kind", [*KINDS, "map-style, partial", "unindexed", "Packed"])
def test_batches_are_skipped_as_torchs_are(kinds: Kinds, kind: str, number: int) -> None:
    """For each rank: the rest of the epoch, then whole ones."""
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        if ranks == 2 and kind in {*ASKS_OTHERS, "Ray"}:
            continue
        with kinds.loader(kind, rank, ranks) as loader:
            first, second, third = epochs_of(loader, 3)
        for wrap in (WRAPPERS["bare"], WRAPPERS["prepared"], lambda loader: DevicePrefetcher(loader, "cpu")):
            if kind == "Ray" and wrap not in WRAPPERS.values():
                continue  # a prefetcher copies batches, and these are handles
            with kinds.loader(kind, rank, ranks) as loader:
                whole = wrap(loader)
                rest = skip_first_batches(whole, number)
                if kind not in {"iterable", "dispatch", "Ray"}:
                    assert (len(rest), len(whole)) == (len(first) - number, len(first))
                assert epochs_of(rest, 2) == [first[number:], second]
                assert epochs_of(skip_first_batches(whole, number), 1) == [third[number:]]


@pytest.mark.parametrize("kind", ["map-style, partial", "map-style", "iterable, epoch_size"])
def test_a_whole_epoch_is_skipped(kinds: Kinds, kind: str) -> None:
    """Also where its last batch is short, or rows are left out."""
    with kinds.loader(kind) as loader:
        first, second = epochs_of(loader, 2)
    with kinds.loader(kind) as loader:
        assert epochs_of(skip_first_batches(loader, len(first)), 2) == [[], second]


def test_batches_come_with_their_states_behind_what_is_skipped(kinds: Kinds) -> None:
    for kind in ("map-style", "iterable"):
        with kinds.loader(kind) as loader:
            expected = [(rows_of(batch), state) for batch, state in loader.with_state()]
        with kinds.loader(kind) as loader:
            rest = skip_first_batches(prepare_loader(accelerator(), loader), 4).with_state()
            assert [(rows_of(batch), state) for batch, state in rest] == expected[4:]


@pytest.mark.parametrize("wrap", [as_torch, lambda loader: as_torch(prepare_loader(accelerator(), loader))])
def test_of_torchs_class_it_stays_of_torchs_class(kinds: Kinds, wrap: Callable[[Any], Any]) -> None:
    with kinds.loader("map-style") as loader:
        first, second = epochs_of(loader, 2)
    with kinds.loader("map-style") as loader:
        rest = skip_first_batches(wrap(loader), 4)
        assert isinstance(rest, torch.utils.data.DataLoader)
        assert len(rest) == len(first) - 4
        assert epochs_of(rest, 2) == [first[4:], second]


def test_what_is_skipped_is_not_read(kinds: Kinds) -> None:
    with kinds.loader("map-style") as loader:
        rest = skip_first_batches(loader, 4)
        assert len(list(rest)) == 2
        assert len(loader.dataset.read) == 2 * SIZE


class Counting(list[int]):
    """Samples that say how many were read before them, which is its state."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return self.num_read

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_read = state["num_read"]


def test_a_set_with_a_state_is_read_up_to_the_batch() -> None:
    def batches(number: int) -> list[list[int]]:
        with DataLoader(Counting(range(50)), SIZE) as loader:
            return [batch.tolist() for batch in skip_first_batches(loader, number)]

    assert batches(4) == batches(0)[4:]


@pytest.mark.parametrize("kind", first_here([*KINDS, "map-style, partial"], 4))
def test_a_loaded_state_and_the_number_skipped_have_to_agree(kinds: Kinds, kind: str) -> None:
    with kinds.loader(kind) as loader:
        first, second = epochs_of(loader, 2)
    with kinds.loader(kind) as loader:
        states = [state for _, state in loader.with_state()]
    for number in (3, len(first)):
        with kinds.loader(kind) as loader:
            loader.load_state_dict(states[number - 1])
            with pytest.raises(ConfigError, match=rf"already continues at batch {number} of epoch 0.* not at batch 1:"):
                iter(skip_first_batches(loader, 1))
            assert epochs_of(skip_first_batches(loader, number), 1) == [first[number:]]
            assert epochs_of(loader, 1) == [second]
    with kinds.loader(kind) as loader:  # its epoch is over, so the trainer means the next one
        loader.load_state_dict(states[-1])
        assert epochs_of(skip_first_batches(loader, 0), 1) == [second]


def test_skipping_refuses_what_it_cannot_skip(kinds: Kinds) -> None:
    with kinds.loader("map-style") as loader:
        with pytest.raises(ConfigError, match="got 7 batches, but an epoch of this loader has 6 on each rank"):
            iter(skip_first_batches(loader, 7))
        with pytest.raises(ConfigError, match="num_batches: expected an integer"):
            skip_first_batches(loader, -1)
        with pytest.raises(ConfigError, match=r"skip_first_batches\(loader, num_batches\): expected a streaming"):
            skip_first_batches(torch.utils.data.DataLoader([1]), 1)  # type: ignore[arg-type]
        of_torch = DevicePrefetcher(torch.utils.data.DataLoader([1]), "cpu")
        with pytest.raises(ConfigError, match=r"that has no position; give accelerate.skip_first_batches that loader"):
            skip_first_batches(of_torch, 1)
        loader.seed(7)  # the epoch skipped into has the new order
        with kinds.loader("map-style") as other:
            other.seed(7)
            (expected,) = epochs_of(other, 1)
        assert epochs_of(skip_first_batches(loader, 2), 1) == [expected[2:]]


# ------------------------------------------------------------------------------------------------------ counting


def diffusers(loader: Any, processes: int, accumulated: int) -> int:
    """Steps of the schedule for one epoch, as its scripts count before they prepare the loader."""
    return math.ceil(math.ceil(len(loader) / processes) / accumulated) * processes


def of_transformers(loader: Any, _: int, accumulated: int) -> int:
    """As run_glue_no_trainer.py has it."""
    return math.ceil(len(loader) / accumulated)


@pytest.mark.parametrize("count", [diffusers, of_transformers])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_schedule_counted_before_prepare_lasts_as_long_as_the_epoch(
    kinds: Kinds, count: Callable[..., int], processes: int, accumulated: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A prepared schedule takes as many steps as there are processes for each step of the optimizer."""
    own = accelerator(processes)
    with kinds.loader("map-style", 0, processes) as loader:
        counted = count_all_ranks(own, loader)
        steps = count(counted, processes, accumulated)
        with pytest.raises(ConfigError, match=r"prepare it first.* loader = prepare_loader\(accelerator, loader\)"):
            iter(counted)
        with pytest.raises(ConfigError, match="prepare it first"):
            counted.with_state()
        prepared = prepare_loader(own, counted)
        assert steps == math.ceil(len(prepared) / accumulated) * processes
        assert len(prepared) == len(list(prepared)) == 6
        assert (counted.batch_size, counted.dataset) == (loader.batch_size, loader.dataset)
    assert not caplog.records


def test_split_batches_count_once(kinds: Kinds) -> None:
    """Accelerate then takes one step of the schedule for each of the optimizer's."""
    with kinds.loader("map-style", 0, 2) as loader:
        assert len(count_all_ranks(accelerator(2, split_batches=True), loader)) == len(loader) == 6


@pytest.mark.parametrize("first", ["len", "prepare"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_count_before_prepare_that_is_of_one_process_is_told_of(
    kinds: Kinds, processes: int, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = accelerator(processes)
    with kinds.loader("map-style", 0, processes) as loader:
        repr(loader)
        prepared = loader if first == "len" else prepare_loader(own, loader)
        assert [len(prepared), len(prepared)] == [6, 6]
        prepared = prepare_loader(own, loader) if first == "len" else prepared
        own._models.append("prepared")
        len(prepared)
    (*told,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert len(told) == (processes > 1)
    for line in told:
        assert "test_helpers.py" in line
        assert "is 6, the batches of each process" in line
        assert "count_all_ranks(accelerator, loader)" in line


@pytest.mark.parametrize("after", ["nothing read", "prepared first", "not the main process"])
def test_a_right_count_is_not_told_of(kinds: Kinds, after: str, caplog: pytest.LogCaptureFixture) -> None:
    own = accelerator(2, is_main_process=after != "not the main process")
    with kinds.loader("map-style", 0, 2) as loader:
        if after == "not the main process":
            len(loader)
        prepared = prepare_loader(own, loader)
        own._optimizers.append("prepared")
        assert len(prepared) == 6
    assert not caplog.records


class TorchsMesh(dict[str, Any]):
    """torch's mesh, as far as it is asked."""

    def __init__(self, **sizes: int) -> None:
        super().__init__({name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()})
        self.mesh_dim_names = tuple(sizes)


WORLDS: dict[str, tuple[dict[str, int], int, TorchsMesh | None, str]] = {
    "alike": ({"dp_size": 2}, 2, None, ""),
    "one process": ({"dp_size": 1}, 1, None, ""),
    "each rank reads all": ({"dp_size": 1}, 2, None, "2 data-parallel ranks in 2 processes.* to 1 in 1"),
    "half of the rows reach nobody": ({"dp_size": 4}, 2, None, "2 data-parallel ranks in 2 processes.* to 4 in 4"),
    "one rank of two, played": ({"dp_size": 2}, 1, None, "1 data-parallel ranks in 1 processes.* to 2 in 2"),
    "tensor parallel, both know": ({"dp_size": 2, "tp_size": 2}, 4, TorchsMesh(dp_shard=2, tp=2), ""),
    "tensor parallel, the loader knows": ({"dp_size": 2, "tp_size": 2}, 4, None, ""),
    "tensor parallel, shares only": ({"dp_size": 2}, 4, TorchsMesh(dp_shard=2, tp=2), ""),
    "tensor parallel, nobody told the loader": (
        {"dp_size": 3}, 4, TorchsMesh(dp_shard=2, tp=2), "2 data-parallel ranks in 4 processes.* to 3 in 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WORLDS)
def test_a_trainer_of_another_world_is_refused(kinds: Kinds, case: str) -> None:
    sizes, processes, mesh, words = WORLDS[case]
    own = accelerator(processes, torch_device_mesh=mesh)
    with DataLoader(Squares(), 2, device_mesh=DeviceMesh.from_sizes(**sizes, rank=0, environ={})) as loader:  # type: ignore[arg-type]
        if words:
            with pytest.raises(ConfigError, match=rf"^prepare_loader\(accelerator, loader\): the trainer has {words}"):
                prepare_loader(own, loader)
            with pytest.raises(ConfigError, match=r"^use_loader\(trainer, loader\): the trainer has"):
                check_worlds("use_loader(trainer, loader)", loader, own)
        else:
            prepare_loader(own, loader)


LAUNCHED = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2"},
    "openmpi": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "2"},
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_trainer_that_takes_its_process_for_the_only_one_is_refused(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process trained a model of its own, on its share, and nothing said so."""
    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    words = rf"takes this process for the only one, but {launcher} says that it is rank 1 of 2.*accelerate launch"
    with DataLoader(Squares(), 2) as loader:
        for given in (loader, DevicePrefetcher(loader, "cpu"), as_torch(loader), one_behind(loader)):
            with pytest.raises(ConfigError, match=words):
                prepare_loader(accelerator(1), given)
        with pytest.raises(ConfigError, match=words):
            check_worlds("use_loader(trainer, loader)", loader, accelerator(1))
        prepare_loader(accelerator(2), loader)
    with DataLoader(Squares(), 2, device_mesh=DeviceMesh.from_sizes(dp_size=1, rank=0)) as alone:
        prepare_loader(accelerator(1), alone)


# ----------------------------------------------------------------------------------------------- epochs of trainers


def fit(loader: Any, epochs: int) -> list[list[list[Any]]]:
    """As Lightning reads a loader without a length: a batch ahead, and the first one before it says its epoch."""
    found, ahead = [], iter(())
    for epoch in range(epochs):
        if epoch:
            loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        kept = next(batches, None)
        if not epoch:
            loader.sampler.set_epoch(epoch)
        rows = []
        while kept is not None:
            following = next(batches, None)
            rows.append(rows_of(kept))
            kept = following
        found.append(rows)
        ahead = batches  # kept, as Lightning does
    del ahead
    return found


@pytest.mark.parametrize("wrap", [WRAPPERS["bare"], one_behind], ids=["bare", "one_behind"])
@pytest.mark.parametrize("kind", ["iterable", "dispatch"])
def test_a_second_fit_goes_on_with_the_next_epoch(kinds: Kinds, kind: str, wrap: Any) -> None:
    """It ended in IteratorSupersededError at its first step."""
    expected = epochs_of(kinds.loader(kind), 6)
    with kinds.loader(kind) as loader:
        wrapped = wrap(loader)
        assert fit(wrapped, 2) == expected[:2]
        assert fit(wrapped, 1) == expected[2:3]
        assert fit(wrapped, 3) == expected[3:]
        loader.sampler.set_epoch(0)  # of a program that counts for itself
        assert epochs_of(loader, 2) == expected[:2]


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("kind", ["iterable", "dispatch"])
def test_a_fit_after_a_look_reads_a_whole_epoch(kinds: Kinds, kind: str, looks: int) -> None:
    expected = epochs_of(kinds.loader(kind), 3)
    with kinds.loader(kind) as loader:
        look = iter(loader)
        for _ in range(looks):
            next(look)
        assert fit(loader, 2) == expected[1:]
    with kinds.loader(kind) as loader:  # of a loader with its position held, the look was none
        look = iter(one_behind(loader))
        next(look)
        assert fit(one_behind(loader), 2) == expected[:2]


def test_an_epoch_set_between_iterations_is_the_loaders(kinds: Kinds) -> None:
    for kind in ("iterable", "map-style"):
        expected = epochs_of(kinds.loader(kind), 4)
        with kinds.loader(kind) as loader:
            loader.sampler.set_epoch(3)
            assert epochs_of(loader, 1) == [expected[3]]
            loader.sampler.set_epoch(1)
            assert epochs_of(loader, 2) == expected[1:3]
            with pytest.raises(ConfigError, match="epoch"):
                loader.sampler.set_epoch(-1)
