"""Read in an actor, with a loader for each data rank that it serves. Does not depend on Ray."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle

from infra import DeviceMesh
from streaming.others.remote.wire import num_bytes, num_rows, pack

if TYPE_CHECKING:  # a process that only gets handles of batches needs no decoder
    from streaming.run.options.loader_options import LoaderOptions

State = Mapping[str, Any]
"""The result of ``state_dict``."""
MakeLoader: TypeAlias = "Callable[[Any, LoaderOptions[Any]], Any]"
"""Makes a loader from a dataset and its options."""
_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A reader's report on one step: all that the driver receives from it.

    Attributes:
        ended: Whether the epoch was over before this step.
        state: ``state_dict`` after the step.
        is_end: Whether the step was the last one of its epoch.
        num_samples: Number of rows by data rank served; None if unknown.
        num_bytes: Size of the payload by data rank served.
        process: Identity of the process that read it, which changes with a restart.
    """

    ended: bool
    state: State
    is_end: bool = False
    num_samples: tuple[int | None, ...] = ()
    num_bytes: tuple[int, ...] = ()
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A request for batch ``number`` of a run, counted from its start.

    A batch is a pure function of its step, so repeating the request, even in another process, returns the same batch:
    ``base`` is the state after ``base_number`` batches of the run, at most a prefetch depth earlier.
    """

    run: int
    number: int
    base: State
    base_number: int


class RemoteReader:
    """Read batches of some data ranks, step by step.

    One thread calls ``read``, another one everything else; ``process`` may be called from any thread. Nothing is opened
    before the first call, so errors in opening are reported like all others.

    ``_lock`` guards ``_loaders`` and ``_make`` while they are created; ``_batches`` and ``_next`` belong to the thread
    that calls ``read``.

    Args:
        recipe: The result of `traveling`.
        meshes: For each data rank served, the mesh as seen by one of its ranks.
    """

    def __init__(self, recipe: bytes, meshes: Sequence[DeviceMesh]) -> None:
        self._recipe, self._meshes = recipe, tuple(meshes)
        self._process = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._make: Callable[[DeviceMesh], Any]
        self._loaders: tuple[Any, ...] = ()
        self._batches: tuple[Iterator[Any], ...] = ()
        self._next: tuple[int, int] | None = None

    def read(self, step: Step) -> tuple[Any, ...]:
        """Return a note, and the packed batch of each data rank; only the note is valid after the epoch's last step."""
        loaders = self._open()
        if self._next != (step.run, step.number):
            self._seek(step)
        self._next = None
        batches = [pack(next(one, _END)) for one in self._batches]
        ended = [batch is _END for batch in batches]
        state: State = loaders[0].state_dict()
        self._next = (step.run, step.number + 1)
        if any(ended):  # then all have ended: ranks end together
            return (Note(ended=True, state=state, process=self._process), *(None for _ in batches))
        return (
            Note(
                ended=False,
                state=state,
                is_end=_is_at_end(loaders[0]),
                num_samples=tuple(map(num_rows, batches)),
                num_bytes=tuple(map(num_bytes, batches)),
                process=self._process,
            ),
            *batches,
        )

    def process(self) -> str:
        """Return the identity of this process, which changes with a restart."""
        return self._process

    def length(self) -> int:
        """Return the number of batches in a whole epoch."""
        return len(self._open()[0])

    def adjusted(self, state: State | None, *, epoch: int | None = None) -> tuple[State, bool]:
        """Return a state after ``load_state_dict``, or one at the start of ``epoch`` with the settings of ``state``.

        The state is validated as by a loader, without touching the loaders that read.

        Returns:
            The state, and whether it is the end of an epoch.
        """
        self._open()
        loader = self._make(self._meshes[0])
        if state is not None:
            loader.load_state_dict(state if epoch is None else {**state, "samples_seen": 0})
        if epoch is not None:
            loader.set_epoch(epoch + 1)  # another epoch than the current one, which drops the state's position
            loader.set_epoch(epoch)
        adjusted, is_end = loader.state_dict(), _is_at_end(loader)
        loader.close()
        return adjusted, is_end

    def left(self, state: State) -> int:
        """Return the number of batches of the epoch that follow ``state``."""
        self._open()
        with self._make(self._meshes[0]) as loader:
            loader.load_state_dict(state)
            return int(loader.batches_left)

    def seen(self, state: State) -> dict[str, dict[str, float]]:
        """Return the numbers of samples drawn from each source of a mixture before ``state``."""
        self._open()
        with self._make(self._meshes[0]) as loader:
            loader.load_state_dict(state)
            found: dict[str, dict[str, float]] = loader.seen()
            return found

    def reports(self) -> list[dict[str, Any]]:
        """Return the metrics of each data rank."""
        return [loader.metrics() for loader in self._open()]

    def describe(self) -> str:
        """Describe what the first running loader waits for."""
        lines = [loader.describe() for loader in self._loaders]
        return next((line for line in lines if line != "not running"), "not running")

    def _open(self) -> tuple[Any, ...]:
        with self._lock:
            if not self._loaders:
                create_dataset, make_loader, options = cloudpickle.loads(self._recipe)
                dataset = create_dataset()
                # An iterator serves only one pass, so the loader gets the function instead.
                source = create_dataset if hasattr(dataset, "__next__") else dataset
                self._make = lambda mesh: make_loader(source, options.for_mesh(mesh))
                self._loaders = tuple(map(self._make, self._meshes))
            return self._loaders

    def _seek(self, step: Step) -> None:
        for loader in self._loaders:
            loader.load_state_dict(step.base)
        self._batches = tuple(iter(loader) for loader in self._loaders)
        for _ in range(step.number - step.base_number):
            for batches in self._batches:
                next(batches, None)


def _is_at_end(loader: Any) -> bool:
    """Return whether the position of a loader is the end of an epoch."""
    try:
        return not loader.batches_left
    except TypeError:  # the epoch has no length, or an unknown one
        return False
