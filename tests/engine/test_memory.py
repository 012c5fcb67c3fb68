"""The promise of memory_limit, measured: peak over all processes, beyond what the same processes take when idle."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.run.engine.delivery import Depth
from tests.support.code.folders import PROGRAMS
from tests.support.processes.forked import Forked
from tests.support.processes.waiting import until
from tests.support.programs.memory_run import LIMIT_BYTES, NUM_SAMPLES, SAMPLE_BYTES

pytestmark = pytest.mark.thorough

MIB = 1 << 20

OBJECTS = {
    "objects-json": {
        "numbers": [[1_000 + number, number / 7] for number in range(1_000)],
        "records": [{"id": 10**9 + i, "name": f"record {i}", "tags": [f"tag {i % 7}", None]} for i in range(400)],
        "nested": [[[[]]] for _ in range(400)],
    },
    "objects-text": [f"a sentence with the number {i} and a few words after it" for i in range(1_000)],
}
"""What JSON is decoded to: 8 times as large as its text, and twice."""
OBJECT_BATCHES = 96
"""Each takes 3.9 MiB as JSON; the rest of the chunks is filler, since to decode what fills them takes a minute."""
Play = Callable[..., dict[str, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set twice as large as the limit, a larger one with samples of any size, and a tiny one."""
    folder = tmp_path_factory.mktemp("memory")
    for name, count, size in (("tiny", 160, 100), ("large", NUM_SAMPLES["large"], SAMPLE_BYTES)):
        (folder / name).mkdir()
        data = os.urandom(size)
        with ShardWriter(f"{folder}/{name}/{{:06d}}.tar", max_bytes="64MiB") as writer:
            for number in range(count):
                writer.write({"__key__": f"{number:06d}", "bin": data})
    dice, longest = random.Random(1), os.urandom(2 * SAMPLE_BYTES)
    (folder / "mixed").mkdir()
    with ShardWriter(f"{folder}/mixed/{{:06d}}.tar", max_bytes="64MiB", index=False) as writer:
        for number in range(NUM_SAMPLES["mixed"]):
            writer.write({"__key__": f"{number:06d}", "bin": longest[: dice.randrange(2 * SAMPLE_BYTES)]})
    for name, value in OBJECTS.items():
        (folder / name).mkdir()
        text = json.dumps(value).encode()
        with ShardWriter(f"{folder}/{name}/{{:06d}}.tar", max_bytes="64MiB") as writer:
            for number in range(8 * OBJECT_BATCHES):
                filler = os.urandom(LIMIT_BYTES * 5 // 4 // (8 * OBJECT_BATCHES) - len(text))
                writer.write({"__key__": f"{number:06d}", "json": text, "bin": filler})
    (folder / "streamed").mkdir()
    for path in (folder / "large").glob("*.tar"):
        os.link(path, folder / "streamed" / path.name)
    return folder


@pytest.fixture
def play(forked: Forked, folder: Path, tmp_path: Path) -> Play:
    """Runs memory_run.py; what it found."""

    def run(*args: str) -> dict[str, float]:
        found, output = tmp_path / "found", tmp_path / "output"
        environ = {"TMPDIR": str(tmp_path)}
        started = forked.start(
            PROGRAMS / "memory_run.py", str(found), str(folder), *args, output=output, environ=environ
        )
        assert started.wait() == 0, output.read_text()
        report: dict[str, float] = json.loads(found.read_text())
        return report

    return run


more = functools.partial(pytest.param, marks=pytest.mark.matrix)
"""More workers than a few is shown by ``large`` with 8, which share what one has; no worker, where samples are of any
size or decoded to text, by ``streamed`` and ``objects-json``, which take more."""


def test_of_objects_fewer_are_built_ahead_than_of_tensors() -> None:
    """In a worker they lie on a heap, and what pickle keeps of them too; a share is left for what nothing counts."""
    with_tensors, with_objects, local = (Depth(16, 32 * MIB, 2) for _ in range(3))
    with_tensors.saw(4 * MIB, 0, is_local=False)  # 24 MiB less two with the user: two, both in the making
    with_objects.saw(4 * MIB, 4 * MIB, is_local=False)
    local.saw(4 * MIB, 4 * MIB, is_local=True)
    assert (with_tensors.now, with_objects.now, local.now) == (2, 1, 1)
    assert (with_tensors.least_bytes, with_objects.least_bytes) == (16 * MIB, 20 * MIB)
    with_tensors.saw(MIB, 0, is_local=False)
    assert with_tensors.now == 2, "the largest counts"


def test_slow_batches_let_more_be_built_ahead_as_far_as_memory_and_a_factor_allow() -> None:
    roomy, narrow = Depth(4, 1024 * MIB, 2), Depth(4, 32 * MIB, 2)
    for depth in (roomy, narrow):
        depth.saw(2 * MIB, 0, is_local=False)
    assert (roomy.now, narrow.now) == (4, 4)
    seen = []
    for _ in range(8):
        roomy.held_up()
        narrow.held_up()
        seen.append((roomy.now, narrow.now))
    most = narrow.now
    assert [one for one, _ in seen] == [8, 16, 32, 64, 64, 64, 64, 64]
    assert 4 < most < 16
    alike = Depth(16 * 4, 32 * MIB, 2)
    alike.saw(2 * MIB, 0, is_local=False)
    assert alike.now == most, "what memory has room for, however the bound grew"


@pytest.mark.parametrize(("memory_limit", "is_told"), [("16MiB", True), ("160MiB", False)])
def test_batches_that_are_large_for_the_limit_are_told_of_with_the_arithmetic(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, memory_limit: str, is_told: bool
) -> None:
    with ShardWriter(f"{tmp_path}/{{}}.tar") as writer:
        for number in range(24):
            writer.write({"__key__": f"{number}", "txt": "x" * (MIB // 4)})
    dataset = StreamingDataset(f"{tmp_path}/", transform=dict)
    with DataLoader(dataset, batch_size=8, num_threads=2, memory_limit=memory_limit) as loader:
        name = "batches_over_bytes" if is_told else "build_s"
        for _ in loader:  # what the consumer builds itself is not weighed: one is built meanwhile
            until(lambda: loader.metrics().get(name), "a thread builds a batch")
        assert len(list(loader)) == 3
        over_bytes = loader.metrics().get("batches_over_bytes", 0)
    told = [one.getMessage() for one in caplog.records if "is too large for it" in one.getMessage()]
    assert len(told) == is_told, "once, not in every epoch"
    assert (over_bytes > 5 * MIB) == is_told, "three of 2 MiB and 4 MiB to make one, less a quarter of the limit"
    if told:
        assert "a batch of 2.0 MiB" in told[0]
        assert "take up to 10.0 MiB, but batches get only 4.0 MiB of the limit" in told[0]
        assert 'Use memory_limit="48MiB" (by the batches made so far; larger ones need more)' in told[0]


@pytest.mark.parametrize("num_workers", [0, more(2), 8])
def test_all_processes_together_keep_within_the_limit(play: Play, num_workers: int) -> None:
    found = play(str(num_workers))
    assert found["batches"] == NUM_SAMPLES["large"] // 8
    assert found["arena_peak_bytes"] > LIMIT_BYTES / 2, "the limit was really used"
    assert found["arena_peak_bytes"] <= 0.75 * LIMIT_BYTES
    assert found["ring_peak_bytes"] <= 0.25 * LIMIT_BYTES
    assert found["peak_bytes"] - found["idle_bytes"] <= 1.1 * LIMIT_BYTES, found


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [("streamed", 0), more("streamed", 2), more("streamed", 8), more("mixed", 0), ("mixed", 2)],
)
def test_so_they_do_without_an_index(play: Play, name: str, num_workers: int) -> None:
    """Samples of one size, and of any: they leave the window at random, and the next ones need other room."""
    found = play(str(num_workers), name)
    assert found["batches"] == NUM_SAMPLES[name] // 8
    assert 0 < found["arena_peak_bytes"] <= LIMIT_BYTES / 16
    assert found["ring_peak_bytes"] <= 0.25 * LIMIT_BYTES
    assert found["peak_bytes"] - found["idle_bytes"] <= 1.1 * LIMIT_BYTES, found


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        ("objects-json", 0), ("objects-json", 2), more("objects-json", 8),
        more("objects-text", 0), ("objects-text", 2), more("objects-text", 8),
    ],
)  # fmt: skip
def test_decoded_objects_count(play: Play, name: str, num_workers: int) -> None:
    """Numbers, dicts and lists weigh what Python keeps for them, in this process and in those that decode."""
    found = play(str(num_workers), name)
    assert found["arena_peak_bytes"] > LIMIT_BYTES / 2, "the limit was really used"
    assert found["peak_bytes"] - found["idle_bytes"] <= 1.1 * LIMIT_BYTES, found
