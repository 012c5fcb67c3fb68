"""Keep the books of the tickets that one rank has issued: open, waiting to be repeated, settled. For any thread."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from streaming.errors import IteratorEndedError, TicketError

RANK_BITS, RUN_BITS = 14, 16
"""A ticket is an integer of at most 63 bits: ordinal, data rank, run."""
MOST_RANKS = 1 << RANK_BITS


@dataclass(slots=True)
class Open:
    """An issued ticket that is not settled.

    Attributes:
        sample: Its sample, until it is settled.
        since_s: Time of issue, by the monotonic clock.
        at: Number of tickets issued before it.
        waits: Whether it waits to be repeated.
    """

    sample: Any
    since_s: float
    at: int
    waits: bool = False


class OpenTickets:
    """Count one rank's tickets, from any thread's settling to the iterating thread's issuing.

    Life cycle of a ticket::

        issued -> open <-> waiting to be repeated -> settled

    - ``_lock`` guards all fields but ``_tail``.
    - An ordinal is in ``_open`` from its issue until it is settled, also while it waits in ``_again``.
    - ``_changed`` is notified when a ticket is settled or requeued, for the iterating thread that waits for room.

    Args:
        rank: This data rank.
        run: A number that differs from that of other runs, and of the time before the last restart.
    """

    def __init__(self, rank: int, run: int) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tail = rank << RUN_BITS | run % (1 << RUN_BITS)
        self._open: dict[int, Open] = {}
        self._again: deque[int] = deque()
        self._for_others: dict[int, str] = {}
        self._next = 0
        self._counts: Counter[str] = Counter()
        self._scores: dict[str, float] = {}
        self._num_handed = 0
        self._has_ended = False

    # --- the thread that iterates ---

    def skip(self) -> None:
        """Count a row that was settled in an earlier run."""
        with self._lock:
            # The next row is the one after it.
            self._next += 1

    def hand_out(self, sample: Any) -> int:
        """Open the next row, and return its ticket."""
        with self._lock:
            # The row is open, and the next one follows it.
            ordinal, self._next = self._next, self._next + 1
            self._open[ordinal] = Open(sample, time.monotonic(), self._num_handed)
            self._num_handed += 1
        return self._ticket(ordinal)

    def again(self) -> tuple[int, Any] | None:
        """Return a ticket that waits to be repeated, with its sample; None if there is none."""
        with self._lock:
            # The returned ticket is open and waits no longer; tickets settled meanwhile are left out.
            while self._again:
                ordinal = self._again.popleft()
                found = self._open.get(ordinal)
                if found is not None and found.waits:
                    found.waits, found.since_s, found.at = False, time.monotonic(), self._num_handed
                    self._num_handed += 1
                    return self._ticket(ordinal), found.sample
        return None

    def wait_for_room(self, most: int | None) -> None:
        """Wait until fewer than ``most`` tickets are open (0: until none is), or one waits to be repeated.

        Raises:
            IteratorEndedError: ``end`` was called.
        """
        with self._changed:
            # Nothing changes here; the caller checks again.
            self._changed.wait_for(lambda: self._has_ended or self._has_room(most))
            self._check()

    def check(self) -> None:
        """Do nothing unless ``end`` was called.

        Raises:
            IteratorEndedError: It was.
        """
        with self._lock:
            # A snapshot.
            self._check()

    def has_room(self, most: int | None) -> bool:
        """Return whether ``wait_for_room`` would return at once."""
        with self._lock:
            # A snapshot.
            return self._has_room(most)

    # --- any thread ---

    def end(self) -> None:
        """End the wait of the iterating thread, and every later one."""
        with self._changed:
            # No wait begins or lasts after this.
            self._has_ended = True
            self._changed.notify_all()

    def settle(self, ticket: int, how: str) -> None:
        """Settle a ticket: its sample never comes again.

        Raises:
            TicketError: It is not open.
        """
        with self._changed:
            # The ticket is no longer open, and is counted; or it is noted for the rank that issued it.
            if self._is_anothers(ticket):
                self._note_for_others(ticket, how)
                return
            self._found(ticket)
            del self._open[ticket >> RANK_BITS + RUN_BITS]
            self._counts[how] += 1
            self._changed.notify_all()

    def requeue(self, ticket: int) -> None:
        """Repeat a ticket before new ones.

        Raises:
            TicketError: It is not open, belongs to another rank, or waits already.
        """
        with self._changed:
            # It stays open, and is in the queue once.
            found = self._found(ticket)
            if found.waits:
                raise TicketError(f"ticket {ticket} waits to come again already; requeue it once")
            found.waits = True
            self._again.append(ticket >> RANK_BITS + RUN_BITS)
            self._changed.notify_all()

    def score(self, ticket: int, value: float) -> None:
        """Note a number for the key of an open ticket.

        Raises:
            TicketError: It is not open, belongs to another rank, or its sample has no key.
        """
        with self._lock:
            # The last score of a key counts.
            sample = self._found(ticket).sample
            key = sample.get("__key__") if isinstance(sample, dict) else None
            if not isinstance(key, str):
                raise TicketError(f'ticket {ticket}: its sample has no "__key__", by which scores are kept')
            self._scores[key] = float(value)

    def open_rows(self) -> tuple[list[int], int]:
        """Return the open ordinals, ascending, and the number of rows issued or skipped."""
        with self._lock:
            # At one moment: all rows before the second value that are not in the first are settled.
            return sorted(self._open), self._next

    def is_open(self, ticket: int) -> bool:
        """Return whether a ticket of this rank is open."""
        with self._lock:
            # A snapshot.
            return ticket >> RANK_BITS + RUN_BITS in self._open

    def is_mine(self, ticket: int) -> bool:
        """Return whether this rank issued a ticket."""
        return ticket & (1 << RANK_BITS + RUN_BITS) - 1 == self._tail

    def counted(self) -> Counter[str]:
        """Return the number of settled tickets, by the way of settling."""
        with self._lock:
            # A copy.
            return Counter(self._counts)

    def all_scores(self) -> dict[str, float]:
        """Return the scores by key."""
        with self._lock:
            # A copy.
            return dict(self._scores)

    def for_others(self) -> dict[int, str]:
        """Return the tickets of other ranks that were settled here, with the way of settling."""
        with self._lock:
            # A copy.
            return dict(self._for_others)

    def delivered(self, tickets: Iterable[int]) -> None:
        """Forget tickets of other ranks that their own ranks have settled."""
        with self._lock:
            # Tickets noted meanwhile stay.
            for ticket in tickets:
                self._for_others.pop(ticket, None)

    def oldest(self) -> tuple[int, float, int] | None:
        """Return the ticket in flight for longest, its seconds, and the number issued since then; None: none is."""
        now_s = time.monotonic()
        with self._lock:
            # A snapshot.
            found = [(one.at, ordinal, one.since_s) for ordinal, one in self._open.items() if not one.waits]
            if not found:
                return None
            at, ordinal, since_s = min(found)
            return self._ticket(ordinal), now_s - since_s, self._num_handed - at - 1

    def num_open(self) -> tuple[int, int]:
        """Return the number of tickets in flight, and the number of those that wait to be repeated."""
        with self._lock:
            # A snapshot.
            return len(self._open), sum(one.waits for one in self._open.values())

    # --- with the lock held ---

    def _check(self) -> None:
        if self._has_ended:
            raise IteratorEndedError(
                "this iterator was ended: its Tickets were closed, or load_state_dict() was called. After the latter, "
                "call iter() again"
            )

    def _has_room(self, most: int | None) -> bool:
        return bool(self._again) or most is None or len(self._open) < max(most, 1)

    def _ticket(self, ordinal: int) -> int:
        return ordinal << RANK_BITS + RUN_BITS | self._tail

    def _is_anothers(self, ticket: int) -> bool:
        tail = ticket & (1 << RANK_BITS + RUN_BITS) - 1
        return tail != self._tail and (tail ^ self._tail) % (1 << RUN_BITS) == 0

    def _note_for_others(self, ticket: int, how: str) -> None:
        if ticket in self._for_others:
            raise TicketError(f"ticket {ticket} was settled on this rank before ({self._for_others[ticket]})")
        self._for_others[ticket] = how

    def _found(self, ticket: int) -> Open:
        ordinal, tail = ticket >> RANK_BITS + RUN_BITS, ticket & (1 << RANK_BITS + RUN_BITS) - 1
        if tail == self._tail:
            found = self._open.get(ordinal)
            if found is not None:
                return found
            if 0 <= ordinal < self._next:
                raise TicketError(f"ticket {ticket} was acknowledged or dropped before; settle each ticket once")
            raise TicketError(f"ticket {ticket} was not handed out yet: {self._next} rows were; is it of another run?")
        if self._is_anothers(ticket):
            rank = tail >> RUN_BITS
            raise TicketError(
                f"ticket {ticket} was handed out by data rank {rank}; requeue and score it there (ack and drop work on "
                "every rank)"
            )
        raise TicketError(
            f"ticket {ticket} is of another run, or of before the last restart, after which its sample comes again "
            "with a new ticket; drop the work that was begun for it"
        )
