"""Documents of packs are found by the sample table; where it is gone or does not fit, by headers, and all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streaming import Packed, StreamingDataset
from streaming.errors import IndexFormatError
from streaming.shards.catalog.open import sample_records
from streaming.shards.fetch import read
from streaming.shards.fetch.read import layout_by_records, layout_of
from streaming.shards.index.sample_table import Records, SampleTable
from tests.support.sets.data_sets import same_batch
from tests.support.sets.packed_sets import LENGTH, epoch_of, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("documents")
    write(target)
    return target


def packed_of(folder: Path, cache: Path | None = None) -> Packed:
    return Packed(StreamingDataset(folder, seed=3, cache_dir=cache), LENGTH, mask_field="mask")


@pytest.mark.parametrize(("workers", "is_cached"), [(0, False), (0, True), (1, False)])
@pytest.mark.usefixtures("one_fork_server")
def test_no_header_is_read_of_bytes_that_match_their_checksums(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, *, is_cached: bool
) -> None:
    expected = epoch_of(packed_of(folder))
    walked: list[object] = []
    monkeypatch.setattr(read, "parse_chunk", lambda *one, **_: walked.append(one))
    found = epoch_of(packed_of(folder, tmp_path if is_cached else None), num_workers=workers)
    assert not walked
    assert len(found) == len(expected) > 1
    assert all(map(same_batch, found, expected))


@pytest.mark.parametrize("how", ["gone", "damaged", "of another shard", "not of these bytes"])
def test_else_headers_say_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    expected = epoch_of(packed_of(folder))
    for part in folder.rglob("*"):
        target = tmp_path / part.relative_to(folder)
        target.mkdir() if part.is_dir() else target.write_bytes(part.read_bytes())
    packed = packed_of(tmp_path)  # lengths are at hand from now on
    by_records = Records.from_parquet

    def shifted(buffer: object, fields: tuple[str, ...], source: str) -> Records:
        records = by_records(buffer, fields, source)
        starts, sizes = records.fields["tok"]
        return replace(records, fields={**records.fields, "tok": (starts + (1 << 40), sizes)})

    if how == "not of these bytes":
        monkeypatch.setattr(Records, "from_parquet", shifted)
    else:
        tables = sorted((tmp_path / "_shardstream" / "samples").iterdir())
        assert len(tables) > 1
        of_others = [table.read_bytes() for table in (*tables[1:], tables[0])]
        for table, other in zip(tables, of_others, strict=True):
            if how == "gone":
                table.unlink()
            else:
                table.write_bytes(other if how == "of another shard" else table.read_bytes()[:-9])
    if how == "damaged":  # an index file that is damaged is an error wherever it is read
        with pytest.raises(IndexFormatError, match="shard_tools index"):
            epoch_of(packed)
        return
    found = epoch_of(packed)
    for batch in (*found, *expected):
        batch["__url__"] = [Path(url).name for url in batch["__url__"]]
    assert len(found) == len(expected)
    assert all(map(same_batch, found, expected))


def test_records_are_those_of_the_headers(folder: Path) -> None:
    dataset = StreamingDataset(folder)
    for chunk in range(len(dataset.source.chunk_samples)):
        wanted = dataset.source.chunk(chunk)
        shard = dataset.urls.index(wanted.url)
        records = sample_records(dataset.source.storage, dataset.source.shards, shard, ("mask", "tok", "none"))
        assert records is not None
        path = Path(wanted.url.removeprefix("file://"))
        walked = layout_of(wanted, memoryview(path.read_bytes()[wanted.byte_start : wanted.byte_end]))
        found = layout_by_records(records, wanted)
        assert found is not None
        assert found.keys == walked.keys
        for name in ("mask", "tok"):
            columns = [(one.starts[:, one.fields.index(name)], one.sizes[:, one.fields.index(name)])
                       for one in (found, walked)]  # fmt: skip
            assert np.array_equal(*columns)


def test_records_of_a_file_are_those_of_the_whole_table(folder: Path) -> None:
    path = min((folder / "_shardstream" / "samples").iterdir())
    data = path.read_bytes()
    records, table = Records.from_parquet(data, ("tok",), "it"), SampleTable.from_parquet(data, "it")
    of_table = Records.of_table(table, ("tok",))
    assert list(records.keys) == list(of_table.keys) == table.keys
    assert list(records.fields) == list(of_table.fields) == ["tok"]
    assert np.array_equal(records.fields["tok"], table.fields["tok"])
    assert records.chunks == of_table.chunks == table.chunks
    with pytest.raises(IndexFormatError):
        Records.from_parquet(data[:-9], ("tok",), "it")
