"""Write tar member headers: deterministic, plain ustar wherever ustar suffices.

A header depends only on the member's name and size: mtime, uid and gid are 0, the owner's names are empty,
the mode is 0644. It is preceded by a PAX header (1 KiB more per member) only if ustar cannot represent:

- a name whose UTF-8 does not fit ustar's name (100 bytes) and prefix (155 bytes, split at a ``/``);
- a size of 8 GiB or more.

Names outside ASCII are stored as their UTF-8 bytes, without a PAX header, as by GNU tar: GNU tar,
Python's tarfile, webdataset and Hugging Face datasets read them back (``tests/catalog/test_interop.py``).

An archive ends with two zero blocks and is not padded to GNU tar's record of 10,240 bytes: POSIX leaves the
record size open, all readers named above accept it, and small shards stay small.

Format: POSIX.1-2017, "pax", sections "ustar Interchange Format" and "pax Extended Header".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streaming.errors import ConfigError
from streaming.types import Int64Array

BLOCK_BYTES: Final = 512
END_OF_ARCHIVE: Final = bytes(2 * BLOCK_BYTES)

_MAX_NAME_BYTES: Final = 100
_MAX_PREFIX_BYTES: Final = 155
_MAX_USTAR_SIZE_BYTES: Final = 8**11 - 1
_SIZE_DIGITS: Final = 11
_CHECKSUM_DIGITS: Final = 6
_MODE: Final = 0o644
_BEFORE_SIZE: Final = b"%07o\0" * 3 % (_MODE, 0, 0)  # mode, uid, gid
_AFTER_SIZE: Final = b"\0%011o\0" % 0  # the size's end, mtime
# Link name, magic and version, uname, gname, devmajor, devminor.
_AFTER_KIND: Final = bytes(100) + b"ustar\x0000" + bytes(64) + b"%07o\0" * 2 % (0, 0)
_FIXED_SUM: Final = sum(_BEFORE_SIZE) + sum(_AFTER_SIZE) + sum(_AFTER_KIND) + 8 * ord(" ")
# The name of the PAX member itself. Readers that support PAX never show it.
_PAX_NAME: Final = b"././@PaxHeader"
_PADS: Final = tuple(bytes(n) for n in range(BLOCK_BYTES))


def padding(size_bytes: int) -> bytes:
    """Return the zero bytes (0 to 511) that follow ``size_bytes`` bytes of content up to the next block."""
    return _PADS[-size_bytes % BLOCK_BYTES]


def member_header(name: str, size_bytes: int) -> bytes:
    """Return the header blocks of a regular file, including a PAX header if one is needed.

    The content and :func:`padding` of its size follow. Pure: the same arguments give the same bytes.

    Args:
        name: The member's path inside the archive; not empty, encodable as UTF-8, without NUL.
        size_bytes: The content's size, not negative.

    Returns:
        A whole number of 512-byte blocks: one, or at least three with a PAX header.

    Raises:
        ConfigError: No tar header can hold the name or the size.
    """
    raw_name = _encode_name(name)
    if size_bytes < 0:
        raise ConfigError(f"tar member {name!r}: the size must not be negative, got {size_bytes}")
    records = b""
    parts = _split_name(raw_name)
    if parts is None:
        records += _pax_record(b"path", raw_name)
        parts = _clip_utf8(raw_name, _MAX_NAME_BYTES), b""
    if size_bytes > _MAX_USTAR_SIZE_BYTES:
        records += _pax_record(b"size", b"%d" % size_bytes)
        size_bytes = 0
    header = _ustar_block(*parts, size_bytes, b"0")
    if not records:
        return header
    return _ustar_block(_PAX_NAME, b"", len(records), b"x") + records + padding(len(records)) + header


def member_headers(names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
    """Return ``member_header`` of many members, made at once.

    Raises:
        ConfigError: No tar header can hold a name or a size.
    """
    count, lengths = len(names), [*map(len, names)]
    padded = "".join([name.ljust(_MAX_NAME_BYTES, "\0") for name in names])
    is_plain = padded.isascii() and padded.count("\0") == count * _MAX_NAME_BYTES - sum(lengths)  # no NUL within a name
    fits = (
        0 < min(lengths) <= max(lengths) <= _MAX_NAME_BYTES and 0 <= min(sizes) <= max(sizes) <= _MAX_USTAR_SIZE_BYTES
    )
    if not (is_plain and fits):
        return [member_header(name, size) for name, size in zip(names, sizes, strict=True)]
    letters = np.frombuffer(padded.encode(), np.uint8).reshape(count, _MAX_NAME_BYTES)
    digits = _octal(np.array(sizes, np.int64), _SIZE_DIGITS)
    sums = letters.sum(axis=1, dtype=np.int64) + digits.sum(axis=1, dtype=np.int64) + (_FIXED_SUM + ord("0"))
    # uint8 [members, 512]: the common bytes of all headers, then names, sizes and checksums.
    content = bytearray(_TEMPLATE * count)
    blocks = np.frombuffer(content, np.uint8).reshape(count, BLOCK_BYTES)
    blocks[:, :_MAX_NAME_BYTES] = letters
    blocks[:, _SIZE_AT : _SIZE_AT + _SIZE_DIGITS] = digits
    blocks[:, _CHECKSUM_AT : _CHECKSUM_AT + _CHECKSUM_DIGITS] = _octal(sums, _CHECKSUM_DIGITS)
    whole = bytes(content)
    return [whole[at : at + BLOCK_BYTES] for at in range(0, len(whole), BLOCK_BYTES)]


def _octal(numbers: Int64Array, num_digits: int) -> NDArray[np.uint8]:
    """Return the octal digits of ``n`` numbers in ASCII, uint8 ``[n, num_digits]``."""
    digits = numbers[:, None] >> np.arange(3 * num_digits - 3, -1, -3) & 7
    return (digits + ord("0")).astype(np.uint8)


def _encode_name(name: str) -> bytes:
    try:
        raw_name = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"tar member {name!r}: the name is not valid Unicode ({error.reason})") from error
    if not raw_name or b"\0" in raw_name:
        raise ConfigError(f"tar member {name!r}: a name must have at least one character and no NUL")
    return raw_name


def _split_name(raw_name: bytes) -> tuple[bytes, bytes] | None:
    """Return ``(name, prefix)`` as ustar stores them; None if the name needs a PAX header."""
    if len(raw_name) <= _MAX_NAME_BYTES:
        return raw_name, b""
    # The last slash that leaves a prefix of at most 155 bytes gives the shortest possible name.
    cut = raw_name.rfind(b"/", 0, _MAX_PREFIX_BYTES + 1)
    name = raw_name[cut + 1 :]
    if cut <= 0 or not 0 < len(name) <= _MAX_NAME_BYTES:
        return None
    return name, raw_name[:cut]


def _clip_utf8(raw: bytes, max_bytes: int) -> bytes:
    return raw[:max_bytes].decode("utf-8", "ignore").encode("utf-8")


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    """Return a length, a space, ``keyword=value`` and a newline. The length counts its own digits too."""
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return b"%d" % length + rest


def _ustar_block(name: bytes, prefix: bytes, size_bytes: int, kind: bytes) -> bytes:
    size = b"%011o" % size_bytes
    # Zero bytes add nothing to the checksum; its own field counts as eight spaces.
    checksum = _FIXED_SUM + sum(name) + sum(size) + kind[0] + sum(prefix)
    return b"".join(
        (
            name.ljust(_MAX_NAME_BYTES, b"\0"),
            _BEFORE_SIZE,
            size,
            _AFTER_SIZE,
            b"%06o\0 " % checksum,
            kind,
            _AFTER_KIND,
            prefix.ljust(_MAX_PREFIX_BYTES + 12, b"\0"),
        )
    )


_TEMPLATE: Final = _ustar_block(b"", b"", 0, b"0")
_SIZE_AT: Final = _MAX_NAME_BYTES + len(_BEFORE_SIZE)
_CHECKSUM_AT: Final = _SIZE_AT + _SIZE_DIGITS + len(_AFTER_SIZE)
