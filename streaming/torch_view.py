"""Keep the loader's promises under torch's own ``DataLoader``: ``TorchIterable``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from infra import DeviceMesh, MeshFinder
from streaming.common.arguments import checked_count, checks_names
from streaming.errors import ConfigError, StateError
from streaming.mesh_fetcher import DeviceMeshFetcher
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.others.torch_datasets.retry import SharedLog
from streaming.sets.datasets.dataset import StreamingDataset
from streaming.sets.datasets.face import DataSet
from streaming.types import Sample

_LEAST_BLOCK = 64
"""Minimum number of samples, over all parts, that are planned together; it also sets the default number of lanes."""
_VERSION = 1
_STATE = {"version", "epoch", "samples", "part", "parts", "loader"}
_log = logging.getLogger(__name__)


@checks_names()
class TorchIterable(IterableDataset[Sample]):
    """Present a ``StreamingDataset`` to torch's ``DataLoader`` as an iterable dataset that shards itself.

    ::

        loader = torch.utils.data.DataLoader(TorchIterable(dataset), batch_size=32, num_workers=4)

    Samples are dealt to R data-parallel ranks times W torch workers, each sample exactly once, in the dataset's
    shuffled order, which changes every epoch. Each ``iter(loader)`` begins the next epoch, also with persistent
    workers. Do not give torch's loader ``shuffle`` or a ``sampler``. ``streaming.DataLoader`` does the same faster,
    yields the same batches on any number of ranks and workers, and can resume on any other number; this class is for
    programs that require torch's loader.

    ``state_dict`` and ``load_state_dict`` follow torchdata's protocol: its ``StatefulDataLoader`` saves and loads the
    position of every worker, for the same number of ranks and workers.

    Args:
        dataset: The dataset to read; it needs an index.
        device_mesh: An ``infra.DeviceMesh``, torch's ``DeviceMesh``, or None to detect it; see ``infra.MeshFinder``.
        last_batch: How N samples are divided among P = R x W parts. ``"drop"``: N mod P samples are left out;
            ``"pad"``: short parts repeat a sample, and ``"__valid__"`` of each sample is False if it is such a repeat;
            ``"partial"``: some parts get one extra sample, so ranks may differ by a batch.
        memory_limit: Upper bound on everything that one worker buffers.

    Raises:
        ConfigError: An argument is invalid.
        IndexMissingError: The dataset has no index.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        device_mesh: Any = None,
        last_batch: str = "drop",
        memory_limit: int | str = "1GiB",
    ) -> None:
        if not isinstance(dataset, StreamingDataset):
            raise ConfigError(
                f"TorchIterable: expected a StreamingDataset, got a {type(dataset).__name__}; "
                + (
                    "streaming.DataLoader deals its samples and makes its batches"
                    if isinstance(dataset, DataSet)
                    else "torch's DataLoader takes other data sets directly, with DeviceMeshSampler as batch_sampler="
                )
            )
        self.dataset = dataset
        self.last_batch = Shape.chosen(1, None, 1, last_batch=last_batch).last_batch
        self._num_samples = len(dataset)
        self._memory_limit = memory_limit
        self._finder = MeshFinder(device_mesh)
        self._epochs = _Epochs()
        self._loaded: Mapping[str, Any] | None = None
        self._running: _Part | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh, including this process's place in it."""
        self._finder.look_again()
        return self._finder.mesh

    def __len__(self) -> int:
        """Return the number of samples of one rank in an epoch; with ``"drop"`` and W workers, up to W - 1 fewer."""
        ranks = self.device_mesh.data_world_size
        return self._num_samples // ranks if self.last_batch == "drop" else -(-self._num_samples // ranks)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples of this rank and worker, for the next epoch or from a loaded position.

        Raises:
            StateError: The loaded state belongs to another rank, or to another number of ranks or workers.
        """
        info = get_worker_info()
        if info is None:
            self._finder.look_again(to_read=True)
        mesh = self._finder.mesh
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        parts, part = mesh.data_world_size * workers, mesh.data_rank * workers + worker
        loaded, self._loaded = self._loaded, None
        if loaded is not None and (loaded["part"], loaded["parts"]) != (part, parts):
            raise StateError(
                f"this state is of part {loaded['part']} of {loaded['parts']} (ranks times workers), but this is part "
                f"{part} of {parts}; a view resumes only where it was. streaming.DataLoader resumes on any number"
            )
        group = [workers if info else 0, 0 if info is None else info.seed - info.id]
        epoch = self._epochs.claim(group, worker, None if loaded is None else loaded["epoch"])
        self._running = _Part(self, part, parts, epoch, loaded)
        return _Samples(self._running)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; call this in the process that owns the loader."""
        self._epochs.set(checked_count("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank and worker in the current iteration: a small JSON-serializable dict.

        After the last sample the position is the end of the epoch while torch's iterator exists, then the next epoch.

        Raises:
            StateError: No iteration has begun in this process; with torch workers, only the workers know their
                positions.
        """
        if self._running is None:
            if self._loaded is not None:
                return dict(self._loaded)
            raise StateError(
                "TorchIterable.state_dict: no iteration has begun in this process. With torch workers use torchdata's "
                "StatefulDataLoader, which asks each of them, or streaming.DataLoader"
            )
        return self._running.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, in the next iteration, from a ``state_dict`` of the same rank and worker.

        The number of ranks and workers must be the same, too.

        Raises:
            StateError: The state is malformed. (The iteration refuses a state of another dataset, rank or worker.)
        """
        if not isinstance(state, Mapping) or set(state) != _STATE or state["version"] != _VERSION:
            raise StateError("state: expected the dict of TorchIterable.state_dict()")
        self._loaded, self._running = dict(state), None

    def remesh(self, dp_rank: int, dp_size: int, *, at: Any) -> None:
        """Refuse to change the world, because each torch worker keeps its own position.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"remesh({dp_rank}, {dp_size}, at={at!r}): under torch's DataLoader each worker runs on its own, and its "
            "state fits only as many ranks and workers. Use streaming.DataLoader, whose remesh() changes the world"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._finder.look_again()  # a spawned worker has no torch.distributed and only part of the environment
        return {**self.__dict__, "_finder": MeshFinder(self._finder.mesh), "_running": None}


class _Part:
    """One pass over the samples of one part (a rank's worker)."""

    def __init__(
        self, view: TorchIterable, part: int, parts: int, epoch: int, loaded: Mapping[str, Any] | None
    ) -> None:
        self._part, self._parts, self._epoch = part, parts, epoch
        self._seen = 0 if loaded is None else int(loaded["samples"])
        self._last_batch = view.last_batch
        total = view._num_samples
        if total < parts:
            raise ConfigError(
                f"{total} samples cannot be dealt to {parts} parts (data-parallel ranks times torch workers); use "
                "fewer workers"
            )
        rows = max(1, -(-_LEAST_BLOCK // parts))
        blocks, tail = divmod(total, rows * parts)
        low, high = Shape(sizes=Sizes.constant(rows * parts), num_ranks=parts).share(tail, part)
        own = blocks * rows + high - low
        self._share = {"drop": total // parts, "pad": -(-total // parts), "partial": own}[view.last_batch]
        self._fetcher = DeviceMeshFetcher(
            view.dataset, rows, device_mesh=DeviceMesh.from_sizes(dp_size=parts, rank=part), last_batch="partial",
            memory_limit=view._memory_limit, agreement_timeout=None,
        )  # fmt: skip
        state = self._fetcher.state_dict() if loaded is None else dict(loaded["loader"])
        block = max(0, self._seen - 1) // rows  # from the last sample seen on, which may be repeated as padding
        self._skip = self._seen - block * rows
        self._base = {**state, "epoch": epoch, "samples_seen": block * rows * parts}
        self._fetcher.load_state_dict(self._base)
        self._ended = False
        self.is_left = False  # no more samples can be requested

    def state(self) -> dict[str, Any]:
        """Return the state for ``TorchIterable.state_dict``."""
        epoch, seen = self._epoch, self._share if self._ended else self._seen
        if self._ended and self.is_left:
            epoch, seen = epoch + 1, 0
        return {"version": _VERSION, "epoch": epoch, "samples": seen, "part": self._part, "parts": self._parts,
                "loader": self._base}  # fmt: skip

    def samples(self) -> Iterator[Sample]:
        """Yield the samples that have not been seen."""
        samples = (sample for block in self._fetcher for sample in block)
        last: Sample = {}
        try:
            for seen in islice(samples, self._skip if self._seen < self._share else 0):
                last = seen
            for number in range(self._seen, self._share):
                sample = next(samples, None)
                if sample is None and self._last_batch != "pad":  # some were skipped
                    break
                self._seen, self._ended = number + 1, number + 1 == self._share
                last = last if sample is None else sample
                yield self._marked(last, repeats=sample is None)
            self._ended = True
        finally:
            self._fetcher.close()

    def _marked(self, sample: Sample, *, repeats: bool) -> Sample:
        if get_worker_info() is not None:  # the worker pickles samples, and views cannot be pickled
            sample = {name: bytes(value) if type(value) is memoryview else value for name, value in sample.items()}
        if self._last_batch != "pad":
            return sample
        return {**sample, "__valid__": not repeats and sample.get("__valid__", True)}  # "skip" marks substitutes


class _Samples(Iterator[Sample]):
    """The iterator that torch's iterator holds as long as it exists, even after the last sample."""

    def __init__(self, part: _Part) -> None:
        self._part, self._samples = part, part.samples()

    def __next__(self) -> Sample:
        return next(self._samples)

    def __del__(self) -> None:
        self._part.is_left = True


class _Epochs:
    """Assign an epoch number to each iteration, the same for all workers of an iteration.

    Use from one thread per process.

    torch does not signal the start of an iteration to the dataset or its workers, but every worker iterates exactly
    once per iteration. So the n-th claim of a worker belongs with the n-th claims of the other workers of its loader
    (which share a base seed), and the first to arrive takes the next epoch for all. The claims are kept in a log shared
    by all processes; each process replays it.
    """

    def __init__(self, log: SharedLog | None = None) -> None:
        self._log = SharedLog() if log is None else log
        self._log.open()
        self._number = 0
        self._next = 0
        self._turns: dict[tuple[int, ...], int] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def __getstate__(self) -> SharedLog:
        return self._log

    def __setstate__(self, log: SharedLog) -> None:
        self.__init__(log)  # type: ignore[misc]  # a copy replays the log from its beginning

    def set(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._log.append({"set": epoch})

    def claim(self, group: list[int], worker: int, epoch: int | None) -> int:
        """Begin an iteration as one of the workers of ``group``, at ``epoch`` if it is known; return its epoch."""
        self._number += 1
        own = {"group": group, "worker": worker, "by": [os.getpid(), self._number], "epoch": epoch}
        self._log.append(own)
        found = -1
        for record in self._log.take():
            if "set" in record:
                self._next = record["set"]
                continue
            place = (*record["group"], record["worker"])
            turn = self._turns[place] = self._turns.get(place, 0) + 1
            iteration = (*record["group"], turn)
            if record["epoch"] is not None:
                self._known[iteration], self._next = record["epoch"], record["epoch"] + 1
            elif iteration not in self._known:
                self._known[iteration] = self._next
                self._next += 1
            if record == own:
                found = self._known[iteration]
        return found
