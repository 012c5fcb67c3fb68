"""Join a late field by key from the samples of another set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import streaming
from shard_tools.change.fields.tar import LateTar
from shard_tools.change.fields.target import FieldReport, FieldTarget, OnMissing
from shard_tools.running.progress import NoProgress, Progress
from streaming.common.arguments import counted, some_names
from streaming.common.arrays import sums
from streaming.common.threads import map_threads
from streaming.errors import ConfigError, DataError
from streaming.shards.catalog.open import sample_table
from streaming.shards.index.columns import KEY, places_in, sample_columns
from streaming.shards.index.sample_table import SampleTable
from streaming.storage import Storage, redact
from streaming.types import Int64Array

_READ_AT_ONCE = 64
_READERS = 16
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FromSet:
    """Where the values of a late field are.

    Attributes:
        url: The other set.
        field: Its field.
        on: Its column with the keys of this set's samples; ``"__key__"``: its own keys.
    """

    url: str
    field: str
    on: str = KEY


def join_field(
    home: str, name: str, source: FromSet, *, storage: Storage, storage_options: Mapping[str, object] | None = None,
    on_missing: OnMissing = "error", overwrite: bool = False, workers: int = 8, progress: Progress | None = None,
) -> FieldReport:  # fmt: skip
    """Add the late field ``name`` to the set in ``home``, with the values that samples of another set have.

    Memory: the keys of both sets, and per worker the values of 64 samples.

    Raises:
        ConfigError: The name is taken, or the other set has no such field or column.
        DataError: Keys occur twice in the other set, or samples have no value and that is an error.
        OvertakenError: Shards came into the set meanwhile.
    """
    progress = progress or NoProgress()
    other: Any = streaming.StreamingDataset(
        source.url, fields=(source.field,), decode=None, shuffle=False, storage_options=storage_options
    )
    how = {"from": other.fingerprint, "field": source.field, "on": source.on}
    target = FieldTarget(
        home, name, storage=storage, made_from=source.url, how=how, on_missing=on_missing, overwrite=overwrite
    )
    progress.start(total_bytes=None, total=len(target.tars))

    def write(tars: Sequence[LateTar]) -> Iterable[SampleTable]:
        keys = list(map_threads(lambda tar: _keys(tar.base(), KEY), tars, _READERS))
        places = _places(other, source, keys)
        missing = [key for key, place in zip(_joined(keys).to_pylist(), places.tolist(), strict=True) if place < 0]
        target.refuse_missing([_text(key) for key in missing], redact(source.url))
        firsts = sums([len(one) for one in keys])
        parts = [places[first : first + len(one)] for first, one in zip(firsts.tolist(), keys, strict=False)]
        one_tar = partial(_written, other, source, target, progress)
        return map_threads(lambda one: one_tar(*one), list(zip(tars, parts, strict=True)), workers)

    return target.fill(write)


def _written(
    other: Any, source: FromSet, target: FieldTarget, progress: Progress, tar: LateTar, places: Int64Array
) -> SampleTable:  # fmt: skip
    keys = tar.base().keys
    table = tar.write(_values(other, source, target, keys, places), keys)
    progress.advance(num=1)
    return table


def _values(
    other: Any, source: FromSet, target: FieldTarget, keys: Sequence[str], places: Int64Array
) -> Iterator[bytes | None]:  # fmt: skip
    """Yield the value of each sample of a shard, given the number of the sample in the other set; -1: none."""
    for first in range(0, len(places), _READ_AT_ONCE):
        some = places[first : first + _READ_AT_ONCE]
        there = some[some >= 0]
        read = iter(other[there.tolist()] if there.size else ())
        for row, place in enumerate(some.tolist(), first):
            value = next(read).get(source.field) if place >= 0 else None
            if value is None:
                target.refuse_missing([keys[row]], redact(source.url))
            yield value


def _places(other: Any, source: FromSet, keys: Sequence[pa.Array]) -> Int64Array:
    """Return the number in the other set of the sample with each key; -1: there is none.

    Raises:
        ConfigError: It has no such column.
        DataError: Keys that are wanted occur twice there.
    """
    shards = other.source.shards

    def column(shard: int) -> pa.Array:
        table = sample_table(other.source.storage, shards, shard)
        if table is None or (source.on != KEY and source.on not in table.columns):
            raise ConfigError(
                f"--on {source.on}: {redact(shards.urls[shard])} has no column of this name"
                if table is not None
                else f"{redact(shards.urls[shard])} has no sample table; run `shard_tools index` first"
            )
        return _keys(table, source.on)

    theirs = _joined(list(map_threads(column, range(len(shards.urls)), _READERS)))
    mine = _joined(keys)
    counts = pc.value_counts(theirs)
    twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    twice = twice.filter(pc.is_in(twice, value_set=mine))
    if len(twice):
        shown = some_names([repr(_text(key)) for key in twice.slice(0, _SHOWN).to_pylist()])
        raise DataError(
            f"{redact(source.url)}: {counted(len(twice), 'key')} of this set occur twice or more there, {shown}, so it "
            "is not known which value counts. Leave the others out first: shard_tools dedupe SET --by key"
        )
    return places_in(mine, theirs)


def _keys(table: SampleTable, on: str) -> pa.Array:
    """Return the keys in a sample table, as bytes."""
    column = sample_columns(table, [on])[on]
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (
        pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_binary(column.type)
    ):
        raise ConfigError(f"--on {on}: keys are text, this column holds {column.type}")
    return column.cast(pa.large_binary())


def _joined(parts: Sequence[pa.Array]) -> pa.Array:
    return pa.concat_arrays(parts) if parts else pa.array([], pa.large_binary())


def _text(key: bytes | None) -> str:
    return "NULL" if key is None else key.decode("utf-8", "surrogateescape")
