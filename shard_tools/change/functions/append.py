"""Add to a set what a function makes of new inputs: ``optimize(…, append=True)``."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

from shard_tools.change.functions.inputs import Inputs, ListInputs
from shard_tools.change.functions.source import FunctionSource
from shard_tools.make.convert.append import Appending
from shard_tools.make.convert.base.identity import EVERYWHERE
from shard_tools.make.convert.base.records import Record, ShardOptions, number_key
from shard_tools.make.convert.journal import Journal, load_journal
from shard_tools.make.convert.pack import Destination
from shard_tools.make.write.change import open_head
from shard_tools.running.progress import NoProgress
from streaming.errors import ConfigError
from streaming.shards.schema.value import Schema
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, redact


class NewInputs:
    """The inputs of a function that a set was not made of, and how they are added to it.

    Args:
        inputs: All inputs. Those that name files are new if one of these is; all others are.
        place: The set.
        identity: What, besides the inputs, determines the bytes of the set.
        storage_options: Options of its store.

    Attributes:
        inputs: The new ones.
        head: The set.

    Raises:
        ConfigError: The set was made by another function or with other columns, or one of its inputs changed.
        IndexMissingError, UnfinishedError: There is no whole set with an index.
    """

    def __init__(
        self, inputs: Inputs, place: Destination, identity: Mapping[str, object],
        storage_options: Mapping[str, object] | None,
    ) -> None:  # fmt: skip
        self.begun_s = time.monotonic()
        self._storage, self._storage_options = Storage(storage_options), storage_options
        self.head = open_head(self._storage, place.directory)
        journal = _checked(load_journal(self.head.home, self._storage), identity, self.head)
        sizes = {name: journal.options[name] for name in ("max_bytes", "max_samples")}
        first = int(journal.source.get("num_inputs", 0))
        self._work = Appending.of(self._storage, self.head, ShardOptions(**sizes), journal, first)
        self.inputs = self._new(inputs)

    def _new(self, inputs: Inputs) -> Inputs:
        numbered = [one for one in inputs.origins().inputs if one.number != EVERYWHERE]
        new = {one.number for one in numbered if not self._work.known.has(one)}
        self._work.refuse_changed()
        known = {one.number for one in numbered} - new
        return inputs.without(known) if known and isinstance(inputs, ListInputs) else inputs

    def add(self, source: FunctionSource, *, command: str, schema: Schema) -> tuple[int, int, int]:
        """Write what the function makes of them, and publish it; return the samples, shards and bytes of the set.

        Raises:
            OvertakenError: Somebody else changed the set meanwhile; nothing was added.
            Exception: Whatever the function raised.
        """
        table = self.head.table
        num_samples, num_shards = table.total_samples, len(table.shards)
        num_bytes = sum(shard.size_bytes for shard in table.shards)
        if not len(self.inputs):
            return num_samples, num_shards, num_bytes
        counted: Any = _Following(source, self._work.numbers_from)
        added = self._work.add(
            counted, counted, command, columns=source.columns, meaning=schema, storage=self._storage,
            storage_options=self._storage_options, progress=NoProgress(),
        )  # fmt: skip
        report = self._work.report(None, added, self.begun_s, source.kind)
        return report.num_samples, num_shards + report.num_shards, num_bytes + report.num_bytes


class _Following:
    """What a function makes, whose keys that are numbers of inputs follow those of a set.

    Args:
        below: What it makes.
        first: Number of its first input.

    Attributes:
        next: Number of the input after the last one.
    """

    def __init__(self, below: FunctionSource, first: int) -> None:
        self._below, self._first = below, first
        self.next = first + len(below.inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def records(self, start: int) -> Generator[Record, None, None]:  # noqa: ARG002  the tally knows
        """Yield the samples."""
        for record in self._below.records(0):
            number = self._below.tally.input
            own = number_key(number)
            if record.key == own or record.key.startswith(f"{own}-"):
                yield replace(record, key=number_key(self._first + number) + record.key.removeprefix(own))
            else:
                yield record


def _checked(journal: Journal | None, identity: Mapping[str, object], head: Head) -> Journal:
    """Return the journal of a set that this function has made.

    Raises:
        ConfigError: It has not.
    """
    said = {} if journal is None else journal.options
    if journal is None or "function" not in said:
        raise ConfigError(
            f"append=True: {redact(head.home)} was not made by optimize; write more of its samples with "
            "ShardWriter(…, append=True)"
        )
    for name, what in (("function", "by another function"), ("columns", "with other columns")):
        if said.get(name) != identity.get(name):
            raise ConfigError(
                f"append=True: {redact(head.home)} was made {what}; give the same, or write to another target"
            )
    return journal
