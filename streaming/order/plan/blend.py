"""Define how much a mixture draws from each source: a number of samples per pass, or shares of an endless run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from streaming.common.arguments import checked_count, some_names
from streaming.errors import ConfigError
from streaming.order.plan.order import ENDLESS
from streaming.order.plan.schedule import Schedule, WeightSchedule, checked_weights
from streaming.types import Int64Array, override

Weighing = Sequence[tuple[int, Mapping[str, float]]]
"""Pairs of a row and the weights from that row on."""
_OrdersT = TypeVar("_OrdersT")


class Blend(ABC):
    """How much is drawn from each source, and whether the draws end. Callers never test for a subclass.

    Sources are leaves, which hold samples; those of a nested mixture have names such as ``"web/en"``. A single dataset
    is one leaf without a name; a pass draws all its samples.

    Attributes:
        is_endless: Whether there is no end.
        what: Description of ``shown``, for messages.
        samples_per_pass: Samples of a pass over all sources; ``ENDLESS`` if it has no end.
    """

    is_endless: ClassVar[bool]
    what: ClassVar[str]
    samples_per_pass: int

    @abstractmethod
    def check(self, sources: Mapping[str, str]) -> None:
        """Check the blend of a ledger's entry against the entry's ``sources``.

        Raises:
            ConfigError: It is not valid.
        """

    @property
    @abstractmethod
    def shown(self) -> str:
        """The blend as text, for messages about changes."""

    @property
    @abstractmethod
    def as_weights(self) -> WeightSchedule | None:
        """Weights of the leaves, for a mixture around this one. None: this is a dataset."""

    @abstractmethod
    def quotas_of(self, name: str) -> Mapping[str, int]:
        """Return the samples of each leaf in a pass, for a mixture that calls this source ``name`` and counts passes.

        Raises:
            ConfigError: The blend is endless.
        """

    @abstractmethod
    def recorded(self) -> dict[str, Any]:
        """Return the fields of ``Entry`` that record this blend at the start of a run."""

    @abstractmethod
    def rows(self, start: int = 0) -> Weighing:
        """Return rows from ``start`` on and the weights from each on; [] for quotas, which never change."""

    @abstractmethod
    def shares(self, weighing: Weighing) -> Weighing:
        """Return relative amounts by the row of a run: the weights of its ledger (``weighing``), or the quotas."""

    def at(self, row: int) -> dict[str, float]:
        """Return the weights per sample at a row of a run without an end."""
        return dict(self.rows(row)[0][1])

    def largest_shares(self, row: int = 0) -> dict[str, float]:
        """Return the largest share of each source from a row on; {} for passes, which have no shares."""
        found: dict[str, float] = {}
        for _, weights in self.rows(row):
            total = sum(weights.values())
            for name, weight in weights.items():
                found[name] = max(found.get(name, 0.0), weight / total)
        return found

    def allows(self, other: Blend) -> bool:  # noqa: ARG002  a pass is laid out as a whole
        """Return whether a run may change to a different blend."""
        return False

    def check_weighable(self) -> None:
        """Check that the weights of a run can be changed.

        Raises:
            ConfigError: The run has an end.
        """
        raise ConfigError(
            "set_weights: this mixture ends (by size, repeats= or ends=): an epoch of it is laid out as a whole. Make "
            "it with weights= and ends=None, and give the loader an epoch_size"
        )

    @abstractmethod
    def readable(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Return the number of samples of each leaf that can be read by index: those of an epoch, or each one once."""

    @abstractmethod
    def in_words(self) -> str:
        """Describe the blend."""

    @abstractmethod
    def pack_passes(self, passes: Int64Array, sizes: Mapping[str, int]) -> Int64Array:
        """Return the pass numbers that determine which documents share a pack; see ``Granularity.pack_passes``."""

    def in_batches(self, size: int) -> Blend:  # noqa: ARG002  there is no rest
        """Return the blend that batches of ``size`` samples of one source each draw: whole batches only.

        Raises:
            ConfigError: A source has fewer samples than a batch.
        """
        return self

    @abstractmethod
    def needed(self, missing: set[str], laid: set[str]) -> set[str]:
        """Return the missing sources whose chunks determine positions of others; ``laid`` are all such sources."""

    @abstractmethod
    def orders(self, endless: Callable[[], _OrdersT], passes: Callable[[Mapping[str, int]], _OrdersT]) -> _OrdersT:
        """Return the orders made by one of two functions: for an endless run, or for passes with quotas."""


