"""Lay out the tokens of many packs at once, and cut batches from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streaming.build.batches.jagged import Allocate, fresh
from streaming.build.batches.rows import Rows
from streaming.common.platforms import later
from streaming.order.packing.fill import Filler, FoundItems, segments_of
from streaming.order.packing.layout import PackRows, PackShape, rows_of_padded
from streaming.types import Batch, Int64Array, override

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())


class PackColumns:
    """Make batches of packs, whose pieces are the rows; all packs are laid out at once. For one thread.

    Args:
        rows: The pieces.
        packs: The packs that the pieces form.
        shape: Shape of a batch.
        available: int64 [n], number of tokens of each piece's document; 0 if it cannot be read.
        allocate: Allocator for tensors [B, T]; None: fresh memory.
        names: Names of a mixture's sources, for ``__source__``.
        unmasked: bool [n], the pieces whose documents have no mask; None: none.
    """

    def __init__(
        self, rows: Rows, packs: PackRows, shape: PackShape, available: Int64Array, allocate: Allocate | None = None,
        names: Sequence[str] = (), unmasked: npt.NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        self._rows, self._allocate, self._names = rows, allocate or fresh, names
        self._splits: list[int] = packs.splits.tolist()
        is_read = available > packs.starts
        self._is_read: list[bool] | None = None if is_read.all() else is_read.tolist()
        pieces, shape, self._widths = self._laid_out(packs, shape)
        self._shape, self._pieces = shape, pieces
        self._segments = segments_of(pieces, available, shape, self._widths)
        self._filler = Filler(rows.view, pieces, self._segments, shape, unmasked)
        starts = self._starts(shape.field)
        self._tokens = self._filler.find(starts, np.dtype(shape.dtype))
        self._masks: FoundItems | None = None
        if shape.mask_field is not None:
            masks = self._starts(shape.mask_field)
            masks = masks if unmasked is None else np.where(unmasked, starts, masks)  # any bytes that are there
            self._masks = self._filler.find(masks, np.dtype(np.uint8))

    def batch(self, low: int, high: int) -> Batch:
        """Return the batch of packs ``[low, high)``, as described in ``Packed``."""
        return self._entries(low, high, list(pairwise(self._splits[low : high + 1])))

    def _laid_out(self, packs: PackRows, shape: PackShape) -> tuple[PackRows, PackShape, Int64Array | None]:
        """Return the content of a batch's rows, their shape, and the width of each row (None: that of the shape)."""
        return packs, shape, None

    def _starts(self, field: str) -> Int64Array:
        where = self._rows.fields.get(field)
        return np.zeros(len(self._rows.keys), np.int64) if where is None else where.starts

    def _entries(self, low: int, high: int, borders: list[tuple[int, int]]) -> Batch:
        """Return all entries of packs ``[low, high)``, whose pieces are between ``borders``."""
        keys, urls, read, pieces = self._rows.keys, self._rows.urls, self._is_read, self._pieces
        named = [keys[a:b] if read is None else [keys[i] for i in range(a, b) if read[i]] for a, b in borders]
        batch: Batch = {"__key__": named, "__url__": [urls[a] if a < b else "" for a, b in borders]}
        if pieces.costs is not None:
            batch["costs"] = torch.from_numpy(pieces.costs[low:high])
        if pieces.sources is not None:
            batch["__source__"] = [self._names[source] for source in pieces.sources[low:high].tolist()]
        batch |= self._tensors(low, high)
        if pieces.sources is not None:
            batch["source_ids"] = torch.from_numpy(pieces.sources[low:high].copy())
        return batch

    def _tensors(self, low: int, high: int) -> Batch:
        """Return the entries that hold tokens or positions of documents."""
        shape, filler, segments = self._shape, self._filler, self._segments
        width = shape.length if self._widths is None or low == high else int(self._widths[low])
        tensors = {name: self._allocate((high - low, width), torch.int64)
                   for name in ("input_ids", "labels", "position_ids", "document_ids")}  # fmt: skip
        input_ids, labels, positions, documents = (tensor.numpy().reshape(-1) for tensor in tensors.values())
        items = filler.input_ids(self._tokens, input_ids, low, high)
        num_labels = filler.labels(items, self._masks, labels, low, high)
        filler.position_ids(positions, low, high)
        filler.document_ids(documents, low, high)
        cu_seqlens, longest = segments.cu_seqlens(low, high, shape)
        return {**tensors, "cu_seqlens": torch.from_numpy(cu_seqlens), "max_seqlen": longest,
                "num_tokens": segments.tokens[high] - segments.tokens[low], "num_labels": num_labels}  # fmt: skip


class PaddedColumns(PackColumns):
    """Make batches of padded packs, one at a time: a matrix with a row for each document."""

    def batch(self, low: int, high: int) -> Batch:
        """Return the batch of pack ``low``, or of no pack; its pieces are laid out as packs of their own."""
        first, stop = self._splits[low], self._splits[high]
        batch = self._entries(first, stop, [(row, row + 1) for row in range(first, stop)])
        named: Any = batch["__key__"]
        documents: Any = batch.pop("document_ids")
        batch["__key__"] = [keys[0] if keys else "" for keys in named]
        batch["attention_mask"] = documents.add_(1)  # they are 0, and -1 at padding
        del batch["cu_seqlens"], batch["max_seqlen"]
        return batch

    @override
    def _laid_out(self, packs: PackRows, shape: PackShape) -> tuple[PackRows, PackShape, Int64Array | None]:
        return rows_of_padded(packs, shape)
