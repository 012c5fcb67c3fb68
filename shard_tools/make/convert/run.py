"""Write a source's records through the writer: the command ``convert``."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import click

from shard_tools.make.convert.base.records import ON_ERROR, ShardOptions, Skipped, Source, SourceOptions
from shard_tools.make.convert.left_out import OnError, Sifted
from shard_tools.make.convert.pack import Destination, pack, refuse_overlap
from shard_tools.make.convert.recode import ImageOptions, Reencoded
from shard_tools.make.convert.sources import LAYOUTS, open_source
from shard_tools.running.printing import show_earlier
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report, plain, plain_place
from streaming.common.arguments import checked_limit, counted, did_you_mean, format_bytes
from streaming.common.inflate import MAX_GZIP_RATIO
from streaming.errors import ConfigError, shell_word
from streaming.shards.schema.value import Schema
from streaming.storage import Storage, redact

_SHOWN_SKIPPED = 10
_LOOKED_AT = 1000  # records read to find the columns, if each may have its own
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions(ShardOptions):
    """Options for making samples from the records of another layout, from their bytes or their tokens.

    Attributes:
        kind: The source's layout, or ``"auto"``.
        key_field: The field that holds keys; ``"number"`` counts; None: what is usual for the layout.
        fields: (column, extension) pairs: columns to be stored as fields of their own.
        columns: Metadata that the sample table shall hold, in addition to those that the layout gives it.
        keep_order: Do not shuffle what usually is shuffled: folders of several classes.
        max_gzip_ratio: A ``.tar.gz`` that inflates to more than so many times its size is refused.
        allow_unfinished: Take what is there of shards that are still being written.
        part: The split to take, of a source that has several.
        config: The configuration to take, of a source that has several.
        unlike_columns: Take files of unlike columns as they are, and log it.
        on_error: ``"raise"``: an input that gives no sample is an error; ``"skip"``: it is left out and listed.
        document_token: The id between documents of a stream of ids, or ``"none"``.
        max_bad: With ``"skip"``, most inputs left out so: a number, or a share as a float; None: any number.
    """

    kind: str = "auto"
    key_field: str | None = None
    fields: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    keep_order: bool = False
    max_gzip_ratio: float = MAX_GZIP_RATIO
    allow_unfinished: bool = False
    part: str | None = None
    config: str | None = None
    unlike_columns: bool = False
    document_token: str | None = None
    on_error: str = "raise"
    max_bad: float | None = None

    def __post_init__(self) -> None:
        """Reject options that contradict each other.

        Raises:
            ConfigError: They do.
        """
        if self.keep_order and self.shuffle_seed is not None:
            raise ConfigError(f"--shuffle {self.shuffle_seed}: the order cannot be kept, too; give a seed, or none")
        if self.on_error not in ON_ERROR:
            raise ConfigError(f"--on-error {self.on_error!r}: expected one of {', '.join(ON_ERROR)}")
        if self.max_bad is not None and self.on_error != "skip":
            raise ConfigError("--max-bad bounds what --on-error skip leaves out; give both")
        if self.max_bad is not None:
            checked_limit(self.max_bad, name="--max-bad", whole="the inputs")

    def identity(self) -> dict[str, object]:
        """Return what the bytes of the result depend on."""
        fields = [list(pair) for pair in self.fields]
        return ShardOptions.identity(self) | {
            "key_field": self.key_field, "fields": fields, "columns": list(self.columns),
        }  # fmt: skip

    def open(self, source: str | Sequence[str], target: str, storage: Storage, **how: Any) -> Source:
        """Open the source, for shards in ``target``; ``how`` are further fields of ``SourceOptions``.

        Raises:
            ConfigError: Options do not fit the source, or it is the target.
            NotFoundError: There is nothing to read.
        """
        place = Destination.of(target)
        options = SourceOptions(
            fields=self.fields, key_field=self.key_field, shuffle_seed=self.shuffle_seed, keep_order=self.keep_order,
            num_threads=self.workers, exclude=place.directory, max_gzip_ratio=self.max_gzip_ratio,
            allow_unfinished=self.allow_unfinished, part=self.part, config=self.config,
            unlike_columns=self.unlike_columns, document_token=self.document_token,
            **{"tolerant": self.on_error == "skip", **how},
        )  # fmt: skip
        for one in [source] if isinstance(source, str) else source:
            refuse_overlap(one, place)
        return open_source(source, storage, kind=self.kind, options=options)

    @property
    def leaving_out(self) -> OnError:
        """What is done with inputs that give no sample."""
        return OnError(how=self.on_error, max_bad=self.max_bad)

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """Every column that an option names, with the option."""
        return [("--columns", name) for name in self.columns] + [("--field", column) for column, _ in self.fields]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(RecordOptions):
    """Options of a conversion, in addition to :class:`RecordOptions`.

    Attributes:
        classes: Origin of the class numbers (``numbered_classes`` in ``base/class_folders.py``).
        image_folder: Folder of the images of an annotation file.
        images: Options for re-encoding images.
    """

    classes: str | None = None
    image_folder: str | None = None
    images: ImageOptions = field(default_factory=ImageOptions)

    def identity(self) -> dict[str, object]:
        """Return what the bytes of the result depend on."""
        return RecordOptions.identity(self) | ({"images": self.images.identity()} if self.images else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport(Report):
    """The result of a conversion.

    Attributes:
        kind: The source's format.
        target: Location of the shards.
        num_shards: Number of shards in the target now.
        num_samples: Number of samples in the target now.
        num_bytes: Total size of all shards.
        num_resumed_samples: Number of samples that an earlier run had written.
        was_complete: Whether an earlier run had written everything, so that this one wrote nothing.
        changed: Inputs that changed since an earlier run; their samples, and all that follow, are made again.
        classes: Class numbers, if the source has classes.
        classes_from: Origin of the class numbers; "" if it is the source alone.
        shuffle_seed: The seed by which records were shuffled; None: they keep the source's order.
        skipped: What was left out of the source.
        left_out: Records that are left out since they cannot be read, by reason; by earlier runs, too.
        remarks: What is odd about samples, and about how many; of earlier runs, too.
        seconds: Wall time of this run.
    """

    kind: str
    target: str
    num_shards: int
    num_samples: int
    num_bytes: int
    num_resumed_samples: int
    was_complete: bool
    changed: tuple[str, ...]
    classes: Mapping[str, int]
    classes_from: str
    shuffle_seed: int | None
    skipped: tuple[Skipped, ...]
    left_out: Mapping[str, int]
    remarks: Mapping[str, int]
    seconds: float


def convert(
    source: str | Sequence[str],
    target: str,
    *,
    options: ConvertOptions | None = None,
    storage_options: Mapping[str, object] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Pack ``source`` into shards ``000000.tar``, … in ``target``, with their index.

    Deterministic: the same source and options give the same bytes, whether or not the conversion was interrupted and
    continued. Memory: a few samples per worker, and the writer's buffers.

    Args:
        source: File, folder, pattern or URL of the data; or several of one layout, whose records follow each other.
        target: Folder or prefix for the shards, or a pattern such as ``"out/train-{:06d}.tar"``.
        options: The options.
        storage_options: Options of both stores, as for ``StreamingDataset``.
        executor: Executor on which to read and write, such as a cluster: many shards in parallel, with the same bytes.
        It must have access to source and target.
        progress: Receives the samples and bytes written.

    Raises:
        TargetNotEmptyError: The target holds shards of other work.
        ConfigError: Options do not fit the source.
        DataError: A record cannot be read or stored; the message names file and line. Or inputs give no sample.
        TooManyBadSamplesError: More inputs give no sample than ``max_bad``.
        StorageError: A store failed.
    """
    started = time.monotonic()
    options = options or ConvertOptions()
    storage = Storage(storage_options)
    place = Destination.of(target)
    reader = options.open(source, target, storage, classes=options.classes, images=options.image_folder)
    named = source if isinstance(source, str) else ", ".join(source)
    allowance = options.leaving_out.allowance(reader, redact(named))
    check_columns(reader, options.named_columns)
    written, image_columns = reencoded(reader, options)
    sifted = None
    if options.on_error == "skip":
        if executor is not None:
            raise ConfigError(
                "--on-error skip: what cannot be read is found by reading front to back, in one process; leave "
                "--engine out"
            )
        written = sifted = Sifted(below=written, allowance=allowance)
    classes: dict[str, int] = getattr(reader, "classes", {})
    seed: int | None = getattr(reader, "shuffle_seed", options.shuffle_seed)
    packed = pack(
        written,
        place,
        options,
        command=("convert", named),
        identity=options.identity() | {"shuffle_seed": seed} | _numbers_of(reader, classes),
        columns=tuple(dict.fromkeys((*getattr(reader, "columns", ()), *image_columns, *options.columns))),
        schema=getattr(reader, "meaning", Schema()),
        position=sifted,
        storage_options=storage_options,
        executor=executor,
        progress=progress or NoProgress(),
    )
    return ConvertReport(
        kind=reader.kind,
        target=place.directory,
        num_shards=packed.num_shards,
        num_samples=packed.num_samples,
        num_bytes=packed.num_bytes,
        num_resumed_samples=packed.num_resumed_samples,
        was_complete=packed.was_complete,
        changed=packed.changed,
        classes=classes,
        classes_from=getattr(reader, "classes_from", ""),
        shuffle_seed=seed,
        skipped=tuple({one.path: one for one in (*packed.skipped, *written.skipped)}.values()),
        left_out=packed.left_out,
        remarks=packed.remarks,
        seconds=time.monotonic() - started,
    )


