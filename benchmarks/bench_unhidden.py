"""What ``next`` keeps of the training thread when there was time to prepare, for every kind of batch.

A step sleeps four times what a batch takes at full speed, then asks, and lets go of the batch before. Each line is a
process of its own, since what an allocator has kept depends on what it did before; contestants take turns::

    python benchmarks/bench_unhidden.py                        # all kinds, 0 and 2 workers, torch's loader beside
    python benchmarks/bench_unhidden.py --kinds arrays,large --contestants ours,ours-2 --rounds 1 --scale 0.25

Environment variables reach each process: such as glibc's ``MALLOC_MMAP_THRESHOLD_`` and ``MALLOC_TRIM_THRESHOLD_``.

Columns, in ms: *unhidden* is ``next`` and letting go of the last batch together, median of all steps (of the middle
round); then each of the two by the wall clock (median, 95th percentile) and in CPU time of the thread, with the minor
page faults of a step; *read*: reading every byte of the batch once afterwards; *CPU*: of all processes, for a batch;
MiB: peak of this process without mapped files. Of ours also what the loader counts, as
means: building in this thread, and ``unhidden_s`` (letting go is not in it).

``ours-broadcast`` is the rank that does not read, of two. ``torch`` reads the same bytes from one flat file in its
``Dataset``, by ``pread``, unchecked, and decodes images with Pillow. ``--scale`` multiplies samples per batch. Peers in
environments of their own: ``peers/run.py``, column unhidden.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[1:1] = [os.path.dirname(_HERE), os.path.join(_HERE, "peers")]

import common
import numpy as np
import torch
import torch.distributed
import torch.utils.data
from unhidden import probe

from infra import DeviceMesh
from streaming import DataLoader, Packed, StreamingDataset

SIDE, LENGTH, PACK_LENGTH = 224, 2048, 8192
LARGE_BYTES, ARRAY_BYTES = 20_000_000, 114_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of batch: its data, how many samples it has, and how it is asked for.

    ``field`` is what is read of a batch.
    """

    data: str
    field: str
    batch_size: int
    decode: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    pack: int = 0


KINDS = {
    "bytes": Kind(data="images", field="jpg", batch_size=64),
    "views": Kind(data="images", field="jpg", batch_size=64, decode={"jpg": "view"}),
    "pixels": Kind(data="images", field="jpg", batch_size=64, decode={"jpg": f"rgb8:{SIDE}x{SIDE}"}),
    "jagged": Kind(data="arrays", field="bin", batch_size=400, options={"jagged": ("bin",)}),
    "arrays": Kind(data="arrays", field="bin", batch_size=400, decode={"bin": "array:uint8"}),
    "records": Kind(data="records", field="json", batch_size=256),
    "tokens": Kind(data="tokens", field="bin", batch_size=32, decode={"bin": "array:uint16->int64"}),
    "packs": Kind(data="documents", field="input_ids", batch_size=8, pack=PACK_LENGTH),
    "large": Kind(data="large", field="bin", batch_size=7, decode={"bin": "array:uint8"}),
    "large-jagged": Kind(data="large", field="bin", batch_size=7, options={"jagged": ("bin",)}),
    "large-bytes": Kind(data="large", field="bin", batch_size=7),
    "large-views": Kind(data="large", field="bin", batch_size=7, decode={"bin": "view"}),
}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "ours": {}, "ours-2": {"num_workers": 2}, "ours-pinned": {"pin_memory": True},
    "ours-broadcast": {"replicate": "broadcast"},
    "torch": {}, "torch-2": {"num_workers": 2},
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------ the data


def images() -> Iterator[bytes]:
    from bench_decode import photographs  # noqa: PLC0415  needs Pillow

    pictures = photographs(24, 400, 68_000)
    return (pictures[i % len(pictures)] for i in range(1_920))


def arrays() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    return (rng.bytes(ARRAY_BYTES) for _ in range(4_000))


def records() -> Iterator[bytes]:
    from bench_small_records import records as made  # noqa: PLC0415

    return (sample["json"] for sample in made(40_000))  # type: ignore[misc]


def tokens() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    return (rng.integers(0, 50_000, LENGTH, np.uint16).tobytes() for _ in range(20_000))


def documents() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.5, 1.3, 40_000).astype(np.int64).clip(10, 100_000)
    return (rng.integers(0, 50_000, int(length), np.uint16).tobytes() for length in lengths)


def large() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    return (rng.bytes(LARGE_BYTES) for _ in range(42))


DATA = {
    "images": (images, "jpg"), "arrays": (arrays, "bin"), "records": (records, "json"), "tokens": (tokens, "bin"),
    "documents": (documents, "bin"), "large": (large, "bin"),
}  # fmt: skip
SHARD_BYTES = 64 << 20


