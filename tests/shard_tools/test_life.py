"""Append, delete and versions: what they read and write, what readers see, and what they refuse."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import re
import shlex
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from shard_tools import ShardWriter, optimize
from shard_tools.change.check.verify import verify
from shard_tools.change.columns.lift import lift_all
from shard_tools.change.columns.target import drop_column
from shard_tools.change.fields.listed import drop_field
from shard_tools.change.fields.target import FieldReport
from shard_tools.change.functions.field import compute_field
from shard_tools.change.functions.run import Running
from shard_tools.change.life.dedupe import dedupe
from shard_tools.change.life.delete import delete
from shard_tools.change.life.prune import prune
from shard_tools.change.life.versions import compare, history, tag
from shard_tools.change.sets.copy import copy
from shard_tools.change.sets.rewrite.reshard import ReshardOptions, reshard
from shard_tools.change.sets.rewrite.split import SplitOptions, split
from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from shard_tools.make.convert.append import append
from shard_tools.make.convert.journal import TargetNotEmptyError
from shard_tools.make.tokens import TokenizeOptions, tokenize
from shard_tools.make.tokens.append import append_tokens
from streaming import DataLoader, Mixture, StreamingDataset
from streaming.errors import (
    ConfigError,
    DataError,
    IndexFormatError,
    IndexMismatchError,
    NotFoundError,
    StateError,
    StorageError,
    UnfinishedError,
)
from streaming.shards.catalog.build import index_shards, read_schema
from streaming.shards.versions.publish import OvertakenError
from streaming.storage import ChangedError, Storage
from streaming.storage.adapters import object as object_client
from streaming.storage.adapters.local import LocalAdapter
from streaming.storage.adapters.obstore_client import client
from tests.support.models.living_sets import Killed, interrupted, kill
from tests.support.servers.on_loopback import MiniGcsServer, MiniS3Server, fresh_name
from tests.support.sets.data_sets import write_set


def rows_of(first: int, num: int) -> list[dict[str, Any]]:
    return [{"id": f"{n:04d}", "n": n, "text": f"text {n}"} for n in range(first, first + num)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def keys(url: object, **options: Any) -> list[str]:
    return [sample["__key__"] for sample in StreamingDataset(str(url), **options)]


@pytest.fixture
def web(tmp_path: Path) -> Path:
    """A set of 12 rows in shards of four, converted from ``days/``."""
    jsonl(tmp_path / "days/0.jsonl", rows_of(0, 12))
    options = ConvertOptions(max_samples=4, key_field="id", columns=("n",))
    convert(str(tmp_path / "days"), str(tmp_path / "web"), options=options)
    return tmp_path / "web"


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the files that are read, by name."""
    names = Counter[str]()
    real = Storage.read

    def read(self: Storage, url: str, *args: Any, **kwargs: Any) -> Any:
        names[url.rpartition("/")[2]] += 1
        return real(self, url, *args, **kwargs)

    monkeypatch.setattr(Storage, "read", read)
    return names


# ------------------------------------------------------------------------------------------------------------- append


def write_day(folder: Path, kind: str, day: int) -> None:
    """Three new inputs, or one file of three rows."""
    folder.mkdir(exist_ok=True)
    rows = rows_of(3 * day, 3)
    for row in rows if kind in {"files", "images"} else ():
        if kind == "images":
            path = folder / ("ab", "bc", "ca")[day][row["n"] % 2] / f"{row['n']}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (row["n"], 2, 3)).save(path)
        else:
            (folder / f"{row['id']}.txt").write_text(row["text"])
    if kind == "jsonl":
        jsonl(folder / f"{day}.jsonl", rows)
    elif kind == "parquet":
        table(folder / f"{day}.parquet", rows)
    elif kind == "csv":
        (folder / f"{day}.csv").write_text("n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in rows))
    elif kind == "text":
        (folder / f"{day}.txt").write_text("".join(row["text"] + "\n" for row in rows))
    elif kind == "tars":
        with ShardWriter(str(folder / f"{day}-{{:02d}}.tar"), index=False) as writer:
            for row in rows:
                writer.write({"__key__": row["id"], "txt": row["text"], "cls": row["n"]})


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "text", "tars", "files", "images"])
def test_only_what_is_new_is_added_and_nothing_twice(kind: str, tmp_path: Path, read_names: Counter[str]) -> None:
    source, target = tmp_path / "source", tmp_path / "set"
    write_day(source, kind, 0)
    convert(str(source), str(target), options=ConvertOptions(kind=kind, max_samples=2))
    before = keys(target)
    for day in (1, 2):
        known = {path.name for path in source.rglob("*") if path.is_file()}
        write_day(source, kind, day)
        read_names.clear()
        report = append(str(source), str(target))
        assert (report.num_added, report.num_known, report.version) == (3, len(known), day + 1)
        assert not known & read_names.keys()
        now = keys(target)
        assert now[: len(before)] == before
        assert len({*now}) == len(before) + 3
        before = now
    report = append(str(source), str(target))
    assert (report.num_added, report.version, report.num_samples) == (0, 3, 9)
    assert not verify([str(target)], storage=Storage()).findings
    if kind == "images":
        opened = StreamingDataset(str(target))
        assert opened.class_names == {"cls": ("a", "b", "c")}
        assert all(sample["__key__"].startswith("abc"[sample["cls"]]) for sample in opened)


def test_documents_are_added_with_the_tokenizer_of_the_set(tmp_path: Path) -> None:
    jsonl(tmp_path / "days/0.jsonl", [*rows_of(0, 5), {"id": "x", "n": 0, "text": ""}])
    given = TokenizeOptions(tokenizer="bytes", split=("val=40%",), columns=("n",), max_samples=3)
    tokenize(str(tmp_path / "days"), str(tmp_path / "all"), options=given)
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 20))
    for name in ("train", "val"):
        one = str(tmp_path / "all" / name)
        before = keys(one)
        report = append_tokens(str(tmp_path / "days"), one)
        assert report.num_known == 1
        assert keys(one)[: len(before)] == before
        assert len({*keys(one)}) == len(keys(one)) == len(before) + report.num_added
        assert append_tokens(str(tmp_path / "days"), one).num_added == 0
    sets = [StreamingDataset(str(tmp_path / "all" / name)) for name in ("train", "val")]
    texts = [bytes(sample["tok"].astype(np.uint8))[1:-1].decode() for each in sets for sample in each]
    assert sorted(texts) == sorted(f"text {n}" for n in [*range(5), *range(100, 120)])
    with pytest.raises(ConfigError, match="its tokens were made otherwise"):
        append_tokens(str(tmp_path / "other"), one, tokenizer=tokenizer_file(tmp_path, jsonl))


