"""Run the ranks of a job in this process, as threads with real gloo connections, and make their meshes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from infra import DeviceMesh
from streaming.run.loops import course
from streaming.run.replicas import group as replica_group

Play = Callable[..., list[Any]]


def played(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return ``play(function, **sizes)``, which calls the function with each rank's mesh, each in its own thread."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    own = threading.local()
    for module in (replica_group, course):
        monkeypatch.setattr(module, "job_store", lambda _: (own.rank, store))
    monkeypatch.setattr(course, "job_world_size", lambda: own.world_size)

    def run(function: Callable[[DeviceMesh], Any], **sizes: int) -> list[Any]:
        meshes = [DeviceMesh.from_sizes(**sizes, rank=0, environ={})]  # type: ignore[arg-type]
        meshes = [meshes[0].with_rank(rank) for rank in range(meshes[0].world_size)]

        def one(mesh: DeviceMesh) -> Any:
            own.rank, own.world_size = mesh.rank, mesh.world_size
            return function(mesh)

        with ThreadPoolExecutor(len(meshes), thread_name_prefix="rank") as ranks:
            futures = [ranks.submit(one, mesh) for mesh in meshes]
            return [future.result(timeout=120) for future in futures]

    return run


def mesh_of(world_size: int, rank: int) -> DeviceMesh:
    """Return the mesh of a rank among purely data-parallel ranks."""
    return DeviceMesh.from_sizes(dp_size=world_size, rank=rank, environ={})
