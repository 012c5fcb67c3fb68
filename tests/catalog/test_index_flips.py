"""Every file of an index with one flipped bit: each reader gets what it got before, or an error that names the file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.change.check.verify import verify
from shard_tools.change.sets.reindex import index
from shard_tools.cli import cli
from shard_tools.look.plan.keys import keys_at
from shard_tools.make.convert.base.identity import SourceIdentity
from shard_tools.make.convert.journal import Journal, load_journal, load_sources, save_journal, sources_of
from streaming import Balanced, Curriculum, DataLoader, Packed, Schedule, StreamingDataset
from streaming.errors import IndexFormatError
from streaming.sets.filters.late_columns import ColumnDocument
from streaming.sets.filters.views import View
from streaming.shards.catalog.build import read_chunks, read_schema
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.columns import KEY, read_column, read_sample_columns
from streaming.shards.index.files import (
    SOURCES_KIND,
    read_document,
    read_facts,
    read_footer,
    read_table,
)
from streaming.shards.index.sample_table import Records, SampleTable, Spans, chunk_rows_from_footer
from streaming.shards.schema.value import Schema, SchemaField, TokenMeaning
from streaming.shards.video.read import read_video_index
from streaming.shards.video.table import VideoTable
from streaming.storage import Storage
from streaming.storage.requests.retry import MOST_WRONG
from streaming.storage.store import Store
from tests.support.sets.index_files import flipped_bit, touch
from tests.support.sets.meanings import say, schema_of
from tests.support.sources import streams

NUM_SAMPLES, PER_SHARD, PICTURE_BYTES = 48, 16, 200_000
LANGUAGES = ("de", "en", "fr")

KINDS = {
    "chunks": "chunks.parquet",
    "samples": "samples/000001.tar.parquet",
    "values": "columns/quality/000001.tar.parquet",
    "words": "columns/word/000002.tar.parquet",
    "column": "columns/quality/column.json",
    "view": "views/clean.json",
    "schema": "schema.json",
    "journal": "convert.json",
    "sources": "sources.parquet",
    "videos": "video/mp4/000001.tar.parquet",
}
"""One file of each kind that may lie in ``_shardstream/``."""


def length_of(number: int) -> int:
    return 3 + number * 7 % 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 200 KB with tokens, two lifted columns, two late ones, a view, and all notes."""
    target = tmp_path_factory.mktemp("set") / "data"
    columns = {"tokens": lambda sample: length_of(sample["cls"]), "lang": lambda sample: LANGUAGES[sample["cls"] % 3]}
    draw = np.random.default_rng(0)
    with ShardWriter(f"{target}/{{:06d}}.tar", max_samples=PER_SHARD, columns=columns) as writer:
        for number in range(NUM_SAMPLES):
            tokens = draw.integers(0, 60_000, length_of(number)).astype("<u2")
            sample = {"__key__": f"{number:05d}", "cls": number, "tok": tokens.tobytes()}
            videos = {"mp4": streams.video("mp4", 20)} if number % PER_SHARD == 5 else {}
            writer.write(sample | {"bin": draw.bytes(PICTURE_BYTES)} | videos)
    save_journal(str(target), Journal(source={"kind": "made"}, options={"seed": 1}, complete=True), Storage())
    inputs = [SourceIdentity(name=f"{n}.txt", size_bytes=9, version=f"v{n}", crc32c=n, number=n) for n in range(9)]
    (target / "_shardstream/sources.parquet").write_bytes(sources_of(inputs))
    fields = schema_of(target).fields | {
        "cls": SchemaField(kind="integer", classes=tuple(LANGUAGES)),
        "tok": SchemaField(kind="tokens", dtype="uint16", tokens=TokenMeaning(vocab_size=60_000, column="tokens")),
    }
    say(target, replace(schema_of(target), fields=fields))
    keys = [f"{number:05d}" for number in range(NUM_SAMPLES)]
    scores = pa.table({"key": keys, "quality": draw.random(NUM_SAMPLES), "word": [f"w{n % 5}" for n in range(48)]})
    pq.write_table(scores, target.parent / "scores.parquet")
    for name in ("quality", "word"):
        run("column", "add", str(target), name, "--from", f"{target.parent}/scores.parquet", "--on", "key", "--value",
            name)  # fmt: skip
    run("index", str(target), "--video")
    run("view", "save", str(target), "clean", "--where", "quality > 0.3 and word <> 'w1' and tokens > 9")
    return target


