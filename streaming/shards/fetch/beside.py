"""Fetch ranges of several tars that hold fields of the same samples, and locate these as samples of one.

They lie in one memory, one behind the other, each from a page of its own on (``place_behind``); behind one that is read
in pieces, the next one begins where these end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from streaming.errors import DataError, IndexMismatchError, shell_place, shell_word
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import FetchRange, ShardFacts, place_behind, size_of_unit
from streaming.storage import Checked
from streaming.types import Int64Array

FetchPart: TypeAlias = Callable[[FetchRange, int, memoryview], Fetched]
"""Fetches one range alone, of which the place in memory is given, into the memory from there on."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the ranges, and where its bytes are."""

    wanted: FetchRange
    place: int
    fetched: Fetched

    @property
    def end(self) -> int:
        """Where its bytes end in memory."""
        found = self.fetched.found
        return self.place + (found.num_bytes if isinstance(found, UnitLayout) else self.wanted.num_bytes)

    def layout(self, data: memoryview) -> UnitLayout:
        """Return where its samples are, in its own memory."""
        return self.fetched.apart(data[self.place : self.end])


def fetch_parts(wanted: FetchRange, out: memoryview, fetch: FetchPart) -> Fetched:
    """Fetch a range, and those beside it, into ``out``; return where the fields of its samples are.

    Raises:
        Exception: Whatever ``fetch`` raises.
        IndexMismatchError: The tars have other keys.
    """
    if not wanted.beside:
        return fetch(wanted, 0, out)
    parts: list[_Part] = []
    for _, one in wanted.parts:
        place = int(place_behind(wanted.skew_bytes, parts[-1].end, one.skew_bytes)) if parts else 0
        memory = out[place : place + one.num_bytes]
        parts.append(_Part(one, place, fetch(one, place, memory)))
    found = partial(_located, parts)
    checked = [part.fetched.checked for part in parts if part.fetched.checked is not None]
    is_known = all(isinstance(part.fetched.found, UnitLayout) for part in parts)
    if len(checked) < len(parts):
        return Fetched(checked=None, found=found(out))
    return Fetched(checked=Checked.of_all(checked, parts[-1].end), found=found(out) if is_known else found)


def size_of_parts(wanted: FetchRange, known: Callable[[FetchRange], ShardFacts]) -> int:
    """Return how many bytes of memory :func:`fetch_parts` will use, given what is known of the shard of each range."""
    end = 0
    for number, (_, one) in enumerate(wanted.parts):
        place = int(place_behind(wanted.skew_bytes, end, one.skew_bytes)) if number else 0
        end = place + size_of_unit(one, known(one))
    return end


def _located(parts: Sequence[_Part], data: memoryview) -> UnitLayout:
    """Return the samples of the first range, with the fields that the others have of them."""
    first, *others = (part.layout(data) for part in parts)
    num_samples = len(first.keys)
    names: dict[str, tuple[Int64Array, Int64Array]] = {}
    damage: dict[int, DataError] = {}
    for part, layout in zip(parts, (first, *others), strict=True):
        skip = parts[0].wanted.first_sample - part.wanted.first_sample
        rows = slice(skip, skip + num_samples)
        if layout is not first and list(layout.keys[rows]) != list(first.keys):
            raise _other_keys(parts[0].wanted, part.wanted)
        starts, sizes = layout.starts[rows], layout.sizes[rows]
        places = np.where(starts >= 0, starts + part.place, starts) if part.place else starts
        for column, name in enumerate(layout.fields):
            if part.wanted.late in {"", name}:
                names[name] = places[:, column], sizes[:, column]
        damage |= {row - skip: error for row, error in layout.damage.items() if 0 <= row - skip < num_samples}
    return UnitLayout(
        keys=first.keys, fields=tuple(names), num_bytes=parts[-1].end, damage=damage,
        starts=np.stack([starts for starts, _ in names.values()], axis=1) if names else first.starts[:, :0],
        sizes=np.stack([sizes for _, sizes in names.values()], axis=1) if names else first.sizes[:, :0],
    )  # fmt: skip


def _other_keys(wanted: FetchRange, beside: FetchRange) -> IndexMismatchError:
    return IndexMismatchError(
        f"{beside.shown_url}: the keys of this tar of a late field are not those of samples {wanted.first_sample} to "
        f"{wanted.first_sample + wanted.num_samples} of {wanted.shown_url}. Add the field again: shard_tools field add "
        f"{shell_place(wanted.url)} {shell_word(beside.late)} … --overwrite"
    )
