"""Sum up how packed sets use their documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from shard_tools.look.plan.sources import sets_of
from shard_tools.running.report import Report
from streaming.common.arguments import format_bytes
from streaming.order.plan.sizes import Sizes

if TYPE_CHECKING:
    from streaming.sets.sources.packs import PackCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTotals(Report):
    """The packs of a packed set, or of all sources of a mixture, which share the same rules.

    Attributes:
        length: Tokens per pack, or the token budget of a padded one.
        padded: Packs are batches of documents of similar length.
        unit: Unit of lengths: ``"tokens"``, or the column that measures whole samples.
        packs: Number of packs.
        rows: If rows grow over a run, one entry per phase: its first row, tokens per row, and rows per global batch.
        counts: Counts of used and dropped documents.
    """

    length: int
    padded: bool
    unit: str
    packs: int
    counts: PackCounts
    rows: tuple[Mapping[str, int], ...] = ()

    @classmethod
    def of(cls, planned: Any, sizes: Sizes) -> PackTotals:
        """Sum up all sets of a packed dataset, for global batches of these sizes."""
        sets, items = [one for _, one in sets_of(planned)], planned.items
        changes = sorted({row for row, _ in (*items.changes, *sizes.steps)}) if items.changes else []
        each = {row: items.rows_each(row) for row in changes}
        return cls(
            rows=tuple(
                {"from": row, "length": sets[0].rules.length // count, "rows": count * sizes.at(row)}
                for row, count in each.items()
            ),
            length=sets[0].rules.length, padded=sets[0].rules.padded, unit=sets[0].unit,
            packs=sum(one.num_readable for one in sets),
            counts=reduce(add, (one.counts for one in sets)),
        )  # fmt: skip

    @property
    def fill(self) -> float:
        """Fraction of all places that hold tokens, 0 to 1."""
        return self.counts.packed / self.counts.places

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form, with the counts merged in."""
        found = {**asdict(self), "fill": round(self.fill, 3)}
        rows = found.pop("rows")
        return {**found, **found.pop("counts"), **({"rows": rows} if rows else {})}

    @property
    def rows_in_words(self) -> str:
        """Describe the rows of a global batch by row of the run; "" if all are as long as a pack."""
        return ", ".join(
            f"{one['rows']:,} of {one['length']:,} {self.unit} from row {one['from']:,} on" for one in self.rows
        )

    def warnings(self, sizes: Mapping[int, int], num_ranks: int) -> list[str]:
        """Return why training would refuse global batches of these sizes, by row."""
        most = max(sizes.values())
        if not self.padded or most <= num_ranks:
            return []
        return [
            (
                f"a padded pack is already a batch; a rank gets up to {-(-most // num_ranks)} of them: "
                "training would refuse this without collate_fn=list; use --batch-size 1"
            )
        ]

    def in_words(self, sample_bytes: float) -> str:
        """Describe the packs in one line, given the mean size of their samples."""
        left_out = {name: getattr(self.counts, name) for name in ("split", "truncated", "dropped", "empty")}
        dropped = "".join(f", {count:,} {what}" for what, count in left_out.items() if count)
        kind = "padded packs of at most" if self.padded else "packs of"
        what = "samples" if self.unit != "tokens" else "documents"
        return (
            f"{self.packs:,} {kind} {self.length:,} {self.unit} ({format_bytes(sample_bytes)}), "
            f"{self.fill:.1%} filled, of {self.counts.documents:,} {what}{dropped}"
        )
