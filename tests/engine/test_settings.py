"""Settings of the process are those of every batch, whoever builds it; what a function changes here is put back."""

from __future__ import annotations

import csv
import decimal
import gc
import importlib
import io
import locale
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, OrdinaryDataset, StreamingDataset
from streaming.build.decode.registry import BY_EXTENSION
from streaming.errors import ConfigError
from streaming.run.engine.workers.surroundings import SETTINGS, Surroundings
from tests.support.code.folders import ROOT
from tests.support.processes.held_workers import Held, pool_of
from tests.support.processes.waiting import ended, started
from tests.support.tiers import first_here

pytestmark = pytest.mark.usefixtures("one_fork_server")

COUNT, BATCH = 32, 4
FOLDER = Path(__file__).parent


def now() -> dict[str, Any]:
    return {one.name: one.read() for one in SETTINGS}


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """The settings of this process are as before after each test."""
    before = now()
    yield
    for one in SETTINGS:
        if one.read() != before[one.name]:
            one.lay(before[one.name])
    if Image.OPEN.pop("MINE", None) is not None:
        Image.ID[:] = [name for name in Image.ID if name != "MINE"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("settings")
    with ShardWriter(f"{folder}/{{:02d}}.tar", max_samples=8) as writer:
        for number in range(COUNT):
            writer.write({"__key__": f"{number:03d}", "cls": number, "odd": b"abc"})
    return str(folder)


# --- the table ---


@dataclass(frozen=True)
class Case:
    """How a script makes a setting, and what a function then sees.

    Attributes:
        row: The row of the table.
        make: Makes the setting.
        see: What follows from it where it is called.
    """

    row: str
    make: Callable[[], Any]
    see: Callable[[], Any]


class Mine(ImageFile.ImageFile):
    format = "MINE"

    def _open(self) -> None:
        self._size, self._mode = (3, 5), "L"


def is_mine(prefix: bytes) -> bool:
    return prefix.startswith(b"MINE")


def backwards(data: Any) -> str:
    return bytes(data)[::-1].decode()


def add_decoder() -> None:
    BY_EXTENSION["odd"] = backwards


def mode_of_a_file() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made")
        path.touch()
        return path.stat().st_mode


def raised(function: Callable[[], Any]) -> str:
    try:
        return repr(function())
    except Exception as error:
        return type(error).__name__


def warned() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def in_tokyo() -> None:
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def picture() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(48 * 48, dtype=np.uint8).reshape(48, 48)).save(out, "JPEG")
    return out.getvalue()


WHOLE = picture()
TRUNCATED = WHOLE[:-200]


