"""Keep the journal that a conversion writes to its target, so that it can be interrupted and continued.

``_shardstream/convert.json`` records the source and the options of the shards there. It holds no time and no machine:
the same conversion writes the same journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streaming.errors import AccessDeniedError, IndexFormatError, ShardstreamError
from streaming.index.files import read_document, write_document
from streaming.storage import Storage, join_url, redact

_FORMAT = "shardstream-convert"
_VERSION = 1
NAME = "_shardstream/convert.json"


class TargetNotEmptyError(ShardstreamError, FileExistsError):
    """The target holds shards that this conversion did not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The work of a conversion, whether it is complete, and the fields that its samples then have.

    ``fields`` is the source's own word, not what was written, so that ``verify`` can compare the two: True for a field
    of every sample, False for one that some lack; None if only reading tells.

    ``positions`` says where a source stood after so many shards, for the latest ones: after all, when it is complete.
    """

    source: dict[str, Any]
    options: dict[str, Any]
    complete: bool = False
    num_samples: int | None = None
    fields: Mapping[str, bool] | None = None
    positions: Mapping[str, Mapping[str, Any]] | None = None

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
        content = read_document(storage.read(url))
        _check_version(content["format"], content["version"])
        return Journal(
            source=dict(content["source"]),
            options=dict(content["options"]),
            complete=bool(content["complete"]),
            num_samples=content["num_samples"],
            fields=None if content.get("fields") is None else dict(content["fields"]),
            positions=None if content.get("positions") is None else dict(content["positions"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IndexFormatError(
            f"{redact(url)}: not a journal that this release can read ({error}); start over with "
            "`shard_tools convert … --overwrite`, or delete this file, which nothing but `convert` and `verify` reads"
        ) from error


def whole_journal(home: str, storage: Storage, num_samples: int) -> Journal | None:
    """Return the journal in ``home`` if the set there, of so many samples, is what it describes, else None.

    Raises:
        IndexFormatError: It is damaged.
    """
    try:
        journal = load_journal(home, storage)
    except AccessDeniedError:  # what many stores say of a file that is not there
        return None
    return journal if journal is not None and journal.complete and journal.num_samples == num_samples else None


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
        "fields": None if journal.fields is None else dict(journal.fields),
    }
    if journal.positions is not None:
        content["positions"] = {number: dict(position) for number, position in journal.positions.items()}
    storage.put(join_url(target, NAME), write_document(content))
