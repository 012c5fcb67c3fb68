"""serve(): who connects gets one line of JSON; files of killed jobs are replaced, those of living ones are not."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streaming import DataLoader
from streaming.errors import ConfigError
from streaming.watch.metrics import serve, server
from tests.support.contracts.loop_kinds import CLOSABLE, compress, makers
from tests.support.processes.forked import Forked
from tests.support.processes.waiting import PATIENCE_S, until
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set

pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("serve"), (9, 20, 9))


@pytest.fixture(scope="module")
def kinds(samples: SampleSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return makers(samples, compress(samples, tmp_path_factory.mktemp("streamed")))


def asked(path: Path | str) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    found: dict[str, Any] = json.loads(data)
    return found


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "shardstream-serve"]


@pytest.mark.parametrize("kind", CLOSABLE)
def test_every_kind_of_loader_answers(kinds: dict[str, Any], kind: str, tmp_path: Path) -> None:
    with kinds[kind]() as loader:
        served = serve(loader, tmp_path / "run" / "rank{rank}.sock")
        assert served.path == str(tmp_path / "run" / "rank0.sock")
        assert stat.S_IMODE(os.stat(served.path).st_mode) == 0o600
        assert asked(served.path)["numbers"].get("batches", 0) == 0
        batches = iter(loader)
        next(batches), next(batches)
        found = asked(served.path)
        assert (found["rank"], found["data_rank"], found["world_size"], found["epoch"]) == (0, 0, 1, 0)
        assert found["numbers"]["batches"] >= 2
        assert found["samples_seen"] == 20
        assert 0 < found["headspace"] < 1
        assert found["describe"] not in ("", "not running")
        assert (found["format"], found["pid"], found["host"]) == (1, os.getpid(), socket.gethostname())
        served.close()
        served.close()
    assert os.listdir(tmp_path / "run") == []
    assert thread_names() == []


def test_the_rank_is_in_the_name_and_in_the_answer(samples: SampleSet, tmp_path: Path) -> None:
    with DataLoader(samples.open(), batch_size=4, device_mesh=mesh_of(2, 1)) as loader:
        served = serve(loader, tmp_path / "rank{rank}.sock")
        assert (asked(tmp_path / "rank1.sock")["rank"], asked(served.path)["world_size"]) == (1, 2)
        served.close()


def test_it_ends_with_the_loader(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "one.sock"
    loader = DataLoader(samples.open(), batch_size=4)
    serve(loader, path)
    gc.collect()
    loader.close()
    assert asked(path)["describe"] == "not running"
    del loader
    gc.collect()
    until(lambda: thread_names() == [], "its thread ends")
    assert not path.exists()


def test_a_living_one_is_not_replaced(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "one.sock"
    with DataLoader(samples.open(), batch_size=4) as loader, DataLoader(samples.open(), batch_size=2) as other:
        served = serve(loader, path)
        with pytest.raises(ConfigError, match=r"another loader answers at .*one.sock.*\{rank\}"):
            serve(other, path)
        assert asked(path)["pid"] == os.getpid()
        served.close()
        serve(other, path).close()


KILLED = """
import os, signal, sys
from streaming import DataLoader, StreamingDataset
from streaming.watch.metrics import serve, server
loader = DataLoader(StreamingDataset(sys.argv[1]), batch_size=4)
serve(loader, sys.argv[2])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_job_left_is_replaced(samples: SampleSet, tmp_path: Path, forked: Forked) -> None:
    path, program = tmp_path / "one.sock", tmp_path / "killed.py"
    program.write_text(KILLED)
    forked.start(program, samples.url, str(path), output=tmp_path / "log").wait(60)
    assert path.exists()
    with DataLoader(samples.open(), batch_size=4) as loader:
        served = serve(loader, path)
        assert asked(path)["pid"] == os.getpid()
        served.close()


