"""Fit pieces under several budgets at once: tokens, and other quantities that are limited in a pack.

This is best-fit-decreasing with one number for the size of a piece and for the room of a pack: the sum of its shares of
all budgets (Panigrahy, Talwar, Uyeda and Wieder, "Heuristics for vector bin packing", 2011). If several budgets bind,
packs run out of one while they have room in another. So with ``rules.spread`` pieces are also spread over the fewest
packs that could hold them, each into the pack that has the most of what the piece needs (their dot product), and the
result with fewer packs is taken. Shares are integers, so that the result is the same on every platform.
"""

from __future__ import annotations

from operator import gt

import numpy as np

from streaming.order.packing.rules import PackRules, Pieces, rounded
from streaming.types import Int64Array

_WHOLE = 2**40  # of a budget; times budgets of up to 2**20 columns, sums fit into 63 bits
_NEVER = np.iinfo(np.int64).max
_FINE = 2**20  # of a budget: products of two shares, of up to 2**20 columns, fit into 63 bits
_OPENED = 64
"""Number of packs allocated at first; doubled when necessary."""


def order_of_several(pieces: Pieces, rules: PackRules) -> Int64Array:
    """Return the order in which to place pieces, int64 [n]: by descending share (tokens if ``padded``), then by index.

    Pieces that must be alike are adjacent.
    """
    taken = _taken(pieces, rules)
    if rules.padded:
        return np.lexsort((-taken[:, 0], *_kinds(pieces, rules).T))
    return np.argsort(-(taken @ _weights(rules)), kind="stable")


def fit_several(pieces: Pieces, order: Int64Array, rules: PackRules) -> list[int]:
    """Fit pieces, in this order, into packs that exceed no budget; return the pack of each.

    Among the packs with room in every budget, a piece goes into the one with the least room, as a sum of shares; ties
    go to the first. With ``rules.spread``, see the module. Padded packs are runs of pieces with equal values in the
    columns that must be alike.
    """
    taken = _taken(pieces, rules)[order]
    if rules.padded:
        return _runs_of_like(taken, _kinds(pieces, rules)[order], rules)
    found = _best_fit(taken, rules)
    fewest = _fewest(taken, rules) if rules.spread and found else 0
    return min(found, _spread(taken, rules, fewest), key=max) if fewest and max(found) >= fewest else found


def _taken(pieces: Pieces, rules: PackRules) -> Int64Array:
    """Return the amount of each budget that each piece takes, int64 [n, 1 + len(budgets)]."""
    amounts = pieces.amounts[:, : len(rules.budgets)]
    return np.column_stack([rounded(pieces.lengths, rules.multiple), amounts])


def _kinds(pieces: Pieces, rules: PackRules) -> Int64Array:
    """Return the values in which each piece must equal others of its pack, int64 [n, alike]."""
    return pieces.amounts[:, len(rules.budgets) :]


def _weights(rules: PackRules) -> Int64Array:
    """Return the share of each budget that one unit takes."""
    return _WHOLE // np.maximum(np.array([rules.length, *rules.budgets], np.int64), 1)


def _best_fit(taken: Int64Array, rules: PackRules) -> list[int]:
    """Return the pack of each piece.

    The number of pieces is a budget, too: each piece takes 1, with a share of 0.
    """
    limits = [rules.length, *rules.budgets]
    shares = (taken @ _weights(rules)).tolist()
    whole = int(_weights(rules) @ np.array(limits))
    if rules.max_docs is not None:
        taken, limits = np.column_stack([taken, np.ones(len(taken), np.int64)]), [*limits, rules.max_docs]
    # Room of each pack in each budget, and the sum of its shares. Unopened packs are empty, so they have the most room:
    # the first of them is chosen if no other has room.
    rooms = [np.full(_OPENED, limit, np.int64) for limit in limits]
    scores = np.full(_OPENED, whole, np.int64)
    pack_of: list[int] = []
    for share, piece in zip(shares, taken.tolist(), strict=True):
        fits = rooms[0] >= piece[0]
        for room, takes in zip(rooms[1:], piece[1:], strict=True):
            fits &= room >= takes
        pack = int(np.where(fits, scores, _NEVER).argmin())
        for room, takes in zip(rooms, piece, strict=True):
            room[pack] -= takes
        scores[pack] -= share
        pack_of.append(pack)
        if pack == len(scores) - 1:
            rooms = [np.append(room, np.full_like(room, limit)) for room, limit in zip(rooms, limits, strict=True)]
            scores = np.append(scores, np.full_like(scores, whole))
    return pack_of


def _limits(rules: PackRules) -> list[int]:
    """Return the limits of a pack; the last may be its number of pieces."""
    return [rules.length, *rules.budgets, *([] if rules.max_docs is None else [rules.max_docs])]


def _counted(taken: Int64Array, rules: PackRules) -> Int64Array:
    """Return the amounts that pieces take of all ``_limits``: of the number of pieces, 1."""
    return taken if rules.max_docs is None else np.column_stack([taken, np.ones(len(taken), np.int64)])


def _fewest(taken: Int64Array, rules: PackRules) -> int:
    """Return a number of packs that no packing can do with less than: by the sum of each budget."""
    limits = np.maximum(np.array(_limits(rules)), 1)
    return int((-(-_counted(taken, rules).sum(axis=0) // limits)).max(initial=1))


def _spread(taken: Int64Array, rules: PackRules, num_packs: int) -> list[int]:
    """Return the pack of each piece: of a number of packs open from the start, that with the most of what it needs."""
    limits = np.array(_limits(rules), np.int64)
    taken = _counted(taken, rules)
    shares = taken * _FINE // np.maximum(limits, 1)
    rooms = np.tile(limits, (num_packs, 1))  # [packs, limits]; a new pack is added if none has room
    left = np.full(rooms.shape, _FINE, np.int64)
    pack_of: list[int] = []
    for piece, share in zip(taken, shares, strict=True):
        fits = (rooms >= piece).all(axis=1)
        pack = int(np.where(fits, left @ share, -1).argmax())
        if not fits[pack]:
            pack = len(rooms)
            rooms, left = np.append(rooms, [limits], axis=0), np.append(left, np.full((1, len(limits)), _FINE), axis=0)
        rooms[pack] -= piece
        left[pack] -= share
        pack_of.append(pack)
    return pack_of


def _runs_of_like(taken: Int64Array, kinds: Int64Array, rules: PackRules) -> list[int]:
    """Return the run of each piece; a run has as many pieces of a kind as fit, times the largest amounts."""
    budgets = [rules.length, *rules.budgets]
    is_first = np.concatenate([[True], (kinds[1:] != kinds[:-1]).any(axis=1)]).tolist()
    pack_of: list[int] = []
    run, count, most = -1, 0, budgets
    for begins, piece in zip(is_first, taken.tolist(), strict=False):  # without a piece, there is no first one
        joined = list(map(max, most, piece))
        is_full = count == rules.max_docs or any(map(gt, [(count + 1) * one for one in joined], budgets))
        if begins or is_full:
            run, count, joined = run + 1, 0, piece
        count, most = count + 1, joined
        pack_of.append(run)
    return pack_of
