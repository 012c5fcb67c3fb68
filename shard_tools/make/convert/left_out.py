"""Decide about inputs that give no sample: ``--on-error`` and ``--max-bad``, for every source."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from shard_tools.make.convert.base.identity import Origins
from shard_tools.make.convert.base.records import MAX_LISTED, NoRecordError, Record, Skipped, Source
from shard_tools.running.report import plain
from streaming.common.arguments import counted, most_bad
from streaming.errors import DataError, TooManyBadSamplesError

UNREADABLE = "unreadable"
_SHOWN = 3
_JUDGED_FROM = 1000
"""If a source does not know the number of its inputs, a share is judged from this many on: few measure no rate."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnError:
    """Decides about inputs that are data and give no sample.

    Attributes:
        how: ``"raise"`` or ``"skip"``.
        max_bad: Most of them that are left out: an int, or a float, as a share of all inputs; None: any number.
    """

    how: str = "raise"
    max_bad: float | None = None

    @property
    def skips(self) -> bool:
        """Whether they are left out."""
        return self.how == "skip"

    def allowance(self, reader: Source | NoRecordError, where: str, num_known: int = 0) -> Allowance:
        """Look at what a source leaves out before it is read; return how much more may be left out.

        Args:
            reader: The source, or the error that says that all of it is left out.
            where: The source, for messages.
            num_known: Number of its inputs that a set has already, and that are not read again; they count in a share.

        Raises:
            DataError: Something is left out, and that is an error.
            TooManyBadSamplesError: It is too much.
        """
        lost = [one for one in reader.skipped if one.is_lost]
        known = None
        if isinstance(self.max_bad, float):
            known = 0 if isinstance(reader, NoRecordError) else reader.num_records
        allowed = Allowance(
            max_bad=self.max_bad, num_lost=len(lost), in_all=None if known is None else num_known + known + len(lost)
        )
        if not lost:
            return allowed
        listed = "; ".join(f"{plain(one.path)}: {one.reason}" for one in lost[:_SHOWN])
        more = f"; and {len(lost) - _SHOWN:,} more" if len(lost) > _SHOWN else ""
        what = f"{where}: {counted(len(lost), 'input')} would be left out: {listed}{more}"
        if not self.skips:
            raise DataError(
                f"{what}. Correct them, move them elsewhere, say with --from what the source is, or leave such inputs "
                "out with --on-error skip"
            )
        allowed.check(0, 0, f"{plain(lost[-1].path)}: {lost[-1].reason}")
        _log.warning("%s: left out %s: %s%s", where, counted(len(lost), "input"), listed, more)
        return allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How many inputs of a source may be left out.

    A share is of all inputs, if the source knows their number before it is read. Else it is of those read so far, from
    the 1,000th on, and at the end of all.

    Attributes:
        max_bad: As of :class:`OnError`.
        num_lost: Inputs that are left out before the source is read.
        in_all: Number of all inputs; None: it is not known.
    """

    max_bad: float | None = None
    num_lost: int = 0
    in_all: int | None = None

    def check(self, num_bad: int, num_read: int, last: str, *, is_end: bool = False) -> None:
        """Refuse more inputs left out than ``max_bad``.

        Args:
            num_bad: Records left out so far.
            num_read: Records read so far, these included.
            last: The last one, and why.
            is_end: Whether there are no more records.

        Raises:
            TooManyBadSamplesError: They are more.
        """
        if self.max_bad is None:
            return
        whole = num_read + self.num_lost if self.in_all is None else self.in_all
        is_share = isinstance(self.max_bad, float)
        if is_share and self.in_all is None and whole < _JUDGED_FROM and not is_end:
            return
        allowed, found = most_bad(self.max_bad, whole), num_bad + self.num_lost
        if found > allowed:
            so_far = "" if is_end or self.in_all is not None else " read so far"
            share = f" {100 * self.max_bad:.10g}% of {counted(whole, 'input')}{so_far}" if is_share else ""
            raise TooManyBadSamplesError(
                f"{counted(found, 'input')} left out, and --max-bad{share} allows {allowed:,}; the last: {last}. "
                "Correct such inputs, or allow more"
            )


@dataclass(slots=True, kw_only=True)
class Sifted:
    """The records of a source that can be read; the others are left out, counted and listed. Used by one thread.

    Since not every record becomes a sample, it reports its own position (``Standing``).

    Attributes:
        below: The source.
        allowance: Bounds the number of records left out.
        first: Number of its first record.
    """

    below: Source
    allowance: Allowance
    first: int = 0
    _listed: dict[str, Skipped] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)
    _start: int | None = None
    _at: int = 0  # number of the latest record
    _num_bad: int = 0  # records left out before it
    _through: int = -1  # input that is done with before it

    @property
    def kind(self) -> str:
        """The kind of the source."""
        return self.below.kind

    @property
    def num_records(self) -> int | None:
        """As many as the source has, or fewer."""
        return self.below.num_records

    @property
    def num_bytes(self) -> int:
        """Bytes of the source."""
        return self.below.num_bytes

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What the source and this leave out."""
        return (*self.below.skipped, *self._listed.values())

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The fields of the source."""
        return self.below.fields

    def identity(self) -> dict[str, object]:
        """Return the identity of the source."""
        return self.below.identity()

    def origins(self) -> Origins:
        """Return the inputs of the source."""
        return self.below.origins()

    def through(self) -> int:
        """Return the number of the last input that is done with before the latest record."""
        return self._through

    def position(self) -> dict[str, int]:
        """Return the position of a run that is interrupted right before the latest record."""
        return {"record": self._at, "left_out": self._num_bad}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Let ``records`` begin there."""
        self._start, self._num_bad = int(position["record"]), int(position["left_out"])

    def left_out_last(self) -> list[str]:
        """Return the reasons for records that are left out after the last one that is not."""
        found, self._waiting = self._waiting, []
        return found

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the records from where it stands; at first, from number ``start`` on.

        Raises:
            DataError: None can be read.
            TooManyBadSamplesError: More cannot be read than may be left out.
        """
        begin, bad, latest = start if self._start is None else self._start, self._num_bad, -1
        self._at, last, number, said = begin, None, begin - 1, "one of an earlier run"
        with closing(self.below.records(begin)) as records:
            for number, record in enumerate(records, begin):
                if record.problem is not None:
                    bad, last = bad + 1, record.problem
                    said = self._leave_out(record, last)
                    self.allowance.check(bad, number + 1 - self.first, said)
                    continue
                # What is left out before a record is found again by a run that goes on before it.
                self._num_bad, self._through = bad - len(self._waiting), latest
                self._at = number - len(self._waiting)
                latest = record.origin
                yield replace(record, left_out=(*record.left_out, *self.left_out_last()))
        if latest < 0 and begin == self.first and last is not None:
            raise DataError(f"none of {counted(bad, 'record')} can be read; the last: {last}") from last
        self.allowance.check(bad, number + 1 - self.first, said, is_end=True)

    def _leave_out(self, record: Record, problem: DataError) -> str:
        """Note a record that is left out; return which one it is, and why."""
        where = record.where or f"record {record.key!r}"
        reason = str(problem).removeprefix(f"{where}: ")
        if not self._listed:
            _log.warning("left out: %s: %s; others like it are counted and listed, but not logged", where, reason)
        if len(self._listed) < MAX_LISTED:
            self._listed[where] = Skipped(path=where, reason=reason, is_lost=True)
        is_text = isinstance(problem.__cause__, UnicodeError)
        self._waiting.append("invalid UTF-8" if is_text else UNREADABLE)
        return f"{where}: {reason}"
