"""The promises under real torchrun processes, reading from a signature-checking S3 server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.code.folders import PROGRAMS, ROOT
from tests.support.processes.forked import Forked, ForkedProcess, all_end
from tests.support.processes.waiting import until
from tests.support.programs.elastic_rank import commits
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import (
    WORLD_SIZES,
    Batches,
    SampleSet,
    data_gets,
    loaders,
    merged,
    play,
    total,
    write_set,
)
from tests.support.tiers import first_here

pytestmark = pytest.mark.distributed

DATASET: dict[str, Any] = {"seed": 5}
SHUFFLED = {"global_batch_size": 24, "last_batch": "pad"}
SPARSE = {"global_batch_size": 13, "last_batch": "partial", "num_workers": 2}


@pytest.fixture(scope="module")
def samples(mini_s3: MiniS3Server) -> SampleSet:
    """202 samples in 7 shards and 54 chunks, in a bucket."""
    bucket = mini_s3.create_bucket("distributed")
    return write_set(f"{bucket}/train", storage_options=mini_s3.storage_options)


def job(name: str, loader: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"name": name, "loader": loader, "state": None, "epochs": 1, "mesh": None, "freeze_after": None, **changed}


@dataclass
class Ranks:
    """The processes of a job, and what they wrote."""

    folder: Path
    world_size: int
    processes: Sequence[ForkedProcess]

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def results(self, name: str) -> list[dict[str, Any]]:
        """What each rank wrote for a job."""
        return [json.loads((self.folder / f"{name}-{rank}.json").read_text()) for rank in range(self.world_size)]

    def finish(self) -> None:
        assert set(all_end(self.processes)) == {0}, self.output.read_text()[-4000:]

    def wait_until_frozen(self, name: str) -> list[dict[str, Any]]:
        """Until every rank has written its file and stands still."""
        paths = [self.folder / f"{name}-{rank}.json" for rank in range(self.world_size)]

        def are_there() -> bool:
            found = all(path.exists() for path in paths)
            assert found or all(one.poll() is None for one in self.processes), self.output.read_text()[-4000:]
            return found

        until(are_there, "every rank writes its file")
        return self.results(name)


def configured(folder: Path, samples: SampleSet, jobs: Sequence[dict[str, Any]]) -> str:
    """Path of the file that tells ranks what to do."""
    folder.mkdir()
    config = {"url": samples.url, "storage_options": dict(samples.storage_options or {}), "dataset": DATASET}
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "folder": str(folder), "jobs": jobs}))
    return str(path)


@contextlib.contextmanager
def ranks(forked: Forked, folder: Path, samples: SampleSet, world_size: int, *jobs: dict[str, Any]) -> Iterator[Ranks]:
    """Ranks as torchrun would start them; killed when left."""
    config = configured(folder, samples, jobs)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ |= {"TORCHELASTIC_RUN_ID": "test", "READY_SERVER": "1"}
    processes = forked.start_ranks(
        PROGRAMS / "torchrun_rank.py", config, world_size=world_size, output=folder / "output", environ=environ
    )
    try:
        yield Ranks(folder, world_size, processes)
    finally:
        for one in processes:
            one.kill()
            one.wait()


def torchrun(forked: Forked, folder: Path, samples: SampleSet, world_size: int, *jobs: dict[str, Any]) -> Ranks:
    """The same, by ``torchrun``, whose ranks are new interpreters, to the end."""
    config = configured(folder, samples, jobs)
    words = ["--standalone", "--nproc-per-node", str(world_size), str(PROGRAMS / "torchrun_rank.py"), config]
    agent = forked.start("from torch.distributed.run import main; main()", *words, output=folder / "output")
    assert agent.wait() == 0, agent.output.read_text()[-4000:]
    return Ranks(folder, world_size, ())


def check_ranks(results: list[dict[str, Any]], world_size: int) -> None:
    """Each process found its own place; all counted the same number of batches; states agree after every batch."""
    assert [one["data_rank"] for one in results] == list(range(world_size))
    assert {one["data_world_size"] for one in results} == {world_size}
    assert len({one["length"] for one in results}) == 1
    assert {len(one["batches"]) for one in results} == {len(results[0]["states"])}
    assert all(one["states"] == results[0]["states"] for one in results)


# What the ranks of each of these worlds get is tested without processes (test_promises.py, test_resume.py). That real
# ones do the same an odd world, the largest one and torchrun's show.
REAL_WORLDS = (3, 8)


@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [
        ("torchrun", 2),
        *first_here([pytest.param("forked", size) for size in REAL_WORLDS], 1),
        *(pytest.param("forked", size, marks=pytest.mark.matrix) for size in WORLD_SIZES if size not in REAL_WORLDS),
    ],
)
def test_promises_of_real_ranks(
    samples: SampleSet, mini_s3: MiniS3Server, tmp_path: Path, forked: Forked, launcher: str, world_size: int
) -> None:
    """P1 to P4 of real processes; what each rank got is, row by row, what one process says that it gets."""
    dataset = samples.open(**DATASET)
    state = _state_after(samples, 4)
    mini_s3.clear_log()
    jobs = [
        job("shuffled", SHUFFLED, epochs=2),
        job("sparse", SPARSE if launcher == "torchrun" else {**SPARSE, "num_workers": 0}),
        job("resumed", SHUFFLED, state=state),
    ]
    if launcher == "torchrun":
        running = torchrun(forked, tmp_path / "run", samples, world_size, *jobs)
    else:
        with ranks(forked, tmp_path / "run", samples, world_size, *jobs) as running:
            running.finish()
    assert not [entry for entry in mini_s3.log() if entry["status"] not in {200, 206}
                and not str(entry["path"]).endswith(".parquet")]  # fmt: skip
    assert data_gets(mini_s3.log(), samples.url)
    keys = Counter(samples.keys)
    for name, options, epochs in (("shuffled", SHUFFLED, 2), ("sparse", SPARSE, 1)):
        results = running.results(name)
        check_ranks(results, world_size)
        got = [one["batches"] for one in results]
        assert got == play(dataset, world_size, epochs=epochs, **options)
        assert merged(got) == merged(play(dataset, 1, epochs=epochs, **options))
        per_epoch = results[0]["length"]
        for epoch in range(epochs):
            assert total(merged(got)[epoch * per_epoch : (epoch + 1) * per_epoch]) == keys
    resumed = merged([one["batches"] for one in running.results("resumed")])
    assert resumed == merged(play(dataset, 1, **SHUFFLED))[4:]


def _state_after(samples: SampleSet, num_batches: int) -> dict[str, Any]:
    (loader,) = loaders(samples.open(**DATASET), 1, **SHUFFLED)
    for _, _ in zip(range(num_batches), loader, strict=False):
        pass
    state: dict[str, Any] = loader.state_dict()
    return state


def test_replicas_agree_on_a_real_torch_mesh(samples: SampleSet, tmp_path: Path, forked: Forked) -> None:
    """P5: tensor and pipeline ranks get the same bytes, for two orders of the axes, over a real process group."""
    axes = {"tp": 2, "dp_shard": 2, "pp": 2}
    orders = [("pp", "dp_shard", "tp"), ("tp", "dp_shard", "pp")]
    jobs = [
        job(f"mesh{number}", SHUFFLED,
            mesh={"shape": [axes[name] for name in names], "names": names, "data_axes": ["dp_shard"]})
        for number, names in enumerate(orders)
    ]  # fmt: skip
    with ranks(forked, tmp_path / "run", samples, 8, *jobs) as running:
        running.finish()
    expected = play(samples.open(**DATASET), 2, **SHUFFLED)
    for number in range(len(orders)):
        results = running.results(f"mesh{number}")
        assert [one["data_rank"] for one in results] == [0, 0, 1, 1, 0, 0, 1, 1]
        for one in results:
            assert one["batches"] == expected[one["data_rank"]]
            twin = results[0] if one["data_rank"] == 0 else results[2]
            assert one["digests"] == twin["digests"]


def restarting_torchrun(num_ranks: int) -> tuple[list[str], dict[str, str]]:
    """The options and variables of docs/trainers.md for a restart in place."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    (found,) = re.findall(r"```bash\nexport (\w+)=(\w+)\ntorchrun (.*) train\.py\n```", page)
    words = found[2].split()
    words[words.index("--nproc-per-node") + 1] = str(num_ranks)
    return words, {found[0]: found[1]}


