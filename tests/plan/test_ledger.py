"""The ledger only grows, survives JSON, and says at a resume what changed, or why it cannot go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streaming import Schedule
from streaming.errors import ConfigError, StateError
from streaming.order.plan.ledger import CHANGED, RESUMED, START, Entry, Ledger
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.state import LoaderState

SOURCES = {"web": "fp-web", "code": "fp-code"}


def entry(start: int = 0, why: str = START, **options: Any) -> Entry:
    options.setdefault("sources", SOURCES)
    if "quotas" not in options:
        options.setdefault("weights", {"web": 3, "code": 1})
    return Entry(start=start, why=why, **{"weights": {}, **options})


def ledger(*entries: Entry) -> Ledger:
    return Ledger(entries or (entry(),))


def never() -> int:
    raise AssertionError("nothing changes")


def test_a_ledger_goes_through_json_within_a_state() -> None:
    ramp = Schedule.cosine({"web": 1, "code": 0}, {"web": 1, "code": 1}, over=1000)
    long = ledger(entry(), entry(640, CHANGED, weights={"web": 1, "code": 1}), entry(700, RESUMED, schedule=ramp))
    state = LoaderState(
        epoch=0, samples_seen=10**15, order=OrderSettings(seed=1, lanes=8, window=9), fingerprint="f", num_samples=5,
        ledger=long,
    )  # fmt: skip
    told = json.loads(json.dumps(state.to_dict()))
    assert [sorted(one) for one in told["ledger"][:2]] == [["from", "sources", "weights", "why"]] * 2
    assert LoaderState.from_dict(told) == state


def test_a_mixture_that_ends_bounds_its_position_by_its_quotas() -> None:
    quotas = ledger(entry(quotas={"web": 7, "code": 3}))
    made = {"epoch": 0, "order": OrderSettings(seed=1, lanes=1, window=0), "fingerprint": "f", "num_samples": 5}
    LoaderState(samples_seen=10, ledger=quotas, **made)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="samples_seen"):
        LoaderState(samples_seen=11, ledger=quotas, **made)  # type: ignore[arg-type]


def test_segments_name_every_source_and_end_where_the_next_entry_begins() -> None:
    ramp = Schedule.steps({0: {"web": 1, "code": 0}, 50: {"web": 1, "code": 1}, 500: {"web": 0, "code": 1}})
    grown = ledger(
        entry(schedule=ramp, weights={"web": 1, "code": 0}),
        entry(100, CHANGED, weights={"web": 2, "code": 5}),
        entry(100, CHANGED, weights={"web": 4, "code": 5}),
        entry(300, RESUMED, sources=SOURCES | {"math": "fp-math"}, weights={"math": 1}),
    )
    assert grown.segments() == [
        (0, {"code": 0, "math": 0, "web": 1}),
        (50, {"code": 1, "math": 0, "web": 1}),
        (100, {"code": 5, "math": 0, "web": 4}),
        (300, {"code": 0, "math": 1, "web": 0}),
    ]
    assert grown.sources == {"code": "fp-code", "math": "fp-math", "web": "fp-web"}
    assert grown.first_rows == {"code": 0, "math": 300, "web": 0}


def test_a_schedule_taken_up_in_mid_run_counts_its_rows_from_the_runs_beginning() -> None:
    ramp = Schedule.steps({0: {"web": 1, "code": 0}, 50: {"web": 1, "code": 1}, 500: {"web": 0, "code": 1}})
    grown = ledger(entry(weights={"web": 1, "code": 7}), entry(200, RESUMED, schedule=ramp, weights={"web": 1}))
    assert [row for row, _ in grown.segments()] == [0, 200, 500]
    assert grown.segments()[1][1] == {"code": 1, "web": 1}


def test_the_same_mixture_goes_on_with_what_set_weights_gave() -> None:
    changed = ledger(entry(), entry(640, CHANGED, weights={"web": 1, "code": 9}))
    assert changed.resumed(entry(), never) == (changed, [])


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (entry(weights={"web": 1, "code": 1}), "weights were {'web': 3, 'code': 1}, and are {'web': 1, 'code': 1}"),
        (entry(schedule=Schedule.steps({0: {"web": 1}, 50: {"web": 2}}), weights={"web": 2}), "are a steps schedule"),
        (entry(sources={**SOURCES, "math": "m"}, weights={"web": 3, "code": 1, "math": 1}), "'math' is added"),
        (entry(sources={"web": "fp-web"}, weights={"web": 1}), "'code' is dropped"),
    ],
)
def test_a_mixture_changed_at_a_resume_is_one_entry_more(made: Entry, change: str) -> None:
    grown, changes = ledger(entry(), entry(100, CHANGED)).resumed(made, lambda: 640)
    assert any(change in one for one in changes), changes
    assert grown.entries[:2] == (entry(), entry(100, CHANGED))
    assert (grown.last.start, grown.last.why, grown.last.blend) == (640, RESUMED, made.blend)
    assert grown.last.weights == made.weights
    assert grown.resumed(made, never) == (grown, [])  # resumed twice, it is said once
    assert ledger(entry(), entry(900, CHANGED)).resumed(made, lambda: 640)[0].last.start == 900


def test_a_source_that_is_another_one_is_refused_by_name() -> None:
    made = entry(sources={**SOURCES, "code": "grown"})
    with pytest.raises(StateError, match=r"source 'code' is not the one.*grown.*fp-code.*code-2"):
        ledger().resumed(made, never)
    dropped = ledger(entry(), entry(5, RESUMED, sources={"web": "fp-web"}, weights={"web": 1}))
    with pytest.raises(StateError, match="source 'code'"):  # nor may it come back as another one
        dropped.resumed(made, never)


@pytest.mark.parametrize("made", [entry(quotas={"web": 5, "code": 3}), entry()])
def test_a_mixture_that_ends_goes_on_only_as_it_was(made: Entry) -> None:
    was = ledger(entry(quotas={"web": 4, "code": 3}))
    with pytest.raises(StateError, match=r"a different mixture.*set_epoch"):
        was.resumed(made, never)
    assert was.resumed(entry(quotas={"web": 4, "code": 3}), never) == (was, [])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "expected a list"),
        ("ledger", "expected a list"),
        ([], "the first at 0"),
        ([entry(5).to_dict()], r"the first at 0, got \[5\]"),
        ([entry().to_dict(), entry(9).to_dict(), entry(8).to_dict()], "in the order"),
        ([{**entry().to_dict(), "from": -1}], "from"),
        ([{**entry().to_dict(), "weights": {"web": -1}}], "got -1"),
        ([{**entry().to_dict(), "weights": {"math": 1}}], "'math'.*not sources"),
        ([{**entry().to_dict(), "sources": {}}], "none are named"),
        ([{**entry().to_dict(), "sources": ["web"]}], "an entry"),
        ([{**entry().to_dict(), "why": 7}], "why: expected one of"),
        ([{"from": 0}], "weights"),
        ([7], "an entry"),
    ],
)
def test_what_is_no_ledger_is_refused(data: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        Ledger.from_list(data)


LARGE: dict[str, Any] = {"web": 2**62, "code": 2**62}
NO_NUMBERS: list[Any] = [True, "7", None, -1, 1.5, [1], {"a": 1}, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("from", [*NO_NUMBERS, 2**63]),
        ("weights", [*NO_NUMBERS, [], {}, {"web": "1"}, {"web": None}, {"web": True}, {"web": -1}, {"web": [1]},
                     {"web": float("nan")}, {"web": 10**400}, {"web": 1e308, "code": 1e308}, {1: 1}]),
        ("schedule", [*NO_NUMBERS, {}, {"shape": "steps", "steps": [[0, 1]]}, {"shape": "steps", "steps": 7},
                      {"shape": "steps", "steps": [[0, {"math": 1}]]},
                      {"shape": "steps", "steps": [[0, {"web": 10**400}]]}]),
        ("quotas", [7, [], {}, "web", {"web": 1}, {**SOURCES}, LARGE, {"web": 1, "code": 1, "math": 1},
                    *({"web": 1, "code": one} for one in NO_NUMBERS)]),
        ("dealt", [*NO_NUMBERS, "packs", "batches"]),
        ("batch_size", [*NO_NUMBERS[:3], *NO_NUMBERS[3:], 8]),
        ("shards", [7, [], "web", {"math": 1}, *({"web": one} for one in NO_NUMBERS)]),
        ("joins", [7, [], "web", {"math": 1}, *({"web": one} for one in NO_NUMBERS)]),
        ("laid", [7, [], "web", {"math": [1]}, {"web": 7}, {"web": [2**62] * 8}, {"web": "7"},
                  *({"web": [one]} for one in NO_NUMBERS)]),
        ("fetch_bytes", [7, [], "web", {"math": 1}, {"web": 0}, *({"web": one} for one in NO_NUMBERS)]),
        ("sources", [*NO_NUMBERS, [], {}, {"web": 7, "code": "x"}, {"web": "x"}, {1: "x"}]),
        ("why", [*NO_NUMBERS, "", "because"]),
        ("colour", ["red"]),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_each_field_of_a_ledger_is_checked(field: str, values: list[Any]) -> None:
    """Another type, names that are no sources, sums that overflow: some were a TypeError, or failed at a batch."""
    for value in values:
        made = entry().to_dict()
        if field == "batch_size" and value is None:
            continue
        if field == "quotas":
            made["weights"] = None
        with pytest.raises(StateError, match=r"state: (an entry of the ledger|a schedule of the ledger):") as refusal:
            Ledger.from_list([{**made, field: value}])
        assert field in str(refusal.value)


def test_entries_of_a_ledger_deal_alike() -> None:
    quotas = {"web": 1, "code": 1}
    for other in (entry(quotas=quotas), entry(dealt="samples"), entry(dealt="batches", batch_size=8)):
        with pytest.raises(StateError, match="cannot change within a run"):
            Ledger.from_list([entry().to_dict(), {**other.to_dict(), "from": 100}])


def test_entries_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match="at least one must be above 0"):
        entry(weights={"web": 0, "code": 0})
    with pytest.raises(StateError, match="order of their rows"):
        ledger(entry(), entry(50)).appended(entry(49))
