"""``TableDataset``: CSV and JSONL files as they lie; and the one pass that finds where records begin."""

from __future__ import annotations

import csv
import io
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data

from infra import DeviceMesh
from streaming import DataLoader, TableDataset
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.shards.catalog import lines
from streaming.shards.catalog.lines import Lines, RecordStarts, scan_lines
from streaming.storage import Storage
from tests.support.servers.on_loopback import MiniS3Server


def pieces(data: bytes, seed: int) -> list[bytes]:
    """``data`` cut at random places."""
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    return [data[low:high] for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_lines_are_those_of_python_however_the_bytes_come(seed: int) -> None:
    rng = random.Random(seed)
    data = b"".join(rng.choice([b"\n", b"\r\n", b" ", b"ab", b"\t", b"x\n", b" \n"]) for _ in range(rng.randrange(60)))
    expected, position = [], 0
    for number, line in enumerate(io.BytesIO(data), 1):
        if line.strip():
            expected.append((position, position + len(line), number))
        position += len(line)
    found = [row for part in scan_lines(pieces(data, seed), "x") for row in zip(*map(list, part), strict=True)]
    assert found == expected


@pytest.mark.parametrize("seed", range(40))
def test_records_of_csv_are_those_of_pythons_reader(seed: int) -> None:
    rng = random.Random(seed)
    values = ["a", "", "b c", 'q"q', "two\nlines", "\r\n", ",", '"', "ü"]
    rows = [[rng.choice(values) for _ in range(2)] + ["end"] for _ in range(rng.randrange(1, 20))]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=rng.choice(["\n", "\r\n"])).writerows(rows)
    data = text.getvalue().encode()
    starts = RecordStarts.of(scan_lines(pieces(data, seed), "x", quoted=True))
    assert len(starts) == len(rows)
    again = RecordStarts.from_bytes(starts.to_bytes())
    for number, row in enumerate(rows):
        begin, end = again.range_of(number)
        assert (begin, end) == starts.range_of(number)
        assert next(csv.reader(io.StringIO(data[begin:end].decode(), newline=""), strict=True)) == row


def test_offsets_beyond_4_gib_take_four_bytes() -> None:
    begins = np.array([0, 2**32 - 1, 2**32, 3 * 2**32 + 5, 3 * 2**32 + 9], np.int64)
    parts = [
        Lines(begins[:1], begins[:1] + 1, begins[:1]),
        Lines(begins[1:], np.append(begins[2:], 4 * 2**32), begins[1:]),
    ]
    starts = RecordStarts.of(parts)
    assert [starts.range_of(number)[0] for number in range(5)] == begins.tolist()
    assert starts.range_of(4) == (3 * 2**32 + 9, 4 * 2**32)
    assert starts.low.nbytes == 4 * 6
    assert len(RecordStarts.of([])) == 0


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    with pytest.raises(DataError, match="x: a line is longer than 100 bytes"):
        list(scan_lines([b"a" * 60, b"b" * 60], "x"))


def write_jsonl(path: Path, count: int, first: int = 0) -> Path:
    path.write_text(
        "".join(json.dumps({"id": first + number, "text": "ü" * (number % 5)}) + "\n" for number in range(count))
    )
    return path


@pytest.mark.thorough
@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_dealt_out_as_of_any_map_style_set(tmp_path: Path, ranks: int, num_workers: int) -> None:
    urls = [write_jsonl(tmp_path / "a.jsonl", 30), write_jsonl(tmp_path / "b.ndjson", 17, first=30)]
    found: list[int] = []
    for rank in range(ranks):
        mesh = DeviceMesh.from_sizes(dp_size=ranks, rank=rank)
        with DataLoader(
            TableDataset(urls), 4, device_mesh=mesh, num_workers=num_workers, last_batch="partial"
        ) as loader:
            found += [number for batch in loader for number in batch["id"].tolist()]
            assert loader.state_dict()["epoch"] == 1
    assert found != sorted(found)
    assert sorted(found) == list(range(47))


