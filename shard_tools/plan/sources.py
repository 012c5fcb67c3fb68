"""Open what a plan is made for: a data set with its filter, or the mixture that a file describes; index files alone."""

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
    """Shards with an index, and what a filter keeps of them: as training opens them, but without torch.

    Raises:
        IndexMissingError: There is none, and the set is too large to index on the fly.
        NotFoundError: Nothing matches ``urls``.
        ConfigError: The filter cannot be worked out, or keeps nothing.
    """

    def __init__(
        self, urls: str | Sequence[str], *, storage: Storage, index_url: str | None = None, where: str | None = None,
        view: str | None = None, subset: str | None = None,
    ) -> None:  # fmt: skip
        self.storage, self.cache, self.fields = storage, None, None
        self.shards = open_shards(storage, urls, index_url)
        if self.shards.table is None:
            raise IndexMissingError(self.shards.missing_index)
        asked = asked_filter(
            storage, self.shards, where=where, view=view, subset=parse_subset(subset), exclude=None, peers=None
        )
        self._window, self._selected = narrowed(storage, self.shards, asked)
        self._recent = RandomAccess(self)


def open_planned(
    urls: Sequence[str], *, storage: Storage, storage_options: dict[str, object] | None = None, **options: Any
) -> Planned:
    """Open a mixture where the one URL is that of a JSON file, else a data set.

    Args:
        urls: As users write them.
        storage: Of the data set.
        storage_options: It was made of these; those of a mixture's sources that give none.
        options: Of :class:`OpenedSet`, for a data set alone.

    Raises:
        ConfigError: It cannot be opened so.
    """
    if len(urls) != 1 or not urls[0].partition("?")[0].endswith(MIXTURE_SUFFIX):
        return OpenedSet(urls, storage=storage, **options)
    given = [name for name, value in options.items() if value is not None]
    if given:
        name = given[0].removesuffix("_url")
        raise ConfigError(f"--{name}: in a mixture it belongs to each source; write it into {urls[0]}")
    from streaming.datasets.mixture import Mixture  # noqa: PLC0415  it imports torch

    return Mixture.from_file(urls[0], storage_options=storage_options)


def sets_of(planned: Planned) -> Iterator[tuple[str, ChunkSource]]:
    """Yield the data sets in the order of their chunks, with their names: "" of one that is no mixture's."""
    if isinstance(planned, OpenedSet):
        yield "", planned
    else:
        yield from ((name, one) for name, one in sorted(planned.leaves.items()) if isinstance(one, ChunkSource))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Estimate what is read of each chunk of a data set: all of it, or what a filter leaves of its spans.

    Of a chunk of which a share ``f`` is kept, drawn anywhere, a span of ``s`` samples has none of these with the
    probability ``p = (1 - f)**s``. It is left out where it lies in a run of such spans as long as the hole that pays,
    ``h`` spans: with ``p**h * (h - (h - 1) * p)``.

    Attributes:
        num_bytes: int64[C], bytes read when a chunk is fetched.
        num_requests: float64[C], requests for them.
        sample_bytes: Mean size of a sample.
    """

    num_bytes: Int64Array
    num_requests: Floats
    sample_bytes: float

    @classmethod
    def of(cls, chunk_bytes: Int64Array, given: Int64Array, stored: Int64Array) -> Reads:
        """Work it out for chunks of so many bytes that give so many samples of those stored, int64[C] each."""
        mean = int(chunk_bytes.sum()) / max(int(stored.sum()), 1)
        if given is stored:
            return cls(num_bytes=chunk_bytes, num_requests=np.ones(len(given)), sample_bytes=mean)
        sizes = np.maximum(chunk_bytes / np.maximum(stored, 1), 1)
        per_span = np.maximum(SPAN_BYTES / sizes, 1)
        empty = (1 - given / np.maximum(stored, 1)) ** per_span
        hole = np.ceil(FILTER_GAP_BYTES / (per_span * sizes))
        left_out = empty**hole * (hole - (hole - 1) * empty)
        # A run of bytes that are read begins behind each hole, and at the chunk's beginning if there is none.
        runs = stored / per_span * (1 - empty) * empty**hole + 1 - empty**hole
        return cls(
            num_bytes=np.ceil(chunk_bytes * (1 - left_out)).astype(np.int64),
            num_requests=np.maximum(runs, 1),
            sample_bytes=mean,
        )


def chosen_of(planned: Planned) -> dict[str, Any]:
    """Return what a mixture's file says of the order, as options of a plan; nothing of a data set."""
    if isinstance(planned, OpenedSet):
        return {}
    chosen = planned.shuffle_config
    return {"shuffle": planned.shuffle, "seed": planned.seed, "lanes": chosen.lanes, "window": chosen.window}
