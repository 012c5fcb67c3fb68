"""Hold the index: chunk tables, sample tables, the rule that cuts chunks, where files lie (``docs/format.md``).

Pure: bytes in, values out, no I/O. :mod:`streaming.catalog.build` reads and writes the files.
"""
