"""What the ranks of one data share get of its batches, and who of them reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import numpy as np
import torch

from infra import DeviceMesh
from streaming.errors import ConfigError
from streaming.ordinary_config import OrdinaryOptions
from streaming.plan import Plan
from streaming.portion import Portion, StageFields, count_only
from streaming.sequence import SequencePeer, SequenceSlice, find_peer
from streaming.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The choices about replicas, as the loader got them.

    Attributes:
        stage_fields: What pipeline stages use, or None: all use everything.
        sequence: How context-parallel peers share a sequence, or None: all get all of it.
    """

    stage_fields: StageFields | None = None
    sequence: SequenceSlice | None = None

    def __post_init__(self) -> None:
        for name, kind in (("stage_fields", StageFields), ("sequence", SequenceSlice)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name}: expected a {kind.__name__}(…) or None, got {value!r}")

    def check_plain(self) -> None:
        """Check that nothing was chosen.

        Raises:
            ConfigError: Something was, which ordinary data sets cannot have.
        """
        if self != Replicas():
            raise ConfigError(
                f"{', '.join(ReplicaOptions.__annotations__)}: for a StreamingDataset only; let collate_fn do it here"
            )

    def check(self, on_error: str) -> None:
        """Check against the data set's policy.

        Raises:
            ConfigError: Stages without payload could not know which samples were skipped.
        """
        if self.stage_fields is not None and on_error == "skip":
            raise ConfigError(
                'stage_fields with on_error="skip": which samples were skipped is known only where data is read, so '
                'stages without payload would have another __valid__; use on_error="substitute"'
            )

    def portion(self, mesh: DeviceMesh) -> Portion:
        """What the rank that ``mesh`` speaks for uses of a batch.

        Raises:
            ConfigError: The mesh has no axis for ``sequence``.
        """
        fields = None
        if self.stage_fields is not None:
            fields = self.stage_fields.of_stage(
                is_first=mesh.is_first_pipeline_stage, is_last=mesh.is_last_pipeline_stage
            )
        peer = SequencePeer()
        if self.sequence is not None:
            peer = find_peer(self.sequence, mesh.coordinates, mesh.axis_sizes)
        return Portion(fields=fields, sequence=self.sequence, peer=peer)


class ReplicaOptions(TypedDict, total=False):
    """What users may choose about replicas; see ``Replicas``."""

    stage_fields: StageFields | None
    sequence: SequenceSlice | None


class MoreOptions(ReplicaOptions, OrdinaryOptions, total=False):
    """The loader's options beyond torch's and its own few."""


def split_options(more: MoreOptions) -> tuple[Replicas, OrdinaryOptions]:
    """What is about replicas, and the rest."""
    rest: dict[str, Any] = dict(more)
    chosen = {name: rest.pop(name) for name in ReplicaOptions.__annotations__ if name in rest}
    return Replicas(**chosen), cast("OrdinaryOptions", rest)


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
        """The next batch."""
        return next(self._batches)

    def close(self) -> None:
        """Nothing runs."""
        self._batches = iter(())

    def describe(self) -> str:
        """For people."""
        return "a pipeline stage without data: nothing to wait for"
