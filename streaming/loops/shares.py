"""Keep the ledger of a run: what it draws of each source, and from which row on, and the orders that follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from infra import DeviceMesh
from streaming.arguments import checked_int
from streaming.datasets.mixture import Mixture, first_free_row
from streaming.errors import AgreementError, ConfigError, StateError
from streaming.job.agreement import gathered
from streaming.job.store import job_store, job_world_size
from streaming.mixing.lanes import drawn_before
from streaming.mixing.passes import Weights
from streaming.plan.ledger import Ledger
from streaming.plan.order import ENDLESS, Orders, OrderSettings
from streaming.plan.settings import Shape
from streaming.plan.state import LoaderState

_PASSES_TOLD = 6
"""Passes that the line at the start names; the rest follow from them."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_log = logging.getLogger("streaming")


class RunShares:
    """Keep the ledger of one run over a mixture. For the thread that iterates.

    Rows are samples of the run over all ranks and epochs.

    Args:
        mixture: What is read.
        shape: Of its batches.

    Attributes:
        ledger: Of the run.
        samples_per_pass: Samples of an epoch that has no ``epoch_size``; ``ENDLESS``: it does not end.

    Raises:
        ConfigError: Batches are to be of one source each, and would not be in this shape.
    """

    def __init__(self, mixture: Mixture, shape: Shape) -> None:
        self._mixture = mixture
        self._batch_size, self._is_ramp = shape.global_batch_size, shape.ramp is not None
        if mixture.batches == "one_source" and shape.ramp is not None:
            raise ConfigError(
                'batches="one_source": which source a batch is of is counted in batches of one size; give '
                'global_batch_size an integer, or batches="mixed"'
            )
        if mixture.batches == "one_source" and (shape.epoch_size or 0) % shape.global_batch_size:
            raise ConfigError(
                f'epoch_size: batches="one_source" needs a multiple of the global batch, {shape.global_batch_size}, '
                f"got {shape.epoch_size}: batches of the next epoch would hold halves of two batches of the mixture"
            )
        self.ledger: Ledger = mixture.begun(shape.global_batch_size)
        quotas = self.ledger.last.quotas
        self.samples_per_pass: int = ENDLESS if quotas is None else sum(quotas.values())
        if quotas is not None and self.samples_per_pass < len(mixture):
            _log.info(
                'batches="one_source": an epoch has %d of %d samples, whole batches of each source; what is left of a '
                "source comes first in the next epoch", self.samples_per_pass, len(mixture),
            )  # fmt: skip
        self._orders: Orders | None = None
        self._ahead: tuple[Ledger, Orders] | None = None

    def orders(self, settings: OrderSettings) -> Orders:
        """Return the orders of all passes.

        The same object while the settings stay, so that weights can be appended to it.
        """
        if self._orders is None or self._orders.settings != settings:
            self._orders = self._mixture.orders(settings, self.ledger)
        return self._orders

    def apart(self, settings: OrderSettings) -> Orders:
        """Return the same orders for looking ahead: what is looked at in ``orders`` counts as planned.

        The same object while neither settings nor ledger change: after ``remesh`` most of it is laid already.
        """
        if self._ahead is None or self._ahead[0] != self.ledger or self._ahead[1].settings != settings:
            orders: Any = self.orders(settings)
            self._ahead = self.ledger, orders.apart() if self._mixture.is_endless else orders
        return self._ahead[1]

    def load(self, state: LoaderState, row: int) -> None:
        """Go on with the ledger of a state, of which ``row`` is the position.

        Raises:
            StateError: It is that of another mixture.
        """
        if state.ledger is None:
            raise StateError(
                "this state belongs to a single data set, and this loader reads a mixture; load it into a loader over "
                "that data set"
            )
        was = state.ledger.last.batch_size
        if was is not None and was != self._batch_size:
            raise StateError(
                f"this state was drawn in batches of one source of {was} samples each, and this loader's global batch "
                f"has {self._batch_size}; give the same: global_batch_size={was}"
            )
        ledger = self._mixture.resumed(state.ledger, state.order, row)
        if ledger != self.ledger:
            self.ledger, self._orders = ledger, None

    def set_weights(
        self, weights: Any, settings: OrderSettings, row: int, mesh: DeviceMesh, *, at: int | None, timeout_s: float
    ) -> int:
        """Let other weights apply from the first row on that no rank has planned, or from ``at`` on; return the row.

        Raises:
            ConfigError: The mixture ends, they are no weights of its sources, or ``at`` is planned already.
            AgreementError: Ranks gave other weights, or did not come.
        """
        self._mixture.check_weights(weights)
        orders: Any = self.orders(settings)
        first_free_row(orders, row)
        lanes = settings.lanes
        # Nobody plans behind the frontier while it is held: what all ranks agree on is free on each of them.
        with orders.held() as frontier:
            free = self._agreed(max(frontier * lanes, row, self.ledger.last.start), weights, at, mesh, timeout_s)
            start = free if at is None else checked_int("set_weights: at", at, 0, ENDLESS)
            if start < free:
                raise ConfigError(
                    f"set_weights: at={start}: rows up to {free} are planned already; give one from there on, or "
                    "leave it out"
                )
            ledger = self._mixture.changed(self.ledger, weights, start)
            orders.append(*(Weights(start=-(-r // lanes), weights=shares) for r, shares in ledger.segments_from(start)))
            # The orders hold what the ledger says, from the same row on.
            self.ledger = self._mixture.with_laid(ledger, lambda: orders)
        step = "" if self._is_ramp else f", step {-(-start // self._batch_size):,}"
        _log.info("set_weights: %s from row %d%s on, %d rows from here", dict(weights), start, step, start - row)
        return start

    def seen(self, settings: OrderSettings, row: int) -> dict[str, dict[str, float]]:
        """Return what was drawn of each source before ``row``, by arithmetic: see ``DataLoader.seen``."""
        passes, units = self._mixture.passes(self.ledger), self._mixture.units_per_sample
        orders: Any = self.apart(settings)
        found: dict[str, dict[str, float]] = {}
        for name, count in drawn_before(orders, row).items():
            found[name] = {"samples": count}
            if name not in passes:
                continue  # dropped since: nothing more is known of it
            found[name]["passes"] = passes[name].read(count)
            if self._mixture.unit == "tokens":
                found[name]["tokens"] = round(count * units[name])
        return found

    def what_follows(self, row: int, global_batch_size: int) -> str:
        """Say in words which sources open, and which begin which pass, when, in steps; "" where none does."""
        if not self._mixture.is_endless:
            return ""
        coming = sorted(self._mixture.next_passes(self.ledger, row))[:_PASSES_TOLD]
        opening = self._mixture.openings(self.ledger, row)[:_PASSES_TOLD]
        told = [f"{names} is drawn from at step {-(-at // global_batch_size):,}" for at, names in opening]
        for at, name in self._mixture.joins(self.ledger, row):
            told.append(f"new shards of {name} are read from about step {at // global_batch_size:,} on")
        return ", ".join(
            [
                *told,
                *(
                    f"{name} begins its {_ordinal(number)} pass at step {at // global_batch_size:,}"
                    for at, name, number in coming
                ),
            ]
        )

    def _agreed(
        self, free: int, weights: Mapping[str, float], at: int | None, mesh: DeviceMesh, timeout_s: float
    ) -> int:
        """Return the first row that is free on all ranks."""
        if mesh.world_size == 1:
            return free
        job = job_world_size()
        rank, board = job_store("set_weights") if job > 1 else (0, None)
        if (
            board is None
            or job < mesh.world_size
            or (rank != mesh.rank and (job == mesh.world_size or rank not in mesh.ranks))
        ):
            _need_row(mesh, at)
            return free
        said = {"free": free, "weights": dict(weights), "at": at, "rank": mesh.rank}
        told = gathered(board, rank, mesh.ranks, said, subject="set_weights", timeout_s=timeout_s)
        if any(one["rank"] != other for other, one in told.items()):  # data ranks alone: several processes are one
            _need_row(mesh, at)
            return free
        for other, one in told.items():
            if (one["weights"], one["at"]) != (said["weights"], at):
                raise AgreementError(
                    f"set_weights: rank {other} gave {one['weights']}, at={one['at']}, rank {rank} {said['weights']}, "
                    f"at={at}; all ranks have to give the same, at the same step"
                )
        return int(max(one["free"] for one in told.values()))


def _need_row(mesh: DeviceMesh, at: int | None) -> None:
    """Raise ConfigError where ranks cannot agree on a row, and were not given one."""
    if at is None:
        raise ConfigError(
            f"set_weights: the {mesh.world_size} ranks have to agree on a row, as ranks of torch.distributed; call "
            "torch.distributed.init_process_group, give the loader the whole mesh (with tensor, pipeline and context "
            "ranks), or give all ranks the same row: set_weights(…, at=row)"
        )


def _ordinal(number: int) -> str:
    return _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"{number}."
