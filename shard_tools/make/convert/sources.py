"""Choose the reader for a source and open it. A new format is a module with a ``Source``, and a line in LAYOUTS."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from shard_tools.make.convert import lines, parquet, tars
from shard_tools.make.convert.base.annotated import IMAGE_EXTENSIONS
from shard_tools.make.convert.base.files import SourceFile, find_files, is_folder, is_local, places, walked
from shard_tools.make.convert.base.identity import SourceStorage
from shard_tools.make.convert.base.records import FolderWalks, Source, SourceOptions
from shard_tools.make.convert.base.zips import SUFFIX, ZipStorage, is_zip
from shard_tools.make.convert.formats import indexed, json_files, litdata, lmdb, mds, tfrecord
from shard_tools.make.convert.formats.coco import CocoFolder
from shard_tools.make.convert.formats.folder import FolderFiles
from shard_tools.make.convert.formats.hf import HfDataset
from shard_tools.make.convert.formats.voc import VocFolder
from shard_tools.make.convert.ids import megatron, streams
from shard_tools.make.convert.media.audio import AUDIO_EXTENSIONS, AudioFolder
from shard_tools.make.convert.media.images import ImageFolder
from shard_tools.make.convert.media.metadata import NAMES as METADATA_NAMES
from shard_tools.make.convert.media.metadata import STATS
from shard_tools.make.convert.robots.layout import INFO
from shard_tools.make.convert.robots.lerobot import LeRobotSet
from streaming.errors import ConfigError, NotFoundError, shell_word
from streaming.storage import Storage, local_path, redact
from streaming.types import SHARD_SUFFIXES


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rules for recognizing and reading data of one layout.

    Attributes:
        open: Makes the source; called with the user's source, the store and the options.
        suffixes: Endings of its file names, in lower case.
        names: Parts of its file names, in lower case, for files without a distinctive ending.
        fields: It has columns, which ``--field`` may store as separate fields.
        classes: It has classes, which ``--classes`` numbers.
        shuffles: It can be read in another order than front to back.
        shards: It may be an unfinished set of shards.
        several: It takes further places (``SourceOptions.more``).
        zips: It reads whole files, so a zip archive may replace a folder.
        images: Its fields may hold images, which can be re-encoded.
        parts: It may have splits; ``--source-split`` selects one.
        configs: It may have configurations; ``--source-config`` selects one.
        image_folder: Its images may be in another place (``--image-folder``).
        named: It may be given by a name that is not a path.
        apart: Files are independent, so known ones can be left out when a set is extended.
        numbers: Keys are numbers of records, unless a field is named.
        streams: A token separates its documents (``--document-token``).
        weak: Its files often lie beside those of other layouts, which are then meant.
    """

    open: Callable[[str, Storage, SourceOptions], Source]
    suffixes: tuple[str, ...] = ()
    names: re.Pattern[str] | None = None
    fields: bool = False
    classes: bool = False
    shuffles: bool = False
    shards: bool = False
    several: bool = False
    zips: bool = False
    images: bool = False
    parts: bool = False
    configs: bool = False
    image_folder: bool = False
    named: bool = False
    apart: bool = False
    numbers: bool = False
    streams: bool = False
    weak: bool = False

    def has(self, name: str) -> bool:
        """Return whether a file with this name, in lower case, belongs to this layout."""
        return name.endswith(self.suffixes) or (self.names is not None and self.names.search(name) is not None)


def _endings(extensions: frozenset[str]) -> tuple[str, ...]:
    return tuple(f".{extension}" for extension in sorted(extensions))


