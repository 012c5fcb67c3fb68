"""Inspect a dataset: totals, the list of samples, one sample."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.change.sets.late import LatePart, LateParts
from shard_tools.change.sets.open_set import (
    READ_THREADS,
    OpenSet,
    names_shards,
    open_set,
    place_of,
    table_of,
    tables_of,
    unfinished,
)
from shard_tools.running.printing import show_findings, show_table
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Finding, Report, plain, plain_place
from streaming.common.arguments import counted, format_bytes
from streaming.common.threads import map_threads
from streaming.errors import (
    DataError,
    IndexFormatError,
    NotFoundError,
    StorageError,
    shell_place,
    shell_spec,
    shell_word,
)
from streaming.sets.filters.select import late_names
from streaming.sets.filters.views import View, list_views
from streaming.shards.catalog.build import home_of, place_in_index, read_chunks, read_schema
from streaming.shards.index.columns import Values
from streaming.shards.index.sample_table import SampleLocation, SampleTable
from streaming.shards.index.where import unknown_column
from streaming.shards.schema.kinds import kind_by_name
from streaming.shards.video.read import list_videos
from streaming.storage import Storage, redact, split_url
from streaming.types import Int64Array

_PREVIEW_CHARACTERS = 2000
_BINARY = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldInfo:
    """One field over all samples that have it; ``is_late``: it was added after the shards were written."""

    name: str
    num_samples: int
    num_bytes: int
    min_bytes: int
    max_bytes: int
    is_late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnInfo:
    """One column over all samples.

    Attributes:
        name: Its name.
        type: Arrow type of its values.
        num_values: Number of samples that have a value.
        min: The least of its numbers; None if it holds none.
        max: The greatest of its numbers.
        version: Version of a late column; "" for a column of the sample tables.
    """

    name: str
    type: str = "null"
    num_values: int = 0
    min: float | None = None
    max: float | None = None
    version: str = ""

    def joined(self, values: pa.Array) -> ColumnInfo:
        """Return the totals with the values of another shard added."""
        count = len(values) - values.null_count
        if not count:
            return self
        kind = "double" if {self.type, str(values.type)} == {"int64", "double"} else str(values.type)
        least, most = self.min, self.max
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            found = pc.min_max(values).as_py()
            least = found["min"] if least is None else min(least, found["min"])
            most = found["max"] if most is None else max(most, found["max"])
        return replace(self, type=kind, num_values=self.num_values + count, min=least, max=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetInfo:
    """Totals of a dataset.

    Attributes:
        num_shards: Shards.
        num_samples: Samples.
        num_bytes: Bytes of the tar files.
        num_chunks: Chunks.
        fields: Every field, by name.
        columns: Columns of the sample tables, and late columns.
        views: Saved views.
        videos: Fields with an index of videos, each with the number of shards that have it.
        index: Location of the index, or a note that there is none.
        has_index: Whether there is a stored index.
        fingerprint: The index's fingerprint.
        findings: Shards that are missing, or differ in size from the index; late columns and views that cannot be read.
    """

    num_shards: int
    num_samples: int
    num_bytes: int
    num_chunks: int
    fields: tuple[FieldInfo, ...]
    columns: tuple[ColumnInfo, ...]
    views: tuple[View, ...]
    index: str
    has_index: bool
    fingerprint: str
    videos: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        fields, columns = ([asdict(one) for one in some] for some in (self.fields, self.columns))
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "mean_sample_bytes": self.num_bytes / self.num_samples if self.num_samples else None,
            "fields": {field.pop("name"): field for field in fields},
            "columns": {column.pop("name"): column for column in columns},
            "views": {view.name: {"where": view.where, "num_kept": view.num_kept} for view in self.views},
            "findings": [finding.as_dict() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEntry(Report):
    """One of several sets below a prefix.

    Attributes:
        url: Its directory.
        kinds: The kinds of its fields, as far as their names and its schema tell.
        fields: The fields of its first sample.
        num_shards: Its shards.
        num_samples: Its samples.
        num_bytes: Bytes of its shards.
    """

    url: str
    kinds: tuple[str, ...]
    fields: tuple[str, ...]
    num_shards: int
    num_samples: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEntry(Report):
    """One line of a listing.

    Attributes:
        number: The sample's number in the dataset.
        shard: Its shard.
        key: Its key.
        fields: The size of each field.
        columns: The value of each column.
    """

    number: int
    shard: str
    key: str
    fields: Mapping[str, int]
    columns: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample with the bytes of its fields.

    Attributes:
        entry: Its line of a listing.
        payloads: The bytes by field.
        facts: What is said of fields that are no text.
    """

    entry: SampleEntry
    payloads: Mapping[str, bytes]
    facts: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form: sizes, and the content of fields that are JSON or text (null for others)."""
        content = {name: _content(name, body) for name, body in self.payloads.items()}
        return {**self.entry.as_dict(), "content": content, "facts": dict(self.facts)}


def _content(field: str, payload: bytes) -> object:
    try:
        text = payload.decode()
        if field.rpartition(".")[2] not in {"json", "jsn"}:
            return text
        content: object = json.loads(text)
        json.dumps(content, indent=2)  # content nested too deeply for the stack may parse, but not print
    except (ValueError, RecursionError):
        return None
    return content


def info(
    urls: Sequence[str], *, storage: Storage, index_url: str | None = None, allow_unfinished: bool = False,
    progress: Progress | None = None,
) -> DataSetInfo:  # fmt: skip
    """Return the totals of a dataset, from its index; a small one without an index is scanned, and no index stored.

    For an unfinished set, these are the totals of the shards that are there; this is a finding unless
    ``allow_unfinished``.

    Raises:
        IndexMissingError: There is no index and the dataset is too large to read for this.
        NotFoundError: Nothing matches ``urls``.
    """
    progress = progress or NoProgress()
    shards = open_set(urls, storage, index_url, allow_unfinished=True, meets=False)
    chunks = shards.chunks
    findings = [] if allow_unfinished else unfinished(shards.marks)
    progress.start(total_bytes=None, total=len(shards.urls))
    fields: dict[str, FieldInfo] = {}
    columns: dict[str, ColumnInfo] = {}
    parts, added = late_parts(shards, storage), set[str]()
    for position, (_, _, table) in enumerate(tables_of(shards, storage, READ_THREADS)):
        for name, values in table.columns.items():
            columns[name] = columns.get(name, ColumnInfo(name=name)).joined(values)
        there = dict(table.fields)
        for part in () if parts is None else parts.of(position):
            added.add(part.name)
            there |= {name: ranges for name, ranges in part.table.fields.items() if name == part.name}
        for name, (starts, sizes) in there.items():
            present = sizes[starts >= 0]
            if present.size:
                fields[name] = replace(_add(fields.get(name), name, present), is_late=name in added)
        progress.advance(num=1)
    late, views, broken = _beside(shards, storage)
    damaged = damaged_schemas(shards.homes, storage)
    unlike = shards_unlike_index(shards, urls, storage) if shards.scanned is None else ()
    return DataSetInfo(
        num_shards=len(shards.urls),
        num_samples=chunks.total_samples,
        num_bytes=sum(shard.size_bytes for shard in chunks.shards),
        num_chunks=chunks.num_chunks,
        fields=tuple(fields[name] for name in sorted(fields)),
        columns=(*columns.values(), *late),
        views=tuple(views),
        videos=_videos(shards, storage),
        index=_where(shards, urls),
        has_index=shards.scanned is None,
        fingerprint=chunks.fingerprint,
        findings=(*findings, *broken, *unlike, *(damaged or shards.unlike(storage))),
    )


def late_parts(shards: OpenSet, storage: Storage) -> LateParts | None:
    """Return the late fields of shards; None: what says which there are cannot be read."""
    try:
        return LateParts(shards, storage)
    except (DataError, StorageError):  # which findings tell
        return None


def damaged_schemas(homes: Sequence[str], storage: Storage) -> list[Finding]:
    """Return a finding for each set whose schema cannot be read."""

    def found(home: str) -> Finding | None:
        try:
            read_schema(storage, home)
        except IndexFormatError as error:
            return Finding(kind="index", shard=home, what=str(error), cure="see the message")
        return None

    return [one for one in map_threads(found, homes, READ_THREADS) if one is not None]


def _beside(shards: OpenSet, storage: Storage) -> tuple[list[ColumnInfo], list[View], list[Finding]]:
    """Return the late columns and views beside the index, and findings for those that cannot be read."""
    columns: list[ColumnInfo] = []
    views: list[View] = []
    home = shards.homes[0]

    def read_columns() -> None:
        for column in shards.late_columns(storage).values():
            info = ColumnInfo(name=column.name, type=column.type, version=column.version)
            for values in map_threads(
                lambda position: shards.late_values(storage, position, [column])[column.name],  # noqa: B023  read here
                range(len(shards.urls)), READ_THREADS,
            ):  # fmt: skip
                info = info.joined(values)
            columns.append(info)

    findings = []
    for read in (read_columns, lambda: views.extend(list_views(storage, home))):
        try:
            read()
        except DataError as error:
            findings.append(Finding(kind="index", shard=home, what=str(error), cure="see `shard_tools verify`"))
        except StorageError:  # the store cannot list
            continue
    return columns, views, findings


def _videos(shards: OpenSet, storage: Storage) -> dict[str, int]:
    """Return the fields whose videos are indexed, each with the number of shards."""
    if shards.scanned is not None:
        return {}
    there = {place_in_index(url, shards.index_url) for url in shards.urls}
    found = Counter(
        one.field for home in shards.homes for one in list_videos(storage, home) if (home, one.shard) in there
    )
    return dict(sorted(found.items()))


def shards_unlike_index(shards: OpenSet, urls: Sequence[str], storage: Storage) -> Iterator[Finding]:
    """Yield a finding for each shard that differs from its description in the index; one request per shard."""

    def size_of(url: str) -> int | None:
        try:
            return storage.info(url).size_bytes
        except NotFoundError:
            return None

    promised = {url: shard.size_bytes for url, shard in zip(shards.urls, shards.chunks.shards, strict=True)}
    if not names_shards(urls):  # directories stand for every shard in them
        folders = {home_of(url, shards.index_url): split_url(url)[0] for url in reversed(shards.urls)}
        for home, folder in folders.items():
            with contextlib.suppress(NotFoundError):
                for shard in read_chunks(storage, home).shards:
                    promised.setdefault(place_of(shard.name, folder, shards.index_url), shard.size_bytes)
    cure = "restore it, or run `shard_tools index --prune`, which takes it out of the index"
    for (url, size_bytes), found in zip(promised.items(), map_threads(size_of, promised, READ_THREADS), strict=True):
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
        places = " ".join(map(shell_spec, urls))
        return f"none stored (the shards were read); make one with `shard_tools index {places}`"
    return redact(shards.index_url or "") or "beside the shards"


def list_sets(shards: OpenSet, storage: Storage) -> list[SetEntry]:
    """Return the sets among some shards, by directory, if they are several; else nothing.

    One sample table of each is read.
    """
    positions: dict[str, list[int]] = {}
    for position, url in enumerate(shards.urls):
        positions.setdefault(split_url(url)[0], []).append(position)
    if len(positions) < 2:
        return []

    def entry(item: tuple[str, list[int]]) -> SetEntry:
        directory, mine = item
        infos = [shards.chunks.shards[position] for position in mine]
        first = next((position for position in mine if shards.chunks.shards[position].num_samples), mine[0])
        fields = tuple(table_of(shards, first, storage).fields)
        schema = read_schema(storage, home_of(shards.urls[first], shards.index_url))
        said = {name: one.kind for name, one in schema.fields.items()}
        kinds = dict.fromkeys(said.get(name) or kind_by_name(name) or "bytes" for name in fields)
        return SetEntry(
            url=redact(directory), kinds=tuple(kinds), fields=fields, num_shards=len(mine),
            num_samples=sum(one.num_samples for one in infos), num_bytes=sum(one.size_bytes for one in infos),
        )  # fmt: skip

    return list(map_threads(entry, positions.items(), READ_THREADS))


def list_samples(
    urls: Sequence[str], *, storage: Storage, index_url: str | None = None, limit: int | None = None,
    where: str | None = None, view: str | None = None, columns: Sequence[str] | None = None,
    allow_unfinished: bool = False, opened: OpenSet | None = None, more: Callable[[int], None] = lambda _: None,
) -> Iterator[SampleEntry]:  # fmt: skip
    """Yield at most ``limit`` samples in the order of the dataset; sample tables are loaded when needed.

    Args:
        urls: Shards, as for ``StreamingDataset``.
        storage: Their store.
        index_url: Location of the index, if not beside the shards.
        limit: Maximum number of samples; None: all.
        where: Only samples that meet this condition.
        view: Only samples of this saved view.
        columns: Columns whose values are told, also late ones; None: all of the sample tables.
        allow_unfinished: List what is there of a set that is not whole.
        opened: The shards, if they are open already.
        more: Called at first with how many samples there are beyond ``limit``.

    Raises:
        ConfigError: A column or the view does not exist, or no sample is kept.
        IndexMissingError: As :func:`info`.
        NotFoundError: Nothing matches ``urls``.
    """
    if limit == 0:
        return
    shards = opened or open_set(urls, storage, index_url, allow_unfinished=allow_unfinished)
    kept = shards.kept(storage, where=where, view=view)
    late = shards.late_columns(storage, columns or ())
    _check_known(shards, storage, {*(columns or ())} - late.keys())
    total = shards.chunks.total_samples if kept is None else kept.table.total_samples
    left = total if limit is None else limit
    more(max(0, total - left))
    parts = late_parts(shards, storage)
    with contextlib.closing(tables_of(shards, storage)) as tables:
        for position, (first, url, table) in enumerate(tables):
            rows = np.arange(table.num_samples)
            if kept is not None:
                rows = np.flatnonzero(kept.mask(position))
            values: dict[str, Values] = dict(table.columns)
            if rows.size:
                values |= shards.late_values(storage, position, late.values())
            if columns is not None:
                values = {name: values[name] for name in columns if name in values}
            added = parts.of(position) if rows.size and parts is not None else ()
            for number in rows[:left].tolist():
                yield _entry(first + number, url, table.lookup(number), values, number, added)
            left -= len(rows)
            if left <= 0:
                return


def _check_known(shards: OpenSet, storage: Storage, names: AbstractSet[str]) -> None:
    """Refuse columns that no sample table has; usually the first table has all of them.

    Raises:
        ConfigError: No sample table has one of the columns.
    """
    there: set[str] = set()
    with contextlib.closing(tables_of(shards, storage)) as tables:
        while not names <= there:
            table = next(tables, None)
            if table is None:
                raise unknown_column(min(names - there), {*there, *late_names(storage, shards.as_opened)}, "--columns")
            there.update(table[2].columns)


def _entry(
    number: int, url: str, place: SampleLocation, columns: Mapping[str, pa.Array], row: int, late: Sequence[LatePart]
) -> SampleEntry:  # fmt: skip
    there = {**place.fields} | {part.name: span for part in late if (span := part.place(row)) is not None}
    sizes = {name: end - start for name, (start, end) in there.items()}
    values = {name: column[row].as_py() for name, column in columns.items()}
    return SampleEntry(number=number, shard=url, key=place.key, fields=sizes, columns=values)


def describe_sample(
    url: str, sample: str, *, storage: Storage, index_url: str | None = None, allow_unfinished: bool = False
) -> SampleView:
    """Return one sample, by its key or its number, with all its columns and the bytes of its fields.

    Raises:
        NotFoundError: There is no such sample.
    """
    found = _find(url, sample, storage, index_url, allow_unfinished=allow_unfinished)
    late = found.shards.late_values(storage, found.position, found.shards.late_columns(storage).values())
    added = LateParts(found.shards, storage).of(found.position)
    entry = found.entry({**found.table.columns, **late}, added)
    payloads = {name: bytes(storage.read(entry.shard, *span)) for name, span in found.place.fields.items()}
    for part in added:
        if part.name in entry.fields:
            payloads[part.name] = bytes(storage.read(part.url, *(part.place(found.row) or (0, 0))))
    return SampleView(entry=entry, payloads=payloads)


def cat_field(
    url: str, sample: str, field: str, *, storage: Storage, index_url: str | None = None, allow_unfinished: bool = False
) -> bytes:
    """Return the bytes of one field of one sample; only these are read.

    Raises:
        NotFoundError: There is no such sample, or it has no such field.
    """
    found = _find(url, sample, storage, index_url, allow_unfinished=allow_unfinished)
    place, shard = found.place, found.shards.urls[found.position]
    if field not in place.fields:
        for part in LateParts(found.shards, storage).of(found.position):
            if part.name == field and (span := part.place(found.row)) is not None:
                return bytes(storage.read(part.url, *span))
        raise NotFoundError(f"{shard}: sample {place.key!r} has no field {field!r}; it has {', '.join(place.fields)}")
    return bytes(storage.read(shard, *place.fields[field]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundSample:
    """A sample: its set, the position of its shard in the set, the shard's table, and the sample's row in it."""

    shards: OpenSet
    position: int
    first: int
    table: SampleTable
    row: int

    @property
    def place(self) -> SampleLocation:
        """Location of its fields."""
        return self.table.lookup(self.row)

    def entry(self, columns: Mapping[str, pa.Array], late: Sequence[LatePart] = ()) -> SampleEntry:
        """Return its line of a listing, with values from these columns and late fields of its shard."""
        return _entry(self.first + self.row, self.shards.urls[self.position], self.place, columns, self.row, late)


def _find(url: str, sample: str, storage: Storage, index_url: str | None, *, allow_unfinished: bool) -> _FoundSample:
    """Find a sample by its key, or else, if ``sample`` is a number, by its number (from 0)."""
    shards = open_set([url], storage, index_url, allow_unfinished=allow_unfinished)
    with contextlib.closing(tables_of(shards, storage, READ_THREADS)) as tables:
        for position, (first, _, table) in enumerate(tables):
            if sample in (keys := list(table.keys)):
                return _FoundSample(shards=shards, position=position, first=first, table=table, row=keys.index(sample))
    total = shards.chunks.total_samples
    if sample.isdecimal() and int(sample) < total:
        ends = np.cumsum([shard.num_samples for shard in shards.chunks.shards])
        position = int(np.searchsorted(ends, int(sample), side="right"))
        table = table_of(shards, position, storage)
        first = int(ends[position]) - table.num_samples
        return _FoundSample(shards=shards, position=position, first=first, table=table, row=int(sample) - first)
    raise NotFoundError(
        f"{redact(url)}: no sample has the key {sample!r}; there are {counted(total, 'sample')}, see "
        f"`shard_tools ls {shell_place(url)}`"
    )


def show_info(report: DataSetInfo) -> None:
    """Print totals, and a table of fields."""
    mean = report.num_bytes / report.num_samples if report.num_samples else 0
    click.echo(f"shards    {report.num_shards:,}")
    click.echo(f"samples   {report.num_samples:,}")
    click.echo(f"bytes     {report.num_bytes:,} ({format_bytes(report.num_bytes)}, {format_bytes(mean)} a sample)")
    click.echo(f"chunks    {report.num_chunks:,}")
    click.echo(f"index     {report.index}")
    if report.fingerprint:
        click.echo(f"print     {report.fingerprint}")
    for name, num_shards in report.videos.items():
        click.echo(f"videos    {plain(name)}: indexed in {num_shards:,} of {counted(report.num_shards, 'shard')}")
    for view in report.views:
        click.echo(f"view      {plain(view.name)}: {view.num_kept:,} of {counted(view.num_samples, 'sample')}")
    if report.columns:
        show_table(
            ("column", "samples", "type", "min", "max"),
            [
                (
                    f"{column.name}{' (late)' if column.version else ''}", f"{column.num_values:,}", column.type,
                    *("" if one is None else f"{one:,}" for one in (column.min, column.max)),
                )
                for column in report.columns
            ],
        )  # fmt: skip
    if report.fields:
        sizes = (
            (one.num_bytes, one.num_bytes / one.num_samples, one.min_bytes, one.max_bytes) for one in report.fields
        )
        show_table(
            ("field", "samples", "bytes", "mean", "min", "max"),
            [
                (f"{one.name}{' (late)' if one.is_late else ''}", f"{one.num_samples:,}", *map(format_bytes, size))
                for one, size in zip(report.fields, sizes, strict=True)
            ],
        )  # fmt: skip
    show_findings(report.findings)


def show_set_line(one: SetEntry) -> None:
    """Print one of several sets."""
    sizes = (counted(one.num_samples, "sample"), counted(one.num_shards, "shard"), format_bytes(one.num_bytes))
    click.echo("\t".join((plain(one.url), ", ".join(one.kinds), *sizes)))


def show_sample_line(sample: SampleEntry, *, long: bool, with_columns: bool) -> None:
    """Print one line of ``ls``."""
    fields = " ".join(sample.fields)
    parts = [sample.key, fields]
    if long:
        fields = "  ".join(f"{field}:{size}" for field, size in sample.fields.items())
        parts = [str(sample.number), plain_place(sample.shard), sample.key, fields]
    if with_columns:
        parts.append("  ".join(f"{name}={_value(value)}" for name, value in sample.columns.items()))
    click.echo("\t".join(map(plain, parts)))


def _value(value: object) -> str:
    """Return a column's value as it is written in a condition of ``--where``."""
    if value is None or isinstance(value, bool):
        return {None: "NULL", True: "TRUE", False: "FALSE"}[value]
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def show_sample(sample: SampleView) -> None:
    """Print one sample: text fields as text, others by their sizes."""
    shard = plain_place(sample.entry.shard)
    click.echo(f"key    {plain(sample.entry.key)}\nnumber {sample.entry.number}\nshard  {shard}")
    if sample.entry.columns:
        click.echo(
            "".join(f"column {plain(name)} = {plain(_value(value))}\n" for name, value in sample.entry.columns.items()),
            nl=False,
        )
    for name, payload in sample.payloads.items():
        click.echo(f"--- {plain(name)} ({format_bytes(len(payload))})")
        if is_binary(payload):
            fact = sample.facts.get(name, "")
            click.echo(f"{plain(fact)}\n" * bool(fact) + f"(binary; write it out with --field {shell_word(name)})")
        else:
            text = payload.decode()
            more = f"\n… {len(text) - _PREVIEW_CHARACTERS:,} characters more"
            click.echo(text[:_PREVIEW_CHARACTERS] + (more if len(text) > _PREVIEW_CHARACTERS else ""))


def is_binary(payload: bytes) -> bool:
    """Return whether ``payload`` is not text that a terminal can show."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return True
    return _BINARY.search(text.replace("\r\n", "\n")) is not None
