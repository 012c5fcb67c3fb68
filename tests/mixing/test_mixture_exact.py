"""Mixtures with exact quotas, or batches of one source, as users see them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError, MemoryLimitError, StateError
from tests.support.sets.data_sets import Batches, SampleSet, check_batch, merged, mesh_of, play, total, write_set
from tests.support.sets.mixtures import FIRST, mixture, source_of, take, world

EXACT, ONE_SOURCE = {"quotas": "exact"}, {"batches": "one_source"}
FEW_LANES = ShuffleConfig(lanes=2)
EVEN = {"web": 1, "code": 1, "math": 1}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    root = tmp_path_factory.mktemp("sets")
    shards = {"web": (41, 7, 23, 1, 47), "code": (20, 3), "math": (60,)}
    return {name: write_set(root / name, sizes, first=FIRST[name]) for name, sizes in shards.items()}


def of_one_source(batches: Batches) -> bool:
    return all(len({source_of(key) for key in batch}) == 1 for batch in batches)


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("options", [EXACT, ONE_SOURCE])
def test_any_world_stopped_and_resumed_gives_the_same_batches(
    sets: dict[str, SampleSet], options: dict[str, Any]
) -> None:
    weights = {"web": 0.5, "code": 0.3, "math": 0.2}
    mix = mixture(sets, weights=weights, **options)
    whole, _ = world(mix, 1, 40)
    before, state = world(mix, 3, 17)
    after, _ = world(mix, 2, 23, state, num_workers=2)
    assert before + after == whole
    counts = Counter(map(source_of, total(whole).elements()))
    unit = 12 if options is ONE_SOURCE else 1
    assert all(abs(counts[name] - share * 480) <= 2 * unit for name, share in weights.items())
    assert of_one_source(whole) == (options is ONE_SOURCE)


@pytest.mark.parametrize("options", [EXACT, ONE_SOURCE])
def test_a_source_that_is_dropped_may_be_gone(sets: dict[str, SampleSet], options: dict[str, Any]) -> None:
    """The others go on as if it stood in the mixture with the weight 0, and it may come back."""
    run, state = world(mixture(sets, weights=EVEN, **options), 2, 20)
    drawn = Counter(map(source_of, total(run).elements()))
    zero = mixture(sets, weights={"web": 1, "code": 2, "math": 0}, **options)
    expected, kept = world(zero, 1, 40, state)
    without = mixture(sets, "web code", weights={"web": 1, "code": 2}, **options)
    before, halfway = world(without, 3, 15, state)
    after, last = world(without, 1, 25, halfway)
    assert before + after == expected
    assert [sorted(entry["sources"]) for entry in last["ledger"]] == [["code", "math", "web"], ["code", "web"]]
    assert last["ledger"][-1]["from"] == 240
    with DataLoader(without, batch_size=12) as loader:
        loader.load_state_dict(last)
        assert loader.seen()["math"] == {"samples": drawn["math"]}
        with pytest.raises(
            StateError, match=r"rows 0 to 240 draw from 'math', which this mixture lacks.*Add the source"
        ):
            loader.load_state_dict({**last, "samples_seen": 0})  # what is gone cannot be drawn again
    back = mixture(sets, weights=EVEN, **options)
    assert world(back, 1, 20, last)[0] == world(back, 2, 20, kept)[0]


def test_a_state_is_of_one_way_of_dealing(sets: dict[str, SampleSet]) -> None:
    states = {}
    for name, options in {"chunks": {}, "exact": EXACT, "one": ONE_SOURCE}.items():
        with DataLoader(mixture(sets, weights=EVEN, **options), batch_size=12) as loader:
            states[name] = loader.state_dict()
    with DataLoader(mixture(sets, weights=EVEN, **EXACT), batch_size=12) as loader:
        with pytest.raises(
            StateError, match=r'drawn with quotas="chunks", but this mixture draws with quotas="exact".*the same'
        ):
            loader.load_state_dict(states["chunks"])
        with pytest.raises(StateError, match=r'drawn with batches="one_source" and 12 samples'):
            loader.load_state_dict(states["one"])
    with (
        DataLoader(mixture(sets, weights=EVEN, **ONE_SOURCE), batch_size=6) as loader,
        pytest.raises(StateError, match=r"one-source batches of 12 samples.*batch has 6.*global_batch_size=12"),
    ):
        loader.load_state_dict(states["one"])


def test_epochs_of_batches_of_one_source_are_whole_batches(sets: dict[str, SampleSet]) -> None:
    mix = mixture(sets, weights=EVEN, **ONE_SOURCE)
    with pytest.raises(ConfigError, match=r"epoch_size: .*a multiple of the global batch, 12, got 30"):
        DataLoader(mix, batch_size=12, epoch_size=30)
    with pytest.raises(ConfigError, match=r"5 lanes do not divide a global batch of 12"):
        next(iter(DataLoader(mixture(sets, weights=EVEN, shuffle=ShuffleConfig(lanes=5), **ONE_SOURCE), batch_size=12)))
    whole, _ = world(mix, 1, 20)
    with DataLoader(mix, batch_size=12, epoch_size=60) as loader:
        assert merged([[check_batch(batch) for _ in range(4) for batch in loader]]) == whole
    odd = mixture(sets, weights=EVEN, **ONE_SOURCE)  # 53 has no divisors: one lane
    with DataLoader(odd, batch_size=53) as loader:
        assert of_one_source([Counter(keys) for keys in take(loader, 3)])


ENDING: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "by size": ({}, {"web": 119, "code": 23, "math": 60}),
    "repeats": ({"repeats": {"web": 1, "code": 2.5, "math": 0.5}}, {"web": 119, "code": 58, "math": 30}),
    "first": ({"weights": {"web": 2, "code": 1, "math": 1}, "ends": "first"}, {"web": 46, "code": 23, "math": 23}),
    "all": ({"weights": {"web": 2, "code": 2, "math": 1}, "ends": "all"}, {"web": 120, "code": 120, "math": 60}),
}


@pytest.mark.parametrize("options", [EXACT, ONE_SOURCE])
@pytest.mark.parametrize("ending", list(ENDING))
def test_mixtures_that_end_give_each_sample_as_often_as_promised(
    sets: dict[str, SampleSet], ending: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """On any world, stopped and resumed; of batches of one source the whole ones, and what is left comes first next."""
    given, quotas = ENDING[ending]
    mix = mixture(sets, **given, **options)
    expected = quotas if options is EXACT else {name: count - count % 12 for name, count in quotas.items()}
    with caplog.at_level(logging.INFO, "streaming"):
        epochs = merged(play(mix, 1, global_batch_size=12, last_batch="partial", epochs=3, num_threads=0))
    steps = len(epochs) // 3
    for epoch in range(3):
        counts = total(epochs[epoch * steps : (epoch + 1) * steps])
        assert Counter(source_of(key) for key in counts.elements()) == expected
    often = total(epochs)
    for name, one in sets.items():
        times = Counter(often[key] for key in one.keys)
        passes, more = divmod(3 * expected[name], len(one.keys))
        assert times == {one: count for one, count in ((passes, len(one.keys) - more), (passes + 1, more)) if count}
    assert of_one_source(epochs) == (options is ONE_SOURCE)
    cut = sum(quotas.values()) - sum(expected.values())
    told = [message for message in caplog.messages if "whole batches of each source" in message]
    assert bool(told) == bool(cut)
    assert all(f"an epoch has {sum(expected.values())} of {sum(quotas.values())} samples" in one for one in told)
    before, state = world(mix, 3, 3, num_threads=0, last_batch="partial")
    after, _ = world(mix, 2, steps - 3, state, num_threads=0, last_batch="partial")
    assert before + after == epochs[:steps]


def test_shares_of_a_mixture_that_ends_are_exact_at_every_step(sets: dict[str, SampleSet]) -> None:
    """Where they hold up to chunks otherwise; ``seen`` says what came, also behind a resume."""
    mix = mixture(sets, **EXACT)
    with DataLoader(mix, batch_size=9, num_threads=0, last_batch="partial") as loader:
        counts: Counter[str] = Counter(web=0, code=0, math=0)
        for step, batch in enumerate(loader, start=1):
            counts.update(batch["__source__"])
            assert all(abs(counts[name] - size * 9 * step / 202) <= 4 for name, size in mix.sizes.items() if step < 22)
            if step == 11:
                seen = loader.seen()
                state = loader.state_dict()
                assert {name: one["samples"] for name, one in seen.items()} == counts
        assert counts == mix.sizes
    with DataLoader(mix, global_batch_size=9, device_mesh=mesh_of(3, 1), last_batch="partial") as loader:
        loader.load_state_dict(state)
        assert loader.seen() == seen


def test_a_source_of_less_than_a_batch_cannot_be_dealt_in_batches(sets: dict[str, SampleSet]) -> None:
    with pytest.raises(ConfigError, match=r"'code' gives 23 samples an epoch, too few for .* of 24: .*repeats="):
        DataLoader(mixture(sets, **ONE_SOURCE), batch_size=24)
    with DataLoader(mixture(sets, repeats={"web": 1, "code": 0, "math": 1}, **ONE_SOURCE), batch_size=24) as loader:
        assert len(loader) == 4 + 2


def test_too_little_memory_is_refused_with_what_would_help(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        with ShardWriter(f"{tmp_path / name}/{{:06d}}.tar") as writer:
            for number in range(16):
                writer.write({"__key__": f"{number:03d}", "bin": bytes(100_000)})
    sources = {name: StreamingDataset(f"{tmp_path / name}/", decode=None) for name in ("a", "b", "c")}
    options: dict[str, Any] = {"batch_size": 4, "memory_limit": "2MiB"}
    with (
        DataLoader(Mixture(sources, weights=dict.fromkeys(sources, 1), **EXACT), **options) as loader,
        pytest.raises(MemoryLimitError, match=r'memory_limit="\d+MiB".*quotas="exact" keeps chunks.*quotas="chunks"'),
    ):
        next(iter(loader))


def test_states_go_through_json(sets: dict[str, SampleSet]) -> None:
    with DataLoader(mixture(sets, weights=EVEN, **ONE_SOURCE), batch_size=12) as loader:
        state = loader.state_dict()
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert loader.state_dict() == state
