"""Loop over iterable torch datasets, with as many promises as a stream of samples allows.

- Every sample goes to one rank and worker (see ``worker_parts``); random numbers are seeded by (seed, epoch).
- All ranks end together: by ``epoch_size``, or otherwise, under torch.distributed, by agreeing a few batches ahead
  whether every rank has another batch.
- The position is exact to the batch. Resuming is O(1) if the dataset (or its iterator) has ``state_dict``; otherwise
  the stream is read again up to the position. Resuming in mid-epoch requires the same number of ranks and workers, and
  every rank saves and loads its own state.
- State that a dataset with ``state_dict`` keeps from pass to pass is passed on, from one worker process to the next and
  in states between epochs.
"""

from __future__ import annotations

import copy
import logging
import pickle
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from infra import DeviceMesh
from streaming.common.forks import in_children
from streaming.errors import ConfigError, StateError
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.permutation import hash_words
from streaming.order.plan.state import LoaderState
from streaming.others.torch_datasets.kinds import read_up
from streaming.others.torch_datasets.options import (
    Collate,
    OrdinaryConfig,
    TorchLoader,
    Workers,
    leave_behind,
    shut_down,
)
from streaming.others.torch_datasets.worker_info import BeginWorker
from streaming.others.torch_datasets.worker_parts import (
    Cursor,
    Packet,
    PartsState,
    SharedStream,
    ShareSettings,
    can_shard,
    has_sharding_filter,
    has_state,
    num_shards,
)  # fmt: skip
from streaming.run.epochs.iterator import Loop
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run
from streaming.types import override

UNKNOWN_SIZE = 2**62
"""``num_samples`` in the state of a dataset of unknown size."""
AHEAD = 2
"""Number of batches ahead for which ranks query each other, so that the answer has arrived when it is needed."""
_PATIENCE = timedelta(hours=24)  # a rank may evaluate or save for hours; the launcher handles dead ranks
_FINGERPRINT = "iterable"

