"""Compare the columns of several files that become one set: JSONL, CSV and Parquet."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, TypeAlias

from shard_tools.make.convert.base.files import SourceFile, open_each
from streaming.common.arguments import some_names
from streaming.errors import ConfigError, DataError
from streaming.storage import Storage

MOST_LOOKED_AT = 64  # files whose first rows are read before the conversion: evenly spaced ones if there are more
HEAD_LINES = 50
Rows: TypeAlias = Iterator[Mapping[str, object]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileColumns:
    """The columns of a file.

    Attributes:
        where: The file, as shown.
        always: Columns of all examined rows, with the kind of their values; "" if unknown.
        sometimes: Columns of some rows only.
    """

    where: str
    always: Mapping[str, str]
    sometimes: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of_rows(cls, where: str, rows: Iterable[Mapping[str, object]]) -> FileColumns | None:
        """Return the columns of a file from its first rows; None: it has no rows."""
        kinds: dict[str, set[str]] = {}
        counts: dict[str, int] = {}
        num_rows = 0
        for row in rows:
            num_rows += 1
            for name, value in row.items():
                counts[name] = counts.get(name, 0) + 1
                if value is not None:
                    kinds.setdefault(name, set()).add(_kind_of(value))
        if not num_rows:
            return None
        always = {name: _only(kinds.get(name, set())) for name, count in counts.items() if count == num_rows}
        return cls(where=where, always=always, sometimes=frozenset(counts.keys() - always.keys()))

    def unlike(self, other: FileColumns) -> str:
        """Describe the columns that only one of two files has, or that differ in kind; "" if there are none."""
        for one, two in ((self, other), (other, self)):
            missing = sorted(one.always.keys() - two.always.keys() - two.sometimes)
            if missing:
                return f"{one.where} has {some_names(missing)}, {two.where} has not"
        for name, kind in self.always.items():
            there = other.always.get(name, "")
            if kind and there and kind != there:
                return f"{name!r} is {kind} in {self.where}, but {there} in {other.where}"
        return ""


def meet_columns(files: Iterable[FileColumns | None], *, allowed: bool) -> None:
    """Refuse files with different columns, or log them if they are ``allowed``.

    Raises:
        ConfigError: Columns differ, and that is not allowed.
    """
    known = [one for one in files if one is not None]
    for other in known[1:]:
        told = known[0].unlike(other)
        if told and not allowed:
            raise ConfigError(
                f"files of unlike columns: {told}. Convert them apart, or take them as they are with --unlike-columns: "
                "samples then lack what their file lacks"
            )
        if told:
            _log.warning("--unlike-columns: %s; samples lack what their file lacks", told)
            return


def meet_heads(
    files: Sequence[SourceFile], storage: Storage, num_threads: int, rows_of: Callable[[SourceFile, BinaryIO], Rows], *,
    allowed: bool,
) -> None:  # fmt: skip
    """Compare the first rows of files with those of the first file; of many files, read evenly spaced ones.

    Args:
        files: The files.
        storage: Their store.
        num_threads: Number of threads that read ahead.
        rows_of: Returns the rows of an open file. Faults in a file are reported when it is converted.
        allowed: See :func:`meet_columns`.

    Raises:
        ConfigError: Columns differ, and that is not allowed.
    """
    some = files[:: -(-len(files) // MOST_LOOKED_AT)] if len(files) > 1 else ()
    heads = []
    with contextlib.closing(open_each(some, storage, num_threads)) as opened:
        for file, stream in opened:
            rows = list[Mapping[str, object]]()
            with contextlib.suppress(DataError):
                rows += itertools.islice(rows_of(file, stream), HEAD_LINES)
            heads.append(FileColumns.of_rows(file.shown_url, rows))
    meet_columns(heads, allowed=allowed)


def _only(kinds: set[str]) -> str:
    return next(iter(kinds)) if len(kinds) == 1 else ""


def _kind_of(value: object) -> str:
    for kind, types in (("boolean", bool), ("number", (int, float)), ("text", str), ("list", list), ("object", dict)):
        if isinstance(value, types):
            return kind
    return type(value).__name__
