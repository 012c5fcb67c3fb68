"""Read what a function makes of its inputs as a source of records, which ``pack`` writes."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shard_tools.change.functions.inputs import Inputs
from shard_tools.change.functions.produce import Kind, Made
from shard_tools.make.convert.base.identity import Origins
from shard_tools.make.convert.base.records import Record, Skipped
from shard_tools.running.functions import blame
from shard_tools.running.parts import Runner
from shard_tools.running.progress import Progress
from streaming.build.batches.bad_file import BadFile, BadRecord
from streaming.common.arguments import counted, most_bad
from streaming.errors import DataError, TooManyBadSamplesError

ON_ERROR = ("raise", "drop")
_PROGRESS_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class InputTally:
    """What came of the inputs so far, of earlier runs, too.

    Attributes:
        input: Number of the next input.
        part: How many of its samples are there.
        num_samples: Samples of all inputs.
        num_empty: Inputs without samples.
        num_failed: Inputs on which the function failed.
    """

    input: int = 0
    part: int = 0
    num_samples: int = 0
    num_empty: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is done with an input on which the function fails.

    Attributes:
        on_error: ``"raise"`` or ``"drop"``.
        max_bad_samples: Most of them, as a number (int) or a fraction (float) of all inputs.
        bad_file: List of those that were dropped.
    """

    on_error: str
    max_bad_samples: float
    bad_file: BadFile | None


@dataclass(slots=True, kw_only=True)
class FunctionSource:
    """Samples that a function makes, each a record. Used by one thread.

    Attributes:
        inputs: What the function is applied to.
        runner: Where it runs.
        columns: Names of the columns whose values come with the samples.
        policy: For inputs on which it fails.
        progress: Told of each input.
        name: Name of the function, for errors.
        kind: For reports.
        tally: What came of the inputs so far.
    """

    inputs: Inputs
    runner: Runner
    columns: tuple[str, ...]
    policy: Policy
    progress: Progress
    name: str
    kind: str = "function"
    tally: InputTally = field(default_factory=InputTally)

    num_records: None = None
    num_bytes: int = 0
    skipped: tuple[Skipped, ...] = ()
    fields: Mapping[str, bool] | None = None

    def identity(self) -> dict[str, object]:
        """Return the identity of the inputs."""
        return self.inputs.identity()

    def origins(self) -> Origins:
        """Return the files among the inputs."""
        return self.inputs.origins()

    def position(self) -> dict[str, int]:
        """Return where a run that is interrupted now goes on: right before the record that was handed out last."""
        return asdict(self.tally)

    def through(self) -> int:
        """Return the number of the last input that is done with before the latest record."""
        return self.tally.input - (self.tally.part == 0)

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on where an earlier run stood."""
        self.tally = InputTally(**{name: int(value) for name, value in position.items()})

    def records(self, start: int) -> Generator[Record, None, None]:  # noqa: ARG002  the tally knows
        """Yield the samples from where the tally stands.

        Raises:
            Exception: Whatever the function raised, with a note that names the input; with the policy ``"drop"`` only
                errors of other causes.
            TooManyBadSamplesError: It fails on too many inputs.
            DataError: No input gives a sample.
        """
        tally, told, num_inputs = self.tally, _Told(self.progress, len(self.inputs)), len(self.inputs)
        items = self.runner.items(self.inputs.part, tally.input, num_inputs, tally.part)
        told.go_on(tally)
        try:
            for made, buffers in items:
                if made.kind is Kind.SAMPLE:
                    tally.input, tally.part = made.number, made.part
                    fields = dict(zip(made.fields, buffers, strict=True))
                    told.sample(made.number, fields)
                    yield Record(
                        key=made.key, fields=fields, metadata=dict(zip(self.columns, made.columns, strict=True)),
                        where=f"input {made.number}",
                    )  # fmt: skip
                    tally.num_samples += 1
                    tally.part += 1
                    continue
                if made.kind is Kind.FAILED:
                    self._fail(made)
                else:
                    tally.num_empty += 1
                tally.input, tally.part = made.number + 1, 0
        finally:
            items.close()
        tally.input, tally.part = num_inputs, 0
        told.end()
        if not tally.num_samples:
            raise DataError(
                f"{self.name}: no sample of {counted(num_inputs, 'input')}: {tally.num_empty} gave none, and it failed "
                f"on {tally.num_failed}"
            )
        if tally.num_empty:
            _log.warning("%s gave no sample for %s", self.name, counted(tally.num_empty, "input"))
        if tally.num_failed:
            _log.warning("%s failed on %s, which are left out", self.name, counted(tally.num_failed, "input"))

    def _fail(self, made: Made) -> None:
        """Raise the error of an input, or count it."""
        url, key, row = made.given
        where = self.inputs.describe(made.number)
        named = f"{where}, key {key!r}" if key else where
        partly = f", after {counted(made.part, 'sample')} of it" if made.part else ""
        if self.policy.on_error == "raise":
            cure = "on_error='drop' (--on-error drop) leaves such inputs out"
            raise error_of(made, f"{self.name} failed on {named}{partly}", cure)
        if not self.tally.num_failed:
            _log.warning("%s failed on %s%s: %s; others like it are counted", self.name, named, partly, made.reason)
        self.tally.num_failed += 1
        if self.policy.bad_file is not None:
            record = BadRecord(
                url=url or where, key=key, number=made.number, sample_in_shard=row, stage="transform",
                reason=made.reason + partly,
            )  # fmt: skip
            self.policy.bad_file.add(record)
        allowed = most_bad(self.policy.max_bad_samples, len(self.inputs))
        if self.tally.num_failed > allowed:
            raise TooManyBadSamplesError(
                f"{self.name} failed on {self.tally.num_failed} of the first {made.number + 1} inputs, the last one "
                f"{named}: {made.reason}; max_bad_samples={self.policy.max_bad_samples} allows {allowed} of "
                f"{len(self.inputs)}"
            )


def error_of(made: Made, failed: str, cure: str = "") -> BaseException:
    """Return what a function raised in a process, with a note of what failed on what, and what helps."""
    error: BaseException = pickle.loads(made.error)  # noqa: S301  our own process
    blame(error, failed, cure)
    return error


class _Told:
    """Tell progress of inputs; their bytes are an estimate, so that a bar of bytes moves with the inputs."""

    def __init__(self, progress: Progress, num_inputs: int) -> None:
        self._progress, self._num_inputs = progress, num_inputs
        self._done = self._first = self._num_bytes = self._told_bytes = 0
        self._at_s = 0.0

    def go_on(self, tally: InputTally) -> None:
        """Begin where an earlier run stood."""
        self._progress.start(total_bytes=None, total=self._num_inputs)
        self._progress.advance(num=tally.input)
        self._done = self._first = tally.input

    def sample(self, number: int, fields: Mapping[str, Any]) -> None:
        """Count a sample; tell from time to time."""
        self._num_bytes += sum(map(len, fields.values()))
        now_s = time.monotonic()
        if now_s - self._at_s >= _PROGRESS_S:
            self._at_s = now_s
            self._tell(number)

    def end(self) -> None:
        """All inputs are done."""
        self._tell(self._num_inputs)

    def _tell(self, number: int) -> None:
        if number > self._first:
            rest = self._num_bytes * (self._num_inputs - self._first) // (number - self._first)
            self._progress.start(total_bytes=rest, total=self._num_inputs)
        self._progress.advance(num=number - self._done, num_bytes=self._num_bytes - self._told_bytes)
        self._done, self._told_bytes = number, self._num_bytes
