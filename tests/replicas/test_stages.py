"""What pipeline stages and context-parallel peers get; all ranks of a mesh are played in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra import DeviceMesh
from streaming import DataLoader, SequenceSlice, StageFields, StreamingDataset
from streaming.build.batches.portion import Portion
from streaming.errors import ConfigError
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import SampleSet, check_batch, data_gets, write_set

pytestmark = pytest.mark.usefixtures("one_fork_server")

STAGES = StageFields(first=("cls", "txt"), last=("vec.npy",))
TAILS = ["drop", "pad", "partial"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """202 samples in 7 shards and 28 chunks; ``vec.npy`` is a sequence of 4."""
    return write_set(tmp_path_factory.mktemp("stages") / "train")


@pytest.fixture
def dataset(samples: SampleSet) -> StreamingDataset:
    return samples.open(seed=5)


def run(dataset: StreamingDataset, mesh: DeviceMesh, **options: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """The batches of one epoch, and the state after each of them."""
    batches, states = [], []
    with DataLoader(dataset, device_mesh=mesh, global_batch_size=24, **options) as loader:
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
    return batches, states


def mesh(rank: int, **sizes: int) -> DeviceMesh:
    return DeviceMesh.from_sizes(**sizes, rank=rank, environ={})  # type: ignore[arg-type]


def test_a_portion_is_what_it_says() -> None:
    batch = {"x": [1, 2], "y": [3, 4], "__key__": ["a", "b"], "__valid__": [True, False]}
    assert Portion()(batch, 2) is batch
    assert Portion(counts=True)(batch, 2) == batch | {"__num_samples__": 2}
    assert Portion(fields=("x",))(batch, 2) == {name: batch[name] for name in ("x", "__key__", "__valid__")} | {
        "__num_samples__": 2
    }
    assert Portion(fields=())(batch, 2) == {"__num_samples__": 2, "__valid__": [True, False]}


@pytest.mark.parametrize("last_batch", TAILS)
def test_each_stage_gets_what_it_uses(dataset: StreamingDataset, last_batch: str) -> None:
    """Three stages of two data ranks: same counts, masks and states; together the fields that were named."""
    for dp_rank in range(2):
        whole, states = run(dataset, mesh(dp_rank, dp_size=2), last_batch=last_batch)
        for stage in range(3):
            got, own_states = run(
                dataset, mesh(2 * stage + dp_rank, pp_size=3, dp_size=2), last_batch=last_batch, stage_fields=STAGES
            )
            assert own_states == states
            assert len(got) == len(whole)
            always = {"__num_samples__"} | ({"__valid__"} if last_batch == "pad" else set())
            named = [{"cls", "txt", "__key__", "__url__"}, set(), {"vec.npy", "__key__", "__url__"}][stage]
            for batch, full in zip(got, whole, strict=True):
                assert set(batch) == always | named
                assert batch["__num_samples__"] == len(check_batch(full))
                for name in set(batch) - {"__num_samples__"}:
                    same = torch.equal if isinstance(full[name], torch.Tensor) else list.__eq__
                    assert same(batch[name], full[name])


def test_stages_in_between_read_nothing(mini_s3: MiniS3Server) -> None:
    samples = write_set(f"{mini_s3.create_bucket('stages')}/train", storage_options=mini_s3.storage_options)
    dataset = samples.open()
    mini_s3.clear_log()
    got, _ = run(dataset, mesh(1, pp_size=3), stage_fields=STAGES)
    assert [batch["__num_samples__"] for batch in got] == [24] * 8
    assert mini_s3.log() == []
    run(dataset, mesh(2, pp_size=3), stage_fields=STAGES)
    assert data_gets(mini_s3.log(), samples.url)


def test_a_stage_goes_on_where_it_stopped(dataset: StreamingDataset) -> None:
    """Also the stage without data: count, state and end after a resume and after leaving early."""
    middle = mesh(1, pp_size=3)
    with DataLoader(dataset, batch_size=24, device_mesh=middle, stage_fields=STAGES, last_batch="partial") as loader:
        for _, _ in zip(range(3), loader, strict=False):
            pass
        state = loader.state_dict()
        assert len(list(loader)) == 9  # left early: the epoch begins anew
        loader.load_state_dict(state)
        assert [batch["__num_samples__"] for batch in loader] == [24] * 5 + [10]
        assert (loader.epoch, loader.state_dict()["samples_seen"]) == (1, 0)


@pytest.mark.parametrize("sizes", [{"dp_size": 1}, {"pp_size": 1, "tp_size": 2}])
def test_without_a_pipeline_a_rank_gets_both_sets(dataset: StreamingDataset, sizes: dict[str, int]) -> None:
    got, _ = run(dataset, mesh(0, **sizes), stage_fields=STAGES)
    assert set(got[0]) == {"cls", "txt", "vec.npy", "__key__", "__url__", "__num_samples__"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_context_parallel_peers_share_each_sequence(dataset: StreamingDataset, num_workers: int) -> None:
    """The slices put together are the sequence, on threads and through worker processes."""
    wanted = SequenceSlice(fields=("vec.npy",), layout="zigzag", position_ids="at")
    whole, states = run(dataset, mesh(0, dp_size=1), last_batch="partial")
    again = [torch.full_like(batch["vec.npy"], -1) for batch in whole]
    for rank in range(2):
        got, own_states = run(
            dataset, mesh(rank, cp_size=2), last_batch="partial", sequence=wanted, num_workers=num_workers
        )
        assert own_states == states
        for batch, full, out in zip(got, whole, again, strict=True):
            assert batch["__key__"] == full["__key__"]
            assert torch.equal(batch["cls"], full["cls"])
            assert batch["at"].tolist() == [[0, 3], [1, 2]][rank]
            out[:, batch["at"]] = batch["vec.npy"]
    assert all(torch.equal(batch["vec.npy"], out) for batch, out in zip(whole, again, strict=True))


def _with_length(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.zeros(len(samples), 8), "keys": [sample["__key__"] for sample in samples]}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_worker_processes_send_the_portion_only(dataset: StreamingDataset, num_workers: int) -> None:
    """A user's batches are cut before they leave the worker; stage and slice together."""
    options: dict[str, Any] = {
        "collate_fn": _with_length,
        "sequence": SequenceSlice(fields=("x",)),
        "stage_fields": StageFields(first=("x",), last=("keys",)),
        "num_workers": num_workers,
    }
    first, _ = run(dataset, mesh(1, pp_size=2, cp_size=2), **options)
    last, _ = run(dataset, mesh(3, pp_size=2, cp_size=2), **options)
    assert {tuple(batch["x"].shape) for batch in first} == {(24, 4)}
    assert {frozenset(batch) for batch in first} == {frozenset({"x", "__num_samples__"})}
    assert {frozenset(batch) for batch in last} == {frozenset({"keys", "__num_samples__"})}


