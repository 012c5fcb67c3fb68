"""From what a user writes to the list of shard URLs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from braceexpand import braceexpand

from streaming.errors import ConfigError, NotFoundError
from streaming.storage.facade import Storage
from streaming.storage.local import is_directory
from streaming.storage.urls import HTTP_SCHEMES, as_url, redact, scheme_of, split_query

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
INDEX_DIRECTORY = "_shardstream"


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
        for url in braceexpand(path, escape=False):
            yield url + query
    except ValueError as error:
        raise ConfigError(f"{redact(pattern)!r}: unbalanced braces; write as in 's3://b/{{000..099}}.tar'") from error


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
