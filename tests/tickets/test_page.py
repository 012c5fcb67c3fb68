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
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of the page."""
    monkeypatch.chdir(tmp_path)
    with ShardWriter("data/prompts/{:02d}.tar", max_samples=8) as writer:
        for row in range(NUM_SAMPLES):
            writer.write({"__key__": f"{row:03d}", "txt": b"x" * (row + 1)})
    return [block.code for block in blocks((ROOT / "docs/tickets.md").read_text())]


@pytest.fixture
def program(programs: list[str]) -> str:
    """The program of tickets."""
    return programs[0]


def test_groups_of_repeated_rows_stay_whole_on_ranks_and_in_micro_batches(programs: list[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(programs[1], "docs/tickets.md", "exec"), names)
    options = {"global_batch_size": 9, "collate_fn": names["in_groups"], "agreement_timeout": None}
    for rank in range(2):
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=rank)
        dataset = StreamingDataset("data/prompts")
        with DataLoader(dataset, micro_batch_size=2, device_mesh=mesh, **options) as loader:
            for batch in loader:
                groups = [batch["prompt"][at : at + 8] for at in range(0, len(batch["prompt"]), 8)]
                assert all(len(group) == 8 and len(set(group)) == 1 for group in groups)


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
