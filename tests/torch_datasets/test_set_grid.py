"""Every kind of torch's sets over ranks, workers, epochs of a size, dispatch and readers, with a resume in the middle.

The reference is torch's loader over the whole set, and with ``DistributedSampler`` for map-style ones: both ranks
together get its global batches. The ranks are threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from infra import DeviceMesh
from streaming import Broadcast, DataLoader, OrdinaryDataset, RemoteGroup
from streaming.errors import ConfigError
from tests.support.processes.played_ranks import Play, played, read_here
from tests.support.sets.torch_sets import ITERABLES, MAPS, SIZE
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

GLOBAL, RANKS, STOP = 4, 2, 2
OF_PROCESS = ("python's", "numpy's", "torch's", "generator")
KINDS = [kind for kind in ITERABLES if not kind.startswith(OF_PROCESS)]
"""Iterables whose first pass is the same under torch's loader."""


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return played(monkeypatch)


def rows(batch: Any) -> list[int]:
    return [int(row) for row in batch]


def resumed(make: Callable[[], DataLoader[Any]]) -> list[list[int]]:
    """The batches of an epoch whose second half another loader reads."""
    with make() as first:
        begun = [rows(batch) for batch in islice(first, STOP)]
        state = first.state_dict()
    with make() as second:
        second.load_state_dict(state)
        return begun + [rows(batch) for batch in second]


def whole(make: Callable[[], DataLoader[Any]]) -> list[list[int]]:
    with make() as loader:
        return [rows(batch) for batch in loader]


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global batches."""
    assert len({len(one) for one in ranks}) == 1, "the ranks end together"
    return [sorted(row for one in step for row in one) for step in zip(*ranks, strict=True)]


def options_of(mesh: DeviceMesh, num_workers: int) -> dict[str, Any]:
    return {"global_batch_size": GLOBAL, "device_mesh": mesh, "num_workers": num_workers}


def of_torch(make: Callable[[], Any]) -> list[list[int]]:
    made = make()
    return [sorted(rows(batch)) for batch in TorchLoader(made() if isinstance(made, type) else made, GLOBAL)]


@pytest.mark.parametrize("run", [whole, resumed])
@pytest.mark.parametrize("num_workers", first_here([0, 2], 1))
@pytest.mark.parametrize("kind", MAPS)
def test_ranks_of_a_map_style_set_get_the_batches_of_a_distributed_sampler(
    play: Play, kind: str, num_workers: int, run: Any
) -> None:
    """Of sets whose samples depend on what was asked before: the indices."""
    expected = []
    for rank in range(RANKS):
        sampler = DistributedSampler(MAPS["map"](), RANKS, rank, shuffle=False, drop_last=True)
        expected.append([rows(batch) for batch in TorchLoader(MAPS["map"](), GLOBAL // RANKS, sampler=sampler)])
    got = play(
        lambda mesh: run(lambda: DataLoader(MAPS[kind](), shuffle=False, **options_of(mesh, num_workers))),
        dp_size=RANKS,
    )
    unit = {"map": SIZE, "counting": 1000}.get(kind, 100)
    indices = [[[row % unit for row in batch] for batch in rank] for rank in got]
    assert together(indices) == together(expected)[: SIZE // GLOBAL]


@pytest.mark.parametrize("run", [whole, resumed])
@pytest.mark.parametrize("num_workers", first_here([0, 2], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_an_iterable_set_share_the_rows_of_torch(play: Play, kind: str, num_workers: int, run: Any) -> None:
    """In its batches if each rank has one reader; workers take turns, each with a share of the rows.

    The epoch ends before a worker has read its share, behind which it would begin the next pass.

    Without ``epoch_size`` ranks need a process group, as in test_ordinary.py, or the loader is refused.
    """

    def loader(mesh: DeviceMesh, **options: Any) -> DataLoader[Any]:
        return DataLoader(ITERABLES[kind](), **options, **options_of(mesh, num_workers))

    with pytest.raises(ConfigError, match=r"Give epoch_size, or call torch\.distributed\.init_process_group"):
        play(loader, dp_size=RANKS)
    count = 4 if num_workers else 5
    found = together(play(lambda mesh: run(lambda: loader(mesh, epoch_size=count * GLOBAL)), dp_size=RANKS))
    expected = of_torch(ITERABLES[kind])
    assert len(found) == count
    if num_workers == 0:
        assert found == expected[:count]
    else:
        every = Counter(row for batch in expected for row in batch)
        assert Counter(row for batch in found for row in batch) <= every


@pytest.mark.parametrize("run", [whole, resumed])
@pytest.mark.parametrize("epoch_size", [None, 20])
@pytest.mark.parametrize("num_workers", first_here([0, 1], 1))
@pytest.mark.parametrize("kind", first_here(KINDS, 5))
def test_dealt_out_rows_are_those_of_torch(
    play: Play, kind: str, num_workers: int, epoch_size: int | None, run: Any
) -> None:
    def loader(mesh: DeviceMesh) -> DataLoader[Any]:
        dataset = OrdinaryDataset(ITERABLES[kind](), sharding="dispatch")
        options = options_of(mesh, num_workers) | {"replicate": Broadcast(timeout_s=60)}
        return DataLoader(dataset, epoch_size=epoch_size, **options)

    found = together(play(lambda mesh: run(lambda: loader(mesh)), dp_size=RANKS))
    assert found == of_torch(ITERABLES[kind])[: len(found)]
    assert len(found) >= SIZE // GLOBAL


@pytest.mark.parametrize("run", [whole, resumed])
@pytest.mark.parametrize("kind", [*MAPS, *KINDS])
def test_readers_give_the_rows_of_torch(monkeypatch: pytest.MonkeyPatch, kind: str, run: Any) -> None:
    """Those of Ray, here in this process; tests/replicas/test_ray.py has them in actors."""
    read_here(monkeypatch)
    monkeypatch.setattr(f"{__name__}.rows", lambda batch: [int(row) for row in batch.get()])
    of = {"shuffle": False} if kind in MAPS else {"epoch_size": 20}
    make = (MAPS | ITERABLES)[kind]
    mesh = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})
    found = run(
        lambda: DataLoader(
            lambda: OrdinaryDataset(make()), remote_group=RemoteGroup(name="readers"), **of, **options_of(mesh, 0)
        )
    )
    monkeypatch.undo()
    if kind == "of the process":
        assert sorted(row % 100 for batch in found for row in batch) == list(range(20))
    else:
        assert [sorted(batch) for batch in found] == of_torch(make)[: len(found)]
    assert len(found) == 5
