"""A Ray cluster of two nodes on this machine, and what it leaves behind."""

from __future__ import annotations

import os
import select
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.experimental import get_local_object_locations

from tests.support.clusters import ray_worker
from tests.support.processes.forked import Forked
from tests.support.processes.waiting import PATIENCE_S, until

STORE_BYTES = 80 << 20
_PATIENT = {"RAY_worker_register_timeout_seconds": "300"}
"""Variables of Ray's processes: by default a worker that starts has a minute, whatever else the machine does."""


class _Cluster(Cluster):
    """As Ray's, which gives a node half a minute to start."""

    def _wait_for_node(self, node: Any, timeout: float = 30) -> None:
        super()._wait_for_node(node, max(timeout, PATIENCE_S))


class TwoNodes:
    """The driver's node ``home`` and another one, ``away``, each with one CPU and a small object store.

    To run on one of them, a task asks for a little of the resource of that name.

    Args:
        forked: Starts the process from which Ray's workers fork.
    """

    def __init__(self, forked: Forked) -> None:
        self._forked = forked

    def __enter__(self) -> Self:
        self._before = shared_files()
        self._children = {child.pid for child in psutil.Process().children(recursive=True)}
        self._folder = tempfile.mkdtemp(prefix="ss-ray-", dir="/tmp")  # Ray's sockets lie in it: the path must be short
        usual = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or tempfile.gettempdir()
        os.makedirs(
            os.path.join(usual, "ray"), exist_ok=True
        )  # Cluster writes its address there, whatever temp_dir says
        workers = f"{self._folder}/workers"
        output = Path(self._folder, "output")
        self._workers = self._forked.start(Path(ray_worker.__file__), "serve", workers, output=output)
        common = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "setup_worker_path": ray_worker.__file__}
        common |= {"include_log_monitor": False, "no_monitor": True}  # nobody reads logs here, nothing is scaled
        self._common, self._environ = common, {ray_worker.SOCKET: workers, **_PATIENT}
        head = {**common, "resources": {"home": 1}, "temp_dir": self._folder, "include_dashboard": False}
        with mock.patch.dict(os.environ, self._environ):  # of Ray's processes
            self._cluster = _Cluster(initialize_head=True, head_node_args=head)
            self._cluster.add_node(**common, resources={"away": 1})

        def is_ready() -> bool:
            assert self._workers.poll() is None, output.read_text()
            return output.read_text() == "ready\n"

        until(is_ready, "workers can start, for one of which ray.init would wait", details=output.read_text)
        self.address: str = self._cluster.address
        ray.init(address=self.address, log_to_driver=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        theirs = self._processes()
        ray.shutdown()
        self._cluster.shutdown()
        self._workers.kill()  # Ray's are gone with their nodes; were one left, it would end now
        self._workers.wait(PATIENCE_S)
        until(lambda: not any(map(_runs, theirs)), "the cluster's processes end, which write into its folder",
              details=lambda: [one for one in theirs if _runs(one)])  # fmt: skip
        shutil.rmtree(self._folder)
        until(lambda: not self._left(), "no process is left that was not there before", details=self._left)
        assert shared_files() - self._before == Counter()

    def _left(self) -> list[psutil.Process]:
        """Return processes below this one that were not there before."""
        return [one for one in psutil.Process().children(recursive=True) if one.pid not in self._children]

    def _processes(self) -> list[psutil.Process]:
        """Those of the cluster, wherever they stand in the tree, and the workers that were forked for it."""
        found: list[psutil.Process] = []
        with suppress(psutil.Error):
            found += psutil.Process(self._workers.pid).children(recursive=True)
        for one in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended
                if any(self._folder in word for word in one.cmdline()) and one.pid != os.getpid():
                    found.append(one)
        return found

    def add(self, resource: str) -> Any:
        """Add a node with one CPU and this resource; wait until it is there."""
        with mock.patch.dict(os.environ, self._environ):
            return self._cluster.add_node(**self._common, resources={resource: 1})

    def kill(self, node: Any) -> None:
        """Kill the processes of a node that was added."""
        self._cluster.remove_node(node, allow_graceful=False)

    def node_id(self, resource: str) -> str:
        """The node with this resource."""
        (found,) = (node["NodeID"] for node in ray.nodes() if node["Alive"] and resource in node["Resources"])
        return str(found)


def _runs(process: psutil.Process) -> bool:
    """Tell whether it does; nobody may ask how one ended that was left behind by its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_files() -> Counter[str]:
    """What lies in shared memory, and is not of pytest's other workers."""
    return Counter(name for name in os.listdir("/dev/shm") if "plasma" in name or "ray" in name)


def wait_for_end(pid: int, timeout_s: float = PATIENCE_S) -> bool:
    """Tell whether the process, which need not be a child, ended in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def locations(refs: list[Any]) -> set[str]:
    """The nodes that hold any of these objects, from the owner's point of view."""
    return {node for facts in get_local_object_locations(refs).values() for node in facts["node_ids"]}
