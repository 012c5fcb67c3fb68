"""Tokenize a source's documents into shards: the verb ``convert --tokenizer``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from shard_tools.make.convert.base.files import is_local
from shard_tools.make.convert.base.identity import KnownInputs
from shard_tools.make.convert.base.records import TEXT_UNITS, Skipped, Source
from shard_tools.make.convert.pack import Destination, PackedTarget, PackingRun
from shard_tools.make.convert.run import RecordOptions, check_columns
from shard_tools.make.tokens.beside import FilesBeside
from shard_tools.make.tokens.chat import ChatTemplate
from shard_tools.make.tokens.documents import Reading, SetTally, Share, parse_shares
from shard_tools.make.tokens.encode import DocumentEncoder, Encoder
from shard_tools.make.tokens.ids import IdEncoder
from shard_tools.make.tokens.media import MediaReader, Placeholder, find_placeholder
from shard_tools.make.tokens.messages import MEDIA
from shard_tools.make.tokens.source import (
    FIELDS_ALONE,
    POSITION_COLUMN,
    TOKENS_COLUMN,
    TokenSource,
    check_kept,
    columns_of,
    describe,
    meaning_of,
)
from shard_tools.make.tokens.tokenizer import (
    BYTES,
    Ends,
    TokenizerFile,
    find_ends,
    find_tokenizer,
    id_below,
    load_config,
    open_tokenizer,
    token_name,
)
from shard_tools.running.progress import NoProgress, Progress
from shard_tools.running.report import Report
from streaming.errors import ConfigError, NotFoundError
from streaming.shards.catalog.build import read_chunks
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import samples_path
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage, join_url, redact, split_url

_WITHOUT_TEXT = ("images", "audio", "coco", "voc", "lerobot")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions(RecordOptions):
    """Options of tokenization, in addition to ``RecordOptions``.

    With ``on_error="raise"``, a record without a document is an error, unless it is empty. Keys are numbers of
    documents in the source unless ``key_field`` names a field; tars keep their keys. ``columns`` are added to
    ``tokens`` and ``document``.

    Attributes:
        tokenizer: A ``tokenizer.json``, a directory with one, a sentencepiece model, a file of tiktoken ranks, or
            ``"bytes"``. With ``tokens_field`` it is not run, but its vocabulary bounds the ids; None: ids have 32 bits,
            or 16 if the table declares 16.
        pattern: Split of texts before tiktoken merges: the name of an encoding, or a regular expression.
        text_field: Location of the text; None: ``text``, or ``txt`` in tars.
        messages_field: Location of messages instead, which a chat template turns into text and a mask.
        tokens_field: Location of token ids instead, such as ``input_ids``: a list of whole numbers.
        mask_field: Location of a loss mask beside the ids: 0 and 1, or labels with -100.
        chat_template: File of the template; None: that of ``tokenizer_config.json`` beside the tokenizer.
        bos: Token before each document: a name, an id, or ``"none"``; None: the tokenizer's own, unless it is also the
            end token. With messages, None means no token, because the template provides it.
        eos: Token after each document, with the same values.
        keep: Columns to keep in the field ``json``; for tars: fields to keep.
        split: Sets with their shares, such as ``("val=0.5%",)``: each set goes into a directory of its name, the rest
            into ``train``.
        group_field: Split by the hash of this column; None: by that of the document.
        documents: The unit of text that is a document: ``"line"``, ``"blank-line"`` or ``"file"``.
        image_token: The token that stands for the images of messages: a name, an id, or ``"none"``; None: the
            tokenizer's own, if it has one.
        image_tokens: How often it stands for one image: a number, or ``"module:function"`` of (width, height); None: 1.
        audio_token: The token that stands for sounds, with the same values.
        audio_tokens: How often it stands for one sound: a number, or ``"module:function"`` of (seconds); None: 1.
        image_folder: Folder of the files that messages name; None: that of the file which holds the messages.
    """

    tokenizer: str | None = None
    pattern: str | None = None
    text_field: str | None = None
    messages_field: str | None = None
    tokens_field: str | None = None
    mask_field: str | None = None
    chat_template: str | None = None
    bos: str | None = None
    eos: str | None = None
    keep: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    group_field: str | None = None
    documents: str = "line"
    image_token: str | None = None
    image_tokens: str | None = None
    audio_token: str | None = None
    audio_tokens: str | None = None
    image_folder: str | None = None

    def __post_init__(self) -> None:
        """Reject options that contradict each other.

        Raises:
            ConfigError: Options contradict each other.
        """
        RecordOptions.__post_init__(self)
        given = [name for name in ("text", "messages", "tokens") if getattr(self, f"{name}_field") is not None]
        if len(given) > 1:
            raise ConfigError(
                f"--{given[0]}-field and --{given[1]}-field: a document is a text, a conversation or tokens; give one"
            )
        if self.tokenizer is None and self.tokens_field is None:
            raise ConfigError("text needs --tokenizer FILE; tokens that are ids already, --tokens-field FIELD")
        self._check_media()
        if self.mask_field is not None and self.tokens_field is None:
            raise ConfigError("--mask-field is the mask of --tokens-field; conversations get one from their template")
        if self.chat_template is not None and self.messages_field is None:
            raise ConfigError("--chat-template turns messages into text; say where they are with --messages-field")
        if self.group_field is not None and not self.split:
            raise ConfigError("--group-field says by what --split divides the documents; give both, or neither")
        if self.documents not in TEXT_UNITS:
            raise ConfigError(f"--documents {self.documents!r}: expected one of {', '.join(TEXT_UNITS)}")
        check_kept((*self.keep, *(extension for _, extension in self.fields)))

    def _check_media(self) -> None:
        names = [*(f"{medium}_token{many}" for medium in MEDIA for many in ("", "s")), "image_folder"]
        given = next((name for name in names if getattr(self, name) is not None), None)
        if given is not None and self.messages_field is None:
            raise ConfigError(
                f"--{given.replace('_', '-')} is for images and sounds of messages; say where these are with "
                "--messages-field"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSet(Report):
    """One set written by a tokenization.

    Attributes:
        name: ``train``, ``val``, …; ``""`` if there is only one.
        target: Location of its shards.
        num_shards: Shards in the set now.
        num_documents: Documents in the set now.
        num_tokens: Tokens of these documents.
        longest: Tokens of the longest document.
        num_bytes: Bytes of all shards.
        num_resumed_documents: Documents that an earlier run had written.
        num_differing: Conversations of this run whose tokens differ from those of their whole text (docs/text.md, Token
            boundaries).
        was_complete: An earlier run had written everything, so that this one wrote nothing.
        changed: Inputs that changed since an earlier run; their documents and all later ones are written again.
        rejected: Records left out, by reason, including those of earlier runs.
        skipped: Records of the source that are no documents, with reasons: up to 10,000.
    """

    name: str
    target: str
    num_shards: int
    num_documents: int
    num_tokens: int
    longest: int
    num_bytes: int
    num_resumed_documents: int
    num_differing: int
    was_complete: bool
    changed: tuple[str, ...]
    rejected: Mapping[str, int]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeReport(Report):
    """The result of a tokenization.

    Attributes:
        kind: The source's layout.
        target: Location of the sets.
        tokenizer: Kind of the tokenizer.
        sha256: Digest of its file.
        vocab_size: The largest id plus one.
        dtype: Type of the tokens, little-endian.
        bos: Id before each document.
        eos: Id after each document.
        masked: Whether there is a field ``mask``.
        sets: The sets.
        documents_per_s: Rate of this run.
        tokens_per_s: Rate of this run.
        seconds: Wall time of this run.
    """

    kind: str
    target: str
    tokenizer: str
    sha256: str
    vocab_size: int
    dtype: str
    bos: int | None
    eos: int | None
    masked: bool
    sets: tuple[TokenSet, ...]
    documents_per_s: float
    tokens_per_s: float
    seconds: float


def tokenize(
    source: str | Sequence[str],
    target: str,
    *,
    options: TokenizeOptions,
    storage_options: Mapping[str, object] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> TokenizeReport:
    """Write the documents of ``source`` as token ids into shards in ``target``, with their index.

    A sample has the field ``tok`` (ids, little-endian uint16, or uint32 if the vocabulary needs it), with messages also
    ``mask`` (uint8: 1 where the assistant speaks), and the fields in ``keep``. The sample table has ``tokens`` (their
    number), ``document`` (the number of the record in the source) and, with a mask, ``num_labels`` (the number of
    tokens with 1). Deterministic: the same source, tokenizer and
    options give the same bytes, whether or not the work was interrupted and resumed. With ``split`` the source is read
    once per set; a document is encoded once.

    Args:
        source: File, directory, pattern or URL of the data; or several of one layout.
        target: Directory or prefix for the shards; with ``split``, for a directory per set.
        options: Options of the tokenization.
        storage_options: Options of the stores of source, target and tokenizer.
        executor: Executor of the encoding: processes of this machine
            (:class:`shard_tools.running.processes.ProcessExecutor`), or a cluster. None: a thread of this process.
            Reading and writing stay in this process.
        progress: Called with documents and bytes of text.

    Raises:
        TargetNotEmptyError: The target holds shards of other work.
        ConfigError: Options do not fit the source or the tokenizer.
        DataError: A record gives no tokens, with ``on_error="raise"``; the message names file and line.
        StorageError: A store fails.
    """
    started, storage = time.monotonic(), Storage(storage_options)
    shares = parse_shares(options.split)
    if len(shares) > 1 and "{" in split_url(target)[1]:
        raise ConfigError(f"--split: each set gets a folder of its own in TARGET; name a folder, got {redact(target)}")
    reader = open_reader(source, target, options, storage)
    allowance = options.leaving_out.allowance(reader, redact(source if isinstance(source, str) else ", ".join(source)))
    of_ids = options.tokens_field is not None
    encoder = open_id_encoder(options, reader, storage) if of_ids else open_encoder(options, storage, executor)
    media = MediaReader.of(encoder.placeholders, FilesBeside.of(reader, storage, options.image_folder))
    progress = progress or NoProgress()
    tallies = [SetTally() for _ in shares]
    with contextlib.ExitStack() as stack:
        executor = executor or stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="shard_tools-encode"))
        packings = []
        for share, tally in zip(shares, tallies, strict=True):
            documents = TokenSource(
                below=reader,
                reading=reading_of(options, reader, share, media),
                encoder=encoder,
                executor=executor,
                ahead=2 * options.workers + 2,
                keep=options.keep,
                fields_kept=tuple(extension for _, extension in options.fields),
                columns=options.columns,
                on_error=options.leaving_out,
                allowance=allowance,
                progress=progress,
                tally=tally,
            )
            place = Destination.of(join_url(target, share.name) if share.name else target)
            packings.append((documents, _packing(documents, place, source, options, storage_options)))
        for _, packing in packings:  # all sets are marked before the first one is written
            stack.enter_context(packing)
        sets = [_write(documents, packing, storage) for documents, packing in packings]
    seconds = time.monotonic() - started
    ends = encoder.ends
    return TokenizeReport(
        kind=reader.kind,
        target=target,
        tokenizer="ids" if encoder.file is None else encoder.file.kind,
        sha256="" if encoder.file is None else encoder.file.sha256,
        vocab_size=ends.vocab_size,
        dtype=ends.dtype,
        bos=ends.bos,
        eos=ends.eos,
        masked=encoder.masked,
        sets=tuple(sets),
        documents_per_s=sum(tally.num_documents for tally in tallies) / seconds,
        tokens_per_s=sum(tally.num_tokens for tally in tallies) / seconds,
        seconds=seconds,
    )


def open_id_encoder(options: TokenizeOptions, reader: Source, storage: Storage) -> DocumentEncoder:
    """Determine the bound of ids: from the tokenizer, else from the column's type."""
    if options.tokenizer is not None:
        file = find_tokenizer(options.tokenizer, storage, special=True, pattern=options.pattern)
        ends = find_ends(file, load_config(file, storage), bos=options.bos, eos=options.eos, by_default=False)
        return IdEncoder(ends=ends, masked=options.mask_field is not None, file=file)
    if options.pattern is not None:
        raise ConfigError("--pattern belongs to a file of tiktoken ranks; give it with --tokenizer, or leave it out")
    stored: Mapping[str, str] = getattr(reader, "item_types", {})
    bound = 2**16 if np.dtype(stored.get(options.tokens_field or "", "int64")).itemsize <= 2 else 2**32
    begin, end = (id_below(bound, option, given) for option, given in (("--bos", options.bos), ("--eos", options.eos)))
    return IdEncoder(ends=Ends(bos=begin, eos=end, vocab_size=bound), masked=options.mask_field is not None)


