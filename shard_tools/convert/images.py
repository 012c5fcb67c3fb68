"""Read a folder of images whose sub-folders are classes."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from shard_tools.convert.base.files import SourceFile, find_files, identity_of, is_local, walk_folder
from shard_tools.convert.base.records import (
    NUMBER_KEYS,
    Record,
    Skipped,
    SourceOptions,
    number_key,
    permutation,
)
from shard_tools.convert.journal import CLASSES
from shard_tools.running.engine import map_ordered
from shard_tools.write.filetypes import ONE_FIELD, plain_extension
from shard_tools.write.keys import WRONG_NAMES, wrong_names
from streaming.decode.images import stored_size
from streaming.errors import AccessDeniedError, ConfigError, DuplicateKeyError, NotFoundError, first_of
from streaming.index.files import read_note, write_document
from streaming.storage import Storage, join_url, local_path, redact, split_url

_TURNED = (
    "the image is turned or mirrored by its EXIF orientation: decoders here apply it (columns width and height, too); "
    "other programs may not"
)
_NO_SIZE = "no width and height: the image is damaged, or of a kind that is not decoded here"
_TRAINING = ("train", "training")
_HELD_OUT = frozenset({"val", "valid", "validation", "test", "testing", "dev", "eval"})
_log = logging.getLogger(__name__)
IMAGE_EXTENSIONS = frozenset(
    {
        *("jpg", "jpeg", "jpe", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"),
        *("avif", "heic", "heif", "jp2", "jxl"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    file: SourceFile
    key: str
    extension: str
    class_name: str | None


class ImageFolder:
    """Images under a folder or prefix, sorted by name.

    The first folder of a path is the class. Classes are numbered (field ``cls``) by :func:`numbered_classes`: as in the
    training set beside it, otherwise in the order of their sorted names. The key is the path without its extension,
    with dots in the file's name replaced by ``_``. Bytes are stored unchanged, all in one field: the most frequent
    extension, in lower case; with a ``json`` field that holds class and path.

    Images of several classes are shuffled, unless ``keep_order`` is set: in the order of their names, a shard would
    hold one class or two, and a batch no more than a few.

    ``cls`` and ``class``, and ``width`` and ``height`` of the upright image, become columns. A remark counts images
    without a size, and those that their EXIF orientation turns.

    Raises:
        NotFoundError: There is no image.
        DuplicateKeyError: Two files would have the same key.
    """

    kind = "images"

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        key_field = options.key_field
        if key_field not in {None, "path", NUMBER_KEYS}:
            raise ConfigError(f"--key: images take their keys from 'path' or 'number', not from {key_field!r}")
        self._storage, self._num_threads = storage, options.num_threads
        files, skipped = _list_folder(spec, storage, options.exclude)
        images: list[_Image] = []
        for file in files:
            image = _classify(file)
            if isinstance(image, Skipped):
                skipped.append(image)
            else:
                images.append(image)
        if not images:
            raise NotFoundError(f"{redact(spec)}: no images there ({_summary(skipped)}); check the path, or use --from")
        images.sort(key=lambda image: (image.key, image.file.name))
        self.skipped = tuple(sorted(skipped, key=lambda entry: entry.path))
        names = sorted({image.class_name for image in images if image.class_name is not None})
        self.class_names = names
        self.classes, self.classes_from = numbered_classes(names, options.classes, spec, options.exclude, storage)
        self.shuffle_seed = options.shuffle_seed
        if self.shuffle_seed is None and len(names) > 1 and not options.keep_order:
            self.shuffle_seed = 0
        if self.shuffle_seed is not None:
            images = [images[i] for i in permutation(len(images), self.shuffle_seed)]
        self.columns = ("cls", "class", "width", "height") if names else ("width", "height")
        if key_field == NUMBER_KEYS:
            images = [replace(image, key=number_key(number)) for number, image in enumerate(images)]
        else:
            _refuse_collisions(images)
            wrong = list(wrong_names((image.key, ()) for image in images))
            if wrong:
                raise first_of(wrong, f"{WRONG_NAMES}; --key number makes others")
        self._images, self._field = images, _field_of(images)

    @property
    def num_records(self) -> int:
        """Number of images."""
        return len(self._images)

    @property
    def num_bytes(self) -> int:
        """Bytes of all images."""
        return sum(image.file.size_bytes for image in self._images)

    @property
    def fields(self) -> Mapping[str, bool]:
        """The images, ``json``, and ``cls`` where there are classes."""
        classes = {image.class_name is not None for image in self._images}
        return {self._field: True, "json": True, **({"cls": classes == {True}} if True in classes else {})}

    def identity(self) -> dict[str, object]:
        """Return a digest of names and sizes, in order."""
        return identity_of(self.kind, [f"{one.key}\0{one.file.name}\0{one.file.size_bytes}" for one in self._images])

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the images from number ``start`` on, read by several threads."""
        return map_ordered(self._read, self._images[start:], self._num_threads)

    def _read(self, image: _Image) -> Record:
        metadata: dict[str, object] = {"class": image.class_name, "path": image.file.name}
        fields = {
            self._field: bytes(self._storage.read(image.file.url)),
            "json": json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode(),
        }
        if image.class_name is not None:
            number = self.classes[image.class_name]
            fields["cls"] = str(number).encode()
            metadata["cls"] = number
        remark = ""
        try:
            metadata["height"], metadata["width"], orientation = stored_size(fields[self._field])
            remark = _TURNED if orientation > 1 else ""
        except Exception:  # noqa: BLE001  of a library: a damaged image is stored as it is, for readers to pass over
            remark = _NO_SIZE
        where, remarks = redact(image.file.url), (remark,) if remark else ()
        return Record(key=image.key, fields=fields, metadata=metadata, where=where, remarks=remarks)


