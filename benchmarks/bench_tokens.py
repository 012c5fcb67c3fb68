"""Token sequences: 2,048 uint16 tokens each, shuffled, delivered as int64 [32, 2048].

Run: ``python benchmarks/bench_tokens.py [--sequences 40000] [--rounds 3] [--data FOLDER]``. Ours against webdataset,
and against the least that can be done: a gather from a NumPy memory map of all tokens in random order, converted alike.
Rates are given by the clock, by CPU time of the process, and by that of the thread that asks for batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import common
import numpy as np
import torch

from streaming import DataLoader, StreamingDataset

LENGTH, BATCH_SIZE, PER_SHARD = 2048, 32, 5_000
FLAT = "tokens.uint16"


def make(folder: str, count: int) -> None:
    """The same sequences twice: in shards, and end to end in one flat file."""
    rng = np.random.default_rng(0)
    with open(os.path.join(folder, FLAT), "wb") as flat:

        def samples() -> Iterator[dict[str, object]]:
            for i in range(count):
                data = rng.integers(0, 50_000, LENGTH, np.uint16).tobytes()
                flat.write(data)
                yield {"__key__": f"{i:09d}", "bin": data}

        common.write_shards(folder, samples(), per_shard=PER_SHARD)


def ours(folder: str, workers: int) -> int:
    dataset = StreamingDataset(folder, decode={"bin": "array:uint16->int64"})
    with DataLoader(dataset, BATCH_SIZE, num_workers=workers) as loader:
        return sum(checked(batch["bin"]) for batch in loader)


def theirs(folder: str) -> int:
    def converted(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "bin": np.frombuffer(sample["bin"], np.uint16).astype(np.int64)}

    batches = common.webdataset(folder, lambda pipeline: pipeline.map(converted), batch_size=BATCH_SIZE)
    return sum(checked(torch.as_tensor(batch["bin"])) for batch in batches)


def gather(folder: str) -> int:
    tokens = np.memmap(os.path.join(folder, FLAT), np.uint16, "r").reshape(-1, LENGTH)
    order = np.random.default_rng(1).permutation(len(tokens))
    starts = range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE)
    return sum(
        checked(torch.from_numpy(tokens[order[start : start + BATCH_SIZE]].astype(np.int64))) for start in starts
    )


def checked(batch: torch.Tensor) -> int:
    """Number of sequences of a batch that is what it should be."""
    if batch.dtype != torch.int64 or batch.shape[1] != LENGTH:
        raise ValueError(f"got {batch.dtype} {tuple(batch.shape)}")
    return len(batch)


def main() -> None:
    args = common.arguments(__doc__ or "", sequences=40_000, workers=0)
    folder = common.made_once(args.data, f"tokens-{args.sequences}", lambda target: make(target, args.sequences))
    print(common.machine())
    common.show_turns(
        f"{args.sequences:,} sequences of {LENGTH} tokens as int64",
        {
            "webdataset": lambda: theirs(folder),
            "shardstream": lambda: ours(folder, args.workers),
            "memory-map gather": lambda: gather(folder),
        },
        args.rounds, against="webdataset",
    )  # fmt: skip


if __name__ == "__main__":
    main()
