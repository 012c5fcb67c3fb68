"""Show which samples were in a step of a run, and when a sample comes, from the state and the plan, without any log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import click
import numpy as np

from shard_tools.plan.keys import SamplePlace, all_places, keys_at, places_by_order
from shard_tools.plan.sources import OpenedSet, Planned, sets_of
from shard_tools.running.report import Report
from streaming.arrays import sums
from streaming.errors import ConfigError, NotFoundError, StateError
from streaming.plan.ledger import Ledger
from streaming.plan.order import Orders
from streaming.plan.plan import Plan
from streaming.plan.state import LoaderState
from streaming.storage import Storage, redact
from streaming.types import Int64Array, LastBatch

_MAX_ROWS = 1 << 20  # maximum shown at once; a larger range of steps is surely a mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow(Report):
    """One sample in one step.

    Attributes:
        step: Number of the global batch from the beginning of the run, assuming one batch size throughout.
        epoch: Its epoch.
        batch: Its number in the epoch.
        dp_rank: The data rank that receives the sample.
        source: The sample's source in a mixture; None: the run reads a single dataset.
        number: The sample's number in the dataset, or in the source: ``dataset[number]``.
        shard: URL of its shard.
        key: Its key; None: the index has no sample table.
    """

    step: int
    epoch: int
    batch: int
    dp_rank: int
    source: str | None
    number: int
    shard: str
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Report):
    """The samples of some steps, or the steps of some samples, in the order of the steps.

    Attributes:
        at_step: The step that the state would perform next.
        batches_per_epoch: Steps of each epoch; None: the epoch has no end.
        rows: The samples found.
        left_out: Epochs searched that do not deliver the sample, because it is in their tail.
        looked_at: The steps searched for a key: the first, and one past the last; None if no key was searched for.
        by_order: The places of keys were found by their order; ``--thorough`` reads all keys.
    """

    at_step: int
    batches_per_epoch: int | None
    rows: tuple[StepRow, ...]
    left_out: tuple[int, ...] = ()
    looked_at: tuple[int, int] | None = None
    by_order: bool = False


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The steps of a run over one dataset, or over a mixture with the state's ledger. Reads sample tables for keys.

    Attributes:
        planned: What the run reads.
        state: Determines the order; a changed seed applies from the next epoch on.
        global_batch_size: G.
        num_ranks: R, the number of data ranks.
        last_batch: How the tail is treated.

    Raises:
        StateError: The state belongs to another dataset or mixture.
        ConfigError: An epoch would have no batch.
    """

    planned: Planned
    state: LoaderState
    global_batch_size: int
    num_ranks: int
    last_batch: LastBatch
    _plans: dict[int, Plan] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.state.ledger is None:
            _check_set(self.planned, self.state)
        else:
            _check_mixture(self.planned, self.state.ledger)
            if not isinstance(self.planned, OpenedSet):
                object.__setattr__(self, "planned", self.planned.cut_as(self.state.ledger))
        if not self.batches_per_epoch:
            raise ConfigError("an epoch does not fill one global batch; give the batch size of the run")

    @property
    def batches_per_epoch(self) -> int:
        """Steps of each epoch."""
        return self.plan_of(0).num_batches

    @property
    def is_endless(self) -> bool:
        """Whether the one epoch has no end."""
        return self.plan_of(0).is_endless

    @property
    def at_step(self) -> int:
        """The step that the state would perform next."""
        done = -(-self.state.samples_seen // self.global_batch_size)
        return self.state.epoch * self.batches_per_epoch + min(done, self.batches_per_epoch)

    def plan_of(self, epoch: int) -> Plan:
        """Return the plan of one whole epoch, made once; with a single rank, whose batches are the global batches."""
        if epoch not in self._plans:
            order, seed = self.state.order, self.state.next_seed
            orders = self._orders
            if seed is not None and epoch >= self.state.seeded_from:
                order = replace(order, seed=seed)
                orders = None if orders is None else orders.under(order)
            self._plans[epoch] = Plan(
                self.planned.chunk_samples,
                order,
                global_batch_size=self.global_batch_size,
                dp_world_size=1,
                last_batch=self.last_batch,
                epoch=epoch,
                epoch_size=self.state.epoch_size,
                orders=orders,
            )
        return self._plans[epoch]

    @cached_property
    def _orders(self) -> Orders | None:
        """Return the orders of a mixture with the state's ledger; one object: a mixture without end is one epoch."""
        if self.state.ledger is None or isinstance(self.planned, OpenedSet):
            return None
        return self.planned.orders(self.state.order, self.state.ledger)

    @cached_property
    def _sets(self) -> list[Any]:
        return list(sets_of(self.planned))

    @cached_property
    def _first_chunks(self) -> Int64Array:
        return sums([len(one.chunk_samples) for _, one in self._sets])

    def who(self, steps: range) -> StepReport:
        """List the samples of these steps.

        Raises:
            ConfigError: There are no samples, or more than a million.
        """
        if not steps or steps.start < 0 or len(steps) * self.global_batch_size > _MAX_ROWS:
            raise ConfigError(f"--step: expected some steps of at most {_MAX_ROWS:,} samples in all, got {steps}")
        rows: list[tuple[int, int, int, int]] = []
        for step in steps:
            epoch, batch = divmod(step, self.batches_per_epoch)
            chunks, offsets, ranks = self._batch(epoch, batch)
            rows += zip([step] * len(chunks), ranks.tolist(), chunks.tolist(), offsets.tolist(), strict=True)
        return self._report(self._told(rows))

    def when(self, key: str, steps: range | None = None, *, thorough: bool = False) -> StepReport:
        """Find the steps that contain the samples with this key.

        Args:
            key: The key.
            steps: Where to look. Default: the state's epoch and the next one; for a run without end, all steps up to
                the state's (if sources were removed, only those after the rows they laid), and as many more as draw
                each source that has the key once more.
            thorough: Read all keys, even if ascending keys already gave the place.

        Raises:
            NotFoundError: No sample has this key.
            IndexMissingError: A shard that could hold it has no sample table.
        """
        places: list[tuple[int, SamplePlace]] = []
        if not thorough:
            places = [(at, place) for at, (_, one) in enumerate(self._sets) for place in places_by_order(one, key)]
        by_order = bool(places) and len(self.planned.urls) > 1
        if not places:
            places = [(at, place) for at, (_, one) in enumerate(self._sets) for place in all_places(one, key)]
        if not places:
            what = redact(self.planned.urls[0])
            raise NotFoundError(f"--key: no sample of {what} and its neighbors has the key {key!r}")
        looked_at = self._searched(places) if steps is None else steps
        rows = [
            (step, rank, chunk, place.offset)
            for number, place in places
            for chunk in [place.chunk + int(self._first_chunks[number])]
            for step, rank in self._steps_with(chunk, place.offset, looked_at)
        ]
        there = {step // self.batches_per_epoch for step, *_ in rows}
        left_out = [] if steps is not None else [one for one in self._epochs(looked_at) if one not in there]
        report = self._report(self._told(sorted(rows)))
        return replace(
            report, left_out=() if self.state.epoch_size or self.is_endless else tuple(left_out),
            looked_at=(looked_at.start, looked_at.stop), by_order=by_order,
        )  # fmt: skip

    def _epochs(self, steps: range) -> range:
        return range(steps.start // self.batches_per_epoch, -(-steps.stop // self.batches_per_epoch))

    def _searched(self, places: Sequence[tuple[int, SamplePlace]]) -> range:
        """Return the default range of steps to search."""
        if not self.is_endless:
            first = self.state.epoch * self.batches_per_epoch
            return range(first, first + 2 * self.batches_per_epoch)
        ledger, mixture = self.state.ledger, self.planned
        if ledger is None or isinstance(mixture, OpenedSet):
            raise AssertionError("a run without end is of a mixture")
        row = self.state.samples_seen
        names = {self._sets[number][0] for number, _ in places}
        shares = mixture.forecast(ledger).drawn(row, self.global_batch_size)
        ahead = [mixture.sizes[name] / shares[name] for name in names if shares.get(name)]
        orders: Any = self._orders
        first = -(-orders.known_from * self.state.order.lanes // self.global_batch_size)
        return range(first, max(first, self.at_step + 2 * round(max(ahead, default=0)) + 1))

    def _steps_with(self, chunk: int, offset: int, steps: range) -> Iterator[tuple[int, int]]:
        """Find the steps that contain a sample, and the rank that receives it."""
        per_epoch = self.batches_per_epoch
        for epoch in self._epochs(steps):
            plan = self.plan_of(epoch)
            first, last = max(steps.start - epoch * per_epoch, 0), min(steps.stop - epoch * per_epoch, per_epoch)
            for batch in dict.fromkeys(batch for batch, _ in plan.when(chunk, offset, first=first, last=last)):
                chunks, offsets, ranks = self._batch(epoch, batch)
                for rank in ranks[(chunks == chunk) & (offsets == offset)].tolist():
                    yield epoch * per_epoch + batch, rank

    def _batch(self, epoch: int, batch: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return chunk, offset and rank of each row of a global batch."""
        found = self.plan_of(epoch).rank_batches(batch, batch + 1, 0)
        count = int(found.valid.sum())
        shape = replace(self.plan_of(epoch).shape, num_ranks=self.num_ranks)
        ranks = shape.rank_of(np.arange(count), max(count, 1))
        return found.chunk_ids[found.valid], found.offsets[found.valid], ranks

    def _report(self, rows: Sequence[StepRow]) -> StepReport:
        per_epoch = None if self.is_endless else self.batches_per_epoch
        return StepReport(at_step=self.at_step, batches_per_epoch=per_epoch, rows=tuple(rows))

    def _told(self, rows: Sequence[tuple[int, int, int, int]]) -> list[StepRow]:
        """Describe samples given as (step, rank, chunk, offset)."""
        chunks = np.array([row[2] for row in rows], np.int64)
        offsets = np.array([row[3] for row in rows], np.int64)
        sources = np.searchsorted(self._first_chunks, chunks, side="right") - 1
        told: dict[int, tuple[str | None, int, str, str | None]] = {}
        for source in np.unique(sources).tolist():
            name, one = self._sets[source]
            at = np.flatnonzero(sources == source)
            within = chunks[at] - self._first_chunks[source]
            starts = np.cumsum(one.chunk_samples) - one.chunk_samples
            numbers = (starts[within] + offsets[at]).tolist()
            keys, urls = keys_at(one, within, offsets[at]), one.urls_of(within)
            for row, number, url, key in zip(at.tolist(), numbers, urls, keys, strict=True):
                told[row] = (name or None, number, url, key)
        return [
            StepRow(
                step=step, epoch=step // self.batches_per_epoch, batch=step % self.batches_per_epoch, dp_rank=rank,
                source=told[at][0], number=told[at][1], shard=told[at][2], key=told[at][3],
            )
            for at, (step, rank, *_) in enumerate(rows)
        ]  # fmt: skip


def _check_set(planned: Planned, state: LoaderState) -> None:
    if not isinstance(planned, OpenedSet):
        raise StateError(
            "--state: it belongs to a single data set, but a mixture was given; give the URL of that data set"
        )
    if state.fingerprint != planned.fingerprint:
        raise StateError(
            f"--state: it is of {state.num_samples} samples with fingerprint {state.fingerprint}, but these shards "
            f"have {planned.table.total_samples} and {planned.fingerprint}: give the set that the run reads, with its "
            "--where, --view or --subset (ranges such as dataset[a:b] are not worked out here)"
        )


def _check_mixture(planned: Planned, ledger: Ledger) -> None:
    """Reject a mixture without a source about which the ledger says too little; additional sources do not matter.

    Raises:
        StateError: Such a source is missing.
    """
    if isinstance(planned, OpenedSet):
        raise StateError(
            f"--state: it belongs to a mixture of {', '.join(ledger.sources)}; give the JSON file that describes it in "
            "place of a URL (docs/mixing.md)"
        )
    there, quotas = planned.names, ledger.last.quotas
    elsewhere = ", or give a state that was saved since it was dropped"
    missing, why = planned.needed(ledger), f"its chunks say where the others stand. Put it back{elsewhere}"
    if quotas is None and not missing:
        last = ledger.segments()[-1][1]
        missing = sorted(name for name in last if last[name] and name not in there)
        why = f"it is drawn from to the end of the run. Put it back{elsewhere}"
    if quotas is not None:
        missing, why = sorted(set(quotas) - set(there)), "an epoch is laid of all of them. Put it back"
    if missing:
        raise StateError(
            f"--state: it belongs to a mixture with the source {missing[0]!r}, which the file lacks; it has "
            f"{', '.join(sorted(there))}, and {why}"
        )
    if quotas is not None and set(quotas) != set(there):
        more = ", ".join(sorted(set(there) - set(quotas)))
        raise StateError(
            f"--state: it belongs to a mixture that ends and has no source {more}: remove it from the file"
        )


def open_run(
    planned: Planned, state_url: str, *, storage: Storage, global_batch_size: int, num_ranks: int, last_batch: LastBatch
) -> PlannedRun:
    """Open the run that a saved ``loader.state_dict()`` (JSON) belongs to.

    Raises:
        StateError: The file holds no state, or that of another dataset or mixture.
    """
    try:
        content = json.loads(bytes(storage.read(state_url)))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{redact(state_url)}: not JSON ({error}); save json.dumps(loader.state_dict())") from error
    if not isinstance(content, Mapping):
        raise StateError(f"{redact(state_url)}: expected an object, as loader.state_dict() gives it")
    return PlannedRun(
        planned=planned,
        state=LoaderState.from_dict(content),
        global_batch_size=global_batch_size,
        num_ranks=num_ranks,
        last_batch=last_batch,
    )


def parse_steps(text: str) -> range:
    """Parse ``100`` as one step, ``100..110`` as steps 100 to 109.

    Raises:
        ConfigError: The text is neither.
    """
    first, dots, stop = text.partition("..")
    try:
        return range(int(first), int(stop) if dots else int(first) + 1)
    except ValueError as error:
        raise ConfigError(f"--step: expected a step such as 100 or a range such as 100..110, got {text!r}") from error


def show_steps(report: StepReport) -> None:
    """Print a line for each sample of each step."""
    every = (
        "one epoch without end" if report.batches_per_epoch is None else f"{report.batches_per_epoch:,} steps an epoch"
    )
    click.echo(f"{every}; the state goes on with step {report.at_step:,}")
    for row in report.rows:
        name = f"sample {row.number}" if row.key is None else ascii(row.key)[1:-1]
        place = f"epoch {row.epoch}, batch {row.batch}, data rank {row.dp_rank}"
        source = "" if row.source is None else f"source {row.source}, "
        click.echo(f"step {row.step}: {name} ({source}{place}; {redact(row.shard)}, number {row.number})")
    for epoch in report.left_out:
        click.echo(f"epoch {epoch}: not in it; it is left out with the tail")
    if report.looked_at is not None and not report.rows and not report.left_out:
        click.echo(f"not in steps {report.looked_at[0]:,} to {report.looked_at[1]:,}; --step A..B looks elsewhere")
    if report.by_order:
        click.echo(
            "Keys that come once are taken to ascend; --thorough reads all of them, for keys that come twice", err=True
        )
