"""Choose what the ranks of one data share get of its batches, and who of them reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from infra import DeviceMesh
from streaming.arguments import checked_seconds, checks_names
from streaming.batches.portion import Portion, StageFields, count_only
from streaming.batches.sequence import SequenceSlice, find_peer
from streaming.errors import ConfigError
from streaming.plan.plan import Plan
from streaming.types import Batch


def _as_it_is(batch: Any) -> Any:
    return batch


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Of the ranks of one data share the first reads and decodes, the others get its batches over torch.distributed.

    Batches must be made of tensors, arrays, byte strings, text, numbers, None, and lists, tuples and dicts of these.

    Attributes:
        timeout_s: How long ranks may differ in starting to iterate, and how long a rank may give no sign of life. A
            slow store or a long training step do not count.
        encode: Function of a batch on the reading rank that makes of it one of these things, where ``collate_fn`` does
            not.
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
    """The choices about replicas, as the loader got them.

    Attributes:
        replicate: ``"read"``: each rank reads for itself; ``"broadcast"`` or a ``Broadcast``: one reads for all.
        stage_fields: What pipeline stages use, or None: all use everything.
        sequence: How context-parallel peers share a sequence, or None: all get all of it.
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
        """Check that nothing was chosen; with ``sharding="dispatch"`` nothing but how batches travel.

        Raises:
            ConfigError: Something was, which ordinary data sets cannot have.
        """
        if self != Replicas(replicate=self.replicate if dispatch else "read"):
            raise ConfigError(
                "replicate, stage_fields, sequence: for a StreamingDataset only; let collate_fn do it here (replicate= "
                'also goes with sharding="dispatch")'
            )

    def broadcast(self, mesh: DeviceMesh) -> Broadcast | None:
        """Return how one rank reads for others.

        None: this rank reads for itself, as one without replicas always does.
        """
        if self.replicate == "read" or mesh.replica_world_size == 1:
            return None
        return self.replicate if isinstance(self.replicate, Broadcast) else Broadcast()

    def built(self, mesh: DeviceMesh) -> Portion:
        """Tell what batches are cut down to where they are built: on a rank that reads for others, to their needs."""
        if self.broadcast(mesh) is None:
            return self.portion(mesh)
        return Portion(counts=self.stage_fields is not None)

    def check(self, on_error: str) -> None:
        """Check against the data set's policy.

        Raises:
            ConfigError: Stages without payload could not know which samples were skipped.
        """
        if self.stage_fields is not None and on_error == "skip" and self.replicate == "read":
            raise ConfigError(
                'stage_fields with on_error="skip": which samples were skipped is known only where data is read, so '
                'stages without payload have another __valid__; use on_error="substitute" or replicate="broadcast"'
            )

    def portion(self, mesh: DeviceMesh) -> Portion:
        """Return what the rank that ``mesh`` speaks for uses of a batch.

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
        if fields is not None and not set(fields) & set(sequence.fields):  # its peers use the same
            return Portion(fields=fields)
        return Portion(fields=fields, sequence=sequence, peer=peer)


class CountedRun:
    """The batches of a stage that needs no data: right counts and masks from the plan alone; reads nothing."""

    def __init__(self, plan: Plan, dp_rank: int) -> None:
        self._batches = self._counts(plan, dp_rank)

    @staticmethod
    def _counts(plan: Plan, dp_rank: int) -> Iterator[Batch]:
        for batch in range(plan.num_batches):
            rows = plan.batch_size(batch, dp_rank)
            valid = None
            if plan.last_batch == "pad":
                valid = torch.from_numpy(np.arange(rows) < plan.num_valid(batch, dp_rank))
            yield count_only(rows, valid)

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._batches)

    def close(self) -> None:
        """Do nothing: nothing runs."""
        self._batches = iter(())

    def describe(self) -> str:
        """Say what it is at, for people."""
        return "a pipeline stage without data: nothing to wait for"
