"""Build batches in this process as a worker process would, while no worker is up."""

from __future__ import annotations

import io
import logging
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from streaming.build.batches.build import BadSampleReport, Recipe
from streaming.build.batches.rows import Rows
from streaming.common.arguments import format_bytes
from streaming.run.engine.threads.stacks import where_is
from streaming.run.engine.workers.in_progress import BatchWork
from streaming.run.engine.workers.main import SlotBuilder
from streaming.run.engine.workers.ring import Slot
from streaming.run.engine.workers.transport import Parcel

_MOST_COPIED_BYTES = 64 << 20
"""Functions that hold more bytes are not copied: a copy takes memory for seconds that ``memory_limit`` ignores."""
_IMPORTS = ("cloudpickle.cloudpickle", "subimport")
"""Attribute that makes cloudpickle import a function's modules when it is loaded."""
_log = logging.getLogger(__name__)


class StandInWorker:
    """Replace a worker process: build the same batches from the same bytes with the same functions. For one thread.

    Functions are copies, as in a process: changes that they make to themselves, or to globals of the main script, stay
    in the copies. Batches lie in slots of the ring, and everything in them has been pickled. The calling thread waits
    for the batch, so it does not draw from the generators of the process; their state is restored afterwards.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._work: tuple[int, BatchWork] | None = None
        self._row = [-1]
        self._builder = SlotBuilder(recipe, self._row)

    @classmethod
    def of(cls, recipe: bytes) -> StandInWorker | None:
        """Return one with functions from a pickle; None if a worker process would act otherwise, or would fail."""
        if len(recipe) > _MOST_COPIED_BYTES:
            _log.info(
                "transform, decode and collate_fn hold %s: too much for another copy in this process, so the first "
                "batches wait for worker processes", format_bytes(len(recipe)),
            )  # fmt: skip
            return None
        try:
            return cls(_Unpickler(io.BytesIO(recipe)).load())
        except Exception:  # noqa: BLE001  a user's class that does not load: worker processes report it
            return None

    def build(
        self, rows: Rows, valid: npt.NDArray[np.bool_] | None, substitutes: Callable[[int], Iterator[Rows]],
        report: BadSampleReport, *, seed: int, batch: int, slot: Slot,
    ) -> Parcel:  # fmt: skip
        """Return the batch of ``rows``, as a worker process packs it in ``slot``."""
        self._work = threading.get_ident(), BatchWork(batch, rows.keys, rows.urls, self._row)
        try:
            with self._builder.watch.kept():
                return self._builder.build(rows, valid, slot, seed, substitutes, report)
        finally:
            self._work = None

    def describe(self) -> list[str]:
        """Describe what is being built, for people. May be called from any thread."""
        working = self._work
        if working is None:
            return []
        thread, work = working
        return [f"the thread that asks for batches {work.describe()}, until a worker is up; in {where_is(thread)}"]


class _Unpickler(pickle.Unpickler):
    """Load a pickle of this process, but fail like a worker for modules that exist only in this process's memory.

    So an import that fails in worker processes is an error at the first batch, not some epochs later, when one is up.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _IMPORTS:
            return _imported
        _check_importable(module)
        return super().find_class(module, name)


def _imported(name: str) -> Any:
    """Import a module that a function of the main script names."""
    _check_importable(name)
    return cloudpickle.cloudpickle.subimport(name)


def _check_importable(name: str) -> None:
    """Check, without importing it, that a new process with the same import path would find a module.

    Raises:
        ModuleNotFoundError: It would not find it.
    """
    package, _, _ = name.rpartition(".")
    where = None
    if package:
        _check_importable(package)
        where = getattr(sys.modules.get(package), "__path__", None)
        if where is None:
            return  # not a package: a module that defines submodules, such as ``os.path``
    if not any(finder.find_spec(name, where) for finder in sys.meta_path):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def as_in_a_process() -> Iterator[Any]:
    """Leave the modes of torch that the loop may be in, and compute on one thread: sums depend on the thread count."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(num_threads)