def test_what_is_no_socket_stays(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with DataLoader(samples.open(), batch_size=4) as loader:
        with pytest.raises(ConfigError, match=r"notes.txt is there already and is no socket"):
            serve(loader, path)
        with pytest.raises(ConfigError, match="about 100 characters; give a shorter one"):
            serve(loader, tmp_path / ("x" * 110))
        with pytest.raises(ConfigError, match=r"serve: .*File exists; give another path"):
            serve(loader, path / "one.sock")
    assert path.read_text() == "mine"
    assert thread_names() == []


def test_a_file_that_was_replaced_is_left_alone(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "one.sock"
    with DataLoader(samples.open(), batch_size=4) as loader:
        served = serve(loader, path)
        path.unlink()
        path.write_text("another's")
        served.close()
    assert path.read_text() == "another's"


def test_a_reader_that_stalls_or_goes_does_not_end_it(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "one.sock"
    with DataLoader(samples.open(), batch_size=4) as loader:
        served = serve(loader, path)
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            with suppress(BrokenPipeError):  # it may have answered, and closed, before anything is sent
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert asked(path)["rank"] == 0
        served.close()


def test_what_cannot_be_told_is_said(samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.sock"
    with DataLoader(samples.open(), batch_size=4) as loader:
        served = serve(loader, path)

        def broken() -> str:
            raise ValueError("broken")

        monkeypatch.setattr(loader, "describe", broken)
        assert asked(path) == {"format": 1, "error": "ValueError: broken"}
        monkeypatch.undo()
        assert asked(path)["rank"] == 0
        served.close()


def test_a_forked_child_does_not_keep_it_open(samples: SampleSet, tmp_path: Path) -> None:
    path = tmp_path / "one.sock"
    told, tell = os.pipe()
    with DataLoader(samples.open(), batch_size=4) as loader:
        served = serve(loader, path)
        child = os.fork()
        if not child:
            served.close()  # has no effect: it is the parent's
            os.close(tell)
            os.read(told, 1)
            os._exit(0)
        os.close(told)
        assert asked(path)["pid"] == os.getpid()
        served.close()
        assert not path.exists()
        again = serve(loader, path)
        assert asked(path)["pid"] == os.getpid()
        again.close()
    os.close(tell)
    os.waitpid(child, 0)


def test_scraping_while_it_iterates(samples: SampleSet, tmp_path: Path) -> None:
    path, found, stop = tmp_path / "one.sock", [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            found.append(asked(path))

    thread = threading.Thread(target=look)
    with DataLoader(samples.open(), batch_size=2, num_threads=2) as loader:
        served = serve(loader, path)
        thread.start()
        for _ in range(10):
            for _ in loader:
                pass
        stop.set()
        thread.join()
        served.close()
    assert len(found) > 3
    assert all("error" not in one for one in found), [one["error"] for one in found if "error" in one]
    counts = [one["numbers"].get("batches", 0) for one in found]
    assert counts == sorted(counts)


def test_no_reader_of_the_folder_keeps_it_waiting(samples: SampleSet, tmp_path: Path) -> None:
    """Whoever can read a folder can lock it, for ever."""
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with DataLoader(samples.open(), batch_size=2) as loader:
            served = serve(loader, tmp_path / "a.sock")
            assert asked(served.path)["rank"] == 0
            served.close()
    finally:
        os.close(held)
    assert not [*tmp_path.iterdir()]


def test_a_lock_that_others_hold_or_can_open_is_an_error_soon(
    samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_LOCK_S", 0.01)
    lock = tmp_path / "a.sock.lock"
    lock.touch(mode=0o600)
    with DataLoader(samples.open(), batch_size=2) as loader:
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match=r"held this lock for 0.01 s; is it stopped\?; give another path"):
                serve(loader, tmp_path / "a.sock")
        lock.chmod(0o644)
        with pytest.raises(ConfigError, match="other users can open this lock; remove it"):
            serve(loader, tmp_path / "a.sock")
        lock.unlink()
        serve(loader, tmp_path / "a.sock").close()
    assert not [*tmp_path.iterdir()]
