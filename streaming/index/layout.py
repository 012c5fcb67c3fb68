"""Where the files of an index lie, relative to the index's directory (``docs/format.md``)."""

from __future__ import annotations

INDEX_DIRECTORY = "_shardstream"
CHUNKS_FILE = f"{INDEX_DIRECTORY}/chunks.parquet"
_SAMPLES_DIRECTORY = f"{INDEX_DIRECTORY}/samples"


def chunks_path() -> str:
    """Path of the chunk table of a directory of shards."""
    return CHUNKS_FILE


def samples_path(shard_name: str) -> str:
    """Path of the sample table of one shard.

    ``shard_name`` is relative to the directory of shards; one such as ``part-0/000.tar`` keeps its folders, so that
    no two shards share a file.
    """
    return f"{_SAMPLES_DIRECTORY}/{shard_name}.parquet"


def shard_of_samples_path(path: str) -> str | None:
    """The inverse of :func:`samples_path`; None for any other path."""
    prefix, suffix = _SAMPLES_DIRECTORY + "/", ".parquet"
    if not path.startswith(prefix) or not path.endswith(suffix):
        return None
    return path[len(prefix) : -len(suffix)] or None
