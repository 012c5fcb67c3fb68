"""Hostile data: it runs no code, reaches no other file, takes no more than its bound, and no secret is told."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.make.convert import convert, lines
from shard_tools.make.tokens.run import TokenizeOptions, tokenize
from streaming import DataLoader, StreamingDataset
from streaming.common.counters import Metrics
from streaming.errors import ConfigError, DataError, IndexFormatError, ShardstreamError, StorageError, TarError
from streaming.shards.cache import NodeCache
from streaming.shards.cache.paths import CachePaths
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import MAX_UNPACKED_BYTES, read_facts, sealed
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.tar import TarScanner, iter_samples, parse_chunk
from streaming.shards.tar.blocks import MAX_EXTENSION_RUN_BYTES, MAX_PAX_RECORDS, split_name
from streaming.shards.tar.group import MAX_FIELDS
from streaming.shards.tar.headers import member_header, padding
from streaming.shards.tar.samples import inflated
from streaming.storage import Checked, Storage, redact
from tests.support.code.folders import ROOT
from tests.support.servers.on_loopback import HttpServer
from tests.support.servers.tls import openssl, self_signed, served_over_tls
from tests.support.sets.index_files import parquet_bytes, with_facts, write_parquet
from tests.support.sets.tars import write_tar

SECRETS = ("hunter2", "swordfish", "abcdef0123")
never_ends = pytest.mark.timeout(60)
"""For what takes milliseconds, or so long that nobody waits for it."""


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of ``shard_tools``, which must not end in a traceback."""
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def header(name: str, size: int, kind: str) -> bytes:
    """A tar header of any type, with its checksum."""
    block = bytearray(member_header(name, size))
    block[156] = ord(kind)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, payload: bytes, kind: str = "0") -> bytes:
    return header(name, len(payload), kind) + payload + padding(len(payload))


def write_set(folder: Path, num_samples: int = 12) -> Path:
    with ShardWriter(f"{folder}/%02d.tar", max_samples=6) as writer:
        for i in range(num_samples):
            writer.write({"__key__": f"k{i:03d}", "txt": f"text {i}", "cls": i})
    return folder


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the facts in the footer of an index file."""
    facts = json.loads(pq.read_schema(path).metadata[b"shardstream"])
    change(facts)
    with_facts(path, facts)


# --- code ------------------------------------------------------------------------------------------------------------


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.trace), "w")


def test_no_payload_is_unpickled(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    blob = pickle.dumps(Evil(trace))
    npy = io.BytesIO()
    np.save(npy, np.array([Evil(trace)], object), allow_pickle=True)
    npz = io.BytesIO()
    np.savez(npz, a=np.array([Evil(trace)], object))
    trace.unlink(missing_ok=True)
    payloads = {"json": blob, "npy": npy.getvalue(), "npz": npz.getvalue(), "jpg": blob, "txt": blob, "msgpack": blob,
                "safetensors": blob, "cls": blob, "pyd": blob, "pickle": blob, "pkl": blob, "pt": blob, "pth": blob,
                "ten": blob}  # fmt: skip
    for field, payload in payloads.items():
        with ShardWriter(f"{tmp_path}/{field}/%d.tar") as writer:
            writer.write({"__key__": "k", field: payload})
        with pytest.raises((DataError, ConfigError)):
            StreamingDataset(str(tmp_path / field))[0]
        assert not trace.exists(), field
    pickle.loads(blob).close()
    assert trace.exists(), "the trap works"


def test_no_source_file_calls_what_runs_data() -> None:
    """pickle is for messages between our own processes, and the one place that reads JSON headers uses literal_eval."""
    may = {
        "pickle.loads": {
            "streaming/run/engine/workers/main.py",
            "streaming/run/engine/workers/surroundings.py",  # settings, from the training process to its own workers
            "streaming/run/engine/workers/portable.py",  # a data set, from the training process to its own workers
            "streaming/run/engine/workers/transport.py",
            "streaming/run/engine/workers/channel.py",
            "streaming/others/remote/reader.py",  # what Ray itself carried between actors of one job
            "shard_tools/running/process_main.py",  # a user's function and inputs, from the process that has them
            "shard_tools/running/processes.py",  # what its own worker processes answer
            "shard_tools/change/functions/source.py",  # the error of such a process
            "streaming/testing/layouts.py",  # batteries of tests: what they have pickled themselves
            "streaming/testing/decoders.py",
            "streaming/testing/sources.py",
            "streaming/testing/stores.py",
            "streaming/testing/children.py",  # the result of a forked child
        },
        "pickle.Unpickler": {
            "streaming/run/engine/workers/main.py",
            "streaming/run/engine/workers/inline_builder.py",  # functions that this process has pickled
        },
        "subprocess": {
            "streaming/run/engine/workers/fork_server.py",
            "shard_tools/running/processes.py",  # interpreters that run nothing but process_main
            "shard_tools/look/doctor/packages.py",  # an interpreter that imports the packages of our extras, by name
            "shard_tools/look/show/decoding/workers.py",  # interpreters that decode pictures, and may be killed
        },
    }  # fmt: skip
    pattern = re.compile(
        r"pickle\.loads?\b|pickle\.Unpickler\b|torch\.load\b|\bsubprocess\b|os\.system|os\.popen|\beval\(|\bexec\(|shell=True|yaml\.load"
        r"|allow_pickle=True|weights_only=False|verify=False|allow_invalid|CERT_NONE|_create_unverified"
    )
    found = {
        (match[0], str(path.relative_to(ROOT)))
        for package in ("streaming", "shard_tools", "infra")
        for path in (ROOT / package).rglob("*.py")
        for match in pattern.finditer(re.sub(r'(?s:""".*?""")|#[^\n]*', "", path.read_text()))
    }
    assert found == {(what, path) for what, paths in may.items() for path in paths}


@pytest.mark.parametrize("url", ["pipe:touch {}", "pipe:touch {}|x.tar", "|touch {}", "$(touch {}).tar", "`touch {}`"])
def test_no_url_is_a_command(tmp_path: Path, url: str) -> None:
    trace = tmp_path / "ran"
    with pytest.raises((StorageError, ConfigError)):
        StreamingDataset(url.format(trace))
    assert not trace.exists()


def test_pyarrow_is_new_enough_not_to_unpickle_extension_types() -> None:
    """CVE-2023-47248: before 14.0.1 the schema inside a Parquet file could name a pickle."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (required,) = [one for one in project["project"]["dependencies"] if one.startswith("pyarrow")]
    assert int(re.sub(r"pyarrow>=(\d+).*", r"\1", required)) >= 15
    assert int(pa.__version__.split(".")[0]) >= 15


