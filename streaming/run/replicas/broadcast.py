"""Read for other ranks: ``replicate="broadcast"`` in a data share, ``sharding="dispatch"`` for a whole job.

Each side runs a thread, so that batch k + 1 is sent while the training loop works with batch k::

    reading rank   pipeline ─▶ teller ═▶ consumer          START, BATCH, …, END; BEAT while there is nothing to send
    other ranks    listener ═▶ consumer                    every message is answered with the number of batches waiting

- A batch is delivered on the reading rank only when every other rank has it. So if all ranks leave their loops after
  the same batch, nothing is in transit.
- Messages continue (BEAT) however long a training step, a store or a decoder takes. Only a process that is gone, or a
  host that is silent, ends a run by the time-out.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from infra import DeviceMesh
from streaming.build.batches.jagged import fresh
from streaming.build.batches.portion import NUM_SAMPLES
from streaming.common.counters import Metrics
from streaming.common.forks import in_children
from streaming.common.job.error_codec import error_from_json, error_to_json
from streaming.common.monitor import Monitor
from streaming.errors import ReplicaError, StateError
from streaming.run.engine.memory.batch_memory import BatchMemory
from streaming.run.engine.threads.jobs import LOOK_UP_S
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run
from streaming.run.replicas.batch_codec import decode, encode
from streaming.run.replicas.group import ReplicaGroup
from streaming.run.replicas.options import Broadcast, Replicas
from streaming.types import override

START, BATCH, BEAT, END, FAILED = range(5)
BEAT_S = 0.5
"""Interval of signs of life while there is nothing to send, and so the delay until a rank learns that another left."""
MOST_WAITING = 4
"""Maximum number of batches that wait on a rank that falls behind the reading one."""
_BATCH_BYTES = 1 << 30
"""Limit on reused memory of received batches, unless ``memory_limit`` sets another."""
_NO_MORE = 2**62  # as the number of batches read: no more will follow
_GRACE_S = 10.0  # for a thread that only has to answer messages in progress

_left_behind: list[ReplicaGroup | None] = []  # the parent's, in a forked child

Allocate = Callable[[int], torch.Tensor]
Finish = Callable[[Any], Any]
Part = Callable[[Any, int], Any]
"""Cuts one rank's portion out of a batch with this number of samples. Hashable: equal ones cut the same portion."""


