"""Provide the documents of another source as samples of tokens."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from shard_tools.make.convert.base.identity import Origins
from shard_tools.make.convert.base.records import Record, Skipped, Source
from shard_tools.make.convert.base.rows import dump_json
from shard_tools.make.convert.left_out import Allowance, OnError
from shard_tools.make.tokens.documents import Content, Document, Reading, SetTally
from shard_tools.make.tokens.encode import DocumentEncoder, Encoded
from shard_tools.make.tokens.media import COLUMNS, Held
from shard_tools.make.tokens.messages import Conversation, RejectedError
from shard_tools.make.tokens.tokenizer import TokenizerFile
from shard_tools.make.write.columns import follow
from shard_tools.running.engine import ordered
from shard_tools.running.progress import Progress
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError
from streaming.shards.schema.value import SUPERVISED, Schema, SchemaField, TokenizerKey, TokenMeaning

TOKENS_FIELD, MASK_FIELD = "tok", "mask"
FIELDS_ALONE = ("tars", "files")  # kinds whose records have fields, but no table columns
TOKENS_COLUMN, POSITION_COLUMN, LABELS_COLUMN = "tokens", "document", SUPERVISED
_BATCH_BYTES = 1 << 20  # text per call: a tokenizer takes some tenths of a second
_BATCH_DOCUMENTS = 4096
_BATCH_MEDIA_BYTES = 16 << 20  # images and sounds wait in this process while their text is encoded
_READERS = 16
_NOTHING = Held(fields={}, columns={})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """Documents of one set, as tokens, in the order of the underlying source.

    Attributes:
        below: The underlying source of records.
        reading: Finds the document in a record, and decides which documents belong to this set.
        encoder: Turns documents into tokens.
        executor: Executor of the encoding.
        ahead: Number of batches in progress.
        keep: Columns that go into the field ``json``; for tars: fields that are kept unchanged.
        fields_kept: Fields of the records that are kept unchanged.
        columns: Additional columns of the sample table.
        on_error: What is done with records without tokens; empty ones are left out in any case.
        allowance: Bounds the number of records without tokens, except empty ones.
        progress: Called with bytes of text.
        first: Number of the first record of the underlying source.
        tally: Counts of this run.
    """

    below: Source
    reading: Reading
    encoder: DocumentEncoder
    executor: Executor
    ahead: int
    keep: tuple[str, ...]
    fields_kept: tuple[str, ...]
    columns: tuple[str, ...]
    on_error: OnError
    allowance: Allowance
    progress: Progress
    first: int = 0
    tally: SetTally = field(default_factory=SetTally)

    @property
    def kind(self) -> str:
        """The kind of the underlying source."""
        return self.below.kind

    @property
    def num_records(self) -> int | None:
        """None: unknown before reading, since records may be rejected, or belong to another set."""
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the underlying source."""
        return self.below.num_bytes

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Inputs that the underlying source left out, and records without tokens."""
        return (*self.below.skipped, *self.tally.listed.values())

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The token fields of every document, and kept fields, which some may lack; None with images and sounds."""
        if self.encoder.placeholders:
            return None
        rows = self.below.kind not in FIELDS_ALONE
        kept = (*self.fields_kept, *(("json",) if rows and self.keep else () if rows else self.keep))
        always = (TOKENS_FIELD, MASK_FIELD) if self.encoder.masked else (TOKENS_FIELD,)
        return dict.fromkeys(kept, False) | dict.fromkeys(always, True)

    def identity(self) -> dict[str, object]:
        """Return the identity of the underlying source."""
        return self.below.identity()

    def origins(self) -> Origins:
        """Return the inputs of the underlying source."""
        return self.below.origins()

    def left_out_last(self) -> list[str]:
        """Return the reasons for records that are left out after the last document."""
        return self.tally.left_out_before(None)

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the documents of this set, from record ``start`` of the underlying source on.

        Raises:
            DataError: A record gives no tokens, and that is an error; or no record at all gives any.
        """
        with contextlib.closing(self.below.records(start)) as records:
            for document, encoded in self._encoded(self._with_media(self._documents(records, start))):
                if encoded.reason:
                    self._reject(document.number, document.record, encoded.reason, encoded.what)
                else:
                    yield self._record(document, encoded)
        if start == 0 and not self.tally.num_documents:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.tally.rejected.items())
            share = f"of the set {self.reading.share.name!r} " if self.reading.share.name else ""
            raise DataError(
                f"no document {share}yields tokens (left out: {reasons or 'none'}); check the source and options"
            )
        self.allowance.check(self.tally.num_bad, self.tally.num_read, self.tally.last_bad, is_end=True)

    def _documents(self, records: Iterator[Record], start: int) -> Iterator[Document]:
        for number, record in enumerate(records, start):
            self.tally.num_read = number + 1 - self.first
            try:
                document = self.reading.document(number, record)
            except RejectedError as error:
                if self.reading.share.takes_rest:  # counted once, though every set reads it
                    self._reject(number, record, error.reason, str(error))
                continue
            if document is not None:
                self._name_unused(document)
                yield document

    def _with_media(self, documents: Iterator[Document]) -> Iterator[Document]:
        """Yield documents with their images and sounds, which threads read ahead."""
        if not self.encoder.placeholders:
            yield from map(self.reading.with_media, documents)
            return
        with contextlib.closing(map_threads(self.reading.with_media, documents, _READERS)) as read:
            for document in read:
                if document.problem is None:
                    yield document
                else:
                    problem = document.problem
                    self._reject(document.number, document.record, problem.reason, str(problem))

    def _name_unused(self, document: Document) -> None:
        """Log, once per key, unread keys of messages: they may have been meant to change what is learned."""
        template, content = self.encoder.template, document.content
        if template is None or not isinstance(content, Conversation):
            return
        new = content.keys - self.tally.keys
        self.tally.keys.update(new)
        if unused := template.unused(new):
            _log.warning(
                "%s, document %d: %s of its messages %s not used: neither the chat template nor the mask reads %s "
                "(the mask reads weight and train); others like it are not logged",
                document.record.where or f"sample {document.record.key!r}", document.number,
                ", ".join(map(repr, unused)), *(("is", "it") if len(unused) == 1 else ("are", "them")),
            )  # fmt: skip

    def _reject(self, number: int, record: Record, reason: str, what: str) -> None:
        place = record.where or f"sample {record.key!r}"
        where = f"{place}, document {number}"
        if not self.on_error.skips and reason != "empty":
            raise DataError(f"{where}: {reason}: {what}; correct it, or leave such documents out with --on-error skip")
        if not self.tally.rejected[reason]:
            _log.warning("%s is left out: %s: %s; others like it are counted but not logged", where, reason, what)
        self.tally.reject(number, place, reason, what)
        if reason != "empty":
            self.tally.last_bad = f"{where}: {reason}: {what}"
            self.allowance.check(self.tally.num_bad, self.tally.num_read, self.tally.last_bad)

    def _encoded(self, documents: Iterator[Document]) -> Iterator[tuple[Document, Encoded]]:
        """Yield documents with their tokens, in order; batches are encoded ahead."""
        waiting: deque[list[Document]] = deque()

        def contents() -> Iterator[list[Content]]:
            for batch in _batches(documents):
                waiting.append(batch)
                yield [document.content for document in batch]

        with contextlib.closing(ordered(self.executor, self.encoder, contents(), self.ahead)) as results:
            for found in results:
                batch = waiting.popleft()
                yield from zip(batch, found, strict=True)
                self.progress.advance(  # once per batch: drawing a bar takes longer than writing a document
                    num_bytes=sum(document.num_bytes for document in batch),
                    num=sum(not encoded.reason for encoded in found),
                )

    def _record(self, document: Document, encoded: Encoded) -> Record:
        num_tokens = len(encoded.tokens) // self.encoder.ends.width
        self.tally.num_documents += 1
        self.tally.num_tokens += num_tokens
        self.tally.num_differing += encoded.differs
        self.tally.longest = max(self.tally.longest, num_tokens)
        record = document.record
        held = document.held or _NOTHING
        fields = {**held.fields, **self._kept(record)}
        fields[TOKENS_FIELD] = encoded.tokens
        if encoded.mask is not None:
            fields[MASK_FIELD] = encoded.mask
        metadata = record.metadata or {name: follow(record.fields, name) for name in self.columns}
        counted = {TOKENS_COLUMN: num_tokens, POSITION_COLUMN: document.number}
        if encoded.mask is not None:
            counted[LABELS_COLUMN] = num_tokens - encoded.mask.count(0)
        return Record(
            key=record.key,
            fields=fields,
            metadata={**metadata, **held.columns, **counted},
            where=record.where,
            remarks=(*record.remarks, *held.remarks),
            left_out=tuple(self.tally.left_out_before(document.number)),
            origin=record.origin,
        )

    def _kept(self, record: Record) -> dict[str, bytes]:
        kept = {name: record.fields[name] for name in self.fields_kept if name in record.fields}
        if not record.metadata:
            return kept | {name: record.fields[name] for name in self.keep if name in record.fields}
        row = {name: record.metadata[name] for name in self.keep if name in record.metadata}
        return {**kept, "json": dump_json(row)} if row else kept


def columns_of(encoder: DocumentEncoder) -> tuple[str, ...]:
    """Return the columns that sets of an encoder's documents have.

    With masks, also the number of tokens with loss; with images or sounds, also their numbers.
    """
    of_media = (name for one in encoder.placeholders for name in COLUMNS[one.medium])
    return (TOKENS_COLUMN, POSITION_COLUMN, *((LABELS_COLUMN,) if encoder.masked else ()), *of_media)


def check_kept(names: tuple[str, ...]) -> None:
    """Reject keeping a field under a name that the tokens use.

    Raises:
        ConfigError: There is such a field.
    """
    taken = {TOKENS_FIELD, MASK_FIELD} & {*names}
    if taken:
        raise ConfigError(f"--keep {taken.pop()}: the tokens are written under this name; leave it out")


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_bytes = media_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += document.num_bytes
        media_bytes += 0 if document.held is None else document.held.num_bytes
        if num_bytes >= _BATCH_BYTES or media_bytes >= _BATCH_MEDIA_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, num_bytes, media_bytes = [], 0, 0
    if batch:
        yield batch


def describe(encoder: DocumentEncoder) -> dict[str, object]:
    """Return a JSON-able description of the tokens: everything their bytes depend on, without counts and times."""
    template, file = encoder.template, encoder.file
    return {
        "field": TOKENS_FIELD,
        "column": TOKENS_COLUMN,
        "dtype": encoder.ends.dtype,
        "vocab_size": encoder.ends.vocab_size,
        "bos": encoder.ends.bos,
        "eos": encoder.ends.eos,
        "mask": MASK_FIELD if encoder.masked else None,
        "tokenizer": None if file is None else key_of(file),
        "chat_template": None if template is None else template.source,
        "media": {one.medium: one.identity() for one in encoder.placeholders} or None,
    }


def key_of(file: TokenizerFile) -> dict[str, object]:
    """Return what a tokenizer is known by, JSON-able."""
    return {"kind": file.kind, "sha256": file.sha256, "pattern": file.pattern}


def meaning_of(encoder: DocumentEncoder) -> Schema:
    """Return the meaning of the tokens, for the schema of a set."""
    template, file, ends = encoder.template, encoder.file, encoder.ends
    standing = {one.medium: (one.id,) for one in encoder.placeholders}
    made = None if file is None else TokenizerKey(kind=file.kind, sha256=file.sha256, pattern=file.pattern or "")
    tokens = TokenMeaning(
        tokenizer=made, vocab_size=ends.vocab_size, bos=() if ends.bos is None else (ends.bos,),
        eos=() if ends.eos is None else (ends.eos,), mask=MASK_FIELD if encoder.masked else "", column=TOKENS_COLUMN,
        chat_templates=() if template is None else (template.source,), **standing,
    )  # fmt: skip
    return Schema(fields={TOKENS_FIELD: SchemaField(kind="tokens", dtype=ends.dtype, tokens=tokens)})
