"""Kinds that streaming/ does not know, for its own batteries: a source, rows, an order; and sets for those it knows.

``DictSource`` has its samples in a dict of this process, rows of ``WindowSource`` are sliding windows over a set, and
in ``ReversedBits`` samples are due by the reversed bits of their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import crc32c
import numpy as np

from shard_tools import ShardWriter
from streaming import StreamingDataset
from streaming.build.batches.build import BatchBuilder, Mask, SourceRecipe
from streaming.build.batches.collate import default_collate, empty_like
from streaming.build.batches.items.pieces import PieceItems, pieces_of
from streaming.build.batches.portion import Portion
from streaming.build.batches.rows import Rows
from streaming.common.arrays import sums
from streaming.errors import ChecksumError, IndexMismatchError
from streaming.order.packing.layout import PackRows
from streaming.order.plan.order import ENDLESS, LaneParts, OrderSettings
from streaming.sets.datasets.face import reading
from streaming.sets.sources.own import CustomSource
from streaming.sets.sources.samples import SampleSource
from streaming.shards.fetch.layout import UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.shards.index.sample_table import SampleLocation
from streaming.testing.sources import SAMPLES
from streaming.types import Int64Array, Sample

SHARD = 8
"""Samples of each shard that ``write_samples`` writes."""


def write_samples(folder: Path) -> Path:
    """Write ``SAMPLES`` as five shards of eight samples each, with columns of their length and kind."""
    columns = {"tokens": lambda sample: len(sample["tok"]) // 2, "kind": lambda sample: int(sample["cls"]) % 3}
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=SHARD, columns=columns) as writer:
        for key, fields in SAMPLES.items():
            writer.write({"__key__": key, **fields})
    return folder


# --- a source ---


class DictSource(CustomSource):
    """Samples in a dict: a chunk is a run of its keys, two of which are a shard, and a checksum covers a sample."""

    def __init__(self, samples: Mapping[str, Mapping[str, bytes]], *, per_chunk: int, **options: Any) -> None:
        super().__init__(**options)
        self.keys, self._per_chunk, self.num_fetched = list(samples), per_chunk, 0
        self._names = tuple(sorted({name for one in samples.values() for name in one}))
        self._stored: dict[str, dict[str, bytes]] = {key: dict(one) for key, one in samples.items()}
        rows = [[self._stored[key][name] for name in self._names] for key in self.keys]
        self._sizes = np.array([[len(data) for data in row] for row in rows], np.int64)
        self._sums = [[crc32c.crc32c(data) for data in row] for row in rows]

    # --- chunks ---

    @property
    def fingerprint(self) -> str:
        return f"dict of {len(self.keys)} {self._per_chunk} {crc32c.crc32c(repr((self.keys, self._sums)).encode())}"

    @property
    def urls(self) -> list[str]:
        return [f"dict://{shard}" for shard in range(-(-len(self.keys) // (2 * self._per_chunk)))]

    @property
    def chunk_samples(self) -> Int64Array:
        return np.diff(self._firsts)

    @property
    def _firsts(self) -> Int64Array:
        return np.append(np.arange(0, len(self.keys), self._per_chunk), len(self.keys)).astype(np.int64)

    @property
    def _starts(self) -> Int64Array:
        """Where each sample begins, and the last one ends, if all are laid end to end."""
        return sums(self._sizes.sum(axis=1))

    @property
    def chunk_bytes(self) -> Int64Array:
        return np.diff(self._starts[self._firsts])

    def chunk(self, chunk_id: int) -> FetchRange:
        low, high = self._firsts[chunk_id : chunk_id + 2].tolist()
        return self._range(chunk_id // 2, low, high)

    def slice(self, chunk_id: int, first: int, stop: int) -> FetchRange:
        low = int(self._firsts[chunk_id])
        return self._range(chunk_id // 2, low + first, low + stop)

    def _range(self, shard: int, low: int, high: int) -> FetchRange:
        first, last = shard * 2 * self._per_chunk, min((shard + 1) * 2 * self._per_chunk, len(self.keys))
        origin = int(self._starts[first])
        return FetchRange(
            url=self.urls[shard], byte_start=int(self._starts[low]) - origin,
            byte_end=int(self._starts[high]) - origin, first_sample=low - first, num_samples=high - low, crc32c=None,
            shard_bytes=int(self._starts[last]) - origin, fields=self.fields,
        )  # fmt: skip

    # --- bytes ---

    def fill(self, wanted: FetchRange, out: memoryview) -> UnitLayout:
        self.num_fetched += 1
        low = self._numbers_of(wanted.url).start + wanted.first_sample
        read = [name in (wanted.fields or self._names) for name in self._names]
        starts, at, damage = np.full((wanted.num_samples, len(self._names)), -1), 0, {}
        for row, number in enumerate(range(low, low + wanted.num_samples)):
            key = self.keys[number]
            for column, name in enumerate(self._names):
                if not read[column]:
                    continue
                try:
                    data = self._stored[key][name]
                except KeyError:
                    raise IndexMismatchError(f"{wanted.url}: {key!r} is gone") from None
                if crc32c.crc32c(data) != self._sums[number][column]:
                    damage[row] = ChecksumError(f"{wanted.url}: {name} of {key!r} is damaged")
                out[at : at + len(data)] = data
                starts[row, column], at = at, at + len(data)
        sizes = np.where(starts < 0, 0, self._sizes[low : low + wanted.num_samples])
        keys = self.keys[low : low + wanted.num_samples]
        return UnitLayout(
            keys=keys, fields=self._names, starts=starts, sizes=sizes, num_bytes=at, damage=damage
        )  # fmt: skip

    def _numbers_of(self, url: str) -> range:
        first = int(url.rpartition("/")[2]) * 2 * self._per_chunk
        return range(first, min(first + 2 * self._per_chunk, len(self.keys)))

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        read = [self.fields is None or name in self.fields for name in self._names]
        sizes = sums(self._sizes[:, read].sum(axis=1))[self._firsts]
        return np.diff(sizes)[chunk_ids]

    @property
    def slices(self) -> Self:
        return self

    def span_borders(self, room_bytes: Int64Array) -> tuple[Int64Array, Int64Array]:
        samples = np.arange(len(self.keys))
        chunks = samples // self._per_chunk
        return samples, sums(room_bytes)[chunks] + self._starts[samples] - self._starts[self._firsts[chunks]]

    def locate(self, chunk_id: int, inside: int) -> SampleLocation:
        number = int(self._firsts[chunk_id]) + inside
        wanted, ends, fields = self.slice(chunk_id, inside, inside + 1), 0, {}
        for name, size in zip(self._names, self._sizes[number].tolist(), strict=True):
            fields[name] = (wanted.byte_start + ends, wanted.byte_start + ends + size)
            ends += size
        return SampleLocation(
            key=self.keys[number], chunk=chunk_id % 2, record_start=wanted.byte_start, record_end=wanted.byte_end,
            fields=fields,
        )  # fmt: skip

    def counters(self) -> dict[str, float]:
        return {"fetched_from_dict": self.num_fetched}

    def hurt(self, key: str, *, is_missing: bool) -> None:
        """Flip a bit of a sample, or lose its shard."""
        shard = self.keys.index(key) // (2 * self._per_chunk)
        if is_missing:
            for number in self._numbers_of(f"dict://{shard}"):
                self._stored[self.keys[number]] = {}
        else:
            self._stored[key] = {name: bytes([data[0] ^ 1]) + data[1:] for name, data in self._stored[key].items()}


# --- rows ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRows(PieceItems):
    """A row is a run of samples, each field stacked."""

    size: int

    def positions(self, positions: Int64Array, packs: PackRows) -> Int64Array:
        return positions[packs.packs] * self.size + packs.places

    def build(self, builder: BatchBuilder, rows: Rows, valid: Mask) -> Any:
        packs = pieces_of(rows)
        mask = builder.recipe.mask_of(len(rows.keys), None if valid is None else valid[packs.packs])
        samples = [builder.sample_or_substitute(rows, i, mask) for i in range(len(rows.keys))]
        spans = list(pairwise(packs.splits.tolist()))
        each = None if mask is None else np.array([mask[low:high].all() for low, high in spans])
        return builder.collate([default_collate(samples[low:high]) for low, high in spans], each)

    def empty(self, builder: BatchBuilder, prototypes: Iterator[Rows], begin: int) -> Any:
        row, recipe = default_collate([builder.first_of(prototypes)] * self.size), builder.recipe
        if recipe.collate_fn is not None:
            return builder.without_rows(row)
        whole = replace(recipe, portion=Portion(), finish=None)
        return recipe.portion(empty_like(whole.whole(builder.default([row]), whole.mask_of(1, None), 1)), 0)

    def alone(self, part: SourceRecipe, samples: Sequence[Sample], packs: PackRows) -> Sample:
        raise NotImplementedError


class WindowSource(SampleSource):
    """The sliding windows of ``size`` samples over each chunk of a source."""

    size: int
    slices = None

    @classmethod
    def over(cls, source: SampleSource, size: int) -> Self:
        made = cls.__new__(cls)
        made.__dict__ |= {**source.__dict__, "size": size}
        return made

    @property
    def items(self) -> WindowRows:
        return WindowRows(size=self.size)

    @property
    def chunk_samples(self) -> Int64Array:
        return np.maximum(super().chunk_samples - self.size + 1, 0)

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}-{self.size}"

    @property
    def rows(self) -> Self:
        return self

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:
        return True

    def keep_at_most(self, num_bytes: int) -> None:
        """Keep nothing."""

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:
        inside = (offsets[:, None] + np.arange(self.size)).reshape(-1)
        return PackRows.of_samples(
            self.samples_of(chunk_ids.repeat(self.size), inside), self.size * np.arange(len(offsets) + 1)
        )

    def expected_samples(self, num_rows: float) -> float:
        return num_rows * self.size


def windows(folder: Path, size: int, **options: Any) -> StreamingDataset:
    """Return a set whose rows are such windows."""
    dataset = StreamingDataset(str(folder), **options)
    return reading(dataset, WindowSource.over(dataset.source, size))


# --- an order ---


class ReversedBits:
    """The orders of all passes; pass n begins n samples later. An order for small sets: nearly all chunks are live."""

    is_endless = False
    borders: tuple[int, ...] = ()
    stretch = mixed_after = ENDLESS

    def __init__(self, chunk_samples: Int64Array, settings: OrderSettings) -> None:
        self.chunk_samples, self.settings = np.asarray(chunk_samples, np.int64), settings
        self.samples_per_pass = int(self.chunk_samples.sum())

    def of_pass(self, number: int) -> ReversedPass:
        return ReversedPass(self, number)

    def under(self, settings: OrderSettings) -> ReversedBits:
        return ReversedBits(self.chunk_samples, settings)


class ReversedPass:
    """The order of one pass."""

    def __init__(self, orders: ReversedBits, number: int) -> None:
        count, self._lanes = orders.samples_per_pass, orders.settings.lanes
        width = max(count - 1, 1).bit_length()
        turned = np.array([int(f"{at:0{width}b}"[::-1], 2) for at in range(1 << width)], np.int64)
        self._due = np.roll(turned[turned < count], number)  # the sample that is due at each global position
        self._starts = sums(orders.chunk_samples)

    def _in_lane(self, lane: int) -> tuple[Int64Array, Int64Array]:
        """Chunk and offset at each position of a lane."""
        samples = self._due[lane :: self._lanes]
        chunks = np.searchsorted(self._starts, samples, side="right") - 1
        return chunks, samples - self._starts[chunks]

    def lane_size(self, lane: int) -> int:
        return len(self._due[lane :: self._lanes])

    def lane_samples(self, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        chunks, offsets = self._in_lane(lane)
        return chunks[start:stop], offsets[start:stop]

    def lane_parts(self, low: int, high: int, start: int, stop: int) -> LaneParts:
        found = []
        for lane in range(low, high):
            chunks, _ = self._in_lane(lane)
            ids, begins = np.unique(chunks, return_index=True)
            ends = len(chunks) - np.unique(chunks[::-1], return_index=True)[1]
            found.append(LaneParts(chunk_ids=ids, lanes=np.full_like(ids, lane), begins=begins, ends=ends))
        return LaneParts.joined(found)

    def chunks_before(self, chunk_id: int) -> Iterator[int]:
        count = len(self._starts) - 1
        return ((chunk_id - back) % count for back in range(1, count))

    def find(self, chunk_id: int, offset: int, start: int, stop: int) -> list[tuple[int, int]]:
        place, lane = divmod(int(np.flatnonzero(self._due == self._starts[chunk_id] + offset)[0]), self._lanes)
        return [(lane, place)] if start <= place < stop else []
