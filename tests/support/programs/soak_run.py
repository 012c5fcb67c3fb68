"""Stream for long while sessions end, keys are replaced and requests fail; say whether anything grew.

Run ``python -m tests.support.programs.soak_run --seconds 1200``; it prints what it found as JSON, and once a minute on
its way. Two loaders read in turn through a proxy that breaks 5 % of the answers: one has a profile whose
``credential_process`` makes short sessions, the other a profile with plain keys, which are replaced in the file and
then refused by the server. The server's line is slow, so little of the processor is used.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from tests.support.servers.on_loopback import FaultyLine, MiniS3Server

NUM_SHARDS, SAMPLES_PER_SHARD, SAMPLE_BYTES = 32, 16, 64 << 10
NUM_SAMPLES = NUM_SHARDS * SAMPLES_PER_SHARD
QUICK_FAULTS = ("status", "reset_before", "reset", "truncate", "flip")
FAULTS = (*QUICK_FAULTS, "slow", "stall", "silent")
_KEYS_PROGRAM = Path(__file__).with_name("session_keys.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What is done to the loaders.

    Attributes:
        session: How long a session lasts: ``seconds`` of the server's clock, or ``requests``.
        is_due: Tells, after so many epochs, whether the plain keys are to be replaced now.
        is_over: Tells, after so many epochs, whether that is enough.
        faults: Kinds of faults.
        mb_per_s: Speed of the line; 0: no limit.
    """

    session: Mapping[str, float]
    is_due: Callable[[int], bool]
    is_over: Callable[[int], bool]
    faults: tuple[str, ...] = QUICK_FAULTS
    mb_per_s: float = 0.0
    share: float = 0.05


@dataclass(frozen=True, slots=True)
class Size:
    """What this process holds."""

    epoch: int
    resident_bytes: int
    descriptors: int
    threads: int


@dataclass(slots=True)
class Found:
    """What happened.

    Attributes:
        num_samples: Samples that came, each once per epoch.
        sessions: Sessions that were made for the profile with a program.
        rotations: How often the plain keys were replaced.
        refused: Requests that the server refused for their key.
        broken: Answers that the proxy broke, by the kind of fault, and all that it passed.
        cpu_s: Time of the processor that this process took.
        sizes: What it held after each epoch.
    """

    num_samples: int = 0
    sessions: int = 0
    rotations: int = 0
    refused: int = 0
    broken: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    sizes: list[Size] = field(default_factory=list)


def size_now(epoch: int) -> Size:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Size(epoch, resident, len(os.listdir("/proc/self/fd")), threading.active_count())


def write_sets(server: MiniS3Server) -> None:
    """The same set in two buckets; each sample tells its number, and is otherwise random bytes."""
    for bucket in ("sessions", "plain"):
        url, rng = server.create_bucket(bucket), np.random.default_rng(0)
        with ShardWriter(
            f"{url}/{{:06d}}.tar", max_samples=SAMPLES_PER_SHARD, storage_options=server.storage_options
        ) as writer:
            for number in range(NUM_SAMPLES):
                writer.write({"__key__": f"{number:05d}", "cls": number, "bin": rng.bytes(SAMPLE_BYTES)})


