"""Find out whether the inputs of a set changed since it was made.

A store that records its reads (:class:`SourceStorage`) gives each input its :class:`SourceIdentity`. The journal of a
set keeps these, and :func:`compared` returns the first input from which the set must be made again.
"""

from __future__ import annotations

import collections
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import crc32c

from streaming.common.arguments import counted
from streaming.common.threads import map_threads
from streaming.errors import DataError, StorageError
from streaming.storage import ChangedError, ObjectInfo, Storage, local_path, redact, scheme_of

EVERYWHERE = -1
"""Number of an input on which every record may depend."""


class ChangedInputError(DataError):
    """An input is changed while it is read, so that no part of it can be left out or taken."""


_PIECE_BYTES = 8 << 20
_OF_FILE = re.compile(r"\d+-(\d+)-\d+")  # the version of a local file, or of a member of an archive
_TICK_NS = 20_000_000  # twice the longest tick of the clock for Linux file times
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """One input of a set, with the values that show whether it changed.

    Attributes:
        name: Its name within the source.
        size_bytes: Its size.
        version: Its version by the store: for a local file the times of its last change and its inode, for an object
        its ETag or version; None: unknown.
        crc32c: Checksum of its bytes; None: they were not read completely, in order.
        number: Number of the input, as in ``Record.origin``; ``EVERYWHERE``: every record may depend on it.
        content: For a shard, the fingerprint of its rows in the chunk table, which names what is in it; None: unknown.
        url: Its location in this run.
    """

    name: str
    size_bytes: int
    version: str | None
    crc32c: int | None = None
    number: int = EVERYWHERE
    content: str | None = None
    url: str = field(default="", compare=False)

    @property
    def place(self) -> tuple[int, str]:
        """The identity of the input across runs."""
        return self.number, self.name

    def is_surely(self, other: SourceIdentity) -> bool:
        """Return whether both have the same bytes by the store's version."""
        return self.size_bytes == other.size_bytes and self.version is not None and self.version == other.version

    def may_be(self, other: SourceIdentity) -> bool:
        """Return whether reading ``other`` can show that both have the same bytes."""
        return self.size_bytes == other.size_bytes and self.crc32c is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedInputs:
    """The inputs that changed since an earlier run.

    Attributes:
        names: Their names.
        first: Number of the first one; None: none changed. Records of earlier inputs are unchanged.
    """

    names: tuple[str, ...] = ()
    first: int | None = None

    def __str__(self) -> str:
        more = f" and {len(self.names) - _SHOWN:,} more" if len(self.names) > _SHOWN else ""
        return ", ".join(self.names[:_SHOWN]) + more


def compared(
    earlier: Iterable[SourceIdentity], now: Iterable[SourceIdentity], checksum: Callable[[SourceIdentity], int | None],
    *, last: int,
) -> ChangedInputs:  # fmt: skip
    """Return the inputs used by an earlier run that changed since.

    Args:
        earlier: The inputs as that run recorded them.
        now: The inputs of this run.
        checksum: Reads an input of this run whose size is the same, but whose version is not known to be.
        last: Number of the last input that the earlier run used.
    """
    known = {one.place: one for one in earlier}
    changed = []
    for one in now:
        before = known.get(one.place)
        if one.number > last or (before is not None and before.is_surely(one)):
            continue
        if before is None or not before.may_be(one) or checksum(one) != before.crc32c:
            changed.append(one)
    return ChangedInputs(
        names=tuple(one.name for one in changed), first=min((one.number for one in changed), default=None)
    )  # fmt: skip


def carried(earlier: Iterable[SourceIdentity], now: Iterable[SourceIdentity]) -> Iterator[SourceIdentity]:
    """Yield the inputs of this run, with the checksums from an earlier run for unchanged ones."""
    known = {one.place: one for one in earlier}
    for one in now:
        before = known.get(one.place)
        same = one.crc32c is None and before is not None and before.is_surely(one)
        yield replace(one, crc32c=before.crc32c) if same and before is not None else one


