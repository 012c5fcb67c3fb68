"""Mixtures whose chunks are cut into fetch units: ``fetch_bytes=``."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import Balanced, DataLoader, Mixture, Schedule, ShuffleConfig, StreamingDataset
from streaming.errors import ConfigError, IndexMissingError, MemoryLimitError
from streaming.sets.sources.fetch_units import divided
from streaming.shards.catalog.cut import units_of
from streaming.shards.index.chunk_table import ShardInfo, one_shard_table
from streaming.shards.index.sample_table import Spans
from streaming.shards.index.spans import SPAN_BYTES
from tests.support.sets.data_sets import Batches, loaders, merged, total, world_from

KIB = 1024
EXACT, ONE_SOURCE = {"quotas": "exact"}, {"batches": "one_source"}
SIZES = {"code": (60,), "math": (30, 20), "web": (90, 70)}
WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}
UNITS = {"web": 200 * KIB, "code": 64 * KIB}
FEW_LANES = ShuffleConfig(lanes=2)


def content(key: str) -> bytes:
    """Bytes of 1 to 30 KiB that follow from a key."""
    digest = hashlib.sha256(key.encode()).digest()
    return digest * (32 + digest[0] * 4)


def write(folder: Path, name: str, shards: Sequence[int], *, first_shard: int = 0) -> None:
    number = sum(SIZES[name][:first_shard])
    for shard, count in enumerate(shards, first_shard):
        with ShardWriter(f"{folder}/{name}/{{:06d}}.tar", start_shard=shard, columns={"n": "json.n"}) as writer:
            for number in range(number, number + count):  # noqa: B020  continues where the last shard ended
                key = f"{name}-{number:03d}"
                writer.write({"__key__": key, "bin": content(key), "json": {"n": number}})
            number += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    for name, shards in SIZES.items():
        write(root, name, shards)
    return root


def mixture(folder: Path, names: str = "web code math", **options: Any) -> Mixture:
    options = {"quotas": "exact", "shuffle": FEW_LANES, **options}
    return Mixture({name: StreamingDataset(f"{folder}/{name}/", decode="raw") for name in names.split()}, **options)


def take(loader: DataLoader, count: int = 10**6) -> list[list[str]]:
    found: list[list[str]] = []
    for batch in loader:
        assert [bytes(data) for data in batch["bin"]] == [content(key) for key in batch["__key__"]]
        assert batch["__source__"] == [key.partition("-")[0] for key in batch["__key__"]]
        valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(batch["__key__"])
        found.append([key for key, is_real in zip(batch["__key__"], valid, strict=True) if is_real])
        if len(found) == count:
            break
    return found


def world(mix: Any, ranks: int, count: int, state: Any = None, **options: Any) -> tuple[Batches, dict[str, Any]]:
    return world_from(mix, ranks, lambda loader: take(loader, count), state, **{"global_batch_size": 12, **options})


# --- where chunks are cut ---


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.integers(1, 400).map(lambda blocks: 512 * blocks), min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 39)), unit_bytes=st.integers(SPAN_BYTES, 10 * SPAN_BYTES), seed=st.integers(0, 9),
)  # fmt: skip
def test_units_hold_whole_spans_once_and_their_sums_follow_from_those_of_spans(
    records: list[int], cuts: set[int], unit_bytes: int, seed: int
) -> None:
    crc32c = pytest.importorskip("crc32c").crc32c
    data = np.random.default_rng(seed).bytes(sum(records))
    starts = np.concatenate(([0], np.cumsum(records)))
    bounds = np.array([0, *sorted(cut for cut in cuts if cut < len(records)), len(records)])
    spans = [int(bounds[0])]
    for number in range(1, len(records)):
        if number in bounds or starts[number] - starts[spans[-1]] >= SPAN_BYTES:
            spans.append(number)
    rows = {
        "first_sample": bounds[:-1], "num_samples": np.diff(bounds), "byte_start": starts[bounds[:-1]],
        "byte_end": starts[bounds[1:]], "crc32c": np.zeros(len(bounds) - 1),
    }  # fmt: skip
    firsts = np.array(spans)
    ends = starts[[*spans[1:], len(records)]]
    sums = np.array([crc32c(data[a:b]) for a, b in zip(starts[firsts], ends, strict=True)], np.uint32)
    table = one_shard_table(ShardInfo(name="a.tar", size_bytes=len(data), num_samples=len(records)), rows)
    found = units_of(Spans(chunks=table, firsts=firsts, byte_starts=starts[firsts], crc32c=sums), unit_bytes)
    first, counts, begins, stops, crcs = found
    assert first.tolist() == [0, *np.cumsum(counts)[:-1].tolist()]
    assert begins.tolist() == [0, *stops[:-1].tolist()]
    assert stops[-1] == len(data)
    assert set(table.byte_start.tolist()) <= set(begins.tolist()) <= set(starts[firsts].tolist())
    assert crcs.tolist() == [crc32c(data[a:b]) for a, b in zip(begins, stops, strict=True)]
    largest = max(ends - starts[firsts])
    assert max(stops - begins) <= unit_bytes + largest
    for size, start, end in zip(table.chunk_bytes, table.byte_start, table.byte_end, strict=True):
        assert ((begins >= start) & (begins < end)).sum() <= -(-size // unit_bytes)


# --- P1 to P5 ---


@pytest.mark.parametrize("options", [EXACT, ONE_SOURCE])
def test_any_world_stopped_and_resumed_gives_the_same_batches(folder: Path, options: dict[str, Any]) -> None:
    mix = mixture(folder, weights=WEIGHTS, fetch_bytes=UNITS, **options)
    assert len(mix.source.leaves["web"].chunk_samples) > 12
    assert len(mix.source.leaves["math"].chunk_samples) == 2
    whole, _ = world(mix, 1, 24)
    before, state = world(mix, 3, 11)
    after, _ = world(mix, 2, 13, state)
    assert before + after == whole
    assert state["ledger"][0]["fetch_bytes"] == {"code": 64 * KIB, "web": 200 * KIB}


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_that_ends_has_each_sample_once(folder: Path, ranks: int) -> None:
    mix = mixture(folder, fetch_bytes=UNITS)
    for_each = [
        take(loader) for loader in loaders(cast("StreamingDataset", mix), ranks, global_batch_size=12, last_batch="pad")
    ]
    assert total(merged(for_each)) == Counter(
        f"{name}-{number:03d}" for name, shards in SIZES.items() for number in range(sum(shards))
    )


def test_changed_weights_go_on_with_the_units_of_the_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = mixture(folder, weights=WEIGHTS, fetch_bytes="1MiB")
    other = mixture(folder, weights={"web": 1, "code": 1, "math": 5}, fetch_bytes="1MiB")
    assert begun.source.fetch_bytes != other.source.fetch_bytes
    _, state = world(begun, 1, 10)
    same = mixture(folder, weights={"web": 1, "code": 1, "math": 5}, fetch_bytes=begun.source.fetch_bytes)
    expected, _ = world(same, 1, 30, state)
    with caplog.at_level(logging.INFO):
        assert world(other, 2, 30, state)[0] == expected
    assert "fetch_bytes: the run continues with the fetch units that it began with: code" in caplog.text
    _, last = world(other, 1, 30, state)
    assert [entry["fetch_bytes"] for entry in last["ledger"]] == [begun.source.fetch_bytes] * 2


def test_a_source_added_later_has_units_of_its_own(folder: Path) -> None:
    begun = mixture(folder, "web code", weights={"web": 2, "code": 1}, fetch_bytes="500KiB")
    _, state = world(begun, 2, 8)
    more = mixture(folder, weights=WEIGHTS, fetch_bytes="300KiB")
    after, last = world(more, 3, 30, state)
    sizes = {**begun.source.fetch_bytes, "math": more.source.fetch_bytes["math"]}
    assert [entry["fetch_bytes"] for entry in last["ledger"]] == [begun.source.fetch_bytes, sizes]
    assert after == world(mixture(folder, weights=WEIGHTS, fetch_bytes=sizes), 1, 30, state)[0]
    replayed, _ = world(more, 1, 38, {**last, "samples_seen": 0})
    assert replayed == world(begun, 1, 8)[0] + after


def test_a_run_that_began_with_whole_chunks_keeps_them(folder: Path) -> None:
    whole = mixture(folder, weights=WEIGHTS)
    expected, _ = world(whole, 1, 20)
    _, state = world(whole, 1, 8)
    assert "fetch_bytes" not in state["ledger"][0]
    after, last = world(mixture(folder, weights=WEIGHTS, fetch_bytes=UNITS), 2, 12, state)
    assert after == expected[8:]
    assert last["ledger"] == state["ledger"]


@pytest.mark.thorough
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.fixed_dictionaries({}, optional={name: st.integers(64 * KIB, 1 << 20) for name in SIZES}),
    weights=st.fixed_dictionaries({name: st.integers(1, 5) for name in SIZES}), ends=st.sampled_from([None, "all"]),
    ranks=st.integers(1, 4), others=st.integers(1, 4), stop=st.integers(0, 10),
)  # fmt: skip
def test_any_sizes_stopped_anywhere_and_resumed_on_another_world(
    folder: Path, sizes: dict[str, int], weights: dict[str, int], ends: Any, ranks: int, others: int, stop: int
) -> None:
    mix = mixture(folder, weights=weights, ends=ends, fetch_bytes=sizes)
    whole, _ = world(mix, 1, 11)
    before, state = world(mix, ranks, stop) if stop else ([], None)
    assert before + world(mix, others, 11 - stop, state)[0] == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_sample_comes_once_in_every_pass_over_a_source(folder: Path, num_workers: int) -> None:
    """Also with worker processes, and a limit of memory that holds a few units."""
    mix = mixture(folder, weights=WEIGHTS, fetch_bytes=UNITS)
    with DataLoader(mix, global_batch_size=12, num_workers=num_workers, memory_limit="9MiB") as loader:
        keys = Counter(key for batch in take(loader, 40) for key in batch)
        seen = loader.seen()
    for name, shards in SIZES.items():
        counts = {keys[f"{name}-{number:03d}"] for number in range(sum(shards))}
        assert max(counts) - min(counts) <= 2  # lanes of a source drift by a sample
        assert sum(count for key, count in keys.items() if key.startswith(name)) == seen[name]["samples"]


def test_filters_ranges_and_nesting_are_cut_too(folder: Path) -> None:
    web = StreamingDataset(f"{folder}/web/", decode="raw", where="n % 3 = 0")
    code = StreamingDataset(f"{folder}/code/", decode="raw")[7:41]
    mix = Mixture(
        {"web": web, "more": Mixture({"code": code})}, quotas="exact", shuffle=FEW_LANES,
        fetch_bytes={"web": "64KiB", "more/code": "70KiB"},
    )  # fmt: skip
    expected = {f"web-{number:03d}" for number in range(160) if number % 3 == 0}
    expected |= {f"code-{number:03d}" for number in range(7, 41)}
    assert {name: len(one.chunk_samples) > 4 for name, one in mix.source.leaves.items()} == {
        "more/code": True,
        "web": True,
    }
    assert [mix.source.fingerprints["web"], mix.source.fingerprints["more/code"]] == [web.fingerprint, code.fingerprint]
    with DataLoader(mix, global_batch_size=11, last_batch="pad") as loader:
        batches = [(batch["__key__"], batch["__valid__"].tolist()) for batch in loader]
    assert Counter(key for keys, valid in batches for key, real in zip(keys, valid, strict=True) if real) == Counter(
        expected
    )
    number = next(i for i in range(len(mix)) if mix[i]["__key__"] == "code-007")
    assert [mix[number + i]["__key__"] for i in range(34)] == [f"code-{i:03d}" for i in range(7, 41)]


def test_a_source_that_grew_goes_on_with_its_units(tmp_path: Path) -> None:
    for name in ("web", "math"):
        write(tmp_path, name, SIZES[name][:1])
    options: dict[str, Any] = {"weights": {"web": 1, "math": 1}, "fetch_bytes": {"web": "64KiB", "math": "64KiB"}}
    before, state = world(mixture(tmp_path, "web math", **options), 1, 3)
    assert max(total(before).values()) == 1
    write(tmp_path, "math", SIZES["math"][1:], first_shard=1)
    grown = mixture(tmp_path, "web math", **options)
    after, last = world(grown, 1, 40, state)
    again, _ = world(grown, 3, 25, last)
    assert last["ledger"][-1]["joins"]["math"] >= 1
    assert last["ledger"][-1]["fetch_bytes"] == {"math": 64 * KIB, "web": 64 * KIB}
    assert after + again == world(grown, 2, 65, state)[0]
    first = Counter(key for batch in [*before, *after][:4] for key in batch.elements() if key.startswith("math"))
    assert set(first.values()) == {1}
    assert max(first) < "math-030" <= max(key for batch in again for key in batch if key.startswith("math"))


@pytest.mark.parametrize("fields", [None, ["bin"]])
def test_damage_to_a_span_costs_its_samples_alone(tmp_path: Path, fields: Any) -> None:
    write(tmp_path, "code", SIZES["code"])
    url = f"{tmp_path}/code/000000.tar"
    damaged = bytearray(Path(url).read_bytes())
    place = damaged.index(content("code-020"))
    damaged[place] ^= 1
    Path(url).write_bytes(damaged)
    code = StreamingDataset(f"{tmp_path}/code/", decode="raw", on_error="skip", max_bad_samples=1.0, fields=fields)
    table = code.source.samples_at(code.urls[0])
    assert table is not None
    low, high, _ = table.widened(20, 21)
    mix = Mixture({"code": code}, quotas="exact", fetch_bytes="300KiB", shuffle=FEW_LANES)
    unit = int(np.searchsorted(mix.source.leaves["code"].chunk_samples.cumsum(), 20, side="right"))
    assert mix.source.leaves["code"].chunk_samples[unit] > high - low
    with DataLoader(mix, global_batch_size=10) as loader:
        got = Counter(
            key for batch in loader for key, ok in zip(batch["__key__"], batch["__valid__"].tolist(), strict=True) if ok
        )
        bad = {one["key"] for one in loader.metrics()["bad"]}
    lost = {f"code-{number:03d}" for number in range(low, high)}
    assert bad == lost
    assert got == Counter({f"code-{number:03d}" for number in range(60)} - lost)


def test_units_change_under_a_loop_that_runs_and_stay_in_another_world(folder: Path) -> None:
    mix = mixture(folder, weights=WEIGHTS, fetch_bytes="1MiB")
    whole, _ = world(mix, 1, 20)
    other = mixture(folder, weights=WEIGHTS, fetch_bytes=UNITS)
    with DataLoader(other, global_batch_size=12) as loader:
        own = take(loader, 3)
        for stop in (5, 9):
            loader.load_state_dict(world(mix, 1, stop)[1])
            assert [Counter(batch) for batch in take(loader, 6)] == whole[stop : stop + 6]
        loader.remesh(0, 1, at=4)
        assert [Counter(batch) for batch in take(loader, 6)] == whole[4:10]
        assert [Counter(batch) for batch in own] == world(other, 1, 3)[0]


# --- what is said ---


def test_the_message_about_memory_names_a_value_that_fits(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with ShardWriter(f"{tmp_path / name}/{{:06d}}.tar") as writer:
            for number in range(300):
                writer.write({"__key__": f"{number:03d}", "bin": bytes(20_000)})
    sources = {name: StreamingDataset(f"{tmp_path / name}/", decode=None) for name in ("a", "b")}
    make = partial(Mixture, sources, weights={"a": 1, "b": 3}, quotas="exact", shuffle=FEW_LANES)
    limit: dict[str, Any] = {"batch_size": 4, "memory_limit": "6MiB"}
    with DataLoader(make(), **limit) as loader, pytest.raises(MemoryLimitError) as caught:
        next(iter(loader))
    named = re.search(r'fetch_bytes="(\d+[KM]iB)" cuts them', str(caught.value))
    assert named is not None
    mix = make(fetch_bytes=named[1])
    assert mix.source.fetch_bytes["b"] > 1.6 * mix.source.fetch_bytes["a"] > 64 * KIB
    with DataLoader(mix, **limit) as loader:
        assert len([batch for batch, _ in zip(loader, range(200), strict=False)]) == 200
        assert loader.metrics()["arena_peak_bytes"] <= 4.5 * (1 << 20)


def test_sizes_follow_the_square_roots_of_shares_of_the_bytes() -> None:
    assert divided(10 << 20, {"a": 0.8, "b": 0.2}) == {"a": 6_990_506, "b": 3_495_253}
    assert divided(10 << 20, {"a": 1.0, "b": 0.0}) == {"a": (10 << 20) - 64 * KIB, "b": 64 * KIB}
    assert divided(1, {"a": 0.5, "b": 0.5}) == {"a": 64 * KIB, "b": 64 * KIB}


def test_the_largest_share_of_a_schedule_counts(folder: Path) -> None:
    steps = Schedule.steps({0: {"web": 3, "code": 1, "math": 0}, 500: {"web": 1, "code": 1, "math": 2}})
    mix = mixture(folder, weights=steps, fetch_bytes="600KiB")
    mean = {name: one.chunk_bytes.sum() / sum(SIZES[name]) for name, one in mix.source.leaves.items()}
    first = 3 * mean["web"] + mean["code"]
    then = mean["web"] + mean["code"] + 2 * mean["math"]
    largest = {"web": 3 * mean["web"] / first, "code": mean["code"] / min(first, then), "math": 2 * mean["math"] / then}
    assert mix.source.fetch_bytes == divided(600 * KIB, {name: float(share) for name, share in largest.items()})


def test_a_cache_keeps_units(folder: Path, tmp_path: Path) -> None:
    """Each unit is fetched once by two loops; whole chunks in the same cache are entries of their own."""
    sources = {
        name: StreamingDataset(f"{folder}/{name}/", decode="raw", cache_dir=tmp_path) for name in ("web", "code")
    }
    mix = Mixture(sources, quotas="exact", shuffle=FEW_LANES, fetch_bytes=dict.fromkeys(sources, "64KiB"))
    found = []
    for one in (mix, mix, Mixture(sources, quotas="exact", shuffle=FEW_LANES)):
        with DataLoader(one, global_batch_size=12, last_batch="pad") as loader:
            before = loader.metrics()
            keys = Counter(key for batch in take(loader) for key in batch)
            after = loader.metrics()
        assert keys == Counter(f"{name}-{n:03d}" for name in sources for n in range(sum(SIZES[name])))
        found.append(int(after["cache_misses"] - before.get("cache_misses", 0)))
    assert found == [len(mix.source.chunk_samples), 0, sum(len(one.source.chunk_samples) for one in sources.values())]


def test_a_mixture_shows_its_units(folder: Path) -> None:
    assert "fetch units of 64.0 KiB, " in repr(mixture(folder, fetch_bytes="192KiB"))
    assert "fetch units of 64.0 KiB to 200.0 KiB, " in repr(mixture(folder, fetch_bytes=UNITS))


def test_what_cannot_be_cut_is_refused_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(f"{folder}/web/", decode="raw")
    groups = Balanced(dataset, by="n")
    nested: dict[str, Any] = {"sources": {"all": groups, "web": dataset}, "weights": {"all": 1, "web": 1}}
    with pytest.raises(ConfigError, match=r'group of samples; give sizes of the others alone, fetch_bytes={"web": …}'):
        Mixture(**nested, quotas="exact", fetch_bytes="1MiB")
    assert Mixture(**nested, quotas="exact", fetch_bytes={"web": "1MiB"}).source.fetch_bytes == {"web": 1 << 20}
    wrong: tuple[tuple[Any, str], ...] = (
        ({"all/0": "1MiB"}, "leave it out: its chunks then stay whole"),
        ({"web": 3.5}, "fetch_bytes of 'web': expected an int or a string"),
        (-1, "must be positive"),
        (["1MiB"], "expected an int or a string"),
    )
    for size, said in wrong:
        with pytest.raises(ConfigError, match=said):
            Mixture(**nested, quotas="exact", fetch_bytes=size)
    two = {"one": dataset, "two": dataset}
    with pytest.raises(ConfigError, match="at least 128KiB for 2 sources, 64KiB each"):
        Mixture(two, quotas="exact", fetch_bytes="127KiB")
    assert Mixture(two, quotas="exact", fetch_bytes="128KiB").source.fetch_bytes == dict.fromkeys(two, 64 * KIB)
    write(tmp_path, "math", (30,))
    for path in Path(tmp_path, "math").rglob("*samples*/*"):
        path.unlink()
    with pytest.raises(IndexMissingError, match=r"no sample table.*`shard_tools index "):
        mixture(tmp_path, "math", fetch_bytes={"math": "64KiB"})


def test_a_file_may_give_it(folder: Path, tmp_path: Path) -> None:
    sources = {name: {"url": f"{folder}/{name}/", "decode": "raw"} for name in SIZES}
    described: dict[str, Any] = {
        "sources": sources, "weights": WEIGHTS, "quotas": "exact", "fetch_bytes": UNITS, "shuffle": {"lanes": 2},
    }  # fmt: skip
    path, state_path = tmp_path / "mixture.json", tmp_path / "state.json"
    path.write_text(json.dumps(described))
    mix = Mixture.from_file(path)
    assert world(mix, 1, 10) == world(mixture(folder, weights=WEIGHTS, fetch_bytes=UNITS), 1, 10)
    _, state = world(mix, 1, 5)
    path.write_text(json.dumps({**described, "fetch_bytes": "2MiB"}))  # the tool goes by the state
    state_path.write_text(json.dumps(state))
    more = ["--state", str(state_path), "--who", "--step", "5", "--batch-size", "12", "--json"]
    shown = CliRunner().invoke(cli, ["plan", str(path), *more], prog_name="shard_tools")
    assert shown.exit_code == 0, shown.output
    keys = sorted(row["key"] for row in json.loads(shown.output)["rows"])
    assert keys == sorted(world(mix, 1, 1, state)[0][0].elements())
