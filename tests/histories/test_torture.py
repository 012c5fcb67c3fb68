"""An epoch under faults of every kind: each sample once or listed as bad, in the order of a calm run, nothing left.

Stores fail, decode workers are killed, and so are whole ranks: every other leg of the epoch ends by SIGKILL to all of
its ranks, and the next one goes on from what was saved before, on another world.

The normal run injects some hundred faults; ``--torture-faults`` (``make torture``) makes the data set, and with it the
number of faults, as large as you like. All that is random is drawn from ``--torture-seed``.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.shards.cache.paths import CachePaths
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.index.cutter import ChunkRule
from streaming.storage import Storage
from streaming.storage.adapters import in_place
from tests.support.processes.leftovers import leftovers
from tests.support.processes.mortal_ranks import MortalRanks
from tests.support.processes.waiting import PATIENCE_S
from tests.support.programs.torture_rank import (
    GLOBAL_BATCH,
    IN_PLACE_BYTES,
    PROBE,
    SHUFFLE,
    Part,
    Step,
    checked_keys,
    open_with_patience,
    steps,
)
from tests.support.servers.fault_proxy import Fault, FaultProxy, Kind
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import Batches, merged, mesh_of, total

pytestmark = pytest.mark.thorough

SHARD_SAMPLES = 100
CHUNK_SAMPLES = 4
FAULT_SHARE = 0.55
DAMAGED_CHUNKS = (5, 33, 77)
IMPATIENT = {"first_backoff_s": 0.001, "max_backoff_s": 0.02, "read_timeout_s": 0.5,
             "max_retries": 1000, "retry_share": 1000.0, "deadline_s": 250.0, "unreachable_s": 60.0}  # fmt: skip
"""Short waits, and no limits: what is tested is that any number of faults is survived, not when to give up."""
ANYWHERE: tuple[Kind, ...] = ("status", "reset_before", "slow") * 8 + ("silent",)
BODIES: tuple[Kind, ...] = ("reset", "truncate", "flip", "ignore_range", "shift_range", "wrong_length")
IN_BODIES: tuple[Kind, ...] = (*ANYWHERE, *BODIES * 8, "stall")
STALE: tuple[Kind, ...] = ("list_less", "list_more")
LISTINGS: tuple[Kind, ...] = (*ANYWHERE, *STALE * 4)
INDEX_FILES: tuple[Kind, ...] = (*ANYWHERE, *("flip",) * 8)
INDEX_BYTES = 200
"""So long is any index file at least."""


@dataclass(slots=True)
class Chaos:
    """Chooses what happens to each request.

    Listings come whole and right or not at all, but for those that are stale.
    """

    dice: random.Random
    injected: Counter[str] = field(default_factory=Counter)
    num_in_place: int = 0
    """Faults among them of what is received straight in the arena, unless obstore has to ask again."""
    on_request: Callable[[], None] = lambda: None
    """Called for every request."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, method: str, path: str, span: str | None) -> Fault | None:
        self.on_request()
        with self.lock:
            if span == f"bytes={PROBE[0]}-{PROBE[1] - 1}" or self.dice.random() >= FAULT_SHARE:
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
            self.num_in_place += num_bytes >= IN_PLACE_BYTES
        elif method == "GET" and "/_shardstream/" in path:
            kinds, num_bytes = INDEX_FILES, INDEX_BYTES
        kind = self.dice.choice(kinds)
        if kinds is LISTINGS:  # there are few
            kind = next((one for one in STALE if not self.injected[one]), kind)
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
    index_shards(storage, expand_urls(f"{url}/", storage), rule=ChunkRule(min_bytes=1, min_samples=CHUNK_SAMPLES))
    return f"{url}/"


def damage(dataset: StreamingDataset, storage: Storage) -> set[str]:
    """Change a byte of some chunks for good; the keys of all samples whose bytes can no longer be trusted."""
    lost: set[str] = set()
    for chunk in DAMAGED_CHUNKS:
        wanted = dataset.source.chunk(chunk)
        data = bytearray(storage.read(wanted.url))
        data[wanted.byte_start + 512] ^= 4
        storage.put(wanted.url, data)
        first = int(dataset.source.table.num_samples[:chunk].sum())
        lost.update(f"{number:06d}" for number in range(first, first + wanted.num_samples))
    return lost


def calm_epoch(url: str, options: dict[str, Any], max_bad_samples: int, cache_dir: str | None = None) -> Batches:
    dataset = StreamingDataset(
        url, shuffle=SHUFFLE, storage_options=options, max_bad_samples=max_bad_samples, cache_dir=cache_dir
    )
    with DataLoader(dataset, global_batch_size=GLOBAL_BATCH, last_batch="partial", device_mesh=mesh_of(1, 0)) as loader:
        return merged([[checked_keys(batch) for batch in loader]])


