"""Provide a function's samples as a source of records, which ``pack`` writes."""

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


class NoSampleError(DataError):
    """A function gave no sample of any input."""


@dataclass(slots=True, kw_only=True)
class InputTally:
    """Progress through the inputs, including earlier runs.

    Attributes:
        input: Number of the next input.
        part: Number of its samples that are written.
        num_samples: Number of samples of all inputs.
        num_empty: Number of inputs without samples.
        num_failed: Number of inputs on which the function failed.
    """

    input: int = 0
    part: int = 0
    num_samples: int = 0
    num_empty: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Treatment of inputs on which the function fails.

    Attributes:
        on_error: ``"raise"`` or ``"drop"``.
        max_bad_samples: Maximum number of them (int), or their maximum fraction of all inputs (float).
        bad_file: Receives the dropped inputs.
    """

    on_error: str
    max_bad_samples: float
    bad_file: BadFile | None


@dataclass(slots=True, kw_only=True)
class FunctionSource:
    """The samples of a function, as records. Used by one thread.

    Attributes:
        inputs: What the function is applied to.
        runner: Runs the function.
        columns: Names of the columns whose values come with the samples.
        policy: Treatment of inputs on which it fails.
        progress: Receives inputs and bytes.
        name: Name of the function, for errors.
        kind: Kind of source, for reports.
        tally: Progress through the inputs.
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
        """Return the position at which an interrupted run continues: right before the latest record yielded."""
        return asdict(self.tally)

    def through(self) -> int:
        """Return the number of the last input that was finished before the latest record."""
        return self.tally.input - (self.tally.part == 0)

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue from the position of an earlier run."""
        self.tally = InputTally(**{name: int(value) for name, value in position.items()})

    def records(self, start: int) -> Generator[Record, None, None]:  # noqa: ARG002  the tally knows
        """Yield the samples from the current position.

        Raises:
            Exception: The function's exception, with a note that names the input; with the policy ``"drop"`` only
            errors from other causes.
            TooManyBadSamplesError: It fails on too many inputs.
            NoSampleError: No input gives a sample.
        """
        tally, reported, num_inputs = self.tally, _InputProgress(self.progress, len(self.inputs)), len(self.inputs)
        items = self.runner.items(self.inputs.part, tally.input, num_inputs, tally.part)
        reported.resume(tally)
        try:
            for made, buffers in items:
                if made.kind is Kind.SAMPLE:
                    tally.input, tally.part = made.number, made.part
                    fields = dict(zip(made.fields, buffers, strict=True))
                    reported.sample(made.number, fields)
                    yield Record(
                        key=made.key, fields=fields, metadata=dict(zip(self.columns, made.columns, strict=True)),
                        where=f"input {made.number}", is_lent=True,
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
        reported.end()
        if not tally.num_samples:
            raise NoSampleError(
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
    """Return the error that a function raised in a process, with a note of the input and a cure."""
    error = cause_of(made)
    blame(error, failed, cure)
    return error


def cause_of(made: Made) -> BaseException:
    """Return the error of an input as it was raised in a process."""
    error: BaseException = pickle.loads(made.error)  # noqa: S301  our own process
    return error


class _InputProgress:
    """Report inputs as progress. The total of bytes is an estimate, so that a bar of bytes moves with the inputs."""

    def __init__(self, progress: Progress, num_inputs: int) -> None:
        self._progress, self._num_inputs = progress, num_inputs
        self._done = self._first = self._num_bytes = self._reported_bytes = 0
        self._at_s = 0.0

    def resume(self, tally: InputTally) -> None:
        """Begin at the position of an earlier run."""
        self._progress.start(total_bytes=None, total=self._num_inputs)
        self._progress.advance(num=tally.input)
        self._done = self._first = tally.input

    def sample(self, number: int, fields: Mapping[str, Any]) -> None:
        """Count a sample; report from time to time."""
        self._num_bytes += sum(map(len, fields.values()))
        now_s = time.monotonic()
        if now_s - self._at_s >= _PROGRESS_S:
            self._at_s = now_s
            self._report(number)

    def end(self) -> None:
        """Report that all inputs are done."""
        self._report(self._num_inputs)

    def _report(self, number: int) -> None:
        if number > self._first:
            rest = self._num_bytes * (self._num_inputs - self._first) // (number - self._first)
            self._progress.start(total_bytes=rest, total=self._num_inputs)
        self._progress.advance(num=number - self._done, num_bytes=self._num_bytes - self._reported_bytes)
        self._done, self._reported_bytes = number, self._num_bytes
