"""Walk tar headers exactly: one member at a time, every form of header, every check, every error.

:mod:`streaming.shards.tar.fast` reads regular archives. Everything else is handled here, so all messages about damaged
archives are here.
"""

from __future__ import annotations

import numpy as np

from streaming.shards.tar.blocks import (
    BLOCK_BYTES,
    DATALESS_TYPES,
    EXTENSION_TYPES,
    MAX_EXTENSION_BYTES,
    MAX_EXTENSION_RUN_BYTES,
    MAX_MEMBER_BYTES,
    PAX_TYPES,
    REGULAR_TYPES,
    Members,
    Origin,
    checksum_matches,
    concerns_us,
    decode_name,
    is_zero,
    member_of_pax,
    padded,
    parse_number,
    parse_pax,
    split_name,
)

_ZERO_BLOCK = bytes(BLOCK_BYTES)


class _Walk:
    """The state of one walk over ``view``. ``partial`` means that more bytes may follow."""

    def __init__(self, view: memoryview, where: Origin, *, partial: bool) -> None:
        self.view, self.where, self.partial = view, where, partial
        self.names: list[bytes] = []
        self.headers: list[int] = []
        self.data: list[int] = []
        self.sizes: list[int] = []
        self.at = 0
        self.ended = False
        self.begin: int | None = None  # where the pending extension headers begin
        self.name: bytes | None = None  # the name that they give to the next member
        self.size: int | None = None

    def run(self) -> Members:
        while not self.ended and self._step():
            pass
        end = self.at if self.begin is None else self.begin
        if self.begin is not None and not self.partial:
            self.where.fail(self.begin, "extension header without a member after it", cure="truncated archive?")
        return Members(
            names=self.names,
            headers=np.array(self.headers, np.int64),
            data=np.array(self.data, np.int64),
            sizes=np.array(self.sizes, np.int64),
            end=end,
            ended=self.ended,
        )

    def _step(self) -> bool:
        """Read the header at ``self.at``. Return False at the end of the buffer."""
        at, left = self.at, len(self.view) - self.at
        if left < BLOCK_BYTES:
            if left > 0 and not self.partial:
                self.where.fail(
                    at, f"{left} bytes where a header of {BLOCK_BYTES} is expected", cure="truncated archive?"
                )
            return False
        header = bytes(self.view[at : at + BLOCK_BYTES])
        if header == _ZERO_BLOCK:
            self._end_of_archive()
            return True
        kind, size = self._check(header)
        if kind in EXTENSION_TYPES or kind == ord("g"):
            return self._extension(kind, size)
        self._member(header, kind, size)
        return True

    def _end_of_archive(self) -> None:
        if self.begin is not None:
            self.where.fail(self.begin, "extension header without a member after it", cure="damaged archive?")
        if not is_zero(self.view[self.at :]):
            self.where.fail(
                self.at,
                "data after the end-of-archive mark",
                cure="were archives joined with cat? join them with `tar -A`",
            )
        self.ended = True

    def _check(self, header: bytes) -> tuple[int, int]:
        """Return type and size of a header whose checksum holds."""
        if not checksum_matches(header):
            self.where.fail(
                self.at, "no tar header here (its checksum does not hold)", cure="damaged shard, or another file?"
            )
        member = header[:100].split(b"\0", 1)[0]
        size = 0 if header[156] in DATALESS_TYPES else parse_number(header[124:136])
        if size is None or not 0 <= size < MAX_MEMBER_BYTES:
            self.where.fail(self.at, f"size field {header[124:136]!r} is not a size", member=member)
        return header[156], size

    def _extension(self, kind: int, size: int) -> bool:
        at, start = self.at, self.at + BLOCK_BYTES
        if size > MAX_EXTENSION_BYTES:
            self.where.fail(at, f"extension header of {size} bytes, at most {MAX_EXTENSION_BYTES} are read")
        run_bytes = start + padded(size) - (at if self.begin is None else self.begin)
        if run_bytes > MAX_EXTENSION_RUN_BYTES:
            what = f"{run_bytes} bytes of extension headers before one member"
            self.where.fail(at, f"{what}, at most {MAX_EXTENSION_RUN_BYTES} are read", cure="damaged shard?")
        if start + padded(size) > len(self.view):
            if not self.partial:
                self.where.fail(at, f"extension header of {size} bytes exceeds the {len(self.view) - start} left")
            self.begin = at if self.begin is None else self.begin
            return False
        payload = bytes(self.view[start : start + size])
        if kind == ord("g"):
            if concerns_us(payload) and not {b"path", b"size"}.isdisjoint(parse_pax(payload, self.where, start)):
                self.where.fail(at, "global PAX header sets a path or size for all members", cure="repack the archive")
        else:
            self.begin = at if self.begin is None else self.begin
            if kind == ord("L"):
                self.name = payload.split(b"\0", 1)[0]
            elif kind in PAX_TYPES and concerns_us(payload):
                name, num_bytes = member_of_pax(parse_pax(payload, self.where, start), self.where, at)
                self.name = self.name if name is None else name
                self.size = self.size if num_bytes is None else num_bytes
        self.at = start + padded(size)
        return True

    def _member(self, header: bytes, kind: int, size: int) -> None:
        at, start = self.at, self.at + BLOCK_BYTES
        name = self.name if self.name is not None else plain_name(header)
        if kind == ord("S"):
            self.where.fail(at, "sparse file", member=name, cure="pack it without --sparse")
        if kind == ord("1") and self.where.strict and split_name(decode_name(name)) is not None:
            target = header[157:257].split(b"\0", 1)[0]
            what = f"a hard link to {decode_name(target)!r}, whose bytes readers of shards do not find"
            cure = "pack it with `tar --hard-dereference`, or write it again with `shard_tools repair URL --to TARGET`"
            self.where.fail(at, what, member=name, cure=cure)
        if kind in DATALESS_TYPES:
            size = 0
        elif self.size is not None:
            size = self.size
        if not self.partial and start + padded(size) > len(self.view):
            what = f"member of {size} bytes exceeds the {len(self.view) - start} bytes left"
            self.where.fail(at, what, member=name, cure="truncated archive?")
        if kind in REGULAR_TYPES:
            self.names.append(name)
            self.headers.append(at if self.begin is None else self.begin)
            self.data.append(start)
            self.sizes.append(size)
        self.begin = self.name = self.size = None
        self.at = start + padded(size)


def plain_name(header: bytes) -> bytes:
    """Return the name in a header itself: the name field, after the prefix if the magic is POSIX's."""
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def walk_members(view: memoryview, where: Origin, *, partial: bool) -> Members:
    """Return the regular members of the tar bytes in ``view``, which begins at a header.

    Args:
        view: The bytes.
        where: For messages.
        partial: Whether more bytes may follow; then a member may reach beyond the buffer, and an unfinished header
            is left for the next call (``end`` is before it).

    Raises:
        TarError: Damage, truncation (unless ``partial``), sparse files, or data after the end-of-archive mark.
    """
    return _Walk(view, where, partial=partial).run()
