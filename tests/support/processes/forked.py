"""Processes forked from one that has imported what they need: starting an interpreter takes one to three seconds each.

They run programs as their main programs and end by ``os._exit``. Promises about an interpreter's start or end, its
imports or a launcher need real ones: see test_shutdown_processes.py, test_demo.py and the like.

Run as ``forked.py LISTENER MODULES``, this file is the process that forks, for everyone who connects to a socket;
xdist's processes share one. It reads lines of JSON (see :meth:`Forked.start`), and writes ``{"pid"}`` for each, and
``{"ended", "status"}`` when one has ended. With the path of a socket in place of LISTENER it is forked itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Self

from tests.support.code.folders import PROGRAMS, ROOT, SUPPORT
from tests.support.processes.waiting import PATIENCE_S, until

IMPORTS = (
    "streaming.loader", "streaming.sets.datasets.dataset", "shard_tools.make.convert", "shard_tools.cli",
    "tests.support.sets.data_sets", "torch.distributed.tensor", "torch._dynamo", "pandas",
)  # fmt: skip
"""What tests need. Making an optimizer imports torch._dynamo, and a pyarrow array of a list imports pandas: 0.3 s
in each process that writes."""
SHARED = "SHARDSTREAM_TESTS_ORIGIN"
"""The variable with the path of the socket of the origin that a whole run shares, if there is one."""
_CLONE_NEWNET = 0x40000000


class ForkedProcess:
    """A forked process."""

    def __init__(self, origin: Forked, pid: int, output: Path) -> None:
        self._origin, self.pid, self.output = origin, pid, output

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._origin.poll(self.pid, 0)

    def poll_for(self, timeout: float) -> int | None:
        """Wait for the exit code; None if the process does not end in time."""
        return self._origin.poll(self.pid, timeout)

    def wait(self, timeout: float = 240) -> int:
        """The exit code.

        Raises:
            AssertionError: It runs too long; the message has its output.
        """
        code = self.poll_for(timeout)
        assert code is not None, f"runs for more than {timeout} s: {self.output.read_text()[-4000:]}"
        return code

    def wait_for_all(self, timeout: float = 240) -> int:
        """Wait for the exit code of a process that leads a session, and for the end of what it has started in that.

        A launcher may end before its ranks do: where it ends well, they have time to do so, too. Where it fails, or
        runs too long, they are killed.

        Raises:
            AssertionError: It, or what it has started, runs too long; the message has its output.
        """
        try:
            code = self.wait(timeout)
            if not code:
                until(lambda: not self._session(), "what it has started ends", details=self._told)
            return code
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _session(self) -> list[int]:
        """Running processes of the session that it leads, or led."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended just now
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # man 5 proc: state is first
                if int(words[3]) == self.pid and words[0] not in "ZX":
                    found.append(int(pid))
        return found

    def _told(self) -> str:
        return f"{self._session()} {self.output.read_text()[-4000:]}"

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, signal.SIGKILL)


