"""Add the samples of new inputs to a set: ``optimize(…, append=True)``, ``map --append``."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

from shard_tools.change.functions.inputs import Inputs
from shard_tools.change.functions.source import FunctionSource, NoSampleError
from shard_tools.make.convert.append import Appending
from shard_tools.make.convert.base.records import Record, ShardOptions, number_key
from shard_tools.make.convert.journal import Journal, load_journal
from shard_tools.make.convert.pack import Destination
from shard_tools.make.write.change import open_head
from shard_tools.running.progress import NoProgress
from streaming.errors import ConfigError
from streaming.shards.schema.value import Schema
from streaming.shards.versions.publish import Head
from streaming.storage import Storage, redact

_log = logging.getLogger(__name__)
MAP, OPTIMIZE = "`shard_tools map`", "shard_tools.optimize"


class NewInputs:
    """Inputs that are not in a set yet; adds their samples to it.

    Args:
        inputs: All inputs. An input that names files is new if one of these files is; a sample of a set is new if its
            shard is; any other input is new.
        place: The set.
        identity: Values besides the inputs that determine the bytes of the set.
        storage_options: Options of its store.
        made_by: The command that made the set.

    Attributes:
        inputs: The new inputs.
        head: The set.

    Raises:
        ConfigError: The set was made by another function or with other columns, or one of its inputs changed.
        IndexMissingError, UnfinishedError: The set has no index, or is unfinished.
    """

    def __init__(
        self, inputs: Inputs, place: Destination, identity: Mapping[str, object],
        storage_options: Mapping[str, object] | None, *, made_by: str = OPTIMIZE,
    ) -> None:  # fmt: skip
        self.begun_s = time.monotonic()
        self._storage, self._storage_options = Storage(storage_options), storage_options
        self.head = open_head(self._storage, place.directory)
        journal = journal_of_function(self.head, self._storage, made_by)
        _check_same(journal, identity, self.head)
        sizes = {name: journal.options[name] for name in ("max_bytes", "max_samples")}
        first = int(journal.source.get("num_inputs", 0))
        self._work = Appending.of(self._storage, self.head, ShardOptions(**sizes), journal, first)
        self._numbers_keys = made_by == OPTIMIZE
        self.inputs = inputs.new_to(self._work.known)
        self._work.refuse_changed()

    def add(self, source: FunctionSource, *, command: str, schema: Schema) -> tuple[int, int, int]:
        """Write the samples of the new inputs, and publish them; return the samples, shards and bytes of the set.

        Raises:
            OvertakenError: Another change of the set was published meanwhile; nothing was added.
            Exception: The function's exception.
        """
        table = self.head.table
        num_samples, num_shards = table.total_samples, len(table.shards)
        num_bytes = sum(shard.size_bytes for shard in table.shards)
        if not len(self.inputs):
            return num_samples, num_shards, num_bytes
        counted: Any = _Following(source, self._work.numbers_from, numbers_keys=self._numbers_keys)
        try:
            added = self._work.add(
                counted, counted, command, columns=source.columns, meaning=schema, storage=self._storage,
                storage_options=self._storage_options, progress=NoProgress(),
            )  # fmt: skip
        except NoSampleError as error:  # a day may have none; its inputs are looked at again the next time
            _log.warning("%s: nothing is added: %s", redact(self.head.home), error)
            return num_samples, num_shards, num_bytes
        report = self._work.report(None, added, self.begun_s, source.kind)
        return report.num_samples, num_shards + report.num_shards, num_bytes + report.num_bytes


class _Following:
    """A function's samples as a source that continues the numbering of a set's keys.

    Args:
        below: The function's samples.
        first: Number of the first new input in the set.
        numbers_keys: Whether samples without a key of their own are named by their input's number.

    Attributes:
        next: Number of the next input of the set afterwards.
    """

    def __init__(self, below: FunctionSource, first: int, *, numbers_keys: bool) -> None:
        self._below, self._first, self._numbers_keys = below, first, numbers_keys
        self.next = first + len(below.inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def records(self, start: int) -> Generator[Record, None, None]:  # noqa: ARG002  the tally knows
        """Yield the samples; keys made from input numbers are shifted by ``first``."""
        for record in self._below.records(0):
            number = self._below.tally.input
            own = number_key(number)
            if self._numbers_keys and (record.key == own or record.key.startswith(f"{own}-")):
                yield replace(record, key=number_key(self._first + number) + record.key.removeprefix(own))
            else:
                yield record


def journal_of_function(head: Head, storage: Storage, made_by: str) -> Journal:
    """Return the journal of a set that is to be extended by the command that made it.

    Raises:
        ConfigError: Another command made it.
    """
    journal = load_journal(head.home, storage)
    said = {} if journal is None else journal.options
    found = "" if "function" not in said else MAP if "late" in said else OPTIMIZE
    if journal is None or found != made_by:
        cure = f"add to it by {found}" if found else "write more of its samples with ShardWriter(…, append=True)"
        raise ConfigError(
            f"{redact(head.home)} was not made by {made_by}, so it cannot make more of its samples; {cure}"
        )
    return journal


def _check_same(journal: Journal, identity: Mapping[str, object], head: Head) -> None:
    """Refuse another function than the one that made a set.

    Raises:
        ConfigError: It is one.
    """
    for name, what in (("function", "by another function"), ("columns", "with other columns")):
        if journal.options.get(name) != identity.get(name):
            raise ConfigError(f"{redact(head.home)} was made {what}; give the same, or write to another target")
