"""Run a command to its end and say what all its processes together used.

``measure.py --result FILE --timeout S CMD …`` prints one line of JSON: peak memory, wall seconds, whether it had to be
killed, processes left over, the end of its errors. As the subreaper of the tree it also ends what outlives the command.
Linux only; standard library only, so that it starts at once.

Memory is PSS (each page shared by n processes counts 1/n in each) summed over the processes. Reading it costs time, so
a sample is followed by a pause of 20 times what it took, at least 50 ms: peaks shorter than that may be missed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time

from processes import descendants

_PR_SET_CHILD_SUBREAPER = 36
_CLOSING_S = 20.0
"""How long a command may take to end once its result is there, and its orphans once it has ended."""


def memory(pids: list[int]) -> tuple[int, int]:
    """PSS of the processes together, in bytes: all, and without mapped files (which are page cache)."""
    total = files = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name == "Pss":
                    total += int(rest.split()[0]) << 10
                elif name == "Pss_File":
                    files += int(rest.split()[0]) << 10
    return total, total - files


def reap() -> None:
    """Take the exit of every orphan that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start_s = time.monotonic()
    peak = peak_without_files = processes = 0
    killed, result_at_s = "", 0.0
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(args.command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        while child.poll() is None:
            before_s = time.monotonic()
            running = descendants(os.getpid())
            processes = max(processes, len(running))
            total, without_files = memory(running)
            peak, peak_without_files = max(peak, total), max(peak_without_files, without_files)
            now_s = time.monotonic()
            if not result_at_s and os.path.exists(args.result):
                result_at_s = now_s
            if result_at_s and now_s > result_at_s + _CLOSING_S:
                killed = f"did not end within {_CLOSING_S:.0f} s of its last batch"
            elif not result_at_s and now_s > start_s + args.timeout:
                killed = f"no result within {args.timeout:.0f} s"
            if killed:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.05, 20 * (now_s - before_s)))
        wall_s = time.monotonic() - start_s
        ended_s = time.monotonic()
        if not killed:
            while descendants(os.getpid()) and time.monotonic() < ended_s + 2:
                reap()
                time.sleep(0.02)
        left = descendants(os.getpid())
        while alive := descendants(os.getpid()):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.05)
            reap()
        reap()
        child.poll()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4000))
        tail = errors.read().decode(errors="replace")
    print(
        json.dumps(
            {
                "returncode": child.returncode, "killed": killed, "left_over": len(left), "wall_s": wall_s,
                "peak_bytes": peak, "processes": processes,
                "peak_without_files_bytes": peak_without_files, "errors": tail,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
