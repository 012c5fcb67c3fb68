"""Read answers of plain HTTP servers directly into the caller's memory: kept connections, one ranged GET at a time.

No client on PyPI reads into given memory. This one does nothing else, and only in the simple case: an answer 206 with a
length. Any other answer is an error by its status, or a :class:`LeftError`, which leaves the request to a complete
client.

A reader wakes up for a large part of an answer, not for every packet: the socket counts as readable once
``SO_RCVLOWAT`` bytes have arrived. Sockets do not block, so the caller's memory is used only while bytes are copied to
it.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from streaming.storage.adapters.object_errors import AnswerError, NoConnectionError
from streaming.storage.base.adapter import Sink, copy_piece
from streaming.storage.base.urls import hidden_in, secrets_of

_MOST_PIECE_BYTES = 1 << 20
_LEAST_PIECE_BYTES = 64 << 10
_PIECE_S = 0.01
"""Maximum wait for a piece; after it, the bytes received so far count as one, and the next piece is smaller."""
_LONGEST_S = 86_400.0
"""System calls do not accept time-outs of years."""
_HEAD_PIECE_BYTES = 4 << 10
_MOST_HEAD_BYTES = 64 << 10
_MOST_SAID_BYTES = 16 << 10
"""Maximum bytes of an error's explanation that are read."""
_MOST_KEPT = 64
_KEPT_S = 30.0
"""Most servers close idle connections after 5 to 75 s. A closed connection is detected before its next use."""
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/\d{1,18}")
_IS_ERROR = frozenset({404, 408, 412, 416, 425, 429}) | frozenset(range(500, 600))
"""Statuses that mean the same for every client. Others (redirects, refused signatures) are left to obstore."""


