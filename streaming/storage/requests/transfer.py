"""Bring a byte range into the caller's memory: what arrived is kept, and a silent request gets a rival.

Who may write, normative: the request that brought the last byte, or, right after a rival was started, whichever brings
the next one. From that moment the other is *lost*: it gets no room any more, and its thread ends with its answer. When
the attempt ends all its requests are lost, so nothing is written once the caller has the memory back.
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
"""Maximum delay until a transfer uses what other answers revealed about the store's silences."""
_SMALL_BYTES = 1 << 20
"""If an answer comes in one piece, its silence grows with its size from here on; below, it is all latency."""
_MOST_AT_ONCE = 3
"""Requests for the same bytes. Two are not enough: of many rivals, some stall as well (``bench_faults.py``)."""


class Hedging(Protocol):
    """The part of a bucket's traffic that a transfer needs for second requests."""

    patience: Patience
    threads: RequestThreads

    def begin(self, until_s: float) -> bool:
        """Tell whether a second request may be made now, for a call that ends at ``until_s``; if so, it is counted."""

    def end(self, *, won: bool) -> None:
        """Note that a second request is over, as far as the caller is concerned."""


class _LostError(Exception):
    """Another request is ahead."""


@dataclass(slots=True, eq=False)
class _Request:
    """One request of an attempt, for the bytes from ``first`` on; may be silent ``scale`` times as long as others."""

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
        """Note a sign of life; the first one is the beginning of the answer."""
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s - self.heard_s
        else:
            self.longest_s = max(self.longest_s, now_s - self.heard_s)
        self.heard_s = now_s

    def patient_s(self, patience: Patience) -> float:
        """Return how long it may still be silent."""
        kind = patience.first if self.first_s is None else patience.later
        return kind.limit_s * self.scale - (time.monotonic() - self.heard_s)

    def teach(self, patience: Patience) -> None:
        """Pass on the lengths of its silences; a lost request counts as silent until now."""
        last_s = time.monotonic() - self.heard_s if self.lost else 0.0
        if self.first_s is None:
            patience.first.note(last_s / self.scale)
        else:
            patience.first.note(self.first_s / self.scale)
            patience.later.note(max(self.longest_s, last_s) / self.scale)


class Transfer:
    """Transfer bytes [start, stop) of one object. Each attempt requests what is missing, of the same version.

    Args:
        adapter: Makes the requests.
        url: URL of the object.
        start: First byte.
        stop: One past the last one; None: to the end.
        count: Called with "bytes", and with "requests" for those beyond the first of an attempt.
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
        """Return the bytes; all of them, once the transfer is done."""
        return memoryview(b"") if self._out is None else self._out

    def forget(self) -> None:
        """Release the caller's memory: a lost request may keep the transfer itself alive for a while."""
        self._out = None

    def attempt(self, call: Call, hedging: Hedging | None, until_s: float) -> None:
        """Request what is missing; ``call`` is kept up to date. No rival is started after ``until_s``.

        Raises:
            PassingError: Some of it did not arrive. What arrived is kept.
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
                self._requests = []  # what is lost never looks here again; a cycle would wait for garbage collection

    def take(self, request: _Request, put: Callable[[memoryview], int]) -> None:
        """Give room for a request's bytes, if it is still ahead; the others become lost.

        Raises:
            _LostError: It is not ahead any more.
        """
        with self._changed:
            # One request is ahead: only its bytes are counted, from where the last one stopped, all of one version.
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
        """Make one request and take what it brings, on whichever thread this is."""
        body = self._adapter.open_range(self.url, request.first, self.stop, request.version)
        with closing(body):
            self._opened(request, body)
            body.fill(request)
        with self._changed:
            # A lost request's short answer is nobody's concern.
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
            if self._out is None:  # the end becomes known only now
                self.stop = self._call.stop = self.start + body.num_bytes
                self._out = _memory(body.num_bytes)
            missing = self.start + len(self._out) - request.first
            if body.num_bytes < missing:  # the store's own statement: another request would not help
                raise ChangedError(self._short(request.first, body.num_bytes, "was the object truncated or replaced?"))

    # --- with rivals ---

    def _race(self, hedging: Hedging, until_s: float) -> None:
        """Begin the first request on one of the threads, and another whenever all are silent for too long.

        Raises:
            PassingError: They still are at ``until_s``. (obstore's time-outs come first; file systems may have none.)
        """
        hedging.threads.run(partial(self._work, self._requests[0]))
        with self._changed:
            # At most _MOST_AT_ONCE requests are in the race; it ends when one has everything, or all have failed.
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
            # Ended for good, with its error, before the waiting caller looks.
            request.ended, request.error = True, error
            self._changed.notify_all()

    def _is_over(self) -> bool:
        """Tell whether every byte has arrived.

        Raises:
            StorageError: Some have not, and no request is left.
        """
        left = [request for request in self._requests if not request.lost]
        if not all(request.ended for request in left):
            return False
        errors = [request.error for request in left if request.error is not None]
        if self.is_done or not errors:
            return True
        raise next((error for error in errors if not isinstance(error, TransientError)), errors[-1])

    def _account(self, hedging: Hedging) -> None:
        """Record the silences, and who won."""
        for request in self._requests:
            if request.rival:
                hedging.end(won=self.is_done and not request.lost)
            if not request.rival if request.lost else request.error is None:
                request.teach(hedging.patience)

    def _short(self, first: int, got: int, why: str) -> str:
        where = f"reading {redact(self.url)} bytes [{first}, {self.stop})"
        return f"{where}: got {got} bytes, expected {(self.stop or first) - first}; {why}"


def _memory(num_bytes: int) -> memoryview:
    """Allocate writable bytes without zeroing them, since they are about to be overwritten."""
    return np.empty(num_bytes, np.uint8).data
