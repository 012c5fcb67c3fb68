"""Export to OpenTelemetry through its library. This is the only module that uses it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

from streaming.common.forks import in_children, renew_lock
from streaming.errors import ConfigError
from streaming.types import VERSION
from streaming.watch.metrics.exported import LABELS, Export, Exported, Observed, SeriesValue, check_observed
from streaming.watch.metrics.table import NUMBERS

_hubs: weakref.WeakKeyDictionary[Any, Instruments] = weakref.WeakKeyDictionary()


class Instruments:
    """One observable instrument per number, of one provider of meters; all instruments read the same loaders."""

    def __init__(self, library: Any, provider: Any) -> None:
        self.exported = Exported()
        self._make = library.Observation
        self._lock = threading.Lock()
        in_children(self, renew_lock)
        self._served: set[str] = set(NUMBERS)
        self._readings: dict[str, list[SeriesValue]] = {}
        meter = provider.get_meter("shardstream", VERSION)
        for number in NUMBERS.values():
            is_counter = number.kind == "counter"
            create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
            create(
                number.opentelemetry_name, callbacks=[partial(self._observe, number.name)], unit=number.unit,
                description=number.meaning,
            )  # fmt: skip

    def _observe(self, name: str, _options: Any) -> Iterator[Any]:
        for reading in self._of(name):
            yield self._make(reading.value, dict(zip(LABELS, reading.labels, strict=True)))

    def _of(self, name: str) -> list[SeriesValue]:
        """Return the readings of a number. A second request for the same number begins a new round of readings."""
        with self._lock:
            # The kept readings are newer than the previous request of every instrument that has requested them.
            if name in self._served:
                self._served = set()
                self._readings = {}
                for reading in self.exported.readings():
                    self._readings.setdefault(reading.number.name, []).append(reading)
            self._served.add(name)
            return self._readings.get(name, [])


def opentelemetry(loader: Observed, meter_provider: Any = None, *, name: str | None = None) -> Export:
    """Export a loader's numbers to OpenTelemetry, as observable instruments; they are read when a reader collects.

    Names are those of docs/metrics.md with a dot and without the unit, such as ``shardstream.wait_for_fetch`` in ``s``.
    Converted to Prometheus, they are the names of ``prometheus``; attributes become labels. Otherwise, see
    ``prometheus``.

    Args:
        loader: A ``DataLoader``, a ``DeviceMeshFetcher``, or a ``DevicePrefetcher`` over one.
        meter_provider: A ``MeterProvider``; None: the global one, even if it is set later.
        name: Value of the attribute ``loader``; None: the first free name of ``"loader"``, ``"loader2"``, …

    Returns:
        An object that can end the export before the loader ends.

    Raises:
        ConfigError: OpenTelemetry is not installed, ``loader`` is not one of ours, or the name is taken.
    """
    try:
        import opentelemetry.metrics as library
    except ImportError as error:
        raise ConfigError(
            "opentelemetry: needs opentelemetry-sdk: pip install 'shardstream[metrics]'; flat() needs nothing"
        ) from error
    check_observed(loader, "opentelemetry")
    given = library.get_meter_provider() if meter_provider is None else meter_provider
    if not hasattr(given, "get_meter"):
        raise ConfigError(f"meter_provider: expected a MeterProvider of OpenTelemetry, got {given!r}")
    # The global provider is a proxy until it is set; then it passes on its instruments.
    key = library if given is library.get_meter_provider() else given
    hub = _hubs.get(key)
    if hub is None:
        hub = _hubs[key] = Instruments(library, given)
    return hub.exported.add(loader, name)
