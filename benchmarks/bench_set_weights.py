"""Steps between ``set_weights`` and its effect: on 1, 2 and 8 ranks of unlike speed, of samples and of packs.

Run: ``python benchmarks/bench_set_weights.py [--ranks 1 2 8] [--tokens 20000000] [--data FOLDER]``. Ranks are
processes with a gloo group. Rank r sleeps r milliseconds a step and calls ``set_weights`` after 30 + r % 3 steps, so
that some are ahead; all data fits into memory and is read ahead. The weights go from the one source to the other. *row*
is the step of the row that the call returns, *first* and *last* are those of the first batch with a sample of the new
source, and of the last one with a sample of the old: steps after the call, on the rank that called after the fewest.
Each run takes 1,200 steps: 1,170 means none of them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any

import common
import numpy as np
import torch.distributed as dist
import torch.multiprocessing as processes

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, Packed, StreamingDataset

LENGTH, STEPS, CALL_AT = 2048, 1_200, 30
SIZES = {"packs": (8, 64), "samples of 100 kB": (16, 64), "records of 2 kB": (64, 256)}
DEALT: Mapping[str, Mapping[str, Any]] = {
    "exact": {"quotas": "exact"},
    "one_source": {"batches": "one_source"},
    "chunks": {},
}


def make(folder: str, tokens: int) -> None:
    rng = np.random.default_rng(0)
    for source in ("old", "new"):
        with ShardWriter(
            os.path.join(folder, "packs", source, "{:06d}.tar"), columns={"tokens": lambda one: len(one["tok"]) // 2}
        ) as writer:
            lengths = rng.lognormal(5.5, 1.3, tokens // 570).astype(np.int64).clip(10, 20_000)
            for number, length in enumerate(lengths.tolist()):
                tok = rng.integers(0, 50_000, length, np.uint16).tobytes()
                writer.write({"__key__": f"{number:09d}", "tok": tok})
        for kind, count, size in (("samples of 100 kB", 1_500, 100_000), ("records of 2 kB", 20_000, 2_000)):
            with ShardWriter(os.path.join(folder, kind, source, "{:06d}.tar")) as writer:
                for number in range(count):
                    writer.write({"__key__": f"{number:09d}", "bin": rng.bytes(size)})


def opened(folder: str, kind: str, dealt: str) -> Mixture:
    sources: dict[str, Any] = {
        source: StreamingDataset(os.path.join(folder, kind, source), seed=1) for source in ("old", "new")
    }
    if kind == "packs":
        sources = {source: Packed(dataset, LENGTH) for source, dataset in sources.items()}
    return Mixture(sources, weights={"old": 1, "new": 0}, **DEALT[dealt])


def measured(rank: int, num_ranks: int, folder: str, kind: str, dealt: str, size: int) -> list[Any]:
    """The row, and by step whether a batch of this rank holds samples of the new and of the old source."""
    found: list[tuple[bool, bool]] = []
    row, called_at = 0, CALL_AT + rank % 3
    with DataLoader(opened(folder, kind, dealt), global_batch_size=size, num_threads=1) as loader:
        for step, batch in zip(range(STEPS), loader, strict=False):
            found.append(("new" in batch["__source__"], "old" in batch["__source__"]))
            if step + 1 < 2 * CALL_AT:
                time.sleep(rank / 1000)
            if step + 1 == called_at:
                row = loader.set_weights({"old": 0, "new": 1})
    told: list[Any] = [None] * num_ranks
    dist.all_gather_object(told, (row, found))
    return told


def work(rank: int, num_ranks: int, port: int, folder: str, kinds: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    for kind in kinds:
        for dealt in DEALT:
            for size in SIZES[kind]:
                told = measured(rank, num_ranks, folder, kind, dealt, size)
                if rank == 0:
                    show(num_ranks, kind, dealt, size, told)
    dist.destroy_process_group()


def show(num_ranks: int, kind: str, dealt: str, size: int, told: list[Any]) -> None:
    """A line of the table."""
    (row,) = {row for row, _ in told}  # the same on all ranks
    first = min(next((step for step, (has_new, _) in enumerate(found) if has_new), STEPS) for _, found in told)
    last = max(max(step for step, (_, has_old) in enumerate(found) if has_old) for _, found in told)
    steps = [-(-row // size) - CALL_AT, first - CALL_AT, last - CALL_AT + 1]
    print(f"{num_ranks:5}  {kind:18} {dealt:11} {size:5}" + "".join(f"{step:8,}" for step in steps), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default=os.path.join(common.tempfile.gettempdir(), "shardstream-bench"))
    parser.add_argument("--tokens", type=int, default=20_000_000, help="tokens of each source")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--kinds", nargs="+", default=list(SIZES), choices=list(SIZES))
    args = parser.parse_args()
    folder = common.made_once(args.data, f"set-weights-{args.tokens}", lambda target: make(target, args.tokens))
    print(common.machine())
    print(f"ranks  {'':18} {'dealt':11} batch     row   first    last")
    for num_ranks in args.ranks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # finds a free port
        port = store.port
        del store
        processes.spawn(work, (num_ranks, port, folder, args.kinds), nprocs=num_ranks)


if __name__ == "__main__":
    main()
