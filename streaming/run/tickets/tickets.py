"""Deliver samples with tickets, for training that consumes out of order: ``Tickets``."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from numbers import Real
from typing import Any, Literal, Self
from zlib import crc32

from streaming.common.arguments import checked_count, checked_int, checked_seconds
from streaming.errors import ConfigError, StateError, TicketError
from streaming.run.epochs.iterator import Closable
from streaming.run.epochs.watch import STALL_REPORT_S, Watchdog
from streaming.run.loops.course import ranks_together
from streaming.run.tickets.feeds import Dealt, feed_of, spot_of
from streaming.run.tickets.ledger import MOST_RANKS, OpenTickets
from streaming.run.tickets.records import Handed, Settled, Spot, checked_totals, first_spot, missing
from streaming.storage import Storage

_VERSION = 1
_ACKNOWLEDGED, _DROPPED = "acknowledged", "dropped: "
_KEYS = {"version", "unit", "loader", "sizes", "ranks", "earlier", "counts", "for_others"}


@dataclass(frozen=True, slots=True)
class _Kept:
    """A portion with rows that are open or not delivered yet."""

    spot: Spot
    state: Any
    first: int  # ordinal of its first row
    end: int
    earlier: tuple[Handed, ...]  # records of earlier worlds from this place on


class Tickets(Closable):
    """Iterate over samples with tickets. After a restart, exactly the samples that were not settled come again.

    For training that consumes out of order: asynchronous reinforcement learning, evaluation by many workers, queues of
    people who label. Such a program has consumed other samples than a loader has delivered, so the loader's own state
    repeats or loses samples. A ticket is an integer (at most 63 bits) that stands for a sample of this run. ::

        tickets = Tickets(loader, group=8)           # the same sample eight times in a row, with one ticket
        for ticket, sample in tickets:
            queue.put((ticket, sample))
        ...                                          # from any thread, in any order, at any time:
        tickets.ack(ticket)                          # trained on: it never comes again
        tickets.drop(ticket, why="stale")            # given up on purpose, counted by reason
        tickets.requeue(ticket)                      # it comes again, before new ones
        state = tickets.sync()                       # of all ranks: whatever was not settled is in it

    Each ``iter(tickets)`` is an epoch of the loader, or the rest of one; tickets may be settled long after it. After a
    restart, the open samples come first, in order, each with a new ticket. They come on any number of data ranks, if
    the global batch size is the same.

    Samples are those of the loader, decoded and transformed, in its order, and not collated. Padding is left out, and
    so are placeholders of bad samples under ``on_error="skip"``. Each dict is a copy; its tensors are the same after
    ``requeue``, so do not change them in place. Samples stay in memory until they are settled.

    Args:
        loader: A ``DataLoader`` or ``DeviceMeshFetcher``; from now on the tickets read it, not you. Or any iterable
            with ``state_dict`` and ``load_state_dict``: its states are kept while items are open, and it continues on
            the same rank only.
        group: Number of times in a row that each sample is delivered, with one ticket.
        unit: What a ticket stands for: ``"sample"``, or ``"batch"``, a batch as the loader makes it. Batches continue
            on the same number of ranks only.
        most_in_flight: The iterator waits while this number of tickets is open; None: never. Long waits are reported
            like those for batches.
        stall_report_s: Seconds after which such a wait is reported as a warning; None: never.

    Raises:
        ConfigError: An argument is invalid, or the loader has options that act on whole batches.
    """

    def __init__(
        self,
        loader: Any,
        *,
        group: int = 1,
        unit: Literal["sample", "batch"] = "sample",
        most_in_flight: int | None = None,
        stall_report_s: float | None = STALL_REPORT_S,
    ) -> None:
        if unit not in ("sample", "batch"):
            raise ConfigError(f'Tickets: unit: expected "sample" or "batch", got {unit!r}')
        self._group = checked_count("Tickets: group", group, 1)
        self._most = None if most_in_flight is None else checked_count("Tickets: most_in_flight", most_in_flight, 1)
        self._unit = unit
        self._feed = feed_of(loader, whole=unit == "batch")
        checked_int("Tickets: data ranks of the loader's mesh", self._feed.num_ranks, 1, MOST_RANKS)
        self._before: Counter[str] = Counter()
        self._placed = threading.Lock()  # guards _settled, _kept and _after, which belong to one place
        self._asked = threading.RLock()  # held by the thread that asks for a ticket, also while it waits
        self._stall_report_s = stall_report_s
        self._begin((), self._feed.state())
        self._feed.take()

    def _begin(self, records: Sequence[Handed], state: Mapping[str, Any]) -> None:
        """Begin to deliver from the feed's place on."""
        begins = [self._feed.num_ranks, self._unit, state, [one.to_dict() for one in records]]
        self._ledger = OpenTickets(self._feed.rank, crc32(json.dumps(begins, default=str).encode()))
        self._settled = Settled(records)
        self._kept: deque[_Kept] = deque()
        self._after = dict(state)
        self._due: deque[tuple[bool, Any]] = deque()
        self._rows: Iterator[tuple[int, Any]] | None = None
        self._is_broken = False

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self._feed.epoch

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Return an iterator over the next epoch, or the rest of the current one: pairs of a ticket and its sample.

        A loop that was left early, or failed, continues with the next sample. Several threads may share the iteration;
        each ticket goes to one of them.
        """
        if self._rows is None:
            self._rows = self._issued()
        return _Iteration(self, self._ledger, self._rows)

    def _next_of(self, ledger: OpenTickets, rows: Iterator[tuple[int, Any]]) -> tuple[int, Any]:
        """Return the next row of an iteration, and forget the iteration at its end."""
        with self._asked:
            # A running iteration is the one in _rows; one that has ended is not.
            try:
                ledger.check()
                return next(rows)
            except BaseException:
                if self._rows is rows:
                    self._rows = None
                raise

    def rest(self) -> Iterator[tuple[int, Any]]:
        """Yield requeued samples until no ticket is open, and begin no epoch: for the end of a run.

        Waits for tickets that are in flight. A running iterator may continue afterwards.
        """
        ledger = self._ledger
        while True:
            yield from self._again(ledger)
            if not any(ledger.num_open()):
                return
            self._wait(ledger, 0)

    def _issued(self) -> Iterator[tuple[int, Any]]:
        """Yield the rest of an epoch.

        1. What is requeued comes first, at any time.
        2. Then the rows that are left of the batch taken over last (``_due``), if an earlier iteration failed there.
        3. Then the rows of each further batch. An iteration that failed may have lost batches that the feed had already
           passed, so the feed goes back to the state after the batch taken over last.
        """
        if self._is_broken:
            self._feed.load(self._after)
        self._is_broken, ledger = True, self._ledger
        yield from self._of_due(ledger)
        for portion in self._feed.portions():
            ledger.check()  # load_state_dict may have moved the feed
            self._take_over(portion)
            yield from self._of_due(ledger)
        yield from self._again(ledger)
        self._is_broken = False

    def _take_over(self, portion: Dealt) -> None:
        last = portion.low + len(portion.samples)
        with self._placed:
            # The batch is kept, and its successor is known, before its first row is delivered.
            earlier = self._settled.rest(portion.spot)
            is_settled = self._settled.of_batch(portion.spot, portion.size, portion.low, last)
            rows, first = self._ledger.open_rows()
            self._forget(rows[0] if rows else first)
            self._kept.append(_Kept(portion.spot, portion.state, first, first + len(is_settled), earlier))
            self._after = portion.after
            self._due.extend(zip(is_settled, portion.samples, strict=True))

    def _of_due(self, ledger: OpenTickets) -> Iterator[tuple[int, Any]]:
        due = self._due
        yield from self._again(ledger)
        while due:
            is_settled, sample = due[0]
            if is_settled or (isinstance(sample, dict) and sample.get("__valid__") is False):
                ledger.skip()  # settled earlier, or only a placeholder of a bad sample
                due.popleft()
                continue
            yield from self._again(ledger)
            while not ledger.has_room(self._most):
                self._wait(ledger, self._most)
                yield from self._again(ledger)
            ticket = ledger.hand_out(sample)
            due.popleft()
            yield from self._repeated(ledger, ticket, sample)

    def _again(self, ledger: OpenTickets) -> Iterator[tuple[int, Any]]:
        while (found := ledger.again()) is not None:
            yield from self._repeated(ledger, *found)

    def _repeated(self, ledger: OpenTickets, ticket: int, sample: Any) -> Iterator[tuple[int, Any]]:
        for number in range(self._group):
            if number and not ledger.is_open(ticket):
                return
            yield ticket, dict(sample) if isinstance(sample, dict) else sample

    def _wait(self, ledger: OpenTickets, most: int | None) -> None:
        watchdog = Watchdog(self._stall_report_s, "no ticket", partial(_describe, weakref.ref(self)))
        try:
            watchdog.begin()
            ledger.wait_for_room(most)
        finally:
            watchdog.end()
            watchdog.stop()

    def _forget(self, first_open: int) -> None:
        """Drop the portions before the one with the first open row."""
        while self._kept and self._kept[0].end <= first_open:
            self._kept.popleft()

    # --- settling, from any thread ---

    def ack(self, ticket: int) -> None:
        """Note that a sample was trained on: it never comes again. Works on any rank of the job (see ``sync``).

        Raises:
            TicketError: The ticket is not open: settled before, not handed out yet, or of another run.
        """
        self._ledger.settle(_checked(ticket), _ACKNOWLEDGED)

    def drop(self, ticket: int, why: str) -> None:
        """Give up a sample on purpose, and count it by reason: it never comes again. Works on any rank, like ``ack``.

        Raises:
            TicketError: The ticket is not open.
        """
        if not isinstance(why, str) or not why:
            raise ConfigError(f'Tickets.drop: why: expected a reason such as "stale", got {why!r}')
        self._ledger.settle(_checked(ticket), _DROPPED + why)

    def requeue(self, ticket: int) -> None:
        """Deliver a sample again, with the same ticket, before new ones. Call on the rank that delivered it.

        Raises:
            TicketError: The ticket is not open, of another rank, or waits to come again already.
        """
        self._ledger.requeue(_checked(ticket))

    def score(self, ticket: int, value: float) -> None:
        """Note a number for a sample's key, such as its mean reward, before the ticket is settled.

        The last number per key counts; ``write_scores`` writes them for ``shard_tools column add``.

        Raises:
            TicketError: The ticket is not open, of another rank, or its sample has no ``"__key__"``.
            ConfigError: The value is not a finite number.
        """
        self._ledger.score(_checked(ticket), _score(value))

    def write_scores(self, path: str | os.PathLike[str]) -> int:
        """Write the scores of this rank as JSON lines of key and score. Replace the whole file. Return their number.

        ``shard_tools column add SET score --from FILE --on key`` makes a column of them, by which a ``Curriculum``
        orders and ``where=`` selects.

        Args:
            path: The file, or a URL. Folders that are missing are made.

        Raises:
            StorageError: It cannot be written.
        """
        scores = self._ledger.all_scores()
        lines = (json.dumps({"key": key, "score": value}) + "\n" for key, value in sorted(scores.items()))
        Storage().put(os.fspath(path), "".join(lines).encode())
        return len(scores)

    def report(self) -> dict[str, Any]:
        """Count tickets: acknowledged, dropped by reason, in flight, waiting to come again; and name the oldest.

        Returns:
            ``acknowledged``; ``dropped``, by reason; ``in_flight``; ``requeued``; ``oldest``: None, or the ticket that
            is in flight for longest, with ``seconds``, and ``steps``: the number of tickets issued since then. The
            first two include those of earlier runs on the first data rank.
        """
        counts = self._counts()
        in_flight, requeued = self._ledger.num_open()
        oldest = self._ledger.oldest()
        named = None if oldest is None else dict(zip(("ticket", "seconds", "steps"), oldest, strict=True))
        dropped = {how.removeprefix(_DROPPED): n for how, n in counts.items() if how.startswith(_DROPPED)}
        return {
            "acknowledged": counts[_ACKNOWLEDGED], "dropped": dropped, "in_flight": in_flight, "requeued": requeued,
            "oldest": named,
        }  # fmt: skip

    def _counts(self) -> Counter[str]:
        return self._before + self._ledger.counted()

    # --- states ---

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state: a JSON-able dict. With several ranks ``merged`` joins all parts."""
        with self._placed:
            # At one place: rows, kept batches and records of earlier worlds belong together.
            rows, come_to = self._ledger.open_rows()
            self._forget(rows[0] if rows else come_to)
            if self._kept:
                kept = self._kept[0]
                state, first, spot, earlier = kept.state, kept.first, kept.spot, kept.earlier
            else:
                state, first, spot = self._after, come_to, spot_of(self._after)
                earlier = self._settled.rest(spot)
        own = Handed(
            rank=self._feed.rank, num_ranks=self._feed.num_ranks, spot=spot, num_rows=come_to - first,
            open=tuple(row - first for row in rows),
        )  # fmt: skip
        return {
            "version": _VERSION, "unit": self._unit, "loader": state, "sizes": self._feed.sizes(),
            "ranks": [own.to_dict()], "earlier": [one.to_dict() for one in earlier], "counts": dict(self._counts()),
            "for_others": [[ticket, how] for ticket, how in self._ledger.for_others().items()],
        }  # fmt: skip

    def sync(self, timeout: float = 600.0) -> dict[str, Any]:
        """Return the state of all ranks, through the job's store. Every rank calls this, and gets the same state.

        Tickets that other ranks acknowledged or dropped are settled by the rank that issued them.

        Args:
            timeout: Seconds to wait for the other ranks, in each of two rounds.

        Raises:
            AgreementError: A rank did not arrive in time, or another rank settled a ticket that was settled before.
            StateError: Ranks that share a data rank have settled different tickets.
        """
        seconds = checked_seconds("Tickets.sync: timeout", timeout)
        if self._feed.num_ranks == 1:
            return self.state_dict()
        ranks, _ = ranks_together(self._feed.mesh, seconds, subject="tickets")
        given = ranks.exchange(lambda: {"for_others": list(self._ledger.for_others().items())})
        told = [(ticket, how) for facts in given.values() for ticket, how in facts["for_others"]]

        def settled() -> dict[str, Any]:
            for ticket, how in told:
                if self._ledger.is_mine(ticket):
                    self._ledger.settle(ticket, how)
            self._ledger.delivered(ticket for ticket, _ in told)
            return {"state": json.dumps(self.state_dict())}

        by_rank: dict[int, dict[str, Any]] = {}
        for facts in ranks.exchange(settled).values():
            state = json.loads(facts["state"])
            rank = state["ranks"][0]["share"][0]
            if by_rank.setdefault(rank, state)["ranks"] != state["ranks"]:
                raise StateError(
                    f"Tickets.sync: ranks that share data rank {rank} have settled different tickets; they get the "
                    "same ones, so settle each ticket on all of them, or make the tickets on one of them"
                )
        return Tickets.merged([*by_rank.values()])

    @staticmethod
    def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the states of all data ranks of a world into one state from which any world continues.

        Args:
            states: The results of ``state_dict``, one per data rank.

        Raises:
            StateError: Some data ranks are absent, come twice, or are not of the same run.
        """
        if not states:
            raise StateError("Tickets.merged: expected the state of each data rank, got none")
        for state in states:
            _check(state)
        first = min(states, key=lambda state: spot_of(state["loader"]))
        records = [Handed.from_dict(one) for state in states for one in state["ranks"]]
        worlds, ranks = {record.num_ranks for record in records}, [record.rank for record in records]
        absent = missing(records)
        if len(worlds) > 1 or absent or len(set(ranks)) < len(ranks):
            raise StateError(
                f"Tickets.merged: expected one state per data rank of one world, got ranks {sorted(ranks)} of worlds "
                f"of {sorted(worlds)}" + (f"; absent: {absent}" if absent else "")
            )
        for name in ("unit", "sizes"):
            if any(state[name] != first[name] for state in states):
                raise StateError(f"Tickets.merged: {name} differs: {[state[name] for state in states]}")
        elsewhere = [tuple(one) for state in states for one in state["for_others"]]
        if elsewhere:
            raise StateError(
                f"Tickets.merged: {len(elsewhere)} tickets were settled on another rank than the one that handed them "
                "out; tickets.sync(), called by every rank, brings them there and returns the merged state"
            )
        counts: Counter[str] = Counter()
        for state in states:
            counts.update(checked_totals(state["counts"]))
        return {**first, "ranks": [record.to_dict() for record in records], "counts": dict(counts), "for_others": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: its open samples come first, in order, then those that were never delivered.

        Running iterators end.

        Raises:
            StateError: It is malformed, not that of all ranks, of another unit or batch size, or belongs to another
                dataset.
        """
        _check(state)
        records = [Handed.from_dict(one) for one in state["ranks"]]
        earlier = [Handed.from_dict(one) for one in state["earlier"]]
        absent, world = missing(records), records[0].num_ranks
        if absent:
            raise StateError(
                f"load_state_dict: the state of tickets of data ranks {absent} is missing; save what tickets.sync() "
                "returns, or Tickets.merged(states of all ranks)"
            )
        if state["for_others"]:
            raise StateError(
                "load_state_dict: tickets of other ranks are settled in it; save what tickets.sync() returns"
            )
        if state["unit"] != self._unit:
            raise StateError(f"load_state_dict: unit: expected {state['unit']!r}, as in the state, got {self._unit!r}")
        if not self._feed.is_elastic and world != self._feed.num_ranks:
            raise StateError(
                f"load_state_dict: expected {world} data ranks, as in the state, got {self._feed.num_ranks}: only "
                'samples of a DataLoader or DeviceMeshFetcher (unit="sample") continue on another number'
            )
        sizes = json.loads(json.dumps(self._feed.sizes()))
        if sizes != json.loads(json.dumps(state["sizes"])):
            raise StateError(
                f"load_state_dict: global batch size: expected {state['sizes']}, as in the state, got {sizes}: rows "
                "are counted by batches. Give the same global_batch_size"
            )
        counts = checked_totals(state["counts"])
        if spot_of(state["loader"]) > first_spot([*records, *earlier]):
            raise StateError("load_state_dict: the loader's place is behind open tickets; was the state edited?")
        self._feed.load(state["loader"])
        self._before = Counter(counts if self._feed.rank == 0 else {})
        self._ledger.end()
        with self._placed:
            # Everything is from the state.
            self._begin([*records, *earlier], state["loader"])

    def close(self) -> None:
        """End the iterator, also one that waits in another thread, and close the loader."""
        self._ledger.end()
        self._feed.close()


