"""Show what a loader does, outside of it: export its numbers, measure the headspace, serve it to ``shard_tools show``.

What is counted, and when, belongs to the parts of the loader (``streaming/common/counters.py``); nothing here runs in
the training thread unless it is called there. The extra ``metrics`` is imported by the two functions that need it.
"""

from __future__ import annotations

from streaming.watch.metrics.experiment import Headspace, headspace
from streaming.watch.metrics.exported import Export
from streaming.watch.metrics.plain import flat
from streaming.watch.metrics.server import LoaderSocket, serve
from streaming.watch.metrics.to_opentelemetry import opentelemetry
from streaming.watch.metrics.to_prometheus import prometheus

__all__ = ["Export", "Headspace", "LoaderSocket", "flat", "headspace", "opentelemetry", "prometheus", "serve"]
