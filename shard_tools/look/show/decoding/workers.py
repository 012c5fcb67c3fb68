"""Run a few processes that decode, or apply a tokenizer, and kill those that take too much time or memory."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from shard_tools.look.show.decoding.process import HEADER
from shard_tools.make.tokens.adapters import Ids
from shard_tools.make.tokens.tokenizer import TokenizerFile
from streaming.common.arguments import format_bytes
from streaming.common.lru_cache import LruCache
from streaming.common.platforms import num_cores
from streaming.errors import DecodeError

SECONDS: Final = 10.0
"""Time limit per value: the largest image that is decoded at all takes two seconds."""
MOST_BYTES: Final = 64 << 20
"""Size limit of a value to decode."""
MOST_MEDIA_BYTES: Final = 16 << 20
"""Size limit of a sound or a video to draw, which is read whole for it; a player reads only what it plays."""
_OPEN_SECONDS = 30.0  # to open a tokenizer; the largest in use take three
_MOST_WORKERS = 4
_MOST_PICTURE_BYTES = 32 << 20
_MOST_FACTS_BYTES = 4 << 20  # 2,048 tokens of 200 characters, each escaped to at most 6 letters
_KEPT_BYTES = 64 << 20
_BYTES_OF_FACTS = 10  # most memory that a byte of JSON takes as Python objects
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")
"""Variables that a process receives. It gets no others, such as keys of stores: decoding needs none of them."""
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shard_tools.look.show.decoding.process import main; main()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A small picture of a value, b"" if there is none, and facts about it; and the most memory that both take."""

    picture: bytes
    facts: dict[str, Any]
    num_bytes: int

    @property
    def media_type(self) -> str:
        """Media type of the picture."""
        return "image/png" if self.picture[:4] == b"\x89PNG" else "image/jpeg"


