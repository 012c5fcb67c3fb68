"""Compare the facts that ranks know before iterating: those of a loader over a ``StreamingDataset``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any, Self

from infra import DeviceMesh
from streaming.build.batches.draws import Chain
from streaming.common.job.agreement import agree, stand_aside
from streaming.common.job.store import ProcessGroup, job_store, job_world_size
from streaming.order.plan.state import LoaderState
from streaming.run.engine.source import ShardSet
from streaming.run.replicas.options import Replicas
from streaming.types import VERSION


class StartCheck:
    """Compare ranks once, before the first iteration, and on request.

    Args:
        dataset: The dataset that is read.
        mesh: The ranks that take part.
        options: The loader's own options that must agree, by name.
        replicas: The options about replicas.
        timeout_s: Time-out of the first iteration, in seconds; None: no comparison.
        state: Returns the position.
    """

    def __init__(
        self, dataset: ShardSet, mesh: DeviceMesh, options: Mapping[str, Any], replicas: Replicas,
        timeout_s: float | None, state: Callable[[], LoaderState],
    ) -> None:  # fmt: skip
        self._state = state
        self._dataset = dataset
        self._mesh = mesh
        self._options = dict(options)
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._is_done = timeout_s is None
        self._met_in: ProcessGroup | None = None
        self._is_remeshed = False

    def first(self) -> None:
        """Compare before an iteration, if it is the first one and the job has other ranks.

        Ranks are matched by the shards that this loader reads: a loader over other shards, on some ranks only, is not
        mistaken for this one. mistaken for this one.

        Raises:
            AgreementError: They differ.
        """
        if self._is_done or self._timeout_s is None:
            return
        self._is_done = True
        is_old, self._met_in = self._met_in is not None and self._met_in.is_current, ProcessGroup()
        if self._is_remeshed and (is_old or job_world_size() != self._mesh.world_size):
            return
        if not 1 < self._mesh.world_size <= job_world_size():
            return  # a mesh simulated in one process, or of processes unknown to torch.distributed: nobody to ask
        subject, (rank, board) = f"start of {self._dataset.urls}", job_store("")
        if rank == self._mesh.rank:
            self._compare(subject, self._timeout_s, required=False)
        elif rank in self._mesh.ranks and self._mesh.world_size < job_world_size():
            stand_aside(board, rank, self._mesh.ranks, subject=subject)

    def opened(self, mesh: DeviceMesh) -> Self:
        """Return the check of another world: the next iteration compares, if torch.distributed was set up again for it.

        In the process group of the older world some ranks may be gone, so no rank waits for them.
        """
        made = copy(self)
        made._mesh, made._is_done, made._is_remeshed = mesh, self._timeout_s is None, True
        return made

    def now(self, timeout_s: float) -> None:
        """Compare with all ranks of the mesh.

        Raises:
            AgreementError: They differ, or do not answer.
            ConfigError: torch.distributed is not set up.
        """
        self._compare("on request", timeout_s, required=True)

    def _compare(self, subject: str, timeout_s: float, *, required: bool) -> None:
        rank, board = job_store("check_agreement()")
        agree(board, rank, self._mesh.ranks, self._facts(), subject=subject, timeout_s=timeout_s, required=required)

    def _facts(self) -> dict[str, Any]:
        told = self._state().to_dict()
        order = told.pop("order")
        dataset = self._dataset
        return {
            "version": VERSION,
            "position": told.pop("samples_seen"),
            "state version": told.pop("version"),
            **told,
            **{f"order: {name}": value for name, value in order.items()},
            **self._options,
            "shards": len(dataset.urls),
            "fields": None if dataset.fields is None else list(dataset.fields),
            "decode": _described(dataset.decode),
            "transform": _described(dataset.transform),
            "packs": dataset.items.options,
            "on_error": dataset.on_error,
            "stage_fields": repr(self._replicas.stage_fields),
            "sequence": repr(self._replicas.sequence),
            "mesh": {"axes": list(self._mesh.axis_names), "shape": list(self._mesh.shape),
                     "data_axes": list(self._mesh.data_axes)},
        }  # fmt: skip


def _described(value: Any) -> Any:
    """Describe functions by name, never by address."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _described(item) for name, item in value.items()}
    if isinstance(value, Chain):
        return [_described(function) for function in value.functions]
    if isinstance(value, partial):
        return f"partial of {_described(value.func)}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
