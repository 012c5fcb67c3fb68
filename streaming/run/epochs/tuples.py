"""Hand out batches as tuples of some of their entries: the loader's ``as_tuple``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming.errors import ConfigError


def checked_names(option: str, names: Any) -> tuple[str, ...] | None:
    """Return the names of entries, or None.

    Raises:
        ConfigError: They are not names.
    """
    if names is None:
        return None
    is_list = isinstance(names, (tuple, list))
    if not is_list or not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f'{option}: expected names of entries of a batch, such as ("jpg", "cls"), got {names!r}')
    return tuple(names)


def tuple_of(batch: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the entries of a batch that have these names, in their order.

    Raises:
        ConfigError: The batch is no dict, lacks an entry, or marks rows that do not count in one that is not named.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"as_tuple={names}: it picks entries of dicts, and the batches of this data set are of type "
            f"{type(batch).__name__}; leave it out"
        )
    absent = [name for name in names if name not in batch]
    if absent:
        raise ConfigError(
            f"as_tuple: the batch has no entry {absent[0]!r}; it has {', '.join(map(str, batch))}. Name some of these"
        )
    if "__valid__" in batch and "__valid__" not in names:
        raise ConfigError(
            f'as_tuple={names} leaves out "__valid__", which is False for rows that must not count: padding of '
            'last_batch="pad", and samples that on_error="skip" replaces. Name it too, or use last_batch="partial" and '
            'on_error="substitute"'
        )
    return tuple(batch[name] for name in names)
