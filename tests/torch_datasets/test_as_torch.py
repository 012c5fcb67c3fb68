"""Calls as programs write them for torch's loader: options by place, items that are batches, odd values, attributes."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from infra import DeviceMesh
from streaming import DataLoader, DeviceMeshFetcher, DeviceMeshSampler, OrdinaryDataset, ShuffleConfig, StreamingDataset
from streaming.common.arguments import option_names
from streaming.errors import ConfigError, OptionError
from streaming.others.torch_datasets import as_torch
from streaming.run.options.loader_options import RULES
from tests.support.sets.data_sets import mesh_of, write_set

COUNT = 12


class Batches(torch.utils.data.Dataset[Any]):
    """A map-style set whose items are batches of unlike sizes."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": np.full((number % 3 + 1, 2), number), "n": number}


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same batches as a stream."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        items = Batches()
        for number in range(info.id if info else 0, COUNT, info.num_workers if info else 1):
            yield items[number]


def numbers(loader: Any) -> list[int]:
    return [batch["n"] for batch in loader]


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Batches, Stream])
def test_items_that_are_batches_come_as_torch_gives_them(kind: Any, num_workers: int) -> None:
    order = {"shuffle": False} if kind is Batches else {}
    expected = list(TorchLoader(kind(), batch_size=None, num_workers=num_workers))
    with DataLoader(kind(), batch_size=None, num_workers=num_workers, **order) as loader:
        found = list(loader)
    assert len(found) == COUNT
    for one, other in zip(expected, found, strict=True):
        assert one["n"] == other["n"]
        assert torch.equal(one["x"], other["x"])
        assert one["x"].dtype == other["x"].dtype


@pytest.mark.parametrize(
    "call", [lambda: DataLoader(Batches(), None), lambda: DataLoader(Batches(), None, shuffle=True)]
)
def test_the_size_may_be_none_by_place(call: Any) -> None:
    loader = call()
    assert sorted(numbers(loader)) == list(range(COUNT))
    assert len(loader) == COUNT


