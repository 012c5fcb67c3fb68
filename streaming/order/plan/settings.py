"""Hold the user's choices of order and batch shape, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, TypeVar, get_args

import numpy as np

from streaming.common.arguments import (
    MAX_COUNT,
    MAX_SEED,
    check_choice,
    checked_int,
    checked_last_batch,
    checks_names,
    merged_last_batch,
)
from streaming.errors import ConfigError
from streaming.order.plan.order import (
    MAX_LANES,
    MAX_WINDOW,
    OrderSettings,
    Scope,
    default_lanes,
    default_window,
)  # fmt: skip
from streaming.order.plan.sizes import RunSteps, Sizes
from streaming.types import Int64Array, LastBatch

_Count = TypeVar("_Count", int, Int64Array)


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleConfig:
    """Configure how an epoch is shuffled. All values are part of the order's identity and are saved in checkpoints.

    ::

        dataset = StreamingDataset(url, shuffle=ShuffleConfig(seed=7, window=4096))

    Attributes:
        seed: Seed of the order; overrides the dataset's ``seed`` if given.
        window: W, in samples: how far a sample may move within its lane. None: twice the mean number of samples per
            chunk, so that a lane draws from about five chunks at a time.
        lanes: L, the number of equal parts of an epoch, each with its own sequence of chunks. None: the largest divisor
            of the global batch size that is at most max(16, an eighth of it).
        scope: ``"global"``: every epoch permutes all chunks. ``"lane"``: every epoch permutes the chunks within each
            lane, and lanes keep their samples. While the number of ranks stays the same and divides the lanes, a rank
            reads the same samples in every epoch, so its node's cache serves all epochs after the first. This mixes
            less, because samples of different lanes meet only in batches.

    Raises:
        ConfigError: A value is not an integer, or is out of range.
    """

    seed: int | None = None
    window: int | None = None
    lanes: int | None = None
    scope: Scope = "global"

    def __post_init__(self) -> None:
        check_choice("ShuffleConfig: scope", self.scope, get_args(Scope))
        for name, low, high in (("seed", 0, MAX_SEED), ("window", 0, MAX_WINDOW), ("lanes", 1, MAX_LANES)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checked_int(f"ShuffleConfig: {name}", value, low, high))


def order_settings(
    *,
    shuffle: bool,
    seed: int,
    lanes: int | None,
    window: int | None,
    global_batch_size: int,
    num_samples: int,
    num_chunks: int,
    scope: Scope = "global",
) -> OrderSettings:
    """Return the order settings of a dataset in a loader: the user's choices, with defaults for the rest.

    Args:
        shuffle: False: storage order, regardless of ``lanes`` and ``window``.
        seed: Seed of the order.
        lanes: L, or None for the default of the global batch size.
        window: W in samples, or None for twice the mean number of samples per chunk.
        global_batch_size: G.
        num_samples: Number of samples in the dataset.
        num_chunks: Number of its chunks.
        scope: See ``ShuffleConfig``.
    """
    if not shuffle:
        return OrderSettings(seed=seed, lanes=1, window=0, shuffle=False)
    return OrderSettings(
        seed=seed,
        lanes=lanes or default_lanes(global_batch_size),
        window=default_window(num_samples, num_chunks) if window is None else window,
        scope=scope,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Compute the batches and rows of an epoch that is dealt in order, independent of what the samples are.

    Attributes:
        sizes: G, samples of one batch over all ranks, by row of the run.
        num_ranks: R, the number of data-parallel ranks.
        last_batch: Treatment of samples that do not fill a batch; see ``Plan``.
        epoch_size: Samples of an epoch; None: all samples.
        micro_batch_size: Most rows of a micro-batch, into which a rank's share of a batch is cut; None: it is not cut.

    Raises:
        ConfigError: A number is not an integer or is out of range, or ``last_batch`` is none of the three.
    """

    sizes: Sizes
    num_ranks: int
    last_batch: LastBatch = "drop"
    epoch_size: int | None = None
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        limits = (("num_ranks", 2**31 - 1), ("epoch_size", MAX_COUNT), ("micro_batch_size", 2**31 - 1))
        for name, most in limits:
            value = getattr(self, name)
            if value is not None or name == "num_ranks":  # perhaps a NumPy type, and states are JSON
                object.__setattr__(self, name, checked_int(name, value, 1, most))
        checked_last_batch(self.last_batch)

    @classmethod
    def chosen(
        cls, batch_size: object, global_batch_size: object, num_ranks: int, *, last_batch: str = "drop",
        drop_last: bool | None = None, epoch_size: int | None = None, micro_batch_size: int | None = None,
    ) -> Self:  # fmt: skip
        """Return the shape that a user chose, by torch's names or ours; each rank gets a row of a full batch.

        Args:
            batch_size: Samples per rank, or a schedule of them; exactly one of it and ``global_batch_size`` is given.
            global_batch_size: Samples over all ranks, or a schedule of them.
            num_ranks: R.
            last_batch: See ``Plan``.
            drop_last: torch's name: True for ``"drop"``, False for ``"partial"``.
            epoch_size: Samples of a virtual epoch, or None.
            micro_batch_size: Most rows of a micro-batch, or None.

        Raises:
            ConfigError: Neither or both sizes are given, or a value is invalid.
        """
        sizes = Sizes.chosen(batch_size, global_batch_size, num_ranks)
        known = checked_last_batch(merged_last_batch(last_batch, drop_last=drop_last))
        return cls(
            sizes=sizes, num_ranks=num_ranks, epoch_size=epoch_size, last_batch=known,
            micro_batch_size=micro_batch_size,
        )  # fmt: skip

    def at(self, row: int) -> Self:
        """Return the shape in which all batches have the size of the batch that begins at a row of the run."""
        return replace(self, sizes=Sizes.constant(self.sizes.at(row)))

    def steps(self, num_samples: int, epoch: int = 0, seen: int = 0) -> RunSteps:
        """Return the steps of a run with epochs of ``num_samples`` samples, for a place in one of them."""
        return RunSteps(
            sizes=self.sizes, epoch_size=num_samples, last_batch=self.last_batch, epoch=epoch, seen=seen
        )  # fmt: skip

    def check_one_size(self) -> None:
        """Refuse a schedule of batch sizes, for loops that do not support one.

        Raises:
            ConfigError: The size of batches changes.
        """
        if not self.sizes.is_constant:
            raise ConfigError(
                "batch_size: a Schedule of batch sizes needs a StreamingDataset with an index, or a Mixture, that the "
                "training process reads itself; give an integer"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples of the first batch of the run, over all ranks; of every batch if the size is constant."""
        return self.sizes.at(0)

    @property
    def num_samples(self) -> int:
        """``epoch_size``, if known.

        Raises:
            ConfigError: It is None.
        """
        if self.epoch_size is None:
            raise ConfigError("epoch_size: give it; nothing else defines when an epoch ends")
        return self.epoch_size

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.batches_in(self.num_samples)

    def batches_in(self, num_samples: int) -> int:
        """Return how many global batches ``num_samples`` samples fill; 0 if negative."""
        whole = num_samples // self.global_batch_size
        return max(0, whole if self.last_batch == "drop" else -(-num_samples // self.global_batch_size))

    def share(self, size: _Count, rank: int) -> tuple[_Count, _Count]:
        """Return the range ``[low, high)`` of ``size`` ordered samples that one rank gets."""
        return size * rank // self.num_ranks, size * (rank + 1) // self.num_ranks

    def rank_of(self, place: _Count, size: int) -> _Count:
        """Return the rank that gets the sample at a place among ``size`` ordered ones: the inverse of ``share``."""
        return ((place + 1) * self.num_ranks - 1) // size

    def rows_of(self, rank: int) -> int:
        """Return the number of samples of one rank in a full batch."""
        low, high = self.share(self.global_batch_size, rank)
        return high - low

    @property
    def most_rows(self) -> int:
        """Maximum rows of a rank in a full batch; with ``"pad"``, every rank has this many rows in every batch."""
        return -(-self.global_batch_size // self.num_ranks)

    def rows(self, batch: int, rank: int) -> tuple[int, int]:
        """Return the number of rows of one rank in a batch: without padding, and with it."""
        low, high = self.share(min(self.global_batch_size, self.num_samples - batch * self.global_batch_size), rank)
        return high - low, self.most_rows if self.last_batch == "pad" else high - low

    def positions(self, batch: int, rank: int) -> Int64Array:
        """Return the place in the epoch's global order of each row of one rank in a batch, int64 [n].

        Padding repeats samples.
        """
        start = batch * self.global_batch_size
        low, _ = self.share(min(self.global_batch_size, self.num_samples - start), rank)
        real, num_rows = self.rows(batch, rank)
        return start + low + np.arange(num_rows) % max(1, real)

    def num_parts(self, num_samples: int, row: int = 0) -> int:
        """Return micro-batches of a batch, the same on every rank.

        As few as give no rank more than ``micro_batch_size`` rows at once; 1 if batches are not cut.

        Args:
            num_samples: Samples of the batch over all ranks, padding not counted.
            row: Row of the run at which it begins.
        """
        if self.micro_batch_size is None:
            return 1
        size = self.sizes.at(row) if self.last_batch == "pad" else num_samples
        most = -(-size // self.num_ranks)
        return max(1, -(-most // self.micro_batch_size))

    def cuts(self, num_samples: int, num_rows: int, row: int = 0) -> tuple[int, ...] | None:
        """Return where a rank's rows of a batch are cut into micro-batches, which differ by at most one row.

        Args:
            num_samples: Samples of the batch over all ranks, padding not counted.
            num_rows: This rank's rows of it.
            row: Row of the run at which it begins.

        Returns:
            The first row of each, and the end of the last; None: batches are not cut.
        """
        if self.micro_batch_size is None:
            return None
        parts = self.num_parts(num_samples, row)
        return tuple(num_rows * part // parts for part in range(parts + 1))

    def num_parts_of(self, row: int, num_samples: int) -> int:
        """Return micro-batches of all batches that ``num_samples`` samples from a row of the run on make."""
        found = 0
        while (count := self.sizes.batches_alike(row, num_samples, self.last_batch)) and num_samples > 0:
            size = self.sizes.at(row)
            whole = min(count, num_samples // size)
            found += whole * self.num_parts(size, row)
            found += self.num_parts(num_samples - whole * size, row) if count > whole else 0
            row, num_samples = row + count * size, num_samples - count * size
        return found

    def check_enough(self, num_samples: int) -> None:
        """Refuse epochs without a batch, or in which some rank would get no sample.

        Raises:
            ConfigError: ``num_samples`` samples are too few.
        """
        if num_samples < self.num_ranks and self.last_batch != "pad":
            raise ConfigError(
                f"{num_samples} samples cannot be dealt to {self.num_ranks} data-parallel ranks: some would get none "
                f'all epoch. Use last_batch="pad", at most {num_samples} ranks, or epoch_size to repeat the data'
            )
        row, size = next(
            ((row, size) for row, size in self.sizes.steps if self.last_batch == "drop" and size > num_samples),
            (0, 0),
        )
        if size:
            when = f"an epoch that begins at row {row:,} or later" if row else "the epoch"
            raise ConfigError(
                f"{num_samples} samples do not fill one global batch of {size} ({self.num_ranks} "
                f'ranks), and last_batch="drop" drops incomplete batches: {when} would be empty. Use '
                f'last_batch="pad" or "partial", a smaller batch, or epoch_size to repeat the data'
            )
