"""Read the index of the videos of a shard: ``read_video_index``."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from streaming.errors import (
    IndexMismatchError,
    IndexMissingError,
    NotFoundError,
    StorageError,
    shell_place,
)
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import video_directory, video_path
from streaming.shards.video.table import VideoIndex, VideoTable
from streaming.storage import Storage, join_url, redact


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
