"""Save and load views: named filters, each in a small file beside the index (``docs/format.md``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from os import PathLike, fspath
from typing import Any

from streaming.common.job.shared_results import Peers, shared
from streaming.errors import ConfigError, IndexFormatError, NotFoundError, StorageError
from streaming.sets.filters.late_columns import document_bytes, document_of_kind, homes_of
from streaming.sets.filters.select import Filter, checked_subset, excluded_keys, filter_hash
from streaming.shards.catalog.open import OpenShards, digest_of
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import checked_name, view_path, views_directory
from streaming.shards.index.where import as_where
from streaming.storage import Storage, join_url, redact
from streaming.types import ReadBuffer

_KIND = "view"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A saved filter.

    Attributes:
        name: Name of the view.
        where: A condition as text, or None.
        subset: As ``StreamingDataset`` takes it, or None.
        excluded: Keys to leave out; sorted, without duplicates.
        columns: Versions of the late columns that the condition uses.
        num_kept: Number of samples that the view kept when it was saved.
        num_samples: Number of samples in the dataset when the view was saved.
    """

    name: str
    where: str | None = None
    subset: tuple[float, float] | None = None
    excluded: tuple[str, ...] = field(default=(), repr=False)
    columns: Mapping[str, str] = field(default_factory=dict)
    num_kept: int = 0
    num_samples: int = 0

    @property
    def hash(self) -> str:
        """Identifies the filter of the view; 16 hex digits. Part of the fingerprint."""
        parts = {"where": self.where, "subset": self.subset, "excluded": self.excluded, "columns": dict(self.columns)}
        return filter_hash(parts)

    def filter(self) -> Filter:
        """Return the view as a filter."""
        return Filter(
            where=as_where(self.where), subset=checked_subset(self.subset), excluded=self.excluded,
            versions=self.columns, view=f"{self.name}@{self.hash}",
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable form."""
        return {**asdict(self), "hash": self.hash}

    def to_bytes(self) -> bytes:
        """Return JSON, with kind and version."""
        return document_bytes(_KIND, self.as_dict())

    @classmethod
    def from_bytes(cls, data: ReadBuffer, source: str) -> View:
        """Parse the output of :meth:`to_bytes`; members unknown to this release are ignored.

        Raises:
            IndexFormatError: It is not a view, has a newer major version, or its hash does not match its content.
        """
        try:
            content = document_of_kind(data, _KIND)
            subset = checked_subset(content["subset"])
            values = {name: content[name] for name in cls.__dataclass_fields__}
            view = cls(**{**values, "subset": subset, "excluded": tuple(map(str, content["excluded"]))})
            as_where(view.where)
            if view.hash != content["hash"]:
                raise ValueError("its hash is not that of its content: it was changed by hand")  # noqa: TRY301
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise IndexFormatError(
                f"{redact(source)}: not a saved view that this release reads ({error}); save it again with "
                f"`shard_tools view save URL NAME … --overwrite`"
            ) from error
        return view


def save_view(storage: Storage, home: str, view: View, *, overwrite: bool = False) -> str:
    """Write a view beside the index in ``home`` and return its URL.

    Raises:
        ConfigError: A view of this name exists and keeps something else.
    """
    url = join_url(home, view_path(checked_name(view.name, "view")))
    if not overwrite and storage.exists(url) and load_view(storage, home, view.name).hash != view.hash:
        raise ConfigError(
            f"{redact(url)}: there is another view of this name. Runs may have been trained on it: choose another "
            f"name, or give --overwrite"
        )
    storage.put(url, view.to_bytes())
    return url


def load_view(storage: Storage, home: str, name: str) -> View:
    """Return the view of this name beside the index in ``home``.

    Raises:
        ConfigError: There is no such view.
        IndexFormatError: The view is damaged.
    """
    url = join_url(home, view_path(checked_name(name, "view")))
    try:
        return storage.read_parsed(url, View.from_bytes, is_sealed)
    except NotFoundError as error:
        try:
            there = ", ".join(view.name for view in list_views(storage, home)) or "none"
        except StorageError:
            there = "unknown, because the store cannot list"
        raise ConfigError(
            f"view: no view {name!r} beside the index in {redact(home) or '.'}; there are: {there}. Save one with "
            f"`shard_tools view save`"
        ) from error


def list_views(storage: Storage, home: str) -> list[View]:
    """Return all views beside one index, sorted by name."""
    folder = join_url(home, views_directory())
    urls = [info.url for info in storage.list(folder) if info.url.endswith(".json")]
    return [storage.read_parsed(url, View.from_bytes, is_sealed) for url in urls]


def view_names(storage: Storage, home: str) -> list[str]:
    """Return the names of all views beside one index, sorted; of a store that lists nothing, none."""
    below = join_url(home, views_directory(), "")
    try:
        found = [info.url.removeprefix(below) for info in storage.list(below)]
    except StorageError:
        return []
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def asked_filter(
    storage: Storage,
    shards: OpenShards,
    *,
    where: Any,
    view: str | None,
    subset: Any,
    exclude: str | PathLike[str] | Iterable[str] | None,
    peers: Peers | None,
) -> Filter | None:
    """Return the filter that a dataset's options describe; None: all samples. With peers, rank 0 reads the files.

    ``where`` and ``exclude`` narrow a view further.

    Raises:
        ConfigError: An option is invalid, or both a view and ``subset`` name a range.
    """
    path = fspath(exclude) if isinstance(exclude, (str, PathLike)) else None
    # Keys passed as values are never exchanged: rank 0 may be opening another dataset, alone.
    keys = excluded_keys(storage, exclude) if exclude is not None and path is None else ()
    own = Filter(where=as_where(where), subset=checked_subset(subset), excluded=keys, keys_file=path or "")
    if view is None and path is None:
        return None if own.keeps_all else own
    if view is not None and not isinstance(view, str):
        raise ConfigError(f"view: expected the name of a saved view, got {view!r}")

    def look() -> bytes:
        read = [] if path is None else list(excluded_keys(storage, path))
        saved = None if view is None else load_view(storage, homes_of(shards.urls, shards.index)[0], view)
        return json.dumps([read, None if saved is None else saved.to_bytes().decode()]).encode()

    name = digest_of([list(shards.urls), shards.index, view, path or ""])
    read, saved = json.loads(shared(peers, f"view/{name}", look))
    if saved is None:
        return replace(own, excluded=tuple(read))
    found = View.from_bytes(saved.encode(), str(view)).filter()
    if found.subset is not None and own.subset is not None:
        raise ConfigError(
            f"subset={own.subset}: view {view!r} has subset={found.subset} already; leave one out, or take a range of "
            f"what the view keeps with dataset[a:b]"
        )
    both = found.where if own.where is None else own.where if found.where is None else found.where.also(own.where)
    excluded = tuple(sorted({*found.excluded, *keys, *read}))
    return replace(found, where=both, subset=found.subset or own.subset, excluded=excluded, keys_file=own.keys_file)