_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()  # by job, by ranks
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterableState(PartsState):
    """The state of one rank over an iterable dataset.

    At and after the end of an epoch that is a whole pass, ``cursors`` are the start of the next pass, or empty if no
    state is passed on to it.
    """

    @property
    def is_end(self) -> bool:
        """See ``LoaderState``: whether nothing is left of a pass of unknown length."""
        if self.epoch_size is not None:
            return self.samples_seen > 0 and self.samples_seen == self.epoch_size
        return self.samples_seen > 0 and all(cursor.pass_number > self.epoch for cursor in self.cursors)

    @property
    def is_mid_pass(self) -> bool:
        """Whether earlier samples of the pass were read; with ``epoch_size`` also between epochs."""
        if self.epoch_size is not None:
            return bool(self.cursors)
        return bool(self.cursors) and self.samples_seen > 0 and not self.is_end

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild a state from the dict of :meth:`to_dict`.

        Raises:
            StateError: The dict is malformed.
        """
        if not isinstance(data, Mapping) or "cursors" not in data:
            raise StateError("state: expected the state of an iterable data set, with the positions of its workers")
        return cls._from_parts(data)


class IterableLoop(Loop):
    """Run epochs over an iterable dataset. Used by one thread.

    Without ``epoch_size`` an epoch is one pass, and ``dataset.set_epoch``, if it exists, is called with its number.
    With ``epoch_size``, passes follow each other without an end, and an epoch is that number of their samples, in whole
    global batches.

    ``last_batch`` applies to the last batch of each worker: ``"drop"`` leaves it out if it is short, ``"partial"``
    delivers it, ``"pad"`` fills it up. Ranks that have more batches than others lose the surplus, except with
    ``"pad"``, where the other ranks repeat their last batch, marked as not valid.

    Args:
        dataset: The user's dataset; iterated in the worker processes, if there are any.
        config: The options.

    Raises:
        ConfigError: The options are inconsistent, or nothing can determine when the ranks end together.
    """

    state_type = IterableState
    can_seek = False
    no_remesh = (
        "this data set was cut into parts for its ranks and workers. Deal it out with "
        'OrdinaryDataset(…, sharding="dispatch"), whose state any number of ranks can load, or convert it to shards'
    )
    is_agreed: bool
    """Whether ranks agree on having another batch."""
    workers: Workers
    """The worker processes of the loop."""
    has_read: bool
    """Whether the loop has read samples of the dataset."""

    def __init__(self, dataset: Any, config: OrdinaryConfig) -> None:
        super().__init__(config.shape)
        self.dataset = dataset
        self.config = config
        self.order = OrderSettings(seed=config.seed, lanes=1, window=0)
        self.is_counted = config.shape.epoch_size is not None
        self.samples_per_epoch = UNKNOWN_SIZE if config.shape.epoch_size is None else config.shape.epoch_size
        if self.is_counted:
            replace(config.shape, last_batch="drop").check_enough(config.shape.num_samples)  # only full batches
        self.is_agreed = not self.is_counted and config.mesh.world_size > 1
        if self.is_agreed:
            _check_can_agree(config.mesh)
        self._num_workers = self._useful_workers()
        self.workers = Workers(config, self._num_workers)
        self._packets: _Packets | None = None
        self._handed: tuple[Cursor, ...] = ()  # start of the next pass, with the state passed on
        self._goes_on = False  # the dataset has read here before, and no state was loaded since
        self._was_here: bytes | None = None  # its state in this process when the latest pass began
        self._as_made: Cursor | None = None  # position of the dataset before this process read it
        self._goes_back = False  # a state without a dataset state was loaded after reading here
        self.has_read = False
        in_children(self, IterableLoop._leave_behind)
        self._warn()

    @override
    def batches_left(self, samples_seen: int) -> int:
        """See ``Loop``.

        Raises:
            TypeError: The number is unknown without ``epoch_size``.
        """
        if not self.is_counted:
            raise TypeError("an iterable data set has no length; give epoch_size to say how long an epoch is")
        return max(0, (self.samples_per_epoch - samples_seen) // self.shape.global_batch_size)

    @override
    def start(self, place: Place, seed: int | None) -> Run:
        """See ``Loop``.

        A place's detail is the workers' cursors. With ``epoch_size`` the stream continues from epoch to epoch, even if
        an epoch was left early; without it, each epoch is a pass of its own.
        """
        cursors: tuple[Cursor, ...] = place.detail or ()
        if seed is not None:
            self.order = replace(self.order, seed=seed)
        goes_on, self._goes_on = self._goes_on, not self._num_workers
        if place.samples_seen == 0 and not self.is_counted:
            cursors = cursors or self._handed  # a new seed has dropped the place's cursors
            cursors = self._unless_changed(_beginning(cursors, place.epoch))
        if self._goes_back and not cursors and self._as_made is not None:
            cursors = (replace(self._as_made, pass_number=place.epoch),)
        self._goes_back = False
        if not self._num_workers and self._as_made is None:
            state = copy.deepcopy(self.dataset.state_dict()) if has_state(self.dataset) else None
            self._as_made = Cursor(worker=0, pass_number=0, state=state)
        return _IterableRun(self, self._open(place.epoch, cursors, goes_on=goes_on))

    @override
    def after_batch(self, place: Place, run: _IterableRun) -> Place:
        if self._as_made is not None and run.cursors:  # generators appear only once they are drawn from
            self._as_made = replace(self._as_made, first=run.cursors[0].first)
        if self.is_counted:
            return replace(super().after_batch(place, run), detail=run.cursors)
        self._handed = run.cursors if run.is_last else ()
        return Place(
            epoch=place.epoch, samples_seen=place.samples_seen + self.shape.global_batch_size,
            detail=run.cursors, is_end=run.is_last,
        )  # fmt: skip

    @override
    def state_at(self, place: Place) -> IterableState:
        """See ``Loop``; the state of this rank only."""
        mesh = self.config.mesh
        return IterableState(
            epoch=place.epoch, samples_seen=place.samples_seen, order=self.order, next_seed=self.position.next_seed,
            fingerprint=_FINGERPRINT, num_samples=self.samples_per_epoch, epoch_size=self.shape.epoch_size,
            has_begun=place.has_begun, cursors=place.detail or (), data_rank=mesh.data_rank,
            data_world_size=mesh.data_world_size,
        )  # fmt: skip

    def load(self, state: LoaderState) -> None:
        """Continue from a ``state`` of the same rank, with the same number of ranks and workers.

        Raises:
            StateError: The state belongs to another kind of dataset, rank or epoch size.
        """
        if not isinstance(state, IterableState) or state.fingerprint != _FINGERPRINT:
            raise StateError("this state does not belong to an iterable data set")
        state.check_fits(epoch_size=self.shape.epoch_size, shuffle=self.order.shuffle)
        cursors = state.cursors
        if state.is_mid_pass:
            self._check_place(state)
            if not (has_state(self.dataset) or any(cursor.state is not None for cursor in cursors)):
                _log.warning(
                    "%s has no state_dict: what this pass has already read is read again and skipped. Give the data "
                    "set state_dict and load_state_dict methods", type(self.dataset).__name__,
                )  # fmt: skip
        elif cursors:
            cursors = self._handed_on(state)
        self._goes_on, self._was_here = False, None
        self._goes_back = not cursors
        self._handed = () if state.is_mid_pass else cursors
        self.order = state.order
        self.go_to(Place.of(state, cursors), state.next_seed)

    def report(self) -> dict[str, Any]:
        """Return all metrics."""
        return {**self.metrics.snapshot(), "bad": []}

    def describe(self) -> str:
        """Describe what the loop is waiting for."""
        if self.running is None:
            return "not running"
        return f"{type(self.dataset).__name__} in {self._num_workers} torch worker processes, or the consumer"

    def close(self) -> None:
        """Stop worker processes. The loop can be used again, and then starts new ones."""
        super().close()
        self.close_stream()
        self.workers.close()

    @override
    def clean_up(self) -> None:
        self.close_stream()

    def close_stream(self, only: _Packets | None = None) -> None:
        """Stop the workers of the stream, which otherwise continue from epoch to epoch.

        Args:
            only: Stop the stream only if it is this one; None: any.
        """
        if only is not None and self._packets is not only:
            return
        packets, self._packets = self._packets, None
        if packets is not None:
            packets.close()
        self.workers.forget()

    def _leave_behind(self) -> None:
        """Forget the parent's workers in a forked child; a loop begun here starts its own."""
        self.running = None
        packets, self._packets = self._packets, None
        if packets is not None:
            packets.leave_behind()
        self.workers.leave_behind()

    # --- epochs ---

    def _unless_changed(self, cursors: tuple[Cursor, ...]) -> tuple[Cursor, ...]:
        """Return the ``cursors`` at which workers begin a pass, without states if the dataset was changed here."""
        if not self._num_workers or not has_state(self.dataset):
            return cursors
        was, self._was_here = self._was_here, _pickled(self.dataset.state_dict())
        if was in {None, self._was_here} or not any(cursor.state is not None for cursor in cursors):
            return cursors
        _log.info(
            "the state of %s was changed in this process: worker processes begin from it", type(self.dataset).__name__
        )
        return tuple(replace(cursor, state=None) for cursor in cursors)

    def _open(self, epoch: int, cursors: tuple[Cursor, ...], *, goes_on: bool) -> _Packets:
        """Return the stream from ``cursors`` on: the current one if it is at that position, or a new one."""
        if self._packets is not None and self._packets.cursors is not cursors:
            self.close_stream()
        if self._packets is None:
            config = self.config
            cursors = cursors or tuple(
                Cursor(worker=number, pass_number=epoch) for number in range(max(1, self._num_workers))
            )
            stream = self._stream(cursors, goes_on=goes_on)
            seed = hash_words(self.order.seed, epoch, config.mesh.data_rank) >> 1
            loader = TorchLoader(
                stream, batch_size=None, collate_fn=_unchanged, generator=torch.Generator().manual_seed(seed),
                **self.workers.torch_options(self._begin(stream)),
            )  # fmt: skip
            with self.workers.blamed():
                self._packets = _Packets(iter(loader), cursors)
        return self._packets

    def _stream(self, cursors: tuple[Cursor, ...], *, goes_on: bool = False) -> SharedStream:
        """Return the dataset for this rank's workers, from ``cursors`` on."""
        config, mesh, workers = self.config, self.config.mesh, max(1, self._num_workers)
        settings = ShareSettings(
            first_part=mesh.data_rank * workers,
            num_parts=mesh.data_world_size * workers,
            batch_size=config.shape.rows_of(mesh.data_rank),
            last_batch=config.shape.last_batch,
            endless=self.is_counted,
            seed=self.order.seed,
            sharding=config.sharding,
            goes_on=goes_on and not self.is_counted,
        )
        return SharedStream(self.dataset, settings, cursors, Collate(config))

    def _begin(self, stream: SharedStream) -> BeginWorker:
        """Return the ``worker_init_fn`` for workers of the stream."""
        settings, config = stream.settings, self.config
        unasked = settings.sharding == "auto" and not config.says_sharding
        return BeginWorker(
            dataset=self.dataset, numbers=stream.numbers, then=config.worker_init_fn,
            num_workers=settings.num_parts if settings.sharding == "worker_info" else len(stream.cursors),
            is_shared_out=unasked and settings.num_parts > 1 and not has_sharding_filter(self.dataset),
        )  # fmt: skip

    def _first_again(self, cursors: tuple[Cursor, ...]) -> Packet | None:
        """Read a packet from the start of this rank's pass, for a rank that continues after its own pass has ended."""
        begins = (Cursor(worker=cursor.worker, pass_number=cursor.pass_number) for cursor in cursors)
        packets = (packet for begin in begins for packet in islice(self._stream((begin,)), 1))
        return next((packet for packet in packets if not packet.is_end), None)

    def _check_place(self, state: IterableState) -> None:
        if other := self._other_place(state):
            raise StateError(
                f"an iterable data set resumes only where it was saved: {other}. Save and load it on every rank, with "
                f"the same num_workers; or start a new epoch with set_epoch({state.epoch + 1})"
            )

    def _handed_on(self, state: IterableState) -> tuple[Cursor, ...]:
        """Return the start of the next pass, from a state between two passes."""
        name, epoch = type(self.dataset).__name__, state.onward.epoch
        was_left = any(cursor.pass_number < epoch for cursor in state.cursors)
        if was_left and has_state(self.dataset) and not self._num_workers:
            _log.warning(
                "epoch %d was left before its end: %s begins epoch %d as it was made, without the state that it had "
                "there. Save a state before an epoch is left, to continue in it", epoch - 1, name, epoch,
            )  # fmt: skip
        other = self._other_place(state)
        if not other:
            return state.cursors
        if not was_left and any(cursor.state is not None for cursor in state.cursors):
            _log.warning(
                "the state of a %s is that of its copy where it was saved: %s. Epoch %d begins with data sets as they "
                "were made. For their states, save and load on every rank, with the same num_workers", name, other,
                epoch,
            )  # fmt: skip
        first = {name: text for cursor in state.cursors for name, text in cursor.first.items()}
        workers = range(max(1, self._num_workers))
        return tuple(Cursor(worker=number, pass_number=epoch, first=first) for number in workers)

    def _other_place(self, state: IterableState) -> str:
        mesh = self.config.mesh
        return state.other_place(mesh.data_rank, mesh.data_world_size, max(1, self._num_workers))

    # --- parts ---

    def _useful_workers(self) -> int:
        """Return the number of workers, at most this rank's number of shards: more workers would have no samples."""
        wanted, ranks = self.config.num_workers, self.config.mesh.data_world_size
        shards = num_shards(self.dataset) if callable(getattr(self.dataset, "shard", None)) else None
        if self.config.sharding != "auto" or shards is None or shards < ranks or wanted <= 1:
            return wanted
        return min(wanted, max(1, shards // ranks))

    def _warn(self) -> None:
        parts = self.config.mesh.data_world_size * max(1, self._num_workers)
        if self._num_workers < self.config.num_workers:
            _log.warning(
                "%s has %s shards for %d ranks: only %d of %d workers are used. Provide more shards",
                type(self.dataset).__name__, num_shards(self.dataset), self.config.mesh.data_world_size,
                self._num_workers, self.config.num_workers,
            )  # fmt: skip
        if parts == 1 or self.config.sharding != "auto":
            return
        if not can_shard(self.dataset, parts) and not has_sharding_filter(self.dataset):
            _log.warning(
                "%s cannot be split (no shard(num_shards, index), or fewer than %d shards): each of %d parts (ranks "
                "times workers) reads all of it and keeps every %dth sample. Provide more shards or a shard method, or "
                'pass sharding="worker_info" if it splits itself by get_worker_info',
                type(self.dataset).__name__, parts, parts, parts,
            )  # fmt: skip

    # --- equal ends ---

    def agreeing(self, packets: _Packets) -> Iterator[Packet]:
        """Yield packets while every rank has one.

        Under "pad", yield packets while any rank has one, with repeats instead of missing ones.

        All ranks ask equally often: the question about batch k is asked before batch k - AHEAD is delivered, even by
        ranks that have no more batches.
        """
        padded = self.shape.last_batch == "pad"
        questions: deque[_Question] = deque()
        last: Packet | None = None
        ended = False
        while True:
            while len(questions) <= AHEAD:
                packet = None if ended else next(packets, None)
                ended = packet is None
                questions.append(self._ask(packet, any_rank=padded))
            packet, flag, work = questions.popleft()
            work.wait()
            if not flag.item():
                break
            if packet is None:
                packet = _stand_in(last or self._first_again(packets.cursors), self.config.mesh)
            last = packet
            yield packet
        for one in questions:
            one.work.wait()
        lost = sum(one.packet is not None for one in questions) + (packet is not None)
        if lost:
            self.metrics.add("discarded_batches", lost)
            _log.info("rank %d: another rank ran out of data; at least %d batches read here are discarded",
                      self.config.mesh.rank, lost)  # fmt: skip

    def _ask(self, packet: Packet | None, *, any_rank: bool) -> _Question:
        flag = torch.tensor([packet is not None], dtype=torch.int32, device="cpu")
        operation = dist.ReduceOp.MAX if any_rank else dist.ReduceOp.MIN
        work = dist.all_reduce(flag, op=operation, group=_job_group(self.config.mesh), async_op=True)
        return _Question(packet, flag, work)


class _Question(NamedTuple):
    """A pending question to all ranks: does every rank (or any rank) have this batch?"""

    packet: Packet | None
    flag: torch.Tensor
    work: Any


class _Packets:
    """Packets from torch's ``DataLoader``, and the position of its workers after the delivered packets.

    Attributes:
        cursors: Positions after the latest ``advance``; the worker that delivers next comes first.
    """

    def __init__(self, source: Any, cursors: tuple[Cursor, ...]) -> None:
        self._source, self.cursors = source, cursors
        self._ends: dict[int, Cursor] = {}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Packet:
        packet: Packet = next(self._source)
        while packet.is_end:
            self._ends[packet.after.worker] = packet.after
            packet = next(self._source)
        return packet

    @property
    def next_pass(self) -> tuple[Cursor, ...]:
        """Return the positions at the start of the next pass; empty if no state is passed on to it."""
        ends = [self._ends.get(cursor.worker, cursor).in_next_pass for cursor in self.cursors]
        handed_on = any(cursor.state is not None or cursor.first for cursor in ends)
        return tuple(sorted(ends, key=lambda cursor: cursor.worker)) if handed_on else ()

    def advance(self, packet: Packet) -> None:
        """Record that ``packet`` is delivered."""
        workers = [cursor.worker for cursor in self.cursors]
        if packet.after.worker in workers:
            place = workers.index(packet.after.worker)
            self.cursors = (*self.cursors[place + 1 :], *self.cursors[:place], packet.after)

    def leave_behind(self) -> None:
        """Forget the worker processes in a forked child, because they belong to the parent."""
        leave_behind(self._source)

    def close(self) -> None:
        """Stop the worker processes."""
        source, self._source = self._source, iter(())
        shut_down(source)


class _IterableRun:
    """The rest of one epoch. Without ``epoch_size`` it reads one packet ahead, to recognize the last one.

    Attributes:
        is_last: Whether the latest batch is the epoch's last one; only without ``epoch_size``.
    """

    def __init__(self, loop: IterableLoop, packets: _Packets) -> None:
        self._loop, self._packets = loop, packets
        self._stream: Iterator[Packet] = loop.agreeing(packets) if loop.is_agreed else packets
        self._ahead: Packet | None = None
        self._failure: Exception | None = None  # from reading ahead; raised after the batch before it
        self._has_begun = False
        self.is_last = False

    @property
    def cursors(self) -> tuple[Cursor, ...]:
        """Positions after the latest batch; after the epoch's last batch, the start of the next pass."""
        return self._packets.next_pass if self.is_last else self._packets.cursors

    def __next__(self) -> Any:
        """Return the next batch."""
        try:
            with self._loop.metrics.timed("wait_for_batch_s"), self._loop.workers.blamed():
                packet = self._next()
        except BaseException:
            self._loop.close_stream(self._packets)
            raise
        if packet is None:
            raise StopIteration
        self._packets.advance(packet)
        return packet.batch

    def close(self) -> None:
        """End the run. With ``epoch_size`` the stream is kept, and the next epoch continues with it."""
        self._ahead = None
        if not self._loop.is_counted:
            self._loop.close_stream(self._packets)

    def describe(self) -> str:
        """Describe the current activity, for reports."""
        return IterableLoop.describe(self._loop)  # a loop that shares batches describes this run

    def _next(self) -> Packet | None:
        if self._loop.is_counted:
            return next(self._stream, None)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        packet, self._ahead = self._ahead if self._has_begun else self._first(), None
        self._has_begun = True
        if packet is not None:
            try:
                self._ahead = next(self._stream, None)
            except Exception as error:  # noqa: BLE001  a user's dataset may raise anything
                self._failure = error
        self.is_last = self._ahead is None and self._failure is None
        return packet

    def _first(self) -> Packet | None:
        """Return the first packet; None if there are no packets."""
        loop, begins = self._loop, not any(cursor.num_items for cursor in self.cursors)
        packet = next(self._stream, None)
        if packet is None and begins and loop.has_read and hasattr(loop.dataset, "__next__"):
            raise read_up(loop.dataset)
        loop.has_read |= packet is not None
        return packet


def _pickled(state: object) -> bytes | None:
    """Return a state as bytes, for comparison; None if it cannot be pickled."""
    try:
        return pickle.dumps(state)
    except Exception:  # noqa: BLE001  a user's state may raise anything
        return None


def _beginning(cursors: tuple[Cursor, ...], epoch: int) -> tuple[Cursor, ...]:
    """Return the start of an epoch's pass; if the previous pass was left early, it has only the state of generators."""
    if all(cursor.pass_number == epoch and not cursor.num_items for cursor in cursors):
        return cursors
    ordered = sorted(cursors, key=lambda cursor: cursor.worker)
    return tuple(Cursor(worker=cursor.worker, pass_number=epoch, first=cursor.first) for cursor in ordered)


def _stand_in(last: Packet | None, mesh: DeviceMesh) -> Packet:
    """Return a copy of a packet, marked as padding."""
    if last is None:
        raise ConfigError(
            f"rank {mesh.rank} has no samples at all, so it has nothing to repeat: the data set has fewer shards or "
            f"samples than ranks; use fewer ranks"
        )
    valid = torch.zeros_like(last.batch["__valid__"])
    return Packet(batch={**last.batch, "__valid__": valid}, after=last.after)


def _job_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a gloo group of the mesh's ranks.

    All ranks create it when it is first needed, and keep it as long as the job's group. All loops share it, and it is
    never destroyed separately: a new group under the name of an old one finds the old addresses in the job's store, and
    hangs.
    """
    world: Any = dist.group.WORLD
    groups: dict[tuple[int, ...], dist.ProcessGroup] = _groups.setdefault(world, {})
    ranks = tuple(sorted(mesh.ranks))
    if ranks not in groups:
        whole = len(ranks) == dist.get_world_size()
        groups[ranks] = dist.new_group(  # ranks outside the mesh do not participate
            None if whole else list(ranks), timeout=_PATIENCE, backend="gloo", use_local_synchronization=not whole
        )
    return groups[ranks]


def _check_can_agree(mesh: DeviceMesh) -> None:
    usable = dist.is_available() and dist.is_initialized()
    if usable and dist.get_world_size() >= mesh.world_size and dist.get_rank() == mesh.rank:
        return
    raise ConfigError(
        f"an iterable data set on {mesh.world_size} ranks: its length is unknown, so ranks would end at different "
        f"batches and the job would hang. Give epoch_size, or call torch.distributed.init_process_group before "
        f"making the loader, so that ranks can ask each other"
    )


def _unchanged(packet: Any) -> Any:
    return packet
