"""Which reader fits a source."""

from __future__ import annotations

import os

from shard_tools.convert import lines, parquet, tars
from shard_tools.convert.files import find_files, is_local
from shard_tools.convert.images import IMAGE_EXTENSIONS, ImageFolder
from shard_tools.convert.records import Source
from shard_tools.convert.rows import RowMapper
from streaming.catalog.urls import SHARD_SUFFIXES
from streaming.errors import ConfigError, NotFoundError
from streaming.storage import Storage
from streaming.storage.urls import local_path
from streaming.tar.samples import MAX_GZIP_RATIO

SOURCE_KINDS = ("auto", "images", "jsonl", "parquet", "csv", "text", "tars")
_SUFFIXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("jsonl", lines.SUFFIXES["jsonl"]),
    ("parquet", parquet.SUFFIXES),
    ("tars", SHARD_SUFFIXES),
    ("csv", lines.SUFFIXES["csv"]),
    ("images", tuple(f".{extension}" for extension in sorted(IMAGE_EXTENSIONS))),
    ("text", lines.SUFFIXES["text"]),
)


def detect_kind(spec: str, storage: Storage, exclude: str | None = None) -> str:
    """The layout of ``spec`` by the names of its files.

    Raises:
        ConfigError: If the names say nothing, or speak of several layouts.
        NotFoundError: If there is nothing.
    """
    kinds = {
        kind for file in find_files(spec, storage, exclude=exclude) if (kind := _kind_of_name(file.name)) is not None
    }
    if "images" in kinds:
        kinds -= {"text", "csv"}  # captions and lists beside images
    if len(kinds) == 1:
        return kinds.pop()
    found = f"files of several layouts ({', '.join(sorted(kinds))})" if kinds else "no file of a layout known here"
    raise ConfigError(f"{spec}: {found}; say which with --from {'|'.join(SOURCE_KINDS[1:])}")


def _kind_of_name(name: str) -> str | None:
    lowered = name.lower()
    return next((kind for kind, suffixes in _SUFFIXES if lowered.endswith(suffixes)), None)


def open_source(
    spec: str,
    storage: Storage,
    *,
    kind: str = "auto",
    fields: tuple[tuple[str, str], ...] = (),
    key_field: str | None = None,
    shuffle_seed: int | None = None,
    num_threads: int = 1,
    target: str | None = None,
    classes: str | None = None,
    max_gzip_ratio: float = MAX_GZIP_RATIO,
) -> Source:
    """The records of ``spec``.

    Args:
        spec: File, folder, pattern or URL.
        storage: The store that holds it.
        kind: One of ``SOURCE_KINDS``.
        fields: (column, extension) pairs, for tables.
        key_field: Where keys come from.
        shuffle_seed: Read in an order mixed by this seed.
        num_threads: Threads that read ahead.
        target: Where shards will be written: a folder of images may hold it.
        classes: Where the numbers of classes come from, for images.
        max_gzip_ratio: A ``.tar.gz`` that inflates to more than so many times its size is refused.

    Raises:
        ConfigError: If options do not fit the layout, or ``"auto"`` cannot tell it.
        NotFoundError: If there is nothing to read.
    """
    if is_local(spec) and not any(letter in spec for letter in "*?[{") and not os.path.exists(local_path(spec)):
        raise NotFoundError(f"{spec}: no such file or folder")
    kind = detect_kind(spec, storage, target) if kind == "auto" else kind
    if fields and kind in {"images", "tars"}:
        raise ConfigError(f"--field names columns of a table; a source of kind {kind!r} has none")
    if classes is not None and kind != "images":
        raise ConfigError(f"--classes numbers the folders of images; a source of kind {kind!r} has none")
    mapper = RowMapper(fields=fields, key_field=key_field)
    if kind == "images":
        return ImageFolder(
            spec,
            storage,
            shuffle_seed=shuffle_seed,
            key_field=key_field,
            num_threads=num_threads,
            exclude=target,
            classes=classes,
        )
    if kind in {"jsonl", "text"}:
        if kind == "text" and not fields:
            mapper = RowMapper(fields=(("text", "txt"),), key_field=key_field)
        return lines.LineFiles(kind, spec, storage, mapper=mapper, shuffle_seed=shuffle_seed, num_threads=num_threads)
    if kind == "tars":
        return tars.TarFiles(
            spec,
            storage,
            key_field=key_field,
            shuffle_seed=shuffle_seed,
            exclude=target,
            max_gzip_ratio=max_gzip_ratio,
        )
    opener = parquet.ParquetFiles if kind == "parquet" else lines.CsvFiles
    return opener(spec, storage, mapper=mapper, shuffle_seed=shuffle_seed, exclude=target)
