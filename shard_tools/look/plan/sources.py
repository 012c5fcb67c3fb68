"""Open the source of a plan, the same object that training reads; estimate the reads of its chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.errors import ConfigError, IndexMissingError
from streaming.sets.filters.select import parse_subset
from streaming.shards.catalog.random_access import span_borders
from streaming.shards.catalog.source import FILTER_GAP_BYTES, OfTable
from streaming.shards.index.chunk_table import ChunkTable
from streaming.types import SPAN_BYTES, Int64Array, override

if TYPE_CHECKING:
    from streaming.build.batches.build import RowKind
    from streaming.sets.sources.mixed import AnySource

Floats: TypeAlias = "npt.NDArray[np.float64]"
MIXTURE_SUFFIX = ".json"


class TableSet(OfTable):
    """A dataset known by its chunk table only, with one span per chunk.

    Args:
        table: The chunk table.
        sliced: Sample tables exist: in storage order, ranks read slices of chunks if that saves bytes.
    """

    in_place = None

    def __init__(self, table: ChunkTable, *, sliced: bool) -> None:
        self._table, self._sliced = table, sliced
        self.urls = [shard.name for shard in table.shards]
        self._order_by(shuffle=True, seed=0)

    @override
    @property
    def table(self) -> ChunkTable:
        return self._table

    @property
    def items(self) -> RowKind:
        """See ``ShardSet``: a row is a sample."""
        from streaming.build.batches.build import Samples  # noqa: PLC0415  keeps other commands fast to start

        return Samples()

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """See ``Source``: all bytes."""
        return self.chunk_bytes[chunk_ids]

    @property
    def slices(self) -> Self | None:
        """See ``Table``: as ``sliced`` says, with spans that are chunks."""
        return self if self._sliced else None

    def span_borders(self, room_bytes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See ``Source``: starts of chunks."""
        return span_borders(self.table, room_bytes, samples_of=lambda _: None)


def is_mixture_file(urls: Sequence[str]) -> bool:
    """Return whether URLs are the JSON file of a mixture."""
    return len(urls) == 1 and urls[0].partition("?")[0].endswith(MIXTURE_SUFFIX)


def open_planned(
    urls: str | Sequence[str], *, storage_options: Mapping[str, object] | None = None, subset: str | None = None,
    trust: bool | Sequence[str] | None = None, **options: Any,
) -> AnySource:  # fmt: skip
    """Open the data of a training run: the mixture of a JSON file if that is the only URL, else a set.

    Args:
        urls: URLs as users write them.
        storage_options: Options of the set, and of mixture sources without their own.
        subset: Range of stored samples, as ``0%..80%`` or ``1000..2000``.
        trust: Settings beyond data that such a file may make, as for ``Mixture.from_file``; None: none.
        options: Options of a source beside its URL, as in such a file; None: not given.

    Raises:
        ConfigError: The data cannot be opened with these options.
        IndexMissingError: There is no index, and the dataset is too large to index on the fly.
        NotFoundError: Nothing matches ``urls``.
    """
    from streaming.sets.datasets.mixture import Mixture  # noqa: PLC0415  keeps other commands fast to start
    from streaming.sets.datasets.mixture_file import open_described  # noqa: PLC0415

    listed = [urls] if isinstance(urls, str) else list(urls)
    given = {name: value for name, value in {"subset": subset, **options}.items() if value is not None}
    if is_mixture_file(listed):
        for name in given:
            raise ConfigError(
                f"--{name.replace('_', '-')}: in a mixture it belongs to each source; write it into {listed[0]}"
            )
        return Mixture.from_file(listed[0], storage_options=storage_options, trust=trust or ()).source
    if trust:
        raise ConfigError("--trust: only the JSON file of a mixture sets options; leave it out")
    if subset is not None:
        given["subset"] = parse_subset(subset)
    found: Any = open_described({"url": listed, **given}, storage_options=storage_options).source
    if not found.indexed:
        raise IndexMissingError(found.shards.missing_index)
    planned: AnySource = found
    return planned


