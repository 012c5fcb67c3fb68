"""Write and read the tar of a late field that goes with one shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shard_tools.change.columns.lift import samples_in
from shard_tools.change.sets.open_set import needed_samples
from shard_tools.make.write.encode import Buffers
from shard_tools.make.write.recorder import ShardRecorder
from shard_tools.make.write.writer import make_record
from streaming.errors import ConfigError, DataError, IndexFormatError, NotFoundError
from streaming.shards.index.chunk_table import ChunkTable
from streaming.shards.index.files import is_sealed
from streaming.shards.index.layout import field_samples_path, field_tar_path
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.late.table import ABSENT, OfShard, tar_name
from streaming.shards.tar.headers import END_OF_ARCHIVE
from streaming.storage import Storage, join_url, redact

_JOIN_BYTES = 256 << 10  # of a record that is written at once


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTar:
    """The tar of a late field that goes with one shard: all that a call must know to write it, wherever it runs.

    Attributes:
        field: The field.
        work: Identifies how its values are made.
        home: Directory of the index.
        rows: The shard's rows of the chunk table.
        storage: The store.
    """

    field: str
    work: str
    home: str
    rows: ChunkTable
    storage: Storage

    @property
    def shard(self) -> str:
        """Name of the shard."""
        return self.rows.shards[0].name

    @property
    def shard_url(self) -> str:
        """The shard."""
        return join_url(self.home, self.shard)

    @property
    def name(self) -> str:
        """Name of the tar."""
        return tar_name(self.shard, self.rows.fingerprint)

    @property
    def url(self) -> str:
        """The tar."""
        return join_url(self.home, field_tar_path(self.field, self.work, self.name))

    @property
    def samples_url(self) -> str:
        """Its sample table, which is written last."""
        return join_url(self.home, field_samples_path(self.field, self.work, self.name))

    def base(self) -> SampleTable:
        """Return the sample table of the shard.

        Raises:
            IndexMissingError: There is none.
            ConfigError: Its samples have a field of this name.
        """
        table = needed_samples(self.storage, self.shard_url, None)
        if self.field in table.fields:
            raise ConfigError(
                f"field {self.field!r}: the samples of {redact(self.shard_url)} have a field of this name; choose "
                "another one for the late field"
            )
        return table

    def written(self) -> SampleTable | None:
        """Return the sample table of the tar, if an earlier run has written both; None: it has not."""
        try:
            found = self.samples()
        except (NotFoundError, IndexFormatError):
            return None
        alike = np.array_equal(found.chunks.first_sample, self.rows.first_sample)
        return found if alike and found.num_samples == self.rows.total_samples else None

    def samples(self) -> SampleTable:
        """Return the sample table of the tar.

        Raises:
            NotFoundError, IndexFormatError: It is gone, or damaged.
        """
        return self.storage.read_parsed(self.samples_url, SampleTable.from_parquet, is_sealed)

    def of_shard(self, table: SampleTable) -> OfShard:
        """Return what the table of the late field says of the shard, given the sample table of the tar."""
        return OfShard(self.shard, self.rows.fingerprint, len(missing_in(table)))

    def write(self, values: Iterable[object | None], keys: Iterable[str]) -> SampleTable:
        """Write the tar of these values, one for each key of the shard (None: the sample has none), and its table."""
        recorder = ShardRecorder(self.name, (), ends=(self.rows.first_sample + self.rows.num_samples).tolist())
        num_bytes = 0
        with self.storage.open_write(self.url) as out:
            for key, value in zip(keys, values, strict=True):
                record = make_record({ABSENT: b""} if value is None else {self.field: value}, key)
                pieces: Buffers = [b"".join(record.pieces)] if record.num_bytes <= _JOIN_BYTES else record.pieces
                recorder.add(record, pieces, ())
                for piece in pieces:
                    out.write(piece)
                num_bytes += record.num_bytes
            out.write(END_OF_ARCHIVE)
        table = recorder.table(num_bytes + len(END_OF_ARCHIVE))
        self.storage.put(self.samples_url, table.to_parquet())
        return table

    def values(self) -> Iterator[bytes | None]:
        """Yield the value of each sample; every byte is checked.

        Raises:
            DataError: One is damaged.
            NotFoundError, IndexFormatError: The sample table is gone, or damaged.
        """
        for key, fields in samples_in(self.storage, self.url, self.samples(), None):
            if self.field not in fields and ABSENT not in fields:
                raise DataError(f"{redact(self.url)}: sample {key!r} has neither {self.field!r} nor {ABSENT!r}")
            yield fields.get(self.field)


def missing_in(table: SampleTable) -> list[str]:
    """Return the keys of the samples without a value."""
    if ABSENT not in table.fields:
        return []
    return [table.keys[row] for row in np.flatnonzero(table.fields[ABSENT][0] >= 0).tolist()]
