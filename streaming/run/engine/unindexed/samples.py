"""Read shards without an index sequentially, shuffled through a window, and deal whole shards to ranks.

Exactly-once delivery cannot be promised: the number of samples is unknown until they have been read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from streaming.common.inflate import MAX_GZIP_RATIO
from streaming.errors import ConfigError
from streaming.order.plan.order import EpochOrder, OrderSettings
from streaming.order.plan.settings import Shape
from streaming.run.engine.unindexed.read_ahead import PIECE_BYTES, ReadAhead
from streaming.shards.tar.passed_over import PassedOver
from streaming.shards.tar.samples import MAX_SAMPLE_BYTES, iter_samples
from streaming.storage import redact

_log = logging.getLogger(__name__)

LEAST_SAMPLE_BYTES = 64 << 20
"""Size limit of a sample, however small the window is."""

_PASSES_PER_EPOCH = 1 << 20
"""Room for the pass number below the epoch number: an epoch may read the shards a million times."""
_SAMPLE_BYTES = 400
_FIELD_BYTES = 64
"""Overhead in Python of a sample, and of each of its fields: resident memory of 100,000 samples was 446 bytes per
sample with one field, 510 with three, 850 with eight (CPython 3.11, keys of 8 characters, 2026-11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSample:
    """One sample as read."""

    key: str
    url: str
    fields: dict[str, bytes]

    @property
    def held_bytes(self) -> int:
        """Memory that the sample keeps alive while it is referenced."""
        return _SAMPLE_BYTES + _FIELD_BYTES * len(self.fields) + sum(map(len, self.fields.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """The shards of an epoch, their order, and the share of one rank.

    Attributes:
        urls: All shards.
        order: Seed and window.
        epoch: The epoch.
        dp_rank: The data rank.
        window_bytes: Limit on the memory of the samples in the window, whatever their number.
        fields: Fields to keep; None: all.
        shape: Number of batches in the epoch, and the rows of each.
        first_batch: Batches before this one are read again, but neither decoded nor delivered.
        depth: Number of batches built ahead.
        piece_bytes: Size of one request in bytes.
        keep_duplicates: A field that comes twice in a sample begins a new one.
        max_gzip_ratio: Shards that inflate to more than this multiple of their size are rejected.
    """

    urls: tuple[str, ...]
    order: OrderSettings
    epoch: int
    dp_rank: int
    window_bytes: int
    fields: tuple[str, ...] | None
    shape: Shape
    first_batch: int
    depth: int
    piece_bytes: int = PIECE_BYTES
    keep_duplicates: bool = False
    max_gzip_ratio: float = MAX_GZIP_RATIO


def shard_sequence(settings: StreamSettings) -> Iterator[str]:
    """Yield this rank's shards without end: every R-th shard, pass after pass, each pass in its own order.

    If there are fewer shards than ranks, distant ranks read the same shards in different passes.
    """
    num_shards, num_ranks = len(settings.urls), settings.shape.num_ranks
    known, order = -1, np.empty(0, np.int64)
    for place in count(settings.dp_rank, num_ranks):
        number, index = divmod(place, num_shards)
        if number != known:
            epoch = settings.epoch * _PASSES_PER_EPOCH + number
            known, order = number, EpochOrder(np.ones(num_shards, np.int64), settings.order, epoch).chunk_order
        yield settings.urls[int(order[index])]


def read_shard(
    reader: ReadAhead, url: str, *, keep_duplicates: bool = False, max_gzip_ratio: float = MAX_GZIP_RATIO,
    max_sample_bytes: int = MAX_SAMPLE_BYTES, left_out: Callable[[str], None] | None = None,
) -> Iterator[RawSample]:  # fmt: skip
    """Yield the samples of one shard. ``left_out`` is called with the name of each file that belongs to no sample."""
    shown = redact(url)
    samples = iter_samples(
        reader.pieces(url), shown, repeats=keep_duplicates, max_gzip_ratio=max_gzip_ratio,
        max_sample_bytes=max_sample_bytes, larger="raise memory_limit: a sample may take half of it (or 64 MiB)",
        left_out=left_out,
    )  # fmt: skip
    for key, fields in samples:
        yield RawSample(key=key, url=shown, fields=fields)


def shuffled(samples: Iterator[RawSample], settings: StreamSettings) -> Iterator[RawSample]:
    """Yield ``samples`` shuffled through a window: a random sample leaves it when the next one comes in."""
    window = settings.order.window
    if not settings.order.shuffle or window <= 1:
        yield from samples
        return
    draw = np.random.Generator(np.random.Philox(key=[settings.order.seed, settings.epoch * 2**32 + settings.dp_rank]))
    held: list[RawSample] = []
    held_bytes = 0
    for sample in samples:
        held.append(sample)
        held_bytes += sample.held_bytes
        while len(held) > window or (held_bytes > settings.window_bytes and len(held) > 1):
            place = int(draw.integers(len(held)))
            held[place], held[-1] = held[-1], held[place]
            leaving = held.pop()
            held_bytes -= leaving.held_bytes
            yield leaving


def samples_of(reader: ReadAhead, settings: StreamSettings, before: Callable[[str], None]) -> Iterator[RawSample]:
    """Yield this rank's samples without end, in delivery order.

    Args:
        reader: Reads shards.
        settings: The shards and the share to read.
        before: Called with the shard's URL before every sample is read; may raise to stop.

    Raises:
        ConfigError: No sample of the first shard has one of the wanted fields, or there is no sample at all.
    """
    return shuffled(_read_all(reader, settings, before), settings)


def _read_all(reader: ReadAhead, settings: StreamSettings, before: Callable[[str], None]) -> Iterator[RawSample]:
    seen: set[str] = set()
    is_checked, num_empty = settings.fields is None, 0
    passed_over, names = PassedOver(), list[str]()
    for url in shard_sequence(settings):
        before(url)
        num_empty += 1
        samples = read_shard(
            reader, url, keep_duplicates=settings.keep_duplicates, max_gzip_ratio=settings.max_gzip_ratio,
            max_sample_bytes=max(LEAST_SAMPLE_BYTES, settings.window_bytes), left_out=names.append,
        )  # fmt: skip
        for sample in samples:
            before(url)
            num_empty = 0
            if not is_checked:
                seen.update(sample.fields)
            yield sample
        if not passed_over.num_files:
            passed_over = passed_over.and_of(redact(url), names)
            if passed_over.num_files:
                _log.warning("%s (later shards may hold more; this is logged once)", passed_over)
        names.clear()
        if num_empty == len(settings.urls):
            raise ConfigError(
                f"no samples in {redact(settings.urls[0])} and {len(settings.urls) - 1} other shards: this rank read "
                f"{num_empty} shards in a row and found none. A sample is one or more files KEY.FIELD, with "
                f"a dot in their names; check the URLs, and list the files with `tar tf`"
            )
        if is_checked or not seen:
            continue
        is_checked = True
        missing = [name for name in settings.fields or () if name not in seen]
        if missing:
            raise ConfigError(
                f"fields: no sample of {redact(url)} has {missing[0]!r}; its samples have {', '.join(sorted(seen))}"
            )
