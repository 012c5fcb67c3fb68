"""Decide which options a file may set: those that describe data; others only if the caller trusts the file with them.

A description of a mixture may come from a stranger, with the shards. Its options that describe data are checked like
the shards. Its options that concern this machine (the server that gets your keys, a file to write) are refused, and so
are files of arbitrary content outside its own folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from streaming.common.arguments import did_you_mean, some_names
from streaming.errors import ConfigError
from streaming.storage import (
    STORAGE_OPTIONS,
    local_path,
    redact,
    scheme_of,
    split_query,
    split_url,
    storage_option_name,
)

Trust: TypeAlias = "bool | Iterable[str]"
"""True: a file may set all options; otherwise the names of options that it may set beyond those that describe data."""

DATA_OF_STORES: Final[Mapping[str, re.Pattern[str]]] = {
    "anon": re.compile("True|False|None"),
    "mirrors": re.compile(".*", re.DOTALL),
    "region": re.compile(r"[a-z0-9-]{1,40}"),
    "account_name": re.compile(r"[a-z0-9]{3,24}"),
}
"""Storage options that describe data, with their safe values: a region with a slash would name another server."""
OF_THE_MACHINE: Final = {
    "bad_samples_file": "lines are appended to this file",
    "cache_dir": "files are written and deleted there",
    "cache_limit": "it bounds what a disk holds",
    "max_gzip_ratio": "it bounds what hostile shards may take",
}
"""Options of a set or a mixture that do not describe data, and why. All others describe data: a test lists them."""
FILES: Final = ("exclude",)
"""Options that name a file of arbitrary content to read: it must lie in the description's own folder or below.
Index, shards and mirrors are data wherever they lie: only files of their formats are read there."""
_OF_A_STORE: Final = {
    "endpoint_url": "your keys are sent there",
    **dict.fromkeys(("region", "account_name"), "with this value, another server would get your keys"),
    **dict.fromkeys(
        ("key", "secret", "token", "profile", "account_key", "sas_token", "connection_string"),
        "it chooses whose keys are used",
    ),
    "requester_pays": "it makes you pay",
    "ca_file": "it chooses which servers are trusted",
}


def checked_trust(trust: Trust) -> frozenset[str] | None:
    """Return the options that a file may set beyond those that describe data; None: all.

    Raises:
        ConfigError: A name is not an option that needs trust.
    """
    if isinstance(trust, bool):
        return None if trust else frozenset()
    if isinstance(trust, (str, Mapping)) or not isinstance(trust, Iterable):
        raise ConfigError(f'trust: expected True, or a list of options such as ["endpoint_url"], got {trust!r}')
    names = frozenset(trust)
    known = refusable()
    for name in sorted(names - known, key=str):
        raise ConfigError(
            f"trust: no option {name!r} needs it{did_you_mean(str(name), sorted(known))}; it is for "
            f"{some_names(sorted(known))}"
        )
    return names


def refusable() -> frozenset[str]:
    """Return the options of sets and stores that a file may not set by itself."""
    return frozenset((*OF_THE_MACHINE, *FILES)) | (STORAGE_OPTIONS - {"anon", "mirrors"})


def check_trusted(content: Mapping[str, Any], where: str, trust: frozenset[str] | None) -> None:
    """Refuse a description that sets options beyond those that describe data, unless it is trusted with them.

    Args:
        content: The description of a mixture; each source is a dict.
        where: Path or URL of the file.
        trust: See :func:`checked_trust`.

    Raises:
        ConfigError: It sets such an option; the message names key, file and cure.
    """
    if trust is None:
        return
    url = redact(where)
    for place, name, shown in _beyond_data(content, "", where):
        if name in trust:
            continue
        why = OF_THE_MACHINE.get(name) or _OF_A_STORE.get(name, "it sets how this machine reads")
        if name in FILES:
            why = f"it names a file outside {redact(split_url(where)[0]) or '.'}, which would be read; move it there"
        raise ConfigError(
            f"{url}{f', {place!r}' if place else ''}: {shown}: a file may say only what the data is; {why}. Leave "
            f'it out there and pass it yourself, or, if you trust this file, write trust=["{name}"] (on the command '
            f"line --trust {name})"
        )


def _beyond_data(content: Mapping[str, Any], place: str, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield the source, name, and name in the file of each option in a description that does not describe data."""
    for name, value in content.items():
        if name == "sources":
            for inner, one in value.items():
                yield from _beyond_data(one, f"{place}/{inner}" if place else inner, where)
        elif name in OF_THE_MACHINE or (name in FILES and isinstance(value, str) and not _is_beside(value, where)):
            yield place, name, name
        elif name == "storage_options":
            yield from ((place, inner, f"{name}: {shown}") for inner, shown in _of_store(value))
        elif name == "mirrors":
            yield from ((place, inner, f"{name}: {shown}") for inner, shown in _of_mirrors(value))


def _is_beside(name: str, where: str) -> bool:
    """Return whether a path or URL lies in the folder of a description or below it, after resolving links."""
    if scheme_of(name) != scheme_of(where):
        return False
    if scheme_of(name) == "file":
        own = os.path.realpath(os.path.dirname(local_path(where)) or ".")
        return os.path.commonpath([own, os.path.realpath(local_path(name))]) == own
    folder, path = (split_query(url)[0] for url in (split_url(where)[0], name))
    return path.startswith(f"{folder}/") and ".." not in path.split("/")


def _of_store(options: Any) -> Iterator[tuple[str, str]]:
    """Yield the storage options that do not describe data, with their names in the file."""
    for shown, value in options.items() if isinstance(options, Mapping) else ():
        name = storage_option_name(shown)
        if name == "mirrors":
            for one in value.values() if isinstance(value, Mapping) else ():
                yield from ((inner, f"{shown}: {given}") for inner, given in _of_mirrors(one))
        elif name in STORAGE_OPTIONS and not (name in DATA_OF_STORES and DATA_OF_STORES[name].fullmatch(str(value))):
            yield name, shown


def _of_mirrors(mirrors: Any) -> Iterator[tuple[str, str]]:
    for one in mirrors if isinstance(mirrors, list) else [mirrors]:
        if isinstance(one, Mapping):
            yield from _of_store({name: value for name, value in one.items() if name != "url"})
