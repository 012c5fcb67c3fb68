"""Add new inputs to a set: the commands ``append`` and ``convert --append``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shard_tools.make.convert.base.identity import KnownInputs, Origins
from shard_tools.make.convert.base.records import (
    NUMBER_KEYS,
    Growing,
    LeavesOut,
    NoRecordError,
    Record,
    Remarks,
    ShardOptions,
    Skipped,
    Source,
    number_key,
    runs_of,
)
from shard_tools.make.convert.elsewhere import ShardTarget
from shard_tools.make.convert.journal import (
    SOURCES,
    Journal,
    has_file,
    lists_inputs,
    load_inputs,
    load_journal,
    load_sources,
    sources_of,
)
from shard_tools.make.convert.left_out import Allowance, OnError, Sifted
from shard_tools.make.convert.media.metadata import is_metadata
from shard_tools.make.convert.pack import Destination, Lift, refuse_overlap, write_run
from shard_tools.make.convert.recode import ImageOptions
from shard_tools.make.convert.run import ConvertOptions, check_columns, reencoded
from shard_tools.make.convert.sources import LAYOUTS
from shard_tools.make.write.change import SetChange, next_number, open_head, with_added
from shard_tools.running.engine import DEFAULT_WORKERS
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report, plain
from streaming.common.arguments import counted
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.layout import inputs_path, without_work
from streaming.shards.schema.kinds import kind_by_name
from streaming.shards.schema.value import Schema
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, join_url, redact, split_url

_THREADS = 16
_SHOWN = 3
_FEWEST_DIGITS = 3
"""Numbers of fewer digits soon get one more, and then sort before those that are there."""
_MEDIA = {"images": "image", "audio": "audio"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReport(Report):
    """The result of appending to a set.

    Attributes:
        kind: The source's format.
        target: The set.
        version: The version with the new samples; the previous one if there were none.
        num_added: Number of samples added.
        num_known: Number of inputs of the source that the set already has.
        num_samples: Number of samples of the set now.
        num_shards: Number of shards added.
        num_bytes: Total size of these shards.
        new_classes: Names of classes that the set did not have, by field.
        skipped: Files of the source that are not samples.
        remarks: Number of new samples by remark.
        left_out: Number of records that are left out, by reason.
        lacking: Late columns and fields that have no values for the new samples.
        seconds: Wall time.
    """

    kind: str
    target: str
    version: int
    num_added: int
    num_known: int
    num_samples: int
    num_shards: int
    num_bytes: int
    new_classes: dict[str, tuple[str, ...]]
    skipped: int
    remarks: Mapping[str, int]
    left_out: Mapping[str, int]
    lacking: tuple[str, ...]
    seconds: float


def append(
    source: str | Sequence[str],
    target: str,
    *,
    kind: str = "auto",
    workers: int = DEFAULT_WORKERS["local"],
    allow_unfinished: bool = False,
    on_error: str = "raise",
    max_bad: float | None = None,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> AppendReport:
    """Add the samples of ``source`` to the set in ``target``, and publish its next version.

    Only inputs that the set does not have are read: it knows its inputs by name, and by the version that their store
    reports, or else by checksum. The set keeps the options of its conversion; its classes keep their numbers, and new
    classes get the next ones. Of the set, only the chunk table and the list of inputs are read.

    Args:
        source: As for ``convert``.
        target: Directory of the set.
        kind: Format of the source; ``"auto"``: as of the set.
        workers: Threads that read.
        allow_unfinished: Take what is there of shards that are still being written.
        on_error: As for ``convert``: inputs that give no sample are an error, or (``"skip"``) left out and listed.
        max_bad: With ``"skip"``, most inputs left out so: a number, or a share as a float; None: any number.
        storage_options: How to reach both stores.
        progress: Receives the samples and bytes written.

    Raises:
        OvertakenError: Somebody else changed the set meanwhile; nothing was added.
        ConfigError: The set is not one that samples of this source can be added to, or an input of it was changed.
        IndexMissingError, UnfinishedError: There is no whole set with an index.
        DataError: A record cannot be read or stored, or inputs give no sample.
        TooManyBadSamplesError: More inputs give no sample than ``max_bad``.
        StorageError: A store failed.
    """
    begun_s = time.monotonic()
    storage, place = Storage(storage_options), Destination.of(target)
    head = open_head(storage, place.directory)
    journal = load_journal(head.home, storage)
    how: dict[str, Any] = {"workers": workers, "allow_unfinished": allow_unfinished}
    how |= {"on_error": on_error, "max_bad": max_bad}
    options = ConvertOptions(kind=kind, **how) if journal is None else _options_of(journal, head, kind, how)
    work = Appending.of(storage, head, options, journal, 0 if journal is None else journal.num_records)
    opened = work.opened(source, place, lambda: _open(work, options, source, place, storage), options.leaving_out)
    if opened is None:
        return work.report(None, None, begun_s, options.kind)
    reader, allowance = opened
    check_columns(reader, options.named_columns)
    numbered = work.numbered(reader, options.key_field)
    written, image_columns = reencoded(numbered, options)
    if options.leaving_out.skips:
        written = Sifted(below=written, allowance=allowance, first=work.numbers_from)
    columns = (*getattr(reader, "columns", ()), *image_columns, *options.columns)
    added = work.add(
        written, numbered, source, columns=columns, meaning=getattr(reader, "meaning", Schema()), storage=storage,
        storage_options=storage_options, progress=progress or NoProgress(),
    )  # fmt: skip
    return work.report(reader, added, begun_s, options.kind)


def _open(
    work: Appending, options: ConvertOptions, source: str | Sequence[str], place: Destination, storage: Storage
) -> Source:  # fmt: skip
    names = work.head.schema.classes.get("cls", ())
    has_classes = options.kind in LAYOUTS and LAYOUTS[options.kind].classes
    classes = Growing(names) if names and has_classes else None
    medium = _MEDIA.get(options.kind)
    fields = [name for name in work.head.schema.fields if medium is not None and kind_by_name(name) == medium]
    field = fields[0] if len(fields) == 1 else None
    return options.open(source, place.directory, storage, classes=classes, known=work.known, medium_field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """An addition to a set: the chunk tables of the new shards, the set's new schema, its version, and remarks."""

    tables: Mapping[str, ChunkTable]
    schema: Schema
    version: int
    remarks: Remarks


