"""Fixtures for everybody: servers that start when first asked for, and fresh buckets in them."""

from __future__ import annotations

import gc
import importlib
import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import fsspec.asyn
import pytest
from forked import Forked
from hypothesis import settings
from leftovers import our_threads
from servers import AzuriteServer, MiniGcsServer, MiniS3Server, MotoServer, fresh_name

from streaming.catalog import open as catalog_open
from streaming.datasets import dataset, grouped, packed, table_file
from streaming.engine.memory import mapped
from streaming.engine.workers.fork_server import SHARED
from streaming.job.once import Peers
from streaming.storage import Storage


def pytest_addoption(parser: pytest.Parser) -> None:
    """What ``make matrix``, ``make torture`` and ``make differential`` set."""
    parser.addoption("--matrix", action="store_true", help="also run the cells whose mechanism other cells show")
    parser.addoption("--torture-faults", type=int, default=200, help="faults that test_torture.py injects at least")
    parser.addoption("--torture-changes", type=int, default=16, help="worlds in test_remesh_processes.py")
    parser.addoption("--torture-seed", type=int, default=1, help="seed of all that is random in both")
    parser.addoption(
        "--differential-cases",
        type=int,
        help="cases that test_differential.py plays, and a fifth as streams: 100, under --matrix 300",
    )
    parser.addoption("--differential-first", type=int, default=0, help="number of the first of them")
    parser.addoption(
        "--differential-seed", type=int, default=1, help="seed of all that is drawn in test_differential.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on 40 examples, under ``make matrix`` on 400, but for those that say on how many.

    In CI they are the same in each run.
    """
    if config.option.differential_cases is None:
        config.option.differential_cases = 300 if config.getoption("--matrix") else 100
    settings.register_profile("here", max_examples=400 if config.getoption("--matrix") else 40, deadline=None)
    settings.load_profile("here")


LONGEST_FIRST = (
    "test_memory", "test_ray", "test_trainers", "test_shutdown_processes", "test_demo", "test_differential",
    "test_hosts", "test_distributed", "test_examples", "test_remesh_processes", "test_workers", "test_ordinary",
    "test_promises", "test_differential_streamed", "test_cache_processes", "test_portable", "test_kills", "test_resume",
    "test_torture", "test_mixture", "test_scale", "test_shutdown", "test_dispatch", "test_restarting_server",
    "test_unindexed", "test_imports", "test_readme", "test_tar_parse", "test_reshard", "test_loader", "test_lanes",
    "test_mixture_exact", "test_curriculum", "test_remesh", "test_epochs",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each process of xdist begins with other files: what one has compiled, which takes 6 s in all, others find."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or not any(os.path.isdir(one) for one in session.config.args):
        return
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    for name in names[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # pytest imports it once more, and tells
            importlib.import_module(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take longest come first: xdist gives whole files away, and the last one is not to be a long one.

    Cells marked ``matrix`` are left to ``make matrix``.
    """
    if not config.getoption("--matrix"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("matrix")])
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    """Modules and test items live to the end: a collection of garbage, of which many tests need some, skips them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """So do the libraries that a file of tests was the first to use, and reports; its own fixtures are gone by then."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        if next(_FILES) % _LOOKED_THROUGH_EVERY == 0 or our_threads():
            gc.unfreeze()  # what files before this one left alive may have become garbage, such as a loader
        gc.collect()
        gc.freeze()
    return result


_FILES = count(1)
_LOOKED_THROUGH_EVERY = 16
"""Files: to look through the half a million objects that are alive takes a third of a second."""


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """``os.fsync`` returns at once in this process: no test cuts the power, and thousands of calls take a minute.

    That files are synced, and when, is asserted in test_storage.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
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
    """Starts processes that have imported what we have."""
    names = ("streaming.loader", "streaming.datasets.dataset", "shard_tools.convert", "shard_tools.cli", "data_sets")
    # pyarrow imports pandas as soon as somebody makes an array of a list: three tenths of a second in each that writes.
    with Forked(*names, "torch.distributed.tensor", "pandas") as origin:
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
    """The session ends the fork server that outlives its users."""
    yield
    SHARED.close()


@pytest.fixture
def one_fork_server(_fork_server: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Loaders of this test find a fork server running, which has imported its file: either takes seconds.

    That workers import what functions need is seen where servers are not warm: test_workers.py, test_portable.py.
    """
    SHARED.linger = True
    server = SHARED.borrow()  # a test without this fixture may have ended the one before
    if (server.pid, request.module.__name__) not in _IMPORTED:
        _IMPORTED.add((server.pid, request.module.__name__))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            number = server.spawn_process(theirs, request.module.__name__)
        server.kill(number)  # the server alone is to import it
    SHARED.give_back(server)
    yield
    SHARED.linger = False


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
    """Takes what data sets are to find as the processes of their job."""

    def join(peers: Peers | None) -> None:
        for module in (dataset, grouped, packed, table_file):
            monkeypatch.setattr(module, "job_peers", lambda _: peers)

    return join
