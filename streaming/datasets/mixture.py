"""Mix several data sets into one, in given proportions: ``Mixture``."""

from __future__ import annotations

import builtins
import copy
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from itertools import pairwise
from os import PathLike
from typing import Any, Literal, Self, SupportsIndex, TypeAlias, get_args

import numpy as np

from streaming.arguments import (
    check_choice,
    checked_limit,
    checked_number,
    checked_path,
    checks_names,
    format_bytes,
    most_bad,
)  # fmt: skip
from streaming.arrays import sums
from streaming.batches.build import OnError, Part
from streaming.catalog.joined import JoinedSource
from streaming.datasets.dataset import StreamingDataset
from streaming.datasets.mixture_file import arguments_of, read_description
from streaming.datasets.packed import Packed
from streaming.errors import ConfigError, ShardstreamError, StateError
from streaming.filters.late_columns import find_columns, homes_of, read_values
from streaming.index.columns import there_of
from streaming.mixing.exact import ExactLanes
from streaming.mixing.lanes import MixedLanes
from streaming.mixing.passes import MixedPasses, Passes, Sources, Weights, eras_grown
from streaming.mixing.quotas import ExactPasses
from streaming.packing.layout import PackRows
from streaming.plan.ledger import CHANGED, START, Dealt, Entry, Ledger, Segment
from streaming.plan.order import Orders, OrderSettings
from streaming.plan.schedule import Schedule, checked_weights, value_at
from streaming.plan.settings import ShuffleConfig
from streaming.storage import redact
from streaming.types import Int64Array, Sample, Transform

Quotas: TypeAlias = Literal["chunks", "exact"]
Unit: TypeAlias = Literal["samples", "tokens", "bytes"]
Ends: TypeAlias = Literal["first", "all"]
Batches: TypeAlias = Literal["mixed", "one_source"]
_SHORT = 60
_MOST_LAID = 2**12
"""Numbers that a state holds of sources that were dropped: one for each lane and source, some 30 KB of JSON at most."""
_TABLES_READ = 8
"""Shards of a source whose column is read for the mean number of tokens of its samples."""
_AT_THE_SOURCE = "it is an option of each source; write Mixture({{…: StreamingDataset(…, {}=…)}})"
_ELSEWHERE = {
    name: _AT_THE_SOURCE.format(name)
    for name in ("index", "fields", "decode", "transform", "storage_options", "mirrors", "cache_dir", "cache_limit",
                 "on_error", "where", "view", "subset")
} | {
    "stopping_strategy": 'write ends="first" or "all"',
    "probabilities": "write weights={…: …}",
    "proportions": "write weights={…: …}",
    "streams": "give the sources as a dict by name, the first argument",
    "epoch_size": "it is an option of the loader; write DataLoader(mixture, epoch_size=…)",
}  # fmt: skip
_SLASH = 'a slash stands between the names of a mixture within a mixture, as in "web/en"'
_log = logging.getLogger("streaming")


@dataclass(frozen=True, slots=True)
class _Blend:
    """What is drawn of each source: ``quotas`` in a pass, or weights without end."""

    quotas: Mapping[str, int] | None
    weights: Schedule | None

    def segments(self) -> list[tuple[int, Mapping[str, float]]]:
        """Return rows, and the weights per sample from each one on; those of quotas never change."""
        if self.weights is not None:
            return self.weights.segments()  # type: ignore[return-value]  # of weights, as was checked
        return [(0, dict(self.quotas or {}))]


