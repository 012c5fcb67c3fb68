"""Pack data of other layouts into indexed tar shards: the verb ``convert``, and ``pack``, with which others write too.

A layout is a ``Source`` (``records.py``): a module that turns its files into records, and no more. It neither writes
shards nor knows options of the command line; how to add one stands in CONTRIBUTING.md.
"""

from shard_tools.convert.journal import TargetNotEmptyError
from shard_tools.convert.records import Record, Skipped, Source, SourceOptions
from shard_tools.convert.run import ConvertOptions, ConvertReport, convert
from shard_tools.convert.sources import SOURCE_KINDS, open_source

__all__ = [
    "SOURCE_KINDS",
    "ConvertOptions",
    "ConvertReport",
    "Record",
    "Skipped",
    "Source",
    "SourceOptions",
    "TargetNotEmptyError",
    "convert",
    "open_source",
]
