"""Read samples from a tar that arrives as a stream: shards without an index, and ``.tar.gz``."""

from __future__ import annotations

import io
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from streaming.errors import TarError
from streaming.tar.blocks import BytesLike
from streaming.tar.group import ChunkLayout
from streaming.tar.scanner import TarScanner

MAX_SAMPLE_BYTES = 4 << 30
"""Largest sample that is gathered from a stream; limits memory against damage and decompression bombs."""
_GZIP_MAGIC = b"\x1f\x8b"
_INFLATED_BYTES = 4 << 20
MAX_GZIP_RATIO = 200.0
"""Text inflates to 3 to 20 times its size; deflate can reach at most 1,032 times, and bombs do."""
_HARMLESS_BYTES = 64 << 20
"""Inflated size that is accepted whatever the ratio."""


def iter_samples(
    pieces: Iterable[BytesLike],
    url: str = "",
    *,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    max_gzip_ratio: float = MAX_GZIP_RATIO,
    repeats: bool = False,
    left_out: Callable[[str], None] | None = None,
    larger: str = "cut it into smaller samples, or read the archive by other means",
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and fields of each sample of a tar that arrives in ``pieces``, in the order of the archive.

    A gzip stream is recognized by its first bytes and inflated on the way. A sample is yielded as soon as the next
    one begins; memory is that of one sample and two pieces, in one copy. Samples before a damaged place are
    yielded before the error is raised.

    Args:
        pieces: The archive's bytes, cut anywhere.
        url: The shard, for messages.
        max_sample_bytes: Larger samples raise.
        max_gzip_ratio: A gzip stream that inflates to more than this multiple of its size raises, from 64 MiB on.
        repeats: As in :class:`TarScanner`.
        left_out: Called with the name of each regular file that belongs to no sample.
        larger: What to do about a sample that is too large, for its message.

    Raises:
        TarError: A damaged or truncated archive, or a sample larger than ``max_sample_bytes``.
        DuplicateKeyError: A sample has a field twice, unless ``repeats``.
    """
    scanner = TarScanner(url, repeats=repeats)
    held = _Held()
    for piece in inflated(pieces, url, max_gzip_ratio=max_gzip_ratio):
        if not scanner.ended:  # zeros that follow belong to no sample, however many
            held.add(piece)
        layout = scanner.feed(piece)
        if left_out is not None:
            for name in scanner.passed_over:
                left_out(name)
        del piece  # so that what is cut out of it can free it
        yield from held.samples(layout)
        held.drop_before(scanner.record_start)
        if min(held.stop, scanner.settled) - scanner.record_start > max_sample_bytes:
            raise TarError(
                f"{url or 'tar'}, byte {scanner.record_start}: a sample of more than {max_sample_bytes} bytes; {larger}"
            )
    yield from held.samples(scanner.finish())


class _Held:
    """Pieces of the stream from ``start`` to ``stop``; they are freed while a large field is assembled from them."""

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._pieces: deque[bytes] = deque()

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.stop += len(piece)

    def samples(self, layout: ChunkLayout) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the samples of a layout, each once, in the order of the stream."""
        for key, starts, sizes in zip(layout.keys, layout.starts.tolist(), layout.sizes.tolist(), strict=True):
            places = [place for place in zip(starts, sizes, layout.fields, strict=True) if place[0] >= 0]
            first, last = min(places), max(places)
            self.drop_before(first[0])
            piece, start = self._pieces[0] if self._pieces else b"", self.start
            if last[0] + last[1] <= start + len(piece):
                yield key, {field: piece[at - start : at - start + size] for at, size, field in places}
            else:
                found = {field: self._cut(at, at + size) for at, size, field in sorted(places)}
                yield key, {field: found.pop(field) for _, _, field in places}

    def _cut(self, start: int, stop: int) -> bytes:
        """Return the bytes of a field, dropping what lies before ``stop`` piece by piece."""
        out = io.BytesIO()
        while start < stop:
            self.drop_before(start)
            size = min(self.start + len(self._pieces[0]), stop) - start
            out.write(memoryview(self._pieces[0])[start - self.start : start - self.start + size])
            start += size
        return out.getvalue()  # no copy: nobody else refers to it

    def drop_before(self, offset: int) -> None:
        """Drop the pieces that end before ``offset``."""
        while self._pieces and self.start + len(self._pieces[0]) <= offset:
            self.start += len(self._pieces.popleft())


def inflated(pieces: Iterable[BytesLike], url: str = "", *, max_gzip_ratio: float = MAX_GZIP_RATIO) -> Iterator[bytes]:
    """Yield ``pieces`` as bytes; inflated, in bounded pieces, if they begin as gzip does (several members may follow).

    Raises:
        TarError: The gzip stream is damaged, truncated, or inflates to more than allowed.
    """
    stream = iter(pieces)
    head = b""
    for piece in stream:
        head += bytes(piece)
        if len(head) >= len(_GZIP_MAGIC):
            break
    if head.startswith(_GZIP_MAGIC):
        yield from _gunzip(_chain(head, stream), url, max_gzip_ratio)
    else:
        yield from _chain(head, stream)


def _chain(head: bytes, stream: Iterator[BytesLike]) -> Iterator[bytes]:
    yield head
    for piece in stream:
        yield bytes(piece)


def _gunzip(pieces: Iterable[bytes], url: str, max_ratio: float) -> Iterator[bytes]:
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
                out = inflater.decompress(data, _INFLATED_BYTES)
            except zlib.error as error:
                raise TarError(
                    f"{url or 'tar'}: damaged gzip stream near inflated byte {num_bytes} ({error})"
                ) from error
            begun = not inflater.eof
            num_bytes += len(out)
            if num_bytes > max(_HARMLESS_BYTES, max_ratio * num_read):
                raise TarError(
                    f"{url or 'tar'}: {num_read} bytes of gzip inflate to more than {max_ratio:g} times as many: a "
                    "decompression bomb? If it is meant, give StreamingDataset a larger max_gzip_ratio= (or say "
                    "shard_tools convert --max-gzip-ratio), or unpack the archive first (gunzip)"
                )
            if out:
                yield out
            data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
    if not inflater.eof:
        raise TarError(f"{url or 'tar'}: gzip stream ends early, after {num_bytes} inflated bytes; truncated?")
