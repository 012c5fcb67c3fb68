"""Detect where this process runs, and which share of the data it needs.

Launchers, environment variables and meshes are handled here, and nowhere else. The package imports no other package of
ours and no framework, and knows nothing about datasets.
"""

from __future__ import annotations

from infra.errors import MeshError
from infra.finder import MeshFinder
from infra.launch import (
    AgentStore,
    Launch,
    RayCluster,
    agent_store,
    discover,
    is_first_process,
    ranks_here,
    ray_cluster,
)
from infra.mesh import DEFAULT_AXIS_ORDER, DeviceMesh, as_device_mesh

__all__ = [
    "DEFAULT_AXIS_ORDER", "AgentStore", "DeviceMesh", "Launch", "MeshError", "MeshFinder", "RayCluster", "agent_store",
    "as_device_mesh", "discover", "is_first_process", "ranks_here", "ray_cluster",
]  # fmt: skip
