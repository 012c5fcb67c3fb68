"""Keep the journal that a conversion writes to its target, so that it can be interrupted and continued.

``_shardstream/convert.json`` records the source and the options of the shards there. It holds no time and no machine:
the same conversion writes the same journal. ``_shardstream/sources.parquet`` belongs to it: the inputs of the shards,
with versions and checksums that show whether they changed. That file is valid only in this place, so copies of a set
leave it out; where nothing else says so, they have a list of none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from shard_tools.make.convert.base.identity import SourceIdentity
from shard_tools.make.convert.base.records import Skipped
from streaming.common.threads import map_threads
from streaming.errors import AccessDeniedError, IndexFormatError, NotFoundError, ShardstreamError
from streaming.shards.index.files import (
    CONVERT_AGAIN,
    SOURCES_KIND,
    is_sealed,
    read_document,
    read_table,
    write_document,
    write_table,
)
from streaming.shards.index.layout import inputs_path
from streaming.storage import ReadBuffer, Storage, join_url, redact

_FORMAT = "shardstream-convert"
_VERSION, _KEPT = 1, 32
_THREADS = 16
_COLUMNS = {
    "number": pa.int64(), "name": pa.string(), "size_bytes": pa.int64(), "version": pa.string(), "crc32c": pa.uint32(),
    "content": pa.string(),
}  # fmt: skip
NAME = "_shardstream/convert.json"
SOURCES = "_shardstream/sources.parquet"


class TargetNotEmptyError(ShardstreamError, FileExistsError):
    """The target holds shards that this conversion did not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waypoint:
    """The position of a source after a number of shards, and the counts up to it.

    Attributes:
        through: Number of the last input that the shards are made from.
        remarks: Number of samples by remark.
        left_out: Number of records that are left out, by reason.
        standing: Position of the source, if the number of samples does not determine it.
    """

    through: int = -1
    remarks: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    standing: Mapping[str, Any] = field(default_factory=dict)


def kept(positions: Mapping[int, Waypoint]) -> dict[int, Waypoint]:
    """Return the positions that a journal keeps: the latest ones, and fewer and fewer of earlier ones.

    The position after shard n is kept for 32 times the largest power of two that divides n. So a run that goes back by
    k shards rewrites at most k / 15 + 1 more of them, and a journal of any number of shards stays small.
    """
    latest = max(positions, default=0)
    return {number: one for number, one in sorted(positions.items()) if latest - number < _KEPT * (number & -number)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The work of a conversion, whether it is complete, and the fields that its samples then have.

    ``fields`` is the source's own declaration, not a record of what was written, so that ``verify`` can compare the
    two: True for a field of every sample, False for one that some samples lack; None if it is unknown before reading.

    ``positions`` says where the source stood after so many shards, for some numbers of them (:func:`kept`); ``skipped``
    what reading found that is no sample, by its place.
    """

    source: dict[str, Any]
    options: dict[str, Any]
    complete: bool = False
    num_samples: int | None = None
    fields: Mapping[str, bool] | None = None
    positions: Mapping[int, Waypoint] = field(default_factory=dict)
    skipped: Mapping[str, Skipped] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        """Records of a whole conversion: its samples, and the records that it left out."""
        last = self.positions.get(max(self.positions, default=0))
        return (self.num_samples or 0) + (0 if last is None else sum(last.left_out.values()))

    def same_work(self, other: Journal) -> bool:
        """Return whether both describe the same conversion."""
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
        content = storage.read_parsed(url, lambda data, _: read_document(data), is_sealed)
        _check_version(content["format"], content["version"])
        return Journal(
            source=dict(content["source"]),
            options=dict(content["options"]),
            complete=bool(content["complete"]),
            num_samples=content["num_samples"],
            fields=None if content.get("fields") is None else dict(content["fields"]),
            positions={int(number): Waypoint(**one) for number, one in content.get("positions", {}).items()},
            skipped={one["path"]: Skipped(**one) for one in content.get("skipped", [])},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IndexFormatError(
            f"{redact(url)}: not a journal that this release can read ({error}); {CONVERT_AGAIN}"
        ) from error


def whole_journal(home: str, storage: Storage, num_samples: int) -> Journal | None:
    """Return the journal in ``home`` if it describes the set there, of ``num_samples``, else None.

    Raises:
        IndexFormatError: It is damaged.
    """
    try:
        journal = load_journal(home, storage)
    except AccessDeniedError:  # many stores deny access to a missing file
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
    if journal.positions:
        content["positions"] = {str(number): asdict(one) for number, one in kept(journal.positions).items()}
    if journal.skipped:
        content["skipped"] = [asdict(one) for one in journal.skipped.values()]
    storage.put(join_url(target, NAME), write_document(content))


def sources_of(origins: Sequence[SourceIdentity]) -> bytes:
    """Return the file of a set's inputs."""
    columns = {name: pa.array([getattr(one, name) for one in origins], kind) for name, kind in _COLUMNS.items()}
    return write_table(pa.table(columns), {"kind": SOURCES_KIND}, plain=["number", "name", "version", "content"])


def load_sources(target: str, storage: Storage) -> list[SourceIdentity]:
    """Return the inputs of the set in ``target``; empty if they are unknown.

    Raises:
        IndexFormatError: Their file is damaged.
    """
    url = join_url(target, SOURCES)
    try:
        return storage.read_parsed(url, _identities, is_sealed)
    except (NotFoundError, AccessDeniedError):
        return []


def lists_inputs(journal: Journal | None) -> bool:
    """Return whether a set with this journal has a list of its inputs, but for copies. A function may be given none."""
    return journal is not None and ("function" not in journal.options or "late" in journal.options)


def has_file(target: str, name: str, storage: Storage) -> bool:
    """Return whether there is a journal (``NAME``), or a list of inputs (``SOURCES``), even of none, in ``target``."""
    try:
        return storage.exists(join_url(target, name))
    except AccessDeniedError:  # many stores deny access to a missing file
        return False


def load_inputs(home: str, names: Sequence[str], storage: Storage) -> list[SourceIdentity]:
    """Return the inputs that were appended to the set in ``home``, given the names of their lists.

    Raises:
        IndexFormatError: A list is damaged.
        NotFoundError: One is gone.
    """
    urls = [join_url(home, inputs_path(name)) for name in names]
    lists = map_threads(lambda url: storage.read_parsed(url, _identities, is_sealed), urls, _THREADS)
    return [one for identities in lists for one in identities]


def _identities(data: ReadBuffer, source: str) -> list[SourceIdentity]:
    table, _ = read_table(data, SOURCES_KIND, source, lambda _: list(_COLUMNS))
    return [SourceIdentity(**row) for row in table.to_pylist()]
