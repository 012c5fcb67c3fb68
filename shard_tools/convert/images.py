"""A folder of images: sub-folders are classes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator
from dataclasses import dataclass, replace

from shard_tools.convert.files import SourceFile, find_files, is_local, walk_folder
from shard_tools.convert.records import (
    NUMBER_KEYS,
    Record,
    Skipped,
    map_ordered,
    number_key,
    permutation,
)
from shard_tools.write.keys import check_key
from streaming.errors import ConfigError, DuplicateKeyError, NotFoundError
from streaming.storage import Storage
from streaming.storage.urls import local_path

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

    The first folder of a path is the class; classes are numbered in the order of their sorted names (field ``cls``).
    The key is the path without its extension, dots in the file's name replaced by ``_``. Bytes are stored as they
    are, under the lower-cased extension, with a ``json`` field that holds class and path.

    Raises:
        NotFoundError: If there is no image.
        DuplicateKeyError: If two files would get one key.
    """

    kind = "images"

    def __init__(
        self,
        spec: str,
        storage: Storage,
        *,
        shuffle_seed: int | None = None,
        key_field: str | None = None,
        num_threads: int = 1,
        exclude: str | None = None,
    ) -> None:
        if key_field not in {None, "path", NUMBER_KEYS}:
            raise ConfigError(f"--key: images take their keys from 'path' or 'number', not from {key_field!r}")
        self._storage, self._num_threads, self._seed = storage, num_threads, shuffle_seed
        files, skipped = _list_folder(spec, storage, exclude)
        images: list[_Image] = []
        for file in files:
            image = _classify(file)
            if isinstance(image, Skipped):
                skipped.append(image)
            else:
                images.append(image)
        if not images:
            raise NotFoundError(f"{spec}: no images there ({_summary(skipped)}); check the path, or use --from")
        images.sort(key=lambda image: (image.key, image.file.name))
        self.skipped = tuple(sorted(skipped, key=lambda entry: entry.path))
        names = sorted({image.class_name for image in images if image.class_name is not None})
        self.classes = {name: number for number, name in enumerate(names)}
        if shuffle_seed is not None:
            images = [images[i] for i in permutation(len(images), shuffle_seed)]
        if key_field == NUMBER_KEYS:
            images = [replace(image, key=number_key(number)) for number, image in enumerate(images)]
        else:
            _refuse_collisions(images)
            for image in images:
                check_key(image.key)
        self._images = images

    @property
    def num_records(self) -> int:
        """Number of images."""
        return len(self._images)

    @property
    def num_bytes(self) -> int:
        """Bytes of all images."""
        return sum(image.file.size_bytes for image in self._images)

    def identity(self) -> dict[str, object]:
        """A digest of names and sizes, in order."""
        digest = hashlib.sha256()
        for image in self._images:
            digest.update(f"{image.key}\0{image.file.name}\0{image.file.size_bytes}\n".encode())
        return {"kind": self.kind, "num_files": len(self._images), "sha256_of_names": digest.hexdigest()}

    def records(self, start: int) -> Generator[Record, None, None]:
        """Images from number ``start`` on, read by several threads."""
        return map_ordered(self._read, self._images[start:], self._num_threads)

    def _read(self, image: _Image) -> Record:
        metadata: dict[str, object] = {"class": image.class_name, "path": image.file.name}
        fields = {
            image.extension: bytes(self._storage.read(image.file.url)),
            "json": json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode(),
        }
        if image.class_name is not None:
            number = self.classes[image.class_name]
            fields["cls"] = str(number).encode()
            metadata["cls"] = number
        return Record(key=image.key, fields=fields, metadata=metadata)


def _list_folder(spec: str, storage: Storage, exclude: str | None) -> tuple[list[SourceFile], list[Skipped]]:
    if is_local(spec):
        return walk_folder(local_path(spec), exclude)
    return find_files(spec if spec.endswith("/") else spec + "/", storage, exclude=exclude), []


def _classify(file: SourceFile) -> _Image | Skipped:
    folder, _, name = file.name.rpartition("/")
    stem, dot, extension = name.rpartition(".")
    if not dot or not stem or name.startswith("._") or extension.lower() not in IMAGE_EXTENSIONS:
        return Skipped(path=file.name, reason="not an image")
    if file.size_bytes == 0:
        return Skipped(path=file.name, reason="empty file")
    key = (folder + "/" if folder else "") + stem.replace(".", "_")
    class_name = file.name.partition("/")[0] if folder else None
    return _Image(file=file, key=key, extension=extension.lower(), class_name=class_name)


def _refuse_collisions(images: list[_Image]) -> None:
    """Keys must differ by more than case: some readers fold it, and some file systems too."""
    seen: dict[str, _Image] = {}
    for image in images:
        other = seen.setdefault(image.key.casefold(), image)
        if other is not image:
            raise DuplicateKeyError(
                f"{other.file.name} and {image.file.name} would both get the key {image.key!r}; "
                "rename one of them, or give numbers as keys with --key number"
            )


def _summary(skipped: list[Skipped]) -> str:
    return f"{len(skipped)} other files, first: {skipped[0].path}: {skipped[0].reason}" if skipped else "it is empty"
