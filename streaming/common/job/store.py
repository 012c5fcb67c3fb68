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
"""For the store of torchrun's agent, which listens before it starts any process."""
_log = logging.getLogger(__name__)
_of_agents: dict[tuple[int, str], Peers | None] = {}
"""By process id, because a forked child is another process, and by start of the job."""


class StoreAddress(Protocol):
    """Address of a key-value store before torch.distributed is set up, and this process's place among its users."""

    @property
    def host(self) -> str:
        """Host."""

    @property
    def port(self) -> int:
        """Port."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def world_size(self) -> int:
        """All of them."""

    @property
    def attempt(self) -> str:
        """Differs between the starts of a job."""


class StorePeers:
    """Peers through a key-value store: that of torch.distributed, or that of torchrun's agent.

    No collective is used: a process that opens a dataset alone (evaluation on rank 0) waits for absent processes no
    longer than the time-out.
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
            if not timeout_s and not self._store.check([key]):  # waiting for 0 s would wait forever
                return None
            self._store.wait([key], timedelta(seconds=timeout_s or 1))
        except dist.DistStoreError:
            return None
        return bytes(self._store.get(key))


def job_store(needed_for: str) -> tuple[int, Any]:
    """Return this process's rank, and the key-value store of torch.distributed, whatever its backend.

    Raises:
        ConfigError: It was not.
    """
    if not _is_set_up():
        raise ConfigError(
            f"{needed_for} needs torch.distributed: call torch.distributed.init_process_group (any backend) before the "
            "first batch"
        )
    return dist.get_rank(), dist.distributed_c10d._get_default_store()


class ProcessGroup:
    """Remember the current process group of torch.distributed, or that there is none; keeps nothing alive."""

    def __init__(self) -> None:
        self._store = weakref.ref(job_store("")[1]) if _is_set_up() else None

    @property
    def is_current(self) -> bool:
        """Whether torch.distributed still has that group, and has not been set up again since."""
        if not _is_set_up():
            return self._store is None
        return self._store is not None and self._store() is job_store("")[1]


def _is_set_up() -> bool:
    # Who set it up has imported it. Not to import it here lets tools open sets where there is no torch.
    return "torch.distributed" in sys.modules and dist.is_available() and dist.is_initialized()


def job_world_size() -> int:
    """Return the number of processes of the job according to torch.distributed; 1 if it is not set up."""
    return dist.get_world_size() if _is_set_up() else 1


def job_peers(agent: StoreAddress | None = None) -> Peers | None:
    """Return the job's processes if torch.distributed is set up with more than one, or its launcher runs a store.

    Args:
        agent: The launcher's store, if there is one; used before torch.distributed is set up.
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
    """Tell processes that join, if torch.distributed was set up for this world, that this one opens nothing."""
    if job_world_size() == world_size > 1:
        with suppress(RuntimeError):  # the store is gone, so nobody joins through it
            go_on(StorePeers(dist.get_rank(), world_size, dist.distributed_c10d._get_default_store()))


def _agent_peers(agent: StoreAddress, pid: int) -> Peers | None:
    """Return peers through the launcher agent's store; None in a process that it did not start.

    Other processes inherit the variables: a pool worker, a program run by a rank, a replacement for a rank. The first
    process to claim a rank is that rank.
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
