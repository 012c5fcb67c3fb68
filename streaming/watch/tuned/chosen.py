"""Merge the options of a tuned file with those that a program gives, and warn if they may not fit."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from os import cpu_count, fspath
from typing import Any, ParamSpec, TypeVar

from infra import ranks_here
from streaming.common.arguments import counted, format_bytes, loaders_share, parse_bytes
from streaming.common.platforms import memory_bytes, num_cores
from streaming.storage import redact
from streaming.types import VERSION
from streaming.watch.tuned.file import Tuned, read_tuned

_log = logging.getLogger("streaming.loader")  # the name that users filter by
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def takes_tuned(init: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Make a constructor take ``tuned=``, a file, for its options that are not given, or are None.

    Only here can given options be distinguished from the defaults of the signature.
    """

    @functools.wraps(init)
    def taking(*args: _Given.args, **options: _Given.kwargs) -> _Made:
        if options.get("tuned") is None:
            return init(*args, **options)
        return init(*args, **with_tuned(options))

    return taking


def with_tuned(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a program gives, and the other options of the file ``tuned``.

    Raises:
        ConfigError: See :func:`read_tuned`.
        NotFoundError: There is no such file.
    """
    tuned = read_tuned(given["tuned"])
    where = redact(fspath(given["tuned"]))
    taken = {name: value for name, value in tuned.options.items() if given.get(name) is None}
    kept = {name: given[name] for name in tuned.options if name not in taken}
    _log.info("tuned: %s sets %s%s", where, _shown(taken) or "nothing", _overridden(kept, tuned))
    for doubt in doubts(tuned, taken):
        _log.warning(
            "tuned: %s may not suit this process: %s. Measure again where it runs: shard_tools bench URL --tune",
            where, doubt,
        )  # fmt: skip
    return {**given, **taken}


def doubts(tuned: Tuned, taken: Mapping[str, Any]) -> list[str]:
    """Describe the differences between this machine and package and the measured ones.

    Args:
        tuned: Content of the file.
        taken: Its options that are used.
    """
    found, ranks = [], ranks_here()
    cores = min(num_cores(), max(1, (cpu_count() or 1) // ranks))
    if cores != tuned.cores:
        shared = f", its part as one of {ranks} ranks on this machine" if ranks > 1 else ""
        found.append(f"it was measured with {counted(tuned.cores, 'core')}, and this process has {cores}{shared}")
    if tuned.version != VERSION:
        found.append(f"it was measured with version {tuned.version!r} of shardstream, and this is {VERSION!r}")
    limit, share = taken.get("memory_limit"), loaders_share(memory_bytes(), ranks)
    if limit is not None and share < parse_bytes(limit) <= loaders_share(tuned.memory_bytes or sys.maxsize, 1):
        found.append(f"it sets memory_limit={limit!r}, and a loader's part of the memory here is {format_bytes(share)}")
    return found


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _overridden(kept: Mapping[str, Any], tuned: Tuned) -> str:
    """Name the options in which a program overrides the file, with both values."""
    if not kept:
        return ""
    said = ", ".join(f"{name}={value!r} (in the file {tuned.options[name]!r})" for name, value in kept.items())
    return f"; the program's own are kept: {said}"
