"""Build a batch from its rows: decode, transform, collate; unreadable samples are substituted, masked or raised.

A ``RowKind`` defines what a row is: a sample (``Samples``), or several samples combined by
``streaming.build.batches.items``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.build.batches.collate import default_collate, empty_like, without_rows
from streaming.build.batches.columns import Columns
from streaming.build.batches.draws import BatchDraws, Chain, as_chain
from streaming.build.batches.dropped_samples import DROPPED, cure_of, user_trace
from streaming.build.batches.jagged import Allocate, Form, checked_jagged
from streaming.build.batches.portion import Portion
from streaming.build.batches.rows import (
    Cuts,
    DecodedRow,
    FieldRange,
    Index,
    PlannedRows,
    Rows,
    Stock,
    cut_up,
    has_empty,
)
from streaming.build.batches.sequence import SequenceSlice
from streaming.build.decode import (
    FieldDecoder,
    Outcome,
    decode_field,
    decode_member,
    hands_out_views,
    is_ours,
    of_shard,
    raw,
    runs_code_of_user,
    together,
    view,
)
from streaming.common.arrays import sums
from streaming.common.platforms import later
from streaming.errors import ChecksumError, ConfigError, DataError, DecodeError, TooManyBadSamplesError
from streaming.order.packing.balance import BalanceRules
from streaming.order.plan.memory import Budget
from streaming.order.plan.settings import Shape
from streaming.order.plan.state import LoaderState
from streaming.storage import redact
from streaming.types import Batch, Int64Array, Sample, Transform, override

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())

OnError: TypeAlias = Literal["substitute", "skip", "raise"]
LENGTH = "length"
"""Stage of a readable sample whose length differs from the planned one; it is not a bad sample."""
Mask: TypeAlias = "npt.NDArray[np.bool_] | None"
MAX_SUBSTITUTES = 256
"""Maximum number of neighbors tried instead of an unreadable sample: enough to pass a few damaged chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """One sample that could not be delivered.

    Attributes:
        url: URL of the shard.
        key: Key of the sample; "" if the key could not be read either, and no sample table has it.
        stage: ``"fetch"``, ``"decode"`` or ``"transform"``; or ``LENGTH``.
        reason: The error's message.
        dropped: Whether the user's transform dropped an intact sample.
        number: Number of the sample in the dataset; -1 if unknown.
        byte_start: First byte of its record in the shard; -1 without a sample table.
        byte_end: End of the record (exclusive); -1 without a sample table.
        source: Source in a mixture; "" for a single dataset.
        trace: Traceback of the user's code, or ""; it depends on the thread that builds, so it is not compared.
    """

    url: str
    key: str
    stage: str
    reason: str
    dropped: bool = False
    number: int = -1
    byte_start: int = -1
    byte_end: int = -1
    source: str = ""
    trace: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecipe:
    """Decoders and functions that turn the bytes of one source into samples.

    Attributes:
        decoders: Decoder of every field.
        transform: Function of one sample, or of a sample and ``rng``, or None; becomes a ``Chain``.
        on_error: What to do with samples that cannot be delivered.
        fields: Fields to read; None: all.
        name: Name of the source in a mixture, as in ``__source__``; "" for a single dataset and for its groups.
    """

    decoders: FieldDecoder
    transform: Transform | Chain | None = None
    on_error: OnError = "substitute"
    fields: tuple[str, ...] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "transform", as_chain(self.transform))

    @property
    def functions_of_user(self) -> list[Any]:
        """All functions that run user code between bytes and a sample."""
        chained = as_chain(self.transform)
        functions: list[Any] = [] if chained is None else list(chained.functions)
        return [*functions, self.decoders] if runs_code_of_user(self.decoders) else functions


class RowColumns(Protocol):
    """The rows of several batches as columns, from which each batch is cut."""

    def batch(self, low: int, high: int) -> Batch:
        """Return the batch of rows ``[low, high)``.

        Raises:
            DecodeError: A value cannot be decoded; build row by row to find which.
        """


