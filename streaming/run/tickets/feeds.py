"""Supply tickets with samples: from a loader of ours, by position, or from any iterable with states, by snapshots."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from streaming.common.arguments import checked_count
from streaming.errors import ConfigError, StateError
from streaming.run.device.prefetcher import DevicePrefetcher
from streaming.run.tickets.records import Spot, share

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """This rank's rows of one global batch.

    Attributes:
        spot: The place of the batch.
        state: The state from which the batch comes again.
        after: The state from which the next batch comes.
        size: Number of rows of the batch over all ranks.
        low: Index of the first of this rank's rows.
        samples: The rows, or one batch.
    """

    spot: Spot
    state: dict[str, Any]
    after: dict[str, Any]
    size: int
    low: int
    samples: list[Any]


class Feed(Protocol):
    """Portions of a run, epoch after epoch. For one thread.

    Attributes:
        rank: This data rank.
        num_ranks: Number of data ranks of the world.
        mesh: The mesh of the loader; None: there is none.
        is_elastic: Whether another number of ranks can continue from a state.
    """

    rank: int
    num_ranks: int
    mesh: Any
    is_elastic: bool

    def take(self) -> None:
        """Make the loader the tickets' own, if others must not iterate over it from now on."""

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one."""

    def portions(self) -> Iterator[Dealt]:
        """Yield the portions of the next epoch, or of the rest of the current one."""

    def state(self) -> dict[str, Any]:
        """Return the state from which the next portion comes."""

    def sizes(self) -> Any:
        """Return the sizes of portions over all ranks."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""

    def close(self) -> None:
        """Free the resources that the feed has opened."""


class ByPosition:
    """The samples or batches of a loader of ours. A row follows from its position, on any number of ranks.

    Args:
        loader: The loader.
        whole: Whether a portion is one batch, as the loader delivers it; otherwise it is its samples, not collated.

    Raises:
        ConfigError: The loader has options that act on whole batches, or cuts the batches that are portions.
    """

    def __init__(self, loader: Any, *, whole: bool) -> None:
        size = getattr(loader, "micro_batch_size", None)
        if whole and size is not None:
            raise ConfigError(
                f'micro_batch_size={size}: with unit="batch" a ticket of Tickets stands for the whole batch of a rank; '
                "make the loader without it, and cut the batches that the tickets deliver"
            )
        mesh = loader.device_mesh
        self.rank, self.num_ranks = mesh.data_rank, mesh.data_world_size
        self._follows = loader.is_elastic
        if not self._follows and self.num_ranks > 1:
            raise ConfigError(
                f"Tickets: expected a dataset whose order does not depend on the ranks, got one of {self.num_ranks} "
                "data ranks that deal it among themselves, so that a restart could not name the samples of another "
                "rank. Index the shards (shard_tools index URL), or use a map-style dataset, or one data rank"
            )
        self.mesh, self.is_elastic = mesh, self._follows and not whole
        self._whole = whole
        self._owner: Any = loader
        self._loader: Any = loader if whole else loader.uncollated()

    def take(self) -> None:
        """Make the loader the tickets' own; of whole batches it stays the user's."""
        if not self._whole:
            self._owner.lend(self._loader, "tickets")

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one."""
        return int(self._loader.epoch)

    def portions(self) -> Iterator[Dealt]:
        """Yield the portions of the next epoch, or of the rest of the current one."""
        size, batches = self._loader.global_batch_size, self._loader.with_state()
        for batch, after in batches:
            before = batches.came_from()
            samples = [batch] if self._whole else list(batch)
            if self._whole:
                num_rows = self.num_ranks
            elif self._follows:
                num_rows = min(size, after["samples_seen"] - before["samples_seen"])
            else:  # the only rank; a pass may end with fewer rows than its place counts
                num_rows = len(samples)
            low, high = share(num_rows, self.rank, self.num_ranks)
            if len(samples) != high - low:
                raise ConfigError(
                    f"Tickets: expected {high - low} samples of this rank in the batch at {spot_of(before)}, got "
                    f"{len(samples)}; the loader deals its rows in another way"
                )
            yield Dealt(
                spot=spot_of(before), state=before, after=after, size=num_rows, low=low, samples=samples
            )  # fmt: skip
            size = self._loader.global_batch_size

    def state(self) -> dict[str, Any]:
        """Return the state from which the next portion comes."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def sizes(self) -> Any:
        """Return the sizes of global batches, on which the ordinals of rows depend."""
        return self._loader.state_dict().get("batch_sizes") or self._loader.global_batch_size

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """Close the loader."""
        self._loader.close()


