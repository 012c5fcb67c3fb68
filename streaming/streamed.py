"""The loop over shards without an index: the same surface as ``EpochLoop``, without its promises."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

from streaming.bad_samples import BadSamples
from streaming.dataset import StreamingDataset
from streaming.engine.stream import ShardStream, StreamSettings
from streaming.errors import ConfigError, StateError
from streaming.loop import LoopConfig
from streaming.metrics import Metrics
from streaming.order import OrderSettings, checked_int
from streaming.state import LoaderState

DEFAULT_WINDOW = 4096
"""Samples in the shuffle window of a set whose size nobody knows; bounded in bytes by half of memory_limit."""
_WINDOW_SHARE = 0.5

_log = logging.getLogger(__name__)


class StreamedLoop:
    """Virtual epochs over shards without an index. Used by one thread, but for ``metrics`` and ``close``.

    Raises:
        ConfigError: ``epoch_size`` is missing: without an index nothing else says when an epoch ends.
    """

    def __init__(self, dataset: StreamingDataset, config: LoopConfig) -> None:
        if config.epoch_size is None:
            raise ConfigError(
                f"{dataset.shards.missing_index}. Such a set can only be streamed, shard after shard, and needs "
                f"epoch_size=… to say when an epoch ends (or, much better, an index: shard_tools index URL)"
            )
        if config.epoch_size < config.global_batch_size:
            raise ConfigError(
                f"epoch_size: {config.epoch_size} is less than one global batch of {config.global_batch_size}"
            )
        self.dataset = dataset
        self.config = config
        self.metrics = Metrics()
        self.epoch = 0
        self.samples_seen = 0
        self._resume_at = 0
        self.next_seed: int | None = None
        window = dataset.shuffle_config.window
        self.order = OrderSettings(
            seed=dataset.seed,
            lanes=config.mesh.data_world_size,
            window=(DEFAULT_WINDOW if window is None else window) if dataset.shuffle else 0,
            shuffle=dataset.shuffle,
        )
        self._bad = BadSamples(dataset.max_bad_samples, self.metrics)
        self._running: ShardStream | None = None
        _log.warning(
            "%s: streaming shard after shard. Samples are not dealt out exactly once, a restart reads again what was "
            "read, and world size and worker count must stay. Cure: shard_tools index URL",
            dataset.shards.missing_index,
        )

    @property
    def num_batches(self) -> int:
        """Batches of a whole epoch: ``epoch_size`` in full global batches, rounded down."""
        return (self.config.epoch_size or 0) // self.config.global_batch_size

    def run(self) -> Iterator[Any]:
        """The rest of the epoch in progress, batch by batch."""
        self._stop_running()
        start, self._resume_at = self._resume_at, 0
        self.samples_seen = start
        if start == 0 and self.next_seed is not None:
            self.order = OrderSettings(**{**self.order.to_dict(), "seed": self.next_seed})
            self.next_seed = None
        done = start // self.config.global_batch_size
        self._bad.start_epoch(self.config.epoch_size or 0)
        stream = self._running = self._stream()
        try:
            for number, batch in enumerate(stream):
                if number < done:
                    continue
                self.samples_seen += self.config.global_batch_size
                self.metrics.add("batches")
                yield batch
            if self._running is not stream:
                return
        finally:
            stream.close()
            if self._running is stream:
                self._running = None
        self.epoch += 1
        self.samples_seen = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; where it is the one in progress, a loaded position is kept."""
        if checked_int("epoch", epoch, 0, 2**62) != self.epoch:
            self._stop_running()
            self.epoch, self.samples_seen, self._resume_at = epoch, 0, 0

    def set_seed(self, seed: int) -> None:
        """A new order from the next epoch that starts."""
        self.next_seed = checked_int("seed", seed, 0, 2**64 - 1)

    def state(self) -> LoaderState:
        """The position; the same on every rank."""
        size = self.config.epoch_size or 1
        return LoaderState(
            epoch=self.epoch, samples_seen=self.samples_seen or self._resume_at, order=self.order,
            next_seed=self.next_seed, fingerprint=self._fingerprint(), num_samples=size, epoch_size=size,
        )  # fmt: skip

    def load(self, state: LoaderState) -> None:
        """Go on from ``state``, by reading again what was read.

        Raises:
            StateError: It belongs to other shards, or to another number of ranks in the middle of an epoch.
        """
        if state.fingerprint != self._fingerprint():
            raise StateError("this state belongs to other shards (or to shards with an index); open the same ones")
        if state.epoch_size != self.config.epoch_size:
            raise StateError(f"epoch_size: the state has {state.epoch_size}, this loader {self.config.epoch_size}")
        if state.samples_seen and state.order.lanes != self.order.lanes:
            raise StateError(
                f"without an index an epoch cannot go on with {self.order.lanes} data-parallel ranks that began with "
                f"{state.order.lanes}. Go on with {state.order.lanes}, begin the next epoch with set_epoch("
                f"{state.epoch + 1}), or index the shards (shard_tools index URL) and start anew"
            )
        self._stop_running()
        self.epoch, self.samples_seen, self._resume_at = state.epoch, state.samples_seen, state.samples_seen
        self.order = OrderSettings(**{**state.order.to_dict(), "lanes": self.order.lanes})
        self.next_seed = state.next_seed

    def report(self) -> dict[str, Any]:
        """All metrics, and this epoch's bad samples by name."""
        return {**self.metrics.snapshot(), "bad": self._bad.listing()}

    def describe(self) -> str:
        """What the loop waits for at this moment."""
        running = self._running
        return "not running" if running is None else running.describe()

    def close(self) -> None:
        """Stop reading."""
        self._stop_running()

    def _stop_running(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _stream(self) -> ShardStream:
        config, rank, ranks = self.config, self.config.mesh.data_rank, self.config.mesh.data_world_size
        size = config.global_batch_size * (rank + 1) // ranks - config.global_batch_size * rank // ranks
        settings = StreamSettings(
            urls=self.dataset.shards.urls, order=self.order, epoch=self.epoch, dp_rank=rank,
            window_bytes=int(config.memory_limit_bytes * _WINDOW_SHARE), fields=self.dataset.fields,
        )  # fmt: skip
        sizes = iter([size] * self.num_batches)
        return ShardStream(self.dataset.storage, settings, sizes, config.recipe, config.depth, self._bad.report)

    def _fingerprint(self) -> str:
        return "stream:" + hashlib.sha256("\n".join(self.dataset.shards.urls).encode()).hexdigest()
