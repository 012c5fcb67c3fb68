"""How full packs are, how fast they are made, and how long ranks wait for the dearest of them.

Pure NumPy on one core, no data. Three tables in Markdown, those of docs/design/0024::

    python benchmarks/bench_packing.py [--groups 20] [--steps 50]
    python benchmarks/bench_packing.py --exchange [--steps 16]

Fill: groups of consecutive chunks of 16 documents with at least 61 or 245 packs' worth of tokens; overlong documents
are split, for all alike. *At most*: what no packing of these groups of 245 exceeds (the bound L2 of Martello and Toth,
1990). *First fit over 8*: the first of 8 open packs with room; where none has any, all 8 are given out, as Grain does
(TorchTitan builds on it). *Next fit*: one open pack, as Levanter has it. Those two run over all documents in one
stream. Documents/s are those of one core (seconds of the process, the least of three): *fitted*, once for a group;
*packed*, the fit being known, and *given other company*, once an epoch.

Several budgets: documents of the first kind, of which some hold images, 64 to 1,024 tokens of them each; T 8,192, and
at most so many tokens of images in a pack.

Idle: 32 ranks with 8 microbatches of a pack each; all wait for the slowest at the end of each.

``--exchange``: 4 processes over gloo, each with a loader of 8 packs a batch, of many small groups. A microbatch is a
sleep as long as its pack costs (40 ms on average), and a barrier at its end. *Idle*: what the planner says of the packs
that came, and the part of the time that ranks really waited. *CPU*: milliseconds of the thread that asks for a batch,
all in all. *Exchange*: milliseconds by the clock, with what it waits for other ranks; and the bytes that a rank sends.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, Packed, StreamingDataset
from streaming.order.packing.balance import exchange, idle, order_local, pack_costs
from streaming.order.packing.fit import Fit, fit, other_company, pack
from streaming.order.packing.rules import PackRules, Packs, cut

RANKS, MICROBATCHES = 32, 8
CHUNK = 16  # documents
T, R = TypeVar("T"), TypeVar("R")
Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def web(random: np.random.Generator, num: int, _: int) -> np.ndarray:
    """Log-normal, median 600 tokens, mean 1,100."""
    return np.exp(random.normal(np.log(600), 1.1, num)).astype(np.int64) + 1


def code(random: np.random.Generator, num: int, _: int) -> np.ndarray:
    """A heavy tail (Pareto, exponent 1.1) up to a million tokens, median 280, mean 1,100."""
    return np.minimum(150 * (1 + random.pareto(1.1, num)), 10**6).astype(np.int64)


def chat(random: np.random.Generator, num: int, _: int) -> np.ndarray:
    """Short: log-normal, median 150 tokens, mean 190."""
    return np.exp(random.normal(np.log(150), 0.7, num)).astype(np.int64) + 1


def uniform(random: np.random.Generator, num: int, _: int) -> np.ndarray:
    """Every length from 1 to 1,000 as often."""
    return random.integers(1, 1001, num)


def up_to_length(random: np.random.Generator, num: int, length: int) -> np.ndarray:
    """Every length from 1 to T as often: two documents a pack, the hardest of all."""
    return random.integers(1, length + 1, num)


def groups(draw: Draw, length: int, num_packs: int, num_groups: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(1)
    least, held = num_packs * length, np.zeros(0, np.int64)
    for _ in range(num_groups):
        while held[:-CHUNK].sum() < least:
            held = np.concatenate([held, draw(random, 4096, length)])
        stop = -(-(int(np.searchsorted(np.cumsum(held), least)) + 1) // CHUNK) * CHUNK
        yield held[:stop]
        held = held[stop:]


def first_fit(sizes: list[int], length: int, num_open: int) -> int:
    """Packs given out by first fit over so many open packs; with one, next fit."""
    given, rooms = 0, [length] * num_open
    for size in sizes:
        place = next((i for i, room in enumerate(rooms) if room >= size), None)
        if place is None:
            given += num_open
            rooms, place = [length] * num_open, 0
        rooms[place] -= size
    return given + sum(room < length for room in rooms)


def fewest(sizes: np.ndarray, length: int) -> int:
    """No fewer packs hold these pieces: each above T / 2 has one to itself; what fits beside is bounded."""
    sizes = np.sort(sizes)
    sums = np.concatenate([[0], np.cumsum(sizes)])
    halves = int(np.searchsorted(sizes, length // 2, side="right"))
    best = -(-int(sums[-1]) // length)
    for least in np.unique(sizes[sizes <= length // 2]).tolist():
        alone = int(np.searchsorted(sizes, length - least, side="right"))  # from here on: no room for `least`
        first = int(np.searchsorted(sizes, least))
        room = (alone - halves) * length - int(sums[alone] - sums[halves])
        rest = int(sums[halves] - sums[first]) - room
        best = max(best, len(sizes) - halves + max(0, -(-rest // length)))
    return best


def fill_table(num_groups: int) -> None:
    names = ("documents", "T", "best fit, 61 packs", "245 packs", "at most", "first fit over 8", "next fit",
             "fitted, documents/s", "packed", "given other company")  # fmt: skip
    print("|", " | ".join(names), "|\n" + "|---" * len(names) + "|")
    for draw in (web, code, chat, uniform, up_to_length):
        for length in (2048, 8192, 32768):
            rules = PackRules(length=length)
            small = [pack(one, rules).fill for one in groups(draw, length, 61, num_groups)]
            large = list(groups(draw, length, 245, num_groups))
            fits, fit_s = timed(partial(fit, rules=rules), large)
            packed, pack_s = timed(partial(packed_by, rules), list(zip(large, fits, strict=True)))
            _, company_s = timed(lambda one: other_company(one, seed=1, epoch=2, group=3), packed)
            documents = sum(map(len, large))
            pieces = cut(np.concatenate(large), rules)
            sizes = pieces.lengths.tolist()
            bound = pieces.num_tokens / (length * sum(fewest(cut(one, rules).lengths, length) for one in large))
            others = [pieces.num_tokens / (first_fit(sizes, length, num) * length) for num in (8, 1)]
            fills = [np.mean(small), np.mean([one.fill for one in packed]), bound, *others]
            shown = [f"{100 * fill:.2f} %" for fill in fills]
            shown += [f"{documents / seconds / 1e6:.2f} M" for seconds in (fit_s, pack_s, company_s)]
            print(f"| {draw.__name__.replace('_', ' ')} | {length:,} |", " | ".join(shown), "|", flush=True)


def packed_by(rules: PackRules, both: tuple[np.ndarray, Fit]) -> Packs:
    return pack(both[0], rules, both[1])


def timed(run: Callable[[T], R], values: list[T]) -> tuple[list[R], float]:
    """What comes of each value, and the seconds of this process for all: the least of three."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        found = [run(one) for one in values]
        seconds.append(time.process_time() - start)
    return found, min(seconds)


