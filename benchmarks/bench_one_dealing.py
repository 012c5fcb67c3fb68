"""One dealing for endless mixtures, by samples in units chosen from ``memory_limit``, against chunks as today.

Run: ``python benchmarks/bench_one_dealing.py [--quick]`` and ``… --cpu [--rounds 3] [--data FOLDER]``. Sources have
Zipf's weights (1, 1/2, 1/3, …) and chunks as the writer cuts them.

Without ``--cpu``, plans are made and nothing is read: sources whose chunks exist as a table only, under one rank with
batches of 64 and under the first of eight with 512. For each dealing:

- *live*: bytes of chunks that the plan needs at once, by the arithmetic of the check at the start
- *requests/GB*: requests that a rank starts in the second half of the rows planned, from row 10⁹ on, for each GB that
  it delivers
- *steps*: from ``set_weights`` to its row
- *unit*: the mean size of what one request reads, if it is no whole chunk
- *reach*: how far the window moves a sample in rows, if not as far as today (1)

*by samples* takes whole chunks and the reach of today if they fit into the memory, then a quarter of the reach, then
the largest units that fit (in proportion to the root of a source's share). Its columns differ in the memory that it may
take: that of ``memory_limit``, or a tenth more than today's dealing takes.

With ``--cpu``, loaders read from an S3 server on loopback, in turns, each in a process of its own: user and system
seconds for 10⁵ samples of 16 kB, behind the first 40,000; by samples with ``quotas="exact"`` and, where whole chunks do
not fit, ``fetch_bytes``. The server's time is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import common
import numpy as np

from streaming import DataLoader, Mixture, StreamingDataset
from streaming.errors import MemoryLimitError
from streaming.order.mixing.exact import ExactLanes
from streaming.order.mixing.granularity import ByChunks
from streaming.order.mixing.passes import Sources, Weights
from streaming.order.mixing.streams import SourceOrder, Stream
from streaming.order.plan.intervals import ChunkIntervals
from streaming.order.plan.memory import EPOCHS_VARY, Budget, whole_pages
from streaming.order.plan.plan import Plan
from streaming.order.plan.settings import order_settings
from streaming.sets.sources.fetch_units import LEAST_UNIT_BYTES, divided, fitting_total
from streaming.types import Int64Array, override

SOURCES, LIMITS = (2, 3, 5, 200), (4 << 30, 1 << 30)
REACHES = (1.0, 0.25)
LEAST_STEPS, TOLERATED = 16, 1.1
FAR_ROW = 10**9
"""By then, chunks of a source begin at all times in its lanes."""
CPU_SOURCES = (2, 5, 200)
CPU_BATCH, CPU_BYTES, CPU_WARM, CPU_SAMPLES = 64, 16_000, 40_000, 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Samples of one size in chunks, as the writer's rule cuts them."""

    sample_bytes: int
    per_chunk: int
    rows: int
    """Rows planned, of all ranks: half of them are counted."""


KINDS = {
    "100 kB": Records(sample_bytes=100_000, per_chunk=42, rows=2**19),
    "2 kB": Records(sample_bytes=2_000, per_chunk=525, rows=2**21),
}
TINY = Records(sample_bytes=1536, per_chunk=683, rows=0)
"""Records of 430 bytes, as they lie in a tar."""
WORLDS = {1: 64, 8: 512}
"""Global batch by ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A mixture under a loader."""

    records: Records
    num_sources: int
    num_ranks: int
    global_batch: int

    @property
    def weights(self) -> dict[str, float]:
        return {f"{number:03d}": 1 / (number + 1) for number in range(self.num_sources)}

    @property
    def shares(self) -> dict[str, float]:
        total = sum(self.weights.values())
        return {name: weight / total for name, weight in self.weights.items()}

    @property
    def num_chunks(self) -> int:
        return 400 if self.num_sources > 100 else 2000

    @property
    def chunk_bytes(self) -> int:
        return self.records.per_chunk * self.records.sample_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """An order, and the bytes of what is read at once: int64 [C]."""

    orders: Any
    sizes: Int64Array
    reach: float

    def plan(self, case: Case, first_batch: int = 0) -> Plan:
        return Plan(
            self.orders.chunk_samples, self.orders.settings, global_batch_size=case.global_batch,
            dp_world_size=case.num_ranks, orders=self.orders.apart(), start=first_batch * case.global_batch,
        )  # fmt: skip

    def live_bytes(self, case: Case) -> int:
        return self.plan(case).live_bytes(whole_pages(self.sizes), 0)


