"""Extract the document of a record, or report why there is none, and assign it to a set."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from typing import TypeAlias

from shard_tools.make.convert.base.records import MAX_LISTED, Record, Skipped
from shard_tools.make.tokens.ids import TokenIds
from shard_tools.make.tokens.media import Held, MediaReader
from shard_tools.make.tokens.messages import Conversation, RejectedError, read_conversation
from shard_tools.make.write.columns import follow
from streaming.common.arguments import parse_share
from streaming.errors import ConfigError

Content: TypeAlias = str | Conversation | TokenIds
TRAIN = "train"
_HASHES = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The documents of one set: those with a hash in ``[start, stop)`` of 2**64.

    Attributes:
        name: Name of the set; ``""``: the only set.
        start: The first hash.
        stop: One past the last hash.
    """

    name: str = ""
    start: int = 0
    stop: int = _HASHES

    @property
    def takes_rest(self) -> bool:
        """Whether this set also takes records that belong to no other set."""
        return self.stop == _HASHES


def parse_shares(specs: Sequence[str]) -> tuple[Share, ...]:
    """Return the sets of ``name=share`` specifications (``val=0.5%`` or ``val=1/200``), and ``train``, the rest.

    Hashes are allocated from 0 in the given order, so that a growing share keeps its documents if it is the first or
    only one.

    Raises:
        ConfigError: A share is invalid, a name repeats, or nothing is left for ``train``.
    """
    named: dict[str, Fraction] = {}
    for spec in specs:
        name, _, text = spec.partition("=")
        if not name or not name.isidentifier() or name == TRAIN or name in named:
            raise ConfigError(f"--split {spec!r}: expected another name than {TRAIN!r} and a share, such as val=0.5%")
        named[name] = parse_share(text, name=f"--split {spec!r}")
    if sum(named.values()) >= 1:
        raise ConfigError(f"--split {' '.join(specs)}: nothing is left for {TRAIN!r}, which gets the rest; take less")
    shares = laid_out(named)
    return (Share(name=TRAIN, start=shares[-1].stop), *shares) if shares else (Share(),)


def laid_out(named: Mapping[str, Fraction]) -> tuple[Share, ...]:
    """Return the shares with these names as ranges of hashes that follow each other, from 0 on."""
    stops = [int(total * _HASHES) for total in accumulate(named.values())]
    return tuple(
        Share(name=name, start=start, stop=stop) for name, start, stop in zip(named, [0, *stops], stops, strict=False)
    )


