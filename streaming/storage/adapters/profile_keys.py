"""Provide obstore with the keys of an AWS profile, with their real expiry.

obstore's own provider assumes that every key is valid for another half hour. So the keys of shorter sessions of an
assumed role, SSO or ``credential_process`` would expire while requests are still signed with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

AHEAD = timedelta(minutes=5)
"""Time before its expiry at which a key is replaced; from then on, obstore requests one at most every 0.1 s
(0.12.1)."""


def _now() -> datetime:
    return datetime.now(UTC)


class ProfileKeys:
    """Return the keys of a profile in obstore's form, renewed before they expire. Thread-safe.

    In the last ten minutes of a session, botocore makes new keys at every request. So it is called only when half of
    the rest of a short session is over, and ``credential_process`` runs only a few times per session.

    ``_lock`` guards ``_held``, ``_end`` and ``_renew_at``.

    Args:
        credentials: The credentials of botocore.
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
            Exception: They have expired, and botocore cannot renew them; the error is its own.
        """
        with self._lock:
            # The held keys are one whole answer of botocore, with its own expiry.
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
        expiry: datetime | None = getattr(self._credentials, "_expiry_time", None)  # botocore has no public name for it
        end = self._end = None if expiry is None else expiry.astimezone(UTC)  # obstore takes no other zone
        self._renew_at = None if end is None else end - min(AHEAD, max(end - now, timedelta()) / 2)
        self._held = {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": end,
        }
