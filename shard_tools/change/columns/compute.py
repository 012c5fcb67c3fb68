"""Compute a late column: a user's function of each sample, its number of tokens, or the size of a field."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from shard_tools.change.columns.lift import as_array, samples_of
from shard_tools.change.columns.target import AddReport, ColumnShard, ColumnTarget
from shard_tools.make.write.columns import ColumnValue, column_value
from shard_tools.running.engine import DEFAULT_WORKERS, Calls
from shard_tools.running.functions import blame, imported, traceback_of
from shard_tools.running.progress import NoProgress, Progress
from streaming.build.decode import decode_field, resolve_decoders
from streaming.common.identities import source_digest
from streaming.errors import ConfigError, DataError, DecodeError, ShardstreamError
from streaming.shards.index.layout import SCHEMA_FILE
from streaming.storage import redact

TOKENS = "tokens"
"""Value of ``--compute`` that is not a function: count the tokens of a field, by its size, without reading shards."""

SIZES = "bytes"
"""Value of ``--compute`` that is not a function: the size of a field as it is stored, without reading shards."""

_WIDTHS = {"uint16": 2, "uint32": 4}

Function = Callable[[Mapping[str, object]], ColumnValue]
Values = Callable[[ColumnShard], Sequence[ColumnValue]]
_DECODERS = resolve_decoders("auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """Options for computing values.

    Attributes:
        fields: Fields that the function gets; None: all. Other large fields are not read. For tokens and bytes: the
            only field.
        dtype: For tokens: ``"uint16"`` or ``"uint32"``; None: as recorded in ``_shardstream/schema.json``.
        workers: Number of shards processed in parallel.
    """

    fields: tuple[str, ...] | None = None
    dtype: str | None = None
    workers: int = DEFAULT_WORKERS["local"]


def compute_column(
    target: ColumnTarget, spec: str | Function, *, options: ComputeOptions, made_from: str | None = None,
    executor: Executor | None = None, progress: Progress | None = None,
) -> AddReport:  # fmt: skip
    """Add the late column ``target``, computed by ``spec`` from each sample.

    A function gets one sample: a dict of its fields, decoded as training does by default, with ``__key__`` and
    ``__url__``. It returns an int, float, str, bool or None, and is called on several threads. After an interruption,
    finished shards are not computed again.

    Args:
        target: The column.
        spec: ``"tokens"``, ``"bytes"``; or ``"module:function"``: a module that can be imported, also from the current
            folder; or a function.
        options: The options.
        made_from: Identity of a function that is passed as an object.
        executor: Executor on which to compute, such as a cluster, instead of on threads.
        progress: Receives every shard.

    Raises:
        ConfigError: There is no such function, values have types that cannot be compared, or the executor is on a
        machine that cannot access these files.
        DataError: A field cannot be read, or is not an array of tokens.
        Exception: Whatever the function raises; a note names the sample.
    """
    begun = time.monotonic()
    name = spec if isinstance(spec, str) else str(made_from)
    if isinstance(spec, str) and spec in _COUNTED:
        values, made_of = _COUNTED[spec](target, options)
    elif isinstance(spec, str):
        function = _imported(spec)
        values, made_of = partial(_applied, function, name, options.fields), {"source": source_digest(function)}
    else:
        values, made_of = partial(_applied, spec, name, options.fields), {}
    version = target.version_of(compute=name, fields=options.fields, **made_of)
    if (done := target.finished(version)) is not None:
        if not isinstance(spec, str):  # it may carry values that are compared with nothing
            raise target.taken()
        return done
    if target.grows and not isinstance(spec, str):
        raise target.taken()
    calls = Calls(workers=options.workers, executor=executor, progress=progress or NoProgress())
    filled = target.fill(version, partial(_array, values), calls=calls, again=False)
    return target.finish(filled, version=version, made_from=name, begun_s=begun)


def _array(values: Values, shard: ColumnShard) -> pa.Array:
    return as_array(values(shard), shard)


def _tokens(target: ColumnTarget, options: ComputeOptions) -> tuple[Values, dict[str, Any]]:
    """Return a function that counts the tokens of a shard's samples, and the identity of this computation.

    Each set has its own width.
    """
    said = {} if options.fields and options.dtype else target.schemas
    names = {name for schema in said.values() for name in schema.tokens}
    field = _only_field(TOKENS, options.fields or (tuple(names) if len(names) == 1 else ("tok",)))
    by_home = {home: schema.tokens[field].dtype for home, schema in said.items() if field in schema.tokens}
    dtypes = {home: options.dtype or by_home.get(home) for home in target.homes}
    for home, dtype in dtypes.items():
        if dtype not in _WIDTHS:
            raise ConfigError(
                f"--compute tokens: field {field!r} of {redact(home)}: expected its --dtype ({' or '.join(_WIDTHS)}), "
                f"got {dtype!r}; beside token sets that convert wrote, {SCHEMA_FILE} says it"
            )
    widths = {home: _WIDTHS[str(dtype)] for home, dtype in dtypes.items()}
    distinct = sorted({str(dtype) for dtype in dtypes.values()})
    return partial(_counts, field, widths), {"dtype": distinct[0] if len(distinct) == 1 else distinct, "field": field}


def _counts(field: str, widths: Mapping[str, int], shard: ColumnShard) -> Sequence[ColumnValue]:
    """Return the number of tokens of each sample of a shard, by the token width of its set."""
    table, width = shard.table(), widths[shard.home]
    if field not in table.fields:
        return [None] * table.num_samples
    starts, sizes = table.fields[field]
    odd = np.flatnonzero((starts >= 0) & (sizes % width != 0))
    if odd.size:
        raise DataError(
            f"{redact(shard.url)}: sample {table.keys[int(odd[0])]!r}, field {field!r}: {sizes[odd[0]]} "
            f"bytes are not a whole number of tokens of {width} bytes"
        )
    return [size // width if start >= 0 else None for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]


def _stored(target: ColumnTarget, options: ComputeOptions) -> tuple[Values, dict[str, Any]]:  # noqa: ARG001  as _tokens
    """Return a function that gives the size of a field in a shard's samples, and the identity of this computation."""
    field = _only_field(SIZES, options.fields or ())
    return partial(_sizes, field), {"field": field}


