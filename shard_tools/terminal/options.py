"""Define the click options that several commands share, and convert them for the library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import click
from click.core import ParameterSource

from shard_tools.make.convert.base.records import ON_ERROR
from shard_tools.make.write.writer import DEFAULT_MAX_BYTES
from shard_tools.running.engine import DEFAULT_WORKERS, ENGINES
from shard_tools.running.switches import is_on, remember
from streaming.common.arguments import parse_bytes, parse_share
from streaming.errors import ConfigError
from streaming.storage import RetryPolicy, Storage
from streaming.types import DuplicateKeys

Command = Callable[..., Any]
KEEP_ORDER = "none"  # the value of --shuffle that keeps the order


class SizeType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer releases of click
    """A number of bytes, written as ``268435456``, ``256MB`` or ``256MiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        try:
            return parse_bytes(value, name=param.name if param and param.name else "size")
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class LimitType(click.ParamType):  # type: ignore[type-arg]
    """A bound on what may be left out: a number, ``20``, or a share, ``0.1%`` or ``0.001``."""

    name = "n|share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return an int for a number, and a float for a share."""
        if isinstance(value, (int, float)):
            return value
        if str(value).isascii() and str(value).isdecimal():
            return int(value)
        try:
            return float(parse_share(str(value), name=repr(value)))
        except ConfigError as error:
            self.fail(f"{error}; or a number such as 20", param, ctx)


class PairType(click.ParamType):  # type: ignore[type-arg]
    """``KEY=VALUE``; ``is_secret``: errors do not repeat the value."""

    name = "key=value"

    def __init__(self, *, is_secret: bool = False) -> None:
        self._is_secret = is_secret

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return the text before and after the first ``=``."""
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            shown = "what is given (not shown, as it may be secret)" if self._is_secret else repr(value)
            self.fail(f"{shown} is not of the form KEY=VALUE", param, ctx)
        return key, text


class SeedType(click.ParamType):  # type: ignore[type-arg]
    """The seed of a shuffle, 0 or more, or ``none``."""

    name = "seed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the seed, or ``"none"``."""
        text = str(value)
        if text != KEEP_ORDER and not text.isdecimal():
            self.fail(f"{text!r} is neither a seed (0, 1, 2, …) nor {KEEP_ORDER!r}", param, ctx)
        return text if text == KEEP_ORDER else int(text)


def names(value: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Split comma-separated names such as ``json,txt``; used as the ``type`` of an option."""
    return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else tuple(value)


SIZE = SizeType()
PAIR, SECRET_PAIR = PairType(), PairType(is_secret=True)
SEED = SeedType()
LIMIT = LimitType()
COUNT = click.IntRange(min=1)


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options, in their order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def taken(kind: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that are fields of a dataclass from ``arguments``, and return them."""
    return {one.name: arguments.pop(one.name) for one in fields(kind) if one.name in arguments}


shard_size_options = together(
    click.option(
        "--max-bytes", type=SIZE, default=DEFAULT_MAX_BYTES, show_default=True, help="Maximum size of a shard."
    ),
    click.option("--max-samples", type=COUNT, help="Maximum number of samples in a shard."),
)
start_over_option = click.option("--overwrite", is_flag=True, help="Delete the contents of the target and start over.")
engine_option = click.option(
    "--engine", type=click.Choice(ENGINES), default="local", show_default=True, help="Run here or on a Ray cluster."
)
STORAGE_OPTION_NAMES = ("endpoint_url", "region", "profile", "ca_file", "anon", "storage_option")
"""The parameters that :func:`with_storage_options` adds for the store."""
_SWITCHES = frozenset({"anon", "requester_pays", "path_style", "hedge", "read_only"})
_NUMBERS = {item.name: int if item.type == "int" else float for item in fields(RetryPolicy)}


def on_shards_in_parallel(local: int = DEFAULT_WORKERS["local"], what: str = "Shards") -> Callable[[Command], Command]:
    """Add ``--engine`` and ``--workers``, for commands that work on shards in parallel; ``local`` is the default."""
    there = DEFAULT_WORKERS["ray"]
    workers = click.option(
        "--workers", type=COUNT,
        help=f"{what} in parallel: threads here (default {local}), tasks on Ray (default {there}).",
    )  # fmt: skip
    return lambda command: engine_option(workers(command))


def dry_run_option(command: Command) -> Command:
    """Add ``--dry-run``, for commands that write."""
    return click.option(
        "--dry-run", is_flag=True, expose_value=False, is_eager=True, callback=remember,
        help="Check source, options and target, report what would be written, and write nothing.",
    )(command)  # fmt: skip


report_options = together(
    click.option(
        "--quiet", is_flag=True, expose_value=False, is_eager=True, callback=remember,
        help="No progress and no report; warnings and errors stay, and --json.",
    ),
    click.option("--json", "as_json", is_flag=True, is_eager=True, callback=remember, help="Print the result as JSON."),
)  # fmt: skip
"""Options of all commands that end with a report."""
debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=remember,
    help="On failure, show the traceback.",
)


with_storage_options = together(
    click.option(
        "--endpoint-url",
        metavar="URL",
        envvar="SHARD_TOOLS_ENDPOINT_URL",
        help="Address of an S3-compatible server.",
    ),
    click.option("--region", envvar="SHARD_TOOLS_REGION", help="Region of the bucket."),
    click.option("--profile", envvar="SHARD_TOOLS_PROFILE", help="Named profile of the AWS configuration files."),
    click.option(
        "--ca-file",
        metavar="FILE",
        envvar="SHARD_TOOLS_CA_FILE",
        help="Certificate authorities to trust besides the system's, as PEM.  [default: AWS_CA_BUNDLE]",
    ),
    click.option("--anon", is_flag=True, envvar="SHARD_TOOLS_ANON", help="Send unsigned requests, for public buckets."),
    click.option(
        "--storage-option",
        type=SECRET_PAIR,
        multiple=True,
        metavar="K=V",
        help="Any other option of the store. Command lines are visible to other users of this machine: "
        "give secrets by environment variable or profile.",
    ),
    debug_option,
)
"""The options for accessing a store, and ``--debug``; see :func:`as_storage_options`."""


