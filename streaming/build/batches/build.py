"""Build a batch from its rows: decode, transform, collate; unreadable samples are substituted, masked or raised.

What a row is, a ``RowKind`` says: a sample (``Samples``), or what ``streaming.build.batches.items`` makes of several
samples.
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
"""Stage of a sample that can be read, but has another length than was planned with; it is not a bad sample."""
Mask: TypeAlias = "npt.NDArray[np.bool_] | None"
MAX_SUBSTITUTES = 256
"""Number of neighbors tried in place of an unreadable sample before giving up: a few damaged chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """One sample that could not be delivered.

    Attributes:
        url: URL of the shard.
        key: Key of the sample; "" if even the key could not be read, and no sample table has it.
        stage: ``"fetch"``, ``"decode"`` or ``"transform"``; or ``LENGTH``.
        reason: The error's message.
        dropped: The user's transform dropped it: nothing is wrong with it.
        number: Number of the sample in the dataset; -1 if unknown.
        byte_start: First byte of its record in the shard; -1 without a sample table.
        byte_end: End of the record (exclusive); -1 without a sample table.
        source: Source in a mixture; "" for a single dataset.
        trace: Traceback of the user's code, "" if there is none; depends on who builds, so it is not compared.
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
    """How the samples of one source are decoded and transformed.

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
    """The rows of some batches as columns, from which each is cut."""

    def batch(self, low: int, high: int) -> Batch:
        """Return the batch of rows ``[low, high)``.

        Raises:
            DecodeError: A value cannot be decoded; build row by row to find which.
        """


