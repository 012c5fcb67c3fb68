"""When the first batch comes: of the first epoch, of later ones, and of a second loader; torch's loader in turns.

Run: ``python benchmarks/bench_first_batch.py [--kinds bytes,pixels,tokens,small,function] [--workers 0,2,4]``
``[--sources disk,s3] [--rounds 5] [--tree OTHER]``. Each turn is a process of its own that has imported torch. *first*:
from nothing, the data set and the loader included; *later*: from ``iter`` of an epoch after the first (median of four);
*again*: as first, of a second loader in the same process. An epoch has eight batches, with 5 ms of training after each.
Contestants: ours; torch's loader with forked workers, new ones for each epoch; the same with persistent workers.
torch's data set reads the same samples, from one flat file by ``pread``, or from an S3 server on loopback by ranged
requests of our client; images are decoded with Pillow. ``--tree``: another tree, such as an older one, takes turns.

``--far``: how many round trips pass until the first batch of 64 images as bytes, from an S3 server whose every answer
is a round trip late (``--round-trip-ms``); opened by prefix and by names. Connecting is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import bench_images
import bench_unhidden
import common
import numpy as np
import torch
import torch.utils.data

from streaming import DataLoader, StreamingDataset
from streaming.storage import Storage

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BATCHES, EPOCHS, TRAINING_S = 8, 5, 0.005
SIDE = bench_unhidden.SIDE
MOMENTS = ("first", "later", "again")


def flipped(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A transform as programs have it: floats, flipped at random."""
    pixels = torch.as_tensor(sample["jpg"])
    return {"image": (pixels.flip(1) if rng.random() < 0.5 else pixels).float().div_(255)}


def parsed(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform of a small record."""
    record = sample["json"] if isinstance(sample["json"], dict) else json.loads(sample["json"])
    return {"length": len(record["text"]), "score": float(record["score"])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is asked for, of which data of ``bench_unhidden.py``."""

    data: str
    field: str
    batch_size: int
    options: Mapping[str, Any] = field(default_factory=dict)


KINDS = {
    "bytes": Kind(data="images", field="jpg", batch_size=64, options={"decode": None}),
    "pixels": Kind(data="images", field="jpg", batch_size=64, options={"decode": {"jpg": f"rgb8:{SIDE}x{SIDE}"}}),
    "tokens": Kind(data="tokens", field="bin", batch_size=32, options={"decode": {"bin": "array:uint16->int64"}}),
    "small": Kind(data="records", field="json", batch_size=8, options={"transform": parsed}),
    "function": Kind(
        data="images", field="jpg", batch_size=16,
        options={"decode": {"jpg": f"rgb8:{SIDE}x{SIDE}"}, "transform": flipped},
    ),
}  # fmt: skip
CONTESTANTS = ("ours", "forked", "persistent")

# ----------------------------------------------------------------------------------------------------- the contestants


class Rows(torch.utils.data.Dataset[Any]):
    """The samples of the flat file, for torch's loader."""

    def __init__(self, kind: str, folder: str, url: str, storage_options: Mapping[str, str]) -> None:
        self._stops = np.load(os.path.join(folder, "stops.npy"))
        self._path, self._url, self._storage_options, self._name = f"{folder}/flat.bin", url, storage_options, kind
        self._file, self._storage = -1, None

    def __len__(self) -> int:
        return BATCHES * KINDS[self._name].batch_size

    def __getitem__(self, index: int) -> Any:
        start, stop = self._stops[index * 7919 % (len(self._stops) - 1) :][:2].tolist()
        payload = self._read(start, stop)
        if self._name == "bytes":
            return payload
        if self._name == "tokens":
            return torch.from_numpy(np.frombuffer(payload, np.uint16).astype(np.int64))
        if self._name == "small":
            return parsed({"json": payload})
        from bench_decode import by_pillow  # noqa: PLC0415

        pixels = torch.from_numpy(by_pillow(payload).copy())
        return pixels if self._name == "pixels" else flipped({"jpg": pixels}, np.random.default_rng(index))

    def _read(self, start: int, stop: int) -> bytes:
        if self._url:
            self._storage = self._storage or Storage(dict(self._storage_options))
            return bytes(self._storage.read(f"{self._url}flat.bin", start, stop))
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDONLY)
        return os.pread(self._file, stop - start, start)


def as_is(items: list[Any]) -> list[Any]:
    return items


def made(asked: Mapping[str, Any]) -> Any:
    """The loader of a contestant, with its data set."""
    kind, workers = KINDS[asked["kind"]], asked["workers"]
    if asked["contestant"] == "ours":
        dataset = StreamingDataset(asked["url"] or asked["folder"], storage_options=asked["options"], **kind.options)
        return DataLoader(dataset, kind.batch_size, num_workers=workers, epoch_size=BATCHES * kind.batch_size)
    rows = Rows(asked["kind"], asked["folder"], asked["url"], asked["options"])
    return torch.utils.data.DataLoader(
        rows, kind.batch_size, num_workers=workers, collate_fn=as_is if asked["kind"] == "bytes" else None,
        persistent_workers=asked["contestant"] == "persistent",
    )  # fmt: skip


def epoch(loader: Any, begun_s: float) -> float:
    """Train one epoch. Returns the seconds until its first batch."""
    found_s = 0.0
    for batch in loader:
        found_s = found_s or time.perf_counter() - begun_s
        del batch
        time.sleep(TRAINING_S)
    return found_s


