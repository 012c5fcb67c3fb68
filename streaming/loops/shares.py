"""Keep the ledger of a run over a mixture: what is drawn from each source, from which row on, and the orders."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from infra import DeviceMesh
from streaming.arguments import checked_int, format_bytes, some_names
from streaming.errors import AgreementError, ConfigError, StateError
from streaming.job.agreement import Facts, Together
from streaming.job.store import job_store, job_world_size
from streaming.mixing.forecast import drawn_before
from streaming.mixing.passes import Weights
from streaming.plan.ledger import Ledger
from streaming.plan.order import ENDLESS, Orders, OrderSettings
from streaming.plan.settings import Shape
from streaming.plan.state import LoaderState
from streaming.sources.mixed import MixedSource

_PASSES_TOLD = 6
"""Number of passes named in the log line at the start; later ones follow from them."""
_MOST_LAID = 2**12
"""Maximum of numbers in a state about sources that may be dropped: one per lane and source, about 30 KB of JSON."""
_COARSE = 0.05
"""Part of all samples by which a source may stray from its share without a warning."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_log = logging.getLogger("streaming")


class RunShares:
    """Keep the ledger of one run over a mixture. For the thread that iterates.

    Rows are samples of the run over all ranks and epochs.

    Args:
        mixture: The mixture.
        shape: Shape of its batches.

    Attributes:
        mixture: The mixture; after a state was loaded, with the fetch units of its run.
        now_read: The mixture with the weights that apply now, if ``set_weights`` has changed them.
        ledger: Ledger of the run.
        samples_per_pass: Samples of an epoch without ``epoch_size``; ``ENDLESS`` if it has no end.

    Raises:
        ConfigError: Batches of one source each are not possible with this shape.
    """

    def __init__(self, mixture: MixedSource, shape: Shape) -> None:
        self.mixture = self.now_read = mixture
        self._batch_size, self._is_ramp = shape.global_batch_size, shape.ramp is not None
        mixture.check_shape(shape)
        order = mixture.order_settings(shape.size_for_lanes)
        self.ledger: Ledger = mixture.begun(shape.global_batch_size, order)
        quotas = self.ledger.last.quotas
        self.samples_per_pass: int = ENDLESS if quotas is None else sum(quotas.values())
        if quotas is not None and self.samples_per_pass < mixture.num_readable:
            _log.info(
                'batches="one_source": an epoch has %d of %d samples, in whole batches of each source; the rest of '
                "each source comes first in the next epoch", self.samples_per_pass, mixture.num_readable,
            )  # fmt: skip
        self._has_begun = False
        self._orders: Orders | None = None

    def orders(self, settings: OrderSettings) -> Orders:
        """Return the orders of all passes.

        The object is the same as long as settings and ledger are: what is laid out is laid out once.
        """
        if self._orders is None or self._orders.settings != settings:
            self._orders = self.mixture.orders(settings, self.ledger)
        return self._orders

    def load(self, state: LoaderState, row: int) -> None:
        """Continue with the ledger of a state whose position is ``row``.

        Raises:
            StateError: It belongs to another mixture.
        """
        if state.ledger is None:
            raise StateError(
                "this state belongs to a single data set, but this loader reads a mixture; load it into a loader over "
                "that data set"
            )
        was = state.ledger.last.batch_size
        if was is not None and was != self._batch_size:
            raise StateError(
                f"this state was saved with one-source batches of {was} samples, but this loader's global batch has "
                f"{self._batch_size}; give global_batch_size={was}"
            )
        mixture = self.mixture.cut_as(state.ledger)
        ledger = resumed(mixture, state.ledger, state.order, row)
        if mixture is not self.mixture:
            _log.info("fetch_bytes: the run continues with the fetch units that it began with: %s", in_words(mixture))
        if ledger != self.ledger or mixture is not self.mixture:
            self.mixture, self.ledger, self._orders = mixture, ledger, None
            self.now_read = mixture.weighed_as(ledger)

    def said(self, weights: Any, at: Any, row: int) -> Facts:
        """Return what ranks compare before they change their weights, in plain numbers.

        Args:
            weights: As the user gave them.
            at: Likewise.
            row: The row from which this rank can plan anew.

        Raises:
            ConfigError: The mixture has an end, the weights are not valid for its sources, or ``at`` is no row.
        """
        plain = self.mixture.named_weights(weights)
        self.mixture.weighed(plain)
        at = None if at is None else checked_int("set_weights: at", at, 0, ENDLESS)
        return {"weights": plain, "at": at, "row": row}

    def changed(self, told: Mapping[int, Facts], settings: OrderSettings, *, can_agree: bool) -> Change:
        """Return the change of weights that all ranks are to make; it is not made yet.

        It is a function of the ledger and of what ranks said, and so the same on all of them.

        Args:
            told: What each rank said.
            settings: The order settings.
            can_agree: Whether all ranks that are to make the change are in ``told``.

        Raises:
            ConfigError: ``at`` is too soon, or missing where ranks cannot agree.
            AgreementError: Ranks gave different weights, or another ``at``.
        """
        (first, said), *others = told.items()
        weights, at = said["weights"], said["at"]
        for rank, one in others:
            if (one["weights"], one["at"]) != (weights, at):
                raise AgreementError(
                    f"set_weights: rank {rank} gave {one['weights']}, at={one['at']}, but rank {first} gave {weights}, "
                    f"at={at}; give the same on all ranks, at the same step"
                )
        orders: Any = self.orders(settings)
        orders = orders.apart()
        free = max(orders.first_free_row(max(one["row"] for one in told.values())), self.ledger.last.start)
        if at is None and not can_agree:
            raise ConfigError(
                "set_weights: the ranks must agree on a row through torch.distributed; call "
                "torch.distributed.init_process_group and give the loader the whole mesh (with tensor, pipeline and "
                f"context ranks), or give all ranks the same row: set_weights(…, at=row), here {free} or a later one"
            )
        if at is not None and at < free:
            raise ConfigError(
                f"set_weights: at={at}: rows before {free} are planned already; give a row from {free} on, or leave at "
                "out"
            )
        start = free if at is None else at
        ledger = self.ledger.changed(self.mixture.weighed(weights), start)
        lanes = settings.lanes
        orders.append(*(Weights(start=-(-r // lanes), weights=shares) for r, shares in ledger.segments_from(start)))
        return Change(ledger=_with_laid(self.mixture, ledger, lambda: orders), orders=orders, weights=weights)

    def adopt(self, change: Change, row: int) -> int:
        """Make a change, on behalf of a program that has come to ``row``; return the row from which it applies."""
        self.ledger, self._orders = change.ledger, change.orders
        self.now_read = self.mixture.weighed_as(change.ledger)
        start = self.ledger.last.start
        step = "" if self._is_ramp else f", step {-(-start // self._batch_size):,}"
        _log.info("set_weights: %s from row %d%s on, %d rows from here", change.weights, start, step, start - row)
        _tell_overlapping(self.mixture, self.ledger, change.orders.settings)
        return start

    def seen(self, settings: OrderSettings, row: int) -> dict[str, dict[str, float]]:
        """Return the counts drawn from each source before ``row``; see ``DataLoader.seen``."""
        passes, units = self.mixture.forecast(self.ledger).passes, self.mixture.units_per_sample
        orders: Any = self.orders(settings)
        found: dict[str, dict[str, float]] = {}
        for name, count in drawn_before(orders, row).items():
            found[name] = {"samples": count}
            if name not in passes:
                continue  # dropped since, so nothing more is known about it
            found[name]["passes"] = passes[name].read(count)
            if self.mixture.unit == "tokens":
                found[name]["tokens"] = round(count * units[name])
        return found

    def what_follows(self, row: int, global_batch_size: int) -> str:
        """Describe which sources open, and which begin which pass, at which step; "" if none does."""
        if not self.mixture.is_endless:
            return ""
        forecast = self.mixture.forecast(self.ledger)
        coming = sorted((at, name, number) for name, rows in forecast.pass_rows(row).items() for at, number in rows)
        opening = forecast.openings(row)[:_PASSES_TOLD]
        told = [f"{names} is drawn from at step {-(-at // global_batch_size):,}" for at, names in opening]
        for at, name in forecast.joins(row):
            told.append(f"new shards of {name} are read from about step {at // global_batch_size:,} on")
        for at, name, number in coming[:_PASSES_TOLD]:
            told.append(f"{name} begins its {_ordinal(number + 1)} pass at step {at // global_batch_size:,}")
        return ", ".join(told)

    def warn_if_coarse(self, lanes: int) -> None:
        """Warn, once, if sources are so small that whole chunks cannot keep the shares.

        Every lane starts at a random phase among the chunks, so over L lanes the samples drawn from a source differ
        from its share by up to about half the square root of L chunks (docs/design/0022).
        """
        last, is_first = self.ledger.last, not self._has_begun
        self._has_begun = True
        if not is_first or last.dealt != "chunks" or not self.mixture.is_endless:
            return
        tables = {name: self.mixture.leaves[name].chunk_samples for name in sorted(last.drawn - last.even.keys())
                  if last.weights[name]}  # fmt: skip
        if not tables:
            return
        total = sum(int(table.sum()) for table in tables.values())
        mean, name = max((float(table.mean()), name) for name, table in tables.items())
        strays = mean * math.sqrt(lanes) / 2
        if len(tables) == 1 or strays <= _COARSE * total:
            return
        _log.warning(
            "the sources of this mixture are small: a chunk of %r has %d of their %d samples. Whole chunks are drawn "
            "in %d lanes, so at any step a source may be up to about %d samples ahead of or behind its share. "
            '%s(…, quotas="exact") keeps the shares at every step; smaller shards (shard_tools reshard --max-bytes) '
            "come closer to them",
            name, round(mean), total, lanes, round(strays), type(self.mixture).__name__,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of weights that can be made.

    Attributes:
        ledger: Ledger of the run with it.
        orders: Orders of the run with it.
        weights: The weights as given, for the log.
    """

    ledger: Ledger
    orders: Orders
    weights: Mapping[str, float]


def ranks_together(mesh: DeviceMesh, timeout_s: float) -> tuple[Together, bool]:
    """Return the ranks that change weights together, and whether these are all that read the mixture.

    They are all processes of the job if the mesh has as many ranks, or those ranks of the job that the mesh names. A
    mesh that is numbered from 0 and smaller than the job may be one of data ranks only, several processes of which are
    the same rank. Nobody can tell who else has one, so each of them is alone.
    """
    job, ranks, rank = job_world_size(), mesh.ranks, mesh.rank
    board = None
    if 1 < mesh.world_size <= job:
        rank, board = job_store("set_weights")
        if job == mesh.world_size:
            ranks = tuple(range(job))
        elif rank != mesh.rank or ranks == tuple(range(len(ranks))):
            board = None
    together = Together(board, rank, ranks, subject="set_weights", timeout_s=timeout_s)
    return together, board is not None or mesh.world_size == 1


def resumed(mixture: MixedSource, ledger: Ledger, settings: OrderSettings, row: int) -> Ledger:
    """Return the ledger of a run over a mixture that continues at ``row``; log once what changes.

    Raises:
        StateError: It cannot continue: a source is a different one, or its chunks are needed for what was drawn before.
    """
    mixture.check_ledger(ledger)

    @cache
    def settled() -> tuple[Any, int]:
        orders: Any = mixture.orders(settings, ledger)
        return orders, orders.first_free_row(row)

    def free_pass(name: str) -> int:
        found: int = settled()[0].free_pass(name)
        return found

    found, changes = ledger.resumed(
        mixture.begun(ledger.last.batch_size or 1, settings).last, lambda: settled()[1],
        grown={name: partial(free_pass, name) for name in mixture.grown(ledger)},
    )  # fmt: skip
    if set(found.sources) - set(mixture.names) and mixture.is_endless:
        made: Any = mixture.orders(settings, found)
        made.check_from(row // settings.lanes)
    if changes:
        _log.info("the mixture changes at row %d: %s", found.last.start, "; ".join(changes))
        _tell_overlapping(mixture, found, settings)
    return _with_laid(mixture, found, lambda: mixture.orders(settings, found))


def _tell_overlapping(mixture: MixedSource, ledger: Ledger, settings: OrderSettings) -> None:
    """Say which sources are repeated so fast from now on that passes overlap: how a source is dealt never changes."""
    names = mixture.overlapping(ledger, settings)
    if names:
        _log.info(
            "%s: with these weights passes follow each other so fast that they overlap, and some samples come twice "
            "or more before others come once. How a source is dealt is decided by its share when it joins the run; a "
            'new run repeats it evenly, as does one with quotas="exact"', some_names(names),
        )  # fmt: skip


def in_words(mixture: MixedSource) -> str:
    """Describe the fetch units of a mixture."""
    sizes = [f"{name} {format_bytes(size)}" for name, size in mixture.fetch_bytes.items()]
    return some_names([*sizes, *(["whole chunks of the others"] if len(sizes) < len(mixture.names) else [])])


def _with_laid(mixture: MixedSource, ledger: Ledger, orders: Callable[[], Any]) -> Ledger:
    """Record in a ledger's last entry what sources without weight have laid out, so that they can be dropped later.

    Args:
        mixture: The mixture.
        ledger: Ledger of the run.
        orders: Returns its orders; called only if something is missing.
    """
    last = ledger.last
    if last.dealt != "chunks" or last.quotas is not None:
        return ledger
    # Of those that are dealt by samples nothing is laid.
    names = sorted((ledger.drawn - last.drawn - ledger.laid.keys() - ledger.even.keys()) & set(mixture.names))
    if not names:
        return ledger
    made = orders()
    if len(names) * made.settings.lanes > _MOST_LAID:
        _log.info(
            "%s: without a weight from row %d on. States can record at most %d numbers of such sources, so "
            "keep it in the mixture", some_names(names), last.start, _MOST_LAID,
        )  # fmt: skip
        return ledger
    found = {name: made.laid_at_the_end(name) for name in names}
    laid = {name: tuple(counts.tolist()) for name, counts in found.items() if counts is not None}
    return Ledger((*ledger.entries[:-1], replace(last, laid={**last.laid, **laid})))


def _ordinal(number: int) -> str:
    return _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"{number}."
