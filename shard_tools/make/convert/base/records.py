"""Define the interface of sources: records, in one fixed order, from any position on."""

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
from streaming.errors import ConfigError, DataError, DuplicateKeyError, ShardstreamError
from streaming.order.plan.permutation import hash_range
from streaming.types import Int64Array

NUMBER_KEYS = "number"  # the value of --key that asks for keys 000000000, 000000001, …
TEXT_UNITS = ("line", "blank-line", "file")
ON_ERROR = ("raise", "skip")
MAX_LISTED = 10_000
"""The report lists at most this many records that are left out; all are counted."""
RUN_RECORDS, _RUN_BYTES = 64, 1 << 20  # that are written together
_NAMES_LOOKED_AT = 100_000
_log = logging.getLogger(__name__)
_SEEDS = 0x9E3779B97F4A7C15  # neighboring seeds lie far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sample to be written.

    Attributes:
        key: Its key.
        fields: Its fields by extension.
        metadata: The row or entry that it was made from.
        where: File and line or row, for messages.
        problem: Why it cannot be read; only in tolerant sources.
        remarks: What is odd about it though it is stored, in words that are the same for all such records.
        left_out: Reasons why records right before it are left out, one for each.
        origin: Number of the input that it is made of
            (:class:`~shard_tools.make.convert.base.identity.SourceIdentity`).
    """

    key: str
    fields: Mapping[str, bytes]
    metadata: Mapping[str, object] = field(default_factory=dict)
    where: str = ""
    problem: DataError | None = None
    remarks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    origin: int = 0

    @property
    def sample(self) -> dict[str, object]:
        """The sample for ``ShardWriter``, including the metadata from which columns are taken."""
        return {**self.fields, "__key__": self.key, "__metadata__": self.metadata}


@dataclass(slots=True)
class Remarks:
    """Count what is odd about records and what is left out; changed only by the thread that writes.

    Attributes:
        counts: Records by remark.
        left_out: Records that are left out, by reason.
        first: Where the first record of each remark comes from, if this run wrote it.
        through: Number of the input that the last record is made of; -1: there is no record.
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
        """Log one warning for each kind."""
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
"""What ``files.walked`` has found, by folder and by what was left out."""


@dataclass(frozen=True, slots=True)
class Growing:
    """The names of a set's classes, in the order of their numbers; further ones get the next numbers."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How to read a source; each layout says which of these it takes (``sources.LAYOUTS``).

    Attributes:
        fields: (column, extension) pairs: columns of a table that become fields of their own.
        key_field: Where keys come from; ``"number"`` counts; None: what is usual for the layout.
        shuffle_seed: Read in an order mixed by this seed; None: as usual for the layout, which is not at all, but
            for folders of several classes.
        keep_order: Keep the source's order, whatever is usual.
        num_threads: Threads that read ahead.
        exclude: A folder or prefix whose content is not taken: the target may lie in the source.
        classes: Where the numbers of classes come from.
        max_gzip_ratio: A ``.gz`` that inflates to more than so many times its size is refused.
        allow_unfinished: Take what is there of shards that are still being written.
        unit: What is one record of a text: ``"line"``, ``"blank-line"`` (up to the next blank line) or ``"file"``.
        tolerant: A line or row that cannot be read is a record with a ``problem``, and not an error.
        named_only: Columns that ``fields`` does not name become no fields: their values are looked at as ``metadata``.
        more: Further places of the same layout, whose records follow in this order.
        part: The split to take, of a source that has several.
        config: The configuration to take, of a source that has several.
        images: Where the images of a file of annotations are.
        unlike_columns: Take files of unlike columns as they are, and log it.
        walks: What is known of folders, so that none is walked twice.
        known: The inputs of a set that the records are appended to, which are left out.
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
        shuffle_seed: Shuffle the records uniformly with this seed; None: as usual, which is not at all, but for folders
            of several classes, where it is 0.
        workers: Threads that read ahead; for a tokenizer, processes, which also determine the number of batches in
            progress.
        overwrite: Delete the shards that the target holds.
    """

    max_bytes: int = parse_bytes(DEFAULT_MAX_BYTES)
    max_samples: int | None = None
    shuffle_seed: int | None = None
    workers: int = DEFAULT_WORKERS["local"]
    overwrite: bool = False

    def identity(self) -> dict[str, object]:
        """Return everything that determines the bytes of the result."""
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
        """What was left out so far."""

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The fields of its samples, True for those that every sample has; None if only reading tells."""

    def identity(self) -> dict[str, object]:
        """Return JSON-serializable facts that identify this source; a conversion continues only if they are equal.

        They hold what is decided once for all records, and names, but neither sizes nor contents of inputs.
        """

    def origins(self) -> Origins:
        """Return the inputs that records are made of, with the checksums of those that were read.

        Records come in the order of the inputs' numbers. None: :meth:`identity` tells all of the content.
        """

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the records from number ``start`` on."""


