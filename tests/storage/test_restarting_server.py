"""A store that dies in the middle of an epoch, with answers half sent, and comes back: a pause, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from streaming import DataLoader, ShuffleConfig, StreamingDataset
from streaming.errors import TransferError
from tests.support.processes.waiting import PATIENCE_S, ended, started, until
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.sets.data_sets import SampleSet, mesh_of, valid_keys, write_set

SHUFFLE = ShuffleConfig(seed=1, lanes=2, window=8)
BATCHING: dict[str, Any] = {"batch_size": 10, "num_threads": 0, "memory_limit": "512KiB"}
QUICK = {"first_backoff_s": 0.1, "max_backoff_s": 0.4, "max_retries": 10_000, "retry_share": 1000.0}
"""So slow that a dead server does not use up the retries saved for it: those beyond them wait, two a second."""
KILLED_AFTER = (3, 20, 50)
WAIT_S = 3600.0
"""Longer than a server needs to start, however busy the machine is."""


@pytest.fixture
def server() -> Iterator[MiniS3Server]:
    """One that nobody else uses."""
    with MiniS3Server() as server:
        yield server


def samples_in(server: MiniS3Server) -> SampleSet:
    """4 MB, of which a loader with the memory above holds an eighth."""
    folder = server.create_bucket(fresh_name()) + "/train"
    return write_set(folder, (200,) * 4, chunk_samples=4, storage_options=server.storage_options)


def open_for(server: MiniS3Server, samples: SampleSet, unreachable_s: float) -> StreamingDataset:
    options = {**server.storage_options, **QUICK, "unreachable_s": unreachable_s}
    return StreamingDataset(samples.url, shuffle=SHUFFLE, storage_options=options)


def until_requests_fail(dataset: StreamingDataset) -> None:
    metrics = dataset.source.storage.metrics
    before = metrics.get("retries")
    until(lambda: metrics.get("retries") >= before + 3, "somebody notices that the server is gone")


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_epoch_goes_on_where_it_was(server: MiniS3Server, one_fork_server: None, num_workers: int) -> None:
    samples = samples_in(server)
    with DataLoader(samples.open(shuffle=SHUFFLE), device_mesh=mesh_of(1, 0), **BATCHING) as loader:
        calm = [valid_keys(batch) for batch in loader]
    dataset = open_for(server, samples, WAIT_S)
    pids, dead, got = {server.pid}, threading.Semaphore(0), []

    def bring_back() -> None:
        for _ in KILLED_AFTER:
            assert dead.acquire(timeout=PATIENCE_S)
            until_requests_fail(dataset)
            server.start_again()
            pids.add(server.pid)

    helpers = started(bring_back)
    with DataLoader(dataset, num_workers=num_workers, device_mesh=mesh_of(1, 0), **BATCHING) as loader:
        for batch in loader:
            got.append(valid_keys(batch))
            if len(got) in KILLED_AFTER:
                server.kill()
                dead.release()
        bad = loader.metrics()["bad"]
    ended(*helpers)
    assert got == calm
    assert bad == []
    assert len(pids) == 1 + len(KILLED_AFTER)


@pytest.mark.thorough
def test_one_that_stays_away_is_an_error_after_unreachable_s(server: MiniS3Server) -> None:
    samples = samples_in(server)
    dataset = open_for(server, samples, 0.3)
    with DataLoader(dataset, device_mesh=mesh_of(1, 0), **BATCHING) as loader:
        batches = iter(loader)
        valid_keys(next(batches))
        server.kill()
        with pytest.raises(TransferError, match=f"cannot reach {server.url}"):
            list(batches)
        state = loader.state_dict()
        assert 10 <= state["samples_seen"] < 800
        server.start_again()
        loader.load_state_dict(state)
        rest = [valid_keys(batch) for batch in loader]
    with DataLoader(samples.open(shuffle=SHUFFLE), device_mesh=mesh_of(1, 0), **BATCHING) as loader:
        calm = [valid_keys(batch) for batch in loader]
    assert rest == calm[state["samples_seen"] // 10 :]
