"""Read the pages of Ogg (RFC 3533): find where links begin and end, and where to begin decoding a clip.

The granule position of a page counts the samples that its packets complete, except in the last page, where it is the
end of the sound: so the first sample of that page is known only after decoding the page before. libsndfile seeks into
it nevertheless, and returns Vorbis displaced by 96 to 128 samples, or by all samples of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streaming.build.decode.streams.files import WatchedFile
from streaming.build.decode.streams.links import Known, Link
from streaming.types import override

_PAGE_BYTES: Final = 65_307  # the largest page
_STEP_BYTES: Final = 8192  # size of the first search for the next page: most pages have 4,500 bytes
_FIRST_PAGE: Final = re.compile(rb"OggS\x00[\x02\x06]")
_BLOCK: Final = 8192
"""The largest block of Vorbis, in samples; libsndfile reads half of it before a position."""
_OPUS_RATE: Final = 48_000  # of granule positions, whatever the output rate
_CELT: Final = 16
"""First configuration of an Opus packet that is CELT alone (RFC 6716, 3.1). All others use SILK, which predicts from
its own output: in a steady tone at 8 kbit/s, everything after a seek was inverted, however early decoding began."""


@dataclass(frozen=True, slots=True)
class OggPage:
    """A page.

    Attributes:
        at: First byte of the page.
        flags: 1: its first packet continues one of an earlier page; 2: the first, 4: the last page of a stream.
        granule: Granule position; -1: no packet ends in the page.
        serial: Number of the stream.
        sizes: Sizes of the segments: in a packet, all but the last are 255.
    """

    at: int
    flags: int
    granule: int
    serial: bytes
    sizes: bytes

    @property
    def body(self) -> int:
        """First byte of the segments."""
        return self.at + 27 + len(self.sizes)

    @property
    def stop(self) -> int:
        """Byte after the page."""
        return self.body + sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OggLink(Link):
    """A link of Ogg.

    Attributes:
        serial: Stream number of its last page.
        ends: Granule position of its end.
        settled: Granule position of the page before the last; 0: there is only one page.
        is_alone: Whether no pages of other streams lie between its pages.
    """

    serial: bytes
    ends: int
    settled: int
    is_alone: bool

    @override
    def begin(self, stream: WatchedFile, known: Known, first: int, stop: int) -> int:
        if not self.is_alone:
            return 0
        scale = _OPUS_RATE / known.rate if known.codec == "OPUS" else 1
        # Never in the last page, nor in the samples that libsndfile reads before a position.
        behind = known.num_samples - int((self.ends - self.settled) / scale) - _BLOCK
        begin = max(0, min(super(OggLink, self).begin(stream, known, first, stop), behind))
        if known.codec == "OPUS" and begin:
            low, high = (self.ends - int((known.num_samples - sample) * scale) for sample in (begin, stop))
            if self._predicts(stream, low, high):
                return 0
        return begin

    def _predicts(self, stream: WatchedFile, low: int, high: int) -> bool:
        """Return whether a packet that plays between two granule positions uses more than CELT."""
        for page in pages(stream, self._page_before(stream, low), self.stop):
            if page.serial != self.serial:
                continue
            body = stream.peek(page.body, sum(page.sizes))
            at, begins = 0, not page.flags & 1
            for size in page.sizes:
                # skip empty packets; header packets precede all granule positions but 0
                if begins and size and page.granule and body[at] >> 3 < _CELT:
                    return True
                at, begins = at + size, size < 255
            if page.granule >= high:
                return False
        return False

    def _page_before(self, stream: WatchedFile, granule: int) -> int:
        """Return the start of a page that ends shortly before a granule position."""
        low, high = self.start, self.stop
        while high - low > 2 * _PAGE_BYTES:
            middle = (low + high) // 2
            found = next((p for p in pages(stream, _next(stream, middle, high), high) if self._counts(p)), None)
            if found is None or found.granule >= granule:
                high = middle
            else:
                low = found.at
        return low

    def _counts(self, page: OggPage) -> bool:
        return page.granule >= 0 and page.serial == self.serial


def links_of_ogg(stream: WatchedFile) -> list[Link]:
    """Return the links of an Ogg file; each link of a chain has its own stream number.

    Raises:
        ValueError: A link ends without its last page, or holds other codecs.
    """
    head = [*_group(stream, 0)]
    last = _last_pages(stream, 0, stream.num_bytes)
    has_one = not stream.in_memory and last.serial in {page.serial for page in head}
    starts = [0] if has_one else _beginnings(stream)
    stops = [*starts[1:], stream.num_bytes]
    _check_codec(stream, head)
    return [_last_pages(stream, start, stop) for start, stop in zip(starts, stops, strict=True)]


def pages(stream: WatchedFile, at: int, stop: int) -> Iterator[OggPage]:
    """Yield the complete pages from byte ``at`` on, as long as they are contiguous."""
    while at < stop:
        page = _page_at(stream, at)
        if page is None or page.stop > stop:
            return
        yield page
        at = page.stop


def _page_at(stream: WatchedFile, at: int) -> OggPage | None:
    return _parsed(stream.peek(at, 27 + 255), 0, at)


def _parsed(data: bytes, begin: int, at: int) -> OggPage | None:
    """Return the page whose header begins at ``begin`` of ``data`` and at byte ``at`` of its file."""
    head = data[begin : begin + 27]
    if len(head) < 27 or head[:5] != b"OggS\0" or head[5] > 7:
        return None
    sizes = data[begin + 27 : begin + 27 + head[26]]
    granule = int.from_bytes(head[6:14], "little", signed=True)
    return OggPage(at, head[5], granule, head[14:18], sizes) if len(sizes) == head[26] else None


def _group(stream: WatchedFile, at: int) -> Iterator[OggPage]:
    """Yield the first pages of the streams that begin together at byte ``at``."""
    for page in pages(stream, at, stream.num_bytes):
        if not page.flags & 2:
            return
        yield page


def _beginnings(stream: WatchedFile) -> list[int]:
    """Return the starts of all links, by scanning all bytes."""
    starts, behind = [0], 0
    for at in stream.places_of(_FIRST_PAGE, 6):
        page = _page_at(stream, at)
        if page is None or page.stop > stream.num_bytes or page.granule not in (0, -1):
            continue  # bytes of a packet that look like a page
        if at != behind and at:
            starts.append(at)
        behind = page.stop
    return starts


def _next(stream: WatchedFile, at: int, stop: int) -> int:
    """Return the start of the next page."""
    for size in (_STEP_BYTES, 2 * _PAGE_BYTES):
        data = stream.peek(at, min(stop - at, size))
        begin = data.find(b"OggS")
        while begin >= 0:
            page = _parsed(data, begin, at + begin)
            if page is not None and (page.stop >= stop or data[page.stop - at :][:4] in (b"OggS", b"")):
                return page.at
            begin = data.find(b"OggS", begin + 1)
    return stop


def _last_pages(stream: WatchedFile, start: int, stop: int) -> OggLink:
    """Return the link between two bytes, by its last pages.

    Raises:
        ValueError: There is no last page.
    """
    tail_bytes = 2 * _PAGE_BYTES
    while True:
        begin = max(start, stop - tail_bytes)
        last, before = _ends(stream.peek(begin, stop - begin), begin)
        if before is not None or begin == start:
            break
        tail_bytes *= 2
    settled = max(0, before.granule) if before is not None else 0
    is_alone = len([*_group(stream, start)]) == 1
    return OggLink(start=start, stop=stop, serial=last.serial, ends=last.granule, settled=settled, is_alone=is_alone)


def _ends(tail: bytes, at: int) -> tuple[OggPage, OggPage | None]:
    """Return the last page of a stream, and the latest page with a lower granule position, if ``tail`` has it.

    Raises:
        ValueError: There is no last page.
    """
    last: OggPage | None = None
    begin = len(tail)
    while (begin := tail.rfind(b"OggS", 0, begin)) >= 0:
        page = _parsed(tail, begin, at + begin)
        if page is None:
            continue
        if last is None:
            if not page.flags & 4 or page.stop - at > len(tail):
                break
            last = page
        elif page.serial == last.serial and 0 <= page.granule < last.granule:
            return last, page
    if last is None:
        raise ValueError("the Ogg stream ends without its last page: truncated")
    return last, None


def _check_codec(stream: WatchedFile, head: list[OggPage]) -> None:
    """Refuse codecs that libsndfile would refuse without an explanation.

    Raises:
        ValueError: No stream holds Vorbis or Opus.
    """
    kinds = [stream.peek(page.body, 8) for page in head]
    if kinds and not any(kind[:7] == b"\x01vorbis" or kind == b"OpusHead" for kind in kinds):
        raise ValueError(f"the Ogg stream is neither Vorbis nor Opus: its packets begin with {kinds[0]!r}")
