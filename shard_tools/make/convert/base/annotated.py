"""Read annotated images: the shared part of layouts with boxes, captions and masks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from shard_tools.make.convert.base.class_folders import KeyedFile, field_of, keyed
from shard_tools.make.convert.base.files import SourceFile, identity_of, read_file
from shard_tools.make.convert.base.identity import EVERYWHERE, Origins, origins_of
from shard_tools.make.convert.base.records import Record, Skipped, SourceOptions, numbered, permutation
from shard_tools.make.convert.base.rows import json_of
from shard_tools.make.write.filetypes import ONE_FIELD
from shard_tools.running.engine import map_sized
from streaming.build.decode.images import stored_size
from streaming.errors import ConfigError, NotFoundError
from streaming.shards.schema.value import WITHIN, Schema, class_schema
from streaming.storage import Storage, redact

IMAGE_EXTENSIONS = frozenset(
    {
        *("jpg", "jpeg", "jpe", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"),
        *("avif", "heic", "heif", "jp2", "j2k", "j2c", "jpx", "jxl"),
    }
)
TURNED = (
    "the image is turned or mirrored by its EXIF orientation: decoders here apply it (columns width and height, too); "
    "other programs may not"
)
LABELS = f"json{WITHIN}objects.label"
"""Path of the class numbers in the field."""
NO_SIZE = "no width and height: the image is damaged, or of a kind that is not decoded here"
_OTHER_SIZE = "the annotations say another width and height than the image has: boxes may not fit"
_log = logging.getLogger(__name__)


def look_at_image(data: bytes) -> tuple[dict[str, object], str]:
    """Return width and height of the upright image, and a remark if it is turned or ``""``.

    Raises:
        Exception: It is damaged, or of an unknown kind; an exception of Pillow or our own.
    """
    height, width, orientation = stored_size(data)
    return {"height": height, "width": width}, TURNED if orientation > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedFile(KeyedFile):
    """An image, what is noted about it, and the files of further fields, such as masks."""

    @classmethod
    def of(
        cls, file: SourceFile, name: str, note: Mapping[str, object], beside: Mapping[str, SourceFile] | None = None
    ) -> AnnotatedFile:
        """Make one, whose key is its name without the extension."""
        folder, slash, last = name.rpartition("/")
        stem, _, extension = last.rpartition(".")
        key = folder + slash + (stem or last).replace(".", "_")
        return cls(file=file, key=key, extension=extension.lower(), note=note, beside=beside or {})


class AnnotatedImages:
    """Images with a ``json`` field of their annotations; ``width``, ``height`` and ``objects`` become columns.

    Width and height are those of the upright image. Annotations are stored unchanged, and so are damaged images, with a
    remark.

    Args:
        kind: The value of ``--from``.
        images: The images, in their order.
        skipped: Entries that are left out.
        storage: The store.
        options: The options of the source.
        annotations: The files of annotations.

    Raises:
        NotFoundError: There is no image.
        DuplicateKeyError: Two images would have the same key.
    """

    columns = ("width", "height", "objects")
    classes: Mapping[str, int]

    def __init__(
        self,
        kind: str,
        images: Sequence[AnnotatedFile],
        skipped: Sequence[Skipped],
        storage: Storage,
        options: SourceOptions,
        annotations: Sequence[SourceFile],
    ) -> None:
        self.kind, self._annotations = kind, annotations
        self._storage, self._num_threads = storage, options.num_threads
        if not images:
            told = f"; of what it names, the first is {skipped[0].path}: {skipped[0].reason}" if skipped else ""
            raise NotFoundError(f"a source of kind {kind!r} without any image{told}; check --source-split and the path")
        self.skipped = tuple(sorted(skipped, key=lambda entry: entry.path))
        ordered = sorted(images, key=lambda one: (one.key, one.file.name))
        if options.shuffle_seed is not None:
            ordered = [ordered[i] for i in permutation(len(ordered), options.shuffle_seed)]
        self._images = keyed(ordered, options.key_field, lambda one: one.beside)
        self._field = field_of(self._images, "images", ONE_FIELD)
        self._always = {name for name in {*self._beside} if all(name in one.beside for one in self._images)}

    @property
    def meaning(self) -> Schema:
        """The names of the classes of objects, in the order of their numbers."""
        names = sorted(self.classes, key=self.classes.__getitem__)
        return class_schema({LABELS: names}) if names else Schema()

    @property
    def _beside(self) -> set[str]:
        return {name for one in self._images for name in one.beside}

    @property
    def pictures(self) -> tuple[str, ...]:
        """The field of the images, without masks."""
        return (self._field,)

    @property
    def num_records(self) -> int:
        """Number of images."""
        return len(self._images)

    @property
    def num_bytes(self) -> int:
        """Bytes of all images and masks."""
        return sum(one.size_bytes for one in self._images)

    @property
    def fields(self) -> Mapping[str, bool]:
        """The images, ``json``, and masks."""
        return {self._field: True, "json": True, **{name: name in self._always for name in sorted(self._beside)}}

    def identity(self) -> dict[str, object]:
        """Return a digest of names and annotations, in order."""
        lines = []
        for one in self._images:
            told = hashlib.sha256(json_of(one.note)[0]).hexdigest()
            files = "".join(f"\0{file.name}" for file in (one.file, *one.beside.values()))
            lines.append(f"{one.key}{files}\0{told}")
        return identity_of(self.kind, lines)

    def origins(self) -> Origins:
        """Return the files of annotations, then those of images and masks in the order of their records."""
        found = origins_of(self._annotations, self._storage, number=EVERYWHERE)
        for number, one in enumerate(self._images):
            found += origins_of([one.file, *one.beside.values()], self._storage, number=number)
        return Origins(inputs=found, store=self._storage)

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the images from number ``start`` on, read by several threads."""
        images = self._images[start:]
        return numbered(map_sized(self._read, images, lambda one: one.size_bytes, self._num_threads), start)

    def _read(self, one: AnnotatedFile) -> Record:
        content, remark = json_of(one.note)
        remarks = [remark] if remark else []
        data = read_file(one.file, self._storage)
        objects = one.note.get("objects", ())
        metadata = {**one.note, "objects": len(objects) if isinstance(objects, Sequence) else 0}
        told = {name: metadata.pop(name, None) for name in ("width", "height")}
        try:
            found, remark = look_at_image(data)
            metadata |= found
            remarks += [remark] if remark else []
            if any(value is not None and value != found[name] for name, value in told.items()):
                remarks.append(_OTHER_SIZE)
        except Exception:  # noqa: BLE001  of a library: a damaged image is stored as it is, for readers to pass over
            remarks.append(NO_SIZE)
        masks = {name: read_file(file, self._storage) for name, file in sorted(one.beside.items())}
        return Record(
            key=one.key,
            fields={self._field: data, "json": content, **masks},
            metadata=metadata,
            where=redact(one.file.url),
            remarks=tuple(remarks),
        )


def choose_part(kind: str, wanted: str | None, parts: Sequence[str], where: str) -> str:
    """Return the split to take: the only one, or the ``wanted`` one.

    Raises:
        ConfigError: There is no such split, or there are several and ``wanted`` is None.
    """
    there = ", ".join(sorted(parts))
    if wanted is not None and wanted not in parts:
        raise ConfigError(f"--source-split {wanted}: {where} has no such split; it has: {there or 'none'}")
    if wanted is None and len(parts) != 1:
        raise ConfigError(
            f"{where}: {kind} with several splits; take one with --source-split: {there or 'none is there'}"
        )
    return parts[0] if wanted is None else wanted
