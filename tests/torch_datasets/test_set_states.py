"""States of torch's sets: rows after a resume are those of a run that was never interrupted, whatever a set keeps."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from infra import DeviceMesh
from streaming import DataLoader, OrdinaryDataset
from streaming.errors import StateError
from tests.support.sets.torch_sets import ITERABLES, MAPS, SIZE, Drawing, DrawingKeeper, OwnNumpy
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

ALONE = DeviceMesh.from_sizes(dp_size=1, rank=0, environ={})
BATCH, EPOCHS = 4, 3


def loader(make: Callable[[], Any], **options: Any) -> DataLoader[Any]:
    given = {"last_batch": "partial"} if options.get("epoch_size") is None else {}
    return DataLoader(make(), **{"batch_size": BATCH, "device_mesh": ALONE} | given | options)


def rows(batch: Any) -> list[int]:
    found: list[int] = batch.tolist()
    return found


def rows_of_some(one: DataLoader[Any], count: int) -> list[list[int]]:
    """Some batches of an epoch that is then left."""
    return [rows(batch) for batch in islice(one, count)]


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
    for epoch, number, state in chosen(states[:-1]):  # the last one is behind all
        other = loader(make, **options)
        other.load_state_dict(state)
        assert rest_of(other, epoch) == [epochs[epoch][number:], *epochs[epoch + 1 :]], (epoch, number)


def some(states: list[Any]) -> list[Any]:
    """With worker processes, which start anew for each: the beginning, inside, an end, and between two epochs."""
    return [states[number] for number in (0, 3, 6, 7)]


LIKE_OTHERS = ("not reset", "torch's, order only", "torch's, rows only", "numpy's, state", "own numpy, state")
QUICK_FIRST = [*(kind for kind in ITERABLES if kind not in LIKE_OTHERS), *LIKE_OTHERS]
SEEN_FIRST = ["torch's, state", *(kind for kind in ITERABLES if kind != "torch's, state")]


@pytest.mark.parametrize("epoch_size", first_here([None, 24], 1))
@pytest.mark.parametrize("kind", first_here(QUICK_FIRST, 14))
def test_iterables_continue_from_every_state(kind: str, epoch_size: int | None) -> None:
    check(ITERABLES[kind], list, epoch_size=epoch_size)


@pytest.mark.thorough
@pytest.mark.parametrize("epoch_size", first_here([None, 24], 1))
@pytest.mark.parametrize("kind", first_here(SEEN_FIRST, 1))
def test_iterables_in_workers_continue_from_every_kind_of_state(kind: str, epoch_size: int | None) -> None:
    check(ITERABLES[kind], some, epoch_size=epoch_size, num_workers=2)


@pytest.mark.parametrize("epoch_size", [None, 24])
@pytest.mark.parametrize("kind", first_here(SEEN_FIRST, 2))
def test_dealt_out_by_one_rank_they_continue_as_well(kind: str, epoch_size: int | None) -> None:
    check(lambda: OrdinaryDataset(ITERABLES[kind](), sharding="dispatch"), some, epoch_size=epoch_size)


OF_THE_PROCESS = ("python's", "numpy's", "torch's", "generator")
"""Kinds that draw from generators of the process, which the loader seeds."""


@pytest.mark.parametrize("kind", [kind for kind in ITERABLES if not kind.startswith(OF_THE_PROCESS)])
def test_rows_are_those_of_torchs_loader(kind: str) -> None:
    """Over all epochs, but for numbers from generators of a set, which are those of torch's in pass 0."""
    made = ITERABLES[kind]()
    sets = [made() if isinstance(made, type) else made for _ in range(EPOCHS)]
    torchs = [TorchLoader(one, BATCH) for one in sets]
    expected = [[rows(batch) for batch in one] for one in torchs]
    got, _ = run_with_states(loader(ITERABLES[kind]))
    count = 1 if kind.startswith("own ") else EPOCHS
    assert got[:count] == expected[:count]
    assert len({str(epoch) for epoch in got}) > 1 or count > 1, "other numbers in other passes"


# --- map-style ---


@pytest.mark.parametrize("num_workers", first_here([0, 2], 1))
@pytest.mark.parametrize("kind", MAPS)
def test_map_style_sets_continue_from_every_state(kind: str, num_workers: int) -> None:
    """Five batches an epoch: with two workers, not the one that is next in line begins an epoch."""
    check(MAPS[kind], some if num_workers else list, num_workers=num_workers, batch_size=5)


def test_rows_of_map_style_sets_are_those_of_torchs_loader() -> None:
    for kind, make in MAPS.items():
        if kind == "of the process":
            continue  # other numbers each time
        expected = TorchLoader(make(), BATCH)
        got, _ = run_with_states(loader(make, shuffle=False))
        assert got == [[rows(batch) for batch in expected] for _ in range(EPOCHS)], kind
    for num_workers in (0, 2):
        torchs = TorchLoader(MAPS["counting"](), 5, num_workers=num_workers, persistent_workers=num_workers > 0)
        ours = loader(MAPS["counting"], shuffle=False, num_workers=num_workers, batch_size=5)
        for _ in range(EPOCHS):
            assert [rows(batch) for batch in ours] == [rows(batch) for batch in torchs]
        ours.close()


