"""Make pages from what the code says of itself: options from signatures and docstrings, commands from click."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

import streaming
from shard_tools import ShardWriter, optimize
from shard_tools.cli import cli
from streaming.build.decode import images, registry
from streaming.storage import RetryPolicy, StorageOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The text that is put into a page, and the pages below it by name."""

    text: str
    below: dict[str, str] = field(default_factory=dict)


DESCRIBED: dict[str, Any] = {
    **{name: getattr(streaming, name) for name in ("StreamingDataset", "DataLoader", "ShuffleConfig")},
    **{name: getattr(streaming, name) for name in ("Mixture", "Packed", "Windows", "Curriculum", "Balanced")},
    **{f"Schedule.{name}": getattr(streaming.Schedule, name) for name in ("linear", "root", "cosine", "steps")},
    **{name: getattr(streaming, name) for name in ("DevicePrefetcher", "SequenceSlice", "StageFields", "Broadcast")},
    **{name: getattr(streaming, name) for name in ("Sound", "Video")},
    **{name: getattr(streaming, name) for name in ("OrdinaryDataset", "TableDataset", "TorchIterable", "Tickets")},
    **{name: getattr(streaming, name) for name in ("DeviceMeshFetcher", "DeviceMeshSampler", "RetrySampler")},
    **{name: getattr(streaming, name) for name in ("RemoteGroup",)},
    "storage_options": StorageOptions,
    "storage_options: time-outs and retries": RetryPolicy,
    "ShardWriter": ShardWriter,
    "optimize": optimize,
}
"""Everything that takes options, by its heading; of options in a mapping, the class that checks them."""

# Options that are those of another class, or that are no option of users.
_NOT_SHOWN = {("storage_options", "retry"), ("StreamingDataset", "options")}
_SECTION = re.compile(r"^(\w[\w ]*):$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}\*{0,2}(\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: ?(.*)$")


def documented(target: Any) -> dict[str, str]:
    """Return what the docstring says of each argument or attribute."""
    docs = [inspect.getdoc(target) or ""]
    if inspect.isclass(target):
        docs += [inspect.getdoc(base) or "" for base in target.__mro__[1:-1]]
    found: dict[str, str] = {}
    for doc in reversed(docs):
        for title, body in zip(*[iter(_SECTION.split(doc)[1:])] * 2, strict=False):
            if title in {"Args", "Attributes", "Keyword Args"}:
                found |= dict(_entries(body))
    return found


def _entries(body: str) -> Iterator[tuple[str, str]]:
    names: list[str] = []
    lines: list[str] = []
    for line in [*body.strip("\n").split("\n"), "    end: "]:
        entry = _ENTRY.match(line)
        if entry:
            yield from ((name, " ".join(" ".join(lines).split())) for name in names)
            names, lines = [name.strip("*") for name in entry[1].split(", ")], [entry[2]]
        elif line.startswith("    ") or not line.strip():
            lines.append(line)
        else:  # the section is over
            break
    else:
        return
    yield from ((name, " ".join(" ".join(lines).split())) for name in names)


def parameters(name: str, target: Any) -> list[inspect.Parameter]:
    """Return the arguments that users give."""
    given = inspect.signature(target).parameters.values()
    hidden = {"self", "cls"}
    return [
        one
        for one in given
        if one.name not in hidden
        and (name, one.name) not in _NOT_SHOWN
        and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
    ]


def option_rows(name: str, target: Any) -> list[tuple[str, str, str]]:
    """Return name, default and meaning of each option."""
    said = documented(target)
    return [(one.name, _default(one), said.get(one.name, "")) for one in parameters(name, target)]


def _default(one: inspect.Parameter) -> str:
    if one.default is one.empty:
        return "required"
    if type(one.default).__name__ in {"_HAS_DEFAULT_FACTORY_CLASS", "Ellipsis"}:
        return "default"
    return f"`{one.default!r}`".replace("'", '"')


