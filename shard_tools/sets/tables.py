"""Find the files of a dataset one by one: a shard's index, its size, its tables."""

from __future__ import annotations

from collections.abc import Sequence

from shard_tools.running.engine import map_ordered
from streaming.catalog.build import no_samples, samples_url
from streaming.errors import ConfigError, NotFoundError
from streaming.index.sample_table import SampleTable
from streaming.storage import Storage, join_url, redact, split_query
from streaming.types import SHARD_SUFFIXES

_REQUESTS = 32  # at once; they wait for the store, not for the CPU


def place_of(name: str, folder: str, index_url: str | None) -> str:
    """Return the URL of the shard that an index calls ``name``; its neighbors lie in ``folder``."""
    return join_url(index_url, name) if index_url is not None and "/" in name else join_url(folder, name)


def names_shards(urls: Sequence[str]) -> bool:
    """Tell whether ``urls`` name shards; directories and prefixes stand for everything below them."""
    return any(url.partition("?")[0].endswith(SHARD_SUFFIXES) for url in urls)


def relative_names(urls: Sequence[str]) -> list[str]:
    """Return the paths below the innermost directory that holds all shards; plain names if there is none.

    Raises:
        ConfigError: Two shards have the same name.
    """
    parts = [split_query(url)[0].split("/") for url in urls]
    depth = 0
    while parts and all(len(part) > depth + 1 and part[depth] == parts[0][depth] for part in parts):
        depth += 1
    if any("://" in url for url in urls) and depth < len(("scheme:", "", "bucket")):
        depth = 0
    names = ["/".join(part[depth:]) if depth else part[-1] for part in parts]
    for i, name in enumerate(names if len({*names}) < len(names) else ()):
        if name in names[:i]:
            raise ConfigError(
                f"two of the shards are called {name!r}; write them to folders of their own, one at a time"
            )
    return names


def sizes_of(storage: Storage, urls: Sequence[str]) -> list[int]:
    """Return the size of each shard in bytes.

    Raises:
        NotFoundError: A shard is missing.
    """
    return list(map_ordered(lambda url: storage.info(url).size_bytes, urls, min(_REQUESTS, len(urls))))


def load_samples(storage: Storage, url: str, index_url: str | None) -> SampleTable | None:
    """Return the sample table of the shard at ``url``, or None if there is none.

    Raises:
        IndexFormatError: It is damaged.
    """
    source = samples_url(url, index_url)
    try:
        return SampleTable.from_parquet(storage.read(source), redact(source))
    except NotFoundError:
        return None


def needed_samples(storage: Storage, url: str, index_url: str | None) -> SampleTable:
    """Return the sample table of the shard at ``url``, which the caller cannot do without.

    Raises:
        IndexMissingError: There is none.
    """
    table = load_samples(storage, url, index_url)
    if table is None:
        raise no_samples(url)
    return table