def as_storage_options(arguments: dict[str, Any]) -> dict[str, object]:
    """Remove the options of :func:`with_storage_options` from ``arguments``; return them as ``Storage`` expects."""
    pairs: tuple[tuple[str, str], ...] = arguments.pop("storage_option")
    options: dict[str, object] = {key: typed_option(key, text) for key, text in pairs}
    for name in ("endpoint_url", "region", "profile", "ca_file", "anon"):
        value = arguments.pop(name)
        if value:
            options[name] = value
    return for_this_run(options)


def for_this_run(options: dict[str, object]) -> dict[str, object]:
    """Return the options of a store, made read-only in a dry run."""
    return options | ({"read_only": True} if is_on("dry_run") else {})


def typed_option(key: str, text: str) -> object:
    """Return ``text`` converted to the type of the storage option ``key``: a switch, a number, or text."""
    if key in _SWITCHES and text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if key not in _NUMBERS:
        return text
    try:
        return _NUMBERS[key](text)
    except ValueError as error:
        raise click.UsageError(f"--storage-option {key}: expected a number, got {text!r}") from error


left_out_options = together(
    click.option(
        "--on-error",
        type=click.Choice(ON_ERROR),
        help="Inputs that give no sample: end with an error, or leave them out and list them.  [default: raise]",
    ),
    click.option(
        "--max-bad", type=LIMIT, metavar="N|SHARE", help="With --on-error skip: most of these, such as 20 or 0.1%."
    ),
)
"""Options for inputs that give no sample; without one, commands have their own default."""


source_options = together(
    click.option("--source-split", "part", metavar="NAME", help="Take this split of a source of kind coco, voc or hf."),
    click.option("--source-config", "config", metavar="NAME", help="Take this configuration of a builder (hf)."),
    left_out_options,
    click.option(
        "--document-token",
        metavar="ID|none",
        help="The token that begins or ends a document in a stream of ids (nanogpt, npy).",
    ),
    click.option("--unlike-columns", is_flag=True, help="Accept JSONL, Parquet or CSV files with different columns."),
    click.option("--image-folder", metavar="URL", help="Where the images are that a COCO file, or messages, name."),
    click.option(
        "--image-max-side", "max_side", type=COUNT, metavar="PIXELS", help="Scale larger images down to this."
    ),
    click.option("--quality", type=click.IntRange(1, 100), help="Quality of re-encoded jpg and webp.  [default: 90]"),
    click.option(
        "--format", "image_format", type=click.Choice(("jpg", "webp", "png")), help="Re-encode all images so."
    ),
    click.option(
        "--image-fields",
        type=names,
        default=(),
        metavar="EXT,...",
        help="The fields to re-encode, of several.",
    ),
)
"""Options for the part of a source to take, and for re-encoding its images."""


index_option = click.option(
    "--index", "index_url", metavar="URL", help="Location of the index. Default: beside the shards."
)


unfinished_option = click.option(
    "--allow-unfinished",
    is_flag=True,
    help="Use the finished part of a set that is still being written, or whose writing was interrupted.",
)


union_option = click.option(
    "--classes",
    type=click.Choice(["union"]),
    help="Sets that number classes in different ways: write the numbers by name, as those of one set.",
)
"""Option of commands that write several sets as one."""


def on_shards(command: Command) -> Command:
    """Add URL..., ``--index``, ``--allow-unfinished``, ``--quiet``, ``--json`` and the storage options.

    The command gets a ``storage``.
    """

    @functools.wraps(command)
    def with_storage(**arguments: Any) -> Any:
        return command(storage=Storage(as_storage_options(arguments)), **arguments)

    decorated = index_option(unfinished_option(report_options(with_storage_options(with_storage))))
    return click.argument("urls", nargs=-1, required=True, metavar="URL...")(decorated)


def places_and_target(places: tuple[str, ...]) -> tuple[list[str], str]:
    """Split the arguments SOURCE... TARGET of a command.

    Raises:
        click.UsageError: A source or the target is missing.
    """
    *sources, target = places or ("",)
    if not sources:
        raise click.UsageError("Missing argument 'TARGET': give one or more sources, and then the target.")
    return sources, target


def on_named(what: str) -> Callable[[Command], Command]:
    """Add the same as :func:`on_shards`, with URL... NAME; the command gets the ``name`` of the ``what`` separately."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_name(*, urls: tuple[str, ...], **arguments: Any) -> Any:
            *places, name = urls
            if not places:
                raise click.UsageError(f"Give the URL of shards, and the name of the {what}.")
            return command(urls=places, name=name, **arguments)

        decorated = on_shards(with_name)
        decorated.__click_params__[-1].metavar = "URL... NAME"  # type: ignore[attr-defined]
        return decorated

    return decorate


duplicates_option = click.option(
    "--duplicate-keys",
    type=click.Choice(get_args(DuplicateKeys)),
    default="error",
    show_default=True,
    help="Treat a key that occurs twice as an error, or keep it as another sample.",
)


def refuse_options_of_the_set(taken: frozenset[str]) -> None:
    """Refuse options of a conversion that are fixed by the set.

    Raises:
        click.UsageError: One is given.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        is_given = context.get_parameter_source(name) in {ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT}
        if is_given and name not in taken:
            raise click.UsageError(f"{parameter.opts[0]}: with --append, options come from the set; leave it out.")