def test_ranks_without_rows_get_the_same_entries(tmp_path: Path) -> None:
    """Three samples on four ranks with "partial": the rank without rows has empty tensors of the right width."""
    samples = write_set(tmp_path, (7,))
    shapes = set()
    for rank in (0, 2, 4, 6):
        got, _ = run_four(samples.open(shuffle=False), mesh(rank, dp_size=4, cp_size=2))
        shapes.add(tuple(got[-1]["vec.npy"].shape))
        assert got[-1]["__num_samples__"] == len(got[-1]["vec.npy"])
    assert shapes == {(0, 2), (1, 2)}


def run_four(dataset: StreamingDataset, place: DeviceMesh) -> tuple[list[dict[str, Any]], list[Any]]:
    with DataLoader(
        dataset, device_mesh=place, global_batch_size=4, last_batch="partial",
        sequence=SequenceSlice(fields=("vec.npy",)), stage_fields=StageFields(first=("vec.npy",), last=()),
    ) as loader:  # fmt: skip
        return list(loader), []


def _no_dict(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_fields": StageFields(first=("cls", "jpg"), last=())}, "no entry 'jpg'; it has"),
        ({"sequence": SequenceSlice(fields=("txt",))}, "'txt' is a list"),
        (
            {"sequence": SequenceSlice(fields=("cls",)), "collate_fn": _no_dict},
            "got a list; have collate_fn return a dict",
        ),
    ],
)
def test_batches_that_do_not_fit_are_named(dataset: StreamingDataset, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(dataset, mesh(0, cp_size=2), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_fields": ("cls",)}, r"stage_fields: expected a StageFields\(…\)"),
        ({"sequence": "zigzag"}, r"sequence: expected a SequenceSlice\(…\)"),
        ({"sequence": SequenceSlice(fields=("x",))}, "no context-parallel axis by a known name"),
        ({"sequences": 1}, "no option .sequences.; did you mean .sequence."),
    ],
)
def test_options_are_checked(dataset: StreamingDataset, options: dict[str, Any], message: str) -> None:
    place = DeviceMesh.from_ranks([0], ("data",), rank=0)
    with pytest.raises(ConfigError, match=message):
        DataLoader(dataset, 4, device_mesh=place, **options)


def test_what_cannot_go_together(samples: SampleSet) -> None:
    with pytest.raises(ConfigError, match='stage_fields with on_error="skip"'):
        DataLoader(samples.open(on_error="skip"), 4, device_mesh=mesh(0, pp_size=2), stage_fields=STAGES)
    with pytest.raises(ConfigError, match="for a StreamingDataset only"):
        DataLoader(Numbers, 4, device_mesh=mesh(0, pp_size=2), stage_fields=STAGES)


class Numbers:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.int64(index)}

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(8))
