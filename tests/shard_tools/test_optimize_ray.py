"""A function on a cluster of three nodes, one of which is killed, gives the bytes that it gives here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from shard_tools import ShardWriter, optimize
from shard_tools.change.functions.mapped import MapOptions, map_set
from shard_tools.change.functions.run import Running
from streaming.errors import WorkerDiedError
from tests.support.clusters.killed_node import killed_engine
from tests.support.clusters.ray_cluster import TwoNodes
from tests.support.processes.forked import Forked
from tests.support.sources.conversions import contents, members

pytestmark = [pytest.mark.thorough, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes(forked: Forked) -> Iterator[TwoNodes]:
    with TwoNodes(forked) as nodes:
        yield nodes


def test_a_killed_node_costs_its_own_work_only(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(number: int) -> Any:
        if number % 5 == 2:
            return [{"npy": np.full(number, part)} for part in range(3)]
        return None if number % 7 == 3 else {"bin": bytes([number]) * 20_000}

    options: dict[str, Any] = {"max_bytes": 200_000, "progress": False}
    optimize(made, range(150), tmp_path / "here", workers=0, **options)
    with killed_engine(nodes, tmp_path, monkeypatch, "shard_tools.change.functions.run"):
        report = optimize(made, range(150), tmp_path / "ray", engine="ray", workers=3, overwrite=True, **options)
    assert report.num_inputs == 150
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")


def test_what_ends_processes_there_is_named(nodes: TwoNodes, tmp_path: Path) -> None:
    def dies(number: int) -> Any:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"txt": str(number)}

    with pytest.raises(WorkerDiedError, match="ends worker processes at this input") as raised:
        optimize(dies, range(8), tmp_path / "t", engine="ray", workers=2, progress=False)
    assert "failed on input 5 (5)" in "\n".join(raised.value.__notes__)
    assert ray.is_initialized()


def test_map_is_the_same_bytes_on_ray(nodes: TwoNodes, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/in/{{:06d}}.tar", max_samples=9) as writer:
        for number in range(60):
            writer.write({"__key__": f"{number:03d}", "txt": "x" * number, "cls": number % 3, "json": {"n": number}})
    options = MapOptions(max_samples=11)
    for engine, workers in (("local", 0), ("ray", 2)):
        running = Running(engine=engine, workers=workers)
        map_set(f"{tmp_path}/in", f"{tmp_path}/{engine}", "made_samples:changed", options=options, running=running)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert members(tmp_path / "ray")
