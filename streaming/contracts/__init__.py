"""List the contracts that users may implement, and the names that they need; only users import this module.

======================  ============================  ========================================  ================
your own                implement                     use it                                    tests
======================  ============================  ========================================  ================
store                   ``Adapter``                   ``ADAPTERS["shelf"] = ShelfAdapter``      ``StoreTests``
source                  ``CustomSource``              ``DataLoader(DataSet(source), …)``        ``SourceTests``
decoder                 ``Decoder``                   ``decode={"wav": wav}``                   ``DecoderTests``
kind of row             ``RowKind``                   ``items`` of a source                     ``RowTests``
order                   ``Orders``                    ``orders`` of a source                    ``OrderTests``
layout of ``convert``   ``ConvertSource``             ``LAYOUTS["fasta"] = Layout(…)``          ``LayoutTests``
======================  ============================  ========================================  ================

The test classes are in ``streaming.testing``. Each contract is defined beside its callers and the values in its
signatures (docs/design/0039). Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_tools.make.convert.base.files import FileSource
    from shard_tools.make.convert.base.records import Record, SourceOptions
    from shard_tools.make.convert.base.records import Source as ConvertSource
    from shard_tools.make.convert.sources import LAYOUTS, Layout
    from streaming.build.batches.build import BatchBuilder, ExchangedRows, GroupedRows, Mask, RowKind, Samples
    from streaming.build.batches.items.pieces import PieceItems
    from streaming.build.batches.rows import Rows
    from streaming.build.decode.registry import FieldDecoder
    from streaming.order.packing.layout import PackRows, RowSamples
    from streaming.order.plan.order import EpochOrders, LaidOrder, LaneParts, Order, Orders, OrderSettings
    from streaming.run.engine.source import Source
    from streaming.sets.datasets.face import DataSet
    from streaming.sets.sources.own import CustomSource
    from streaming.shards.fetch.chunks import Bytes, InPlace, Slices, Table
    from streaming.shards.fetch.layout import UnitLayout
    from streaming.shards.fetch.read import FetchRange
    from streaming.shards.index.sample_table import SampleLocation
    from streaming.storage.base.adapter import (
        Adapter,
        ChangedError,
        ObjectInfo,
        RangeBody,
        Sink,
        StoreWriter,
        Target,
        ThrottledError,
        TransientError,
        UnreachableError,
        copy_piece,
    )
    from streaming.storage.base.options import StorageOptions
    from streaming.storage.store import ADAPTERS
    from streaming.types import Decoder, Int64Array, ReadBuffer

_HOMES = {
    "ADAPTERS": "streaming.storage.store",
    "Adapter": "streaming.storage.base.adapter",
    "BatchBuilder": "streaming.build.batches.build",
    "Bytes": "streaming.shards.fetch.chunks",
    "ChangedError": "streaming.storage.base.adapter",
    "ConvertSource": "shard_tools.make.convert.base.records",
    "CustomSource": "streaming.sets.sources.own",
    "DataSet": "streaming.sets.datasets.face",
    "Decoder": "streaming.types",
    "EpochOrders": "streaming.order.plan.order",
    "ExchangedRows": "streaming.build.batches.build",
    "FetchRange": "streaming.shards.fetch.read",
    "FieldDecoder": "streaming.build.decode.registry",
    "FileSource": "shard_tools.make.convert.base.files",
    "GroupedRows": "streaming.build.batches.build",
    "InPlace": "streaming.shards.fetch.chunks",
    "Int64Array": "streaming.types",
    "LAYOUTS": "shard_tools.make.convert.sources",
    "LaidOrder": "streaming.order.plan.order",
    "LaneParts": "streaming.order.plan.order",
    "Layout": "shard_tools.make.convert.sources",
    "Mask": "streaming.build.batches.build",
    "ObjectInfo": "streaming.storage.base.adapter",
    "Order": "streaming.order.plan.order",
    "OrderSettings": "streaming.order.plan.order",
    "Orders": "streaming.order.plan.order",
    "PackRows": "streaming.order.packing.layout",
    "PieceItems": "streaming.build.batches.items.pieces",
    "RangeBody": "streaming.storage.base.adapter",
    "ReadBuffer": "streaming.types",
    "Record": "shard_tools.make.convert.base.records",
    "RowKind": "streaming.build.batches.build",
    "RowSamples": "streaming.order.packing.layout",
    "Rows": "streaming.build.batches.rows",
    "SampleLocation": "streaming.shards.index.sample_table",
    "Samples": "streaming.build.batches.build",
    "Sink": "streaming.storage.base.adapter",
    "Slices": "streaming.shards.fetch.chunks",
    "Source": "streaming.run.engine.source",
    "SourceOptions": "shard_tools.make.convert.base.records",
    "StorageOptions": "streaming.storage.base.options",
    "StoreWriter": "streaming.storage.base.adapter",
    "Table": "streaming.shards.fetch.chunks",
    "Target": "streaming.storage.base.adapter",
    "ThrottledError": "streaming.storage.base.adapter",
    "TransientError": "streaming.storage.base.adapter",
    "UnitLayout": "streaming.shards.fetch.layout",
    "UnreachableError": "streaming.storage.base.adapter",
    "copy_piece": "streaming.storage.base.adapter",
}
_OTHERWISE = {"ConvertSource": "Source"}
"""Names that differ from those in their modules, where ``Source`` is the source of a conversion."""

__all__ = [
    "ADAPTERS",
    "LAYOUTS",
    "Adapter",
    "BatchBuilder",
    "Bytes",
    "ChangedError",
    "ConvertSource",
    "CustomSource",
    "DataSet",
    "Decoder",
    "EpochOrders",
    "ExchangedRows",
    "FetchRange",
    "FieldDecoder",
    "FileSource",
    "GroupedRows",
    "InPlace",
    "Int64Array",
    "LaidOrder",
    "LaneParts",
    "Layout",
    "Mask",
    "ObjectInfo",
    "Order",
    "OrderSettings",
    "Orders",
    "PackRows",
    "PieceItems",
    "RangeBody",
    "ReadBuffer",
    "Record",
    "RowKind",
    "RowSamples",
    "Rows",
    "SampleLocation",
    "Samples",
    "Sink",
    "Slices",
    "Source",
    "SourceOptions",
    "StorageOptions",
    "StoreWriter",
    "Table",
    "Target",
    "ThrottledError",
    "TransientError",
    "UnitLayout",
    "UnreachableError",
    "copy_piece",
]


def __dir__() -> list[str]:
    """Return all names, including those that are imported on first use."""
    return sorted({*globals(), *_HOMES})


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a name on first use, so that the author of a store imports no loader."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        value: object = getattr(import_module(home), _OTHERWISE.get(name, name))
        globals()[name] = value
        return value
