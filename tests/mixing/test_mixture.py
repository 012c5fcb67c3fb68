"""A mixture as users see it: P1 to P5, shares, resumes on other worlds, weights that change, sources with options."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, DeviceMeshFetcher, Mixture, Schedule, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError, IndexMissingError, StateError, TooManyBadSamplesError
from streaming.order.plan import memory as budget
from streaming.order.plan.plan import Plan
from streaming.sets.sources import drawing
from tests.support.processes.forked import Forked, all_end
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import (
    Batches,
    SampleSet,
    check_batch,
    loaders,
    merged,
    mesh_of,
    play,
    total,
    write_set,
)
from tests.support.sets.mixtures import FIRST, mixture, source_of, take, take_on, world

pytestmark = pytest.mark.usefixtures("one_fork_server")

SIZES = {"code": 23, "math": 60, "web": 119}


SHARDS = {"web": (41, 7, 23, 1, 47), "code": (20, 3), "math": (60,)}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    root = tmp_path_factory.mktemp("sets")
    return {name: write_set(root / name, sizes, first=FIRST[name]) for name, sizes in SHARDS.items()}


@pytest.fixture(scope="module")
def fine_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    """The same in chunks of four."""
    root = tmp_path_factory.mktemp("fine")
    return {name: write_set(root / name, sizes, chunk_samples=4, first=FIRST[name]) for name, sizes in SHARDS.items()}


FEW_LANES = ShuffleConfig(lanes=2)
"""Weights are planned ahead by stretches of lanes: with few of them a change comes soon."""


# --- P1 to P5 ---


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_by_size_each_sample_comes_exactly_once(sets: dict[str, SampleSet], ranks: int, num_workers: int) -> None:
    mix = mixture(sets)
    batches = merged(play(mix, ranks, global_batch_size=12, last_batch="pad", num_workers=num_workers))
    assert total(batches) == Counter(key for one in sets.values() for key in one.keys)
    assert len(mix) == 202
    assert len(batches) == 17


def test_repeats_list_sources_so_often_over_epochs(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, repeats={"web": 1, "code": 2.5, "math": 0.5})
    assert len(mix) == 119 + 58 + 30
    epochs = merged(play(mix, 1, batch_size=9, last_batch="partial", epochs=2))
    half = len(epochs) // 2
    assert Counter(map(source_of, total(epochs[:half]).elements())) == {"web": 119, "code": 58, "math": 30}
    counts = total(epochs)
    assert {counts[key] for key in sets["math"].keys} == {1}  # a half in each of two epochs
    assert {counts[key] for key in sets["code"].keys} <= {5, 6}
    assert {counts[key] for key in sets["web"].keys} == {2}


@pytest.mark.thorough
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.fixed_dictionaries({name: st.integers(0, 5) for name in SIZES}).filter(lambda w: any(w.values())),
    ranks=st.sampled_from([1, 2, 3]), others=st.sampled_from([1, 2, 5]), stop=st.integers(1, 15),
    nested=st.booleans(),
)  # fmt: skip
def test_stopped_anywhere_and_resumed_on_another_world(
    sets: dict[str, SampleSet], weights: dict[str, int], ranks: int, others: int, stop: int, nested: bool
) -> None:
    mix = mixture(sets, weights=weights, shuffle=FEW_LANES)
    if nested:
        mix = Mixture({"all": mix}, weights={"all": 1})
        assert mix.names == ("all/code", "all/math", "all/web")
    whole, _ = _plain_world(mix, 1, 16)
    before, state = _plain_world(mix, ranks, stop)
    after, _ = _plain_world(mix, others, 16 - stop, state)
    assert before + after == whole


def _plain_world(mix: Mixture, ranks: int, count: int, state: Any = None) -> tuple[Batches, dict[str, Any]]:
    found = []
    for loader in loaders(mix, ranks, global_batch_size=12, num_threads=0):
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        batches = iter(loader)
        found.append([check_batch(next(batches)) for _ in range(count)])
        saved = loader.state_dict()
    return merged(found), saved


def test_shares_hold_in_the_long_run(sets: dict[str, SampleSet]) -> None:
    batches, state = world(mixture(sets, weights={"web": 0.5, "code": 0.3, "math": 0.2}), 1, 400)
    counts = Counter(map(source_of, total(batches).elements()))
    for name, share in {"web": 0.5, "code": 0.3, "math": 0.2}.items():
        assert abs(counts[name] - share * 4800) <= 12 * 3 * 5  # a few chunks of 4, a lane
    assert state["num_samples"] == 202


def test_a_source_is_drawn_from_pass_after_pass(fine_sets: dict[str, SampleSet]) -> None:
    batches, _ = world(mixture(fine_sets, "web code", weights={"web": 1, "code": 1}), 1, 100)
    counts = total(batches)
    for name in ("web", "code"):
        passes = {counts[key] for key in fine_sets[name].keys}
        assert max(passes) - min(passes) <= 2


def test_names_and_not_places_decide(sets: dict[str, SampleSet]) -> None:
    one = world(mixture(sets, "web code math", weights={"web": 1, "code": 2, "math": 1}), 1, 10)
    assert world(mixture(sets, "math web code", weights={"math": 1, "code": 2, "web": 1}), 1, 10) == one


def test_epoch_size_makes_epochs_of_what_has_no_end(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, weights={"web": 1, "code": 1, "math": 1})
    whole, _ = world(mix, 1, 20)
    with DataLoader(mix, batch_size=12, epoch_size=60) as loader:
        assert len(loader) == 5
        assert merged([[check_batch(batch) for _ in range(4) for batch in loader]]) == whole
        state = {**loader.state_dict(), "epoch": 1000}
    with DataLoader(mixture(sets, weights={"web": 1, "code": 1, "math": 2}), batch_size=12, epoch_size=60) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict()["ledger"][-1]["from"] >= 60_000  # rows of all epochs before


def test_an_epoch_without_an_end_goes_on_in_the_next_loop(sets: dict[str, SampleSet]) -> None:
    """As training by steps has it, with an evaluation between; trainers call ``set_epoch`` before each loop."""
    mix = mixture(sets, weights={"web": 1, "code": 1, "math": 1})
    with DataLoader(mix, 8) as loader, DataLoader(mix, 8) as other:
        whole = [batch["__key__"] for _, batch in zip(range(30), loader, strict=False)]
        parts = []
        for epoch in range(3):
            other.set_epoch(epoch)
            parts += [batch["__key__"] for _, batch in zip(range(10), other, strict=False)]
    assert parts == whole


def test_without_an_end_there_is_no_len(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, weights={"web": 1, "code": 1, "math": 1})
    with pytest.raises(TypeError, match="without end"):
        len(mix)
    with DataLoader(mix, batch_size=12) as loader:
        with pytest.raises(TypeError, match=r"without end.*epoch_size"):
            len(loader)
        with pytest.raises(TypeError, match="without end"):
            loader.batches_left  # noqa: B018
        assert "batches" not in repr(loader)
        with pytest.raises(ConfigError, match="Give the seed to the Mixture"):
            loader.seed(3)


@pytest.mark.parametrize(
    ("ends", "quotas"), [("first", {"code": 23, "math": 12, "web": 23}), ("all", {"code": 120, "math": 60, "web": 120})]
)
def test_an_epoch_ends_with_the_first_or_all_sources(
    sets: dict[str, SampleSet], ends: Any, quotas: dict[str, int]
) -> None:
    mix = mixture(sets, weights={"web": 2, "code": 2, "math": 1}, ends=ends)
    keys = total(merged(play(mix, 2, global_batch_size=12, last_batch="partial")))
    assert Counter(map(source_of, keys.elements())) == quotas
    assert len(mix) == sum(quotas.values())
    ended = sets["code" if ends == "first" else "math"].keys
    assert {keys[key] for key in ended} == {1}


# --- weights that change ---


@pytest.mark.thorough
def test_a_schedule_changes_shares_and_resumes(sets: dict[str, SampleSet]) -> None:
    ramp = Schedule.steps({0: {"web": 1, "code": 0, "math": 0}, 1200: {"web": 0, "code": 1, "math": 1}})
    mix = mixture(sets, weights=ramp)
    whole, _ = world(mix, 1, 200)
    assert set(map(source_of, total(whole[:90]))) == {"web"}
    assert set(map(source_of, total(whole[130:]))) == {"code", "math"}
    before, state = world(mix, 3, 97)
    assert state["ledger"][0]["schedule"]["shape"] == "steps"
    after, _ = world(mix, 2, 103, state)
    assert before + after == whole


@pytest.mark.parametrize(
    ("seed", "quotas", "at"), [(7, "chunks", None), (1, "chunks", None), (1, "exact", 60_011)],
    ids=["order", "weights", "weights-from-a-row"],
)  # fmt: skip
def test_a_loader_that_has_begun_takes_what_a_state_says(
    sets: dict[str, SampleSet], seed: int, quotas: Any, at: int | None
) -> None:
    options: dict[str, Any] = {"weights": {"web": 1, "code": 0}, "shuffle": FEW_LANES, "quotas": quotas}
    with DataLoader(mixture(sets, "web code", seed=seed, **options), batch_size=12) as other:
        if seed == 1:
            row = other.set_weights({"web": 0, "code": 1}, at=at)
            assert other.set_weights({"web": 0, "code": 1}) == row  # not before what is to apply already
        state = {**other.state_dict(), "samples_seen": 60_000}
        other.load_state_dict(state)
        expected = take(other, 3)
    with DataLoader(mixture(sets, "web code", seed=1, **options), batch_size=12) as loader:
        take(loader, 1)
        loader.load_state_dict(state)
        assert take(loader, 3) == expected


@pytest.mark.parametrize(
    "options", [{"weights": {"web": 3, "code": 1}}, {"repeats": {"web": 1, "code": 2.5}}], ids=["endless", "passes"]
)
def test_seen_counts_what_was_drawn(sets: dict[str, SampleSet], options: dict[str, Any]) -> None:
    with DataLoader(mixture(sets, "web code", **options), batch_size=7) as loader:
        counts: Counter[str] = Counter()
        for step, batch in enumerate(loader):
            counts.update(batch["__source__"])
            if step % 5 == 0:
                seen = loader.seen()
                assert {name: one["samples"] for name, one in seen.items()} == {"web": 0, "code": 0} | counts
                assert seen["code"]["passes"] == counts["code"] / 23
            if step == 20:
                break
        state = loader.state_dict()
    with DataLoader(mixture(sets, "web code", **options), global_batch_size=7, device_mesh=mesh_of(3, 1)) as loader:
        loader.load_state_dict(state)
        assert {name: one["samples"] for name, one in loader.seen().items()} == counts
    with DataLoader(sets["web"].open(), batch_size=7) as loader, pytest.raises(ConfigError, match="single data set"):
        loader.seen()


def test_set_weights_in_the_middle_of_an_iteration(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, "web code", weights={"web": 1, "code": 0}, shuffle=FEW_LANES)
    with DataLoader(mix, batch_size=12) as loader:
        batches = iter(loader)
        before = [check_batch(next(batches)) for _ in range(5)]
        assert loader.seen()["web"]["samples"] == 60
        row = loader.set_weights({"web": 0, "code": 1})
        after = [check_batch(next(batches)) for _ in range(row // 12 + 50)]
        state = loader.state_dict()
        seen = {name: one["samples"] for name, one in loader.seen().items()}
        assert seen == Counter(source_of(key) for keys in before + after for key in keys)
    assert {source_of(key) for keys in after[-10:] for key in keys} == {"code"}
    again, _ = world(mix, 3, len(before) + len(after), {**state, "samples_seen": 0})
    assert again == merged([before + after])


def test_set_weights_from_a_row_is_the_same_on_ranks_that_cannot_ask_each_other(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, "web code", weights={"web": 1, "code": 0})
    found, states = [], []
    for rank in range(2):
        with DataLoader(mix, batch_size=6, device_mesh=mesh_of(2, rank)) as loader:
            batches = iter(loader)
            keys = [check_batch(next(batches)) for _ in range(3)]
            with pytest.raises(ConfigError, match=r"ranks must agree on a row.*at=row"):
                loader.set_weights({"web": 1, "code": 1})
            with pytest.raises(ConfigError, match="planned already"):
                loader.set_weights({"web": 1, "code": 1}, at=40)
            assert loader.set_weights({"web": 0, "code": 1}, at=120_000) == 120_000
            states.append(loader.state_dict())
            found.append(keys + [check_batch(next(batches)) for _ in range(3)])
    assert states[0] == states[1]
    assert merged(found) == world(mix, 1, 6)[0]


def test_set_weights_takes_the_place_of_what_a_schedule_had_in_store(sets: dict[str, SampleSet]) -> None:
    ramp = Schedule.steps({0: {"web": 1, "code": 0}, 10**6: {"web": 0, "code": 1}})
    mix = mixture(sets, "web code", weights=ramp, shuffle=FEW_LANES)
    with DataLoader(mix, batch_size=12) as loader:
        row = loader.set_weights({"web": 1, "code": 1})
        assert row < 10**6
        state = loader.state_dict()
    with DataLoader(mix, batch_size=12) as loader:
        loader.load_state_dict({**state, "samples_seen": 10**6 + 120_000})
        keys = Counter(source_of(key) for keys in take(loader, 50) for key in keys)
    assert abs(keys["web"] - 300) < 100


RANK = """
import json, sys
import torch.distributed as dist
from tests.support.sets.data_sets import check_batch
from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.errors import AgreementError

