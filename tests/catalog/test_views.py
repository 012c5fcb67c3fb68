"""``dataset[a:b]`` and ``take``: ranges of a data set that are data sets."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra import DeviceMesh
from streaming import DataLoader, StreamingDataset
from streaming.errors import ConfigError, IndexMissingError, StateError
from streaming.shards.index.layout import samples_path
from tests.support.sets.data_sets import SampleSet, write_set

SIZES = (11, 3, 9)
TOTAL = sum(SIZES)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("views"), SIZES)


@pytest.fixture(scope="module")
def no_tables(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """Without sample tables: chunks are all that is known."""
    folder = tmp_path_factory.mktemp("no-tables")
    made = write_set(folder, SIZES)
    for number in range(len(SIZES)):
        (folder / samples_path(f"{number:06d}.tar")).unlink()
    return made


def keys_of(dataset: StreamingDataset, *, ranks: int = 1, epochs: int = 1, **options: Any) -> list[str]:
    found = []
    for rank in range(ranks):
        mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=rank)
        chosen = {"global_batch_size": 2 * ranks, "last_batch": "pad", **options}
        with DataLoader(dataset, device_mesh=mesh, **chosen) as loader:
            for _ in range(epochs):
                for batch in loader:
                    valid = batch["__valid__"].tolist()
                    found += [key for key, is_valid in zip(batch["__key__"], valid, strict=True) if is_valid]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("tables", [True, False])
def test_a_view_is_what_a_list_would_give(samples: SampleSet, no_tables: SampleSet, tables: bool) -> None:
    made = samples if tables else no_tables
    dataset, keys = made.open(), list(made.keys)
    assert (dataset.source.slices is not None) is tables
    bounds = [None, 0, 1, 4, 10, 11, 13, 14, 17, TOTAL, TOTAL + 5, -1, -9]
    for first, stop in itertools.product(bounds, bounds):
        view, expected = dataset[first:stop], keys[first:stop]
        assert len(view) == len(expected)
        assert [view[number]["__key__"] for number in range(0, len(view), 4)] == expected[::4]
        with pytest.raises(IndexError):
            view[len(view)]
    assert [sample["__key__"] for sample in dataset[5:18][-6:4]] == []
    assert [sample["__key__"] for sample in dataset[5:18][3:][:4]] == keys[8:12]
    assert [sample["__key__"] for sample in dataset[np.int64(2) : np.int64(4)]] == keys[2:4]


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_view_is_read_exactly_once(
    samples: SampleSet, no_tables: SampleSet, tables: bool, shuffle: bool, ranks: int
) -> None:
    made = samples if tables else no_tables
    dataset = made.open(shuffle=shuffle)
    for first, stop in ((0, 5), (5, 7), (10, 15), (2, TOTAL), (0, TOTAL)):
        found = keys_of(dataset[first:stop], ranks=ranks)
        assert sorted(found) == sorted(made.keys[first:stop])
        assert shuffle or ranks > 1 or found == list(made.keys[first:stop])


def test_parts_make_the_whole(samples: SampleSet) -> None:
    dataset = samples.open()
    assert sorted(keys_of(dataset[:9]) + keys_of(dataset[9:])) == sorted(samples.keys)
    assert keys_of(dataset[:]) == keys_of(dataset)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_view_has_a_state_of_its_own(samples: SampleSet, num_workers: int, one_fork_server: None) -> None:
    dataset = samples.open(transform=dict)
    options: dict[str, Any] = {"batch_size": 2, "num_workers": num_workers, "last_batch": "partial"}
    with DataLoader(dataset[3:20], **options) as loader:
        whole = [batch["__key__"] for batch in loader]
    with DataLoader(dataset[3:20], **options) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
    with DataLoader(dataset[3:20], **options) as loader:
        loader.load_state_dict(state)
        assert [batch["__key__"] for batch in loader] == whole[3:]
    for other in (dataset, dataset[3:19], dataset[4:21]):
        with DataLoader(other, **options) as loader, pytest.raises(StateError, match="another data set"):
            loader.load_state_dict(state)


def test_a_sample_that_cannot_be_read_is_replaced_by_one_of_the_view(samples: SampleSet) -> None:
    bad = samples.keys[6]

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == bad:
            raise ValueError("no")
        return sample

    view = samples.open(transform=transform, max_bad_samples=5)[5:8]
    with DataLoader(view, 3) as loader:
        (batch,) = loader
        (entry,) = loader.metrics()["bad"]
    assert set(batch["__key__"]) == {samples.keys[5], samples.keys[7]}
    assert entry["key"] == bad


@pytest.mark.parametrize("tables", [True, False])
def test_an_empty_view_has_no_spans(samples: SampleSet, no_tables: SampleSet, tables: bool) -> None:
    view = (samples if tables else no_tables).open()[5:5]
    firsts, begins = view.source.span_borders(np.zeros(0, np.int64))
    assert (firsts.tolist(), begins.tolist()) == ([], [])
    assert firsts.dtype == begins.dtype == np.int64


def test_take_is_the_beginning(samples: SampleSet) -> None:
    dataset = samples.open()
    assert [sample["__key__"] for sample in dataset.take(4)] == list(samples.keys[:4])
    assert len(dataset.take(1000)) == TOTAL
    assert list(dataset.take(0)) == []
    for wrong in (-1, "3", 2.0):
        with pytest.raises(ConfigError, match="take"):
            dataset.take(wrong)  # type: ignore[arg-type]


def test_views_travel(samples: SampleSet) -> None:
    view = samples.open()[4:9]
    for other in (pickle.loads(pickle.dumps(view)), copy.copy(view)):
        assert [sample["__key__"] for sample in other] == list(samples.keys[4:9])


def test_a_view_of_what_cannot_be_viewed(samples: SampleSet, tmp_path: Path, not_scanned: None) -> None:
    with pytest.raises(ConfigError, match="step"):
        samples.open()[::-2]
    with pytest.raises(ConfigError, match="no samples"):
        DataLoader(samples.open()[2:2], 1)
    streamed = write_set(tmp_path, (5,), indexed=False).open()
    for look in (lambda: streamed[:2], lambda: streamed.take(2)):
        with pytest.raises(IndexMissingError, match="shard_tools index"):
            look()
