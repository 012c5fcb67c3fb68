"""``ShardLoader`` under both contracts of TorchTitan: shapes, steps on any world, resume, ends and refusals."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from streaming import DataLoader, Packed, StreamingDataset
from streaming.errors import ConfigError, StateError
from tests.support.processes.played_ranks import Play, played
from tests.support.programs.titan_like import IGNORED, RELEASES, Training, installed
from tests.support.sets.packed_sets import write

LENGTH = 64
releases = pytest.mark.parametrize("release", RELEASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("titan") / "set"
    write(target, num_docs=120)
    return target


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    return played(monkeypatch)


def loader_class(release: str, patch: pytest.MonkeyPatch) -> Any:
    installed(release, patch)
    patch.setitem(sys.modules, "streaming.integrations.torchtitan", None)
    patch.delitem(sys.modules, "streaming.integrations.torchtitan")
    return importlib.import_module("streaming.integrations.torchtitan").ShardLoader


def merged(ranks: list[Any]) -> list[Counter[Any]]:
    return [Counter(row for rows in step for row in rows) for step in zip(*ranks, strict=True)]


@releases
def test_steps_are_those_of_the_packs_on_any_world_and_resume_on_another(
    folder: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows a step, as four batches of two on one rank, or two on two; killed after some steps, more than once."""
    loader = loader_class(release, monkeypatch)
    config = loader.Config(dataset_path=f"{folder}/", global_batch_size=8, seed=3)
    packed = Packed(StreamingDataset(folder, seed=3), LENGTH, shift_labels=True)
    with DataLoader(packed, global_batch_size=8) as plain:
        per_epoch = len(plain)
        due = [
            Counter(tuple(row) for row in batch["input_ids"].tolist()) for _ in range(3) for batch in plain
        ]  # fmt: skip
    assert per_epoch < 30
    done, state, most = 0, {}, 2 * per_epoch + 2
    for world, wanted in ((1, 2), (2, per_epoch), (4, 3), (1, most)):
        training = Training(release=release, length=LENGTH, rows=2, accumulated=4 // world)
        number = min(wanted, most - done)
        found, states = [], []
        for rank in range(world):
            own = training.build(config, rank, world)
            own.load_state_dict(state)
            found.append(training.steps(own, number))
            states.append(own.state_dict())
            own.close() if hasattr(own, "close") else None
        assert merged(found) == due[done : done + number], (world, done)
        assert all(one == states[0] for one in states), "the same on every rank"
        state, done = json.loads(json.dumps(states[0])), done + number
    assert done == most


@releases
def test_without_a_size_of_steps_each_batch_of_all_ranks_is_one(
    folder: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_class(release, monkeypatch)
    training = Training(release=release, length=LENGTH, rows=2)
    with DataLoader(Packed(StreamingDataset(folder), LENGTH), global_batch_size=4) as plain:
        due = [Counter(tuple(row) for row in batch["input_ids"].tolist()) for batch in plain]
    config = loader.Config(dataset_path=f"{folder}/")
    assert merged([training.steps(training.build(config, rank, 2), len(due)) for rank in range(2)]) == due


@pytest.mark.parametrize(("tokens", "rows", "length"), [(150, 2, 64), (64, 1, 64), (40, 1, 40), (200, 3, 64)])
def test_a_flat_batch_is_filled_up(
    folder: Path, tokens: int, rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_class("2026-08", monkeypatch)
    own = loader.Config(dataset_path=f"{folder}/").build(
        dp_world_size=1, dp_rank=0, max_context_length=64, num_tokens_per_batch=tokens
    )
    with DataLoader(Packed(StreamingDataset(folder), length, shift_labels=True), rows) as plain:
        for (inputs, labels), batch in zip(own, plain, strict=False):
            used = rows * length
            assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (tokens,)
            assert torch.equal(inputs["input"][:used].view(rows, length), batch["input_ids"])
            assert torch.equal(inputs["positions"][:used].view(rows, length), batch["position_ids"])
            assert torch.equal(labels[:used].view(rows, length), batch["labels"])
            assert (labels[used:] == IGNORED).all()
            assert inputs["positions"][used:].tolist() == list(range(tokens - used))


@releases
@pytest.mark.parametrize("option", ["infinite", "repeat"])
def test_a_validation_reads_the_set_once(
    folder: Path, release: str, option: str, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    """Each pack on one rank, and rows that fill the last batch have no labels."""
    loader = loader_class(release, monkeypatch)
    config = loader.Config(dataset_path=f"{folder}/", shuffle=False, **{option: False})
    packed = Packed(StreamingDataset(folder), LENGTH, shift_labels=True)
    found: Counter[Any] = Counter()
    counts = []
    for rank in range(2):
        own = Training(release=release, length=LENGTH, rows=3).build(config, rank, 2)
        batches = list(own)
        counts.append(len(batches))
        for inputs, labels in batches:
            rows = zip(inputs["input"].view(-1, LENGTH), labels.view(-1, LENGTH), strict=True)
            found.update(tuple(ids.tolist()) for ids, label in rows if (label != IGNORED).any())
    assert counts[0] == counts[1] == -(-len(packed) // 6)
    assert set(found.values()) == {1}
    assert found.total() == sum(bool((packed[n]["labels"] != IGNORED).any()) for n in range(len(packed)))


def described(path: Path, folder: Path, packed: dict[str, Any], **more: Any) -> str:
    source = {"url": f"{folder}/", "packed": {"length": LENGTH, **packed}}
    path.write_text(json.dumps({"sources": {"a": source, "b": source}, **more}))
    return str(path)


@releases
def test_a_mixture_of_packs_trains_without_end(
    folder: Path, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_class(release, monkeypatch)
    training = Training(release=release, length=LENGTH, rows=2)
    url = described(tmp_path / "mixture.json", folder, {"shift_labels": True}, weights={"a": 2, "b": 1})
    whole = training.steps(training.build(loader.Config(dataset_path=url), 0, 1), 9)
    own = training.build(loader.Config(dataset_path=url), 0, 1)
    assert training.steps(own, 4) == whole[:4]
    again = training.build(loader.Config(dataset_path=url), 0, 1)
    again.load_state_dict(own.state_dict())
    assert training.steps(again, 5) == whole[4:]
    with pytest.raises(ConfigError, match=r"has no end; leave its weights out"):
        training.build(loader.Config(dataset_path=url, repeat=False), 0, 1)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no set": ({"dataset_path": None}, {}, "expected the URL of a set of tokens"),
    "a step that is no multiple": ({"global_batch_size": 7}, {}, "expected a multiple of 2"),
    "a step of nothing": ({"global_batch_size": 0}, {}, "expected a multiple of 2"),
    "sizes of another release": ({}, {"size_of_batches": 3}, "expected seq_len and local_batch_size"),
}


@releases
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_options_are_refused(folder: Path, release: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, sizes, words = REFUSED[case]
    config = loader_class(release, monkeypatch).Config(**{"dataset_path": f"{folder}/", **options})
    training = Training(release=release, length=LENGTH, rows=2)
    with pytest.raises(ConfigError, match=rf"^ShardLoader.*{words}"):
        config.build(dp_world_size=1, dp_rank=0, **sizes) if sizes else training.build(config, 0, 1)


@releases
def test_sets_that_the_loss_would_misread_are_refused(
    folder: Path, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_class(release, monkeypatch)
    training = Training(release=release, length=LENGTH, rows=2)
    for name, packed in {"unshifted": {}, "other": {"shift_labels": True, "ignore_id": -1}}.items():
        url = described(tmp_path / f"{name}.json", folder, packed)
        with pytest.raises(ConfigError, match=r"compares labels position by position.*\"shift_labels\": true"):
            training.build(loader.Config(dataset_path=url), 0, 1)
    url = described(tmp_path / "length.json", folder, {"shift_labels": True, "length": 32})
    with pytest.raises(ConfigError, match="rows of 64 tokens, but those of this set have 32"):
        next(iter(training.build(loader.Config(dataset_path=url), 0, 1)))


@releases
def test_states_of_other_loaders_are_refused_and_an_empty_one_is_new(
    folder: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(release=release, length=LENGTH, rows=2)
    own = training.build(loader_class(release, monkeypatch).Config(dataset_path=f"{folder}/"), 0, 1)
    own.load_state_dict({})
    with pytest.raises(StateError, match=r"expected a state with the key 'shardstream', got \['dp_rank_0'"):
        own.load_state_dict({"dp_rank_0": b"", "world_size": 1})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process, as meant
@releases
def test_its_state_survives_checkpoints_that_take_dicts_apart(
    folder: Path, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of the middle of a step."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    loader = loader_class(release, monkeypatch)
    config = loader.Config(dataset_path=f"{folder}/", global_batch_size=8)
    training = Training(release=release, length=LENGTH, rows=2)
    whole = training.steps(training.build(config, 0, 1), 9)
    own, again = training.build(config, 0, 1), training.build(config, 0, 1)
    assert training.steps(own, 3) == whole[:3]
    dcp.save({"dataloader": own}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"dataloader": again}, checkpoint_id=tmp_path, no_dist=True)
    assert training.steps(again, 6) == whole[3:]