# --- places ----------------------------------------------------------------------------------------------------------

NAMES = ["../../outside.tar", "/outside.tar", "a/../../outside.tar", "./00.tar", "a//b.tar", "", "x\0y.tar", 7, None]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_cannot_name_shards_outside_its_folder(tmp_path: Path, name: Any) -> None:
    path = write_set(tmp_path / "set") / "_shardstream" / "chunks.parquet"
    rewrite(path, lambda facts: facts["shards"].__setitem__(0, [name, *facts["shards"][0][1:]]))
    with pytest.raises(IndexFormatError, match=r"shard name|not a chunk table"):
        ChunkTable.from_parquet(path.read_bytes(), "c")


def test_pruning_a_hostile_index_deletes_nothing_outside(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    victim = tmp_path / "precious.parquet"
    victim.write_bytes(b"mine")
    path = folder / "_shardstream" / "chunks.parquet"
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[b"shardstream"])
    old, evil = facts["shards"][0][0], "../../../precious"
    facts["shards"][0][0] = evil
    names = pa.array([evil if name == old else name for name in table.column("shard").to_pylist()])
    table = table.set_column(table.column_names.index("shard"), "shard", names)
    write_parquet(path, table.replace_schema_metadata({b"shardstream": json.dumps(facts).encode()}))
    command("index", "--prune", str(folder))
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["../../outside.txt", "/../outside.txt", "a/../../outside.txt", "a/./b.txt"])
def test_member_names_never_become_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(member(name, b"evil") + bytes(1024))
    before = {str(path) for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=r"'\.' or '\.\.'"):
        convert(f"{tmp_path}/in/", f"{tmp_path}/out")
    after = {str(path) for path in tmp_path.rglob("*")}
    assert {path for path in after - before if not path.startswith(f"{tmp_path}/out")} == set()
    keys = [sample["__key__"][0] for sample in DataLoader(StreamingDataset(f"{tmp_path}/in/a.tar"), 1)]
    assert len(keys) == 1, "read as a name"
    code, text = command("cat", f"{tmp_path}/in/a.tar", "0", "--field", "txt")
    assert (code, text) == (0, "evil")
    assert not (tmp_path / "outside.txt").exists()


def test_a_link_in_place_of_a_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out" / "_shardstream" / "samples").mkdir(parents=True)
    for name in ("00.tar", "_shardstream/chunks.parquet", "_shardstream/samples/00.tar.parquet"):
        (tmp_path / "out" / name).symlink_to(victim)
    with ShardWriter(f"{tmp_path}/out/%02d.tar", overwrite=True) as writer:
        writer.write({"__key__": "k", "txt": "t"})
    assert victim.read_text() == "mine"
    assert not (tmp_path / "out" / "00.tar").is_symlink()
    assert len(StreamingDataset(f"{tmp_path}/out")) == 1


