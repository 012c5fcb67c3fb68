"""Say what is drawn of each source of a mixture: so many samples in each pass, or shares of a run without an end."""

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
"""Rows, and the weights from each on."""
_OrdersT = TypeVar("_OrdersT")


class Blend(ABC):
    """What is drawn of each source, and whether that ends: a value. Others ask it, and not which form it has.

    Sources are leaves, which hold samples; those of a nested mixture have names such as ``"web/en"``. A dataset by
    itself is one leaf without a name, of which a pass draws everything.

    Attributes:
        is_endless: Whether there is no end.
        what: What ``shown`` shows.
        samples_per_pass: Samples of a pass over all sources; ``ENDLESS`` if it has no end.
    """

    is_endless: ClassVar[bool]
    what: ClassVar[str]
    samples_per_pass: int

    @abstractmethod
    def check(self, sources: Mapping[str, str]) -> None:
        """Check what an entry of a ledger says of its ``sources``.

        Raises:
            ConfigError: It is not valid.
        """

    @property
    @abstractmethod
    def shown(self) -> str:
        """What is drawn, for messages of changes."""

    @property
    @abstractmethod
    def as_weights(self) -> WeightSchedule | None:
        """Weights of the leaves, for a mixture around this one. None: this is a dataset."""

    @abstractmethod
    def quotas_of(self, name: str) -> Mapping[str, int]:
        """Return what a pass draws of each leaf, for a mixture that names this one so and counts passes.

        Raises:
            ConfigError: There are no passes.
        """

    @abstractmethod
    def recorded(self) -> dict[str, Any]:
        """Return the fields of ``Entry`` that record it, for a run that begins."""

    @abstractmethod
    def rows(self, start: int = 0) -> Weighing:
        """Return rows from ``start`` on and the weights from each on; none if there is an end: quotas never change."""

    @abstractmethod
    def shares(self, weighing: Weighing) -> Weighing:
        """Return what is drawn by the row of a run, in relation: by the weights of its ledger, or by quotas."""

    def at(self, row: int) -> dict[str, float]:
        """Return the weights per sample at a row of a run without an end."""
        return dict(self.rows(row)[0][1])

    def largest_shares(self, row: int = 0) -> dict[str, float]:
        """Return the largest share of each source from a row on; {}: there are no shares of rows, but passes."""
        found: dict[str, float] = {}
        for _, weights in self.rows(row):
            total = sum(weights.values())
            for name, weight in weights.items():
                found[name] = max(found.get(name, 0.0), weight / total)
        return found

    def allows(self, other: Blend) -> bool:  # noqa: ARG002  a pass is laid out as a whole
        """Tell whether a run may change to another blend; it may always stay as it is."""
        return False

    def check_weighable(self) -> None:
        """Check that a run can be given other weights.

        Raises:
            ConfigError: It has an end.
        """
        raise ConfigError(
            "set_weights: this mixture ends (by size, repeats= or ends=): an epoch of it is laid out as a whole. Make "
            "it with weights= and ends=None, and give the loader an epoch_size"
        )

    @abstractmethod
    def readable(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Return how many samples of each leaf can be read by number: those of an epoch, or each once."""

    @abstractmethod
    def in_words(self) -> str:
        """Describe it."""

    @abstractmethod
    def pack_passes(self, passes: Int64Array, sizes: Mapping[str, int]) -> Int64Array:
        """Return the pass numbers that determine which documents share a pack; see ``Granularity.companies``."""

    def in_batches(self, size: int) -> Blend:  # noqa: ARG002  there is no rest
        """Return what batches of ``size`` samples of one source each draw: whole ones.

        Raises:
            ConfigError: A source has fewer samples than a batch.
        """
        return self

    @abstractmethod
    def needed(self, missing: set[str], laid: set[str]) -> set[str]:
        """Return the missing sources whose chunks determine positions of others; ``laid`` are those that do at all."""

    @abstractmethod
    def orders(self, endless: Callable[[], _OrdersT], passes: Callable[[Mapping[str, int]], _OrdersT]) -> _OrdersT:
        """Return the orders that one of two functions makes: of a run without an end, or of passes with quotas."""


@dataclass(frozen=True, slots=True)
class PassBlend(Blend):
    """A number of samples of each source in each pass."""

    quotas: Mapping[str, int]
    is_endless = False
    what = "samples of each source in a pass"

    @override
    @property
    def samples_per_pass(self) -> int:  # type: ignore[override]
        return sum(self.quotas.values())

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
        """Return weights that never change.

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


def blend_of_entry(
    weights: Mapping[str, float], schedule: WeightSchedule | None, quotas: Mapping[str, int] | None
) -> Blend:
    """Return what the fields of an entry of a ledger mean.

    Raises:
        ConfigError: The weights are invalid, or do not go with the quotas.
    """
    if quotas is None:
        constant = EndlessBlend.constant(weights)
        return constant if schedule is None else EndlessBlend(schedule)
    if weights or schedule is not None:
        raise ConfigError("weights: a pass of the mixture has quotas, which no weights go with")
    return PassBlend(quotas)


def check_by_source(what: str, given: object, sources: Mapping[str, str] | None = None) -> None:
    """Check that ``given`` is a dict whose keys are sources.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what}: expected a dict by the names of the sources, got {given!r}")
    unknown = sorted(set(given) - set(given if sources is None else sources), key=str)
    if unknown:
        raise ConfigError(f"{what}: {unknown} are no sources; they are {sorted(sources or ())}")
