"""From what a user writes to the list of shard URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from braceexpand import braceexpand

from streaming.errors import ConfigError, NotFoundError
from streaming.storage.adapters.local import is_directory
from streaming.storage.facade import Storage
from streaming.storage.urls import HTTP_SCHEMES, as_url, redact, scheme_of, split_query

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
INDEX_DIRECTORY = "_shardstream"
MAX_BRACE_URLS = 5_000_000
"""URLs that one pattern may stand for: a thousand terabytes in shards of 256 MB, and half a minute to write out."""
_MAX_DEPTH = 20
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?")
_LETTERS = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?[0-9]+)?")


def expand_urls(spec: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], storage: Storage) -> list[str]:
    """The shard URLs that ``spec`` names, in its order (listings sorted).

    Braces are expanded as a shell does (``{000..099}``, ``{a,b}``) without asking the store; ``::`` joins several; a
    prefix or directory stands for all ``.tar``, ``.tar.gz`` and ``.tgz`` below it.

    Raises:
        ConfigError: For a malformed pattern, or a shard that is named twice.
        NotFoundError: If a directory or prefix holds no shard.
    """
    if isinstance(spec, (str, os.PathLike)):
        specs: Sequence[str | os.PathLike[str]] = [spec]
    else:
        specs = list(spec)
    if not specs:
        raise ConfigError("no shards: the list of URLs is empty; name at least one shard, prefix or directory")
    urls = [url for one in specs for url in _expand_one(one, storage)]
    seen: set[str] = set()
    for url in urls:
        if url in seen:
            raise ConfigError(
                f"{redact(url)} is named twice; its samples would come twice an epoch. Name each shard once, and use a "
                "Mixture to weigh data sets"
            )
        seen.add(url)
    return urls


def _expand_one(spec: str | os.PathLike[str], storage: Storage) -> Iterator[str]:
    text = as_url(spec)
    parts = text.split("::") if isinstance(spec, str) else [text]
    for part in parts:
        if not part:
            raise ConfigError(f"{redact(text)!r}: an empty part beside '::'; remove the extra '::'")
        for url in _braces(part):
            yield from _shards(url, storage)


def _braces(pattern: str) -> Iterator[str]:
    path, query = split_query(pattern)
    if "{" not in path and "}" not in path:
        yield pattern
        return
    try:
        _refuse_many(path, redact(pattern))
        for url in braceexpand(path, escape=False):
            yield url + query
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{redact(pattern)!r}: unbalanced braces; write as in 's3://b/{{000..099}}.tar'") from error


def _refuse_many(pattern: str, shown: str) -> None:
    """Refuse what would take forever, or the stack, to write out."""
    depth = deepest = 0
    for letter in pattern:
        depth += (letter == "{") - (letter == "}")
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise ConfigError(f"{shown[:200]!r}: braces nested deeper than {_MAX_DEPTH}; write them flat")
    if (count := _count(pattern)) > MAX_BRACE_URLS:
        raise ConfigError(
            f"{shown[:200]!r}: these braces stand for {count:,} URLs, at most {MAX_BRACE_URLS:,} are written out; "
            "name a prefix or directory"
        )


def _count(pattern: str) -> int:
    """At least as many as ``braceexpand`` would give, without writing any of them out."""
    total, depth, start = 1, 0, 0
    for at, letter in enumerate(pattern):
        if letter == "{":
            start = at + 1 if depth == 0 else start
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                total *= _count_group(pattern[start:at])
    return total


def _count_group(inside: str) -> int:
    """What one pair of braces around ``inside`` multiplies the number of URLs by."""
    if _LETTERS.fullmatch(inside):
        return 52
    found = _RANGE.fullmatch(inside)
    if found is not None:
        first, last, step = found.groups()
        if max(len(first), len(last), len(step or "")) > 18:
            return MAX_BRACE_URLS + 1
        return abs(int(last) - int(first)) // max(1, abs(int(step or 1))) + 1
    total, depth, start = 0, 0, 0
    for at, letter in enumerate(inside):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            total += _count(inside[start:at])
            start = at + 1
    return total + _count(inside[start:])


def _shards(url: str, storage: Storage) -> Iterator[str]:
    """``url`` itself if it names a shard, otherwise the shards below it."""
    path, _ = split_query(url)
    directory = is_directory(url)
    if path.endswith(SHARD_SUFFIXES) and not directory:
        if "*" in path:
            raise ConfigError(f"{redact(url)!r}: '*' is not expanded; write braces, or the directory for all in it")
        yield url
        return
    if scheme_of(url) in HTTP_SCHEMES and not path.endswith("/"):
        yield url  # a download link without a telling name
        return
    found = [info.url for info in storage.list(url) if _is_shard(info.url)]
    if found:
        yield from found
    elif not directory and not path.endswith("/") and storage.exists(url):
        yield url
    else:
        raise NotFoundError(
            f"no shards below {redact(url)}: nothing there ends in {', '.join(SHARD_SUFFIXES)}; check the prefix "
            "(`shard_tools ls` shows what is there)"
        )


def _is_shard(url: str) -> bool:
    return url.endswith(SHARD_SUFFIXES) and f"/{INDEX_DIRECTORY}/" not in url
