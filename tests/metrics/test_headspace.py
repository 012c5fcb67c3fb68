"""headspace(): repeated batches are fed, real ones come as if nothing had been, and what a loader takes is found."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from streaming import DataLoader, DevicePrefetcher, RemoteGroup
from streaming.errors import ConfigError
from streaming.watch.metrics import headspace
from streaming.watch.metrics.waits import waits
from tests.support.contracts.loop_kinds import ALONE, CLOSABLE, compress, makers, rows_of
from tests.support.contracts.option_kinds import readers_here
from tests.support.sets.data_sets import SampleSet, write_set
from tests.support.sets.mixtures import mixture

pytestmark = pytest.mark.usefixtures("one_fork_server")
FEW: dict[str, Any] = {"steps": 2, "warmup": 1}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("headspace"), (9, 20, 9))


@pytest.fixture(scope="module")
def kinds(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    def endless() -> DataLoader:
        return DataLoader(mixture({"web": samples, "code": samples}, "web code"), batch_size=4, device_mesh=ALONE)

    def remote() -> DataLoader:
        group = RemoteGroup(name="readers")
        return DataLoader(samples.open, batch_size=4, device_mesh=ALONE, remote_group=group)

    more = {"mixture": endless, "remote": remote}
    return makers(samples, compress(samples, tmp_path_factory.mktemp("streamed"))) | more


def first(loader: Any, count: int = 7) -> list[tuple[int, ...]]:
    """The first batches, over epochs."""
    found: list[tuple[int, ...]] = []
    while len(found) < count:
        found += [rows_of(batch) for batch, _ in zip(loader, range(count - len(found)), strict=False)]
    return found


@pytest.mark.parametrize("kind", [*CLOSABLE, "mixture", "remote"])
def test_a_loader_goes_back_to_where_it_was(kinds: dict[str, Any], kind: str) -> None:
    with readers_here(), kinds[kind]() as loader:
        expected, seen = first(loader), []
    with readers_here(), kinds[kind]() as loader:
        state = loader.state_dict()
        found = headspace(loader, lambda batch: seen.append(rows_of(batch)), **FEW)
        assert loader.state_dict() == state
        assert first(loader) == expected
    kept = expected[1:3]
    assert seen == expected[:3] + (kept * 3)[: len(seen) - 3]
    assert len(seen) == 3 + 2 + 2  # kept ones are fed at least once before they count
    assert (found.steps, found.num_kept) == (2, 2)


@pytest.mark.parametrize("kind", [*CLOSABLE, "mixture"])
def test_an_iterator_goes_on_behind_its_steps(kinds: dict[str, Any], kind: str) -> None:
    with kinds[kind]() as loader:
        expected, seen = [rows_of(batch) for _, batch in zip(range(4), loader, strict=False)], []
        states = []
    with kinds[kind]() as loader:
        for batch, _ in zip(loader, range(3), strict=False):
            states.append(loader.state_dict())
            del batch
    with kinds[kind]() as loader:
        batches = iter(loader)
        headspace(batches, lambda batch: seen.append(rows_of(batch)), keep=1, **FEW)
        assert loader.state_dict() == states[2]
        assert seen == expected[:3] + [expected[2]] * 3
        assert rows_of(next(batches)) == expected[3]


def test_mid_epoch_a_loader_goes_back_to_the_same_batch(samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
        expected = [rows_of(batch) for batch in loader]
    with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
        for number, _ in enumerate(loader):
            if number == 2:
                break
        headspace(loader, lambda _: None, **FEW)
        assert [rows_of(batch) for batch in loader] == expected[3:]
        assert loader.epoch == 1


@pytest.mark.parametrize("kind", [*CLOSABLE, "mixture", "remote"])
def test_inside_a_loop_it_is_refused_before_anything_is_done(kinds: dict[str, Any], kind: str) -> None:
    called: list[Any] = []
    with readers_here(), kinds[kind]() as loader:
        expected = first(loader, 4)
    with readers_here(), kinds[kind]() as loader:
        seen = []
        for batch in islice(iter(loader), 4):
            seen.append(rows_of(batch))
            if len(seen) < 3:
                with pytest.raises(ConfigError, match=r"is under way.*batches = iter\(loader\)"):
                    headspace(loader, called.append, **FEW)
        assert seen == expected
    assert called == []


def test_an_iterator_that_is_over_or_dropped_does_not_refuse(samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
        for made in (loader, DevicePrefetcher(loader, "cpu")):
            batches = iter(made)
            assert list(batches)
            headspace(made, lambda _: None, **FEW)
            batches = iter(made)
            next(batches)
            with pytest.raises(ConfigError, match="is under way"):
                headspace(loader, lambda _: None, **FEW)  # also the one below
            del batches
            headspace(made, lambda _: None, **FEW)


@pytest.mark.parametrize("restores", ["one", "list"])
def test_what_is_restored_may_be_one_object(samples: SampleSet, restores: str) -> None:
    model = torch.nn.Linear(4, 1)
    before = [one.clone() for one in model.parameters()]

    def step(_: Any) -> None:
        with torch.no_grad():
            model.weight += 1

    with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
        headspace(loader, step, restores=model if restores == "one" else [model], **FEW)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("given", ["loader", "iterator"])
def test_model_and_optimizer_are_set_back(samples: SampleSet, given: str) -> None:
    def trained(measured_at: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(batch: dict[str, Any]) -> None:
            optimizer.zero_grad()
            model(batch["vec.npy"] / 40).square().mean().backward()
            optimizer.step()

        with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
            batches: Any = iter(loader) if given == "iterator" else loader
            if measured_at is not None:
                headspace(batches, step, steps=2, warmup=1, restores=(model, optimizer))
            for batch in batches:
                step(batch)
        return [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]

    one, other = trained(None), trained(0)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("given", ["loader", "iterator"])
def test_random_numbers_of_the_run_are_those_without_it(samples: SampleSet, given: str) -> None:
    def trained(*, measures: bool) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  global generators are the point
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[Any] = []

        def step(batch: dict[str, Any]) -> None:
            optimizer.zero_grad()
            loss = model(batch["vec.npy"] / 40).square().mean()
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), random.random(), np.random.rand()))  # noqa: NPY002

        with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
            batches: Any = iter(loader) if given == "iterator" else loader
            if measures:
                headspace(batches, step, steps=2, warmup=1, restores=(model, optimizer))
                del losses[3 if given == "iterator" else 0 :]
            for batch in batches:
                step(batch)
        return losses

    assert trained(measures=True) == trained(measures=False)


def test_the_log_says_what_was_repeated(samples: SampleSet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streaming.watch.metrics")
    with DataLoader(samples.open(shuffle=False), batch_size=4, device_mesh=ALONE) as loader:
        found = headspace(loader, lambda _: None, **FEW)
    repeated, result, model = [record.getMessage() for record in caplog.records if "experiment" in record.name]
    assert repeated.startswith("headspace: the last 2 batches (")
    assert "with the keys 00004, 00005, 00006 …) are now fed again and again" in repeated
    assert result == f"headspace: {found}"
    assert "Give restores=(model, optimizer)" in model


@pytest.mark.parametrize("decode_s", [0.0, 0.004])
def test_what_a_loader_takes_is_found(samples: SampleSet, monkeypatch: pytest.MonkeyPatch, decode_s: float) -> None:
    """By a clock that only decoding and steps move on."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def decoding(sample: dict[str, Any]) -> dict[str, Any]:
        clock[0] += decode_s
        return sample

    def step(_: Any) -> None:
        clock[0] += 0.016

    with DataLoader(samples.open(transform=decoding), batch_size=4, num_threads=0, epoch_size=200) as loader:
        found = headspace(loader, step, steps=12, warmup=2)
    share = 0.5 if decode_s else 0.0
    assert (found.measured, found.waited, found.steps) == (pytest.approx(share), pytest.approx(share), 12)
    assert (found.step_s, found.kept_step_s) == (pytest.approx(0.016 + 4 * decode_s), pytest.approx(0.016))
    times = f"{16 + 4000 * decode_s:.2f} ms with it, 16.00 ms with 2 kept batches, 12 steps each"
    assert str(found) == f"a perfect loader would save {share:.1%} of the step (its waits: {share:.1%}): {times}"


