"""Read zip archives as folders: a store whose URLs may continue inside an archive (``photos.zip!/cat/1.jpg``).

Nothing is unpacked to disk. Sizes in the archive's directory are checked before anything is inflated, and bound it.
"""

from __future__ import annotations

import io
import itertools
import lzma
import stat
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from shard_tools.make.convert.base.files import MEMBER, SourceFile, open_stored
from shard_tools.make.convert.base.identity import SourceIdentity, SourceStorage
from streaming.common.inflate import MAX_GZIP_RATIO
from streaming.errors import DataError, NotFoundError, StorageError
from streaming.shards.tar.passed_over import in_side_folder
from streaming.storage import ObjectInfo, Storage, redact

SUFFIX = ".zip"
_HARMLESS_BYTES = 64 << 20  # inflated size that is accepted whatever the ratio, the same as for .tar.gz
_HEADER_BYTES, _MORE_BYTES = 30, 256  # of a member's header: the fixed part, and room for the variable part
_SCHEME = "zip://"
_MEMBER, _UTF8, _DESCRIBED = b"PK\3\4", 0x800, 0x8  # mark of a member, and flags of its header
_ENDS = (0, 12, 16, 20, 24)  # bytes between a member and the next one: none, or a description of its sizes
_DESCRIPTOR_BYTES = _ENDS[-1] + 4
_END = struct.Struct("<4sHHHHLLH")  # of the directory; beyond 65,534 files or 4 GiB, other records hold the numbers
_LOCATOR, _LONG_END, _MANY = struct.Struct("<4sLQL"), struct.Struct("<4sQHHLLQQQQ"), 0xFFFF
# Exceptions of zipfile for an invalid directory.
_DAMAGE = (
    *(zipfile.BadZipFile, struct.error, zlib.error, lzma.LZMAError, EOFError, OSError, LookupError, OverflowError),
    *(ValueError, NotImplementedError, AttributeError, TypeError, RuntimeError, MemoryError),
)
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    """An archive's size and version, its files by name, and the starts of its members by the directory."""

    size_bytes: int
    version: str | None
    members: Mapping[str, zipfile.ZipInfo]
    begins: frozenset[int]


