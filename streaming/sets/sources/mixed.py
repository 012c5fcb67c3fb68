"""Mix several sources into one, in given proportions: ``MixedSource``."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from os import PathLike
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np

from infra import agent_store
from streaming.build.batches.build import OnError, RowKind, SourceRecipe
from streaming.common.arguments import (
    check_choice,
    checked_limit,
    checked_path,
    format_bytes,
    most_bad,
    some_names,
)  # fmt: skip
from streaming.common.arrays import rows_by, sums
from streaming.common.job.shared_results import Peers
from streaming.common.job.store import job_peers
from streaming.errors import ConfigError
from streaming.order.mixing.blend import Ends, check_names, shown_value
from streaming.order.mixing.granularity import Granularity, granularity_of
from streaming.order.plan.blend import Blend, PassBlend
from streaming.order.plan.ledger import Ledger
from streaming.order.plan.order import Orders, OrderSettings
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.settings import ShuffleConfig
from streaming.order.plan.state import NO_VERSIONS, Versions
from streaming.sets.sources.drawing import Drawing, Leaf
from streaming.sets.sources.fetch_units import FetchBytes, check_can_be_cut, fitting_total, shown_total, unit_sizes
from streaming.sets.sources.samples import SampleSource
from streaming.sets.sources.units import Unit, Weighing
from streaming.sets.sources.windows import WindowSource
from streaming.sets.windows.order import order_of_windows
from streaming.shards.catalog.cut import Cut, cut_tables
from streaming.shards.catalog.joined import JoinedSource
from streaming.shards.catalog.source import ChunkSource
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.schema.joined import Classes
from streaming.shards.schema.meeting import met
from streaming.types import Int64Array, Sample, Transform, override

Quotas: TypeAlias = Literal["chunks", "exact"]
Batches: TypeAlias = Literal["mixed", "one_source"]
_CURE = (
    'Write Mixture(…, classes="union"), which translates the numbers by name, or classes="own", which keeps those of '
    "each source, as for models with one head per __source__"
)
_DEALING = {"shuffle": True, "seed": 0, "quotas": "chunks", "batches": "mixed", "fetch_bytes": None}
"""Options that set how samples are dealt, and their defaults."""
_log = logging.getLogger("streaming")


class MixedSource(JoinedSource):
    """Mix several sources into one, each with a given share: the source behind a ``Mixture``.

    Its options are those of ``Mixture``, which has their defaults.

    Attributes:
        sources: The mixed sources, by name.
        leaves: The sources that hold samples, including those of nested mixtures, cut into their fetch units.
        fetch_bytes: Size of the fetch units of the sources that are cut.
        deal: Granularity at which shares are dealt.
        blend: Amounts drawn from each leaf.
        weighing: Converts weights of the mixture to numbers of samples.
    """

    is_reweighed = False
    """Whether the weights come from ``set_weights`` instead of the arguments."""
    alone = ""
    """Why this source cannot be mixed with others; "": it can."""

    def __init__(  # noqa: PLR0913  the options of Mixture
        self,
        sources: Mapping[str, Leaf | MixedSource],
        *,
        weights: Mapping[str, float] | Schedule | None,
        repeats: Mapping[str, float] | None,
        quotas: Quotas,
        unit: Unit,
        ends: Ends | None,
        shuffle: bool | ShuffleConfig,
        seed: int,
        batches: Batches,
        fetch_bytes: FetchBytes | None,
        max_bad_samples: float | None,
        bad_samples_file: str | PathLike[str] | None,
        classes: Classes = None,
    ) -> None:
        _check_choices(quotas, unit, ends, batches)
        self.deal: Granularity = granularity_of(quotas, batches)
        self._deal_options = {"quotas": quotas, "batches": batches}
        if fetch_bytes is not None:
            self.deal.check_can_cut()
        self.sources = dict(sources)
        self._units: dict[str, ChunkTable] = {}
        self.fetch_bytes: dict[str, int] = {}
        _check_alone(sources)
        _check_packs(_leaves(sources))
        self.classes = classes
        self._combine_schemas()
        self._read_leaves()
        self._order_by(shuffle, seed)
        self.bad_samples_file = checked_path("bad_samples_file", bad_samples_file)
        self.max_bad_samples = 1.0 if max_bad_samples is None else checked_limit(max_bad_samples)
        within = {
            name: one.blend if isinstance(one, MixedSource) else PassBlend({"": int(one.chunk_samples.sum())})
            for name, one in self.sources.items()
        }
        self.weighing = Weighing(within, self.leaves, unit)
        self.blend: Blend = self.weighing.blend(self.sizes, weights=weights, repeats=repeats, ends=ends)
        if fetch_bytes is not None:
            self._cut(unit_sizes(fetch_bytes, self.leaves, self.blend), job_peers(agent_store()))
        _warn_of_unused(self.sources, self.dealing)

    @property
    @override
    def dealing(self) -> dict[str, object]:
        return super().dealing | self._deal_options | {"fetch_bytes": dict(self.fetch_bytes) or None}

    # --- what users read by number ---

    @property
    def is_endless(self) -> bool:
        """Whether samples are drawn without an end."""
        return self.blend.is_endless

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples of each source."""
        return {name: int(one.chunk_samples.sum()) for name, one in sorted(self.leaves.items())}

    @property
    def num_readable(self) -> int:
        """Number of samples that :meth:`read` can return."""
        return sum(self.blend.readable(self.sizes).values())

    def read(self, numbers: Int64Array) -> list[Sample]:
        """Return samples by number, int64 [n], which must exist, in this order.

        Sources follow each other in order of their names. A source that an epoch reads n times appears n times.

        Raises:
            DataError: A sample cannot be read.
        """
        sizes, shown = self.sizes, self.shown_names
        counts = self.blend.readable(sizes)
        starts = sums([counts[name] for name in self.names])
        leaves = np.searchsorted(starts, numbers, side="right") - 1
        found: dict[int, Sample] = {}
        for leaf, rows in rows_by(leaves):
            name = self.names[leaf]
            samples = self.leaves[name].read((numbers[rows] - starts[leaf]) % sizes[name], [shown[name]] * len(rows))
            found.update(zip(rows.tolist(), samples, strict=True))
        return [found[row] for row in range(len(numbers))]

    def scan(self) -> Iterator[Sample]:
        """Yield the samples of an epoch as :meth:`read` numbers them, reading chunk by chunk."""
        sizes, shown = self.sizes, self.shown_names
        counts = self.blend.readable(sizes)
        for name in self.names:
            for first in range(0, counts[name], max(sizes[name], 1)):
                yield from islice(self.leaves[name].scan(shown[name]), counts[name] - first)

    def mapped(self, function: Transform) -> Self:
        """Return the same mixture of sources that also call ``function``."""
        return self.of_sources({name: one.mapped(function) for name, one in self.sources.items()})

    def of_sources(self, sources: Mapping[str, Leaf | MixedSource]) -> Self:
        """Return the same mixture of other sources that have the same names and sizes."""
        made = copy.copy(self)
        made.sources = dict(sources)
        made._translate_classes(made.meaning.schema.classes)
        made._read_leaves()
        return made

    def _combine_schemas(self) -> None:
        """Compare the schemas of the sources, and translate class numbers with ``classes="union"``.

        Raises:
            ConfigError: The schemas contradict each other.
        """
        meanings = {_place_of(name, one): one.meaning for name, one in sorted(self.sources.items())}
        sets = {place: one.schema for place, one in meanings.items()}
        unknown = {place: one.unknown for place, one in meanings.items()}
        self.meaning = met(sets, classes=self.classes, cure=_CURE, unknown=unknown)
        self._translate_classes(self.meaning.schema.classes)

    def _translate_classes(self, classes: Mapping[str, tuple[str, ...]]) -> None:
        """Make each source translate its class numbers to those of these lists."""
        for name, one in self.sources.items():
            own = one.meaning.schema.classes
            wanted = {part: names for part, names in classes.items() if part in own and own[part] != names}
            if wanted:
                self.sources[name] = one.speaking(wanted)

    def speaking(self, classes: Mapping[str, tuple[str, ...]]) -> Self:
        """Return the same mixture with its class numbers translated to those of these lists."""
        made = copy.copy(self)
        made.sources = dict(self.sources)
        made._translate_classes(classes)
        made._read_leaves()
        return made

    def _read_leaves(self) -> None:
        """Read the leaves of ``sources`` from now on, cut as before, and combine their options.

        The combined options serve callers that do not look at each source: ranks compare ``decode`` and ``transform``;
        ``on_error`` is the most tolerant one.
        """
        self.leaves = _leaves(self.sources)
        for name, table in self._units.items():
            one = _documents(self.leaves[name])
            self.leaves[name] = one.selecting(one.selection.over(table))
        super().__init__(self.leaves)
        leaves = list(self.leaves.values())
        self.fields: tuple[str, ...] | None = None
        if all(one.fields is not None for one in leaves):
            self.fields = tuple(dict.fromkeys(name for one in leaves for name in one.fields or ()))
        self.decode: Any = {name: one.decode for name, one in self.leaves.items()}
        self.transform: Any = {name: one.transform for name, one in self.leaves.items()}
        self.decoders = leaves[0].decoders
        kinds: tuple[OnError, ...] = ("skip", "substitute", "raise")
        self.on_error: OnError = next(kind for kind in kinds if any(one.on_error == kind for one in leaves))

    def _cut(self, sizes: Mapping[str, int], peers: Peers | None) -> None:
        """Cut the chunks of some sources into units of these sizes; the chunks of others stay whole."""
        self.leaves = _leaves(self.sources)
        check_can_be_cut(
            {name: self.leaves[name] for name in sizes}, "leave fetch_bytes out, and begin without a state"
        )
        cuts = []
        for name in sizes:
            one = _documents(self.leaves[name])
            cuts.append(Cut(storage=one.storage, shards=one.shards, table=one.selection.whole, unit_bytes=sizes[name]))
        # Skip unchanged tables, which would only be copied.
        self._units = {
            name: table for name, table, cut in zip(sizes, cut_tables(cuts, peers), cuts, strict=True)
            if table is not cut.table
        }  # fmt: skip
        self.fetch_bytes = dict(sizes)
        self._read_leaves()

    def cut_as(self, ledger: Ledger) -> Self:
        """Return this mixture with the fetch units of a run's ledger; sources that the ledger lacks keep their own."""
        was = ledger.fetch_bytes
        known = {name: was.get(name, self.fetch_bytes.get(name)) for name in self.names}
        sizes = {name: size for name, size in known.items() if size is not None}
        if sizes == self.fetch_bytes:
            return self
        made = copy.copy(self)
        made._cut(sizes, None)
        return made

    def words(self) -> str:
        """Describe the mixture."""
        parts = [f"{len(self.names)} sources: {some_names(self.names)}"]
        parts += [f"{sum(self.sizes.values())} samples", format_bytes(int(self.chunk_bytes.sum()))]
        parts.append(self.blend.in_words())
        if self.fetch_bytes:
            sizes = sorted(
                {format_bytes(size): size for size in self.fetch_bytes.values()}.items(), key=lambda one: one[1]
            )
            parts.append(f"fetch units of {' to '.join(dict.fromkeys([sizes[0][0], sizes[-1][0]]))}")
        parts.append(f"shuffle seed {self.seed}" if self.shuffle else "in storage order")
        return ", ".join(parts)

    # --- for the engine (streaming.run.engine.source.Source) ---

    @override
    def pack_passes(self, passes: Int64Array) -> Int64Array:
        return self.deal.pack_passes(self.blend, passes, self.sizes)

    def expected_samples(self, num_rows: float) -> float:
        """See ``ShardSet``: by the sizes of the sources, whatever their weights."""
        leaves = self.leaves.values()
        return (
            num_rows
            * sum(one.expected_samples(one.num_readable) for one in leaves)
            / max(sum(one.num_readable for one in leaves), 1)
        )

    @property
    def items(self) -> RowKind:
        """The kind of row of a batch, the same for all sources, except that packs of some may have no loss mask."""
        kinds = [self.leaves[name].items for name in self.names]
        return kinds[0].mixed(kinds)

    @property
    def recipe_parts(self) -> tuple[SourceRecipe, ...]:
        """The decoders and transforms of each source."""
        shown = self.shown_names
        return tuple(replace(part, name=shown[name]) for name in self.names for part in self.leaves[name].recipe_parts)

    @property
    def shown_names(self) -> dict[str, str]:
        """The name of each leaf in ``__source__``."""
        found: dict[str, str] = {}
        for name, one in self.sources.items():
            within = one.shown_names if isinstance(one, MixedSource) else {}
            found.update({f"{name}/{leaf}": f"{name}/{shown}" if shown else name for leaf, shown in within.items()})
            if not within:
                found[name] = name
        return found

    @property
    def numbered(self) -> dict[str, ChunkSource]:
        """The set that numbers the samples of a leaf, for leaves that do not number them themselves."""
        return {
            f"{name}/{leaf}": numbered
            for name, one in self.sources.items() if isinstance(one, MixedSource)
            for leaf, numbered in one.numbered.items()
        }  # fmt: skip

    def order_settings(self, global_batch_size: int) -> OrderSettings:
        """Return the order under a loader with batches of this size."""
        found = super().order_settings(global_batch_size)
        if any(isinstance(one, WindowSource) for one in self.leaves.values()):
            found = order_of_windows(
                found, self.shuffle_config, self.chunk_samples, self.chunk_bytes, global_batch_size
            )
        return self.deal.settings(found, global_batch_size) if self.shuffle_config.lanes is None else found

    # --- shares, and the ledger of a run ---

    def named_weights(self, weights: Any) -> dict[str, float]:
        """Return the argument of ``set_weights`` as plain numbers by source name.

        Raises:
            ConfigError: The mixture has an end, or the weights are not valid for its sources.
        """
        self.blend.check_weighable()
        if not isinstance(weights, Mapping):
            hint = "; give a Schedule when resuming: Mixture(…, weights=…)" if isinstance(weights, Schedule) else ""
            raise ConfigError(f"set_weights: expected a dict of weights, got {shown_value(weights)}{hint}")
        check_names("set_weights", weights, self.sources)
        return {name: weight if isinstance(weight, int) else float(weight) for name, weight in weights.items()}

    def weighed_as(self, ledger: Ledger) -> Self:
        """Return this mixture with the weights at the end of a run's ledger; itself if they are its own."""
        last = ledger.last
        if last.blend == self.begun(last.batch_size).last.blend:
            return self
        made = copy.copy(self)
        made.is_reweighed = True
        made.blend = last.blend
        return made

    @property
    def drawing(self) -> Drawing:
        """Makes and reads the ledgers of runs over the leaves."""
        return Drawing(leaves=self.leaves, deal=self.deal, blend=self.blend, fetch_bytes=self.fetch_bytes)

    def begun(self, global_batch_size: int | None = None, settings: OrderSettings | None = None) -> Ledger:
        """Return the ledger of a run that begins now, under ``settings``; None: the settings for this batch size.

        With ``batches="one_source"`` the global batch size must be given.
        """
        return self.drawing.begun(settings or self.order_settings(global_batch_size or 1), global_batch_size)

    def orders(self, settings: OrderSettings, ledger: Ledger | None = None) -> Orders:
        """Return the orders of all passes, or of the single endless one; without ``ledger``, for a new run."""
        return self.drawing.orders(settings, ledger or self.begun(settings=settings))

    @property
    @override
    def opened_versions(self) -> dict[str, tuple[int, ...]]:
        return {name: numbers for name, one in self.leaves.items() for numbers in one.opened_versions.values()}

    def check_ledger(self, ledger: Ledger, versions: Versions = NO_VERSIONS) -> None:  # noqa: ARG002  groups name them
        """Check that the run of a ledger can continue with this mixture; some changes are allowed.

        Args:
            ledger: The ledger.
            versions: The versions of the sources that the state names.

        Raises:
            StateError: The run cannot continue.
        """
        self.drawing.check(ledger)

    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str:
        """Return advice for messages on how this mixture needs less memory; "" if nothing helps.

        Args:
            lanes: Number of lanes of a rank.
            room_bytes: Memory for chunks.
            resumed: Whether a state was loaded, which fixes how chunks are cut.
        """

        def smaller() -> str:
            can_cut = not resumed and all(one.can_be_cut for one in self.leaves.values())
            total = fitting_total(room_bytes, lanes, len(self.leaves)) if can_cut else None
            return "" if total is None else f'; fetch_bytes="{shown_total(total)}" cuts them into units that fit'

        return self.deal.memory_cure(smaller)

    def bad_limits(self, ledger: Ledger, row: int, num_samples: int, part: float = 1.0) -> dict[str, int]:
        """Return the number of bad samples allowed for each source, by its name in batches, in ``num_samples`` rows.

        A nested mixture has an entry, too: its own limit, but at most the sum over its sources. ``part`` is the
        fraction of samples that the counting process sees.
        """
        drawn = self.drawing.forecast(ledger).drawn(row, num_samples)
        return self._limits_of({name: part * self.leaves[name].expected_samples(drawn[name]) for name in self.leaves})

    def _limits_of(self, expected: Mapping[str, float]) -> dict[str, int]:
        """Return what ``bad_limits`` does, given the expected number of samples of each leaf."""
        limits: dict[str, int] = {}
        for name, one in self.sources.items():
            if not isinstance(one, MixedSource):
                limits[name] = most_bad(one.max_bad_samples, expected[name])
                continue
            within = {leaf: expected[f"{name}/{leaf}"] for leaf in one.names}
            inside = one._limits_of(within)
            together = [limit for leaf, limit in inside.items() if "/" not in leaf]
            own = most_bad(one.max_bad_samples, sum(within.values()))
            limits[name] = min(own, sum(together)) if together else own
            limits |= {f"{name}/{leaf}": limit for leaf, limit in inside.items()}
        return limits

    @property
    def bad_files(self) -> dict[str, str]:
        """See ``ShardSet``: this mixture's own file, and those of its sources."""
        found = super().bad_files
        for name, one in self.sources.items():
            found |= {f"{name}/{leaf}" if leaf else name: path for leaf, path in one.bad_files.items()}
        return found