@dataclass(frozen=True, slots=True, kw_only=True)
class Appending:
    """The state needed to add samples to a set.

    Attributes:
        head: The set.
        options: The options of its conversion.
        known: The inputs that it has.
        pattern: Pattern of the names of its shards.
        numbers_from: Number of the next record, if keys are numbers.
    """

    head: Head
    options: ShardOptions
    known: KnownInputs
    pattern: str
    numbers_from: int

    @classmethod
    def of(
        cls, storage: Storage, head: Head, options: ShardOptions, journal: Journal | None, records: int = 0
    ) -> Appending:
        """Return the state needed to add samples to this set.

        Args:
            storage: The store.
            head: The set.
            options: The options of its conversion.
            journal: The journal of its conversion, if it has one.
            records: Number of records that it was made from, if this may differ from the number of samples.

        Raises:
            ConfigError: It does not say which inputs it was made of, as copies do not.
        """
        sources = load_sources(head.home, storage)
        if not sources and (lists_inputs(journal) or has_file(head.home, SOURCES, storage)):
            raise ConfigError(
                f"{redact(head.home)}: the list of the inputs that it was made of is missing (sources.parquet, which "
                "copies leave out), so new ones cannot be distinguished from those that it has. Append to the set "
                "that was copied, and copy it again; or write the new samples with ShardWriter(…, append=True)"
            )
        inputs = sources + load_inputs(head.home, head.inputs, storage)
        pattern = (
            _pattern_of([shard.name for shard in head.table.shards]) if journal is None
            else str(journal.options["pattern"])
        )  # fmt: skip
        so_far = max(head.table.total_samples, 0 if journal is None else journal.num_samples or 0, records)
        return cls(
            head=head, options=options, known=KnownInputs(inputs), pattern=pattern, numbers_from=head.records or so_far
        )

    def opened(
        self, source: str | Sequence[str], place: Destination, opens: Callable[[], Source], leaving_out: OnError
    ) -> tuple[Source, Allowance] | None:
        """Open the new inputs of a source, and return how many of them may be left out; None: there are none.

        Args:
            source: The source.
            place: The set.
            opens: Opens the source without the inputs that are ``known``.
            leaving_out: What is done with inputs that give no sample.

        Raises:
            ConfigError: An input of the set was changed, or the schema of the source contradicts the set's.
            NotFoundError: There is no source.
            DataError, TooManyBadSamplesError: Inputs give no sample, or too many.
        """
        for one in [source] if isinstance(source, str) else source:
            refuse_overlap(one, place)
        named = redact(source if isinstance(source, str) else ", ".join(source))
        try:
            reader = opens()
        except NotFoundError as error:
            self.refuse_changed()
            if not self.known.left_out:
                raise
            if isinstance(error, NoRecordError):
                leaving_out.allowance(error, named, len(self.known.left_out))
            return None
        self.refuse_changed()
        allowance = leaving_out.allowance(reader, named, len(self.known.left_out))
        if self.known.left_out and not reader.origins().inputs:
            return None
        self._refuse_mixed(reader)
        return reader, allowance

    def numbered(self, reader: Source, named: str | None) -> Numbered:
        """Return the records numbered after those of the set; ``named`` is the field of their keys, if there is one."""
        counts = named == NUMBER_KEYS or (named is None and LAYOUTS[reader.kind].numbers)
        return Numbered(reader, self.numbers_from, counts=counts)

    def add(
        self, reader: Source, numbered: CountedRecords, source: str | Sequence[str], *, columns: Sequence[str],
        meaning: Schema, storage: Storage, storage_options: Mapping[str, object] | None, progress: Progress,
    ) -> Added:  # fmt: skip
        """Write the records of a source, and publish them.

        Args:
            reader: The samples, which are made from the records.
            numbered: The records, numbered by :meth:`numbered`.
            source: The source as the user named it.
            columns: Metadata of the records to store in the sample tables.
            meaning: Schema of the records.
            storage: The store.
            storage_options: Its options.
            progress: Receives samples and bytes.

        Raises:
            OvertakenError: Another change of the set was published meanwhile; nothing was added.
            ConfigError: The schema of the records contradicts the set's.
            DataError: A record cannot be read or stored, or there are none.
        """
        with_added(self.head, meaning)
        progress.start(total_bytes=reader.num_bytes, total=reader.num_records)
        remarks, what = Remarks(), source if isinstance(source, str) else ", ".join(source)
        with SetChange(
            storage, self.head, command="append", what=what, identity=self._identity(reader, columns)
        ) as change:
            target = ShardTarget(
                pattern=join_url(self.head.home, change.named(self.pattern)), options=self.options,
                columns={name: Lift(name) for name in dict.fromkeys(columns)}, storage_options=storage_options,
                schema=meaning,
            )  # fmt: skip
            tables, meaning = self._write(reader, target, change, remarks, progress)
            if not tables:
                raise DataError(f"the source holds no records: {reader.identity()}; check its path, or --from")
            origins = reader.origins()
            origins.check(_THREADS)
            remarks.left_out.update(reader.left_out_last() if isinstance(reader, LeavesOut) else ())
            storage.put(join_url(self.head.home, inputs_path(change.work)), sources_of([*origins.inputs]))
            schema = with_added(change.head, meaning)
            version = change.publish(
                ChunkTable.merged(change.head.table.by_shard(), tables), schema=schema, inputs=(change.work,),
                records=numbered.next,
            )  # fmt: skip
        remarks.log(redact(self.head.home))
        return Added(tables=tables, schema=schema, version=version, remarks=remarks)

    def _write(
        self, reader: Source, target: ShardTarget, change: SetChange, remarks: Remarks, progress: Progress
    ) -> tuple[dict[str, ChunkTable], Schema]:  # fmt: skip
        begin, end = self.pattern.find("{"), self.pattern.rfind("}") + 1
        names = (shard.name for shard in self.head.table.shards)
        first = next_number(names, self.pattern[:begin], self.pattern[end:])
        with target.writer(first) as writer, contextlib.closing(reader.records(self.numbers_from)) as records:
            writer.on_shard = lambda *_: change.writes([split_url(writer.shards[-1])[1]])
            for run in runs_of(records):
                write_run(writer, run, records, ())
                for record in run:
                    remarks.add(record)
                num_bytes = sum(len(one) for record in run for one in record.fields.values())
                progress.advance(num_bytes=num_bytes, num=len(run))
            return writer.finish()

    def report(self, reader: Source | None, added: Added | None, begun_s: float, kind: str) -> AppendReport:
        """Return the report of an addition, or of none (None). Late columns that lack values now are logged."""
        head = self.head
        tables = {} if added is None else added.tables
        late = {name: "column" for name, column in head.schema.columns.items() if column.is_late}
        late |= dict.fromkeys(head.schema.late_fields, "field")
        lacking = tuple(late) if tables else ()
        for name in lacking:
            before = "a condition names it" if late[name] == "column" else "it is read"
            _log.warning(
                "%s: the late %s %s has no values for what was added; run the command that added it again, which makes "
                "only what is missing, before %s",
                redact(head.home), late[name], name, before,
            )  # fmt: skip
        num_added = sum(one.total_samples for one in tables.values())
        return AppendReport(
            kind=kind if reader is None else reader.kind, target=redact(head.home),
            version=head.number if added is None else added.version, num_added=num_added,
            num_known=len(self.known.left_out), num_samples=head.table.total_samples + num_added,
            num_shards=len(tables), num_bytes=sum(one.shards[0].size_bytes for one in tables.values()),
            new_classes={} if added is None else _new_classes(head.schema, added.schema),
            skipped=0 if reader is None else len(reader.skipped),
            remarks={} if added is None else dict(added.remarks.counts),
            left_out={} if added is None else dict(added.remarks.left_out), lacking=lacking,
            seconds=time.monotonic() - begun_s,
        )  # fmt: skip

    def refuse_changed(self) -> None:
        """Refuse inputs that the set has in another version.

        Raises:
            ConfigError: There is one.
        """
        changed = sorted(self.known.changed)
        if changed:
            more = f" and {len(changed) - _SHOWN:,} more" if len(changed) > _SHOWN else ""
            raise ConfigError(
                f"{redact(self.head.home)} has {counted(len(changed), 'input')} of these names with other content: "
                f"{plain(', '.join(changed[:_SHOWN]))}{more}. Name new files otherwise, for example by the folder "
                "above theirs; to replace samples, delete them by their keys, and add the new ones under other names"
            )

    def _refuse_mixed(self, reader: Source) -> None:
        """Refuse a partly new source that cannot be read in parts, and new files of samples that the set has."""
        inputs = reader.origins().inputs
        if not LAYOUTS[reader.kind].apart:
            again = [one.name for one in inputs if self.known.has(one)]
            self.refuse_changed()
            if again:
                raise ConfigError(
                    f"the set in {redact(self.head.home)} was made of {plain(again[0])} already, and the new part of a "
                    f"source of kind {reader.kind!r} cannot be identified; give new records in separate files"
                )
        noted = sorted(filter(is_metadata, self.known.left_out)) if reader.kind in _MEDIA else []
        if noted and not any(is_metadata(one.name) for one in inputs):
            raise ConfigError(
                f"{plain(inputs[0].name)}: no row of {plain(noted[0])} names it ({counted(len(inputs), 'new file')}); "
                "give new files in a folder of their own, with a metadata file of their own"
            )
        if reader.kind == "files":
            stems = {_stem(name) for name in self.known.left_out}
            late = [one.name for one in inputs if _stem(one.name) in stems]
            if late:
                raise ConfigError(
                    f"{plain(late[0])}: its sample is in the set already, without this file "
                    f"({counted(len(late), 'file')} like it); delete the sample by its key and name its files "
                    "otherwise, or convert the whole source again, to another target"
                )

    def _identity(self, reader: Source, columns: Sequence[str]) -> object:
        """Return the facts that determine the bytes of the new shards."""
        inputs = [[one.name, one.size_bytes, one.version] for one in reader.origins().inputs]
        return [reader.identity(), inputs, self.options.identity(), self.pattern, list(columns)]


