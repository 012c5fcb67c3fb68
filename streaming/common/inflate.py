"""Unpack gzip in bounded pieces, and refuse streams that inflate to far more than their size."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

GZIP_MAGIC = b"\x1f\x8b"
INFLATED_BYTES = 4 << 20
"""Maximum size of a yielded piece."""
MAX_GZIP_RATIO = 200.0
"""Text inflates to 3 to 20 times its size. Deflate reaches at most 1,032 times, and bombs do."""
HARMLESS_BYTES = 64 << 20
"""Inflated size that is accepted regardless of the ratio."""


class GzipError(ValueError):
    """A gzip stream is damaged or truncated, or inflates to more than allowed."""


def gunzipped(pieces: Iterable[bytes], max_ratio: float, cure: str) -> Iterator[bytes]:
    """Yield the inflated bytes of a gzip stream, in pieces of at most ``INFLATED_BYTES``; it may have several members.

    Args:
        pieces: The stream, cut anywhere.
        max_ratio: Maximum ratio of the inflated size to the size; up to ``HARMLESS_BYTES``, any ratio is allowed.
        cure: Advice in the message, for a larger ratio that is intended.

    Raises:
        GzipError: The stream is damaged or truncated, or inflates to more.
    """
    inflater = zlib.decompressobj(wbits=31)
    num_bytes = num_read = 0
    begun = False  # whether the current gzip member has begun
    for piece in pieces:
        data = piece
        num_read += len(piece)
        while data:
            if inflater.eof:
                data = data.lstrip(b"\0") if not begun else data  # padding between members is allowed
                if not data:
                    break
                inflater = zlib.decompressobj(wbits=31)
            try:
                out = inflater.decompress(data, INFLATED_BYTES)
            except zlib.error as error:
                raise GzipError(f"damaged gzip stream near inflated byte {num_bytes} ({error})") from error
            begun = not inflater.eof
            num_bytes += len(out)
            if num_bytes > max(HARMLESS_BYTES, max_ratio * num_read):
                raise GzipError(
                    f"{num_read} bytes of gzip inflate to more than {max_ratio:g} times as many: a decompression bomb? "
                    f"If it is meant, {cure}"
                )
            if out:
                yield out
            data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
    if not inflater.eof:
        raise GzipError(f"gzip stream ends early, after {num_bytes} inflated bytes; truncated?")
