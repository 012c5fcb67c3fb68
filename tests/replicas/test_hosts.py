"""Several hosts, each with a network of its own, an S3 server beside them, torchrun's agents and gloo between them.

The hosts are network namespaces (``network_hosts.py``). Wrong addresses, ports that only loopback reaches and state
that only one machine has show here, and nowhere in the tests on one host.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import run
from typing import Any, Self

import pytest

from tests.support.clusters.network_hosts import Host, Hosts, why_not
from tests.support.code.folders import PROGRAMS
from tests.support.processes.forked import Forked, ForkedProcess, all_end
from tests.support.processes.waiting import until
from tests.support.programs.elastic_rank import commits
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import SampleSet, merged, play, total, write_set

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(1500), pytest.mark.distributed, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "hosts"),
]  # fmt: skip

DATASET: dict[str, Any] = {"seed": 5}
LOADER = {"global_batch_size": 24, "last_batch": "pad"}
PORT = 29_400
WORLD_S = 400
"""The end of a wait for torchrun's next world. A host is lost after its ten seconds; it waits five more for others."""
RENDEZVOUS = f"keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=5,join_timeout={WORLD_S}"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(4) as made:
        yield made


@pytest.fixture(scope="module")
def store() -> Iterator[MiniS3Server]:
    with MiniS3Server() as server:
        yield server


@pytest.fixture(scope="module")
def samples(store: MiniS3Server) -> SampleSet:
    """202 samples in 7 shards and 54 chunks, in a bucket on none of the hosts."""
    return write_set(f"{store.create_bucket('hosts')}/train", storage_options=store.storage_options)


@pytest.fixture(scope="module")
def opened(hosts: Hosts, store: MiniS3Server, samples: SampleSet) -> Iterator[dict[str, Any]]:
    """How the hosts open these samples."""
    with hosts.offer(store.port) as place:
        options = {**store.storage_options, "endpoint_url": f"http://{place}"}
        yield {"url": samples.url, "storage_options": options, "dataset": DATASET}


def test_hosts_change_nothing_of_this_machines_network() -> None:
    """Else a browser, whose test runs at the same time, gives up its requests."""
    before = set(os.listdir("/sys/class/net"))
    with Hosts(2) as made:
        seen = run(
            ["ip", "-n", made.hosts[0].name, "-br", "address"], check=True, capture_output=True, text=True
        ).stdout
        assert made.hosts[0].address in seen
        assert set(os.listdir("/sys/class/net")) == before


class Job:
    """One torchrun job over several hosts; ``start`` adds a host to it."""

    def __init__(self, forked: Forked, folder: Path, opened: dict[str, Any], first: Host, **config: Any) -> None:
        folder.mkdir()
        self.folder, self._first, self._forked = folder, first, forked
        self._agents: dict[str, ForkedProcess] = {}
        self._hosts: list[Host] = []
        self._config = folder / "config.json"
        self._config.write_text(json.dumps({**opened, "folder": str(folder), **config}))

    def start(self, host: Host, nodes: str, num_processes: int) -> None:
        """Torchrun's agent on ``host``; the first host keeps the rendezvous."""
        words = [
            "--nnodes", nodes, "--nproc-per-node", str(num_processes),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self._first.address}:{PORT}", "--rdzv-id", "hosts",
            "--rdzv-conf", f"{RENDEZVOUS},is_host={str(host is self._first).lower()}", "--local-addr", host.address,
            "--max-restarts", "5", "--monitor-interval", "0.2", str(PROGRAMS / "elastic_rank.py"), str(self._config),
        ]  # fmt: skip
        environ = {
            "GLOO_SOCKET_IFNAME": "eth0",
            # torch 2.13: agents that share one store keep the first round's address, and hosts that join later wait in
            # vain for that of their round.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self._agents[host.name] = self._forked.start(
            PROGRAMS / "elastic_rank.py", *words,
            output=self.folder / f"{host.name}.log", environ=environ, network=host.network, leads=True,
        )  # fmt: skip
        self._hosts.append(host)

    def kill(self, host: Host) -> None:
        """The host is gone, with its agent and its rank."""
        host.kill()
        self._agents.pop(host.name).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for host in self._hosts:
            host.kill()
        for agent in self._agents.values():
            agent.wait()

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def finish(self) -> None:
        """Wait until all agents have ended well."""
        for agent in self._agents.values():
            assert agent.wait(WORLD_S) == 0, self.logs()

    def wait_for_commits(self, count: int) -> None:
        log = str(self.folder / "commits.jsonl")
        until(lambda: len(commits(log)) >= count, f"{count} steps are committed", within_s=WORLD_S, details=self.logs)