class BySnapshots:
    """The items of any iterable with states. A state is taken before each item, and kept while the item is open.

    Args:
        source: The iterable.
    """

    rank, num_ranks, mesh, is_elastic = 0, 1, None, False

    def __init__(self, source: Any) -> None:
        self._source = source
        self._epoch = self._count = 0
        self._is_iterated = False

    def take(self) -> None:
        """Do nothing: an iterable of others cannot be kept from its owner."""

    @property
    def epoch(self) -> int:
        """The pass in progress, or the next one."""
        return self._epoch

    def portions(self) -> Iterator[Dealt]:
        """Yield the items of the next pass, or of the rest of the current one."""
        items, self._is_iterated, after = iter(self._source), True, self.state()
        while self._is_iterated:
            before = after
            try:
                item = next(items)
            except StopIteration:
                self._epoch, self._count, self._is_iterated = self._epoch + 1, 0, False
                return
            self._count += 1
            after = self.state()
            yield Dealt(spot=spot_of(before), state=before, after=after, size=1, low=0, samples=[item])

    def state(self) -> dict[str, Any]:
        """Return the state from which the next item comes."""
        return {"epoch": self._epoch, "samples_seen": self._count, "source": deepcopy(self._source.state_dict())}

    def sizes(self) -> Any:
        """Return 1: items come one by one."""
        return 1

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateError: It is malformed.
        """
        try:
            self._epoch, self._count = (
                checked_count("epoch", state["epoch"], 0),
                checked_count("n", state["samples_seen"], 0),
            )
            source = state["source"]
        except (KeyError, TypeError, ConfigError) as error:
            raise StateError(f"state: tickets by snapshots: {error!r} in {state!r}") from error
        self._is_iterated = False
        self._source.load_state_dict(source)

    def close(self) -> None:
        """Close the iterable, if it can be."""
        self._is_iterated = False
        if callable(close := getattr(self._source, "close", None)):
            close()


def spot_of(state: Mapping[str, Any]) -> Spot:
    """Return the place of a state."""
    return state["epoch"], state["samples_seen"]


def _prefetcher_in(loader: Any) -> DevicePrefetcher[Any] | None:
    """Return the prefetcher that an object is or wraps; None: it is none."""
    while loader is not None and not isinstance(loader, DevicePrefetcher):
        loader = getattr(loader, "_loader", None)
    return loader


def feed_of(loader: Any, *, whole: bool) -> Feed:
    """Return the feed of tickets from ``loader``.

    Raises:
        ConfigError: It is neither a loader of ours nor an iterable with states.
    """
    if callable(getattr(loader, "uncollated", None)):
        return ByPosition(loader, whole=whole)
    if (prefetcher := _prefetcher_in(loader)) is not None and callable(getattr(prefetcher.loader, "uncollated", None)):
        raise ConfigError(
            f"Tickets: expected the loader itself, got a {type(loader).__name__}, which delivers whole batches. Give "
            "the loader that the DevicePrefetcher was made of, Tickets(prefetcher.loader), and move the batches that "
            "you make of its samples to the device"
        )
    lacks = [
        name for name in ("__iter__", "state_dict", "load_state_dict") if not callable(getattr(loader, name, None))
    ]
    if lacks:
        raise ConfigError(
            f"Tickets: expected a DataLoader, a DeviceMeshFetcher or an iterable with state_dict() and "
            f"load_state_dict(); got a {type(loader).__name__} without {', '.join(lacks)}"
        )
    if whole:
        raise ConfigError('Tickets: unit="batch" is for a DataLoader; each item of another iterable is one ticket')
    _log.info(
        "tickets by snapshots: %s is no loader of shardstream, so its state is taken before each item, and kept while "
        "the item is open; it continues on this rank only",
        type(loader).__name__,
    )
    return BySnapshots(loader)
