"""`shard_tools plan --who` and `--when`: what training got, told from a saved state alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from infra import DeviceMesh
from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import DataLoader, ShuffleConfig, StreamingDataset

NUM, RANKS, G = 101, 3, 10  # a tail of one sample, shares of 3 and 4 rows


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("steps")
    with ShardWriter(f"{folder}/{{:06d}}.tar", max_samples=30) as writer:
        for number in range(NUM):
            writer.write({"__key__": f"k{number:03d}", "txt": "x"})
    return f"{folder}/"


def trained(shards: str, epochs: int, last_batch: str) -> tuple[list[tuple[int, int, str]], dict[str, Any]]:
    """(step, data rank, key) of all samples that ranks get, and the state in the middle of the last epoch."""
    got: list[tuple[int, int, str]] = []
    state: dict[str, Any] = {}
    for rank in range(RANKS):
        mesh = DeviceMesh.from_sizes(dp_size=RANKS, rank=rank)
        dataset = StreamingDataset(shards, shuffle=ShuffleConfig(lanes=2, window=9), seed=5)
        with DataLoader(dataset, global_batch_size=G, device_mesh=mesh, last_batch=last_batch) as loader:
            step = 0
            for epoch in range(epochs):
                for number, batch in enumerate(loader):
                    valid = batch.get("__valid__", [True] * len(batch["__key__"]))
                    got += [(step, rank, key) for key, real in zip(batch["__key__"], valid, strict=True) if real]
                    step += 1
                    if (epoch, number) == (epochs - 1, 3):
                        state = loader.state_dict()
    return sorted(got), state


def run(shards: str, state: Path, *more: object, size: int = G) -> Result:
    arguments = ("plan", shards, "--dp", RANKS, "--global-batch-size", size, "--state", state, *more)
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def told(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
def test_who_and_when_are_what_ranks_got(shards: str, tmp_path: Path, last_batch: str) -> None:
    got, state = trained(shards, 2, last_batch)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    per_epoch = 10 if last_batch == "drop" else 11
    more = ("--last-batch", last_batch, "--json")
    who = told(run(shards, path, "--step", f"0..{2 * per_epoch}", "--who", *more))
    assert (who["at_step"], who["batches_per_epoch"]) == (per_epoch + 4, per_epoch)
    assert sorted((row["step"], row["dp_rank"], row["key"]) for row in who["rows"]) == got
    assert all(row["key"] == f"k{row['number']:03d}" and row["shard"].endswith(".tar") for row in who["rows"])
    for key in {got[0][2], got[-1][2], "k100"}:
        when = told(run(shards, path, "--key", key, "--when", *more))
        expected = [(step, rank) for step, rank, known in got if known == key and step >= per_epoch]
        found = [(row["step"], row["dp_rank"]) for row in when["rows"] if row["epoch"] == 1]
        assert found == expected
        assert (1 in when["left_out"]) == (not expected)


@pytest.mark.parametrize("received", [1, 0])  # the seed waits for epoch 1; or for epoch 0, which has not begun
def test_a_seed_changed_for_the_next_epoch_counts_from_there(shards: str, tmp_path: Path, received: int) -> None:
    path = tmp_path / "state.json"
    with DataLoader(StreamingDataset(shards, seed=5), batch_size=G) as loader:
        first = [key for _, batch in zip(range(received), loader, strict=False) for key in batch["__key__"]]
        loader.seed(77)
        path.write_text(json.dumps(loader.state_dict()))
    with DataLoader(StreamingDataset(shards, seed=77), batch_size=G) as other:
        other.set_epoch(received)
        expected = [key for batch in other for key in batch["__key__"]]
    command = ["plan", shards, "--batch-size", str(G), "--state", str(path), "--step", "0..20", "--who", "--json"]
    rows = [row["key"] for row in json.loads(CliRunner().invoke(cli, command).stdout)["rows"]]
    assert rows[: len(first)] == first
    assert rows[10 * G * received :][: len(expected)] == expected


def test_wrong_usage_and_foreign_states_are_named(shards: str, tmp_path: Path) -> None:
    _, state = trained(shards, 1, "drop")
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    for more in (("--who",), ("--when",), ("--step", 1), ("--key", "k000", "--who"), ("--step", 1, "--who", "--when")):
        result = run(shards, path, *more)
        assert result.exit_code == 2
        assert "--who" in result.output
    for more, word in ((("--step", "1-2", "--who"), "1-2"), (("--step", "5..5", "--who"), "range(5, 5)")):
        result = run(shards, path, *more)
        assert (result.exit_code, word in result.output) == (2, True)
    missing = run(shards, path, "--key", "nobody", "--when")
    assert (missing.exit_code, "nobody" in missing.output) == (1, True)
    path.write_text(json.dumps({**state, "fingerprint": "0" * 16}))
    foreign = run(shards, path, "--step", 1, "--who")
    assert (foreign.exit_code, "0000000000000000" in foreign.output) == (1, True)
    path.write_text("no state")
    broken = run(shards, path, "--step", 1, "--who")
    assert (broken.exit_code, "not JSON" in broken.output) == (1, True)


def test_people_read_lines(shards: str, tmp_path: Path) -> None:
    _, state = trained(shards, 1, "drop")
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    lines = run(shards, path, "--step", 2, "--who").output.splitlines()
    assert lines[0] == "10 steps per epoch; the state continues with step 4"
    assert len(lines) == 1 + G
    assert all(line.startswith("step 2: k") for line in lines[1:])
