"""Pack documents of one kind at a time, so that all ranks get packs of one kind in a step: ``KindsOfPacks``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any, NoReturn

import numpy as np

from infra import is_first_process
from streaming.build.batches.items.options import checked_alike
from streaming.errors import ConfigError
from streaming.order.mixing.granularity import ByKinds
from streaming.order.packing.layout import PackRows
from streaming.order.packing.rules import PackRules
from streaming.order.plan.ledger import Ledger
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.state import NO_VERSIONS, Versions
from streaming.sets.filters.groups import MAX_GROUPS, Codes, Counted, Values, labels_of
from streaming.sets.filters.lengths import Lengths
from streaming.sets.sources.grouped import check_groups, grouped, resharding
from streaming.sets.sources.mixed import MixedSource
from streaming.sets.sources.packs import NothingToPackError, PackCounts, PackedDocuments, log_fill
from streaming.sets.sources.samples import SampleSource
from streaming.shards.index.where import written
from streaming.types import Int64Array, Transform, override

_MUCH_READ = 2.0
"""Bytes read per byte of the set above which a warning names the cure."""
_log = logging.getLogger("streaming")


class KindsOfPacks(MixedSource):
    """Packs of documents of one kind each, a source of a mixture per kind, dealt in global batches of one kind.

    A kind is a combination of values of the columns ``alike``; its name is a condition, such as ``bucket = 7``. Takes
    the options of ``PackedDocuments``, which is the source of each kind.

    Attributes:
        documents: The documents of all kinds.
        counts: Counts of all documents by outcome.
        alike: Columns in which all packs of a global batch are equal.
    """

    alone = (
        "Packed(…, alike_across_ranks=True) deals global batches of one kind each, which a mixture would mix again. "
        'Leave alike_across_ranks out; or mix one Packed per kind, Mixture({…}, batches="one_source")'
    )

    def __init__(
        self, documents: SampleSource, length: int | Schedule, *, alike: Sequence[str], **options: Any
    ) -> None:
        self.alike = checked_alike(alike)
        if not self.alike:
            raise ConfigError(
                'alike_across_ranks=True: which samples are alike? Name the columns: Packed(…, alike=("bucket",), '
                "alike_across_ranks=True)"
            )
        self._given = documents
        made: list[_Kinds] = []

        def coding(counted: Mapping[str, Counted]) -> _Kinds:
            made.append(_Kinds.of(self.alike, counted))
            return made[-1]

        grouping = grouped(documents, "Packed", "alike", self.alike, coding)
        names = {number: made[-1].name(number) for number in np.flatnonzero(grouping.groups.sizes).tolist()}
        packed: dict[str, PackedDocuments] = {}
        lengths: Lengths | None = None
        left_out: list[PackCounts] = []
        for number, name in names.items():
            member = documents.of_group(grouping.selected(number, documents.fingerprint, name), name)
            try:
                packed[name] = PackedDocuments(member, length, alike=alike, lengths=lengths, is_part=True, **options)
            except NothingToPackError as error:
                left_out.append(error.counts)
                last = error
                continue
            lengths = packed[name].lengths
        if not packed:
            raise last
        self.counts = reduce(add, (*(one.counts for one in packed.values()), *left_out))
        super().__init__(
            packed, weights=None, repeats=None, ends=None, unit="samples", batches="one_source", fetch_bytes=None,
            shuffle=documents.shuffle_config if documents.shuffle else False, seed=documents.seed, quotas="chunks",
            max_bad_samples=documents.max_bad_samples, bad_samples_file=documents.bad_samples_file,
        )  # fmt: skip
        self.deal = ByKinds()
        self._tell()

    def _tell(self) -> None:
        """Log the kinds, and warn if the shards mix them, since each kind is read separately."""
        if is_first_process():
            packs = sorted(self.sizes.values())
            _log.info(
                "Packed: %s packs of %d kinds (%s), of %s to %s packs each, %.2f %% filled, of %s %s",
                f"{self.num_readable:,}", len(self.names), ", ".join(self.alike), f"{packs[0]:,}", f"{packs[-1]:,}",
                100 * self.fill, f"{self.counts.documents:,}", self.first.items.documents,
            )  # fmt: skip
        log_fill(self.counts, self.rules, self.num_readable, self.alike, len(self.chunk_samples))
        if self.read_amplification > _MUCH_READ:
            _log.warning(
                "Packed: alike_across_ranks=True reads about %.1f bytes for each byte of the set: samples of %d kinds "
                "share the shards' chunks, and each kind is read separately. %s", self.read_amplification,
                len(self.names), resharding(self._given, self.alike[0]),
            )  # fmt: skip

    @property
    def first(self) -> PackedDocuments:
        """The packs of the first kind: the options of all kinds are the same."""
        one = self.leaves[self.names[0]]
        if not isinstance(one, PackedDocuments):
            raise TypeError("kinds are packed")
        return one

    @property
    def rules(self) -> PackRules:
        """The rules for packing documents of each kind."""
        return self.first.rules

    @cached_property
    def documents(self) -> SampleSource:
        """The documents of all kinds, with the fields that packs read."""
        made, read = copy.copy(self._given), self.first.documents
        made.fields, made.decoders, made.late = read.fields, read.decoders, read.late
        return made

    @property
    def fill(self) -> float:
        """Fraction of token positions that hold tokens, 0 to 1."""
        return self.counts.packed / self.counts.places

    @property
    def read_amplification(self) -> float:
        """Number of bytes fetched per byte of the set, in a pass of all kinds."""
        return float(self.chunk_bytes.sum() / max(int(self._given.chunk_bytes.sum()), 1))

    @override
    def mapped(self, function: Transform) -> NoReturn:
        self.first.mapped(function)

    @override
    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:
        found = super().packs(chunk_ids, offsets, passes, seed)
        return replace(found, sources=None)  # kinds are no sources that batches name

    @property
    @override
    def shown_names(self) -> dict[str, str]:
        return dict.fromkeys(self.names, "")

    def _limits_of(self, expected: Mapping[str, float]) -> dict[str, int]:  # noqa: ARG002
        """See ``MixedSource``: kinds are parts of one dataset, whose limit is that of all of them."""
        return {}

    @override
    def check_ledger(self, ledger: Ledger, versions: Versions = NO_VERSIONS) -> None:
        check_groups(self, ledger, versions, "Packed(…, alike_across_ranks=True)")
        super().check_ledger(ledger, versions)

    @override
    def words(self) -> str:
        said = [f"length={self.rules.length}", f"{self.num_readable} packs of {len(self.names)} kinds"]
        return ", ".join([*said, f"{self.counts.packed} {self.first.unit}", f"{self.fill:.1%} filled"])


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """The combinations of values of some columns, as a ``Coding``."""

    columns: tuple[str, ...]
    labels: tuple[Values, ...]

    @classmethod
    def of(cls, columns: tuple[str, ...], counted: Mapping[str, Counted]) -> _Kinds:
        """Return the kinds of documents with these values.

        Raises:
            ConfigError: A column holds no whole numbers, lacks values, or there are too many combinations.
        """
        for name in columns:
            kind = str(counted[name].values.type)
            if kind != "int64":
                raise ConfigError(
                    f"alike: column {name!r} holds {kind}, expected whole numbers, such as those of buckets; add such "
                    "a column: `shard_tools column add URL bucket --compute MODULE:FUNCTION`"
                )
            if counted[name].num_missing:
                raise ConfigError(
                    f"alike: column {name!r} has no value for {counted[name].num_missing:,} samples, some of them in "
                    f'{counted[name].lacking}; leave them out, StreamingDataset(…, where="{name} IS NOT NULL")'
                )
        made = cls(columns, tuple(counted[name].values for name in columns))
        if made.num_groups > MAX_GROUPS:
            raise ConfigError(
                f"alike: {', '.join(columns)} have {made.num_groups:,} combinations of values, but at most "
                f"{MAX_GROUPS:,} kinds are possible. Name one column with the number of each sample's bucket: "
                "`shard_tools column add URL bucket --compute MODULE:FUNCTION`"
            )
        return made

    @property
    def num_groups(self) -> int:
        """Number of combinations; some may have no sample."""
        return int(np.prod([len(one) for one in self.labels], dtype=object))

    def codes(self, columns: Mapping[str, Values], num_rows: int) -> Codes:
        """See ``Coding``: the number of each row's combination, the last column counting fastest."""
        found, there = np.zeros(num_rows, np.int64), np.ones(num_rows, np.bool_)
        for name, labels in zip(self.columns, self.labels, strict=True):
            one = labels_of(columns[name], labels)
            found, there = found * len(labels) + one, there & (one >= 0)
        return np.where(there, found, self.num_groups).astype(np.uint16)

    def name(self, number: int) -> str:
        """Return a combination as a condition."""
        places = np.unravel_index(number, [len(one) for one in self.labels])
        values = [labels[int(place)].as_py() for labels, place in zip(self.labels, places, strict=True)]
        return " AND ".join(f"{written(name)} = {value}" for name, value in zip(self.columns, values, strict=True))
