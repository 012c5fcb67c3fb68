"""What opens of a set whose writer was killed, and what marking sets costs: docs/design/0031-whole-sets.md.

``python benchmarks/bench_unfinished.py [--samples N] [--sample-bytes B]``; with ``PYTHONPATH=TREE`` for another tree.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import streaming
from shard_tools import ShardWriter
from streaming import StreamingDataset

KILLED = """
import os, signal, sys
from streaming.storage import Storage
left, call = [int(sys.argv[1])], Storage.open_write
def dying(self, url, *arguments):
    left[0] -= url.endswith(".tar")
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, url, *arguments)
Storage.open_write = dying
from shard_tools.cli import cli
cli(sys.argv[2:], prog_name="shard_tools")
"""


def killed(num_shards: int, *words: object) -> None:
    """Run a command that is killed after so many shards."""
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(num_shards), *map(str, words)], capture_output=True, check=False
    )
    assert ran.returncode == -9, ran.stderr.decode()


def tool(*words: object) -> int:
    """Run a command; return its exit code."""
    words = (sys.executable, "-m", "shard_tools", *words)
    return subprocess.run(list(map(str, words)), capture_output=True, check=False).returncode


def opened(folder: Path) -> str:
    """Say what opens."""
    try:
        return f"{len(StreamingDataset(str(folder))):,} samples"
    except Exception as error:  # noqa: BLE001  whatever a tree raises
        return type(error).__name__


def fastest(times: int, call: object) -> float:
    """Return the shortest of some durations in milliseconds."""
    assert callable(call)
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return 1000 * min(found)


def main() -> None:
    """Print the rows of the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--sample-bytes", type=int, default=200)
    given = parser.parse_args()
    print(f"{Path(streaming.__file__).parent.parent}: {given.samples:,} samples of {given.sample_bytes:,} bytes")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        per_shard = given.samples // 24

        def write() -> None:
            with ShardWriter(f"{root}/tars/{{:06d}}.tar", max_samples=per_shard, overwrite=True) as writer:
                for number in range(given.samples):
                    writer.write(
                        {"__key__": f"{number:08d}", "bin": number.to_bytes(8, "big") * (given.sample_bytes // 8)}
                    )

        took = fastest(3, write)
        print(f"written by ShardWriter in {took / 1000:.2f} s, opened in ", end="")
        print(f"{fastest(20, lambda: StreamingDataset(f'{root}/tars')):.2f} ms (folder), ", end="")
        print(f"{fastest(20, lambda: StreamingDataset(f'{root}/tars/{{000000..000023}}.tar')):.2f} ms (by name)")
        shards = ("--max-samples", per_shard)
        for verb, num_shards, words in (
            ("convert", 4, ("convert", root / "tars", root / "convert", "--from", "tars", *shards)),
            ("copy", 5, ("copy", root / "tars", root / "copy", "--workers", 1)),
            ("reshard", 10, ("reshard", root / "tars", root / "reshard", "--shuffle", *shards)),
        ):
            killed(num_shards, *words)
            left = opened(root / verb)
            codes = {
                one: tool(one, root / verb, *more)
                for one, more in (("info", ()), ("copy", (root / f"{verb}-copied",)), ("index", ()))
            }
            again = tool(*words), opened(root / verb)
            print(f"{verb}: opens as {left}; exit codes {codes}; run again {again}")


if __name__ == "__main__":
    main()
