"""Export to Prometheus through its library. This is the only module that uses it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from streaming.errors import ConfigError
from streaming.watch.metrics.exported import LABELS, Export, Exported, Observed, SeriesValue, check_observed

_collectors: weakref.WeakKeyDictionary[Any, Collector] = weakref.WeakKeyDictionary()


class Collector:
    """Read loaders when a registry is scraped; one per registry, so that each name occurs once."""

    def __init__(self, library: Any) -> None:
        self.exported = Exported()
        self._library = library

    def describe(self) -> Iterable[Any]:
        """Return nothing: names depend on the loaders, and only this class exports ours."""
        return ()

    def collect(self) -> Iterable[Any]:
        """Return the numbers of all loaders, by name."""
        families: dict[str, Any] = {}
        for reading in self.exported.readings():
            name = reading.number.prometheus_name
            family = families.get(name) or families.setdefault(name, self._family(reading))
            family.add_metric(reading.labels, reading.value)
        return families.values()

    def _family(self, reading: SeriesValue) -> Any:
        number = reading.number
        is_counter = number.kind == "counter"
        make = self._library.CounterMetricFamily if is_counter else self._library.GaugeMetricFamily
        return make(number.prometheus_name, number.meaning, labels=LABELS)


def prometheus(loader: Observed, registry: Any = None, *, name: str | None = None) -> Export:
    """Export a loader's numbers to a Prometheus registry; they are read when it is scraped.

    ::

        from prometheus_client import start_http_server

        streaming.metrics.prometheus(loader)
        start_http_server(9000 + rank)

    Names, kinds and units are those of docs/metrics.md. Labels are ``loader`` (the ``name``), ``rank`` and
    ``data_rank``. One registry may export several loaders. A closed loader keeps its numbers; a garbage-collected
    loader is removed. In a forked child, nothing is exported until this is called there. The library's "multiprocess
    mode" does not query collectors, and so has none of these numbers.

    Args:
        loader: A ``DataLoader``, a ``DeviceMeshFetcher``, or a ``DevicePrefetcher`` over one.
        registry: A ``prometheus_client.CollectorRegistry``; None: the library's global one.
        name: Value of the label ``loader``; None: the first free name of ``"loader"``, ``"loader2"``, …

    Returns:
        An object that can end the export before the loader ends.

    Raises:
        ConfigError: prometheus-client is not installed, ``loader`` is not one of ours, or the name is taken.
    """
    try:
        import prometheus_client.core as library
    except ImportError as error:
        raise ConfigError(
            "prometheus: needs prometheus-client: pip install 'shardstream[metrics]'; flat() needs nothing"
        ) from error
    check_observed(loader, "prometheus")
    registry = library.REGISTRY if registry is None else registry
    if not hasattr(registry, "register"):
        raise ConfigError(f"registry: expected a prometheus_client.CollectorRegistry, got {registry!r}")
    collector = _collectors.get(registry)
    if collector is None:
        collector = _collectors[registry] = Collector(library)
        registry.register(collector)
    return collector.exported.add(loader, name)
