"""Show a batch as a rank gets it: its rows, the contents of packs, and why each row is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shard_tools.look.plan.sets import Described, StepRows
from shard_tools.look.plan.steps import PlannedRun
from shard_tools.look.show.order.explain import DrawnBefore, RowPlace, Why, why_here
from shard_tools.look.show.order.query import Asked
from shard_tools.look.show.order.runs import At, ShownRuns
from streaming.build.batches.bad_file import shown_url
from streaming.order.plan.plan import Plan
from streaming.shards.fetch.read import FetchRange
from streaming.storage import redact

if TYPE_CHECKING:
    from streaming.order.packing.rules import PackRules

NUM_COLOURS = 8
SHOWN_ROWS = 128
"""Rows on a page; further ones are on the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPiece:
    """A piece of a document in a pack.

    Attributes:
        key: Its key; None: unknown.
        number: Its number in the shard.
        start: Its first token in the pack.
        size: Number of its tokens there.
        first: The first of these tokens, in the document.
        whole: Tokens of the document.
        bad: Reason in a list of bad samples; "": it is in none.
    """

    key: str | None
    number: int
    start: int
    size: int
    first: int
    whole: int
    bad: str

    @property
    def words(self) -> str:
        """Its description."""
        name = f"number {self.number}" if self.key is None else self.key
        part = f"tokens {self.first:,} to {self.first + self.size - 1:,} of {self.whole:,}"
        return f"{name}: {f'all {self.size:,} tokens' if self.size == self.whole else part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShown:
    """A row of the batch.

    Attributes:
        number: Its number among the rank's rows.
        sample: Number of the sample in the dataset or source; for a pack, number of the pack.
        key: Key of a sample; None: unknown, or a pack.
        documents: Contents of a pack; (): the row is a sample.
        length: Tokens of a pack, with padding.
        source: Its source in batches; None: there is a single set.
        leaf: Name of its set within the mixture, or of its group; "": there is a single one.
        pass_number: The pass over its source.
        lane: Its lane.
        chunk: Number of its chunk in its source.
        shard: URL of its shard, without secrets.
        shard_number: Number of the shard in its set.
        why: Why it is there, in words.
        bad: Reason in a list of bad samples; "": it is in none.
    """

    number: int
    sample: int
    key: str | None
    documents: tuple[PackPiece, ...]
    length: int
    source: str | None
    leaf: str
    pass_number: int
    lane: int
    chunk: int
    shard: str
    shard_number: int
    why: Why
    bad: str

    @property
    def name(self) -> str:
        """Its name for people."""
        if self.documents:
            return f"pack {self.sample}"
        return f"sample {self.sample}" if self.key is None else self.key

    @property
    def is_bad(self) -> bool:
        """Whether it, or a document in it, is in a list of bad samples."""
        return bool(self.bad) or any(one.bad for one in self.documents)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        named = {"keys": [one.key for one in self.documents]} if self.documents else {"key": self.key}
        return {**named, "source": self.source, "pass": self.pass_number, "lane": self.lane, "chunk": self.chunk}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShown:
    """A batch as a rank gets it.

    Attributes:
        asked: The request.
        at: The step.
        size: Rows of the batch over all ranks.
        share: The rank's part of these rows, sorted by lane: the first, and one past the last.
        first: Number of the first row described.
        rows: The rank's rows that are described.
        rows_each: Rows of the batch that each pack fills; 1 for samples.
        padding: Number of padding rows after the rank's own, which are not valid.
    """

    asked: Asked
    at: At
    size: int
    share: tuple[int, int]
    first: int
    rows: tuple[RowShown, ...]
    rows_each: int
    padding: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of the rank, described or not."""
        return self.share[1] - self.share[0]

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        padding = {"padding": self.padding} if self.padding else {}
        return {"rank": self.asked.rank, "rows": [row.as_dict() for row in self.rows], **padding}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """Reasons of bad samples, from lists.

    Attributes:
        samples: The reason, by shard (as lists show it) and key.
        ranges: For records without a key: byte ranges of a shard, and the reason.
    """

    samples: Mapping[tuple[str, str], str] = field(default_factory=dict)
    ranges: Mapping[str, Sequence[tuple[int, int, str]]] = field(default_factory=dict)

    def why(self, shard: str, key: str | None, wanted: FetchRange) -> str:
        """Return why a sample of a chunk is bad; "": it is in no list."""
        for start, stop, reason in self.ranges.get(shard, ()):
            if start < wanted.byte_end and stop > wanted.byte_start:
                return f"its chunk, {reason}"
        return self.samples.get((shard, key or ""), "") if self.samples else ""


def step_of(runs: ShownRuns, asked: Asked, *, bad: Bad | None = None, most: int | None = None) -> StepShown:
    """Return the batch that an address names.

    Args:
        runs: The runs of the set.
        asked: The address.
        bad: The samples in lists of bad samples.
        most: Maximum number of rows to describe, from ``asked.first`` on; None: all.

    Raises:
        ConfigError: There is no such step, or no such run.
        StateError: The state belongs to another set; or the step drew from a source that no longer exists.
    """
    at = runs.at(asked)
    plan, number = at.run.plan_of(at.step)
    rows = at.run.rows_of(at.step, asked.rank)
    first = 0 if most is None else min(asked.first, max(len(rows.steps) - 1, 0))
    some = rows.where(slice(first, None if most is None else first + most))
    begin = plan.row_of(number)
    stop = min(begin + plan.global_batch_size, (plan.epoch + 1) * plan.num_samples)
    among = plan.among(at.run.num_ranks)
    share = among.shape.share(stop - begin, asked.rank)
    drawn = DrawnBefore.before(at.run, begin)
    made = _Described(at.run, plan, some, drawn, bad or Bad(), (stop - begin, share), asked.rank)
    found = [made.row(row, first + row, one) for row, one in enumerate(at.run.sets.described(some))]
    return StepShown(
        asked=asked, at=at, size=stop - begin, share=share, first=first, rows=tuple(found),
        rows_each=at.run.rows_each(at.step), padding=among.batch_size(number, asked.rank) - len(rows.steps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Described:
    """The common facts of the rows of a page."""

    run: PlannedRun
    plan: Plan
    rows: StepRows
    drawn: DrawnBefore | None
    bad: Bad
    batch: tuple[int, tuple[int, int]]
    rank: int

    def row(self, at: int, number: int, one: Described) -> RowShown:
        """Return a row: the ``at``-th of these, with its description."""
        rows, rules = self.rows, self.run.sets.pack_rules
        size, share = self.batch
        pass_number = int(rows.passes[at]) if self.drawn is None else int(self.drawn.passes[one.leaf])
        place = RowPlace(
            rank=self.rank, num_ranks=self.run.num_ranks, size=size, share=share, number=number,
            lane=int(rows.lanes[at]), place=int(rows.places[at]), position=int(rows.positions[at]),
            offset=int(rows.offsets[at]), chunk_id=int(rows.chunk_ids[at]), pass_number=pass_number,
        )  # fmt: skip
        where, chunk = shown_url(one.shard), self.run.planned.chunk(place.chunk_id)
        documents = () if rules is None else self._documents(one, where, rules, chunk)
        bad = "" if documents else self.bad.why(where, one.keys[0], chunk)
        return RowShown(
            number=number, sample=one.number, key=None if documents else one.keys[0], documents=documents,
            length=_length(documents, rules), source=one.source, leaf=one.leaf, pass_number=pass_number,
            lane=place.lane, chunk=one.chunk, shard=redact(one.shard), shard_number=one.shard_number, bad=bad,
            why=why_here(self.run, self.plan, place, one, self.drawn),
        )  # fmt: skip

    def _documents(
        self, one: Described, where: str, rules: PackRules, chunk: FetchRange
    ) -> tuple[PackPiece, ...]:  # fmt: skip
        """Return the contents of a pack: end to end; in a padded pack, each document is as long as the longest."""
        found, start = [], 0
        longest = max((stop - first for first, stop, _ in one.pieces), default=0)
        for key, number, piece in zip(one.keys, one.samples, one.pieces, strict=True):
            first, stop, whole = piece
            made = PackPiece(
                key=key, number=number, start=start, size=stop - first, first=first, whole=whole,
                bad=self.bad.why(where, key, chunk),
            )  # fmt: skip
            found.append(made)
            start += longest if rules.padded else -(-made.size // rules.multiple) * rules.multiple
        return tuple(found)


def _length(documents: tuple[PackPiece, ...], rules: PackRules | None) -> int:
    """Return the tokens of a pack, with padding; 0 for a sample."""
    if rules is None:
        return 0
    if rules.padded:
        return len(documents) * max((one.size for one in documents), default=0)
    return rules.length
