"""Watch which calls a cluster whose node dies makes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from tests.support.clusters.killed_node import MortalExecutor


class Watched(Executor):
    """Send calls of one function to an executor whose node dies, and count the calls that end on each node.

    Args:
        mortal: The executor.
        folder: For the counts.
        name: Name of the function; ``""``: every one.
    """

    def __init__(self, mortal: MortalExecutor, folder: Path, name: str = "") -> None:
        self.mortal, self._folder, self._name = mortal, folder, name
        self._counting: dict[int, _Counting] = {}
        self.num_calls = 0
        folder.mkdir()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        counting = self._counting.setdefault(id(function), _Counting(function, self._folder))
        self.num_calls += 1
        inner: Any = getattr(function, "function", function)  # what a look for shared files is put before
        name = getattr(getattr(inner, "func", inner), "__name__", "")
        executor = self.mortal if not self._name or name == self._name else self.mortal._inner
        return executor.submit(counting, *args, **kwargs)

    def check_repeats(self) -> None:
        """Check that no call of a node that lived was made again, and that none was lost with the other node.

        A call that ended there is made again unless its result had left the node before it died.
        """
        ended = Counter({path.name: path.stat().st_size for path in self._folder.iterdir()})
        there = ended.pop(self.mortal._node)
        assert there > 0
        assert ended.total() <= self.num_calls <= ended.total() + there, (ended, there, self.num_calls)
        assert self.num_calls >= self.mortal.workers


@dataclass(frozen=True)
class _Counting:
    function: Callable[..., Any]
    folder: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        with (self.folder / ray.get_runtime_context().get_node_id()).open("ab") as ended:
            ended.write(b".")
        return result
