"""Sources to which shards are appended in mid-run: what was due stays, later passes have them, the ledger tells it."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shard_tools.look.plan.steps import PlannedRun
from streaming import DataLoader, Mixture, Schedule, ShuffleConfig, StreamingDataset
from streaming.errors import StateError
from streaming.order.plan.state import LoaderState
from tests.support.code.folders import GOLDEN
from tests.support.sets.data_sets import Batches, merged, total, write_set
from tests.support.sets.mixtures import FIRST, source_of, take, take_on, world

SHARDS = {"web": (41, 7, 23), "code": (20, 3), "math": (60,)}
MORE = (31, 8)
DEALT: list[dict[str, Any]] = [{}, {"quotas": "exact"}, {"batches": "one_source"}]
FEW_LANES = ShuffleConfig(lanes=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each set as it was, and grown."""
    root = tmp_path_factory.mktemp("sets")
    for name, sizes in SHARDS.items():
        write_set(root / name, sizes, chunk_samples=4, first=FIRST[name])
        write_set(root / f"{name}-grown", sizes + MORE, chunk_samples=4, first=FIRST[name])
    return root


def opened(root: Path, names: str, *, more: str = "", where: str | None = None, **options: Any) -> Mixture:
    """A mixture in which the sources named in ``more`` have grown."""
    urls = {name: f"{root}/{name}{'-grown' if name in more.split() else ''}/" for name in names.split()}
    sources = {name: StreamingDataset(url, where=where) for name, url in urls.items()}
    return Mixture(sources, **{"shuffle": FEW_LANES, **options})


