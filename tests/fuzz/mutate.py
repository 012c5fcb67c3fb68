"""Inputs from a corpus: seeds changed by what damages and attacks do, all from one generator of random numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence

_NUMBERS = (
    b"0" * 11,
    b"7" * 11,
    b"\x80" + b"\0" * 10 + b"\x05",
    b"\xff" * 12,
    b"00000000000\0",
    b"        12 \0",
    b"9",
)
_TOKENS = (
    b"\0", b"\n", b".", b"/", b"..", b"__", b"ustar\x0000", b"ustar  \0", b" path=", b" size=", b"GNU.sparse.major=1",
    b"x", b"L", b"K", b"g", b"S", b"5", b"PAR1", b'"version"', b"1e999", b"-1", b"{", b"}", b"[", b"]", b",", b"..",
    b"::", b"?", b"@", b"://", b"{0..9}", b"null", b"NaN", b"18446744073709551616", b"9223372036854775807", b"v1.2 ",
)  # fmt: skip


def mutated(seeds: Sequence[bytes], dice: random.Random) -> bytes:
    """One seed, or two joined, with up to eight changes."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.randrange(9)):
        _CHANGES[dice.randrange(len(_CHANGES))](data, dice, seeds)
    if dice.random() < 0.5:
        repair_checksums(data)
    return bytes(data[: 1 << 15])


def repair_checksums(data: bytearray) -> None:
    """Make the checksum of every block that looks like a tar header hold, so that damage gets past it."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


def _place(data: bytearray, dice: random.Random) -> int:
    """Anywhere; half of the time near where a header's fields or a block begin."""
    if dice.random() < 0.5 or len(data) < 512:
        return dice.randrange(len(data) + 1)
    return dice.randrange(len(data) // 512) * 512 + dice.choice((0, 99, 100, 124, 135, 148, 156, 257, 263, 345, 511))


def _flip(data: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _overwrite(data: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at, word = _place(data, dice), dice.choice((*_TOKENS, *_NUMBERS, dice.randbytes(dice.randrange(1, 20))))
    data[at : at + len(word)] = word


def _insert(data: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at, word = _place(data, dice), dice.choice((*_TOKENS, dice.randbytes(dice.randrange(1, 20)), bytes(512)))
    data[at:at] = word * dice.choice((1, 1, 1, 2, 50))


def _remove(data: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at = _place(data, dice)
    del data[at : at + dice.choice((1, 2, 8, 100, 512, 1024))]


def _cut(data: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    del data[_place(data, dice) :]


def _repeat(data: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    first = dice.randrange(len(data) // 512 + 1) * 512
    data[first:first] = bytes(data[first : first + 512 * dice.randrange(1, 4)]) * dice.randrange(1, 5)


def _join(data: bytearray, dice: random.Random, seeds: Sequence[bytes]) -> None:
    at = dice.choice((len(data), _place(data, dice)))
    data[at:at] = dice.choice(seeds)


_CHANGES = (_flip, _flip, _overwrite, _overwrite, _overwrite, _insert, _remove, _cut, _repeat, _join)