def open_encoder(options: TokenizeOptions, storage: Storage, executor: Executor | None) -> DocumentEncoder:
    """Open the tokenizer here, to find errors in it before a document is read."""
    chat = options.messages_field is not None
    file = find_tokenizer(options.tokenizer or "", storage, special=chat, pattern=options.pattern)
    config = load_config(file, storage)
    ends = find_ends(file, config, bos=options.bos, eos=options.eos, by_default=not chat)
    if not chat and ends.eos is None and options.eos is None:
        shown = redact(options.tokenizer or "")
        _log.warning("--tokenizer %s names no end token: documents will end without one; see --eos", shown)
    placeholders = _placeholders(options, file, config) if chat else ()
    template = _template(options, file, config, storage, placeholders) if chat else None
    if isinstance(executor, ProcessPoolExecutor) and is_local(file.url) and file.url != BYTES:
        file = replace(file, content=None)  # processes of this machine read it themselves, once
    return Encoder(file=file, ends=ends, template=template, placeholders=placeholders)


def _placeholders(options: TokenizeOptions, file: TokenizerFile, config: dict[str, object]) -> tuple[Placeholder, ...]:
    """Return the tokens that stand for images and sounds."""
    given = {medium: (getattr(options, f"{medium}_token"), getattr(options, f"{medium}_tokens")) for medium in MEDIA}
    found = [find_placeholder(medium, *named, file, config) for medium, named in given.items()]
    placeholders = tuple(one for one in found if one is not None)
    if len({one.id for one in placeholders}) < len(placeholders):
        raise ConfigError(
            f"--image-token and --audio-token: {placeholders[0].token!r} stands for both; name another one, or 'none'"
        )
    return placeholders


