"""Find and read the files of a source, in any store."""

from __future__ import annotations

import bz2
import contextlib
import fnmatch
import gzip
import hashlib
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa

from shard_tools.make.convert.base.identity import (
    EVERYWHERE,
    Origins,
    SourceStorage,
    origins_of,
    version_of_file,
)
from shard_tools.make.convert.base.records import FolderWalks, Skipped, SourceOptions
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, NotFoundError
from streaming.shards.catalog.urls import expand_urls
from streaming.shards.tar.passed_over import in_side_folder
from streaming.storage import Storage, local_path, redact, scheme_of, split_query, split_url

_BLOCK_BYTES = 4 << 20
_WILDCARD = re.compile(r"[*?\[]")
_FOR_READERS = re.compile(  # names of files that programs and people put beside data
    r"(read_?me|licen[cs]e|copying|notice|authors|citation|changelog|contributing|attribution|_success|classes"
    r"|synset_words|checksums?|(md5|sha\d+)(sums?)?|index\.html?|thumbs\.db|desktop\.ini|\d+_stats)(\.[^/]*)?|[^/]*\.(md|rst)",
    re.IGNORECASE,
)
MEMBER = re.compile(r"zip://(.+?\.zip)!/(.*)", re.IGNORECASE | re.DOTALL)
"""The URL of a member of a zip archive: the archive, and the member's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a source: its location, its name within the source, its size, and its version."""

    url: str
    name: str
    size_bytes: int
    version: str | None = None

    @property
    def shown_url(self) -> str:
        """The URL for messages."""
        return redact(self.url)


class FileSource:
    """Base class for sources of files whose records can be counted only by reading them.

    Attributes:
        in_order: Whether records come in the order of the files.
        common: Files on which every record may depend.
    """

    in_order = True
    common: Sequence[SourceFile] = ()
    _beside: tuple[Skipped, ...] = ()

    def __init__(self, kind: str, files: Sequence[SourceFile], storage: Storage) -> None:
        self.kind = kind
        self.files = files
        self._storage = storage

    @property
    def num_records(self) -> int | None:
        """Not known before reading."""
        return None

    @property
    def num_bytes(self) -> int:
        """Size of the files as stored."""
        return sum(file.size_bytes for file in self.files)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What lies beside the files, and is not read."""
        return self._beside

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """Not known before reading."""
        return None

    def identity(self) -> dict[str, object]:
        """Return the names of the files, as one digest."""
        return identity_of(self.kind, [file.name for file in self.files])

    def origins(self) -> Origins:
        """Return the files."""
        common = origins_of(self.common, self._storage, number=EVERYWHERE)
        own = origins_of(self.files, self._storage, number=None if self.in_order else EVERYWHERE)
        return Origins(inputs=common + own, store=self._storage)


def table_files(
    kind: str, spec: str, storage: Storage, suffixes: tuple[str, ...], options: SourceOptions
) -> tuple[list[SourceFile], tuple[Skipped, ...]]:
    """Return the files of a layout that has its own name extensions, and the files beside them.

    That is lost if nobody has said which layout is meant.

    Raises:
        NotFoundError: There is nothing.
    """
    others: list[SourceFile] = []
    found = find_files(spec, storage, suffixes, exclude=options.exclude, more=options.more, others=others)
    reason = f"not taken for {kind}, by its name"
    return found, tuple(
        Skipped(path=file.name, reason=reason, is_lost=options.guessed and not is_aside(file.name)) for file in others
    )


def is_aside(name: str) -> bool:
    """Tell whether a name is that of no data: hidden, beside files by a system, or notes for readers."""
    hidden = name.startswith(".") or "/." in name
    return hidden or in_side_folder(name) or _FOR_READERS.fullmatch(name.rpartition("/")[2]) is not None


def identity_of(kind: str, lines: Sequence[str]) -> dict[str, object]:
    """Return a digest that identifies a source, from one line per file."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return {"kind": kind, "num_files": len(lines), "sha256_of_names": digest.hexdigest()}


def is_local(url: str) -> bool:
    """Return whether ``url`` is a path in this machine's file system."""
    return scheme_of(url) == "file"


