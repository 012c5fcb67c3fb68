"""Read windows: groups of pictures, each checked and decoded, and the tables of recordings: ``WindowReader``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from streaming.build.decode import RawFields, together
from streaming.build.decode.groups.decode import decode_group
from streaming.common.job.shared_results import Peers, shared
from streaming.common.lru_cache import LruCache
from streaming.errors import ChecksumError, ConfigError, DataError, DecodeError, IndexMissingError
from streaming.sets.windows.recording import CutRecording
from streaming.sets.windows.rescue import Summed, intact
from streaming.sets.windows.shard import ShardWindows, WindowFacts, windows_of
from streaming.sets.windows.spec import ColumnEntry, WindowSpec
from streaming.sets.windows.tables import StepShape, StepTable, check_count, check_step, table_of
from streaming.sets.windows.unit import GroupFrames, carried_of, fill_rows
from streaming.shards.catalog.build import place_in_index
from streaming.shards.catalog.open import digest_of
from streaming.shards.catalog.source import REMOTE_GAP_BYTES, ChunkSource
from streaming.shards.fetch import read as fetching
from streaming.shards.fetch.checksums import sums_of
from streaming.shards.fetch.layout import UnitLayout
from streaming.shards.fetch.read import FetchRange
from streaming.shards.video.read import read_video_index
from streaming.shards.video.table import VideoIndex, VideoStream
from streaming.storage import redact
from streaming.types import Int64Array

Sizes: TypeAlias = "Mapping[str, Int64Array | None]"
"""Bytes of some fields of each sample of a shard, int64 [n], -1: it lacks the field; None: that is not known."""
_KEPT_BYTES = 128 << 20
"""Bytes of the windows of shards that are kept: the packets of about 20 hours of one stream at 30 frames a second."""
_TABLES_BYTES = 32 << 20
"""Bytes of tables that are kept, for units of one recording that are read one after another."""
_LACKING = np.empty(0, np.int64)
_TRIED = 32
"""Recordings that are read, at most, to see what the steps of tables are; the first that is intact says it."""
_RUN_BYTES = 8 << 20
"""Groups of pictures that touch are read by one request of at most this size."""


class WindowReader:
    """Read the windows of a dataset. Thread-safe, and picklable.

    Args:
        recordings: The dataset.
        spec: What a window is.
        peers: The ranks of the job, if there are several.

    Attributes:
        shapes: What the steps of each table are.
    """

    def __init__(self, recordings: ChunkSource, spec: WindowSpec, peers: Peers | None) -> None:
        self._recordings, self._spec = recordings, spec
        self._tables = recordings.kept_whole()
        self._tables.fields, self._tables.decoders = spec.tables, RawFields()
        self._tables.late = tuple(one for one in recordings.late if one.name in spec.tables)
        self._shards = LruCache[int, ShardWindows](_KEPT_BYTES, attrgetter("num_bytes"))
        self._recent = LruCache[tuple[int, int], tuple[tuple[StepTable, ...], Mapping[str, bytes]]](
            _TABLES_BYTES, _size_of
        )
        self.shapes, self._heads = self._first_shapes(peers)

    # --- what there is ---

    def shard(self, shard: int) -> ShardWindows:
        """Return the windows of a shard, from the index of its videos.

        Raises:
            IndexMissingError, IndexMismatchError, IndexFormatError: Its videos are not indexed.
        """
        return self._shards.of(shard, lambda: self._windows_of(shard))

    def recording_of(self, shard: int, row: int) -> int:
        """Return the number in its shard of the recording of a window."""
        return self.shard(shard).place_of(row)[0].sample

    def _windows_of(self, shard: int) -> ShardWindows:
        sizes = self._sizes_of(shard)
        return windows_of(
            self._spec,
            WindowFacts(
                shard=shard, samples=self._samples_of(shard), index=self._index_of(shard), shapes=self.shapes,
                carried_bytes=partial(_sum_of, sizes, tuple(field for _, field in self._spec.carry)),
                table_bytes=partial(self._read_bytes, shard, sizes), lacking=partial(self._lacking, sizes),
                num_steps=partial(self._num_steps, sizes), key=partial(self.key_of, shard),
            ),
        )  # fmt: skip

    def _index_of(self, shard: int) -> VideoIndex:
        recordings, shards = self._recordings, self._recordings.shards
        home, _ = place_in_index(shards.urls[shard], shards.index)
        fields = dict.fromkeys(one.field for one in self._spec.video)
        return read_video_index(recordings.storage, home, shards.chunks.of_shard(shard), fields)

    def _samples_of(self, shard: int) -> Int64Array:
        """Return the numbers in a shard of the recordings that the dataset delivers."""
        low, high = self._recordings.table.rows_of(shard)
        return self._recordings.selection.samples(low, high) if low < high else np.empty(0, np.int64)

    def _sizes_of(self, shard: int) -> Sizes:
        """Return the bytes of the fields of tables in a shard."""
        return {name: self._tables.stored_sizes(shard, name) for name in self._spec.tables}

    def _lacking(self, sizes: Sizes, sample: int) -> str:
        """Return the first field of tables that a recording lacks; "": none."""
        of_tables = (name for entry in self._spec.columns for name in entry.fields)
        return next((name for name in of_tables if _size_in(sizes, name, sample) == -1), "")

    def _num_steps(self, sizes: Sizes, sample: int) -> list[int | None]:
        """Return the number of steps of each table of a recording, by its size; None: a size does not say it."""
        found = list[int | None]()
        for entry, shape, head in zip(self._spec.columns, self.shapes, self._heads, strict=True):
            size = None if head is None else _size_in(sizes, entry.field, sample)
            count, rest = (0, 1) if size is None or head is None else divmod(size - head, max(1, shape.num_bytes))
            found.append(None if rest or count < 0 else count)
        return found

    def _read_bytes(self, shard: int, sizes: Sizes, sample: int) -> int:
        """Return about how many bytes reading the tables of a recording takes, the same wherever the set lies."""
        table = self._recordings.samples_at(self._recordings.urls[shard])
        found = _sum_of(sizes, self._spec.tables, sample)
        if table is None:
            return found
        whole = int(table.record_starts[sample + 1] - table.record_starts[sample])
        return whole if whole < REMOTE_GAP_BYTES else found

    def _first_shapes(self, peers: Peers | None) -> tuple[tuple[StepShape, ...], tuple[int | None, ...]]:
        """Return what the steps of tables are, and the bytes of each table before them; None: they are not one array.

        The first recording that can be read says it; with peers, rank 0 reads it.

        Raises:
            ConfigError: No recording has the tables.
        """
        if not self._spec.columns:
            return (), ()
        name = digest_of([self._recordings.fingerprint, self._spec.plain])

        def look() -> bytes:
            return json.dumps([
                [one.dtype.str, one.shape, one.rate, head] for one, head in self._first_tables()
            ]).encode()  # fmt: skip

        found = json.loads(shared(peers, f"window-tables/{name}", look))
        shapes = (
            StepShape(dtype=np.dtype(dtype), shape=tuple(shape), rate=rate) for dtype, shape, rate, _ in found
        )  # fmt: skip
        return tuple(shapes), tuple(head for *_, head in found)

    def _first_tables(self) -> list[tuple[StepShape, int | None]]:
        failure: DataError | None = None
        first = (
            (shard, sample, sizes)
            for shard in range(len(self._recordings.urls))
            for sizes in (self._sizes_of(shard),)
            for sample in self._samples_of(shard).tolist()
            if not self._lacking(sizes, sample)
        )
        for shard, sample, sizes in islice(first, _TRIED):
            try:
                tables, _ = self._read_tables(shard, sample, check=False)
            except DataError as error:
                failure = failure or error
                continue
            heads = (_head_of(*one, sizes, sample) for one in zip(self._spec.columns, tables, strict=True))
            return [(one.shape, head) for one, head in zip(tables, heads, strict=True)]
        why = failure or "each lacks one of them"
        raise ConfigError(f"Windows: columns: none of the first recordings can be read: {why}") from failure

    # --- reading ---

    def rows(self, shard: int, rows: Int64Array) -> tuple[UnitLayout, memoryview]:
        """Return windows of one unit of a shard: their places, and the memory in which they are.

        Raises:
            DataError: Tables of the recording are damaged.
        """
        windows = self.shard(shard)
        unit = int(np.searchsorted(windows.units.firsts, rows[0], side="right")) - 1
        memory = memoryview(bytearray(int(windows.units.sizes[unit])))
        return self.fill(shard, rows, memory), memory

    def fill(self, shard: int, rows: Int64Array, out: memoryview) -> UnitLayout:
        """Read windows of one unit of a shard into ``out``, and return their places.

        Raises:
            DataError: Tables of the recording are damaged.
            StorageError: The store failed.
        """
        recording, first = self.shard(shard).place_of(int(rows[0]))
        key, where = self.key_of(shard, recording.sample), self.where_of(shard, recording.sample)
        tables, carried = self._tables_of(shard, recording.sample)
        return fill_rows(
            self._spec, recording, rows - rows[0] + first, out, key=key, tables=tables, carried=carried,
            read=partial(self._groups, shard, recording, where), where=where,
        )  # fmt: skip

    def key_of(self, shard: int, sample: int) -> str:
        """Return the key of a recording.

        Raises:
            IndexMissingError: The sample table of its shard is gone.
        """
        table = self._recordings.samples_at(self._recordings.urls[shard])
        if table is None:
            raise IndexMissingError(
                f"{redact(self._recordings.urls[shard])}: its sample table is gone; `shard_tools index` makes it again"
            )
        return str(table.keys[sample])

    def where_of(self, shard: int, sample: int) -> str:
        """Return the recording as messages name it."""
        return f"{redact(self._recordings.urls[shard])}: sample {self.key_of(shard, sample)!r}"

    # --- tables ---

    def fields_bytes(self, shard: int, sample: int) -> int:
        """Return the size of the fields of a recording that are read beside its streams."""
        return _sum_of(self._sizes_of(shard), self._spec.tables, sample)

    def _tables_of(self, shard: int, sample: int) -> tuple[tuple[StepTable, ...], Mapping[str, bytes]]:
        if not self._spec.tables:
            return (), {}
        return self._recent.of((shard, sample), lambda: self._read_tables(shard, sample))

    def _read_tables(
        self, shard: int, sample: int, *, check: bool = True
    ) -> tuple[tuple[StepTable, ...], Mapping[str, bytes]]:
        where = self.where_of(shard, sample)
        data = self.fields_of(shard, sample)
        tables = tuple(table_of(entry, data, where) for entry in self._spec.columns)
        if check:
            drops = self._spec.edge == "drop"
            planned = self._num_steps(self._sizes_of(shard), sample) if drops else [None] * len(tables)
            for entry, found, expected, count in zip(self._spec.columns, tables, self.shapes, planned, strict=True):
                check_step(entry, found, expected, where)
                check_count(entry, found, count, where)
        return tables, carried_of(self._spec, data)

    def fields_of(self, shard: int, sample: int) -> dict[str, bytes]:
        """Return the bytes of the fields of a recording that are read beside its streams, checked.

        They take up to ``fields_bytes``.

        Raises:
            DataError: They are damaged.
        """
        try:
            return self._read_fields(shard, sample)
        except ChecksumError:
            found = self._beside_damage(shard, sample)
            if found is None:
                raise
            return found

    def _beside_damage(self, shard: int, sample: int) -> dict[str, bytes] | None:
        """Return the same fields if only groups of pictures beside them are damaged; None: that is not known."""
        recordings, names = self._recordings, self._spec.tables
        table = recordings.samples_at(recordings.urls[shard])
        if table is None or self._tables.late:
            return None
        low, high, _ = table.widened(sample, sample + 1)
        index = self._index_of(shard)
        groups = [
            Summed(group.byte_start, group.byte_end, group.crc32c)
            for name in index.fields for number, stream in index.streams(name).items() if low <= number < high
            for group in stream.groups
        ]  # fmt: skip
        read = partial(recordings.storage.read, recordings.urls[shard])
        there = intact(sums_of(table, low, high, names), lambda start, stop: bytes(read(start, stop)), groups)
        if there is None:
            return None
        found: dict[str, bytes] = {}
        for name in names:
            starts, sizes = table.fields.get(name, (_LACKING, _LACKING))
            if starts is _LACKING or starts[sample] < 0:
                continue
            start, stop = int(starts[sample]), int(starts[sample] + sizes[sample])
            first = max(one for one in there if one <= start)
            found[name] = bytes(there[first][start - first : stop - first])
        return found

    def _read_fields(self, shard: int, sample: int) -> dict[str, bytes]:
        """Return the bytes of these fields, as the dataset reads them."""
        source = self._tables
        chunk = source.chunk_with(shard, sample)
        assert chunk is not None, "a recording has a chunk"  # noqa: S101
        inside = sample - int(source.table.first_sample[chunk])
        wanted = source.slice(chunk, inside, inside + 1)
        (size,) = source.range_bytes([wanted])
        memory = memoryview(bytearray(int(size)))
        layout = source.fetch_unit(wanted, memory).apart(memory)
        row = wanted.lead
        if row in layout.damage:
            raise layout.damage[row]
        found: dict[str, bytes] = {}
        for name, start, length in zip(
            layout.fields, layout.starts[row].tolist(), layout.sizes[row].tolist(), strict=True
        ):
            if name in self._spec.tables and start >= 0:
                found[name] = bytes(memory[start : start + length])
        return found

    # --- groups of pictures ---

    def group(self, shard: int, stream: VideoStream, group: int) -> memoryview:
        """Return the bytes of one group of pictures, compared with its checksum.

        Raises:
            ChecksumError: They are damaged.
            StorageError: The store failed.
        """
        found = self._read_run(shard, stream, [group])[group]
        if isinstance(found, DataError):
            raise found
        return found

    def _groups(
        self, shard: int, recording: CutRecording, where: str, number: int, groups: Int64Array, frames: Int64Array
    ) -> Sequence[GroupFrames]:
        """Return frames of groups of a stream; see ``ReadGroups``."""
        stream = recording.streams[number]
        runs = _touching(stream, groups.tolist())
        jobs = [partial(self._read_run, shard, stream, run) for run in runs]
        if self._recordings.is_local:
            found = {group: one for job in jobs for group, one in job().items()}
        else:
            found = {group: one for outcome in together(jobs) for group, one in outcome.get().items()}
        of_frame = stream.groups_of(frames)
        return [self._decoded(stream, group, found[group], frames[of_frame == group], number, where)
                for group in groups.tolist()]  # fmt: skip

    def _decoded(
        self, stream: VideoStream, group: int, data: memoryview | DataError, frames: Int64Array, entry: int, where: str
    ) -> GroupFrames:  # fmt: skip
        what = f"{where}: {words_of(stream, group)}"
        if isinstance(data, DataError):
            return GroupFrames(frames, type(data)(f"{what}: {data}"))
        try:
            pixels = decode_group(stream, group, data, size=self._spec.sizes[entry], frames=frames.tolist())
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  FFmpeg's errors have many types
            return GroupFrames(frames, DecodeError(f"{what} does not decode: {error}"))
        return GroupFrames(frames, pixels)

    def _read_run(self, shard: int, stream: VideoStream, run: Sequence[int]) -> dict[int, memoryview | DataError]:
        """Return the bytes of groups that touch, by one request; or one by one, if some of them are damaged."""
        groups = stream.groups[run[0] : run[-1] + 1]
        start = groups[0].byte_start
        memory = memoryview(bytearray(groups[-1].byte_end - start))
        try:
            self._read(shard, stream.sample, start, memory, tuple((one.byte_end - start, one.crc32c) for one in groups))
        except ChecksumError as error:
            if len(run) == 1:
                return {run[0]: error}
            return {group: one for number in run for group, one in self._read_run(shard, stream, [number]).items()}
        return {
            number: memory[one.byte_start - start : one.byte_end - start]
            for number, one in zip(run, groups, strict=True)
        }

    def _read(self, shard: int, sample: int, start: int, out: memoryview, spans: tuple[tuple[int, int], ...]) -> None:
        recordings = self._recordings
        chunk = recordings.chunk_with(shard, sample)
        assert chunk is not None, "a recording has a chunk"  # noqa: S101
        whole = recordings.run(chunk, chunk + 1)
        wanted = FetchRange(
            url=whole.url, byte_start=start, byte_end=start + len(out), first_sample=sample, num_samples=1,
            crc32c=spans[0][1] if len(spans) == 1 else None, spans=spans if len(spans) > 1 else (),
            shard_bytes=recordings.table.shards[shard].size_bytes,
            version=whole.version,
        )  # fmt: skip
        known = fetching.ShardFacts(samples=_no_table, gap_bytes=0, apart=_nothing)
        fetching.fetch_unit(recordings.storage, wanted, out, recordings.cache, known)


def _size_in(sizes: Sizes, name: str, sample: int) -> int | None:
    """Return the bytes of a field of a recording: -1 if it lacks it, None if that is not known."""
    found = sizes[name]
    return None if found is None else int(found[sample])


def _sum_of(sizes: Sizes, fields: Sequence[str], sample: int) -> int:
    """Return the bytes of some fields of a recording, as far as it has them."""
    return sum(max(0, _size_in(sizes, name, sample) or 0) for name in fields)


def _head_of(entry: ColumnEntry, table: StepTable, sizes: Sizes, sample: int) -> int | None:
    """Return the bytes of a table before its steps; None: it is not one array."""
    size = None if entry.column or entry.is_sound else _size_in(sizes, entry.field, sample)
    return None if size is None else size - table.steps.nbytes


def _no_table() -> None:
    return None


def _nothing(wanted: FetchRange) -> UnitLayout:  # noqa: ARG001  as ``Apart`` has it
    nothing = np.empty((0, 0), np.int64)
    return UnitLayout(keys=(), fields=(), starts=nothing, sizes=nothing, num_bytes=0)


def _touching(stream: VideoStream, groups: Sequence[int]) -> list[list[int]]:
    """Return runs of groups whose bytes follow each other without overlap or gap, of bounded size."""
    starts, ends = stream.groups.byte_start, stream.groups.byte_end
    runs: list[list[int]] = []
    for group in groups:
        last = runs[-1] if runs else None
        if (
            last is not None and last[-1] + 1 == group and ends[last[-1]] == starts[group]
            and ends[group] - starts[last[0]] <= _RUN_BYTES
        ):  # fmt: skip
            last.append(group)
        else:
            runs.append([group])
    return runs


def words_of(stream: VideoStream, group: int) -> str:
    """Return a group of pictures as messages name it."""
    one = stream.groups[group]
    seconds = f"seconds {stream.times[one.first_frame]:.3f} to {stream.times[one.stop_frame - 1]:.3f}"
    return f"field {stream.field!r}, group {group} of pictures ({seconds})"


def _size_of(found: tuple[tuple[StepTable, ...], Mapping[str, bytes]]) -> int:
    tables, carried = found
    return sum(one.steps.nbytes for one in tables) + sum(map(len, carried.values())) + 1024