@runtime_checkable
class Countable(Protocol):
    """A source that can count its records by a first pass, where their number is not known."""

    def count(self, executor: Executor) -> None:
        """Count the records, after which ``num_records`` is known and reading may begin near any record.

        Raises:
            ConfigError: It can only be read front to back.
        """


@runtime_checkable
class Foreseeable(Protocol):
    """A source whose index tells names and sizes, so that shards are planned before content is read."""

    @property
    def num_records(self) -> int:
        """Number of records."""

    def outlines(self, start: int) -> Generator[Record, None, None]:
        """Return the records from number ``start`` on, with blank fields of the right sizes."""

    def part(self, start: int, stop: int) -> Source:
        """Return a source of records ``[start, stop)`` alone, which is sent to where they are written."""


@runtime_checkable
class LeavesOut(Protocol):
    """A source that leaves out records."""

    def left_out_last(self) -> Sequence[str]:
        """Return the reasons for records that are left out after the last one."""


class Standing(Protocol):
    """Where a source stands, if the number of samples does not tell from which record on to continue."""

    def through(self) -> int:
        """Return the number of the last input that is done with before the latest record."""

    def position(self) -> Mapping[str, Any]:
        """Return, JSON-serializable, where a run goes on that is interrupted right before the latest record."""

    def resume(self, position: Mapping[str, Any]) -> None:
        """Let ``records`` begin there."""


def permutation(num_items: int, seed: int) -> Int64Array:
    """Return a permutation of ``range(num_items)``, the same in every release of NumPy.

    Sorts by the splitmix64 finaliser of (seed, item): Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014.
    """
    state = (seed * _SEEDS + 0xD1B54A32D192ED03) % 2**64
    return np.argsort(hash_range(state, 1, num_items + 1), kind="stable").astype(np.int64)


def runs_of(records: Iterable[Record], most: int = RUN_RECORDS) -> Iterator[list[Record]]:
    """Yield records in runs of up to ``most``, to be written together; those before an error are one, too."""
    run: list[Record] = []
    num_bytes = 0
    try:
        for record in records:
            run.append(record)
            num_bytes += sum(map(len, record.fields.values()))
            if len(run) >= most or num_bytes >= _RUN_BYTES:
                yield run
                run, num_bytes = [], 0
    except Exception:
        if run:
            yield run
        raise
    if run:
        yield run


def numbered(records: Generator[Record, None, None], start: int) -> Generator[Record, None, None]:
    """Say of the records from number ``start`` on that each is made of the input of its own number."""
    with contextlib.closing(records):
        for number, record in enumerate(records, start):
            yield replace(record, origin=number)


def later_wrong_names(records: Iterator[Record]) -> list[ConfigError]:
    """Return an error for each name among the next 100,000 records that cannot be stored: to be told with the first.

    Records that cannot be read end the search.
    """
    found: list[ConfigError] = []
    with contextlib.suppress(ShardstreamError):  # it is raised when the names are right
        found += wrong_names((record.key, record.fields) for record in itertools.islice(records, _NAMES_LOOKED_AT))
    return found


def refuse_known(key: str, known_keys: Collection[str]) -> None:
    """Refuse a key that an earlier run of the same conversion has already written.

    Raises:
        DuplicateKeyError: It has.
    """
    if key in known_keys:
        raise DuplicateKeyError(
            f"the key {key!r} was given to an earlier record; keys must be unique: choose another --key, or number the "
            "records with --key number"
        )