@pytest.mark.parametrize("num_workers", first_here([0, 2], 1))
@pytest.mark.parametrize("epoch_size", [None, 20])
@pytest.mark.parametrize("kind", [*MAPS, *ITERABLES])
def test_a_loader_goes_back_to_the_state_before_its_first_batch(
    kind: str, epoch_size: int | None, num_workers: int
) -> None:
    """The loader that saved it, which has read since, and a new one; taken before and behind ``iter``."""
    make = (MAPS | ITERABLES)[kind]
    if epoch_size is not None and isinstance(made := make(), Drawing) and not hasattr(made, "state_dict"):
        pytest.skip("it keeps its place in a pass that was left, and has no state")
    options = {"num_workers": num_workers, "batch_size": 5, "epoch_size": epoch_size}
    one = loader(make, **options)
    states = [one.state_dict()]
    batches = iter(one)
    states.append(one.state_dict())
    expected = [rows(batch) for batch in batches]
    one.load_state_dict(states[0])
    assert one.state_dict() == states[0], "a state that was loaded is the state"
    for state in states:
        for other in (one, loader(make, **options)):
            other.load_state_dict(state)
            assert [rows(batch) for batch in other] == expected
            other.close()


def test_a_map_style_set_is_told_nothing_but_what_was_saved() -> None:
    """What its owner changes between epochs stays, and nothing is loaded into a set that was not resumed."""
    made = MAPS["counting"]()
    one = loader(lambda: made, shuffle=False)
    list(one)
    made.asked = 500
    assert rows_of_some(one, 1) == [[501_000, 502_001, 503_002, 504_003]]


def test_epochs_that_are_left_continue_from_what_was_received() -> None:
    """Workers have read further: what they have counted beyond the batches that came is taken back."""
    one = loader(MAPS["counting"], shuffle=False, num_workers=2)
    first = rows_of_some(one, 3)
    assert first == [[1000, 2001, 3002, 4003], [1004, 2005, 3006, 4007], [5008, 6009, 7010, 8011]]
    state = one.state_dict()
    other = loader(MAPS["counting"], shuffle=False, num_workers=2)
    other.load_state_dict(state)
    rest_of(other, EPOCHS - 1)
    assert rows_of_some(one, 1) == [[9000, 10001, 11002, 12003]]
    one.close()


