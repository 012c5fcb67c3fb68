"""The file that lists bad samples: whole lines whoever writes, once a sample and epoch, and never the run's end."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.build.batches import bad_file
from streaming.build.batches.bad_file import BadFile, BadRecord, iter_records, shown_url
from streaming.errors import ConfigError, DataError
from tests.support.processes.forked import Forked, all_end
from tests.support.sets.data_sets import SampleSet, loaders, make_sample, mesh_of, write_set

pytestmark = pytest.mark.usefixtures("one_fork_server")

BAD = (7, 50, 51, 99)
texts = st.text(st.characters(exclude_categories=())) | st.just("\udc80")
numbers = st.integers(-1, 2**63)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def bad_set(tmp_path: Path) -> str:
    """100 samples in 5 shards; the JSON of BAD does not decode."""
    with ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=20) as writer:
        for number in range(100):
            writer.write({**make_sample(number), **({"json": b"{"} if number in BAD else {})})
    return f"{tmp_path}/set/"


def run(url: str, file: Path | str, **options: Any) -> list[dict[str, Any]]:
    dataset = StreamingDataset(url, max_bad_samples=len(BAD), bad_samples_file=file)
    with DataLoader(dataset, batch_size=10, **{"device_mesh": mesh_of(1, 0), **options}) as loader:
        for _ in loader:
            pass
        return list(loader.metrics()["bad"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_bad_sample_is_a_line(bad_set: str, tmp_path: Path, num_workers: int) -> None:
    file = tmp_path / "new" / "bad-{rank}.jsonl"
    listed = run(bad_set, file, num_workers=num_workers)
    written = lines(tmp_path / "new" / "bad-0.jsonl")
    assert written == listed
    for one in written:
        number = int(one["key"])
        assert one["url"] == f"{bad_set}{number // 20:06d}.tar"
        assert (one["number"], one["sample_in_shard"]) == (number, number % 20)
        record = Path(one["url"]).read_bytes()[one["byte_start"] : one["byte_end"]]
        assert record.startswith(one["key"].encode() + b".bin")
        assert (one["stage"], one["epoch"], one["rank"]) == ("decode", 0, 0)
        assert "'json'" in one["reason"]
        assert len(one["time"]) == len("2026-01-31T23:59:59Z")
    assert sorted(int(one["key"]) for one in written) == list(BAD)


def test_once_an_epoch_over_epochs_restarts_and_replicas(bad_set: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    for _ in range(2):  # the second run is a restart from scratch
        dataset = StreamingDataset(bad_set, max_bad_samples=len(BAD), bad_samples_file=file)
        for rank in range(4):
            mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, rank=rank, environ={})
            with DataLoader(dataset, batch_size=10, device_mesh=mesh) as loader:
                for _ in range(2):
                    for _ in loader:
                        pass
    assert sorted((one["epoch"], one["number"]) for one in lines(file)) == [(e, n) for e in (0, 1) for n in BAD]


def test_each_rank_its_file(bad_set: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(bad_set, max_bad_samples=len(BAD), bad_samples_file=tmp_path / "bad-{rank}.jsonl")
    for loader in loaders(dataset, 2, batch_size=10):
        for _ in loader:
            pass
    found = [one for rank in (0, 1) if (path := tmp_path / f"bad-{rank}.jsonl").exists() for one in lines(path)]
    assert sorted(one["number"] for one in found) == list(BAD)
    assert all(one["rank"] in {0, 1} for one in found)


def test_nothing_bad_no_file(tmp_path: Path) -> None:
    samples: SampleSet = write_set(tmp_path / "set")
    run(samples.url, tmp_path / "bad.jsonl")
    assert not (tmp_path / "bad.jsonl").exists()


@pytest.mark.parametrize("path", ["", 3])
def test_a_path_is_needed(bad_set: str, path: Any) -> None:
    with pytest.raises(ConfigError, match="bad_samples_file: expected a path"):
        StreamingDataset(bad_set, bad_samples_file=path)


def test_a_failing_disk_costs_one_warning(bad_set: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "streaming.build.batches.bad_file"):
        listed = run(bad_set, "/dev/full")
    assert len(listed) == len(BAD)
    (record,) = [one for one in caplog.records if one.name == "streaming.build.batches.bad_file"]
    assert "/dev/full" in record.message
    assert "No space left" in record.message


RECORD = BadRecord(url="/x/0.tar", key="a", stage="decode", reason="why", epoch=0)


def test_a_short_write_leaves_no_piece_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BadFile(str(tmp_path / "bad.jsonl"), 0)
    file.add(RECORD)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        file.add(replace(RECORD, key="b"))
    file.add(replace(RECORD, key="c"))
    assert [one["key"] for one in lines(tmp_path / "bad.jsonl")] == ["a", "c"]


def test_a_line_that_was_cut_off_swallows_no_other(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(RECORD.to_line() + b'{"url": "/x/0.t')
    BadFile(str(path), 0).add(replace(RECORD, key="b"))
    first, torn, last = iter_records(path.read_bytes())
    assert (first, last) == (RECORD, replace(RECORD, key="b"))
    assert isinstance(torn, DataError)


WRITER = """
import sys
from streaming.build.batches import bad_file
from streaming.build.batches.bad_file import BadFile, BadRecord
bad_file._LOCK_S = 60.0  # on a busy machine, too, no process gives up and writes without the lock
file = BadFile(sys.argv[1], int(sys.argv[2]))
for number in range(150):
    for key in (f"{number}", f"{sys.argv[2]}-{number}"):
        file.add(BadRecord(url="/x/0.tar", key=key, stage="fetch", reason="r" * (number * 50), epoch=number % 2))
