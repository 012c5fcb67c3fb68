"""Inputs of a function: any sequence, a file of lines, or a set of samples."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, Protocol, overload

import numpy as np

from shard_tools.change.functions.produce import Given, ReadHere
from shard_tools.change.functions.set_inputs import SetInputs, opened
from shard_tools.make.convert.base.files import SourceFile, find_files, is_local, open_each
from shard_tools.make.convert.base.identity import (
    EVERYWHERE,
    KnownInputs,
    Origins,
    SourceStorage,
    origins_of,
    version_of_file,
)
from shard_tools.make.convert.lines import SUFFIXES, read_lines
from shard_tools.running.engine import Shared
from streaming.common.identities import digest_of
from streaming.errors import ConfigError, DataError
from streaming.storage import local_path, redact

_SHOWN_CHARACTERS = 200
_LONGEST_PATH = 4096
_OBJECTS = np.dtype(object)
_KINDS_OF_NAMES = "USO"  # NumPy kinds of strings, bytes and objects; numbers name no file


class Inputs(Protocol):
    """Numbered inputs, as seen by the process that writes."""

    def __len__(self) -> int: ...

    def identity(self) -> dict[str, object]:
        """Return JSON-serializable facts that identify the inputs; a run continues only if they are equal."""

    def origins(self) -> Origins:
        """Return the files that the inputs name or come from, each with the number of its input."""

    def new_to(self, known: KnownInputs) -> Inputs:
        """Return the inputs that do not come from what is known."""

    def part(self, start: int, stop: int) -> Any:
        """Return a picklable description of inputs ``[start, stop)``, for :attr:`read`."""

    def describe(self, number: int) -> str:
        """Name an input for errors."""

    @property
    def shared(self) -> Shared:
        """Files that processes on other machines must be able to read."""

    @property
    def read(self) -> Callable[[Any], Iterator[Given]]:
        """A picklable function that yields the inputs of a part, in the worker process."""


class FileLines(Sequence[Any]):
    """The lines of text files as inputs: text, or JSON values (``.jsonl``, ``.ndjson``); blank lines are skipped.

    ::

        optimize(fetch, lines("urls.txt"), "s3://bucket/train/")

    Files may end in ``.gz`` or ``.zst``. They are read on construction, and kept in memory.

    Args:
        path: A file, folder, pattern or URL.
        storage_options: Options of its store.

    Raises:
        NotFoundError: There is no such file.
        DataError: A line is not UTF-8, or not JSON.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None
    ) -> None:  # fmt: skip
        storage, sha = SourceStorage(storage_options), hashlib.sha256()
        self._values: list[Any] = []
        self._firsts: list[tuple[int, str]] = []
        self._numbers: list[int] = []
        files = find_files(os.fspath(path), storage)
        storage.expect(origins_of(files, storage))
        with contextlib.closing(open_each(files, storage, 1)) as opened:
            for file, stream in opened:
                self._firsts.append((len(self._values), file.shown_url))
                parse = json.loads if file.name.lower().endswith(SUFFIXES["jsonl"]) else str
                for number, line in enumerate(read_lines(stream, file.shown_url), 1):
                    sha.update(line)
                    if line.strip():
                        self._values.append(_parsed(line, parse, f"{file.shown_url}:{number}"))
                        self._numbers.append(number)
        self._sha256 = sha.hexdigest()
        self._origins = Origins(inputs=origins_of(files, storage, number=EVERYWHERE), store=storage)

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> list[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        """Return a value, or a list of them."""
        return self._values[number]

    def identity(self) -> dict[str, object]:
        """Return the number of lines and a digest of the files."""
        return {"kind": "lines", "num_inputs": len(self), "sha256": self._sha256}

    def origins(self) -> Origins:
        """Return the files; every input depends on each of them."""
        return self._origins

    def where(self, number: int) -> str:
        """Return the file and line of a value."""
        url = [shown for first, shown in self._firsts if first <= number][-1]
        return f"{url}:{self._numbers[number]}"


def _parsed(line: bytes, parse: Callable[[str], Any], where: str) -> Any:
    try:
        return parse(line.decode().rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {error}; correct the line") from error


def lines(path: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None) -> FileLines:
    """Return the lines of text files, or the values of JSON lines, as inputs of ``optimize``: :class:`FileLines`."""
    return FileLines(path, storage_options=storage_options)


def as_inputs(inputs: Any, storage_options: Mapping[str, object] | None) -> Inputs:
    """Return ``inputs`` of any kind that ``optimize`` takes as an ``Inputs``.

    Raises:
        ConfigError: They are of another kind.
        NotFoundError: There is no such file, or no such set.
    """
    if isinstance(inputs, (str, os.PathLike)):
        path = os.fspath(inputs)
        if path.lower().endswith((*SUFFIXES["text"], *SUFFIXES["jsonl"])):
            inputs = FileLines(path, storage_options=storage_options)
        else:
            return opened(path, storage_options)
    if isinstance(getattr(inputs, "fingerprint", None), str):
        return SetInputs(inputs)
    if isinstance(inputs, (Mapping, bytes, bytearray, set, frozenset)) or not (
        hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")
    ):
        raise ConfigError(
            f"inputs: expected a sequence, a file of lines or a set of samples, got a {type(inputs).__name__}, which "
            "has no order that another run could continue in; pass list(inputs)"
        )
    return ListInputs(inputs)


class ListInputs:
    """Inputs of a sequence, sent to the worker processes."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.read: Callable[[Any], Iterator[Given]] = ReadHere()
        self.shared: Shared = ()

    def __len__(self) -> int:
        return len(self._values)

    def identity(self) -> dict[str, object]:
        """Return the number of inputs and a digest of their values."""
        if isinstance(self._values, FileLines):
            return self._values.identity()
        values = self._values
        if isinstance(values, range):
            return {"kind": "range", "num_inputs": len(values), "of": str(values)}
        content = values if isinstance(values, np.ndarray) else list(values)
        return {"kind": "list", "num_inputs": len(values), "digest": digest_of(content)}

    def origins(self) -> Origins:
        """Return the local files that inputs name, directly or in containers at any depth; and files of lines.

        Objects of other stores are not tracked: such an input is only its URL.
        """
        return self._origins

    @cached_property
    def _origins(self) -> Origins:  # cached: the files' versions from before the first one is read
        found = [*self._values.origins().inputs] if isinstance(self._values, FileLines) else []
        store = SourceStorage()
        if not isinstance(self._values, range) and getattr(self._values, "dtype", _OBJECTS).kind in _KINDS_OF_NAMES:
            for number in range(len(self)):
                found += origins_of([*_files_in(self._values[number])], store, number=number)
        return Origins(inputs=found, store=store)

    def new_to(self, known: KnownInputs) -> ListInputs:
        """Return the inputs that name a file which is not known; those that name no file are new, too."""
        numbered = [one for one in self.origins().inputs if one.number != EVERYWHERE]
        new = {one.number for one in numbered if not known.has(one)}
        old = {one.number for one in numbered} - new
        if not old:
            return self
        return ListInputs([self._values[number] for number in range(len(self)) if number not in old])

    def part(self, start: int, stop: int) -> list[Any]:
        """Return inputs ``[start, stop)``."""
        return [self._values[number] for number in range(start, stop)]

    def describe(self, number: int) -> str:
        """Return the input's number and value, or its place in the file of lines."""
        if isinstance(self._values, FileLines):
            return self._values.where(number)
        value = self._values[number]
        shown = value if isinstance(value, str) else reprlib.repr(value)
        return f"input {number} ({redact(shown[:_SHOWN_CHARACTERS])})"


def _files_in(value: Any) -> Iterator[SourceFile]:
    """Yield each local file that an input names, at any depth, once."""
    for name in dict.fromkeys(_names_in(value)):
        try:
            is_path = 0 < len(name) <= _LONGEST_PATH and is_local(name)
            status = os.stat(local_path(name)) if is_path else None
        except (OSError, ValueError):  # not a file
            continue
        if status is not None and stat.S_ISREG(status.st_mode):
            yield SourceFile(url=_noted(name), name=name, size_bytes=status.st_size, version=version_of_file(status))


def _noted(name: str) -> str:
    """Return the path of a file, checked to be one that the list of inputs can hold.

    Raises:
        ConfigError: It is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"inputs: the name of the file {os.fsencode(name)!r} is not UTF-8, so that its changes cannot be noted; "
            "rename the file"
        ) from error
    return name


def _names_in(value: Any) -> Iterator[str]:
    """Yield each string that may be a path, in the same order in every process."""
    seen: set[int] = set()  # containers may hold themselves
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, (str, bytes, os.PathLike)):
            yield os.fsdecode(part)
        elif id(part) not in seen:
            inner = _parts_of(part)
            if inner:
                seen.add(id(part))
                left += reversed(inner)


def _parts_of(value: Any) -> Sequence[Any]:
    """Return the elements of a container that may name files; () for any other value."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)  # the order of strings in a set differs between processes
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype.kind in _KINDS_OF_NAMES else ()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name, None) for one in fields(value)]
    return ()