def differing(earlier: Iterable[SourceIdentity], now: Iterable[SourceIdentity]) -> Iterator[str]:
    """Yield the names of inputs that only one of two runs has, and of those that may have changed."""
    there, here = ({one.name: one for one in some} for some in (earlier, now))
    changed = [name for name in here if name in there and not there[name].is_surely(here[name])]
    for names, what in (
        ([name for name in there if name not in here], "gone"),
        ([name for name in here if name not in there], "new"),
        (changed, "written since"),
    ):
        if names and there:
            yield f"{counted(len(names), 'input')} {what}, such as {names[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """The inputs of a set, and the store from which they are read."""

    inputs: Sequence[SourceIdentity] = ()
    store: Storage = field(default_factory=Storage)

    @property
    def last(self) -> int:
        """Number of the last input; ``EVERYWHERE`` if none has a number of its own."""
        return max((one.number for one in self.inputs), default=EVERYWHERE)

    def check(self, threads: int) -> None:
        """Refuse inputs that changed since they were listed; check those that were not compared during reading.

        Raises:
            DataError: An input changed.
        """
        store = SourceStorage.of(self.store)
        left = store.not_compared(self.inputs)
        collections.deque(map_threads(lambda one: store.check(one.url, one.size_bytes, one.version), left, threads), 0)


class Named(Protocol):
    """A file or an object of a source."""

    @property
    def url(self) -> str:
        """Its location."""

    @property
    def name(self) -> str:
        """Its name within the source."""

    @property
    def size_bytes(self) -> int:
        """Its size."""

    @property
    def version(self) -> str | None:
        """Its version by the store."""


_N = TypeVar("_N", bound=Named)


def origins_of(files: Sequence[Named], storage: Storage, *, number: int | None = None) -> list[SourceIdentity]:
    """Return the identities of files, all with the given number, or numbered in their order."""
    sums = storage.sums if isinstance(storage, SourceStorage) else {}
    return [
        SourceIdentity(
            name=file.name,
            size_bytes=file.size_bytes,
            version=file.version,
            crc32c=sums.get(file.url),
            url=file.url,
            number=place if number is None else number,
        )
        for place, file in enumerate(files)
    ]


def version_of_file(status: os.stat_result) -> str:
    """Return the version of a local file. Programs can set its modification time, but not its change time."""
    return f"{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"


def settle(inputs: Iterable[SourceIdentity]) -> None:
    """Wait until a new change of a local file would get another time: at most 0.02 s, after a very recent change."""
    found = (_OF_FILE.fullmatch(one.version or "") for one in inputs)
    newest = max((int(one[1]) for one in found if one), default=0)
    age_ns = time.time_ns() - newest
    if 0 <= age_ns < _TICK_NS:
        time.sleep((_TICK_NS - age_ns) / 1e9)


class KnownInputs:
    """The inputs of a set to be extended; they are left out of a source.

    Files are known by name; shards with an index are known by content, wherever they lie now.

    Args:
        inputs: The inputs.

    Attributes:
        left_out: Names of inputs that a source holds, too.
        changed: Names of inputs of which a source has another version.
    """

    def __init__(self, inputs: Iterable[SourceIdentity]) -> None:
        self._known = {one.content or one.name: one for one in inputs}
        self.left_out: set[str] = set()
        self.changed: set[str] = set()

    def new(self, files: Sequence[_N], storage: SourceStorage) -> list[_N]:
        """Return the files that are not among them; a file that may have changed is read and compared."""
        return [file for file in files if not self._has(file, storage)]

    def gone(self, now: Iterable[SourceIdentity]) -> list[SourceIdentity]:
        """Return those that a source does not hold any more."""
        here = {one.content or one.name for one in now}
        return [one for key, one in self._known.items() if key not in here]

    def _has(self, file: Named, storage: SourceStorage) -> bool:
        (now,) = origins_of([file], storage)
        return self.has(now, storage)

    def has(self, now: SourceIdentity, storage: SourceStorage | None = None) -> bool:
        """Return whether an input is one of them, by its name; changed inputs are noted.

        ``storage`` computes a checksum if the version does not decide.
        """
        known = self._known.get(now.content or now.name)
        if known is None:
            return False
        same = now.content is not None or known.is_surely(now)
        if not same and storage is not None and known.may_be(now):
            storage.expect([now])
            same = storage.checksum(now) == known.crc32c
        (self.left_out if same else self.changed).add(now.name)
        return True


def is_file(url: str) -> bool:
    """Return whether ``url`` is a path in this machine's file system."""
    return bool(url) and scheme_of(url) == "file"


