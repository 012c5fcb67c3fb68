"""Compute what a run draws from the sources of a mixture, and when, from the ledger of the run: ``Drawing``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

from infra import is_first_process
from streaming.common.arguments import some_names
from streaming.common.arrays import sums
from streaming.errors import StateError
from streaming.order.mixing.endless_order import EndlessOrder
from streaming.order.mixing.forecast import Forecast, Passes
from streaming.order.mixing.granularity import Granularity, granularity_in
from streaming.order.mixing.passes import Sources, Weights, eras_grown
from streaming.order.plan.blend import Blend
from streaming.order.plan.ledger import START, Entry, Ledger
from streaming.order.plan.order import Orders, OrderSettings
from streaming.order.plan.schedule import WeightSchedule
from streaming.order.plan.state import NO_VERSIONS, Versions
from streaming.sets.sources.packs import PackedDocuments
from streaming.sets.sources.samples import SampleSource
from streaming.sets.sources.windows import WindowSource

Leaf: TypeAlias = SampleSource | PackedDocuments | WindowSource
"""A source of a mixture that holds samples itself."""
_MOST_LAID = 2**12
"""Maximum count of numbers that a state records about sources without weight: one per lane and source, about 30 KB of
JSON."""
_log = logging.getLogger("streaming")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawing:
    """Make and read the ledgers of runs over the sources of a mixture. Immutable.

    Attributes:
        leaves: The sources, by name, sorted.
        deal: Granularity at which shares are dealt.
        blend: Amounts drawn from each source.
        fetch_bytes: Size of the fetch units of the sources that are cut.
    """

    leaves: Mapping[str, Leaf]
    deal: Granularity
    blend: Blend
    fetch_bytes: Mapping[str, int]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each source."""
        return {name: one.fingerprint for name, one in self.leaves.items()}

    # --- ledgers ---

    def begun(self, settings: OrderSettings, global_batch_size: int | None = None) -> Ledger:
        """Return the ledger of a run that begins now; batches of one source require ``global_batch_size``.

        Raises:
            ConfigError: A source has too few samples for such batches.
        """
        deal = self.deal.under(global_batch_size)
        entry = Entry(
            start=0, sources=self.fingerprints, why=START, dealt=deal.dealt, batch_size=deal.batch_size,
            shards={name: len(one.urls) for name, one in self.leaves.items() if one.can_grow},
            fetch_bytes=self.fetch_bytes, even=self._even(self.blend.largest_shares(), settings),
            **deal.drawn_of(self.blend).recorded(),
        )  # fmt: skip
        return Ledger((entry,))

    def _even(self, shares: Mapping[str, float], settings: OrderSettings) -> dict[str, Any]:
        return self.deal.even({name: one.chunk_samples for name, one in self.leaves.items()}, shares, settings)

    def resumed(
        self, ledger: Ledger, settings: OrderSettings, row: int, versions: Versions = NO_VERSIONS
    ) -> Ledger:  # fmt: skip
        """Return the ledger of a run that continues at ``row``; log once what changes.

        Args:
            ledger: The ledger of the state.
            settings: The order of the state.
            row: The row.
            versions: The versions of the sources that the state names, for messages.

        Raises:
            StateError: The run cannot continue: a source is a different one, or is missing although its chunks
                determine the earlier rows.
        """

        @cache
        def settled() -> tuple[Any, int]:
            orders: Any = self.orders(settings, ledger)
            return orders, orders.first_free_row(row)

        def free_pass(name: str) -> int:
            found: int = settled()[0].free_pass(name)
            return found

        made = self.begun(settings, ledger.last.batch_size or 1).last
        grown = {name: partial(free_pass, name) for name in self.grown(ledger)}
        found, changes = ledger.resumed(
            made, lambda: settled()[1], grown=grown,
            where_is=lambda name, fingerprint: self.leaves[name].where_is(fingerprint, versions.get(name, ())),
        )  # fmt: skip
        if set(found.sources) - set(self.leaves):
            orders: Any = self.orders(settings, found)
            orders.check_from(row // settings.lanes)
        if changes and is_first_process():
            _log.info("the mixture changes at row %d: %s", found.last.start, "; ".join(changes))
        if changes:
            self.tell_overlapping(found, settings)
        return self._with_laid(found, lambda: self.orders(settings, found))

    def changed(
        self, ledger: Ledger, weights: WeightSchedule, start: int, orders: EndlessOrder
    ) -> Ledger:  # fmt: skip
        """Return the ledger with other weights from a row on; ``orders``, those of the run, are updated as well."""
        made, lanes = ledger.changed(weights, start), orders.settings.lanes
        orders.append(*(Weights(start=-(-row // lanes), weights=one) for row, one in made.segments_from(start)))
        return self._with_laid(made, lambda: orders)

    def _with_laid(self, ledger: Ledger, orders: Callable[[], Any]) -> Ledger:
        """Record in the ledger's last entry how far sources without weight are laid out, so they can be dropped later.

        Args:
            ledger: Ledger of the run.
            orders: Returns the orders of the run; called only if something is missing.
        """
        last, names = ledger.last, sorted(self.deal.unweighed(ledger) & self.leaves.keys())
        if not names:
            return ledger
        made = orders()
        if len(names) * made.settings.lanes > _MOST_LAID:
            if is_first_process():
                _log.info(
                    "%s: without a weight from row %d on. States can record at most %d numbers of such sources, so "
                    "keep it in the mixture", some_names(names), last.start, _MOST_LAID,
                )  # fmt: skip
            return ledger
        found = {name: made.laid_at_the_end(name) for name in names}
        laid = {name: tuple(counts.tolist()) for name, counts in found.items() if counts is not None}
        return Ledger((*ledger.entries[:-1], replace(last, laid={**last.laid, **laid})))

    # --- whether a run can continue ---

    def needed(self, ledger: Ledger) -> list[str]:
        """Return the sources that are missing here although the run needs their chunks.

        If shares are dealt in chunks, the positions of the other sources depend on the chunks of each source, unless
        the ledger records how far that source is laid out.
        """
        return sorted(granularity_in(ledger.last).needed(ledger, set(ledger.sources) - set(self.leaves)))

    def check(self, ledger: Ledger) -> None:
        """Check that the run of a ledger can continue with these sources; some changes are allowed.

        Raises:
            StateError: A missing source's chunks determine the earlier rows.
        """
        missing = self.needed(ledger)
        if missing:
            raise StateError(
                f"this state drew from {some_names([*map(repr, missing)])}, which this mixture lacks. The positions of "
                "the other sources depend on its chunks too: keep it in the mixture with the weight 0 (in weights or "
                "the Schedule at a resume, or by set_weights). States then record how far it reaches; once that is "
                "read, it may be left out and deleted"
            )

    def tell_overlapping(self, ledger: Ledger, settings: OrderSettings) -> None:
        """Log the sources that repeat so fast from now on that their passes overlap.

        These sources are dealt in chunks, which never changes during a run, and the last weights of the ledger go
        through them too fast for even passes.
        """
        last = ledger.last
        fast = self._even(last.blend.largest_shares(last.start), settings).keys() & self.deal.in_chunks(last)
        names = sorted(fast - ledger.even.keys())
        if names and is_first_process():
            _log.info(
                "%s: with these weights passes follow each other so fast that they overlap, and some samples come "
                "twice or more before others come once. How a source is dealt is decided by its share when it joins "
                'the run; a new run repeats it evenly, as does one with quotas="exact"', some_names(names),
            )  # fmt: skip

    def grown(self, ledger: Ledger) -> list[str]:
        """Return the sources to which shards were appended since the ledger was written."""
        own, shards = self.fingerprints, ledger.shards
        changed = {name: was for name, was in ledger.sources.items() if own.get(name, was) != was}
        return [name for name, was in changed.items() if self._chunks_when(name, was, shards) is not None]

    def eras(self, ledger: Ledger) -> dict[str, list[tuple[int, int]]]:
        """Return for each source of the ledger: (pass, number of chunks from that pass on), …; see ``Sources``.

        Raises:
            StateError: A source is neither the one of the ledger nor that one with shards appended.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        known: dict[tuple[str, str], int | None] = {}
        for entry in ledger.entries:
            for name, fingerprint in entry.sources.items():
                if name not in self.leaves:
                    continue  # dropped since then
                key = name, fingerprint
                if key not in known:
                    known[key] = self._chunks_when(name, fingerprint, entry.shards)
                count = known[key]
                if count is None:
                    raise StateError(
                        f"the source {name!r} is not the one of the run: it had the fingerprint {fingerprint[:12]} at "
                        f"row {entry.start}, but now has {self.leaves[name].fingerprint[:12]}. Give the shards and the "
                        "filter that the run read; other shards may only follow them"
                    )
                if name not in found:
                    found[name] = [(0, count)]
                elif name in entry.joins:
                    found[name] = eras_grown(found[name], entry.joins[name], count)
        return found

    def _chunks_when(self, name: str, fingerprint: str, shards: Mapping[str, int]) -> int | None:
        return self.leaves[name].chunks_when(fingerprint, shards.get(name))

    # --- forecasts and orders ---

    def forecast(self, ledger: Ledger) -> Forecast:
        """Forecast the rows due from each source, by the shares of a ledger and with the shards that it had."""
        eras, found = self.eras(ledger), {}
        for name, one in self.leaves.items():
            samples = sums(one.chunk_samples)
            sizes = eras.get(name, [(0, len(samples) - 1)])
            found[name] = Passes(tuple((first, int(samples[count])) for first, count in sizes))
        return Forecast(ledger, found)

    def orders(self, settings: OrderSettings, ledger: Ledger) -> Orders:
        """Return the orders of all passes, or of the single endless one."""
        sources = Sources(
            {name: one.chunk_samples for name, one in self.leaves.items()}, settings,
            absent=sorted(set(ledger.sources) - set(self.leaves)), laid=ledger.laid, eras=self.eras(ledger),
            even=ledger.even,
        )  # fmt: skip
        deal, known = granularity_in(ledger.last), ledger.first_rows

        def lanes() -> Orders:
            schedule = [
                Weights(
                    start=-(-row // settings.lanes),
                    weights={name: weight for name, weight in weights.items() if known[name] <= row},
                )
                for row, weights in ledger.segments()
            ]
            return deal.lanes(sources, schedule, threading.RLock())  # the reader plans in parallel with the consumer

        def passes(quotas: Mapping[str, int]) -> Orders:
            return deal.passes(sources, quotas)

        return ledger.last.blend.orders(lanes, passes)