AnySource: TypeAlias = Leaf | MixedSource
"""The source of any data set that users hold."""


def _leaves(sources: Mapping[str, Any]) -> dict[str, Leaf]:
    """Return the sources that hold samples, in whole chunks; how a nested mixture deals has no effect."""
    found: dict[str, Leaf] = {}
    for name, one in sources.items():
        if isinstance(one, MixedSource):
            found.update({f"{name}/{leaf}": dataset for leaf, dataset in _leaves(one.sources).items()})
        else:
            found[name] = one
    return dict(sorted(found.items()))


def _check_alone(sources: Mapping[str, Leaf | MixedSource]) -> None:
    """Refuse sources that cannot be mixed.

    Raises:
        ConfigError: There is one.
    """
    for name, one in sources.items():
        if isinstance(one, MixedSource) and one.alone:
            raise ConfigError(f"sources: {name!r}: {one.alone}")


def _place_of(name: str, one: Leaf | MixedSource) -> str:
    """Return the name of a source for messages."""
    places = [*one.meaning.sets]
    return f"source {name!r} ({places[0]})" if len(places) == 1 else f"source {name!r}"


def _warn_of_unused(sources: Mapping[str, Leaf | MixedSource], dealing: Mapping[str, object]) -> None:
    """Warn about settings of sources that have no effect, because all sources follow the order of the mixture."""
    unused: dict[str, list[str]] = {}
    for name, one in sources.items():
        for option, value in one.dealing.items():
            if value not in (_DEALING[option], dealing[option]):
                unused.setdefault(f"{option}={value!r}", []).append(repr(name))
    if unused:
        said = "; ".join(f"{option} of {some_names(names)}" for option, names in unused.items())
        _log.warning(
            "Mixture: %s: no effect here, since all sources are dealt out together, in one order. Give the option to "
            "the outermost Mixture", said
        )  # fmt: skip


