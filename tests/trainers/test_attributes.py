"""What trainers look at on a loader that is not theirs."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils.data import BatchSampler, default_collate

from infra import DeviceMesh
from streaming import DataLoader, DevicePrefetcher, TorchIterable, as_torch, one_behind
from streaming.errors import ConfigError
from tests.support.sets.data_sets import SampleSet, write_set

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("attributes") / "set", (12, 20, 16))


@pytest.mark.usefixtures("one_fork_server")
def test_torchs_attributes_by_torchs_names(samples: SampleSet) -> None:
    dataset = samples.open()
    stateful = importlib.import_module("torch.distributed.checkpoint.stateful")  # a second, where nothing else needs it
    for rank, share in enumerate((2, 2, 3)):
        mesh = DeviceMesh.from_sizes(dp_size=3, rank=rank)
        loader = DataLoader(dataset, global_batch_size=7, device_mesh=mesh, prefetch_factor=3, last_batch="partial")
        assert (loader.batch_size, len(loader), loader.dataset) == (share, 7, dataset)
        assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (0, None, False)
        assert (loader.collate_fn, loader.drop_last) == (None, False)
        assert isinstance(loader, stateful.Stateful)
    assert DataLoader(dataset, 4, drop_last=False).drop_last is False
    assert DataLoader(dataset, 4, drop_last=False).sampler.drop_last is False
    as_torch_has_them = {"prefetch_factor": None, "persistent_workers": False, "timeout": 0, "worker_init_fn": None}
    assert DataLoader(dataset, 4, **as_torch_has_them, multiprocessing_context=None).prefetch_factor is None
    ordinary = DataLoader(list(range(10)), 4, num_workers=2, collate_fn=default_collate)
    assert (ordinary.batch_size, ordinary.num_workers, ordinary.drop_last) == (4, 2, True)
    assert ordinary.prefetch_factor == 2
    assert ordinary.collate_fn is default_collate


@pytest.mark.parametrize("kind", ["streaming", "ordinary"])
def test_the_sampler_passes_the_epoch_on_and_gives_no_indices(samples: SampleSet, kind: str) -> None:
    loader = DataLoader(samples.open() if kind == "streaming" else list(range(48)), 6)
    loader.sampler.set_epoch(4)
    assert loader.epoch == 4
    assert (len(loader.batch_sampler), loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (8, 6, True)
    again = torch.utils.data.DataLoader(
        list(range(48)), batch_sampler=BatchSampler(loader.sampler, 2, drop_last=False)
    )  # as programs do that deal samples out themselves
    with pytest.raises(ConfigError, match="already split over the ranks"):
        next(iter(again))


def test_what_has_dealt_its_samples_out_is_no_data_set(samples: SampleSet) -> None:
    """It was taken for an iterable data set: on several ranks, whose shares were cut into shares once more."""
    loader = DataLoader(samples.open(), 4)
    of_torch = torch.utils.data.DataLoader(list(range(8)), 4)
    for wrong in (
        loader,
        DevicePrefetcher(loader, device="cpu"),
        one_behind(loader),
        as_torch(loader),
        of_torch,
        lambda: loader,
    ):
        with pytest.raises(
            ConfigError,
            match=r"split over the ranks and would be split again. Give its data set: DataLoader\(loader.dataset",
        ):
            DataLoader(wrong, 4)
    for several in ([samples.open(), samples.open()], (samples.open(),)):
        with pytest.raises(ConfigError, match=r"name them and mix them, by size or with weights=: Mixture\("):
            DataLoader(several, 4)


def test_a_loader_is_no_data_set_for_torchs(samples: SampleSet) -> None:
    """It ended in "'DataLoader' object is not subscriptable"."""
    with (
        DataLoader(samples.open(), 4) as loader,
        pytest.raises(ConfigError, match=r"iterate over it directly, or give"),
    ):
        next(iter(torch.utils.data.DataLoader(loader)))
    assert len(list(torch.utils.data.DataLoader(TorchIterable(loader.dataset), batch_size=None))) == 48


def test_a_loader_without_a_batch_size_says_what_to_give(samples: SampleSet) -> None:
    with pytest.raises(ConfigError, match=r"batch_size \(samples per data-parallel rank\) and global_batch_size"):
        DataLoader(samples.open())
