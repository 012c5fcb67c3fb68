"""Read Pascal VOC: images, an XML file of boxes for each, lists of splits, and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from xml.parsers import expat

from shard_tools.make.convert.base.annotated import IMAGE_EXTENSIONS, AnnotatedFile, AnnotatedImages, choose_part
from shard_tools.make.convert.base.class_folders import numbered_classes
from shard_tools.make.convert.base.files import SourceFile, list_files
from shard_tools.make.convert.base.records import NUMBER_KEYS, Skipped, SourceOptions
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError, NotFoundError
from streaming.storage import Storage, redact

_IMAGES, _NOTES, _LISTS = "JPEGImages/", "Annotations/", "ImageSets/Main/"
_MASKS = {"SegmentationClass/": "seg.png", "SegmentationObject/": "instances.png"}
_MOST_BYTES, _DEEPEST = 16 << 20, 32  # maximum size of an XML file, and depth of its elements
_BOX = ("xmin", "ymin", "xmax", "ymax")


class VocFolder(AnnotatedImages):
    """One split of Pascal VOC, or all its images: a sample is an image, with its annotations in ``json``.

    ``json`` holds the file's name, width, height and ``objects``: the elements of the XML, ``bbox`` as [xmin, ymin,
    xmax, ymax] in its own numbers, ``category``, and ``label``, the number of that name in
    ``_shardstream/schema.json``. Masks become the fields ``seg.png`` and ``instances.png``. Images without annotations
    are kept.

    Raises:
        ConfigError: There is no such split.
        DataError: An XML file is damaged, or declares a document type or entities.
        NotFoundError: The folder does not have this layout.
    """

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        if options.key_field not in {None, "path", NUMBER_KEYS}:
            raise ConfigError(f"--key: voc takes its keys from 'path' or 'number', not from {options.key_field!r}")
        files, skipped = list_files([spec], storage, options.exclude)
        below = {folder: _by_stem(files, folder) for folder in (_IMAGES, _NOTES, _LISTS, *_MASKS)}
        images = {
            stem: file
            for stem, file in below[_IMAGES].items()
            if file.name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS
        }
        if not images:
            found = sorted({name.rpartition(_IMAGES)[0] for name in (file.name for file in files) if _IMAGES in name})
            hint = f"; name {', '.join(found)} instead" if found else ""
            raise NotFoundError(f"{redact(spec)}: no images in {_IMAGES}, where those of Pascal VOC are{hint}")
        notes = _read_notes(below[_NOTES], storage, options.num_threads)
        self.class_names = sorted({str(one["category"]) for note in notes.values() for one in note["objects"]})
        self.classes, self.classes_from = numbered_classes(
            self.class_names, options.classes, spec, options.exclude, storage
        )
        for note in notes.values():
            for one in note["objects"]:
                one["label"] = self.classes[str(one["category"])]
        wanted = [*images]
        if options.part is not None:
            wanted = _names_of(options.part, below[_LISTS], storage, redact(spec))
        else:
            skipped += [
                Skipped(
                    path=notes[stem]["path"],
                    reason=f"no such image; objects: {len(notes[stem]['objects'])}",
                    is_lost=True,
                )
                for stem in sorted({*notes} - {*images})
            ]
        chosen: list[AnnotatedFile] = []
        for stem in wanted:
            if stem in images and images[stem].size_bytes:
                note = {"file_name": images[stem].name.removeprefix(_IMAGES), "objects": [], **notes.get(stem, {})}
                note.pop("path", None)
                masks = {field: below[folder][stem] for folder, field in _MASKS.items() if stem in below[folder]}
                chosen.append(AnnotatedFile.of(images[stem], note["file_name"], note, masks))
            else:
                why = "empty file" if stem in images else "no such image, though the split or a list names it"
                skipped.append(Skipped(path=_IMAGES + stem, reason=why, is_lost=True))
        annotations = [*below[_NOTES].values(), *below[_LISTS].values()]
        super().__init__("voc", chosen, skipped, storage, options, annotations)


def _by_stem(files: list[SourceFile], folder: str) -> dict[str, SourceFile]:
    """Return the files directly in a folder, by their names without the extension."""
    found = (file for file in files if file.name.startswith(folder) and "/" not in file.name[len(folder) :])
    return {file.name[len(folder) :].rpartition(".")[0]: file for file in found}


def _names_of(part: str, lists: Mapping[str, SourceFile], storage: Storage, where: str) -> list[str]:
    """Return the names of the images in a split; lines of its list may have a second word.

    Raises:
        ConfigError: There is no such split.
        DataError: Its list is not text, or names an image twice.
    """
    file = lists[choose_part("voc", part, list(lists), where)]
    try:
        lines = bytes(storage.read(file.url)).decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file.shown_url}: byte {error.start} is not UTF-8; re-encode the list") from error
    names = [line.split()[0] for line in lines if line.strip()]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{file.shown_url}: it names {twice!r} twice; take one line out")
    return names


def _read_notes(files: Mapping[str, SourceFile], storage: Storage, num_threads: int) -> dict[str, dict[str, Any]]:
    """Return the annotations in the XML files, by their names; files are read on threads, since there are many."""

    def read(item: tuple[str, SourceFile]) -> tuple[str, dict[str, Any]]:
        stem, file = item
        if file.size_bytes > _MOST_BYTES:
            raise DataError(f"{file.shown_url}: {file.size_bytes} bytes, more than annotations of an image have")
        return stem, _note_of(_tree(bytes(storage.read(file.url)), file.shown_url), file)

    xml = {stem: file for stem, file in files.items() if file.name.lower().endswith(".xml")}
    with contextlib.closing(map_threads(read, xml.items(), num_threads)) as notes:
        return dict(notes)


def _note_of(content: Any, file: SourceFile) -> dict[str, Any]:
    """Return the annotations of an image, from the elements of its file."""
    if not isinstance(content, dict):
        raise DataError(f"{file.shown_url}: not annotations of Pascal VOC: the element <annotation> is empty")
    size = content.get("size")
    size = size if isinstance(size, dict) else {}
    objects = content.get("object", [])
    note: dict[str, Any] = {"width": size.get("width"), "height": size.get("height"), "path": file.name}
    note["objects"] = [_object(one, file) for one in (objects if isinstance(objects, list) else [objects])]
    return note


def _object(one: Any, file: SourceFile) -> dict[str, Any]:
    if not isinstance(one, dict) or not isinstance(one.get("name"), (str, int, float)):
        raise DataError(f"{file.shown_url}: an <object> without a <name>; correct the file")
    box = one.get("bndbox")
    if not isinstance(box, dict) or not all(isinstance(box.get(side), (int, float)) for side in _BOX):
        raise DataError(
            f"{file.shown_url}: the box of an object {one['name']!r} is not four numbers {', '.join(_BOX)}; correct it"
        )
    rest = {name: value for name, value in one.items() if name not in {"name", "bndbox"}}
    return {"category": str(one["name"]), "bbox": [box[side] for side in _BOX], **rest}


def _tree(data: bytes, where: str) -> Any:
    """Parse XML into dicts of elements, lists of repeated elements, and numbers for numeric text.

    Raises:
        DataError: It is damaged, too deep, or declares a document type or entities, which annotations do not need.
    """
    parser = expat.ParserCreate()
    stack: list[tuple[str, dict[str, Any], list[str]]] = [("", {}, [])]

    def refuse(*_: Any) -> Any:
        raise DataError(f"{where}: it declares a document type or entities, which are not read; remove them")

    def start(name: str, _: object) -> None:
        if len(stack) > _DEEPEST:
            raise DataError(f"{where}: elements more than {_DEEPEST} deep; it is not Pascal VOC")
        stack.append((name, {}, []))

    def end(name: str) -> None:
        _, below, text = stack.pop()
        value: Any = below or _number("".join(text).strip())
        into = stack[-1][1]
        if name in into:
            into[name] = [*into[name], value] if isinstance(into[name], list) else [into[name], value]
        else:
            into[name] = value

    def characters(text: str) -> None:
        stack[-1][2].append(text)

    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = parser.ExternalEntityRefHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = characters
    try:
        parser.Parse(data, True)  # noqa: FBT003  as expat has it
    except expat.ExpatError as error:
        raise DataError(f"{where}: not XML ({error}); fetch the file again, or correct it") from error
    return next(iter(stack[0][1].values()))


def _number(text: str) -> object:
    if text.isascii() and text.removeprefix("-").replace(".", "", 1).isdigit() and len(text) < 19:
        return float(text) if "." in text else int(text)
    return text
