"""Where does this process run, and which share of the data does it need.

`infra` imports nothing of ours and no framework, and is the only place that reads the environment.
"""

from __future__ import annotations

from infra.errors import MeshError
from infra.finder import MeshFinder
from infra.launch import Launch, discover
from infra.mesh import DEFAULT_AXIS_ORDER, DeviceMesh, as_device_mesh

__all__ = ["DEFAULT_AXIS_ORDER", "DeviceMesh", "Launch", "MeshError", "MeshFinder", "as_device_mesh", "discover"]
