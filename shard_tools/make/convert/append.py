"""Add to a set what it does not have yet: the commands ``append`` and ``convert --append``."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shard_tools.make.convert.base.identity import KnownInputs
from shard_tools.make.convert.base.records import NUMBER_KEYS, Growing, Record, Remarks, Source, number_key, runs_of
from shard_tools.make.convert.elsewhere import ShardTarget
from shard_tools.make.convert.journal import Journal, load_inputs, load_journal, load_sources, sources_of
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
from streaming.shards.index.layout import inputs_path
from streaming.shards.schema.kinds import kind_by_name
from streaming.shards.schema.value import Schema
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, join_url, redact

_THREADS = 16
_SHOWN = 3
_SHARD_NUMBER = re.compile(r"([^{}]*?)([0-9]+)(?:-v[0-9a-f]{8})?\.tar")
_MEDIA = {"images": "image", "audio": "audio"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReport(Report):
    """What was added to a set.

    Attributes:
        kind: The source's format.
        target: The set.
        version: The version with what was added; that of before if there was nothing new.
        num_added: Samples added.
        num_known: Inputs of the source that the set has already.
        num_samples: Samples there now.
        num_shards: Shards added.
        num_bytes: Bytes of these.
        new_classes: Names of classes that the set did not have, by field.
        skipped: Files of the source that are no samples.
        remarks: What is odd about new samples, and about how many.
        lacking: Late columns that have no values for what was added.
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
    lacking: tuple[str, ...]
    seconds: float