@pytest.mark.thorough
@pytest.mark.parametrize("interpreter", ["forked", pytest.param("own", marks=pytest.mark.matrix)])
def test_one_rank_of_three_is_killed_and_torchrun_restarts_them_in_place(
    samples: SampleSet, tmp_path: Path, forked: Forked, interpreter: str
) -> None:
    """With what docs/trainers.md says, the job goes on from its checkpoint: each sample of the epoch comes once."""
    config = {"url": samples.url, "storage_options": dict(samples.storage_options or {}), "dataset": DATASET}
    config |= {"folder": str(tmp_path), "loader": SHUFFLED, "epochs": 2, "gates": {"4": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options, environ = restarting_torchrun(3)
    environ |= {"PYTHON_EXEC": forked.python} if interpreter == "forked" else {}
    agent = forked.start(
        "from torch.distributed.run import main; main()", *options, "--monitor-interval", "0.2",
        str(PROGRAMS / "elastic_rank.py"), str(tmp_path / "config.json"),
        output=tmp_path / "output", environ=environ, leads=True,
    )  # fmt: skip
    log = str(tmp_path / "commits.jsonl")

    def stands() -> bool:
        assert agent.poll() is None, agent.output.read_text()[-4000:]
        return len(commits(log)) >= 4

    try:
        until(stands, "all ranks stand still")
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        (tmp_path / "gate-4").touch()
        assert agent.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
    committed = commits(log)
    assert {line["world_size"] for line in committed} == {3}
    batches = [merged([[keys] for keys in line["keys"]])[0] for line in committed]
    assert batches == merged(play(samples.open(**DATASET), 1, epochs=2, **SHUFFLED))
    for epoch in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
        assert total(epoch) == Counter(samples.keys)


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after", "num_workers"), [(4, 3, 0), (3, 1, 2)])
def test_killed_in_mid_epoch_and_resumed_on_another_world_size(
    samples: SampleSet, tmp_path: Path, forked: Forked, before: int, after: int, num_workers: int
) -> None:
    """SIGKILL to every process while readers run ahead; nothing of it stays, and prefix plus rest is the epoch."""
    shared_before = set(os.listdir("/dev/shm"))
    first = job("killed", {**SHUFFLED, "num_workers": num_workers}, freeze_after=4)
    with ranks(forked, tmp_path / "first", samples, before, first) as running:
        results = running.wait_until_frozen("killed")
        assert [one["pid"] for one in results] == [one.pid for one in running.processes]
        for one in running.processes:
            one.kill()
        assert {one.wait() for one in running.processes} == {-signal.SIGKILL}
    check_ranks(results, before)
    prefix: Batches = merged([one["batches"] for one in results])
    assert len(prefix) == 4
    state = results[-1]["states"][-1]
    with ranks(forked, tmp_path / "second", samples, after, job("rest", SHUFFLED, state=state, epochs=2)) as running:
        running.finish()
    rest = merged([one["batches"] for one in running.results("rest")])
    assert prefix + rest == merged(play(samples.open(**DATASET), 1, epochs=2, **SHUFFLED))
    assert total((prefix + rest)[: results[0]["length"]]) == Counter(samples.keys)
    assert not {name for name in set(os.listdir("/dev/shm")) - shared_before if "shardstream" in name}


def test_one_rank_opens_the_set_for_all_before_there_is_a_group(
    samples: SampleSet, mini_s3: MiniS3Server, tmp_path: Path, forked: Forked
) -> None:
    """Under torchrun its agent's store is there from the start; a group these ranks never have."""
    mini_s3.clear_log()
    with ranks(forked, tmp_path / "run", samples, 4, job("whole", SHUFFLED)) as running:
        running.finish()
    opened = [one for one in mini_s3.log() if str(one["path"]).endswith("/_shardstream/chunks.parquet")]
    assert len(opened) == 1
