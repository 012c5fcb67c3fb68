"""Define every error that this package raises on purpose.

::

    ShardstreamError
    ├── ConfigError             (ValueError)         an invalid argument or combination of arguments
    │   ├── OptionError         (TypeError)          an option that does not exist; suggests the right one
    │   └── MemoryLimitError                         the plan does not fit into memory_limit
    ├── StateError              (ValueError)         a state_dict that does not belong to this loader
    ├── TicketError             (ValueError)         a ticket that is not open
    ├── StorageError            (OSError)            a request to the store failed, after retries
    │   ├── NotFoundError       (FileNotFoundError)  no such bucket, object, file or matching pattern
    │   ├── AccessDeniedError   (PermissionError)    no, wrong or insufficient credentials
    │   └── TransferError                            short, stalled or reset transfer; Range ignored; 5xx
    ├── ReadOnlyError                                a write through a store opened with read_only=True
    ├── DataError               (ValueError)         invalid bytes
    │   ├── TarError                                 a damaged or unusable tar member
    │   ├── DuplicateKeyError                        one key twice in a shard, or one field twice in a sample
    │   ├── ChecksumError                            bytes that differ from the index's CRC32C
    │   ├── DecodeError                              a field that cannot be decoded
    │   ├── IndexFormatError                         a damaged or unknown index file
    │   └── IndexMismatchError                       an index that does not match the shards
    ├── IndexMissingError       (FileNotFoundError)  an index is needed but missing
    ├── UnfinishedError         (RuntimeError)       shards that a command is still writing, or left unfinished
    ├── TooManyBadSamplesError  (RuntimeError)       max_bad_samples was exceeded
    ├── AgreementError          (RuntimeError)       ranks are about to train on different data
    ├── IteratorEndedError      (RuntimeError)       an iterator that was closed or failed before the end of its epoch
    │   └── IteratorSupersededError                  superseded by another iterator, set_epoch or load_state_dict
    ├── ReplicaError            (RuntimeError)       another rank of the same data share is gone, or left its loop
    ├── ForkedError             (RuntimeError)       an object used in a forked child of the process that owns it
    └── WorkerError             (RuntimeError)       an exception of a decode worker that cannot be pickled
        └── WorkerDiedError                          a batch on which decode workers die repeatedly

Each type also derives from the matching builtin, so that ``except FileNotFoundError`` keeps working. A message names
the fault, its place (URL, key, byte range), the expected and actual values, and a cure. Errors of other libraries are
translated in one place, the adapter that called them, and remain available as ``__cause__``.

No message shows the user, password or query of a URL: they are removed when the error is created, which also spells out
control characters and shortens long keys and values. Names in a command that a message suggests are quoted for the
shell (:func:`shell_place`, :func:`shell_spec`, :func:`shell_word`), so a name cannot be a command.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from typing import TypeVar

if not hasattr(sys.modules["streaming"], "_HOMES"):
    raise ImportError(
        f"import streaming: {sys.modules['streaming'].__file__} belongs to another package, such as MosaicML's, and "
        f"hides shardstream's {__file__}. Both are imported as `streaming`, so they need separate environments. Run "
        "`pip uninstall mosaicml-streaming` and `pip install --force-reinstall shardstream`"
    )


_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]+):/")
_URL = re.compile(r"(?<![a-zA-Z0-9+.\-])([0-9+.\-]*+)([a-zA-Z][a-zA-Z0-9+.\-]++://[^\s'\"`]++)")
"""A URL, after a character that cannot belong to its scheme. So each run of scheme letters is matched once, from its
start: messages repeat keys of any length that strangers chose."""
_SLASHED = re.compile(r"\A([a-zA-Z][a-zA-Z0-9+.\-]*://)[^/?:\[]*:(?![0-9]*(?:/|\Z))[^?]*@")
"""A user and a password with an unencoded slash: the text after the first colon is not a port."""
_MOST_OF_A_WORD = 2_000
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{_MOST_OF_A_WORD + 1},}}+")
_MOST_OF_A_MESSAGE = 20_000
SEVERAL = re.compile(r"[{}]|::")
"""Characters that denote several URLs in arguments of commands (``streaming.shards.catalog.urls``)."""
_AFTER_URL = ".,:;)]"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_SHOWN = 10
_Error = TypeVar("_Error", bound=Exception)


def redact(url: str) -> str:
    """Return ``url`` for messages: without user and password, and without a query string that may be a signature.

    Outside http(s) a question mark may be part of a key: the text after it is hidden if it looks like ``name=value``.
    """
    if ":/" not in url:
        return url
    scheme = found[1].lower() if (found := _SCHEME.match(url)) else "file"
    path, mark, query = url.partition("?")
    if scheme == "file" or (scheme not in {"http", "https"} and "=" not in query):
        path, mark = url, ""
    path = _SLASHED.sub(r"\1…@", re.sub(r"(://)[^/?]*@", r"\1…@", path))
    return f"{path}?…" if mark else path


def redact_text(text: str) -> str:
    """Return ``text`` with every URL in it redacted; punctuation after a URL stays."""

    def shown(found: re.Match[str]) -> str:
        url = found[2].rstrip(_AFTER_URL)
        return found[1] + redact(url) + found[2][len(url) :]

    return _URL.sub(shown, text)


def visible(text: str) -> str:
    """Return ``text`` with control characters, which could control a terminal, spelled out; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def shell_word(text: str) -> str:
    """Quote a name, which may come from data, as one shell word, for commands that a message suggests.

    The shell reads any content as a name. Control characters are spelled in the form that bash and zsh read.
    """
    if not _CONTROL.search(text) and not set("\n\t") & set(text):
        return shlex.quote(text)
    return f"$'{''.join(map(_spelled, text))}'"


