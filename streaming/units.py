"""Byte sizes as people write them."""

from __future__ import annotations

import re

from streaming.arguments import is_whole
from streaming.errors import ConfigError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """Number of bytes in ``size``: an int, or a string such as ``"256MB"`` (10^6) or ``"256MiB"`` (2^20).

    Args:
        size: The size; must be positive.
        name: What the size is, for the error message.

    Raises:
        ConfigError: If it is not a size, or not positive.
    """
    if not is_whole(size) and not isinstance(size, str):
        raise ConfigError(f'{name}: expected an int or a string such as "256MB", got {size!r}')
    if not isinstance(size, str):
        num_bytes = int(size)
    else:
        match = _SIZE.fullmatch(size)
        factor = _FACTORS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ConfigError(f'{name}: {size!r} is not a size; write bytes (268435456), "256MB" or "256MiB"')
        num_bytes = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if num_bytes <= 0:
        raise ConfigError(f"{name}: must be positive, got {size!r}")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` for people: ``"1.5 GiB"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
