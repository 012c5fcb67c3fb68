"""Watch a loader's work: as ranges for torch's profiler, and as a trace file.

Who does the work names it and tells of it, through ``Metrics.timed``; nothing here knows how any of it is done.
"""
