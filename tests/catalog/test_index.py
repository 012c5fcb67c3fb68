"""The chunk rule, chunk tables, sample tables."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from streaming.errors import ConfigError, DataError, IndexFormatError, IndexMismatchError
from streaming.shards.index import files
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo, is_missing, numbers
from streaming.shards.index.columns import KEY, read_sample_columns
from streaming.shards.index.cutter import DEFAULT_RULE, ChunkCutter, ChunkRule
from streaming.shards.index.layout import chunks_path, samples_path
from streaming.shards.index.pages import begun_at_page
from streaming.shards.index.sample_table import SampleTable, chunk_rows_from_footer
from tests.support.sets.data_sets import cut_records
from tests.support.sets.index_files import parquet_bytes


def table() -> ChunkTable:
    return ChunkTable(
        shards=(
            ShardInfo(name="a.tar", size_bytes=5000, num_samples=3),
            ShardInfo(name="empty.tar", size_bytes=1024, num_samples=0),
            ShardInfo(name="d/b.tar", size_bytes=9000, num_samples=2),
        ),
        shard=[0, 0, 2],
        first_sample=[0, 2, 0],
        num_samples=[2, 1, 2],
        byte_start=[0, 1024, 0],
        byte_end=[1024, 2048, 8192],
        crc32c=[1, 2, 2**32 - 1],
    )


def samples(keys: tuple[str, ...] = ("x", "y", "z"), columns=None) -> SampleTable:
    return SampleTable.build(
        name="a.tar",
        size_bytes=5120,
        keys=list(keys),
        record_starts=np.array([0, 1024, 3072, 4096]),
        fields={
            "jpg": (np.array([512, 1536, 3584]), np.array([5, 600, 0])),
            "cls": (np.array([-1, 2560, -1]), np.array([0, 1, 0])),
        },
        chunk_bounds=np.array([0, 2, 3]),
        crc32c=[7, 8],
        columns=columns,
    )


# --- the rule


rules = st.builds(
    lambda low, more, count: ChunkRule(target_bytes=low + more, min_bytes=low, min_samples=count),
    st.integers(1, 40), st.integers(0, 40), st.integers(1, 6),
)  # fmt: skip


@given(sizes=st.lists(st.integers(1, 60), max_size=60), rule=rules, splits=st.lists(st.integers(0, 60), max_size=4))
@settings(deadline=None)
def test_one_by_one_in_bulk_and_in_parts_cut_alike(sizes: list[int], rule: ChunkRule, splits: list[int]) -> None:
    single = ChunkCutter(rule)
    expected = [index + 1 for index, size in enumerate(sizes) if single.add(size)]
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64)
    assert ChunkCutter(rule).extend(starts).tolist() == expected
    parts, got = ChunkCutter(rule), []
    edges = sorted({0, len(sizes), *(split for split in splits if split < len(sizes))})
    for first, stop in itertools.pairwise(edges):
        got += (parts.extend(starts[first : stop + 1]) + first).tolist()
    assert got == expected
    assert (parts.num_bytes, parts.num_samples) == (single.num_bytes, single.num_samples)
    bounds = cut_records(starts, rule).tolist()
    assert bounds == [0, *expected, *([len(sizes)] if sizes and len(sizes) not in expected else [])]


def test_the_default_rule() -> None:
    def chunks(record_bytes: int, count: int) -> list[int]:
        return np.diff(cut_records(np.arange(count + 1) * record_bytes, DEFAULT_RULE)).tolist()

    assert chunks(1024, 3000) == [1024, 1024, 952]  # 1 MiB of small records
    assert chunks(8192, 600) == [256, 256, 88]  # 256 records beyond 1 MiB
    assert chunks(69_632, 130) == [61, 61, 8]  # 4 MiB of large ones
    assert chunks(20 << 20, 2) == [1, 1]


def test_rules_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError):
        ChunkRule(min_samples=0)
    with pytest.raises(ConfigError):
        ChunkRule(min_bytes=2, target_bytes=1)


# --- the chunk table


def test_chunk_table_round_trip_is_exact_and_deterministic() -> None:
    data = table().to_parquet()
    assert data == table().to_parquet()
    back = ChunkTable.from_parquet(data, "c.parquet")
    assert back == table()
    assert back.fingerprint == table().fingerprint
    assert (back.num_chunks, back.total_samples, back.total_bytes) == (3, 5, 10_240)
    rows = pq.read_table(io.BytesIO(data)).to_pylist()
    assert rows[2] == {
        "shard": "d/b.tar", "first_sample": 0, "num_samples": 2, "byte_start": 0, "byte_end": 8192, "crc32c": 2**32 - 1,
    }  # fmt: skip
    none = ChunkTable.concat([])
    assert ChunkTable.from_parquet(none.to_parquet(), "c") == none


def test_the_fingerprint_is_pinned_and_sees_every_fact() -> None:
    assert table().fingerprint == FINGERPRINT
    base = table()
    for name in ("first_sample", "num_samples", "byte_start", "byte_end", "crc32c"):
        columns = {key: getattr(base, key).copy() for key in COLUMNS}
        columns[name][1] += 1
        assert ChunkTable(shards=base.shards, **columns).fingerprint != base.fingerprint
    assert base.select(["d/b.tar", "a.tar"]).fingerprint != base.select(["a.tar", "d/b.tar"]).fingerprint


COLUMNS = ("shard", "first_sample", "num_samples", "byte_start", "byte_end", "crc32c")
FINGERPRINT = "fa399635ed4345590edcbfa518acdf9ce082106529838933e1cf8e105c2d2f3d"


def test_select_follows_the_names() -> None:
    picked = table().select(["d/b.tar", "empty.tar", "a.tar"])
    picked.validate()
    assert [shard.name for shard in picked.shards] == ["d/b.tar", "empty.tar", "a.tar"]
    assert picked.shard.tolist() == [0, 2, 2]
    assert picked.byte_start.tolist() == [0, 0, 1024]
    apart = table().by_shard()
    assert apart == {name: table().select([name]) for name in ("a.tar", "empty.tar", "d/b.tar")}
    assert ChunkTable.concat(list(apart.values())) == table()
    with pytest.raises(IndexMismatchError, match=r"'gone\.tar'.*shard_tools index"):
        table().select(["a.tar", "gone.tar"])
    twice = ChunkTable.concat([table(), table()])
    twice.validate()
    assert twice.shard.tolist() == [0, 0, 2, 3, 3, 5]
    with pytest.raises(IndexMismatchError, match="two shards"):
        twice.select(["a.tar"])
    with pytest.raises(IndexFormatError, match="one name"):
        twice.to_parquet()


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [
        ("num_samples", 0, 0), ("num_samples", 0, 1), ("first_sample", 1, 1), ("byte_start", 1, 512),
        ("byte_end", 0, 0), ("byte_end", 2, 10_000), ("shard", 0, 2),
        ("shard", 2, 3), ("shard", 0, -1), ("byte_start", 0, 512),
    ],
)  # fmt: skip
def test_validate_refuses_what_does_not_fit(column: str, row: int, value: int) -> None:
    columns = {name: getattr(table(), name).copy() for name in COLUMNS}
    columns[column][row] = value
    with pytest.raises(IndexFormatError):
        ChunkTable(shards=table().shards, **columns).validate("t")


def test_the_arrays_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        table().crc32c[0] = 1


def rewrite(data: bytes, **changes: object) -> bytes:
    rows = pq.read_table(io.BytesIO(data))
    facts = json.loads(rows.schema.metadata[b"shardstream"]) | changes
    later = rows.append_column("later", pa.array([0] * len(rows)))
    return parquet_bytes(later.replace_schema_metadata({b"shardstream": json.dumps(facts)}))


def test_index_of_a_later_major_format_is_refused() -> None:
    for data, read in (
        (table().to_parquet(), ChunkTable.from_parquet),
        (samples().to_parquet(), SampleTable.from_parquet),
    ):
        read(rewrite(data, version="1.7", news=[1]), "f")
        with pytest.raises(IndexFormatError, match=r"f: index format 2\.0.*upgrade"):
            read(rewrite(data, version="2.0"), "f")
        for bad in (
            {"version": "x"},
            {"version": None},
            {"kind": "other"},
            {"shards": 3, "shard": 3},
            {"shards": [[1]], "shard": []},
        ):
            with pytest.raises(IndexFormatError, match=r"^f: "):
                read(rewrite(data, **bad), "f")
    with pytest.raises(IndexFormatError, match="kind"):
        ChunkTable.from_parquet(samples().to_parquet(), "f")
    with pytest.raises(IndexFormatError, match="not a shardstream index"):
        ChunkTable.from_parquet(parquet_bytes(pa.table({"a": [1]})), "f")


@given(at=st.integers(0, 4000), noise=st.binary(min_size=1, max_size=8), cut=st.integers(0, 4000))
@settings(deadline=None)
def test_damaged_files_raise_data_errors_only(at: int, noise: bytes, cut: int) -> None:
    for data, read in (
        (table().to_parquet(), ChunkTable.from_parquet),
        (samples().to_parquet(), SampleTable.from_parquet),
    ):
        damaged = bytearray(data)
        damaged[at % len(data) : at % len(data) + len(noise)] = noise
        for bad in (bytes(damaged), data[: cut % len(data)]):
            with contextlib.suppress(DataError):
                read(bad, "f")


# --- the sample table


def test_sample_table_round_trip() -> None:
    columns = {"tokens": pa.array([5, None, 7]), "lang": pa.array(["en", "de", "en"])}
    first = samples(columns=columns)
    data = first.to_parquet()
    assert data == samples(columns=columns).to_parquet()
    back = SampleTable.from_parquet(data, "s")
    assert back.to_parquet() == data
    assert back.chunks == first.chunks == chunk_rows_from_footer(data)
    assert list(back.keys) == ["x", "y", "z"]
    assert back.chunk.tolist() == [0, 0, 1]
    assert list(back.fields) == ["jpg", "cls"]
    assert back.columns["tokens"].to_pylist() == [5, None, 7]
    assert back.chunks.byte_end.tolist() == [3072, 4096]


def test_lookup_of_a_sample_gives_its_ranges() -> None:
    found = SampleTable.from_parquet(samples().to_parquet(), "s").lookup(1)
    assert (found.key, found.chunk, found.record_start, found.record_end) == ("y", 0, 1024, 3072)
    assert found.fields == {"jpg": (1536, 2136), "cls": (2560, 2561)}
    assert samples().lookup(0).fields == {"jpg": (512, 517)}
    for index in (-1, 3):
        with pytest.raises(IndexError, match=r"which has 3"):
            samples().lookup(index)


@pytest.mark.parametrize(("guess_bytes", "num_reads"), [(64 << 10, 1), (16, 2)])
def test_the_footer_alone_holds_the_chunk_rows(monkeypatch, guess_bytes: int, num_reads: int) -> None:
    monkeypatch.setattr(files, "_FOOTER_GUESS_BYTES", guess_bytes)
    data, reads = bytes(100_000) + samples().to_parquet(), []

    def read(start: int, stop: int) -> bytes:
        reads.append((start, stop))
        return data[start:stop]

    tail = files.read_footer(read, len(data), "s")
    assert chunk_rows_from_footer(tail) == samples().chunks
    assert (len(reads), max(stop - start for start, stop in reads)) == (num_reads, len(tail))
    assert len(tail) < 100_000
    with pytest.raises(IndexFormatError, match="does not end as a Parquet file"):
        files.read_footer(lambda start, stop: b"12345678"[start:stop], 8, "s")


def test_keys_that_are_not_utf8_survive() -> None:
    keys = ("x", "\udcff", "\udce9y")
    assert list(SampleTable.from_parquet(samples(keys).to_parquet(), "s").keys) == list(keys)


def test_lifted_columns_do_not_shadow_the_format() -> None:
    for name in ("key", "chunk", "start.jpg", "size.x"):
        with pytest.raises(ConfigError, match="choose another"):
            samples(columns={name: pa.array([1, 2, 3])})
    with pytest.raises(IndexFormatError, match="2 rows of 3"):
        samples(columns={"tokens": pa.array([1, 2])})


def test_fields_outside_their_record_are_refused() -> None:
    good = samples()
    for start, size in ((100, 5), (1536, 5000), (1536, -1), (-2, 0)):
        fields = {"jpg": (np.array([512, start, 3584]), np.array([5, size, 0]))}
        with pytest.raises(IndexFormatError, match="field 'jpg' of sample 1"):
            replace(good, fields=fields).validate()


def test_an_empty_shard() -> None:
    empty = SampleTable.build(
        name="e.tar", size_bytes=1024, keys=[], record_starts=np.zeros(1, np.int64), fields={},
        chunk_bounds=np.zeros(1, np.int64), crc32c=[],
    )  # fmt: skip
    back = SampleTable.from_parquet(empty.to_parquet(), "s")
    assert (back.num_samples, back.chunks.num_chunks, back.record_starts.tolist()) == (0, 0, [0])


# --- names


def test_index_files_lie_at_fixed_paths() -> None:
    assert chunks_path() == "_shardstream/chunks.parquet"
    for name in ("000.tar", "part-0/000.tar", "a.b/c.parquet"):
        assert samples_path(name) == f"_shardstream/samples/{name}.parquet"


MISSING_OF = {
    pa.int64(): 7, pa.string(): "a", pa.float32(): 0.5, pa.bool_(): False, pa.null(): None, pa.list_(pa.int64()): [3],
    pa.dictionary(pa.int32(), pa.string()): "a",
}  # fmt: skip


@pytest.mark.parametrize("kind", MISSING_OF, ids=str)
def test_missing_values_are_those_of_arrow(kind: pa.DataType) -> None:
    rng = random.Random(str(kind))
    for length in (0, 1, 7, 8, 9, 33):
        for share in (0.0, 0.4, 1.0):
            whole = pa.array([None if rng.random() < share else MISSING_OF[kind] for _ in range(length)], kind)
            part = whole.slice(start := rng.randint(0, length), rng.randint(0, length - start))
            for column in (whole, part, pa.chunked_array([whole, part], kind), pa.chunked_array([], kind)):
                assert is_missing(column).tolist() == column.is_null().to_pylist()


@pytest.mark.thorough
def test_opening_a_data_set_does_not_import_pandas(tmp_path: Path) -> None:
    """Nor does reading packs of it in a mixture by tokens: Arrow imports it on many ways to NumPy, if it is installed.

    That takes 0.4 s of CPU. In an interpreter of its own: forked processes have it.
    """
    columns = {"tokens": lambda one: len(one["tok"]) // 2 or None}
    with ShardWriter(f"{tmp_path}/{{:04d}}.tar", columns=columns) as writer:
        for number, tokens in enumerate([5, 1500, 0]):
            writer.write({"__key__": f"{number}", "tok": np.zeros(tokens, np.uint16).tobytes()})
    program = (
        "import sys; from streaming import DataLoader, Mixture, Packed, StreamingDataset; "
        "one = StreamingDataset(sys.argv[1], fields=['tok'], subset=(0, 2)); one[0]; "
        "packs = Packed(one, 16, dtype='uint16'); "
        "mixture = Mixture({'packs': packs}, weights={'packs': 1}, unit='tokens'); "
        "plain = Mixture({'one': one}, weights={'one': 1}, unit='tokens'); "
        "print([len(next(iter(DataLoader(each, 2)))['__key__']) for each in (mixture, plain)], 'pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", program, f"{tmp_path}/"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[2, 2] False\n"


def test_some_keys_alone_are_those_of_all() -> None:
    """Also none, beyond the end, and of keys that are no UTF-8; of several pages, of which some are skipped."""
    for keys in ([f"{number:05d}" for number in range(50_000)], ["a", "\udcff", "b"]):
        data = samples(tuple(keys)).to_parquet() if len(keys) == 3 else _many(keys)
        whole, count = read_sample_columns(data, [KEY], "s")[0][KEY], len(keys)
        for first, stop in ((0, 1), (1, 2), (count - 1, count), (0, count + 5), (1, count - 1), (count, count + 1)):
            assert read_sample_columns(data, [KEY], "s", only=(first, stop))[0][KEY].equals(whole[first:stop])


_TEXTS = pa.table(
    {"number": range(9000), "text": [None if n % 7 == 3 else "x" * (n % 5) + str(n) for n in range(9000)]}
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_page_version": "2.0", "compression": "zstd"},
        {"write_statistics": True, "write_page_checksum": True, "write_page_index": True},
        {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "compression": "none"},
        {"use_dictionary": True},
    ],
    ids=["v1", "v2", "statistics", "delta", "dictionary"],
)
def test_a_column_can_begin_at_any_page(options: dict[str, Any]) -> None:
    """Whatever writes the pages, they are what Arrow reads in order; a dictionary makes them inseparable."""
    sink = pa.BufferOutputStream()
    layout = {"row_group_size": 5000, "data_page_size": 1500, "write_batch_size": 100, "use_dictionary": False}
    pq.write_table(_TEXTS, sink, **{**layout, **options})
    buffer = memoryview(sink.getvalue())
    file = pq.ParquetFile(pa.BufferReader(buffer))
    for group, row in ((0, 0), (0, 99), (0, 2500), (0, 4999), (1, 1), (1, 3999)):
        part, before = begun_at_page(file, buffer, group, "text", row)
        assert (before == 0) if "use_dictionary" in options else row - 500 <= before <= row
        batch = next(part.iter_batches(row + 1 - before, row_groups=[group], columns=["text"]))
        there = 5000 * group + before
        assert batch.column(0).equals(_TEXTS["text"].combine_chunks()[there : there + row + 1 - before])


def test_headers_of_pages_that_make_no_sense_leave_the_file_to_arrow() -> None:
    data = bytearray(_many([f"{number:05d}" for number in range(50_000)]))
    file = pq.ParquetFile(pa.BufferReader(bytes(data)))
    start = file.metadata.row_group(0).column(0).data_page_offset
    assert begun_at_page(file, memoryview(data), 0, "key", 45_000)[1] > 40_000
    for header in (b"\x00", b"\x1c" * 64, b"\xff" * 64, b"\x15\x00\x15\x02\x15\x01\x2c\x15\x01\x00\x00"):
        data[start : start + len(header)] = header
        assert begun_at_page(file, memoryview(data), 0, "key", 45_000) == (file, 0)


def test_missing_numbers_get_a_value_also_in_a_part_of_a_column() -> None:
    """Which are missing is read from the bits that Arrow keeps, which may begin before the part."""
    column = pa.array([None, 3, None, 7, 9], pa.uint32())
    found = numbers(pa.chunked_array([column, column[1:], column[:0]]), np.int64, missing=-1)
    assert found.tolist() == [-1, 3, -1, 7, 9, 3, -1, 7, 9]
    assert found.dtype == np.int64
    with pytest.raises(ValueError, match="2 missing values"):
        numbers(column, np.int64)


def _many(keys: list[str]) -> bytes:
    starts = np.arange(len(keys) + 1, dtype=np.int64) * 1024
    bounds = np.array([0, len(keys)])
    return SampleTable.build(
        name="s.tar", size_bytes=len(keys) * 1024 + 1024, keys=keys, record_starts=starts,
        fields={"txt": (starts[:-1] + 512, np.full(len(keys), 9))}, chunk_bounds=bounds, crc32c=[0],
    ).to_parquet()  # fmt: skip