class GroupedRows(Protocol):
    """Look up and cut the rows of several batches together, if they are only copied from memory.

    Attributes:
        group_rows: Maximum number of samples looked up together.
    """

    @property
    def group_rows(self) -> int: ...  # noqa: D102

    def rows_at_once(self, stock: Stock, of: PlannedRows) -> Rows | None:
        """Return the samples of the planned rows of a group; None: build batches one by one.

        None if a row is damaged, not yet in memory, or has another ``rows_each``. Called under the engine's lock.
        """

    def columns(
        self, recipe: Recipe, rows: Rows, allocate: Allocate | None = None, place: DecodedRow | None = None,
        draws: BatchDraws | None = None,
    ) -> RowColumns:  # fmt: skip
        """Return undamaged rows as columns, from which plain batches are cut."""


class ExchangedRows(Protocol):
    """Pass rows of a global batch from rank to rank."""

    def split(self, batch: Batch) -> list[Batch]:
        """Return the rows of a batch one by one, without entries that concern the whole batch."""

    def sent(self, row: Batch) -> Batch:
        """Return a split row in a smaller form, which ``joined`` also accepts."""

    def joined(self, rows: Sequence[Batch], allocate: Allocate | None = None) -> Batch:
        """Return the batch of split rows; large tensors lie in memory from ``allocate``."""