def numbered_classes(
    names: Sequence[str], given: str | None, source: str, target: str | None, storage: Storage
) -> tuple[dict[str, int], str]:
    """Return the number of each class, and where the numbers come from; "" if from this folder alone.

    Args:
        names: Classes of the folder, sorted.
        given: Names separated by commas; or a file (JSON, or one name per line), a folder of classes, or a converted
            set.
        source: The folder. A folder ``train`` beside it determines the numbers if it has all these classes.
        target: Where the shards will be. A set converted to ``train`` beside it takes precedence over such a folder.
        storage: The store.

    Raises:
        ConfigError: The given classes cannot be read, or lack one of the folder's.
        NotFoundError: There is nothing at ``given``.
    """
    if given is not None:
        listed = _listed(given, storage)
        unknown = sorted({*names} - {*listed})
        if unknown:
            raise ConfigError(
                f"--classes {redact(given)}: it lacks the class {unknown[0]!r} of {redact(source)}; it has "
                f"{len(listed)}: {', '.join(listed[:5])}, …; give a list that holds all"
            )
        return {name: number for number, name in enumerate(listed)}, given
    for place in _beside(source, target) if names else ():
        with suppress(NotFoundError, AccessDeniedError):
            listed = _listed(place, storage)
            if {*names} <= {*listed}:
                if [*listed] != [*names]:
                    _log.warning("classes are numbered as in %s, which lies beside %s", place, source)
                return {name: number for number, name in enumerate(listed)}, place
            _log.warning(
                "%s has class %r, which %s beside it lacks: classes are numbered by this folder alone. Give --classes "
                "to number both alike",
                source,
                min({*names} - {*listed}),
                place,
            )
            return {name: number for number, name in enumerate(names)}, ""
    if names and _last(source).lower() in _HELD_OUT:
        _log.warning(
            "%s: classes are numbered by this folder alone; if it lacks one, the numbers are not those of the training "
            "set. Give --classes with the training set, its folder, or a list of names",
            source,
        )
    return {name: number for number, name in enumerate(names)}, ""


def _last(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]


def _beside(source: str, target: str | None) -> list[str]:
    """Return where the classes of the training set may be: converted beside the target, or in a local folder."""
    places = []
    for folder in (target, source if is_local(source) else None):
        if folder is not None and _last(folder).lower() not in _TRAINING:
            parent = split_url(os.path.abspath(local_path(folder)) if is_local(folder) else folder.rstrip("/"))[0]
            places += [join_url(parent, name) for name in _TRAINING]
    return places


