"""Report which data rank reads what under a topology: lanes, bytes, requests, memory and read amplification."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from infra import DeviceMesh
from shard_tools.look.plan.loads import Loads, RankLoad
from shard_tools.look.plan.packs import PackTotals
from shard_tools.look.plan.shares import MixtureShares, shares_of
from shard_tools.look.plan.sources import Reads, TableSet, open_planned, sets_of
from shard_tools.look.plan.windows import WindowTotals
from streaming.common.arguments import checked_count, parse_bytes
from streaming.errors import ConfigError, MemoryLimitError
from streaming.order.plan.demand import ChunkMemory
from streaming.order.plan.memory import least_mib, needed_mib
from streaming.order.plan.order import Orders, OrderSettings
from streaming.order.plan.plan import Plan
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.shards.index.chunk_table import ChunkTable
from streaming.types import Int64Array, LastBatch

if TYPE_CHECKING:
    from streaming.sets.sources.mixed import AnySource, MixedSource

MAX_SWEPT_RANKS = 4096
"""Maximum number of data ranks to compute (some milliseconds each); of more ranks, equally spaced ones are computed."""
_MAX_SWEPT_ROWS = 1 << 27
"""Limit on (rank, chunk) pairs: about ten seconds. If every rank reads every chunk, a few ranks are representative."""
_LEAST_SWEPT = 8
EXACT_RANKS = 64
"""Up to this number of data ranks, the chunks of first batches are exact as in training; above, an upper bound."""
_MAX_SWEPT_CELLS = 1 << 27
"""Limit on (rank, source, lane) triples: each source of a mixture is dealt to all lanes to find those of some ranks."""
_MUCH_AMPLIFICATION = 1.2
_MANY_CHUNKS = 16
"""With more chunks per lane, border chunks do not explain repeated reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A topology and the options of a loader. Defaults are the loader's.

    Attributes:
        mesh: Sizes and order of the parallel axes, as seen by any process.
        global_batch_size: G, samples of one batch over all data ranks, or sizes by row of the run.
        shuffle: Whether to shuffle; False: storage order; None: as the dataset sets it, like the next three.
        seed: Seed of the order.
        lanes: L.
        window: W in samples.
        epoch: Number of the epoch.
        last_batch: ``"drop"``, ``"pad"`` or ``"partial"``.
        epoch_size: Samples of a virtual epoch, or None.
        memory_limit_bytes: Memory limit of one rank.
    """

    mesh: DeviceMesh
    global_batch_size: int | Sizes
    shuffle: bool | None = None
    seed: int | None = None
    lanes: int | None = None
    window: int | None = None
    epoch: int = 0
    last_batch: LastBatch = "drop"
    epoch_size: int | None = None
    memory_limit_bytes: int = field(default_factory=lambda: parse_bytes("4GiB"))

    def __post_init__(self) -> None:
        Sizes.chosen(None, self.sizes.option, self.mesh.data_world_size)
        if self.lanes is not None:
            checked_count("lanes", self.lanes, 1)

    @property
    def sizes(self) -> Sizes:
        """The sizes of global batches."""
        return Sizes.of(self.global_batch_size)

    @property
    def shape(self) -> Shape:
        """The shape of the batches."""
        return Shape(
            sizes=self.sizes, num_ranks=self.mesh.data_world_size, last_batch=self.last_batch,
            epoch_size=self.epoch_size,
        )  # fmt: skip

    def ordered(self, planned: Any) -> Any:
        """Return the dataset in the order of these options."""
        return planned.ordered(shuffle=self.shuffle, seed=self.seed, lanes=self.lanes, window=self.window)


def parse_ramp(text: str) -> Schedule:
    """Parse ``ROW:N,…``: from each row of the run on, the number N applies.

    Raises:
        ConfigError: The text is not a ramp.
    """
    try:
        pairs = [one.split(":") for one in text.split(",")]
        made = {int(row): int(size) for row, size in pairs}
        found = Schedule.steps(made)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{text!r}: expected rows with numbers such as 0:256,1000000:512 ({error})") from error
    if len(made) < len(pairs):
        raise ConfigError(f"{text!r} gives one row twice")
    return found


def epoch_plans(
    chunk_samples: Int64Array, order: OrderSettings, options: PlanOptions, orders: Orders | None = None,
    num_samples: int | None = None,
) -> list[Plan]:  # fmt: skip
    """Return the plans of the epoch, one per batch size; ``num_samples``: size of an epoch without end.

    Raises:
        ConfigError: The epoch would be empty.
    """
    shape = options.shape
    whole = replace(shape, epoch_size=shape.epoch_size or num_samples)
    plans = list(Plan.of_epoch(whole, chunk_samples, order, epoch=options.epoch, orders=orders))
    size = whole.num_samples if whole.epoch_size else (orders.samples_per_pass if orders else int(chunk_samples.sum()))
    if not plans or (size < shape.num_ranks and shape.last_batch != "pad"):
        raise ConfigError(
            f"{size} samples do not fill one global batch of {shape.at(options.epoch * size).global_batch_size} "
            f"({shape.num_ranks} data ranks) with last_batch={shape.last_batch!r}: training would refuse this. "
            'Use last_batch="pad" or "partial", a smaller batch, fewer ranks, or epoch_size to repeat the data'
        )
    return plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Minimum, mean and maximum of a quantity over data ranks."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Report on which rank reads what in one epoch.

    Attributes:
        num_shards: Shards of the dataset.
        num_chunks: Chunks of the dataset.
        num_samples: Samples of the dataset.
        num_bytes: Bytes of its chunks.
        sample_bytes: Mean size of a sample, weighted by how often samples are drawn.
        axes: Size of every parallel axis, outermost first.
        data_world_size: Number of data ranks.
        replica_world_size: Number of processes that receive the same batches, per data rank.
        global_batch_size: G.
        num_batches: Batches of the epoch, the same on every rank.
        epoch: Number of the epoch.
        epoch_samples: Samples delivered in the epoch.
        shuffle: Whether it is shuffled.
        lanes: L.
        window: W, in samples.
        unit: Unit of a request: ``"chunk"``, ``"slice"`` of a chunk (storage order; bytes are then estimated from the
            mean size of a chunk's samples), or, if batch sizes change, ``"chunk or slice"``.
        memory_limit_bytes: Memory limit of one rank.
        needed_limit_bytes: A ``memory_limit`` with which each chunk is fetched once, in this epoch and most likely in
            every other.
        least_limit_bytes: The smallest limit that training accepts; it suffices for every epoch, although some epochs
            may fetch chunks again. It may be above the minimum if ``memory_limit_bytes`` is no less, because sample
            tables are then not read.
        mixed_chunks: Distinct chunks in the first rank's batch in the middle of the epoch, a measure of mixing.
        ramp: Batch sizes by row of the run; None: a constant size.
        limits: How ``memory_limit`` is divided: chunks, batches built ahead and, for packs, their documents.
        packs: For packs: their number, and how documents are used.
        windows: For windows: their units, and what these read; None: rows are something else.
        num_ranges: Largest number of ranges of a chunk: its own, and one for each late field.
        versions: Numbers of the versions of sets that live, by the name of their source; ``""`` is a single set.
        loads: The computed data ranks, ascending.
        sampled: Only some, equally spaced ranks were computed, so totals are estimates.
        filtered: A filter leaves bytes out, so the bytes read are estimated.
        warnings: Reasons for training to refuse this, and avoidable costs; each with its cure.
        shares: For a mixture: the share of each source.
        has_end: False for a mixture without end; the report then covers its first ``epoch_samples``.
    """

    num_shards: int
    num_chunks: int
    num_samples: int
    num_bytes: int
    sample_bytes: float
    axes: dict[str, int]
    data_world_size: int
    replica_world_size: int
    global_batch_size: int
    num_batches: int
    epoch: int
    epoch_samples: int
    shuffle: bool
    lanes: int
    window: int
    unit: str
    memory_limit_bytes: int
    needed_limit_bytes: int
    least_limit_bytes: int
    mixed_chunks: int
    loads: tuple[RankLoad, ...]
    sampled: bool
    filtered: bool
    warnings: tuple[str, ...]
    limits: Mapping[str, int]
    ramp: Mapping[int, int] | None = None
    packs: PackTotals | None = None
    windows: WindowTotals | None = None
    num_ranges: int = 1
    versions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shares: MixtureShares | None = None
    has_end: bool = True

    def spread(self, name: str) -> Spread:
        """Summarize one attribute of ``RankLoad`` over the computed ranks."""
        values = [getattr(load, name) for load in self.loads]
        return Spread(least=min(values), mean=sum(values) / len(values), most=max(values))

    def total(self, name: str) -> int:
        """Sum an attribute over all data ranks, counting replicas once; an estimate if ``sampled``."""
        counted = sum(getattr(load, name) for load in self.loads)
        return round(counted * self.data_world_size / len(self.loads)) if self.sampled else int(counted)

    @property
    def amplification(self) -> float:
        """Bytes read per byte delivered, over all data ranks, counting replicas once."""
        return self.total("read_bytes") / (self.epoch_samples * self.sample_bytes)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        apart = {"loads", "warnings", "shares", "packs", "windows"}
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in apart}
        counted = (
            "num_samples",
            "num_requests",
            "read_bytes",
            "start_requests",
            "start_bytes",
            "live_bytes",
            "limit_bytes",
            "held_bytes",
        )
        spreads = {name: self.spread(name) for name in (*counted, "amplification")}
        return {
            **own,
            "total": {
                "read_bytes": self.total("read_bytes"),
                "read_bytes_if_every_replica_reads": self.total("read_bytes") * self.replica_world_size,
                "num_requests": self.total("num_requests"),
                "start_requests": self.total("start_requests"),
                "start_bytes": self.total("start_bytes"),
                "amplification": self.amplification,
            },
            "per_data_rank": {
                name: {"min": spread.least, "mean": spread.mean, "max": spread.most} for name, spread in spreads.items()
            },
            **({} if self.packs is None else {"packs": self.packs.as_dict()}),
            **({} if self.windows is None else {"windows": asdict(self.windows)}),
            **({} if self.shares is None else {"shares": self.shares.as_dict()}),
            "data_ranks": [load.as_dict() for load in self.loads],
            "warnings": list(self.warnings),
        }


