"""Many ranks that open one data set: the store is asked once, and errors reach all. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (the backend of one process)

from infra import AgentStore
from streaming import StreamingDataset
from streaming.common.job import shared_results as shared
from streaming.common.job import store
from streaming.errors import ConfigError, IndexMismatchError, NotFoundError
from streaming.shards.catalog.listing import FoundShards
from streaming.shards.index.chunk_table import ChunkTable, ShardInfo
from streaming.storage import Storage
from tests.support.processes.thread_peers import NUM_RANKS, ThreadPeers, on_ranks
from tests.support.servers.on_loopback import MiniS3Server
from tests.support.sets.data_sets import SampleSet, write_set


@pytest.fixture
def peers(join_job: Callable[[Any], None]) -> ThreadPeers:
    found = ThreadPeers()
    join_job(found)
    return found


def requests(server: MiniS3Server, call: Callable[[], Any]) -> int:
    server.clear_log()
    call()
    return len(server.log())


@pytest.fixture(scope="module")
def indexed(mini_s3: MiniS3Server) -> SampleSet:
    bucket = mini_s3.create_bucket("shared")
    return write_set(f"{bucket}/train", storage_options=mini_s3.storage_options)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"fields": ("cls", "txt")}])
def test_many_ranks_ask_as_often_as_one(
    mini_s3: MiniS3Server, indexed: SampleSet, join_job: Callable[[Any], None], options: Any
) -> None:
    single = indexed.open(**options)
    cost = requests(mini_s3, lambda: indexed.open(**options))
    join_job(ThreadPeers())
    found: list[StreamingDataset] = []
    assert requests(mini_s3, lambda: found.extend(on_ranks(lambda: indexed.open(**options)))) == cost
    assert cost > 0
    assert len(found) == NUM_RANKS
    for dataset in found:
        assert dataset.source.shards.urls == single.source.shards.urls
        assert dataset.source.table == single.source.table
        assert dataset.source.table.fingerprint == single.source.table.fingerprint
    assert found[-1][201]["cls"] == 201


@pytest.mark.thorough
def test_a_set_without_an_index_is_listed_once_and_scanned_once(mini_s3: MiniS3Server, peers: ThreadPeers) -> None:
    bucket = mini_s3.create_bucket("shared-scan")
    samples = write_set(f"{bucket}/train", storage_options=mini_s3.storage_options, indexed=False)
    found: list[StreamingDataset] = []
    num_requests = requests(mini_s3, lambda: found.extend(on_ranks(samples.open)))
    assert len({dataset.source.table.fingerprint for dataset in found}) == 1
    assert sum(len(dataset) for dataset in found) == 202 * NUM_RANKS
    gets = [entry for entry in mini_s3.log() if entry["method"] == "GET" and str(entry["path"]).endswith(".tar")]
    assert sum(int(entry["bytes"]) for entry in gets) <= 1.01 * sum(
        one.size_bytes for one in found[0].source.table.shards
    )
    assert num_requests < 2 * NUM_RANKS


def test_errors_of_the_one_that_looks_reach_all(mini_s3: MiniS3Server, indexed: SampleSet, peers: ThreadPeers) -> None:
    """The same type and message, at once and not after a time-out; and one request's worth of them."""
    nowhere = SampleSet(url=indexed.url.replace("train", "nowhere"), keys=(), storage_options=indexed.storage_options)
    found: list[Exception] = []
    assert requests(mini_s3, lambda: found.extend(on_ranks(nowhere.open))) < 8
    assert {type(one) for one in found} == {NotFoundError}
    assert len({str(one) for one in found}) == 1
    found = on_ranks(lambda: indexed.open(fields=("clz",)))
    assert {type(one) for one in found} == {ConfigError}
    assert len({str(one) for one in found}) == 1
    assert "did you mean 'cls'?" in str(found[0])


def test_opening_again_looks_again(mini_s3: MiniS3Server, peers: ThreadPeers) -> None:
    """The n-th opening of a rank meets the n-th of rank 0: nobody gets what was there before."""
    bucket = mini_s3.create_bucket("shared-again")
    samples = write_set(f"{bucket}/train", (5,), storage_options=mini_s3.storage_options)
    assert {len(one) for one in on_ranks(samples.open, 4)} == {5}
    more = write_set(f"{bucket}/train", (0, 3), storage_options=mini_s3.storage_options, first=5, indexed=False)
    assert {type(one) for one in on_ranks(more.open, 4)} == {IndexMismatchError}


