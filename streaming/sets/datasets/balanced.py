"""Draw from the classes of a dataset in given proportions, whatever their sizes: ``Balanced``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from infra import is_first_process
from streaming.common.arguments import checks_names, is_number, shows, some_names
from streaming.errors import ConfigError
from streaming.order.plan.schedule import Schedule
from streaming.sets.datasets.dataset import StreamingDataset
from streaming.sets.datasets.grouped import ELSEWHERE, GroupedSet, check_dataset
from streaming.sets.filters.groups import Codes, Counted, Values, labels_of
from streaming.sets.sources.grouped import GroupedSource, Nulls, check_missing, grouped, resharding
from streaming.sets.sources.mixed import Quotas

MAX_CLASSES = 10_000
"""Maximum number of classes. Each is a source and costs about 1 ms of CPU when an epoch starts (docs/design/0022)."""
_UNIT = 2**32  # weights computed from power are rounded to this grid, so every machine gets the same
_SHOWN = 8
_ELSEWHERE = ELSEWHERE | {
    "num_samples": ELSEWHERE["epoch_size"],
    "replacement": "every sample of a class is read once before any is read again; leave it out",
    "temperature": "write power=1 / temperature",
    "alpha": "write power=…",
    "column": "write by=…",
    "labels": "write by=…, the name of a column",
    "metric": "write by=…; to read easy samples first use Curriculum",
    "class_weights": "write weights=…",
}
_log = logging.getLogger("streaming")


@checks_names(_ELSEWHERE)
class Balanced(GroupedSet):
    """Draw from the classes of a dataset in given proportions, as with torch's ``WeightedRandomSampler``.

    The result is itself a dataset, for a ``DataLoader`` or a ``Mixture``, with all their promises. Each class becomes
    a source of a mixture: all its samples come once before any comes again. Rare classes are repeated, and long-run
    shares are exact, whereas independent draws fluctuate. It has no end: count steps, or give the loader an
    ``epoch_size`` (the sampler's ``num_samples``). ::

        loader = DataLoader(Balanced(images, by="cls"), batch_size=64, epoch_size=len(images))

    Args:
        dataset: A ``StreamingDataset`` with an index, filtered or not. Its order settings are used.
        by: Column that holds the class, in the sample tables or late: integers, text or booleans.
        weights: ``"balanced"``: every class equally often; or the share of each class, as a dict by the values of the
            column (0 leaves a class out) or a ``Schedule`` of such dicts.
        power: A class of n samples gets the weight ``n ** power``: 0 equals ``"balanced"``, 1 keeps the natural
            proportions, 0.5 lies between. A sampling temperature t is ``power=1 / t``. Not together with ``weights``.
        nulls: What to do with samples without a class: ``"error"``, or ``"drop"`` them.
        quotas: How exactly shares are kept. ``"chunks"``: up to about one chunk per class and lane, with the memory of
            a single dataset. ``"exact"``: at every row; memory grows with the number of classes. See ``Mixture``.
        name_sources: Whether ``batch["__source__"]`` names the class. By default the entry is absent; within a mixture
            it holds the name of this set there.

    Raises:
        ConfigError: An argument is invalid; the column does not exist; or there are more than 10,000 classes.
        IndexMissingError: There is no index, or no sample table.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        by: str,
        *,
        weights: Literal["balanced"] | Mapping[Any, float] | Schedule | None = None,
        power: float | None = None,
        nulls: Nulls = "error",
        quotas: Quotas = "chunks",
        name_sources: bool = False,
    ) -> None:
        check_dataset(dataset, "Balanced")
        if not isinstance(by, str) or not by:
            raise ConfigError(f"Balanced: by: expected the name of a column, got {by!r}")
        _check_choice(weights, power)
        made: list[_Classes] = []

        def coding(counted: Mapping[str, Counted]) -> _Classes:
            check_missing("Balanced", counted, nulls)
            made.append(_Classes(by, counted[by].values, counted[by].counts.tolist()))
            return made[-1]

        grouping = grouped(dataset.source, "Balanced", "by", [by], coding)
        classes = made[-1]
        self._source = GroupedSource(
            dataset.source, grouping, dict(enumerate(classes.names)), classes.schedule(weights, power), kind="Balanced",
            name_sources=name_sources, cure=resharding(dataset.source, by), quotas=quotas, by_name=classes.by_name,
        )  # fmt: skip
        self._dataset, self._by = dataset, by
        if is_first_process():
            _log.info("%s", self.shares_in_words())

    @property
    def by(self) -> str:
        """The column that holds the class: ``dataset[0][balanced.by]`` if it is also a field."""
        return self._by

    def shares_in_words(self) -> str:
        """Describe the smallest and largest classes and their initial shares: ``print(mix.shares_in_words())``."""
        first = self._source.blend.at(0)
        sizes, total = self.sizes, sum(first.values())
        by_size = sorted(sizes, key=sizes.__getitem__)
        shown = by_size if len(by_size) <= _SHOWN else [*by_size[: _SHOWN // 2], *by_size[-_SHOWN // 2 :]]
        said = [f"{name} of {sizes[name]:,} samples {first[name] / total:.2%}" for name in shown]
        if len(shown) < len(by_size):
            said.insert(_SHOWN // 2, f"{len(by_size) - len(shown):,} more")
        return f"Balanced by {self._by}: {len(sizes):,} classes: {', '.join(said)}"

    @shows
    def __repr__(self) -> str:
        return f"Balanced({self._source.words()}, by {self._by})"


@dataclass(frozen=True, slots=True, eq=False)
class _Classes:
    """The classes of a column, as a ``Coding``."""

    by: str
    labels: Values
    counts: Sequence[int]

    def __post_init__(self) -> None:
        kind = str(self.labels.type)
        if kind not in {"int64", "uint64", "string", "bool", "null"}:
            raise ConfigError(
                f"Balanced: by: column {self.by!r} holds {kind}, but classes must be whole numbers, text or booleans. "
                "Add such a column with `shard_tools column add`"
            )
        if not 1 <= self.num_groups <= MAX_CLASSES:
            raise ConfigError(
                f"Balanced: by: column {self.by!r} has {self.num_groups:,} different values, expected 1 to "
                f"{MAX_CLASSES:,} classes. Add a coarser column with `shard_tools column add`"
            )

    @property
    def num_groups(self) -> int:
        """Number of classes."""
        return len(self.labels)

    @property
    def names(self) -> list[str]:
        """The source name of each class."""
        return [_name(label) for label in self.labels.to_pylist()]

    def codes(self, columns: Mapping[str, Values], num_rows: int) -> Codes:
        """See ``Coding``."""
        found = labels_of(columns[self.by], self.labels)
        return np.where(found < 0, num_rows and self.num_groups, found).astype(np.uint16)

    def schedule(self, weights: Any, power: float | None) -> Schedule:
        """Return the weights of the classes, by source name.

        Raises:
            ConfigError: ``weights`` does not name exactly the classes of the column.
        """
        if isinstance(weights, Mapping):
            return Schedule.steps({0: self.named(weights)})
        if isinstance(weights, Schedule):
            return Schedule.steps({row: self.named(shares) for row, shares in weights.segments()})
        most = max(self.counts)
        shares = [max(round((count / most) ** (power or 0.0) * _UNIT), 1) for count in self.counts]
        return Schedule.steps({0: dict(zip(self.names, shares, strict=True))})

    def by_name(self, weights: Any) -> Any:
        """Return the argument of ``set_weights`` by source name; other values are returned unchanged.

        Raises:
            ConfigError: A dict does not name exactly the classes of the column.
        """
        if isinstance(weights, str) and weights == "balanced":
            return dict.fromkeys(sorted(self.names), 1)
        return self.named(weights) if isinstance(weights, Mapping) else weights

    def named(self, weights: Any) -> dict[str, float]:
        """Return weights by the values of the column as weights by source name.

        Raises:
            ConfigError: ``weights`` does not name exactly the classes of the column.
        """
        given = {_name(label): weight for label, weight in weights.items()}
        unknown, missing = [sorted(some) for some in (given.keys() - set(self.names), set(self.names) - given.keys())]
        if unknown or missing:
            said = [f"{some_names(unknown)}: no such class"] if unknown else []
            said += [f"{some_names(missing)} missing: give 0 to a class that should not be read"] if missing else []
            raise ConfigError(
                f"Balanced: weights: {'; '.join(said)}. The classes are {some_names(self.names)}, from column "
                f"{self.by!r}"
            )
        return given


def _name(label: Any) -> str:
    """Return the source name of a class: slashes and unprintable characters are percent-encoded."""
    shown = "".join(one if one.isprintable() and one not in "/%" else quote(one, safe="") for one in str(label))
    return {"": '""', '""': "%22%22"}.get(shown, shown)


def _check_choice(weights: Any, power: Any) -> None:
    if weights is not None and power is not None:
        raise ConfigError(
            "Balanced: weights and power: give only one; power computes weights from the sizes of the classes"
        )
    is_schedule = isinstance(weights, Schedule) and bool(weights.names)
    if not (weights is None or weights == "balanced" or isinstance(weights, Mapping) or is_schedule):
        raise ConfigError(
            f'Balanced: weights: expected "balanced", a dict of shares of the classes or a Schedule of such dicts, got '
            f"{weights!r}"
        )
    if power is not None and not (is_number(power) and 0 <= power < math.inf):
        raise ConfigError(f"Balanced: power: expected a number of at least 0, such as 0.5, got {power!r}")
