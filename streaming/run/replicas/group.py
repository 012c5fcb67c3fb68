"""Exchange messages among the ranks of one data share, in a group of our own: the reading rank sends, the others reply.

The group is always gloo, whatever backend the job uses, and separate from the job's groups: its messages cannot mix
with the user's collectives. Every message is answered, so that after the last answer nothing is in transit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from streaming.build.batches.jagged import int64s
from streaming.common.job.store import job_store
from streaming.errors import ConfigError, ReplicaError

_HEAD = 3
_REPLY = 4


class ReplicaGroup:
    """Connections between rank ``ranks[0]`` and each of the others. Used by one thread at a time.

    Making a group waits for all members. It ends with its last reference.

    Args:
        ranks: Ranks of ``torch.distributed``, in the same order on all members.
        timeout_s: Time limit in seconds for any member to join, or to send or receive a message.
        option: The user's option, for messages; groups of different options never meet.
        of: What the ranks have in common, for messages.

    Raises:
        ConfigError: torch.distributed is not set up, or this rank is not one of ``ranks``.
        ReplicaError: A member did not join.
    """

    def __init__(
        self, ranks: Sequence[int], timeout_s: float, *, option: str = 'replicate="broadcast"',
        of: str = "one data share",
    ) -> None:  # fmt: skip
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        cure = "replicate=Broadcast(timeout_s=…)"
        self._group, self.place = gloo_group(self.ranks, timeout_s, option=option, of=of, cure=cure)

    def tell(self, kind: int, number: int, payloads: Sequence[torch.Tensor | None]) -> list[list[int]]:
        """Send a message to every other member, ``payloads[i]`` (uint8) to member i + 1. Return their replies.

        Raises:
            ReplicaError: A member is gone, or took longer than the time-out.
        """
        works: list[tuple[int, Any]] = []
        heads = [int64s((kind, number, -1 if payload is None else len(payload))) for payload in payloads]
        replies = [int64s([0] * _REPLY) for _ in payloads]
        for member, (head, payload) in enumerate(zip(heads, payloads, strict=True), 1):
            works.append((member, self._guard(member, self._group.send, [head], member, 0)))
            if payload is not None and len(payload):
                works.append((member, self._guard(member, self._group.send, [payload], member, 1)))
        for member, reply in enumerate(replies, 1):
            works.append((member, self._guard(member, self._group.recv, [reply], member, 2)))
        for member, work in works:
            self._guard(member, work.wait)
        return [reply.tolist() for reply in replies]

    def hear(self, allocate: Callable[[int], torch.Tensor]) -> tuple[int, int, torch.Tensor | None]:
        """Return the next message of member 0: its kind, its number, and its payload in memory from ``allocate``.

        Raises:
            ReplicaError: Member 0 is gone, or was silent for longer than the time-out.
        """
        head = int64s([0] * _HEAD)
        self._guard(0, self._group.recv, [head], 0, 0, wait=True)
        kind, number, size = head.tolist()
        if size < 0:
            return kind, number, None
        payload = allocate(size)
        if size:
            self._guard(0, self._group.recv, [payload], 0, 1, wait=True)
        return kind, number, payload

    def reply(self, *values: int) -> None:
        """Answer the last received message.

        Raises:
            ReplicaError: Member 0 is gone.
        """
        answer = int64s([*values, *[0] * (_REPLY - len(values))])
        self._guard(0, self._group.send, [answer], 0, 2, wait=True)

    def _guard(self, member: int, call: Callable[..., Any], *args: Any, wait: bool = False) -> Any:
        try:
            result = call(*args)
            return result.wait() if wait else result
        except (RuntimeError, dist.DistError) as error:
            what = "which reads for this one" if member == 0 else "for which this one reads"
            raise ReplicaError(
                f"rank {self.ranks[member]}, {what}, is gone or gave no sign for {self.timeout_s:g} s "
                f"(replicate=Broadcast(timeout_s=…)); look for its own error. {_first_line(error)}"
            ) from error


def gloo_group(
    ranks: Sequence[int], timeout_s: float, *, option: str, of: str, cure: str, rank: int | None = None
) -> tuple[Any, int]:
    """Make a process group of some ranks over gloo, and return it with this rank's place. Waits for all members.

    Args:
        ranks: In the same order on all members.
        timeout_s: Time limit in seconds for any member to join, or to send or receive a message.
        option: The user's option.
        of: What the ranks have in common, for messages.
        cure: What to do if a member does not join, for messages.
        rank: The member that this one must be by torch.distributed; None: any.

    Raises:
        ConfigError: torch.distributed is not set up, or gives this process another rank.
        ReplicaError: A member did not join.
    """
    own, store = job_store(option)
    if own not in (ranks if rank is None else (rank,)):
        expected = f"one of {tuple(ranks)}" if rank is None else f"{rank}"
        raise ConfigError(
            f"{option}: torch.distributed calls this process rank {own}, but in the mesh it is {expected}; make the "
            "mesh of torch.distributed's ranks, or, after remesh(), set up torch.distributed again for the new world"
        )
    place = ranks.index(own)
    digest = hashlib.sha256(repr((option, tuple(ranks))).encode()).hexdigest()[:32]
    # The n-th group of a member meets the n-th group of the others.
    number = store.add(f"shardstream/replicas/{digest}/{place}", 1)
    prefix = dist.distributed_c10d.PrefixStore(f"shardstream/replicas/{digest}/group/{number}", store)
    try:
        return dist.ProcessGroupGloo(prefix, place, len(ranks), timedelta(seconds=timeout_s)), place
    except (RuntimeError, dist.DistError) as error:
        raise ReplicaError(
            f"the ranks {tuple(ranks)} of {of} did not all begin to iterate within {timeout_s:g} s ({cure}); did one "
            f"of them fail, or not open its loader? {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
