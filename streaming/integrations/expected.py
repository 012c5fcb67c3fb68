"""Refuse what is no loader, before a trainer stumbles over it."""

from __future__ import annotations

from typing import Any

from streaming.errors import ConfigError
from streaming.loader import DataLoader

__all__ = ["expect_loader"]


def expect_loader(what: str, given: Any, *others: type[Any]) -> None:
    """Return where ``given`` is a ``streaming.DataLoader``, or one of ``others``.

    Raises:
        ConfigError: It is something else; the message begins with ``what``.
    """
    if not isinstance(given, (DataLoader, *others)):
        kind = type(given)
        raise ConfigError(
            f"{what}: expected a streaming.DataLoader, got a {kind.__module__}.{kind.__qualname__}; loaders of torch, "
            "and what these functions gave, go to the program as they are"
        )