@dataclass(slots=True)
class Run:
    """An epoch in legs: every leg goes on from the last state that was saved, on another world."""

    url: str
    options: dict[str, Any]
    chaos: Chaos
    cache_dir: Path
    max_bad_samples: int
    dice: random.Random
    mortals: MortalRanks
    calm: Batches
    batches: Batches = field(default_factory=list)
    state: dict[str, Any] | None = None
    bad: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)

    @property
    def num_left(self) -> int:
        return len(self.calm) - len(self.batches)

    def look(self) -> None:
        """Open the set until a stale listing was noticed: a rank that is killed cannot tell."""
        while not self.events["IndexMismatchError"]:
            open_with_patience(self._part(1, 0, 1, (0,)), self.events)

    def leg(self, world_size: int, num_batches: int) -> None:
        """Ranks one after the other in this process, which all come to the end of the leg and save their state."""
        ranks = [list(steps(part)) for part in self._parts(world_size, num_batches, (0, 2))]
        self._save(ranks, num_batches)
        self.events[f"legs on {world_size}"] += 1

    def killed_leg(self, world_size: int, num_batches: int) -> None:
        """Ranks side by side, each in its process, which are killed; what came after the last save is redone."""
        parts = self._parts(world_size, num_batches, (0, 0, 0, 2))
        if self.dice.random() < 0.4:  # most of these die before their first batch: reading runs ahead
            most, what = 4 * world_size + GLOBAL_BATCH // CHUNK_SAMPLES * num_batches, "requests"
        else:
            most, what = world_size * num_batches, "batches"
        ranks = self.mortals.leg(parts, self.dice.randint(1, most), what, self.dice)
        every = self.dice.randint(1, 3)
        num_saved = min(map(len, ranks)) // every * every
        for number in range(max(map(len, ranks))):
            got = [Counter(rank[number].keys) for rank in ranks if number < len(rank)]
            expected = self.calm[len(self.batches) + number]
            assert total(got) <= expected, "what a rank got before it was killed is a part of that batch"
            self.events["shares redone"] += len(got) * (number >= num_saved)
        self._save([rank[:num_saved] for rank in ranks], num_saved)
        self.events[f"killed legs on {world_size}"] += 1
        self.events["killed ranks"] += world_size

    def _parts(self, world_size: int, num_batches: int, num_workers: Sequence[int]) -> list[Part]:
        return [self._part(world_size, rank, num_batches, num_workers) for rank in range(world_size)]

    def _part(self, world_size: int, dp_rank: int, num_batches: int, num_workers: Sequence[int]) -> Part:
        dice = self.dice
        cache_dir = str(self.cache_dir) if dice.random() < 0.3 else None
        workers = dice.choice(num_workers) if dp_rank else num_workers[-1]
        kills = tuple(number for number in range(num_batches) if number == 0 or dice.random() < 0.1)
        return Part(
            url=self.url, storage_options=self.options, max_bad_samples=self.max_bad_samples, cache_dir=cache_dir,
            num_workers=workers, worker_kills=kills if workers else (), world_size=world_size, dp_rank=dp_rank,
            num_batches=num_batches, state=self.state, seed=dice.randrange(2**32),
        )  # fmt: skip

    def _save(self, ranks: Sequence[Sequence[Step]], num_batches: int) -> None:
        """Go on from here: the first ``num_batches`` of each rank count, and its state after them."""
        for rank in ranks:
            assert [step.state for step in rank] == [step.state for step in ranks[0]]
            assert len(rank) == num_batches
            self.bad.update({one["key"]: one for step in rank for one in step.bad})
            self.events.update(rank[-1].events if rank else {})
        self.batches += merged([[step.keys for step in rank] for rank in ranks])
        if num_batches:
            self.state = json.loads(json.dumps(ranks[0][-1].state))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniS3Server]:
    """One that nobody else uses, and a folder for temporary files of our own."""
    with MiniS3Server() as server:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(in_place, "LEAST_BYTES", IN_PLACE_BYTES)
        yield server


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

    before, files_before = leftovers(), {one.name for one in tmp_path.iterdir()}
    chaos = Chaos(random.Random(dice.random()))
    with FaultProxy(server.port, choose=chaos.choose) as proxy, MortalRanks(tmp_path) as mortals:
        chaos.on_request = mortals.on_request
        faulty = {**options, **IMPATIENT, "endpoint_url": proxy.url}
        run = Run(url, faulty, chaos, tmp_path / "cache", len(lost), dice, mortals, calm)
        run.look()
        for leg in cycle((run.leg, run.killed_leg)):
            if not run.num_left:
                break
            leg(dice.randint(1, 6), min(run.num_left, dice.randint(1, max(3, len(calm) // 8))))
    for thread in threading.enumerate():
        if thread.name.startswith("shardstream-"):  # requests that lost their race end with their answers
            thread.join(PATIENCE_S)
    left = leftovers() - before
    run.events["legs killed on the way"] = mortals.num_in_mid_leg

    print(f"\nseed {seed}: {2 * num_faults} samples, {chaos.injected.total()} faults, "
          f"{chaos.num_in_place} of reads into place, {dict(chaos.injected)}; "
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
    assert chaos.num_in_place > chaos.injected.total() // 2
    assert {name.split()[0] for name in chaos.injected} == {*IN_BODIES, *LISTINGS}
    assert run.events["killed workers"]
    assert run.events["killed ranks"]
    assert run.events["IndexMismatchError"]
    assert calm_epoch(url, options, len(lost), str(tmp_path / "cache")) == calm, "killed ranks leave a sound cache"
    assert list(Path(CachePaths(str(tmp_path / "cache")).parts).iterdir()) == []
    assert {one.name for one in tmp_path.iterdir()} - files_before <= {"cache", f"shardstream-of-{os.getuid()}"}
    assert left == Counter()
