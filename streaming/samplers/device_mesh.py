"""Keep the loader's promises for map-style data sets under torch's ``DataLoader``: ``DeviceMeshSampler``.

::

    sampler = DeviceMeshSampler(dataset, batch_size=32, seed=7)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=8)
    for epoch in range(sampler.epoch, 10):
        for batch in sampler.follow(loader):
            ...
            state = sampler.state_dict()

``follow`` is what makes the state exact: torch asks for indices some batches before the training loop gets to see them,
so a sampler alone cannot know what was consumed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Sampler

from infra import DeviceMesh, MeshFinder
from streaming.arguments import checked_int, checks_names, is_whole
from streaming.arrays import rows_by
from streaming.epochs.position import Lasting, Place, Position, Turn
from streaming.errors import ConfigError, StateError
from streaming.plan.order import OrderSettings
from streaming.plan.permutation import Permutation, substitutes
from streaming.plan.plan import Plan, RankBatches
from streaming.plan.settings import Shape
from streaming.plan.state import LoaderState
from streaming.samplers.retry import RetrySampler
from streaming.types import Int64Array

__all__ = ["DeviceMeshSampler", "RetrySampler"]

_BATCH = TypeVar("_BATCH")
_ITEM = TypeVar("_ITEM")
_END: Any = object()
_BLOCK_ROWS = 8192  # rows planned at once: amortises NumPy's calls; 0.5 MiB
_CHUNK = 2**30  # a plan counts samples of a chunk in 32 bits
_MAX_SAMPLES = 2**50


@checks_names()
class DeviceMeshSampler(Sampler[Any]):
    """Batches of indices for this data-parallel rank: a ``batch_sampler`` for ``torch.utils.data.DataLoader``.

    Without a batch size it gives single indices, for ``sampler=``, as torch's ``DistributedSampler`` does::

        sampler = DeviceMeshSampler(dataset, num_replicas=world_size, rank=rank)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)

    In an epoch every index goes to exactly one data-parallel rank once, and all ranks get the same number of batches.
    Global batch k depends on (number of samples, seed, epoch, global batch size) alone, not on the world size; its rows
    are dealt to the ranks in order. Shuffling is a uniform permutation per pass and takes no memory to speak of.

    Every ``iter`` begins the next epoch, but for the first after the making, ``set_epoch`` or ``load_state_dict``: that
    begins where these say. ``set_epoch`` keeps a loaded position where the epoch is the same. The state of an iteration
    that was left early points to the batch that would have come next.

    For one thread.

    Args:
        dataset: A data set with a length, or the length.
        batch_size: Samples per data-parallel rank; or give ``global_batch_size``, or none of them: single indices.
        global_batch_size: Samples over all data-parallel ranks.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None: see ``infra.MeshFinder``.
        num_replicas: torch's name: so many data-parallel ranks, in place of ``device_mesh``; default: as found.
        rank: torch's name: which of them this process is; default: as found.
        shuffle: False: the data set's own order.
        seed: Of the shuffling.
        last_batch: What becomes of samples that do not fill a global batch: ``"drop"``, ``"partial"`` (for as many
            samples as there are ranks, or more: torch's loader cannot make a batch of no samples), or ``"pad"``, which
            repeats indices; ``valid_mask`` tells them apart. Single indices know no ``"partial"``.
        drop_last: torch's name: True for ``last_batch="drop"``, False for ``"partial"``, of single indices ``"pad"``.
        epoch_size: Samples in a virtual epoch over endless repetition; default: one pass.

    Attributes:
        shape: Of the batches: their size over all ranks, the ranks, the tail, the epoch.
        position: Where it stands.
        epoch_samples: Samples of a whole epoch, all ranks together.

    Raises:
        ConfigError: An argument, or a combination, cannot work.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        device_mesh: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last_batch: str = "drop",
        drop_last: bool | None = None,
        epoch_size: int | None = None,
    ) -> None:
        self._finder = MeshFinder(_mesh_of(device_mesh, num_replicas, rank))
        self.is_single = batch_size is None and global_batch_size is None
        self._sizes = (1, None) if self.is_single else (batch_size, global_batch_size)
        if self.is_single and last_batch == "partial" and drop_last is None:
            raise ConfigError('last_batch="partial": single indices come in equal numbers; use "drop" or "pad"')
        self.num_samples = checked_int("dataset", _length(dataset), 1, _MAX_SAMPLES)
        self._tail: dict[str, Any] = {"last_batch": last_batch, "drop_last": drop_last, "epoch_size": epoch_size}
        self.order = OrderSettings(seed=seed, lanes=1, window=0, shuffle=shuffle)
        self.position = Position()
        self._latest: _Run | None = None
        self._is_followed = False  # the run that begins next
        self._permutations: dict[tuple[int, int], Permutation] = {}
        self._deal_to(self._finder.mesh)

    def __len__(self) -> int:
        """Count the batches in a whole epoch, the same on every rank."""
        self._look_again()
        return self.shape.batches_in(self.epoch_samples)

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self.position.epoch

    @property
    def samples_seen(self) -> int:
        """Samples of the epoch in progress that all ranks together have consumed, as far as is known here."""
        return self.position.samples_seen

    def __iter__(self) -> Iterator[Any]:
        """Yield lists of indices for the epoch due, or the rest of it; without a batch size, single ones.

        Raises:
            ConfigError: Batches are given to torch's loader as ``sampler=``; or, on all ranks, there are fewer samples
                in the tail than ranks, under ``last_batch="partial"``.
        """
        if self.is_single:
            return _Indices(self, 0, lambda rows, _: int(rows[0]))
        if sys._getframe(1).f_globals.get("__name__") == "torch.utils.data.sampler":
            raise ConfigError(
                "this DeviceMeshSampler gives batches: write DataLoader(…, batch_sampler=sampler), or leave its "
                "batch_size out and write DataLoader(…, batch_size=…, sampler=sampler)"
            )
        return _Indices(self, 0, lambda rows, _: rows.tolist())

    def iterate_with_substitutes(self, count: int) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """Iterate, each index with ``count`` others that may stand in for it; for ``RetrySampler``."""
        return _Indices(self, count, with_substitutes)

    def row_of_others(self, plan: Plan, batch: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Return an index, with ``count`` others, that another rank has in a batch of ``plan`` without rows here."""
        block = plan.rank_batches(batch, batch + 1, plan.dp_world_size - 1)  # the last rank has a row if any has
        (row, *_), (others, *_) = self._rows(block, self.order, count)
        return int(row), tuple(others.tolist())

    def follow(self, loader: Iterable[_BATCH]) -> Lasting[_BATCH]:
        """Yield the batches of ``loader``, counted as they are handed out: ``state_dict`` is then exact.

        Args:
            loader: A ``torch.utils.data.DataLoader`` whose ``batch_sampler`` or ``sampler`` this is (or a
                ``RetrySampler`` over it).
        """
        return Lasting(self._follow(loader))

    def _follow(self, loader: Iterable[_BATCH]) -> Generator[_BATCH, None, None]:
        size = int(getattr(loader, "batch_size", None) or 1) if self.is_single else 1
        before = self._latest
        self._is_followed = True
        try:
            batches = iter(loader)
            batch = next(batches, _END)
        finally:
            self._is_followed = False
        run = self._latest
        if run is None or run is before:
            raise ConfigError("follow: the loader does not use this sampler; give it as batch_sampler=")
        while batch is not _END:
            run.turn.check()
            run.count(self.position, size)
            yield batch
            if run.is_over:
                return
            run.turn.check()
            batch = next(batches, _END)
        if run.is_asked_out:  # the loader has left out what does not fill a batch: the epoch is over all the same
            run.count(self.position, run.plan.num_batches)

    def valid_mask(self, batch: int) -> torch.Tensor:
        """Return bool[B]: which rows of batch number ``batch`` of the running iteration are real, and not padding.

        The number counts from the iteration's first batch, so it is that of ``enumerate(loader)``.

        Raises:
            ConfigError: No iteration has begun, or it has no such batch.
        """
        if self._latest is None:
            raise ConfigError("valid_mask: no iteration has begun")
        return torch.from_numpy(self._latest.plan.rank_batches(batch, batch + 1, self.mesh.data_rank).valid)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; if it is the one due, a loaded position is kept."""
        self.position.set_epoch(epoch)

    def set_seed(self, seed: int) -> None:
        """Take a new order from the next epoch that starts."""
        self.position.set_seed(seed)

    def state(self, *, num_consumed: int | None = None) -> LoaderState:
        """See ``state_dict``."""
        place = self.position.place
        if num_consumed is not None:
            run = self._latest
            if run is None or not 0 <= num_consumed <= run.plan.num_batches:
                raise ConfigError(f"num_consumed: the latest iteration has no {num_consumed} batches")
            place = run.place(num_consumed, has_begun=self.position.next_seed is not None)
        return LoaderState(
            epoch=place.epoch, samples_seen=place.samples_seen, order=self.order, next_seed=self.position.next_seed,
            fingerprint=f"map:{self.num_samples}", num_samples=self.num_samples, epoch_size=self.shape.epoch_size,
            has_begun=place.has_begun,
        )  # fmt: skip

    def state_dict(self, *, num_consumed: int | None = None) -> dict[str, Any]:
        """Return the position: small, JSON-able, the same on every rank, valid on any world size.

        Args:
            num_consumed: Batches of the latest iteration that were consumed. Needed only where neither ``follow`` is
                used nor torch's ``num_workers`` is 0: torch then asks for indices ahead of what it hands out.
        """
        return self.state(num_consumed=num_consumed).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``, of any world size.

        Raises:
            StateError: It is malformed, or belongs to another data set or epoch size.
        """
        self.load(LoaderState.from_dict(state))

    def load(self, state: LoaderState) -> bool:
        """See ``load_state_dict``; tell whether an iteration in progress ends by it."""
        if state.fingerprint != f"map:{self.num_samples}":
            raise StateError(
                f"this state belongs to another data set: {state.num_samples} samples, {state.fingerprint!r}; this is "
                f"a map-style one of {self.num_samples} samples"
            )
        state.check_fits(epoch_size=self.shape.epoch_size, shuffle=self.order.shuffle)
        self.order = state.order
        place = Place.of(state)
        if not self.batches_left(state.samples_seen):  # a state of an older release, behind the last batch of an epoch
            place = Place(epoch=state.epoch + 1, samples_seen=0)
        return self.position.load(place, state.next_seed)

    def batches_left(self, samples_seen: int) -> int:
        """Count the batches of an epoch that come after its first ``samples_seen`` samples."""
        return self.shape.batches_in(self.epoch_samples - samples_seen)

    def use_seed(self, seed: int | None) -> None:
        """Take up the seed of an epoch that begins; None: as before."""
        if seed is not None:
            self.order = replace(self.order, seed=seed)

    def rows(self, plan: Plan, num_substitutes: int) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield, for each batch of ``plan``, this rank's indices int64[B] and substitutes int64[B, num_substitutes]."""
        order, rank = self.order, self.mesh.data_rank
        per_block = max(1, _BLOCK_ROWS * plan.dp_world_size // plan.global_batch_size)
        for first in range(0, plan.num_batches, per_block):
            block = plan.rank_batches(first, min(first + per_block, plan.num_batches), rank)
            rows, others = self._rows(block, order, num_substitutes)
            for start, stop in zip(block.row_splits[:-1], block.row_splits[1:], strict=True):
                yield rows[start:stop], others[start:stop]

    def plan(self, place: Place) -> Plan:
        """Plan the batches from ``place`` on, over positions alone; the permutation comes after, sample by sample."""
        whole, rest = divmod(self.num_samples, _CHUNK)
        return Plan.of(
            self.shape, [_CHUNK] * whole + [rest] * (rest > 0), OrderSettings.unshuffled(), epoch=place.epoch,
            start=place.samples_seen,
        )  # fmt: skip

    def _begin(self, turn: Turn) -> _Run:
        """Begin an iteration; when the first batch is asked for: torch may make two iterators, and use the second."""
        self._look_again(to_read=True)
        place, seed = self.position.begin(turn)
        self.use_seed(seed)
        plan = self.plan(place)
        self._check_tail(plan)
        self._latest = _Run(plan, place, turn, is_followed=self._is_followed)
        return self._latest

    def _rows(self, block: RankBatches, order: OrderSettings, count: int) -> tuple[Int64Array, Int64Array]:
        """Return indices int64[n] of planned rows, and others int64[n, count] for each."""
        others = substitutes(block.passes, block.positions, seed=order.seed, num_samples=self.num_samples, count=count)
        return self._indices(block, order), others

    def _indices(self, block: RankBatches, order: OrderSettings) -> Int64Array:
        places = block.positions - block.passes * self.num_samples
        if not order.shuffle:
            return places
        indices = np.empty_like(places)
        for pass_number, rows in rows_by(block.passes):
            indices[rows] = self._permutation(order.seed, pass_number)(places[rows])
        return indices

    def _permutation(self, seed: int, pass_number: int) -> Permutation:
        """Return that of one pass; the latest two are kept, as an epoch may touch both."""
        found = self._permutations.get((seed, pass_number))
        if found is None:
            while len(self._permutations) > 1:
                self._permutations.pop(next(iter(self._permutations)))
            found = self._permutations[seed, pass_number] = Permutation(self.num_samples, seed, pass_number)
        return found

    def _look_again(self, *, to_read: bool = False) -> None:
        if self._finder.look_again(to_read=to_read):
            self._deal_to(self._finder.mesh)

    def _deal_to(self, mesh: DeviceMesh) -> None:
        """Plan for the ranks of ``mesh``; positions count samples over all ranks, and hold on any mesh."""
        self.mesh = mesh
        shape = Shape.chosen(*self._sizes, mesh.data_world_size, **self._tail)
        if self.is_single and shape.last_batch == "partial":  # as torch has it with drop_last=False
            shape = replace(shape, last_batch="pad")
        self.shape = shape
        self.epoch_samples = shape.epoch_size or self.num_samples
        shape.check_enough(self.epoch_samples)

    def _check_tail(self, plan: Plan) -> None:
        ranks = plan.dp_world_size
        tail = (plan.num_samples - plan.start) % plan.global_batch_size
        if self.shape.last_batch == "partial" and 0 < tail < ranks:
            raise ConfigError(
                f'last_batch="partial": of the last {tail} samples of this epoch some of the {ranks} data-parallel '
                f'ranks would get none, and torch\'s loader cannot make a batch of no samples. Use last_batch="pad" '
                f'and valid_mask, "drop", or streaming.DataLoader, which makes empty batches'
            )


class _Run:
    """One iteration: its plan, and how much of it is known to be done.

    Attributes:
        is_followed: What comes of it is counted as it is handed out, not as it is asked for.
        is_asked_out: All of it was asked for.
    """

    def __init__(self, plan: Plan, start: Place, turn: Turn, *, is_followed: bool) -> None:
        self.plan, self.turn, self.is_followed = plan, turn, is_followed
        self._start = start
        self._num_done = 0
        self.is_asked_out = False

    def place(self, num_batches: int, *, has_begun: bool = False) -> Place:
        """Return the place behind so many batches of this iteration; at 0 samples perhaps with ``has_begun``."""
        epoch, seen = self._start.epoch, self._start.samples_seen + num_batches * self.plan.global_batch_size
        if num_batches == self.plan.num_batches:
            return Place(epoch=epoch + 1, samples_seen=0)
        return Place(epoch=epoch, samples_seen=seen, has_begun=has_begun and not seen)

    @property
    def is_over(self) -> bool:
        """Every batch is consumed."""
        return self._num_done == self.plan.num_batches

    def count(self, position: Position, num_batches: int) -> None:
        """Note that the next batches are consumed."""
        self._num_done = min(self._num_done + num_batches, self.plan.num_batches)
        position.advance(self.place(self._num_done))


class _Indices(Iterator[_ITEM]):
    """Iterate a sampler. Begins with the first ``next``; superseded, it raises, as the loader's iterator does."""

    def __init__(
        self, sampler: DeviceMeshSampler, num_substitutes: int, make: Callable[[Int64Array, Int64Array], _ITEM]
    ) -> None:
        self._sampler, self._num_substitutes, self._make = sampler, num_substitutes, make
        self._turn = sampler.position.open()
        self._run: _Run | None = None
        self._rows: Iterator[tuple[Int64Array, Int64Array]] = iter(())
        self._num_left = 0

    def __next__(self) -> _ITEM:
        """Return what the sampler gives for the next batch."""
        run = self._run
        if run is not None and not self._num_left:
            raise StopIteration
        self._turn.check()
        if run is None:
            run = self._run = self._sampler._begin(self._turn)
            self._rows, self._num_left = self._sampler.rows(run.plan, self._num_substitutes), run.plan.num_batches
        rows, others = next(self._rows)
        self._num_left -= 1
        run.is_asked_out = not self._num_left
        if not run.is_followed:
            run.count(self._sampler.position, 1)
        return self._make(rows, others)

    def __del__(self) -> None:
        if hasattr(self, "_turn"):
            self._turn.is_open = False


def with_substitutes(rows: Int64Array, others: Int64Array) -> list[tuple[int, tuple[int, ...]]]:
    """Return the indices of a batch, each with its substitutes."""
    return list(zip(rows.tolist(), map(tuple, others.tolist()), strict=True))


def _mesh_of(device_mesh: Any, num_replicas: int | None, rank: int | None) -> Any:
    """Return the mesh that torch's names describe, or the one given."""
    if num_replicas is None and rank is None:
        return device_mesh
    if device_mesh is not None:
        raise ConfigError("give device_mesh, or num_replicas and rank, not both")
    ranks = (
        MeshFinder().mesh.data_world_size
        if num_replicas is None
        else checked_int("num_replicas", num_replicas, 1, 2**31)
    )
    own = MeshFinder().mesh.data_rank if rank is None else rank
    return DeviceMesh.from_sizes(dp_size=ranks, rank=checked_int("rank", own, 0, ranks - 1))


def _length(dataset: Sized | int) -> int:
    if is_whole(dataset):
        return dataset
    try:
        length = len(cast("Sized", dataset))
    except TypeError as error:
        raise ConfigError(
            f"dataset: expected a map-style data set with a length, or the length; {type(dataset).__name__} has none. "
            f"For iterable data sets use streaming.DataLoader"
        ) from error
    if length < 1:
        raise ConfigError(f"dataset: this {type(dataset).__name__} is empty")
    return length