web, code, out = sys.argv[1:]
dist.init_process_group("gloo")
sources = {"web": StreamingDataset(web), "code": StreamingDataset(code)}
mix = Mixture(sources, weights={"web": 1, "code": 0}, shuffle=ShuffleConfig(lanes=2))
keys, rank = [], dist.get_rank()
with DataLoader(mix, batch_size=6) as loader:
    batches = iter(loader)
    for _ in range(3 + rank):  # rank 1 is ahead
        keys.append(check_batch(next(batches)))
    missed = ""
    if not rank:  # a call that rank 1 misses
        try:
            loader.set_weights({"web": 0, "code": 1}, timeout=0.2)
        except AgreementError as error:
            missed = str(error)
    dist.barrier()
    row = loader.set_weights({"web": 0, "code": 1})
    while len(keys) < row // 12 + 20:
        keys.append(check_batch(next(batches)))
    try:
        loader.set_weights({"web": 1, "code": rank})
        said = ""
    except AgreementError as error:
        said = str(error)
    state = loader.state_dict()
told = {"keys": keys, "row": row, "state": state, "said": said, "missed": missed}
json.dump(told, open(f"{out}-{rank}", "w"))
dist.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_processes_agree_on_the_row(sets: dict[str, SampleSet], tmp_path: Path, forked: Forked) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ["TORCHELASTIC_RUN_ID"] = "test"
    (program := tmp_path / "rank.py").write_text(RANK)
    urls = sets["web"].url, sets["code"].url
    ranks = forked.start_ranks(
        program, *urls, str(tmp_path / "out"), world_size=2, output=tmp_path / "log", environ=environ
    )
    assert set(all_end(ranks)) == {0}, (tmp_path / "log").read_text()[-4000:]
    told = [json.loads((tmp_path / f"out-{rank}").read_text()) for rank in range(2)]
    assert "ranks [1] of 2 did not come within 0.2 s, and nothing has changed" in told[0]["missed"]
    assert told[0]["row"] == told[1]["row"]
    assert told[0]["state"] == told[1]["state"]
    assert [entry["why"] for entry in told[0]["state"]["ledger"]] == ["start", "set_weights"]
    assert all("give the same on all ranks" in one["said"] for one in told)
    batches = merged([one["keys"] for one in told])
    assert set(map(source_of, total(batches[-5:]))) == {"code"}
    mix = mixture(sets, "web code", weights={"web": 1, "code": 0}, shuffle=FEW_LANES)
    assert world(mix, 3, len(batches), {**told[0]["state"], "samples_seen": 0})[0] == batches


