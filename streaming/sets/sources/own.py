"""Read custom kinds of sets: ``CustomSource`` implements the part that is common to all of them."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np

from streaming.build.batches.build import OnError, RowKind, Samples, SourceRecipe
from streaming.build.batches.draws import BatchDraws, Chain, as_chain, epoch_key
from streaming.build.decode import (
    DecodeSpec,
    FieldDecoder,
    ReadDistant,
    decode_field,
    draws_numbers,
    raw,
    resolve_decoders,
)
from streaming.common.arrays import sums
from streaming.errors import DecodeError, IndexMismatchError, IndexMissingError
from streaming.order.plan.settings import ShuffleConfig
from streaming.sets.sources.keys import KeysOfShards
from streaming.shards.catalog.source import OneOrder
from streaming.shards.fetch.chunks import InPlace, Slices
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import FetchRange, checked_range
from streaming.shards.index.keys import key_array
from streaming.shards.index.sample_table import SampleLocation
from streaming.storage import ActiveRequest, redact
from streaming.types import Decoder, Int64Array, Sample, Transform


class SampleRows(OneOrder):
    """A set whose rows are samples."""

    fields: tuple[str, ...] | None
    decoders: FieldDecoder
    transform: Transform | Chain | None
    on_error: OnError

    @property
    def items(self) -> RowKind:
        """See ``ShardSet``: a row is a sample."""
        return Samples()

    def expected_samples(self, num_rows: float) -> float:
        """See ``ShardSet``: a row is a sample."""
        return num_rows

    @property
    def recipe_parts(self) -> tuple[SourceRecipe, ...]:
        """See ``ShardSet``."""
        return (
            SourceRecipe(decoders=self.decoders, transform=self.transform, on_error=self.on_error, fields=self.fields),
        )

    def mapped(self, function: Transform) -> Self:
        """Return the same set that also calls ``function``; see ``StreamingDataset.map``.

        Raises:
            ConfigError: ``function`` is not a function of a sample.
        """
        made = copy.copy(self)
        before = as_chain(self.transform)
        made.transform = Chain((*(before.functions if before is not None else ()), function))
        return made

    def decoder_of(self, field: str, number: int) -> Decoder:
        """Return the decoder of a field of one sample, with the random numbers of this position in epoch 0."""
        decoder = self.decoders.decoder_for(field)
        return self._draws(number).bound(decoder) if draws_numbers(decoder) else decoder

    def _draws(self, number: int) -> BatchDraws:
        return BatchDraws(epoch_key(self.seed, 0), np.array([number]))

    def _changed(self, sample: Sample, number: int, source: str = "") -> Sample:
        """Return a sample after ``transform``, with the random numbers of this position in epoch 0.

        Args:
            sample: The sample.
            number: Its number in this set.
            source: The name of this set in a mixture.

        Raises:
            DecodeError: ``transform`` dropped it.
        """
        if source:
            sample["__source__"] = source
        chain = as_chain(self.transform)
        changed = sample if chain is None else chain(sample, self._draws(number))
        if changed is None:
            raise DecodeError(
                f"{sample['__url__']}: sample {sample['__key__']!r}: transform returned None, which drops the sample"
            )
        return changed


class CustomSource(SampleRows):
    """Read chunks of samples from anywhere: the base of a custom ``streaming.run.engine.source.Source``.

    A subclass lists its chunks and fetches them; everything else works as for shards without sample tables: a chunk is
    read whole, with all fields, and lost if a part of it is lost. Override what the subclass does better: ``slices``
    (parts of chunks), ``unit_bytes`` (fewer bytes for fewer ``fields``), ``locate`` (keys without reading). A source
    must be thread-safe, and picklable for worker processes; give it to a ``DataLoader`` as ``DataSet(source)``.
    docs/extending.md has an example; ``streaming.testing.SourceTests`` tests everything that loops rely on.

    Args:
        fields, decode, transform, shuffle, seed, on_error, max_bad_samples, bad_samples_file: See ``StreamingDataset``.
    """

    is_local = False
    in_place: InPlace | None = None
    read_distant: ReadDistant | None = None
    slices: Slices | None = None
    max_bad_samples: float

    def __init__(
        self, *, fields: Sequence[str] | None = None, decode: DecodeSpec = "auto", transform: Transform | None = None,
        shuffle: bool | ShuffleConfig = True, seed: int = 0, on_error: OnError = "substitute",
        max_bad_samples: float = 0.001, bad_samples_file: str | None = None,
    ) -> None:  # fmt: skip
        self.fields = None if fields is None else tuple(fields)
        self.decode, self.decoders = decode, resolve_decoders(decode)
        self.transform = as_chain(transform)
        self._order_by(shuffle, seed)
        self.on_error, self.max_bad_samples = on_error, max_bad_samples
        self.bad_samples_file = bad_samples_file
        self._counted: set[int] = set()

    # --- what a subclass defines ---

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """See ``Source``."""

    @property
    @abstractmethod
    def urls(self) -> Sequence[str]:
        """See ``ShardSet``: any distinct texts, one per shard."""

    @property
    @abstractmethod
    def chunk_bytes(self) -> Int64Array:
        """See ``Source``."""

    @abstractmethod
    def chunk(self, chunk_id: int) -> FetchRange:
        """See ``Source``."""

    @abstractmethod
    def fill(self, wanted: FetchRange, out: memoryview) -> UnitLayout:
        """Write the bytes of a range into ``out``; return where its samples are, and which of them are damaged.

        If ``wanted`` has checksums, the bytes are verified afterwards.

        Raises:
            DataError: The chunk is lost.
        """

    # --- what follows from it ---

    def samples_of(self, chunk_ids: Int64Array, offsets: Int64Array) -> Int64Array:
        """See ``Table``: the offsets themselves, since no sample is left out.

        Raises:
            IndexMismatchError: ``chunk_samples`` counts more samples than ``chunk`` has, so others would be delivered.
        """
        if new := set(np.unique(chunk_ids).tolist()) - self._counted:
            counts = self.chunk_samples
            for chunk in sorted(new):
                wanted = self.chunk(chunk)
                if wanted.num_samples - wanted.lead < counts[chunk]:
                    raise IndexMismatchError(
                        f"{wanted.shown_url}: {type(self).__name__}.chunk_samples: {counts[chunk]} samples in chunk "
                        f"{chunk}, got a chunk({chunk}) of {wanted.num_samples - wanted.lead}; let both count the same"
                    )
            self._counted |= new
        return offsets

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> Fetched:
        """See ``Source``.

        Raises:
            DataError: The chunk is lost.
            IndexMismatchError: ``fill`` gave other samples than the range holds, or fields that are not in ``out``.
        """
        layout = self.fill(wanted, out)
        _check_filled(type(self).__name__, wanted, layout, len(out))
        return Fetched(checked=None if layout.damage else checked_range(wanted, out[: layout.num_bytes]), found=layout)

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """See ``Source``."""
        return [redact(self.chunk(chunk_id).url) for chunk_id in chunk_ids.tolist()]

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """See ``Source``: all bytes."""
        return self.chunk_bytes[chunk_ids]

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:  # noqa: ARG002  as Source has it
        """See ``Source``: unknown."""
        return None

    @property
    def shard_keys(self) -> KeysOfShards:
        """The keys of all samples, by shard, one by one from ``locate``."""
        return LocatedKeys(self)

    def chunk_with(self, shard: int, number: int) -> int | None:
        """Return the chunk that holds a sample of a shard; None: none does."""
        for chunk in range(len(self.chunk_samples)):
            wanted = self.chunk(chunk)
            first = wanted.first_sample + wanted.lead
            if wanted.url == self.urls[shard] and first <= number < wanted.first_sample + wanted.num_samples:
                return chunk
        return None

    def counters(self) -> dict[str, float]:
        """See ``ShardSet``: nothing is counted."""
        return {}

    def in_flight(self) -> list[ActiveRequest]:
        """See ``ShardSet``: unknown."""
        return []

    # --- what users read by number ---

    @property
    def num_readable(self) -> int:
        """Number of samples that :meth:`read` can return: all."""
        return int(self.chunk_samples.sum())

    def read(self, numbers: Int64Array) -> list[Sample]:
        """Return samples by number, which must exist, in this order; each chunk is read once.

        Raises:
            DataError: A sample cannot be read, or ``transform`` dropped it.
        """
        starts = sums(self.chunk_samples)
        chunks = np.searchsorted(starts, numbers, side="right") - 1
        inside = self.samples_of(chunks, numbers - starts[chunks])
        found: dict[int, Sample] = {}
        for chunk in np.unique(chunks).tolist():
            wanted = self.chunk(chunk)
            data = bytearray(wanted.num_bytes)
            layout = self.fetch_unit(wanted, memoryview(data)).apart(memoryview(data))
            for place in np.flatnonzero(chunks == chunk).tolist():
                number = int(numbers[place])
                sample = self._sample(wanted, layout, data, wanted.lead + int(inside[place]), number)
                found[place] = self._changed(sample, number)
        return [found[place] for place in range(len(numbers))]

    def scan(self) -> Iterator[Sample]:
        """Yield all samples in storage order, as :meth:`read` returns them, reading chunk by chunk."""
        for first, stop in pairwise(sums(self.chunk_samples).tolist()):
            yield from self.read(np.arange(first, stop))

    def _sample(self, wanted: FetchRange, layout: UnitLayout, data: bytearray, row: int, number: int) -> Sample:
        if row in layout.damage:
            raise layout.damage[row]
        sample: Sample = {"__key__": layout.keys[row], "__url__": wanted.shown_url}
        for name, start, size in zip(
            layout.fields, layout.starts[row].tolist(), layout.sizes[row].tolist(), strict=True
        ):
            if start >= 0 and (self.fields is None or name in self.fields):
                decoder, value = self.decoder_of(name, number), bytes(data[start : start + size])
                where = {"url": wanted.shown_url, "key": layout.keys[row], "field": name}
                sample[name] = value if decoder is raw else decode_field(decoder, value, **where)
        return sample


def _check_filled(kind: str, wanted: FetchRange, layout: UnitLayout, room: int) -> None:
    """Check that a layout fits the samples of a range, in memory of ``room`` bytes.

    Raises:
        IndexMismatchError: It does not fit: other samples would be delivered under these keys.
    """
    shape = (wanted.num_samples, len(layout.fields))
    if len(layout.keys) != wanted.num_samples or layout.starts.shape != shape or layout.sizes.shape != shape:
        raise IndexMismatchError(
            f"{wanted.shown_url}: {kind}.fill: expected {wanted.num_samples} samples, as its chunk() says, with "
            f"{len(layout.fields)} fields each, got {len(layout.keys)} keys, starts of shape {layout.starts.shape} and "
            f"sizes of shape {layout.sizes.shape}; return one row for each sample of the range, -1 for a field that "
            "is missing"
        )
    ends = np.where(layout.starts >= 0, layout.starts + layout.sizes, 0)
    last = int(ends.max(initial=0))
    if not last <= layout.num_bytes <= room:
        raise IndexMismatchError(
            f"{wanted.shown_url}: {kind}.fill: fields end at byte {last}, num_bytes is {layout.num_bytes}, and there "
            f"is room for {room} bytes; count starts from the beginning of `out`, and let chunk() ask for enough"
        )


class LocatedKeys:
    """Keys that a ``CustomSource`` locates, chunk by chunk. Implements ``KeysOfShards``."""

    num_threads = 1

    def __init__(self, source: CustomSource) -> None:
        self.home = source

    @cached_property
    def _chunks(self) -> dict[str, list[int]]:
        """The chunks of each shard that holds a sample, by shard URL."""
        found: dict[str, list[int]] = {}
        for chunk in np.flatnonzero(self.home.chunk_samples).tolist():
            found.setdefault(self.home.chunk(chunk).url, []).append(chunk)
        return found

    @property
    def filled(self) -> list[int]:
        """See ``KeysOfShards``."""
        return [shard for shard, url in enumerate(self.home.urls) if url in self._chunks]

    def column(
        self,
        shard: int,
        only: tuple[int, int] | None = None,
        turns: AbstractContextManager[Any] | None = None,  # noqa: ARG002
    ) -> Any:
        """See ``KeysOfShards``."""
        url, keys = self.home.urls[shard], []
        for chunk in self._chunks.get(url, ()):
            wanted = self.home.chunk(chunk)
            for inside in range(wanted.num_samples - wanted.lead):
                place = self.home.locate(chunk, inside)
                if place is None:
                    raise IndexMissingError(f"{redact(url)}: a {type(self.home).__name__} does not say what is where")
                keys.append(place.key)
        return key_array(keys if only is None else keys[slice(*only)])
