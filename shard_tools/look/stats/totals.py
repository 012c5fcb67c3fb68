"""Sum up the facts of samples: sizes, columns, keys, and contents. Totals of shards can be merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shard_tools.look.stats.kinds import is_class
from shard_tools.look.stats.sketches import WORD_CHARACTERS, Distribution, Repeats, Top, Word, WordPairs
from streaming.common.arguments import some_names
from streaming.shards.index.columns import stable_hash
from streaming.shards.index.keys import key_array
from streaming.shards.index.where import is_comparable
from streaming.types import Int64Array

EXAMPLES = 3
_WORDS_SHOWN = 16  # words of a fact that have an example
_ROW_BITS = 32
_SHOWN_APART = frozenset({"kind", "value", "unsupervised"})
_PLAIN_KEY = r"^[\pL\pN\pM_.+=@:,~#%/-]*$"  # letters and digits of any script, and usual characters of file names
_ODD_START = r"^(/|\.\.?/)|/\.\./"
_LEADING_ZEROS = r"(^|[^0-9.])0+([0-9])"  # not those of a fraction
_T = TypeVar("_T")


class ExampleSample(NamedTuple):
    """A sample that shows a fact: the number of its shard, its row there, its key, and the fact in words."""

    shard: int
    row: int
    key: str
    what: str = ""


_NONE = ExampleSample(-1, -1, "")


def places_of(position: int, rows: Int64Array) -> Int64Array:
    """Return the places of rows of a shard as numbers that ascend in storage order, int64 [n]."""
    return rows.astype(np.int64) | np.int64(position << _ROW_BITS)


def shard_and_row(place: int) -> tuple[int, int]:
    """Return the number of the shard, and the row in it, of a place."""
    return place >> _ROW_BITS, place & (1 << _ROW_BITS) - 1


def _first(*some: Iterable[ExampleSample]) -> list[ExampleSample]:
    """Return the first examples in storage order, so that the order of merging makes no difference."""
    return sorted({one for each in some for one in each})[:EXAMPLES]


@dataclass(slots=True)
class Adjacent:
    """Pairs of adjacent samples in a shard: their number, and the number of equal pairs."""

    num: int = 0
    num_equal: int = 0

    def add(self, values: pa.Array) -> None:
        """Add values in storage order."""
        if len(values) > 1:
            equal = pc.equal(values[1:], values[:-1]).drop_null()
            self.num += len(equal)
            self.num_equal += pc.sum(equal).as_py() or 0

    def merge(self, other: Adjacent) -> None:
        """Add all pairs of another summary."""
        self.num += other.num
        self.num_equal += other.num_equal


@dataclass(slots=True)
class ColumnTotals:
    """A column: its type, the number of samples with a value, the range, and the most frequent values."""

    type: str = "null"
    is_late: bool = False
    num: int = 0
    least: str | None = None
    most: str | None = None
    numbers: Distribution = field(default_factory=Distribution)
    top: Top = field(default_factory=Top)
    adjacent: Adjacent = field(default_factory=Adjacent)

    def add(self, name: str, values: pa.Array, draw: np.random.Generator) -> None:
        """Add the values of some samples."""
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        there = values.drop_null()
        if not len(there):
            return
        self._join_type(str(there.type))
        self.num += len(there)
        if not is_comparable(there.type):  # of another writer: only the count is reported
            return
        if pa.types.is_integer(there.type) or pa.types.is_floating(there.type):
            self.numbers.add(there.to_numpy(zero_copy_only=False), draw)
            there = there.filter(pc.is_finite(there))
        elif not pa.types.is_boolean(there.type):
            ends = pc.min_max(there).as_py()
            self._join_ends(ends["min"][:WORD_CHARACTERS], ends["max"][:WORD_CHARACTERS])
        self.top.add(there)
        if is_class(name):
            self.adjacent.add(values)

    def _join_type(self, kind: str) -> None:
        if self.type == "null":
            self.type = kind
        elif self.type != kind:
            self.type = "double" if {self.type, kind} == {"int64", "double"} else "mixed"

    def _join_ends(self, least: str, most: str) -> None:
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)

    def merge(self, other: ColumnTotals) -> None:
        """Add all values of another summary."""
        if other.num:
            self._join_type(other.type)
        if other.least is not None and other.most is not None:
            self._join_ends(other.least, other.most)
        self.is_late |= other.is_late
        self.num += other.num
        self.numbers.merge(other.numbers)
        self.top.merge(other.top)
        self.adjacent.merge(other.adjacent)


@dataclass(slots=True)
class FieldTotals:
    """A field: sizes of all values, and facts of the values that were read.

    Attributes:
        num_empty: Values of 0 bytes.
        sizes: Bytes of the values.
        num_read: Values that were inspected.
        num_broken: Inspected values that do not match the type in their name.
        broken: The first broken values.
        numbers: Numeric facts of values, by name: ``width``, ``characters``, …
        words: Facts in words, by name: ``mode``, ``format``, …
        shown: The first sample with each of these words, by name and word.
        empty: The first samples whose value is empty.
        adjacent: Adjacent values, for a field that holds a class.
        repeats: Contents that were compared.
    """

    num_empty: int = 0
    sizes: Distribution = field(default_factory=Distribution)
    num_read: int = 0
    num_broken: int = 0
    broken: list[ExampleSample] = field(default_factory=list)
    empty: list[ExampleSample] = field(default_factory=list)
    numbers: dict[str, Distribution] = field(default_factory=dict)
    words: dict[str, Top] = field(default_factory=dict)
    shown: dict[str, dict[str, ExampleSample]] = field(default_factory=dict)
    adjacent: Adjacent = field(default_factory=Adjacent)
    repeats: Repeats = field(default_factory=Repeats)

    def merge(self, other: FieldTotals) -> None:
        """Add all values of another summary."""
        self.num_empty += other.num_empty
        self.num_read += other.num_read
        self.num_broken += other.num_broken
        self.broken = _first(self.broken, other.broken)
        self.empty = _first(self.empty, other.empty)
        self.sizes.merge(other.sizes)
        self.adjacent.merge(other.adjacent)
        self.repeats.merge(other.repeats)
        for name, spread in other.numbers.items():
            self.numbers.setdefault(name, Distribution()).merge(spread)
        for name, top in other.words.items():
            self.words.setdefault(name, Top()).merge(top)
        for name, examples in other.shown.items():
            for word, one in examples.items():
                self.show(name, word, one)

    def show(self, name: str, word: str, one: ExampleSample) -> None:
        """Keep a sample as the example of a word, if it is the first; of many words, those that come first."""
        mine = self.shown.setdefault(name, {})
        mine[word] = min(mine.get(word, one), one)
        if len(mine) > _WORDS_SHOWN:
            del mine[max(mine, key=lambda each: mine[each])]

    @property
    def num(self) -> int:
        """Number of samples that have the field."""
        return self.sizes.num

    @property
    def num_looked(self) -> int:
        """Number of values that were inspected and are not broken."""
        return self.num_read - self.num_broken

    def shown_words(self) -> list[tuple[str, Top]]:
        """Return the facts in words to show, without kind and classes, which are shown separately."""
        return [(name, top) for name, top in sorted(self.words.items()) if name not in _SHOWN_APART]

    def add_checksums(self, sizes: Int64Array, sums: Int64Array, places: Int64Array) -> None:
        """Add contents by size and CRC32C."""
        self.repeats.add(stable_hash(pa.array(sizes << 32 ^ sums)).to_numpy(), places)

    def add_broken(self, one: ExampleSample) -> None:
        """Count a broken value."""
        self.num_broken += 1
        self.broken = _first(self.broken, (one,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The classes of a set, each once.

    Attributes:
        once: Counts of classes, by column or field.
        same: Columns and fields left out, since they are another spelling of one of these in all samples read.
    """

    once: Mapping[str, Top]
    same: Mapping[str, str]

    def title(self, name: str) -> str:
        """Return the name of a class, and those of its other spellings."""
        also = [other for other, equal in self.same.items() if equal == name]
        return f"{name} (also {some_names(also)})" if also else name


