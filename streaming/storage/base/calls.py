"""Record the calls in progress in a storage, to explain why no data arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from streaming.errors import redact


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRequest:
    """One call in progress, over all its attempts; between two attempts it waits.

    Attributes:
        url: Its URL, without user, password and query.
        byte_start: First byte requested; 0 for calls that are not reads.
        byte_end: End (exclusive); None: to the end of the object, or not a read.
        attempt: Number of the attempt in progress (or of the next one, while waiting), from 1; 0: the first has not
            begun.
        num_bytes_received: Bytes of the whole range received so far.
        age_s: Time since the call began.
    """

    url: str
    byte_start: int
    byte_end: int | None
    attempt: int
    num_bytes_received: int
    age_s: float


@dataclass(slots=True, eq=False)
class Call:
    """A call in progress, as seen by the code that performs it, which updates ``attempt`` and ``received``."""

    url: str
    start: int = 0
    stop: int | None = None
    attempt: int = 0
    received: int = 0
    began_s: float = field(default_factory=time.monotonic)


class ActiveCalls:
    """The calls in progress in one storage. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}

    @contextmanager
    def under_way(self, url: str, start: int = 0, stop: int | None = None) -> Iterator[Call]:
        """List a call until the block ends."""
        call = Call(url, start, stop)
        with self._lock:
            # The call is listed exactly while the block runs.
            self._calls[id(call)] = call
        try:
            yield call
        finally:
            with self._lock:
                # The call leaves the list before the caller learns its outcome.
                del self._calls[id(call)]

    def snapshot(self) -> list[ActiveRequest]:
        """Return the calls in progress, oldest first."""
        with self._lock:
            # A copy: calls may begin and end meanwhile.
            calls = list(self._calls.values())
        now_s = time.monotonic()
        return [
            ActiveRequest(
                url=redact(call.url),
                byte_start=call.start,
                byte_end=call.stop,
                attempt=call.attempt,
                num_bytes_received=call.received,
                age_s=now_s - call.began_s,
            )
            for call in sorted(calls, key=lambda call: call.began_s)
        ]
