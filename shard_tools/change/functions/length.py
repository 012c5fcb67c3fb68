"""Measure the length of each sample after a transform, once, for batches by true length: a late column."""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

import streaming
from shard_tools.change.columns.lift import as_array
from shard_tools.change.columns.target import AddReport, ColumnShard, ColumnTarget
from shard_tools.change.functions.field import FieldCall, Left, firsts_of
from shard_tools.change.functions.produce import Kind, Produce
from shard_tools.change.functions.run import Running
from shard_tools.change.functions.set_inputs import SetInputs
from shard_tools.change.functions.source import cause_of, error_of
from shard_tools.running.functions import imported
from shard_tools.running.parts import Runner
from shard_tools.running.progress import NoProgress, Progress
from streaming.build.batches.draws import BatchDraws, Chain, as_chain, epoch_key
from streaming.common.identities import identity_of
from streaming.errors import ConfigError, DataError, WorkerDiedError

_TWICE_IN = 64
"""One sample of this number is measured twice, and the first ones of each process, to find lengths that are random."""
LENGTH = "length"
"""Value of ``--compute`` that is not a function: measure each sample."""
_FIELD = "cls"  # a field whose content is the digits of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    """Options of a measurement.

    Attributes:
        after: The transform, ``"module:function"``; None: samples are measured as they are decoded.
        field: The field of its result to measure; None: the only one that is an array or a list.
        fields: Fields that the transform gets; None: all that the shards have.
    """

    after: str | None = None
    field: str | None = None
    fields: tuple[str, ...] | None = None


@dataclass(slots=True)
class Length:
    """Measure a sample: the first dimension of a field, after a transform.

    Attributes:
        chain: The transform; None: there is none.
        field: The field; None: the only one that is an array or a list.
        num_first: Number of samples that are measured twice in any case.
    """

    chain: Chain | None
    field: str | None
    num_first: int = 8

    def __call__(self, sample: Mapping[str, Any]) -> int | None:
        """Return the length; None if the transform drops the sample.

        Raises:
            ConfigError: There is no such field, it has no length, or there are several to choose from.
            DataError: The length is random.
        """
        is_twice = self.chain is not None and (
            self.num_first > 0 or not zlib.crc32(str(sample.get("__key__")).encode()) % _TWICE_IN
        )
        self.num_first -= 1
        again = copy.deepcopy(sample) if is_twice else None
        found = self._measured(sample, epoch=0)
        if again is not None and (other := self._measured(again, epoch=1)) != found:
            raise DataError(
                f"its length is random: {found} and {other} in two epochs. A column holds one length; let the "
                "transform decide it by the sample alone, or return the longest one here"
            )
        return found

    def _measured(self, sample: Mapping[str, Any], epoch: int) -> int | None:
        given: Any = sample
        result = given if self.chain is None else self.chain(given, BatchDraws(epoch_key(0, epoch)))
        return None if result is None else length_of(result, self.field)


def length_of(result: object, field: str | None) -> int:
    """Return the first dimension of what a transform returns, or of a field of it.

    Raises:
        ConfigError: There is no such field, it has no length, or there are several to choose from.
    """
    if not isinstance(result, Mapping):
        if field is not None:
            raise ConfigError(f"--field {field}: the transform returns a {type(result).__name__}, which has no fields")
        return _first_dimension(result, "what the transform returns")
    names = [name for name in result if not str(name).startswith("__")]
    if field is None:
        sized = [name for name in names if _is_sequence(result[name])]
        if len(sized) != 1:
            what = f"several fields have a length ({', '.join(sized)})" if sized else "no field is an array or a list"
            raise ConfigError(f"{what}; name the one to measure with --field, of: {', '.join(names) or 'none'}")
        (field,) = sized
    if field not in result:
        raise ConfigError(f"--field {field}: the sample has no such field; it has: {', '.join(names) or 'none'}")
    return _first_dimension(result[field], f"field {field!r}")


def _is_sequence(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(value, (list, tuple)) if shape is None else len(shape) > 0


def _first_dimension(value: Any, what: str) -> int:
    shape = getattr(value, "shape", None)
    try:
        return int(shape[0]) if shape is not None else len(value)
    except (TypeError, IndexError) as error:
        raise ConfigError(
            f"{what} is a {type(value).__name__} without a length; name another one with --field"
        ) from error


def measure_column(
    target: ColumnTarget, urls: Sequence[str], *, options: LengthOptions, running: Running | None = None,
    progress: Progress | None = None,
) -> AddReport:  # fmt: skip
    """Add the late column ``target`` with the length of each sample after a transform.

    The transform is that of training, ``StreamingDataset(transform=…)``: it gets a sample, decoded as training does by
    default, and ``rng`` if it takes it. It runs in processes, or on Ray. The column records the function's identity,
    which ``Packed`` compares with that of the transform that it meets. Samples that the transform drops have no length.
    A run that was stopped goes on behind the last shard that is whole.

    Args:
        target: The column.
        urls: The shards, as the user named them.
        options: What is measured.
        running: Where the transform runs.
        progress: Receives the shards.

    Raises:
        ConfigError: There is no such function or field, or what it returns has no length.
        DataError: A sample cannot be read, or its length is random.
        Exception: Whatever the transform raised; a note names the sample.
    """
    begun, progress = time.monotonic(), progress or NoProgress()
    function = None if options.after is None else imported(options.after, "--after")
    after = "" if function is None else identity_of(function)
    made_of = {"after": after, "field": options.field, "fields": options.fields and sorted(options.fields)}
    version = target.version_of(compute=LENGTH, **made_of)
    if (done := target.finished(version)) is not None:
        return done
    name = options.after or "the length"
    work = FieldCall(function=Length(as_chain(function), options.field), field=_FIELD)

    def values(shards: Sequence[ColumnShard]) -> Generator[pa.Array, None, None]:
        if not shards:
            return
        inputs = SetInputs(_opened(target, urls, options))
        inputs.shared = [(target.storage, shards[0].url)]
        firsts = firsts_of({one.url: one.rows.total_samples for one in map(target.shard, range(len(target.urls)))},
                           inputs.dataset, target.urls[0])  # fmt: skip
        left = Left.of([(firsts[one.url], one.rows.total_samples) for one in shards])
        produce = Produce(function=work, read=inputs.read, columns={}, name=name)
        with (running or Running()).runner(produce, inputs.shared) as runner:
            lengths = _lengths(runner, inputs, left, name)
            with closing(lengths):
                for shard in shards:
                    yield as_array([*islice(lengths, shard.rows.total_samples)], shard)

    filled = target.fill_in_order(version, values, progress=progress)
    made_from = (
        f"length{f' of {options.field}' if options.field else ''}{f' after {options.after}' if options.after else ''}"
    )
    return target.finish(filled, version=version, made_from=made_from, after=after, begun_s=begun)


def _opened(target: ColumnTarget, urls: Sequence[str], options: LengthOptions) -> Any:
    """Open the set that is measured, in storage order, without late fields unless they are named."""
    given: Any = options.fields or tuple(
        sorted({name for number in range(len(target.urls)) for name in target.shard(number).table().fields})
    )
    return streaming.StreamingDataset(
        [*urls], index=target.index_url, fields=given, shuffle=False, storage_options=target.storage.__reduce__()[1][0]
    )


def _lengths(runner: Runner, inputs: SetInputs, left: Left, name: str) -> Generator[int | None, None, None]:
    """Yield the length of each sample that is left.

    Raises:
        Exception: Whatever the transform, or reading a sample, raised.
    """
    with closing(runner.items(left.part, 0, len(left))) as items:
        for made, buffers in items:
            if made.kind is Kind.FAILED:
                _, key, _ = made.given
                if not key and not isinstance(error := cause_of(made), WorkerDiedError):
                    raise error  # of reading: it names the shard itself
                ((number, _),) = left.part(made.number, made.number + 1)
                raise error_of(made, f"{name} failed on {inputs.describe(number)}, key {key!r}")
            yield int(bytes(buffers[0])) if made.kind is Kind.SAMPLE else None
