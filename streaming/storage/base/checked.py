"""Prove that bytes in memory were compared with their checksums: ``Checked``, which only a comparison makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Self, TypeAlias, final

import crc32c

from streaming.errors import TransferError

Parts: TypeAlias = Iterable[memoryview]
"""Separate pieces of memory that share one checksum, in order."""


class WrongBytesError(TransferError):
    """The store answered in full, with bytes that do not match their checksum: they are requested again.

    Attributes:
        error: The error to raise if they stay wrong.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class DifferentSumError(Exception):
    """Bytes do not match their checksum.

    Attributes:
        number: Index of the first compared checksum that differs.
        got: The actual CRC32C.
    """

    def __init__(self, number: int, got: int) -> None:
        super().__init__(number, got)
        self.number, self.got = number, got


@dataclass(frozen=True, slots=True)
class _Compared:
    """The result of a comparison, which only this module makes; see ``Checked``."""

    num_bytes: int
    crc32c: int | None
    is_summed: bool


@final
class Checked:
    """The proof that bytes in memory match every checksum that exists for them.

    The arena, the node cache, views, substitutes and samples read by number accept bytes from a store only together
    with this proof. Only :meth:`comparing` makes it (:meth:`of_all` joins such proofs), so unverified bytes cannot get
    there. It refers to the moment of the comparison and holds no memory: code that lets others change the bytes must
    compare again.

    Attributes:
        num_bytes: Number of bytes to compare.
        crc32c: CRC32C of all of them; None: they have several checksums, or none.
        is_summed: Whether each byte belongs to a checksum. Otherwise some have none, as in a dataset whose index lacks
            it.
    """

    __slots__ = ("crc32c", "is_summed", "num_bytes")

    def __init__(self, found: _Compared) -> None:
        if type(found) is not _Compared:
            raise TypeError("there is no Checked without a comparison: Checked.comparing(…)")
        self.num_bytes, self.crc32c, self.is_summed = found.num_bytes, found.crc32c, found.is_summed

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Checked says something of memory of this process: compare the bytes where they arrive")

    @classmethod
    def comparing(cls, num_bytes: int, sums: Iterable[tuple[Parts, int]]) -> Self:
        """Compare bytes with their checksums, once.

        Args:
            num_bytes: Number of bytes.
            sums: The parts of each checksum, which do not overlap those of another one, and their expected CRC32C.
                Empty: the index has no checksum of these bytes.

        Raises:
            DifferentSumError: A checksum differs.
        """
        expected, num_summed = None, 0
        number = -1
        for number, (parts, expected) in enumerate(sums):
            got, size = crc_of(parts)
            if got != expected:
                raise DifferentSumError(number, got)
            num_summed += size
        is_summed = 0 < num_bytes == num_summed
        return cls(_Compared(num_bytes, expected if number == 0 and is_summed else None, is_summed))

    @classmethod
    def of_all(cls, found: Sequence[Self], num_bytes: int) -> Self:
        """Say of several runs of bytes in one memory what was said of each.

        Args:
            found: The statements.
            num_bytes: How much memory they take, with what lies between them.
        """
        if any(type(one) is not Checked for one in found):
            raise TypeError("expected a Checked of each run of bytes")
        return cls(_Compared(num_bytes, None, all(one.is_summed for one in found)))


def crc_of(parts: Parts) -> tuple[int, int]:
    """Return the CRC32C of separate pieces of memory, and their number of bytes."""
    crc = size = 0
    for part in parts:
        crc, size = crc32c.crc32c(part, crc), size + len(part)
    return crc, size
