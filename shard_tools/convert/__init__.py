"""Packing data of other layouts into indexed tar shards."""

from shard_tools.convert.journal import TargetNotEmptyError
from shard_tools.convert.records import Record, Skipped, Source
from shard_tools.convert.run import ConvertOptions, ConvertReport, convert
from shard_tools.convert.sources import SOURCE_KINDS, open_source

__all__ = [
    "SOURCE_KINDS",
    "ConvertOptions",
    "ConvertReport",
    "Record",
    "Skipped",
    "Source",
    "TargetNotEmptyError",
    "convert",
    "open_source",
]