CASES = [
    Case("sys.path", lambda: sys.path.append(str(FOLDER)), lambda: sys.path[-1]),
    Case("the working directory", lambda: os.chdir("/usr"), os.getcwd),
    Case("the environment", lambda: os.environ.update(OF_SETTINGS="x"), lambda: str(os.environ.get("OF_SETTINGS"))),
    Case("the time zone", in_tokyo, lambda: time.localtime(0).tm_hour),
    Case("the umask", lambda: os.umask(0o077), mode_of_a_file),
    Case("the locale", lambda: locale.setlocale(locale.LC_ALL, "C"), lambda: locale.setlocale(locale.LC_CTYPE)),
    Case("the recursion limit", lambda: sys.setrecursionlimit(3_210), sys.getrecursionlimit),
    Case(
        "sys.set_int_max_str_digits", lambda: sys.set_int_max_str_digits(0), lambda: raised(lambda: len(str(9**9_999)))
    ),
    Case("csv.field_size_limit", lambda: csv.field_size_limit(3), lambda: raised(lambda: list(csv.reader(["abcdef"])))),
    Case(
        "socket.setdefaulttimeout", lambda: socket.setdefaulttimeout(7.5), lambda: str(socket.getdefaulttimeout())
    ),
    Case(
        "decimal's context", lambda: setattr(decimal.getcontext(), "prec", 3),
        lambda: str(decimal.Decimal(1) / decimal.Decimal(3)),
    ),
    Case("NumPy's error state", lambda: np.seterr(divide="raise"), lambda: raised(lambda: np.float64(1) / zero())),
    Case("NumPy's print options", lambda: np.set_printoptions(precision=2), lambda: str(np.array([1 / 3]))),
    Case("torch's default dtype", lambda: torch.set_default_dtype(torch.float64), lambda: torch.tensor([1 / 3])),
    Case("torch's default device", lambda: torch.set_default_device("meta"), lambda: str(torch.zeros(1).device)),
    Case("torch's gradient mode", lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    Case(
        "torch's autocast", lambda: torch.set_autocast_enabled("cpu", True),
        lambda: str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype),
    ),
    Case(
        "torch's deterministic algorithms", lambda: torch.set_deterministic_debug_mode("warn"),
        torch.are_deterministic_algorithms_enabled,
    ),
    Case(
        "torch.set_float32_matmul_precision", lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    Case(
        "torch.set_flush_denormal", lambda: torch.set_flush_denormal(True), lambda: tiny() * one() == 0
    ),
    Case(
        "torch's sharing strategy", lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
        torch.multiprocessing.get_sharing_strategy,
    ),
    Case("cv2.setUseOptimized", lambda: cv2.setUseOptimized(False), cv2.useOptimized),
    Case(
        "Pillow's flags", lambda: setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
        lambda: raised(lambda: np.asarray(Image.open(io.BytesIO(TRUNCATED))).sum()),
    ),
    Case(
        "Pillow's plugins", lambda: Image.register_open("MINE", Mine, is_mine),
        lambda: raised(lambda: Image.open(io.BytesIO(b"MINE")).size),
    ),
    Case("decoders by extension and name", add_decoder, lambda: ""),  # the field says it
    Case("the warning filters", lambda: warnings.simplefilter("ignore"), lambda: raised(warned)),
]  # fmt: skip
NAMED = [pytest.param(one, id=one.row) for one in CASES]
SOME = [one for one in CASES if one.row in {"the environment", "torch's default dtype", "Pillow's flags"}]
OTHERS = [one for one in CASES if one not in SOME and not one.row.startswith("decoders")]  # these are chosen once


def zero() -> np.float64:
    return np.float64(0)


def one() -> float:
    return 1.0


def tiny() -> float:
    return 1e-310


class Seeing:
    """A transform that says what it sees of a setting, and in which process."""

    def __init__(self, see: Callable[[], Any]) -> None:
        self.see = see

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "seen": self.see(), "pid": os.getpid()}


