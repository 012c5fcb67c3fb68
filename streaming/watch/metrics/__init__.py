"""Show a loader's work from outside: export its numbers, measure the headspace, serve ``shard_tools show``.

The parts of the loader decide what is counted, and when (``streaming/common/counters.py``); nothing here runs in the
training thread unless it is called there. The extra ``metrics`` is imported by the two functions that need it.
"""

from __future__ import annotations

from streaming.watch.metrics.experiment import Headspace, headspace
from streaming.watch.metrics.exported import Export
from streaming.watch.metrics.plain import flat
from streaming.watch.metrics.server import LoaderSocket, serve
from streaming.watch.metrics.to_opentelemetry import opentelemetry
from streaming.watch.metrics.to_prometheus import prometheus

__all__ = ["Export", "Headspace", "LoaderSocket", "flat", "headspace", "opentelemetry", "prometheus", "serve"]
