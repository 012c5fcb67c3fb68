"""Kill a node of a Ray cluster while a verb's calls run there: what the verb then makes must be what one machine makes.

::

    with TwoNodes(forked) as nodes:                      # a fixture
        with killed_node(nodes, tmp_path) as executor:   # a third node; it is killed in the middle of a call
            copy(source, target, workers=executor.workers, executor=executor)

Of functions that open their executor themselves, ``killed_engine`` takes over ``open_engine``.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shard_tools.running.ray_engine import RayExecutor
from tests.support.clusters.ray_cluster import TwoNodes, wait_for_end
from tests.support.processes.waiting import PATIENCE_S

_NUMBERS = itertools.count()


class MortalExecutor(Executor):
    """Run calls on the cluster; those that come to the doomed node never return from it.

    The first call is sent to that node, and to another one when it is gone; where the rest runs is left to Ray. There,
    a call is repeated again and again until the node is gone, so that it dies in the middle of one, and what it does
    has been done before.

    Args:
        workers: Calls in progress.
        node: Id of the doomed node.
        mark: A file that does not exist; the doomed process writes its number there.
    """

    def __init__(self, workers: int, node: str, mark: Path) -> None:
        self.workers = workers
        self._inner, self._node, self._mark = RayExecutor(workers), node, mark
        self._function: Any = None
        self._mortal: Any = None
        self._is_first = True

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if function is not self._function:  # as RayExecutor: stored once for many calls
            self._function, self._mortal = function, _Mortal(function, self._node, self._mark)
        anywhere, is_first, self._is_first = self._inner._call, self._is_first, False
        if is_first:
            there = NodeAffinitySchedulingStrategy(self._node, soft=True)
            self._inner._call = anywhere.options(scheduling_strategy=there)
        try:
            return self._inner.submit(self._mortal, *args, **kwargs)
        finally:
            self._inner._call = anywhere

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inner.shutdown(wait, cancel_futures=cancel_futures)


@dataclass(frozen=True)
class _Mortal:
    function: Callable[..., Any]
    node: str
    mark: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if ray.get_runtime_context().get_node_id() != self.node:
            return self.function(*args, **kwargs)
        while True:
            self.function(*args, **kwargs)
            if not self.mark.exists():
                draft = self.mark.with_suffix(".draft")
                draft.write_text(str(os.getpid()))
                draft.rename(self.mark)


@contextmanager
def killed_node(nodes: TwoNodes, folder: Path) -> Iterator[MortalExecutor]:
    """Add a node, and kill it once a call has been at work there; check, at the end, that one was.

    Args:
        nodes: A cluster, to which this process is connected.
        folder: For a mark.
    """
    mark, left = folder / "at-work", threading.Event()
    name = f"doomed-{next(_NUMBERS)}"  # Ray notices the death of an earlier one after a while
    node = nodes.add(name)
    executor = MortalExecutor(3, nodes.node_id(name), mark)
    killer = threading.Thread(target=_kill, args=(nodes, node, mark, left))
    killer.start()
    try:
        yield executor
    finally:
        left.set()
        executor.shutdown()
        killer.join()
    assert mark.exists(), "no call came to the doomed node"


def _kill(nodes: TwoNodes, node: Any, mark: Path, left: threading.Event) -> None:
    end_s = time.monotonic() + PATIENCE_S  # then the node is killed all the same, so that nobody waits for it
    while not mark.exists() and not left.wait(0.01) and time.monotonic() < end_s:
        pass
    nodes.kill(node)
    if mark.exists():  # a node dies at once, with its workers, which would otherwise still notice and end
        process = int(mark.read_text())
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        assert wait_for_end(process)


@contextmanager
def killed_engine(nodes: TwoNodes, folder: Path, patch: pytest.MonkeyPatch, *places: str) -> Iterator[MortalExecutor]:
    """Let ``open_engine`` as these modules have it, such as ``shard_tools.cli``, open what ``killed_node`` does."""
    with killed_node(nodes, folder) as executor, patch.context() as patched:

        def opened(name: str, workers: int | None) -> AbstractContextManager[Executor]:
            assert name == "ray", (name, workers)
            return nullcontext(executor)

        for place in places:
            patched.setattr(f"{place}.open_engine", opened)
        yield executor
