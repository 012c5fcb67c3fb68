"""The work of ``bench_optimize.py``, importable by every contestant; as a program it is LitData's turn.

As a program: ``python optimize_work.py WORK FOLDER TARGET NUM WORKERS`` in an environment with litdata and Pillow.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from typing import Any

PAYLOAD = os.urandom(200_000)
SIZE = (256, 256)


def resized(path: str) -> dict[str, Any]:
    """A JPEG, 256 x 256."""
    from PIL import Image  # noqa: PLC0415  in the processes that need it

    with Image.open(path) as image:
        out = io.BytesIO()
        image.resize(SIZE, Image.Resampling.BILINEAR).save(out, "JPEG", quality=90)
    return {"jpg": out.getvalue()}


def trivial(number: int) -> dict[str, Any]:
    """100 KB that cost nothing to make."""
    start = number * 7919 % 100_000
    return {"bin": PAYLOAD[start : start + 100_000]}


def tiny(number: int) -> dict[str, Any]:
    """A text of 200 bytes."""
    return {"txt": f"{number:08d} " * 22}


WORKS: dict[str, Callable[[Any], dict[str, Any]]] = {"resize": resized, "trivial": trivial, "tiny": tiny}


def inputs_of(work: str, folder: str, num: int) -> list[Any]:
    """So many inputs: the images of the folder again and again, or numbers."""
    if work != "resize":
        return list(range(num))
    paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))
    return [paths[number % len(paths)] for number in range(num)]


def cpu_s() -> float:
    """Processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """LitData's ``optimize``, timed as the others are."""
    from litdata import optimize  # noqa: PLC0415  only this environment has it

    work, folder, target, num, workers = sys.argv[1:]
    inputs = inputs_of(work, folder, int(num))
    begun_s, begun_cpu_s = time.perf_counter(), cpu_s()
    optimize(
        fn=WORKS[work], inputs=inputs, output_dir=target, num_workers=int(workers), chunk_bytes="64MB",
        mode="overwrite", reorder_files=False,
    )  # fmt: skip
    print("took", time.perf_counter() - begun_s, cpu_s() - begun_cpu_s)


if __name__ == "__main__":
    main()
