"""Hold the loop of a loader in this process: ``LoopCore``; every loader has one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from infra import DeviceMesh, MeshFinder
from streaming.common.arguments import checked_int, is_whole
from streaming.common.job.store import tell_of_going_on
from streaming.errors import ConfigError
from streaming.order.plan.order import ENDLESS
from streaming.order.plan.settings import Shape
from streaming.order.plan.state import LoaderState
from streaming.others.torch_datasets.kinds import resolve_dataset
from streaming.run.engine.workers.ring import PageLocker
from streaming.run.epochs.iterator import Loop
from streaming.run.loops.descriptions import Announcer
from streaming.run.loops.epoch_loop import EpochLoop
from streaming.run.loops.opening import OpenLoop
from streaming.run.loops.options import no_dataset, refuse_what_deals
from streaming.run.options.loader_options import LoaderOptions
from streaming.sets.datasets.face import DataSet

_log = logging.getLogger("streaming.loader")  # one name for all loaders, by which users filter
Opens: TypeAlias = Callable[[Any, LoaderOptions[Any], Shape, DeviceMesh], OpenLoop]
"""Opens the loop over a dataset; loaders differ in which datasets they take."""


class LoopCore:
    """Hold the loop for this process's place in the mesh, and open it again when that place changes.

    The mesh may be found late, differ in the process to which a loader is sent, or be changed by ``remesh``. Loaded
    states and settings hold in each mesh, since positions count samples over all ranks. Used by one thread.

    Args:
        dataset: The dataset, or a function that makes one.
        options: The loader's options.
        opens: Opens the loop in a mesh.

    Attributes:
        options: The options with which the loop is opened again.
        finder: Finds the mesh.
        shape: Shape of the batches.
        loop: The loop.
        dataset: The dataset that is read.
        check: Compares the loop with those of other ranks; None: nothing is compared.
        generation: Number of changes by ``remesh``.
    """

    loop: Loop

    def __init__(self, dataset: Any, options: LoaderOptions[Any], opens: Opens) -> None:
        if isinstance(dataset, str):
            raise no_dataset(dataset)
        self.options = options
        self.generation = 0
        self._given, self._opens = dataset, opens
        self._loaded: Mapping[str, Any] | None = None
        self._locker: PageLocker | None = None
        self.finder = MeshFinder(options.device_mesh)
        self._open(self.finder.mesh)

    def _open(self, mesh: DeviceMesh) -> None:
        """Open the loop for this process's place in a mesh."""
        shape = self.options.shape(mesh)
        opened = self._opens(self._given, self.options, shape, mesh)
        self._given, self.dataset, self.check = opened.given, opened.dataset, opened.check
        self.shape, self.loop = shape, opened.loop
        names = self.options.as_tuple
        self.loop.as_tuple = None if names is None else tuple(names)
        if opened.announces:
            self.loop.announce = Announcer(self.dataset, self.loop, self.finder)

    def now(self, *, to_read: bool = False) -> Loop:
        """Return the loop, opened again if this process's place in the mesh has changed since the loader was created.

        Args:
            to_read: Whether a run begins, from which on the mesh cannot change by itself.
        """
        finder, old = self.finder, self.loop
        if not finder.look_again(to_read=to_read):
            return old
        _log.info(
            "this process is rank %d of %d (found by: %s), unlike when the loader was made; the plan is made again",
            finder.mesh.rank, finder.mesh.world_size, finder.found_by,
        )  # fmt: skip
        old.close()
        self._open(finder.mesh)
        if self._loaded is not None:
            self.load(self._loaded)
        self.loop.succeed(old)
        self.page_lock(self._locker)
        return self.loop

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``, even in a mesh that is found later.

        Raises:
            StateError: The state is malformed or belongs to another dataset.
        """
        self.loop.load(self.loop.state_type.from_dict(state))
        self._loaded = state

    @property
    def was_loaded(self) -> bool:
        """Whether a state was loaded."""
        return self._loaded is not None

    def page_lock(self, locker: PageLocker | None) -> None:
        """Build batches in page-locked memory from now on, even in a mesh that is found later; None turns this off."""
        self._locker = locker
        self.loop.page_lock(locker)

    def remesh(self, dp_rank: int, dp_size: int, at: Mapping[str, Any] | int) -> None:
        """Continue from ``at`` in another world. If this raises, nothing has changed.

        Raises:
            ConfigError: A number is out of range, or the loop cannot change its world.
            StateError: The state is malformed, or belongs to another dataset.
        """
        loop, old, size = self.now(), self.finder.mesh, self.shape.global_batch_size
        if not isinstance(loop, EpochLoop):
            raise ConfigError(f"remesh: {loop.no_remesh}")
        checked_int("remesh: dp_size", dp_size, 1, 2**31 - 1)
        mesh = old.with_data_rank(checked_int("remesh: dp_rank", dp_rank, 0, dp_size - 1), int(dp_size))
        position, number = _committed(at, size), self.generation + 1
        who = f"data-parallel rank {mesh.data_rank} of {mesh.data_world_size}"
        dropped = loop.remesh(mesh, position, f"remesh() to {who}, generation {number},") // size
        self.generation, self.shape, self.finder = number, loop.shape, MeshFinder(mesh)
        self._loaded = loop.state().to_dict()
        self.options = self.options.with_sizes(loop.shape)
        loop.announce = Announcer(self.dataset, loop, self.finder)
        if self.check is not None:
            self.check = self.check.opened(mesh)
        tell_of_going_on(mesh.world_size)
        place = loop.position.place
        _log.info(
            "remesh: %s (it was %d of %d), generation %d: continues in epoch %d after %d samples; %d of the batches "
            "delivered come again", who, old.data_rank, old.data_world_size, number, place.epoch, place.samples_seen,
            dropped,
        )  # fmt: skip

    def sent(self) -> dict[str, Any]:
        """Return the dataset, options and state with which another process continues from here.

        If no mesh was given, the other process detects its own.
        """
        mesh = self.finder.mesh if self.finder.found_by == "given" else None
        state: dict[str, Any] = self.loop.state().to_dict()
        is_new = not (state["epoch"] or state["samples_seen"]) and state["next_seed"] is None and self._loaded is None
        is_new = is_new and not self.loop.position.was_seeded and not self.loop.position.place.micro_batches
        is_new = is_new and len(state.get("ledger") or ()) < 2  # else set_weights() was called
        return {"dataset": self._given, "options": self.options.for_mesh(mesh), "state": None if is_new else state}

    def next_place(self) -> tuple[int, int]:
        """Return the epoch and the samples seen at the place of the batch after the one received last."""
        place = self.loop.position.place.onward
        return place.epoch, place.samples_seen


def _committed(at: Any, global_batch_size: int) -> LoaderState | int:
    """Check the argument ``at`` of ``remesh`` and return it as a state or a number of global batches.

    Raises:
        ConfigError, StateError: ``at`` is neither.
    """
    if isinstance(at, Mapping):
        return LoaderState.from_dict(at)
    if is_whole(at):
        return checked_int("remesh: at", at, 0, ENDLESS // global_batch_size)
    raise ConfigError(f"remesh: at: expected a state_dict() or a number of global batches, got {at!r}")


def resolved(dataset: Any) -> Any:
    """Return the dataset, calling the function that makes it if one was given.

    Raises:
        ConfigError: The argument is a loader, or a list of datasets.
    """
    made = dataset if isinstance(dataset, DataSet) else resolve_dataset(dataset)
    refuse_what_deals(made)
    return made
