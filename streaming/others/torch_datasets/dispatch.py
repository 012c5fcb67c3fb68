"""Iterate over a dataset that cannot be sharded on one rank, and deal its samples to all: ``sharding="dispatch"``.

The reading rank runs the loop of a single process, over global batches. Each batch is divided into the rows of every
data rank before it is collated, and is sent like the batches of replicas (``streaming.run.replicas.broadcast``)::

    data rank 0   dataset ─▶ G samples ─▶ rows [0, G/R) [G/R, 2G/R) … ─▶ collate each ═▶ their ranks
    all ranks     batch, the reader's position after it, whether it is the epoch's last

So every rank has the same position, that of a single process, and a state fits any number of ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from infra import DeviceMesh
from streaming.build.batches.collate import without_rows
from streaming.common.forks import in_children
from streaming.order.plan.settings import Shape
from streaming.others.torch_datasets.iterable import IterableLoop
from streaming.others.torch_datasets.options import Collate, OrdinaryConfig, with_valid
from streaming.others.torch_datasets.worker_parts import Cursor, pinned
from streaming.run.epochs.iterator import Loop
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run, RunOver
from streaming.run.replicas.broadcast import Sharing
from streaming.types import override

_KEPT = 3
"""Number of latest batches to keep: the last one that training received, and two that may be read but not delivered.
"""
_log = logging.getLogger(__name__)


class DispatchLoop(IterableLoop):
    """Run epochs over an iterable dataset that only data rank 0 iterates. Used by one thread.

    Without worker processes, the thread that requests batches iterates the dataset; otherwise one worker does. All
    ranks end together, and a state is the same on all of them, for any number of ranks. If a single rank leaves its
    epoch, the others raise ``ReplicaError``; if all leave after the same batch, nothing is lost.

    Args:
        dataset: The user's dataset; only the reading rank iterates it.
        config: The options; more than one worker causes a warning.
    """

    no_remesh = Loop.no_remesh

    def __init__(self, dataset: Any, config: OrdinaryConfig) -> None:
        mesh = config.mesh
        source = mesh.replicas_of(0)[0]
        reads = mesh.rank == source
        if reads and config.num_workers > 1:
            _log.warning(
                'sharding="dispatch": one worker process iterates the data set, of num_workers=%d', config.num_workers
            )
        super().__init__(dataset, _as_one_process(config, reads=reads))
        self._sharing: Sharing | None = None
        self._latest: deque[_Dealt] = deque(maxlen=_KEPT)
        if mesh.world_size > 1:
            ranks = (source, *(rank for rank in mesh.ranks if rank != source))
            broadcast = replace(
                config.broadcast,
                encode=partial(_packed, config.broadcast.encode),
                decode=partial(_unpacked, config.broadcast.decode),
            )
            self._sharing = Sharing(
                {rank: _Share(mesh.with_rank(rank).data_rank) for rank in ranks}, broadcast, mesh.rank,
                pin=_pinned if config.pin_memory and torch.cuda.is_available() else None,
                option='sharding="dispatch"', of="the mesh", reads_inline=True,
            )  # fmt: skip
        self._reads = reads
        in_children(self, DispatchLoop._leave_others_behind)

    @override
    def start(self, place: Place, seed: int | None) -> Run:
        """See ``Loop``.

        Raises:
            ConfigError, ReplicaError: As for ``ReplicaGroup``.
        """
        if self._sharing is None:
            return super().start(place, seed)
        if seed is not None:
            self.order = replace(self.order, seed=seed)
        timed = nullcontext if self._reads else partial(self.metrics.timed, "wait_for_batch_s")
        return _DispatchRun(self._sharing.run(lambda: self._read(place), place), timed)

    def describe(self) -> str:
        """Describe what the loop is waiting for."""
        running = self.running
        return running.describe() if isinstance(running, _DispatchRun) else super().describe()

    def close(self) -> None:
        """Stop the worker process and drop the connections; the next iteration opens new ones."""
        super().close()
        self._forget_others()

    @override
    def clean_up(self) -> None:
        super().clean_up()
        self._forget_others()

    def _forget_others(self) -> None:
        self._latest.clear()
        if self._sharing is not None:
            self._sharing.drop()

    def _leave_others_behind(self) -> None:
        self._latest.clear()
        if self._sharing is not None:
            self._sharing.leave_behind()

    def _read(self, place: Place) -> Run:
        """Start reading at ``place``; with ``epoch_size``, continue the current stream if possible."""
        again = self._read_already(place.detail)
        at = replace(place, detail=again[-1].cursors) if again else place
        left = self.batches_left(place.samples_seen) if self.is_counted else None
        if not again:
            self._latest.clear()
        return _Reading(super().start(at, None), left, again, self._latest)

    def _read_already(self, cursors: object) -> list[_Dealt]:
        """Return the batches that the current stream has yielded after ``cursors`` and training has not received."""
        latest = list(self._latest)
        if self._packets is None or not latest or self._packets.cursors is not latest[-1].cursors:
            return []
        behind = [number for number, dealt in enumerate(latest, 1) if dealt.cursors is cursors]
        return latest[behind[0] :] if behind else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dealt:
    """A global batch on the reading rank.

    Attributes:
        parts: The batch of each data rank; keys are the ranks as text.
        cursors: The reader's position after this batch.
        is_last: Whether this batch is the epoch's last one; only without ``epoch_size``.
    """

    parts: Mapping[str, Any]
    cursors: tuple[Cursor, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Share:
    """Select the packet that the ranks of one data rank receive."""

    data_rank: int

    def __call__(self, dealt: _Dealt, num_samples: int) -> dict[str, Any]:  # noqa: ARG002  of all ranks
        return {"batch": dealt.parts[str(self.data_rank)], "cursors": dealt.cursors, "is_last": dealt.is_last}


@dataclass(frozen=True, slots=True)
class _DealOut:
    """Make the batches of all data ranks from the samples of a global batch.

    Args:
        collate: Collates the samples of one rank.
        shape: Shape of the batches; under ``"drop"``, partial batches never arrive here.
    """

    collate: Collate
    shape: Shape

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch of each data rank; keys are the ranks as text."""
        return {str(rank): self._of_rank(samples, rank) for rank in range(self.shape.num_ranks)}

    def _of_rank(self, samples: list[Any], rank: int) -> Any:
        rows = samples[slice(*self.shape.share(len(samples), rank))]
        if self.shape.last_batch != "pad":
            return self.collate(rows) if rows else without_rows(self.collate, samples[0])
        size, own = self.shape.most_rows, rows or samples[:1]
        valid = torch.from_numpy(np.arange(size) < len(rows))
        return with_valid(self.collate([own[number % len(own)] for number in range(size)]), valid)


