"""States of torch's sets: rows after a resume are those of a run that was never interrupted, whatever a set keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

from infra import DeviceMesh
from streaming import DataLoader, OrdinaryDataset
from tests.support.sets.torch_sets import ITERABLES, MAPS
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

ALONE = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})
BATCH, EPOCHS = 4, 3


def loader(make: Callable[[], Any], **options: Any) -> DataLoader[Any]:
    given = {"last_batch": "partial"} if options.get("epoch_size") is None else {}
    return DataLoader(make(), BATCH, device_mesh=ALONE, **given | options)


def rows(batch: Any) -> list[int]:
    found: list[int] = batch.tolist()
    return found


def run_with_states(one: DataLoader[Any]) -> tuple[list[list[list[int]]], list[tuple[int, int, dict[str, Any]]]]:
    """The batches of each epoch; and states: before the first batch, after each, and between epochs."""
    epochs: list[list[list[int]]] = []
    states = [(0, 0, copy.deepcopy(one.state_dict()))]
    for epoch in range(EPOCHS):
        epochs.append([])
        for batch in one:
            epochs[-1].append(rows(batch))
            states.append((epoch, len(epochs[-1]), one.state_dict()))
        states.append((epoch + 1, 0, one.state_dict()))
    one.close()
    return epochs, states


def rest_of(one: DataLoader[Any], epoch: int) -> list[list[list[int]]]:
    found = [[rows(batch) for batch in one] for _ in range(epoch, EPOCHS)]
    one.close()
    return found


def check(make: Callable[[], Any], chosen: Callable[[list[Any]], list[Any]], **options: Any) -> None:
    epochs, states = run_with_states(loader(make, **options))
    for epoch, number, state in chosen(states[:-1]):
        other = loader(make, **options)
        other.load_state_dict(state)
        assert rest_of(other, epoch) == [epochs[epoch][number:], *epochs[epoch + 1 :]], (epoch, number)


def some(states: list[Any]) -> list[Any]:
    """With worker processes, which start anew for each: the beginning, inside, an end, and between two epochs."""
    return [states[number] for number in (0, 3, 6, 7)]


@pytest.mark.parametrize("epoch_size", [None, 24])
@pytest.mark.parametrize("kind", ITERABLES)
def test_iterables_continue_from_every_state(kind: str, epoch_size: int | None) -> None:
    check(ITERABLES[kind], list, epoch_size=epoch_size)


@pytest.mark.parametrize("epoch_size", [None, 24])
@pytest.mark.parametrize("kind", first_here(list(ITERABLES), 0))
def test_iterables_in_workers_continue_from_every_kind_of_state(kind: str, epoch_size: int | None) -> None:
    check(ITERABLES[kind], some, epoch_size=epoch_size, num_workers=2)


@pytest.mark.parametrize("epoch_size", [None, 24])
@pytest.mark.parametrize("kind", ITERABLES)
def test_dealt_out_by_one_rank_they_continue_as_well(kind: str, epoch_size: int | None) -> None:
    check(lambda: OrdinaryDataset(ITERABLES[kind](), sharding="dispatch"), some, epoch_size=epoch_size)


@pytest.mark.parametrize("kind", ITERABLES)
def test_rows_are_those_of_torchs_loader(kind: str) -> None:
    """Over all epochs, but for random numbers: those of the process are the loader's own, those of a set in pass 0."""
    if kind.startswith(("python's", "numpy's", "torch's", "generator")):
        pytest.skip("they come from the loader's seed")
    made = ITERABLES[kind]()
    sets = [made() if isinstance(made, type) else made for _ in range(EPOCHS)]
    torchs = [TorchLoader(one, BATCH) for one in sets]
    expected = [[rows(batch) for batch in one] for one in torchs]
    got, _ = run_with_states(loader(ITERABLES[kind]))
    count = 1 if kind.startswith("own ") and "made" not in kind else EPOCHS
    assert got[:count] == expected[:count]
    assert len({str(epoch) for epoch in got}) > 1 or count > 1, "other numbers in other passes"