def is_folder(url: str) -> bool:
    """Return whether ``url`` is a folder in this machine's file system."""
    return is_local(url) and os.path.isdir(local_path(url))


def find_files(
    spec: str,
    storage: Storage,
    suffixes: tuple[str, ...] | None = None,
    *,
    exclude: str | None = None,
    more: Sequence[str] = (),
    others: list[SourceFile] | None = None,
) -> list[SourceFile]:
    """Return the files that ``spec`` names, sorted by name within each of its parts.

    Args:
        spec: A file, a folder or prefix ending in ``/``, a pattern with ``*``, or a brace list of these.
        storage: The store.
        suffixes: In folders and prefixes, take only names with these endings (compared in lower case).
        exclude: A folder or prefix to leave out.
        more: Further such specs, whose files follow.
        others: Gets the files of folders and prefixes whose names end otherwise.

    Raises:
        NotFoundError: No file is found, or none at one of several specs.
        ConfigError: Two specs name the same file.
    """
    if more:
        each = (find_files(one, storage, suffixes, exclude=exclude, others=others) for one in (spec, *more))
        return once([file for found in each for file in found])
    literal = is_local(spec) and os.path.exists(local_path(spec))
    parts = expand_urls(spec, storage) if "{" in spec and not literal else [spec]
    aside: list[SourceFile] = []
    found = _new([file for part in parts for file in _find_part(part, storage, suffixes, exclude, aside)], storage)
    if others is not None:
        others += aside
    if not found:
        wanted = f" ending in {', '.join(suffixes)}" if suffixes else ""
        raise NotFoundError(f"{redact(spec)}: nothing found{wanted}; check the path, or name the layout with --from")
    return found


def _new(files: list[SourceFile], storage: Storage) -> list[SourceFile]:
    """Leave out the files that the set already has, if the source is appended to one."""
    known = storage.known if isinstance(storage, SourceStorage) else None
    return files if known is None or not isinstance(storage, SourceStorage) else known.new(files, storage)


def once(files: list[SourceFile]) -> list[SourceFile]:
    """Refuse a file that two of several sources name: its records would occur twice."""
    seen = {file.url for file in files}
    for file in files:
        if file.url not in seen:
            raise ConfigError(f"{file.shown_url}: named twice by the sources; name each file once")
        seen.remove(file.url)
    return files


def walked(url: str, exclude: str | None, known: FolderWalks) -> tuple[list[SourceFile], list[Skipped]]:
    """Return the result of :func:`walk_folder`, which is cached in ``known`` for the options of one command."""
    place = (local_path(url), exclude)
    if place not in known:
        known[place] = walk_folder(*place)
    found: tuple[list[SourceFile], list[Skipped]] = known[place]
    return found


def list_files(
    specs: Sequence[str], storage: Storage, exclude: str | None, known: FolderWalks | None = None
) -> tuple[list[SourceFile], list[Skipped]]:
    """Return all files that are named, or are in the named folders or prefixes, and entries that cannot be read.

    Names of files are relative to the folder that holds them, or to the fixed part of a pattern.

    ``known`` caches walks, if folders are listed more than once.

    Raises:
        NotFoundError: No file is found at one of ``specs``.
        ConfigError: Two of them name the same file.
    """
    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    for spec in specs:
        if is_folder(spec):
            found, left_out = walked(spec, exclude, {} if known is None else known)
            files += _new(found, storage)
            skipped += left_out
        elif is_local(spec) or spec.endswith("/") or _WILDCARD.search(split_query(spec)[0]):
            files += find_files(spec, storage, exclude=exclude)
        else:
            with contextlib.suppress(NotFoundError):
                files += find_files(spec + "/", storage, exclude=exclude)
                continue
            files += find_files(spec, storage, exclude=exclude)
    return once(files), skipped