@pytest.mark.parametrize(
    ("options", "weights", "words"),
    [
        ({}, {"web": 1, "code": 1}, "ends"),
        ({"weights": {"web": 1, "code": 1}}, {"web": 1}, "missing: code"),
        ({"weights": {"web": 1, "code": 1}}, {"web": 1, "cod": 1}, "'cod'"),
        ({"weights": {"web": 1, "code": 1}}, {"web": 0, "code": 0}, "at least one must be above 0"),
        ({"weights": {"web": 1, "code": 1}}, 0.5, "expected a dict"),
        (
            {"weights": {"web": 1, "code": 1}},
            Schedule.linear(0, 1, over=5),
            "got a Schedule; give a Schedule when resuming",
        ),
        ({"weights": {"web": 1, "code": 1}}, {"web": -1, "code": 1}, "set_weights: 'web': .* got -1"),
    ],
)
def test_set_weights_refuses_what_it_cannot(
    sets: dict[str, SampleSet], options: dict[str, Any], weights: Any, words: str
) -> None:
    with (
        DataLoader(mixture(sets, "web code", **options), batch_size=4) as loader,
        pytest.raises(ConfigError, match=words),
    ):
        loader.set_weights(weights)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(({"timeout": seconds}, "set_weights: timeout: expected seconds above 0, got")
          for seconds in ("x", None, 0, -1, True, float("nan"), float("inf"), [5])),
        ({"at": 10**18}, r"set_weights: at: expected an integer in \[0, 1125899906842624\], got 10{18}"),
        ({"at": 5.0}, r"set_weights: at: expected an integer, got 5.0 .*write 5"),
    ],
)  # fmt: skip
def test_set_weights_refuses_rows_and_waits_that_cannot_be(
    sets: dict[str, SampleSet], given: dict[str, Any], words: str
) -> None:
    with DataLoader(mixture(sets, "web code", weights={"web": 1, "code": 1}), batch_size=4) as loader:
        state = loader.state_dict()
        with pytest.raises(ConfigError, match=words):
            loader.set_weights({"web": 1, "code": 2}, **given)
        assert loader.state_dict() == state