def run(*arguments: str) -> None:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == 0, result.output


# --- readers: what each sees ----------------------------------------------------------------------------------------


def by_where(folder: Path) -> object:
    found = StreamingDataset(str(folder), where="tokens > 20 and lang = 'en'")
    return len(found), found.fingerprint


def by_late_column(folder: Path) -> object:
    found = StreamingDataset(str(folder), where="quality > 0.5 and word in ('w0', 'w3')", exclude=["00003"])
    return len(found), found.fingerprint


def by_view(folder: Path) -> object:
    found = StreamingDataset(str(folder), view="clean")
    return len(found), found.fingerprint


def curriculum(folder: Path) -> object:
    metrics = {"tokens": Schedule.root(0.1, 1.0, over=99), "quality": Schedule.root(0.2, 1.0, over=50)}
    return Curriculum(StreamingDataset(str(folder)), metrics, buckets=4).fingerprint


def balanced(folder: Path) -> object:
    return Balanced(StreamingDataset(str(folder)), by="lang").fingerprint, Balanced(
        StreamingDataset(str(folder)), by="word"
    ).fingerprint


def packed(folder: Path) -> object:
    packs = Packed(StreamingDataset(str(folder), fields=("tok",), shuffle=False), 64)
    return packs.fingerprint, packs.num_tokens, packs.counts


def one_by_one(folder: Path) -> object:
    samples = StreamingDataset(str(folder))
    return [(one["__key__"], one["cls"], one["tok"].tolist()) for one in (samples[n] for n in (0, 17, 30, 47))]


def slices(folder: Path) -> object:
    """An epoch in storage order of one field, which is read by the sample tables."""
    samples = StreamingDataset(str(folder), fields=("tok",), shuffle=False)
    with DataLoader(samples, 8, jagged=("tok",), num_workers=0) as loader:
        return [(batch["__key__"], batch["tok"].values.tolist()) for batch in loader]


def keys(folder: Path) -> object:
    samples = StreamingDataset(str(folder))
    chunks = np.arange(samples.source.table.num_chunks)
    return keys_at(samples.source, chunks, samples.source.table.num_samples - 1)


def notes(folder: Path) -> object:
    return (
        load_journal(str(folder), Storage()),
        load_sources(str(folder), Storage()),
        read_schema(Storage(), str(folder)),
    )


def videos(folder: Path) -> object:
    storage = Storage()
    found = read_video_index(storage, str(folder), read_chunks(storage, str(folder)).of_shard(1), ["mp4"]).streams(
        "mp4"
    )
    return {sample: (stream.times.tolist(), [*stream.groups]) for sample, stream in found.items()}


def verified(folder: Path) -> object:
    findings = verify([str(folder)], storage=Storage(), workers=1).findings
    if findings:
        raise IndexFormatError("\n".join(map(str, findings)))
    return findings


def indexed_again(folder: Path) -> object:
    """What is there after ``index``; files whose content, as JSON, is the same are equal."""
    findings = index([str(folder)], storage=Storage(), workers=1).findings
    if findings:
        raise IndexFormatError("\n".join(map(str, findings)))
    files = sorted(path for path in (folder / "_shardstream").rglob("*") if path.is_file())
    return [json.loads(path.read_bytes()) if path.suffix == ".json" else path.read_bytes() for path in files]


READERS: dict[str, Callable[[Path], object]] = {
    one.__name__: one
    for one in (
        by_where, by_late_column, by_view, curriculum, balanced, packed, one_by_one, slices, keys, notes, videos,
        verified, indexed_again,
    )
}  # fmt: skip
ALL = frozenset(KINDS)
TABLES = frozenset({"chunks", "samples"})
LATE = frozenset({"values", "words", "column"})
READ_BY = {
    "by_where": TABLES, "by_late_column": TABLES | LATE, "by_view": TABLES | LATE | {"view"},
    "curriculum": TABLES | {"values", "column"}, "balanced": TABLES | {"words"}, "packed": TABLES | {"schema"},
    "one_by_one": TABLES | {"schema"}, "slices": TABLES | {"schema"}, "keys": TABLES,
    "notes": {"schema", "journal", "sources"}, "videos": {"chunks", "videos"}, "verified": ALL,
    "indexed_again": ALL,
}  # fmt: skip
NUM_CELLS = sum(map(len, READ_BY.values()))
TENTHS = 1
"""Of the flips, how many tenths go through whole readers, which take 3 to 35 ms each; the others through parsers."""
CELLS = [
    pytest.param(kind, reader, marks=() if kind in READ_BY[reader] else pytest.mark.matrix)
    for kind in KINDS
    for reader in READERS
]


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, Any]:
    return {name: read(folder) for name, read in READERS.items()}