def append(
    source: str | Sequence[str],
    target: str,
    *,
    kind: str = "auto",
    workers: int = DEFAULT_WORKERS["local"],
    allow_unfinished: bool = False,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> AppendReport:
    """Add the samples of ``source`` to the set in ``target``, and publish its next version.

    Only inputs that the set does not have are read: it knows them by name, and by what its store says of their version,
    else by their checksum. Options are those with which the set was converted; its classes keep their numbers, and new
    ones get the next. What is there is not read, but for the chunk table and the list of inputs.

    Args:
        source: As for ``convert``.
        target: Directory of the set.
        kind: Format of the source; ``"auto"``: as of the set.
        workers: Threads that read.
        allow_unfinished: Take what is there of shards that are still being written.
        storage_options: How to reach both stores.
        progress: Receives the samples and bytes written.

    Raises:
        OvertakenError: Somebody else changed the set meanwhile; nothing was added.
        ConfigError: The set is not one that samples of this source can be added to, or an input of it was changed.
        IndexMissingError, UnfinishedError: There is no whole set with an index.
        DataError: A record cannot be read or stored.
        StorageError: A store failed.
    """
    begun_s = time.monotonic()
    storage, place = Storage(storage_options), Destination.of(target)
    progress = progress or NoProgress()
    head = open_head(storage, place.directory)
    work = _Work.of(storage, head, kind, workers=workers, allow_unfinished=allow_unfinished)
    reader = work.open(source, place, storage)
    schema, added, version, remarks = head.schema, dict[str, ChunkTable](), head.number, Remarks()
    if reader is not None:
        progress.start(total_bytes=reader.num_bytes, total=reader.num_records)
        with SetChange(storage, head, command="append", what=str(source), identity=work.identity(reader)) as change:
            added, schema, version = _added(change, reader, work, storage, storage_options, remarks, progress)
        remarks.log(redact(place.directory))
    lacking = tuple(name for name, column in head.schema.columns.items() if column.is_late) if added else ()
    for name in lacking:
        _log.warning(
            "%s: the late column %s has no values for what was added; add it again before a condition names it",
            redact(place.directory), name,
        )  # fmt: skip
    num_added = sum(one.total_samples for one in added.values())
    return AppendReport(
        kind=work.options.kind if reader is None else reader.kind, target=redact(place.directory), version=version,
        num_added=num_added, num_known=len(work.known.left_out), num_samples=head.table.total_samples + num_added,
        num_shards=len(added), num_bytes=sum(one.shards[0].size_bytes for one in added.values()),
        new_classes=_new_classes(head.schema, schema), skipped=0 if reader is None else len(reader.skipped),
        remarks=dict(remarks.counts), lacking=lacking, seconds=time.monotonic() - begun_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """How samples are added to a set.

    Attributes:
        head: The set.
        options: How its samples are made.
        known: The inputs that it has.
        pattern: Names of its shards.
        numbers_from: Number of the next record, where keys are numbers.
    """

    head: Head
    options: ConvertOptions
    known: KnownInputs
    pattern: str
    numbers_from: int

    @classmethod
    def of(cls, storage: Storage, head: Head, kind: str, **how: Any) -> _Work:
        """Return how samples are added to this set, by the journal of its conversion.

        Raises:
            ConfigError: Its samples are not made of records as they are.
        """
        journal = load_journal(head.home, storage)
        options = ConvertOptions(kind=kind, **how) if journal is None else _options_of(journal, head, kind, how)
        inputs = load_sources(head.home, storage) + load_inputs(head.home, head.inputs, storage)
        names = [shard.name for shard in head.table.shards]
        pattern = _pattern_of(names) if journal is None else str(journal.options["pattern"])
        so_far = max(head.table.total_samples, 0 if journal is None else journal.num_samples or 0)
        return cls(
            head=head, options=options, known=KnownInputs(inputs), pattern=pattern, numbers_from=head.records or so_far
        )

    def open(self, source: str | Sequence[str], place: Destination, storage: Storage) -> Source | None:
        """Open what is new of a source; None: nothing is.

        Raises:
            ConfigError: An input that the set has was changed, or the source means something else.
            NotFoundError: There is no source.
        """
        for one in [source] if isinstance(source, str) else source:
            refuse_overlap(one, place)
        names = self.head.schema.classes.get("cls", ())
        has_classes = self.options.kind in LAYOUTS and LAYOUTS[self.options.kind].classes
        classes = Growing(names) if names and has_classes else None
        try:
            reader = self.options.open(
                source, place.directory, storage, classes=classes, known=self.known, medium_field=self._medium()
            )
        except NotFoundError:
            self._refuse_changed()
            if self.known.left_out:
                return None
            raise
        self._refuse_changed()
        if self.known.left_out and not reader.origins().inputs:
            return None
        self._refuse_mixed(reader)
        check_columns(reader, self.options.named_columns)
        with_added(self.head, _meaning(reader))
        return reader

    def _medium(self) -> str | None:
        """Return the field of the set that holds the files of its medium, if it has one."""
        kind = _MEDIA.get(self.options.kind)
        fields = [name for name in self.head.schema.fields if kind is not None and kind_by_name(name) == kind]
        return fields[0] if len(fields) == 1 else None

    def _refuse_changed(self) -> None:
        changed = sorted(self.known.changed)
        if changed:
            more = f" and {len(changed) - _SHOWN:,} more" if len(changed) > _SHOWN else ""
            raise ConfigError(
                f"{redact(self.head.home)} has {counted(len(changed), 'input')} of these names with other content: "
                f"{plain(', '.join(changed[:_SHOWN]))}{more}. Name new files otherwise, for example by the folder "
                "above theirs; to replace samples, delete them by their keys, and add the new ones under other names"
            )

    def _refuse_mixed(self, reader: Source) -> None:
        """Refuse a source of which only a part is new that cannot be read apart, and files that belong to a sample."""
        inputs = reader.origins().inputs
        if not LAYOUTS[reader.kind].apart:
            again = [one.name for one in inputs if self.known.has(one)]
            self._refuse_changed()
            if again:
                raise ConfigError(
                    f"the set in {redact(self.head.home)} was made of {plain(again[0])} already, and of a source of "
                    f"kind {reader.kind!r} the new part cannot be told; give new records in files of their own"
                )
        if reader.kind == "files":
            stems = {_stem(name) for name in self.known.left_out}
            late = [one.name for one in inputs if _stem(one.name) in stems]
            if late:
                raise ConfigError(
                    f"{plain(late[0])}: its sample is in the set already, without this file "
                    f"({counted(len(late), 'file')} like it); delete the sample by its key and name its files "
                    "otherwise, or convert the source anew"
                )

    def identity(self, reader: Source) -> object:
        """Return what determines the bytes of the new shards."""
        inputs = [[one.name, one.size_bytes, one.version] for one in reader.origins().inputs]
        return [reader.identity(), inputs, self.options.identity(), self.pattern]

    def records(self, reader: Source) -> Generator[Record, None, None]:
        """Yield the new records; those whose keys are numbers go on from the set's."""
        named = self.options.key_field
        counts = named == NUMBER_KEYS or (named is None and LAYOUTS[reader.kind].numbers)
        with contextlib.closing(reader.records(0)) as records:
            for number, record in enumerate(records):
                yield replace(record, key=number_key(self.numbers_from + number)) if counts else record

    def first_shard(self) -> int:
        """Return the number of the next shard."""
        begin, end = self.pattern.find("{"), self.pattern.rfind("}") + 1
        names = (shard.name for shard in self.head.table.shards)
        return next_number(names, self.pattern[:begin], self.pattern[end:])


def _added(
    change: SetChange, reader: Source, work: _Work, storage: Storage, storage_options: Mapping[str, object] | None,
    remarks: Remarks, progress: Progress,
) -> tuple[dict[str, ChunkTable], Schema, int]:  # fmt: skip
    """Write the new shards and publish them; return their tables, what the set means, and the version's number."""
    written, image_columns = reencoded(reader, work.options)
    columns = dict.fromkeys((*getattr(reader, "columns", ()), *image_columns, *work.options.columns))
    target = ShardTarget(
        pattern=join_url(change.head.home, change.named(work.pattern)), options=work.options,
        columns={name: Lift(name) for name in columns}, storage_options=storage_options, schema=_meaning(reader),
    )  # fmt: skip
    first, number = work.first_shard(), 0
    with target.writer(first) as writer, contextlib.closing(work.records(written)) as records:
        writer.on_shard = lambda *_: change.writes([writer.shards[-1].rpartition("/")[2]])
        for run in runs_of(records):
            write_run(writer, run, records, ())
            for record in run:
                remarks.add(record)
            progress.advance(num_bytes=sum(len(one) for record in run for one in record.fields.values()), num=len(run))
            number += len(run)
        added, meaning = writer.finish()
    if not added:
        raise DataError(f"the source holds no records: {reader.identity()}; check its path, or --from")
    origins = reader.origins()
    origins.check(_THREADS)
    storage.put(join_url(change.head.home, inputs_path(change.work)), sources_of([*origins.inputs]))
    schema = with_added(change.head, meaning)
    version = change.publish(
        ChunkTable.merged(change.head.table.by_shard(), added), schema=schema, inputs=(change.work,),
        records=work.numbers_from + number,
    )  # fmt: skip
    return added, schema, version


def _meaning(reader: Source) -> Schema:
    meaning: Schema = getattr(reader, "meaning", Schema())
    return meaning


def _options_of(journal: Journal, head: Head, kind: str, how: Mapping[str, Any]) -> ConvertOptions:
    """Return the options with which a set was converted.

    Raises:
        ConfigError: It was made by another command.
    """
    said, made_of = journal.options, str(journal.source.get("kind"))
    if made_of not in LAYOUTS or "key_field" not in said or "tokenizer" in said:
        raise ConfigError(
            f"{redact(head.home)}: `shard_tools convert` did not make this set of records as they are, so it is not "
            "known how to make more of its samples; write them with ShardWriter(…, append=True)"
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
    """Return the pattern of the names of shards, by the last of them."""
    found = next((one for one in map(_SHARD_NUMBER.fullmatch, reversed(names)) if one is not None), None)
    return "{:06d}.tar" if found is None else f"{found[1]}{{:0{len(found[2])}d}}.tar"


def _stem(name: str) -> str:
    """Return what the key of a file's sample is made of."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _new_classes(before: Schema, after: Schema) -> dict[str, tuple[str, ...]]:
    known = before.classes
    found = {field: tuple(n for n in names if n not in known.get(field, ())) for field, names in after.classes.items()}
    return {field: names for field, names in found.items() if names}
