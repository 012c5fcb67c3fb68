"""Make packs that carry decoded values of their documents, such as images: ``CarriedPacks`` and ``PaddedCarried``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from streaming.build.batches.build import BatchBuilder, Mask, Recipe, RowKind
from streaming.build.batches.collate import to_tensors
from streaming.build.batches.items.carry import Carry, PlaceholderError, PlaceholderRuns
from streaming.build.batches.items.columns import PackColumns, PaddedColumns
from streaming.build.batches.items.packs import PaddedDocuments, TokenPacks
from streaming.build.batches.items.pieces import each_piece, pieces_of
from streaming.build.batches.jagged import Allocate, Form, Jagged, checked_jagged, collate_jagged, fresh, int64s
from streaming.build.batches.rows import Rows
from streaming.common.arrays import sums
from streaming.common.platforms import later
from streaming.errors import ConfigError, DecodeError
from streaming.order.packing.balance import BalanceRules
from streaming.order.packing.layout import NO_DOCUMENT, PackRows
from streaming.storage import redact
from streaming.types import Batch, Int64Array, Sample, override

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch", globals())


@dataclass(slots=True, kw_only=True)
class Values:
    """The values of one entry, in the order of documents.

    Attributes:
        found: The values.
        pieces: The piece whose document has each value.
        offsets: The place of each value's first placeholder in its document.
    """

    found: list[object] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CarriedPlaces:
    """The values of one entry, placed in rows: each array int64 [n], in the order of rows.

    Attributes:
        found: The values.
        keys: Key of the document of each value.
        rows: Row of each value.
        documents: Number of its document in the row.
        positions: Position in the row of its first placeholder; None: there are no placeholders.
    """

    found: list[object]
    keys: list[str]
    rows: Int64Array
    documents: Int64Array
    positions: Int64Array | None

    def entries(self, name: str, low: int, high: int, form: Form | None, allocate: Allocate) -> Batch:
        """Return the entries of rows ``[low, high)``: the values, and where they belong."""
        first, stop = np.searchsorted(self.rows, [low, high]).tolist()
        splits = sums(np.bincount(self.rows[first:stop] - low, minlength=high - low))
        found, keys = self.found[first:stop], self.keys[first:stop]
        batch: Batch = {
            name: _by_row(found, splits) if form is None else _end_to_end(name, found, form, keys, allocate)
        }
        batch[f"{name}_document"] = _jagged(self.documents[first:stop], splits)
        if self.positions is not None:
            batch[f"{name}_position"] = _jagged(self.positions[first:stop], splits)
        return batch


class CarriedColumns(PackColumns):
    """Make batches of packs with their values. For one thread.

    Args:
        rows: The pieces.
        packs: The packs that the pieces form.
        shape: Shape of a batch.
        available: int64 [n], number of tokens of each piece's document; 0 if it, or a value of it, cannot be delivered.
        allocate: See ``PackColumns``.
        names: See ``PackColumns``.
        unmasked: See ``PackColumns``.
        carry: What packs carry.
        values: The values of documents with tokens, by entry.
        forms: The form of entries that are laid end to end.
    """

    def __init__(
        self, rows: Rows, packs: PackRows, shape: Any, available: Int64Array, allocate: Allocate | None = None,
        names: Sequence[str] = (), unmasked: npt.NDArray[np.bool_] | None = None, *, carry: Carry,
        values: Mapping[str, Values], forms: Mapping[str, Form],
    ) -> None:  # fmt: skip
        super().__init__(rows, packs, shape, available, allocate, names, unmasked)
        self._carry, self._forms = carry, forms
        self._placed = {name: self._places_of(name, values.get(name) or Values()) for name in carry.names}

    def _places_of(self, name: str, values: Values) -> CarriedPlaces:
        """Return the values of an entry by row; documents that were lost before them have moved them forward."""
        segments, pieces = self._segments, np.array(values.pieces, np.int64)
        number = sums(segments.there)[pieces]  # of the piece among those with tokens
        runs = np.flatnonzero(segments.documents != NO_DOCUMENT)[number]
        rows = self._pieces.packs[pieces]
        positions = segments.begins[runs] - np.array(segments.places)[rows] + np.array(values.offsets, np.int64)
        return CarriedPlaces(
            found=values.found, keys=[self._rows.keys[piece] for piece in values.pieces], rows=rows,
            documents=segments.documents[runs].astype(np.int64),
            positions=positions if name in dict(self._carry.placeholders) else None,
        )  # fmt: skip

    @override
    def _entries(self, low: int, high: int, borders: list[tuple[int, int]]) -> Batch:
        batch = super()._entries(low, high, borders)
        for name, placed in self._placed.items():
            batch |= placed.entries(name, low, high, self._forms.get(name), self._allocate)
        return batch

    @override
    def _tensors(self, low: int, high: int) -> Batch:
        """Return the entries of tokens; placeholders carry no loss."""
        batch = super()._tensors(low, high)
        tokens, ignored = self._carry.by_token, self._shape.ignore_id
        labels: npt.NDArray[np.int64] = batch["labels"].numpy()  # type: ignore[attr-defined]
        for token in tokens:
            labels[labels == token] = ignored
        return batch if not tokens else batch | {"num_labels": int(np.count_nonzero(labels != ignored))}


class PaddedCarriedColumns(CarriedColumns, PaddedColumns):
    """Make batches of padded packs with their values, one at a time."""


@dataclass(frozen=True, kw_only=True)
class CarriedPacks(TokenPacks):
    """A row is a pack of documents that carries decoded values of them, such as images.

    A document with a value that cannot be delivered becomes padding. Documents are whole: none is cut.

    Attributes:
        carry: The values, and the tokens that stand for them.
    """

    carry: Carry

    columns_of = CarriedColumns
    no_map = (
        "Packed: map: functions of carried values belong to the documents; write Packed(StreamingDataset(…, "
        "transform=…), …, carry=…). To change whole packs use the loader's collate_fn"
    )

    @property
    @override
    def grouped(self) -> None:
        return None

    @property
    @override
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.shape.fields, *self.carry.fields)

    @property
    @override
    def raw(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.shape.fields

    @property
    @override
    def entries(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.carry.names

    @override
    def mixed(self, kinds: Sequence[RowKind]) -> Self:
        made = super().mixed(kinds)
        beside = dict.fromkeys(one for kind in kinds if isinstance(kind, CarriedPacks) for one in kind.carry.beside)
        return replace(made, carry=replace(self.carry, beside=tuple(beside)))

    def told_of(self, beside: tuple[str, ...]) -> CarriedPacks:
        """Return this kind with the fields that documents have beside the carried ones, for messages."""
        return replace(self, carry=replace(self.carry, beside=beside))

    @override
    def positions(self, positions: Int64Array, packs: PackRows) -> Int64Array:
        return each_piece(positions, packs)

    # --- batches ---

    @override
    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        packs = pieces_of(rows)
        available = self._tokens_there(builder, rows, packs).copy()
        values = self._values(builder, rows, available)
        firsts = None if rows.positions is None else packs.splits
        return self._built(builder, rows, valid, available, partial(self._with, values), firsts)

    def _values(self, builder: BatchBuilder, rows: Rows, available: Int64Array) -> dict[str, Values]:
        """Return the values of all documents by entry; ``available`` becomes 0 for documents that are lost by them."""
        found = {name: Values() for name in self.carry.names}
        runs, transforms = self._runs(rows, available), [part.transform is not None for part in builder.recipe.parts]
        fields = {name: rows.fields[name] for name in self.carry.fields if name in rows.fields}
        alone, has_any = replace(rows, fields=fields), runs.has_any
        for where in fields.values():
            has_any = has_any | (where.sizes >= 0)
        if any(transforms):
            has_any = has_any | (True if rows.sources is None else np.array(transforms)[rows.sources])
        for i in np.flatnonzero((available > 0) & has_any).tolist():
            sample = builder.delivered(rows if builder.recipe.part_of(rows, i).transform else alone, i, None)
            of = None if sample is None else self._values_of(builder, rows, i, sample, int(available[i]), runs)
            if of is None:
                available[i] = 0
                continue
            for name, (some, places) in of.items():
                values = found[name]
                values.found += some
                values.pieces += [i] * len(some)
                values.offsets += places
        builder.place[0] = -1
        return found

    def _runs(self, rows: Rows, available: Int64Array) -> PlaceholderRuns:
        """Return the runs of placeholders in the tokens of all documents, as far as they are delivered."""
        size, sizes = self.shape.token_bytes, np.minimum(pieces_of(rows).stops, available)
        if not self.carry.by_token or not available.any():
            return PlaceholderRuns(self.carry, np.zeros(0, self.shape.dtype), np.zeros(len(sizes) + 1, np.int64))
        starts = rows.fields[self.shape.field].starts
        spans = map(slice, starts.tolist(), (starts + sizes * size).tolist())
        joined = b"".join(rows.view[span] for span, is_there in zip(spans, sizes > 0, strict=True) if is_there)
        return PlaceholderRuns(self.carry, np.frombuffer(joined, self.shape.dtype), sums(sizes))

    def _values_of(
        self, builder: BatchBuilder, rows: Rows, i: int, sample: Sample, available: int, runs: PlaceholderRuns
    ) -> dict[str, tuple[list[object], list[int]]] | None:
        """Return the values of a document, and the places of their placeholders; None after reporting it as lost."""
        self._check_changed(builder, rows, i, sample)
        found = {
            name: [sample[field] for field in fields if sample.get(field) is not None]
            for name, fields in self.carry.entries
        }
        counts = {name: len(values) for name, values in found.items()}
        try:
            places = runs.places(i, counts, num_cut=available - int(pieces_of(rows).stops[i]))
        except PlaceholderError as why:
            builder.lost(rows, i, "decode", DecodeError(f"{redact(rows.urls[i])}: sample {rows.keys[i]!r}: {why}"))
            return None
        return {name: (values, places.get(name) or [0] * len(values)) for name, values in found.items()}

    def _check_changed(self, builder: BatchBuilder, rows: Rows, i: int, sample: Any) -> None:
        """Refuse what a transform must not return.

        Raises:
            ConfigError: The sample is no dict of fields, or has other tokens than the document.
        """
        if not builder.recipe.part_of(rows, i).transform:
            return
        what = f"{redact(rows.urls[i])}: sample {rows.keys[i]!r}: transform"
        if not isinstance(sample, Mapping):
            raise ConfigError(f"{what} returned {type(sample).__name__}, expected a dict of fields; packs take their "
                              "carried values from it")  # fmt: skip
        for name in self.raw:
            value = sample.get(name)
            if value is None:
                continue
            start, size = int(rows.fields[name].starts[i]), int(rows.fields[name].sizes[i])
            if not isinstance(value, bytes) or value != rows.view[start : start + size]:
                raise ConfigError(
                    f"{what} changed {name!r}, but the tokens of packs go straight from the shards into the batch; "
                    "leave it as it is, and change tokens when shards are written"
                )

    @override
    def _laid_out(
        self, recipe: Recipe, rows: Rows, packs: PackRows, available: Int64Array, allocate: Allocate | None
    ) -> PackColumns:
        return self._with({}, recipe, rows, packs, available, allocate)

    def _with(
        self, values: Mapping[str, Values], recipe: Recipe, rows: Rows, packs: PackRows, available: Int64Array,
        allocate: Allocate | None,
    ) -> PackColumns:  # fmt: skip
        return self.columns_of(
            rows, packs, self.shape, available, allocate, [part.name for part in recipe.parts],
            self.unmasked_of(rows), carry=self.carry, values=values, forms=recipe.jagged,
        )  # fmt: skip

    @override
    def _as_row(self, batch: Batch) -> Sample:
        row = super()._as_row(batch)
        return {name: value.values if isinstance(value, Jagged) else value for name, value in row.items()}

    # --- options ---

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {**super().options, **self.carry.options}

    @override
    def balanced(self, rules: BalanceRules, *, dataset: object, collate_fn: object) -> RowKind:
        if rules.how == "exchange":
            raise ConfigError(
                f'balance="exchange" with Packed(…, carry={self.carry.names!r}): the carried values would travel '
                'between ranks with their packs; use balance="local"'
            )
        return super().balanced(rules, dataset=dataset, collate_fn=collate_fn)

    @override
    def checked_jagged(self, jagged: Any, collate_fn: object) -> dict[str, Form]:
        forms = checked_jagged(jagged, collate_fn)
        other = [name for name in forms if name not in self.carry.names]
        if other:
            raise ConfigError(
                f"jagged: {other[0]!r} is not carried; of packs, only carried values are laid end to end: "
                f"{', '.join(map(repr, self.carry.names))}"
            )
        return forms


@dataclass(frozen=True, kw_only=True)
class PaddedCarried(CarriedPacks, PaddedDocuments):
    """A row is a batch under a token budget, one document per line, that carries decoded values of them."""

    columns_of = PaddedCarriedColumns

    @override
    def _as_row(self, batch: Batch) -> Sample:
        return batch


def _by_row(found: list[object], splits: Int64Array) -> list[list[object]]:
    """Return a list of values for each row; arrays become tensors."""
    values = to_tensors(found)
    return [values[low:high] for low, high in pairwise(splits.tolist())]


def _end_to_end(name: str, found: list[object], form: Form, keys: list[str], allocate: Allocate) -> Any:
    """Return all values end to end; uint8 [0] if there are none."""
    if found:
        return collate_jagged(name, found, form, keys, allocate)
    nothing = Jagged(fresh((0,), torch.uint8), int64s([0]), fresh((0, 1), torch.int64) if form == "flat" else None)
    return nothing.nested() if form == "nested" else nothing


def _jagged(values: Int64Array, splits: Int64Array) -> Jagged:
    return Jagged(torch.from_numpy(values.copy()), torch.from_numpy(splits.astype(np.int64)))
