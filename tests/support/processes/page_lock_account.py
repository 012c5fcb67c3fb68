"""A page locker that keeps accounts."""

from __future__ import annotations

import torch

from streaming.run.engine.workers.ring import Memory

PAGE = 4096


class Account:
    """A locker that knows what is locked; locking what is locked, or unlocking what is not, fails."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.num_locks = 0
        self.given: list[torch.Tensor] = []  # kept, so that no other memory comes to lie there
        self.refuse = refuse

    def lock(self, memory: Memory) -> bool:
        address = memory.ctypes.data
        assert address % PAGE == memory.nbytes % PAGE == 0
        assert address not in self.locked
        if self.refuse:
            return False
        self.locked[address] = memory.nbytes
        self.num_locks += 1
        return True

    def unlock(self, memory: Memory) -> None:
        assert self.locked.pop(memory.ctypes.data) == memory.nbytes

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.given.append(torch.empty(shape, dtype=dtype))
        return self.given[-1]

    def holds(self, tensor: torch.Tensor) -> bool:
        if any(tensor.data_ptr() == one.data_ptr() for one in self.given):
            return True
        start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return any(base <= start and start + size <= base + length for base, length in self.locked.items())
