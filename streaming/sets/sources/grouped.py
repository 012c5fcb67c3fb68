"""Mix the groups of a set's samples: the source behind a ``Curriculum`` or a ``Balanced``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np

from infra import agent_store, is_first_process
from streaming.common.arguments import check_choice, checked_flag, some_names
from streaming.common.arrays import sums
from streaming.common.job.store import job_peers
from streaming.errors import ConfigError, StateError, shell_place, shell_word
from streaming.order.plan.ledger import Ledger
from streaming.order.plan.schedule import Schedule
from streaming.order.plan.state import NO_VERSIONS, Versions
from streaming.sets.filters.groups import Coding, Counted, Grouping, group_samples
from streaming.sets.sources.mixed import MixedSource, Quotas
from streaming.sets.sources.samples import SampleSource
from streaming.shards.catalog.source import ChunkSource
from streaming.storage import redact
from streaming.types import Int64Array, Sample, Transform

Nulls: TypeAlias = Literal["error", "drop"]
LARGE_AMPLIFICATION = 2.0
"""Read amplification above which the log warns; the chunks of a window take about as much memory, too."""
_SHARDS_LOOKED_AT, _PIECES_LOOKED_AT = 8, 64
_log = logging.getLogger("streaming")


class GroupedSource(MixedSource):
    """Draw the samples of a set by groups, each a source of a mixture, with scheduled shares.

    Args:
        dataset: The set.
        grouping: The group of each sample.
        names: Names by group number; groups without a name are not drawn from.
        weights: Weights of the groups.
        kind: Name of the user's class, for messages.
        name_sources: Whether batches name the group in ``__source__``.
        cure: A command that places the samples of a group next to each other.
        quotas: See ``Mixture``.
        by_name: Converts weights as users write them to weights by group name.
    """

    def __init__(
        self, dataset: SampleSource, grouping: Grouping, names: Mapping[int, str], weights: Schedule, *, kind: str,
        name_sources: bool, cure: str, quotas: Quotas, by_name: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self._kind, self._by_name = kind, by_name
        self.dataset = dataset
        self.name_sources = checked_flag("name_sources", name_sources)
        self._cure = cure
        self._groups, self._group_names = grouping.groups, dict(names)
        chosen = {name: grouping.selected(number, dataset.fingerprint, name) for number, name in names.items()}
        self._piece_chunks = np.concatenate([chosen[name].rows for name in sorted(chosen)])
        members = {name: dataset.of_group(selected, name) for name, selected in chosen.items()}
        super().__init__(
            members, weights=weights, repeats=None, ends=None, unit="samples", batches="mixed", fetch_bytes=None,
            shuffle=dataset.shuffle_config if dataset.shuffle else False, seed=dataset.seed, quotas=quotas,
            max_bad_samples=dataset.max_bad_samples, bad_samples_file=dataset.bad_samples_file,
        )  # fmt: skip
        if self.read_amplification > LARGE_AMPLIFICATION:
            _log.warning(
                "%s reads about %.1f bytes for each byte that it uses: samples of %d groups share the shards' chunks, "
                "and each group is read separately. %s", self._kind, self.read_amplification, len(self.names),
                self._cure,
            )  # fmt: skip

    @property
    def num_readable(self) -> int:
        """See ``MixedSource``: the number of samples of the set."""
        return self.dataset.num_readable

    def read(self, numbers: Int64Array) -> list[Sample]:
        """See ``MixedSource``: samples of the set, by their numbers there.

        With ``name_sources`` they have ``__source__``, as in batches, unless they are in no group.
        """
        return self.dataset.read(numbers, self._shown_names_of(numbers) if self.name_sources else ())

    def _shown_names_of(self, numbers: Int64Array) -> list[str]:
        """Return the name of the group of each sample of the set; "" if it is in none."""
        table = self.dataset.table
        starts = sums(table.num_samples)
        chunks = np.searchsorted(starts, numbers, side="right") - 1
        inside = table.first_sample[chunks] + self.dataset.samples_of(chunks, numbers - starts[chunks])
        groups = self._groups.codes[self._groups.shard_places[table.shard[chunks]] + inside].tolist()
        return [self._group_names.get(group, "") for group in groups]

    def mapped(self, function: Transform) -> Self:
        """Return the same source that also calls ``function`` on each sample, after the functions of the set."""
        made = super().mapped(function)
        made.dataset = self.dataset.mapped(function)
        return made

    def named_weights(self, weights: Any) -> dict[str, float]:
        """See ``MixedSource``; also accepts the weights that ``by_name`` converts.

        Raises:
            ConfigError: The weights do not name exactly the groups.
        """
        return super().named_weights(self._by_name(weights))

    @property
    def numbered(self) -> dict[str, ChunkSource]:
        """See ``MixedSource``: the dataset of all groups."""
        return dict.fromkeys(self.names, self.dataset)

    @property
    def shown_names(self) -> dict[str, str]:
        """See ``MixedSource``: empty unless ``name_sources`` is set."""
        return {name: name if self.name_sources else "" for name in self.names}

    def _limits_of(self, drawn: Mapping[str, float]) -> dict[str, int]:  # noqa: ARG002
        """See ``MixedSource``: groups are parts of one dataset, whose limit is that of all of them."""
        return {}

    def check_ledger(self, ledger: Ledger, versions: Versions = NO_VERSIONS) -> None:
        """See ``MixedSource``.

        Raises:
            StateError: The groups differ from those of the state.
        """
        check_groups(self, ledger, versions, self._kind, may_change="; only its schedule and weights may change")
        super().check_ledger(ledger, versions)

    @cached_property
    def read_amplification(self) -> float:
        """Approximate number of bytes read per byte used, over a pass of all groups.

        Computed from the chunk table if reading whole chunks would cost little; otherwise estimated from pieces of a
        few shards.
        """
        whole, chunks = self.dataset.shards.table, self._piece_chunks
        if whole is None:
            return 1.0
        used = self.chunk_bytes * (self.chunk_samples / whole.num_samples[chunks])
        factor = float(self.chunk_bytes.sum() / used.sum())
        if factor <= LARGE_AMPLIFICATION or self.slices is None:
            return factor
        shards = np.unique(whole.shard[chunks])
        looked_at = shards[np.unique(np.linspace(0, len(shards) - 1, _SHARDS_LOOKED_AT).astype(np.int64))]
        rows = np.flatnonzero(np.isin(whole.shard[chunks], looked_at))
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, _PIECES_LOOKED_AT).astype(np.int64))]
        return float(self.unit_bytes(rows).sum() / used[rows].sum())

    def words(self) -> str:
        """Describe the set and its groups."""
        said = [f"StreamingDataset({self.dataset.words()})", f"{len(self.names)} groups"]
        if self.read_amplification > LARGE_AMPLIFICATION:
            said.append(f"about {self.read_amplification:.1f} bytes read for each one used")
        if self.is_reweighed:
            said.append(f"reweighted: {self.blend.in_words()}")
        return ", ".join(said)


def check_groups(source: MixedSource, ledger: Ledger, versions: Versions, kind: str, may_change: str = "") -> None:
    """Check that the groups of a source, made by a class called ``kind``, are those of a run's ledger.

    ``may_change`` says, in messages, what of the source may be different.

    Raises:
        StateError: The groups differ from those of the state.
    """
    missing = sorted(set(ledger.sources) - set(source.names))
    if missing:
        cure = source.leaves[source.names[0]].where_is("", versions.get(missing[0], ())) or (
            f"Build it from the same columns, groups and samples, with the same filter{may_change}"
        )
        raise StateError(
            f"this state drew from the groups {some_names(missing)}, but this {kind} has "
            f"{some_names(source.names)}. {cure}"
        )
    others = [name for name, found in source.fingerprints.items() if ledger.sources.get(name, found) != found]
    if others:
        cure = source.leaves[others[0]].where_is("", versions.get(others[0], ())) or (
            "Open the same shards in the same order, with the same filter; if a column was added again since, give "
            "it back its old values"
        )
        raise StateError(f"this state was saved over other samples: the group {others[0]!r} differs. {cure}")


def grouped(
    dataset: SampleSource,
    owner: str,
    option: str,
    columns: Sequence[str],
    coding: Callable[[Mapping[str, Counted]], Coding],
) -> Grouping:
    """Return the groups of a dataset's samples by some columns.

    Raises:
        ConfigError: The dataset has no samples with columns.
    """
    peers = job_peers(agent_store())
    dataset.meaning.check_condition(columns, option=f"{owner}: {option}")
    return group_samples(
        dataset.storage, dataset.shards, columns, option=f"{owner}: {option}", peers=peers,
        keeps=dataset.selection.mask, coding=coding,
    )  # fmt: skip


def check_missing(owner: str, counted: Mapping[str, Counted], nulls: str) -> None:
    """Refuse samples without a value, or log how many are left out.

    Raises:
        ConfigError: Samples lack a value, and ``nulls`` is ``"error"``.
    """
    check_choice(f"{owner}: nulls", nulls, get_args(Nulls))
    for name, column in counted.items():
        if column.num_missing and nulls == "error":
            raise ConfigError(
                f"{owner}: column {name!r} has no value for {column.num_missing:,} samples, some of them in "
                f'{column.lacking}. Leave them out with nulls="drop", or give them values with `shard_tools column add`'
            )
        if column.num_missing and is_first_process():
            _log.info("%s: %d samples without a value of %r are left out", owner, column.num_missing, name)


def resharding(dataset: SampleSource, column: str) -> str:
    """Return a hint with the command that writes samples of similar values next to each other."""
    url = shell_place(f"{redact(dataset.urls[0]).rpartition('/')[0] or '.'}/")
    return (
        f"Shards that are sorted by the column, which then lies in their sample tables, are read about once: "
        f"shard_tools reshard {url} SORTED/ --sort {shell_word(column)}"
    )
