"""The examples of language models, whole: the same losses after a crash on fewer ranks, and answers that are learnt."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from folders import EXAMPLES
from forked import Forked

PROGRAM = """
import os, runpy, sys
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(name, None)
sys.executable = os.environ.get("STAND_IN", sys.executable)
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run(forked: Forked, name: str, folder: Path, **environ: str) -> str:
    """What the example prints; the ranks that it starts are forked where ``STAND_IN`` is given."""
    temporary, output = folder / "temporary", folder / "output"
    temporary.mkdir()
    environ["TMPDIR"] = str(temporary)
    example = forked.start(PROGRAM, str(EXAMPLES / name), output=output, environ=environ, leads=True)
    try:
        assert example.wait(270) == 0, output.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(example.pid, signal.SIGKILL)
    left = [path.name for path in temporary.iterdir() if "torchinductor" not in path.name]  # torch's own
    assert left == []
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(temporary) in command] == []
    return output.read_text()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", ["forked", pytest.param("interpreters", marks=pytest.mark.matrix)])
def test_pretraining_has_the_same_losses_after_a_crash_on_fewer_ranks(
    forked: Forked, tmp_path: Path, ranks: str
) -> None:
    environ = {"STAND_IN": forked.python} if ranks == "forked" else {}
    said = run(forked, "pretrain_gpt.py", tmp_path, **environ)
    killed = re.search(r"two ranks: killed at step (\d+)", said)
    resumed = re.search(r"one rank: went on at step (\d+) to 23", said)
    assert killed is not None, said
    assert resumed is not None, said
    assert 8 <= int(resumed[1]) <= int(killed[1]) + 1, said  # at step 10, or a little later on a busy machine
    assert "the same loss curve" in said
    shares = {name: float(share) for name, share in re.findall(r"(\w+) ([\d.]+)%", said)}
    assert shares == pytest.approx({"modules": 25, "asyncio": 50, "reference": 25}, abs=0.5)


@pytest.mark.slow
def test_answers_are_learnt_from_masked_conversations(forked: Forked, tmp_path: Path) -> None:
    said = run(forked, "finetune_chat.py", tmp_path)
    found = re.search(r"loss on the answers: ([\d.]+) to ([\d.]+)", said)
    assert found is not None
    assert float(found[2]) < float(found[1]) / 2
