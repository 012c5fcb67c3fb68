"""A user's function over inputs gives the same shards for any number of workers, stopped or not; failures are named."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import made_samples
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import Interrupted, dies_always, dies_once, exits, fails_at_threes, large, slow, varied
from PIL import Image

import shard_tools
from shard_tools import ShardWriter, lines, optimize
from shard_tools.change.functions.produce import Kind, Produce, ReadHere
from shard_tools.make.convert.journal import TargetNotEmptyError
from shard_tools.running.parts import ExecutorRunner
from shard_tools.running.process_main import Ring
from shard_tools.running.progress import NoProgress
from streaming import StreamingDataset
from streaming.build.batches.bad_file import BadRecord, iter_records
from streaming.common.platforms import unnamed_file
from streaming.errors import (
    ConfigError,
    DataError,
    DuplicateKeyError,
    NotFoundError,
    ReadOnlyError,
    TooManyBadSamplesError,
    WorkerDiedError,
    WorkerError,
)
from tests.support.code.folders import ROOT
from tests.support.processes.waiting import PATIENCE_S, until
from tests.support.sources.conversions import contents, members

run: Any = functools.partial(optimize, progress=False)
here: Any = functools.partial(run, workers=0)


def of_one_writer(target: Path, num_inputs: int, **options: Any) -> dict[str, bytes]:
    """The shards that a plain loop writes of ``varied``."""
    with ShardWriter(f"{target}/{{:06d}}.tar", **options) as writer:
        for number in range(num_inputs):
            made = varied(number)
            if isinstance(made, dict):
                writer.write({"__key__": f"{number:09d}", **made})
                continue
            for part, sample in enumerate(made or ()):
                writer.write({"__key__": f"{number:09d}-{part:03d}", **sample})
    return contents(target)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"max_bytes": 100_000, "columns": ["json.i"]}, {"max_samples": 20}])
def test_any_number_of_workers_writes_what_a_plain_loop_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = of_one_writer(tmp_path / "plain", 500, **options)
    reports = []
    for workers in (0, 1, 2, 5):
        target = tmp_path / str(workers)
        reports.append(run(varied, range(500), target, workers=workers, **options).as_dict())
        found = contents(target)
        journal = json.loads(found.pop("_shardstream/convert.json"))
        assert journal["complete"] is True
        assert found == plain
        assert not list(target.glob("_shardstream/unfinished*"))
    told = [{**report, "target": "", "seconds": 0} for report in reports]
    assert told[1:] == told[:1] * 3
    assert reports[0]["num_inputs"] == 500
    assert reports[0]["num_empty"] == sum(varied(number) in (None, []) for number in range(500))
    assert reports[0]["num_shards"] > 5


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(at=st.integers(0, 119), max_samples=st.integers(1, 40))
def test_a_run_goes_on_wherever_it_was_interrupted(
    tmp_path_factory: pytest.TempPathFactory, at: int, max_samples: int
) -> None:
    folder = tmp_path_factory.mktemp("interrupted")
    function = Interrupted(at, str(folder / "flag"))
    whole = here(function, range(120), folder / "whole", max_samples=max_samples)
    (folder / "flag").touch()
    with pytest.raises(KeyboardInterrupt):
        here(function, range(120), folder / "stopped", max_samples=max_samples)
    (folder / "flag").unlink()
    report = here(function, range(120), folder / "stopped", max_samples=max_samples)
    assert contents(folder / "stopped") == contents(folder / "whole")
    same = {"target": "", "seconds": 0, "num_resumed_samples": 0}
    assert report.as_dict() | same == whole.as_dict() | same
    again = here(function, range(120), folder / "stopped", max_samples=max_samples)
    assert again.as_dict() | same == whole.as_dict() | same | {"was_complete": True}
    assert again.num_resumed_samples == whole.num_samples


@pytest.mark.thorough
def test_one_input_may_fill_many_shards(tmp_path: Path) -> None:
    def many(number: int) -> Any:
        for part in range(400):
            if number == 2 and part == 333 and os.path.exists(flag):
                raise KeyboardInterrupt
            yield {"__key__": f"{number}/{part:04d}", "txt": "x" * (part % 97)}

    flag = str(tmp_path / "flag")
    here(many, range(4), tmp_path / "whole", max_samples=50)
    Path(flag).touch()
    with pytest.raises(KeyboardInterrupt):
        here(many, range(4), tmp_path / "stopped", max_samples=50)
    Path(flag).unlink()
    assert run(many, range(4), tmp_path / "stopped", max_samples=50, workers=1).num_resumed_samples == 1050
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from made_samples import slow, varied
from shard_tools import optimize
optimize({function}, range({num}), {target!r}, workers=2, max_bytes=50_000, progress=False)
"""


