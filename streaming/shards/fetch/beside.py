"""Fetch ranges of several tars that hold fields of the same samples, and locate these as samples of one.

They lie in one memory, one behind the other, each from a page of its own on (``place_behind``); behind one that is read
in pieces, the next one begins where these end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from streaming.errors import DataError, IndexMismatchError, shell_place, shell_word
from streaming.shards.fetch.layout import Fetched, UnitLayout
from streaming.shards.fetch.read import FetchRange, ShardFacts, place_behind, size_of_unit
from streaming.shards.tar import find_values
from streaming.storage import Checked
from streaming.types import Int64Array

FetchPart: TypeAlias = Callable[[FetchRange, int, memoryview], Fetched]
"""Fetches one range alone, of which the place in memory is given, into the memory from there on."""


class _Values(NamedTuple):
    """Where the values of a late field are: int64 ``[n, 1]`` each, as in ``UnitLayout``; None: no sample has one."""

    starts: Int64Array | None
    sizes: Int64Array | None
    damage: dict[int, DataError]


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

    def values(self, base: FetchRange, keys: Sequence[str], data: memoryview) -> _Values:
        """Return where the values of its late field are for the samples of ``base``, which have these keys.

        Raises:
            IndexMismatchError: Its samples have other keys.
        """
        wanted, num_samples = self.wanted, len(keys)
        skip = base.first_sample - wanted.first_sample
        if not skip and wanted.num_samples == num_samples and not isinstance(self.fetched.found, UnitLayout):
            plain = find_values(data[self.place : self.end], keys, wanted.late)
            if plain is not None:
                starts, sizes = (one.reshape(-1, 1) for one in plain)
                return _Values(starts + self.place, sizes, {})
        layout, rows = self.layout(data), slice(skip, skip + num_samples)
        if layout.keys[rows] != keys and list(layout.keys[rows]) != list(keys):
            raise _other_keys(base, wanted)
        damage = {row - skip: error for row, error in layout.damage.items() if 0 <= row - skip < num_samples}
        if wanted.late not in layout.fields:  # none of the samples has a value
            return _Values(None, None, damage)
        at = layout.fields.index(wanted.late)
        begins = layout.starts[rows, at : at + 1]
        return _Values(np.where(begins >= 0, begins + self.place, begins), layout.sizes[rows, at : at + 1], damage)


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
    first = parts[0].layout(data)
    late = {part.wanted.late for part in parts}
    columns = [at for at, name in enumerate(first.fields) if name not in late or name == parts[0].wanted.late]
    if parts[0].wanted.late:
        columns = [at for at in columns if first.fields[at] == parts[0].wanted.late]
    is_all = len(columns) == len(first.fields)
    names = [first.fields[at] for at in columns]
    starts, sizes = (
        [first.starts if is_all else first.starts[:, columns]],
        [first.sizes if is_all else first.sizes[:, columns]],
    )
    damage = dict(first.damage)
    for part in parts[1:]:
        values = part.values(parts[0].wanted, first.keys, data)
        damage |= values.damage
        if values.starts is not None and values.sizes is not None:
            names.append(part.wanted.late)
            starts.append(values.starts)
            sizes.append(values.sizes)
    return UnitLayout(
        keys=first.keys, fields=tuple(names), num_bytes=parts[-1].end, damage=damage,
        starts=np.concatenate(starts, axis=1), sizes=np.concatenate(sizes, axis=1),
    )  # fmt: skip


def _other_keys(wanted: FetchRange, beside: FetchRange) -> IndexMismatchError:
    return IndexMismatchError(
        f"{beside.shown_url}: the keys of this tar of a late field are not those of samples {wanted.first_sample} to "
        f"{wanted.first_sample + wanted.num_samples} of {wanted.shown_url}. Add the field again: shard_tools field add "
        f"{shell_place(wanted.url)} {shell_word(beside.late)} … --overwrite"
    )