def _template(
    options: TokenizeOptions, file: TokenizerFile, config: dict[str, object], storage: Storage,
    placeholders: Sequence[Placeholder],
) -> ChatTemplate:  # fmt: skip
    source = config.get("chat_template")
    if options.chat_template is not None:
        try:
            source = bytes(storage.read(options.chat_template)).decode()
        except (NotFoundError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {redact(options.chat_template)}: no such text file: {error}") from error
    if isinstance(source, list):  # several templates by name
        named = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"--messages-field: no chat template beside {redact(options.tokenizer or '')} (tokenizer_config.json, "
            "chat_template.jinja); give one with --chat-template FILE"
        )
    bos, eos = open_tokenizer(file).ends()
    template = ChatTemplate(
        source=source,
        bos_token=token_name(config, "bos_token", bos) or "",
        eos_token=token_name(config, "eos_token", eos) or "",
        tokens=tuple((one.medium, one.token) for one in placeholders),
    )
    template.check()
    return template


def open_reader(
    source: str | Sequence[str], target: str, options: TokenizeOptions, storage: Storage,
    known: KnownInputs | None = None,
) -> Source:  # fmt: skip
    """Open the records that documents are found in, without the inputs that are ``known``.

    Raises:
        ConfigError: Options do not fit the source.
        NotFoundError: There is nothing to read.
    """
    reader = options.open(source, target, storage, unit=options.documents, tolerant=True, named_only=True, known=known)
    if known is not None and known.left_out and not reader.origins().inputs:
        return reader
    if reader.kind in _WITHOUT_TEXT:
        raise ConfigError(f"--tokenizer: {reader.kind} hold no text; name the source's layout with --from")
    if options.documents != "line" and reader.kind != "text":
        raise ConfigError(f"--documents {options.documents} is for texts; a source of kind {reader.kind!r} has rows")
    where = reading_of(options, reader, Share())
    fields = {
        "--messages-field": where.messages_field,
        "--tokens-field": where.tokens_field,
        "--mask-field": where.mask_field,
        "--text-field": where.text_field,
        "--group-field": where.group_field,
    }
    named = options.named_columns + [("--keep", name) for name in options.keep]
    check_columns(reader, named + [(option, name) for option, name in fields.items() if name], in_fields=True)
    return reader


