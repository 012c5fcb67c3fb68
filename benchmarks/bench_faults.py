"""Throughput with a failing store, against the same store without failures; and what checksums cost.

An epoch of records over an S3 server on loopback, through the tests' fault proxy (a process of its own). Of all
requests for shards 1 % fail (503, or a reset; in turns) and 1 % stand still for 30 s: no byte, or half of the body. The
other contestant runs through the same proxy without faults. Last, the same epochs straight from the server, with and
without the checksums of the index (CRC32C is patched out here: users cannot switch it off), by CPU time.

Run: ``python benchmarks/bench_faults.py [--records 40000] [--rounds 3] [--data FOLDER]``
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import common

import streaming.shards.fetch.read
from streaming import DataLoader, ShuffleConfig, StreamingDataset

BATCH_SIZE = 256
RECORD_BYTES = 4 << 10
EPOCHS = 6
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def records(count: int) -> Iterator[dict[str, object]]:
    """Random bytes: nothing to decode, so that the way is what is measured."""
    rng = random.Random(0)
    for i in range(count):
        yield {"__key__": f"{i:06d}", "bin": rng.randbytes(RECORD_BYTES)}


def serve_proxy(port: int, percent: float) -> None:
    """The proxy's process: announces its port, ends with its standard input."""
    sys.path.insert(0, _ROOT)
    from tests.support.servers.fault_proxy import Fault, FaultProxy  # noqa: PLC0415  tests are not installed

    rng, turn = random.Random(1), 0

    def choose(method: str, path: str, span: str | None) -> Fault | None:
        nonlocal turn
        kind = rng.random() * 100
        if method != "GET" or not path.endswith(".tar") or kind >= 2 * percent:
            return None
        turn += 1
        if kind < percent:
            return Fault(kind="status") if turn % 2 else Fault(kind="reset_before")
        size = 1 + int((span or "bytes=0-0").partition("-")[2]) - int((span or "bytes=0-0")[6:].partition("-")[0])
        return Fault(kind="slow", seconds=30) if turn % 2 else Fault(kind="stall", at_bytes=size // 2)

    with FaultProxy(port, choose=choose) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()
        os._exit(0)  # its threads may be standing still


def epochs(url: str, options: dict[str, str], counted: dict[str, float] | None = None) -> int:
    """Samples of some epochs."""
    dataset = StreamingDataset(url, decode=None, storage_options=options, shuffle=ShuffleConfig(lanes=8))
    with DataLoader(dataset, BATCH_SIZE, memory_limit="200MiB") as loader:
        found = sum(len(batch["bin"]) for _ in range(EPOCHS) for batch in loader)
        for name in ("requests", "retries", "throttled", "hedges", "hedges_won"):
            if counted is not None:
                counted[name] = counted.get(name, 0) + loader.metrics()[name]
    return found


def cpu_turns(contestants: dict[str, common.Run], rounds: int) -> list[common.Rates]:
    """As ``common.take_turns``, per second of this process's CPU time, in which some percent do not drown."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name in sorted(contestants, reverse=bool(turn % 2)):
            start_s = time.process_time()
            count = contestants[name]()
            rates[name].append(count / (time.process_time() - start_s))
    return [common.Rates(name=name, per_second=tuple(found)) for name, found in rates.items()]


def main() -> None:
    args = common.arguments(__doc__ or "", records=40_000)
    folder = common.made_once(
        args.data, f"faults-{args.records}",
        lambda target: common.write_shards(target, records(args.records), per_shard=10_000),
    )  # fmt: skip
    print(common.machine())
    with common.s3_copy(folder) as (url, options):
        port = options["endpoint_url"].rpartition(":")[2]
        proxies = [
            subprocess.Popen([sys.executable, __file__, "--proxy", port, "--percent", percent],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for percent in ("0", "1")
        ]  # fmt: skip
        ends = [{**options, "endpoint_url": f"http://127.0.0.1:{proxy.stdout.readline().strip()}"} for proxy in proxies
                if proxy.stdout is not None]  # fmt: skip
        calm: dict[str, float] = {}
        counted: dict[str, float] = {}
        rates = common.take_turns(
            {
                "no faults": lambda: epochs(url, ends[0], calm),
                "1 % fail, 1 % stall": lambda: epochs(url, ends[1], counted),
            },
            args.rounds,
        )
        common.show(
            f"{EPOCHS} epochs of {args.records:,} records of 4 KiB, through a proxy", rates, against="no faults"
        )
        for name, found in (("no faults", calm), ("with faults", counted)):
            print(f"{name}:", ", ".join(f"{what} {value:.0f}" for what, value in found.items()))
        for proxy in proxies:
            proxy.communicate()

        def unchecked() -> int:
            with mock.patch.object(streaming.shards.fetch.read._Read, "_differing", return_value=None):
                return epochs(url, options)

        rates = cpu_turns({"checksums off": unchecked, "checksums on": lambda: epochs(url, options)}, 2 * args.rounds)
        common.show("the same, straight from the server, per second of CPU time", rates, against="checksums off")


if __name__ == "__main__":
    if "--proxy" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--proxy", type=int)
        parser.add_argument("--percent", type=float)
        given = parser.parse_args()
        serve_proxy(given.proxy, given.percent)
    else:
        main()