def plan(urls: str | Sequence[str], *, options: PlanOptions, **opened: Any) -> PlanReport:
    """Compute which data rank reads what of the dataset at ``urls``; reads its index, never its data.

    In a filtered dataset, the bytes read of a chunk are estimated from the fraction of its samples that is kept.

    Args:
        urls: Shards, as for ``StreamingDataset``, or the JSON file of a mixture.
        options: The topology and the loader's options.
        opened: See :func:`shard_tools.look.plan.sources.open_planned`.

    Raises:
        IndexMissingError: There is no index, and the dataset is too large to index on the fly.
        NotFoundError: Nothing matches ``urls``.
        ConfigError: Training would reject this for a reason other than memory, such as an empty epoch.
    """
    return plan_opened(open_planned(urls, **opened), options=options)


def plan_table(table: ChunkTable, *, options: PlanOptions, sliced: bool = False) -> PlanReport:
    """Compute which rank reads what of a dataset with this chunk table, assuming one span per chunk. Pure.

    Args:
        table: The chunk table.
        options: The topology and the loader's options.
        sliced: Sample tables exist: in storage order, ranks read slices of chunks if that saves bytes.

    Raises:
        ConfigError: The epoch would be empty.
    """
    return plan_opened(TableSet(table, sliced=sliced), options=options)


