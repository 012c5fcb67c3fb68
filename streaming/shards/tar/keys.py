"""Hold the keys of many samples without a Python object for each: the names of one field, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from streaming.shards.tar.blocks import Names, decode_name, encode_name
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True)
class KeyLines:
    """The keys of ``n`` samples. ``lines`` is each key followed by ``end``, which occurs in no key.

    Attributes:
        lines: Keys and ends, as in the tar.
        end: An extension and a line feed.
        count: ``n``.
        names: The first name and the last, if all names ascend strictly by :func:`rises`, which excludes duplicates.
    """

    lines: bytes
    end: bytes
    count: int
    names: NDArray[np.bytes_] | None

    def __len__(self) -> int:
        return self.count

    def to_list(self) -> list[str]:
        """Return the keys as text."""
        return decode_name(self.lines[: -len(self.end)]).split(decode_name(self.end))

    def packed(self) -> tuple[bytes, Int64Array]:
        """Return the keys end to end, and the end of each: int64 ``[n]``."""
        return self.lines.replace(self.end, b""), self._stops()

    def _stops(self) -> Int64Array:
        stops = np.flatnonzero(np.frombuffer(self.lines, np.uint8) == ord("\n")) + 1
        return stops - len(self.end) * np.arange(1, self.count + 1)


def pack_keys(keys: KeyLines | list[str]) -> tuple[bytes, Int64Array]:
    """Do the same as :meth:`KeyLines.packed`, also for a list of keys."""
    if isinstance(keys, KeyLines):
        return keys.packed()
    parts = [encode_name(key) for key in keys]
    return b"".join(parts), np.cumsum([len(part) for part in parts], dtype=np.int64)


def rises(names: NDArray[np.bytes_]) -> bool:
    """Return whether each name is greater than the one before."""
    return bool((names[1:] > names[:-1]).all())


def surely_unique(parts: list[KeyLines | list[str]]) -> bool:
    """Return whether the keys of all ``parts`` ascend from first to last. False proves nothing."""
    bounds: list[NDArray[np.bytes_]] = []
    for part in parts:
        if isinstance(part, list) or part.names is None or part.end != getattr(parts[0], "end", None):
            return False
        bounds.append(part.names)
    return not bounds or all(rises(np.array([a[1], b[0]])) for a, b in pairwise(bounds))


def join_lines(names: Names, field: int, num_fields: int) -> bytes:
    """Take every ``num_fields``-th name from ``field`` on, each closed by a line feed (instead of a NUL after it)."""
    if not isinstance(names, list):
        width = len(names[field])
        if 0 < width < names.itemsize:
            rows = names.view(np.uint8).reshape(-1, num_fields * names.itemsize)
            at = field * names.itemsize
            lines = rows[:, at : at + width + 1].copy()  # uint8 [n, width + 1]
            if not lines[:, width].any():
                lines[:, width] = ord("\n")
                return lines.tobytes()
        names = names[field::num_fields].tolist()
        return b"\n".join(names) + b"\n"
    return b"\n".join(names[field::num_fields]) + b"\n"
