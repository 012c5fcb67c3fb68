"""Read the keys of a source's samples, shard by shard; ``shard_tools plan`` names and finds samples by them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from streaming.sets.filters.select import key_column, reading_threads
from streaming.shards.catalog.open import OpenShards
from streaming.storage import Storage


class KeysOfShards(Protocol):
    """The keys of all samples of some shards, which are numbered like the ``urls`` of a source. Thread-safe."""

    @property
    def home(self) -> object:
        """Identifies the shards: sources that read different samples of the same shards share this object."""

    @property
    def filled(self) -> list[int]:
        """The shards that hold a sample, ascending."""

    @property
    def num_threads(self) -> int:
        """Number of columns worth reading concurrently."""

    def column(
        self, shard: int, only: tuple[int, int] | None = None, turns: AbstractContextManager[Any] | None = None
    ) -> Any:
        """Return the keys of a shard's samples in their order, as an Arrow array.

        Args:
            shard: Number of the shard.
            only: Range of samples, [first, stop); None: all.
            turns: Held while keys are unpacked.

        Raises:
            IndexMissingError: The keys are unknown.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableKeys:
    """Keys from the sample tables of shards. Implements ``KeysOfShards``."""

    storage: Storage
    shards: OpenShards

    @property
    def home(self) -> object:
        """See ``KeysOfShards``."""
        return self.shards

    @property
    def filled(self) -> list[int]:
        """See ``KeysOfShards``."""
        return [shard for shard, info in enumerate(self.shards.chunks.shards) if info.num_samples]

    @property
    def num_threads(self) -> int:
        """See ``KeysOfShards``."""
        return reading_threads(self.shards)

    def column(
        self, shard: int, only: tuple[int, int] | None = None, turns: AbstractContextManager[Any] | None = None
    ) -> Any:
        """See ``KeysOfShards``."""
        return key_column(self.storage, self.shards, shard, only, turns)
