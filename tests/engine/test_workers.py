"""Decode workers: the same batches as in this process, whatever happens to the workers; and nothing left behind."""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from streaming.build.batches.build import BadSample, BatchBuilder, Recipe, SourceRecipe
from streaming.build.batches.rows import FieldRange, Rows
from streaming.build.decode import resolve_decoders
from streaming.common import platforms
from streaming.errors import ChecksumError, ConfigError, DecodeError, WorkerDiedError, WorkerError
from streaming.run.engine.memory.arena import Arena
from streaming.run.engine.workers.fork_server import SHARED, ForkServer
from streaming.run.engine.workers.pool import MAX_DEATHS, WorkerPool
from streaming.run.engine.workers.ring import BatchRing
from tests.support.code.folders import ROOT
from tests.support.processes.forked import Forked
from tests.support.processes.leftovers import descriptors
from tests.support.processes.waiting import PATIENCE_S, until
from tests.support.sets.data_sets import write_set

URLS = ["file:///a/000.tar", "file:///a/001.tar"]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One fork server for all pools of this file, as it takes a second or more to start."""
    server = ForkServer()
    yield server
    server.close()


class Bench:
    """An arena with samples in it, a ring, and pools over them."""

    def __init__(self, server: ForkServer) -> None:
        self.arena = Arena(4 << 20)
        self.ring = BatchRing(4, 1 << 16)
        self.server = server
        self.pools: list[WorkerPool] = []

    def rows(self, samples: list[dict[str, bytes]]) -> Rows:
        """The samples, in the arena."""
        names = sorted({name for sample in samples for name in sample})
        sizes = {name: np.array([len(sample.get(name, b"")) if name in sample else -1 for sample in samples])
                 for name in names}  # fmt: skip
        starts = {name: np.zeros(len(samples), np.int64) for name in names}
        place = self.arena.allocate(sum(512 + len(data) for sample in samples for data in sample.values()) + 512)
        assert place is not None
        for i, sample in enumerate(samples):
            for name, data in sample.items():
                starts[name][i] = place
                self.arena.view[place : place + len(data)] = data
                place += -(-max(len(data), 1) // 512) * 512
        return Rows(
            memory=self.arena.memory,
            view=self.arena.view,
            keys=[f"{i:05d}" for i in range(len(samples))],
            urls=[URLS[i * 2 // len(samples)] for i in range(len(samples))],
            fields={name: FieldRange(starts=starts[name], sizes=sizes[name]) for name in names},
            damage={},
        )

    def pool(self, recipe: Recipe, num_workers: int = 1) -> WorkerPool:
        pool = WorkerPool(num_workers, recipe, self.arena, ring=self.ring, server=self.server)
        self.pools.append(pool)
        return pool


@pytest.fixture
def bench(server: ForkServer) -> Iterator[Bench]:
    bench = Bench(server)
    yield bench
    for pool in bench.pools:
        pool.close()
    bench.ring.close()
    bench.arena.close()


def no_substitutes(row: int) -> Iterator[Rows]:
    return iter(())


def no_report(bad: BadSample) -> None:
    raise AssertionError(f"not expected: {bad}")


def here(recipe: Recipe, rows: Rows, valid: Any = None, substitutes: Any = no_substitutes) -> Any:
    return BatchBuilder(recipe, substitutes, lambda bad: None).build(rows, valid)


def recipe_of(decode: Any = "auto", collate_fn: Any = None, finish: Any = None, **options: Any) -> Recipe:
    return Recipe(
        parts=(SourceRecipe(decoders=resolve_decoders(decode), **options),), collate_fn=collate_fn, finish=finish
    )


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b, strict=True)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for name in a:
            assert_same(a[name], b[name])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def image(kind: str, seed: int, size: tuple[int, int] = (20, 30)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez(out, a=array)
    return out.getvalue()


N = 8
KINDS: dict[str, tuple[Any, list[dict[str, bytes]]]] = {
    "raw": (None, [{"bin": bytes([i]) * (1 + 7000 * i)} for i in range(N)]),
    "small raw": (None, [{"bin": bytes([i]) * i} for i in range(N)]),
    "text": ("auto", [{"txt": f"täxt {i}".encode()} for i in range(N)]),
    "integer": ("auto", [{"cls": str(i).encode()} for i in range(N)]),
    "number": ("auto", [{"float": str(i / 3).encode()} for i in range(N)]),
    "json": ("auto", [{"json": json.dumps({"i": i, "l": [i] * i}).encode()} for i in range(N)]),
    "npy": ("auto", [{"npy": npy(np.arange(6.0).reshape(2, 3) + i)} for i in range(N)]),
    "npy of shapes": ("auto", [{"npy": npy(np.arange(i, dtype=np.int16))} for i in range(N)]),
    "npz": ("auto", [{"npz": npz(np.arange(6) + i)} for i in range(N)]),
    "array": ({"tok": "array:uint16->int64:4x8"}, [{"tok": bytes(range(i, i + 64))} for i in range(N)]),
    "array of sizes": ({"tok": np.int32}, [{"tok": bytes(4 * i)} for i in range(1, N + 1)]),
    "jpeg": ("auto", [{"jpg": image("JPEG", i)} for i in range(N)]),
    "jpeg resized": ("rgb8:16x12", [{"jpg": image("JPEG", i, (40 + i, 50))} for i in range(N)]),
    "png float": ("rgb", [{"png": image("PNG", i)} for i in range(N)]),
    "pil": ("pil", [{"png": image("PNG", i)} for i in range(N)]),
    "missing fields": ("auto", [{"txt": b"x", **({"cls": b"3"} if i % 2 else {})} for i in range(N)]),
    "functions": ({"bin": lambda data: {"n": len(data), "t": torch.full((2,), len(data))}},
                  [{"bin": bytes(i)} for i in range(N)]),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_this_process(bench: Bench, kind: str) -> None:
    decode, samples = KINDS[kind]
    recipe, rows = recipe_of(decode), bench.rows(samples)
    valid = np.arange(N) < 5
    pool = bench.pool(recipe)
    for mask in (None, valid):
        got = pool.build(rows, mask, no_substitutes, no_report)
        if kind == "pil":
            got["png"] = [np.array(one) for one in got["png"]]
            expected = here(recipe, rows, mask)
            expected["png"] = [np.array(one) for one in expected["png"]]
            assert_same(got, expected)
        else:
            assert_same(got, here(recipe, rows, mask))


def numbers(bench: Bench, n: int = N) -> Rows:
    return bench.rows([{"cls": str(i).encode(), "txt": b"t" * i} for i in range(n)])


def test_closures_transforms_and_collate_functions_travel(bench: Bench) -> None:
    offset = 100

    class Doubled:
        def __init__(self, value: int) -> None:
            self.value = value

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Doubled) and self.value == other.value

        __hash__ = None  # type: ignore[assignment]

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "more": sample["cls"] + offset, "own": Doubled(sample["cls"] * 2)}

    recipe = recipe_of(transform=transform)
    rows = numbers(bench)
    got = bench.pool(recipe).build(rows, None, no_substitutes, no_report)
    assert_same(got, here(recipe, rows))
    assert type(got["own"][1]) is Doubled

    recipe = recipe_of(collate_fn=lambda samples: (len(samples), [torch.tensor(s["cls"]) for s in samples], offset))
    got = bench.pool(recipe).build(rows, None, no_substitutes, no_report)
    assert_same(got, here(recipe, rows))


def test_the_last_step_is_done_in_this_process(bench: Bench) -> None:
    recipe = recipe_of(finish=lambda batch: (os.getpid(), threading.get_ident(), batch))
    pid, thread, batch = bench.pool(recipe).build(numbers(bench), None, no_substitutes, no_report)
    assert (pid, thread) == (os.getpid(), threading.get_ident())
    assert batch["cls"].tolist() == list(range(N))


def test_many_threads_and_workers_give_each_caller_its_own_batch(bench: Bench) -> None:
    recipe = recipe_of()
    pool = bench.pool(recipe, 2)
    batches = [bench.rows([{"cls": str(100 * b + i).encode()} for i in range(N)]) for b in range(12)]
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda rows: pool.build(rows, None, no_substitutes, no_report), batches * 3))
    for batch, rows in zip(got, batches * 3, strict=True):
        assert_same(batch, here(recipe, rows))
    until(lambda: len(pool.pids) == 2, "the second worker is up, too")


def test_hoarded_batches_do_not_change(bench: Bench) -> None:
    pool = bench.pool(recipe_of())
    kept = []
    for b in range(50):
        rows = bench.rows([{"cls": str(100 * b + i).encode()} for i in range(4)])
        kept.append(pool.build(rows, None, no_substitutes, no_report)["cls"])
    assert [one.tolist() for one in kept] == [[100 * b + i for i in range(4)] for b in range(50)]
    assert bench.ring.num_taken <= 4 + 32
    del kept
    assert (bench.ring.num_taken, bench.ring.num_free) == (0, 4)
    rows = numbers(bench)
    assert pool.build(rows, None, no_substitutes, no_report)["cls"].tolist() == list(range(N))


def test_batches_larger_than_a_slot_grow_it(bench: Bench) -> None:
    recipe = recipe_of(transform=lambda sample: {**sample, "big": np.full((64, 1024), sample["cls"])})
    pool = bench.pool(recipe)
    rows = numbers(bench)
    for _ in range(3):
        assert_same(pool.build(rows, None, no_substitutes, no_report), here(recipe, rows))


# --- substitutes and reports ---


def odd_fails(sample: dict[str, Any]) -> dict[str, Any] | None:
    if sample["cls"] % 4 == 1:
        raise ZeroDivisionError(f"no {sample['cls']}")
    return None if sample["cls"] % 4 == 3 else sample


def single(cls: int) -> Rows:
    data = str(cls).encode()
    where = FieldRange(starts=np.array([0]), sizes=np.array([len(data)]))
    return Rows(memory=data, view=memoryview(data), keys=[f"s{cls}"], urls=["file:///s.tar"], fields={"cls": where},
                damage={})  # fmt: skip


def stand_ins(row: int) -> Iterator[Rows]:
    yield single(1001)  # fails, too
    yield single(1003)  # dropped
    yield single(2000 + 4 * row)


@pytest.mark.thorough
@pytest.mark.parametrize("on_error", ["substitute", "skip"])
def test_substitutes_and_reports_are_those_of_this_process(bench: Bench, on_error: Any) -> None:
    recipe = recipe_of(transform=odd_fails, on_error=on_error)
    rows = numbers(bench)
    rows = replace(rows, damage={2: ChecksumError("bytes 5-9 differ")})
    expected: list[BadSample] = []
    reference = BatchBuilder(recipe, stand_ins, expected.append).build(rows, None)
    got: list[BadSample] = []
    assert_same(bench.pool(recipe).build(rows, None, stand_ins, got.append), reference)
    assert got == expected
    assert {bad.stage for bad in got} == {"fetch", "transform"}


@pytest.mark.thorough
def test_what_report_and_substitutes_raise_aborts_the_batch(bench: Bench) -> None:
    pool = bench.pool(recipe_of(transform=odd_fails))

    class StopError(Exception):
        pass

    def stop(_: object) -> Any:
        raise StopError

    for substitutes, report in ((stand_ins, stop), (stop, lambda bad: None)):
        with pytest.raises(StopError):
            pool.build(numbers(bench), None, substitutes, report)
    pids = pool.pids
    rows = bench.rows([{"cls": b"4"}])
    assert pool.build(rows, None, no_substitutes, no_report)["cls"].tolist() == [4]
    assert pool.pids == pids, "the worker is as good as before"
    assert bench.ring.num_taken == 0


# --- errors ---


@pytest.mark.thorough
def test_errors_arrive_with_shard_key_stage_and_traceback(bench: Bench) -> None:
    pool = bench.pool(recipe_of(transform=odd_fails, on_error="raise"))
    with pytest.raises(DecodeError, match=r"a/000\.tar: sample '00001': transform raised ZeroDivisionError: no 1") as e:
        pool.build(numbers(bench), None, no_substitutes, no_report)
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert "odd_fails" in e.value.__notes__[-1]
    assert f"in decode worker {pool.pids[0]}" in e.value.__notes__[-1]

    pool = bench.pool(recipe_of({"bin": "json"}, on_error="raise"))
    with pytest.raises(DecodeError, match=r"'00001': field 'bin'"):
        pool.build(bench.rows([{"bin": b"1"}, {"bin": b"{"}]), None, no_substitutes, no_report)


def test_errors_of_collate_keep_their_type(bench: Bench) -> None:
    class OwnError(Exception):
        pass

    class StubbornError(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    def collate(samples: list[Any]) -> Any:
        kinds = {0: OwnError("mine"), 1: StubbornError(1, 2), 2: KeyError("k"), 3: SystemExit(3), 4: MemoryError()}
        raise kinds[samples[0]["cls"]]

    pool = bench.pool(recipe_of(collate_fn=collate))
    expected = [(OwnError, "mine"), (WorkerError, "StubbornError: 1 and 2"), (KeyError, "k"), (SystemExit, "3"),
                (MemoryError, None)]  # fmt: skip
    for i, (kind, text) in enumerate(expected):
        with pytest.raises(kind, match=text) as e:
            pool.build(bench.rows([{"cls": str(i).encode()}]), None, no_substitutes, no_report)
        assert "1 samples, '00000' to '00000', of file:///a/000.tar" in e.value.__notes__[-1]
        assert "in collate" in e.value.__notes__[-1]


def test_what_cannot_be_pickled_is_said_at_once(bench: Bench) -> None:
    lock = threading.Lock()

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return sample

    with pytest.raises(ConfigError, match=r"cannot be sent to worker processes: TypeError.*num_workers=0"):
        bench.pool(recipe_of(transform=transform))
    with pytest.raises(ConfigError, match="at least one worker, got 0"):
        bench.pool(recipe_of(), 0)


def test_what_does_not_load_in_a_worker_says_so(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "only_here_module.py").write_text("def transform(sample):\n    return sample\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("only_here_module")
    sys.path.remove(str(tmp_path))
    pool = bench.pool(recipe_of(transform=module.transform))
    cure = "Append the folder that holds 'only_here_module' to sys.path before the loader is made"
    with pytest.raises(ConfigError, match=f"does not load in a worker process: ModuleNotFoundError.*{cure}"):
        pool.build(numbers(bench), None, no_substitutes, no_report)
    sys.path.append(str(tmp_path))
    try:
        bench.pool(recipe_of(transform=module.transform)).build(numbers(bench), None, no_substitutes, no_report)
    finally:
        sys.path.remove(str(tmp_path))


# --- deaths ---


def test_a_worker_that_is_killed_is_replaced_and_its_batch_is_the_same(bench: Bench, tmp_path: Path) -> None:
    fifo, flag = str(tmp_path / "fifo"), tmp_path / "flag"
    os.mkfifo(fifo)

    def transform(sample: dict[str, Any]) -> dict[str, Any] | None:
        if sample["cls"] == 1:
            raise ValueError("bad")
        if sample["cls"] == 5 and not flag.exists():
            flag.touch()
            with open(fifo, "w") as out:
                out.write(str(os.getpid()))
            threading.Event().wait()
        return sample

    recipe = recipe_of(transform=transform)
    rows, reports = numbers(bench), []
    pool = bench.pool(recipe, 2)
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(pool.build, rows, None, stand_ins, reports.append)
        with open(fifo) as pids:
            killed = int(pids.read())
        assert killed in pool.pids
        assert any(" builds batch " in line for line in pool.describe())
        os.kill(killed, signal.SIGKILL)
        got = coming.result(60)
    assert_same(got, here(recipe, rows, substitutes=stand_ins))
    assert [bad.key for bad in reports] == ["00001"], "once, though the batch was begun twice"
    assert killed not in pool.pids
    assert not psutil.pid_exists(killed), "reaped"


@pytest.mark.parametrize(
    ("death", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL (not by the kernel for lack of memory"),
        (lambda: os._exit(7), "exited with code 7"),
        (lambda: signal.raise_signal(signal.SIGSEGV), "was killed by SIGSEGV"),
    ],
)
def test_a_batch_that_keeps_killing_its_workers_is_named(bench: Bench, death: Any, said: str) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 3:
            death()
        return sample

    pool = bench.pool(recipe_of(transform=transform))
    with pytest.raises(WorkerDiedError) as e:
        pool.build(numbers(bench), None, no_substitutes, no_report)
    message = str(e.value)
    assert message.count(said) == MAX_DEATHS
    assert "8 samples, '00000' to '00007', of file:///a/000.tar, file:///a/001.tar" in message
    assert "file:///a/000.tar '00003'" in message
    rows = bench.rows([{"cls": b"9"}])
    assert pool.build(rows, None, no_substitutes, no_report)["cls"].tolist() == [9], "the pool goes on"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("7", "was killed by SIGKILL (not by the kernel for lack of memory"),
        ("8", "was killed by SIGKILL by the kernel, for lack of memory (such kills on this machine meanwhile: 1)"),
        (None, "was killed by SIGKILL (probably by the kernel, for lack of memory)"),
    ],
)
def test_workers_that_die_are_replaced_with_a_word_and_a_count(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, told: str | None, said: str
) -> None:
    """The first, the second, the fourth, with what each was at."""

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    kills = iter(["7"])
    shown = platforms._text_of

    def count(folder: str, name: str) -> str | None:
        if name != "vmstat":
            return shown(folder, name)
        now = next(kills, told)
        return now and f"nr_free_pages 5\noom_kill {now}\n"

    monkeypatch.setattr(platforms, "_text_of", count)
    pool = bench.pool(recipe_of(transform=transform))
    for _ in range(2):
        with pytest.raises(WorkerDiedError):
            pool.build(numbers(bench), None, no_substitutes, no_report, batch=5)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    counts = [re.search(r"that have died: (\d+) ", message) for message in messages]
    assert [found and int(found[1]) for found in counts] == [1, 2, 4]
    assert said in messages[0]
    for message in messages:
        assert re.search(r"It builds batch 5 for .* at sample 4 of 8: '00003' of file:///a/000.tar", message), message
        assert "Lower num_workers, batch_size or memory_limit" in message


def test_workers_that_do_not_start_are_not_blamed_on_the_batch(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    SHARED.close()  # one that is running already would do
    arena, ring = Arena(1 << 20), BatchRing(2)
    bench = Bench.__new__(Bench)
    bench.arena = arena
    pool = WorkerPool(1, recipe_of(), arena, ring=ring)
    with closing(pool), pytest.raises(WorkerDiedError, match="decode workers do not start"):
        pool.build(numbers(bench), None, no_substitutes, no_report)
    ring.close()
    arena.close()


@pytest.mark.thorough
def test_idle_workers_and_their_server_may_be_killed_and_a_forgotten_pool_ends_its_processes() -> None:
    before = descendants()
    ring, arena = BatchRing(2), Arena(1 << 20)
    bench = Bench.__new__(Bench)
    bench.arena = arena
    recipe = recipe_of()
    pool = WorkerPool(1, recipe, arena, ring=ring)
    rows = numbers(bench)
    first = pool.build(rows, None, no_substitutes, no_report)
    (idle,) = pool.pids
    os.kill(idle, signal.SIGKILL)
    assert_same(pool.build(rows, None, no_substitutes, no_report), first)
    old = pool.server_pid
    assert old is not None
    (worker,) = pool.pids
    os.kill(old, signal.SIGKILL)
    wait_gone([worker])
    assert_same(pool.build(rows, None, no_substitutes, no_report), first)
    assert pool.server_pid != old
    assert descendants() - before
    del pool
    assert not descendants() - before
    ring.close()
    arena.close()


# --- the end ---


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.thorough
def test_close_leaves_no_process_and_no_descriptor_in_any_state(tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 7:
            with open(fifo, "w") as out:
                out.write("here")
            threading.Event().wait()
        return sample

    before, opened = descendants(), descriptors()
    arena, ring = Arena(1 << 20), BatchRing(2)
    bench = Bench.__new__(Bench)
    bench.arena = arena
    pool = WorkerPool(2, recipe_of(transform=transform), arena, ring=ring)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.build(numbers(bench), None, no_substitutes, no_report)
    pool = WorkerPool(2, recipe_of(transform=transform), arena, ring=ring)
    pool.start()
    pool.close()  # before anything is up
    pool = WorkerPool(2, recipe_of(transform=transform), arena, ring=ring)
    assert pool.build(numbers(bench, 4), None, no_substitutes, no_report)["cls"].tolist() == [0, 1, 2, 3]
    with ThreadPoolExecutor(3) as threads:
        stuck = [threads.submit(pool.build, numbers(bench), None, no_substitutes, no_report)]
        with open(fifo) as signals:
            assert signals.read() == "here"
        stuck += [threads.submit(pool.build, numbers(bench), None, no_substitutes, no_report) for _ in range(2)]
        pool.close()
        for one in stuck:
            with pytest.raises(RuntimeError, match="closed"):
                one.result(PATIENCE_S)
    pool.close()
    ring.close()
    arena.close()
    assert not descendants() - before
    assert not descriptors() - opened


SCRIPT = """
import os, signal, sys
import numpy as np
from streaming.build.decode import resolve_decoders
from streaming.run.engine.memory.arena import Arena
from streaming.build.batches.build import Recipe, Rows, SourceRecipe
from streaming.run.engine.workers.ring import BatchRing
from streaming.build.batches.rows import FieldRange
from streaming.run.engine.workers.pool import WorkerPool

