"""Summarize any number of values in bounded memory: quantiles, most frequent values, number of repeats.

Each summary takes arrays, merges with another of its kind, and can be written as JSON and read back. It is exact up to
its capacity; beyond that it says that it estimates.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streaming.types import Int64Array

Floats: TypeAlias = "npt.NDArray[np.float64]"
Word: TypeAlias = "str | int | float | bool"

VALUES = 1 << 16
"""Values that a ``Distribution`` keeps, 1 MiB; with more, quantile ranks are off by 0.2 % (standard deviation)."""
WORDS = 4096
"""Distinct values that a ``Top`` counts; of ``n`` values, one that occurs more than ``n / 4096`` times is kept."""
WORD_CHARACTERS = 128
"""Longer texts are compared by their beginning only."""
HASHES = 1 << 21
"""Distinct hashes that ``Repeats`` keeps: 64 MiB, and four times as much while counting."""
_BINS = 24
_WIDE = 100  # times the smallest number
_HASH_BITS = 63


def is_wide(low: float, high: float) -> bool:
    """Return whether a range is divided by equal ratios, since almost all values might share one of equal parts."""
    return low > 0 and high / low > _WIDE


@dataclass(slots=True)
class Distribution:
    """Numbers: count, sum, range and quantiles; missing and infinite ones are counted separately.

    Beyond ``VALUES`` numbers, quantiles are those of a uniform sample: each number gets a random priority, and the
    lowest priorities are kept, so that summaries can be merged in any order.
    """

    num: int = 0
    total: float = 0
    least: float | None = None
    most: float | None = None
    num_not_finite: int = 0
    _priorities: Floats = field(default_factory=lambda: np.empty(0))
    _values: Floats = field(default_factory=lambda: np.empty(0))

    def add(self, values: npt.NDArray[Any], draw: np.random.Generator) -> None:
        """Add numbers; ``draw`` gives their priorities."""
        finite = values if values.dtype.kind in "iu" else values[np.isfinite(values)]
        self.num_not_finite += len(values) - len(finite)
        if len(finite):
            low, high, total = finite.min().item(), finite.max().item(), finite.sum().item()
            self._join(len(finite), total, low, high, draw.random(len(finite)), finite.astype(np.float64))

    def merge(self, other: Distribution) -> None:
        """Add all numbers of another summary."""
        self.num_not_finite += other.num_not_finite
        if other.least is not None and other.most is not None:
            self._join(other.num, other.total, other.least, other.most, other._priorities, other._values)

    def _join(self, num: int, total: float, least: float, most: float, priorities: Floats, values: Floats) -> None:
        self.num += num
        self.total += total
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)
        self._priorities = np.concatenate((self._priorities, priorities))
        self._values = np.concatenate((self._values, values))
        if len(self._values) > VALUES:
            kept = np.argpartition(self._priorities, VALUES)[:VALUES]
            self._priorities, self._values = self._priorities[kept], self._values[kept]

    def quantile(self, share: float) -> float | None:
        """Return the number below which this share of the numbers lies; None without numbers."""
        return _plain(float(np.quantile(self._values, share))) if self.num else None

    def told(self) -> dict[str, float | None]:
        """Return the JSON-able summary."""
        mean = self.total / self.num if self.num else None
        ends = (None if one is None else _plain(one) for one in (self.least, self.most))
        return {"min": next(ends), "p50": self.quantile(0.5), "max": next(ends), "mean": mean}

    @property
    def is_wide(self) -> bool:
        """Whether the bins of its histogram have equal ratios."""
        return self.least is not None and self.most is not None and is_wide(self.least, self.most)

    def bins(self) -> list[tuple[float, float, float]]:
        """Return a histogram: (from, to, share) per bin, with bins of equal width, or of equal ratio for a wide range.

        It has up to ``_BINS`` bins; if there are few distinct whole numbers, each gets a bin.
        """
        if not self.num or self.least is None or self.most is None:
            return []
        low, high = self.least, self.most
        if low == high:
            return [(low, high, 1.0)]
        whole = bool((self._values == np.floor(self._values)).all())
        if whole and high - low < _BINS:
            edges = np.arange(low, high + 2) - 0.5
        elif is_wide(low, high):
            edges = np.geomspace(low, high, _BINS + 1)
        else:
            edges = np.linspace(low, high, _BINS + 1)
        edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
        counts, _ = np.histogram(self._values, edges)
        shares = counts / len(self._values)
        return [(float(a), float(b), float(c)) for a, b, c in zip(edges, edges[1:], shares, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        """Return the complete state, JSON-able."""
        found = {name: getattr(self, name) for name in ("num", "total", "least", "most", "num_not_finite")}
        return {**found, "priorities": _packed(self._priorities), "values": _packed(self._values)}

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Distribution:
        """Restore from the result of :meth:`as_dict`."""
        given = {name: content[name] for name in ("num", "total", "least", "most", "num_not_finite")}
        priorities, values = (_unpacked(content[name], np.float64) for name in ("priorities", "values"))
        return cls(**given, _priorities=priorities, _values=values)


@dataclass(slots=True)
class Top:
    """Values and their counts, most frequent first (Misra and Gries, 1982).

    With more than ``WORDS`` distinct values, counts are too low by at most ``lost``, and rarer values are dropped.
    """

    num: int = 0
    lost: int = 0
    counts: dict[Word, int] = field(default_factory=dict)

    def add(self, values: pa.Array) -> None:
        """Add values other than null; texts longer than ``WORD_CHARACTERS`` are cut."""
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            values = pc.utf8_slice_codeunits(values, 0, WORD_CHARACTERS)
        found = pc.value_counts(values)
        words, counts = found.field("values"), found.field("counts").to_numpy()
        self.num += len(values)
        if len(counts) > WORDS:  # before values become Python objects
            less = int(np.partition(counts, -WORDS - 1)[-WORDS - 1])
            words, counts = words.filter(pa.array(counts > less)), counts[counts > less] - less
            self.lost += less
        for word, count in zip(words.to_pylist(), counts.tolist(), strict=True):
            self.counts[word] = self.counts.get(word, 0) + count
        self._cut()

    def count(self, words: Iterable[Word]) -> None:
        """Count words, one by one."""
        for word, count in Counter(words).items():
            self.counts[word] = self.counts.get(word, 0) + count
            self.num += count
        self._cut()

    def merge(self, other: Top) -> None:
        """Add all values of another summary."""
        for value, count in other.counts.items():
            self.counts[value] = self.counts.get(value, 0) + count
        self.num += other.num
        self.lost += other.lost
        self._cut()

    def _cut(self) -> None:
        if len(self.counts) > WORDS:
            less = sorted(self.counts.values(), reverse=True)[WORDS]
            self.lost += less
            self.counts = {value: count - less for value, count in self.counts.items() if count > less}

    @property
    def is_exact(self) -> bool:
        """Whether all values are counted exactly."""
        return not self.lost

    def most_common(self, num: int | None = None) -> list[tuple[Word, int]]:
        """Return (value, count) pairs, most frequent first; ties are ordered by value."""
        return sorted(self.counts.items(), key=lambda item: (-item[1], str(item[0])))[:num]

    def told(self, num: int | None = None) -> dict[str, Any]:
        """Return the JSON-able summary; ``distinct`` is null if there are more values than are counted."""
        top = [[value, count] for value, count in self.most_common(num)]
        return {"distinct": len(self.counts) if self.is_exact else None, "top": top}

    def agreeing(self) -> float:
        """Return the probability that two values drawn at random agree."""
        return sum((count / self.num) ** 2 for count in self.counts.values()) if self.num else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the complete state, JSON-able."""
        return {"num": self.num, "lost": self.lost, "counts": [[value, count] for value, count in self.counts.items()]}

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Top:
        """Restore from the result of :meth:`as_dict`."""
        return cls(content["num"], content["lost"], dict(content["counts"]))