class WindowedLanes(ExactLanes):
    """Dealt by samples, with a window of its own for each source, in its samples."""

    def __init__(self, sources: Sources, schedule: list[Weights], windows: Mapping[str, int]) -> None:
        self._windows = windows
        super().__init__(sources, schedule)

    @override
    def _stream(self, leaf: str) -> Stream:
        if leaf not in self._orders:
            settings = replace(self.settings, window=self._windows[leaf])
            self._orders[leaf] = SourceOrder(self.sources.eras[leaf], settings, kept_parts=2**16)
        return self._orders[leaf]


def settings_of(case: Case, tables: Mapping[str, Int64Array]) -> Any:
    return order_settings(
        shuffle=True, seed=1, lanes=None, window=None, global_batch_size=case.global_batch,
        num_samples=sum(int(table.sum()) for table in tables.values()), num_chunks=sum(map(len, tables.values())),
    )  # fmt: skip


def today(case: Case) -> Dealt:
    tables = {name: np.full(case.num_chunks, case.records.per_chunk) for name in case.weights}
    settings = settings_of(case, tables)
    sources = Sources(tables, settings, even=ByChunks().even(tables, case.shares, settings))
    orders = ByChunks().lanes(sources, [Weights(start=0, weights=case.weights)], nullcontext())
    return Dealt(orders=orders, sizes=_sizes(case, tables), reach=1.0)


def by_samples(case: Case, units: Mapping[str, int] | None, reach: float) -> Dealt:
    """Dealt by samples, in units of these sizes; None: whole chunks."""
    tables = {name: _cut(case, case.chunk_bytes if units is None else units[name]) for name in case.weights}
    # In the rows of a lane a source comes at every 1 / share, so this moves a sample as far as two chunks of the lane.
    windows = {name: max(round(reach * 2 * share * case.records.per_chunk), 1) for name, share in case.shares.items()}
    sources = Sources(tables, settings_of(case, tables))
    orders = WindowedLanes(sources, [Weights(start=0, weights=case.weights)], windows)
    return Dealt(orders=orders, sizes=_sizes(case, tables), reach=reach)