def shell_spec(url: str) -> str:
    """Return a user's URL, path or pattern, without secrets, as one shell word."""
    shown = redact(url) or "."
    return shell_word(f"./{shown}" if shown.startswith("-") else shown)  # otherwise it would be an option


def shell_place(url: str) -> str:
    """Return a file or folder, without secrets, as one shell word that commands read as this single place.

    Braces and ``::`` denote several URLs. An existing local path is read literally. For a web server they are
    percent-encoded, which names the same object. For an object in a store, the folder is returned.
    """
    scheme = found[1].lower() if (found := _SCHEME.match(url)) else "file"
    special = None if scheme == "file" else SEVERAL.search(url)
    if special is None:
        return shell_spec(url)
    if scheme in {"http", "https"}:
        path, mark, query = url.partition("?")
        encoded = SEVERAL.sub(lambda one: "".join(f"%{ord(letter):02X}" for letter in one[0]), path)
        return shell_spec(encoded + mark + query)
    return shell_spec(url[: url.rfind("/", 0, special.start()) + 1])


def _spelled(letter: str) -> str:
    """Return the spelling of a character within ``$'…'``."""
    if letter in "\\'":
        return f"\\{letter}"
    if not _CONTROL.match(letter) and letter not in "\n\t":
        return letter
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        code -= 0xDC00
        return f"\\x{code:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"


def readable(text: str) -> str:
    """Return a message without the middle of long words, and without the middle of a long message.

    Keys and values of samples may have any length. Their start identifies them; the end of a message is its cure.
    """
    text = _LONG_WORD.sub(lambda found: _without_middle(found[0], _MOST_OF_A_WORD), text)
    return text if len(text) <= _MOST_OF_A_MESSAGE else _without_middle(text, _MOST_OF_A_MESSAGE)


def _without_middle(text: str, most: int) -> str:
    kept = most // 2
    return f"{text[:kept]}…({len(text) - 2 * kept:,} characters left out)…{text[-kept:]}"


