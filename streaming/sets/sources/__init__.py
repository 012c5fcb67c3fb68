"""Provide the sources behind the datasets: what loops, the engine and tools read. Users see only ``datasets``.

Each kind of dataset has one object here, a ``streaming.run.engine.source.Source``: its ``source``.
"""
