"""Remember switches of the command line that concern every layer of a command, such as ``--quiet``."""

from __future__ import annotations

import click

_PREFIX = "shard_tools."


def remember(ctx: click.Context, param: click.Parameter, value: bool) -> bool:  # noqa: FBT001 (click's)
    """Note that a switch was given, and return it; the callback of an option."""
    if value:
        ctx.find_root().meta[_PREFIX + str(param.name)] = True
    return value


def is_on(name: str) -> bool:
    """Return whether a switch such as ``"quiet"`` was given to the running command."""
    context = click.get_current_context(silent=True)
    return context is not None and _PREFIX + name in context.find_root().meta
