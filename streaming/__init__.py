"""Stream WebDataset tar shards from cloud storage into PyTorch training.

There are three concepts: a ``StreamingDataset`` (the samples), an ``infra.DeviceMesh`` (this process's place in the
job, detected automatically) and a ``DataLoader`` (the loop). Names are imported on first use, so that tools and
``import streaming.errors`` need not import torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if sys.platform not in ("linux", "darwin"):
    raise ImportError(
        f"shardstream runs on Linux and macOS, not on {sys.platform}: it needs flock, positioned reads and anonymous "
        "memory maps. On Windows use WSL 2 (`wsl --install`) and install shardstream there"
    )
try:
    from infra import MeshFinder as _MeshFinder  # noqa: F401  ours has one
except ImportError as _error:
    _found = getattr(sys.modules.get("infra"), "__file__", None) or "a package without a file"
    _ours = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "infra", "__init__.py")
    raise ImportError(
        f"import infra: {_found} shadows shardstream's own package of that name, {_ours}. Rename the former, or remove "
        "its folder from PYTHONPATH. If it lies beside your script, whose folder Python searches first, start the "
        "script from elsewhere as `python -m package.script`"
    ) from _error

from streaming.common.migration_hints.names import no_attribute as _no_attribute
from streaming.types import VERSION as __version__  # noqa: F401, N811  a constant under its conventional name

if TYPE_CHECKING:
    from streaming.build.batches.jagged import Jagged
    from streaming.build.batches.portion import StageFields
    from streaming.build.batches.sequence import SequenceSlice
    from streaming.build.decode.sound import Sound
    from streaming.build.decode.video import Video
    from streaming.loader import DataLoader
    from streaming.mesh_fetcher import DeviceMeshFetcher
    from streaming.order.plan.schedule import Schedule
    from streaming.order.plan.settings import ShuffleConfig
    from streaming.others.remote import BatchHandle, RemoteBatch
    from streaming.others.torch_datasets.mesh_sampler import DeviceMeshSampler
    from streaming.others.torch_datasets.options import OrdinaryDataset
    from streaming.others.torch_datasets.retry import RetrySampler
    from streaming.run.device.prefetcher import DevicePrefetcher
    from streaming.run.options.remote_group import RemoteGroup
    from streaming.run.replicas.options import Broadcast
    from streaming.run.tickets.tickets import Tickets
    from streaming.sets.datasets.balanced import Balanced
    from streaming.sets.datasets.curriculum import Curriculum
    from streaming.sets.datasets.dataset import StreamingDataset
    from streaming.sets.datasets.mixture import Mixture
    from streaming.sets.datasets.packed import Packed
    from streaming.sets.datasets.table_file import TableDataset
    from streaming.sets.datasets.windows import Windows
    from streaming.torch_view import TorchIterable
    from streaming.wrappers import as_torch, one_behind

_HOMES = {
    "Balanced": "streaming.sets.datasets.balanced",
    "BatchHandle": "streaming.others.remote",
    "Broadcast": "streaming.run.replicas.options",
    "Curriculum": "streaming.sets.datasets.curriculum",
    "DataLoader": "streaming.loader",
    "DeviceMeshFetcher": "streaming.mesh_fetcher",
    "DeviceMeshSampler": "streaming.others.torch_datasets.mesh_sampler",
    "DevicePrefetcher": "streaming.run.device.prefetcher",
    "Jagged": "streaming.build.batches.jagged",
    "Mixture": "streaming.sets.datasets.mixture",
    "OrdinaryDataset": "streaming.others.torch_datasets.options",
    "Packed": "streaming.sets.datasets.packed",
    "RemoteBatch": "streaming.others.remote",
    "RemoteGroup": "streaming.run.options.remote_group",
    "RetrySampler": "streaming.others.torch_datasets.retry",
    "Schedule": "streaming.order.plan.schedule",
    "SequenceSlice": "streaming.build.batches.sequence",
    "ShuffleConfig": "streaming.order.plan.settings",
    "Sound": "streaming.build.decode.sound",
    "StageFields": "streaming.build.batches.portion",
    "StreamingDataset": "streaming.sets.datasets.dataset",
    "TableDataset": "streaming.sets.datasets.table_file",
    "Tickets": "streaming.run.tickets.tickets",
    "TorchIterable": "streaming.torch_view",
    "Video": "streaming.build.decode.video",
    "Windows": "streaming.sets.datasets.windows",
    "as_torch": "streaming.wrappers",
    "one_behind": "streaming.wrappers",
}

__all__ = [
    "Balanced",
    "BatchHandle",
    "Broadcast",
    "Curriculum",
    "DataLoader",
    "DeviceMeshFetcher",
    "DeviceMeshSampler",
    "DevicePrefetcher",
    "Jagged",
    "Mixture",
    "OrdinaryDataset",
    "Packed",
    "RemoteBatch",
    "RemoteGroup",
    "RetrySampler",
    "Schedule",
    "SequenceSlice",
    "ShuffleConfig",
    "Sound",
    "StageFields",
    "StreamingDataset",
    "TableDataset",
    "Tickets",
    "TorchIterable",
    "Video",
    "Windows",
    "as_torch",
    "one_behind",
]


def __dir__() -> list[str]:
    """Return all names, including those that are imported on first use."""
    return sorted({*globals(), *_HOMES})


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        home = _HOMES.get(name)
        if home is None:
            raise _no_attribute(__name__, name)
        try:
            value: object = getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"streaming.{name} needs torch, which is not installed; pip install torch. Without it, the tools "
                "work, and sets give samples by number",
                name="torch",
            ) from error
        globals()[name] = value
        return value
