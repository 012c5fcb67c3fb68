"""Late columns: joined by key or lifted out of samples, beside the index; filters find what was put there."""

from __future__ import annotations

import gzip
import importlib
import json
import linecache
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.change.columns import join
from shard_tools.change.columns import table as tables
from shard_tools.cli import cli
from streaming import DataLoader, Mixture, StreamingDataset
from streaming.errors import ConfigError, DataError, IndexFormatError, IndexMismatchError, StateError
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.schema.value import Schema, SchemaField, TokenMeaning
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.index_files import change_document
from tests.support.sets.meanings import say

NUM = 90


def write(url: str, *, storage_options: Any = None, first: int = 0, num: int = NUM, shard: int = 0) -> str:
    with ShardWriter(
        f"{url}/{{:06d}}.tar", max_samples=25, start_shard=shard, storage_options=storage_options
    ) as writer:
        for number in range(first, first + num):
            document = {"similarity": number / 10, "deep": {"n": number}} if number % 4 else {"deep": {}}
            writer.write({"__key__": f"{number:05d}", "json": document, "bin": bytes(300)})
    return f"{url}/"


def scores(path: Path, rows: dict[str, Any], **columns: Any) -> str:
    table = pa.table({"key": list(rows), "score": list(rows.values()), **columns})
    pq.write_table(table, path, row_group_size=17)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def added(*arguments: str) -> dict[str, Any]:
    result = run("column", "add", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def stop_at(url: str, end: str) -> None:
    if url.endswith(end):
        raise LookupError


def kept(data: str, where: str, **options: Any) -> list[int]:
    return [int(sample["__key__"]) for sample in StreamingDataset(data, where=where, **options)]


@pytest.mark.parametrize(("memory", "rows_at_once"), [("1GiB", 20), ("3kB", 2**18)])  # one by one
def test_a_file_is_joined_by_key(
    tmp_path: Path, memory: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_BATCH_ROWS", rows_at_once)
    data = write(str(tmp_path / "data"))
    tars = {file: file.read_bytes() for file in (tmp_path / "data").glob("*.tar")}
    rows: dict[str, Any] = {f"{number:05d}": number * 2 for number in range(NUM) if number % 3}
    rows["00004"] = None
    keys = [*rows, "nobody", "no-one", None]
    random.Random(3).shuffle(keys)
    table = {key: rows.get(key, -1) for key in keys}
    file = scores(tmp_path / "scores.parquet", table, other=list(range(len(keys))))
    report = added(data, "score", "--from", file, "--on", "key", "--memory", memory)
    assert (report["num_samples"], report["num_missing"], report["num_rows"]) == (NUM, 31, len(keys))
    assert report["first_missing"] == ["00000", "00003", "00004", "00006", "00009"]
    assert report["num_unmatched"] == 3
    assert sorted(report["first_unmatched"]) == ["NULL", "no-one", "nobody"]
    assert kept(data, "score >= 100") == [number for number in range(50, NUM) if number % 3]
    assert kept(data, "score is null") == [number for number in range(NUM) if not number % 3 or number == 4]
    assert {file: file.read_bytes() for file in (tmp_path / "data").glob("*.tar")} == tars
    assert (
        added(data, "score", "--from", file, "--on", "key", "--overwrite")["column_version"] == report["column_version"]
    )


@pytest.mark.parametrize(
    ("values", "kind", "where", "expected"),
    [
        (lambda n: f"t{n % 3}", "string", "late = 't1'", [1, 4]),
        (lambda n: n % 2 == 0, "bool", "late", [0, 2, 4]),
        (lambda n: n / 4, "double", "late between 0.5 and 0.8", [2, 3]),
    ],
)
def test_kinds_of_values(tmp_path: Path, values: Any, kind: str, where: str, expected: list[int]) -> None:
    data = write(str(tmp_path / "data"), num=6)
    file = scores(tmp_path / "scores.parquet", {f"{number:05d}": values(number) for number in range(6)})
    report = added(data, "late", "--from", file, "--on", "key")
    assert report["type"] == kind
    assert kept(data, where) == expected


@pytest.mark.parametrize("rows_at_once", [2, 1 << 18])
def test_keys_that_come_twice_are_an_error_by_name(
    tmp_path: Path, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_BATCH_ROWS", rows_at_once)
    data = write(str(tmp_path / "data"))
    pq.write_table(pa.table({"key": ["00001", "zz", "00002", "zz", "00001"], "score": [1, 2, 3, 4, 5]}), tmp_path / "s")
    for memory in ("1GiB", "1kB"):
        refused = run("column", "add", data, "score", "--from", str(tmp_path / "s"), "--on", "key", "--memory", memory)
        assert refused.exit_code == 1
        assert "keys appear twice in the file, first '00001': it is not known which value counts" in refused.output
    with pytest.raises(ConfigError, match="no column 'score'"):
        kept(data, "score > 1")


def test_samples_that_share_a_key_get_the_same_value(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"), num=30)
    write(str(tmp_path / "data"), num=5, shard=2)
    file = scores(tmp_path / "s", {"00003": 7})
    report = added(data, "score", "--from", file, "--on", "key")
    assert report["num_shared"] == 5
    assert kept(data, "score = 7") == [3, 3]


def test_what_cannot_be_joined(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"), num=5)
    file = scores(tmp_path / "s", {"00003": 7}, when=pa.array([[0]]), number=[1])
    for arguments, problem, code in (
        ((data, "score", "--from", file), "Give one of --from FILE --on COLUMN, --lift PATH, and --compute", 2),
        (("score", "--from", file, "--on", "key"), "Give the URL", 2),
        ((data, "score", "--from", file, "--on", "keys"), "no column 'keys'; there are: key, score, when, number", 2),
        ((data, "late", "--from", file, "--on", "key"), "no column 'late'", 2),
        ((data, "late", "--from", file, "--on", "key", "--value", "when"), "column 'when' holds list", 2),
        ((data, "late", "--from", file, "--on", "number", "--value", "score"), "keys of samples are text", 2),
        ((data, "../up", "--from", file, "--on", "key"), "expected letters, digits", 2),
        ((data, "score", "--from", file, "--on", "key", "--missing", "error"), "without a value in", 1),
        ((data, "score", "--from", f"{data}000000.tar", "--on", "key"), "not a Parquet file", 1),
        ((data, "score", "--from", f"{file}x", "--on", "key"), "x", 1),
    ):
        refused = run("column", "add", *arguments)
        assert refused.exit_code == code, (arguments, refused.output)
        assert problem in refused.output, (arguments, refused.output)
    assert json.loads(run("column", "list", data, "--json").stdout) == {"columns": []}
    added(data, "score", "--from", file, "--on", "key")
    assert (
        "Already complete; nothing written."
        in run("column", "add", data, "score", "--from", file, "--on", "key").stdout
    )
    refused = run("column", "add", data, "score", "--from", file, "--on", "key", "--missing", "error")
    assert "already exists beside the index" in refused.output


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tsv.gz", "parquet"])
def test_tables_of_every_kind_are_joined_in_one_file_or_several(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of digits stay text, and numbers are numbers, whatever the format says of them."""
    monkeypatch.setattr(tables, "_LINES", 7)
    data = write(str(tmp_path / "data"))
    for part in range(3):
        rows = {
            f"{number:05d}": number / 2 if number % 2 else number // 2 for number in range(part * 30, part * 30 + 30)
        }
        path = tmp_path / f"s{part}.{kind}"
        if kind == "parquet":
            scores(path, rows)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps({"key": key, "score": score}) + "\n" for key, score in rows.items()))
        elif kind == "csv":
            path.write_text("key,score\n" + "".join(f"{key},{score}\n" for key, score in rows.items()))
        else:
            body = "score\tkey\n" + "".join(f"{score}\t{key}\n" for key, score in rows.items())
            path.write_bytes(gzip.compress(body.encode()))
    report = added(data, "score", "--from", f"{tmp_path}/s*.{kind}", "--on", "key")
    assert (report["type"], report["num_rows"], report["num_missing"]) == ("double", 90, 0)
    assert kept(data, "score >= 44") == [88, 89]
    one = added(data, "first", "--from", f"{tmp_path}/s0.{kind}", "--on", "key", "--value", "score")
    assert (one["type"], one["num_missing"]) == ("double", 60)


def test_text_tables_tell_their_types(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"), num=3)
    (tmp_path / "t.csv").write_text("key,whole,flag,word,half\n00000,7,true,x,\n00001,,false,1,1.5\n00002,9,true,,2\n")
    kinds = {"whole": ("int64", 1), "flag": ("bool", 0), "word": ("string", 1), "half": ("double", 1)}
    for column, kind in kinds.items():
        report = added(data, column, "--from", f"{tmp_path}/t.csv", "--on", "key")
        assert (report["type"], report["num_missing"]) == kind
    asked = ("column", "add", data, "other", "--from", f"{tmp_path}/t.csv", "--on", "key", "--value", "whole")
    assert "without a value" in run(*asked, "--missing", "error").stderr  # the row is there, its value is empty
    assert kept(data, "whole IS NULL AND NOT flag AND word = '1' AND half = 1.5") == [1]
    (tmp_path / "t.jsonl").write_text('{"key": "00000", "v": 1}\n{"key": "00001", "v": "x"}\n')
    assert (
        "1 (sample '00000') beside 'x' (sample '00001'): whole numbers and text, but a column holds one kind"
        in run("column", "add", data, "v", "--from", f"{tmp_path}/t.jsonl", "--on", "key").stderr
    )
    (tmp_path / "t.jsonl").write_text('{"key": 0, "v": 1}\n')
    assert (
        "keys of samples are text"
        in run("column", "add", data, "v", "--from", f"{tmp_path}/t.jsonl", "--on", "key").stderr
    )


@pytest.mark.parametrize("memory", ["1GiB", "3kB"])
def test_a_table_of_other_keys_is_an_error_with_an_example_of_both(tmp_path: Path, memory: str) -> None:
    data = write(str(tmp_path / "data"))
    file = scores(tmp_path / "s", {f"train/{number:05d}.jpg": number for number in range(4)})
    refused = run("column", "add", data, "score", "--from", file, "--on", "key", "--memory", memory)
    assert refused.exit_code == 1
    for told in ("no row matches a sample: 4 rows", "such as 'train/00000.jpg'", "90 samples, such as '00000'"):
        assert told in refused.stderr
    assert run("column", "list", data).stdout == "no late columns\n"


def test_a_path_at_which_no_sample_has_a_value_is_an_error(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"))
    added(data, "similar", "--lift", "json.similarity")
    for path, told in (("jsn.similarity", "no sample has such a field"), ("json.similarty", "no sample has a value")):
        refused = run("column", "add", data, "similar", "--lift", path, "--overwrite")
        assert refused.exit_code == 2
        assert told in refused.stderr
    assert run("index", data, "--columns", "json.similarty").exit_code == 2


def test_values_are_lifted_out_of_samples(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"))
    result = run("index", data, "--columns", "json.similarity, json.deep.n")
    assert result.exit_code == 0, result.output
    expected = [number for number in range(NUM) if number % 4 and number / 10 >= 6.05]
    assert kept(data, "json.similarity >= 6.05") == expected == kept(data, '"json.deep.n" >= 61')
    assert kept(data, "json.similarity is null") == list(range(0, NUM, 4))
    documents = [path.read_bytes() for path in sorted(Path(data).glob("_shardstream/columns/*/column.json"))]
    assert run("index", data, "--columns", "json.similarity,json.deep.n").stdout.count("column ") == 0  # there already
    assert documents == [path.read_bytes() for path in sorted(Path(data).glob("_shardstream/columns/*/column.json"))]
    missing = run("column", "add", data, "x", "--lift", "npy.x")
    assert missing.exit_code == 2
    assert "no sample has such a field" in missing.output


def test_numbers_of_two_types_categories_and_values_that_cannot_be_read(tmp_path: Path) -> None:
    data = f"{tmp_path}/data/"
    with ShardWriter(data + "{}.tar", max_samples=3) as writer:
        for number, value in enumerate((1, 2.5, 3, 4, 5, 6)):  # floats in the first shard alone
            writer.write({"__key__": f"{number}", "json": {"n": value}})
        writer.write({"__key__": "6", "json": b"{"})
    refused = run("column", "add", data, "n", "--lift", "json.n")
    assert refused.exit_code == 1
    assert "sample '6', field 'json': " in refused.output
    (tmp_path / "data" / "2.tar").unlink()
    assert run("index", data, "--prune").exit_code == 0
    assert added(data, "n", "--lift", "json.n")["type"] == "double"
    assert kept(data, "n > 2") == [1, 2, 3, 4, 5]
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"key": ["1", "4", "5"], "kind": words}), tmp_path / "kinds")
    added(data, "kind", "--from", str(tmp_path / "kinds"), "--on", "key")
    assert kept(data, "kind = 'a'") == [1, 5]


def test_an_older_column_is_withdrawn_before_its_files_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, first = (4, 9, 2), 0  # in groups of one, each with its own part of the values
    for shard, num in enumerate(sizes):
        data = write(str(tmp_path / "data"), num=num, first=first, shard=shard)
        first += num
    file = scores(tmp_path / "s", {f"{number:05d}": number for number in range(first)})
    added(data, "score", "--from", file, "--on", "key", "--memory", "1200")
    assert kept(data, "score > 11") == [12, 13, 14]
    put = Storage.put
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put", lambda store, url, data: stop_at(url, "000001.tar.parquet")
                      or put(store, url, data))  # fmt: skip
        with pytest.raises(LookupError):
            run("column", "add", data, "score", "--from", file, "--on", "key", "--overwrite", "--memory", "1200")
    with pytest.raises(ConfigError, match="no column 'score'"):
        kept(data, "score > 1")


def test_list_and_drop(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"))
    file = scores(tmp_path / "s", {"00003": 7})
    added(data, "score", "--from", file, "--on", "key")
    (column,) = json.loads(run("column", "list", data, "--json").stdout)["columns"]
    assert (column["name"], column["type"], column["num_missing"]) == ("score", "int64", NUM - 1)
    assert "score  int64" in run("column", "list", data).stdout
    assert "did you mean" not in run("column", "drop", data, "score").stdout
    assert "no late columns" in run("column", "list", data).stdout
    assert not list(Path(data).glob("_shardstream/columns/score/*"))
    refused = run("column", "drop", data, "score")
    assert refused.exit_code == 2
    assert "there is no such late column; there are: none" in refused.output


def test_a_column_that_does_not_fit_the_shards_is_refused_by_name(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"))
    added(data, "score", "--lift", "json.similarity")
    write(str(tmp_path / "data"), first=NUM, num=3, shard=9)
    with pytest.raises(
        IndexMismatchError, match=r"'score' has no values for shard .*000009.tar, which was added after"
    ):
        StreamingDataset(data, where="score > 1")
    assert kept(data, "score > 1", subset=(0, NUM)) == [n for n in range(NUM) if n % 4 and n > 10]
    added(data, "score", "--lift", "json.similarity", "--overwrite")
    assert kept(data, "score > 9")[-1] == NUM + 1  # of the last there is no value
    file = tmp_path / "data/_shardstream/columns/score/000001.tar.parquet"
    other = file.read_bytes()
    file.write_bytes((file.parent / "000002.tar.parquet").read_bytes())
    with pytest.raises(IndexMismatchError, match="belong to another shard"):
        StreamingDataset(data, where="score > 1")
    file.write_bytes(other[:-20])
    with pytest.raises(IndexFormatError, match=r"000001\.tar\.parquet"):
        StreamingDataset(data, where="score > 1")
    file.write_bytes(other)
    document = file.parent / "column.json"
    change_document(document, column_version="0")
    with pytest.raises(IndexMismatchError, match="are of another version"):
        StreamingDataset(data, where="score > 1")
    document.write_text("[]")
    with pytest.raises(IndexFormatError, match="not the document of a late column"):
        StreamingDataset(data, where="score > 1")


def test_a_column_newer_than_the_run_is_an_error_by_name(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"))
    file = scores(tmp_path / "s", {f"{number:05d}": number for number in range(NUM)})
    added(data, "score", "--from", file, "--on", "key")
    assert run("view", "save", data, "good", "--where", "score > 9").exit_code == 0
    with DataLoader(StreamingDataset(data, where="score > 9"), batch_size=4) as loader:
        state = loader.state_dict()
    scores(tmp_path / "s", {f"{number:05d}": number + 1 for number in range(NUM)})
    added(data, "score", "--from", file, "--on", "key", "--overwrite")
    with (
        DataLoader(StreamingDataset(data, where="score > 9"), batch_size=4) as loader,
        pytest.raises(StateError, match=r"column 'score' has changed since the state was saved: version \w{16} then"),
    ):
        loader.load_state_dict(state)
    with pytest.raises(IndexMismatchError, match=r"column 'score' is newer than view \"good\".*: version \w{16}, "):
        StreamingDataset(data, view="good")
    assert run("column", "drop", data, "score").exit_code == 0
    for path in Path(data).glob("_shardstream/samples/*.parquet"):  # nothing stands in for it
        table = SampleTable.from_parquet(path.read_bytes(), "table")
        path.write_bytes(replace(table, columns={"score": pa.array(range(table.num_samples))}).to_parquet())
    with pytest.raises(IndexMismatchError, match=r"newer than view \"good\".*: it is no longer a late column"):
        StreamingDataset(data, view="good")


def test_a_column_of_several_directories_is_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [write(str(tmp_path / name), num=30, first=first) for name, first in (("a", 0), ("b", 30))]
    added(urls[0], "score", "--lift", "json.similarity")
    with pytest.raises(IndexMismatchError, match=r"'score' is missing in .*/b "):
        StreamingDataset(urls, where="score > 1")
    added(urls[1], "score", "--lift", "json.similarity")
    both = StreamingDataset(urls, where="score > 1")
    assert [int(sample["__key__"]) for sample in both] == [number for number in range(11, 60) if number % 4]
    values = {f"{number:05d}": number / 10 if number % 4 else None for number in range(30, 60)}
    added(urls[1], "score", "--from", scores(tmp_path / "s", values), "--on", "key", "--overwrite")
    again = StreamingDataset(urls, where="score > 1")  # the same values in another version of the column
    assert (len(again), again.fingerprint == both.fingerprint) == (len(both), False)
    # A run over both that was stopped between their documents is continued; another column is not taken for its own.
    number, put = ("column", "add", *urls, "number"), Storage.put
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put", lambda store, url, data: stop_at(url, "b/_shardstream/columns/number/column.json")
                      or put(store, url, data))  # fmt: skip
        with pytest.raises(LookupError):
            run(*number, "--lift", "json.deep.n")
    assert "'number' already exists beside the index in " in run(*number, "--lift", "json.similarity").output
    added(*number[2:], "--lift", "json.deep.n")
    assert len(StreamingDataset(urls, where="number % 4 > 0")) == 45
    columns = json.loads(run("column", "list", *urls, "--json").stdout)["columns"]
    assert [(one["name"], one["num_samples"], one["num_missing"]) for one in columns] == [
        ("number", 30, 8), ("score", 30, 8), ("number", 30, 7), ("score", 30, 7),
    ]  # fmt: skip


def test_views_from_the_command_line(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"))
    added(data, "score", "--lift", "json.similarity")
    (tmp_path / "bad.txt").write_text("00077\n")
    where = ("--where", "score > 3", "--subset", "0%..90%", "--exclude", str(tmp_path / "bad.txt"))
    saved = json.loads(run("view", "save", data, "good", *where, "--json").stdout)
    expected = [number for number in range(31, 81) if number % 4 and number != 77]
    assert (saved["num_kept"], saved["num_samples"], saved["num_excluded"]) == (len(expected), NUM, 1)
    assert list(saved["columns"]) == ["score"]
    assert [int(sample["__key__"]) for sample in StreamingDataset(data, view="good")] == expected
    assert json.loads(run("view", "show", data, "good", "--json").stdout) == saved
    assert json.loads(run("view", "list", data, "--json").stdout) == {"views": [saved]}
    assert f"good  {len(expected)} of 90 samples" in run("view", "list", data).stdout
    assert run("view", "save", data, "good", *where).exit_code == 0  # the same again
    for arguments, problem in (
        ((data, "good", "--where", "score > 4"), "another view of this name"),
        ((data, "all"), "needs no name"),
        ((data, "odd", "--subset", "1-2"), "expected a range such as"),
        ((data, "odd", "--where", "score > 'a'"), "cannot compare"),
        ((data, "odd", "--where", "score > 400"), "keeps none of the 90 samples"),
    ):
        refused = run("view", "save", *arguments)
        assert refused.exit_code == 2, refused.output
        assert problem in refused.output
    assert "no view 'gone'" in run("view", "show", data, "gone").output


def test_plan_counts_what_is_kept(tmp_path: Path) -> None:
    data = write(str(tmp_path / "data"))
    assert run("view", "save", data, "late", "--where", "__key__ >= '00060'").exit_code == 0
    for filters, num_samples, num_chunks in (
        ((), NUM, 4),
        (("--where", "__key__ >= '00060'"), 30, 2),
        (("--view", "late", "--where", "__key__ < '00070'"), 10, 1),
        (("--subset", "0%..50%"), 45, 2),
    ):
        report = run("plan", data, "--dp", "2", "--batch-size", "5", *filters, "--json")
        assert report.exit_code == 0, report.output
        found = json.loads(report.stdout)
        assert (found["num_samples"], found["num_chunks"], found["num_batches"]) == (
            num_samples, num_chunks, num_samples // 10,
        )  # fmt: skip
    refused = run("plan", data, "--batch-size", "5", "--where", "n > 1")
    assert refused.exit_code == 2
    assert "no column 'n'" in refused.output


def test_columns_in_a_bucket_are_added_without_reading_a_tar(mini_s3: MiniS3Server, tmp_path: Path) -> None:
    url, options = mini_s3.create_bucket(fresh_name()), mini_s3.storage_options
    data = write(f"{url}/train", storage_options=options)
    file = scores(tmp_path / "s", {f"{number:05d}": number for number in range(NUM)})
    mini_s3.clear_log()
    flags = [part for name, value in options.items() for part in ("--storage-option", f"{name}={value}")]
    added(data, "score", "--from", file, "--on", "key", *flags)
    assert not [entry for entry in mini_s3.log() if entry["method"] == "GET" and str(entry["path"]).endswith(".tar")]
    assert kept(data, "score >= 80", storage_options=options) == list(range(80, 90))


def test_hashes_that_meet_are_told_apart_by_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        join, "stable_hash", lambda keys: pa.array([hash_of(key) for key in keys.to_pylist()], pa.int64())
    )

    def hash_of(key: bytes | None) -> int | None:
        return None if key is None else len(key)

    data = write(str(tmp_path / "data"))
    file = scores(tmp_path / "s", {f"{number:05d}": number for number in range(0, NUM, 2)})
    assert added(data, "score", "--from", file, "--on", "key")["num_missing"] == NUM // 2
    assert kept(data, "score >= 80") == [80, 82, 84, 86, 88]


def test_a_late_column_with_a_lifted_name_is_refused(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/{{:06d}}.tar", columns={"n": "json.n"}) as writer:
        writer.write({"__key__": "a", "json": {"n": 1, "m": 2}})
    refused = run("column", "add", f"{tmp_path}/", "n", "--lift", "json.n")
    assert refused.exit_code == 2
    assert "the sample tables have a column of this name" in refused.output
    added(f"{tmp_path}/", "m", "--lift", "json.m")
    path = tmp_path / "_shardstream/samples/000000.tar.parquet"  # lifted later
    table = SampleTable.from_parquet(path.read_bytes(), "table")
    path.write_bytes(replace(table, columns={**table.columns, "m": table.columns["n"]}).to_parquet())
    with pytest.raises(DataError, match="'m' is both a late column and one of the sample table"):
        kept(f"{tmp_path}/", "m > 1")


def test_a_mixture_by_tokens_takes_a_late_column(tmp_path: Path) -> None:
    short, long = write(str(tmp_path / "short"), num=60), write(str(tmp_path / "long"), num=60)
    for data, tokens in ((short, 100), (long, 700)):
        file = tmp_path / "tokens.parquet"
        pq.write_table(
            pa.table({"key": [f"{n:05d}" for n in range(60)], "tokens": [tokens - 1, tokens + 1] * 30}), file
        )
        added(data, "tokens", "--from", str(file), "--on", "key")
    sources = {"short": StreamingDataset(short), "long": StreamingDataset(long)}
    mix = Mixture(sources, weights={"short": 1, "long": 1}, unit="tokens")
    assert mix.source.begun().last.weights == pytest.approx({"short": 7 / 8, "long": 1 / 8})


# --- computed ---


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """Write a module into the current folder; give its name, new each time."""
    name = fresh_name("columns_of_mine").replace("-", "_")
    (folder / f"{name}.py").write_text(body)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_a_function_computes_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(str(tmp_path / "data"))
    name = module(
        tmp_path, monkeypatch,
        "def half(sample):\n"
        "    assert sample['__url__'].endswith('.tar') and 'bin' not in sample\n"
        "    number = int(sample['__key__'])\n"
        "    return None if number % 10 == 3 else sample['json']['deep'].get('n', -2) / 2\n",
    )  # fmt: skip
    report = added(data, "half", "--compute", f"{name}:half", "--fields", "json", "--workers", "2")
    assert (report["type"], report["num_missing"], report["num_samples"]) == ("double", 9, NUM)
    assert kept(data, "half > 40") == [n for n in range(81, NUM) if n % 4 and n % 10 != 3]
    assert kept(data, "half IS NULL") == list(range(3, NUM, 10))


def test_computing_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(str(tmp_path / "data"))
    body = (
        "import pathlib\n"
        "def once(sample):\n"
        "    with pathlib.Path('calls').open('a') as calls:\n"
        "        calls.write(sample['__key__'] + '\\n')\n"
        "    if sample['__key__'] == '00060' and not pathlib.Path('mended').exists():\n"
        "        raise LookupError('no such word')\n"
        "    return len(sample['__key__'])\n"
    )
    name = module(tmp_path, monkeypatch, body)
    failed = run("column", "add", data, "size", "--compute", f"{name}:once", "--workers", "1", "--json")
    assert failed.exit_code == 1
    said = json.loads(failed.stdout)["error"]
    assert said["type"] == "LookupError"
    assert said["message"].startswith(f"{name}:once failed on the sample '00060' of ")
    assert said["message"].endswith("000002.tar: LookupError: no such word")
    assert said["message"] in failed.stderr
    assert "in once\n" in failed.stderr
    assert "compute.py" not in failed.stderr
    with pytest.raises(ConfigError, match="size"):
        StreamingDataset(data, where="size = 5")  # a half-written column is none
    (tmp_path / "mended").touch()
    assert added(data, "size", "--compute", f"{name}:once", "--workers", "1")["num_missing"] == 0
    calls = (tmp_path / "calls").read_text().split()
    assert calls.count("00000") == 1
    assert calls.count("00050") == 2
    assert len(kept(data, "size = 5")) == NUM
    (tmp_path / "mended").unlink()
    assert run("column", "add", data, "other", "--compute", f"{name}:once", "--workers", "1").exit_code == 1
    (tmp_path / "another.py").write_text("def seven(sample): return 7\n")
    added(data, "other", "--compute", "another:seven")  # what the run with the other function left is not taken for it
    assert len(kept(data, "other = 7")) == NUM
    (tmp_path / "mended").touch()
    # A function that was changed computes another column, so may one whose text stayed: nothing of the old one stays.
    text = body.replace("len(sample['__key__'])", "SIZE")
    for size in (7, 18):  # of another length, or Python takes the compiled file of the same second
        (tmp_path / f"{name}.py").write_text(f"SIZE = {size}\n{text}")
        sys.modules.pop(name)
        importlib.invalidate_caches()
        linecache.checkcache()
        with monkeypatch.context() as patch:  # stopped at its second deletion
            once = [Storage.delete]
            patch.setattr(Storage, "delete", lambda *given, once=once: once.pop()(*given))
            with pytest.raises(IndexError):
                run("column", "add", data, "size", "--compute", f"{name}:once", "--overwrite")
        added(data, "size", "--compute", f"{name}:once", "--overwrite")
        assert len(kept(data, f"size = {size}")) == NUM


def test_tokens_are_counted_by_size(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/tok/{{:06d}}.tar", max_samples=4) as writer:
        for number in range(10):
            fields = {"tok": bytes(4 * number)} if number != 5 else {"txt": "none"}
            writer.write({"__key__": f"{number:05d}", **fields})
    data = f"{tmp_path}/tok/"
    unknown = run("column", "add", data, "tokens", "--compute", "tokens")
    assert (unknown.exit_code, "--dtype" in unknown.output) == (2, True)
    report = added(data, "tokens", "--compute", "tokens", "--dtype", "uint32")
    assert (report["type"], report["num_missing"]) == ("int64", 1)
    assert kept(data, "tokens >= 6") == [6, 7, 8, 9]
    assert Mixture({"a": StreamingDataset(data)}, weights={"a": 1}, unit="tokens").source.weighing.units_per_sample == {
        "a": 40 / 9
    }
    say(tmp_path / "tok", Schema(fields={"tok": SchemaField(kind="tokens", dtype="uint16", tokens=TokenMeaning())}))
    added(data, "tokens", "--compute", "tokens", "--overwrite")
    assert kept(data, "tokens >= 12") == [6, 7, 8, 9]
    wrong = run("column", "add", data, "other", "--compute", "tokens", "--fields", "txt", "--dtype", "uint16")
    assert wrong.exit_code == 0  # four bytes are two tokens, whatever they mean
    with ShardWriter(f"{tmp_path}/odd/{{:06d}}.tar") as writer:
        writer.write({"__key__": "k", "tok": bytes(7)})
    odd = run("column", "add", f"{tmp_path}/odd/", "tokens", "--compute", "tokens", "--dtype", "uint16")
    assert (odd.exit_code, "sample 'k', field 'tok': 7 bytes" in odd.output) == (1, True)


@pytest.mark.parametrize(
    ("body", "function", "words"),
    [
        ("def f(sample): return [1]", "f", "or None, got list. Name another value"),
        ("def f(sample): return 1 if sample['__key__'] < '00005' else 'x'", "f", "but a column holds one kind"),
        ("def f(sample): return 1 if sample['__key__'] < '00025' else 'x'", "f", "of different types"),
        ("f = 3", "f", "to be a function, got a int"),
        ("def f(sample): return 1", "g", "has no attribute 'g'"),
        ("import nowhere_at_all", "f", "No module named 'nowhere_at_all'"),
    ],
)
def test_functions_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, function: str, words: str
) -> None:
    data = write(str(tmp_path / "data"))
    name = module(tmp_path, monkeypatch, body)
    result = run("column", "add", data, "late", "--compute", f"{name}:{function}")
    assert (result.exit_code, words in result.output) == (2, True), result.output
    assert run("column", "add", data, "late", "--compute", "function").exit_code == 2
    assert run("column", "add", data, "late", "--lift", "json.n", "--compute", "a:b").exit_code == 2
    assert run("column", "add", data, "late", "--lift", "json.n", "--fields", "json").exit_code == 2


def test_the_inspecting_commands_show_columns_values_and_views(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/data/{{:d}}.tar", max_samples=4, columns={"n": "json.n", "word": "json.w"}) as writer:
        for n in range(10):
            writer.write({"__key__": f"{n:05d}", "json": {"n": n, "w": f"it's {n}"} if n != 5 else {}})
    data = f"{tmp_path}/data/"
    file = scores(tmp_path / "s", {f"{n:05d}": n / 4 for n in range(8)})
    added(data, "score", "--from", file, "--on", "key")
    assert run("view", "save", data, "good", "--where", "score >= 1", "--subset", "0..7").exit_code == 0
    info = json.loads(run("info", data, "--json").stdout)
    facts = {name: [one[x] for x in ("type", "num_values", "min", "max")] for name, one in info["columns"].items()}
    assert facts == {"n": ["int64", 9, 0, 9], "word": ["string", 9, None, None], "score": ["double", 8, 0.0, 1.75]}
    assert info["columns"]["score"]["version"]
    assert info["views"] == {"good": {"where": "score >= 1", "num_kept": 3}}
    shown = run("info", data).stdout
    assert "score (late)" in shown
    assert "view      good: 3 of 10 samples" in shown
    listed = run("ls", data, "--where", "score >= 1 OR n IS NULL", "--columns", "score,word", "--limit", "3").stdout
    assert listed == (
        "00004\tjson\tscore=1.0  word='it''s 4'\n00005\tjson\tscore=1.25  word=NULL\n"
        "00006\tjson\tscore=1.5  word='it''s 6'\n"
    )
    assert [line.split("\t")[0] for line in run("ls", data, "--view", "good").stdout.splitlines()] == [
        "00004", "00005", "00006",
    ]  # fmt: skip
    last = json.loads(run("ls", data, "--columns", "score", "--json").stdout.splitlines()[-1])
    assert (last["number"], last["columns"]) == (9, {"score": None})
    assert "column score = 1.75\n" in run("cat", data, "7").stdout
    assert json.loads(run("cat", data, "00005", "--json").stdout)["columns"] == {"n": None, "word": None, "score": 1.25}
    refused = run("ls", data, "--columns", "skore")
    assert (refused.exit_code, "did you mean 'score'" in refused.stderr) == (2, True)
    (tmp_path / "data" / "_shardstream" / "columns" / "score" / "1.tar.parquet").write_bytes(b"damaged")
    broken = run("info", data, "--json")
    assert (broken.exit_code, [one["kind"] for one in json.loads(broken.stdout)["findings"]]) == (1, ["index"])
