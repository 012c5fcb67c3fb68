"""Expand the user's URLs to the list of shard URLs."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from urllib.parse import unquote

from braceexpand import braceexpand

from streaming.errors import SEVERAL, ConfigError, NotFoundError, shell_place
from streaming.storage import HTTP_SCHEMES, ObjectInfo, as_url, local_path, looked_for, redact, scheme_of, split_query
from streaming.storage.adapters.local import is_directory
from streaming.storage.facade import Storage
from streaming.types import SHARD_SUFFIXES

INDEX_DIRECTORY = "_shardstream"
MAX_BRACE_URLS = 5_000_000
"""Maximum number of URLs in one pattern: a petabyte in shards of 256 MB, and half a minute to expand."""
_MAX_DEPTH = 20
_MAX_PATH = 4096
_DECOMPRESSORS = {
    **dict.fromkeys((".tar.bz2", ".tbz2", ".tbz"), "bunzip2"),
    **dict.fromkeys((".tar.xz", ".txz"), "unxz"),
    **dict.fromkeys((".tar.zst", ".tzst"), "unzstd"),
    **dict.fromkeys((".tar.lz4",), "unlz4"),
}
_ALIASES = {"s3a": "s3", "gcs": "gs", "azure": "az", "abfss": "abfs"}
_HIDDEN = re.compile(r"\.").match
_log = logging.getLogger(__name__)
_WILD = re.compile(r"(\*\*|[*?]|\[!?[^\]/!][^\]/]{0,255}+\])")
_ANY = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?")
_LETTERS = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?[0-9]+)?")


def expand_urls(spec: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], storage: Storage) -> list[str]:
    """Return the shard URLs that ``spec`` names, in its order (listings sorted).

    Braces are expanded as in a shell (``{000..099}``, ``{a,b}``) without a request to the store; a local file or folder
    of exactly this name is itself. ``*``, ``?`` and ``[0-9]`` match names that the store lists (``part-*/*.tar``;
    ``**`` also matches folders); ``::`` joins several URLs; a prefix or directory stands for all ``.tar``, ``.tar.gz``
    and ``.tgz`` files below it, except hidden files and folders (whose names begin with a dot). Different spellings of
    a URL, and symbolic links, are recognized as the same shard.

    Raises:
        ConfigError: A pattern is malformed, a shard is named twice, or it is compressed in another way.
        NotFoundError: A directory or prefix holds no shard.
    """
    if isinstance(spec, (str, os.PathLike)):
        specs: Sequence[str | os.PathLike[str]] = [spec]
    else:
        specs = list(spec)
    if not specs:
        raise ConfigError("no shards: the list of URLs is empty; name at least one shard, prefix or directory")
    urls = [url for one in specs for url in _expand_one(one, storage)]
    identify = _Identity()
    seen: dict[str, str] = {}
    for url in urls:
        name = identify.of(url)
        other = seen.get(name)
        if other is not None:
            also = "" if other == url else f", also as {redact(other)}, which is the same shard"
            raise ConfigError(
                f"{redact(url)} is named twice{also}; its samples would be read twice per epoch. Name each shard once"
            )
        seen[name] = url
    return urls


class _Identity:
    """Identify shards however they are spelled. Each folder is listed once."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[str, frozenset[str]]] = {}

    def of(self, url: str) -> str:
        """Return equal values for two URLs if and only if they are known to be the same shard."""
        scheme = scheme_of(url)
        if scheme == "file":
            folder, name = os.path.split(local_path(url))
            real, links = self._folder(folder)
            path = os.path.join(real, name)
            return os.path.realpath(path) if name in links else path
        path, query = split_query(url)
        rest = path.partition("://")[2]
        return f"{_ALIASES.get(scheme, scheme)}://{unquote(rest) if scheme in HTTP_SCHEMES else rest}{query}"

    def _folder(self, folder: str) -> tuple[str, frozenset[str]]:
        """Return the real path of a folder, and the names in it that are symbolic links."""
        if folder not in self._folders:
            real, links = os.path.realpath(folder or "."), frozenset[str]()
            with suppress(OSError), os.scandir(real) as entries:
                links = frozenset(entry.name for entry in entries if entry.is_symlink())
            self._folders[folder] = real, links
        return self._folders[folder]


def _expand_one(spec: str | os.PathLike[str], storage: Storage) -> Iterator[str]:
    text = as_url(spec)
    there = _there(text)
    first, *others = text[len(there) :].split("::") if isinstance(spec, str) else [text[len(there) :]]
    parts = [there + first, *others]
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
    there = _there(path)
    try:
        _refuse_many(path[len(there) :], redact(pattern))
        for rest in braceexpand(path[len(there) :], escape=False):
            yield there + rest + query
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{redact(pattern)!r}: unbalanced braces; write them as in 's3://b/{{000..099}}.tar'"
        ) from error


def _there(path: str) -> str:
    """Return the longest beginning of a local path that exists under a name with braces or ``::``; "": none."""
    special = SEVERAL.search(path)
    if special is None or scheme_of(path) != "file":
        return ""
    slashes = [at for at in range(min(len(path), _MAX_PATH), special.start(), -1) if path[at : at + 1] == "/"]
    return next((path[:end] for end in (len(path), *slashes) if os.path.exists(local_path(path[:end]))), "")


def _refuse_many(pattern: str, shown: str) -> None:
    """Refuse patterns that would take forever to expand, or exhaust the stack."""
    depth = deepest = 0
    for letter in pattern:
        depth += (letter == "{") - (letter == "}")
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise ConfigError(f"{shown[:200]!r}: braces nested deeper than {_MAX_DEPTH}; write them flat")
    if (count := _count(pattern)) > MAX_BRACE_URLS:
        raise ConfigError(
            f"{shown[:200]!r}: these braces expand to {count:,} URLs, but at most {MAX_BRACE_URLS:,} are allowed; "
            "name a prefix or directory instead"
        )


def _count(pattern: str) -> int:
    """Return an upper bound on the number of URLs from ``braceexpand``, without expanding."""
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
    """Return the factor by which one pair of braces around ``inside`` multiplies the number of URLs."""
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
    """Yield ``url`` itself if it names a shard, otherwise the shards below it."""
    path, _ = split_query(url)
    directory = is_directory(url)
    if not directory and (cure := _decompressor(path)):
        raise ConfigError(
            f"{redact(url)}: this compression is not supported; decompress it (`{cure}`) and read the tar"
        )
    if path.endswith(SHARD_SUFFIXES) and not directory:
        yield from _matching(url, storage) if _is_pattern(url, storage) else [url]
        return
    if "*" in path and not directory and _is_pattern(url, storage):
        raise ConfigError(
            f"{redact(url)!r}: a pattern with '*' names shards, such as 'part-*/*.tar'; add the ending of the shards"
        )
    if scheme_of(url) in HTTP_SCHEMES and not path.endswith("/"):
        yield url  # a download link whose name does not show its type
        return
    listed = list(storage.list(url))
    base = url.rstrip("/") + "/"
    found = [info.url for info in listed if is_shard(info.url, base) and not _is_marker(info, storage)]
    others = [info.url for info in listed if _decompressor(info.url)]
    if found:
        if others:
            _log.warning(
                "%s: %d shards below it are left out: they are compressed like %s, which is not supported; use `%s`",
                redact(url),
                len(others),
                redact(others[0]),
                _decompressor(others[0]),
            )
        yield from found
    elif not directory and not path.endswith("/") and storage.exists(url):
        yield url
    else:
        raise NotFoundError(
            f"no shards below {redact(url)}{looked_for(url)}: no name there, hidden folders aside, ends in "
            f"{', '.join(SHARD_SUFFIXES)}; "
            + (f"decompress {redact(others[0])} (`{_decompressor(others[0])}`)" if others else _what_else(listed, base))
        )


