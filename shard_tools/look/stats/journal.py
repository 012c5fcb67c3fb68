"""Keep the totals of a long run in a file, so that it can be stopped and started again."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shard_tools.look.stats.totals import Totals
from streaming.errors import AccessDeniedError, NotFoundError, StorageError
from streaming.shards.index.files import is_sealed, read_document, write_document
from streaming.storage import Storage, join_url

_FORMAT, _VERSION = "shardstream-stats", 2
_log = logging.getLogger(__name__)
_SHARE = 20  # writing takes at most 1/20 of the time, regardless of the size of the totals


@dataclass(slots=True, kw_only=True)
class TotalsJournal:
    """Totals of the first shards of a set, written from time to time, and deleted when the work is done.

    The file name identifies the work (content of the shards, filter, columns, options), so that different runs do not
    share a file. Writes are atomic.

    Attributes:
        folder: Folder or prefix of the file.
        storage: Store of the file.
        work: Identity of the work.
        is_needed: Whether the run fails if the file cannot be written.
        every_s: Seconds between two writes, or more if they take long; 0: write every time.
    """

    folder: str
    storage: Storage
    work: Mapping[str, Any]
    is_needed: bool
    every_s: float
    _next_s: float = 0.0

    def __post_init__(self) -> None:
        """Start the clock of the first write."""
        self._next_s = time.monotonic() + self.every_s

    @property
    def url(self) -> str:
        """URL of the file."""
        digest = hashlib.sha256(json.dumps(self.work, sort_keys=True).encode()).hexdigest()[:16]
        return join_url(self.folder, f"stats-{digest}.json")

    def load(self) -> tuple[int, Totals]:
        """Return the number of finished shards, and their totals; zero if there is no file, or it is damaged."""
        missing = NotFoundError if self.is_needed else StorageError
        with suppress(missing, AccessDeniedError, ValueError, KeyError, TypeError, RecursionError):
            content = self.storage.read_parsed(self.url, lambda data, _: read_document(data), is_sealed)
            if (content["format"], content["version"], content["work"]) == (_FORMAT, _VERSION, dict(self.work)):
                return int(content["num_shards"]), Totals.of_dict(content["totals"])
        return 0, Totals()

    def note(self, num_shards: int, totals: Totals) -> None:
        """Write the totals of ``num_shards`` shards if the last write is long enough ago."""
        begun_s = time.monotonic()
        if begun_s >= self._next_s:
            content = {"format": _FORMAT, "version": _VERSION, "work": self.work, "num_shards": num_shards}
            try:
                self.storage.put(self.url, write_document({**content, "totals": totals.as_dict()}))
            except StorageError as error:
                if self.is_needed:
                    error.add_note("--journal names another place for the progress of this run")
                    raise
                _log.warning("%s; if this run is stopped, the next one starts over. See --journal", error)
                self._next_s = math.inf
                return
            now_s = time.monotonic()
            self._next_s = now_s + (max(self.every_s, _SHARE * (now_s - begun_s)) if self.every_s else 0)

    def close(self) -> None:
        """Delete the file, since the work is done."""
        with suppress(NotFoundError if self.is_needed else StorageError):
            self.storage.delete(self.url)
