"""Options by name: misspelt ones, torch's, and those that belong elsewhere get a true answer."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from shard_tools import ShardWriter
from streaming import (
    Broadcast,
    DataLoader,
    DeviceMeshFetcher,
    DeviceMeshSampler,
    DevicePrefetcher,
    OrdinaryDataset,
    RemoteGroup,
    RetrySampler,
    SequenceSlice,
    ShuffleConfig,
    StageFields,
    StreamingDataset,
)
from streaming.common.arguments import option_names
from streaming.errors import ConfigError, OptionError
from streaming.others.torch_datasets.map_style import MapLoop
from tests.support.sets.data_sets import write_set


class Squares:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    return write_set(tmp_path_factory.mktemp("options"), (10, 7)).open()


@pytest.mark.parametrize(
    ("owner", "wrong", "right"),
    [
        (DataLoader, "bach_size", "batch_size"), (DataLoader, "numworkers", "num_workers"),
        (StreamingDataset, "cachedir", "cache_dir"), (ShuffleConfig, "windows", "window"),
        (DeviceMeshFetcher, "batchsize", "batch_size"), (DeviceMeshSampler, "shufle", "shuffle"),
        (RetrySampler, "max_retry", "max_retries"), (DevicePrefetcher, "devise", "device"),
        (StageFields, "frist", "first"), (SequenceSlice, "field", "fields"), (Broadcast, "timeout", "timeout_s"),
        (RemoteGroup, "nam", "name"), (ShardWriter, "max_byte", "max_bytes"),
    ],
)  # fmt: skip
def test_a_misspelt_option_says_which_was_meant(owner: Any, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"^{owner.__name__}: no option '{wrong}'; did you mean '{right}'") as caught:
        owner("x", **{wrong: 1})
    assert isinstance(caught.value, OptionError)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (DataLoader, "fields", r"StreamingDataset\(…, fields=…\)"), (DataLoader, "rank", r"DeviceMesh.from_sizes"),
        (StreamingDataset, "batch_size", r"DataLoader\(dataset, batch_size=…\)"),
        (StreamingDataset, "local", "cache_dir="),
        (StreamingDataset, "batchsize", r"did you mean 'batch_size'\? .*DataLoader\(dataset, batch_size=…\)"),
        (StreamingDataset, "handler", "on_error="), (DataLoader, "seed", r"OrdinaryDataset\(dataset, seed=…\)"),
        (DataLoader, "on_error", r"StreamingDataset\(…, on_error=…\).* OrdinaryDataset\(dataset, on_error=…\)"),
        (DataLoader, "max_bad_samples", "OrdinaryDataset"), (DataLoader, "max_retries", '"deadline_s": …'),
        (DataLoader, "sharding", r"OrdinaryDataset\(dataset, sharding=…\)"),
        (DataLoader, "zzz", "there are dataset, batch_size, "),
    ],
)  # fmt: skip
def test_an_option_that_lives_elsewhere_says_where(owner: Any, name: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        owner("x", **{name: 1})


def test_every_option_of_torch_is_a_named_argument_of_ours() -> None:
    torchs = inspect.signature(torch.utils.data.DataLoader).parameters
    ours = inspect.signature(DataLoader).parameters
    assert set(torchs) - set(ours) == set()
    assert [one for one in ours.values() if one.kind is one.VAR_KEYWORD] == []
    assert [one.name for one in list(ours.values())[2:] if one.default is one.empty] == []
    assert option_names(DataLoader)[:2] == ("dataset", "batch_size")
    assert {name for name in ours if f" {name}:" not in str(DataLoader.__doc__)} == set(), "undocumented"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("sampler", [1], "deals out the samples itself"), ("batch_sampler", [[1]], "DeviceMeshSampler"),
        ("generator", torch.Generator(), "initial_seed"), ("pin_memory_device", "cuda", "DevicePrefetcher"),
        ("in_order", False, "state_dict"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["streamed", "ordinary"])
def test_what_no_data_set_can_have_is_explained(
    dataset: StreamingDataset, kind: str, option: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: .*{words}"):
        DataLoader(dataset if kind == "streamed" else Squares(), 2, **{option: value})


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("shuffle", False, r"this one has shuffle=True; write StreamingDataset\(…, shuffle=False\)"),
        ("persistent_workers", False, r"loader\.close\(\)"),
        ("timeout", 5, 'stall_report_s=.*{"deadline_s": …}'),
        ("multiprocessing_context", "fork", "fork server"),
    ],
)  # fmt: skip
def test_a_streaming_dataset_explains_what_is_chosen_elsewhere(
    dataset: StreamingDataset, option: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: .*{words}"):
        DataLoader(dataset, 2, num_workers=1, **{option: value})


def test_torchs_names_pass_where_they_say_what_holds_anyway(dataset: StreamingDataset) -> None:
    with DataLoader(
        dataset, 2, shuffle=True, persistent_workers=True, timeout=0, in_order=True,
        pin_memory_device="", sampler=None, batch_sampler=None, generator=None, worker_init_fn=None,
        multiprocessing_context=None,
    ) as loader:  # fmt: skip
        assert len(list(loader)) == 8


@pytest.mark.parametrize(("drop_last", "batches"), [(True, 4), (False, 5), (None, 4)])
@pytest.mark.parametrize("kind", ["streamed", "ordinary"])
def test_drop_last_is_torchs(dataset: StreamingDataset, kind: str, drop_last: bool | None, batches: int) -> None:
    data: Any = dataset if kind == "streamed" else Squares()
    size = 4 if kind == "streamed" else 2
    expected = batches if kind == "streamed" else 5
    with DataLoader(data, size, drop_last=drop_last) as loader:
        assert len(loader) == expected
        assert len(list(loader)) == expected
    with pytest.raises(ConfigError, match="contradict"):
        DataLoader(data, size, drop_last=True, last_batch="partial")
    with pytest.raises(ConfigError, match="drop_last: expected True or False"):
        DataLoader(data, size, drop_last=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("shuffle", True),
        ("on_error", "raise"),
        ("max_retries", 1),
        ("max_bad_samples", 1),
        ("persistent_workers", True),
    ],
)
def test_an_iterable_data_set_explains_what_it_cannot_have(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: .*iterable data set"):
        DataLoader(OrdinaryDataset(Stream(), **{option: value}), 2)
    DataLoader(Stream(), 2, shuffle=False).close()
    with pytest.raises(ConfigError, match=r"^sharding: .*map-style"):
        DataLoader(OrdinaryDataset(Squares(), sharding="self"), 2)
    with pytest.raises(ConfigError, match=r"^shuffle: .*OrdinaryDataset.* contradict"):
        DataLoader(OrdinaryDataset(Squares(), shuffle=True), 2, shuffle=False)


def test_ordinary_data_sets_take_torchs_options() -> None:
    with DataLoader(Squares(), 5, shuffle=False, num_workers=0) as plain:
        assert torch.cat(list(plain)).tolist() == [number**2 for number in range(10)]
    started: Any = multiprocessing.get_context("fork").Value("i", 0)

    def note(_number: int) -> None:
        with started.get_lock():
            started.value += 1

    options: dict[str, Any] = {"num_workers": 2, "worker_init_fn": note, "timeout": 60, "persistent_workers": False}
    with DataLoader(Squares(), 5, multiprocessing_context=multiprocessing.get_context("fork"), **options) as loader:
        for _ in range(2):
            assert sorted(torch.cat(list(loader)).tolist()) == [number**2 for number in range(10)]
        assert isinstance(loader._loop, MapLoop)
    assert started.value == 4, "two for each epoch: they do not stay"
    for wrong in (
        {"timeout": 3}, {"timeout": -1}, {"worker_init_fn": 3}, {"worker_init_fn": print}, {"persistent_workers": 1},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DataLoader(Squares(), 5, **wrong)


def test_numbers_of_numpy_are_numbers(dataset: StreamingDataset, tmp_path: Path) -> None:
    assert dataset[np.int64(3)]["cls"] == dataset[3]["cls"] == dataset[np.uint8(3)]["cls"]
    wide: dict[str, Any] = {
        "num_workers": np.int32(0), "num_threads": np.int8(1), "prefetch_factor": np.uint8(2),
        "epoch_size": np.int64(8), "memory_limit": np.int64(1 << 30), "stall_report_s": np.float32(60),
        "agreement_timeout": np.int64(3),
    }  # fmt: skip
    with DataLoader(dataset, np.int64(4), **wide) as loader:
        assert len(list(loader)) == 2
        assert type(loader.global_batch_size) is int
        assert type(loader.state_dict()["epoch_size"]) is int
    options: dict[str, Any] = {"seed": np.int64(1), "max_bad_samples": np.int64(3)}
    assert StreamingDataset(dataset.source.shards.urls, **options).source.max_bad_samples == 3
    assert StreamingDataset(dataset.source.shards.urls, max_bad_samples=np.float32(0.5)).source.max_bad_samples == 0.5
    sampler = DeviceMeshSampler(np.int64(10), np.int64(2), seed=np.uint64(3), epoch_size=np.int64(6))
    assert [type(value) for value in sampler.state_dict().values() if isinstance(value, np.generic)] == []
    assert len(list(RetrySampler(sampler, Squares(), max_bad_samples=np.int64(3), backoff_s=np.float64(0)))) == 3
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", max_samples=np.int64(2), max_bytes=np.int64(10**6)) as writer:
        for number in np.arange(3):
            writer.write({"__key__": f"{number}", "cls": number})
    assert [sample["cls"] for sample in (StreamingDataset(tmp_path)[number] for number in np.arange(3))] == [0, 1, 2]
