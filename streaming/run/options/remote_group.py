"""Configure the number and the placement of a remote loader's actors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from streaming.common.arguments import checks_names, is_number, is_whole, parse_bytes
from streaming.errors import ConfigError


@checks_names()
@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGroup:
    """Configure the Ray actors that read for a ``DataLoader``.

    ::

        loader = DataLoader(make_dataset, 32, device_mesh=mesh, remote_group=RemoteGroup(name="data", num_actors=4))

    Attributes:
        name: Name of a Ray placement group. The actors are placed in its bundles in turn, beside the training actors
            that share it. If Ray knows no such placement group, the actors go wherever their resources are available
            (several are spread over the nodes), and the name is only a label.
        num_actors: Number of readers. Data ranks are dealt to them in consecutive runs of equal length; they read in
            parallel.
        num_cpus: Number of CPUs reserved per actor.
        memory: Main memory reserved per actor, in bytes or as text such as ``"16GiB"``; None: no reservation.
        resources: Custom Ray resources reserved per actor, such as ``{"data_node": 1}``.
        ahead_limit: Upper bound on the bytes of batches in the object store that the loop has not delivered yet.

    Raises:
        ConfigError: A value is invalid.
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
                raise ConfigError(f"remote_group {self.name!r}: {what}: expected a number of at least 0, got {value!r}")
        for what, size in (("memory", self.memory), ("ahead_limit", self.ahead_limit)):
            if size is not None:
                parse_bytes(size, name=f"remote_group {self.name!r}: {what}")

    @property
    def ahead_limit_bytes(self) -> int:
        """``ahead_limit`` in bytes."""
        return parse_bytes(self.ahead_limit, name="ahead_limit")

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes, or None."""
        return None if self.memory is None else parse_bytes(self.memory, name="memory")


def as_remote_group(given: object) -> RemoteGroup:
    """Return ``given`` itself, or a group with that name and one actor.

    Raises:
        ConfigError: ``given`` is neither a ``RemoteGroup`` nor a string.
    """
    if isinstance(given, RemoteGroup):
        return given
    if isinstance(given, str):
        return RemoteGroup(name=given)
    raise ConfigError(f"remote_group: expected a name or a streaming.RemoteGroup, got {given!r}")