def outcome(folder: Path, kind: str, reader: str, truth: object, draw: random.Random) -> str:
    """Flip a bit and read: ``"error"``, ``"equal"``, or in any other case its number."""
    path = folder / "_shardstream" / KINDS[kind]
    for table in (folder / "_shardstream/samples").iterdir():
        touch(table)
    original = path.read_bytes()
    with flipped_bit(path, draw) as bit:
        changed = path.read_bytes()
        try:
            found = READERS[reader](folder)
        except IndexFormatError as error:
            says = path.name in str(error) and ("`shard_tools " in str(error) or "restore it" in str(error))
            return "error" if says else str(error)
    if reader == "verified" and (path.suffix != ".json" or json.loads(changed) != json.loads(original)):
        return f"bit {bit} is no finding"
    return "equal" if found == truth else f"bit {bit}: {found}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "reader"), CELLS)
def test_a_flipped_bit_is_an_error_or_changes_nothing(
    folder: Path, truth: dict[str, Any], request: pytest.FixtureRequest, kind: str, reader: str
) -> None:
    flips, seed = request.config.getoption("--index-flips"), request.config.getoption("--torture-seed")
    draw = random.Random(f"{seed} {kind} {reader}")
    found = [outcome(folder, kind, reader, truth[reader], draw) for _ in range(-(-flips * TENTHS // (10 * NUM_CELLS)))]
    assert [one for one in found if one not in ("error", "equal")] == []
    if kind in READ_BY[reader] and reader != "indexed_again":
        assert "error" in found


@pytest.mark.parametrize(("kind", "reader"), [cell for cell in CELLS if not cell.marks])
def test_a_file_that_comes_wrong_is_asked_for_again(
    folder: Path, truth: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str, reader: str
) -> None:
    """As a chunk is. Here once, and as often as asking helps."""
    read, path = Store.read, (folder / "_shardstream" / KINDS[kind]).as_posix()
    draw, left = random.Random(f"{kind} {reader}"), 0

    def unreliable(self: Store, url: str, start: int, stop: int | None, *given: Any, **how: Any) -> Any:
        nonlocal left
        found = read(self, url, start, stop, *given, **how)
        if url != path or not left:
            return found
        left -= 1
        changed = bytearray(found)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return memoryview(changed)

    monkeypatch.setattr(Store, "read", unreliable)
    for times in (1, MOST_WRONG):
        left = times
        for table in (folder / "_shardstream/samples").iterdir():
            touch(table)  # what was kept of it counts no more
        assert READERS[reader](folder) == truth[reader]
        assert not left, "nobody has read it"


# --- parsers: what all readers get the content of a file from --------------------------------------------------------

FIELDS = ("tok", "cls", "bin")
PARSERS: dict[str, tuple[Callable[[bytes], object], ...]] = {
    "chunks": (lambda data: ChunkTable.from_parquet(data, "f"), lambda data: read_facts(data, "chunks", "f")),
    "samples": (
        lambda data: SampleTable.from_parquet(data, "f").to_parquet(),
        lambda data: Records.from_parquet(data, FIELDS, "f").fields["tok"][0].tolist(),
        lambda data: Spans.from_parquet(data, "f").crc32c.tolist(),
        lambda data: chunk_rows_from_footer(read_footer(lambda low, high: data[low:high], len(data), "f"), "f"),
        lambda data: read_sample_columns(data, ("tokens", "lang"), "f", coded=True),
        lambda data: read_sample_columns(data, (KEY,), "f", only=(3, 7)),
    ),
    "values": (lambda data: read_column(data, "f"),),
    "words": (lambda data: read_column(data, "f"),),
    "column": (lambda data: ColumnDocument.from_bytes(data, "f"),),
    "view": (lambda data: View.from_bytes(data, "f"),),
    "schema": (lambda data: Schema.from_bytes(data, "f"),),
    "journal": (read_document,),
    "sources": (lambda data: read_table(data, SOURCES_KIND, "f")[0].to_pylist(),),
    "videos": (lambda data: VideoTable.from_parquet(data, "f").to_parquet(),),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_no_parser_takes_a_flipped_bit_for_content(folder: Path, request: pytest.FixtureRequest, kind: str) -> None:
    flips, seed = request.config.getoption("--index-flips"), request.config.getoption("--torture-seed")
    draw, num = random.Random(f"{seed} {kind}"), -(-flips * (10 - TENTHS) // (10 * len(KINDS)))
    data = (folder / "_shardstream" / KINDS[kind]).read_bytes()
    for parse in PARSERS[kind]:
        expected, num_errors = parse(data), 0
        for _ in range(-(-num // len(PARSERS[kind]))):
            bit = draw.randrange(8 * len(data))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            try:
                assert parse(bytes(changed)) == expected, f"bit {bit}"
            except (IndexFormatError, ValueError):
                num_errors += 1
        assert num_errors > 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["chunks", "samples"])
def test_index_restores_the_very_bytes_with_lifted_columns(folder: Path, truth: dict[str, Any], kind: str) -> None:
    draw = random.Random(7)
    found = [outcome(folder, kind, "indexed_again", truth["indexed_again"], draw) for _ in range(20)]
    assert found.count("equal") > 12  # the others hit lifted columns: an error that names them, in the test above


# --- what follows from damage -----------------------------------------------------------------------------------------


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target / "data")
    return target / "data"


def test_lost_columns_are_named_and_never_missing_in_one_shard(folder: Path, tmp_path: Path) -> None:
    """Conditions read NULL in a shard whose sample table lacks a column that others have."""
    mine = copied(folder, tmp_path)
    path = mine / "_shardstream/samples/000001.tar.parquet"
    whole = path.read_bytes()
    for cut in (whole[: len(whole) // 3], b"", whole[:-1] + b"?"):
        path.write_bytes(cut)
        with pytest.raises(IndexFormatError, match=r"000001\.tar\.parquet: damaged, with its columns tokens, lang"):
            index([str(mine)], storage=Storage())
        assert path.read_bytes() == cut
    forced = index([str(mine)], storage=Storage(), force=True)
    assert forced.findings == ()
    assert {Path(url).name: {*names} for url, names in forced.lacking.items()} == {"000001.tar": {"tokens", "lang"}}


@pytest.mark.parametrize("keep", [0, 4, 900, -9])
def test_a_table_without_columns_is_rebuilt_from_its_shard(tmp_path: Path, keep: int) -> None:
    with ShardWriter(f"{tmp_path}/{{:d}}.tar", max_samples=3) as writer:
        for number in range(7):
            writer.write({"__key__": f"{number}", "bin": bytes(PICTURE_BYTES)})
    tables = sorted((tmp_path / "_shardstream").rglob("*.parquet"))
    before = [path.read_bytes() for path in tables]
    tables[2].write_bytes(before[2][:keep])
    assert index([str(tmp_path)], storage=Storage()).num_scanned_bytes == (tmp_path / "1.tar").stat().st_size
    assert [path.read_bytes() for path in tables] == before


@pytest.mark.parametrize("on_error", ["substitute", "skip", "raise"])
def test_damage_in_shard_and_index_is_an_error_of_the_index(folder: Path, tmp_path: Path, on_error: str) -> None:
    """Which samples a damaged chunk loses is known from the sample table: without it, others would be substituted."""
    mine = copied(folder, tmp_path)
    shard = bytearray((mine / "000001.tar").read_bytes())
    shard[5 * PICTURE_BYTES] ^= 1
    (mine / "000001.tar").write_bytes(shard)
    path = mine / "_shardstream/samples/000001.tar.parquet"
    dataset = StreamingDataset(str(mine), on_error=on_error, max_bad_samples=1.0)
    with (
        flipped_bit(path, random.Random(3)),
        DataLoader(dataset, 4, jagged=("tok", "bin")) as loader,
        pytest.raises(IndexFormatError, match="samples/000001"),
    ):
        list(loader)
