"""Share the common parts of both readers of tar headers: values, limits, octal fields, PAX records, names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streaming.errors import TarError
from streaming.shards.tar.passed_over import in_side_folder, is_note
from streaming.types import Int64Array

BLOCK_BYTES = 512
MAX_EXTENSION_BYTES = 1 << 20
"""Size limit of a PAX record or GNU long name; anything longer is damage or an attack."""
MAX_EXTENSION_RUN_BYTES = 4 << 20
"""Size limit of the extension headers before one member; tar programs write at most one of each kind."""
MAX_PAX_RECORDS = 4096
"""Maximum number of records in one PAX header; real ones hold a few, and a file's extended attributes."""
MAX_MEMBER_BYTES = 1 << 56
"""Largest size that a header may state, so that offsets stay within int64."""

BytesLike = bytes | bytearray | memoryview | NDArray[np.uint8]
Names = list[bytes] | NDArray[np.bytes_]
"""Member names: a NumPy column if all are in the headers' name fields (including junk after a NUL)."""

REGULAR_TYPES = frozenset(b"0\x007")
DATALESS_TYPES = frozenset(b"123456")
"""Links, devices, directories and FIFOs: no payload follows, whatever the size field states (as in ``tarfile``)."""
PAX_TYPES = frozenset(b"xX")
EXTENSION_TYPES = frozenset(b"xXLK")
"""Headers that describe the next member."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a buffer: the shard, and the buffer's offset in it. Errors are raised through it.

    ``strict``: the shard is read for the first time, so the silent loss of a part of a sample is an error. Chunks of an
    index
    are read as when the index was built.
    """

    url: str = ""
    base: int = 0
    strict: bool = False

    def fail(self, offset: int, what: str, *, member: bytes | str = b"", cure: str = "") -> NoReturn:
        """Raise the TarError for the problem ``what`` at ``offset`` of the buffer."""
        name = decode_name(member) if isinstance(member, bytes) else member
        at = f"{self.url or 'tar'}, byte {self.base + offset}" + (f", member {name!r}" if name else "")
        raise TarError(f"{at}: {what}" + (f"; {cure}" if cure else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The regular files among the members of a buffer, in order. Offsets count from the start of the buffer.

    ``headers[i]`` is the start of member ``i`` (of its PAX or long-name header if it has one), ``data[i]`` the start of
    its bytes, ``sizes[i]`` their number. ``end`` is the place of the next header, possibly beyond the buffer. ``ended``
    is True if the end-of-archive mark is there.
    """

    names: Names
    headers: Int64Array
    data: Int64Array
    sizes: Int64Array
    end: int
    ended: bool


def padded(size: int) -> int:
    """Return ``size`` rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def parse_number(field: bytes) -> int | None:
    """Return the value of a numeric header field: octal text, or base 256 with the high bit set.

    None if it is neither.
    """
    if field[:1] and field[0] & 0x80:  # -1 for a negative number and for one beyond all sizes
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    text = field.split(b"\0", 1)[0].strip(b" ")
    if not text:
        return 0
    return int(text, 8) if text.isdigit() and not text.strip(b"01234567") else None


def checksum_matches(header: bytes) -> bool:
    """Return whether a 512-byte header holds the sum of its own bytes, unsigned or (in old tars) signed."""
    stored = parse_number(header[148:156])
    unsigned = sum(header) - sum(header[148:156]) + 8 * 0x20
    if stored == unsigned:
        return True
    num_high = sum(byte >> 7 for byte in header) - sum(byte >> 7 for byte in header[148:156])
    return stored == unsigned - 256 * num_high


def concerns_us(pax_payload: bytes) -> bool:
    """Return whether PAX records may set values that are used here: the path, the size, or a sparse layout."""
    return b" path=" in pax_payload or b" size=" in pax_payload or b"GNU.sparse" in pax_payload


def parse_pax(payload: bytes, where: Origin, offset: int) -> dict[bytes, bytes]:
    """Return the records ``length key=value`` of a PAX header's payload that begins at ``offset`` of the buffer.

    Raises:
        TarError: A record's length is wrong, or there are more than :data:`MAX_PAX_RECORDS`.
    """
    records: dict[bytes, bytes] = {}
    at, payload_end, num_records = 0, len(payload.rstrip(b"\0")), 0
    while at < payload_end:
        num_records += 1
        if num_records > MAX_PAX_RECORDS:
            where.fail(offset, f"PAX header of more than {MAX_PAX_RECORDS} records", cure="repack the archive")
        space = payload.find(b" ", at, at + 20)
        digits = payload[at:space] if space > 0 else b""
        stop = at + int(digits) if digits.isdigit() else -1
        record = payload[space + 1 : stop]
        if stop <= space or stop > len(payload) or not record.endswith(b"\n") or b"=" not in record:
            where.fail(offset + at, f"damaged PAX record {payload[at : at + 40]!r}")
        key, _, value = record[:-1].partition(b"=")
        records[key] = value
        at = stop
    return records


def member_of_pax(records: dict[bytes, bytes], where: Origin, offset: int) -> tuple[bytes | None, int | None]:
    """Return the name and size that PAX ``records`` give the next member; None for what they do not give.

    Raises:
        TarError: A sparse file, whose bytes are not stored contiguously, or a size that is not a number.
    """
    if any(key.startswith(b"GNU.sparse") for key in records):
        where.fail(offset, "sparse file", cure="pack it without --sparse")
    size_text = records.get(b"size")
    if size_text is not None and not (
        size_text.isdigit() and len(size_text) <= 18 and int(size_text) < MAX_MEMBER_BYTES
    ):
        where.fail(offset, f"PAX size {size_text[:40]!r} is not a size")
    path = records.get(b"path")
    return (None if path is None else path.rstrip(b"/")), (None if size_text is None else int(size_text))


def as_array(buffer: Any) -> NDArray[np.uint8]:
    """Return ``buffer`` (bytes, memoryview, array, …; contiguous) as a uint8 array over the same memory."""
    view = memoryview(buffer)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def is_zero(buffer: Any) -> bool:
    """Return whether all bytes of ``buffer`` are zero."""
    return not as_array(buffer).any()


# Member names to sample keys and fields: the rule shared by webdataset, Megatron-Energon and Hugging Face datasets.
# Directories are part of the key, and the key ends at the first dot of the last path component; fields are lower-cased.
# Files that macOS or a NAS left beside packed files are not samples here.
# Names are bytes in a tar; they are read as UTF-8, and bytes that are not UTF-8 become lone surrogates
# (``surrogateescape``), as in Python's ``tarfile``, so that no name is lost and no two names become one.


def decode_name(name: bytes) -> str:
    """Return ``name`` as text. Bytes that are not UTF-8 become surrogates, so :func:`encode_name` restores them."""
    return name.decode("utf-8", "surrogateescape")


def encode_name(name: str) -> bytes:
    """Return the inverse of :func:`decode_name`."""
    return name.encode("utf-8", "surrogateescape")


def split_name(name: str) -> tuple[str, str] | None:
    """Return key and field (lower-cased, without the dot) of a member name; None if it belongs to no sample.

    Names without a dot in the last component, dot-files in any directory, and names that
    :mod:`streaming.shards.tar.passed_over` lists belong to no sample. (To webdataset, ``a/b/.x`` is field ``x`` of
    ``a/b/``.)
    """
    last = name.rfind("/") + 1
    dot = name.find(".", last)
    if dot <= last or is_note(name) or in_side_folder(name):
        return None
    if "\n" not in name:
        return name[:dot], name[dot + 1 :].lower()
    # webdataset's regular expression, ^((?:.*/|)[^.]+)[.]([^/]*)$, without its backtracking, which is quadratic.
    newline = name.find("\n")
    folder = name.rfind("/", 0, min(newline % (len(name) + 1), dot - 1)) + 1
    if folder >= dot or "." in name[folder:dot]:
        return None
    return name[:dot], name[dot + 1 :].lower()


def is_meta(field: str) -> bool:
    """Return whether a name looks like those of readers' own notes in a sample, such as ``__key__``."""
    return field.startswith("__") and field.endswith("__") and len(field) > len("____")