def tokenizer_file(folder: Path, write: Callable[..., None]) -> str:
    """Another tokenizer, and a document for it."""
    write(folder / "other/9.jsonl", rows_of(900, 1))
    vocabulary = {"[UNK]": 0, "text": 1}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    content = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    content |= {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


def lengths(path: Any) -> dict[str, Any]:
    text = Path(path).read_text() if isinstance(path, str) else str(path)
    return {"txt": text, "n": len(text)}


def pairs(number: int) -> list[dict[str, Any]]:
    return [{"txt": f"{number}"}, {"txt": f"{number}'"}]


def test_a_function_is_called_with_new_inputs_alone(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x" * number)
    files, target = [str(tmp_path / f"{number}.txt") for number in range(5)], tmp_path / "set"
    given: dict[str, Any] = {"workers": 0, "progress": False, "max_samples": 2, "columns": ["n"]}
    optimize(lengths, files[:3], target, **given)
    report = optimize(lengths, files, target, append=True, **given)
    assert (report.num_inputs, report.num_samples, report.num_resumed_samples, report.num_shards) == (2, 5, 3, 3)
    assert keys(target) == [f"{number:09d}" for number in range(5)]
    assert [int(sample["n"]) for sample in StreamingDataset(str(target), where="n >= 1")] == [1, 2, 3, 4]
    assert optimize(lengths, files, target, append=True, **given).was_complete
    with pytest.raises(ConfigError, match="was made by another function"):
        optimize(pairs, range(3), target, append=True, **given)
    (tmp_path / "0.txt").write_text("changed")
    with pytest.raises(ConfigError, match="with other content"):
        optimize(lengths, files, target, append=True, **given)


def test_inputs_that_name_no_files_are_new(tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 0, "progress": False}
    optimize(pairs, range(2), tmp_path / "set", **given)
    for _ in range(2):
        optimize(pairs, range(7, 9), tmp_path / "set", append=True, **given)
    texts = [(sample["__key__"], sample["txt"]) for sample in StreamingDataset(str(tmp_path / "set"))]
    made_of = {0: 0, 1: 1, 4: 7, 5: 8, 6: 7, 7: 8}  # behind the samples that are there
    wanted = [[(f"{at:09d}-000", f"{number}"), (f"{at:09d}-001", f"{number}'")] for at, number in made_of.items()]
    assert texts == [one for both in wanted for one in both]
    with pytest.raises(ConfigError, match="leave one of them out"):
        optimize(pairs, range(3), tmp_path / "set", append=True, overwrite=True, **given)
    with ShardWriter(str(tmp_path / "other/{:03d}.tar")) as writer:
        writer.write({"__key__": "0", "txt": ""})
    with pytest.raises(ConfigError, match=r"was not made by shard_tools\.optimize"):
        optimize(pairs, range(3), tmp_path / "other", append=True, **given)


def test_what_was_changed_is_refused_by_name(web: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "days/0.jsonl", rows_of(5, 12))
    jsonl(tmp_path / "days/1.jsonl", rows_of(50, 2))
    with pytest.raises(ConfigError, match=r"1 input of these names with other content: 0\.jsonl"):
        append(str(tmp_path / "days"), str(web))
    assert len(keys(web)) == 12
    (tmp_path / "days/0.jsonl").unlink()
    assert append(str(tmp_path / "days"), str(web)).num_added == 2


def test_a_copy_of_known_inputs_is_known_by_checksum(web: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "again/0.jsonl", rows_of(0, 12))
    report = append(str(tmp_path / "again"), str(web))
    assert (report.num_added, report.num_known) == (0, 1)


def test_what_means_something_else_is_refused(tmp_path: Path) -> None:
    def writer(*names: str, **how: Any) -> ShardWriter:
        return ShardWriter(str(tmp_path / "set/{:03d}.tar"), classes={"cls": names}, **how)

    with writer("a", "b") as first:
        first.write({"__key__": "0", "cls": 0})
    with pytest.raises(ConfigError, match="field 'cls'"):
        writer("b", "a", append=True)
    with writer("a", "b", "c", append=True) as more:
        more.write({"__key__": "1", "cls": 2})
    assert StreamingDataset(str(tmp_path / "set")).class_names == {"cls": ("a", "b", "c")}
    assert StreamingDataset(str(tmp_path / "set"), version=1).class_names == {"cls": ("a", "b")}


def test_a_writer_that_fails_or_loses_leaves_nothing(web: Path) -> None:
    files = {path.name for path in web.rglob("*") if path.is_file()}

    def writer() -> ShardWriter:
        return ShardWriter(str(web / "{:06d}.tar"), append=True)

    failing = writer()
    failing.write({"__key__": "x", "json": {}})
    failing.abort()
    one, other = writer(), writer()
    one.write({"__key__": "one", "json": {}})
    other.write({"__key__": "other", "json": {}})
    one.close()
    with pytest.raises(OvertakenError, match="somebody else has changed this set since version 1 was read"):
        other.close()
    assert keys(web)[12:] == ["one"]
    new = {path.name for path in web.rglob("*") if path.is_file()} - files
    assert sorted(name.split("-v")[0] for name in new) == ["000003", "000003", "1.parquet"]
    with pytest.raises(ConfigError, match="leave overwrite, start_shard and index out"):
        ShardWriter(str(web / "{:06d}.tar"), append=True, start_shard=4)


@pytest.mark.thorough
def test_the_work_is_that_of_what_is_new(tmp_path: Path) -> None:
    """Requests and bytes, but for the chunk table, do not depend on the size of the set."""

    def work(num_days: int) -> tuple[int, int, Counter[str]]:
        folder = tmp_path / str(num_days)
        jsonl(folder / "days/0.jsonl", rows_of(0, 20 * num_days))
        convert(str(folder / "days"), str(folder / "set"), options=ConvertOptions(max_samples=2, key_field="id"))
        append(str(folder / "days"), str(folder / "set"))
        jsonl(folder / "days/1.jsonl", rows_of(100_000, 3))
        asked, num_bytes = Counter[str](), [0]

        def counting(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Storage, url: str, *args: Any, **kwargs: Any) -> Any:
                found = real(self, url, *args, **kwargs)
                if str(folder / "set") in url:
                    asked[url.rpartition("/")[2]] += 1
                    is_known = url.endswith(
                        ("chunks.parquet", "convert.json")
                    )  # the journal is bounded, by what it keeps
                    num_bytes[0] += 0 if is_known or real.__name__ != "read" else len(found)
                return found

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("read", "info", "list", "put", "put_if", "open_write", "delete"):
                patch.setattr(Storage, name, counting(getattr(Storage, name)))
            assert append(str(folder / "days"), str(folder / "set")).num_added == 3
        return asked.total(), num_bytes[0], asked

    few, many = work(1), work(20)
    assert few[0] == many[0] < 45
    assert many[1] == few[1]
    assert not [name for name in many[2] if name.endswith((".tar", ".tar.parquet")) and "-v" not in name]


# ------------------------------------------------------------------------------------------------------------- delete


def test_what_stays_has_the_same_bytes_and_late_columns(web: Path) -> None:
    lift_all([str(web)], ["json.text"], storage=Storage(), index_url=None, workers=1)
    before = {sample["__key__"]: sample for sample in StreamingDataset(str(web), decode=None)}
    untouched = (web / "000002.tar").stat()
    report = delete(str(web), storage=Storage(), keys=["0001", "0002", "0005", "none"])
    assert (report.num_deleted, report.num_samples, report.num_shards, report.first_not_found) == (3, 9, 2, ("none",))
    after = {sample["__key__"]: sample for sample in StreamingDataset(str(web), decode=None)}
    assert list(after) == [key for key in before if key not in {"0001", "0002", "0005"}]
    assert all(after[key]["json"] == before[key]["json"] for key in after)
    assert (web / "000002.tar").stat() == untouched
    assert keys(web, where="\"json.text\" = 'text 7' or n = 3") == ["0003", "0007"]
    assert not verify([str(web)], storage=Storage()).findings


def test_purge_leaves_no_byte_of_what_is_deleted(web: Path) -> None:
    tag(str(web), "v1", storage=Storage())
    with pytest.raises(ConfigError, match="the versions v1 hold these samples; drop them first: shard_tools version"):
        delete(str(web), storage=Storage(), keys=["0006"], purge=True)
    assert history(str(web), storage=Storage()).versions[-1].number == 1
    prune(str(web), storage=Storage(), drop=["v1"])
    report = delete(str(web), storage=Storage(), keys=["0006"], purge=True)
    assert report.purged is not None
    assert report.purged.num_shards == 1
    assert not [path for path in web.rglob("*") if path.is_file() and b"text 6" in path.read_bytes()]
    assert keys(web, version=2) == keys(web)
    again = delete(str(web), storage=Storage(), keys=["0006"], purge=True)
    assert (again.num_deleted, again.version, again.num_not_found) == (0, 2, 1)


def test_contents_are_found_by_their_digests(web: Path, tmp_path: Path) -> None:
    whole = {sample["__key__"]: bytes(sample["json"]) for sample in StreamingDataset(str(web), decode=None)}
    lines = [hashlib.sha256(whole["0002"]).hexdigest().upper(), hashlib.md5(whole["0009"]).hexdigest(), "ab" * 32]
    (tmp_path / "digests").write_text("\n".join(lines))
    report = delete(str(web), storage=Storage(), contents=str(tmp_path / "digests"))
    assert (report.num_deleted, report.first_not_found) == (2, ("ab" * 32,))
    assert keys(web) == [key for key in whole if key not in {"0002", "0009"}]
    (tmp_path / "digests").write_text("no digest")
    with pytest.raises(ConfigError, match="expected SHA-256 or MD5 in hex"):
        delete(str(web), storage=Storage(), contents=str(tmp_path / "digests"))
    with pytest.raises(ConfigError, match="by one of --keys"):
        delete(str(web), storage=Storage())


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_others_read_the_shards_of_the_current_version(web: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 3))
    append(str(tmp_path / "days"), str(web))
    delete(str(web), storage=Storage(), keys=["0000", "0005"])
    prune(str(web), storage=Storage())
    shards = sorted(str(path) for path in web.glob("*.tar"))
    read = [sample["__key__"] for sample in webdataset.WebDataset(shards, shardshuffle=False)]
    gc.collect()  # it leaves files open
    assert read == keys(web)


def test_what_somebody_else_put_there_is_left_alone(web: Path) -> None:
    foreign = web / "foreign.tar"
    tag(str(web), "v1", storage=Storage())
    foreign.write_bytes((web / "000000.tar").read_bytes())
    for number in range(4):
        delete(str(web), storage=Storage(), keys=[f"{number:04d}"])
    assert prune(str(web), storage=Storage(), keep=2).kept == ("v1", "3", "4")
    assert len(keys(web, version=4)) == 9
    prune(str(web), storage=Storage(), drop=["v1"])
    assert foreign.exists()
    assert {path.name for path in web.glob("*.tar")} == {"foreign.tar", "000001.tar", "000002.tar"}


def test_a_dry_run_writes_nothing(web: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in web.rglob("*")}
    report = delete(str(web), storage=Storage(), where="n >= 3", dry_run=True, purge=True)
    assert (report.num_deleted, report.num_samples, report.version) == (9, 3, 1)
    assert prune(str(web), storage=Storage(), dry_run=True).num_shards == 0
    with pytest.raises(ConfigError, match="no sample would stay"):
        delete(str(web), storage=Storage(), where="n >= 0", dry_run=True)
    assert files == {path: path.stat().st_mtime_ns for path in web.rglob("*")}


def test_what_else_writes_to_a_set_that_lives_publishes_its_next_version(web: Path) -> None:
    delete(str(web), storage=Storage(), keys=["0000", "0001"])
    lift_all([str(web)], ["json.text"], storage=Storage(), index_url=None, workers=1)
    assert keys(web, where="\"json.text\" = 'text 7'") == ["0007"]
    with ShardWriter(str(web / "{:06d}.tar"), start_shard=7) as writer:
        writer.write({"__key__": "more", "json": {"id": "more"}})
    assert keys(web) == [*(f"{number:04d}" for number in range(2, 12)), "more"]
    index_shards(Storage(), [f"{web}/000007.tar"], force=True)
    assert [one.num_samples for one in history(str(web), storage=Storage()).versions] == [12, 10, 10, 11]
    lift_all([str(web)], ["json.id"], storage=Storage(), index_url=None, workers=1)
    prune(str(web), storage=Storage())
    assert keys(web, where="\"json.id\" = '0007'") == ["0007"]
    (finding,) = verify([str(web)], storage=Storage()).findings
    assert "column 'json.text' has no values" in finding.what
    drop_column([str(web)], "json.text", storage=Storage(), index_url=None)
    assert not verify([str(web)], storage=Storage()).findings


# ------------------------------------------------------------------------------------------------------------- dedupe


def write_twice(folder: Path, num: int, seed: int) -> list[dict[str, Any]]:
    """A set in which keys, pictures and whole samples occur again, small ones and ones with checksums of their own."""
    dice = np.random.default_rng(seed)
    contents = [dice.bytes(int(size)) for size in dice.choice([3, 700, 200_000], 7)]
    samples = [
        {"__key__": f"{dice.integers(12)}", "bin": contents[dice.integers(7)], "cls": int(dice.integers(2))}
        for _ in range(num)
    ]
    for shard in range(0, num, 5):
        with ShardWriter(str(folder / "{:03d}.tar"), start_shard=shard // 5, columns=["cls"]) as writer:
            seen: set[str] = set()
            for sample in samples[shard : shard + 5]:
                if sample["__key__"] in seen:
                    sample["__key__"] = f"{sample['__key__']}-{len(seen)}"
                seen.add(sample["__key__"])
                writer.write({name: value for name, value in sample.items() if name != "bin" or sample["cls"]})
    return samples


@pytest.mark.parametrize("keep", ["first", "newest"])
@pytest.mark.parametrize("by", ["key", "content", "bin"])
def test_each_pair_is_named_and_one_stays(by: str, keep: Any, tmp_path: Path) -> None:
    samples = write_twice(tmp_path / "set", 30, 3)
    if keep == "newest":
        tag(str(tmp_path / "set"), "v1", storage=Storage())

    def value(sample: dict[str, Any]) -> Any:
        content = sample["bin"] if sample["cls"] else None
        return {"key": sample["__key__"], "content": (sample["cls"], content), "bin": content}[by]

    values = [value(sample) for sample in samples]
    order = range(30) if keep == "first" else range(29, -1, -1)
    stays: dict[Any, int] = {}
    wanted = [n for n in order if values[n] is None or stays.setdefault(values[n], n) == n]
    told = dedupe(str(tmp_path / "set"), storage=Storage(), by=by, keep=keep, dry_run=True)
    assert len(StreamingDataset(str(tmp_path / "set"))) == 30
    report = dedupe(str(tmp_path / "set"), storage=Storage(), by=by, keep=keep)
    assert told.pairs == report.pairs
    assert report.num_removed == len(report.pairs) == 30 - len(wanted)
    found = report.as_dict()
    assert found["removed"] == report.num_removed
    same: dict[Any, list[str]] = {}
    for number in order:
        if values[number] is not None:
            same.setdefault(values[number], []).append(samples[number]["__key__"])
    assert sorted(map(sorted, found["groups"])) == sorted(sorted(one) for one in same.values() if len(one) > 1)
    kept = dict.fromkeys((pair.kept_shard, pair.kept_key) for pair in report.pairs)
    assert [group[0] for group in found["groups"]] == [key for _, key in kept]
    assert keys(tmp_path / "set") == [samples[number]["__key__"] for number in sorted(wanted)]
    again = dedupe(str(tmp_path / "set"), storage=Storage(), by=by, keep=keep)
    assert (again.num_removed, again.version) == (0, report.version)


def test_the_cures_of_stats_are_followed(tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        done = CliRunner().invoke(cli, [*words, "--json"], prog_name="shard_tools")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    folder = str(tmp_path / "set")
    write_twice(tmp_path / "set", 30, 3)
    for what, by in (("duplicate keys", "key"), ("duplicate contents", "bin")):
        (cure,) = [one["cure"] for one in run("stats", folder)["surprises"] if one["what"].startswith(what)]
        (words,) = re.findall(rf"`shard_tools (dedupe \S+ --by {by})", cure)
        assert run(*shlex.split(words))["num_removed"] > 0
        assert not [one for one in run("stats", folder)["surprises"] if one["what"].startswith(what)]


def test_only_what_may_be_the_same_is_read(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "set/{:03d}.tar")) as writer:
        for number in range(6):
            content = bytes([number % 5]) * (200_000 if number < 4 else 300 + number)
            writer.write({"__key__": f"{number}", "bin": content})
    assert dedupe(str(tmp_path / "set"), storage=Storage(), by="bin", dry_run=True).num_compared == 0
    with ShardWriter(str(tmp_path / "set/{:03d}.tar"), append=True) as writer:
        writer.write({"__key__": "again", "bin": bytes([1]) * 200_000})
    report = dedupe(str(tmp_path / "set"), storage=Storage(), by="bin")
    assert (report.num_compared, [(one.key, one.kept_key) for one in report.pairs]) == (2, [("again", "1")])
    with pytest.raises(ConfigError, match=r"no sample of .* has such a field"):
        dedupe(str(tmp_path / "set"), storage=Storage(), by="jpg")


def test_keys_are_left_out_of_another_set(web: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("0003\n0011\nnone\n")
    report = reshard(str(web), str(tmp_path / "out"), options=ReshardOptions(exclude=str(tmp_path / "keys")))
    assert (report.num_samples, report.num_filtered) == (10, 2)
    assert keys(tmp_path / "out") == [f"{number:04d}" for number in range(12) if number not in {3, 11}]


# -------------------------------------------------------------------------------------------------------------- split


def parts_of(folder: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """The samples of the sets that a set was split into, without their places."""
    return {
        path.name: {sample.pop("__key__"): {name: value for name, value in sample.items() if name != "__url__"}
                    for sample in StreamingDataset(str(path), **options)}
        for path in sorted(folder.iterdir())
    }  # fmt: skip


def shares(folder: Path, **named: int) -> dict[str, Fraction]:
    """Targets below a folder, with their shares in percent."""
    return {str(folder / name): Fraction(share, 100) for name, share in named.items()}


def write_pictures(folder: Path) -> ConvertOptions:
    for number in range(24):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 2, 3)).save(path)
    return ConvertOptions(max_samples=5)


def write_rows(folder: Path) -> ConvertOptions:
    folder.mkdir()
    table(folder / "rows.parquet", rows_of(0, 24))
    return ConvertOptions(max_samples=5, columns=("n",), key_field="id")


def write_records(folder: Path) -> ConvertOptions:
    write_day(folder, "tars", 0)
    write_day(folder, "tars", 1)
    return ConvertOptions(kind="tars", max_samples=2)


def split_kind(kind: str, tmp_path: Path) -> Path:
    """A set of this kind."""
    source, target = tmp_path / "source", tmp_path / "set"
    if kind == "tokens":
        jsonl(source / "a.jsonl", rows_of(0, 24))
        given = TokenizeOptions(tokenizer="bytes", text_field="text", columns=("n",), max_samples=5)
        tokenize(str(source), str(target), options=given)
    elif kind == "without an index":
        with ShardWriter(str(target / "{:06d}.tar"), max_samples=5, index=False) as writer:
            for row in rows_of(0, 24):
                writer.write({"__key__": row["id"], "txt": row["text"]})
    else:
        write = {"images": write_pictures, "parquet": write_rows, "tars": write_records}[kind]
        convert(str(source), str(target), options=write(source))
    return target


@pytest.mark.parametrize("kind", ["images", "tokens", "parquet", "tars", "without an index"])
def test_sets_of_every_kind_are_divided(kind: str, tmp_path: Path) -> None:
    """Fields, columns and what they mean go along; every sample is in at most one of the new sets."""
    made = split_kind(kind, tmp_path)
    whole = {sample.pop("__key__"): sample for sample in StreamingDataset(str(made), decode=None)}
    targets = shares(tmp_path / "out", a=45, b=30)
    report = split(str(made), targets, options=SplitOptions(seed=3))
    found = parts_of(tmp_path / "out", decode=None)
    assert [one.num_samples for one in report.sets] == [len(found["a"]), len(found["b"])]
    assert report.num_left_out == len(whole) - len(found["a"]) - len(found["b"])
    assert not found["a"].keys() & found["b"].keys()
    for sample in whole.values():
        del sample["__url__"]
    assert all(one.items() <= whole.items() for one in found.values())
    schemas = [read_schema(Storage(), str(path)) for path in (made, tmp_path / "out/a", tmp_path / "out/b")]
    assert len({(tuple(one.classes.items()), tuple(one.tokens.items())) for one in schemas}) == 1
    for name in found:
        assert not verify([str(tmp_path / "out" / name)], storage=Storage()).findings


@pytest.mark.thorough
def test_each_sample_goes_into_one_set_and_stays_there_when_the_set_grows(web: Path, tmp_path: Path) -> None:
    targets, options = shares(tmp_path / "out", train=50, val=30, test=20), SplitOptions(max_samples=3, seed=8)
    report = split(str(web), targets, options=options)
    found = parts_of(tmp_path / "out", decode=None)
    whole = {sample["__key__"]: sample["json"] for sample in StreamingDataset(str(web), decode=None)}
    assert {name: len(one) for name, one in found.items()} == {
        Path(one.target).name: one.num_samples for one in report.sets
    }
    assert {key: value["json"] for one in found.values() for key, value in one.items()} == whole
    assert (sum(map(len, found.values())), report.num_left_out) == (len(whole), 0)
    assert keys(tmp_path / "out/train", where="n < 100") == [key for key in whole if key in found["train"]]
    again = split(str(web), targets, options=options)
    assert (again.was_complete, again.sets) == (True, report.sets)
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 60))
    append(str(tmp_path / "days"), str(web))
    with pytest.raises(TargetNotEmptyError, match="holds other files"):
        split(str(web), targets, options=options)
    split(str(web), targets, options=replace(options, overwrite=True))
    grown = parts_of(tmp_path / "out", decode=None)
    assert all(found[name].items() <= grown[name].items() for name in found)
    assert 8 <= len(grown["val"]) <= 35


