"""Pack pieces into few packs by best-fit-decreasing, and vary by epoch which documents share a pack.

Best-fit-decreasing takes the pieces from the longest to the shortest and puts each into the fullest pack that still
has room for it (Johnson, "Near-optimal bin packing algorithms", 1973: at most 11/9 of the optimum, plus one pack).
Pieces of equal length are handled together: packs with room for exactly one of them get one each, all at once, and a
pack with room for several gets as many as it can hold.

The result is a function of the lengths and the rules. The place of each document is a contract with every checkpoint,
pinned by ``tests/golden/packs.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.common.arrays import sums
from streaming.order.packing.rules import PackRules, Packs, Pieces, cut, rounded
from streaming.order.packing.several_budgets import fit_several, order_of_several
from streaming.order.plan.permutation import hash_range, stream_key
from streaming.types import Int64Array

_COMPANY = 4  # purpose, so that the numbers differ from those of orders
_PER_PIECE = ("documents", "starts", "stops", "fresh", "amounts")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """The assignment of pieces to packs: most of the work of packing, and the same in every epoch.

    Attributes:
        pack_of: int32 [n], the pack of each piece, in the order in which pieces are placed.
        num_packs: Number of packs, K.
    """

    pack_of: npt.NDArray[np.int32]
    num_packs: int

    @property
    def num_bytes(self) -> int:
        """Memory of these numbers."""
        return self.pack_of.nbytes


def pack(lengths: Int64Array, rules: PackRules, known: Fit | None = None) -> Packs:
    """Pack documents by their lengths.

    Deterministic: equal lengths and rules give equal packs, on every platform and in every release. Packs are in the
    order in which they were opened, those with the longest pieces first. The pieces of a pack go from long to short.

    Args:
        lengths: int64 [N], tokens of each document of a group; documents of length 0 have no piece. With
            ``rules.budgets`` or ``rules.alike``: int64 [N, 1 + len(budgets) + alike], tokens first.
        rules: Length of a pack, and the treatment of overlong documents.
        known: The result of ``fit`` for the same lengths and rules, if available.

    Raises:
        ConfigError: A length is negative or not an integer.

    Example:
        >>> packs = pack(np.array([5, 3, 4, 4]), PackRules(length=8))
        >>> [packs.documents[start:stop].tolist() for start, stop in zip(packs.splits, packs.splits[1:])]
        [[0, 1], [2, 3]]
    """
    pieces = cut(lengths, rules)
    order = _order(pieces, rules)
    found = _fit(pieces, order, rules) if known is None else known
    splits = sums(np.bincount(found.pack_of, minlength=found.num_packs))
    packs = Packs(rules=rules, splits=splits, **{one.name: getattr(pieces, one.name) for one in fields(Pieces)})
    return _reordered(packs, order[_sorting(found.pack_of)])


def fit(lengths: Int64Array, rules: PackRules) -> Fit:
    """Assign pieces of documents to packs; the result depends only on lengths and rules.

    Raises:
        ConfigError: A length is negative or not an integer.
    """
    pieces = cut(lengths, rules)
    return _fit(pieces, _order(pieces, rules), rules)


def other_company(packs: Packs, *, seed: int, epoch: int, group: int) -> Packs:
    """Permute documents of equal length among their places, and the pieces within each pack.

    The number of packs, the lengths in each pack, and so its fill, do not change. Only the documents that share a pack,
    and their order, differ by epoch. Lengths are compared after rounding (``rules.multiple``). With several budgets,
    documents must also be equal in the amounts that they take of each budget, and in the columns in which packs are
    alike.

    Args:
        packs: The packs of a group.
        seed: Seed of the order.
        epoch: Pass over the data.
        group: Number of the group, so that each group is permuted differently.
    """
    num_pieces = len(packs.documents)
    hashes = hash_range(stream_key(seed, epoch, group, _COMPANY), 0, 2 * num_pieces)
    alike = (*packs.amounts.T, rounded(packs.lengths, packs.rules.multiple))
    pieces = np.empty(num_pieces, np.int64)
    pieces[_sorting(*alike)] = _sorting(hashes[:num_pieces], *alike)
    pack_of = np.repeat(np.arange(len(packs)), np.diff(packs.splits))
    pieces = pieces[_sorting(hashes[num_pieces:], pack_of)]
    return _reordered(packs, pieces)


def _sorting(first: npt.NDArray[Any], *others: npt.NDArray[Any]) -> Int64Array:
    """Return ``np.lexsort((first, *others))``, but faster: the last key is compared first, ties keep their order.

    Integers below 2**16 are sorted by counting. Hashes have no ties, so every sorting algorithm gives the same order.
    """
    order = _sorting_by(first)
    for key in others:
        order = order[_sorting_by(key[order])]
    return order


def _sorting_by(key: npt.NDArray[Any]) -> Int64Array:
    if len(key) and key.min() >= 0 and key.max() < 1 << 16:
        return np.argsort(key.astype(np.uint16), kind="stable")
    order = np.argsort(key)
    ordered = key[order]
    return np.argsort(key, kind="stable") if (ordered[1:] == ordered[:-1]).any() else order


def _reordered(packs: Packs, order: Int64Array) -> Packs:
    """Return the same packs with other pieces in their places."""
    return replace(packs, **{name: getattr(packs, name)[order] for name in _PER_PIECE})


def _units(pieces: Pieces, rules: PackRules) -> Int64Array:
    """Return lengths in units of ``multiple``, rounded up; int64 [n]."""
    return rounded(pieces.lengths, rules.multiple) // rules.multiple


def _order(pieces: Pieces, rules: PackRules) -> Int64Array:
    """Return the order in which pieces are placed, int64 [n]: by (length descending, index)."""
    if rules.budgets or rules.alike:
        return order_of_several(pieces, rules)
    return _sorting_by(rules.length // rules.multiple - _units(pieces, rules))


def _fit(pieces: Pieces, order: Int64Array, rules: PackRules) -> Fit:
    """Assign pieces, taken in this order, to packs."""
    if rules.budgets or rules.alike:
        pack_of = fit_several(pieces, order, rules)
    else:
        units = _units(pieces, rules)[order]
        heads = np.flatnonzero(np.diff(units, prepend=-1))
        counts = np.diff(heads, append=len(units))
        place = _runs_of_like if rules.padded else _best_fit
        pack_of = place(units[heads].tolist(), counts.tolist(), rules.length // rules.multiple, rules.max_docs)
    found = np.array(pack_of, np.int32)
    return Fit(pack_of=found, num_packs=int(found.max(initial=-1)) + 1)


def _best_fit(sizes: list[int], counts: list[int], capacity: int, max_docs: int | None) -> list[int]:
    """Return the pack of each piece, given pieces of descending sizes.

    Among packs with equal room, the one with the fewest places left is preferred, then the first.
    """
    scale = 1 if max_docs is None else max_docs + 1
    places = scale - 1  # in a new pack; 0: places are not counted
    bits = sum(counts).bit_length()  # of the number of a pack
    mask, one = (1 << bits) - 1, min(places, 1) << bits
    # A pack with room for a later piece is a number: (room * scale + places) << bits | pack. Packs with room for the
    # current size lie on a stack, the fullest on top. The others wait in a heap of negatives, the emptiest first. Sizes
    # descend, so a pack that moves to the stack is fuller than all packs there.
    fitting: list[int] = []
    waiting: list[int] = []
    pack_of: list[int] = []
    num_packs, least = 0, (sizes[-1] * scale << bits) + one if sizes else 0
    for size, pieces in zip(sizes, counts, strict=True):
        count = pieces  # left to place
        wanted = size * scale << bits
        taken = wanted + one
        while waiting and -waiting[0] >= wanted:
            fitting.append(-heappop(waiting))
        while count:
            if fitting:
                key = fitting.pop()
            else:
                key = (capacity * scale + places << bits) + num_packs
                num_packs += 1
            if count == 1 or key < 2 * wanted:
                pack_of.append(key & mask)
                count -= 1
                key -= taken
            else:
                room, left = divmod(key >> bits, scale)
                each = min(room // size, count, left or count)
                pack_of += [key & mask] * each
                count -= each
                key -= each * taken
            if key >= least and (not places or (key >> bits) % scale):
                heappush(waiting, -key)
    return pack_of


def _runs_of_like(sizes: list[int], counts: list[int], capacity: int, max_docs: int | None) -> list[int]:
    """Cut the pieces, from the longest on, into runs with ``pieces * longest`` at most the capacity.

    No other division has fewer runs, because each run is as long as possible.
    """
    pack_of: list[int] = []
    num_packs = open_places = 0
    for size, count in zip(sizes, counts, strict=True):
        joined = min(count, open_places)
        pack_of += [num_packs - 1] * joined
        open_places -= joined
        rest = count - joined
        while rest:
            each = min(capacity // size, max_docs or capacity)
            joined = min(rest, each)
            pack_of += [num_packs] * joined
            num_packs, open_places, rest = num_packs + 1, each - joined, rest - joined
    return pack_of
