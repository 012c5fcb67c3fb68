"""Every kind of torch's sets under what trainers put around a loader: rows and resumes of the bare loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import PartialState

from infra import DeviceMesh
from streaming import DataLoader, DevicePrefetcher, as_torch
from streaming.integrations.accelerate import prepare_loader, skip_first_batches
from tests.support.sets.torch_sets import ITERABLES, MAPS

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_fork_server")]

STOP = 2
ALONE = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})
SETS = MAPS | ITERABLES
ACCELERATOR = SimpleNamespace(
    num_processes=1, torch_device_mesh=None, is_main_process=True, device=torch.device("cpu"),
    register_for_checkpointing=lambda _: None, _models=[None],
)  # fmt: skip
TRAINERS: dict[str, Callable[[Any], Any]] = {
    "Accelerate": lambda loader: prepare_loader(ACCELERATOR, loader),
    "Accelerate, prefetcher": lambda loader: prepare_loader(ACCELERATOR, DevicePrefetcher(loader, device="cpu")),
    "Fabric": as_torch,
}


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate keeps one state per process."""
    PartialState(cpu=True)
    yield
    PartialState._reset_state()


def rows(batch: Any) -> list[int]:
    return [int(row) for row in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("kind", SETS)
def test_rows_are_those_of_the_bare_loader(kind: str, trainer: str, num_workers: int) -> None:
    def loader() -> DataLoader[Any]:
        options = {"shuffle": False} if kind in MAPS else {}
        torch.manual_seed(5)  # one kind draws from the generator of the process
        return DataLoader(SETS[kind](), 4, device_mesh=ALONE, num_workers=num_workers, **options)

    with loader() as bare:
        expected = [[rows(batch) for batch in bare] for _ in range(2)]
    with loader() as bare:
        given = TRAINERS[trainer](bare)
        assert [[rows(batch) for batch in given] for _ in range(2)] == expected
    with loader() as bare:
        given = TRAINERS[trainer](bare)
        begun = [rows(batch) for batch in islice(given, STOP)]
        state = given.state_dict()
    with loader() as bare:
        given = TRAINERS[trainer](bare)
        given.load_state_dict(state)
        assert begun + [rows(batch) for batch in given] == expected[0]
    with loader() as bare:
        assert [rows(batch) for batch in skip_first_batches(bare, STOP)] == expected[0][STOP:]
