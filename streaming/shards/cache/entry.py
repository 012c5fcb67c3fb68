"""Keep one entry as a file: a header that describes the bytes, then the bytes, which are always checked.

Layout of the file, little-endian: magic (8 bytes), CRC32C of the bytes (4), CRC32C of the header without this field
(4), number of bytes (8), digest of the key (32), zeros up to ``HEADER_BYTES``.
"""

from __future__ import annotations

import enum
import os
import struct
import time

import crc32c

from streaming.shards.cache.key import DIGEST_BYTES, EntryKey
from streaming.storage import Checked, DifferentSumError

HEADER_BYTES = 64
BLOCK_BYTES = 4096
_MAGIC = b"shstcch1"
_HEADER = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s8x")


class LookupResult(enum.Enum):
    """Why a lookup found no bytes."""

    ABSENT = "absent"
    DAMAGED = "damaged"


def file_bytes(num_bytes: int) -> int:
    """Return the length of the file that holds ``num_bytes``."""
    return HEADER_BYTES + num_bytes


def charged_bytes(length_bytes: int) -> int:
    """Return the part of the limit that a file of this length takes: whole blocks, as on the disk."""
    return -(-length_bytes // BLOCK_BYTES) * BLOCK_BYTES


def read_entry(path: str, key: EntryKey, expected_crc32c: int | None, out: memoryview) -> Checked | LookupResult:
    """Fill ``out`` from the entry at ``path``, and mark the entry as just used.

    ``out`` holds the right bytes only if they are checked. The file may be unlinked meanwhile: an open file stays
    readable.

    Raises:
        OSError: The file exists and cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return LookupResult.ABSENT
    try:
        header = bytearray(HEADER_BYTES)
        beyond = bytearray(1)
        if _read_all(fd, [memoryview(header), out, memoryview(beyond)]) != HEADER_BYTES + len(out):
            return LookupResult.DAMAGED
        magic, crc, header_crc, num_bytes, digest = _HEADER.unpack(header)
        if (magic, num_bytes, digest) != (_MAGIC, key.num_bytes, key.digest) or header_crc != _header_crc(header):
            return LookupResult.DAMAGED
        if expected_crc32c not in {None, crc}:
            return LookupResult.DAMAGED
        try:
            checked = Checked.comparing(len(out), [((out,), crc)])
        except DifferentSumError:
            return LookupResult.DAMAGED
        touch(fd)
        return checked
    finally:
        os.close(fd)


def write_entry(fd: int, key: EntryKey, crc: int, data: memoryview) -> None:
    """Write the entry of ``key`` to the file ``fd`` from its beginning on. ``crc`` is the CRC32C of ``data``.

    There is no fsync: after a power failure a file may be short or full of zeros, which header and checksum reveal to
    the next reader. Bytes that a store can deliver again are not worth waiting for the disk.

    Raises:
        OSError: The disk is full or fails.
    """
    header = bytearray(_HEADER.pack(_MAGIC, crc, 0, key.num_bytes, key.digest))
    struct.pack_into("<I", header, 12, _header_crc(header))
    done = os.pwritev(fd, [header, data], 0)
    while done < HEADER_BYTES + len(data):
        if done < HEADER_BYTES:
            done += os.pwrite(fd, header[done:], done)
        else:
            done += os.pwrite(fd, data[done - HEADER_BYTES :], done)
    touch(fd)


def touch(fd: int) -> None:
    """Mark the entry as just used by its modification time, which mount options do not suppress.

    In a read-only cache the order does not change, which is not a failure.
    """
    now_ns = time.time_ns()  # finer than the clock that the kernel stamps files with
    try:
        os.utime(fd, ns=(now_ns, now_ns))
    except OSError:
        return


def _header_crc(header: bytearray) -> int:
    return int(crc32c.crc32c(header[16:], crc32c.crc32c(header[:12])))


def _read_all(fd: int, views: list[memoryview]) -> int:
    """Read into ``views``. Return the number of bytes, less than their size only at the end of the file."""
    done = 0
    while views:
        count = os.preadv(fd, views, done)
        if count == 0:
            break
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
    return done
