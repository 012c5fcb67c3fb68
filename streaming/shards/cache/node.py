"""Deliver a range of bytes from the cache or from the store; each range is fetched once per node."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from os import PathLike

from streaming.common.arguments import checked_path, format_bytes, parse_bytes
from streaming.common.counters import Metrics
from streaming.errors import ConfigError
from streaming.shards.cache.entry import LookupResult, read_entry, write_entry
from streaming.shards.cache.key import EntryKey
from streaming.shards.cache.paths import CachePaths
from streaming.shards.cache.space import PartFile, Space
from streaming.storage import Checked, Waiting, crc_of, try_lock

RETRY_AFTER_S = 60.0
"""Time without writes after a disk error: long compared with one failed call, short compared with an epoch."""
WAIT_S = 30.0
"""Time to wait for another process's fetch: the read time-out of a request, after which the other has stalled."""

_log = logging.getLogger(__name__)


class NodeCache:
    """Byte ranges of objects, kept in a directory that all ranks and replicas of a node share.

    The first process that misses fetches; the others wait for the result. Entries are published whole by renaming,
    checked by length and CRC32C at every read, and evicted least recently used first. The directory may be lost,
    damaged, full, read-only or deleted at any moment, and any process killed: readers then get their bytes from the
    store, with one warning per process. Disk errors never raise here.

    Thread-safe, picklable (the copy counts in metrics of its own), safe to fork, and cheap to make: nothing is touched
    before the first read, and no file stays open between calls, so there is nothing to close.

    Metrics: ``cache_hits``, ``cache_hit_bytes``, ``cache_misses``, ``cache_miss_bytes``, ``cache_wait_s`` (for
    another's fetch), ``cache_wait_timeouts``, ``cache_write_s``, ``cache_damaged`` (entries found damaged),
    ``cache_not_stored`` (fetched, but not kept), ``cache_errors``, ``cache_evictions``, ``cache_evicted_bytes``.

    Args:
        directory: A directory on a local disk or tmpfs; created if necessary. Only our own subdirectory is used.
        limit_bytes: Total size limit of the files, in whole blocks.
        metrics: Counts hits, misses, waits and errors.
        wait_s: Seconds to wait for another's fetch of the same range before fetching it too.

    Raises:
        ConfigError: The limit or the wait is not positive.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit_bytes: int,
        *,
        metrics: Metrics | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        if limit_bytes <= 0 or wait_s <= 0:
            raise ConfigError(f"cache: limit_bytes and wait_s must be positive, got {limit_bytes} and {wait_s}")
        self._layout = CachePaths(os.path.abspath(os.fspath(directory)))
        self._limit_bytes = limit_bytes
        self._wait_s = wait_s
        self.metrics = metrics or Metrics()
        self._space = Space(self._layout, limit_bytes, self.metrics)
        self._ready = False
        self._unwarned = threading.Lock()  # acquired once and never awaited: a flag that only one thread can lower
        self._resume_at_s = 0.0

    def __reduce__(self) -> tuple[Callable[[], NodeCache], tuple[()]]:
        return partial(NodeCache, self._layout.directory, self._limit_bytes, wait_s=self._wait_s), ()

    def __repr__(self) -> str:
        return f"NodeCache({self._layout.directory!r}, limit={format_bytes(self._limit_bytes)})"

    def read_into(
        self,
        url: str,
        version: str,
        start: int,
        out: memoryview,
        fetch: Callable[[memoryview], Checked],
        *,
        crc32c: int | None,
    ) -> tuple[Checked, bool]:
        """Fill ``out`` with bytes [start, start + len(out)) of the object, from the cache or by ``fetch``.

        Args:
            url: The object; normalized by :func:`streaming.shards.cache.key.normalized`. Never written to disk.
            version: All other facts that identify these bytes at that URL: the store's endpoint, ETag or generation, or
                the index's size and fingerprint. Any text.
            start: First byte.
            out: Writable, contiguous memory, any item type.
            fetch: Fills the given memory (``out`` as bytes) from the store and compares it with its checksums, or
                raises. Called at most once. An entry is written with the checksum that was compared, if there is one of
                all bytes; it is not computed again.
            crc32c: CRC32C of the bytes, if known: other bytes are never taken from the cache.

        Returns:
            The check of the bytes, and whether they came from the cache: False if ``fetch`` was called.

        Raises:
            ConfigError: The memory or the range is invalid.
            BaseException: Any exception of ``fetch``, and nothing else; ``out`` is then as ``fetch`` left it.
        """
        view = out.cast("B") if out.format != "B" or out.ndim != 1 else out
        if view.readonly:
            raise ConfigError("cache: out is read-only; give writable memory")
        key = EntryKey.of(url, version, start, len(view))
        loaded = self._load(key, crc32c, view)
        if loaded is not None:
            return loaded, True
        claim = self._claim(key, crc32c, view) if self._may_store(key) else None
        if isinstance(claim, Checked):
            return claim, True
        part = claim
        self.metrics.add("cache_misses")
        self.metrics.add("cache_miss_bytes", len(view))
        if part is None:
            self.metrics.add("cache_not_stored")
            return fetch(view), False
        stored = False
        try:
            checked = fetch(view)
            stored = self._store(key, checked, part, view)
        finally:
            self._end_claim(part, stored=stored)
        return checked, False

    def invalidate(self, url: str, version: str, start: int, size_bytes: int) -> None:
        """Forget a range, so that the next :meth:`read_into` of it fetches. Do nothing if it is absent."""
        try:
            os.unlink(self._layout.entry(EntryKey.of(url, version, start, size_bytes)))
        except FileNotFoundError:
            return
        except OSError as error:
            self._trouble(error)

    def _load(self, key: EntryKey, crc32c: int | None, out: memoryview) -> Checked | None:
        """Load the entry into ``out``; None if that did not work. Delete a damaged entry."""
        path = self._layout.entry(key)
        try:
            self._layout.check_owner()
            found = read_entry(path, key, crc32c, out)
            if found is LookupResult.DAMAGED:
                self.metrics.add("cache_damaged")
                os.unlink(path)
        except FileNotFoundError:  # deleted by another process
            return None
        except OSError as error:
            self._trouble(error)
            if error.errno == errno.EIO:
                with suppress(OSError):
                    os.unlink(path)
            return None
        if isinstance(found, LookupResult):
            return None
        self.metrics.count("cache_hits")
        self.metrics.add("cache_hit_bytes", len(out))
        return found

    def _may_store(self, key: EntryKey) -> bool:
        if time.monotonic() < self._resume_at_s or not self._space.fits(key.num_bytes):
            return False
        try:
            self._prepare()
        except OSError as error:
            self._trouble(error)
            return False
        return True

    def _prepare(self) -> None:
        """Make the directories and clear the remains of dead processes and older releases, before the first write."""
        if self._ready:
            return
        self._layout.make()  # many threads and processes may do all of this at once
        self._space.sweep()
        for old in self._layout.older():
            old.remove()
        self._ready = True

    def _claim(self, key: EntryKey, crc32c: int | None, out: memoryview) -> PartFile | Checked | None:
        """Claim the right to fetch that entry; None: fetch without storing; ``Checked``: ``out`` is filled meanwhile.

        A claim is the lock on the entry's part. It ends with its holder: the next waiting process takes it over.
        """
        waiting = Waiting(self._wait_s)
        try:
            while (part := self._try_claim(key)) is None:
                started_s = time.monotonic()
                if not waiting.pause():
                    self.metrics.add("cache_wait_timeouts")
                    return self._open_part(self._layout.part(key, secrets.token_hex(8)))
                self.metrics.add("cache_wait_s", time.monotonic() - started_s)
                if (loaded := self._load(key, crc32c, out)) is not None:
                    return loaded
        except OSError as error:
            self._trouble(error)
            return None
        loaded = self._load(key, crc32c, out)
        if loaded is not None:  # published between the first lookup and the claim
            self._end_claim(part, stored=False)
        return part if loaded is None else loaded

    def _try_claim(self, key: EntryKey) -> PartFile | None:
        part = self._open_part(self._layout.part(key))
        while part is not None and part.reserved_bytes:  # left by a dead process
            try:
                self._space.drop(part)
            finally:
                part.close()
            part = self._open_part(self._layout.part(key))
        return part

    def _open_part(self, path: str) -> PartFile | None:
        try:
            fd = try_lock(path)
        except FileNotFoundError:  # the directories were deleted meanwhile
            self._layout.make()
            fd = try_lock(path)
        return None if fd is None else PartFile(path, fd)

    def _store(self, key: EntryKey, checked: Checked, part: PartFile, data: memoryview) -> bool:
        """Turn the part into the whole entry. Return False if the disk fails or is full: it is still a part then."""
        started_s = time.monotonic()
        crc = crc_of((data,))[0] if checked.crc32c is None else checked.crc32c  # readers will compare it again
        stored = False
        try:
            self._space.reserve(part, len(data))
            write_entry(part.fd, key, crc, data)
            self._rename(part.path, self._layout.entry(key))
            stored = True
        except OSError as error:
            self._trouble(error)
        if not stored:
            self.metrics.add("cache_not_stored")
        self.metrics.add("cache_write_s", time.monotonic() - started_s)
        return stored

    def _rename(self, part: str, entry: str) -> None:
        try:
            os.rename(part, entry)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(entry), mode=0o700, exist_ok=True)
            os.rename(part, entry)

    def _end_claim(self, part: PartFile, *, stored: bool) -> None:
        """Release the claim. Delete a part that did not become an entry, and release its space."""
        try:
            if not stored:
                self._space.drop(part)
        except FileNotFoundError:  # the cache was deleted
            pass
        except OSError as error:
            self._trouble(error)
        finally:
            part.close()

    def _trouble(self, error: OSError) -> None:
        """Count a disk error, stop writing for a while, and warn once."""
        self.metrics.add("cache_errors")
        self._resume_at_s = time.monotonic() + RETRY_AFTER_S
        if self._unwarned.acquire(blocking=False):
            _log.warning(
                "cache in %s: %s. Reads continue from the store; what is cached stays in use, and writing is retried "
                "every %d s. This is logged once; the metric cache_errors counts all such errors. Free disk space, or "
                "set cache_limit and cache_dir to what the disk can hold.",
                self._layout.directory,
                error,
                RETRY_AFTER_S,
            )


def open_cache(cache_dir: str | PathLike[str] | None, cache_limit: int | str | None) -> NodeCache | None:
    """Return the cache that a user requested. By default it may take four fifths of the free space on its disk.

    Raises:
        ConfigError: A limit was given without a directory.
    """
    if cache_dir is None:
        if cache_limit is not None:
            raise ConfigError(f"cache_limit={cache_limit!r} without a cache_dir: also give the folder of the cache")
        return None
    folder = str(checked_path("cache_dir", cache_dir))
    if cache_limit is not None:
        return NodeCache(folder, parse_bytes(cache_limit, name="cache_limit"))
    there = folder
    while not os.path.exists(there):
        there = os.path.dirname(there)
    return NodeCache(folder, max(1, shutil.disk_usage(there).free * 4 // 5))
