"""Read the images and sounds of conversations, and count the tokens that stand for each.

Bytes stay as they are: headers are looked at, nothing is decoded. A document with one image has it in the field
``jpg``, one with several in ``0.jpg``, ``1.jpg``, …, in the order of their places; sounds have the extension of their
type.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from shard_tools.make.convert.base.annotated import IMAGE_EXTENSIONS
from shard_tools.make.convert.base.records import Record
from shard_tools.make.tokens.beside import FilesBeside, of_base64
from shard_tools.make.tokens.messages import MEDIA, Conversation, MediumPlace, RejectedError
from shard_tools.make.tokens.tokenizer import TokenizerFile, open_tokenizer, token_name
from shard_tools.make.write.filetypes import ONE_FIELD, file_type, plain_extension
from shard_tools.running.functions import blame, imported
from streaming.build.decode.images import stored_size
from streaming.build.decode.sound import measured
from streaming.common.arguments import did_you_mean
from streaming.common.identities import identity_of
from streaming.errors import ConfigError
from streaming.storage import redact

IMAGE_FIELD: Final = "jpg"
COLUMNS: Final = {"image": ("images", "image_tokens"), "audio": ("sounds", "audio_tokens")}
"""Columns of the number of a document's images (or sounds), and of the tokens that stand for them, by medium."""
_BESIDE: Final = {"image": ("images", "image"), "audio": ("audios", "audio")}
"""Where a record lists what has a place in its messages, by medium."""
_USUAL: Final = {
    "image": ("<|image_pad|>", "<image>", "<|image|>", "<image_pad>", "<IMG_CONTEXT>", "<image_soft_token>", "[IMG]"),
    "audio": ("<|AUDIO|>", "<|audio_pad|>", "<audio>", "<|audio|>", "<audio_soft_token>", "[AUDIO]"),
}
"""Names of the tokens that stand for images and sounds in published tokenizers."""
_SOUNDS: Final = frozenset({"wav", "flac", "mp3", "ogg"})
_NONE: Final = "none"
_MOST_TOKENS: Final = 1 << 20
_UNREAD: Final = "beside its messages the record has images or sounds for which the tokenizer has no token: left out"
_OTHER_TYPE: Final = f"images that are no JPEG: {ONE_FIELD % IMAGE_FIELD}"
_NUMBERED = re.compile(r"(?:.*\.)?(\d+)\.[^.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """The token that stands for images, or for sounds.

    Attributes:
        medium: ``"image"`` or ``"audio"``.
        token: Its name, as templates write it.
        id: Its id.
        tokens: How often it stands for one image or sound: a number, or ``module:function``.
    """

    medium: str
    token: str
    id: int
    tokens: str = "1"

    def count(self) -> Callable[[bytes], int]:
        """Return the function that counts the tokens of an image or a sound.

        Raises:
            ConfigError: It is neither a number above 0 nor a function.
        """
        option = f"--{self.medium}-tokens"
        if ":" in self.tokens:
            return _CountedBy(self.medium, self.tokens, imported(self.tokens, option))
        if not self.tokens.isdecimal() or not 1 <= int(self.tokens) <= _MOST_TOKENS:
            of = "(width, height)" if self.medium == "image" else "(seconds)"
            raise ConfigError(
                f"{option} {self.tokens!r}: expected a number from 1 to {_MOST_TOKENS:,}, or module:function, a "
                f"function of {of}"
            )
        return _Constant(self.medium, int(self.tokens))

    def identity(self) -> dict[str, object]:
        """Return what the tokens depend on, JSON-able."""
        found: dict[str, object] = {"token": self.token, "id": self.id, "tokens": self.tokens}
        if ":" in self.tokens:
            found["function"] = identity_of(imported(self.tokens, f"--{self.medium}-tokens"))
        return found


def find_placeholder(
    medium: str, given: str | None, tokens: str | None, file: TokenizerFile, config: Mapping[str, object]
) -> Placeholder | None:
    """Return the token that stands for a medium; None: there is none.

    Args:
        medium: The medium.
        given: A name, an id, ``"none"``, or None: the one that ``tokenizer_config.json`` names, or of a usual name.
        tokens: How often it stands for one image or sound; None: once.
        file: The tokenizer.
        config: The content of ``tokenizer_config.json``.

    Raises:
        ConfigError: There is no such token, or the tokenizer does not find it in a text.
    """
    option, tokenizer = f"--{medium}-token", open_tokenizer(file)
    name = given
    if given is None:
        name = _named(medium, config)
        name = name or next((one for one in _USUAL[medium] if tokenizer.id_of(one) is not None), None)
    if name is None or name == _NONE:
        if tokens is not None:
            raise ConfigError(
                f"{option}s {tokens}: the tokenizer has no token that is usual for it; name the token with {option}"
            )
        return None
    found = tokenizer.id_of(name)
    if found is None and name.isdecimal() and int(name) < tokenizer.vocab_size:
        found = int(name)
        name = tokenizer.pieces(np.array([found], np.uint32))[0]
    if found is None:
        hint = did_you_mean(name, _USUAL[medium], cutoff=0.3)
        raise ConfigError(
            f"{option} {name!r}: no such token in {redact(file.url)}{hint}; give a name, an id, or 'none'"
        )
    if tokenizer.encode([f"a{name}b"])[0].tolist().count(found) != 1:
        raise ConfigError(
            f"{option} {name!r}: the tokenizer does not find it in a text, as it finds special tokens; add it to the "
            "special tokens of tokenizer.json, or name another one"
        )
    made = Placeholder(medium=medium, token=name, id=found, tokens="1" if tokens is None else tokens)
    made.count()
    return made


def _named(medium: str, config: Mapping[str, object]) -> str | None:
    """Return the token that ``tokenizer_config.json`` names."""
    places = [config, config.get("extra_special_tokens"), config.get("model_specific_special_tokens")]
    named = (token_name(dict(one), f"{medium}_token", None) for one in places if isinstance(one, Mapping))
    return next((one for one in named if one), None)


@dataclass(frozen=True, slots=True)
class _Constant:
    """The same number of tokens for each."""

    medium: str
    number: int

    def __call__(self, data: bytes) -> int:
        if self.medium == "image":
            _size_of(data)
        return self.number


@dataclass(frozen=True, slots=True)
class _CountedBy:
    """A number of tokens that a user's function gives, by width and height of the upright image, or by seconds."""

    medium: str
    name: str
    function: Callable[..., Any]

    def __call__(self, data: bytes) -> int:
        given = _size_of(data) if self.medium == "image" else (_seconds_of(data),)
        try:
            found = _checked(operator.index(self.function(*given)))
        except Exception as error:
            blame(error, f"{self.name} failed on {', '.join(map(str, given))}")
            raise
        return found


def _checked(number: int) -> int:
    if not 1 <= number <= _MOST_TOKENS:
        raise ValueError(f"it returned {number}, expected a number from 1 to {_MOST_TOKENS:,}")
    return number


def _size_of(data: bytes) -> tuple[int, int]:
    """Return width and height of the upright image, by its header."""
    try:
        height, width, _ = stored_size(data)
    except Exception as error:  # Pillow raises any
        raise RejectedError("damaged image", f"{len(data):,} bytes that are no image ({error})") from error
    return width, height


def _seconds_of(data: bytes) -> float:
    try:
        frames, rate, _ = measured(data)
    except ConfigError:
        raise
    except Exception as error:  # libsndfile raises any
        raise RejectedError("damaged sound", f"{len(data):,} bytes that are no sound ({error})") from error
    return frames / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a document holds besides tokens.

    Attributes:
        fields: Its images and sounds, by field.
        columns: Their numbers, and those of their tokens.
        remarks: Unusual things.
    """

    fields: Mapping[str, bytes]
    columns: Mapping[str, int]
    remarks: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all fields."""
        return sum(map(len, self.fields.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReader:
    """Find what conversations show and play. Thread-safe.

    Attributes:
        placeholders: The token of each medium that has one.
        counts: Counts the tokens of an image or a sound, by medium.
        files: The files that records name.
    """

    placeholders: tuple[Placeholder, ...]
    counts: Mapping[str, Callable[[bytes], int]]
    files: FilesBeside

    @classmethod
    def of(cls, placeholders: tuple[Placeholder, ...], files: FilesBeside) -> MediaReader:
        """Return the reader for these tokens."""
        return cls(placeholders=placeholders, counts={one.medium: one.count() for one in placeholders}, files=files)

    def beside(self, record: Record) -> dict[str, Sequence[object]]:
        """Return what a record lists beside its messages, by medium, of all media that become tokens.

        A sample of a tar has its own fields.
        """
        found: dict[str, Sequence[object]] = {}
        for medium in (one.medium for one in self.placeholders):
            found[medium] = listed(record, medium) if record.metadata else _fields_of(record, medium)
        return found

    def held(self, conversation: Conversation, record: Record) -> tuple[Conversation, Held]:
        """Return a conversation with the number of tokens of each image and sound, and their bytes.

        Raises:
            RejectedError: One is missing or damaged.
            ConfigError: The user's function returned no number.
        """
        contents = [(place, self._content(place, record)) for place in conversation.places]
        counts: dict[str, tuple[int, ...]] = {}
        fields: dict[str, bytes] = {}
        columns: dict[str, int] = {}
        remarks = list(conversation.remarks)
        for one in self.placeholders:
            mine = [data for place, data in contents if place.medium == one.medium]
            counts[one.medium] = tuple(map(self.counts[one.medium], mine))
            fields |= _named_fields(one.medium, mine)
            columns |= dict(zip(COLUMNS[one.medium], (len(mine), sum(counts[one.medium])), strict=True))
            if one.medium == "image" and any(plain_extension(file_type(data)) != IMAGE_FIELD for data in mine):
                remarks.append(_OTHER_TYPE)
        with_tokens = {one.medium for one in self.placeholders}
        if any(listed(record, medium) for medium in MEDIA if medium not in with_tokens):
            remarks.append(_UNREAD)
        held = Held(fields=fields, columns=columns, remarks=tuple(remarks))
        return replace(conversation, places=(), counts=counts, remarks=()), held

    def _content(self, place: MediumPlace, record: Record) -> bytes:
        content, is_inline = place.content, False
        for _ in range(3):  # {"image_url": {"url": …}}, {"source": {"data": …}}
            if not isinstance(content, Mapping):
                break
            is_inline = content.get("data") is not None
            names = ("bytes", "data", "url", "path")
            content = next((content[name] for name in names if content.get(name) is not None), None)
        if isinstance(content, (bytes, bytearray, memoryview)):
            return bytes(content)
        if not isinstance(content, str):
            raise RejectedError(
                f"no {place.medium}", f"expected a path, a data URL or bytes, got a {type(content).__name__}"
            )
        if is_inline and content[:5].lower() != "data:":
            return of_base64(content)
        if content in record.fields:
            return record.fields[content]
        return self.files.read(content, record.origin)


def listed(record: Record, medium: str) -> Sequence[object]:
    """Return the images or sounds that a row lists beside its messages."""
    value = next((record.metadata[name] for name in _BESIDE[medium] if record.metadata.get(name)), None)
    if isinstance(value, str) and value.startswith("["):  # of a table of texts
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return (value,)
    return value if isinstance(value, list) else () if value is None else (value,)


def _fields_of(record: Record, medium: str) -> Sequence[object]:
    """Return the fields of a tar's sample that are of a medium, in the order of their numbers."""
    taken = IMAGE_EXTENSIONS if medium == "image" else _SOUNDS
    return in_order(name for name in record.fields if name.rpartition(".")[2].lower() in taken)


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names of fields by their numbers: ``2.jpg`` before ``10.jpg``."""

    def place(name: str) -> tuple[int, str]:
        found = _NUMBERED.fullmatch(name)
        return (-1 if found is None else int(found[1]), name)

    return sorted(names, key=place)


def _named_fields(medium: str, contents: Sequence[bytes]) -> dict[str, bytes]:
    """Return the fields of a document's images or sounds.

    Raises:
        RejectedError: One is of no known type.
    """
    extensions = [IMAGE_FIELD if medium == "image" else _sound_type(data) for data in contents]
    if len(contents) == 1:
        return {extensions[0]: contents[0]}
    return {f"{number}.{one}": data for number, (one, data) in enumerate(zip(extensions, contents, strict=True))}


def _sound_type(data: bytes) -> str:
    found = file_type(data)
    if found not in _SOUNDS:
        raise RejectedError("damaged sound", f"{len(data):,} bytes that are none of {', '.join(sorted(_SOUNDS))}")
    return found
