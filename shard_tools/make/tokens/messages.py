"""Read the messages of a conversation, in the published formats, and determine which of them to learn.

Messages are objects with ``role`` and ``content``, or with ``from`` and ``value`` (ShareGPT). Content that would be
lost or garbled is rejected, by name: content that is not text, unknown speakers, weights other than 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from streaming.errors import DataError

Message: TypeAlias = dict[str, object]
"""One message: ``role``, ``content`` (text, a list of parts with ``text``, or None beside tool calls), and more."""

_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
"""Roles by the value of ``from``."""
_CALLS = ("tool_calls", "function_call")
ASSISTANT = "assistant"


class RejectedError(DataError):
    """A record without tokens, or without an exact mask; ``reason`` is the category for counting."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The content of one document of instruction data.

    Attributes:
        messages: The messages, without keys that are null: a table gives every message a key that any message has.
        tools: Tools that the template may describe.
        muted: Numbers of the assistant's messages that carry no loss.
    """

    messages: Sequence[Message]
    tools: object = None
    muted: frozenset[int] = frozenset()

    @property
    def keys(self) -> set[str]:
        """All keys that only a template can use."""
        found = {key for message in self.messages for key in message} - {"role", "content", "weight", "train"}
        return found | ({"tools"} if self.tools else set())


def read_conversation(values: Sequence[Mapping[str, object]], tools: object = None) -> Conversation:
    """Return messages in one format, and those of the assistant without loss (``weight: 0`` or ``train: false``).

    Raises:
        RejectedError: A message cannot be read, or there is none to learn.
    """
    shapes = {"from" in value and "role" not in value for value in values}
    if len(shapes) > 1:
        raise RejectedError("not messages", "some messages have 'role' and 'content', others 'from' and 'value'")
    messages = [_message(number, value) for number, value in enumerate(values)]
    answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not answers:
        raise RejectedError("no assistant message", f"roles are {', '.join(str(one['role']) for one in messages)}")
    muted = frozenset(number for number, message in enumerate(messages) if not _is_learned(number, message))
    if muted.issuperset(answers):
        raise RejectedError("no assistant message", "all messages of the assistant have weight 0 or train false")
    return Conversation(messages=messages, tools=tools, muted=muted.intersection(answers))


def with_joined_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with the parts of each content joined to one text."""
    return [
        {**message, "content": "".join(str(part["text"]) for part in content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _message(number: int, value: Mapping[str, object]) -> Message:
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
    return {**message, "role": role, "content": _content(f"message {number} ({role})", content)}


def _content(what: str, content: object) -> object:
    """Return a text, or parts of text, or None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RejectedError("no text", f"{what} has content of type {type(content).__name__}, expected text")
    parts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RejectedError(
                "no text", f"{what}: part {number} of its content is of type {kind!r}; only parts of type 'text' with "
                "a text become tokens"
            )  # fmt: skip
        others = [key for key, one in part.items() if one is not None and key not in {"type", "text"}]
        if others:
            raise RejectedError("no text", f"{what}: part {number} of its content has also {others[0]!r}")
        parts.append({"type": "text", "text": part["text"]})
    return parts


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
