"""``verify --bad``: which samples of a list are still bad, and why; nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.change.check.recheck import RecheckReport, recheck
from shard_tools.change.check.verify import verify
from shard_tools.change.sets.bad_list import load_bad_list, records_of
from shard_tools.cli import cli
from streaming import DataLoader, StreamingDataset
from streaming.build.batches.bad_file import BadRecord
from streaming.errors import ConfigError, DataError, IndexMissingError, NotFoundError
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage
from tests.support.sets.data_sets import make_sample, mesh_of

BAD = (7, 50, 51, 99)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """100 samples in 5 shards; the JSON of BAD does not decode."""
    with ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=20) as writer:
        for number in range(100):
            sample = {**make_sample(number), "big": bytes([number]) * 9000}
            writer.write({**sample, **({"json": b"{"} if number in BAD else {})})
    return tmp_path / "set"


def table_of(data: Path, shard: int) -> SampleTable:
    path = data / "_shardstream" / "samples" / f"{shard:06d}.tar.parquet"
    return SampleTable.from_parquet(path.read_bytes(), str(path))


def flip(data: Path, number: int) -> None:
    """Damages the payload of one sample."""
    table = table_of(data, number // 20)
    path = data / f"{number // 20:06d}.tar"
    body = bytearray(path.read_bytes())
    body[int(table.fields["big"][0][number % 20])] ^= 1
    path.write_bytes(body)


def neighbors(data: Path, number: int) -> range:
    """Samples whose bytes have one checksum with this one's."""
    low, high, _ = table_of(data, number // 20).widened(number % 20, number % 20 + 1)
    return range(number // 20 * 20 + low, number // 20 * 20 + high)


def check(path: Path, *urls: Path) -> RecheckReport:
    storage = Storage()
    return recheck([str(url) for url in urls], load_bad_list([str(path)], storage), storage=storage)


def write(path: Path, *records: BadRecord) -> Path:
    path.write_bytes(b"".join(record.to_line() for record in records))
    return path


def test_what_a_loader_listed(data: Path, tmp_path: Path) -> None:
    flip(data, 30)
    lost = neighbors(data, 30)
    assert 1 < len(lost) < 20
    file = tmp_path / "bad-{rank}.jsonl"
    for rank in range(2):  # unshuffled, on two ranks: slices of chunks are read, span by span
        dataset = StreamingDataset(str(data), shuffle=False, max_bad_samples=40, bad_samples_file=file)
        with DataLoader(dataset, batch_size=10, device_mesh=mesh_of(2, rank)) as loader:
            for _ in loader:
                pass
    report = check(tmp_path / "bad-*.jsonl")
    assert [(one.kind, int(one.key or -1)) for one in report.findings] == sorted(
        [("decode", number) for number in BAD] + [("checksum", number) for number in lost], key=lambda one: one[1]
    )
    assert (report.num_elsewhere, report.num_unreadable, report.num_good) == (0, 0, report.num_listed - 4 - len(lost))
    for finding in report.findings:
        assert finding.byte_start is not None
        body = Path(finding.shard).read_bytes()[finding.byte_start : finding.byte_end]
        assert body.startswith(f"{finding.key}.big".encode())


def test_only_what_is_listed_is_read(data: Path, tmp_path: Path) -> None:
    shard = str(data / "000002.tar")
    for other in (0, 1, 3, 4):
        (data / f"{other:06d}.tar").unlink()
    file = write(
        tmp_path / "bad.jsonl",
        BadRecord(url=shard, key="00050", stage="decode", reason="x"),
        BadRecord(url=shard, key="00042", stage="fetch", reason="x"),
        BadRecord(url=shard, sample_in_shard=11, stage="fetch", reason="x"),
        BadRecord(url=shard, key="gone", stage="fetch", reason="x"),
    )
    report = check(file, data)
    assert [(one.kind, one.key) for one in report.findings] == [
        ("samples", "gone"),
        ("decode", "00050"),
        ("decode", "00051"),
    ]
    assert (report.num_listed, report.num_samples, report.num_good) == (4, 3, 1)
    assert report.num_bytes < (data / "000002.tar").stat().st_size * 3


def test_mended_samples_are_good(data: Path, tmp_path: Path) -> None:
    whole = (data / "000001.tar").read_bytes()
    flip(data, 30)
    (finding,) = verify([str(data)], storage=Storage()).findings
    file = write(tmp_path / "bad.jsonl", *records_of([finding]))
    assert {int(one.key or -1) for one in check(file).findings} == set(neighbors(data, 30))
    (data / "000001.tar").write_bytes(whole)
    report = check(file)
    assert report.findings == ()
    assert report.num_good == report.num_samples >= len(neighbors(data, 30))


def test_records_of_other_shards_and_torn_lines_are_counted(data: Path, tmp_path: Path) -> None:
    record = BadRecord(url="/elsewhere/0.tar", key="a", stage="fetch", reason="x")
    file = tmp_path / "bad.jsonl"
    gone = BadRecord(url=f"{data}/000000.tar", sample_in_shard=20, stage="fetch", reason="x")
    file.write_bytes(record.to_line() * 2 + gone.to_line() + b'{"url": "/else')
    report = check(file, data)
    assert (report.num_listed, report.num_elsewhere, report.num_unreadable, report.num_samples) == (2, 1, 1, 0)
    assert [one.what for one in report.findings] == ["the index has no such sample"]


def test_shards_that_are_gone(data: Path, tmp_path: Path) -> None:
    (data / "000003.tar").unlink()
    findings = verify([str(data)], storage=Storage()).findings
    assert [one.kind for one in findings] == ["missing"]
    file = write(tmp_path / "bad.jsonl", *records_of(findings))
    report = check(file)
    assert (len(report.findings), report.num_good) == (20, 0)
    assert {one.kind for one in report.findings} == {"size"}


def test_what_is_no_list(data: Path, tmp_path: Path) -> None:
    (tmp_path / "no.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=r"no\.jsonl: not a list of bad samples"):
        check(tmp_path / "no.jsonl")
    with pytest.raises(NotFoundError):
        check(tmp_path / "nothing.jsonl")
    with pytest.raises(NotFoundError, match="no file fits"):
        check(tmp_path / "nothing-*.jsonl")
    (data / "_shardstream" / "samples" / "000001.tar.parquet").unlink()
    file = write(tmp_path / "bad.jsonl", BadRecord(url=f"{data}/000001.tar", key="a", stage="fetch", reason="x"))
    with pytest.raises(IndexMissingError, match="shard_tools index --force"):
        check(file)


def test_shards_that_look_alike_without_their_secrets(tmp_path: Path) -> None:
    file = write(tmp_path / "bad.jsonl", BadRecord(url="https://h/a.tar?…", key="a", stage="fetch", reason="x"))
    storage = Storage()
    with pytest.raises(ConfigError, match="once secrets are left out"):
        recheck(["https://h/a.tar?n=1", "https://h/a.tar?n=2"], load_bad_list([str(file)], storage), storage=storage)


def test_as_commands(data: Path, tmp_path: Path) -> None:
    flip(data, 30)
    wide, narrow = tmp_path / "wide.jsonl", tmp_path / "narrow.jsonl"
    ran = CliRunner().invoke(cli, ["verify", str(data), "--decode", "--write-bad", str(wide)])
    assert ran.exit_code == 1, ran.output
    ran = CliRunner().invoke(cli, ["verify", "--bad", str(wide), "--write-bad", str(narrow), "--json"])
    assert ran.exit_code == 1, ran.output
    told = json.loads(ran.stdout)
    lost = neighbors(data, 30)
    assert told["ok"] is False
    assert len(told["findings"]) == len(BAD) + len(lost)
    keys = [BadRecord.from_line(line).key for line in narrow.read_bytes().splitlines()]
    assert sorted(map(int, keys)) == sorted([*BAD, *lost])
    assert wide.read_bytes() != narrow.read_bytes()
    assert CliRunner().invoke(cli, ["verify"]).exit_code == 2
    ran = CliRunner().invoke(cli, ["verify", str(data / "000000.tar"), "--bad", str(narrow)])
    assert "of other shards than those named: 8 records" in ran.stderr
    assert ran.exit_code == 1