OFFSET = 10
class Own(Exception): pass
def helper(x): return x + OFFSET
def transform(sample):
    if sample["cls"] == 9: raise Own("nine")
    return {**sample, "more": helper(sample["cls"])}
arena, ring = Arena(1 << 20), BatchRing(2)
part = SourceRecipe(decoders=resolve_decoders(), transform=transform, on_error="raise")
pool = WorkerPool(2, Recipe(parts=(part,)), arena, ring=ring)
def rows(data):
    arena.view[:len(data)] = data
    where = FieldRange(starts=np.arange(len(data)), sizes=np.ones(len(data), np.int64))
    return Rows(memory=arena.memory, view=arena.view, keys=["k"] * len(data), urls=["u"] * len(data),
                fields={"cls": where}, damage={})
batch = pool.build(rows(b"123"), None, lambda i: iter(()), print)
print(batch["more"].tolist(), *pool.pids, pool.server_pid, flush=True)
"""


def run_script(tmp_path: Path, tail: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + tail)
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )  # fmt: skip


def wait_gone(pids: list[int]) -> None:
    for process in [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]:
        try:
            process.wait(PATIENCE_S)
        except psutil.NoSuchProcess:
            continue
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@pytest.mark.thorough
def test_a_script_without_a_guard_works_and_ends_in_silence(tmp_path: Path) -> None:
    """In the middle of a loop, too, with workers that are at work."""
    url = write_set(tmp_path / "set", (80,)).url
    tail = f"""
