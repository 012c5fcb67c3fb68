"""Observe a loader's work: as ranges for torch's profiler, and as a trace file.

The code that does the work names and describes it, through ``Metrics.timed``; nothing here depends on how it is done.
"""
