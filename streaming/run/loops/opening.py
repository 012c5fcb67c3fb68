"""Open the loop over a set of shards with the options of a loader: ``open_shards``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infra import DeviceMesh
from streaming.order.plan.settings import Shape
from streaming.run.epochs.iterator import Loop
from streaming.run.loops.epoch_loop import EpochLoop
from streaming.run.loops.options import streaming_config
from streaming.run.loops.streamed import StreamedLoop
from streaming.run.options.loader_options import LoaderOptions
from streaming.run.replicas.start_check import StartCheck
from streaming.sets.datasets.face import DataSet


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """A loop that was opened over a dataset in a mesh.

    Attributes:
        loop: The loop.
        given: The argument to open the loop again: the dataset from the user's function or, for actors, the function.
        dataset: The dataset that is read.
        check: Compares the loop with the loops of other ranks; None: no comparison.
        announces: Whether a log line describes each epoch.
    """

    loop: Loop
    given: Any
    dataset: Any
    check: StartCheck | None = None
    announces: bool = True


def open_shards(
    dataset: DataSet[Any], options: LoaderOptions[Any], shape: Shape, mesh: DeviceMesh, *, pin: Callable[[Any], Any]
) -> OpenLoop:
    """Open the loop over a set of shards, and the check that compares it with the loops of other ranks.

    Args:
        dataset: The set.
        options: Options of the loader.
        shape: Shape of the batches.
        mesh: The mesh, including this process's place in it.
        pin: Page-locks a batch.

    Raises:
        ConfigError: An option does not go with the dataset, the mesh, or another option.
    """
    source, config = dataset.source, streaming_config(dataset, options, shape, mesh, pin)
    loop: EpochLoop | StreamedLoop
    if source.indexed:
        loop = EpochLoop(source, config)
    else:
        shape.check_one_size()
        loop = StreamedLoop(source, config)
    same: dict[str, Any] = {"global_batch_size": shape.sizes.plain, "last_batch": shape.last_batch}
    if options.balance is not None:
        same["balance"] = options.balance
    same["micro_batch_size"] = shape.micro_batch_size
    check = StartCheck(source, mesh, same, config.replicas, options.agreement_timeout, loop.state)
    return OpenLoop(loop=loop, given=dataset, dataset=dataset, check=check)