def sets_of(planned: AnySource | TableSet) -> Iterator[tuple[str, Any]]:
    """Yield the sets of samples or packs with their names, in chunk order; the name of a single set is ""."""
    leaves = getattr(planned, "leaves", None)
    yield from [("", planned)] if leaves is None else sorted(leaves.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Estimate the reads of each chunk of a dataset: all of it, or the spans that a filter needs.

    If a share ``f`` of a chunk's samples is kept, at random, a span of ``s`` samples contains none of them with
    probability ``p = (1 - f)**s``. It is skipped if it lies in a run of such spans at least as long as the smallest gap
    worth another request, ``h`` spans: with probability ``p**h * (h - (h - 1) * p)``.

    Attributes:
        num_bytes: int64 [C], bytes read when a chunk is fetched.
        num_requests: float64 [C], requests for these bytes.
        sample_bytes: Mean size of a sample.
    """

    num_bytes: Int64Array
    num_requests: Floats
    sample_bytes: float

    @classmethod
    def of(
        cls, chunk_bytes: Int64Array, given: Int64Array, stored: Int64Array, drawn: Int64Array | None = None
    ) -> Reads:
        """Estimate reads of chunks of these sizes, from the samples that they use and store, int64 [C] each.

        ``drawn`` gives the rows drawn from each chunk; a row may consist of several samples.
        """
        mean = int(chunk_bytes.sum()) / max(int(stored.sum()), 1)
        if drawn is not None:
            mean *= int(given.sum()) / max(int(drawn.sum()), 1)
        if np.array_equal(given, stored):
            return cls(num_bytes=chunk_bytes, num_requests=np.ones(len(given)), sample_bytes=mean)
        sizes = np.maximum(chunk_bytes / np.maximum(stored, 1), 1)
        per_span = np.maximum(SPAN_BYTES / sizes, 1)
        empty = (1 - given / np.maximum(stored, 1)) ** per_span
        hole = np.ceil(FILTER_GAP_BYTES / (per_span * sizes))
        left_out = empty**hole * (hole - (hole - 1) * empty)
        # Each run of bytes read begins after a gap, or at the beginning of the chunk if there is no gap.
        runs = stored / per_span * (1 - empty) * empty**hole + 1 - empty**hole
        return cls(
            num_bytes=np.ceil(chunk_bytes * (1 - left_out)).astype(np.int64),
            num_requests=np.maximum(runs, 1),
            sample_bytes=mean,
        )

    @classmethod
    def of_set(cls, one: Any) -> Reads:
        """Estimate the reads of a set of samples or packs. Each late field takes as many requests as its shards.

        Windows know them.
        """
        if (known := getattr(one, "reads", None)) is not None:
            mean = known.once_bytes / max(int(one.chunk_samples.sum()), 1)
            return cls(num_bytes=known.num_bytes, num_requests=known.num_requests.astype(float), sample_bytes=mean)
        found = cls.of(one.chunk_bytes, one.used_samples, one.stored_samples, one.chunk_samples)
        return replace(found, num_requests=found.num_requests * getattr(one, "num_ranges", 1))

    @classmethod
    def of_sets(cls, planned: AnySource | TableSet, drawn: Mapping[str, float] | None = None) -> Reads:
        """Estimate the reads of all sets; the mean sample is weighted by the samples ``drawn`` from each."""
        sets = list(sets_of(planned))
        parts = [cls.of_set(one) for _, one in sets]
        weights = None if drawn is None else np.array([drawn[name] for name, _ in sets])
        return cls(
            num_bytes=np.concatenate([part.num_bytes for part in parts]),
            num_requests=np.concatenate([part.num_requests for part in parts]),
            sample_bytes=float(np.average([part.sample_bytes for part in parts], weights=weights)),
        )
