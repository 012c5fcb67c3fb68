"""Locate the records of a text file: in one vectorized pass, with four bytes of memory per record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from streaming.errors import DataError
from streaming.types import Int64Array

MAX_LINE_BYTES = 256 << 20
"""Size limit of a line: a longer one cannot be a record, and would often not fit into memory."""
_SEGMENT_BITS = 32
_NEWLINE, _QUOTE = 10, 34
_WHITE = {False: b" \t\n\r\x0b\x0c", True: b"\n\r"}
"""Bytes of blank lines; with ``quoted``, those of line ends alone, since white space may be the values of a record."""


class Lines(NamedTuple):
    """Some lines that are not blank, in order.

    Attributes:
        begins: int64 ``[n]``, first byte of each line.
        ends: int64 ``[n]``, one past the last byte of each line, including its line end.
        numbers: int64 ``[n]``, number of each line in the file, from 1; with ``quoted`` records, of records and blank
            lines.
    """

    begins: Int64Array
    ends: Int64Array
    numbers: Int64Array


def scan_lines(blocks: Iterable[bytes | memoryview], where: str, *, quoted: bool = False) -> Iterator[Lines]:
    """Find the lines of a file.

    Args:
        blocks: The file's bytes, in pieces of any size.
        where: Its URL, for messages.
        quoted: As in CSV, a newline between double quotes ends no line.

    Raises:
        DataError: A line is longer than 256 MiB.
    """
    position = begin = number = 0  # of the block; of the open line; number of closed lines
    filled = is_inside = False  # of the open line: it has content; it is between quotes
    for block in blocks:
        octets = np.frombuffer(block, np.uint8)
        if not len(octets):
            continue
        ends = np.flatnonzero(octets == _NEWLINE)
        if quoted:
            quotes = np.flatnonzero(octets == _QUOTE)
            odd = (np.searchsorted(quotes, ends) + is_inside) % 2 == 1
            ends, is_inside = ends[~odd], (len(quotes) + is_inside) % 2 == 1
        ends += 1
        starts = np.concatenate(([0], ends)) if not len(ends) or ends[-1] < len(octets) else np.append(0, ends[:-1])
        is_filled = ~np.isin(octets[starts], list(_WHITE[quoted]))
        for line in np.flatnonzero(~is_filled).tolist():  # few: lines that begin with white space
            stop = int(ends[line]) if line < len(ends) else len(octets)
            is_filled[line] = bool(octets[starts[line] : stop].tobytes().strip(_WHITE[quoted]))
        is_filled[0] |= filled
        filled = bool(is_filled[-1]) if len(starts) > len(ends) else False
        is_filled = is_filled[: len(ends)]
        begins = np.concatenate(([begin], position + ends[:-1])) if len(ends) else ends
        if len(ends):
            numbers = number + 1 + np.flatnonzero(is_filled)
            yield Lines(begins[is_filled], (position + ends)[is_filled], numbers)
            begin, number = position + int(ends[-1]), number + len(ends)
        position += len(octets)
        if position - begin >= MAX_LINE_BYTES:
            raise DataError(f"{where}: a line is longer than {MAX_LINE_BYTES} bytes; is this a file of lines?")
    if filled:
        yield Lines(np.array([begin]), np.array([position]), np.array([number + 1]))


@dataclass(frozen=True, slots=True, eq=False)
class RecordStarts:
    """The offset of each record of a file, and the end of the last one.

    Attributes:
        low: uint32 ``[n + 1]``, the lower half of each offset.
        segments: int64 ``[s]``, number of the first record of each 4 GiB of the file.
    """

    low: npt.NDArray[np.uint32]
    segments: Int64Array

    @classmethod
    def of(cls, found: Iterable[Lines]) -> Self:
        """Keep the beginnings of ``found``. Blank lines belong to the record before them."""
        parts: list[npt.NDArray[np.uint32]] = []
        segments: list[int] = []
        count = end = 0
        for lines in found:
            parts.append(lines.begins.astype(np.uint32))
            last = int(lines.begins[-1]) >> _SEGMENT_BITS if len(lines.begins) else -1
            while len(segments) <= last:
                segments.append(count + int(np.searchsorted(lines.begins, len(segments) << _SEGMENT_BITS)))
            count += len(lines.begins)
            end = int(lines.ends[-1]) if len(lines.ends) else end
        while len(segments) <= end >> _SEGMENT_BITS:
            segments.append(count)
        low = np.concatenate([*parts, np.array([end & 0xFFFFFFFF], np.uint32)])
        return cls(low, np.array(segments, np.int64))

    def __len__(self) -> int:
        return len(self.low) - 1

    def range_of(self, record: int) -> tuple[int, int]:
        """Return the first byte of a record, and its end (exclusive)."""
        segments = np.searchsorted(self.segments, [record, record + 1], side="right") - 1
        begin, end = (segments << _SEGMENT_BITS) + self.low[record : record + 2].astype(np.int64)
        return int(begin), int(end)

    def to_bytes(self) -> bytes:
        """Return the value as bytes, for other processes."""
        return b"".join([len(self.segments).to_bytes(8, "little"), self.segments.tobytes(), self.low.tobytes()])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the inverse of :meth:`to_bytes`."""
        count = int.from_bytes(data[:8], "little")
        stop = 8 + 8 * count
        return cls(np.frombuffer(data[stop:], np.uint32), np.frombuffer(data[8:stop], np.int64))


def json_line(line: bytes, where: str) -> tuple[dict[str, object], bytes]:
    """Return the object of a line of JSONL, and its text without surrounding white space and byte order mark.

    Raises:
        DataError: The line is not JSON, or not an object; ``where`` names it.
    """
    text = line.strip().removeprefix(b"\xef\xbb\xbf")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}; got {text[:60]!r}; correct or remove this line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected one JSON object per line, got {text[:60]!r}")
    return row, text
