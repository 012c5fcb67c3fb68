"""Save, list and show views from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shard_tools.change.sets.open_set import open_set
from shard_tools.running.report import Report
from streaming.errors import ConfigError, IndexMissingError
from streaming.sets.filters.select import Filter, Subset, excluded_keys, parse_subset, select, versions_of
from streaming.sets.filters.views import View, list_views, load_view, save_view
from streaming.shards.catalog.open import OpenShards
from streaming.shards.index.where import parse_where
from streaming.storage import Storage, redact


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewReport(Report):
    """A view, without the keys that it leaves out."""

    name: str
    where: str | None
    subset: Subset | None
    num_excluded: int
    columns: Mapping[str, str]
    num_kept: int
    num_samples: int
    hash: str

    @classmethod
    def of(cls, view: View) -> ViewReport:
        """Return the report of a view."""
        return cls(
            name=view.name, where=view.where, subset=view.subset, num_excluded=len(view.excluded), columns=view.columns,
            num_kept=view.num_kept, num_samples=view.num_samples, hash=view.hash,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsReport(Report):
    """All views beside an index."""

    views: tuple[ViewReport, ...]


def save(
    urls: Sequence[str], name: str, *, storage: Storage, index_url: str | None, where: str | None, subset: str | None,
    exclude: str | None, overwrite: bool, allow_unfinished: bool = False,
) -> ViewReport:  # fmt: skip
    """Save a view, after computing what it keeps.

    Raises:
        ConfigError: It has no condition, keeps nothing, or another one has its name.
        IndexMissingError: The shards have no index.
    """
    asked = Filter(
        where=None if where is None else parse_where(where), subset=parse_subset(subset),
        excluded=() if exclude is None else excluded_keys(storage, exclude),
    )  # fmt: skip
    if asked.keeps_all:
        raise ConfigError("a view of everything needs no name; give --where, --subset or --exclude")
    shards, home = _opened(urls, storage, index_url, allow_unfinished=allow_unfinished)
    selected = select(storage, shards, asked)
    view = View(
        name=name, where=None if asked.where is None else asked.where.text, subset=asked.subset,
        excluded=asked.excluded, columns=versions_of(storage, shards, asked), num_kept=selected.total,
        num_samples=0 if shards.table is None else shards.table.total_samples,
    )  # fmt: skip
    save_view(storage, home, view, overwrite=overwrite)
    return ViewReport.of(view)


def show(
    urls: Sequence[str], name: str, *, storage: Storage, index_url: str | None, allow_unfinished: bool = False
) -> ViewReport:
    """Return one view.

    Raises:
        ConfigError: There is none of this name.
    """
    return ViewReport.of(
        load_view(storage, _opened(urls, storage, index_url, allow_unfinished=allow_unfinished)[1], name)
    )


def show_all(
    urls: Sequence[str], *, storage: Storage, index_url: str | None, allow_unfinished: bool = False
) -> ViewsReport:
    """Return all views."""
    home = _opened(urls, storage, index_url, allow_unfinished=allow_unfinished)[1]
    return ViewsReport(views=tuple(ViewReport.of(view) for view in list_views(storage, home)))


def _opened(
    urls: Sequence[str], storage: Storage, index_url: str | None, *, allow_unfinished: bool
) -> tuple[OpenShards, str]:
    """Return the shards, and the directory of the index beside which views are stored: that of the first shard."""
    found = open_set(urls, storage, index_url, allow_unfinished=allow_unfinished)
    if found.scanned is not None:
        raise IndexMissingError(
            f"{redact(found.urls[0])}: a view is stored beside an index, but there is none; run `shard_tools index` "
            f"first"
        )
    return found.as_opened, found.homes[0]
