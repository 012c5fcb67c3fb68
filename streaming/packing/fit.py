"""Pack pieces into as few packs as best-fit-decreasing needs, and change the company that documents keep.

Best-fit-decreasing takes the pieces from the longest to the shortest and puts each into the fullest pack that still
has room for it (Johnson, "Near-optimal bin packing algorithms", 1973: at most 11/9 of the fewest packs and one).
Pieces of one length are handled together, and so are packs that have the same room, so that a step places many
pieces: a pack that is the fullest with room for a length stays that until it has no room for another of it.

What it gives is a function of the lengths and the rules. Which document stands in which place is a contract with every
checkpoint, pinned by ``tests/golden/packs.json``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streaming.packing.rules import PackRules, Packs, Pieces, cut, rounded
from streaming.packing.several import fit_several
from streaming.plan.permutation import hash_range, stream_key
from streaming.types import Int64Array

_COMPANY = 4  # purpose, so that draws differ from those of orders
_PER_PIECE = ("documents", "starts", "stops", "fresh", "amounts")


def pack(lengths: Int64Array, rules: PackRules) -> Packs:
    """Pack documents by their lengths.

    Deterministic: equal lengths and rules give equal packs, on every platform and in every release. Packs are in the
    order in which they were opened, those with the longest pieces first; pieces of a pack from long to short.

    Args:
        lengths: int64[N], tokens of each document of a group; those of 0 have no piece. With ``rules.budgets``
            or ``rules.alike`` int64[N, 1 + len(budgets) + alike], tokens first.
        rules: Length of a pack, and what becomes of overlong documents.

    Raises:
        ConfigError: A length is negative, or no whole number.

    Example:
        >>> packs = pack(np.array([5, 3, 4, 4]), PackRules(length=8))
        >>> [packs.documents[start:stop].tolist() for start, stop in zip(packs.splits, packs.splits[1:])]
        [[0, 1], [2, 3]]
    """
    pieces = cut(lengths, rules)
    order, pack_of, num_packs = _placed(pieces, rules)
    splits = np.zeros(num_packs + 1, np.int64)
    np.cumsum(np.bincount(pack_of, minlength=num_packs), out=splits[1:])
    found = Packs(rules=rules, splits=splits, **{one.name: getattr(pieces, one.name) for one in fields(Pieces)})
    return _reordered(found, order[_sorting(pack_of)])


def count_packs(lengths: Int64Array, rules: PackRules) -> int:
    """Return ``len(pack(lengths, rules))``, without the packs: K, which depends on lengths and rules alone.

    Raises:
        ConfigError: A length is negative, or no whole number.
    """
    pieces = cut(lengths, rules)
    if rules.budgets or rules.alike:
        return _placed(pieces, rules)[2]
    _, sizes, counts = _by_size(pieces, rules)
    return _steps(sizes, counts, rules).num_packs


def other_company(packs: Packs, *, seed: int, epoch: int, group: int) -> Packs:
    """Permute documents of equal length among their places, and the pieces within each pack.

    The number of packs, the lengths that each is made of, and so its fill, stay as they are: only which documents
    meet, and in which order, is another in every epoch. Lengths count as rounded (``rules.multiple``); with several
    budgets, what they take of each must be equal, and that in which packs are alike.

    Args:
        packs: Of a group.
        seed: Of the order.
        epoch: Pass over the data.
        group: Number of the group, so that no two are permuted alike.
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
    """Do as ``np.lexsort((first, *others))`` does, in less time: the last is compared first, equals keep their order.

    What is whole numbers below 2**16 is counted; hashes have no equals, so that any way of sorting gives one order.
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
    """The same packs with other pieces in their places."""
    return replace(packs, **{name: getattr(packs, name)[order] for name in _PER_PIECE})


def _placed(pieces: Pieces, rules: PackRules) -> tuple[Int64Array, Int64Array, int]:
    """In which order pieces are placed, int64[n], into which pack each goes, and the number of packs."""
    if rules.budgets or rules.alike:
        return fit_several(pieces, rules)
    order, sizes, counts = _by_size(pieces, rules)
    steps = _steps(sizes, counts, rules)
    # A step puts `taken` pieces, `each` to a pack, into packs from `first` on.
    first, each, taken = steps.columns
    within = np.arange(len(order)) - np.repeat(np.cumsum(taken) - taken, taken)
    return order, np.repeat(first, taken) + within // np.repeat(each, taken), steps.num_packs


class _Steps:
    """Collect what fitting does: step by step, ``taken`` pieces into packs from ``first`` on, ``each`` to a pack.

    Args:
        steps: ``first``, ``each`` and ``taken`` of each step, one after the other.
        num_packs: Packs in all.
    """

    def __init__(self, steps: list[int], num_packs: int) -> None:
        self.num_packs = num_packs
        self._steps = steps

    @property
    def columns(self) -> Int64Array:
        """``first``, ``each`` and ``taken`` of all steps, int64[3, n]."""
        return np.array(self._steps, np.int64).reshape(-1, 3).T


def _by_size(pieces: Pieces, rules: PackRules) -> tuple[Int64Array, list[int], list[int]]:
    """Order pieces by (length descending, index); the lengths that occur, in units of ``multiple``, and how often."""
    units = rounded(pieces.lengths, rules.multiple) // rules.multiple
    missing = rules.length // rules.multiple - units
    order = _sorting_by(missing)
    if not len(order):
        return order, [], []
    ordered = units[order]
    heads = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return order, ordered[heads].tolist(), np.diff(heads, append=len(ordered)).tolist()


def _steps(sizes: list[int], counts: list[int], rules: PackRules) -> _Steps:
    capacity = rules.length // rules.multiple
    if rules.padded:
        return _runs_of_like(sizes, counts, capacity, rules.max_docs)
    return _best_fit(sizes, counts, capacity, rules.max_docs)


def _best_fit(sizes: list[int], counts: list[int], capacity: int, max_docs: int | None) -> _Steps:
    """Fit pieces of falling sizes; among packs with equal room the one with fewest places left, then the first."""
    scale = 1 if max_docs is None else max_docs + 1
    places = scale - 1  # of a fresh pack; 0: they are not counted
    bits = sum(counts).bit_length()  # of the number of a pack
    mask = (1 << bits) - 1
    # Runs of packs with equal room, sorted, each as one number: (room * scale + places) << bits | its first pack; and
    # by first packs where they stop. A pack stands in one run, or in none when nothing still to come can go into it.
    runs: list[int] = []
    stops = [0] * (mask + 1)
    steps: list[int] = []
    num_packs, least = 0, sizes[-1] if sizes else 0

    def put(first: int, stop: int, room: int, left: int) -> None:
        if first < stop and room >= least and (left or not places):
            insort(runs, (room * scale + left) << bits | first)
            stops[first] = stop

    for size, pieces in zip(sizes, counts, strict=True):
        count = pieces  # still to place
        wanted = size * scale << bits
        while count:
            place = bisect_left(runs, wanted)
            if place == len(runs):
                room, left, first = capacity, places, num_packs
                each = min(capacity // size, left) if places else capacity // size
                num_packs = stop = num_packs - (-count // each)
            else:
                key = runs[place]
                first, room = key & mask, key >> bits
                stop = stops[first]
                if stop == first + 1 and not places:  # a single pack: by far the most steps
                    taken = min(room // size, count)
                    steps += first, taken, taken
                    del runs[place]
                    room -= taken * size
                    if room >= least:
                        insort(runs, room << bits | first)
                    count -= taken
                    continue
                room, left = divmod(room, scale)
                each = min(room // size, left) if places else room // size
                used = min(stop, first - (-count // each))
                if used < stop:
                    runs[place] = key + used - first
                    stops[used] = stop
                else:
                    del runs[place]
                stop = used
            taken = min(count, (stop - first) * each)
            steps += first, each, taken
            full, rest = divmod(taken, each)
            put(first, first + full, room - each * size, left - each if places else 0)
            put(first + full, stop, room - rest * size, left - rest if places else 0)
            count -= taken
    return _Steps(steps, num_packs)


def _runs_of_like(sizes: list[int], counts: list[int], capacity: int, max_docs: int | None) -> _Steps:
    """Cut the pieces, from the longest on, into runs of which ``pieces * longest`` is at most the capacity.

    No other cut into runs has fewer: each begins as far down as it can.
    """
    steps: list[int] = []
    num_packs = open_places = 0
    for size, count in zip(sizes, counts, strict=True):
        joined = min(count, open_places)
        if joined:
            steps += num_packs - 1, joined, joined
            open_places -= joined
        if rest := count - joined:
            each = min(capacity // size, max_docs or capacity)
            steps += num_packs, each, rest
            num_packs -= -rest // each
            open_places = -rest % each
    return _Steps(steps, num_packs)
