"""Read a byte range into the caller's memory: received bytes are kept, and a silent request gets a rival.

Which request may write (normative):

1. The request that delivered the last byte may write.
2. After a rival was started, the request that delivers the next byte may write. The others are then *lost*: they get no
   memory any more, and their threads end with their answers.
3. When the attempt ends, all its requests are lost, so nothing is written once the caller has the memory back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from streaming.common.monitor import Monitor
from streaming.errors import ConfigError, redact
from streaming.storage.base.adapter import Adapter, ChangedError, RangeBody, TransientError
from streaming.storage.base.calls import Call
from streaming.storage.requests.adaptive_timeout import Patience
from streaming.storage.requests.threads import RequestThreads

_LOOK_S = 0.1
"""Maximum delay until a transfer uses the silences of other answers."""
_SMALL_BYTES = 1 << 20
"""If an answer comes in one piece, its silence grows with its size above this; below, it is only latency."""
_MOST_AT_ONCE = 3
"""Maximum number of requests for the same bytes. Two are not enough: some rivals stall, too (``bench_faults.py``)."""


class Hedging(Protocol):
    """The part of a bucket's traffic that a transfer needs for second requests."""

    patience: Patience
    threads: RequestThreads

    def begin(self, until_s: float) -> bool:
        """Return whether a second request may be made now, for a call that ends at ``until_s``; if so, count it."""

    def end(self, *, won: bool) -> None:
        """Record that a second request is over for the caller."""


class _LostError(Exception):
    """Another request is ahead."""


@dataclass(slots=True, eq=False)
class _Request:
    """One request of an attempt, for the bytes from ``first`` on; its silences may be ``scale`` times as long."""

    transfer: Transfer
    first: int
    version: str | None
    scale: float
    rival: bool = False
    lost: bool = False
    ended: bool = False
    error: BaseException | None = None
    heard_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    longest_s: float = 0.0

    def take(self, put: Callable[[memoryview], int]) -> None:
        """See :class:`Sink`."""
        self.transfer.take(self, put)

    def hear(self) -> None:
        """Record a sign of life; the first one is the beginning of the answer."""
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s - self.heard_s
        else:
            self.longest_s = max(self.longest_s, now_s - self.heard_s)
        self.heard_s = now_s

    def patient_s(self, patience: Patience) -> float:
        """Return how long the request may still be silent."""
        kind = patience.first if self.first_s is None else patience.later
        return kind.limit_s * self.scale - (time.monotonic() - self.heard_s)

    def teach(self, patience: Patience) -> None:
        """Record the lengths of its silences; a lost request counts as silent until now."""
        last_s = time.monotonic() - self.heard_s if self.lost else 0.0
        if self.first_s is None:
            patience.first.note(last_s / self.scale)
        else:
            patience.first.note(self.first_s / self.scale)
            patience.later.note(max(self.longest_s, last_s) / self.scale)