@pytest.mark.thorough
def test_seeds_and_shares_divide_and_nothing_else(web: Path, tmp_path: Path) -> None:
    """One seed gives the same sets, another one others; a share that grows at the end keeps what it had."""
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 80))
    append(str(tmp_path / "days"), str(web))

    def divided(name: str, seed: int, **named: int) -> dict[str, set[str]]:
        report = split(str(web), shares(tmp_path / name, **named), options=SplitOptions(seed=seed))
        assert report.num_source - report.num_left_out == sum(one.num_samples for one in report.sets)
        return {part: {*samples} for part, samples in parts_of(tmp_path / name).items()}

    first = divided("first", 0, a=20, b=30)
    assert divided("again", 0, a=20, b=30) == first
    assert divided("other", 1, a=20, b=30) != first
    grown = divided("grown", 0, a=20, b=60)
    assert grown["a"] == first["a"]
    assert grown["b"] > first["b"]
    assert divided("one", 0, a=20) == {"a": first["a"]}


@pytest.mark.thorough
def test_a_group_is_never_in_two_sets(web: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "days/1.jsonl", [{**row, "n": row["n"] % 9} for row in rows_of(100, 40)])
    append(str(tmp_path / "days"), str(web))
    lift_all([str(web)], ["json.text"], storage=Storage(), index_url=None, workers=1)
    halves = shares(tmp_path / "out", a=60, b=40)
    split(str(web), halves, options=SplitOptions(group_field="n"))
    groups = [{sample["json"]["n"] for sample in one.values()} for one in parts_of(tmp_path / "out").values()]
    assert not groups[0] & groups[1]
    split(str(web), shares(tmp_path / "late", a=60, b=40), options=SplitOptions(group_field="json.text"))
    with pytest.raises(ConfigError, match="--group-field"):
        split(str(web), shares(tmp_path / "none", a=60, b=40), options=SplitOptions(group_field="m"))
    assert not (tmp_path / "none").exists()


