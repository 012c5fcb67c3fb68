"""Read lists of bad samples, find these samples in a shard, and make a list from the findings of ``verify``."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shard_tools.running.report import Finding
from streaming.build.batches.bad_file import BadRecord, iter_records, shown_url
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage, redact, scheme_of

# Kinds of findings for samples that cannot be delivered; others concern the index, or bytes after the samples.
_SAMPLE_KINDS = frozenset({"missing", "size", "checksum", "tar", "samples", "decode", "duplicate", "read"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BadList:
    """The content of files of bad samples.

    Attributes:
        by_shard: The records by shard (:func:`~streaming.build.batches.bad_file.shown_url`); each sample once.
        num_unreadable: Number of lines that are not records.
    """

    by_shard: Mapping[str, tuple[BadRecord, ...]]
    num_unreadable: int = 0

    @property
    def num_records(self) -> int:
        """Number of records of all shards."""
        return sum(map(len, self.by_shard.values()))


def load_bad_list(specs: Sequence[str], storage: Storage) -> BadList:
    """Return the records in these files; local paths may be patterns with ``*``.

    Raises:
        NotFoundError: There is no such file, or none matches a pattern.
        DataError: A file holds lines, but not one record.
    """
    found: dict[str, dict[object, BadRecord]] = {}
    num_unreadable = 0
    for url in (url for spec in specs for url in _files(spec)):
        content = bytes(storage.read(url))
        records = list(iter_records(content))
        errors = [record for record in records if isinstance(record, DataError)]
        if records and len(errors) == len(records):
            raise DataError(
                f"{redact(url)}: not a list of bad samples: {errors[0]}; give what bad_samples_file or --write-bad "
                f"wrote"
            )
        num_unreadable += len(errors)
        for record in records:
            if isinstance(record, BadRecord):
                found.setdefault(record.url, {}).setdefault(record.name, record)
    by_shard = {url: tuple(records.values()) for url, records in sorted(found.items())}
    return BadList(by_shard=by_shard, num_unreadable=num_unreadable)


def _files(spec: str) -> list[str]:
    if scheme_of(spec) != "file" or not glob.has_magic(spec):
        return [spec]
    names = sorted(glob.glob(spec))
    if not names:
        raise NotFoundError(f"{spec}: no file fits this pattern")
    return names


def shards_by_shown_url(urls: Iterable[str]) -> dict[str, str]:
    """Return the URL of each shard by the name that records use for it.

    Raises:
        ConfigError: Two URLs differ only in their secrets, so records would be ambiguous.
    """
    found: dict[str, str] = {}
    for url in urls:
        shown = shown_url(url)
        if found.setdefault(shown, url) != url:
            raise ConfigError(
                f"{shown}: two of the shards have this name once secrets are left out; give one at a time"
            )
    return found


def rows_of(record: BadRecord, table: SampleTable, keys: Mapping[str, int]) -> list[int]:
    """Find the samples of ``record``: return their numbers in the shard of ``table``; empty if it has none.

    The key decides, and the number among several samples with this key. Without a key, the number in the shard decides;
    without a number, every sample that overlaps the byte range (up to the end of the shard if only its start is known).

    Args:
        record: A record of this shard.
        table: The shard's samples.
        keys: Number of the sample with each key in ``table.keys``.
    """
    number = record.sample_in_shard
    if record.key:
        if 0 <= number < table.num_samples and table.keys[number] == record.key:
            return [number]
        return [keys[record.key]] if record.key in keys else []
    if number >= 0:
        return [number] if number < table.num_samples else []
    if record.byte_start < 0:
        return []
    starts, ends = table.record_starts[:-1], table.record_starts[1:]
    touched = ends > record.byte_start
    if record.byte_end >= 0:
        touched &= starts < record.byte_end
    return [int(row) for row in np.flatnonzero(touched)]


def records_of(findings: Iterable[Finding]) -> list[BadRecord]:
    """Return the findings about samples as records; each sample or range once."""
    records: dict[object, BadRecord] = {}
    for finding in findings:
        if finding.kind not in _SAMPLE_KINDS:
            continue
        whole = finding.key is None and finding.byte_start is None
        record = BadRecord(
            url=shown_url(finding.shard),
            key=finding.key or "",
            byte_start=0 if whole else _known(finding.byte_start),
            byte_end=_known(finding.byte_end),
            stage="decode" if finding.kind == "decode" else "fetch",
            reason=finding.what.replace(finding.shard, shown_url(finding.shard)),
        )
        records.setdefault(record.name, record)
    return list(records.values())


def _known(value: int | None) -> int:
    return -1 if value is None else value