def plan_opened(planned: AnySource | TableSet | Any, *, options: PlanOptions) -> PlanReport:
    """Compute which rank reads what of an opened dataset; for a mixture without end, over one pass of samples.

    Raises:
        ConfigError: Training would reject this for a reason other than memory, such as an empty epoch.
    """
    num_samples = int(planned.chunk_samples.sum())
    if not num_samples:
        raise ConfigError("the data set is empty; look at what is there with `shard_tools info`")
    planned = options.ordered(planned)
    order = planned.order_settings(options.sizes.size_for_lanes)
    if not hasattr(planned, "leaves"):
        plans = epoch_plans(planned.chunk_samples, order, options, planned.orders(order))
        loads = Loads(plans, Reads.of_sets(planned), _rooms(planned, options))
        return _report(planned, loads, options)
    mixture: MixedSource = planned
    mixture.deal.check_shape(options.shape)
    ledger = mixture.begun(options.shape.global_batch_size, order)
    most = max(num_samples, options.sizes.most) if mixture.is_endless else None
    plans = epoch_plans(mixture.chunk_samples, order, options, mixture.orders(order, ledger), most)
    drawn = mixture.drawing.forecast(ledger).drawn(options.epoch * plans[0].num_samples, plans[0].num_samples)
    run: Sequence[Plan] = ()
    if mixture.is_endless and options.epoch_size is None:
        orders = mixture.orders(order, ledger)
        run = list(Plan.of_epoch(options.shape, mixture.chunk_samples, order, epoch=0, orders=orders))
    loads = Loads(plans, Reads.of_sets(mixture, drawn), _rooms(mixture, options), run)
    report = _report(mixture, loads, options)
    mixed = shares_of(mixture, ledger, loads, report.loads, plans[0].dp_world_size / len(report.loads))
    return replace(report, shares=mixed, has_end=not mixture.is_endless or options.epoch_size is not None)