@dataclass(frozen=True, slots=True)
class PassBlend(Blend):
    """A number of samples of each source in each pass.

    Attributes:
        quotas: The numbers, by name.
        batch_size: Samples of a batch of one source, if a pass consists of such batches. Quotas that are no whole
            number of batches are then averages over passes; see ``BatchPasses``.
    """

    quotas: Mapping[str, int]
    batch_size: int | None = None
    is_endless = False
    what = "samples of each source in a pass"

    @override
    @property
    def samples_per_pass(self) -> int:  # type: ignore[override]
        return in_whole_batches(sum(self.quotas.values()), self.batch_size or 1)

    @override
    def check(self, sources: Mapping[str, str]) -> None:
        check_by_source("quotas", self.quotas, sources)
        missing = sorted(set(sources) - set(self.quotas))
        if missing:
            raise ConfigError(f"quotas: missing: {missing}")
        total = sum(checked_count(f"quotas of {name!r}", count) for name, count in self.quotas.items())
        checked_count("quotas of all sources", total, 1)

    @override
    @property
    def shown(self) -> str:
        return str(self.quotas)

    @override
    @property
    def as_weights(self) -> WeightSchedule | None:
        return None if "" in self.quotas else Schedule.steps({0: self.quotas})

    @override
    def quotas_of(self, name: str) -> Mapping[str, int]:
        return self.quotas

    @override
    def recorded(self) -> dict[str, Any]:
        return {"weights": {}, "quotas": self.quotas}

    @override
    def rows(self, start: int = 0) -> Weighing:
        return []

    @override
    def shares(self, weighing: Weighing) -> Weighing:
        return [(0, self.quotas)]

    @override
    def readable(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        return self.quotas

    @override
    def in_words(self) -> str:
        return f"{self.samples_per_pass} samples an epoch"

    @override
    def pack_passes(self, passes: Int64Array, sizes: Mapping[str, int]) -> Int64Array:
        is_whole = not any(self.quotas[name] % size for name, size in sizes.items())
        return passes if is_whole else passes * 0

    @override
    def in_batches(self, size: int) -> PassBlend:
        for name, count in self.quotas.items():
            if 0 < count < size:
                raise ConfigError(
                    f'batches="one_source": {name!r} gives {count:,} samples an epoch, too few for a global batch of '
                    f"{size:,}: it would never get a batch. Read it more often (repeats=), give a smaller batch, or "
                    'use batches="mixed"'
                )
        return PassBlend({name: count - count % size for name, count in self.quotas.items()})

    @override
    def needed(self, missing: set[str], laid: set[str]) -> set[str]:
        return missing

    @override
    def orders(self, endless: Callable[[], _OrdersT], passes: Callable[[Mapping[str, int]], _OrdersT]) -> _OrdersT:
        return passes(self.quotas)


@dataclass(frozen=True, slots=True)
class EndlessBlend(Blend):
    """Weights per sample, by the row of the run, without an end."""

    weights: WeightSchedule
    is_endless = True
    what = "weights"
    samples_per_pass = ENDLESS

    @classmethod
    def constant(cls, weights: Mapping[str, float]) -> EndlessBlend:
        """Return a blend whose weights never change.

        Raises:
            ConfigError: A weight is invalid, or none is above 0.
        """
        checked_weights(weights)
        return cls(Schedule(shape="steps", listed=((0, weights),)))

    @override
    def check(self, sources: Mapping[str, str]) -> None:
        check_by_source("schedule", self.weights.segments()[0][1], sources)

    @override
    @property
    def shown(self) -> str:
        (_, first), *later = self.rows()
        return f"a {self.weights.shape} schedule" if later else str(dict(first))

    @override
    @property
    def as_weights(self) -> WeightSchedule:
        return self.weights

    @override
    def quotas_of(self, name: str) -> Mapping[str, int]:
        raise ConfigError(
            f"the source {name!r} is a mixture without end, which has no passes to count. Give this mixture weights=, "
            "or that one ends="
        )

    @override
    def recorded(self) -> dict[str, Any]:
        (_, first), *later = self.rows()
        return {"weights": dict(first), "schedule": self.weights if later else None}

    @override
    def rows(self, start: int = 0) -> Weighing:
        found: list[tuple[int, Mapping[str, float]]] = []
        weights: Any
        for row, weights in self.weights.segments():
            if row <= start:
                found = []
            found.append((max(row, start), weights))
        return found

    @override
    def shares(self, weighing: Weighing) -> Weighing:
        return weighing

    @override
    def allows(self, other: Blend) -> bool:
        return other.is_endless

    @override
    def check_weighable(self) -> None:
        pass

    @override
    def readable(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        return sizes

    @override
    def in_words(self) -> str:
        (_, first), *later = self.rows()
        total = sum(first.values())
        shown = [f"{name} {share / total:.1%}" for name, share in sorted(first.items()) if share]
        return f"without end, {some_names(shown)} of samples{' at first, by a schedule' if later else ''}"

    @override
    def pack_passes(self, passes: Int64Array, sizes: Mapping[str, int]) -> Int64Array:
        return passes * 0

    @override
    def needed(self, missing: set[str], laid: set[str]) -> set[str]:
        return missing & laid

    @override
    def orders(self, endless: Callable[[], _OrdersT], passes: Callable[[Mapping[str, int]], _OrdersT]) -> _OrdersT:
        return endless()


def in_whole_batches(num_samples: int, batch_size: int) -> int:
    """Return a number of samples, rounded up to whole batches."""
    return -(-num_samples // batch_size) * batch_size


def blend_of_entry(
    weights: Mapping[str, float], schedule: WeightSchedule | None, quotas: Mapping[str, int] | None,
    batch_size: int | None = None,
) -> Blend:  # fmt: skip
    """Return the blend that the fields of a ledger's entry record.

    Raises:
        ConfigError: The weights are invalid, or are given together with quotas.
    """
    if quotas is None:
        constant = EndlessBlend.constant(weights)
        return constant if schedule is None else EndlessBlend(schedule)
    if weights or schedule is not None:
        raise ConfigError("weights: a pass of the mixture has quotas, so it cannot have weights")
    return PassBlend(quotas, batch_size)


def check_by_source(what: str, given: object, sources: Mapping[str, str] | None = None) -> None:
    """Check that ``given`` is a dict whose keys are sources.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what}: expected a dict by the names of the sources, got {given!r}")
    unknown = sorted(set(given) - set(given if sources is None else sources), key=str)
    if unknown:
        raise ConfigError(f"{what}: {unknown} are not sources; the sources are {sorted(sources or ())}")
