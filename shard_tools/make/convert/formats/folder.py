"""Read any folder: files with the same stem form one sample, as the members of a tar do."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from shard_tools.make.convert.base.class_folders import KeyedFile, keyed, left_out, summary, why_left_out
from shard_tools.make.convert.base.files import SourceFile, identity_of, list_files, read_file
from shard_tools.make.convert.base.identity import Origins, origins_of
from shard_tools.make.convert.base.records import (
    NUMBER_KEYS,
    NoRecordError,
    Record,
    SourceOptions,
    numbered,
    permutation,
)
from shard_tools.running.engine import map_sized
from streaming.errors import ConfigError, DuplicateKeyError, first_of
from streaming.storage import Storage, redact

_MANY_FIELDS = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group(KeyedFile):
    """The files of one sample, by field; ``file`` is the first of them."""

    files: Mapping[str, SourceFile]

    @property
    def size_bytes(self) -> int:
        """Bytes of all fields."""
        return sum(file.size_bytes for file in self.files.values())


class FolderFiles:
    """Samples of files, in the order of their keys.

    As in a tar, the key is the path up to the first dot of the file's name, and the field is the rest, in lower case.
    Files that belong to no sample are left out and listed. Bytes are stored unchanged.

    Raises:
        NotFoundError: There is no such file.
        DuplicateKeyError: Two files would be the same field of a sample, or two keys differ only by case.
    """

    kind = "files"

    def __init__(self, spec: str, storage: Storage, options: SourceOptions) -> None:
        if options.key_field not in {None, "path", NUMBER_KEYS}:
            raise ConfigError(f"--key: files take their keys from 'path' or 'number', not from {options.key_field!r}")
        self._storage, self._num_threads = storage, options.num_threads
        found, skipped = list_files((spec, *options.more), storage, options.exclude, options.walks)
        groups: dict[str, dict[str, SourceFile]] = {}
        errors: list[DuplicateKeyError] = []
        for file in found:
            why = why_left_out(file)
            folder, slash, name = file.name.rpartition("/")
            stem, dot, field = name.partition(".")
            if why or not dot or not field:
                skipped.append(left_out(file, why or "no extension, which names the field"))
                continue
            other = groups.setdefault(folder + slash + stem, {}).setdefault(field.lower(), file)
            if other is not file:
                errors.append(_twice(other, file, folder + slash + stem, field.lower()))
        if errors:
            raise first_of(errors, "files are the field of another")
        if not groups:
            raise NoRecordError(f"{redact(spec)}: no files with extensions there ({summary(skipped)})", skipped)
        self.skipped = tuple(sorted(skipped, key=lambda entry: entry.path))
        self._groups = self._ordered(groups, options)
        self._fields = _fields_of(self._groups)

    def _ordered(self, groups: Mapping[str, Mapping[str, SourceFile]], options: SourceOptions) -> list[_Group]:
        ordered = [
            _Group(file=min(files.values(), key=lambda file: file.name), key=key, extension="", files=files)
            for key, files in sorted(groups.items())
        ]
        if options.shuffle_seed is not None:
            ordered = [ordered[i] for i in permutation(len(ordered), options.shuffle_seed)]
        return keyed(ordered, options.key_field, lambda one: one.files)

    @property
    def num_records(self) -> int:
        """Number of samples."""
        return len(self._groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(group.size_bytes for group in self._groups)

    @property
    def fields(self) -> Mapping[str, bool]:
        """The extensions of the files."""
        return self._fields

    def identity(self) -> dict[str, object]:
        """Return a digest of keys and names, in order."""
        lines = [f"{group.key}\0{file.name}" for group in self._groups for file in group.files.values()]
        return identity_of(self.kind, lines)

    def origins(self) -> Origins:
        """Return the files, in the order of their records."""
        each = (group.files.values() for group in self._groups)
        inputs = [
            one for number, files in enumerate(each) for one in origins_of([*files], self._storage, number=number)
        ]
        return Origins(inputs=inputs, store=self._storage)

    def records(self, start: int) -> Generator[Record, None, None]:
        """Return the samples from number ``start`` on, read by several threads."""
        groups = self._groups[start:]
        return numbered(map_sized(self._read, groups, lambda one: one.size_bytes, self._num_threads), start)

    def _read(self, group: _Group) -> Record:
        fields = {field: read_file(file, self._storage) for field, file in sorted(group.files.items())}
        return Record(key=group.key, fields=fields, where=redact(group.file.url))


def _twice(one: SourceFile, other: SourceFile, key: str, field: str) -> DuplicateKeyError:
    return DuplicateKeyError(
        f"{one.name} and {other.name} ({redact(one.url)}, {redact(other.url)}) would both be the field {field!r} of "
        f"the sample {key!r}; rename one of them, or convert the sources apart"
    )


def _fields_of(groups: list[_Group]) -> dict[str, bool]:
    """Return the fields of the samples, True for those that every sample has."""
    counts: dict[str, int] = {}
    for group in groups:
        for field in group.files:
            counts[field] = counts.get(field, 0) + 1
    if len(counts) > _MANY_FIELDS:
        told = ", ".join(sorted(counts)[:5])
        _log.warning(
            "%d different fields (%s, …): a name is divided at its first dot. If dots are part of your names, replace "
            "them",
            len(counts), told,
        )  # fmt: skip
    return {field: count == len(groups) for field, count in sorted(counts.items())}
