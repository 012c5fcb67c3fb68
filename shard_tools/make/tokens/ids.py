"""Read documents that are already token ids, with their loss masks, as tables of other tools store them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shard_tools.make.tokens.chat import ChatTemplate
from shard_tools.make.tokens.encode import Encoded, with_ends
from shard_tools.make.tokens.media import Placeholder
from shard_tools.make.tokens.messages import Conversation, RejectedError
from shard_tools.make.tokens.tokenizer import Ends, TokenizerFile
from streaming.build.decode import arrays

_IGNORED = -100  # the label of a token that carries no loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenIds:
    """A document of n tokens: ``ids`` int64 [n], and ``mask`` uint8 [n], 1 where a token carries loss, or None."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8] | None = None

    @classmethod
    def of(cls, value: object, name: str, mask: object = None, mask_name: str | None = None) -> TokenIds:
        """Read ids and mask from the values of a record: lists, arrays in ``.npy``, or JSON text.

        A mask holds 0 and 1 (or booleans), or labels: -100 where a token carries no loss, else the token itself.

        Raises:
            RejectedError: The values are not whole numbers, or the mask does not match the tokens.
        """
        ids = _whole_numbers(value, name)
        if not ids.size:
            raise RejectedError("empty", f"{name!r} is empty")
        if mask_name is None:
            return cls(ids=ids)
        said = _whole_numbers(mask, mask_name)
        if said.shape != ids.shape:
            raise RejectedError("bad mask", f"{mask_name!r} has {said.size} entries for {ids.size} tokens")
        is_mask = (said == 0) | (said == 1)
        if not is_mask.all():
            wrong = np.flatnonzero((said != _IGNORED) & (said != ids))
            if wrong.size:
                at = int(wrong[0])
                raise RejectedError(
                    "bad mask",
                    f"{mask_name!r} holds {said[at]} at token {at}, which is {ids[at]}: expected 0 and 1, or labels: "
                    f"{_IGNORED}, or the token itself (not shifted)",
                )
            said = said != _IGNORED
        return cls(ids=ids, mask=said.astype(np.uint8))


def _whole_numbers(value: object, name: str) -> npt.NDArray[np.int64]:
    """Return a list of whole numbers as int64 [n].

    Raises:
        RejectedError: The value is something else.
    """
    try:
        if isinstance(value, (bytes, memoryview)) and bytes(value[:6]) == b"\x93NUMPY":
            value = arrays.npy(value)
        elif isinstance(value, (str, bytes, memoryview)):
            value = json.loads(value if isinstance(value, str) else bytes(value))
        found: npt.NDArray[Any] = np.asarray(value) if isinstance(value, (list, np.ndarray)) else np.empty((), object)
    except (ValueError, RecursionError, OverflowError) as error:
        raise RejectedError("not token ids", f"{name!r}: {error}") from error
    if found.ndim == 1 and not found.size:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "biu" or not np.can_cast(found.dtype, np.int64):
        kind = f"an array {list(found.shape)} of {found.dtype}" if found.ndim else f"of type {type(value).__name__}"
        raise RejectedError("not token ids", f"{name!r} is {kind}, expected a list of whole numbers")
    return found.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdEncoder:
    """Write ids as tokens: the counterpart of :class:`shard_tools.make.tokens.encode.Encoder` for texts.

    Attributes:
        ends: Tokens to add before and after every document, and the bound of ids.
        masked: Whether documents have a mask.
        file: The tokenizer that made the ids, if the user names it; it is not run.
    """

    ends: Ends
    masked: bool
    file: TokenizerFile | None = None

    @property
    def template(self) -> ChatTemplate | None:
        """None, because a mask is given."""
        return None

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """None, because ids are given."""
        return ()

    def __call__(self, batch: Sequence[str | Conversation | TokenIds]) -> list[Encoded]:
        """Return the tokens of each document of a batch."""
        return [self._encoded(one) for one in batch if isinstance(one, TokenIds)]

    def _encoded(self, document: TokenIds) -> Encoded:
        wrong = np.flatnonzero((document.ids < 0) | (document.ids >= self.ends.vocab_size))
        if wrong.size:
            at = int(wrong[0])
            what = f"token {at} is {document.ids[at]}, expected 0 to {self.ends.vocab_size - 1}"
            return Encoded(reason="id out of range", what=what)
        return with_ends(document.ids, document.mask, self.ends)