try:
    pool.build(rows(b"9"), None, lambda i: iter(()), print)
except Exception as error:
    assert type(error.__cause__) is Own, error.__cause__
from streaming import DataLoader, StreamingDataset
batches = iter(DataLoader(StreamingDataset({url!r}, transform=dict), batch_size=8, num_workers=2))
next(batches)
"""
    with run_script(tmp_path, tail) as script:
        try:
            out, err = script.communicate(timeout=PATIENCE_S)
        finally:
            script.kill()  # or leaving it would wait, too
    assert (script.returncode, err) == (0, "")
    values, pids = out.strip().split("]")
    assert values == "[11, 12, 13"
    wait_gone([int(pid) for pid in pids.split()])


def named_files(pid: int) -> list[str]:
    """Files in memory or temporary folders that a process has open or mapped; they would outlive it."""
    names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    names += [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    installed = (f"{ROOT}/", f"{sys.prefix}/", f"{sys.base_prefix}/")  # a checkout may itself lie in a temporary folder
    return [
        name for name in names if name.startswith(("/dev/shm", "/tmp", "/var/tmp")) and not name.startswith(installed)
    ]


@pytest.mark.thorough
def test_ctrl_c_reaches_the_training_loop_alone_and_a_killed_parent_leaves_nothing(
    tmp_path: Path, forked: Forked
) -> None:
    """A terminal signals the whole process group; the pool still works in the handler. SIGKILL ends all of it."""
    tail = """
