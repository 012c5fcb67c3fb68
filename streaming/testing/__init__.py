"""Test your own kinds: classes of pytest tests to subclass in your test files. No product code.

``StoreTests`` is for a store, ``SourceTests`` for a source, ``DecoderTests`` for a decoder, ``RowTests`` for a kind of
row, ``OrderTests`` for an order, ``LayoutTests`` for a layout of ``shard_tools convert``. A subclass creates the object
under test; its name begins with ``Test`` so that pytest finds it. ``streaming.contracts`` lists what may be
implemented.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

try:
    import pytest
except ModuleNotFoundError as _error:
    if _error.name != "pytest":
        raise
    raise ModuleNotFoundError(
        "streaming.testing needs pytest, which is not installed; pip install pytest. Nothing else of shardstream needs "
        "it",
        name="pytest",
    ) from _error
else:  # so that failing assertions show their values, as in a test file
    _names = ("decoders", "layouts", "orders", "rows", "sources", "stores")
    pytest.register_assert_rewrite(*(f"{__name__}.{_name}" for _name in _names))

if TYPE_CHECKING:
    from streaming.testing.decoders import DecoderTests
    from streaming.testing.layouts import LayoutTests
    from streaming.testing.orders import OrderTests
    from streaming.testing.rows import RowTests
    from streaming.testing.sources import SourceTests
    from streaming.testing.stores import StoreTests

_HOMES = {
    "DecoderTests": "streaming.testing.decoders",
    "LayoutTests": "streaming.testing.layouts",
    "OrderTests": "streaming.testing.orders",
    "RowTests": "streaming.testing.rows",
    "SourceTests": "streaming.testing.sources",
    "StoreTests": "streaming.testing.stores",
}

__all__ = ["DecoderTests", "LayoutTests", "OrderTests", "RowTests", "SourceTests", "StoreTests"]


def __dir__() -> list[str]:
    """Return all names, including those that are imported on first use."""
    return sorted({*globals(), *_HOMES})


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a battery on first use, so that tests of a store import no loader."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        value: object = getattr(import_module(home), name)
        globals()[name] = value
        return value