class RowKind(ABC):
    """What a row of a batch is: all that loops, the engine and ranks know of it.

    A frozen value without data, equal on all ranks, that travels to worker processes. Which samples a row is made of,
    the dataset says: ``Source.packs``.

    Attributes:
        group_rows: Most samples looked up together, if batches are only copied from memory; 0: each batch by itself.
        balance: How the rows of a global batch are balanced over its ranks; None: not at all.
    """

    group_rows: int = 0
    balance: BalanceRules | None = None

    # --- which samples, for the engine ---

    def order(self, stock: Stock, of: PlannedRows) -> Index:  # noqa: ARG002
        """Return the order in which a rank has the rows of a batch, as an index; in any thread, without locks."""
        return slice(None)

    def rows_each(self, begin: int) -> int:  # noqa: ARG002
        """Return how many rows each planned row makes, in the global batch that begins at a row of the run."""
        return 1

    @abstractmethod
    def rows(self, stock: Stock, of: PlannedRows, lost: Mapping[int, DataError]) -> Rows:
        """Return the samples of planned rows; of those in ``lost`` nothing is in memory."""

    def rows_at_once(self, stock: Stock, of: PlannedRows) -> Rows | None:
        """Return the same for a group of batches, under the engine's lock; None: they are to be built one by one.

        That is if there is damage, something to wait for, or another ``rows_each`` in some of them.
        """
        rows = self.rows(stock, of, {})
        return None if rows.damage else rows

    def row_of(self, rows: Rows, i: int) -> int:  # noqa: ARG002
        """Return which row of the batch sample i is in."""
        return i

    def first_numbers(self, chunk_samples: Int64Array) -> Int64Array | None:  # noqa: ARG002
        """Return the number of the first row of each chunk, if rows are numbered samples of the dataset."""
        return None

    def ahead(self, stock: Stock, chunk_id: int, pass_number: int) -> Callable[[], object] | None:  # noqa: ARG002
        """Return what to compute while a chunk is fetched, in a thread beside; None: nothing."""
        return None

    # --- batches ---

    @abstractmethod
    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        """Return the batch of ``rows``; ``valid`` says which rows of the batch count.

        If ``rows`` are cut: the list of its micro-batches, each what a batch of its rows would be.
        """

    @abstractmethod
    def empty(self, builder: BatchBuilder, prototypes: Iterator[Rows], begin: int) -> Any:
        """Return the batch of no rows; see ``BatchBuilder.empty``."""

    def columns(
        self, recipe: Recipe, rows: Rows, allocate: Allocate | None = None, place: DecodedRow | None = None,
        draws: BatchDraws | None = None,
    ) -> RowColumns:  # fmt: skip
        """Return rows, none of them damaged, as columns from which plain batches are cut, if there are groups."""
        raise NotImplementedError

    def exclude(self, batch: Batch, valid: npt.NDArray[np.bool_]) -> None:  # noqa: B027  not all have to
        """Take rows that do not count out of whatever a batch says about all of them, in place.

        Args:
            batch: A batch, or what ``collate_fn`` gets for one of its rows.
            valid: Whether each row counts, bool [B]; [] for one row.
        """

    # --- over a run ---

    @property
    def changes(self) -> Sequence[tuple[int, str]]:
        """What rows are from which row of the run on, in words; (): always the same."""
        return ()

    def facts(self, state: LoaderState | None = None, row: int = 0) -> dict[str, Any]:  # noqa: ARG002
        """Return what a state of the run says of its rows; behind ``state``, also what held before its row."""
        return {}

    # --- between ranks, if rows are balanced ---

    @property
    def exchanges(self) -> bool:
        """Whether rows of a global batch are redistributed over its ranks."""
        return self.balance is not None and self.balance.how == "exchange"

    def split(self, batch: Batch) -> list[Batch]:
        """Return the rows of a batch one by one, without what is said of the batch."""
        raise NotImplementedError

    def sent(self, row: Batch) -> Batch:
        """Return a row that was split off in a smaller form, which ``joined`` takes too."""
        return row

    def joined(self, rows: Sequence[Batch], allocate: Allocate | None = None) -> Batch:
        """Return the batch of rows that were split off; wide tensors lie in memory from ``allocate``."""
        raise NotImplementedError

    # --- options ---

    @property
    def options(self) -> dict[str, Any]:
        """What must be the same on all ranks, and in all sources of a mixture, by the user's names."""
        return {}

    def budget(self, limit_bytes: int) -> Budget:
        """Return how ``memory_limit`` is divided; see ``Source.keep_at_most``."""
        return Budget.of(limit_bytes, packs=False)

    def fate(self, on_error: OnError) -> str:
        """Say what takes the place of a lost sample, for people."""
        return _FATES[on_error]

    def balanced(self, rules: BalanceRules, *, dataset: object, collate_fn: object) -> RowKind:  # noqa: ARG002
        """Return the same, balanced.

        Raises:
            ConfigError: Rows cannot be balanced.
        """
        raise ConfigError(
            f"balance={rules.how!r}: expected a Packed(…), or a Mixture of them, got a {type(dataset).__name__}"
        )

    def checked_jagged(self, jagged: Any, collate_fn: object) -> dict[str, Form]:
        """Return the forms of jagged fields.

        Raises:
            ConfigError: They are no names, or do not apply.
        """
        return checked_jagged(jagged, collate_fn)

    def check_shape(self, shape: Shape, collate_fn: object) -> None:  # noqa: B027  not all have to
        """Refuse batches of a shape that they cannot have."""

    def check_sequence(self, wanted: SequenceSlice, least: int) -> None:  # noqa: B027  not all have to
        """Refuse slices of sequences that are impossible; each must be divisible by ``least``."""


_FATES: dict[OnError, str] = {
    "substitute": "A neighbor takes the place of each, and so appears twice",
    "skip": 'A neighbor takes the place of each, with False in batch["__valid__"]',
    "raise": "The run stops",
}


