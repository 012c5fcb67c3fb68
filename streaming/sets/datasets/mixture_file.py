"""Read the description of a dataset from a JSON file, and open it: for training and for tools.

::

    {"sources": {"web":  {"url": "s3://bucket/web/", "where": "tokens >= 64", "fields": ["txt"]},
                 "code": "s3://bucket/code/",
                 "text": {"sources": {"en": "s3://bucket/en/", "de": "/data/de/"}, "weights": {"en": 2, "de": 1}},
                 "cats": {"url": "s3://bucket/cats/", "balanced": {"by": "cls"}}},
     "weights": {"web": 0.6, "code": 0.2, "text": 0.1, "cats": 0.1}, "shuffle": {"lanes": 64}, "seed": 1}

A set is ``{"url": …}`` with options of ``StreamingDataset``, and at most one of ``packed``, ``windows``, ``balanced``
and ``curriculum`` with the options of that class. A mixture is ``{"sources": …}`` with options of ``Mixture``. Options
that do not describe data, such as ``endpoint_url``, are refused unless the caller trusts the file with them
(``trust.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from os import PathLike, fspath
from typing import Any, TypeAlias

from streaming.common.arguments import json_object, option_names, some_names
from streaming.errors import ConfigError, ShardstreamError, StateError
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.settings import ShuffleConfig
from streaming.sets.datasets.trust import Trust, check_trusted, checked_trust
from streaming.storage import Storage, redact
from streaming.types import Transform

Content: TypeAlias = "dict[str, Any]"
WRAPPERS = ("packed", "windows", "balanced", "curriculum")
_HOMES = {
    "sources": ("streaming.sets.datasets.mixture", "Mixture"),
    "url": ("streaming.sets.datasets.dataset", "StreamingDataset"),
    "packed": ("streaming.sets.datasets.packed", "Packed"),
    "windows": ("streaming.sets.datasets.windows", "Windows"),
    "balanced": ("streaming.sets.datasets.balanced", "Balanced"),
    "curriculum": ("streaming.sets.datasets.curriculum", "Curriculum"),
}
"""The class of each kind, by module and name: it is imported when it is first used, because a
mixture opens all kinds, and some kinds are mixtures themselves."""
_AT_THE_MIXTURE = ("shuffle", "seed")
"""Options of a dataset that have no effect within a mixture, which has its own order."""
_IN_CODE = "transform"
_INSIDE = {
    "length": "packed",
    "padded": "packed",
    "video": "windows",
    "by": "balanced",
    "metric": "curriculum",
    "schedule": "curriculum",
}
"""Options that people write beside the URL, and the object in which they belong."""


def read_description(
    path: str | PathLike[str], storage_options: Mapping[str, object] | None = None, trust: Trust = ()
) -> Content:
    """Return the content of a file that describes a mixture. Every source is a dict; a URL becomes ``{"url": …}``.

    Raises:
        ConfigError: The file is not JSON, does not describe a mixture, or sets an option it is not trusted with.
        NotFoundError: There is no such file.
    """
    where, trusted = fspath(path), checked_trust(trust)
    data = bytes(Storage(storage_options).read(where))
    try:
        content = json.loads(data, object_pairs_hook=json_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{redact(where)}: not a description of a mixture in JSON: {error}") from error
    described = _mixture(content, redact(where))
    check_trusted(described, where, trusted)
    return described


def names_of(content: Content, place: str = "") -> list[str]:
    """Return the names of all URLs of a mixture, such as ``"text/en"``, sorted."""
    found: list[str] = []
    for name, one in content["sources"].items():
        found += names_of(one, f"{place}{name}/") if "sources" in one else [place + name]
    return sorted(found)


def open_described(
    content: Content,
    *,
    place: str = "",
    transforms: Mapping[str, Transform] | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> Any:
    """Open the dataset that ``content`` describes: a mixture, or a set of any kind.

    Args:
        content: As :func:`read_description` returns it, or one of its sources.
        place: Name of the source, such as ``"text/en"``, for messages and ``transforms``; "" for the whole.
        transforms: The ``transform`` of each source, by name.
        storage_options: For sources that do not give their own.

    Raises:
        ConfigError: The description is invalid; a note names the source.
    """
    if "sources" not in content:
        return _open_set(content, place, (transforms or {}).get(place), storage_options)
    sources = {}
    for name, one in content["sources"].items():
        here = f"{place}/{name}" if place else name
        try:
            sources[name] = open_described(one, place=here, transforms=transforms, storage_options=storage_options)
        except ShardstreamError as error:
            error.add_note(f"of the source {here!r}")
            raise
    return _made("sources", sources, {name: value for name, value in content.items() if name != "sources"})


def _open_set(
    content: Content, place: str, transform: Transform | None, storage_options: Mapping[str, object] | None
) -> Any:
    kinds = [kind for kind in WRAPPERS if kind in content]
    options = {"storage_options": storage_options, **content, "transform": transform}
    for kind in ("url", *kinds):
        options.pop(kind)
    for name in options:
        if name in _INSIDE:
            raise ConfigError(
                f'{name!r} belongs in {_INSIDE[name]!r}: write "{_INSIDE[name]}": {{"{name}": …}} beside "url"'
            )
    if len(kinds) > 1:
        raise ConfigError(
            f"{some_names([*map(repr, kinds)])}: a set can be only one of these"
            + (f" ({place})" if place else "")
            + '; make one source of each, and mix them with "sources"'
        )
    for kind in kinds:
        if not isinstance(content[kind], dict):
            first = {
                "packed": '{"length": 8192}',
                "windows": '{"video": {"front.mp4": [0.0]}}',
                "balanced": '{"by": "cls"}',
            }.get(kind, '{"metric": …, "schedule": …}')
            raise ConfigError(f"{kind}: expected an object of options such as {first}, got {content[kind]!r}")
    dataset = _made("url", content["url"], options)
    return _made(kinds[0], dataset, content[kinds[0]]) if kinds else dataset


def _made(kind: str, first: Any, options: Mapping[str, Any]) -> Any:
    """Make a dataset of a kind from its first argument and options, as parsed from JSON."""
    module, name = _HOMES[kind]
    cls: Any = getattr(import_module(module), name)
    taken = {"self", option_names(cls)[0]} & options.keys()
    if taken:
        cure = 'write the shards as "url"' if kind == "url" else "leave it out"
        raise ConfigError(f"{name}: no option {min(taken)!r} in a file; {cure}")
    return cls(first, **{option: _value(option, value) for option, value in options.items()})


def _value(option: str, given: Any) -> Any:
    """Convert a value of the file for the classes: schedules and shuffle settings become objects.

    Raises:
        ConfigError: A schedule or the shuffle settings are invalid.
    """
    if not isinstance(given, Mapping):
        return given
    if option == "shuffle":
        if "self" in given:
            raise ConfigError("shuffle: no option 'self'; leave it out")
        return ShuffleConfig(**given)
    if isinstance(given.get("shape"), str):
        try:
            return Schedule.from_dict(given)
        except StateError as error:
            cause = error.__cause__
            said = f"{cause} is missing" if isinstance(cause, KeyError) else str(cause)
            raise ConfigError(f"{option}: expected a schedule as Schedule.to_dict() returns it: {said}") from error
    return {name: _value(option, value) for name, value in given.items()} if option == "metric" else given


def _mixture(content: Any, place: str) -> Content:
    """Return the object of a mixture, validated as far as possible without its sources."""
    if not isinstance(content, dict) or not isinstance(content.get("sources"), dict):
        hint = (
            ' For a single set write {"sources": {"NAME": …}}' if isinstance(content, dict) and "url" in content else ""
        )
        raise ConfigError(
            f'{place}: expected an object with "sources", such as {{"sources": {{"web": "s3://bucket/web/"}}}}, got '
            f"{_kind(content)}.{hint}"
        )
    for name in ("url", *WRAPPERS):
        if name in content:
            what = 'a set with "url" has it' if name == "url" else "each source has its own"
            raise ConfigError(f'{place}: {name!r} beside "sources": {what}; put it into the source')
    return {
        **content,
        "sources": {name: _source(one, f"{place}, {name!r}") for name, one in content["sources"].items()},
    }


def _source(content: Any, place: str) -> Content:
    if isinstance(content, str):
        return {"url": content}
    if isinstance(content, dict) and "sources" in content:
        return _mixture(content, place)
    if not isinstance(content, dict) or "url" not in content:
        raise ConfigError(f'{place}: expected a URL, or an object with "url" or "sources", got {_kind(content)}')
    for name in _AT_THE_MIXTURE:
        if name in content:
            raise ConfigError(f'{place}: {name!r} belongs to the mixture: put it beside "sources"')
    if _IN_CODE in content:
        raise ConfigError(
            f"{place}: {_IN_CODE!r} is code, which a file cannot hold; write Mixture.from_file(path, transforms={{…: "
            f"…}})"
        )
    return content


def _kind(content: Any) -> str:
    return f"an object with {', '.join(map(repr, content))}" if isinstance(content, dict) else repr(content)
