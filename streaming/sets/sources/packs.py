"""Make packs of the documents of a dataset, and count them: ``PackedDocuments``."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from infra import agent_store, is_first_process
from streaming.build.batches.build import OnError, SourceRecipe
from streaming.build.batches.draws import Chain, as_chain
from streaming.build.batches.items.carried import CarriedPacks
from streaming.build.batches.items.options import DTYPES, checked_alike, checked_budgets, checked_items
from streaming.build.batches.items.pieces import PieceItems
from streaming.build.decode import DecodeSpec, FieldDecoder, RawFields, with_raw
from streaming.common.arguments import some_names
from streaming.common.arrays import rows_by, sums
from streaming.common.identities import identity_of
from streaming.common.job.shared_results import Peers, framed, part_of, shared, shared_parts, unframed
from streaming.common.job.store import job_peers
from streaming.common.threads import on_threads
from streaming.errors import ConfigError, IndexMissingError, shell_place, shell_word
from streaming.order.packing.fit import Fit, fit, pack
from streaming.order.packing.groups import MAX_GROUP_BYTES, PACKS_OF_GROUP, cut_groups
from streaming.order.packing.layout import PackRows
from streaming.order.packing.rules import Overlong, PackRules, cut
from streaming.order.plan.schedule import Schedule
from streaming.sets.filters.late_columns import LateColumn
from streaming.sets.filters.lengths import UNDEFINED, UNKNOWN, Lengths, names_in, value_below_0
from streaming.sets.filters.measures import Measures
from streaming.sets.filters.select import late_columns_of
from streaming.sets.sources.keys import KeysOfShards
from streaming.sets.sources.samples import SampleSource
from streaming.shards.catalog.open import check_decoded, check_fields, digest_of, left_beside
from streaming.shards.catalog.packed import Fits, PackedSource, PackGroups, kept_fits, samples_between, tokens_of
from streaming.shards.catalog.source import ChunkSource
from streaming.shards.index.where import Quantity, column_quantity, parse_quantity, written
from streaming.shards.late.fields import late_names
from streaming.shards.schema.kinds import kind_by_name
from streaming.storage import redact
from streaming.types import Int64Array, Sample, Transform

_REQUESTS = 16
_LONG_ROW = 2**20
"""Maximum length of a row, in tokens, if the whole set has fewer: about 32 MiB."""
_FULL_ENOUGH = 0.75
"""Mean fill of padded batches below which a warning names the reason and a cure."""
_log = logging.getLogger("streaming")
_COUNTS = ("documents", "tokens", "packed", "split", "truncated", "dropped", "empty", "places")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCounts:
    """Counts of the documents of a packed set, by outcome.

    Attributes:
        documents: Documents in the dataset.
        tokens: Tokens in these documents, according to the column.
        packed: Tokens that are in a pack.
        split: Documents longer than a pack that were split into pieces.
        truncated: Documents longer than a pack that were truncated.
        dropped: Documents longer than a pack that were left out.
        empty: Documents without tokens.
        places: Token positions in all packs, including padding.
        amounts: What the packs hold of each further budget.
    """

    documents: int
    tokens: int
    packed: int
    split: int
    truncated: int
    dropped: int
    empty: int
    places: int
    amounts: tuple[int, ...] = ()

    def __add__(self, other: PackCounts) -> PackCounts:
        amounts = tuple(one + more for one, more in zip(self.amounts, other.amounts, strict=True))
        return PackCounts(amounts=amounts, **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS})


class NothingToPackError(ConfigError):
    """No document can be packed."""

    def __init__(self, message: str, counts: PackCounts) -> None:
        super().__init__(message)
        self.counts = counts


class PackedDocuments(PackedSource):
    """Make packs of the documents of a set, as tensors: the source behind a ``Packed``.

    Its options are those of ``Packed``, which has their defaults. Of several parts of a set, one reads the lengths, and
    none logs its counts.

    Attributes:
        column: Column of lengths.
        alike: Columns in which all samples of a pack are equal.
        budgets: What each further budget counts, by name.
        counts: Counts of the documents by outcome.
        items: The kind of row of a batch.
    """

    documents: SampleSource
    decode: DecodeSpec
    decoders: FieldDecoder
    transform: Transform | Chain | None
    on_error: OnError
    max_bad_samples: float
    bad_samples_file: str | None

    def __init__(  # noqa: PLR0913  the options of Packed
        self,
        documents: SampleSource,
        length: int | Schedule,
        *,
        column: str,
        field: str | None,
        dtype: str | None,
        overlong: Overlong | None,
        mask_field: str | None,
        shift_labels: bool,
        labels_across: bool,
        pad_id: int,
        ignore_id: int,
        max_docs: int | None,
        multiple: int,
        padded: bool,
        stride: int | None,
        overlap_labels: bool,
        budgets: Mapping[str, int | tuple[str, int]] | None,
        alike: Sequence[str],
        carry: Sequence[str] | Mapping[str, Sequence[str]],
        placeholder: int | Mapping[str, int] | None,
        lengths: Lengths | None = None,
        is_part: bool = False,
    ) -> None:
        limits, kinds = checked_budgets(budgets, column), checked_alike(alike)
        rules, self.items = checked_items(
            {"length": length, "overlong": overlong, "multiple": multiple, "max_docs": max_docs, "padded": padded,
             "stride": stride, "budgets": tuple(limit for _, limit in limits.values()), "alike": len(kinds),
             "spread": any(text is not None for text, _ in limits.values())},
            {"mask_field": mask_field, "shift_labels": shift_labels, "labels_across": labels_across, "pad_id": pad_id,
             "ignore_id": ignore_id},
            column=column, field=field, dtype=dtype, overlap_labels=overlap_labels, carry=carry,
            placeholder=placeholder,
        )  # fmt: skip
        _check_documents(documents, self.items)
        _check_widths(documents, self.items.raw)
        peers = job_peers(agent_store())
        _check_names(documents, self.items, peers)
        self.items = _with_beside(documents, self.items, peers)
        self.budgets = _quantities(limits)
        columns = (column, *self.budgets.values(), *kinds)
        if lengths is None:
            lengths = _lengths_of(documents, columns, peers)
        read = _reading(documents, self.items)
        work = _Work(read, lengths, rules, columns, tuple(self.budgets), fits := kept_fits())
        self.column, self.alike = column, kinds
        self.counts: PackCounts
        groups, self.counts = work.of_all(peers)
        if self.items.fields and not rules.padded:
            _check_longest(rules.length, self.counts.tokens)
        super().__init__(read, groups, lengths, rules, fits)
        self.items = self.items.typed(lambda name: self._token_dtype(name, dtype, peers))
        self._lengths = lengths
        self._measures: dict[tuple[str, ...], Measures] = {}
        self._take_over()
        if not is_part:
            self._log_counts()

    # --- what users read by number ---

    @property
    def num_readable(self) -> int:
        """Number of packs."""
        return int(self.chunk_samples.sum())

    @property
    def lengths(self) -> Lengths:
        """Reads the lengths of documents, also for other parts of the same set."""
        return self._lengths

    @property
    def unit(self) -> str:
        """Unit of lengths, for messages: tokens, or the column of whole samples."""
        return self.items.unit or self.column

    @property
    def shard_keys(self) -> KeysOfShards:
        """The keys of all documents, by shard."""
        return self.documents.shard_keys

    @property
    def fill(self) -> float:
        """Fraction of token positions that hold tokens, 0 to 1."""
        return self.counts.packed / self.counts.places

    @property
    def fills(self) -> dict[str, float]:
        """Fraction of each further budget that packs use, by name."""
        limits = self.num_readable * np.maximum(np.array(self.rules.budgets, np.int64), 1)
        return dict(zip(self.budgets, (np.array(self.counts.amounts) / limits).tolist(), strict=True))

    def read(self, numbers: Int64Array, sources: Sequence[str] = ()) -> list[Sample]:
        """Return packs by number, which must exist, as laid out in epoch 0 by the set's seed.

        Args:
            numbers: int64 [n], numbers of packs in storage order.
            sources: For each number, the name of this set in a mixture.

        Raises:
            DataError: A document cannot be read.
        """
        named = sources or [""] * len(numbers)
        return [self._pack(*one) for one in zip(numbers.tolist(), named, strict=True)]

    def scan(self, source: str = "") -> Iterator[Sample]:
        """Yield all packs in storage order, as :meth:`read` returns them."""
        for number in range(self.num_readable):
            yield self._pack(number, source)

    def _pack(self, index: int, source: str) -> Sample:
        ends = np.cumsum(self.chunk_samples)
        group = int(np.searchsorted(ends, index, side="right"))
        offset = index - int(ends[group] - self.chunk_samples[group])
        packs = self.packs(np.array([group]), np.array([offset]), np.zeros(1, np.int64), self.seed)
        _, samples = self.samples_in(group)
        before = int(self.documents.chunk_samples[: self._groups.firsts[group]].sum())
        numbers = before + np.searchsorted(samples - self.chunk(group).first_sample, packs.samples)
        found: list[Any] = self._given.read(numbers)
        return self.items.alone(replace(self.recipe_parts[0], name=source), found, packs)

    def speaking(self, classes: Mapping[str, tuple[str, ...]]) -> Self:
        """Return the same packs of documents with translated class numbers; tokens have no classes."""
        if self.items.fields and self.items.fields == self.items.raw:
            return self
        made = copy.copy(self)
        made.documents = _reading(self.documents.speaking(classes), self.items)
        made._take_over()
        return made

    def mapped(self, function: Transform) -> NoReturn:  # noqa: ARG002  as other sources have it
        """Raise an error: see ``transform``.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(self.items.no_map)

    def words(self) -> str:
        """Describe the packs."""
        parts = [f"length={self.rules.length}", *(f"{what} from row {row:,} on" for row, what in self.items.changes)]
        parts += [f"{self.num_readable} packs", f"{self.counts.packed} {self.unit}"]
        return ", ".join([*parts, f"{self.fill:.1%} filled"])

    # --- for the engine ---

    def expected_samples(self, num_rows: float) -> float:
        """See ``ShardSet``: the mean number of documents in ``num_rows`` packs."""
        return num_rows * self.counts.documents / max(self.num_readable, 1)

    @property
    def recipe_parts(self) -> tuple[SourceRecipe, ...]:
        """The recipe that makes packs of documents."""
        return self.documents.recipe_parts

    def measured(self, texts: tuple[str, ...], chunk_ids: Int64Array, packs: PackRows) -> npt.NDArray[np.float64]:
        """Return quantities of the pieces of packs, float64 [n, texts].

        Args:
            texts: Names of budgets, or arithmetic over columns of the documents.
            chunk_ids: int64 [n], the group of each piece.
            packs: Packs of n pieces.

        Raises:
            ConfigError: A text is not valid, or a document has no value.
        """
        order, pieces = [np.empty(0, np.int64)], []
        for group, among in rows_by(chunk_ids):
            shard = int(self.documents.table.shard[self._groups.firsts[group]])
            pieces.append((shard, packs.samples[among] + self.chunk(group).first_sample))
            order.append(among)
        places = np.concatenate(order)
        found = np.empty((len(places), len(texts)))
        tokens = packs.stops - packs.starts
        found[places] = self.measures_of(texts).of_pieces(pieces, tokens[places], packs.lengths[places])
        return found

    def measures_of(self, texts: tuple[str, ...]) -> Measures:
        """Return the reader of these quantities, made once; see ``measured``."""
        if texts not in self._measures:  # two threads may both make one; either serves
            known = {
                name: one if isinstance(one, Quantity) else column_quantity(one) for name, one in self.budgets.items()
            }
            self._measures[texts] = Measures.of(self.storage, self.documents.shards, texts, known)
        return self._measures[texts]

    def keep_at_most(self, num_bytes: int) -> None:
        """See ``RowSamples``: half of the bytes are for packs, half for lengths."""
        super().keep_at_most(num_bytes // 2)
        self._lengths.keep_at_most(num_bytes // 2)

    def _token_dtype(self, field: str, dtype: str | None, peers: Peers | None) -> str:
        """Return the dtype of tokens, given or inferred from the first documents; with peers, rank 0 reads them."""

        def look() -> bytes:
            for shard in range(len(self.urls)):
                records = self.records_of(shard)
                if records is None or field not in records.fields:
                    continue
                tokens, sizes = tokens_of(self._lengths_of(shard)), records.fields[field][1]
                there = (tokens > 0) & (sizes > 0)
                if there.any():
                    return str(float(np.median(sizes[there] / tokens[there]))).encode()
            return b"0"

        name = digest_of([list(self.urls), field])
        found = float(shared(peers, f"tokens/{name}", look))
        if dtype is not None:
            width = np.dtype(DTYPES[dtype]).itemsize
            stored = [name for name, one in DTYPES.items() if found == np.dtype(one).itemsize]
            if stored and stored != [dtype]:
                raise ConfigError(
                    f"dtype: field {field!r} has {found:g} bytes for each token of column {self.column!r}: it holds "
                    f"{stored[0]}, got dtype={dtype!r}, which would read other ids. Leave dtype out. To mix it with a "
                    f"set of {dtype}, convert its source again with the --tokenizer of that set; the vocabulary sets "
                    f"the width"
                )
            if found not in (0, width):
                _log.warning(
                    "Packed: field %r has %g bytes for each token of column %r, but dtype=%r has %d: only as many "
                    "tokens of each document are read as the column counts", field, found, self.column, dtype, width,
                )  # fmt: skip
            return DTYPES[dtype]
        for one in DTYPES.values():
            if found == np.dtype(one).itemsize:
                return one
        why = f"it has {found:g} bytes for each token of the column" if found else "no sample table has its sizes"
        raise ConfigError(
            f"dtype: it cannot be inferred for field {field!r}: {why}. If the field holds raw uint16 or uint32, give "
            'dtype="uint16" or "uint32": the column counts something else, or was made with another tokenizer. If it '
            "holds anything else, such as int64 or arrays with a header, rewrite it: `shard_tools convert URL "
            "TARGET --tokens-field FIELD`"
        )

    @property
    def _given(self) -> SampleSource:
        """The documents as ``RowKind.alone`` gets them: as stored if fields are read that rows decode themselves."""
        if not self.items.fields:
            return self.documents
        stored = copy.copy(self.documents)
        stored.decoders, stored.transform = RawFields(), None
        return stored

    def _take_over(self) -> None:
        """Copy the options of the documents to this source."""
        documents = self.documents
        self.meaning = documents.meaning
        self.fields, self.decode, self.decoders = documents.fields, None, documents.decoders
        self.transform = documents.transform
        self.on_error, self.bad_samples_file = documents.on_error, documents.bad_samples_file
        self.max_bad_samples = documents.max_bad_samples

    def _log_counts(self) -> None:
        """Log the counts of documents by outcome, and whether groups are too small to be filled well."""
        counts, length = self.counts, self.rules.length
        said = {"split": counts.split, "truncated": counts.truncated, "dropped": counts.dropped}
        over = [
            f"{number:,} {'larger' if self.rules.budgets else 'longer'} ones {what}"
            for what, number in said.items()
            if number
        ]
        over += [f"{counts.empty:,} without tokens left out"] if counts.empty else []
        if is_first_process():
            _log.info(
                "Packed: %s packs of %s %s%s, %.2f %% filled, of %s %s with %s%s; %s groups",
                f"{self.num_readable:,}", f"{length:,}", self.unit, self.items.at_most,
                100 * self.fill, f"{counts.documents:,}", self.items.documents,
                f"{counts.tokens:,} {self.items.unit or 'in all'}",
                "".join(f", {one}" for one in over), f"{len(self.chunk_samples):,}",
            )  # fmt: skip
            if self.budgets:
                shown = zip(self.fills.items(), self.rules.budgets, strict=True)
                used = ", ".join(f"{name} {100 * fill:.2f} % of {limit:,}" for (name, fill), limit in shown)
                _log.info("Packed: of further budgets packs use on average: %s", used)
        if self.alike:
            log_fill(counts, self.rules, self.num_readable, self.alike, len(self.chunk_samples))
        small = int((self.chunk_samples < PACKS_OF_GROUP // 4).sum())
        if 2 * small > len(self.chunk_samples):
            _log.warning(
                "Packed: %s of %s groups have fewer than %d packs (%.0f on average, %.2f %% filled): a group lies in "
                "one shard and takes at most %d MiB of it. %d packs need %s %s in a shard; larger shards "
                "or a shorter length fill better",
                f"{small:,}", f"{len(self.chunk_samples):,}", PACKS_OF_GROUP // 4, self.chunk_samples.mean(),
                100 * self.fill, MAX_GROUP_BYTES >> 20, PACKS_OF_GROUP, f"{PACKS_OF_GROUP * length:,}", self.unit,
            )  # fmt: skip


class _Work:
    """Cut shards into groups and count their packs; ranks exchange the results of their shards as bytes."""

    def __init__(
        self, documents: ChunkSource, lengths: Lengths, rules: PackRules, columns: tuple[str | Quantity, ...],
        budgets: tuple[str, ...], fits: Fits,
    ) -> None:  # fmt: skip
        self._documents, self._lengths, self._rules, self._columns = documents, lengths, rules, list(map(str, columns))
        self._shown = [str(one) if isinstance(one, Quantity) else written(one) for one in columns]
        self._derived = {place: budgets[place - 1] for place, one in enumerate(columns) if isinstance(one, Quantity)}
        self._fits = fits

    @property
    def _num_counts(self) -> int:
        """Number of counts of a shard: those by outcome, then the sum of each further budget."""
        return len(_COUNTS) + len(self._rules.budgets)

    def of_all(self, peers: Peers | None) -> tuple[PackGroups, PackCounts]:
        """Return all groups, and the counts of documents by outcome; with peers, each rank handles a range of shards.

        Raises:
            ConfigError: No document can be packed.
        """
        name = digest_of([self._documents.fingerprint, asdict(self._rules), self._columns])
        totals, digests, rows = np.zeros(self._num_counts, np.int64), list[str](), []
        for part in shared_parts(peers, f"packs/{name}", self._part):
            head, start = unframed(part)
            totals += head["counts"]
            digests += head["digests"]
            rows.append(np.frombuffer(part, "<i8", offset=start).reshape(-1, 3))
        firsts, stops, packs = np.concatenate(rows).astype(np.int64).T
        plain, amounts = totals[: len(_COUNTS)].tolist(), totals[len(_COUNTS) :].tolist()
        counts = PackCounts(amounts=tuple(amounts), **dict(zip(_COUNTS, plain, strict=True)))
        if not packs.sum():
            left_out = f"{counts.dropped:,} are longer than length={self._rules.length:,} (overlong='drop')"
            raise NothingToPackError(
                f"Packed: nothing to pack: of {counts.documents:,} documents {counts.empty:,} have no tokens by column "
                f"{self._columns[0]!r}, and {left_out}",
                counts,
            )
        return PackGroups(firsts=firsts, stops=stops, packs=packs, digests=tuple(digests)), counts

    def _part(self, rank: int, world_size: int) -> bytes:
        mine = part_of(len(self._documents.urls), rank, world_size)
        found = on_threads(self._shard, mine, _REQUESTS, name="shardstream-packs")
        counts = np.sum([[0] * self._num_counts, *(one[1] for one in found)], axis=0, dtype=np.int64)
        head = {"counts": counts.tolist(), "digests": [one[2] for one in found]}
        rows = np.concatenate([np.empty((0, 3), np.int64), *(one[0] for one in found)]).astype("<i8")
        return framed(head, rows.tobytes())

    def _shard(self, shard: int) -> tuple[Int64Array, list[int], str]:
        """Cut a shard into groups; return (first chunk, stop chunk, packs) per group, the counts, and a digest."""
        # A shard has C = high - low chunks with n samples; it becomes G groups of consecutive chunks.
        table, rules = self._documents.table, self._rules
        low, high = table.rows_of(shard)
        if low == high:
            return np.empty((0, 3), np.int64), [0] * self._num_counts, ""
        _, samples = samples_between(self._documents, low, high)
        lengths = self._lengths(shard)[samples]  # int64 [n], or [n, columns] with budgets
        if lengths.min(initial=0) < 0:
            raise self._no_length(shard, samples, lengths)
        counted = tokens_of(lengths)
        borders = sums(table.num_samples[low:high])  # [C + 1], first sample of each chunk
        tokens = np.diff(sums(counted)[borders])  # [C], tokens of each chunk
        firsts = cut_groups(tokens, table.byte_start[low:high], table.byte_end[low:high], length=rules.length)
        stops = np.append(firsts[1:], high - low)  # [G], like firsts: chunk numbers within the shard
        packs, places = [], 0
        for first, begin, end in zip(firsts.tolist(), borders[firsts], borders[stops], strict=True):
            found = self._fits.of(low + first, partial(fit, lengths[begin:end], rules))
            packs.append(found.num_packs)
            places += _places(lengths[begin:end], rules, found)
        pieces = cut(lengths, rules)
        counts = [len(lengths), int(counted.sum()), pieces.num_tokens, pieces.num_split, pieces.num_truncated,
                  pieces.num_dropped, pieces.num_empty, places,
                  *pieces.amounts[:, : len(rules.budgets)].sum(axis=0).tolist()]  # fmt: skip
        rows = np.stack([firsts + low, stops + low, np.array(packs, np.int64)], axis=1)
        digest = hashlib.blake2b(lengths.astype("<i8").tobytes() + rows.astype("<i8").tobytes(), digest_size=16)
        return rows, counts, digest.hexdigest()

    def _no_length(self, shard: int, samples: Int64Array, lengths: Int64Array) -> ConfigError:
        """Return an error that names the sample and column of the smallest length, which is missing or invalid."""
        row, place = divmod(int(lengths.argmin()), len(self._columns))
        least, column, number = int(lengths.min()), self._columns[place], int(samples[row])
        sample = f"sample {number} of {redact(self._documents.urls[shard])}"
        out = f'leave such samples out, StreamingDataset(…, where="{self._shown[place]} >= {0 if place else 1}")'
        if place in self._derived and least != UNKNOWN:
            has = "is no number (it divides by 0)" if least == UNDEFINED else f"is {value_below_0(least)}"
            return ConfigError(
                f"Packed: budgets: {self._derived[place]}: {column!r} {has} for {sample}, expected at least 0. Write "
                f"arithmetic that gives at least 0 for every sample, or {out}"
            )
        has = "no value" if least == UNKNOWN else str(value_below_0(least))
        rebuilt = "" if place in self._derived else ", or rebuild the column (`shard_tools column add`)"
        what = "quantity" if place in self._derived else "column"
        return ConfigError(f"Packed: {what} {column!r} has {has} for {sample}, expected at least 0; {out}{rebuilt}")


def log_fill(
    counts: PackCounts, rules: PackRules, num_packs: int, alike: tuple[str, ...], num_groups: int
) -> None:  # fmt: skip
    """Log how full batches of equal samples are, which depends on the number of samples of one kind in a group."""
    room = counts.places / (num_packs * rules.length)
    if rules.max_docs is not None:
        held = counts.documents - counts.dropped - counts.empty
        room = max(room, held / (num_packs * rules.max_docs))
    summary = f"Packed: batches of like {', '.join(alike)} are {100 * room:.0f} % full on average"
    if room >= _FULL_ENOUGH:
        if is_first_process():
            _log.info("%s", summary)
        return
    _log.warning(
        "%s: each of %s groups (at most %d MiB of a shard) leaves one batch of each kind partly filled. Use fewer "
        "kinds, a smaller length, or shards in which similar samples are adjacent (shard_tools reshard SOURCE "
        "TARGET --sort COLUMN)",
        summary, f"{num_groups:,}", MAX_GROUP_BYTES >> 20,
    )  # fmt: skip


def _quantities(limits: Mapping[str, tuple[str | None, int]]) -> dict[str, Quantity | str]:
    """Return what each budget counts: a column, or arithmetic over columns.

    Raises:
        ConfigError: A text is no arithmetic.
    """
    return {
        name: name if text is None else parse_quantity(text, f"budgets: {name}") for name, (text, _) in limits.items()
    }


def _check_longest(length: int, num_tokens: int) -> None:
    """Refuse rows that are long, and longer than all documents together.

    Raises:
        ConfigError: The rows are.
    """
    most = max(_LONG_ROW, num_tokens)
    if length > most:
        raise ConfigError(
            f"length={length:,}: expected at most {most:,}: a row longer than all {num_tokens:,} tokens of the set "
            "together is memory for padding. Give a smaller length, or padded=True"
        )


def _places(lengths: Int64Array, rules: PackRules, found: Fit) -> int:
    """Return the number of token positions in the packs of documents of these lengths, including padding."""
    return int(pack(lengths, rules, found).sizes.sum()) if rules.padded else found.num_packs * rules.length


def _lengths_of(documents: SampleSource, columns: tuple[str | Quantity, ...], peers: Peers | None) -> Lengths:
    """Return the lengths of documents, and of what else limits a pack."""
    late = late_columns_of(documents.storage, documents.shards, names_in(columns), peers)
    _tell_of_other_transforms(late, documents.transform)
    return Lengths(documents.storage, documents.shards, columns, late)


def _tell_of_other_transforms(late: Mapping[str, LateColumn], transform: Transform | Chain | None) -> None:
    """Log lengths that were measured after another transform than that of the documents."""
    chain = as_chain(transform)
    now = "" if chain is None else ", then ".join(map(identity_of, chain.functions))
    for name, column in late.items():
        for home, document in column.documents.items():
            if document.after and document.after != now and is_first_process():
                _log.warning(
                    "Packed: column %r holds %s, which was %s, but samples go through %s: batches may be larger than "
                    "length= says. If lengths differ now, measure them again: shard_tools column add %s %s --compute "
                    "length --after MODULE:FUNCTION --overwrite",
                    name, document.made_from, document.after, now or "no transform", shell_place(home),
                    shell_word(name),
                )  # fmt: skip


def _check_widths(documents: SampleSource, fields: Sequence[str]) -> None:
    """Refuse tokens of different widths, since all tokens of a pack are read together.

    Raises:
        ConfigError: The widths of the combined sets differ.
    """
    for field in fields:
        widths = {schema.tokens[field].dtype: place for place, schema in documents.meaning.sets.items()
                  if field in schema.tokens}  # fmt: skip
        if len(widths) > 1:
            shown = ", ".join(f"{dtype} in {place}" for dtype, place in sorted(widths.items()))
            raise ConfigError(
                f"Packed: field {field!r} holds tokens of two widths ({shown}), but a pack is read with one width. "
                "Write both as one set, which takes the wider one: `shard_tools reshard SET OTHER TARGET`"
            )


def _reading(documents: SampleSource, items: PieceItems) -> SampleSource:
    """Return the documents with the fields that such rows read, and with their decoders."""
    read = copy.copy(documents)
    if items.fields:
        read.fields, read.decoders = items.fields, with_raw(documents.decoders, items.fields, items.raw)
        read.late = tuple(one for one in read.late if one.name in items.fields)
    return read


def _check_names(documents: SampleSource, items: PieceItems, peers: Peers | None) -> None:
    """Check that the fields exist; documents may lack those that are decoded, which is only a warning.

    Raises:
        ConfigError: No document has one of the fields that are taken as stored.
    """
    late = late_names(documents.shards.schemas)
    named = dict(zip(items.raw, ("field", "mask_field"), strict=False))
    for name, option in named.items():
        if name in late:
            what = "masks" if option == "mask_field" else "tokens"
            raise ConfigError(
                f"{option}={name!r} is a late field; {what} must lie in the shards: convert the source of the set "
                f"again with them, `shard_tools convert SOURCE TARGET --tokens-field FIELD [--mask-field FIELD]`"
            )
    check_fields(documents.storage, documents.shards, named, peers)
    carried = [name for name in items.fields if name not in items.raw and name not in late]
    if carried:
        check_decoded(documents.storage, documents.shards, carried, peers, option="carry")


def _with_beside(documents: SampleSource, items: PieceItems, peers: Peers | None) -> PieceItems:
    """Return the rows; of those that carry values, with the numbered fields that documents also have.

    Warns of these, and of placeholders that are not the set's.
    """
    if not isinstance(items, CarriedPacks):
        return items
    _tell_of_other_placeholders(documents, items)
    beside = left_beside(documents.storage, documents.shards, items.carry.fields, peers)
    made = items.told_of(beside)
    if beside and is_first_process():
        _log.warning(
            "carry: documents of %s also have %s, which are not carried; to carry them, write %s",
            redact(documents.urls[0]), some_names(beside), made.carry.cure,
        )  # fmt: skip
    return made


def _tell_of_other_placeholders(documents: SampleSource, items: CarriedPacks) -> None:
    """Warn of placeholders that are not the tokens which the set says stand for images and sounds."""
    said = documents.meaning.schema.tokens.get(items.shape.field)
    if said is None or said.tokens is None or not is_first_process():
        return
    known = {"image": said.tokens.image, "audio": said.tokens.audio}
    fields = dict(items.carry.entries)
    for name, token in items.carry.placeholders:
        kinds = {kind for field in fields[name] if (kind := kind_by_name(field)) in known}
        for kind in sorted(kinds):
            if known[kind] and token not in known[kind]:
                _log.warning(
                    "placeholder: token %d of %r: the set's %s token is %s. Write placeholder={%s: %d}, unless %d "
                    "comes once for each value, as a token that begins it does: documents with another number of its "
                    "runs than values are bad samples",
                    token, name, kind, " or ".join(map(str, known[kind])), f'"{name}"', known[kind][0], token,
                )  # fmt: skip


def _check_documents(documents: SampleSource, items: PieceItems) -> None:
    """Check that documents can be packed in such rows.

    Raises:
        ConfigError, IndexMissingError: They cannot be packed.
    """
    if not documents.indexed:
        raise IndexMissingError(f"Packed needs an index; {documents.shards.missing_index}")
    if not items.fields:
        return
    if documents.transform is not None and items.fields == items.raw:
        raise ConfigError(items.no_map)
    unread = [name for name in items.fields if documents.fields is not None and name not in documents.fields]
    if unread:
        raise ConfigError(
            f"fields: Packed reads {unread[0]!r} of each document, which is not among fields={documents.fields}; leave "
            "fields out, since packs read nothing else"
        )
    decoded = [name for name in items.raw if isinstance(documents.decode, Mapping) and name in documents.decode]
    if decoded:
        raise ConfigError(
            f"decode: Packed would not call the decoder of {decoded[0]!r}, since tokens go straight from the shards "
            "into the batch. Leave it out; change tokens when shards are written"
        )
