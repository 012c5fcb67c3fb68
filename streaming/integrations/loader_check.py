"""Check that an argument is a loader, before a trainer fails on it in a less obvious way."""

from __future__ import annotations

from typing import Any

from streaming.errors import ConfigError
from streaming.loader import DataLoader

__all__ = ["expect_loader"]


def expect_loader(what: str, given: Any, *others: type[Any]) -> None:
    """Check that ``given`` is a ``streaming.DataLoader``, or one of ``others``.

    Raises:
        ConfigError: It is something else; the message begins with ``what``.
    """
    if not isinstance(given, (DataLoader, *others)):
        kind = type(given)
        raise ConfigError(
            f"{what}: expected a streaming.DataLoader, got a {kind.__module__}.{kind.__qualname__}; give torch's "
            "loaders, and what these functions returned, to the program as they are"
        )
