"""Say where a remote loader's actors run, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from streaming.arguments import checks_names, is_number, is_whole, parse_bytes
from streaming.errors import ConfigError


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGroup:
    """The Ray actors that read for a ``DataLoader``.

    Attributes:
        name: Of a Ray placement group, whose bundles the actors go into, one after the other; so they run beside the
            training actors that share it. Where Ray knows no placement group of this name, the actors go where their
            resources are free, several of them spread over the nodes, and the name only labels them.
        num_actors: Readers; data ranks are dealt to them in equal runs. One reads everything; more read side by side.
        num_cpus: CPUs that each reserves.
        memory: Bytes of main memory that each reserves, or None; a number or text such as ``"16GiB"``.
        resources: Custom Ray resources that each reserves, say ``{"data_node": 1}``.
        ahead_limit: Bytes of batches that lie ready in the object store before the loop has handed them out.
    """

    name: str
    num_actors: int = 1
    num_cpus: float = 1
    memory: int | str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    ahead_limit: int | str = "1GiB"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"remote_group: expected a name, got {self.name!r}")
        if not is_whole(self.num_actors) or self.num_actors < 1:
            raise ConfigError(f"remote_group {self.name!r}: num_actors: expected at least 1, got {self.num_actors!r}")
        for what, value in {"num_cpus": self.num_cpus, **self.resources}.items():
            if not is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"remote_group {self.name!r}: {what}: expected a number from 0 on, got {value!r}")
        for what, size in (("memory", self.memory), ("ahead_limit", self.ahead_limit)):
            if size is not None:
                parse_bytes(size, name=f"remote_group {self.name!r}: {what}")

    @property
    def ahead_limit_bytes(self) -> int:
        """``ahead_limit`` as a number."""
        return parse_bytes(self.ahead_limit, name="ahead_limit")

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` as a number."""
        return None if self.memory is None else parse_bytes(self.memory, name="memory")


def as_remote_group(given: RemoteGroup | str) -> RemoteGroup:
    """Return ``given`` itself, or a group of that name with one actor.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(given, RemoteGroup):
        return given
    if isinstance(given, str):
        return RemoteGroup(name=given)
    raise ConfigError(f"remote_group: expected a name or a streaming.RemoteGroup, got {given!r}")


def deal(num_ranks: int, num_actors: int) -> tuple[range, ...]:
    """Return the data ranks of each actor: equal runs, or runs that differ by one; no more actors than ranks."""
    count = min(num_ranks, num_actors)
    return tuple(range(one * num_ranks // count, (one + 1) * num_ranks // count) for one in range(count))