def turn(asked: Mapping[str, Any]) -> dict[str, float]:
    """Seconds until the first batch, by the moment; in a process of its own."""
    found: dict[str, float] = {}
    for moment in ("first", "again"):
        begun_s = time.perf_counter()
        loader = made(asked)
        found[moment] = epoch(loader, begun_s)
        later = [epoch(loader, time.perf_counter()) for _ in range(EPOCHS - 1)]
        found.setdefault("later", statistics.median(later))
        if asked["contestant"] == "ours":
            loader.close()
        del loader
    return found


# ----------------------------------------------------------------------------------------------------------- the table


def in_a_process(asked: Mapping[str, Any], tree: str) -> dict[str, float]:
    here = os.path.dirname(os.path.abspath(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((tree, here))}
    command = [sys.executable, "-P", os.path.abspath(__file__), "--turn", json.dumps(asked)]
    ran = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    return ((kind, source, workers) for kind in args.kinds for source in args.sources for workers in args.workers)


def contestants(workers: int, trees: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Their names, what they are, and their tree."""
    yield from ((name, "ours", tree) for name, tree in trees.items())
    yield from ((one, one, ROOT) for one in CONTESTANTS[1:] if workers or one == "forked")


def compare(args: argparse.Namespace) -> None:
    """Let contestants take turns, and print medians in ms."""
    trees = {"ours": ROOT, **({"other": os.path.abspath(args.tree)} if args.tree else {})}
    print(f"{common.machine()}, commit {common.commit()}; {args.rounds} rounds, medians in ms: {', '.join(MOMENTS)}")
    with ExitStack() as stack:
        places: dict[tuple[str, str], tuple[str, dict[str, str]]] = {}
        for kind, source, workers in cells(args):
            data = KINDS[kind].data
            folder = common.made_once(
                args.data, f"unhidden-{data}", lambda target, data=data: bench_unhidden.make(target, data)
            )
            if source == "s3" and (data, source) not in places:
                places[data, source] = stack.enter_context(common.s3_copy(folder))
            url, options = places.get((data, source), ("", {}))
            found: dict[str, list[dict[str, float]]] = {}
            for _ in range(args.rounds):
                for name, one, tree in contestants(workers, trees):
                    asked = {"kind": kind, "folder": folder, "url": url, "options": options, "contestant": one,
                             "workers": workers}  # fmt: skip
                    found.setdefault(name, []).append(in_a_process(asked, tree))
            said = "   ".join(f"{name} {medians(rounds)}" for name, rounds in found.items())
            print(f"{kind:9} {source:5} {workers} workers   {said}", flush=True)


def medians(rounds: list[dict[str, float]]) -> str:
    """Medians of the rounds in ms, of each moment."""
    return " ".join(f"{1e3 * statistics.median(one[moment] for one in rounds):6.1f}" for moment in MOMENTS)


# ---------------------------------------------------------------------------------------------------------- round trips


def first_batch_s(urls: str | list[str], options: dict[str, str]) -> float:
    """Seconds from nothing to the first batch of 64."""
    start_s = time.perf_counter()
    with DataLoader(StreamingDataset(urls, decode=None, storage_options=options), 64) as loader:
        next(iter(loader))
        return time.perf_counter() - start_s


def count_round_trips(args: argparse.Namespace) -> None:
    """Print how many round trips pass until the first batch."""
    sys.path.insert(0, ROOT)
    from tests.support.servers.fault_proxy import FaultProxy  # noqa: PLC0415  tests are not installed

    class FarAway(FaultProxy):
        """Every answer comes a round trip late."""

        round_trip_s = 0.0

        def _next(self, method: str, path: str, span: str | None) -> None:
            with self._lock:
                self.log.append((method, path, span))
            self._stopping.wait(self.round_trip_s)

    folder = common.made_once(
        args.data, f"images-{args.images}",
        lambda target: common.write_shards(target, bench_images.samples(args.images), per_shard=bench_images.PER_SHARD),
    )  # fmt: skip
    print(common.machine())
    with common.s3_copy(folder) as (url, options), FarAway(int(options["endpoint_url"].rpartition(":")[2])) as proxy:
        names = [f"{url}{os.path.basename(path)}" for path in common.shard_files(folder)]
        far = {**options, "endpoint_url": proxy.url}
        for _ in range(args.rounds):
            for title, urls in (("by prefix", url), ("by names", names)):
                FarAway.round_trip_s = 0.0
                near_s = first_batch_s(urls, far)
                FarAway.round_trip_s = args.round_trip_ms / 1e3
                proxy.log.clear()
                far_s = first_batch_s(urls, far)
                trips = (far_s - near_s) / FarAway.round_trip_s
                asked = len(proxy.log)
                print(f"{title:10} near {near_s:.3f} s, far {far_s:.3f} s: {trips:.1f} round trips, {asked} requests")


def listed(text: str) -> list[str]:
    return text.split(",")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-bench"),
                        help="folder in which the data is made once and kept")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", type=listed, default=list(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--workers", type=lambda text: [int(one) for one in listed(text)], default=[0, 2, 4])
    parser.add_argument("--sources", type=listed, default=["disk", "s3"], help="of disk,s3")
    parser.add_argument("--tree", help="folder of another tree that takes turns with this one")
    parser.add_argument("--far", action="store_true", help="count round trips instead")
    parser.add_argument("--images", type=int, default=3_000, help="with --far")
    parser.add_argument("--round-trip-ms", type=int, default=300, help="with --far")
    parser.add_argument("--turn", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.turn:
        print(json.dumps(turn(json.loads(args.turn))), flush=True)
    elif args.far:
        count_round_trips(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
