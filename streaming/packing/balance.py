"""Balance what packs cost over the ranks of a global batch: who computes which pack, and in which order.

Packs of equal tokens differ in what attention costs them: one document of T tokens attends to T² / 2 pairs, T / n of n
tokens to T · n / 2. Ranks meet at every microbatch (gathered parameters, reduced gradients), so each waits for the
slowest. Both cures here are pure: every rank knows all lengths, and so works out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from streaming.arguments import checked_int, is_number
from streaming.arrays import sums
from streaming.errors import ConfigError
from streaming.types import Int64Array

Balance: TypeAlias = Literal["local", "exchange"]
"""Whether packs are put in order within a rank, or dealt over all ranks of a global batch too."""
Cost: TypeAlias = Callable[[Int64Array], float]
"""What a pack costs, in any unit: a pure function of the lengths of its pieces, int64[n]."""
Costs: TypeAlias = "npt.NDArray[np.int64] | npt.NDArray[np.float64]"
TOKENS_LIKE_ATTENTION = 61_000
"""c: a document of c tokens costs as much in attention as in all the rest. For 8 billion parameters: 32 layers of width
4,096 spend 2 * 8e9 flops on a token and 2 * 32 * 4096 on each pair of tokens; 16e9 / 262,144 = 61,000."""


def pack_costs(lengths: Int64Array, splits: Int64Array, sizes: Int64Array, cost: Cost | int | None = None) -> Costs:
    """Return what each pack costs, [K].

    Without a function of the user's the cost is ``size * c + sum of length**2``, in integers, so that every platform
    puts packs in the same order.

    Args:
        lengths: int64[n], tokens of the pieces, pack after pack.
        splits: int64[K + 1]; pieces ``splits[k]`` to ``splits[k + 1]`` are in pack k.
        sizes: int64[K], places of each pack, padding counted.
        cost: A function of the lengths of one pack's pieces, or c (:data:`TOKENS_LIKE_ATTENTION`).

    Raises:
        ConfigError: ``cost`` is neither, or the function returned no finite number.
    """
    if callable(cost):
        return np.array([_checked_cost(cost, lengths[a:b]) for a, b in pairwise(splits)])
    c = TOKENS_LIKE_ATTENTION if cost is None else checked_int("cost", cost, 1, 2**31)
    pairs = sums(lengths * lengths)
    costs: Int64Array = sizes * c + np.diff(pairs[splits])
    return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRules:
    """Say how packs of a global batch are balanced: the user's choices, checked.

    Attributes:
        how: ``"local"``: each rank puts its own in order; ``"exchange"``: they are dealt over all ranks.
        cost: See :func:`pack_costs`.

    Raises:
        ConfigError: An attribute that cannot work.
    """

    how: Balance
    cost: Cost | int | None = None

    def __post_init__(self) -> None:
        if self.how not in get_args(Balance):
            raise ConfigError(f"balance: expected one of {', '.join(get_args(Balance))}, or None, got {self.how!r}")
        if self.cost is not None and not callable(self.cost):
            checked_int("cost", self.cost, 1, 2**31)


def order_local(costs: Costs) -> Int64Array:
    """Order one rank's packs of a global batch, the dearest first; int64[B].

    The dearest packs of all ranks then meet in the same microbatch. Which packs a rank has does not change.

    Args:
        costs: [B], of the rank's packs; equal ones keep their order.
    """
    return np.argsort(-costs, kind="stable")


def exchange(costs: Costs, shares: Sequence[int]) -> list[Int64Array]:
    """Deal the packs of a global batch to its ranks by cost: those that each rank computes, int64[shares[r]].

    In order: microbatch j of all ranks together holds the packs that are j-th dearest, and every second microbatch is
    dealt backwards (a snake), so that sums are even too. A rank keeps its number of packs; where ranks differ in it,
    those with one more compute the cheapest in a last microbatch of their own.

    Args:
        costs: [B], of all packs of the global batch; equal ones keep their order.
        shares: Packs of each rank, B together.

    Example:
        >>> [packs.tolist() for packs in exchange(np.array([1, 9, 5, 7]), (2, 2))]
        [[1, 0], [3, 2]]
    """
    counts = np.asarray(shares)
    rounds = [np.flatnonzero(counts > number) for number in range(int(counts.max(initial=0)))]
    turns = [ranks[::-1] if number % 2 else ranks for number, ranks in enumerate(rounds)]
    owners = np.concatenate([np.zeros(0, np.int64), *turns])
    order = np.argsort(-costs, kind="stable")
    return [order[owners == rank] for rank in range(len(counts))]


def idle(costs: Costs) -> float:
    """Return the part of their time that ranks wait at the ends of microbatches, 0 to 1.

    Args:
        costs: [num_ranks, microbatches], in the order of computation.
    """
    waits = costs.max(axis=0).sum()
    return float(1 - costs.mean(axis=0).sum() / waits) if waits else 0.0


def _checked_cost(cost: Cost, lengths: Int64Array) -> float:
    found = cost(lengths)
    if not is_number(found) or not np.isfinite(float(found)):
        raise ConfigError(
            f"cost: expected a finite number for a pack whose documents have the lengths {lengths.tolist()[:8]}, "
            f"got {found!r}"
        )
    return float(found)
