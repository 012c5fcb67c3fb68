"""Compute a late field: a user's function over the samples of a set, one value for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import streaming
from shard_tools.change.fields.tar import LateTar
from shard_tools.change.fields.target import FieldReport, FieldTarget, OnMissing
from shard_tools.change.functions.produce import Kind, Produce
from shard_tools.change.functions.run import Running
from shard_tools.change.functions.set_inputs import SetInputs
from shard_tools.change.functions.source import cause_of, error_of
from shard_tools.change.sets.open_set import READ_THREADS
from shard_tools.running.functions import imported
from shard_tools.running.parts import Runner
from shard_tools.running.progress import NoProgress, Progress
from streaming.common.identities import identity_of
from streaming.common.threads import map_threads
from streaming.errors import WorkerDiedError
from streaming.shards.index.sample_table import SampleTable
from streaming.shards.versions.publish import OvertakenError
from streaming.storage import Storage, redact


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCall:
    """Call the function on a sample; what it returns is the sample's value of the field.

    Attributes:
        function: The user's function.
        field: The field.
    """

    function: Callable[[Any], Any]
    field: str

    def __call__(self, sample: Any) -> dict[str, Any] | None:
        """Return a sample of this field alone; None: it has no value."""
        value = self.function(sample)
        return None if value is None else {self.field: value}


def compute_field(
    home: str, name: str, spec: str, *, storage: Storage, storage_options: Mapping[str, object] | None = None,
    fields: tuple[str, ...] | None = None, on_missing: OnMissing = "error", overwrite: bool = False,
    running: Running | None = None, progress: Progress | None = None,
) -> FieldReport:  # fmt: skip
    """Add the late field ``name`` to the set in ``home``, with what a function returns for each sample.

    The function gets one sample, a dict of its fields, decoded as training does by default, with ``__key__`` and
    ``__url__``; it returns a value as ``ShardWriter.write`` takes it for a field of this name, or None. It runs in
    processes, or on Ray. A run that was killed goes on behind the last tar that is whole.

    Args:
        home: Directory of the set.
        name: The field.
        spec: ``"module:function"``: a module that can be imported, also from the current folder.
        storage: The store.
        storage_options: Its options.
        fields: Fields that the function gets; None: all that the shards have. Late ones are named.
        on_missing: Samples for which it returns None are an error, or are left without the field.
        overwrite: Make all values again.
        running: Where the function runs.
        progress: Receives the samples.

    Raises:
        ConfigError: There is no such function or field, or the name is taken.
        DataError: A sample cannot be read, or has no value and that is an error.
        OvertakenError: Shards came into the set meanwhile.
        Exception: Whatever the function raised; a note names the sample.
    """
    function, progress = imported(spec, "--compute"), progress or NoProgress()
    how = {"function": identity_of(function), "fields": None if fields is None else sorted(fields)}
    target = FieldTarget(
        home, name, storage=storage, made_from=spec, how=how, on_missing=on_missing, overwrite=overwrite
    )

    def write(tars: Sequence[LateTar]) -> Iterable[SampleTable]:
        tables = list(map_threads(lambda tar: tar.base(), tars, READ_THREADS))
        given = fields or tuple(sorted({field for table in tables for field in table.fields}))
        dataset: Any = streaming.StreamingDataset(home, fields=given, shuffle=False, storage_options=storage_options)
        firsts = firsts_of({tar.shard_url: tar.rows.total_samples for tar in target.tars}, dataset, target.home)
        inputs = SetInputs(dataset)
        inputs.shared = [(storage, tars[0].shard_url)]
        work = Produce(function=FieldCall(function=function, field=name), read=inputs.read, columns={}, name=spec)
        progress.start(total_bytes=None, total=sum(tar.rows.total_samples for tar in tars))
        samples = Left.of([(firsts[tar.shard_url], table.num_samples) for tar, table in zip(tars, tables, strict=True)])
        with (running or Running()).runner(work, inputs.shared) as runner:
            values = _Values(target, runner, inputs, samples, spec, progress)
            with closing(values):
                for tar, table in zip(tars, tables, strict=True):
                    yield tar.write(values.of(table.keys), table.keys)

    return target.fill(write)


def firsts_of(sizes: Mapping[str, int], dataset: Any, place: str) -> dict[str, int]:
    """Return the number in the dataset of the first sample of each shard.

    Args:
        sizes: The number of samples of each shard, by its URL.
        dataset: The dataset.
        place: The set, for the error.

    Raises:
        OvertakenError: It is not the version of the set that the shards are of.
    """
    found: dict[str, int] = {}
    first = 0
    for url in dataset.urls:
        if url not in sizes:
            break
        found[url] = first
        first += sizes[url]
    if len(found) != len(sizes) or first != len(dataset):
        raise OvertakenError(f"{redact(place)}: somebody else changed this set meanwhile; run the same command again")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The samples of the shards whose tars are missing, numbered one after the other.

    Attributes:
        firsts: Number in the dataset of the first sample of each of these shards.
        ends: Number of samples of these shards up to each one, and with it.
    """

    firsts: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, shards: Sequence[tuple[int, int]]) -> Left:
        """Return the samples of shards, each given by its first sample and their number."""
        return cls(firsts=[first for first, _ in shards], ends=[*accumulate(num for _, num in shards)])

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def part(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Return the ranges of the dataset's numbers that these samples have."""
        found = []
        for first, begin, end in zip(self.firsts, (0, *self.ends), self.ends, strict=False):
            low, high = max(begin, start), min(end, stop)
            if low < high:
                found.append((first + low - begin, first + high - begin))
        return found


class _Values:
    """What the function returns for the samples that are left, shard by shard, by processes that run throughout."""

    def __init__(
        self, target: FieldTarget, runner: Runner, inputs: SetInputs, left: Left, name: str, progress: Progress
    ) -> None:  # fmt: skip
        self._target, self._inputs, self._left, self._name, self._progress = target, inputs, left, name, progress
        self._items, self._num_done = runner.items(left.part, 0, len(left)), 0

    def close(self) -> None:
        """End the work of the runner."""
        self._items.close()

    def of(self, keys: Sequence[str]) -> Iterator[Any]:
        """Yield the value of each sample of the next shard.

        It is bytes that are valid until the next one is asked for, or None for a sample without a value.

        Raises:
            DataError: A sample has none, and that is an error.
            Exception: Whatever the function, or reading a sample, raised.
        """
        first, self._num_done = self._num_done, self._num_done + len(keys)
        for made, buffers in islice(self._items, len(keys)):
            if made.kind is Kind.FAILED:
                _, key, _ = made.given
                if not key and not isinstance(error := cause_of(made), WorkerDiedError):
                    raise error  # of reading: it names the shard itself, and the function was not called
                ((number, _),) = self._left.part(made.number, made.number + 1)
                where = f"{self._inputs.describe(number)}, key {key!r}"
                raise error_of(made, f"{self._name} failed on {where}")
            if made.kind is Kind.EMPTY:
                self._target.refuse_missing([keys[made.number - first]], self._name)
            yield buffers[0] if made.kind is Kind.SAMPLE else None
            self._progress.advance(num=1)
