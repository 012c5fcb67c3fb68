"""Add ``convert --tokenizer`` to the command ``convert``: its options, and the run."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import click

from shard_tools.make.convert.base.records import TEXT_UNITS
from shard_tools.make.convert.run import RecordOptions
from shard_tools.make.tokens.run import TokenizeOptions, TokenizeReport, tokenize
from shard_tools.running.engine import DEFAULT_WORKERS, open_engine
from shard_tools.running.printing import show_earlier
from shard_tools.running.processes import ProcessExecutor
from shard_tools.running.progress import progress_bar
from shard_tools.running.report import plain, plain_place
from shard_tools.terminal.options import names, together
from shard_tools.terminal.verbs import emit
from streaming.common.arguments import counted, format_bytes
from streaming.common.platforms import num_cores

tokenizer_options = together(
    click.option(
        "--tokenizer",
        metavar="FILE",
        help="Write token ids, using a tokenizer.json, sentencepiece or tiktoken file, or 'bytes'.",
    ),
    click.option("--text-field", metavar="FIELD", help="Field that holds the text.  [default: text; txt in tars]"),
    click.option("--messages-field", metavar="FIELD", help="Field that holds the messages of instruction data."),
    click.option(
        "--tokens-field",
        metavar="FIELD",
        help="Field that holds token ids already, such as input_ids: a list of whole numbers.",
    ),
    click.option("--mask-field", metavar="FIELD", help="Loss mask of --tokens-field: 0 and 1, or labels with -100."),
    click.option("--chat-template", metavar="FILE", help="Turns messages into text. Default: the tokenizer's."),
    click.option(
        "--image-token", metavar="TOKEN", help="Stands for an image: name, id or 'none'. Default: the tokenizer's."
    ),
    click.option(
        "--image-tokens",
        metavar="N|MODULE:FUNCTION",
        help="How many of it: a number, or of (width, height).  [default: 1]",
    ),
    click.option("--audio-token", metavar="TOKEN", help="Stands for a sound: as --image-token."),
    click.option(
        "--audio-tokens", metavar="N|MODULE:FUNCTION", help="How many of it: a number, or of (seconds).  [default: 1]"
    ),
    click.option(
        "--bos", metavar="TOKEN", help="Put before each document: name, id or 'none'. Default: the tokenizer's."
    ),
    click.option("--eos", metavar="TOKEN", help="Put after each document. Default: the tokenizer's."),
    click.option("--keep", type=names, metavar="FIELD,...", help="Keep these columns, in the field json."),
    click.option(
        "--split", multiple=True, metavar="NAME=SHARE", help="Split by hash, such as val=0.5%; the rest is train."
    ),
    click.option("--group-field", metavar="FIELD", help="Split by this column instead of by document."),
    click.option(
        "--documents",
        type=click.Choice(TEXT_UNITS),
        help="What counts as a document in a text file.  [default: line]",
    ),
    click.option(
        "--pattern", metavar="NAME|REGEX", help="Split pattern for tiktoken, if the file name does not imply it."
    ),
)
"""Options of tokenization; see :func:`convert_tokens`."""


def take_token_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of :func:`tokenizer_options` from ``arguments`` and return those that were given.

    Raises:
        click.UsageError: Some were given, but neither ``--tokenizer`` nor ``--tokens-field``.
    """
    shared = {one.name for one in fields(RecordOptions)} | {"image_folder"}
    asked = {one.name: arguments.pop(one.name) for one in fields(TokenizeOptions) if one.name not in shared}
    tokenizer = asked.pop("tokenizer")
    given = {name: value for name, value in asked.items() if value not in (None, ())}
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
    if options.pop("images"):
        raise click.UsageError(
            "Images are not tokenized, and those of messages stay as they are; leave --image-max-side and its like out."
        )
    if options.pop("classes", None) is not None:
        raise click.UsageError("--classes numbers folders of images; it cannot be combined with --tokenizer.")
    if options.get("tokens_field") is not None and engine != "local":
        raise click.UsageError("--tokens-field: there is nothing to encode elsewhere; leave --engine out.")
    workers = workers or (DEFAULT_WORKERS["ray"] if engine == "ray" else num_cores())
    chosen = TokenizeOptions(workers=workers, **options)
    # A single worker is this process, which also copies given ids.
    processes = engine == "local" and workers > 1 and chosen.tokens_field is None
    opened: AbstractContextManager[Executor | None]
    opened = ProcessExecutor(workers) if processes else open_engine(engine, workers)
    with opened as executor, progress_bar("convert", "documents") as progress:
        report = tokenize(
            sources, target, options=chosen, storage_options=storage_options, executor=executor, progress=progress
        )
    emit(report, as_json=as_json, for_people=show_tokens)


def show_tokens(report: TokenizeReport) -> None:
    """Print the result of a tokenization."""
    for one in report.sets:
        show_earlier(one.num_resumed_documents, was_complete=one.was_complete, changed=one.changed, what="document")
        click.echo(
            f"{plain_place(one.target)}: {counted(one.num_documents, 'document')}, {counted(one.num_tokens, 'token')}, "
            f"longest {one.longest:,}; {counted(one.num_shards, 'shard')}, {format_bytes(one.num_bytes)}"
        )
        if one.num_differing:
            click.echo(
                f"not encoded as their whole text is: {counted(one.num_differing, 'document')}, since no "
                "special token stands where an answer begins or ends (docs/text.md, Token boundaries)",
                err=True,
            )
        for reason, count in one.rejected.items():
            click.echo(f"left out {counted(count, 'document')}: {plain(reason)}", err=True)
    click.echo(
        f"field tok: {report.dtype}, {report.tokenizer} {'of' if report.sha256 else 'below'} {report.vocab_size:,}"
        f"{' ids' if report.sha256 else ''}, "
        f"bos {'none' if report.bos is None else report.bos}, eos {'none' if report.eos is None else report.eos}"
        f"{'; field mask: uint8, 1 where a token carries loss' if report.masked else ''}"
    )
    click.echo(
        f"{report.seconds:.1f} s, {report.documents_per_s:,.0f} documents/s, {report.tokens_per_s:,.0f} tokens/s; "
        "StreamingDataset(url) gives tok as int64 arrays, Packed(StreamingDataset(url), length=…) packs them"
    )
