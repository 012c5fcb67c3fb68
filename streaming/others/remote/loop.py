"""Run the driver's side of a remote loader: epochs and a position over readers in actors.

Every step requests one batch of each data rank from the readers. The number of steps requested ahead of the consumer is
limited, which is the only back-pressure. A request is a pure function of the step (``reader.Step``), so Ray can restart
a dead reader and repeat the request, and nothing is lost or duplicated.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import cloudpickle

from infra import DeviceMesh
from streaming.common.arguments import format_bytes
from streaming.errors import ConfigError, StateError, WorkerError
from streaming.order.plan.ledger import NO_OTHER_SEED
from streaming.order.plan.settings import Shape
from streaming.others.remote import cluster
from streaming.others.remote.handles import BatchHandle, RemoteBatch
from streaming.others.remote.reader import MakeLoader, Note, RemoteReader, State, Step
from streaming.run.epochs.iterator import Loop
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run
from streaming.run.options.remote_group import RemoteGroup, as_remote_group
from streaming.types import override

if TYPE_CHECKING:  # a process that only gets handles of batches needs no decoder
    from streaming.run.options.loader_options import LoaderOptions

_MAX_RECIPE_BYTES = 1 << 20
_DESCRIBE_S = 1.0
_LOOK_S = 1.0
"""Interval in seconds, while waiting for an answer, at which readers are checked for deaths."""
_CLOSE_S = 5.0  # Ray logs a warning if a busy actor is killed
_Refs: TypeAlias = list[tuple[Any, ...]]
"""References of one step, per reader: to its note, and to the batch of each data rank that it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """The settings of a remote loop.

    Attributes:
        shape: Shape of the batches.
        mesh: Mesh of the processes that train; the driver need not be one of them.
        group: The group of readers.
        options: Options of the readers' loaders; ``num_ahead`` is also the number of steps requested ahead of the
            latest one delivered.
    """

    shape: Shape
    mesh: DeviceMesh
    group: RemoteGroup
    options: LoaderOptions[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteState:
    """A reader's state, passed on unchanged; readers validate it."""

    values: State

    def to_dict(self) -> dict[str, Any]:
        """Return the result of ``state_dict``."""
        return dict(self.values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the state from the dict of ``to_dict``.

        Raises:
            StateError: The argument is not a dict.
        """
        if not isinstance(values, Mapping):
            raise StateError(f"state: expected the dict of state_dict(), got {type(values).__name__}")
        return cls(values=dict(values))


def traveling(create_dataset: Any, make_loader: MakeLoader, options: LoaderOptions[Any]) -> bytes:
    """Pickle the functions that make dataset and loader, and the loader's options, for the actors.

    Raises:
        ConfigError: ``create_dataset`` is not a function, or the pickle holds data.
    """
    if not callable(create_dataset) or hasattr(create_dataset, "__getitem__") or hasattr(create_dataset, "__iter__"):
        raise ConfigError(
            f"remote_group: expected a function that makes the data set, so that it is made where it is read; got "
            f"{type(create_dataset).__name__}. Write `def create_dataset(): return StreamingDataset(…)`"
        )
    try:
        recipe: bytes = cloudpickle.dumps((create_dataset, make_loader, options))
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(f"remote_group: the data set's function, or an option, cannot be sent: {error}") from error
    if len(recipe) > _MAX_RECIPE_BYTES:
        raise ConfigError(
            f"remote_group: the data set's function and the options take {format_bytes(len(recipe))}, more than "
            f"{format_bytes(_MAX_RECIPE_BYTES)}: some variable that they use holds data. Load it inside the function"
        )
    return recipe


def open_remote(
    create_dataset: Any, options: LoaderOptions[Any], shape: Shape, mesh: DeviceMesh, make_loader: MakeLoader
) -> RemoteLoop:
    """Return the loop whose readers each make a loader in an actor of the ``remote_group``.

    Raises:
        ConfigError: An option does not apply to actors; see also ``RemoteLoop``.
    """
    shape.check_one_size()
    group, there = as_remote_group(options.remote_group), options.in_actors()
    return RemoteLoop(create_dataset, make_loader, RemoteConfig(shape=shape, mesh=mesh, group=group, options=there))


def deal(num_ranks: int, num_actors: int) -> tuple[range, ...]:
    """Return the data ranks of each actor: consecutive runs whose lengths differ by at most one.

    Every actor has at least one rank.
    """
    count = min(num_ranks, num_actors)
    return tuple(range(one * num_ranks // count, (one + 1) * num_ranks // count) for one in range(count))


class _Ahead:
    """The steps of one run that are in progress, in order: ``pending``."""

    def __init__(
        self, *, ask: Callable[[Step], _Refs], awaited: Callable[[list[Any]], list[Note]], run: int, base: State
    ) -> None:
        self._ask, self._awaited, self._run = ask, awaited, run
        self.base, self._base_number = base, 0
        self.pending: deque[_Refs] = deque()

    def ask_for(self, count: int) -> None:
        """Ensure that ``count`` steps are in progress."""
        while len(self.pending) < count:
            number = self._base_number + len(self.pending)
            step = Step(run=self._run, number=number, base=self.base, base_number=self._base_number)
            self.pending.append(self._ask(step))

    def next(self) -> tuple[list[Note], _Refs]:
        """Return the notes and references of the first step, by reader, once it is ready."""
        refs_of = self.pending[0]
        notes = self._awaited([refs[0] for refs in refs_of])
        self.pending.popleft()
        self.base, self._base_number = notes[0].state, self._base_number + 1
        return notes, refs_of


class _Lives:
    """Count the processes of a reader during one call.

    Args:
        actor: The reader.
        process: Identity of its process at the last answer; None: it has not answered yet.
    """

    def __init__(self, actor: Any, process: str | None) -> None:
        self._actor = actor
        self._seen = set[str]() if process is None else {process}
        self._pending: Any = None

    def look(self) -> None:
        """Record the reader's current process, if it answers.

        Raises:
            WorkerDiedError: The reader died too often.
        """
        if self._pending is None:
            self._pending = cluster.process_of(self._actor)
        elif cluster.wait([self._pending], timeout_s=0):
            self._seen.add(cluster.get(self._pending))
            self._pending = None
        if len(self._seen) - 1 > cluster.MAX_RETRIES:
            raise cluster.died_again()


class RemoteLoop(Loop):
    """Consecutive epochs, read by actors. Used by one thread.

    The detail of a place is the complete state of a reader there; None: no reader has returned it yet.

    Args:
        create_dataset: Makes the dataset, once in each actor.
        make_loader: Makes a loader from it, with the options of ``config``.
        config: See ``RemoteConfig``.

    Raises:
        ConfigError: Ray is missing or not started, or the functions cannot be sent.
    """

    state_type = RemoteState
    can_seek = False
    is_counted = False  # only by the readers
    no_remesh = (
        "the readers of a remote_group are made for one world. Close this loader, make a new DataLoader with the new "
        "device_mesh and call load_state_dict(state)"
    )

    def __init__(self, create_dataset: Any, make_loader: MakeLoader, config: RemoteConfig) -> None:
        super().__init__(config.shape)
        cluster.check_connected()
        self.config = config
        self._recipe = traveling(create_dataset, make_loader, config.options)
        self._ranks = deal(config.mesh.data_world_size, config.group.num_actors)
        self._actors: list[Any] = []
        self._processes: dict[int, str] = {}
        self._num_runs = 0
        self._known: State | None = None  # latest state of a reader, for settings that do not depend on the place
        self._step_bytes: int | None = None
        self._num_batches: int | None = None
        self._under_way: deque[_Refs] = deque()

    @override
    def batches_left(self, samples_seen: int) -> int:
        """See ``Loop``; only for whole epochs."""
        if self._num_batches is None:
            self._num_batches = int(self._first_answer("length"))
        return self._num_batches

    @override
    def left_behind(self, place: Place) -> int:
        if not place.samples_seen:
            return self.num_batches
        return int(self._first_answer("left", self._values_at(place, None)))

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._latest()  # an endless order has no other epoch
        super().set_epoch(epoch)

    @override
    def set_seed(self, seed: int) -> None:
        """See ``Loop``.

        Raises:
            ConfigError: The order is endless.
        """
        if not _has_passes(self._latest()):
            raise ConfigError(NO_OTHER_SEED)
        super().set_seed(seed)

    @override
    def seen(self) -> dict[str, dict[str, float]]:
        """See ``Loop``; counted by a reader."""
        if not self._latest().get("ledger"):
            return super().seen()
        found: dict[str, dict[str, float]] = self._first_answer("seen", self.state().values)
        return found

    def set_weights(self, weights: Any, *, at: int | None, timeout_s: float) -> int:
        """Refuse to change weights, because the readers' loaders hold them.

        Raises:
            ConfigError: Always.
        """
        if not self._latest().get("ledger"):
            return super().set_weights(weights, at=at, timeout_s=timeout_s)
        raise ConfigError(
            "set_weights: not with remote_group, whose readers hold the mixture. Make a loader over a function that "
            "makes the Mixture with the other weights, and give it the state: load_state_dict(loader.state_dict())"
        )

    @override
    def start(self, place: Place, seed: int | None) -> Run:
        base = self._values_at(place, self.position.next_seed)
        if seed is not None:
            base = {**base, "order": {**base["order"], "seed": seed}}
        self._known = base
        self._num_runs += 1
        ahead = _Ahead(ask=self._ask_for, awaited=self._awaited, run=self._num_runs, base=base)
        self._under_way = ahead.pending
        return _RemoteRun(self, ahead)

    @override
    def after_batch(self, place: Place, run: _RemoteRun) -> Place:
        state = self._known = run.state
        return Place(
            epoch=int(state["epoch"]), samples_seen=int(state["samples_seen"]), detail=state, is_end=run.is_over
        )

    @override
    def state_at(self, place: Place) -> RemoteState:
        return RemoteState(values=self._values_at(place, self.position.next_seed))

    def load(self, state: RemoteState) -> None:
        """Continue from ``state``.

        Raises:
            StateError: A reader rejects it.
        """
        values, is_end = self._first_answer("adjusted", state.values)
        self._note(values)
        place = Place(
            epoch=int(values["epoch"]), samples_seen=int(values["samples_seen"]), detail=values, is_end=is_end,
            has_begun=bool(values.get("has_begun")),
        )  # fmt: skip
        self.go_to(place, values["next_seed"])

    def report(self) -> dict[str, Any]:
        """Return this loop's metrics, those of each data rank's loader (since its reader started), and bad samples."""
        asked = [cluster.ask(actor, "reports") for actor in self._actors]
        readers = [report for reports in cluster.get(asked) for report in reports] if asked else []
        return {
            **self.metrics.snapshot(),
            "bad": [bad for report in readers for bad in report["bad"]],
            "readers": readers,
        }

    @override
    def numbers_elsewhere(self) -> dict[int, dict[str, float]]:
        """See ``Loop``; readers that have died or do not answer within seconds are left out."""
        found: dict[int, dict[str, float]] = {}
        asked = [cluster.ask(actor, "reports") for actor in list(self._actors)]
        until_s = time.monotonic() + _DESCRIBE_S
        for ranks, answer in zip(self._ranks, asked, strict=False):  # a closed loop has no actors
            with suppress(TimeoutError, WorkerError):
                reports = cluster.get(answer, timeout_s=max(0.0, until_s - time.monotonic()))
                for data_rank, report in zip(ranks, reports, strict=True):
                    found[data_rank] = {name: one for name, one in report.items() if name != "bad"}
        return found

    def describe(self) -> str:
        """Describe what the first running reader waits for, or report that Ray has not started it."""
        if self.running is None:
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

    @override
    def clean_up(self) -> None:
        """See ``Loop``: nothing here can be left half-done; work in progress ends by itself."""

    def close(self) -> None:
        """End the actors; delivered handles stay valid. The loop may be used again, which restarts the actors."""
        super().close()
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
            self._actors = cluster.start(RemoteReader, arguments, self.config.group)
        return self._actors

    def _first_answer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        (answer,) = self._awaited([cluster.ask(self._open()[0], method, *args, **kwargs)])
        return answer

    def _awaited(self, refs: list[Any]) -> list[Any]:
        """Return the values of references, one for each of the first readers; see ``cluster.get``.

        Raises:
            WorkerDiedError: A reader died too often meanwhile; Ray would repeat the call forever.
        """
        lives = [_Lives(actor, self._processes.get(number)) for number, actor in enumerate(self._actors[: len(refs)])]
        while not cluster.wait(refs, timeout_s=_LOOK_S):
            for one in lives:
                one.look()
        return list(cluster.get(refs))

    def _values_at(self, place: Place, next_seed: int | None) -> State:
        """Return a reader's state at ``place``."""
        state = place.detail
        if state is None:
            state, _ = self._first_answer("adjusted", self._known, epoch=place.epoch)
            self._note(state)
        order = (
            state["order"] if self._known is None else self._known["order"]
        )  # in force since the latest begin or load
        return {
            **state, "order": order, "epoch": place.epoch, "samples_seen": place.samples_seen, "next_seed": next_seed,
            "has_begun": place.has_begun,
        }  # fmt: skip

    def _latest(self) -> State:
        """Return the latest state of a reader; request one if none is known."""
        return self._values_at(self.position.place, None) if self._known is None else self._known

    def _note(self, state: State) -> None:
        """Record a reader's state as the latest one, and whether there are epochs."""
        self._known = state
        self.position.is_endless = state["epoch_size"] is None and not _has_passes(state)

    def num_ahead(self) -> int:
        """Return the number of steps to keep in progress or ready, limited by memory; 0 until a size is known."""
        if self._step_bytes is None:
            return 0
        return min(self.config.options.num_ahead, self.config.group.ahead_limit_bytes // max(1, self._step_bytes))

    def _ask_for(self, step: Step) -> _Refs:
        actors = self._open()
        return [cluster.read(actor, step, len(ranks)) for actor, ranks in zip(actors, self._ranks, strict=True)]

    def watch(self, notes: list[Note]) -> None:
        """Record the sizes, and the readers that died, whose processes have changed."""
        if not notes[0].ended:
            self._step_bytes = max(self._step_bytes or 0, sum(sum(note.num_bytes) for note in notes))
            self.metrics.peak("largest_step_bytes", self._step_bytes)
        for number, note in enumerate(notes):
            if self._processes.setdefault(number, note.process) != note.process:
                self._processes[number] = note.process
                self.metrics.add("reader_restarts")

    def handed_out(self, notes: list[Note], refs_of: _Refs, before: State) -> RemoteBatch:
        """Return the step that followed the state ``before``."""
        epoch, number = int(before["epoch"]), -(-int(before["samples_seen"]) // self.shape.global_batch_size)
        handles = [
            BatchHandle(epoch=epoch, number=number, data_rank=data_rank, num_samples=rows, num_bytes=size, ref=ref)
            for ranks, note, refs in zip(self._ranks, notes, refs_of, strict=True)
            for data_rank, rows, size, ref in zip(ranks, note.num_samples, note.num_bytes, refs[1:], strict=True)
        ]
        return RemoteBatch(mesh=self.config.mesh, handles=tuple(handles))


def _has_passes(state: State) -> bool:
    """Return whether a reader's state belongs to an order with passes, unlike that of an endless mixture."""
    ledger = state.get("ledger")
    return not ledger or ledger[-1].get("quotas") is not None


class _RemoteRun:
    """The steps of the rest of one epoch.

    Attributes:
        state: A reader's state after the latest step.
        is_over: Whether that step was the last one.
    """

    def __init__(self, loop: RemoteLoop, ahead: _Ahead) -> None:
        self._loop, self._ahead = loop, ahead
        self.state = ahead.base
        self.is_over = False

    def __next__(self) -> RemoteBatch:
        """Return the next step."""
        loop, ahead, before = self._loop, self._ahead, self.state
        ahead.ask_for(max(1, loop.num_ahead()))
        with loop.metrics.timed("wait_for_batch_s"):
            notes, refs_of = ahead.next()
        loop.watch(notes)
        if notes[0].ended:
            raise StopIteration
        self.state, self.is_over = notes[0].state, notes[0].is_end
        if not self.is_over:
            ahead.ask_for(loop.num_ahead())
        return loop.handed_out(notes, refs_of, before)

    def close(self) -> None:
        """Do nothing: work in progress ends by itself."""

    def describe(self) -> str:
        """Describe the current activity, for reports."""
        return self._loop.describe()
