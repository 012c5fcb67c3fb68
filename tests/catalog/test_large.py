"""Checksums of large members and of the rest of their spans: what they say, who makes them, who checks them."""

from __future__ import annotations

import io
import tarfile
from itertools import pairwise
from pathlib import Path

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.change.check.verify import verify
from streaming.errors import ConfigError
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.scan import scan_shard
from streaming.shards.index.cutter import ChunkRule
from streaming.shards.index.large_members import LARGE_BYTES
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from tests.support.sets.index_files import write_parquet

SIZES = [0, 1, 511, 512, 70_000, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 512, 300_001]
FIELDS = ["a", "b.bin", "c"]
samples_strategy = st.lists(
    st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(SIZES), min_size=1), min_size=1, max_size=6
)


def contents(number: int, size: int) -> bytes:
    return bytes([number % 255 + 1]) * size


def write(directory: Path, samples: list[dict[str, int]], *, index: bool = True) -> Path:
    with ShardWriter(f"{directory}/{{:06d}}.tar", index=index, max_bytes="1GB", overwrite=True) as writer:
        for number, fields in enumerate(samples):
            values = {name: contents(number + place, size) for place, (name, size) in enumerate(fields.items())}
            writer.write({"__key__": f"{number:05d}", **values})
    return directory / "000000.tar"


def table_of(shard: Path) -> SampleTable:
    path = shard.parent / "_shardstream" / "samples" / f"{shard.name}.parquet"
    return SampleTable.from_parquet(path.read_bytes(), str(path))


def check_sums(table: SampleTable, data: bytes) -> None:
    """Every sum, from the sentences in docs/format.md."""
    taken: list[tuple[int, int]] = []
    for name, (starts, sizes) in table.fields.items():
        large = (sizes >= LARGE_BYTES).tolist()
        sums = table.large.fields[name].tolist() if any(large) else [-1] * len(large)
        for is_large, start, size, found in zip(large, starts.tolist(), sizes.tolist(), sums, strict=True):
            assert found == (crc32c.crc32c(data[start : start + size]) if is_large else -1)
            if is_large:
                taken.append((start, start + size))
    borders = table.record_starts[table.span_starts].tolist()
    for number, (low, high) in enumerate(pairwise(borders)):
        inside = sorted(one for one in taken if low <= one[0] < high)
        at, rest = low, b""
        for start, end in [*inside, (high, high)]:
            rest += data[at:start]
            at = end
        if inside:
            assert table.large.rest[number] == crc32c.crc32c(rest)
        elif table.large.rest.size:
            assert table.large.rest[number] == -1
    assert bool(taken) == bool(table.large.fields) == bool(table.large.rest.size)


# Reads of a block and a half of the next are for these few members: each is a call, and there would be 100,000.
@pytest.mark.thorough
@example([{"a": LARGE_BYTES, "c": 511}, {"b.bin": 70_000}, {"c": 0, "a": LARGE_BYTES + 512}], 512, 1)
@example([{"c": 1, "b.bin": LARGE_BYTES}, {"a": LARGE_BYTES - 1}, {"a": 511, "c": LARGE_BYTES + 512}], 700, 200_000)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples_strategy, st.sampled_from([4096, 150_000, 1 << 20]), st.sampled_from([1, 200_000, 8 << 20]))
def test_writer_and_scanner_sum_alike(
    tmp_path: Path, samples: list[dict[str, int]], read_bytes: int, chunk_bytes: int
) -> None:
    shard = write(tmp_path, samples)
    written, data = table_of(shard), shard.read_bytes()
    check_sums(written, data)
    scanned = scan_shard(Storage(), str(shard), "000000.tar", read_bytes=read_bytes)
    assert scanned.to_parquet() == written.to_parquet()
    rule = ChunkRule(target_bytes=chunk_bytes, min_bytes=chunk_bytes, min_samples=1)
    check_sums(scan_shard(Storage(), str(shard), "000000.tar", read_bytes=read_bytes, rule=rule), data)


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_that_belong_to_no_sample(tmp_path: Path, kind: int) -> None:
    shard = tmp_path / "000000.tar"
    with tarfile.open(shard, "w", format=kind) as tar:
        for name in ("readme", "a" * 120 + ".bin", "b.bin", "b.txt", "__meta__.bin", "c.bin"):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = LARGE_BYTES + 3, 1.5  # type: ignore[assignment]
            tar.addfile(info, io.BytesIO(name[:1].encode() * info.size))
    check_sums(scan_shard(Storage(), str(shard), "000000.tar", read_bytes=100_000), shard.read_bytes())


def test_small_records_have_no_more_columns_than_before(tmp_path: Path) -> None:
    write(tmp_path, [{"a": 400, "c": 60_000}] * 30)
    path = tmp_path / "_shardstream" / "samples" / "000000.tar.parquet"
    assert [name for name in pq.read_schema(path).names if "crc32c" in name] == ["span_crc32c"]


@pytest.mark.parametrize("name", ["rest_crc32c", "crc32c.a"])
def test_the_names_of_the_columns_are_taken(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(ConfigError, match="choose another"),
        ShardWriter(f"{tmp_path}/{{:06d}}.tar", columns={name: len}) as writer,
    ):
        writer.write({"__key__": "0", "a": b""})


def test_the_fingerprint_does_not_change(tmp_path: Path) -> None:
    shard = write(tmp_path, [{"a": 300_001, "c": 10}] * 5)
    table = table_of(shard)
    index_shards(Storage(), [str(shard)], force=True)
    assert table_of(shard).chunks.fingerprint == table.chunks.fingerprint
    assert np.array_equal(table_of(shard).large.rest, table.large.rest)


@pytest.mark.parametrize(("column", "of"), [("rest_crc32c", 0), ("crc32c.a", 2), ("span_crc32c", 4)])
def test_verify_checks_every_sum(tmp_path: Path, column: str, of: int) -> None:
    shard = write(tmp_path, [{"a": 300_001, "c": 10}] * 4 + [{"a": 10}] * 200)
    assert verify([f"{tmp_path}/"], storage=Storage()).findings == ()
    path = tmp_path / "_shardstream" / "samples" / "000000.tar.parquet"
    table = pq.read_table(path)
    values = table.column(column).to_pylist()
    values[of] ^= 1
    place = table.column_names.index(column)
    write_parquet(path, table.set_column(place, column, pa.array(values, pa.uint32())))
    (finding,) = verify([f"{tmp_path}/"], storage=Storage()).findings
    assert finding.kind == "index"
    starts = table_of(shard).record_starts.tolist()
    assert starts[of] <= (finding.byte_start or 0) < (finding.byte_end or 0)
