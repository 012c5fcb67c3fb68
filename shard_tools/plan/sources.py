"""Open the input of a plan: a dataset with its filter, or the mixture that a file describes; reads index files only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.catalog.open import open_shards
from streaming.catalog.random_access import RandomAccess
from streaming.catalog.source import FILTER_GAP_BYTES, ChunkSource
from streaming.errors import ConfigError, IndexMissingError
from streaming.filters.select import narrowed, parse_subset
from streaming.filters.views import asked_filter
from streaming.index.spans import SPAN_BYTES
from streaming.storage import Storage
from streaming.types import Int64Array

if TYPE_CHECKING:
    from streaming.datasets.mixture import Mixture

Floats: TypeAlias = "npt.NDArray[np.float64]"
Planned: TypeAlias = "OpenedSet | Mixture"
MIXTURE_SUFFIX = ".json"


class OpenedSet(ChunkSource):
    """Shards with an index, and what a filter keeps of them, opened as in training but without torch.

    Raises:
        IndexMissingError: There is no index, and the dataset is too large to index on the fly.
        NotFoundError: Nothing matches ``urls``.
        ConfigError: The filter cannot be evaluated, or keeps nothing.
    """

    def __init__(
        self, urls: str | Sequence[str], *, storage: Storage, index_url: str | None = None, where: str | None = None,
        view: str | None = None, subset: str | None = None, allow_unfinished: bool | None = None,
    ) -> None:  # fmt: skip
        self.storage, self.cache, self.fields = storage, None, None
        self.shards = open_shards(storage, urls, index_url, allow_unfinished=bool(allow_unfinished))
        if self.shards.table is None:
            raise IndexMissingError(self.shards.missing_index)
        asked = asked_filter(
            storage, self.shards, where=where, view=view, subset=parse_subset(subset), exclude=None, peers=None
        )
        self._selection = narrowed(storage, self.shards, asked)
        self._recent = RandomAccess()


def open_planned(
    urls: Sequence[str], *, storage: Storage, storage_options: dict[str, object] | None = None, **options: Any
) -> Planned:
    """Open a mixture if the only URL is that of a JSON file, else a dataset.

    Args:
        urls: URLs as users write them.
        storage: Store of the dataset.
        storage_options: The options that ``storage`` was made with; default for a mixture's sources that name none.
        options: Options of :class:`OpenedSet`, for datasets only.

    Raises:
        ConfigError: It cannot be opened with these options.
    """
    if len(urls) != 1 or not urls[0].partition("?")[0].endswith(MIXTURE_SUFFIX):
        return OpenedSet(urls, storage=storage, **options)
    given = [name for name, value in options.items() if value is not None]
    if given:
        name = given[0].removesuffix("_url").replace("_", "-")
        raise ConfigError(f"--{name}: in a mixture it belongs to each source; write it into {urls[0]}")
    from streaming.datasets.mixture import Mixture  # noqa: PLC0415  it imports torch

    return Mixture.from_file(urls[0], storage_options=storage_options)


def sets_of(planned: Planned) -> Iterator[tuple[str, ChunkSource]]:
    """Yield the datasets in the order of their chunks, with their names; the name of a single dataset is ""."""
    if isinstance(planned, OpenedSet):
        yield "", planned
    else:
        yield from ((name, one) for name, one in sorted(planned.leaves.items()) if isinstance(one, ChunkSource))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Estimate what is read of each chunk of a dataset: all of it, or the spans that a filter needs.

    If a share ``f`` of a chunk's samples is kept, at random, a span of ``s`` samples contains none of them with
    probability ``p = (1 - f)**s``. It is skipped if it lies in a run of such spans at least as long as the smallest gap
    that is worth another request, ``h`` spans: with probability ``p**h * (h - (h - 1) * p)``.

    Attributes:
        num_bytes: int64 [C], bytes read when a chunk is fetched.
        num_requests: float64 [C], requests for them.
        sample_bytes: Mean size of a sample.
    """

    num_bytes: Int64Array
    num_requests: Floats
    sample_bytes: float

    @classmethod
    def of(cls, chunk_bytes: Int64Array, given: Int64Array, stored: Int64Array) -> Reads:
        """Estimate for chunks of these sizes, from the samples that they deliver and store, int64 [C] each."""
        mean = int(chunk_bytes.sum()) / max(int(stored.sum()), 1)
        if given is stored:
            return cls(num_bytes=chunk_bytes, num_requests=np.ones(len(given)), sample_bytes=mean)
        sizes = np.maximum(chunk_bytes / np.maximum(stored, 1), 1)
        per_span = np.maximum(SPAN_BYTES / sizes, 1)
        empty = (1 - given / np.maximum(stored, 1)) ** per_span
        hole = np.ceil(FILTER_GAP_BYTES / (per_span * sizes))
        left_out = empty**hole * (hole - (hole - 1) * empty)
        # Each run of bytes that is read begins after a gap, or at the beginning of the chunk if no gap is there.
        runs = stored / per_span * (1 - empty) * empty**hole + 1 - empty**hole
        return cls(
            num_bytes=np.ceil(chunk_bytes * (1 - left_out)).astype(np.int64),
            num_requests=np.maximum(runs, 1),
            sample_bytes=mean,
        )


def chosen_of(planned: Planned) -> dict[str, Any]:
    """Return the order that a mixture's file chooses, as options of a plan; empty for a dataset."""
    if isinstance(planned, OpenedSet):
        return {}
    chosen = planned.shuffle_config
    return {"shuffle": planned.shuffle, "seed": planned.seed, "lanes": chosen.lanes, "window": chosen.window}