_OTHER_LAYOUTS = ((".mds", "Mosaic's MDS"), (".mds.zstd", "Mosaic's MDS"), (".bin", "LitData's chunks"),
                  (".arrow", "a saved Hugging Face set"), (".tfrecord", "TFRecord"), (".parquet", "Parquet"),
                  (".jsonl", "JSON lines"), (".jpg", "images"), (".png", "images"))  # fmt: skip
"""Contents of files with other endings, which ``shard_tools convert`` turns into shards."""
_LEROBOT = "meta/info.json"
"""The file that a LeRobot set has, beside the tables in ``data/``."""


def _what_else(listed: Sequence[ObjectInfo], base: str) -> str:
    """Return the cure for files that are not shards: convert known types, or look elsewhere."""
    urls = [one.url for one in listed if f"/{INDEX_DIRECTORY}/" not in one.url and not is_hidden(one.url, base)]
    for root in (url.removesuffix(_LEROBOT) for url in urls if url.endswith(f"/{_LEROBOT}")):
        if any(url.startswith(f"{root}data/") and url.endswith(".parquet") for url in urls):
            return f"it looks like a LeRobot set; make shards of it: shard_tools convert {shell_place(root)} TARGET"
    has_index = any(url.endswith("/index.json") for url in urls)
    for ending, kind in _OTHER_LAYOUTS:
        if any(url.endswith(ending) for url in urls) and (has_index or ending != ".bin"):
            return f"it looks like {kind}, which `shard_tools convert` turns into shards"
    return "check the prefix"


