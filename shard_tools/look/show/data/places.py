"""Find which image or sound of a sample belongs to each place in its turns and tokens.

Fields of one medium belong to the places of that medium in their order: ``jpg``, or ``0.jpg``, ``1.jpg``, …. Where
their numbers differ, no place gets any, rather than another one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shard_tools.look.show.data.turns import ChatTurn, TurnPart, with_marks


def placed(turns: Sequence[ChatTurn], fields: Mapping[str, Sequence[str]]) -> tuple[ChatTurn, ...]:
    """Return turns in which each place has its field.

    Args:
        turns: The turns.
        fields: The names of the sample's fields by medium, in their order.
    """
    if not any(part.medium for turn in turns for part in turn.parts) and any(fields.values()):
        turns = with_marks(turns)
    waiting = {}
    for medium, names in fields.items():
        num = sum(part.medium == medium for turn in turns for part in turn.parts)
        waiting[medium] = iter(names if num == len(names) else ())

    def with_field(part: TurnPart) -> TurnPart:
        return replace(part, field=next(waiting[part.medium], "")) if part.medium in waiting else part

    return tuple(replace(turn, parts=tuple(map(with_field, turn.parts))) for turn in turns)


def of_runs(runs: Sequence[int], names: Sequence[str], *, is_cut: bool) -> list[tuple[str, ...]]:
    """Return the fields of each run of a placeholder token.

    Places that touch make one run; then all of them have equally many tokens, or nobody knows which are whose.

    Args:
        runs: Number of tokens of each run.
        names: The fields in their order.
        is_cut: Whether there may be further runs, which are not read.
    """
    if len(runs) == len(names) or (is_cut and len(runs) < len(names)):
        return [(name,) for name in names[: len(runs)]]
    each, rest = divmod(sum(runs), max(len(names), 1))
    if is_cut or rest or not each or any(run % each for run in runs):
        return [()] * len(runs)
    waiting = iter(names)
    return [tuple(next(waiting) for _ in range(run // each)) for run in runs]
