"""Record the weights of a mixture's sources by row: the ledger. Append-only.

It is part of every checkpoint of a mixture (``state_dict()["ledger"]``), as a list of entries::

    [{"from": 0, "weights": {"web": 0.7, "code": 0.3}, "sources": {"web": "5f…", "code": "a1…"}, "why": "start"},
     {"from": 512000, "weights": {"web": 0.5, "code": 0.5}, "sources": {…}, "why": "set_weights"}]

``from`` counts rows: samples of the run over all ranks and epochs. The samples before a row depend only on the entries
up to it. So the whole run can be replayed from its last state, and the number of passes over each source follows by
arithmetic.

``laid`` gives, for a source dealt in chunks that no longer has a weight, the number of its samples in each lane. Once
those samples have been read, the positions of the other sources can be computed without it.

``even`` names the sources that are dealt by single samples while others are dealt in chunks, or that all lanes draw
from together. It is decided when a source joins the run.

``fetch_bytes`` gives the size of the units into which the chunks of a source are cut. It never changes within a run.

``shards`` gives the number of shards of each source. If a source has grown, ``joins`` of the entry gives the first pass
over the source that includes the new shards: ``"joins": {"web": 3}``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from streaming.common.arguments import MAX_COUNT, check_choice, checked_count
from streaming.errors import ConfigError, StateError
from streaming.order.plan.blend import Blend, blend_of_entry, check_by_source
from streaming.order.plan.schedule import WeightSchedule, value_at, weights_from_dict

START, RESUMED, CHANGED, GROWN = "start", "changed at a resume", "set_weights", "grown"
Dealt: TypeAlias = Literal["chunks", "samples", "batches"]
_WHY = (START, RESUMED, CHANGED, GROWN)
_KEYS = frozenset({
    "from", "weights", "schedule", "quotas", "dealt", "batch_size", "shards", "joins", "laid", "fetch_bytes", "even",
    "sources", "why",
})  # fmt: skip
_ALWAYS, _PLAIN = ("from", "weights"), "chunks"
Even: TypeAlias = Literal["runs", "rows"]
_DEALT = {
    "chunks": 'quotas="chunks"', "samples": 'quotas="exact"',
    "batches": 'batches="one_source" and {} samples in a global batch',
}  # fmt: skip
NO_OTHER_SEED = (
    "seed: a mixture without end has one order, and epochs are parts of it: another seed from some epoch on would "
    "repeat some samples and leave out others. Give the seed to the Mixture"
)
Segment = tuple[int, dict[str, float]]
"""A row and the weights from that row on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The sources and weights that apply from a row on.

    Attributes:
        start: The row.
        weights: Weight of each source at that row, per sample; {}: each pass draws a fixed number of samples from each
            source (``quotas``).
        sources: Fingerprint of each source.
        why: The cause of the entry.
        schedule: Weights by row of the whole run, from that row on; None: weights are constant.
        quotas: Samples of each source in a pass over a finite mixture, on average if they are no whole number of
            batches; None: the mixture is endless.
        dealt: Unit in which shares are dealt: chunks, single samples (``quotas="exact"``), or batches of one source
            each.
        batch_size: Samples of such a batch over all ranks; None for the other units.
        shards: Number of shards of each source that can grow; {}: not recorded.
        joins: For each source that has grown, the first pass over it with the new shards.
        laid: For sources without a weight from this row on, samples in each lane once everything is laid.
        fetch_bytes: Size of the fetch units of each source whose chunks are cut; others are read in whole chunks.
        even: Sources that are dealt by single samples: each lane has an equal run of every pass (``"runs"``), or all
            lanes draw together, row by row (``"rows"``, for sources with few chunks or samples). The first entry with a
            source decides for the run. ``dealt`` applies to all other sources.
        blend: The blend that ``weights``, ``schedule``, ``quotas`` and ``batch_size`` describe.
    """

    start: int
    weights: Mapping[str, float]
    sources: Mapping[str, str]
    why: str
    schedule: WeightSchedule | None = None
    quotas: Mapping[str, int] | None = None
    dealt: Dealt = "chunks"
    batch_size: int | None = None
    shards: Mapping[str, int] = field(default_factory=dict)
    joins: Mapping[str, int] = field(default_factory=dict)
    laid: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fetch_bytes: Mapping[str, int] = field(default_factory=dict)
    even: Mapping[str, Even] = field(default_factory=dict)
    blend: Blend = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked_count("from", self.start)
        if self.why not in _WHY:
            raise ConfigError(f"why: expected one of {_WHY}, got {self.why!r}")
        check_by_source("sources", self.sources)
        if not self.sources:
            raise ConfigError("sources: none are named")
        _check_strings([*self.sources, *self.sources.values()])
        check_by_source("weights", self.weights, self.sources)
        object.__setattr__(self, "blend", blend_of_entry(self.weights, self.schedule, self.quotas, self.batch_size))
        self.blend.check(self.sources)
        if self.dealt not in get_args(Dealt) or (self.dealt == "batches") != (self.batch_size is not None):
            raise ConfigError(f"dealt: expected one of {get_args(Dealt)}, got {self.dealt!r} of {self.batch_size}")
        if self.batch_size is not None:
            checked_count("batch_size", self.batch_size, 1)
        for what, counts, least in (
            ("shards", self.shards, 0),
            ("joins", self.joins, 0),
            ("fetch_bytes", self.fetch_bytes, 1),
        ):
            check_by_source(what, counts, self.sources)
            for name, count in counts.items():
                checked_count(f"{what} of {name!r}", count, least)
        check_by_source("laid", self.laid, self.sources)
        for name, in_lanes in self.laid.items():
            total = sum(checked_count(f"laid of {name!r}", count) for count in in_lanes)
            checked_count(f"laid of {name!r} in all lanes", total)
        check_by_source("even", self.even, self.sources)
        for name, how in self.even.items():
            check_choice(f"even of {name!r}", how, get_args(Even))

    @property
    def drawn(self) -> set[str]:
        """The sources with a weight at its row or later, while the entry applies."""
        return {name for _, weights in self.blend.rows(self.start) for name, weight in weights.items() if weight}

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that cannot change within a run."""
        return type(self.blend), self.dealt, self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """Return the entry's representation in a state."""
        laid = {name: list(counts) for name, counts in self.laid.items()}
        fields: dict[str, Any] = {
            "from": self.start, "weights": dict(self.weights) or None,
            "schedule": self.schedule and self.schedule.to_dict(), "quotas": self.quotas and dict(self.quotas),
            "dealt": self.dealt, "batch_size": self.batch_size, "shards": dict(self.shards), "joins": dict(self.joins),
            "laid": laid, "fetch_bytes": dict(self.fetch_bytes), "even": dict(self.even),
        }  # fmt: skip
        # Fields with default values are left out.
        made = {name: value for name, value in fields.items() if name in _ALWAYS or value not in (None, {}, _PLAIN)}
        return {**made, "sources": dict(self.sources), "why": self.why}

    @classmethod
    def from_dict(cls, data: Any) -> Entry:
        """Rebuild an entry from the dict of :meth:`to_dict`.

        Raises:
            StateError: The dict is malformed.
        """
        try:
            _check_keys(data)
            return cls(
                start=data["from"],
                weights={} if data["weights"] is None else data["weights"],
                sources=data["sources"],
                why=data["why"],
                schedule=weights_from_dict(data["schedule"]) if "schedule" in data else None,
                quotas=data.get("quotas"),
                dealt=data.get("dealt", "chunks"),
                batch_size=data.get("batch_size"),
                shards=data.get("shards", {}),
                joins=data.get("joins", {}),
                laid={name: tuple(counts) for name, counts in data.get("laid", {}).items()},
                fetch_bytes=data.get("fetch_bytes", {}),
                even=data.get("even", {}),
            )
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StateError(f"state: an entry of the ledger: {error}, in {data!r}") from error