def make(folder: str, name: str) -> None:
    """Shards of some 64 MiB, and the same samples end to end in one flat file."""
    payloads, extension = DATA[name]
    stops = [0]
    with open(os.path.join(folder, "flat.bin"), "wb") as flat:

        def samples() -> Iterator[dict[str, object]]:
            for number, payload in enumerate(payloads()):
                flat.write(payload)
                stops.append(stops[-1] + len(payload))
                yield {"__key__": f"{number:09d}", extension: payload}

        columns = {"tokens": lambda one: len(one[extension]) // 2} if name == "documents" else None
        with common.ShardWriter(f"{folder}/{{:06d}}.tar", max_bytes=SHARD_BYTES, columns=columns) as writer:
            for sample in samples():
                writer.write(sample)
    np.save(os.path.join(folder, "stops.npy"), np.array(stops))


# ----------------------------------------------------------------------------------------------------- the contestants


def scaled(kind: Kind, scale: float) -> int:
    return max(1, round(kind.batch_size * scale))


def ours(kind: Kind, folder: str, batch_size: int, options: Mapping[str, Any]) -> DataLoader[Any]:
    dataset = StreamingDataset(folder, decode=kind.decode)
    dealt: Any = Packed(dataset, kind.pack, field="bin", dtype="uint16") if kind.pack else dataset
    epoch = {} if kind.pack else {"epoch_size": 1_000_000 * batch_size}
    return DataLoader(dealt, batch_size, **{**epoch, **kind.options, **options})


class Flat(torch.utils.data.Dataset[Any]):
    """Samples of the flat file."""

    def __init__(self, kind: Kind, folder: str) -> None:
        self._stops = np.load(os.path.join(folder, "stops.npy"))
        self._path, self._kind, self._file = os.path.join(folder, "flat.bin"), kind, -1

    def __len__(self) -> int:
        return 1_000_000_000

    def __getitem__(self, index: int) -> Any:
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDONLY)
        index = index * 7919 % (len(self._stops) - 1)
        start, stop = self._stops[index : index + 2].tolist()
        payload = os.pread(self._file, stop - start, start)
        decode = (self._kind.decode or {}).get(self._kind.field)
        if decode == "array:uint8" or self._kind.options:
            return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if decode == "array:uint16->int64":
            return torch.from_numpy(np.frombuffer(payload, np.uint16).astype(np.int64))
        if self._kind.data == "images" and decode not in (None, "view"):
            from bench_decode import by_pillow  # noqa: PLC0415

            return torch.from_numpy(by_pillow(payload).copy())
        return payload


def collated(items: list[Any]) -> Any:
    if not isinstance(items[0], torch.Tensor):
        return items
    if torch.utils.data.get_worker_info() is None:
        return torch.stack(items)
    size = (len(items), *items[0].shape)  # as torch's own: into shared memory at once
    storage = items[0]._typed_storage()._new_shared(items[0].numel() * len(items), device="cpu")
    return torch.stack(items, out=items[0].new(storage).resize_(*size))


def read(payload: Any) -> int:
    """Look at every byte of a batch."""
    if isinstance(payload, list):
        return sum(read(one) for one in payload)
    if isinstance(payload, torch.Tensor):
        return int(payload.view(-1).numpy().view(np.uint8).max(initial=0))
    if hasattr(payload, "values"):  # Jagged
        return read(payload.values)
    return int(np.frombuffer(payload, np.uint8).max(initial=0))


