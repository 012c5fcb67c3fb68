"""Reduce a batch to the portion of one rank: everything, some fields (pipeline stages), a slice (context parallelism).

The portion is taken where the batch is built, before it is copied to shared or page-locked memory or to another rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streaming.build.batches.sequence import SequencePeer, SequenceSlice, checked_names, cut_sequence
from streaming.common.arguments import checks_names
from streaming.errors import ConfigError
from streaming.types import Batch

NUM_SAMPLES = "__num_samples__"
"""Entry with the number of rows, an int; in every batch of a loader with ``stage_fields``."""

_ALWAYS = ("__key__", "__url__", "__valid__", NUM_SAMPLES)


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class StageFields:
    """Name the batch entries that the first and the last pipeline stage use; each stage gets only its own.

    The first and the last stage also get ``__key__``, ``__url__`` and, if present, ``__valid__``. Stages in between get
    a batch without payload: ``{"__num_samples__": int}``, and with ``last_batch="pad"`` also ``"__valid__"`` (bool
    [B]). Every stage gets ``__num_samples__``. A rank that is both first and last stage gets both sets: without a
    pipeline axis, or in a schedule that folds back (then list all entries in both). ::

        loader = DataLoader(dataset, 8, stage_fields=StageFields(first=("input_ids",), last=("labels",)))

    Attributes:
        first: Entries for the first stage, such as ``("input_ids",)``.
        last: Entries for the last stage, such as ``("labels",)``.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]

    def __post_init__(self) -> None:
        for where in ("first", "last"):
            object.__setattr__(self, where, checked_names(f"StageFields: {where}", getattr(self, where)))

    def of_stage(self, *, is_first: bool, is_last: bool) -> tuple[str, ...]:
        """Return the entries that a stage gets; an empty tuple for a stage in between."""
        return tuple(dict.fromkeys((self.first if is_first else ()) + (self.last if is_last else ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Reduce a batch to the entries and the slice that a rank uses. Hashable, and picklable for worker processes.

    Attributes:
        fields: Entries to keep in addition to keys, URLs, mask and count; None: all. Empty: no payload at all.
        sequence: How to slice sequences, or None.
        peer: The context-parallel rank whose slice to take.
        counts: Whether to add ``__num_samples__`` even if all fields are kept.
    """

    fields: tuple[str, ...] | None = None
    sequence: SequenceSlice | None = None
    peer: SequencePeer = SequencePeer()  # noqa: RUF009  frozen
    counts: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the batch keeps all its entries unchanged."""
        return self.fields is None and self.sequence is None

    @property
    def is_count(self) -> bool:
        """Whether only the number of rows and their mask are kept."""
        return self.fields == ()

    def __call__(self, batch: Any, num_samples: int) -> Any:
        """Return the portion of a batch that has ``num_samples`` rows.

        Raises:
            ConfigError: The batch is not a dict, or lacks a field of this stage or a sequence to slice.
        """
        if self.is_whole and not self.counts:
            return batch
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"stage_fields and sequence need batches that are dicts, got a {type(batch).__name__}; have collate_fn "
                "return a dict"
            )
        if self.is_count:
            return count_only(num_samples, batch.get("__valid__"))
        kept: Batch = dict(batch)
        if self.fields is not None:
            missing = [name for name in self.fields if name not in batch]
            if missing and num_samples:
                raise ConfigError(
                    f"stage_fields: the batch has no entry {missing[0]!r}; it has {', '.join(map(str, batch))}"
                )
            kept = {name: value for name, value in batch.items() if name in self.fields or name in _ALWAYS}
        if self.fields is not None or self.counts:
            kept[NUM_SAMPLES] = num_samples
        return kept if self.sequence is None else self._cut(kept)

    def _cut(self, batch: Batch) -> Batch:
        wanted = self.sequence
        if wanted is None:
            return batch
        if not batch:  # a user's batch of no rows
            return batch
        names = tuple(name for name in wanted.fields if self.fields is None or name in self.fields)
        return cut_sequence(batch, wanted, self.peer, names)


def count_only(num_samples: int, valid: object = None) -> Batch:
    """Return a batch without payload."""
    batch: Batch = {NUM_SAMPLES: num_samples}
    if valid is not None:
        batch["__valid__"] = valid
    return batch