@dataclass(slots=True)
class Totals:
    """Facts of some samples.

    Attributes:
        sizes: Bytes of records: fields with headers and padding.
        largest: The largest sample.
        largest_bytes: Its size.
        keys: Keys.
        near_keys: Keys without the differences that people overlook: case, leading zeros, spellings of one letter.
        num_odd: Number of keys with characters that may trouble other programs.
        odd: The first of these keys.
        fields: Fields, by name.
        columns: Columns, by name.
        partners: Classes that come together in the samples read, by two names of columns or fields, in order.
        num_read: Samples whose values were inspected.
        num_bytes_read: Bytes read for this.
        late_errors: The first reasons why late columns could not be read.
        num_unread: Samples to inspect that could not be read from the shard.
        unread: The first reasons why not.
    """

    sizes: Distribution = field(default_factory=Distribution)
    largest: ExampleSample = _NONE
    largest_bytes: int = -1
    keys: Repeats = field(default_factory=Repeats)
    near_keys: Repeats = field(default_factory=Repeats)
    num_odd: int = 0
    odd: list[ExampleSample] = field(default_factory=list)
    fields: dict[str, FieldTotals] = field(default_factory=dict)
    columns: dict[str, ColumnTotals] = field(default_factory=dict)
    partners: dict[str, dict[str, WordPairs]] = field(default_factory=dict)
    num_read: int = 0
    num_bytes_read: int = 0
    late_errors: list[str] = field(default_factory=list)
    num_unread: int = 0
    unread: list[str] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.sizes.num

    @property
    def num_near_keys(self) -> int:
        """Number of keys that an earlier key equals but for what people overlook; 0 beyond the capacity of counts."""
        is_exact = self.keys.is_exact and self.near_keys.is_exact
        return max(self.near_keys.num_again - self.keys.num_again, 0) if is_exact else 0

    def add_keys(self, keys: Sequence[str], position: int, rows: Int64Array) -> None:
        """Add the keys of some rows of the shard with this number in the set."""
        texts = array = key_array(keys)
        is_text = np.ones(len(keys), np.bool_)
        if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):  # not all UTF-8
            is_text = np.array([_is_utf8(key) for key in keys], np.bool_)
            texts = pa.array([key for key in keys if _is_utf8(key)], pa.string())
            array = array.view(pa.large_string() if pa.types.is_large_binary(array.type) else pa.string())
        places = places_of(position, rows)
        self.keys.add(stable_hash(array).to_numpy(), places)
        self.near_keys.add(stable_hash(_alike(texts)).to_numpy(), places[is_text])
        is_odd = ~is_text
        is_odd[is_text] = _are_odd(texts)
        self.num_odd += int(is_odd.sum())
        some = np.flatnonzero(is_odd)[:EXAMPLES].tolist()
        self.odd = _first(self.odd, [ExampleSample(position, int(rows[at]), keys[at]) for at in some])

    def merge(self, other: Totals) -> None:
        """Add all samples of another summary."""
        self.sizes.merge(other.sizes)
        mine, others = (self.largest_bytes, self.largest), (other.largest_bytes, other.largest)
        if others[0] > mine[0] or (others[0] == mine[0] and others[1] < mine[1]):
            self.largest_bytes, self.largest = others
        self.keys.merge(other.keys)
        self.near_keys.merge(other.near_keys)
        self.num_odd += other.num_odd
        self.odd = _first(self.odd, other.odd)
        self.num_read += other.num_read
        self.num_bytes_read += other.num_bytes_read
        self.late_errors = sorted({*self.late_errors, *other.late_errors})[:EXAMPLES]
        self.num_unread += other.num_unread
        self.unread = sorted({*self.unread, *other.unread})[:EXAMPLES]
        for name, one in other.fields.items():
            self.fields.setdefault(name, FieldTotals()).merge(one)
        for name, column in other.columns.items():
            self.columns.setdefault(name, ColumnTotals()).merge(column)
        for name, partners in other.partners.items():
            for second, one_pair in partners.items():
                self.partners.setdefault(name, {}).setdefault(second, WordPairs()).merge(one_pair)

    def classes(self, kinds: Mapping[str, str]) -> Classes:
        """Return the classes of the samples by column, those with words first, and by field.

        Args:
            kinds: Kind of each field.
        """
        columns = [name for name in self.columns if is_class(name)]
        found = {
            name: self.columns[name].top
            for name in sorted(columns, key=lambda name: (self.columns[name].type != "string", name))
        }  # fmt: skip
        for name, one in sorted(self.fields.items()):
            if kinds[name] == "class" and "value" in one.words:
                found.setdefault(name, one.words["value"])
        once, same = dict[str, Top](), dict[str, str]()
        for name, top in found.items():
            equal = next((other for other in once if self._are_same(*sorted((name, other)))), None)
            if equal is None:
                once[name] = top
            else:
                same[name] = equal
        return Classes(once=once, same=same)

    def _are_same(self, first: str, second: str) -> bool:
        return self.partners.get(first, {}).get(second, WordPairs()).are_same

    def add_classes(self, classes: Mapping[str, Mapping[int, str]]) -> None:
        """Add which classes come together in some samples: by column or field, the class of each sample."""
        for first, second in combinations(sorted(classes), 2):
            mine, others = classes[first], classes[second]
            both = mine.keys() & others.keys()
            partners = self.partners.setdefault(first, {}).setdefault(second, WordPairs())
            partners.add((mine[number], others[number]) for number in both)

    def as_dict(self) -> dict[str, Any]:
        """Return the complete state, JSON-able."""
        return _written(self)  # type: ignore[no-any-return]

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Totals:
        """Restore from the result of :meth:`as_dict`.

        Raises:
            KeyError, TypeError, ValueError: The content is not such a result.
        """
        given = dict(content)
        fields = {name: _read(FieldTotals, one) for name, one in given.pop("fields").items()}
        columns = {name: _read(ColumnTotals, one) for name, one in given.pop("columns").items()}
        found = _read(cls, given)
        found.fields, found.columns = fields, columns
        return found