def place_of(data: bytes, seed: int = 0) -> int:
    """Return the hash in ``[0, 2**64)`` that decides into which share something falls; each seed has its own hashes."""
    salt = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document, before tokenization.

    Attributes:
        number: Number of its record in the source.
        record: Its record.
        content: Its text, its messages, or its tokens.
        num_bytes: Size of its text in UTF-8.
        held: Its images and sounds, once they are read; None: there are none, or they are not read yet.
        problem: Why they cannot be read.
    """

    number: int
    record: Record
    content: Content
    num_bytes: int
    held: Held | None = None
    problem: RejectedError | None = None


@dataclass(slots=True)
class SetTally:
    """The counts of one run for one set; changed only by the thread that reads.

    Attributes:
        num_documents: Documents written.
        num_tokens: Tokens of these documents.
        longest: Tokens of the longest document.
        num_differing: Conversations whose tokens differ from those of their whole text.
        num_read: Records read of the source, by earlier runs, too.
        rejected: Number of records without tokens, by reason.
        rejected_before: The same, of earlier runs.
        last_bad: The latest of them that is not empty, and why.
        keys: Keys of messages that were compared with the template.
        waiting: Number and reason of rejected records, to be attached to the next document written.
        listed: Rejected records by their place, up to 10,000 of them.
    """

    num_documents: int = 0
    num_tokens: int = 0
    longest: int = 0
    num_differing: int = 0
    num_read: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_before: Counter[str] = field(default_factory=Counter)
    last_bad: str = "one of an earlier run"
    keys: set[str] = field(default_factory=set)
    waiting: list[tuple[int, str]] = field(default_factory=list)
    listed: dict[str, Skipped] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        """Number of records without tokens that are not empty, of earlier runs, too."""
        both = self.rejected + self.rejected_before
        return both.total() - both["empty"]

    def reject(self, number: int, where: str, reason: str, what: str) -> None:
        """Count a rejected record, and list it."""
        self.rejected[reason] += 1
        if len(self.listed) < MAX_LISTED:
            words = f"{reason}: {what.removeprefix(f'{where}: ')}"
            self.listed[where] = Skipped(path=where, reason=words, is_lost=reason != "empty")
        heapq.heappush(self.waiting, (number, reason))

    def left_out_before(self, number: int | None) -> list[str]:
        """Return the reasons for records before a document (None: all) that were not returned yet."""
        found = []
        while self.waiting and (number is None or self.waiting[0][0] < number):
            found.append(heapq.heappop(self.waiting)[1])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The rule that finds a document in a record.

    Attributes:
        text_field: Location of its text: a column, a field of a tar, or a path into one, such as ``json.text``. Exactly
            one of this and the next two is given.
        messages_field: Location of its messages instead.
        tokens_field: Location of its tokens instead.
        mask_field: Location of the loss mask of these tokens.
        group_field: Field to hash; None: the document itself.
        share: The set to read; documents with other hashes belong to other sets.
        media: Reads the images and sounds of messages; None: messages are text.
    """

    text_field: str | None = None
    messages_field: str | None = None
    tokens_field: str | None = None
    mask_field: str | None = None
    group_field: str | None = None
    share: Share = Share()
    media: MediaReader | None = None

    def document(self, number: int, record: Record) -> Document | None:
        """Return the document of a record, or None if it belongs to another set.

        Raises:
            RejectedError: The record contains no document.
        """
        if record.problem is not None:
            utf8 = isinstance(record.problem.__cause__, UnicodeError)
            raise RejectedError("invalid UTF-8" if utf8 else "unreadable", str(record.problem))
        content: Content
        if self.tokens_field is not None:
            mask = self._value(record, self.mask_field) if self.mask_field is not None else None
            content = TokenIds.of(self._value(record, self.tokens_field), self.tokens_field, mask, self.mask_field)
            hashed = content.ids.astype("<i8").tobytes()
        elif self.messages_field is not None:
            beside = None if self.media is None else self.media.beside(record)
            value = self._value(record, self.messages_field)
            content, hashed = _conversation(value, record, self.messages_field, beside)
        else:
            name = self.text_field or ""
            content, hashed = _text(self._value(record, name), name)
        num_bytes = len(hashed)
        if self.share.stop - self.share.start < _HASHES:
            if self.group_field is not None:
                hashed = dump(self._value(record, self.group_field))
            if not self.share.start <= place_of(hashed) < self.share.stop:
                return None
        return Document(number=number, record=record, content=content, num_bytes=num_bytes)

    def with_media(self, document: Document) -> Document:
        """Return a document with its images and sounds, or with the problem of one that is missing or damaged."""
        if self.media is None or not isinstance(document.content, Conversation):
            return document
        try:
            content, held = self.media.held(document.content, document.record)
        except RejectedError as error:
            return replace(document, problem=error)
        return replace(document, content=content, held=held)

    def _value(self, record: Record, name: str) -> object:
        sample = record.metadata or record.fields
        value = sample.get(name)
        if value is None:
            try:
                value = follow(sample, name)
            except UnicodeDecodeError as error:
                raise RejectedError("invalid UTF-8", f"{name}: byte {error.start} is not UTF-8") from error
            except (ValueError, RecursionError) as error:
                raise RejectedError("unreadable", f"{name}: {error}") from error
        if value is None and _has(sample, name):
            raise RejectedError("null", f"{name!r} is null")
        if value is None:
            raise RejectedError("missing field", f"no {name!r}; there are: {', '.join(sample)}")
        return value


def _has(sample: Mapping[str, object], name: str) -> bool:
    """Tell whether a sample has an entry of this name, or path, whatever its value."""
    above, _, last = name.rpartition(".")
    place = follow(sample, above) if above else sample
    return name in sample or (isinstance(place, Mapping) and last in place)


def dump(value: object) -> bytes:
    """Write compact JSON with sorted keys, so that equal values give equal bytes regardless of the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _text(value: object, name: str) -> tuple[str, bytes]:
    """Return a text and its UTF-8 bytes."""
    try:
        if isinstance(value, (bytes, memoryview)):
            value = bytes(value).decode()
        if not isinstance(value, str):
            raise RejectedError("not a string", f"{name!r} is of type {type(value).__name__}, expected text")
        if not value:
            raise RejectedError("empty", f"{name!r} is empty")
        return value, value.encode()
    except UnicodeError as error:
        raise RejectedError("invalid UTF-8", f"{name!r}: {error}") from error


def _conversation(
    value: object, record: Record, name: str, beside: Mapping[str, Sequence[object]] | None
) -> tuple[Conversation, bytes]:
    """Return messages, and bytes that represent them."""
    if isinstance(value, (str, bytes)):  # JSON in a column of Parquet or CSV, or in a field of a tar
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RejectedError("unreadable", f"{name!r} is not JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise RejectedError(
            "not messages", f"{name!r}: expected a list of objects with role and content (or from and value)"
        )
    if not value:
        raise RejectedError("empty", f"{name!r} is empty")
    return read_conversation(value, record.metadata.get("tools"), beside), dump(value)
