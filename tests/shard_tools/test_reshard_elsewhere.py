"""Resharding by an executor gives the bytes of resharding here, for every option, stopped or not."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_tools import ShardWriter
from shard_tools.change.sets.rewrite.field_changes import FieldChanges
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, ReshardReport, reshard
from shard_tools.change.sets.rewrite.shard_source import ShardSource
from streaming.errors import ChecksumError, ConfigError, DataError, DuplicateKeyError
from streaming.shards.catalog.build import index_shards
from streaming.storage import Storage
from tests.support.clusters.executors import Sending, Stopping
from tests.support.sources.conversions import contents

pytestmark = pytest.mark.thorough

COUNT = 120
COLUMNS = {"number": "json.number", "lang": "json.lang", "name": "json.name"}


def write(folder: Path, numbers: range, prefix: str = "", **options: Any) -> str:
    """Samples of up to 20 KB, with fields that only some have, a late column and a view."""
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=17, columns=COLUMNS, **options) as writer:
        for number in numbers:
            note = {"number": number * 7 % 30, "lang": ("en", "de", None)[number % 3], "name": f"ä{number}" * 40}
            big = random.Random(number).randbytes(number * 170)
            sample = {"__key__": f"{prefix}{number:04d}", "json": note, "bin": big, "empty.txt": b""}
            writer.write(sample | ({"npy": np.arange(number)} if number % 4 else {}))
    return str(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("source"), range(COUNT))


def both(source: str | list[str], folder: Path, **options: Any) -> ReshardReport:
    """Reshard here and elsewhere, and compare everything."""
    chosen = ReshardOptions(**{"max_bytes": 150_000, **options})
    here = reshard(source, f"{folder}/here", options=chosen)
    with Sending() as executor:
        there = reshard(source, f"{folder}/there", options=chosen, executor=executor)
    assert contents(folder / "there") == contents(folder / "here")
    assert replace(there, seconds=here.seconds, target=here.target) == here
    assert len(executor.call_bytes) == here.num_shards  # each sample is read once, where it is written
    return here


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_bytes": 1},
        {"max_samples": 7},
        {"shuffle_seed": 3},
        {"shuffle_seed": 3, "memory_bytes": 1},
        {"sort": "number"},
        {"sort": "__key__", "descending": True},
        {"where": "number >= 20 and lang = 'en'"},
        {"fields": ("npy", "json"), "max_bytes": 30_000},
        {"drop_missing": ("npy",), "sort": "lang"},
        {"key_prefix": "{shard}/{number}-"},
        {
            "changes": FieldChanges(
                rename=(("bin", "data.bin"),), drop=("npy",), add=(("txt", "name"), ("lang.txt", "lang"))
            )
        },
        {"changes": FieldChanges(add=(("name.json", "number"),)), "shuffle_seed": 9},
    ],
    ids=str,
)
def test_the_same_bytes(source: str, tmp_path: Path, options: dict[str, Any]) -> None:
    report = both(source, tmp_path, **options)
    assert report.num_shards > 2 or "where" in options


def test_the_same_bytes_of_some_samples_of_several_sources(source: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other", range(40, 90), "b")
    bad = {"url": f"{other}/000000.tar", "number_in_shard": 3, "key": "b0043", "stage": "decode", "reason": "x"}
    (tmp_path / "bad.jsonl").write_text(json.dumps(bad) + "\n")
    report = both([source, other], tmp_path, drop=(f"{tmp_path}/bad.jsonl",), shuffle_seed=1)
    assert (report.num_dropped, report.num_samples) == (1, COUNT + 50 - 1)


@pytest.mark.parametrize("more", [{}, {"shuffle_seed": 5}])
def test_the_same_bytes_where_samples_of_one_key_are_joined(tmp_path: Path, more: dict[str, Any]) -> None:
    for part, fields in enumerate((("txt",), ("txt", "jpg"), ("cls",))):
        with ShardWriter(f"{tmp_path}/in/{part}-{{:06d}}.tar", max_samples=6) as writer:
            for number in range(part * 7, 30 + part):
                writer.write({"__key__": f"{number:03d}", **{name: f"{part}{number}".encode() * 9 for name in fields}})
    report = both(f"{tmp_path}/in", tmp_path, dedupe=True, max_samples=5, **more)
    assert report.num_joined > 10


def test_the_same_bytes_of_sets_without_an_index_or_with_another_writer(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/bare/{{:06d}}.tar", max_samples=9, index=False) as writer:
        for number in range(50):
            writer.write({"__key__": f"{number:03d}", "txt": "x" * (number * 31)})
    report = both(f"{tmp_path}/bare", tmp_path, max_bytes=20_000)
    assert report.num_samples == 50
    index_shards(Storage(), [f"{tmp_path}/bare/{number:06d}.tar" for number in range(6)])
    assert reshard(f"{tmp_path}/bare", f"{tmp_path}/again").num_samples == 50


def test_a_call_carries_only_what_its_shard_needs(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/in/{{:06d}}.tar", max_samples=500, columns={"n": lambda sample: 7}) as writer:
        for number in range(3000):
            writer.write({"__key__": f"{number:05d}", "txt": "x" * 900})
    sizes = {}
    for shards in (6, 60):
        with Sending() as executor:
            options = ReshardOptions(max_samples=3000 // shards)
            reshard(f"{tmp_path}/in", f"{tmp_path}/{shards}", options=options, executor=executor)
        sizes[shards] = max(executor.call_bytes)
    assert sizes[60] < 0.3 * sizes[6] < 10_000


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle_seed", [None, 4])
def test_a_stopped_one_goes_on_here_or_elsewhere(source: str, tmp_path: Path, shuffle_seed: int | None) -> None:
    options = ReshardOptions(max_bytes=100_000, shuffle_seed=shuffle_seed)
    reshard(source, str(tmp_path / "here"), options=options)
    for place, after in enumerate((None, Sending())):
        target = tmp_path / str(place)
        with Stopping(4) as executor, pytest.raises(InterruptedError):
            reshard(source, str(target), options=options, executor=executor)
        assert not (target / "_shardstream/chunks.parquet").exists()
        report = reshard(source, str(target), options=options, executor=after)
        assert report.num_resumed_samples > 0
        assert contents(target) == contents(tmp_path / "here")


def test_damage_is_named_and_a_wrong_index_is_found(tmp_path: Path) -> None:
    write(tmp_path / "in", range(40))
    shard = tmp_path / "in/000001.tar"
    good = shard.read_bytes()
    shard.write_bytes(good[:3000] + bytes([good[3000] ^ 1]) + good[3001:])
    with Sending() as executor, pytest.raises(ChecksumError) as raised:
        reshard(f"{tmp_path}/in", f"{tmp_path}/out", executor=executor)
    assert "--drop bad.jsonl" in "\n".join(raised.value.__notes__)
    shard.write_bytes(good)
    report = reshard(f"{tmp_path}/in", f"{tmp_path}/out")
    assert report.num_samples == 40


def test_content_that_is_not_what_was_planned_is_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlines = ShardSource.outlines

    def wrong(self: ShardSource, start: int) -> Any:
        for number, record in enumerate(outlines(self, start)):
            yield record if number != 30 else type(record)(key=record.key, fields={"bin": b""})

    monkeypatch.setattr(ShardSource, "outlines", wrong)
    with Sending() as executor, pytest.raises(DataError, match=r"shard 0: expected .* bytes, got .*shard_tools verify"):
        reshard(source, str(tmp_path / "out"), executor=executor)


def test_what_here_refuses_is_refused_elsewhere(source: str, tmp_path: Path) -> None:
    with Sending() as executor:
        for key_prefix, options in (("../", {}), ("a.", {"shuffle_seed": 1})):
            chosen = ReshardOptions(key_prefix=key_prefix, **options)
            with pytest.raises(ConfigError) as here:
                reshard(source, f"{tmp_path}/a", options=chosen)
            with pytest.raises(ConfigError) as there:
                reshard(source, f"{tmp_path}/a", options=chosen, executor=executor)
            assert str(there.value) == str(here.value)
        with pytest.raises(DuplicateKeyError) as raised:
            reshard([source, write(tmp_path / "same", range(3))], f"{tmp_path}/b",
                    options=ReshardOptions(key_prefix="x"), executor=executor)  # fmt: skip
        assert "--dedupe" in "\n".join(raised.value.__notes__)
