"""Read the messages of a conversation, in the published formats, and determine which of them to learn.

Messages are objects with ``role`` and ``content``, or with ``from`` and ``value`` (ShareGPT, LLaVA). Content that would
be lost or garbled is rejected, by name: content that is neither text nor a known medium, unknown speakers, weights
other than 0 and 1.

Images and sounds have places in the messages: parts of a content (OpenAI, Hugging Face), or marks in a text
(``<image>``). A place names its content, or takes the next item of a list beside the messages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from streaming.common.arguments import counted
from streaming.errors import DataError

Message: TypeAlias = dict[str, Any]
"""One message: ``role``, ``content`` (text, a list of parts, or None beside tool calls), and more."""

MEDIA: Final = ("image", "audio")
"""What a conversation may hold besides text."""
ASSISTANT: Final = "assistant"
_USER: Final = "user"
_SPEAKERS: Final = {
    "human": _USER, "user": _USER, "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system", "tool": "tool",
}  # fmt: skip
"""Roles by the value of ``from``."""
_CALLS: Final = ("tool_calls", "function_call")
_TYPES: Final = {
    "image": "image", "image_url": "image", "input_image": "image",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
"""The medium of a part, by its type."""
_HOLD: Final = ("url", "path", "base64", "data", "source")
"""Keys of a part that may hold its content, besides the part's type and its medium."""
_INLINE: Final = frozenset({"base64", "data"})
"""Keys of a part whose text is the content itself, in base64."""
_HINTS: Final = frozenset({"type", "index", "text", "detail", "format"})
"""Keys of a part that change neither its content nor its number of tokens."""
UNPLACED: Final = "images or sounds without a place in the messages stand first in the first message of the user"