@dataclass(frozen=True, slots=True)
class Samples(RowKind):
    """A row is a sample."""

    group_rows = 2_048

    @override
    def rows(self, stock: Stock, of: PlannedRows, lost: Mapping[int, DataError]) -> Rows:
        return replace(
            stock.rows(of.first_rows + of.within, of.chunk_ids, lost), numbers=stock.numbers(of), positions=of.positions
        )

    @override
    def first_numbers(self, chunk_samples: Int64Array) -> Int64Array | None:
        return sums(chunk_samples)

    @override
    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        mask = builder.recipe.mask_of(len(rows.keys), valid)
        copied = builder.copied(rows, mask, self.cuts(rows))
        return self.one_by_one(builder, rows, mask) if copied is None else copied

    def cuts(self, rows: Rows) -> Cuts:
        """Return where the samples are cut into micro-batches."""
        return rows.cuts

    def one_by_one(self, builder: BatchBuilder, rows: Rows, mask: Mask) -> Any:
        """Return the batch, each sample made alone."""
        builder.read_ahead(rows)
        samples = [builder.sample_or_substitute(rows, i, mask) for i in range(len(rows.keys))]
        return builder.collate(samples, mask, rows.cuts)

    @override
    def empty(self, builder: BatchBuilder, prototypes: Iterator[Rows], begin: int) -> Any:
        sample = builder.first_of(prototypes)
        return builder.nothing(sample if builder.recipe.collate_fn is None else self.given(builder, sample))

    def given(self, builder: BatchBuilder, sample: Sample) -> Sample:  # noqa: ARG002
        """Return what ``collate_fn`` gets for a row that consists of one sample."""
        return sample

    @override
    def columns(
        self, recipe: Recipe, rows: Rows, allocate: Allocate | None = None, place: DecodedRow | None = None,
        draws: BatchDraws | None = None,
    ) -> Columns:  # fmt: skip
        decoders, names = [part.decoders for part in recipe.parts], [part.name for part in recipe.parts]
        return Columns(rows, decoders, allocate, place, names, recipe.jagged, draws)


class _Bad(Exception):  # noqa: N818  carries a finding, is no error of the program
    """A row that cannot be delivered: the stage, and what happened (None: the transform dropped it)."""

    def __init__(self, stage: str, error: Exception | None) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.error = error

    @property
    def kind(self) -> str:
        """The stage, as losses are counted: a sample that was dropped is not one that failed."""
        return DROPPED if self.error is None else self.stage


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How bytes become a batch: the user's options. Thread-safe as far as the user's functions are.

    What is derived from all parts is computed once: a mixture may have hundreds of parts, and batches come by the
    thousand.

    Attributes:
        parts: How samples are made, for each source; one for a single dataset.
        items: What a row of a batch is.
        collate_fn: Function of a list of samples, or None: the default.
        portion: What this rank uses of a batch; taken where the batch is built.
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
        """Return how row i becomes a sample."""
        return self.parts[0 if rows.sources is None else int(rows.sources[i])]

    def narrowed(self, rows: Rows) -> Rows:
        """Return the rows without fields that their sources' ``fields`` leave out, if sources differ in these."""
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
    """Allocate tensors; in the second try at a batch, those of the first whose shape and type come again."""

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
        """Begin a second try: nothing of the first is in use."""
        self._free = list(self._made)


BadSampleReport: TypeAlias = Callable[[BadSample], None]
"""Called for every sample that could not be delivered; may raise to stop the run."""


