"""List the loaders that a registry exports, and read them when it collects. Nothing here depends on a library."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from streaming.common.counters import Observation
from streaming.common.forks import in_children
from streaming.errors import ConfigError
from streaming.watch.metrics.table import NUMBERS, Number

_log = logging.getLogger(__name__)
Labels = tuple[str, str, str]
"""Values of ``LABELS``."""
LABELS = ("loader", "rank", "data_rank")


class Observed(Protocol):
    """A loader as exporters see it: any of ours, or a ``DevicePrefetcher`` over one."""

    def _observed(self) -> Observation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesValue:
    """A number of a loader at one moment."""

    number: Number
    labels: Labels
    value: float


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry:
    name: str
    loader: weakref.ref[Any]
    has_failed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """An exported loader. It need not be kept: the export ends when the loader is garbage collected.

    Attributes:
        name: The value of the label ``loader``.
    """

    name: str
    _end: Callable[[], None] = field(repr=False)

    def close(self) -> None:
        """End the export now. May be called repeatedly."""
        self._end()


class Exported:
    """The loaders that one registry, or one provider of meters, exports; they are held by weak references.

    Thread-safe. In a forked child it is empty: the parent exports the loaders that the child has copies of.

    ``_lock`` guards ``_entries``.
    """

    def __init__(self) -> None:
        self._begin_anew()
        in_children(self, Exported._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []

    def add(self, loader: Observed, name: str | None) -> Export:
        """Export a loader from now on. A loader that is already exported keeps its name.

        Raises:
            ConfigError: Another loader has the name, or this one has another name.
        """
        with self._lock:
            # Invariant: each loader and each name is listed at most once.
            entries = self._entries = [entry for entry in self._entries if entry.loader() is not None]
            known = next((entry for entry in entries if entry.loader() is loader), None)
            if known is None:
                known = _Entry(name=name or _free_name(entries), loader=weakref.ref(loader))
                if any(entry.name == known.name for entry in entries):
                    raise ConfigError(
                        f"name={name!r}: another loader is exported by this name; give each its own, or leave it out"
                    )
                entries.append(known)
            elif name not in (None, known.name):
                raise ConfigError(f"name={name!r}: this loader is exported as {known.name!r} already; close that first")
        return Export(known.name, lambda: self._remove(known))

    def readings(self) -> Iterator[SeriesValue]:
        """Read all loaders that still exist; log once each loader that cannot be read, and leave it out."""
        for entry in list(self._entries):  # list() is atomic
            loader = entry.loader()
            if loader is None:
                self._remove(entry)
                continue
            try:
                found = observe(loader)
            except Exception:  # noqa: BLE001  a border to another thread: an error of one loader must not hide the others
                if not entry.has_failed:
                    _log.exception("metrics of the loader %r cannot be read; they are left out", entry.name)
                entry.has_failed = True
                continue
            yield from _readings(entry.name, found)

    def _remove(self, entry: _Entry) -> None:
        with self._lock:
            # The entry is not listed, even after concurrent calls.
            self._entries = [one for one in self._entries if one is not entry]


def check_observed(loader: Any, by: str) -> None:
    """Check that a loader can be read.

    Raises:
        ConfigError: It is not one of ours.
    """
    try:
        observe(loader)
    except AttributeError as error:
        raise ConfigError(
            f"{by}: expected a DataLoader, a DeviceMeshFetcher, or a DevicePrefetcher over one, got {loader!r}, "
            "which does not count its waits. Read its data through a DataLoader: DataLoader(dataset, batch_size=…)"
        ) from error


def observe(loader: Observed) -> Observation:
    """Return the current observation of a loader; in any thread."""
    return loader._observed()


def _free_name(entries: list[_Entry]) -> str:
    taken = {entry.name for entry in entries}
    names = ("loader", *(f"loader{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _readings(name: str, found: Observation) -> Iterator[SeriesValue]:
    rank = str(found.rank)
    place = {"epoch": found.epoch, "samples_seen": found.samples_seen, "world_size": found.world_size}
    yield from _known((name, rank, str(found.data_rank)), {**found.numbers, **place})
    for data_rank, numbers in found.readers.items():
        yield from _known((f"{name}/readers", rank, str(data_rank)), numbers)


def _known(labels: Labels, numbers: Mapping[str, float]) -> Iterator[SeriesValue]:
    for name, value in numbers.items():
        if (number := NUMBERS.get(name)) is not None:
            yield SeriesValue(number=number, labels=labels, value=float(value))
