"""Samples from a tar that comes as a stream: shards without an index, and ``.tar.gz``."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from streaming.errors import TarError
from streaming.tar.blocks import BytesLike
from streaming.tar.group import ChunkLayout
from streaming.tar.scanner import TarScanner

MAX_SAMPLE_BYTES = 4 << 30
"""Largest sample that is gathered from a stream; the bound on memory against damage and decompression bombs."""
_GZIP_MAGIC = b"\x1f\x8b"
_INFLATED_BYTES = 4 << 20
MAX_GZIP_RATIO = 200.0
"""Text inflates to 3 to 20 times its size; 1,032 times is what deflate can do at most, and bombs do."""
_HARMLESS_BYTES = 64 << 20
"""Inflated, whatever the ratio."""


def iter_samples(
    pieces: Iterable[BytesLike],
    url: str = "",
    *,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    max_gzip_ratio: float = MAX_GZIP_RATIO,
    repeats: bool = False,
    larger: str = "cut it into smaller samples, or read the archive by other means",
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key and fields of each sample of a tar that comes in ``pieces``, in the order of the archive.

    A gzip stream is recognised by its first bytes and inflated on the way. A sample is yielded as soon as the next
    one begins; memory is that of one sample and two pieces. Pieces are not kept. Samples before a damaged place are
    yielded before the error is raised.

    Args:
        pieces: The archive's bytes, cut anywhere.
        url: The shard, for messages.
        max_sample_bytes: Samples beyond this raise.
        max_gzip_ratio: A gzip stream that inflates to more than so many times its size raises, from 64 MiB on.
        repeats: As :class:`TarScanner` has it.
        larger: What to do about a sample that is too large, for its message.

    Raises:
        TarError: For a damaged or truncated archive, or a sample beyond ``max_sample_bytes``.
        DuplicateKeyError: If a sample holds one field twice, unless ``repeats``.
    """
    scanner = TarScanner(url, verify_headers=True, repeats=repeats)
    held = _Held()
    for piece in inflated(pieces, url, max_gzip_ratio=max_gzip_ratio):
        held.add(piece)
        layout = scanner.feed(piece)
        yield from held.samples(layout)
        held.drop_before(scanner.record_start)
        if held.num_bytes > max_sample_bytes:
            raise TarError(
                f"{url or 'tar'}, byte {scanner.record_start}: a sample of more than {max_sample_bytes} bytes; {larger}"
            )
    yield from held.samples(scanner.finish())


class _Held:
    """The bytes of the stream from ``start`` on."""

    def __init__(self) -> None:
        self.start = 0
        self.num_bytes = 0
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.num_bytes += len(piece)

    def _joined(self) -> bytes:
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def samples(self, layout: ChunkLayout) -> Iterator[tuple[str, dict[str, bytes]]]:
        if not layout.keys:
            return
        whole = self._joined()
        starts, sizes = (layout.starts - self.start).tolist(), layout.sizes.tolist()
        for key, row_starts, row_sizes in zip(layout.keys, starts, sizes, strict=True):
            places = zip(layout.fields, row_starts, row_sizes, strict=True)
            yield key, {field: whole[at : at + size] for field, at, size in places if at >= 0}

    def drop_before(self, offset: int) -> None:
        """Forget the bytes before ``offset``."""
        drop = offset - self.start
        if drop > 0:
            self._pieces = [self._joined()[drop:]]
            self.num_bytes -= drop
            self.start = offset


def inflated(pieces: Iterable[BytesLike], url: str = "", *, max_gzip_ratio: float = MAX_GZIP_RATIO) -> Iterator[bytes]:
    """``pieces`` as bytes; inflated, in bounded pieces, if they begin as gzip does (several members may follow).

    Raises:
        TarError: If the gzip stream is damaged, truncated, or inflates to more than it may.
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
