"""A proxy between a client and a loopback server that breaks chosen answers in chosen ways.

It passes ``Host`` on, so signatures made for the proxy's address still verify. Faults are used up in the order given,
one per matching request; if none is left or fits, ``choose`` may pick one. Other requests pass untouched. Threads
are daemons and end with the context.

Run ``python fault_proxy.py PORT --share 0.05 --kinds status reset``: it prints its port when it listens, breaks that
share of the answers, and ends when its standard input does. ``GET /_broken`` tells how many it broke.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, get_args

Kind = Literal[
    "status",  # answer with ``status`` and an S3 error body, without asking the server
    "reset_before",  # reset the connection in place of an answer
    "reset",  # reset after ``at_bytes`` of the body
    "truncate",  # close in good order after ``at_bytes`` of the body
    "stall",  # send ``at_bytes`` of the body, then nothing, for as long as the client stays
    "silent",  # answer nothing at all, for as long as the client stays
    "slow",  # wait ``seconds`` before the first byte
    "flip",  # invert the byte at ``at_bytes`` of the body
    "ignore_range",  # answer with the whole object (zeros) and status 200
    "shift_range",  # say that the bytes are of another range than was asked for
    "wrong_length",  # declare and send ``at_bytes`` only, as if that were all
    "list_less",  # a listing of before the last shard was there
    "list_more",  # a listing of when there was one more shard
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: Kind
    at_bytes: int = 0
    seconds: float = 0.0
    status: int = 503
    method: str = "GET"
    path: str = ""  # part of the path that the request must have


class Drawn:
    """Break a share of the answers to GET, each kind of fault as often as the others; counts what it did."""

    def __init__(self, share: float, kinds: tuple[Kind, ...], seed: int) -> None:
        self._share, self._kinds, self._random = share, kinds, random.Random(seed)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter(all=0)

    def __call__(self, method: str, path: str, span: str | None) -> Fault | None:
        with self._lock:
            self.counts["all"] += 1
            if method != "GET" or self._random.random() >= self._share:
                return None
            kind = self._random.choice(self._kinds)
            self.counts[kind] += 1
            return Fault(kind=kind, at_bytes=self._random.randrange(1000), seconds=self._random.random() / 10)


class FaultProxy:
    """Listens on a free port while the context lasts; ``log`` has (method, path, range) of each request."""

    def __init__(
        self, port: int, *faults: Fault, choose: Callable[[str, str, str | None], Fault | None] | None = None
    ) -> None:
        self._upstream = port
        self._choose = choose
        self._lock = threading.Lock()
        self._faults = deque(faults)
        self._open: set[socket.socket] = set()
        self._stopping = threading.Event()
        self.log: list[tuple[str, str, str | None]] = []

    def add(self, *faults: Fault) -> None:
        """Queue more faults."""
        with self._lock:
            self._faults.extend(faults)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            remaining = list(self._open)
        for connection in remaining:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        threads: list[threading.Thread] = []
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            with self._lock:
                self._open.add(connection)
            threads = [one for one in threads if one.is_alive()]
            threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(timeout=10)

    def _serve(self, client: socket.socket) -> None:
        """All requests of one client connection; each goes to the server on a connection of its own."""
        try:
            with client, client.makefile("rb") as requests:
                while self._exchange(client, requests):
                    pass
        except OSError:
            pass  # the client left, or the context ended
        finally:
            with self._lock:
                self._open.discard(client)

    def _exchange(self, client: socket.socket, requests) -> bool:
        head = _read_head(requests)
        if not head:
            return False
        method, path, _ = head[0].split(" ", 2)
        headers = _headers(head)
        body = requests.read(int(headers.get("content-length", 0)))
        if path == "/_broken" and isinstance(self._choose, Drawn):
            told = json.dumps(self._choose.counts).encode()
            client.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(told)}\r\n\r\n".encode() + told)
            return True
        fault = self._next(method, path, headers.get("range"))
        kind = fault.kind if fault else None
        if kind == "status":
            assert fault is not None
            xml = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
            client.sendall(f"HTTP/1.1 {fault.status} X\r\nContent-Length: {len(xml)}\r\n\r\n".encode() + xml)
            return True
        if kind == "reset_before":
            return _reset(client)
        if kind == "silent":
            client.recv(1)  # returns when the client gives up
            return False
        if kind == "slow":
            assert fault is not None
            self._stopping.wait(fault.seconds)
        with socket.create_connection(("127.0.0.1", self._upstream), timeout=60) as server:
            server.sendall("\r\n".join([*head, "", ""]).encode("latin-1") + body)
            with server.makefile("rb") as answers:
                return self._relay(client, answers, method, fault)

    def _next(self, method: str, path: str, span: str | None) -> Fault | None:
        with self._lock:
            if not isinstance(self._choose, Drawn):  # which runs for long, and counts
                self.log.append((method, path, span))
            if self._faults and self._faults[0].method == method and self._faults[0].path in path:
                return self._faults.popleft()
        return self._choose(method, path, span) if self._choose is not None else None

    def _relay(  # noqa: C901 (one branch for each fault)
        self, client: socket.socket, answers, method: str, fault: Fault | None
    ) -> bool:
        head = _read_head(answers)
        headers = _headers(head)
        length = int(headers["content-length"]) if "content-length" in headers else None
        left = 0 if method == "HEAD" or head[0].split(" ")[1] in {"204", "304"} else length
        kind, at_bytes = (fault.kind, fault.at_bytes) if fault else (None, 0)
        if kind == "wrong_length":
            left = at_bytes
            head = [
                f"Content-Length: {at_bytes}" if line.lower().startswith("content-length:") else line for line in head
            ]
        if kind in {"list_less", "list_more"}:
            body = _stale(answers.read(length), less=kind == "list_less")
            client.sendall(f"{head[0]}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            return True
        if kind in {"ignore_range", "shift_range"}:
            first, last, total = _content_range(headers["content-range"])
        if kind == "shift_range":
            head = [line for line in head if not line.lower().startswith("content-range:")]
            head.append(f"Content-Range: bytes {first + 1}-{last + 1}/{total}")
        if kind == "ignore_range":  # Range is often signed: the whole is made here, of zeros
            client.sendall(f"HTTP/1.1 200 OK\r\nETag: {headers['etag']}\r\nContent-Length: {total}\r\n\r\n".encode())
            client.sendall(bytes(total))
            return True
        client.sendall("\r\n".join([*head, "", ""]).encode("latin-1"))
        sent = 0
        while left is None or sent < left:
            limit = 1 << 16 if left is None else min(1 << 16, left - sent)
            if kind in {"reset", "truncate", "stall"}:
                limit = min(limit, at_bytes - sent)
                if limit <= 0:
                    break
            piece = bytearray(answers.read1(limit))
            if not piece:
                break
            if kind == "flip" and sent <= at_bytes < sent + len(piece):
                piece[at_bytes - sent] ^= 0xFF
            client.sendall(piece)
            sent += len(piece)
        if kind == "reset":
            return _reset(client)
        if kind == "stall":
            client.recv(1)  # returns when the client gives up
            return False
        return kind != "truncate" and left is not None and headers.get("connection", "").lower() != "close"


def _read_head(stream) -> list[str]:
    """First line and headers; empty at the end of the stream."""
    lines = []
    while line := stream.readline(1 << 16).decode("latin-1").rstrip("\r\n"):
        lines.append(line)
    return lines


def _headers(head: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in head[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _content_range(value: str) -> tuple[int, int, int]:
    """First byte, last byte and size of the whole."""
    span, total = value.removeprefix("bytes ").split("/")
    first, last = span.split("-")
    return int(first), int(last), int(total)


def _stale(listing: bytes, *, less: bool) -> bytes:
    """A listing without its last shard, or with one more, ``gone.tar``, of the same size."""
    start = listing.rindex(b"<Contents>", 0, listing.rindex(b".tar</Key>"))
    end = listing.index(b"</Contents>", start) + len(b"</Contents>")
    last = listing[start:end]
    folder = last[last.index(b"<Key>") : last.rindex(b"/", 0, last.index(b"</Key>")) + 1]
    gone = folder + b"gone.tar" + last[last.index(b"</Key>") :]
    return listing[:start] + (b"" if less else last + b"<Contents>" + gone) + listing[end:]


def _reset(client: socket.socket) -> bool:
    """Make the following close a reset (RST) instead of an orderly end (FIN)."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with FaultProxy(args.port, choose=Drawn(args.share, tuple(args.kinds), args.seed)) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
