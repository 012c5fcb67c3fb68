"""Present the totals for people, programs and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shard_tools.look.stats.kinds import UNKNOWN, kind_of
from shard_tools.look.stats.sketches import Top
from shard_tools.look.stats.surprises import Surprise, content_field
from shard_tools.look.stats.totals import Classes, ColumnTotals, FieldTotals, Totals
from streaming.common.arguments import counted

_TOP = 20  # reported values of a column
_CLASSES = 1000  # reported values of a field or column of classes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatsReport:
    """The contents of a set.

    Attributes:
        url: The set.
        num_samples: Number of its samples.
        num_bytes: Bytes of its shards; of a filtered set, bytes of the samples that are left.
        num_shards: Shards that hold these samples.
        num_seen_shards: Shards whose samples are in the totals.
        has_seen_all: Whether these are all that hold samples.
        num_chunks: Chunks that hold these samples.
        totals: The totals.
        kinds: Kind of each field.
        found: Surprises for training.
        seed: Seed of the choice of samples to read.
        selected: The filter in words; "": all samples.
    """

    url: str
    num_samples: int
    num_bytes: int
    num_shards: int
    num_seen_shards: int
    has_seen_all: bool
    num_chunks: int
    totals: Totals
    kinds: Mapping[str, str]
    found: tuple[Surprise, ...]
    seed: int
    selected: str

    @property
    def num_seen(self) -> int:
        """Number of samples in the totals; all, unless a page has just begun, or the set is very large."""
        return self.totals.num_samples

    @property
    def supervised(self) -> tuple[int, int] | None:
        """Number of supervised tokens, and of tokens, in the masks that were read; None: no masks were read."""
        read = [one.numbers for one in self.totals.fields.values() if "supervised" in one.numbers]
        if not read:
            return None
        return int(sum(one["supervised"].total for one in read)), int(sum(one["tokens"].total for one in read))

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens in the samples seen; None: no field holds tokens."""
        fields = [one.numbers for one in self.totals.fields.values() if "supervised" not in one.numbers]
        tokens = [one["tokens"].total for one in fields if "tokens" in one]
        return int(sum(tokens)) if tokens else None

    @property
    def compared(self) -> str | None:
        """The field whose contents were compared; None: no field was compared."""
        name = content_field(self.totals, self.kinds)
        return name if name and self.totals.fields[name].repeats.num else None

    @property
    def read_words(self) -> str:
        """The number of samples read, in words."""
        if not self.has_seen_all:
            return (
                f"{self.num_seen:,} of {counted(self.num_samples, 'sample')} by the index, {self.totals.num_read:,} of "
                f"them by their bytes, in {self.num_seen_shards:,} of {self.num_shards:,} shards spread over the set"
            )
        if self.totals.num_read >= self.num_samples:
            return "all samples"
        return (
            f"{self.totals.num_read:,} of {counted(self.num_samples, 'sample')}, in runs of four spread over the whole "
            f"set (seed {self.seed}); sizes, keys and columns are those of all; --all reads all"
        )

    @property
    def classes(self) -> Classes:
        """The classes, each once."""
        return self.totals.classes(self.kinds)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        compared, supervised = self.compared, self.supervised
        classes = self.classes.once
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
                "seen": self.num_seen,
                "seen_shards": self.num_seen_shards,
            },
            "fields": {name: _field(one, self.kinds[name]) for name, one in sorted(self.totals.fields.items())},
            "classes": {name: top.told(_CLASSES) for name, top in classes.items()},
            "columns": {
                name: _column(one, self.num_seen) for name, one in sorted(self.totals.columns.items())
            },
            "tokens": self.num_tokens,
            "supervised": None if supervised is None else {"tokens": supervised[0], "of": supervised[1]},
            "duplicates": {
                "keys": self.totals.keys.num_again,
                "contents": self.totals.fields[compared].repeats.num_again if compared else None,
            },
            "surprises": [one.as_dict() for one in self.found],
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
