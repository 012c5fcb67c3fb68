"""An epoch under faults of every kind: each sample once or listed as bad, in the order of a calm run, nothing left.

The normal run injects some hundred faults; ``--torture-faults`` (``make torture``) makes the data set, and with it the
number of faults, as large as you like. All that is random is drawn from ``--torture-seed``.
"""

from __future__ import annotations

import json
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from data_sets import Batches, merged, mesh_of, total
from fault_proxy import Fault, FaultProxy, Kind
from leftovers import leftovers
from servers import MiniS3Server

from shard_tools import ShardWriter
from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.cache.layout import Layout
from streaming.engine.fork_server import SHARED
from streaming.errors import IndexMismatchError
from streaming.index.cutter import ChunkRule
from streaming.indexing import index_shards
from streaming.storage import Storage, expand_urls

GLOBAL_BATCH = 60
SHARD_SAMPLES = 100
SHUFFLE = ShuffleConfig(seed=3, lanes=12, window=24)
FAULT_SHARE = 0.55
DAMAGED_CHUNKS = (5, 33, 77)
IMPATIENT = {"first_backoff_s": 0.001, "max_backoff_s": 0.02, "read_timeout_s": 0.5, "hedge_least_s": 0.1,
             "max_retries": 1000, "retry_share": 1000.0, "deadline_s": 250.0, "unreachable_s": 60.0}  # fmt: skip
"""Short waits, and no limits: what is tested is that any number of faults is survived, not when to give up."""
ANYWHERE: tuple[Kind, ...] = ("status", "reset_before", "slow") * 8 + ("silent",)
BODIES: tuple[Kind, ...] = ("reset", "truncate", "flip", "ignore_range", "shift_range", "wrong_length")
IN_BODIES: tuple[Kind, ...] = (*ANYWHERE, *BODIES * 8, "stall")
STALE: tuple[Kind, ...] = ("list_less", "list_more")
LISTINGS: tuple[Kind, ...] = (*ANYWHERE, *STALE * 4)


@dataclass(slots=True)
class Chaos:
    """Chooses what happens to each request.

    A range is flipped at most once for each loader: the second time it would be damaged twice in a row, which counts as
    damage in the store. Listings and index files come whole and right or not at all, but for listings that are stale.
    """

    dice: random.Random
    injected: Counter[str] = field(default_factory=Counter)
    flipped: set[tuple[str, int]] = field(default_factory=set)
    paused: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, method: str, path: str, span: str | None) -> Fault | None:
        with self.lock:
            if self.paused or self.dice.random() >= FAULT_SHARE:
                return None
            return self._fault(method, path, span)

    def _fault(self, method: str, path: str, span: str | None) -> Fault:
        num_bytes = 0
        kinds = ANYWHERE
        if method == "GET" and "list-type=2" in path:
            kinds = LISTINGS
        elif method == "GET" and ".tar" in path and ".parquet" not in path and span is not None:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            num_bytes = last + 1 - first
            kinds = IN_BODIES
        kind = self.dice.choice(kinds)
        if kinds is LISTINGS:  # there are few
            kind = next((one for one in STALE if not self.injected[one]), kind)
        if kind == "flip":
            if (path, last) in self.flipped:
                kind = "reset"
            self.flipped.add((path, last))
        status = self.dice.choice((503, 429, 500, 500))
        self.injected[f"{kind} {status}" if kind == "status" else kind] += 1
        at_bytes = self.dice.randrange(num_bytes) if num_bytes else 0
        return Fault(kind=kind, method=method, at_bytes=at_bytes, seconds=0.02, status=status)


def make_set(server: MiniS3Server, num_samples: int) -> str:
    """Many small chunks, so that there are many requests; JSON, because batches of less need no worker processes."""
    url, options = server.create_bucket(f"torture-{num_samples}") + "/train", server.storage_options
    with ShardWriter(f"{url}/{{:04d}}.tar", max_samples=SHARD_SAMPLES, index=False, storage_options=options) as writer:
        for number in range(num_samples):
            writer.write({"__key__": f"{number:06d}", "cls": number, "json": {"number": number}})
    storage = Storage(options)
    index_shards(storage, expand_urls(f"{url}/", storage), rule=ChunkRule(min_bytes=1, min_samples=4))
    return f"{url}/"


def damage(dataset: StreamingDataset, storage: Storage) -> set[str]:
    """Change a byte of some chunks for good; the keys of all samples whose bytes can no longer be trusted."""
    lost: set[str] = set()
    for chunk in DAMAGED_CHUNKS:
        wanted = dataset.chunk(chunk)
        data = bytearray(storage.read(wanted.url))
        data[wanted.byte_start + 512] ^= 4
        storage.put(wanted.url, data)
        first = int(dataset.table.num_samples[:chunk].sum())
        lost.update(f"{number:06d}" for number in range(first, first + wanted.num_samples))
    return lost


def checked_keys(batch: dict[str, Any]) -> list[str]:
    keys: list[str] = batch["__key__"]
    assert batch["cls"].tolist() == [int(key) for key in keys]
    assert batch["json"] == [{"number": int(key)} for key in keys]
    return keys


def calm_epoch(url: str, options: dict[str, Any], max_bad_samples: int) -> Batches:
    dataset = StreamingDataset(url, shuffle=SHUFFLE, storage_options=options, max_bad_samples=max_bad_samples)
    with DataLoader(dataset, global_batch_size=GLOBAL_BATCH, last_batch="partial", device_mesh=mesh_of(1, 0)) as loader:
        return merged([[checked_keys(batch) for batch in loader]])


