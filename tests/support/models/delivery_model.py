"""What must hold of a delivered run, by what was written and by the documentation; nothing of ours is imported.

A ``Share`` is what one source may deliver: what Python selects of a set, less what is lost. A ``Model`` checks batches
(each field's bytes, packs token by token), epochs (each sound sample once) and runs without an end (shares, even
passes). What does not hold is an ``AssertionError``.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tests.support.models.known_sets import FIELDS, Sample

NAMED = {"__key__", "__url__", "__source__", "__valid__", "source_ids"}
NO_LOSS = -100
MOST_OFF = 16
"""Samples by which an exact share may be off at any row, over all lanes (MIXING.md: 7.5 of 5 sources, 64 lanes)."""

Unit = Any
"""A sample's key, or (key, start) of a piece of a document."""
Row = tuple[str, Unit, bool]
"""Source, unit, and whether it is valid."""


@dataclass
class Share:
    """What one source may deliver.

    Attributes:
        flips: Damaged bytes of its shards: shard, offset.
        suspects: Keys whose checksum also covers these bytes, or the headers between: lost or not.
        pack: Options of the ``Packed`` that it is in.
        passes: How often an epoch reads it; None: no epoch is over.
        grouped: Column whose values are drawn from separately.
    """

    samples: list[Sample]
    fields: tuple[str, ...] | None = None
    decode: Any = "auto"
    on_error: str = "substitute"
    dropped: frozenset[str] = frozenset()
    flips: list[tuple[str, int]] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    pack: dict[str, Any] = field(default_factory=dict)
    passes: float | None = 1
    grouped: str | None = None

    def __post_init__(self) -> None:
        self.kept = {one.key: one for one in self.samples}
        self.is_tokens = bool(self.pack) and self.pack.get("field", "tok") is not None
        self.names: tuple[str, ...] = self.fields or FIELDS
        if self.is_tokens:
            self.names = ("tok", "mask") if self.pack.get("mask_field") else ("tok",)
        self.lost = set(self.dropped) & self.kept.keys() | {one.key for one in self.samples if self._is_unreadable(one)}
        self.may_be_lost = self.lost | self.suspects & self.kept.keys()

    def _is_unreadable(self, one: Sample) -> bool:
        places = [(one.places[name], len(one.fields[name])) for name in self.names if name in one.places]
        hit = [at for shard, at in self.flips if shard == one.shard]
        try:
            self.value(one.key, "txt")
        except UnicodeDecodeError:
            return True
        return any(start <= at < start + size for start, size in places for at in hit)

    def value(self, key: str, name: str) -> Any:
        """What a batch holds of a field."""
        data = self.kept[key].fields.get(name) if name in self.names else None
        if data is None or self.decode is None or (isinstance(self.decode, dict) and name in self.decode):
            return data
        return int(data) if name == "cls" else data.decode() if name == "txt" else data

    def ranges(self, key: str) -> list[tuple[int, int]]:
        """The tokens of a document, as it is delivered."""
        num, length = self.kept[key].columns["tokens"], self.pack["length"]
        if num > length and self.pack.get("overlong", "split") != "split":
            return [(0, length)] if self.pack["overlong"] == "truncate" else []
        return [(start, min(num, start + length)) for start in range(0, num, length)]

    @cached_property
    def units(self) -> list[Unit]:
        """All that a pass delivers."""
        if self.is_tokens:
            return [(key, start) for key in self.kept for start, _ in self.ranges(key)]
        column, most = self.pack.get("column", "size"), self.pack.get("length", math.inf)
        return [key for key, one in self.kept.items() if one.columns[column] <= most]

    def key(self, unit: Unit) -> str:
        return str(unit[0] if self.is_tokens else unit)

    def groups(self) -> dict[Any, list[Unit]]:
        """What is drawn from separately: all units, or those of each value of a column."""
        found: dict[Any, list[Unit]] = {}
        for unit in self.units:
            found.setdefault(self.kept[self.key(unit)].columns.get(self.grouped), []).append(unit)
        return found

    def is_half_lost(self) -> bool:
        """Whether substitutes are scarce somewhere."""
        lost = [[self.key(unit) in self.may_be_lost for unit in units] for units in self.groups().values()]
        return any(2 * sum(one) >= len(one) for one in lost)

    def piece(self, key: str, tokens: np.ndarray) -> tuple[str, int, np.ndarray]:
        """The piece of a document that these tokens are."""
        assert key in self.kept, f"{key} is not selected"
        assert key not in self.lost, f"{key} is lost"
        own = np.frombuffer(self.kept[key].fields["tok"], "<u2")
        found = [start for start, stop in self.ranges(key) if np.array_equal(own[start:stop], tokens)]
        assert found, f"{len(tokens)} tokens that are none of {key}"
        return key, found[0], tokens

    def lay(self, pieces: Sequence[tuple[str, int, np.ndarray]], length: int) -> dict[str, np.ndarray]:
        """A row of packed documents; positions that are nobody's are -1."""
        empty = {"input_ids": self.pack.get("pad_id", 0), "labels": NO_LOSS, "document_ids": -1, "position_ids": -1}
        row = {name: np.full(length, value) for name, value in empty.items()}
        at = last = 0
        starts = []
        for place, (key, start, tokens) in enumerate(pieces):
            here, across = slice(at, at + len(tokens)), bool(self.pack.get("labels_across") and place)
            row["input_ids"][here], row["document_ids"][here] = tokens, place
            row["position_ids"][here] = np.arange(len(tokens))
            mask = np.frombuffer(self.kept[key].fields["mask"], np.uint8)[start : start + len(tokens)]
            wanted = np.where(mask == 1, tokens, NO_LOSS) if self.pack.get("mask_field") else tokens
            if self.pack.get("shift_labels"):
                row["labels"][at : here.stop - 1] = wanted[1:]
                row["labels"][last] = wanted[0] if across else row["labels"][last]
            else:
                row["labels"][here] = wanted
                row["labels"][at] = wanted[0] if across else NO_LOSS
            starts, last = [*starts, at], here.stop - 1
            at += -(-len(tokens) // self.pack.get("multiple", 1)) * self.pack.get("multiple", 1)
        row["position_ids"][at:] = np.arange(length - at)
        return row | {"starts": np.array(starts + [at] * (at < length), int)}


class Model:
    """All that must hold, by the paths of the sources (``""``: there is only one)."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        self.shares = shares
        self.pack = next(iter(shares.values())).pack

    def rows(self, batch: Any) -> list[Row]:
        """The rows of a batch of one rank, after a check of all that it holds."""
        if isinstance(batch, list):  # collate_fn=list over padded packs
            return [row for pack in batch for row in self.rows(pack)]
        if "input_ids" in batch:
            return self._documents(batch)
        keys, found = batch["__key__"], []
        assert set(batch) <= {*FIELDS, *NAMED}, f"entries {set(batch)}"
        columns = {name: _plain(batch[name]) if name in batch else [None] * len(keys) for name in FIELDS}
        for number, (path, key, valid) in enumerate(_named(batch)):
            share = self.shares[path]
            assert key in share.kept, f"{key} of {path!r} is not selected"
            assert key not in share.lost, f"{key} of {path!r} is lost"
            assert os.path.basename(batch["__url__"][number]) == share.kept[key].shard, f"shard of {key}"
            wrong = [name for name, values in columns.items() if values[number] != share.value(key, name)]
            assert not wrong, f"bytes of {wrong} of {key} of {path!r} are another's"
            found.append((path, key, valid))
        if self.pack:
            sizes = [self.shares[path].kept[key].columns[self.pack["column"]] for path, key, _ in found]
            assert max(sizes) * len(sizes) <= self.pack["length"], f"beyond the budget: {sizes}"
        return found

    def _documents(self, batch: Mapping[str, Any]) -> list[Row]:
        """Rebuild each entry of packs, or of padded rows, from the tokens of the documents."""
        ids, is_padded = batch["input_ids"].numpy(), bool(self.pack.get("padded"))
        places = batch["attention_mask"].numpy() - 1 if is_padded else batch["document_ids"].numpy()
        found, borders, totals = [], [], np.zeros(2, int)
        for number, (path, named, valid) in enumerate(_named(batch)):
            share, keys = self.shares[path], [named] * bool(named) if is_padded else named
            pieces = [share.piece(key, ids[number, places[number] == place]) for place, key in enumerate(keys)]
            row = share.lay(pieces, ids.shape[1])
            if not valid:
                row["labels"][:] = NO_LOSS
            assert np.array_equal(places[number], row["document_ids"]), f"documents of {keys}"
            for name in ("input_ids", "labels"):
                wrong = np.flatnonzero(batch[name][number].numpy() != row[name])
                assert not wrong.size, f"{name} of {keys} of {path!r} at {wrong[:4]} ({valid=}, {row['starts']})"
            placed = row["document_ids"] >= 0 if is_padded else row["position_ids"] >= 0
            assert np.array_equal(batch["position_ids"][number].numpy()[placed], row["position_ids"][placed])
            borders += (number * ids.shape[1] + row["starts"]).tolist()
            totals += valid * np.sum(row["document_ids"] >= 0), np.sum(row["labels"] != NO_LOSS)
            found += [(path, (key, start), valid) for key, start, _ in pieces]
        assert [batch["num_tokens"], batch["num_labels"]] == totals.tolist(), "num_tokens, num_labels"
        assert not is_padded or ids.size <= self.pack["length"], "beyond the budget"
        if not is_padded:
            most = self.pack.get("max_docs")
            borders.append(ids.size)
            longest = ids.shape[1] if most else max(np.diff(borders), default=0)
            borders += [ids.size] * (len(ids) * (most + 1) + 1 - len(borders) if most else 0)
            assert (batch["cu_seqlens"].tolist(), batch["max_seqlen"]) == (borders, longest), "cu_seqlens, max_seqlen"
        return found

    def check_epoch(self, rows: Iterable[Row], bad: set[str], *, is_whole: bool, slack: int = 0) -> None:
        """Each sound unit comes as often as its source is read; what is lost is listed, and nothing else."""
        got = {path: Counter[Unit]() for path in self.shares}
        for path, unit, valid in rows:
            got[path][unit] += valid
        lost = set[str]()
        for path, share in self.shares.items():
            counts, due = got[path], set(share.units)
            assert counts.keys() <= due, f"{path!r}: {counts.keys() - due} is not due"
            if share.passes is None:
                continue
            least, most = math.floor(share.passes), math.ceil(share.passes) + slack
            by_size = bool(share.pack) and not share.is_tokens  # lost rows become others of their batch, one if all are
            fills = by_size or (share.on_error == "substitute" and not share.is_tokens)
            often = {unit: count for unit, count in counts.items() if count > most}
            assert not often or (fills and share.may_be_lost), f"{path!r}: {often} too often"
            if is_whole:
                rare = {unit for unit in due if counts[unit] < least}
                assert {share.key(unit) for unit in rare} <= share.may_be_lost, f"{path!r}: {rare} too rare"
                num, most_rows = share.passes * len(due), share.passes * len(due) - least * len(rare) * (not fills)
                gone = rare | {unit for unit in due if share.key(unit) in bad and not counts[unit]}
                fewest = num - math.ceil(share.passes) * len(gone) * (by_size or not fills)
                is_counted = not share.pack or least == most  # half a pass of packs is none of documents
                is_right = fewest - 1 < counts.total() < most_rows + 1
                assert not is_counted or is_right, f"{path!r}: {counts.total()} rows for {fewest} to {most_rows}"
                lost |= {share.key(unit) for unit in rare} - share.dropped
        sound = bad - set[str]().union(*(share.may_be_lost for share in self.shares.values()))
        assert not sound, f"blamed, though sound: {sound}"
        assert lost <= bad, f"lost without a word: {lost - bad}"

    def check_order(self, batches: Sequence[Sequence[Row]], size: int) -> None:
        """Without a shuffle, global batch k is samples [kG, (k+1)G) of one source."""
        (share,) = self.shares.values()
        for number, batch in enumerate(batches if not share.may_be_lost else ()):
            keys = {key for _, key, valid in batch if valid}
            assert keys == set(share.units[number * size : (number + 1) * size]), f"batch {number} in storage order"

    def check_passes(self, rows: Iterable[Row], most: int) -> None:
        """Without an end: no unit of a source is more than ``most`` passes ahead of another."""
        got = Counter(rows)
        for path, share in self.shares.items():
            for value, units in share.groups().items() if not share.may_be_lost else ():
                counts = [got[path, unit, True] for unit in units]
                passes = f"{min(counts)} to {max(counts)} passes of {len(counts)} units"
                assert max(counts) - min(counts) <= most, f"{path!r}, {share.grouped} {value}: {passes}"


def check_shares(
    batches: Iterable[Iterable[Row]], weights: Sequence[tuple[int, Mapping[str, float]]], most: float
) -> None:
    """Sources come in the shares of the weights that hold from each row on, to within ``most`` at a batch's end."""
    due, got, number = Counter[str](), Counter[str](), 0
    for batch in batches:
        for path, _, _ in batch:
            now = [one for first, one in weights if first <= number][-1]
            for name, share in now.items():
                due[name] += share / sum(now.values())  # type: ignore[assignment]
            got[path.split("/")[0]] += 1
            number += 1
        off = {name: got[name] - due[name] for name in due.keys() | got.keys() if abs(got[name] - due[name]) > most}
        assert not off, f"shares are off by {off} after row {number}"


def _named(batch: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    keys = batch["__key__"]
    valid = batch.get("__valid__", True)  # of a whole pack where packs are not collated
    valid = [valid] * len(keys) if isinstance(valid, bool) else valid.tolist()
    return zip(batch.get("__source__", [""] * len(keys)), keys, valid, strict=True)


def _plain(column: Any) -> list[Any]:
    values = column if isinstance(column, list) else column.tolist()
    return [bytes(one) if isinstance(one, memoryview) else one for one in values]
