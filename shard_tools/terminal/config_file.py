"""Read options of commands from a TOML file: ``shard_tools --config FILE COMMAND …``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import click

from streaming.arguments import did_you_mean


def load_config(ctx: click.Context, _param: click.Parameter, path: str | None) -> None:
    """Make what a file says the defaults of all commands; the callback of ``--config``.

    Values at the top apply to every command that has the option, those in a table to the command of that name
    (``[convert]``, ``[column.add]``). The command line and the environment take precedence.

    Raises:
        click.UsageError: The file is not TOML, or names an option or command that does not exist.
    """
    if path is None:
        return
    try:
        with open(path, "rb") as file:
            content = _by_option(tomllib.load(file))
    except (OSError, ValueError) as error:  # also of text that is not UTF-8
        raise click.UsageError(f"--config {path}: {error}") from error
    group = ctx.command
    if not isinstance(group, click.Group):
        raise TypeError(f"--config is an option of a group, not of {group.name}")
    common = {name: value for name, value in content.items() if name not in group.commands}
    unused = {*common}
    ctx.default_map = _defaults(group, {name: content[name] for name in content.keys() - common}, common, unused, path)
    for name in sorted(unused):
        known = sorted({option for command in _commands(group) for option in _options(command)} | {*group.commands})
        raise click.UsageError(f"--config {path}: no command has an option {name!r}{did_you_mean(name, known)}")


def _defaults(
    group: click.Group, tables: Mapping[str, Any], common: Mapping[str, Any], unused: set[str], path: str
) -> dict[str, Any]:
    """Return the defaults of the commands of a group, by name; ``unused`` loses what one of them has."""
    found: dict[str, Any] = {}
    for name in tables.keys() - group.commands.keys():
        raise click.UsageError(
            f"--config {path}: no command {name!r}{did_you_mean(name, group.commands)} of {group.name}"
        )
    for name, command in group.commands.items():
        own = tables.get(name, {})
        if not isinstance(own, Mapping):
            raise click.UsageError(f"--config {path}: expected a table [{name}], got {own!r}")
        if isinstance(command, click.Group):
            found[name] = _defaults(command, _by_option(own), common, unused, path)
            continue
        options, own = _options(command), _by_option(own)
        for option in own.keys() - options.keys():
            raise click.UsageError(
                f"--config {path}: {name} has no option {option!r}{did_you_mean(option, options)}; write names as on "
                "the command line, without the dashes before them"
            )
        unused.difference_update(options)
        given = {option: value for option, value in common.items() if option in options} | dict(own)
        found[name] = {str(options[option].name): _plain(value) for option, value in given.items()}
    return found


def _by_option(content: Mapping[str, Any]) -> dict[str, Any]:
    """Spell names as on the command line, where ``max_bytes`` is ``max-bytes``."""
    return {name.replace("_", "-"): one for name, one in content.items()}


def _options(command: click.Command) -> dict[str, click.Parameter]:
    return {
        opt.lstrip("-"): param
        for param in command.params
        if isinstance(param, click.Option)
        for opt in param.opts
        if opt.startswith("--")
    }


def _commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from _commands(command)
        else:
            yield command


def _plain(value: Any) -> Any:
    """Return a value as on the command line: a table as KEY=VALUE pairs."""
    return [f"{key}={one}" for key, one in value.items()] if isinstance(value, Mapping) else value