class Origin:
    """The process that forks.

    Args:
        imports: Modules to import before the first fork. None may start threads, which a fork would lose.
        environ: Variables of all forked processes.
        base: It is forked from this one's origin, whose imports it need not repeat.

    Attributes:
        path: Path of its socket, which accepts connections at once; they wait while it imports.
    """

    def __init__(self, *imports: str, environ: Mapping[str, str] | None = None, base: Forked | None = None) -> None:
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(PROGRAMS)])
        environment |= environ or {}
        self._folder = tempfile.mkdtemp(prefix="forked-", dir="/tmp")  # a socket's path must be short
        self.path = f"{self._folder}/socket"
        stand_in = Path(self._folder, "python")
        words = map(shlex.quote, (sys.executable, "-IS", str(SUPPORT / "processes/stand_in.py"), self.path))
        stand_in.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        stand_in.chmod(0o700)
        self._process: subprocess.Popen[bytes] | None = None
        self._forked: ForkedProcess | None = None
        if base is not None:
            output = Path(self._folder, "output")
            self._forked = base.start(Path(__file__), self.path, *imports, output=output, environ=environment)
            while not os.path.exists(self.path):  # it gets this name when it listens
                assert self._forked.poll_for(0.01) is None, output.read_text()
            return
        with listen(self.path) as listener:
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(number), *imports],
                stdin=subprocess.PIPE,
                pass_fds=[number],
                env=os.environ | environment,
            )

    def close(self) -> None:
        """End it and all running processes that it has forked."""
        if self._process is not None:
            self._process.communicate(timeout=PATIENCE_S)
        if self._forked is not None:
            self._forked.kill()  # who was connected has seen the end of what ran for it
            self._forked.wait(PATIENCE_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def listen(path: str) -> socket.socket:
    """Listen to a socket, which gets this path once it does."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}-")
    listener.listen(64)
    os.rename(f"{path}-", path)
    return listener


class Forked:
    """Starts forked processes. Use it as a context; at its end they are gone.

    Args:
        imports: Modules of an :class:`Origin` of its own.
        environ: Variables of that origin.
        path: Path of the socket of an existing origin, instead of these.
        base: That origin is forked from this one's.

    Attributes:
        python: Path of a program that stands in for the interpreter where others start it: ``stand_in.py``.
    """

    def __init__(
        self, *imports: str, environ: Mapping[str, str] | None = None, path: str = "", base: Forked | None = None
    ) -> None:
        self._origin = None if path else Origin(*imports, environ=environ, base=base)
        path = path or self._origin.path  # type: ignore[union-attr]
        self.python = os.path.join(os.path.dirname(path), "python")
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        self._said = b""
        self._ended: dict[int, int] = {}
        self._pids: list[int] = []

    def start(
        self, program: str | Path, *arguments: str, output: Path, environ: Mapping[str, str] | None = None,
        network: Path | None = None, leads: bool = False,
    ) -> ForkedProcess:  # fmt: skip
        """Fork a process for a script, or for the text of a program; its output is appended to the file ``output``.

        Args:
            program: A script, or its text.
            arguments: Arguments of the script.
            output: File for its output.
            environ: Variables, in addition to those of this object.
            network: Its network namespace (``hosts.Host.network``).
            leads: It leads a session of its own, so that everything it starts can be killed with it, by its pid.
        """
        job = {"path": str(program)} if isinstance(program, Path) else {"code": program}
        job |= {"arguments": list(arguments), "output": str(output), "environ": dict(environ or {})}  # type: ignore[dict-item]
        job |= {"network": str(network or ""), "leads": leads}  # type: ignore[dict-item]
        self._connection.sendall(json.dumps(job).encode() + b"\n")
        count = len(self._pids)
        while len(self._pids) == count:
            assert self._hear(PATIENCE_S), "the process that forks is gone"
        return ForkedProcess(self, self._pids[-1], output)

    def start_ranks(
        self, program: Path, *arguments: str, world_size: int, output: Path, environ: Mapping[str, str] | None = None
    ) -> list[ForkedProcess]:
        """Start all ranks of a job, with torchrun's variables; ``MASTER_ADDR`` and the like are the caller's."""
        ranks = []
        for rank in range(world_size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
            place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)) | dict(environ or {})
            ranks.append(self.start(program, *arguments, output=output, environ=place))
        return ranks

    def poll(self, pid: int, timeout: float) -> int | None:
        """Wait for the exit code of a process; None if it does not end in time."""
        end_s = time.monotonic() + timeout
        while pid not in self._ended:
            if not self._hear(max(0, end_s - time.monotonic())):
                return None
        return self._ended[pid]

    def _hear(self, timeout: float) -> bool:
        """Read messages of the forking process; return whether any came in time."""
        if not select.select([self._connection], [], [], timeout)[0]:
            return False
        piece = self._connection.recv(1 << 16)
        *lines, self._said = (self._said + piece).split(b"\n")
        for line in map(json.loads, lines):
            if "pid" in line:
                self._pids.append(line["pid"])
                self._ended.pop(line["pid"], None)  # of an earlier process: pids are reused
            else:
                self._ended[line["ended"]] = line["status"]
        return bool(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill running processes, and wait until they are gone."""
        self._connection.shutdown(socket.SHUT_WR)
        while self._hear(PATIENCE_S):  # until it has nothing more to say
            pass
        self._connection.close()
        if self._origin is not None:
            self._origin.close()


def all_end(processes: Sequence[ForkedProcess], timeout: float = 240) -> list[int]:
    """Return the exit codes of ranks; as soon as one fails, the others are killed, as launchers do."""
    end_s = time.monotonic() + timeout
    running = list(processes)
    while running:
        running[0]._origin.poll(running[0].pid, 0.1)
        codes = {one.pid: one.poll() for one in running}
        if any(codes.values()) or time.monotonic() > end_s:
            for one in running:
                one.kill()
        running = [one for one in running if codes[one.pid] is None]
    return [one.wait(0) for one in processes]


def killed_until_it_is_done(forked: Forked, program: str, *arguments: str, output: Path) -> int:
    """Kill a program repeatedly, each time a little later, until it ends by itself; return how often."""
    kills, wait_s = 0, 0.01
    while (code := (process := forked.start(program, *arguments, output=output)).poll_for(wait_s)) is None:
        process.kill()
        process.wait()
        kills, wait_s = kills + 1, wait_s * 1.5
    assert code == 0, output.read_text()[-4000:]
    return kills


# --- the process that forks ---


def become(job: dict[str, Any]) -> NoReturn:
    """Run the program."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(os.open(job["errors"], os.O_WRONLY | os.O_APPEND) if "errors" in job else output, 2)
        if "stands_for" in job:
            os.environ.clear()
            os.chdir(f"/proc/{job['stands_for']}/cwd")
            sys.path.insert(0, os.path.dirname(job["path"]))
        os.environ |= job["environ"]
        if job["leads"]:
            os.setsid()
        if job["network"]:
            enter(job["network"])
        tempfile.tempdir = None  # determined anew, in this environment
        sys.argv = [job.get("path", "-c"), *job["arguments"]]
        # The program's objects stay alive: some of torch's, when freed late, wait for others forever.
        if "path" in job:
            alive = runpy.run_path(job["path"], run_name="__main__")
        else:
            sys.modules["__main__"] = main_module = ModuleType("__main__")
            alive = vars(main_module)
            exec(compile(job["code"], "<program>", "exec"), alive)
        status = int(not alive)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def enter(network: str) -> None:
    """Enter this network namespace."""
    opened = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(opened, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to {network}")
    os.close(opened)


def check_that_nothing_runs_beside() -> None:
    """Refuse to fork a process with threads, which a fork would lose."""
    tasks = {int(task) for task in os.listdir("/proc/self/task")} - {os.getpid()}
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks]
    others = [name for name in names if name != "jemalloc_bg_thd"]  # which jemalloc starts anew
    assert others == [], "imports have started threads"


@dataclass(slots=True, eq=False)
class Client:
    """A process that has connected.

    Attributes:
        text: The beginning of a line that it has written.
        running: Processes that were forked for it.
        ends: It has no more to say, and is told when all of these have ended.
    """

    connection: socket.socket
    text: bytes = b""
    running: set[int] = field(default_factory=set)
    ends: bool = False

    def say(self, **said: int) -> None:
        with suppress(OSError):  # it may be gone
            self.connection.sendall(json.dumps(said).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]]:
        """Jobs that it has written; where it has nothing more to say, what runs for it is killed."""
        try:
            piece = self.connection.recv(1 << 16)
        except ConnectionResetError:
            piece = b""
        if not piece:
            self.end()
        *lines, self.text = (self.text + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Kill what runs for it."""
        self.ends = True
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)

    def serve(self) -> dict[str, Any] | None:
        """Fork what it asks for; in a process that was forked, return its job."""
        for job in self.hear():
            pid = os.fork()
            if not pid:
                return job
            self.running.add(pid)
            self.say(pid=pid)
        return None

    def goes_on(self) -> bool:
        """Say which of its processes have ended; False where it has ended, too, and all of these."""
        for pid in list(self.running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.running.remove(pid)
                self.say(ended=pid, status=os.waitstatus_to_exitcode(status))
        if self.ends and not self.running:
            self.connection.close()
            return False
        return True


def prepare(imports: list[str]) -> int:
    """Import, and have ended children wake who waits for the file that this returns."""
    gc.disable()  # imports leave little, and to look for it takes a sixth of their time
    for name in imports:
        import_module(name)
    gc.collect()
    gc.freeze()  # what is forked leaves these pages alone
    gc.enable()
    check_that_nothing_runs_beside()
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return woken


def main(listener: socket.socket, imports: list[str], ends: list[int]) -> None:
    """Fork for everyone who connects, until a file of ``ends`` can be read."""
    woken = prepare(imports)
    clients: dict[socket.socket, Client] = {}
    while True:
        said = [connection for connection, one in clients.items() if not one.ends]
        ready, _, _ = select.select([*ends, woken, listener, *said], [], [])
        if ends and ends[0] in ready:
            break
        if woken in ready:
            os.read(woken, 1 << 12)
        if listener in ready:
            connection = listener.accept()[0]
            clients[connection] = Client(connection)
        for connection, one in clients.items():
            if connection in ready and (job := one.serve()) is not None:
                for inherited in (listener, *clients):
                    inherited.close()
                become(job)
        clients = {connection: one for connection, one in clients.items() if one.goes_on()}
    for one in clients.values():
        one.end()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        with socket.socket(fileno=int(sys.argv[1])) as taken:
            main(taken, sys.argv[2:], [0])
    else:  # forked itself, and killed in the end
        sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
        with listen(sys.argv[1]) as taken:
            main(taken, sys.argv[2:], [])
