"""The other processes of the job, where torch.distributed knows them: for sharing work that each could do alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from streaming.errors import ConfigError
from streaming.job.once import Peers


class TorchPeers:
    """Peers through the key-value store with which torch.distributed was set up.

    No collective: a process that opens a data set alone (evaluation on rank 0) waits for nobody who will not come for
    longer than the time-out.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()

    def turn(self, name: str) -> int:
        """See ``Peers``."""
        return int(self._store.add(f"shardstream/turn/{self.rank}/{name}", 1))

    def leave(self, name: str, data: bytes) -> None:
        """See ``Peers``."""
        self._store.set(f"shardstream/{name}", data)  # type: ignore[arg-type]  # bytes are fine, the stub is narrow

    def find(self, name: str, timeout_s: float) -> bytes | None:
        """See ``Peers``."""
        key = f"shardstream/{name}"
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            return None
        return bytes(self._store.get(key))


def job_store(needed_for: str) -> tuple[int, Any]:
    """Return this process's rank, and the key-value store of torch.distributed, whatever its backend.

    Raises:
        ConfigError: It was not.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"{needed_for} needs torch.distributed: call torch.distributed.init_process_group (any backend) before the "
            "first batch"
        )
    return dist.get_rank(), dist.distributed_c10d._get_default_store()


def job_world_size() -> int:
    """Return the processes of the job, as torch.distributed knows them; 1 where it is not set up."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def job_peers() -> Peers | None:
    """Return the job's processes, if torch.distributed is set up with more than one."""
    return TorchPeers() if job_world_size() > 1 else None
