"""Hold fetched chunks: a single byte budget, mapped files, and the location of each sample.

Nothing here decides what is fetched or dropped. This folder only manages memory that the engine reserves and releases.
"""
