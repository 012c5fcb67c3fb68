"""Apply a function to inputs and pack its samples: ``optimize``, and the parts shared with ``map``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shard_tools.change.functions.append import NewInputs
from shard_tools.change.functions.inputs import Inputs, as_inputs
from shard_tools.change.functions.produce import Produce
from shard_tools.change.functions.source import ON_ERROR, FunctionSource, Policy
from shard_tools.make.convert.base.records import ShardOptions
from shard_tools.make.convert.pack import Destination, PackingRun
from shard_tools.make.write.columns import ColumnSpec, parse_columns
from shard_tools.make.write.writer import DEFAULT_MAX_BYTES, checked_schema
from shard_tools.running.engine import DEFAULT_WORKERS, ENGINES, Shared, open_engine
from shard_tools.running.functions import why_not_sent
from shard_tools.running.parts import ExecutorRunner, HereRunner, Runner
from shard_tools.running.processes import DEFAULT_MEMORY_BYTES, ProcessRunner
from shard_tools.running.progress import NoProgress, Progress, progress_bar
from shard_tools.running.report import Report
from streaming.build.batches.bad_file import BadFile
from streaming.common.arguments import (
    check_choice,
    checked_count,
    checked_flag,
    checked_limit,
    checked_path,
    checks_options,
    parse_bytes,
)
from streaming.common.identities import identity_of
from streaming.common.platforms import num_cores
from streaming.errors import ConfigError, DuplicateKeyError
from streaming.shards.schema.value import Schema
from streaming.storage import redact

_MAX_BAD_SAMPLES = 0.001  # as in training
_CALLS_AHEAD = 2  # queued calls per remote call in progress
_ELSEWHERE = {
    "output_dir": "give it as the third argument",
    "num_workers": "write workers=…",
    "chunk_bytes": "write max_bytes=…",
    "chunk_size": "write max_samples=…",
    "mode": "write overwrite=True, or leave it out: a run that was stopped continues",
    "use_checkpoint": "leave it out: a run that was stopped continues",
    **dict.fromkeys(("num_nodes", "machine"), 'write engine="ray" to run it on a cluster'),
    **dict.fromkeys(("reorder_files", "keep_data_ordered"), "leave it out: samples come in the order of the inputs"),
    "start_method": "leave it out: the processes never import the main script",
    "compression": "leave it out: shards are not compressed; fields may be",
    "fast_dev_run": "leave it out, and give fewer inputs",
}
"""Options of LitData's function, and their replacements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReport(Report):
    """The result of applying a function to inputs.

    Attributes:
        target: Location of the shards.
        num_inputs: Number of inputs.
        num_samples: Number of samples in the target now.
        num_resumed_samples: Number of samples that an earlier run had written.
        was_complete: Whether an earlier run had written everything, so that this one wrote nothing.
        changed: Inputs that changed since an earlier run; their samples, and all that follow, are made again.
        num_empty: Number of inputs that gave no sample.
        num_failed: Number of inputs left out because the function failed on them.
        num_shards: Number of shards in the target now.
        num_bytes: Total size of all shards.
        seconds: Wall time of this run.
    """

    target: str
    num_inputs: int
    num_samples: int
    num_resumed_samples: int
    was_complete: bool
    changed: tuple[str, ...]
    num_empty: int
    num_failed: int
    num_shards: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Options that determine where a function runs and how its failures are treated.

    Attributes:
        workers: Processes (default: one per core), or calls in progress on Ray (default: 64); 0: in this process.
        engine: ``"local"`` or ``"ray"``.
        memory: Bytes of results that may wait to be written; for local processes only.
        on_error: ``"raise"``, or ``"drop"``: leave out inputs on which the function fails.
        max_bad_samples: Maximum number or fraction of inputs left out; None: 0.001, as in training.
        bad_samples_file: File that lists them.
    """

    workers: int | None = None
    engine: str = "local"
    memory: int | str | None = None
    on_error: str = "raise"
    max_bad_samples: float | None = None
    bad_samples_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Reject options that are invalid or would have no effect.

        Raises:
            ConfigError: An option is invalid or would have no effect.
        """
        check_choice("engine", self.engine, ENGINES)
        check_choice("on_error", self.on_error, ON_ERROR)
        if self.workers is not None:
            checked_count("workers", self.workers)
        if self.engine == "ray" and self.workers == 0:
            raise ConfigError("workers=0 runs the function in this process; leave engine='ray' out")
        if self.memory is not None and (self.engine == "ray" or self.workers == 0):
            raise ConfigError("memory= bounds what processes of this machine hold; leave it out")
        given = [name for name in ("max_bad_samples", "bad_samples_file") if getattr(self, name) is not None]
        if given and self.on_error == "raise":
            raise ConfigError(f"{given[0]} is for on_error='drop'; with 'raise' the first failing input ends the run")

    def policy(self) -> Policy:
        """Return the treatment of failing inputs."""
        path = checked_path("bad_samples_file", self.bad_samples_file)
        limit = _MAX_BAD_SAMPLES if self.max_bad_samples is None else self.max_bad_samples
        return Policy(
            on_error=self.on_error,
            max_bad_samples=checked_limit(limit),
            bad_file=None if path is None else BadFile(path, 0),
        )

    @contextlib.contextmanager
    def runner(self, work: Produce, shared: Shared) -> Iterator[Runner]:
        """Open a runner for ``work``; remote processes must be able to read the files ``shared``.

        Raises:
            ConfigError: The work cannot be sent to other processes.
        """
        if self.workers == 0:
            yield HereRunner(work)
            return
        if self.engine == "ray":
            workers = self.workers or DEFAULT_WORKERS["ray"]
            with open_engine("ray", workers) as executor:
                assert executor is not None  # noqa: S101  of Ray
                yield ExecutorRunner(work, executor, _CALLS_AHEAD * workers, shared)
            return
        memory_bytes = DEFAULT_MEMORY_BYTES if self.memory is None else parse_bytes(self.memory, name="memory")
        try:
            runner = ProcessRunner(work, self.workers or num_cores(), memory_bytes=memory_bytes)
        except ConfigError as error:
            if why := why_not_sent(work.function):
                raise ConfigError(
                    f"{work.name} cannot be sent to worker processes: it refers to the {why}; make it inside the "
                    "function, or give workers=0"
                ) from error
            raise
        with contextlib.closing(runner):
            yield runner


