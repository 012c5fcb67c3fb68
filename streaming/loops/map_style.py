"""Loops over ordinary torch data sets, with the same surface as ``streaming.loops.fetcher.EpochLoop``.

Map-style data sets (``__getitem__`` and ``__len__``) keep all promises: exactly once, equal ends, elastic, resumable to
the batch. Iterable ones keep what they make possible; see ``streaming.loops.iterable``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset

from streaming.batches.collate import empty_like
from streaming.errors import ConfigError
from streaming.loops.iterable import Again, IterableLoop
from streaming.loops.ordinary_options import Collate, OrdinaryConfig, shut_down, with_valid
from streaming.metrics import Metrics
from streaming.plan.permutation import hash_words
from streaming.plan.state import LoaderState
from streaming.samplers.device_mesh import DeviceMeshSampler
from streaming.samplers.retry import RetrySampler

__all__ = [
    "MapLoop",
    "OrdinaryConfig",
    "OrdinaryLoop",
    "is_iterable",
    "is_map_style",
    "open_ordinary",
    "resolve_dataset",
]


def is_map_style(dataset: object) -> bool:
    """Whether samples can be had by their number."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_iterable(dataset)


def is_iterable(dataset: object) -> bool:
    """Whether samples come one after the other, and no other way."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def resolve_dataset(dataset: Any) -> Any:
    """The data set itself, or what a callable makes; one that makes iterators is kept, and called for every pass."""
    if isinstance(dataset, type) or (callable(dataset) and not is_map_style(dataset) and not is_iterable(dataset)):
        made = dataset()
        return Again(dataset) if hasattr(made, "__next__") else made
    return dataset


def open_ordinary(dataset: Any, config: OrdinaryConfig) -> OrdinaryLoop:
    """The loop for a map-style or iterable data set, or for what a callable makes of either.

    Raises:
        ConfigError: It is neither, or the choices do not go together.
    """
    dataset = resolve_dataset(dataset)
    if hasattr(dataset, "__next__"):
        raise ConfigError(
            f"dataset: this {type(dataset).__name__} can be read once only; give the function that makes it"
        )
    if isinstance(dataset, (str, bytes, Mapping)):
        raise ConfigError(
            f"dataset: expected a StreamingDataset or a torch data set; a {type(dataset).__name__} is none"
        )
    if is_iterable(dataset):
        return IterableLoop(dataset, config)
    if is_map_style(dataset):
        return MapLoop(dataset, config)
    raise ConfigError(
        f"dataset: expected a StreamingDataset, or a map-style (__getitem__ and __len__) or iterable (__iter__) torch "
        f"data set, or a function that makes one; got {dataset!r}"
    )


class MapLoop:
    """Epochs over a map-style data set. Used by one thread.

    Random numbers that the data set or ``collate_fn`` draws in worker processes are seeded by (seed, data rank); the
    promises are about which samples come, not about what random transforms make of them.

    Args:
        dataset: ``dataset[i]`` is called in worker processes, if there are any.
        config: See there.

    Raises:
        ConfigError: The choices do not go together.
    """

    state_type = LoaderState

    def __init__(self, dataset: Any, config: OrdinaryConfig) -> None:
        self.dataset = dataset
        self.config = config
        self.metrics = Metrics()
        self.sampler = DeviceMeshSampler(
            dataset, global_batch_size=config.global_batch_size, device_mesh=config.mesh, shuffle=config.shuffle,
            seed=config.seed, last_batch=config.last_batch, epoch_size=config.epoch_size,
        )  # fmt: skip
        self._retry = RetrySampler(
            self.sampler, dataset, on_error=config.on_error, max_retries=config.max_retries,
            max_bad_samples=config.max_bad_samples, metrics=self.metrics,
        )  # fmt: skip
        self._loader: DataLoader[Any] | None = None
        self._running: Iterator[Any] | None = None
        self._waiting = False

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one to start."""
        return self.sampler.epoch

    @property
    def num_batches(self) -> int:
        """Batches of a whole epoch."""
        return len(self.sampler)

    def run(self) -> Iterator[Any]:
        """The rest of the epoch in progress, batch by batch; the position moves on before a batch is handed out.

        A loop that is left early stands where it was left in ``state``, but a new one starts the epoch anew.
        """
        batches = self._running = self._retry.follow(self._open())
        try:
            last: Any = {}
            for number, batch in enumerate(self._waited_for(batches)):
                last = self._finished(batch, number, last)
                self.metrics.add("batches")
                yield last
                if self._running is not batches:
                    return
        except GeneratorExit:
            raise
        except BaseException:
            self.close()
            raise
        finally:
            if self._running is batches:
                self._running = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; where it is the one in progress, a loaded position is kept."""
        if epoch != self.epoch:
            self._running = None
        self.sampler.set_epoch(epoch)

    def set_seed(self, seed: int) -> None:
        """A new order from the next epoch that starts."""
        self.sampler.set_seed(seed)

    def state(self) -> LoaderState:
        """The position; the same on every rank."""
        return self.sampler.state()

    def load(self, state: LoaderState) -> None:
        """Go on from ``state``.

        Raises:
            StateError: It belongs to another data set, epoch size or kind of order.
        """
        self.sampler.load(state)
        self._running = None

    def report(self) -> dict[str, Any]:
        """All metrics, and this epoch's bad samples by their index."""
        bad = self._retry.bad
        return {**self.metrics.snapshot(), "bad": bad}

    def describe(self) -> str:
        """What the loop waits for at this moment."""
        if self._running is None:
            return "not running"
        if not self._waiting:
            return "the consumer has a batch"
        workers = self.config.num_workers
        where = f"{workers} torch worker processes" if workers else "this process"
        return f"waiting for {type(self.dataset).__name__}[…] and collate_fn in {where}"

    def close(self) -> None:
        """Stop worker processes. The loop may be used again; it starts them anew."""
        loader, self._loader, self._running = self._loader, None, None
        if loader is not None:
            shut_down(loader._iterator)
            loader._iterator = None
        self._retry.close()

    def _open(self) -> DataLoader[Any]:
        """One loader for all epochs: its worker processes stay."""
        if self._loader is None:
            seed = hash_words(self.sampler.order.seed, self.config.mesh.data_rank) >> 1
            self._loader = DataLoader(
                self._retry.dataset,
                batch_sampler=self._retry,
                collate_fn=Collate(self.config.collate_fn),
                persistent_workers=self.config.persistent_workers and self.config.num_workers > 0,
                generator=torch.Generator().manual_seed(seed),
                **self.config.torch_options(self.config.num_workers),
            )
        return self._loader

    def _waited_for(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, with the seconds that the consumer waits counted."""
        end = object()
        while True:
            self._waiting = True
            with self.metrics.timed("wait_for_batch_s"):
                batch = next(batches, end)
            self._waiting = False
            if batch is end:
                return
            yield batch

    def _finished(self, batch: Any, number: int, last: Any) -> Any:
        if self.config.last_batch == "pad":
            return with_valid(batch, self.sampler.valid_mask(number))
        if isinstance(batch, dict) and not batch and self.config.last_batch == "partial":
            if not isinstance(last, Mapping):
                raise ConfigError(
                    f'last_batch="partial": the last global batch has fewer samples than there are ranks, and an empty '
                    f'{type(last).__name__} cannot be made; give samples that are dicts, or use "drop" or "pad"'
                )
            return empty_like(last)
        return batch


OrdinaryLoop: TypeAlias = MapLoop | IterableLoop
"""What ``open_ordinary`` gives."""