def _documents(one: Leaf) -> SampleSource:
    if not isinstance(one, SampleSource):
        raise TypeError("packs are not cut")
    return one


def _in_code(option: object) -> str:
    """Return an option of packs as the user writes it: lengths by row are a schedule."""
    return f"Schedule.steps({dict(option)})" if isinstance(option, (list, tuple)) else repr(option)


def _check_packs(leaves: Mapping[str, Leaf]) -> None:
    """Refuse sources that could not form one tensor in a batch: packs beside samples, or packs of several kinds.

    Packs with and without a loss mask can: where there is none, every token counts.

    Raises:
        ConfigError: The sources cannot be combined.
    """
    _check_windows(leaves)
    _tell_of_unread_masks(leaves)
    packed = {name: one.items.options for name, one in leaves.items() if one.items.options}
    if not packed:
        return
    others = sorted(leaves.keys() - packed.keys())
    if others:
        raise ConfigError(
            f"sources: {some_names(sorted(packed))} are Packed and {some_names(others)} are not; pack all of them, "
            f"Packed(…, length={_in_code(next(iter(packed.values()))['length'])}), or none"
        )
    first, options = max(packed.items(), key=lambda one: one[1].get("mask_field") is not None)
    for name, other in packed.items():
        for option in {**options, **other}:
            if option == "mask_field" and other.get(option) is None:
                continue
            if options.get(option) != other.get(option):
                raise ConfigError(
                    f"sources: Packed {first!r} has {option}={_in_code(options.get(option))}, but {name!r} has "
                    f"{option}={_in_code(other.get(option))}; packs of one batch must be alike: "
                    + ("convert the source of one again with the --tokenizer of the other, as the vocabulary decides "
                       "the width" if option == "dtype" else "give both the same")
                )  # fmt: skip


