"""What ``index`` does with columns of sample tables that only the command that wrote the set can make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import StreamingDataset
from tests.support.sets.tars import write_tar

LACKS = "without columns that other shards have, and so NULL there"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)])


def converted(folder: Path, *more: str) -> Path:
    source, target = folder / "z.jsonl", folder / "z1"
    source.write_text("".join(json.dumps({"id": f"k{n:03d}", "v": n}) + "\n" for n in range(100)))
    done = run("convert", source, target, "--key", "id", "--max-samples", 10, "--columns", "v", *more)
    assert done.exit_code == 0, done.output
    return target


def table_of(data: Path, shard: int) -> Path:
    return data / f"_shardstream/samples/{shard:06d}.tar.parquet"


def num_kept(data: Path) -> int:
    return len(StreamingDataset(str(data), where="v < 45"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return converted(tmp_path)


@pytest.mark.parametrize("named", ["", "000004.tar"])
def test_indexing_again_keeps_columns_and_every_byte(data: Path, named: str) -> None:
    before = {path: path.read_bytes() for path in sorted((data / "_shardstream").rglob("*.parquet"))}
    done = run("index", data / named, "--force")
    assert (done.exit_code, done.stderr) == (0, "")
    assert {path: path.read_bytes() for path in before} == before
    assert num_kept(data) == 45


def test_a_failure_of_one_shard_takes_no_column_of_others(data: Path) -> None:
    shard = data / "000007.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    tables = {number: table_of(data, number).read_bytes() for number in range(10)}
    assert run("index", data, "--force").exit_code == 1
    assert {number: table_of(data, number).read_bytes() for number in range(10)} == tables


def lost(data: Path) -> None:
    table_of(data, 2).unlink()


def cut(data: Path) -> None:
    table_of(data, 2).write_bytes(table_of(data, 2).read_bytes()[:100])


def other_keys(data: Path) -> None:
    write_tar(data / "000002.tar", [(f"n{n}.json", b"{}") for n in range(10)])


def other_number(data: Path) -> None:
    write_tar(data / "000002.tar", [(f"k{n:03d}.json", b"{}") for n in range(20, 29)])


@pytest.mark.parametrize("named", ["", "000002.tar"])
@pytest.mark.parametrize("change", [lost, cut, other_keys, other_number])
def test_a_table_without_columns_of_its_neighbors_is_named_with_a_cure(
    data: Path, change: Callable[[Path], None], named: str
) -> None:
    change(data)
    done = run("index", "--force", data / named)
    assert done.exit_code == 0
    assert f"{LACKS}: 1 shard, first {data / '000002.tar'}: v. " in done.stderr
    assert "with --overwrite" in done.stderr
    assert num_kept(data) == 35
    converted(data.parent, "--overwrite")
    assert num_kept(data) == 45


def test_values_that_may_be_of_other_bytes_are_kept_with_a_word(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tar(data / "000002.tar", [(f"k{n:03d}.json", b'{"v": 99}') for n in range(20, 30)])
    assert run("index", "--force", data / "000002.tar").exit_code == 0
    assert "its bytes changed since it was indexed, its keys did not; its columns stay as they were: v" in caplog.text
    assert num_kept(data) == 45


@pytest.mark.parametrize("shard", [0, 2, 9])
def test_the_same_conversion_mends_tables_without_its_columns(data: Path, shard: int) -> None:
    before = {path: path.read_bytes() for path in sorted(data.glob("*.tar")) + sorted(data.rglob("samples/*"))}
    table_of(data, shard).unlink()
    assert run("index", "--force", data / f"{shard:06d}.tar").exit_code == 0
    assert num_kept(data) < 45 or shard == 9
    converted(data.parent)
    assert {path: path.read_bytes() for path in before} == before
    assert num_kept(data) == 45


def test_an_older_late_column_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    def write(shard: int, value: object) -> None:
        with ShardWriter(f"{tmp_path}/{{:d}}.tar", start_shard=shard, overwrite=shard == 2) as writer:
            for n in range(4):
                text = json.dumps({"n": value}).encode()
                writer.write({"__key__": f"{shard}-{n}", "json": text})

    write(0, "a")
    write(1, "b")
    assert run("index", tmp_path, "--columns", "json.n").exit_code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "_shardstream/columns/json.n").rglob("*.*")}
    assert len(files) == 3
    write(2, "\ud800")
    failed = run("index", tmp_path, "--columns", "json.n")
    assert failed.exit_code, failed.output
    assert "'2-0'" in failed.stderr, failed.stderr
    now = {path: path.read_bytes() for path in (tmp_path / "_shardstream/columns/json.n").rglob("*.*")}
    assert now == files
    where = "\"json.n\" = 'a'"
    assert len(StreamingDataset([f"{tmp_path}/0.tar", f"{tmp_path}/1.tar"], where=where)) == 4
    write(2, "a")
    assert run("index", tmp_path, "--columns", "json.n").exit_code == 0
    assert len(StreamingDataset(str(tmp_path), where=where)) == 8