@dataclass(frozen=True, slots=True)
class Ledger:
    """Entries by row, the first at 0. A value: appending returns a new one.

    Raises:
        StateError: There is no entry at row 0, an entry's row is before that of the previous one, or entries deal
            samples in different ways.
    """

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        starts = [entry.start for entry in self.entries]
        if len({entry.kind for entry in self.entries}) > 1:
            raise StateError(
                "state: ledger: quotas, dealt and batch_size cannot change within a run, but differ between entries"
            )
        if not starts or starts[0] != 0 or starts != sorted(starts):
            raise StateError(
                f"state: ledger: expected entries in the order of their rows, the first at 0, got {starts}"
            )

    @property
    def last(self) -> Entry:
        """The last entry."""
        return self.entries[-1]

    @property
    def fetch_bytes(self) -> dict[str, int | None]:
        """Size of the fetch units of each source that the run has ever had; None: whole chunks."""
        return {name: entry.fetch_bytes.get(name) for entry in self.entries for name in entry.sources}

    @property
    def even(self) -> dict[str, Even]:
        """The sources dealt by single samples, and how, by name, according to the first entry that has the source."""
        first = {name: entry for entry in reversed(self.entries) for name in entry.sources}
        return {name: entry.even[name] for name, entry in sorted(first.items()) if name in entry.even}

    @property
    def is_changed(self) -> bool:
        """Whether ``set_weights`` has changed the weights."""
        return any(entry.why == CHANGED for entry in self.entries)

    @property
    def first_rows(self) -> dict[str, int]:
        """The row at which each source joined the run, by name."""
        found: dict[str, int] = {}
        for entry in self.entries:
            for name in entry.sources:
                found.setdefault(name, entry.start)
        return found

    @property
    def shards(self) -> dict[str, int]:
        """Latest number of shards of each source, by name, if recorded."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found = {name: count for name, count in found.items() if name not in entry.sources} | dict(entry.shards)
        return found

    @property
    def laid(self) -> dict[str, tuple[int, ...]]:
        """Samples in each lane, by name, of sources that lay nothing more, if recorded.

        A source that never had a weight has no samples, and is not recorded.
        """
        found: dict[str, tuple[int, ...]] = {}
        for entry in self.entries:
            found = {name: counts for name, counts in found.items() if name not in entry.drawn} | dict(entry.laid)
        return found

    @property
    def drawn(self) -> set[str]:
        """The sources that ever had a weight."""
        return {name for _, weights in self.segments() for name, weight in weights.items() if weight}

    @property
    def sources(self) -> dict[str, str]:
        """All sources that the run has ever had, with their fingerprints, by name."""
        found: dict[str, str] = {}
        for entry in self.entries:
            found.update(entry.sources)
        return dict(sorted(found.items()))

    def appended(self, entry: Entry) -> Ledger:
        """Return the ledger with one more entry.

        Raises:
            StateError: Its row is before that of the last entry.
        """
        return Ledger((*self.entries, entry))

    def changed(self, weights: WeightSchedule, row: int) -> Ledger:
        """Return the ledger with other weights from a row on, taken at that row from a schedule of the whole run.

        Raises:
            StateError: The row is before the last entry.
        """
        made = replace(self.last, start=row, schedule=weights, why=CHANGED, laid={})
        (_, now), *later = made.blend.rows(row)
        return self.appended(replace(made, weights=dict(now), schedule=weights if later else None))

    def segments(self) -> list[Segment]:
        """Return the rows at which weights change, and the weights from each on, over all entries.

        The weights name every source, with 0 for a source without a weight. A finite mixture (``quotas``) has no
        segments.
        """
        names = self.sources
        stops = [*(entry.start for entry in self.entries[1:]), MAX_COUNT + 1]
        found: list[Segment] = []
        for entry, stop in zip(self.entries, stops, strict=True):
            for row, weights in entry.blend.rows(entry.start):
                if row >= stop:
                    break
                whole = {name: float(weights.get(name, 0)) for name in names}
                if found and found[-1][0] == row:
                    found.pop()  # two entries at one row: the later one applies
                if not found or found[-1][1] != whole:
                    found.append((row, whole))
        return found

    def segments_from(self, row: int) -> list[Segment]:
        """Return the segments from a row on, the first beginning there; for a mixture without an end."""
        segments = self.segments()
        return [(row, value_at(segments, row)), *((start, weights) for start, weights in segments if start > row)]

    def to_list(self) -> list[dict[str, Any]]:
        """Return the ledger's representation in a state."""
        return [entry.to_dict() for entry in self.entries]

    @classmethod
    def from_list(cls, data: Any) -> Ledger:
        """Rebuild a ledger from the list of :meth:`to_list`.

        Raises:
            StateError: The list is malformed.
        """
        if not isinstance(data, Sequence) or isinstance(data, str):
            raise StateError(f"state: ledger: expected a list of entries, got {data!r}")
        return cls(tuple(map(Entry.from_dict, data)))

    def resumed(
        self, made: Entry, first_free: Callable[[], int], *, grown: Mapping[str, Callable[[], int]] | None = None,
        where_is: Callable[[str, str], str] = lambda *_: "",
    ) -> tuple[Ledger, list[str]]:  # fmt: skip
        """Continue the run with the current mixture.

        Args:
            made: The entry that the current mixture would record at the start of a run.
            first_free: Returns the first row that may be drawn differently; called only if something changes.
            grown: For each source that has the shards of the state and more after them, a function that returns the
                first pass over the source that may include the new shards.
            where_is: Says how to open a source, by its name, as it was with a fingerprint; "" if that is not known.

        Returns:
            The ledger of the run, and a description of each change. If the mixture equals the saved one, nothing
            changes, and weights that ``set_weights`` gave in the meantime still apply.

        Raises:
            StateError: A source differs, or the mixture ends and differs.
        """
        grown = grown or {}
        self._check_dealt(made)
        self._check_fingerprints(made, grown, where_is)
        was = self.last.sources
        changes = [f"the source {name!r} is added" for name in sorted(set(made.sources) - set(was))]
        changes += [f"the source {name!r} is dropped" for name in sorted(set(was) - set(made.sources))]
        for name in sorted(grown):
            before = f" from {self.shards[name]:,}" if name in self.shards else ""
            changes.append(f"the source {name!r} has grown{before} to {made.shards[name]:,} shards")
        planned = [self.entries[0], *(entry for entry in self.entries if entry.why not in (CHANGED, GROWN))][-1]
        if planned.blend != made.blend:
            changes.append(_changed(planned.blend, made.blend))
        if not changes:
            return self, []
        if not self.last.blend.allows(made.blend):
            raise StateError(
                f"this state belongs to a different mixture: {'; '.join(changes)}. A mixture that ends (by size, "
                "repeats=, ends=) is laid out as a whole, and resumes only unchanged; sources and weights of one with "
                "weights= and ends=None may change at a resume. To give up the rest of this epoch instead, load no "
                f"state and call set_epoch with the next one{_as_it_was(was, grown, where_is)}"
            )
        start = max(first_free(), self.last.start)
        joins = {name: first_pass() for name, first_pass in grown.items()}
        changes += [f"shards that came since join {name!r} with its pass {at + 1:,}" for name, at in joins.items()]
        if planned.blend == made.blend and set(made.sources) == set(was):  # weights from set_weights still apply
            made, why = replace(self.last, sources=made.sources, shards=made.shards, laid={}), GROWN
        else:
            why = RESUMED
        entry = replace(made, start=start, weights=made.blend.at(start), joins=joins, why=why)
        return self.appended(entry), changes

    def _check_dealt(self, made: Entry) -> None:
        was, now = ((entry.dealt, entry.batch_size) for entry in (self.last, made))
        if was != now:
            raise StateError(
                f"this state was drawn with {_DEALT[was[0]].format(was[1])}, but this mixture draws with "
                f"{_DEALT[now[0]].format(now[1])}: positions of sources in one order mean nothing in the other. Give "
                "the same, or start a new run"
            )

    def _check_fingerprints(
        self, made: Entry, grown: Mapping[str, object], where_is: Callable[[str, str], str]
    ) -> None:  # fmt: skip
        known = self.sources
        for name, fingerprint in made.sources.items():
            if known.get(name, fingerprint) != fingerprint and name not in grown:
                why = why_differs(known[name], fingerprint)
                if why is not None:  # the shards are equal, but the kept samples, or their meaning, differ
                    raise StateError(f"the source {name!r} is not the one of this state: {why}")
                cure = where_is(name, known[name]) or (
                    "Open the same shards in the same order, with the index and the filter they had. New shards may "
                    "follow if their names sort after all of these; make others a source of their own: "
                    f'Mixture({{…, "{name}": …, "{name}-2": StreamingDataset(the new shards)}})'
                )
                raise StateError(
                    f"the source {name!r} is not the one of this state: it has the fingerprint {fingerprint[:12]}, the "
                    f"state has {known[name][:12]}. {cure}"
                )


