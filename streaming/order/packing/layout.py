"""Describe a batch of packs: the positions of documents, and the options for its entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import sums
from streaming.order.packing.balance import BalanceRules, Costs, pack_costs
from streaming.types import Int64Array

IGNORED = -100
"""Default label of a token without loss: ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""
NO_DOCUMENT = -1
"""``document_ids`` of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackShape:
    """The user's validated options for a batch of packs.

    Attributes:
        length: T, tokens of a row.
        field: Field that holds the tokens of a document, little-endian.
        dtype: Type of these tokens, such as ``"<u2"``.
        mask_field: Field that holds one byte per token, 0 for tokens without loss; None: all tokens have loss.
        shift_labels: Whether ``labels[t]`` is token t + 1 instead of token t.
        labels_across: Whether the first token of a document is predicted from the last token of the previous document.
            With gaps between documents (``multiple``), this requires ``shift_labels``.
        pad_id: ``input_ids`` of padding.
        max_docs: Maximum number of documents in a pack, so that ``cu_seqlens`` has a static shape; None: no maximum.
        multiple: The space of each document is rounded up to a multiple of this.
        ignore_id: Label of padding and of tokens without loss, less than 0.
        stale: Number of tokens that a window shares with the previous window of its document and that have no loss
            there; 0: they have loss, or windows do not overlap.
    """

    length: int
    field: str
    dtype: str
    mask_field: str | None = None
    shift_labels: bool = False
    labels_across: bool = False
    pad_id: int = 0
    max_docs: int | None = None
    multiple: int = 1
    ignore_id: int = IGNORED
    stale: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a document that are read."""
        return (self.field,) if self.mask_field is None else (self.field, self.mask_field)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in its shard."""
        return int(np.dtype(self.dtype).itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRows:
    """The samples, or their tokens, that make the B rows of a batch; a *piece* is a range of one document.

    Attributes:
        splits: int64 [B + 1]; pieces ``splits[b]`` to ``splits[b + 1]`` make pack b.
        samples: int64 [n], sample of each piece, within its chunk's bytes.
        starts: int64 [n], first token of the piece within its document.
        stops: int64 [n], end (exclusive) of its tokens.
        lengths: int64 [n], tokens of the whole document, by the column.
        sources: int64 [B], the source of a mixture from which each pack comes; None: there is one dataset.
        costs: [B], cost of each pack, if packs are exchanged by cost; otherwise None.
        parts: Number of consecutive rows in which each planned pack is laid out. B is a multiple of it, and "pack"
            means such a row.
    """

    splits: Int64Array
    samples: Int64Array
    starts: Int64Array
    stops: Int64Array
    lengths: Int64Array
    sources: Int64Array | None = None
    costs: Costs | None = None
    parts: int = 1

    @property
    def num_packs(self) -> int:
        """Number of packs, B."""
        return len(self.splits) - 1

    @property
    def packs(self) -> Int64Array:
        """The pack of each piece, int64 [n]."""
        return np.arange(self.num_packs).repeat(self.splits[1:] - self.splits[:-1])

    @property
    def planned(self) -> Int64Array:
        """The planned pack of each piece, int64 [n]."""
        return self.packs if self.parts == 1 else self.packs // self.parts

    @property
    def places(self) -> Int64Array:
        """The index of each piece in its pack, int64 [n], from 0."""
        return np.arange(len(self.samples)) - self.splits[self.packs]

    def costs_by(
        self, rules: BalanceRules, length: int, measured: npt.NDArray[np.float64] | None = None
    ) -> Costs:  # fmt: skip
        """Return the cost of each pack as a row of ``length`` tokens, [B]; ``measured``: see ``pack_costs``."""
        sizes = np.full(self.num_packs, length)
        return pack_costs(self.stops - self.starts, self.splits, sizes, rules.cost, measured)

    def kept(self) -> KeptPacks:
        """Return the same packs in a form from which single packs can be chosen."""
        return KeptPacks(
            splits=self.splits.tolist(), pieces=np.stack([self.samples, self.starts, self.stops, self.lengths], axis=1)
        )

    @classmethod
    def of_samples(cls, samples: Int64Array, splits: Int64Array) -> PackRows:
        """Return rows of whole samples whose lengths are not known."""
        nothing = np.zeros_like(samples)
        return cls(splits=splits, samples=samples, starts=nothing, stops=nothing, lengths=nothing)

    @classmethod
    def chosen(cls, parts: list[tuple[KeptPacks, int]]) -> PackRows:
        """Return one pack from each of several results for a dataset, in order."""
        found = [kept.pieces[kept.splits[pack] : kept.splits[pack + 1]] for kept, pack in parts]
        columns = np.concatenate([np.empty((0, 4), np.int64), *found]).T
        samples, starts, stops, lengths = np.ascontiguousarray(columns)
        splits = sums([len(pieces) for pieces in found])
        return cls(splits=splits, samples=samples, starts=starts, stops=stops, lengths=lengths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPacks:
    """``PackRows`` stored such that the numbers of a pack are contiguous.

    Attributes:
        splits: As in ``PackRows``, as a list.
        pieces: int64 [n, 4], ``samples``, ``starts``, ``stops`` and ``lengths``.
    """

    splits: list[int]
    pieces: Int64Array

    @property
    def num_bytes(self) -> int:
        """Memory of these numbers."""
        return self.pieces.nbytes + 40 * len(self.splits)


def rows_of_padded(packs: PackRows, shape: PackShape) -> tuple[PackRows, PackShape, Int64Array]:
    """Turn each piece of padded packs into a pack of its own, and describe the resulting batch.

    The width follows from the plan alone, so that it does not change if documents cannot be read.

    Args:
        packs: Padded packs.
        shape: The shape of padded packs.

    Returns:
        The pieces as packs; their shape, in which ``length`` is the smallest width; and the positions of each, int64
        [n].
    """
    rows = replace(
        packs, splits=np.arange(len(packs.samples) + 1),
        sources=None if packs.sources is None else packs.sources[packs.packs], costs=None,
    )  # fmt: skip
    lengths = packs.stops - packs.starts
    longest = np.maximum.reduceat(lengths, packs.splits[:-1]) if len(lengths) else lengths
    widths = -(-longest // shape.multiple) * shape.multiple
    return (
        rows,
        replace(shape, length=shape.multiple, multiple=1, max_docs=None),
        widths.repeat(np.diff(packs.splits)),
    )


class RowSamples(Protocol):
    """Say which samples the rows of a set are made of; thread-safe."""

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:
        """Return the samples inside that make the rows at offsets of chunks in these passes (int64 [B] each)."""

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:
        """Tell whether the result of ``packs`` for these chunks and passes (int64 [B] each) is already computed.

        Never blocks.
        """

    def keep_at_most(self, num_bytes: int) -> None:
        """Limit the memory for what ``packs`` keeps (packs of groups, lengths of documents) from now on."""


@dataclass(frozen=True, slots=True)
class SingleSamples:
    """Rows of one sample each, the same in all passes. ``RowSamples``.

    Attributes:
        samples_of: Returns the sample inside each chunk at an offset.
    """

    samples_of: Callable[[Int64Array, Int64Array], Int64Array]

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:  # noqa: ARG002
        """Return one sample for each row."""
        return PackRows.of_samples(self.samples_of(chunk_ids, offsets), np.arange(len(offsets) + 1))

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:  # noqa: ARG002
        """Tell that there is nothing to compute."""
        return True

    def keep_at_most(self, num_bytes: int) -> None:
        """Do nothing, since nothing is kept."""
