"""Define the interface of sources: records in a fixed order, readable from any position on."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shard_tools.make.convert.base.identity import KnownInputs, Origins
from shard_tools.make.write.keys import number_key as number_key  # noqa: PLC0414  sources take it from here
from shard_tools.make.write.keys import wrong_names
from shard_tools.make.write.writer import DEFAULT_MAX_BYTES
from shard_tools.running.engine import DEFAULT_WORKERS
from shard_tools.running.report import Report
from streaming.common.arguments import counted, parse_bytes
from streaming.common.inflate import MAX_GZIP_RATIO
from streaming.errors import ConfigError, DataError, DuplicateKeyError, NotFoundError, ShardstreamError
from streaming.order.plan.permutation import hash_range
from streaming.types import Int64Array

NUMBER_KEYS = "number"  # the value of --key for the keys 000000000, 000000001, …
TEXT_UNITS = ("line", "blank-line", "file")
ON_ERROR = ("raise", "skip")
MAX_LISTED = 10_000
"""The report lists at most this many records that are left out; all are counted."""
RUN_RECORDS, _RUN_BYTES = 64, 1 << 20  # that are written together
_NAMES_LOOKED_AT = 100_000
_log = logging.getLogger(__name__)
_SEEDS = 0x9E3779B97F4A7C15  # spreads neighboring seeds far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sample to be written.

    Attributes:
        key: Its key.
        fields: Its fields by extension.
        metadata: The row or entry that it was made from.
        where: File and line or row, for messages.
        problem: The reason why it cannot be read; only in tolerant sources.
        remarks: Warnings about a stored record; the same text for all records with the same oddity.
        left_out: Reasons why records right before it are left out, one per record.
        origin: Number of the input that it is made of
            (:class:`~shard_tools.make.convert.base.identity.SourceIdentity`).
        is_lent: Whether its fields are valid only until the next record is read: they lie in memory that is reused.
    """

    key: str
    fields: Mapping[str, bytes]
    metadata: Mapping[str, object] = field(default_factory=dict)
    where: str = ""
    problem: DataError | None = None
    remarks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    origin: int = 0
    is_lent: bool = False

    @property
    def sample(self) -> dict[str, object]:
        """The sample for ``ShardWriter``, including the metadata for its columns."""
        return {**self.fields, "__key__": self.key, "__metadata__": self.metadata}