def open_with_patience(url: str, stale: Counter[str], **options: Any) -> StreamingDataset:
    """A stale listing is an error by name, and never another data set: look again."""
    while True:
        try:
            return StreamingDataset(url, **options)
        except IndexMismatchError as error:
            stale[type(error).__name__] += 1


def kill_a_worker(dice: random.Random) -> bool:
    """SIGKILL to a decode worker; whether there was one."""
    server = SHARED._server
    assert server is not None
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(server.pid).children()
        if workers:
            dice.choice(workers).send_signal(signal.SIGKILL)
            return True
    return False


@dataclass(slots=True)
class Run:
    """An epoch in legs: every leg goes on from the state of the last, on another world."""

    url: str
    options: dict[str, Any]
    chaos: Chaos
    cache_dir: Path
    max_bad_samples: int
    dice: random.Random
    batches: Batches = field(default_factory=list)
    state: dict[str, Any] | None = None
    bad: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)

    def leg(self, world_size: int, num_batches: int) -> None:
        ranks, states = [], []
        for dp_rank in range(world_size):
            batches, state = self._rank(dp_rank, world_size, num_batches)
            ranks.append(batches)
            states.append(state)
        assert all(state == states[0] for state in states)
        self.batches += merged(ranks)
        self.state = json.loads(json.dumps(states[0]))
        self.events[f"legs on {world_size}"] += 1

    def _rank(self, dp_rank: int, world_size: int, num_batches: int) -> tuple[list[list[str]], dict[str, Any]]:
        dice = self.dice
        self.chaos.flipped.clear()
        cached = {"cache_dir": str(self.cache_dir), "cache_limit": "1MiB"} if dice.random() < 0.3 else {}
        dataset = open_with_patience(
            self.url, self.events, shuffle=SHUFFLE, storage_options=self.options,
            max_bad_samples=self.max_bad_samples, **cached,
        )  # fmt: skip
        self._let_a_range_through(dataset)
        num_workers = dice.choice((0, 2))
        batches = []
        with DataLoader(
            dataset, global_batch_size=GLOBAL_BATCH, last_batch="partial", device_mesh=mesh_of(world_size, dp_rank),
            num_workers=num_workers, memory_limit=f"{400 + 2400 // world_size}KiB",
        ) as loader:  # fmt: skip
            if self.state is not None:
                loader.load_state_dict(self.state)
            running = iter(loader)
            for step in range(num_batches):
                batches.append(checked_keys(next(running)))
                if num_workers and (step == 0 or dice.random() < 0.1):
                    self.events["killed workers"] += kill_a_worker(dice)
            metrics = loader.metrics()
            self.bad.update({one["key"]: one for one in metrics["bad"]})
            for name in ("retries", "hedges", "throttled", "cache_hits", "worker_restarts"):
                self.events[name] += int(metrics.get(name, 0))
            return batches, loader.state_dict()

    def _let_a_range_through(self, dataset: StreamingDataset) -> None:
        """A store that never answered a range is refused at the first one that it ignores."""
        self.chaos.paused = True
        dataset.storage.read(dataset.chunk(0).url, 0, 512)
        self.chaos.paused = False


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniS3Server]:
    """One that nobody else uses, and a folder for temporary files of our own."""
    with MiniS3Server() as server:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        yield server


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_sample_survives(
    server: MiniS3Server, one_fork_server: None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    num_faults, seed = (int(request.config.getoption(name)) for name in ("--torture-faults", "--torture-seed"))
    dice, began_s = random.Random(seed), time.monotonic()
    url, options = make_set(server, 2 * num_faults), server.storage_options
    keys = {f"{number:06d}" for number in range(2 * num_faults)}
    undamaged = calm_epoch(url, options, 0)
    lost = damage(StreamingDataset(url, storage_options=options), Storage(options))
    calm = calm_epoch(url, options, len(lost))

    before = leftovers()
    chaos = Chaos(random.Random(dice.random()))
    with FaultProxy(server.port, choose=chaos.choose) as proxy:
        faulty = {**options, **IMPATIENT, "endpoint_url": proxy.url}
        run = Run(url, faulty, chaos, tmp_path / "cache", len(lost), dice)
        while (left := len(calm) - len(run.batches)) > 0:
            run.leg(dice.randint(1, 6), min(left, dice.randint(1, max(3, len(calm) // 8))))
    for thread in threading.enumerate():
        if thread.name.startswith("shardstream-"):  # requests that lost their race end with their answers
            thread.join(10)

    print(f"\nseed {seed}: {2 * num_faults} samples, {chaos.injected.total()} faults {dict(chaos.injected)}; "
          f"{dict(run.events)}; {time.monotonic() - began_s:.0f} s")  # fmt: skip
    assert run.batches == calm, "the content of every global batch is that of a run without faults"
    missing = [expected - got for expected, got in zip(undamaged, run.batches, strict=True)]
    substitutes = [got - expected for expected, got in zip(undamaged, run.batches, strict=True)]
    assert total(undamaged) == Counter(keys)
    assert total(missing) == Counter(lost), "every sample came once, but for those whose bytes are damaged in the store"
    assert [one.total() for one in substitutes] == [one.total() for one in missing]
    assert set(run.bad) == lost
    assert all("CRC32C" in one["reason"] and one["url"].startswith("s3://") for one in run.bad.values())
    assert chaos.injected.total() >= num_faults
    assert {name.split()[0] for name in chaos.injected} == {*IN_BODIES, *LISTINGS}
    assert run.events["killed workers"]
    assert run.events["IndexMismatchError"]
    if (tmp_path / "cache").exists():
        assert list(Path(Layout(str(tmp_path / "cache")).parts).iterdir()) == []
    assert leftovers() - before == Counter()
