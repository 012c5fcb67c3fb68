"""Send objects to another process: definitions of the main script by value, large memory only once.

A worker process cannot import the main script: it may have no file, or no ``if __name__ == "__main__"`` that would keep
it from training again. So its functions and classes are sent by value, also if the script is the main module of a
process that ``multiprocessing`` started (where it is called ``__mp_main__``). The globals of the script that a function
names are sent along.
"""

from __future__ import annotations

import functools
import io
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from pickle import PickleBuffer
from typing import Any

import cloudpickle
import crc32c
import numpy as np
import torch

from streaming.build.batches.jagged import nested_on, nested_parts
from streaming.run.engine.workers.ring import ALIGN_BYTES, tensor_on

_MAIN_OF_A_CHILD = "__mp_main__"


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickle users' own classes and functions by value, and tensors and arrays through ``buffer_callback``."""

    def __init__(self, file: Any, buffer_callback: Callable[[PickleBuffer], Any] | None = None) -> None:
        main = sys.modules.get(_MAIN_OF_A_CHILD)
        if main is not None and main.__name__ == _MAIN_OF_A_CHILD:  # otherwise it is another name of __main__
            cloudpickle.register_pickle_by_value(main)
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle ``obj``; NotImplemented: as usual."""
        if type(obj) is torch.Tensor and obj.layout is torch.strided and obj.device.type == "cpu":
            return _reduce_tensor(obj)
        nested = nested_parts(obj)
        if nested is not None and obj.device.type == "cpu":
            return nested_on, nested
        if type(obj) is np.ndarray and not (obj.dtype.hasobject or obj.flags.forc):  # not contiguous
            return np.ascontiguousarray(obj).__reduce_ex__(5)
        if type(obj) is np.memmap:
            return _reduce_memmap(obj)
        if type(obj) is memoryview and obj.format == "B" and obj.contiguous:
            return _view, (PickleBuffer(obj),)
        return super().reducer_override(obj)


def cure_of(error: BaseException) -> str:
    """Return what to do about an error while functions of the user are loaded in a worker process."""
    name = error.name if isinstance(error, ImportError) else None
    if name is None:
        return "Import what it needs inside it, or use num_workers=0"
    return (
        f"Append the folder that holds {name.partition('.')[0]!r} to sys.path before the loader is made, import what "
        "the function needs inside it, or use num_workers=0"
    )


def dumps(thing: Any) -> bytes:
    """Pickle ``thing`` for ``pickle.loads`` in another process.

    Raises:
        Exception: Pickling a part of it raised it.
    """
    out = io.BytesIO()
    Pickler(out).dump(thing)
    return out.getvalue()


def fingerprint(thing: Any) -> bytes:
    """Return bytes that differ if ``dumps`` does. Large memory is hashed, not copied.

    Raises:
        Exception: Pickling a part of it raised it.
    """
    out = io.BytesIO()

    def sum_up(buffer: PickleBuffer) -> bool:
        try:
            data = buffer.raw()
        except BufferError:  # not contiguous: part of the pickle
            return True
        sums.append(crc32c.crc32c(data))
        return False

    sums: list[int] = []
    Pickler(out, sum_up).dump(thing)
    return out.getvalue() + repr(sums).encode()


class Redefinitions:
    """Detect functions and classes of the main script, or of a notebook, that are defined again.

    Args:
        functions: Functions in use, or objects of classes in use.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        things = [one.func if isinstance(one, functools.partial) else one for one in functions]
        defined = [one if hasattr(one, "__qualname__") else type(one) for one in things]
        main = vars(sys.modules["__main__"])
        named = {str(getattr(one, "__name__", "")): one for one in defined}
        self._used = {name: one for name, one in named.items() if main.get(name) is one}

    def new(self) -> list[str]:
        """Return the names of those that were defined again since the last call."""
        main = vars(sys.modules["__main__"])
        found = [name for name, one in self._used.items() if main.get(name, one) is not one]
        self._used |= {name: main[name] for name in found}
        return found


class SentOnce:
    """Pickle an object once for several processes, its large memory in an anonymous file that all of them map.

    A process's changes to it remain private. Its maker must ``close`` it when no more processes will start.

    Attributes:
        thing: The object.
        body: Its pickle.
        places: Start and size of each buffer in the file.
        fd: The file.
    """

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.places: list[tuple[int, int]] = []
        self.num_bytes = 0
        self.fd = os.memfd_create("shardstream-sent", os.MFD_CLOEXEC)
        self._end = weakref.finalize(self, os.close, self.fd)
        try:
            out = io.BytesIO()
            Pickler(out, self._keep).dump(thing)
            self.body = out.getvalue()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; processes that have it keep it."""
        self.fd = -1
        self._end()

    def _keep(self, buffer: PickleBuffer) -> bool:
        try:
            data = buffer.raw()
        except BufferError:  # not contiguous: part of the pickle
            return True
        start = -(-self.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], start + done)
        self.places.append((start, len(data)))
        self.num_bytes = start + len(data)
        return False


def received(body: bytes, places: list[tuple[int, int]], fd: int) -> Any:
    """Return the object of a ``SentOnce`` in another process. Its memory is the file's until it is written to."""
    num_bytes = max((start + size for start, size in places), default=0)
    whole = np.empty(0, np.uint8)
    if num_bytes:
        whole = np.frombuffer(mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE), np.uint8)
    return pickle.loads(body, buffers=[whole[start : start + size] for start, size in places])  # noqa: S301  our parent's


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.is_quantized:
        return NotImplemented
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # dimensions of size 0 and 1 may have any stride
    memory = flat.view(torch.uint8).numpy()
    return _tensor, (PickleBuffer(memory.data), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:  # noqa: FBT001
    if not isinstance(memory, np.ndarray):  # it was part of the pickle
        memory = np.frombuffer(bytearray(memory), np.uint8)
    tensor = tensor_on(memory, shape, dtype)
    return tensor.requires_grad_() if requires_grad else tensor


def _view(memory: Any) -> memoryview:
    """Return bytes that were sent as a view, which keeps their memory alive."""
    return memoryview(memory).toreadonly()


def _reduce_memmap(array: Any) -> Any:
    """Pickle a memmap as its file, which may be larger than memory; NumPy would send the contents."""
    file: Any = array._mmap
    if file is None or array.filename is None or not array.flags.c_contiguous or array.mode not in {"r", "r+", "c"}:
        return np.asarray(array).__reduce_ex__(5)
    first: int = array.__array_interface__["data"][0]
    start_of_map: int = np.frombuffer(file, np.uint8).__array_interface__["data"][0]
    offset = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + first - start_of_map
    return np.memmap, (os.path.abspath(array.filename), array.dtype, array.mode, offset, array.shape)
