"""Loop over shards without an index, with the interface of ``EpochLoop`` but not all of its promises."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from functools import partial

from streaming.common.counters import Metrics
from streaming.errors import ConfigError, StateError
from streaming.order.plan import memory as budget
from streaming.order.plan.order import OrderSettings
from streaming.order.plan.state import LoaderState
from streaming.run.engine.builders import Crew
from streaming.run.engine.threads.pace import WorkerPace
from streaming.run.engine.unindexed.batches import ShardStream
from streaming.run.engine.unindexed.read_ahead import piece_bytes_of
from streaming.run.engine.unindexed.samples import StreamSettings
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run, staged
from streaming.run.loops.base import BaseLoop, LoopConfig, open_crew
from streaming.sets.sources.samples import SampleSource
from streaming.types import override

DEFAULT_WINDOW = 4096
"""Samples in the shuffle window of a set of unknown size. Their bytes are limited to half of memory_limit."""
_WINDOW_SHARE = 0.5
_ARENA_SHARE = 0.0625
"""Part of memory_limit for batches that are read but not built. Pieces of shards get the same, and batches a quarter;
the rest covers memory that the C library retains, since samples leave the window in random order."""

_log = logging.getLogger(__name__)


class _Window:
    """Contents of the arena: batches that are read but not built."""

    def __init__(self, crew: Crew) -> None:
        self._crew, self.limit_bytes = crew, 0

    @property
    def is_broken(self) -> bool:
        """See ``Contents``."""
        return self._crew.abandoned

    def close(self) -> None:
        """See ``Contents``."""
        self._crew.arena.close(keep_mapped=self._crew.abandoned)


class StreamedLoop(BaseLoop[_Window]):
    """Run virtual epochs over shards without an index.

    Raises:
        ConfigError: ``epoch_size`` is missing; without an index, nothing else determines when an epoch ends.
    """

    is_elastic = False
    no_remesh = "without an index an epoch cannot continue on other ranks. Index the shards: shard_tools index URL"

    def __init__(self, dataset: SampleSource, config: LoopConfig) -> None:
        if config.shape.epoch_size is None:
            raise ConfigError(
                f"{dataset.shards.missing_index}. Without an index the set can only be streamed shard after shard, and "
                "needs epoch_size=… to say when an epoch ends"
            )
        if not config.shape.num_batches:
            config.shape.check_enough(config.shape.epoch_size)
        if dataset.cache is not None:
            raise ConfigError(
                f"cache_dir: {dataset.shards.missing_index}, and without an index nothing says which parts of a shard "
                "are kept, and whether they are still the same. Index the shards (shard_tools index URL), or leave "
                "cache_dir out"
            )
        window = dataset.shuffle_config.window
        order = OrderSettings(
            seed=dataset.seed,
            lanes=config.mesh.data_world_size if dataset.shuffle else 1,
            window=(DEFAULT_WINDOW if window is None else window) if dataset.shuffle else 0,
            shuffle=dataset.shuffle,
        )
        super().__init__(dataset, order, config)
        self.dataset = dataset
        self.samples_per_epoch = config.shape.epoch_size
        if config.recipe.portion.fields is not None:
            raise ConfigError(
                f"stage_fields: {dataset.shards.missing_index}, and without an index stages cannot tell how many "
                f"samples a batch has. Index the shards (shard_tools index URL), or leave stage_fields out"
            )
        digest = hashlib.sha256("\n".join(dataset.shards.urls).encode())
        self._shards = f"stream:{digest.hexdigest()}"
        _log.warning(
            "%s: streaming shard after shard. Samples are not dealt out exactly once, a restart re-reads what was "
            "already read, and the number of ranks must not change within an epoch. Index the shards: "
            "shard_tools index URL",
            dataset.shards.missing_index,
        )

    @override
    def _copies_views(self) -> str:
        return "without an index samples are gathered in memory of their own"

    @property
    def _fingerprint(self) -> str:
        """Fingerprint of the shards, and of the number of ranks if the order does not include it."""
        return self._shards if self.order.shuffle else f"{self._shards}@{self.shape.num_ranks}"

    @override
    def batches_left(self, samples_seen: int) -> int:
        return self.shape.batches_in(self.samples_per_epoch - samples_seen)

    @override
    def state_at(self, place: Place) -> LoaderState:
        return LoaderState(
            epoch=place.epoch, samples_seen=place.samples_seen, order=self.order, next_seed=self.position.next_seed,
            fingerprint=self._fingerprint, num_samples=self.samples_per_epoch, epoch_size=self.samples_per_epoch,
            has_begun=place.has_begun, within=self.within_step(place),
        )  # fmt: skip

    def load(self, state: LoaderState) -> None:
        """Continue from ``state``, by reading again all samples before it.

        Raises:
            StateError: It belongs to other shards, or to another number of ranks in the middle of an epoch.
        """
        shards, _, ranks = state.fingerprint.partition("@")
        if shards != self._shards:
            raise StateError("this state belongs to other shards (or to these with an index); open the same shards")
        state.check_fits(epoch_size=self.shape.epoch_size, shuffle=self.order.shuffle)
        began_with = int(ranks) if ranks.isdecimal() else state.order.lanes
        is_inside = state.samples_seen > 0 and not state.is_end
        if is_inside and began_with != self.shape.num_ranks:
            raise StateError(
                f"without an index an epoch that began with {began_with} data-parallel ranks cannot continue with "
                f"{self.shape.num_ranks}. Continue with {began_with}, start the next epoch with set_epoch("
                f"{state.epoch + 1}), or index the shards (shard_tools index URL) and start over"
            )
        if is_inside and state.samples_seen % self.shape.global_batch_size:
            raise StateError(
                "without an index an epoch resumes only after whole batches: the state was saved after "
                f"{state.samples_seen} samples, which are not whole batches of {self.shape.global_batch_size}. Give "
                f"the batch size with which it was saved, or start the next epoch with set_epoch({state.epoch + 1})"
            )
        self.order = replace(state.order, lanes=self.order.lanes)
        self.go_to(self.resumed(Place.of(state), state), state.next_seed)

    def _start(self, place: Place) -> Run:
        return staged(self._stages, lambda: self._read(place), place)

    def _read(self, place: Place) -> ShardStream:
        config = self.config
        self._account.begin(self.samples_per_epoch, place.epoch)
        settings = StreamSettings(
            urls=self.dataset.shards.urls,
            order=self.order,
            epoch=place.epoch,
            dp_rank=config.mesh.data_rank,
            window_bytes=int(config.memory.limit_bytes * _WINDOW_SHARE),
            fields=self.dataset.fields,
            shape=self.shape,
            first_batch=place.samples_seen // config.shape.global_batch_size,
            depth=config.depth,
            piece_bytes=piece_bytes_of(config.memory.limit_bytes),
            keep_duplicates=self.dataset.duplicate_keys == "keep",
            max_gzip_ratio=self.dataset.max_gzip_ratio,
        )
        stream = ShardStream(
            self.dataset.storage,
            settings,
            self._machinery.open(partial(_open_crew, config, self.metrics, self._pace))[0],
            num_builders=config.num_builders,
            batch_bytes=config.memory.batches_bytes,
            metrics=self.metrics,
            report=self._account.bad.report,
        )
        return self._machinery.serves(stream)


def _open_crew(config: LoopConfig, metrics: Metrics, pace: WorkerPace) -> tuple[Crew, _Window]:
    """Return the builders of batches, for all runs."""
    arena_bytes = min(int(config.memory.limit_bytes * _ARENA_SHARE), budget.READ_AHEAD_BYTES)
    crew = open_crew(config, arena_bytes, metrics, pace)
    return crew, _Window(crew)
