"""Group members of a tar into samples: consecutive members with one key are a sample, each extension is a field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import eq

import numpy as np

from streaming.errors import DuplicateKeyError, TarError
from streaming.shards.tar.blocks import Members, Names, Origin, decode_name, is_meta, split_name
from streaming.shards.tar.keys import KeyLines, join_lines, rises
from streaming.types import Int64Array

MAX_FIELDS = 16384
"""Maximum number of fields of one sample; every additional field costs all readers a column."""
DUPLICATES_CURE = (
    "rewrite the set with `shard_tools reshard SOURCE TARGET --dedupe` (joins samples that share a key, and keeps the "
    "first of each field) or with `--key-prefix {number}-` (keeps all, each under a key of its own). To read the set "
    'as it is, each as a separate sample: StreamingDataset(duplicate_keys="keep"), or `shard_tools index '
    "--duplicate-keys keep`"
)
"""Cure for a repeated key, for messages."""
_MAX_UNIFORM_FIELDS = 64
_FREE_FIELDS = 256
_MAX_CELLS_PER_MEMBER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """The places of the samples in a run of tar bytes.

    Offsets count from the start of the buffer (of the shard, if a scanner made the layout).

    Attributes:
        keys: The key of each of the ``n`` samples.
        fields: The ``F`` extensions, lower-cased, in order of first appearance.
        starts: int64 ``[n, F]``, the start of each field's bytes; -1 if the sample lacks the field.
        sizes: int64 ``[n, F]``, their number; 0 if the sample lacks the field.
        record_starts: int64 ``[n + 1]``: sample ``i`` with all its headers and padding is
            ``[record_starts[i], record_starts[i + 1])``. Members that belong to no sample (directories, links) are in
            the record before them, or in the first.
        passed_over: The regular files that belong to no sample.
    """

    keys: list[str]
    fields: tuple[str, ...]
    starts: Int64Array
    sizes: Int64Array
    record_starts: Int64Array
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """A :class:`ChunkLayout` whose keys may not be Python objects yet."""

    keys: KeyLines | list[str]
    fields: tuple[str, ...]
    starts: Int64Array
    sizes: Int64Array
    record_starts: Int64Array
    passed_over: tuple[str, ...] = ()

    def unpacked(self) -> ChunkLayout:
        """Return the same layout with keys as text."""
        keys = self.keys
        return ChunkLayout(
            keys=keys.to_list() if isinstance(keys, KeyLines) else keys,
            fields=self.fields,
            starts=self.starts,
            sizes=self.sizes,
            record_starts=self.record_starts,
            passed_over=self.passed_over,
        )


def group_members(members: Members, where: Origin, *, first: int, stop: int, repeats: bool = False) -> PackedLayout:
    """Return the samples formed by ``members``. The records span ``[first, stop)``.

    Args:
        members: In the order of the archive.
        where: For messages.
        first: Start of the first record.
        stop: End of the last one.
        repeats: A field that the sample already has begins another sample with the same key; else that is an error.

    Raises:
        DuplicateKeyError: A sample has a field twice, unless ``repeats``.
        TarError: The number of distinct extensions shows that the names are not ``key.extension``.
    """
    uniform = _uniform(members.names, repeats=repeats) if len(members.names) else None
    if uniform is None:
        return _group_one_by_one(members, where, first=first, stop=stop, repeats=repeats)
    keys, fields = uniform
    record_starts = np.empty(len(keys) + 1, np.int64)
    record_starts[:-1] = members.headers[:: len(fields)]
    record_starts[0], record_starts[-1] = first, stop
    shape = (len(keys), len(fields))
    return PackedLayout(
        keys=keys,
        fields=fields,
        starts=members.data.reshape(shape),
        sizes=members.sizes.reshape(shape),
        record_starts=record_starts,
    )


def _first_sample(names: Iterable[bytes]) -> tuple[str, list[str]] | None:
    """Return key and extensions, as written, of the leading members with one key; None if they are not plain."""
    key, extensions = None, []
    for raw in names:
        name = decode_name(raw)
        split = split_name(name)
        if split is None or (key is not None and split[0] != key):
            break
        key = split[0]
        extensions.append(name[len(key) :])
    lowered = {extension.lower() for extension in extensions}
    if any(extension.startswith(".__") for extension in lowered):
        return None
    if key is None or len(lowered) != len(extensions) or len(extensions) > _MAX_UNIFORM_FIELDS:
        return None
    return key, extensions


def _uniform(names: Names, *, repeats: bool) -> tuple[KeyLines, tuple[str, ...]] | None:
    """Return keys and fields if all samples have the fields of the first, in its order, and plain names; else None.

    Neighbors with one key are two samples if ``repeats``; otherwise the result is None.

    Works on the joined names of one field at a time: if every line ends with the extension and holds no dot but the
    extension's (and those of a directory with which all lines begin), the text between two extensions is a key.
    """
    sample = _first_sample(names[: _MAX_UNIFORM_FIELDS + 1])
    if sample is None or len(names) % len(sample[1]):
        return None
    key, extensions = sample
    num_fields, num_samples = len(extensions), len(names) // len(extensions)
    ends = [extension.encode("utf-8", "surrogateescape") + b"\n" for extension in extensions]
    lines = join_lines(names, 0, num_fields)
    folder = key[: key.rfind("/") + 1].encode("utf-8", "surrogateescape")
    if not _plain(lines, ends[0], folder, num_samples):
        return None
    for field in range(1, num_fields):
        other = join_lines(names, field, num_fields)
        if other.count(ends[field]) != num_samples or other.count(b"\n") != num_samples:
            return None
        if other.replace(ends[field], ends[0]) != lines:
            return None
    ends_of = None  # the names of the first and the last key, if they ascend
    if not repeats and not isinstance(names, list) and rises(firsts := names[::num_fields]):
        ends_of = firsts[[0, -1]]
    keys = KeyLines(lines, ends[0], num_samples, ends_of)
    if not repeats and ends_of is None:
        listed = lines.split(ends[0])
        if any(map(eq, listed, listed[1:])):
            return None
    return keys, tuple(extension[1:].lower() for extension in extensions)


def _plain(lines: bytes, end: bytes, folder: bytes, num_samples: int) -> bool:
    """Return whether each of ``lines`` is a key and ``end``, with no special name among them."""
    if lines.count(b"\n") != num_samples or lines.count(end) != num_samples or b"\0" in lines:
        return False
    num_dots = folder.count(b".")
    if num_dots and not (
        lines.startswith(folder)
        and lines.count(b"\n" + folder) == num_samples - 1
        and not lines.startswith(folder + b".")
        and b"\n" + folder + b"." not in lines
    ):
        return False
    if lines.count(b".") != num_samples * (end.count(b".") + num_dots):
        return False
    if lines.startswith(b"__") or end + b"__" in lines:  # each line but the first follows an end
        return False
    if b"/." in lines or b"@eaDir/" in lines or b"__MACOSX/" in lines:  # perhaps of no sample
        return False
    return num_dots > 0 or not (lines.startswith(b".") or end + b"." in lines)


def _group_one_by_one(members: Members, where: Origin, *, first: int, stop: int, repeats: bool) -> PackedLayout:
    keys: list[str] = []
    kept: list[int] = []  # members that belong to samples; with the row and column of each
    rows: list[int] = []
    columns: list[int] = []
    heads: list[int] = []  # the first member of each sample
    fields: dict[str, int] = {}
    seen: dict[int, int] = {}  # fields of the current sample
    passed: list[str] = []
    key = None
    names = members.names if isinstance(members.names, list) else members.names.tolist()
    for index, raw in enumerate(names):
        name = decode_name(raw.split(b"\0", 1)[0] if b"\0" in raw else raw)
        split = split_name(name)
        if split is None:
            passed.append(name)
            continue
        if where.strict and is_meta(split[1]):
            where.fail(
                int(members.headers[index]),
                f"a field {split[1]!r}, a name that readers use for their own notes in a sample",
                member=raw,
                cure="rename it, or leave it out: `shard_tools repair URL --to TARGET --drop-damaged`",
            )
        column = fields.setdefault(split[1], len(fields))
        again = split[0] == key and column in seen
        if again and not repeats:
            _raise_duplicate(members, where, seen[column], index, split)
        if again or split[0] != key:
            key = split[0]
            keys.append(key)
            heads.append(index)
            seen = {}
        seen[column] = index
        check_num_fields(split[0], len(seen), where.url)
        kept.append(index)
        rows.append(len(keys) - 1)
        columns.append(column)
    check_density(len(keys), list(fields), len(kept), where.url)
    starts = np.full((len(keys), len(fields)), -1, np.int64)
    sizes = np.zeros((len(keys), len(fields)), np.int64)
    starts[rows, columns] = members.data[kept]
    sizes[rows, columns] = members.sizes[kept]
    record_starts = np.append(members.headers[heads], stop)
    if keys:
        record_starts[0] = first
    return PackedLayout(
        keys=keys,
        fields=tuple(fields),
        starts=starts,
        sizes=sizes,
        record_starts=record_starts,
        passed_over=tuple(passed),
    )


def _raise_duplicate(members: Members, where: Origin, before: int, index: int, split: tuple[str, str]) -> None:
    first, second = (where.base + int(members.headers[member]) for member in (before, index))
    raise DuplicateKeyError(
        f"{where.url or 'tar'}: sample {split[0]!r} has field {split[1]!r} twice, at bytes {first} and {second}; "
        f"keys end at the first dot of the file name: rename the files, or {DUPLICATES_CURE}"
    )


def check_num_fields(key: str, num_fields: int, url: str) -> None:
    """Reject a sample with more fields than any reader could use.

    Raises:
        TarError: It has more than :data:`MAX_FIELDS` fields.
    """
    if num_fields > MAX_FIELDS:
        raise TarError(
            f"{url or 'tar'}: sample {key[:80]!r} has more than {MAX_FIELDS} fields; a key ends at the first dot of "
            "the file name: rename the files"
        )


def check_density(num_samples: int, fields: Sequence[str], num_members: int, url: str) -> None:
    """Reject names that are not ``key.extension``: a matrix of samples and fields that would be nearly empty.

    Raises:
        TarError: There are more than 256 fields, and less than one cell in 64 would be filled.
    """
    if len(fields) > _FREE_FIELDS and num_samples * len(fields) > _MAX_CELLS_PER_MEMBER * num_members:
        some = ", ".join(repr(field) for field in fields[:3])
        raise TarError(
            f"{url or 'tar'}: {num_samples} samples with {len(fields)} different extensions ({some}, …); "
            "the key ends at the first dot of the file name: rename files that have more dots"
        )
