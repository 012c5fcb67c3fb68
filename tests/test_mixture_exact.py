"""Mixtures with exact quotas, or batches of one source, as users see them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_sets import Batches, SampleSet, check_batch, merged, total, write_set
from test_mixture import FIRST, mixture, source_of, take, world

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError, MemoryLimitError, StateError

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
    assert state["version"] == 3


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
        loader.load_state_dict({**last, "samples_seen": 0})  # what is gone cannot be drawn again
        with pytest.raises(StateError, match=r"draws from 'math', which this mixture lacks.*dropped"):
            take(loader, 20)
    back = mixture(sets, weights=EVEN, **options)
    assert world(back, 1, 20, last)[0] == world(back, 2, 20, kept)[0]


def test_a_state_is_of_one_way_of_dealing(sets: dict[str, SampleSet]) -> None:
    states = {}
    for name, options in {"chunks": {}, "exact": EXACT, "one": ONE_SOURCE}.items():
        with DataLoader(mixture(sets, weights=EVEN, **options), batch_size=12) as loader:
            states[name] = loader.state_dict()
    with DataLoader(mixture(sets, weights=EVEN, **EXACT), batch_size=12) as loader:
        with pytest.raises(StateError, match=r'drawn with quotas="chunks", this mixture with quotas="exact".*the same'):
            loader.load_state_dict(states["chunks"])
        with pytest.raises(StateError, match=r'drawn with batches="one_source" and 12 samples'):
            loader.load_state_dict(states["one"])
    with (
        DataLoader(mixture(sets, weights=EVEN, **ONE_SOURCE), batch_size=6) as loader,
        pytest.raises(StateError, match=r"12 samples each.*batch has 6.*global_batch_size=12"),
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