def test_a_group_of_whole_numbers_is_one_in_a_column_of_floats(tmp_path: Path) -> None:
    for name, number in (("a", int), ("b", float)):
        with ShardWriter(str(tmp_path / name / "{:06d}.tar"), columns={"person": "json.person"}) as writer:
            for n in range(30):
                writer.write({"__key__": f"{name}{n}", "json": {"person": number(n % 10)}})
    sources = [str(tmp_path / name) for name in "ab"]
    split(sources, shares(tmp_path / "out", a=50, b=50), options=SplitOptions(group_field="person"))
    people = [{sample["json"]["person"] for sample in one.values()} for one in parts_of(tmp_path / "out").values()]
    assert not people[0] & people[1]


WRONG_SPLITS: dict[str, tuple[list[str], str]] = {
    "no share": (["{web}", "{out}/a=10%", "{out}/b"], "has no share"),
    "no target": (["{web}"], "there is no TARGET=SHARE"),
    "not a share": (["{web}", "{out}/a=half"], "expected a share such as 0.5%"),
    "percent without its sign": (["{web}", "{out}/a=80", "{out}/b=20"], "write 80%"),
    "too much": (["{web}", "{out}/a=80%", "{out}/b=0.3"], "the shares add up to 110%, more than 100%"),
    "twice": (["{web}", "{out}/a=10%", "{out}/a=20%"], "each target is named once"),
    "one place": (["{web}", "{out}/a=10%", "{out}/a/=20%"], "two targets are the same place"),
    "one in another": (["{web}", "{out}/a=10%", "{out}/a/b=20%"], "give targets beside the source"),
    "in the source": (["{web}", "{web}/a=10%"], "give targets beside the source"),
    "the source": (["{web}", "{web}/=10%"], "source and target are the same place"),
    "no sample": (["{web}", "{out}/a=0.0001%"], "none of 12 samples is in its share"),
    "no such column": (["{web}", "{out}/a=50%", "--group-field", "m"], "--group-field"),
    "once an option": (
        ["{web}", "{out}", "--split", "val=5%", "--split", "test=1/8"],
        "shard_tools split {web} {out}/train=82.5% {out}/val=5% {out}/test=1/8",
    ),
}


