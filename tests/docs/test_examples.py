"""The examples, shortened: they learn, draw a picture, and go on after a kill, on fewer ranks too."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from tests.support.code.folders import EXAMPLES
from tests.support.processes.forked import Forked, ForkedProcess
from tests.support.processes.killed_programs import killed_at_checkpoint
from tests.support.processes.leftovers import commands_about
from tests.support.processes.waiting import until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]  # the examples learn, up to three of them in a test

PROGRAM = """
import os, runpy, sys
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(name, None)
    if f"AS_{name}" in os.environ:
        os.environ[name] = os.environ[f"AS_{name}"]
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
NOTEBOOK = """
import sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], as_version=4)
book.cells.append(nbformat.v4.new_code_cell("print(accuracies[-1])"))
NotebookClient(book, timeout=700, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(book, sys.argv[2] + "/done.ipynb")
"""


def start(
    forked: Forked, name: str, folder: Path, *arguments: str, killed_at: int = 0, **environ: str
) -> ForkedProcess:
    """Start an example in this folder; what it prints is added to ``output`` there, its temporary files to another.

    It may be killed when it writes the checkpoint of a number.
    """
    (folder / "temporary").mkdir(exist_ok=True)
    environ["TMPDIR"] = str(folder / "temporary")
    words = (str(EXAMPLES / name), "--out", str(folder / "out"), *arguments)
    program = killed_at_checkpoint(killed_at, PROGRAM) if killed_at else PROGRAM
    return forked.start(program, *words, output=folder / "output", environ=environ, leads=True)


def run(forked: Forked, name: str, folder: Path, *arguments: str, **environ: str) -> str:
    """What the example prints; it leaves nothing running, and nothing outside of its folder."""
    example = start(forked, name, folder, *arguments, **environ)
    assert example.wait_for_all(800) == 0, (folder / "output").read_text()
    left = [path.name for path in (folder / "temporary").iterdir() if "torchinductor" not in path.name]  # torch's own
    assert left == []
    until(lambda: not commands_about(folder), "all processes end", details=lambda: commands_about(folder))
    said = (folder / "output").read_text()
    pictures = re.findall(r"picture: (\S+)", said)
    assert pictures != []
    for picture in pictures:
        assert Path(picture).parent == folder / "out"
        check_picture(picture)
    return said


def check_picture(picture: str) -> None:
    """It shows something: it is large, and of several colours."""
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("L"))
    assert min(pixels.shape) >= 200
    assert (pixels < 200).mean() > 0.005, "an empty picture"


def test_pictures_are_learnt_from_class_folders_after_a_kill_too(forked: Forked, tmp_path: Path) -> None:
    example = start(forked, "train_images.py", tmp_path, "--epochs", "4", killed_at=13)  # five an epoch
    assert example.wait(800) == -signal.SIGKILL, example.output.read_text()
    said = run(forked, "train_images.py", tmp_path, "--epochs", "4")
    assert "goes on in epoch 2\n" in said
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", said)]
    assert len(accuracies) == 4, said
    assert accuracies[-1] > 60  # by chance 10


def test_pictures_find_their_captions(forked: Forked, tmp_path: Path) -> None:
    said = run(forked, "train_pairs.py", tmp_path, "--epochs", "4")
    found = re.findall(r"([\d.]+)% find their caption", said)
    assert len(found) == 4
    assert float(found[-1]) > 30  # by chance 0.7


@pytest.mark.distributed
def test_pretraining_has_the_same_losses_after_a_crash_on_fewer_ranks(forked: Forked, tmp_path: Path) -> None:
    calm, crashed = tmp_path / "calm", tmp_path / "crashed"
    for folder in (calm, crashed):
        folder.mkdir()
    said = run(forked, "pretrain_gpt.py", calm, "--steps", "64")
    losses = re.findall(r"loss on (\w+): ([\d.]+) to ([\d.]+)", said)
    assert [name for name, _, _ in losses] == ["asyncio", "modules", "reference"]
    assert all(float(after) < float(before) - 0.3 for _, before, after in losses), said

    for name in ("sets", "tokenizer.json"):
        copy = shutil.copytree if name == "sets" else shutil.copy
        (crashed / "out").mkdir(exist_ok=True)
        copy(calm / "out" / name, crashed / "out" / name)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # such as torchrun has
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "AS_WORLD_SIZE": "2"}
    world |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    words = ("pretrain_gpt.py", crashed, "--steps", "64")
    two = [
        start(forked, *words, killed_at=3 * (rank == 0), AS_RANK=str(rank), AS_LOCAL_RANK=str(rank), **world)
        for rank in range(2)
    ]
    assert two[0].wait(800) == -signal.SIGKILL, two[0].output.read_text()
    two[1].kill()  # or it has failed, left alone
    two[1].wait()
    said = run(forked, *words)
    assert "goes on at step 16 on 1 rank" in said, said  # of 8 steps each, the third was not whole
    one, other = (torch.stack(torch.load(at / "out" / "checkpoint.pt")["history"]) for at in (calm, crashed))
    assert one.shape == (64, 2, 3)
    torch.testing.assert_close(other, one, rtol=0, atol=1e-9)
    share_of_prose = one[:, 1, 2]
    assert share_of_prose[:16].mean() < 0.25
    assert share_of_prose[-16:].mean() > 0.45


