"""The program of docs/tickets.md, as it is written: run to its end, and killed on the way, with the state it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset, Tickets
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import blocks

NUM_SAMPLES = 64


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    with ShardWriter("data/prompts/{:02d}.tar", max_samples=8) as writer:
        for row in range(NUM_SAMPLES):
            writer.write({"__key__": f"{row:03d}", "txt": b"x" * (row + 1)})
    (block,) = blocks((ROOT / "docs/tickets.md").read_text())
    return block.code


def test_it_runs_to_its_end(program: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(program, "docs/tickets.md", "exec"), names)
    assert names["tickets"].report() == {
        "acknowledged": NUM_SAMPLES, "dropped": {}, "in_flight": 0, "requeued": 0, "oldest": None
    }  # fmt: skip
    assert names["tickets"].write_scores("scores.jsonl") == NUM_SAMPLES


def test_killed_it_goes_on_where_training_was_on_another_world(program: str) -> None:
    """It ends after some 30 groups; what it trained on and what comes to three ranks are all samples, each once."""
    names: dict[str, Any] = {"trained": []}
    stopped = program.replace(
        "        state = tickets.state_dict() ", "        trained.append(ticket); state = tickets.state_dict() "
    ).replace("while any(", "while len(trained) < 30 and any(")
    assert stopped.count("trained") == 2
    exec(compile(stopped, "docs/tickets.md", "exec"), names)
    state, came = names["state"], []
    for rank in range(3):
        mesh = DeviceMesh.from_sizes(dp_size=3, rank=rank)
        dataset = StreamingDataset("data/prompts")
        again = Tickets(DataLoader(dataset, global_batch_size=8, device_mesh=mesh, agreement_timeout=None))
        again.load_state_dict(state)
        came += [sample["__key__"] for _, sample in again]
    assert len(came) == len(set(came)) == NUM_SAMPLES - len(names["trained"])
    exec(compile(program[program.index("while any(") :], "docs/tickets.md", "exec"), names)
