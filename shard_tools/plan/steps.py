"""Say who was in a step of a run, and when a sample comes: worked out from the state and the plan, without any log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import click
import numpy as np

from shard_tools.running.report import Report
from streaming.catalog.open import open_shards, sample_table
from streaming.errors import ConfigError, IndexMissingError, NotFoundError, StateError
from streaming.index.chunk_table import ChunkTable
from streaming.index.sample_table import SampleTable
from streaming.plan.plan import Plan
from streaming.plan.state import LoaderState
from streaming.storage import Storage, redact
from streaming.types import Int64Array, LastBatch

_MAX_ROWS = 1 << 20  # shown at once; a range of steps beyond it is surely a mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow(Report):
    """One sample in one step.

    Attributes:
        step: Global batch, counted from the beginning of the run, all of it with this batch size.
        epoch: Its epoch.
        batch: Its number in the epoch.
        dp_rank: The data rank that gets the sample.
        number: The sample's number in the data set.
        shard: URL of its shard.
        key: Its key; None: the index has no sample table.
    """

    step: int
    epoch: int
    batch: int
    dp_rank: int
    number: int
    shard: str
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Report):
    """Samples of some steps, or steps of some samples, in the order of the steps.

    Attributes:
        at_step: The step that the state would do next.
        batches_per_epoch: Steps of each epoch.
        rows: What was asked for.
        left_out: Epochs that were looked at in which the sample does not come, as it is in their tail.
    """

    at_step: int
    batches_per_epoch: int
    rows: tuple[StepRow, ...]
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The steps of a run over one data set. Pure but for ``samples_of``, which loads a shard's sample table.

    Attributes:
        table: The chunk table.
        urls: Its shards.
        state: Says the order; a changed seed counts from the epoch after the state's.
        global_batch_size: G.
        num_ranks: R, the data ranks.
        last_batch: What becomes of the tail.
        samples_of: The sample table of a shard, by number, or None.

    Raises:
        StateError: The state belongs to another data set.
        ConfigError: It is of a mixture, or no epoch has a batch.
    """

    table: ChunkTable
    urls: Sequence[str]
    state: LoaderState
    global_batch_size: int
    num_ranks: int
    last_batch: LastBatch
    samples_of: Callable[[int], SampleTable | None]
    _plans: dict[tuple[int, int], Plan] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.state.ledger is not None:
            raise ConfigError("--state: of a mixture; steps are worked out for single data sets")
        if self.state.fingerprint != self.table.fingerprint:
            raise StateError(
                f"--state: of {self.state.num_samples} samples with fingerprint {self.state.fingerprint}, but these "
                f"shards have {self.table.total_samples} and {self.table.fingerprint}: give the set that the "
                "run reads; views and filters are not worked out here"
            )
        if not self.batches_per_epoch:
            raise ConfigError("an epoch does not fill one global batch; give the batch size of the run")

    @property
    def batches_per_epoch(self) -> int:
        """Steps of each epoch."""
        return self.plan_of(0).num_batches

    @property
    def at_step(self) -> int:
        """The step that the state would do next."""
        done = -(-self.state.samples_seen // self.global_batch_size)
        return self.state.epoch * self.batches_per_epoch + min(done, self.batches_per_epoch)

    def plan_of(self, epoch: int, *, num_ranks: int | None = None) -> Plan:
        """Make the plan of one epoch, from its beginning; each once."""
        order, seed, ranks = self.state.order, self.state.next_seed, num_ranks or self.num_ranks
        if (epoch, ranks) in self._plans:
            return self._plans[epoch, ranks]
        self._plans[epoch, ranks] = plan = Plan(
            self.table.num_samples,
            order if seed is None or epoch <= self.state.epoch else replace(order, seed=seed),
            global_batch_size=self.global_batch_size,
            dp_world_size=ranks,
            last_batch=self.last_batch,
            epoch=epoch,
            epoch_size=self.state.epoch_size,
        )
        return plan

    def who(self, steps: range) -> StepReport:
        """List the samples of these steps.

        Raises:
            ConfigError: They are none, or more than a million samples.
        """
        if not steps or steps.start < 0 or len(steps) * self.global_batch_size > _MAX_ROWS:
            raise ConfigError(f"--step: expected some steps of at most {_MAX_ROWS:,} samples in all, got {steps}")
        return self._report([row for step in steps for row in self._rows(step)])

    def when(self, key: str, epochs: range) -> StepReport:
        """Find the steps that the samples of this key are in.

        Raises:
            NotFoundError: No sample has this key.
            IndexMissingError: A shard has no sample table, and could hold it.
        """
        places = self._places(key)
        rows: list[StepRow] = []
        left_out = []
        for epoch in epochs:
            before = len(rows)
            for batch in self._batches_with(epoch, places):
                step = epoch * self.batches_per_epoch + batch
                rows += [row for row in self._rows(step) if row.key == key]
            if len(rows) == before:
                left_out.append(epoch)
        return self._report(rows, left_out)

    def _report(self, rows: list[StepRow], left_out: Sequence[int] = ()) -> StepReport:
        return StepReport(
            at_step=self.at_step, batches_per_epoch=self.batches_per_epoch, rows=tuple(rows), left_out=tuple(left_out)
        )

    def _rows(self, step: int) -> Iterator[StepRow]:
        epoch, batch = divmod(step, self.batches_per_epoch)
        plan = self.plan_of(epoch)
        starts = np.concatenate([[0], np.cumsum(self.table.num_samples)])
        for dp_rank in range(self.num_ranks):
            found = plan.rank_batches(batch, batch + 1, dp_rank)
            for chunk, offset in zip(found.chunk_ids[found.valid], found.offsets[found.valid], strict=True):
                shard = int(self.table.shard[chunk])
                samples = self.samples_of(shard)
                yield StepRow(
                    step=step,
                    epoch=epoch,
                    batch=batch,
                    dp_rank=dp_rank,
                    number=int(starts[chunk] + offset),
                    shard=self.urls[shard],
                    key=None if samples is None else samples.keys[int(self.table.first_sample[chunk] + offset)],
                )

    def _places(self, key: str) -> set[tuple[int, int]]:
        """Find (chunk, offset) of the samples of this key."""
        places = set()
        for shard, url in enumerate(self.urls):
            samples = self.samples_of(shard)
            if samples is None:
                raise IndexMissingError(f"{redact(url)}: the index has no sample table of it; run `shard_tools index`")
            chunks = np.flatnonzero(self.table.shard == shard)
            for row in [row for row, known in enumerate(samples.keys) if known == key]:
                chunk = chunks[np.searchsorted(self.table.first_sample[chunks], row, side="right") - 1]
                places.add((int(chunk), row - int(self.table.first_sample[chunk])))
        if not places:
            raise NotFoundError(f"--key: no sample of {redact(self.urls[0])} and its neighbours has the key {key!r}")
        return places

    def _batches_with(self, epoch: int, places: set[tuple[int, int]]) -> list[int]:
        """Find the batches that hold one of ``places``, among those in which its chunk is in the window."""
        plan = self.plan_of(epoch, num_ranks=1)
        intervals = plan.chunk_intervals(0)
        batches: set[int] = set()
        for row in np.flatnonzero(np.isin(intervals.chunk_ids, [chunk for chunk, _ in places])).tolist():
            first, last = int(intervals.first_batches[row]), int(intervals.last_batches[row]) + 1
            found = plan.rank_batches(first, last, 0)
            wanted = self._is_in(found.chunk_ids, found.offsets, places)
            number = np.searchsorted(found.row_splits, np.flatnonzero(wanted), side="right") - 1
            batches.update((first + number).tolist())
        return sorted(batches)

    @staticmethod
    def _is_in(chunk_ids: Int64Array, offsets: Int64Array, places: set[tuple[int, int]]) -> Any:
        return np.logical_or.reduce([(chunk_ids == chunk) & (offsets == offset) for chunk, offset in places])


def open_run(
    urls: Sequence[str],
    state_url: str,
    *,
    storage: Storage,
    index_url: str | None,
    global_batch_size: int,
    num_ranks: int,
    last_batch: LastBatch,
) -> Run:
    """Open the run that a saved ``loader.state_dict()`` (JSON) belongs to; reads the index, never the data.

    Raises:
        StateError: The file holds no state.
        IndexMissingError: There is no index.
    """
    shards = open_shards(storage, urls, index_url)
    if shards.table is None:
        raise IndexMissingError(shards.missing_index)
    try:
        content = json.loads(bytes(storage.read(state_url)))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{redact(state_url)}: not JSON ({error}); save json.dumps(loader.state_dict())") from error
    if not isinstance(content, Mapping):
        raise StateError(f"{redact(state_url)}: expected an object, as loader.state_dict() gives it")
    tables: dict[int, SampleTable | None] = {}
    load = partial(sample_table, storage, shards)
    return Run(
        table=shards.table,
        urls=shards.urls,
        state=LoaderState.from_dict(content),
        global_batch_size=global_batch_size,
        num_ranks=num_ranks,
        last_batch=last_batch,
        samples_of=lambda shard: tables[shard] if shard in tables else tables.setdefault(shard, load(shard)),
    )


def parse_steps(text: str) -> range:
    """Read ``100`` as one step, ``100..110`` as those from 100 on and before 110.

    Raises:
        ConfigError: It is neither.
    """
    first, dots, stop = text.partition("..")
    try:
        return range(int(first), int(stop) if dots else int(first) + 1)
    except ValueError as error:
        raise ConfigError(f"--step: expected a step such as 100 or a range such as 100..110, got {text!r}") from error


def show_steps(report: StepReport) -> None:
    """Print a line for each sample of each step."""
    click.echo(f"{report.batches_per_epoch:,} steps an epoch; the state goes on with step {report.at_step:,}")
    for row in report.rows:
        name = f"sample {row.number}" if row.key is None else ascii(row.key)[1:-1]
        place = f"epoch {row.epoch}, batch {row.batch}, data rank {row.dp_rank}"
        click.echo(f"step {row.step}: {name} ({place}; {redact(row.shard)}, number {row.number})")
    for epoch in report.left_out:
        click.echo(f"epoch {epoch}: not in it; it is left out with the tail")
