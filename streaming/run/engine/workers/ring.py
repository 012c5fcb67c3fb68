"""Build batches in slots of anonymous shared memory, which their users own: the batch ring.

Life cycle of a slot::

    free -> taken -> wrapped, with its batch -> free

- A slot is lent for one batch and returns when nothing refers to that batch's memory any more: every tensor, view and
  array of the batch keeps one NumPy array alive, whose finalizer returns the slot. So a batch that is kept never
  changes. A user who keeps many batches gets additional slots, and beyond ``MAX_EXTRA_SLOTS`` private copies.
- A slot whose batch failed returns at once (``give_back``). A slot that another process may still write to is dropped
  for good (``discard``).
- Slots are sparse: their address range (``span_bytes``) is generous, and pages are allocated at the first touch. If all
  slots together hold more than ``limit_bytes``, free ones return their pages.
- A forked child has the batches that its parent held, in the same shared memory. Its writes there remain private
  (``Slot.part``), and it never returns a slot. Its parent uses none of these slots again: it cannot know how long the
  child will hold them.
- There are no locks: finalizers run at any time, perhaps in a thread that is executing these very functions. All state
  that they touch is changed by single atomic operations.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from streaming.build.batches.jagged import fresh
from streaming.common.forks import before_forks, in_children
from streaming.common.platforms import remove_pages, unnamed_file
from streaming.run.engine.memory.arena import map_privately

Memory: TypeAlias = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)

ALIGN_BYTES = 64
"""A cache line, and more than any dtype requires."""
FIRST_SPAN_BYTES = 64 << 20
"""Address range of the first slots. A batch that needs more grows its slot, and later slots have that size."""
MAX_EXTRA_SLOTS = 32
"""Slots beyond the nominal number. Each costs two descriptors (``mmap`` keeps one); a process has 1,000."""


class PageLocker(Protocol):
    """Make memory page-locked, so that a device can copy directly from it. Thread-safe."""

    def lock(self, memory: Memory) -> bool:
        """Lock the whole pages of ``memory``. Return False if that is impossible."""

    def unlock(self, memory: Memory) -> None:
        """Undo ``lock`` of the same memory."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with arbitrary content in page-locked memory that needs no lock or unlock."""