LAYOUTS: dict[str, Layout] = {
    "images": Layout(
        open=ImageFolder, suffixes=_endings(IMAGE_EXTENSIONS), classes=True, shuffles=True, several=True, zips=True,
        images=True, apart=True,
    ),
    "jsonl": Layout(
        open=partial(lines.LineFiles, "jsonl"), suffixes=lines.SUFFIXES["jsonl"], fields=True, shuffles=True,
        several=True, apart=True, numbers=True,
    ),
    "json": Layout(
        open=json_files.JsonFiles, suffixes=json_files.SUFFIXES, fields=True, several=True, weak=True, apart=True,
        numbers=True,
    ),
    "parquet": Layout(
        open=parquet.ParquetFiles, suffixes=parquet.SUFFIXES, fields=True, shuffles=True, several=True, images=True,
        apart=True, numbers=True,
    ),
    "csv": Layout(
        open=lines.CsvFiles, suffixes=lines.SUFFIXES["csv"], fields=True, several=True, apart=True, numbers=True,
    ),
    "text": Layout(
        open=partial(lines.LineFiles, "text"), suffixes=lines.SUFFIXES["text"], fields=True, shuffles=True,
        several=True, apart=True, numbers=True,
    ),
    "tars": Layout(open=tars.TarFiles, suffixes=SHARD_SUFFIXES, shards=True, several=True, images=True, apart=True),
    "mds": Layout(
        open=mds.MdsFiles, suffixes=mds.SUFFIXES, fields=True, shuffles=True, several=True, images=True,
        numbers=True,
    ),
    "litdata": Layout(
        open=litdata.LitDataFiles, names=litdata.NAMES, fields=True, shuffles=True, several=True, images=True,
        numbers=True,
    ),
    "tfrecord": Layout(
        open=tfrecord.TfRecords, names=tfrecord.NAMES, fields=True, shuffles=True, several=True, images=True,
        apart=True, numbers=True,
    ),
    "tfrecord-raw": Layout(
        open=partial(tfrecord.TfRecords, raw=True), fields=True, shuffles=True, several=True, images=True,
        apart=True, numbers=True,
    ),
    "lmdb": Layout(open=lmdb.LmdbFiles, suffixes=lmdb.SUFFIXES, fields=True, shuffles=True, several=True, images=True),
    "audio": Layout(
        open=AudioFolder, suffixes=_endings(AUDIO_EXTENSIONS), classes=True, shuffles=True, several=True, zips=True,
        apart=True,
    ),
    "files": Layout(open=FolderFiles, shuffles=True, several=True, zips=True, images=True, apart=True),
    "megatron": Layout(open=megatron.MegatronFiles, shuffles=True, several=True, numbers=True),
    "nanogpt": Layout(
        open=partial(streams.TokenStreams, "nanogpt"), suffixes=streams.SUFFIXES["nanogpt"], several=True, streams=True,
        weak=True, numbers=True,
    ),
    "npy": Layout(
        open=partial(streams.TokenStreams, "npy"), suffixes=streams.SUFFIXES["npy"], several=True, streams=True,
        weak=True, numbers=True,
    ),
    "coco": Layout(
        open=CocoFolder, classes=True, shuffles=True, zips=True, images=True, parts=True, image_folder=True
    ),
    "voc": Layout(open=VocFolder, classes=True, shuffles=True, zips=True, images=True, parts=True),
    "lerobot": Layout(open=LeRobotSet, shuffles=True),
    "hf": Layout(
        open=HfDataset, fields=True, shuffles=True, images=True, parts=True, configs=True, named=True, numbers=True,
    ),
}  # fmt: skip
SOURCE_KINDS = ("auto", *LAYOUTS)
# Layouts without distinctive endings are recognized by a file that other layouts do not have.
_MARKS = (
    ("lerobot", re.compile(re.escape(INFO))),
    ("hf", re.compile(r"dataset_dict\.json|state\.json")),
    ("coco", re.compile(r"(.*/)?annotations/(instances|captions|person_keypoints)_[^/]*\.json")),
    ("voc", re.compile(r"(.*/)?ImageSets/Main/[^/]*\.txt")),
)
_MARKED = (".json", ".txt")  # endings of these files' names
_BESIDE = frozenset({"text", "csv"})  # captions, transcripts and lists, beside images and sounds


def detect_kind(spec: str, storage: Storage, exclude: str | None = None, known: FolderWalks | None = None) -> str:
    """Detect the format of ``spec`` from the names of its files.

    Raises:
        ConfigError: The names are not recognized, or belong to several formats.
        NotFoundError: There is nothing.
    """
    files = _named_by(spec, storage, exclude, {} if known is None else known)
    names = [file.name for file in files]
    noted = [name for name in names if name.endswith(_MARKED)]
    marked = next((kind for kind, mark in _MARKS if any(map(mark.fullmatch, noted))), None)
    if marked is not None:
        return marked
    index = next((file for file in files if file.url.rpartition("/")[2] == indexed.INDEX), None)
    data = [file.name for file in files if file.url.rpartition("/")[2] != indexed.INDEX]
    kinds = {kind for name in data if (kind := kind_of_name(name)) is not None}
    _refuse_img2dataset(spec, names, kinds)
    if kinds & {"images", "audio"}:
        media = (name for name in data if name.rpartition("/")[2] not in METADATA_NAMES)
        kinds = {kind for name in media if (kind := kind_of_name(name)) is not None} - _BESIDE
        kinds -= {"parquet"} if any(map(STATS.fullmatch, names)) else set()
    strong = {kind for kind in kinds if not LAYOUTS[kind].weak}
    if not strong and megatron.has_pairs(dict.fromkeys(name.lower() for name in names)):
        return "megatron"
    if not strong and index is not None:
        strong = {kind for kind in [indexed.kind_of_index(indexed.read_index(index, storage))] if kind is not None}
    kinds = strong or kinds
    if len(kinds) == 1:
        return kinds.pop()
    found = f"files of several layouts ({', '.join(sorted(kinds))})" if kinds else "no file of a known layout"
    raise ConfigError(
        f"{redact(spec)}: {found}; say which with --from {'|'.join(LAYOUTS)}. --from files takes any folder: files "
        "whose names differ after the first dot alone are one sample"
    )


