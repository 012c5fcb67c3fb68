"""Cache the runs that pages query: those of a saved state, and new ones as addresses describe them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shard_tools.look.plan.keys import KeptKeys
from shard_tools.look.plan.steps import PlannedRun
from shard_tools.look.show.order.query import Asked, RunAsked
from streaming.common.lru_cache import LruCache
from streaming.errors import ConfigError
from streaming.order.plan.settings import Shape
from streaming.order.plan.sizes import Sizes
from streaming.order.plan.state import LoaderState

if TYPE_CHECKING:
    from streaming.sets.sources.mixed import AnySource

DEFAULT_SIZE = 64
"""Default rows of a global batch: as many as a person looks through."""
_KEPT_RUNS, _KEPT_ANSWERS = 8, 32
_KEPT_BYTES = 64 << 20  # for keys of some hundred steps of thousands of rows
_IN_STATE = ("seed", "shuffle", "lanes", "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """A step of a run.

    Attributes:
        run: The run.
        epoch: The epoch.
        batch: Number of the batch in it.
        step: Number of the batch from the beginning of the run.
        num_batches: Batches of the epoch; None: it has no end.
        notes: Settings that the address left open, or changes against the state, in words.
    """

    run: PlannedRun
    epoch: int
    batch: int
    step: int
    num_batches: int | None
    notes: tuple[str, ...]

    @property
    def row(self) -> int:
        """The row of the run at which the batch begins."""
        plan, number = self.run.plan_of(self.step)
        return plan.row_of(number)


class ShownRuns:
    """The runs over one set. Thread-safe.

    Args:
        planned: The data, as training opens it.
        state: A saved state of a run over it, or None.

    Attributes:
        answers: Cache of the latest expensive answers, by request.
    """

    def __init__(self, planned: AnySource, state: LoaderState | None = None) -> None:
        self.planned, self.state = planned, state
        self._runs: LruCache[RunAsked, PlannedRun] = LruCache(_KEPT_RUNS, _one)
        self._blocks = KeptKeys.cache(_KEPT_BYTES)
        self._keys: LruCache[int, KeptKeys] = LruCache(1 << 20, _one)
        self.answers: LruCache[Any, Any] = LruCache(_KEPT_ANSWERS, _one)

    def keys(self, one: Any) -> KeptKeys:
        """Return the keys of a set, with a cache of the latest."""
        known = one.shard_keys
        return self._keys.of(id(known.home), lambda: KeptKeys(known=known, kept=self._blocks))

    def of(self, asked: RunAsked) -> PlannedRun:
        """Return a run.

        Raises:
            ConfigError: Training would refuse it, or the state contradicts it.
            StateError: The state belongs to another dataset or mixture.
        """
        return self._runs.of(asked, lambda: self._made(asked))

    def at(self, asked: Asked) -> At:
        """Return the step that an address names; by default, the next step of the state.

        Raises:
            ConfigError: There is no such step, or no such run.
            StateError: The state belongs to another dataset or mixture.
        """
        run = self.of(asked.run)
        state = run.state
        epoch = state.epoch if asked.epoch is None else asked.epoch
        if run.is_endless and epoch:
            raise ConfigError(
                f"epoch: the run is one epoch without an end, number 0; got {epoch}. Count steps, or give epoch_size"
            )
        first, count = run.steps.first(epoch), run.steps.count(epoch)
        if not count:
            raise ConfigError(f"epoch: no batch is full in epoch {epoch}; give last_batch=pad, or a smaller batch")
        next_batch = min(run.steps.at - first, count - 1) if epoch == state.epoch else 0
        batch = next_batch if asked.step is None else asked.step
        if batch >= count:
            raise ConfigError(
                f"step: expected one of the {count:,} steps of epoch {epoch}, 0 to {count - 1:,}, got {batch:,}; later "
                f"ones are in epoch {epoch + 1}"
            )
        return At(
            run=run, epoch=epoch, batch=batch, step=first + batch, num_batches=None if run.is_endless else count,
            notes=tuple(self._notes(asked.run, run)),
        )  # fmt: skip

    def _made(self, asked: RunAsked) -> PlannedRun:
        if self.state is not None and asked.state:
            return self._resumed(asked, self.state)
        planned = self.planned.ordered(**asked.order)
        whole, each = self._sizes(asked)
        shape = Shape.chosen(each, whole, asked.world, last_batch=asked.last_batch, epoch_size=asked.epoch_size)
        return PlannedRun.begun(planned, shape, keys=self.keys)

    def _sizes(self, asked: RunAsked) -> tuple[Any, Any]:
        """Return the size of global batches and that of a rank's batches, one of them None."""
        if asked.batch_size is not None or asked.global_batch_size is not None:
            return asked.global_batch_size, asked.batch_size
        num_samples = asked.epoch_size or max(int(self.planned.chunk_samples.sum()), 1)
        return max(min(DEFAULT_SIZE, num_samples), asked.world), None

    def _resumed(self, asked: RunAsked, state: LoaderState) -> PlannedRun:
        for name in _IN_STATE:
            was, now = getattr(state.order, name), getattr(asked, name)
            if now not in (None, was):
                raise ConfigError(
                    f"{name}: the saved state has {name} {was}, got {now}; leave it out, or look at a new run, "
                    "with state off"
                )
        if asked.epoch_size not in (None, state.epoch_size):
            raise ConfigError(
                f"epoch_size: the saved state has {state.epoch_size}, got {asked.epoch_size}; leave it out, or look at "
                "a new run, with state off"
            )
        if asked.batch_size is None and asked.global_batch_size is None:
            if state.batch_sizes is None:
                raise ConfigError(
                    "global_batch_size: the saved state does not say how many rows its batches had; give it"
                )
            sizes = Sizes.chosen(None, state.batch_sizes.option, asked.world)
        else:
            sizes = Sizes.chosen(asked.batch_size, asked.global_batch_size, asked.world)
        return PlannedRun(
            planned=self.planned, state=state, global_batch_size=sizes, num_ranks=asked.world,
            last_batch=asked.last_batch, keys=self.keys,
        )  # fmt: skip

    def _notes(self, asked: RunAsked, run: PlannedRun) -> list[str]:
        """Describe what was left open, and what changes against the state."""
        sizes, notes = run.shape.sizes, []
        if self.state is None or not asked.state:
            if asked.batch_size is None and asked.global_batch_size is None:
                notes.append(
                    f"Batches of {sizes.at(0):,} rows over all ranks are assumed. The order depends on that number: "
                    "give that of your run, and its seed."
                )
            if self.state is not None:
                notes.append("This is a new run: the saved state is not used.")
            return notes
        was, row = self.state.batch_sizes, run.steps.row_of(self.state.epoch, self.state.samples_seen)
        if was is not None and not was.goes_on_as(sizes, row):
            notes.append(
                f"The saved state continues with batches of {was.at(row):,} rows from row {row:,} on; here they have "
                f"{sizes.at(row):,} from there, as the address says."
            )
        return notes


def _one(_: object) -> int:
    return 1