@pytest.mark.parametrize("num_workers", first_here([0, 2], 1))
def test_states_of_copies_that_do_not_fit_are_named(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """The samples come in their order all the same."""
    caplog.set_level(logging.WARNING)
    _, states = run_with_states(loader(MAPS["counting"], num_workers=num_workers))
    expected, _ = run_with_states(loader(MAPS["map"]))
    state = states[2][2]
    other = loader(MAPS["counting"], num_workers=2 - num_workers)
    other.load_state_dict(state)
    assert f"of 1 with {max(1, num_workers)} workers, this is rank 0 of 1 with" in caplog.text
    got = rest_of(other, EPOCHS - 1)
    assert [[row % 1000 for row in batch] for batch in got[0]] == expected[0][2:]
    plain = loader(MAPS["map"])
    plain.load_state_dict(state)
    assert "Map has no load_state_dict" in caplog.text
    assert rest_of(plain, EPOCHS - 1) == [expected[0][2:]]


def test_states_without_a_state_of_the_set_still_load(caplog: pytest.LogCaptureFixture) -> None:
    one = loader(MAPS["map"])
    rows_of_some(one, 2)
    other = loader(MAPS["counting"])
    other.load_state_dict(one.state_dict())
    assert "but this state holds none" in caplog.text
    assert "cursors" not in one.state_dict()


# --- what cannot be continued is named ---


def test_between_epochs_another_number_of_workers_is_named(caplog: pytest.LogCaptureFixture) -> None:
    _, states = run_with_states(loader(ITERABLES["continuing"]))
    inside, between = states[2][2], states[7][2]
    other = loader(ITERABLES["continuing"], num_workers=2)
    caplog.clear()
    with pytest.raises(StateError, match=r"with 1 workers, this is rank 0 of 1 with 2"):
        other.load_state_dict(inside)
    assert not caplog.records
    other.load_state_dict(between)
    assert "the state of a Continuing is that of its copy where it was saved" in caplog.text
    caplog.clear()
    _, states = run_with_states(loader(ITERABLES["own torch"]))
    other = loader(ITERABLES["own torch"], num_workers=2)
    caplog.clear()
    other.load_state_dict(states[7][2])
    assert not caplog.records, "its generators are the same in all parts"


@pytest.mark.parametrize("kind", ["keeper", "stateless", "own torch"])
def test_an_epoch_that_was_left_is_named_where_its_set_cannot_continue(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A state from before the first batch of the next one, as a wrapper saves it that reads ahead.

    Only the set itself knows what it does after that; one without a state does the same each time.
    """
    one = loader(ITERABLES[kind])
    rows_of_some(one, 2)
    batches = iter(one)
    next(batches)
    batches.hold_back(1)
    state = one.state_dict()
    assert (state["epoch"], state["samples_seen"]) == (1, 0)
    other = loader(ITERABLES[kind])
    other.load_state_dict(state)
    assert ("epoch 0 was left before its end: Keeper begins epoch 1 as it was made" in caplog.text) == (
        kind == "keeper"
    )


@pytest.mark.parametrize("kind", ["stateless", "keeper"])
def test_states_without_random_numbers_still_load(kind: str) -> None:
    """As they were saved before states held any."""
    epochs, states = run_with_states(loader(ITERABLES[kind]))
    state = states[3][2]
    kept = ("worker", "pass_number", "num_items", "state", "ended")
    state["cursors"] = [{name: cursor[name] for name in kept} for cursor in state["cursors"]]
    other = loader(ITERABLES[kind])
    other.load_state_dict(state)
    assert rest_of(other, 0) == [epochs[0][3:], *epochs[1:]]


@pytest.mark.parametrize("kind", ["own torch", "own numpy, state", "continuing", "torch's, rare rows"])
def test_ranks_share_every_pass(kind: str) -> None:
    """Two ranks take turns with the rows of the same order, pass after pass."""
    ranks = [DeviceMesh.from_sizes(dp_size=2, rank=rank, world_size=2) for rank in range(2)]
    loaders = [loader(ITERABLES[kind], device_mesh=mesh, batch_size=2, epoch_size=24) for mesh in ranks]
    whole = loader(ITERABLES[kind], epoch_size=24)
    for _ in range(EPOCHS):
        expected = [row for batch in whole for row in rows(batch)]
        dealt = [[row for batch in one for row in rows(batch)] for one in loaders]
        assert sorted(dealt[0] + dealt[1]) == sorted(expected)
    states = [one.state_dict() for one in loaders]
    rest = [rows_of_some(one, 3) for one in loaders]
    again = [loader(ITERABLES[kind], device_mesh=mesh, batch_size=2, epoch_size=24) for mesh in ranks]
    for one, state in zip(again, states, strict=True):
        one.load_state_dict(state)
    assert [rows_of_some(one, 3) for one in again] == rest


class Unseeded(OwnNumpy):
    """A generator that nobody seeded."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()


@pytest.mark.parametrize("kind", [Drawing, DrawingKeeper])
def test_generators_that_nobody_seeded_continue_from_what_they_were(kind: Any) -> None:
    """From every state but that of the beginning, when nothing was drawn yet."""
    check(lambda: kind(Unseeded()), lambda states: states[1:])


def test_a_set_that_draws_is_read_again_for_one_sample_and_no_more() -> None:
    _, states = run_with_states(loader(ITERABLES["torch's, state"]))
    assert {cursor["again"] for *_, state in states for cursor in state["cursors"]} <= {0, 1}
    _, states = run_with_states(loader(ITERABLES["keeper"]))
    assert {cursor["again"] for *_, state in states for cursor in state["cursors"]} == {0}
    assert not any(cursor["draws"] for *_, state in states for cursor in state["cursors"])


@pytest.mark.parametrize("num_workers", first_here([0, 2], 1))
@pytest.mark.parametrize("make", [ITERABLES["continuing"], MAPS["counting"]])
def test_a_new_seed_leaves_a_set_its_own_state(make: Any, num_workers: int) -> None:
    one = loader(make, num_workers=num_workers)
    list(one)
    one.seed(7)
    state = one.state_dict()
    expected = [rows(batch) for batch in one]
    one.close()
    other = loader(make, num_workers=num_workers)
    other.load_state_dict(state)
    assert rest_of(other, EPOCHS - 1) == [expected]
    assert min(row for batch in expected for row in batch) >= SIZE


def _numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(6):
            yield {"id": 10 * shard + number}


@pytest.mark.parametrize("num_workers", first_here([0, 2], 1))
@pytest.mark.parametrize("epoch_size", first_here([None, 24], 1))
def test_streams_of_hugging_face_continue_from_every_state(epoch_size: int | None, num_workers: int) -> None:
    """Their state behind an end is a place where nothing is left, of that epoch."""
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        stream = datasets.IterableDataset.from_generator(_numbers, gen_kwargs={"shards": list(range(4))})
        return stream.shuffle(seed=3, buffer_size=1)

    options = {"collate_fn": _ids, "epoch_size": epoch_size, "num_workers": num_workers}
    check(make, some if num_workers else list, **options)


def _ids(samples: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([sample["id"] for sample in samples])