def places(specs: Sequence[str], storage: Storage, suffixes: tuple[str, ...]) -> list[str]:
    """Expand patterns in ``specs`` that name folders (they end in ``/``), or files with these endings.

    Raises:
        NotFoundError: A pattern names nothing.
    """
    found: list[str] = []
    for spec in specs:
        wildcard = _WILDCARD.search(split_query(spec)[0])
        if not wildcard or not spec.endswith(("/", *suffixes)) or (is_local(spec) and os.path.exists(local_path(spec))):
            found.append(spec)
            continue
        base = spec[: spec.rfind("/", 0, wildcard.start()) + 1] or "./"
        depth = spec.removeprefix(base).count("/")
        pattern = spec.removeprefix(base).rstrip("/")
        names = {
            "/".join(parts[:depth]) for file in _list(base, storage, None) if len(parts := file.name.split("/")) > depth
        }
        if not spec.endswith("/"):
            names = {file.name for file in _list(base, storage, None)}
        below = sorted(name for name in names if name and fnmatch.fnmatchcase(name, pattern))
        if not below:
            raise NotFoundError(f"{redact(spec)}: the pattern matches nothing; check it, and quote it for the shell")
        found += [base + name + ("/" if spec.endswith("/") else "") for name in below]
    return found


def _find_part(
    part: str, storage: Storage, suffixes: tuple[str, ...] | None, exclude: str | None, others: list[SourceFile]
) -> Iterator[SourceFile]:
    wildcard = None if MEMBER.match(part) else _WILDCARD.search(split_query(part)[0])
    if wildcard and not (is_local(part) and os.path.exists(local_path(part))):
        base = part[: part.rfind("/", 0, wildcard.start()) + 1] or "./"
        pattern = part.removeprefix(base)
        for file in _list(base, storage, exclude):
            if fnmatch.fnmatchcase(file.name, pattern):
                yield file
    elif part.endswith("/") or is_folder(part):
        for file in _list(part.rstrip("/") + "/", storage, exclude):
            if suffixes is None or file.name.lower().endswith(suffixes):
                yield file
            else:
                others.append(file)
    else:
        yield from _file_or_prefix(part, storage, suffixes, exclude, others)


def _file_or_prefix(
    part: str, storage: Storage, suffixes: tuple[str, ...] | None, exclude: str | None, others: list[SourceFile]
) -> Iterator[SourceFile]:
    try:
        info = storage.info(part)
    except NotFoundError:
        if is_local(part):
            raise
        below = list(_find_part(part + "/", storage, suffixes, exclude, others))
        if not below:
            raise
        yield from below
        return
    yield SourceFile(url=info.url, name=split_url(part)[1], size_bytes=info.size_bytes, version=info.version)


def _list(base: str, storage: Storage, exclude: str | None) -> Iterator[SourceFile]:
    if is_local(base):
        files, _ = walk_folder(local_path(base), exclude)
        yield from (file for file in sorted(files, key=lambda file: file.name) if "_shardstream/" not in file.name)
        return
    for info in storage.list(base):
        name = info.url.removeprefix(base)
        if "_shardstream/" not in name and not (exclude and info.url.startswith(exclude.rstrip("/") + "/")):
            yield SourceFile(url=info.url, name=name, size_bytes=info.size_bytes, version=info.version)


def walk_folder(root: str, exclude: str | None = None) -> tuple[list[SourceFile], list[Skipped]]:
    """Return the files under ``root``, and entries that are not readable files.

    Links to folders are not followed, nor are links to files outside ``root``, and the folder ``exclude`` is left out
    silently.

    Raises:
        NotFoundError: ``root`` is not a folder.
    """
    if not os.path.isdir(root):
        raise NotFoundError(f"{root}: no such folder")
    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    inside = os.path.join(os.path.realpath(root), "")
    hidden = os.path.realpath(local_path(exclude)) if exclude and is_local(exclude) else None
    folders = [("", root)]
    while folders:
        prefix, folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                relative = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if hidden is None or os.path.realpath(entry.path) != hidden:
                        folders.append((relative + "/", entry.path))
                    continue
                reason = _why_not_read(entry, relative, inside)
                if reason is None:
                    status = entry.stat()
                    size_bytes, version = status.st_size, version_of_file(status)
                    files.append(SourceFile(url=entry.path, name=relative, size_bytes=size_bytes, version=version))
                else:
                    is_lost = not entry.name.startswith(".") and "/." not in f"/{prefix}"
                    path = relative.encode(errors="backslashreplace").decode()
                    skipped.append(Skipped(path=path, reason=reason, is_lost=is_lost))
    return files, skipped