def _example(content: Any) -> ExampleSample:
    return ExampleSample(*content)


def _examples(content: Any) -> list[ExampleSample]:
    return [_example(one) for one in content]


def _by_word(content: Any) -> dict[str, ExampleSample]:
    return {word: _example(one) for word, one in content.items()}


def _partners(content: Any) -> dict[str, WordPairs]:
    return {name: WordPairs.of_dict(one) for name, one in content.items()}


_SKETCHES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "sizes": Distribution.of_dict, "top": Top.of_dict, "keys": Repeats.of_dict, "near_keys": Repeats.of_dict,
    "repeats": Repeats.of_dict, "broken": _examples, "odd": _examples, "empty": _examples,
    "largest": _example, "shown": lambda some: {name: _by_word(each) for name, each in some.items()},
    "partners": lambda some: {name: _partners(each) for name, each in some.items()},
    "adjacent": lambda content: Adjacent(**content),
}  # fmt: skip


def _written(value: Any) -> Any:
    if isinstance(value, (Distribution, WordPairs, Top, Repeats)):
        return value.as_dict()
    if isinstance(value, (Adjacent, ColumnTotals, FieldTotals, Totals)):
        return {name: _written(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {name: _written(one) for name, one in value.items()}
    return value


def _read(kind: type[_T], content: Mapping[str, Any]) -> _T:
    given = {name: _SKETCHES[name](one) if name in _SKETCHES else one for name, one in content.items()}
    if kind is ColumnTotals:
        given["numbers"] = Distribution.of_dict(content["numbers"])
    if kind is FieldTotals:
        given["numbers"] = {name: Distribution.of_dict(one) for name, one in content["numbers"].items()}
        given["words"] = {name: Top.of_dict(one) for name, one in content["words"].items()}
    return kind(**given)


def _is_utf8(key: str) -> bool:
    return not any("\ud800" <= one <= "\udfff" for one in key)


def _are_odd(keys: pa.Array) -> npt.NDArray[np.bool_]:
    """Return which keys have characters, or a first character, that may trouble other programs."""
    plain = pc.and_not(pc.match_substring_regex(keys, _PLAIN_KEY), pc.match_substring_regex(keys, _ODD_START))
    composed = pc.equal(pc.utf8_normalize(keys, form="NFC"), keys)
    found: npt.NDArray[np.bool_] = pc.invert(pc.and_(plain, composed)).to_numpy(zero_copy_only=False)
    return found


def _alike(keys: pa.Array) -> pa.Array:
    """Return keys without the differences that people overlook."""
    if not pc.all(pc.string_is_ascii(keys)).as_py():
        keys = pc.utf8_normalize(keys, form="NFKC")
    keys = pc.utf8_lower(pc.utf8_trim_whitespace(keys))
    return pc.replace_substring_regex(keys, _LEADING_ZEROS, r"\1\2")


@dataclass(slots=True)
class Looked:
    """Facts of values of one shard, collected before they are summed up."""

    position: int
    numbers: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    words: dict[tuple[str, str], list[Word]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    hashes: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def class_of(self) -> dict[str, dict[int, str]]:
        """The class of each sample that has one, by field."""
        return {name: dict(found) for name, found in self.classes.items()}

    def sum_up(self, totals: Totals, draw: np.random.Generator) -> None:
        """Add all facts to the totals of the shard."""
        for (name, what), numbers in sorted(self.numbers.items()):
            totals.fields[name].numbers.setdefault(what, Distribution()).add(np.array(numbers), draw)
        for (name, what), words in self.words.items():
            totals.fields[name].words.setdefault(what, Top()).count(words)
        for name, hashes in self.hashes.items():
            found = np.array(hashes, np.int64)
            totals.fields[name].repeats.add(found[:, 0], places_of(self.position, found[:, 1]))
        for name, classes in self.classes.items():
            for run in _runs(sorted(classes)):
                totals.fields[name].adjacent.add(pa.array(run))


def _runs(found: Iterable[tuple[int, str]]) -> list[list[str]]:
    """Return the values of adjacent samples, run by run."""
    runs: list[list[str]] = []
    before = -2
    for number, value in found:
        if number != before + 1:
            runs.append([])
        runs[-1].append(value)
        before = number
    return runs