def _is_pattern(url: str, storage: Storage) -> bool:
    """Return whether characters of a URL match other names. A local file, or an object, may have such a name itself."""
    path, _ = split_query(url)
    if "*" not in path and (scheme_of(url) in HTTP_SCHEMES or not _WILD.search(path)):
        return False
    if scheme_of(url) == "file":
        return not os.path.exists(local_path(url))
    return "*" in path or not storage.exists(url)


def _matching(url: str, storage: Storage) -> Iterator[str]:
    """Yield the shards whose names match.

    ``*`` matches any part of a name, ``**`` also folders, ``?`` one character, ``[a-c]`` one of these, ``[!a-c]`` any
    other one.

    Raises:
        ConfigError: The store lists nothing, or a range of characters is reversed.
        NotFoundError: No shard matches.
    """
    if scheme_of(url) in HTTP_SCHEMES:
        raise ConfigError(f"{redact(url)!r}: '*' is not expanded, as web servers list nothing; write braces")
    path, query = split_query(url)
    wild = _WILD.search(path)
    base = path[: path.rfind("/", 0, wild.start() if wild else None) + 1]
    try:
        matches = re.compile("".join(map(_expression, _WILD.split(path))), re.DOTALL).fullmatch
    except re.error as error:
        raise ConfigError(f"{redact(url)!r}: {error}; write ranges of characters as in '[0-9]'") from error
    where = base or "./"
    found = [info.url for info in storage.list(where + query) if is_shard(info.url, where)]
    found = [one for one in found if matches(split_query(one)[0].removeprefix("" if base else where))]
    if not found:
        raise NotFoundError(f"no shards match {redact(url)}{looked_for(url)}; check the pattern")
    yield from found


def _expression(part: str) -> str:
    """Return the regular expression for a part of a pattern that ``_WILD`` has split."""
    if part in _ANY:
        return _ANY[part]
    if not _WILD.fullmatch(part):
        return re.escape(part)
    inside = part[1:-1]
    is_other = inside.startswith("!")
    letters = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside.removeprefix("!"))
    return f"(?!/)[{'^' if is_other else ''}{letters}]"


def is_shard(url: str, base: str) -> bool:
    """Return whether an object listed below ``base`` is a shard: neither part of an index nor hidden."""
    return url.endswith(SHARD_SUFFIXES) and f"/{INDEX_DIRECTORY}/" not in url and not is_hidden(url, base)


def is_hidden(url: str, base: str) -> bool:
    """Return whether a name in the path of ``url`` below ``base`` begins with a dot."""
    above = base.rstrip("/") + "/"
    return any(map(_HIDDEN, url.removeprefix(above).split("/") if url.startswith(above) else [url]))


def folders_of(urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return those of ``urls``, as users write them, that stand for all shards below them."""
    specs = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    parts = [part for spec in specs for part in str(spec).split("::")]
    return [part.rstrip("/") for part in parts if not split_query(part)[0].endswith(SHARD_SUFFIXES)]


def _is_marker(info: ObjectInfo, storage: Storage) -> bool:
    """Return whether a listed object is an empty folder's marker, as consoles make them: its key ends with a slash."""
    return info.size_bytes == 0 and scheme_of(info.url) != "file" and not storage.exists(info.url)


def _decompressor(path: str) -> str:
    """Return the program that decompresses a shard in an unsupported format; "" if there is none."""
    lowered = path.lower()
    if not lowered.endswith(tuple(_DECOMPRESSORS)):
        return ""
    return next(program for end, program in _DECOMPRESSORS.items() if lowered.endswith(end))
