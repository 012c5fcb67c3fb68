"""Send the bytes of values: pictures from a worker, sound and video by ranges, other kinds as text or as a file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from shard_tools.look.show.base.page import Content, Query
from shard_tools.look.show.base.samples import SamplePlace, SampleSet
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.decoding.workers import Decoded, DecodingWorkers
from shard_tools.look.stats.kinds import kind_of
from streaming.common.arguments import unpacked_name
from streaming.errors import ConfigError, NotFoundError

ASKS = ("source", "number", "field", "view")
PIXELS: Final = {"small": 384, "large": 1600, "strip": 1600}
_DECODED: Final = {"image": "image", "tensor": "tensor", "audio": "audio", "video": "video"}
_PLAYED: Final = {
    "wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg", "opus": "audio/ogg",
    "m4a": "audio/mp4", "aac": "audio/aac", "mp4": "video/mp4", "m4v": "video/mp4", "webm": "video/webm",
    "mov": "video/quicktime", "mkv": "video/x-matroska", "avi": "video/x-msvideo", "mpg": "video/mpeg",
    "mpeg": "video/mpeg",
}  # fmt: skip
"""Types that browsers play, none of which can hold a program."""
_TEXTS: Final = ("text", "json", "class", "number")
_PIECE_BYTES = 1 << 20
_PICTURE_SECONDS = 600


def value(subject: Subject, query: Query) -> Content:
    """Return the bytes of a value, or a picture of it.

    Raises:
        NotFoundError: There is no such sample, or it has no such field.
        DecodeError: The value has no picture.
        ConfigError: A parameter is missing or invalid.
    """
    within = subject.set_of(query.text("source"))
    number, name = query.some_number("number"), query.text("field")
    if number is None or not name:
        raise ConfigError("/value: expected the number of a sample and a field of it")
    place = within.place(number)
    located = within.locate(place)
    if name not in located.fields:
        raise NotFoundError(f"field: the sample has no field {name[:80]!r}; it has {', '.join(located.fields)}")
    start, stop = located.fields[name]
    view = query.choice("view", "raw", "small", "large", "strip")
    if view != "raw":
        if view == "strip" and kind_of(name) != "video":
            raise NotFoundError(f"view=strip: the field {name!r} is no video; view=small is a picture of it")
        found = decoded(subject, within, place, name, (start, stop), PIXELS[view], is_strip=view == "strip")
        if not found.picture:
            raise NotFoundError(f"view: there is no picture of the field {name!r}; view=raw has its bytes")
        return Content(
            media_type=found.media_type, num_bytes=len(found.picture), seconds=_PICTURE_SECONDS,
            read=lambda first, last: iter((found.picture[first:last],)),
        )  # fmt: skip
    media_type, file_name = _type_of(name, located.key)
    return Content(
        media_type=media_type, num_bytes=stop - start, read=partial(_pieces, within, place.shard, start),
        file_name=file_name,
    )  # fmt: skip


def _type_of(name: str, key: str) -> tuple[str, str]:
    """Return the media type of a field's bytes, and the name to save them under; "": they are displayed."""
    ending, kind = name.lower().rpartition(".")[2], kind_of(name)
    if ending in _PLAYED:
        return _PLAYED[ending], ""
    if kind in _TEXTS and unpacked_name(name) is None:
        return "text/plain; charset=utf-8", ""
    return "application/octet-stream", f"{key.rpartition('/')[2][:80]}.{name}"


def _pieces(within: SampleSet, shard: int, begin: int, first: int, last: int) -> Iterator[bytes]:
    """Yield bytes of a shard, read piece by piece as the consumer takes them."""
    source = within.source
    for start in range(begin + first, begin + last, _PIECE_BYTES):
        yield bytes(source.storage.read(source.urls[shard], start, min(start + _PIECE_BYTES, begin + last)))


def decoded(
    subject: Subject, within: SampleSet, place: SamplePlace, name: str, span: tuple[int, int], pixels: int, *,
    is_strip: bool = False,
) -> Decoded:  # fmt: skip
    """Return a picture of a value and facts about it, from a worker or from the cache; or frames of a video.

    Raises:
        DecodeError: The value is damaged, too large, or of a kind that is not decoded.
    """
    kind = "strip" if is_strip else _DECODED.get(kind_of(name))
    if kind is None:
        raise NotFoundError(
            f"view: there are pictures of images, arrays, sounds and videos, not of the field {name!r}; view=raw has it"
        )
    url = within.source.urls[place.shard]
    return workers_of(subject).known(
        (url, *span), kind, pixels, span[1] - span[0], lambda: within.source.storage.read(url, *span)
    )


def workers_of(subject: Subject) -> DecodingWorkers:
    """Return the processes that decode for a subject."""
    return subject.keep("workers", DecodingWorkers)
