"""Tokens per second: documents packed into sequences of 8,192 tokens, against the same tokens cut into such sequences.

Run: ``python benchmarks/bench_packs.py [--tokens 40000000] [--rounds 3] [--workers 0] [--data FOLDER]``. Both sets hold
the same tokens, uint16. Documents have 10 to 100,000 tokens, log-normal, 570 on average; sequences are one record each,
decoded to int64 [8, 8192]. A batch of packs holds four such tensors; the run to compare with makes the same four of
each batch of sequences, as a training loop over them would. Each run counts with all that it does: opening, counting
and making packs, reading, building. Rates are given by the clock, by CPU time of the whole process, which says more
where others use the machine, and by that of the thread that asks for batches: about the clock's where other cores are
free to fetch and to pack. torch is held to one thread: with two, on two busy cores, those of a `clone` wait for each
other, and sequences come at a tenth of the rate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import common
import numpy as np
import torch

from shard_tools import ShardWriter
from streaming import DataLoader, Packed, StreamingDataset

LENGTH, BATCH_SIZE = 8192, 8


def make(folder: str, count: int) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, count, np.uint16)
    lengths = rng.lognormal(5.5, 1.3, count // 100).astype(np.int64).clip(10, 100_000)
    stops = np.cumsum(lengths)
    stops = np.append(stops[stops < count], count)

    def write(name: str, edges: np.ndarray, field: str) -> None:
        with ShardWriter(
            os.path.join(folder, name, "{:06d}.tar"), columns={"tokens": lambda one: len(one[field]) // 2}
        ) as writer:
            for number, (low, high) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
                writer.write({"__key__": f"{number:09d}", field: tokens[low:high].tobytes()})

    write("documents", np.concatenate([[0], stops]), "tok")
    write("sequences", np.arange(0, count + 1, LENGTH), "tok")


def packs(folder: str, workers: int) -> int:
    packed = Packed(StreamingDataset(os.path.join(folder, "documents")), LENGTH)
    with DataLoader(packed, BATCH_SIZE, num_workers=workers) as loader:
        return sum(batch["input_ids"].numel() for batch in loader)


def sequences(folder: str, workers: int, *, entries: bool = False) -> int:
    return sum(batch.numel() for batch in batches(folder, workers, entries=entries))


def batches(folder: str, workers: int, *, entries: bool) -> Iterator[torch.Tensor]:
    """Sequences, with the other three tensors made of each batch."""
    dataset = StreamingDataset(os.path.join(folder, "sequences"), decode={"tok": "array:uint16->int64"})
    with DataLoader(dataset, BATCH_SIZE, num_workers=workers) as loader:
        for batch in loader:
            tokens = batch["tok"]
            if entries:
                labels, positions = tokens.clone(), torch.arange(LENGTH).repeat(len(tokens), 1)
                documents = torch.zeros_like(tokens)
                labels[:, 0], positions[0, 0], documents[0, 0] = -100, 0, 0
            yield tokens


def main() -> None:
    args = common.arguments(__doc__ or "", tokens=40_000_000, workers=0)
    folder = common.made_once(args.data, f"packs-{args.tokens}", lambda target: make(target, args.tokens))
    torch.set_num_threads(1)
    print(common.machine())
    runs: dict[str, common.Run] = {
        "sequences, input_ids alone": lambda: sequences(folder, args.workers),
        "sequences, four tensors": lambda: sequences(folder, args.workers, entries=True),
        "packs, four tensors": lambda: packs(folder, args.workers),
    }
    title = f"{args.tokens:,} tokens in sequences of {LENGTH}"
    common.show_turns(title, runs, args.rounds, against="sequences, four tensors")


if __name__ == "__main__":
    main()
