"""Read the files that records name, below one folder: what data says leads nowhere else, and to no server.

A name is a path below the folder. Names that lead out of it, by ``..``, as absolute paths or through links, are
refused, and so are URLs: nobody fetches what data asks for.
"""

from __future__ import annotations

import base64
import binascii
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from shard_tools.make.convert.base.files import is_local
from shard_tools.make.convert.base.records import Source
from shard_tools.make.tokens.messages import RejectedError
from streaming.common.arguments import counted
from streaming.errors import ConfigError, NotFoundError
from streaming.shards.catalog.lines import MAX_LINE_BYTES
from streaming.storage import Storage, join_url, local_path, redact, scheme_of, split_url

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,40}):")
_DATA = re.compile(r"data:([^,;]*(?:;[^,;=]+=[^,;]*)*)(;base64)?,", re.IGNORECASE)
_OF_SERVERS = re.compile(r"[%?#\\]")  # a server may read these in a path as something else
_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesBeside:
    """The folder of the files that records name.

    Attributes:
        storage: The store.
        folder: The folder that the user names; None: that of the file which holds the record.
        folders: Folders of the inputs of the source, by their numbers.
    """

    storage: Storage
    folder: str | None = None
    folders: Mapping[int, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: Source, storage: Storage, folder: str | None) -> FilesBeside:
        """Return the files beside those of a source, or in ``folder``."""
        found = defaultdict[int, set[str]](set)
        for one in reader.origins().inputs:
            found[one.number].add(split_url(one.url)[0] or ".")
        return cls(storage=storage, folder=folder, folders={number: frozenset(some) for number, some in found.items()})

    def read(self, name: str, origin: int) -> bytes:
        """Return the content of a file.

        Args:
            name: Its path below the folder, as the data has it; or a ``data:`` URL with the content itself.
            origin: Number of the input that names it.

        Raises:
            RejectedError: There is no such file, or the name leads out of the folder.
        """
        if name[:5].lower() == "data:":
            return _of_data_url(name)
        folder = self._folder(origin)
        return self._local(folder, name) if is_local(folder) else self._stored(folder, name)

    def _folder(self, origin: int) -> str:
        if self.folder is not None:
            return self.folder
        found = self.folders.get(origin) or frozenset[str]().union(*self.folders.values())
        if len(found) > 1:  # records that are shuffled come from any input
            raise ConfigError(
                f"the files that messages name may lie in any of {counted(len(found), 'folder')} of inputs, such as "
                f"{redact(min(found))}; name the folder of all with --image-folder"
            )
        return next(iter(found), ".")

    def _local(self, folder: str, name: str) -> bytes:
        path = _below(name, is_absolute_allowed=True)
        root = os.path.realpath(local_path(folder))
        found = os.path.realpath(os.path.join(root, path))
        if not found.startswith(os.path.join(root, "")):
            raise _refused(name, "it leads out of the folder of the files")
        if not os.path.isfile(found):
            raise RejectedError("missing file", f"{_shown(name)}: no such file in {redact(folder)}")
        if os.path.getsize(found) > MAX_LINE_BYTES:
            raise RejectedError("too large", f"{_shown(name)}: more than {MAX_LINE_BYTES:,} bytes")
        return bytes(self.storage.read(found))

    def _stored(self, folder: str, name: str) -> bytes:
        path = _below(name, is_absolute_allowed=False)
        if "::" in path or (scheme_of(folder) in {"http", "https"} and _OF_SERVERS.search(path)):
            raise _refused(name, "a store may read it as another place")
        try:
            return bytes(self.storage.read(join_url(folder, path)))
        except NotFoundError as error:
            raise RejectedError("missing file", f"{_shown(name)}: no such file in {redact(folder)}") from error


def _below(name: str, *, is_absolute_allowed: bool) -> str:
    """Return a path without ``.`` and ``..``.

    Raises:
        RejectedError: It is a URL, or leads up.
    """
    scheme = _URL.match(name)
    if scheme is not None:
        raise _refused(
            name, f"a {scheme[1].lower()} URL, and nothing is fetched that data names; download such files first, and "
            "name them by paths"
        )  # fmt: skip
    path = posixpath.normpath(name) if name else ""
    if not path.strip() or "\0" in path or path == ".." or path.startswith("../"):
        raise _refused(name, "it leads out of the folder of the files")
    if path.startswith("/") and not is_absolute_allowed:
        raise _refused(name, "an absolute path, which is none below the folder of the files")
    return path


def _refused(name: str, why: str) -> RejectedError:
    return RejectedError("refused path", f"{_shown(name)}: {why}")


def _shown(name: str) -> str:
    shown = redact(name)
    return repr(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…")


def _of_data_url(url: str) -> bytes:
    """Return the content of a ``data:`` URL (RFC 2397).

    Raises:
        RejectedError: It is none.
    """
    found = _DATA.match(url)
    if found is None:
        raise RejectedError("damaged data", f"{_shown(url)}: not a data URL")
    body = url[found.end() :]
    return of_base64(body) if found[2] else unquote_to_bytes(body)


def of_base64(text: str) -> bytes:
    """Return the bytes of base64.

    Raises:
        RejectedError: It is none.
    """
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RejectedError("damaged data", f"{text[:_SHOWN]!r}: not base64: {error}") from error