def program(function: str, target: Path, num: int = 1000, stands_at: int | None = None) -> subprocess.Popen[bytes]:
    """A script without a guard that runs ``optimize``, in a process of its own; ``slow`` gets no further than told."""
    path = [str(Path(made_samples.__file__).parent), str(Path(shard_tools.__file__).parent.parent)]
    code = PROGRAM.format(path=path, function=function, num=num, target=str(target))
    environ = {} if stands_at is None else {made_samples.STANDS_AT: str(stands_at)}
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=os.environ | environ)


def wait_for_shards(target: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    def are_there() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return len(list(target.glob("*.tar"))) >= count

    until(are_there, f"{count} shards are written")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_goes_on_with_the_same_bytes_and_leaves_no_process(tmp_path: Path, seed: int) -> None:
    run(slow, range(300), tmp_path / "whole", workers=0, max_bytes=50_000)
    rng = random.Random(seed)
    target = tmp_path / "killed"
    for _ in range(2):
        shards = len(list(target.glob("*.tar"))) + rng.randrange(1, 5)
        with program("slow", target, 300, stands_at=10 * (shards + 8)) as process:
            wait_for_shards(target, shards, process)
            children = psutil.Process(process.pid).children()
            assert len(children) == 2
            time.sleep(rng.random() * 0.05)  # anywhere in a shard
            process.kill()
        _, alive = psutil.wait_procs(children, PATIENCE_S)
        assert not alive
    report = run(slow, range(300), target, workers=2, max_bytes=50_000)
    assert report.num_resumed_samples > 0
    assert contents(target) == contents(tmp_path / "whole")


@pytest.mark.thorough
def test_ctrl_c_ends_all_processes_and_the_run_goes_on(tmp_path: Path) -> None:
    target = tmp_path / "stopped"
    with program("slow", target, stands_at=500) as process:
        wait_for_shards(target, 4, process)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE_S)
    assert told.rstrip().endswith(b"KeyboardInterrupt")
    assert told.count(b"\nKeyboardInterrupt") == 1  # of this process; its workers end without a word
    assert not psutil.wait_procs(children, PATIENCE_S)[1]
    assert list(target.glob("_shardstream/unfinished*"))
    assert run(slow, range(1000), target, max_bytes=50_000, workers=2).num_resumed_samples > 0
    assert not list(target.glob("_shardstream/unfinished*"))


def test_other_work_is_refused_by_name_and_may_be_overwritten(tmp_path: Path) -> None:
    def first(number: int) -> Any:
        return {"txt": str(number)}

    def second(number: int) -> Any:
        return {"txt": str(number + 0)}

    def carried(number: int, more: int = 1) -> Any:
        return {"txt": str(number + more)}

    here(first, range(10), tmp_path / "t")
    before = contents(tmp_path / "t")
    differing: list[Any] = [
        ((second, range(10)), {}, r"options function: there '.*first \(source text \w+.*here '.*second \(source text"),
        ((first, range(11)), {}, r"source num_inputs: there 10, here 11"),
        ((first, [*range(10)]), {}, r"source kind: there 'range', here 'list'"),
        ((first, range(10)), {"max_samples": 3}, "options max_samples: there None, here 3"),
        ((first, range(10)), {"columns": {"n": len}}, "options columns: there"),
    ]
    for arguments, options, told in differing:
        with pytest.raises(TargetNotEmptyError, match=told + r".*start over with overwrite=True"):
            here(*arguments, tmp_path / "t", **options)
        assert contents(tmp_path / "t") == before
    here(functools.partial(carried, more=2), range(10), tmp_path / "p")
    with pytest.raises(TargetNotEmptyError, match="values "):
        here(functools.partial(carried, more=3), range(10), tmp_path / "p")
    here(second, range(5), tmp_path / "t", overwrite=True)
    assert len(members(tmp_path / "t")) == 5


