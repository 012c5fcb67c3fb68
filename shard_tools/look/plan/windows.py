"""Sum up the windows of a plan: their units, and the bytes that these read and decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shard_tools.look.plan.sources import sets_of
from streaming.common.arguments import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTotals:
    """The windows of a set, or of all sources of a mixture.

    Attributes:
        num_units: Number of units.
        decoded_bytes: Memory of all units.
        read_bytes: Bytes that they read.
        once_bytes: The same, each byte counted once.
    """

    num_units: int
    decoded_bytes: int
    read_bytes: int
    once_bytes: int

    @classmethod
    def of(cls, planned: Any) -> WindowTotals | None:
        """Sum up all sets of a dataset; None: they are no windows."""
        sets = [one for _, one in sets_of(planned)]
        if not all(hasattr(one, "reads") for one in sets):
            return None
        return cls(
            num_units=sum(len(one.chunk_samples) for one in sets),
            decoded_bytes=sum(int(one.chunk_bytes.sum()) for one in sets),
            read_bytes=sum(int(one.reads.num_bytes.sum()) for one in sets),
            once_bytes=sum(one.reads.once_bytes for one in sets),
        )  # fmt: skip

    @property
    def in_words(self) -> str:
        """The totals as a line."""
        times = self.read_bytes / max(self.once_bytes, 1)
        return (
            f"{counted(self.num_units, 'unit')} of groups of pictures; they read {format_bytes(self.read_bytes)}, "
            f"{times:.2f} times what windows need, and take {format_bytes(self.decoded_bytes)} decoded"
        )
