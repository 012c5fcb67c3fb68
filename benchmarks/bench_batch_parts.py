"""Where the consumer's time goes, call by call: sequences of tokens, packs, and the gather that they are compared with.

Run: ``python benchmarks/bench_batch_parts.py [--sequences 200000] [--tokens 40000000] [--data FOLDER]``. The functions
named below are timed in the thread that asks for batches. A call that nobody interrupts shows what the work takes: so
lower quartiles of wall time are given, which change by a few percent where 20 others want the same two cores, while
sums and CPU seconds change by half. Inner calls are part of outer ones, and timing adds about 1 us to each.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import bench_packs
import bench_tokens
import common
import numpy as np
import torch

from streaming import DataLoader, Packed, StreamingDataset

PARTS = (
    "streaming.run.engine.pipeline Pipeline _plan_block",
    "streaming.run.engine.memory.chunk_store ChunkStore settle",
    "streaming.shards.fetch.read  parse_chunk",
    "streaming.shards.tar.fast  read_plain",
    "streaming.shards.tar.fast  group_members",
    "streaming.run.engine.memory.row_table RowTable add",
    "streaming.run.engine.memory.row_table RowTable select",
    "streaming.run.engine.pipeline Pipeline _open_group",
    "streaming.shards.catalog.packed PackedSource packs",
    "streaming.build.batches.columns Columns __init__",
    "streaming.build.batches.items.columns PackColumns __init__",
    "streaming.build.batches.items.columns PackColumns _tensors",
    "streaming.order.packing.fill Filler input_ids",
    "streaming.order.packing.fill Filler labels",
    "streaming.order.packing.fill Filler position_ids",
    "streaming.order.packing.fill Filler document_ids",
    "streaming.order.packing.fill Segments cu_seqlens",
)
_spent_ns: dict[str, list[int]] = defaultdict(list)


def watch(part: str) -> None:
    """Time the calls of a function in the main thread."""
    module, owner, name = part.split(" ")
    place: Any = importlib.import_module(module)
    place = getattr(place, owner) if owner else place
    function: Callable[..., Any] = getattr(place, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        start_ns = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            _spent_ns[f"{owner or module.rpartition('.')[2]}.{name}"].append(time.perf_counter_ns() - start_ns)

    setattr(place, name, timed)


def shown(title: str, batches: Iterator[Any]) -> None:
    """Take all batches, and print what the calls took; those before the first batch do not count."""
    next(batches)
    _spent_ns.clear()
    taken_ns, start_ns = [], time.perf_counter_ns()
    for _ in batches:
        taken_ns.append(time.perf_counter_ns() - start_ns)
        start_ns = time.perf_counter_ns()
    print(f"\n{title}\n{'':24} {'calls':>7} {'p10':>7} {'p25':>7} {'p50':>7} us")
    for name, spent_ns in {"next(batches)": taken_ns, **_spent_ns}.items():
        found = " ".join(f"{one / 1000:7.1f}" for one in np.percentile(spent_ns, [10, 25, 50]))
        print(f"{name:24} {len(spent_ns):7,} {found}", flush=True)


def gathered(folder: str) -> Iterator[torch.Tensor]:
    tokens = np.memmap(f"{folder}/{bench_tokens.FLAT}", np.uint16, "r").reshape(-1, bench_tokens.LENGTH)
    order, size = np.random.default_rng(1).permutation(len(tokens)), bench_tokens.BATCH_SIZE
    for start in range(0, len(order) - size + 1, size):
        yield torch.from_numpy(tokens[order[start : start + size]].astype(np.int64))


def main() -> None:
    args = common.arguments(__doc__ or "", sequences=200_000, tokens=40_000_000)
    tokens = common.made_once(
        args.data, f"tokens-{args.sequences}", lambda target: bench_tokens.make(target, args.sequences)
    )
    packs = common.made_once(args.data, f"packs-{args.tokens}", lambda target: bench_packs.make(target, args.tokens))
    torch.set_num_threads(1)
    print(common.machine())
    for part in PARTS:
        watch(part)
    shown("memory-map gather", gathered(tokens))
    with DataLoader(
        StreamingDataset(tokens, decode={"bin": "array:uint16->int64"}), bench_tokens.BATCH_SIZE
    ) as sequences:
        shown(f"sequences of {bench_tokens.LENGTH} tokens", iter(sequences))
    shown("sequences, four tensors", bench_packs.batches(packs, 0, entries=True))
    with DataLoader(
        Packed(StreamingDataset(f"{packs}/documents"), bench_packs.LENGTH), bench_packs.BATCH_SIZE
    ) as packed:
        shown(f"packs of {bench_packs.LENGTH} tokens", iter(packed))


if __name__ == "__main__":
    main()