class ShardstreamError(Exception):
    """Base class of all errors that shardstream raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(visible(readable(redact_text(one))) if isinstance(one, str) else one for one in args))


class ConfigError(ShardstreamError, ValueError):
    """An invalid argument, or an invalid combination of arguments."""


class OptionError(ConfigError, TypeError):
    """An option that does not exist; the message suggests the right one, or names the object that has it."""


class MemoryLimitError(ConfigError):
    """The plan needs more memory than ``memory_limit``; the message shows the calculation."""


class StateError(ShardstreamError, ValueError):
    """A ``state_dict`` that is malformed or belongs to another dataset or order."""


class StorageError(ShardstreamError, OSError):
    """A request to the store failed, after retries."""


class ReadOnlyError(ShardstreamError):
    """A write through a store that was opened with ``read_only=True``; nothing was written.

    Attributes:
        url: The object that would have been written or deleted.
        action: ``"write"`` or ``"delete"``.
    """

    def __init__(self, url: str, action: str) -> None:
        super().__init__(f"{redact(url)}: would {action} it, but this store is read-only (storage option read_only)")
        self.url, self.action = url, action

    def __reduce__(self) -> tuple[type[ReadOnlyError], tuple[str, str]]:
        return ReadOnlyError, (self.url, self.action)


class NotFoundError(StorageError, FileNotFoundError):
    """No such bucket, object or file, or nothing matches a pattern."""


class AccessDeniedError(StorageError, PermissionError):
    """No, wrong or insufficient credentials."""


class TransferError(StorageError):
    """A transfer that was too short, stalled, was reset, or had an unexpected response. A retry may succeed."""


class DataError(ShardstreamError, ValueError):
    """Invalid bytes."""


class TarError(DataError):
    """A damaged, truncated or unusable tar archive or member."""


class DuplicateKeyError(DataError):
    """A key that occurs twice in a shard, or a field that occurs twice in a sample."""


class ChecksumError(DataError):
    """Bytes whose CRC32C differs from the one in the index."""


class DecodeError(DataError):
    """A field that cannot be decoded."""


class IndexFormatError(DataError):
    """An index file that is damaged, or of a version that this release cannot read."""


class IndexMismatchError(DataError):
    """An index that does not match the shards: some were replaced or truncated, or are missing or extra."""


class IndexMissingError(ShardstreamError, FileNotFoundError):
    """An operation needs an index, and the shards have none."""


class UnfinishedError(ShardstreamError, RuntimeError):
    """Shards of an incomplete set: a command is still writing it, or was interrupted."""


class TooManyBadSamplesError(ShardstreamError, RuntimeError):
    """More samples were unreadable than ``max_bad_samples`` allows."""


class AgreementError(ShardstreamError, RuntimeError):
    """Ranks differ in dataset, order, options or position; the message names the ranks and the differences."""


class IteratorEndedError(ShardstreamError, RuntimeError):
    """An iterator was used after its loader was closed or after an error, before the end of its epoch."""


class IteratorSupersededError(IteratorEndedError):
    """An iterator was used after another iterator, ``set_epoch`` or ``load_state_dict`` superseded it."""


class TicketError(ShardstreamError, ValueError):
    """A ticket that is not open: already settled, not issued yet, of another rank, or of another run."""


class ReplicaError(ShardstreamError, RuntimeError):
    """Another rank of the same data share is gone or silent, or left its loop while this one continued."""


class ForkedError(ShardstreamError, RuntimeError):
    """An iterator or writer was used in a forked child of the process that created it; only that process can use it."""


class WorkerError(ShardstreamError, RuntimeError):
    """An exception raised in a decode worker, of a type that cannot be sent to the training process."""


class WorkerDiedError(WorkerError):
    """Several decode workers died in turn on the same batch; the message names the batch and the signal."""


def first_of(errors: Sequence[_Error], what: str) -> _Error:
    """Return the first of several errors, with the messages of the next ones as notes, and the number of all others.

    ``what`` summarizes the errors, such as ``"shards are damaged"``.
    """
    first = errors[0]
    for other in errors[1:_SHOWN]:
        first.add_note(f"also: {other}")
    if len(errors) > _SHOWN:
        first.add_note(f"… and {len(errors) - _SHOWN:,} more {what}")
    return first