def turn(asked: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table, in a process of its own."""
    kind, folder, contestant = KINDS[asked["kind"]], asked["folder"], asked["contestant"]
    options, batch_size = CONTESTANTS[contestant], scaled(kind, asked["scale"])
    torch.set_num_threads(1)
    if contestant == "ours-broadcast":
        options = {**options, "device_mesh": joined(asked)}
    if contestant.startswith("torch"):
        loader: Any = torch.utils.data.DataLoader(
            Flat(kind, folder), batch_size, collate_fn=collated, **options,
            sampler=torch.utils.data.SequentialSampler(range(1_000_000_000)),
        )  # fmt: skip
        return probe(iter(loader), asked["steps"], pause_s=asked["pause"], read=read)
    with ours(kind, folder, batch_size, options) as loader:
        if asked.get("rank") == 0:
            for _ in endless(loader):
                pass
        counted: list[dict[str, Any]] = []

        def seen(batch: Any) -> None:
            read(batch[kind.field])
            counted.append(loader.metrics())

        found = probe(endless(loader), asked["steps"], pause_s=asked["pause"], read=seen)
        last, first = counted[-1], counted[-1 - asked["steps"]]
        found["counted"] = {
            name: 1e3 * (last.get(name, 0.0) - first.get(name, 0.0)) / asked["steps"]
            for name in ("build_in_consumer_s", "wait_for_build_s", "wait_for_fetch_s", "in_loader_s", "unhidden_s")
            if name in last
        }
        return found


def joined(asked: Mapping[str, Any]) -> DeviceMesh:
    """The mesh of two ranks that share a data rank: this process, and one that reads for it as fast as it can."""
    rank, meeting = asked.get("rank", 1), asked.get("meeting") or os.path.join(tempfile.mkdtemp(), "meeting")
    if rank:
        other = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--turn", json.dumps({**asked, "rank": 0, "meeting": meeting})],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        atexit.register(other.kill)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    return DeviceMesh.from_sizes(dp_size=1, tp_size=2, rank=rank, environ={})


def endless(loader: Any) -> Iterator[Any]:
    """Its batches, epoch after epoch."""
    while True:
        yield from loader


# ---------------------------------------------------------------------------------------------------------- the table


def in_a_process(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A turn; what went wrong under ``failed``."""
    command = [sys.executable, os.path.abspath(__file__), "--turn", json.dumps(asked)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        return {"failed": ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else f"exit {ran.returncode}"}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


HEAD = (
    f"{'':28} {'unhidden':>8} | {'next':>7} {'p95':>7} {'CPU':>7} {'faults':>7} | {'let go':>7} {'p95':>7} {'CPU':>7} "
    f"{'faults':>7} | {'read':>7} {'pause':>6} {'CPU':>7} {'MiB':>6} built here   unhidden_s"
)


def line(name: str, found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"{name:28} {found['failed']}"
    parts = " | ".join(
        f"{one['wall_ms']:7.2f} {one['wall_ms_p95']:7.2f} {one['cpu_ms']:7.2f} {one['faults']:7.0f}"
        for one in (found["next"], found["let_go"])
    )
    counted = found.get("counted", {})
    own = (
        "".join(f" {counted.get(name, 0.0):10.2f}" for name in ("build_in_consumer_s", "unhidden_s")) if counted else ""
    )
    return (
        f"{name:28} {found['unhidden_ms']:8.2f} | {parts} | {found['read_ms']:7.2f} {found['pause_ms']:6.0f} "
        f"{found['cpu_ms']:7.1f} {found['peak_bytes'] / 2**20:6.0f}{own}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "shardstream-bench"),
                        help="folder in which the data (1.7 GB, twice) is made once and kept")  # fmt: skip
    parser.add_argument("--kinds", default=",".join(KINDS), help="of: %(default)s")
    able = [name for name in CONTESTANTS if "pinned" not in name or torch.cuda.is_available()]
    parser.add_argument("--contestants", default=",".join(able), help="of: %(default)s (ours-pinned: with CUDA)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn that count")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the samples of a batch")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a step; default: by the pace of batches")
    parser.add_argument("--output", default="", help="file for all numbers, as JSON")
    parser.add_argument("--turn", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, known in (("kinds", KINDS), ("contestants", CONTESTANTS)):
        chosen = getattr(args, name).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} unknown; known: {', '.join(known)}")
        setattr(args, name, chosen)
    return args


def takes_part(contestant: str, kind: str) -> bool:
    """torch's loader packs nothing, and has no views."""
    return not contestant.startswith("torch") or not (KINDS[kind].pack or "views" in kind)


def main() -> None:
    args = arguments()
    if args.turn:
        print(json.dumps(turn(json.loads(args.turn))), flush=True)
        return
    print(common.machine())
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in args.kinds:
        data = KINDS[name].data
        folder = common.made_once(args.data, f"unhidden-{data}", lambda target, data=data: make(target, data))
        able = [one for one in args.contestants if takes_part(one, name)]
        found = runs[name] = {one: [] for one in able}
        for _ in range(args.rounds):
            for one in able:
                asked = {"kind": name, "folder": folder, "contestant": one, "steps": args.steps, "scale": args.scale,
                         "pause": args.pause}  # fmt: skip
                found[one].append(in_a_process(asked))
        print(f"\n{name}: batches of {scaled(KINDS[name], args.scale)}\n{HEAD}")
        for one, several in found.items():
            ordered = sorted(several, key=lambda each: each.get("unhidden_ms", float("inf")))
            print(line(one, ordered[(len(ordered) - 1) // 2]), flush=True)
    if args.output:
        with open(args.output, "w") as file:
            json.dump({"machine": common.machine(), "scale": args.scale, "runs": runs}, file, indent=1)


if __name__ == "__main__":
    main()