def plain(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of batches, as it can be compared, but who built them."""
    return [
        {
            name: (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            if name != "pid"
        }
        for batch in batches
    ]


def builders(batches: list[dict[str, Any]]) -> set[int]:
    return {int(pid) for batch in batches for pid in batch["pid"]}


def test_every_row_that_is_carried_has_a_case_here() -> None:
    without = {"torchvision's image backend"}  # it is not installed here
    assert {one.name for one in SETTINGS if one.reach != "here"} - without == {one.row for one in CASES}


def test_the_page_lists_every_row_that_is_carried() -> None:
    page = " ".join((ROOT / "docs/settings.md").read_text().partition("## What is not")[0].replace("`", "").split())
    assert [one.name for one in SETTINGS if one.reach != "here" and one.name not in page] == []


@pytest.mark.parametrize("moment", first_here([3, 0, 1, 7], 1))
@pytest.mark.parametrize("case", first_here(NAMED, 10))
def test_a_setting_holds_in_every_batch_whoever_builds_it(url: str, held: Held, case: Case, moment: int) -> None:
    """In threads, in this process until workers are up, and in workers; these are up after ``moment`` batches."""

    def loader(num_workers: int) -> DataLoader:
        dataset = StreamingDataset(url, transform=Seeing(case.see), decode={"odd": "auto"})
        return DataLoader(dataset, BATCH, num_workers=num_workers)

    with loader(0) as unset:
        before = plain(list(unset))
    case.make()
    with loader(0) as here, loader(2) as there:
        expected = plain(list(here))
        batches = iter(there)
        first = held.first(batches, moment)
        rest = held.rest(there, batches)
    assert expected != before, "the setting has an effect"
    assert plain(first + rest) == expected
    if moment:
        assert builders(first) == {os.getpid()}
        assert os.getpid() not in builders(rest)


@pytest.mark.parametrize("case", first_here(SOME + OTHERS, len(SOME)), ids=lambda one: one.row)
def test_a_setting_that_changes_between_epochs_reaches_the_workers_that_run(url: str, case: Case) -> None:
    dataset = StreamingDataset(url, transform=Seeing(case.see), decode={"odd": "auto"}, shuffle=False)
    with DataLoader(dataset, BATCH, num_workers=2, num_threads=0) as there:
        first = list(there)
        case.make()
        second = list(there)
        workers = set(pool_of(there).pids)
    with DataLoader(dataset, BATCH, num_workers=0) as here:
        assert plain(second) == plain(list(here)) != plain(first)
    assert builders(first) | builders(second) <= workers


def test_what_changes_in_the_middle_of_a_run_waits_for_the_next_one(url: str, held: Held) -> None:
    """Else batches would depend on the moment at which workers are up."""
    dataset = StreamingDataset(url, transform=Seeing(lambda: (os.environ.get("OF_SETTINGS"), torch.ones(1).dtype)))
    with DataLoader(dataset, BATCH, num_workers=1) as loader:
        batches = iter(loader)
        found = held.first(batches, 2)
        os.environ["OF_SETTINGS"] = "later"
        torch.set_default_dtype(torch.float64)
        found += held.first(batches, 2)
        assert os.environ["OF_SETTINGS"] == "later"
        assert torch.get_default_dtype() is torch.float64
        found += held.rest(loader, batches)
        assert {seen for batch in found for seen in batch["seen"]} == {(None, torch.float32)}
        assert {seen for batch in loader for seen in batch["seen"]} == {("later", torch.float64)}


def modes() -> tuple[bool, bool, str]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str((WEIGHT * WEIGHT.T).dtype)


def shape_modes(sample: dict[str, Any]) -> dict[str, Any]:
    """Use a parameter as if gradients were off."""
    return {**sample, "seen": modes(), "scaled": WEIGHT.detach() * 2, "pid": os.getpid()}


WEIGHT = torch.nn.Parameter(torch.ones(2, 2))
LOOPS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad}


@pytest.mark.parametrize("mode", LOOPS)
@pytest.mark.parametrize(("num_workers", "num_threads"), [(0, 0), (0, 2), (1, 0)])
def test_functions_run_in_the_gradient_mode_of_the_loop_and_make_tensors_to_train_on(
    url: str, mode: str, num_workers: int, num_threads: int
) -> None:
    """A first batch of the loop's thread had its mode, batches of other threads and of workers none."""
    dataset = StreamingDataset(url, transform=shape_modes)
    with (
        DataLoader(dataset, BATCH, num_workers=num_workers, num_threads=num_threads) as loader,
        LOOPS[mode](),
    ):
        batches = list(loader)
        assert torch.is_inference_mode_enabled() == (mode == "inference_mode")
    seen = {tuple(one) for batch in batches for one in batch["seen"]}
    assert seen == {(mode == "enable_grad", False, "torch.float32")}
    for batch in batches:
        batch["scaled"] += 1  # refused of tensors of inference
        (batch["scaled"] * WEIGHT).sum().backward()
    assert WEIGHT.grad is not None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_are_cut_out_of_memory_are_no_tensors_of_inference(url: str, num_workers: int) -> None:
    with DataLoader(StreamingDataset(url), BATCH, num_workers=num_workers) as loader, torch.inference_mode():
        assert not any(batch["cls"].is_inference() for batch in loader)


@pytest.mark.thorough
@pytest.mark.parametrize("decode", first_here(["pil", "rgb8", "rgb8:8x8"], 1))
def test_pictures_that_are_cut_off_are_samples_or_not_whoever_decodes_them(tmp_path: Path, decode: str) -> None:
    """As it was found: of 200 samples 50 were lost in workers, and none without."""
    with ShardWriter(f"{tmp_path}/{{:02d}}.tar", max_samples=8) as writer:
        for number in range(16):
            writer.write({"__key__": f"{number:03d}", "jpg": TRUNCATED if number % 4 == 1 else WHOLE})
    lost = []
    for is_set in (False, True):
        ImageFile.LOAD_TRUNCATED_IMAGES = is_set
        for num_workers in (0, 2):
            dataset = StreamingDataset(tmp_path, decode={"jpg": decode}, max_bad_samples=1.0)
            with DataLoader(dataset, BATCH, num_workers=num_workers, num_threads=0, collate_fn=list) as loader:
                seen = sum(np.asarray(one["jpg"]).sum() for batch in loader for one in batch)
                lost.append((loader.metrics()["bad_samples"], seen))
    assert lost[0] == lost[1]
    assert lost[2] == lost[3]
    assert decode != "pil" or (lost[0][0], lost[2][0]) == (4, 0)


OF_THREADS = [one for one in CASES if one.row in {row.name for row in SETTINGS if row.reach == "thread"}]


@pytest.mark.parametrize("case", OF_THREADS, ids=lambda one: one.row)
def test_a_thread_that_builds_has_what_the_thread_of_the_loop_has_and_only_meanwhile(case: Case) -> None:
    def look() -> None:
        found.append(case.see())
        with surroundings.in_thread():
            found.append(case.see())
        found.append(case.see())

    unset, found = case.see(), list[Any]()
    case.make()
    surroundings = Surroundings.taken(of_threads=True)
    if case.row != "torch.set_flush_denormal":  # a new thread has it from the one that starts it
        ended(*started(look))
        assert found == [unset, case.see(), unset]
    found.clear()
    look()
    assert found == [case.see()] * 3 != [unset] * 3


def test_the_script_has_the_last_word_over_what_modules_set_when_they_are_imported(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import csv\ncsv.field_size_limit(7)\ndef see():\n    return csv.field_size_limit()\n"
    (tmp_path / "module_that_sets.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    see = importlib.import_module("module_that_sets").see
    csv.field_size_limit(9)
    with DataLoader(StreamingDataset(url, transform=Seeing(see)), BATCH, num_workers=1, num_threads=0) as loader:
        assert {int(seen) for batch in loader for seen in batch["seen"]} == {9}
    with DataLoader(Rows(see), BATCH, num_workers=1) as loader:
        assert {int(seen) for batch in loader for seen in batch["seen"]} == {9}


# --- what cannot be sent ---


def test_what_cannot_be_sent_is_named_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()
    np.seterrcall(lambda *_: lock.locked())
    dataset = StreamingDataset(url, transform=Seeing(os.getpid))
    with DataLoader(dataset, BATCH, num_workers=2, num_threads=0) as loader:
        for _ in range(2):
            list(loader)
    (told,) = [one.getMessage() for one in caplog.records if "cannot be laid" in one.getMessage()]
    assert "NumPy's error state (TypeError: cannot pickle" in told
    assert "worker_init_fn=" in told


def test_filters_for_a_library_that_a_worker_lacks_import_nothing(url: str) -> None:
    def category(name: str) -> type[Warning]:
        return type(name, (UserWarning,), {"__module__": "a_library_that_is_not_there"})

    def see() -> tuple[str, str]:
        """As if that library were imported now, by the function."""
        kinds = category("Rare"), category("Common")
        return raised(lambda: warnings.warn("x", kinds[0], 1)), raised(lambda: warnings.warn("x", kinds[1], 1))

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=category("Rare"))
    dataset = StreamingDataset(url, transform=Seeing(see))
    with DataLoader(dataset, BATCH, num_workers=1, num_threads=0) as loader:
        assert {seen for batch in loader for seen in batch["seen"]} == {("None", "Common")}


# --- the other way ---


def ignore(*_: object) -> None:
    """Handle a signal."""


CHANGES = [
    Case("signal handlers", lambda: signal.signal(signal.SIGUSR2, ignore), lambda: signal.getsignal(signal.SIGUSR2)),
    Case("blocked signals", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}),
         lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    Case("the garbage collector", gc.disable, gc.isenabled),
    Case("torch's number of threads", lambda: torch.set_num_threads(3), torch.get_num_threads),
    Case("the standard streams", lambda: setattr(sys, "stdout", sys.stderr), lambda: sys.stdout),
    Case("the root logger", lambda: logging.disable(logging.INFO), lambda: logging.root.manager.disable),
    *(one for one in CASES if one.row != "Pillow's plugins"),
]  # fmt: skip


def test_every_row_has_a_change_here() -> None:
    without = {"torchvision's image backend", "Pillow's plugins"}  # a plugin that is registered may be an import's
    assert {one.name for one in SETTINGS} - without == {one.row for one in CHANGES}


class Changing:
    """A transform that makes a setting at its first call."""

    def __init__(self, make: Callable[[], Any], *, fails: bool) -> None:
        self.make: Callable[[], Any] | None = make
        self.fails = fails

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.make is not None:
            self.make()
            self.make = None
            if self.fails:
                raise ValueError("changed, and failed")
        return {**sample, "pid": os.getpid()}


@pytest.mark.parametrize("fails", first_here([False, True], 1))
@pytest.mark.parametrize("case", first_here(CHANGES, 8), ids=lambda one: one.row)
def test_what_a_function_changes_here_is_put_back_and_it_runs_here_no_more(
    url: str, held: Held, caplog: pytest.LogCaptureFixture, case: Case, *, fails: bool
) -> None:
    Image.init()
    before, seen = now(), raised(case.see)
    dataset = StreamingDataset(url, transform=Changing(case.make, fails=fails), max_bad_samples=1.0)
    with DataLoader(dataset, BATCH, num_workers=1) as loader:
        batches = iter(loader)
        first = held.first(batches, 1)
        assert (now(), raised(case.see)) == (before, seen)
        held.let_go_when_somebody_waits()
        rest = list(batches)
        again = list(loader)
        assert builders(first) == {os.getpid()}
        assert os.getpid() not in builders(rest + again)
        assert loader.metrics()["batches_before_workers"] == 1
    (told,) = [
        one.getMessage() for one in caplog.records if "changed settings of the whole process" in one.getMessage()
    ]
    named = told.partition(" up: ")[2].partition(". They were put back")[0]
    assert case.row in named or case.row in {"the environment", "Pillow's flags", "signal handlers"}, told


def test_names_of_what_was_changed_hold_no_values(url: str, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    def change() -> None:
        os.environ["OF_SETTINGS"] = "a secret"
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        signal.signal(signal.SIGUSR2, ignore)

    with DataLoader(StreamingDataset(url, transform=Changing(change, fails=False)), BATCH, num_workers=1) as loader:
        held.first(iter(loader), 1)
        held.let_go.set()
    (told,) = [
        one.getMessage() for one in caplog.records if "changed settings of the whole process" in one.getMessage()
    ]
    assert "environment variable OF_SETTINGS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES, handler of SIGUSR2" in told
    assert "secret" not in caplog.text


def test_what_imports_and_first_uses_add_is_no_change(url: str, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    def first_use(sample: dict[str, Any]) -> dict[str, Any]:
        for name in [name for name in sys.modules if name == "PIL.PcxImagePlugin"]:
            del sys.modules[name]
        importlib.import_module("PIL.PcxImagePlugin")
        Image.register_open("MINE", Mine, is_mine)
        Image.init()
        return {**sample, "pid": os.getpid()}

    with DataLoader(StreamingDataset(url, transform=first_use), BATCH, num_workers=1) as loader:
        assert builders(held.first(iter(loader), 3)) == {os.getpid()}
        held.let_go.set()
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


# --- worker_init_fn ---

MADE: list[int] = []


def note(number: int) -> None:
    MADE.append(number)


def made() -> tuple[int, ...]:
    return tuple(MADE)


@pytest.mark.parametrize("kind", ["one set", "mixture", "unindexed"])
def test_worker_init_fn_is_called_with_the_number_of_each_worker_before_its_first_batch(
    url: str, tmp_path: Path, kind: str
) -> None:
    if kind == "unindexed":
        for path in Path(url).glob("*.tar"):
            shutil.copy(path, tmp_path)
        url = str(tmp_path)
    dataset: Any = StreamingDataset(url, transform=Seeing(made))
    dataset = Mixture({"a": dataset}) if kind == "mixture" else dataset
    size = {"epoch_size": COUNT} if kind == "unindexed" else {}
    with DataLoader(dataset, 1, num_workers=2, worker_init_fn=note, **size) as loader:
        batches = [*loader, *loader]
        seen = {(pid, tuple(batch["seen"][0])) for batch in batches for pid in builders([batch])}
        places = {one.pid: (one.place,) for one in pool_of(loader)._processes.all()}
    assert seen <= set(places.items()), "in all workers, once in each, and no batch was built here"
    assert set(places.values()) == {(0,), (1,)}
    assert MADE == []


def test_functions_of_the_script_share_what_worker_init_fn_sets_up(url: str) -> None:
    """They are sent by value, and still mean the same globals."""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "table = None\n"
        "def set_up(number):\n    global table\n    table = f'of worker {number}'\n"
        "def look_up(sample):\n    return {**sample, 'table': table}\n",
        script,
    )
    dataset = StreamingDataset(url, transform=script["look_up"])
    with DataLoader(dataset, BATCH, num_workers=1, worker_init_fn=script["set_up"]) as loader:
        assert {one for batch in loader for one in batch["table"]} == {"of worker 0"}
    assert script["table"] is None


def test_a_worker_that_replaces_another_has_its_number(url: str) -> None:
    with DataLoader(StreamingDataset(url, transform=Seeing(made)), BATCH, num_workers=2, worker_init_fn=note) as loader:
        batches = iter(loader)
        (dead,) = builders([next(batches)])
        os.kill(dead, signal.SIGKILL)
        seen = [*batches, *loader, *loader]
        assert len({one.place for one in pool_of(loader)._processes.all()}) == 2
    assert {tuple(one) for batch in seen for one in batch["seen"]} <= {(0,), (1,)}


def fail(number: int) -> None:
    raise RuntimeError(f"no table for {number}")


def test_what_worker_init_fn_raises_is_raised_with_the_first_batch(url: str) -> None:
    with (
        DataLoader(StreamingDataset(url, transform=Seeing(made)), BATCH, num_workers=1, worker_init_fn=fail) as loader,
        pytest.raises(ConfigError, match=r"worker_init_fn\(0\) failed in a worker process: RuntimeError: no table"),
    ):
        next(iter(loader))


def test_worker_init_fn_is_refused_where_it_would_not_be_called(url: str, caplog: pytest.LogCaptureFixture) -> None:
    for dataset in (StreamingDataset(url), OrdinaryDataset(list(range(8)))):
        with pytest.raises(ConfigError, match=r"worker_init_fn: .* there are none \(num_workers=0\)"):
            DataLoader(dataset, BATCH, worker_init_fn=note)
        with pytest.raises(ConfigError, match="worker_init_fn: expected a function of a worker's number, got 3"):
            DataLoader(dataset, BATCH, num_workers=1, worker_init_fn=3)  # type: ignore[arg-type]
    with DataLoader(StreamingDataset(url, decode=None), BATCH, num_workers=1, worker_init_fn=note) as loader:
        assert len(list(loader)) == COUNT // BATCH
    assert "worker_init_fn is not called" in caplog.text


def test_what_a_worker_was_set_up_with_stays_while_other_settings_change(url: str) -> None:
    def set_up(number: int) -> None:
        os.umask(0o027)
        os.environ["OF_WORKER"] = str(number)

    def see() -> tuple[int, str | None]:
        return mode_of_a_file() & 0o777, os.environ.get("OF_SETTINGS")

    with DataLoader(
        StreamingDataset(url, transform=Seeing(see)), BATCH, num_workers=1, worker_init_fn=set_up
    ) as loader:
        list(loader)
        os.environ["OF_SETTINGS"] = "x"
        assert {seen for batch in loader for seen in batch["seen"]} == {(0o640, "x")}


# --- data sets of torch ---


class Rows:
    """Map-style."""

    def __init__(self, see: Callable[[], Any]) -> None:
        self.see = see

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"cls": index, "seen": self.see(), "pid": os.getpid()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", first_here(SOME + OTHERS, 1), ids=lambda one: one.row,
)  # fmt: skip
def test_settings_hold_for_data_sets_of_torch(case: Case) -> None:
    with DataLoader(Rows(case.see), BATCH, num_workers=2, shuffle=False) as there:
        first = list(there)
        case.make()
        second = [] if case.row == "Pillow's plugins" else list(there)  # noted where they start only
    with DataLoader(Rows(case.see), BATCH, num_workers=2, shuffle=False) as there:
        third = list(there)
    with DataLoader(Rows(case.see), BATCH, shuffle=False) as here:
        expected = plain(list(here))
    assert plain(third) == expected != plain(first)
    assert not second or plain(second) == expected
    assert os.getpid() not in builders(first + second + third)


def test_workers_for_data_sets_of_torch_stay_while_settings_do() -> None:
    Image.init()
    with DataLoader(Rows(os.getpid), BATCH, num_workers=1) as loader:
        first = builders(list(loader))
        importlib.import_module("PIL.PcxImagePlugin")
        assert builders(list(loader)) == first
        os.environ["OF_SETTINGS"] = "x"
        assert not builders(list(loader)) & first


# --- programs ---

PROGRAM = """
import decimal, hashlib, io, locale, os, pickle, sys, time, warnings
import numpy as np, torch
from PIL import Image, ImageFile
from streaming import DataLoader, StreamingDataset
from streaming.build.decode.registry import BY_EXTENSION

class Mine(ImageFile.ImageFile):
    format = "MINE"
    def _open(self):
        self._size, self._mode = (3, 5), "L"

def raised(function):
    try:
        return repr(function())
    except Exception as error:
        return type(error).__name__

truncated, zero = pickle.loads(bytes.fromhex(sys.argv[3])), np.zeros(2)

def see(sample):
    seen = [
        __debug__, raised(lambda: np.asarray(Image.open(io.BytesIO(truncated))).sum()), str(torch.tensor([1 / 3])),
        raised(lambda: zero / zero), str(decimal.Decimal(1) / 3), os.environ["OF_SETTINGS"], os.getcwd(),
        raised(lambda: warnings.warn("careful", stacklevel=1)), raised(lambda: Image.open(io.BytesIO(b"MINE")).size),
        str(sample["odd"]), time.localtime(0).tm_hour, locale.setlocale(locale.LC_CTYPE), str(torch.zeros(1).device),
    ]
    return {"cls": sample["cls"], "seen": repr(seen), "made": np.float64(0.1) * sample["cls"]}

ImageFile.LOAD_TRUNCATED_IMAGES = True
Image.register_open("MINE", Mine, lambda prefix: prefix.startswith(b"MINE"))
BY_EXTENSION["odd"] = lambda data: bytes(data)[::-1].decode()
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
np.seterr(all="raise")
decimal.getcontext().prec = 3
os.environ.update(OF_SETTINGS="x", TZ="Asia/Tokyo")
time.tzset()
os.chdir("/usr")
warnings.simplefilter("error")
locale.setlocale(locale.LC_ALL, "C")
total = hashlib.sha256()
with DataLoader(StreamingDataset(sys.argv[1], transform=see), 4, num_workers=int(sys.argv[2])) as loader:
    for _ in range(2):
        for batch in loader:
            shown = [value.tolist() if hasattr(value, "tolist") else value for value in batch.values()]
            total.update(repr((list(batch), shown)).encode())
        os.environ["OF_SETTINGS"] = "y"
print(total.hexdigest(), set(batch["seen"]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_ten_runs_of_a_program_that_sets_all_give_equal_batches(
    url: str, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """The programs are cold: when their workers are up differs from run to run."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def shown(num_workers: int) -> str:
        words = [sys.executable, *flags, str(program), url, str(num_workers), pickle.dumps(TRUNCATED).hex()]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(words, check=False, capture_output=True, text=True, env=environ)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    expected = shown(0)
    assert f"[{not flags}, " in expected
    assert {shown(2) for _ in range(2 if flags else 9)} == {expected}
