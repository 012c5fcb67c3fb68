"""Check at the start that all ranks will train on the same data; let all ranks change something together, or none.

This uses the key-value store of torch.distributed instead of a collective, so a rank that iterates alone never waits
longer than a time-out. Every rank stores one small entry and reads one verdict; the first rank of the mesh compares.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from streaming.errors import AgreementError

DEFAULT_TIMEOUT_S = 60.0
"""How long the first iteration waits for absent ranks before it warns and continues without them."""

_NAMED = 8
"""Number of differences that a message lists."""

_log = logging.getLogger(__name__)

Facts = Mapping[str, Any]
"""Facts that must agree: JSON-serializable values by the names that users know."""


class ResultBoard(Protocol):
    """The part of ``torch.distributed.Store`` that is used. All ranks see all entries."""

    def set(self, key: str, value: str) -> object:
        """Store an entry."""

    def get(self, key: str) -> bytes:
        """Read an entry that exists."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the new number."""

    def compare_set(self, key: str, expected: str, value: str) -> object:
        """Store an entry unless there is one; ``expected`` is ""."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""

    def wait(self, keys: list[str], timeout: timedelta) -> object:
        """Wait for all keys; raises after the time-out."""

    def delete_key(self, key: str) -> bool:
        """Remove an entry."""


def agree(
    board: ResultBoard, rank: int, ranks: Sequence[int], facts: Facts, *, subject: str, timeout_s: float, required: bool
) -> None:
    """Compare ``facts`` over ``ranks``.

    At a start, the n-th call of a rank for a ``subject`` is matched with the n-th call of the other ranks; a late call
    is compared with the verdict. If absence is an error, calls are matched by rounds that the store counts, so that the
    next call is in step even after a call that some ranks missed.

    Args:
        board: Store of the ranks' entries.
        rank: This rank.
        ranks: All participants, in the same order on all ranks; the first compares.
        facts: This rank's facts.
        subject: Name of the comparison; calls for different subjects are independent.
        timeout_s: Maximum wait for absent ranks.
        required: Whether absence is an error; otherwise it is a warning.

    Raises:
        AgreementError: Ranks differ (the same message on all of them), or some did not arrive.
    """
    home, turn = _home(board, rank, ranks, subject)
    if required:
        home = f"{home}/required"
        turn = _open_round(board, home)
    own, verdict_key = f"{home}/{turn}/{rank}", f"{home}/{turn}/verdict"
    board.set(own, json.dumps(dict(facts)))
    if rank == ranks[0]:
        verdict = _gather(board, f"{home}/{turn}", ranks, timeout_s)
        board.set(verdict_key, json.dumps(verdict))
        if required:  # Invariant: the named round is open, or has a verdict, which leads to the next one
            board.set(f"{home}/round", str(turn + 1))
        board.delete_key(f"{home}/{turn - 1}/verdict")
    elif not _came(board, [verdict_key], timeout_s + _MARGIN_S):
        board.delete_key(own)  # the round is still open, and the entry may be outdated when it is compared
        _absent([ranks[0]], timeout_s, required=required)
        return
    verdict = json.loads(board.get(verdict_key))
    if verdict["problem"]:
        raise AgreementError(verdict["problem"])
    late = differences({rank: facts}, verdict["majority"])
    if late:  # arrived after the verdict
        raise AgreementError(_problem(late, len(ranks) - len(verdict["missing"])))
    if verdict["missing"] and (required or rank not in verdict["missing"]):
        _absent(verdict["missing"], timeout_s, required=required)


def stand_aside(board: ResultBoard, rank: int, ranks: Sequence[int], *, subject: str) -> None:
    """Make :func:`agree` on ``subject`` compare nothing, because ``ranks`` are not ranks of this job.

    In programs with tensor parallelism of their own, a mesh has only the data ranks. Several processes then share one
    rank of the mesh, so some of its ranks would be awaited in vain.
    """
    home, turn = _home(board, rank, ranks, subject)
    board.set(f"{home}/{turn}/{rank}", json.dumps(None))


def _home(board: ResultBoard, rank: int, ranks: Sequence[int], subject: str) -> tuple[str, int]:
    """Return the key of a subject's entries, and the number of this call of ``rank`` for it, from 1."""
    digest = hashlib.sha256(json.dumps([subject, list(ranks)]).encode()).hexdigest()[:32]
    home = f"shardstream/agree/{digest}"
    return home, board.add(f"{home}/turn/{rank}", 1)


