"""Turn a dataset into a mixture of groups of its samples: what ``Curriculum`` and ``Balanced`` have in common."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Self, SupportsIndex, TypeAlias, get_args

import numpy as np

from infra import agent_store
from streaming.arguments import check_choice, checked_flag, checked_number, option_names, some_names
from streaming.arrays import sums
from streaming.catalog.source import ChunkSource
from streaming.datasets.dataset import StreamingDataset
from streaming.datasets.mixture import Mixture, Quotas
from streaming.errors import ConfigError, StateError
from streaming.filters.groups import Coding, Counted, Grouping, group_samples
from streaming.job.store import job_peers
from streaming.plan.ledger import Ledger
from streaming.plan.schedule import Schedule
from streaming.storage import redact
from streaming.types import Sample, Transform

Nulls: TypeAlias = Literal["error", "drop"]
ELSEWHERE = {
    name: f"it belongs to the data set; write StreamingDataset(…, {name}=…)" for name in option_names(StreamingDataset)
} | {"epoch_size": "it belongs to the loader; write DataLoader(…, epoch_size=…)"}
"""Options that a grouped dataset does not have, and where they belong."""
LARGE_AMPLIFICATION = 2.0
"""Read amplification above which the log warns; the chunks of a window take about as much memory, too."""
_SHARDS_LOOKED_AT, _PIECES_LOOKED_AT = 8, 64
_log = logging.getLogger("streaming")


class GroupedMixture(Mixture):
    """Draw the samples of a dataset by groups, each a source of a mixture, with scheduled shares.

    Args:
        dataset: The dataset.
        grouping: The group of each sample.
        names: Names of the groups that are sources, by number.
        weights: Weights of the groups.
        name_sources: Whether batches name the group in ``__source__``.
        cure: A command that places the samples of a group next to each other.
        quotas: See ``Mixture``.
    """

    def __init__(
        self, dataset: StreamingDataset, grouping: Grouping, names: Mapping[int, str], weights: Schedule, *,
        name_sources: bool, cure: str, quotas: Quotas = "chunks",
    ) -> None:  # fmt: skip
        self.dataset = dataset
        self.name_sources = checked_flag("name_sources", name_sources)
        self._cure = cure
        self._groups, self._group_names = grouping.groups, dict(names)
        chosen = {name: grouping.selected(number, dataset.fingerprint, name) for number, name in names.items()}
        self._piece_chunks = np.concatenate([chosen[name].rows for name in sorted(chosen)])
        members = {name: dataset.of_group(selected, name) for name, selected in chosen.items()}
        super().__init__(
            members, weights=weights, shuffle=dataset.shuffle_config if dataset.shuffle else False, seed=dataset.seed,
            quotas=quotas, max_bad_samples=dataset.max_bad_samples, bad_samples_file=dataset.bad_samples_file,
        )  # fmt: skip
        if self.read_amplification > LARGE_AMPLIFICATION:
            _log.warning(
                "%s reads about %.1f bytes for each byte that it uses: samples of %d groups share the shards' chunks, "
                "and each group is read separately. %s", type(self).__name__, self.read_amplification, len(self.names),
                self._cure,
            )  # fmt: skip

    def __len__(self) -> int:
        """Raise, because it has no end.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"this {type(self).__name__} has no len(): it is drawn from without end. Give the loader an epoch_size, or "
            f"count steps; for the number of samples take len() of the data set that it was made of"
        )

    def __getitem__(self, index: SupportsIndex | builtins.slice) -> Sample:
        """Return sample number ``index`` of the underlying dataset, in storage order; see ``StreamingDataset``.

        With ``name_sources`` it has ``__source__``, as in batches, unless it is in no group.

        Raises:
            IndexError: There is no such sample.
            ConfigError: ``index`` is a slice.
        """
        if isinstance(index, builtins.slice):
            raise ConfigError(
                f"a {type(self).__name__} cannot be sliced; slice the data set: {type(self).__name__}(dataset[a:b])"
            )
        number = checked_number(index, self.dataset.table.total_samples, "sample", "the data set has")
        return self.dataset.sample_at(number, self._shown_name_of(number) if self.name_sources else "")

    def _shown_name_of(self, number: int) -> str:
        """Return the name of the group of a sample of the dataset; "" if it is in none."""
        table = self.dataset.table
        starts = sums(table.num_samples)
        chunk = np.searchsorted(starts, [number], side="right") - 1
        inside = table.first_sample[chunk] + self.dataset.samples_of(chunk, number - starts[chunk])
        (group,) = self._groups.codes[self._groups.shard_places[table.shard[chunk]] + inside].tolist()
        return self._group_names.get(group, "")

    def map(self, function: Transform) -> Self:
        """Return the same with ``function`` called on each sample, after the functions of the dataset."""
        made = super().map(function)
        made.dataset = self.dataset.map(function)
        return made

    @property
    def numbered(self) -> dict[str, ChunkSource | None]:
        """See ``Mixture``: the dataset of all groups."""
        return dict.fromkeys(self.names, self.dataset)

    @property
    def shown_names(self) -> dict[str, str]:
        """See ``Mixture``: empty unless ``name_sources`` is set."""
        return {name: name if self.name_sources else "" for name in self.names}

    def _limits_of(self, drawn: Mapping[str, float]) -> dict[str, int]:  # noqa: ARG002
        """See ``Mixture``: groups are parts of one dataset, whose limit is that of all of them."""
        return {}

    def check_ledger(self, ledger: Ledger) -> None:
        """See ``Mixture``.

        Raises:
            StateError: The groups differ from those of the state.
        """
        missing = sorted(set(ledger.sources) - set(self.names))
        if missing:
            raise StateError(
                f"this state drew from the groups {some_names(missing)}, but this {type(self).__name__} has "
                f"{some_names(self.names)}. Build it from the same columns, groups and samples; only its schedule and "
                "weights may change"
            )
        others = [name for name, found in self.fingerprints.items() if ledger.sources.get(name, found) != found]
        if others:
            raise StateError(
                f"this state was saved over other samples: the group {others[0]!r} differs. Open the same shards in "
                "the same order, with the same filter; if a column was added again since, give it back its old values"
            )
        super().check_ledger(ledger)

    @cached_property
    def read_amplification(self) -> float:
        """Approximate number of bytes read per byte used, over a pass of all groups.

        Computed from the chunk table if whole chunks would cost little; otherwise from a sample of pieces of some
        shards.
        """
        whole, chunks = self.dataset.shards.table, self._piece_chunks
        if whole is None:
            return 1.0
        used = self.chunk_bytes * (self.chunk_samples / whole.num_samples[chunks])
        factor = float(self.chunk_bytes.sum() / used.sum())
        if factor <= LARGE_AMPLIFICATION or not self.has_sample_tables():
            return factor
        shards = np.unique(whole.shard[chunks])
        looked_at = shards[np.unique(np.linspace(0, len(shards) - 1, _SHARDS_LOOKED_AT).astype(np.int64))]
        rows = np.flatnonzero(np.isin(whole.shard[chunks], looked_at))
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, _PIECES_LOOKED_AT).astype(np.int64))]
        return float(self.unit_bytes(rows).sum() / used[rows].sum())

    def _source_in_words(self) -> str:
        said = [repr(self.dataset), f"{len(self.names)} groups"]
        if self.read_amplification > LARGE_AMPLIFICATION:
            said.append(f"about {self.read_amplification:.1f} bytes read for each one used")
        if self._is_reweighed:
            said.append(f"reweighted: {self._shares_in_words()}")
        return ", ".join(said)


