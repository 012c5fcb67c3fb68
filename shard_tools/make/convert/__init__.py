"""Pack data in other formats into indexed tar shards: the command ``convert``, and ``pack``, also for other commands.

A format is a ``Source`` (``records.py``): a module that only turns its files into records. It neither writes shards
nor depends on the command line; CONTRIBUTING.md explains how to add one.
"""

from shard_tools.make.convert.base.records import Record, Skipped, Source, SourceOptions
from shard_tools.make.convert.journal import TargetNotEmptyError
from shard_tools.make.convert.recode import ImageOptions
from shard_tools.make.convert.run import ConvertOptions, ConvertReport, convert
from shard_tools.make.convert.sources import SOURCE_KINDS, open_source

__all__ = [
    "SOURCE_KINDS",
    "ConvertOptions",
    "ConvertReport",
    "ImageOptions",
    "Record",
    "Skipped",
    "Source",
    "SourceOptions",
    "TargetNotEmptyError",
    "convert",
    "open_source",
]