class ZipStorage(SourceStorage):
    """A store that also reads members of its zip archives. Thread-safe and picklable.

    Args:
        options: Options of the store.
        max_ratio: Maximum ratio by which a member or an archive may inflate.
    """

    def __init__(self, options: Mapping[str, object] | None = None, *, max_ratio: float = MAX_GZIP_RATIO) -> None:
        super().__init__(options)
        self._max_ratio = max_ratio
        self._archives: dict[str, _Archive] = {}
        self._lock = threading.Lock()

    @classmethod
    def over(cls, storage: Storage, max_ratio: float) -> ZipStorage:
        """Return such a store with the options of another."""
        return cls(*storage.__reduce__()[1], max_ratio=max_ratio)

    def __reduce__(self) -> tuple[Any, ...]:
        return _anew, (*super().__reduce__()[1], self._max_ratio)

    def root(self, archive: str) -> str:
        """Return the URL of the folder that an archive holds.

        If all files are in subfolders of a single top folder, that is this folder: ``train.zip`` often holds
        ``train/cat/1.jpg``.

        Raises:
            DataError: It is not a zip archive, or is of an unsupported kind; the message names it and the fault.
        """
        names = [name.split("/") for name in self._opened(archive).members if not in_side_folder(name)]
        top = {parts[0] for parts in names}
        seen = [parts for parts in names if not parts[-1].startswith(".")]
        only = len(top) == 1 and seen and all(len(parts) > 2 for parts in seen)
        return f"{_SCHEME}{archive}!/" + (f"{top.pop()}/" if only else "")

    def info(self, url: str) -> ObjectInfo:
        """Return the size of a member and the version of its archive; for other URLs, the store's answer."""
        if not MEMBER.match(url):
            return super().info(url)
        archive = super().info(_parted(url)[0])
        return replace(archive, url=url, size_bytes=self._member(url).file_size)

    def expect(self, inputs: Iterable[SourceIdentity]) -> None:
        """Refuse from now on to read other versions of these inputs, or of their archives."""
        archives = [
            SourceIdentity(name=url, url=url, size_bytes=one.size_bytes, version=one.version)
            for url, one in self._archives.items()
        ]
        super().expect([*inputs, *archives])

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """Yield the members below a folder of an archive; for other URLs, the store's listing."""
        if not MEMBER.match(url):
            yield from super().list(url)
            return
        archive, prefix = _parted(url)
        version = self._opened(archive).version
        for name, member in sorted(self._opened(archive).members.items()):
            if name.startswith(prefix):
                yield ObjectInfo(url=f"{_SCHEME}{archive}!/{name}", size_bytes=member.file_size, version=version)

    def read(self, url: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Any:
        """Return bytes of a member, whose checksum is compared; for other URLs, the store's bytes.

        Raises:
            DataError: The member is damaged, or contradicts the archive's directory.
        """
        if not MEMBER.match(url):
            return super().read(url, start, stop, version=version)
        archive, _ = _parted(url)
        member = self._member(url)
        try:
            with zipfile.ZipExtFile(io.BytesIO(self._packed(archive, member)), "r", member) as stream:
                content = stream.read()
        except (StorageError, DataError):
            raise
        except _DAMAGE as error:
            raise DataError(
                f"{redact(url)}: the member is damaged ({error}); fetch the archive again, or make it anew"
            ) from error
        if len(content) != member.file_size:
            raise DataError(f"{redact(url)}: expected {member.file_size} bytes, got {len(content)}; it is damaged")
        self.was_read(url, 0, content, is_last=True)
        return content if not start and stop is None else content[start:stop]

    def _pins(self, url: str) -> bool:
        return super()._pins(_parted(url)[0] if MEMBER.match(url) else url)

    def _packed(self, archive: str, member: zipfile.ZipInfo) -> bytes:
        """Return the stored bytes of a member, usually by one request."""
        opened, begin, size = self._opened(archive), member.header_offset, member.compress_size
        guess = begin + _HEADER_BYTES + len(member.orig_filename.encode()) + len(member.extra) + size + _MORE_BYTES
        data = bytes(super().read(archive, begin, min(guess, opened.size_bytes)))
        if len(data) < _HEADER_BYTES or data[:4] != _MEMBER:
            raise zipfile.BadZipFile("no header where the directory says")
        flags, method = struct.unpack("<HH", data[6:10])
        name_bytes, extra_bytes = struct.unpack("<HH", data[26:30])
        first = _HEADER_BYTES + name_bytes + extra_bytes
        if len(data) < first + size + _DESCRIPTOR_BYTES:
            data = bytes(super().read(archive, begin, min(begin + first + size + _MORE_BYTES, opened.size_bytes)))
        name = data[_HEADER_BYTES : _HEADER_BYTES + name_bytes].decode("utf-8" if flags & _UTF8 else "cp437")
        if (name, method) != (member.orig_filename, member.compress_type):
            raise zipfile.BadZipFile(
                f"the file there is {name!r}, packed by method {method}, not what the directory says"
            )
        for at in _ENDS if member.flag_bits & _DESCRIBED else _ENDS[:1]:
            end = first + size + at
            if data[end : end + 4] == _MEMBER and begin + end not in opened.begins:
                raise zipfile.BadZipFile(f"another file follows at byte {begin + end}, which the directory leaves out")
        return data[first : first + size]

    def _member(self, url: str) -> zipfile.ZipInfo:
        archive, name = _parted(url)
        found = self._opened(archive).members.get(name)
        if found is None:
            raise NotFoundError(f"{redact(url)}: no such member")
        return found

    def _opened(self, archive: str) -> _Archive:
        """Return the contents of an archive; its directory is read once."""
        with self._lock:
            # A cached directory has passed all checks.
            if archive not in self._archives:
                info = super().info(archive)
                file = SourceFile(url=info.url, name=archive, size_bytes=info.size_bytes)
                listed = self._directory(file)
                members = _checked(listed, info.size_bytes, archive, self._max_ratio)
                begins = frozenset(member.header_offset for member in listed)
                self._archives[archive] = _Archive(
                    size_bytes=info.size_bytes, version=info.version, members=members, begins=begins
                )  # fmt: skip
            return self._archives[archive]

    def _directory(self, file: SourceFile) -> Sequence[zipfile.ZipInfo]:
        try:
            with open_stored(file, self, unzip=False) as stream, zipfile.ZipFile(stream) as archive:
                listed = archive.infolist()
                _check_count(stream, listed, file.size_bytes, archive.comment)
                return listed
        except (StorageError, DataError):
            raise
        except _DAMAGE as error:
            raise DataError(
                f"{file.shown_url}: not a zip archive, or a damaged one: {error}; fetch it again, or make it anew"
            ) from error


def _check_count(stream: BinaryIO, listed: Sequence[zipfile.ZipInfo], size_bytes: int, comment: bytes) -> None:
    """Compare a directory with the archive: the number of files in its end record, and the first file.

    Raises:
        BadZipFile: The directory leaves files out.
    """
    end = size_bytes - _END.size - len(comment)
    stream.seek(end)
    mark, _, _, here, count, *_ = _END.unpack(stream.read(_END.size))
    if mark != b"PK\5\6" or here != count:
        raise zipfile.BadZipFile("no end of a directory where the archive ends, or an archive of several files")
    if count == _MANY:
        stream.seek(max(0, end - _LOCATOR.size))
        mark, *_ = _LOCATOR.unpack(stream.read(_LOCATOR.size))
        if mark == b"PK\6\7":
            stream.seek(max(0, end - _LOCATOR.size - _LONG_END.size))
            count = _LONG_END.unpack(stream.read(_LONG_END.size))[7]
    if count != len(listed):
        raise zipfile.BadZipFile(f"its directory lists {len(listed)} files, and says that there are {count}")
    stream.seek(0)
    if stream.read(4) == _MEMBER and all(member.header_offset for member in listed):
        raise zipfile.BadZipFile("it begins with a file that its directory leaves out")


def _anew(options: Mapping[str, object], max_ratio: float) -> ZipStorage:
    return ZipStorage(options, max_ratio=max_ratio)


def _parted(url: str) -> tuple[str, str]:
    archive, name = MEMBER.findall(url)[0]
    return archive, name


def _checked(
    members: Sequence[zipfile.ZipInfo], archive_bytes: int, archive: str, max_ratio: float
) -> dict[str, zipfile.ZipInfo]:
    """Return the files of an archive by name.

    Raises:
        DataError: A name leads out of the archive or occurs twice, or a member is encrypted, is a link, has an unknown
        compression, shares bytes with another, or inflates to more than allowed.
    """
    files: dict[str, zipfile.ZipInfo] = {}
    inflated = 0
    for member in members:
        name = member.filename
        why = _why_refused(member) or ("the name is there twice" if name in files else "")
        if why:
            raise DataError(f"{redact(archive)}, member {name!r}: {why}; unpack the archive, and convert the folder")
        inflated += member.file_size
        _bound(member.file_size, member.compress_size, max_ratio, f"{redact(archive)}, member {name!r}")
        if not name.endswith("/"):
            files[name] = member
    _bound(inflated, archive_bytes, max_ratio, redact(archive))
    placed = sorted(members, key=lambda member: member.header_offset)
    for one, other in itertools.pairwise(placed):
        if one.header_offset + _HEADER_BYTES + one.compress_size > other.header_offset:
            raise DataError(
                f"{redact(archive)}, members {one.filename!r} and {other.filename!r}: they overlap, as in a "
                "decompression bomb; make the archive anew"
            )
    return files


def _why_refused(member: zipfile.ZipInfo) -> str:
    name, mode = member.filename, member.external_attr >> 16
    if not name.strip("/"):
        return "it has no name"
    if name.startswith("/") or "\\" in name or ".." in name.split("/") or name[1:3] == ":/":
        return "the name leads out of the archive"
    if member.flag_bits & 0x1:
        return "it is encrypted"
    if stat.S_ISLNK(mode):
        return "it is a symbolic link"
    return "" if member.compress_type in _METHODS else f"it is packed by method {member.compress_type}, not read here"


def _bound(num_bytes: int, packed_bytes: int, max_ratio: float, what: str) -> None:
    if num_bytes > max(_HARMLESS_BYTES, max_ratio * packed_bytes):
        raise DataError(
            f"{what}: {packed_bytes} bytes inflate to {num_bytes}, more than {max_ratio:g} times as many: a "
            "decompression bomb? If it is meant, say --max-gzip-ratio, or unpack the archive first"
        )


def is_zip(spec: str) -> bool:
    """Return whether a user's source is a zip archive, by its name."""
    return spec.lower().endswith(SUFFIX) and not MEMBER.match(spec)
