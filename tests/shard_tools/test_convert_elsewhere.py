"""Converting by an executor gives the bytes of converting here, stopped or not."""

from __future__ import annotations

import gzip
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shard_tools.make.convert import ConvertOptions, convert, elsewhere
from shard_tools.running.engine import ordered
from streaming.errors import ConfigError, DataError, DuplicateKeyError
from tests.support.clusters.executors import Stopping
from tests.support.sources.conversions import contents, parquet_source

pytestmark = pytest.mark.thorough


def small_source(folder: Path) -> str:
    return parquet_source(folder, num_rows=150)


def image_source(folder: Path) -> str:
    for number in range(150):
        path = folder / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * (number * 53 % 4000 + 1))
    return str(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (parquet_source, {"max_bytes": 100_000, "key_field": "id", "columns": ("tokens",)}),
        (parquet_source, {"max_samples": 100, "shuffle_seed": 3}),
        (small_source, {"max_bytes": 2000}),  # a row or two to a shard
        (image_source, {"max_bytes": 60_000, "columns": ("cls", "path")}),
    ],
)
def test_the_same_bytes(tmp_path: Path, make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_MIN_RANGE", 40)
    source, chosen = make(tmp_path / "source"), ConvertOptions(**options)
    here = convert(source, str(tmp_path / "here"), options=chosen)
    with ThreadPoolExecutor(4) as executor:
        there = convert(source, str(tmp_path / "there"), options=chosen, executor=executor)
    assert here.num_shards > 3
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert there.num_samples == here.num_samples


@pytest.mark.parametrize("go_on", [None, ThreadPoolExecutor])
def test_a_stopped_one_goes_on_here_or_elsewhere(tmp_path: Path, go_on: type[Executor] | None) -> None:
    source, options = parquet_source(tmp_path / "source"), ConvertOptions(max_bytes=100_000)
    convert(source, str(tmp_path / "here"), options=options)
    with Stopping(3) as executor, pytest.raises(InterruptedError):
        convert(source, str(tmp_path / "there"), options=options, executor=executor)
    assert not (tmp_path / "there/_shardstream/chunks.parquet").exists()
    if go_on is None:
        report = convert(source, str(tmp_path / "there"), options=options)
    else:
        with go_on() as executor:
            report = convert(source, str(tmp_path / "there"), options=options, executor=executor)
    assert report.num_resumed_samples > 0
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_what_here_refuses_is_refused_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n'))
    pq.write_table(pa.table({"id": ["a", "b", "a"]}), tmp_path / "twice.parquet")
    pq.write_table(pa.table({"id": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    keyed = ConvertOptions(key_field="id")
    with ThreadPoolExecutor(2) as executor:
        with pytest.raises(ConfigError, match=r"lines.jsonl.gz is compressed.*--engine local"):
            convert(str(tmp_path / "lines.jsonl.gz"), str(tmp_path / "a"), executor=executor)
        with pytest.raises(DuplicateKeyError, match="'a'"):
            convert(str(tmp_path / "twice.parquet"), str(tmp_path / "b"), options=keyed, executor=executor)
        with pytest.raises(DataError, match="no records"):
            convert(str(tmp_path / "empty.parquet"), str(tmp_path / "c"), options=keyed, executor=executor)


def test_results_come_in_order_and_no_more_ahead_than_asked() -> None:
    asked: list[int] = []

    def numbers() -> Any:
        for number in range(20):
            asked.append(number)
            yield number

    with ThreadPoolExecutor(4) as executor:
        for count, square in enumerate(ordered(executor, lambda number: number**2, numbers(), ahead=5)):
            assert square == count**2
            assert len(asked) <= count + 5
