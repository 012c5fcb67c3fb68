"""Read one rank's batches of one epoch from shards without an index, and schedule reading, building and waiting.

Life cycle of a batch k::

    read and shuffled -> gathered in the arena -> being built -> built -> delivered

- One thread reads, so that the order does not depend on which thread builds. It gathers batches while the arena has
  room.
- Builder threads, or the consumer, take gathered batches from the arena and build them.
- Batches are delivered in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from streaming.build.batches.build import BadSampleReport, BatchBuilder, Mask
from streaming.build.batches.draws import epoch_key
from streaming.build.batches.rows import Cuts, Rows, cut_up
from streaming.common.arguments import format_bytes
from streaming.common.counters import Metrics
from streaming.common.monitor import Monitor
from streaming.run.engine.builders import Crew
from streaming.run.engine.delivery import Delivery
from streaming.run.engine.unindexed.gather import Packing, alone, neighbors, pack_samples
from streaming.run.engine.unindexed.read_ahead import ReadAhead, StreamClosedError
from streaming.run.engine.unindexed.samples import RawSample, StreamSettings, samples_of
from streaming.storage import Storage, redact

_SHOWN_ROWS = 16
"""Number of samples read for a batch without rows: one of them must be readable and kept by transform."""
_ALONE = -1
"""Start of a batch that does not fit into the arena. It gets memory of its own, while the arena is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A batch whose bytes have been gathered.

    Attributes:
        rows: Its rows; for a batch without any, rows that show the form of a row.
        valid: bool [n], False for rows that are only padding; None if there is no padding.
        is_empty: Whether the batch has no rows.
        start: Place of the rows in the arena, or ``_ALONE``.
        num_bytes: Size of the rows.
    """

    rows: Rows
    valid: Mask
    is_empty: bool
    start: int
    num_bytes: int


class ShardStream(Delivery):
    """Deliver the batches of shards that are read sequentially; see ``Delivery``.

    Args:
        storage: Store of the shards.
        settings: The shards, their order and the share to read.
        crew: Arena and builder; the arena must not be shared.
        num_builders: Number of background threads that build batches, or wait for worker processes that do.
        batch_bytes: Limit on the bytes of batches that are built but not delivered; one is always allowed.
        metrics: Counts waits.
        report: Called with every bad sample; may raise to stop the run.
    """

    def __init__(
        self, storage: Storage, settings: StreamSettings, crew: Crew, *, num_builders: int, batch_bytes: int,
        metrics: Metrics, report: BadSampleReport,
    ) -> None:  # fmt: skip
        super().__init__(
            crew.builder, crew, first=settings.first_batch, num_batches=settings.shape.num_batches,
            num_builders=num_builders, depth=settings.depth, batch_bytes=batch_bytes, metrics=metrics, report=report,
            changed=Monitor(),
        )  # fmt: skip
        self._settings = settings
        self._draw_key = epoch_key(settings.order.seed, settings.epoch)
        self._reader = ReadAhead(storage, settings.piece_bytes, metrics)
        self._crew = crew
        self._arena = crew.arena
        self._gathered: dict[int, _Gathered] = {}
        self._in_use = 0
        self._num_gathered = settings.first_batch
        self._reading = ""
        self._start(self._read_all)

    # --- Delivery's interface ---

    def _num_ready(self) -> int:
        """Return the number of batches, from the first one, that have been gathered in the arena."""
        return self._num_gathered

    def _stop_reading(self) -> None:
        self._reader.close()

    def _told(self, number: int) -> dict[str, Any]:
        shape = self._settings.shape
        samples = shape.rows(number, self._settings.dp_rank)[1]
        return {"batch": number, "row": number * shape.global_batch_size, "samples": samples}

    def _give_back(self) -> None:
        """Free the room in the arena."""
        while self._gathered:
            self._free(self._gathered.popitem()[1])

    def _status(self) -> list[str]:
        number = self._handed_out
        if self._closed or number >= self._num_batches:
            waits_for = "the epoch is over"
        elif number in self._results:
            waits_for = "is built"
        elif number >= self._num_gathered:
            waits_for = "waits for its samples"
        else:
            waits_for = "is being built" if number < self._started else "can be built"
        batch = (
            f"batch {number} of {self._num_batches}: {waits_for}; {self._num_gathered} batches read, "
            f"{self._started} started, {len(self._results)} wait for delivery"
        )
        arena = f"{format_bytes(self._arena.used_bytes)} of {format_bytes(self._arena.budget_bytes)} in use"
        reading = redact(self._reading) if self._reading else "nothing yet"
        return [batch, f"arena: {arena}", f"reading {reading}"]

    # --- reading ---

    def _read_all(self) -> None:
        number = 0
        try:
            samples = samples_of(self._reader, self._settings, self._before_sample)
            for number in range(self._num_batches):
                self._read_batch(samples, number)
        except StreamClosedError:
            return
        except BaseException as error:  # noqa: BLE001  thread boundary: the consumer gets it after earlier batches
            with self._changed:
                # Replaces the batch that could not be read: those before it are delivered first.
                self._results[max(number, self._settings.first_batch)] = None, error
                self._changed.notify_all()
        finally:
            self._reader.close()

    def _before_sample(self, url: str) -> None:
        if self._closed:
            raise StreamClosedError
        self._reading = url

    def _read_batch(self, samples: Iterator[RawSample], number: int) -> None:
        """Take the samples of a batch. An empty one, or padding without samples, takes a few to show their form."""
        real, num_rows = self._settings.shape.rows(number, self._settings.dp_rank)
        taken = list(islice(samples, real or _SHOWN_ROWS))
        if self._closed:
            raise StreamClosedError
        if number >= self._first:
            rows = [taken[row % (real or len(taken))] for row in range(num_rows)] or taken
            is_padded = self._settings.shape.last_batch == "pad"
            valid = np.arange(num_rows) < real if is_padded else None
            self._gather(number, pack_samples(rows, self._settings.fields), valid, is_empty=num_rows == 0)

    def _gather(self, number: int, packing: Packing, valid: Mask, *, is_empty: bool) -> None:
        with self._changed:
            while (start := self._admit(number, packing.num_bytes)) is None:
                self._changed.wait()
            self._in_use += 1  # its room is reserved, but it cannot be built until filled
            self._metrics.peak("arena_peak_bytes", self._arena.used_bytes)
        arena = self._arena
        rows = packing.place_alone() if start == _ALONE else packing.place(arena.memory, arena.view, start)
        gathered = _Gathered(rows=rows, valid=valid, is_empty=is_empty, start=start, num_bytes=packing.num_bytes)
        with self._changed:  # the batch may now be built
            self._gathered[number] = gathered
            self._num_gathered = number + 1
            self._changed.notify_all()

    def _admit(self, number: int, num_bytes: int) -> int | None:
        """Return the place of batch ``number`` in the arena. Call with the lock held.

        None if there is no room, or enough is read ahead.
        """
        if self._closed:
            raise StreamClosedError
        if number - self._started >= self._settings.depth:
            return None
        if num_bytes > self._arena.budget_bytes:
            return None if self._in_use else _ALONE
        return self._arena.allocate(num_bytes)

    def _free(self, batch: _Gathered) -> None:
        """Free the batch's bytes, which are no longer needed. Call with the lock held."""
        self._in_use -= 1
        if batch.start != _ALONE:
            self._arena.free(batch.start, batch.num_bytes)

    # --- building ---

    def _build(self, number: int) -> Any:
        with self._changed:
            batch = self._gathered.pop(number)  # owned by this thread from here on, which frees its room
        try:
            cuts = self._cuts(number, 0 if batch.is_empty else len(batch.rows.keys))
            if batch.is_empty:
                return cut_up(cuts, 0, lambda *_: self._nothing(batch.rows))
            positions = self._settings.shape.positions(number, self._settings.dp_rank)
            rows = replace(batch.rows, positions=positions, cuts=cuts)
            return self._builder.build(
                rows, batch.valid, lambda row: neighbors(batch.rows, row), self._report, seed=self._draw_key,
                batch=number,
            )  # fmt: skip
        finally:
            with self._changed:  # the next batch may use its room
                self._free(batch)
                self._changed.notify_all()

    def _cuts(self, number: int, num_rows: int) -> Cuts:
        """Return where this rank's rows of a batch are cut into micro-batches."""
        shape = self._settings.shape
        left = shape.num_samples - number * shape.global_batch_size
        return shape.cuts(min(shape.global_batch_size, left), num_rows)

    def _nothing(self, rows: Rows) -> Any:
        """Return the batch of no rows, by some that show what a row looks like."""
        shown = (alone(rows, row) for row in range(len(rows.keys)))
        return BatchBuilder(self._crew.recipe, lambda _: iter(()), self._report).empty(shown)