GRIDS: dict[str, dict[str, Any]] = {
    "dp-tp-pp": {"shape": [2, 2, 2], "names": ["pp", "dp", "tp"], "data_axes": ["dp"]},
    "dp-cp-tp": {"shape": [2, 2, 2], "names": ["dp", "cp", "tp"], "data_axes": ["dp"]},
    "hsdp-cp": {"shape": [2, 2, 2], "names": ["dp_replicate", "cp", "dp_shard"],
                "data_axes": ["dp_replicate", "dp_shard"]},
}  # fmt: skip


@contextmanager
def ranks_on(
    forked: Forked, hosts: Sequence[Host], per_host: int, output: Path, script: Path, config: Path
) -> Iterator[list[ForkedProcess]]:
    """Ranks with torchrun's variables, on their hosts; rank 0 keeps the store."""
    environ = {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    environ |= {
        "WORLD_SIZE": str(per_host * len(hosts)),
        "LOCAL_WORLD_SIZE": str(per_host),
        "TORCHELASTIC_RUN_ID": "hosts",
    }
    ranks = []
    try:
        for number, host in enumerate(hosts):
            place = {"GROUP_RANK": str(number), "GROUP_WORLD_SIZE": str(len(hosts))}
            for local_rank in range(per_host):
                rank = {"RANK": str(number * per_host + local_rank), "LOCAL_RANK": str(local_rank)}
                here = environ | place | rank
                ranks.append(forked.start(script, str(config), output=output, environ=here, network=host.network))
        yield ranks
    finally:
        for one in ranks:
            one.kill()


def test_grids_of_eight_processes_on_two_hosts(
    hosts: Hosts, store: MiniS3Server, opened: dict[str, Any], samples: SampleSet, tmp_path: Path, forked: Forked
) -> None:
    """P1, P2 and P5, counted from what was received: data ranks partition the epoch, their replicas agree."""
    jobs = [
        {"name": name, "loader": LOADER, "state": None, "epochs": 1, "mesh": grid, "freeze_after": None}
        for name, grid in GRIDS.items()
    ]
    store.clear_log()
    (tmp_path / "config.json").write_text(json.dumps({**opened, "folder": str(tmp_path), "jobs": jobs}))
    output, script = tmp_path / "output", PROGRAMS / "torchrun_rank.py"
    with ranks_on(forked, hosts.hosts[:2], 4, output, script, tmp_path / "config.json") as ranks:
        assert set(all_end(ranks)) == {0}, output.read_text()[-4000:]
    dataset = samples.open(**DATASET)
    for name, grid in GRIDS.items():
        results = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(8)]
        sizes = dict(zip(grid["names"], grid["shape"], strict=True))
        data_size = 1
        for axis in grid["data_axes"]:
            data_size *= sizes[axis]
        by_data_rank: dict[int, list[dict[str, Any]]] = {}
        for one in results:
            by_data_rank.setdefault(one["data_rank"], []).append(one)
        assert sorted(by_data_rank) == list(range(data_size))
        for replicas in by_data_rank.values():
            assert len(replicas) == 8 // data_size
            assert all(one["digests"] == replicas[0]["digests"] for one in replicas)
        got = [by_data_rank[rank][0]["batches"] for rank in range(data_size)]
        assert {len(batches) for batches in got} == {results[0]["length"]}
        assert total(merged(got)) == Counter(samples.keys)
        assert got == play(dataset, data_size, **LOADER)


def test_a_host_is_killed_and_others_join(
    hosts: Hosts, opened: dict[str, Any], samples: SampleSet, tmp_path: Path, forked: Forked
) -> None:
    """Three hosts, then two, then four, in one job: the global batches are those of an undisturbed run."""
    first, second, lost, fourth = hosts.hosts
    sizes = {"gates": {"3": 3, "7": 2}, "worlds": {"0": 3, "3": 2, "7": 4}}
    with Job(forked, tmp_path / "elastic", opened, first, loader=LOADER, epochs=2, **sizes) as job:
        for host in (first, second, lost):
            job.start(host, "2:4", 1)
        job.wait_for_commits(3)
        job.kill(lost)
        (job.folder / "gate-3").touch()  # the others miss it, and begin anew when torchrun counts it as lost
        job.wait_for_commits(7)
        for host in (lost, fourth):  # the lost one comes back, with one more
            job.start(host, "2:4", 1)
        job.finish()
    committed = commits(str(job.folder / "commits.jsonl"))
    assert [line["world_size"] for line in committed[:8]] == [3, 3, 3, 2, 2, 2, 2, 4], job.logs()
    assert {line["world_size"] for line in committed[8:]} == {4}
    expected = merged(play(samples.open(**DATASET), 1, epochs=2, **LOADER))
    assert merged_steps(committed) == expected
    per_epoch = len(expected) // 2
    for epoch in range(2):
        batches = merged_steps(committed)[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert total(batches) == Counter(samples.keys)


def merged_steps(committed: list[dict[str, Any]]) -> Any:
    """Each step's global batch, as ``merged`` gives it."""
    return [merged([[keys] for keys in line["keys"]])[0] for line in committed]
