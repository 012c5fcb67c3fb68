"""Inspect a dataset: totals, the list of samples, one sample."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from shard_tools.running.engine import map_ordered
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Finding, Report
from shard_tools.sets.open_set import (
    READ_THREADS,
    OpenSet,
    names_shards,
    open_set,
    place_of,
    table_of,
    tables_of,
    unfinished,
)
from streaming.arguments import counted
from streaming.catalog.build import home_of, read_chunks
from streaming.errors import NotFoundError
from streaming.index.sample_table import SampleLocation
from streaming.storage import Storage, redact, split_url
from streaming.types import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldInfo:
    """One field over all samples that have it."""

    name: str
    num_samples: int
    num_bytes: int
    min_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetInfo:
    """Totals of a dataset.

    Attributes:
        num_shards: Shards.
        num_samples: Samples.
        num_bytes: Bytes of the tar files.
        num_chunks: Chunks.
        fields: Every field, by name.
        columns: Columns of the sample tables.
        index: Location of the index, or that there is none.
        has_index: Whether there is a stored index.
        fingerprint: The index's fingerprint.
        findings: Shards that are missing, or differ in size from the index.
    """

    num_shards: int
    num_samples: int
    num_bytes: int
    num_chunks: int
    fields: tuple[FieldInfo, ...]
    columns: tuple[str, ...]
    index: str
    has_index: bool
    fingerprint: str
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        fields = [asdict(field) for field in self.fields]
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "mean_sample_bytes": self.num_bytes / self.num_samples if self.num_samples else None,
            "fields": {field.pop("name"): field for field in fields},
            "findings": [finding.as_dict() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEntry(Report):
    """One line of a listing: the sample's number in the dataset, its shard, its key, the size of each field."""

    number: int
    shard: str
    key: str
    fields: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample with the bytes of its fields."""

    entry: SampleEntry
    payloads: Mapping[str, bytes]

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form: sizes, and the content of fields that are JSON or text (null for others)."""
        return {**self.entry.as_dict(), "content": {name: _content(name, body) for name, body in self.payloads.items()}}


def _content(field: str, payload: bytes) -> object:
    try:
        text = payload.decode()
        if field.rpartition(".")[2] not in {"json", "jsn"}:
            return text
        content: object = json.loads(text)
        json.dumps(content, indent=2)  # what is nested too deeply for the stack may parse, but not print
    except (ValueError, RecursionError):
        return None
    return content


def info(
    urls: Sequence[str], *, storage: Storage, index_url: str | None = None, allow_unfinished: bool = False,
    progress: Progress | None = None,
) -> DataSetInfo:  # fmt: skip
    """Return the totals of a dataset, from its index; a small one without index is read (and its index not stored).

    Of a set that is not whole, these are the totals of what is there; that is a finding unless ``allow_unfinished``.

    Raises:
        IndexMissingError: There is no index and the dataset is too large to read for this.
        NotFoundError: Nothing matches ``urls``.
    """
    progress = progress or NoProgress()
    shards = open_set(urls, storage, index_url, allow_unfinished=True)
    chunks = shards.chunks
    findings = [] if allow_unfinished else unfinished(shards.marks)
    progress.start(total_bytes=None, total=len(shards.urls))
    fields: dict[str, FieldInfo] = {}
    columns: dict[str, None] = {}
    for _, _, table in tables_of(shards, storage, READ_THREADS):
        columns.update(dict.fromkeys(table.columns))
        for name, (starts, sizes) in table.fields.items():
            present = sizes[starts >= 0]
            if present.size:
                fields[name] = _add(fields.get(name), name, present)
        progress.advance(num=1)
    return DataSetInfo(
        num_shards=len(shards.urls),
        num_samples=chunks.total_samples,
        num_bytes=sum(shard.size_bytes for shard in chunks.shards),
        num_chunks=chunks.num_chunks,
        fields=tuple(fields[name] for name in sorted(fields)),
        columns=tuple(columns),
        index=_where(shards, urls),
        has_index=shards.scanned is None,
        fingerprint=chunks.fingerprint,
        findings=(*findings, *(() if shards.scanned is not None else _compare(shards, urls, storage))),
    )