@pytest.mark.thorough
def test_a_function_without_source_is_told_apart_by_its_bytecode(tmp_path: Path) -> None:
    spaces: list[dict[str, Any]] = [{}, {}, {}]
    for space, value in zip(spaces, (1, 2, 1), strict=True):
        exec(f"def made(number): return {{'txt': str(number + {value})}}", space)
    run(spaces[0]["made"], range(5), tmp_path / "t", workers=1)  # by value, as from a notebook
    assert members(tmp_path / "t")["000000004.txt"] == b"5"
    with pytest.raises(TargetNotEmptyError, match=r"bytecode of Python 3\.\d+ \w+"):
        here(spaces[1]["made"], range(5), tmp_path / "t")
    assert here(spaces[2]["made"], range(5), tmp_path / "t").num_resumed_samples == 5


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_failing_input_is_named(tmp_path: Path, workers: int) -> None:
    with pytest.raises(LookupError, match="no 13") as raised:
        run(fails_at_threes, [*range(10, 90)], tmp_path / "t", workers=workers)
    notes = "\n".join(raised.value.__notes__)
    assert (
        "made_samples.fails_at_threes failed on input 3 (13); on_error='drop' (--on-error drop) leaves such inputs out"
        in notes
    )
    assert "in fails_at_threes" in notes  # where, in the process that ran it
    assert not (tmp_path / "t").exists() or not contents(tmp_path / "t")


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
def test_failing_inputs_are_dropped_counted_and_listed(
    tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    bad = tmp_path / "bad.jsonl"
    report = run(
        fails_at_threes, range(100), tmp_path / "t", workers=workers, on_error="drop", max_bad_samples=10,
        bad_samples_file=bad,
    )  # fmt: skip
    assert (report.num_failed, report.num_samples) == (10, 90)
    records = [record for record in iter_records(bad.read_bytes()) if isinstance(record, BadRecord)]
    assert [record.number for record in records] == list(range(3, 100, 10))
    assert (records[0].url, records[0].reason) == ("input 3 (3)", "LookupError: no 3")
    assert "failed on 10 inputs, which are left out" in caplog.text
    again = run(fails_at_threes, range(100), tmp_path / "t", workers=workers)  # all is there already
    assert (again.num_failed, again.num_resumed_samples) == (10, 90)
    with pytest.raises(TooManyBadSamplesError, match=r"on 3 of the first 24 inputs.*max_bad_samples=2 allows 2 of 100"):
        run(fails_at_threes, range(100), tmp_path / "u", workers=workers, on_error="drop", max_bad_samples=2)
    # What was raised may be dropped in the next run.
    with pytest.raises(LookupError):
        run(fails_at_threes, range(100), tmp_path / "v", workers=workers, max_samples=1)
    dropped = {"on_error": "drop", "max_bad_samples": 1.0}
    report = run(fails_at_threes, range(100), tmp_path / "v", workers=workers, max_samples=1, **dropped)
    assert (report.num_failed, report.num_samples, report.num_resumed_samples) == (10, 90, 1)


def test_what_was_yielded_before_a_failure_stays(tmp_path: Path) -> None:
    def breaks(number: int) -> Any:
        yield {"txt": "one"}
        if number == 2:
            raise LookupError("broken")
        yield {"txt": "two"}

    bad = tmp_path / "bad.jsonl"
    report = here(breaks, range(4), tmp_path / "t", on_error="drop", bad_samples_file=bad, max_bad_samples=1)
    assert (report.num_samples, report.num_failed) == (7, 1)
    assert json.loads(bad.read_text())["reason"] == "LookupError: broken, after 1 sample of it"


@pytest.mark.thorough
def test_no_sample_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no sample of 3 inputs: 3 gave none, and it failed on 0"):
        here(lambda _: None, range(3), tmp_path / "t")
    with pytest.raises(DataError, match=r"no sample of 0 inputs"):
        here(varied, [], tmp_path / "u")
    assert not (tmp_path / "t").exists() or not contents(tmp_path / "t")
    with pytest.raises(SystemExit) as raised:
        run(exits, [7], tmp_path / "v", workers=1)
    assert raised.value.code == 7


@pytest.mark.thorough
def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    inputs = [(number, str(tmp_path / "marks")) for number in range(100)]
    run(dies_once, inputs, tmp_path / "t", workers=2, max_samples=10)
    assert sorted(int(mark.name) for mark in (tmp_path / "marks").iterdir()) == [7, 27, 47, 67, 87]
    run(dies_once, inputs, tmp_path / "whole", workers=0, max_samples=10)
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


@pytest.mark.thorough
def test_an_input_that_ends_processes_is_named_or_dropped(tmp_path: Path) -> None:
    with pytest.raises(WorkerDiedError, match="dies_always ends worker processes at this input") as raised:
        run(dies_always, range(40), tmp_path / "t", workers=2)
    assert "failed on input 31 (31)" in "\n".join(raised.value.__notes__)
    report = run(dies_always, range(40), tmp_path / "u", workers=2, on_error="drop", max_bad_samples=1)
    assert (report.num_failed, report.num_samples) == (1, 39)


def script(folder: Path, text: str, name: str = "script.py") -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(textwrap.dedent(text))
    root = str(Path(shard_tools.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, name], cwd=folder, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.thorough
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    ran = script(
        tmp_path,
        """
        import socket
        from shard_tools import optimize
        print("started")
        socket.setdefaulttimeout(0.05)  # of sockets that the script opens
        MORE = 3
        def made(number):
            return {"txt": str(number + MORE)}
        report = optimize(made, range(20), "out", workers=2, progress=False)
        print(report.num_samples)
        """,
    )
    assert (ran.stdout.split(), ran.returncode) == (["started", "20"], 0), ran.stderr
    assert members(tmp_path / "out")["000000019.txt"] == b"22"


@pytest.mark.thorough
def test_a_module_that_starts_workers_when_they_import_it_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "from shard_tools import optimize\n"
        "def made(number):\n    return {'txt': 'x'}\n"
        "optimize(made, range(20), 'out', workers=2, progress=False)\n"
    )
    ran = script(tmp_path, "import job\n")
    assert ran.returncode == 1
    assert "put it under `if __name__ == '__main__':`, or into a function" in ran.stderr


@pytest.mark.thorough
def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def made(number: int) -> Any:
        with lock:
            return {"txt": str(number)}

    with pytest.raises(
        ConfigError,
        match=r"made cannot be sent to worker processes: it refers to the variable of the "
        r"enclosing function 'lock', of type lock .*; make it inside the function, or give workers=0",
    ):
        run(made, range(3), tmp_path / "t", workers=1)
    assert run(made, range(3), tmp_path / "t", workers=0).num_samples == 3
    with pytest.raises(ConfigError, match=r"one of the inputs 0 to 0 cannot be sent to worker processes: TypeError"):
        run(varied, [lock], tmp_path / "v", workers=1)
    with pytest.raises(WorkerError, match=r"cannot load the function: ModuleNotFoundError.*no_such_module"):
        run(Missing(), range(3), tmp_path / "u", workers=1)


class Missing:
    """Something that another process cannot load."""

    def __call__(self, _: int) -> Any:
        return {"txt": ""}

    def __reduce__(self) -> Any:
        return exec, ("import no_such_module",)


def test_a_column_of_several_types_ends_the_run_at_once(tmp_path: Path) -> None:
    called = []

    def made(number: int) -> Any:
        called.append(number)
        return {"json": {"value": number if number % 2 else str(number)}}

    with pytest.raises(ConfigError, match=r"000000.tar: column 'json.value': .* but a column holds one"):
        here(made, range(1000), tmp_path / "t", columns=["json.value"], max_samples=10)
    assert len(called) < 80


@pytest.mark.thorough
def test_memory_is_bounded_for_large_samples(tmp_path: Path) -> None:
    peak, done = [0], threading.Event()
    before = {child.pid for child in psutil.Process().children()}  # such as servers of other tests

    class Slow(NoProgress):
        def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
            done.wait(0.05)  # so that processes would run far ahead

    def watch() -> None:
        while not done.wait(0.01):
            for child in psutil.Process().children():
                if child.pid in before:
                    continue
                try:
                    peak[0] = max(peak[0], child.memory_info().rss)
                except psutil.Error:
                    continue

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        optimize(large, range(20), tmp_path / "t", workers=2, memory="40MB", max_bytes="60MB", progress=Slow())
    finally:
        done.set()
        watching.join()
    assert 20_000_000 < peak[0] < 180_000_000  # an interpreter, and a few samples; 10 of them are 200 MB
    assert len(members(tmp_path / "t")) == 20


def test_lines_and_json_lines_are_inputs(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\n\ntwo\r\nthree")
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n[2]\n"x"\n')
    (tmp_path / "list").write_text("a\nb\n")
    shown = functools.partial(here, lambda value: {"json": {"value": value}})
    shown(tmp_path / "in.txt", tmp_path / "txt")
    assert [json.loads(value)["value"] for value in members(tmp_path / "txt").values()] == ["one", "two", "three"]
    shown(str(tmp_path / "in.jsonl"), tmp_path / "jsonl")
    assert [json.loads(value)["value"] for value in members(tmp_path / "jsonl").values()] == [{"a": 1}, [2], "x"]
    assert shown(lines(tmp_path / "list"), tmp_path / "lines").num_inputs == 2
    (tmp_path / "list").write_text("a\nc\n")
    with pytest.raises(TargetNotEmptyError, match="source sha256"):
        shown(lines(tmp_path / "list"), tmp_path / "lines")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: .*correct the line"):
        lines(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="seven") as raised:
        here(lambda _: int("seven"), tmp_path / "in.txt", tmp_path / "x")
    assert f"failed on {tmp_path}/in.txt:1" in "\n".join(raised.value.__notes__)


@pytest.mark.thorough
def test_samples_of_a_set_are_inputs(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/in/{{:06d}}.tar", max_samples=7, columns=["cls"]) as writer:
        for number in range(30):
            writer.write({"__key__": f"k{number:02d}", "txt": "x" * number, "cls": number % 3})

    def longer(sample: dict[str, Any]) -> Any:
        if sample["cls"] == 1:
            raise LookupError("one")
        return {"__key__": sample["__key__"], "txt": sample["txt"] + "!"}

    bad = tmp_path / "bad.jsonl"
    how = {"on_error": "drop", "max_bad_samples": 1.0, "bad_samples_file": bad}
    url = run(longer, f"{tmp_path}/in/", tmp_path / "url", workers=2, **how)
    assert (url.num_samples, url.num_failed) == (20, 10)
    records = [record for record in iter_records(bad.read_bytes()) if isinstance(record, BadRecord)]
    assert {(record.url, record.key) for record in records} >= {(f"{tmp_path}/in/000000.tar", "k01")}
    dataset = StreamingDataset(f"{tmp_path}/in/", where="cls != 1", shuffle=False)
    assert run(longer, dataset, tmp_path / "where", workers=1).num_inputs == 20
    assert members(tmp_path / "where") == members(tmp_path / "url")
    with pytest.raises(NotFoundError):
        here(longer, f"{tmp_path}/nowhere/", tmp_path / "x")


@pytest.mark.parametrize(
    ("inputs", "same"), [(np.arange(6), [0, 1, 2, 3, 4, 5]), (("a", "b"), ["a", "b"]), (range(4, 0, -2), [4, 2])]
)
def test_sequences_are_inputs(tmp_path: Path, inputs: Any, same: list[Any]) -> None:
    here(lambda value: {"json": [value]}, inputs, tmp_path / "t")
    assert [json.loads(value)[0] for value in members(tmp_path / "t").values()] == same


@dataclass(frozen=True)
class Item:
    path: Any
    label: int = 0


def holds_itself(path: str) -> list[Any]:
    inputs: list[Any] = [path]
    inputs.append(inputs)
    return inputs


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda path: path, os.fsencode, Path, lambda path: {"p": [path]}, lambda path: ((path,),),
        lambda path: {"a": {"p": path}}, lambda path: [{"a": ({"b": [Path(path)]},)}], lambda path: {path, "other"},
        lambda path: frozenset({(path, 1)}), Item, lambda path: [Item({"p": [Item(path)]})],
        lambda path: (1, np.array([path])), lambda path: np.array([[path, None]], object), holds_itself,
    ],
)  # fmt: skip
def test_a_file_that_changed_is_seen_however_deep_an_input_names_it(tmp_path: Path, wrapped: Any) -> None:
    def read(given: Any) -> dict[str, str]:
        del given
        return {"txt": file.read_text()}

    file = tmp_path / "in.txt"
    for text in ("one", "two!"):
        file.write_text(text)
        assert not here(read, [wrapped(str(file))], tmp_path / "t").was_complete
        assert members(tmp_path / "t") == {"000000000.txt": text.encode()}
        assert here(read, [wrapped(str(file))], tmp_path / "t").was_complete


def test_a_file_that_changed_is_seen_in_an_array_of_names(tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    for text in ("one", "two!"):
        file.write_text(text)
        here(lambda path: {"txt": Path(path).read_text()}, np.array([str(file)]), tmp_path / "t")
        assert members(tmp_path / "t") == {"000000000.txt": text.encode()}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("as_given", [os.fsdecode, bytes])
def test_a_file_whose_name_is_not_utf8_is_refused_in_words(tmp_path: Path, as_given: Any) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.txt"
    with open(name, "wb"):
        pass
    with pytest.raises(ConfigError, match=r"xff.txt' is not UTF-8.*rename the file"):
        here(lambda _: {"txt": "x"}, [as_given(name)], tmp_path / "t")


def test_dataclasses_of_other_values_are_other_inputs(tmp_path: Path) -> None:
    here(lambda item: {"txt": str(item.label)}, [Item("x", 1)], tmp_path / "t")
    with pytest.raises(TargetNotEmptyError):
        here(lambda item: {"txt": str(item.label)}, [Item("x", 2)], tmp_path / "t")


def test_keys_of_ones_own_must_differ(tmp_path: Path) -> None:
    def keyed(number: int) -> Any:
        return {"__key__": f"n{number % 5}", "txt": ""}

    with pytest.raises(DuplicateKeyError, match="'n0'") as raised:
        here(keyed, range(10, 20), tmp_path / "t", max_samples=2)
    assert "It is of input 5 (15), by" in "\n".join(raised.value.__notes__)
    with pytest.raises(DuplicateKeyError, match="'n0'"):  # also by the run that goes on
        here(keyed, range(10, 20), tmp_path / "t", max_samples=2)
    assert here(keyed, range(5), tmp_path / "u").num_samples == 5


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("text", "expected a sample .*got a str"),
        ([{"txt": ""}, 3], "got a list with a int in it"),
        ({}, "no field but __key__; to leave it out return None"),
        ({"__key__": "a.b", "txt": ""}, "contains '.'"),
        ({"A": b""}, "upper-case"),
        ({"jpg": np.zeros((2, 2, 3), np.uint8)}, "an array belongs into a .npy field"),
    ],
)
def test_what_cannot_be_a_sample_is_a_failing_input(tmp_path: Path, result: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        here(lambda _: result, range(2), tmp_path / "t")
    assert "failed on input 0 (0)" in "\n".join(raised.value.__notes__)
    with pytest.raises(DataError, match="it failed on 2"):
        here(lambda _: result, range(2), tmp_path / "t", on_error="drop", max_bad_samples=2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"inputs": (number for number in range(3))}, r"pass list\(inputs\)"),
        ({"inputs": {"a": 1}}, "expected a sequence"),
        ({"inputs": 7}, "expected a sequence"),
        ({"fn": 7}, "expected a function"),
        ({"workers": -1}, "workers"),
        ({"engine": "dask"}, "engine"),
        ({"engine": "ray", "workers": 0}, "leave engine='ray' out"),
        ({"workers": 0, "memory": "1GB"}, "memory"),
        ({"on_error": "skip"}, "on_error"),
        ({"max_bad_samples": 3}, "max_bad_samples is for on_error='drop'"),
        ({"bad_samples_file": "x"}, "bad_samples_file is for on_error='drop'"),
        ({"on_error": "drop", "max_bad_samples": -1}, "max_bad_samples"),
        ({"max_bytes": "many"}, "max_bytes"),
        ({"max_samples": 0}, "max_samples"),
        ({"columns": "json.i"}, "columns"),
        ({"target": "out/000000.tar"}, "as the target"),
    ],
)
def test_options_that_cannot_act_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    arguments = {"fn": varied, "inputs": range(3), "target": tmp_path / "t", "progress": False, **options}
    with pytest.raises(ConfigError, match=told):
        optimize(**arguments)
    assert not (tmp_path / "t").exists()