def test_csv_has_the_names_of_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfname,"long\ntext"\r\nx,"1,\n2"\r\n\r\n\ny,"say ""hi"""')
    rows = TableDataset(path)
    assert len(rows) == 2
    assert rows[0] == {"name": "x", "long\ntext": "1,\n2", "__key__": "0"}
    assert rows[-1] == {"name": "y", "long\ntext": 'say "hi"', "__key__": "1"}
    assert rows[np.int64(1)] == rows[1]
    tabs = tmp_path / "b.tsv"
    tabs.write_text("__key__\tn\nk\t3\n\t\n")
    made = TableDataset([path, tabs], transform=lambda row: (row["__key__"], row.get("n")))
    assert [made[number] for number in range(3)] == [("0", None), ("1", None), ("k", "3")]
    assert made[3] == ("", "")
    assert made.__getitems__([2, 0, 1, 2]) == [("k", "3"), ("0", None), ("1", None), ("k", "3")]
    for wrong in (4, -5):
        with pytest.raises(IndexError, match="the files have 4 rows"):
            made[wrong]
    assert repr(made) == f"TableDataset({path} and 1 more, 4 rows)"


def test_torchs_own_loader_takes_it(tmp_path: Path) -> None:
    rows = pickle.loads(pickle.dumps(TableDataset(write_jsonl(tmp_path / "a.jsonl", 10))))
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=5, num_workers=1)
    assert [batch["id"].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_neighbors_in_a_store_are_one_request(mini_s3: MiniS3Server, s3_bucket: str, tmp_path: Path) -> None:
    options = mini_s3.storage_options
    data = write_jsonl(tmp_path / "a.jsonl", 9000).read_bytes()
    Storage(options).put(f"{s3_bucket}/a.jsonl", data)
    rows = TableDataset(f"{s3_bucket}/a.jsonl", storage_options=options)
    assert len(data) > 2 * 64 << 10
    before = rows.storage.metrics.get("requests")
    assert [row["id"] for row in rows.__getitems__([7, 8999, 3, 5])] == [7, 8999, 3, 5]
    assert rows.storage.metrics.get("requests") - before == 2


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl: the row at byte 9: expected one JSON object per line"),
        ("a.jsonl", '{"a": 1}\n{"a\n', "a.jsonl: the row at byte 9: not JSON"),
        ("a.jsonl", '{"a": 1}\n' + "[" * 100000 + "\n", "the row at byte 9: not JSON"),
        ("a.csv", "a,b\n1,2\n3\n", "the row at byte 8: expected 2 values, got 1"),
        ("a.csv", 'a,b\n1,2\n3,"4\n5,6\n', "the row at byte 8"),
        ("a.csv", 'a,b\n1,2\n3" x,4\n5,6" y\n7,8\n', "expected one record, got 2; is a quote open"),
    ],
)
def test_damaged_rows_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    rows = TableDataset(path)
    assert rows[0]["a"] in (1, "1")
    with pytest.raises(DataError, match=words):
        rows[1]


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    for name, words in (
        ("a.parquet", "expected .jsonl"),
        ("a.jsonl.gz", "unpack it, or pack it into shards: shard_tools"),
    ):
        with pytest.raises(ConfigError, match=words):
            TableDataset(tmp_path / name)
    with pytest.raises(NotFoundError):
        TableDataset(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="empty list"):
        TableDataset([])
    with pytest.raises(ConfigError, match="kind: expected one of jsonl, csv, tsv"):
        TableDataset(tmp_path / "a", kind="json")
    (tmp_path / "twice.csv").write_text("a,a\n")
    with pytest.raises(DataError, match="distinct column names"):
        TableDataset(tmp_path / "twice.csv")
    (tmp_path / "empty.csv").write_text("\n\r\n")
    with pytest.raises(DataError, match="an empty file"):
        TableDataset(tmp_path / "empty.csv")
    (tmp_path / "plain").write_text("\n\n")
    assert len(TableDataset(tmp_path / "plain", kind="jsonl")) == 0