@dataclass(slots=True)
class Remarks:
    """Count remarks about records, and records that are left out. Only the thread that writes changes it.

    Attributes:
        counts: Number of records by remark.
        left_out: Number of records that are left out, by reason.
        first: Place of the first record of each remark, if this run wrote it.
        through: Number of the input of the last record; -1: there is no record.
    """

    counts: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    through: int = -1

    def add(self, record: Record) -> None:
        """Count a record."""
        self.through = record.origin
        self.left_out.update(record.left_out)
        for remark in record.remarks:
            self.counts[remark] += 1
            self.first.setdefault(remark, record.where)

    def join(self, later: Remarks) -> None:
        """Count records that come after these."""
        self.counts += later.counts
        self.left_out += later.left_out
        self.first = later.first | self.first
        self.through = later.through

    def log(self, target: str) -> None:
        """Log one warning per remark."""
        for remark, count in self.counts.items():
            where = self.first.get(remark, "a sample of an earlier run")
            _log.warning("%s: %s: %s, the first from %s", target, remark, counted(count, "sample"), where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(Report):
    """Something in the source that is not a sample, and why.

    Attributes:
        path: A file, or a record by its place.
        reason: Why it is left out.
        is_lost: It is data, or may be: ``--on-error`` decides whether it may be left out. Hidden files, notes of other
            programs and the like are no data.
    """

    path: str
    reason: str
    is_lost: bool = False


FolderWalks = dict[tuple[str, str | None], Any]
"""Results of ``files.walked``, by folder and by the folder left out."""


@dataclass(frozen=True, slots=True)
class Growing:
    """The names of a set's classes, in the order of their numbers; new names get the next numbers."""

    names: tuple[str, ...]


class NoRecordError(NotFoundError):
    """A source holds no record, only what ``skipped`` names."""

    def __init__(self, message: str, skipped: Sequence[Skipped]) -> None:
        super().__init__(message)
        self.skipped = tuple(skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Options for reading a source; each layout declares the options that it takes (``sources.LAYOUTS``).

    Attributes:
        fields: (column, extension) pairs: columns of a table that become separate fields.
        key_field: The column of the keys; ``"number"`` counts; None: the default of the layout.
        shuffle_seed: Read in an order shuffled by this seed; None: the default of the layout: only folders of several
        classes are shuffled.
        keep_order: Keep the source's order, whatever the default is.
        num_threads: Number of threads that read ahead.
        exclude: A folder or prefix to leave out, such as a target inside the source.
        classes: Origin of the class numbers.
        max_gzip_ratio: Maximum ratio by which a ``.gz`` may inflate.
        allow_unfinished: Accept unfinished sets, and take the samples that are there.
        unit: The unit of a text record: ``"line"``, ``"blank-line"`` (up to the next blank line) or ``"file"``.
        tolerant: A line or row that cannot be read becomes a record with a ``problem`` instead of an error.
        named_only: Columns that ``fields`` does not name become no fields; their values are only ``metadata``.
        more: Further places of the same layout, whose records follow in this order.
        part: The split to take, if the source has several.
        config: The configuration to take, if the source has several.
        images: Folder of the images of an annotation file.
        unlike_columns: Accept files with different columns, and log it.
        walks: Listings of folders, so that none is walked twice.
        known: The inputs of the set that the records are appended to; they are left out.
        medium_field: The field that files of one medium are stored in; None: by their most frequent extension.
        guessed: The names of the files determined the layout.
        document_token: The id between documents of a stream of ids, or ``"none"``; None: the usual one.
    """

    fields: tuple[tuple[str, str], ...] = ()
    key_field: str | None = None
    shuffle_seed: int | None = None
    keep_order: bool = False
    num_threads: int = 1
    exclude: str | None = None
    classes: str | Growing | None = None
    max_gzip_ratio: float = MAX_GZIP_RATIO
    allow_unfinished: bool = False
    unit: str = "line"
    tolerant: bool = False
    named_only: bool = False
    more: tuple[str, ...] = ()
    part: str | None = None
    config: str | None = None
    images: str | None = None
    unlike_columns: bool = False
    walks: FolderWalks = field(default_factory=dict)
    known: KnownInputs | None = None
    medium_field: str | None = None
    guessed: bool = False
    document_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """Options common to all commands that write shards.

    Attributes:
        max_bytes: Maximum size of a shard.
        max_samples: Maximum number of samples in a shard.
        shuffle_seed: Shuffle the records uniformly with this seed; None: 0 for folders of several classes, no shuffle
        for other sources.
        workers: Number of threads that read ahead; for a tokenizer, number of processes, which also determines the
        number of batches in progress.
        overwrite: Delete the shards of the target first.
    """

    max_bytes: int = parse_bytes(DEFAULT_MAX_BYTES)
    max_samples: int | None = None
    shuffle_seed: int | None = None
    workers: int = DEFAULT_WORKERS["local"]
    overwrite: bool = False

    def identity(self) -> dict[str, object]:
        """Return the facts that determine the bytes of the result."""
        return {"max_bytes": self.max_bytes, "max_samples": self.max_samples, "shuffle_seed": self.shuffle_seed}


class Source(Protocol):
    """A dataset in another format.

    The order of records is a function of the source's content and the shuffle seed, never of timing.
    """

    @property
    def kind(self) -> str:
        """The value of ``--from`` for this format."""

    @property
    def num_records(self) -> int | None:
        """Number of records, if known without reading them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the source, for progress."""

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Entries left out so far."""

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The fields of its samples, True for those that every sample has; None if unknown before reading."""

    def identity(self) -> dict[str, object]:
        """Return JSON-serializable facts that identify this source; a conversion continues only if they are equal.

        They include names, and decisions for all records, but neither sizes nor contents of inputs.
        """

    def origins(self) -> Origins:
        """Return the inputs of the records, with the checksums of those that were read.

        Records come in the order of the inputs' numbers. None: :meth:`identity` determines the content completely.
        """

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the records from number ``start`` on."""


@runtime_checkable
class Countable(Protocol):
    """A source that can count its records in a first pass if their number is not known."""

    def count(self, executor: Executor) -> None:
        """Count the records. Afterwards ``num_records`` is known, and reading may begin near any record.

        Raises:
            ConfigError: It can only be read front to back.
        """


@runtime_checkable
class Foreseeable(Protocol):
    """A source whose index has names and sizes, so that shards are planned before content is read."""

    @property
    def num_records(self) -> int:
        """Number of records."""

    def outlines(self, start: int) -> Generator[Record, None, None]:
        """Return the records from number ``start`` on, with blank fields of the right sizes."""

    def part(self, start: int, stop: int) -> Source:
        """Return a source of records ``[start, stop)`` alone, to be sent to the process that writes them."""


@runtime_checkable
class LeavesOut(Protocol):
    """A source that leaves out records."""

    def left_out_last(self) -> Sequence[str]:
        """Return the reasons of records that are left out after the last one."""


class Standing(Protocol):
    """The position of a source, if the number of samples does not determine the record to continue with."""

    def through(self) -> int:
        """Return the number of the last input that was finished before the latest record."""

    def position(self) -> Mapping[str, Any]:
        """Return the JSON-serializable position of a run that is interrupted right before the latest record."""

    def resume(self, position: Mapping[str, Any]) -> None:
        """Make ``records`` begin at this position."""


def permutation(num_items: int, seed: int) -> Int64Array:
    """Return a permutation of ``range(num_items)``, int64 ``[num_items]``, the same in every release of NumPy.

    Sorts by the splitmix64 finalizer of (seed, item): Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014.
    """
    state = (seed * _SEEDS + 0xD1B54A32D192ED03) % 2**64
    return np.argsort(hash_range(state, 1, num_items + 1), kind="stable").astype(np.int64)


def runs_of(records: Iterable[Record], most: int = RUN_RECORDS) -> Iterator[list[Record]]:
    """Yield records in runs of up to ``most``, to be written together; an error ends a run, which is yielded first.

    A record whose fields are lent ends its run, so that it is written before the next one is read.
    """
    run: list[Record] = []
    num_bytes = 0
    try:
        for record in records:
            run.append(record)
            num_bytes += sum(map(len, record.fields.values()))
            if record.is_lent or len(run) >= most or num_bytes >= _RUN_BYTES:
                yield run
                run, num_bytes = [], 0
    except Exception:
        if run:
            yield run
        raise
    if run:
        yield run


def numbered(records: Generator[Record, None, None], start: int) -> Generator[Record, None, None]:
    """Set the origin of each record, from number ``start`` on, to its own number."""
    with contextlib.closing(records):
        for number, record in enumerate(records, start):
            yield replace(record, origin=number)


def later_wrong_names(records: Iterator[Record]) -> list[ConfigError]:
    """Return an error per name among the next 100,000 records that cannot be stored, to be reported with the first.

    Records that cannot be read end the search.
    """
    found: list[ConfigError] = []
    with contextlib.suppress(ShardstreamError):  # it is raised once the names are valid
        found += wrong_names((record.key, record.fields) for record in itertools.islice(records, _NAMES_LOOKED_AT))
    return found


def refuse_known(key: str, known_keys: Collection[str]) -> None:
    """Refuse a key that an earlier run of the same conversion has already written.

    Raises:
        DuplicateKeyError: The key was written before.
    """
    if key in known_keys:
        raise DuplicateKeyError(
            f"the key {key!r} was given to an earlier record; keys must be unique: choose another --key, or number the "
            "records with --key number"
        )