class LeftError(Exception):
    """This client cannot read the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A requested range, and its time limits.

    Attributes:
        url: An http URL for which :func:`can_ask` is true; its query may be a signature.
        start: First byte.
        stop: End (exclusive).
        headers: Further headers.
    """

    url: str = field(repr=False)
    start: int
    stop: int
    headers: dict[str, str] = field(repr=False)
    connect_timeout_s: float
    read_timeout_s: float
    deadline_s: float

    @property
    def head(self) -> bytes:
        """The bytes of the request."""
        parts = urlsplit(self.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"host": parts.netloc, "user-agent": "shardstream", **self.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"GET {target} HTTP/1.1\r\n{lines}range: bytes={self.start}-{self.stop - 1}\r\n\r\n".encode("latin-1")


def can_ask(url: str) -> bool:
    """Return whether this is an http URL that can be sent unchanged."""
    try:
        parts = urlsplit(url)
        is_named = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return False
    return is_named and url.isascii() and url.isprintable() and " " not in url and "#" not in url


class Connection:
    """One connection; used by one thread at a time.

    Attributes:
        idle_since_s: Time at which its last answer ended; 0: it has had no answer.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        try:
            self._socket = socket.create_connection((host, port), min(timeout_s, _LONGEST_S))
        except OSError as error:
            raise NoConnectionError(_why_not(error)) from error
        self._close = weakref.finalize(self, self._socket.close)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(0)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._least_bytes = 1
        self._read_timeout_s = self._until_s = 0.0
        self.idle_since_s = 0.0

    def close(self) -> None:
        """Close it; a repeated call does nothing."""
        self._close()

    @property
    def is_idle(self) -> bool:
        """Whether it is open, with nothing to read. Otherwise the server has closed it, or sent unrequested bytes."""
        return not self.has_come(1, 0)

    def send(self, request: Request) -> None:
        """Send a request on an idle connection, whose buffer has room for it; its time limits apply from now on."""
        self._read_timeout_s, self._until_s = request.read_timeout_s, time.monotonic() + request.deadline_s
        with _broken():
            self._socket.sendall(request.head)

    def has_come(self, least_bytes: int, timeout_s: float) -> bool:
        """Wait until ``least_bytes`` have arrived or the connection has ended; return whether this was in time."""
        if least_bytes != self._least_bytes:
            with suppress(OSError):  # if it is not supported, pieces are smaller
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least_bytes)
            self._least_bytes = least_bytes
        return bool(self._readable.poll(timeout_s * 1000))

    def wait(self) -> None:
        """Wait until a byte has arrived or the connection has ended.

        Raises:
            TimeoutError: Nothing came in time.
        """
        left_s = min(self._read_timeout_s, self._until_s - time.monotonic(), _LONGEST_S)
        if left_s <= 0 or not self.has_come(1, left_s):
            raise TimeoutError("no byte came for read_timeout_s")

    def receive(self, room: memoryview | bytearray) -> int | None:
        """Receive the bytes that have arrived, and return their number; 0: the connection has ended; None: no bytes."""
        with _broken():
            try:
                return self._socket.recv_into(room)
            except BlockingIOError:
                return None


@contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise ConnectionResetError("the connection was reset") from error


def _why_not(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name does not resolve"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return "no connection within connect_timeout_s" if isinstance(error, TimeoutError) else "no connection"


class Server:
    """The kept connections to one server. Thread-safe: a deque needs no lock."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._kept: deque[Connection] = deque()

    def take(self) -> Connection | None:
        """Return the most recently used open connection, if there is one."""
        with suppress(IndexError):
            while not (kept := self._kept.pop()).is_idle:
                kept.close()
            return kept
        return None

    def connect(self, timeout_s: float) -> Connection:
        """Return a new connection.

        Raises:
            NoConnectionError: The message gives the reason, without naming the server.
        """
        return Connection(self._host, self._port, timeout_s)

    def give(self, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end; close connections that were idle for long."""
        now_s = connection.idle_since_s = time.monotonic()
        self._kept.append(connection)
        with suppress(IndexError):
            while len(self._kept) > _MOST_KEPT or now_s - self._kept[0].idle_since_s > _KEPT_S:
                self._kept.popleft().close()


_servers: weakref.WeakValueDictionary[tuple[int, str, int], Server] = weakref.WeakValueDictionary()
"""Servers in use, by process and address: a connection belongs to no dataset, and carries no credentials."""


def server_of(url: str) -> Server:
    """Return the server of an http URL; concurrent users share one object."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    return _servers.setdefault((os.getpid(), host, port), Server(host, port))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The head of an answer, and the bytes received after it."""

    status: int
    headers: dict[str, str]
    begun: bytes

    @property
    def length(self) -> int:
        """Length of the body.

        Raises:
            LeftError: The answer does not state it.
        """
        text = self.headers.get("content-length", "")
        if not text.isdecimal() or len(text) > 18 or "transfer-encoding" in self.headers:
            raise LeftError
        return int(text)


def _parsed(head: bytes, begun: bytes) -> _Head:
    """Parse status line and headers.

    Raises:
        LeftError: They belong to another protocol, or are ambiguous.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise LeftError
        headers[name.lower()] = value.strip()
    if version != "HTTP/1.1" or not status[:3].isdecimal() or status[3:4] not in {"", " "}:
        raise LeftError
    return _Head(status=int(status[:3]), headers=headers, begun=begun)


def ask(server: Server, request: Request) -> RangeAnswer:
    """Send a request, and return its answer as soon as it begins.

    Raises:
        AnswerError: The server refuses, or does not answer with this range.
        LeftError: This client cannot read the answer.
        OSError: There is no connection, it broke, or no byte came within the limits.
    """
    connection, head = _begun(server, request)
    try:
        num_bytes = _announced(connection, head, request)
    except BaseException:
        connection.close()
        raise
    return RangeAnswer(server, connection, head, num_bytes)


def _announced(connection: Connection, head: _Head, request: Request) -> int:
    """Return the length of the range that an answer announces."""
    if head.status in _IS_ERROR:
        # An error page may repeat the requested URL.
        raise AnswerError(head.status, hidden_in(_said(connection, head), secrets_of(request.url)))
    if head.status not in {200, 206}:
        raise LeftError
    found = _RANGE.fullmatch(head.headers.get("content-range", "")) if head.status == 206 else None
    start, stop = (int(found[1]), int(found[2]) + 1) if found else (-1, -1)
    if start != request.start or not start < stop <= request.stop:
        raise AnswerError(head.status, "another range than requested")
    if head.length > stop - start:
        raise LeftError
    return stop - start


def _begun(server: Server, request: Request) -> tuple[Connection, _Head]:
    """Send a request on a connection, and read the head of the answer.

    The server may be just closing a kept connection. Then the next connection is used, as in every client (RFC 9112,
    9.3.1).
    """
    while True:
        kept = server.take()
        connection = kept or server.connect(request.connect_timeout_s)
        received = bytearray()
        try:
            connection.send(request)
            return connection, _head_of(connection, received)
        except BaseException as error:
            connection.close()
            if kept is None or received or not isinstance(error, ConnectionError):
                raise


def _head_of(connection: Connection, received: bytearray) -> _Head:
    room = bytearray(_HEAD_PIECE_BYTES)
    while (end := received.find(b"\r\n\r\n")) < 0:
        if len(received) > _MOST_HEAD_BYTES:
            raise LeftError
        connection.wait()
        count = connection.receive(room)
        if count == 0:
            raise ConnectionResetError("the connection was closed before an answer")
        received += room[: count or 0]
    return _parsed(bytes(received[:end]), bytes(received[end + 4 :]))


def _said(connection: Connection, head: _Head) -> str:
    """Return the beginning of an error's explanation, as far as it can be read."""
    said, room = bytearray(head.begun), bytearray(_HEAD_PIECE_BYTES)
    with suppress(OSError, LeftError):
        most = min(_MOST_SAID_BYTES, head.length)
        while len(said) < most:
            connection.wait()
            count = connection.receive(room)
            if count == 0:
                break
            said += room[: count or 0]
    return said.decode("utf-8", "replace")


class RangeAnswer:
    """The answer to a ranged GET; see :class:`~streaming.storage.base.adapter.RangeBody`."""

    def __init__(self, server: Server, connection: Connection, head: _Head, num_bytes: int) -> None:
        self._server = server
        self._connection = connection
        self._left = head.length
        self._begun = memoryview(head.begun)[: self._left]
        self._keeps = head.headers.get("connection", "").lower() != "close" and len(head.begun) <= self._left
        self._ended = False
        self.num_bytes = num_bytes
        tag = head.headers.get("etag")
        self.version: str | None = tag if tag and not tag.startswith("W/") else None

    def fill(self, sink: Sink) -> None:
        """Pass the bytes to ``sink``, received directly into its memory.

        Raises:
            OSError: The connection broke, or no byte came within the limits.
        """
        piece = _LEAST_PIECE_BYTES
        while self._left and not self._ended:
            if self._begun or self._connection.has_come(min(piece, self._left), _PIECE_S):
                piece = min(_MOST_PIECE_BYTES, piece * 2)
            else:
                piece = max(_LEAST_PIECE_BYTES, piece // 2)
                self._connection.wait()
            sink.take(self._put)

    def _put(self, room: memoryview) -> int:
        """Receive as many bytes as have arrived and fit."""
        with room[: self._left] as wanted:
            if self._begun:
                count = copy_piece(self._begun, wanted)
                self._begun = self._begun[count:]
            else:
                received = self._connection.receive(wanted)
                self._ended = received == 0
                count = received or 0
        self._left -= count
        return count

    def close(self) -> None:
        """Keep the connection if the whole answer has been read; otherwise close it."""
        if self._left == 0 and self._keeps:
            self._server.give(self._connection)
        else:
            self._connection.close()
