"""Define which samples are drawn when in a run: all samples of one set, or those of a mixture by the run's ledger."""

from __future__ import annotations

import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any, Self

from infra import DeviceMesh
from streaming.common.arguments import checked_int, format_bytes, some_names
from streaming.common.job.agreement import Facts, RankGroup
from streaming.common.job.store import job_store, job_world_size
from streaming.errors import AgreementError, ConfigError, StateError
from streaming.order.mixing.forecast import drawn_before
from streaming.order.mixing.granularity import granularity_in
from streaming.order.plan.ledger import Ledger, why_differs
from streaming.order.plan.order import ENDLESS, Orders, OrderSettings
from streaming.order.plan.plan import Plan
from streaming.order.plan.settings import Shape
from streaming.order.plan.state import LoaderState
from streaming.run.engine.source import Source
from streaming.run.epochs.iterator import NO_SOURCES_SEEN, NO_SOURCES_WEIGHED
from streaming.run.epochs.position import Place
from streaming.run.epochs.run import Run
from streaming.run.loops.runs import NoRun, PausedRun, ReplannedRun
from streaming.sets.datasets.face import reading
from streaming.sets.sources.mixed import MixedSource
from streaming.types import override

_PASSES_TOLD = 6
"""Number of passes named in the log line at the start; later ones follow from them."""
_COARSE = 0.05
"""Part of all samples by which a source may deviate from its share without a warning."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_log = logging.getLogger("streaming")


class RunOrder(ABC):
    """The samples drawn in one run over a source, in order. A value. The defaults hold for samples without sources.

    A change returns another run order. Rows are samples of the run, over all ranks and epochs.

    Attributes:
        source: The source that is read: the given one or, after a state was loaded, the same samples in the units of
            the state's run.
        num_samples: Number of samples of the source.
        samples_per_pass: Number of samples of an epoch without ``epoch_size``; ``ENDLESS`` if it has no end.
    """

    source: Source
    num_samples: int
    samples_per_pass: int

    @abstractmethod
    def orders(self, settings: OrderSettings) -> Orders:
        """Return the orders of all passes."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the entries of a state that describe the run order, by the names of ``LoaderState``."""

    @abstractmethod
    def restored(self, state: LoaderState, row: int) -> RunOrder:
        """Return the run order of a state's run, from ``row`` on.

        Raises:
            StateError: It belongs to another dataset, or to another kind of dataset.
        """

    def succeeding(self, other: RunOrder, state: LoaderState, row: int) -> RunOrder:  # noqa: ARG002  no weights to take over
        """Return this run order with the weights that ``other``, of a loop with this state, has received meanwhile."""
        return self

    def now_read(self, dataset: Any) -> Any:
        """Return a dataset with the weights that apply now."""
        return dataset

    def seen(self, settings: OrderSettings, row: int) -> dict[str, dict[str, float]]:  # noqa: ARG002
        """Return the counts drawn from each source before ``row``; see ``DataLoader.seen``.

        Raises:
            ConfigError: There are no sources.
        """
        raise ConfigError(NO_SOURCES_SEEN)

    def saying(self, weights: Any, at: Any) -> Callable[[int], Facts]:  # noqa: ARG002
        """Return a function from the row that a rank can plan from to the facts that ranks compare before a change.

        Args:
            weights: Weights as the user gave them.
            at: Row as the user gave it.

        Raises:
            ConfigError: There are no sources. The function raises if the mixture has an end, the weights are not valid
                for its sources, or ``at`` is no row.
        """
        raise ConfigError(NO_SOURCES_WEIGHED)

    def reweighed(self, told: Mapping[int, Facts], settings: OrderSettings, *, can_agree: bool) -> RunOrder:  # noqa: ARG002
        """Return the run order after a change of weights: a function of ledger and all facts, equal on all ranks.

        Args:
            told: The facts of each rank.
            settings: The order settings.
            can_agree: Whether ``told`` has all ranks that have to make the change.

        Raises:
            ConfigError: There are no sources; ``at`` is too soon, or missing where ranks cannot agree.
            AgreementError: Ranks gave different weights, or another ``at``.
        """
        raise ConfigError(NO_SOURCES_WEIGHED)

    def tell_change(self, told: Mapping[int, Facts], row: int, settings: OrderSettings) -> int:  # noqa: ARG002
        """Log the weights that ranks have agreed on, at a row of the run. Return the row from which they apply."""
        return row

    def replannable(self, run: Run, plan: Plan) -> Run:  # noqa: ARG002
        """Return a run with the batches of ``run``. It can be paused if this run order can be reweighed."""
        return run

    def held(self, otherwise: Place) -> AbstractContextManager[PausedRun]:
        """Pause the current run until the ``with`` block ends. Without a run, ``otherwise`` is the current place."""
        return nullcontext(NoRun(otherwise))

    def allowed_bad(self, row: int, num_samples: int) -> Callable[[float], Mapping[str, int] | None]:  # noqa: ARG002
        """Return a function that gives the allowed bad samples per source, for a part of ``num_samples`` rows."""
        return no_limits

    def what_follows(self, row: int) -> str:  # noqa: ARG002
        """Describe which sources open, and which begin a pass, with the step of each; "" if none does."""
        return ""

    def warn_if_coarse(self, lanes: int) -> None:  # noqa: B027  nothing to warn of
        """Warn once if sources are so small that whole chunks cannot keep the shares."""


