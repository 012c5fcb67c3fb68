"""The tail of an epoch: the same number of batches on every rank, each one well formed, with an index and without."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate as torch_collate

from streaming import DataLoader, DeviceMeshFetcher, DeviceMeshSampler, OrdinaryDataset, RetrySampler
from streaming.build.batches.collate import without_rows
from streaming.errors import ConfigError, StateError, TooManyBadSamplesError
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set

RANKS = 4
EPOCH = 98
"""Six batches of 16 and a tail of two: ranks 0 and 2 have no row in it."""


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("indexed"), (40, 40, 18))


@pytest.fixture
def streamed(tmp_path: Path, not_scanned: None) -> SampleSet:
    return write_set(tmp_path / "streamed", (40, 40, 18), indexed=False)


@pytest.fixture(params=["indexed", "streamed"])
def samples(request: pytest.FixtureRequest) -> SampleSet:
    found: SampleSet = request.getfixturevalue(request.param)
    return found


def play(samples: SampleSet, last_batch: str, *, of: dict[str, Any] | None = None, **options: Any) -> list[list[Any]]:
    """All batches of all ranks."""
    ranks = []
    for rank in range(RANKS):
        with DataLoader(
            samples.open(shuffle=False, **(of or {})), global_batch_size=16, epoch_size=EPOCH,
            device_mesh=mesh_of(RANKS, rank), last_batch=last_batch, **options,
        ) as loader:  # fmt: skip
            ranks.append(list(loader))
            assert len(ranks[-1]) == len(loader)
    return ranks


@pytest.mark.parametrize(("last_batch", "num_batches"), [("drop", 6), ("partial", 7), ("pad", 7)])
def test_every_rank_has_as_many_batches_and_each_sample_counts_once(
    samples: SampleSet, last_batch: str, num_batches: int
) -> None:
    ranks = play(samples, last_batch)
    assert [len(batches) for batches in ranks] == [num_batches] * RANKS
    rows = [[len(batch["__key__"]) for batch in batches] for batches in ranks]
    tail = {"drop": [4] * 4, "partial": [0, 1, 0, 1], "pad": [4] * 4}[last_batch]
    assert [counts[-1] for counts in rows] == tail
    assert all(counts[:-1] == [4] * (num_batches - 1) for counts in rows)
    if last_batch == "pad":
        valid = [int(batch["__valid__"].sum()) for batches in ranks for batch in batches]
        assert sum(valid) == EPOCH
        assert [batches[-1]["__valid__"].tolist() for batches in ranks[:2]] == [[False] * 4, [True] + [False] * 3]
    if last_batch == "partial" and samples.url.endswith("indexed0/"):
        assert Counter(key for batches in ranks for batch in batches for key in batch["__key__"]) == Counter(
            samples.keys
        )


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_without_a_row_gets_an_empty_batch_of_the_right_shape(
    samples: SampleSet, num_workers: int, one_fork_server: None
) -> None:
    hands = {"num_workers": num_workers} if num_workers else {"num_threads": 1}
    (first, *_) = play(samples, "partial", **hands)
    last, before = first[-1], first[0]
    assert list(last) == list(before)
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert last[name].shape == (0, *value.shape[1:])
            assert last[name].dtype == value.dtype
        else:
            assert last[name] == []


def drop_first(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Sample 0 and its neighbors are dropped, or unreadable."""
    if sample["cls"] == 0:
        raise ValueError("unreadable")
    return None if sample["cls"] < 12 else sample


def test_sample_0_need_not_be_readable(indexed: SampleSet) -> None:
    first, *_ = play(indexed, "partial", of={"transform": drop_first, "max_bad_samples": 8})
    assert first[-1]["vec.npy"].shape == (0, 4)


def test_where_no_sample_can_be_had_an_error_says_so(indexed: SampleSet) -> None:
    dataset = indexed.open(shuffle=False, transform=lambda _: None)
    state = {"epoch": 0, "samples_seen": 96}
    loader = DataLoader(dataset, global_batch_size=16, device_mesh=mesh_of(RANKS, 0), last_batch="partial")
    with loader:
        loader.load_state_dict({**loader.state_dict(), **state})
        with pytest.raises(TooManyBadSamplesError, match=r"no rows of the last batch.*Transform returns None for them"):
            next(iter(loader))


def no_empty_lists(samples: list[Any]) -> list[Any]:
    assert samples, "never called without samples"
    return samples


@dataclass
class Pair:
    left: torch.Tensor
    names: list[str]


Named = namedtuple("Named", "x y")  # noqa: PYI024  what users have