def _tell_of_unread_masks(leaves: Mapping[str, Leaf]) -> None:
    """Warn of packs without a loss mask whose set has one, beside packs that have theirs."""
    masked = [name for name, one in leaves.items() if one.items.options.get("mask_field") is not None]
    for name, one in leaves.items():
        said = one.meaning.schema.tokens.get(one.items.options.get("field", ""))
        if masked and name not in masked and said is not None and said.tokens is not None and said.tokens.mask:
            _log.warning(
                "sources: Packed %r reads no mask, though its set has one, as %r does: all its tokens carry loss. To "
                "read it: Packed(…, mask_field=%s)", name, masked[0], json.dumps(said.tokens.mask),
            )  # fmt: skip


def _check_windows(leaves: Mapping[str, Leaf]) -> None:
    """Refuse windows beside samples or packs: a row of a batch is made in one way.

    Raises:
        ConfigError: Some sources are windows, and others are not.
    """
    cut = sorted(name for name, one in leaves.items() if isinstance(one, WindowSource))
    others = sorted(leaves.keys() - {*cut})
    if cut and others:
        raise ConfigError(
            f"sources: {some_names(cut)} are Windows and {some_names(others)} are not; cut all of them, "
            "Windows(…, video={…}), or none"
        )


def _check_choices(quotas: str, unit: str, ends: str | None, batches: str) -> None:
    for what, given, known in (
        ("quotas", quotas, get_args(Quotas)), ("unit", unit, get_args(Unit)), ("ends", ends, (None, *get_args(Ends))),
        ("batches", batches, get_args(Batches)),
    ):  # fmt: skip
        check_choice(what, given, known)