def test_a_dry_run_calls_nothing_and_writes_nothing(tmp_path: Path) -> None:
    """What ``--dry-run`` of the commands is: a store that is read-only. All that can be refused before is."""
    with pytest.raises(ReadOnlyError) as stopped:
        optimize(exits, range(10), tmp_path / "t", workers=1, storage_options={"read_only": True})
    assert vars(stopped.value)["work"] == "10 inputs"
    assert not (tmp_path / "t").exists()
    optimize(varied, range(10), tmp_path / "t", workers=1)
    before = contents(tmp_path / "t")
    with pytest.raises(TargetNotEmptyError):
        optimize(varied, range(11), tmp_path / "t", workers=1, storage_options={"read_only": True})
    assert contents(tmp_path / "t") == before


@pytest.mark.thorough
def test_progress_counts_inputs(tmp_path: Path) -> None:
    class Told(NoProgress):
        num = num_bytes = 0
        total: int | None = None

        def start(self, *, total_bytes: int | None, total: int | None = None) -> None:
            self.total = total

        def advance(self, *, num_bytes: int = 0, num: int = 0) -> None:
            self.num += num
            self.num_bytes += num_bytes

    told = Told()
    optimize(varied, range(300), tmp_path / "t", workers=1, progress=told)
    assert (told.num, told.total) == (300, 300)
    assert told.num_bytes == sum(map(len, members(tmp_path / "t").values()))


