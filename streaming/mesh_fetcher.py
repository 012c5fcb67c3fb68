"""Fetch one rank's share of a dataset, batch by batch, with a resumable position: ``DeviceMeshFetcher``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infra import DeviceMesh
from streaming.common.arguments import checks_names
from streaming.common.job.agreement import DEFAULT_TIMEOUT_S
from streaming.loader_face import LoaderFace
from streaming.loop_core import resolved
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.settings import Shape
from streaming.run.device.copiers import page_locked
from streaming.run.loops.opening import OpenLoop, open_shards
from streaming.run.loops.options import no_dataset
from streaming.run.options.loader_options import LoaderOptions, as_they_are
from streaming.sets.datasets.face import DataSet
from streaming.types import SamplesT


@checks_names()
class DeviceMeshFetcher(LoaderFace[SamplesT]):
    """Fetch one rank's share of a dataset, batch by batch, as lists of sample dicts.

    It assigns chunks to the rank, buffers and shuffles them, retries failed reads and substitutes unreadable samples,
    exactly as a ``DataLoader`` with the same arguments does. (``DataLoader`` adds workers, collation and the interface
    that trainers expect.) Samples are decoded in the calling thread and are not collated; fetching runs ahead in the
    background. Use it in a training loop of your own, or to inspect any rank's share from a single process::

        mesh = DeviceMesh.from_sizes(dp_size=8, rank=3)
        for samples in DeviceMeshFetcher(dataset, device_mesh=mesh, batch_size=32):
            print([sample["__key__"] for sample in samples])

    Args:
        dataset: A ``StreamingDataset``, a ``Mixture`` or a ``Packed`` set, or a callable that makes one.
        batch_size: Samples per data-parallel rank. Give either this or ``global_batch_size``.
        global_batch_size: Samples over all data-parallel ranks.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None to detect it; see ``infra.MeshFinder``.
        last_batch: As for ``DataLoader``. With ``"pad"``, each sample's ``"__valid__"`` is False if it is padding.
        epoch_size: Samples in a virtual epoch; default: one pass over the data.
        memory_limit: Upper bound on everything this rank buffers; None as for ``DataLoader``.
        agreement_timeout: As for ``DataLoader``.

    Raises:
        ConfigError: An argument or a combination of arguments is invalid. A misspelled name raises ``OptionError``,
            which is also a ``TypeError``.
    """

    def __init__(
        self,
        dataset: DataSet[Any] | Callable[[], DataSet[Any]],
        batch_size: int | Schedule | None = None,
        *,
        global_batch_size: int | Schedule | None = None,
        device_mesh: Any = None,
        last_batch: str = "drop",
        epoch_size: int | None = None,
        memory_limit: int | str | None = None,
        agreement_timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        options: LoaderOptions[Any] = LoaderOptions(
            batch_size, global_batch_size=global_batch_size, device_mesh=device_mesh, last_batch=last_batch,
            epoch_size=epoch_size, memory_limit=memory_limit, agreement_timeout=agreement_timeout,
            num_threads=0, collate_fn=as_they_are,
        )  # fmt: skip
        self._begin(dataset, options)

    @staticmethod
    def _opened(dataset: Any, options: LoaderOptions[Any], shape: Shape, mesh: DeviceMesh) -> OpenLoop:
        """See ``LoaderFace``; accepts only sets of shards."""
        made = resolved(dataset)
        if not isinstance(made, DataSet):
            raise no_dataset(made)
        return open_shards(made, options, shape, mesh, pin=page_locked)
