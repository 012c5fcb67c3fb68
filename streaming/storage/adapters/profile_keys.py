"""Give obstore the keys of an AWS profile, with the end that they really have.

obstore's own provider says of every key that it is good for another half an hour, so a session of an assumed role, SSO
or ``credential_process`` that is shorter ends under requests that are signed with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

AHEAD = timedelta(minutes=5)
"""How long before its end a key is replaced; obstore asks from then on, at most every 0.1 s (0.12.1)."""


def _now() -> datetime:
    return datetime.now(UTC)


class ProfileKeys:
    """Return the keys of a profile in obstore's form, renewed before they end. Thread-safe.

    botocore makes new keys each time it is asked in the last ten minutes of a session. So it is asked only once half of
    what is left of a short session is over, and a program that makes keys runs a few times per session.

    Args:
        credentials: botocore's.
        clock: Returns the time, with its zone.
    """

    def __init__(self, credentials: Any, clock: Callable[[], datetime] = _now) -> None:
        self._credentials = credentials
        self._clock = clock
        self._lock = threading.Lock()
        self._held: Mapping[str, object] = {}
        self._end: datetime | None = None
        self._renew_at: datetime | None = None

    def __call__(self) -> Mapping[str, object]:
        """Return the keys.

        Raises:
            Exception: They have ended, and botocore cannot renew them; the error is its own.
        """
        with self._lock:
            # What is held is one answer of botocore's, whole, with its own end.
            now = self._clock()
            if not self._held or (self._renew_at is not None and now >= self._renew_at):
                try:
                    self._renew()
                except Exception:
                    if not self._held or self._end is None or now >= self._end:
                        raise
            return self._held

    def _renew(self) -> None:
        frozen = self._credentials.get_frozen_credentials()
        now = self._clock()
        told: datetime | None = getattr(self._credentials, "_expiry_time", None)  # there is no public way to it
        end = self._end = None if told is None else told.astimezone(UTC)  # obstore takes no other zone
        self._renew_at = None if end is None else end - min(AHEAD, max(end - now, timedelta()) / 2)
        self._held = {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": end,
        }