class RowKind(ABC):
    """Kind of row of a batch: everything that loops, the engine and ranks know about rows.

    A frozen value without data, equal on all ranks, that is sent to worker processes. The dataset chooses the samples
    of a row: ``Source.rows``. Abilities that only some kinds have are values that are None for other kinds:
    ``grouped``, ``exchanged``.

    Attributes:
        balance: How the rows of a global batch are balanced over its ranks; None: not at all.
        entries: Entries of a batch that ``checked_jagged`` knows; None: they are the fields that are read.
    """

    balance: BalanceRules | None = None
    entries: tuple[str, ...] | None = None

    @property
    def grouped(self) -> GroupedRows | None:
        """Builds several batches together; None: each batch is built by itself."""
        return None

    @property
    def exchanged(self) -> ExchangedRows | None:
        """Exchanges the rows of a global batch between ranks; None: each rank keeps its own rows."""
        return None

    def lacks(self, name: str, fields: Sequence[str]) -> str:
        """Return the words for a field that rows lack, with the cure.

        Args:
            name: The field.
            fields: The fields that are read.
        """
        return f"field {name!r} is not among the fields read, fields={fields}; add it there"

    def place_in_sample(self, rows: Rows, i: int) -> str:  # noqa: ARG002
        """Say which part of its sample row i is, such as "the window at second 1.200"; "": all of it, or unknown."""
        return ""

    # --- which samples, for the engine ---

    def order(self, stock: Stock, of: PlannedRows) -> Index:  # noqa: ARG002
        """Return the order of a rank's rows within a batch, as an index; called on any thread, without locks."""
        return slice(None)

    def rows_each(self, begin: int) -> int:  # noqa: ARG002
        """Return the number of rows per planned row, in the global batch that begins at row ``begin`` of the run."""
        return 1

    @abstractmethod
    def rows(self, stock: Stock, of: PlannedRows, lost: Mapping[int, DataError]) -> Rows:
        """Return the samples of planned rows; chunks in ``lost`` have no bytes in memory."""

    def row_of(self, rows: Rows, i: int) -> int:  # noqa: ARG002
        """Return the row of the batch that holds sample i."""
        return i

    def first_numbers(self, chunk_samples: Int64Array) -> Int64Array | None:  # noqa: ARG002
        """Return the number of the first row of each chunk, if rows are numbered samples of the dataset."""
        return None

    def ahead(self, stock: Stock, chunk_id: int, pass_number: int) -> Callable[[], object] | None:  # noqa: ARG002
        """Return a computation to run on another thread while a chunk is fetched; None: none."""
        return None

    # --- batches ---

    def assembled(self, sample: Sample) -> Sample:
        """Return the sample of a row, given its decoded fields, before ``transform``."""
        return sample

    @abstractmethod
    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        """Return the batch of ``rows``; ``valid`` masks the rows of the batch that count.

        If ``rows`` are cut: the list of its micro-batches, each built as a batch of its rows.
        """

    @abstractmethod
    def empty(self, builder: BatchBuilder, prototypes: Iterator[Rows], begin: int) -> Any:
        """Return the batch of no rows; see ``BatchBuilder.empty``."""

    def exclude(self, batch: Batch, valid: npt.NDArray[np.bool_]) -> None:  # noqa: B027  not all have to
        """Exclude rows that do not count from entries that concern all rows, such as counts; in place.

        Args:
            batch: A batch, or the argument of ``collate_fn`` for one of its rows.
            valid: Whether each row counts, bool [B]; [] for one row.
        """

    # --- over a run ---

    @property
    def changes(self) -> Sequence[tuple[int, str]]:
        """Changes of the rows during a run: (row of the run, description from that row on); (): none."""
        return ()

    def facts(self, state: LoaderState | None = None, row: int = 0) -> dict[str, Any]:  # noqa: ARG002
        """Return the facts about rows that a state of the run records, including earlier ones from ``state``."""
        return {}

    # --- options ---

    @property
    def options(self) -> dict[str, Any]:
        """Options that must be equal on all ranks and in all sources of a mixture, by their names in ``Packed``."""
        return {}

    def budget(self, limit_bytes: int) -> Budget:
        """Divide ``memory_limit``; see ``RowSamples.keep_at_most``."""
        return Budget.of(limit_bytes, packs=False)

    def fate(self, on_error: OnError) -> str:
        """Return a sentence for messages on what takes the place of a lost sample."""
        return _FATES[on_error]

    def mixed(self, kinds: Sequence[RowKind]) -> RowKind:  # noqa: ARG002
        """Return the rows of a mixture whose sources have these kinds, in their order; this is one of them."""
        return self

    def balanced(self, rules: BalanceRules, *, dataset: object, collate_fn: object) -> RowKind:  # noqa: ARG002
        """Return this kind with balanced rows.

        Raises:
            ConfigError: Rows cannot be balanced.
        """
        raise ConfigError(
            f"balance={rules.how!r}: expected a Packed(…), or a Mixture of them, got a {type(dataset).__name__}"
        )

    def checked_jagged(self, jagged: Any, collate_fn: object) -> dict[str, Form]:
        """Return the forms of jagged fields.

        Raises:
            ConfigError: They are not names of fields, or do not apply to such rows.
        """
        return checked_jagged(jagged, collate_fn)

    def check_shape(self, shape: Shape, collate_fn: object) -> None:  # noqa: B027  not all have to
        """Check that batches can have this shape."""

    def check_sequence(self, wanted: SequenceSlice, least: int) -> None:  # noqa: B027  not all have to
        """Check that sequences can be sliced so; their lengths must be divisible by ``least``."""


_FATES: dict[OnError, str] = {
    "substitute": "A neighbor takes the place of each, and so appears twice",
    "skip": 'A neighbor takes the place of each, with False in batch["__valid__"]',
    "raise": "The run stops",
}