@pytest.mark.parametrize("case", WRONG_SPLITS)
def test_a_split_that_cannot_be_is_refused_before_anything_is_written(case: str, web: Path, tmp_path: Path) -> None:
    arguments, words = WRONG_SPLITS[case]
    names = {"web": web, "out": tmp_path / "out"}
    told = CliRunner().invoke(cli, ["split", *(one.format(**names) for one in arguments)], prog_name="shard_tools")
    assert told.exit_code == (1 if case == "no sample" else 2)
    assert words.format(**names) in " ".join(told.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_split_as_a_command(web: Path, tmp_path: Path) -> None:
    """A cure that spells the new form works; a dry run writes nothing and says what is then written."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(cli, [str(one) for one in arguments], prog_name="shard_tools")

    told = " ".join(run("split", web, tmp_path / "old", "--split", "val=40%").stderr.split())
    cure = re.search(r"with its share: shard_tools (split .*)", told)
    assert cure is not None
    assert run(*shlex.split(cure[1])).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == ["train", "val"]
    places = [f"{tmp_path}/day=1/a=40%", f"{tmp_path}/day=1/b=2/5", "--seed", "1"]
    planned = json.loads(run("split", web, *places, "--dry-run", "--json").stdout)
    assert not (tmp_path / "day=1").exists()
    done = json.loads(run("split", web, *places, "--json").stdout)
    assert planned["dry_run"]
    counts = [
        [(one["target"], one["share"], one["num_samples"]) for one in report["sets"]] for report in (planned, done)
    ]
    assert counts[0] == counts[1]
    assert done["num_left_out"] == 12 - sum(count for *_, count in counts[1])
    assert "left out, since the shares add up to less than 100%" in run("split", web, *places).stdout


@pytest.mark.parametrize("at", [*range(9), 14, 22])
def test_a_split_that_is_killed_is_refused_and_done_again(web: Path, tmp_path: Path, at: int) -> None:
    calm, out = (shares(tmp_path / name, train=70, val=30) for name in ("calm", "out"))
    options = SplitOptions(max_samples=2)
    split(str(web), calm, options=options)
    with contextlib.suppress(Killed), interrupted(at, kill, before=True):
        split(str(web), out, options=options)
        pytest.fail("it was not killed")
    with pytest.raises((UnfinishedError, NotFoundError)):
        StreamingDataset(str(tmp_path / "out"))
    assert not split(str(web), out, options=options).was_complete
    assert files_of(tmp_path / "out") == files_of(tmp_path / "calm")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------------ readers


def test_a_listing_shows_the_current_version_alone(web: Path, tmp_path: Path) -> None:
    delete(str(web), storage=Storage(), keys=["0000"])
    assert keys(web) == keys(f"{web}/*.tar") == keys(tmp_path / "web") == [f"{n:04d}" for n in range(1, 12)]
    with pytest.raises(IndexMismatchError, match=r"000000\.tar: not in version 2 of this set"):
        StreamingDataset(f"{web}/{{000000..000002}}.tar")
    index_shards(Storage(), [f"{web}/000001.tar"], force=True)
    assert len(keys(web)) == 11
    copy(str(web), str(tmp_path / "copied"))
    assert len([*(tmp_path / "copied").glob("*.tar")]) == 3
    options = ConvertOptions(max_samples=4, key_field="id", columns=("n",))
    with pytest.raises(TargetNotEmptyError, match="add what is new with --append"):
        convert(str(tmp_path / "days"), str(web), options=options)


def test_a_set_that_is_changed_while_it_is_listed_opens_as_it_was_or_is(web: Path, tmp_path: Path) -> None:
    delete(str(web), storage=Storage(), keys=["0000"])
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 2))
    real, calls = Storage.list, [0]

    def change() -> None:
        calls[0] += 1
        if calls[0] == 1:
            append(str(tmp_path / "days"), str(web))
            delete(str(web), storage=Storage(), keys=["0009"])

    def listed(self: Storage, url: str) -> Any:
        found = list(real(self, url))
        change()
        return iter(found)

    def changed(self: Storage, url: str) -> Any:
        change()
        return real(self, url)

    was = keys(web)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "list", listed)
        after = keys(web)
    is_now = keys(web)
    assert after in (was, is_now)
    assert is_now == [*(f"{number:04d}" for number in range(1, 12) if number != 9), "0100", "0101"]
    calls[0], was = -1, is_now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "list", changed)
        assert keys(web) == was
    assert keys(f"{web}/000000*.tar") == ["0001", "0002", "0003"]


def test_a_run_goes_on_with_its_version_while_the_set_grows(web: Path, tmp_path: Path) -> None:
    def rest(batches: Iterator[Any], num: int | None = None) -> list[str]:
        return [key for batch in islice(batches, num) for key in batch["__key__"]]

    with DataLoader(StreamingDataset(str(web)), batch_size=2) as loader:
        batches = iter(loader)
        seen, state = rest(batches, 2), loader.state_dict()
        jsonl(tmp_path / "days/1.jsonl", rows_of(100, 4))
        append(str(tmp_path / "days"), str(web))
        delete(str(web), storage=Storage(), keys=["0003"])
        wanted = rest(batches)
    assert sorted(seen + wanted) == [f"{n:04d}" for n in range(12)]
    words = "They are those of version 1 of this set, and version 3 is open: open it with version=1"
    with DataLoader(StreamingDataset(str(web)), batch_size=2) as loader, pytest.raises(StateError, match=words):
        loader.load_state_dict(state)
    tag(str(web), "v1", storage=Storage(), version=1)
    prune(str(web), storage=Storage())
    with DataLoader(StreamingDataset(str(web), version="v1"), batch_size=2) as loader:
        loader.load_state_dict(state)
        assert rest(iter(loader)) == wanted
    described = tmp_path / "mixture.json"
    described.write_text(json.dumps({"sources": {"web": {"url": str(web), "version": "v1"}}}))
    assert len(Mixture.from_file(described).source.sources["web"].shards.urls) == 3


def test_versions_are_compared_by_their_keys(web: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 3))
    append(str(tmp_path / "days"), str(web))
    delete(str(web), storage=Storage(), keys=["0004", "0100"])
    found = compare(str(web), 1, None, storage=Storage())
    assert (found.old, found.new, found.num_added, found.num_removed, found.num_same) == (1, 3, 2, 1, 8)
    assert (found.first_added, found.first_removed) == (("0101", "0102"), ("0004",))


@pytest.mark.parametrize(("first", "stop", "num_reads"), [(20, 21, 1), (8, 16, 2), (0, 8, 1), (3, 41, 1), (15, 33, 2)])
def test_neighboring_chunks_of_what_stays_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, stop: int, num_reads: int
) -> None:
    """Of a shard of six chunks of eight samples; chunks that go whole are not read."""
    samples, reads = write_set(tmp_path / "set", (41, 7)), list[str]()
    real = LocalAdapter.open_range

    def counting(self: Any, url: str, *args: Any) -> Any:
        reads.append(url.rpartition("/")[2])
        return real(self, url, *args)

    before = {one["__key__"]: one for one in samples.open(decode=None)}
    progress = Counted()
    with monkeypatch.context() as patched:
        patched.setattr(LocalAdapter, "open_range", counting)
        delete(samples.url, storage=Storage(), keys=samples.keys[first:stop], progress=progress)
    assert reads.count("000000.tar") == num_reads
    after = {one["__key__"]: one for one in samples.open(decode=None)}
    assert [*after] == [*samples.keys[:first], *samples.keys[stop:]]
    for one in (*before.values(), *after.values()):
        one.pop("__url__", None)
    assert all(after[key] == before[key] for key in after)
    assert (progress.total, progress.num) == (3, 3)  # the keys of two shards, and a shard that is written


class Counted:
    """Progress that counts."""

    total, num = 0, 0

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        self.total = total or 0

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        self.num += num


def test_a_tag_is_given_once_more(web: Path) -> None:
    for version in (None, 1):
        assert tag(str(web), "v1", storage=Storage(), version=version).names == ("v1",)
    files = {path: path.stat().st_mtime_ns for path in web.rglob("*.parquet")}
    tag(str(web), "v1", storage=Storage())
    assert {path: path.stat().st_mtime_ns for path in web.rglob("*.parquet")} == files
    delete(str(web), storage=Storage(), keys=["0001"])
    assert tag(str(web), "v1", storage=Storage(), version=1).number == 1


def test_a_version_that_is_none_is_refused_with_those_there_are(web: Path, tmp_path: Path) -> None:
    tag(str(web), "v1", storage=Storage())
    for version, words in (
        ("v1-", r"no version of this name .did you mean 'v1'.*version=1; there are 'v1', 1 \(the current one\)"),
        (7, "no version of this number yet"),
    ):
        with pytest.raises(ConfigError, match=words):
            StreamingDataset(str(web), version=version)
    with pytest.raises(ConfigError, match="expected letters, digits"):
        StreamingDataset(str(web), version="../v1")
    with pytest.raises(ConfigError, match="give the directory"):
        StreamingDataset(f"{web}/*.tar", version="v1")
    with pytest.raises(ConfigError, match="there is no set in"):
        StreamingDataset(str(tmp_path), version="v1")
    delete(str(web), storage=Storage(), keys=["0001"])
    with pytest.raises(ConfigError, match="version 'v1' exists already: it is number 1"):
        tag(str(web), "v1", storage=Storage())
    delete(str(web), storage=Storage(), keys=["0002"])
    prune(str(web), storage=Storage(), drop=["v1"])
    pruned = r"version [12]: .*this version no longer: it was pruned, and does not come back.*there are 3 \(the current"
    for gone in (1, 2):
        with pytest.raises(ConfigError, match=pruned):
            StreamingDataset(str(web), version=gone)


# -------------------------------------------------------------------------------------------------- kills, the command


def test_a_killed_change_is_given_up_as_the_log_says(
    web: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 9))
    with pytest.raises(Killed), interrupted(2, kill, before=True, only=["put_if"]):
        append(str(tmp_path / "days"), str(web))
    with caplog.at_level(logging.WARNING):
        prune(str(web), storage=Storage())
    words = shlex.split(caplog.records[-1].getMessage().rpartition("shard_tools ")[2])
    assert {"version", "--abandon"} <= {*words}
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert not history(str(web), storage=Storage()).pending


def test_what_a_killed_change_wrote_stays_until_it_is_given_up(web: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 9))
    with pytest.raises(Killed), interrupted(1, kill, before=True, only=["put_if"]):
        append(str(tmp_path / "days"), str(web))  # while the set begins to live: what it means, then its table
    with pytest.raises(Killed), interrupted(2, kill, before=True, only=["put_if"]):
        append(str(tmp_path / "days"), str(web))
    assert len([*web.glob("*.tar")]) == 6
    assert len(keys(web)) == 12
    (work,) = prune(str(web), storage=Storage()).pending
    assert len([*web.glob("*.tar")]) == 6
    with pytest.raises(ConfigError, match="--abandon other"):
        prune(str(web), storage=Storage(), abandon=["other"])
    assert prune(str(web), storage=Storage(), abandon=[work]).num_shards == 3
    assert append(str(tmp_path / "days"), str(web)).num_added == 9
    assert not prune(str(web), storage=Storage()).pending


def test_two_runs_of_one_append_do_not_take_back_what_the_other_has_published(web: Path, tmp_path: Path) -> None:
    delete(str(web), storage=Storage(), keys=["0000"])
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 9))

    def other() -> None:
        assert append(str(tmp_path / "days"), str(web)).num_added == 9

    with interrupted(0, other, before=True, only=["put_if"]):
        assert append(str(tmp_path / "days"), str(web)).version == 3  # of the same bytes, so it is that of both
    assert len(keys(web)) == 20
    jsonl(tmp_path / "days/2.jsonl", rows_of(200, 9))

    def others() -> None:
        other()
        delete(str(web), storage=Storage(), keys=["0001"])

    with pytest.raises(OvertakenError), interrupted(0, others, before=True, only=["put_if"]):
        append(str(tmp_path / "days"), str(web))
    assert len(keys(web)) == 28
    assert len(keys(web, version=4)) == 29
    assert not verify([str(web)], storage=Storage()).findings


@pytest.mark.thorough
def test_a_run_of_a_change_does_not_take_back_what_another_run_of_it_may_publish(web: Path, tmp_path: Path) -> None:
    """Two runs of one append write the same files; the one that fails leaves them to the other, whoever began first."""
    delete(str(web), storage=Storage(), keys=["0000"])
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 9))
    files = files_of(web)

    def failing() -> None:
        def stop() -> None:
            raise StorageError("no answer")

        with pytest.raises(StorageError, match="no answer"), interrupted(4, stop, before=True):
            append(str(tmp_path / "days"), str(web))

    failing()
    assert files_of(web) == files  # alone, it leaves nothing
    for at in range(8):
        shutil.copytree(web, tmp_path / "copy")
        with interrupted(at, failing, before=True):
            report = append(str(tmp_path / "days"), str(web))
        assert (report.num_added, len(keys(web))) == (9, 20)
        assert not verify([str(web)], storage=Storage()).findings
        shutil.rmtree(web)
        (tmp_path / "copy").rename(web)


def test_who_is_late_brings_back_no_version_that_is_pruned(web: Path) -> None:
    delete(str(web), storage=Storage(), keys=["0000"])
    with ShardWriter(str(web / "{:06d}.tar"), append=True) as writer:
        writer.write({"__key__": "late", "json": {}})
        delete(str(web), storage=Storage(), keys=["0005"], purge=True)
        with pytest.raises(OvertakenError):
            writer.close()
    assert [one.number for one in history(str(web), storage=Storage()).versions] == [3]
    assert {path.name for path in (web / "_shardstream/versions").iterdir()} <= {"3.parquet"}


def test_a_tag_that_is_given_while_its_version_is_pruned_is_none(web: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens between reading the current version and writing its name: it can be opened, or there is none."""
    tag(str(web), "v1", storage=Storage())
    real = Storage.put_if

    def put_if(self: Storage, url: str, *args: Any) -> Any:
        monkeypatch.setattr(Storage, "put_if", real)
        delete(str(web), storage=Storage(), keys=["0001"])
        prune(str(web), storage=Storage(), drop=["v1"])
        return real(self, url, *args)

    monkeypatch.setattr(Storage, "put_if", put_if)
    with pytest.raises(ConfigError, match="version 1 was dropped meanwhile"):
        tag(str(web), "v2", storage=Storage())
    assert [one.names for one in history(str(web), storage=Storage()).versions] == [()]


def test_a_purge_of_what_was_deleted_before_names_the_versions_that_still_hold_it(web: Path, tmp_path: Path) -> None:
    """A request for deletion would be told that it is done, and a tagged version would have the sample for ever."""
    tag(str(web), "v1", storage=Storage())
    delete(str(web), storage=Storage(), keys=["0001"])
    (tmp_path / "keys.txt").write_text("0001\n")
    with pytest.raises(ConfigError, match="the versions v1 hold these samples; drop them first"):
        delete(str(web), storage=Storage(), keys=str(tmp_path / "keys.txt"), purge=True)
    assert len(keys(web, version="v1")) == 12
    prune(str(web), storage=Storage(), drop=["v1"])
    report = delete(str(web), storage=Storage(), keys=str(tmp_path / "keys.txt"), purge=True)
    assert (report.num_deleted, report.first_not_found) == (0, ("0001",))


def test_what_overwrites_a_set_with_tags_is_refused(web: Path, tmp_path: Path) -> None:
    tag(str(web), "v1", storage=Storage())
    options = ConvertOptions(max_samples=4, key_field="id", overwrite=True)
    write = [
        lambda: convert(str(tmp_path / "days"), str(web), options=options),
        lambda: reshard(str(other(tmp_path)), str(web), options=ReshardOptions(overwrite=True)),
        lambda: split(str(other(tmp_path)), {str(web): Fraction(1)}, options=SplitOptions(overwrite=True)),
        lambda: overwritten(web),
    ]
    files = files_of(web)
    for one in write:
        with pytest.raises(ConfigError, match="has the tagged versions v1, which overwriting would destroy"):
            one()
        assert {name: body for name, body in files_of(web).items() if name in files} == files
    assert len(keys(web, version="v1")) == 12
    prune(str(web), storage=Storage(), drop=["v1"])
    assert convert(str(tmp_path / "days"), str(web), options=options).num_samples == 12


def other(folder: Path) -> Path:
    with ShardWriter(str(folder / "other/{:06d}.tar"), overwrite=True) as writer:
        writer.write({"__key__": "a", "txt": "a"})
    return folder / "other"


def overwritten(folder: Path) -> None:
    with ShardWriter(str(folder / "{:06d}.tar"), overwrite=True) as writer:
        writer.write({"__key__": "a", "txt": "a"})


@pytest.mark.parametrize(
    "names",
    [["a", "b"], ["1", "10", "2", "9"], ["part-0", "part-1"], ["x-998", "x-999"], ["000", "001"], ["000001", "extra"],
     ["0000-train", "0001-train"]],
)  # fmt: skip
def test_what_is_added_to_sets_of_other_programs_sorts_behind_what_is_there(names: list[str], tmp_path: Path) -> None:
    for number, name in enumerate(names):
        with ShardWriter(str(tmp_path / "set" / f"{name}.{{:d}}.tar"), index=False) as writer:
            writer.write({"__key__": f"{number}", "txt": "x"})
        (tmp_path / "set" / f"{name}.0.tar").rename(tmp_path / "set" / f"{name}.tar")
    index_shards(Storage(), [str(tmp_path / f"set/{name}.tar") for name in sorted(names)])
    before = keys(tmp_path / "set")
    for day in range(3):
        with ShardWriter(str(tmp_path / f"days/{day}-{{:d}}.tar"), index=False) as writer:
            writer.write({"__key__": f"day {day}", "txt": "x"})
        append(str(tmp_path / "days"), str(tmp_path / "set"), kind="tars")
        before.append(f"day {day}")
        assert keys(tmp_path / "set") == before


@pytest.mark.parametrize("lives", [False, True])
def test_a_copy_cannot_tell_new_inputs_from_those_it_has(lives: bool, web: Path, tmp_path: Path) -> None:
    """All inputs were taken as new, and every sample came twice; of a set that lives, options were lost, too."""
    if lives:
        jsonl(tmp_path / "days/1.jsonl", rows_of(100, 4))
        append(str(tmp_path / "days"), str(web))
    copy(str(web), str(tmp_path / "copied"))
    before = keys(tmp_path / "copied")
    jsonl(tmp_path / "days/2.jsonl", rows_of(200, 4))
    with pytest.raises(ConfigError, match="Append to the set that was copied, and copy it again"):
        append(str(tmp_path / "days"), str(tmp_path / "copied"))
    assert not verify([str(tmp_path / "copied")], storage=Storage()).findings
    assert keys(tmp_path / "copied") == before
    with pytest.raises(TargetNotEmptyError):
        convert(str(tmp_path / "days"), str(tmp_path / "copied"), options=ConvertOptions(max_samples=4, key_field="id",
                                                                                         columns=("n",)))  # fmt: skip
    append(str(tmp_path / "days"), str(web))
    copy(str(web), str(tmp_path / "copied"))
    assert keys(tmp_path / "copied") == keys(web)


def test_a_lost_input_alone_is_not_nothing_new(tmp_path: Path) -> None:
    """A source whose only new input is broken was taken for one with nothing new."""
    write_day(tmp_path / "source", "images", 0)
    convert(str(tmp_path / "source"), str(tmp_path / "set"))
    (tmp_path / "source/a/broken.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"broken\.png: empty file"):
        append(str(tmp_path / "source"), str(tmp_path / "set"))
    assert append(str(tmp_path / "source"), str(tmp_path / "set"), on_error="skip").num_added == 0


def test_as_commands(web: Path, tmp_path: Path) -> None:
    def run(*words: object, code: int = 0) -> str:
        done = CliRunner().invoke(cli, [str(word) for word in words], prog_name="shard_tools")
        assert done.exit_code == code, done.output
        return done.output

    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 2))
    assert "Dry run: nothing was written" in run("append", tmp_path / "days", web, "--dry-run")
    assert "--max-bytes: with --append, options come from the set" in run(
        "convert", tmp_path / "days", web, "--append", "--max-bytes", "1MB", code=2
    )
    assert "2 samples added in 1 shard" in run("convert", tmp_path / "days", web, "--append")
    assert "nothing new: 2 inputs known already" in run("append", tmp_path / "days", web)
    assert run("append", tmp_path / "days", web, "--quiet") == ""
    (tmp_path / "keys").write_text("0100\n")
    told = json.loads(run("delete", web, "--keys", tmp_path / "keys", "--json"))
    assert (told["num_deleted"], told["version"]) == (1, 3)
    assert "1 line of the list not in the set" in run("delete", web, "--keys", tmp_path / "keys", code=1)
    assert "Give one of --keys FILE, --where" in run("delete", web, code=2)
    assert "version 3 (now), the current one: 13 samples" in run("version", "tag", web, "now")
    listed = run("version", "list", web).splitlines()
    assert [line[:9] for line in listed if line.startswith("version")] == ["version 1", "version 2", "version 3"]
    assert "1 sample added, such as 0101" in run("version", "diff", web, "1", "now")
    assert "version 1: 12 samples in 3 shards" in run("version", "show", web, 1)
    assert "0 samples in 0 shards would be left out; 13 stay" in run("dedupe", web, "--dry-run")
    assert run("dedupe", web, "--by", "key", "--quiet", "--pairs", tmp_path / "pairs") == ""
    assert (tmp_path / "pairs").read_text() == ""
    assert "12 samples" in run("plan", web, "--version", "1", "--batch-size", "4")
    assert "13 samples" in run("plan", web, "--batch-size", "4")
    assert run("show", web, "--version", "1", "--html", tmp_path / "page.html") is not None
    assert "12" in (tmp_path / "page.html").read_text()
    assert "2 versions dropped, 1 shard" in run("version", "prune", web)
    assert "--tokenizer is for sets of tokens" in run("append", tmp_path / "days", web, "--tokenizer", "bytes", code=2)
    run("convert", tmp_path / "days", tmp_path / "tokens", "--tokenizer", "bytes", "--workers", 1)
    jsonl(tmp_path / "days/2.jsonl", rows_of(200, 2))
    assert "2 samples added" in run("append", tmp_path / "days", tmp_path / "tokens")