@dataclass(slots=True)
class WordPairs:
    """Pairs of words that come together, as long as each word has one partner: two spellings of the same thing."""

    pairs: dict[str, str] = field(default_factory=dict)
    is_one_to_one: bool = True

    def add(self, found: Iterable[tuple[str, str]]) -> None:
        """Add pairs."""
        if not self.is_one_to_one:
            return
        joined = {*self.pairs.items(), *found}
        firsts, seconds = {first for first, _ in joined}, {second for _, second in joined}
        self.is_one_to_one = len(firsts) == len(seconds) == len(joined) <= WORDS
        self.pairs = dict(joined) if self.is_one_to_one else {}

    def merge(self, other: WordPairs) -> None:
        """Add all pairs of another summary."""
        self.is_one_to_one &= other.is_one_to_one
        self.add(other.pairs.items())

    @property
    def are_same(self) -> bool:
        """Whether there are pairs, and each word has one partner."""
        return self.is_one_to_one and bool(self.pairs)

    def as_dict(self) -> dict[str, Any]:
        """Return the complete state, JSON-able."""
        return {"pairs": sorted(self.pairs.items()), "is_one_to_one": self.is_one_to_one}

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> WordPairs:
        """Restore from the result of :meth:`as_dict`."""
        return cls(dict(content["pairs"]), content["is_one_to_one"])


