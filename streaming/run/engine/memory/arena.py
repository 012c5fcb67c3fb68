"""Hold all fetched chunks of a rank in anonymous memory with a fixed byte budget: the chunk arena."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import TypeAlias

import numpy as np

from streaming.common.arguments import format_bytes
from streaming.common.platforms import MAP_NORESERVE, remove_pages, unnamed_file, want_huge_pages, will_need
from streaming.errors import MemoryLimitError

PAGE_BYTES = mmap.PAGESIZE

_Drop: TypeAlias = Callable[[mmap.mmap, int, int], None]
"""Returns pages to the system. Arguments: a map, the first byte, the number of bytes."""

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10  # Linux, on every architecture but Alpha, MIPS, PA-RISC and Xtensa
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_HIGHEST_BYTES = (32 << 20) - (64 << 10)
"""glibc's dynamic threshold follows the sizes of freed blocks up to 32 MiB, including its header."""
_MADV_POPULATE_READ = 22  # Linux 5.14


class MergedRanges:
    """Keep half-open ranges of integers sorted and merged. Not thread-safe.

    Attributes:
        all: The ranges.
        total: The sum of their sizes.
    """

    def __init__(self) -> None:
        self.all: list[tuple[int, int]] = []
        self.total = 0

    def add(self, start: int, stop: int) -> None:
        """Add a range that overlaps none of the others; merge it with its neighbors."""
        self.total += stop - start
        i = bisect_left(self.all, (start, stop))
        if i < len(self.all) and self.all[i][0] == stop:
            stop = self.all.pop(i)[1]
        if i > 0 and self.all[i - 1][1] == start:
            i -= 1
            start = self.all.pop(i)[0]
        self.all.insert(i, (start, stop))

    def cut(self, start: int, stop: int) -> None:
        """Remove the parts of ranges in ``[start, stop)``."""
        i = bisect_left(self.all, (start, start))
        if i > 0 and self.all[i - 1][1] > start:
            i -= 1
        while i < len(self.all) and self.all[i][0] < stop:
            first, last = self.all.pop(i)
            self.total -= min(last, stop) - max(first, start)
            for left in ((first, start), (stop, last)):
                if left[0] < left[1]:
                    self.all.insert(i, left)
                    i += 1


