"""Present the totals for people, programs and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shard_tools.look.stats.kinds import UNKNOWN, is_class, kind_of
from shard_tools.look.stats.sketches import Top
from shard_tools.look.stats.surprises import Surprise, content_field
from shard_tools.look.stats.totals import ColumnTotals, FieldTotals, Totals
from streaming.common.arguments import counted
from streaming.storage import redact_text

_TOP = 20  # reported values of a column
_CLASSES = 1000  # reported values of a field or column of classes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatsReport:
    """The contents of a set.

    Attributes:
        url: The set.
        num_bytes: Bytes of its shards; of a filtered set, bytes of the samples that are left.
        num_shards: Shards that hold these samples.
        num_chunks: Chunks that hold these samples.
        totals: The totals.
        kinds: Kind of each field.
        found: Surprises for training.
        seed: Seed of the choice of samples to read.
        selected: The filter in words; "": all samples.
    """

    url: str
    num_bytes: int
    num_shards: int
    num_chunks: int
    totals: Totals
    kinds: Mapping[str, str]
    found: tuple[Surprise, ...]
    seed: int
    selected: str

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.totals.num_samples

    @property
    def compared(self) -> str | None:
        """The field whose contents were compared; None: no field was compared."""
        name = content_field(self.totals, self.kinds)
        return name if name and self.totals.fields[name].repeats.num else None

    @property
    def read_words(self) -> str:
        """The number of samples read, in words."""
        if self.totals.num_read >= self.num_samples:
            return "all samples"
        return (
            f"{self.totals.num_read:,} of {counted(self.num_samples, 'sample')}, in runs of four spread over the whole "
            f"set (seed {self.seed}); sizes, keys and columns are those of all; --all reads all"
        )

    def classes(self) -> dict[str, Top]:
        """Return the counts of classes: by field, and by column; columns cover all samples."""
        found = {
            name: one.words["value"] for name, one in self.totals.fields.items()
            if self.kinds[name] == "class" and "value" in one.words
        }  # fmt: skip
        return found | {name: one.top for name, one in self.totals.columns.items() if is_class(name)}

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        compared = self.compared
        classes = self.classes()
        return {
            "samples": self.num_samples,
            "bytes": self.num_bytes,
            "shards": self.num_shards,
            "chunks": self.num_chunks,
            "read": {
                "samples": self.totals.num_read,
                "bytes": self.totals.num_bytes_read,
                "seed": self.seed,
                "all": self.totals.num_read >= self.num_samples,
            },
            "fields": {name: _field(one, self.kinds[name]) for name, one in sorted(self.totals.fields.items())},
            "classes": {name: top.told(_CLASSES) for name, top in classes.items()},
            "columns": {
                name: _column(one, self.num_samples) for name, one in sorted(self.totals.columns.items())
            },
            "duplicates": {
                "keys": self.totals.keys.num_again,
                "contents": self.totals.fields[compared].repeats.num_again if compared else None,
            },
            "surprises": [
                {name: redact_text(text) for name, text in one.as_dict().items()} for one in self.found
            ],
        }  # fmt: skip


def kinds_of(totals: Totals) -> dict[str, str]:
    """Return the kind of each field: by its name, or else the most frequent kind among its values."""
    found = {name: kind_of(name) for name in totals.fields}
    for name, kind in found.items():
        seen = totals.fields[name].words.get("kind", Top()).most_common(1)
        if kind == UNKNOWN and seen:
            found[name] = str(seen[0][0])
    return found


def _field(one: FieldTotals, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"samples": one.num, "bytes": one.sizes.told(), "kind": kind, "empty": one.num_empty}
    found |= {"read": one.num_read, "broken": one.num_broken}
    found |= {name: spread.told() for name, spread in sorted(one.numbers.items())}
    return found | {name: top.told(_TOP) for name, top in one.shown_words()}


def _column(one: ColumnTotals, num_samples: int) -> dict[str, Any]:
    ends = one.numbers.told() if one.numbers.num else {"min": one.least, "max": one.most}
    facts = {"type": one.type, "late": one.is_late, "missing": num_samples - one.num, **ends}
    return facts | one.top.told(_TOP)
