"""Read in an actor: a loader for each data rank that it serves. Knows nothing of Ray."""

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
    """A reader's report on one step: all that the driver receives of it.

    Attributes:
        ended: There is no such step: the epoch is over.
        state: ``state_dict`` after the step.
        is_end: The step was the last one of its epoch.
        num_samples: By data rank served; None if the batch does not tell.
        num_bytes: By data rank served.
        process: Identifies the process that read it: another one after a restart.
    """

    ended: bool
    state: State
    is_end: bool = False
    num_samples: tuple[int | None, ...] = ()
    num_bytes: tuple[int, ...] = ()
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A request for a batch: batch ``number`` of a run, counted from its start.

    A batch is a pure function of its step, so that repeating the request, even to another process, gives the same
    batch: ``base`` is the state after ``base_number`` batches of the run, and at most a prefetch depth behind.
    """

    run: int
    number: int
    base: State
    base_number: int


class RemoteReader:
    """Batches of some data ranks, step by step. ``read`` is for one thread, everything else for another one.

    ``process`` is for any.

    Nothing is opened before the first call, so that errors in opening are reported like all others.

    Args:
        recipe: The result of `traveling`.
        meshes: The mesh from the view of one rank of each data rank.
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
        """Return a note, and the packed batch of each data rank; after the epoch's last step only the note is valid."""
        loaders = self._open()
        if self._next != (step.run, step.number):
            self._seek(step)
        self._next = None
        batches = [pack(next(one, _END)) for one in self._batches]
        ended = [batch is _END for batch in batches]
        state: State = loaders[0].state_dict()
        self._next = (step.run, step.number + 1)
        if any(ended):  # all of them: ranks end together
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

        Checks it as a loader does, without touching a loader that reads.

        Returns:
            The state, and whether it is the end of an epoch.
        """
        self._open()
        loader = self._make(self._meshes[0])
        if state is not None:
            loader.load_state_dict(state if epoch is None else {**state, "samples_seen": 0})
        if epoch is not None:
            loader.set_epoch(epoch + 1)  # not the current one: what the state says of that place is dropped
            loader.set_epoch(epoch)
        adjusted, is_end = loader.state_dict(), _is_at_end(loader)
        loader.close()
        return adjusted, is_end

    def left(self, state: State) -> int:
        """Return the number of batches of an epoch that follow ``state``."""
        self._open()
        with self._make(self._meshes[0]) as loader:
            loader.load_state_dict(state)
            return int(loader.batches_left)

    def seen(self, state: State) -> dict[str, dict[str, float]]:
        """Return the counts drawn from each source of a mixture before ``state``."""
        self._open()
        with self._make(self._meshes[0]) as loader:
            loader.load_state_dict(state)
            found: dict[str, dict[str, float]] = loader.seen()
            return found

    def reports(self) -> list[dict[str, Any]]:
        """Return the metrics of each data rank."""
        return [loader.metrics() for loader in self._open()]

    def describe(self) -> str:
        """Return what the first running loader waits for."""
        lines = [loader.describe() for loader in self._loaders]
        return next((line for line in lines if line != "not running"), "not running")

    def _open(self) -> tuple[Any, ...]:
        with self._lock:
            if not self._loaders:
                create_dataset, make_loader, options = cloudpickle.loads(self._recipe)
                dataset = create_dataset()
                # An iterator can be used for one pass only: then the loader gets the function.
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
    """Tell whether the position of a loader is the end of an epoch."""
    try:
        return not loader.batches_left
    except TypeError:  # the epoch has no length, or none that is known
        return False