@checks_options(_ELSEWHERE)
def optimize(  # noqa: PLR0913  a public function, whose options are named
    fn: Callable[[Any], Any],
    inputs: Any,
    target: str | os.PathLike[str],
    *,
    columns: ColumnSpec = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    workers: int | None = None,
    engine: str = "local",
    max_bytes: int | str = DEFAULT_MAX_BYTES,
    max_samples: int | None = None,
    on_error: str = "raise",
    max_bad_samples: float | None = None,
    bad_samples_file: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    overwrite: bool = False,
    append: bool = False,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress | bool = True,
) -> FunctionReport:
    """Apply a function to inputs, and write the samples that it returns into indexed shards in ``target``.

    ::

        def resized(path):
            with Image.open(path) as image:
                return {"jpg": image.resize((256, 256)), "json": {"path": path}}

        shard_tools.optimize(resized, sorted(glob("photos/*.jpg")), "s3://bucket/train/", workers=32)

    The same function, inputs and options give the same bytes, for any number of workers, locally or on Ray. After a
    run was killed, call it again: it continues after the last complete shard.

    Args:
        fn: Called with one input. It returns a sample, a dict of fields as ``ShardWriter.write`` takes them; or
        several, as a list or by ``yield``; or None. It runs in processes that do not import the main script, so
        it may be defined there or in a notebook; its prints go to standard error. It should be deterministic.
        inputs: A list or another sequence; a set of samples (a dataset, or its URL); or a file of lines (a path that
            ends in ``.txt`` or ``.jsonl``, or ``shard_tools.lines(path)``). Samples are decoded as by the dataset.
        target: Folder or prefix for the shards, or a pattern such as ``"out/train-{:06d}.tar"``.
        columns: Values for the sample table, as for ``ShardWriter``, taken from what ``fn`` returns.
        classes: Names of classes by field, as for ``ShardWriter``. Default: those of the input set.
        workers: Processes (default: one per core), or calls in progress on Ray (64). 0: in this process, for debuggers.
        engine: ``"local"`` or ``"ray"``. The process that calls this writes.
        max_bytes: Maximum size of a shard.
        max_samples: Maximum number of samples in a shard.
        on_error: ``"raise"``: an input on which ``fn`` fails ends the run; its exception names the input. ``"drop"``:
            it is counted and left out, except for samples that it already yielded. A worker process that dies is
            replaced once; if the same input kills it again, ``fn`` has failed on it.
        max_bad_samples: With ``"drop"``, maximum number or fraction of inputs left out. Default: 0.001.
        bad_samples_file: With ``"drop"``, list them in this file, as ``StreamingDataset`` does. If they are samples of
        a set, ``shard_tools reshard --drop`` can leave them out.
        memory: Bytes of samples that local processes may hold until they are written (default: 512 MiB); at least one
        sample each.
        overwrite: Delete the contents of the target instead of continuing.
        append: Add the samples of further inputs to a set that the same function made, and publish them as the set's
        next version. Inputs that name files already in the set are skipped; all others are taken as new. Shards
        are as large as those of the set. ``num_resumed_samples`` then counts the samples of the previous version.
        storage_options: Options of the target's store, and of the inputs' store if these are a URL or a path.
        progress: Show a bar, or one line per minute without a terminal; or an object that receives inputs and bytes.

    A sample's key is its ``__key__``, or else the number of its input: ``000000012`` for input 12, and
    ``000000012-000``, … if it gives several.

    Returns:
        Counts of inputs, samples, shards and bytes.

    Raises:
        ConfigError: An argument is invalid, or ``fn`` cannot be sent to other processes.
        TargetNotEmptyError: The target holds other work: other inputs or options, or another function.
        DuplicateKeyError: Two samples have the same key.
        TooManyBadSamplesError: ``fn`` fails on too many inputs.
        DataError: No input gives a sample.
        StorageError: A store failed.
        Exception: The exception of ``fn``; a note names the input.
    """
    if not callable(fn):
        raise ConfigError(f"fn: expected a function of one input, got a {type(fn).__name__}")
    running = Running(
        workers=workers, engine=engine, memory=memory, on_error=on_error, max_bad_samples=max_bad_samples,
        bad_samples_file=bad_samples_file,
    )  # fmt: skip
    options = ShardOptions(
        max_bytes=parse_bytes(max_bytes, name="max_bytes"), max_samples=max_samples,
        overwrite=checked_flag("overwrite", overwrite),
    )  # fmt: skip
    if max_samples is not None:
        checked_count("max_samples", max_samples, 1)
    given = as_inputs(inputs, storage_options)
    sources = parse_columns(columns)
    with contextlib.ExitStack() as stack:
        if isinstance(progress, bool):
            progress = stack.enter_context(progress_bar("optimize", "inputs")) if progress else NoProgress()
        work = Produce(function=fn, read=given.read, columns=sources, name=name_of(fn))
        told = {name: one if isinstance(one, str) else identity_of(one) for name, one in sources.items()}
        identity = {**options.identity(), "function": identity_of(fn), "columns": told}
        schema = checked_schema(getattr(given, "classes", {}) if classes is None else classes, columns)
        place = Destination.of(os.fspath(target))
        if checked_flag("append", append):
            if overwrite:
                raise ConfigError("append=True adds to what overwrite=True deletes; leave one of them out")
            new = NewInputs(given, place, identity, storage_options)
            return add_made(work, new, running=running, progress=progress, schema=schema)
        return pack_made(
            work, given, place, options, running=running, progress=progress, command=("optimize", work.name),
            identity=identity, restart="overwrite=True", storage_options=storage_options, schema=schema,
        )  # fmt: skip


