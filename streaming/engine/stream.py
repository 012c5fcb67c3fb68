"""Shards without an index: read one after the other, shuffled through a window, dealt out by whole shards.

No promise of exactly once here: nobody knows how many samples there are before they have been read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import Empty, Full, Queue
from typing import Any

import numpy as np

from streaming.engine.build import BadSampleReport, BatchBuilder, Recipe
from streaming.engine.rows import FieldRange, Rows
from streaming.errors import ConfigError
from streaming.order import EpochOrder, OrderSettings
from streaming.storage import Storage, redact
from streaming.tar.samples import iter_samples

PIECE_BYTES = 8 << 20
_PIECES_AHEAD = 4
_PASSES_PER_EPOCH = 1 << 20
"""Room for the pass number below the epoch number: an epoch may go through the shards a million times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSample:
    """One sample as it was read."""

    key: str
    url: str
    fields: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of its fields."""
        return sum(map(len, self.fields.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What one rank reads.

    Attributes:
        urls: All shards.
        order: Seed and window; ``lanes`` is the number of ranks, each going through its own shards.
        epoch: The epoch.
        dp_rank: Whose share.
        window_bytes: Bound on the samples in the window, whatever their number.
        fields: Fields to keep; None: all.
        batch_size: Rows of each batch of this rank.
        first_batch: Batches before this one are read again, but neither decoded nor delivered.
        num_batches: Batches of the epoch.
        depth: Batches built ahead.
    """

    urls: tuple[str, ...]
    order: OrderSettings
    epoch: int
    dp_rank: int
    window_bytes: int
    fields: tuple[str, ...] | None
    batch_size: int
    first_batch: int
    num_batches: int
    depth: int


def shard_sequence(settings: StreamSettings) -> Iterator[str]:
    """This rank's shards without end: pass after pass over all shards, each in an order of its own, every R-th its own.

    Where there are fewer shards than ranks, ranks far apart go through the same shards in different passes.
    """
    num_shards, num_ranks = len(settings.urls), settings.order.lanes
    known, order = -1, np.empty(0, np.int64)
    for place in count(settings.dp_rank, num_ranks):
        number, index = divmod(place, num_shards)
        if number != known:
            epoch = settings.epoch * _PASSES_PER_EPOCH + number
            known, order = number, EpochOrder(np.ones(num_shards, np.int64), settings.order, epoch).chunk_order
        yield settings.urls[int(order[index])]


def read_shard(storage: Storage, url: str) -> Iterator[RawSample]:
    """The samples of one shard, a few pieces read ahead."""
    num_bytes = storage.info(url).size_bytes
    starts = iter(range(0, num_bytes, PIECE_BYTES))
    coming: deque[Future[memoryview]] = deque()

    def pieces() -> Iterator[memoryview]:
        with ThreadPoolExecutor(_PIECES_AHEAD, "shardstream-read") as threads:
            try:
                while True:
                    while len(coming) < _PIECES_AHEAD and (start := next(starts, None)) is not None:
                        stop = min(start + PIECE_BYTES, num_bytes)
                        coming.append(threads.submit(storage.read, url, start, stop))
                    if not coming:
                        return
                    yield coming.popleft().result()
            finally:
                for future in coming:
                    future.cancel()

    shown = redact(url)
    for key, fields in iter_samples(pieces(), shown):
        yield RawSample(key=key, url=shown, fields=fields)


def shuffled(samples: Iterator[RawSample], settings: StreamSettings) -> Iterator[RawSample]:
    """``samples`` through a window: each leaves it at random, when the next one comes in."""
    window = settings.order.window
    if not settings.order.shuffle or window <= 1:
        yield from samples
        return
    draw = np.random.Generator(np.random.Philox(key=[settings.order.seed, settings.epoch * 2**32 + settings.dp_rank]))
    held: list[RawSample] = []
    held_bytes = 0
    for sample in samples:
        held.append(sample)
        held_bytes += sample.num_bytes
        while len(held) > window or (held_bytes > settings.window_bytes and len(held) > 1):
            place = int(draw.integers(len(held)))
            held[place], held[-1] = held[-1], held[place]
            leaving = held.pop()
            held_bytes -= leaving.num_bytes
            yield leaving


