"""Choose how the ranks of one data share get their batches, and which of them read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from infra import DeviceMesh
from streaming.build.batches.build import RowKind
from streaming.build.batches.portion import Portion, StageFields, count_only
from streaming.build.batches.rows import cut_up, scaled
from streaming.build.batches.sequence import SequenceSlice, find_peer
from streaming.common.arguments import checked_seconds, checks_names
from streaming.errors import ConfigError
from streaming.order.plan.plan import Plan
from streaming.types import Batch


def _as_it_is(batch: Any) -> Any:
    return batch


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Let one rank of each data share read and decode, and send its batches to the others over torch.distributed.

    Batches may consist of tensors, arrays, byte strings, text, numbers, None, and of lists, tuples and dicts of these.
    ::

        loader = DataLoader(dataset, 8, replicate=Broadcast(timeout_s=120))

    Attributes:
        timeout_s: Upper bound, in seconds, on the time between ranks' starts of an iteration, and on a rank's silence.
            Slow stores and long training steps do not count.
        encode: Function that turns a batch into these types on the reading rank, if ``collate_fn`` returns something
            else.
        decode: Its inverse, on the other ranks.
    """

    timeout_s: float = 600.0
    encode: Callable[[Any], Any] = _as_it_is
    decode: Callable[[Any], Any] = _as_it_is

    def __post_init__(self) -> None:
        checked_seconds("Broadcast: timeout_s", self.timeout_s)
        for name in ("encode", "decode"):
            if not callable(getattr(self, name)):
                raise ConfigError(f"Broadcast: {name}: expected a function of a batch, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The loader's options about replicas.

    Attributes:
        replicate: ``"read"``: each rank reads for itself; ``"broadcast"`` or a ``Broadcast``: one reads for all.
        stage_fields: Entries that pipeline stages use, or None: all stages use everything.
        sequence: How context-parallel ranks slice sequences, or None: all get all of it.
    """

    replicate: Literal["read", "broadcast"] | Broadcast = "read"
    stage_fields: StageFields | None = None
    sequence: SequenceSlice | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.replicate, Broadcast) and self.replicate not in ("read", "broadcast"):
            raise ConfigError(f"replicate: expected 'read', 'broadcast' or a Broadcast(…), got {self.replicate!r}")
        for name, kind in (("stage_fields", StageFields), ("sequence", SequenceSlice)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name}: expected a {kind.__name__}(…) or None, got {value!r}")

    def check_plain(self, *, dispatch: bool = False) -> None:
        """Check that no option was set. ``dispatch``, for ``sharding="dispatch"``, allows ``replicate``.

        Raises:
            ConfigError: An option was set that ordinary datasets do not support.
        """
        if self != Replicas(replicate=self.replicate if dispatch else "read"):
            raise ConfigError(
                "replicate, stage_fields, sequence: for a StreamingDataset only; do it in collate_fn here (replicate= "
                'also goes with sharding="dispatch")'
            )

    def broadcast(self, mesh: DeviceMesh) -> Broadcast | None:
        """Return how one rank reads for the others; None if this rank reads for itself."""
        if self.replicate == "read" or mesh.replica_world_size == 1:
            return None
        return self.replicate if isinstance(self.replicate, Broadcast) else Broadcast()

    def built(self, mesh: DeviceMesh) -> Portion:
        """Return the portion of batches to build on this rank. A rank that reads for others builds whole batches."""
        if self.broadcast(mesh) is None:
            return self.portion(mesh)
        return Portion(counts=self.stage_fields is not None)

    def check(self, on_error: str) -> None:
        """Check these options against the dataset's ``on_error``.

        Raises:
            ConfigError: Stages without payload could not know which samples were skipped.
        """
        if self.stage_fields is not None and on_error == "skip" and self.replicate == "read":
            raise ConfigError(
                'stage_fields with on_error="skip": which samples were skipped is known only where data is read, so '
                'stages without payload have another __valid__; use on_error="substitute" or replicate="broadcast"'
            )

    def portion(self, mesh: DeviceMesh) -> Portion:
        """Return the portion of a batch that the rank of ``mesh`` uses.

        Raises:
            ConfigError: The mesh has no axis for ``sequence``.
        """
        fields = None
        if self.stage_fields is not None:
            fields = self.stage_fields.of_stage(
                is_first=mesh.is_first_pipeline_stage, is_last=mesh.is_last_pipeline_stage
            )
        sequence = self.sequence
        if sequence is None:
            return Portion(fields=fields)
        peer = find_peer(sequence, mesh.coordinates, mesh.axis_sizes)
        if fields is not None and not set(fields) & set(sequence.fields):  # peers use the same fields
            return Portion(fields=fields)
        return Portion(fields=fields, sequence=sequence, peer=peer)


class CountedRun:
    """Yield batches for a pipeline stage that needs no data: counts and masks come from the plan. Nothing is read."""

    def __init__(self, plan: Plan, dp_rank: int, items: RowKind) -> None:
        self._batches = self._counts(plan, dp_rank, items)

    @staticmethod
    def _counts(plan: Plan, dp_rank: int, items: RowKind) -> Iterator[Any]:
        for batch in range(plan.num_batches):
            each = items.rows_each(plan.row_of(batch))
            planned = plan.batch_size(batch, dp_rank)
            valid = None
            if plan.last_batch == "pad":
                valid = torch.from_numpy(np.arange(each * planned) < each * plan.num_valid(batch, dp_rank))

            def count(low: int, high: int, valid: torch.Tensor | None = valid) -> Batch:
                return count_only(high - low, None if valid is None else valid[low:high])

            yield cut_up(scaled(plan.cuts(batch, planned), each), each * planned, count)

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._batches)

    def close(self) -> None:
        """Drop the remaining batches. There is nothing to stop."""
        self._batches = iter(())

    def describe(self) -> str:
        """Describe the current activity, for reports."""
        return "a pipeline stage without data: nothing to wait for"
