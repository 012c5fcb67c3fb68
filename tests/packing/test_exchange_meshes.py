"""``balance="exchange"`` beside replicas, mixtures, worker processes, in worlds that change: the same global batches.

All ranks of a job are threads of this process, each with its gloo connections and its loader. That processes do it,
and what becomes of them when one is gone, is in test_balance.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from infra import DeviceMesh
from streaming import DataLoader, Mixture, Packed, SequenceSlice, StageFields, StreamingDataset
from streaming.errors import ConfigError
from streaming.order.packing.balance import exchange
from streaming.run.replicas import exchange as exchange_module
from streaming.run.replicas import group as group_module
from tests.support.processes.page_lock_account import Account
from tests.support.programs.exchange_rank import GLOBAL_BATCH, LENGTH, dearness, rows_of
from tests.support.sets.packed_sets import write

LONGEST_S = 60.0
Rows = list[Any]


@dataclass
class Job:
    """Threads that torch.distributed would count as ranks, and the store between them."""

    store: Any = field(default_factory=dist.HashStore)  # type: ignore[attr-defined]
    here: threading.local = field(default_factory=threading.local)

    def run(self, play: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
        """What ``play`` returns of each rank; the first error of any is raised."""
        found: dict[int, Any] = {}
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self.here.rank = rank
            try:
                found[rank] = play(rank)
            except BaseException as error:  # raised below, in the thread of the test
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONGEST_S)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"
        return [found[rank] for rank in ranks]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    found = Job()
    monkeypatch.setattr(group_module, "job_store", lambda _: (found.here.rank, found.store))
    monkeypatch.setattr(exchange_module, "TIMEOUT_S", LONGEST_S / 3)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("exchange")
    for number, name in enumerate(("web", "code")):
        write(target / name, first=100_000 * number, num_docs=400, seed=number)
    return target


def packs_of(folder: Path, **options: Any) -> Packed:
    return Packed(StreamingDataset(folder / "web", seed=3), LENGTH, **options)


def mixture_of(folder: Path) -> Mixture:
    sources = {name: Packed(StreamingDataset(folder / name), LENGTH) for name in ("web", "code")}
    return Mixture(sources, weights={"web": 1, "code": 2}, seed=4)


def loader_of(dataset: Any, mesh: DeviceMesh, **options: Any) -> DataLoader:
    given = {"global_batch_size": GLOBAL_BATCH, "cost": 64, "balance": "exchange", "last_batch": "partial"} | options
    return DataLoader(dataset, device_mesh=mesh, **given)


def taken(loader: Any, most: int = 100) -> list[Any]:
    """Batches up to the end of the epoch; all ranks leave after the same one."""
    return [batch for _, batch in zip(range(most), loader, strict=False)]


def dealt(dataset: Any, world: int, most: int = 100, **options: Any) -> list[list[Rows]]:
    """The batches that each data rank is to get, by the planner alone, of what loaders without balance give."""
    options = {"global_batch_size": GLOBAL_BATCH, "last_batch": "partial"} | options
    ranks: list[list[Rows]] = []
    for rank in range(world):
        mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank)
        with DataLoader(dataset, device_mesh=mesh, **options) as loader:
            ranks.append([rows_of(batch) for batch in taken(loader, most)])
    found: list[list[Rows]] = [[] for _ in range(world)]
    for before in zip(*ranks, strict=True):
        flat = [row for rows in before for row in rows]
        shares = exchange(np.array([dearness(row) for row in flat]), [len(rows) for rows in before])
        for rank, packs in enumerate(shares):
            found[rank].append([flat[pack] for pack in packs.tolist()])
    return found


def test_tokens_of_32_bits_travel_as_they_are(job: Job, tmp_path: Path) -> None:
    """Others travel in 31 bits and a sign, which is half as much."""
    write(tmp_path, first=2**31, num_docs=300)
    packed = Packed(StreamingDataset(tmp_path, seed=3), LENGTH)
    wanted = dealt(packed, 2, most=2)
    assert max(wanted[0][0][0][0]) > 2**31

    def play(rank: int) -> list[Rows]:
        with loader_of(packed, DeviceMesh.from_sizes(dp_size=2, rank=rank, environ={})) as loader:
            return [rows_of(batch) for batch in taken(loader, 2)]

    assert job.run(play, range(2)) == wanted


def test_packs_with_and_without_a_mask_are_exchanged_with_their_labels(job: Job, folder: Path) -> None:
    masks = {"web": "mask", "code": None}
    mix = Mixture({
        name: Packed(StreamingDataset(folder / name), LENGTH, mask_field=mask) for name, mask in masks.items()
    })  # fmt: skip
    wanted = dealt(mix, 2, most=3)

    def play(rank: int) -> list[Rows]:
        with loader_of(mix, DeviceMesh.from_sizes(dp_size=2, rank=rank, environ={})) as loader:
            return [rows_of(batch) for batch in taken(loader, 3)]

    assert job.run(play, range(2)) == wanted


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "shares that differ by one": ({"dp_size": 3}, {}),
    "fewer packs than ranks": ({"dp_size": 3}, {"global_batch_size": 7}),
    "one rank": ({"dp_size": 1}, {}),
    "workers": ({"dp_size": 2}, {"num_workers": 2}),
    "tensor parallel": ({"dp_size": 2, "tp_size": 2}, {}),
    "one reads for others": ({"dp_size": 2, "tp_size": 2}, {"replicate": "broadcast"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.usefixtures("one_fork_server")
def test_each_rank_gets_what_the_planner_deals_and_replicas_the_same(
    folder: Path, job: Job, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, options = MESHES[name]
    shape = {"global_batch_size": options.get("global_batch_size", GLOBAL_BATCH)}
    wanted = dealt(packs_of(folder), sizes["dp_size"], **shape)
    world = int(np.prod(list(sizes.values())))
    exchanged: Counter[int] = Counter()

    def counted(*given: Any) -> list[Any]:
        exchanged[job.here.rank] += 1  # which no thread has but those that ask for batches
        return exchange(*given)

    monkeypatch.setattr(exchange_module, "exchange", counted)

    def play(rank: int) -> tuple[int, list[Rows]]:
        mesh = DeviceMesh.from_sizes(**sizes, rank=rank, environ={})
        with loader_of(packs_of(folder), mesh, **options) as loader:
            left = [rows_of(batch) for batch in taken(loader, 2)]  # an epoch that is left, and begun again
            loader.set_epoch(0)
            batches = [rows_of(batch) for batch in loader]
        assert left == batches[:2]
        return mesh.data_rank, batches

    for data_rank, batches in job.run(play, range(world)):
        assert batches == wanted[data_rank]
    assert len(wanted[0]) > 5
    assert len(exchanged) == (2 if "replicate" in options else world)
    if name != "fewer packs than ranks":  # of which one may have none to deal
        assert len(set(exchanged.values())) == 1, "all are equally far when they leave"


@pytest.mark.usefixtures("one_fork_server")
def test_packs_of_a_mixture_keep_their_source(folder: Path, job: Job) -> None:
    wanted = dealt(mixture_of(folder), 2, most=6, last_batch="drop")

    def play(rank: int) -> list[Rows]:
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=rank, environ={})
        with loader_of(mixture_of(folder), mesh, last_batch="drop", num_workers=1) as loader:
            batches = taken(loader, 6)
        for batch in batches:
            for row, source in zip(batch["input_ids"].tolist(), batch["__source__"], strict=True):
                assert {token > 100_000 for token in row if token} == {source == "code"}
            assert [("code", "web")[number] for number in batch["source_ids"].tolist()] == batch["__source__"]
        return [rows_of(batch) for batch in batches]

    assert job.run(play, range(2)) == wanted


def test_slices_of_the_sequence_are_cut_out_of_what_came(folder: Path, job: Job) -> None:
    wanted = dealt(packs_of(folder), 2)
    names = ("input_ids", "labels", "position_ids", "document_ids")
    slices = SequenceSlice(fields=names, layout="zigzag")

    def play(rank: int) -> list[Any]:
        mesh = DeviceMesh.from_sizes(dp_size=2, cp_size=2, rank=rank, environ={})
        with loader_of(packs_of(folder), mesh, sequence=slices) as loader:
            return [mesh.data_rank, taken(loader)]

    ranks = job.run(play, range(4))
    for data_rank in range(2):
        both = [batches for share, batches in ranks if share == data_rank]
        for one, other, rows in zip(*both, wanted[data_rank], strict=True):
            quarter = LENGTH // 4
            whole = {
                name: torch.cat([one[name][:, :quarter], other[name], one[name][:, quarter:]], dim=1) for name in names
            }
            assert [[whole[name][row].tolist() for name in names] for row in range(len(rows))] == [
                row[:4] for row in rows
            ]
            assert one["__key__"] == other["__key__"] == [row[4] for row in rows]


def test_packs_that_fill_the_last_batch_are_not_counted(folder: Path, job: Job) -> None:
    """Whatever is exchanged or sliced: labels and tokens of all data ranks are those of the epoch, once."""
    slices = SequenceSlice(fields=("input_ids", "labels"), layout="zigzag")
    packed = packs_of(folder, shift_labels=True, ignore_id=-1)

    def play(rank: int) -> tuple[int, list[Any]]:
        mesh = DeviceMesh.from_sizes(dp_size=2, cp_size=2, rank=rank, environ={})
        size = next(n for n in (10, 12, 14, 16) if len(packed) % n > 1)
        with loader_of(packed, mesh, sequence=slices, global_batch_size=size, last_batch="pad") as loader:
            return mesh.data_rank, taken(loader)

    found = job.run(play, range(4))
    assert any(not batch["__valid__"].all() for _, batches in found for batch in batches)
    for _, batches in found:
        assert all((batch["labels"][~batch["__valid__"]] == -1).all() for batch in batches)
    both = [batches for share in range(2) for rank, batches in found if rank == share]
    assert sum(batch["num_tokens"] for batches in both for batch in batches) == 2 * packed.num_tokens
    borne = sum(int((batch["labels"] != -1).sum()) for batches in both for batch in batches)
    assert 2 * borne == sum(batch["num_labels"] for batches in both for batch in batches)


def test_stages_get_their_entries_and_counts_that_agree(folder: Path, job: Job) -> None:
    stages = StageFields(first=("input_ids",), last=("labels",))
    wanted = dealt(packs_of(folder), 2)

    def play(rank: int) -> list[Any]:
        mesh = DeviceMesh.from_sizes(dp_size=2, pp_size=3, rank=rank, environ={})
        with loader_of(packs_of(folder), mesh, stage_fields=stages, last_batch="pad") as loader:
            return [mesh.data_rank, taken(loader)]

    ranks = job.run(play, range(6))
    for data_rank in range(2):
        of_stages = [batches for share, batches in ranks if share == data_rank]
        first, middle, last = sorted(
            of_stages, key=lambda batches: ("labels" in batches[0]) - ("input_ids" in batches[0])
        )
        assert len(first) == len(middle) == len(last) == len(wanted[data_rank])
        for one, none, other, rows in zip(first, middle, last, wanted[data_rank], strict=True):
            assert "input_ids" not in none
            assert one["__key__"] == other["__key__"]
            assert one["__valid__"].equal(none["__valid__"])
            assert one["__valid__"].equal(other["__valid__"])
            assert one["__num_samples__"] == none["__num_samples__"] == other["__num_samples__"]
            if one["__valid__"].all():
                assert one["input_ids"].tolist() == [row[0] for row in rows]
                assert other["labels"].tolist() == [row[1] for row in rows]
        assert not first[-1]["__valid__"].all(), "a tail"


def global_batches(ranks: Sequence[Sequence[Rows]]) -> list[Counter[str]]:
    """What each step holds, whoever has it."""
    return [Counter(str(row) for rows in step for row in rows) for step in zip(*ranks, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [packs_of, mixture_of])
def test_a_state_goes_on_in_another_world_and_remesh_in_the_same_job(
    folder: Path, job: Job, kind: Callable[[Path], Any]
) -> None:
    """Four ranks, then two of them, then three: each world deals the same global batches in its own way."""
    loaders: dict[int, DataLoader] = {}

    def begin(rank: int, world: int) -> DataLoader:
        mesh = DeviceMesh.from_sizes(dp_size=world, rank=rank, environ={})
        return loader_of(kind(folder), mesh, last_batch="drop")

    def three(rank: int) -> tuple[list[Rows], dict[str, Any]]:
        loaders[rank] = begin(rank, 4)
        running: Iterator[Any] = iter(loaders[rank])
        batches = [rows_of(next(running)) for _ in range(3)]
        state = loaders[rank].state_dict()
        next(running)  # handed out, and never committed
        return batches, state

    first = job.run(three, range(4))
    states = [state for _, state in first]
    assert all(state == states[0] for state in states)

    def resumed(rank: int) -> list[Rows]:
        with begin(rank, 2) as loader:
            loader.load_state_dict(states[0])
            return [rows_of(batch) for batch in taken(loader, 2)]

    def remeshed(world: int, at: Any) -> Callable[[int], list[Rows]]:
        def play(rank: int) -> list[Rows]:
            if rank not in loaders:
                loaders[rank] = begin(rank, world)
            loaders[rank].remesh(rank, world, at=at)
            return [rows_of(batch) for batch in taken(loaders[rank], 2)]

        return play

    job.store = dist.HashStore()  # type: ignore[attr-defined]
    wanted = dealt(kind(folder), 2, 5, last_batch="drop")
    assert job.run(resumed, range(2)) == [rank[3:] for rank in wanted]
    for rank in (2, 3):
        loaders.pop(rank).close()
    loaders[0], loaders[1] = loaders[1], loaders[0]  # who stays has another number
    job.store = dist.HashStore()  # type: ignore[attr-defined]
    assert job.run(remeshed(2, 3), range(2)) == [rank[3:] for rank in wanted]
    job.store = dist.HashStore()  # type: ignore[attr-defined]
    after = job.run(remeshed(3, 5), range(3))
    assert after == [rank[5:] for rank in dealt(kind(folder), 3, 7, last_batch="drop")]
    alone = dealt(kind(folder), 1, 7, last_batch="drop")
    assert global_batches([batches for batches, _ in first]) == global_batches(alone)[:3]
    assert global_batches(after) == global_batches(alone)[5:]
    for loader in loaders.values():
        loader.close()


def test_a_new_world_in_the_old_process_group_is_refused(folder: Path, job: Job) -> None:
    def play(rank: int) -> str:
        with loader_of(packs_of(folder), DeviceMesh.from_sizes(dp_size=2, rank=rank, environ={})) as loader:
            next(iter(loader))
            loader.remesh(1 - rank, 2, at=1)
            with pytest.raises(ConfigError) as caught:
                next(iter(loader))
            return str(caught.value)

    for rank, said in enumerate(job.run(play, range(2))):
        assert f"torch.distributed calls this process rank {rank}, but in the mesh it is {1 - rank};" in said
        assert "after remesh(), set up torch.distributed again" in said


def test_exchanged_batches_are_page_locked_and_counted(folder: Path, job: Job) -> None:
    def play(rank: int) -> dict[str, Any]:
        account = Account()
        with loader_of(packs_of(folder), DeviceMesh.from_sizes(dp_size=2, rank=rank, environ={})) as loader:
            loader.page_lock(account)
            for batch in taken(loader, 3):
                tensors = [batch[name] for name in ("input_ids", "labels", "position_ids", "document_ids")]
                assert all(account.holds(tensor) and tensor.dtype is torch.int64 for tensor in tensors)
            return loader.metrics()

    for numbers in job.run(play, range(2)):
        assert numbers["exchange_s"] > 0
        # At most all packs of three batches: four int32 a token, and some for keys and headers.
        assert 0 < numbers["exchanged_bytes"] < 3 * GLOBAL_BATCH // 2 * (16 * LENGTH + 4096)
