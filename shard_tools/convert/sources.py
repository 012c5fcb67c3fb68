"""Choose the reader for a source and open it. A new format is a module with a ``Source``, and its line in LAYOUTS."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shard_tools.convert import lines, parquet, tars
from shard_tools.convert.base.files import find_files, is_local
from shard_tools.convert.base.records import Source, SourceOptions
from shard_tools.convert.formats import indexed, litdata, lmdb, mds, tfrecord
from shard_tools.convert.images import IMAGE_EXTENSIONS, ImageFolder
from streaming.errors import ConfigError, NotFoundError
from streaming.storage import Storage, local_path, redact
from streaming.types import SHARD_SUFFIXES


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How data of one layout is recognized and read.

    Attributes:
        open: Makes the source; called with what the user named, the store and the options.
        suffixes: How names of its files end, in lower case.
        names: What is found in names of its files, in lower case, where the end does not tell.
        fields: It has columns, which ``--field`` may store as fields of their own.
        classes: It has classes, which ``--classes`` numbers.
        shuffles: It can be read in another order than front to back.
        shards: It may be a set of shards that is not whole.
    """

    open: Callable[[str, Storage, SourceOptions], Source]
    suffixes: tuple[str, ...] = ()
    names: re.Pattern[str] | None = None
    fields: bool = False
    classes: bool = False
    shuffles: bool = False
    shards: bool = False

    def has(self, name: str) -> bool:
        """Tell whether a file with this name, in lower case, is one of this layout."""
        return name.endswith(self.suffixes) or (self.names is not None and self.names.search(name) is not None)


LAYOUTS: dict[str, Layout] = {
    "images": Layout(
        open=ImageFolder,
        suffixes=tuple(f".{extension}" for extension in sorted(IMAGE_EXTENSIONS)),
        classes=True,
        shuffles=True,
    ),
    "jsonl": Layout(
        open=partial(lines.LineFiles, "jsonl"), suffixes=lines.SUFFIXES["jsonl"], fields=True, shuffles=True
    ),
    "parquet": Layout(open=parquet.ParquetFiles, suffixes=parquet.SUFFIXES, fields=True, shuffles=True),
    "csv": Layout(open=lines.CsvFiles, suffixes=lines.SUFFIXES["csv"], fields=True),
    "text": Layout(open=partial(lines.LineFiles, "text"), suffixes=lines.SUFFIXES["text"], fields=True, shuffles=True),
    "mds": Layout(open=mds.MdsFiles, suffixes=mds.SUFFIXES, fields=True, shuffles=True),
    "litdata": Layout(open=litdata.LitDataFiles, names=litdata.NAMES, fields=True, shuffles=True),
    "tfrecord": Layout(open=tfrecord.TfRecords, names=tfrecord.NAMES, fields=True, shuffles=True),
    "tfrecord-raw": Layout(open=partial(tfrecord.TfRecords, raw=True), fields=True, shuffles=True),
    "lmdb": Layout(open=lmdb.LmdbFiles, suffixes=lmdb.SUFFIXES, fields=True, shuffles=True),
    "tars": Layout(open=tars.TarFiles, suffixes=SHARD_SUFFIXES, shards=True),
}
SOURCE_KINDS = ("auto", *LAYOUTS)


def detect_kind(spec: str, storage: Storage, exclude: str | None = None) -> str:
    """Detect the format of ``spec`` from the names of its files.

    Raises:
        ConfigError: The names are not recognized, or belong to several formats.
        NotFoundError: There is nothing.
    """
    files = find_files(spec, storage, exclude=exclude)
    kinds = {kind for file in files if (kind := kind_of_name(file.name)) is not None}
    index = next((file for file in files if file.url.rpartition("/")[2] == indexed.INDEX), None)
    if not kinds and index is not None:
        kinds = {kind for kind in [indexed.kind_of_index(indexed.read_index(index, storage))] if kind is not None}
    if "images" in kinds:
        kinds -= {"text", "csv"}  # captions and lists beside images
    if len(kinds) == 1:
        return kinds.pop()
    found = f"files of several layouts ({', '.join(sorted(kinds))})" if kinds else "no file of a known layout"
    raise ConfigError(f"{redact(spec)}: {found}; say which with --from {'|'.join(LAYOUTS)}")


def kind_of_name(name: str) -> str | None:
    """Return the layout that a file's name tells, or None."""
    lowered = name.lower()
    return next((kind for kind, layout in LAYOUTS.items() if layout.has(lowered)), None)


def open_source(spec: str, storage: Storage, *, kind: str = "auto", options: SourceOptions | None = None) -> Source:
    """Open the records of ``spec``.

    Args:
        spec: File, folder, pattern or URL.
        storage: The store that holds it.
        kind: One of ``SOURCE_KINDS``.
        options: How to read it.

    Raises:
        ConfigError: If options do not fit the layout, or ``"auto"`` cannot tell it.
        NotFoundError: If there is nothing to read.
    """
    options = options or SourceOptions()
    if is_local(spec) and not any(letter in spec for letter in "*?[{") and not os.path.exists(local_path(spec)):
        raise NotFoundError(f"{spec}: no such file or folder")
    kind = detect_kind(spec, storage, options.exclude) if kind == "auto" else kind
    layout = LAYOUTS.get(kind)
    if layout is None:
        raise ConfigError(f"--from {kind!r}: expected one of {', '.join(('auto', *LAYOUTS))}")
    if options.fields and not layout.fields:
        raise ConfigError(f"--field names columns of a table; a source of kind {kind!r} has none")
    if options.allow_unfinished and not layout.shards:
        raise ConfigError(f"--allow-unfinished is for sets of shards; a source of kind {kind!r} is none")
    if options.classes is not None and not layout.classes:
        raise ConfigError(f"--classes numbers the folders of images; a source of kind {kind!r} has none")
    if options.shuffle_seed is not None and not layout.shuffles:
        raise ConfigError(
            f"--shuffle: a source of kind {kind!r} can only be read front to back; leave --shuffle out (the loader "
            "shuffles while reading), or bring the source into JSONL or Parquet first"
        )
    return layout.open(spec, storage, options)
