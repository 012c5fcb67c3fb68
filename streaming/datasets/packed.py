"""Pack the documents of a dataset into sequences of a fixed number of tokens: ``Packed``."""

from __future__ import annotations

import builtins
import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from infra import agent_store
from streaming.arguments import (
    checked_number,
    checks_names,
    option_names,
    shows,
)  # fmt: skip
from streaming.arrays import sums
from streaming.batches.build import OnError, Part
from streaming.batches.draws import Chain
from streaming.batches.items.options import DTYPES, checked_alike, checked_budgets, checked_items
from streaming.batches.items.packs import TokenPacks
from streaming.catalog.joined import JoinedSource
from streaming.catalog.open import check_fields, digest_of
from streaming.catalog.packed import Fits, PackedSource, PackGroups, kept_fits, samples_between, tokens_of
from streaming.catalog.source import ChunkSource
from streaming.datasets.dataset import StreamingDataset
from streaming.decode import DecodeSpec, FieldDecoder, RawFields
from streaming.errors import ConfigError, IndexMissingError
from streaming.filters.lengths import UNKNOWN, Lengths
from streaming.filters.select import late_columns_of
from streaming.job.once import Peers, framed, part_of, shared, shared_parts, unframed
from streaming.job.store import job_peers
from streaming.packing.fit import Fit, fit, pack
from streaming.packing.groups import MAX_GROUP_BYTES, PACKS_OF_GROUP, cut_groups
from streaming.packing.rules import Overlong, PackRules, cut
from streaming.storage import redact
from streaming.types import Int64Array, Sample, Transform

_AT_THE_DOCUMENTS = "it belongs to the documents; write Packed(StreamingDataset(…, {}=…), …)"
_ELSEWHERE = {name: _AT_THE_DOCUMENTS.format(name) for name in option_names(StreamingDataset)} | {
    "batch_size": "it belongs to the loader; write DataLoader(packed, batch_size=…)",
    "max_length": "write length=…",
    "max_tokens": "write length=…; with padded=True it is a budget of padded tokens for each batch",
    "overlap": "write stride=…, the tokens from the start of one window to the next: length minus the overlap",
    "window": "write length=…, and stride=… for windows that overlap",
    "seq_length": "write length=…",
    "sequence_length": "write length=…",
    "block_size": "write length=…",
    "transform": "to change whole packs use the loader's collate_fn, which gets a list of them",
}
_REQUESTS = 16
_FULL_ENOUGH = 0.75
"""Mean fill of a padded batch; below this, a warning gives the reason and what helps."""
_log = logging.getLogger("streaming")
_COUNTS = ("documents", "tokens", "packed", "split", "truncated", "dropped", "empty", "places")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCounts:
    """Count what happened to the documents of a packed set.

    Attributes:
        documents: Documents in the dataset.
        tokens: Their tokens, according to the column.
        packed: Tokens that are in a pack.
        split: Documents longer than a pack that were split into pieces.
        truncated: Documents longer than a pack that were truncated.
        dropped: Documents longer than a pack that were left out.
        empty: Documents without tokens.
        places: Token positions in all packs, including padding.
    """

    documents: int
    tokens: int
    packed: int
    split: int
    truncated: int
    dropped: int
    empty: int
    places: int

    def __add__(self, other: PackCounts) -> PackCounts:
        return PackCounts(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTS})


