"""Read COCO: images, and JSON files with the boxes, keypoints and captions of all images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shard_tools.make.convert.base.annotated import IMAGE_EXTENSIONS, AnnotatedFile, AnnotatedImages, choose_part
from shard_tools.make.convert.base.class_folders import numbered_classes
from shard_tools.make.convert.base.files import SourceFile, list_files
from shard_tools.make.convert.base.records import NUMBER_KEYS, Skipped, SourceOptions
from streaming.errors import ConfigError, DataError
from streaming.storage import Storage, redact, split_url

_KINDS = re.compile(r"(instances|captions|person_keypoints|image_info)_(.+)")
_NOT_READ = re.compile(r"(panoptic|stuff)_.+")
_JSON = ".json"


@dataclass(slots=True)
class _Notes:
    """The annotations in the files of a split."""

    images: dict[object, dict[str, Any]] = field(default_factory=dict)
    objects: dict[object, dict[object, dict[str, Any]]] = field(default_factory=dict)  # by image, by number
    captions: dict[object, list[str]] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    has_captions: bool = False


class CocoFolder(AnnotatedImages):
    """One split of COCO: a sample is an image, with its annotations in ``json``.

    ``json`` holds the file's name, width, height, ``objects`` and ``captions``. An object is an annotation, with the
    name of its ``category`` and its ``label``: the number of that name in ``_shardstream/schema.json``. Annotations of
    the same id in several files, such as boxes and keypoints, form one object. Images without annotations are kept.

    The name of the split follows the kind in the names of the JSON files (``instances_train2017.json``). Images are
    searched for in folders of its name, in ``images/`` and beside the annotations, or in ``--image-folder``.

    Raises:
        ConfigError: There are several splits, and none is selected.
        DataError: A file is not COCO; the message names it.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        if options.key_field not in {None, "path", NUMBER_KEYS}:
            raise ConfigError(f"--key: coco takes its keys from 'path' or 'number', not from {options.key_field!r}")
        alone = spec.lower().endswith(_JSON)
        files, skipped = list_files([spec], storage, options.exclude)
        there = files
        if options.images is not None or alone:
            there, more = list_files([options.images or split_url(spec)[0] or "."], storage, options.exclude)
            skipped += more
        parts, left_out = _parts_of(files, alone=alone)
        part = choose_part("coco", options.part, list(parts), redact(spec))
        notes = _Notes()
        for file in parts[part]:
            _add(notes, _parsed(bytes(storage.read(file.url)), file), file)
        names = list(dict.fromkeys(name for _, name in sorted(notes.categories.items())))
        self.class_names = names
        self.classes, self.classes_from = numbered_classes(names, options.classes, spec, options.exclude, storage)
        self.classes_from = self.classes_from or "the categories in their order"
        images, missing = _found(notes, part, there, self.classes)
        super().__init__("coco", images, [*skipped, *left_out, *missing], storage, options, parts[part])


def _parts_of(files: Iterable[SourceFile], *, alone: bool) -> tuple[dict[str, list[SourceFile]], list[Skipped]]:
    """Return the annotation files by split: those in a folder ``annotations``, or else those at the top."""
    found = [file for file in files if file.name.lower().endswith(_JSON)]
    below = [file for file in found if file.name.startswith("annotations/")]
    parts: dict[str, list[SourceFile]] = {}
    left_out = []
    for file in below if below and not alone else [file for file in found if "/" not in file.name]:
        stem = file.name.rpartition("/")[2][: -len(_JSON)]
        if _NOT_READ.fullmatch(stem):
            left_out.append(Skipped(path=file.name, reason="annotations of pixels, which are not read here"))
            continue
        kind = _KINDS.fullmatch(stem)
        parts.setdefault(kind[2] if kind else stem, []).append(file)
    return parts, left_out


def _parsed(data: bytes, file: SourceFile) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.shown_url}: not JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise DataError(
            f"{file.shown_url}: not annotations of COCO, which are an object with a list 'images'; name the right file"
        )
    return content


