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
        self.mortal, self._name = mortal, name
        self._counting: dict[int, _Counting] = {}
        self._mortal_calls, self._other_calls = _Calls(folder / "mortal"), _Calls(folder / "other")

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        inner: Any = getattr(function, "function", function)  # what a look for shared files is put before
        name = getattr(getattr(inner, "func", inner), "__name__", "")
        is_mortal = not self._name or name == self._name
        calls = self._mortal_calls if is_mortal else self._other_calls
        calls.num_calls += 1
        counting = self._counting.setdefault(id(function), _Counting(function, calls.folder))
        return (self.mortal if is_mortal else self.mortal._inner).submit(counting, *args, **kwargs)

    def check_repeats(self) -> None:
        """Check that every call ended once.

        A call of the watched function ended on a node that lived, and at least one was at work on the doomed node, from
        which none returns. Calls of other functions were over before, wherever Ray put them.
        """
        ended, others = self._mortal_calls.ended(), self._other_calls.ended()
        assert ended.pop(self.mortal._node) > 0
        assert ended.total() == self._mortal_calls.num_calls, ended
        assert others.total() == self._other_calls.num_calls, others
        assert self._mortal_calls.num_calls + self._other_calls.num_calls >= self.mortal.workers


class _Calls:
    """Calls of one kind: how many were made, and a folder with a byte for each that ended, in a file per node."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_calls = folder, 0
        folder.mkdir(parents=True)

    def ended(self) -> Counter[str]:
        return Counter({path.name: path.stat().st_size for path in self.folder.iterdir()})


@dataclass(frozen=True)
class _Counting:
    function: Callable[..., Any]
    folder: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        with (self.folder / ray.get_runtime_context().get_node_id()).open("ab") as ended:
            ended.write(b".")
        return result
