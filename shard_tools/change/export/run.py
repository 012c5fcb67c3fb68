"""Export a set: the command ``export``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from shard_tools.change.export import card, dali, energon, lerobot, wids
from shard_tools.change.export.job import ExportJob, ExportOptions, Written
from shard_tools.change.export.parquet import ParquetExport, can_name_classes, part_namer
from shard_tools.change.sets.late import Takes, stored_schemas
from shard_tools.change.sets.open_set import open_set
from shard_tools.make.convert.journal import TargetNotEmptyError
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, NotFoundError
from streaming.shards.schema.meeting import RESHARD, met
from streaming.storage import Storage, join_url, redact

Files: TypeAlias = "Callable[[ExportJob, Progress], Iterator[tuple[str, bytes]]]"
_OF_PARQUET = frozenset({"--where", "--view", "--fields", "--columns"})
_OF_EPISODES = frozenset({"--where", "--view"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport(Report):
    """The result of an export.

    Attributes:
        to: The format.
        target: Location of the files.
        num_shards: Shards of the set.
        num_samples: Samples that the other program will read.
        files: Names of the exported files, below the target.
        num_written: Number of files that this run wrote; the others existed with the same content.
        num_bytes: Bytes of shards that were read; 0 if the index suffices.
        reads_tars: Whether the other program reads the tars themselves.
        seconds: Wall time.
    """

    to: str
    target: str
    num_shards: int
    num_samples: int
    files: tuple[str, ...]
    num_written: int
    num_bytes: int
    reads_tars: bool
    seconds: float


def export(
    urls: Sequence[str], target: str, *, to: str, options: ExportOptions | None = None,
    storage_options: Mapping[str, object] | None = None, progress: Progress | None = None,
) -> ExportReport:  # fmt: skip
    """Write the files that another program needs to read a set. The set itself is never changed.

    ``energon``, ``dali``, ``wids`` and ``card`` write files beside the tars, from the index alone. ``parquet`` and
    ``hf`` write the samples, one file per shard, and ``lerobot`` the episodes of sets that ``convert --from lerobot``
    wrote; an interrupted run continues where it stopped.

    Args:
        urls: Shards, as for ``StreamingDataset``.
        target: Folder or prefix. Energon, and readers of a card, expect it to be that of the shards.
        to: One of ``FORMATS``.
        options: The selection of samples and fields, and other options.
        storage_options: Options of both stores.
        progress: Receives each shard.

    Raises:
        ConfigError: Options do not fit the format, or the other program cannot read this set.
        TargetNotEmptyError: Files of the same names exist with other content.
        NotFoundError: Nothing matches ``urls``.
        DataError: A sample is damaged.
        StorageError: A store failed.
    """
    started, options, progress = time.monotonic(), options or ExportOptions(), progress or NoProgress()
    chosen = FORMATS.get(to)
    if chosen is None:
        raise ConfigError(f"--to {to!r}: expected one of {', '.join(FORMATS)}")
    for name in (one for one in options.of_samples if one not in chosen.takes):
        what = "writes whole episodes" if chosen.takes else "writes about the tars as they are, with all their samples"
        raise ConfigError(f"{name}: --to {to} {what}; write other shards first, with `shard_tools reshard … {name} …`")
    storage = Storage(storage_options)
    opened = open_set(urls, storage, options.index_url, allow_unfinished=options.allow_unfinished, meets=False)
    schemas = stored_schemas(opened, storage, _takes(chosen, options))
    said = met({redact(home): schema for home, schema in schemas.items()}, cure=RESHARD).schema
    job = ExportJob(
        opened=opened, storage=storage, target=target.rstrip("/") or target, options=options,
        classes={name: one.classes for name, one in said.columns.items() if one.classes} | said.classes,
    )  # fmt: skip
    progress.start(total_bytes=None, total=len(opened.urls))
    written = chosen.write(job, progress)
    return ExportReport(
        to=to, target=redact(job.target), num_shards=len(opened.urls), num_samples=written.num_samples,
        files=tuple(name for name, _ in written.files), num_written=sum(is_new for _, is_new in written.files),
        num_bytes=written.num_bytes, reads_tars=not chosen.takes, seconds=time.monotonic() - started,
    )  # fmt: skip


def _takes(chosen: ExportFormat, options: ExportOptions) -> Takes:
    """Return what a format has of what lies beside the shards."""
    if "--columns" not in chosen.takes:
        return Takes(
            keep_columns=lambda _: "shardstream alone reads them", classes=lambda _: False, videos=True, makes_set=False
        )  # fmt: skip
    return Takes(
        columns=options.columns, classes=lambda name: chosen.names_classes and can_name_classes(name), videos=True,
        makes_set=False,
    )  # fmt: skip


def _write_metadata(files: Files, job: ExportJob, progress: Progress) -> Written:
    """Write the metadata of a format that reads the tars."""
    written = tuple((name, _put(job, name, content)) for name, content in files(job, progress))
    return Written(files=written, num_samples=job.opened.chunks.total_samples)


def _put(job: ExportJob, name: str, content: bytes) -> bool:
    """Write a file, unless it exists with this content; return whether it was written.

    Raises:
        TargetNotEmptyError: It exists with other content.
    """
    url = join_url(job.target, name)
    try:
        there = bytes(job.storage.read(url))
    except NotFoundError:
        there = None
    if there == content:
        return False
    if there is not None and not job.options.overwrite:
        raise TargetNotEmptyError(
            f"{redact(url)}: there is a file of this name with other content; move it away, or give --overwrite"
        )
    job.storage.put(url, content)
    return True


def _write_samples(job: ExportJob, progress: Progress, *, hub: bool = False) -> Written:
    """Write one file per shard with selected samples, and a card for a hub."""
    samples = ParquetExport.of(job, files=hub)
    names = job.names
    positions = [position for position, part in enumerate(samples.taken.parts) if part.rows.size]
    if not positions:
        raise ConfigError("no sample is left: --where or --view keeps none")
    splits = job.splits([names[position] for position in positions])
    renamed = _hub_names(splits) if hub else None
    name_of = part_namer(names)
    targets = [name_of(position) if renamed is None else renamed[names[position]] for position in positions]

    def write(item: tuple[int, str]) -> int:
        num_bytes = samples.write(*item)
        progress.advance(num_bytes=num_bytes, num=1)
        return num_bytes

    sizes = list(map_threads(write, zip(positions, targets, strict=True), job.options.workers))
    written = [(name, size > 0) for name, size in zip(targets, sizes, strict=True)]
    if renamed is not None:
        content = card.card(job, {split: [renamed[name] for name in some] for split, some in splits.items()}, ())
        written.append((card.NAME, _put(job, card.NAME, content)))
    return Written(files=tuple(written), num_samples=samples.taken.num_samples, num_bytes=sum(sizes))


def _hub_names(splits: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Name files as ``datasets`` does: ``data/train-00000-of-00012.parquet``."""
    return {
        name: f"data/{split}-{number:05d}-of-{len(names):05d}.parquet"
        for split, names in splits.items()
        for number, name in enumerate(names)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A format.

    Attributes:
        write: Writes the files of a job.
        takes: The options that select samples, fields and columns, as far as it takes them; none: it writes metadata
            for a program that reads the tars.
        names_classes: Whether it has the names of classes.
    """

    write: Callable[[ExportJob, Progress], Written]
    takes: frozenset[str] = frozenset()
    names_classes: bool = False


FORMATS: Mapping[str, ExportFormat] = {
    "energon": ExportFormat(write=partial(_write_metadata, energon.files)),
    "wids": ExportFormat(write=partial(_write_metadata, wids.files)),
    "dali": ExportFormat(write=partial(_write_metadata, dali.files)),
    "parquet": ExportFormat(write=_write_samples, takes=_OF_PARQUET),
    "hf": ExportFormat(write=partial(_write_samples, hub=True), takes=_OF_PARQUET, names_classes=True),
    "card": ExportFormat(write=partial(_write_metadata, card.files)),
    "lerobot": ExportFormat(write=lerobot.write, takes=_OF_EPISODES),
}
