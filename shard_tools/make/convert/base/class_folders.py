"""Read folders of files of one medium, such as images, whose sub-folders are classes; number the classes."""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from shard_tools.make.convert.base.files import SourceFile, identity_of, is_aside, is_local, list_files, read_file
from shard_tools.make.convert.base.identity import EVERYWHERE, Origins, origins_of
from shard_tools.make.convert.base.records import (
    NUMBER_KEYS,
    Growing,
    NoRecordError,
    Record,
    Skipped,
    SourceOptions,
    number_key,
    numbered,
    permutation,
)
from shard_tools.make.convert.base.rows import json_of
from shard_tools.make.write.above import sets_above
from shard_tools.make.write.filetypes import plain_extension
from shard_tools.make.write.keys import WRONG_NAMES, wrong_names
from shard_tools.running.engine import map_sized
from streaming.errors import AccessDeniedError, ConfigError, DataError, DuplicateKeyError, NotFoundError, first_of
from streaming.shards.catalog.build import read_schema
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import SCHEMA_FILE
from streaming.shards.schema.joined import SchemaConflict, joined
from streaming.shards.schema.value import Schema, SchemaField, class_schema
from streaming.shards.tar.passed_over import in_side_folder, why_no_sample
from streaming.storage import Storage, join_url, local_path, redact, split_url