def test_states_of_other_makes_are_refused(sets: dict[str, SampleSet], tmp_path: Path) -> None:
    endless = mixture(sets, "web code", weights={"web": 1, "code": 1}, shuffle=FEW_LANES)  # web is dealt in chunks
    _, state = world(endless, 1, 5)
    with DataLoader(sets["web"].open(), batch_size=12) as loader:
        single = loader.state_dict()
    assert single["ledger"] is None
    for dataset, wrong, words in (
        (mixture(sets, "code", weights={"code": 1}), state, r"drew from 'web'.*weight 0"),
        (mixture(sets, "web code"), state, "a different mixture"),
        (sets["web"].open(), state, "mixture of code, web"),
        (endless, single, "single data set"),
    ):
        with DataLoader(dataset, batch_size=12) as loader, pytest.raises(StateError, match=words):
            loader.load_state_dict(wrong)
    other = Mixture(
        {"web": write_set(tmp_path, (30,)).open(), "code": sets["code"].open()}, weights={"web": 1, "code": 1}
    )
    with DataLoader(other, batch_size=12) as loader, pytest.raises(StateError, match=r"source 'web'.*web-2"):
        loader.load_state_dict(state)


def test_a_source_dropped_by_the_weight_0_is_read_no_more(sets: dict[str, SampleSet]) -> None:
    both = mixture(sets, "web code", weights={"web": 1, "code": 1}, shuffle=FEW_LANES)
    before, state = world(both, 1, 7)
    alone = mixture(sets, "web code", weights={"web": 1, "code": 0})
    with DataLoader(alone, batch_size=12) as loader:
        loader.load_state_dict(state)
        start = loader.state_dict()["ledger"][-1]["from"] // 12
        after = take(loader, start + 40)
        last = loader.state_dict()
    assert {source_of(key) for keys in after[start + 5 :] for key in keys} == {"web"}
    assert before + merged([after]) == world(alone, 2, 7 + len(after), {**last, "samples_seen": 0})[0]


def free_row(sets: dict[str, SampleSet], state: Any) -> int:
    """The row from which on "math" may be left out, as the error of an earlier state tells."""
    with (
        DataLoader(mixture(sets, "web code", weights={"web": 1, "code": 2}), batch_size=12) as loader,
        pytest.raises(StateError, match=r"draws from 'math', which it lacks.*weight 0 up to row [0-9,]+ or so") as told,
    ):
        loader.load_state_dict(state)
    return int(str(told.value).partition("up to row ")[2].partition(" ")[0].replace(",", ""))


