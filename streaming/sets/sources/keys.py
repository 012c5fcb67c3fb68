"""Read the keys of a source's samples, by shard: what ``shard_tools plan`` names samples by, and finds them with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from streaming.sets.filters.select import key_column, reading_threads
from streaming.shards.catalog.open import OpenShards
from streaming.storage import Storage


class KeysOfShards(Protocol):
    """The keys of all samples of some shards, numbered as the ``urls`` of a source are. Thread-safe."""

    @property
    def home(self) -> object:
        """Identifies the shards: the same object for sources that read other samples of the same ones."""

    @property
    def filled(self) -> list[int]:
        """The shards that hold a sample, ascending."""

    @property
    def num_threads(self) -> int:
        """How many columns are worth reading at a time."""

    def column(
        self, shard: int, only: tuple[int, int] | None = None, turns: AbstractContextManager[Any] | None = None
    ) -> Any:
        """Return the keys of a shard's samples in their order, as an Arrow array.

        Args:
            shard: Number of the shard.
            only: If given, only those of the samples from one number to before another.
            turns: Held while keys are unpacked.

        Raises:
            IndexMissingError: They are not known.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableKeys:
    """Keys as the sample tables of shards have them. ``KeysOfShards``."""

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
