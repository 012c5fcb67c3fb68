"""The index: chunk tables, sample tables, the rule that cuts chunks, and where the files lie (``docs/format.md``).

Pure: bytes in, values out. :mod:`streaming.catalog.build` reads and writes the files.
"""