@checks_names(_ELSEWHERE)
class Mixture(JoinedSource):
    """Mix several data sets into one, each with a given share.

    A mixture is itself a data set. In a ``DataLoader`` it keeps all promises: ``batch["__source__"]`` names the source
    of each sample, the content of global batch k is the same on any number of ranks and workers, and a ``state_dict``
    resumes with exactly the next sample. Sources keep their own stores, caches, fields, decoders, transforms and
    ``on_error``; a bad sample is replaced by one from the same source. ::

        mix = Mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
        loader = DataLoader(mix, batch_size=8)
        for step, batch in zip(range(100_000), loader): ...      # it has no end

    How much of each source is read is given in exactly one of these ways:

    - neither ``weights`` nor ``repeats``: an epoch is one pass over all sources, with each sample exactly once;
    - ``repeats={"web": 1, "code": 2.5}``: the number of passes per epoch; the next epoch starts with the samples that a
      fractional pass left over;
    - ``weights``: proportions, without an end, or until the ``"first"`` source or ``"all"`` sources have been read
      once.

    A field that only some samples of a batch have becomes a list, with None for the others.

    Args:
        sources: ``StreamingDataset``s (with an index), ``Packed`` sets and other mixtures, by name. The order and
            checkpoints depend on the names, not on the order of the dict. Sources of a nested mixture are called
            ``"web/en"``.
        weights: Share of each source, by name; only ratios count. Or a ``Schedule`` of such dicts.
        repeats: How many times an epoch reads each source, by name.
        quotas: How exactly shares are kept. ``"chunks"``: one order over the chunks of all sources, which needs the
            memory and requests of a single data set; shares are exact up to about one chunk per source and lane.
            ``"exact"``: single samples, each share exact at every row to within a few samples; every lane then keeps
            chunks of every source in memory, so memory grows with the number of sources.
        unit: What a weight counts: ``"samples"``, ``"tokens"`` (the column ``tokens``) or ``"bytes"``.
        ends: For constant ``weights``: an epoch ends when the ``"first"`` source has, or ``"all"`` sources have, been
            read once. None: it has no end; use ``DataLoader(epoch_size=…)`` to divide it into epochs.
        shuffle: Whether sources and their samples are shuffled, or a ``ShuffleConfig``; the sources' own settings are
            not used.
        seed: Seed of the order.
        batches: ``"mixed"``: a batch holds samples of any source. ``"one_source"``: each global batch holds samples of
            a single source, and shares are exact counts of batches; memory is that of ``quotas="exact"``, whatever
            ``quotas`` says. The number of lanes must divide the global batch size, which must divide ``epoch_size``. An
            epoch that ends holds only whole batches of each source; the rest comes first in the next epoch.
        max_bad_samples: Number or fraction of an epoch beyond which a run stops, over all sources and ranks; each
            source's own limit applies as well. None: only the sources' own limits and, over all ranks, their sum.
        bad_samples_file: As for ``StreamingDataset``, for all sources.

    Raises:
        ConfigError: An argument is invalid; the message lists source names that are unknown or missing.
        IndexMissingError: A source has no index.
    """

    def __init__(
        self,
        sources: Mapping[str, StreamingDataset | Packed | Mixture],
        *,
        weights: Mapping[str, float] | Schedule | None = None,
        repeats: Mapping[str, float] | None = None,
        quotas: Quotas = "chunks",
        unit: Unit = "samples",
        ends: Ends | None = None,
        shuffle: bool | ShuffleConfig = True,
        seed: int = 0,
        batches: Batches = "mixed",
        max_bad_samples: float | None = None,
        bad_samples_file: str | PathLike[str] | None = None,
    ) -> None:
        _check_sources(sources)
        _check_choices(quotas, unit, ends, batches)
        self.sources = dict(sources)
        self.leaves: dict[str, StreamingDataset | Packed] = _leaves(sources)
        _check_packs(self.leaves)
        super().__init__(self.leaves)
        self.quotas: Quotas = quotas
        self.batches: Batches = batches
        self.unit: Unit = unit
        self._order_by(shuffle, seed)
        self.bad_samples_file = checked_path("bad_samples_file", bad_samples_file)
        self.max_bad_samples = 1.0 if max_bad_samples is None else checked_limit(max_bad_samples)
        self._take_over()
        self._blend = self._blended(weights, repeats, ends)

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        transforms: Mapping[str, Transform] | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> Mixture:
        """Make the mixture described by a JSON file; ``shard_tools plan`` reads the same files.

        The file holds the arguments of this class and, for each source, those of ``StreamingDataset``, with ``url`` for
        the first one. A source may also be just a URL, or have ``sources`` of its own, which makes it a nested mixture
        (docs/mixing.md)::

            {"sources": {"web": {"url": "s3://bucket/web/", "where": "tokens >= 64"}, "code": "s3://bucket/code/"},
             "weights": {"web": 0.7, "code": 0.3}, "seed": 1}

        Args:
            path: Path or URL of the file.
            transforms: Functions, which a file cannot hold: the ``transform`` of sources by name (``"text/en"`` for a
                source of a nested mixture).
            storage_options: For reading the file, and for sources that do not give their own.

        Raises:
            ConfigError: The file is not a valid description; the message names the source and what is wrong.
            NotFoundError: There is no such file.
        """
        options = dict(storage_options or {})
        made = cls._described(read_description(path, options), "", options)
        unknown = sorted(set(transforms or {}) - set(made.leaves))
        if unknown:
            raise ConfigError(f"transforms: {unknown[0]!r} is no source; they are {some_names(sorted(made.leaves))}")
        return made._with_transforms(transforms or {}, "")

    @classmethod
    def _described(cls, content: Mapping[str, Any], place: str, storage_options: dict[str, object]) -> Mixture:
        """Return the mixture that ``content`` describes; ``place`` says in messages where that stands."""
        sources: dict[str, StreamingDataset | Mixture] = {}
        for name, given in content["sources"].items():
            here = f"{place}/{name}" if place else name
            try:
                if "sources" in given:
                    sources[name] = cls._described(given, here, storage_options)
                else:
                    options = {"storage_options": storage_options, **given}
                    sources[name] = StreamingDataset(options.pop("url"), **options)
            except ShardstreamError as error:
                error.add_note(f"of the source {here!r}")
                raise
        return cls(sources, **arguments_of(content))

    def _with_transforms(self, transforms: Mapping[str, Transform], place: str) -> Mixture:
        """Return the same mixture whose leaves call these functions, by their names under ``place``."""
        made = copy.copy(self)
        made.sources = {
            name: one._with_transforms(transforms, f"{place}{name}/") if isinstance(one, Mixture)
            else one.map(transforms[place + name]) if place + name in transforms else one
            for name, one in self.sources.items()
        }  # fmt: skip
        return made._of_sources()

    # --- what users see ---

    @property
    def is_endless(self) -> bool:
        """Whether samples are drawn without an end."""
        return self._blend.quotas is None

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples of each source."""
        return {name: int(one.chunk_samples.sum()) for name, one in sorted(self.leaves.items())}

    def __len__(self) -> int:
        """Return the number of samples in an epoch.

        With ``batches="one_source"`` a loader yields only those that fill whole batches.

        Raises:
            TypeError: The mixture has no end.
        """
        if self._blend.quotas is None:
            raise TypeError(
                "this Mixture has no len(): with weights= it is drawn from without end. Give ends=, or the loader an "
                "epoch_size=, or write sum(mixture.sizes.values()) for the samples that there are"
            )
        return sum(self._blend.quotas.values())

    def __getitem__(self, index: SupportsIndex | builtins.slice) -> Sample:
        """Return sample number ``index``, decoded and transformed; negative numbers count from the end.

        Sources follow each other in order of their names. A source that an epoch reads several times appears as many
        times.

        Raises:
            IndexError: There is no such sample.
            ConfigError: ``index`` is a slice.
        """
        if isinstance(index, builtins.slice):
            raise ConfigError(
                "mixture[a:b]: a mixture has no ranges; take those of its sources: Mixture({…: dataset[a:b], …})"
            )
        quotas = self.sizes if self._blend.quotas is None else self._blend.quotas
        number = checked_number(index, sum(quotas.values()), "sample", "the mixture has")
        for name in self.names:
            if number < quotas[name]:
                return self.leaves[name].sample_at(number % self.sizes[name], self.shown_names[name])
            number -= quotas[name]
        raise AssertionError("the quotas were summed")

    def map(self, function: Transform) -> Self:
        """Return a mixture that also calls ``function`` on each sample, after the functions of its source."""
        made = copy.copy(self)
        made.sources = {name: one.map(function) for name, one in self.sources.items()}
        return made._of_sources()

    def _of_sources(self) -> Self:
        """Return this mixture, which is a copy, over what ``sources`` holds now."""
        self.leaves = _leaves(self.sources)
        JoinedSource.__init__(self, self.leaves)
        self._take_over()
        return self

    def __repr__(self) -> str:
        parts = [f"{len(self.names)} sources: {some_names(self.names)}"]
        parts += [f"{sum(self.sizes.values())} samples", format_bytes(int(self.chunk_bytes.sum()))]
        parts.append(self._shares_in_words())
        parts.append(f"shuffle seed {self.seed}" if self.shuffle else "in storage order")
        return f"Mixture({', '.join(parts)})"

    def _shares_in_words(self) -> str:
        if self._blend.quotas is not None:
            return f"{len(self)} samples an epoch"
        first = self._blend.segments()[0][1]
        total = sum(first.values())
        shown = [f"{name} {share / total:.1%}" for name, share in sorted(first.items()) if share]
        changing = "" if self._blend.weights is None or len(self._blend.segments()) == 1 else " at first, by a schedule"
        return f"without end, {some_names(shown)} of samples{changing}"

    # --- what the engine needs (streaming.engine.source.Source) ---

    def _take_over(self) -> None:
        """Set the options of all sources together, for callers that do not ask each source.

        ``decode`` and ``transform`` are what ranks compare, ``on_error`` is the mildest.
        """
        leaves = list(self.leaves.values())
        self.fields: tuple[str, ...] | None = None
        if all(one.fields is not None for one in leaves):
            self.fields = tuple(dict.fromkeys(name for one in leaves for name in one.fields or ()))
        self.decode: Any = {name: one.decode for name, one in self.leaves.items()}
        self.transform: Any = {name: one.transform for name, one in self.leaves.items()}
        self.decoders = leaves[0].decoders
        kinds: tuple[OnError, ...] = ("skip", "substitute", "raise")
        self.on_error: OnError = next(kind for kind in kinds if any(one.on_error == kind for one in leaves))

    def packs(self, chunk_ids: Int64Array, offsets: Int64Array, passes: Int64Array, seed: int) -> PackRows:
        """See ``Source``."""
        return super().packs(chunk_ids, offsets, self._companies(passes), seed)

    def has_packs(self, chunk_ids: Int64Array, passes: Int64Array, seed: int) -> bool:
        """See ``Source``."""
        return super().has_packs(chunk_ids, self._companies(passes), seed)

    def _companies(self, passes: Int64Array) -> Int64Array:
        """Return the passes by which documents change company.

        A group that is read partly in one pass over the mixture and partly in the next must be packed alike in both, or
        documents would come twice, and others not at all: unless passes hold whole sources, company never changes.
        """
        quotas = self._blend.quotas
        if quotas is None or self.batches == "one_source":
            return np.zeros_like(passes)
        if any(quotas[name] % size for name, size in self.sizes.items()):
            return np.zeros_like(passes)
        return passes

    @property
    def recipe_parts(self) -> tuple[Part, ...]:
        """How the samples of each source become objects."""
        shown = self.shown_names
        return tuple(replace(part, name=shown[name]) for name in self.names for part in self.leaves[name].recipe_parts)

    @property
    def shown_names(self) -> dict[str, str]:
        """What batches say of each leaf in ``__source__``."""
        found: dict[str, str] = {}
        for name, one in self.sources.items():
            within = one.shown_names if isinstance(one, Mixture) else {}
            found.update({f"{name}/{leaf}": f"{name}/{shown}" if shown else name for leaf, shown in within.items()})
            if not within:
                found[name] = name
        return found

    def order_settings(self, global_batch_size: int) -> OrderSettings:
        """Return the order under a loader with batches of this size."""
        found = super().order_settings(global_batch_size)
        if self.batches == "one_source" and self.shuffle_config.lanes is None:
            # Each lane gives as many samples to every batch.
            found = replace(found, lanes=next(n for n in range(found.lanes, 0, -1) if global_batch_size % n == 0))
        return found

    # --- shares, and how they change ---

    def start_entry(self, global_batch_size: int | None = None) -> Entry:
        """Return the first entry of the ledger of a run over this mixture.

        The batch counts with ``batches="one_source"``.
        """
        blend = self._blend
        dealt: Dealt = "samples" if self.quotas == "exact" else "chunks"
        weights = {} if blend.weights is None else dict(blend.segments()[0][1])
        changes = blend.weights is not None and len(blend.segments()) > 1
        return Entry(
            start=0, weights=weights, sources=self.fingerprints, why=START, quotas=self._quotas(global_batch_size),
            schedule=blend.weights if changes else None,
            dealt="batches" if self.batches == "one_source" else dealt,
            batch_size=global_batch_size if self.batches == "one_source" else None,
            shards={name: len(one.urls) for name, one in self.leaves.items() if one.can_grow},
        )  # fmt: skip

    def _quotas(self, global_batch_size: int | None) -> Mapping[str, int] | None:
        """Count the samples of each source in an epoch that ends: of batches of one source, those of whole batches.

        Raises:
            ConfigError: A source has too few for one.
        """
        quotas, size = self._blend.quotas, global_batch_size
        if quotas is None or size is None or self.batches == "mixed":
            return quotas
        for name, count in quotas.items():
            if 0 < count < size:
                raise ConfigError(
                    f'batches="one_source": {name!r} gives {count:,} samples an epoch, a global batch has {size:,}: '
                    "no batch would ever be of it. Read it more often (repeats=), give a smaller batch, or "
                    'batches="mixed"'
                )
        return {name: count - count % size for name, count in quotas.items()}

    def begun(self, global_batch_size: int | None = None) -> Ledger:
        """Return the ledger of a run that begins now.

        With ``batches="one_source"`` the global batch size must be given.
        """
        return Ledger((self.start_entry(global_batch_size),))

    def needed(self, ledger: Ledger) -> list[str]:
        """Return sources that this mixture lacks, and of whose chunks the ledger says too little to do without them.

        Dealt by chunks, where the others stand follows from theirs; unless what they laid is written down.
        """
        if ledger.last.dealt != "chunks":
            return []
        missing = set(ledger.sources) - set(self.names)
        return sorted(missing if ledger.last.quotas is not None else missing & (ledger.drawn - ledger.laid.keys()))

    def resumed(self, ledger: Ledger, settings: OrderSettings, row: int) -> Ledger:
        """Return the ledger of a run that goes on at ``row`` with this mixture; what changes is said once in the log.

        Raises:
            StateError: It cannot: a source is another one, or its chunks are needed for what was drawn before.
        """

        @cache
        def settled() -> tuple[Any, int]:
            orders: Any = self.orders(settings, ledger)
            return orders, first_free_row(orders, row)

        missing = self.needed(ledger)
        if missing:
            raise StateError(
                f"this state drew from {some_names([*map(repr, missing)])}, which this mixture lacks. Where the others "
                "stand follows from the chunks that were drawn beside theirs: keep it in the mixture, with the weight "
                "0 (weights or the Schedule at a resume, or set_weights). States say from then on what it has laid, "
                "and when that is read it may be left out, and be gone"
            )

        def free_pass(name: str) -> int:
            found: int = settled()[0].free_pass(name)
            return found

        own = self.fingerprints
        changed = {name: was for name, was in ledger.sources.items() if own.get(name, was) != was}
        grown = [name for name, was in changed.items() if self._chunks_when(name, was, ledger.shards) is not None]
        found, changes = ledger.resumed(
            self.start_entry(ledger.last.batch_size or 1), lambda: settled()[1],
            grown={name: partial(free_pass, name) for name in grown},
        )  # fmt: skip
        if changes:
            _log.info("the mixture changes at row %d: %s", found.last.start, "; ".join(changes))
        return self.with_laid(found, lambda: self.orders(settings, found))

    def with_laid(self, ledger: Ledger, orders: Callable[[], Any]) -> Ledger:
        """Let the last entry of the ledger say what sources without a weight any more lay: they may be left out later.

        Args:
            ledger: Of the run.
            orders: Gives its orders; called where something is missing.
        """
        last = ledger.last
        if last.dealt != "chunks" or last.quotas is not None:
            return ledger
        names = sorted((ledger.drawn - last.drawn - ledger.laid.keys()) & set(self.names))
        if not names:
            return ledger
        made = orders()
        lanes = made.settings.lanes
        if len(names) * lanes > _MOST_LAID:
            _log.info(
                "%s: without a weight from row %d on. Of what it laid states hold no more than %d numbers, so it has "
                "to stay in the mixture", some_names(names), last.start, _MOST_LAID,
            )  # fmt: skip
            return ledger
        laid = {name: tuple(made.laid_at_the_end(name).tolist()) for name in names}
        return Ledger((*ledger.entries[:-1], replace(last, laid={**last.laid, **laid})))

    def changed(self, ledger: Ledger, weights: Mapping[str, float], row: int) -> Ledger:
        """Return the ledger with other weights from a row on; they are as this mixture's ``weights``.

        Mixtures within go on by their own schedules, which count the rows of the run.
        """
        blend = self._by_weight(_schedule_of(weights, self.sources))
        steps = [(max(start, row), shares) for start, shares in blend.segments()]
        later = {start: shares for start, shares in steps if start > row}
        now = [shares for start, shares in steps if start == row][-1]
        schedule = Schedule.steps({0: now, **later}) if later else None
        made = replace(ledger.last, start=row, weights=dict(now), schedule=schedule, why=CHANGED, laid={})
        return ledger.appended(made)

    @property
    def memory_cure(self) -> str:
        """What makes this mixture need less memory, for messages; "" where nothing does."""
        if self.batches == "one_source":
            needs = 'batches="one_source"', 'batches="mixed"'
        elif self.quotas == "exact":
            needs = 'quotas="exact"', 'quotas="chunks"'
        else:
            return ""
        return ". {} keeps chunks of each source in every lane; {} keeps those of one data set".format(*needs)

    def check_weights(self, weights: Any) -> None:
        """Refuse what cannot be the weights of this mixture from some row on.

        Raises:
            ConfigError: The mixture ends, or they are no weights of its sources.
        """
        if not self.is_endless:
            raise ConfigError(
                "set_weights: this mixture ends (by size, repeats= or ends=): an epoch of it is laid out as a whole. "
                "Make it with weights= and ends=None, and give the loader an epoch_size"
            )
        if not isinstance(weights, Mapping):
            hint = "; a Schedule is taken at a resume: Mixture(…, weights=…)" if isinstance(weights, Schedule) else ""
            raise ConfigError(f"set_weights: expected a dict of weights, got {_kind(weights)}{hint}")
        _check_names("set_weights", weights, self.sources)

    def drawn(self, ledger: Ledger, row: int, num_samples: int) -> dict[str, float]:
        """Count the samples of each source that rows ``[row, row + num_samples)`` come to, by its share."""
        quotas = ledger.last.quotas
        if quotas is not None:
            return {name: num_samples * quotas[name] / sum(quotas.values()) for name in self.names}
        segments = ledger.segments()
        stops = [*(start for start, _ in segments[1:]), row + num_samples]
        found: dict[str, float] = dict.fromkeys(self.names, 0.0)
        for (start, weights), stop in zip(segments, stops, strict=True):
            length = max(min(stop, row + num_samples) - max(start, row), 0)
            for name in self.names:
                found[name] += length * weights.get(name, 0.0) / sum(weights.values())
        return found

    def eras(self, ledger: Ledger) -> dict[str, list[tuple[int, int]]]:
        """Tell of each source of the ledger from which pass on it has how many of its chunks; see ``Sources``.

        Raises:
            StateError: A source is not the one of the ledger, nor that one with more shards behind it.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        known: dict[tuple[str, str], int | None] = {}
        for entry in ledger.entries:
            for name, fingerprint in entry.sources.items():
                if name not in self.leaves:
                    continue  # dropped since
                key = name, fingerprint
                if key not in known:
                    known[key] = self._chunks_when(name, fingerprint, entry.shards)
                count = known[key]
                if count is None:
                    raise StateError(
                        f"the source {name!r} is not the one of the run: it had the fingerprint {fingerprint[:12]} at "
                        f"row {entry.start}, and has {self.leaves[name].fingerprint[:12]}. Give the shards, and the "
                        "filter, that the run read; others may stand behind them"
                    )
                if name not in found:
                    found[name] = [(0, count)]
                elif name in entry.joins:
                    found[name] = eras_grown(found[name], entry.joins[name], count)
        return found

    def _chunks_when(self, name: str, fingerprint: str, shards: Mapping[str, int]) -> int | None:
        return self.leaves[name].chunks_when(fingerprint, shards.get(name))

    def passes(self, ledger: Ledger) -> dict[str, Passes]:
        """Tell how large the passes over each source are, with the shards that it had."""
        eras, found = self.eras(ledger), {}
        for name, one in self.leaves.items():
            samples = sums(one.chunk_samples)
            sizes = eras.get(name, [(0, len(samples) - 1)])
            found[name] = Passes(tuple((first, int(samples[count])) for first, count in sizes))
        return found

    def next_passes(self, ledger: Ledger, row: int) -> list[tuple[int, str, int]]:
        """Tell at which row behind ``row`` each source begins which pass next, by its share; some never do."""
        drawn, segments, found = self.drawn(ledger, 0, row), ledger.segments(), []
        for name, passes in self.passes(ledger).items():
            number = int(passes.read(drawn[name])) + 1
            at = _row_of(segments, row, name, passes.draws(number) - drawn[name])
            if at is not None:
                found.append((at, name, number + 1))
        return found

    def joins(self, ledger: Ledger, row: int) -> list[tuple[int, str]]:
        """Tell at which row behind ``row`` shards that a source got in mid-run are first read, by its share; by row."""
        drawn, segments, found = self.drawn(ledger, 0, row), ledger.segments(), []
        for name, passes in self.passes(ledger).items():
            missing = passes.draws(passes.sizes[-1][0]) - drawn[name]
            at = _row_of(segments, row, name, missing) if missing > 0 else None
            if at is not None:
                found.append((at, name))
        return sorted(found)

    def openings(self, ledger: Ledger, row: int) -> list[tuple[int, str]]:
        """Tell at which row behind ``row`` sources without a weight get one, and all that do so there; by row."""
        segments = ledger.segments()
        found = []
        for (_, before), (start, weights) in pairwise(segments):
            opened = [name for name in self.names if weights[name] and not before[name]]
            if opened and start > row:
                found.append((start, some_names(opened)))
        return found

    def bad_limits(self, ledger: Ledger, row: int, num_samples: int) -> dict[str, int]:
        """Tell how many bad samples each source, as batches name it, may have in so many rows."""
        drawn, found = self.drawn(ledger, row, num_samples), dict[str, list[str]]()
        for name, shown in self.shown_names.items():
            found.setdefault(shown, []).append(name)
        limits: dict[str, int] = {}
        for shown, names in found.items():
            if shown:
                limit = self.leaves[names[0]].max_bad_samples
                limits[shown] = most_bad(limit, sum(drawn[name] for name in names))
        return limits

    def orders(self, settings: OrderSettings, ledger: Ledger | None = None) -> Orders:
        """Return the order of every pass, or of the one that has no end; None: of a run that begins."""
        ledger = self.begun() if ledger is None else ledger
        bounds = zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True)
        tables = {name: self.chunk_samples[a:b] for name, (a, b) in zip(self.names, bounds, strict=True)}
        absent = sorted(set(ledger.sources) - set(self.names))
        sources = Sources(tables, settings, absent=absent, laid=ledger.laid, eras=self.eras(ledger))
        dealt = ledger.last.dealt
        if ledger.last.quotas is not None and dealt == "chunks":
            return MixedPasses(sources, quotas=ledger.last.quotas)
        if ledger.last.quotas is not None:
            return ExactPasses(sources, quotas=ledger.last.quotas, batch_size=ledger.last.batch_size)
        known = ledger.first_rows
        schedule = [
            Weights(
                start=-(-row // settings.lanes),
                weights={name: weight for name, weight in weights.items() if known[name] <= row},
            )
            for row, weights in ledger.segments()
        ]
        lock = threading.RLock()  # the reader plans beside the consumer
        if dealt == "chunks":
            return MixedLanes(sources, schedule, lock=lock)
        return ExactLanes(sources, schedule, lock=lock, batch_size=ledger.last.batch_size)

    def _blended(
        self, weights: Mapping[str, float] | Schedule | None, repeats: Mapping[str, float] | None, ends: Ends | None
    ) -> _Blend:
        """Return what is drawn of each leaf.

        Raises:
            ConfigError: The arguments contradict each other, or are of no use for these sources.
        """
        if weights is not None and repeats is not None:
            raise ConfigError("weights and repeats: give one of them; weights are shares, repeats passes an epoch")
        if weights is None:
            if ends is not None or self.unit != "samples":
                raise ConfigError(
                    "ends and unit: they are about weights; without them an epoch ends after its passes. Give weights="
                )
            return self._by_passes(repeats)
        blend = self._by_weight(_schedule_of(weights, self.sources))
        if ends is None:
            return blend
        segments = blend.segments()
        if len(segments) > 1:
            raise ConfigError(
                "ends: an epoch that ends is laid out with the same weights all over; with a Schedule leave it out, "
                "and say how long an epoch is: DataLoader(mixture, epoch_size=…)"
            )
        return _Blend(_quotas_until(ends, segments[0][1], self.sizes), None)

    def _by_passes(self, repeats: Mapping[str, float] | None) -> _Blend:
        times: Mapping[str, float] = dict.fromkeys(self.sources, 1) if repeats is None else repeats
        _check_names("repeats", times, self.sources)
        exact = checked_weights(times, "repeats")
        quotas: dict[str, int] = {}
        for name, within in _blends(self.sources):
            if within.quotas is None:
                raise ConfigError(
                    f"the source {name!r} is a mixture without end: it has no passes to count. Give this mixture "
                    "weights=, or that one ends="
                )
            quotas.update({leaf: _rounded(exact[name] * count) for leaf, count in within.quotas.items()})
        if not sum(quotas.values()):
            raise ConfigError(f"repeats: an epoch would be empty, got {dict(times)}; read a source more often")
        return _Blend(dict(sorted(quotas.items())), None)

    def _by_weight(self, given: Schedule) -> _Blend:
        """Return weights per sample of each leaf, of weights per unit of each source."""
        blends = dict(_blends(self.sources))
        if self.unit == "samples" and not any(isinstance(one, Mixture) for one in self.sources.values()):
            return _Blend(None, given)
        rows = sorted({row for row, _ in given.segments()} | {r for one in blends.values() for r, _ in one.segments()})
        return _Blend(None, Schedule.steps({row: self._leaf_weights(given, blends, row) for row in rows}))

    def _leaf_weights(self, given: Schedule, blends: Mapping[str, _Blend], row: int) -> dict[str, float]:
        wanted: Any = given.at(row)
        made: dict[str, float] = {}
        for name, blend in blends.items():
            within = value_at(blend.segments(), row)
            total = sum(within.values())
            inside = {leaf: weight / total for leaf, weight in within.items()}
            per_sample = sum(share * self.units_per_sample[leaf] for leaf, share in inside.items())
            made.update({leaf: wanted[name] / per_sample * share for leaf, share in inside.items()})
        whole = sum(made.values())
        return {leaf: weight / whole for leaf, weight in sorted(made.items())}

    @cached_property
    def units_per_sample(self) -> dict[str, float]:
        """What a sample of each leaf counts on average; said once in the log."""
        if self.unit == "samples":
            return dict.fromkeys(self.names, 1.0)
        mean = _mean_tokens if self.unit == "tokens" else _mean_bytes
        found = {name: mean(name, self.leaves[name]) for name in self.names}
        shown = some_names([f"{name} {count:.1f}" for name, count in found.items()])
        _log.info("unit=%r: a sample has on average %s %s; weights are divided by it", self.unit, shown, self.unit)
        return found


def first_free_row(orders: Any, row: int) -> int:
    """Return the first row from which on other weights may apply, if rows before ``row`` are to stay as they are.

    The window mixes what lies around a row, and chunks are laid whole: so it lies some chunks behind ``row``.
    """
    lanes = orders.settings.lanes
    orders.settle(-(-row // lanes))
    free: int = orders.frontier * lanes
    return max(free, row)


def _row_of(segments: Sequence[Segment], row: int, name: str, missing: float) -> int | None:
    """Return the row behind ``row`` up to which so many more samples of a source are drawn; None: they never are."""
    for (start, weights), stop in zip(segments, [*(at for at, _ in segments[1:]), None], strict=True):
        begin, share = max(start, row), weights[name] / sum(weights.values())
        if (stop is not None and stop <= begin) or not share:
            continue
        if stop is None or missing <= (stop - begin) * share:
            return begin + math.ceil(missing / share)
        missing -= (stop - begin) * share
    return None


def _leaves(sources: Mapping[str, Any]) -> dict[str, StreamingDataset | Packed]:
    found: dict[str, StreamingDataset | Packed] = {}
    for name, one in sources.items():
        if isinstance(one, Mixture):
            found.update({f"{name}/{leaf}": dataset for leaf, dataset in one.leaves.items()})
        else:
            found[name] = one
    return dict(sorted(found.items()))


def _blends(sources: Mapping[str, Any]) -> list[tuple[str, _Blend]]:
    """Return what is drawn within each source, by the names of its leaves in this mixture."""
    found: list[tuple[str, _Blend]] = []
    for name, one in sources.items():
        if not isinstance(one, Mixture):
            found.append((name, _Blend({name: int(one.chunk_samples.sum())}, None)))
            continue
        quotas, weights = one._blend.quotas, one._blend.weights
        if quotas is not None:
            found.append((name, _Blend({f"{name}/{leaf}": count for leaf, count in quotas.items()}, None)))
        elif weights is not None:
            steps = {row: {f"{name}/{leaf}": share for leaf, share in values.items()}  # type: ignore[union-attr]
                     for row, values in weights.segments()}  # fmt: skip
            found.append((name, _Blend(None, Schedule.steps(steps))))
    return found


def _quotas_until(ends: Ends, weights: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, int]:
    """Count the samples of each source until the first one, or all, have been read once."""
    exact = {name: weight for name, weight in checked_weights(weights).items() if weight}
    unread = sorted(set(sizes) - set(exact))
    if unread and ends == "all":
        raise ConfigError(
            f'ends="all": {some_names(unread)} with the weight 0 would never come to an end; leave them out'
        )
    lengths = [sizes[name] / weight for name, weight in exact.items()]
    length = min(lengths) if ends == "first" else max(lengths)
    return {name: _rounded(exact.get(name, Fraction()) * length) for name in sorted(sizes)}


def _rounded(number: Fraction) -> int:
    return math.floor(number + Fraction(1, 2))


def _mean_bytes(name: str, dataset: StreamingDataset | Packed) -> float:  # noqa: ARG001  as _mean_tokens
    """Take the mean of the chunk table: chunks hold what a filter leaves out, too."""
    stored = dataset.documents if isinstance(dataset, Packed) else dataset
    kept = stored.chunk_samples.sum() / stored.stored_samples.sum()
    return float(dataset.chunk_bytes.sum() * kept / dataset.chunk_samples.sum())


def _mean_tokens(name: str, dataset: StreamingDataset | Packed) -> float:
    """Take the mean of the column ``tokens`` over some shards, evenly spread: the same ones on every rank."""
    if isinstance(dataset, Packed):
        return dataset.num_tokens / len(dataset)
    num_shards = len(dataset.urls)
    chosen = [i * num_shards // min(num_shards, _TABLES_READ) for i in range(min(num_shards, _TABLES_READ))]
    late = find_columns(dataset.storage, homes_of(dataset.urls, dataset.shards.index), ["tokens"]).get("tokens")
    total = count = 0
    for shard in chosen:
        url, whole = dataset.urls[shard], dataset.shards.table
        table = dataset.samples_at(url)
        column = None if table is None else table.columns.get("tokens")
        if column is None and late is not None and whole is not None:
            column = read_values(dataset.storage, url, dataset.shards.index, whole.of_shard(shard), late)
        if column is None:
            raise ConfigError(
                f'unit="tokens": the source {name!r} has no column "tokens" ({redact(url)}); give its number of tokens '
                'when shards are written, ShardWriter(columns={"tokens": …}), or add it later with '
                "`shard_tools column add`"
            )
        values = there_of(column, dataset.keeps(shard)).to_numpy()
        total, count = total + int(values.sum()), count + len(values)
    if not total:
        raise ConfigError(f'unit="tokens": the samples of the source {name!r} have no tokens; leave it out')
    return total / count


def _schedule_of(weights: Any, sources: Mapping[str, Any]) -> Schedule:
    """Return weights of all sources as a schedule.

    Raises:
        ConfigError: They are none, or do not name the sources.
    """
    if isinstance(weights, Schedule):
        if not weights.names:
            raise ConfigError(f"weights: expected a Schedule of dicts of weights, got one of numbers: {weights}")
        _check_names("weights", weights.names, sources)
        return weights
    _check_names("weights", weights, sources)
    return Schedule.steps({0: weights})


def _check_names(what: str, given: Any, sources: Mapping[str, Any]) -> None:
    if not isinstance(given, (Mapping, tuple)):
        example = ", ".join(f'"{name}": 1' for name in sorted(sources)[:2]) + (", …" if len(sources) > 2 else "")
        hint = "; what changes with the rows is a Schedule.custom(function, over=…)" if callable(given) else ""
        raise ConfigError(
            f"{what}: expected a dict by the names of the sources, such as {{{example}}}, got {_kind(given)}{hint}"
        )
    unknown, missing = sorted(set(given) - set(sources), key=str), sorted(set(sources) - set(given))
    if unknown or missing:
        hint = "" if not missing else f"; missing: {some_names(missing)} (give 0 where a source is not to be read)"
        if any(str(name).partition("/")[0] in sources for name in unknown):
            hint += "; shares within a mixture are its own weights="
        known = f"{what}: the sources are {some_names(sorted(sources))}"
        raise ConfigError(known + (f", got {some_names(list(map(repr, unknown)))}" if unknown else "") + hint)
    if isinstance(given, Mapping):
        checked_weights(given, what)


def _check_sources(sources: Any) -> None:
    """Refuse what is no dict of data sets with an index.

    Raises:
        ConfigError: It is not.
        IndexMissingError: A source has no index.
    """
    if not isinstance(sources, Mapping):
        raise ConfigError(
            f'sources: expected a dict of data sets by name, such as Mixture({{"web": StreamingDataset(…)}}), got '
            f"{type(sources).__name__}"
        )
    if not sources:
        raise ConfigError("sources: a mixture needs at least one data set, got none")
    for name, one in sources.items():
        if not isinstance(name, str) or not name or "/" in name or not name.isprintable():
            raise ConfigError(f"sources: expected names without a slash, got {name!r}; {_SLASH}")
        if isinstance(one, Mixture):
            continue
        if not isinstance(one, (StreamingDataset, Packed)):
            raise ConfigError(
                f"sources: {name!r}: expected a StreamingDataset, a Packed or a Mixture, got {one!r}"
                + ("; write StreamingDataset(…)" if isinstance(one, (str, PathLike)) else "")
            )
        if not one.chunk_samples.sum():  # raises where there is no index
            raise ConfigError(f"sources: {name!r} has no samples; leave it out, or look at it with `shard_tools info`")


def _check_packs(leaves: Mapping[str, StreamingDataset | Packed]) -> None:
    """Refuse sources of which a batch could not be one tensor: packs beside samples, or packs of several kinds.

    Raises:
        ConfigError: They are such.
    """
    packed = {name: one.shape for name, one in leaves.items() if isinstance(one, Packed)}
    if not packed:
        return
    others = sorted(leaves.keys() - packed.keys())
    if others:
        raise ConfigError(
            f"sources: {some_names(sorted(packed))} are Packed and {some_names(others)} are not; pack all of them, "
            f"Packed(…, length={next(iter(packed.values())).length}), or none"
        )
    first, shape = next(iter(packed.items()))
    for name, other in packed.items():
        for option in shape.__dataclass_fields__:
            if getattr(shape, option) != getattr(other, option):
                raise ConfigError(
                    f"sources: Packed {first!r} has {option}={getattr(shape, option)!r}, {name!r} "
                    f"{option}={getattr(other, option)!r}; packs of one batch are alike: give both the same"
                )


def _check_choices(quotas: str, unit: str, ends: str | None, batches: str) -> None:
    for what, given, known in (
        ("quotas", quotas, get_args(Quotas)), ("unit", unit, get_args(Unit)), ("ends", ends, (None, *get_args(Ends))),
        ("batches", batches, get_args(Batches)),
    ):  # fmt: skip
        check_choice(what, given, known)


def _kind(given: object) -> str:
    """Return what somebody gave, for a message: short values as they are, others by their type."""
    shown = repr(given)
    return shown if len(shown) < _SHORT and not callable(given) else f"a {type(given).__name__}"


def some_names(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
