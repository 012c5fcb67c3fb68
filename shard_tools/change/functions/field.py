"""Compute a late field: a user's function over the samples of a set, one value for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import streaming
from shard_tools.change.fields.tar import LateTar
from shard_tools.change.fields.target import FieldReport, FieldTarget, OnMissing
from shard_tools.change.functions.produce import Kind, Produce
from shard_tools.change.functions.run import Running
from shard_tools.change.functions.set_inputs import SetInputs
from shard_tools.change.functions.source import error_of
from shard_tools.change.sets.open_set import READ_THREADS
from shard_tools.running.functions import identity_of, imported
from shard_tools.running.parts import Runner
from shard_tools.running.progress import NoProgress, Progress
from streaming.common.threads import map_threads
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
        firsts = _firsts(target, dataset)
        inputs = SetInputs(dataset)
        inputs.shared = [(storage, tars[0].shard_url)]
        work = Produce(function=FieldCall(function=function, field=name), read=inputs.read, columns={}, name=spec)
        progress.start(total_bytes=None, total=sum(tar.rows.total_samples for tar in tars))
        with (running or Running()).runner(work, inputs.shared) as runner:
            for tar, table in zip(tars, tables, strict=True):
                values = _Values(target, runner, inputs, spec, progress)
                yield tar.write(values.of(firsts[tar.shard_url], table.keys), table.keys)

    return target.fill(write)


def _firsts(target: FieldTarget, dataset: Any) -> dict[str, int]:
    """Return the number in the dataset of the first sample of each shard.

    Raises:
        OvertakenError: It is not the version of the set that the target has read.
    """
    sizes = {tar.shard_url: tar.rows.total_samples for tar in target.tars}
    found: dict[str, int] = {}
    first = 0
    for url in dataset.urls:
        if url not in sizes:
            break
        found[url] = first
        first += sizes[url]
    if len(found) != len(sizes) or first != len(dataset):
        raise OvertakenError(
            f"{redact(target.home)}: somebody else changed this set meanwhile; run the same command again"
        )
    return found


class _Values:
    """What the function returns for the samples of one shard."""

    def __init__(
        self, target: FieldTarget, runner: Runner, inputs: SetInputs, name: str, progress: Progress
    ) -> None:  # fmt: skip
        self._target, self._runner, self._inputs, self._name, self._progress = target, runner, inputs, name, progress

    def of(self, first: int, keys: Sequence[str]) -> Iterator[Any]:
        """Yield the bytes of the value of each sample, which are valid until the next one is asked for; None: none.

        Raises:
            DataError: A sample has none, and that is an error.
            Exception: Whatever the function raised.
        """
        items = self._runner.items(self._inputs.part, first, first + len(keys))
        try:
            for made, buffers in items:
                if made.kind is Kind.FAILED:
                    _, key, _ = made.given
                    where = f"{self._inputs.describe(made.number)}, key {key!r}"
                    raise error_of(made, f"{self._name} failed on {where}")
                if made.kind is Kind.EMPTY:
                    self._target.refuse_missing([keys[made.number - first]], self._name)
                yield buffers[0] if made.kind is Kind.SAMPLE else None
                self._progress.advance(num=1)
        finally:
            items.close()
