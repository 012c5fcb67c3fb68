"""Read and write files of tuned options, with the machine that they were measured on.

::

    {"shardstream": "0.1.0",
     "machine": {"cores": 16, "memory_bytes": 137438953472},
     "options": {"num_workers": 0, "num_threads": 4, "prefetch_factor": 2, "memory_limit": "4096MiB"},
     "measured": {"urls": ["s3://bucket/train/"], "batch_size": 256, "tried": […]}}

``measured`` is for people, and is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Final

from streaming.common.arguments import (
    did_you_mean,
    format_bytes,
    is_whole,
    json_object,
    some_names,
)
from streaming.errors import ConfigError, shell_place
from streaming.storage import Storage, redact, redact_text
from streaming.types import VERSION
from streaming.watch.tuned.machinery import MACHINERY

DEFAULT_NAME: Final = "tuned.json"
_MOST_BYTES = 1 << 20


_PARTS = ("shardstream", "machine", "options", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Measured options, and their machine.

    Attributes:
        options: Options of ``DataLoader`` about the preparation of batches, by name.
        cores: Number of cores that the measuring process could use.
        memory_bytes: Memory that it could use; None: not recorded.
        version: Version of this package at that time.
        measured: The data that was read, and all tried settings, for people.
    """

    options: Mapping[str, Any]
    cores: int
    memory_bytes: int | None = None
    version: str = VERSION
    measured: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of the file: JSON, without the secrets of URLs."""
        content = {
            "shardstream": self.version,
            "machine": {"cores": self.cores, "memory_bytes": self.memory_bytes},
            "options": dict(self.options),
            "measured": {**self.measured, "urls": [redact(url) for url in self.measured.get("urls", ())]},
        }
        return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def read_tuned(path: str | PathLike[str]) -> Tuned:
    """Read and validate a file of tuned options.

    Raises:
        ConfigError: ``path`` is not a path, or the file is damaged, or sets an option that it may not set.
        NotFoundError: There is no such file.
    """
    if not isinstance(path, (str, PathLike)) or not fspath(path):
        raise ConfigError(
            f"tuned: expected the path or URL of a file that `shard_tools bench --tune` wrote, got {path!r}"
        )
    return stored(Storage(), fspath(path))


def stored(storage: Storage, where: str) -> Tuned:
    """Return the checked content of the file at ``where``.

    Raises:
        ConfigError: It is damaged, or sets an option that it may not set.
        NotFoundError: There is no such file.
    """
    size_bytes = storage.info(where).size_bytes
    if size_bytes > _MOST_BYTES:  # perhaps a shard, which is too large to read into memory
        raise _damaged(where, f"it has {format_bytes(size_bytes)}, and such a file at most {format_bytes(_MOST_BYTES)}")
    content = _object(bytes(storage.read(where)), where)
    machine, options, version = (content[part] for part in ("machine", "options", "shardstream"))
    memory = machine.get("memory_bytes")
    if not is_whole(machine.get("cores")) or machine["cores"] < 1:
        raise _damaged(where, f"machine: cores: expected a number of at least 1, got {machine.get('cores')!r}")
    if memory is not None and (not is_whole(memory) or memory < 1):
        raise _damaged(where, f"machine: memory_bytes: expected a number of bytes, got {memory!r}")
    for name, value in options.items():
        _check_option(redact(where), name, value)
    return Tuned(options=options, cores=machine["cores"], memory_bytes=memory, version=version)


def _object(data: bytes, where: str) -> dict[str, Any]:
    """Return the content as an object with exactly the expected parts."""
    try:
        content = json.loads(data, object_pairs_hook=json_object)
    except (ValueError, RecursionError) as error:  # ValueError also covers text that is not UTF-8
        raise _damaged(where, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _damaged(where, f"expected an object, got {type(content).__name__}")
    for part, kind in (("shardstream", str), ("machine", dict), ("options", dict)):
        if not isinstance(content.get(part), kind):
            raise _damaged(where, f"{part}: expected {_KINDS[kind]}, got {_kind_of(content, part)}")
    for name in content:
        if name in MACHINERY:
            raise ConfigError(f'{redact(where)}: {name!r} belongs in "options": {{…}}; move it there')
        if name not in _PARTS:
            raise _damaged(where, f"no part is called {name!r}{did_you_mean(name, _PARTS)}")
    return content


_KINDS = {str: "the version, a string", dict: "an object"}


def _kind_of(content: Mapping[str, Any], part: str) -> str:
    return f"a value of type {type(content[part]).__name__}" if part in content else "nothing"


def _check_option(where: str, name: str, value: Any) -> None:
    """Refuse an option that a tuned file may not set, or an invalid value."""
    if name not in MACHINERY:
        hint = did_you_mean(name, MACHINERY)
        raise ConfigError(
            f"{where}: options: {name!r}{hint}: a file of tuned options may set only how batches are made ready "
            f"({some_names([*MACHINERY])}), and nothing that may change the training data. Leave it out there, and "
            "give it in the program"
        )
    if value is None:
        raise ConfigError(f"{where}: options: {name}: got null; leave it out there, and the loader's default holds")
    MACHINERY[name](f"{where}: options: {name}", value)


def _damaged(where: str, why: str) -> ConfigError:
    """Make the error for a file that the command did not write."""
    return ConfigError(
        f"{redact(where)}: not a file of tuned options, or damaged: {redact_text(why)}. Move it away, and measure "
        f"again: `shard_tools bench URL --tune --out {shell_place(where)}`"
    )
