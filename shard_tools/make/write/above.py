"""Find the sets above a target, whose readers will read it as a part, and compare their meanings."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from streaming.errors import StorageError
from streaming.shards.catalog.build import read_schema
from streaming.shards.schema.meeting import RESHARD, contradiction, met
from streaming.shards.schema.value import Schema
from streaming.storage import Storage, local_path, redact, scheme_of, split_url

_MOST_ABOVE = 4  # number of folders above a target to check
_log = logging.getLogger(__name__)


def sets_above(directory: str, storage: Storage) -> Iterator[tuple[str, Schema]]:
    """Yield the folders above a target that have a schema, with that schema; the nearest first."""
    place = os.path.abspath(local_path(directory)) if scheme_of(directory) == "file" else directory.rstrip("/")
    for _ in range(_MOST_ABOVE):
        above = split_url(place)[0]
        if above in ("", place) or above.endswith(":/") or above.count("/") < 1:
            return
        place = above
        try:
            schema = read_schema(storage, place)
        except StorageError:  # raised for a place above the store's buckets
            return
        if schema:
            yield place, schema


def meet_above(directory: str, schema: Schema, storage: Storage, *, is_whole: bool = False) -> None:
    """Refuse to write what contradicts a set above, before anything is written.

    Args:
        directory: The target.
        schema: Schema of the data to write.
        storage: The store.
        is_whole: Whether ``schema`` is the complete schema of the set, even if it is empty; fields that only the set
            above describes are then logged. Otherwise the set's writer adds the fields that it sees.

    Raises:
        ConfigError: It contradicts a set above.
    """
    for place, known in sets_above(directory, storage) if schema or is_whole else ():
        met({redact(place): known, redact(directory): schema}, cure=f"Give another target; {RESHARD}")


def tell_above(directory: str, storage: Storage) -> None:
    """Log contradictions with a set above that were found only after writing."""
    schema = read_schema(storage, directory)
    for place, known in sets_above(directory, storage) if schema else ():
        conflict = contradiction({redact(place): known, redact(directory): schema})
        if conflict is not None:
            _log.warning(
                "%s will be read as a part of %s, but they do not mean the same: %s", redact(directory), redact(place),
                conflict,
            )  # fmt: skip