class CountedRecords(Protocol):
    """Records that are counted while they are read.

    Attributes:
        next: Number of the record after the latest one.
    """

    next: int


class Numbered:
    """A source whose records, and keys that are numbers, are numbered from ``first`` on.

    Args:
        below: The source.
        first: Number of its first record.
        counts: Whether keys are numbers of records.

    Attributes:
        next: Number of the record after the latest one.
    """

    def __init__(self, below: Source, first: int, *, counts: bool) -> None:
        self._below, self._first, self._counts = below, first, counts
        self.next = first

    @property
    def kind(self) -> str:
        """As below."""
        return self._below.kind

    @property
    def num_records(self) -> int | None:
        """As below."""
        return self._below.num_records

    @property
    def num_bytes(self) -> int:
        """As below."""
        return self._below.num_bytes

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """As below."""
        return self._below.skipped

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """As below."""
        return self._below.fields

    def identity(self) -> dict[str, object]:
        """As below."""
        return self._below.identity()

    def origins(self) -> Origins:
        """As below."""
        return self._below.origins()

    def left_out_last(self) -> Sequence[str]:
        """As below."""
        return self._below.left_out_last() if isinstance(self._below, LeavesOut) else ()

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the records from number ``start`` on."""
        with contextlib.closing(self._below.records(max(0, start - self._first))) as records:
            for number, record in enumerate(records, start):
                self.next = number + 1
                yield replace(record, key=number_key(number)) if self._counts else record


def is_of_tokens(journal: Journal | None) -> bool:
    """Return whether a set was made by a tokenizer, or from token ids."""
    return journal is not None and "tokenizer" in journal.options and "documents" in journal.options


def _options_of(journal: Journal, head: Head, kind: str, how: Mapping[str, Any]) -> ConvertOptions:
    """Return the options of a set's conversion.

    Raises:
        ConfigError: Another command made it.
    """
    said, made_of = journal.options, str(journal.source.get("kind"))
    if is_of_tokens(journal):
        raise ConfigError(
            f"{redact(head.home)}: a set of tokens; add to it from the command line, `shard_tools append`, or by "
            "shard_tools.make.tokens.append"
        )
    if made_of not in LAYOUTS or "key_field" not in said:
        raise ConfigError(
            f"{redact(head.home)}: `shard_tools convert` did not make this set of unchanged records, so it cannot "
            "make more of its samples; write them with ShardWriter(…, append=True)"
        )
    images = dict(said.get("images", {}))
    return ConvertOptions(
        kind=made_of if kind == "auto" else kind, max_bytes=said["max_bytes"], max_samples=said["max_samples"],
        shuffle_seed=said["shuffle_seed"] if LAYOUTS[made_of if kind == "auto" else kind].shuffles else None,
        keep_order=said["shuffle_seed"] is None, key_field=said["key_field"],
        fields=tuple((column, extension) for column, extension in said["fields"]), columns=tuple(said["columns"]),
        images=ImageOptions(**images | ({"fields": tuple(images["fields"])} if images else {})), **how,
    )  # fmt: skip


def _pattern_of(names: Sequence[str]) -> str:
    """Return a pattern of names that sort after all of these: further numbers, if the last name has room for many."""
    last = max(map(without_work, names), default="000000.tar").removesuffix(".tar")
    start = last.rstrip("0123456789")
    digits = len(last) - len(start)
    if {"{", "}"} & set(start):
        return "{:06d}.tar"
    has_room = digits >= _FEWEST_DIGITS and int(last[len(start) :]) < 9 * 10 ** (digits - 1)
    return f"{start}{{:0{digits}d}}.tar" if has_room else f"{last}_{{:06d}}.tar"


def _stem(name: str) -> str:
    """Return the part of a file's name that its sample's key is made from."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _new_classes(before: Schema, after: Schema) -> dict[str, tuple[str, ...]]:
    known = before.classes
    found = {field: tuple(n for n in names if n not in known.get(field, ())) for field, names in after.classes.items()}
    return {field: names for field, names in found.items() if names}