def reading_of(options: TokenizeOptions, reader: Source, share: Share, media: MediaReader | None = None) -> Reading:
    """Return how documents are found in the records of a source."""
    otherwise = (
        None if options.messages_field or options.tokens_field else "txt" if reader.kind in FIELDS_ALONE else "text"
    )
    return Reading(
        text_field=options.text_field or otherwise,
        messages_field=options.messages_field,
        tokens_field=options.tokens_field,
        mask_field=options.mask_field,
        group_field=options.group_field,
        share=share,
        media=media,
    )


def _packing(
    documents: TokenSource, place: Destination, source: str | Sequence[str], options: TokenizeOptions,
    storage_options: Mapping[str, object] | None,
) -> PackingRun:  # fmt: skip
    """Examine the target of one set, whose schema describes its tokens."""
    tokens = describe(documents.encoder)
    share = documents.reading.share
    return PackingRun(
        documents,
        place,
        options,
        command=("convert", source if isinstance(source, str) else ", ".join(source)),
        identity=options.identity()
        | {
            "keep": list(options.keep),
            "text_field": documents.reading.text_field,
            "messages_field": options.messages_field,
            "tokens_field": options.tokens_field,
            "mask_field": options.mask_field,
            "documents": options.documents,
            "share": [share.name, share.start, share.stop],
            "group_field": options.group_field,
            "on_error": options.on_error,
            **tokens,
        },
        columns=(*columns_of(documents.encoder), *options.columns),
        schema=meaning_of(documents.encoder),
        position=POSITION_COLUMN,
        storage_options=storage_options,
        progress=_OwnCounts(documents.progress),
    )


