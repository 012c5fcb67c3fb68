"""Index the videos of shards: the places of packets, the times of frames, groups of pictures and their checksums."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

import click
import numpy as np
from crc32c import crc32c

from shard_tools.change.columns.lift import places_in
from shard_tools.change.sets.open_set import READ_THREADS, needed_samples, open_set
from shard_tools.change.sets.reindex import scanning_on
from shard_tools.running.engine import DEFAULT_WORKERS, Calls
from shard_tools.running.printing import rate, show_findings
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Finding, Report, plain
from streaming.build.decode.groups.demux import FoundPackets, find_packets
from streaming.build.decode.video import ffmpeg
from streaming.common.arguments import counted, format_bytes, some_names
from streaming.common.platforms import num_cores
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError, IndexMissingError
from streaming.shards.catalog.build import place_in_index
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.layout import checked_name, video_path
from streaming.shards.video.groups import group_starts
from streaming.shards.video.read import read_video_table
from streaming.shards.video.table import DamagedStream, VideoStream, VideoTable
from streaming.storage import Storage, join_url, redact
from streaming.types import ReadBuffer

VIDEO_SUFFIXES = ("mp4", "m4v", "mov", "mkv", "webm")
"""How names of fields end that hold videos, unless fields are named."""
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoReport(Report):
    """The videos that were indexed.

    Attributes:
        fields: The fields.
        num_shards: Shards of the set.
        num_read: Shards that this run read; the others were indexed.
        num_read_bytes: Bytes of these.
        num_streams: Streams of all shards.
        num_frames: Their frames.
        num_groups: Their groups of pictures.
        num_damaged: Members that are not indexed.
        first_damaged: The first of them, each with its shard and the reason.
        findings: Shards that cannot be read, and so are not indexed.
        seconds: Wall time.
    """

    fields: tuple[str, ...]
    num_shards: int
    num_read: int
    num_read_bytes: int
    num_streams: int
    num_frames: int
    num_groups: int
    num_damaged: int
    first_damaged: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """One shard: everything that a call needs, in any process.

    Attributes:
        url: The shard.
        index_url: Location of its index, if not beside it.
        rows: Its rows of the chunk table.
        storage: The store.
    """

    url: str
    index_url: str | None
    rows: ChunkTable
    storage: Storage

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.rows.shards[0].size_bytes

    def there(self, name: str) -> VideoTable | None:
        """Return the index of a field, if it is there and right."""
        home, _ = place_in_index(self.url, self.index_url)
        with contextlib.suppress(IndexMissingError, DataError):
            return read_video_table(self.storage, home, self.rows, name)
        return None

    def put(self, table: VideoTable) -> None:
        """Write the index of a field."""
        home, shard = place_in_index(self.url, self.index_url)
        self.storage.put(join_url(home, video_path(table.field, shard)), table.to_parquet())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """What the tables of a shard hold; or why there are none."""

    num_streams: int = 0
    num_frames: int = 0
    num_groups: int = 0
    damaged: tuple[str, ...] = ()
    num_damaged: int = 0
    num_read_bytes: int = 0
    finding: Finding | None = field(default=None)

    @classmethod
    def of(cls, shard: _Shard, table: VideoTable) -> _Counts:
        """Return what one table holds."""
        return cls(
            num_streams=len(table.streams), num_frames=sum(one.num_frames for one in table.streams),
            num_groups=sum(int(one.is_key.sum()) for one in table.streams), num_damaged=len(table.damaged),
            damaged=tuple(
                f"{redact(shard.url)}: sample {one.key!r}, field {table.field!r}: {one.reason}"
                for one in table.damaged[:_SHOWN]
            ),
        )  # fmt: skip

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(
            num_streams=self.num_streams + other.num_streams, num_frames=self.num_frames + other.num_frames,
            num_groups=self.num_groups + other.num_groups, damaged=(*self.damaged, *other.damaged)[:_SHOWN],
            num_damaged=self.num_damaged + other.num_damaged,
            num_read_bytes=self.num_read_bytes + other.num_read_bytes, finding=self.finding or other.finding,
        )  # fmt: skip


def index_video(
    urls: Sequence[str], fields: Sequence[str] = (), *, storage: Storage, index_url: str | None = None,
    workers: int = DEFAULT_WORKERS["local"], force: bool = False, allow_unfinished: bool = False,
    executor: Executor | None = None, progress: Progress | None = None,
) -> VideoReport:  # fmt: skip
    """Index the videos of shards that have an index. Existing indexes are kept; only other shards are read.

    A member that is no video, or damaged, is recorded with the reason, and the others are indexed. Every byte is
    compared with the shard's checksums.

    Args:
        urls: Shards, as for ``StreamingDataset``.
        fields: The fields; default: all whose names end like those of videos.
        storage: The store.
        index_url: Location of the index, if not beside the shards.
        workers: Shards read in parallel.
        force: Index all shards again.
        allow_unfinished: Accept an unfinished set.
        executor: Executor on which to read them, such as a cluster, instead of this machine.
        progress: Receives bytes and shards.

    Raises:
        ConfigError: No sample has such a field, or PyAV is not installed.
        IndexMissingError: The shards have no index.
    """
    started = time.monotonic()
    ffmpeg()  # whose absence is no damage of a video
    progress = progress or NoProgress()
    opened = open_set(urls, storage, index_url, allow_unfinished=allow_unfinished)
    if opened.scanned is not None:
        raise IndexMissingError(
            f"{redact(opened.urls[0])}: an index of videos is stored beside the index, but there is none; run "
            "`shard_tools index` first"
        )
    shards = [
        _Shard(url=url, index_url=index_url, rows=opened.chunks.of_shard(number), storage=storage)
        for number, url in enumerate(opened.urls)
    ]  # fmt: skip
    names = _fields(shards, fields)
    known = [None] * len(shards) if force else [*map_threads(partial(_known, names), shards, READ_THREADS)]
    left = [shard for shard, one in zip(shards, known, strict=True) if one is None]
    num_bytes = sum(shard.size_bytes for shard in left)
    progress.start(total_bytes=num_bytes, total=len(left))
    shared = [(storage, shard.url) for shard in left[:1]]
    with scanning_on(executor, min(workers or num_cores(), max(1, len(left))), num_bytes) as scanning:
        calls = Calls(workers=workers, executor=scanning, progress=progress)
        made = list(calls.map(partial(_indexed, names), left, shared=shared))
    total = sum([*filter(None, known), *made], _Counts())
    return VideoReport(
        fields=names, num_shards=len(shards), num_read=len(left), num_read_bytes=total.num_read_bytes,
        num_streams=total.num_streams, num_frames=total.num_frames, num_groups=total.num_groups,
        num_damaged=total.num_damaged, first_damaged=total.damaged,
        findings=tuple(one.finding for one in made if one.finding is not None), seconds=time.monotonic() - started,
    )  # fmt: skip


def _fields(shards: Sequence[_Shard], asked: Sequence[str]) -> tuple[str, ...]:
    """Return the fields to index, of all shards.

    Raises:
        ConfigError: There are none, or no sample has one of those asked for.
    """
    tables = map_threads(
        lambda shard: set(needed_samples(shard.storage, shard.url, shard.index_url).fields), shards, READ_THREADS
    )
    there = {name for fields in tables for name in fields}
    missing = sorted({*asked} - there)
    found = [*dict.fromkeys(asked)] or sorted(name for name in there if _ends_like_video(name))
    if missing or not found:
        what = f"no sample has a field {missing[0]!r}" if missing else f"no field ends with {', '.join(VIDEO_SUFFIXES)}"
        raise ConfigError(f"--video: {what}; there are: {some_names(sorted(there))}")
    return tuple(checked_name(name, "field") for name in found)


def _ends_like_video(name: str) -> bool:
    return name.lower().rpartition(".")[2] in VIDEO_SUFFIXES


def _known(names: Sequence[str], shard: _Shard) -> _Counts | None:
    """Return what the index of a shard holds; None: it lacks a field."""
    tables = [shard.there(name) for name in names]
    there = [_Counts.of(shard, table) for table in tables if table is not None]
    return sum(there, _Counts()) if len(there) == len(names) else None


def _indexed(names: Sequence[str], shard: _Shard, progress: Progress) -> _Counts:
    """Index a shard. One that cannot be read is a finding."""
    try:
        tables = _tables(names, shard)
    except DataError as error:
        what = str(error).removeprefix(f"{redact(shard.url)}: ")
        cure = "restore the shard, and run the same command again"
        return _Counts(finding=Finding(kind="data", shard=shard.url, what=what, cure=cure))
    for table in tables:
        shard.put(table)
    progress.advance(num_bytes=shard.size_bytes, num=1)
    made = sum((_Counts.of(shard, table) for table in tables), _Counts())
    return replace(made, num_read_bytes=shard.size_bytes)


def _tables(names: Sequence[str], shard: _Shard) -> list[VideoTable]:
    """Read a shard, and return its tables.

    Raises:
        DataError: The shard is damaged.
    """
    samples = needed_samples(shard.storage, shard.url, shard.index_url)
    there = tuple(name for name in names if name in samples.fields)
    streams: dict[str, list[VideoStream]] = {name: [] for name in names}
    damaged: dict[str, list[DamagedStream]] = {name: [] for name in names}
    for row, (key, data, places) in enumerate(places_in(shard.storage, shard.url, samples, there) if there else ()):
        for name, (start, stop) in places.items():
            try:
                found = find_packets(data, start, stop)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  border to FFmpeg: the member is damaged, and the reason kept
                damaged[name].append(DamagedStream(row, key, str(error) or type(error).__name__))
            else:
                at = int(samples.fields[name][0][row])
                with memoryview(data)[start:stop] as view:
                    streams[name].append(stream_of(row, name, found, view, at))
    info, fingerprint = shard.rows.shards[0], shard.rows.fingerprint
    return [
        VideoTable(
            field=name, shard=info, fingerprint=fingerprint, streams=tuple(streams[name]), damaged=tuple(damaged[name])
        )
        for name in names
    ]  # fmt: skip


def stream_of(row: int, name: str, found: FoundPackets, data: ReadBuffer, at: int) -> VideoStream:
    """Return the stream of a member that begins at byte ``at`` of its shard, with the checksums of its groups."""
    is_key = group_starts(found.pts, found.is_shown, found.can_start)
    stream = VideoStream(
        sample=row, field=name, format=found.format, time_base=found.time_base.as_integer_ratio(),
        first_pts=found.first_pts, last_ticks=found.last_ticks, rate=found.rate.as_integer_ratio(), pts=found.pts,
        byte_start=found.byte_start + at, num_bytes=found.num_bytes, is_key=is_key, is_shown=found.is_shown,
        crc32c=np.zeros(len(found.pts), np.int64),
    )  # fmt: skip
    view, sums = memoryview(data), np.zeros(len(found.pts), np.int64)
    sums[stream.groups.first_packet] = [crc32c(view[one.byte_start - at : one.byte_end - at]) for one in stream.groups]
    return replace(stream, crc32c=sums)


def show_video(report: VideoReport) -> None:
    """Print how many videos were indexed, and which were not."""
    show_findings(report.findings)
    if report.num_damaged:
        click.echo(
            f"not indexed: {counted(report.num_damaged, 'video')}, whose frames are bad samples: "
            f"{plain('; '.join(report.first_damaged))}", err=True,
        )  # fmt: skip
    click.echo(
        f"videos {plain(', '.join(report.fields))}: {counted(report.num_streams, 'stream')}, "
        f"{counted(report.num_frames, 'frame')}, {counted(report.num_groups, 'group')} of pictures in "
        f"{counted(report.num_shards, 'shard')}; read {format_bytes(report.num_read_bytes)} in {report.seconds:.1f} s "
        f"({rate(report.num_read_bytes, report.seconds)})"
    )
