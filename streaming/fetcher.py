"""``DeviceMeshFetcher``: the share of one mesh rank, as lists of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streaming.arguments import checks_names
from streaming.dataset import StreamingDataset
from streaming.job.agreement import DEFAULT_TIMEOUT_S
from streaming.loader import DataLoader
from streaming.types import Sample


@checks_names()
class DeviceMeshFetcher(DataLoader):
    """What one rank of a mesh is to get, batch by batch, as lists of sample dicts.

    It maps chunks to the rank, buffers and shuffles them, and substitutes what is unreadable, exactly as a
    ``DataLoader`` with the same arguments does; but it decodes in the calling thread and does not collate. Fetching
    runs ahead in the background. Use it under a loop of your own, or to look at any rank's share from one process::

        mesh = DeviceMesh.from_sizes(dp_size=8, rank=3)
        for samples in DeviceMeshFetcher(dataset, device_mesh=mesh, batch_size=32):
            print([sample["__key__"] for sample in samples])

    Args:
        dataset: A ``StreamingDataset``, or a callable that makes one.
        batch_size: Samples per data-parallel rank; or give ``global_batch_size``.
        global_batch_size: Samples over all data-parallel ranks.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None: see ``infra.MeshFinder``.
        last_batch: As for ``DataLoader``; under ``"pad"`` each sample says in ``"__valid__"`` whether it counts.
        epoch_size: Samples in a virtual epoch; default: one pass over the data.
        memory_limit: For all that this rank buffers.
        agreement_timeout: As for ``DataLoader``.
    """

    _inline = True

    def __init__(
        self,
        dataset: StreamingDataset | Callable[[], StreamingDataset],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        device_mesh: Any = None,
        last_batch: str = "drop",
        epoch_size: int | None = None,
        memory_limit: int | str = "4GiB",
        agreement_timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(
            dataset, batch_size, global_batch_size=global_batch_size, device_mesh=device_mesh, last_batch=last_batch,
            epoch_size=epoch_size, collate_fn=_samples, memory_limit=memory_limit, agreement_timeout=agreement_timeout,
        )  # fmt: skip


def _samples(samples: list[Sample]) -> list[Sample]:
    return samples
