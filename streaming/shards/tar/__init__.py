"""Parse and write tar archives as bytes in memory. Pure: no I/O.

Import from the modules: ``fast`` (layout of a chunk's bytes), ``scanner`` (a stream of pieces), ``samples`` (from a
stream to samples), ``headers`` (the headers of our writer).
"""

from streaming.shards.tar.fast import find_values, parse_chunk
from streaming.shards.tar.group import ChunkLayout
from streaming.shards.tar.samples import iter_samples
from streaming.shards.tar.scanner import TarScanner

__all__ = ["ChunkLayout", "TarScanner", "find_values", "iter_samples", "parse_chunk"]
