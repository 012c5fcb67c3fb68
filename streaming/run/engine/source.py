"""Define the interface that the loop, the engine and the plan require of a dataset: ``Source``.

Code that needs only a part names that part: ``Table`` and ``Bytes`` (``shards/fetch/chunks.py``), ``RowSamples``
(``order/packing/layout.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from streaming.build.batches.build import OnError, RowKind, SourceRecipe
from streaming.build.batches.draws import Chain
from streaming.build.decode import DecodeSpec
from streaming.build.decode.registry import FieldDecoder
from streaming.order.packing.layout import RowSamples
from streaming.order.plan.order import Orders, OrderSettings
from streaming.shards.fetch.chunks import Bytes, Table
from streaming.storage import ActiveRequest
from streaming.types import Transform


class ShardSet(Protocol):
    """Shards to read, with or without an index: the interface for accounting, reports and comparisons between ranks."""

    fields: tuple[str, ...] | None
    """Fields to read; None: all."""
    decode: DecodeSpec
    """The user's option, which ranks compare."""
    decoders: FieldDecoder
    transform: Transform | Chain | None
    on_error: OnError
    max_bad_samples: float
    """A count (int) or a share of the epoch (float)."""

    @property
    def bad_files(self) -> Mapping[str, str]:
        """Files in which bad samples are recorded, by the source's name in batches; "": the file of all sources."""

    @property
    def items(self) -> RowKind:
        """What a row of a batch is."""

    def expected_samples(self, num_rows: float) -> float:
        """Return the average number of samples in ``num_rows`` rows of batches."""

    @property
    def urls(self) -> Sequence[str]:
        """The shards, in the order of the dataset. They may contain secrets, so messages must redact them."""

    @property
    def recipe_parts(self) -> tuple[SourceRecipe, ...]:
        """How to decode and transform the samples of each source; one entry for a single set."""

    def counters(self) -> Mapping[str, float]:
        """Return the counters of storage and cache since the set was opened, summed over all its loaders."""

    def in_flight(self) -> list[ActiveRequest]:
        """Return the storage requests in progress, oldest first."""


class Source(ShardSet, Table, Bytes, Protocol):
    """A dataset with known numbers of samples, its order, and the samples of its rows. Thread-safe.

    At each offset of a chunk lies a row of a batch: one sample or, in a set whose ``items`` say so, several samples
    inside the chunk, which ``rows`` names. Such a set has no slices.
    """

    @property
    def fingerprint(self) -> str:
        """Identifies the samples of this set; stored in the state."""

    @property
    def rows(self) -> RowSamples:
        """The samples of each row."""

    def order_settings(self, global_batch_size: int) -> OrderSettings:
        """Return the order for this global batch size: the user's choices, with defaults for the rest."""

    def orders(self, settings: OrderSettings) -> Orders:
        """Return the order of each pass under these settings."""

    @property
    def opened_versions(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the versions of sets that were opened, by the name of their source; ``""`` is a single set.

        Sets that have no versions are left out.
        """

    def where_is(self, fingerprint: str, numbers: Sequence[int] = ()) -> str:
        """Say how to open what had this fingerprint, of which there is a state; "" if that is not known.

        Args:
            fingerprint: The fingerprint.
            numbers: Versions of the sets that the state names; empty: it names none.
        """

    def memory_cure(self, lanes: int, room_bytes: int, *, resumed: bool = False) -> str:
        """Return the setting that makes this set need less memory, for messages; "" if it has none.

        Args:
            lanes: Lanes of a rank.
            room_bytes: Memory for chunks.
            resumed: A state was loaded, which fixes how chunks are cut.
        """
