"""Add documents to a set of tokens: the commands ``append`` and ``convert --append`` on such a set."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from shard_tools.make.convert.append import Appending, AppendReport
from shard_tools.make.convert.base.records import Source
from shard_tools.make.convert.journal import Journal, load_journal
from shard_tools.make.convert.pack import Destination
from shard_tools.make.tokens.beside import FilesBeside
from shard_tools.make.tokens.documents import Reading, Share
from shard_tools.make.tokens.encode import DocumentEncoder
from shard_tools.make.tokens.media import MediaReader
from shard_tools.make.tokens.messages import MEDIA
from shard_tools.make.tokens.run import TokenizeOptions, open_encoder, open_id_encoder, open_reader, reading_of
from shard_tools.make.tokens.source import (
    LABELS_COLUMN,
    POSITION_COLUMN,
    TokenSource,
    columns_of,
    describe,
    key_of,
    meaning_of,
)
from shard_tools.make.tokens.tokenizer import BYTES, find_tokenizer
from shard_tools.make.write.change import open_head
from shard_tools.running.engine import DEFAULT_WORKERS
from shard_tools.running.progress import NoProgress, Progress
from streaming.errors import ConfigError
from streaming.shards.index.columns import read_sample_columns
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import samples_path
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, join_url, redact


def append_tokens(  # noqa: PLR0913  a public function, whose options are named
    source: str | Sequence[str],
    target: str,
    *,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    image_folder: str | None = None,
    kind: str = "auto",
    workers: int = DEFAULT_WORKERS["local"],
    allow_unfinished: bool = False,
    on_error: str | None = None,
    max_bad: float | None = None,
    storage_options: Mapping[str, object] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> AppendReport:
    """Add the documents of ``source`` to the set of tokens in ``target``, and publish its next version.

    Options are those with which the set was made. A set that is one of several, by shares, gets the documents of its
    share alone: append to each.

    Args:
        source: As for ``convert``.
        target: Directory of the set.
        tokenizer: The tokenizer that made the set, by whose digest it is known. None: ``"bytes"``, or ids as they are.
        chat_template: File of the template that made the set; None: that of the tokenizer.
        image_folder: Folder of the files that messages name; None: that of the file which holds the messages.
        kind: Format of the source; ``"auto"``: as of the set.
        workers: Batches in progress.
        allow_unfinished: Take what is there of shards that are still being written.
        on_error: As for ``convert``; None: as the set was made.
        max_bad: With ``"skip"``, most inputs left out so: a number, or a share as a float; None: any number.
        storage_options: How to reach the stores.
        executor: Where to encode; None: in a thread.
        progress: Receives documents and bytes of text.

    Raises:
        OvertakenError: Somebody else changed the set meanwhile; nothing was added.
        ConfigError: It is another tokenizer, or the set is none of tokens.
        DataError: A record gives no tokens, and that is an error.
        TooManyBadSamplesError: More inputs are left out than ``max_bad``.
        StorageError: A store failed.
    """
    begun_s = time.monotonic()
    storage, place = Storage(storage_options), Destination.of(target)
    head = open_head(storage, place.directory)
    journal = load_journal(head.home, storage)
    if journal is None:
        raise ConfigError(f"{redact(head.home)}: it does not say how its tokens were made (convert.json is missing)")
    options = _options_of(
        journal, kind, tokenizer, chat_template, workers=workers, allow_unfinished=allow_unfinished,
        on_error=on_error or journal.options["on_error"], max_bad=max_bad, image_folder=image_folder,
    )  # fmt: skip
    work = Appending.of(storage, head, options, journal, _records_of(head, storage))
    opened = work.opened(
        source, place, lambda: open_reader(source, place.directory, options, storage, known=work.known),
        options.leaving_out,
    )  # fmt: skip
    if opened is None:
        return work.report(None, None, begun_s, options.kind)
    reader, allowance = opened
    encoder = _encoder(options, reader, storage, executor, journal, head)
    media = MediaReader.of(encoder.placeholders, FilesBeside.of(reader, storage, options.image_folder))
    numbered = work.numbered(reader, options.key_field)
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="shard_tools-encode"))
        documents = TokenSource(
            below=numbered, reading=_reading(options, reader, journal, media), encoder=encoder, executor=pool,
            ahead=2 * workers + 2, keep=options.keep, fields_kept=tuple(extension for _, extension in options.fields),
            columns=options.columns, on_error=options.leaving_out, allowance=allowance,
            progress=progress or NoProgress(), first=work.numbers_from,
        )  # fmt: skip
        added = work.add(
            documents, numbered, source, columns=(*_columns_of(encoder, head), *options.columns),
            meaning=meaning_of(encoder), storage=storage, storage_options=storage_options, progress=NoProgress(),
        )  # fmt: skip
    return work.report(reader, added, begun_s, options.kind)


def _encoder(
    options: TokenizeOptions, reader: Source, storage: Storage, executor: Executor | None, journal: Journal, head: Head
) -> DocumentEncoder:  # fmt: skip
    """Return the encoder that made the tokens of a set.

    Raises:
        ConfigError: Tokenizer, template or ends are other ones.
    """
    of_ids = options.tokens_field is not None
    if options.tokenizer is not None:  # before its ends are looked up, which another tokenizer has not
        special = of_ids or options.messages_field is not None
        file = find_tokenizer(options.tokenizer, storage, special=special, pattern=options.pattern)
        _check_same({"tokenizer": key_of(file)}, journal, head)
    encoder = open_id_encoder(options, reader, storage) if of_ids else open_encoder(options, storage, executor)
    _check_same(describe(encoder), journal, head)
    return encoder


def _reading(options: TokenizeOptions, reader: Source, journal: Journal, media: MediaReader) -> Reading:
    """Return how documents are found, those of the set's share alone."""
    name, start, stop = journal.options["share"]
    reading = reading_of(options, reader, Share(name=name, start=start, stop=stop))
    return replace(reading, group_field=journal.options["group_field"], media=media)


