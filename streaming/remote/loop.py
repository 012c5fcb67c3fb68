"""The driver's side of a remote loader: epochs and a position over readers in actors.

Every step asks all readers for one batch of each data rank. Steps are asked for a few ahead of the consumer, and no
more: that is all the back-pressure there is. What is asked for is a pure function of the step (``reader.Step``), so a
reader that dies is started again by Ray and asked the same again, and nothing is lost or doubled.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import cloudpickle

from infra import DeviceMesh
from streaming.arguments import is_whole
from streaming.errors import ConfigError, StateError
from streaming.metrics import Metrics
from streaming.remote import cluster
from streaming.remote.group import RemoteGroup, as_remote_group, deal
from streaming.remote.handles import BatchHandle, RemoteBatch
from streaming.remote.reader import Note, Reader, State, Step
from streaming.units import format_bytes

_MAX_RECIPE_BYTES = 1 << 20
_DESCRIBE_S = 1.0
_CLOSE_S = 5.0  # Ray complains in the log where an actor is killed at work
_Refs: TypeAlias = list[tuple[Any, ...]]
"""Of one step, by reader: to its note, and to the batch of each data rank it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """The choices behind a remote loop.

    Attributes:
        global_batch_size: Samples of one batch over all data-parallel ranks.
        mesh: Of the processes that train; the driver need not be one of them.
        group: Where the readers are.
        prefetch: Steps asked for ahead of the one handed out.
    """

    global_batch_size: int
    mesh: DeviceMesh
    group: RemoteGroup
    prefetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteState:
    """A reader's state, passed on as it is: readers check it."""

    values: State

    def to_dict(self) -> dict[str, Any]:
        """What ``state_dict`` gives."""
        return dict(self.values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The state of ``to_dict``.

        Raises:
            StateError: It is no dict.
        """
        if not isinstance(values, Mapping):
            raise StateError(f"state: expected the dict of state_dict(), got {type(values).__name__}")
        return cls(values=dict(values))


def travelling(create_dataset: Any, make_loader: Callable[..., Any]) -> bytes:
    """What is sent to the actors: the function that makes the data set, and the loader's options.

    Raises:
        ConfigError: It is no function, or drags data along.
    """
    if not callable(create_dataset) or hasattr(create_dataset, "__getitem__") or hasattr(create_dataset, "__iter__"):
        raise ConfigError(
            f"remote_group: expected a function that makes the data set, so that it is made where it is read; got "
            f"{type(create_dataset).__name__}. Write `def create_dataset(): return StreamingDataset(…)`"
        )
    try:
        recipe: bytes = cloudpickle.dumps((create_dataset, make_loader))
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(f"remote_group: the data set's function, or an option, cannot travel: {error}") from error
    if len(recipe) > _MAX_RECIPE_BYTES:
        raise ConfigError(
            f"remote_group: the data set's function and the options take {format_bytes(len(recipe))}, more than "
            f"{format_bytes(_MAX_RECIPE_BYTES)}: some variable that they use holds data. Load it inside the function"
        )
    return recipe


def open_remote(
    create_dataset: Any, loader: Callable[..., Any], mesh: DeviceMesh, group: RemoteGroup | str, **options: Any
) -> RemoteLoop:
    """The loop whose readers each make ``loader(dataset, device_mesh=…, **options)``.

    Raises:
        ConfigError: An option that makes no sense in an actor; and see ``RemoteLoop``.
    """
    if options.pop("pin_memory"):
        raise ConfigError("pin_memory: not with remote_group; pin what BatchHandle.get() gives, where it is used")
    for name in ("replicate", "stage_fields", "sequence"):
        if options.get(name) not in (None, "read"):
            raise ConfigError(
                f"{name}: not with remote_group, where all replicas share one object; take your part of what "
                "BatchHandle.get() gives"
            )
    prefetch = options["prefetch_factor"]
    if not is_whole(prefetch) or prefetch < 1:
        raise ConfigError(f"prefetch_factor: expected an integer of at least 1, got {prefetch!r}")
    config = RemoteConfig(
        global_batch_size=options["global_batch_size"], mesh=mesh, group=as_remote_group(group), prefetch=prefetch
    )
    return RemoteLoop(create_dataset, partial(loader, **options), config)


class _Ahead:
    """The steps of one run that are under way, in order: ``pending``."""

    def __init__(self, *, ask: Callable[[Step], _Refs], run: int, base: State) -> None:
        self._ask, self._run = ask, run
        self._base, self._base_number = base, 0
        self.pending: deque[_Refs] = deque()

    def ask_for(self, count: int) -> None:
        """See to it that ``count`` steps are under way."""
        while len(self.pending) < count:
            number = self._base_number + len(self.pending)
            step = Step(run=self._run, number=number, base=self._base, base_number=self._base_number)
            self.pending.append(self._ask(step))

    def next(self) -> tuple[list[Note], _Refs]:
        """The notes and references of the first step, by reader, once it is there."""
        refs_of = self.pending[0]
        notes: list[Note] = cluster.get([refs[0] for refs in refs_of])
        self.pending.popleft()
        self._base, self._base_number = notes[0].state, self._base_number + 1
        return notes, refs_of


class RemoteLoop:
    """Epochs one after the other, as ``streaming.loops.base.BaseLoop`` has them. Used by one thread.

    Args:
        create_dataset: Makes the data set, in each actor once.
        make_loader: Makes a loader from it, with ``device_mesh=``.
        config: See there.

    Raises:
        ConfigError: Ray is missing or not started, or what is to travel cannot.
    """

    state_type = RemoteState

    def __init__(self, create_dataset: Any, make_loader: Callable[..., Any], config: RemoteConfig) -> None:
        cluster.check_connected()
        self.config = config
        self.metrics = Metrics()
        self._recipe = travelling(create_dataset, make_loader)
        self._ranks = deal(config.mesh.data_world_size, config.group.num_actors)
        self._actors: list[Any] = []
        self._processes: dict[int, str] = {}
        self._runs = 0
        self._running = 0
        self._known: State | None = None
        self._at_start = True
        self._next_seed: int | None = None
        self._step_bytes: int | None = None
        self._num_batches: int | None = None
        self._under_way: deque[_Refs] = deque()

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return int(self._state()["epoch"])

    @property
    def num_batches(self) -> int:
        """Batches of a whole epoch."""
        if self._num_batches is None:
            self._num_batches = int(self._asked("length"))
        return self._num_batches

    def run(self) -> Iterator[RemoteBatch]:
        """The rest of the epoch in progress, step by step; the position moves on before a step is handed out."""
        base: State = self._state() if self._at_start else self._asked("adjusted", self._state(), rewind=True)
        self._runs += 1
        run = self._running = self._runs
        self._known, self._at_start, self._next_seed = base, False, None
        ahead = _Ahead(ask=self._ask_for, run=run, base=base)
        self._under_way = ahead.pending
        try:
            while True:
                ahead.ask_for(max(1, self._num_ahead()))
                with self.metrics.timed("wait_for_batch_s"):
                    notes, refs_of = ahead.next()
                self._watch(notes)
                if self._running != run:
                    return
                self._known = self._with_seed(notes[0].state)
                if notes[0].ended:
                    self._at_start = True
                    return
                ahead.ask_for(self._num_ahead())
                self.metrics.add("batches")
                yield self._handed_out(notes, refs_of)
                if self._running != run:
                    return
        finally:
            if self._running == run:
                self._running = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; where it is the one in progress, a loaded position is kept."""
        if epoch != self.epoch:
            self._go_to(self._asked("adjusted", self._state(), epoch=epoch))

    def set_seed(self, seed: int) -> None:
        """A new order from the next epoch that starts."""
        self._known = self._asked("adjusted", self._state(), seed=seed)
        self._next_seed = seed

    def state(self) -> RemoteState:
        """The position after the step handed out last."""
        return RemoteState(values=self._state())

    def load(self, state: RemoteState) -> None:
        """Go on from ``state``.

        Raises:
            StateError: A reader refuses it.
        """
        self._go_to(self._asked("adjusted", state.values))

    def report(self) -> dict[str, Any]:
        """Own metrics; those of each data rank's loader (since its reader started) in ``readers``; bad samples."""
        asked = [cluster.ask(actor, "reports") for actor in self._actors]
        readers = [report for reports in cluster.get(asked) for report in reports] if asked else []
        return {
            **self.metrics.snapshot(),
            "bad": [bad for report in readers for bad in report["bad"]],
            "readers": readers,
        }

    def describe(self) -> str:
        """What the first reader that runs waits for, or that Ray has not started it."""
        if not self._running:
            return "not running"
        for number, actor in enumerate(self._actors):
            try:
                line = str(cluster.get(cluster.ask(actor, "describe"), timeout_s=_DESCRIBE_S))
            except TimeoutError:
                group = self.config.group
                return (
                    f"waiting for Ray to start reader {number} of {group.name!r} (num_cpus={group.num_cpus}, "
                    f"resources={dict(group.resources)}), or for the data set to open there"
                )
            if line != "not running":
                return f"reader {number}: {line}"
        return "the consumer has a batch"

    def close(self) -> None:
        """End the actors; handles that were handed out stay good. The loop may be used again; it starts them anew."""
        self._running = 0
        actors, self._actors = self._actors, []
        under_way, self._under_way = self._under_way, deque()
        self._processes.clear()
        cluster.wait([refs[0] for step in under_way for refs in step], timeout_s=_CLOSE_S)
        for actor in actors:
            cluster.kill(actor)

    def _open(self) -> list[Any]:
        if not self._actors:
            mesh = self.config.mesh
            arguments = [
                (self._recipe, tuple(mesh.with_rank(mesh.replicas_of(data_rank)[0]) for data_rank in ranks))
                for ranks in self._ranks
            ]
            self._actors = cluster.start(Reader, arguments, self.config.group)
        return self._actors

    def _asked(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return cluster.get(cluster.ask(self._open()[0], method, *args, **kwargs))

    def _state(self) -> State:
        if self._known is None:
            self._known = self._asked("adjusted", None)
        return self._known

    def _with_seed(self, state: State) -> State:
        """``state`` with a seed that was set since the run began, which its readers do not know of."""
        return state if self._next_seed is None else {**state, "next_seed": self._next_seed}

    def _go_to(self, state: State) -> None:
        self._running = 0
        self._known, self._at_start, self._next_seed = state, True, None

    def _num_ahead(self) -> int:
        """Steps to be under way or ready: as many as fit, none before the size of one is known."""
        if self._step_bytes is None:
            return 0
        return min(self.config.prefetch, self.config.group.ahead_limit_bytes // max(1, self._step_bytes))

    def _ask_for(self, step: Step) -> _Refs:
        actors = self._open()
        return [cluster.read(actor, step, len(ranks)) for actor, ranks in zip(actors, self._ranks, strict=True)]

    def _watch(self, notes: list[Note]) -> None:
        """Sizes, and who died: readers that are other processes than before."""
        if not notes[0].ended:
            self._step_bytes = max(self._step_bytes or 0, sum(sum(note.num_bytes) for note in notes))
            self.metrics.peak("largest_step_bytes", self._step_bytes)
        for number, note in enumerate(notes):
            if self._processes.setdefault(number, note.process) != note.process:
                self._processes[number] = note.process
                self.metrics.add("reader_restarts")

    def _handed_out(self, notes: list[Note], refs_of: _Refs) -> RemoteBatch:
        state = notes[0].state
        number = -(-int(state["samples_seen"]) // self.config.global_batch_size) - 1
        handles = [
            BatchHandle(
                epoch=int(state["epoch"]), number=number, data_rank=data_rank, num_samples=rows, num_bytes=size, ref=ref
            )
            for ranks, note, refs in zip(self._ranks, notes, refs_of, strict=True)
            for data_rank, rows, size, ref in zip(ranks, note.num_samples, note.num_bytes, refs[1:], strict=True)
        ]
        return RemoteBatch(mesh=self.config.mesh, handles=tuple(handles))
