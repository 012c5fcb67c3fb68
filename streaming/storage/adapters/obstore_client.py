"""Open obstore in a form that this process can use: the module or, in a forked child, a copy of its native library.

obstore has one tokio runtime, made at the first request and kept forever. A forked child inherits it without the
threads that drive it, so every request of the child hangs, even requests to stores that it makes itself. tokio does not
support forking, and obstore cannot make another runtime. So the child loads the library again, from a copy in memory
(the loader distinguishes libraries by inode), with its own statics, runtime and connections. This takes 13 ms and,
because only the child uses the pages, the 15 MB of the file (measured with 0.12.1, 2026-11).
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import obstore
import obstore.exceptions
import obstore.store

from streaming.common.forks import CURE
from streaming.errors import StorageError

_SIDE_EFFECTS = ("obstore._store", "obstore.exceptions")
"""Names under which the library, when loaded, registers parts of itself in ``sys.modules``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One library and its parts.

    Attributes:
        api: ``get``, ``head``, ``list``, ``put`` and ``delete``.
        stores: ``S3Store`` and the others, whose instances ``api`` takes.
        errors: The exception types that both raise.
    """

    api: Any
    stores: Any
    errors: Any


_clients: dict[int, Client] = {os.getpid(): Client(api=obstore, stores=obstore.store, errors=obstore.exceptions)}
"""Clients by process: a child inherits those of its ancestors, which it must not use."""
_loading: dict[int, threading.Lock] = {}


def client() -> Client:
    """Return the client of this process.

    Raises:
        StorageError: A forked child cannot load a copy of the library; the message gives the cure.
    """
    pid = os.getpid()
    found = _clients.get(pid)
    if found is not None:
        return found
    with _loading.setdefault(pid, threading.Lock()):  # per process, so that it cannot have been held at the fork
        if pid not in _clients:
            _clients[pid] = _copy()
        return _clients[pid]


def _copy() -> Client:
    library = obstore._obstore
    try:
        descriptor = os.memfd_create("shardstream-obstore", os.MFD_CLOEXEC)
        try:
            _fill(descriptor, library.__file__)
            copy = _load(library.__name__, f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    except (OSError, ImportError, AttributeError) as error:  # AttributeError: not Linux
        raise StorageError(
            f"process {os.getpid()} was forked from one that uses obstore, whose threads it lacks, and cannot load it "
            f"again: {error}. To avoid this, {CURE}; or use the storage option client='fsspec'"
        ) from error
    return Client(api=copy, stores=copy._store, errors=copy.exceptions)


def _fill(descriptor: int, path: str) -> None:
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            left -= os.sendfile(descriptor, file.fileno(), None, left)  # from the current position


def _load(name: str, path: str) -> Any:
    before = {entry: sys.modules.get(entry) for entry in _SIDE_EFFECTS}
    try:
        spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        if spec is None or spec.loader is None:  # pragma: no cover  # a loader was given
            raise ImportError(path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for entry, was in before.items():
            if was is None:
                sys.modules.pop(entry, None)
            else:
                sys.modules[entry] = was
    return module
