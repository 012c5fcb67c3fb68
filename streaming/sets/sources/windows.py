"""Read windows of the recordings of a dataset: ``WindowSource``."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from infra import agent_store, is_first_process
from streaming.build.batches.build import OnError, RowKind
from streaming.build.batches.draws import Chain, as_chain
from streaming.build.batches.items.windows import MOMENT, WindowFields, WindowRows, indices_of
from streaming.build.decode import DecodeSpec, FieldDecoder, RawFields, decode_field, of_shard
from streaming.common.arrays import sums
from streaming.common.job.shared_results import Peers, framed, part_of, shared_parts, unframed
from streaming.common.job.store import job_peers
from streaming.common.threads import on_threads
from streaming.errors import ConfigError, IndexMissingError, StorageError
from streaming.order.plan.order import OrderSettings
from streaming.sets.sources.keys import KeysOfShards
from streaming.sets.sources.own import SampleRows
from streaming.sets.sources.samples import SampleSource
from streaming.sets.windows.order import order_of_windows
from streaming.sets.windows.reader import WindowReader
from streaming.sets.windows.recording import Float64Array
from streaming.sets.windows.shard import LeftOut, UnevenTables, WindowUnits
from streaming.sets.windows.spec import WindowSpec
from streaming.shards.catalog.open import check_fields, digest_of
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.shards.index.sample_table import SampleLocation
from streaming.shards.late.fields import LateField, late_names
from streaming.shards.versions.history import number_of
from streaming.shards.versions.publish import read_head
from streaming.storage import ActiveRequest, Checked, redact
from streaming.types import Int64Array, Sample, Transform, override

_REQUESTS = 16
_log = logging.getLogger("streaming")


class WindowSource(SampleRows):
    """Provide windows of the recordings of a dataset: its units act as chunks, its windows as samples.

    A ``streaming.run.engine.source.Source``. What a chunk has in memory is decoded: its frames, each once, and its
    steps. So ``memory_limit`` bounds decoded bytes, a decoded frame serves all windows that hold it, and worker
    processes share them. Thread-safe.

    Args:
        recordings: The dataset.
        spec: What rows there are.
        transform: Function of a window, or None.
    """

    has_gaps = can_be_cut = False
    why_whole = "a Windows reads groups of pictures, and its groups= says how many at once"
    in_place = read_distant = slices = None
    decode: DecodeSpec
    decoders: FieldDecoder
    transform: Transform | Chain | None
    on_error: OnError
    max_bad_samples: float

    def __init__(self, recordings: SampleSource, spec: WindowSpec, transform: Transform | None) -> None:
        _check_recordings(recordings, spec)
        self.recordings, self.spec = recordings, spec
        self.storage, self.cache = recordings.storage, recordings.cache
        self.shuffle, self.shuffle_config, self.seed = recordings.shuffle, recordings.shuffle_config, recordings.seed
        self.transform = as_chain(transform)
        self._take_over()
        peers = job_peers(agent_store())
        late = late_names(recordings.shards.schemas)
        named = {name: option for name, option in spec.named_by.items() if name not in late}
        check_fields(self.storage, recordings.shards, named, peers)
        self.reader = WindowReader(recordings, spec, peers)
        self._units, self.left_out, self.uneven, self._digests, self._once_bytes = self._of_all(peers)
        self._tell()

    def _take_over(self) -> None:
        """Copy the options of the recordings to this source."""
        recordings, spec = self.recordings, self.spec
        self.meaning = recordings.meaning
        self.on_error, self.max_bad_samples = recordings.on_error, recordings.max_bad_samples
        self.bad_samples_file = recordings.bad_samples_file
        self.decode = recordings.decode
        self.fields = (MOMENT, *spec.names, *map(indices_of, spec.blocks))
        self.decoders = WindowFields(
            blocks=frozenset(spec.blocks), carried=spec.carry, wraps=recordings.decoders if spec.carry else RawFields()
        )

    # --- which windows there are ---

    def _of_all(self, peers: Peers | None) -> tuple[WindowUnits, LeftOut, UnevenTables, tuple[str, ...], int]:
        """Return the units of all shards; with peers, each rank computes those of a range of shards.

        Raises:
            ConfigError: There is no window.
        """
        name = digest_of([self.recordings.fingerprint, self.spec.plain, self.spec.sizes])
        digests, found, once_bytes = list[str](), list[WindowUnits](), 0
        left_out, uneven = LeftOut(), UnevenTables()
        for part in shared_parts(peers, f"windows/{name}", self._part):
            head, start = unframed(part)
            digests += head["digests"]
            once_bytes += head["once_bytes"]
            left_out += LeftOut(**head["left_out"])
            uneven += UnevenTables.from_plain(head["uneven"])
            found.append(WindowUnits.from_bytes(memoryview(part)[start:]))
        units = WindowUnits.joined(found)
        if not len(units.rows):
            raise ConfigError(f"Windows: no window: {left_out.words(self.spec) or 'the set has no recordings'}")
        return units, left_out, uneven, tuple(digests), once_bytes

    def _part(self, rank: int, world_size: int) -> bytes:
        mine = part_of(len(self.urls), rank, world_size)
        try:
            found = on_threads(self.reader.shard, mine, _REQUESTS, name="shardstream-windows")
        except IndexMissingError as error:
            self._check_newest(error)
            raise
        head = {
            "digests": [one.digest for one in found], "once_bytes": sum(one.once_bytes for one in found),
            "left_out": sum((one.left_out for one in found), LeftOut()).plain,
            "uneven": sum((one.uneven for one in found), UnevenTables()).plain,
        }  # fmt: skip
        return framed(head, WindowUnits.joined([one.units for one in found]).to_bytes())

    def _check_newest(self, error: IndexMissingError) -> None:
        """Refuse an older version that lacks an index of its videos: ``shard_tools index`` reads the newest.

        Raises:
            ConfigError: It is such a version.
        """
        for home, opened in self.recordings.shards.versions.items():
            newest = number_of(read_head(self.storage, home).table)
            if opened < newest:
                raise ConfigError(
                    f"version={opened} of {redact(home)}: the videos of one of its shards are not indexed, and "
                    f"`shard_tools index --video` indexes those of the newest version, {newest}. Leave version out; "
                    "later, index videos before a set is changed"
                ) from error

    def _tell(self) -> None:
        """Log how many windows there are, and which recordings have none."""
        if not is_first_process():
            return
        _log.info("Windows: %s", self.words())
        if self.left_out.num_recordings:
            _log.warning("Windows: %s", self.left_out.words(self.spec))
        for words in self.uneven.words(self.spec):
            _log.warning("Windows: columns: %s", words)

    @property
    def fingerprint(self) -> str:
        """Identifies these windows: the recordings, the times of their frames, and how they are cut."""
        return self._fingerprint_of(self.recordings.fingerprint, self._digests)

    def _fingerprint_of(self, recordings: str, digests: Sequence[str]) -> str:
        facts = [recordings, hashlib.sha256("".join(digests).encode()).hexdigest(), self.spec.plain]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def can_grow(self) -> bool:
        """See ``ChunkSource``: as the recordings, since a unit lies in one shard."""
        return self.recordings.can_grow

    def chunks_when(self, fingerprint: str, num_shards: int | None) -> int | None:
        """See ``ChunkSource``: the number of units."""
        if fingerprint == self.fingerprint:
            return len(self._units.rows)
        if num_shards is None or not self.can_grow or not 0 < num_shards < len(self.urls):
            return None
        was = self._fingerprint_of(self.recordings.fingerprint_when(num_shards), self._digests[:num_shards])
        return int(np.searchsorted(self._units.shards, num_shards)) if fingerprint == was else None

    @property
    def opened_versions(self) -> dict[str, tuple[int, ...]]:
        """See ``Source``: those of the recordings."""
        return self.recordings.opened_versions

    def where_is(self, fingerprint: str, numbers: Sequence[int] = ()) -> str:  # noqa: ARG002  it is one of windows
        """See ``Source``: the version of the recordings that the state names, or the options that cut them."""
        return self.recordings.where_is("", numbers) or (
            "Open the same shards in the same order, with the index they had, and cut them as the run did: every=, "
            "video=, columns=, clocks=, edge=, carry=, size= and groups= of Windows say which windows there are, and "
            "how they are read together"
        )

    @override
    def order_settings(self, global_batch_size: int) -> OrderSettings:
        found = super().order_settings(global_batch_size)
        return order_of_windows(found, self.shuffle_config, self.chunk_samples, self.chunk_bytes, global_batch_size)

    @override
    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str:
        cures = []
        if any(size is None for size in self.spec.sizes):
            cures.append("frames scaled down, Windows(…, size=(224, 224))")
        if not resumed and self.spec.groups != 1:
            cures.append("units of one group of pictures, Windows(…, groups=1), which reads some groups twice")
        return f"; or {' or '.join(cures)}" if cures else ""

    # --- what users read by number ---

    @property
    def num_readable(self) -> int:
        """Number of windows."""
        return int(self.chunk_samples.sum())

    @property
    def shard_keys(self) -> KeysOfShards:
        """The keys of all windows, by shard: each that of its recording."""
        return WindowKeys(known=self.recordings.shard_keys, reader=self.reader, units=self._units)

    def read(self, numbers: Int64Array, sources: Sequence[str] = ()) -> list[Sample]:
        """Return windows by number, which must exist, in this order; only their groups of pictures are read.

        Args:
            numbers: int64 [n], numbers in storage order.
            sources: For each number, the name of this set in a mixture.

        Raises:
            DataError: A window cannot be read, or ``transform`` dropped it.
        """
        starts = sums(self.chunk_samples)
        chunks = np.searchsorted(starts, numbers, side="right") - 1
        named, found = sources or [""] * len(numbers), dict[int, Sample]()
        for chunk in np.unique(chunks).tolist():
            places = np.flatnonzero(chunks == chunk)
            rows = self._units.firsts[chunk] + numbers[places] - starts[chunk]
            distinct, inverse = np.unique(rows, return_inverse=True)
            layout, data = self.reader.rows(int(self._units.shards[chunk]), distinct)
            for place, row in zip(places.tolist(), inverse.tolist(), strict=True):
                sample = self._window(chunk, layout, data, row, int(numbers[place]))
                found[place] = self._changed(sample, int(numbers[place]), named[place])
        return [found[place] for place in range(len(numbers))]

    def scan(self, source: str = "") -> Iterator[Sample]:
        """Yield all windows in storage order, as :meth:`read` returns them, reading unit by unit."""
        starts = sums(self.chunk_samples).tolist()
        for first, stop in pairwise(starts):
            yield from self.read(np.arange(first, stop), [source] * (stop - first))

    def recording_of(self, number: int) -> int:
        """Return the number in the dataset of the recording of a window."""
        shard, row = self.place_of(number)
        sample = self.reader.recording_of(shard, row)
        return int(self.recordings.numbers_of(np.array([shard]), np.array([sample]))[0])

    def place_of(self, number: int) -> tuple[int, int]:
        """Return the shard of a window, and its number among the windows there."""
        starts = sums(self.chunk_samples)
        chunk = int(np.searchsorted(starts, number, side="right")) - 1
        return int(self._units.shards[chunk]), int(self._units.firsts[chunk]) + number - int(starts[chunk])

    def moments_of(self, shards: Int64Array, numbers: Int64Array) -> Float64Array:
        """Return the moments of windows in seconds, float64 [n], given the shard of each and its number there."""
        found = np.empty(len(shards))
        for place, (shard, number) in enumerate(zip(shards.tolist(), numbers.tolist(), strict=True)):
            recording, row = self.reader.shard(shard).place_of(number)
            found[place] = recording.moments[row]
        return found

    def _window(self, chunk: int, layout: UnitLayout, data: memoryview, row: int, number: int) -> Sample:
        if row in layout.damage:
            raise layout.damage[row]
        (url,) = self.urls_of(np.array([chunk]))
        key = layout.keys[row]
        sample: Sample = {"__key__": key, "__url__": url}
        for column, name in enumerate(layout.fields):
            start, size = int(layout.starts[row, column]), int(layout.sizes[row, column])
            if start >= 0:
                decoder = of_shard(self.decoder_of(name, number), url)
                value = data[start : start + size]
                given = value if getattr(decoder, "accepts_buffer", False) else bytes(value)
                sample[name] = decode_field(decoder, given, url=url, key=key, field=name)
        return self.items.assembled(sample)

    def speaking(self, classes: Mapping[str, tuple[str, ...]]) -> Self:
        """Return the same windows with the class numbers of carried fields translated."""
        made = copy.copy(self)
        made.recordings = self.recordings.speaking(classes)
        made._take_over()
        return made

    def words(self) -> str:
        """Describe the windows."""
        spec = self.spec
        rows = "a row for each frame" if spec.every == "frame" else f"a row every {spec.every:g} s"
        parts = [f"{self.num_readable:,} windows", f"{rows} of {spec.video[0].field}"]
        parts.append(f"{len(self._units.rows):,} units of {self.chunk_samples.mean():.0f} windows on average")
        return ", ".join(parts)

    # --- for the engine (streaming.run.engine.source.Source) ---

    @property
    @override
    def items(self) -> RowKind:
        return WindowRows()

    @property
    def late(self) -> tuple[LateField, ...]:
        """See ``ChunkSource``: units are not cut, so what follows from late fields does not matter."""
        return ()

    @property
    def num_ranges(self) -> int:
        """See ``ChunkSource``: one for each stream, and one for the tables."""
        return len(self.spec.video) + bool(self.spec.tables)

    @property
    def is_local(self) -> bool:
        """Whether all shards are files of this machine."""
        return self.recordings.is_local

    @property
    def urls(self) -> Sequence[str]:
        """URLs of the shards, as requested; they may contain secrets."""
        return self.recordings.urls

    @property
    def chunk_samples(self) -> Int64Array:
        """int64 [C], number of windows of each unit."""
        return self._units.rows

    @property
    def chunk_bytes(self) -> Int64Array:
        """int64 [C], memory of each unit: decoded frames and steps."""
        return self._units.sizes

    @property
    def reads(self) -> UnitReads:
        """The bytes that units read, for plans."""
        return UnitReads(
            num_bytes=self._units.read_bytes, num_requests=self._units.requests, once_bytes=self._once_bytes
        )

    @cached_property
    def byte_starts(self) -> Int64Array:
        """int64 [C], where each unit would begin if those of its shard lay end to end, decoded."""
        ends = sums(self._units.sizes)[:-1]
        return ends - ends[np.searchsorted(self._units.shards, self._units.shards)]

    def unit_bytes(self, chunk_ids: Int64Array) -> Int64Array:
        """See ``Source``: all of them."""
        return self.chunk_bytes[chunk_ids]

    def urls_of(self, chunk_ids: Int64Array) -> list[str]:
        """Return the URL of the shard of each unit, as shown in samples and messages."""
        urls: list[str] = self.recordings.shards.shown_urls[self._units.shards[chunk_ids]].tolist()
        return urls

    def chunk(self, chunk_id: int) -> FetchRange:
        """Return the rows of a unit, as a range of the decoded bytes of its shard."""
        units, start = self._units, int(self.byte_starts[chunk_id])
        size, shard = int(units.sizes[chunk_id]), int(units.shards[chunk_id])
        return FetchRange(
            url=self.urls[shard], byte_start=start, byte_end=start + size, first_sample=int(units.firsts[chunk_id]),
            num_samples=int(units.rows[chunk_id]), crc32c=None, shard_bytes=start + size, fields=self.fields,
        )  # fmt: skip

    def fetch_unit(self, wanted: FetchRange, out: memoryview) -> Fetched:
        """Read the groups of pictures that a unit needs, each checked, and decode them into ``out``.

        Raises:
            DataError: The tables of the recording are damaged.
            StorageError: The store failed.
        """
        rows = np.arange(wanted.first_sample, wanted.first_sample + wanted.num_samples)
        layout = self.reader.fill(self.recordings.shards.numbers[wanted.url], rows, out)
        return Fetched(checked=None if layout.damage else Checked.comparing(layout.num_bytes, ()), found=layout)

    def locate(self, chunk_id: int, inside: int) -> SampleLocation | None:
        """Return the location in its shard of the recording of a window."""
        shard = int(self._units.shards[chunk_id])
        with suppress(StorageError):
            number = self.reader.recording_of(shard, int(self._units.firsts[chunk_id]) + inside)
            table = self.recordings.samples_at(self.urls[shard])
            return None if table is None else table.lookup(number)
        return None

    def chunk_with(self, shard: int, number: int) -> int | None:
        """Return the unit of a window of a shard."""
        low, high = np.searchsorted(self._units.shards, [shard, shard + 1]).tolist()
        unit = low + int(np.searchsorted(self._units.firsts[low:high], number, side="right")) - 1
        return unit if unit >= low else None

    def counters(self) -> dict[str, float]:
        """Return the counters of storage and cache since the set was opened, and of decoded groups."""
        return self.recordings.counters()

    def in_flight(self) -> list[ActiveRequest]:
        """Return the storage requests in progress, oldest first."""
        return self.recordings.in_flight()


class UnitReads(NamedTuple):
    """Reads of units, whose memory is decoded.

    Attributes:
        num_bytes: int64 [C], bytes that each reads.
        num_requests: int64 [C], requests that this takes.
        once_bytes: All bytes that are read, each counted once.
    """

    num_bytes: Int64Array
    num_requests: Int64Array
    once_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowKeys:
    """The key of the recording of each window. Implements ``KeysOfShards``.

    Attributes:
        known: The keys of the recordings.
        reader: Lists the windows of a shard.
        units: The units of all shards.
    """

    known: KeysOfShards
    reader: WindowReader
    units: WindowUnits

    @property
    def home(self) -> object:
        """See ``KeysOfShards``."""
        return self.reader

    @property
    def filled(self) -> list[int]:
        """See ``KeysOfShards``."""
        found: list[int] = np.unique(self.units.shards).tolist()
        return found

    @property
    def num_threads(self) -> int:
        """See ``KeysOfShards``."""
        return self.known.num_threads

    def column(
        self, shard: int, only: tuple[int, int] | None = None, turns: AbstractContextManager[Any] | None = None
    ) -> Any:
        """See ``KeysOfShards``."""
        windows = self.reader.shard(shard)
        samples = np.array([one.sample for one in windows.recordings], np.int64)
        each = samples.repeat(np.diff(windows.starts))[slice(*(only or (None, None)))]
        return self.known.column(shard, None, turns).take(each)


def _check_recordings(recordings: SampleSource, spec: WindowSpec) -> None:
    """Check that a dataset can be cut into windows.

    Raises:
        ConfigError, IndexMissingError: It cannot.
    """
    if not recordings.indexed:
        raise IndexMissingError(f"Windows needs an index; {recordings.shards.missing_index}")
    if recordings.transform is not None:
        raise ConfigError(
            "Windows: transform= of the recordings would not be called, since windows are cut before; leave it out, "
            "and write Windows(…, transform=…), a function of one window"
        )
    wanted = (*(one.field for one in spec.video), *spec.tables)
    if unread := [name for name in wanted if recordings.fields is not None and name not in recordings.fields]:
        raise ConfigError(
            f"fields: Windows reads {unread[0]!r} of each recording, which is not among fields={recordings.fields}; "
            "leave fields out, since windows read nothing else"
        )
    whole = {field for _, field in spec.carry}
    cut = [name for name in wanted if name not in whole]
    if decoded := [name for name in cut if isinstance(recordings.decode, Mapping) and name in recordings.decode]:
        raise ConfigError(
            f"decode: Windows would not call the decoder of {decoded[0]!r}, since it decodes groups of pictures and "
            "steps itself; leave it out, and give size= to scale frames"
        )
