"""Check keys and fields: all readers of WebDataset shards must interpret them identically, and keys must be unique.

A reader splits a member's name at the first dot of its last path component: ``a/b.seg.png`` is field ``seg.png`` of
sample ``a/b``. Names that some reader would split differently, skip or change to lower case are refused, so that they
never enter a shard.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from streaming.errors import ConfigError, DuplicateKeyError
from streaming.shards.tar.passed_over import in_side_folder

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PLAIN: Final = re.compile(r"(?!__)[\w-]+(?:/(?!__)[\w-]+)*", re.ASCII)  # a key that all rules below allow
_BLANK: Final = re.compile(r"\s")
_LOG_CHUNK: Final = 1024
_NUMBER_DIGITS: Final = 9
WRONG_NAMES: Final = "names cannot be stored"


def number_key(number: int) -> str:
    """Return the key of record ``number``, for numbered keys."""
    return f"{number:0{_NUMBER_DIGITS}d}"


def check_key(key: object) -> str:
    """Return ``key`` if every reader finds the sample under exactly this key.

    Raises:
        ConfigError: Some reader would not; the message states the problem, and the behavior of that reader.
    """
    if not isinstance(key, str):
        raise ConfigError(f"__key__ must be a str, got {type(key).__name__} {key!r}; write f'{{i:08d}}' for a number")
    why = _key_problem(key)
    if why is not None:
        raise ConfigError(f"sample key {key!r}: {why}")
    return key


def check_keys(keys: Sequence[object]) -> None:
    """Check many keys like :func:`check_key`.

    Raises:
        ConfigError: As for :func:`check_key`, for the first wrong key.
    """
    for key in keys:
        if not (type(key) is str and _PLAIN.fullmatch(key)):
            check_key(key)


def wrong_names(names: Iterable[tuple[str, Iterable[str]]]) -> Iterator[ConfigError]:
    """Yield an error for each key and field of (key, fields) pairs that some reader would not find."""
    for key, fields in names:
        try:
            check_key(key)
            for field in fields:
                check_field(field, key)
        except ConfigError as error:
            yield error


def check_field(field: object, key: str) -> str:
    """Return ``field`` if every reader finds the value under exactly this name.

    Raises:
        ConfigError: Some reader would not; the message states the problem, and the behavior of that reader.
    """
    if not isinstance(field, str):
        raise ConfigError(f"sample {key!r}: a field's name must be a str, got {type(field).__name__} {field!r}")
    why = _field_problem(field)
    if why is not None:
        raise ConfigError(f"sample {key!r}, field {field!r}: {why}")
    return field


def _key_problem(key: str) -> str | None:  # noqa: PLR0911  # a list of rules
    if _PLAIN.fullmatch(key):
        return None
    problem = _text_problem(key)
    if problem is not None:
        return problem
    *directories, last = key.split("/")
    if not last:
        return "it ends with '/', so that the member would be a dot-file, which readers skip; append a name"
    if not all(directories):
        return "it starts with '/' or contains '//', which tar readers strip or merge; write a relative path"
    if "." in directories or ".." in directories:
        return "it has a component '.' or '..', which readers resolve or refuse; write the path without it"
    if "." in last:
        return (
            "its last component contains '.', where readers split key and field; replace the dots, "
            f"for example {key.replace('.', '_')!r}"
        )
    if in_side_folder(f"{key}."):
        return "it lies in a folder that macOS or a NAS makes beside files, which readers skip; rename the folder"
    if any(component.startswith("__") for component in (*directories, last)):
        return "a component starts with '__', which webdataset and Hugging Face skip as metadata; rename it"
    return None


@functools.lru_cache(maxsize=4096)  # every sample has the same few fields
def _field_problem(field: str) -> str | None:  # noqa: PLR0911  # a list of rules
    problem = _text_problem(field)
    if problem is not None:
        return problem
    if "/" in field:
        return "it contains '/', which makes the key a directory; put directories into __key__"
    if field.startswith("."):
        return f"it starts with '.'; write it without: {field.lstrip('.')!r}"
    if field.endswith(".") or ".." in field:
        return "it has an empty part between or after dots; remove the extra dot"
    if field != field.lower():
        return f"it has upper-case letters, which only webdataset lower-cases; write {field.lower()!r}"
    if field.startswith("__"):
        return "it starts with '__', which is for readers' notes such as __key__; rename it"
    if _BLANK.search(field):
        return "it contains white space, which DALI's index files cannot hold; replace it"
    return None


def _text_problem(text: str) -> str | None:
    if not text:
        return "it is empty; give it a name"
    if _CONTROL.search(text):
        return "it contains a control character (NUL, newline, …), where readers cut or quote names; remove it"
    if "\\" in text:
        return "it contains a backslash, a path separator on Windows; write '/' or remove it"
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"it is not valid Unicode ({error.reason} at character {error.start}); repair the text"
    return None


class SeenKeys:
    """All keys written so far, for refusing duplicates. Not thread-safe.

    Keys in strictly ascending order, the usual case, cannot repeat: only a compressed log of them is kept (2 to 5 bytes
    per key), and nothing is looked up. The first key out of order turns the log into a set, which takes about 100 bytes
    per key. Within a shard, keys must differ by more than case.
    """

    def __init__(self) -> None:
        self._last = ""
        self._pending: list[str] = []
        self._packer = zlib.compressobj(level=1)
        self._packed: list[bytes] = []
        self._all: set[str] | None = None
        self._folded: dict[str, str] = {}

    def check(self, key: str, *, new_shard: bool) -> None:
        """Check that ``key`` may be used; call :meth:`add` once it is.

        Args:
            key: The key.
            new_shard: Whether it starts a new shard: case is compared only within a shard.

        Raises:
            DuplicateKeyError: The key was used before, or differs from one in this shard only by case.
        """
        if key <= self._last and key in self._as_set():
            raise DuplicateKeyError(f"sample key {key!r} was written before; keys must be unique in a data set")
        other = key if new_shard else self._folded.get(key.casefold(), key)
        if other != key:
            raise DuplicateKeyError(
                f"sample key {key!r} differs from {other!r} of the same shard by upper and lower case alone, "
                "which file systems and readers that fold case mix up; rename one"
            )

    def add(self, key: str, *, new_shard: bool) -> None:
        """Remember ``key``, which must have passed :meth:`check`."""
        if new_shard:
            self._folded.clear()
        self._folded[key.casefold()] = key
        self._remember(key)

    def _remember(self, key: str) -> None:
        if self._all is not None:
            self._all.add(key)
            self._last = max(self._last, key)
            return
        self._last = key
        self._pending.append(key)
        if len(self._pending) >= _LOG_CHUNK:
            self._pack()

    def add_all(self, keys: Sequence[str], *, new_shard: bool) -> int:
        """Check and remember keys of one shard, up to the first refused one; return the number of keys added."""
        for number, key in enumerate(keys):
            if key <= self._last and key in self._as_set():
                return number
            if new_shard and number == 0:
                self._folded.clear()
            if self._folded.setdefault(key.casefold(), key) is not key:
                return number
            self._remember(key)
        return len(keys)

    def _pack(self) -> None:
        # Keys hold no control characters, so a newline ends each key.
        text = "".join(f"{key}\n" for key in self._pending)
        self._packed.append(self._packer.compress(text.encode("utf-8")))
        self._pending.clear()

    def _as_set(self) -> set[str]:
        if self._all is None:
            self._pack()
            raw = zlib.decompress(b"".join((*self._packed, self._packer.flush())))
            self._packed.clear()
            self._all = set(raw.decode("utf-8").split("\n")[:-1])
        return self._all
