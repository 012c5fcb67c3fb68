"""Record which rows ranks had delivered, and which of them are settled: the portable part of a state. Pure.

A rank's rows are its shares of the global batches, in order; an *ordinal* counts them. A ``Handed`` describes one rank:
the number of rows delivered from a place on, and which of them are still open. All others are settled. So the state of
a run is a place from which to read again, and one ``Handed`` per rank. Ranks of another world ask, batch by batch,
which of its rows are settled (``Settled``), whichever rank had them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self, TypeAlias

from streaming.common.arguments import checked_count, checked_int
from streaming.errors import ConfigError, StateError

Spot: TypeAlias = tuple[int, int]
"""Epoch, and number of samples of the epoch over all ranks, before a global batch."""


def share(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the rows ``[low, high)`` that one rank gets of the ``size`` rows of a global batch."""
    return size * rank // num_ranks, size * (rank + 1) // num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """The rows that one rank has delivered from a place on.

    Attributes:
        rank: Its data rank.
        num_ranks: Number of data ranks of its world.
        spot: The first global batch whose rows count.
        num_rows: Number of its rows delivered from there on.
        open: Ordinals among them that are not settled, ascending.
    """

    rank: int
    num_ranks: int
    spot: Spot
    num_rows: int
    open: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict. Open rows are stored as differences, which have few digits."""
        steps = [b - a for a, b in pairwise((0, *self.open))]
        return {"share": [self.rank, self.num_ranks], "from": list(self.spot), "rows": self.num_rows, "open": steps}

    @classmethod
    def from_dict(cls, found: Any) -> Self:
        """Return the record of a dict from ``to_dict``.

        Raises:
            StateError: It is malformed.
        """
        try:
            (rank, num_ranks), (epoch, seen) = found["share"], found["from"]
            checked_count("share: ranks", num_ranks, 1)
            checked_int("share: rank", rank, 0, num_ranks - 1)
            for name, number in (("from: epoch", epoch), ("from: samples", seen), ("rows", found["rows"])):
                checked_count(name, number)
            steps = [checked_count("open", step, int(place > 0)) for place, step in enumerate(found["open"])]
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise StateError(
                f"state: tickets of a rank: {error!r} in {found!r}; was it edited, or cut short when it was saved?"
            ) from error
        rows = tuple(accumulate(steps))
        if rows and rows[-1] >= found["rows"]:
            raise StateError(f"state: tickets: row {rows[-1]} is open, but only {found['rows']} were handed out")
        return cls(rank=rank, num_ranks=num_ranks, spot=(epoch, seen), num_rows=found["rows"], open=rows)

    def behind(self, spot: Spot, num_rows: int) -> Self:
        """Return the same record from a later place on, up to which this rank had delivered ``num_rows`` rows."""
        first = bisect_left(self.open, num_rows)
        return type(self)(
            rank=self.rank, num_ranks=self.num_ranks, spot=spot, num_rows=max(0, self.num_rows - num_rows),
            open=tuple(row - num_rows for row in self.open[first:]),
        )  # fmt: skip

    def without(self, rows: Iterable[int]) -> Self:
        """Return the same record with some open rows settled."""
        settled = set(rows)
        return type(self)(
            rank=self.rank, num_ranks=self.num_ranks, spot=self.spot, num_rows=self.num_rows,
            open=tuple(row for row in self.open if row not in settled),
        )  # fmt: skip


class Settled:
    """Walk the global batches of a run from a place on, and report which rows of each were settled earlier.

    Args:
        records: The rows that ranks of earlier worlds had delivered.
    """

    def __init__(self, records: Iterable[Handed] = ()) -> None:
        self._records = [(record, frozenset(record.open)) for record in records]
        self._come_to = [0] * len(self._records)

    def of_batch(self, spot: Spot, size: int, low: int, high: int) -> list[bool]:
        """Return which of the rows ``[low, high)`` of the next global batch are settled, and move past the batch.

        Args:
            spot: Place of the batch.
            size: Number of its rows over all ranks.
            low: First row.
            high: Row past the last one.
        """
        found = [False] * (high - low)
        for number, (record, is_open) in enumerate(self._records):
            begin, end = share(size, record.rank, record.num_ranks)
            counts = spot >= record.spot
            first = self._come_to[number]
            for row in range(max(begin, low), min(end, high)):
                ordinal = first + row - begin
                if not counts or (ordinal < record.num_rows and ordinal not in is_open):
                    found[row - low] = True
            if counts:
                self._come_to[number] = first + end - begin
        self._drop_ended(spot)
        return found

    def _drop_ended(self, spot: Spot) -> None:
        """Drop the records that have no batches after ``spot``."""
        kept = [
            n for n, (record, _) in enumerate(self._records)
            if spot < record.spot or self._come_to[n] < record.num_rows
        ]  # fmt: skip
        if len(kept) < len(self._records):
            self._records = [self._records[n] for n in kept]
            self._come_to = [self._come_to[n] for n in kept]

    def rest(self, spot: Spot) -> tuple[Handed, ...]:
        """Return the records of the batches from the next one on, which is at ``spot``."""
        return tuple(
            record if spot < record.spot else record.behind(spot, come_to)
            for (record, _), come_to in zip(self._records, self._come_to, strict=True)
        )


def first_spot(records: Sequence[Handed]) -> Spot:
    """Return the earliest place at which rows may be open."""
    return min(record.spot for record in records)


def missing(records: Sequence[Handed]) -> list[int]:
    """Return the ranks of the first record's world whose records are absent."""
    return sorted(set(range(records[0].num_ranks)) - {record.rank for record in records})


def checked_totals(found: Any) -> dict[str, int]:
    """Return counts by name from a state.

    Raises:
        StateError: It is malformed.
    """
    if not isinstance(found, Mapping):
        raise StateError(f"state: tickets: totals: expected counts by name, got {found!r}")
    try:
        return {str(name): checked_count(str(name), number, 0) for name, number in found.items()}
    except ConfigError as error:
        raise StateError(f"state: tickets: totals: {error}") from error
