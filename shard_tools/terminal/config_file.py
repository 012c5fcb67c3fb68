"""Take options of commands from a TOML file (``shard_tools --config FILE COMMAND …``) or the environment."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import click

from streaming.common.arguments import did_you_mean

PREFIX = "SHARD_TOOLS"
"""Prefix of options in the environment."""
_EXAMPLE = '`max-bytes = "1GB"` below `[convert]`'
_log = logging.getLogger(__name__)


def load_config(ctx: click.Context, _param: click.Parameter, path: str | None) -> None:
    """Use the values of a file as defaults of all commands; the callback of ``--config``.

    Values at the top apply to every command with the option, those in a table to the command of that name
    (``[convert]``, ``[column.add]``). The command line and the environment take precedence.

    Raises:
        click.UsageError: The file is not TOML, or names an option or command that does not exist.
    """
    if path is None:
        return
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        content = _by_option(tomllib.loads(text))
    except OSError as error:
        raise click.UsageError(f"--config {path}: {error}") from error
    except ValueError as error:  # also raised for text that is not UTF-8
        raise click.UsageError(f"--config {path}: {error}; it has to be TOML, as in {_EXAMPLE}") from error
    at = partial(_at, path, text)
    group = ctx.command
    if not isinstance(group, click.Group):
        raise TypeError(f"--config is an option of a group, not of {group.name}")
    common = {name: value for name, value in content.items() if name not in group.commands}
    unused = {*common}
    ctx.default_map = _defaults(group, {name: content[name] for name in content.keys() - common}, common, unused, at)
    for name in sorted(unused):
        known = sorted({option for command in _commands(group) for option in _options(command)} | {*group.commands})
        raise click.UsageError(f"{at(name)}: no command has an option {name!r}{did_you_mean(name, known)}")


def _defaults(
    group: click.Group, tables: Mapping[str, Any], common: Mapping[str, Any], unused: set[str],
    at: Callable[[str], str],
) -> dict[str, Any]:  # fmt: skip
    """Return the defaults of a group's commands, by name; removes from ``unused`` the options that a command has."""
    found: dict[str, Any] = {}
    for name in tables.keys() - group.commands.keys():
        raise click.UsageError(f"{at(name)}: no command {name!r}{did_you_mean(name, group.commands)} of {group.name}")
    for name, command in group.commands.items():
        own = tables.get(name, {})
        if not isinstance(own, Mapping):
            raise click.UsageError(f"{at(name)}: expected a table [{name}], got {own!r}; write {_EXAMPLE}")
        if isinstance(command, click.Group):
            found[name] = _defaults(command, _by_option(own), common, unused, at)
            continue
        options, own = _options(command), _by_option(own)
        for option in own.keys() - options.keys():
            raise click.UsageError(
                f"{at(option)}: {name} has no option {option!r}{did_you_mean(option, options)}; write names as on "
                "the command line, without the dashes before them"
            )
        unused.difference_update(options)
        given = {option: value for option, value in common.items() if option in options} | dict(own)
        found[name] = {str(options[option].name): _plain(value) for option, value in given.items()}
    return found


def _at(path: str, text: str, name: str) -> str:
    """Return where a file names a table, command or option: its path, and the first such line."""
    wanted = re.escape(name).replace(r"\-", "[-_]")
    spelled = re.compile(rf"[\[\s\"']*(?:[\w-]+\.)*[\"']?{wanted}(?![\w-])")
    number = next((number for number, line in enumerate(text.splitlines(), 1) if spelled.match(line)), None)
    return f"--config {path}" + ("" if number is None else f", line {number}")


def warn_of_variables(group: click.Group) -> None:
    """Warn of environment variables with the prefix of options that match no option."""
    known = {f"{PREFIX}_CONFIG": ""}
    for path, command in _named(group, PREFIX):
        for param in command.params:
            if isinstance(param, click.Option):
                own = param.envvar if isinstance(param.envvar, str) else f"{path}_{param.name}".upper()
                known[own] = own
                known |= {f"{path}_{option.replace('-', '_')}".upper(): own for option in _options_of(param)}
    for name in sorted(os.environ):
        if name.startswith(f"{PREFIX}_") and known.get(name, "-") not in {"", name}:
            begin = len(PREFIX) + 1  # without the common prefix, which would make all names similar
            hint = did_you_mean(name[begin:], [one[begin:] for one in known]).replace("'", f"'{PREFIX}_", 1)
            hint = f" (did you mean {known[name]!r}?)" if name in known else hint
            _log.warning("%s in the environment is no option of any command%s", name, hint)


def _named(group: click.Group, above: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        path = f"{above}_{name}".replace("-", "_").upper()
        if isinstance(command, click.Group):
            yield from _named(command, path)
        else:
            yield path, command


def _by_option(content: Mapping[str, Any]) -> dict[str, Any]:
    """Spell names as on the command line, with ``max-bytes`` for ``max_bytes``."""
    return {name.replace("_", "-"): one for name, one in content.items()}


def _options(command: click.Command) -> dict[str, click.Parameter]:
    return {
        option: param for param in command.params if isinstance(param, click.Option) for option in _options_of(param)
    }


def _options_of(param: click.Option) -> list[str]:
    return [opt.lstrip("-") for opt in param.opts if opt.startswith("--")]


def _commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from _commands(command)
        else:
            yield command


def _plain(value: Any) -> Any:
    """Return a value as on the command line: a table becomes KEY=VALUE pairs."""
    return [f"{key}={one}" for key, one in value.items()] if isinstance(value, Mapping) else value