@pytest.mark.thorough
def test_a_source_that_was_dropped_may_be_gone_when_it_is_read_to_its_end(sets: dict[str, SampleSet]) -> None:
    """The others go on as if it stood in the mixture with the weight 0, on any world, and it may come back."""
    even = dict.fromkeys(SIZES, 1)
    weights = {"web": 1, "code": 2, "math": 0}
    _, state = world(mixture(sets, weights=even, shuffle=FEW_LANES), 2, 20)
    zero = mixture(sets, weights=weights)
    with DataLoader(zero, batch_size=12) as loader:
        loader.load_state_dict(state)
        soon = json.loads(json.dumps(loader.state_dict()))
        take(loader, -(-free_row(sets, soon) // 12) - 20)
        late = json.loads(json.dumps(loader.state_dict()))
        drawn = loader.seen()["math"]["samples"]
        expected = merged([take(loader, 60)])
        kept = loader.state_dict()
    laid = late["ledger"][-1]["laid"]["math"]
    assert (len(laid), sum(laid)) == (2, drawn)
    assert len(json.dumps(late["ledger"])) < 1000

    without = mixture(sets, "web code", weights={"web": 1, "code": 2})
    before, halfway = world(without, 3, 25, late)
    after, last = world(without, 1, 35, json.loads(json.dumps(halfway)))
    assert before + after == expected
    assert [sorted(entry["sources"]) for entry in last["ledger"][-2:]] == [["code", "math", "web"], ["code", "web"]]
    with DataLoader(without, batch_size=12) as loader:
        loader.load_state_dict(last)
        assert loader.seen()["math"] == {"samples": drawn}
        with pytest.raises(
            StateError, match=r"drew from 'math', which this mixture lacks.*set_weights.*be left out and deleted"
        ):
            loader.load_state_dict(state)
    back = mixture(sets, weights=even)
    assert world(back, 1, 20, last)[0] == world(back, 2, 20, kept)[0]


def test_weights_of_a_running_job_let_a_source_be_dropped_too(sets: dict[str, SampleSet]) -> None:
    with DataLoader(mixture(sets, weights=dict.fromkeys(SIZES, 1), shuffle=FEW_LANES), batch_size=12) as loader:
        take(loader, 5)
        loader.set_weights({"web": 1, "code": 1, "math": 0})
        assert sorted(loader.state_dict()["ledger"][-1]["laid"]) == ["math"]
        take(loader, 190)
        state = loader.state_dict()
        expected = merged([take(loader, 30)])
        loader.set_weights({"web": 1, "code": 1, "math": 1})
        again = loader.state_dict()
    without = mixture(sets, "web code", weights={"web": 1, "code": 1})
    assert world(without, 2, 30, state)[0] == expected
    with DataLoader(without, batch_size=12) as loader, pytest.raises(StateError, match="drew from 'math'"):
        loader.load_state_dict(again)  # it was drawn from once more


def test_of_sources_that_are_too_many_for_a_state_it_says_that_they_stay(
    sets: dict[str, SampleSet], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_MOST_LAID", 1)
    with DataLoader(mixture(sets, weights=dict.fromkeys(SIZES, 1), shuffle=FEW_LANES), batch_size=12) as loader:
        take(loader, 5)
        with caplog.at_level(logging.INFO, "streaming"):
            loader.set_weights({"web": 1, "code": 1, "math": 0})
        assert "laid" not in loader.state_dict()["ledger"][-1]
    assert any("math: without a weight" in line and "keep it in the mixture" in line for line in caplog.messages)


def test_the_line_at_the_start_says_when_passes_begin(
    sets: dict[str, SampleSet], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "streaming"):
        world(mixture(sets, "web math", weights={"web": 1, "math": 1}), 1, 1)
    line = next(record.message for record in caplog.records if "epoch 0 begins" in record.message)
    assert "without end" in line
    assert "math begins its second pass at step 10, web begins its second pass at step 19" in line


def test_sources_too_small_for_whole_chunks_are_warned_about_once(
    fine_sets: dict[str, SampleSet], caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks have 4 of 83 samples; half the square root of 4 chunks are a twentieth of these, not quite.

    With more lanes, they are dealt by samples: then shares are exact.
    """

    def told(lanes: int, mesh: DeviceMesh | None = None, **options: Any) -> list[str]:
        caplog.clear()
        mix = mixture(fine_sets, "code math", shuffle=ShuffleConfig(lanes=lanes), **options)
        with DataLoader(mix, global_batch_size=12, device_mesh=mesh) as loader:
            take(loader, 1)
            take_on(loader, 1)
            if mesh is None:
                loader.remesh(0, 1, at=loader.state_dict())
                take(loader, 1)
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    both = {"code": 0.28, "math": 0.72}
    [warning] = told(5, weights=both)
    assert "a chunk of 'math' has 4 of their 83 samples" in warning
    assert "drawn in 5 lanes" in warning
    assert "about 4 samples ahead of or behind its share" in warning
    assert 'quotas="exact"' in warning
    assert told(4, weights=both) == []
    assert told(21, weights=both) == []
    assert told(5, weights=both, quotas="exact") == []
    assert told(5) == []  # all of both, once
    assert told(5, weights={"code": 0, "math": 1}) == []
    assert told(5, mesh_of(2, 1), weights=both) == []  # the first rank says it


# --- sources with options of their own ---


def test_sources_have_their_own_decoders_fields_and_transforms(sets: dict[str, SampleSet]) -> None:
    mix = Mixture(
        {
            "web": sets["web"].open(fields=("cls", "txt"), transform=mark),
            "code": sets["code"].open(decode={"cls": str}),
        }
    )
    for num_workers in (0, 2):
        with DataLoader(mix, batch_size=71, num_workers=num_workers) as loader:
            batch = next(iter(loader))
        for i, source in enumerate(batch["__source__"]):
            key = batch["__key__"][i]
            assert batch["cls"][i] == (int(key) if source == "web" else str(int(key)))
            assert batch["mark"][i] == (f"{key} of web" if source == "web" else None)
            assert (batch["bin"][i] is None) == (source == "web")
    assert set(batch["__source__"]) == {"web", "code"}


def mark(sample: Any) -> Any:
    return {**sample, "mark": f"{sample['__key__']} of {sample['__source__']}"}


def test_the_same_set_twice_and_as_a_view(sets: dict[str, SampleSet]) -> None:
    web = sets["web"].open()
    mix = Mixture({"a": web, "b": web, "c": web[10:20], "d": sets["web"].open(fields=("cls",))})
    keys: Counter[tuple[str, str]] = Counter()
    for samples in DeviceMeshFetcher(mix, batch_size=16, last_batch="partial"):
        for sample in samples:
            assert ("txt" in sample) == (sample["__source__"] != "d")
            keys[sample["__source__"], sample["__key__"]] += 1
    assert set(keys.values()) == {1}
    assert Counter(source for source, _ in keys) == {"a": 119, "b": 119, "c": 10, "d": 119}


def test_the_same_bytes_are_read_by_one_source_without_a_large_field(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar") as writer:
        for number in range(12):
            writer.write({"__key__": str(number), "cls": number, "bin": bytes([number]) * 300_000})
    mix = Mixture({"a": StreamingDataset(str(tmp_path), fields=("cls",)), "b": StreamingDataset(str(tmp_path))})
    with DataLoader(mix, batch_size=6, num_workers=1, collate_fn=list) as loader:
        samples = [sample for batch in loader for sample in batch]
    assert len(samples) == 24
    for sample in samples:
        expected = bytes([sample["cls"]]) * 300_000 if sample["__source__"] == "b" else None
        assert sample.get("bin") == expected


def test_bad_samples_are_replaced_by_their_own_source_and_counted_by_it(tmp_path: Path) -> None:
    good, bad = (write_set(tmp_path / name, (60,), chunk_samples=4, first=first) for name, first in
                 (("good", 0), ("bad", 10_000)))  # fmt: skip
    data = bytearray((tmp_path / "bad" / "000000.tar").read_bytes())
    place = data.find(b"text of 10007")
    data[place : place + 4] = b"????"
    (tmp_path / "bad" / "000000.tar").write_bytes(data)
    mix = Mixture({"good": good.open(), "bad": bad.open(max_bad_samples=5)})
    with DataLoader(mix, batch_size=10, last_batch="partial") as loader:
        keys = Counter(key for batch in loader for key in batch["__key__"])
        lost = {one["key"] for one in loader.metrics()["bad"]}
    assert lost
    assert lost <= set(bad.keys)
    assert not lost & set(keys)
    assert sum(keys[key] for key in bad.keys) == 60
    strict = Mixture({"good": good.open(max_bad_samples=1000), "bad": bad.open(max_bad_samples=0)})
    with (
        DataLoader(strict, batch_size=10) as loader,
        pytest.raises(TooManyBadSamplesError, match=r"of the source 'bad'.*allows 0"),
    ):
        list(loader)
    counted = Mixture(
        {"good": good.open(), "bad": bad.open(max_bad_samples=1.0)}, max_bad_samples=np.int64(len(lost) - 1)
    )
    with (
        DataLoader(counted, batch_size=10) as loader,
        pytest.raises(TooManyBadSamplesError, match=rf"max_bad_samples={len(lost) - 1} allows {len(lost) - 1}\."),
    ):
        list(loader)
    lenient = Mixture({"good": good.open(max_bad_samples=1), "bad": bad.open(max_bad_samples=0.5)})
    with DataLoader(lenient, batch_size=10) as loader:  # the count of one source is no limit to the other
        assert len(list(loader)) == 12
    later = Schedule.steps({0: {"good": 1, "bad": 0}, 12_000: {"good": 0, "bad": 1}})
    growing = Mixture({"good": good.open(), "bad": bad.open(max_bad_samples=0.5)}, weights=later, shuffle=FEW_LANES)
    with DataLoader(growing, batch_size=10) as loader:  # a share of what is drawn from where the run goes on
        loader.load_state_dict({**loader.state_dict(), "samples_seen": 24_000})
        for _ in zip(range(20), loader, strict=False):
            pass
        assert loader.metrics()["bad"]


def test_it_is_a_data_set_like_any_other(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, repeats={"web": 1, "code": 2, "math": 0})
    code, web = sets["code"].keys, sets["web"].keys
    assert [mix[i]["__key__"] for i in (0, 23, 46, -1)] == [code[0], code[0], web[0], web[-1]]
    assert mix[0]["__source__"] == "code"
    with pytest.raises(IndexError, match="165 samples"):
        mix[165]
    with pytest.raises(ConfigError, match="a mixture cannot be sliced"):
        mix[:5]
    again = pickle.loads(pickle.dumps(mix))
    assert (again.fingerprint, len(again), again[46]["txt"]) == (mix.fingerprint, len(mix), "text of 0")
    assert repr(mix).startswith("Mixture(3 sources: code, math, web, 202 samples")
    marked = mix.map(mark)
    assert marked[0]["mark"] == f"{sets['code'].keys[0]} of code"
    assert marked.fingerprint == mix.fingerprint != mixture(sets, "web code").fingerprint


@pytest.mark.thorough
def test_from_a_bucket_killed_and_resumed_on_another_world(mini_s3: MiniS3Server) -> None:
    """Sources in two stores: one signed for, one on disk; each keeps its own storage options."""
    bucket = mini_s3.create_bucket("mixtures")
    web = write_set(f"{bucket}/web", (41, 20), storage_options=mini_s3.storage_options)
    code = write_set(f"{bucket}/code", (30,), first=10_000, storage_options=mini_s3.storage_options)
    mix = Mixture({"web": web.open(), "code": code.open()}, weights={"web": 2, "code": 1})
    whole, _ = world(mix, 1, 12)
    before, state = world(mix, 2, 5)
    again = Mixture({"code": code.open(), "web": web.open()}, weights={"web": 2, "code": 1})
    after, _ = world(again, 3, 7, state, num_workers=2)
    assert before + after == whole
    with DataLoader(mix, batch_size=12) as loader:
        take(loader, 3)
        assert loader.metrics()["fetched_bytes"] > 0


def test_one_source_alone_is_a_mixture(sets: dict[str, SampleSet]) -> None:
    batches, _ = world(mixture(sets, "web", weights={"web": 3}), 2, 20)
    assert set(map(source_of, total(batches))) == {"web"}


def test_nested_shares_multiply(sets: dict[str, SampleSet]) -> None:
    text = Mixture({"en": sets["web"].open(), "de": sets["math"].open()}, weights={"en": 3, "de": 1})
    mix = Mixture({"text": text, "code": sets["code"].open()}, weights={"text": 0.8, "code": 0.2})
    assert mix.source.begun().last.weights == pytest.approx({"code": 0.2, "text/de": 0.2, "text/en": 0.6})
    by_size = Mixture({"text": mixture(sets, "web math"), "code": sets["code"].open()})
    assert len(by_size) == 202
    with pytest.raises(ConfigError, match=r"'text' is a mixture without end.*ends="):
        Mixture({"text": text, "code": sets["code"].open()})


def test_shares_of_bytes_are_divided_by_the_mean_size(
    sets: dict[str, SampleSet], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "streaming"):
        mix = mixture(sets, "web code", weights={"web": 1, "code": 1}, unit="bytes")
    means = {name: float(one.chunk_bytes.sum() / one.chunk_samples.sum()) for name, one in mix.source.leaves.items()}
    shares = mix.source.begun().last.weights
    assert shares["web"] * means["web"] == pytest.approx(shares["code"] * means["code"])
    assert f"web {means['web']:.1f}" in caplog.text
    filtered = Mixture({"web": sets["web"].open(where="__key__ != '00001'")}, weights={"web": 1}, unit="bytes")
    assert filtered.sizes["web"] == mix.sizes["web"] - 1
    assert filtered.source.weighing.units_per_sample["web"] == pytest.approx(
        means["web"]
    )  # of samples as they lie in chunks
    shares = (
        mix.source.begun().changed(mix.source.weighing.weighed({"web": 1, "code": 3}), 100).last.weights
    )  # so are those of set_weights
    assert shares["web"] * means["web"] * 3 == pytest.approx(shares["code"] * means["code"])
    with pytest.raises(ConfigError, match=r"source '.*' has no column \"tokens\".*column add"):
        mixture(sets, "web code", weights={"web": 1, "code": 1}, unit="tokens")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda web: Mixture({}), "at least one"),
        (lambda web: Mixture("s3://bucket/"), "expected a dict of data sets by name"),
        (lambda web: Mixture([web]), "got list"),
        (lambda web: Mixture({"web": "s3://bucket/web/"}), "write StreamingDataset"),
        (lambda web: Mixture({"web/en": web}), "slash"),
        (lambda web: Mixture({"": web}), "names"),
        (lambda web: Mixture({3: web}), "got 3"),
        (lambda web: Mixture({"web": web[:0]}), "no samples"),
        (lambda web: Mixture({"web": web}, weights={"web": 1}, repeats={"web": 1}), "give only one"),
        (lambda web: Mixture({"web": web}, weights={"wen": 1}), "sources are web, got 'wen'"),
        (lambda web: Mixture({"web": web}, weights={}), "missing: web .give 0"),
        (lambda web: Mixture({"web": web}, weights="web"), "expected a dict"),
        (lambda web: Mixture({"web": web}, weights=[0.5]), r'such as \{"web": 1\}, got \[0\.5\]'),
        (lambda web: Mixture({"web": web}, weights=(w for w in [0.5])), "got a generator"),
        (lambda web: Mixture({"web": web}, weights=lambda row: {"web": 1}), r"got a function; .*Schedule\.custom"),
        (
            lambda web: Mixture({"web": web}, weights={"web": {"en": 1}}),
            "give a mixture within a mixture its own weights=",
        ),
        (lambda web: Mixture({"web": web}, weights={"web": 1, "web/en": 1}), "give a mixture within a mixture its own"),
        (lambda web: Mixture({"web": web}, weights={"web": math.nan}), "weights: 'web': .* got nan"),
        (
            lambda web: Mixture({"web": web}, repeats={"web": -1}),
            "repeats: 'web': expected a number of at least 0, got -1",
        ),
        (lambda web: Mixture({"web": web}, weights={"web": -1}), "got -1"),
        (lambda web: Mixture({"web": web}, weights={"web": 0}), "above 0"),
        (lambda web: Mixture({"web": web}, weights=Schedule.linear(0, 1, over=5)), "one of numbers"),
        (lambda web: Mixture({"web": web}, repeats={"web": 0}), "above 0"),
        (lambda web: Mixture({"web": web}, repeats={"web": 1}, unit="bytes"), "they apply to weights"),
        (lambda web: Mixture({"web": web}, ends="first"), "they apply to weights"),
        (lambda web: Mixture({"web": web}, weights={"web": 1}, ends="last"), "ends: expected one of"),
        (lambda web: Mixture({"web": web}, quotas="all"), "quotas: expected one of"),
        (lambda web: Mixture({"web": web}, batches="one"), "batches: expected one of"),
        (lambda web: Mixture({"web": web}, shuffle=3), "shuffle"),
        (lambda web: Mixture({"web": web}, seed=-1), "seed"),
        (lambda web: Mixture({"web": web}, max_bad_samples=-1), "max_bad_samples"),
        (lambda web: Mixture({"web": web}, wieghts={"web": 1}), "weights"),
        (lambda web: Mixture({"web": web}, decode=None), "it belongs to each source"),
    ],
)
def test_wrong_arguments_name_the_cure(sets: dict[str, SampleSet], make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(sets["web"].open())


def test_a_source_without_an_index_is_refused(tmp_path: Path, not_scanned: None) -> None:
    bare = write_set(tmp_path, (9,), indexed=False).open()
    with pytest.raises(IndexMissingError):
        Mixture({"bare": bare})


def test_sets_with_the_same_options_are_read_through_one_storage(tmp_path: Path) -> None:
    """One client, and its connections, for many sets; the sets of the caller stay as they are, all is counted once."""
    options = [{"max_retries": 3}, {"max_retries": 3}, {"max_retries": 4}]
    sets = {}
    for name, chosen in zip("abc", options, strict=True):
        write_set(tmp_path / name, (8,))
        sets[name] = StreamingDataset(f"{tmp_path}/{name}/", storage_options=chosen)
    own = [one.source.storage for one in sets.values()]
    mixture = Mixture(sets)
    before = [storage.metrics.get("requests") for storage in own]
    for name in "abc":
        chunk = mixture.source.source_of(np.arange(len(mixture.source.chunk_samples))).tolist().index("abc".index(name))
        wanted = mixture.source.chunk(chunk)
        mixture.source.fetch_unit(wanted, memoryview(bytearray(wanted.num_bytes)))
    grown = [storage.metrics.get("requests") - was for storage, was in zip(own, before, strict=True)]
    assert grown[0] == 2 * grown[2] > 0
    assert grown[1] == 0
    assert [one.source.storage for one in sets.values()] == own
    assert mixture.source.counters()["requests"] == sum(storage.metrics.get("requests") for storage in own)


@pytest.mark.parametrize("weights", [None, dict.fromkeys(SIZES, 1)])
def test_of_what_memory_holds_whole_nobody_looks_up_what_is_needed_at_once(
    sets: dict[str, SampleSet], weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, look = list[int](), Plan.live_bytes
    monkeypatch.setattr(Plan, "live_bytes", lambda plan, *given: (looked.append(1), look(plan, *given))[1])
    found = []
    for read_ahead in (budget.READ_AHEAD_BYTES, 0):
        monkeypatch.setattr(budget, "READ_AHEAD_BYTES", read_ahead)
        with DataLoader(mixture(sets, weights=weights), 12) as loader:
            found.append(take(loader, 5))
        assert len(looked) == (read_ahead == 0)
    assert found[0] == found[1]


@pytest.mark.parametrize("unit", ["samples", "bytes"])
def test_a_mixture_travels_to_other_processes_whatever_its_weights_count(sets: dict[str, SampleSet], unit: Any) -> None:
    parts = {name: one.open() for name, one in sets.items()}
    mixture = Mixture(parts, weights=dict.fromkeys(parts, 1), unit=unit)
    for other in (pickle.loads(pickle.dumps(mixture)), copy.deepcopy(mixture)):
        assert other.source.begun() == mixture.source.begun()
