"""Keep the loader's promises for map-style datasets under torch's ``DataLoader``: ``DeviceMeshSampler``.

::

    sampler = DeviceMeshSampler(dataset, batch_size=32, seed=7)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=8)
    for epoch in range(sampler.epoch, 10):
        for batch in sampler.follow(loader):
            ...
            state = sampler.state_dict()

``follow`` makes the state exact: torch requests indices several batches before the training loop receives them, so a
sampler on its own cannot know how many batches were consumed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Sampler

from infra import DeviceMesh, MeshFinder
from streaming.common.arguments import checked_int, checks_names, is_whole
from streaming.common.arrays import rows_by
from streaming.common.job.agreement import DEFAULT_TIMEOUT_S, agree
from streaming.common.job.store import job_store, job_world_size
from streaming.errors import ConfigError, StateError
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.permutation import Permutation, substitutes
from streaming.order.plan.plan import Plan, RankBatches
from streaming.order.plan.settings import Shape
from streaming.order.plan.state import LoaderState
from streaming.others.torch_datasets.retry import RetrySampler
from streaming.run.epochs.position import Lasting, Place, Position, Turn
from streaming.types import Int64Array

__all__ = ["DeviceMeshSampler", "RetrySampler"]

_BATCH = TypeVar("_BATCH")
_ITEM = TypeVar("_ITEM")
_END: Any = object()
_BLOCK_ROWS = 8192  # rows planned at once, to amortise NumPy's call overhead; 0.5 MiB
_CHUNK = 2**30  # a plan counts samples of a chunk in 32 bits
_MAX_SAMPLES = 2**50
_log = logging.getLogger(__name__)


@checks_names()
class DeviceMeshSampler(Sampler[Any]):
    """Yield batches of indices for this data-parallel rank: a ``batch_sampler`` for ``torch.utils.data.DataLoader``.

    Without a batch size it yields single indices, for ``sampler=``, like torch's ``DistributedSampler``::

        sampler = DeviceMeshSampler(dataset, num_replicas=world_size, rank=rank)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)

    In an epoch every index goes to exactly one data-parallel rank, and all ranks get the same number of batches. Global
    batch k depends only on the number of samples, the seed, the epoch and the global batch size, not on the world size;
    its rows are dealt to the ranks in order. Shuffling is a uniform permutation per pass, computed in constant memory.

    Each ``iter`` begins the next epoch. The first one after construction, ``set_epoch`` or ``load_state_dict`` begins
    at the position that these set; ``set_epoch`` keeps a loaded position if the epoch is the same. If an iteration is
    left early, the state points to the batch that would have come next.

    The length of the dataset is read again when an epoch begins, so a dataset may grow; an epoch keeps the length that
    it began with, even after a resume. All ranks must find the same length.

    Use it from one thread.

    Args:
        dataset: A dataset with a length, or the length itself.
        batch_size: Samples per data-parallel rank. Give this, ``global_batch_size``, or neither for single indices.
        global_batch_size: Samples over all data-parallel ranks.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None to detect it; see ``infra.MeshFinder``.
        num_replicas: torch's name for the number of data-parallel ranks, instead of ``device_mesh``; default: detected.
        rank: torch's name for this process's data-parallel rank; default: detected.
        shuffle: Whether to shuffle; False: the dataset's own order.
        seed: Seed of the order.
        last_batch: What to do with samples that do not fill a global batch. ``"drop"`` leaves them out; ``"partial"``
            makes smaller batches (there must be at least as many samples as ranks, because torch's loader cannot make
            an empty batch); ``"pad"`` repeats indices, and ``valid_mask`` marks the real ones. Single indices do not
            support ``"partial"``.
        drop_last: torch's name: True means ``last_batch="drop"``; False means ``"partial"``, or ``"pad"`` for single
            indices.
        epoch_size: Samples in a virtual epoch over endless repetition of the data; default: one pass.

    Attributes:
        shape: Shape of the batches: global batch size, number of ranks, last batch, epoch size.
        position: Current position.
        num_samples: Number of samples in the dataset, for the epoch in progress.
        epoch_samples: Number of samples in a whole epoch, over all ranks.

    Raises:
        ConfigError: An argument or a combination of arguments is invalid.
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
            raise ConfigError('last_batch="partial": ranks get equal numbers of single indices; use "drop" or "pad"')
        self._dataset = dataset
        self.num_samples = _checked_length(dataset)
        self._tail: dict[str, Any] = {"last_batch": last_batch, "drop_last": drop_last, "epoch_size": epoch_size}
        self.order = OrderSettings(seed=seed, lanes=1, window=0, shuffle=shuffle)
        self.position = Position()
        self._latest: _Run | None = None
        self._is_followed = False  # whether the next run is followed
        self._permutations: dict[tuple[int, int], Permutation] = {}
        self._deal_to(self._finder.mesh)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; it is the same on every rank.

        It refers to the epoch in progress, or between epochs to the next one.
        """
        self._look_again()
        return self.shape.batches_in(self.shape.epoch_size or self.samples_at(self.position.place))

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self.position.epoch

    @property
    def samples_seen(self) -> int:
        """Number of samples of the current epoch that all ranks together have consumed, as known to this process."""
        return self.position.samples_seen

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the indices of the next epoch, or the rest of it.

        It yields lists of indices, or single indices if there is no batch size.

        Raises:
            ConfigError: A sampler of batches was given to torch's loader as ``sampler=``; or, with
                ``last_batch="partial"``, the last batch has fewer samples than there are ranks (raised on all ranks).
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
        """Iterate over indices, each with ``count`` substitutes; for ``RetrySampler``."""
        return _Indices(self, count, with_substitutes)

    def row_of_others(self, plan: Plan, batch: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Return another rank's index with ``count`` substitutes, for a batch in which this rank has no rows."""
        block = plan.rank_batches(batch, batch + 1, plan.dp_world_size - 1)  # if any rank has a row, the last one has
        (row, *_), (others, *_) = self._rows(block, self.order, count)
        return int(row), tuple(others.tolist())

    def follow(self, loader: Iterable[_BATCH]) -> Lasting[_BATCH]:
        """Yield the batches of ``loader`` and count them as they are delivered, which makes ``state_dict`` exact.

        Args:
            loader: A ``torch.utils.data.DataLoader`` whose ``batch_sampler`` or ``sampler`` is this object, or a
                ``RetrySampler`` over it.

        Raises:
            ConfigError: The loader does not use this sampler.
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
        try:
            while batch is not _END:
                run.turn.check()
                run.count(self.position, size)
                yield batch
                if run.is_over:
                    return
                run.turn.check()
                batch = next(batches, _END)
            if run.is_asked_out:  # the loader dropped its incomplete last batch, but the epoch is over
                run.count(self.position, run.plan.num_batches)
        finally:
            run.turn.is_open = False  # although torch's loader may keep the iterator over the indices

    def valid_mask(self, batch: int) -> torch.Tensor:
        """Return a mask, bool [B], of the rows of batch number ``batch`` that are real rather than padding.

        Batches are counted from the first one of the running iteration, as by ``enumerate(loader)``.

        Raises:
            ConfigError: No iteration has begun, or the iteration has no such batch.
        """
        if self._latest is None:
            raise ConfigError("valid_mask: no iteration has begun")
        return torch.from_numpy(self._latest.plan.rank_batches(batch, batch + 1, self.mesh.data_rank).valid)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of ``epoch``. If that epoch is already next, a loaded position is kept."""
        self.position.set_epoch(epoch)

    def set_seed(self, seed: int) -> None:
        """Shuffle with a new seed from the next epoch on."""
        self.position.set_seed(seed)

    def state_at(self, place: Place) -> LoaderState:
        """Return the state that continues from a place."""
        num_samples = self.samples_at(place) or self.num_samples
        return LoaderState(
            epoch=place.epoch, samples_seen=place.samples_seen, order=self.order, next_seed=self.position.next_seed,
            fingerprint=f"map:{num_samples}", num_samples=num_samples, epoch_size=self.shape.epoch_size,
            has_begun=place.has_begun,
        )  # fmt: skip

    def state_dict(self, *, num_consumed: int | None = None) -> dict[str, Any]:
        """Return the position: a small JSON-serializable dict, the same on every rank, valid for any world size.

        Args:
            num_consumed: Number of batches of the latest iteration that were consumed. Needed only without ``follow``
                and with worker processes, since torch then requests indices ahead of the batches that it delivers.

        Raises:
            ConfigError: The latest iteration has fewer batches than ``num_consumed``.
        """
        place = self.position.place
        if num_consumed is not None:
            run = self._latest
            if run is None or not 0 <= num_consumed <= run.plan.num_batches:
                raise ConfigError(f"num_consumed: the latest iteration has no {num_consumed} batches")
            place = run.place(num_consumed, has_begun=self.position.next_seed is not None)
            place = place if run.turn.is_open else place.onward
        return self.state_at(place).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict`` of any world size.

        Raises:
            StateError: The state is malformed, or belongs to another dataset or epoch size.
        """
        self.load(LoaderState.from_dict(state))

    def load(self, state: LoaderState, detail: Any = None) -> bool:
        """Load a state object; see ``load_state_dict``. Return whether this ends an iteration in progress.

        ``detail`` is the detail of the state's place.
        """
        self._check_length(state)
        state.check_fits(epoch_size=self.shape.epoch_size, shuffle=self.order.shuffle)
        self.order = state.order
        self._take_length(state.num_samples)
        place = Place.of(state, detail)
        if not self.batches_left(state.samples_seen):
            place = self.end_of(state.epoch, detail)
        return self.position.load(place, state.next_seed)

    def _check_length(self, state: LoaderState) -> None:
        """Refuse a state of a larger dataset or of another kind; log whether this dataset has grown since.

        Raises:
            StateError: The state is refused.
        """
        now, was = _length(self._dataset), state.num_samples
        if state.fingerprint != f"map:{was}":
            raise StateError(
                f"this state belongs to another data set: {was} samples, {state.fingerprint!r}; this is a map-style "
                f"one of {now} samples"
            )
        if now < was:
            raise StateError(
                f"this state belongs to another data set, or to this one when it was larger: {was} samples; this one "
                f"has {now}. Give it the same samples again, followed by those that came later"
            )
        if now > was:
            _log.warning(
                "the data set has %d samples, and had %d when the state was saved: an epoch that has begun continues "
                "with those, the next one has all", now, was,
            )  # fmt: skip

    def batches_left(self, samples_seen: int) -> int:
        """Return the number of batches of an epoch after its first ``samples_seen`` samples."""
        return self.shape.batches_in(self.epoch_samples - samples_seen)

    def end_of(self, epoch: int, detail: Any = None) -> Place:
        """Return the place after the last batch of an epoch."""
        return Place(epoch=epoch, samples_seen=self.epoch_samples, is_end=True, detail=detail)

    def follow_length(self, place: Place) -> bool:
        """Adopt the length of the dataset when an epoch begins; return whether it has changed.

        Raises:
            ConfigError: The dataset is empty, or too small for one batch.
            AgreementError: Other ranks found another length.
        """
        was, now = self.num_samples, self.samples_at(place)
        if now == was:
            return False
        _checked_length(self._dataset)
        self.shape.check_enough(self.shape.epoch_size or now)
        _agree_on_length(self.mesh, place.epoch, now, type(self._dataset).__name__)
        _log.log(
            logging.INFO if now > was else logging.WARNING,
            "the data set has %d samples as epoch %d begins, and had %d before", now, place.epoch, was,
        )  # fmt: skip
        self._take_length(now)
        return True

    def samples_at(self, place: Place) -> int:
        """Return the dataset's length for the epoch of a place: the current length if that epoch has not begun."""
        ahead = self.position.handed_out
        is_ahead = ahead.epoch == place.epoch and ahead.samples_seen
        if place.samples_seen or place.has_begun or is_ahead:
            return self.num_samples
        return _length(self._dataset)

    def _take_length(self, num_samples: int) -> None:
        if num_samples != self.num_samples:
            self._permutations.clear()
        self.num_samples = num_samples
        self.epoch_samples = self.shape.epoch_size or num_samples

    def use_seed(self, seed: int | None) -> None:
        """Adopt the seed of an epoch that begins; None keeps the current seed."""
        if seed is not None:
            self.order = replace(self.order, seed=seed)

    def rows(self, plan: Plan, num_substitutes: int) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield this rank's indices int64 [B] and substitutes int64 [B, num_substitutes] of each batch of ``plan``."""
        order, rank = self.order, self.mesh.data_rank
        per_block = max(1, _BLOCK_ROWS * plan.dp_world_size // plan.global_batch_size)
        for first in range(0, plan.num_batches, per_block):
            block = plan.rank_batches(first, min(first + per_block, plan.num_batches), rank)
            rows, others = self._rows(block, order, num_substitutes)
            for start, stop in zip(block.row_splits[:-1], block.row_splits[1:], strict=True):
                yield rows[start:stop], others[start:stop]

    def plan(self, place: Place) -> Plan:
        """Plan the batches from ``place`` on, as positions; the permutation is applied to them later."""
        whole, rest = divmod(self.num_samples, _CHUNK)
        return Plan.of(
            self.shape, [_CHUNK] * whole + [rest] * (rest > 0), OrderSettings.unshuffled(), epoch=place.epoch,
            start=place.samples_seen,
        )  # fmt: skip

    def _begin(self, turn: Turn) -> _Run:
        """Begin an iteration when its first batch is requested: torch may create two iterators and use the second."""
        self._look_again(to_read=True)
        place, seed = self.position.begin(turn)
        self.use_seed(seed)
        self.follow_length(place)
        plan = self.plan(place)
        self._check_tail(plan)
        self._latest = _Run(plan, place, self.end_of(place.epoch), turn, is_followed=self._is_followed)
        if place.is_end:
            self.position.finish()
        return self._latest

    def _rows(self, block: RankBatches, order: OrderSettings, count: int) -> tuple[Int64Array, Int64Array]:
        """Return the indices of planned rows, int64 [n], and substitutes for each, int64 [n, count]."""
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
        """Return the permutation of one pass; the latest two are cached, because an epoch may span two passes."""
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
        """Plan for the ranks of ``mesh``. Positions count samples over all ranks, so they are valid for any mesh."""
        self.mesh = mesh
        shape = Shape.chosen(*self._sizes, mesh.data_world_size, **self._tail)
        shape.check_one_size()
        if self.is_single and shape.last_batch == "partial":  # torch's meaning of drop_last=False
            shape = replace(shape, last_batch="pad")
        self.shape = shape
        self._take_length(self.num_samples)
        shape.check_enough(self.epoch_samples)

    def _check_tail(self, plan: Plan) -> None:
        ranks = plan.dp_world_size
        tail = (plan.num_samples - plan.start) % plan.global_batch_size
        if self.shape.last_batch == "partial" and 0 < tail < ranks:
            raise ConfigError(
                f'last_batch="partial": some of the {ranks} data-parallel ranks would get none of the last {tail} '
                f"samples "
                f'of this epoch, and torch\'s loader cannot make a batch of no samples. Use last_batch="pad" '
                f'and valid_mask, "drop", or streaming.DataLoader, which makes empty batches'
            )


class _Run:
    """One iteration: its plan, and the part of it known to be consumed.

    Attributes:
        is_followed: Whether batches are counted when they are delivered instead of when they are requested.
        is_asked_out: Whether all batches were requested.
    """

    def __init__(self, plan: Plan, start: Place, end: Place, turn: Turn, *, is_followed: bool) -> None:
        self.plan, self.turn, self.is_followed = plan, turn, is_followed
        self._start, self._end = start, end
        self._num_done = 0
        self.is_asked_out = False

    def place(self, num_batches: int, *, has_begun: bool = False) -> Place:
        """Return the place after ``num_batches`` of this iteration; at 0 samples perhaps with ``has_begun``."""
        epoch, seen = self._start.epoch, self._start.samples_seen + num_batches * self.plan.global_batch_size
        if num_batches == self.plan.num_batches:
            return self._end
        return Place(epoch=epoch, samples_seen=seen, has_begun=has_begun and not seen)

    @property
    def is_over(self) -> bool:
        """Return whether every batch is consumed."""
        return self._num_done == self.plan.num_batches

    def count(self, position: Position, num_batches: int) -> None:
        """Record that the next batches are consumed."""
        self._num_done = min(self._num_done + num_batches, self.plan.num_batches)
        position.advance(self.place(self._num_done))


class _Indices(Iterator[_ITEM]):
    """Iterate over a sampler. Begins at the first ``next``; once superseded, it raises like the loader's iterator."""

    def __init__(
        self, sampler: DeviceMeshSampler, num_substitutes: int, make: Callable[[Int64Array, Int64Array], _ITEM]
    ) -> None:
        self._sampler, self._num_substitutes, self._make = sampler, num_substitutes, make
        self._turn = sampler.position.open()
        self._run: _Run | None = None
        self._rows: Iterator[tuple[Int64Array, Int64Array]] = iter(())
        self._num_left = 0

    def __next__(self) -> _ITEM:
        """Return the sampler's item for the next batch."""
        run = self._run
        if run is not None and not self._num_left:
            if not run.is_followed:
                self._sampler.position.asked_for_more(self._turn)
            raise StopIteration
        self._turn.check()
        if run is None:
            run = self._run = self._sampler._begin(self._turn)
            self._rows, self._num_left = self._sampler.rows(run.plan, self._num_substitutes), run.plan.num_batches
            if not self._num_left:
                raise StopIteration
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
    """Return the mesh that torch's arguments describe, or the given one."""
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


def _agree_on_length(mesh: DeviceMesh, epoch: int, num_samples: int, name: str) -> None:
    """Compare a changed length over the ranks of the job, if they can communicate.

    Absent ranks cause a warning, since the length may not have changed for them.

    Raises:
        AgreementError: The lengths differ.
    """
    if not 1 < mesh.world_size <= job_world_size():
        return
    rank, board = job_store("")
    if rank == mesh.rank:
        facts, subject = {"epoch": epoch, "samples of the data set": num_samples}, f"length of a {name}"
        agree(board, rank, mesh.ranks, facts, subject=subject, timeout_s=DEFAULT_TIMEOUT_S, required=False)


def _checked_length(dataset: Sized | int) -> int:
    length = _length(dataset)
    if length < 1 and not is_whole(dataset):
        raise ConfigError(f"dataset: this {type(dataset).__name__} is empty")
    return checked_int("dataset", length, 1, _MAX_SAMPLES)


def _length(dataset: Sized | int) -> int:
    if is_whole(dataset):
        return dataset
    try:
        return len(cast("Sized", dataset))
    except TypeError as error:
        raise ConfigError(
            f"dataset: expected a map-style data set with a length, or the length; {type(dataset).__name__} has none. "
            f"For iterable data sets use streaming.DataLoader"
        ) from error
