"""Fit pieces under several budgets at once: tokens, and what else a pack may hold only so much of.

Best-fit-decreasing with one number for what a piece takes, and what room a pack has: the sum of the shares of all
budgets (Panigrahy, Talwar, Uyeda and Wieder, "Heuristics for vector bin packing", 2011). Shares are integers in
units of 2**-40, so that every platform places alike.
"""

from __future__ import annotations

import numpy as np

from streaming.packing.rules import PackRules, Pieces, rounded
from streaming.types import Int64Array

_WHOLE = 2**40  # of a budget; times budgets of up to 2**20 columns, sums fit into 63 bits


def fit_several(pieces: Pieces, rules: PackRules) -> tuple[Int64Array, Int64Array, int]:
    """Fit pieces into packs that exceed no budget.

    Takes pieces by falling share (by falling tokens where packs are padded), then by index; those that are to be alike
    come after each other. Each goes into the pack with the least room, as a sum of shares, among those that have room
    for it in every budget; the first of equals.

    Returns:
        The order in which pieces are placed, int64[n]; into which pack each goes, int64[n]; the number of packs.
    """
    num_budgets = len(rules.budgets)
    taken = np.column_stack([rounded(pieces.lengths, rules.multiple), pieces.amounts[:, :num_budgets]])
    budgets = np.array([rules.length, *rules.budgets], np.int64)
    if rules.padded:
        kinds = pieces.amounts[:, num_budgets:]
        order = np.lexsort((-taken[:, 0], *kinds.T))
        pack_of = _runs_of_like(taken[order], kinds[order], budgets, rules.max_docs)
    else:
        order = np.argsort(-(taken @ (_WHOLE // np.maximum(budgets, 1))), kind="stable")
        pack_of = _best_fit(taken[order], budgets, rules.max_docs)
    return order, pack_of, int(pack_of.max(initial=-1)) + 1


def _best_fit(taken: Int64Array, budgets: Int64Array, max_docs: int | None) -> Int64Array:
    """The pack of each piece; the number of pieces is a budget too, of which each takes 1."""
    weights = np.append(_WHOLE // np.maximum(budgets, 1), 0)
    budgets = np.append(budgets, max_docs or len(taken))
    taken = np.column_stack([taken, np.ones(len(taken), np.int64)])
    pack_of = np.empty(len(taken), np.int64)
    # Room of each pack in each budget, [packs, budgets]; packs that nobody has opened yet are empty.
    rooms = np.tile(budgets, (64, 1))
    scores, num_packs = rooms @ weights, 0
    never = np.iinfo(np.int64).max
    for number, piece in enumerate(taken):
        fits = (rooms[:num_packs] >= piece).all(axis=1)
        best = int(np.where(fits, scores[:num_packs], never).argmin()) if fits.any() else num_packs
        if best == num_packs:
            num_packs += 1
            if num_packs > len(rooms):
                rooms = np.concatenate([rooms, np.tile(budgets, (len(rooms), 1))])
                scores = np.resize(scores, len(rooms))
        rooms[best] -= piece
        scores[best] = rooms[best] @ weights
        pack_of[number] = best
    return pack_of


def _runs_of_like(taken: Int64Array, kinds: Int64Array, budgets: Int64Array, max_docs: int | None) -> Int64Array:
    """The run of each piece: as many pieces of a kind, times the most that one takes, as every budget allows."""
    pack_of = np.empty(len(taken), np.int64)
    is_first = np.concatenate([[True], (kinds[1:] != kinds[:-1]).any(axis=1)])
    run, count, most = -1, 0, budgets
    for number, piece in enumerate(taken):
        joined = np.maximum(most, piece)
        if is_first[number] or count == max_docs or ((count + 1) * joined > budgets).any():
            run, count, joined = run + 1, 0, piece
        count, most = count + 1, joined
        pack_of[number] = run
    return pack_of
