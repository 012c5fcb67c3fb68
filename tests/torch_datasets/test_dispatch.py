"""One rank iterates a data set and deals its samples out. The ranks are threads here, but for the last test."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from infra import DeviceMesh
from streaming import Broadcast, DataLoader, OrdinaryDataset, StageFields
from streaming.errors import ConfigError, ReplicaError
from tests.support.code.folders import PROGRAMS
from tests.support.processes.forked import Forked
from tests.support.processes.leftovers import leftovers
from tests.support.processes.played_ranks import Play, played
from tests.support.processes.waiting import until

SIZE = 8
ALONE = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})

pytestmark = pytest.mark.usefixtures("one_fork_server")


class Numbers(IterableDataset[dict[str, int]]):
    """1000 * epoch + 0, 1, 2, …, as a cursor gives them; counts what was read, and in which threads."""

    def __init__(self, size: int, *, rotten: int | None = None) -> None:
        self.size, self.rotten, self.epoch = size, rotten, 0
        self.num_read, self.threads = 0, set[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        random.random()  # draws, as data sets do
        for number in range(self.size):
            if number == self.rotten:
                raise LookupError(f"row {number} is rotten")
            self.num_read += 1
            self.threads.add(threading.get_ident())
            yield {"id": 1000 * self.epoch + number}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """See ``played``; nothing is left behind: no thread, no connection, no process."""
    before = leftovers()
    yield played(monkeypatch)
    # Torch's worker processes, and their descriptors, may end a moment later.
    until(lambda: leftovers() - before == {}, "nothing is left behind", details=lambda: leftovers() - before)


def loader_of(dataset: Any, mesh: DeviceMesh, **options: Any) -> DataLoader:
    chosen = {"global_batch_size": SIZE, "replicate": Broadcast(timeout_s=60), **options}
    own = {name: chosen.pop(name) for name in ("seed", "sharding") if name in chosen}
    return DataLoader(OrdinaryDataset(dataset, **{"sharding": "dispatch", **own}), device_mesh=mesh, **chosen)


def alone(dataset: Any, **options: Any) -> DataLoader:
    return loader_of(dataset, ALONE, sharding="auto", replicate="read", **options)


def ids(batch: Any) -> list[int]:
    """Those that are valid."""
    return batch["id"][batch.get("__valid__", torch.ones(len(batch["id"]), dtype=torch.bool))].tolist()


def row_slice(rows: list[int], rank: int, ranks: int) -> list[int]:
    return rows[len(rows) * rank // ranks : len(rows) * (rank + 1) // ranks]


def test_each_rank_describes_what_it_waits_for(play: Play) -> None:
    def run(mesh: DeviceMesh) -> str:
        with loader_of(Numbers(25), mesh) as loader:
            batches = iter(loader)
            next(batches)
            return loader.describe()

    reader, other = play(run, dp_size=2)
    assert "Numbers in 0 torch worker processes, or the consumer" in reader
    assert "not running" not in other


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
def test_every_sample_is_read_once_and_reaches_one_data_rank(play: Play, last_batch: str, num_workers: int) -> None:
    """Three data ranks of two peers over 25 samples, two epochs; the tail of one sample leaves two ranks without."""
    sets = [Numbers(25) for _ in range(6)]

    def run(mesh: DeviceMesh) -> Any:
        options: dict[str, Any] = {"last_batch": last_batch, "num_workers": num_workers}
        with loader_of(sets[mesh.rank], mesh, **options) as loader:
            return [[(ids(batch), len(batch["id"]), loader.state_dict()) for batch in loader] for _ in range(2)]

    got = play(run, dp_size=3, tp_size=2)
    with alone(Numbers(25), last_batch=last_batch, num_workers=num_workers) as loader:
        expected = [[(ids(batch), loader.state_dict()) for batch in loader] for _ in range(2)]
    for rank, epochs in enumerate(got):
        for epoch, whole in zip(epochs, expected, strict=True):
            assert [rows for rows, _, _ in epoch] == [row_slice(rows, rank // 2, 3) for rows, _ in whole]
            assert [state for _, _, state in epoch] == [state for _, state in whole]
            if last_batch == "pad":
                assert {size for _, size, _ in epoch} == {3}
    delivered = sorted(number for epochs in got[::2] for epoch in epochs for rows, _, _ in epoch for number in rows)
    kept = range(24 if last_batch == "drop" else 25)
    assert delivered == [1000 * epoch + number for epoch in range(2) for number in kept]
    assert [one.num_read for one in sets] == [0 if num_workers else 50, 0, 0, 0, 0, 0]


def test_states_fit_any_number_of_ranks(play: Play) -> None:
    """Saved on two ranks after each batch, gone on with on three and in one process that is cut as usual."""

    def save(mesh: DeviceMesh) -> list[Any]:
        with loader_of(Numbers(40), mesh) as loader:
            return [loader.state_dict() for _ in loader]

    states, others = play(save, dp_size=2)
    assert states == others
    assert json.loads(json.dumps(states)) == states
    for number, state in enumerate(states, 1):
        rest = [list(range(8 * k, 8 * k + 8)) for k in range(number, 5)]
        rest += [[1000 + i for i in range(8 * k, 8 * k + 8)] for k in range(5)]

        def go_on(mesh: DeviceMesh, state: Any = state) -> list[list[int]]:
            with loader_of(Numbers(40), mesh) as loader:
                loader.load_state_dict(state)
                return [ids(batch) for _ in range(2) for batch in loader]

        if number in {2, 5}:
            for rank, got in enumerate(play(go_on, dp_size=3)):
                assert got == [row_slice(rows, rank, 3) for rows in rest]
        with alone(Numbers(40)) as loader:
            loader.load_state_dict(state)
            assert [ids(batch) for _ in range(2) for batch in loader] == rest


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_endless_stream_goes_on_behind_an_epoch_that_all_left(play: Play, num_workers: int) -> None:
    """With ``epoch_size``: what was read ahead is delivered in the next epoch, and nothing is read twice."""
    sets = [Numbers(1000), Numbers(1000)]

    def run(mesh: DeviceMesh) -> Any:
        with loader_of(sets[mesh.rank], mesh, epoch_size=40, num_workers=num_workers) as loader:
            return [[ids(batch) for batch in islice(loader, stop)] for stop in (2, 99, 1, 99)]

    for rank, got in enumerate(play(run, dp_size=2)):
        assert [len(epoch) for epoch in got] == [2, 5, 1, 5]
        rows = [row_slice(list(range(8 * k, 8 * k + 8)), rank, 2) for k in range(13)]
        assert [batch for epoch in got for batch in epoch] == rows
    assert [one.num_read for one in sets] == [0 if num_workers else 13 * 8, 0]


def test_an_older_state_of_an_endless_stream_is_gone_on_from(play: Play) -> None:
    """In the loader that is ahead of it: of what that read last nothing is of use."""

    def run(mesh: DeviceMesh) -> list[Any]:
        with loader_of(Numbers(1000), mesh, epoch_size=80) as loader:
            found = [(ids(batch), loader.state_dict()) for batch in islice(loader, 6)]
            loader.load_state_dict(json.loads(json.dumps(found[0][1])))
            assert [ids(batch) for batch in islice(loader, 5)] == [rows for rows, _ in found[1:]]
            return found[5][0]

    assert play(run, dp_size=2) == [list(range(40, 44)), list(range(44, 48))]


def test_reading_is_bounded_and_runs_in_the_thread_that_asks(play: Play) -> None:
    """Connections of many libraries work in one thread only; and no thread draws beside the training."""
    dataset = Numbers(400)

    def run(mesh: DeviceMesh) -> int | None:
        with loader_of(dataset if mesh.rank == 0 else Numbers(0), mesh) as loader:
            for number, _ in enumerate(loader, 1):
                if mesh.rank == 0:  # two batches ahead: one that travels, one that tells which is the last
                    assert dataset.num_read <= SIZE * (number + 2)
        return threading.get_ident() if mesh.rank == 0 else None

    assert {play(run, dp_size=2)[0]} == dataset.threads


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_set_reaches_every_rank(play: Play, num_workers: int) -> None:
    def run(mesh: DeviceMesh) -> tuple[int, str]:
        with loader_of(Numbers(99, rotten=20), mesh, num_workers=num_workers) as loader:
            batches = []
            with pytest.raises(LookupError, match="row 20 is rotten") as caught:
                batches.extend(loader)
            return len(batches), "\n".join(getattr(caught.value, "__notes__", []))

    (mine, _), *others = play(run, dp_size=3)
    assert mine <= 2
    for number, notes in others:
        assert number == mine
        assert "raised on rank 0, which reads for this one" in notes


def test_a_rank_without_a_sample_in_an_empty_set(play: Play) -> None:
    assert play(lambda mesh: list(loader_of(Numbers(3), mesh)), dp_size=2) == [[], []]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_alone_is_named(play: Play, leaver: int) -> None:
    gone = threading.Event()

    def run(mesh: DeviceMesh) -> str:
        with loader_of(Numbers(400), mesh) as loader:
            batches = iter(loader)
            next(batches)
            if mesh.rank == leaver:
                batches.close()
                gone.set()
                return "left"
            assert gone.wait(60)
            with pytest.raises(ReplicaError) as caught:
                for _ in batches:
                    pass
            return str(caught.value)

    got = play(run, dp_size=3)
    assert got.pop(leaver) == "left"
    assert all(message.startswith(f"rank {leaver} left its loop before batch") for message in got)


def test_a_rank_that_never_comes_is_an_error_in_time(play: Play) -> None:
    def run(mesh: DeviceMesh) -> str:
        if mesh.rank == 1:
            return ""
        late = Broadcast(timeout_s=0.5)
        with loader_of(Numbers(40), mesh, replicate=late) as loader, pytest.raises(ReplicaError) as caught:
            next(iter(loader))
        return str(caught.value)

    assert play(run, dp_size=2)[0].startswith("the ranks (0, 1) of the mesh did not all begin to iterate within 0.5 s")


def test_what_cannot_be_is_said(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, rank=0, environ={})
    with pytest.raises(ConfigError, match="for a StreamingDataset only"):
        loader_of(Numbers(40), mesh, stage_fields=StageFields(first=("id",), last=("id",)))
    with pytest.raises(ConfigError, match=r'replicate= also goes with sharding="dispatch"'):
        loader_of(Numbers(40), mesh, sharding="auto")
    loader_of(Numbers(40), mesh, num_workers=3).close()
    assert "one worker process iterates the data set, of num_workers=3" in caplog.text

    def collate(samples: list[dict[str, int]]) -> dict[str, set[int]]:
        return {"ids": {sample["id"] for sample in samples}}

    def run(mesh: DeviceMesh) -> str:
        with loader_of(Numbers(40), mesh, collate_fn=collate) as loader, pytest.raises(ConfigError) as caught:
            next(iter(loader))
        return str(caught.value)

    for message in play(run, dp_size=2):
        assert "['ids'] is a builtins.set, which cannot be sent to other ranks" in message
    codec = Broadcast(encode=lambda batch: sorted(batch["ids"]), decode=lambda rows: {"ids": set(rows)}, timeout_s=60)

    def coded(mesh: DeviceMesh) -> list[Any]:
        with loader_of(Numbers(8), mesh, collate_fn=collate, replicate=codec) as loader:
            return list(loader)

    assert play(coded, dp_size=2) == [[{"ids": set(range(4))}], [{"ids": set(range(4, 8))}]]


def test_several_ranks_need_torch_distributed() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, rank=1, environ={})
    with loader_of(Numbers(40), mesh) as loader, pytest.raises(ConfigError) as caught:
        next(iter(loader))
    assert str(caught.value).startswith(
        'sharding="dispatch" needs torch.distributed: call torch.distributed.init_process_group'
    )


def test_two_processes_deal_and_a_killed_reader_is_named(tmp_path: Path, forked: Forked) -> None:
    """Two processes under gloo: two epochs that differ, an error in the data set, a reader that is killed."""
    output = tmp_path / "output"
    ranks = forked.start_ranks(PROGRAMS / "dispatch_rank.py", str(tmp_path), world_size=2, output=output)
    assert [rank.wait() for rank in ranks] == [17, 0], output.read_text()[-6000:]
    got = [json.loads((tmp_path / f"got-{rank}.json").read_text()) for rank in range(2)]
    first, second = zip(*(one["epochs"] for one in got), strict=True)
    for number, epoch in enumerate((first, second)):
        assert [len(batches) for batches in epoch] == [5, 5]
        whole = [a + b for a, b in zip(*epoch, strict=True)]
        assert sorted(row for batch in whole for row in batch) == [1000 * number + i for i in range(37)]
    assert [[number % 1000 for number in batch] for batch in first[0]] != [
        [number % 1000 for number in batch] for batch in second[0]
    ]
    assert [one["error"] for one in got] == ["LookupError: row 20 is rotten"] * 2
    killed = (tmp_path / "killed.txt").read_text()
    assert killed.startswith("ReplicaError: rank 0, which reads for this one, is gone")
