"""Answer the pages of the order: the subject is opened once, and addresses become links to other pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shard_tools.change.sets.bad_list import BadList, load_bad_list
from shard_tools.look.plan.steps import read_state
from shard_tools.look.show.base.page import Query, address
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.order.bars import PackBar, RowCell, cells_of, pack_bar
from shard_tools.look.show.order.query import OF_THE_RUN, OF_THE_STEP, asked_of
from shard_tools.look.show.order.runs import ShownRuns
from shard_tools.look.show.order.step import NUM_COLOURS, SHOWN_ROWS, Bad, RowShown, StepShown, step_of
from shard_tools.look.show.order.upcoming import Coming, Comings, comings
from streaming.errors import ShardstreamError
from streaming.storage import redact_text

STEP_ASKS = (*OF_THE_STEP, *OF_THE_RUN)
COMING_ASKS = ("epoch", *OF_THE_RUN)
_MOST_RANKS = 16  # with a link of their own


def runs_of(subject: Subject) -> ShownRuns:
    """Return the runs over the subject, cached with it.

    Raises:
        StateError: The file does not hold a state.
    """

    def made() -> ShownRuns:
        state = None if subject.state_url is None else read_state(subject.state_url, subject.storage)
        if subject.source is None:
            raise AssertionError("the page needs a set")
        return ShownRuns(subject.source, state)

    return subject.keep("runs", made)


def check_state(subject: Subject) -> None:
    """Refuse an invalid state, or that of another set, before anything is shown.

    Raises:
        ConfigError, StateError: It is such a state.
        NotFoundError: There is no such file.
    """
    if subject.state_url is not None and subject.source is not None:
        runs_of(subject)


def bad_of(subject: Subject) -> Bad:
    """Return the reasons of samples in the lists of bad samples."""

    def made() -> Bad:
        lists = subject.bad_lists
        listed = load_bad_list(lists, subject.storage) if lists else BadList(by_shard={})
        samples: dict[tuple[str, str], str] = {}
        ranges: dict[str, list[tuple[int, int, str]]] = {}
        for one in (record for some in listed.by_shard.values() for record in some):
            reason = redact_text(f"{one.stage}: {one.reason}")
            if one.key:
                samples[one.url, one.key] = reason
            elif one.byte_end > one.byte_start >= 0:
                ranges.setdefault(one.url, []).append((one.byte_start, one.byte_end, reason))
        return Bad(samples=samples, ranges=ranges)

    return subject.keep("bad of the order", made)


@dataclass(frozen=True, kw_only=True)
class StepPage:
    """A batch, with the links of its page.

    Attributes:
        step: The batch.
        subject: The subject.
        query: The address.
    """

    step: StepShown
    subject: Subject
    query: Query
    _set_names: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return self.step.as_dict()

    def to(self, **changes: object) -> str:
        """Return the address of another step, rank or run; parameters that are not given stay."""
        kept = {name: value for name, value in self.query.given.items() if name not in ("format", "first", "token")}
        return address("/step", **{**kept, **changes})

    @property
    def next(self) -> str | None:
        """The address of the next step, perhaps of the next epoch; None: there is none."""
        at = self.step.at
        if at.num_batches is None or at.batch + 1 < at.num_batches:
            return self.to(epoch=at.epoch, step=at.batch + 1)
        return self.to(epoch=at.epoch + 1, step=0) if at.run.steps.count(at.epoch + 1) else None

    @property
    def previous(self) -> str | None:
        """The address of the previous step; None: the run begins here."""
        at = self.step.at
        if at.batch:
            return self.to(epoch=at.epoch, step=at.batch - 1)
        before = at.run.steps.count(at.epoch - 1) if at.epoch else 0
        return self.to(epoch=at.epoch - 1, step=before - 1) if before else None

    @property
    def ranks(self) -> list[tuple[int, str]]:
        """Ranks to choose from, with their addresses: all, or those near this one."""
        world, rank = self.step.asked.run.world, self.step.asked.rank
        low = max(min(rank - _MOST_RANKS // 2, world - _MOST_RANKS), 0)
        return [(one, self.to(rank=one)) for one in range(low, min(low + _MOST_RANKS, world))]

    @property
    def further(self) -> list[tuple[str, str]]:
        """Links to the rows of the rank that are not shown."""
        step, stop = self.step, self.step.first + len(self.step.rows)
        found = []
        if step.first:
            found.append(("rows before", self.to(first=max(step.first - SHOWN_ROWS, 0) or None)))
        if stop < step.num_rows:
            found.append(("rows behind", self.to(first=stop)))
        return found

    @cached_property
    def names(self) -> dict[str, int]:
        """The sources or groups of the rows shown, with their number of rows, largest first; {}: a single set."""
        names = [row.leaf for row in self.step.rows if row.leaf]
        found = {name: names.count(name) for name in dict.fromkeys(names)}
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def _colours(self) -> Mapping[str, int]:
        """A color per source, the same in all steps."""
        planned: Any = self.step.at.run.planned
        return {name: at % NUM_COLOURS for at, name in enumerate(sorted(planned.names))}

    def colour(self, leaf: str) -> int:
        """Return the number of a source's color."""
        return self._colours.get(leaf, 0)

    @property
    def cells(self) -> list[RowCell]:
        """The rows as cells, lane by lane."""
        return cells_of(self.step.rows, self.colour)

    def bar(self, row: RowShown) -> PackBar:
        """Return the bar of a pack."""
        return pack_bar(row, self.step.rows_each)

    def set_name(self, row: RowShown) -> str:
        """Return the name of the set that holds a row's samples, as other pages name it."""
        if row.leaf not in self._set_names:
            known = [name for name in self.subject.sets if row.leaf == name or row.leaf.startswith(f"{name}/")]
            self._set_names[row.leaf] = max(known, key=len, default="")
        return self._set_names[row.leaf]

    def _sample(self, name: str, number: int) -> str:
        """Return the address of a sample, for the run shown."""
        kept = {name: value for name, value in self.query.given.items() if name in (*OF_THE_RUN, "epoch")}
        return address("/sample", source=name, number=str(number), **kept)

    def sample(self, row: RowShown) -> str:
        """Return the address of a row's sample; of a window, that of its recording."""
        leaf = dict(self.step.at.run.sets.each).get(row.leaf)
        number = leaf.recording_of(row.sample) if hasattr(leaf, "recording_of") else row.sample
        return self._sample(self.set_name(row), number)

    @cached_property
    def _numbers(self) -> dict[tuple[str, int, int], int]:
        """The numbers of all documents in their sets, by set, shard and number there."""
        wanted: dict[str, set[tuple[int, int]]] = {}
        for row in self.step.rows:
            wanted.setdefault(self.set_name(row), set()).update((row.shard_number, one.number) for one in row.documents)
        found: dict[tuple[str, int, int], int] = {}
        for name, places in wanted.items():
            if places:
                shards, numbers = np.array(sorted(places), np.int64).T
                in_set = self.subject.set_of(name).source.numbers_of(shards, numbers).tolist()
                found |= {(name, *place): number for place, number in zip(sorted(places), in_set, strict=True)}
        return found

    def document(self, row: RowShown, at: int) -> str:
        """Return the address of a document of a pack."""
        return self._sample(self.set_name(row), self.document_number(row, at))

    def document_number(self, row: RowShown, at: int) -> int:
        """Return the number of a document of a pack in its set."""
        return self._numbers[self.set_name(row), row.shard_number, row.documents[at].number]

    @property
    def form(self) -> list[tuple[str, str, str]]:
        """Fields of the form: names, labels and values."""
        at, asked, run = self.step.at, self.step.asked, self.step.at.run
        sizes = run.shape.sizes
        shown = str(sizes.at(0)) if sizes.is_constant else ",".join(f"{row}:{size}" for row, size in sizes.steps)
        named = "batch_size" if asked.run.batch_size is not None else "global_batch_size"
        value = self.query.text(named) or shown
        return [
            ("epoch", "epoch", str(at.epoch)),
            ("step", "step", str(at.batch)),
            ("rank", "rank", str(asked.rank)),
            ("world", "of ranks", str(asked.run.world)),
            (named, "rows per rank" if named == "batch_size" else "rows per batch", value),
            ("seed", "seed", str(run.state.order.seed)),
        ]

    @property
    def kept(self) -> list[tuple[str, str]]:
        """Parameters of the address outside the form."""
        in_form = {name for name, _, _ in self.form} | {"format", "first", "token"}
        return [(name, value) for name, value in self.query.given.items() if name not in in_form]


