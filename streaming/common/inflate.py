"""Unpack gzip in bounded pieces, and refuse what inflates to far more than its size."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

GZIP_MAGIC = b"\x1f\x8b"
INFLATED_BYTES = 4 << 20
"""Largest piece that is yielded at once."""
MAX_GZIP_RATIO = 200.0
"""Text inflates to 3 to 20 times its size; deflate can reach at most 1,032 times, and bombs do."""
HARMLESS_BYTES = 64 << 20
"""Inflated size that is accepted whatever the ratio."""


class GzipError(ValueError):
    """A gzip stream is damaged, truncated, or inflates to more than is allowed."""


def gunzipped(pieces: Iterable[bytes], max_ratio: float, cure: str) -> Iterator[bytes]:
    """Yield what a gzip stream inflates to, in pieces of at most ``INFLATED_BYTES``; several members may follow.

    Args:
        pieces: The stream, cut anywhere.
        max_ratio: It may inflate to this many times its size, and to ``HARMLESS_BYTES``.
        cure: What to do if a larger ratio is meant, for the message.

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
