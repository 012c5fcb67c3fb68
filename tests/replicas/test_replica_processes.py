"""Replicas, stages and the agreement check under real processes and a real process group, reading from an S3 server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streaming import DataLoader, StreamingDataset, Windows
from tests.support.code.folders import PROGRAMS
from tests.support.processes.forked import Forked
from tests.support.programs.replica_rank import WINDOWS, digest_of
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets import recordings
from tests.support.sets.data_sets import SampleSet, data_gets, mesh_of, write_set

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.fixture(scope="module")
def samples(mini_s3: MiniS3Server) -> SampleSet:
    """202 samples in 7 shards and 54 chunks, in a bucket."""
    bucket = mini_s3.create_bucket("replicas")
    return write_set(f"{bucket}/train", storage_options=mini_s3.storage_options)


def run(forked: Forked, folder: Path, samples: SampleSet, world_size: int, jobs: list[Any], **more: str) -> list[int]:
    """Start the ranks and wait for them; their exit codes."""
    config = more | {
        "url": samples.url, "storage_options": dict(samples.storage_options or {}), "folder": str(folder),
        "world_size": world_size, "init": f"file://{folder}/store", "jobs": jobs,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    started = []
    try:
        for rank in range(world_size):
            output = folder / f"output-{rank}"
            started.append(
                forked.start(PROGRAMS / "replica_rank.py", str(path), output=output, environ={"RANK": str(rank)})
            )
        return [one.wait(200) for one in started]
    finally:
        for one in started:
            one.kill()


def results(folder: Path, name: str, ranks: range) -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in ranks]


def test_replicas_stages_and_agreement(
    samples: SampleSet, mini_s3: MiniS3Server, tmp_path: Path, forked: Forked
) -> None:
    """Four ranks: broadcast for dp 2 x tp 2 with the loop's own collectives; pp 2 x cp 2; a rank that differs."""
    mini_s3.clear_log()
    jobs: list[Any] = [["train", {"dp_size": 2, "tp_size": 2}, True]]
    jobs += [["portions", {"dp_size": 1, "pp_size": 2, "cp_size": 2}, True], ["differ", {"dp_size": 4}, False]]
    codes = run(forked, tmp_path, samples, 4, jobs)
    errors = [(tmp_path / f"output-{rank}").read_text()[-2000:] for rank in range(4)]
    assert codes == [0] * 4, errors
    trained = results(tmp_path, "train", range(4))
    dataset = samples.open(seed=5)
    options: dict[str, Any] = {"global_batch_size": 24, "last_batch": "pad"}
    for data_rank in range(2):
        expected = []
        with DataLoader(dataset, device_mesh=mesh_of(2, data_rank), **options) as loader:
            for stop in (3, 99, 99):
                expected += [batch["__key__"] for batch, _ in zip(loader, range(stop), strict=False)]
        assert [one["keys"] for one in trained[2 * data_rank : 2 * data_rank + 2]] == [expected, expected]
    assert all(one["states"] == trained[0]["states"] for one in trained)
    with DataLoader(dataset, device_mesh=mesh_of(1, 0), **options) as loader:
        whole = [batch["vec.npy"].tolist() for batch in loader]
    parts = results(tmp_path, "portions", range(4))
    rows = ["__key__", "__num_samples__", "__url__", "__valid__"]
    assert [one["entries"] for one in parts] == [[*rows, "vec.npy"]] * 2 + [sorted([*rows, "cls"])] * 2
    assert [one["rows"] for one in parts] == [[24] * 9] * 4
    joined = [
        [left + right for left, right in zip(*both, strict=True)]
        for both in zip(parts[0]["vectors"], parts[1]["vectors"], strict=True)
    ]
    assert joined == whole
    told = [one["error"] for one in results(tmp_path, "differ", range(4))]
    assert told == [told[0]] * 4
    assert told[0][0] == "AgreementError"
    assert "rank 2: global_batch_size is 25; most of the 4 ranks have 24" in told[0][1]
    assert data_gets(mini_s3.log(), samples.url)


def test_windows_of_recordings_are_sent_whole(samples: SampleSet, tmp_path: Path, forked: Forked) -> None:
    """Frames, steps and masks, before and after a resume: what each data rank gets if it reads for itself."""
    folder = recordings.write(tmp_path / "recordings", recordings.of_set(3))
    codes = run(forked, tmp_path, samples, 4, [["windows", {"dp_size": 2, "tp_size": 2}, True]], recordings=str(folder))
    assert codes == [0] * 4, [(tmp_path / f"output-{rank}").read_text()[-2000:] for rank in range(4)]
    sent = results(tmp_path, "windows", range(4))
    dataset = Windows(StreamingDataset(str(folder), seed=5), **WINDOWS)
    for data_rank in range(2):
        with DataLoader(
            dataset, device_mesh=mesh_of(2, data_rank), global_batch_size=24, last_batch="pad"
        ) as loader:  # fmt: skip
            expected = [digest_of(batch) for batch in loader]
        assert len(expected) > 3
        assert [one["digests"] for one in sent[2 * data_rank : 2 * data_rank + 2]] == [expected, expected]


def test_a_reader_that_dies_ends_the_others(samples: SampleSet, tmp_path: Path, forked: Forked) -> None:
    """At once and with a message, not at the time-out."""
    codes = run(forked, tmp_path, samples, 3, [["die", {"dp_size": 1, "tp_size": 3}, True]])
    assert codes[0] == 17
    for one in results(tmp_path, "die", range(1, 3)):
        assert one["error"][0] == "ReplicaError"
        assert one["error"][1].startswith("rank 0, which reads for this one, is gone")
        assert one["batches"] >= 2