class Mortal(ThreadPoolExecutor):
    """Does not survive calls with one input."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        start, part, _, avoid = args[0]
        if 31 in range(start, start + len(part)) and 31 not in avoid:
            function = _die
        return super().submit(function, *args, **kwargs)


def _die(*_: Any) -> None:
    raise WorkerDiedError("gone")


def test_an_input_that_no_call_elsewhere_survives_is_found() -> None:
    work = Produce(function=made_samples.plain, read=ReadHere(), columns={}, name="plain")
    with Mortal(3) as executor:
        items = list(ExecutorRunner(work, executor, 4).items(lambda start, stop: [*range(start, stop)], 10, 90, 0))
    assert [item.meta.number for item in items] == list(range(10, 90))
    assert [item.meta.number for item in items if item.meta.kind is Kind.FAILED] == [31]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shared_memory_holds_what_was_put_until_it_is_freed(data: st.DataObject) -> None:
    """Regions never overlap while they are held; one that is larger than all fits alone."""
    fd = unnamed_file("test-ring")
    ring, held = Ring(fd, 4 * PAGESIZE), deque[tuple[int, bytes]]()
    for number in range(data.draw(st.integers(1, 40))):
        size = data.draw(st.sampled_from([0, 1, 100, PAGESIZE, 3 * PAGESIZE, 4 * PAGESIZE, 9 * PAGESIZE]))
        content = bytes([number]) * size
        while not ring.has_room(size):
            assert held
            held.popleft()
            ring.free(1)
        held.append((ring.put([content[: size // 2], content[size // 2 :]], size), content))
        for offset, expected in held:
            assert os.pread(fd, len(expected), offset) == expected
    os.close(fd)


@pytest.mark.thorough
def test_the_program_of_the_docs_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/tools/optimize.md").read_text()
    text = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "photos").mkdir()
    for number, size in enumerate([(300, 200), (80, 64), (63, 200), (64, 64)]):
        Image.new("RGB", size).save(tmp_path / f"photos/{number}.jpg")
    ran = script(tmp_path, text)
    assert (ran.stdout, ran.returncode) == ("3 samples, 1 images too small\n", 0), ran.stderr
    assert json.loads(members(tmp_path / "out")["000000003.json"]) == {"path": "photos/3.jpg", "size": [64, 64]}
