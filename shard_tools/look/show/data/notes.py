"""Read the notes beside a set: names of classes, and how its tokens turn back into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shard_tools.look.show.base.samples import SampleSet
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.decoding.workers import MOST_BYTES, TokenTexts
from shard_tools.make.tokens.adapters import BytesTokenizer
from shard_tools.make.tokens.tokenizer import BYTES, TokenizerFile, find_tokenizer
from streaming.common.arguments import format_bytes
from streaming.errors import ConfigError, DecodeError, StorageError
from streaming.sets.filters.late_columns import homes_of
from streaming.shards.index.layout import SCHEMA_FILE
from streaming.shards.schema import value as meant
from streaming.storage import join_url, redact

_BESIDE = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Storage format of a set's tokens, and the tokenizer that turns them into text.

    Attributes:
        field: The field that holds them.
        dtype: Type of a token.
        mask: The field that masks tokens; "": none.
        file: The tokenizer, if available.
        why: Why it is unavailable, in words.
        texts: The object that applies it.
        standing: What ids stand for that are no text, ``image`` or ``audio``.
    """

    field: str
    dtype: str
    mask: str
    file: TokenizerFile | None
    why: str
    texts: TokenTexts | BytesTokenizer | None = None
    standing: Mapping[int, str]

    @property
    def width(self) -> int:
        """Bytes per token."""
        return np.dtype(self.dtype).itemsize

    def _ids(self, data: bytes) -> npt.NDArray[np.integer[Any]]:
        return np.frombuffer(data[: len(data) // self.width * self.width], np.dtype(self.dtype).newbyteorder("<"))

    def media(self, data: bytes) -> list[str]:
        """Return what each token stands for that is no text; "": it is text."""
        return [self.standing.get(one, "") for one in self._ids(data).tolist()]

    def pieces(self, data: bytes) -> tuple[list[str], str]:
        """Return the text of each token; if the tokenizer is unavailable or fails, its number, and the reason."""
        ids = self._ids(data)
        why = self.why
        if self.texts is not None:
            try:
                return self.texts.pieces(ids.astype(np.uint32)), ""
            except DecodeError as error:
                why = str(error)
        return [str(one) for one in ids.tolist()], why


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """The notes beside a set.

    Attributes:
        classes: Names of classes, by number.
        tokens: Its tokens; None: it has none, or their storage is not described.
        by_set: The notes of each of several sets that are read as one, by the directory of its shards as shown.
    """

    classes: tuple[str, ...] = ()
    tokens: Tokens | None = None
    by_set: Mapping[str, Notes] = field(default_factory=dict)

    def of_shard(self, shown_url: str) -> Notes:
        """Return the notes beside the set of a shard, since values are shown as stored."""
        return self.by_set.get(shown_url.rpartition("/")[0], self)


def notes_of(subject: Subject, source: str) -> Notes:
    """Return the notes beside a set; read once."""
    return subject.keep(f"notes of {source}", lambda: _read(subject, subject.set_of(source)))


def check_tokenizer(subject: Subject) -> None:
    """Refuse a tokenizer that made no tokens of any set.

    Raises:
        ConfigError: It made none, or the file is not a tokenizer.
    """
    if not subject.tokenizer:
        return
    given = find_tokenizer(subject.tokenizer, subject.storage, special=False)
    notes = [notes_of(subject, name) for name in subject.sets]
    if not any(one.tokens and one.tokens.file and one.tokens.file.sha256 == given.sha256 for one in notes):
        raise ConfigError(
            f"--tokenizer {redact(subject.tokenizer)}: it made no tokens of these sets; expected the file whose "
            f"sha256 {SCHEMA_FILE} beside the set has, got {given.sha256[:12]}…. Leave it out to see numbers"
        )


def _read(subject: Subject, within: SampleSet) -> Notes:
    homes = homes_of(within.source.urls, within.source.shards.index)
    meaning = within.source.meaning
    by_set = {
        place: _of_schema(subject, within, home, schema)
        for (place, schema), home in zip(meaning.sets.items(), homes * len(meaning.sets), strict=False)
    }
    whole = _of_schema(subject, within, homes[0], meaning.schema)
    return replace(whole, by_set=by_set if len(by_set) > 1 else {})


def _of_schema(subject: Subject, within: SampleSet, home: str, schema: meant.Schema) -> Notes:
    lists = schema.classes
    classes = lists.get("cls") or next(iter(lists.values()), ())
    for name, one in schema.tokens.items():
        meaning = one.tokens or meant.TokenMeaning()
        file, why = _at_hand(subject, within, home, meaning.tokenizer)
        standing = dict.fromkeys(meaning.image, "image") | dict.fromkeys(meaning.audio, "audio")
        tokens = Tokens(
            field=name, dtype=one.dtype, mask=meaning.mask, file=file, why=why, texts=_texts(subject, file),
            standing=standing,
        )  # fmt: skip
        return Notes(classes=classes, tokens=tokens)
    return Notes(classes=classes)


def _texts(subject: Subject, file: TokenizerFile | None) -> TokenTexts | BytesTokenizer | None:
    """Return the object that applies a tokenizer; for a file, which may be untrusted, a separate process."""
    if file is None or file.kind == BYTES:
        return None if file is None else BytesTokenizer(special=file.special)
    return subject.keep(f"texts of {file.sha256} {file.pattern}", lambda: TokenTexts(file))


def _at_hand(
    subject: Subject, within: SampleSet, home: str, given: meant.TokenizerKey | None
) -> tuple[TokenizerFile | None, str]:
    """Return the tokenizer that a set names by digest, from ``--tokenizer`` or beside the set; or why there is none."""
    if given is None:
        return None, "the set does not say which tokenizer made its tokens"
    pattern = given.pattern or None
    if given.kind == BYTES:
        return find_tokenizer(BYTES, within.source.storage, special=True), ""
    places = [(subject.storage, subject.tokenizer)] if subject.tokenizer else []
    for storage, spec in [*places, *((within.source.storage, join_url(home, name)) for name in _BESIDE)]:
        try:
            size_bytes = storage.info(spec).size_bytes if spec != subject.tokenizer else 0  # that one is the user's
            if size_bytes > MOST_BYTES:
                return None, f"{redact(spec)} is not read: {format_bytes(size_bytes)}"
            file = find_tokenizer(spec, storage, special=given.kind == "huggingface", pattern=pattern)
            if file.sha256 == given.sha256:
                return file, ""
        except (ConfigError, StorageError):  # missing, or of another kind
            continue
    return (
        None,
        f"text needs the tokenizer {given.kind} with sha256 {given.sha256[:12]}…: give it with --tokenizer FILE",
    )


def named(classes: Sequence[str], value: str) -> str:
    """Return the name of a class given by its number; "": the class has no name."""
    text = value.strip()
    return (
        classes[int(text)]
        if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < len(classes)
        else ""
    )
