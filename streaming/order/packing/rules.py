"""Cut documents into pieces that fit into a pack, and define what a pack is.

A *document* is a run of tokens, one sample of the dataset. A *piece* is a range of its tokens, usually the whole
document. A *pack* holds pieces of at most ``length`` tokens in total, and becomes one row of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from streaming.common.arguments import check_choice, checked_flag, checked_int, counted
from streaming.errors import ConfigError
from streaming.types import Int64Array

Overlong: TypeAlias = Literal["split", "truncate", "drop"]
"""Treatment of a document that is longer than a pack."""
MAX_LENGTH = 2**30
"""Maximum tokens of a pack; ``cu_seqlens`` are int32."""
MAX_AMOUNT = 2**40
"""Maximum of a further budget: the square of a length of 2**20 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRules:
    """Rules for making packs from documents. Equal rules and lengths give equal packs.

    Attributes:
        length: T, maximum tokens of a pack.
        overlong: Documents longer than T: ``"split"`` cuts them into pieces of T and a remainder, ``"truncate"`` keeps
            the first T tokens, ``"drop"`` leaves them out.
        multiple: The length of each piece is rounded up to a multiple of this; 2 * cp for context parallelism. It must
            divide T.
        max_docs: Maximum number of pieces in a pack, for static shapes; None: as many as fit.
        padded: Whether a pack is a batch of its own: its pieces, of similar lengths, are padded to the longest, and
            ``pieces * longest`` is at most T.
        stride: A document longer than T becomes overlapping windows of T tokens, one every ``stride`` tokens; the last
            is shorter. Needs ``overlong="split"``. None: no overlap.
        budgets: Further limits of a pack, one for each further column of lengths (image tokens, for example). Needs
            ``overlong="drop"``: a document over any budget is left out.
        alike: Number of further columns in which the pieces of a pack must be equal, such as height and width. Needs
            ``padded``.
        spread: Whether, under several budgets, pieces may also be spread over the fewest packs that could hold them;
            see ``several_budgets``.

    Raises:
        ConfigError: An attribute is invalid.

    Example:
        >>> PackRules(length=8192, overlong="truncate").length
        8192
    """

    length: int
    overlong: Overlong = "split"
    multiple: int = 1
    max_docs: int | None = None
    padded: bool = False
    stride: int | None = None
    budgets: tuple[int, ...] = ()
    alike: int = 0
    spread: bool = False

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "length", checked_int("length", self.length, 1, MAX_LENGTH))
        set_(self, "multiple", checked_int("multiple", self.multiple, 1, MAX_LENGTH))
        if self.max_docs is not None:
            set_(self, "max_docs", checked_int("max_docs", self.max_docs, 1, MAX_LENGTH))
        check_choice("overlong", self.overlong, get_args(Overlong))
        checked_flag("padded", self.padded)
        if self.stride is not None:
            set_(self, "stride", checked_int("stride", self.stride, 1, self.length))
            if self.overlong != "split":
                raise ConfigError(
                    f'stride={self.stride} cuts overlong documents: it needs overlong="split", got {self.overlong!r}'
                )
        set_(self, "budgets", tuple(checked_int("budgets", budget, 0, MAX_AMOUNT) for budget in self.budgets))
        if self.budgets and self.overlong != "drop":
            raise ConfigError(
                f'budgets={self.budgets} needs overlong="drop", got {self.overlong!r}: for part of a document its use '
                "of the other budgets is not known"
            )
        if self.alike and not self.padded:
            raise ConfigError(
                f"alike, of {counted(self.alike, 'column')}: a row of several documents need not hold similar ones; "
                "alike applies to batches under a budget: add padded=True"
            )
        if self.length % self.multiple:
            below = self.length // self.multiple * self.multiple
            near = f"{below} or {below + self.multiple}" if below else f"{self.multiple}"
            raise ConfigError(
                f"length={self.length}: expected a multiple of multiple={self.multiple}, to which every piece is "
                f"rounded up; use {near}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """The pieces that documents were cut into, and counts of what was lost.

    Attributes:
        documents: int64 [n], number of the document of each piece.
        starts: int64 [n], first token of the piece within its document.
        stops: int64 [n], end of the piece (exclusive).
        fresh: int64 [n], first token within its document that no earlier piece holds: ``starts`` unless windows
            overlap. Labels begin here if each token must count once.
        amounts: int64 [n, len(budgets) + alike], the amounts that each piece takes of the further budgets, and its
            values in the columns that must be equal.
        num_split: Number of documents in more than one piece.
        num_truncated: Number of documents whose end was cut off.
        num_dropped: Number of documents left out because of their length or a further budget.
        num_empty: Number of documents without tokens, which have no piece.
    """

    documents: Int64Array
    starts: Int64Array
    stops: Int64Array
    fresh: Int64Array
    amounts: Int64Array
    num_split: int
    num_truncated: int
    num_dropped: int
    num_empty: int

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each piece, int64 [n]."""
        return self.stops - self.starts

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces, counting overlaps each time; other tokens were truncated or dropped."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs(Pieces):
    """The pieces of packs, pack after pack.

    Attributes:
        rules: The rules by which they were packed.
        splits: int64 [K + 1]; pieces ``splits[k]`` to ``splits[k + 1]`` make up pack k.
    """

    rules: PackRules
    splits: Int64Array

    def __len__(self) -> int:
        """Return the number of packs, K."""
        return len(self.splits) - 1

    @property
    def sizes(self) -> Int64Array:
        """Token positions of each pack, including padding, int64 [K].

        They are T each, or pieces * longest if packs are ``padded``.
        """
        if not self.rules.padded or not len(self):
            return np.full(len(self), self.rules.length)
        lengths = rounded(self.lengths, self.rules.multiple)
        return np.maximum.reduceat(lengths, self.splits[:-1]) * np.diff(self.splits)

    @property
    def fill(self) -> float:
        """Fraction of all positions that hold tokens, 0 to 1; 1 if there is no pack."""
        return self.num_tokens / int(self.sizes.sum()) if len(self) else 1.0


def checked_lengths(lengths: Int64Array, budgets: tuple[int, ...] = (), alike: int = 0) -> Int64Array:
    """Validate lengths of documents, and return them as int64 [N, 1 + len(budgets) + alike].

    Raises:
        ConfigError: They are not non-negative integers, or the number of columns is wrong.
    """
    found = np.asarray(lengths)
    width = 1 + len(budgets) + alike
    shape = "[N]" if width == 1 else f"[N, {width}], tokens, a column for each of {budgets}, and {alike} to be alike"
    columns = found.ndim == 2 if width > 1 else found.ndim == 1
    found = found[:, None] if found.ndim == 1 and columns else found
    if not columns or found.shape[1] != width or (found.size and found.dtype.kind not in "iu"):
        raise ConfigError(f"lengths: expected whole numbers {shape}, got {found.dtype} {list(np.shape(lengths))}")
    found = found.astype(np.int64, copy=False)
    if found.size and int(found.min()) < 0:
        document = int(found.min(axis=1).argmin())
        raise ConfigError(f"lengths: document {document} has {int(found.min())} tokens; expected 0 or more")
    return found


def rounded(lengths: Int64Array, multiple: int) -> Int64Array:
    """Round lengths up to a multiple; int64, any shape."""
    return lengths if multiple == 1 else -(-lengths // multiple) * multiple


def cut(lengths: Int64Array, rules: PackRules) -> Pieces:
    """Cut documents into pieces of at most ``rules.length`` tokens, in the order of documents and tokens.

    Args:
        lengths: int64 [N], tokens of each document; 0 is allowed. With more columns int64 [N, 1 + len(budgets) +
            alike].
        rules: The rules, including the treatment of overlong documents.

    Raises:
        ConfigError: A length is negative or not an integer.
    """
    columns = checked_lengths(lengths, rules.budgets, rules.alike)
    lengths, amounts = columns[:, 0], columns[:, 1:]
    most, step = rules.length, rules.stride or rules.length
    taken = amounts[:, : len(rules.budgets)]
    over = (lengths > most) | ((taken > np.array(rules.budgets, np.int64)).any(axis=1) & (lengths > 0))
    num_over = int(over.sum())
    counts = (lengths > 0).astype(np.int64)  # pieces of each document
    if rules.overlong == "split":
        counts += -(-np.maximum(lengths - most, 0) // step)
    elif rules.overlong == "drop":
        counts[over] = 0
    documents = np.repeat(np.arange(len(lengths)), counts)
    # Index of each piece within its document, [n]: the number of pieces before it, less those before its document.
    numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = numbers * step
    return Pieces(
        documents=documents,
        starts=starts,
        stops=np.minimum(starts + most, lengths[documents]),
        fresh=np.where(numbers > 0, starts - step + most, 0),
        amounts=amounts[documents],
        num_split=num_over if rules.overlong == "split" else 0,
        num_truncated=num_over if rules.overlong == "truncate" else 0,
        num_dropped=num_over if rules.overlong == "drop" else 0,
        num_empty=int((lengths == 0).sum()),
    )
