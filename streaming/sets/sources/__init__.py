"""Open what loops, the engine and tools read of the datasets that users hold. Not here: what users see (``datasets``).

Each kind of dataset has one object here, a ``streaming.run.engine.source.Source``: its ``source``.
"""