def grouped(
    dataset: Any, owner: str, option: str, columns: Sequence[str], coding: Callable[[Mapping[str, Counted]], Coding]
) -> Grouping:
    """Return the groups of a dataset's samples by some columns.

    Raises:
        ConfigError: The dataset has no samples with columns.
    """
    peers = job_peers(agent_store())
    return group_samples(
        dataset.storage, dataset.shards, columns, option=f"{owner}: {option}", peers=peers,
        keeps=dataset.selection.mask, coding=coding,
    )  # fmt: skip


def check_dataset(dataset: Any, owner: str) -> None:
    """Check that ``dataset`` is a ``StreamingDataset``.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(dataset, Mixture):
        raise ConfigError(
            f"{owner}: expected a StreamingDataset, got a {type(dataset).__name__}; make a {owner} of each source, and "
            f'mix these: Mixture({{"web": {owner}(web, …)}}, weights=…)'
        )
    if getattr(dataset, "is_packed", False):
        raise ConfigError(
            f"{owner}: expected a StreamingDataset of documents, got a {type(dataset).__name__}: a pack holds "
            f"documents with many values of a column, so neither can wrap the other. Give {owner} the unpacked "
            'documents; or pack parts of them, chosen by where=, and mix these: Mixture({"easy": '
            'Packed(StreamingDataset(…, where="tokens <= 512"), length=…), "hard": …}, weights=…), whose weights= '
            "also takes a Schedule"
        )
    if not isinstance(dataset, StreamingDataset):
        hint = "; write StreamingDataset(…)" if isinstance(dataset, str) else ""
        raise ConfigError(f"{owner}: expected a StreamingDataset, got {dataset!r}{hint}")


def check_missing(owner: str, counted: Mapping[str, Counted], nulls: str) -> None:
    """Refuse samples without a value, or log how many are left out.

    Raises:
        ConfigError: There are some, and ``nulls`` is ``"error"``.
    """
    check_choice(f"{owner}: nulls", nulls, get_args(Nulls))
    for name, column in counted.items():
        if column.num_missing and nulls == "error":
            raise ConfigError(
                f"{owner}: column {name!r} has no value for {column.num_missing:,} samples, some of them in "
                f'{column.lacking}. Leave them out with nulls="drop", or give them values with `shard_tools column add`'
            )
        if column.num_missing:
            _log.info("%s: %d samples without a value of %r are left out", owner, column.num_missing, name)


def resharding(dataset: StreamingDataset, column: str) -> str:
    """Return the command that writes samples of similar values next to each other."""
    url = redact(dataset.urls[0]).rpartition("/")[0] or "."
    return (
        f"Shards that are sorted by the column, which then lies in their sample tables, are read about once: "
        f"shard_tools reshard {url}/ SORTED/ --sort {column}"
    )
