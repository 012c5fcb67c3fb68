"""Keep the journal that a conversion writes to its target, so that it can be interrupted and continued.

``_shardstream/convert.json`` records the source and the options of the shards there. It holds no time and no machine:
the same conversion writes the same journal.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from streaming.errors import AccessDeniedError, IndexFormatError, NotFoundError, ShardstreamError
from streaming.index.layout import TOKENS_FILE
from streaming.storage import Storage, join_url, redact

_FORMAT = "shardstream-convert"
_VERSION = 1
NAME = "_shardstream/convert.json"
CLASSES = "_shardstream/classes.json"
NOTES = (CLASSES, TOKENS_FILE)
"""Files about a set that go along with it."""


class TargetNotEmptyError(ShardstreamError, FileExistsError):
    """The target holds shards that this conversion did not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The work of a conversion, and whether it is complete."""

    source: dict[str, Any]
    options: dict[str, Any]
    complete: bool = False
    num_samples: int | None = None

    def same_work(self, other: Journal) -> bool:
        """Tell whether both describe the same conversion."""
        return self.source == other.source and self.options == other.options

    def differences(self, other: Journal) -> str:
        """Describe what differs."""
        pairs = (("source", self.source, other.source), ("options", self.options, other.options))
        return "; ".join(
            f"{what} {name}: there {theirs.get(name)!r}, here {ours.get(name)!r}"
            for what, theirs, ours in pairs
            for name in sorted({*theirs, *ours})
            if theirs.get(name) != ours.get(name)
        )


def load_journal(target: str, storage: Storage) -> Journal | None:
    """Return the journal in ``target``, or None.

    Raises:
        IndexFormatError: It is damaged, or of another version.
    """
    url = join_url(target, NAME)
    if not storage.exists(url):
        return None
    try:
        content = json.loads(bytes(storage.read(url)))
        _check_version(content["format"], content["version"])
        return Journal(
            source=dict(content["source"]),
            options=dict(content["options"]),
            complete=bool(content["complete"]),
            num_samples=content["num_samples"],
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IndexFormatError(
            f"{redact(url)}: not a journal that this release can read ({error}); start over with --overwrite"
        ) from error


def _check_version(name: object, version: object) -> None:
    if (name, version) != (_FORMAT, _VERSION):
        raise ValueError(f"format {name!r}, version {version!r}")


def save_journal(target: str, journal: Journal, storage: Storage) -> None:
    """Write the journal atomically."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "source": journal.source,
        "options": journal.options,
        "complete": journal.complete,
        "num_samples": journal.num_samples,
    }
    storage.put(join_url(target, NAME), (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def carry_notes(home: str, there: Storage, directory: str, here: Storage) -> None:
    """Copy the files about classes and tokens beside the index at ``home`` to ``directory``, if they exist."""
    for name in NOTES:
        if (content := note_at(home, name, there)) is not None:
            here.put(join_url(directory, name), content)


def note_at(home: str, name: str, storage: Storage) -> bytes | None:
    """Return one of these files, or None if there is none."""
    with suppress(NotFoundError, AccessDeniedError):
        return bytes(storage.read(join_url(home, name)))
    return None
