"""Find the turns of a conversation in JSON: the shapes of chat data that ``convert --tokenizer`` takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_LISTS: Final = ("messages", "conversations", "conversation", "turns")
_ROLES: Final = ("role", "from", "speaker")
_TEXTS: Final = ("content", "value", "text")
_NAMES: Final = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
_MEDIA: Final = {"image": "image", "image_url": "image", "input_image": "image", "audio": "audio",
                 "audio_url": "audio", "input_audio": "audio", "video": "video", "video_url": "video"}  # fmt: skip
"""Forms of fields by the types of parts that they belong to."""
_MARK: Final = re.compile("<(image|audio|video)>")
_MOST_TURNS: Final = 200
_BEGUN: Final = re.compile(rf'(?:^\s*|"(?:{"|".join(_LISTS)})"\s*:\s*)\[\s*(?=\{{)')
_BETWEEN: Final = re.compile(r"[\s,]*")
_LONGEST_ESCAPE: Final = 13  # of a character in two parts, \ud83d\ude00, and one more


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPart:
    """A part of a turn: a text, or something else.

    Attributes:
        text: The text; of another part, its type.
        medium: ``image``, ``audio`` or ``video``, which a field of the sample may hold; "": none.
        is_text: Whether it is a text.
        field: The field that holds it; "": none, or unknown.
    """

    text: str
    medium: str = ""
    is_text: bool = True
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One turn of a conversation.

    Attributes:
        role: Who speaks, such as ``user``.
        parts: Texts, and images, sounds and videos, in the order of the turn.
    """

    role: str
    parts: tuple[TurnPart, ...] = ()


def turns_in(content: object) -> tuple[ChatTurn, ...]:
    """Return the turns of a conversation, at most 200; (): the JSON is none.

    Args:
        content: Decoded JSON: a list of turns, or an object with such a list under a usual name.
    """
    if isinstance(content, Mapping):
        content = next((content[name] for name in _LISTS if isinstance(content.get(name), list)), None)
    if not isinstance(content, list) or not content:
        return ()
    found = [_turn(one) for one in content[:_MOST_TURNS]]
    return tuple(one for one in found if one is not None) if all(found) else ()


def turns_begun(text: str) -> tuple[ChatTurn, ...]:
    """Return the turns in the beginning of JSON that is cut off, with what there is of the last; (): it has none."""
    begun = _BEGUN.search(text)
    if begun is None:
        return ()
    found, at, decoder = list[ChatTurn](), begun.end(), json.JSONDecoder()
    while len(found) < _MOST_TURNS:
        try:
            one, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            last = _cut_turn(text[at:])
            return (*found, last) if last is not None else tuple(found)
        turn = _turn(one)
        if turn is None:
            return ()
        found.append(turn)
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    return tuple(found)


def _cut_turn(text: str) -> ChatTurn | None:
    """Return a turn whose text is cut off, perhaps before its role; None: it is cut off elsewhere."""
    for less in range(_LONGEST_ESCAPE):
        try:
            found = json.loads(text[: len(text) - less] + '"}')
        except (ValueError, RecursionError):
            continue
        last = next(reversed(found))
        if isinstance(found[last], str):  # half a character says nothing
            found[last] = found[last].encode("utf-8", "ignore").decode()
        has_role = any(name in found for name in _ROLES if name != last)
        return _turn(found if has_role else {**found, "role": "…"})
    return None


def with_marks(turns: Sequence[ChatTurn]) -> tuple[ChatTurn, ...]:
    """Return the turns, with a part for each mark in their texts, such as ``<image>``."""

    def split(part: TurnPart) -> Sequence[TurnPart]:
        if not part.is_text:
            return (part,)
        pieces = _MARK.split(part.text)  # every second one is the name of a mark
        parts = (
            TurnPart(text=one, medium=one, is_text=False) if number % 2 else TurnPart(text=one)
            for number, one in enumerate(pieces)
        )
        return [one for one in parts if one.text]

    return tuple(
        ChatTurn(role=turn.role, parts=tuple(one for part in turn.parts for one in split(part))) for turn in turns
    )


def _turn(one: object) -> ChatTurn | None:
    if not isinstance(one, Mapping):
        return None
    role = next((one[name] for name in _ROLES if isinstance(one.get(name), str)), None)
    text = next((one[name] for name in _TEXTS if isinstance(one.get(name), (str, list))), None)
    if role is None or text is None:
        return None
    if isinstance(text, str):
        return ChatTurn(role=_NAMES.get(role, role), parts=(TurnPart(text=text),))
    return _of_parts(_NAMES.get(role, role), text)


def _of_parts(role: str, parts: Sequence[Any]) -> ChatTurn | None:
    """Return a turn of parts: texts, and others by their type."""
    found = []
    for part in parts:
        if isinstance(part, str):
            found.append(TurnPart(text=part))
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            found.append(TurnPart(text=part["text"]))
        elif isinstance(part, Mapping):
            kind = str(part.get("type", "part"))
            found.append(TurnPart(text=kind[:40], medium=_MEDIA.get(kind, ""), is_text=False))
        else:
            return None
    return ChatTurn(role=role, parts=tuple(found))
