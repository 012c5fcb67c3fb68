"""List the options about how batches are prepared, with the checks of their values. Nothing here reads a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from streaming.common.arguments import MOST_BUILDERS, checked_flag, checked_int, parse_bytes


def _count(least: int) -> Callable[[str, Any], object]:
    return lambda name, value: checked_int(name, value, least, MOST_BUILDERS)


def _size(name: str, value: Any) -> int:
    return parse_bytes(value, name=name)


MACHINERY: Final[Mapping[str, Callable[[str, Any], object]]] = {
    "num_workers": _count(0),
    "num_threads": _count(0),
    "prefetch_factor": _count(1),
    "memory_limit": _size,
    "pin_memory": checked_flag,
}
"""Options that a file may set, with the checks of their values: none changes the samples, or their processing. A
loader's own options are checked by the same."""