class Extents:
    """Allocate ranges of ``[0, capacity)``, first-fit. Not thread-safe.

    First-fit keeps used ranges near the low end, so that the highest address ever used stays close to the peak memory
    in use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = 0
        self._free = MergedRanges()
        self.grow(capacity)

    @property
    def used(self) -> int:
        """Sum of the ranges in use."""
        return self.capacity - self._free.total

    def take(self, size: int) -> int | None:
        """Return the start of a range of ``size``, or None if no free range is large enough."""
        for start, stop in self._free.all:
            if stop - start >= size:
                self._free.cut(start, start + size)
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Free a range returned by ``take``."""
        self._free.add(start, start + size)

    def grow(self, capacity: int) -> None:
        """Extend the range to ``[0, capacity)``; never shrinks it."""
        if capacity > self.capacity:
            self._free.add(self.capacity, capacity)
            self.capacity = capacity

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return the free ranges, sorted and merged."""
        return list(self._free.all)


class Arena:
    """Hold at most ``budget_bytes`` of chunks, in anonymous memory that is freed with its last user.

    The address range is twice the budget, so that fragmentation does not prevent an allocation within the budget. Pages
    are committed on first touch: a large budget costs nothing until it is used. Freed pages stay committed for the next
    chunks, as long as they and the pages in use do not exceed the budget; the surplus is returned to the system, the
    highest addresses first.

    Not thread-safe: callers allocate and free under their own lock. Allocated ranges may be read and written from any
    thread.

    Args:
        budget_bytes: The budget.
        shared: Whether other processes map it, through ``fd``. Private memory gets huge pages if the system grants
            them: first touch then costs a third (0.07 instead of 0.22 s for 400 MB, measured once by hand, 2026-11).
    """

    def __init__(self, budget_bytes: int, *, shared: bool = True) -> None:
        self.budget_bytes = _pages(budget_bytes)
        self.peak_bytes = 0
        self.fd = -1
        self._extents, self.memory = self._reserve(shared=shared)
        self._idle = MergedRanges()
        """Free pages that were in use and have not been returned to the system."""
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._closed = False

    def _reserve(self, *, shared: bool) -> tuple[Extents, mmap.mmap]:
        """Reserve an address range of twice the budget, or of 1.25 times if the system limits the address space.

        Raises:
            MemoryLimitError: The system grants neither.
        """
        for capacity in (2 * self.budget_bytes, _pages(self.budget_bytes * 5 // 4)):
            try:
                return Extents(capacity), self._map_shared(capacity) if shared else self._map_private(capacity)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        limit = "none" if soft == resource.RLIM_INFINITY else format_bytes(soft)
        raise MemoryLimitError(
            f"memory_limit: the system refuses the address space for {format_bytes(self.budget_bytes)} of chunks "
            f"(`ulimit -v`: {limit}). Lower memory_limit, or raise `ulimit -v`: reserved address space takes no "
            "memory until it is used"
        )

    def _map_shared(self, capacity: int) -> mmap.mmap:
        self._drop: _Drop = remove_pages
        self.fd = unnamed_file("shardstream-arena")
        try:
            os.ftruncate(self.fd, capacity)
            return mmap.mmap(self.fd, capacity)
        except BaseException:
            os.close(self.fd)
            self.fd = -1
            raise

    def _map_private(self, capacity: int) -> mmap.mmap:
        self._drop = _forget_pages
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, capacity, flags=flags)
        want_huge_pages(memory)
        return memory

    @property
    def is_private(self) -> bool:
        """Whether no other process sees the memory, and a forked child has a copy of its own."""
        return self.fd < 0

    @property
    def used_bytes(self) -> int:
        """Bytes currently allocated, in whole pages."""
        return self._extents.used

    def allocate(self, num_bytes: int) -> int | None:
        """Return the page-aligned start of a new range of ``num_bytes``; None if the budget has no room now."""
        size = _pages(num_bytes)
        if self._extents.used + size > self.budget_bytes:
            return None
        start = self._extents.take(size)
        if start is None:
            return None
        self._idle.cut(start, start + size)
        self._return_surplus()
        self.peak_bytes = max(self.peak_bytes, self._extents.used)
        return start

    def free(self, start: int, num_bytes: int) -> None:
        """Free a range returned by ``allocate(num_bytes)``. Do nothing after ``close``."""
        if self._closed:
            return
        size = _pages(num_bytes)
        self._extents.give(start, size)
        self._idle.add(start, start + size)  # kept within the budget, until its room is needed

    def shrink(self, start: int, num_bytes: int, left_bytes: int) -> None:
        """Free all but the first ``left_bytes`` of ``allocate(num_bytes)``."""
        left, size = _pages(left_bytes), _pages(num_bytes)
        if left < size:
            self.free(start + left, size - left)

    def map_file(self, start: int, num_bytes: int, fd: int, offset: int) -> None:
        """Map the bytes of a file from ``offset`` on instead of allocated memory, and read them; whole pages.

        Only for a private arena. Writes to the range do not reach the file. Pages in the page cache are only mapped.
        The next reader faults them in, sixteen at a time, in half the time that ``madvise`` takes.

        Raises:
            OSError: A page cannot be read or is past the end of the file, or the system does not support it. Then call
                ``unmap_file``.
        """
        self._remap(start, num_bytes, mmap.MAP_PRIVATE, fd, offset)
        size = _pages(num_bytes)
        if _is_cached(self.address + start, size):
            return
        will_need(fd, offset, num_bytes)  # starts reading the whole range before waiting for the first page
        if _libc().madvise(self.address + start, size, _MADV_POPULATE_READ):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def unmap_file(self, start: int, num_bytes: int) -> None:
        """Undo ``map_file``. The contents are lost."""
        if not self._closed:
            self._remap(start, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

    def copy_file(self, start: int, num_bytes: int) -> None:
        """Replace bytes that ``map_file`` mapped with a copy. Concurrent readers see no difference."""
        if self._closed:
            return
        size = _pages(num_bytes)
        copy = _mapped(_libc().mmap(None, size, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
        ctypes.memmove(copy, self.address + start, num_bytes)
        _mapped(_libc().mremap(copy, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, self.address + start))

    def keep_only(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Return all pages to the system except ``ranges``: first byte, in whole pages, and size of each.

        Nothing else may be read afterwards. Only for a private arena.
        """
        at = 0
        for start, num_bytes in (*sorted(ranges), (self._extents.capacity, 0)):
            if at < start:
                self._remap(at, start - at, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            at = start + _pages(num_bytes)

    def _remap(self, start: int, num_bytes: int, flags: int, fd: int, offset: int) -> None:
        size = _pages(num_bytes)
        if self.fd >= 0 or start % PAGE_BYTES or start + size > self._extents.capacity:
            raise ValueError(f"bytes {start}-{start + size} of this arena cannot be mapped (shared: {self.fd >= 0})")
        flags |= _MAP_FIXED | MAP_NORESERVE
        _mapped(_libc().mmap(self.address + start, size, _READ_WRITE, flags, fd, offset))

    def close(self, *, keep_mapped: bool = False) -> None:
        """Release the memory. Views held by others keep their pages alive until they are gone.

        Args:
            keep_mapped: Let others create new views too; the memory is freed with the last reference.
        """
        if self._closed:
            return
        self._closed = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if keep_mapped:
            return
        try:
            self.view.release()
            self.memory.close()
        except BufferError:  # still in use: the mapping is freed with its last user
            return

    def _return_surplus(self) -> None:
        """Return idle pages, highest first, until the others and the pages in use do not exceed the budget."""
        while (surplus := self._extents.used + self._idle.total - self.budget_bytes) > 0:
            start, stop = self._idle.all[-1]
            start = max(start, stop - surplus)
            self._idle.cut(start, stop)
            self._drop(self.memory, start, stop - start)


def _forget_pages(memory: mmap.mmap, start: int, num_bytes: int) -> None:
    memory.madvise(mmap.MADV_DONTNEED, start, num_bytes)


def map_privately(address: int, num_bytes: int, fd: int) -> None:
    """Map a file's first bytes privately at ``address``, where they are already mapped.

    Writes no longer reach the file.

    Raises:
        OSError: The system does not support it.
    """
    _mapped(_libc().mmap(address, num_bytes, _READ_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | MAP_NORESERVE, fd, 0))


def _is_cached(address: int, num_bytes: int) -> bool:
    """Return whether a mapped range of whole pages is in the page cache, so that no access to it can fail.

    For users who may neither write nor own the file, the kernel always answers yes, to hide what others have read.
    Nearly all of these users get no lease on the file either.
    """
    num_pages = num_bytes // mmap.PAGESIZE
    found = ctypes.create_string_buffer(num_pages)
    return _libc().mincore(address, num_bytes, found) == 0 and found.raw == b"\1" * num_pages


def _pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES


@cache
def _libc() -> ctypes.CDLL:
    """Open the C library for calls that may block. They release the GIL; Python's ``madvise`` keeps it."""
    libc = ctypes.CDLL(None, use_errno=True)
    where, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [where, size, number, number, number, ctypes.c_int64], where
    libc.mremap.argtypes, libc.mremap.restype = [where, size, size, number, where], where
    libc.madvise.argtypes, libc.madvise.restype = [where, size, number], number
    libc.mincore.argtypes, libc.mincore.restype = [where, size, ctypes.c_char_p], number
    return libc


def _mapped(address: int) -> int:
    """Check and return an address from ``mmap``.

    Raises:
        OSError: ``address`` is the error value.
    """
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


@cache
def keep_freed_memory() -> None:
    """Make glibc keep up to 64 MB of freed memory for the next batch, instead of returning it after each batch.

    By default blocks larger than 128 KiB are returned, so every batch gets new, zeroed pages from the system, one fault
    at a time (bytes of 68 KB: 3 GB/s instead of 9, benchmarks/bench_cut.py). The threshold follows the largest block
    ever freed, so freeing a single block of 32 MB, which is never touched, raises it permanently. In any program that
    frees a tensor of that size this has already happened.
    """
    with suppress(MemoryError):  # under a tight `ulimit -v`
        np.empty(_HIGHEST_BYTES, np.uint8)
