"""The examples of language models, whole: the same losses after a crash on fewer ranks, and answers that are learnt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, folder: Path) -> str:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environ = {key: value for key, value in os.environ.items() if key not in launcher}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=270,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert [path.name for path in folder.iterdir() if "torchinductor" not in path.name] == []  # torch's own
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])] == []
    return ran.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_pretraining_has_the_same_losses_after_a_crash_on_fewer_ranks(tmp_path: Path) -> None:
    said = run("pretrain_gpt.py", tmp_path)
    killed = re.search(r"two ranks: killed at step (\d+)", said)
    resumed = re.search(r"one rank: went on at step (\d+) to 23", said)
    assert killed is not None, said
    assert resumed is not None, said
    assert 8 <= int(resumed[1]) <= int(killed[1]) + 1, said  # at step 10, or a little later on a busy machine
    assert "the same loss curve" in said


@pytest.mark.slow
def test_answers_are_learnt_from_masked_conversations(tmp_path: Path) -> None:
    said = run("finetune_chat.py", tmp_path)
    found = re.search(r"loss on the answers: ([\d.]+) to ([\d.]+)", said)
    assert found is not None
    assert float(found[2]) < float(found[1]) / 2
