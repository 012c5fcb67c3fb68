"""Ranks that are threads of this process, with real gloo connections between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from infra import DeviceMesh
from streaming.replicas import group as replica_group

Play = Callable[..., list[Any]]


def played(monkeypatch: pytest.MonkeyPatch) -> Play:
    """``play(function, **sizes)``: the function's results for the mesh of each rank, each in a thread of its own."""
    store, own = dist.HashStore(), threading.local()
    monkeypatch.setattr(replica_group, "job_store", lambda _: (own.rank, store))

    def run(function: Callable[[DeviceMesh], Any], **sizes: int) -> list[Any]:
        meshes = [DeviceMesh.from_sizes(**sizes, rank=0, environ={})]  # type: ignore[arg-type]
        meshes = [meshes[0].with_rank(rank) for rank in range(meshes[0].world_size)]

        def one(mesh: DeviceMesh) -> Any:
            own.rank = mesh.rank
            return function(mesh)

        with ThreadPoolExecutor(len(meshes), thread_name_prefix="rank") as ranks:
            futures = [ranks.submit(one, mesh) for mesh in meshes]
            return [future.result(timeout=120) for future in futures]

    return run
