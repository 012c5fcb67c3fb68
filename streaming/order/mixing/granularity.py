"""Define the units in which a mixture deals its shares: chunks, single samples, or batches of one source each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from streaming.common.arguments import counted
from streaming.errors import ConfigError, StateError
from streaming.order.mixing.exact import BatchLanes, EvenLanes, ExactLanes
from streaming.order.mixing.lanes import MixedLanes
from streaming.order.mixing.passes import MixedPasses, Sources, Weights
from streaming.order.mixing.quotas import BatchPasses, ExactPasses
from streaming.order.plan.blend import Blend
from streaming.order.plan.ledger import Dealt, Entry, Even, Ledger
from streaming.order.plan.order import Orders, OrderSettings
from streaming.order.plan.settings import Shape
from streaming.types import Int64Array, override

_FEW_CHUNKS = 8


class Granularity(ABC):
    """The unit in which a mixture deals its shares. Callers use its methods and never test for a subclass.

    Whether a run ends is a separate property (``Blend``): each granularity has an order for either.

    Attributes:
        dealt: Its name in the entries of a ledger.
        spelled: How users ask for it, in messages.
        batch_size: Samples of a batch of one source over all ranks, dealt together; None: batches are not the unit.
    """

    dealt: ClassVar[Dealt]
    spelled: ClassVar[str] = ""
    batch_size: int | None = None

    @abstractmethod
    def lanes(self, sources: Sources, schedule: Sequence[Weights], lock: AbstractContextManager[Any]) -> Orders:
        """Return the order of a run without an end; for ``lock`` see ``EndlessOrder``."""

    @abstractmethod
    def passes(self, sources: Sources, quotas: Mapping[str, int]) -> MixedPasses:
        """Return the orders of passes with quotas."""

    def under(self, global_batch_size: int | None) -> Granularity:  # noqa: ARG002  no batch is dealt as a whole
        """Return the same granularity for batches of this size."""
        return self

    @property
    def exact(self) -> Granularity:
        """This granularity if its shares are exact; otherwise the one that deals single samples."""
        return self

    # --- checks and settings ---

    def check_can_cut(self) -> None:  # noqa: B027  all can
        """Check that chunks may be cut into smaller units.

        Raises:
            ConfigError: Cutting them would bring nothing.
        """

    def check_shape(self, shape: Shape) -> None:  # noqa: B027  all can
        """Check that batches of this shape can be dealt.

        Raises:
            ConfigError: Batches or epochs need another size.
        """

    def check_resumed(self, global_batch_size: int) -> None:  # noqa: B027  all can
        """Check that a run dealt at this granularity can continue with batches of another size.

        Raises:
            StateError: It cannot.
        """

    def settings(self, default: OrderSettings, global_batch_size: int) -> OrderSettings:  # noqa: ARG002
        """Return the order settings for a user who did not choose the number of lanes."""
        return default

    def drawn_of(self, blend: Blend) -> Blend:
        """Return the blend that is drawn for ``blend``."""
        return blend

    def pack_passes(self, blend: Blend, passes: Int64Array, sizes: Mapping[str, int]) -> Int64Array:
        """Return the pass numbers that determine which documents share a pack.

        A group that is read partly in one pass over the mixture and partly in the next must be packed the same way in
        both; otherwise some documents would come twice and others not at all. So packs change only if passes hold whole
        sources.
        """
        return blend.pack_passes(passes, sizes)

    def epoch_words(self, num_samples: int, num_readable: int) -> str:  # noqa: ARG002  an epoch has all samples
        """Say how an epoch of ``num_samples`` differs from the samples of an epoch as asked; "" if it does not."""
        return ""

    def memory_cure(self, smaller: Callable[[], str]) -> str:  # noqa: ARG002  no source has more than others
        """Return advice that reduces the memory of a mixture, for messages; "" if there is none.

        Args:
            smaller: Returns the advice about smaller units, if chunks can be cut.
        """
        return ""

    @abstractmethod
    def even(
        self, tables: Mapping[str, npt.ArrayLike], shares: Mapping[str, float], settings: OrderSettings
    ) -> dict[str, Even]:
        """Return the sources of an endless mixture that are dealt by single samples, and how; see ``Entry.even``.

        Args:
            tables: int64 [C], samples of each chunk, by source.
            shares: Largest share of each source; {}: the mixture ends.
            settings: The order settings.
        """

    # --- sources whose chunks determine the positions of other sources' samples ---

    def in_chunks(self, entry: Entry) -> set[str]:  # noqa: ARG002  of no source
        """Return the sources of an endless mixture that an entry of its ledger deals in whole chunks."""
        return set()

    def unweighed(self, ledger: Ledger) -> set[str]:  # noqa: ARG002
        """Return the sources without a weight that may have laid chunks which the ledger does not record."""
        return set()

    def needed(self, ledger: Ledger, missing: set[str]) -> set[str]:  # noqa: ARG002
        """Return the sources among ``missing`` without which a run cannot continue."""
        return set()


@dataclass(frozen=True, slots=True)
class ByChunks(Granularity):
    """Whole chunks, or samples of sources that are repeated fast: shares are exact to about a chunk (quotas="chunks").

    Lanes laid in chunks differ by about a window, in which the run draws ``share * lanes * window`` samples of a
    source. If that is half a pass or more, some samples of the source would come twice before others came once.
    """

    dealt = "chunks"

    @override
    def lanes(self, sources: Sources, schedule: Sequence[Weights], lock: AbstractContextManager[Any]) -> Orders:
        return (EvenLanes if sources.even else MixedLanes)(sources, schedule, lock=lock)

    @override
    def passes(self, sources: Sources, quotas: Mapping[str, int]) -> MixedPasses:
        return MixedPasses(sources, quotas=quotas)

    @override
    @property
    def exact(self) -> Granularity:
        return BySamples()

    @override
    def check_can_cut(self) -> None:
        raise ConfigError(
            'fetch_bytes: quotas="chunks" already reads as much at a time as a single data set; smaller units are for '
            'quotas="exact" and batches="one_source", which keep units of every source in memory. Leave it out'
        )

    @override
    def even(
        self, tables: Mapping[str, npt.ArrayLike], shares: Mapping[str, float], settings: OrderSettings
    ) -> dict[str, Even]:
        if not settings.shuffle:
            return {}
        counts = {name: np.asarray(table) for name, table in tables.items()}
        # Chunks move by two chunks, however small the window is.
        window = max(settings.window, 2 * float(np.concatenate(list(counts.values())).mean()))
        return {
            name: "rows" if _is_small(table, settings) else "runs" for name, table in counts.items()
            if name in shares and 2 * shares[name] * settings.lanes * window >= int(table.sum())
        }  # fmt: skip

    @override
    def in_chunks(self, entry: Entry) -> set[str]:
        return entry.drawn - entry.even.keys()

    @override
    def unweighed(self, ledger: Ledger) -> set[str]:
        return self._laid(ledger) - ledger.last.drawn

    @override
    def needed(self, ledger: Ledger, missing: set[str]) -> set[str]:
        return ledger.last.blend.needed(missing, self._laid(ledger))

    def _laid(self, ledger: Ledger) -> set[str]:
        """Return the sources that ever had a weight, except those on whose chunks no other position depends."""
        return ledger.drawn - ledger.laid.keys() - ledger.even.keys()


@dataclass(frozen=True, slots=True)
class BySamples(Granularity):
    """Single samples: shares are exact at every row (quotas="exact")."""

    dealt = "samples"

    @override
    def lanes(self, sources: Sources, schedule: Sequence[Weights], lock: AbstractContextManager[Any]) -> Orders:
        return ExactLanes(sources, schedule, lock=lock)

    @override
    def passes(self, sources: Sources, quotas: Mapping[str, int]) -> MixedPasses:
        return ExactPasses(sources, quotas=quotas)

    @override
    def memory_cure(self, smaller: Callable[[], str]) -> str:
        return _cure('quotas="exact"', smaller(), 'quotas="chunks"')

    @override
    def even(
        self, tables: Mapping[str, npt.ArrayLike], shares: Mapping[str, float], settings: OrderSettings
    ) -> dict[str, Even]:
        """See ``Granularity``: the sources that lanes draw from together; all others are dealt by samples anyway."""
        if not settings.shuffle:
            return {}
        return {name: "rows" for name, table in tables.items()
                if name in shares and _is_small(np.asarray(table), settings)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ByBatches(Granularity):
    """Whole batches of one source each: shares are exact counts of batches (batches="one_source")."""

    batch_size: int | None = None  # not known before a loader has a size
    dealt = "batches"
    spelled = 'batches="one_source"'
    cure: ClassVar[str] = 'use batches="mixed"'
    """How users ask for other batches."""

    @property
    def _size(self) -> int:
        if self.batch_size is None:
            raise AssertionError("batches of one source have a size")
        return self.batch_size

    @override
    def lanes(self, sources: Sources, schedule: Sequence[Weights], lock: AbstractContextManager[Any]) -> Orders:
        return BatchLanes(sources, schedule, lock=lock, batch_size=self._size)

    @override
    def passes(self, sources: Sources, quotas: Mapping[str, int]) -> MixedPasses:
        return BatchPasses(sources, quotas=quotas, batch_size=self._size)

    @override
    def under(self, global_batch_size: int | None) -> ByBatches:
        return replace(self, batch_size=global_batch_size)

    @override
    def check_shape(self, shape: Shape) -> None:
        if not shape.sizes.is_constant:
            raise ConfigError(
                f"{self.spelled}: the source of a batch is worked out from batches of equal size; give "
                f"global_batch_size an integer, or {self.cure}"
            )
        if (shape.epoch_size or 0) % shape.global_batch_size:
            raise ConfigError(
                f"epoch_size: {self.spelled} needs a multiple of the global batch, {shape.global_batch_size}, "
                f"got {shape.epoch_size}: batches of the next epoch would straddle two batches of the mixture"
            )

    @override
    def check_resumed(self, global_batch_size: int) -> None:
        if self.batch_size != global_batch_size:
            raise StateError(
                f"this state was saved with one-source batches of {self.batch_size} samples, but this loader's global "
                f"batch has {global_batch_size}; give global_batch_size={self.batch_size}"
            )

    @override
    def settings(self, default: OrderSettings, global_batch_size: int) -> OrderSettings:
        """See ``Granularity``: each lane gives the same number of samples to every batch."""
        return replace(default, lanes=next(n for n in range(default.lanes, 0, -1) if global_batch_size % n == 0))

    @override
    def drawn_of(self, blend: Blend) -> Blend:
        return blend.in_batches(self._size)

    @override
    def pack_passes(self, blend: Blend, passes: Int64Array, sizes: Mapping[str, int]) -> Int64Array:
        """See ``Granularity``: samples that fill no batch of a pass come first in the next pass."""
        return passes * 0

    @override
    def even(
        self, tables: Mapping[str, npt.ArrayLike], shares: Mapping[str, float], settings: OrderSettings
    ) -> dict[str, Even]:
        return {}

    @override
    def epoch_words(self, num_samples: int, num_readable: int) -> str:
        if num_samples >= num_readable:
            return ""
        return (
            f"an epoch has {num_samples} of {num_readable} samples, in whole batches of each source; the rest of each "
            "source comes first in the next epoch"
        )

    @override
    def memory_cure(self, smaller: Callable[[], str]) -> str:
        return _cure('batches="one_source"', smaller(), 'batches="mixed"')


class ByKinds(ByBatches):
    """Whole batches of packs of one kind each, which are alike over all ranks: Packed(alike_across_ranks=True)."""

    __slots__ = ()
    spelled = "alike_across_ranks=True"
    cure = "leave alike_across_ranks out"

    @override
    def drawn_of(self, blend: Blend) -> Blend:
        few = {name: count for name, count in blend.readable({}).items() if count < self._size}
        if few:
            name, count = min(few.items(), key=lambda one: one[1])
            more = f" (and {counted(len(few) - 1, 'kind')} more)" if len(few) > 1 else ""
            raise ConfigError(
                f"{self.spelled}: {name} has {counted(count, 'pack')}{more}, too few for a global batch of "
                f"{self._size:,}, all of one kind: it would never come. Leave such samples out, StreamingDataset(…, "
                f"where='NOT ({name})'), or give a smaller batch, a smaller length, or coarser kinds"
            )
        return blend  # with the size of batches, which the ledger records: batches of a kind differ between epochs

    @override
    def epoch_words(self, num_samples: int, num_readable: int) -> str:
        more = num_samples - num_readable
        return (
            f"an epoch has {num_samples // self._size} global batches of one kind each: the {num_readable} packs"
            + (f", and {more} of the next pass, which fill the last one" if more else "")
            + f". Of each kind fewer than {self._size} packs wait for the next epoch, and come first there"
        )

    @override
    def memory_cure(self, smaller: Callable[[], str]) -> str:
        return _cure(self.spelled, "", "packs of other kinds in a step")


def granularity_of(quotas: str, batches: str) -> Granularity:
    """Return the granularity for these options of a ``Mixture``."""
    return {"mixed": {"chunks": ByChunks(), "exact": BySamples()}[quotas], "one_source": ByBatches()}[batches]


def granularity_in(entry: Entry) -> Granularity:
    """Return the granularity that an entry of a ledger records."""
    return {one.dealt: one for one in (ByChunks(), BySamples(), ByBatches(entry.batch_size))}[entry.dealt]


def _is_small(table: Int64Array, settings: OrderSettings) -> bool:
    """Return whether lanes draw together from a source with these chunks, row by row.

    A source with fewer samples than lanes has no run for each lane. A source of a few chunks is in the memory of every
    rank in any case; one computation then serves hundreds of sources.
    """
    return int(table.sum()) < settings.lanes or int(np.count_nonzero(table)) <= _FEW_CHUNKS


def _cure(option: str, smaller: str, other: str) -> str:
    return f". {option} keeps chunks of each source in every lane{smaller}; {other} keeps those of one data set"