def pack_made(
    work: Produce, inputs: Inputs, place: Destination, options: ShardOptions, *, running: Running, progress: Progress,
    **how: Any,
) -> FunctionReport:  # fmt: skip
    """Apply ``work`` to ``inputs`` and write the samples; ``how`` are further arguments of ``PackingRun``.

    For the errors, see :func:`optimize`.
    """
    started = time.monotonic()
    with running.runner(work, inputs.shared) as runner:
        source = FunctionSource(
            inputs=inputs, runner=runner, columns=tuple(work.columns), policy=running.policy(), progress=progress,
            name=work.name,
        )  # fmt: skip
        progress.start(total_bytes=None, total=len(inputs))
        packing = PackingRun(
            source, place, options, columns=source.columns, position=source, progress=NoProgress(), **how
        )  # fmt: skip
        try:
            with packing:
                packed = packing.run()
        except DuplicateKeyError as error:
            error.add_note(f"It is of {inputs.describe(source.tally.input)}, by {work.name}")
            raise
    return FunctionReport(
        target=place.directory,
        num_inputs=len(inputs),
        num_samples=packed.num_samples,
        num_resumed_samples=packed.num_resumed_samples,
        was_complete=packed.was_complete,
        changed=packed.changed,
        num_empty=source.tally.num_empty,
        num_failed=source.tally.num_failed,
        num_shards=packed.num_shards,
        num_bytes=packed.num_bytes,
        seconds=time.monotonic() - started,
    )


def add_made(
    work: Produce, new: NewInputs, *, running: Running, progress: Progress, schema: Schema
) -> FunctionReport:  # fmt: skip
    """Apply ``work`` to new inputs and add the samples to a set; for the errors, see :func:`optimize`."""
    with running.runner(work, new.inputs.shared) as runner:
        source = FunctionSource(
            inputs=new.inputs, runner=runner, columns=tuple(work.columns), policy=running.policy(), progress=progress,
            name=work.name,
        )  # fmt: skip
        num_samples, num_shards, num_bytes = new.add(source, command=work.name, schema=schema)
    return FunctionReport(
        target=new.head.home, num_inputs=len(new.inputs), num_samples=num_samples,
        num_resumed_samples=new.head.table.total_samples, was_complete=not len(new.inputs), changed=(),
        num_empty=source.tally.num_empty, num_failed=source.tally.num_failed, num_shards=num_shards,
        num_bytes=num_bytes, seconds=time.monotonic() - new.begun_s,
    )  # fmt: skip


def name_of(function: Any) -> str:
    """Return a function's name for messages."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return redact(f"{named.__module__}.{named.__qualname__}".removeprefix("__main__."))
