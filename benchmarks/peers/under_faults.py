"""What each peer does when something breaks: a table for docs/reliability.md.

    python benchmarks/peers/under_faults.py --root DATA/quick --venvs VENVS [--peers mosaic,litdata]

DATA/quick and VENVS are made by ``run.py --quick --prepare``. Every case is a process in the peer's environment that
reads a fresh copy of the 320 images once, with two workers where one of them is to die. After its first batch it waits
until the fault is in place. Of what it delivers, ``foreign`` samples are none of the source's, byte for byte;
``doubled`` ones came before. What takes longer than ``--seconds`` hangs. Names in
/dev/shm are counted by before and after: let nothing else run that makes some.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack

from contestant import Job, Store
from plain_tar import samples
from processes import descendants
from sets import SETS

HERE = os.path.dirname(os.path.abspath(__file__))
SET = SETS["images-raw"]
ENDINGS = {"mosaic": ".mds", "litdata": ".bin"}
FAULTS = ("none", "truncated shard", "flipped byte", "missing shards", "killed worker", "killed job", "one 503 in five")
SMALL = 2 << 20
"""Shards of the peers with a format of their own, so that there are as many as of ours."""


def child(args: argparse.Namespace) -> None:
    """In the peer's environment: make its copy of the data, or deliver one pass; the last line printed is a verdict."""
    peer = importlib.import_module(f"peer_{args.child}")
    store = Store(**json.loads(args.store)) if args.store else None
    source, data = os.path.join(args.root, "source"), os.path.join(args.root, "data")
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as scratch:
        job = Job(set=SET, root=args.root, source=source, data=data, workers=args.workers, scratch=scratch, store=store)
        if args.make:
            if args.child == "mosaic":
                peer.MDSWriter = functools.partial(peer.MDSWriter, size_limit=SMALL)
            if args.child == "litdata":
                whole = peer.litdata.optimize
                peer.litdata.optimize = lambda *given, **named: whole(*given, **{**named, "chunk_bytes": SMALL})
            peer.make(job)
            return
        known = {hashlib.sha256(sample[SET.field]).digest() for sample in samples(args.original)}
        seen: list[bytes] = []
        for payload in peer.batches(job):
            seen += [hashlib.sha256(item).digest() for item in payload]
            if len(seen) == len(payload):
                print("first", flush=True)
                sys.stdin.readline()
        print(json.dumps({"count": len(seen), "foreign": sum(one not in known for one in seen),
                          "doubled": len(seen) - len(set(seen))}), flush=True)  # fmt: skip


def is_tracker(pid: int) -> bool:
    """Whether this is multiprocessing's own helper."""
    with open(f"/proc/{pid}/cmdline") as file:
        return "resource_tracker" in file.read()