@pytest.mark.thorough
@pytest.mark.parametrize("dealt", DEALT)
def test_all_changes_of_a_run_are_replayed_from_its_ledger_alone(
    root: Path, dealt: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Weights by a schedule, by set_weights and at a resume, a source added, two grown; then from row 0 again."""
    caplog.set_level(logging.INFO, "streaming")
    size, begin, steps = (12, 30, 40) if dealt else (48, 8, 38)  # chunks are laid ahead, so more rows are played
    ramp = Schedule.linear({"web": 1, "code": 0}, {"web": 1, "code": 1}, over=240, segments=3)
    run: Batches = []
    with DataLoader(opened(root, "web code", weights=ramp, **dealt), batch_size=size, num_threads=0) as loader:
        run += merged([take(loader, begin)])
        row = loader.set_weights({"web": 1, "code": 4})
        run += merged([take_on(loader, max((row + 120) // size - begin, 1))])
        state = loader.state_dict()
    everything = {"weights": {"web": 2, "code": 1, "math": 1}, **dealt}
    after, state = world(opened(root, "web code math", **everything), 2, steps, state, size=size)
    run += after
    drawn = Counter(map(source_of, total(after[-steps // 2 :]).elements()))
    assert all(
        abs(drawn[name] / (steps // 2 * size) - share / 4) < 0.05 for name, share in everything["weights"].items()
    )
    grown = opened(root, "web code math", more="code", **everything)
    after, state = world(grown, 3, 120 // size + 1, state, size=size)
    run += after
    grown = opened(root, "web code math", more="code math", **everything)
    with DataLoader(grown, batch_size=size) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))  # resumed twice, it is said once
        run += merged([take(loader, 2 * steps)])
        seen = {name: one["samples"] for name, one in loader.seen().items()}
        assert seen == Counter(map(source_of, total(run).elements()))
        state = loader.state_dict()
    for name in ("code", "math"):  # the log says when new shards begin to be read
        steps_told = re.findall(rf"new shards of {name} are read from about step (\d+) on", caplog.text)
        whole = sum(SHARDS[name])
        first = next(
            step for step, batch in enumerate(run)
            if any(source_of(key) == name and int(key) - FIRST[name] >= whole for key in batch)
        )  # fmt: skip
        assert all(abs(int(told) - first) <= (3 if dealt else 10) for told in steps_told[-1:])
        assert steps_told
    assert caplog.text.count("'math' is added") == 2  # one rank, and the other
    assert caplog.text.count("'math' has grown from 1 to 3 shards") == 1
    told = [(one["why"], sorted(one.get("joins", {}))) for one in state["ledger"]]
    resumed = "changed at a resume"
    assert told == [("start", []), ("set_weights", []), (resumed, []), ("grown", ["code"]), ("grown", ["math"])]
    assert [one["shards"]["code"] for one in state["ledger"]] == [2, 2, 2, 4, 4]
    counts = total(run)
    for name, added in (("code", range(10_023, 10_062)), ("math", range(20_060, 20_099))):
        assert all(counts[f"{key:05d}"] for key in added), name
    replayed, _ = world(grown, 2, len(run), {**state, "samples_seen": 0}, size=size)
    assert replayed == run
    # What tells who was in a step asks the same ledger, and finds the samples that came later.
    told_by = PlannedRun(
        planned=grown.source, state=LoaderState.from_dict(state), global_batch_size=size, num_ranks=2, last_batch="drop"
    )
    for step in (0, 35, len(run) - 1):
        assert Counter(row.key for row in told_by.who(range(step, step + 1)).rows) == run[step]
    key = next(key for keys in reversed(run) for key in keys if "10023" <= key < "10062")
    assert [row.step for row in told_by.when(key, range(len(run))).rows] == [
        step for step, keys in enumerate(run) for _ in range(keys[key])
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("dealt", DEALT)
@pytest.mark.parametrize("known", [True, False], ids=["", "state-of-an-older-release"])
def test_what_was_seen_of_a_pass_is_not_repeated(
    root: Path, dealt: dict[str, Any], known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The pass in progress ends as it would have; the appended samples come in each pass from the next one on."""
    options = {"weights": {"web": 2, "code": 1}, "shuffle": False, **dealt}

    def keys_of(more: str, count: int, state: Any = None) -> tuple[list[str], dict[str, Any]]:
        """The keys of so many batches, as they are due: one lane, without a window."""
        with DataLoader(opened(root, "web code", more=more, **options), batch_size=36, num_threads=0) as loader:
            if state is not None:
                loader.load_state_dict(state)
            return [key for keys in take(loader, count) for key in keys], loader.state_dict()

    before, state = keys_of("", 1)
    if not known:
        state["ledger_text"] = None
        assert state["ledger"][0].pop("shards") == {"code": 2, "web": 3}
    with caplog.at_level(logging.INFO, "streaming"):
        after, last = keys_of("web", 60, state)
    assert "the source 'web' has grown" in caplog.text
    whole, _ = keys_of("", 61)
    run, joins = before + after, last["ledger"][-1]["joins"]["web"]
    assert joins == 1 or not dealt  # chunks are laid in stretches, of some passes over so small a set
    drawn = [key for key in run if source_of(key) == "web"]
    every = [f"{number:05d}" for number in range(110)]
    passes = [drawn[71 * n : 71 * (n + 1)] for n in range(joins)]
    rest = drawn[71 * joins :]
    passes_after = [rest[110 * n : 110 * (n + 1)] for n in range(len(rest) // 110)]
    assert all(sorted(keys) == every[:71] for keys in passes)
    assert all(sorted(keys) == every for keys in passes_after)
    assert len(passes_after) >= 5
    same = [at for at, key in enumerate(run) if source_of(key) == "web"][71 * joins]
    assert run[:same] == whole[:same]
    with DataLoader(opened(root, "web code", more="web", **options), batch_size=36) as loader:
        loader.load_state_dict(last)
        seen = loader.seen()["web"]
        assert seen == {"samples": len(drawn), "passes": pytest.approx(joins + len(rest) / 110)}


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["hash(__key__) % 3 < 2", "__key__ >= '00010'"])  # of the first chunks nothing
def test_a_filtered_source_grows(root: Path, where: str) -> None:
    options: dict[str, Any] = {"weights": {"web": 1}, "where": where, "quotas": "exact"}
    before, state = world(opened(root, "web", **options), 2, 3)
    grown = opened(root, "web", more="web", **options)
    after, last = world(grown, 1, 40, state)
    assert last["ledger"][-1]["joins"] == {"web": 1}
    assert any(int(key) >= 71 for keys in after for key in keys)
    assert world(grown, 1, 3, {**last, "samples_seen": 0})[0] == before
    other = opened(root, "web", more="web", weights={"web": 1}, where="hash(__key__) % 3 < 1", quotas="exact")
    with DataLoader(other, batch_size=12) as loader, pytest.raises(StateError, match="source 'web' is not the one"):
        loader.load_state_dict(state)


def test_what_set_weights_gave_holds_when_a_source_grows(root: Path) -> None:
    options: dict[str, Any] = {"weights": {"web": 1, "code": 1}, "quotas": "exact"}
    with DataLoader(opened(root, "web code", **options), batch_size=12) as loader:
        take(loader, 2)
        loader.set_weights({"web": 3, "code": 1})
        state = loader.state_dict()
    for more in ("web", "web code"):
        with DataLoader(opened(root, "web code", more=more, **options), batch_size=12) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            state = loader.state_dict()
            loader.load_state_dict(state)
            assert loader.state_dict() == state  # resumed twice, it is said once
    assert [one["why"] for one in state["ledger"]] == ["start", "set_weights", "grown", "grown"]
    assert [one["weights"] for one in state["ledger"]][1:] == [{"web": 3.0, "code": 1.0}] * 3


@pytest.mark.thorough
def test_where_a_source_cannot_grow_the_message_says_what_to_do(root: Path, tmp_path: Path) -> None:
    grown = {"weights": {"web": 1, "code": 1}}
    _, state = world(opened(root, "web code", **grown), 1, 3)
    _, ending = world(opened(root, "web code"), 1, 3)
    _, last = world(opened(root, "web code", more="web", **grown), 1, 1, state)
    write_set(tmp_path, (9, *SHARDS["web"]), first=FIRST["web"])
    others = {"web": StreamingDataset(f"{tmp_path}/"), "code": StreamingDataset(f"{root}/code/")}
    where = "__key__ != '00003'"
    _, filtered = world(opened(root, "web code", where=where, **grown), 1, 1)
    ranges = [StreamingDataset(f"{root}/web-grown/", where=condition)[2:] for condition in (None, where)]
    codes = [StreamingDataset(f"{root}/code/", where=condition) for condition in (None, where)]
    ranged = [Mixture({"web": web, "code": code}, **grown) for web, code in zip(ranges, codes, strict=True)]
    for mix, saved, words in (
        (opened(root, "web code", more="web"), ending, r"'web' has grown from 3 to 5 shards.*until the epoch is over"),
        (Mixture(others, **grown), state, r"'web' is not the one.*sort after all of these.*web-2"),
        (opened(root, "web code", **grown), last, "'web' is not the one"),  # nor may it shrink
        (ranged[0], state, "'web' is not the one"),  # nor is a range of it such
        (ranged[1], filtered, "'web' is not the one"),
    ):
        with DataLoader(mix, batch_size=12) as loader, pytest.raises(StateError, match=words):
            loader.load_state_dict(saved)


@pytest.mark.parametrize("name", ["chunks", "exact", "one_source", "passes"])
def test_states_that_were_saved_go_on_with_the_keys_of_then(root: Path, name: str) -> None:
    """``golden/mixture_states.json`` is of 24 November 2026; its ledgers do not name the shards of the sources."""
    saved = json.loads((GOLDEN / "mixture_states.json").read_text())[name]
    dealt: dict[str, Any] = {"exact": {"quotas": "exact"}, "one_source": {"batches": "one_source"}}.get(name, {})
    options = {"weights": {"web": 1, "code": 1, "math": 2}, **dealt}
    if name == "passes":
        options = {"repeats": {"web": 1, "code": 2.5}}
    names = "web code" if name == "passes" else "web code math"
    for more in ("",) if name == "passes" else ("", "code"):
        with DataLoader(opened(root, names, more=more, **options), batch_size=12, num_threads=0) as loader:
            loader.load_state_dict(saved["state"])
            assert (loader.state_dict()["ledger"] == saved["state"]["ledger"]) == (not more)
            assert [" ".join(keys) for keys in take(loader, 6)] == saved["keys"]