def test_waits_of_a_steps_cause(samples: SampleSet) -> None:
    before = {"batches": 10.0, "in_loader_s": 1.0, "consumer_s": 5.0, "wait_for_fetch_s": 0.5}
    now = {"batches": 20.0, "in_loader_s": 4.0, "consumer_s": 12.0, "wait_for_fetch_s": 2.5, "build_in_consumer_s": 0.5}
    found = waits(now, before)
    assert (found.steps, found.share, found.step_s) == (10, 0.3, 1.0)
    assert {name: value for name, value in found.by_cause.items() if value} == pytest.approx(
        {"waits for bytes": 0.2, "builds batches itself": 0.05, "hands over, and the rest": 0.05, "your step": 0.7}
    )
    assert waits({}).share == waits(now, now).share == 0.0
    first_alone = {"batches": 1.0, "in_loader_s": 2.0, "first_batch_s": 2.0, "first_batch_wait_s": 1.0}
    assert waits(first_alone | {"wait_for_fetch_s": 1.0}).share == 0.0


def test_entries_that_a_step_takes_out_are_there_again(samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
        headspace(loader, lambda batch: batch.pop("cls"), **FEW)


def test_what_a_step_raises_passes_and_the_loader_goes_back(samples: SampleSet) -> None:
    class Failing(Exception):
        pass

    def step(_: Any) -> None:
        raise Failing

    with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
        expected = loader.state_dict()
        with pytest.raises(Failing):
            headspace(loader, step)
        assert loader.state_dict() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "headspace: steps"),
        ({"warmup": -1}, "headspace: warmup"),
        ({"keep": 0}, "headspace: keep"),
        ({"step": 3}, "headspace: step: expected a function that takes a batch, got 3"),
        ({"restores": (3,)}, "headspace: restores: int has no state_dict"),
        ({"restores": 3}, r"headspace: restores: expected objects with state_dict.*\(model, optimizer\), got int"),
        ({"warmup": 9}, "the epoch ended after 9 batches, before a step was measured"),
        ({"batches": torch.utils.data.DataLoader(range(4))}, r"Give an iterator.*headspace\(iter\(loader\), step\)"),
    ],
)
def test_what_cannot_be_measured_is_refused(samples: SampleSet, options: dict[str, Any], message: str) -> None:
    with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
        given = {"batches": loader, "step": lambda _: None} | options
        with pytest.raises(ConfigError, match=message):
            headspace(**given)


def test_an_epoch_that_ends_before_gives_fewer_steps(samples: SampleSet) -> None:
    with DataLoader(samples.open(), batch_size=4, device_mesh=ALONE) as loader:
        found = headspace(loader, lambda _: None, warmup=4, keep=3)
    assert (found.steps, found.num_kept) == (5, 3)


def test_any_iterator_will_do() -> None:
    foreign: Any = torch.utils.data.DataLoader(range(100), batch_size=2)  # type: ignore[arg-type,var-annotated]
    for batches in (iter(foreign), iter(DevicePrefetcher(foreign, "cpu"))):
        found = headspace(batches, lambda _: None, **FEW)
        assert found.waited is None
        assert "its waits" not in str(found)
        assert len(list(batches)) == 47
