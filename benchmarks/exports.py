"""Read what ``shard_tools export`` writes with the programs it is meant for, each in an environment of its own.

Makes environments (1.5 GB) below ``--data``, and a set of 500 samples in two splits; exports it, and compares every
field of every sample with the tars. A program that does not install is said so. Needs a package index.

    python benchmarks/exports.py --data .bench/exports
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.change.export.run import export

TORCH = "torch==2.13.0"
PROGRAMS = {
    "energon": ("megatron-energon", [[TORCH, "megatron-energon==7.4.1", "webdataset==1.0.2"]]),
    "wids": ("webdataset", [[TORCH, "webdataset==0.2.111"]]),
    # without what only its GPU operators need
    "dali": ("nvidia-dali-cuda120", [["numpy", "astunparse", "gast", "dm-tree", "makefun", "optree", "nvtx", "six"],
                                     ["--no-deps", "nvidia-dali-cuda120==2.4.0"]]),
}  # fmt: skip
READ = {
    "energon": """
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless
@stateless
def cook(sample):
    return dict(sample)
class Encoder(DefaultTaskEncoder):
    decoder, cookers = None, [Cooker(cook)]
    @stateless
    def batch(self, samples):
        return samples
for split in ("train", "val"):
    dataset = get_train_dataset(
        folder, split_part=split, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=4,
        shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False, task_encoder=Encoder(),
    )
    for batch in get_loader(dataset):
        for one in batch:
            found[one["__key__"]] = {name: told(data) for name, data in one.items() if isinstance(data, bytes)}
""",
    "wids": """
import wids
for split in ("train", "val"):
    dataset = wids.ShardListDataset(f"{folder}/wids-{split}.json", transformations=[], keep=True)
    for number in range(len(dataset)):
        one = dataset[number]
        found[one["__key__"]] = {name[1:]: told(file.read()) for name, file in one.items() if name[0] == "."}
""",
    "dali": """
from nvidia.dali import fn, pipeline_def
tars = sorted(glob.glob(f"{folder}/*/*.tar"))
fields, size = ["jpg", "cls", "json"], 10
@pipeline_def(batch_size=size, num_threads=1, device_id=None)
def pipeline():
    return tuple(fn.readers.webdataset(paths=tars, index_paths=[f"{tar[:-4]}.idx" for tar in tars], ext=fields))
pipe = pipeline()
pipe.build()
for number in range(count):
    outputs = pipe.run() if number % size == 0 else outputs
    found[str(number)] = {name: told(out.at(number % size).tobytes()) for name, out in zip(fields, outputs)}
""",
}
HEAD = """
import glob, hashlib, json, sys
folder, count, found = sys.argv[1], int(sys.argv[2]), {}
def told(data):
    return hashlib.sha256(bytes(data)).hexdigest()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".bench/exports"))
    data = parser.parse_args().data.absolute()
    folder = data / "set"
    if not folder.exists():
        write(folder)
    wanted = in_tars(folder)
    for program, (package, installs) in PROGRAMS.items():
        export([f"{folder}/"], str(folder), to=program)
        python = data / program / "bin/python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", data / program], check=True)
            for packages in installs:
                done = run([python, "-m", "pip", "install", "-q", *packages])
                if done.returncode:
                    print(f"{program}: {package} does not install: {done.stderr.strip().splitlines()[-1]}")
        code = f"{HEAD}{READ[program]}print(json.dumps(found))"
        done = run([python, "-c", code, folder, str(len(wanted))])
        if done.returncode:
            print(f"{program}: {done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        same = [*found.values()] == [*wanted.values()] if program == "dali" else found == wanted
        print(f"{program}: {len(found)} samples, {'equal' if same else 'NOT EQUAL'}")


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True)


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 400), ("val", 100)):
        with ShardWriter(f"{folder}/{split}/{{:03d}}.tar", max_samples=150) as writer:
            for number in range(count):
                out = io.BytesIO()
                Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(out, "JPEG")
                content = {"jpg": out.getvalue(), "cls": number % 7, "json": {"number": number}}
                writer.write({"__key__": f"{split}/{number:05d}", **content})


def in_tars(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.rglob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, name = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                found.setdefault(key, {})[name] = hashlib.sha256(content.read()).hexdigest()
    return found


if __name__ == "__main__":
    main()