class RankGroup:
    """Ranks that change something together: all of them change it, or none does.

    ::

        ranks = RankGroup(board, rank, ranks, subject="set_weights", timeout_s=600)
        answers = ranks.exchange(lambda: {"weights": weights})  # the facts of all ranks; equal on each
        ranks.exchange(prepare)  # if one rank cannot, no rank continues

    Calls are matched by rounds that the store counts, and not by each rank alone. So a rank that missed a call takes
    part in the next one, and a rank that calls after the others have given up changes nothing alone.

    Args:
        board: Store of the ranks' entries; None: this rank is the only one.
        rank: This rank.
        ranks: All participants, in the same order on all ranks.
        subject: Name of the change, for messages; exchanges about different subjects are independent.
        timeout_s: Maximum wait for absent ranks.
    """

    def __init__(
        self, board: ResultBoard | None, rank: int, ranks: Sequence[int], *, subject: str, timeout_s: float
    ) -> None:
        self.rank, self._board, self._ranks = rank, board, tuple(ranks)
        self._subject, self._timeout_s = subject, timeout_s
        self._num_exchanges = 0

    def exchange(self, make: Callable[[], Facts]) -> dict[int, dict[str, Any]]:
        """Call ``make`` on each rank, and return its results by rank.

        Raises:
            Exception: Any error of ``make`` on this rank.
            AgreementError: ``make`` failed on another rank, which is named; ranks did not arrive in time; or the
                process that keeps the store has ended. Then no rank gets an answer.
        """
        self._num_exchanges += 1
        failure: Exception | None = None
        facts: Facts = {}
        try:
            facts = make()
        except Exception as error:
            if self._board is None:
                raise
            failure = error
        if self._board is None:
            return {self.rank: dict(facts)}
        answers = self._answers(self._board, {"facts": dict(facts), "failure": "" if failure is None else str(failure)})
        if failure is not None:
            raise failure
        for rank, answer in answers.items():
            if answer["failure"]:
                raise AgreementError(
                    f"{self._subject}: nothing has changed, because rank {rank} cannot: {answer['failure']}"
                )
        return {rank: answer["facts"] for rank, answer in answers.items()}

    def _answers(self, board: ResultBoard, answer: Facts) -> dict[int, Any]:
        try:
            return self._round(board, answer)
        except AgreementError:
            raise
        except RuntimeError as error:  # torch.distributed.DistNetworkError is one
            raise AgreementError(
                f"{self._subject}: the key-value store of torch.distributed does not answer "
                f"({str(error).splitlines()[0]}): the process that keeps it, usually rank 0 or torchrun's agent, has "
                "ended. Restart the job from its checkpoint"
            ) from error

    def _round(self, board: ResultBoard, answer: Facts) -> dict[int, Any]:
        digest = hashlib.sha256(json.dumps([self._subject, self._num_exchanges, self._ranks]).encode()).hexdigest()[:32]
        home = f"shardstream/together/{digest}"
        number = _open_round(board, home)
        place = f"{home}/{number}"
        verdict, own = f"{place}/verdict", f"{place}/{self.rank}"
        board.set(own, json.dumps(answer))
        if board.add(f"{place}/came", 1) == len(self._ranks):
            board.compare_set(verdict, "", json.dumps([]))
        elif not _came(board, [verdict], self._timeout_s):
            missing = [one for one in self._ranks if not board.check([f"{place}/{one}"])]
            board.compare_set(verdict, "", json.dumps(missing))
        # Invariant: the first verdict on a round is final, so all ranks get all entries, or all give up.
        missing = json.loads(board.get(verdict))
        board.set(f"{home}/round", str(number + 1))
        if missing:
            board.delete_key(own)
            raise AgreementError(
                f"{self._subject}: ranks {missing[:_NAMED]} of {len(self._ranks)} did not come within "
                f"{self._timeout_s:g} s, and nothing has changed on any rank; call it on all ranks, at the same step"
            )
        answers = {one: json.loads(board.get(f"{place}/{one}")) for one in self._ranks}
        for key in (str(self.rank), *(("verdict", "came") if self.rank == self._ranks[0] else ())):
            board.delete_key(f"{home}/{number - 1}/{key}")  # all ranks are in this round: none reads the last one
        return answers


