"""Open the subject: a set, a mixture, packs, a curriculum, as training opens it; or only a running job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from shard_tools.look.plan.sources import is_mixture_file, open_planned
from shard_tools.look.show.base.samples import SampleSet
from streaming.common.arguments import some_names
from streaming.errors import ConfigError
from streaming.shards.versions.history import shown_versions
from streaming.storage import Storage, redact, redact_text

if TYPE_CHECKING:
    from streaming.sets.sources.mixed import AnySource
    from streaming.sets.sources.windows import WindowSource

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """The subject of the pages, with cached values. Thread-safe.

    Attributes:
        urls: URLs as the user wrote them; they may contain secrets.
        source: The ``Source`` that training reads; None: there is only a job.
        storage_options: Store options, for sets without their own.
        chosen: Options that choose samples or shape rows, to be shown, without secrets: ``where``, ``view``, …
        state_url: A saved ``state_dict``.
        bad: Files of bad samples.
        tokenizer: The tokenizer that made the tokens.
        run: Addresses of a running job.
    """

    urls: tuple[str, ...]
    source: AnySource | None
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    state_url: str | None = None
    bad: tuple[str, ...] = ()
    tokenizer: str | None = None
    run: tuple[str, ...] = ()
    # _lock guards _making; the lock _making[name] guards _kept[name].
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _making: dict[str, threading.Lock] = field(default_factory=dict, init=False, repr=False)
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def title(self) -> str:
        """The subject in words, without secrets."""
        if not self.urls:
            return f"run {some_names([redact(address) for address in self.run])}"
        versions = "" if self.source is None else shown_versions(self.source.opened_versions)
        return some_names([redact(url) for url in self.urls]) + (f" ({versions})" if versions else "")

    @cached_property
    def storage(self) -> Storage:
        """The store for files that the user names: states, lists."""
        return Storage(self.storage_options)

    @cached_property
    def sets(self) -> dict[str, SampleSet]:
        """The sets that hold the samples, by their name in batches (``""`` for a single set); documents of packs."""
        return {} if self.source is None else {name: SampleSet(one) for name, one in sorted(_sets(self.source).items())}

    @cached_property
    def windows(self) -> dict[str, WindowSource]:
        """The sources whose rows are windows, by the name of the set of their recordings; {}: there are none."""
        return {} if self.source is None else {
            name: one for name, one in _leaves(self.source) if hasattr(one, "recordings")
        }  # fmt: skip

    @cached_property
    def bad_lists(self) -> tuple[str, ...]:
        """Files of bad samples that the user names, else existing files at the sets' default locations."""
        if self.bad or self.source is None:
            return self.bad
        named = dict.fromkeys(self.source.bad_files.values())
        return tuple(one for one in named if "{" not in one and self.storage.exists(one))

    def set_of(self, name: str) -> SampleSet:
        """Return the set that is the source of this name; the first one for ``""``.

        Raises:
            ConfigError: There is no such source.
        """
        if not name and self.sets:
            return next(iter(self.sets.values()))
        found = self.sets.get(name)
        if found is None:
            there = some_names([*map(repr, filter(None, self.sets))]) or "none: it is a single set"
            raise ConfigError(f"source: no source {name[:80]!r}; there are: {there}")
        return found

    def keep(self, name: str, make: Callable[[], _T]) -> _T:
        """Return the value that ``make`` made at the first request for this name; it is closed with the subject."""
        with self._lock:
            # One lock per name: only requests for the same value wait for it to be made.
            making = self._making.setdefault(name, threading.Lock())
        with making:
            # The value of a name stays the same until the subject is closed.
            if name not in self._kept:
                self._kept[name] = make()
            found: _T = self._kept[name]
        return found

    def close(self) -> None:
        """Close all cached values that can be closed: processes, connections."""
        with self._lock:
            # The cache is empty from here on; later requests make values again.
            kept = list(self._kept.values())
            self._kept.clear()
        for one in kept:
            if hasattr(one, "close"):
                one.close()


def _leaves(source: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the sources that are no mixtures, with their names in batches."""
    if not hasattr(source, "sources") or any(hasattr(source, part) for part in _PARTS):
        yield name, source
        return
    for inner, one in source.sources.items():
        yield from _leaves(one, f"{name}/{inner}" if name else inner)


_PARTS = ("documents", "recordings", "dataset")
"""Attributes that hold samples: of packs documents, of windows recordings, of groups the underlying set."""


def _sets(source: Any) -> dict[str, Any]:
    """Return the sources that hold samples, by name."""
    return {
        name: next((getattr(one, part) for part in _PARTS if hasattr(one, part)), one) for name, one in _leaves(source)
    }


def _shown(option: Any) -> Any:
    """Return the value of an option as pages show it."""
    text = ", ".join(option) if isinstance(option, tuple) else option
    return redact_text(text) if isinstance(text, str) else text


def open_subject(
    urls: Sequence[str], *, storage_options: Mapping[str, object] | None = None, state_url: str | None = None,
    bad: Sequence[str] = (), tokenizer: str | None = None, run: Sequence[str] = (), **options: Any,
) -> Subject:  # fmt: skip
    """Open the subject.

    Args:
        urls: Shards, or the JSON file of a mixture; none: only a running job is shown.
        storage_options: Store options.
        state_url: A saved ``state_dict`` (JSON).
        bad: Files of bad samples.
        tokenizer: The tokenizer that made the tokens.
        run: Addresses of a running job.
        options: As for :func:`~shard_tools.look.plan.sources.open_planned`.

    Raises:
        ConfigError: The subject cannot be opened with these options.
        IndexMissingError: There is no index, and the set is too large to index on the fly.
        NotFoundError: Nothing matches ``urls``.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    chosen = {name: _shown(one) for name, one in given_options.items()}
    source = None
    if urls:
        shown = (
            {} if is_mixture_file(urls) else {"duplicate_keys": "keep"}
        )  # show duplicates in shards without an index
        source = open_planned(tuple(urls), storage_options=storage_options, **shown, **options)
    elif not run:
        raise ConfigError("give the URL of shards, the JSON file of a mixture, or a running job with --run")
    elif given := [
        *chosen,
        *(name for name, one in (("state", state_url), ("bad", bad), ("tokenizer", tokenizer)) if one),
    ]:
        raise ConfigError(f"--{given[0].replace('_', '-')}: has no effect without a URL; give one, or leave it out")
    return Subject(
        urls=tuple(urls), source=source, storage_options=dict(storage_options or {}), chosen=chosen,
        state_url=state_url, bad=tuple(bad), tokenizer=tokenizer, run=tuple(run),
    )  # fmt: skip
