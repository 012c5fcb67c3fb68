"""Through Ray's object store: torch tensors as Ray pickles them, or packed as arrays (``others/remote/wire.py``).

Prints seconds for one batch of 100 MiB: putting it, and getting it into memory of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from streaming.others.remote.wire import pack, unpack

_REPEATS = 5


def best(function: Callable[[], Any]) -> tuple[float, Any]:
    """Shortest time of some, in seconds, and the last result."""
    times, result = [], None
    for _ in range(_REPEATS):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> None:
    ray.init(num_cpus=1, object_store_memory=2 << 30, include_dashboard=False, log_to_driver=False)
    batch = {"image": torch.zeros(100 << 20, dtype=torch.uint8)}
    for name, there, back in (("pickled", lambda x: x, lambda x: x), ("packed", pack, unpack)):
        put_s, ref = best(lambda there=there: ray.put(there(batch)))
        get_s, _ = best(lambda back=back, ref=ref: back(ray.get(ref)))
        print(f"{name:8s} put {put_s:.3f} s, get {get_s:.3f} s")
    ray.shutdown()


if __name__ == "__main__":
    main()
