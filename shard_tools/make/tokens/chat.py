"""Turn conversations into text by a chat template, and find the assistant's words in it.

The loss mask is found in one of two ways, depending on the template. ``{% generation %}`` … ``{% endgeneration %}``
marks the assistant's words. A template without these tags is rendered again for every answer: the text of all earlier
messages, with the generation prompt, precedes the answer, and the text with the answer shows where it ends. This
requires that each text begins with the previous one. If a template rewrites earlier text, for example by dropping old
reasoning, the conversation is rejected, by name.

The text is split where the mask changes, and each piece is encoded by itself, so no token belongs to both sides. At
these borders ids may differ from those of the whole text, unless a special token is there (as in usual templates).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from shard_tools.make.tokens.messages import (
    ASSISTANT,
    MEDIA,
    Conversation,
    Message,
    RejectedError,
    with_joined_parts,
    with_parts,
    with_tokens,
)
from shard_tools.running.templates import Template, jinja
from streaming.errors import ConfigError

Pieces: TypeAlias = list[tuple[str, bool]]
"""The text of a conversation in pieces, each with a flag whether the assistant says it."""

_START, _STOP = "\ufdd0", "\ufdd1"  # noncharacters, which texts do not contain
_OPEN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_PART = re.compile(r"""\.text\b|\[\s*['"]text['"]\s*\]""")  # occurs only in templates that read parts of contents
_PLACED: Final = {medium: re.compile(rf"""['"]{medium}(?:_url)?['"]""") for medium in MEDIA}
"""Occurs in templates that place such parts themselves, by medium."""
_TAKES_TEXT = re.compile(r"\bis\s+(?:not\s+)?(?:string|mapping|iterable|sequence)\b")  # contents of both kinds
_CLOSE = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A chat template in the form of Hugging Face's tokenizers: Jinja, in a sandbox without side effects.

    It is the user's file, like code. It receives ``messages``, ``tools``, ``add_generation_prompt``, ``bos_token``,
    ``eos_token`` and ``raise_exception``, but no clock, so the same conversation gives the same text.

    Attributes:
        source: The template.
        bos_token: Name of the beginning token.
        eos_token: Name of the end token.
        tokens: The medium and the name of each token that stands for images or sounds.
    """

    source: str
    bos_token: str
    eos_token: str
    tokens: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Compile the template, to find errors in it.

        Raises:
            ConfigError: It is not a template, or Jinja is not installed.
        """
        _compiled(self.source)

    def pieces(self, conversation: Conversation) -> Pieces:
        """Return the text of a conversation, split where the assistant begins and ends.

        Raises:
            RejectedError: The template rejects it, or no exact mask is possible.
        """
        conversation = replace(conversation, messages=self._as_read(conversation.messages))
        whole = self._render(conversation, conversation.messages)
        if _OPEN.search(self.source):
            return _marked(self._without_marks(conversation, whole))
        pieces: Pieces = []
        done = 0
        for number, message in enumerate(conversation.messages):
            if message["role"] != ASSISTANT:
                continue
            begin, end = self._span(conversation, number, whole, prompt=True)
            if begin < done:
                raise self._differ(number)
            pieces += [(whole[done:begin], False), (whole[begin:end], number not in conversation.muted)]
            done = end
        return [*pieces, (whole[done:], False)]

    def _as_read(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages in the form that the template reads: parts or texts, and places of media or their tokens."""
        reads_parts = bool(_PART.search(self.source))
        placed = [medium for medium, words in _PLACED.items() if reads_parts and words.search(self.source)]
        messages = with_tokens(messages, {medium: token for medium, token in self.tokens if medium not in placed})
        if not reads_parts:
            return with_joined_parts(messages)
        return with_parts(messages) if placed and not _TAKES_TEXT.search(self.source) else messages

    def unused(self, keys: Iterable[str]) -> list[str]:
        """Return the keys (of messages, or ``tools``) that are lost because the template does not mention them."""
        return sorted(key for key in keys if not re.search(rf"\b{re.escape(key)}\b", self.source))

    def _without_marks(self, conversation: Conversation, whole: str) -> str:
        """Return the text without the marks of messages that carry no loss."""
        for number in sorted(conversation.muted, reverse=True):  # in this order, text before a message does not change
            begin, end = self._span(conversation, number, whole)
            said = "".join(text for text, _ in _marked(whole[begin:end]))
            whole = whole[:begin] + said + whole[end:]
        return whole

    def _span(self, conversation: Conversation, number: int, whole: str, *, prompt: bool = False) -> tuple[int, int]:
        """Return the range of a message in the whole text: it starts at the end of the previous messages' text."""
        before = self._render(conversation, conversation.messages[:number], prompt=prompt)
        after = self._render(conversation, conversation.messages[: number + 1])
        if not (after.startswith(before) and whole.startswith(after)):
            raise self._differ(number)
        return len(before), len(after)

    def _differ(self, number: int) -> RejectedError:
        cure = "put {% generation %} around what the assistant says in the template"
        if _OPEN.search(self.source):
            cure = "no weight of 0 (train: false) is possible with this template: it must not rewrite messages"
        return RejectedError(
            "prefixes differ",
            f"the template renders messages up to {number} differently when message {number} (or a later one) "
            f"follows; {cure}",
        )

    def _render(self, conversation: Conversation, messages: Sequence[Message], *, prompt: bool = False) -> str:
        try:
            return _compiled(self.source).render(
                messages=messages,
                tools=conversation.tools,
                add_generation_prompt=prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except Exception as error:  # a user's template may raise anything
            raise RejectedError("template", f"{type(error).__name__}: {error}") from error


def _marked(text: str) -> Pieces:
    """Split a text at the marks that replace ``{% generation %}``."""
    first, *rest = text.split(_START)
    pieces: Pieces = []
    for part in (f"{_STOP}{first}", *rest):
        said, stop, other = part.partition(_STOP)
        if not stop or _STOP in other:
            raise RejectedError("template", "{% generation %} blocks are nested, or a message holds U+FDD0 or U+FDD1")
        pieces += [(said, True), (other, False)]
    return pieces[1:]


@functools.lru_cache(maxsize=2)
def _compiled(source: str) -> Template:
    jinja2 = jinja("--messages-field", "text")

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def written(value: object) -> object:
        if value is None:
            raise jinja2.TemplateError("it would write None, for a content or other value that is null")
        return value

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=written
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = _to_json
    # Two blocks replace each tag, so that Jinja trims the same text before and after it.
    marked = _OPEN.sub(rf"{{%\1 if true %}}{{{{ '{_START}' }}}}{{% if true \2%}}", source)
    marked = _CLOSE.sub(rf"{{%\1 endif %}}{{{{ '{_STOP}' }}}}{{% endif \2%}}", marked)
    try:
        compiled: Template = environment.from_string(marked)
    except jinja2.TemplateError as error:
        raise ConfigError(f"--chat-template: not a template of Jinja: {error}") from error
    return compiled


def _to_json(value: object, indent: int | None = None) -> str:
    """Write JSON as templates of Hugging Face expect it: without escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