HIDDEN = "hidden: a name that starts with a dot"
_TRAINING = ("train", "training")
_HELD_OUT = frozenset({"val", "valid", "validation", "test", "testing", "dev", "eval"})
_LISTED = 12  # names that a message lists
_NOTE = "json"  # the field of notes
_OTHER_CLASS = "its notes name another class than its folder; json has that of the folder"
_json = json.JSONEncoder(ensure_ascii=False).encode
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedFile:
    """A file, the key and the extension that its name gives it, and its class.

    Attributes:
        beside: The files of further fields, such as captions or masks.
        note: What is noted about it.
    """

    file: SourceFile
    key: str
    extension: str
    class_name: str | None = None
    beside: Mapping[str, SourceFile] = field(default_factory=dict)
    note: Mapping[str, object] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all fields that are files."""
        return sum(file.size_bytes for file in (self.file, *self.beside.values()))


_K = TypeVar("_K", bound=KeyedFile)


class ClassFolders(ABC):
    """Files of one medium under folders or prefixes, sorted by name; each medium is a subclass.

    The first folder of a path is the class. Classes are numbered (field ``cls``) by :func:`numbered_classes`: as in the
    training set beside it, or else in the order of their sorted names. The key is the path without its extension,
    with dots in the file's name replaced by ``_``. Bytes are stored unchanged, all in one field: the most frequent
    extension, in lower case; with a ``json`` field that holds class and path. Files of its stem (``a.txt`` beside
    ``a.jpg``) are further fields of its sample; entries of ``a.json`` join its ``json``, and are metadata.

    Files of several classes are shuffled, unless ``keep_order`` is set: in the order of names, a shard would hold one
    or two classes, and a batch only a few.

    ``cls`` and ``class``, and the facts that :meth:`look` returns, become columns.

    Attributes:
        kind: The value of ``--from``, also the plural noun for its files.
        one: The noun for one of its files with its article, as in "not an image".
        extensions: Extensions of its files, in lower case, without the dot.
        own_field: Text of the warning for files of several types, which become one field.
        measures: Columns that :meth:`look` gives.
        unread: The remark about a file of which :meth:`look` raises.
        common: Files that describe others, so that every record may depend on them.

    Raises:
        NotFoundError: There is no such file.
        DuplicateKeyError: Two files would have the same key.
    """

    kind: ClassVar[str]
    one: ClassVar[str]
    extensions: ClassVar[frozenset[str]]
    own_field: ClassVar[str]
    measures: ClassVar[tuple[str, ...]]
    unread: ClassVar[str]
    common: Sequence[SourceFile] = ()

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        key_field = options.key_field
        if key_field not in {None, "path", NUMBER_KEYS}:
            raise ConfigError(f"--key: {self.kind} take their keys from 'path' or 'number', not from {key_field!r}")
        self._storage, self._num_threads = storage, options.num_threads
        self._tolerant = options.tolerant
        found, skipped = list_files((spec, *options.more), storage, options.exclude, options.walks)
        files, others = self._sorted_out(found)
        skipped += others
        if not files:
            raise NoRecordError(
                f"{redact(spec)}: no {self.kind} there ({summary(skipped)}); check the path, or use --from", skipped
            )
        files.sort(key=attrgetter("key", "file.name"))
        self.skipped = tuple(sorted(skipped, key=lambda entry: entry.path))
        names = sorted({one.class_name for one in files if one.class_name is not None})
        self.class_names = names
        lost = [one for one in files if one.class_name is None]
        if names and lost:
            _log.warning(
                "%s: %d of %d %s are in no folder of a class, such as %s, and get none: batches have None there. Put "
                "them into a folder, or convert them by themselves",
                redact(spec), len(lost), len(files), self.kind, lost[0].file.name,
            )  # fmt: skip
        self.classes, self.classes_from = numbered_classes(names, options.classes, spec, options.exclude, storage)
        self.shuffle_seed = options.shuffle_seed
        if self.shuffle_seed is None and len(names) > 1 and not options.keep_order:
            self.shuffle_seed = 0
        if self.shuffle_seed is not None:
            files = [files[i] for i in permutation(len(files), self.shuffle_seed)]
        self.columns = ("cls", "class", *self.measures) if names else self.measures
        self._files = keyed(files, key_field, lambda _: ())
        self._field = options.medium_field or field_of(self._files, self.kind, self.own_field)

    @abstractmethod
    def look(self, data: bytes) -> tuple[dict[str, object], str]:
        """Return the facts in a file's header, and a remark or ``""``.

        Raises:
            Exception: It is damaged or of an unsupported type; an exception of any library.
        """

    @property
    def meaning(self) -> Schema:
        """The names of the classes, in the order of their numbers."""
        names = sorted(self.classes, key=self.classes.__getitem__)
        return class_schema({"cls": names}, {"cls": names}) if names else Schema()

    @property
    def num_records(self) -> int:
        """Number of files."""
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(one.size_bytes for one in self._files)

    @property
    def fields(self) -> Mapping[str, bool]:
        """The files, ``json``, ``cls`` where there are classes, and what lies beside files."""
        classes = {one.class_name is not None for one in self._files}
        counts = Counter(name for one in self._files for name in one.beside)
        beside = {name: count == len(self._files) for name, count in sorted(counts.items())}
        known = {self._field: True, "json": True, **({"cls": classes == {True}} if True in classes else {})}
        return beside | known

    def identity(self) -> dict[str, object]:
        """Return a digest of names, in order."""
        lines = ("\0".join((one.key, *(file.name for file in _files_of(one)))) for one in self._files)
        return identity_of(self.kind, [*lines, *(file.name for file in self.common)])

    def origins(self) -> Origins:
        """Return the files, in the order of their records."""
        each = enumerate(map(_files_of, self._files))
        inputs = origins_of(self.common, self._storage, number=EVERYWHERE)
        inputs += [one for number, files in each for one in origins_of(files, self._storage, number=number)]
        return Origins(inputs=inputs, store=self._storage)

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the files from number ``start`` on, read by several threads."""
        files = self._files[start:]
        return numbered(map_sized(self._read, files, lambda one: one.size_bytes, self._num_threads), start)

    def _read(self, one: KeyedFile) -> Record:
        where = redact(one.file.url)
        try:
            note = self._note(one)
        except DataError as error:
            if not self._tolerant:
                raise
            return Record(key=one.key, fields={}, where=where, problem=error)
        metadata: dict[str, object] = {"class": one.class_name, "path": one.file.name, **note}
        if one.class_name is not None:
            metadata["class"] = one.class_name
        fields = {
            **{name: read_file(file, self._storage) for name, file in one.beside.items() if name != _NOTE},
            self._field: read_file(one.file, self._storage),
            "json": f'{{"class":{_json(one.class_name)},"path":{_json(one.file.name)}}}'.encode(),
        }
        remarks = list[str]()
        if note:
            fields["json"], remark = json_of(metadata)
            remarks += [remark] if remark else []
            remarks += [_OTHER_CLASS] if note.get("class", one.class_name) != metadata["class"] else []
        if one.class_name is not None:
            number = self.classes[one.class_name]
            fields["cls"] = str(number).encode()
            metadata["cls"] = number
        try:
            told, remark = self.look(fields[self._field])
            metadata |= told
        except Exception:  # noqa: BLE001  of a library: a damaged file is stored as it is, for readers to pass over
            remark = self.unread
        remarks += [remark] if remark else []
        return Record(key=one.key, fields=fields, metadata=metadata, where=where, remarks=tuple(remarks))

    def _note(self, one: KeyedFile) -> Mapping[str, object]:
        """Return the notes about a file: of a metadata file, or of a file beside it.

        Raises:
            DataError: The file beside it is no JSON object.
        """
        note, file = dict(one.note), one.beside.get(_NOTE)
        if file is not None:
            try:
                beside = json.loads(read_file(file, self._storage))
                note |= {**beside}
            except (ValueError, TypeError, RecursionError) as error:
                raise DataError(
                    f"{file.shown_url}: not a JSON object ({error}), as notes beside {self.kind} have to be; correct "
                    "it, or leave such files out with --on-error skip"
                ) from error
        return note

    def _sorted_out(self, found: Sequence[SourceFile]) -> tuple[list[KeyedFile], list[Skipped]]:
        """Return the files of the medium, each with those of its stem; and what belongs to none of them."""
        files, others = list[KeyedFile](), list[tuple[SourceFile, str]]()
        for file in found:
            one = self._classify(file)
            if isinstance(one, str):
                others.append((file, one))
            else:
                files.append(one)
        beside: dict[str, dict[str, SourceFile]] = {one.file.name.rpartition(".")[0]: {} for one in files}
        has_classes = any(one.class_name is not None for one in files)
        skipped = []
        for file, why in others:
            stem, _, field = file.name.rpartition(".")
            own = beside.get(stem)
            is_taken = own is None or field.lower() in own or (field.lower() == "cls" and has_classes)
            if is_taken or why_left_out(file):
                skipped.append(left_out(file, why))
            else:
                beside[stem][field.lower()] = file
        return [replace(one, beside=beside[one.file.name.rpartition(".")[0]]) for one in files], skipped

    def _classify(self, file: SourceFile) -> KeyedFile | str:
        """Return a file of the medium, or why it is none."""
        folder, _, name = file.name.rpartition("/")
        stem, dot, extension = name.rpartition(".")
        why = why_left_out(file)
        if why and (file.size_bytes or extension.lower() in self.extensions):  # .ipynb_checkpoints would be a class
            return why
        if not dot or not stem or extension.lower() not in self.extensions:
            return f"not {self.one}, and beside none of its name"
        key = (folder + "/" if folder else "") + stem.replace(".", "_")
        class_name = file.name.partition("/")[0] if folder else None
        return KeyedFile(file=file, key=key, extension=extension.lower(), class_name=class_name)