def _as_it_was(was: Mapping[str, str], grown: Collection[str], where_is: Callable[[str, str], str]) -> str:
    """Say how to open the sources that have grown as they were, to append to a message."""
    cures = [cure for name in sorted(grown) if (cure := where_is(name, was[name]))]
    if grown and not cures:
        return "; or give the shards that the source had, until the epoch is over"
    return "".join(f". {cure}" for cure in cures)


def _check_keys(data: Mapping[str, object]) -> None:
    unknown = sorted(set(data) - _KEYS, key=str)
    if unknown:
        raise ConfigError(f"unknown keys {unknown}")


def _check_strings(values: Sequence[object]) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TypeError(f"expected strings, got {values}")


def _changed(was: Blend, now: Blend) -> str:
    other = "" if was.what == now.what else f"{now.what} "
    return f"{was.what} were {was.shown}, and {other}are {now.shown}"


# ---------------------------------------------------------------------------------------------------- fingerprints


def filter_fingerprint(base: str, parts: Mapping[str, str]) -> str:
    """Return the fingerprint of a filtered dataset, which includes the parts of the filter for messages.

    It is the fingerprint of the shards, followed by ``;name=value`` for each part, with ``%`` and ``;`` escaped as
    ``%25`` and ``%3B``.
    """
    return ";".join([base, *(f"{name}={_escaped(value)}" for name, value in parts.items())])