def _listed(content: Mapping[str, Any], name: str, needed: Mapping[str, type | tuple[type, ...]], where: str) -> Any:
    """Yield the entries of a list; each must be an object with these values.

    Raises:
        DataError: An entry is not.
    """
    entries = content.get(name, [])
    if not isinstance(entries, list):
        raise DataError(f"{where}: {name!r} is no list; it is not COCO")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), kind) for key, kind in needed.items()):
            raise DataError(
                f"{where}: {name}[{number}] lacks {' or '.join(needed)}, or it is of a wrong type; correct it"
            )
        yield entry


def _add(notes: _Notes, content: dict[str, Any], file: SourceFile) -> None:
    """Add the annotations of a file.

    Raises:
        DataError: It is not COCO, or contradicts another file.
    """
    where = file.shown_url
    for image in _listed(content, "images", {"id": (int, str), "file_name": str}, where):
        other = notes.images.setdefault(image["id"], image)
        if other["file_name"] != image["file_name"]:
            raise DataError(
                f"{where}: image {image['id']} is {image['file_name']!r} here, but {other['file_name']!r} before; "
                "these files do not belong together"
            )
    for category in _listed(content, "categories", {"id": int, "name": str}, where):
        name = notes.categories.setdefault(category["id"], category["name"])
        if name != category["name"]:
            raise DataError(f"{where}: category {category['id']} is {category['name']!r} here, but {name!r} before")
    for number, one in enumerate(_listed(content, "annotations", {"image_id": (int, str)}, where)):
        if isinstance(one.get("caption"), str):
            notes.captions.setdefault(one["image_id"], []).append(one["caption"])
            notes.has_captions = True
            continue
        told = {name: value for name, value in one.items() if name != "image_id"}
        if "category_id" in told:
            try:
                told["category"] = notes.categories[told["category_id"]]
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"{where}: annotation {one.get('id', number)} has category {told['category_id']!r}, which "
                    "'categories' lacks; correct it"
                ) from error
        key = one["id"] if isinstance(one.get("id"), (int, str)) else (where, number)
        objects = notes.objects.setdefault(one["image_id"], {})
        objects[key] = objects.get(key, {}) | told


def _found(
    notes: _Notes, part: str, files: Sequence[SourceFile], classes: Mapping[str, int]
) -> tuple[list[AnnotatedFile], list[Skipped]]:
    """Return the images of a split, and the entries left out: annotations without image, images without entry."""
    by_name = {file.name: file for file in files}
    images: list[AnnotatedFile] = []
    left_out: list[Skipped] = []
    used: set[str] = set()
    for number, image in notes.images.items():
        name = image["file_name"]
        places = (f"{part}/{name}", f"images/{part}/{name}", f"{part}/images/{name}", f"images/{name}", name)
        file = next((by_name[place] for place in places if place in by_name), None)
        objects = list(notes.objects.pop(number, {}).values())
        captions = notes.captions.pop(number, [])
        if file is None or not file.size_bytes:
            why = "no such image" if file is None else "empty file"
            reason = f"{why}; annotations of it: {len(objects) + len(captions)}"
            left_out.append(Skipped(path=name, reason=reason, is_lost=True))
            continue
        used.add(file.name)
        note = {"image_id": number, "file_name": name, "width": image.get("width"), "height": image.get("height")}
        note["objects"] = [_labelled(one, classes) for one in objects]
        if notes.has_captions:
            note["captions"] = captions
        images.append(AnnotatedFile.of(file, name, note))
    for number in dict.fromkeys([*notes.objects, *notes.captions]):
        count = len(notes.objects.get(number, ())) + len(notes.captions.get(number, ()))
        reason = f"not listed; annotations of it: {count}"
        left_out.append(Skipped(path=f"image {number}", reason=reason, is_lost=True))
    folders = {name.rpartition("/")[0] for name in used}
    left_out += [
        Skipped(path=name, reason="an image that the annotations do not list")
        for name in sorted({*by_name} - used)
        if name.rpartition("/")[0] in folders and name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS
    ]
    return images, left_out


def _labelled(one: Mapping[str, Any], classes: Mapping[str, int]) -> dict[str, Any]:
    return {**one, "label": classes[one["category"]]} if "category" in one else dict(one)