def several_table(num_groups: int) -> None:
    print(
        "\n| with images | at most | packs a group | tokens | images | fitted, documents/s |\n|---|---|---|---|---|---|"
    )
    random = np.random.default_rng(3)
    for share, budget in ((0.5, 8192), (0.5, 4096), (0.5, 2048), (0.1, 1024)):
        rules = PackRules(length=8192, overlong="drop", budgets=(budget,))
        given = []
        for tokens in groups(web, 8192, 256, num_groups):
            images = 64 * random.integers(1, 17, len(tokens)) * (random.random(len(tokens)) < share)
            given.append(np.column_stack([tokens, images]))
        fits, seconds = timed(partial(fit, rules=rules), given)
        packs = [pack(one, rules, known) for one, known in zip(given, fits, strict=True)]
        places = sum(map(len, packs))
        fills = [one.sum() / places for one in (np.concatenate([p.lengths for p in packs]) / rules.length,
                                                 np.concatenate([p.amounts for p in packs]) / budget)]  # fmt: skip
        shown = " | ".join(f"{100 * fill:.1f} %" for fill in fills)
        print(f"| {share:.0%} | {budget:,} | {places / len(packs):.0f} | {shown} | "
              f"{sum(map(len, given)) / seconds / 1e6:.2f} M |", flush=True)  # fmt: skip


def idle_table(num_steps: int) -> None:
    print("\n| documents | T | as dealt | local | exchange |\n|---|---|---|---|---|")
    for draw in (web, code, chat, uniform):
        for length in (8192, 32768, 131072):
            costs = packed_costs(draw, length, num_steps).reshape(num_steps, RANKS, MICROBATCHES)
            local = np.take_along_axis(
                costs, np.array([[order_local(rank) for rank in step] for step in costs]), axis=2
            )
            dealt = np.stack([step.ravel()[np.stack(exchange(step.ravel(), [MICROBATCHES] * RANKS))] for step in costs])
            shown = " | ".join(f"{100 * np.mean([idle(step) for step in one]):.1f} %" for one in (costs, local, dealt))
            print(f"| {draw.__name__} | {length:,} | {shown} |", flush=True)


