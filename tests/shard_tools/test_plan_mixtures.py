"""`shard_tools plan` of mixtures and filtered sets: what training draws, reads and got, from plan and ledger alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.plan.sources import Reads
from streaming import DataLoader, Mixture, Schedule, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError, OptionError
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set

pytestmark = pytest.mark.thorough

G, RANKS = 12, 2
SHUFFLE = {"lanes": 2, "window": 6}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleSet]:
    root = tmp_path_factory.mktemp("sets")
    return {
        "web": write_set(root / "web", (41, 7, 23, 48), first=0),
        "code": write_set(root / "code", (20, 3), first=10_000),
        "math": write_set(root / "math", (60,), first=20_000),
    }


@pytest.fixture
def described(sets: dict[str, SampleSet], tmp_path: Path) -> Any:
    """Write a file that describes a mixture of all three sets, and give its path."""

    def write(content: dict[str, Any] | None = None, **more: Any) -> str:
        sources: dict[str, Any] = {name: {"url": one.url, "fields": ["cls"]} for name, one in sets.items()}
        given = {"sources": sources, "shuffle": SHUFFLE, "seed": 3, **more} if content is None else content
        (tmp_path / "mixture.json").write_text(json.dumps(given))
        return str(tmp_path / "mixture.json")

    return write


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)], prog_name="shard_tools")


def told(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def played(make: Any, steps: int, change: Any = None, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """(step, data rank, source, key) of what all ranks get of a mixture, and the last state."""
    got, state = [], {}
    loaders = [
        DataLoader(make(), global_batch_size=G, device_mesh=mesh_of(RANKS, rank), **options) for rank in range(RANKS)
    ]
    loops = [iter(loader) for loader in loaders]
    for step in range(steps):
        if change is not None:
            change(step, loaders)
        for rank, loop in enumerate(loops):
            batch = next(loop)
            names = batch.get("__source__", [None] * len(batch["__key__"]))
            got += [(step, rank, name, key) for name, key in zip(names, batch["__key__"], strict=True)]
    state = loaders[0].state_dict()
    for loader in loaders:
        loader.close()
    return sorted(got, key=str), state


def rows_of(report: dict[str, Any]) -> list[Any]:
    return sorted(((row["step"], row["dp_rank"], row["source"], row["key"]) for row in report["rows"]), key=str)


# --- the file ---


def test_training_and_tool_read_the_same_file(sets: dict[str, SampleSet], described: Any) -> None:
    schedule = Schedule.linear({"all": 1, "math": 0}, {"all": 1, "math": 1}, over=600)
    path = described(
        {
            "sources": {
                "all": {"sources": {"web": sets["web"].url, "code": {"url": sets["code"].url, "subset": [0.0, 0.5]}},
                        "weights": {"web": 3, "code": 1}},
                "math": sets["math"].url,
            },
            "weights": schedule.to_dict(), "shuffle": SHUFFLE, "seed": 5,
        }
    )  # fmt: skip
    mix = Mixture.from_file(path, transforms={"all/web": lambda sample: {**sample, "seen": 1}})
    by_hand = Mixture(
        {
            "all": Mixture(
                {"web": sets["web"].open(), "code": sets["code"].open(subset=(0.0, 0.5))}, weights={"web": 3, "code": 1}
            ),
            "math": sets["math"].open(),
        },
        weights=schedule, shuffle=ShuffleConfig(**SHUFFLE), seed=5,
    )  # fmt: skip
    assert (mix.fingerprint, mix.source.begun()) == (by_hand.fingerprint, by_hand.source.begun())
    assert mix.source.order_settings(G) == by_hand.source.order_settings(G)
    assert mix.source.leaves["all/web"].read(np.array([0]))[0]["seen"] == 1
    assert "seen" not in mix.source.leaves["math"].read(np.array([0]))[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not a description of a mixture in JSON"),
        ('{"sources": {"a": "x/", "a": "y/"}}', "'a' occurs twice"),
        ("[]", 'expected an object with "sources"'),
        ('{"sources": {"a": {"uri": "x/"}}}', "'a': expected a URL"),
        ('{"sources": {"a": {"url": "x/", "seed": 1}}}', "'seed' belongs to the mixture"),
        ('{"sources": {"a": {"url": "x/", "transform": "os.remove"}}}', "transform' is code"),
        ('{"sources": {"a": "URL"}, "weigths": {}}', "did you mean 'weights'"),
        ('{"sources": {"a": {"url": "URL", "feilds": []}}}', "did you mean 'fields'"),
        ('{"sources": {"a": "URL"}, "weights": {"shape": "linear"}}', "expected a schedule as"),
        ('{"sources": {"a": "URL"}, "shuffle": {"lane": 2}}', "did you mean 'lanes'"),
    ],
)
def test_files_that_describe_no_mixture(sets: dict[str, SampleSet], tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content.replace("URL", sets["math"].url))
    with pytest.raises(ConfigError) as caught:
        Mixture.from_file(path)
    assert words in str(caught.value)
    result = run(path, "--batch-size", G)
    assert (result.exit_code, words in result.output) == (2, True)


def test_transforms_are_of_sources_and_errors_name_theirs(described: Any) -> None:
    with pytest.raises(ConfigError, match="'wbe' is not a source; they are code, math, web"):
        Mixture.from_file(described(), transforms={"wbe": dict})
    with pytest.raises(OptionError) as caught:
        Mixture.from_file(described({"sources": {"a": {"sources": {"b": {"url": "x", "batch_size": 3}}}}}))
    assert caught.value.__notes__ == ["of the source 'a/b'", "of the source 'a'"]
    wrong = run(described(), "--batch-size", G, "--where", "a = 1")
    assert (wrong.exit_code, "it belongs to each source" in wrong.output) == (2, True)


# --- what is read ---


def test_a_mixture_is_planned_as_training_draws_it(described: Any) -> None:
    weights = {"web": 0.5, "code": 0.2, "math": 0.3}
    path = described(weights=weights)
    report = told(path, "--dp", RANKS, "--global-batch-size", G, "--epoch-size", 480)
    got, _ = played(lambda: Mixture.from_file(path), 40, epoch_size=480)
    counts = {name: sum(one == name for *_, one, _ in got) for name in weights}
    shares = {one["name"]: one for one in report["shares"]["sources"]}
    assert {name: one["drawn"] for name, one in shares.items()} == counts
    assert report["shares"]["rows"][-1] == 480
    assert report["shares"]["counts"][-1] == [counts[name] for name in sorted(weights)]
    for name, one in shares.items():
        assert one["target"] == pytest.approx(weights[name], abs=1e-3)
        assert one["strayed"] <= 4 + 4  # a chunk of its own, and its share of one of each
        assert one["passes"] == pytest.approx(counts[name] / one["num_samples"], abs=1e-3)
    assert shares["code"]["begins"]["2"] == pytest.approx(23 / 0.2 / G, abs=1)
    assert sum(one["num_requests"] for one in shares.values()) == report["total"]["num_requests"]
    assert sum(one["read_bytes"] for one in shares.values()) == report["total"]["read_bytes"]
    most = max(load["live_bytes"] for load in report["data_ranks"])
    assert most * 0.85 <= sum(one["live_bytes"] for one in shares.values()) <= 3 * most  # each at its own worst moment
    shown = run(path, "--dp", RANKS, "--global-batch-size", G)
    assert "of a mixture without end" in shown.output
    assert 'quotas="exact" would hold' in shown.output
    assert "which fits into the memory_limit" in shown.output
    tight = run(path, "--dp", RANKS, "--global-batch-size", G, "--memory-limit", "256KiB").output
    assert re.search(r'quotas="exact" would hold .*lane\. (With fetch_bytes="\d+KiB" it|Even the smallest)', tight)
    asked = ("--dp", RANKS, "--global-batch-size", G)
    of_exact = told(described(weights=weights, quotas="exact"), *asked)
    assert told(path, *asked)["shares"]["exact_live_bytes"] == of_exact["data_ranks"][0]["live_bytes"]
    assert {"web", "code", "math"} <= set(shown.output.split())


def test_a_mixture_that_ends_is_planned_epoch_by_epoch(described: Any) -> None:
    path = described(repeats={"web": 1, "code": 2.5, "math": 0.5})
    report = told(path, "--global-batch-size", G, "--epoch", 1, "--last-batch", "partial")
    drawn = {one["name"]: one["drawn"] for one in report["shares"]["sources"]}
    assert drawn == {"web": 119, "code": 58, "math": 30}
    assert report["num_batches"] == -(-207 // G)
    assert report["has_end"]


def test_reads_of_a_filtered_set_are_those_that_a_server_counted() -> None:
    """300 samples of 100 KB in chunks of 80, 32 kept: 25 requests and 1.09 bytes per byte kept.

    They were counted on S3 (docs/design/0020).
    """
    stored, given = np.array([80, 80, 80, 60]), np.array([9, 8, 9, 6])
    reads = Reads.of(stored * 100_000, given, stored)
    kept = int(given.sum()) * reads.sample_bytes
    assert reads.num_bytes.sum() / kept == pytest.approx(1.09, abs=0.06)
    assert reads.num_requests.sum() == pytest.approx(25, abs=4)
    small = Reads.of(np.array([8 << 20]), np.array([800]), np.array([8000]))
    assert small.num_bytes[0] / (8 << 20) == pytest.approx(1, abs=1e-4)  # spans of 62 samples: few without a kept one
    whole = Reads.of(np.array([1000]), stored, stored)
    assert (whole.num_bytes.tolist(), whole.num_requests.tolist()) == ([1000], [1, 1, 1, 1])


def test_a_filtered_set_costs_what_is_kept(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/s/{{:06d}}.tar", columns={"n": "json.n"}) as writer:
        for number in range(200):
            writer.write({"__key__": f"{number:06d}", "json": {"n": number}, "bin": bytes(100_000)})
    whole = told(f"{tmp_path}/s/", "--batch-size", 4)
    some = told(f"{tmp_path}/s/", "--batch-size", 4, "--where", "hash(__key__) % 10 = 0")
    assert (whole["filtered"], some["filtered"]) == (False, True)
    assert some["total"]["read_bytes"] < 0.2 * whole["total"]["read_bytes"]
    assert 1 <= some["total"]["amplification"] < 1.3


# --- who was in a step ---


def test_who_and_when_of_a_mixture_whose_weights_were_changed(described: Any, tmp_path: Path) -> None:
    schedule = Schedule.linear({"web": 1, "code": 0, "math": 1}, {"web": 0, "code": 1, "math": 1}, over=400).to_dict()
    path = described(weights=schedule)
    changed: list[int] = []

    def change(step: int, loaders: list[DataLoader]) -> None:
        if step == 5:
            at = max(loader._loop.course.orders(loader._loop.order).frontier for loader in loaders) * 2 + 2
            changed.extend(loader.set_weights({"web": 0, "code": 0, "math": 1}, at=at + 4096) for loader in loaders)

    got, state = played(lambda: Mixture.from_file(path), 30, change)
    saved = tmp_path / "state.json"
    saved.write_text(json.dumps(state))
    more = ("--dp", RANKS, "--global-batch-size", G, "--state", saved)
    report = told(path, *more, "--step", "0..30", "--who")
    assert rows_of(report) == got
    assert (report["at_step"], report["batches_per_epoch"]) == (30, None)
    late = changed[0] // G + 200
    assert {row["source"] for row in told(path, *more, "--step", late, "--who")["rows"]} == {"math"}
    key = next(row[3] for row in got if row[2] == "web")
    when = told(path, *more, "--key", key, "--when")
    assert [row for row in rows_of(when) if row[0] < 30] == [row for row in got if row[3] == key]
    assert when["looked_at"][0] == 0
    narrow = told(path, *more, "--key", key, "--when", "--step", "0..30", "--thorough")
    assert rows_of(narrow) == [row for row in got if row[3] == key]
    assert (narrow["by_order"], when["by_order"]) == (False, True)
    lines = run(path, *more, "--step", 3, "--who").output.splitlines()
    assert lines[0] == "one epoch without end; the state continues with step 30"
    assert all("source " in line for line in lines[1:])


@pytest.mark.parametrize("options", [{"quotas": "exact"}, {"batches": "one_source"}])
def test_who_and_when_of_exact_shares(described: Any, tmp_path: Path, options: dict[str, str]) -> None:
    path = described(weights={"web": 5, "code": 2, "math": 3}, **options)
    got, state = played(lambda: Mixture.from_file(path), 20)
    saved = tmp_path / "state.json"
    saved.write_text(json.dumps(state))
    more = (path, "--dp", RANKS, "--global-batch-size", G)
    who = told(*more, "--state", saved, "--step", "0..20", "--who")
    assert rows_of(who) == got
    sources = Mixture.from_file(path).source.leaves
    for row in who["rows"][:24]:
        assert sources[row["source"]].read(np.array([row["number"]]))[0]["__key__"] == row["key"]
    key = next(row[3] for row in got if row[2] == "code")
    when = told(*more, "--state", saved, "--key", key, "--when", "--step", "0..20")
    assert rows_of(when) == [row for row in got if row[3] == key]
    # Elsewhere it looks up to the state's step, and as far beyond as gives the 23 samples of code again, twice over.
    looked_at = told(*more, "--state", saved, "--key", key, "--when")["looked_at"]
    assert looked_at == [0, 20 + 2 * round(23 / (0.2 * G)) + 1]
    report = told(*more, "--epoch-size", 240)["shares"]
    counts = {name: sum(row[2] == name for row in got) for name in ("web", "code", "math")}
    assert {one["name"]: one["drawn"] for one in report["sources"]} == counts
    assert not report["by_chunks"]
    assert "would hold" not in run(*more).output


def test_who_and_when_of_a_mixture_that_ends(described: Any, tmp_path: Path) -> None:
    path = described(repeats={"web": 1, "code": 2, "math": 0.5})
    per_epoch = (119 + 46 + 30) // G
    got: list[Any] = []
    state: dict[str, Any] = {}
    for rank in range(RANKS):
        with DataLoader(Mixture.from_file(path), global_batch_size=G, device_mesh=mesh_of(RANKS, rank)) as loader:
            for epoch in range(2):
                for number, batch in enumerate(loader):
                    step = epoch * per_epoch + number
                    got += [(step, rank, *one) for one in zip(batch["__source__"], batch["__key__"], strict=True)]
                    if (epoch, number) == (1, 2):
                        state = loader.state_dict()
    saved = tmp_path / "state.json"
    saved.write_text(json.dumps(state))
    more = ("--dp", RANKS, "--global-batch-size", G, "--state", saved)
    assert rows_of(told(path, *more, "--step", f"0..{2 * per_epoch}", "--who")) == sorted(got, key=str)
    key = next(row[3] for row in got if row[0] > per_epoch and row[2] == "code")
    found = rows_of(told(path, *more, "--key", key, "--when"))
    expected = sorted((row for row in got if row[3] == key and row[0] >= per_epoch), key=str)
    assert [row for row in found if row[0] < 2 * per_epoch] == expected
    saved.write_text(json.dumps({**state, "next_seed": 9}))  # from the next epoch on
    with DataLoader(Mixture.from_file(path), global_batch_size=G, device_mesh=mesh_of(1, 0)) as loader:
        loader.load_state_dict({**state, "next_seed": 9, "epoch": 2, "samples_seen": 0})
        first = sorted(next(iter(loader))["__key__"])
    assert sorted(row["key"] for row in told(path, *more, "--step", 2 * per_epoch, "--who")["rows"]) == first
    saved.write_text(json.dumps({**state, "epoch": 1, "samples_seen": 0, "next_seed": 9, "has_begun": True}))
    for step, keys in ((per_epoch, {row[3] for row in got if row[0] == per_epoch}), (2 * per_epoch, set(first))):
        assert {row["key"] for row in told(path, *more, "--step", step, "--who")["rows"]} == keys


def test_another_mixture_than_the_runs_is_refused_by_name(
    sets: dict[str, SampleSet], described: Any, tmp_path: Path
) -> None:
    path = described(weights={"web": 1, "code": 1, "math": 1})
    _, state = played(lambda: Mixture.from_file(path), 2)
    saved = tmp_path / "state.json"
    saved.write_text(json.dumps(state))
    more = ("--dp", RANKS, "--global-batch-size", G, "--state", saved, "--step", 1, "--who")
    urls = {name: one.url for name, one in sets.items()}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"web": urls["web"], "math": urls["math"]}, "the source 'code', which the file lacks"),
        ({**urls, "code": urls["math"]}, "the source 'code' is not the one of the run"),
        ({**urls, "web": {"url": urls["web"], "subset": [0, 50]}}, "the source 'web' is not the one of the run"),
    ]
    for sources, words in cases:
        result = run(described({"sources": sources, "weights": dict.fromkeys(sources, 1)}), *more)
        assert (result.exit_code, words in result.output) == (1, True), result.output
    single = run(urls["web"], *more)
    assert (single.exit_code, "belongs to a mixture of code, math, web" in single.output) == (1, True)
    # One source more, and other weights: the ledger says what was drawn.
    extra = {**urls, "extra": urls["math"]}
    path = described({"sources": extra, "weights": dict.fromkeys(extra, 1)})
    again = told(path, *more)
    assert told(path, *more[:-3], "--key", again["rows"][0]["key"], "--when")["rows"][0] in again["rows"]
    assert rows_of(again) == rows_of(told(described(weights={"web": 1, "code": 1, "math": 1}), *more))


@pytest.mark.parametrize("options", [{}, {"quotas": "exact"}])
def test_who_and_when_without_a_source_that_was_dropped(
    sets: dict[str, SampleSet], described: Any, tmp_path: Path, options: dict[str, str]
) -> None:
    """From the row on at which what it laid is read, the ledger alone says all; before it, an error says which row."""
    whole = described(weights={"web": 1, "code": 1, "math": 1}, **options)
    got, states = [], {}
    with DataLoader(Mixture.from_file(whole), global_batch_size=G) as loader:
        batches = iter(loader)
        for step in range(400):
            if step == 5:
                states["drawn"] = loader.state_dict()
                loader.set_weights({"web": 1, "code": 2, "math": 0})
            batch = next(batches)
            got += [(step, 0, *row) for row in zip(batch["__source__"], batch["__key__"], strict=True)]
        states["dropped"] = loader.state_dict()
    saved = tmp_path / "state.json"
    urls = {name: sets[name].url for name in ("web", "code")}
    content = {"sources": urls, "weights": {"web": 1, "code": 1}, "shuffle": SHUFFLE, "seed": 3, **options}
    more = (described(content), "--dp", 1, "--global-batch-size", G, "--state", saved)

    saved.write_text(json.dumps(states["dropped"]))
    key = next(row[3] for row in got if row[2] == "code")
    when = told(*more, "--key", key, "--when")
    first = when["looked_at"][0]
    assert first < 390
    late = [row for row in got if first <= row[0]]
    assert rows_of(told(*more, "--step", f"{first}..400", "--who")) == sorted(late, key=str)
    of_key = [row for row in late if row[3] == key]
    assert [row for row in rows_of(when) if row[0] < 400] == sorted(of_key, key=str)
    early = run(*more, "--step", 2, "--who")
    words = "draws from 'math', which"
    assert (early.exit_code, words in early.output) == (1, True), early.output

    saved.write_text(json.dumps(states["drawn"]))
    refused = run(*more, "--step", 390, "--who")
    words = "source 'math', which the file lacks; it has code, web"
    assert (refused.exit_code, words in refused.output) == (1, True), refused.output


@pytest.mark.parametrize("option", [("--where", "n % 3 = 0"), ("--subset", "10%..60%")])
def test_who_and_when_of_a_filtered_set(tmp_path: Path, option: tuple[str, str]) -> None:
    with ShardWriter(f"{tmp_path}/s/{{:06d}}.tar", max_samples=37, columns={"n": "json.n"}) as writer:
        for number in range(200):
            writer.write({"__key__": f"{number * 7 % 200:06d}", "json": {"n": number}})  # keys do not ascend
    choice: dict[str, Any] = {"where": option[1]} if option[0] == "--where" else {"subset": (0.1, 0.6)}
    dataset = StreamingDataset(f"{tmp_path}/s/", seed=2, **choice)
    got, state = played(lambda: StreamingDataset(f"{tmp_path}/s/", seed=2, **choice), len(dataset) // G)
    saved = tmp_path / "state.json"
    saved.write_text(json.dumps(state))
    more = (f"{tmp_path}/s/", "--dp", RANKS, "--global-batch-size", G, "--state", saved)
    report = told(*more, *option, "--step", f"0..{len(dataset) // G}", "--who")
    assert rows_of(report) == got
    assert all(dataset[row["number"]]["__key__"] == row["key"] for row in report["rows"][:5])
    for *_, key in got[::17]:
        found = rows_of(told(*more, *option, "--key", key, "--when", "--step", f"0..{len(dataset) // G}"))
        assert found == [row for row in got if row[3] == key]
    result = run(*more, "--step", 1, "--who")
    assert (result.exit_code, "--where, --view, --subset" in result.output) == (1, True)