class Profiles:
    """The files of an AWS configuration with both profiles."""

    def __init__(self, folder: Path, server: MiniS3Server, session: Mapping[str, float]) -> None:
        self.config, self._keys, self._server, self._key = folder / "config", folder / "credentials", server, ""
        command = [sys.executable, "-S", "-E", str(_KEYS_PROGRAM), server.host, str(server.port), urlencode(session)]
        self.config.write_text(f"[profile sessions]\ncredential_process = {' '.join(command)}\n")
        self.replace_keys()

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_CONFIG_FILE": str(self.config), "AWS_SHARED_CREDENTIALS_FILE": str(self._keys)}

    def replace_keys(self) -> None:
        """Make plain keys, write them to the file, and let the server forget those that it had."""
        made, before = self._server.begin_session(), self._key
        names = {"aws_access_key_id": "AccessKeyId", "aws_secret_access_key": "SecretAccessKey",
                 "aws_session_token": "SessionToken"}  # fmt: skip
        new = self._keys.with_suffix(".new")
        new.write_text("[plain]\n" + "".join(f"{name} = {made[of]}\n" for name, of in names.items()))
        new.replace(self._keys)
        self._key = made["AccessKeyId"]
        if before:
            self._server.end_session(before)


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def soak(plan: Soak, tell: Callable[[Found], None] = lambda found: None) -> Found:
    """Read epoch after epoch of both sets, in turn; whatever is raised is raised here."""
    found, began_s = Found(), time.process_time()
    with ExitStack() as stack:
        server = stack.enter_context(MiniS3Server(mb_per_s=plan.mb_per_s))
        write_sets(server)
        line = stack.enter_context(FaultyLine(server.port, plan.share, plan.faults))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        profiles = Profiles(folder, server, plan.session)
        stack.enter_context(environment(profiles.environment))
        loaders = [stack.enter_context(opened(name, line.url)) for name in ("sessions", "plain")]
        server.clear_log()
        epoch = 0
        while not plan.is_over(epoch):
            read_epoch(loaders, found)
            epoch += 1
            if plan.is_due(epoch):
                profiles.replace_keys()
                found.rotations += 1
            look(server, line, found)
            found.cpu_s = time.process_time() - began_s
            found.sizes.append(size_now(epoch))
            tell(found)
    return found


def opened(profile: str, endpoint: str) -> DataLoader:
    options: dict[str, Any] = {"endpoint_url": endpoint, "profile": profile, "region": "us-east-1"}
    shuffle = ShuffleConfig(window=16, lanes=2)  # so that little fits into memory, and each epoch asks the store
    dataset = StreamingDataset(f"s3://{profile}/", storage_options=options, seed=1, shuffle=shuffle)
    return DataLoader(dataset, batch_size=8, memory_limit="12MiB", num_threads=1)


def read_epoch(loaders: list[DataLoader], found: Found) -> None:
    """Each sample of each set once, with a piece of it looked at."""
    seen: list[list[int]] = [[] for _ in loaders]
    for batches in zip(*loaders, strict=True):
        for numbers, batch in zip(seen, batches, strict=True):
            numbers += [int(number) for number in batch["cls"]]
            assert {len(one) for one in batch["bin"]} == {SAMPLE_BYTES}
    assert [sorted(numbers) for numbers in seen] == [list(range(NUM_SAMPLES))] * len(loaders)
    found.num_samples += sum(map(len, seen))


def look(server: MiniS3Server, line: FaultyLine, found: Found) -> None:
    """Add up what the server saw since the last look."""
    log = server.log()
    server.clear_log()
    found.refused += sum(entry["status"] in {400, 403} for entry in log)
    found.sessions = int(server.request("GET", "/_sessions")[1])
    found.broken = line.broken()


def growth(sizes: list[Size]) -> dict[str, int]:
    """The most of the last third, less the most of the second, of each thing that is held: what grew."""
    third = len(sizes) // 3
    return {
        name: max(getattr(one, name) for one in sizes[-third:]) - max(getattr(one, name) for one in sizes[third:-third])
        for name in ("resident_bytes", "descriptors", "threads")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--session-s", type=float, default=60.0)
    parser.add_argument("--rotation-s", type=float, default=45.0)
    parser.add_argument("--mb-per-s", type=float, default=4.0)
    args = parser.parse_args()
    began_s = told_s = time.monotonic()
    rotated_s = began_s

    def is_due(_: int) -> bool:
        nonlocal rotated_s
        due = time.monotonic() - rotated_s >= args.rotation_s
        rotated_s = time.monotonic() if due else rotated_s
        return due

    def tell(found: Found) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= 60:
            told_s = time.monotonic()
            report(found)

    def report(found: Found) -> None:
        said = {**asdict(found), "sizes": None, "first": asdict(found.sizes[0]), "last": asdict(found.sizes[-1])}
        print(json.dumps({"seconds": round(time.monotonic() - began_s), **said}), flush=True)

    plan = Soak(
        session={"seconds": args.session_s}, is_due=is_due, faults=FAULTS, mb_per_s=args.mb_per_s,
        is_over=lambda _: time.monotonic() - began_s >= args.seconds,
    )  # fmt: skip
    found = soak(plan, tell)
    report(found)
    print(json.dumps({"grown": growth(found.sizes)}))


if __name__ == "__main__":
    main()