def packed_costs(draw: Draw, length: int, num_steps: int) -> np.ndarray:
    """Costs of the packs of so many steps, shuffled over groups as an epoch shuffles them."""
    needed = num_steps * RANKS * MICROBATCHES
    found = []
    for one in groups(draw, length, 256, needed // 256 + 1):
        packs = other_company(pack(one, PackRules(length=length)), seed=1, epoch=0, group=len(found))
        found.append(pack_costs(packs.lengths, packs.splits, packs.sizes))
    return np.random.default_rng(2).permutation(np.concatenate(found))[:needed]


# --- as run


PROCESSES, MICROBATCH_S = 4, 0.04
GROUP_PACKS = 16  # of a shard, so that there are more groups than lanes


def exchange_table(num_steps: int) -> None:
    heads = (
        "documents", "T", "balance", "idle, planned", "idle, run", "CPU, ms a batch", "exchange, ms", "MB sent a batch"
    )  # fmt: skip
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    for draw in (web, code):
        for length in (8192, 32768):
            with tempfile.TemporaryDirectory() as folder:
                write_documents(Path(folder), draw, length, num_steps)
                arguments = (folder, draw.__name__, length, num_steps)
                torch.multiprocessing.spawn(rank_of_exchange, arguments, nprocs=PROCESSES)


def write_documents(folder: Path, draw: Draw, length: int, num_steps: int) -> None:
    """Enough tokens for so many steps, and a tenth more."""
    random = np.random.default_rng(3)
    wanted = int(1.1 * num_steps * PROCESSES * MICROBATCHES * length)
    columns = {"tokens": lambda sample: len(sample["tok"]) // 2}
    with ShardWriter(f"{folder}/{{:04d}}.tar", max_bytes=2 * GROUP_PACKS * length, columns=columns) as writer:
        number = 0
        while wanted > 0:
            for size in draw(random, 256, length).tolist():
                writer.write({"__key__": f"{number:08d}", "tok": np.ones(size, "<u2").tobytes()})
                number, wanted = number + 1, wanted - size


def rank_of_exchange(rank: int, folder: str, documents: str, length: int, num_steps: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("streaming").setLevel(logging.ERROR)  # groups are small on purpose
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = DeviceMesh.from_sizes(dp_size=PROCESSES, rank=rank)
    packed = Packed(StreamingDataset(folder), length, dtype="uint16")
    for balance in (None, "local", "exchange"):
        with DataLoader(packed, MICROBATCHES, device_mesh=mesh, balance=balance) as loader:
            shown = step_by_step(loader, length, num_steps)
        if not rank:
            print(f"| {documents} | {length:,} | {balance or 'none'} | {shown} |", flush=True)
    dist.destroy_process_group()


def step_by_step(loader: DataLoader, length: int, num_steps: int) -> str:
    """Go through so many batches; the cells of the table."""
    asked_s, worked_s, waited_s, planned = 0.0, 0.0, 0.0, []
    running: Any = iter(loader)
    next(running)  # opens connections, and fetches
    earlier = loader.metrics()
    for _ in range(num_steps - 1):
        dist.barrier()
        began_s = time.thread_time()
        batch = next(running)
        asked_s += time.thread_time() - began_s
        costs = costs_of(batch, length)
        everyones = [torch.zeros(len(costs), dtype=torch.int64) for _ in range(PROCESSES)]
        dist.all_gather(everyones, torch.from_numpy(costs))
        planned.append(idle(torch.stack(everyones).numpy()))
        mean = float(torch.stack(everyones).double().mean())
        for cost in costs.tolist():
            began_s = time.perf_counter()
            time.sleep(MICROBATCH_S * cost / mean)
            middle_s = time.perf_counter()
            dist.barrier()
            worked_s, waited_s = worked_s + middle_s - began_s, waited_s + time.perf_counter() - middle_s
    totals = torch.tensor([worked_s, waited_s, asked_s])
    dist.all_reduce(totals)
    now = loader.metrics()
    exchange_s, sent = (now.get(name, 0) - earlier.get(name, 0) for name in ("exchange_s", "exchanged_bytes"))
    waited = float(totals[1] / (totals[0] + totals[1]))
    steps = num_steps - 1
    return " | ".join([
        f"{100 * np.mean(planned):.1f} %", f"{100 * waited:.1f} %", f"{1e3 * float(totals[2]) / PROCESSES / steps:.1f}",
        f"{1e3 * exchange_s / steps:.1f}", f"{sent / steps / 1e6:.2f}",
    ])  # fmt: skip


def costs_of(batch: Any, length: int) -> np.ndarray:
    """What the packs of a batch cost, as ``balance`` has it."""
    borders = batch["cu_seqlens"].numpy().astype(np.int64)
    real = batch["document_ids"].flatten()[borders[:-1]].numpy() >= 0
    lengths, packs = np.diff(borders)[real], (borders[:-1] // length)[real]
    splits = np.searchsorted(packs, np.arange(len(batch["input_ids"]) + 1))
    return pack_costs(lengths, splits, np.full(len(splits) - 1, length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20, help="groups of each kind")
    parser.add_argument("--steps", type=int, help="global batches: 50 of 256 packs, with --exchange 16 of 32")
    parser.add_argument("--exchange", action="store_true", help="packs dealt by processes, and what it costs")
    args = parser.parse_args()
    if args.exchange:
        exchange_table(args.steps or 16)
    else:
        fill_table(args.groups)
        several_table(args.groups)
        idle_table(args.steps or 50)


if __name__ == "__main__":
    main()