class BatchBuilder:
    """Build one batch; used once.

    Args:
        recipe: How to build.
        substitutes: For row i of the batch, single-row ``Rows`` to try in its place, in order.
        report: Called for every sample that could not be delivered; may raise to stop the run.
        allocate: Allocator for the tensors of the default batch; None: fresh memory. Not used for a batch of which only
            a portion is kept.
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
        self._lost: list[str] = []  # stages in which the sample in progress, and those tried in its place, were lost
        self._ahead: dict[tuple[int, int, str], Outcome[object]] = {}  # by identity of the rows, row and field

    def build(self, rows: Rows, valid: Mask) -> Any:
        """Return the batch of ``rows``; with ``valid``, or under ``on_error="skip"``, it has ``__valid__`` [n]."""
        return self.recipe.items.build(self, rows, valid)

    def empty(self, prototypes: Iterator[Rows], begin: int = 0) -> Any:
        """Make the batch of no rows; ``prototypes`` are single rows of samples, for its form.

        Its global batch begins at row ``begin`` of the run.

        Raises:
            TooManyBadSamplesError: The form depends on a sample, and none of those tried can be read.
        """
        return self.recipe.items.empty(self, prototypes, begin)

    # --- what items are built with ---

    def copied(self, rows: Rows, mask: Mask, cuts: Cuts = None) -> Any | None:
        """Return the batch of plain columns; None: to be made row by row, where damage and user functions count."""
        recipe = self.recipe
        is_copied = recipe.is_plain and not rows.damage and not has_empty(cuts)
        if is_copied and not self._draws.seeds and not rows.has_distant:
            try:
                columns = recipe.items.columns(recipe, rows, self.allocate, self.place, self._draws)
                return cut_up(
                    cuts, len(rows.keys),
                    lambda low, high: recipe.whole(
                        columns.batch(low, high), None if mask is None else mask[low:high], high - low
                    ),
                )  # fmt: skip
            except (DecodeError, ChecksumError):  # building row by row will find out which value
                if self.allocate is not None:
                    self.allocate.again()
        return None

    def collate(self, samples: list[Sample], mask: Mask, cuts: Cuts = None) -> Any:
        """Return the batch of samples, by the user's function or the default one, or its micro-batches."""
        self.place[0] = -1
        shown = copy.copy(samples[0]) if has_empty(cuts) else {}  # before a function changes it

        def make(low: int, high: int) -> Any:
            if low == high:
                return self.nothing(shown)
            return self._collate(samples[low:high], None if mask is None else mask[low:high], low)

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
        """Return what the user's function makes of samples; its errors say which."""
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
        """Return the user's batch of no rows, made with ``sample``: the function is never called without samples."""
        if self.recipe.skips and isinstance(sample, dict):
            sample["__valid__"] = True
        return self.recipe.portion(without_rows(self.collated, sample), 0)

    def first_of(self, prototypes: Iterator[Rows]) -> Sample:
        """Return the first of single rows that can be read; the others are no samples of this batch, nor counted.

        Raises:
            TooManyBadSamplesError: None can be read.
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
        """Decode the distant fields of all rows at the same time, where no code of the user's is called."""
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
        """Return row i as a sample, or another one in its place."""
        sample = self.delivered(rows, i, mask)
        return self.substitute(rows, i) if sample is None else sample

    def delivered(self, rows: Rows, i: int, mask: Mask) -> Sample | None:
        """Return row i as a sample; None if it is lost, which is reported and marked."""
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
        """Return a sample in place of row i.

        Raises:
            TooManyBadSamplesError: None of those tried can be delivered.
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
        """Return the first of the single rows that can be delivered in place of row i; None: none of those tried."""
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
        part = self.recipe.part_of(rows, i)
        if part.on_error == "raise":
            if bad.error is not None:
                raise bad.error
            raise DecodeError(
                f"{rows.urls[i]}: sample {rows.keys[i]!r}: transform returned None, which drops the sample; under "
                f'on_error="raise" that is an error. Use on_error="substitute" or "skip" to drop samples'
            )
        number = -1 if rows.numbers is None else int(rows.numbers[i])
        self.report(
            BadSample(
                url=rows.urls[i],
                key=rows.keys[i],
                stage=bad.stage,
                reason=reason,
                dropped=bad.error is None,
                trace="" if bad.error is None or bad.stage == "fetch" else user_trace(bad.error),
                number=number,
                source=part.name,
            )
        )

    def _sample(self, rows: Rows, i: int) -> Sample:
        """Decode and transform row i.

        Raises:
            _Bad: It cannot be delivered.
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
