"""Show a mixture over a run: shares against their targets, passes of each source, the ledger in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from shard_tools.look.plan.steps import PlannedRun
from shard_tools.look.show.base.page import Query
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.order.form import FormField, RefusedForm, batch_label, or_form, outside
from shard_tools.look.show.order.lines import Plot, plotted
from shard_tools.look.show.order.pages import runs_of
from shard_tools.look.show.order.query import OF_THE_RUN, asked_of
from shard_tools.look.show.order.step import NUM_COLOURS
from streaming.common.arguments import counted, some_names
from streaming.errors import ConfigError
from streaming.order.mixing.forecast import Forecast
from streaming.order.plan.ledger import CHANGED, GROWN, RESUMED, START, Entry

MIXTURE_ASKS = ("epoch", "until", *OF_THE_RUN)
_POINTS = ((16, 48), (64, 24), (2**62, 12))
"""Up to the first number of sources, count at the second number of rows: a count costs a permutation per source."""
_PLOTTED = 8
_NEXT_PASSES = 3
_PASSES_SHOWN, _LEAST_STEPS = 2, 50
"""For a run without end: show this multiple of its samples, and at least this number of steps."""
_SHOWN_WEIGHTS = 8
_BEHIND = 1.25  # margin beyond the last event, to show what follows


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShown:
    """A source or group, over the rows shown.

    Attributes:
        name: Its name.
        colour: Number of its color.
        samples: Its samples, or packs.
        target: Its target share.
        realised: Its actual share.
        strayed: Maximum deviation of its count from the target, in samples, at the rows where it was counted.
        drawn: Number of samples drawn from it.
        passes: The same as a number of passes over it.
        begins: The next passes to begin, with their steps.
        words: When it ends, or how often it is read, in words.
    """

    name: str
    colour: int
    samples: int
    target: float
    realised: float
    strayed: int
    drawn: int
    passes: float
    begins: tuple[tuple[int, int], ...]
    words: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        names = ("name", "samples", "target", "realised", "strayed", "drawn", "passes")
        return {**{name: getattr(self, name) for name in names}, "begins": dict(self.begins)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryShown:
    """An entry of the ledger, in words: its row and step, and the change."""

    row: int
    step: int
    what: str
    words: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {"row": self.row, "step": self.step, "what": self.what, "words": list(self.words)}


@dataclass(frozen=True, kw_only=True)
class MixturePage:
    """The behavior of a mixture over some rows of a run.

    Attributes:
        query: The address.
        is_mixture: Whether there is anything to mix; else the rest is empty.
        kind: Kind of the parts: sources or groups.
        steps: Steps at which sources are counted, including the first and the last step shown.
        sources: The sources, largest target first.
        realised: Their actual shares between these steps, in the order of ``sources``.
        targets: Their target shares, in the same form.
        entries: The ledger.
        epoch: The epoch shown; None: a run without end.
        at_step: The step of the saved state, if it is shown; None: there is none.
        words: The mixture, in words.
        problem: "", unlike that of a refused form.
    """

    query: Query
    is_mixture: bool
    kind: str = "sources"
    steps: tuple[int, ...] = ()
    sources: tuple[SourceShown, ...] = ()
    realised: tuple[tuple[float, ...], ...] = ()
    targets: tuple[tuple[float, ...], ...] = ()
    entries: tuple[EntryShown, ...] = ()
    epoch: int | None = None
    at_step: int | None = None
    words: str = ""
    problem: str = field(default="", init=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        if not self.is_mixture:
            return {"is_mixture": False, "sources": []}
        names = [one.name for one in self.sources]
        return {
            "is_mixture": True, "epoch": self.epoch, "steps": list(self.steps),
            "sources": [one.as_dict() for one in self.sources],
            "realised": dict(zip(names, map(list, self.realised), strict=True)),
            "targets": dict(zip(names, map(list, self.targets), strict=True)),
            "ledger": [one.as_dict() for one in self.entries],
        }  # fmt: skip

    @cached_property
    def plot(self) -> Plot:
        """The shares of the largest sources, over steps."""
        shown = self.sources[:_PLOTTED]
        return plotted(
            self.steps, [(one.name, one.colour) for one in shown], self.realised[:_PLOTTED], self.targets[:_PLOTTED],
            mark=self.at_step,
        )  # fmt: skip

    @property
    def form(self) -> list[FormField]:
        """Fields of the form, with the epoch or the steps shown."""
        shown = {"epoch": str(self.epoch)} if self.epoch is not None else {"until": str(self.steps[-1])}
        labels = _labels(self.query, is_endless=self.epoch is None)
        return [
            FormField(name=name, label=label, value=shown.get(name, self.query.text(name)))
            for name, label in labels.items()
        ]

    @property
    def kept(self) -> list[tuple[str, str]]:
        """Parameters of the address outside the form."""
        return outside(self.query, [one.name for one in self.form])


def is_mixed(subject: Subject) -> bool:
    """Return whether there is anything to mix: sources, or groups of a set."""
    return hasattr(subject.source, "sources")


def mixture_page(subject: Subject, query: Query) -> MixturePage | RefusedForm:
    """Return the mixture's page for an epoch, or up to a step; for a single set, a page without a mixture.

    If the address names something that does not exist, return the form, with the reason.

    Raises:
        ConfigError: JSON is requested of something that does not exist.
    """
    labels = _labels(query, is_endless=bool(query.text("until")))
    return or_form(query, labels, lambda: _page(subject, query))


def _labels(query: Query, *, is_endless: bool) -> dict[str, str]:
    """Return the labels of the form, by parameter."""
    where = {"until": "up to step"} if is_endless else {"epoch": "epoch"}
    return where | batch_label(query) | {"seed": "seed"}


def _page(subject: Subject, query: Query) -> MixturePage:
    asked = asked_of(query)
    runs = runs_of(subject)
    run = runs.of(asked.run)
    if run.state.ledger is None:
        return MixturePage(query=query, is_mixture=False)
    until = query.some_number("until", least=1, most=2**40)

    def made() -> MixturePage:
        return _Shown(run, asked.epoch, until, has_state=runs.state is not None and asked.run.state).page()

    found: MixturePage = runs.answers.of(("mixture", asked, until), made)
    return replace(found, query=query)


class _Shown:
    """The rows of a run on a page."""

    def __init__(self, run: PlannedRun, epoch: int | None, until: int | None, *, has_state: bool) -> None:
        ledger = run.state.ledger
        if ledger is None:
            raise AssertionError("of a mixture")
        self._run, self._ledger, self._has_state = run, ledger, has_state
        self._mixture: Any = run.mixture
        self._forecast: Forecast = self._mixture.drawing.forecast(ledger)
        self.epoch = None if run.is_endless else run.state.epoch if epoch is None else epoch
        if run.is_endless and epoch:
            raise ConfigError(f"epoch: the run is one epoch without an end, number 0; got {epoch}; give until instead")
        if self.epoch is not None and until is not None:
            raise ConfigError("until: an epoch is shown as a whole; leave it out, and give its number as epoch")
        self.begin = 0 if self.epoch is None else run.steps.row_of(self.epoch)
        self.first_step = 0 if self.epoch is None else run.steps.first(self.epoch)
        self.num_steps = (until or self._until()) if self.epoch is None else run.steps.count(self.epoch)
        if not self.num_steps:
            raise ConfigError(f"epoch: no batch is full in epoch {self.epoch}; give a smaller global_batch_size")
        self.names = sorted(self._forecast.passes)

    def _until(self) -> int:
        """Return the last step to show of a run without end."""
        changes, seen = [row for row, _ in self._ledger.segments()], self._run.state.samples_seen
        most = max(_PASSES_SHOWN * sum(self._mixture.sizes.values()), _BEHIND * changes[-1], _BEHIND * seen)
        return max(self._step(round(most)), _LEAST_STEPS)

    def _step(self, row: int) -> int:
        """Return the step shown that holds a row."""
        return self._run.shape.sizes.batches(self.begin, max(row - self.begin, 0), "drop")

    def page(self) -> MixturePage:
        """Return the page."""
        run, names = self._run, self.names
        edges = [self._row(step) for step in self._edges()]
        counts = np.array([[one.get(name, 0) for name in names] for one in map(self._drawn, edges)], np.int64)
        due = np.cumsum([[0.0] * len(names), *(self._due(*pair) for pair in pairwise(edges))], axis=0)
        found = self._sources(edges, counts, due)
        order = sorted(range(len(names)), key=lambda at: (-found[at].target, names[at]))
        lengths = np.diff(edges)
        realised, targets = (np.diff(some, axis=0).T / lengths for some in (counts, due))
        at_step = self._step(self.begin + run.state.samples_seen) if self._has_state else None
        if self.epoch is not None and self.epoch != run.state.epoch:
            at_step = None
        return MixturePage(
            query=Query({}), is_mixture=True, kind="groups" if hasattr(self._mixture, "dataset") else "sources",
            steps=tuple(self._edges()), sources=tuple(found[at] for at in order),
            realised=tuple(tuple(realised[at].tolist()) for at in order),
            targets=tuple(tuple(targets[at].tolist()) for at in order), entries=tuple(self._entries()),
            epoch=self.epoch, at_step=at_step, words=self._mixture.blend.in_words(),
        )  # fmt: skip

    def _edges(self) -> list[int]:
        """Return the steps at which sources are counted."""
        points = next(points for most, points in _POINTS if len(self.names) <= most)
        found: list[int] = np.unique(np.linspace(0, self.num_steps, points + 1).round().astype(np.int64)).tolist()
        return found

    def _row(self, step: int) -> int:
        """Return the row at which a step shown begins; for the step after the last one, the row at which that ends."""
        run = self._run
        if step < self.num_steps or self.epoch is None:
            plan, number = run.plan_of(self.first_step + step)
            return plan.row_of(number)
        plan, number = run.plan_of(self.first_step + self.num_steps - 1)
        return min(plan.row_of(number) + plan.global_batch_size, self.begin + run.num_samples)

    def _drawn(self, row: int) -> Mapping[str, int]:
        """Count the samples of each source before a row."""
        return self._run.drawn_before(row)

    def _due(self, row: int, stop: int) -> list[float]:
        """Return the number of samples that each source should give between two rows."""
        drawn = self._forecast.drawn(row, stop - row)
        return [drawn[name] for name in self.names]

    def _sources(self, edges: Sequence[int], counts: Any, due: Any) -> list[SourceShown]:
        begin, stop = edges[0], edges[-1]
        begins, found = self._forecast.pass_rows(begin, _NEXT_PASSES), []
        drawn = counts[-1] - counts[0]
        strayed = np.ceil(np.abs(counts - counts[0] - due).max(axis=0)).astype(np.int64)
        for at, name in enumerate(self.names):
            size = self._mixture.sizes[name]
            starts = tuple((number, self._step(row)) for row, number in begins[name] if row < stop)
            found.append(
                SourceShown(
                    name=name, colour=at % NUM_COLOURS, samples=size, target=float(due[-1][at]) / (stop - begin),
                    realised=int(drawn[at]) / (stop - begin), strayed=int(strayed[at]), drawn=int(drawn[at]),
                    passes=int(drawn[at]) / max(size, 1), begins=starts, words=self._words(name, starts),
                )
            )  # fmt: skip
        return found

    def _words(self, name: str, begins: Sequence[tuple[int, int]]) -> str:
        """Describe when a source begins, ends and repeats."""
        said = []
        given = [(row, weights.get(name, 0.0)) for row, weights in self._ledger.segments()]
        opened = next((row for row, weight in given if weight), None)
        if given and opened is None:
            return "never drawn"
        if opened:
            said.append(f"first drawn at step {self._step(opened):,}")
        if given and not given[-1][1]:
            closed = max(row for (_, before), (row, weight) in pairwise(given) if before and not weight)
            said.append(f"no longer drawn from step {self._step(closed):,} on")
        if begins:
            said.append("begins " + ", ".join(f"pass {number} at step {step:,}" for number, step in begins))
        return "; ".join(said)

    # --- the ledger ---

    def _entries(self) -> list[EntryShown]:
        found, before = [], None
        for entry in self._ledger.entries:
            found.append(
                EntryShown(
                    row=entry.start,
                    step=self._run.shape.sizes.batches(0, entry.start, "drop"),
                    what=_WHAT[entry.why],
                    words=tuple(_changes(entry, before)),
                )
            )
            before = entry
        return found


_WHAT = {
    START: "the run begins",
    RESUMED: "changed when it was resumed",
    CHANGED: "set_weights",
    GROWN: "a source has grown",
}


def _changes(entry: Entry, before: Entry | None) -> list[str]:
    """Describe how an entry of a ledger differs from the previous one."""
    words = []
    rows = entry.blend.rows(entry.start)
    if not rows:
        words.append(f"each pass draws {_weights(entry.blend.shares([])[0][1])}")
    elif before is None or entry.blend != before.blend or rows[0][1] != before.blend.at(entry.start):
        words.append(f"shares of rows: {_weights(rows[0][1])}")
    if len(rows) > 1:
        row, last = rows[-1]
        words.append(f"changing in {counted(len(rows) - 1, 'step')} up to row {row:,}: {_weights(last)}")
    was = {} if before is None else before.sources
    joined, left = sorted(set(entry.sources) - set(was)), sorted(set(was) - set(entry.sources))
    if before is not None and joined:
        words.append(f"joined: {some_names(joined)}")
    if left:
        words.append(f"left: {some_names(left)}")
    for name, number in entry.joins.items():
        words.append(f"{name}: new shards are read from its pass {number} on")
    if before is None or entry.even != before.even:
        even = sorted(entry.even)
        words += [f"dealt by single samples, since they are small or repeated fast: {some_names(even)}"] if even else []
    return words


def _weights(weights: Mapping[str, float]) -> str:
    total = sum(weights.values()) or 1
    most = sorted((name for name in weights if weights[name]), key=lambda name: (-weights[name], name))
    shown = ", ".join(f"{name} {weights[name] / total:.1%}" for name in most[:_SHOWN_WEIGHTS])
    return shown + (f" and {counted(len(most) - _SHOWN_WEIGHTS, 'other')}" if len(most) > _SHOWN_WEIGHTS else "")