def _files_of(one: KeyedFile) -> list[SourceFile]:
    return [one.file, *one.beside.values()]


def left_out(file: SourceFile, why: str) -> Skipped:
    """Return the report of a file that belongs to no sample: it is lost, unless its name is that of no data."""
    return Skipped(path=file.name, reason=why, is_lost=not is_aside(file.name))


def why_left_out(file: SourceFile) -> str:
    """Return why a file can never be part of a sample, by its name and size; ``""`` if it can."""
    if file.name.startswith(".") or "/." in file.name:
        return HIDDEN
    if in_side_folder(file.name):
        return why_no_sample(file.name)
    return "empty file" if file.size_bytes == 0 else ""


def numbered_classes(
    names: Sequence[str], given: str | Growing | None, source: str, target: str | None, storage: Storage
) -> tuple[dict[str, int], str]:
    """Return the number of each class, and the origin of the numbers: see :func:`_numbered`.

    If the source is appended to a set, the set's classes keep their numbers, and new ones get the next.

    A set beside the target with other class numbers is logged: both sets are refused if they are read together, by
    their parent folder.
    """
    if isinstance(given, Growing):
        grown = [*given.names, *sorted({*names} - {*given.names})]
        return {name: number for number, name in enumerate(grown)}, target or ""
    numbers, place = _numbered(names, given, source, target, storage)
    if numbers and target is not None and is_local(target):
        _tell_of_neighbors(sorted(numbers, key=numbers.__getitem__), local_path(target), storage)
    return numbers, place