def _listed(place: str, storage: Storage) -> list[str]:
    """Read the names of classes at ``place``, in the order of their numbers; see :func:`numbered_classes`."""
    if "," in place and "://" not in place:
        listed: Any = [name.strip() for name in place.split(",")]
    elif is_local(place) and os.path.isdir(local_path(place)) and not os.path.exists(f"{local_path(place)}/{CLASSES}"):
        with os.scandir(local_path(place)) as entries:
            listed = sorted(
                entry.name
                for entry in entries
                if entry.is_dir() and entry.name[0] != "." and entry.name != "_shardstream"
            )
        if not listed:
            raise NotFoundError(f"{redact(place)}: no folders of classes there")
    else:
        is_file = _last(place).endswith((".json", ".txt"))
        url = place if is_file else join_url(place, CLASSES)
        data = bytes(storage.read(url))
        listed = read_note(data, redact(url)) if url.endswith(CLASSES) else _parsed(data.decode())
        if isinstance(listed, dict):
            listed = listed.get("classes", listed)
        if isinstance(listed, dict):  # names to numbers
            listed = [name for name, _ in sorted(listed.items(), key=lambda item: item[1])]
    names = [name.strip() for name in listed if isinstance(name, str) and name.strip()]
    if not names or len({*names}) < len(names):
        raise ConfigError(f"--classes {redact(place)}: expected different names of classes there; write one a line")
    return names


def _parsed(text: str) -> Any:
    return json.loads(text) if text.lstrip()[:1] in {"[", "{"} else text.split("\n")


def save_classes(directory: str, classes: Mapping[str, int], storage: Storage) -> None:
    """Write the classes of a set beside its index, for other sets that use the same numbers."""
    content = {"format": "shardstream-classes", "version": 1, "classes": sorted(classes, key=classes.__getitem__)}
    storage.put(join_url(directory, CLASSES), write_document(content))


def _list_folder(spec: str, storage: Storage, exclude: str | None) -> tuple[list[SourceFile], list[Skipped]]:
    if is_local(spec):
        return walk_folder(local_path(spec), exclude)
    return find_files(spec if spec.endswith("/") else spec + "/", storage, exclude=exclude), []


def _classify(file: SourceFile) -> _Image | Skipped:
    folder, _, name = file.name.rpartition("/")
    stem, dot, extension = name.rpartition(".")
    if not dot or not stem or name.startswith("._") or extension.lower() not in IMAGE_EXTENSIONS:
        return Skipped(path=file.name, reason="not an image")
    if any(part.startswith(".") for part in file.name.split("/")):  # .ipynb_checkpoints would be a class
        return Skipped(path=file.name, reason="hidden: a name that starts with a dot")
    if file.size_bytes == 0:
        return Skipped(path=file.name, reason="empty file")
    key = (folder + "/" if folder else "") + stem.replace(".", "_")
    class_name = file.name.partition("/")[0] if folder else None
    return _Image(file=file, key=key, extension=extension.lower(), class_name=class_name)


def _field_of(images: list[_Image]) -> str:
    """Return the field of all images, so that every sample has it: the extension of most of them."""
    spelled = Counter(image.extension for image in images)
    counts = Counter(plain_extension(extension) for extension in spelled.elements())
    most = min(counts, key=lambda extension: (-counts[extension], extension))
    field = next(iter(spelled)) if len(spelled) == 1 else most
    if len(spelled) > 1:
        told = ", ".join(f"{count:,} {extension}" for extension, count in spelled.most_common())
        _log.warning("images of several kinds (%s): %s", told, ONE_FIELD % field)
    return field


def _refuse_collisions(images: list[_Image]) -> None:
    """Refuse keys that differ only by case: some readers and some file systems ignore case."""
    seen: dict[str, _Image] = {}
    twice = [(seen.setdefault(image.key.casefold(), image), image) for image in images]
    errors = [
        DuplicateKeyError(
            f"{other.file.name} and {image.file.name} would both get the key {image.key!r}; rename one of them, or "
            "number the keys with --key number"
        )
        for other, image in twice
        if other is not image
    ]
    if errors:
        raise first_of(errors, "files have the key of another")


def _summary(skipped: list[Skipped]) -> str:
    return f"{len(skipped)} other files, first: {skipped[0].path}: {skipped[0].reason}" if skipped else "it is empty"