def _cut(case: Case, unit: int) -> Int64Array:
    """Return samples of the units of a source, int64 [C]: each chunk in equal parts, of a sample at least."""
    each = case.records.per_chunk
    parts = min(max(-(-case.chunk_bytes // unit), 1), each)
    return np.tile(np.diff(np.arange(parts + 1) * each // parts), case.num_chunks)


def _sizes(case: Case, tables: Mapping[str, Int64Array]) -> Int64Array:
    return np.concatenate([*tables.values()]) * case.records.sample_bytes


def chosen(case: Case, room_bytes: int) -> Dealt | None:
    """Return the dealing by samples that makes the fewest requests in so much memory; None: there is none."""
    for reach in REACHES:
        found = by_samples(case, None, reach)
        if found.live_bytes(case) <= room_bytes:
            return found
    low = max(LEAST_UNIT_BYTES, case.records.sample_bytes) * case.num_sources
    high, best = case.chunk_bytes * case.num_sources, None
    while high > low * 1.03:
        total = math.isqrt(low * high) if best else low
        found = by_samples(case, divided(total, case.shares), REACHES[-1])
        if found.live_bytes(case) <= room_bytes:
            best, low = found, max(total, low + 1)
        elif best is None:
            return None
        else:
            high = total
    return best


def requests_per_gb(case: Case, dealt: Dealt, rows: int) -> float:
    """Count the requests that the first rank begins in the second half of the rows, for each GB that it delivers."""
    plan, stop = dealt.plan(case, FAR_ROW // case.global_batch), rows // case.global_batch
    parts = []
    for part in plan.intervals_by_pass(0):
        if not len(part.chunk_ids) or part.first_batches[0] >= stop:
            break
        parts.append(part)
    every = ChunkIntervals.joined(parts)
    merged = ChunkIntervals.merged(every.chunk_ids, every.first_batches, every.last_batches, 0)
    counted = (merged.first_batches >= stop // 2) & (merged.first_batches < stop)
    delivered = (stop - stop // 2) * case.global_batch / case.num_ranks * case.records.sample_bytes
    return float(counted.sum() / delivered * 1e9)


def steps_to_weights(case: Case, dealt: Dealt) -> int:
    """Steps from a call of ``set_weights`` behind 1,000 batches to the row that it returns."""
    at = 1000 * case.global_batch
    free: int = dealt.orders.apart().first_free_row(at + LEAST_STEPS * case.global_batch)
    return math.ceil((free - at) / case.global_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one dealing takes; of units and reach see the head of this file."""

    unit_kib: float
    reach: float
    live_mib: float
    requests_per_gb: float
    steps: int

    @classmethod
    def of(cls, case: Case, dealt: Dealt, rows: int) -> Figures:
        return cls(
            unit_kib=float(dealt.sizes.mean()) / 1024, reach=dealt.reach, live_mib=dealt.live_bytes(case) / 2**20,
            requests_per_gb=requests_per_gb(case, dealt, rows), steps=steps_to_weights(case, dealt),
        )  # fmt: skip

    def shown(self, case: Case) -> str:
        is_cut = self.unit_kib * 1024 < case.chunk_bytes
        how = [f"{self.unit_kib:,.0f} KiB"] * is_cut + [f"reach {self.reach}"] * (self.reach < 1)
        return f"{self.live_mib:,.0f} · {self.requests_per_gb:,.0f} · {self.steps:,}" + (
            f" ({', '.join(how)})" if how else ""
        )


def compared(case: Case, limits: tuple[int, ...], rows: int) -> Iterator[Figures | None]:
    """Yield what each column of the table has: today's dealing, that by samples under each limit, and as today."""
    now = today(case)
    yield Figures.of(case, now, rows)
    rooms = [int(Budget(limit).chunks_bytes * EPOCHS_VARY) for limit in limits]
    for room in (*rooms, int(now.live_bytes(case) * TOLERATED)):
        dealt = chosen(case, room)
        yield None if dealt is None else Figures.of(case, dealt, rows)


def show_plans(
    kinds: tuple[str, ...], worlds: tuple[int, ...], counts: tuple[int, ...], limits: tuple[int, ...], rows: int | None
) -> None:
    dealings = ["chunks (today)", *(f"samples, {limit >> 30} GiB" for limit in limits), "samples, as today"]
    print("Each cell: live MiB · requests/GB · steps (what of units and reach is smaller than today)\n")
    print(f"| samples | ranks | sources | {' | '.join(dealings)} |")
    print("|---" * (3 + len(dealings)) + "|")
    for kind, ranks, count in product(kinds, worlds, counts):
        case = Case(records=KINDS[kind], num_sources=count, num_ranks=ranks, global_batch=WORLDS[ranks])
        found = compared(case, limits, rows or case.records.rows)
        cells = ["does not fit" if each is None else each.shown(case) for each in found]
        print(f"| {kind} | {ranks} | {count} | {' | '.join(cells)} |", flush=True)


def show_steps() -> None:
    """Print the steps of today's dealing where they are most: small batches of records of 430 bytes, one rank."""
    print(f"\n| batch | {' | '.join(f'{count} sources' for count in SOURCES)} |")
    print("|---" * (1 + len(SOURCES)) + "|")
    for batch in (8, 16, 64):
        cases = (Case(records=TINY, num_sources=count, num_ranks=1, global_batch=batch) for count in SOURCES)
        print(f"| {batch} | {' | '.join(f'{steps_to_weights(case, today(case)):,}' for case in cases)} |", flush=True)


# --- CPU ---


def make(folder: str) -> None:
    samples = ({"__key__": f"{number:06d}", "bin": os.urandom(CPU_BYTES)} for number in range(2**16))
    common.write_shards(folder, samples, per_shard=2**11)


def used_s() -> float:
    """Return user and system seconds of this process and of its children that ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def turn(url: str, options: Any, count: int, limit: int, dealt: str, warm: int, samples: int) -> None:
    """Read with one dealing, and print what it took as JSON; in a process of its own."""
    weights = {f"{number:03d}": 1 / (number + 1) for number in range(count)}

    def opened(fetch_bytes: int | None) -> Mixture:
        sources = {name: StreamingDataset(url, decode="raw", storage_options=options) for name in weights}
        exact: dict[str, Any] = {"quotas": "exact", "fetch_bytes": fetch_bytes} if dealt == "samples" else {}
        return Mixture(sources, weights=weights, seed=1, **exact)

    mixture, lanes = opened(None), 16
    for attempt in range(2):
        with DataLoader(mixture, CPU_BATCH, memory_limit=limit, num_workers=0) as loader:
            batches = iter(loader)
            try:
                next(batches)
            except MemoryLimitError:
                total = fitting_total(Budget(limit).recommended_bytes, lanes, count)
                if attempt or total is None:
                    print(json.dumps(None))
                    return
                mixture = opened(total)
                continue
            for _ in range(warm // CPU_BATCH):
                next(batches)
            before_s, asked = used_s(), loader.metrics()["fetched_chunks"]
            for _ in range(samples // CPU_BATCH):
                next(batches)
            took_s, seen = used_s() - before_s, loader.metrics()
            row = loader.set_weights(dict.fromkeys(weights, 1.0))
            at = (1 + warm // CPU_BATCH + samples // CPU_BATCH) * CPU_BATCH
        print(json.dumps({
            "cpu": took_s / (samples // CPU_BATCH * CPU_BATCH) * 1e5, "peak": seen["arena_peak_bytes"] / 2**20,
            "requests": (seen["fetched_chunks"] - asked) / (samples * CPU_BYTES) * 1e9,
            "unit": float(mixture.source.chunk_bytes.mean()) / 1024, "steps": math.ceil((row - at) / CPU_BATCH),
        }))  # fmt: skip
        return


def show_cpu(data: str, counts: tuple[int, ...], rounds: int, warm: int, samples: int) -> None:
    folder = common.made_once(data, f"one-dealing-{CPU_BYTES}", make)
    print("| sources | memory_limit | dealt by | unit KiB | arena peak MiB | requests/GB | CPU s | ratio | steps |")
    print("|---" * 9 + "|")
    with common.s3_copy(folder) as (url, options):
        for count in counts:
            for limit in LIMITS:
                found: dict[str, list[Any]] = {"chunks": [], "samples": []}
                for _ in range(rounds):
                    for dealt, seen in found.items():
                        if None not in seen:
                            seen.append(_turn(url, options, count, limit, dealt, warm, samples))
                for dealt, seen in found.items():
                    shown = [f"{count}", f"{limit >> 30} GiB", dealt]
                    if None in seen:
                        print(f"| {' | '.join(shown)} | does not fit | | | | | |", flush=True)
                        continue
                    unit, peak, asked, cpu, steps = (
                        statistics.median(one[what] for one in seen)
                        for what in ("unit", "peak", "requests", "cpu", "steps")
                    )
                    ratios = [one["cpu"] / base["cpu"] for one, base in zip(seen, found["chunks"], strict=True)]
                    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                    print(f"| {' | '.join(shown)} | {unit:,.0f} | {peak:,.0f} | {asked:,.0f} | {cpu:.1f} | {ratio} | "
                          f"{steps:,.0f} |", flush=True)  # fmt: skip


def _turn(*args: Any) -> Any:
    ran = subprocess.run(
        [sys.executable, __file__, "--turn", json.dumps(args)], check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(ran.stdout)


def main() -> None:
    if sys.argv[1:2] == ["--turn"]:
        turn(*json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-bench"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="read from a server, and compare CPU seconds")
    parser.add_argument("--quick", action="store_true", help="2 sources, one rank, 1 GiB, few rows")
    args = parser.parse_args()
    print(common.machine(), flush=True)
    if args.cpu:
        show_cpu(args.data, (2,) if args.quick else CPU_SOURCES, 1 if args.quick else args.rounds,
                 *((640, 1280) if args.quick else (CPU_WARM, CPU_SAMPLES)))  # fmt: skip
    elif args.quick:
        show_plans(("100 kB",), (1,), (2,), (1 << 30,), 2**15)
    else:
        show_plans(tuple(KINDS), tuple(WORLDS), SOURCES, LIMITS, None)
        show_steps()


if __name__ == "__main__":
    main()
