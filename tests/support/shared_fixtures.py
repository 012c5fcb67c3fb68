"""Fixtures for everybody: servers that start when first asked for, and fresh buckets in them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import fsspec.asyn
import pytest

from streaming.common.job.shared_results import Peers
from streaming.run.engine import builders
from streaming.run.engine.memory import mapped
from streaming.run.engine.workers.fork_server import SHARED
from streaming.sets.datasets import table_file
from streaming.sets.sources import grouped, packs, samples
from streaming.shards.catalog import open as catalog_open
from streaming.storage import Storage
from streaming.storage.requests import traffic
from tests.support.processes.forked import IMPORTS, Forked
from tests.support.processes.forked import SHARED as SHARED_ORIGIN
from tests.support.processes.held_workers import Held
from tests.support.processes.pauses import Pauses
from tests.support.servers import browser
from tests.support.servers.on_loopback import AzuriteServer, MiniGcsServer, MiniS3Server, MotoServer, fresh_name


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """``os.fsync`` returns at once in this process: no test cuts the power, and thousands of calls take a minute.

    That files are synced, and when, is asserted in test_storage.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _pauses(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the side of all loaders pause that ``--pause`` names."""
    with pytest.MonkeyPatch.context() as patch:
        if side := request.config.getoption("--pause"):
            Pauses(side, patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_lingering() -> Iterator[None]:
    """The fork server of this process ends with its last user, so that a test sees what it has left behind.

    It starts at once, also for loaders whose threads could do without it for a while (the rest: test_builder_lanes.py).
    """
    before, SHARED.linger_s = SHARED.linger_s, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builders, "START_AFTER_S", 0.0)
        yield
    SHARED.linger_s = before


@pytest.fixture(scope="session", autouse=True)
def _no_second_requests_for_slowness() -> Iterator[None]:
    """No read of this process gets a second request before a minute: under load any answer may be late.

    So requests can be counted. Tests of second requests say themselves when one is made.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "HEDGE_LEAST_S", 60.0)
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    """moto's S3 server."""
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def mini_s3() -> Iterator[MiniS3Server]:
    """Our own S3 server, which checks signatures and logs requests."""
    with MiniS3Server() as server:
        yield server


@pytest.fixture
def moto_bucket(moto: MotoServer) -> str:
    """URL of a new bucket in moto."""
    return moto.create_bucket(fresh_name())


@pytest.fixture
def s3_bucket(mini_s3: MiniS3Server) -> str:
    """URL of a new bucket in our own server."""
    return mini_s3.create_bucket(fresh_name())


@pytest.fixture(scope="session")
def mini_gcs() -> Iterator[MiniGcsServer]:
    """Our own Google Cloud Storage server, which checks its token and logs requests."""
    with MiniGcsServer() as server:
        yield server


@pytest.fixture
def gcs_bucket(mini_gcs: MiniGcsServer) -> str:
    """URL of a new bucket in our own Google server."""
    return mini_gcs.create_bucket(fresh_name())


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzuriteServer]:
    """Microsoft's emulator of Azure's blob storage."""
    if not AzuriteServer.installed():
        pytest.skip("azurite-blob is not on PATH; it needs Node: npm install -g azurite")
    with AzuriteServer() as server:
        yield server


@pytest.fixture
def azure_container(azurite: AzuriteServer) -> str:
    """URL of a new container in azurite."""
    return azurite.create_container(fresh_name())


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Starts processes that have imported the same modules as this one."""
    with Forked(*IMPORTS, path=os.environ.get(SHARED_ORIGIN, "")) as origin:
        yield origin


@pytest.fixture
def s3fs_closed() -> Iterator[Callable[[Storage], Storage]]:
    """Takes storages whose s3fs sessions are to be closed: left to the garbage collector, they warn."""
    taken: list[Storage] = []

    def take(storage: Storage) -> Storage:
        taken.append(storage)
        return storage

    yield take
    for storage in taken:
        for adapter in storage._store._adapters.values():
            for system in getattr(adapter, "_systems", {}).values():
                if hasattr(system, "close_session") and system._s3 is not None:
                    system.close_session(fsspec.asyn.get_loop(), system.s3)
                    system._s3 = None


@pytest.fixture(scope="session")
def _fork_server() -> Iterator[None]:
    """Ends the fork server, which outlives its users, with the session."""
    yield
    SHARED.close()


@pytest.fixture
def one_fork_server(_fork_server: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Loaders of this test find a running fork server that has imported its file, since either takes seconds.

    That workers import what functions need is tested with cold servers: test_workers.py, test_portable.py.
    """
    SHARED.linger_s = None
    server_imports(request.module.__name__)  # a test without this fixture may have ended the server before
    yield
    SHARED.linger_s = 0


def server_imports(name: str) -> None:
    """Have the fork server import a module, once; otherwise each worker that needs it does."""
    server = SHARED.borrow()
    if (server.pid, name) not in _IMPORTED:
        _IMPORTED.add((server.pid, name))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            number = server.spawn_process(theirs, name)
        server.kill(number)  # the server alone is to import it
    SHARED.give_back(server)


_IMPORTED: set[tuple[int, str]] = set()
"""Pids of fork servers, and the files of tests that they have imported."""


@pytest.fixture
def no_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local shards are read, not mapped: for tests that count what is read."""
    monkeypatch.setattr(mapped, "_OWN_DISKS", frozenset())


@pytest.fixture
def not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets without an index are streamed, as if they were too large to be indexed at start."""
    monkeypatch.setattr(catalog_open, "SCAN_LIMIT_BYTES", 0)


@pytest.fixture
def join_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Peers | None], None]:
    """Sets what datasets find as the processes of their job."""

    def join(peers: Peers | None) -> None:
        for module in (samples, grouped, packs, table_file):
            monkeypatch.setattr(module, "job_peers", lambda _: peers)

    return join


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser, started once; tests that ask for it are skipped where none is installed."""
    with browser.running() as found:
        yield found


@pytest.fixture
def tab(chromium: Any) -> Iterator[Callable[..., browser.Tab]]:
    """Opens pages in contexts of their own: ``tab(color_scheme="dark")``; they are closed after the test."""
    opened: list[browser.Tab] = []

    def new(**context: Any) -> browser.Tab:
        opened.append(browser.Tab(chromium, **context))
        return opened[-1]

    yield new
    for one in opened:
        one.close()


@pytest.fixture
def pictures(request: pytest.FixtureRequest) -> browser.Pictures:
    """Compares pages with the pictures of the docs; with ``--pictures`` takes them anew."""
    return browser.Pictures(renew=request.config.getoption("--pictures"))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Worker processes start, but say nothing until they are let go."""
    held = Held(monkeypatch)
    yield held
    held.let_go.set()
