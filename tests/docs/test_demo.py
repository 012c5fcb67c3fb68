"""``make demo``, whole: crash, resume on another number of processes, and the count of what was received."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.code.folders import EXAMPLES
from tests.support.processes.forked import Forked
from tests.support.processes.leftovers import commands_about
from tests.support.processes.waiting import until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # the demo trains for a minute, on an idle machine


def example(name: str) -> ModuleType:
    """A script of ``examples/`` as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PROGRAM = """
import os, runpy, sys
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DEMO_URL"):
    os.environ.pop(name, None)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", ["forked", pytest.param("interpreters", marks=pytest.mark.matrix)])
def test_the_demo_passes_and_leaves_nothing_running(forked: Forked, tmp_path: Path, ranks: str) -> None:
    """What resumes is an interpreter of its own; the two ranks before it, which torchrun starts, need not be."""
    output, environ = tmp_path / "output", {"DEMO_OUT": str(tmp_path / "out")}
    if ranks == "forked":
        environ["PYTHON_EXEC"] = forked.python  # torchrun's name for the interpreter of the ranks
    demo = forked.start(PROGRAM, str(EXAMPLES / "demo.py"), output=output, environ=environ, leads=True)
    assert demo.wait_for_all(800) == 0, output.read_text()
    until(lambda: not commands_about(tmp_path), "all processes end", details=lambda: commands_about(tmp_path))
    said = output.read_text()
    killed = re.search(r"SIGKILL to every process, in epoch (\d+) after step (\d+) of (\d+)", said)
    assert killed is not None
    epoch, step, num_steps = map(int, killed.groups())
    assert (8, 0.4 * num_steps) <= (epoch, step) < (19, 0), "as soon as it has said so, or a little later"
    assert "every sample of every epoch was seen exactly once: 20 epochs x 1,437 samples" in said
    accuracy = re.search(r"test accuracy: ([\d.]+)%", said)
    assert accuracy is not None
    assert float(accuracy[1]) >= 97


def test_the_count_notices_what_is_missing_twice_or_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = example("demo")
    monkeypatch.setattr(demo, "OUT", tmp_path)
    monkeypatch.setattr(demo, "EPOCHS", 2)
    logs = tmp_path / "keys"
    logs.mkdir()

    def counted(second_epoch: list[str]) -> bool:
        lines = [{"epoch": 0, "step": 1, "keys": ["a", "b"]}, {"epoch": 1, "step": 2, "keys": second_epoch}]
        (logs / "run00-rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return bool(demo.count_keys(["a", "b"]))

    assert counted(["b", "a"])
    assert not counted(["a"])
    assert not counted(["a", "b", "b"])
    assert not counted(["a", "c"])
    assert "epoch 1: 1 samples missing, 1 too many" in capsys.readouterr().out


def test_steps_after_the_checkpoint_are_cut_off_the_logs(tmp_path: Path) -> None:
    training = example("train_digits")
    for rank, last in ((0, 4), (1, 3)):
        log = training.KeyLog(tmp_path, 0, rank)
        for step in range(1, last + 1):
            log.add(epoch=0, step=step, keys=[f"{rank}-{step}"])
        log.close()
    with (tmp_path / "run00-rank0.jsonl").open("a") as file:
        file.write('{"epoch": 0, "st')  # killed while writing
    training.KeyLog.discard_after(tmp_path, 3)
    kept = [[json.loads(line)["step"] for line in path.read_text().splitlines()] for path in sorted(tmp_path.iterdir())]
    assert kept == [[1, 2, 3], [1, 2, 3]]
    training.KeyLog.discard_after(tmp_path, 0)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0, 0]
