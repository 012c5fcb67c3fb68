"""Stands in for an interpreter: has its script run by a process that is forked, and lives and ends as that does.

Launchers such as torchrun start interpreters, which import for seconds. Given ``Forked.python`` in place of the
interpreter, they start this file as ``stand_in.py SOCKET [-u] SCRIPT ARGUMENTS``. What they send to it, SIGTERM and
SIGINT, goes to the forked process; when it is killed, so is that process; it ends with that process's exit code, or by
the same signal. Environment, folder and output of both are the same, their pids are not. Not a test itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(path: str, words: list[str]) -> None:
    if words[0] == "-u":
        del words[0]
    assert not words[0].startswith("-"), f"an option that nobody has needed yet: {words}"
    me = os.getpid()
    job = {"path": os.path.abspath(words[0]), "arguments": words[1:], "environ": dict(os.environ), "stands_for": me}
    job |= {"output": f"/proc/{me}/fd/1", "errors": f"/proc/{me}/fd/2", "network": "", "leads": False}
    forwarded = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # until there is somebody to send them to
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(job).encode() + b"\n")
        said = connection.makefile()
        pid = json.loads(said.readline())["pid"]
        for number in forwarded:
            signal.signal(number, lambda received, _: os.kill(pid, received))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        status = json.loads(said.readline())["status"]
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(me, -status)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
