"""Balance the cost of packs over the ranks of a global batch: which rank computes which pack, and in which order.

Packs with the same number of tokens differ in the cost of attention: one document of T tokens has T² / 2 pairs, T / n
documents of n tokens have T · n / 2. Ranks synchronize at every microbatch (gathered parameters, reduced gradients), so
all ranks wait for the slowest. Both remedies here are pure functions: every rank knows all lengths, and so computes the
same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import checked_int
from streaming.common.arrays import sums
from streaming.errors import ConfigError
from streaming.types import Int64Array

Balance: TypeAlias = Literal["local", "exchange"]
"""Whether packs are only sorted within a rank, or also redistributed over all ranks of a global batch."""
Cost: TypeAlias = Callable[..., float]
"""Cost of a pack, in any unit: a pure function of the lengths of its pieces, int64 [n].

Keyword-only parameters without a default are columns of the documents, or budgets, float64 [n]:
``def cost(lengths, *, patches): …``.
"""
_RESTS = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
Costs: TypeAlias = "npt.NDArray[np.int64] | npt.NDArray[np.float64]"
TOKENS_LIKE_ATTENTION = 61_000
"""c: for a document of c tokens, attention costs as much as everything else. For 8 billion parameters: 32 layers of
width 4,096 spend 2 * 8e9 flops on a token and 2 * 32 * 4096 on each pair of tokens; 16e9 / 262,144 = 61,000."""


def pack_costs(
    lengths: Int64Array, splits: Int64Array, sizes: Int64Array, cost: Cost | str | int | None = None,
    measured: npt.NDArray[np.float64] | None = None,
) -> Costs:  # fmt: skip
    """Return the cost of each pack, [K].

    Unless the user gives a function or a quantity, the cost is ``size * c + sum of length**2``, in integers, so that
    every platform sorts packs in the same order.

    Args:
        lengths: int64 [n], tokens of the pieces, pack after pack.
        splits: int64 [K + 1]; pieces ``splits[k]`` to ``splits[k + 1]`` are in pack k.
        sizes: int64 [K], token positions of each pack, including padding.
        cost: A function of the lengths of one pack's pieces; a quantity of its documents, as text; or c
            (:data:`TOKENS_LIKE_ATTENTION`).
        measured: float64 [n, quantities], what :func:`quantities_of` names; None: nothing.

    Raises:
        ConfigError: ``cost`` is neither, or the function did not return a finite number.
    """
    if isinstance(cost, str) and measured is not None:
        packs = np.arange(len(splits) - 1).repeat(np.diff(splits))
        return np.bincount(packs, measured[:, 0], len(splits) - 1)
    if callable(cost):
        names = quantities_of(cost)
        given = np.empty((len(lengths), 0)) if measured is None else measured
        return np.array(
            [
                _checked_cost(cost, lengths[a:b], dict(zip(names, given[a:b].T, strict=True)))
                for a, b in pairwise(splits)
            ]
        )
    c = TOKENS_LIKE_ATTENTION if cost is None else checked_int("cost", cost, 1, 2**31)
    pairs = sums(lengths * lengths)
    costs: Int64Array = sizes * c + np.diff(pairs[splits])
    return costs


def quantities_of(cost: Cost | str | int | None) -> tuple[str, ...]:
    """Return the names of columns or budgets, or the arithmetic over columns, that a cost needs of each document."""
    if isinstance(cost, str):
        return (cost,)
    if not callable(cost):
        return ()
    try:
        parameters = signature(cost).parameters.values()
    except (TypeError, ValueError):  # of compiled code
        return ()
    return tuple(one.name for one in parameters if one.kind == one.KEYWORD_ONLY and one.default is one.empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRules:
    """The user's validated options for balancing the packs of a global batch.

    Attributes:
        how: ``"local"``: each rank sorts its own packs; ``"exchange"``: packs are redistributed over all ranks.
        cost: See :func:`pack_costs`.

    Raises:
        ConfigError: An attribute is invalid.
    """

    how: Balance
    cost: Cost | str | int | None = None

    def __post_init__(self) -> None:
        if self.how not in get_args(Balance):
            raise ConfigError(f"balance: expected one of {', '.join(get_args(Balance))}, or None, got {self.how!r}")
        if self.cost is not None and not callable(self.cost) and not isinstance(self.cost, str):
            checked_int("cost", self.cost, 1, 2**31)
        if callable(self.cost):
            _check_parameters(self.cost)

    @property
    def quantities(self) -> tuple[str, ...]:
        """See :func:`quantities_of`."""
        return quantities_of(self.cost)


def order_local(costs: Costs) -> Int64Array:
    """Return the order of one rank's packs of a global batch, the most expensive first; int64 [B].

    The most expensive packs of all ranks then coincide in the same microbatch. Each rank keeps its packs.

    Args:
        costs: [B], costs of the rank's packs; equal ones keep their order.
    """
    return np.argsort(-costs, kind="stable")


def exchange(costs: Costs, shares: Sequence[int]) -> list[Int64Array]:
    """Distribute the packs of a global batch over its ranks by cost.

    Microbatch j of all ranks together holds the j-th most expensive group of packs. Every second microbatch is dealt in
    reverse order (a snake), which also balances the sums. A rank keeps its number of packs. If some ranks have one pack
    more, they compute the cheapest packs in an additional last microbatch.

    Args:
        costs: [B], costs of all packs of the global batch; equal ones keep their order.
        shares: Number of packs of each rank; their sum is B.

    Returns:
        The packs that each rank computes, int64 [shares[r]].

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
    """Return the fraction of time, 0 to 1, that ranks wait at the ends of microbatches.

    Args:
        costs: [num_ranks, microbatches], in the order of computation.
    """
    waits = costs.max(axis=0).sum()
    return float(1 - costs.mean(axis=0).sum() / waits) if waits else 0.0


def _check_parameters(cost: Cost) -> None:
    """Check that a function can be called with the lengths of a pack's pieces, and with the columns that it names.

    Raises:
        ConfigError: It cannot.
    """
    try:
        known = signature(cost)
    except (TypeError, ValueError):  # of compiled code
        return
    try:
        known.bind(None, **dict.fromkeys(quantities_of(cost)))
    except TypeError as error:
        needed = [one for one in known.parameters.values() if one.default is one.empty and one.kind not in _RESTS]
        more = [one.name for number, one in enumerate(needed) if number or one.kind is one.KEYWORD_ONLY]
        wanted = f"lengths, *, {', '.join(more or ['patches'])}"
        raise ConfigError(
            f"cost: expected a function of the lengths of a pack's pieces, whose columns are keyword-only parameters: "
            f"({wanted}), got {known}"
        ) from error


def _checked_cost(cost: Cost, lengths: Int64Array, given: Mapping[str, npt.NDArray[np.float64]]) -> float:
    found = cost(lengths, **given)
    number = _as_number(found)
    if number is None or not np.isfinite(number):
        raise ConfigError(
            f"cost: expected a finite number for a pack whose documents have the lengths {lengths.tolist()[:8]}, "
            f"got {found!r}"
        )
    return number


def _as_number(found: object) -> float | None:
    """Return a number of any library, such as a tensor of no dimension, as a float; None: it is no number."""
    item = getattr(found, "item", None)
    try:
        plain: Any = item() if callable(item) else found
        return None if isinstance(plain, bool) or not hasattr(plain, "__float__") else float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # of several elements, or too large
        return None