class Case:
    """One peer and one fault."""

    def __init__(self, peer: str, fault: str, args: argparse.Namespace, folder: str) -> None:
        self.peer, self.fault, self.args, self.folder = peer, fault, args, folder
        python = os.path.join(args.venvs, peer, "bin", "python")
        self._python = python if os.path.exists(python) else sys.executable
        self._own = os.path.exists(os.path.join(args.root, peer))

    def run(self) -> str:
        """In words, what came of it."""
        shutil.copytree(os.path.join(self.args.root, "source", "images"), os.path.join(self.folder, "source"))
        if self._own:
            os.mkdir(os.path.join(self.folder, "data"))
            made = self._start("--make")
            if made.communicate(timeout=300)[0] is None or made.returncode:
                return "does not make its data"
        self._files = self._shards()
        if self.fault in {"truncated shard", "flipped byte"}:
            self._damage(self._files[len(self._files) // 2])
        before = set(os.listdir("/dev/shm"))
        with ExitStack() as stack:
            more: list[str] = []
            if self.fault == "one 503 in five":
                if self.peer == "webdataset":
                    return "not run: reads S3 through a shell command only"
                more = ["--store", json.dumps(self._store(stack))]
            workers = 2 if self.fault in {"killed worker", "killed job"} else 0
            said = self._watch(self._start("--workers", str(workers), *more))
            if self.fault == "killed job":
                left = set(os.listdir("/dev/shm")) - before
                said = f"{len(left)} names left in /dev/shm; the next run: {self._again(workers)}"
        return said

    def _again(self, workers: int) -> str:
        self.fault = "none"
        return self._watch(self._start("--workers", str(workers)))

    def _start(self, *more: str) -> subprocess.Popen[str]:
        original = os.path.join(self.args.root, "source", "images")
        command = [self._python, os.path.abspath(__file__), "--child", self.peer, "--root", self.folder,
                   "--original", original, *more]  # fmt: skip
        paths = [HERE, *([os.path.dirname(os.path.dirname(HERE))] if self._python == sys.executable else [])]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths)}
        with open(os.path.join(self.folder, "stderr"), "w") as complaints:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
                                    text=True, start_new_session=True, env=environment)  # fmt: skip

    def _watch(self, process: subprocess.Popen[str]) -> str:
        hung = threading.Event()

        def end() -> None:
            hung.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(self.args.seconds, end)
        timer.start()
        assert process.stdout is not None
        assert process.stdin is not None
        lines = []
        for line in process.stdout:
            if line == "first\n":
                self._strike(process.pid)
                if self.fault != "killed job":
                    process.stdin.write("\n")
                    process.stdin.flush()
            elif line.startswith('{"count"'):
                lines.append(line)
        process.stdout.close()
        code = process.wait()
        timer.cancel()
        timer.join()
        process.stdin.close()
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        if hung.is_set():
            return f"hangs ({self.args.seconds:.0f} s)"
        if lines and not code:
            found = json.loads(lines[-1])
            wrong = [f"; {found[name]} {name}" for name in ("foreign", "doubled") if found[name]]
            if self.fault == "killed worker" and not self._workers:
                return "has no worker at this moment: these batches need none"
            return f"{found['count']} of 320 samples, no error{''.join(wrong)}"
        with open(os.path.join(self.folder, "stderr")) as file:
            last = [line.strip() for line in file if line.strip() and not line.startswith((" ", "["))]
        return f"ends with {code}: {(last or ['nothing said'])[-1][:200]}"

    def _strike(self, pid: int) -> None:
        if self.fault == "missing shards":
            for path in self._files[1::2]:
                os.unlink(path)
        elif self.fault == "killed worker":
            self._workers = [one for one in descendants(pid) if not is_tracker(one)]
            if self._workers:
                os.kill(max(self._workers), signal.SIGKILL)
        elif self.fault == "killed job":
            os.killpg(pid, signal.SIGKILL)

    def _shards(self) -> list[str]:
        folder = os.path.join(self.folder, "data" if self._own else "source")
        ending = ENDINGS.get(self.peer, ".tar")
        found = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]
        return sorted(path for path in found if path.endswith(ending))

    def _damage(self, path: str) -> None:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            data = bytearray(file.read())
        if self.fault == "truncated shard":
            del data[size // 2 :]
        else:
            data[data.index(b"\xff\xd8\xff\xfe", size // 2) + 5_000] ^= 0xFF  # in the middle of a JPEG
        os.unlink(path)  # it may be a hard link
        with open(path, "wb") as file:
            file.write(data)

    def _store(self, stack: ExitStack) -> dict[str, str]:
        """A server with the data, behind a proxy that refuses one request in five."""
        sys.path.insert(1, os.path.dirname(os.path.dirname(HERE)))
        from s3_server import as_store  # noqa: PLC0415

        from tests.support.servers.fault_proxy import Fault, FaultProxy  # noqa: PLC0415  not in the peers' environments

        server = subprocess.Popen([sys.executable, os.path.join(HERE, "s3_server.py"), self.folder],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        stack.callback(server.wait)
        stack.callback(server.terminate)
        assert server.stdout is not None
        asked: list[None] = []

        def choose(method: str, *_: object) -> Fault | None:
            asked.append(None)
            return Fault(kind="status", status=503, method=method) if len(asked) % 5 == 3 else None

        proxy = stack.enter_context(FaultProxy(int(server.stdout.readline()), choose=choose))
        return as_store(proxy.port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--venvs", default="")
    parser.add_argument("--peers", default="shardstream,webdataset,mosaic,litdata,energon")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--child", default="")
    parser.add_argument("--original", default="")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--store", default="")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    for fault in args.faults.split(","):
        for peer in args.peers.split(","):
            with tempfile.TemporaryDirectory(prefix="under-faults-", ignore_cleanup_errors=True) as folder:
                print(f"| {fault} | {peer} | {Case(peer, fault, args, folder).run()} |", flush=True)


if __name__ == "__main__":
    main()