class Slot:
    """One memfd and its mapping in this process. Messages refer to it by its number."""

    def __init__(self, number: int, fd: int) -> None:
        self.number = number
        self.fd = fd
        self.span_bytes = 0
        self.held_bytes = 0
        self._locked: tuple[PageLocker, Memory] | None = None
        self.follow()

    @classmethod
    def create(cls, number: int, span_bytes: int) -> Slot:
        """Return a new slot of zeros."""
        fd = unnamed_file("shardstream-ring")
        try:
            os.ftruncate(fd, span_bytes)
            return cls(number, fd)
        except BaseException:
            os.close(fd)
            raise

    def follow(self) -> None:
        """Map all of it, after another process has enlarged it. Arrays over an earlier mapping remain valid."""
        span = os.fstat(self.fd).st_size
        if span != self.span_bytes:
            self.unlock()
            self.memory = mmap.mmap(self.fd, span)
            self.span_bytes = span

    def grow(self, num_bytes: int) -> None:
        """Make room for ``num_bytes``, at least doubling the span."""
        span = -(-max(2 * self.span_bytes, num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, span)
        self.follow()

    def touched(self, num_bytes: int) -> None:
        """Note that the first bytes were written: their pages stay until ``trim``."""
        self.held_bytes = max(self.held_bytes, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def trim(self) -> None:
        """Return its pages to the system, in all processes that map it. The slot must be free."""
        self.unlock()
        self.held_bytes = 0
        remove_pages(self.memory)

    def lock(self, locker: PageLocker, num_bytes: int) -> bool:
        """Page-lock the first bytes: once, or again if there are more than before. The slot must not be in use yet.

        Returns:
            Whether they are locked.
        """
        if self._locked is not None and self._locked[0] is locker and len(self._locked[1]) >= num_bytes:
            return True
        self.unlock()
        wanted = min(self.span_bytes, -(-(num_bytes + num_bytes // 4) // mmap.PAGESIZE) * mmap.PAGESIZE)
        memory = self.array(wanted)
        if not locker.lock(memory):
            return False
        self.touched(wanted)
        self._locked = locker, memory
        return True

    def unlock(self) -> None:
        """Undo ``lock``, if it was called."""
        locked, self._locked = self._locked, None
        if locked is not None:
            locked[0].unlock(locked[1])

    def leave_locked(self) -> None:
        """Forget the lock in a forked child: pages stay locked for the parent, since CUDA works only there."""
        self._locked = None

    def part(self) -> None:
        """Separate the memory that a forked child holds, and will write to, from the parent's."""
        map_privately(_address(self.array()), self.span_bytes, self.fd)

    def array(self, num_bytes: int | None = None) -> Memory:
        """Return a new array over its first bytes (default: all). Views of it refer to it."""
        return np.frombuffer(self.memory, np.uint8, self.span_bytes if num_bytes is None else num_bytes)

    def close_fd(self) -> None:
        """Close the descriptor: no other process will receive this slot any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the slot, which is no longer needed. The mapping ends with the last array over it."""
        self.unlock()
        self.close_fd()
        del self.memory


class SlotWriter:
    """Allocate a slot's memory from start to end, growing it as needed. For one thread."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._whole = slot.array()
        self._mappings = [(_address(self._whole), len(self._whole))]
        self.used_bytes = 0

    def reserve(self, num_bytes: int) -> Memory:
        """Return ``num_bytes`` of memory with arbitrary content."""
        start = -(-self.used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if start + num_bytes > self._slot.span_bytes:
            self._slot.grow(start + num_bytes)
            self._whole = self._slot.array()
            self._mappings.append((_address(self._whole), len(self._whole)))
        self.used_bytes = start + num_bytes
        return self._whole[start : self.used_bytes]

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor in the slot, with any content: the hook of ``streaming.build.batches.collate``."""
        return tensor_on(self.reserve(_num_bytes(shape, dtype)), shape, dtype)

    def place(self, data: Memory) -> int:
        """Return the place of ``data`` in the slot, copying it there if it lies elsewhere."""
        if not len(data):
            return 0
        address = _address(data)
        for base, length in self._mappings:
            if base <= address < base + length:
                return address - base
        room = self.reserve(len(data))
        np.copyto(room, data)
        return self.used_bytes - len(data)


class Lease:
    """One slot for a batch that is built in this process. For one thread. Ends with the last tensor from it."""

    def __init__(self, root: Memory | None, want_span: Any) -> None:
        self._root = root
        self._want_span = want_span
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the slot in use."""
        return 0 if self._root is None else min(self._used_bytes, len(self._root))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with arbitrary content: in the slot or, if that is full or given up, elsewhere."""
        start = -(-self._used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self._used_bytes = start + _num_bytes(shape, dtype)
        if self._root is None:
            return fresh(shape, dtype)
        if self._used_bytes > len(self._root):
            self._want_span(self._used_bytes)
            return fresh(shape, dtype)
        return tensor_on(self._root[start : self._used_bytes], shape, dtype)

    def end(self) -> None:
        """Note that nothing more will be allocated."""
        self._root = None


class BatchRing:
    """Slots for the batches that are being built, waiting, or with their user. Thread-safe, without a lock.

    Args:
        num_slots: Number of free slots to keep: the usual number of batches being built, waiting and in use.
        span_bytes: Address range of a new slot.
        limit_bytes: Memory limit of all slots. Only batches that are being built, waiting or kept may exceed it.

    Attributes:
        limit_bytes: See above; may be set at any time.
    """

    def __init__(self, num_slots: int, span_bytes: int = FIRST_SPAN_BYTES, *, limit_bytes: int = sys.maxsize) -> None:
        self.num_slots = num_slots
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._span_bytes = span_bytes
        self._numbers = count()
        self._free: deque[Slot] = deque()
        self._taken: set[Slot] = set()
        self._lent: set[Slot] = set()
        """Slots whose batch some forked child may hold; never used again."""
        self._closed = False
        self._maker_pid = os.getpid()
        before_forks(self, BatchRing._lend)
        in_children(self, BatchRing._part)
        self.locker: PageLocker | None = None
        """Locks the pages of batches that are wrapped from now on; None: unlocks them."""

    @property
    def num_taken(self) -> int:
        """Number of slots of batches that are being built or kept."""
        return len(self._taken)

    @property
    def num_free(self) -> int:
        """Number of slots that wait for reuse."""
        return len(self._free)

    @property
    def held_bytes(self) -> int:
        """Bytes that batches have written and that no slot has returned, in whole pages."""
        return sum(slot.held_bytes for slot in (*self._free.copy(), *self._taken.copy()))

    @property
    def resident_bytes(self) -> int:
        """Memory that the free and the taken slots occupy now."""
        return sum(
            os.fstat(slot.fd).st_blocks * 512 for slot in (*self._free.copy(), *self._taken.copy()) if slot.fd >= 0
        )

    def take(self) -> Slot:
        """Take a slot for this caller alone. Follow with ``wrap``, ``give_back`` or ``discard``."""
        try:
            slot = self._free.pop()  # the most recently used: its pages are likely in a cache
        except IndexError:
            slot = Slot.create(next(self._numbers), self._span_bytes)
        self._taken.add(slot)
        return slot

    def wrap(self, slot: Slot, num_bytes: int) -> Memory:
        """Return the slot's first bytes as an array.

        The slot returns when the array and all its views are gone.
        """
        self._trim_pages()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if len(self._taken) > self.num_slots + MAX_EXTRA_SLOTS:  # too many are kept: copy new batches
            copy = slot.array(num_bytes).copy()
            self.give_back(slot)
            return copy
        self._lock_pages(slot, num_bytes)
        root = slot.array(num_bytes)
        weakref.finalize(root, self.give_back, slot).atexit = False
        return root

    def give_back(self, slot: Slot) -> None:
        """Return a slot that is free. Do nothing in a forked child: the slot is the parent's."""
        if os.getpid() != self._maker_pid:
            return
        self._taken.discard(slot)
        if slot in self._lent:  # a slot stays in one of the two sets while any process may refer to its memory
            self._lent.discard(slot)
            slot.close()
            return
        self._free.append(slot)
        self._trim()
        self._trim_pages()

    def discard(self, slot: Slot) -> None:
        """Drop the slot for good: another process may still write into it."""
        self._taken.discard(slot)
        slot.close()

    def numbers(self) -> set[int]:
        """Return the numbers of the slots that may be used again."""
        return {slot.number for slot in (*self._free.copy(), *self._taken.copy())}

    def want_span(self, num_bytes: int) -> None:
        """Make new slots large enough for ``num_bytes``."""
        if num_bytes > self._span_bytes:
            self._span_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Lend a slot for a batch built in this process: ``with ring.lease() as lease: build(…, lease.allocate)``."""
        root = slot = None
        if len(self._taken) < self.num_slots + MAX_EXTRA_SLOTS and not self._closed:
            slot = self.take()
            if slot.span_bytes < self._span_bytes:
                slot.grow(self._span_bytes)
            root = self.wrap(slot, slot.span_bytes)
        lease = Lease(root, self.want_span)
        del root
        try:
            yield lease
        finally:
            if slot is not None:
                slot.touched(lease.used_bytes)
            lease.end()

    def close(self) -> None:
        """Free unused slots. Batches that are kept stay valid, and free their memory at their end."""
        self._closed = True
        self._trim()
        for slot in list(self._taken):
            slot.close_fd()

    def _lend(self) -> None:
        """Lend the child, before a fork, every batch that lies in a slot now."""
        self._lent |= self._taken.copy()

    def _part(self) -> None:
        """Separate a forked child's batches from its parent's, so that writes to them remain private.

        Free slots are the parent's.
        """
        self.locker = None
        free, self._free = self._free, deque()
        for slot in free:
            slot.leave_locked()
            slot.close()
        for slot in self._taken.copy():
            slot.leave_locked()
            if slot.fd >= 0:
                slot.part()

    def _lock_pages(self, slot: Slot, num_bytes: int) -> None:
        locker = self.locker
        if locker is None:
            slot.unlock()
        elif not slot.lock(locker, num_bytes):
            self.locker = None
            _log.warning(
                "the batch ring cannot be page-locked (%d bytes): batches are copied to page-locked memory first, "
                "which is slower. Raise the limit on locked memory (ulimit -l), or lower prefetch_factor",
                num_bytes,
            )

    def _trim_pages(self) -> None:
        """Return pages of free slots, longest idle first, until all slots hold no more than the limit."""
        for _ in range(len(self._free)):
            if self.held_bytes <= self.limit_bytes:
                return
            try:
                slot = self._free.popleft()
            except IndexError:  # another thread took it
                return
            slot.trim()
            self._free.append(slot)

    def _trim(self) -> None:
        while len(self._free) > (0 if self._closed else self.num_slots):
            try:
                self._free.popleft().close()  # the longest idle
            except IndexError:  # another thread took it
                return


def tensor_on(memory: Memory, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of ``memory`` as a tensor, which keeps ``memory`` alive."""
    return torch.from_numpy(memory).view(dtype).view(shape)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def _address(memory: Memory) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