@dataclass(frozen=True, slots=True)
class Samples(RowKind):
    """A row is a sample."""

    group_rows = 2_048

    @property
    @override
    def grouped(self) -> GroupedRows | None:
        return self

    @override
    def rows(self, stock: Stock, of: PlannedRows, lost: Mapping[int, DataError]) -> Rows:
        return replace(
            stock.rows(of.first_rows + of.within, of.chunk_ids, lost), numbers=stock.numbers(of), positions=of.positions
        )

    def rows_at_once(self, stock: Stock, of: PlannedRows) -> Rows | None:
        """See ``GroupedRows``."""
        rows = self.rows(stock, of, {})
        return None if rows.damage else rows

    @override
    def first_numbers(self, chunk_samples: Int64Array) -> Int64Array | None:
        return sums(chunk_samples)

    @override
    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        mask = builder.recipe.mask_of(len(rows.keys), valid)
        copied = builder.copied(self, rows, mask, self.cuts(rows))
        return self.one_by_one(builder, rows, mask) if copied is None else copied

    def cuts(self, rows: Rows) -> Cuts:
        """Return where the samples are cut into micro-batches."""
        return rows.cuts

    def one_by_one(self, builder: BatchBuilder, rows: Rows, mask: Mask) -> Any:
        """Return the batch, built sample by sample."""
        builder.read_ahead(rows)
        samples = [builder.sample_or_substitute(rows, i, mask) for i in range(len(rows.keys))]
        return builder.collate(samples, mask, rows.cuts)

    @override
    def empty(self, builder: BatchBuilder, prototypes: Iterator[Rows], begin: int) -> Any:
        sample = builder.first_of(prototypes)
        return builder.nothing(sample if builder.recipe.collate_fn is None else self.given(builder, sample))

    def given(self, builder: BatchBuilder, sample: Sample) -> Sample:  # noqa: ARG002
        """Return the argument of ``collate_fn`` for a row that consists of one sample."""
        return sample

    def columns(
        self, recipe: Recipe, rows: Rows, allocate: Allocate | None = None, place: DecodedRow | None = None,
        draws: BatchDraws | None = None,
    ) -> Columns:  # fmt: skip
        """See ``GroupedRows``."""
        decoders, names = [part.decoders for part in recipe.parts], [part.name for part in recipe.parts]
        return Columns(rows, decoders, allocate, place, names, recipe.jagged, draws)


class _Bad(Exception):  # noqa: N818  control flow, not an error of the program
    """A row that cannot be delivered: the stage, and the error (None: the transform dropped it)."""

    def __init__(self, stage: str, error: Exception | None) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.error = error

    @property
    def kind(self) -> str:
        """The stage under which the loss is counted; dropped samples are counted apart from failed ones."""
        return DROPPED if self.error is None else self.stage


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The user's options for turning bytes into batches. Thread-safe as far as the user's functions are.

    Values derived from all parts are computed once: a mixture may have hundreds of parts, and there are thousands of
    batches.

    Attributes:
        parts: One ``SourceRecipe`` per source; a single dataset has one.
        items: The kind of row of a batch.
        collate_fn: Function of a list of samples, or None: the default.
        portion: This rank's portion of a batch, taken where the batch is built.
        finish: Last step of every batch, such as page-locking it, or None.
        jagged: Fields of the default batch whose values are concatenated, and the form of each.
        worker_init_fn: Called with the worker's number in each worker process, before its first batch; or None. It is
            pickled with the functions, so that they share its globals.
    """

    parts: tuple[SourceRecipe, ...]
    items: RowKind = Samples()
    collate_fn: Callable[[list[Any]], Any] | None = None
    portion: Portion = Portion()  # noqa: RUF009  frozen
    finish: Callable[[Any], Any] | None = None
    jagged: Mapping[str, Form] = field(default_factory=dict)
    worker_init_fn: Callable[[int], object] | None = None

    @cached_property
    def is_plain(self) -> bool:
        """Whether a batch consists of independent columns: no user function sees whole samples."""
        return self.collate_fn is None and all(part.transform is None for part in self.parts)

    @cached_property
    def skips(self) -> bool:
        """Whether substitutes are marked, so that every batch has ``__valid__``."""
        return any(part.on_error == "skip" for part in self.parts)

    @cached_property
    def lends(self) -> bool:
        """Whether users get views of the memory that batches are built from."""
        return any(hands_out_views(part.decoders) for part in self.parts)

    @property
    def functions_of_user(self) -> list[Any]:
        """All functions that run user code between bytes and a batch."""
        functions = [function for part in self.parts for function in part.functions_of_user]
        return functions if self.collate_fn is None else [*functions, self.collate_fn]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Fields that are read of any source; None: all."""
        if any(part.fields is None for part in self.parts):
            return None
        return tuple(dict.fromkeys(name for part in self.parts for name in part.fields or ()))

    def part_of(self, rows: Rows, i: int) -> SourceRecipe:
        """Return the recipe of row i's source."""
        return self.parts[0 if rows.sources is None else int(rows.sources[i])]

    def narrowed(self, rows: Rows) -> Rows:
        """Return the rows without the fields that their sources do not read, if sources differ in their fields."""
        if rows.sources is None or len({part.fields for part in self.parts}) == 1:
            return rows
        fields: dict[str, FieldRange] = {}
        for name, where in rows.fields.items():
            wants = np.array([part.fields is None or name in part.fields for part in self.parts])[rows.sources]
            if wants.any():
                sizes = where.sizes if wants.all() else np.where(wants, where.sizes, -1)
                fields[name] = FieldRange(starts=where.starts, sizes=sizes)
        return replace(rows, fields=fields)

    def mask_of(self, num_rows: int, valid: Mask) -> Mask:
        """Return ``__valid__`` for a batch of ``num_rows`` rows: ``valid``, or all True, or None."""
        if valid is not None:
            return valid.copy()
        return np.ones(num_rows, np.bool_) if self.skips else None

    def whole(self, batch: Batch, mask: Mask, num_rows: int) -> Any:
        """Finish a default batch: add its mask, take this rank's portion, and apply the last step."""
        if mask is not None:
            self.items.exclude(batch, mask)
            batch["__valid__"] = torch.from_numpy(mask)
        return self.cut(batch, num_rows)

    def cut(self, batch: Any, num_rows: int) -> Any:
        """Return this rank's portion of a batch, after the last step."""
        return self.finished(self.portion(batch, num_rows))

    def finished(self, batch: Any) -> Any:
        """Return the batch after the last step."""
        return batch if self.finish is None else self.finish(batch)


