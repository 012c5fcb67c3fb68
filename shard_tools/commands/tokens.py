"""Add ``convert --tokenizer`` to the command ``convert``: its options, and the run."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any

import click

from shard_tools.make.convert.base.records import TEXT_UNITS
from shard_tools.make.tokens.encode import open_processes
from shard_tools.make.tokens.run import TokenizeOptions, tokenize
from shard_tools.running.engine import DEFAULT_WORKERS, open_engine
from shard_tools.running.progress import progress_bar
from shard_tools.terminal import render
from shard_tools.terminal.options import Command, names
from shard_tools.terminal.verbs import emit
from streaming.common.platforms import num_cores

_NAMES: tuple[str, ...] = (
    "text_field",
    "messages_field",
    "tokens_field",
    "mask_field",
    "chat_template",
    "bos",
    "eos",
    "keep",
    "split",
)
_NAMES += ("group_field", "documents", "pattern")


def tokenizer_options(command: Command) -> Command:
    """Add the options that turn text into tokens; see :func:`convert_tokens`."""
    option = click.option
    decorators = (
        option(
            "--tokenizer",
            metavar="FILE",
            help="Write token ids, using a tokenizer.json, sentencepiece or tiktoken file, or 'bytes'.",
        ),
        option("--text-field", metavar="FIELD", help="Field that holds the text.  [default: text; txt in tars]"),
        option("--messages-field", metavar="FIELD", help="Field that holds the messages of instruction data."),
        option(
            "--tokens-field",
            metavar="FIELD",
            help="Field that holds token ids already, such as input_ids: a list of whole numbers.",
        ),
        option("--mask-field", metavar="FIELD", help="Loss mask of --tokens-field: 0 and 1, or labels with -100."),
        option("--chat-template", metavar="FILE", help="Turns messages into text. Default: the tokenizer's."),
        option(
            "--bos", metavar="TOKEN", help="Put before each document: name, id or 'none'. Default: the tokenizer's."
        ),
        option("--eos", metavar="TOKEN", help="Put after each document, likewise."),
        option("--keep", type=names, metavar="FIELD,...", help="Keep these columns, in the field json."),
        option(
            "--split", multiple=True, metavar="NAME=SHARE", help="Split by hash, such as val=0.5%; the rest is train."
        ),
        option("--group-field", metavar="FIELD", help="Split by this column instead of by document."),
        option(
            "--documents",
            type=click.Choice(TEXT_UNITS),
            help="What counts as a document in a text file.  [default: line]",
        ),
        option(
            "--pattern", metavar="NAME|REGEX", help="Split pattern for tiktoken, if the file name does not imply it."
        ),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def take_token_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of :func:`tokenizer_options` from ``arguments`` and return those that were given.

    Raises:
        click.UsageError: Some were given, but neither ``--tokenizer`` nor ``--tokens-field``.
    """
    tokenizer = arguments.pop("tokenizer")
    given = {name: value for name in _NAMES if (value := arguments.pop(name)) not in (None, ())}
    if tokenizer is None and "tokens_field" not in given:
        if given:
            name = next(iter(given)).replace("_", "-")
            raise click.UsageError(f"--{name} applies to tokens; say which with --tokenizer FILE.")
        return {}
    return {"tokenizer": tokenizer, **given}


def convert_tokens(
    sources: tuple[str, ...],
    target: str,
    *,
    engine: str,
    workers: int | None,
    storage_options: dict[str, object],
    as_json: bool,
    **options: Any,
) -> None:
    """Run ``convert --tokenizer``."""
    if options.pop("images") or options.pop("image_folder", None) is not None:
        raise click.UsageError("Images are not tokenized; leave --image-max-side and its like out.")
    if options.pop("classes", None) is not None:
        raise click.UsageError("--classes numbers folders of images; it cannot be combined with --tokenizer.")
    if options.get("tokens_field") is not None and engine != "local":
        raise click.UsageError("--tokens-field: there is nothing to encode elsewhere; leave --engine out.")
    workers = workers or (DEFAULT_WORKERS["ray"] if engine == "ray" else num_cores())
    chosen = TokenizeOptions(workers=workers, **options)
    # A single one is this process, which also takes ids as they are.
    processes = engine == "local" and workers > 1 and chosen.tokens_field is None
    opened: AbstractContextManager[Executor | None]
    opened = open_processes(workers) if processes else open_engine(engine, workers)
    with opened as executor, progress_bar("convert", "documents") as progress:
        report = tokenize(
            sources, target, options=chosen, storage_options=storage_options, executor=executor, progress=progress
        )
    emit(report, as_json=as_json, for_people=render.show_tokens)
