"""Show which samples were in a step of a run, and when a sample comes, from the state and the plan, without any log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, cast

import click
import numpy as np

from shard_tools.look.plan.report import PlanOptions
from shard_tools.look.plan.sets import Described, PlannedSets, StepRows
from shard_tools.running.report import Report, plain_place
from streaming.common.arguments import some_names
from streaming.errors import ConfigError, NotFoundError, StateError
from streaming.order.mixing.forecast import drawn_before
from streaming.order.plan.ledger import Ledger
from streaming.order.plan.order import ENDLESS, Orders
from streaming.order.plan.plan import Plan, dealt
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import RunSteps, Sizes, Steps
from streaming.order.plan.state import LoaderState
from streaming.storage import Storage, redact
from streaming.types import LastBatch

if TYPE_CHECKING:
    from streaming.sets.sources.keys import KeysOfShards
    from streaming.sets.sources.mixed import AnySource, MixedSource

_MAX_ROWS = 1 << 20  # maximum shown at once; a larger range is surely a mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow(Report):
    """One sample, or one pack, in one step.

    Attributes:
        step: Number of the global batch from the beginning of the run.
        epoch: Epoch of the step.
        batch: Number of the batch in its epoch.
        dp_rank: The data rank that receives the sample.
        source: Its ``__source__`` in batches of a mixture; None: batches have none.
        number: The sample's number in the dataset, or in the source: ``dataset[number]``.
        shard: URL of its shard.
        key: Its key; None: the index has no sample table. Left out of the JSON-able form of packs.
        keys: The keys of a pack's documents. None for samples, and left out of their JSON-able form.
        num_rows: Rows of the batch that a pack fills. Left out of the JSON-able form of samples.
        time: Moment of a window in its recording, in seconds. Left out of the JSON-able form of others.
    """

    step: int
    epoch: int
    batch: int
    dp_rank: int
    source: str | None
    number: int
    shard: str
    key: str | None
    keys: tuple[str | None, ...] | None = None
    num_rows: int = 1
    time: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        values = Report.as_dict(self)
        for name in ("keys", "num_rows") if self.keys is None else ("key",):
            del values[name]
        if self.time is None:
            del values["time"]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Report):
    """The samples of some steps, or the steps of some samples, ordered by step.

    Attributes:
        at_step: The next step of the state.
        batches_per_epoch: Steps of the state's epoch; None: the epoch has no end.
        rows: The samples found.
        left_out: Searched epochs that do not deliver the sample, because it is in their tail.
        looked_at: The steps searched for a key: the first, and one past the last; None if no key was searched for.
        by_order: Keys were found by their order; ``--thorough`` reads all keys.
    """

    at_step: int
    batches_per_epoch: int | None
    rows: tuple[StepRow, ...]
    left_out: tuple[int, ...] = ()
    looked_at: tuple[int, int] | None = None
    by_order: bool = False


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The steps of a run over a dataset, or over a mixture with the state's ledger. Reads sample tables for keys.

    Batches before the state have the sizes that it records, later ones the given sizes. Without a record, earlier
    batches are assumed to have the given sizes too; those of the state's epoch are then known only if they fit.

    Attributes:
        planned: The dataset or mixture that the run reads.
        state: Determines the order; a changed seed applies from the next epoch on.
        global_batch_size: G.
        num_ranks: R, the number of data ranks.
        last_batch: How the tail is treated.
        keys: Returns the keys of a set's shards.

    Raises:
        StateError: The state belongs to another dataset or mixture.
        ConfigError: An epoch would have no batch.
    """

    planned: AnySource
    state: LoaderState
    global_batch_size: int | Sizes
    num_ranks: int
    last_batch: LastBatch
    keys: Callable[[Any], KeysOfShards] = attrgetter("shard_keys")
    _plans: dict[int, list[tuple[int, Plan]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "planned", planned_as(self.planned, self.state))
        if self.state.ledger is not None:
            self.mixture.deal.check_shape(self.shape)
        if not self.steps.count(self.state.epoch):
            raise ConfigError("an epoch does not fill one global batch; give the batch size of the run")

    @classmethod
    def begun(cls, planned: AnySource, shape: Shape, **more: Any) -> Self:
        """Return a run that begins without a state, in batches of a shape; ``more`` are attributes of the class.

        Raises:
            ConfigError: Training would refuse the shape.
        """
        num_samples = int(planned.chunk_samples.sum())
        if not num_samples:
            raise ConfigError("the data set is empty; look at what is there with `shard_tools info`")
        order, mixture = planned.order_settings(shape.sizes.size_for_lanes), cast("MixedSource", planned)
        ledger = None
        if planned.names:
            mixture.deal.check_shape(shape)
            ledger = mixture.begun(shape.global_batch_size, order)
        shape.check_enough(shape.epoch_size or (num_samples if ledger is None else ledger.last.blend.samples_per_pass))
        state = LoaderState(
            epoch=0, samples_seen=0, order=order, fingerprint=planned.fingerprint, num_samples=num_samples,
            ledger=ledger, epoch_size=shape.epoch_size, batch_sizes=shape.sizes, **planned.items.facts(),
        )  # fmt: skip
        return cls(
            planned=planned, state=state, global_batch_size=shape.sizes, num_ranks=shape.num_ranks,
            last_batch=shape.last_batch, **more,
        )  # fmt: skip

    @property
    def mixture(self) -> MixedSource:
        """The mixture that the run reads."""
        mixture: Any = self.planned
        found: MixedSource = mixture
        return found

    @cached_property
    def shape(self) -> Shape:
        """The shape of the global batches; with a single rank, they are that rank's batches."""
        sizes, was = Sizes.of(self.global_batch_size), self.state.batch_sizes
        if was is not None:
            sizes = was.followed_by(sizes, self.state.epoch * self.num_samples + self.state.samples_seen)
        return Shape(
            sizes=sizes, num_ranks=1, last_batch=self.last_batch, epoch_size=self.state.epoch_size,
        )  # fmt: skip

    @cached_property
    def num_samples(self) -> int:
        """Number of samples per epoch."""
        if self.state.epoch_size is not None:
            return self.state.epoch_size
        return self.orders.samples_per_pass

    @cached_property
    def steps(self) -> RunSteps:
        """The positions of the run's steps."""
        return self.shape.steps(self.num_samples, self.state.epoch, self.state.samples_seen)

    @cached_property
    def sets(self) -> PlannedSets:
        """The sets that describe its rows."""
        return PlannedSets(planned=self.planned, keys=self.keys)

    @property
    def is_endless(self) -> bool:
        """Whether the run is a single epoch without end."""
        return self.num_samples >= ENDLESS

    def plans_of(self, epoch: int) -> list[tuple[int, Plan]]:
        """Return the plans of one epoch with the number of their first batch, made once.

        In the state's epoch, batches before the state may have had other sizes; then only later ones are returned.
        """
        if epoch not in self._plans:
            is_whole = self.steps.fits or epoch != self.state.epoch
            number, start = (0, 0) if is_whole else (self.steps.begun, self.state.samples_seen)
            order, seed, orders = self.state.order, self.state.next_seed, self.orders
            if seed is not None and epoch >= self.state.seeded_from:
                order = replace(order, seed=seed)
                orders = orders.under(order)
            found = []
            for plan in Plan.of_epoch(
                self.shape, self.planned.chunk_samples, order, epoch=epoch, start=start, orders=orders
            ):
                found.append((number, plan))
                number += plan.num_batches
            self._plans[epoch] = found
        return self._plans[epoch]

    @cached_property
    def orders(self) -> Orders:
        """Return the orders, with the state's ledger for a mixture; made once: a mixture without end is one epoch."""
        order, ledger = self.state.order, self.state.ledger
        return self.planned.orders(order) if ledger is None else self.mixture.orders(order, ledger)

    def drawn_before(self, row: int) -> dict[str, int]:
        """Count the samples of each source of a mixture before a row of the run."""
        orders: Any = self.orders
        return drawn_before(orders, row)

    def who(self, steps: range) -> StepReport:
        """List the samples of these steps.

        Raises:
            ConfigError: There are no samples, or more than a million; or a step lies before the state, in batches of
                another size.
        """
        if not steps or steps.start < 0 or len(steps) * self.shape.sizes.most > _MAX_ROWS:
            raise ConfigError(f"--step: expected some steps of at most {_MAX_ROWS:,} samples in all, got {steps}")
        self._check_known(steps.start)
        return self._report(self._step_rows(StepRows.joined([self.rows_of(step) for step in steps])))

    def when(self, key: str, steps: range | None = None, *, thorough: bool = False) -> StepReport:
        """Find the steps that contain the samples with this key; of a document in several packs, the step of each pack.

        Args:
            key: The key.
            steps: Steps to search. Default: the state's epoch and the next one; for a run without end, all steps up to
                the state's (if sources were removed, only those after the rows that they determined), and enough
                further steps to draw each source with the key once more.
            thorough: Read all keys, even if ascending keys already gave a result.

        Raises:
            NotFoundError: No sample has this key, or all samples with it are left out.
            IndexMissingError: A shard that could hold the sample has no sample table.
        """
        places, by_order = self.sets.with_key(key, thorough=thorough)
        looked_at = self.searched([number for number, *_ in places]) if steps is None else steps
        rows = self.rows_at(places, looked_at)
        if rows is None:
            raise NotFoundError(self.sets.why_key_left_out(key, places))
        report = self._report(sorted(self._step_rows(rows), key=lambda row: (row.step, row.dp_rank)))
        left_out: tuple[int, ...] = ()
        if steps is None and not (self.state.epoch_size or self.is_endless):
            epochs = range(self.state.epoch + bool(self.steps.unknown), self.state.epoch + 2)
            left_out = tuple(epoch for epoch in epochs if epoch not in {row.epoch for row in report.rows})
        return replace(report, left_out=left_out, looked_at=(looked_at.start, looked_at.stop), by_order=by_order)

    def rows_at(self, places: Sequence[tuple[int, int, int]], steps: range) -> StepRows | None:
        """Return the rows of steps that hold some samples; None: the samples are never delivered.

        Args:
            places: Set, shard, and number in the shard of each sample.
            steps: Steps to search.

        Raises:
            ConfigError: The steps lie before the state, in batches of another size.
        """
        self._check_known(steps.start)
        found = [self._rows_with(*place, steps) for place in places]
        if not any(is_delivered for _, is_delivered in found):
            return None
        return StepRows.joined([row for rows, _ in found for row in rows])

    def searched(self, numbers: Sequence[int], *, is_whole: bool = True) -> range:
        """Return the default range of steps to search.

        Args:
            numbers: Numbers of the sets in which samples are searched.
            is_whole: Search a run without end from its first step; else from about one pass of the sets before the
                state.
        """
        if not self.is_endless:
            first = self.steps.first(self.state.epoch) + len(self.steps.unknown)
            return range(first, self.steps.first(self.state.epoch + 2))
        ledger, row = self.state.ledger, self.state.samples_seen
        if ledger is None:
            raise AssertionError("a run without end is of a mixture")
        size = self.shape.at(row).global_batch_size
        names = {self.sets.each[number][0] for number in numbers}
        shares = self.mixture.drawing.forecast(ledger).drawn(row, size)
        ahead = [self.mixture.sizes[name] / shares[name] for name in names if shares.get(name)]
        orders: Any = self.orders
        known = orders.known_from * self.state.order.lanes
        passed = round(max(ahead, default=0))
        first = self.shape.sizes.batches(0, known, "partial") if self.steps.fits else self.steps.begun
        if not is_whole:
            first = max(first, self.steps.at - passed)
        return range(first, max(first, self.steps.at + 2 * passed + 1))

    def _check_known(self, step: int) -> None:
        """Refuse steps of the state's epoch before its place if batches there had other sizes.

        Raises:
            ConfigError: The step is one of these.
        """
        unknown = self.steps.unknown
        if step in unknown:
            raise ConfigError(
                f"--step {step}: the state is at sample {self.state.samples_seen:,} of epoch {self.state.epoch}, "
                f"where no batch of {self.shape.at(self.steps.row_of(self.state.epoch)).global_batch_size:,} ends: "
                f"batches before it had another size. Give the size that they had, or steps from {unknown.stop:,} on"
            )

    def _rows_with(self, number: int, shard: int, row: int, steps: range) -> tuple[list[StepRows], bool]:
        """Find the rows of steps that hold a sample of a set; also return whether the set delivers it at all."""
        one = self.sets.each[number][1]
        within = one.chunk_with(shard, row)
        if within is None:
            return [], False
        chunk = within + int(self.sets.first_chunks[number])
        delivered, rows = False, []
        for first, plan in self._stretches(steps):
            low, high = max(steps.start - first, 0), min(steps.stop - first, plan.num_batches)
            offsets = self._offsets(chunk, shard, row, plan, low, high)
            delivered |= bool(offsets)
            batches = {batch for offset in offsets for batch, _ in plan.when(chunk, offset, first=low, last=high)}
            for batch in sorted(batches):
                found = self.rows_of(first + batch)
                found = found.where(np.flatnonzero(found.chunk_ids == chunk))
                rows.append(found.where(self._holds(found, shard, row)))
        return rows, delivered or not steps

    def _stretches(self, steps: range) -> Iterator[tuple[int, Plan]]:
        """Yield the plans of some steps, with the first step of each."""
        epoch, first = self.steps.epoch_at(steps.start)
        while first < steps.stop:
            for number, plan in self.plans_of(epoch):
                if first + number < steps.stop and first + number + plan.num_batches > steps.start:
                    yield first + number, plan
            first, epoch = first + self.steps.count(epoch), epoch + 1
            if not self.steps.count(epoch):
                return

    def _offsets(self, chunk: int, shard: int, row: int, plan: Plan, low: int, high: int) -> list[int]:
        """Return the offsets of a chunk at which a sample may be in some batches of a plan, in any pass."""
        count, size = int(self.planned.chunk_samples[chunk]), plan.global_batch_size
        begin = plan.epoch * plan.num_samples + plan.start
        passes = range(
            (begin + low * size) // plan.samples_per_pass, (begin + high * size) // plan.samples_per_pass + 1
        )
        if self.sets.has_samples:
            passes = passes[:1]  # samples keep their storage order
        chunks, offsets = np.full(count, chunk), np.arange(count)
        found: set[int] = set()
        for number in passes:
            places = self.sets.places_of(chunks, offsets, np.full(count, number), plan.settings.seed)
            rows = np.repeat(offsets, np.diff(places.splits))
            found.update(rows[(places.shards == shard) & (places.numbers == row)].tolist())
        return sorted(found)

    def _holds(self, rows: StepRows, shard: int, row: int) -> Any:
        """Return a mask of the rows of one chunk and one plan that hold a sample, bool [n]."""
        seed = int(rows.seeds[0]) if len(rows.seeds) else 0
        places = self.sets.places_of(rows.chunk_ids, rows.offsets, rows.passes, seed)
        is_it = (places.shards == shard) & (places.numbers == row)
        return np.bincount(np.repeat(np.arange(len(rows.steps)), np.diff(places.splits)), is_it, len(rows.steps)) > 0

    def rows_of(self, step: int, dp_rank: int | None = None) -> StepRows:
        """Return the rows of a global batch without padding, ordered by rank; with ``dp_rank``, those of that rank.

        Raises:
            ConfigError: There is no such step, or it lies before the state, in batches of another size.
        """
        self._check_known(step)
        whole, number = self.plan_of(step)
        plan = whole if dp_rank is None else whole.among(self.num_ranks)
        found = plan.rank_batches(number, number + 1, dp_rank or 0)
        count = int(found.valid.sum())
        shape = replace(plan.shape, num_ranks=self.num_ranks)
        ranks = shape.rank_of(np.arange(count), max(count, 1)) if dp_rank is None else np.full(count, dp_rank)
        positions = found.positions[found.valid]
        _, lanes, places = dealt(plan, positions)
        return StepRows(
            steps=np.full(count, step), ranks=ranks,
            chunk_ids=found.chunk_ids[found.valid], offsets=found.offsets[found.valid],
            passes=found.passes[found.valid], seeds=np.full(count, plan.settings.seed), positions=positions,
            lanes=lanes, places=places,
        )  # fmt: skip

    def plan_of(self, step: int) -> tuple[Plan, int]:
        """Return the plan of a step, and its number there."""
        epoch, first = self.steps.epoch_at(step)
        number, plan = next(one for one in reversed(self.plans_of(epoch)) if first + one[0] <= step)
        return plan, step - first - number

    @cached_property
    def _lengths(self) -> Steps | None:
        """Tokens per row by row of the run, before the state as it records them; None: rows are not packs."""
        row = self.steps.row_of(self.state.epoch, self.state.samples_seen)
        return self.planned.items.facts(self.state, row).get("lengths")

    def rows_each(self, step: int) -> int:
        """Return the number of rows that each pack of a step fills."""
        if self._lengths is None:
            return 1
        plan, number = self.plan_of(step)
        return int(self.sets.each[0][1].rules.length // self._lengths.at(plan.row_of(number)))

    def _report(self, rows: Sequence[StepRow]) -> StepReport:
        per_epoch = None if self.is_endless else self.steps.count(self.state.epoch)
        return StepReport(at_step=self.steps.at, batches_per_epoch=per_epoch, rows=tuple(rows))

    def _step_rows(self, rows: StepRows) -> list[StepRow]:
        """Describe rows for reports."""
        return [self._row(rows, at, one) for at, one in enumerate(self.sets.described(rows))]

    def _row(self, rows: StepRows, at: int, one: Described) -> StepRow:
        step = int(rows.steps[at])
        epoch, first = self.steps.epoch_at(step)
        is_sample = self.sets.has_samples
        return StepRow(
            step=step, epoch=epoch, batch=step - first, dp_rank=int(rows.ranks[at]), source=one.source,
            number=one.number, shard=one.shard, key=one.keys[0] if is_sample else None,
            keys=None if is_sample else one.keys, num_rows=self.rows_each(step),
            time=one.time,
        )  # fmt: skip


def planned_as(planned: AnySource, state: LoaderState) -> AnySource:
    """Return the data as the run of a state reads it: a mixture in the fetch units of that run.

    Raises:
        StateError: The state belongs to another dataset or mixture.
    """
    if state.ledger is None:
        _check_set(planned, state)
        return planned
    _check_mixture(planned, state.ledger)
    mixture = cast("MixedSource", planned)
    return mixture.cut_as(state.ledger)


def _check_set(planned: AnySource, state: LoaderState) -> None:
    if planned.names:
        raise StateError(
            "--state: it belongs to a single data set, but a mixture was given; give the URL of that data set"
        )
    if state.fingerprint != planned.fingerprint:
        raise StateError(
            f"--state: it belongs to {state.num_samples} samples with fingerprint {state.fingerprint}, but the given "
            f"set has {int(planned.chunk_samples.sum())} and {planned.fingerprint}: give the set that the run reads, "
            "with its --where, --view, --subset, --exclude, --length or --packed (ranges such as dataset[a:b] are not "
            "worked out here)"
        )


def _check_mixture(planned: AnySource, ledger: Ledger) -> None:
    """Reject a mixture that lacks a source that the ledger alone cannot replace; additional sources do not matter.

    Raises:
        StateError: Such a source is missing.
    """
    if not planned.names:
        raise StateError(
            f"--state: it belongs to a mixture of {some_names(list(ledger.sources))}; give the JSON file that "
            "describes it instead of a URL (docs/mixing.md), or, of one set's groups, --balanced or --curriculum"
        )
    mixture: Any = planned
    there, quotas = planned.names, ledger.last.quotas
    elsewhere = ", or give a state that was saved since it was dropped"
    missing, why = mixture.drawing.needed(ledger), f"its chunks determine where the others are. Put it back{elsewhere}"
    if quotas is None and not missing:
        last = ledger.segments()[-1][1]
        missing = sorted(name for name in last if last[name] and name not in there)
        why = f"it is drawn from to the end of the run. Put it back{elsewhere}"
    if quotas is not None:
        missing, why = sorted(set(quotas) - set(there)), "an epoch is made of all of them. Put it back"
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


def read_state(url: str, storage: Storage) -> LoaderState:
    """Return a saved ``loader.state_dict()`` (JSON).

    Raises:
        StateError: The file does not hold a state.
    """
    try:
        content = json.loads(bytes(storage.read(url)))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{redact(url)}: not JSON ({error}); save json.dumps(loader.state_dict())") from error
    if not isinstance(content, Mapping):
        raise StateError(f"{redact(url)}: expected an object, as loader.state_dict() gives it")
    return LoaderState.from_dict(content).onward


def open_run(planned: AnySource, state_url: str, *, storage: Storage, options: PlanOptions) -> PlannedRun:
    """Open the run that a saved ``loader.state_dict()`` (JSON) belongs to.

    Raises:
        StateError: The file does not hold a state, or holds that of another dataset or mixture.
    """
    return PlannedRun(
        planned=planned,
        state=read_state(state_url, storage),
        global_batch_size=options.global_batch_size,
        num_ranks=options.mesh.data_world_size,
        last_batch=options.last_batch,
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
        "one epoch without end" if report.batches_per_epoch is None else f"{report.batches_per_epoch:,} steps per epoch"
    )
    click.echo(f"{every}; the state continues with step {report.at_step:,}")
    for row in report.rows:
        keys = [row.key] if row.keys is None else row.keys
        name = " + ".join("?" if key is None else ascii(key)[1:-1] for key in keys)
        if keys == [None]:
            name = f"sample {row.number}"
        if row.time is not None:
            name = f"{name} at second {row.time:.3f}"
        place = f"epoch {row.epoch}, batch {row.batch}, data rank {row.dp_rank}"
        source = "" if row.source is None else f"source {row.source}, "
        made = "" if row.num_rows == 1 else f", in {row.num_rows} rows"
        click.echo(f"step {row.step}: {name} ({source}{place}; {plain_place(row.shard)}, number {row.number}{made})")
    for epoch in report.left_out:
        click.echo(f"epoch {epoch}: not in it; it is left out with the tail, or comes in a later pass")
    if report.looked_at is not None and not report.rows and not report.left_out:
        click.echo(f"not in steps {report.looked_at[0]:,} to {report.looked_at[1]:,}; --step A..B looks elsewhere")
    if report.by_order:
        click.echo(
            "Keys that come once are taken to ascend; --thorough reads all of them, for keys that come twice", err=True
        )
