"""Give the keys of the samples that were found as a file, in the form that ``delete`` and ``reshard`` read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from shard_tools.look.show.base.page import Content, Query
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.find import finding
from streaming.errors import ConfigError

ASKS = (*finding.ASKS, "size")
MOST_KEYS: Final = 1_000_000
FILE_NAME: Final = "keys.txt"
_DRAWN = 48  # of a random sample: those of its first page


def keys(subject: Subject, query: Query) -> Content:
    """Return the keys of all samples that a page requests, of a random sample those of its first page; one per line.

    Raises:
        ConfigError: A parameter is invalid, there are too many samples, or not all are known.
    """
    is_drawn = query.some_number("sample") is not None
    size = query.number("size", _DRAWN, least=1, most=MOST_KEYS)
    found = finding.find(subject, query, 0, size if is_drawn else MOST_KEYS)
    if not is_drawn and (found.total is None or not found.is_whole):
        raise ConfigError(f"/keys: the search is not complete: {found.progress}")
    if not is_drawn and found.total is not None and found.total > MOST_KEYS:
        raise ConfigError(
            f"/keys: {found.total:,} samples; at most {MOST_KEYS:,} keys are given. delete and reshard take the "
            "condition itself: --where"
        )
    data = b"".join(_lines(found))
    return Content(
        media_type="text/plain; charset=utf-8", num_bytes=len(data), read=lambda first, last: iter((data[first:last],)),
        file_name=FILE_NAME,
    )  # fmt: skip


def _lines(found: finding.Hits) -> Iterator[bytes]:
    for part in found.parts:
        for key in part.within.keys(part.numbers):
            yield _line(key).encode("utf-8", "surrogateescape") + b"\n"


def _line(key: str) -> str:
    """Return a key as a line; one that would be read as something else, as JSON."""
    is_plain = key == key.strip() and key.isprintable() and not key.startswith(("{", "\ufeff"))
    return key if is_plain and key else json.dumps({"key": key})