COLLATE: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], Any], Any]] = {
    "samples": (lambda rows: rows, lambda batch: batch, []),
    "torch's": (lambda rows: torch_collate([(row["vec.npy"], row["cls"]) for row in rows]),
                lambda batch: [tuple(part.shape) for part in batch], [(0, 4), (0,)]),
    "count": (len, lambda batch: batch, 0),
    "a dataclass": (lambda rows: Pair(torch.tensor([row["cls"] for row in rows]), [row["txt"] for row in rows]),
                    lambda batch: (batch.left.tolist(), batch.names), ([], [])),
    "a named tuple": (lambda rows: Named(np.array([row["cls"] for row in rows]), {"t": [row["txt"] for row in rows]}),
                      lambda batch: (type(batch).__name__, batch.x.tolist(), batch.y), ("Named", [], {"t": []})),
    "tokens end to end": (
        lambda rows: {"ids": torch.cat([torch.arange(5) for _ in rows]), "borders": torch.arange(len(rows) + 1) * 5,
                      "scale": torch.tensor(0.5), "kind": "packed"},
        lambda batch: (batch["ids"].tolist(), batch["borders"].tolist(), float(batch["scale"]), batch["kind"]),
        ([], [0], 0.5, "packed"),
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("kind", list(COLLATE))
def test_a_collate_fn_is_never_called_without_samples(samples: SampleSet, kind: str) -> None:
    collate, seen_as, expected = COLLATE[kind]
    first, *_ = play(samples, "partial", collate_fn=lambda rows: collate(no_empty_lists(rows)))
    assert seen_as(first[-1]) == expected
    assert seen_as(first[0]) != expected


def test_what_cannot_be_cut_is_named_with_the_cure(indexed: SampleSet) -> None:
    with pytest.raises(
        ConfigError, match=r"the batch\['x'\] is a object, whose rows cannot be told apart.*last_batch=\"pad\""
    ):
        play(indexed, "partial", collate_fn=lambda _: {"x": object()})


def test_without_rows_leaves_the_sample_alone() -> None:
    sample = {"a": 1, "b": [2]}
    assert without_rows(lambda rows: [row.pop("a") for row in rows], sample) == []
    assert sample == {"a": 1, "b": [2]}


def test_the_fetcher_gives_an_empty_list(indexed: SampleSet) -> None:
    fetcher = DeviceMeshFetcher(
        indexed.open(shuffle=False), global_batch_size=16, device_mesh=mesh_of(RANKS, 0), last_batch="partial"
    )
    with fetcher:
        assert [len(samples) for samples in fetcher] == [4] * 6 + [0]


def test_without_an_index_and_in_order_the_ranks_must_stay(streamed: SampleSet) -> None:
    def open_loader(ranks: int) -> DataLoader:
        return DataLoader(
            streamed.open(shuffle=False), global_batch_size=16, epoch_size=EPOCH, device_mesh=mesh_of(ranks, 0)
        )

    with open_loader(RANKS) as loader:
        state = {**loader.state_dict(), "samples_seen": 32}
        loader.load_state_dict(state)
        assert len(list(loader)) == 4
    with open_loader(2) as loader, pytest.raises(StateError, match="began with 4"):
        loader.load_state_dict(state)


class Numbers(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 0:
            raise ValueError("unreadable")
        return {"x": torch.full((3,), index), "name": f"{index:03d}"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_map_style_resumed_before_the_tail(num_workers: int, one_fork_server: None) -> None:
    def open_loader() -> DataLoader:
        return DataLoader(
            OrdinaryDataset(Numbers(), max_bad_samples=10), global_batch_size=16, device_mesh=mesh_of(RANKS, 0),
            last_batch="partial", shuffle=False, num_workers=num_workers,
        )  # fmt: skip

    with open_loader() as loader:
        state = {**loader.state_dict(), "samples_seen": 96}
    with open_loader() as loader:
        loader.load_state_dict(state)
        (last,) = loader
    assert last["x"].shape == (0, 3)
    assert last["name"] == []


def test_the_sampler_refuses_a_tail_of_which_torch_would_get_an_empty_list() -> None:
    """On every rank alike, at the start of the epoch: torch's loader cannot make a batch of no samples."""
    for rank in range(RANKS):
        mesh = mesh_of(RANKS, rank)
        sampler = DeviceMeshSampler(EPOCH, global_batch_size=16, device_mesh=mesh, last_batch="partial")
        for loop in (sampler, RetrySampler(sampler, Numbers())):
            with pytest.raises(ConfigError, match=r'4 data-parallel ranks would get none of the last 2 samples.*"pad"'):
                next(iter(loop))
    sampler = DeviceMeshSampler(EPOCH + 2, global_batch_size=16, device_mesh=mesh_of(RANKS, 0), last_batch="partial")
    assert [len(rows) for rows in sampler] == [4] * 6 + [1]


def no_samples(path: Path) -> Path:
    """A shard whose members are no samples."""
    with tarfile.open(path, "w") as tar:
        for number in range(3):
            tar.addfile(tarfile.TarInfo(f"README{number}"), io.BytesIO())
    return path


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_streamed_set_without_samples_is_an_error_after_one_pass(
    tmp_path: Path, not_scanned: None, zipped: bool, num_workers: int, one_fork_server: None
) -> None:
    for number in range(3):
        path = no_samples(tmp_path / f"{number}.tar")
        if zipped:
            (tmp_path / f"{number}.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    samples = SampleSet(url=f"{tmp_path}/", keys=())
    with (
        DataLoader(samples.open(), batch_size=4, epoch_size=8, num_workers=num_workers) as loader,
        pytest.raises(ConfigError, match=r"no samples in .* and 2 other shards.*read 3 shards"),
    ):
        next(iter(loader))
