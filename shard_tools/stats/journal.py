"""Keep the totals of a long run in a file, so that it can be stopped and started again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shard_tools.stats.totals import Totals
from streaming.errors import AccessDeniedError, NotFoundError
from streaming.index.files import read_document, write_document
from streaming.storage import Storage, join_url

_FORMAT, _VERSION = "shardstream-stats", 1


@dataclass(slots=True, kw_only=True)
class TotalsJournal:
    """Totals of the first shards of a set, written from time to time, and deleted when all are done.

    The file is named after the work (content of the shards, filter, columns, options), so that runs of other work do
    not meet it. It is written atomically.

    Attributes:
        folder: Folder or prefix where it is kept.
        storage: Its store.
        work: What is summed up.
        every_s: Seconds between two writings.
    """

    folder: str
    storage: Storage
    work: Mapping[str, Any]
    every_s: float
    _written_s: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        """Where the file is."""
        digest = hashlib.sha256(json.dumps(self.work, sort_keys=True).encode()).hexdigest()[:16]
        return join_url(self.folder, f"stats-{digest}.json")

    def load(self) -> tuple[int, Totals]:
        """Return the number of shards that are done, and their totals; none if there is no file, or it is damaged."""
        with suppress(NotFoundError, AccessDeniedError, ValueError, KeyError, TypeError, RecursionError):
            content = read_document(self.storage.read(self.url))
            if (content["format"], content["version"], content["work"]) == (_FORMAT, _VERSION, dict(self.work)):
                return int(content["num_shards"]), Totals.of_dict(content["totals"])
        return 0, Totals()

    def note(self, num_shards: int, totals: Totals) -> None:
        """Write the totals of so many shards if the last time is long enough ago."""
        if time.monotonic() - self._written_s >= self.every_s:
            content = {"format": _FORMAT, "version": _VERSION, "work": self.work, "num_shards": num_shards}
            self.storage.put(self.url, write_document({**content, "totals": totals.as_dict()}))
            self._written_s = time.monotonic()

    def close(self) -> None:
        """Delete the file: the work is done."""
        with suppress(NotFoundError):
            self.storage.delete(self.url)
