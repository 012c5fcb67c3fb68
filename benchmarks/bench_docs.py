"""Figures of the pages that no other benchmark gives: costs, sizes of states, and what some rules of tuning gain.

Run: ``python benchmarks/bench_docs.py [PART …] [--data FOLDER]``; without a PART all of them.

- ``draws``: CPU time of random numbers: a generator for ``transform(sample, rng)``, seeding the process's generators
  and those of objects.
- ``states``: bytes of a checkpoint: of a schedule over many sources, of curricula.
- ``kept``: bytes read for each byte kept, one sample in ten of 100 KB by ``where``, from an S3 server on loopback.
- ``diff``: bytes of temporary files for each sample of two sets that differ everywhere.
- ``images``: CPU time to decode JPEGs of 2048 x 1536 to 224 x 224, and of the same after ``--image-max-side 512``.
- ``text``: CPU time for 2,048 tokens: encoded from text, and delivered by a loader of encoded ones.
- ``rows``: documents that are cut in short rows: packs of 4,096 laid out in them, and packs of their length.
- ``window``: memory that chunks of 4 MiB need at once, by the window of the shuffle, as ``shard_tools plan`` has it.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_scale
import bench_tokenize
import common
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from infra import DeviceMesh
from shard_tools import ShardWriter
from shard_tools.look.diff import compare, spill
from shard_tools.look.plan.report import PlanOptions, plan_table
from shard_tools.make.convert import ConvertOptions, ImageOptions, convert
from streaming import Curriculum, DataLoader, Mixture, Schedule, StreamingDataset
from streaming.build.batches.draws import BatchDraws, OwnGenerator
from streaming.order.packing.fit import pack
from streaming.order.packing.layout import PackRows
from streaming.order.packing.rules import PackRules
from streaming.order.packing.shorter import shorter
from streaming.storage import Storage

ROWS = 5_000


def cpu_us(work: Callable[[], object], repeats: int = 5) -> float:
    """Microseconds of this thread for one of ``ROWS`` rows, the least of some repeats."""
    found = []
    for _ in range(repeats):
        began_s = time.thread_time()
        work()
        found.append((time.thread_time() - began_s) / ROWS * 1e6)
    return min(found)


def draws(_: str) -> None:
    """Random numbers."""

    def per_row(begin: BatchDraws, *, generator: bool = False) -> Callable[[], None]:
        def rows() -> None:
            for row in range(ROWS):
                begin.begin_sample(row)
                if generator:
                    begin.generator(0)

        return rows

    positions = np.arange(ROWS)
    nothing = cpu_us(per_row(BatchDraws(1, positions)))
    print(f"generator for a call: {cpu_us(per_row(BatchDraws(1, positions), generator=True)) - nothing:.1f} us")
    for names in ("random", "numpy", "torch"):
        print(f"seeding {names}: {cpu_us(per_row(BatchDraws(1, positions, frozenset((names,))))) - nothing:.1f} us")
    for name, held in (
        ("random.Random", random.Random(0)), ("numpy.random.Generator", np.random.default_rng(0)),
        ("torch.Generator", torch.Generator()),
    ):  # fmt: skip
        one = OwnGenerator.of(name, held.bit_generator if isinstance(held, np.random.Generator) else held)
        assert one is not None
        seeded = BatchDraws(1, positions, frozenset((name,)), {name: one})
        print(f"seeding a {name} of an object: {cpu_us(per_row(seeded)) - nothing:.1f} us")


def states(folder: str) -> None:
    """Checkpoints."""

    def make(target: str) -> None:
        rng = np.random.default_rng(0)
        with ShardWriter(f"{target}/{{:06d}}.tar", columns={"a": "json.a", "b": "json.b"}) as writer:
            for number in range(4096):
                row = {"a": rng.random(), "b": rng.random()}
                writer.write({"__key__": f"{number:06d}", "txt": "x", "json": row})

    dataset = StreamingDataset(common.made_once(folder, "docs-states", make))

    def size(source: Any) -> int:
        with DataLoader(source, batch_size=8, num_threads=0) as loader:
            next(iter(loader))
            return len(json.dumps(loader.state_dict()))

    def mixed(count: int, *, scheduled: bool) -> int:
        names = [f"s{number:06d}" for number in range(count)]
        begin, end = dict.fromkeys(names, 1.0), {name: float(1 + at) for at, name in enumerate(names)}
        weights = Schedule.linear(begin, end, over=1_000_000) if scheduled else end
        return size(Mixture(dict.fromkeys(names, dataset), weights=weights))

    few, many, plain = mixed(8, scheduled=True), mixed(40, scheduled=True), mixed(40, scheduled=False)
    print(f"mixture by a schedule: {few:,} bytes with 8 sources, {(many - few) / 32:.0f} for each further one")
    print(f"of which the schedule: {(many - plain) / 40:.0f} a source more than constant weights")
    ramp = Schedule.linear(0.1, 1.0, over=100_000)
    print(f"curriculum, one metric, 16 buckets: {size(Curriculum(dataset, 'a', ramp)):,} bytes")
    grid = Curriculum(dataset, {"a": ramp, "b": Schedule.root(0.1, 1.0, over=100_000)}, buckets=16)
    print(f"curriculum, a grid of 256 cells: {size(grid):,} bytes")


def kept(folder: str) -> None:
    """What is read of a filtered set."""

    def make(target: str) -> None:
        with ShardWriter(f"{target}/{{:06d}}.tar") as writer:
            for number in range(300):
                writer.write({"__key__": f"{number:06d}", "bin": number.to_bytes(4, "little") * 25_000})

    data = common.made_once(folder, "docs-kept", make)
    with common.s3_copy(data) as (url, options):
        dataset = StreamingDataset(url, where="hash(__key__) % 10 = 4", storage_options=options, decode=None)
        with DataLoader(dataset, batch_size=4, last_batch="partial") as loader:
            count = sum(len(batch["__key__"]) for batch in loader)
            fetched = loader.metrics()["fetched_bytes"]
    print(f"{count} of 300 samples kept: {fetched / (count * 100_000):.2f} bytes read for each byte kept")


def diff(folder: str) -> None:
    """Temporary files of ``diff``."""
    count = 20_000

    def make(seed: int, target: str) -> None:
        rng = np.random.default_rng(seed)
        with ShardWriter(f"{target}/{{:06d}}.tar", columns={"score": "json.n"}) as writer:
            for number in rng.permutation(count).tolist():
                fields = {"txt": rng.bytes(200), "cls": number % 10, "json": {"n": number}}
                writer.write({"__key__": f"photos/{number:09d}", **fields})

    sets = [
        common.made_once(folder, f"docs-diff-{seed}", lambda target, seed=seed: make(seed, target)) for seed in (1, 2)
    ]
    written = [0, 0]
    write = spill.feather.write_feather

    def counted(table: Any, path: str, **options: Any) -> None:
        write(table, path, **options)
        written[0] += table.num_rows
        written[1] += Path(path).stat().st_size

    spill.feather.write_feather = counted
    try:
        options = compare.DiffOptions(memory_bytes=8 << 20)
        compare.diff(*sets, storage=Storage(), options=options)
    finally:
        spill.feather.write_feather = write
    print(f"{written[1] / (2 * count):.0f} bytes of temporary files for a sample, {written[0]:,} rows")


def images(folder: str) -> None:
    """Large images, and small ones made of them once."""

    def make(target: str) -> None:
        rng = np.random.default_rng(0)
        with ShardWriter(f"{target}/{{:06d}}.tar") as writer:
            for number in range(64):
                small = Image.fromarray(rng.integers(0, 256, (96, 128, 3), dtype=np.uint8))
                out = io.BytesIO()
                small.resize((2048, 1536), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
                writer.write({"__key__": f"{number:06d}", "jpg": out.getvalue()})

    large = common.made_once(folder, "docs-images", make)
    options = ConvertOptions(kind="tars", images=ImageOptions(max_side=512))
    small = common.made_once(
        folder, "docs-images-512", lambda target: convert(f"{large}/*.tar", target, options=options)
    )
    for name, data in (("2048 x 1536", large), ("after --image-max-side 512", small)):
        found = []
        for _ in range(3):
            began_s, count = time.process_time(), 0
            dataset = StreamingDataset(data, decode={"jpg": "rgb8:224x224"})
            with DataLoader(dataset, batch_size=16, num_threads=1) as loader:
                count = sum(len(batch["jpg"]) for batch in loader)
            found.append((time.process_time() - began_s) / count * 1e3)
        print(f"{name}: {min(found):.1f} ms of CPU an image, all in all")


def text(folder: str) -> None:
    """Tokens from text, and tokens."""
    texts = bench_tokenize.corpus(2e6, 8000)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        bench_tokenize.train(texts[::10], path)
        library = Tokenizer.from_file(str(path))
        began_s = time.thread_time()
        count = sum(len(library.encode(one).ids) for one in texts)
        encoded_us = (time.thread_time() - began_s) / count * 2048 * 1e6

    def make(target: str) -> None:
        row = np.arange(2048, dtype="<u2").tobytes()
        with ShardWriter(f"{target}/{{:06d}}.tar") as writer:
            for number in range(40_000):
                writer.write({"__key__": f"{number:06d}", "bin": row})

    data = common.made_once(folder, "docs-text", make)
    found = []
    for _ in range(3):
        began_s, rows = time.process_time(), 0
        dataset = StreamingDataset(data, decode={"bin": "array:uint16->int64"})
        with DataLoader(dataset, batch_size=32, num_threads=0) as loader:
            rows = sum(len(batch["bin"]) for batch in loader)
        found.append((time.process_time() - began_s) / rows * 1e6)
    print(f"2,048 tokens: {encoded_us:,.0f} us of CPU to encode, {min(found):.1f} to deliver, opening included")


def rows(_: str) -> None:
    """Documents of 570 tokens on average, log-normal with sigma 1.2, in groups of a million tokens."""
    rng, whole = np.random.default_rng(0), 4096
    found: dict[str, list[float]] = {}
    for _ in range(10):
        lengths = np.exp(rng.normal(np.log(570) - 0.72, 1.2, 1_000_000 // 570)).astype(np.int64) + 1
        packs = pack(lengths, PackRules(length=whole))
        laid = PackRows(
            splits=packs.splits, samples=packs.documents, starts=packs.starts, stops=packs.stops, lengths=packs.lengths
        )
        for length in (1024, 2048):
            ways = {
                f"rows of {length} of packs of {whole}": shorter(laid, whole, whole // length).samples,
                f"packs of {length}": pack(lengths, PackRules(length=length)).documents,
            }
            for name, documents in ways.items():
                found.setdefault(name, []).append(float((np.bincount(documents) > 1).sum() / len(lengths)))
    for name, shares in found.items():
        print(f"{name}: {np.mean(shares):.1%} of documents are cut")


def window(_: str) -> None:
    """Memory by window."""
    per_chunk = 64
    table = bench_scale.made_up(20_000, per_chunk)
    for share in (2.0, 1.0, 0.0):
        options = PlanOptions(
            mesh=DeviceMesh.from_sizes(dp_size=8, rank=0, environ={}), global_batch_size=512,
            window=int(share * per_chunk),
        )  # fmt: skip
        report = plan_table(table, options=options)
        live = max(load.live_bytes for load in report.loads)
        print(f"window {report.window}, {report.lanes} lanes: {live / 2**20:,.0f} MiB at once on a rank")


PARTS = {part.__name__: part for part in (draws, states, kept, diff, images, text, rows, window)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--data", default=f"{tempfile.gettempdir()}/shardstream-bench", help="folder of made data")
    args = parser.parse_args()
    print(common.machine())
    for name in args.parts or PARTS:
        print(f"\n{name}")
        PARTS[name](args.data)


if __name__ == "__main__":
    main()