def _only_field(what: str, fields: Sequence[str]) -> str:
    if len(fields) != 1:
        raise ConfigError(f"--compute {what}: expected one field in --fields, got {', '.join(fields) or 'none'}")
    return fields[0]


def _sizes(field: str, shard: ColumnShard) -> Sequence[ColumnValue]:
    """Return the bytes of a field in each sample of a shard."""
    table = shard.table()
    if field not in table.fields:
        return [None] * table.num_samples
    starts, sizes = table.fields[field]
    return [size if start >= 0 else None for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]


_COUNTED: Mapping[str, Callable[[ColumnTarget, ComputeOptions], tuple[Values, dict[str, Any]]]] = {
    TOKENS: _tokens, SIZES: _stored,
}  # fmt: skip
"""Values of ``--compute`` that are no functions: the sample table knows them."""


def _imported(spec: str) -> Function:
    if ":" not in spec:
        known = ", ".join(_COUNTED)
        raise ConfigError(f"--compute: expected {known}, or a function as module:function, got {spec!r}")
    return imported(spec, "--compute")


def _applied(
    function: Function, name: str, fields: tuple[str, ...] | None, shard: ColumnShard
) -> Sequence[ColumnValue]:  # fmt: skip
    """Return the user's function of each sample of a shard."""
    url = redact(shard.url)

    def value(key: str, encoded: Mapping[str, bytes]) -> ColumnValue:
        try:
            decoded = {
                field: decode_field(_DECODERS.decoder_for(field), data, url=url, key=key, field=field)
                for field, data in encoded.items()
            }
        except DecodeError as error:
            error.add_note("--fields says which fields are decoded for the function")
            raise
        try:
            return column_value({"__key__": key, "__url__": url, **decoded}, shard.column, function, key)
        except ShardstreamError:
            raise
        except Exception as error:
            error.add_note(f"In the function:\n{traceback_of(error)}")
            blame(error, f"{name} failed on the sample {key!r} of {url}")
            raise

    return [value(key, encoded) for key, encoded in samples_of(shard, shard.table(), fields)]