# ------------------------------------------------------------------------------------------------- conditional writes

Place = Callable[[], tuple[str, Storage]]


@pytest.fixture(params=["local", "s3", "gcs", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Storage]]:
    """A URL in a store, with nothing there."""
    if request.param == "s3":
        server: MiniS3Server = request.getfixturevalue("mini_s3")
        yield f"{server.create_bucket(fresh_name())}/a/file", Storage(server.storage_options)
    elif request.param == "gcs":
        google: MiniGcsServer = request.getfixturevalue("mini_gcs")
        yield f"{google.create_bucket(fresh_name())}/a/file", Storage(google.storage_options)
    elif request.param == "local":
        yield str(tmp_path / "a/file"), Storage()
    else:
        yield f"memory://{fresh_name()}/a/file", Storage()


def test_of_writers_that_replace_one_version_one_wins(place: tuple[str, Storage]) -> None:
    url, storage = place
    storage.put_if(url, b"first", None)
    for wrong in (None, "another version"):
        with pytest.raises(ChangedError, match="nothing was replaced"):
            storage.put_if(url, b"wrong", wrong)
    storage.put_if(url, b"first", None)  # an answer that was lost: the same bytes are there
    version = storage.info(url).version
    storage.put_if(url, b"second", version)
    with pytest.raises(ChangedError, match="nothing was replaced"):
        storage.put_if(url, b"wrong", version)
    assert bytes(storage.read(url)) == b"second"
    storage.delete(url)
    with pytest.raises(ChangedError, match="nothing was replaced"):
        storage.put_if(url, b"wrong", version)
    assert not storage.exists(url)


