"""Ranks and remote readers in this process: threads with real gloo connections between them, actors without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from infra import DeviceMesh
from streaming.others.remote import cluster
from streaming.others.remote.reader import RemoteReader
from streaming.run.loops import course
from streaming.run.replicas import group as replica_group

Play = Callable[..., list[Any]]


def played(monkeypatch: pytest.MonkeyPatch) -> Play:
    """``play(function, **sizes)``: the function's results for the mesh of each rank, each in a thread of its own."""
    store, own = dist.HashStore(), threading.local()
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


def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a remote loader's readers work in this process, without Ray: what they return stands for its reference."""

    def end(reader: RemoteReader) -> None:
        for loader in reader._loaders:
            loader.close()

    monkeypatch.setattr(cluster, "check_connected", lambda: None)
    monkeypatch.setattr(cluster, "start", lambda reader, arguments, group: [reader(*given) for given in arguments])
    monkeypatch.setattr(cluster, "read", lambda reader, step, num_ranks: reader.read(step))
    monkeypatch.setattr(cluster, "ask", lambda reader, method, *args, **named: getattr(reader, method)(*args, **named))
    monkeypatch.setattr(cluster, "get", lambda refs, **_: refs)
    monkeypatch.setattr(cluster, "wait", lambda refs, timeout_s: True)
    monkeypatch.setattr(cluster, "kill", end)