MEANING = "meaning"
"""The part of a fingerprint that identifies the meaning of class numbers and token ids."""


def without_part(fingerprint: str, name: str) -> tuple[str, str]:
    """Return a fingerprint without one of its parts, and the value of that part; "" if there is none."""
    base, parts = _taken_apart(fingerprint)
    value = parts.pop(name, "")
    return filter_fingerprint(base, parts), value


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace(";", "%3B")


def why_differs(saved: str, own: str) -> str | None:
    """Describe the part of a filter in which two fingerprints of the same shards differ; None if the shards differ.

    Args:
        saved: The fingerprint in a state.
        own: The fingerprint of the current dataset.
    """
    (base, was), (other, now) = _taken_apart(saved), _taken_apart(own)
    if base != other or saved == own:
        return None
    for name in dict.fromkeys([*was, *now]):
        if was.get(name) == now.get(name):
            continue
        if name == MEANING:
            return (
                f"numbers of classes or ids of tokens meant something else when the state was saved: "
                f"{_shown(was.get(name))} then, {_shown(now.get(name))} now (names of fields, with how many classes "
                "and a digest of their names). Open the sets with the schema.json and the classes= that they had"
            )
        if name.startswith("column "):
            column = name.removeprefix("column ")
            if column and name in was and name in now:
                return (
                    f"column {column!r} has changed since the state was saved: version {was[name]} then, "
                    f"{now[name]} now. Give the new column another name, and resume with the one that the run began "
                    f"with"
                )
            continue
        if name != "kept":
            return (
                f"{name}: the state was saved with {_shown(was.get(name))}, this data set has {_shown(now.get(name))}"
            )
    return (
        "the same filter keeps different samples than when the state was saved: columns of the sample tables that it "
        "uses have changed"
    )


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value)


def _taken_apart(fingerprint: str) -> tuple[str, dict[str, str]]:
    base, *parts = fingerprint.split(";")
    named = (part.partition("=") for part in parts)
    return base, {name: value.replace("%3B", ";").replace("%25", "%") for name, _, value in named}