def course_of(source: Source, shape: Shape) -> RunOrder:
    """Return the run order of a new run.

    Raises:
        ConfigError: Batches of one source each are not possible with this shape.
    """
    return Mixed(source, shape) if isinstance(source, MixedSource) else Single(source)


class Single(RunOrder):
    """All samples of one set, pass after pass."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_samples = self.samples_per_pass = int(source.chunk_samples.sum())

    @override
    def orders(self, settings: OrderSettings) -> Orders:
        return self.source.orders(settings)

    @override
    def facts(self) -> dict[str, Any]:
        return {
            "fingerprint": self.source.fingerprint, "num_samples": self.samples_per_pass, "ledger": None,
            "versions": self.source.opened_versions,
        }  # fmt: skip

    @override
    def restored(self, state: LoaderState, row: int) -> RunOrder:
        if state.ledger is not None:
            raise StateError(
                f"this state belongs to a mixture of {', '.join(state.ledger.sources)}, but this loader reads a single "
                "data set; give it the Mixture"
            )
        own, num_samples = self.source.fingerprint, self.samples_per_pass
        if (state.fingerprint, state.num_samples) != (own, num_samples):
            why = why_differs(state.fingerprint, own)
            raise StateError(
                f"this state belongs to another selection of samples from these shards. {why}"
                if why
                else f"this state belongs to another data set: {state.num_samples} samples, fingerprint "
                f"{state.fingerprint[:12]}; this one has {num_samples} samples, fingerprint {own[:12]}. "
                + (
                    self.source.where_is(state.fingerprint, state.versions.get("", ()))
                    or "Open the same shards in the same order, with the index they had"
                )
            )
        return self


class Mixed(RunOrder):
    """Samples of several sources, by the ledger of a run. For the thread that iterates.

    Args:
        mixture: The mixture.
        shape: Shape of its batches.

    Attributes:
        ledger: Ledger of the run.

    Raises:
        ConfigError: Batches of one source each are not possible with this shape.
    """

    def __init__(self, mixture: MixedSource, shape: Shape) -> None:
        self.source: MixedSource = mixture
        self._now = mixture
        self._sizes = shape.sizes
        mixture.deal.check_shape(shape)
        size = shape.global_batch_size
        self.ledger: Ledger = mixture.begun(size, mixture.order_settings(shape.sizes.size_for_lanes))
        self.samples_per_pass: int = self.ledger.last.blend.samples_per_pass
        self.num_samples = int(mixture.chunk_samples.sum())
        said = mixture.deal.under(size).epoch_words(self.samples_per_pass, mixture.num_readable)
        if said:
            _log.info("%s: %s", mixture.deal.spelled, said)
        self._has_begun = False
        self._orders: Orders | None = None
        self._running: Callable[[], ReplannedRun | None] = lambda: None

    def _with(self, mixture: MixedSource, ledger: Ledger, orders: Orders | None) -> Self:
        """Return this run order with another ledger, perhaps with other fetch units."""
        made = copy(self)
        made.source, made.ledger, made._orders, made._now = mixture, ledger, orders, mixture.weighed_as(ledger)
        return made

    def orders(self, settings: OrderSettings) -> Orders:
        """See ``RunOrder``: the same object as long as settings are the same, so that it is laid out once."""
        if self._orders is None or self._orders.settings != settings:
            self._orders = self.source.orders(settings, self.ledger)
        return self._orders

    @override
    def facts(self) -> dict[str, Any]:
        return {
            "fingerprint": self.source.fingerprint, "num_samples": self.num_samples, "ledger": self.ledger,
            "versions": self.source.opened_versions,
        }  # fmt: skip

    @override
    def restored(self, state: LoaderState, row: int) -> RunOrder:
        if state.ledger is None:
            raise StateError(
                "this state belongs to a single data set, but this loader reads a mixture; load it into a loader over "
                "that data set"
            )
        granularity_in(state.ledger.last).check_resumed(self._sizes.at(0))
        mixture = self.source.cut_as(state.ledger)
        mixture.check_ledger(state.ledger, state.versions)
        ledger = mixture.drawing.resumed(state.ledger, state.order, row, state.versions)
        if mixture is not self.source:
            _log.info("fetch_bytes: the run continues with the fetch units that it began with: %s", in_words(mixture))
        return self if ledger == self.ledger and mixture is self.source else self._with(mixture, ledger, None)

    @override
    def now_read(self, dataset: Any) -> Any:
        return reading(dataset, self._now)

    @override
    def saying(self, weights: Any, at: Any) -> Callable[[int], Facts]:
        return partial(self._said, weights, at)

    def _said(self, weights: Any, at: Any, row: int) -> Facts:
        plain = self.source.named_weights(weights)
        self.source.weighing.weighed(plain)
        at = None if at is None else checked_int("set_weights: at", at, 0, ENDLESS)
        return {"weights": plain, "at": at, "row": row}

    @override
    def reweighed(self, told: Mapping[int, Facts], settings: OrderSettings, *, can_agree: bool) -> RunOrder:
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
        ledger = self.source.drawing.changed(self.ledger, self.source.weighing.weighed(weights), start, orders)
        return self._with(self.source, ledger, orders)

    @override
    def tell_change(self, told: Mapping[int, Facts], row: int, settings: OrderSettings) -> int:
        weights, start = next(iter(told.values()))["weights"], self.ledger.last.start
        step = f", step {-(-start // self._sizes.at(0)):,}" if self._sizes.is_constant else ""
        _log.info("set_weights: %s from row %d%s on, %d rows from here", weights, start, step, start - row)
        self.source.drawing.tell_overlapping(self.ledger, settings)
        return start

    @override
    def succeeding(self, other: RunOrder, state: LoaderState, row: int) -> RunOrder:
        return self.restored(state, row) if isinstance(other, Mixed) and other.ledger.is_changed else self

    @override
    def replannable(self, run: Run, plan: Plan) -> Run:
        if not self.source.is_endless:
            return run
        replanned = ReplannedRun(run, plan)
        self._running = weakref.ref(replanned)
        return replanned

    @override
    def held(self, otherwise: Place) -> AbstractContextManager[PausedRun]:
        run = self._running()
        return nullcontext(NoRun(otherwise)) if run is None or run.is_closed else run.held()

    @override
    def allowed_bad(self, row: int, num_samples: int) -> Callable[[float], Mapping[str, int] | None]:
        return partial(self.source.bad_limits, self.ledger, row, num_samples)

    @override
    def seen(self, settings: OrderSettings, row: int) -> dict[str, dict[str, float]]:
        passes, units = self.source.drawing.forecast(self.ledger).passes, self.source.weighing.units_per_sample
        orders: Any = self.orders(settings)
        found: dict[str, dict[str, float]] = {}
        for name, count in drawn_before(orders, row).items():
            found[name] = {"samples": count}
            if name not in passes:
                continue  # dropped since then, so nothing more is known
            found[name]["passes"] = passes[name].read(count)
            if self.source.weighing.unit == "tokens":
                found[name]["tokens"] = round(count * units[name])
        return found

    def what_follows(self, row: int) -> str:
        """See ``RunOrder``; rows of batches of several sizes cannot be converted to steps."""
        if not self.source.is_endless or not self._sizes.is_constant:
            return ""
        global_batch_size = self._sizes.at(0)
        forecast = self.source.drawing.forecast(self.ledger)
        coming = sorted((at, name, number) for name, rows in forecast.pass_rows(row).items() for at, number in rows)
        opening = forecast.openings(row)[:_PASSES_TOLD]
        told = [f"{names} is drawn from at step {-(-at // global_batch_size):,}" for at, names in opening]
        for at, name in forecast.joins(row):
            told.append(f"new shards of {name} are read from about step {at // global_batch_size:,} on")
        for at, name, number in coming[:_PASSES_TOLD]:
            told.append(f"{name} begins its {_ordinal(number + 1)} pass at step {at // global_batch_size:,}")
        return ", ".join(told)

    def warn_if_coarse(self, lanes: int) -> None:
        """See ``RunOrder``.

        Every lane starts at a random phase among the chunks, so over L lanes the samples drawn from a source differ
        from its share by up to about half the square root of L chunks (docs/design/0019).
        """
        last, is_first = self.ledger.last, not self._has_begun
        self._has_begun = True
        names = self.source.deal.in_chunks(last) if is_first else ()
        tables = {name: self.source.leaves[name].chunk_samples for name in sorted(names) if last.weights[name]}
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
            'quotas="exact" keeps the shares at every step; smaller shards (shard_tools reshard --max-bytes) '
            "come closer to them",
            name, round(mean), total, lanes, round(strays),
        )  # fmt: skip


def no_limits(part: float) -> None:
    """Allow bad samples by the limit of the whole set alone."""


def ranks_together(mesh: DeviceMesh, timeout_s: float, *, subject: str = "set_weights") -> tuple[RankGroup, bool]:
    """Return the ranks that change weights, or do another thing, together; and whether they are all that read the set.

    They are all processes of the job if the mesh has the same number of ranks, or those ranks of the job that the mesh
    names. A mesh that is numbered from 0 and smaller than the job may consist of data ranks only, with several
    processes per rank. Their other processes are unknown, so each process is alone.
    """
    job, ranks, rank = job_world_size(), mesh.ranks, mesh.rank
    board = None
    if 1 < mesh.world_size <= job:
        rank, board = job_store(subject)
        if job == mesh.world_size:
            ranks = tuple(range(job))
        elif rank != mesh.rank or ranks == tuple(range(len(ranks))):
            board = None
    together = RankGroup(board, rank, ranks, subject=subject, timeout_s=timeout_s)
    return together, board is not None or mesh.world_size == 1


def in_words(mixture: MixedSource) -> str:
    """Describe the fetch units of a mixture."""
    sizes = [f"{name} {format_bytes(size)}" for name, size in mixture.fetch_bytes.items()]
    return some_names([*sizes, *(["whole chunks of the others"] if len(sizes) < len(mixture.names) else [])])


def _ordinal(number: int) -> str:
    return _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"{number}."