def reencoded(reader: Source, options: ConvertOptions) -> tuple[Source, tuple[str, ...]]:
    """Return the source with re-encoded images, and the columns that this adds.

    Raises:
        ConfigError: The source has no images.
    """
    if not options.images:
        return reader, ()
    if not LAYOUTS[reader.kind].images:
        raise ConfigError(
            f"--image-max-side, --quality and --format re-encode images; a source of kind {reader.kind!r} has none"
        )
    reencoded = Reencoded(below=reader, how=options.images, num_threads=options.workers)
    return reencoded, reencoded.check()


def _numbers_of(reader: Source, classes: Mapping[str, int]) -> dict[str, object]:
    """Return the class numbers as part of the result's identity; nothing if names determine them."""
    if list(classes) == sorted(getattr(reader, "class_names", classes)):
        return {}
    return {"classes": sorted(classes, key=classes.__getitem__)}


def check_columns(reader: Source, named: Sequence[tuple[str, str]], *, in_fields: bool = False) -> None:
    """Check that named columns occur in the first records, since a typo would give an empty column.

    Args:
        reader: The source.
        named: (option, column) pairs.
        in_fields: Records without columns may have fields of these names.

    Raises:
        ConfigError: A table has no such column. If each record has its own columns, this is a warning.
    """
    if not named:
        return
    free = reader.kind in {"jsonl", "json"}
    there: dict[str, None] = {}
    with contextlib.closing(reader.records(0)) as records:
        whole = (record for record in records if record.problem is None)
        for record in itertools.islice(whole, _LOOKED_AT if free else 1):
            there.update(dict.fromkeys(record.metadata or (record.fields if in_fields else ())))
    for option, name in named if there or not free else ():
        if name in there or (option != "--field" and name.partition(".")[0] in there):
            continue
        hint = did_you_mean(name, there)
        what = f"{option}: no column {name!r} in {'the first records' if free else 'the source'}{hint}; there are: "
        what += ", ".join(there) or "none"
        if not there and option == "--columns":
            what += (
                f". Samples of {reader.kind} have fields and no columns. Leave --columns out, and take the values out "
                f"of a field of the set that is written: `shard_tools index TARGET --columns {shell_word(name)}`, or "
                f"`shard_tools column add TARGET NAME --lift {shell_word(name)}`"
            )
        if not free:
            raise ConfigError(what)
        _log.warning("%s", what)