import threading
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    os.killpg(os.getpgid(0), signal.SIGINT)
    threading.Event().wait(60)
except KeyboardInterrupt:
    before = set(pool.pids)  # another one may still be starting
    built = pool.build(rows(b"45"), None, lambda i: iter(()), print)
    print(built["more"].tolist(), bool(before) and before <= set(pool.pids), flush=True)
threading.Event().wait()
"""
    said = tmp_path / "said"
    os.mkfifo(said)
    with open(os.open(said, os.O_RDONLY | os.O_NONBLOCK)) as lines:
        script = forked.start(SCRIPT + tail, output=said, leads=True)
        try:
            told = ""
            while told.count("\n") < 2:
                assert select.select([lines], [], [], 100)[0], f"the script says no more than {told!r}"
                told += lines.read()
            pids = [int(pid) for pid in told.splitlines()[0].split("]")[1].split()]
            named = [name for pid in (script.pid, *pids) for name in named_files(pid)]
        finally:
            script.kill()
            script.wait(PATIENCE_S)
        wait_gone(pids)
    assert told.splitlines()[1:] == ["[14, 15] True"]
    assert [name for name in named if name != str(said)] == []


def test_an_interrupt_in_the_middle_of_a_batch_replaces_the_worker(bench: Bench, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    parent = os.getpid()

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 3 and not flag.exists():
            flag.touch()
            os.kill(parent, signal.SIGINT)
            threading.Event().wait()
        return sample

    recipe, rows = recipe_of(transform=transform), numbers(bench)
    pool = bench.pool(recipe)
    with pytest.raises(KeyboardInterrupt):
        pool.build(rows, None, no_substitutes, no_report)
    assert_same(pool.build(rows, None, no_substitutes, no_report), here(recipe, rows))


def test_seeded_batches_are_the_same_on_every_worker(bench: Bench) -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "r": (random.random(), float(np.random.rand()), float(torch.rand(())))}  # noqa: NPY002

    recipe = recipe_of(transform=transform)
    rows = numbers(bench)
    one, other = (bench.pool(recipe).build(rows, None, no_substitutes, no_report, seed=5)["r"] for _ in range(2))
    assert one == other
    one, other = (bench.pool(recipe).build(rows, None, no_substitutes, no_report)["r"] for _ in range(2))
    assert not set(one) & set(other), "unseeded workers do not repeat one another"