def _rooms(planned: Any, options: PlanOptions) -> ChunkMemory:
    """Return the chunk memory of a loader that maps local files and has no worker processes."""
    return ChunkMemory(planned, planned.items.budget(options.memory_limit_bytes))


def _report(planned: Any, loads: Loads, options: PlanOptions) -> PlanReport:
    whole, reads, limit = loads.plan, loads.reads, options.memory_limit_bytes
    chosen = _swept_ranks(whole, len(list(sets_of(planned))), sliced=loads.sliced)
    replicas = replica_ranks(options.mesh)
    exact = whole.dp_world_size <= EXACT_RANKS
    found = tuple(loads.of(dp_rank, replicas[dp_rank], exact=exact) for dp_rank in chosen)
    least_bytes = loads.least_bytes
    report = PlanReport(
        num_shards=len(planned.urls),
        num_chunks=len(loads.chunk_bytes),
        num_samples=int(whole.chunk_samples.sum()),
        num_bytes=int(loads.chunk_bytes.sum()),
        sample_bytes=reads.sample_bytes,
        axes=options.mesh.axis_sizes,
        data_world_size=whole.dp_world_size,
        replica_world_size=options.mesh.replica_world_size,
        global_batch_size=whole.global_batch_size,
        num_batches=loads.num_batches,
        epoch=whole.epoch,
        epoch_samples=loads.num_rows,
        shuffle=whole.settings.shuffle,
        lanes=whole.settings.lanes,
        window=whole.settings.window,
        unit=loads.unit,
        memory_limit_bytes=limit,
        needed_limit_bytes=needed_mib(max(least_bytes, *(load.live_bytes for load in found))) << 20,
        least_limit_bytes=least_mib(least_bytes) << 20,
        mixed_chunks=_mixed_chunks(loads.plans[len(loads.plans) // 2]),
        loads=found,
        sampled=len(found) < whole.dp_world_size,
        filtered=bool((reads.num_bytes < loads.chunk_bytes).any()),
        warnings=(),
        limits=loads.rooms.memory.parts,
        ramp=None if options.sizes.is_constant else dict(options.sizes.steps),
        packs=PackTotals.of(planned, options.sizes) if planned.is_packed else None,
        windows=WindowTotals.of(planned),
        num_ranges=max((getattr(one, "num_ranges", 1) for _, one in sets_of(planned)), default=1),
        versions=planned.opened_versions,
    )
    may_slice = not report.shuffle and whole.dp_world_size > 1
    return _with_warnings(report, loads, may_slice=may_slice, tables=loads.sliced)


def replica_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """Return the processes that receive each share of the data: ``mesh.replicas_of`` for all shares at once."""
    grid = np.array(mesh.ranks).reshape(mesh.shape)
    outer = [mesh.axis_names.index(name) for name in (*mesh.data_axes, *mesh.replica_axes)]
    shares = grid.transpose(outer).reshape(mesh.data_world_size, -1)
    return tuple(tuple(row) for row in shares.tolist())


def _epoch_plan(table: ChunkTable, options: PlanOptions) -> Plan:
    planned = options.ordered(TableSet(table, sliced=False))
    return epoch_plans(table.num_samples, planned.order_settings(options.sizes.size_for_lanes), options)[0]


def _swept_ranks(whole: Plan, num_sets: int, *, sliced: bool) -> list[int]:
    """Return the data ranks to compute: all, or some equally spaced ones including the first and the last."""
    low, high = whole.rank_lanes(0)
    share = 1 / whole.dp_world_size if sliced else (high - low) / whole.settings.lanes
    rows = max(1, int(len(whole.chunk_samples) * share) * len(whole.passes))
    cells = num_sets * whole.settings.lanes if num_sets > 1 else 0
    most = max(_LEAST_SWEPT, min(MAX_SWEPT_RANKS, _MAX_SWEPT_ROWS // rows, _MAX_SWEPT_CELLS // max(1, cells)))
    if whole.dp_world_size <= most:
        return list(range(whole.dp_world_size))
    last = whole.dp_world_size - 1
    return [last * number // (most - 1) for number in range(most)]


def _mixed_chunks(whole: Plan) -> int:
    middle = whole.num_batches // 2
    return len(np.unique(whole.rank_batches(middle, middle + 1, 0).chunk_ids))


def _with_warnings(report: PlanReport, loads: Loads, *, may_slice: bool, tables: bool) -> PlanReport:
    warnings = (
        []
        if report.packs is None
        else report.packs.warnings(report.ramp or {0: report.global_batch_size}, report.data_world_size)
    )
    worst = max(report.loads, key=lambda load: load.live_bytes)
    try:
        loads.check_memory()
        if shortage := loads.shortage(worst):
            warnings.append(shortage)
    except MemoryLimitError as error:
        warnings.append(f"training would refuse this: {error}")
    if report.amplification > _MUCH_AMPLIFICATION:
        if may_slice and tables:
            warnings.append(
                f"in storage order ranks share spans of 64 KiB, which are checked as a whole, and each reads them: "
                f"{report.amplification:.1f} times the bytes. Shuffle, or use larger batches"
            )
        elif may_slice:
            warnings.append(
                f"in storage order without sample tables every rank reads whole chunks: {report.amplification:.1f} "
                f"times the bytes. Index the shards (shard_tools index), or shuffle"
            )
        else:
            warnings.append(_lane_advice(report))
    return replace(report, warnings=tuple(warnings))


def _lane_advice(report: PlanReport) -> str:
    """Explain why bytes are read more than once, and how to avoid it."""
    ranks, lanes, size = report.data_world_size, report.lanes, report.global_batch_size
    said = f"{report.amplification:.1f} times the bytes are read"
    if lanes % ranks == 0 and size % lanes == 0:
        per_lane, per_chunk = report.num_samples / lanes, report.num_samples / report.num_chunks
        if per_lane > _MANY_CHUNKS * per_chunk:
            return (
                f"{said}: groups or filters take few samples of a chunk, and the gaps between them are read, too. "
                "Shards sorted by the column of the groups or filter are read about once: shard_tools reshard SOURCE "
                "TARGET --sort COLUMN"
            )
        multiple = f" (a multiple of {ranks})" if ranks > 1 else ""
        return (
            f"{said}: a lane holds {per_lane:.0f} samples and a chunk {per_chunk:.0f}, so lanes share chunks. Use "
            f"fewer lanes{multiple}, or smaller chunks"
        )
    why = f"{said}: {ranks} data ranks do not divide {lanes} lanes, and lanes at their borders are read by two or more"
    if size % lanes:
        why = f"{said}: {lanes} lanes do not divide the global batch of {size}, so that ranks move over other lanes too"
    if size % ranks:
        return f"{why}. Use a global batch size that is a multiple of {ranks}: {math.ceil(size / ranks) * ranks}"
    divisors = [n for n in range(ranks, min(size, 2**20) + 1, ranks) if size % n == 0]
    better = min((n for n in divisors if n >= lanes), default=divisors[-1])
    return f"{why}. Use lanes={better}: ShuffleConfig(lanes={better}), which is another order"
