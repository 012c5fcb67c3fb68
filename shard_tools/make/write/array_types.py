"""Read the number types of the ``.npy`` fields in a directory, for its schema."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from streaming.build.decode.arrays import MAX_NPY_HEADER_BYTES, npy_dtype
from streaming.errors import IndexFormatError, NotFoundError
from streaming.shards.catalog.build import samples_url
from streaming.shards.index.files import is_sealed
from streaming.shards.index.sample_table import Records
from streaming.shards.schema.value import Schema
from streaming.storage import Storage


def is_npy(field: str) -> bool:
    """Return whether a field's name declares a ``.npy`` file."""
    return field.lower().rpartition(".")[2] == "npy"


def without_array_types(schema: Schema) -> Schema:
    """Return a schema without the types of ``.npy`` fields, which are read from existing shards."""
    said = {name: replace(one, dtype="") if is_npy(name) else one for name, one in schema.fields.items()}
    return replace(schema, fields=said)


def array_types(
    storage: Storage, urls: Sequence[str], index_url: str | None, fields: Collection[str]
) -> dict[str, str]:  # fmt: skip
    """Return the type of each ``.npy`` field for which the first and the last of these shards agree.

    Each type is read from the header of the field's first value in the shard. Only stored data counts, so the result
    does not depend on how, or by how many processes, the shards were written.
    """
    found: dict[str, set[str]] = {}
    for url in dict.fromkeys((*urls[:1], *urls[-1:])) if fields else ():
        try:
            types = dict(_types_in(storage, url, index_url, sorted(fields)))
        except (IndexFormatError, NotFoundError):  # damaged, or being replaced: `shard_tools index` handles it
            return {}
        for field, dtype in types.items():
            found.setdefault(field, set()).add(dtype)
    return {field: next(iter(types)) for field, types in found.items() if len(types) == 1 and "" not in types}


def _types_in(
    storage: Storage, url: str, index_url: str | None, fields: Sequence[str]
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield the fields of a shard with their types; "" for a header without a type."""
    table = storage.read_parsed(
        samples_url(url, index_url), lambda data, source: Records.from_parquet(data, fields, source), is_sealed
    )
    for field, (starts, sizes) in table.fields.items():
        there = np.flatnonzero(starts >= 0)
        if there.size:
            start, size = int(starts[there[0]]), int(sizes[there[0]])
            head = storage.read(url, start, start + min(size, MAX_NPY_HEADER_BYTES)) if size else b""
            try:
                dtype = npy_dtype(head)
            except ValueError:  # reported when the value is decoded
                yield field, ""
            else:
                yield field, "" if dtype.names else dtype.name