def _compare(shards: OpenSet, urls: Sequence[str], storage: Storage) -> Iterator[Finding]:
    """Yield the shards that are not as the index describes them; one request each."""

    def size_of(url: str) -> int | None:
        try:
            return storage.info(url).size_bytes
        except NotFoundError:
            return None

    promised = {url: shard.size_bytes for url, shard in zip(shards.urls, shards.chunks.shards, strict=True)}
    if not names_shards(urls):  # directories stand for everything listed in them
        folders = {home_of(url, shards.index_url): split_url(url)[0] for url in reversed(shards.urls)}
        for home, folder in folders.items():
            with contextlib.suppress(NotFoundError):
                for shard in read_chunks(storage, home).shards:
                    promised.setdefault(place_of(shard.name, folder, shards.index_url), shard.size_bytes)
    cure = "restore it, or run `shard_tools index --prune`, which takes it out of the index"
    for (url, size_bytes), found in zip(promised.items(), map_ordered(size_of, promised, READ_THREADS), strict=True):
        if found is None:
            yield Finding(kind="missing", shard=url, what="in the index, but not in the store", cure=cure)
        elif found != size_bytes:
            yield Finding(
                kind="size",
                shard=url,
                what="another size than the index says: cut off, or replaced",
                cure="restore it, or run `shard_tools index` for it",
                expected=f"{size_bytes} bytes",
                got=f"{found} bytes",
            )


def _add(before: FieldInfo | None, name: str, sizes: Int64Array) -> FieldInfo:
    least, most = int(sizes.min()), int(sizes.max())
    return FieldInfo(
        name=name,
        num_samples=sizes.size + (before.num_samples if before else 0),
        num_bytes=int(sizes.sum()) + (before.num_bytes if before else 0),
        min_bytes=min(least, before.min_bytes) if before else least,
        max_bytes=max(most, before.max_bytes) if before else most,
    )


def _where(shards: OpenSet, urls: Sequence[str]) -> str:
    if shards.scanned is not None:
        return f"none stored (the shards were read); make one with `shard_tools index {' '.join(map(redact, urls))}`"
    return redact(shards.index_url or "") or "beside the shards"


def list_samples(
    urls: Sequence[str], *, storage: Storage, index_url: str | None = None, limit: int | None = None,
    allow_unfinished: bool = False,
) -> Iterator[SampleEntry]:  # fmt: skip
    """Yield the samples in the order of the dataset, at most ``limit``; sample tables are loaded when they are needed.

    Raises:
        IndexMissingError: As :func:`info`.
        NotFoundError: Nothing matches ``urls``.
    """
    if limit == 0:
        return
    shards = open_set(urls, storage, index_url, allow_unfinished=allow_unfinished)
    for first, url, table in tables_of(shards, storage):
        for number in range(table.num_samples):
            yield _entry(first + number, url, table.lookup(number))
            if limit is not None and first + number + 1 >= limit:
                return


def _entry(number: int, url: str, place: SampleLocation) -> SampleEntry:
    sizes = {name: end - start for name, (start, end) in place.fields.items()}
    return SampleEntry(number=number, shard=url, key=place.key, fields=sizes)


def describe_sample(
    url: str, sample: str, *, storage: Storage, index_url: str | None = None, allow_unfinished: bool = False
) -> SampleView:
    """Return one sample, by its key or its number, with the bytes of all its fields.

    Raises:
        NotFoundError: There is no such sample.
    """
    entry, place = _find(url, sample, storage, index_url, allow_unfinished=allow_unfinished)
    payloads = {name: bytes(storage.read(entry.shard, *span)) for name, span in place.fields.items()}
    return SampleView(entry=entry, payloads=payloads)


def cat_field(
    url: str, sample: str, field: str, *, storage: Storage, index_url: str | None = None, allow_unfinished: bool = False
) -> bytes:
    """Return the bytes of one field of one sample; only these are read.

    Raises:
        NotFoundError: There is no such sample, or it has no such field.
    """
    entry, place = _find(url, sample, storage, index_url, allow_unfinished=allow_unfinished)
    if field not in place.fields:
        raise NotFoundError(
            f"{entry.shard}: sample {entry.key!r} has no field {field!r}; it has {', '.join(place.fields)}"
        )
    return bytes(storage.read(entry.shard, *place.fields[field]))


def _find(
    url: str, sample: str, storage: Storage, index_url: str | None, *, allow_unfinished: bool
) -> tuple[SampleEntry, SampleLocation]:
    """Find a sample: by its key first; else, if the text is a number, by its number from 0 on."""
    shards = open_set([url], storage, index_url, allow_unfinished=allow_unfinished)
    with contextlib.closing(tables_of(shards, storage, READ_THREADS)) as tables:
        for first, shard, table in tables:
            if sample in (keys := list(table.keys)):
                place = table.lookup(keys.index(sample))
                return _entry(first + keys.index(sample), shard, place), place
    total = shards.chunks.total_samples
    if sample.isdecimal() and int(sample) < total:
        ends = np.cumsum([shard.num_samples for shard in shards.chunks.shards])
        position = int(np.searchsorted(ends, int(sample), side="right"))
        table = table_of(shards, position, storage)
        place = table.lookup(int(sample) - int(ends[position]) + table.num_samples)
        return _entry(int(sample), shards.urls[position], place), place
    raise NotFoundError(
        f"{redact(url)}: no sample has the key {sample!r}; there are {counted(total, 'sample')}, see "
        f"`shard_tools ls {redact(url)}`"
    )
