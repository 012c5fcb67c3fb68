"""Ranks in processes of their own, all of which are killed, at a moment counted in requests or in batches."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from tests.support.code.folders import PROGRAMS, ROOT
from tests.support.programs.torture_rank import Part, Step

_WAIT_S = 240.0
What = Literal["requests", "batches"]


@dataclass(slots=True, kw_only=True)
class _Rank:
    """The state of one process."""

    part: Part
    connection: socket.socket
    pidfd: int
    steps: list[Step] = field(default_factory=list)
    error: str = ""

    def begin(self) -> None:
        self.connection.sendall(b"go\n")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def hear(self, news: queue.SimpleQueue[str], on_batch: Callable[[], None]) -> None:
        """Note its steps until it is dead."""
        with suppress(ConnectionResetError), self.connection.makefile() as lines:
            for line in lines:
                if not line.endswith("\n"):  # killed while it wrote
                    break
                self._note(json.loads(line))
                on_batch()
                if len(self.steps) == self.part.num_batches:
                    news.put("finished")
        news.put("dead")

    def _note(self, said: dict[str, Any]) -> None:
        if "error" in said:
            self.error = said["error"]
            self.kill()
        else:
            self.steps.append(Step(**said))

    def close(self) -> None:
        self.connection.close()
        os.close(self.pidfd)


class MortalRanks:
    """Runs legs whose ranks all end by SIGKILL. On leaving, no process that they started may be left.

    Args:
        temporary: Their folder for temporary files.
    """

    def __init__(self, temporary: Path) -> None:
        self._lock = threading.Lock()
        self._counted: What = "requests"
        self._num_left = 0
        self._first: list[_Rank] = []
        self.num_in_mid_leg = 0
        """Legs whose ranks died before all had received their batches."""
        environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(PROGRAMS)])
        self._origin = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "torture_rank.py")],
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._origin.stdin is not None
        self._origin.stdin.close()
        try:
            assert self._origin.wait(60) == 0, "a process of a killed rank lives on"
        finally:
            self._origin.kill()
            self._origin.wait()

    def on_request(self) -> None:
        """To be called for every request."""
        self._count("requests")

    def _count(self, what: What) -> None:
        """Kill the ranks whose moment has come."""
        with self._lock:
            self._num_left -= what == self._counted
            if what == self._counted and self._num_left == 0:
                for rank in self._first:
                    rank.kill()

    def leg(self, parts: Sequence[Part], number: int, what: What, dice: random.Random) -> list[list[Step]]:
        """The steps that each rank took before it was killed.

        Some die at a chosen request, or batch, of all, and the others after them, as under a launcher. If there are
        fewer, all die when all have received their batches.
        """
        ranks = self._start(parts)
        news: queue.SimpleQueue[str] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=rank.hear, args=(news, lambda: self._count("batches")), daemon=True)
            for rank in ranks
        ]
        with self._lock:
            self._counted, self._num_left = what, number
            self._first = dice.sample(ranks, dice.randint(1, len(ranks)))
        for rank, thread in zip(ranks, threads, strict=True):
            rank.begin()
            thread.start()
        self.num_in_mid_leg += any(news.get(timeout=_WAIT_S) == "dead" for _ in ranks)
        with self._lock:
            self._num_left = 0
        for rank, thread in zip(ranks, threads, strict=True):
            rank.kill()
            thread.join(_WAIT_S)
            rank.close()
            assert not rank.error, rank.error
        return [rank.steps for rank in ranks]

    def _start(self, parts: Sequence[Part]) -> list[_Rank]:
        """Processes that wait for the signal to begin, in the order of ``parts``."""
        found: dict[int, _Rank] = {}
        with socket.create_server(("127.0.0.1", 0), backlog=len(parts)) as listener:
            listener.settimeout(_WAIT_S)
            assert self._origin.stdin is not None
            leg = {"port": listener.getsockname()[1], "parts": [asdict(part) for part in parts]}
            print(json.dumps(leg), file=self._origin.stdin, flush=True)
            for _ in parts:
                connection, _ = listener.accept()
                with connection.makefile() as lines:
                    said = json.loads(lines.readline())
                found[said["dp_rank"]] = _Rank(
                    part=parts[said["dp_rank"]], connection=connection, pidfd=os.pidfd_open(said["pid"])
                )
        return [found[dp_rank] for dp_rank in range(len(parts))]