def _open_round(board: ResultBoard, home: str) -> int:
    """Return the number of the first round without a verdict."""
    number = int(board.get(f"{home}/round")) if board.check([f"{home}/round"]) else 1
    while board.check([f"{home}/{number}/verdict"]):
        number += 1
    return number


_MARGIN_S = 5.0  # time for the comparing rank's own wait


def _came(board: ResultBoard, keys: list[str], timeout_s: float) -> bool:
    try:
        board.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:  # torch.distributed.DistStoreError is one
        return board.check(keys)
    return True


def _gather(board: ResultBoard, home: str, ranks: Sequence[int], timeout_s: float) -> dict[str, Any]:
    keys = [f"{home}/{rank}" for rank in ranks]
    present = list(ranks)
    if not _came(board, keys, timeout_s):
        present = [rank for rank, key in zip(ranks, keys, strict=True) if board.check([key])]
    entries = {rank: json.loads(board.get(f"{home}/{rank}")) for rank in present}
    for rank in present:
        board.delete_key(f"{home}/{rank}")
    if None in entries.values():  # a rank stands aside
        return {"problem": "", "majority": {}, "missing": []}
    majority = majority_of(list(entries.values()))
    found = differences(entries, majority)
    return {
        "problem": _problem(found, len(entries)) if found else "",
        "majority": majority,
        "missing": [rank for rank in ranks if rank not in entries],
    }


def majority_of(every: Sequence[Facts]) -> dict[str, Any]:
    """Return the most common value of each fact; ties go to the first rank."""
    names = dict.fromkeys(name for facts in every for name in facts)
    return {name: json.loads(Counter(_text(facts.get(name)) for facts in every).most_common(1)[0][0]) for name in names}


def differences(entries: Mapping[int, Facts], majority: Facts) -> list[tuple[int, str, Any, Any]]:
    """List the facts that differ: rank, fact, its value, and the majority's value."""
    return [
        (rank, name, facts.get(name), value)
        for rank, facts in entries.items()
        for name, value in majority.items()
        if _text(facts.get(name)) != _text(value)
    ]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _problem(found: Sequence[tuple[int, str, Any, Any]], num_ranks: int) -> str:
    lines = [
        f"  rank {rank}: {name} is {value!r}; most of the {num_ranks} ranks have {usual!r}"
        for rank, name, value, usual in found[:_NAMED]
    ]
    if len(found) > _NAMED:
        lines.append(f"  and {len(found) - _NAMED} more")
    return (
        "ranks do not agree, and would train on mixed-up data:\n"
        + "\n".join(lines)
        + "\nGive all ranks the same data set, "
        "options and state (agreement_timeout=None skips this check)"
    )


def _absent(missing: Sequence[int], timeout_s: float, *, required: bool) -> None:
    shown = ", ".join(map(str, missing[:_NAMED]))
    if len(missing) > _NAMED:
        shown += f" and {len(missing) - _NAMED} more"
    what = f"ranks {shown} did not come within {timeout_s:g} s to compare what they are about to iterate over"
    if required:
        raise AgreementError(f"{what}; call check_agreement() on all ranks of the mesh")
    _log.warning(
        "%s; continuing. If this rank iterates alone on purpose, give it a mesh of its own "
        "(infra.DeviceMesh.from_sizes("
        "dp_size=1, rank=0, world_size=1)), which also gives it all the data, or agreement_timeout=None",
        what,
    )