class _Tries:
    """Allocate tensors; a second attempt at a batch reuses tensors of the first that have the same shape and type."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._made: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        for number, tensor in enumerate(self._free):
            if tuple(tensor.shape) == shape and tensor.dtype == dtype:
                return self._free.pop(number)
        self._made.append(self._allocate(shape, dtype))
        return self._made[-1]

    def again(self) -> None:
        """Begin a second attempt; no tensor of the first may be in use."""
        self._free = list(self._made)


BadSampleReport: TypeAlias = Callable[[BadSample], None]
"""Called for every sample that could not be delivered; may raise to stop the run."""


class BatchBuilder:
    """Build one batch; used once.

    Args:
        recipe: How to build.
        substitutes: Yields, for row i of the batch, single-row ``Rows`` to try instead, in order.
        report: Called for every sample that could not be delivered; may raise to stop the run.
        allocate: Allocator for the tensors of the default batch; None: fresh memory. Not used if only a portion of the
            batch is kept.
        place: Receives the row that is being decoded; None: not needed.
        draws: Random numbers of functions; None: those at the start of epoch 0, without seeding anything.
    """

    def __init__(
        self,
        recipe: Recipe,
        substitutes: Callable[[int], Iterator[Rows]],
        report: BadSampleReport,
        allocate: Allocate | None = None,
        place: DecodedRow | None = None,
        draws: BatchDraws | None = None,
    ) -> None:
        self._draws = draws or BatchDraws()
        self.recipe = recipe
        self.allocate = _Tries(allocate) if allocate is not None and recipe.portion.is_whole else None
        self.place: DecodedRow = [-1] if place is None else place
        self._substitutes = substitutes
        self.report = report
        self._lost: list[str] = []  # stages at which the current sample and its substitutes were lost
        self._ahead: dict[tuple[int, int, str], Outcome[object]] = {}  # by id of the rows, row and field

    def build(self, rows: Rows, valid: Mask) -> Any:
        """Return the batch of ``rows``; with ``valid``, or under ``on_error="skip"``, it has ``__valid__`` [n]."""
        return self.recipe.items.build(self, rows, valid)

    def empty(self, prototypes: Iterator[Rows], begin: int = 0) -> Any:
        """Return the batch of no rows; ``prototypes`` are single rows that show its form.

        Its global batch begins at row ``begin`` of the run.

        Raises:
            TooManyBadSamplesError: The form depends on a sample, and no sample that was tried can be read.
        """
        return self.recipe.items.empty(self, prototypes, begin)

    # --- for row kinds ---

    def copied(self, kind: GroupedRows, rows: Rows, mask: Mask, cuts: Cuts = None) -> Any | None:
        """Return the batch of plain columns; None: build it row by row, because of damage or user functions."""
        recipe = self.recipe
        is_copied = recipe.is_plain and not rows.damage and not has_empty(cuts)
        if is_copied and not self._draws.seeds and not rows.has_distant:
            try:
                columns = kind.columns(recipe, rows, self.allocate, self.place, self._draws)
                return cut_up(
                    cuts, len(rows.keys),
                    lambda low, high: recipe.whole(
                        columns.batch(low, high), None if mask is None else mask[low:high], high - low
                    ),
                )  # fmt: skip
            except (DecodeError, ChecksumError):  # building row by row will find the value
                if self.allocate is not None:
                    self.allocate.again()
        return None

    def collate(self, samples: list[Sample], mask: Mask, cuts: Cuts = None, firsts: Int64Array | None = None) -> Any:
        """Return the batch of samples, by the user's function or the default one, or its micro-batches.

        ``firsts`` are the rows at which the samples begin; None: each is a row.
        """
        self.place[0] = -1
        shown = copy.copy(samples[0]) if has_empty(cuts) else {}  # before a function changes it

        def make(low: int, high: int) -> Any:
            if low == high:
                return self.nothing(shown)
            first = low if firsts is None else int(firsts[low])
            return self._collate(samples[low:high], None if mask is None else mask[low:high], first)

        return cut_up(cuts, len(samples), make)

    def _collate(self, samples: list[Sample], mask: Mask, first: int) -> Any:
        if self.recipe.collate_fn is not None:
            self._draws.begin_collate(first)
            if mask is not None:
                for sample, valid in zip(samples, mask, strict=True):
                    if isinstance(sample, dict):
                        self.recipe.items.exclude(sample, np.asarray(valid))
                        sample["__valid__"] = bool(valid)
            return self.recipe.cut(self.collated(samples), len(samples))
        return self.recipe.whole(self.default(samples), mask, len(samples))

    def collated(self, samples: list[Sample]) -> Any:
        """Return the result of the user's function; a note on its errors names the samples."""
        try:
            return None if self.recipe.collate_fn is None else self.recipe.collate_fn(samples)
        except Exception as error:
            first = samples[0] if samples and isinstance(samples[0], Mapping) else {}
            key, url, what = first.get("__key__"), first.get("__url__"), "samples"
            if isinstance(key, list):
                key, what = next(iter(key), None), "packs (each a dict, whose entries hold all that is in it)"
                url = next(iter(url), None) if isinstance(url, list) else url
            error.add_note(f"in collate_fn, given {len(samples)} {what}, the first of them {key!r} of {url}")
            raise

    def default(self, samples: list[Sample]) -> Batch:
        """Return the default batch of samples, without mask and portion."""
        return default_collate(samples, allocate=self.allocate, jagged=self.recipe.jagged)

    def nothing(self, sample: Sample) -> Any:
        """Return the batch of no rows, in the form that a batch of such samples has."""
        recipe = self.recipe
        if recipe.collate_fn is not None:
            return self.without_rows(copy.copy(sample))
        whole = replace(recipe, portion=Portion(), finish=None)
        row = whole.whole(self.default([sample]), whole.mask_of(1, None), 1)
        return recipe.portion(empty_like(row), 0)

    def without_rows(self, sample: Sample) -> Any:
        """Return the user's batch of no rows, derived from ``sample``: the function is never called without samples."""
        if self.recipe.skips and isinstance(sample, dict):
            sample["__valid__"] = True
        return self.recipe.portion(without_rows(self.collated, sample), 0)

    def first_of(self, prototypes: Iterator[Rows]) -> Sample:
        """Return the first of single rows that can be read; unreadable ones are not counted, being in no batch.

        Raises:
            TooManyBadSamplesError: No row can be read.
        """
        lost: list[str] = []
        for rows in islice(prototypes, MAX_SUBSTITUTES):
            try:
                return self._sample(rows, 0)
            except _Bad as bad:
                lost.append(bad.kind)
        raise TooManyBadSamplesError(
            f"this rank gets no rows of the last batch, and none of the {len(lost)} samples tried for the shape of an "
            f"empty one could be read and was kept by transform. {cure_of(lost)}"
        )

    def samples(self, rows: Rows) -> list[Sample]:
        """Return the decoded, transformed samples of ``rows``, not collated."""
        return [self.sample_or_substitute(rows, i, None) for i in range(len(rows.keys))]

    def read_ahead(self, rows: Rows) -> None:
        """Decode the distant fields of all rows concurrently, if this calls no user code."""
        if not rows.has_distant or self._draws.seeds:
            return
        jobs: dict[tuple[int, int, str], Callable[[], object]] = {}
        for i in (i for i in range(len(rows.keys)) if i not in rows.damage):
            self._draws.begin_sample(i)
            for name, where in rows.fields.items():
                member = rows.member(where, i)
                if member is None:
                    continue
                decoder = of_shard(self.recipe.part_of(rows, i).decoders.decoder_for(name), rows.urls[i])
                if is_ours(decoder):
                    of = {"url": rows.urls[i], "key": rows.keys[i], "field": name}
                    jobs[id(rows), i, name] = partial(decode_member, self._draws.bound(decoder), member, **of)
        self._ahead = dict(zip(jobs, together(list(jobs.values())), strict=True))

    def sample_or_substitute(self, rows: Rows, i: int, mask: Mask) -> Sample:
        """Return row i as a sample, or a substitute."""
        sample = self.delivered(rows, i, mask)
        return self.substitute(rows, i) if sample is None else sample

    def delivered(self, rows: Rows, i: int, mask: Mask) -> Sample | None:
        """Return row i as a sample; None if it is lost, after reporting and marking it."""
        self.place[0] = i
        self._lost.clear()
        try:
            self._draws.begin_sample(i)
            return self._sample(rows, i)
        except _Bad as bad:
            self._lost.append(bad.kind)
            self._handle(bad, rows, i)
            if mask is not None and self.recipe.part_of(rows, i).on_error == "skip":
                mask[i] = False
        return None

    def substitute(self, rows: Rows, i: int) -> Sample:
        """Return a substitute for row i.

        Raises:
            TooManyBadSamplesError: None of the substitutes tried can be delivered.
        """
        sample = self.first_delivered(i, self._substitutes(i))
        if sample is not None:
            return sample
        url, tried = redact(rows.urls[i]), len(self._lost) - 1
        others = f"so are all {tried} others tried in its place" if tried else "there is no other to take its place"
        raise TooManyBadSamplesError(
            f"{url}: sample {rows.keys[i]!r} is unreadable or dropped, and {others}. {cure_of(self._lost, url)}"
        )

    def first_delivered(self, i: int, others: Iterator[Rows]) -> Sample | None:
        """Return the first of the single rows that can be delivered instead of row i; None: none of them can."""
        self.place[0] = i
        for tried, other in enumerate(islice(others, MAX_SUBSTITUTES)):
            try:
                self._draws.begin_sample(i, tried + 1)
                return self._sample(other, 0)
            except _Bad as bad:
                self._lost.append(bad.kind)
                if bad.error is not None:
                    self._handle(bad, other, 0)
        return None

    def lost(self, rows: Rows, i: int, stage: str, error: Exception) -> None:
        """Report that row i cannot be delivered.

        Raises:
            Exception: ``error``, under ``on_error="raise"``.
        """
        self._handle(_Bad(stage, error), rows, i)

    def _handle(self, bad: _Bad, rows: Rows, i: int) -> None:
        reason = "transform returned None" if bad.error is None else str(bad.error)
        part, place = self.recipe.part_of(rows, i), self.recipe.items.place_in_sample(rows, i)
        row = f"sample {rows.keys[i]!r}" + (f", {place}" if place else "")
        if part.on_error == "raise":
            if bad.error is not None:
                if place:
                    bad.error.add_note(f"It is {place}.")
                raise bad.error
            raise DecodeError(
                f"{rows.urls[i]}: {row}: transform returned None, which drops the sample; under "
                f'on_error="raise" that is an error. Use on_error="substitute" or "skip" to drop samples'
            )
        number = -1 if rows.numbers is None else int(rows.numbers[i])
        self.report(
            BadSample(
                url=rows.urls[i],
                key=rows.keys[i],
                stage=bad.stage,
                reason=f"{reason} ({place})" if place else reason,
                dropped=bad.error is None,
                trace="" if bad.error is None or bad.stage == "fetch" else user_trace(bad.error),
                number=number,
                source=part.name,
            )
        )

    def _sample(self, rows: Rows, i: int) -> Sample:
        """Decode and transform row i.

        Raises:
            _Bad: The row cannot be delivered.
        """
        damage = rows.damage.get(i)
        if damage is not None:
            raise _Bad("fetch", damage)
        key, url, part = rows.keys[i], rows.urls[i], self.recipe.part_of(rows, i)
        sample: Sample = {"__key__": key, "__url__": url}
        if part.name:
            sample["__source__"] = part.name
        for name, where in rows.fields.items():
            size = int(where.sizes[i])
            if size < 0:
                continue
            start = int(where.starts[i])
            decoder = self._draws.bound(of_shard(part.decoders.decoder_for(name), url))
            member = None if start >= 0 or decoder is view else rows.member(where, i)
            try:
                if decoder is view:
                    (sample[name],) = rows.lent(where.of(slice(i, i + 1)))
                    continue
                if member is not None:
                    known = self._ahead.pop((id(rows), i, name), None)
                    at = {"url": url, "key": key, "field": name}
                    sample[name] = decode_member(decoder, member, **at) if known is None else known.get()
                    continue
                sample[name] = (
                    rows.memory[start : start + size]
                    if decoder is raw
                    else decode_field(decoder, rows.view[start : start + size], url=url, key=key, field=name)
                )
            except ChecksumError as error:
                raise _Bad("fetch", error) from error
            except DecodeError as error:
                raise _Bad("decode", error) from error
        sample = self.recipe.items.assembled(sample)
        functions = as_chain(part.transform)
        return sample if functions is None else self._transformed(functions, sample)

    def _transformed(self, functions: Chain, sample: Sample) -> Sample:
        key, url = sample["__key__"], str(sample["__url__"])
        try:
            changed = functions(sample, self._draws)
        except MemoryError:
            raise
        except Exception as error:
            wrapped = DecodeError(f"{redact(url)}: sample {key!r}: transform raised {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            raise _Bad("transform", wrapped) from error
        if changed is None:
            raise _Bad("transform", None)
        if self.recipe.collate_fn is None and not isinstance(changed, Mapping):
            raise ConfigError(
                f"{redact(url)}: sample {key!r}: transform returned {type(changed).__name__}, expected a dict of "
                f"fields (or None to drop the sample); other types need a collate_fn that takes them"
            )
        return changed