def test_a_function_gets_one_item() -> None:
    loader = DataLoader(Batches(), batch_size=None, collate_fn=lambda item: item["n"] * 10, shuffle=False)
    expected = list(TorchLoader(Batches(), batch_size=None, collate_fn=lambda item: item["n"] * 10))
    assert list(loader) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_items_resume_at_the_next_one_on_any_number_of_ranks(ranks: int, stop: int) -> None:
    def loaders(size: int) -> list[Any]:
        return [DataLoader(Batches(), batch_size=None, device_mesh=mesh_of(size, rank)) for rank in range(size)]

    whole = numbers(loaders(1)[0])
    begun = loaders(ranks)
    seen: list[int] = []
    for loader in begun:
        batches = iter(loader)
        seen += [next(batches)["n"] for _ in range(stop)]
    assert sorted(seen) == sorted(whole[: stop * ranks])
    for size in (1, 2, 3, 4):
        rest: list[int] = []
        for loader in loaders(size):
            loader.load_state_dict(begun[0].state_dict())
            rest += numbers(pickle.loads(pickle.dumps(loader)))
        left = COUNT - stop * ranks
        assert sorted(rest) == sorted(whole[stop * ranks :][: left // size * size])


def test_epochs_of_items_may_have_a_size() -> None:
    for kind in (Batches, Stream):
        loader = DataLoader(kind(), batch_size=None, epoch_size=5)
        assert (len(loader), len(numbers(loader)), len(numbers(loader))) == (5, 5, 5)


def test_a_stream_of_batches_is_dealt_out_and_resumes() -> None:
    def loader(rank: int) -> DataLoader[Any]:
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=rank)
        return DataLoader(Stream(), batch_size=None, device_mesh=mesh, epoch_size=COUNT)

    plain = [numbers(loader(rank)) for rank in range(2)]
    assert sorted(plain[0] + plain[1]) == list(range(COUNT))
    for rank in range(2):
        begun = loader(rank)
        batches = iter(begun)
        first = [next(batches)["n"] for _ in range(2)]
        again = loader(rank)
        again.load_state_dict(begun.state_dict())
        assert first + numbers(again) == plain[rank]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    return write_set(tmp_path_factory.mktemp("as_torch"), (10, 7)).open()


def test_what_items_cannot_do_is_refused_with_the_way(dataset: StreamingDataset) -> None:
    two = mesh_of(2, 0)
    for make, words in (
        (lambda: DataLoader(dataset, batch_size=None), "torch data sets whose items are batches.*batch_size="),
        (lambda: DataLoader(lambda: dataset, batch_size=None), "torch data sets whose items are batches"),
        (lambda: DataLoader(Batches(), batch_size=None, last_batch="pad"), "items are delivered whole"),
        (lambda: DataLoader(Batches(), batch_size=None, drop_last=False, device_mesh=two), "drop_last=False"),
        (lambda: DataLoader(Batches(), batch_size=None, jagged=("x",)), "jagged="),
        (lambda: DataLoader(Batches(), batch_size=None, collate_fn=3), "function of an item"),
        (lambda: DataLoader(Batches()), "exactly one of batch_size"),
        (lambda: DataLoader(Batches(), batch_size=None, batch=3), "no option 'batch'"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
    assert len(DataLoader(Batches(), batch_size=None, drop_last=False)) == COUNT
    assert len(DataLoader(Batches(), batch_size=None, global_batch_size=4, collate_fn=len)) == COUNT // 4


def test_options_by_place_mean_what_they_mean_in_torch(dataset: StreamingDataset) -> None:
    theirs = [name for name in inspect.signature(TorchLoader.__init__).parameters if name != "self"]
    assert tuple(theirs[: len(as_torch._BY_PLACE)]) == as_torch._BY_PLACE
    rows = list(range(8))
    for shuffle in (False, True):
        by_place = [batch.tolist() for batch in DataLoader(rows, 4, shuffle)]
        assert by_place == [batch.tolist() for batch in DataLoader(rows, 4, shuffle=shuffle)]
    many = DataLoader(rows, 3, False, None, None, 0, list, False, False)
    assert list(many) == list(TorchLoader(rows, 3, False, None, None, 0, list, False, False))
    with pytest.raises(ConfigError, match=r"shuffle: .*StreamingDataset\(…, shuffle=False\)"):
        DataLoader(dataset, 4, False)
    with pytest.raises(OptionError, match="'shuffle' is given twice"):
        DataLoader(rows, 4, True, shuffle=True)
    with pytest.raises(OptionError, match="at most 13"):
        DataLoader(*([None] * 14))
    with pytest.raises(ConfigError, match="sampler: this DataLoader deals out the samples itself"):
        DataLoader(rows, 4, None, [1, 2])


# --- odd values ---

ODD = [np.array([1, 2]), np.array([]), np.array(4), torch.tensor([1, 2]), torch.tensor(4), torch.ones(2, 2)]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize(
    "owner", [DataLoader, OrdinaryDataset, StreamingDataset, DeviceMeshSampler, ShuffleConfig, DeviceMeshFetcher]
)
def test_arrays_as_options_are_refused_by_name(owner: Any, value: Any) -> None:
    for name in option_names(owner):
        if name in {"dataset", "urls", "sampler", "exclude"}:
            continue
        with pytest.raises(ConfigError, match=rf"^{name}: expected an option, got a (ndarray|Tensor) of shape"):
            owner(**{name: value})


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_arrays_by_place_and_as_samplers_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="batch_size: expected a positive integer"):
        DataLoader([1, 2], value)
    for name in ("sampler", "batch_sampler"):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            DataLoader([1, 2], 2, **{name: value})


def test_what_to_write_in_place_of_one_number_works() -> None:
    with pytest.raises(ConfigError, match=r"batch_size: .*; write 4$"):
        DataLoader(list(range(8)), batch_size=torch.tensor(4))
    for four in (4, np.int64(4), np.uint8(4)):
        assert [len(batch) for batch in DataLoader(list(range(8)), four, num_workers=np.int32(0))] == [4, 4]


# --- attributes ---


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_options_of_a_loader_are_not_set_in_silence(kind: str, dataset: StreamingDataset) -> None:
    theirs = set(inspect.signature(TorchLoader.__init__).parameters) - {"self"}
    fixed = {"dataset", *(name for name, rule in RULES.items() if rule.is_fixed)}
    assert set(option_names(DataLoader)) - {"stall_report_s"} == fixed
    assert theirs <= fixed
    loader = DataLoader(list(range(8)), 4, shuffle=False) if kind == "torch" else DataLoader(dataset, 4)
    for name in fixed:
        with pytest.raises(ValueError, match=f"^{name}: it is fixed when a loader is made"):
            setattr(loader, name, 1)
    for name, way in (("epoch", r"set_epoch\(3\)"), ("seed", r"seed\(3\)")):
        with pytest.raises(ConfigError, match=f"^{name}: it cannot be set; call loader.{way}"):
            setattr(loader, name, 3)
    loader.stall_report_s = 5.0
    loader.note_of_mine = "kept"
    assert (loader.stall_report_s, loader.note_of_mine, loader.num_workers) == (5.0, "kept", 0)
    assert len(list(loader)) == len(loader)