class RejectedError(DataError):
    """A record without tokens, or without an exact mask; ``reason`` is the category for counting."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumPlace:
    """The place of an image or a sound in a conversation.

    Attributes:
        medium: One of :data:`MEDIA`.
        content: Its path, URL or bytes as the data has them; None: an item of the list beside the messages.
        index: The number of that item; None: the next one.
    """

    medium: str
    content: object = None
    index: int | None = None

    @property
    def part(self) -> dict[str, str]:
        """The part that a template gets. Templates look at its type, or whether it has a key of the medium's name."""
        return {"type": self.medium, self.medium: ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The content of one document of instruction data.

    Attributes:
        messages: The messages, without keys that are null: a table gives every message a key that any message has.
        tools: Tools that the template may describe.
        muted: Numbers of the assistant's messages that carry no loss.
        places: The places of images and sounds, in their order, until their contents are read.
        counts: By medium, the number of tokens that stand for each image or sound, in their order.
        remarks: Unusual things about the conversation.
    """

    messages: Sequence[Message]
    tools: object = None
    muted: frozenset[int] = frozenset()
    places: tuple[MediumPlace, ...] = ()
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def keys(self) -> set[str]:
        """All keys that only a template can use."""
        found = {key for message in self.messages for key in message} - {"role", "content", "weight", "train"}
        return found | ({"tools"} if self.tools else set())


def read_conversation(
    values: Sequence[Mapping[str, object]], tools: object = None, beside: Mapping[str, Sequence[object]] | None = None
) -> Conversation:
    """Return messages in one format, and those of the assistant without loss (``weight: 0`` or ``train: false``).

    Args:
        values: The messages as the data has them.
        tools: Tools beside them.
        beside: By medium, the images or sounds that the record lists beside the messages. Other media are rejected.

    Raises:
        RejectedError: A message cannot be read, there is none to learn, or places and lists of media differ.
    """
    beside = beside or {}
    shapes = {"from" in value and "role" not in value for value in values}
    if len(shapes) > 1:
        raise RejectedError("not messages", "some messages have 'role' and 'content', others 'from' and 'value'")
    messages = [_message(number, value, beside) for number, value in enumerate(values)]
    answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not answers:
        raise RejectedError("no assistant message", f"roles are {', '.join(str(one['role']) for one in messages)}")
    muted = frozenset(number for number, message in enumerate(messages) if not _is_learned(number, message))
    if muted.issuperset(answers):
        raise RejectedError("no assistant message", "all messages of the assistant have weight 0 or train false")
    messages, places, remarks = _placed(messages, beside)
    return Conversation(
        messages=messages, tools=tools, muted=muted.intersection(answers), places=places, remarks=remarks
    )


def with_joined_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with the parts of each content joined to one text."""
    return [
        {**message, "content": "".join(str(part["text"]) for part in content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, each content as a list of parts."""
    return [
        {**message, "content": [_text_part(content)]} if isinstance(content := message.get("content"), str) else message
        for message in messages
    ]


def with_tokens(messages: Sequence[Message], tokens: Mapping[str, str]) -> list[Message]:
    """Return the messages, with the parts of these media replaced by the text of their tokens."""

    def part_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return _text_part(tokens[part["type"]]) if part["type"] in tokens else part

    return [
        {**message, "content": [part_of(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _message(number: int, value: Mapping[str, object], media: Mapping[str, object]) -> Message:
    message: Message = {key: one for key, one in value.items() if one is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if speaker not in _SPEAKERS:
            raise RejectedError(
                "not messages", f"message {number} is from {speaker!r}; expected one of {', '.join(_SPEAKERS)}"
            )
        message = {"role": _SPEAKERS[str(speaker)], "content": message.pop("value", None), **message}
    role = message.get("role")
    if not isinstance(role, str):
        raise RejectedError(
            "not messages", f"message {number} has no role; expected role and content (or from and value), got "
            f"{', '.join(map(str, value)) or 'nothing'}"
        )  # fmt: skip
    content = message.get("content")
    if content is None and not any(message.get(name) for name in _CALLS):
        raise RejectedError(
            "no content", f"message {number} ({role}) has no content, or it is null; that is possible beside tool_calls"
        )
    return {**message, "role": role, "content": _content(f"message {number} ({role})", content, media)}


def _content(what: str, content: object, media: Mapping[str, object]) -> object:
    """Return a text, or parts of text and places of media, or None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RejectedError("no text", f"{what} has content of type {type(content).__name__}, expected text")
    return [_part(f"{what}: part {number} of its content", part, media) for number, part in enumerate(content)]


def _part(what: str, part: object, media: Mapping[str, object]) -> object:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in _TYPES:
        medium = _TYPES[kind]
        if medium not in media:
            raise RejectedError(
                "no text", f"{what} is of type {kind!r}, and the tokenizer has no token for it: name the one that "
                f"stands for it with --{medium}-token"
            )  # fmt: skip
        return _place(what, part, medium)
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str) or kind != "text":
        raise RejectedError(
            "no text", f"{what} is of type {kind!r}; only parts of type 'text' with a text, images and sounds become "
            "tokens"
        )  # fmt: skip
    others = [key for key, one in part.items() if one is not None and key not in {"type", "text"}]
    if others:
        raise RejectedError("no text", f"{what} has also {others[0]!r}")
    return _text_part(part["text"])


def _place(what: str, part: Mapping[str, Any], medium: str) -> MediumPlace:
    """Return the place that a part of a content is."""
    given = {key: one for key, one in part.items() if one not in (None, "") and key not in _HINTS}
    holders = [key for key in dict.fromkeys((part["type"], medium, f"{medium}_url", *_HOLD)) if key in given]
    others = [key for key in given if key not in holders]
    if others or len(holders) > 1:
        raise RejectedError("no text", f"{what} has also {(others or holders[1:])[0]!r}")
    index = part.get("index")
    if index is not None and (isinstance(index, bool) or not isinstance(index, int) or index < 0):
        raise RejectedError("no text", f"{what} has index {index!r}, expected the number of an item")
    if not holders:
        return MediumPlace(medium=medium, index=index)
    (holder,) = holders
    return MediumPlace(medium=medium, content={"data": given[holder]} if holder in _INLINE else given[holder])


def _placed(
    messages: list[Message], beside: Mapping[str, Sequence[object]]
) -> tuple[list[Message], tuple[MediumPlace, ...], tuple[str, ...]]:
    """Return messages with the parts that templates get, all places with their contents, and remarks."""
    if not any(isinstance(part, MediumPlace) for part in _parts(messages)):
        messages = _with_marked(messages, [medium for medium, items in beside.items() if items])
    there = {part.medium for part in _parts(messages) if isinstance(part, MediumPlace)}
    unplaced = [MediumPlace(medium=medium) for medium, items in beside.items() if medium not in there for _ in items]
    if unplaced:
        messages = _with_first(messages, unplaced)
    filled = _filled([part for part in _parts(messages) if isinstance(part, MediumPlace)], beside)
    messages = [
        {**message, "content": [part.part if isinstance(part, MediumPlace) else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]
    return messages, tuple(filled), (UNPLACED,) if unplaced else ()


def _parts(messages: Sequence[Message]) -> Iterator[object]:
    for message in messages:
        content = message.get("content")
        yield from content if isinstance(content, list) else ()


def _with_marked(messages: list[Message], media: Sequence[str]) -> list[Message]:
    """Return the messages, with places where their texts have a mark of these media, such as ``<image>``."""
    if not media:
        return messages
    marks = re.compile(f"<({'|'.join(media)})>")

    def split(text: str) -> list[object]:
        pieces = marks.split(text)  # every second one is the name of a mark
        found = [MediumPlace(medium=one) if number % 2 else _text_part(one) for number, one in enumerate(pieces)]
        return [one for one in found if isinstance(one, MediumPlace) or one["text"]]

    marked = []
    for message in messages:
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        if any(map(marks.search, texts)):
            message = {**message, "content": [one for text in texts for one in split(text)]}  # noqa: PLW2901
        marked.append(message)
    return marked


def _with_first(messages: list[Message], places: Sequence[MediumPlace]) -> list[Message]:
    """Return the messages with places at the beginning of the first one of the user."""
    number = next((number for number, message in enumerate(messages) if message["role"] == _USER), None)
    if number is None:
        raise RejectedError(
            f"{places[0].medium}s differ", f"{counted(len(places), 'item')} beside the messages, which have no place "
            "for them, and no message of the user"
        )  # fmt: skip
    content = messages[number]["content"]
    parts = content if isinstance(content, list) else [_text_part(content)] if content else []
    return [*messages[:number], {**messages[number], "content": [*places, *parts]}, *messages[number + 1 :]]


def _filled(places: Sequence[MediumPlace], beside: Mapping[str, Sequence[object]]) -> list[MediumPlace]:
    """Return the places, each with its content.

    Raises:
        RejectedError: The lists beside the messages do not have one item for each place that names no content.
    """
    for medium, items in beside.items():
        bare = [place for place in places if place.medium == medium and place.content is None]
        numbers = [number if place.index is None else place.index for number, place in enumerate(bare)]
        if {*numbers} != {*range(len(items))}:
            named = f", for the numbers {', '.join(map(str, numbers))}" if numbers != [*range(len(numbers))] else ""
            raise RejectedError(
                f"{medium}s differ", f"the messages have {counted(len(bare), 'place')} for {medium}s beside them"
                f"{named}, and there are {len(items)}"
            )  # fmt: skip
    found = []
    number = Counter[str]()
    for place in places:
        content = place.content
        if content is None:
            content = beside[place.medium][number[place.medium] if place.index is None else place.index]
            number[place.medium] += 1
        found.append(MediumPlace(medium=place.medium, content=content))
    return found


def _is_learned(number: int, message: Message) -> bool:
    """Return whether a message is to be learned if the assistant says it: unless the message denies it.

    Raises:
        RejectedError: The weight is between 0 and 1, or a message of another role demands to be learned.
    """
    said = {name: message[name] for name in ("weight", "train") if name in message}
    for name, value in said.items():
        if value not in (0, 1) or (name == "train" and not isinstance(value, bool)):
            expected = "true or false" if name == "train" else "0 or 1, since a mask has no other values"
            raise RejectedError("weight", f"message {number} has {name} {value!r}; expected {expected}")
        if value and message["role"] != ASSISTANT:
            raise RejectedError(
                "weight", f"message {number} ({message['role']}) has {name} {value!r}, but only what the assistant "
                "says is learned; leave it out there"
            )  # fmt: skip
    return all(said.values())