def test_answers_are_learnt_from_masked_conversations(forked: Forked, tmp_path: Path) -> None:
    said = run(forked, "finetune_chat.py", tmp_path, "--epochs", "2")
    for what in ("the answers", "answers that were held out"):
        found = re.search(rf"loss on {what}: ([\d.]+) to ([\d.]+)", said)
        assert found is not None
        assert float(found[2]) < float(found[1]) / 2


@pytest.mark.distributed
def test_torchrun_goes_on_with_one_of_two_nodes_and_every_sample_counts_once(forked: Forked, tmp_path: Path) -> None:
    said = run(forked, "elastic.py", tmp_path, PYTHON_EXEC=forked.python)  # torchrun's name for the ranks' interpreter
    teams = re.findall(r"(\d) process\(es\): steps (\d+) to (\d+), (\d+) of them once more", said)
    assert teams[0][:2] == ("2", "1"), said
    assert teams[-1][0] == "1"
    assert 97 <= int(teams[-2][2]) < int(teams[-1][2]) == 4 * 57
    assert "missing: 0, doubled: 0\neach of 1,797 samples, in each of 4 epochs: True" in said


def test_the_count_of_the_elastic_job_notices_what_is_missing_or_doubled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = runpy.run_path(str(EXAMPLES / "elastic.py"))
    names["count"].__globals__["EPOCHS"] = 1

    def counted(*last: str) -> bool:
        for name, step, keys in (("1-0", 1, ["0000"]), ("1-1", 1, ["0001"]), ("1-0", 2, ["0002"]), ("2-0", 2, last)):
            line = json.dumps({"step": step, "epoch": 0, "keys": keys, "loss": 1.0})
            with (tmp_path / f"seen-{name}.jsonl").open("a" if step == 2 and name == "1-0" else "w") as file:
                file.write(f"{line}\n" + '{"step": 3, "ep' * (name == "2-0"))  # killed while writing
        return bool(names["count"](tmp_path, 4))

    assert counted("0002", "0003")
    assert not counted("0003")
    assert not counted("0002", "0003", "0001")
    assert "missing: 1, doubled: 0" in (said := capsys.readouterr().out)
    assert "missing: 0, doubled: 1" in said


def test_the_notebook_runs_and_shows_pictures(forked: Forked, tmp_path: Path) -> None:
    notebook = EXAMPLES / "look_at_a_data_set.ipynb"
    written = json.loads(notebook.read_text())
    assert [cell for cell in written["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
    shutil.copy(notebook, tmp_path)
    environ = {
        name: str(tmp_path / name) for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")
    }
    (tmp_path / "TMPDIR").mkdir()
    words = (str(tmp_path / notebook.name), str(tmp_path))
    kernel = forked.start(NOTEBOOK, *words, output=tmp_path / "output", environ=environ, leads=True)
    assert kernel.wait_for_all(800) == 0, (tmp_path / "output").read_text()
    outputs = [
        output
        for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"]
        for output in cell.get("outputs", ())
    ]
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", ())]
    assert len(pictures) == 5
    assert min(map(len, pictures)) > 4000
    said = "".join("".join(output.get("text", ())) for output in outputs)
    assert "300 samples" in said
    assert "gray or CMYK among RGB images: field jpg: gray 0.3%" in said
    assert float(said.split()[-1]) > 0.6  # by chance 0.33
    (picture,) = re.findall(r"picture: (\S+)", said)
    check_picture(picture)