def _why_not_read(entry: os.DirEntry[str], relative: str, inside: str) -> str | None:
    linked = entry.is_symlink()
    if linked and os.path.isdir(entry.path):
        return "symbolic link to a folder"
    try:
        relative.encode()
    except UnicodeEncodeError:
        return "the name is not UTF-8"
    if linked and not os.path.realpath(entry.path).startswith(inside):
        return "symbolic link out of the source folder"
    return None if entry.is_file() else "not a regular file"


def read_file(file: SourceFile, storage: Storage) -> bytes:
    """Return a whole file; a local one is read in a few calls.

    Raises:
        StorageError: It cannot be read.
    """
    if is_local(file.url):
        with contextlib.suppress(OSError):
            data = _read_local(local_path(file.url), file.size_bytes)
            if isinstance(storage, SourceStorage):
                storage.was_read(file.url, 0, data, is_last=True)
            return data
    return bytes(storage.read(file.url))  # reports faults of a local file


def _read_local(path: str, size_bytes: int) -> bytes:
    """Read a file in one call if it has the size that was listed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, size_bytes + 1)
        if len(data) == size_bytes:
            return data
        pieces = [data]
        while piece := os.read(descriptor, _BLOCK_BYTES):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


class StoredFile(io.RawIOBase):
    """A stored object as a seekable binary file. Not thread-safe; holds no connection and no descriptor."""

    def __init__(self, url: str, size_bytes: int, storage: Storage) -> None:
        super().__init__()
        self._url, self._size_bytes, self._storage, self._position = url, size_bytes, storage, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: object) -> int:
        """Fill ``buffer`` as far as the object goes."""
        out = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        stop = min(self._position + len(out), self._size_bytes)
        count = max(0, stop - self._position)
        if count:
            out[:count] = memoryview(self._storage.read(self._url, self._position, stop)).cast("B")
            self._position = stop
        return count


def open_each(
    files: Sequence[SourceFile], storage: Storage, num_threads: int, *, unzip: bool = True
) -> Generator[tuple[SourceFile, BinaryIO], None, None]:
    """Open files one after the other; unless ``unzip`` is False, what ends as :data:`PACKED` is decompressed.

    In a store, their first blocks (often all of a file) are prefetched on threads.
    """

    def opened(file: SourceFile) -> tuple[SourceFile, BinaryIO]:
        return file, open_stored(file, storage, unzip=unzip, fetch=not is_local(file.url))

    if all(is_local(file.url) for file in files):
        num_threads = 1
    with contextlib.closing(map_threads(opened, files, num_threads)) as each:
        for file, stream in each:
            with stream:
                yield file, stream


def open_stored(file: SourceFile, storage: Storage, *, unzip: bool = True, fetch: bool = False) -> BinaryIO:
    """Return a buffered reader of ``file``; what ends as :data:`PACKED` is decompressed. The caller closes it.

    Args:
        file: The file.
        storage: The store that holds it.
        unzip: Decompress it.
        fetch: Read its first block now.
    """
    reader = io.BufferedReader(StoredFile(file.url, file.size_bytes, storage), _BLOCK_BYTES)
    if fetch:
        reader.peek(1)
    unpack = next((one for end, one in _UNPACK.items() if file.name.lower().endswith(end)), None)
    return cast("BinaryIO", reader if unpack is None or not unzip else unpack(reader))


def _unzstd(reader: Any) -> Any:
    unpacked = pa.CompressedInputStream(pa.PythonFile(reader, mode="r"), "zstd")
    return io.BufferedReader(unpacked, _BLOCK_BYTES)


_UNPACK: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda reader: gzip.GzipFile(fileobj=reader, mode="rb"),
    ".zst": _unzstd,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
PACKED = tuple(_UNPACK)
"""How names of compressed files end that :func:`open_stored` decompresses."""
DAMAGED = (gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading them raises if they are damaged, besides EOFError and OSError."""
