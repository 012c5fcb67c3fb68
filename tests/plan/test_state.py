"""The state is small, JSON-able, and refuses what is not a state."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard_tools.look.plan.steps import read_state
from streaming.errors import StateError
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.state import STATE_VERSION, LoaderState
from streaming.others.torch_datasets.iterable import IterableState
from streaming.others.torch_datasets.worker_parts import Cursor
from streaming.storage import Storage

STATE = LoaderState(
    epoch=3,
    samples_seen=128,
    order=OrderSettings(seed=1, lanes=8, window=100),
    fingerprint="crc32c:0badcafe",
    num_samples=1797,
)

# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(
    epoch=st.integers(0, 2**40),
    seen=st.integers(0, 1000),
    seed=st.integers(0, 2**64 - 1),
    next_seed=st.none() | st.integers(0, 2**64 - 1),
    epoch_size=st.none() | st.integers(1000, 2**50),
    has_begun=st.booleans(),
)
def test_states_go_through_json(
    epoch: int, seen: int, seed: int, next_seed: int | None, epoch_size: int | None, has_begun: bool
) -> None:
    state = LoaderState(
        epoch=epoch,
        samples_seen=seen,
        order=OrderSettings(seed=seed, lanes=4, window=7),
        next_seed=next_seed,
        fingerprint="f",
        num_samples=1000,
        epoch_size=epoch_size,
        has_begun=has_begun,
    )
    text = json.dumps(state.to_dict(), sort_keys=True)
    assert LoaderState.from_dict(json.loads(text)) == state
    assert len(text) < 400


def test_the_end_of_an_epoch_and_the_start_of_the_next_are_the_same_row() -> None:
    end = replace(STATE, samples_seen=STATE.num_samples, next_seed=5)
    assert end.is_end
    assert end.onward == replace(end, epoch=4, samples_seen=0)
    assert end.onward.seeded_from == end.seeded_from == 4
    for inside in (STATE, replace(STATE, samples_seen=0), replace(STATE, epoch_size=10_000, samples_seen=1797)):
        assert not inside.is_end
        assert inside.onward is inside
    passes = IterableState(**{one.name: getattr(STATE, one.name) for one in fields(STATE)})
    assert passes.is_end, "nothing is left to read"
    assert not replace(passes, cursors=(Cursor(worker=0, pass_number=3, num_items=9),)).is_end


def test_tools_go_on_after_an_end(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(replace(STATE, samples_seen=STATE.num_samples).to_dict()))
    assert read_state(f"{tmp_path}/state.json", Storage()) == replace(STATE, epoch=4, samples_seen=0)


def test_the_layout_is_pinned() -> None:
    """A change here needs a new STATE_VERSION and a CHANGELOG entry under Checkpoint format."""
    assert STATE.to_dict() == {
        "version": 1,
        "epoch": 3,
        "samples_seen": 128,
        "order": {"seed": 1, "lanes": 8, "window": 100, "shuffle": True},
        "next_seed": None,
        "fingerprint": "crc32c:0badcafe",
        "num_samples": 1797,
        "epoch_size": None,
        "has_begun": False,
        "batch_sizes": None,
        "lengths": None,
        "ledger": None,
        "ledger_text": None,
    }


def test_numpy_integers_become_plain_ones() -> None:
    state = LoaderState.from_dict({**STATE.to_dict(), "epoch": np.int64(2), "samples_seen": np.uint32(7)})
    assert json.loads(json.dumps(state.to_dict()))["samples_seen"] == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": STATE_VERSION + 1}, "version 1, got 2"),
        ({"version": None}, "got None"),
        ({"version": True}, "got True"),
        ({"epoch": -1}, "epoch.*got -1"),
        ({"epoch": "3"}, "epoch.*got '3'"),
        ({"epoch": True}, "epoch.*got True"),
        ({"samples_seen": 1798}, r"samples_seen.*1797\].*got 1798"),
        ({"samples_seen": 1.0}, "samples_seen.*got 1.0"),
        ({"samples_seen": 6, "epoch_size": 5}, "samples_seen.*got 6"),
        ({"next_seed": -1}, "next_seed"),
        ({"has_begun": 1}, "has_begun"),
        ({"fingerprint": ""}, "fingerprint"),
        ({"fingerprint": 7}, "fingerprint.*got 7"),
        ({"num_samples": 0}, "num_samples"),
        ({"epoch_size": 0}, "epoch_size"),
        ({"order": {"seed": 1}}, "expected the keys"),
        ({"loader": {}, "unit": "sample", "ranks": [], "for_others": []}, r"Tickets\(loader\).load_state_dict\(state"),
        ({"order": None}, "expected the keys.*NoneType"),
        ({"order": {"seed": 1, "lanes": 0, "window": 1, "shuffle": True}}, "lanes.*got 0"),
        ({"more": 1}, r"unknown \['more'\]"),
    ],
)
def test_what_is_no_state_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        LoaderState.from_dict({**STATE.to_dict(), **change})


@pytest.mark.parametrize("name", STATE.to_dict())
def test_no_key_may_be_missing(name: str) -> None:
    data = STATE.to_dict()
    del data[name]
    with pytest.raises(StateError, match=r"checkpoint\[" if name == "version" else rf"missing \['{name}'\]"):
        LoaderState.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "state", 3])
def test_other_types_are_refused(data: Any) -> None:
    with pytest.raises(StateError, match=r"expected the dict of state_dict\(\)"):
        LoaderState.from_dict(data)


def test_a_state_is_checked_when_made() -> None:
    with pytest.raises(StateError, match="order settings"):
        LoaderState(epoch=0, samples_seen=0, order={}, fingerprint="f", num_samples=1)  # type: ignore[arg-type]