def show_convert(report: ConvertReport) -> None:
    """Print the result of a conversion."""
    show_earlier(report.num_resumed_samples, was_complete=report.was_complete, changed=report.changed)
    click.echo(
        f"{plain_place(report.target)}: {counted(report.num_samples, 'sample')} in "
        f"{counted(report.num_shards, 'shard')}, {format_bytes(report.num_bytes)}, from {report.kind} in "
        f"{report.seconds:.1f} s"
    )
    if report.classes:
        field = "field cls: " if report.kind in {"images", "audio"} else ""
        by = (
            f"numbers of {plain_place(report.classes_from)}"
            if report.classes_from
            else "number by sorted name in this source"
        )
        click.echo(f"classes: {len(report.classes):,} ({field}{by})")
    if report.shuffle_seed is not None:
        click.echo(f"shuffled with seed {report.shuffle_seed}; --shuffle none keeps the order of the source")
    for reason, count in report.left_out.items():
        click.echo(f"left out {counted(count, 'record')}: {plain(reason)}", err=True)
    if report.skipped:
        listed = "inputs left out" if report.left_out else f"left out {counted(len(report.skipped), 'file')}"
        click.echo(f"{listed} of the source:", err=True)
        for entry in report.skipped[:_SHOWN_SKIPPED]:
            click.echo(f"  {plain(entry.path)}: {entry.reason}", err=True)
        if len(report.skipped) > _SHOWN_SKIPPED:
            click.echo(f"  … {len(report.skipped) - _SHOWN_SKIPPED:,} more; --json lists all", err=True)