def test_a_store_that_tells_no_versions_compares_bytes(web: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Storage.info
    monkeypatch.setattr(Storage, "info", lambda self, url: replace(real(self, url), version=None))
    assert delete(str(web), storage=Storage(), keys=["0001"]).version == 2
    writer = ShardWriter(str(web / "{:06d}.tar"), append=True)
    writer.write({"__key__": "late", "json": {}})
    assert delete(str(web), storage=Storage(), keys=["0002"]).version == 3
    with pytest.raises(OvertakenError):
        writer.close()
    assert keys(web) == ["0000", *(f"{number:04d}" for number in range(3, 12))]


def test_a_store_without_conditional_writes_is_asked_before(mini_s3: MiniS3Server, monkeypatch: Any) -> None:
    url, storage = f"{mini_s3.create_bucket(fresh_name())}/file", Storage(mini_s3.storage_options)
    real = client().api.put

    def put(*args: Any, mode: Any = None, **kwargs: Any) -> Any:
        if mode is not None:
            raise client().errors.NotSupportedError("no conditional writes")
        return real(*args, **kwargs)

    monkeypatch.setattr(object_client, "client", lambda: replace(client(), api=Patched(put)))
    storage.put_if(url, b"one", None)
    with pytest.raises(ChangedError):
        storage.put_if(url, b"other", None)
    storage.put_if(url, b"two", storage.info(url).version)
    assert bytes(storage.read(url)) == b"two"


class Patched:
    """obstore with another ``put``."""

    def __init__(self, put: Callable[..., Any]) -> None:
        self.put = put

    def __getattr__(self, name: str) -> Any:
        return getattr(client().api, name)


@pytest.mark.parametrize("place", ["local", "s3", "gcs"], indirect=True)
def test_of_many_at_once_one_wins(place: tuple[str, Storage]) -> None:
    url, storage = place
    storage.put(url, b"first")
    version, won, begin = storage.info(url).version, list[int](), threading.Barrier(8)

    def write(number: int) -> None:
        begin.wait()
        try:
            Storage(storage._given).put_if(url, np.int64(number).tobytes(), version)
        except ChangedError:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [np.frombuffer(storage.read(url), np.int64)[0]] == won


def broken_lines(folder: Path, day: int) -> None:
    """Write three lines, the second one damaged."""
    folder.mkdir(exist_ok=True)
    good = [json.dumps({"n": 3 * day + number, "text": "x"}) for number in range(3)]
    (folder / f"{day}.jsonl").write_text("\n".join([good[0], "{broken", good[2]]) + "\n")


@pytest.mark.thorough
@pytest.mark.parametrize("how", [(), ("--tokenizer", "bytes", "--eos", "none")], ids=["records", "tokens"])
def test_what_gives_no_sample_is_an_error_or_left_out_when_it_is_added(how: tuple[str, ...], tmp_path: Path) -> None:
    def run(*arguments: object) -> Result:
        return CliRunner().invoke(cli, [str(one) for one in arguments], prog_name="shard_tools")

    source, target = tmp_path / "days", tmp_path / "set"
    broken_lines(source, 0)
    made = run("convert", source, target, *how, "--on-error", "skip")
    assert made.exit_code == 0, made.stderr
    broken_lines(source, 1)
    before = keys(target)
    refused = run("append", source, target, "--on-error", "raise")
    assert refused.exit_code == 1
    assert "1.jsonl:2" in refused.stderr
    assert "--max-bad allows 0" in run("append", source, target, "--on-error", "skip", "--max-bad", 0).stderr
    assert keys(target) == before  # nothing was added
    added = run("convert", source, target, "--append", "--on-error", "skip", "--json")
    report = json.loads(added.stdout)
    assert (report["num_added"], sum(report["left_out"].values())) == (2, 1)
    assert len({*keys(target)}) == 4  # a record that is left out keeps its number
    whole = tmp_path / "whole"
    assert run("convert", source, whole, *how, "--on-error", "skip").exit_code == 0
    assert keys(target) == keys(whole)


def test_images_without_a_row_of_the_metadata_file_are_not_added(tmp_path: Path) -> None:
    source, target = tmp_path / "photos", tmp_path / "set"
    source.mkdir()

    def photo(folder: Path, number: int) -> None:
        Image.new("RGB", (8, 8), (number, 2, 3)).save(folder / f"{number}.png")

    photo(source, 0)
    jsonl(source / "metadata.jsonl", [{"file_name": "0.png", "text": "a"}])
    convert(str(source), str(target))
    photo(source, 1)
    with pytest.raises(ConfigError, match=r"1\.png: no row of metadata\.jsonl names it \(1 new file\)"):
        append(str(source), str(target))
    (source / "1.png").rename(tmp_path / "1.png")
    more = source / "more"
    more.mkdir()
    (tmp_path / "1.png").rename(more / "1.png")
    jsonl(more / "metadata.jsonl", [{"file_name": "1.png", "text": "b"}])
    assert append(str(source), str(target)).num_added == 1
    assert [sample["json"]["text"] for sample in StreamingDataset(str(target))] == ["a", "b"]


# ---------------------------------------------------------------------- faults that random histories of sets have found


def score_of(sample: Any) -> str:
    """Return the value of a late field."""
    return f"score of {sample['__key__']}"


def add_score(web: Path, spec: str = "test_life:score_of", **options: Any) -> FieldReport:
    return compute_field(str(web), "score.txt", spec, storage=Storage(), running=Running(workers=0), **options)


def test_a_copy_is_not_appended_to(web: Path, tmp_path: Path) -> None:
    """It does not list its inputs, so all of the source would come once more."""
    copy(str(web), str(tmp_path / "copied"))
    with pytest.raises(ConfigError, match="copied: the list of the inputs that it was made of is missing"):
        append(str(tmp_path / "days"), str(tmp_path / "copied"))
    assert len(keys(tmp_path / "copied")) == 12


def length_of(path: str) -> dict[str, Any]:
    return {"txt": str(len(Path(path).read_text()))}


def functions(target: Path, days: Path, **more: Any) -> Any:
    """Make a sample of each file in a folder."""
    return optimize(length_of, sorted(map(str, days.iterdir())), target, workers=0, progress=False, **more)


@pytest.mark.parametrize("made", ["of another program", "a part", "two parts", "by a function", "a copy's part"])
def test_a_copy_of_any_kind_is_not_appended_to(made: str, web: Path, tmp_path: Path) -> None:
    """Without a journal that says how the whole set was made, a copy was taken for a set that has no inputs."""
    days, copied = tmp_path / "days", tmp_path / "copied"

    def again(target: Path) -> Any:
        return append(str(days), str(target), kind="jsonl")

    if made == "of another program":
        with ShardWriter(str(tmp_path / "foreign/{:06d}.tar"), columns=("n",)) as writer:
            for row in rows_of(50, 3):
                writer.write({"__key__": row["id"], "json": row, "n": row["n"]})
        again(tmp_path / "foreign")
        copy(str(tmp_path / "foreign"), str(copied))
    elif made == "by a function":
        functions(tmp_path / "made", days)
        copy(str(tmp_path / "made"), str(copied))
    elif made == "a copy's part":
        copy(str(web), str(tmp_path / "first"))
        copy(str(tmp_path / "first/000001.tar"), str(copied))
    for shard in {"a part": ("0",), "two parts": ("0", "{1..2}")}.get(made, ()):
        copy(f"{web}/00000{shard}.tar", str(copied))
    before = keys(copied)
    with pytest.raises(ConfigError, match="the list of the inputs that it was made of is missing"):
        functions(copied, days, append=True) if made == "by a function" else again(copied)
    delete(str(copied), storage=Storage(), keys=before[:1]) if len(before) > 1 else None
    with pytest.raises(ConfigError, match="the list of the inputs that it was made of is missing"):
        functions(copied, days, append=True) if made == "by a function" else again(copied)
    assert not verify([str(copied)], storage=Storage()).findings


@pytest.mark.parametrize(("what", "file"), [("", "convert.json"), ("/000001.tar", "sources.parquet")])
def test_damaged_facts_of_a_copy_are_mended_by_the_cure_that_the_error_names(
    what: str, file: str, web: Path, tmp_path: Path
) -> None:
    """An earlier cure was to delete the file, after which all of the source could come once more."""
    copied, days = tmp_path / "copied", str(tmp_path / "days")
    copy(f"{web}{what}", str(copied))
    place, before = copied / "_shardstream" / file, keys(copied)
    data = bytearray(place.read_bytes())
    data[30] ^= 0xFF
    place.write_bytes(data)
    with pytest.raises(IndexFormatError, match=r"or `shard_tools copy`") as caught:
        append(days, str(copied), kind="jsonl")
    assert "delete" not in str(caught.value)
    assert keys(copied) == before
    copy(f"{web}{what}", str(copied))
    with pytest.raises(ConfigError, match="the list of the inputs that it was made of is missing"):
        append(days, str(copied), kind="jsonl")
    assert not verify([str(copied)], storage=Storage()).findings


def test_a_shard_that_is_brought_back_leaves_the_inputs_of_its_set(web: Path, tmp_path: Path) -> None:
    copy(str(web), str(tmp_path / "copied"))
    (web / "000001.tar").unlink()
    copy(str(tmp_path / "copied/000001.tar"), str(web))
    assert append(str(tmp_path / "days"), str(web)).num_added == 0
    assert len(keys(web)) == 12


def test_a_copy_of_a_set_that_nothing_is_known_of_is_appended_to(web: Path, tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "foreign/{:06d}.tar"), columns=("n",)) as writer:
        for row in rows_of(50, 3):
            writer.write({"__key__": row["id"], "json": row, "n": row["n"]})
    copy(str(tmp_path / "foreign"), str(tmp_path / "copied"))
    assert append(str(tmp_path / "days"), str(tmp_path / "copied"), kind="jsonl").num_added == 12


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("change", ["append", "delete"])
@pytest.mark.parametrize("lives", [False, True])
def test_a_copy_that_is_overtaken_is_not_appended_to(
    lives: bool, change: str, at: int, web: Path, tmp_path: Path
) -> None:
    """Its journal was left out if the set had another number of samples then, so all of the source came once more."""
    days = str(tmp_path / "days")
    if lives:
        jsonl(tmp_path / "days/1.jsonl", rows_of(100, 2))
        append(days, str(web))
    before = keys(web)

    def overtake() -> None:
        if change == "delete":
            delete(str(web), storage=Storage(), keys=["0001"])
            return
        jsonl(tmp_path / "days/2.jsonl", rows_of(200, 3))
        append(days, str(web))

    with interrupted(at, overtake, before=True):
        copy(str(web), str(tmp_path / "copied"))
    assert keys(tmp_path / "copied") == before != keys(web)
    with pytest.raises(ConfigError, match="the list of the inputs that it was made of is missing"):
        append(days, str(tmp_path / "copied"))
    assert keys(tmp_path / "copied") == before


