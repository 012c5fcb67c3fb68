"""Describe an export to every format: the set, the options, and the names of shards relative to the target."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shard_tools.change.sets.open_set import READ_THREADS, OpenSet, relative_names, tables_of
from shard_tools.running.engine import DEFAULT_WORKERS
from streaming.common.arguments import did_you_mean
from streaming.errors import ConfigError
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage, local_path, redact, scheme_of, split_query

TRAIN = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        splits: (split, pattern) pairs: a shard belongs to the split of the first pattern that matches its name. Without
        pairs, folders such as ``train`` and ``val`` are splits, and a set without such folders is ``train``.
        where: Keep only samples that match this condition. This and the next three are for formats that hold samples.
        view: Keep only the samples of a saved view.
        fields: Keep only these fields; None: all.
        columns: Late columns to keep, in addition to the columns of the sample tables.
        index_url: Location of the index, if not beside the shards.
        workers: Number of shards processed in parallel.
        overwrite: Replace existing files that have other content.
        allow_unfinished: Accept an unfinished set, and export the samples that are there.
    """

    splits: tuple[tuple[str, str], ...] = ()
    where: str | None = None
    view: str | None = None
    fields: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    index_url: str | None = None
    workers: int = DEFAULT_WORKERS["local"]
    overwrite: bool = False
    allow_unfinished: bool = False

    @property
    def of_samples(self) -> dict[str, object]:
        """Return the options that select samples, fields or columns, by their names on the command line."""
        given = {
            "--where": self.where, "--view": self.view, "--fields": self.fields, "--columns": self.columns or None,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of an export.

    Attributes:
        files: Their names below the target, each with whether this run wrote it.
        num_samples: Number of samples that the other program will read.
        num_bytes: Bytes of shards that were read; 0 if the index sufficed.
    """

    files: tuple[tuple[str, bool], ...]
    num_samples: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """A set to be exported.

    Attributes:
        opened: The shards, with their index.
        storage: Store of source and target.
        target: Folder or prefix.
        options: The options.
        classes: Names of classes in the order of their numbers, by field and column.
    """

    opened: OpenSet
    storage: Storage
    target: str
    options: ExportOptions
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the set."""
        return self.opened.chunks.fingerprint

    @property
    def names(self) -> list[str]:
        """Names of the shards, relative to the folder that holds all of them.

        Raises:
            ConfigError: Two shards have the same name.
        """
        return relative_names(self.opened.urls)

    def names_beside(self, program: str) -> list[str]:
        """Return the names of the shards relative to the target, which has to hold them.

        Raises:
            ConfigError: One is outside the target, where ``program`` does not look for it.
        """
        names = self.below_target()
        for url, name in zip(self.opened.urls, names, strict=True):
            if name is None:
                raise ConfigError(
                    f"{redact(url)}: {program} looks for shards in the folder of its metadata, which is to be "
                    f"{redact(self.target)}/; give the folder of the shards as the target, or bring them there first "
                    "with `shard_tools copy`"
                )
        return [name for name in names if name is not None]

    def below_target(self) -> list[str | None]:
        """Return the names of the shards relative to the target; None for a shard outside it."""
        base = f"{_plain(self.target)}/"
        paths = [_plain(split_query(url)[0]) for url in self.opened.urls]
        return [path.removeprefix(base) if path.startswith(base) else None for path in paths]

    def tables(self) -> Iterator[tuple[int, SampleTable]]:
        """Yield the position and the sample table of each shard."""
        for position, (_, _, table) in enumerate(tables_of(self.opened, self.storage, READ_THREADS)):
            yield position, table

    def splits(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the names of shards by split, in order.

        Raises:
            ConfigError: A pattern fits no shard, or a shard no pattern.
        """
        return by_split(names, self.options.splits)


def _plain(url: str) -> str:
    """Return an address in a form that can be compared: for paths, absolute and without links."""
    return os.path.realpath(local_path(url)) if scheme_of(url) == "file" else url.rstrip("/")


def by_split(names: Sequence[str], patterns: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return names of shards by split; see ``ExportOptions.splits``.

    Raises:
        ConfigError: A pattern fits no shard, or a shard no pattern.
    """
    if not patterns:
        return _by_folder(names)
    found: dict[str, list[str]] = {split: [] for split, _ in patterns}
    unused = dict.fromkeys(pattern for _, pattern in patterns)
    for name in names:
        first = next(((split, pattern) for split, pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
        if first is None:
            raise ConfigError(f"--split: the shard {name} fits no pattern; let the last one be '*'")
        unused.pop(first[1], None)
        found[first[0]].append(name)
    for pattern in unused:
        hint = did_you_mean(pattern, names)
        raise ConfigError(f"--split: no shard is left for {pattern!r}{hint}; the first is {names[0]!r}")
    return found


_SPLITS: Mapping[str, str] = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def _by_folder(names: Sequence[str]) -> dict[str, list[str]]:
    folders = [name.partition("/")[0].lower() if "/" in name else "" for name in names]
    if not all(folder in _SPLITS for folder in folders):
        return {TRAIN: list(names)}
    found: dict[str, list[str]] = {}
    for name, folder in zip(names, folders, strict=True):
        found.setdefault(_SPLITS[folder], []).append(name)
    return found
