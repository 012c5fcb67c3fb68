"""Send messages between processes over a Unix socket: pickles of our own making, with file descriptors."""

from __future__ import annotations

import pickle
import socket
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from streaming.errors import ShardstreamError

_HEADER = struct.Struct("<Q")
_MAX_FDS = 253
"""Maximum number of descriptors in one message on Linux."""


class ChannelClosedError(ShardstreamError, EOFError):
    """The other end is gone, or this end was shut."""


class Channel:
    """One end of a connected stream socket. For one thread at a time, except ``shut``.

    Both ends run the same program for the same user. Messages are trusted like a function call.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # the script may have set another default
        self._socket = sock

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a picklable message. The receiver gets duplicates of ``fds``.

        Raises:
            ChannelClosedError: Nobody will read it.
        """
        payload = pickle.dumps(message, protocol=5)
        parts = [_HEADER.pack(len(payload)), payload]
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            sent = self._socket.sendmsg(parts, beside)
            if sent < _HEADER.size + len(payload):
                self._socket.sendall(b"".join(parts)[sent:])
        except OSError as error:
            raise ChannelClosedError(f"cannot send: {error}") from error

    def receive(self) -> tuple[Any, list[int]]:
        """Block until the next message and return it with its descriptors. The caller closes them.

        Raises:
            ChannelClosedError: No message will come any more.
        """
        header, fds = self._receive_header()
        payload = bytearray(_HEADER.unpack(header)[0])
        self._fill(memoryview(payload))
        return pickle.loads(payload), fds  # noqa: S301  from our own process, see the class

    def shut(self) -> None:
        """End both directions: blocked calls of ``receive``, at either end, raise ChannelClosedError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end is already gone
            return

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _receive_header(self) -> tuple[bytes, list[int]]:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ChannelClosedError(f"cannot receive: {error}") from error
        if not data:
            raise ChannelClosedError("the other end is closed")
        header = bytearray(_HEADER.size)
        header[: len(data)] = data
        if len(data) < _HEADER.size:
            self._fill(memoryview(header)[len(data) :])
        return bytes(header), fds

    def _fill(self, room: memoryview) -> None:
        while room:
            try:
                count = self._socket.recv_into(room)
            except OSError as error:
                raise ChannelClosedError(f"cannot receive: {error}") from error
            if not count:
                raise ChannelClosedError("the other end closed in the middle of a message")
            room = room[count:]
