"""Run all that needs a GPU, in one command of at most ten minutes, and write its figures down: ``make gpu``.

Run: ``python benchmarks/gpu.py [--out benchmarks/GPU.md] [--commit NAME] [--images 40000]``. In this order:

1. every test that is marked ``gpu``;
2. ``bench_device.py``: the prefetcher against the bare copy, and what it costs a step;
3. JPEGs of 400 x 400 and 68 KB as uint8 [256, 224, 224, 3] on the device: with threads and with processes, against the
   loader without a device behind it and against the bare decoder;
4. a ResNet-50 in bfloat16 that trains on these images, against the same step on one batch that stays on the device.

The exit code is 1 if a test fails. Without CUDA it says so, writes nothing, and ends with 2.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from bench_decode import photographs
from bench_device import Figure, Steps, in_turns, measure, step_figures, steps_over
from torch import nn
from torch.nn import functional

from shard_tools import ShardWriter
from streaming import DataLoader, DevicePrefetcher, StreamingDataset
from streaming.build.decode import resolve_decoders

ROOT = Path(__file__).resolve().parent.parent
SIDE, NUM_BYTES, SIZE, BATCH_SIZE, CLASSES = 400, 68_000, 224, 256, 1_000
MODE = f"rgb8:{SIZE}x{SIZE}"
ON_DISK = 8_192  # images; epochs repeat them
STEPS = 60


# --- the tests ---


def tests() -> tuple[bool, str]:
    """Whether all tests marked ``gpu`` pass, and what pytest says of them last."""
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:benchmark", "-rs", *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    return done.returncode == 0, done.stdout.strip().splitlines()[-1].strip("= ")


# --- images ---


def write_images(folder: str) -> list[bytes]:
    pictures = photographs(24, SIDE, NUM_BYTES)
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=1_024, max_bytes="4GB") as writer:
        for i in range(ON_DISK):
            writer.write({"__key__": f"{i:07d}", "jpg": pictures[i % len(pictures)], "cls": i % CLASSES})
    return pictures


def open_loader(folder: str, num_images: int, **options: int) -> DataLoader:
    dataset = StreamingDataset(folder, decode={"jpg": MODE, "cls": "int"})
    return DataLoader(dataset, BATCH_SIZE, epoch_size=num_images, memory_limit="16GiB", **options)


def per_second(batches: Iterable[Mapping[str, Any]]) -> float:
    """Images per second over the later half of the batches, when those built ahead at the start are used up."""
    times_s = [time.perf_counter() for _ in batches]
    torch.cuda.synchronize()
    half = len(times_s) // 2
    return (len(times_s) - 1 - half) * BATCH_SIZE / (time.perf_counter() - times_s[half])


def bare_decoder(pictures: Sequence[bytes]) -> float:
    """Images per second of one core that does nothing but to decode bytes in memory."""
    decoder = resolve_decoders({"jpg": MODE}).decoder_for("jpg")
    count = 60 * len(pictures)
    begun_s = time.perf_counter()
    for number in range(count):
        decoder(pictures[number % len(pictures)])
    return count / (time.perf_counter() - begun_s)


def ways() -> dict[str, tuple[int, dict[str, int]]]:
    """How batches may be built: name, cores and the loader's options."""
    most = max(2, common.num_cores() - 2)
    return {
        f"{most} threads": (most, {"num_workers": 0, "num_threads": most}),
        **{f"{workers} workers": (workers, {"num_workers": workers}) for workers in (most // 2, most)},
    }


def throughput(folder: str, pictures: Sequence[bytes], num_images: int) -> list[Figure]:
    """Images per second with nothing to do for the device but to receive them."""
    with ExitStack() as closing:
        contestants: dict[str, Callable[[], float]] = {"bare decoder, 1 core": partial(bare_decoder, pictures)}
        cores = {"bare decoder, 1 core": 1}
        for name, (num_cores, options) in ways().items():
            alone = closing.enter_context(open_loader(folder, num_images, **options))
            ahead = closing.enter_context(DevicePrefetcher(open_loader(folder, num_images, **options)))
            contestants[f"{name}, in host memory"] = partial(per_second, alone)
            contestants[f"{name}, on the device"] = partial(per_second, ahead)
            cores |= dict.fromkeys(list(contestants)[-2:], num_cores)
        found = {name: statistics.median(rates) for name, rates in in_turns(contestants, 2).items()}
    bare, megabytes = found["bare decoder, 1 core"], SIZE * SIZE * 3 / 1e6
    return [
        Figure(
            what=name,
            value=f"{rate:,.0f} images/s",
            against=f"{rate * megabytes:,.0f} MB/s, {rate / bare / cores[name]:.0%} of the bare decoder a core",
        )
        for name, rate in found.items()
    ]


# --- training ---


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        plain = stride == 1 and channels == out
        self.beside = nn.Identity() if plain else nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.beside(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(channels, width, stride if number == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Training:
    """A step of ResNet-50 in bfloat16: uint8 [N, H, W, 3] and int64 [N] in, nothing brought back to the host."""

    def __init__(self) -> None:
        self._model = resnet50().cuda().to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01, momentum=0.9, foreach=True)

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> None:
        pixels = batch["jpg"].permute(0, 3, 1, 2).to(torch.bfloat16).div_(255)  # channels last, as it lies in memory
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(self._model(pixels), batch["cls"])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def training(folder: str) -> list[Figure]:
    step = Training()
    num_images = STEPS * BATCH_SIZE
    resident = {
        "jpg": torch.randint(0, 255, (BATCH_SIZE, SIZE, SIZE, 3), dtype=torch.uint8, device="cuda"),
        "cls": torch.randint(0, CLASSES, (BATCH_SIZE,), device="cuda"),
    }
    with ExitStack() as closing:
        contestants: dict[str, Callable[[], Steps]] = {
            "ResNet-50, resident batch": lambda: steps_over(step, itertools.repeat(resident, STEPS))
        }
        for name, (_, options) in ways().items():
            ahead = closing.enter_context(DevicePrefetcher(open_loader(folder, num_images, **options)))
            contestants[f"ResNet-50, {name}"] = lambda ahead=ahead: steps_over(step, ahead)
        found = in_turns(contestants, 2)
    names = list(contestants)
    figures = step_figures(found, names[0], aims=[names[1], names[-1]])
    rate = BATCH_SIZE / statistics.median(one.step_s for one in found[names[0]])
    return [*figures, Figure(what="the resident batch's step takes", value=f"{rate:,.0f} images/s")]


# --- the report ---


def table(title: str, figures: Iterable[Figure]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| | | | aim |", "|---|---|---|---|")
    for one in figures:
        yield f"| {one.what} | {one.value} | {one.against} | {one.aim} |"


def report(commit: str, said: str, tables: Mapping[str, Sequence[Figure]], took_s: float) -> str:
    """The page of figures."""
    lines = [
        "# GPU figures", "",
        "Generated by `make gpu` (`benchmarks/gpu.py` describes what is measured). Do not edit.", "",
        f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; {common.machine()}.",
        f"Commit {commit}; the whole run took {took_s:.0f} s. Tests marked `gpu`: {said}.",
    ]  # fmt: skip
    for title, figures in tables.items():
        lines += table(title, figures)
    return "\n".join(lines) + "\n"


def commit_name() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.DEVNULL, check=False)  # fmt: skip
    return done.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "GPU.md"), help="file of the figures")
    parser.add_argument("--commit", default="", help="name of what is measured, where git cannot tell")
    parser.add_argument("--images", type=int, default=24_000, help="of an epoch where nothing is trained")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing tested, nothing measured, nothing written")
        return 2
    begun_s = time.monotonic()
    passed, said = tests()
    tables = {"The prefetcher: copies and steps": measure()}
    with tempfile.TemporaryDirectory() as folder:
        pictures = write_images(folder)
        tables[f"JPEGs as uint8 [{BATCH_SIZE}, {SIZE}, {SIZE}, 3]"] = throughput(f"{folder}/", pictures, options.images)
        tables[f"ResNet-50, bfloat16, batches of {BATCH_SIZE}"] = training(f"{folder}/")
    text = report(options.commit or commit_name(), said, tables, time.monotonic() - begun_s)
    Path(options.out).write_text(text)
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