class _Iteration:
    """Deliver the rows of a running iteration. If it is dropped, the iteration does not end, unlike a generator."""

    def __init__(self, tickets: Tickets, ledger: OpenTickets, rows: Iterator[tuple[int, Any]]) -> None:
        self._tickets, self._ledger, self._rows = tickets, ledger, rows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Any]:
        """Return the next ticket and its sample."""
        return self._tickets._next_of(self._ledger, self._rows)


def _checked(ticket: Any) -> int:
    try:
        return checked_int("ticket", ticket, 0, 2**63 - 1)
    except ConfigError as error:
        raise TicketError(str(error)) from error


def _score(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
        raise ConfigError(f"Tickets.score: value: expected a finite number, got {value!r}")
    return float(value)


def _check(state: Any) -> None:
    """Check the form of a state.

    Raises:
        StateError: It is malformed.
    """
    if not isinstance(state, Mapping) or set(state) != _KEYS:
        found = sorted(map(str, state))[:8] if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"state: expected what state_dict() or sync() of Tickets returned, got {found}")
    if state["version"] != _VERSION:
        raise StateError(f"state: tickets: this release reads version {_VERSION}, got {state['version']!r}")
    for name in ("ranks", "earlier", "for_others"):
        if not isinstance(state[name], list) or (name == "ranks" and not state[name]):
            raise StateError(f"state: tickets: {name}: expected a list, got {state[name]!r}")


def _describe(tickets: weakref.ref[Tickets]) -> str:
    alive = tickets()
    if alive is None:
        return ""
    found = alive.report()
    oldest = found["oldest"]
    words = "" if oldest is None else (
        f"; the oldest, {oldest['ticket']}, was handed out {oldest['seconds']:.0f} s and {oldest['steps']} tickets ago"
    )  # fmt: skip
    return (
        f"{found['in_flight']} tickets are open, of most_in_flight={alive._most}{words}. Call ack, drop or requeue for "
        "each, from another thread than the one that iterates, or raise most_in_flight"
    )