class ShardStream:
    """One rank's batches of one epoch, built on a background thread. Used once, then closed.

    Args:
        storage: Where the shards are.
        settings: What to read.
        recipe: How to build it.
        report: Told of every bad sample; may raise to stop the run.
    """

    def __init__(
        self,
        storage: Storage,
        settings: StreamSettings,
        recipe: Recipe,
        report: BadSampleReport,
    ) -> None:
        self._storage = storage
        self._settings = settings
        self._recipe = recipe
        self._report = report
        self._ready: Queue[tuple[Any, BaseException | None] | None] = Queue(settings.depth)
        self._stopped = threading.Event()
        self.reading = ""
        self._thread = threading.Thread(target=self._produce, name="shardstream-stream", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next batch, or the error that kept it from being built."""
        if self._stopped.is_set():
            raise StopIteration
        item = self._ready.get()
        if item is None:
            self.close()
            raise StopIteration
        value, error = item
        if error is not None:
            self.close()
            if isinstance(error, StopIteration):
                raise RuntimeError("a decoder, transform or collate_fn raised StopIteration") from error
            raise error
        return value

    def close(self) -> None:
        """Stop reading."""
        self._stopped.set()
        while True:
            try:
                self._ready.get_nowait()
            except Empty:
                break
        if self._thread is not threading.current_thread():
            self._thread.join()

    def describe(self) -> str:
        """What the stream is at, for people."""
        return f"reading {self.reading or 'nothing yet'}; {self._ready.qsize()} batches ready"

    def _samples(self) -> Iterator[RawSample]:
        seen: set[str] = set()
        for place, url in enumerate(shard_sequence(self._settings)):
            self.reading = url
            for sample in read_shard(self._storage, url):
                if self._stopped.is_set():
                    return
                if place == 0:
                    seen.update(sample.fields)
                yield sample
            missing = [name for name in self._settings.fields or () if name not in seen]
            if missing and place == 0:
                raise ConfigError(
                    f"fields: no sample of {redact(url)} has {missing[0]!r}; its samples have {', '.join(sorted(seen))}"
                )

    def _produce(self) -> None:
        try:
            samples = shuffled(self._samples(), self._settings)
            for number in range(self._settings.num_batches):
                batch = [sample for _, sample in zip(range(self._settings.batch_size), samples, strict=False)]
                if self._stopped.is_set():
                    return
                if number >= self._settings.first_batch and not self._put((self._build(batch), None)):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001  a thread border: the consumer gets it
            self._put((None, error))

    def _put(self, item: tuple[Any, BaseException | None] | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.2)
            except Full:
                continue
            return True
        return False

    def _build(self, batch: list[RawSample]) -> Any:
        def neighbours(row: int) -> Iterator[Rows]:
            for step in range(1, len(batch)):
                yield rows_of([batch[(row + step) % len(batch)]], self._settings.fields)

        return BatchBuilder(self._recipe, neighbours, self._report).build(rows_of(batch, self._settings.fields), None)


def rows_of(samples: list[RawSample], fields: tuple[str, ...] | None) -> Rows:
    """Samples in memory as ``Rows``: their bytes end to end, each field aligned as in a tar."""
    names = sorted({name for sample in samples for name in sample.fields if fields is None or name in fields})
    starts = {name: np.zeros(len(samples), np.int64) for name in names}
    sizes = {name: np.full(len(samples), -1, np.int64) for name in names}
    memory = bytearray()
    for row, sample in enumerate(samples):
        for name in names:
            data = sample.fields.get(name)
            if data is None:
                continue
            starts[name][row], sizes[name][row] = len(memory), len(data)
            memory += data
            memory += bytes(-len(data) % 512)
    whole = bytes(memory)
    return Rows(
        memory=whole,
        view=memoryview(whole),
        keys=[sample.key for sample in samples],
        urls=[sample.url for sample in samples],
        fields={name: FieldRange(starts=starts[name], sizes=sizes[name]) for name in names},
        damage={},
    )
