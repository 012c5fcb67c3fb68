"""Read whole files of other formats: decompress them within bounds, and compare checksums."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import logging
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, BinaryIO, cast

import pyarrow as pa

from shard_tools.make.convert.base.files import SourceFile, StoredFile
from streaming.errors import DataError, StorageError
from streaming.storage import Storage

CODECS = ("br", "bz2", "gz", "snappy", "zstd")
HARMLESS_BYTES = 64 << 20  # inflated size that is accepted whatever the ratio
_PIECE_BYTES = 8 << 20
IN_MEMORY = 64 << 20  # maximum size of an unpacked file in memory; larger ones go to a temporary file
_log = logging.getLogger(__name__)


def refuse_bomb(num_bytes: int, stored_bytes: int, max_ratio: float, where: str) -> None:
    """Refuse a file that inflates to more than ``max_ratio`` times its size, if that is more than 64 MiB.

    Raises:
        DataError: It inflates to more.
    """
    if num_bytes > max(HARMLESS_BYTES, max_ratio * stored_bytes):
        raise DataError(
            f"{where}: {stored_bytes} bytes inflate to more than {max_ratio:g} times as many: a decompression bomb? If "
            "it is meant, say so with --max-gzip-ratio"
        )


def open_unpacked(
    file: SourceFile, storage: Storage, *, codec: str, num_bytes: int, packed_sums: Mapping[str, str],
    sums: Mapping[str, str],
) -> BinaryIO:  # fmt: skip
    """Return ``file`` decompressed, seekable: in memory up to 64 MiB, otherwise in a temporary file. Close it.

    Args:
        file: The file.
        storage: The store that holds it.
        codec: One of ``CODECS``; "": it is not compressed.
        num_bytes: Its decompressed size; no more than that is ever produced.
        packed_sums: Checksums of the file, by algorithm; algorithms unknown to this Python are not compared.
        sums: Checksums of the decompressed content.

    Raises:
        DataError: It is damaged, truncated, or has another size or other checksums.
    """
    out = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY, prefix="shardstream-convert-")  # noqa: SIM115
    try:
        _unpack(out, file, storage, codec, num_bytes, packed_sums, sums)
        out.seek(0)
    except BaseException:
        out.close()
        raise
    return cast("BinaryIO", out)


def _unpack(
    out: IO[bytes], file: SourceFile, storage: Storage, codec: str, num_bytes: int, packed_sums: Mapping[str, str],
    sums: Mapping[str, str],
) -> None:  # fmt: skip
    where, done = file.shown_url, 0
    stored, unpacked = _digests(packed_sums), _digests(sums)
    with contextlib.closing(_Summed(file, storage, stored)) as raw, _told(where):
        for piece in _pieces(raw, codec, num_bytes, where):
            done += len(piece)
            if done > num_bytes:
                break
            for digest in unpacked.values():
                digest.update(piece)
            out.write(piece)
    if done != num_bytes:
        held = f"more than {num_bytes} bytes, which" if done > num_bytes else f"{done} bytes, and {num_bytes}"
        raise DataError(f"{where}: it holds {held} the index says; truncated or damaged? Fetch it again")
    _compare(stored, packed_sums, where)
    _compare(unpacked, sums, f"{where}, decompressed" if codec else where)


class InflatedStream(io.RawIOBase):
    """The content of one or more gzip (``wbits`` 31) or zlib (15) streams of unknown size.

    Reading raises ``DataError`` if a stream is damaged or truncated, or inflates to more than ``max_ratio`` times its
    size.
    """

    def __init__(self, stream: BinaryIO, where: str, max_ratio: float, *, wbits: int) -> None:
        super().__init__()
        self._pieces = self._inflate(stream, where, max_ratio, wbits)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fill ``buffer`` as far as the current piece goes."""
        out = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        self._rest = self._rest or memoryview(next(self._pieces, b""))
        count = min(len(out), len(self._rest))
        out[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    @staticmethod
    def _inflate(stream: BinaryIO, where: str, max_ratio: float, wbits: int) -> Iterator[bytes]:
        inflater, done, read = zlib.decompressobj(wbits), 0, 0
        with _told(where):
            while piece := stream.read(_PIECE_BYTES):
                read += len(piece)
                while piece:
                    if inflater.eof:
                        inflater = zlib.decompressobj(wbits)
                    out = inflater.decompress(piece, _PIECE_BYTES)
                    done += len(out)
                    refuse_bomb(done, read, max_ratio, where)
                    if out:
                        yield out
                    piece = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if not inflater.eof:
                raise EOFError(f"it ends after {done} inflated bytes")


class _Summed(StoredFile):
    """A stored file that is digested while it is read from front to back."""

    def __init__(self, file: SourceFile, storage: Storage, digests: Mapping[str, Any]) -> None:
        super().__init__(file.url, file.size_bytes, storage)
        self._digests = digests

    def seekable(self) -> bool:
        """Return False, so that no byte is skipped or read twice."""
        return False

    def readinto(self, buffer: object) -> int:
        """Fill ``buffer`` as far as the file goes."""
        count = super().readinto(buffer)
        for digest in self._digests.values():
            digest.update(memoryview(buffer)[:count])  # type: ignore[arg-type]
        return count

    def finish(self) -> None:
        """Read the bytes that the decompressor has left to the end, if there are digests."""
        while self._digests and self.read(_PIECE_BYTES):
            pass


def _pieces(raw: _Summed, codec: str, num_bytes: int, where: str) -> Iterator[bytes]:
    if codec == "snappy":
        yield _unsnapped(raw.readall(), num_bytes, where)
        return  # all bytes are read
    reader = io.BufferedReader(raw, _PIECE_BYTES)
    stream: Any = reader
    if codec == "gz":
        stream = gzip.GzipFile(fileobj=reader, mode="rb")
    elif codec == "bz2":
        stream = bz2.BZ2File(reader)
    elif codec:
        stream = pa.CompressedInputStream(pa.PythonFile(reader, mode="r"), {"br": "brotli"}.get(codec, codec))
    while piece := stream.read(_PIECE_BYTES):
        yield piece
    raw.finish()


def _unsnapped(packed: bytes, num_bytes: int, where: str) -> bytes:
    """Decompress a raw block of Snappy, which begins with its size: a varint."""
    said = at = 0
    for at, byte in enumerate(packed[:5]):
        said |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            break
    if said != num_bytes:
        raise DataError(f"{where}: it holds {said} bytes, expected {num_bytes}; damaged?")
    return bytes(pa.decompress(packed, num_bytes, codec="snappy", asbytes=True))


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """Turn errors of decompressors into our own, which name the file."""
    try:
        yield
    except (DataError, StorageError):
        raise
    except EOFError as error:
        raise DataError(f"{where}: the compressed file ends early ({error}); fetch it again") from error
    except (OSError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{where}: the compressed file is damaged or ends early ({error}); fetch it again") from error


def _digests(sums: Mapping[str, str]) -> dict[str, Any]:
    return {name: hashlib.new(name, usedforsecurity=False) for name in sums if is_known_sum(name)}


def is_known_sum(name: str) -> bool:
    """Return whether this Python can compute checksums of this algorithm."""
    return name in hashlib.algorithms_available and not name.startswith("shake")


def _compare(digests: Mapping[str, Any], expected: Mapping[str, str], where: str) -> None:
    for name, digest in digests.items():
        if digest.hexdigest() != expected[name].lower():
            raise DataError(
                f"{where}: its {name} is {digest.hexdigest()}, expected {expected[name]} by the index; damaged? Fetch "
                "it again"
            )
