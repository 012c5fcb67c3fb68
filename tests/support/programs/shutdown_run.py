"""A training process in some state, to be ended in some way: run by test_shutdown_processes.py.

It imports everything once, then forks a process for each line of its standard input: a JSON object, the arguments of
``train``. It prints the pid and, when that process has ended, its exit code (negative: the signal).
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any


def tell_who_is_left() -> None:
    """Registered before all others, so it comes last: threads that live then are ended wherever they are."""
    for name in sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("shardstream-")):
        print("left:", name, flush=True)


atexit.register(tell_who_is_left)

import streaming.shards.catalog.open  # noqa: E402
from streaming import DataLoader, DevicePrefetcher, StreamingDataset  # noqa: E402
from tests.support.processes.hanging_functions import BATCH, Busy, Hang, await_byte, until_it_stands  # noqa: E402  after that
from tests.support.processes.ready_server import have_a_server  # noqa: E402

TRANSFORMS = {"hangs": Hang, "computes": Busy}
kept: list[Iterator[Any]] = []
"""Loops that nobody leaves before the interpreter's end."""


def train(
    *, url: str, folder: str, transform: str = "", storage: dict[str, Any] | None = None, prefetch: bool = False,
    streamed: bool = False, end: str = "", ready: bool = True, **options: Any,
) -> None:  # fmt: skip
    """Ask for batch after batch or, where there is an ``end``, for one only; then the pipe ``go`` says when to.

    ``folder`` has the pipes of a ``Hung``, too. Not ``ready``: the fork server is an interpreter of its own.
    """
    with open(f"{folder}/output", "w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    if ready and options.get("num_workers"):
        have_a_server()
    if streamed:
        streaming.shards.catalog.open.SCAN_LIMIT_BYTES = 0  # too large to be indexed at start
        logging.getLogger("streaming.run.loops.streamed").setLevel(logging.ERROR)  # what that costs is known
    hang = TRANSFORMS.get(transform, Hang)(folder)
    if options.get("num_threads"):
        hang.spares = threading.main_thread()
    dataset = StreamingDataset(url, transform=hang if transform else None, shuffle=False, storage_options=storage)
    loader: Any = DataLoader(dataset, BATCH, epoch_size=160, **options)
    threading.Thread(target=tell_when_it_stands, args=(f"{folder}/stands",), daemon=True).start()
    batches = iter(DevicePrefetcher(loader, "cpu", depth=1) if prefetch else loader)
    kept.append(batches)
    for number, _ in enumerate(batches):
        if not end:
            hang.step(number)
            continue
        if not transform:
            hang.say()
        await_byte(f"{folder}/go")
        if end == "sys.exit":
            sys.exit(3)
        if end == "os._exit":
            os._exit(4)
        return


def tell_when_it_stands(pipe: str) -> None:
    """Write to ``pipe`` again and again while the main thread stands."""
    while True:
        until_it_stands(threading.main_thread())
        with open(pipe, "wb", buffering=0) as out:
            out.write(b"!")


def main() -> None:
    gc.collect()
    gc.freeze()  # what was imported is not looked through for garbage in each process, nor copied to it
    for line in sys.stdin:
        if pid := os.fork():
            print(pid, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        else:
            train(**json.loads(line))
            return  # to the interpreter's end


if __name__ == "__main__":
    main()
