"""Scan a tar that arrives in pieces: records and fields as soon as they are complete, in bounded memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from streaming.shards.tar.blocks import (
    BLOCK_BYTES,
    BytesLike,
    Members,
    Names,
    Origin,
    as_array,
    decode_name,
    is_zero,
    split_name,
)
from streaming.shards.tar.fast import read_members
from streaming.shards.tar.group import MAX_FIELDS, ChunkLayout, PackedLayout, check_num_fields, group_members

_BRIDGE_BYTES = 4096
_MAGIC = {
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
    b"PK\3\4": ("a zip file", "unzip"),
}
_CUT_OFF = (
    "truncated? fetch or write the shard again, or save what is left: `shard_tools repair URL --to TARGET` (with "
    "--drop-damaged if samples are lost)"
)


class TarScanner:
    """Find the samples of one tar archive that is fed to it piece by piece. Not thread-safe.

    ::

        scanner = TarScanner(url)
        for piece in pieces:
            layout = scanner.feed(piece)     # the records that this piece completed
        layout = scanner.finish()            # the last one; raises if the archive is not whole

    The pieces may be cut anywhere; the result does not depend on it. Only unfinished headers (below about 1 MiB) and
    the names of the unfinished sample are kept, never payload. Offsets count from the start of the archive. A record is
    complete when the next sample begins, so its last field may lie in earlier pieces. A damaged archive raises in the
    call of feed or finish that reveals it; the scanner cannot be used afterwards.

    Args:
        url: The shard, for messages.
        repeats: A field that the sample already has begins another sample with the same key; else that is an error.
    """

    def __init__(self, url: str = "", *, repeats: bool = False) -> None:
        self.url = url
        self.repeats = repeats
        self.num_bytes = 0
        """Offset up to which bytes were fed."""
        self.record_start = 0
        """Start of the first incomplete record: no later layout begins before it."""
        self.members: Members | None = None
        """Members whose headers the last feed read, with offsets as in the archive; None if there were none."""
        self.passed_over: tuple[str, ...] = ()
        """Those of them that belong to no sample, in the order of the archive."""
        self._settled = 0
        self._tail = b""  # the bytes from _settled to num_bytes, if payload does not cover them
        self._open: Members | None = None  # the members of the unfinished sample; offsets from the archive's start
        self.ended = False
        """Whether the end-of-archive mark was fed."""

    @property
    def settled(self) -> int:
        """Offset before which the scanner needs no more bytes: any future record border is at or after it.

        May lie beyond the bytes fed, inside a large payload.
        """
        return self._settled

    def feed(self, piece: BytesLike) -> ChunkLayout:
        """Take the next bytes. Return the records that they complete (often none).

        ``piece`` is not kept.

        Raises:
            TarError: The archive is damaged.
            DuplicateKeyError: A sample has a field twice, unless ``repeats``.
        """
        return self.feed_packed(piece).unpacked()

    def feed_packed(self, piece: BytesLike) -> PackedLayout:
        """Do the same as :meth:`feed`, without making a Python string of each key."""
        raw = as_array(piece)
        self.members, self.passed_over = None, ()
        if self.num_bytes == 0:
            _refuse_compressed(raw[:BLOCK_BYTES].tobytes(), self.url)
        skip = max(0, self._settled - self.num_bytes)
        self.num_bytes += raw.size
        if self.ended:
            if not is_zero(raw):
                self._where().fail(0, "data after the end-of-archive mark", cure="join archives with `tar -A`, not cat")
            return self._close(None)
        if skip >= raw.size:
            return self._close(None)
        base = self._settled
        self.members = _moved(self._read(raw[skip:]), base)
        return self._close(self.members)

    def _read(self, raw: NDArray[np.uint8]) -> Members:
        """Return the members in the kept tail and ``raw``, which follows it. Offsets count from the tail."""
        bridge = None
        tail_bytes = len(self._tail)
        if tail_bytes + raw.size < BLOCK_BYTES:  # less than a header
            self._tail += raw.tobytes()
            return replace(_NONE, end=0, ended=False)
        if tail_bytes and raw.size > 2 * _BRIDGE_BYTES:  # a tail is short: do not copy all of raw to join them
            joint = self._tail + raw[:_BRIDGE_BYTES].tobytes()
            bridge = read_members(joint, self._where(), partial=True, verify_headers=True)
        if bridge is not None and not bridge.ended and bridge.end >= tail_bytes:
            buffer, offset = raw[bridge.end - tail_bytes :], bridge.end
        else:
            bridge, offset = None, 0
            buffer = as_array(self._tail + raw.tobytes()) if tail_bytes else raw
        where = Origin(self.url, self._settled + offset, strict=True)
        members = read_members(buffer, where, partial=True, verify_headers=True)
        self.ended = members.ended
        self._settled += members.end + offset
        self._tail = b"" if members.ended else buffer[members.end :].tobytes()
        return _joined(bridge, _moved(members, offset))

    def finish(self) -> ChunkLayout:
        """Return the last record, after the last piece.

        Raises:
            TarError: The archive ends inside a member, or without the end-of-archive mark.
        """
        return self.finish_packed().unpacked()

    def finish_packed(self) -> PackedLayout:
        """Do the same as :meth:`finish`, without making a Python string of each key."""
        if not self.ended:
            self._fail_truncated()
        members, self._open = self._open, None
        return self._group(members, self._settled)

    def _fail_truncated(self) -> None:
        last = "" if self._open is None or not len(self._open.names) else decode_name(self._open.names[-1])
        if self._settled > self.num_bytes:
            what = f"the archive ends here, but the previous member extends to byte {self._settled}"
        elif self._tail:
            what = f"the archive ends {len(self._tail)} bytes after this, inside a header"
        else:
            what = "the archive ends here without the end-of-archive mark (a block of zeros)"
        Origin(self.url, min(self._settled, self.num_bytes)).fail(0, what, member=last, cure=_CUT_OFF)

    def _where(self) -> Origin:
        return Origin(self.url, self._settled, strict=True)

    def _close(self, members: Members | None) -> PackedLayout:
        """Join ``members`` to the unfinished sample. Group all except the sample that is unfinished now."""
        if members is None or not len(members.names):
            return self._group(None, self.record_start)
        joined = _joined(self._open, members)
        last = _last_sample(joined.names)
        if not last:
            self.passed_over = _names_but(joined.names, 0, last)
            return self._group(None, self.record_start)
        self._open = _taken(joined, last)
        if len(last) > MAX_FIELDS:
            check_num_fields(decode_name(bytes(joined.names[last[0]])), len(last), self.url)
        layout = self._group(_taken(joined, slice(0, last[0])), int(self._open.headers[0]))
        self.passed_over = layout.passed_over + _names_but(joined.names, last[0], last)
        return layout

    def _group(self, members: Members | None, stop: int) -> PackedLayout:
        if members is None or not len(members.names):
            members, stop = _NONE, self.record_start
        layout = group_members(
            members, Origin(self.url, strict=True), first=self.record_start, stop=stop, repeats=self.repeats
        )
        if len(layout.keys):
            self.record_start = stop
        return layout


def _refuse_compressed(head: bytes, url: str) -> None:
    """Reject data whose first bytes show that it is not a tar, and name its type.

    Raises:
        TarError: They do.
    """
    found = next((names for magic, names in _MAGIC.items() if head.startswith(magic)), None)
    if found is not None and head[257:262] != b"ustar":
        kind, program = found
        Origin(url).fail(0, f"this is {kind}, which is not read here", cure=f"unpack it (`{program}`) and read the tar")


_NONE = read_members(bytes(512), Origin())


def _moved(members: Members, offset: int) -> Members:
    """Return ``members`` with offsets that count from ``offset`` bytes earlier."""
    return replace(members, headers=members.headers + offset, data=members.data + offset, end=members.end + offset)


def _taken(members: Members, which: slice | list[int]) -> Members:
    names = members.names
    if not isinstance(names, list):
        names = names[which]
    else:
        names = names[which] if isinstance(which, slice) else [names[index] for index in which]
    return replace(
        members, names=names, headers=members.headers[which], data=members.data[which], sizes=members.sizes[which]
    )


def _joined(first: Members | None, second: Members) -> Members:
    if first is None or not len(first.names):
        return second
    return replace(
        second,
        names=_joined_names(first.names, second.names),
        headers=np.concatenate((first.headers, second.headers)),
        data=np.concatenate((first.data, second.data)),
        sizes=np.concatenate((first.sizes, second.sizes)),
    )


def _joined_names(first: Names, second: Names) -> Names:
    if isinstance(first, list) or isinstance(second, list):
        lists = [names if isinstance(names, list) else names.tolist() for names in (first, second)]
        return lists[0] + lists[1]
    return np.concatenate((first, second))


def _names_but(names: Names, first: int, which: list[int]) -> tuple[str, ...]:
    """Return the names from number ``first`` on, except some numbers."""
    if len(names) - first == len(which):
        return ()
    left = sorted({*range(first, len(names))} - {*which})
    return tuple(decode_name(names[index].split(b"\0", 1)[0]) for index in left)


def _last_sample(names: Names) -> list[int]:
    """Return indices of the members of the last sample."""
    key: str | None = None
    indices: list[int] = []
    for index in range(len(names) - 1, -1, -1):
        split = split_name(decode_name(names[index].split(b"\0", 1)[0]))
        if split is None:
            continue
        if key is not None and split[0] != key:
            break
        key = split[0]
        indices.append(index)
    return indices[::-1]