def cache_read(directory: Path, metrics: Metrics) -> bool:
    cache = NodeCache(directory, 1 << 20, metrics=metrics)
    out = bytearray(5)

    def fetch(view: memoryview) -> Checked:
        view[:] = b"right"
        return Checked.comparing(5, ())

    _, hit = cache.read_into("s3://b/k", "v", 0, memoryview(out), fetch, crc32c=None)
    assert bytes(out) == b"right"
    return hit


@pytest.mark.parametrize("trap", ["link", "group", "world", "owner"])
def test_a_cache_folder_that_others_can_write_is_not_used(
    tmp_path: Path, trap: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    assert not cache_read(tmp_path / "c", metrics)
    assert cache_read(tmp_path / "c", metrics)
    root = Path(CachePaths(str(tmp_path / "c")).root)
    if trap == "link":
        root.rename(tmp_path / "elsewhere")
        root.symlink_to(tmp_path / "elsewhere")
    elif trap in ("group", "world"):
        root.chmod(0o770 if trap == "group" else 0o707)
    else:
        root.chmod(0o755)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        os.chown(root, os.getuid() + 2, -1) if os.getuid() == 0 else pytest.skip("needs root")
    before = sorted(str(path) for path in root.rglob("*"))
    assert not cache_read(tmp_path / "c", metrics)
    assert sorted(str(path) for path in root.rglob("*")) == before
    assert len([one for one in caplog.records if "nobody else can write to" in one.getMessage()]) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o775, "other user", "other user, sticky"])