def coming_part(subject: Subject, query: Query, sample: Any) -> ComingPart:
    """Return the steps in which the sample of a page comes, or the problem that prevents finding them."""
    place = sample.place
    try:
        asked = asked_of(query)
        found = comings(runs_of(subject), asked.run, asked.epoch, sample.source, place.shard, place.row)
    except ShardstreamError as error:
        return ComingPart(comings=None, problem=redact_text(str(error)), query=query)
    return ComingPart(comings=found, problem="", query=query)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingPart:
    """The steps in which a sample comes, with their addresses; or the problem that prevents finding them.

    Attributes:
        comings: The steps; None: there is a problem.
        problem: The problem, in words.
        query: The address of the sample's page.
    """

    comings: Comings | None
    problem: str
    query: Query

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {"problem": self.problem} if self.comings is None else self.comings.as_dict()

    def to(self, one: Coming) -> str:
        """Return the address of a step."""
        kept = {name: value for name, value in self.query.given.items() if name in OF_THE_RUN}
        return address("/step", **{**kept, "epoch": one.epoch, "step": one.step, "rank": one.rank})


def step_page(subject: Subject, query: Query) -> StepPage:
    """Return the batch that an address requests; for JSON all rows of the rank, else the rows of a page.

    Raises:
        ConfigError: The address names something that does not exist.
        StateError: The saved state belongs to another set.
    """
    most = None if query.text("format") == "json" else SHOWN_ROWS
    step = step_of(runs_of(subject), asked_of(query), bad=bad_of(subject), most=most)
    return StepPage(step=step, subject=subject, query=query)
