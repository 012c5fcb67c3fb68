"""Split batches of packs into rows, to send them to other ranks, and join them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streaming.build.batches.jagged import Allocate, fresh
from streaming.common.platforms import later
from streaming.order.packing.layout import NO_DOCUMENT, PackShape
from streaming.types import Batch

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

_WIDE = ("input_ids", "labels", "position_ids", "document_ids")
_MOST = np.iinfo(np.int32).max


def split_packs(batch: Batch) -> list[Batch]:
    """Split a batch of packs into its rows; ``cu_seqlens`` of each row begin at 0."""
    ids: Any = batch["input_ids"]
    num_packs, length = ids.shape
    borders = np.unique(batch["cu_seqlens"].numpy())  # type: ignore[attr-defined]  # drops the filling of a fixed shape
    cuts = np.searchsorted(borders, np.arange(num_packs + 1) * length)
    rows: list[Batch] = []
    for pack in range(num_packs):
        row: Batch = {
            name: value[pack]
            for name, value in batch.items()
            if name != "cu_seqlens" and isinstance(value, (list, torch.Tensor)) and len(value) == num_packs
        }
        rows.append(row | {"cu_seqlens": torch.from_numpy(borders[cuts[pack] : cuts[pack + 1]] - pack * length)})
    return rows


def join_packs(rows: Sequence[Batch], shape: PackShape, allocate: Allocate | None = None) -> Batch:
    """Join rows from :func:`split_packs` into a batch; fields of tokens lie in memory from ``allocate``."""
    batch: Batch = {}
    max_docs = shape.max_docs
    length = len(rows[0]["input_ids"])  # type: ignore[arg-type]
    for name, first in rows[0].items():
        values: list[Any] = [row[name] for row in rows]
        if name in _WIDE:
            whole = (allocate or fresh)((len(rows), length), torch.int64)
            for place, value in zip(whole, values, strict=True):
                place.copy_(value)
            batch[name] = whole
        elif isinstance(first, torch.Tensor) and name != "cu_seqlens":
            batch[name] = torch.stack(values)
        else:
            batch[name] = values
    # Each row's cu_seqlens begin at 0: shift those of row k by k * T, and append the end B * T.
    starts: Any = batch["cu_seqlens"]
    places = len(rows) * length
    borders = np.concatenate([*(start.numpy() + pack * length for pack, start in enumerate(starts)), [places]])
    longest = int(np.diff(borders).max(initial=0))
    if max_docs is not None:
        borders = np.pad(borders, (0, len(rows) * (max_docs + 1) + 1 - len(borders)), constant_values=places)
        longest = length
    labels: Any = batch["labels"]
    documents: Any = batch["document_ids"]
    return batch | {
        "cu_seqlens": torch.from_numpy(borders.astype(np.int32)), "max_seqlen": longest,
        "num_tokens": int((documents != NO_DOCUMENT).sum()), "num_labels": int((labels != shape.ignore_id).sum()),
    }  # fmt: skip


def narrow_pack(row: Batch) -> Batch:
    """Return a row in the form sent: fields of tokens as int32, if all values fit; ``join_packs`` makes them int64."""
    narrow: Batch = dict(row)
    for name in _WIDE:
        value: Any = row[name]
        if not value.numel() or int(value.max()) <= _MOST:  # negative values mark tokens without loss
            narrow[name] = value.to(torch.int32)
    return narrow