def _refuse_img2dataset(spec: str, names: Sequence[str], kinds: set[str]) -> None:
    """Say what to do with shards that img2dataset has written: they are read where they are.

    Raises:
        ConfigError: These are some.
    """
    if "tars" in kinds and any(map(STATS.fullmatch, names)):
        word = shell_word(redact(spec))
        raise ConfigError(
            f"{redact(spec)}: a folder of img2dataset, whose tars are shards already: `shard_tools index {word}` "
            "indexes them where they are, and training reads them. To pack them anew, say --from tars"
        )


def _named_by(spec: str, storage: Storage, exclude: str | None, known: FolderWalks) -> list[SourceFile]:
    if not is_folder(spec):
        return find_files(spec, storage, exclude=exclude)
    files = [file for file in walked(spec, exclude, known)[0] if "_shardstream/" not in file.name]
    if not files:
        raise NotFoundError(f"{spec}: nothing found; check the path, or name the layout with --from")
    return sorted(files, key=attrgetter("name"))


def kind_of_name(name: str) -> str | None:
    """Return the layout of a file by its name, or None."""
    lowered = name.lower()
    return next((kind for kind, layout in LAYOUTS.items() if layout.has(lowered)), None)


def open_source(
    spec: str | Sequence[str], storage: Storage, *, kind: str = "auto", options: SourceOptions | None = None
) -> Source:
    """Open the records of ``spec``.

    Args:
        spec: File, folder, pattern or URL; or several of one layout, whose records follow each other.
        storage: The store that holds it.
        kind: One of ``SOURCE_KINDS``.
        options: How to read it.

    Raises:
        ConfigError: Options do not fit the layout, or ``"auto"`` cannot detect it.
        NotFoundError: There is nothing to read.
    """
    options = options or SourceOptions()
    specs = places([spec] if isinstance(spec, str) else spec, storage, (SUFFIX,))
    if not specs:
        raise ConfigError("no source: name at least one file, folder or pattern")
    layout = LAYOUTS.get(kind)
    for one in specs if layout is None or not layout.named else ():
        if is_local(one) and not any(letter in one for letter in "*?[{") and not os.path.exists(local_path(one)):
            raise NotFoundError(f"{one}: no such file or folder")
    zipped = [one for one in specs if is_zip(one)]
    watched = SourceStorage.of(storage)
    if zipped:
        watched = opened = ZipStorage.over(storage, options.max_gzip_ratio)
        specs = [opened.root(one) if is_zip(one) else one for one in specs]
    if kind == "auto":
        kind = _one_kind(specs, watched, options)
        layout, options = LAYOUTS[kind], replace(options, guessed=True)
    if layout is None:
        raise ConfigError(f"--from {kind!r}: expected one of {', '.join(('auto', *LAYOUTS))}")
    if zipped and not layout.zips:
        taken = ", ".join(name for name, one in LAYOUTS.items() if one.zips)
        raise ConfigError(f"{redact(zipped[0])}: an archive is read as {taken}, not as {kind!r}; unpack it")
    _refuse_unfit(kind, layout, replace(options, more=tuple(specs[1:])))
    watched.known = options.known if layout.apart else None
    reader = layout.open(specs[0], watched, replace(options, more=tuple(specs[1:])))
    watched.expect(reader.origins().inputs)
    return reader


def _one_kind(specs: Sequence[str], storage: Storage, options: SourceOptions) -> str:
    kinds = {detect_kind(one, storage, options.exclude, options.walks): one for one in reversed(specs)}
    if len(kinds) > 1:
        told = ", ".join(f"{redact(one)} is of kind {kind!r}" for kind, one in reversed(kinds.items()))
        raise ConfigError(f"several sources have to be of one layout: {told}; convert them apart, or say --from")
    return kinds.popitem()[0]


def _refuse_unfit(kind: str, layout: Layout, options: SourceOptions) -> None:
    """Refuse options that have no effect for a layout.

    Raises:
        ConfigError: There is one.
    """
    has = f"a source of kind {kind!r} has none"
    wrong = {
        f"--field names columns of a table; {has}": options.fields and not layout.fields,
        f"--allow-unfinished is for sets of shards; a source of kind {kind!r} is none": (
            options.allow_unfinished and not layout.shards
        ),
        f"--classes numbers the folders of images and the like; {has}": (
            options.classes is not None and not layout.classes
        ),
        f"--shuffle: a source of kind {kind!r} can only be read front to back; leave --shuffle out (the loader "
        "shuffles while reading), or bring the source into JSONL or Parquet first": (
            options.shuffle_seed is not None and not layout.shuffles
        ),
        f"a source of kind {kind!r} is a single one, got {1 + len(options.more)}; convert them apart, with one target "
        "each": bool(options.more) and not layout.several,
        f"--source-split takes one split of several; {has}": options.part is not None and not layout.parts,
        f"--source-config takes one configuration of several; {has}": (
            options.config is not None and not layout.configs
        ),
        f"--document-token parts streams of ids; {has}": options.document_token is not None and not layout.streams,
        f"--image-folder says where the images of annotations are; {has}": (
            options.images is not None and not layout.image_folder
        ),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ConfigError(what)
