"""Divide the packets of a video stream into groups of pictures that decode by themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from streaming.types import Int64Array, override

Flags = npt.NDArray[np.bool_]
_NEVER = np.iinfo(np.int64).min


class PictureGroup(NamedTuple):
    """One group of pictures of a stream.

    Attributes:
        first_packet: The packet of its key frame: the first one to decode.
        stop_packet: The packet after the last one to decode, in decoding order. Leading pictures of the next key frame
            belong to this group, so that its packets may reach beyond that key frame.
        byte_start: First byte in the shard; between the packets, bytes of other streams may lie.
        byte_end: The byte after the last one.
        crc32c: CRC32C of the bytes from ``byte_start`` to ``byte_end``.
        first_frame: Its first frame, in order of presentation.
        stop_frame: The frame after its last one.
    """

    first_packet: int
    stop_packet: int
    byte_start: int
    byte_end: int
    crc32c: int
    first_frame: int
    stop_frame: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups(Sequence[PictureGroup]):
    """The groups of a stream, as columns: each int64 ``[G]``, with the meaning that it has in :class:`PictureGroup`."""

    first_packet: Int64Array
    stop_packet: Int64Array
    byte_start: Int64Array
    byte_end: Int64Array
    crc32c: Int64Array
    first_frame: Int64Array
    stop_frame: Int64Array

    @override
    def __len__(self) -> int:
        return len(self.first_packet)

    @overload
    def __getitem__(self, number: int) -> PictureGroup: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[PictureGroup, ...]: ...
    @override
    def __getitem__(self, number: int | slice) -> PictureGroup | tuple[PictureGroup, ...]:
        if isinstance(number, slice):
            return tuple(self[one] for one in range(*number.indices(len(self))))
        return PictureGroup(*(int(getattr(self, name)[number]) for name in PictureGroup._fields))

    @override
    def __iter__(self) -> Iterator[PictureGroup]:
        columns = (getattr(self, name).tolist() for name in PictureGroup._fields)
        return map(PictureGroup._make, zip(*columns, strict=True))


def group_starts(pts: Int64Array, is_shown: Flags, can_start: Flags) -> Flags:
    """Return which packets begin a group, bool ``[P]``: the first one, and others that no earlier one reaches beyond.

    A key frame begins a group only if all frames that are decoded before it are shown before it.

    Args:
        pts: int64 [P], presentation times of packets in decoding order.
        is_shown: bool [P], whether a packet is shown.
        can_start: bool [P], whether the packet is that of a key frame, from which a decoder can start.
    """
    latest = np.maximum.accumulate(np.where(is_shown | can_start, pts, _NEVER))
    starts = can_start.copy()
    starts[1:] &= pts[1:] > latest[:-1]
    starts[:1] = True
    return starts


def frame_packets(pts: Int64Array, is_shown: Flags) -> Int64Array:
    """Return the packet of each frame, in order of presentation: int64 ``[F]``."""
    shown = np.flatnonzero(is_shown)
    return shown[np.argsort(pts[shown], kind="stable")].astype(np.int64)


def groups_of_packets(
    pts: Int64Array, is_shown: Flags, is_key: Flags, byte_start: Int64Array, byte_end: Int64Array, crc32c: Int64Array
) -> Groups:
    """Return the groups of a stream: a pure function of its packets, which the format defines (``docs/format.md``).

    Args:
        pts: As of :func:`group_starts`.
        is_shown: Likewise.
        is_key: bool [P], whether a packet begins a group, as :func:`group_starts` says.
        byte_start: int64 [P], the first byte of each packet.
        byte_end: int64 [P], the byte after its last one.
        crc32c: int64 [P], for packets that begin a group the checksum of the group.
    """
    first = np.flatnonzero(is_key).astype(np.int64)
    packets = frame_packets(pts, is_shown)
    # A frame belongs to the last group whose key frame is not shown later; frames before all of them, to the first.
    edges = np.searchsorted(pts[packets], pts[first[1:]], "left")
    bounds = np.concatenate(([0], edges, [len(packets)])).astype(np.int64)
    stop = np.append(first[1:], len(pts))
    np.maximum.at(stop, np.repeat(np.arange(len(first)), np.diff(bounds)), packets + 1)
    runs = np.stack((first, stop), 1).ravel()  # [first, stop) of each group; they may overlap

    def over(ufunc: np.ufunc, values: Int64Array) -> Int64Array:
        found: Int64Array = ufunc.reduceat(np.append(values, values[-1]), runs)[::2]
        return found

    return Groups(
        first_packet=first, stop_packet=stop, byte_start=over(np.minimum, byte_start),
        byte_end=over(np.maximum, byte_end), crc32c=crc32c[first], first_frame=bounds[:-1], stop_frame=bounds[1:],
    )  # fmt: skip