def _tell_of_neighbors(names: Sequence[str], target: str, storage: Storage) -> None:
    own = class_schema({"cls": names})
    folder = os.path.dirname(os.path.abspath(target))
    for neighbor in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        place = f"{folder}/{neighbor}"
        if os.path.abspath(target) == place or not os.path.exists(f"{place}/{SCHEMA_FILE}"):
            continue
        known = read_schema(storage, place)
        conflict = joined({place: Schema(fields={"cls": known.fields.get("cls", SchemaField())}), target: own})
        if isinstance(conflict, SchemaConflict):
            there = known.fields["cls"].classes
            lacking = [name for name in names if name not in there]
            given = place if not lacking else _longer_list([*there, *lacking], place)
            _log.warning("%s. To number classes as there, give --classes %s", conflict, given)
            return


def _longer_list(names: Sequence[str], place: str) -> str:
    """Return the value of ``--classes`` for a set's classes and new ones: the list itself, or a file if it is long."""
    if len(names) <= _LISTED and not any("," in name for name in names):
        return ",".join(names)
    return f"NAMES.txt with one name a line: those of {place}, then the new ones, such as {names[-1]!r}"


def _numbered(
    names: Sequence[str], given: str | None, source: str, target: str | None, storage: Storage
) -> tuple[dict[str, int], str]:
    """Return the number of each class, and the origin of the numbers; "" if they come from this folder alone.

    Args:
        names: Classes of the folder, sorted.
        given: Names separated by commas; or a file (JSON, or one name per line), a folder of classes, or a converted
            set.
        source: The folder. A folder ``train`` beside it determines the numbers if it has all these classes.
        target: Location of the shards. A set above it, which the shards will be a part of, determines the numbers: its
        classes keep theirs, new ones get the next. A set converted to ``train`` beside the target takes precedence
        over a folder ``train`` beside the source.
        storage: The store.

    Raises:
        ConfigError: The given classes cannot be read, or lack one of the folder's.
        NotFoundError: Nothing is found at ``given``.
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
    above = _set_above(target, storage) if names and target is not None else None
    if above is not None:
        place, known = above
        new = sorted({*names} - {*known})
        if [*known, *new] != [*names]:
            told = f"; new ones, such as {new[0]!r}, get the numbers from {len(known)} on" if new else ""
            _log.warning("classes are numbered as in %s, of which the target will be a part%s", redact(place), told)
        return {name: number for number, name in enumerate([*known, *new])}, place
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


def _set_above(target: str, storage: Storage) -> tuple[str, list[str]] | None:
    """Return the nearest set with classes above ``target``: shards there will be read as part of it."""
    named = ((place, _names_in(schema, place)) for place, schema in sets_above(target, storage))
    return next((one for one in named if one[1]), None)


def _names_in(schema: Schema, place: str) -> list[str]:
    """Return the names of the classes of a set; [] if it has none.

    Raises:
        ConfigError: Its fields have different classes.
    """
    lists = schema.classes
    if "cls" in lists:
        return [*lists["cls"]]
    if len({*lists.values()}) > 1:
        raise ConfigError(
            f"{redact(place)}: its fields {', '.join(lists)} have classes of their own; give a list of names instead"
        )
    return [*next(iter(lists.values()), ())]


def _beside(source: str, target: str | None) -> list[str]:
    """Return possible places of the training set's classes: converted beside the target, or in a local folder."""
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
    elif _is_plain_folder(place):
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
        url = place if is_file else join_url(place, SCHEMA_FILE)
        if url.endswith(SCHEMA_FILE):
            listed = _names_in(storage.read_parsed(url, Schema.from_bytes, is_sealed), place)
        else:
            listed = _parsed(bytes(storage.read(url)).decode())
        if isinstance(listed, dict):
            listed = listed.get("classes", listed)
        if isinstance(listed, dict):  # names to numbers
            listed = [name for name, _ in sorted(listed.items(), key=lambda item: item[1])]
    names = [name.strip() for name in listed if isinstance(name, str) and name.strip()]
    if not names or len({*names}) < len(names):
        raise ConfigError(f"--classes {redact(place)}: expected different names of classes there; write one a line")
    return names