@checks_names(_ELSEWHERE)
class Packed(PackedSource):
    """Pack the documents of a dataset into sequences of ``length`` tokens, with almost no padding.

    A sample is a pack. The set can be given to a ``DataLoader``, which keeps all its promises (the same global batches
    on any number of ranks and workers, exact resume), or to a ``Mixture``, in which weights over packs are weights over
    tokens. Each token of each document is in exactly one pack per epoch; each epoch combines the documents differently.
    ::

        web = StreamingDataset("s3://bucket/web/", where="lang = 'en'")
        loader = DataLoader(Packed(web, length=8192), batch_size=8)
        for batch in loader:
            loss = model(**{name: batch[name].cuda() for name in ("input_ids", "labels", "position_ids")}).loss

    A batch of B packs of length T is a dict of

    - ``input_ids``, ``labels``, ``position_ids``, ``document_ids``: int64 [B, T]. Positions restart at 0 in each
      document; document ids count the documents of a pack from 0 and are -1 at padding. Labels are -100 at padding and
      where the loss mask is 0;
    - ``cu_seqlens``: int32 [n + 1], the offsets at which the n documents start in the batch flattened to [B * T], and
      its end; padding at the end of a pack is a sequence of its own. ``max_seqlen``: the length of the longest, an int;
    - ``num_tokens``, ``num_labels``: the number of tokens without padding, and of labels that are not -100, ints. Packs
      that fill the last batch (``last_batch="pad"``) have no labels but -100, and neither number counts them;
    - ``__key__``: for each pack, the list of its documents' keys; ``__url__``: the shard of each pack;
    - in a mixture also ``__source__``, and ``source_ids`` int64 [B]: the same as indices into the sorted names.

    With ``padded=True`` a pack is a whole batch, for models that take one sequence per row; a rank gets one pack at a
    time (``DataLoader(packed, batch_size=1)``), or a list of several (``collate_fn=list``). For n documents, the
    longest of which has L tokens: ``input_ids``, ``labels``, ``position_ids`` and ``attention_mask`` (1: token, 0:
    padding), int64 [n, L]; ``num_tokens``, ``num_labels``; ``__key__``, ``__url__`` and ``__source__``, lists of n; and
    ``source_ids`` int64 [n]. A document that cannot be read leaves a row of padding with the key "".

    With ``padded=True, field=None`` samples need not be text: a pack is a batch of whole samples of similar size, such
    as images by pixels or audio by frames, which are decoded, transformed and collated like those of any
    ``StreamingDataset``. ::

        clips = StreamingDataset("s3://bucket/speech/", decode={"flac": decode_flac})
        batches = Packed(clips, length=16_000 * 600, column="frames", padded=True, field=None)
        for batch in DataLoader(batches, batch_size=1, jagged=("flac",)):
            audio = batch["flac"].padded()                     # [n, frames of the longest]: at most ten minutes

    A sample that cannot be read, or that ``transform`` drops, is replaced by another one of its batch. A batch of which
    no sample is left becomes a single sample of another batch, so that none exceeds its budget. With ``alike`` the
    samples of a batch have equal values in some columns, such as height and width, and so can be stacked into one
    tensor.

    Packs are made within *groups*: consecutive chunks of one shard that hold at least 256 packs. The number of packs in
    a group depends only on the lengths of its documents, so making the set reads only the column. A document that
    cannot be read counts as a bad sample of the dataset; with ``on_error="substitute"`` and ``"skip"`` it becomes
    padding, and with ``"skip"`` a pack in which nothing could be read is False in ``__valid__``.

    Args:
        documents: A ``StreamingDataset`` with an index, filtered or not; each sample is a document.
        length: T, tokens per pack.
        column: Column of the sample tables, or late column, that holds the number of tokens of each document.
        field: Field that holds the tokens as little-endian integers; None: samples are not tokens, see above.
        dtype: ``"uint16"`` or ``"uint32"``; None: inferred from the sizes of the first documents.
        overlong: What to do with documents of more than T tokens: ``"split"`` them, ``"truncate"`` them to T, or
            ``"drop"`` them. None: split them. Whole samples, and documents with ``budgets``, can only be dropped. The
            log counts them.
        mask_field: Field that holds one byte per token, 0 for tokens that are excluded from the loss, as ``shard_tools
            convert`` writes it with a chat template; None: all tokens count.
        shift_labels: False: ``labels[t]`` is ``input_ids[t]``, for models that shift labels themselves (Hugging Face).
            True: ``labels[t]`` is token t + 1, for losses that compare position by position (Megatron, TorchTitan).
        labels_across: Whether the first token of a document is predicted from the last token of the document before it.
            If not, its label is -100 (with ``shift_labels``: the label of that last token), as it always is for the
            first token of a pack. With ``multiple``, this needs ``shift_labels``.
        pad_id: Value of ``input_ids`` at padding.
        max_docs: Maximum number of documents per pack. ``cu_seqlens`` then always has the shape int32 [B * (max_docs +
            1) + 1], filled up with B * T, and ``max_seqlen`` is T: static shapes for compiled models and CUDA graphs.
        multiple: Round the space of each document up to a multiple of this many tokens: 2 * cp for context parallelism,
            where each rank gets an equal part of each document.
        padded: Make batches by a token budget: each pack is a batch of documents of similar length, one per row, padded
            to the longest; rows times longest is at most ``length``.
        stride: Documents of more than T tokens become windows of T tokens, one every ``stride`` tokens, which overlap
            by T - ``stride``; None: pieces that do not overlap. Tokens in an overlap are delivered, and counted, more
            than once.
        overlap_labels: Whether a token contributes to the loss in every window that holds it. False: only in the first,
            so that each counts once; in later windows it is context, with the label -100.
        budgets: Further limits per pack: a maximum for each column named, such as ``{"image_tokens": 4096}``. Documents
            that exceed a budget, or T, are dropped.
        alike: For padded packs: columns of integers that are equal for all documents of a batch, such as ``("height",
            "width")`` of images, or a late column of bucket numbers. Each group leaves one partial batch for each
            combination of values.

    Raises:
        ConfigError: An argument is invalid; or the dataset lacks such a column or field, has a ``transform``, or holds
            nothing to pack.
        IndexMissingError: The dataset has no index, or no sample tables.
    """

    documents: StreamingDataset
    decode: DecodeSpec
    decoders: FieldDecoder
    transform: Transform | Chain | None
    on_error: OnError
    max_bad_samples: float
    bad_samples_file: str | None

    def __init__(  # noqa: PLR0913  the contract of API.md
        self,
        documents: StreamingDataset,
        length: int,
        *,
        column: str = "tokens",
        field: str | None = "tok",
        dtype: str | None = None,
        overlong: Overlong | None = None,
        mask_field: str | None = None,
        shift_labels: bool = False,
        labels_across: bool = False,
        pad_id: int = 0,
        max_docs: int | None = None,
        multiple: int = 1,
        padded: bool = False,
        stride: int | None = None,
        overlap_labels: bool = True,
        budgets: Mapping[str, int] | None = None,
        alike: Sequence[str] = (),
    ) -> None:
        limits, kinds = checked_budgets(budgets, column), checked_alike(alike)
        rules, self.items = checked_items(
            {"length": length, "overlong": overlong, "multiple": multiple, "max_docs": max_docs, "padded": padded,
             "stride": stride, "budgets": tuple(limits.values()), "alike": len(kinds)},
            {"mask_field": mask_field, "shift_labels": shift_labels, "labels_across": labels_across, "pad_id": pad_id},
            column=column, field=field, dtype=dtype, overlap_labels=overlap_labels,
        )  # fmt: skip
        fields = self.items.fields
        _check_documents(documents, fields)
        peers = job_peers(agent_store())
        shards = documents.shards
        check_fields(documents.storage, shards, fields, peers)
        columns = (column, *limits, *kinds)
        late = late_columns_of(documents.storage, shards, columns, peers)
        lengths = Lengths(documents.storage, shards, columns, late)
        read = copy.copy(documents)
        if fields:
            read.fields, read.decoders = fields, RawFields()
        work = _Work(read, lengths, rules, columns, fits := kept_fits())
        self.column, self.alike = column, kinds
        self.counts: PackCounts
        groups, self.counts = work.of_all(peers)
        super().__init__(read, groups, lengths, rules, fits)
        self.items = self.items.typed(lambda name: self._told_dtype(name, dtype, peers))
        self._lengths = lengths
        self._take_over()
        self._tell()

    # --- what users see ---

    def __len__(self) -> int:
        """Return the number of packs."""
        return int(self.chunk_samples.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all packs, padding not counted."""
        return self.counts.packed

    @property
    def unit(self) -> str:
        """What lengths count, for people: tokens, or the column of whole samples."""
        return self.items.unit or self.column

    @property
    def fill(self) -> float:
        """Part of all places that holds tokens, 0 to 1."""
        return self.num_tokens / self.counts.places

    def __getitem__(self, index: SupportsIndex | builtins.slice) -> Sample:
        """Return pack ``index`` in storage order, as epoch 0 of the set's own seed has it; tensors [T], or a batch.

        Raises:
            IndexError: There is no such pack.
            DataError: One of its documents cannot be read.
            ConfigError: A range is asked for.
        """
        if isinstance(index, builtins.slice):
            raise ConfigError("packed[a:b]: packs cannot be sliced; slice the documents: Packed(dataset[a:b], …)")
        return self.sample_at(checked_number(index, len(self), "pack", "the data set has"))

    def sample_at(self, index: int, source: str = "") -> Sample:
        """Return pack ``index``, which there is; that of a mixture says which ``source`` of it this set is."""
        ends = np.cumsum(self.chunk_samples)
        group = int(np.searchsorted(ends, index, side="right"))
        offset = index - int(ends[group] - self.chunk_samples[group])
        packs = self.packs(np.array([group]), np.array([offset]), np.zeros(1, np.int64), self.seed)
        _, samples = self.samples_in(group)
        before = int(self.documents.chunk_samples[: self._groups.firsts[group]].sum())
        numbers = before + np.searchsorted(samples - self.chunk(group).first_sample, packs.samples)
        found: list[Any] = [self.documents.sample_at(number) for number in numbers.tolist()]
        return self.items.alone(replace(self.recipe_parts[0], name=source), found, packs)

    def map(self, function: Transform) -> NoReturn:  # noqa: ARG002  as other datasets have it
        """Raise an error: see ``transform``.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(self.items.no_map)

    @shows
    def __repr__(self) -> str:
        parts = [
            repr(self.documents),
            f"length={self.rules.length}",
            f"{len(self)} packs",
            f"{self.num_tokens} {self.unit}",
        ]
        return f"Packed({', '.join([*parts, f'{self.fill:.1%} filled'])})"

    # --- what the engine needs ---

    def expected_samples(self, num_rows: float) -> float:
        """See ``ShardSet``: the documents of that many packs, on average."""
        return num_rows * self.counts.documents / max(len(self), 1)

    @property
    def recipe_parts(self) -> tuple[Part, ...]:
        """How documents become packs, for loops."""
        return self.documents.recipe_parts

    def keep_at_most(self, num_bytes: int) -> None:
        """See ``Source``: half is for packs, half for lengths."""
        super().keep_at_most(num_bytes // 2)
        self._lengths.keep_at_most(num_bytes // 2)

    def _told_dtype(self, field: str, dtype: str | None, peers: Peers | None) -> str:
        """Return the type of tokens, as given or as found in the first documents; with peers, rank 0 looks."""

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
                    "Packed: field %r has %g bytes for each token of column %r, but dtype=%r has %d: of each document "
                    "only as many tokens are read as the column says", field, found, self.column, dtype, width,
                )  # fmt: skip
            return DTYPES[dtype]
        for one in DTYPES.values():
            if found == np.dtype(one).itemsize:
                return one
        why = f"it has {found:g} bytes for each token of the column" if found else "no sample table has its sizes"
        raise ConfigError(
            f"dtype: it cannot be inferred for field {field!r}: {why}. If the field holds raw uint16 or uint32, give "
            'dtype="uint16" or "uint32": the column counts something else, or was made with another tokenizer. If it '
            "holds anything else, such as int64 or arrays with a header, write it anew: `shard_tools convert URL "
            "TARGET --tokens-field FIELD`"
        )

    def _take_over(self) -> None:
        """Take over the options of the documents, as those of a dataset of packs."""
        documents = self.documents
        self.fields, self.decode, self.decoders = documents.fields, None, documents.decoders
        self.transform = documents.transform
        self.on_error, self.bad_samples_file = documents.on_error, documents.bad_samples_file
        self.max_bad_samples = documents.max_bad_samples

    def _tell(self) -> None:
        """Log what became of the documents, and whether groups are too small to be filled well."""
        counts, length = self.counts, self.rules.length
        said = {"split": counts.split, "truncated": counts.truncated, "dropped": counts.dropped}
        over = [
            f"{number:,} {'larger' if self.rules.budgets else 'longer'} ones {what}"
            for what, number in said.items()
            if number
        ]
        over += [f"{counts.empty:,} without tokens left out"] if counts.empty else []
        _log.info(
            "Packed: %s packs of %s %s%s, %.2f %% filled, of %s %s with %s%s; %s groups",
            f"{len(self):,}", f"{length:,}", self.unit, self.items.at_most,
            100 * self.fill, f"{counts.documents:,}", self.items.documents,
            f"{counts.tokens:,} {self.items.unit or 'in all'}",
            "".join(f", {one}" for one in over), f"{len(self.chunk_samples):,}",
        )  # fmt: skip
        if self.alike:
            self._tell_kinds()
        small = int((self.chunk_samples < PACKS_OF_GROUP // 4).sum())
        if 2 * small > len(self.chunk_samples):
            _log.warning(
                "Packed: %s of %s groups have fewer than %d packs (%.0f on average, %.2f %% filled): a group lies in "
                "one shard and takes at most %d MiB of it. %d packs need %s %s in a shard; larger shards "
                "or a shorter length fill better",
                f"{small:,}", f"{len(self.chunk_samples):,}", PACKS_OF_GROUP // 4, self.chunk_samples.mean(),
                100 * self.fill, MAX_GROUP_BYTES >> 20, PACKS_OF_GROUP, f"{PACKS_OF_GROUP * length:,}", self.unit,
            )  # fmt: skip

    def _tell_kinds(self) -> None:
        """Log how full batches of like samples are, which depends on the number of samples of a kind in a group."""
        counts, rules = self.counts, self.rules
        room = counts.places / (len(self) * rules.length)
        if rules.max_docs is not None:
            held = counts.documents - counts.dropped - counts.empty
            room = max(room, held / (len(self) * rules.max_docs))
        told = f"Packed: batches of like {', '.join(self.alike)} are {100 * room:.0f} % full on average"
        if room >= _FULL_ENOUGH:
            _log.info("%s", told)
            return
        _log.warning(
            "%s: each of %s groups (at most %d MiB of a shard) leaves one batch of each kind partly filled. Use fewer "
            "kinds, a smaller length, or shards in which similar samples are adjacent (shard_tools reshard SOURCE "
            "TARGET --sort COLUMN)",
            told, f"{len(self.chunk_samples):,}", MAX_GROUP_BYTES >> 20,
        )  # fmt: skip


class _Work:
    """Cut shards into groups and count their packs; ranks exchange the results of their shards as bytes."""

    def __init__(
        self, documents: ChunkSource, lengths: Lengths, rules: PackRules, columns: tuple[str, ...], fits: Fits
    ) -> None:
        self._documents, self._lengths, self._rules, self._columns = documents, lengths, rules, columns
        self._fits = fits

    def of_all(self, peers: Peers | None) -> tuple[PackGroups, PackCounts]:
        """Return all groups, and what became of the documents; with peers, each rank handles a range of the shards.

        Raises:
            ConfigError: There is nothing to pack.
        """
        name = digest_of([self._documents.fingerprint, asdict(self._rules), list(self._columns)])
        totals, digest, rows = np.zeros(len(_COUNTS), np.int64), hashlib.sha256(), []
        for part in shared_parts(peers, f"packs/{name}", self._part):
            head, start = unframed(part)
            totals += head["counts"]
            for one in head["digests"]:
                digest.update(bytes.fromhex(one))
            rows.append(np.frombuffer(part, "<i8", offset=start).reshape(-1, 3))
        firsts, stops, packs = np.concatenate(rows).astype(np.int64).T
        counts = PackCounts(**dict(zip(_COUNTS, totals.tolist(), strict=True)))
        if not packs.sum():
            left_out = f"{counts.dropped:,} are longer than length={self._rules.length:,} (overlong='drop')"
            raise ConfigError(
                f"Packed: nothing to pack: of {counts.documents:,} documents {counts.empty:,} have no tokens by column "
                f"{self._columns[0]!r}, and {left_out}"
            )
        return PackGroups(firsts=firsts, stops=stops, packs=packs, digest=digest.hexdigest()), counts

    def _part(self, rank: int, world_size: int) -> bytes:
        with ThreadPoolExecutor(_REQUESTS, "shardstream-packs") as threads:
            found = list(threads.map(self._shard, part_of(len(self._documents.urls), rank, world_size)))
        counts = (
            np.sum([one[1] for one in found], axis=0, dtype=np.int64) if found else np.zeros(len(_COUNTS), np.int64)
        )
        head = {"counts": counts.tolist(), "digests": [one[2] for one in found]}
        rows = np.concatenate([np.empty((0, 3), np.int64), *(one[0] for one in found)]).astype("<i8")
        return framed(head, rows.tobytes())

    def _shard(self, shard: int) -> tuple[Int64Array, list[int], str]:
        """Cut a shard into groups: first chunk, one past the last, packs; the counts of ``PackCounts``; a digest."""
        table, rules = self._documents.table, self._rules
        low, high = table.rows_of(shard)
        if low == high:
            return np.empty((0, 3), np.int64), [0] * len(_COUNTS), ""
        _, samples = samples_between(self._documents, low, high)
        lengths = self._lengths(shard)[samples]
        if lengths.min(initial=0) < 0:
            raise self._no_length(shard, samples, lengths)
        counted = tokens_of(lengths)
        borders = sums(table.num_samples[low:high])
        tokens = np.diff(sums(counted)[borders])
        firsts = cut_groups(tokens, table.byte_start[low:high], table.byte_end[low:high], length=rules.length)
        stops = np.append(firsts[1:], high - low)
        packs, places = [], 0
        for first, begin, end in zip(firsts.tolist(), borders[firsts], borders[stops], strict=True):
            found = self._fits.of(low + first, partial(fit, lengths[begin:end], rules))
            packs.append(found.num_packs)
            places += _places(lengths[begin:end], rules, found)
        pieces = cut(lengths, rules)
        counts = [len(lengths), int(counted.sum()), pieces.num_tokens, pieces.num_split, pieces.num_truncated,
                  pieces.num_dropped, pieces.num_empty, places]  # fmt: skip
        rows = np.stack([firsts + low, stops + low, np.array(packs, np.int64)], axis=1)
        digest = hashlib.blake2b(lengths.astype("<i8").tobytes() + rows.astype("<i8").tobytes(), digest_size=16)
        return rows, counts, digest.hexdigest()

    def _no_length(self, shard: int, samples: Int64Array, lengths: Int64Array) -> ConfigError:
        """Make an error that names the sample and the column with the smallest length, which is missing or invalid."""
        row, place = divmod(int(lengths.argmin()), len(self._columns))
        least, column, number = int(lengths.min()), self._columns[place], int(samples[row])
        has = "no value" if least == UNKNOWN else f"{least} tokens"
        return ConfigError(
            f"Packed: column {column!r} has {has} for sample {number} of {redact(self._documents.urls[shard])}; leave "
            f'such samples out, StreamingDataset(…, where="{column} >= {0 if place else 1}"), or rebuild the column '
            "(`shard_tools column add`)"
        )


def _places(lengths: Int64Array, rules: PackRules, found: Fit) -> int:
    """Count the places in the packs of documents of these lengths, including padding."""
    return int(pack(lengths, rules, found).sizes.sum()) if rules.padded else found.num_packs * rules.length


def _check_documents(documents: Any, of_tokens: tuple[str, ...]) -> None:
    """Check that documents can be packed; ``of_tokens`` are the fields that are read as tokens, () for whole samples.

    Raises:
        ConfigError, IndexMissingError: They cannot.
    """
    if isinstance(documents, (JoinedSource, PackedSource)):
        raise ConfigError(
            f"Packed: expected a StreamingDataset, got a {type(documents).__name__}; pack each data set, and mix the "
            'packs: Mixture({"web": Packed(web, length=…), "code": Packed(code, length=…)}, weights=…)'
        )
    if not isinstance(documents, StreamingDataset):
        raise ConfigError(
            f"Packed: expected a StreamingDataset, got {documents!r}; write Packed(StreamingDataset(…), …)"
        )
    if not documents.indexed:
        raise IndexMissingError(f"Packed needs an index; {documents.shards.missing_index}")
    if not of_tokens:
        return
    if documents.transform is not None:
        raise ConfigError(TokenPacks.no_map)
    unread = [name for name in of_tokens if documents.fields is not None and name not in documents.fields]
    if unread:
        raise ConfigError(
            f"fields: Packed reads {unread[0]!r} of each document, which is not among fields={documents.fields}; leave "
            "fields out, since packs read nothing else"
        )
    decoded = [name for name in of_tokens if isinstance(documents.decode, Mapping) and name in documents.decode]
    if decoded:
        raise ConfigError(
            f"decode: Packed would not call the decoder of {decoded[0]!r}, since tokens go straight from the shards "
            "into the batch. Leave it out; change tokens when shards are written"
        )