def test_a_folder_in_which_others_can_rename_holds_no_cache(
    tmp_path: Path, mode: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may rename our folder can put one in its place; nothing is made there, nor read."""
    around, metrics = tmp_path / "c", Metrics()
    around.mkdir()
    if isinstance(mode, int):
        around.chmod(mode)
    else:
        around.chmod(0o1777 if "sticky" in mode else 0o755)
        os.chown(around, 65534, -1) if os.getuid() == 0 else pytest.skip("needs root")
    for _ in range(2):
        assert not cache_read(around, metrics)
    assert not [*around.iterdir()]
    assert "chmod go-w" in caplog.text
    own = around / "own"
    own.mkdir()
    assert [cache_read(own, metrics) for _ in range(2)] == [False, True], "the cure"


def test_a_sticky_folder_of_root_or_ours_holds_a_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert [cache_read(tmp_path, Metrics()) for _ in range(2)] == [False, True]
    new, before = tmp_path / "new" / "cache", os.umask(0)
    try:
        assert [cache_read(new, Metrics()) for _ in range(2)] == [False, True]
    finally:
        os.umask(before)
    assert new.stat().st_mode & 0o777 == 0o700


def test_the_cache_can_be_read_by_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache_read(tmp_path / "c", Metrics())
    finally:
        os.umask(before)
    root = Path(CachePaths(str(tmp_path / "c")).root)
    paths = [root, *root.rglob("*")]
    assert len(paths) > 4
    assert all(path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600) for path in paths)


# --- bounds: tar -----------------------------------------------------------------------------------------------------


def feed_all(data: bytes, piece_bytes: int = 1 << 20) -> TarScanner:
    scanner = TarScanner("s.tar")
    for at in range(0, len(data), piece_bytes):
        scanner.feed(data[at : at + piece_bytes])
        assert len(scanner._tail) <= MAX_EXTENSION_RUN_BYTES + piece_bytes
    scanner.finish()
    return scanner


@pytest.mark.parametrize("kind", ["x", "L", "K"])
def test_a_run_of_extension_headers_is_bounded(kind: str) -> None:
    """They all belong to the next member: a scanner that waited for it would hold and walk them again and again."""
    one = member("././@LongLink", b"18 comment=a long\n", kind)
    many = one * (MAX_EXTENSION_RUN_BYTES // len(one) + 1)
    good = one * (MAX_EXTENSION_RUN_BYTES // len(one)) + member("a.txt", b"t") + bytes(1024)
    if kind == "x":
        assert parse_chunk(good).keys == ["a"]
        assert feed_all(good).num_bytes == len(good)
    bad = many + member("a.txt", b"t") + bytes(1024)
    for read in (parse_chunk, feed_all, lambda data: list(iter_samples([data]))):
        with pytest.raises(TarError, match="extension headers before one member"):
            read(bad)
    with pytest.raises(TarError, match="extension headers before one member"):
        feed_all(one * (64 << 10))


def test_pax_records_are_counted() -> None:
    payload = b"9 path=a\n" + b"6 a=b\n" * (MAX_PAX_RECORDS - 1)
    shard = member("pax", payload, "x") + member("z.txt", b"t") + bytes(1024)
    assert parse_chunk(shard).keys == []
    with pytest.raises(TarError, match="PAX header of more than 4096 records"):
        parse_chunk(member("pax", payload + b"6 a=b\n", "x") + member("z.txt", b"t") + bytes(1024))


@pytest.mark.parametrize("size", ["-1", "99999999999999999999", "1e3", str(1 << 57), "٣"])
def test_pax_sizes_are_sizes(size: str) -> None:
    text = f" size={size}\n".encode()
    record = str(len(text) + 2).encode() + text
    with pytest.raises(TarError, match="is not a size"):
        parse_chunk(member("pax", record, "x") + member("z.txt", b"t") + bytes(1024))


@pytest.mark.parametrize(
    "name", ["a/" * 200_000 + "\n.b/c.d", "\n" + "a/" * 200_000 + ".b/c.d", "__" * 300_000 + "x.y"]
)
@never_ends
def test_long_names_cost_no_more_than_their_length(name: str) -> None:
    """The regular expression took minutes, or more."""
    parts = split_name(name)
    assert parts is None or sum(map(len, parts)) <= len(name)


def test_the_fields_of_one_sample_are_counted() -> None:
    shard = b"".join(header(f"k.f{i}", 0, "0") for i in range(MAX_FIELDS + 1)) + bytes(1024)
    assert len(parse_chunk(shard[512:]).fields) == MAX_FIELDS
    for read in (parse_chunk, feed_all):
        with pytest.raises(TarError, match=f"more than {MAX_FIELDS} fields"):
            read(shard)
    scanner = TarScanner()
    with pytest.raises(TarError, match=f"more than {MAX_FIELDS} fields"):
        scanner.feed(shard[:-1024])  # not only when the sample ends


def test_the_writer_does_not_write_what_readers_refuse(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/%d.tar") as writer:
        with pytest.raises(ConfigError, match="16385 fields"):
            writer.write({"__key__": "k", **{f"f{i}": b"" for i in range(MAX_FIELDS + 1)}})
        writer.write({"__key__": "k", "f": b""})


# --- bounds: index files ---------------------------------------------------------------------------------------------


def limited(code: str, data: bytes) -> str:
    """What ``code`` prints, in a process that may take 3 GiB more than it has when it begins; it gets the ``data``."""
    program = (
        "import sys, resource\nfrom streaming.errors import IndexFormatError\n"
        "from streaming.shards.index.chunk_table import ChunkTable\n"
        "from streaming.shards.index.sample_table import SampleTable\n"
        "data = sys.stdin.buffer.read()\n"
        "have = int(open('/proc/self/statm').read().split()[0]) * 4096 + (3 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (have, have))\n" + code
    )
    ran = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=False, cwd=ROOT)
    return ran.stdout.decode() + ran.stderr.decode()


@pytest.mark.parametrize("at_most", [256 << 20, pytest.param(MAX_UNPACKED_BYTES, marks=pytest.mark.matrix)])
def test_runs_of_equal_numbers_are_counted_as_they_are_unpacked(tmp_path: Path, at_most: int) -> None:
    """Eight columns of a million zeros at a time, up to behind the limit, which is set lower than it is."""
    path = write_set(tmp_path) / "_shardstream" / "chunks.parquet"
    metadata = pq.read_schema(path).metadata
    out = io.BytesIO()
    zeros = pa.array(np.zeros(1 << 20, np.int64))
    schema = pa.schema([(f"c{i}", pa.int64()) for i in range(8)], metadata)
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for _ in range(at_most // zeros.nbytes // 8 + 2):
            writer.write_table(pa.table([zeros] * 8, schema=schema))
    assert len(out.getvalue()) < 4 << 20
    text = limited(f"""
from streaming.shards.index import files
files.MAX_UNPACKED_BYTES = {at_most}
try:
    ChunkTable.from_parquet(data, 'c')
except IndexFormatError as error:
    print(error)
""", sealed(out.getvalue()))  # fmt: skip
    found = re.search(rf"its rows would take (\d+) bytes, at most {at_most} are read", text)
    assert found is not None, text
    assert at_most < int(found[1]) <= at_most + 2 * 8 * zeros.nbytes
    assert "Traceback" not in text


def test_texts_that_are_stored_once_and_used_often_are_counted(tmp_path: Path) -> None:
    path = write_set(tmp_path) / "_shardstream" / "samples" / "00.tar.parquet"
    metadata = pq.read_schema(path).metadata
    codes = pa.array(np.zeros(20_000, np.int32))
    table = pa.table({"key": pa.DictionaryArray.from_arrays(codes, ["k" * 1_000_000])}).replace_schema_metadata(
        metadata
    )
    data = parquet_bytes(table, compression="zstd")
    assert len(data) < 10_000
    text = limited("""
try:
    SampleTable.from_parquet(data, 'c')
except IndexFormatError as error:
    print(error)
""", data)  # fmt: skip
    assert "c: its rows would take" in text or "c: damaged index file (its rows would take" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "facts",
    [
        {"version": "²"},
        {"version": "9" * 5000 + ".0"},
        {"version": "1²"},
        {"shards": [["00.tar", 2**70, 6]]},
        {"shards": [["00.tar", 1e308, 6]]},
        {"shards": [["00.tar", float("inf"), 6]]},
        {"shards": [["00.tar", True, 6]]},
        {"shards": [["00.tar", -(2**70), -(2**70)]]},
        {"shards": {"a": 1}},
        {"shards": [[["00.tar"], 1, 1]]},
    ],
)
def test_absurd_facts_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    path = write_set(tmp_path) / "_shardstream" / "chunks.parquet"
    rewrite(path, lambda known: known.update(facts))
    with pytest.raises(IndexFormatError):
        ChunkTable.from_parquet(path.read_bytes(), "c")


def chunks(**changes: Any) -> ChunkTable:
    from streaming.shards.index.chunk_table import ShardInfo  # noqa: PLC0415

    columns: dict[str, Any] = {"shard": [0], "first_sample": [0], "num_samples": [2], "byte_start": [0],
                               "byte_end": [2048], "crc32c": [0]}  # fmt: skip
    info = ShardInfo(name="a.tar", size_bytes=changes.pop("size_bytes", 4096), num_samples=changes.pop("total", 2))
    columns |= changes
    return ChunkTable(shards=(info,), **{name: np.array(values) for name, values in columns.items()})


def test_counts_that_no_shard_could_hold_are_refused() -> None:
    chunks().validate()
    with pytest.raises(IndexFormatError, match="more samples than headers"):
        chunks(num_samples=[5], total=5).validate()
    many = {name: [value] * 4 for name, value in (("shard", 0), ("crc32c", 0), ("num_samples", 2**62))}
    with pytest.raises(IndexFormatError):  # the sum is 0, modulo 2**64
        chunks(**many, first_sample=[0, 2**62, -(2**63), -(2**62)], byte_start=[0, 512, 1024, 1536],
               byte_end=[512, 1024, 1536, 2048], total=0).validate()  # fmt: skip


def test_deep_json_is_an_error_everywhere(tmp_path: Path) -> None:
    deep = "[" * 200_000 + "]" * 200_000
    table = pa.table({"a": [1]}).replace_schema_metadata({b"shardstream": deep.encode()})
    with pytest.raises(IndexFormatError, match="recursion"):
        read_facts(parquet_bytes(table), "chunks", "c")
    (tmp_path / "in.jsonl").write_text(f'{{"a": {deep}}}\n')
    with pytest.raises(DataError, match="not JSON"):
        convert(str(tmp_path / "in.jsonl"), str(tmp_path / "out"))
    write_set(tmp_path / "jsons")
    with ShardWriter(f"{tmp_path}/jsons/x%d.tar", index=False) as writer:
        writer.write({"__key__": "deep", "json": deep.encode()})
        for depth in range(100, 1500, 100):
            writer.write({"__key__": f"k{depth}", "json": b"[" * depth + b"]" * depth})
    for key in ("deep", *(f"k{depth}" for depth in range(100, 1500, 100))):
        code, text = command("cat", f"{tmp_path}/jsons/x0.tar", key, "--json")
        assert code == 0
        assert json.loads(text)["key"] == key
    journal = tmp_path / "to" / "_shardstream" / "convert.json"
    journal.parent.mkdir(parents=True)
    journal.write_text(deep)
    (tmp_path / "good.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(IndexFormatError, match="journal"):
        convert(str(tmp_path / "good.jsonl"), str(tmp_path / "to"))


# --- bounds: what users and sources write ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "{1..3000000000}.tar",
        "{1..99999999999999999999}.tar",
        "{1..9999}{1..9999}.tar",
        "{a,b}" * 40 + ".tar",
        "{{1..9999},a}{1..9999}.tar",
        "{x{1..9999}y{1..9999}}.tar",
        "{a," * 3000 + "}" * 3000 + ".tar",
        "{a..z}" * 9 + ".tar",
    ],
)
@never_ends
def test_braces_are_counted_before_they_are_written_out(pattern: str) -> None:
    with pytest.raises(ShardstreamError):
        expand_urls(pattern, Storage())


def test_many_braces_are_fine() -> None:
    assert len(expand_urls("{a,b}/{000..999}-{x,y{1..3}}.tar", Storage())) == 2 * 1000 * 4


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.txt.gz"])
@pytest.mark.parametrize("damage", ["flip", "header", "cut"])
def test_damaged_gzip_sources_are_data_errors(tmp_path: Path, name: str, damage: str) -> None:
    text = "text\n" + "".join(f"{{{i * 7919 % 1000}}}\n" for i in range(5000))
    data = bytearray(gzip.compress(text.encode()))
    if damage == "flip":
        data[len(data) // 2 :] = bytes(255 - byte for byte in data[len(data) // 2 :])
    elif damage == "header":
        data[:3] = b"\x1f\x8b\x00"
    else:
        del data[-30:]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=r"a\."):
        convert(
            str(tmp_path / name),
            str(tmp_path / "out"),
        )


def test_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 16)
    monkeypatch.setattr(csv, "field_size_limit", csv.field_size_limit)
    for name in ("a.jsonl.gz", "b.csv.gz", "c.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"h,\n" + b"x," * (1 << 20)))
        with pytest.raises(DataError, match=r"a line is longer|not JSON"):
            convert(str(tmp_path / name), str(tmp_path / name[0]))


# --- the terminal ----------------------------------------------------------------------------------------------------


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x9b2J\u202ek"
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in (f"{evil}.txt", f"b.{evil}", "c\udcff.txt"):
            tar.addfile(tarfile.TarInfo(name))
    for arguments in (("ls", "--long"), ("ls",), ("info",), ("ls", "--json"), ("verify",), ("index",)):
        code, text = command(arguments[0], str(tmp_path / "a.tar"), *arguments[1:])
        assert code in {0, 1, 3}
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\udc00-\udfff]", text), arguments
    code, text = command("cat", str(tmp_path / "a.tar"), f"{evil}", "--field", evil)
    assert code == 1
    assert "\x1b" not in text


def test_warnings_of_commands_cannot_steer_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b]0;owned\x07"
    folder.mkdir()
    (folder / "b.tar.zst").touch()
    write_tar(folder / "a.tar", [("k.txt", b"x")])
    done = subprocess.run(
        [sys.executable, "-m", "shard_tools", "index", str(folder)], capture_output=True, text=True, check=True
    )
    assert "are left out: they are compressed" in done.stderr
    assert "a\\x1b]0;owned\\x07" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout


# --- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hunter2@host/k", "https://…@host/k"),
        ("https://user:hun@ter2@host/k@x", "https://…@host/k@x"),
        ("https://host/k?X-Amz-Signature=hunter2", "https://host/k?…"),
        ("s3://key:hunter2@bucket/k", "s3://…@bucket/k"),
        ("https://user:hun/ter2@host/k@x", "https://…@x"),
        ("https://host:443/a@b/k", "https://host:443/a@b/k"),
        ("https://[::1]:443/a@b/k", "https://[::1]:443/a@b/k"),
        ("az://c/k.tar?sv=1&sig=hunter2", "az://c/k.tar?…"),
        ("s3://bucket/really?.tar", "s3://bucket/really?.tar"),
        ("/data/a?b=c@d.tar", "/data/a?b=c@d.tar"),
        ("https://host/a@b/k", "https://host/a@b/k"),
    ],
)
def test_redacted_urls(url: str, shown: str) -> None:
    assert redact(url) == shown


def no_secret(text: object) -> None:
    found = [secret for secret in SECRETS if secret in str(text)]
    assert not found, f"{found} in {str(text)[:2000]}"


def test_no_secret_of_a_url_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """In samples, messages, representations, metrics, state, and what every verb prints."""
    write_set(tmp_path / "good")
    for name in ("flipped", "cut"):
        write_set(tmp_path / name)
        path = tmp_path / name / "00.tar"
        data = bytearray(path.read_bytes())
        data[700] ^= 0xFF
        path.write_bytes(data[: len(data) if name == "flipped" else 4000])
    query = "?X-Amz-Signature=abcdef0123&token=swordfish"
    with HttpServer(tmp_path) as server:
        place = f"http://user:hunter2@127.0.0.1:{server.port}"
        dataset = StreamingDataset(f"{place}/good/{{00..01}}.tar{query}", cache_dir=str(tmp_path / "cache"))
        with DataLoader(dataset, 4) as loader:
            for batch in loader:
                no_secret(batch)
            no_secret([loader.metrics(), loader.state_dict(), repr(loader), repr(dataset), dataset[3]])
        for name in ("flipped", "cut", "none"):
            for index in (None, f"{tmp_path}/good"):
                with pytest.raises(ShardstreamError) as caught:
                    StreamingDataset(f"{place}/{name}/00.tar{query}", index=index, on_error="raise")[0]
                no_secret([caught.value, getattr(caught.value, "__notes__", "")])
                with (
                    pytest.raises(ShardstreamError) as caught,
                    DataLoader(
                        StreamingDataset(f"{place}/{name}/00.tar{query}", index=index, max_bad_samples=0), 2
                    ) as loader,
                ):
                    list(loader)
                no_secret([caught.value, getattr(caught.value, "__notes__", "")])
            url = f"{place}/{name}/00.tar{query}"
            for verb in (["info", url], ["ls", "--long", url], ["verify", url], ["verify", "--json", url],
                         ["cat", url, "0"], ["cat", url, "no such key"], ["index", url, "--index", str(tmp_path / "i")],
                         ["convert", url, str(tmp_path / f"to-{name}")], ["plan", url, "--batch-size", "2"],
                         ["ls", "--json", url], ["info", "--json", url]):  # fmt: skip
                no_secret(command(*verb))
        url = f"{place}/good/00.tar{query}"
        for verb in (["ls", "--long", url], ["ls", "--json", url], ["cat", url, "k000"], ["info", url]):
            code, text = command(*verb)
            assert code == 0, text
            no_secret(text)
    no_secret(caplog.text)
    no_secret(capfd.readouterr())
    for path in (tmp_path / "cache").rglob("*"):
        no_secret(path)
        if path.is_file():
            no_secret(path.read_bytes())


def test_no_secret_of_a_source_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a conversion called as a function, whose messages no command line cuts; and a signed URL is one file."""
    (tmp_path / "rows.jsonl").write_text('{"text": "abc"}\n{"text": 3}\n')
    (tmp_path / "cut.jsonl").write_text('{"text": "abc"}\n{"tex\n')
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "no.parquet").write_bytes(b"PAR1")
    query = "?X-Amz-Signature=abcdef0123&token=swordfish"
    with HttpServer(tmp_path) as server:
        place = f"http://user:hunter2@127.0.0.1:{server.port}"
        options = TokenizeOptions(tokenizer="bytes", on_error="skip")
        assert tokenize(f"{place}/rows.jsonl{query}", str(tmp_path / "to"), options=options).sets[0].num_documents == 1
        assert "rows.jsonl?…:2" in caplog.text
        no_secret(caplog.text)
        for path in (tmp_path / "to").rglob("*.json"):
            no_secret(path.read_text())
        for source, target in (
            ("cut.jsonl", "a"), ("twice.csv", "b"), ("no.parquet", "c"), ("none.csv", "d"), ("rows.txt", "to"),
            ("rows.jsonl", f"{place}/x.tar{query}"), ("rows.jsonl", f"{place}/rows.jsonl{query}"),
        ):  # fmt: skip
            with pytest.raises(ShardstreamError) as caught:
                convert(f"{place}/{source}{query}", target if "://" in target else str(tmp_path / target))
            no_secret([caught.value, getattr(caught.value, "__notes__", "")])
        absent = f"{place}/none{query}"
        for option in ({"tokenizer": f"{place}/rows.jsonl{query}"}, {"tokenizer": absent},
                       {"tokenizer": "bytes", "messages_field": "m", "chat_template": absent}):  # fmt: skip
            with pytest.raises(ShardstreamError) as caught:
                tokenize(f"{place}/rows.jsonl", str(tmp_path / "e"), options=TokenizeOptions(**option))
            no_secret(caught.value)