class SourceStorage(Storage):
    """A store that pins each input to one version, and computes its checksum when it is read. Thread-safe.

    Attributes:
        sums: CRC32C of each URL that was read completely, in order.
        known: Inputs that listings of sources leave out; None: none.
    """

    known: KnownInputs | None = None

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        super().__init__(options)
        self.sums: dict[str, int] = {}
        self._versions: dict[str, tuple[int, str | None]] = {}
        self._running: dict[str, tuple[int, int]] = {}
        self._compared: set[str] = set()
        self._noting = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), super().__reduce__()[1]

    @classmethod
    def of(cls, storage: Storage) -> SourceStorage:
        """Return a store with the options of another; a ``SourceStorage`` itself is returned unchanged."""
        return storage if isinstance(storage, SourceStorage) else cls(*storage.__reduce__()[1])

    def info(self, url: str) -> ObjectInfo:
        """Return size and version; for a local file the version of :func:`version_of_file`."""
        found = super().info(url)
        return replace(found, version=version_of_file(os.stat(local_path(url)))) if is_file(url) else found

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """Yield the objects below ``url``, with the versions of :meth:`info`."""
        for found in super().list(url):
            yield replace(found, version=version_of_file(os.stat(local_path(found.url)))) if is_file(url) else found

    def expect(self, inputs: Iterable[SourceIdentity]) -> None:
        """Refuse from now on to read other versions of these inputs."""
        told = {one.url: (one.size_bytes, one.version) for one in inputs if one.url}
        self._versions = told | self._versions  # the first expectation stays

    def read(self, url: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Any:
        """Return bytes of the expected version.

        Raises:
            DataError: The input was changed meanwhile.
        """
        expected = self._versions.get(url)
        if expected is not None and not is_file(url) and self._pins(url):
            version = expected[1]
        try:
            if version is None:
                data = super().read(url, start, stop)
            else:
                data = super().read(url, start, stop, version=version)
        except ChangedError as error:
            raise changed_meanwhile(url) from error
        self.was_read(url, start, data, is_last=stop is None)
        return data

    def was_read(self, url: str, start: int, data: Any, *, is_last: bool) -> None:
        """Note which bytes of an input were read, and whether its end was; compare the version of a local one.

        Raises:
            DataError: The input was changed meanwhile.
        """
        size_bytes, version = self._versions.get(url, (None, None))
        if version is not None and is_file(url):
            self.check(url, size_bytes, version)
        with self._noting:
            at, crc = (0, 0) if start == 0 else self._running.get(url, (-1, 0))
        if start != at:
            return
        at, crc = at + len(data), crc32c.crc32c(data, crc)
        with self._noting:
            # The checksum covers the bytes from the first one on, without a gap.
            self._running[url] = at, crc
            if is_last or at == size_bytes:
                self.sums[url] = crc
                del self._running[url]
                if version is not None:
                    self._compared.add(url)

    def check(self, url: str, size_bytes: int | None, version: str | None) -> None:
        """Refuse an input that changed.

        Raises:
            DataError: It has another size or version.
        """
        try:
            found = self.info(url)
        except (StorageError, OSError) as error:
            raise changed_meanwhile(url) from error
        if (found.size_bytes, found.version) != (size_bytes, version):
            raise changed_meanwhile(url)

    def checksum(self, one: SourceIdentity) -> int | None:
        """Read a whole input; return its checksum.

        Raises:
            DataError: It was changed meanwhile, or cannot be read.
        """
        if one.url not in self.sums:
            for start in range(0, max(one.size_bytes, 1), _PIECE_BYTES):
                self.read(one.url, start, min(start + _PIECE_BYTES, one.size_bytes))
        return self.sums.get(one.url)

    def not_compared(self, inputs: Iterable[SourceIdentity]) -> Iterator[SourceIdentity]:
        """Yield the inputs that this store has not read completely while comparing their version."""
        for one in inputs:
            if one.url and one.version is not None and not (one.url in self._compared and self._pins(one.url)):
                yield one

    def _pins(self, url: str) -> bool:
        return is_file(url) or self._store.adapter(url).keeps_versions


def changed_meanwhile(url: str) -> ChangedInputError:
    """Return the error for an input that is changed while it is read."""
    return ChangedInputError(
        f"{redact(url)}: it was changed while it was read; run this again when nothing writes to it: what is there of "
        "its old content is made again"
    )