class DecodingWorkers:
    """Decode values in separate processes, a few at a time. Thread-safe.

    Attributes:
        seconds: Time limit per value.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(min(num_cores(), _MOST_WORKERS)):
            self._idle.put(None)
        self._started: list[_Worker] = []
        self._lock = threading.Lock()  # guards _started, _is_closed
        self._is_closed = False
        self._known: LruCache[tuple[Any, ...], Decoded] = LruCache(_KEPT_BYTES, lambda one: one.num_bytes)

    def known(
        self, name: tuple[Any, ...], kind: str, pixels: int, num_bytes: int, read: Callable[[], Any],
        facts: Mapping[str, Any] | None = None,
    ) -> Decoded:  # fmt: skip
        """Return a decoded value, from the cache or by :meth:`decode` of the result of ``read``.

        Args:
            name: Names the value, and with it ``facts``.
            kind: See :meth:`decode`.
            pixels: See :meth:`decode`.
            num_bytes: Size of the value.
            read: Returns the value.
            facts: See :meth:`decode`.

        Raises:
            DecodeError: See :meth:`decode`.
        """
        if num_bytes > MOST_BYTES:
            raise DecodeError(f"not decoded: {format_bytes(num_bytes)}, more than {format_bytes(MOST_BYTES)}")
        return self._known.of((*name, kind, pixels), lambda: self.decode(kind, pixels, bytes(read()), facts))

    def decode(self, kind: str, pixels: int, data: bytes, facts: Mapping[str, Any] | None = None) -> Decoded:
        """Decode a value.

        Args:
            kind: How to decode it.
            pixels: Largest width and height of a picture.
            data: The value.
            facts: What else its kind must know, as JSON.

        Raises:
            DecodeError: It is damaged, or takes too much time or memory; then only the worker is lost.
        """
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
            answer = worker.ask({"kind": kind, "pixels": pixels, **(facts or {})}, data, self.seconds)
        except _LostError as error:
            if worker is not None:
                worker.kill()
            worker = None
            raise DecodeError(f"not decoded: {error}") from error
        finally:
            self._idle.put(worker)
        if "error" in answer.facts:
            raise DecodeError(f"not decoded: {answer.facts['error']}")
        return answer

    def _start(self) -> _Worker:
        worker = _Worker()
        with self._lock:
            # Every started process is listed, so that closing ends it.
            self._started = [one for one in self._started if one.runs]
            self._started.append(worker)
            is_closed = self._is_closed
        if is_closed:
            worker.kill()
        return worker

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            # None is left; a process that starts from here on is ended by the thread that started it.
            self._is_closed = True
            started, self._started = self._started, []
        for worker in started:
            worker.kill()


class TokenTexts:
    """Turn tokens into text by an untrusted tokenizer, in a separate process. Thread-safe.

    Args:
        file: The tokenizer, with its content.
        seconds: Time limit for the tokens of one value.
    """

    def __init__(self, file: TokenizerFile, seconds: float = SECONDS) -> None:
        self._file, self._seconds = file, seconds
        self._worker: _Worker | None = None
        self._failed = ""
        self._lock = threading.Lock()  # guards _worker, _failed

    def pieces(self, ids: Ids) -> list[str]:
        """Return the text of each token; without tokens, only open the tokenizer.

        Raises:
            DecodeError: The tokenizer is damaged, or takes too much time or memory; it is not tried again.
        """
        with self._lock:
            # Either the process has opened the tokenizer, or there is none; after a failure there never is one again.
            if not self._failed:
                try:
                    worker = self._worker or self._opened()
                    answer = worker.ask({"kind": "tokens"}, ids.astype("<u4").tobytes(), self._seconds).facts
                    self._failed = answer.get("error", "")
                except _LostError as error:
                    self._failed = str(error)
            if self._failed:
                self._end()
                raise DecodeError(f"the tokenizer cannot be used: {self._failed}")
        found: list[str] = answer["pieces"]
        return found

    def _opened(self) -> _Worker:
        self._worker = worker = _Worker()
        tokenizer = asdict(self._file) | {"content": None}
        request = {"kind": "tokenizer", "tokenizer": tokenizer}
        answer = worker.ask(request, self._file.content or b"", _OPEN_SECONDS).facts
        if "error" in answer:
            raise _LostError(answer["error"])
        return worker

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            # From here on it is not started again.
            self._failed = self._failed or "the pages are closed"
            self._end()


class _LostError(Exception):
    """A worker that does not answer, and why."""


@dataclass(eq=False)
class _Worker:
    """A process that decodes values one by one."""

    _process: subprocess.Popen[bytes] = field(init=False)
    _in: int = field(init=False)
    _out: int = field(init=False)

    def __post_init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603  our own program
            [sys.executable, "-I", "-B", "-c", _CODE, json.dumps([one for one in sys.path if isinstance(one, str)])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )  # fmt: skip
        given, taken = self._process.stdin, self._process.stdout
        if given is None or taken is None:
            raise AssertionError("both are pipes")
        self._in, self._out = given.fileno(), taken.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    @property
    def runs(self) -> bool:
        """Whether the process is still alive."""
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], data: bytes, seconds: float) -> Decoded:
        """Return the process's answer.

        Raises:
            _LostError: It did not answer in this time.
        """
        until = time.monotonic() + seconds
        text = json.dumps(request).encode()
        self._send(memoryview(HEADER.pack(len(text), len(data)) + text + data), until)
        sizes = HEADER.unpack(self._take(HEADER.size, until))
        if sizes[0] > _MOST_FACTS_BYTES or sizes[1] > _MOST_PICTURE_BYTES:
            raise _LostError(f"an answer of {sum(sizes):,} bytes")
        facts, picture = json.loads(self._take(sizes[0], until)), self._take(sizes[1], until)
        return Decoded(picture=picture, facts=facts, num_bytes=len(picture) + _BYTES_OF_FACTS * sizes[0] + 2000)

    def _send(self, rest: memoryview, until: float) -> None:
        while rest:
            self._wait(self._in, select.POLLOUT, until)
            try:
                rest = rest[os.write(self._in, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _LostError("its process ended") from error

    def _take(self, num_bytes: int, until: float) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            self._wait(self._out, select.POLLIN, until)
            piece = os.read(self._out, min(num_bytes - len(found), 1 << 20))
            if not piece:
                raise _LostError("its process ended: it took more memory than it may, or its library failed")
            found += piece
        return bytes(found)

    @staticmethod
    def _wait(number: int, event: int, until: float) -> None:
        waiting = select.poll()
        waiting.register(number, event)
        left = until - time.monotonic()
        if left <= 0 or not waiting.poll(1000 * left):
            raise _LostError("it took too long")

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
