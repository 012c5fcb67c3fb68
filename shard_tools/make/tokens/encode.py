"""Encode batches of documents: in processes of this machine, on a cluster, or in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shard_tools.make.tokens.adapters import Ids
from shard_tools.make.tokens.chat import ChatTemplate, Pieces
from shard_tools.make.tokens.media import Placeholder
from shard_tools.make.tokens.messages import Conversation, RejectedError
from shard_tools.make.tokens.tokenizer import Ends, TokenizerFile, open_tokenizer


class Encoded(NamedTuple):
    """A document as tokens, or why it has none. A tuple, because one is sent between processes for every document.

    Attributes:
        tokens: The ids, little-endian.
        mask: For conversations, a byte per token: 1 where the assistant speaks.
        reason: Why there are no tokens; ``""`` if there are.
        what: Details of the reason.
        differs: For conversations, whether the ids differ from those of the whole text, because pieces are encoded
            separately.
    """

    tokens: bytes = b""
    mask: bytes | None = None
    reason: str = ""
    what: str = ""
    differs: bool = False


class DocumentEncoder(Protocol):
    """Turn documents into tokens; executors run this function. Pure, so it may be repeated anywhere."""

    @property
    def ends(self) -> Ends:
        """The tokens before and after every document, and the width of tokens."""

    @property
    def masked(self) -> bool:
        """Whether documents have a mask."""

    @property
    def file(self) -> TokenizerFile | None:
        """The tokenizer, if known."""

    @property
    def template(self) -> ChatTemplate | None:
        """The template of conversations, if any."""

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """The tokens that stand for images and sounds."""

    def __call__(self, batch: Sequence[Any]) -> list[Encoded]:
        """Return the tokens of each document of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Turn texts or conversations into tokens.

    Attributes:
        file: The tokenizer.
        ends: The tokens before and after every document, and the width of tokens.
        template: Chat template, for conversations.
        placeholders: The tokens that stand for images and sounds in conversations.
    """

    file: TokenizerFile
    ends: Ends
    template: ChatTemplate | None = None
    placeholders: tuple[Placeholder, ...] = ()

    @property
    def masked(self) -> bool:
        """Whether documents have a mask."""
        return self.template is not None

    def __call__(self, batch: Sequence[str | Conversation]) -> list[Encoded]:
        """Return the tokens of each document of a batch: all texts, or all conversations."""
        if self.template is None:
            texts = [one for one in batch if isinstance(one, str)]
            return [_encoded(ids, None, self.ends) for ids in open_tokenizer(self.file).encode(texts)]
        conversations = [one for one in batch if isinstance(one, Conversation)]
        rendered = [_render(self.template, one) for one in conversations]
        written = [pieces for pieces in rendered if not isinstance(pieces, Encoded)]
        texts = [text for pieces in written for text, _ in pieces]
        ids = iter(open_tokenizer(self.file).encode(texts))
        whole = iter(open_tokenizer(self.file).encode(["".join(text for text, _ in pieces) for pieces in written]))
        found = []
        for conversation, pieces in zip(conversations, rendered, strict=True):
            if isinstance(pieces, Encoded):
                found.append(pieces)
                continue
            parts = [next(ids) for _ in pieces]
            mask = [np.full(len(part), said, np.uint8) for part, (_, said) in zip(parts, pieces, strict=True)]
            joined = np.concatenate(parts)
            differs = not np.array_equal(joined, next(whole))
            try:
                expanded = _expanded(joined, np.concatenate(mask), conversation.counts, self.placeholders)
            except RejectedError as error:
                found.append(Encoded(reason=error.reason, what=str(error)))
                continue
            found.append(_encoded(*expanded, self.ends)._replace(differs=differs))
        return found


def _expanded(
    ids: Ids, mask: npt.NDArray[np.uint8], counts: Mapping[str, Sequence[int]], placeholders: Sequence[Placeholder]
) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """Return ids and mask with each placeholder as often as it stands for its image or sound; none carries loss.

    Raises:
        RejectedError: The text has other placeholders than the messages have images or sounds.
    """
    if not placeholders:
        return ids, mask
    repeats = np.ones(len(ids), np.int64)
    mask = mask.copy()
    for one in placeholders:
        there, numbers = ids == one.id, counts.get(one.medium, ())
        num = int(np.count_nonzero(there))
        if num != len(numbers):
            raise RejectedError(
                "placeholders", f"its text has the token {one.token!r} {num} times, for {len(numbers)} of kind "
                f"{one.medium!r}: the template leaves some out, or a text holds the name of the token"
            )  # fmt: skip
        if (there[1:] & there[:-1]).any():
            raise RejectedError(
                "touching", f"no token stands between two tokens {one.token!r}, so nobody can tell whose are whose; "
                "put a text between them, or use a template that writes a token around each"
            )  # fmt: skip
        repeats[there], mask[there] = numbers, 0
    return np.repeat(ids, repeats), np.repeat(mask, repeats)


def _encoded(ids: Ids, mask: npt.NDArray[np.uint8] | None, ends: Ends) -> Encoded:
    if not len(ids):
        return Encoded(reason="empty", what="the tokenizer makes no tokens of its text")
    return with_ends(ids, mask, ends)


def with_ends(ids: npt.NDArray[Any], mask: npt.NDArray[np.uint8] | None, ends: Ends) -> Encoded:
    """Return ``ids`` [n], which fit the width, and ``mask`` [n], between begin and end tokens with the mask 0."""
    width = ends.width
    begin, end = (b"" if token is None else token.to_bytes(width, "little") for token in (ends.bos, ends.eos))
    tokens = b"".join((begin, ids.astype(f"<u{width}").data, end))
    if mask is None:
        return Encoded(tokens=tokens)
    # Begin and end tokens belong to no speaker and carry no loss.
    said = b"".join((bytes(len(begin) // width), mask.data, bytes(len(end) // width)))
    return Encoded(tokens=tokens, mask=said)


def _render(template: ChatTemplate, conversation: Conversation) -> Pieces | Encoded:
    try:
        return template.pieces(conversation)
    except RejectedError as error:
        return Encoded(reason=error.reason, what=str(error))
