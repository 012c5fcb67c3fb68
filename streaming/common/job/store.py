"""Find the other processes of the job through torch.distributed or torchrun's agent."""

from __future__ import annotations

import logging
import os
import platform
import sys
import weakref
from contextlib import suppress
from datetime import timedelta
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Protocol

from streaming.common.job.shared_results import Peers, go_on
from streaming.common.platforms import later
from streaming.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist
else:
    dist = later("torch.distributed", globals(), "dist")

_CONNECT_S = 10.0
"""Time-out for the store of torchrun's agent, which listens before it starts any process."""
_log = logging.getLogger(__name__)
_of_agents: dict[tuple[int, str], Peers | None] = {}
"""Peers by process id, because a forked child is another process, and by attempt of the job."""


class StoreAddress(Protocol):
    """Address of a key-value store before torch.distributed is set up, and this process's place among its users."""

    @property
    def host(self) -> str:
        """Host of the store."""

    @property
    def port(self) -> int:
        """Port of the store."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def attempt(self) -> str:
        """Identifier of the attempt to run the job."""


class StorePeers:
    """Peers through a key-value store: that of torch.distributed, or that of torchrun's agent.

    No collective is used, so a process that opens a dataset alone (evaluation on rank 0) waits for absent processes
    only until the time-out.
    """

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store

    def turn(self, name: str) -> int:
        """See ``Peers``."""
        return int(self._store.add(f"shardstream/turn/{self.rank}/{name}", 1))

    def leave(self, name: str, data: bytes) -> None:
        """See ``Peers``."""
        self._store.set(f"shardstream/{name}", data)

    def find(self, name: str, timeout_s: float) -> bytes | None:
        """See ``Peers``."""
        key = f"shardstream/{name}"
        try:
            if not timeout_s and not self._store.check([key]):  # a wait of 0 s would last forever
                return None
            self._store.wait([key], timedelta(seconds=timeout_s or 1))
        except dist.DistStoreError:
            return None
        return bytes(self._store.get(key))


def job_store(needed_for: str) -> tuple[int, Any]:
    """Return this process's rank, and the key-value store of torch.distributed, for any backend.

    Raises:
        ConfigError: torch.distributed is not initialized.
    """
    if not _is_set_up():
        raise ConfigError(
            f"{needed_for} needs torch.distributed: call torch.distributed.init_process_group (any backend) before the "
            "first batch"
        )
    return dist.get_rank(), dist.distributed_c10d._get_default_store()


class ProcessGroup:
    """A weak reference to the current process group of torch.distributed, or to its absence."""

    def __init__(self) -> None:
        self._store = weakref.ref(job_store("")[1]) if _is_set_up() else None

    @property
    def is_current(self) -> bool:
        """Whether torch.distributed still has that group, and was not initialized again."""
        if not _is_set_up():
            return self._store is None
        return self._store is not None and self._store() is job_store("")[1]


def _is_set_up() -> bool:
    # Initialization has imported it. Because it is not imported here, tools can open datasets without torch.
    return "torch.distributed" in sys.modules and dist.is_available() and dist.is_initialized()


def job_world_size() -> int:
    """Return the number of processes of the job according to torch.distributed; 1 if it is not initialized."""
    return dist.get_world_size() if _is_set_up() else 1


def job_peers(agent: StoreAddress | None = None) -> Peers | None:
    """Return the job's processes if torch.distributed is initialized with several, or the launcher runs a store.

    Args:
        agent: The launcher's store, if there is one; used before torch.distributed is initialized.
    """
    if job_world_size() > 1:
        return StorePeers(dist.get_rank(), job_world_size(), dist.distributed_c10d._get_default_store())
    if agent is None or not dist.is_available() or _is_set_up():
        return None
    own = os.getpid(), agent.attempt
    if own not in _of_agents:
        _of_agents.clear()
        _of_agents[own] = _agent_peers(agent, own[0])
    return _of_agents[own]


def tell_of_going_on(world_size: int) -> None:
    """Inform joining processes, if torch.distributed was initialized for this world, that this one opens nothing."""
    if job_world_size() == world_size > 1:
        with suppress(RuntimeError):  # the store is gone, so no process joins through it
            go_on(StorePeers(dist.get_rank(), world_size, dist.distributed_c10d._get_default_store()))


def _agent_peers(agent: StoreAddress, pid: int) -> Peers | None:
    """Return peers through the launcher agent's store; None in a process that it did not start.

    Other processes inherit the variables, too: a pool worker, a program run by a rank, a replacement for a rank. The
    first process to claim a rank is that rank.
    """
    if parent_process() is not None:
        return None
    distributed: Any = dist
    timeout = timedelta(seconds=_CONNECT_S)
    try:
        whole = distributed.TCPStore(
            agent.host, agent.port, None, is_master=False, timeout=timeout, wait_for_workers=False
        )
        store = distributed.PrefixStore(f"shardstream/{agent.attempt}", whole)
        own = f"{platform.node()} {pid}"
        is_rank = store.compare_set(f"process/{agent.rank}", "", own) == own.encode()
    except RuntimeError as error:  # torch.distributed.DistError is one
        _log.info("the store of torchrun's agent at %s:%d does not answer: %s", agent.host, agent.port, error)
        return None
    return StorePeers(agent.rank, agent.world_size, store) if is_rank else None
