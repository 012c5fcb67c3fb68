"""Read the index of the videos of a shard, and groups of pictures: ``read_video_index``."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from crc32c import crc32c

from streaming.errors import (
    ChecksumError,
    IndexMismatchError,
    IndexMissingError,
    NotFoundError,
    StorageError,
    shell_place,
)
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import video_directory, video_path
from streaming.shards.video.table import VideoIndex, VideoStream, VideoTable
from streaming.storage import Storage, join_url, redact
from streaming.types import ReadBuffer


def read_video_index(
    storage: Storage, home: str, rows: ChunkTable, fields: Collection[str], *, folder: str | None = None
) -> VideoIndex:
    """Return where the packets of video fields of one shard are.

    Args:
        storage: The store of the index.
        home: The directory of the index.
        rows: The chunk table of this shard alone.
        fields: The fields.
        folder: The directory of the shards, if it is another one, for messages.

    Raises:
        IndexMissingError: A field of this shard was not indexed; the message names the command.
        IndexMismatchError: The index is of another content of the shard.
        IndexFormatError: The index is damaged.
    """
    return VideoIndex({name: read_video_table(storage, home, rows, name, folder=folder) for name in fields})


def read_video_table(
    storage: Storage, home: str, rows: ChunkTable, field: str, *, folder: str | None = None
) -> VideoTable:
    """Return where the packets of one field of one shard are; see :func:`read_video_index`."""
    shard, again = rows.shards[0].name, video_command(home, folder)
    url = join_url(home, video_path(field, shard))
    try:
        found = storage.read_parsed(url, VideoTable.from_parquet, is_sealed)
    except NotFoundError as error:
        raise IndexMissingError(
            f"field {field!r}: the videos of shard {redact(join_url(folder or home, shard))} are not indexed; run "
            f"{again}, which reads only shards that lack this"
        ) from error
    if (found.field, found.fingerprint) != (field, rows.fingerprint):
        raise IndexMismatchError(
            f"{redact(url)}: this index of videos is of another content of the shard, or of another field; run {again}"
        )
    return found


class VideoFile(NamedTuple):
    """The index of the videos in one field of one shard.

    Attributes:
        field: The field.
        shard: The name of the shard.
        url: The file.
    """

    field: str
    shard: str
    url: str


def list_videos(storage: Storage, home: str) -> list[VideoFile]:
    """Return all indexes of videos beside the index in a directory; none where the store cannot list."""
    below = join_url(home, video_directory(), "")
    try:
        urls = [info.url for info in storage.list(join_url(home, video_directory()))]
    except StorageError:
        return []
    places = [(url.removeprefix(below).partition("/"), url) for url in urls if url.startswith(below)]
    return [
        VideoFile(field, shard.removesuffix(".parquet"), url) for (field, _, shard), url in places
        if shard.endswith(".parquet")
    ]  # fmt: skip


def video_command(home: str, folder: str | None = None) -> str:
    """Return the command that indexes the videos of the shards in a folder, whose index is in ``home``."""
    if folder is None or folder.rstrip("/") == home.rstrip("/"):
        return f"`shard_tools index {shell_place(home)} --video`"
    return f"`shard_tools index {shell_place(folder)} --index {shell_place(home)} --video`"


def read_group(storage: Storage, url: str, stream: VideoStream, group_number: int, *, key: str) -> ReadBuffer:
    """Return the bytes of a group of pictures, by one request, checked.

    Args:
        storage: The store of the shard.
        url: The shard.
        stream: The stream.
        group_number: The group.
        key: The sample's key, for messages.

    Raises:
        ChecksumError: They are damaged.
    """
    group = stream.groups[group_number]
    data = storage.read(url, group.byte_start, group.byte_end)
    check_group(stream, group_number, data, url=url, key=key)
    return data


def check_group(stream: VideoStream, group_number: int, data: ReadBuffer, *, url: str, key: str) -> None:
    """Compare the bytes of a group of pictures with its checksum.

    Args:
        stream: The stream.
        group_number: The group.
        data: The bytes from its ``byte_start`` to its ``byte_end``.
        url: The shard.
        key: The sample's key.

    Raises:
        ChecksumError: They are others.
    """
    group = stream.groups[group_number]
    found = crc32c(data)
    if len(data) == group.byte_end - group.byte_start and found == group.crc32c:
        return
    moments = stream.times[group.first_frame : group.stop_frame]
    seconds = f"seconds {moments[0]:.3f} to {moments[-1]:.3f}" if len(moments) else "no frames"
    raise ChecksumError(
        f"{redact(url)}: sample {key!r}, field {stream.field!r}, group {group_number} ({seconds}): bytes "
        f"{group.byte_start} to {group.byte_end} are damaged: CRC32C {found:08x} of {len(data)} bytes, expected "
        f"{group.crc32c:08x}. Restore the shard, or find all damage with `shard_tools verify`"
    )