def test_a_process_that_opens_alone_waits_no_longer_than_it_must(
    indexed: SampleSet, peers: ThreadPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PEER_WAIT_S", 0.01)
    threading.current_thread().name, name = "rank 3", threading.current_thread().name
    try:
        assert len(indexed.open()) == 202
    finally:
        threading.current_thread().name = name


def test_nobody_waits_for_one_that_goes_on_from_an_older_world(
    indexed: SampleSet, peers: ThreadPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PEER_WAIT_S", 3600.0)
    before = threading.current_thread().name
    try:
        threading.current_thread().name = "rank 0"
        shared.go_on(peers)
        threading.current_thread().name = "rank 3"
        assert len(indexed.open()) == 202, "else it waits for an hour"
    finally:
        threading.current_thread().name = before


@pytest.mark.thorough
def test_waiting_for_a_late_rank_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's store writes two warnings, past Python's logging, for each timed wait that runs out."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", kept.port, is_master=False, wait_for_workers=False)
    late, waiting = store.StorePeers(0, 2, kept), store.StorePeers(1, 2, client)
    timer = threading.Timer(0.8, shared.shared, (late, "x", lambda: b"one"))
    timer.daemon = True
    timer.start()
    assert shared.shared(waiting, "x", lambda: b"alone") == b"one"
    assert capfd.readouterr() == ("", "")


def test_what_is_too_large_is_looked_up_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_BYTES", 1000)
    peers, made = ThreadPeers(4), []

    def make() -> bytes:
        made.append(1)
        return np.random.default_rng(0).bytes(size)

    for size, expected in ((300, 1), (400, 4)):
        made.clear()
        assert len(set(on_ranks(lambda size=size: shared.shared(peers, f"x{size}", make), 4))) == 1  # type: ignore[misc]
        assert len(made) == expected


def test_large_answers_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "PIECE_BYTES", 100)
    peers = ThreadPeers(3)
    data = np.random.default_rng(0).bytes(1050)
    assert on_ranks(lambda: shared.shared(peers, "x", lambda: data), 3) == [data] * 3
    assert len(peers.left) == 2 + 11
    assert max(map(len, peers.left.values())) == 100
    assert on_ranks(lambda: shared.shared(peers, "empty", lambda: b""), 3) == [b""] * 3


def test_what_was_found_survives_as_bytes() -> None:
    shards = tuple(ShardInfo(name="same", size_bytes=1024 * number, num_samples=2) for number in (3, 4))
    table = ChunkTable(
        shards=shards, shard=np.array([0, 1]), first_sample=np.zeros(2), num_samples=np.array([2, 2]),
        byte_start=np.zeros(2), byte_end=np.array([1024, 2048]), crc32c=np.array([7, 2**32 - 1]),
    )  # fmt: skip
    for found in (
        FoundShards(urls=("a", "ü"), table=table),
        FoundShards(urls=("a",), table=None, missing_index="none"),
        FoundShards(urls=("a",), table=None, sizes=(5,)),
    ):
        assert FoundShards.from_bytes(found.to_bytes()) == found


def test_a_job_of_torch_distributed_reads_the_index_on_rank_0_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set is made after ``init_process_group``, as in a training script; one process plays the ranks in turn."""
    samples = write_set(tmp_path, (5, 4))
    reads: list[tuple[int, str]] = []
    read = Storage.read

    def noted(self: Storage, url: str, start: int = 0, stop: int | None = None) -> Any:
        reads.append((dist.get_rank(), url))
        return read(self, url, start, stop)

    monkeypatch.setattr(Storage, "read", noted)
    store = dist.HashStore()
    lengths = []
    for rank in range(3):
        dist.init_process_group("fake", rank=rank, world_size=3, store=store)
        try:
            lengths.append(len(samples.open(fields=("cls",))))
        finally:
            dist.destroy_process_group()
    assert lengths == [9, 9, 9]
    assert any(url.endswith("chunks.parquet") for _, url in reads)
    assert {rank for rank, _ in reads} == {0}


def test_the_store_of_torchruns_agent_serves_the_processes_it_started() -> None:
    """What they start themselves has the same variables, and would ask for names out of turn."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [AgentStore(host="127.0.0.1", port=kept.port, rank=rank, world_size=2, attempt="0") for rank in (0, 1)]
    first, second = (store._agent_peers(rank, 1000 + rank.rank) for rank in ranks)
    assert first is not None
    assert second is not None
    assert first.turn("a") == first.turn("b") == second.turn("a") == 1
    first.leave("a", b"one")
    assert second.find("a", 5) == b"one"
    assert second.find("b", 0.01) is None
    assert store._agent_peers(ranks[1], 2000) is None
    assert store._agent_peers(replace(ranks[1], attempt="1"), 2000) is not None
