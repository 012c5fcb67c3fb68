"""Which version of an object this process has seen first."""

from __future__ import annotations

import threading
from collections import OrderedDict

_MOST = 1 << 17
"""Objects remembered; some 20 MB."""


class Pins:
    """URL → version, the objects used last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[str, str] = OrderedDict()

    def get(self, url: str) -> str | None:
        """The version of ``url`` that was seen first, if any was."""
        with self._lock:
            return self._versions.get(url)

    def keep(self, url: str, version: str | None) -> None:
        """``version`` was read; the first one stays."""
        if version is None:
            return
        with self._lock:
            self._versions.setdefault(url, version)
            self._versions.move_to_end(url)
            if len(self._versions) > _MOST:
                self._versions.popitem(last=False)

    def drop(self, url: str) -> None:
        """The next version counts as the first."""
        with self._lock:
            self._versions.pop(url, None)