class _Reading(RunOver):
    """A run on the reading rank: the global batches of one epoch.

    Args:
        run: The run of the loop as a single process.
        num_left: Number of batches until the epoch ends, if known.
        again: Batches that were read earlier and are yielded first.
        latest: Records the batches that are read.
    """

    def __init__(self, run: Any, num_left: int | None, again: list[_Dealt], latest: deque[_Dealt]) -> None:
        super().__init__(run)
        self._read, self._num_left, self._again, self._latest = run, num_left, deque(again), latest

    def __next__(self) -> _Dealt:
        """Return the next global batch."""
        if self._num_left is not None:
            if self._num_left == 0:
                raise StopIteration
            self._num_left -= 1
            if self._again:
                return self._again.popleft()
        parts = next(self._read)
        dealt = _Dealt(parts=parts, cursors=self._read.cursors, is_last=self._read.is_last)
        if self._num_left is not None:  # a pass that was left early is not continued
            self._latest.append(dealt)
        return dealt


class _DispatchRun(RunOver):
    """The rest of one epoch, on any rank.

    Args:
        run: Yields the packets of this rank.
        timed: Makes a context manager that measures a wait; the reading rank's own run measures its waits.

    Attributes:
        cursors: The reader's position after the latest batch.
        is_last: Whether that batch is the epoch's last one; only without ``epoch_size``.
    """

    def __init__(self, run: Run, timed: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(run)
        self._timed = timed
        self.cursors: tuple[Cursor, ...] = ()
        self.is_last = False

    def __next__(self) -> Any:
        """Return the next batch."""
        with self._timed():
            packet = next(self._run)
        self.cursors, self.is_last = packet["cursors"], packet["is_last"]
        return packet["batch"]


def _as_one_process(config: OrdinaryConfig, *, reads: bool) -> OrdinaryConfig:
    """Return the options of the loop on the reading rank; the other ranks run no loop."""
    alone = replace(
        config, mesh=DeviceMesh.from_sizes(dp_size=1, rank=0, world_size=1), sharding="auto",
        num_workers=min(1, config.num_workers) if reads else 0,
        timeout=config.timeout if reads else 0,
        worker_init_fn=config.worker_init_fn if reads else None,
    )  # fmt: skip
    if config.mesh.world_size == 1:
        return alone
    deal = _DealOut(Collate(config), config.shape)
    shape = replace(config.shape, num_ranks=1)
    if shape.last_batch == "pad":  # each rank's rows are padded
        shape = replace(shape, last_batch="partial")
    return replace(alone, collate_fn=deal, shape=shape, pin_memory=False)


def _packed(encode: Callable[[Any], Any], packet: Mapping[str, Any]) -> dict[str, Any]:
    """Return the packet of one rank as bytes; ``encode`` is the user's function of a batch."""
    return {**packet, "batch": encode(packet["batch"]), "cursors": [cursor.to_dict() for cursor in packet["cursors"]]}


def _unpacked(decode: Callable[[Any], Any], packet: Mapping[str, Any]) -> dict[str, Any]:
    cursors = tuple(Cursor.from_dict(cursor) for cursor in packet["cursors"])
    return {**packet, "batch": decode(packet["batch"]), "cursors": cursors}


def _pinned(packet: Mapping[str, Any]) -> dict[str, Any]:
    return {**packet, "batch": pinned(packet["batch"])}
