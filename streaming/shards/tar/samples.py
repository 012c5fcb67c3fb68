"""Read samples from a tar that arrives as a stream: shards without an index, and ``.tar.gz``."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from streaming.common.inflate import GZIP_MAGIC, MAX_GZIP_RATIO, GzipError, gunzipped
from streaming.errors import TarError
from streaming.shards.tar.blocks import BytesLike
from streaming.shards.tar.group import ChunkLayout
from streaming.shards.tar.scanner import TarScanner

MAX_SAMPLE_BYTES = 4 << 30
"""Size limit of a sample that is gathered from a stream; bounds memory against damage and decompression bombs."""
_LARGER_RATIO = (
    "give StreamingDataset a larger max_gzip_ratio= (or say shard_tools convert --max-gzip-ratio), or unpack the "
    "archive first (gunzip)"
)


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
        larger: Cure for a sample that is too large, for its message.

    Raises:
        TarError: A damaged or truncated archive, or a sample larger than ``max_sample_bytes``.
        DuplicateKeyError: A sample has a field twice, unless ``repeats``.
    """
    scanner = TarScanner(url, repeats=repeats)
    held = _Held()
    for piece in inflated(pieces, url, max_gzip_ratio=max_gzip_ratio):
        if not scanner.ended:  # zeros that follow belong to no sample, whatever their number
            held.add(piece)
        layout = scanner.feed(piece)
        if left_out is not None:
            for name in scanner.passed_over:
                left_out(name)
        del piece  # so that fields cut out of it can free it
        yield from held.samples(layout)
        held.drop_before(scanner.record_start)
        if min(held.stop, scanner.settled) - scanner.record_start > max_sample_bytes:
            raise TarError(
                f"{url or 'tar'}, byte {scanner.record_start}: a sample of more than {max_sample_bytes} bytes; {larger}"
            )
    yield from held.samples(scanner.finish())


class _Held:
    """Pieces of the stream from ``start`` to ``stop``. They are freed while a large field is assembled from them."""

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
        """Return the bytes of a field. Drop the bytes before ``stop`` piece by piece."""
        out = io.BytesIO()
        while start < stop:
            self.drop_before(start)
            size = min(self.start + len(self._pieces[0]), stop) - start
            out.write(memoryview(self._pieces[0])[start - self.start : start - self.start + size])
            start += size
        return out.getvalue()  # no copy: nothing else refers to it

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
        if len(head) >= len(GZIP_MAGIC):
            break
    if head.startswith(GZIP_MAGIC):
        yield from _gunzip(_chain(head, stream), url, max_gzip_ratio)
    else:
        yield from _chain(head, stream)


def _chain(head: bytes, stream: Iterator[BytesLike]) -> Iterator[bytes]:
    yield head
    for piece in stream:
        yield bytes(piece)


def _gunzip(pieces: Iterable[bytes], url: str, max_ratio: float) -> Iterator[bytes]:
    try:
        yield from gunzipped(pieces, max_ratio, _LARGER_RATIO)
    except GzipError as error:
        raise TarError(f"{url or 'tar'}: {error}") from error