@dataclass(slots=True)
class Repeats:
    """Count repeated hashes of 63 bits, and note the first and the last place of each.

    Beyond ``HASHES`` distinct hashes, only those below a bound are kept, and the bound is halved as needed (Gibbons,
    2001). The result is a sample in which each value comes with all its repetitions.
    """

    num: int = 0
    level: int = 0
    # int64 [4, n]: hashes, ascending; how often each occurs; its first place; its last.
    _kept: Int64Array = field(default_factory=lambda: np.empty((4, 0), np.int64))
    _waiting: list[Int64Array] = field(default_factory=list)
    _num_waiting: int = 0

    def add(self, hashes: Int64Array, places: Int64Array) -> None:
        """Add hashes from 0 to 2**63 - 1, with numbers that say where each comes from."""
        self.num += len(hashes)
        self._put(np.stack((hashes, np.ones(len(hashes), np.int64), places, places)))

    def merge(self, other: Repeats) -> None:
        """Add all hashes of another summary."""
        other._count()
        self.num += other.num
        self.level = max(self.level, other.level)
        self._put(other._kept)

    def _put(self, found: Int64Array) -> None:
        kept = found[:, self._is_kept(found[0])]
        self._waiting.append(kept)
        self._num_waiting += kept.shape[1]
        if self._num_waiting > max(self._kept.shape[1] // 2, HASHES // 16):
            self._count()

    def _is_kept(self, hashes: Int64Array) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = hashes >> (_HASH_BITS - self.level) == 0 if self.level else hashes >= 0
        return found

    def _count(self) -> None:
        """Join the waiting hashes, and halve the bound while there are too many."""
        if not self._waiting:
            return
        found = np.concatenate((self._kept, *self._waiting), axis=1)
        self._waiting, self._num_waiting = [], 0
        found = found[:, np.argsort(found[0], kind="stable")]
        begins = np.flatnonzero(np.diff(found[0], prepend=-1))  # of each hash
        if begins.size:
            counts = np.add.reduceat(found[1], begins)
            firsts, lasts = np.minimum.reduceat(found[2], begins), np.maximum.reduceat(found[3], begins)
            found = np.stack((found[0, begins], counts, firsts, lasts))
        while True:
            found = found[:, self._is_kept(found[0])]
            if found.shape[1] <= HASHES:
                break
            self.level += 1
        self._kept = found

    @property
    def is_exact(self) -> bool:
        """Whether all hashes were kept."""
        return not self.level

    @property
    def num_again(self) -> int:
        """Number of values that occurred before; an estimate beyond the capacity."""
        self._count()
        return int((self._kept[1] - 1).sum()) << self.level

    def pairs(self, most: int) -> list[tuple[int, int]]:
        """Return the first and the last place of repeated values, those that come first, at most ``most`` pairs."""
        self._count()
        again = self._kept[2:, self._kept[1] > 1]
        order = np.argsort(again[0], kind="stable")[:most]
        return [(first, last) for first, last in again[:, order].T.tolist()]

    def as_dict(self) -> dict[str, Any]:
        """Return the complete state, JSON-able."""
        self._count()
        return {"num": self.num, "level": self.level, "kept": [_packed(row) for row in self._kept]}

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Repeats:
        """Restore from the result of :meth:`as_dict`."""
        kept = np.stack([_unpacked(row, np.int64) for row in content["kept"]])
        return cls(content["num"], content["level"], kept)


def _plain(number: float) -> float:
    """Return whole numbers as int, for JSON."""
    return int(number) if float(number).is_integer() else number


def _packed(values: npt.NDArray[Any]) -> str:
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str, dtype: type[Any]) -> npt.NDArray[Any]:
    data = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)
