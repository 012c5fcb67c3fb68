"""Read the description of a mixture from a JSON file: what it says, checked, and nothing opened.

::

    {"sources": {"web":  {"url": "s3://bucket/web/", "where": "tokens >= 64", "fields": ["txt"]},
                 "code": "s3://bucket/code/",
                 "text": {"sources": {"en": "s3://bucket/en/", "de": "/data/de/"}, "weights": {"en": 2, "de": 1}}},
     "weights": {"web": 0.6, "code": 0.3, "text": 0.1}, "unit": "samples", "shuffle": {"lanes": 64}, "seed": 1}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from streaming.errors import ConfigError, StateError
from streaming.plan.schedule import Schedule
from streaming.plan.settings import ShuffleConfig
from streaming.storage import Storage, redact

_AT_THE_MIXTURE = ("shuffle", "seed")
"""Options of a dataset that have no effect within a mixture, which has its own order."""
_IN_CODE = "transform"


def read_description(path: str | PathLike[str], storage_options: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the content of a file that describes a mixture. Every source is a dict; a URL becomes ``{"url": …}``.

    Raises:
        ConfigError: The file is not JSON, or does not describe a mixture.
        NotFoundError: There is no such file.
    """
    where = fspath(path)
    data = bytes(Storage(storage_options).read(where))
    try:
        content = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{redact(where)}: not a description of a mixture in JSON: {error}") from error
    return _mixture(content, redact(where))


def arguments_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Mixture`` that a description gives besides its sources.

    Raises:
        ConfigError: A schedule or the shuffling is invalid.
    """
    made = {name: value for name, value in content.items() if name != "sources"}
    if isinstance(made.get("weights"), Mapping) and isinstance(made["weights"].get("shape"), str):
        try:
            made["weights"] = Schedule.from_dict(made["weights"])
        except StateError as error:
            raise ConfigError(f"weights: expected a schedule as Schedule.to_dict() returns it: {error}") from error
    if isinstance(made.get("shuffle"), Mapping):
        made["shuffle"] = ShuffleConfig(**made["shuffle"])
    return made


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, and refuse duplicate names, which would silently lose a source."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice in one object")
    return made


def _mixture(content: Any, place: str) -> dict[str, Any]:
    """Validate a mixture's object as far as possible without its sources, and return it."""
    if not isinstance(content, dict) or not isinstance(content.get("sources"), dict):
        raise ConfigError(
            f'{place}: expected an object with "sources", such as {{"sources": {{"web": "s3://bucket/web/"}}}}, got '
            f"{_kind(content)}"
        )
    return {
        **content,
        "sources": {name: _source(one, f"{place}, {name!r}") for name, one in content["sources"].items()},
    }


def _source(content: Any, place: str) -> dict[str, Any]:
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