def _write(documents: TokenSource, packing: PackingRun, storage: Storage) -> TokenSet:
    """Write one set."""
    documents.tally.rejected_before.update(packing.left_out_before)
    packed = packing.run()
    place = packing.place
    earlier = list(_earlier_counts(place, packed, storage))
    tally = documents.tally
    return TokenSet(
        name=documents.reading.share.name,
        target=place.directory,
        num_shards=packed.num_shards,
        num_documents=packed.num_samples,
        num_tokens=tally.num_tokens + sum(earlier),
        longest=max([tally.longest, *earlier]),
        num_bytes=packed.num_bytes,
        num_resumed_documents=packed.num_resumed_samples,
        num_differing=tally.num_differing,
        was_complete=packed.was_complete,
        changed=packed.changed,
        rejected=packed.left_out,
        skipped=tuple({one.path: one for one in (*packed.skipped, *documents.skipped)}.values()),
    )


def _earlier_counts(place: Destination, packed: PackedTarget, storage: Storage) -> Iterator[int]:
    """Yield the number of tokens of each document that an earlier run had written: those of the first shards."""
    left = packed.num_resumed_samples
    for shard in read_chunks(storage, place.directory).shards if left else ():
        if left <= 0:
            break
        url = join_url(place.directory, samples_path(shard.name))
        table = storage.read_parsed(url, SampleTable.from_parquet, is_sealed)
        yield from table.columns[TOKENS_COLUMN].to_pylist()
        left -= table.num_samples


class _OwnCounts:
    """Pass on the totals, but not the writer's byte counts: text is counted where it is read."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
        """Set the totals."""
        self._progress.start(total_bytes=total_bytes, total=total)

    def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
        """Count nothing."""
