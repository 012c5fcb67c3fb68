"""Represent the index: chunk tables, sample tables, the rule for cutting chunks, file locations (``docs/format.md``).

Pure: bytes in, values out, no I/O. :mod:`streaming.shards.catalog.build` reads and writes the files.
"""
