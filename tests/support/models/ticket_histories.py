"""Random histories of tickets, by one seeded scheduler, beside a model that only counts what was settled.

The scheduler interleaves what ranks, threads and stores do: a sample is taken, a ticket acknowledged late or early,
dropped, requeued; states are saved; the job is killed and goes on from the last saved state, on another world. Every
step is one call, so a seed is a history.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from infra import DeviceMesh
from streaming import Tickets


class RowsLoader:
    """Hands out rows as a loader does, by position, without reading anything: ``uncollated`` for ``Tickets``."""

    is_elastic = True

    def __init__(self, num_rows: int, batch: int, num_ranks: int, rank: int) -> None:
        self.num_rows, self.global_batch_size = num_rows, batch
        self.device_mesh = DeviceMesh.from_sizes(dp_size=num_ranks, rank=rank)
        self._at = (0, 0)
        self.fails = False

    def lend(self, reader: RowsLoader, borrower: str) -> None:
        """Nothing is refused here: a history uses no loader beside its tickets."""

    def uncollated(self) -> RowsLoader:
        return self

    @property
    def epoch(self) -> int:
        return self._at[0]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._at[0], "samples_seen": self._at[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["epoch"], state["samples_seen"]

    def close(self) -> None:
        pass

    def with_state(self) -> _Rows:
        return _Rows(self)


class _Rows:
    def __init__(self, loader: RowsLoader) -> None:
        self._loader = loader

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> tuple[list[Any], dict[str, Any]]:
        loader = self._loader
        epoch, seen = loader._at
        if loader.fails:  # the batch is passed, and lost to this iterator
            loader.fails = False
            loader._at = epoch, min(seen + loader.global_batch_size, loader.num_rows)
            raise OSError("the store failed")
        if seen == loader.num_rows:
            loader._at = epoch + 1, 0
            raise StopIteration
        size = min(loader.global_batch_size, loader.num_rows - seen)
        mesh = loader.device_mesh
        low, high = size * mesh.data_rank // mesh.data_world_size, size * (mesh.data_rank + 1) // mesh.data_world_size
        self._was, loader._at = {"epoch": epoch, "samples_seen": seen}, (epoch, seen + size)
        return [{"row": f"{epoch}:{seen + row}"} for row in range(low, high)], loader.state_dict()

    def came_from(self) -> dict[str, Any]:
        return self._was


@dataclass
class _Rank:
    tickets: Tickets
    loader: Any
    rows: Iterator[tuple[int, Any]] | None = None
    held: list[tuple[int, str]] = field(default_factory=list)
    again: deque[int] = field(default_factory=deque)
    is_done: bool = False
    rests: bool = False


class History:
    """One history of a run of ``num_epochs``.

    Args:
        rng: Where chances come from.
        opened: Makes the loader of a rank: ``opened(num_ranks, rank)``.
        num_epochs: Epochs until every rank ends.
        worlds: Numbers of data ranks to choose from.
        group: Repetitions of each sample.
    """

    def __init__(
        self, rng: random.Random, opened: Callable[[int, int], Any], num_epochs: int, worlds: list[int], group: int = 1
    ) -> None:
        self._rng, self._opened, self._num_epochs = rng, opened, num_epochs
        self._worlds, self._group = worlds, group
        self.settled: Counter[str] = Counter()
        self._saved: tuple[str, Counter[str]] | None = None
        self._ranks: list[_Rank] = []
        self._most = rng.choice([None, None, rng.randint(1, 40)])
        self._start()

    def _start(self) -> None:
        for rank in self._ranks:
            rank.tickets.close()
        size = self._rng.choice(self._worlds)
        loaders = [self._opened(size, rank) for rank in range(size)]
        self._ranks = [_Rank(Tickets(one, group=self._group, most_in_flight=self._most), one) for one in loaders]
        self.settled = Counter()
        if self._saved is not None:
            state, settled = self._saved
            self.settled = Counter(settled)
            for rank in self._ranks:
                rank.tickets.load_state_dict(json.loads(state))

    def run(self, num_steps: int) -> Counter[str]:
        """Take random steps, then go on without faults to the end; return how often each row was settled."""
        rare = [self._requeue, self._save, self._leave, self._fail]
        actions = [self._take] * 12 + [self._settle] * self._rng.randint(3, 12) + rare
        for _ in range(num_steps):
            self._rng.choice(actions)()
            if self._rng.random() < 0.01:
                self._start()
        while not all(rank.is_done and not rank.held for rank in self._ranks):
            for rank in self._ranks:
                while rank.held and (self._rng.random() < 0.8 or rank.is_done or self._is_full(rank)):
                    self._settle_one(rank)
                self._take_from(rank)
        for rank in self._ranks:
            rank.tickets.close()
        return self.settled

    def _is_full(self, rank: _Rank) -> bool:
        return self._most is not None and rank.tickets.report()["in_flight"] >= self._most

    def _take(self) -> None:
        self._take_from(self._rng.choice(self._ranks))

    def _take_from(self, rank: _Rank) -> None:
        if rank.is_done or (self._is_full(rank) and not rank.again):
            return
        if rank.rows is None:
            is_last = rank.tickets.epoch >= self._num_epochs
            rank.is_done, rank.rests = is_last and not rank.again, is_last
            if rank.is_done:
                return
            rank.rows = rank.tickets.rest() if is_last else iter(rank.tickets)
        if rank.rests and not rank.again and rank.held:  # it would wait
            return
        for number in range(self._group):
            try:
                found = next(rank.rows, None)
            except OSError:
                assert not number, "a group is not cut"
                rank.rows = None
                return
            if found is None:
                assert not number, "a group is not cut"
                rank.rows = None
                return
            ticket, sample = found
            if number:
                assert (ticket, sample["row"]) == rank.held[-1]
                continue
            if rank.again:
                assert ticket == rank.again.popleft(), "requeued tickets come before new ones, in order"
            assert not self.settled[sample["row"]], f"{sample['row']} comes, and was settled"
            assert ticket not in [held for held, _ in rank.held]
            rank.held.append((ticket, sample["row"]))

    def _settle(self) -> None:
        rank = self._rng.choice(self._ranks)
        if rank.held:
            self._settle_one(rank)

    def _settle_one(self, rank: _Rank) -> None:
        ticket, row = rank.held.pop(int(len(rank.held) * self._rng.random() ** self._rng.choice([1, 3])))
        if self._rng.random() < 0.1:
            rank.tickets.drop(ticket, self._rng.choice(["stale", "failed"]))
        else:
            rank.tickets.ack(ticket)
        self.settled[row] += 1

    def _requeue(self) -> None:
        rank = self._rng.choice(self._ranks)
        if rank.held:
            ticket, _ = rank.held.pop(self._rng.randrange(len(rank.held)))
            rank.tickets.requeue(ticket)
            rank.again.append(ticket)
            rank.is_done = False

    def _leave(self) -> None:
        """Leave a loop early: the next one continues with the next sample."""
        self._rng.choice(self._ranks).rows = None

    def _fail(self) -> None:
        """Let the next batch of a rank fail, once."""
        loader = self._rng.choice(self._ranks).loader
        if hasattr(loader, "fails"):
            loader.fails = True

    def _save(self) -> None:
        states = [json.loads(json.dumps(rank.tickets.state_dict())) for rank in self._ranks]
        self._rng.shuffle(states)
        self._saved = json.dumps(Tickets.merged(states)), Counter(self.settled)