def _is_plain_folder(place: str) -> bool:
    """Return whether a place is a local folder, and not a converted set."""
    path = local_path(place) if is_local(place) else ""
    return bool(path) and os.path.isdir(path) and not os.path.exists(f"{path}/{SCHEMA_FILE}")


def _parsed(text: str) -> Any:
    return json.loads(text) if text.lstrip()[:1] in {"[", "{"} else text.split("\n")


def field_of(files: Sequence[KeyedFile], kind: str, own_field: str) -> str:
    """Return the common field of all files, so that every sample has it: their most frequent extension."""
    spelled = Counter(one.extension for one in files)
    counts = Counter(plain_extension(extension) for extension in spelled.elements())
    most = min(counts, key=lambda extension: (-counts[extension], extension))
    field = next(iter(spelled)) if len(spelled) == 1 else most
    if len(spelled) > 1:
        told = ", ".join(f"{count:,} {extension}" for extension, count in spelled.most_common())
        _log.warning("%s of several kinds (%s): %s", kind, told, own_field % field)
    return field


def keyed(files: list[_K], key_field: str | None, fields_of: Callable[[_K], Iterable[str]]) -> list[_K]:
    """Return the files with storable keys: numbers if ``key_field`` is ``"number"``, else their own keys.

    Raises:
        ConfigError: A key, or a field that ``fields_of`` gives for it, cannot be stored.
        DuplicateKeyError: Two keys are equal, or differ only by case, which some readers and file systems ignore.
    """
    if key_field == NUMBER_KEYS:
        files = [replace(one, key=number_key(number)) for number, one in enumerate(files)]
    else:
        _refuse_collisions(files)
    wrong = list(wrong_names((one.key, fields_of(one)) for one in files))
    if wrong:
        cure = "" if key_field == NUMBER_KEYS else "; --key number makes other keys"
        raise first_of(wrong, f"{WRONG_NAMES}{cure}")
    return files


def _refuse_collisions(files: Sequence[KeyedFile]) -> None:
    if len({one.key.casefold() for one in files}) == len(files):
        return
    seen: dict[str, KeyedFile] = {}
    twice = [(seen.setdefault(one.key.casefold(), one), one) for one in files]
    errors = [
        DuplicateKeyError(
            f"{other.file.name} and {one.file.name} would both get the key {one.key!r}; rename one of them, or "
            "number the keys with --key number"
        )
        for other, one in twice
        if other is not one
    ]
    if errors:
        raise first_of(errors, "files have the key of another")


def summary(skipped: Sequence[Skipped]) -> str:
    """Summarize the entries that a source holds instead of the expected files."""
    return f"{len(skipped)} other files, first: {skipped[0].path}: {skipped[0].reason}" if skipped else "it is empty"
