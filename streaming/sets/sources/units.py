"""Weigh the samples of datasets: the mean number of tokens or bytes of a sample, if weights count these."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from infra import is_first_process
from streaming.common.arguments import some_names
from streaming.errors import ConfigError
from streaming.order.mixing.blend import Ends, Units, blend_of, by_weight
from streaming.order.plan.blend import Blend
from streaming.order.plan.schedule import Schedule, WeightSchedule
from streaming.sets.filters.late_columns import find_columns, homes_of, read_values
from streaming.sets.sources.packs import PackedDocuments
from streaming.sets.sources.samples import SampleSource
from streaming.sets.sources.windows import WindowSource
from streaming.shards.index.chunk_table import numbers
from streaming.shards.index.columns import there_of
from streaming.storage import redact

Unit: TypeAlias = Literal["samples", "tokens", "bytes"]
_TABLES_READ = 8
"""Number of shards of a source whose column is read to estimate the mean number of tokens per sample."""
_log = logging.getLogger("streaming")


class Weighing:
    """Convert weights of a mixture, in some unit, to weights in samples of each leaf.

    Args:
        within: Amounts drawn within each source of the mixture.
        leaves: The leaves of the mixture.
        unit: Unit that weights count.
    """

    def __init__(
        self,
        within: Mapping[str, Blend],
        leaves: Mapping[str, SampleSource | PackedDocuments | WindowSource],
        unit: Unit,
    ) -> None:
        self._within, self._leaves, self.unit = within, leaves, unit

    @property
    def _means(self) -> Units | None:
        return None if self.unit == "samples" else lambda: self.units_per_sample

    @cached_property
    def units_per_sample(self) -> dict[str, float]:
        """Mean number of units per sample of each leaf; logged once."""
        return _units_per_sample(self._leaves, self.unit)

    def blend(
        self, sizes: Mapping[str, int], *, weights: Mapping[str, float] | Schedule | None,
        repeats: Mapping[str, float] | None, ends: Ends | None,
    ) -> Blend:  # fmt: skip
        """Return the amounts that the mixture draws from leaves of these sizes; for the options see ``Mixture``.

        Raises:
            ConfigError: The options contradict each other, or are not valid for the sources.
        """
        return blend_of(self._within, sizes, weights=weights, repeats=repeats, ends=ends, units=self._means)

    def weighed(self, weights: Mapping[str, float]) -> WeightSchedule:
        """Return the weights per sample of each leaf for other ``weights`` of the mixture.

        Nested mixtures keep their own schedules, which count the rows of the run.
        """
        return by_weight(self._within, weights, self._means)


def _units_per_sample(
    sources: Mapping[str, SampleSource | PackedDocuments | WindowSource], unit: Unit
) -> dict[str, float]:
    """Return the mean number of units per sample of each source; log estimated values.

    Raises:
        ConfigError: The unit is tokens, but a source has no column of tokens, or no tokens.
    """
    if unit == "samples":
        return dict.fromkeys(sources, 1.0)
    found = {name: _mean_tokens(name, one) if unit == "tokens" else _mean_bytes(one) for name, one in sources.items()}
    shown = some_names([f"{name} {count:.1f}" for name, count in found.items()])
    if is_first_process():
        _log.info("unit=%r: samples have on average %s %s; weights are divided by these", unit, shown, unit)
    return found


def _mean_bytes(dataset: SampleSource | PackedDocuments | WindowSource) -> float:
    """Return the mean size from the chunk table; chunks include samples that a filter leaves out."""
    stored = dataset.documents if isinstance(dataset, PackedDocuments) else dataset
    kept = stored.chunk_samples.sum() / stored.stored_samples.sum()
    return float(dataset.chunk_bytes.sum() * kept / dataset.chunk_samples.sum())


def _mean_tokens(name: str, dataset: SampleSource | PackedDocuments | WindowSource) -> float:
    """Return the mean of the column ``tokens`` over some evenly spaced shards, the same ones on every rank."""
    if isinstance(dataset, PackedDocuments):
        return dataset.counts.packed / dataset.num_readable
    if isinstance(dataset, WindowSource):
        raise ConfigError(
            f'unit="tokens": the source {name!r} is a Windows, and windows have no tokens; leave unit out, which '
            "counts windows"
        )
    num_shards = len(dataset.urls)
    chosen = [i * num_shards // min(num_shards, _TABLES_READ) for i in range(min(num_shards, _TABLES_READ))]
    late = find_columns(dataset.storage, homes_of(dataset.urls, dataset.shards.index), ["tokens"]).get("tokens")
    total = count = 0
    for shard in chosen:
        url, whole = dataset.urls[shard], dataset.shards.table
        table = dataset.samples_at(url)
        column = None if table is None else table.columns.get("tokens")
        if column is None and late is not None and whole is not None:
            column = read_values(dataset.storage, url, dataset.shards.index, whole.of_shard(shard), late)
        if column is None:
            raise ConfigError(
                f'unit="tokens": the source {name!r} has no column "tokens" ({redact(url)}); give its number of tokens '
                'when shards are written, ShardWriter(columns={"tokens": …}), or add it later with '
                "`shard_tools column add`"
            )
        values = there_of(column, dataset.selection.mask(shard))
        total, count = total + int(numbers(values, np.float64).sum()), count + len(values)
    if not total:
        raise ConfigError(f'unit="tokens": the samples of the source {name!r} have no tokens; leave it out')
    return total / count