def markdown(text: str) -> str:
    """Return the prose of a docstring as Markdown for a cell of a table."""
    text = re.sub(r":\w+(?::\w+)?:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"(?<=[a-z])::(?= )", ":", text)
    return text.replace("|", "\\|").replace("*", "\\*") if "`" not in text else _cell(text)


def _cell(text: str) -> str:
    """Escape what a table or emphasis would take for its own, outside code; bars also inside."""
    pieces = text.replace("|", "\\|").split("`")
    return "`".join(piece if number % 2 else piece.replace("*", "\\*") for number, piece in enumerate(pieces))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def options() -> Made:
    """Return all options, one table a class."""
    parts = []
    for name, target in DESCRIBED.items():
        rows = [(f"`{option}`", default, markdown(said)) for option, default, said in option_rows(name, target)]
        first = markdown((inspect.getdoc(target) or "").partition("\n\n")[0].replace("\n", " "))
        parts.append(f"## `{name}`\n\n{first}\n\n{table(('option', 'default', 'what it does'), rows)}")
    return Made(text="\n".join(parts))


def decoders() -> Made:
    """Return all names that ``decode=`` takes, and what extensions become."""
    by_decoder: dict[str, list[str]] = {}
    for name, decoder in registry.BY_NAME.items():
        by_decoder.setdefault(_says(decoder), []).append(name)
    names = [(_codes(found), said) for said, found in by_decoder.items()]
    names += [(f"`{mode}`, `{mode}:224x224`", _image(mode)) for mode in images.MODES]
    names += [(f"`rgb8:{word}224x224`, and so any mode", _says(make)) for word, make in images.CROPS.items()]
    names.append(("`array:uint16`, `array:uint16->int64`, `array:float32:3x224x224`", _says(registry.arrays.array)))
    names.append(("`auto`", "By extension, as in the table below."))
    extensions: dict[str, list[str]] = {}
    for extension, decoder in registry.BY_EXTENSION.items():
        extensions.setdefault(_says(decoder), []).append(extension)
    kinds = [(_codes(sorted(registry._IMAGES)), "An image, `rgb8` unless `decode=` says another mode.")]
    kinds += [(_codes(found), said) for said, found in extensions.items()]
    kinds.append(("`gz`, as in `json.gz`", "Unpacked, then as the name before it says."))
    refused = [(f"`{extension}`", f"{why[0].upper()}{why[1:]}.") for extension, why in registry._REFUSED.items()]
    return Made(
        text="## Names\n\n"
        + table(("name", "gives"), names)
        + "\n## Extensions\n\n"
        + table(("extension", "with `decode='auto'`"), kinds)
        + "\nAll others are bytes.\n\n## Refused\n\n"
        + table(("extension", "why"), refused)
    )


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _says(decoder: Any) -> str:
    doc = inspect.getdoc(decoder if inspect.isroutine(decoder) else type(decoder)) or ""
    return markdown(doc.partition("\n\n")[0].replace("\n", " "))


def _image(mode: str) -> str:
    decoder = images.ImageDecoder(mode=mode, size=(224, 224))
    if decoder.dtype is None or decoder.shape is None:
        return "A `PIL.Image`, upright; with a size, scaled to it (height x width)."
    shape = ", ".join(["H", "W", *map(str, decoder.shape[2:])])
    values = " in 0 to 1" if decoder.dtype.kind == "f" else ""
    return f"An image, upright: {decoder.dtype}{values}, `[{shape}]`; with a size, scaled to it (height x width)."


def commands() -> Made:
    """Return all commands of ``shard_tools``, each with its help."""
    parts = []
    for name, command in sorted(cli.commands.items()):
        parts.append(_command(f"shard_tools {name}", command, 2))
        for inner, one in sorted(getattr(command, "commands", {}).items()):
            parts.append(_command(f"shard_tools {name} {inner}", one, 3))
    return Made(text="\n".join(parts))


def _command(name: str, command: click.Command, level: int) -> str:
    context = click.Context(command, info_name=name, max_content_width=86, terminal_width=86)
    formatter = context.make_formatter()
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)
    command.format_epilog(context, formatter)
    rows = []
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record:
            rows.append((f"`{record[0]}`".replace("|", "\\|"), markdown(" ".join(record[1].split()))))
    options = table(("option", "what it does"), rows) if rows else ""
    return f"{'#' * level} `{name}`\n\n```text\n{formatter.getvalue()}```\n\n{options}"