"""


@pytest.mark.thorough
def test_processes_do_not_mix_their_lines(tmp_path: Path, forked: Forked) -> None:
    path, output = tmp_path / "bad.jsonl", tmp_path / "output"
    processes = [forked.start(WRITER, str(path), str(rank), output=output) for rank in range(3)]
    assert all_end(processes) == [0, 0, 0], output.read_text()
    records = [BadRecord.from_line(line) for line in path.read_bytes().splitlines()]
    keys = [f"{number}" for number in range(150)]
    keys += [f"{rank}-{number}" for rank in range(3) for number in range(150)]
    assert sorted(record.key for record in records) == sorted(keys)


@given(url=texts, key=texts, reason=texts, number=numbers, byte_start=numbers)
def test_lines_and_back(url: str, key: str, reason: str, number: int, byte_start: int) -> None:
    record = BadRecord(url=url, key=key, stage="fetch", reason=reason, number=number, byte_start=byte_start)
    line = record.to_line()
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert BadRecord.from_line(line) == record


@given(st.binary() | st.from_regex(rb'\{"url": [0-9"a]*, "stage": "x", "reason": 1\}'))
def test_whatever_a_file_holds_is_a_record_or_an_error(content: bytes) -> None:
    for found in iter_records(content):
        assert isinstance(found, (BadRecord, DataError))


def test_shown_urls_have_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_url("https://u:pw@host/a.tar?sig=secret") == "https://…@host/a.tar?…"
    monkeypatch.chdir(tmp_path)
    assert shown_url("a.tar") == shown_url(f"file://{tmp_path}/a.tar") == f"{tmp_path}/a.tar"


def test_a_reader_that_holds_the_lock_costs_a_second_and_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can read the file can lock it, for ever."""
    monkeypatch.setattr(bad_file, "_LOCK_S", 0.01)
    path = tmp_path / "bad.jsonl"
    path.touch()
    waits: list[float] = []
    lock_open = bad_file.lock_open

    def noted(file: int, limit_s: float) -> bool:
        waits.append(limit_s)
        return lock_open(file, limit_s)

    monkeypatch.setattr(bad_file, "lock_open", noted)
    file = BadFile(str(path), 0)
    records = [BadRecord(url="a.tar", key=str(number), stage="decode", reason="torn") for number in range(4)]
    with path.open() as held:  # for reading
        fcntl.flock(held, fcntl.LOCK_EX)
        for record in records[:3]:
            file.add(record)
        assert waits == [0.01, 0, 0]
        assert caplog.text.count("has held its lock") == 1
    for record in records:
        file.add(record)
    assert [one.key for one in iter_records(path.read_bytes()) if isinstance(one, BadRecord)] == ["0", "1", "2", "3"]
    assert waits[-2:] == [0.01, 0.01]