class Transfer:
    """Transfer bytes [start, stop) of one object. Each attempt requests the missing bytes, of the same version.

    The lock ``_changed`` guards ``_requests``, ``_received``, ``_out``, ``version`` and the fields of requests.

    Args:
        adapter: Makes the requests.
        url: URL of the object.
        start: First byte.
        stop: End (exclusive); None: to the end of the object.
        count: Called with "bytes", and with "requests" for each request after the first of an attempt.
        out: Memory of that length; default: allocated when the length is known.
        version: The required version, if known.
    """

    def __init__(
        self,
        adapter: Adapter,
        url: str,
        start: int,
        stop: int | None,
        *,
        count: Callable[[str, int], None],
        out: memoryview | None = None,
        version: str | None = None,
    ) -> None:
        if start < 0 or (stop is not None and stop < start):
            raise ConfigError(f"reading {redact(url)}: [{start}, {stop}) is not a range; 0 <= start <= stop is needed")
        self.url = url
        self.start = start
        self.stop = stop
        self.version = version
        self._out = _memory(stop - start) if out is None and stop is not None else out
        self._adapter = adapter
        self._count = count
        self._received = 0
        self._changed = Monitor()
        self._requests: list[_Request] = []

    @property
    def is_done(self) -> bool:
        """Whether every byte has arrived."""
        return self._out is not None and self._received == len(self._out)

    def result(self) -> memoryview:
        """Return the memory of the bytes, which is complete once the transfer is done."""
        return memoryview(b"") if self._out is None else self._out

    def forget(self) -> None:
        """Release the caller's memory: a lost request may keep the transfer itself alive for a while."""
        self._out = None

    def attempt(self, call: Call, hedging: Hedging | None, until_s: float) -> None:
        """Request the missing bytes; ``call`` is kept up to date. No rival is started after ``until_s``.

        Raises:
            TransientError: Some bytes did not arrive. Received bytes are kept.
        """
        self._call = call
        self._requests = [self._next()]
        try:
            if hedging is None:
                self._serve(self._requests[0])
            else:
                self._race(hedging, until_s)
        finally:
            with self._changed:
                for request in self._requests:
                    request.lost = True
                self._requests = []  # lost requests never use it again; a cycle would wait for garbage collection

    def take(self, request: _Request, put: Callable[[memoryview], int]) -> None:
        """Provide memory for a request's bytes, if it is still ahead; the others become lost.

        Raises:
            _LostError: The request is no longer ahead.
        """
        with self._changed:
            # One request is ahead: only its bytes count, from the end of the last ones on, all of one version.
            if request.lost:
                raise _LostError
            for other in self._requests:
                other.lost = other is not request
            self.version = self.version or request.version
            count = put(self.result()[self._received :])
            self._received += count
            self._call.received = self._received
            request.hear()
        self._count("bytes", count)

    def _next(self, *, rival: bool = False) -> _Request:
        first = self.start + self._received
        missing = 0 if self._adapter.in_pieces or self.stop is None else self.stop - first
        return _Request(self, first, self.version, max(1.0, missing / _SMALL_BYTES), rival)

    def _serve(self, request: _Request) -> None:
        """Make one request and receive its answer, on the current thread."""
        body = self._adapter.open_range(self.url, request.first, self.stop, request.version)
        with closing(body):
            self._opened(request, body)
            body.fill(request)
        with self._changed:
            # A short answer of a lost request does not matter.
            if not request.lost and not self.is_done:
                got = self.start + self._received - request.first
                raise TransientError(self._short(request.first, got, "the answer ended early"))

    def _opened(self, request: _Request, body: RangeBody) -> None:
        with self._changed:
            if request.lost:
                raise _LostError
            request.hear()
            if request.version and body.version and request.version != body.version:  # a store without If-Match
                raise ChangedError(self._short(request.first, 0, "the object changed since it was first read"))
            request.version = request.version or body.version
            if self._out is None:  # the end is known only now
                self.stop = self._call.stop = self.start + body.num_bytes
                self._out = _memory(body.num_bytes)
            missing = self.start + len(self._out) - request.first
            if body.num_bytes < missing:  # the store's own statement: another request would not help
                raise ChangedError(self._short(request.first, body.num_bytes, "was the object truncated or replaced?"))

    # --- with rivals ---

    def _race(self, hedging: Hedging, until_s: float) -> None:
        """Begin the first request on one of the threads, and another whenever all are silent for too long.

        Raises:
            TransientError: All are still silent at ``until_s``. (obstore's time-outs come first; file systems may have
                none.)
        """
        hedging.threads.run(partial(self._work, self._requests[0]))
        with self._changed:
            # At most _MOST_AT_ONCE requests race; the race ends when one has all bytes, or all have failed.
            try:
                while not self._is_over():
                    left = [request for request in self._requests if not request.lost and not request.ended]
                    patient_s = max(request.patient_s(hedging.patience) for request in left)
                    if patient_s > 0:
                        self._changed.wait(min(patient_s, _LOOK_S))
                    elif time.monotonic() >= until_s:
                        raise TransientError(self._short(self.start, self._received, "the answer stands still"))
                    elif len(left) < _MOST_AT_ONCE and hedging.begin(until_s):
                        self._requests.append(self._next(rival=True))
                        self._count("requests", 1)
                        hedging.threads.run(partial(self._work, self._requests[-1]))
                    else:
                        self._changed.wait(_LOOK_S)
            finally:
                self._account(hedging)

    def _work(self, request: _Request) -> Callable[[], None]:
        """Perform a request on a thread, and return the function that announces its end."""
        error: BaseException | None = None
        try:
            self._serve(request)
        except _LostError:
            pass
        except BaseException as caught:  # noqa: BLE001 (thread boundary: raised in the caller's)
            error = caught
        return partial(self._ended, request, error)

    def _ended(self, request: _Request, error: BaseException | None) -> None:
        with self._changed:
            # The request has ended, and its error is set, before the waiting caller wakes up.
            request.ended, request.error = True, error
            self._changed.notify_all()

    def _is_over(self) -> bool:
        """Return whether every byte has arrived.

        Raises:
            StorageError: Some bytes have not arrived, and no request is left.
        """
        left = [request for request in self._requests if not request.lost]
        if not all(request.ended for request in left):
            return False
        errors = [request.error for request in left if request.error is not None]
        if self.is_done or not errors:
            return True
        raise next((error for error in errors if not isinstance(error, TransientError)), errors[-1])

    def _account(self, hedging: Hedging) -> None:
        """Record the silences and the winner."""
        for request in self._requests:
            if request.rival:
                hedging.end(won=self.is_done and not request.lost)
            if not request.rival if request.lost else request.error is None:
                request.teach(hedging.patience)

    def _short(self, first: int, got: int, why: str) -> str:
        where = f"reading {redact(self.url)} bytes [{first}, {self.stop})"
        return f"{where}: got {got} bytes, expected {(self.stop or first) - first}; {why}"


def _memory(num_bytes: int) -> memoryview:
    """Allocate writable bytes without zeroing them, because they will be overwritten."""
    return np.empty(num_bytes, np.uint8).data
