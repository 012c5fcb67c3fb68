"""Lend memory for the large tensors of batches that this process builds, and reuse it: ``BatchMemory``.

Fresh memory is slow: above its threshold the C library maps it, the system zeroes it page by page at the first touch,
and the thread that frees the batch, which is the training thread, unmaps it. Here a block returns when nothing refers
to it any more: every tensor, view and array over it keeps one NumPy array alive, and a weak reference to that array
reports its end. So a batch that is kept never changes. Pages return to the system when another block needs the room,
in the thread that builds.

A forked child has a copy of its own, since blocks are private.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from streaming.build.batches.jagged import fresh
from streaming.common.arguments import format_bytes
from streaming.common.forks import in_children, renew_lock
from streaming.common.platforms import MAP_NORESERVE, want_huge_pages

_log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 18
"""Smaller tensors come from the C library, which keeps the memory that they free."""
_STEPS = 4
"""Number of block sizes between two powers of two, so that fields of varying size find a block that fits."""
_MOST_WASTE = 2
"""A block is lent only for tensors of at least this fraction of its size."""
_MOST_BLOCKS = 4096
"""Maximum number of blocks lent at the same time. A process may have 65,530 mappings."""


class _Block:
    """One private mapping. Compared by identity; ``turn`` counts the order in which blocks returned."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.turn = num_bytes, 0
        self.memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        want_huge_pages(self.memory)


class _Loan(weakref.ref[Any]):
    """A weak reference to the root array of a tensor, with the block that holds it; a ``finalize`` takes longer."""

    __slots__ = ("block",)

    block: _Block


class BatchMemory:
    """Allocate tensors for batches in blocks that are reused. Thread-safe.

    A tensor may end anywhere, perhaps in a thread that is executing ``allocate``; its callback only appends to a deque.

    Args:
        limit_bytes: Limit on the bytes of all blocks, lent and free. Beyond it tensors get fresh memory.

    Attributes:
        limit_bytes: The current limit; see ``limit``.

    Example:
        >>> memory = BatchMemory(1 << 30)
        >>> memory.allocate((64, 3, 224, 224), torch.uint8).shape
        torch.Size([64, 3, 224, 224])
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._returned: deque[weakref.ref[Any]] = deque()
        self._loans: dict[int, _Loan] = {}  # by id: a weak reference that is not kept makes no callback
        self._free: dict[int, deque[_Block]] = {}  # by size, one of a few; the last block returned last
        self._blocks: weakref.WeakSet[_Block] = weakref.WeakSet()
        self._turns = 0
        self._closed = self._is_told = False
        self._lock = threading.Lock()
        """Guards ``_blocks`` and ``_free``."""
        self.peak_bytes = 0
        in_children(self, renew_lock)

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, lent and free. Pages that were never written take no memory."""
        with self._lock:
            # The set is only read.
            return self._held()

    @property
    def num_free(self) -> int:
        """Number of blocks that are free to be lent again."""
        with self._lock:
            # Blocks are only counted.
            self._take_back()
            return sum(map(len, self._free.values()))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor with arbitrary content."""
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        block = None if num_bytes < LEAST_BYTES else self._block_for(num_bytes)
        if block is None:
            return fresh(shape, dtype)
        root = np.frombuffer(block.memory, np.uint8, num_bytes)
        loan = _Loan(root, self._returned.append)
        loan.block = block
        self._loans[id(loan)] = loan
        if self._closed:  # perhaps closed meanwhile
            self._loans.pop(id(loan), None)
        return torch.from_numpy(root).view(dtype).view(shape)

    def limit(self, limit_bytes: int) -> None:
        """Set the limit from now on. Free blocks beyond it return to the system."""
        with self._lock:
            # Lent blocks stay: the limit may be exceeded until they come back.
            self.limit_bytes = limit_bytes
            self._take_back()
            while self._held() > limit_bytes and self._longest_idle() is not None:
                pass  # unmapped here

    def close(self) -> None:
        """Return free blocks to the system. Tensors stay valid and free their memory when they end."""
        with self._lock:
            # No block returns from here on.
            self._closed = True
            self._loans.clear()
            self._returned.clear()
            self._free.clear()

    def _take_back(self) -> None:
        """Mark blocks whose tensors have ended as free."""
        while self._returned:
            loan = self._loans.pop(id(self._returned.popleft()), None)
            if loan is None:  # lent before `close`
                continue
            block, self._turns = loan.block, self._turns + 1
            block.turn = self._turns
            self._free.setdefault(block.num_bytes, deque()).append(block)

    def _taken(self, num_bytes: int, most_bytes: int) -> _Block | None:
        """Return the smallest free block that fits, and mark it as taken.

        Of equal blocks, prefer the one that returned last: its pages are likely in a cache.
        """
        sizes = [size for size, blocks in self._free.items() if blocks and num_bytes <= size <= most_bytes]
        return self._free[min(sizes)].pop() if sizes else None

    def _longest_idle(self) -> _Block | None:
        """Return the free block that has been idle longest, and mark it as taken; None: no block is free."""
        idle = [blocks for blocks in self._free.values() if blocks]
        return min(idle, key=lambda blocks: blocks[0].turn).popleft() if idle else None

    def _block_for(self, num_bytes: int) -> _Block | None:
        """Return a free or a new block for one tensor; None: there is no room for one."""
        size = _rounded(num_bytes)
        with self._lock:
            # A block is either free, or owned by this caller alone.
            self._take_back()
            if (block := self._taken(num_bytes, _MOST_WASTE * size)) is not None:
                return block
            surplus = self._held() + size - self.limit_bytes
            while surplus > 0 and (idle := self._longest_idle()) is not None:
                surplus -= idle.num_bytes
                del idle  # unmapped here
            if surplus > 0 or self._closed or len(self._blocks) >= _MOST_BLOCKS:
                self._tell_of_limit(num_bytes)
                return None
            try:
                block = _Block(size)
            except OSError:  # under a tight `ulimit -v`; the caller then allocates plainly, or gets that error
                return None
            self._blocks.add(block)
            self.peak_bytes = max(self.peak_bytes, self._held())
            return block

    def _held(self) -> int:
        return sum(block.num_bytes for block in self._blocks)

    def _tell_of_limit(self, num_bytes: int) -> None:
        if self._closed or self._is_told:
            return
        self._is_told = True
        _log.info(
            "the program keeps so many batches that their memory cannot be used again within memory_limit (%s of "
            "batches): a tensor of %s, and others, got fresh memory, which is slower",
            format_bytes(self.limit_bytes), format_bytes(num_bytes),
        )  # fmt: skip


def _rounded(num_bytes: int) -> int:
    """Return the size of a block for ``num_bytes``: the next of four steps between powers of two."""
    step = max(mmap.PAGESIZE, (1 << (num_bytes - 1).bit_length()) // (2 * _STEPS))
    return -(-num_bytes // step) * step