def _options_of(
    journal: Journal, kind: str, tokenizer: str | None, chat_template: str | None, **how: Any
) -> TokenizeOptions:
    """Return the options with which a set was made.

    Raises:
        ConfigError: It was made by a tokenizer, and none is given.
    """
    said = journal.options
    made = said["tokenizer"]
    if tokenizer is None and made is not None and made["kind"] != BYTES:
        raise ConfigError(
            f"the set was made by a tokenizer ({made['kind']}, SHA-256 {made['sha256'][:12]}…); give it with "
            "--tokenizer FILE"
        )
    ends: dict[str, Any] = {name: "none" if said[name] is None else str(said[name]) for name in ("bos", "eos")}
    media = said.get("media") or {}
    for medium in MEDIA:
        one = media.get(medium)
        how |= {f"{medium}_token": "none" if one is None else str(one["token"])} if said["messages_field"] else {}
        how |= {} if one is None else {f"{medium}_tokens": one["tokens"]}
    plain = ("max_bytes", "max_samples", "shuffle_seed", "key_field", "text_field", "messages_field", "tokens_field")
    return TokenizeOptions(
        kind=str(journal.source["kind"]) if kind == "auto" else kind, keep_order=said["shuffle_seed"] is None,
        fields=tuple((column, extension) for column, extension in said["fields"]), columns=tuple(said["columns"]),
        keep=tuple(said["keep"]), mask_field=said["mask_field"], documents=said["documents"],
        tokenizer=tokenizer or (None if made is None else BYTES),
        pattern=None if made is None else made["pattern"], chat_template=chat_template,
        **{name: said[name] for name in plain}, **ends, **how,
    )  # fmt: skip


def _check_same(described: Mapping[str, object], journal: Journal, head: Head) -> None:
    """Refuse a tokenizer, a template or ends that are not those of the set.

    Raises:
        ConfigError: They are not.
    """
    for name, value in described.items():
        said = journal.options.get(name)
        if value != said:
            shown = {"chat_template": "another chat template"}.get(name, f"{name} {value!r}, there {said!r}")
            raise ConfigError(
                f"{redact(head.home)}: its tokens were made otherwise ({shown}); give the tokenizer that made them, "
                "with --tokenizer FILE, and its template, with --chat-template FILE"
            )


def _columns_of(encoder: DocumentEncoder, head: Head) -> list[str]:
    """Return the columns of new shards: a set written before masks were counted goes on without the counts."""
    return [name for name in columns_of(encoder) if name != LABELS_COLUMN or name in head.schema.columns]


def _records_of(head: Head, storage: Storage) -> int:
    """Return how many records the documents of a set were numbered by; 0: it is written down, or not known."""
    if head.records or not head.table.shards or POSITION_COLUMN not in head.schema.columns:
        return 0
    url = join_url(head.home, samples_path(head.table.shards[-1].name))
    values = storage.read_parsed(
        url, lambda data, source: read_sample_columns(data, [POSITION_COLUMN], source)[0][POSITION_COLUMN], is_sealed
    )
    return max((int(one) + 1 for one in values.to_pylist() if one is not None), default=0)