@pytest.mark.parametrize("path", ["none-*.csv?token=swordfish", "other/", "several/", "none/"])
def test_no_secret_of_a_source_in_which_nothing_fits_is_told(tmp_path: Path, path: str) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("other/a.xyz", "several/a.csv", "several/a.jsonl"):
        memory.pipe(f"/user:hunter2@secrets/{name}", b"{}")
    with pytest.raises(ShardstreamError, match=r"memory://…@secrets/") as caught:
        convert(f"memory://user:hunter2@secrets/{path}", str(tmp_path))
    no_secret(caught.value)


@pytest.mark.usefixtures("one_fork_server")
def test_decode_workers_get_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read from the arena: what is pickled for them holds neither storage options nor URLs with secrets."""
    sent: list[bytes] = []
    import streaming.run.engine.workers.pool as workers  # noqa: PLC0415

    original = workers.dumps

    def spy(recipe: Any) -> bytes:
        sent.append(original(recipe))
        return sent[-1]

    monkeypatch.setattr(workers, "dumps", spy)
    write_set(tmp_path)
    options = {"key": "hunter2", "secret": "swordfish", "token": "abcdef0123"}
    dataset = StreamingDataset(str(tmp_path), storage_options=options)
    with DataLoader(dataset, 4, num_workers=1) as loader:
        assert len(list(loader)) == 3
        no_secret([repr(dataset), repr(dataset.source.storage), repr(loader), loader.metrics(), loader.state_dict()])
    assert sent
    assert not any(secret.encode() in blob for secret in SECRETS for blob in sent)


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path: Path) -> bytes:
    return (write_set(tmp_path / "set") / "00.tar").read_bytes()


@pytest.fixture
def tls(tmp_path: Path, shard: bytes) -> Iterator[tuple[str, str]]:
    """URL of a shard behind a certificate that nobody knows, and the certificate of its authority."""
    leaf, request, names = tmp_path / "leaf.pem", tmp_path / "leaf.csr", tmp_path / "names"
    names.write_text("subjectAltName=DNS:localhost")
    cert, key = self_signed(tmp_path, "Nobody")
    own = leaf.with_suffix(".key")
    make = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", str(own))
    openssl(*make, "-out", str(request))
    sign = ("x509", "-req", "-in", str(request), "-days", "2", "-CA", str(cert), "-CAkey", str(key))
    openssl(*sign, "-CAcreateserial", "-extfile", str(names), "-out", str(leaf))
    with served_over_tls(shard, leaf, own) as url:
        yield f"{url}/00.tar", str(cert)


def test_certificates_are_checked(tls: tuple[str, str], shard: bytes) -> None:
    url, cert = tls
    with pytest.raises(StorageError, match="certificate is not trusted"):
        Storage({"unreachable_s": 0.2, "max_retries": 0}).info(url)
    assert Storage({"ca_file": cert}).info(url).size_bytes == len(shard)
    assert bytes(Storage({"ca_file": cert}).read(url, 0, 100)) == shard[:100]


def test_authorities_are_named_as_aws_does_and_to_commands(
    tls: tuple[str, str], shard: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, cert = tls
    doctor = ["doctor", url, "--no-imports", "--json", "--storage-option", "unreachable_s=0.2"]

    def trouble(*arguments: str) -> str:
        return str(json.loads(CliRunner().invoke(cli, [*doctor, *arguments]).stdout)["store"]["trouble"])

    assert "certificate is not trusted; give its authority as ca_file, or --ca-file" in trouble()
    assert "certificate" not in trouble("--ca-file", cert)
    monkeypatch.setenv("AWS_CA_BUNDLE", cert)
    assert Storage().info(url).size_bytes == len(shard)
    assert "certificate" not in trouble()
    monkeypatch.setenv("AWS_CA_BUNDLE", f"{cert}.gone")
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE: .*gone"):
        Storage().info(url)
    assert Storage({"ca_file": cert}).info(url).size_bytes == len(shard)


@pytest.mark.parametrize("name", ["verify", "ssl_verify", "allow_invalid_certificates", "use_ssl"])
def test_there_is_no_option_to_leave_certificates_unchecked(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown storage option"):
        Storage({name: False})


def test_sample_tables_keep_their_text_types(tmp_path: Path) -> None:
    """Texts that are stored once come back as plain texts, whatever way they were read."""
    with ShardWriter(f"{tmp_path}/%d.tar", columns={"lang": lambda sample: "en"}) as writer:
        for i in range(50):
            writer.write({"__key__": f"{i:03d}", "txt": ""})
    data = (tmp_path / "_shardstream" / "samples" / "0.tar.parquet").read_bytes()
    table = SampleTable.from_parquet(data, "s")
    assert table.columns["lang"].type == pa.string()
    assert table.to_parquet() == data


def test_inflation_goes_in_bounded_pieces() -> None:
    """What a few KB of gzip become is never in memory at once, whatever the ratio."""
    packed = gzip.compress(bytes(64 << 20), 9)
    assert len(packed) < 128 << 10
    sizes = [len(piece) for piece in inflated([packed])]
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 4 << 20


def test_a_large_field_of_a_gzip_is_inflated_into_one_copy() -> None:
    """Its pieces go as the field is put together from them."""
    member = tarfile.TarInfo("a.bin")
    member.size = 32 << 20
    body = bytes(range(256)) * (member.size >> 8)
    packed = gzip.compress(member.tobuf() + body + bytes(1024), 1)
    tracemalloc.start()
    try:
        ((key, fields),) = iter_samples([packed])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (key, fields) == ("a", {"bin": body})
    assert peak_bytes < 1.5 * member.size
