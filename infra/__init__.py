"""Find where this process runs, and which share of the data it needs.

Launchers, environments and meshes live here: the only place that reads the environment. Imports nothing of ours and no
framework, and knows no data set.
"""

from __future__ import annotations

from infra.errors import MeshError
from infra.finder import MeshFinder
from infra.launch import AgentStore, Launch, agent_store, discover
from infra.mesh import DEFAULT_AXIS_ORDER, DeviceMesh, as_device_mesh

__all__ = [
    "DEFAULT_AXIS_ORDER", "AgentStore", "DeviceMesh", "Launch", "MeshError", "MeshFinder", "agent_store",
    "as_device_mesh", "discover",
]  # fmt: skip