def test_contents_are_compared_without_late_fields_that_some_lack(web: Path, tmp_path: Path) -> None:
    add_score(web)
    jsonl(tmp_path / "days/1.jsonl", rows_of(3, 1))
    append(str(tmp_path / "days"), str(web))
    assert dedupe(str(web), storage=Storage()).num_removed == 1


@pytest.mark.parametrize("at", range(5))
def test_of_two_that_change_a_set_as_it_begins_to_live_none_is_lost_unseen(web: Path, at: int) -> None:
    """A deletion, and a late field: both are there, or one of both was told."""
    told = []
    try:
        with interrupted(at, lambda: add_score(web), before=True):
            delete(str(web), storage=Storage(), keys=["0000"])
    except OvertakenError:
        told.append("delete")
    found = [*StreamingDataset(str(web), fields=("json",))]
    assert ("delete" in told) == (len(found) == 12)
    assert all("score.txt" in sample for sample in StreamingDataset(str(web)))


@pytest.mark.parametrize("at", range(4))
def test_a_late_field_that_is_added_as_a_set_begins_to_live_is_there_or_refused(
    web: Path, tmp_path: Path, at: int
) -> None:
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 2))
    told = False
    only = ["put", "put_if"]
    try:
        with interrupted(at, lambda: append(str(tmp_path / "days"), str(web)), before=True, only=only):
            add_score(web)
    except OvertakenError:
        told = True
    assert len([*StreamingDataset(str(web), fields=("json",))]) == 14
    if told:
        assert all("score.txt" not in sample for sample in StreamingDataset(str(web)))
        add_score(web)
        assert all("score.txt" in sample for sample in StreamingDataset(str(web)))
    else:
        with pytest.raises(IndexMismatchError, match="has no values"):
            StreamingDataset(str(web))


def test_of_two_that_add_a_late_field_one_is_told(web: Path) -> None:
    tag(str(web), "v1", storage=Storage())
    told = pytest.raises(OvertakenError, match=r"somebody else has changed field 'score\.txt'")
    with told, interrupted(1, lambda: add_score(web), before=True):
        add_score(web, "test_life:rows_of_key")
    assert StreamingDataset(str(web))[3]["score.txt"] == "score of 0003"


def rows_of_key(sample: Any) -> str:
    """Return other values of the late field."""
    return str(sample["__key__"]) * 2


def test_a_version_that_is_tagged_as_a_field_is_dropped_keeps_it(web: Path) -> None:
    """A set that does not live loses the files of the field; one that somebody has let live meanwhile does not."""
    add_score(web)
    is_told = contextlib.suppress(OvertakenError)
    with is_told, interrupted(0, lambda: tag(str(web), "v1", storage=Storage()), before=False):
        drop_field(str(web), "score.txt", storage=Storage())
    pinned = [*StreamingDataset(str(web), version="v1")]
    assert len(pinned) == 12


def test_what_a_set_means_now_is_not_what_its_first_version_means(web: Path) -> None:
    """A field is added after somebody was killed as the set began to live."""
    with pytest.raises(Killed), interrupted(2, kill, before=True):
        tag(str(web), "v1", storage=Storage())
    assert add_score(web).set_version == 2
    assert all("score.txt" not in sample for sample in StreamingDataset(str(web), version=1))


def test_what_is_added_later_costs_what_it_is(web: Path, tmp_path: Path, read_names: Counter[str]) -> None:
    """A late field that is gone on with reads nothing of the shards that have it, but the first table of the set."""
    add_score(web)
    jsonl(tmp_path / "days/1.jsonl", rows_of(100, 2))
    append(str(tmp_path / "days"), str(web))
    read_names.clear()
    assert add_score(web).num_written == 1
    assert not [name for name in read_names if name.startswith(("000001", "000002"))]