class Sharing:
    """The ranks that share one reader, across many runs. For one thread.

    Args:
        portions: Each rank's portion of a batch, by rank; equal ones are made once.
        broadcast: How batches are sent.
        rank: This rank.
        pin: Page-locks a batch, or None.
        option: See ``ReplicaGroup``.
        of: See ``ReplicaGroup``.
        reads_inline: On the reading rank, the thread that requests batches reads; otherwise a separate thread does.
        metrics: Counts the consumer's waits; None: no count.
        batch_bytes: Limit on reused memory of received batches.
        is_cut: Whether batches are lists of micro-batches, each with its own portions.

    Attributes:
        ranks: All ranks. The first one reads.
        metrics: Counts the consumer's waits.
    """

    def __init__(
        self, portions: Mapping[int, Part], broadcast: Broadcast, rank: int, *, pin: Finish | None,
        option: str = 'replicate="broadcast"', of: str = "one data share", reads_inline: bool = False,
        metrics: Metrics | None = None, batch_bytes: int = _BATCH_BYTES, is_cut: bool = False,
    ) -> None:  # fmt: skip
        self.ranks = tuple(portions)
        self.is_cut = is_cut
        self.metrics = metrics or Metrics()
        self._broadcast = broadcast
        self._is_source = rank == self.ranks[0]
        self._pin = pin
        self._memory = BatchMemory(batch_bytes)
        self._portions = list(portions.values())
        self._option, self._of = option, of
        self._source_type = _InlineRun if reads_inline else _SourceRun
        self._group: ReplicaGroup | None = None
        in_children(self, Sharing.leave_behind)

    @classmethod
    def of_replicas(
        cls, replicas: Replicas, broadcast: Broadcast, mesh: DeviceMesh, *, pin: Finish | None,
        reads_inline: bool = False, metrics: Metrics | None = None, batch_bytes: int = _BATCH_BYTES,
        is_cut: bool = False,
    ) -> Sharing:  # fmt: skip
        """Return the sharing for the replicas of the rank that ``mesh`` represents."""
        ranks = mesh.replicas_of(mesh.data_rank)
        portions = {rank: replicas.portion(mesh.with_rank(rank)) for rank in ranks}
        return cls(
            portions, broadcast, mesh.rank, pin=pin, reads_inline=reads_inline, metrics=metrics,
            batch_bytes=batch_bytes, is_cut=is_cut,
        )  # fmt: skip

    def each(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Return what a function makes of a batch, or of each of its micro-batches."""
        return [function(one) for one in batch] if self.is_cut else function(batch)

    def run(self, read: Callable[[], Run], place: Place) -> Run:
        """Return batches from ``place`` on. ``read`` begins to read them, on the one rank that reads.

        Raises:
            ConfigError, ReplicaError: See ``ReplicaGroup``.
        """
        if self._group is None:
            self._group = ReplicaGroup(self.ranks, self._broadcast.timeout_s, option=self._option, of=self._of)
        if self._is_source:
            return self._source_type(self, self._group, read, place, self._broadcast, self._portions, self._pin)
        allocate = self._memory.allocate if self._pin is None else partial(fresh, pinned=True)
        return _ReplicaRun(self, self._group, place, self._broadcast, allocate)

    def page_lock(self, locker: Any) -> Any:
        """See ``Stage``: batches are made where they are read."""
        return locker

    def drop(self) -> None:
        """See ``Stage``."""
        self._group = None

    def leave_behind(self) -> None:
        """Drop the connections in a forked child: they are the parent's, and their threads do not exist here."""
        _left_behind.append(self._group)
        self._group = None


class _Consumer(ABC):
    """The common part of both kinds of run: batches that wait for the training loop, and the end of the run.

    ``_changed`` guards ``_waiting``, ``_num_taken``, ``_ended``, ``_error`` and ``_left``.
    """

    def __init__(self, sharing: Sharing, group: ReplicaGroup, place: Place, name: str) -> None:
        self._sharing = sharing
        self._group = group
        self._place = place
        self._changed = Monitor()
        self._waiting: deque[Any] = deque()
        self._num_taken = 0
        self._ended = False
        self._error: BaseException | None = None
        self._left = False
        self._abandoned = False
        self._is_broken = False
        self._thread = threading.Thread(target=self._work, name=f"shardstream-{name}", daemon=True)

    def __next__(self) -> Any:
        """Return the next batch."""
        with self._changed:
            # A batch is delivered once, in order, and counted in _num_taken.
            if not self._has_answer():
                with self._sharing.metrics.timed("wait_for_batch_s"):
                    while not self._changed.wait_for(self._has_answer, LOOK_UP_S):
                        pass
            if self._waiting and not self._left:
                self._num_taken += 1
                self._changed.notify_all()
                return self._waiting.popleft()
            error, self._error = self._error, None
        self.close()
        if error is not None:
            raise error
        raise StopIteration

    def _has_answer(self) -> bool:
        """Return whether the next item of the consumer is known: a batch, or the end."""
        return bool(self._waiting) or self._ended or self._left

    def close(self) -> None:
        """Leave the run. Waits until the other ranks know."""
        with self._changed:
            # Nothing is delivered after _left; waiting batches are dropped once.
            self._left = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(_GRACE_S)
        if self._thread.is_alive():  # waits for a rank that never began; ends with its connections
            self._abandoned = self._is_broken = True
        if self._is_broken:
            self._sharing.drop()

    def _work(self) -> None:
        try:
            self._converse()
        except BaseException as error:  # noqa: BLE001  thread boundary: the consumer gets it
            self._is_broken = True
            self._end(error)
        else:
            self._end(None)
        del self._group

    @abstractmethod
    def _converse(self) -> None:
        """Communicate with the other replicas until the epoch, or this run, is over."""

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            # The first error stays; after _ended nothing is added to _waiting.
            self._ended, self._error = True, self._error or error
            self._changed.notify_all()


class _SourceRun(_Consumer):
    """The reading rank's run: reads, sends to the others, delivers its own portion."""

    def __init__(
        self, sharing: Sharing, group: ReplicaGroup, read: Callable[[], Run], place: Place,
        broadcast: Broadcast, portions: list[Part], pin: Finish | None,
    ) -> None:  # fmt: skip
        super().__init__(sharing, group, place, "tell")
        self._broadcast = broadcast
        self._portions = portions
        self._pin = pin
        self._built: deque[tuple[int, Any]] = deque()
        self._running: Run | None = None
        self._gone: int | None = None
        self._others_wait = 0
        try:
            self._running = read()
        except Exception as error:  # noqa: BLE001  sent to the other ranks too
            self._built.append((FAILED, error))
        self._reader: threading.Thread | None = None
        self._start_reading()
        self._thread.start()

    @override
    def close(self) -> None:
        running = self._running
        super().close()
        if running is not None:
            running.close()
        if self._reader is not None:
            self._reader.join(_GRACE_S)

    def describe(self) -> str:
        """Describe what the run is doing, for people."""
        own = "starting" if self._running is None else self._running.describe()
        return f"{own}; reads for ranks {self._sharing.ranks[1:]}, of which one holds {self._others_wait} batches"

    def _start_reading(self) -> None:
        self._reader = threading.Thread(target=self._read, name="shardstream-read-ahead", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Take batches from the pipeline, one ahead of the teller."""
        running = self._running
        while running is not None:
            try:
                item = (BATCH, next(running))
            except StopIteration:
                item = (END, None)
            except BaseException as error:  # noqa: BLE001  thread boundary: all ranks get it
                item = (FAILED, error)
            with self._changed:
                # At most one item waits to be sent; after the end, or after _left, nothing follows.
                self._changed.wait_for(lambda: self._left or not self._built)
                self._built.append(item)
                self._changed.notify_all()
                if self._left or item[0] != BATCH:
                    return

    def _converse(self) -> None:
        self._tell(START, 0, json.dumps([self._place.epoch, self._place.samples_seen]).encode())
        if self._error is not None:
            return
        for number in range(2**62):
            kind, value = self._next_item(number)
            if kind == BATCH:
                try:
                    value, payloads = self._portioned(value)
                except Exception as error:  # noqa: BLE001  handled as if collate_fn had raised it
                    kind, value = FAILED, error
            if kind == END:
                self._tell(END, number, b"")
                return
            if kind == FAILED:
                self._error = value
                self._tell(FAILED, number, error_to_json(value))
                return
            self._heard(self._group.tell(BATCH, number, payloads))
            with self._changed:
                # The items sent to the other ranks are here too, unless this rank has left.
                if not self._left:
                    self._waiting.append(value)
                self._changed.notify_all()

    def _next_item(self, number: int) -> tuple[int, Any]:
        """Return the next item, once there is room for it on every rank."""
        while True:
            with self._changed:
                # The item leaves _built before it is sent to the others: it is sent once.
                if self._changed.wait_for(lambda: self._left or self._decided(), BEAT_S):
                    if self._left:
                        return FAILED, _left(self._sharing.ranks[0], number)
                    if self._gone is not None and (not self._built or self._built[0][0] == BATCH):
                        return FAILED, _left(self._gone, number)
                    item = self._built.popleft()
                    self._changed.notify_all()
                    return item
            self._tell(BEAT, number, b"")

    def _decided(self) -> bool:
        if not self._built:
            return False
        room = not self._waiting and self._others_wait < MOST_WAITING
        return room or self._built[0][0] != BATCH or self._gone is not None

    def _portioned(self, batch: Any) -> tuple[Any, list[torch.Tensor]]:
        """Return this rank's portion, and those of the others, encoded; equal ones once."""
        each, coded = self._sharing.each, dict[Part, torch.Tensor]()
        for portion in self._portions[1:]:
            if portion not in coded:
                parts = each(partial(_part, portion), batch)
                coded[portion] = encode(each(self._broadcast.encode, parts), _bytes)
        own = each(partial(_part, self._portions[0]), batch)
        own = own if self._pin is None else each(self._pin, own)
        return own, [coded[portion] for portion in self._portions[1:]]

    def _tell(self, kind: int, number: int, data: bytes) -> None:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None
        self._heard(self._group.tell(kind, number, [payload] * (len(self._portions) - 1)))

    def _heard(self, replies: list[list[int]]) -> None:
        if self._abandoned:
            raise ReplicaError("this run was given up")
        self._others_wait = max(waiting for _, waiting, _, _ in replies)
        for rank, (has_left, _, epoch, samples_seen) in zip(self._sharing.ranks[1:], replies, strict=True):
            is_here = (epoch, samples_seen) == (self._place.epoch, self._place.samples_seen)
            if not is_here and self._error is None:
                there = Place(epoch=epoch, samples_seen=samples_seen)
                self._error = _elsewhere(self._sharing.ranks[0], self._place, rank, there)
                self._tell(FAILED, 0, error_to_json(self._error))
                return
            if has_left and self._gone is None:
                self._gone = rank


class _InlineRun(_SourceRun):
    """The reading rank's run if the consumer itself reads, so that reading runs in no other thread.

    It reads one batch more than it delivers: that one is sent while the training works with the other.
    """

    def __next__(self) -> Any:
        """Return the next batch."""
        while self._running is not None and self._num_read < self._num_taken + 2 and not (self._ended or self._left):
            self._read_one(self._running)
        return super().__next__()

    def _start_reading(self) -> None:
        self._num_read = 0 if self._running is not None else _NO_MORE

    def _read_one(self, running: Run) -> None:
        try:
            item = (BATCH, next(running))
            self._num_read += 1
        except StopIteration:
            item, self._num_read = (END, None), _NO_MORE
        except Exception as error:  # noqa: BLE001  all ranks get it, after the batches before it
            item, self._num_read = (FAILED, error), _NO_MORE
        with self._changed:
            # _built is in the order of batches, and ends with the item that ended the run.
            self._built.append(item)
            self._changed.notify_all()

    def _decided(self) -> bool:
        # Nothing is read during a training step: a rank that has left must not wait for it to end.
        return super()._decided() or (self._gone is not None and not self._built)


class _ReplicaRun(_Consumer):
    """The run of a rank for which another rank reads."""

    def __init__(
        self,
        sharing: Sharing,
        group: ReplicaGroup,
        place: Place,
        broadcast: Broadcast,
        allocate: Callable[..., torch.Tensor],
    ) -> None:
        super().__init__(sharing, group, place, "listen")
        self._decode = broadcast.decode
        self._allocate = allocate
        self._thread.start()

    def describe(self) -> str:
        """Describe what the run is doing, for people."""
        source = self._sharing.ranks[0]
        return f"batch {self._num_taken}: rank {source} reads for this one; {len(self._waiting)} batches are here"

    def _converse(self) -> None:
        while True:
            kind, _, payload = self._group.hear(lambda size: self._allocate((size,), dtype=torch.uint8))
            if self._abandoned:
                raise ReplicaError("this run was given up")
            if kind == BATCH and payload is not None:
                batch = self._sharing.each(self._decode, decode(payload))
                with self._changed:
                    # Waiting batches are in the order in which they arrived; none after _left.
                    if not self._left:
                        self._waiting.append(batch)
                    self._changed.notify_all()
            elif kind == FAILED and payload is not None:
                note = f"raised on rank {self._sharing.ranks[0]}, which reads for this one"
                self._error = error_from_json(bytes(payload.numpy()), note)
            with self._changed:
                # The reply describes one moment: batches that this rank has dropped do not count as waiting.
                has_left, waiting = self._left, len(self._waiting)
            self._group.reply(has_left, waiting, self._place.epoch, self._place.samples_seen)
            if kind in {END, FAILED}:
                return


def _part(portion: Part, batch: Any) -> Any:
    return portion(batch, batch.get(NUM_SAMPLES, 0) if isinstance(batch, dict) else 0)


def _bytes(size: int) -> torch.Tensor:
    return fresh((size,), torch.uint8)


def _left(rank: int, number: int) -> ReplicaError:
    return ReplicaError(
        f"rank {rank} left its loop before batch {number} of this run, while another rank with the same reader "
        "continued; look for an error there, or leave the loops after the same batch"
    )


def _elsewhere(source: int, there: Place, rank: int, here: Place) -> StateError:
    return StateError(
        f"replicas begin at different places: rank {source} at epoch {there.epoch}, sample {there.samples_seen}, but "
        f"rank {rank} at epoch {here.epoch}, sample {here.samples_seen}. Load the same state and set the same epoch on "
        "all"
    )
