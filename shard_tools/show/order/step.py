"""Show a batch as a rank gets it: its rows, what packs are made of, and why each row is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shard_tools.plan.steps import Described, PlannedRun, Rows
from shard_tools.show.order.asked import Asked
from shard_tools.show.order.runs import At, Runs
from shard_tools.show.order.why import Place, why_here
from streaming.batches.bad_file import shown_url
from streaming.plan.plan import Plan

SHOWN_ROWS = 128
"""Rows on a page; further ones are on the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A piece of a document in a pack.

    Attributes:
        key: Its key; None: unknown.
        number: Its number in the shard.
        start: Where it begins in the pack, in tokens.
        size: Its tokens there.
        first: The first of them, in the document.
        whole: Tokens of the document.
        colour: Number of its colour, so that neighbours differ.
        is_bad: A list names it.
    """

    key: str | None
    number: int
    start: int
    size: int
    first: int
    whole: int
    colour: int
    is_bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the batch.

    Attributes:
        number: Its number among the rank's rows.
        sample: Number of the sample in the dataset or source; of a pack, that of the pack.
        key: Key of a sample; None: unknown, or a pack.
        documents: What a pack is made of; (): it is a sample.
        length: Tokens of a pack, with padding.
        source: Its source in batches; None: there is one set.
        leaf: Name of its set among those of the mixture, or of its group; "": there is one.
        pass_number: The pass over its source.
        lane: Its lane.
        chunk: Number of its chunk in its source.
        shard: URL of its shard.
        why: Why it is there, in words.
        bad: Why a list names it; "": none does.
    """

    number: int
    sample: int
    key: str | None
    documents: tuple[Document, ...]
    length: int
    source: str | None
    leaf: str
    pass_number: int
    lane: int
    chunk: int
    shard: str
    why: tuple[str, ...]
    bad: str

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        named = {"keys": [one.key for one in self.documents]} if self.length else {"key": self.key}
        return {**named, "source": self.source, "pass": self.pass_number, "lane": self.lane, "chunk": self.chunk}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A batch as a rank gets it.

    Attributes:
        asked: What was asked.
        at: The step.
        size: Rows of the batch over all ranks.
        share: The rank's part of them, sorted by lane: the first, and one past the last.
        first: Number of the first row described.
        rows: The rank's rows that are described.
        rows_each: Rows of the batch that each pack makes; of samples, 1.
    """

    asked: Asked
    at: At
    size: int
    share: tuple[int, int]
    first: int
    rows: tuple[Row, ...]
    rows_each: int

    @property
    def num_rows(self) -> int:
        """Rows of the rank, described or not."""
        return self.share[1] - self.share[0]

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        return {"rank": self.asked.rank, "rows": [row.as_dict() for row in self.rows]}


Bad = Mapping[tuple[str, str], str]
"""Why a sample is bad, by its shard (as lists show it) and key."""


def step_of(runs: Runs, asked: Asked, *, bad: Bad | None = None, most: int | None = None) -> Step:
    """Return the batch that an address asks for.

    Args:
        runs: The runs of the set.
        asked: The address.
        bad: The samples that lists name.
        most: Describe so many rows, from ``asked.first`` on; None: all.

    Raises:
        ConfigError: There is no such step, or no such run.
        StateError: The state belongs to another set; or the step drew from a source that is gone.
    """
    at = runs.at(asked)
    plan, number = at.run.plan_of(at.step)
    rows = at.run.rows_of(at.step, asked.rank)
    first = 0 if most is None else min(asked.first, max(len(rows.steps) - 1, 0))
    some = rows.where(slice(first, None if most is None else first + most))
    begin = plan.row_of(number)
    stop = min(begin + plan.global_batch_size, (plan.epoch + 1) * plan.num_samples)
    share = plan.among(at.run.num_ranks).shape.share(stop - begin, asked.rank)
    made = _Rows(at.run, plan, some, Drawn.before(at.run, plan, begin), bad or {}, (stop - begin, share), asked.rank)
    found = [made.row(row, first + row, one) for row, one in enumerate(at.run.described(some))]
    return Step(
        asked=asked, at=at, size=stop - begin, share=share, first=first, rows=tuple(found),
        rows_each=at.run.rows_each(at.step),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a run has drawn of each source before a row.

    Attributes:
        samples: Samples, by the name of the leaf.
        passes: Passes over the source, with fractions.
        shares: Its share of the rows that follow, from 0 to 1.
    """

    samples: Mapping[str, int]
    passes: Mapping[str, float]
    shares: Mapping[str, float]

    @classmethod
    def before(cls, run: PlannedRun, plan: Plan, row: int) -> Drawn | None:
        """Count, by the orders and the ledger of the run; None: there is one set."""
        if run.state.ledger is None:
            return None
        counts = run.drawn_before(plan, row)
        forecast = run.mixture.drawing.forecast(run.state.ledger)
        passes = {name: one.read(counts[name]) for name, one in forecast.passes.items()}
        drawn = forecast.drawn(row, 1)
        return cls(samples=counts, passes=passes, shares=drawn)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What rows of a page have in common."""

    run: PlannedRun
    plan: Plan
    rows: Rows
    drawn: Drawn | None
    bad: Bad
    batch: tuple[int, tuple[int, int]]
    rank: int

    def row(self, at: int, number: int, one: Described) -> Row:
        """Return a row: the ``at``-th of these, by its description."""
        rows, is_pack = self.rows, not self.run.has_samples
        size, share = self.batch
        pass_number = int(rows.passes[at]) if self.drawn is None else int(self.drawn.passes[one.leaf])
        place = Place(
            rank=self.rank, num_ranks=self.run.num_ranks, size=size, share=share, number=number,
            lane=int(rows.lanes[at]), place=int(rows.places[at]), position=int(rows.positions[at]),
            offset=int(rows.offsets[at]), chunk_id=int(rows.chunk_ids[at]), pass_number=pass_number,
        )  # fmt: skip
        where = shown_url(one.shard)
        documents = self._documents(one, where) if is_pack else ()
        bad = "" if is_pack else self._why_bad(where, one.keys[0])
        return Row(
            number=number, sample=one.number, key=None if is_pack else one.keys[0], documents=documents,
            length=self._length(documents) if is_pack else 0, source=one.source, leaf=one.leaf, pass_number=pass_number,
            lane=place.lane, chunk=one.chunk, shard=one.shard, bad=bad,
            why=why_here(self.run, self.plan, place, one, self.drawn),
        )  # fmt: skip

    def _why_bad(self, where: str, key: str | None) -> str:
        return "" if key is None else self.bad.get((where, key), "")

    def _documents(self, one: Described, where: str) -> tuple[Document, ...]:
        found, start = [], 0
        multiple = self.run.pack_multiple
        for place, (key, number, piece) in enumerate(zip(one.keys, one.samples, one.pieces, strict=True)):
            first, stop, whole = piece
            made = Document(
                key=key, number=number, start=start, size=stop - first, first=first, whole=whole, colour=place % 8,
                is_bad=bool(self._why_bad(where, key)),
            )  # fmt: skip
            found.append(made)
            start += -(-made.size // multiple) * multiple
        return tuple(found)

    def _length(self, documents: tuple[Document, ...]) -> int:
        """Return the tokens of a pack, with padding."""
        end = max((one.start + one.size for one in documents), default=0)
        return max(self.run.pack_length, end, 1)


def row_counts(step: Step) -> dict[str, int]:
    """Count the described rows of each source or group, most first; {}: there is one set."""
    names = [row.leaf for row in step.rows if row.leaf]
    found = {name: names.count(name) for name in dict.fromkeys(names)}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def lanes_of(rows: Rows) -> tuple[int, int]:
    """Return the first and the last lane of some rows."""
    lanes = np.unique(rows.lanes)
    return (int(lanes[0]), int(lanes[-1])) if len(lanes) else (0, 0)


def json_of(step: Step) -> dict[str, Any]:
    """Return the JSON-able form of a step."""
    return step.as_dict()
